"""Gives the parts of a template that grow during training the size that they have in the checkpoint.

`init` may begin with an empty list of losses or an empty replay buffer. The argument `grow` of a restore names such
parts: lists, tuples, dicts, arrays, None, and entries that a dict only has later. Everything else about a leaf that the
template has stays as it is there.
"""

import collections
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core import dtypes
from .._core.describe import ABSENT, NOTHING
from .._core.entries import ArrayEntry, Entry, ValueEntry, is_absent
from .._core.leaf_paths import (
    find_globs,
    join,
    join_names,
    key_text,
    parent_paths,
    relative_to,
)
from .._core.skeleton import LEAF, Node, Skeleton, assemble, containers, infer_container, positions, subtree
from .._pytree import flax, walk
from .._pytree.leaves import is_function
from ..errors import Difference, UnsupportedError
from . import named_tuples
from .read_groups import as_key
from .suggestion import Suggestion

_KINDS = (list, tuple, dict, collections.OrderedDict, collections.defaultdict)
_NAMES = ("", "OrderedDict", "defaultdict")  # of their nodes
_MAKE: Mapping[str, Any] = {"list": list, "tuple": tuple, "dict": dict}


class Grown(NamedTuple):
    """A template whose parts have grown.

    join: makes the tree of the user from a restored tree of this structure.
    problems: what cannot grow.
    """

    template: Any
    join: Callable[[Any], Any]
    flat_tree: walk.FlatTree
    problems: Sequence[Difference] = ()


def grow(
    split: flax.SplitTree,
    flat_tree: walk.FlatTree,
    entries: Mapping[str, Entry],
    skeleton: Skeleton | None,
    at: str,
    globs: Sequence[str],
) -> Grown:
    """Returns the template with the parts that match `globs` grown to their size in a checkpoint.

    entries, skeleton: the checkpoint, with the paths of the template.
    at: the path of the template in the checkpoint, for hints.
    """
    growth = _Growth(entries, skeleton, flat_tree, at, globs)
    try:
        template = growth.visit(split.tree, "", False)
    except RecursionError:
        raise UnsupportedError("grow: this tree is nested deeper than Python can follow") from None
    if template is split.tree:
        return Grown(template, split.join, flat_tree, growth.problems)
    new = walk.flatten_tree(template)._replace(static=flat_tree.static)
    joined = split.join if split.outer is None else functools.partial(_join, split.join, growth.before)
    return Grown(template, joined, new, growth.problems)


def _join(join: Callable[[Any], Any], before: Mapping[str, Any], restored: Any) -> Any:
    """Returns the user's tree of a restored one. `join` knows only the structure with the parts `before`."""
    shrunk, parts = walk.replace_parts(restored, before)
    return walk.replace_parts(join(shrunk), parts)[0]


