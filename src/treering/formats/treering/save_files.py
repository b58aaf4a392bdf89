"""The new files of a save. The process that writes them holds their locks for as long as it lives."""

import contextlib
import enum
import os
import posixpath
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

from ..._threads.forks import WeakRegistry
from ...errors import SaveError
from ...stores.buffers import aligned
from ...stores.file_io import remove_unused
from ...stores.nfs import check_shared
from ...stores.read_errors import is_full
from ...stores.store import FinishedFile, Sink, Store, Stored
from .schema import MANIFEST

CREATE_ATTEMPTS = 50  # to create a file that other processes may remove as a leftover
LOCK_ADVICE = "check that file locks (flock) work on this file system, then save again"

T = TypeVar("T")
_alive: "WeakRegistry[SaveFiles]" = WeakRegistry()


class Outcome(enum.Enum):
    """The outcome of a save: its manifest is not in place, is in place, or may be in place (a reply was lost)."""

    ABORTED = "aborted"
    COMMITTED = "committed"
    IN_DOUBT = "in doubt"


class Retry(Protocol):
    """Calls `write`, which needs `nbytes` bytes of room, until the disk at a path is not full.

    Threads may call it, one of them at a time does so.
    """

    def __call__(self, path: str, nbytes: int, write: Callable[[], T], /) -> T: ...


class RetryingSink:
    """Writes a file, again where the disk was full, once `retry` has waited for room. See `Sink` for the methods."""

    def __init__(self, sink: Sink, retry: Retry):
        self._sink, self._retry = sink, retry
        # Not repeated: the room is allocated, and after a failed sync a second one may succeed although data are lost.
        self.finish = sink.finish

    @property
    def path(self) -> str:
        return self._sink.path

    @property
    def stored(self) -> Stored | None:
        return self._sink.stored

    def preallocate(self, nbytes: int) -> memoryview | None:
        try:
            return self._sink.preallocate(nbytes)
        except OSError as error:
            return self._again(error, nbytes, lambda: self._sink.preallocate(nbytes))

    def write(self, data: memoryview, offset: int) -> None:
        try:
            self._sink.write(data, offset)
        except OSError as error:
            self._again(error, len(data), lambda: self._sink.write(data, offset))

    def _again(self, error: OSError, nbytes: int, write: Callable[[], T]) -> T:
        if not is_full(error):
            raise error
        return self._retry(self._sink.path, nbytes, write)

    def publish(self, path: str, *, overwrite: bool, version: Hashable | None = None) -> None:
        self._sink.publish(path, overwrite=overwrite, version=version)

    def is_at(self, path: str) -> bool:
        return self._sink.is_at(path)

    def close(self) -> None:
        self._sink.close()


def run_once(path: str, nbytes: int, write: Callable[[], T]) -> T:
    """Calls `write` once. An error of a full disk is raised."""
    return write()


