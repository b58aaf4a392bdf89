"""Writes the states of data iterators as JSON: the values of `values`, with containers and small NumPy arrays.

A large state is packed: its JSON is followed by the bytes objects and the arrays that are in the state. Values of other
types are written as plain ones; the names of their types are kept separately, by place in the state.
"""

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from ..errors import CorruptError, UnsupportedError
from . import dtypes, state_types
from .values import decode, encode, from_base64, is_shape

MAX_STATE_BYTES = 1 << 20  # of a packed state in the manifest, to which process 0 adds the states of all processes
MAX_TYPES = 10_000  # places of values that are not plain; the manifest has them for all processes
_MAX_DEPTH = 100
_LENGTH_BYTES = 8  # bytes before the JSON of a packed state, which hold the length of the JSON
_EVERY = "*"  # in a place: every item of a container, all of which are alike
Types = Mapping[str, str]  # the names of types by place: the numbers of the items that lead to the value, joined by "/"


class Packed(NamedTuple):
    """A state as bytes, and the types of the values in it that are not plain."""

    data: "np.ndarray[Any, np.dtype[np.uint8]]"
    types: Types

    @property
    def digest(self) -> tuple[str, Types]:
        """Equal for equal states."""
        return xxhash.xxh3_128_hexdigest(self.data.data), self.types


class _StateReader:
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
    parts, types = _parts(state)
    return Packed(np.concatenate([np.frombuffer(part, np.uint8) for part in parts]), types)


def digest(state: Any) -> tuple[str, Types]:
    """Returns the `Packed.digest` of a state without packing it. Raises the errors of `pack`."""
    parts, types = _parts(state)
    found = xxhash.xxh3_128()
    for part in parts:
        found.update(part)
    return found.hexdigest(), types


def _parts(state: Any) -> tuple[list[Any], Types]:
    buffers: list[Any] = []
    content, types = encode_state(state, buffers)
    text = msgspec.json.encode(content)
    return [len(text).to_bytes(_LENGTH_BYTES, "little"), text, *buffers], types


def unpack(packed: Packed, parse: Callable[[bytes], Any] = msgspec.json.decode, *, exact: bool = True) -> Any:
    """Returns the state that was packed. Raises `CorruptError` for other bytes, and the errors of `parse`.

    exact: see `with_types`.
    """
    rest = _StateReader(np.ascontiguousarray(packed.data).data)
    try:
        text = rest.take(int.from_bytes(rest.take(_LENGTH_BYTES), "little"))
    except ValueError as error:
        raise CorruptError(f"expected the state of an iterator, found {error}") from None
    state = decode_state(parse(bytes(text)), 0, rest)
    if rest.left:
        raise CorruptError(f"expected the state of an iterator, found {rest.left} bytes after it")
    return with_types(state, packed.types, exact=exact)


def decode_states(value: Any, types_of: Callable[[int], Types]) -> list[Any]:
    """Returns the states, one per process or a single one for all processes. `types_of` returns the types of each."""
    states = per_process(value)[1]
    return [with_types(decode_state(one, 0), types_of(n), exact=False) for n, one in enumerate(states)]


def decode_process_state(value: Any, types_of: Callable[[int], Types], process: int) -> Any:
    """Returns the state of a process. Raises `UnsupportedError` for a value that cannot be made here."""
    kind, states = per_process(value)
    number = 0 if kind == "all" else process
    return with_types(decode_state(states[number], 0), types_of(number))


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


def encode_state(state: Any, buffers: list[Any] | None = None) -> tuple[Any, Types]:
    """Returns a state as JSON, and the types of the values in it that are not plain.

    If `buffers` is given, bytes and the elements of arrays are appended to it.

    Raises `UnsupportedError` for a value that a state cannot contain.
    """
    content, tree = _encode(state, "", 0, buffers)
    types = dict(_flat(tree, ()))
    if len(types) > MAX_TYPES:
        raise UnsupportedError(
            f"an iterator with {len(types)} tensors, sets or other values in its state that are not plain, which are "
            f"more than {MAX_TYPES}; put them into arrays"
        )
    return content, types


def _refusal(problem: object, where: str) -> UnsupportedError:
    """Returns the error for a value: a description, and after the first `;` what to do."""
    what, _, advice = str(problem).partition("; ")
    advice = advice or "a state consists of numbers, text, bytes, lists, dicts, arrays and tensors"
    return UnsupportedError(f"an iterator with {what} in its state{where and ', at ' + where}; {advice}")


class _TypeTree(NamedTuple):
    """The types of a value and of those in it. `items` has the items, by number or `_EVERY`, that are not plain."""

    name: str
    items: "Mapping[str, _TypeTree]"


