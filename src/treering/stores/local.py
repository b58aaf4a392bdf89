"""Checkpoints on a file system: created, committed in one step, deleted, and their leftovers removed.

A directory is a checkpoint when it holds the manifest. Array files are written under names that no other
save uses; the manifest is put in place last. A writer holds the lock of each of its files until its
commit is through, so whoever gets a file's lock and then finds it in no manifest knows that it is left over.
"""

import contextlib
import logging
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import xxhash

from ..errors import CorruptError, ExistsError, NotFoundError, SaveError, UnsupportedError
from .buffers import aligned
from .network import look_anew, wait_until, warn_of_no_locks
from .on_disk import make_dirs, opened, read_file
from .posix import Disk
from .reading import reading

MANIFEST = "treering.json"
PIN = "pinned"  # an empty file beside the manifest: this checkpoint is never deleted
_OURS = re.compile(
    r"arrays-[0-9a-f]{6}-\d{5,}-of-\d{5,}\.safetensors|metrics-[0-9a-f]{16}-\d{20}-[0-9a-f]{6}\.json"
    r"|(treering|metrics)\.json\.[0-9a-f]{6}\.tmp"
)
_TRIES = 50  # at making a file, while others tidy up

_log = logging.getLogger("treering")
_alive: "weakref.WeakSet[Files]" = weakref.WeakSet()


class Removal(Protocol):
    """What the format says about taking a checkpoint away: `formats.treering.removal`."""

    def file_names(self, data: bytes) -> Iterable[str]:
        """Which files a manifest names. Raises `CorruptError` and `UnsupportedError`."""
        ...

    def check_removable(self, disk: Disk, path: str) -> None:
        """Raises `UnsupportedError` for a checkpoint of a later version, which nobody moves, replaces or deletes."""
        ...


def check_free(disk: Disk, path: str, *, overwrite: bool) -> None:
    """Raises `ExistsError` when a save to `path` would touch something it must not."""
    found = disk.stat(path)
    if found is None:
        parent = os.path.dirname(path)
        while (above := disk.stat(parent)) is None and parent != os.path.dirname(parent):
            parent = os.path.dirname(parent)
        if above is not None and not stat.S_ISDIR(above.st_mode):
            raise ExistsError(f"{path}: expected to create a directory, but {parent} is a file; choose another path")
        return
    if not stat.S_ISDIR(found.st_mode):
        raise ExistsError(f"{path}: expected a free path, found a file; choose another path or remove it")
    names = disk.list(path)
    if MANIFEST in names:
        if not overwrite:
            raise ExistsError(f"{path}: expected a free path, found a checkpoint; pass overwrite=True to replace it")
        return
    if other := [name for name in names if not _OURS.fullmatch(name)]:
        shown = ", ".join(other[:3]) + (", …" if len(other) > 3 else "")
        raise ExistsError(f"{path}: expected a free path, found a directory with {shown}; choose a path below it")


class Files:
    """The files that one process writes for a save into one directory, locked until they are closed."""

    def __init__(self, disk: Disk, path: str, token: str, made: Sequence[str] = ()):
        self.disk, self.path, self.token = disk, path, token
        self.made = list(made)  # directories that are to go again if nothing comes of the save
        self.committed = False
        self._open: dict[str, int] = {}
        _alive.add(self)

    @classmethod
    def join(
        cls,
        disk: Disk,
        path: str,
        token: str,
        made: Sequence[str],
        *,
        timeout: float = 0,
        check: Callable[[], None] = lambda: None,
    ) -> "Files":
        """Takes part in a save that another process began; `check` raises when that one has failed meanwhile.

        Raises `SaveError` when it cannot be seen from here after so many seconds.
        """
        marker = os.path.join(path, f"{MANIFEST}.{token}.tmp")
        if wait_until(lambda: disk.stat(marker), lambda: look_anew(disk, path, made), timeout, check):
            return cls(disk, path, token, made)
        raise SaveError(
            f"{path}: process 0 has begun a checkpoint there that this process cannot see; expected a path on a file "
            'system that all processes share; choose one, or save each process\'s own data with processes="this"'
        )

    def create(self, name: str) -> int:
        """A new file of this save, open for writing and locked. Closed by `close` and `abort`."""
        path = os.path.join(self.path, name)
        for attempt in range(_TRIES):
            with contextlib.suppress(FileExistsError):  # a cleaner that took it for a leftover has not removed it yet
                fd = self._open[path] = self.disk.create(path)
                if self.disk.lock(fd) is not False and self.disk.same_file(fd, path):
                    return fd
                self.disk.close(self._open.pop(path))  # a cleaner had it before it was locked
            time.sleep(0.001 * attempt)
        raise SaveError(f"{path}: taken or removed by somebody else again and again; do locks work here?")

    def close(self) -> None:
        """Lets go of the files, and of their locks."""
        while self._open:  # each is forgotten before it is closed: a fork in between must not close another's
            fd = self._open.pop(next(iter(self._open)))
            with contextlib.suppress(OSError):
                self.disk.close(fd)

    def abort(self) -> None:
        """Removes the files, and the directories that were made for them unless others have files there."""
        with contextlib.suppress(OSError):
            for path in self._open:
                with contextlib.suppress(FileNotFoundError):
                    self.disk.unlink(path)
            for directory in reversed(self.made):
                self.disk.remove_dir(directory)
        self.close()


