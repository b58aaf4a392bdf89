"""LevelDB's sorted tables, the protobuf wire format, and CRC-32C, as far as an index of TensorFlow needs them.

A table is a file of blocks. Its footer gives the position of the block that lists the positions of all others.
Within a block, a key omits the prefix that it shares with the key before.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores.store import Blob

FOOTER_BYTES = 48
MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER_BYTES = 5  # bytes after a block: its compression, and a checksum
_MAX_KEY_BYTES = 1 << 16  # bytes of a key
_MAX_BLOCK_BYTES = 64 << 20  # bytes of a block; TensorFlow writes 256 KiB
_MAX_KEY_RATIO = 64  # bytes of keys for each byte of the blocks, after shared prefixes are filled in
_STRIDES = (1 << 16, 1 << 11, 1 << 6)  # words, see `crc32c`


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
