"""Collects static values: what containers hold in addition to their leaves, such as the fields JAX calls metadata.

They are part of the program and are never restored. A checkpoint records those that say what the leaves mean (numbers,
texts, dtypes, members of enumerations, and lists and configurations of them), so that a resumed job can name the values
that its program makes differently. Functions and other objects have no value that could be compared.
"""

import contextlib
import dataclasses
import enum
import math
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.leaf_paths import join, key_text
from .._core.values import MAX_EXACT_INT

Static = Mapping[str, Mapping[str, Any]]  # by the path of the container, and by name

_MAX_TEXT_CHARACTERS = 1_000  # characters of a value
_MAX_FIELDS = 100  # of a dict or an object
_NUMBER_TYPES = (bool, int, float, complex)  # JAX takes them as dtypes.
_JAX_SCALAR_META = type(jnp.float32)  # the class of the scalar types of JAX


def node_fields(value: Any, children: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a dataclass that can be recorded and are not among its children, by name.

    children: the names of its children. If one of them is not a field, the dataclass has its own way of flattening, and
        nothing is known about its fields. Then the result is empty.
    """
    if not dataclasses.is_dataclass(type(value)):
        return {}
    fields = [field.name for field in dataclasses.fields(value)]
    if not set(children) <= set(fields):
        return {}
    names = [name for name in fields if name not in children]
    found = {name: to_json(getattr(value, name, ...)) for name in names}
    return {name: one for name, one in found.items() if one is not ...}


def to_json(value: Any, depth: int = 4) -> Any:
    """Returns a value as JSON, or `...` if it cannot be recorded.

    Tuples are lists. An object has one key, which says what it stands for: "dtype", "type" (a class of numbers),
    "enum", or "fields" (those of a dict or a frozen dataclass that can be recorded).
    """
    value = value.item() if isinstance(value, np.generic) else value
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if abs(value) <= MAX_EXACT_INT else ...
    if kind is float:
        return value if math.isfinite(value) else ...
    if kind is str:
        return value if len(value) <= _MAX_TEXT_CHARACTERS and value.isprintable() else ...
    if kind in (list, tuple) and depth:
        items = [to_json(item, depth - 1) for item in value]
        return items if ... not in items and len(items) <= _MAX_TEXT_CHARACTERS else ...
    if isinstance(value, enum.Enum):
        return {"enum": f"{kind.__name__}.{value.name}"}
    if (name := _dtype_name(value)) is not None:
        return {"dtype": name}
    if isinstance(value, type):
        return {"type": value.__name__} if value in _NUMBER_TYPES else ...
    found = _fields(value) if depth else {}
    if len(found) > _MAX_FIELDS:
        return ...
    fields = {name: one for name in found if (one := to_json(found[name], depth - 1)) is not ...}
    return {"fields": fields} if fields else ...


def _dtype_name(value: Any) -> str | None:
    """Returns the name of a dtype, also of a scalar type such as `jnp.bfloat16`; None for another value."""
    if isinstance(value, np.dtype):
        return value.name
    with contextlib.suppress(Exception):  # A user's object may raise anything when it is tried as a dtype.
        if isinstance(value, type):
            is_scalar = issubclass(value, np.generic) or isinstance(value, _JAX_SCALAR_META)
            return np.dtype(value).name if is_scalar else None
        if not hasattr(value, "shape"):
            return str(value) if jax.numpy.issubdtype(value, jax.dtypes.extended) else None
    return None


def _fields(value: Any) -> Mapping[str, Any]:
    """Returns what a configuration says, by name: a dict, a named tuple or a frozen dataclass without leaves."""
    if isinstance(value, dict | MappingProxyType):
        return {name: one for name, one in value.items() if isinstance(name, str)}
    if isinstance(value, tuple):
        return getattr(value, "_asdict", dict)()  # a named tuple
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or not jax.tree_util.all_leaves([value]):
        return {}
    return {field.name: getattr(value, field.name, ...) for field in dataclasses.fields(value)}


def graph_fields(objects: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the static attributes of NNX graph objects that can be recorded. `objects` has them by their paths."""
    found: dict[str, dict[str, Any]] = {}
    for place, name, value in graph_values(objects):
        if (one := to_json(value)) is not ...:
            found.setdefault(place, {})[name] = one
    return found


def graph_values(objects: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields what NNX graph objects hold: the path of the container, the name, and the value."""
    from flax import nnx

    for at, node in objects.items():
        for path, value in nnx.iter_graph(node):
            if path and not str(path[-1]).startswith("_pytree__"):
                place = at
                for key in path[:-1]:
                    place = join(place, key_text(key), root=not place)
                yield place, str(path[-1]), value


def static_differences(saved: Static, own: Static) -> list[str]:
    """Returns a text for each static value that a checkpoint records and the program makes differently."""
    found: list[str] = []
    for place in saved.keys() & own.keys():
        found += _differences(place, {"fields": saved[place]}, {"fields": own[place]})
    return sorted(found)


def _differences(path: str, was: Any, now: Any) -> Iterator[str]:
    """Yields a text for each part of two recorded values that differs. Fields that one of them lacks are not known."""
    if (old := _part(was, "fields")) and (new := _part(now, "fields")):
        for name in old.keys() & new.keys():
            yield from _differences(f"{path}/{name}" if path else name, old[name], new[name])
    elif not _is_same(was, now):
        yield f"{path} (saved {_text(was):.60}, now {_text(now):.60})"


def _is_same(was: Any, now: Any) -> bool:
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(_is_same, was, now))
    names = [_part(one, "dtype") for one in (was, now)]
    if names != [None, None]:  # A text that names a dtype means the same as that dtype.
        return (names[0] or was) == (names[1] or now)
    return bool(was == now) and type(was) is type(now)


def _part(value: Any, key: str) -> Any:
    """Returns what a recorded value is, if it is of this kind; otherwise None. A file may contain anything."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict if key == "fields" else str) else None


def _text(value: Any) -> str:
    if isinstance(value, dict) and len(value) == 1:
        ((kind, one),) = value.items()
        return f"{kind} {one}"
    return repr(value)
