"""Reads the index of a TensorFlow checkpoint: a sorted table of LevelDB with protobuf messages by tensors' names.

A table is a file of blocks. Its footer gives the position of the block that lists the positions of all others.
Within a block, a key omits the prefix that it shares with the key before.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from ..._core.boxes import Box
from ..._core.leaf_paths import key_text
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores.store import Blob

FOOTER_BYTES = 48
MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER_BYTES = 5  # bytes after a block: its compression, and a checksum
_MAX_KEY_BYTES = 1 << 16  # bytes of a key
_MAX_BLOCK_BYTES = 64 << 20  # bytes of a block; TensorFlow writes 256 KiB
_MAX_KEY_RATIO = 64  # bytes of keys for each byte of the blocks, after shared prefixes are filled in
_STRIDES = (1 << 16, 1 << 11, 1 << 6)  # words, see `crc32c`
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


def items(file: Blob) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table, in ascending order. Raises `CorruptError`; checks every checksum."""
    if file.size < FOOTER_BYTES or file.read(file.size - len(MAGIC), len(MAGIC)) != MAGIC:
        raise CorruptError(f"{file.path}: expected a table that ends in its magic number; it is cut short or no table")
    cursor = Cursor(file.read(file.size - FOOTER_BYTES, FOOTER_BYTES), file.path)
    _block(file, cursor.varint(), cursor.varint())  # the meta-index, which lists no blocks in TensorFlow's tables
    last, keys, nbytes = b"", 0, 0
    handles = _entries(_block(file, cursor.varint(), cursor.varint()), file.path)
    end = 0
    for _, handle in handles:
        cursor = Cursor(handle, file.path)
        offset, size = cursor.varint(), cursor.varint()
        if offset < end:
            raise UnsafeError(f"{file.path}: the blocks of the table overlap")
        end = offset + size + _TRAILER_BYTES
        nbytes += size
        for key, value in _entries(_block(file, offset, size), file.path):
            keys += len(key)
            if keys > _MAX_KEY_RATIO * nbytes:
                raise UnsafeError(f"{file.path}: keys of more than {_MAX_KEY_RATIO} times the size of their blocks")
            if key <= last and last:
                raise CorruptError(f"{file.path}: the key {key!r:.100} comes after {last!r:.100}")
            last = key
            yield key, value


def _block(file: Blob, offset: int, size: int) -> bytes:
    """Reads the contents of a block."""
    if size > _MAX_BLOCK_BYTES:
        raise UnsafeError(f"{file.path}: expected blocks of at most {_MAX_BLOCK_BYTES} bytes, found {size}")
    data = file.read(offset, size + _TRAILER_BYTES)
    stored = int.from_bytes(data[-4:], "little")
    if masked(crc32c(data[:-4])) != stored:
        raise CorruptError(f"{file.path}: the block at {offset} is not what was saved; its checksum differs")
    if data[size] > 1:
        raise UnsupportedError(f"{file.path}: a block with the unknown compression {data[size]}")
    return _decompress(data[:size], file.path) if data[size] else data[:size]


