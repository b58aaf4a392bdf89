"""Copes with network file systems, directories without permission, and disks without locks.

Processes and hosts share files there, and see each other's changes late.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import SaveError
from .store import Store

_log = logging.getLogger("treering")
_MIN_WAIT_SECONDS = 2.5  # for a file that another process made, however short the caller's timeout is
_POLL_SECONDS = 0.05

T = TypeVar("T")


def wait_until(
    find: Callable[[], T], refresh: Callable[[], None], timeout: float, check: Callable[[], None] = lambda: None
) -> T:
    """Returns the result of `find` once it is true, or its last result after `timeout` seconds.

    Calls `check` and `refresh` in between.
    """
    end = time.monotonic() + max(timeout, _MIN_WAIT_SECONDS)
    while not (found := find()) and time.monotonic() < end:
        check()
        refresh()
        if not (found := find()):
            time.sleep(_POLL_SECONDS)
    return found


def refresh_dir_cache(store: Store, path: str, made: Sequence[str] = ()) -> None:
    """Makes a network client refresh its cache of a directory, its parent and the parents of the directories in `made`.

    NFS caches attributes. Until they expire, a new file may appear to be missing.
    """
    for directory in (*(os.path.dirname(one) for one in made), os.path.dirname(path), path):
        with contextlib.suppress(OSError):  # the caller finds out that a directory cannot be listed
            store.list(directory)


def check_shared(
    store: Store, marker: str, path: str, made: Sequence[str], timeout: float, check: Callable[[], None]
) -> None:
    """Waits until this process sees `marker`, which process 0 made for a checkpoint at a path.

    Calls `check` in between. Raises `SaveError` if the marker does not appear within `timeout` seconds.
    """
    if not wait_until(lambda: store.stat(marker), lambda: refresh_dir_cache(store, path, made), timeout, check):
        raise SaveError(
            f"{path}: process 0 has begun a checkpoint there that this process cannot see; expected a path on a file "
            'system that all processes share; choose one, or save the data of each process with processes="this"'
        )


@functools.lru_cache(maxsize=1000)
def warn_unlistable(path: str, reason: str | None) -> None:
    """Logs once that a path is skipped, and why."""
    _log.warning("%s: it cannot be read (%s), and is not listed as a step", path, reason)


@functools.lru_cache(maxsize=1000)
def warn_foreign_owner(path: str, user: int) -> None:
    """Logs once that a leftover is not removed, and why."""
    _log.warning(
        "%s: it looks like a file that a killed save left, but user %d owns it and other users may write to this "
        "directory, so it is left alone; remove it yourself if it is not needed",
        path,
        user,
    )


@functools.lru_cache(maxsize=1)
def warn_no_locks(path: str) -> None:
    """Logs once that leftovers are not removed because there are no locks."""
    _log.warning(
        "%s: what killed saves left here is not removed, because files cannot be locked on this file system; remove "
        "files that no manifest names yourself, while no job saves, or mount it with locks (Lustre: -o flock)",
        path,
    )
