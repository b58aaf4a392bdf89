"""Joins the pieces of tensors that PyTorch's torch.distributed.checkpoint writes, one file for each rank.

``__metadata__["DCP_SHARDING_INFO"]`` of a file says where each of its tensors begins in the complete one. Neither the
number of ranks nor the shapes of the complete tensors are recorded, so these end where the pieces do.
"""

import itertools
import logging
import math
import posixpath
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from ..._core.boxes import Box, intersect
from ..._core.leaf_paths import join_names
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, UnsupportedError
from .._shared import strict_json
from .._shared.pieces import tile
from . import nibbles
from .header import Header

INFO, _VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
BOOKKEEPING = (INFO, _VERSION)  # describe files, not the checkpoint
_log = logging.getLogger("treering")
_MAX_COMPARED_PIECES = 1000  # to name two that overlap


class _PiecePlace(msgspec.Struct):
    saved_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


preload_decoders(dict[str, _PiecePlace])


class TensorPiece(NamedTuple):
    """A piece of a tensor: its dtype, its place in the complete tensor, and the path of its file."""

    dtype: str
    box: Box
    file: str


def pieces_of(header: Header, path: str) -> dict[str, TensorPiece]:
    """Returns the piece of each tensor of a file, by key; nothing for a file without them.

    Raises `CorruptError`, and `UnsupportedError` for a later version.
    """
    text = header.metadata.get(INFO)
    if not text:
        return {}
    version = header.metadata.get(_VERSION, "1.0")
    if version.partition(".")[0] != "1":
        raise UnsupportedError(
            f"{path}: expected {_VERSION} 1.0 of torch.distributed.checkpoint, found {version!r:.20}"
        )
    try:
        places = msgspec.convert(strict_json.parse(text.encode()), dict[str, _PiecePlace])
    except strict_json.MALFORMED as error:
        raise CorruptError(f"{path}: expected {INFO} to have the saved_offsets of each tensor: {error}") from None
    found: dict[str, TensorPiece] = {}
    for key, tensor in header.tensors.items():
        begins = places[key].saved_offsets if key in places else None
        if begins and tensor.dtype == nibbles.CODE:  # PyTorch counts the bytes of the last axis, the header elements
            begins = (*begins[:-1], 2 * begins[-1])
        if begins is None or len(begins) != len(tensor.shape):
            raise CorruptError(
                f"{path}: {key!r}: expected {INFO} to say where its {len(tensor.shape)} axes begin, found "
                + ("nothing" if begins is None else f"{list(begins)}")
            )
        box = tuple((begin, begin + size) for begin, size in zip(begins, tensor.shape, strict=True))
        found[key] = TensorPiece(tensor.dtype, box, path)
    return found


def shape_of(name: str, pieces: Sequence[TensorPiece]) -> tuple[int, ...]:
    """Returns the shape of the array that pieces form. Raises a `CorruptError` that begins with `name` if they do not.

    The pieces must have one dtype, and each element exactly once.
    """
    first = pieces[0]
    for one in pieces:
        if (one.dtype, len(one.box)) != (first.dtype, len(first.box)):
            raise _mixed(name, "of one dtype and number of axes", first, one)
    shape = tuple(max(stop for _, stop in axis) for axis in zip(*(one.box for one in pieces), strict=True))
    filled = [one for one in pieces if all(start < stop for start, stop in one.box)]
    if not math.prod(shape):
        return shape
    if tile(shape, [one.box for one in filled]):
        return shape
    for one, other in itertools.combinations(filled[:_MAX_COMPARED_PIECES], 2):
        if intersect(one.box, other.box) is not None:
            raise _mixed(name, "without overlaps", one, other)
    count = sum(math.prod(stop - start for start, stop in one.box) for one in filled)
    files = join_names(tuple(posixpath.basename(one.file) for one in filled))
    raise CorruptError(
        f"{name}: expected pieces with all {math.prod(shape)} elements of {list(shape)}, found {count} in {files}; "
        "fetch the files of the other ranks"
    )


def refuse_pieces(pieces: Mapping[str, TensorPiece], others: Collection[str], advice: str) -> None:
    """Raises `UnsupportedError` for the first piece of a file that is not a complete tensor.

    others: the keys of tensors that files of other ranks have too.
    """
    for key, one in pieces.items():
        begins = [start for start, _ in one.box]
        if any(begins) or key in others:
            why = f"it begins at {begins}" if any(begins) else "files of other ranks have the rest"
            raise UnsupportedError(
                f"{one.file}: expected the complete tensor {key!r}, found a piece by PyTorch's "
                f"torch.distributed.checkpoint ({why}); {advice}"
            )


def log_ranks(path: str, ranks: Collection[int]) -> None:
    """Warns of what files of ranks cannot show: whether more of them are needed."""
    there = set(ranks)
    absent = next((rank for rank in range(1, max(there)) if rank not in there), None)
    counted = f"{len(there)} ranks, up to" if len(there) > 1 else "only"
    _log.warning(
        "%s: has tensors of %s rank %d%s; check that these are all, because PyTorch's torch.distributed.checkpoint "
        "records neither how many there are nor the shapes of the complete tensors",
        path,
        counted,
        max(there),
        f", without rank {absent}" if absent else "",
    )


def _mixed(name: str, expected: str, one: TensorPiece, other: TensorPiece) -> CorruptError:
    def described(piece: TensorPiece) -> str:
        part = ", ".join(f"{start}:{stop}" for start, stop in piece.box)
        return f"{piece.dtype} [{part}] in {posixpath.basename(piece.file)}"

    return CorruptError(
        f"{name}: expected pieces {expected}, found {described(one)} and {described(other)}; if the files are of "
        "different saves, move those of one out of the folder"
    )