class _Growth:
    """Walks through a template together with a checkpoint.

    before: the containers that have another structure now, as they were, by path.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        skeleton: Skeleton | None,
        flat_tree: walk.FlatTree,
        at: str,
        globs: Sequence[str],
    ):
        self._at = at
        self._skeleton = assemble(entries, infer_container)[1] if skeleton is None else skeleton
        self._places = positions(self._skeleton)
        self._nodes = {path: self._skeleton[position] for path, position in self._places.items()}
        self._filled = _with_parents(path for path, entry in entries.items() if not is_absent(entry))
        self._entries = entries
        self._globs = find_globs(globs, {*self._nodes, *(path for _, path, _ in containers(flat_tree.skeleton))})
        self.before: dict[str, Any] = {}
        self.problems: list[Difference] = []

    def visit(self, value: Any, path: str, inside: bool) -> Any:
        """Returns a part of the template, grown. `inside`: a glob matches a part around it."""
        inside = inside or self._globs.match(path)
        if not (inside or self._globs.may_match_below(path)):
            return value
        known = len(self.before)
        level = walk.level_of(value)
        if level is None:
            return self._leaf(value, path) if inside else value
        paths = [join(path, name, root=not path) if level.node else path for name in level.names]
        children = [self.visit(child, at, inside) for child, at in zip(level.children, paths, strict=True)]
        changed = any(one is not child for one, child in zip(children, level.children, strict=True))
        new = level.make(children) if changed else value
        node = self._nodes.get(path)
        if type(value) in _KINDS and isinstance(node, Node) and level.node and _alike(level.node, node):
            unchanged, new = new, self._container(new, path, node, inside)
            if new is not unchanged:
                while len(self.before) > known:  # The rest is of parts inside this one.
                    self.before.popitem()
                self.before[path] = value
        return new

    def _container(self, value: Any, path: str, node: Node, inside: bool) -> Any:
        """Returns a container with the children that the checkpoint has, of which it has some already.

        `inside`: a glob matches the container, or a part around it. Otherwise globs may match single entries of a dict.
        """
        is_dict = isinstance(value, dict)
        keys = node.children() if inside or is_dict else ()
        paths = {key: join(path, key_text(key), root=not path) for key in keys}
        missing = [key for key in keys if key not in (value if is_dict else range(len(value)))]
        missing = [key for key in missing if inside or self._globs.match(paths[key])]
        if not missing and (is_dict or not inside or len(value) <= node.count()):
            return value
        count = len(self.problems)
        last = None if is_dict or not value else value[-1]
        made = {key: self._entry(paths[key], last) for key in missing}
        if len(self.problems) > count:
            return value
        if not is_dict:
            return type(value)([*value[: node.count()], *made.values()])
        new = copy.copy(value)
        new.update(made)
        return new

    def _entry(self, path: str, last: Any) -> Any:
        """Returns a new entry of a container, like the last one before it, or else as it was saved."""
        as_last = walk.level_of(last) and walk.flatten_tree(last).skeleton == subtree(
            self._skeleton, path, self._places
        )
        return self.visit(last, path, True) if as_last else self._build(path)

    def _leaf(self, value: Any, path: str) -> Any:
        if value is None:
            return self._made(path)
        entry, dtype = self._entries.get(path), getattr(value, "dtype", None)
        if not isinstance(entry, ArrayEntry) or dtype is None or is_function(value):
            return value
        key = not isinstance(dtype, np.dtype)
        shape = entry.shape[:-1] if key else entry.shape
        return value if shape == tuple(value.shape) or key != (entry.type == "key") else _reshaped(value, shape)

    def _made(self, path: str) -> Any:
        """Returns what the checkpoint has where the template has None."""
        if path not in self._filled:
            return None
        count = len(self.problems)
        new = self._build(path)
        if len(self.problems) > count:
            return None
        self.before[path] = None
        return new

    def _build(self, path: str) -> Any:
        """Returns the shapes of a part of the checkpoint that the template lacks."""
        node, entry = self._nodes.get(path, LEAF), self._entries.get(path)
        if not isinstance(node, Node):
            if entry is None or entry.type == "iterator":
                self._refuse(path, "the state of an iterator" if entry else NOTHING)
                return None
            return _saved_leaf(entry)
        if node.kind not in _MAKE or node.name:
            self._refuse(path, f"a {node.name or node.kind}")
            return None
        children = {key: self._build(join(path, key_text(key), root=not path)) for key in node.children()}
        return _MAKE[node.kind](children if node.kind == "dict" else children.values())

    def _refuse(self, path: str, found: str) -> None:
        self.problems.append(Difference(path, "a list, tuple, dict, array or number", found, _alone(path, self._at)))


def _alone(path: str, at: str) -> str:
    return f"grow= cannot make it; at={f'{at}/{path}'.strip('/')!r} restores it alone, in dicts"


def _alike(own: Node, saved: Node) -> bool:
    """Returns True for containers of one class. An empty dict of another class than `dict` has another kind of node."""
    return own.name == saved.name and (own.kind == saved.kind or (own.name in _NAMES and not own.count()))


def _reshaped(leaf: Any, shape: tuple[int, ...]) -> Any:
    """Returns a leaf of the same kind with another shape."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.broadcast_to(np.zeros((), leaf.dtype), shape)
    where = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed else None
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where, weak_type=getattr(leaf, "weak_type", False))


def _saved_leaf(entry: Entry) -> Any:
    """Returns a leaf of the kind that was saved, which takes no memory."""
    if isinstance(entry, ValueEntry):
        return entry.decode()
    if entry.type == "key":
        return jax.eval_shape(lambda data: as_key(data, entry), jax.ShapeDtypeStruct(entry.shape, np.uint32))
    dtype = dtypes.to_numpy(entry.dtype)
    if entry.type in ("jax", "jax-weak"):
        return jax.ShapeDtypeStruct(entry.shape, dtype, weak_type=entry.type == "jax-weak")
    zeros = np.zeros((), dtype)
    return zeros[()] if entry.type == "numpy-scalar" else np.broadcast_to(zeros, entry.shape)


# Hints


def _with_parents(paths: Iterable[str]) -> set[str]:
    """Returns the paths and those of all containers around them, the root too."""
    return {at for path in paths for at in (path, *parent_paths(path), "")}


def _template_nodes(flat_tree: walk.FlatTree) -> dict[str, Any]:
    """Returns the containers and leaves of a template by path, with None for those in the state of an optimizer."""
    found: dict[str, Any] = {}
    for _, path, node in containers(flat_tree.skeleton):
        around = found[path.rpartition("/")[0]] if path else node
        of_optimizer = isinstance(node, Node) and node.kind == "namedtuple" and named_tuples.is_of_optimizer(node)
        found[path] = None if around is None or of_optimizer else node
    return found


def _is_plain(node: Any) -> bool:
    return isinstance(node, Node) and (node.kind in _MAKE or not node.count()) and node.name in _NAMES


