"""A disk that writes down all that changes, in one order, while it really happens."""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from treering.stores.posix import Disk

ROOT = 0  # the number of the scratch folder; every file and folder has one, whatever its name
View = str  # the content of the disk, in words: "old", "steps 1 2"
Tree = dict[str, bytes | None]  # contents of files by path below the scratch folder; None: a folder


class Name(NamedTuple):
    """From now on this name in a folder is that of `inode`; None: nothing has it."""

    folder: int
    name: str
    inode: int | None


class Op(NamedTuple):
    """One operation. `names` change in one step; `data` is what is written at an offset, `size` a file's new size.

    An operation "expect" changes nothing: from there on, one of `views` has to be seen after a crash. `process` is the
    number of the one in its job that asked for it, and `life` how many jobs were killed before.
    """

    kind: str
    path: str
    names: tuple[Name, ...] = ()
    inode: int = -1
    offset: int = 0
    data: bytes = b""
    size: int = 0
    views: frozenset[View] = frozenset()
    process: int = 0
    life: int = 0

    @property
    def folders(self) -> frozenset[int]:
        """Those in which names change."""
        return frozenset(name.folder for name in self.names)

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + (f" at {self.offset}" if self.kind == "write" else "")


class Inodes:
    """Files and folders by number."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {ROOT: {}}
        self.files: dict[int, bytes] = {}

    def find(self, path: str) -> int | None:
        """Returns the number of the file or folder at a relative path, None if there is none."""
        inode = ROOT
        for part in path.split("/") if path else ():
            inode = self.folders.get(inode, {}).get(part, -1)
            if inode < 0:
                return None
        return inode

    def tree(self) -> Tree:
        """All that has a name."""
        return tree_of(self.folders, self.files)

    def change(self, op: Op) -> None:
        """Does an operation."""
        for folder, name, inode in op.names:
            if inode is None:
                self.folders[folder].pop(name, None)
            else:
                self.folders[folder][name] = inode
        if op.kind in ("write", "truncate", "preallocate"):
            self.files[op.inode] = changed(self.files[op.inode], op)


def tree_of(folders: Mapping[int, Mapping[str, int]], files: Mapping[int, bytes]) -> Tree:
    """Contents by path, of what can be reached from the scratch folder."""
    found: Tree = {}
    stack = [("", ROOT)]
    while stack:
        path, folder = stack.pop()
        for name, inode in folders[folder].items():
            inner = path + name
            found[inner] = files.get(inode)
            if inode in folders:
                stack.append((inner + "/", inode))
    return found


def changed(content: bytes, op: Op) -> bytes:
    """A file's content after an operation on it."""
    if op.kind == "truncate":
        return content[: op.size].ljust(op.size, b"\0")
    if op.kind == "preallocate":
        return content.ljust(op.size, b"\0")
    return content[: op.offset].ljust(op.offset, b"\0") + op.data + content[op.offset + len(op.data) :]


