"""Reads the steps of a run, for `Checkpointer`."""

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ...errors import NotFoundError
from ..errors import StepNotFoundError
from ..manager import CheckpointManager
from ..namespaces import unsupported_name as unsupported
from ..policies import CheckpointInfo
from . import trees
from .contents import CheckpointContents
from .context import Context, get_context
from .loading import (
    check_name,
    check_wanted,
    checkpointables_metadata_from,
    load_checkpointables_from,
    load_from,
    metadata_from,
)
from .saving import STATE, deprecated
from .trees import as_nanoseconds

T = TypeVar("T")


class CheckpointMetadata(trees.CheckpointMetadata[T]):
    """The metadata of a step. `metadata` is None in lists of steps. `metrics` is None if the step has none."""

    def __init__(self, step: int, path: Any, *, metadata: T, metrics: Any = None, **about: Any):
        super().__init__(path, metadata=metadata, **about)
        self.step, self.metrics = step, metrics

    @property
    def time(self) -> datetime.datetime | None:
        """The time of the commit, in UTC."""
        return self.commit_timestamp


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """The metadata of a run, which are the same for all its steps."""

    directory: Any
    custom_metadata: Any = None


Step = int | CheckpointMetadata[Any] | None


class StepReader:
    """Lists and loads the steps of a run."""

    def __init__(self, manager: CheckpointManager, context: Context):
        self._manager, self._context = manager, context
        self._run = manager._run
        self._known: list[CheckpointMetadata[None]] = []
        self._is_changing = True  # False if `_known` has what the directory had at the last look

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
        """The steps of the run and the one that is being saved, ascending, as of the last save or `reload`."""
        if self._is_changing:
            self._is_changing = self._run.is_saving
            self._known = [self._described(one) for one in self._manager._checkpoints]
        return list(self._known)

    def _described(self, info: CheckpointInfo) -> CheckpointMetadata[None]:
        return CheckpointMetadata(
            info.step,
            self._context.path(self._run.path(info.step)),
            metadata=None,
            metrics=info.metrics or None,
            commit_timestamp_nsecs=as_nanoseconds(info.time),
        )

    def reload(self) -> None:
        """Reads the steps again, in case another process has changed the directory."""
        self._manager.reload()
        self._is_changing = True

    def load(self, step: Step = None, abstract_state: Any = None, *, checkpointable_name: str = STATE) -> Any:
        """Loads the tree of a step, by default the latest; see `treering.orbax.v1.load`.

        Raises `StepNotFoundError`, which is a `FileNotFoundError`.
        """
        check_name(checkpointable_name)
        return self._use(step, lambda one, context: load_from(one, checkpointable_name, abstract_state, context))

    def load_checkpointables(self, step: Step = None, abstract_checkpointables: Any = None) -> dict[str, Any]:
        """Loads checkpointables of a step, by default the latest; see `treering.orbax.v1.load_checkpointables`."""
        wanted = check_wanted(abstract_checkpointables)
        return self._use(step, lambda contents, context: load_checkpointables_from(contents, wanted, context))

    def _use(self, step: Step, use: Callable[[CheckpointContents, Context], Any]) -> Any:
        """Returns the result of `use` for a step, the same in all processes. A step that is being saved is waited for.

        Without a step it is the latest valid one.
        """
        with get_context(self._context).check() as context, _step_not_found():
            return self._run.use_step(
                None if step is None else step_number(step),
                lambda ckpt: use(CheckpointContents(ckpt, context), context),
            )

    def load_async(self, step: Step = None, abstract_state: Any = None) -> Any:
        """Is not supported, as in Orbax itself. Raises `UnsupportedError`."""
        raise unsupported("v1.training.Checkpointer.load_async")

    def load_checkpointables_async(self, step: Step = None, abstract_checkpointables: Any = None) -> Any:
        """Is not supported, as in Orbax itself. Raises `UnsupportedError`."""
        raise unsupported("v1.training.Checkpointer.load_checkpointables_async")

    def metadata(self, step: Step = None) -> CheckpointMetadata[Any]:
        """Returns the metadata of the tree of a step, by default the latest."""
        return self._metadata(step, lambda contents, context: metadata_from(contents, "AUTO", context))

    def checkpointables_metadata(self, step: Step = None) -> CheckpointMetadata[dict[str, Any]]:
        """Returns the metadata of the checkpointables of a step, by default the latest."""
        return self._metadata(step, checkpointables_metadata_from)

    def _metadata(self, step: Step, describe: Callable[[CheckpointContents, Context], Any]) -> CheckpointMetadata[Any]:
        with get_context(self._context).check() as context, _step_not_found():
            ckpt = self._run.open(None if step is None else step_number(step))
            about = vars(describe(CheckpointContents(ckpt, context), context))
        assert ckpt.step is not None
        return CheckpointMetadata(ckpt.step, metrics=ckpt.metrics or None, **about)

    def root_metadata(self) -> RootMetadata:
        """Returns the metadata of the run."""
        return RootMetadata(directory=self.directory, custom_metadata=self._manager.metadata().custom_metadata)

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


@contextlib.contextmanager
def _step_not_found() -> Iterator[None]:
    """Turns the error for a step that does not exist into that of Orbax."""
    try:
        yield
    except NotFoundError as error:
        if type(error) is not NotFoundError:  # The step exists, and something in it does not.
            raise
        raise StepNotFoundError(str(error)) from None


def step_number(step: Any) -> int:
    """Returns the number of a step, which may be given by its metadata."""
    return step.step if isinstance(step, CheckpointMetadata) else step
