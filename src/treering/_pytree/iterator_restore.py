"""Sets iterators to saved states, and checks that they accept them."""

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.entries import IteratorInfo
from .._core.iterator_states import Packed, digest, pack, unpack
from .._threads.reentry import runs_user_code
from ..errors import MismatchError
from .iterators import forget, remember
from .state_methods import StateMethods, find_methods, info_of

_log = logging.getLogger("treering")
# What an iterator raises if a state has other parts than its own. Other errors may only say that it has not begun yet.
_UNFIT = (LookupError, ValueError, AssertionError)
_MAX_KEYS_TEXT = 200  # characters


def set_states(states: Sequence[tuple[str, Any, Any, IteratorInfo]]) -> None:
    """Sets iterators to states. Each is given as a path, an iterator, a state, and what is recorded about the state.

    Raises `MismatchError` if an iterator does not accept its state, or is to have two different ones.
    """
    first: dict[int, tuple[str, Any]] = {}
    chosen: list[tuple[str, Any, Any, IteratorInfo]] = []
    for path, leaf, state, saved in states:
        other = first.setdefault(id(leaf), (path, state))
        if other[0] == path:
            chosen.append((path, leaf, state, saved))
        elif digest(other[1]) != digest(state):
            raise MismatchError(
                f"{other[0]} and {path}: expected two iterators, because their saved states differ, found one in both "
                "places of the template; make another"
            )
    for one in chosen:
        _set_state(*one)


@runs_user_code
def _set_state(path: str, leaf: Any, state: Any, saved: IteratorInfo) -> None:
    """Sets an iterator to a state, and remembers the state until the iterator returns it or moves.

    saved: what the checkpoint records about the iterator that had the state.

    Raises `MismatchError` if the iterator does not accept the state, or returns one with other parts after that.
    """
    methods = find_methods(type(leaf))
    assert methods
    before = _state_before(leaf, methods, state)
    state = _in_form_of(before, state)
    given = pack(state)
    forget(leaf)
    try:
        methods.put(leaf, state)
    except Exception as error:
        raise _refusal(path, leaf, saved, repr(error), given, before) from error
    if not methods.is_immediate:
        _check(path, leaf, methods, given, saved, before)
    if _is_other_class(saved, info_of(type(leaf))):
        _log.warning("%s: %s; it accepts the saved state", path, _compared(saved, info_of(type(leaf))))


def _check(path: str, leaf: Any, methods: StateMethods, given: Packed, saved: IteratorInfo, before: Any) -> None:
    """Compares the state that an iterator returns with the one that it was given."""
    refusal = functools.partial(_refusal, path, leaf, saved, given=given)
    other = _is_other_class(saved, info_of(type(leaf)))
    try:
        found = methods.get(leaf)
        reading = digest(found)
    except Exception as error:
        name = methods.names[0]
        if other or before is not None or isinstance(error, _UNFIT):
            raise refusal(f"after it was set, {name}() raises {error!r}", own=before) from error
        _log.warning(
            "%s: this %s cannot return its state before it moves: %s() raises %r; so nothing shows whether it accepts "
            "the restored state, and a save before it moves fails",
            path,
            type(leaf).__name__,
            name,
            error,
        )
        return
    if reading == given.digest:
        return
    strict = other or (before is not None and _digest(before) != reading)
    if misfit(unpack(given), found, strict=strict):
        raise refusal("it returns another one after it was set", own=found, strict=strict)
    remember(path, leaf, given, reading, methods.get)


def _state_before(leaf: Any, methods: StateMethods, state: Any) -> Any:
    """Returns the state of an iterator before it is set, or None.

    It is read only where that is known to change nothing: Grain's iterators have `set_state`, and often return it.
    The loaders of PyTorch would begin their workers.
    """
    if isinstance(state, bytes) or methods.names[1] != "set_state":
        return None
    try:
        return methods.get(leaf)
    except Exception:  # It has no state yet.
        return None


