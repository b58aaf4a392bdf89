"""Saves and restores one checkpoint at a path, by a handler and the arguments of a call."""

import os
import posixpath
from collections.abc import Mapping
from typing import Any

from .. import formats, stores
from .._restore.checkpoint import Checkpoint
from .._run.open import open_checkpoint
from .._save.pending import PendingSave
from .._save.save import save, save_async
from ..errors import ExistsError, NotFoundError
from . import handler_files, items, registration
from .errors import CheckpointExistsError
from .item_restore import part_of
from .kinds import handler_kind, handlers_in
from .metadata import StepMetadata, step_metadata


def save_at(
    directory: str | os.PathLike[str],
    handler: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    force: bool = False,
    custom_metadata: Any = None,
    write: str | None = None,
    background: bool = False,
) -> PendingSave | None:
    """Saves a checkpoint; with `background` it returns the save under way.

    Raises `CheckpointExistsError`, and the errors of `treering.save`.
    """
    given = call_arguments(handler, True, args, kwargs)
    tree = items.save_tree(given, handler)
    metadata = items.custom_metadata(given, custom_metadata)
    options = items.format_options(write, several=handler_kind(handler) == "composite")
    try:
        if background:
            return save_async(directory, tree, overwrite=force, metadata=metadata, **options)
        save(directory, tree, overwrite=force, metadata=metadata, **options)
    except ExistsError as error:
        raise CheckpointExistsError(*error.args) from error
    return None


def restore_at(
    directory: str | os.PathLike[str], handler: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Restores a checkpoint. Raises the errors of `treering.restore`."""
    return items.restore_item(_open(directory), None, call_arguments(handler, False, args, kwargs), handler)


def metadata_at(directory: str | os.PathLike[str], handler: Any) -> StepMetadata:
    """Returns the metadata of a checkpoint and of its items."""
    ckpt = _open(directory)
    handlers = handlers_in(handler) if handler_kind(handler) == "composite" else {None: handler}
    return step_metadata(ckpt, items.item_metadata(ckpt, None, handlers), items.item_handlers(ckpt, handlers))


def _open(directory: str | os.PathLike[str]) -> Checkpoint:
    """Opens the checkpoint at a path, or the item of one: Orbax has a directory for each item.

    Raises `NotFoundError` for a run, of which `open_checkpoint` opens a step.
    """
    path = stores.absolute(directory)
    try:
        ckpt = open_checkpoint(directory)
    except NotFoundError:
        parent, name = posixpath.split(path)
        if not formats.is_known(stores.get(parent), parent):
            raise
        return part_of(open_checkpoint(parent), name)
    if ckpt.path != path:
        raise NotFoundError(f"{path}: expected a checkpoint, found a run; give the path of a step, such as {ckpt.path}")
    return ckpt


def call_arguments(handler: Any, for_save: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call as one object, which the call may have passed itself."""
    for one in (*args, *kwargs.values()):
        if registration.is_args_class(type(one)):
            return one
    if not registration.has_registered_args(handler):
        return handler_files.CallArgs(args, kwargs)
    return registration.get_registered_args_cls(handler)[0 if for_save else 1](*args, **kwargs)
