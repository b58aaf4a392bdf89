"""Pinned checkpoints, which are never deleted."""

import contextlib
import posixpath

from ...errors import MismatchError, NotFoundError
from ...stores.read_errors import reading
from ...stores.store import Store
from ...stores.whole_files import make_empty
from .schema import MANIFEST, PIN


def pinned(store: Store, path: str) -> bool:
    """Whether a checkpoint is marked never to be deleted."""
    with reading(path):
        return store.stat(posixpath.join(path, PIN)) is not None


def check_unpinned(store: Store, path: str) -> None:
    """Raises `MismatchError` for a pinned checkpoint."""
    if pinned(store, path):
        raise MismatchError(f"{path}: the step is pinned; unpin it first")


def pin(store: Store, path: str, wanted: bool) -> None:
    """Sets or removes the mark, durably. Raises `NotFoundError` when the checkpoint is deleted meanwhile."""
    mark = posixpath.join(path, PIN)
    if wanted and not pinned(store, path):
        try:
            with contextlib.suppress(FileExistsError):  # set meanwhile, or its answer was lost
                make_empty(store, mark)
            if store.stat(posixpath.join(path, MANIFEST)) is None:  # the process that deletes it missed the mark
                store.delete(mark)
                raise FileNotFoundError
        except FileNotFoundError:
            raise NotFoundError(f"{path}: expected a checkpoint to pin, but it was deleted meanwhile") from None
    elif not wanted and pinned(store, path):
        store.delete(mark)
    store.settle(path)
