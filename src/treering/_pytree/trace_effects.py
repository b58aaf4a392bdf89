"""Notices what tracing a function leaves behind in the program, and puts it back as it was before.

An object that sets itself up once, such as a scaler with an array that its first `init` computes, would otherwise keep
tracers for the rest of the job.

To find tracers that outlive their trace, it walks the objects that a program can reach from a function or a tree, and
runs no user code. It follows Python's own containers, attributes, classes, closures, defaults, partial arguments and
caches. Of the globals of a function, and of the modules that it uses, it follows those that the function names. It does
not look into arrays, nor into the code of libraries such as JAX, Flax and Python's own.
"""

import collections
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..errors import UnsupportedError
from . import jax_private

_MAX_OBJECTS = 50_000  # The walk ends there. Structures that large hold data.
_JITTED = type(jax.jit(lambda: None))
CACHED = type(functools.cache(lambda: None))
_CACHE_PARTS = ("_lru_list_elem",)
_BUILTIN = (dict, list, tuple, set, frozenset)
_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, np.dtype, types.ModuleType),
    *(types.CodeType, types.BuiltinFunctionType, jax.Array, jax.ShapeDtypeStruct),
)
_LIBRARIES = frozenset(  # that keep no arrays in globals or classes
    ("equinox", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax", "orbax", "treering", *sys.stdlib_module_names)
)
_ABSENT = object()
_CONTAINERS: tuple[Any, ...] = (collections.OrderedDict, dict, list, set, collections.deque)
WITHOUT_TRACING = (
    "Replace restore_or_init, which traces init, by `state, step = (ckpts.restore(like=init()), ckpts.restored_step) "
    "if ckpts.steps else (init(), 0)`"
)
_MAX_STEPS = 6  # from a tracer to the global that holds it
_OWN_ATTRIBUTES = ("__dict__", "__weakref__")  # of a class, which cannot be set


def edges(roots: Iterable[Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yields what objects hold, the nearest first: the holder (None for a root), the object, and a name of its place.

    An object of which nothing more can be learned, such as a number, is left out. A tracer is not.
    """
    queue = collections.deque((None, root, "") for root in roots)
    seen: set[int] = set()
    keep: list[Any] = []  # keeps objects alive, so that no id in `seen` is used again
    while queue and len(seen) < _MAX_OBJECTS:
        holder, value, name = queue.popleft()
        yield holder, value, name or "the tree"
        if id(value) not in seen and not is_tracer(value):
            seen.add(id(value))
            keep.append(value)
            queue += [(value, one, inner) for one, inner in _inside(value, name) if not _is_atom(type(one))]


def find_tracer(roots: Iterable[Any]) -> str:
    """Returns a description of what holds a tracer, or "" if no tracer can be reached from `roots`."""
    return next((name for _, value, name in edges(roots) if is_tracer(value)), "")


def is_tracer(value: Any) -> bool:
    """Returns True for a tracer."""
    return _is_tracer(type(value))


@functools.lru_cache(maxsize=1024)
def _is_tracer(kind: type) -> bool:
    return issubclass(kind, Tracer)


@functools.lru_cache(maxsize=1024)
def _is_atom(kind: type) -> bool:
    return issubclass(kind, _ATOMS) and not issubclass(kind, Tracer)


def _inside(value: Any, name: str) -> Iterable[tuple[Any, str]]:
    if isinstance(value, types.FunctionType):
        yield from _in_function(value)
    elif isinstance(value, CACHED):
        yield value.__wrapped__, name
        yield from ((one, f"the cache of {value.__wrapped__.__qualname__}") for one in _cached(value))
    elif isinstance(value, type):
        if is_of_program(value):
            yield from ((one, name) for one in value.__bases__)
            yield from ((one, f"{value.__qualname__}.{attribute}") for attribute, one in list(vars(value).items()))
    elif isinstance(value, types.MethodType):
        yield from ((one, name) for one in (value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        yield from ((one, name) for one in (value.func, value.args, value.keywords))
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__, name
    elif isinstance(value, property):
        yield from ((one, name) for one in (value.fget, value.fset) if one)
    else:
        if isinstance(value, (*_BUILTIN, collections.deque)):
            try:
                if len(value) <= _MAX_OBJECTS:
                    yield from ((one, name) for one in list(value.values() if isinstance(value, dict) else value))
            except Exception:  # A subclass may do anything, and another thread may change the container.
                return
        if type(value) not in _BUILTIN:
            yield from _in_object(value, name)


def _in_object(value: Any, name: str) -> Iterable[tuple[Any, str]]:
    if isinstance(value, _JITTED):
        yield attribute(value, "__wrapped__"), name
    if isinstance(own := attribute(value, "__dict__"), dict):
        yield own, name  # as an object of its own, whose contents change with the attributes
        yield from ((one, f"{type(value).__name__}.{key}") for key, one in list(own.items()))
    for key in slots(value):
        if (one := attribute(value, key)) is not None:
            yield one, name
    yield type(value), name


def slots(value: Any) -> Iterator[str]:
    """Yields the names of the slots of an object."""
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


def attribute(value: Any, name: str) -> Any:
    """Returns an attribute, or None if it is missing or computing it fails."""
    base = threading.local if isinstance(value, threading.local) else object
    try:
        return base.__getattribute__(value, name)
    except Exception:
        return None


def is_of_program(value: Any) -> bool:
    """Returns True for a class or a function that is not part of the libraries that the walk leaves out."""
    return str(attribute(value, "__module__")).partition(".")[0] not in _LIBRARIES


def _cached(function: Any) -> Iterable[Any]:
    """Yields the objects in the cache of a function decorated by `functools.cache` or `lru_cache`.

    The cache has no public name, so the garbage collector is asked what the function refers to.
    """
    stack, seen = gc.get_referents(function), 0
    while stack and seen < _MAX_OBJECTS:
        seen += 1
        one = stack.pop()
        if type(one).__name__ in _CACHE_PARTS or type(one) in _BUILTIN:
            stack += gc.get_referents(one)
        else:
            yield one


def _in_function(function: types.FunctionType) -> Iterable[tuple[Any, str]]:
    name = f"the function {function.__qualname__}"
    for cell in function.__closure__ or ():
        yield cell_contents(cell, None), name
    for one in (function.__defaults__, function.__kwdefaults__, function.__dict__):
        yield one, name
    for space, used in named_globals(function):
        yield space.get(used), f"the global {used} of {name}"


def cell_contents(cell: types.CellType, default: Any) -> Any:
    """Returns the value of a variable in a closure, or the default if the variable has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def named_globals(function: types.FunctionType) -> list[tuple[dict[str, Any], str]]:
    """Returns the globals that a function names: the namespace of each, of its own or another module, and its name."""
    if not is_of_program(function):
        return []
    names = dict.fromkeys(_names(function.__code__))
    spaces = [function.__globals__]
    for space in spaces:  # grows within the loop
        for name in names:
            module = space[name] if name in space else sys.modules.get(name)
            if isinstance(module, types.ModuleType) and module.__name__.partition(".")[0] not in _LIBRARIES:
                spaces += [vars(module)] if all(vars(module) is not one for one in spaces) else []
    return [(space, name) for space in spaces for name in names]


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


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
        for _, value, name in edges([function]):
            if is_tracer(value):
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
        if find_tracer([*trees, self._function]):  # This is faster than what follows.
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
        for holder, value, _ in edges([self._function]):
            holders.setdefault(id(value), []).append(holder)
            if is_tracer(value):
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
        if name := find_tracer([*trees, self._function]):
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
        return [one for one in gc.get_objects() if is_tracer(one) and jax_private.trace_of(one) is trace]


def _remembered(value: Any) -> Callable[[], None] | None:
    """Returns a function that puts an object back to its present contents, or None if they cannot change."""
    if isinstance(value, types.FunctionType):
        cells = [(cell, cell_contents(cell, _ABSENT)) for cell in value.__closure__ or ()]
        names = [(space, name, space.get(name, _ABSENT)) for space, name in named_globals(value)]
        return functools.partial(_put_back_variables, cells, names) if cells or names else None
    if isinstance(value, CACHED):
        return value.cache_clear
    if isinstance(value, type):
        own = {name: one for name, one in vars(value).items() if name not in _OWN_ATTRIBUTES}
        return functools.partial(_put_back_attributes, value, own) if is_of_program(value) else None
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            contents = list(kind.items(value) if issubclass(kind, dict) else kind.__iter__(value))
            return functools.partial(_put_back_contents, value, kind, contents)
    if names := [name for name in slots(value) if name not in _OWN_ATTRIBUTES]:
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
        if cell_contents(cell, _ABSENT) is not was:
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
