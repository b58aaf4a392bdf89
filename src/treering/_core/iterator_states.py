"""Writes the states of data iterators as JSON: the values of `values`, with containers and small NumPy arrays.

A large state is packed: its JSON is followed by the bytes objects and the arrays that are in the state.
"""

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ..errors import CorruptError, UnsupportedError
from . import dtypes
from .values import decode, encode, from_base64, is_shape

MAX_STATE_BYTES = 1 << 20  # of a packed state in the manifest, to which process 0 adds the states of all processes
_MAX_DEPTH = 100
_LENGTH_BYTES = 8  # bytes before the JSON of a packed state, which hold the length of the JSON
Packed = np.ndarray[Any, np.dtype[np.uint8]]


class _Reader:
    """The bytes of a packed state that have not been used yet."""

    def __init__(self, data: memoryview):
        self._data, self._at = data, 0

    def take(self, nbytes: Any) -> memoryview:
        """Returns the next bytes. Raises `ValueError` if there are fewer, or if `nbytes` is not a number of bytes."""
        if type(nbytes) is not int or not 0 <= nbytes <= self.left:
            raise ValueError(f"{nbytes!r} bytes of {self.left}")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def pack(state: Any) -> Packed:
    """Returns a state as bytes, in new memory. Raises `UnsupportedError` for a value that a state cannot contain."""
    parts: list[Any] = []
    text = msgspec.json.encode(encode_state(state, "", 0, parts))
    parts = [len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts]
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts])


def unpack(data: Packed, parse: Callable[[bytes], Any] = msgspec.json.decode) -> Any:
    """Returns the state that was packed. Raises `CorruptError` for other bytes, and the errors of `parse`."""
    rest = _Reader(np.ascontiguousarray(data).data)
    try:
        text = rest.take(int.from_bytes(rest.take(_LENGTH_BYTES), "little"))
    except ValueError as error:
        raise CorruptError(f"expected the state of an iterator, found {error}") from None
    state = decode_state(parse(bytes(text)), 0, rest)
    if rest.left:
        raise CorruptError(f"expected the state of an iterator, found {rest.left} bytes after it")
    return state


def decode_states(value: Any) -> list[Any]:
    """Returns the states, one per process or a single one for all processes."""
    return [decode_state(state, 0) for state in per_process(value)[1]]


def per_process(value: Any) -> tuple[str, list[Any]]:
    """Returns the two parts of the value of an iterator's entry: "each" or "all", and the list of states.

    Raises `CorruptError` for any other value.
    """
    try:
        kind, states = value
        if isinstance(states, list) and ((kind == "all" and len(states) == 1) or (kind == "each" and states)):
            return kind, states
    except (ValueError, TypeError):
        pass
    raise CorruptError(f"expected the states of an iterator, found {value!r:.100}")


def encode_state(value: Any, where: str, depth: int, buffers: list[Any] | None = None) -> Any:
    """Returns a part of a state as JSON. If `buffers` is given, bytes and the elements of arrays are appended to it.

    where: the place in the state, for errors.

    Raises `UnsupportedError` for a value that a state cannot contain.
    """
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"an iterator whose state is nested more than {_MAX_DEPTH} levels deep")
    kind = type(value)
    if kind is dict:
        if odd := [key for key in value if _has_numpy(key)]:
            raise UnsupportedError(f"an iterator with the NumPy scalar {odd[0]!r} among the keys of its state{where}")
        return [
            "dict",
            [
                [encode_state(k, where, depth + 1, buffers), encode_state(v, f"{where}[{k!r}]", depth + 1, buffers)]
                for k, v in value.items()
            ],
        ]
    if kind in (list, tuple):
        return [
            kind.__name__,
            [encode_state(item, f"{where}[{n}]", depth + 1, buffers) for n, item in enumerate(value)],
        ]
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        text = dtypes.to_text(array.dtype)
        stored = dtypes.defined_bytes(np.ascontiguousarray(array, dtypes.to_numpy(text))).reshape(-1).view(np.uint8)
        if buffers is not None:
            buffers.append(stored)
        data = base64.b64encode(stored.data).decode() if buffers is None else stored.size
        return ["array", [kind is np.ndarray, text, list(array.shape), data]]
    if kind is bytes and buffers is not None:
        buffers.append(value)
        return ["bytes", len(value)]
    try:
        return list(encode(value))
    except UnsupportedError as error:
        raise UnsupportedError(f"an iterator with {error} in its state{where and ', at ' + where}") from None


def _has_numpy(key: Any) -> bool:
    """Returns True if a key is a NumPy scalar, or a tuple with one. Only NumPy knows which keys are equal to it."""
    return any(map(_has_numpy, key)) if isinstance(key, tuple) else isinstance(key, np.generic)


def decode_state(value: Any, depth: int, buffers: _Reader | None = None) -> Any:
    """Undoes `encode_state`. Raises `CorruptError` for other JSON, and if `buffers` has too few bytes."""
    try:
        kind, content = value
        if depth > _MAX_DEPTH:
            raise ValueError
        if kind == "dict" and isinstance(content, list):
            found = {
                decode_state(key, depth + 1, buffers): decode_state(item, depth + 1, buffers) for key, item in content
            }
            if len(found) != len(content) or any(map(_has_numpy, found)):
                raise ValueError
            return found
        if kind in ("list", "tuple") and isinstance(content, list):
            return (list if kind == "list" else tuple)(decode_state(item, depth + 1, buffers) for item in content)
        if kind == "array":
            is_array, text, shape, data = content
            dtype = dtypes.to_numpy(text)
            lengths = all(type(size) is int for size in shape) and is_shape(shape, dtype.itemsize)
            if type(is_array) is not bool or not lengths:
                raise ValueError
            stored = from_base64(data) if buffers is None else buffers.take(data)
            array = np.frombuffer(stored, dtype).reshape(shape).copy()
            if not is_array and shape:
                raise ValueError
            return array if is_array else array[()]
        if kind == "bytes" and buffers is not None:
            return bytes(buffers.take(content))
        if kind in ("function", "iterator"):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise CorruptError(f"expected the state of an iterator, found {value!r:.100}") from None
    return decode(kind, content)