def with_hints(
    differences: Sequence[Difference],
    flat_tree: walk.FlatTree,
    entries: Mapping[str, Entry],
    at: str,
    grown: Callable[[Sequence[str]], Grown],
) -> list[Difference]:
    """Returns the differences. Those of parts that may have grown have a hint that says how to keep these.

    at: the path of the template in the checkpoint.
    grown: returns the template with parts grown.
    """
    nodes = _template_nodes(flat_tree)
    leaves = dict(zip(flat_tree.paths, flat_tree.leaves, strict=True))
    filled = {at for path in entries for at in parent_paths(path)}

    def place_of(one: Difference) -> str | None:
        entry = entries.get(one.path)
        if one.expected in ABSENT:
            return None if entry is None else _place_of_entry(one.path, nodes, leaves)
        if one.found in ABSENT:  # A dict keeps what only the template has.
            around = one.path.rpartition("/")[0]
            is_list = one.path in nodes and _is_plain(nodes[around]) and isinstance(nodes[around].keys, int)
            return around if is_list and around in filled else None
        return one.path if nodes.get(one.path) == LEAF and _may_have_grown(leaves[one.path], entry) else None

    places = [place_of(one) for one in differences]
    pairs = list(zip(differences, places, strict=True))
    if any(place is None and (one.found in ABSENT or one.expected in ABSENT) for one, place in pairs):
        # The checkpoint lacks something as well, or has more states of an optimizer: parts were renamed or removed.
        places = [place if place in nodes else None for place in places]
    # Many differences have the same place, and each look goes through all entries.
    may_grow = {place: _may_grow(place, nodes, entries) for place in {*places} if place is not None}
    places = [place if place is not None and may_grow[place] else None for place in places]
    named = tuple(dict.fromkeys(place for place in places if place is not None))
    refused = _with_parents(one.path for one in grown(named).problems) if named else set[str]()
    hints = {
        place: _alone(place, at) if place in refused else f"grow=[{place!r}] keeps what grows during training"
        for place in named
    }
    return [
        one if place is None else one._replace(hint=f"{one.hint}; {hints[place]}")
        for one, place in zip(differences, places, strict=True)
    ]


def _may_grow(place: str, nodes: Mapping[str, Any], entries: Mapping[str, Entry]) -> bool:
    """Returns False if the template has a list where the checkpoint has a dict."""
    node = nodes.get(place, LEAF)
    if node == LEAF or not isinstance(node.keys, int):
        return True
    inside = (relative_to(path, place) for path in entries)
    return all(rest.partition("/")[0].isdecimal() for rest in inside if rest)


def _place_of_entry(path: str, nodes: Mapping[str, Any], leaves: Mapping[str, Any]) -> str | None:
    """Returns the path that `grow` must name to keep an entry that the template lacks, or None if it cannot."""
    place = next(at for at in (path, *reversed(parent_paths(path)), "") if at in nodes)
    node = nodes[place]
    if node == LEAF:
        return place if leaves[place] is None else None
    if not _is_plain(node):
        return None
    if not node.count() or isinstance(node.keys, int):
        return place
    return join(place, (relative_to(path, place) or "").partition("/")[0], root=not place)


def _may_have_grown(leaf: Any, entry: Entry | None) -> bool:
    """Returns True if an array of a template is empty, or shorter than the saved one along one axis."""
    shape = getattr(leaf, "shape", None)
    if not isinstance(entry, ArrayEntry) or entry.type == "key" or not isinstance(shape, tuple) or shape == entry.shape:
        return False
    if len(shape) != len(entry.shape) or 0 in shape:
        return 0 in shape
    return [a < b for a, b in zip(shape, entry.shape, strict=True) if a != b] == [True]


def suggestions(flat_tree: walk.FlatTree, entries: Mapping[str, Entry]) -> Iterator[Suggestion]:
    """Yields a cause for what is empty in the template and not in the checkpoint, and for lists of numbers."""
    leaves = dict(zip(flat_tree.paths, flat_tree.leaves, strict=True))
    saved: dict[str, list[Entry]] = {}  # by the path of a container: the leaves in it
    for path, entry in entries.items():
        for at in parent_paths(path):
            saved.setdefault(at, []).append(entry)
    found: list[str] = []
    for path, node in _template_nodes(flat_tree).items():
        if _is_plain(node) and path in saved:
            numbers = all(getattr(one, "shape", ()) == () for one in saved[path])
            if not node.count() or (numbers and isinstance(node.keys, int) and node.count() != len(saved[path])):
                found.append(path)
        elif node == LEAF and _may_have_grown(leaves[path], entries.get(path)) and 0 in leaves[path].shape:
            found.append(path)
    if found:
        named = join_names(tuple(map(repr, found)))
        yield Suggestion(f"the size of {named} has changed during training", grow=tuple(found))
