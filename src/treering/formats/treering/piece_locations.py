"""Finds the bytes of an array: its pieces, and the parts of a wanted box that they hold.


Leaves that are contiguous in one file are handled together, because there may be a hundred thousand.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, Cells, box_shape, full_box, intersect, slices
from ..._core.entries import ArrayEntry, Entry
from ..._threads.pool import in_parallel
from ...stores.buffers import empty_aligned_array, merge
from . import manifest
from .array_file import ArrayFile, ArrayHeader
from .manifest import Manifest, piece_key
from .manifest_fields import ArrayRow, File
from .open_files import OpenFiles
from .piece_reads import Memory, PieceRead, assemble, join_contiguous, split_piece

_MAX_READS = 10  # objects that are read at a time, and may be in memory together with the returned arrays

# Of a file with a large header, fewer arrays are as fast one by one: only their entries are parsed.
_MIN_ARRAYS = 8
_LARGE_HEADER_BYTES = 64 << 10

_NO_DTYPES: Mapping[str, str] = {}


class _LeafKind(NamedTuple):
    """The properties that arrays of one dtype and shape share.

    The header of a file has `code` and `stored` as the dtype and the shape of their tensors. It has `noted` as their
    dtype in its metadata, which is None if the dtype of the tensor is the dtype of the array.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    box: Box
    nbytes: int
    code: str
    stored: tuple[int, ...]
    noted: str | None


@functools.lru_cache(maxsize=1024)
def _leaf_kind(dtype: str, shape: tuple[int, ...]) -> _LeafKind:
    code, stored, nbytes, noted = stored_as(dtype, shape)
    return _LeafKind(dtypes.to_numpy(dtype), shape, full_box(shape), nbytes, code, stored, noted)


@functools.lru_cache(maxsize=1024)
def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int, str | None]:
    """Returns the dtype and shape of the tensor that holds an array, its bytes, and the dtype in the file's metadata.

    The last is None for a dtype that safetensors has.
    """
    code, itemsize, widened = dtypes.safetensors_layout(dtype)
    noted = dtype if code == "U8" and dtype != "uint8" else None
    return code, (*shape, itemsize) if widened else shape, itemsize * math.prod(shape), noted


class ContiguousLeaves:
    """The contiguous arrays of one file of which a reader wants every element.

    `numbers` are their positions in the list of all wanted boxes.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._rows: list[ArrayRow] = []
        self._kinds: list[_LeafKind] = []
        self._begins = self._ends = np.zeros(0, np.int64)  # byte offsets in the buffer of the file

    @staticmethod
    def group_by_file(
        wanted: Sequence[tuple[ArrayEntry, Box]], files: Sequence[File]
    ) -> "tuple[dict[int, ContiguousLeaves], Iterable[int]]":
        """Returns the contiguous leaves among the wanted boxes by their files, and the numbers of all other boxes.

        files: those of the checkpoint. The leaves of a file are handled one by one if that takes less time.
        """
        if len(wanted) < 2 or (
            len(wanted) < _MIN_ARRAYS and any(file.header > _LARGE_HEADER_BYTES for file in files[:_MIN_ARRAYS])
        ):
            return {}, range(len(wanted))
        found: dict[int, ContiguousLeaves] = {}
        rest: list[int] = []
        # The kind of the previous array. Comparing with it is faster than a look-up in the cache of `_leaf_kind`.
        dtype, shape = wanted[0][0].dtype, wanted[0][0].shape
        kind = _leaf_kind(dtype, shape)
        file, own = -1, ContiguousLeaves()
        for n, (row, box) in enumerate(wanted):
            where: Any = row.where  # type: ignore[attr-defined] (each is a row of the manifest)
            if row.shape != shape or row.dtype != dtype:
                dtype, shape = row.dtype, row.shape
                kind = _leaf_kind(dtype, shape)
            if type(where) is not int or box != kind.box or not kind.nbytes:
                rest.append(n)
                continue
            if where != file:
                file, own = where, found.setdefault(where, ContiguousLeaves())
            own.numbers.append(n)
            own._rows.append(row)  # type: ignore[arg-type]
            own._kinds.append(kind)
        return found, rest

    def locate(self, header: ArrayHeader, fallback: Callable[[ArrayRow], int]) -> None:
        """Looks up the offsets of the arrays in the file's buffer.

        fallback: returns the offset of an array whose tensor differs from the manifest. It knows the exceptions, and
            raises for the rest.
        """
        tensors, noted = header.tensors, header.dtypes or _NO_DTYPES
        begins: list[int] = []
        for row, kind in zip(self._rows, self._kinds, strict=True):
            tensor = tensors.get(row.path)
            if (
                tensor is None
                or tensor.dtype != kind.code
                or tensor.shape != kind.stored
                or tensor.data_offsets[1] - tensor.data_offsets[0] != kind.nbytes
                or noted.get(row.path) != kind.noted
            ):
                begins.append(fallback(row))
            else:
                begins.append(tensor.data_offsets[0])
        self._begins = np.array(begins, np.int64)
        self._ends = self._begins + np.array([kind.nbytes for kind in self._kinds], np.int64)

    def ranges(self) -> list[tuple[int, int]]:
        """Returns the byte ranges of the file's buffer that the arrays take. Adjacent ranges are merged."""
        order = np.argsort(self._begins, kind="stable")
        begins, ends = self._begins[order], np.maximum.accumulate(self._ends[order])
        edges = np.flatnonzero(begins[1:] > ends[:-1])  # the last array before each gap
        firsts, lasts = begins[[0, *(edges + 1).tolist()]], ends[[*edges.tolist(), -1]]
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    def arrays(self, memory: Memory) -> list[np.ndarray]:
        """Returns the arrays as views of memory that holds their ranges."""
        kinds = np.array([*map(id, self._kinds)])
        breaks = (kinds[1:] != kinds[:-1]) | (self._begins[1:] != self._ends[:-1])
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(self._kinds)]
        found: list[np.ndarray] = []
        for first, last in itertools.pairwise(edges):
            kind = self._kinds[first]
            found += memory.views(int(self._begins[first]), last - first, kind.shape, kind.dtype)
        return found


