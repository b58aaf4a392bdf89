"""Reads the index of a TensorFlow checkpoint: protobuf messages by the names of tensors."""

import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ..._core.boxes import Box
from ..._core.leaf_paths import key_text
from ...errors import CorruptError, UnsupportedError
from .table import fields

# The numbers of dtypes in TensorFlow. A quantized integer is listed as the integer it is stored as.
DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    8: "complex64",
    9: "int64",
    10: "bool",
    11: "int8",
    12: "uint8",
    13: "int32",
    14: "bfloat16",
    15: "int16",
    16: "uint16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    26: "float8_e4m3fnuz",
    27: "float8_e4m3b11fnuz",
    28: "float8_e5m2fnuz",
    29: "int4",
    30: "uint4",
    31: "int2",
    32: "uint2",
}
TEXT = 7
_VERSION = 1  # of the format

Extent = tuple[int, int]  # start and length along an axis; a length of -1 means the entire axis


class Tensor(NamedTuple):
    """An entry of the index. `parts` lists the parts of a partitioned tensor, which have their own entries."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    parts: tuple[tuple[Extent, ...], ...]


class Header(NamedTuple):
    """Holds the number of files of data, and their byte order."""

    shards: int
    order: Literal["little", "big"]


def read_header(message: bytes, name: str) -> Header:
    """Parses the first entry of an index. Raises `CorruptError` and `UnsupportedError`."""
    shards = endianness = needed = 0
    for field, value in fields(message, name):
        if field == 1:
            shards = value
        elif field == 2:
            endianness = value
        elif field == 3:
            needed = dict(fields(_bytes(value, name), name)).get(2, 0)
    if needed > _VERSION:
        raise UnsupportedError(f"{name}: expected version {_VERSION} of the format, found {needed}")
    if endianness > 1:
        raise CorruptError(f"{name}: expected the byte order 0 or 1, found {endianness}")
    return Header(shards, "big" if endianness else "little")


def read_tensor(message: bytes, name: str) -> Tensor:
    """Parses an entry. Fields: dtype 1, shape 2, shard 3, offset 4, size 5, checksum 6, parts 7."""
    numbers = dict.fromkeys((1, 3, 4, 5, 6), 0)
    shape: list[int] = []
    parts: list[tuple[Extent, ...]] = []
    for field, value in fields(message, name):
        if field in numbers:
            numbers[field] = _number(value, name)
        elif field == 2:
            for inner, size in fields(_bytes(value, name), name):
                if inner == 2:
                    shape.append(_number(dict(fields(_bytes(size, name), name)).get(1, 0), name))
                elif inner == 3 and size:
                    raise CorruptError(f"{name}: a tensor of unknown rank")
        elif field == 7:
            parts.append(tuple(_extents(_bytes(value, name), name)))
    return Tensor(numbers[1], tuple(shape), numbers[3], numbers[4], numbers[5], numbers[6], tuple(parts))


def path_of(key: bytes, index: str) -> str:
    """Returns the path of a tensor."""
    try:
        return "/".join(key_text(part) for part in key.decode().split("/"))
    except UnicodeDecodeError:
        raise CorruptError(f"{index}: the name {key!r:.100} is not valid UTF-8") from None


def box_of(part: tuple[Extent, ...], shape: tuple[int, ...], name: str) -> Box:
    """Returns the box of a part. Raises `CorruptError` if it is not within the tensor."""
    full = len(part) == len(shape) and all(
        (start, length) == (0, -1) or (0 <= start < start + length <= size)
        for (start, length), size in zip(part, shape, strict=True)
    )
    if not full or not shape or not math.prod(shape):
        raise CorruptError(f"{name}: expected a part of a tensor of shape {list(shape)}, found {list(part)}")
    return tuple(
        (start, size if length < 0 else start + length) for (start, length), size in zip(part, shape, strict=True)
    )


def part_key(key: bytes, part: tuple[Extent, ...]) -> bytes:
    """Returns the key of a part: zero, the tensor's key, its rank, and start and length along each axis.

    The encoding makes keys sort like the values in them.
    """
    escaped = re.sub(rb"[\0\xff]", lambda byte: b"\0\xff" if byte[0] == b"\0" else b"\xff\0", key)
    numbers = b"".join(_sortable(number) for extent in part for number in extent)
    return b"\0" + escaped + b"\0\1" + bytes([1, len(part)]) + numbers


def _sortable(number: int) -> bytes:
    """Encodes a number in one byte for each seven bits. One leading bit for each byte is 1, or 0 if it is negative."""
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    leading = (1 << size) - 1 << 7 * size
    return (number & (1 << 8 * size) - 1 ^ leading).to_bytes(size, "big")


def _extents(message: bytes, name: str) -> Iterator[Extent]:
    for field, value in fields(message, name):
        if field == 1:
            found = dict(fields(_bytes(value, name), name))
            yield _number(found.get(1, 0), name), _number(found[2], name) if 2 in found else -1


def _bytes(value: Any, name: str) -> bytes:
    if not isinstance(value, bytes):
        raise CorruptError(f"{name}: expected a message, found the number {value}")
    return value


def _number(value: Any, name: str) -> int:
    """Returns a signed number of 64 bits."""
    if not isinstance(value, int):
        raise CorruptError(f"{name}: expected a number, found {value!r:.100}")
    return value - (1 << 64) if value >> 63 else value
