"""Writes Flax's state dicts in MessagePack. Only a slice of an array is in memory at a time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..._core import dtypes
from ..._core.boxes import slice_boxes
from ..._core.describe import drop_code
from ..._core.entries import ArrayEntry, Entry, ValueEntry
from ..._core.leaf_paths import key_text, split
from ..._core.skeleton import build, nest_by_path
from ..._core.source import Source
from ...errors import MismatchError, UnsupportedError
from ...stores.store import Writer
from .msgpack import bin_head, ext_head, list_head, map_head, pack
from .state_dict import ARRAY, CHUNKED, COMPLEX, PLACEHOLDER, SCALAR

MAX_CHUNK_BYTES = 1 << 30  # bytes of an array that Flax stores in one extension
_SLICE_BYTES = 64 << 20  # of an array that are in memory at a time
_MAX_LEVELS = 500  # of a tree, which the MessagePack package can still parse


def tree_of(contents: Source) -> Any:
    """Returns the paths of the leaves in nested dicts, lists and tuples."""
    paths = list(contents.entries)
    return nest_by_path(paths, paths) if contents.skeleton is None else build(contents.skeleton, paths)


def check(
    format: str,
    contents: Source,
    options: Mapping[str, Any],
    refused: Callable[[str, Entry], str | None] = lambda path, entry: None,
) -> None:
    """Raises `UnsupportedError` for leaves that a file cannot store, and `MismatchError` for options.

    refused: returns the reason why a format cannot store a leaf that state dicts can store, or None.

    The error names every such leaf.
    """
    if options:
        raise MismatchError(f"format={format!r}: expected no options of its own, found {', '.join(options)}")
    reasons = [(path, _refused(path, entry) or refused(path, entry)) for path, entry in contents.entries.items()]
    if problems := [f"  {path or '(root)'}: {reason}" for path, reason in reasons if reason]:
        raise UnsupportedError("\n".join([f"format={format!r} cannot hold these leaves:", *problems]))


def _refused(path: str, entry: Entry) -> str | None:
    if path.count("/") > _MAX_LEVELS:
        return f"it is more than {_MAX_LEVELS} levels deep, which no reader of this format can parse"
    if CHUNKED in path and CHUNKED in split(path):
        return f"this format reserves the key {CHUNKED} for large arrays"
    if isinstance(entry, ArrayEntry):
        if entry.type == "key":
            return f"a typed PRNG key; store jax.random.key_data(key) instead, or {drop_code(path)}"
        return f"dtype {entry.dtype}, which Flax cannot read back" if entry.dtype[0] in "<|" else None
    value = entry.decode()
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return "an int of more than 64 bits"
    return "Flax reads such text as an array" if type(value) is str and value.startswith(PLACEHOLDER) else None


def write(out: Writer, tree: Any, contents: Source, instead: Mapping[str, bytes] | None = None) -> None:
    """Writes a tree of paths as a state dict. `contents` has the leaves at these paths.

    Values of type `bytes` in the tree are MessagePack already and are copied. `instead` has such bytes for some paths.
    """
    stack = [tree]
    while stack:
        value = stack.pop()
        value = instead.get(value, value) if instead and isinstance(value, str) else value
        if isinstance(value, bytes):
            out.write(value)
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = [part for key, child in items for part in (pack(split(key_text(key))[0]), child)]
            out.write(map_head(len(value)))
            stack += reversed(parts)
        else:
            for part in leaf(contents.entries[value], contents):
                out.write(part)


def leaf(entry: Entry, contents: Source) -> Iterator[bytes | memoryview]:
    """Yields a leaf as MessagePack, in parts."""
    if isinstance(entry, ValueEntry):
        yield _value(entry.decode())
        return
    data = _bytes(contents, entry)
    rest = memoryview(b"")
    for part in _layout(entry):
        if isinstance(part, bytes):
            yield part
            continue
        while part:
            rest = rest or next(data)
            yield rest[:part]
            rest, part = rest[part:], part - min(part, len(rest))


def number(value: complex) -> bytes:
    """Returns a number of Python as an array without axes, in MessagePack."""
    array = np.array(value)
    head, _ = _extension(ARRAY, dtypes.to_text(array.dtype), (), array.nbytes)
    assert isinstance(head, bytes)
    return head + array.tobytes()


def leaf_size(entry: Entry) -> int:
    """Returns the number of bytes of a leaf as MessagePack."""
    if isinstance(entry, ValueEntry):
        return len(_value(entry.decode()))
    return sum(len(part) if isinstance(part, bytes) else part for part in _layout(entry))


def _value(value: Any) -> bytes:
    if type(value) is complex:
        payload = list_head(2) + pack(value.real) + pack(value.imag)
        return ext_head(COMPLEX, len(payload)) + payload
    return pack(value)


def _layout(entry: ArrayEntry) -> list[bytes | int]:
    """Returns the parts of an array in the file: bytes as they are, and for array contents the number of bytes."""
    itemsize = dtypes.itemsize(entry.dtype)
    size = math.prod(entry.shape)
    if size * itemsize <= MAX_CHUNK_BYTES:
        code = SCALAR if entry.type == "numpy-scalar" else ARRAY
        return _extension(code, entry.dtype, entry.shape, size * itemsize)
    step = max(1, MAX_CHUNK_BYTES // itemsize)
    shape = map_head(len(entry.shape)) + b"".join(pack(str(n)) + pack(s) for n, s in enumerate(entry.shape))
    parts: list[bytes | int] = [map_head(3) + pack(CHUNKED) + pack(True) + pack("shape") + shape + pack("chunks")]
    parts.append(map_head(-(-size // step)))
    for n, start in enumerate(range(0, size, step)):
        count = min(step, size - start)
        parts += [pack(str(n)), *_extension(ARRAY, entry.dtype, (count,), count * itemsize)]
    return parts


def _extension(code: int, dtype: str, shape: Sequence[int], nbytes: int) -> list[bytes | int]:
    head = list_head(3) + pack(list(shape)) + pack(dtype) + bin_head(nbytes)
    return [ext_head(code, len(head) + nbytes) + head, nbytes]


def _bytes(contents: Source, entry: ArrayEntry) -> Iterator[memoryview]:
    """Yields the bytes of an array, in C order, slice by slice."""
    for box in slice_boxes(entry.shape, dtypes.itemsize(entry.dtype), _SLICE_BYTES):
        (array,) = contents.read([(entry, box)], verify=True)
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