class PieceLocations:
    """The locations of the pieces of a checkpoint's arrays.

    stored: by path, the bytes of iterators' states and of deltas, as arrays.
    """

    def __init__(
        self,
        path: str,
        read: Manifest,
        entries: Mapping[str, Entry],
        stored: Mapping[str, ArrayRow],
        files: OpenFiles,
    ):
        self._path, self._manifest, self._entries, self._stored_rows, self._files = path, read, entries, stored, files
        self._cells = [Cells(layout.cuts) for layout in read.layouts]

    def target(self, row: ArrayEntry) -> ArrayRow:
        """Returns the row that says where the bytes of an array are. A tied leaf names the row of another leaf."""
        row = self._stored_rows.get(row.path, row)
        assert isinstance(row, ArrayRow)
        found = self._entries[row.where] if isinstance(row.where, str) else row
        found = self._stored_rows.get(found.path, found)
        assert isinstance(found, ArrayRow)
        return found

    def resolve(self, row: ArrayEntry) -> ArrayRow:
        """Returns the same row as `target`. Raises `UnsupportedError` if only a later release can read the bytes."""
        found = self.target(row)
        if not isinstance(found.where, int | tuple | str):
            raise manifest.requiring(f"{self._path}: {found.path}", found.where.requires)
        return found

    def overlapping(self, row: ArrayRow, box: Box) -> Iterable[tuple[int, Box, str]]:
        """Yields file number, box and name in the file of each piece with a part of a box.

        Yields all pieces of an array without elements, whose headers are checked too.
        """
        if isinstance(row.where, int):
            yield row.where, full_box(row.shape), piece_key(row.path, None)
        elif isinstance(row.where, tuple):
            number, turn = row.where
            cells = self._cells[number]
            holders = self._manifest.holders[self._manifest.layouts[number].holders]
            for n in cells.overlapping(box) if math.prod(row.shape) else range(len(cells)):
                files = holders[n]
                yield files[turn % len(files)], cells[n], piece_key(row.path, None if len(cells) == 1 else cells[n])

    def files_of(self, row: ArrayRow) -> set[int]:
        """Returns the numbers of the files that have bytes of a leaf."""
        row = self.target(row)
        return {number for number, _, _ in self.overlapping(row, full_box(row.shape))}

    def tensor(self, file: ArrayFile, key: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the begin and end, in bytes, of a piece's tensor in a file's buffer.

        Raises `UnsupportedError` if the file's header has a tensor of another dtype, shape or size there, or none.
        """
        tensor = file.header.tensor(key)
        begin, end = tensor.data_offsets if tensor else (0, 0)
        found = tensor and (tensor.dtype, tensor.shape, end - begin, file.header.dtypes.get(key))
        if found != stored_as(dtype, shape):
            about = file.header.dtypes.get(key) or "no other dtype"
            found = tensor and f"{tensor.dtype} {list(tensor.shape)} in {end - begin} bytes, of {about}"
            code, stored, *_ = stored_as(dtype, shape)
            expected = f"expected a tensor {key!r:.100} of {code} {list(stored)} for {dtype}"
            raise manifest.invalid(f"{file.path}: {expected}, found {found}", self._manifest.software)
        return begin, end

    def begin(self, number: int, row: ArrayRow) -> int:
        """Returns the begin, in bytes, of an array that is one piece in a file. Raises the errors of `tensor`."""
        return self.tensor(self._files.get(number), piece_key(row.path, None), row.dtype, row.shape)[0]

    def parts(self, entry: ArrayEntry, box: Box, mmap: bool | None) -> list[PieceRead]:
        """Returns the parts of a box, each in one run of `ArrayFile.memory`.

        Raises `UnsupportedError` if header and manifest disagree. Both have the right checksum, so neither is damaged.
        """
        row = entry if isinstance(entry, ArrayRow) and isinstance(entry.where, int) else self.resolve(entry)
        if isinstance(row.where, int) and box == full_box(row.shape):  # Almost all reads take this branch.
            begin, end = self.tensor(self._files.get(row.where), piece_key(row.path, None), row.dtype, row.shape)
            return [PieceRead(row.where, begin, end, row.shape)] if begin < end else []
        parts: list[PieceRead] = []
        for number, piece, key in self.overlapping(row, box):
            parts += self.parts_in(self._files.get(number), number, row, box, piece, key, mmap)
        return join_contiguous(parts, box_shape(box))

    def parts_in(
        self, file: ArrayFile, number: int, row: ArrayRow, box: Box, piece: Box, key: str, mmap: bool | None
    ) -> list[PieceRead]:
        """Returns the parts of a box in one piece, which `file` (number `number`) stores under `key`."""
        begin, _ = self.tensor(file, key, row.dtype, box_shape(piece))
        inner = intersect(piece, box)
        if inner is None:
            return []
        # A view of a mapped file can have strides. Other reads get each row alone.
        single_rows = not file.can_mmap(mmap)
        return split_piece(number, begin, piece, inner, box, dtypes.itemsize(row.dtype), separate_rows=single_rows)


class _Piece(NamedTuple):
    """A piece in an object, stored under `key`, that has bytes of the box number `wanted`."""

    wanted: int
    row: ArrayRow
    box: Box
    piece: Box
    key: str


def read_objects(
    wanted: Sequence[tuple[ArrayEntry, Box]],
    verify: bool,
    mmap: bool | None,
    files: OpenFiles,
    locations: PieceLocations,
) -> tuple[list[np.ndarray], dict[int, Memory]]:
    """Returns the boxes of the arrays, and the memory that they may be parts of, by object.

    If more than half of an object is wanted, opening it reads all its bytes. A box with pieces in several objects is
    assembled while they arrive; otherwise it would need its memory twice.
    """
    inside: dict[int, list[_Piece]] = {}
    nbytes: dict[int, int] = {}
    own: dict[int, np.ndarray] = {}  # by number, the boxes with pieces in several objects
    for n, (entry, box) in enumerate(wanted):
        row = locations.resolve(entry)
        pieces = list(locations.overlapping(row, box))
        if len(pieces) > 1 and len({number for number, _, _ in pieces}) > 1:
            own[n] = empty_aligned_array(box_shape(box), dtypes.to_numpy(row.dtype))
        for number, piece, key in pieces:
            inner = piece if piece == box else intersect(piece, box)
            size = dtypes.itemsize(row.dtype) * math.prod(box_shape(inner)) if inner else 0
            nbytes[number] = nbytes.get(number, 0) + size
            inside.setdefault(number, []).append(_Piece(n, row, box, piece, key))
    memory: dict[int, Memory] = {}

    def read(number: int) -> None:
        listed = files.listed[number]
        expected = listed.size if nbytes[number] * 2 > listed.size else 0
        # The file enters `opened` only at the end. An earlier read by another thread could use the bytes that came
        # with opening it, and these may be memory of an array that is about to be returned.
        file = files.opened.get(number) or files.open(number, expected, _all_of(listed, inside[number], own))
        ranges: list[tuple[int, int]] = []
        copies: list[tuple[np.ndarray, PieceRead]] = []
        for n, row, box, piece, key in inside[number]:
            if piece == box:  # A shortcut without `PieceRead` objects, because there may be thousands of pieces.
                begin, end = locations.tensor(file, key, row.dtype, box_shape(piece))
                ranges += [(begin, end)] if begin < end else []
                continue
            for part in locations.parts_in(file, number, row, box, piece, key, mmap):
                ranges += part.ranges or [(part.begin, part.end)]
                copies += [(own[n], part)] if n in own else []
        if ranges:
            found = file.memory(merge(ranges), verify, mmap)
            for array, part in copies:
                there, came = array[part.target], found.view(part, array.dtype)
                if there.ctypes.data != came.ctypes.data:  # The bytes may have been read into the array directly.
                    there[...] = came
            if not all(one.wanted in own for one in inside[number]):
                memory[number] = found
        files.opened.setdefault(number, file)

    in_parallel(list(inside), read, _MAX_READS)
    rest = [one for n, one in enumerate(wanted) if n not in own]
    others = iter(assemble(rest, [locations.parts(entry, box, mmap) for entry, box in rest], memory))
    return [own[n] if n in own else next(others) for n in range(len(wanted))], memory


def _all_of(listed: File, inside: Sequence[_Piece], own: Mapping[int, np.ndarray]) -> memoryview | None:
    """Returns memory for all bytes of an array file, if they are one piece that is one run of bytes of an array.

    Returns None otherwise.
    """
    n, _, box, piece, _ = inside[0]
    if len(inside) > 1 or n not in own or intersect(piece, box) != piece:
        return None
    there = own[n][slices(piece, box)]
    if not there.flags.c_contiguous or there.nbytes != listed.size - listed.header:
        return None
    return there.reshape(-1).view(np.uint8).data
