"""The layout of a safetensors file: the header, and the position of each tensor that it records.

The format is https://github.com/huggingface/safetensors: a little-endian u64 with the header's length, the header
(JSON, padded with spaces), and the tensors without gaps between them.
"""

import contextlib
import itertools
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, cast

import msgspec

from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, UnsafeError
from .._shared import strict_json

MAX_HEADER_BYTES = 100_000_000

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Tensor(msgspec.Struct, gc=False):
    """An entry of the header. `data_offsets` are bytes relative to the end of the header."""

    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


_NO_SHAPE = _NO_OFFSETS = (-1, -1)


class _Lenient(Tensor, gc=False):
    """A tensor without required fields: `__metadata__` decodes as one, so a single typed pass reads the header."""

    dtype: str = ""
    shape: tuple[_Natural, ...] = _NO_SHAPE
    data_offsets: tuple[_Natural, _Natural] = _NO_OFFSETS


class _Metadata(msgspec.Struct):
    metadata: dict[str, str] | None = msgspec.field(name="__metadata__", default=None)


preload_decoders(Tensor, dict[str, _Lenient | None], _Metadata)


class Header(NamedTuple):
    """A parsed header. `size` counts all bytes before the tensors."""

    size: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def encode_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], align: int) -> bytes:
    """Encodes length and header, padded so that the tensors begin at a multiple of `align`. Metadata comes first."""
    text = msgspec.json.encode({"__metadata__": metadata, **tensors} if metadata else tensors)
    padded = -(-(8 + len(text)) // align) * align - 8
    if padded > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {padded} bytes")
    return padded.to_bytes(8, "little") + text.ljust(padded)


def header_size(begin: bytes, file_size: int, name: str) -> int:
    """Returns the size of length and header together, from the file's first 8 bytes.

    Raises `CorruptError` if the file is too short for it, and `UnsafeError` if the format does not allow the size.
    """
    size = int.from_bytes(begin, "little")
    if len(begin) < 8 or 8 + size > file_size:
        raise CorruptError(f"{name}: expected a header of {size} bytes, found a file of {file_size}; it is cut short")
    if size > MAX_HEADER_BYTES:
        raise UnsafeError(f"{name}: a header of {size} bytes; the format allows {MAX_HEADER_BYTES}")
    return 8 + size


def decode_metadata(data: bytes | bytearray, name: str) -> dict[str, str]:
    """Decodes only the metadata of a header. Raises `CorruptError`."""
    try:
        return msgspec.json.decode(memoryview(data)[8:], type=_Metadata).metadata or {}  # MLX writes null for none
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _malformed(name, error) from None


def find_tensor(data: bytes | bytearray, key: str) -> Tensor | None:
    """Finds the entry of one tensor without decoding the others; None if this is not certain to find the right one."""
    text = msgspec.json.encode(key)
    if b"\\" in data or data.count(text) != 1:  # the key may occur twice, or within another entry
        return None
    one = msgspec.defstruct("One", [("entry", msgspec.Raw, msgspec.field(name=key, default=msgspec.Raw()))])
    with contextlib.suppress(*strict_json.MALFORMED):
        found: Any = msgspec.json.decode(memoryview(data)[8:], type=one)
        return msgspec.convert(strict_json.parse(bytes(found.entry)), Tensor)
    return None


def decode_header(data: bytes | bytearray, name: str, metadata: Mapping[str, str] | None = None) -> Header:
    """Parses length and header; `metadata` saves decoding it again. `check_side_by_side` tests the offsets."""
    metadata = decode_metadata(data, name) if metadata is None else metadata
    try:
        text = memoryview(data)[8:]
        if metadata.keys() & {"shape", "data_offsets"}:  # the type of a tensor would accept these keys of the metadata
            text = msgspec.json.encode({**msgspec.json.decode(text), "__metadata__": {}})
        tensors = msgspec.json.decode(text, type=dict[str, _Lenient | None])
        keys = 3 * (len(tensors) - ("__metadata__" in tensors)) + len(tensors) + len(metadata)
        tensors.pop("__metadata__", None)
        complete = [
            one and one.dtype and one.shape is not _NO_SHAPE and one.data_offsets is not _NO_OFFSETS
            for one in tensors.values()
        ]
        if not all(complete):
            raise ValueError("a tensor has no dtype, no shape or no data_offsets")
        content = data[8:].rstrip(b" ")
        if not strict_json.is_plain(content, keys):
            strict_json.parse(bytes(content))  # msgspec ignores keys it does not know; this parser does not
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _malformed(name, error) from None
    return Header(len(data), cast("dict[str, _Lenient]", tensors), metadata)


def _malformed(name: str, error: Exception) -> CorruptError:
    return CorruptError(f"{name}: expected the header of a safetensors file: {error}")


def check_side_by_side(header: Header, file_size: int, name: str) -> None:
    """Raises `UnsafeError` for gaps and overlaps, `CorruptError` if the tensors do not end where the file does."""
    import numpy as np

    try:
        pairs = [tensor.data_offsets for tensor in header.tensors.values()]
        offsets = np.fromiter(itertools.chain.from_iterable(pairs), np.int64, 2 * len(pairs)).reshape(-1, 2)
    except OverflowError:
        raise UnsafeError(f"{name}: a tensor begins or ends beyond 2^63") from None
    begins, ends = offsets[np.lexsort((offsets[:, 1], offsets[:, 0]))].T
    edges = np.concatenate([[0], ends])
    if not np.array_equal(edges[:-1], begins):
        raise UnsafeError(f"{name}: expected tensors without gaps and overlaps up to the end of the file")
    if header.size + int(edges[-1]) != file_size:
        raise CorruptError(f"{name}: expected {header.size + int(edges[-1])} bytes, found {file_size}")
