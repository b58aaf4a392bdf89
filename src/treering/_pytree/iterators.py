"""Gets, saves and sets the states of leaves that are data iterators or generators of random numbers.

An iterator has the methods `get_state` and `set_state`, like those of Grain, or `state_dict` and `load_state_dict`, or
`getstate` and `setstate`, like `random.Random`. A generator of NumPy and a `NumpyIterator` of TensorFlow are iterators
too. A state belongs to one process, and is plain: numbers, text, bytes, containers and NumPy arrays.
"""

import functools
import json
import logging
import operator
import random
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from .._core.entries import StatesEntry, ValueEntry
from .._core.iterator_states import MAX_STATE_BYTES, Packed, decode_state, encode_state, pack, per_process, unpack
from .._threads.reentry import runs_user_code
from ..errors import MismatchError

_log = logging.getLogger("treering")
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"), ("getstate", "setstate"))
_CONTAINERS = (str, bytes, list, tuple, Mapping, Set)
# The class of `tf.data.Dataset.as_numpy_iterator()`. It is recognized by its name, because other classes, such as those
# that save entire models, have methods `save` and `restore` too.
_TENSORFLOW_TYPE = ("tensorflow.python.data.ops.dataset_ops", "NumpyIterator")
_SPAWNED = "n_children_spawned"  # NumPy's name for the number of generators spawned by one; its state lacks it
_GLOBAL = "global_next_index"  # the only key in the state of Grain's elastic iterators, equal in all processes


class _Frozen:
    """An iterator that only holds a copy of a state, to be saved later."""

    def __init__(self, state: Packed):
        self._state = state

    def get_state(self) -> Any:
        return unpack(self._state)

    def set_state(self, state: Any) -> None:
        raise NotImplementedError  # It is only saved; the method makes it count as an iterator.


def is_iterator(leaf_type: type) -> bool:
    """Returns True if leaves of a type have a state to save."""
    return _methods(leaf_type) is not None


def is_generator(leaf_type: type) -> bool:
    """Returns True if leaves of a type generate random numbers, and not data."""
    return issubclass(leaf_type, np.random.Generator | np.random.BitGenerator | random.Random)


def unsupported_hint(leaf_type: type) -> str:
    """Returns advice for data and iterators that have no state to save, or "" for a type that is neither."""
    if leaf_type.__module__.startswith("tensorflow.python.data."):
        return "put as_numpy_iterator() of the dataset into the tree, which has a state"
    methods = "get_state and set_state, or state_dict and load_state_dict (Grain's iterators have the former)"
    instead = "or save how much of it was used as a number, and begin from there"
    if hasattr(leaf_type, "__next__"):
        return f"an iterator needs the methods {methods}; give it these, {instead}"
    # `hasattr` would also find the `__iter__` of a metaclass, which makes an enum itself iterable but not its members.
    iterable = any("__iter__" in vars(base) for base in leaf_type.__mro__)
    other = issubclass(leaf_type, _CONTAINERS) or hasattr(leaf_type, "__array__")
    if iterable and not other and leaf_type.__module__ not in ("builtins", "collections"):
        return f"put iter(…) of it into the tree, if that has the methods {methods}, {instead}"
    return ""


@runs_user_code
def packed_state(leaf: Any) -> Any:
    """Returns the state of an iterator as bytes. Raises `UnsupportedError` if the state is not plain."""
    methods = _methods(type(leaf))
    assert methods
    return pack(methods[0](leaf))


def freeze(leaf: Any) -> Any:
    """Returns a copy of an iterator's state, to be saved. Raises `UnsupportedError` if the state is not plain."""
    return _Frozen(packed_state(leaf))


def entry_of(path: str, state: Packed, *, several: bool) -> ValueEntry:
    """Returns the entry of an iterator with a state.

    several: True if other processes save together with this one. Then states stay packed until all sizes are known.
    """
    if several or state.nbytes > MAX_STATE_BYTES:
        return StatesEntry(path, "iterator", (state.nbytes,), lambda process: unpack(state))
    return join_states(path, [state_to_json(unpack(state))])


