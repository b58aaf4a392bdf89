"""Pins: empty files that mark checkpoints never to be deleted."""

import contextlib
import posixpath

from ...errors import MismatchError, NotFoundError
from ...stores.file_io import make_empty
from ...stores.read_errors import reading
from ...stores.store import Store
from .schema import MANIFEST, PIN


def is_pinned(store: Store, path: str) -> bool:
    """Returns True if a checkpoint is pinned."""
    with reading(path):
        return store.stat(posixpath.join(path, PIN)) is not None


def check_unpinned(store: Store, path: str) -> None:
    """Raises `MismatchError` for a pinned checkpoint."""
    if is_pinned(store, path):
        raise MismatchError(f"{path}: the step is pinned; unpin it first")


def pin(store: Store, path: str, wanted: bool) -> None:
    """Adds or removes a pin, durably. Raises `NotFoundError` if another process deletes the checkpoint first."""
    mark = posixpath.join(path, PIN)
    if wanted and not is_pinned(store, path):
        try:
            with contextlib.suppress(FileExistsError):  # Another process has pinned it, or the store's reply was lost.
                make_empty(store, mark)
            # A process that deletes the step may have looked for a pin just before this one was made. Then the pin
            # must not outlive the step.
            if store.stat(posixpath.join(path, MANIFEST)) is None:
                store.delete(mark)
                raise FileNotFoundError
        except FileNotFoundError:
            raise NotFoundError(f"{path}: expected a checkpoint to pin, but it was deleted meanwhile") from None
    elif not wanted and is_pinned(store, path):
        store.delete(mark)
    store.settle(path)
