"""Which piece goes where: pure functions from a save's content to array files."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import _dtypes
from ..._catalogue import ValueEntry
from ..._leaves import Content
from ..._sharding import Box, describe, extent, whole
from ...stores.disk import PAGE
from ..safetensors import MAX_HEADER, Tensor, encode_header
from .manifest import BLOCK, ArrayRow, Layout, piece_key

_DIGITS = 16
_PREFIX = len(b"12345678") + len(b'{"__metadata__":{"xxh3":"')


class ArrayFile(NamedTuple):
    """An array file before it is written. `begins[i]` is where piece `first + i` begins, relative to the buffer."""

    name: str
    first: int
    begins: Sequence[int]
    nbytes: int
    header: bytes

    @property
    def blocks(self) -> int:
        """How many checksums the buffer has."""
        return -(-self.nbytes // BLOCK)


def plan(content: Content, token: str, header_limit: int = MAX_HEADER * 9 // 10) -> list[ArrayFile]:
    """Lays the pieces out in order, in as many files as keep each header below the limit."""
    groups: list[tuple[int, int]] = []
    first = used = 0
    for n, piece in enumerate(content.pieces):
        # Generous: the key, escaped at worst, and 120 bytes of dtype, shape and offsets.
        cost = 6 * len(content.entries[piece.leaf].path) + 120 + 24 * len(piece.box) + _DIGITS * (piece.nbytes // BLOCK)
        if n > first and used + cost > header_limit:
            groups.append((first, n))
            first, used = n, 0
        used += cost
    if content.pieces:
        groups.append((first, len(content.pieces)))
    return [
        _file(content, f"arrays-{token}-{n:05}-of-{len(groups):05}.safetensors", first, last)
        for n, (first, last) in enumerate(groups)
    ]


def _file(content: Content, name: str, first: int, last: int) -> ArrayFile:
    pieces = content.pieces[first:last]
    *begins, end = itertools.accumulate((piece.nbytes for piece in pieces), initial=0)
    tensors: dict[str, Tensor] = {}
    other_dtypes: dict[str, str] = {}
    for piece, begin in zip(pieces, begins, strict=True):
        entry: Any = content.entries[piece.leaf]
        if piece.box == whole(entry.shape):
            key, shape = piece_key(entry.path, None), entry.shape
        else:
            key, shape = piece_key(entry.path, piece.box), extent(piece.box)
        stored, itemsize, widened = _dtypes.stored_as(entry.dtype)
        if widened:
            shape = (*shape, itemsize)
        tensors[key] = Tensor(stored, shape, (begin, begin + piece.nbytes))
        if stored == "U8" and entry.dtype != "uint8":
            other_dtypes[f"dtype:{key}"] = entry.dtype
    metadata = {"xxh3": "0" * (_DIGITS * -(-end // BLOCK)), "block": str(BLOCK), "format": "treering", "version": "1"}
    return ArrayFile(name, first, begins, end, encode_header(tensors, {**metadata, **other_dtypes}, PAGE))


def fill_checksums(header: bytes, checksums: Sequence[str]) -> bytes:
    """The header with the checksums in the place kept for them."""
    text = "".join(checksums).encode()
    return header[:_PREFIX] + text + header[_PREFIX + len(text) :]


def rows(content: Content, files: Sequence[ArrayFile]) -> tuple[list[ArrayRow | ValueEntry], list[Layout]]:
    """The manifest's rows in tree order, and the layouts that arrays of several pieces share."""
    home: dict[int, list[tuple[Box, int]]] = {}
    for number, file in enumerate(files):
        for piece in content.pieces[file.first : file.first + len(file.begins)]:
            home.setdefault(piece.leaf, []).append((piece.box, number))
    layouts: dict[tuple, int] = {}
    out: list[ArrayRow | ValueEntry] = []
    listed: list[Layout] = []
    for n, entry in enumerate(content.entries):
        if isinstance(entry, ValueEntry):
            out.append(entry)
            continue
        if n in content.tied:
            where: int | tuple[int, int] | str = content.entries[content.tied[n]].path
        elif len(home[n]) == 1 and home[n][0][0] == whole(entry.shape) and n not in content.shardings:
            where = home[n][0][1]
        else:
            sharding = content.shardings.get(n)
            key = (sharding, *home[n])
            if key not in layouts:
                layouts[key] = len(listed)
                boxes, numbers = zip(*home[n], strict=True)
                listed.append(Layout(list(boxes), [[f] for f in numbers], sharding and describe(sharding)))
            where = (layouts[key], 0)
        out.append(ArrayRow(entry.path, entry.type, entry.dtype, entry.shape, entry.impl, where))
    return out, listed
