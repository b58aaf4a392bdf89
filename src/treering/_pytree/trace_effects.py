"""Notices what tracing a function leaves behind in the program, and puts it back as it was before.

An object that sets itself up once, such as a scaler with an array that its first `init` computes, would otherwise keep
tracers for the rest of the job.
"""

import collections
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from jax.core import Tracer

from ..errors import UnsupportedError
from . import jax_private, leaks

_ABSENT = object()
_CONTAINERS: tuple[Any, ...] = (collections.OrderedDict, dict, list, set, collections.deque)
WITHOUT_TRACING = (
    "Replace restore_or_init, which traces init, by `state, step = (ckpts.restore(like=init()), ckpts.restored_step) "
    "if ckpts.steps else (init(), 0)`"
)
_MAX_STEPS = 6  # from a tracer to the global that holds it
_OWN_ATTRIBUTES = ("__dict__", "__weakref__")  # of a class, which cannot be set


class TraceEffects:
    """The effects of tracing a function on the objects that it can reach. Make it before the trace.

    Putting back is limited to what leads to a tracer afterwards, because other threads may change the rest meanwhile.

    held: a name of what holds a tracer already, from a trace around this one, or "".
    """

    def __init__(self, function: Callable[..., Any]):
        self.held = ""
        self._function = function
        self._trace: Callable[[], Any] = lambda: None
        self._before: dict[int, tuple[Any, Callable[[], None]]] = {}  # by id: an object, and what puts it back
        for _, value, name in leaks.edges([function]):
            if leaks.is_tracer(value):
                self.held = self.held or name
            elif id(value) not in self._before and (put_back := _remembered(value)):
                self._before[id(value)] = value, put_back

    def begin(self, argument: Tracer) -> None:
        """Notes the trace, of which the traced function passes an argument."""
        self._trace = weakref.ref(jax_private.trace_of(argument))

    def are_over(self, trees: Iterable[Any] = ()) -> bool:
        """Returns True if nothing holds a tracer of the trace: none of the trees, and nothing else in the process."""
        gc.collect(0)  # Nearly always the objects of the trace are young.
        if self._trace() is None:
            return True
        if leaks.find_tracer([*trees, self._function]):  # This is faster than what follows.
            return False
        if not self._tracers():  # Derivatives in JAX's caches may hold the trace itself.
            return True
        jax_private.end_traces(self._trace())
        gc.collect()
        return not self._tracers()

    def undo(self) -> None:
        """Puts back what leads to a tracer, and empties caches that hold one."""
        holders: dict[int, list[Any]] = {}
        reached: list[Any] = []
        for holder, value, _ in leaks.edges([self._function]):
            holders.setdefault(id(value), []).append(holder)
            if leaks.is_tracer(value):
                reached.append(value)
        done: set[int] = set()
        while reached:
            value = reached.pop()
            if value is None or id(value) in done:
                continue
            done.add(id(value))
            if id(value) in self._before:
                self._before[id(value)][1]()
            reached += holders.get(id(value), [])

    def check(self, cause: Exception | None = None) -> None:
        """Raises `UnsupportedError` if something still holds a tracer."""
        if not self.are_over():
            raise UnsupportedError(
                f"init: tracing it left a tracer in {self.find_holder()}, and calling it did not replace that, so a "
                f"later step would fail. {WITHOUT_TRACING}"
            ) from cause

    def find_holder(self, trees: Iterable[Any] = ()) -> str:
        """Returns a name for what holds a tracer: in one of the trees, within reach of the function, or elsewhere."""
        if name := leaks.find_tracer([*trees, self._function]):
            return name
        level = self._tracers()
        for _ in range(_MAX_STEPS):
            found = gc.get_referrers(*level)
            for space in found:
                for module in list(sys.modules.values()):
                    if space is getattr(module, "__dict__", None):
                        held = {id(one) for one in level}
                        name = next((name for name, one in list(space.items()) if id(one) in held), "?")
                        return f"the global {name} of the module {module.__name__}"
            level = [one for one in found if one is not level and not isinstance(one, types.FrameType)]
        return "an object that init does not name"

    def _tracers(self) -> list[Any]:
        if (trace := self._trace()) is None:
            return []
        return [one for one in gc.get_objects() if leaks.is_tracer(one) and jax_private.trace_of(one) is trace]


def _remembered(value: Any) -> Callable[[], None] | None:
    """Returns a function that puts an object back to its present contents, or None if they cannot change."""
    if isinstance(value, types.FunctionType):
        cells = [(cell, leaks.cell_contents(cell, _ABSENT)) for cell in value.__closure__ or ()]
        names = [(space, name, space.get(name, _ABSENT)) for space, name in leaks.named_globals(value)]
        return functools.partial(_put_back_variables, cells, names) if cells or names else None
    if isinstance(value, leaks.CACHED):
        return value.cache_clear
    if isinstance(value, type):
        own = {name: one for name, one in vars(value).items() if name not in _OWN_ATTRIBUTES}
        return functools.partial(_put_back_attributes, value, own) if leaks.is_of_program(value) else None
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            contents = list(kind.items(value) if issubclass(kind, dict) else kind.__iter__(value))
            return functools.partial(_put_back_contents, value, kind, contents)
    if names := [name for name in leaks.slots(value) if name not in _OWN_ATTRIBUTES]:
        held = [(name, _slot(value, name)) for name in names]
        return functools.partial(_put_back_slots, value, held)
    return None


def _slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except Exception:  # It has no value.
        return _ABSENT


def _put_back_variables(cells: list[tuple[types.CellType, Any]], names: list[tuple[dict[str, Any], str, Any]]) -> None:
    for cell, was in cells:
        if leaks.cell_contents(cell, _ABSENT) is not was:
            if was is _ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = was
    for space, name, was in names:
        if space.get(name, _ABSENT) is not was:
            if was is _ABSENT:
                del space[name]
            else:
                space[name] = was


def _put_back_attributes(owner: type, attributes: dict[str, Any]) -> None:
    for name in {**attributes, **vars(owner)}:
        was = attributes.get(name, _ABSENT)
        if vars(owner).get(name, _ABSENT) is was or name in _OWN_ATTRIBUTES:
            continue
        if was is _ABSENT:
            type.__delattr__(owner, name)
        else:
            type.__setattr__(owner, name, was)


def _put_back_contents(value: Any, kind: Any, contents: list[Any]) -> None:
    kind.clear(value)
    if kind in (list, collections.deque):
        kind.extend(value, contents)
    else:
        kind.update(value, contents)


def _put_back_slots(value: Any, held: list[tuple[str, Any]]) -> None:
    for name, was in held:
        if _slot(value, name) is not was:
            if was is _ABSENT:
                object.__delattr__(value, name)
            else:
                object.__setattr__(value, name, was)
