"""A writer of TensorFlow's checkpoints.

It follows LevelDB's table format and TensorFlow's protobuf messages, and shares nothing with the reader.
"""

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = bytes.fromhex("57fb808b247547db")


def slow_crc(data: bytes) -> int:
    """CRC-32C bit by bit, masked as it is stored."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def varint(number: int) -> bytes:
    number %= 2**64
    out = bytearray()
    while number >= 128:
        out.append(number % 128 + 128)
        number //= 128
    return bytes([*out, number])


def field(number: int, value: int | bytes, *, fixed: bool = False) -> bytes:
    if fixed:
        assert isinstance(value, int)
        return varint(number << 3 | 5) + struct.pack("<I", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sortable(number: int) -> bytes:
    """A signed number in the ordered code, bit by bit: the sign, once for each byte, its opposite, and the value."""
    for size in range(1, 11):
        if -(2 ** (7 * size - 1)) <= number < 2 ** (7 * size - 1):
            sign = "1" if number >= 0 else "0"
            payload = format(number % 2 ** (7 * size), f"0{7 * size}b")  # its first bit is the delimiter's opposite
            flipped = ("0" if sign == "1" else "1") + payload[1:]
            bits = sign * size + flipped
            return int(bits, 2).to_bytes(size, "big")
    raise ValueError(number)


def part_key(name: str, part: Iterable[tuple[int, int]]) -> bytes:
    escaped = name.encode().replace(b"\xff", b"\xff\0").replace(b"\0", b"\0\xff") if "\0" in name else name.encode()
    part = list(part)
    return b"\0" + escaped + b"\0\x01" + bytes([1, len(part)]) + b"".join(sortable(n) for one in part for n in one)


def snappy(data: bytes) -> bytes:
    """Compresses runs of one byte, and leaves the rest as it is."""
    out, position = varint(len(data)), 0
    while position < len(data):
        run = 1
        while position + run < len(data) and data[position + run] == data[position] and run < 64:
            run += 1
        out += bytes([0, data[position]])
        if run > 4:
            out += (
                bytes([(run - 2) << 2 | 2]) + (1).to_bytes(2, "little")
                if run % 2
                else bytes([min(run - 1, 11) - 4 << 2 | 1, 1])
            )
            run = run if run % 2 else min(run - 1, 11) + 1
        else:
            run = 1
        position += run
    return out


def data_block(pairs: list[tuple[bytes, bytes]], restart_every: int) -> bytes:
    out, restarts, last = b"", [], b""
    for n, (key, value) in enumerate(pairs):
        shared = 0
        if n % restart_every == 0:
            restarts.append(len(out))
        else:
            while key[: shared + 1] == last[: shared + 1]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(pairs: dict[bytes, bytes], per_block: int = 5, compress: Callable[[bytes], bytes] | None = None) -> bytes:
    out, index = b"", []

    def add(contents: bytes) -> bytes:
        nonlocal out
        body = (compress(contents) + b"\x01") if compress else contents + b"\0"
        handle = varint(len(out)) + varint(len(body) - 1)
        out += body + struct.pack("<I", slow_crc(body))
        return handle

    ordered = sorted(pairs.items())
    for n in range(0, len(ordered), per_block):
        own = ordered[n : n + per_block]
        index.append((own[-1][0] + b"\0", add(data_block(own, 3))))
    footer = add(data_block([], 1)) + add(data_block(index, 1))
    return out + footer.ljust(40, b"\0") + MAGIC


CODES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
    "float8_e5m2": 24,
    "float8_e4m3fn": 25,
    "float8_e4m3fnuz": 26,
    "float8_e4m3b11fnuz": 27,
    "float8_e5m2fnuz": 28,
    "int4": 29,
    "uint4": 30,
    "int2": 31,
    "uint2": 32,
}
Part = tuple[tuple[int, int], ...]


class Bundle:
    """What becomes an index and files of data."""

    def __init__(self, shards: int = 1, *, big: bool = False, align: int = 1):
        self.big, self.align = big, align
        self.data = [bytearray() for _ in range(shards)]
        version = field(1, 1) + field(2, 0)
        self.pairs = {b"": field(1, shards) + (field(2, 1) if big else b"") + field(3, version)}

    def add(self, name: str | bytes, array: Any, shard: int = 0, code: int | None = None) -> None:
        array = np.asarray(array)
        data = array.tobytes()
        if self.big:
            data = (
                array.view(f"u{array.itemsize}").byteswap().tobytes()
                if array.dtype.kind != "c"
                else array.byteswap().tobytes()
            )
        self.add_bytes(name, code or CODES[array.dtype.name], array.shape, data, slow_crc(data), shard)

    def add_bytes(
        self, name: str | bytes, code: int, shape: Iterable[int], data: bytes, crc: int, shard: int = 0
    ) -> None:
        self.data[shard] += bytes(-len(self.data[shard]) % self.align)
        entry = field(1, code) + field(2, shape_of(shape))
        entry += field(3, shard) if shard else b""
        entry += field(4, len(self.data[shard])) if self.data[shard] else b""
        entry += (field(5, len(data)) if data else b"") + field(6, crc, fixed=True)
        self.pairs[name.encode() if isinstance(name, str) else name] = entry
        self.data[shard] += data

    def add_parts(self, name: str, array: np.ndarray, parts: list[Part], shards: Iterable[int] = ()) -> None:
        """Adds a partitioned variable; the length -1 means the entire axis."""
        slices = b""
        for part, shard in zip(parts, list(shards) or [0] * len(parts), strict=True):
            own = array[tuple(slice(start, None if size < 0 else start + size) for start, size in part)]
            extents = [
                b"" if size < 0 else (field(1, start) if start else b"") + field(2, size) for start, size in part
            ]
            slices += field(7, b"".join(field(1, extent) for extent in extents))
            self.add(part_key(name, part), np.ascontiguousarray(own), shard)
        self.pairs[name.encode()] = field(1, CODES[array.dtype.name]) + field(2, shape_of(array.shape)) + slices

    def add_text(self, name: str, texts: list[bytes], shape: Iterable[int]) -> None:
        order = ">I" if self.big else "<I"
        sizes = b"".join(struct.pack(order, len(text)) for text in texts)
        checksum = struct.pack(order, slow_crc(sizes))
        body = b"".join(texts)
        data = b"".join(varint(len(text)) for text in texts) + checksum + body
        self.add_bytes(name, 7, shape, data, slow_crc(sizes + checksum + body))

    def save(self, prefix: Path, **options: Any) -> Path:
        for n, data in enumerate(self.data):
            Path(f"{prefix}.data-{n:05}-of-{len(self.data):05}").write_bytes(data)
        Path(f"{prefix}.index").write_bytes(table(self.pairs, **options))
        return Path(f"{prefix}.index")


def shape_of(shape: Iterable[int]) -> bytes:
    return b"".join(field(2, field(1, size) if size else b"") for size in shape)
