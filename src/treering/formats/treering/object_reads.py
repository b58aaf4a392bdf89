"""Reads boxes of arrays from a bucket: several objects at a time, each opened, read and checked by itself."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, box_shape, intersect, slices
from ..._core.entries import ArrayEntry
from ..._threads.pool import in_parallel
from ...stores.buffers import adoptable
from ...stores.ranges import merge
from .manifest_fields import ArrayRow, File
from .open_files import OpenFiles
from .parts import Memory, Part, assemble
from .piece_locations import PieceLocations

_MAX_READS = 10  # objects that are read at a time, and may be in memory beside what is returned


class _Piece(NamedTuple):
    """A piece, under its key in an object, with bytes of the wanted box of a number."""

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

    An object that is read for the most part comes with all its bytes when it is opened. A box that lies in several
    objects is assembled while they come, or as much memory as it takes would be needed once more.
    """
    inside: dict[int, list[_Piece]] = {}
    nbytes: dict[int, int] = {}
    own: dict[int, np.ndarray] = {}  # boxes that lie in several objects
    for n, (entry, box) in enumerate(wanted):
        row = locations.resolve(entry)
        pieces = list(locations.overlapping(row, box))
        if len(pieces) > 1 and len({number for number, _, _ in pieces}) > 1:
            own[n] = adoptable(box_shape(box), dtypes.to_numpy(row.dtype))
        for number, piece, key in pieces:
            inner = piece if piece == box else intersect(piece, box)
            size = dtypes.itemsize(row.dtype) * math.prod(box_shape(inner)) if inner else 0
            nbytes[number] = nbytes.get(number, 0) + size
            inside.setdefault(number, []).append(_Piece(n, row, box, piece, key))
    memory: dict[int, Memory] = {}

    def read(number: int) -> None:
        listed = files.listed[number]
        expected = listed.size if nbytes[number] * 2 > listed.size else 0
        # No other read knows a file that is opened here before all is taken that came with opening it: it would
        # take that for its own, which may lie in an array that is about to be returned.
        file = files.opened.get(number) or files.open(number, expected, _all_of(listed, inside[number], own))
        ranges: list[tuple[int, int]] = []
        copies: list[tuple[np.ndarray, Part]] = []
        for n, row, box, piece, key in inside[number]:
            if piece == box:  # without parts, for there may be thousands
                begin, end = locations.tensor(file, key, row.dtype, box_shape(piece))
                ranges += [(begin, end)] if begin < end else []
                continue
            for part in locations.parts_in(file, number, row, box, piece, key, mmap):
                ranges += part.ranges or [(part.begin, part.end)]
                copies += [(own[n], part)] if n in own else []
        if ranges:
            found = file.memory(merge(ranges), verify, mmap)
            for array, part in copies:
                there, came = array[part.at], found.view(part, array.dtype)
                if there.ctypes.data != came.ctypes.data:  # or they came right there
                    there[...] = came
            if not all(one.wanted in own for one in inside[number]):
                memory[number] = found
        files.opened.setdefault(number, file)

    in_parallel(list(inside), read, _MAX_READS)
    rest = [one for n, one in enumerate(wanted) if n not in own]
    others = iter(assemble(rest, [locations.parts(entry, box, mmap) for entry, box in rest], memory))
    return [own[n] if n in own else next(others) for n in range(len(wanted))], memory


def _all_of(listed: File, inside: Sequence[_Piece], own: Mapping[int, np.ndarray]) -> memoryview | None:
    """Returns memory for all that an array file holds, if that is one piece which is one run of bytes of an array."""
    n, _, box, piece, _ = inside[0]
    if len(inside) > 1 or n not in own or intersect(piece, box) != piece:
        return None
    there = own[n][slices(piece, box)]
    if not there.flags.c_contiguous or there.nbytes != listed.size - listed.header:
        return None
    return there.reshape(-1).view(np.uint8).data
