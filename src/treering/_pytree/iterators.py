"""Describes the states of leaves that are data iterators or generators of random numbers, for a save and a restore.

A state belongs to one process. It consists of numbers, text, bytes, containers, arrays and tensors.

Some iterators keep a state that they were given until their next pass begins, and return another one until then: an
`IterableDataset` of Hugging Face the start of its data, or the position before a job went back. A save must not store
that. So it stores the state that was set (`remember`), until the iterator moves.

An iterator has moved if it returns another state than right after it was set. It may also return that state again
after it has moved, when a job that went back arrives where it was before. Then some attribute of the iterator, or of an
iterator in it, has changed.
"""

import copy
import functools
import itertools
import logging
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._core.entries import IteratorEntry, IteratorInfo, StatesEntry, ValueEntry
from .._core.iterator_states import MAX_STATE_BYTES, Packed, Types, digest, encode_state, pack, per_process, unpack
from .._threads.reentry import runs_user_code
from ..errors import MismatchError, TreeringError, UnsupportedError
from .state_methods import find_methods, info_of, is_iterator

_GLOBAL = ["str", "global_next_index"]  # the only key in the state of Grain's elastic iterators
# The keys in the states of Grain's iterators that take elements from elastic ones, by the same rule in all processes.
_ELASTIC_PARTS = {"parents", "parent", "parent_window_start_state"}
_ELASTIC_VALUES = {"index", "stop", "count_elements_read", "window_index", "pos_in_window"}
_log = logging.getLogger("treering")
_MAX_ITEMS = 10_000  # items of a container that are looked at to decide if it holds nothing but values
_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic)
_GONE = object()  # an object that no longer exists
_ADDRESS = re.compile(rb"<[^<]* at 0x[0-9a-f]+>")  # in the default repr of an object


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
    info = info_of(type(leaf))
    if isinstance(state, bytes) and info.module.startswith("grain.") and (found := _ADDRESS.search(state)):
        _warn_of_address(info.name, found[0].decode(errors="replace"))
    return Frozen(current_state(leaf, pack(state)), info)


@functools.lru_cache(maxsize=512)
def _warn_of_address(name: str, text: str) -> None:
    """Warns once of a state with the repr of the data source or the sampler, which Grain compares with that at hand."""
    _log.warning(
        "the state of a %s has the address of an object (%s), so Grain refuses it after a restart; give the class of "
        "the data source or sampler a __repr__",
        name,
        text,
    )


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


class _Pending(NamedTuple):
    """A state that was set.

    path: the path of the leaf.
    state: the state that was set.
    reading: the digest of the state that the iterator returned right after it was set.
    marks: the attributes of the iterator at that time.
    """

    path: str
    state: Packed
    reading: tuple[str, Types]
    marks: Mapping[str, Any]


# By the id of the iterator, which may have no hash. The entry is removed when the iterator no longer exists.
_pending: dict[int, tuple["weakref.ref[Any]", _Pending]] = {}


def remember(path: str, leaf: Any, state: Packed, reading: tuple[str, Types], get: Callable[[Any], Any]) -> None:
    """Notes that an iterator was set to `state`, and returned another state after that, whose digest is `reading`."""
    key = id(leaf)
    try:
        ref = weakref.ref(leaf, lambda _: _pending.pop(key, None))
        marks = _marks(leaf, set())
        is_stable = digest(get(leaf)) == reading
    except Exception:  # It has no weak references, or the user's code raises.
        ref, marks, is_stable = None, {}, False
    # Attributes that change whenever the state is read say nothing.
    marks = {name: mark for name, mark in marks.items() if _is_same(mark, _attributes(leaf).get(name))}
    if ref is not None and marks and is_stable:
        _pending[key] = ref, _Pending(path, state, reading, marks)
        return
    _log.warning(
        "%s: this %s returns another state than the restored one until something is taken from it, and Treering cannot "
        "see when that happens; take an element before the next save, or that stores another position",
        path,
        type(leaf).__name__,
    )


