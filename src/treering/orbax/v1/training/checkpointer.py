"""`Checkpointer`, with the calls of version 1: saves the steps of a run, keeps some of them, and loads them."""

import datetime
import os
import time
from collections.abc import Mapping
from typing import Any, Self

from ...hints import warn_unused
from ...manager import CheckpointManager
from ...manager_options import AsyncOptions, CheckpointManagerOptions
from ...preservation import PreservationPolicy, PreserveAll
from ...save_decisions import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
)
from ..context import Context, get_context
from ..describing import checkpointables_metadata, metadata
from ..loading import load, load_checkpointables
from ..metadata_types import as_nanoseconds
from ..path.step import as_standard
from ..responses import AsyncResponse
from ..saving import STATE, check_names, deprecated
from .checkpointables import CheckpointableItems
from .errors import StepAlreadyExistsError, StepNotFoundError
from .metadata import CheckpointMetadata, RootMetadata

Step = int | CheckpointMetadata[Any] | None


class Checkpointer:
    """Saves the steps of a run, keeps those that are wanted, and loads them.

    context: the options of all calls, unless a context is entered; by default the context that is entered now.
    save_decision_policy: says which steps are saved; by default each that comes while no save is running.
    preservation_policy: says which steps stay, besides the newest; by default all.
    step_name_format: the names of steps, see `path.step`.
    custom_metadata: JSON, recorded for the run once.

    Treering always removes the leftovers of killed saves (`cleanup_tmp_directories`), and reads no metadata when a
    Checkpointer is made (`lightweight_initialize`).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        context: Context | None = None,
        save_decision_policy: SaveDecisionPolicy | None = None,
        preservation_policy: PreservationPolicy | None = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
    ):
        self._context = Context(context or get_context()).check()
        warn_unused("Checkpointer", write_concurrent_bytes=(self._context.memory.write_concurrent_bytes, None))
        callback = self._context.asynchronous.post_finalization_callback
        options = CheckpointManagerOptions(
            save_decision_policy=save_decision_policy
            or AnySavePolicy([InitialSavePolicy(), ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()]),
            preservation_policy=preservation_policy or PreserveAll(),
            step_name_format=as_standard(step_name_format),
            cleanup_tmp_directories=cleanup_tmp_directories,
            lightweight_initialize=lightweight_initialize,
            async_options=AsyncOptions(post_finalization_callback=callback),
        )
        self._manager = CheckpointManager(
            directory, options=options, metadata=custom_metadata, write=self._context.write
        )
        self._items = self._manager._items = CheckpointableItems(self._context)
        self._run = self._manager._run
        self._known: list[CheckpointMetadata[None]] | None = None  # read from the directory, and what saves add
        self._under_way: CheckpointMetadata[None] | None = None

    @property
    def directory(self) -> Any:
        """The directory of the run, as a path."""
        return self._context.path(self._run.directory)

    @property
    def latest(self) -> CheckpointMetadata[None] | None:
        """The newest of `checkpoints`, or None."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def checkpoints(self) -> list[CheckpointMetadata[None]]:
        """The steps of the run and the one that is being saved, ascending. `reload` and saves read them again."""
        if self._known is None or self._under_way is not None:
            if not self._run.is_saving:
                self._under_way = None
            self._known = [self._described(one.step, one.time, one.metrics) for one in self._run.infos()]
        under_way = self._under_way
        if under_way is None or any(one.step == under_way.step for one in self._known):
            return list(self._known)
        return sorted([*self._known, under_way], key=lambda one: one.step)

    def _described(self, step: int, when: datetime.datetime, metrics: Any) -> CheckpointMetadata[None]:
        path = self._context.path(self._run.path(step))
        return CheckpointMetadata(
            step, path, metadata=None, metrics=metrics, commit_timestamp_nsecs=as_nanoseconds(when)
        )

    def should_save(self, step: Step) -> bool:
        """Returns True if `save` would save the step: it is newer than the newest, and the policy wants it."""
        return self._manager.should_save(_number(step))

    def save(self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any) -> bool:
        """Saves a tree and waits; see `save_checkpointables_async`. Returns True if the step is saved."""
        response = self.save_async(step, state, checkpointable_name=checkpointable_name, **options)
        return response is not None and response.result()

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> AsyncResponse[bool] | None:
        """Saves a tree in the background; see `save_checkpointables_async`."""
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **options)

    def save_checkpointables(self, step: int, checkpointables: dict[str, Any], **options: Any) -> bool:
        """Saves checkpointables and waits; see `save_checkpointables_async`. Returns True if the step is saved."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and response.result()

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse[bool] | None:
        """Saves checkpointables in the background if `should_save` says so, or in any case with `force`.

        overwrite: replaces the step if it exists, whatever the policy says. The old one stays until the new one is
            durable.
        metrics: numbers by name. custom_metadata: JSON, recorded with the step.

        Returns None if nothing is saved. Raises `StepAlreadyExistsError` for a step that exists, which is a
        `FileExistsError` and a `ValueError`, and the errors of `save_checkpointables`.
        """
        context = get_context(self._context).check()
        args = check_names(checkpointables)
        exists = step in self._manager.all_steps()
        if exists and not overwrite:
            raise StepAlreadyExistsError(f"{self._run.path(step)}: step {step} exists; pass overwrite=True")
        with context:
            if exists:
                self._run.wait()
                given: dict[str, Any] = {"metrics": metrics, "metadata": custom_metadata, "on_exists": "overwrite"}
                tree = self._items.tree(args, for_orbax=self._run.writes_orbax)
                self._run.save(step, tree, force=True, **given)
            elif not self._manager.save(step, metrics=metrics, force=force, args=args, custom_metadata=custom_metadata):
                return None
        self._under_way = self._described(step, datetime.datetime.now(datetime.UTC), metrics)
        return AsyncResponse(self._wait)

    def _wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while end is not None and self._run.is_saving:
            if time.monotonic() > end:
                raise TimeoutError(f"{self._run.directory}: the save is not over after {timeout} seconds; it continues")
            time.sleep(0.01)
        self._manager.wait_until_finished()
        return True

    def load(self, step: Step = None, abstract_state: Any = None, *, checkpointable_name: str = STATE) -> Any:
        """Loads the tree of a step, by default the latest; see `treering.orbax.v1.load`.

        Raises `StepNotFoundError`, which is a `FileNotFoundError`.
        """
        found = self._existing(step)
        with get_context(self._context):
            return load(found.path, abstract_state, checkpointable_name=checkpointable_name)

    def load_checkpointables(self, step: Step = None, abstract_checkpointables: Any = None) -> dict[str, Any]:
        """Loads checkpointables of a step, by default the latest; see `treering.orbax.v1.load_checkpointables`."""
        found = self._existing(step)
        with get_context(self._context):
            return load_checkpointables(found.path, abstract_checkpointables)

    def load_async(self, step: Step = None, abstract_state: Any = None) -> Any:
        """Is not supported, as in Orbax itself."""
        raise NotImplementedError("load_async: not supported; use load")

    def load_checkpointables_async(self, step: Step = None, abstract_checkpointables: Any = None) -> Any:
        """Is not supported, as in Orbax itself."""
        raise NotImplementedError("load_checkpointables_async: not supported; use load_checkpointables")

    def metadata(self, step: Step = None) -> CheckpointMetadata[Any]:
        """Returns the metadata of the tree of a step, by default the latest."""
        return self._metadata(step, metadata)

    def checkpointables_metadata(self, step: Step = None) -> CheckpointMetadata[dict[str, Any]]:
        """Returns the metadata of the checkpointables of a step, by default the latest."""
        return self._metadata(step, checkpointables_metadata)

    def _metadata(self, step: Step, describe: Any) -> CheckpointMetadata[Any]:
        found = self._existing(step)
        with get_context(self._context):
            about = vars(describe(found.path))
        return CheckpointMetadata(found.step, metrics=found.metrics, **about)

    def root_metadata(self) -> RootMetadata:
        """Returns the metadata of the run."""
        return RootMetadata(directory=self.directory, custom_metadata=self._manager.metadata().custom_metadata)

    def _existing(self, step: Step) -> CheckpointMetadata[None]:
        if step is None:
            if self.latest is None:
                raise StepNotFoundError(f"{self._run.directory}: expected a step, found none")
            return self.latest
        found = next((one for one in self.checkpoints if one.step == _number(step)), None)
        if found is None:
            steps = [one.step for one in self.checkpoints]
            raise StepNotFoundError(f"{self._run.directory}: expected step {_number(step)}, found {steps}")
        return found

    def delete(self, step: Step) -> None:
        """Deletes a step. Raises `NotFoundError`, which is a `FileNotFoundError`, if it does not exist."""
        self._manager.delete(_number(step))
        self._known = None

    def reload(self) -> None:
        """Reads the steps again, in case another process has changed the directory."""
        self._manager.reload()
        self._known = None

    def is_saving_in_progress(self) -> bool:
        """Returns True while a save is running."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until every save is committed, and superfluous steps are deleted. Raises the error of a failed save."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits as `wait` does, and ends the saving. Loading still works."""
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self._manager.__exit__(kind, error, traceback)

    def save_pytree(self, *args: Any, **kwargs: Any) -> bool:
        """Does what `save` does. Deprecated."""
        deprecated("save")
        return self.save(*args, **kwargs)

    def save_pytree_async(self, *args: Any, **kwargs: Any) -> AsyncResponse[bool] | None:
        """Does what `save_async` does. Deprecated."""
        deprecated("save_async")
        return self.save_async(*args, **kwargs)

    def load_pytree(self, *args: Any, **kwargs: Any) -> Any:
        """Does what `load` does. Deprecated."""
        deprecated("load")
        return self.load(*args, **kwargs)

    def load_pytree_async(self, *args: Any, **kwargs: Any) -> Any:
        """Does what `load_async` does. Deprecated."""
        deprecated("load_async")
        return self.load_async(*args, **kwargs)

    def pytree_metadata(self, *args: Any, **kwargs: Any) -> CheckpointMetadata[Any]:
        """Does what `metadata` does. Deprecated."""
        deprecated("metadata")
        return self.metadata(*args, **kwargs)


def _number(step: Any) -> int:
    return step.step if isinstance(step, CheckpointMetadata) else step