def _decompress(data: bytes, name: str) -> bytes:
    """Decompresses Snappy: a size, then literal bytes and copies of earlier ones."""
    cursor, out = Cursor(data, name), bytearray()
    size = cursor.varint()
    if size > _MAX_KEY_RATIO * len(data):
        raise UnsafeError(f"{name}: a block that claims to grow from {len(data)} bytes to {size}")
    while cursor.left():
        tag = cursor.take(1)[0]
        count, kind = (tag >> 2) + 1, tag & 3
        if kind == 0:
            out += cursor.take(count if count <= 60 else 1 + int.from_bytes(cursor.take(count - 60), "little"))
            continue
        if kind == 1:
            count, back = (tag >> 2 & 7) + 4, tag >> 5 << 8 | cursor.take(1)[0]
        else:
            back = int.from_bytes(cursor.take(2 * kind - 2), "little")
        if not 0 < back <= len(out):
            raise CorruptError(f"{name}: a block copies from {back} bytes before its byte {len(out)}")
        # A copy that is longer than its distance repeats its own output.
        piece = bytes(out[len(out) - back :][:count])
        out += (piece * (count // len(piece) + 1))[:count]
        if len(out) > size:  # few bytes can describe very long copies
            break
    if len(out) != size:
        raise CorruptError(f"{name}: expected a block of {size} bytes, found {len(out)}")
    return bytes(out)


def _entries(block: bytes, name: str) -> Iterator[tuple[bytes, bytes]]:
    restarts = int.from_bytes(block[-4:], "little")
    cursor = Cursor(block, name, len(block) - 4 * (restarts + 1))
    key = b""
    while cursor.left():
        shared, own, size = cursor.varint(), cursor.varint(), cursor.varint()
        if shared > len(key) or shared + own > _MAX_KEY_BYTES:
            raise UnsafeError(f"{name}: a key of {shared + own} bytes, {shared} of them from one of {len(key)}")
        key = key[:shared] + cursor.take(own)
        yield key, cursor.take(size)


class Cursor:
    """Reads bytes from the front. Raises `CorruptError` if too few are left."""

    def __init__(self, data: bytes, name: str, end: int | None = None):
        self._data, self._name, self._position = data, name, 0
        self._end = len(data) if end is None else end
        if self._end < 0:
            raise self._too_short()

    def left(self) -> int:
        """Returns the number of bytes that are left."""
        return self._end - self._position

    def take(self, size: int) -> bytes:
        """Returns the next bytes."""
        if size > self.left():
            raise self._too_short()
        self._position += size
        return self._data[self._position - size : self._position]

    def varint(self) -> int:
        """Returns the next number of up to 64 bits: seven bits in each byte, the lowest first."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value & (1 << 64) - 1
        raise CorruptError(f"{self._name}: a number of more than 64 bits at {self._position}; the file is damaged")

    def _too_short(self) -> CorruptError:
        return CorruptError(f"{self._name}: expected more bytes at {self._position}; the file is damaged")


def fields(message: bytes, name: str) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a protobuf message: numbers, or bytes of texts and of inner messages."""
    cursor = Cursor(message, name)
    while cursor.left():
        tag = cursor.varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, cursor.varint()
        elif kind in (1, 5):
            yield tag >> 3, int.from_bytes(cursor.take(8 if kind == 1 else 4), "little")
        elif kind == 2:
            yield tag >> 3, cursor.take(cursor.varint())
        else:
            raise CorruptError(f"{name}: a field of the unknown kind {kind}")


def masked(crc: int) -> int:
    """Returns a checksum in its stored form. LevelDB masks it, because data may itself contain checksums."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: Any, crc: int = 0) -> int:
    """Returns the CRC-32C of a buffer that follows a buffer with the checksum `crc`.

    A checksum is linear: many words of data can be folded into a few with the same checksum. So NumPy processes all but
    the end, some 65,536 words at a time.
    """
    rest = np.frombuffer(data, np.uint8)
    register = crc ^ 0xFFFFFFFF
    for stride in _STRIDES:
        if rest.size >= 8 * stride:
            words = rest[: rest.size - rest.size % (4 * stride)].view("<u4").reshape(-1, stride)
            low, high = _advance_crc(4 * stride)
            folded = words[0].astype(np.uint32)
            folded[0] ^= register
            register = 0
            for row in words[1:]:
                folded = low[folded & 0xFFFF] ^ high[folded >> 16] ^ row
            rest = np.concatenate([folded.astype("<u4", copy=False).view(np.uint8), rest[words.nbytes :]])
    table = _bytewise()
    for byte in rest.tolist():
        register = table[(register ^ byte) & 255] ^ register >> 8
    return register ^ 0xFFFFFFFF


@functools.cache
def _bytewise() -> list[int]:
    """Returns the change of a register by one byte of input, for each lowest byte of the register."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0x82F63B78), table >> 1)
    return table.tolist()


@functools.cache
def _advance_crc(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the register after `nbytes` bytes of zero, a power of two, by its lower and its upper half."""
    table, bits = np.array(_bytewise(), np.uint32), np.arange(32, dtype=np.uint32)
    images = table[1 << bits & 255] ^ np.uint32(1) << bits >> 8  # the images of each single bit, after one byte
    for _ in range(nbytes.bit_length() - 1):
        images = np.bitwise_xor.reduce(np.where(images[:, None] >> bits & 1, images, np.uint32(0)), axis=1)
    halves: list[np.ndarray] = []
    for first in (0, 16):
        half = np.zeros(1, np.uint32)
        for image in images[first : first + 16]:
            half = np.concatenate([half, half ^ image])
        halves.append(half)
    return halves[0], halves[1]


class IndexTensor(NamedTuple):
    """An entry of the index. `parts` lists the parts of a partitioned tensor, which have their own entries."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    parts: tuple[tuple[Extent, ...], ...]


class IndexHeader(NamedTuple):
    """Holds the number of files of data, and their byte order."""

    shards: int
    order: Literal["little", "big"]


def read_header(message: bytes, name: str) -> IndexHeader:
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
    return IndexHeader(shards, "big" if endianness else "little")


def read_tensor(message: bytes, name: str) -> IndexTensor:
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
    return IndexTensor(numbers[1], tuple(shape), numbers[3], numbers[4], numbers[5], numbers[6], tuple(parts))


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
