"""`CheckpointManager`, with the calls of Orbax: saves the steps of a run, keeps some of them, and restores them."""

import contextlib
import dataclasses
import datetime
import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import treering as tr

from .._core.leaf_paths import join_names
from .._processes.coordinator import is_multi_process
from .._pytree.devices import encode_metrics
from ..errors import MismatchError
from . import items as items_module
from . import multihost
from .errors import StepAlreadyExistsError
from .manager_items import ManagerItems, agree
from .metadata import RootMetadata, step_metadata
from .options import CheckpointManagerOptions, best_of, preservation_policy, restrict, save_policy
from .policies import CheckpointInfo, DecisionContext, as_keep, decides_alike
from .run import OrbaxRun, as_path, directory_of

_log = logging.getLogger("treering")


class CheckpointManager:
    """Saves the steps of a run in the background, keeps those that are wanted, and restores them.

    The arguments are those of Orbax's class. `write="orbax"`, or the environment variable
    ``TREERING_ORBAX_WRITE=orbax``, writes new steps in the format of Orbax.

    `checkpointers` (the old style) and `item_handlers` name the handlers of the items; `handler_registry` adds handlers
    of your own. `logger` has no effect.

    With ``create=False`` or ``read_only=True`` a missing directory is one without steps.

    Raises `UnsupportedError` for options that cannot be honored.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        write: str | None = None,
    ):
        self._options = options = options or CheckpointManagerOptions()
        self._items = ManagerItems(checkpointers, item_names, item_handlers, handler_registry)
        self._save_policy, self._best = save_policy(options), best_of(options)
        keep = as_keep(preservation_policy(options))
        self._run = OrbaxRun(directory_of(directory), options, write, keep, on_save=_on_commit(options))
        if logger is not None:
            _log.warning("CheckpointManager: logger= has no effect; Treering logs to the logger 'treering'")
        self._run.check_layout()
        self._run.make_root(options)
        self._last_begun: CheckpointInfo | None = None
        self._unchecked: int | None = None  # the step of the last save, until a later call looks if it succeeded
        self._steps: list[int] | None = None  # those at the last look; None after a change
        self._has_logged_skip = self._has_logged_metrics = False
        # `should_save` is asked at every step, so it looks at no directory. A process that sees the disk of its peers
        # late must not decide otherwise than they do.
        self._latest = self.latest_step() if options.read_only else agree(f"steps of {directory!r}", self.latest_step)
        self._latest_before = self._latest  # the same before the last save
        self._metadata = dict(metadata or {})
        if metadata is not None and options.save_root_metadata and not options.read_only:
            self._run.save_metadata(metadata)

    @property
    def directory(self) -> Any:
        """The directory of the run, as a path."""
        return as_path(self._run.directory)

    # Steps

    def all_steps(self, read: bool = False) -> list[int]:
        """Returns the committed steps and those that are being saved, ascending.

        Steps of other processes are seen after `reload`, or with `read`.
        """
        if read:
            self.reload()
        if self._run.is_saving or self._steps is None:
            steps = self._run.steps
            self._steps = None if self._run.is_saving else steps
            return list(steps)
        return list(self._steps)

    def latest_step(self) -> int | None:
        """Returns the newest of `all_steps`; None if there is none."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step that is best by `best_fn`, or without one the latest. NaN is never better than a number."""
        if self._best is None:
            return self.latest_step()
        self._wait()
        ranked = self._best.ranked(self._run.infos())
        return ranked[0].step if ranked else None

    def reload(self) -> None:
        """Reads the steps again, in case another process has changed the directory.

        A job of several processes that saves does not take new steps of other jobs into account for `should_save`.
        """
        self._steps = None
        if self._options.read_only or not is_multi_process():
            self._latest = self.latest_step()

    def reached_preemption(self, step: int) -> bool:
        """Returns True at the step at which JAX tells all processes to stop; only in a job of several processes."""
        return multihost.reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Returns True if `save` would save the step: it is newer than the newest, and the policy wants it."""
        step = operator.index(step)
        if self._options.read_only:
            _log.warning("%s: read_only=True, so step %d is not saved", self._run.directory, step)
            return False
        if not self._is_new(step):
            if not self._has_logged_skip:
                self._has_logged_skip = True
                _log.warning(
                    "%s: step %d is not saved, because step %d exists; this and later steps up to it are skipped",
                    self._run.directory, step, self._latest,
                )  # fmt: skip
            return False
        return self._decide(step)

    def _is_new(self, step: int) -> bool:
        """Returns True for a step after the latest. All processes say the same."""
        return self._latest is None or step > self._latest

    def _decide(self, step: int) -> bool:
        policy = self._save_policy
        busy = self._options.enable_should_save_is_saving_in_progress_check and self._run.is_saving
        context = DecisionContext(
            is_saving_in_progress=busy,
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        now = CheckpointInfo(step, datetime.datetime.now(datetime.UTC), None)
        if decides_alike(policy):  # It needs only the number of the latest step, so no directory is listed.
            known = [] if self._latest is None else [dataclasses.replace(now, step=self._latest)]
            return policy.should_save(now, known, context=context)
        decide = lambda: bool(policy.should_save(now, self._checkpoints, context=context))  # noqa: E731
        return agree(f"should_save({self._run.directory!r}, {step})", decide)

    @property
    def _checkpoints(self) -> list[CheckpointInfo]:
        """The valid steps and the one that is being saved, ascending. Subclasses of Orbax's manager read this name."""
        begun = self._last_begun if self._run.is_saving else None  # asked first: the save may end before the listing
        infos = {one.step: one for one in self._run.infos()}
        if begun is not None:
            infos[begun.step] = begun
        return sorted(infos.values(), key=lambda one: one.step)

    def is_saving_in_progress(self) -> bool:
        """Returns True while a save is running."""
        return self._run.is_saving

    # Saving

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Saves a step if `should_save` says so, or in any case with `force`. Returns True if it is saved.

        metrics: numbers by name, which are saved with every step. Without `best_fn` others are left out, which is
            logged. custom_metadata: JSON values by name.

        Raises `StepAlreadyExistsError` (a `ValueError`) for a step that exists, `MismatchError` for arguments that do
        not fit, and the error of the save before.
        """
        step = operator.index(step)  # It may be an array.
        args = self._items.to_save(items, save_kwargs, args)
        if self._options.read_only:
            _log.warning("%s: read_only=True, so step %d is not saved", self._run.directory, step)
            return False
        if not is_multi_process() and not self._run.is_saving:
            self._wait()
            last, self._unchecked = self._unchecked, None
            if last is not None and last not in (self._steps or ()) and not self._run.has_step(last):
                self._latest = self._latest_before  # The last save has failed, and another call has raised its error.
        if not force and not self.should_save(step):
            return False
        self._wait()
        self._steps = None
        if agree(f"save({self._run.directory!r}, {step})", lambda: self._run.has_step(step)):
            raise StepAlreadyExistsError(f"{self._run.path(step)}: step {step} exists; delete it first")
        if self._best is not None and metrics is None:
            _log.warning("%s: step %d has no metrics, and best_fn needs them", self._run.directory, step)
        tree = self._items.tree(args, for_orbax=self._run.writes_orbax)
        saved = None if self._options.prevent_write_metrics else self._metrics_to_save(metrics)
        metadata = items_module.custom_metadata(args, custom_metadata)
        self._run.save(step, tree, force=True, metrics=saved, metadata=metadata)
        self._steps = None
        self._last_begun = CheckpointInfo(step, datetime.datetime.now(datetime.UTC), dict(saved or {}))
        self._unchecked = step
        self._latest_before, self._latest = self._latest, max(step, -1 if self._latest is None else self._latest)
        if not self._options.enable_async_checkpointing or self._items.is_synchronous:
            self.wait_until_finished()
        return True

    def _metrics_to_save(self, metrics: Any) -> Any:
        """Returns the metrics, without `best_fn` only those that are numbers: Orbax drops all of them then."""
        if metrics is None or self._best is not None:
            return metrics
        given = metrics if isinstance(metrics, Mapping) else {"metrics": metrics}
        found: dict[str, Any] = {}
        for name, value in given.items() if given is metrics else ():
            with contextlib.suppress(MismatchError):
                encode_metrics({name: value})
                found[name] = value
        if (rest := tuple(str(name) for name in given if name not in found)) and not self._has_logged_metrics:
            self._has_logged_metrics = True
            text = "%s: metrics that are not saved: %s; expected only numbers by name"
            _log.warning(text, self._run.directory, join_names(rest))
        return found

    def wait_until_finished(self) -> None:
        """Waits until every save is committed, and superfluous steps are deleted. Raises the error of a failed save."""
        self._wait()
        self._run.wait_for_deletions()

    def _wait(self) -> None:
        try:
            self._run.wait()
        except Exception:
            self._steps, self._latest = None, self._latest_before
            raise

    def check_for_errors(self) -> None:
        """Raises the error of a save that has failed; does not wait."""
        if not self._run.is_saving:
            self._wait()

    def delete(self, step: int) -> None:
        """Deletes a step, of either format. Raises `NotFoundError` (a `FileNotFoundError`) if it does not exist."""
        if self._options.read_only:
            _log.warning("%s: read_only=True, so step %d is not deleted", self._run.directory, step)
            return
        self._run.delete(step)
        self._steps = None
        self._latest = agree(f"delete({self._run.directory!r}, {step})", self.latest_step)

    def close(self) -> None:
        """Waits as `wait_until_finished` does, and ends the saving. Reading still works."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self._run.__exit__(kind, error, traceback)

    # Restoring

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Restores a step; None is the latest valid one.

        Returns the item, or a `Composite` with those that `args` names. Raises `NotFoundError` (a `FileNotFoundError`)
        if there is no such step, and `MismatchError` (a `ValueError`) if it does not fit the target.
        """

        def use(ckpt: tr.Checkpoint) -> Any:
            return self._items.restored(ckpt, items, restore_kwargs, args)

        if directory is not None:
            return use(tr.open(directory_of(directory), step=step))
        return self._run.use_step(step, use)

    def item_metadata(self, step: int) -> Any:
        """Returns the shapes and dtypes of the item of a step, or a `Composite` of them."""
        if step is None:
            raise MismatchError("item_metadata(None): expected a step")
        return self.metadata(step).item_metadata

    def metadata(self, step: int | None = None) -> Any:
        """Returns the metadata of a step, or without one those of the run."""
        if step is None:
            return RootMetadata(custom_metadata=self._run.load_metadata() or self._metadata)
        ckpt = self._run.open(step)
        return step_metadata(ckpt, self._items.metadata(ckpt))

    def metrics(self, step: int) -> dict[str, float] | None:
        """Returns the metrics of a step; None if it has none, or if there is no such step."""
        return (self._run.open(step).metrics or None) if self._run.has_step(step) else None


def _on_commit(options: CheckpointManagerOptions) -> Callable[[tr.SaveReport], None]:
    """Returns what follows each commit. It must not refer to the manager: a cycle would delay its lease's release."""

    def call(report: tr.SaveReport) -> None:
        restrict(report.path, options.file_options)
        callback = getattr(options.async_options, "post_finalization_callback", None)
        if callback is not None:
            callback()

    return call