def _in_form_of(before: Any, state: Any) -> Any:
    """Returns a state in the form that the iterator itself uses.

    The files of Grain do not record if a state in JSON was bytes or a dict, so the iterator's present state says it.
    """
    try:
        return json.dumps(state, indent=4).encode() if isinstance(before, bytes) else state
    except (TypeError, ValueError):  # It is not JSON. The iterator judges the state itself.
        return state


def _digest(state: Any) -> Any:
    try:
        return digest(state)
    except Exception:  # a state that is not plain, which the user's code may also raise
        return None


def _refusal(
    path: str, leaf: Any, saved: IteratorInfo, reason: str, given: Packed, own: Any, *, strict: bool = True
) -> MismatchError:
    own_info = info_of(type(leaf))
    parts = [f"{path}: this {type(leaf).__name__} does not accept the saved state: {reason}"]
    if what := misfit(unpack(given), own, strict=strict):
        parts.append(what)
    if _is_other_class(saved, own_info) or (saved.version and saved.version != own_info.version):
        parts.append(_compared(saved, own_info))
    parts.append(
        "make the iterator as the saved one was made, with the same data, steps and number of workers; or put `...` in "
        "its place, and continue at another position"
    )
    return MismatchError("; ".join(parts))


def _is_other_class(saved: IteratorInfo, own: IteratorInfo) -> bool:
    """Returns True for another class. A class of the program itself may be in another module than before."""
    libraries = {one.module.partition(".")[0] for one in (saved, own)}
    return bool(saved.name) and (saved.name != own.name or (len(libraries) > 1 and bool(saved.version and own.version)))


def _compared(saved: IteratorInfo, own: IteratorInfo) -> str:
    a, b = (f"a {one.module}.{one.name}{f' of version {one.version}' if one.version else ''}" for one in (saved, own))
    return f"the state is that of {a}, this is {b}"


def misfit(saved: Any, own: Any, *, strict: bool, where: str = "") -> str | None:
    """Describes the first place in which a saved state has other parts than the state of an iterator.

    Parts that only one of them has yet fit: None, an empty container, and the items of a buffer. An iterator that keeps
    its saved state until it begins returns such a state. Unless `strict`, values that only one of them has fit, too.
    """
    if saved is None or own is None or (_is_container(saved) and not saved) or (_is_container(own) and not own):
        return None
    at = f"at {where}" if where else "at the top"
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        a, b = ({str(key): item for key, item in side.items()} for side in (saved, own))
        differing = [key for key in {**a, **b} if (key in a) != (key in b)]
        if not (strict or (not where and a.keys() - b.keys() and b.keys() - a.keys())):
            differing = [key for key in differing if _is_container(item := a.get(key, b.get(key))) and item]
        if differing:
            return f"{at} the saved state has {_keys(a)}, that of this iterator {_keys(b)}"
        pairs = [(f"{where}[{key!r}]", a[key], b[key]) for key in a if key in b]
    elif isinstance(saved, list | tuple) and isinstance(own, list | tuple):
        if len(saved) != len(own) and any(map(_is_container, [*saved, *own])):
            return f"{at} the saved state has {len(saved)} items, that of this iterator {len(own)}"
        pairs = [(f"{where}[{n}]", one, other) for n, (one, other) in enumerate(zip(saved, own, strict=False))]
    elif _is_container(saved) != _is_container(own) or isinstance(saved, Mapping) != isinstance(own, Mapping):
        return f"{at} the saved state has a {type(saved).__name__}, that of this iterator a {type(own).__name__}"
    else:
        return None
    found = (misfit(one, other, strict=strict, where=place) for place, one, other in pairs)
    return next((text for text in found if text), None)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _keys(state: Mapping[str, Any]) -> str:
    listed = ", ".join(map(repr, state))
    return f"the keys {listed if len(listed) <= _MAX_KEYS_TEXT else listed[: _MAX_KEYS_TEXT - 1] + '…'}"
