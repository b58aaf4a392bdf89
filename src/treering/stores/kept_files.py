"""The files in a directory whose checkpoint is replaced.

Only files that are known to be part of the checkpoint are ever removed. Others get a second name in the new directory;
files that are added to the old one while the new one is written are moved there.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from .._core.leaf_paths import few
from ..errors import CorruptError, ExistsError, TreeringError
from .directories import opened
from .file_sink import FileSink
from .posix import Disk
from .sequential import SequentialWriter

_BUFFER_BYTES = 4 << 20
# The files in a directory, by their paths within it, that are part of a checkpoint of some format.
Owned = Callable[[str], Collection[str]]
Beside = Callable[[str, Sequence[str]], None]  # raises `ExistsError` for files in a directory that are in the way
_log = logging.getLogger("treering")


class _Carried(NamedTuple):
    """A file as it was when it got its second name or was copied, and as it was then in the new directory."""

    old: os.stat_result
    new: os.stat_result

    def is_unchanged(self, now: os.stat_result) -> bool:
        """Whether the file in the old directory is the one that the new directory has."""
        return os.path.samestat(now, self.new) or _same(now, self.old)

    def is_current(self, there: os.stat_result | None) -> bool:
        """Whether the file in the new directory is still the one that was put there."""
        if os.path.samestat(self.old, self.new):  # it may have been written to under either name
            return there is not None and os.path.samestat(there, self.new)
        return _same(there, self.new)


class Replaced:
    """The contents of a directory that is replaced: the parts of a checkpoint, and other files."""

    def __init__(self, owned: Owned, parts: Collection[str], others: list[str]):
        self._owned, self._parts, self._others = owned, set(parts), others
        self._carried: dict[str, _Carried] = {}
        self._stuck: list[str] = []

    def carry_over(self, disk: Disk, old: str, new: str) -> bool:
        """Gives the other files names in the new directory as well; True if there are any names to sync."""
        for name in self._others:
            before = look(os.path.join(old, name))
            if before is None:
                continue
            place = os.path.join(new, name)
            _keep(disk, os.path.join(old, name), place, before)
            self._carried[name] = _Carried(before, os.lstat(place))
        return bool(self._carried)

    def clear(self, disk: Disk, old: str, new: str) -> None:
        """Moves the files that the new directory lacks there, then removes the old one.

        Where a file cannot be moved, the old directory stays under another name, which is logged.
        """
        with contextlib.suppress(TreeringError, OSError):  # this may be the checkpoint of a faster writer
            self._parts |= set(self._owned(old))
        folders = {parent for part in self._parts for parent in _parents_of(part)}
        try:
            self._clear(disk, old, new, "", folders)
        except OSError as error:
            self._stuck.append(str(error))
        if self._stuck and os.path.lexists(old):
            aside = f"{new}.kept-{os.urandom(3).hex()}"
            with contextlib.suppress(OSError):
                disk.rename_new(old, aside)
            _log.warning(
                "%s: files that came to lie in it while it was replaced could not be moved to the new one; they are "
                "in %s: %s",
                new,
                aside if os.path.lexists(aside) else old,
                few(tuple(self._stuck)),
            )
            return
        with contextlib.suppress(OSError):
            disk.remove_dir(old)

    def _clear(self, disk: Disk, old: str, new: str, at: str, folders: Collection[str]) -> None:
        moved = False
        for name in disk.list(os.path.join(old, at)):
            within = f"{at}{name}"
            here, there = os.path.join(old, within), os.path.join(new, within)
            found = look(here)
            if found is None:
                continue
            carried = self._carried.get(within)
            if stat.S_ISDIR(found.st_mode) and (within in folders or (at and not disk.list(here))):
                self._clear(disk, old, new, f"{within}/", folders)
                with contextlib.suppress(OSError):
                    disk.remove_dir(here)
            elif not stat.S_ISDIR(found.st_mode) and within in self._parts:
                with contextlib.suppress(OSError):
                    disk.unlink(here)
            elif carried and (carried.is_unchanged(found) or not carried.is_current(look(there))):
                with contextlib.suppress(OSError):  # the new directory has this file, or a newer one already
                    disk.unlink(here)
            else:
                try:
                    _make_folder(disk, new, os.path.dirname(within))
                    disk.rename(here, there) if carried else disk.rename_new(here, there)
                    moved = True
                except OSError:
                    self._stuck.append(within)
        if moved:
            disk.sync_dir(os.path.join(new, at))


def survey(disk: Disk, path: str, owned: Owned, names: Collection[str], beside: Beside | None) -> Replaced:
    """The contents of a directory, which need not exist.

    Raises `ExistsError` for contents that are not part of the checkpoint and cannot be kept: other directories, pipes
    and devices, files whose `names` the new one needs, and those that must not lie `beside` it.
    """
    if not os.path.isdir(path):
        return Replaced(owned, (), [])
    parts = set(owned(path))
    others: list[str] = []
    folders: list[str] = []
    for name in disk.list(path):
        place = os.path.join(path, name)
        found = look(place)
        if found is None:
            continue
        if stat.S_ISDIR(found.st_mode):
            inner = [f"{name}/{file}" for file in files_in(disk, place)]
            foreign = [file for file in inner if file not in parts]
            if not inner or foreign:
                folders.append(name if len(foreign) == len(inner) else foreign[0])
        elif not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            raise ExistsError(
                f"{place}: expected files to keep beside the new checkpoint, found a pipe, a socket or a device; write "
                "to another path, or remove it"
            )
        elif name not in parts and name in names:
            raise _taken(place)
        elif name not in parts:
            others.append(name)
    if folders:
        raise ExistsError(
            f"{path}: expected a checkpoint to replace, found folders in it that are no part of it: "
            f"{few(tuple(folders))}; write to another path, or move them out of it"
        )
    if beside:
        beside(path, others)
    return Replaced(owned, parts, others)


def files_in(disk: Disk, path: str) -> Iterator[str]:
    """The files below a directory, by their paths within it. Links count as files, wherever they lead."""
    for name in disk.list(path):
        inner = os.path.join(path, name)
        if is_dir(inner):
            yield from (f"{name}/{file}" for file in files_in(disk, inner))
        else:
            yield name


def look(path: str) -> os.stat_result | None:
    """The `lstat` of a path: of a link itself; None when nothing is there."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_dir(path: str) -> bool:
    """Whether a directory is at a path, and not a link to one."""
    found = look(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _same(found: os.stat_result | None, known: os.stat_result) -> bool:
    """Whether a file is one that was seen before, and was not written to since."""
    return (
        found is not None
        and os.path.samestat(found, known)
        and (found.st_size, found.st_mtime_ns) == (known.st_size, known.st_mtime_ns)
    )


def _taken(path: str) -> ExistsError:
    return ExistsError(
        f"{path}: expected a part of the checkpoint that is replaced, found a file that is none and whose name the "
        "new one needs; write to another path, or move the file"
    )


def _keep(disk: Disk, old: str, new: str, found: os.stat_result) -> None:
    """Gives a file a second name, or copies it where there are no hard links. Raises `ExistsError` for a taken name."""
    try:
        if disk.hard_link(old, new):
            if stat.S_ISREG(found.st_mode):
                with contextlib.suppress(PermissionError, CorruptError), opened(disk, old) as fd:
                    disk.sync(fd)
            return None
        if stat.S_ISLNK(found.st_mode):
            return disk.copy_link(old, new)
        file = SequentialWriter(FileSink(disk, new))
    except FileExistsError:
        raise _taken(old) from None
    try:
        with opened(disk, old) as fd:
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            while count := disk.read(fd, buffer, file.size):
                file.write(buffer[:count])
        file.close()
        disk.set_mode(new, stat.S_IMODE(found.st_mode))
    finally:
        file.discard()


def _make_folder(disk: Disk, folder: str, within: str) -> None:
    """Makes the directories on a path within a directory that are missing, durably."""
    for part in _parents_of(f"{within}/") if within else ():
        place = os.path.join(folder, part)
        if look(place) is None:
            disk.make_dir(place)
            disk.sync_dir(os.path.dirname(place))


def _parents_of(part: str) -> list[str]:
    """The directories on the way to a file, from the top."""
    keys = part.split("/")[:-1]
    return ["/".join(keys[: n + 1]) for n in range(len(keys))]
