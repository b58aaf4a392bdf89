"""Describes the states of leaves that are data iterators or generators of random numbers, for a save and a restore.

A state belongs to one process. It consists of numbers, text, bytes, containers, arrays and tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._core.entries import IteratorEntry, IteratorInfo, StatesEntry, ValueEntry
from .._core.iterator_states import MAX_STATE_BYTES, Packed, Types, encode_state, pack, per_process, unpack
from .._threads.reentry import runs_user_code
from ..errors import MismatchError, TreeringError, UnsupportedError
from . import pending_states
from .state_methods import find_methods, info_of

_GLOBAL = ["str", "global_next_index"]  # the only key in the state of Grain's elastic iterators
# The keys in the states of Grain's iterators that take elements from elastic ones, by the same rule in all processes.
_ELASTIC_PARTS = {"parents", "parent", "parent_window_start_state"}
_ELASTIC_VALUES = {"index", "stop", "count_elements_read", "window_index", "pos_in_window"}


class Frozen:
    """An iterator that only holds a copy of a state, to be saved later."""

    def __init__(self, state: Packed, info: IteratorInfo):
        self.state, self.info = state, info

    def get_state(self) -> Any:
        return unpack(self.state)

    def set_state(self, state: Any) -> None:
        raise NotImplementedError  # It is only saved; the method makes it count as an iterator.


@runs_user_code
def freeze(leaf: Any) -> Frozen:
    """Returns a copy of the state to save of an iterator: its own, or the one that it was set to and has not begun yet.

    Raises `UnsupportedError` if the iterator has no state, or a state that cannot be saved.
    """
    if isinstance(leaf, Frozen):
        return leaf
    methods = find_methods(type(leaf))
    assert methods
    try:
        state = methods.get(leaf)
    except TreeringError:
        raise
    except Exception as error:
        get, put = methods.names
        raise UnsupportedError(
            f"a {type(leaf).__module__}.{type(leaf).__qualname__} whose {get}() raises {error!r}; put an object whose "
            f"{get}() and {put}(state) work into the tree, such as the loader of a dataset, or leave it out of the tree"
        ) from error
    return Frozen(pending_states.current_state(leaf, pack(state)), info_of(type(leaf)))


def entry_of(path: str, frozen: Frozen, *, several: bool) -> IteratorEntry:
    """Returns the entry of an iterator with a state.

    several: True if other processes save together with this one. Then states stay packed until all sizes are known.
    """
    data, types = frozen.state
    if several or data.nbytes > MAX_STATE_BYTES:
        read: Callable[[int, bool], Any] = lambda process, exact: unpack(frozen.state, exact=exact)  # noqa: E731
        return StatesEntry(path, "iterator", (data.nbytes,), frozen.info.with_types([types]), read)
    return join_states(path, [encode_state(unpack(frozen.state))], frozen.info)


def join_states(path: str, states: Sequence[tuple[Any, Types]], info: IteratorInfo) -> IteratorEntry:
    """Returns the entry of an iterator with the states of all processes. Elastic iterators of Grain have one for all.

    states: the states as JSON, each with the types of its values that are not plain.

    Raises `MismatchError` if the states of an elastic iterator differ between processes.
    """
    values = [value for value, _ in states]
    if all(map(_is_elastic, values)):
        if all(value == values[0] for value in values):
            return IteratorEntry(path, "iterator", ["all", values[:1]], info)
        if all(_keys(value) == [_GLOBAL] for value in values):
            raise MismatchError(
                f"{path}: an elastic iterator is at another position in each process; expected the same"
            )
    return IteratorEntry(path, "iterator", ["each", values], info.with_types([types for _, types in states]))


def _keys(state: Any) -> list[Any]:
    return [key for key, _ in state[1]] if state[0] == "dict" else []


def _is_elastic(state: Any) -> bool:
    """Returns True for the state of an iterator of Grain that continues in any number of processes.

    That is an elastic iterator, and one that mixes, zips or limits elastic iterators alone: it takes the same elements
    of the same global batches in all processes.
    """
    if _keys(state) == [_GLOBAL]:
        return True
    parts: list[Any] = []
    for key, item in state[1] if state[0] == "dict" else ():
        name = key[1] if key[0] == "str" else None
        if name in _ELASTIC_PARTS:
            parts += item[1] if item[0] == "list" else [item]
        elif name not in _ELASTIC_VALUES:
            return False
    return bool(parts) and all(map(_is_elastic, parts))


def state_for_process(entry: ValueEntry, index: int, count: int) -> tuple[Any, int]:
    """Returns the state for one of `count` processes, and the number of processes that saved states.

    The state is None if these numbers differ. Raises the same errors as reading an array, and `UnsupportedError` for a
    value that cannot be made here.
    """
    assert isinstance(entry, IteratorEntry)
    if isinstance(entry, StatesEntry):
        saved = len(entry.value)
        return entry.state(index) if saved == count else None, saved
    kind, states = per_process(entry.value)
    if kind == "all" or (_is_elastic(states[0]) and all(state == states[0] for state in states)):
        return entry.state(0), count
    return entry.state(index) if len(states) == count else None, len(states)
