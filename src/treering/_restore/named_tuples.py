"""Compares the classes of named tuples, because a reordered optax chain shows only in the classes of its states.

A class of the user that was only renamed is not a difference. Treering takes a class for renamed if both classes have
the same fields and neither name is in use on the other side.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

from .._core.leaf_paths import join_names
from .._core.skeleton import Node, Skeleton, containers
from ..errors import Difference

_log = logging.getLogger("treering")
_OPTIMIZER_FIELDS = frozenset(("mu", "nu", "trace", "gradient_step", "inner_state", "inner_states"))  # fields


class _Difference(NamedTuple):
    path: str
    template: Node
    found: Node


def class_differences(template: Skeleton, found: Skeleton) -> list[Difference]:
    """Returns the named tuples of another class, except those that were only renamed."""
    hint = (
        "was the order of an optimizer chain changed? If not, restore with the class {!r} in the template, "
        "and make the other of its fields"
    )
    others, renamed = _find_differences(template, found)
    rest = (one for one in others if one not in renamed)
    return [Difference(one.path, one.template.name, one.found.name, hint.format(one.found.name)) for one in rest]


def warn_of_renamed(template: Skeleton, found: Skeleton, name: str) -> None:
    """Logs the named tuples that are restored into a class of another name, because the fields are the same."""
    if renamed := _find_differences(template, found)[1]:
        pairs = tuple(dict.fromkeys(f"{one.found.name} is now {one.template.name}" for one in renamed))
        _log.warning(
            "%s: named tuples have the same fields and another class name, so Treering takes them for renamed: %s",
            name,
            join_names(pairs),
        )


def _find_differences(template: Skeleton, found: Skeleton) -> tuple[list[_Difference], list[_Difference]]:
    """Returns the named tuples of another class, and those of them that were only renamed."""
    ours = _nodes(template)
    if not ours:
        return [], []
    theirs = _nodes(found)
    pairs = [(path, node, theirs[path]) for path, node in ours.items() if path in theirs]
    others = [_Difference(*pair) for pair in pairs if pair[1].name != pair[2].name]
    names, known = {node.name for node in ours.values()}, {node.name for node in theirs.values()}
    new = [one for one in others if one.template.name not in known and one.found.name not in names]
    return others, [one for one in new if _is_renamed(one)]


def _is_renamed(other: _Difference) -> bool:
    """Returns True if both classes have the same fields and neither is known as the state of an optimizer."""
    same = other.template.keys == other.found.keys and bool(other.found.names())
    return same and not is_of_optimizer(other.template) and not _is_of_optax(other.found.name)


def is_of_optimizer(node: Node) -> bool:
    """Returns True if a named tuple is the state of an optimizer."""
    return not _OPTIMIZER_FIELDS.isdisjoint(node.names()) or _is_of_optax(node.name)


def _is_of_optax(name: str) -> bool:
    modules = list(sys.modules.items())
    return any(key.partition(".")[0] == "optax" and name in vars(module) for key, module in modules if module)


def _nodes(skeleton: Skeleton) -> Mapping[str, Node]:
    # Every restore of many leaves runs this. Comparing classes is faster than one call of `isinstance` for each leaf.
    kinds = {cast("Node", node).kind for node in skeleton if node.__class__ is Node}
    return dict(_each(skeleton)) if "namedtuple" in kinds else {}


def _each(skeleton: Skeleton) -> Iterator[tuple[str, Node]]:
    for _, path, node in containers(skeleton):
        if isinstance(node, Node) and node.kind == "namedtuple":
            yield path, node
