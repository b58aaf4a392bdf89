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
from .directories import folder, opened
from .file_sink import FileSink
from .posix import Disk, Entry, Opened, is_dir, look
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

    def carry_over(self, disk: Disk, old: Opened, new: Opened) -> bool:
        """Gives the other files names in the new directory as well; True if there are any names to sync."""
        for name in self._others:
            here, place = old.entry(name), new.entry(name)
            before = look(here)
            if before is None:
                continue
            _keep(disk, here, place, before)
            if after := look(place):
                self._carried[name] = _Carried(before, after)
        return bool(self._carried)

    def clear(self, disk: Disk, old: Entry, new: Opened) -> None:
        """Moves the files that the new directory lacks there, then removes the old one.

        Where a file cannot be moved, the old directory stays under another name, which is logged. So does what somebody
        has put in its place that is no directory.
        """
        with contextlib.suppress(TreeringError, OSError):  # this may be the checkpoint of a faster writer
            self._parts |= set(self._owned(str(old)))
        folders = {parent for part in self._parts for parent in _parents_of(part)}
        try:
            with folder(disk, old) as opened_old:
                self._clear(disk, opened_old, new, "", folders)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._stuck.append(str(error))
        if self._stuck and look(old):
            aside = old.sibling(f"{os.path.basename(new)}.kept-{os.urandom(3).hex()}")
            with contextlib.suppress(OSError):
                disk.rename_new(old, aside)
            _log.warning(
                "%s: files that came to lie in it while it was replaced could not be moved to the new one; they are "
                "in %s: %s",
                new,
                aside if look(aside) else old,
                few(tuple(self._stuck)),
            )
            return
        with contextlib.suppress(OSError):
            disk.remove_dir(old)

    def _clear(self, disk: Disk, old: Opened, new: Opened, at: str, folders: Collection[str]) -> None:
        """Empties the old directory, or one in it, which is open and `at` a path within."""
        moved = False
        for name in disk.list(old):
            within, here = f"{at}{name}", old.entry(name)
            found = look(here)
            if found is None:
                continue
            carried = self._carried.get(within)
            try:
                if stat.S_ISDIR(found.st_mode) and (within in folders or (at and _is_empty(disk, here))):
                    with folder(disk, here) as inner:
                        self._clear(disk, inner, new, f"{within}/", folders)
                    with contextlib.suppress(OSError):
                        disk.remove_dir(here)
                elif not stat.S_ISDIR(found.st_mode) and within in self._parts:
                    with contextlib.suppress(OSError):
                        disk.unlink(here)
                elif carried and (carried.is_unchanged(found) or not carried.is_current(look(new.entry(name)))):
                    with contextlib.suppress(OSError):  # the new directory has this file, or a newer one already
                        disk.unlink(here)
                else:
                    with _folder_in(disk, new, at) as to:
                        (disk.rename if carried else disk.rename_new)(here, to.entry(name))
                    moved = True
            except OSError:
                self._stuck.append(within)
        if moved:
            with _folder_in(disk, new, at) as to:
                disk.sync_dir(to)


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


def _keep(disk: Disk, old: Entry, new: Entry, found: os.stat_result) -> None:
    """Gives a file a second name, or copies it where there are no hard links. Raises `ExistsError` for a taken name."""
    try:
        if disk.hard_link(old, new):
            if stat.S_ISREG(found.st_mode):
                with contextlib.suppress(PermissionError, CorruptError), opened(disk, old) as fd:
                    disk.sync(fd)
            return None
        if stat.S_ISLNK(found.st_mode):
            return disk.copy_link(old, new)
        sink = FileSink(disk, new)
    except FileExistsError:
        raise _taken(old) from None
    file = SequentialWriter(sink)
    try:
        with opened(disk, old) as fd:
            mode = os.fstat(fd).st_mode & 0o777  # and not to run as its owner, who may be another now
            disk.set_mode(sink.opened, mode | stat.S_IWUSR)  # before anything is in it that others may not read
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            while count := disk.read(fd, buffer, file.size):
                file.write(buffer[:count])
        file.sync()
        disk.set_mode(sink.opened, mode)
    finally:
        file.discard()


def _is_empty(disk: Disk, path: Entry) -> bool:
    with folder(disk, path) as there:
        return not disk.list(there)


@contextlib.contextmanager
def _folder_in(disk: Disk, top: Opened, within: str) -> Iterator[Opened]:
    """Opens a directory by its path within another, and durably makes those on the way that are missing."""
    with contextlib.ExitStack() as stack:
        here = top
        for name in filter(None, within.split("/")):
            place = here.entry(name)
            if look(place) is None:
                disk.make_dir(place)
                disk.sync_dir(here)
            here = stack.enter_context(folder(disk, place))
        yield here


def _parents_of(part: str) -> list[str]:
    """The directories on the way to a file, from the top."""
    keys = part.split("/")[:-1]
    return ["/".join(keys[: n + 1]) for n in range(len(keys))]
