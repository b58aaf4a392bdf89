"""Saves and restores one checkpoint at a path, by a handler and the arguments of a call."""

import contextlib
import logging
import os
import posixpath
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from .. import formats, stores
from .._restore.checkpoint import Checkpoint
from .._run.open import open_checkpoint
from .._run.removal import remove
from .._run.run_layout import RunLayout
from .._save.pending import PendingSave
from .._save.save import save, save_async
from .._threads.thread import Thread, start_threads
from ..errors import ExistsError, NotFoundError
from ..formats.orbax.owned_files import owned_files
from ..formats.orbax.run import unpublish
from ..formats.treering import pins, summary
from ..stores.file_io import files_in, is_folder
from ..stores.store import Store
from . import items, nodes, registration
from .errors import CheckpointExistsError, exists_error
from .items import part_of
from .manager_items import agree
from .metadata import StepMetadata, step_metadata
from .options import restrict
from .registration import handler_kind, handlers_in
from .step import step_or_none

_log = logging.getLogger("treering")


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
    place, format = stores.absolute(directory), options["format"]
    found, mark = agree(f"save({place!r})", lambda: (_found(place, format, force), os.urandom(3).hex()))
    if found and not force:
        raise CheckpointExistsError(f"{place}: expected a free path, found {found}; pass force=True to replace it")
    try:
        if found:  # Only a checkpoint of the same format is replaced in one operation, and so in the background.
            save(f"{place}.new-{mark}", tree, metadata=metadata, **options)
            return agree(f"replace({place!r})", lambda: _replace(place, mark))
        numbered = step_or_none(place)  # A program that names its steps itself has a run in the directory above.
        if background:
            return save_async(directory, tree, overwrite=force, step=numbered, metadata=metadata, **options)
        save(directory, tree, overwrite=force, step=numbered, metadata=metadata, **options)
    except ExistsError as error:
        raise exists_error(error) from error
    return None


def restrict_later(pending: PendingSave | None, place: Any, file_options: Any) -> Callable[[], None]:
    """Sets the mode of a checkpoint once it is committed, also if the program ends before.

    Returns a function that waits for it.
    """
    if pending is None or getattr(file_options, "path_permission_mode", None) is None:
        return lambda: restrict(place, file_options)

    def run() -> None:
        pending._finished.wait()
        if not pending.failed:
            restrict(place, file_options)

    thread = Thread(target=run, name="treering-mode")
    start_threads(thread)
    return thread.join


def _found(place: str, format: str, force: bool) -> str | None:
    """Returns words for what is on a disk at a path and needs an error now, or with `force` another way to replace it.

    Returns None for what the save itself checks before it returns.
    """
    store = stores.get(place)
    there = store.stat(place) if store.has_folders else None
    if there is not None and format == "orbax" and not force:
        return "a directory" if there.is_folder else "a file"
    if there is None or not is_folder(store, place):
        return None
    if summary.stat_manifest(store, place) is not None:
        pins.check_unpinned(store, place)
    found = formats.detect(store, place).name if formats.is_known(store, place) else None
    return f"a checkpoint in the format {found!r}" if found in {"treering", "orbax"} - {format} else None


def _replace(place: str, mark: str) -> None:
    """Moves a complete checkpoint to a path, and removes the checkpoint of the other format that was there."""
    store, new, old = stores.get(place), f"{place}.new-{mark}", f"{place}.old-{mark}"
    store.move(place, old, last="")
    try:
        store.move(new, place, last="")
    except BaseException:
        store.move(old, place, last="")
        raise
    store.settle(posixpath.dirname(place))
    if summary.stat_manifest(store, old) is not None:
        remove(store, old, RunLayout(shared_with_orbax=True))()
    else:
        _remove_orbax(store, old)
    if store.stat(old) is not None:
        _log.warning("%s: it was replaced; files in it that are not part of a checkpoint are in %s", place, old)


def _remove_orbax(store: Store, path: str) -> None:
    """Removes an Orbax checkpoint, but no file that is not part of it."""
    found, owned = set(files_in(store, path)), set(owned_files(store, path))
    if found <= owned:
        unpublish(store, path)()
        return
    for name in found & owned:
        store.delete(posixpath.join(path, name))
    folders = {str(parent) for name in owned for parent in PurePosixPath(name).parents} - {"."}
    for folder in sorted(folders, key=len, reverse=True):
        with contextlib.suppress(OSError):  # It has other files, or does not exist.
            store.remove_folder(posixpath.join(path, folder))


def _opened(directory: str | os.PathLike[str]) -> tuple[Checkpoint, str | None]:
    """Opens a checkpoint. For the path of an item, such as ``3/default``, returns also the name of the item.

    In Orbax's format that path may be a directory, in Treering's it never is. Raises `NotFoundError` for a run.
    """
    path = stores.absolute(directory)
    try:
        ckpt = open_checkpoint(directory)
    except NotFoundError:
        parent, name = posixpath.split(path)
        if not formats.is_known(stores.get(parent), parent):
            raise
        ckpt = open_checkpoint(parent)
        known = items.item_names(ckpt)
        if known:
            part_of(ckpt, name)  # The error names the items.
        elif name != items.DEFAULT_ITEM:
            raise
        return ckpt, name if known else None
    if ckpt.path != path:
        raise NotFoundError(f"{path}: expected a checkpoint, found a run; give the path of a step, such as {ckpt.path}")
    return ckpt, None


def restore_at(
    directory: str | os.PathLike[str], handler: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Restores a checkpoint, or an item of one. Raises the errors of `treering.restore`."""
    ckpt, name = _opened(directory)
    return items.restore_item(ckpt, name, call_arguments(handler, False, args, kwargs), handler)


def metadata_at(directory: str | os.PathLike[str], handler: Any) -> StepMetadata:
    """Returns the metadata of a checkpoint and of its items, or of one item."""
    ckpt, name = _opened(directory)
    if name is not None:
        return step_metadata(ckpt, items.item_metadata(ckpt, name, {name: handler}))
    handlers = handlers_in(handler) if handler_kind(handler) == "composite" else {None: handler}
    return step_metadata(ckpt, items.item_metadata(ckpt, None, handlers), items.item_handlers(ckpt, handlers))


def call_arguments(handler: Any, for_save: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call as one object, which the call may have passed itself."""
    for one in (*args, *kwargs.values()):
        if registration.is_args_class(type(one)):
            return one
    if not registration.has_registered_args(handler):
        return nodes.CallArgs(args, kwargs)
    return registration.get_registered_args_cls(handler)[0 if for_save else 1](*args, **kwargs)
