"""Named tuples of another class at the same path: renamed, or another state of an optimizer.

A reordered optax chain shows in nothing but the classes of its states, so these are compared. A user's class that
was renamed has the same fields, and neither name is in use on the other side.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

from .._core.leaf_paths import few
from .._core.skeleton import Node, Skeleton, containers
from ..errors import Difference

_log = logging.getLogger("treering")
_OF_OPTIMIZERS = frozenset(("mu", "nu", "trace", "gradient_step", "inner_state", "inner_states"))  # fields


class _Other(NamedTuple):
    path: str
    template: Node
    found: Node


def differences(template: Skeleton, found: Skeleton) -> list[Difference]:
    """Returns the named tuples of another class, except those that were only renamed."""
    hint = (
        "was the order of an optimizer chain changed? If not, restore with the class {!r} in the template, "
        "and make the other of its fields"
    )
    others, renamed = _others(template, found)
    rest = (one for one in others if one not in renamed)
    return [Difference(one.path, one.template.name, one.found.name, hint.format(one.found.name)) for one in rest]


def warn_of_renamed(template: Skeleton, found: Skeleton, name: str) -> None:
    """Logs the classes of named tuples that are taken for those of the template, because they have the same fields."""
    if renamed := _others(template, found)[1]:
        pairs = tuple(dict.fromkeys(f"{one.found.name} is now {one.template.name}" for one in renamed))
        _log.warning(
            "%s: classes of named tuples have other names and the same fields, so they are taken for renamed ones: %s",
            name,
            few(pairs),
        )


def _others(template: Skeleton, found: Skeleton) -> tuple[list[_Other], list[_Other]]:
    """The named tuples of another class, and those of them that were renamed."""
    ours = _nodes(template)
    if not ours:
        return [], []
    theirs = _nodes(found)
    pairs = [(path, node, theirs[path]) for path, node in ours.items() if path in theirs]
    others = [_Other(*pair) for pair in pairs if pair[1].name != pair[2].name]
    names, known = {node.name for node in ours.values()}, {node.name for node in theirs.values()}
    new = [one for one in others if one.template.name not in known and one.found.name not in names]
    return others, [one for one in new if _is_renamed(one)]


def _is_renamed(other: _Other) -> bool:
    """Returns True for the same fields of classes that are no states of optimizers, as far as one can tell."""
    same = other.template.keys == other.found.keys and bool(other.found.names())
    of_optimizer = not _OF_OPTIMIZERS.isdisjoint(other.template.names())
    return same and not of_optimizer and not any(_is_of_optax(node.name) for node in other[1:])


def _is_of_optax(name: str) -> bool:
    modules = list(sys.modules.items())
    return any(key.partition(".")[0] == "optax" and name in vars(module) for key, module in modules if module)


def _nodes(skeleton: Skeleton) -> Mapping[str, Node]:
    # A restore of many leaves comes through here, and `isinstance` would be one call for each of them.
    kinds = {cast("Node", node).kind for node in skeleton if node.__class__ is Node}
    return dict(_each(skeleton)) if "namedtuple" in kinds else {}


def _each(skeleton: Skeleton) -> Iterator[tuple[str, Node]]:
    for _, path, node in containers(skeleton):
        if isinstance(node, Node) and node.kind == "namedtuple":
            yield path, node