class RecordingDisk(Disk):
    """Does everything in a scratch folder, one operation at a time, and keeps the log of what has changed.

    What others write there without it, such as TensorStore, is found when it is listed or opened, and counts as
    written then. With `fail_at` the operation with that number, from 1, fails; with `kill` so do all that come after
    it, as if the process were dead: until `revive`. A second number is of an operation of the process after that.
    """

    def __init__(self, root: str, *, fail_at: Sequence[int] = (), kill: bool = False):
        self.root, self.log = root, list[Op]()
        self.tried: list[list[str]] = [[]]  # what each process asked for, whether it worked or not
        self._fail_at, self._kill, self._dead = list(fail_at), kill, False
        self._lock = threading.RLock()
        self._open: dict[int, int] = {}  # by file descriptor
        self._numbers = iter(range(1, 1 << 60))
        self._live = Inodes()
        for op in self._found("", ROOT):
            self._live.change(op)
        self.base = Inodes()  # what was there before, durably
        self.base.folders = {inode: dict(names) for inode, names in self._live.folders.items()}
        self.base.files = dict(self._live.files)

    def expect(self, *views: View) -> None:
        """From here on, one of these has to be seen after a crash."""
        with self._lock:
            self.log.append(Op("expect", " or ".join(views), views=frozenset(views)))

    def revive(self) -> None:
        """The next process. The dead one's files have been closed, which always works."""
        with self._lock:
            del self._fail_at[:1]
            self.tried.append([])
            self._dead = False

    def check(self) -> None:
        """Raises `AssertionError` unless the log explains the content of the disk."""
        there = Inodes()
        numbers, self._numbers = self._numbers, iter(range(1, 1 << 60))
        for op in self._found("", ROOT, there):
            there.change(op)
        self._numbers = numbers
        found, expected = there.tree(), self._live.tree()
        wrong = {path for path in {**expected, **found} if expected.get(path, 0) != found.get(path, 0)}
        assert not wrong, f"the log does not explain {sorted(wrong)}"

    # Operations

    def make_dir(self, path: str) -> None:
        with self._step():
            super().make_dir(path)
            number = next(self._numbers)
            self._live.folders[number] = {}
            self._note("make_dir", path, names=[self._name(path, number)])

    def remove_dir(self, path: str) -> None:
        with self._step():
            super().remove_dir(path)
            self._note("remove_dir", path, names=[self._name(path, None)])

    def hard_link(self, old: str, new: str) -> bool:
        with self._step():
            linked = super().hard_link(old, new)
            if linked:
                self._note("link", new, names=[self._name(new, self._at(old))])
            return linked

    def copy_link(self, old: str, new: str) -> None:
        with self._step():
            super().copy_link(old, new)
            self._discover(os.path.dirname(new))

    def set_mode(self, path: str, mode: int) -> None:
        with self._step():
            super().set_mode(path, mode)  # which changes no content

    def set_group(self, path: str, group: int) -> None:
        with self._step():
            super().set_group(path, group)  # nor does this

    def make_read_only(self, fd: int) -> None:
        with self._step():
            super().make_read_only(fd)  # nor does this

    def link(self, old: str, new: str) -> None:
        with self._step():
            super().link(old, new)
            self._note("link", new, names=[self._name(new, self._at(old))])

    def rename(self, old: str, new: str) -> None:
        with self._step():
            super().rename(old, new)
            self._note("rename", new, names=[self._name(old, None), self._name(new, self._at(old))])

    def rename_new(self, old: str, new: str) -> None:
        with self._step():
            super().rename_new(old, new)
            self._note("rename_new", new, names=[self._name(old, None), self._name(new, self._at(old))])

    def exchange(self, a: str, b: str) -> bool:
        with self._step():
            if not super().exchange(a, b):
                return False
            self._note("exchange", b, names=[self._name(a, self._at(b)), self._name(b, self._at(a))])
            return True

    def unlink(self, path: str) -> None:
        with self._step():
            super().unlink(path)
            self._note("unlink", path, names=[self._name(path, None)])

    def sync_dir(self, path: str) -> None:
        with self._step("sync_dir"):
            super().sync_dir(path)
            if self._inside(path):
                self._note("sync_dir", path, inode=self._at(path))

    def create(self, path: str) -> int:
        with self._step():
            fd = super().create(path)
            number = self._open[fd] = next(self._numbers)
            self._live.files[number] = b""
            self._note("create", path, names=[self._name(path, number)])
            return fd

    def preallocate(self, fd: int, size: int) -> None:
        with self._step():
            super().preallocate(fd, size)
            if self.size(fd) == size:
                self._note("preallocate", self._path(fd), inode=self._open[fd], size=size)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        with self._step():
            super().write(fd, data, offset)
            self._note("write", self._path(fd), inode=self._open[fd], offset=offset, data=bytes(data))

    def truncate(self, fd: int, size: int) -> None:
        with self._step():
            super().truncate(fd, size)
            self._note("truncate", self._path(fd), inode=self._open[fd], size=size)

    def sync(self, fd: int) -> None:
        with self._step():
            super().sync(fd)
            if fd in self._open:
                self._note("sync", self._path(fd), inode=self._open[fd])

    def open_shared(self, path: str) -> int:
        with self._step():
            new = not os.path.exists(path)
            fd = super().open_shared(path)
            number = self._open[fd] = next(self._numbers) if new else self._at(path)
            if new:
                self._live.files[number] = b""
                self._note("create", path, names=[self._name(path, number)])
            return fd

    def open(self, path: str) -> int:
        with self._lock:
            self._discover(os.path.dirname(path))
            fd = super().open(path)
            if self._inside(path):
                self._open[fd] = self._at(path)
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            super().close(fd)

    def list(self, path: str) -> list[str]:
        with self._lock:
            self._discover(path)
            return super().list(path)

    # How they are written down

    @contextlib.contextmanager
    def _step(self, kind: str = "") -> Iterator[None]:
        with self._lock:
            if self._dead:
                raise OSError(errno.EIO, "injected: the process is dead")
            self.tried[-1].append(kind)
            if [len(self.tried[-1])] == self._fail_at[:1]:
                self._dead = self._kill
                raise OSError(errno.EIO, "injected: an error of the disk")
            yield

    def _note(self, kind: str, path: str, *, names: Iterable[Name] = (), **about: int | bytes) -> None:
        relative = os.path.relpath(path, self.root)
        op = Op(kind, relative, tuple(names), process=_process(), life=self._life, **about)  # type: ignore[arg-type]
        self._live.change(op)
        self.log.append(op)

    @property
    def _life(self) -> int:
        return len(self.tried) - 1

    def _inside(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + "/")

    def _at(self, path: str) -> int:
        found = self._live.find("" if path == self.root else os.path.relpath(path, self.root))
        assert found is not None, f"{path} was made by others, and has not been found"
        return found

    def _name(self, path: str, inode: int | None) -> Name:
        folder, name = os.path.split(path)
        return Name(self._at(folder), name, inode)

    def _path(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")

    def _discover(self, path: str) -> None:
        """Writes down what others have made in a folder."""
        if self._inside(path) and os.path.isdir(path):
            relative = "" if path == self.root else os.path.relpath(path, self.root)
            number = self._live.find(relative)
            if number is not None:
                for op in self._found(relative, number):
                    self._live.change(op)
                    self.log.append(op._replace(life=self._life))

    def _found(self, relative: str, number: int, known: Inodes | None = None) -> Iterator[Op]:
        """Yields the operations that make the entries of a folder that are not known yet."""
        known = known or self._live
        for entry in sorted(os.scandir(os.path.join(self.root, relative)), key=lambda entry: entry.name):
            path = os.path.join(relative, entry.name)
            inode = known.folders[number].get(entry.name)
            folder = stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode)
            if inode is None:
                inode = next(self._numbers)
                if folder:
                    known.folders[inode] = {}
                else:
                    known.files[inode] = b""
                yield Op("make_dir" if folder else "create", path, (Name(number, entry.name, inode),))
                if not folder:
                    with open(entry.path, "rb") as file:
                        yield Op("write", path, inode=inode, data=file.read())
            if folder:
                yield from self._found(path, inode, known)


def _process() -> int:
    """The number of the process that a thread stands for, see `scenarios_together`."""
    name, _, number = threading.current_thread().name.partition("-")
    return int(number) if name == "process" else 0
