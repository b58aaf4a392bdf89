"""Finds tracers that outlive their trace: in a function that closes over one, or in a static value of a container."""

import collections
import functools
import gc
import types
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_MAX_OBJECTS = 200_000  # The search ends there and reports no tracer. Structures that large hold data.
_JITTED = type(jax.jit(lambda: None))
_CACHED = type(functools.cache(lambda: None))
_CACHE_PARTS = ("_lru_list_elem",)
_TRACER = object()  # stands for the tracers of a cache that was cleared
_BUILTIN = (dict, list, tuple, set, frozenset)
_SKIPPED = frozenset((bool, int, float, complex, str, bytes, type(None), np.ndarray, jax.ShapeDtypeStruct))
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, np.ndarray, np.generic, np.dtype, types.ModuleType)


def find_tracer(roots: Iterable[Any]) -> str:
    """Returns a description of what holds a tracer, or "" if no tracer can be reached from `roots`.

    The search follows Python's own containers, attributes, closures, defaults and partial arguments, and runs no user
    code. Of the globals of a function it follows those that the function names: containers, functions of the same
    module and, in the module of a root, instances. It does not look into modules and classes. A `functools.cache` that
    holds a tracer is cleared.
    """
    stack: list[tuple[Any, str]] = [(root, "") for root in roots]
    homes = {id(getattr(getattr(root, "__func__", root), "__globals__", None)) for root, _ in stack}
    found = ""
    seen: set[int] = set()
    keep: list[Any] = []  # keeps objects alive, so that no id in `seen` is used again
    while stack and len(seen) + len(stack) < _MAX_OBJECTS:
        value, holder = stack.pop()
        if isinstance(value, Tracer) or value is _TRACER:
            found = found or holder or "the tree"  # The search continues, because it has to clear every cache.
            continue
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        stack.extend(_inside(value, holder, homes))
    return found


def _inside(value: Any, holder: str, homes: set[int]) -> Iterable[tuple[Any, str]]:
    if isinstance(value, types.FunctionType):
        yield from _of_function(value, homes)
        return
    if isinstance(value, _CACHED):
        if any(isinstance(one, Tracer) for one in _cached(value)):
            value.cache_clear()  # Otherwise `init` would get these tracers when it is called.
            yield _TRACER, f"the cache of {value.__wrapped__.__qualname__}"
        yield value.__wrapped__, holder
        return
    if isinstance(value, jax.ShapeDtypeStruct | jax.Array):
        return
    if isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
        try:
            items = list(value.values() if isinstance(value, dict) else value)
        except Exception:  # A subclass may do anything, and another thread may change the container.
            items = []
        yield from ((one, holder) for one in items if type(one) not in _SKIPPED)
        if type(value) in _BUILTIN:
            return
    elif isinstance(value, types.MethodType):
        yield from ((one, holder) for one in (value.__func__, value.__self__))
    elif isinstance(value, types.CellType):
        try:
            yield value.cell_contents, holder
        except ValueError:  # The cell is empty.
            pass
    elif isinstance(value, functools.partial):
        yield from ((one, holder) for one in (value.func, value.args, value.keywords))
    elif isinstance(value, _JITTED):
        yield _attribute(value, "__wrapped__"), holder
    if isinstance(own := _attribute(value, "__dict__"), dict):
        yield from ((one, holder or f"{type(value).__name__}.{name}") for name, one in list(own.items()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if (one := _attribute(value, name)) is not None:
                yield one, holder


def _attribute(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except Exception:  # The attribute is missing, or computing it fails.
        return None


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


def _of_function(function: types.FunctionType, homes: set[int]) -> Iterable[tuple[Any, str]]:
    name = f"the function {function.__qualname__}"
    for one in (function.__closure__ or (), function.__defaults__ or (), function.__kwdefaults__ or {}):
        yield one, name
    if function.__dict__:
        yield function.__dict__, name
    space = function.__globals__
    for used in _names(function.__code__):
        one = space.get(used)
        own = isinstance(one, types.FunctionType) and one.__globals__ is space
        instance = id(space) in homes and not isinstance(one, types.FunctionType | types.BuiltinFunctionType)
        if own or instance or isinstance(one, Tracer | list | tuple | dict | _CACHED):
            yield one, f"the global {used} of {name}"


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
