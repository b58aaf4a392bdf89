"""The layout of a safetensors file: where each tensor lies, and the header that says so.

The format is https://github.com/huggingface/safetensors: a little-endian u64 with the header's length, the
header (JSON, padded with spaces), and the tensors without holes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from ..errors import CorruptError, UnsafeError

MAX_HEADER = 100_000_000

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Tensor(msgspec.Struct, gc=False):
    """An entry of the header. `data_offsets` are relative to the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Lenient(msgspec.Struct, gc=False):
    dtype: str = ""
    shape: tuple[_Natural, ...] = ()
    data_offsets: tuple[_Natural, _Natural] = (0, 0)


class _Metadata(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


class Header(NamedTuple):
    """A parsed header: `size` is that of everything before the tensors."""

    size: int
    tensors: Mapping[str, _Lenient]
    metadata: Mapping[str, str]


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object, for `json.loads`. Raises `ValueError` when a key stands there twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def encode_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], align: int) -> bytes:
    """Length and header, padded so that the tensors begin at a multiple of `align`. Metadata comes first."""
    text = msgspec.json.encode({"__metadata__": metadata, **tensors})
    padded = -(-(8 + len(text)) // align) * align - 8
    if padded > MAX_HEADER:
        raise ValueError(f"a header of {padded} bytes")
    return padded.to_bytes(8, "little") + text.ljust(padded)


def header_size(begin: bytes, file_size: int, name: str) -> int:
    """The size of length and header together, from the file's first 8 bytes."""
    size = int.from_bytes(begin, "little")
    if len(begin) < 8 or 8 + size > file_size:
        raise CorruptError(f"{name}: expected a header of {size} bytes, found a file of {file_size}; it is cut short")
    if size > MAX_HEADER:
        raise UnsafeError(f"{name}: a header of {size} bytes; the format allows {MAX_HEADER}")
    return 8 + size


def decode_header(data: bytes | bytearray, name: str) -> Header:
    """Parses length and header. Offsets are as written; `check` tests them."""
    try:
        text = memoryview(data)[8:]
        metadata = msgspec.json.decode(text, type=_Metadata).metadata
        if metadata.keys() & {"shape", "data_offsets"}:  # which would be taken for those of a tensor
            text = msgspec.json.encode({**msgspec.json.decode(text), "__metadata__": {}})
        tensors = msgspec.json.decode(text, type=dict[str, _Lenient])
        entries = len(tensors) - ("__metadata__" in tensors)
        if data.count(b'"data_offsets"') != entries or b"\\u" in data:  # perhaps one that msgspec has passed over
            json.loads(bytes(text), object_pairs_hook=unique)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"{name}: the header is not that of a safetensors file: {error}") from None
    tensors.pop("__metadata__", None)
    return Header(len(data), tensors, metadata)


def check_side_by_side(header: Header, file_size: int, name: str) -> None:
    """Raises `UnsafeError` for holes and overlaps, `CorruptError` for a file of another size than the tensors take."""
    import numpy as np

    try:
        offsets = np.array([tensor.data_offsets for tensor in header.tensors.values()], np.int64).reshape(-1, 2)
    except OverflowError:
        raise UnsafeError(f"{name}: a tensor lies beyond 2^63") from None
    begins, ends = offsets[np.lexsort((offsets[:, 1], offsets[:, 0]))].T
    edges = np.concatenate([[0], ends])
    if not np.array_equal(edges[:-1], begins):
        raise UnsafeError(f"{name}: the tensors do not lie side by side from the header to the end of the file")
    if header.size + int(edges[-1]) != file_size:
        raise CorruptError(f"{name}: expected {header.size + int(edges[-1])} bytes, found {file_size}")


def check(header: Header, sizes: Sequence[int], file_size: int, name: str) -> None:
    """Raises `UnsafeError` unless the tensors lie side by side from the header to the end of the file."""
    position = 0
    for (key, tensor), itemsize in sorted(
        zip(header.tensors.items(), sizes, strict=True), key=lambda item: item[0][1].data_offsets
    ):
        begin, end = tensor.data_offsets
        if begin != position or end - begin != itemsize * math.prod(tensor.shape):
            raise UnsafeError(f"{name}: {key} does not lie where its neighbours end, or has not the size of its shape")
        position = end
    if header.size + position != file_size:
        raise CorruptError(f"{name}: expected {header.size + position} bytes, found {file_size}")