class SaveFiles:
    """The files that one process writes for a save into one directory, locked until they are closed.

    `outcome` is `ABORTED` until the save begins to put its manifest in place. From then on it is None, until the store
    has answered. If it is None, `abort` asks the store.

    retry: repeats what finds the disk full. By default it raises the error.
    """

    def __init__(self, store: Store, path: str, token: str, made: Sequence[str] = (), retry: Retry = run_once):
        self.store, self.path, self.token = store, path, token
        self._retry = retry
        self.made = list(made)  # directories that this save made, which `abort` removes
        self.outcome: Outcome | None = Outcome.ABORTED
        self._is_per_host = False
        self._sinks: dict[str, Sink] = {}
        _alive.add(self)

    @classmethod
    def join(
        cls,
        store: Store,
        path: str,
        token: str,
        made: Sequence[str],
        *,
        timeout: float = 0,
        check: Callable[[], None] = lambda: None,
        retry: Retry = run_once,
    ) -> "SaveFiles":
        """Joins a save that process 0 has begun on the same file system.

        check: raises if process 0 has failed in the meantime.

        Raises `SaveError` if this process does not see the temporary manifest within `timeout` seconds.
        """
        files = cls(store, path, token, made, retry)
        check_shared(store, files._marker, path, made, timeout, check)
        return files

    @classmethod
    def join_per_host(cls, store: Store, path: str, token: str, retry: Retry = run_once) -> "SaveFiles":
        """Joins a save that process 0 has begun, where each host writes to a disk of its own."""
        files = cls(store, path, token, retry=retry)
        files._is_per_host = True
        retry(path, 0, lambda: store.make_folders(path, files.made))
        if store.sharing == "links":
            retry(path, 0, files._mark)
        return files

    def unmark(self) -> None:
        """Ends the protection of the files on a host's own disk, where a manifest names them now."""
        if self._is_per_host and self._marker in self._sinks:
            self.discard(posixpath.basename(self._marker))

    @property
    def _marker(self) -> str:
        return posixpath.join(self.path, f"{MANIFEST}.{self.token}.tmp")

    def _mark(self) -> None:
        """Makes a temporary manifest, as process 0 does on its disk, unless another process of this host has one.

        Its lock shows that the save lives. A file that is shared with an earlier step has no lock of its own.
        """
        for attempt in range(CREATE_ATTEMPTS):
            try:
                self._sinks[self._marker] = self.store.create(self._marker, visible=True)
                return
            except FileExistsError:  # Another process of this host made it; it goes if no process has its lock.
                remove_unused(self.store, self._marker)
            except FileNotFoundError:  # A process that removed leftovers removed the empty folder too.
                self.store.make_folders(self.path, self.made)
            if self.store.stat(self._marker):
                return
            time.sleep(0.001 * attempt)
        raise SaveError(f"{self._marker}: taken or removed by another program again and again; {LOCK_ADVICE}")

    @property
    def must_stay(self) -> bool:
        """True if the files belong to a checkpoint or may belong to one, so that no process may remove them."""
        return self.outcome in (Outcome.COMMITTED, Outcome.IN_DOUBT)

    def create(self, name: str, *, visible: bool = False, expected: int = 0, waits: bool = True) -> Sink:
        """Creates a file of this save, which is locked. `close` and `abort` close it.

        waits: False if the errors of a full disk are raised at once.

        Raises `SaveError` if another program takes or removes the file again and again.
        """
        path, retry = posixpath.join(self.path, name), self._retry if waits else run_once
        for attempt in range(CREATE_ATTEMPTS):
            try:
                sink = retry(path, 0, lambda: self.store.create(path, visible=visible, expected=expected))
                self._sinks[path] = sink
                return sink if retry is run_once else RetryingSink(sink, retry)
            except FileExistsError:  # Another process takes this file, or that of an earlier attempt, for a leftover.
                pass
            except FileNotFoundError:
                if not self._is_per_host:
                    raise
                # The folder was still empty, and a process that removed leftovers removed the folder too.
                retry(path, 0, lambda: self.store.make_folders(self.path, self.made))
            time.sleep(0.001 * attempt)
        why = LOCK_ADVICE if self.store.has_locks else "stop other jobs that write there, then save again"
        raise SaveError(f"{path}: taken or removed by another program again and again; {why}")

    def share(self, name: str, old: FinishedFile) -> Sink | None:
        """Creates a file of this save with the bytes of another one; see `Store.share`."""
        path = posixpath.join(self.path, name)
        if sink := self._retry(path, 0, lambda: self.store.share(old, path)):
            self._sinks[path] = sink
        return sink

    def discard(self, name: str) -> None:
        """Removes one of the files."""
        path = posixpath.join(self.path, name)
        with contextlib.suppress(OSError):
            self.store.delete(path)
        if sink := self._sinks.pop(path, None):
            with contextlib.suppress(OSError):
                sink.close()

    def close(self) -> None:
        """Closes the files, which releases their locks."""
        # Each file leaves the list before it is closed. A child that is forked in between would otherwise close the
        # same descriptor number again, which may belong to another file by then.
        while self._sinks:
            sink = self._sinks.pop(next(iter(self._sinks)))
            with contextlib.suppress(OSError):
                sink.close()

    def abort(self) -> None:
        """Removes the files, and those directories made for them that are then empty."""
        for path in self._sinks:
            with contextlib.suppress(OSError):
                self.store.delete(path)
        with contextlib.suppress(OSError):
            for directory in reversed(self.made):
                self.store.remove_folder(directory)
        self.close()


def write_small_file(sink: Sink, data: bytes) -> None:
    """Writes a small file at once, and makes it durable and read-only."""
    buffer = aligned(len(data))
    buffer[: len(data)] = data
    sink.write(buffer, 0)
    sink.finish(len(data), read_only=True)


def _close_after_fork() -> None:
    """Closes the files in a forked child.

    The child shares the locks of its parent. If it kept them, the files of a killed parent would look alive.
    """
    for files in _alive.all():
        files.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)
