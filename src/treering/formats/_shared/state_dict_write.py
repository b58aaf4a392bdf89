"""Writes Flax's state dicts in MessagePack. Only a slice of an array is in memory at a time."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..._core import dtypes
from ..._core.boxes import full_box, slice_boxes
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
_SMALL_BYTES, _BATCH_BYTES = 1 << 20, 16 << 20  # of an array that is read with others, and of all of them
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
    batch: list[bytes | ArrayEntry] = []
    held = 0
    for part in _parts(tree, contents, instead or {}):
        nbytes = len(part) if isinstance(part, bytes) else _nbytes(part)
        if batch and held + nbytes > _BATCH_BYTES:
            _write_batch(out, batch, contents)
            batch, held = [], 0
        if nbytes > min(_SMALL_BYTES, MAX_CHUNK_BYTES):
            _write_batch(out, batch, contents)
            batch, held = [], 0
            for one in (part,) if isinstance(part, bytes) else leaf(part, contents):
                out.write(one)
        else:
            batch.append(part)
            held += nbytes
    _write_batch(out, batch, contents)


def _parts(tree: Any, contents: Source, instead: Mapping[str, bytes]) -> Iterator[bytes | ArrayEntry]:
    """Yields a tree of paths as a state dict: MessagePack, and the entries of arrays in their places."""
    entries, stack = contents.entries, [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            value = instead.get(value, value)
        if isinstance(value, bytes):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = [part for key, child in items for part in (pack(split(key_text(key))[0]), child)]
            yield map_head(len(value))
            stack += reversed(parts)
        else:
            entry = entries[value]
            yield _value(entry.decode()) if isinstance(entry, ValueEntry) else entry


def _write_batch(out: Writer, batch: Sequence[bytes | ArrayEntry], contents: Source) -> None:
    """Writes MessagePack and small arrays, which are read together: each read takes as long as many of them."""
    wanted = [(part, full_box(part.shape)) for part in batch if not isinstance(part, bytes)]
    arrays = iter(contents.read(wanted, verify=True) if wanted else ())
    parts: list[Any] = []
    for part in batch:
        if isinstance(part, bytes):
            parts.append(part)
        else:
            array = next(arrays)
            parts += (_layout(part)[0], array if array.flags.c_contiguous else np.ascontiguousarray(array))
    out.write(b"".join(parts))


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
    if (nbytes := _nbytes(entry)) <= MAX_CHUNK_BYTES:
        code = SCALAR if entry.type == "numpy-scalar" else ARRAY
        return _extension(code, entry.dtype, entry.shape, nbytes)
    itemsize, size = dtypes.itemsize(entry.dtype), math.prod(entry.shape)
    step = max(1, MAX_CHUNK_BYTES // itemsize)
    shape = map_head(len(entry.shape)) + b"".join(pack(str(n)) + pack(s) for n, s in enumerate(entry.shape))
    parts: list[bytes | int] = [map_head(3) + pack(CHUNKED) + pack(True) + pack("shape") + shape + pack("chunks")]
    parts.append(map_head(-(-size // step)))
    for n, start in enumerate(range(0, size, step)):
        count = min(step, size - start)
        parts += [pack(str(n)), *_extension(ARRAY, entry.dtype, (count,), count * itemsize)]
    return parts


def _nbytes(entry: ArrayEntry) -> int:
    return math.prod(entry.shape) * dtypes.itemsize(entry.dtype)


def _extension(code: int, dtype: str, shape: tuple[int, ...], nbytes: int) -> list[bytes | int]:
    return [_extension_head(code, dtype, shape, nbytes), nbytes]


@functools.lru_cache(maxsize=1024)
def _extension_head(code: int, dtype: str, shape: tuple[int, ...], nbytes: int) -> bytes:
    head = list_head(3) + pack(list(shape)) + pack(dtype) + bin_head(nbytes)
    return ext_head(code, len(head) + nbytes) + head


def _bytes(contents: Source, entry: ArrayEntry) -> Iterator[memoryview]:
    """Yields the bytes of an array, in C order, slice by slice."""
    for box in slice_boxes(entry.shape, dtypes.itemsize(entry.dtype), _SLICE_BYTES):
        (array,) = contents.read([(entry, box)], verify=True)
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