def _encode(value: Any, where: str, depth: int, buffers: list[Any] | None) -> tuple[Any, _TypeTree | None]:
    """Returns a part of a state as JSON, and its types. `where` is the place in the state, for errors."""
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"an iterator whose state is nested more than {_MAX_DEPTH} levels deep")
    kind = type(value)
    if kind is dict:
        if odd := [key for key in value if _has_numpy(key)]:
            raise UnsupportedError(f"an iterator with the NumPy scalar {odd[0]!r} among the keys of its state{where}")
        pairs: list[Any] = []
        trees: list[_TypeTree | None] = []
        for key, item in value.items():
            name, odd_key = _encode(key, where, depth + 1, buffers)
            if odd_key:
                raise UnsupportedError(
                    f"an iterator with the key {key!r:.100} in its state{where}; use text or numbers"
                )
            content, tree = _encode(item, f"{where}[{key!r}]", depth + 1, buffers)
            pairs.append([name, content])
            trees.append(tree)
        return ["dict", pairs], _joined(trees)
    if kind in (list, tuple):
        items = [_encode(item, f"{where}[{n}]", depth + 1, buffers) for n, item in enumerate(value)]
        return [kind.__name__, [item for item, _ in items]], _joined([tree for _, tree in items])
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        try:
            text = dtypes.to_text(array.dtype)
        except UnsupportedError as error:
            raise _refusal(f"an array of {error}", where) from None
        stored = dtypes.defined_bytes(np.ascontiguousarray(array, dtypes.to_numpy(text))).reshape(-1).view(np.uint8)
        if buffers is not None:
            buffers.append(stored)
        data = base64.b64encode(stored.data).decode() if buffers is None else stored.size
        return ["array", [kind is np.ndarray, text, list(array.shape), data]], None
    if kind is bytes and buffers is not None:
        buffers.append(value)
        return ["bytes", len(value)], None
    try:
        if (typed := state_types.to_plain(value)) is None:
            return list(encode(value)), None
    except UnsupportedError as error:
        raise _refusal(error, where) from None
    content, tree = _encode(typed[1], where, depth, buffers)
    return content, _TypeTree(typed[0], tree.items if tree else {})


def _joined(trees: list[_TypeTree | None]) -> _TypeTree | None:
    """Returns the types of a container, given those of its items."""
    if not any(trees):
        return None
    if len(trees) > 1 and trees[0] and all(tree == trees[0] for tree in trees):
        return _TypeTree("", {_EVERY: trees[0]})
    return _TypeTree("", {str(n): tree for n, tree in enumerate(trees) if tree})


def _flat(tree: _TypeTree | None, at: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if tree and tree.name:
        yield "/".join(at), tree.name
    for number, item in tree.items.items() if tree else ():
        yield from _flat(item, (*at, number))


def with_types(state: Any, types: Types, *, exact: bool = True) -> Any:
    """Returns a plain state with the types that it had.

    exact: True to raise `UnsupportedError` for a type that cannot be made here, or has no such value. Without it, such
        values stay plain, as tensors do if PyTorch is not in use.
    """
    if not types:
        return state
    tree: dict[str, Any] = {}
    for place, name in types.items():
        node = tree
        for part in place.split("/") if place else ():
            node = node.setdefault(part, {})
        node[""] = name
    try:
        return _with_tree(state, tree, exact)
    except UnsupportedError:  # which is a `TypeError`
        raise
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # types that do not fit the state
        if not exact:
            return state
        raise UnsupportedError(f"the state of an iterator has the types {types!r:.100}, which do not fit it") from error


def _with_tree(value: Any, tree: Mapping[str, Any], exact: bool) -> Any:
    numbers = tree.keys() - {""}
    if numbers:
        if not isinstance(value, dict | list | tuple):
            raise ValueError(f"no items in a {type(value).__name__}")
        keys, items = (list(value), list(value.values())) if isinstance(value, dict) else (None, list(value))
        for number in numbers:
            for n in range(len(items)) if number == _EVERY else (int(number),):
                items[n] = _with_tree(items[n], tree[number], exact)
        value = dict(zip(keys, items, strict=True)) if keys is not None else type(value)(items)
    if "" in tree and (exact or state_types.is_loaded(tree[""])):
        try:
            return state_types.from_plain(tree[""], value)
        except UnsupportedError as error:
            if exact:
                raise UnsupportedError(f"the state of an iterator has {error}") from error
    return value


def _has_numpy(key: Any) -> bool:
    """Returns True if a key is a NumPy scalar, or a tuple with one. Only NumPy knows which keys are equal to it."""
    return any(map(_has_numpy, key)) if isinstance(key, tuple) else isinstance(key, np.generic)


def decode_state(value: Any, depth: int, buffers: _StateReader | None = None) -> Any:
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