class Transaction(Files):
    """One save into one directory: seen by nobody until `commit`, gone without a trace after `abort`.

    The temporary manifest is made first: it shows other processes that they write to the same file system.
    """

    def __init__(self, disk: Disk, path: str, *, overwrite: bool, removal: Removal):
        check_free(disk, path, overwrite=overwrite)
        if overwrite:
            removal.check_removable(disk, path)
        super().__init__(disk, path, secrets.token_hex(3))
        self._overwrite, self._removal = overwrite, removal
        self._manifest = os.path.join(path, MANIFEST)
        clean(disk, path, removal)
        name = f"{MANIFEST}.{self.token}.tmp"
        self._temporary = os.path.join(path, name)
        try:
            for attempt in range(_TRIES):
                try:
                    self._make_dir()
                    self.create(name)
                    break
                except FileNotFoundError:  # somebody tidied the empty directory away
                    if attempt == _TRIES - 1:
                        raise
        except BaseException:
            self.abort()
            raise

    def commit(self, manifest: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Publishes the save, unless `check` raises at the last moment. Raises `ExistsError` when another was first."""
        self.disk.sync_dir(os.path.dirname(self.path))
        self._write(self._open[self._temporary], manifest)
        self.disk.sync_dir(self.path)  # the array files' names come before the manifest that needs them
        for path, fd in self._open.items():
            if not self.disk.same_file(fd, path):
                raise SaveError(f"{path}: removed by somebody else while the save was under way; do locks work here?")
        check()
        put = self.disk.rename if self._overwrite else self.disk.link
        replaced = _consists_of(self.disk, self.path, self._removal) if self._overwrite else []
        try:
            put(self._temporary, self._manifest)
        except OSError as error:
            if not self._in_place():  # it may be there in spite of the error, over a network
                if not isinstance(error, FileExistsError):
                    raise
                raise ExistsError(
                    f"{self.path}: another writer put a checkpoint there first; it is untouched"
                ) from None
        try:
            self.disk.sync_dir(self.path)
        except OSError as error:
            if not self._overwrite and self._gone():
                raise
            self.committed = True
            raise SaveError(
                f"{self.path}: the new checkpoint is in place, but the disk failed to make that durable ({error}); "
                f"after a power cut it may be {'the old one again' if self._overwrite else 'gone'}"
            ) from error
        self.committed = True
        with _logged(self.path):
            if not self._overwrite:
                with contextlib.suppress(FileNotFoundError):  # gone already where a link had to be a rename
                    self.disk.unlink(self._temporary)
        self.close()
        if self._overwrite:
            with _logged(self.path):  # the files of the one that was replaced, which takes no lock: no save has them
                _remove(self.disk, self.path, replaced)
            clean(self.disk, self.path, self._removal)

    def abort(self) -> None:
        """Removes everything this save wrote; nothing once it is committed, or is in place and cannot be taken back."""
        self.committed = self.committed or not self._gone()
        if self.committed:
            self.close()
        else:
            super().abort()

    def _gone(self) -> bool:
        """Whether nothing of this save is in place, or no longer: what replaced nothing can be taken back."""
        if not self._in_place():
            return True
        if self._overwrite:
            return False
        try:
            self.disk.unlink(self._manifest)  # it is not durable
            self.disk.sync_dir(self.path)
        except OSError:
            return not self._in_place()
        return True

    def _in_place(self) -> bool:
        fd = self._open.get(self._temporary)
        with contextlib.suppress(OSError):
            return fd is not None and self.disk.same_file(fd, self._manifest)
        return True  # who knows

    def _write(self, fd: int, data: bytes) -> None:
        buffer = aligned(len(data))
        buffer[: len(data)] = data
        self.disk.write(fd, buffer, 0)
        self.disk.truncate(fd, len(data))
        self.disk.make_read_only(fd)
        self.disk.sync(fd)

    def _make_dir(self) -> None:
        """The directory; its name is made durable by the commit, and those above it are durable before."""
        if self.disk.stat(self.path) is None:
            make_dirs(self.disk, os.path.dirname(self.path), self.made)
            with contextlib.suppress(FileExistsError):
                self.disk.make_dir(self.path)
                self.made.append(self.path)


def clean(disk: Disk, path: str, removal: Removal, *, remove_empty: bool = False) -> None:
    """Removes what crashed or replaced saves left in a directory; with `remove_empty` also the directory.

    Living writers' files stay, and so do foreign ones. Tidying up never fails what it is done for: an error is
    logged, and the next writer tries again.
    """
    with _logged(path):
        if any(_OURS.fullmatch(name) for name in disk.list(path)):
            _remove_leftovers(disk, path, removal)
        if remove_empty and disk.stat(path) and not disk.list(path):
            disk.remove_dir(path)


def _remove_leftovers(disk: Disk, path: str, removal: Removal) -> None:
    def left_over() -> list[str]:
        try:
            data = read_file(disk, os.path.join(path, MANIFEST))
            keep, metrics = set(removal.file_names(data)), f"metrics-{xxhash.xxh3_64_hexdigest(data)}-"
        except FileNotFoundError:
            keep, metrics = set(), "/"
        found = [name for name in disk.list(path) if _OURS.fullmatch(name) and name not in keep]
        return [name for name in found if not name.startswith(metrics)]

    synced = False
    try:
        if found := left_over():
            removal.check_removable(disk, path)
        for name in found:
            if _in_a_living_save(disk, path, name):
                continue
            file = os.path.join(path, name)
            with contextlib.suppress(FileNotFoundError), opened(disk, file) as fd:
                # Asked again under the lock: now no living writer can commit this file any more.
                free = disk.lock(fd)
                if free is None:  # over NFS nobody who only reads gets that; two who clean up may share the other
                    free = disk.lock_shared(fd)
                if free is None:
                    warn_of_no_locks(path)
                if free and name in left_over() and disk.same_file(fd, file):  # not a new one in its place
                    if not synced:  # the manifest that no longer names it must outlive a power cut
                        disk.sync_dir(path)
                        synced = True
                    disk.unlink(file)
    except (CorruptError, UnsupportedError):
        return  # what a damaged checkpoint, or one of a later version, consists of is not ours to guess


def _in_a_living_save(disk: Disk, path: str, name: str) -> bool:
    """Whether the temporary manifest of the save that an array file belongs to is locked: it is still to come.

    The process that wrote the file may be gone; the one that commits is not.
    """
    if not name.startswith("arrays-"):
        return False
    try:
        with opened(disk, os.path.join(path, f"{MANIFEST}.{name.split('-')[1]}.tmp")) as fd:
            return disk.lock_shared(fd) is False
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _logged(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def delete(disk: Disk, path: str, removal: Removal) -> None:
    """Removes a checkpoint: the manifest first, so that it is gone at once and as a whole."""
    withdraw(disk, path, removal)()


def withdraw(disk: Disk, path: str, removal: Removal) -> Callable[[], None]:
    """Takes a checkpoint away, which is quick; what this returns removes its files, which is not.

    Raises `UnsupportedError` for a checkpoint of a later release.
    """
    manifest = os.path.join(path, MANIFEST)
    removal.check_removable(disk, path)
    names = _consists_of(disk, path, removal)
    with contextlib.suppress(FileNotFoundError):  # somebody else is deleting it, too
        disk.unlink(manifest)

    def remove() -> None:
        with contextlib.suppress(FileNotFoundError):  # and has removed the directory as well
            disk.sync_dir(path)  # or after a power cut the manifest might be there without its files
        _remove(disk, path, names)
        clean(disk, path, removal, remove_empty=True)

    return remove


def _consists_of(disk: Disk, path: str, removal: Removal) -> list[str]:
    """The files that a manifest names, and the metrics that were added to it.

    None when it cannot be read: cleaning up finds them once it is gone.
    """
    try:
        data = read_file(disk, os.path.join(path, MANIFEST))
        added = f"metrics-{xxhash.xxh3_64_hexdigest(data)}-"
        return [*removal.file_names(data), *(name for name in disk.list(path) if name.startswith(added))]
    except (CorruptError, UnsupportedError, OSError):
        return []


def _remove(disk: Disk, path: str, names: Iterable[str]) -> None:
    """Removes what a manifest consisted of that is gone, durably: no writer can commit these files any more."""
    failed: OSError | None = None
    for name in names:
        try:
            disk.unlink(os.path.join(path, name))
        except FileNotFoundError:
            pass
        except OSError as error:
            failed = failed or error
    if failed:
        raise failed


def pinned(disk: Disk, path: str) -> bool:
    """Whether a checkpoint is marked never to be deleted."""
    with reading(path):
        return disk.stat(os.path.join(path, PIN)) is not None


def pin(disk: Disk, path: str, wanted: bool) -> None:
    """Sets or removes the mark, durably. Raises `NotFoundError` when the checkpoint is deleted meanwhile."""
    mark = os.path.join(path, PIN)
    if wanted and not pinned(disk, path):
        try:
            disk.close(disk.create(mark))
            if disk.stat(os.path.join(path, MANIFEST)) is None:  # whoever deletes it has not seen the mark
                disk.unlink(mark)
                raise FileNotFoundError
        except FileNotFoundError:
            raise NotFoundError(f"{path}: expected a checkpoint to pin, but it was deleted meanwhile") from None
    elif not wanted and pinned(disk, path):
        disk.unlink(mark)
    disk.sync_dir(path)


def _let_go_after_fork() -> None:
    """A forked child shares the locks of its parent's saves: it must not hold them for as long as it lives."""
    for files in list(_alive):
        files.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_after_fork)
