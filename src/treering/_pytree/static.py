"""Collects static values: what containers hold in addition to their leaves, such as the fields JAX calls metadata.

They are part of the program and are never restored. A checkpoint records those that are JSON, so that a resumed job can
name the values that its program makes differently.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from .._core.leaf_paths import join, key_text
from .._core.values import MAX_EXACT_INT

Static = Mapping[str, Mapping[str, Any]]  # by the path of the container, and by name

_MAX_TEXT_CHARACTERS = 1_000  # characters of a value


def node_fields(value: Any, children: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a dataclass that are JSON and not among its children, by name.

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
    """Returns a value as JSON, with tuples as lists, or `...` if it is not JSON."""
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
    return ...


def graph_fields(objects: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the static attributes of NNX graph objects that are JSON. `objects` has them by their paths."""
    from flax import nnx

    found: dict[str, dict[str, Any]] = {}
    for at, node in objects.items():
        for path, value in nnx.iter_graph(node):
            if not path or str(path[-1]).startswith("_pytree__"):
                continue
            if (one := to_json(value)) is not ...:
                place = at
                for key in path[:-1]:
                    place = join(place, key_text(key), root=not place)
                found.setdefault(place, {})[str(path[-1])] = one
    return found


def static_differences(saved: Static, own: Static) -> list[str]:
    """Returns a text for each static value that a checkpoint records and the program makes differently."""
    found: list[str] = []
    for place in saved.keys() & own.keys():
        for name in saved[place].keys() & own[place].keys():
            was, now = saved[place][name], own[place][name]
            if was != now or type(was) is not type(now):
                path = f"{place}/{name}" if place else name
                found.append(f"{path} (saved {was!r:.60}, now {now!r:.60})")
    return sorted(found)
