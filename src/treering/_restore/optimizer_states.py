"""Finds the states of optimizers within a tree: named tuples such as optax's ``ScaleByAdamState``.

In another chain the same state has another path. A leaf of another class, or of another field, means something else,
even if its shape is the same.
"""

import collections
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

from .._core.leaf_paths import parent_paths, relative_to
from .._core.skeleton import Node, Skeleton, containers

_COUNTS = frozenset(("count", "gradient_step"))  # fields that count updates, equal in all states of one optimizer


class State(NamedTuple):
    """The innermost state that a leaf is in.

    kind: the class of the state, or the names in it if classes are not known.
    place: the path of the state.
    rest: the path of the leaf within the state.
    """

    kind: Hashable
    place: str
    rest: str

    @property
    def field(self) -> str:
        """The name of the state's field that contains the leaf."""
        return self.rest.partition("/")[0]

    @property
    def is_count(self) -> bool:
        """True if the leaf counts updates."""
        return self.field in _COUNTS


class States:
    """The states of a template and of a checkpoint, by the paths of their leaves.

    The kind of a state is its class. If one side does not record classes, it is the set of the names in the state.
    """

    def __init__(self, template: Iterable[str], like: Skeleton, found: Iterable[str], skeleton: Skeleton | None):
        template, found = list(template), list(found)
        self.names = _names(template)
        kinds, others = _classes(like), _classes(skeleton or ())
        self.have_classes = bool(kinds) and any(
            isinstance(node, Node) and node.kind == "namedtuple" for node in skeleton or ()
        )
        if self.have_classes:
            self.template, self.found = _states(template, kinds), _states(found, others)
            return
        ours = {place: names for place, names in self.names.items() if place in kinds or _is_state(names)}
        known = set(ours.values())
        theirs = {place: names for place, names in _names(found).items() if names in known or _is_state(names)}
        self.template, self.found = _states(template, ours), _states(found, theirs)

    def may_become(self, found: str, wanted: str) -> bool:
        """Returns False if their states show that the leaves of the two sides differ in meaning."""
        theirs, ours = self.found.get(found), self.template.get(wanted)
        if theirs and ours:
            alike = theirs.kind == ours.kind
            if found == wanted and not self.have_classes:
                alike = alike or bool(self._names(theirs).intersection(self._names(ours)).difference(_COUNTS))
            return alike and theirs.field == ours.field
        if not theirs and not ours:
            return True
        if ours:
            return not self.found and (ours.field in found.split("/") or ours.rest == found)
        return not self.template and theirs is not None and theirs.field in wanted.split("/")

    @staticmethod
    def _names(state: State) -> frozenset[str]:
        return state.kind if isinstance(state.kind, frozenset) else frozenset()


def paths_by_state(states: Mapping[str, State]) -> dict[tuple[Hashable, str], dict[str, str]]:
    """Returns the leaves of each state: for its kind and path, the leaves' paths by their paths within the state."""
    groups: dict[tuple[Hashable, str], dict[str, str]] = {}
    for path, state in states.items():
        groups.setdefault((state.kind, state.place), {})[state.rest] = path
    return groups


def _is_state(names: frozenset[str]) -> bool:
    """Returns True if a container without a class has the names of a state; NNX and state dicts keep only these."""
    return not names.isdisjoint(_COUNTS) or "trace" in names


def _classes(skeleton: Skeleton) -> dict[str, str]:
    """Returns the classes of states, by path.

    Parameters may be named tuples too. By convention only the classes of states have names that end in State.
    """
    return {
        path: node.name
        for _, path, node in containers(skeleton)
        if isinstance(node, Node) and node.kind == "namedtuple" and node.name.endswith("State")
    }


def _names(paths: Collection[str]) -> dict[str, frozenset[str]]:
    """Returns the names in each container, by its path."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for path in paths:
        for place in ("", *parent_paths(path)):
            found[place].add((relative_to(path, place) or "").partition("/")[0])
    return {place: frozenset(names) for place, names in found.items()}


def _states(paths: Collection[str], kinds: Mapping[str, Hashable]) -> dict[str, State]:
    found: dict[str, State] = {}
    for path in paths if kinds else ():
        for place in (*reversed(parent_paths(path)), ""):
            if place in kinds:
                found[path] = State(kinds[place], place, relative_to(path, place) or "")
                break
    return found
