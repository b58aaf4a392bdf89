"""`Checkpointer`, with the calls of version 1: saves the steps of a run, keeps some of them, and loads them."""

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any, Self

from ... import formats, stores
from ..._pytree.devices import encode_metrics
from ...errors import CorruptError, UnsupportedError
from ..errors import StepAlreadyExistsError, UnsupportedValueError, warn_unused
from ..manager import CheckpointManager
from ..manager_items import ManagerItems, agree
from ..namespaces import unsupported_name as unsupported
from ..options import AsyncOptions, CheckpointManagerOptions
from ..policies import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    PreservationPolicy,
    PreserveAll,
    SaveDecisionPolicy,
)
from ..step import as_standard
from . import saving
from .context import Context, get_context
from .saving import STATE, AsyncResponse, check_names, deprecated
from .step_reader import Step, StepReader, step_number


class CheckpointableItems(ManagerItems):
    """The items of a manager whose arguments are checkpointables by name. `context` has the options of its saves."""

    def __init__(self, context: Context):
        super().__init__(None, None, None, None)
        self.context = context
        self.several = True

    def to_save(self, given: Any, save_kwargs: Any, args: Any) -> Any:
        """Returns the checkpointables."""
        return args

    def tree(self, args: Any, *, for_orbax: bool) -> Any:
        """Returns the tree of checkpointables."""
        return saving.tree_of(args, get_context(self.context), for_orbax=for_orbax)


class Checkpointer(StepReader):
    """Saves the steps of a run, keeps those that are wanted, and loads them.

    context: the options of all calls, unless a context is entered; by default the context that is entered now.
    save_decision_policy: says which steps are saved; by default each that comes while no save is running.
    preservation_policy: says which steps stay, besides the newest; by default all.
    step_name_format: the names of steps, see `path.step`.
    custom_metadata: JSON, recorded for the run once.

    `logger` has no effect, which is logged. Treering always removes the leftovers of killed saves
    (`cleanup_tmp_directories`), and reads no metadata when a Checkpointer is made (`lightweight_initialize`).
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
        logger: Any = None,
    ):
        context = Context(context or get_context()).check()
        warn_unused(
            "Checkpointer", write_concurrent_bytes=(context.memory.write_concurrent_bytes, None), logger=(logger, None)
        )
        callback = context.asynchronous.post_finalization_callback
        options = CheckpointManagerOptions(
            save_decision_policy=save_decision_policy
            or AnySavePolicy([InitialSavePolicy(), ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()]),
            preservation_policy=preservation_policy or PreserveAll(),
            step_name_format=as_standard(step_name_format),
            cleanup_tmp_directories=cleanup_tmp_directories,
            lightweight_initialize=lightweight_initialize,
            file_options=context.file,
            async_options=AsyncOptions(post_finalization_callback=callback),
        )
        manager = CheckpointManager(directory, options=options, metadata=custom_metadata, write=context.write)
        self._items = manager._items = CheckpointableItems(context)
        super().__init__(manager, context)

    def should_save(self, step: Step) -> bool:
        """Returns True if `save` would save the step: it is newer than the newest, and the policy wants it."""
        return self._manager.should_save(step_number(step))

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

        Returns None if nothing is saved. Raises `StepAlreadyExistsError`, which is a `FileExistsError` and a
        `ValueError`, for a step that exists, also with `overwrite` if it is in the other format, and the errors of
        `save_checkpointables`.
        """
        context = get_context(self._context).check()
        args = check_names(checkpointables)
        if not force and not overwrite and self._manager._is_new(step) and not self._manager.should_save(step):
            return None  # A loop calls this at every step, so no directory is listed.
        encode_metrics(metrics)  # Orbax saves them, so those that a checkpoint cannot have are an error.
        exists = self._exists(step, "save")
        if exists and not overwrite:
            raise StepAlreadyExistsError(f"{self._run.path(step)}: step {step} exists; pass overwrite=True")
        with context:
            if exists:
                self._run.wait()
                self._check_replaceable(step)
                given: dict[str, Any] = {"metrics": metrics, "metadata": custom_metadata, "on_exists": "overwrite"}
                tree = self._items.tree(args, for_orbax=self._run.writes_orbax)
                self._run.save(step, tree, force=True, **given)
            elif not self._manager.save(step, metrics=metrics, force=force, args=args, custom_metadata=custom_metadata):
                return None
        self._is_changing = True
        return AsyncResponse(self._wait)

    def _exists(self, step: int, call: str) -> bool:
        """Returns True in all processes if process 0 sees a step, or saves it."""
        return agree(f"{call}({self._run.directory!r}, {step})", lambda: step in self._manager.all_steps())

    def _check_replaceable(self, step: int) -> None:
        """Raises `StepAlreadyExistsError` for a step in another format than that of new steps."""
        ours = "orbax" if self._run.writes_orbax else "treering"

        def find() -> tuple[str, str]:
            path = self._run.path(step)
            with contextlib.suppress(UnsupportedError, CorruptError):  # It is missing or damaged: the save replaces it.
                return path, formats.detect(stores.get(path), path).name
            return path, ours

        path, found = agree(f"format of step {step} in {self._run.directory!r}", find)
        if found != ours:
            raise StepAlreadyExistsError(
                f"{path}: expected a step in the format {ours!r} to replace, found one in {found!r}; "
                f"delete step {step} first"
            )

    def _wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while end is not None and self._run.is_saving:
            if time.monotonic() > end:
                raise TimeoutError(f"{self._run.directory}: the save is not over after {timeout} seconds; it continues")
            time.sleep(0.01)
        self._manager.wait_until_finished()
        return True

    def delete(self, step: Step, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
        """Deletes a step. Returns True if it existed.

        Raises `NotFoundError`, which is a `FileNotFoundError`, if it does not exist, unless `missing_ok`, and
        `UnsupportedValueError` for a `checkpointable_name`.
        """
        if checkpointable_name is not None:
            raise UnsupportedValueError(f"checkpointable_name={checkpointable_name!r}: only entire steps are deleted")
        if missing_ok and not self._exists(step_number(step), "delete"):
            return False
        self._manager.delete(step_number(step))
        self._is_changing = True
        return True

    def delete_async(self, step: Step, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> Any:
        """Is not supported. Raises `UnsupportedError`."""
        raise unsupported("v1.training.Checkpointer.delete_async")

    def cancel(self, step: Step = None) -> None:
        """Is not supported. Raises `UnsupportedError`."""
        raise unsupported("v1.training.Checkpointer.cancel")

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
