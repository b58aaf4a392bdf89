"""Keeps the other files of a directory when its checkpoint is replaced.

Only files that are known to be part of the checkpoint are removed. The others get a second name in the new directory.
Files that appear in the old directory while the new one is written are moved to the new one.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from .._core.leaf_paths import join_names
from ..errors import CorruptError, ExistsError, TreeringError
from .directories import folder, opened
from .file_sink import FileSink
from .posix import Disk, Entry, Opened, is_dir, lstat
from .sequential import SequentialWriter

_BUFFER_BYTES = 4 << 20
# Returns the files of a directory that belong to a checkpoint of some format, as paths within the directory.
Owned = Callable[[str], Collection[str]]
# Raises `ExistsError` for files that must not stay in a directory
CheckOthers = Callable[[str, Sequence[str]], None]
_log = logging.getLogger("treering")


class _PreservedFile(NamedTuple):
    """A file that was linked or copied: its state in the old directory, and that of its copy in the new one."""

    old: os.stat_result
    new: os.stat_result

    def is_unchanged(self, now: os.stat_result) -> bool:
        """Returns True if the new directory has this file of the old directory, as it is `now`."""
        return os.path.samestat(now, self.new) or _is_same_file(now, self.old)

    def is_current(self, there: os.stat_result | None) -> bool:
        """Returns True if the file in the new directory is still the one that was linked or copied."""
        if os.path.samestat(self.old, self.new):  # linked: writes under either name reach both
            return there is not None and os.path.samestat(there, self.new)
        return _is_same_file(there, self.new)


class OldFolder:
    """The contents of a directory that is replaced: the files of a checkpoint, and other files."""

    def __init__(self, owned: Owned, parts: Collection[str], others: list[str]):
        self._owned, self._parts, self._others = owned, set(parts), others
        self._preserved: dict[str, _PreservedFile] = {}
        self._unmoved: list[str] = []

    def preserve_others(self, disk: Disk, old: Opened, new: Opened) -> bool:
        """Gives the other files names in the new directory too. Returns True if the new directory has names to sync."""
        for name in self._others:
            here, place = old.entry(name), new.entry(name)
            before = lstat(here)
            if before is None:
                continue
            _link_or_copy(disk, here, place, before)
            if after := lstat(place):
                self._preserved[name] = _PreservedFile(before, after)
        return bool(self._preserved)

    def remove_old(self, disk: Disk, old: Entry, new: Opened) -> None:
        """Moves the files that the new directory lacks into it, then removes the old directory.

        If a file cannot be moved, the old directory stays under another name, which is logged. The same holds for
        anything that another process put in its place and that is not a directory.
        """
        with contextlib.suppress(TreeringError, OSError):  # a faster writer may have put its own checkpoint there
            self._parts |= set(self._owned(str(old)))
        folders = {parent for part in self._parts for parent in _parent_folders(part)}
        try:
            with folder(disk, old) as opened_old:
                self._empty_folder(disk, opened_old, new, "", folders)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._unmoved.append(str(error))
        if self._unmoved and lstat(old):
            spare = old.sibling(f"{os.path.basename(new)}.kept-{os.urandom(3).hex()}")
            with contextlib.suppress(OSError):
                disk.rename_new(old, spare)
            _log.warning(
                "%s: files that appeared in it while it was replaced could not be moved to the new directory; they "
                "are in %s: %s",
                new,
                spare if lstat(spare) else old,
                join_names(tuple(self._unmoved)),
            )
            return
        with contextlib.suppress(OSError):
            disk.remove_dir(old)

    def _empty_folder(self, disk: Disk, old: Opened, new: Opened, at: str, folders: Collection[str]) -> None:
        """Empties the old directory or one within it, which is open. `at` is its path within the old directory."""
        moved = False
        for name in disk.list(old):
            within, here = f"{at}{name}", old.entry(name)
            found = lstat(here)
            if found is None:
                continue
            carried = self._preserved.get(within)
            try:
                if stat.S_ISDIR(found.st_mode) and (within in folders or (at and _is_empty(disk, here))):
                    with folder(disk, here) as inner:
                        self._empty_folder(disk, inner, new, f"{within}/", folders)
                    with contextlib.suppress(OSError):
                        disk.remove_dir(here)
                elif not stat.S_ISDIR(found.st_mode) and within in self._parts:
                    with contextlib.suppress(OSError):
                        disk.unlink(here)
                elif carried and (carried.is_unchanged(found) or not carried.is_current(lstat(new.entry(name)))):
                    with contextlib.suppress(OSError):  # the new directory has this file or a newer one
                        disk.unlink(here)
                else:
                    with _open_subfolder(disk, new, at) as to:
                        (disk.rename if carried else disk.rename_new)(here, to.entry(name))
                    moved = True
            except OSError:
                self._unmoved.append(within)
        if moved:
            with _open_subfolder(disk, new, at) as to:
                disk.sync_dir(to)


def inspect_old(
    disk: Disk, path: str, owned: Owned, names: Collection[str], check_others: CheckOthers | None
) -> OldFolder:
    """Lists the contents of a directory, which need not exist.

    Raises `ExistsError` for contents that are not part of the checkpoint and cannot be kept: other directories, pipes
    and devices, files that have one of `names`, and files that `check_others` refuses.
    """
    if not os.path.isdir(path):
        return OldFolder(owned, (), [])
    parts = set(owned(path))
    others: list[str] = []
    folders: list[str] = []
    for name in disk.list(path):
        place = os.path.join(path, name)
        found = lstat(place)
        if found is None:
            continue
        if stat.S_ISDIR(found.st_mode):
            inner = [f"{name}/{file}" for file in files_in(disk, place)]
            foreign = [file for file in inner if file not in parts]
            if not inner or foreign:
                folders.append(name if len(foreign) == len(inner) else foreign[0])
        elif not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            raise ExistsError(
                f"{place}: expected files to keep in the folder of the new checkpoint, found a pipe, a socket or a "
                "device; write to another path, or remove it"
            )
        elif name not in parts and name in names:
            raise _name_taken_error(place)
        elif name not in parts:
            others.append(name)
    if folders:
        raise ExistsError(
            f"{path}: expected a checkpoint to replace, found folders in it that are not part of it: "
            f"{join_names(tuple(folders))}; write to another path, or move them out of it"
        )
    if check_others:
        check_others(path, others)
    return OldFolder(owned, parts, others)


def files_in(disk: Disk, path: str) -> Iterator[str]:
    """Yields the files below a directory, as paths within it. Links count as files and are not followed."""
    for name in disk.list(path):
        inner = os.path.join(path, name)
        if is_dir(inner):
            yield from (f"{name}/{file}" for file in files_in(disk, inner))
        else:
            yield name


def _is_same_file(found: os.stat_result | None, known: os.stat_result) -> bool:
    """Returns True if a file is the known one and was not written to since."""
    return (
        found is not None
        and os.path.samestat(found, known)
        and (found.st_size, found.st_mtime_ns) == (known.st_size, known.st_mtime_ns)
    )


def _name_taken_error(path: str) -> ExistsError:
    return ExistsError(
        f"{path}: expected a file of the checkpoint that is replaced, found another file, whose name the new "
        "checkpoint needs; write to another path, or move the file"
    )


def _link_or_copy(disk: Disk, old: Entry, new: Entry, found: os.stat_result) -> None:
    """Gives a file a second name, or copies it where there are no hard links.

    Raises `ExistsError` if the name is taken.
    """
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
        raise _name_taken_error(old) from None
    try:
        file = SequentialWriter(sink)
        with opened(disk, old) as fd:
            mode = os.fstat(fd).st_mode & 0o777  # without set-user-id: the owner may change
            disk.set_mode(sink.opened, mode | stat.S_IWUSR)  # before the data, which the mode may hide from others
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            while count := disk.read(fd, buffer, file.size):
                file.write(buffer[:count])
        file.sync()
        disk.set_mode(sink.opened, mode)
    finally:
        sink.close()


def _is_empty(disk: Disk, path: Entry) -> bool:
    with folder(disk, path) as there:
        return not disk.list(there)


@contextlib.contextmanager
def _open_subfolder(disk: Disk, top: Opened, within: str) -> Iterator[Opened]:
    """Opens a directory by its path within another. Makes the missing ones on the way, durably."""
    with contextlib.ExitStack() as stack:
        here = top
        for name in filter(None, within.split("/")):
            place = here.entry(name)
            if lstat(place) is None:
                disk.make_dir(place)
                disk.sync_dir(here)
            here = stack.enter_context(folder(disk, place))
        yield here


def _parent_folders(part: str) -> list[str]:
    """Returns the directories on the way to a file, from the top."""
    keys = part.split("/")[:-1]
    return ["/".join(keys[: n + 1]) for n in range(len(keys))]
