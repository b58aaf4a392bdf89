"""The layout of pieces in array files, computed by pure functions from the catalogue of a save."""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._core import dtypes
from .._core.boxes import Box, Cells, box_shape, full_box, sharding_to_json
from .._core.entries import Entry, IteratorEntry, IteratorInfo, StatesEntry, ValueEntry
from .._processes.assignment import Assignment, Piece
from .._pytree.leaves import Catalogue
from ..formats.safetensors.header import MAX_HEADER_BYTES, Tensor, encode_header
from ..formats.treering.manifest import BLOCK, piece_key
from ..formats.treering.manifest_fields import ArrayRow, Layout, Placement, states_row
from ..stores.buffers import PAGE

_OFFSET_DIGITS = 16
_PREFIX_BYTES = len(b"12345678") + len(b'{"__metadata__":{"xxh3":"')


class PlannedFile(NamedTuple):
    """An array file before it is written. Piece `first + i` begins at byte `begins[i]` of the buffer."""

    first: int
    begins: Sequence[int]
    nbytes: int
    header: bytes

    @property
    def blocks(self) -> int:
        """The number of blocks of the buffer. Each has one checksum."""
        return -(-self.nbytes // BLOCK)


def plan(
    entries: Sequence[Entry],
    pieces: Sequence[Piece],
    header_limit: int = MAX_HEADER_BYTES * 9 // 10,
    file_bytes: int | None = None,
) -> list[PlannedFile]:
    """Returns the files for the pieces that a process writes. No header exceeds `header_limit` bytes.

    With `file_bytes`, no buffer exceeds that size either, unless a single piece is larger.
    """
    groups: list[tuple[int, int]] = []
    first = used = nbytes = 0
    for n, piece in enumerate(pieces):
        # An upper bound: every character of the key escaped, and 120 bytes of dtype, shape and offsets.
        cost = 6 * len(entries[piece.leaf].path) + 120 + 24 * len(piece.box) + _OFFSET_DIGITS * (piece.nbytes // BLOCK)
        # Successive runs of bytes of one piece form one tensor, so they must be in one file.
        again = n > first and (piece.leaf, piece.box) == (pieces[n - 1].leaf, pieces[n - 1].box)
        full = used + cost > header_limit or (file_bytes is not None and nbytes + piece.nbytes > file_bytes)
        if n > first and not again and full:
            groups.append((first, n))
            first, used, nbytes = n, 0, 0
        used += cost
        nbytes += piece.nbytes
    if pieces:
        groups.append((first, len(pieces)))
    return [_file(entries, pieces[a:b], a) for a, b in groups]


def plan_groups(
    entries: Sequence[Entry], pieces: Sequence[Piece], lengths: Iterable[int], file_bytes: int | None = None
) -> list[PlannedFile]:
    """Returns the files for groups of successive pieces of these lengths. No file has pieces of two groups."""
    found: list[PlannedFile] = []
    for first, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        files = plan(entries, pieces[first:end], file_bytes=file_bytes)
        found += [file._replace(first=file.first + first) for file in files]
    return found


def names(token: str, files: int, index: int = 0, count: int = 1) -> list[str]:
    """Returns the names of the files that process `index` of `count` writes.

    The numbers in the names of a process are `index` modulo `count`. So a process chooses unique names without knowing
    how many files its peers write.
    """
    numbers = range(index, files * count, count)
    return [f"arrays-{token}-{number:05}-of-{files * count:05}.safetensors" for number in numbers]


def _file(entries: Sequence[Entry], pieces: Sequence[Piece], first: int) -> PlannedFile:
    *begins, end = itertools.accumulate((piece.nbytes for piece in pieces), initial=0)
    tensors: dict[str, Tensor] = {}
    other_dtypes: dict[str, str] = {}
    for piece, begin, stop in zip(pieces, begins, [*begins[1:], end], strict=True):
        entry: Any = entries[piece.leaf]
        if piece.box == full_box(entry.shape):
            key, shape = piece_key(entry.path, None), entry.shape
        else:
            key, shape = piece_key(entry.path, piece.box), box_shape(piece.box)
        stored, itemsize, widened = dtypes.safetensors_layout(entry.dtype)
        if widened:
            shape = (*shape, itemsize)
        first_run = tensors.get(key)
        tensors[key] = Tensor(stored, shape, (first_run.data_offsets[0] if first_run else begin, stop))
        if stored == "U8" and entry.dtype != "uint8":
            other_dtypes[f"dtype:{key}"] = entry.dtype
    metadata = {
        "xxh3": "0" * (_OFFSET_DIGITS * -(-end // BLOCK)),
        "block": str(BLOCK),
        "format": "treering",
        "version": "1",
    }
    return PlannedFile(first, begins, end, encode_header(tensors, {**metadata, **other_dtypes}, PAGE))


def fill_checksums(header: bytes, checksums: str) -> bytes:
    """Returns the header with the checksums in place of the zeros that `plan` has reserved for them."""
    text = checksums.encode()
    return header[:_PREFIX_BYTES] + text + header[_PREFIX_BYTES + len(text) :]


LeafFiles = tuple[tuple[int, ...], ...]  # for each cell of a grid, the numbers of the files that may hold it


class FileIndex:
    """Finds the number, in the manifest, of the file that holds a piece.

    `firsts[p]` has the number of the first piece of each file of process p. `order(p)` yields the pieces of process p
    in order. It is called only for a process with several files.
    """

    def __init__(self, firsts: Sequence[Sequence[int]], order: Callable[[int], Iterable[tuple[int, Box]]]):
        self._firsts = firsts
        self._before = list(itertools.accumulate(map(len, firsts), initial=0))
        self._one_each = self._before[-1] == len(firsts) and all(firsts)
        self._only = np.array(
            [n if len(own) == 1 else -1 for n, own in zip(self._before, firsts, strict=False)], np.int64
        )
        self._order = functools.cache(lambda process: {piece: n for n, piece in enumerate(order(process))})

    def of(self, process: int, leaf: int, box: Box) -> int:
        """Returns the number of the file with a piece that a process wrote."""
        firsts = self._firsts[process]
        n = 0 if len(firsts) == 1 else bisect.bisect_right(firsts, self._order(process)[leaf, box]) - 1
        return self._before[process] + n

    def of_share(self, leaf: int, share: Assignment) -> list[int]:
        """Returns the number of the file with each piece of an array. There may be 100,000 pieces."""
        files = self._only[np.asarray(share.writers)]
        for n in np.flatnonzero(files < 0).tolist():
            files[n] = self.of(int(share.writers[n]), leaf, share.boxes[n])
        return files.tolist()

    def of_all(self, holders: LeafFiles) -> LeafFiles | None:
        """Replaces each process by the number of its only file. Returns None unless each has exactly one file."""
        if self._one_each:
            return holders  # The number of every file is that of its process.
        if any(len(self._firsts[process]) != 1 for own in holders for process in own):
            return None
        return tuple(tuple(self._before[process] for process in own) for own in holders)


class ReportedFiles(FileIndex):
    """The files of pieces as the processes have reported them, by the leaf and its box."""

    def __init__(self, files: Mapping[tuple[int, Box], int]):
        self._files = files

    def of(self, process: int, leaf: int, box: Box) -> int:
        return self._files[leaf, box]

    def of_share(self, leaf: int, share: Assignment) -> list[int]:
        return [self._files[leaf, box] for box in share.boxes]

    def of_all(self, holders: LeafFiles) -> LeafFiles | None:
        return None


class Rows(NamedTuple):
    """The leaf rows of the manifest in tree order.

    layouts, holders: those that rows of arrays refer to.
    iterators: what is recorded about iterators, by path.
    """

    leaves: list[ArrayRow | ValueEntry]
    layouts: list[Layout]
    holders: list[LeafFiles]
    iterators: dict[str, IteratorInfo]


def rows(catalogue: Catalogue, shares: Mapping[int, Assignment], numbers: FileIndex) -> Rows:
    """Returns the rows of the manifest. A leaf without a share is one piece in a file of process 0."""
    known: dict[Any, int | None] = {}
    out = Rows([], [], [], {})
    only = numbers.of_all(((0,),))

    def listed(files: LeafFiles) -> int:
        out.holders.append(files)
        return len(out.holders) - 1

    def holding(files: LeafFiles) -> int:
        """Returns the number of the holders that consist of these files. Adds them if they are new."""
        key = ("files", files)
        if key not in known:
            known[key] = listed(files)
        return known[key] or 0

    def of_writers(holders: LeafFiles) -> int | None:
        """Returns the number of the holders of these processes, or None unless each process has exactly one file."""
        key = ("writers", holders)
        if key not in known:
            files = numbers.of_all(holders)
            known[key] = None if files is None else listed(files)
        return known[key]

    def add(cells: Cells, holders: int, sharding: Any) -> int:
        out.layouts.append(Layout(cells.cuts, holders, sharding and sharding_to_json(sharding)))
        return len(out.layouts) - 1

    def by_turns(share: Assignment, sharding: Any) -> int | None:
        """Returns the number of the layout that all leaves with this sharding share.

        Its holders take turns from leaf to leaf. Returns None unless each process has exactly one file.
        """
        key = (sharding, share.layout)
        if share.layout and key not in known:
            holders = of_writers(share.layout.holders)
            known[key] = None if holders is None else add(share.layout.boxes, holders, sharding)
        return known.get(key)

    def place(leaf: int, shape: tuple[int, ...]) -> int | tuple[int, int]:
        if (share := shares.get(leaf)) is None:
            return numbers.of(0, leaf, full_box(shape))
        sharding = catalogue.shardings.get(leaf)
        if sharding is None and len(share.boxes) == 1:
            return numbers.of(share.writers[0], leaf, share.boxes[0])
        if (found := by_turns(share, sharding)) is not None:
            return found, share.turn
        files = numbers.of_share(leaf, share)
        key = (sharding, share.boxes if isinstance(share.boxes, Cells) else tuple(share.boxes), tuple(files))
        if key not in known:
            cells, order = Cells.of(share.boxes)
            known[key] = add(cells, holding(tuple((files[n],) for n in order)), sharding)
        return known[key] or 0, 0

    for n, entry in enumerate(catalogue.entries):
        if isinstance(entry, IteratorEntry):
            is_array = isinstance(entry, StatesEntry)
            value = ValueEntry(entry.path, entry.type, entry.value)
            out.leaves.append(states_row(entry, place(n, entry.shape)) if is_array else value)
            if entry.info != IteratorInfo():
                out.iterators[entry.path] = entry.info
            continue
        if isinstance(entry, ValueEntry):
            out.leaves.append(entry)
            continue
        if n in catalogue.tied:
            where = catalogue.entries[catalogue.tied[n]].path
        else:
            where = only[0][0] if only and n not in shares else place(n, entry.shape)
        out.leaves.append(ArrayRow(entry.path, entry.type, entry.dtype, entry.shape, entry.impl, where))
    return out


def placement(catalogue: Catalogue) -> Placement | None:
    """Returns the manifest's record of the devices and shardings of the arrays, or None if no array has one."""
    places: list[dict[str, Any]] = []
    numbers: dict[int, int] = {id(None): -1}  # by identity: arrays with equal places share one object
    for place in dict(zip(map(id, catalogue.places), catalogue.places, strict=True)).values():
        if place is None:
            continue
        if (found := dict(place)) not in places:
            places.append(found)
        numbers[id(place)] = places.index(found)
    by_leaf = map(numbers.__getitem__, map(id, catalogue.places))
    runs = [(len(list(run)), number) for number, run in itertools.groupby(by_leaf)]
    return Placement(places, runs) if places else None