def state_to_json(state: Any) -> Any:
    """Returns a state as it is written in the manifest."""
    return encode_state(state, "", 0)


def join_states(path: str, states: Sequence[Any]) -> ValueEntry:
    """Returns the entry of an iterator with the states of all processes. An elastic iterator of Grain has one for all.

    Raises `MismatchError` if the states of an elastic iterator differ between processes.
    """
    elastic = [state for state in states if state[0] == "dict" and [key for key, _ in state[1]] == [["str", _GLOBAL]]]
    if len(elastic) == len(states):
        if any(state != states[0] for state in states):
            raise MismatchError(
                f"{path}: an elastic iterator is at another position in each process; expected the same"
            )
        return ValueEntry(path, "iterator", ["all", [states[0]]])
    return ValueEntry(path, "iterator", ["each", list(states)])


def state_for_process(entry: ValueEntry, index: int, count: int) -> tuple[Any, int]:
    """Returns the state for one of `count` processes, and the number of processes that saved states.

    The state is None if these numbers differ. Raises the same errors as reading an array.
    """
    if isinstance(entry, StatesEntry):
        saved = len(entry.value)
        return entry.state(index) if saved == count else None, saved
    kind, states = per_process(entry.value)
    if kind == "all":
        return decode_state(states[0], 0), count
    return decode_state(states[index], 0) if len(states) == count else None, len(states)


@runs_user_code
def set_state(path: str, leaf: Any, state: Any) -> None:
    """Sets an iterator to a state. Raises `MismatchError` if the iterator does not accept it."""
    methods = _methods(type(leaf))
    assert methods
    try:
        methods[1](leaf, _in_iterator_form(leaf, methods[0], state))
    except Exception as error:
        raise MismatchError(f"{path}: this {type(leaf).__name__} does not accept the saved state: {error!r}") from error


def _in_iterator_form(leaf: Any, get: Callable[[Any], Any], state: Any) -> Any:
    """Returns a state in the form that the iterator itself uses.

    The files of Grain do not record if a state in JSON was bytes or a dict, so the iterator's present state says it.
    """
    if isinstance(state, bytes) or not hasattr(leaf, "set_state"):
        return state
    try:
        return json.dumps(state, indent=4).encode() if isinstance(get(leaf), bytes) else state
    except Exception:  # The iterator has no state yet, or the state is not JSON. The iterator judges the state itself.
        return state


@functools.lru_cache(maxsize=512)
def _methods(leaf_type: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]] | None:
    """Returns the functions that get and set the state of leaves of a type, or None if they have no state."""
    if issubclass(leaf_type, np.random.Generator | np.random.BitGenerator):
        return _numpy_state, _set_numpy_state
    if any((base.__module__, base.__qualname__) == _TENSORFLOW_TYPE for base in leaf_type.__mro__):
        return _tensorflow_state, functools.partial(_call, "restore")
    for get, put in _METHODS:
        if callable(getattr(leaf_type, get, None)) and callable(getattr(leaf_type, put, None)):
            return operator.methodcaller(get), functools.partial(_call, put)
    return None


def _call(method: str, leaf: Any, state: Any) -> None:
    getattr(leaf, method)(state)


def _tensorflow_state(iterator: Any) -> bytes:
    return iterator.save().numpy()  # the bytes in a tensor of text without axes


def _numpy_state(generator: Any) -> dict[str, Any]:
    bits = getattr(generator, "bit_generator", generator)
    return {**bits.state, _SPAWNED: getattr(bits.seed_seq, _SPAWNED, 0)}


def _set_numpy_state(generator: Any, state: dict[str, Any]) -> None:
    bits = getattr(generator, "bit_generator", generator)
    spawned = state.pop(_SPAWNED)
    bits.state = state
    rest = spawned - getattr(bits.seed_seq, _SPAWNED, 0)
    if rest > 0:
        bits.seed_seq.spawn(rest)  # so that the next spawned generator is a new one
    elif rest < 0:
        _log.warning(
            "a generator of NumPy had spawned %d generators when it was saved and has now spawned %d, which cannot be "
            "undone: the next ones are not those that it would have spawned then; restore into a new generator",
            spawned,
            spawned - rest,
        )
