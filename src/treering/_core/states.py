"""The states of data iterators, as JSON: `values` with containers and small NumPy arrays."""

import base64
from typing import Any

import numpy as np

from ..errors import CorruptError, UnsupportedError
from . import dtypes
from .values import decode, encode, from_base64, is_shape

MAX_STATE_BYTES = 1 << 20  # bytes of a state: all processes' states go through process 0 into the manifest
_MAX_DEPTH = 100


def decoded(value: Any) -> list[Any]:
    """The states, one per process or a single one for all."""
    return [decode_state(state, 0) for state in of_processes(value)[1]]


def of_processes(value: Any) -> tuple[str, list[Any]]:
    try:
        kind, states = value
        if isinstance(states, list) and ((kind == "all" and len(states) == 1) or (kind == "each" and states)):
            return kind, states
    except (ValueError, TypeError):
        pass
    raise CorruptError(f"expected the states of an iterator, found {value!r:.100}")


def encode_state(value: Any, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"an iterator whose state is nested more than {_MAX_DEPTH} levels deep")
    kind = type(value)
    if kind is dict:
        if odd := [key for key in value if _has_numpy(key)]:
            raise UnsupportedError(f"an iterator with the NumPy scalar {odd[0]!r} among the keys of its state{where}")
        return [
            "dict",
            [
                [encode_state(k, where, depth + 1), encode_state(v, f"{where}[{k!r}]", depth + 1)]
                for k, v in value.items()
            ],
        ]
    if kind in (list, tuple):
        return [kind.__name__, [encode_state(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]]
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        text = dtypes.to_text(array.dtype)
        data = dtypes.whole_bytes(np.ascontiguousarray(array, dtypes.to_numpy(text))).tobytes()
        return ["array", [kind is np.ndarray, text, list(array.shape), base64.b64encode(data).decode()]]
    try:
        return list(encode(value))
    except UnsupportedError as error:
        raise UnsupportedError(f"an iterator with {error} in its state{where and ', at ' + where}") from None


def _has_numpy(key: Any) -> bool:
    """Whether a key is a NumPy scalar or a tuple with one: which keys are equal to it, only NumPy knows."""
    return any(map(_has_numpy, key)) if isinstance(key, tuple) else isinstance(key, np.generic)


def decode_state(value: Any, depth: int) -> Any:
    try:
        kind, content = value
        if depth > _MAX_DEPTH:
            raise ValueError
        if kind == "dict":
            found = {decode_state(key, depth + 1): decode_state(item, depth + 1) for key, item in content}
            if len(found) != len(content) or any(map(_has_numpy, found)):
                raise ValueError
            return found
        if kind in ("list", "tuple") and isinstance(content, list):
            return (list if kind == "list" else tuple)(decode_state(item, depth + 1) for item in content)
        if kind == "array":
            is_array, text, shape, data = content
            dtype = dtypes.to_numpy(text)
            lengths = all(type(size) is int for size in shape) and is_shape(shape, dtype.itemsize)
            if type(is_array) is not bool or not lengths:
                raise ValueError
            array = np.frombuffer(from_base64(data), dtype).reshape(shape).copy()
            if not is_array and shape:
                raise ValueError
            return array if is_array else array[()]
        if kind in ("function", "iterator"):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise CorruptError(f"expected the state of an iterator, found {value!r:.100}") from None
    return decode(kind, content)
