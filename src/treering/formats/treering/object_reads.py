"""Reads boxes of arrays from a bucket: several objects at a time, each opened, read and checked by itself."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, box_shape, intersect, slices
from ..._core.entries import ArrayEntry
from ..._threads.pool import in_parallel
from ...stores.buffers import empty_aligned_array, merge
from .manifest_fields import ArrayRow, File
from .open_files import OpenFiles
from .piece_locations import PieceLocations
from .piece_reads import Memory, PieceRead, assemble

_MAX_READS = 10  # objects that are read at a time, and may be in memory together with the returned arrays


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
