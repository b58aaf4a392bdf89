"""The states of a disk that a crash can leave, after any operation of a log.

The model allows at least what POSIX and the usual file systems (ext4, xfs, btrfs) allow:

- What is written to a file is durable once that file is synced, and what happens to the names in a folder once that
  folder is synced; the one says nothing about the other.
- Of everything else any part may be durable, in whatever order it was done: each operation is lost, or not, by itself.
  A write may be lost while the file's size is kept (it then holds zeros, or junk), or be torn at some place.
- One operation on names (`rename`, `link`, an exchange) is atomic. A rename from one folder into
  another is durable when both have been synced: of one that was synced alone POSIX says nothing, though the usual
  file systems log both names in one transaction, which is why it is never half done.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .recording import Inodes, Op, Tree, View, changed, tree_of

_SUBSETS = 5  # unsynced operations on the names of one folder of which all subsets are tried; of more, some
_TORN = (0, 512, 4096)  # bytes after which a write is torn; and after half of it


class Fate(NamedTuple):
    """What became of an operation that was not durable.

    "kept", "lost", or of a write: "zeros" and "junk" in its place, "cut" after so many bytes, "torn" with zeros after
    them, or "late" with zeros before them.
    """

    what: str
    at: int = 0


KEPT, LOST, ZEROS, JUNK = Fate("kept"), Fate("lost"), Fate("zeros"), Fate("junk")
Fates = dict[int, Fate]  # by the number of the pending operation; those that are not there are lost


class Crash(NamedTuple):
    """A state of the disk: after how many operations of the log, the fates of the pending ones, and the content."""

    after: int
    fates: Sequence[tuple[Op, Fate]]
    tree: Tree
    views: frozenset[View]

    def __str__(self) -> str:
        lines = [f"  {fate.what}{fate.at or ''} {op}" for op, fate in self.fates]
        return "\n".join([f"a crash after operation {self.after}, with the pending operations", *lines])


class Model:
    """The durable content and the pending operations of a disk, as a log continues."""

    def __init__(self, base: Inodes, log: Sequence[Op]):
        self._folders = {inode: dict(names) for inode, names in base.folders.items()}
        self._files = dict(base.files)
        self.pending: list[Op] = []
        self._unsynced: dict[int, set[int]] = {}  # of a pending operation on names in two folders, by its id
        for op in log:
            if op.kind == "make_dir" and op.names[0].inode is not None:
                self._folders.setdefault(op.names[0].inode, {})
            elif op.kind == "create" and op.names[0].inode is not None:
                self._files.setdefault(op.names[0].inode, b"")
        self._contents: dict[tuple[int, tuple[Fate, ...]], bytes] = {}

    def do(self, op: Op) -> None:
        """The next operation."""
        if op.kind == "sync":
            durable = [one for one in self.pending if not one.names and one.inode == op.inode]
        elif op.kind == "sync_dir":
            durable = [one for one in self.pending if one.names and self._is_synced(one, op.inode)]
        else:
            self.pending.append(op)
            return
        for one in durable:
            if one.names:
                _rename(self._folders, one)
            else:
                self._files[one.inode] = changed(self._files[one.inode], one)
        gone = set(map(id, durable))
        self.pending = [one for one in self.pending if id(one) not in gone]
        self._contents.clear()

    def _is_synced(self, op: Op, folder: int) -> bool:
        """Returns True if, with this folder, all folders are synced in which an operation has changed names."""
        if len(op.folders) == 1:
            return folder in op.folders
        unsynced = self._unsynced.setdefault(id(op), set(op.folders))
        unsynced.discard(folder)
        return not unsynced

    def tree(self, fates: Mapping[int, Fate]) -> Tree:
        """Returns the content of the disk if these are the fates of the pending operations."""
        folders = {inode: dict(names) for inode, names in self._folders.items()}
        touched: dict[int, list[tuple[Op, Fate]]] = {}
        for n, op in enumerate(self.pending):
            fate = fates.get(n, LOST)
            if not op.names:
                touched.setdefault(op.inode, []).append((op, fate))
            elif fate is KEPT:
                _rename(folders, op)
        files = dict(self._files)
        for inode, changes in touched.items():
            files[inode] = self._content(inode, changes)
        return tree_of(folders, files)

    def _content(self, inode: int, changes: Sequence[tuple[Op, Fate]]) -> bytes:
        key = inode, (Fate("", len(changes)), *(fate for _, fate in changes))
        if key not in self._contents:
            content = self._files[inode]
            for op, fate in changes:
                if fate.what != "lost":
                    content = changed(content, _spoiled(op, fate))
            self._contents[key] = content
        return self._contents[key]


def crashes(base: Inodes, log: Sequence[Op], *, begin: int = 0, seed: int = 0, extra: int = 0) -> Iterator[Crash]:
    """The states after each operation of a log, many of them more than once; `extra` ones at random after each.

    Those of the first operations are left out where a crash is to come after `begin` of them at least.
    """
    chance = random.Random(seed)
    disk, views = Model(base, log), frozenset[View]()
    for after in range(len(log) + 1):
        if after:
            op = log[after - 1]
            if op.kind == "expect":
                views = op.views
            else:
                disk.do(op)
        if after < begin:
            continue
        for fates in fates_of(disk.pending, chance, extra):
            all_fates = [(op, fates.get(n, LOST)) for n, op in enumerate(disk.pending)]
            yield Crash(after, all_fates, disk.tree(fates), views)


def fates_of(pending: Sequence[Op], chance: random.Random, extra: int) -> Iterator[Fates]:
    """Yields the possible fates of pending operations."""
    everything = dict.fromkeys(range(len(pending)), KEPT)
    names = {n: KEPT for n, op in enumerate(pending) if op.names}
    data = {n: KEPT for n, op in enumerate(pending) if not op.names}
    writes = [n for n in data if pending[n].kind == "write"]
    yield everything
    if not pending:
        return
    yield {}
    yield names
    yield data
    yield {**everything, **dict.fromkeys(writes, ZEROS)}
    yield {**everything, **dict.fromkeys(writes, JUNK)}
    for n in everything:
        yield {**everything, n: LOST}
        yield {n: KEPT}
    for n in writes:
        size = len(pending[n].data)
        for at in sorted({at for at in (*_TORN, size // 2) if at < size}):
            for what in ("cut", "torn", "late"):
                yield {**everything, n: Fate(what, at)}
        yield {**everything, n: ZEROS}
        yield {**everything, n: JUNK}
        yield {**names, n: KEPT}
    for folder in {folder for n in names for folder in pending[n].folders}:
        inside = [n for n in names if folder in pending[n].folders]
        for some in _subsets(inside):
            lost = {n: LOST for n in inside if n not in some}
            yield {**everything, **lost}
            yield {**names, **lost}
            yield dict.fromkeys(some, KEPT)
    for _ in range(extra):
        yield {n: _any(pending[n], chance) for n in everything}


def _subsets(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """All of them, or of many numbers: the first ones, the last ones, and all but two."""
    if len(numbers) <= _SUBSETS:
        for count in range(len(numbers) + 1):
            yield from itertools.combinations(numbers, count)
        return
    for n in range(len(numbers)):
        yield numbers[:n]
        yield numbers[n:]
    for pair in itertools.combinations(numbers, 2):
        yield [n for n in numbers if n not in pair]


def _any(op: Op, chance: random.Random) -> Fate:
    if op.kind != "write" or chance.random() < 0.5:
        return chance.choice((KEPT, LOST))
    return chance.choice((ZEROS, JUNK, Fate(chance.choice(("cut", "torn", "late")), chance.randrange(len(op.data)))))


def _rename(folders: dict[int, dict[str, int]], op: Op) -> None:
    # Then what came after it in one of the folders may be durable already
    crosses = op.names[0].folder != op.names[-1].folder
    moved = next((inode for _, _, inode in op.names if inode is not None), None)
    for folder, name, inode in op.names:
        if inode is None:
            if not crosses or folders[folder].get(name) == moved:
                folders[folder].pop(name, None)
        else:
            folders[folder][name] = inode


def _spoiled(op: Op, fate: Fate) -> Op:
    """A write as it came to the disk."""
    zeros = bytes(len(op.data))
    match fate.what:
        case "zeros":
            return op._replace(data=zeros)
        case "junk":
            return op._replace(data=b"\xa5" * len(zeros))
        case "cut":
            return op._replace(data=op.data[: fate.at])
        case "torn":
            return op._replace(data=op.data[: fate.at] + zeros[fate.at :])
        case "late":
            return op._replace(data=zeros[: fate.at] + op.data[fate.at :])
    return op
