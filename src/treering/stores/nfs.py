"""The files of other processes and hosts: over a network, in directories that are closed, on disks without locks."""

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
_MIN_WAIT_SECONDS = 2.5  # seconds, at least, for a file that another process has made
_POLL_SECONDS = 0.05  # seconds between looks

T = TypeVar("T")


def wait_until(
    found: Callable[[], T], anew: Callable[[], None], timeout: float, check: Callable[[], None] = lambda: None
) -> T:
    """The result of `found`, as soon as it is true or after `timeout` seconds; `check` and `anew` run in between."""
    end = time.monotonic() + max(timeout, _MIN_WAIT_SECONDS)
    while not (there := found()) and time.monotonic() < end:
        check()
        anew()
        if not (there := found()):
            time.sleep(_POLL_SECONDS)
    return there


def look_anew(store: Store, path: str, made: Sequence[str] = ()) -> None:
    """Makes a network's client refresh its cache of a directory and of those that were made above it.

    Over NFS a file that was not there a moment ago may be taken for missing for as long as attributes are cached.
    """
    for directory in (*(os.path.dirname(one) for one in made), os.path.dirname(path), path):
        with contextlib.suppress(OSError):  # a directory that cannot be listed is found to be missing later
            store.list(directory)


def check_shared(
    store: Store, marker: str, path: str, made: Sequence[str], timeout: float, check: Callable[[], None]
) -> None:
    """Waits until this process sees what process 0 has made for a checkpoint at a path; `check` runs in between.

    Raises `SaveError` when it doesn't after `timeout` seconds.
    """
    if not wait_until(lambda: store.stat(marker), lambda: look_anew(store, path, made), timeout, check):
        raise SaveError(
            f"{path}: process 0 has begun a checkpoint there that this process cannot see; expected a path on a file "
            'system that all processes share; choose one, or save each process\'s own data with processes="this"'
        )


@functools.lru_cache(maxsize=1000)
def warn_of_closed(path: str, reason: str | None) -> None:
    """Logs once that a path is passed over, and why."""
    _log.warning("%s: it cannot be looked into (%s), and counts as no step", path, reason)


@functools.lru_cache(maxsize=1000)
def warn_of_anothers(path: str, user: int) -> None:
    """Logs once that a leftover is left alone, and why."""
    _log.warning(
        "%s: it looks like what a killed save has left, but user %d owns it and others may write to this directory, so "
        "it is left alone; remove it yourself if nobody needs it",
        path,
        user,
    )


@functools.lru_cache(maxsize=1)
def warn_of_no_locks(path: str) -> None:
    """Logs once that leftovers are not removed, for lack of locks."""
    _log.warning(
        "%s: what killed saves have left here is not removed, for files cannot be locked on this file system; remove "
        "what no manifest names yourself, while no job saves, or mount it with locks (Lustre: -o flock)",
        path,
    )
