"""The checkpointers of Orbax, which save one checkpoint at a path."""

import os
from collections.abc import Callable
from typing import Any

from .._save.pending import PendingSave
from ..errors import ExistsError
from . import handlers, items, one_shot
from .arguments import StandardRestore, StandardSave
from .errors import check_processes, exists_error, warn_unused
from .metadata import StepMetadata
from .namespaces import lacks, lookup
from .options import MultiprocessingOptions

__getattr__ = lookup("checkpointers")


# the arguments of every checkpointer, apart from its handler
_OPTIONS = ("file_options", "atomicity_options", "checkpoint_metadata_store", "temporary_path_class", "write")


@lacks("create_temporary_path", "get_temporary_path", "structure", "synchronize_next_awaitable_signal_operation_id")
class Checkpointer:
    """Saves and restores checkpoints, each at a path of its own. A call returns when its checkpoint is durable.

    handler: says the kind of the item, or saves it by itself.
    write: "treering" or "orbax", the format that is written. The environment variable `TREERING_ORBAX_WRITE` has the
        default. Both are read.
    """

    _background = False

    def __init__(
        self,
        handler: Any,
        *,
        multiprocessing_options: Any = None,
        file_options: Any = None,
        atomicity_options: Any = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: Any = None,
        write: str | None = None,
    ):
        check_processes(multiprocessing_options)
        warn_unused(
            type(self).__name__,
            skip_sync_file_validations=(getattr(file_options, "skip_sync_file_validations", False), False),
            atomicity_options=(atomicity_options, None),
            checkpoint_metadata_store=(checkpoint_metadata_store, None),
            temporary_path_class=(temporary_path_class, None),
        )
        items.format_options(write, several=False)  # An unknown format fails here.
        self._handler, self._write, self._file_options = handler, write, file_options
        self._pending: PendingSave | None = None
        self._after: Callable[[], None] | None = None

    @property
    def handler(self) -> Any:
        """The handler that was passed."""
        return self._handler

    def save(
        self,
        directory: str | os.PathLike[str],
        *args: Any,
        force: bool = False,
        custom_metadata: Any = None,
        **kwargs: Any,
    ) -> None:
        """Saves a checkpoint at a path.

        args, kwargs: arguments of this package such as `args.StandardSave(tree)`, or the tree itself.
        force: replaces an existing checkpoint, which stays until the new one is durable.
        custom_metadata: JSON, recorded with the checkpoint.

        Raises `CheckpointExistsError`, which is a `ValueError`, and the errors of `treering.save`.
        """
        self.wait_until_finished()
        self._pending = one_shot.save_at(
            directory,
            self._handler,
            args,
            kwargs,
            force=force,
            custom_metadata=custom_metadata,
            write=self._write,
            background=self._background,
        )
        self._restricted = one_shot.restrict_later(self._pending, directory, self._file_options)
        if self._pending is None:
            self._restricted()

    def restore(self, directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Restores the checkpoint at a path, written by Treering or by Orbax.

        args, kwargs: arguments of this package such as `args.StandardRestore(target)`, or the target itself.

        Raises `NotFoundError`, which is a `FileNotFoundError`, and the errors of `treering.restore`.
        """
        self.wait_until_finished()
        return one_shot.restore_at(directory, self._handler, args, kwargs)

    def metadata(self, directory: str | os.PathLike[str]) -> StepMetadata:
        """Returns the metadata of the checkpoint at a path. Reads no arrays."""
        self.wait_until_finished()
        return one_shot.metadata_at(directory, self._handler)

    def wait_until_finished(self) -> None:
        """Waits for the save under way. Raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except ExistsError as error:
                raise exists_error(error) from error
            self._restricted()
            if self._after is not None:
                self._after()

    def check_for_errors(self) -> None:
        """Raises the error of the save under way, if it has failed."""
        if self._pending is not None and self._pending.done():
            self.wait_until_finished()

    def close(self) -> None:
        """Waits for the save under way, and closes the handler."""
        self.wait_until_finished()
        if hasattr(self._handler, "close"):
            self._handler.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@lacks("cancel")
class AsyncCheckpointer(Checkpointer):
    """Saves in the background. A program that ends finishes the save first."""

    _background = True

    def __init__(self, handler: Any, timeout_secs: int | None = None, *, async_options: Any = None, **options: Any):
        super().__init__(handler, **options)
        warn_unused(
            type(self).__name__,
            timeout_secs=(timeout_secs, None),
            barrier_sync_fn=(getattr(async_options, "barrier_sync_fn", None), None),
            async_options=(getattr(async_options, "timeout_secs", 600), 600),
        )
        self._after = getattr(async_options, "post_finalization_callback", None)


class StandardCheckpointer(AsyncCheckpointer):
    """Saves trees of arrays and numbers in the background."""

    def __init__(self, *, async_options: Any = None, multiprocessing_options: Any = None, **options: Any):
        own = {name: options.pop(name) for name in _OPTIONS if name in options}
        handler = handlers.StandardCheckpointHandler(multiprocessing_options=multiprocessing_options, **options)
        super().__init__(handler, async_options=async_options, **own)

    def save(  # type: ignore[override]
        self,
        directory: str | os.PathLike[str],
        state: Any,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: Any = None,
    ) -> None:
        """Saves a tree at a path; see `Checkpointer.save`. `save_args` is a tree of `SaveArgs`."""
        super().save(directory, args=StandardSave(state, save_args), force=force, custom_metadata=custom_metadata)

    def restore(self, directory: str | os.PathLike[str], target: Any = None, *, strict: bool = True) -> Any:  # type: ignore[override]
        """Restores the tree at a path, like `target`; see `args.StandardRestore`."""
        return super().restore(directory, args=StandardRestore(target, strict=strict))


class PyTreeCheckpointer(Checkpointer):
    """Saves trees and waits until they are durable."""

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        *,
        write: str | None = None,
    ):
        handler = handlers.PyTreeCheckpointHandler(
            use_ocdbt=use_ocdbt, use_zarr3=use_zarr3, use_compression=use_compression
        )
        super().__init__(handler, multiprocessing_options=MultiprocessingOptions(primary_host), write=write)