def forget(leaf: Any) -> None:
    """Forgets the state that an iterator was set to, because it is set to another one."""
    _pending.pop(id(leaf), None)


def current_state(leaf: Any, found: Packed) -> Packed:
    """Returns the state to save of an iterator that returns `found`: that one, or the one that it was set to before."""
    ref, pending = _pending.get(id(leaf), (None, None))
    if ref is None or pending is None or ref() is not leaf:
        return found
    if found.digest != pending.reading:
        forget(leaf)
        return found
    now = _attributes(leaf)
    if all(_is_same(mark, now.get(name)) for name, mark in pending.marks.items()):
        _log.info("%s: nothing was taken from it since the restore; its state is saved again", pending.path)
        return pending.state
    forget(leaf)
    _log.warning(
        "%s: this %s returns the same state as right after the restore, and saves it, because it has changed since; if "
        "nothing was taken from it, a job that resumes from here gets other data: take an element before each save",
        pending.path,
        type(leaf).__name__,
    )
    return found


class _Mark(NamedTuple):
    """What an attribute was.

    held: returns the object that it was, or `_GONE`; None if the attribute itself is not compared.
    content: a copy of a value, or of a container of values.
    inner: the attributes of an iterator, or the iterators in a container.
    """

    held: Callable[[], Any] | None
    content: Any
    inner: Mapping[str, "_Mark"]


def _marks(part: Any, seen: set[int]) -> dict[str, _Mark]:
    """Returns the attributes of an iterator, and those of the iterators in it. `seen` are the iterators above it."""
    seen.add(id(part))
    return {name: mark for name, value in _attributes(part).items() if (mark := _mark(value, seen))}


def _mark(value: Any, seen: set[int]) -> _Mark | None:
    """Returns the mark of an attribute, which never keeps the iterator alive; None if nothing can be compared."""
    inner = _marks(value, seen) if is_iterator(type(value)) and id(value) not in seen else {}
    try:
        ref = weakref.ref(value)
        return _Mark(lambda: _GONE if (there := ref()) is None else there, None, inner)
    except TypeError:
        if _holds_values(value):
            return _Mark(lambda: value, copy.deepcopy(value), inner)
    if isinstance(value, list | tuple | dict):
        parts = {name: one for name, one in _attributes(value).items() if is_iterator(type(one))}
        inner = {name: mark for name, one in parts.items() if (mark := _mark(one, seen))}
    return _Mark(None, None, inner) if inner else None


def _is_same(mark: _Mark, value: Any) -> bool:
    """Returns True if an attribute is what it was."""
    if mark.held is not None:
        then = mark.held()
        is_value = isinstance(then, _VALUES) and type(value) is type(then)
        if then is not value and not (is_value and value == then):
            return False
        if not is_value and mark.content is not None and value != mark.content:  # It was changed in place.
            return False
    now = _attributes(value) if mark.inner else {}
    return all(_is_same(one, now.get(name)) for name, one in mark.inner.items())


def _attributes(part: Any) -> dict[str, Any]:
    """Returns the attributes of an object, or the items of a container, by name."""
    if isinstance(part, dict | list | tuple):
        pairs = part.items() if isinstance(part, dict) else enumerate(part)
        return {repr(name): one for name, one in itertools.islice(pairs, _MAX_ITEMS)}
    found = dict(getattr(part, "__dict__", {}))
    for base in type(part).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(part, name):
                found[name] = getattr(part, name)
    return found


def _holds_values(value: Any) -> bool:
    """Returns True for a value, and for a small container of values alone, which cannot refer to an iterator."""
    stack, left = [value], _MAX_ITEMS
    while stack:
        if not left:
            return False
        one = stack.pop()
        left -= 1
        if isinstance(one, dict):
            stack += [*one.keys(), *one.values()][:left]
        elif isinstance(one, list | tuple | set | frozenset):
            stack += list(one)[:left]
        elif not isinstance(one, _VALUES):
            return False
    return True
