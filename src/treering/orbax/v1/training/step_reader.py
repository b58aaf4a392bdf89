"""Reads the steps of a run, for `Checkpointer`."""

from typing import Any

from ...manager import CheckpointManager
from ...preservation import CheckpointInfo
from ...unsupported import error as unsupported
from ..context import Context, get_context
from ..describing import checkpointables_metadata, metadata
from ..loading import load, load_checkpointables
from ..metadata_types import as_nanoseconds
from ..saving import STATE, deprecated
from .errors import StepNotFoundError
from .metadata import CheckpointMetadata, RootMetadata

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
            self._known = [self._described(one) for one in self._manager._infos()]
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
        found = self._existing(step)
        with get_context(self._context):
            return load(found.path, abstract_state, checkpointable_name=checkpointable_name)

    def load_checkpointables(self, step: Step = None, abstract_checkpointables: Any = None) -> dict[str, Any]:
        """Loads checkpointables of a step, by default the latest; see `treering.orbax.v1.load_checkpointables`."""
        found = self._existing(step)
        with get_context(self._context):
            return load_checkpointables(found.path, abstract_checkpointables)

    def load_async(self, step: Step = None, abstract_state: Any = None) -> Any:
        """Is not supported, as in Orbax itself. Raises `UnsupportedError`."""
        raise unsupported("v1.training.Checkpointer.load_async")

    def load_checkpointables_async(self, step: Step = None, abstract_checkpointables: Any = None) -> Any:
        """Is not supported, as in Orbax itself. Raises `UnsupportedError`."""
        raise unsupported("v1.training.Checkpointer.load_checkpointables_async")

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
        found = next((one for one in self.checkpoints if one.step == step_number(step)), None)
        if found is None:
            steps = [one.step for one in self.checkpoints]
            raise StepNotFoundError(f"{self._run.directory}: expected step {step_number(step)}, found {steps}")
        return found

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


def step_number(step: Any) -> int:
    """Returns the number of a step, which may be given by its metadata."""
    return step.step if isinstance(step, CheckpointMetadata) else step
