"""Flattens a pytree into paths, leaves and a skeleton."""

import contextlib
import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .._core.leaf_paths import join, join_names, key_text, key_texts, relative_to
from .._core.skeleton import LEAF, Node, Skeleton, encode_key
from .._threads.reentry import runs_user_code
from ..errors import UnsupportedError
from . import flax, jax_private, static
from .static import Static


class FlatTree(NamedTuple):
    """A flattened tree.

    paths, leaves: one path for each leaf, in the order of `flatten_leaves`.
    boxes: the boxes that do not show in the paths, by the path of their contents, from the outside in. Each has a kind,
        and a name for its child.
    structure: JAX's treedef for these leaves, or None if the treedef has other leaves.
    static: the values that dataclasses hold in addition to their leaves; see the module `static`.
    """

    paths: Sequence[str]
    leaves: Sequence[Any]
    skeleton: Skeleton
    boxes: Mapping[str, Sequence[tuple[str, str]]]
    structure: Any = None
    static: Static = MappingProxyType({})


class _Names(NamedTuple):
    """The paths and the skeleton of a treedef.

    nones: the positions of None, which JAX treats as an empty container.
    text: the treedef as text if it has keys other than text. JAX says that treedefs with the keys 1, 1.0 and True are
        equal, but their texts differ.
    """

    paths: Sequence[str]
    skeleton: Skeleton
    boxes: Mapping[str, Sequence[tuple[str, str]]]
    nones: frozenset[int]
    text: str | None
    static: Static


_MAX_KNOWN = 4  # structures that are remembered
# Always replaced and never changed, so that no lock is needed: it would be held while JAX runs comparisons of the user.
_cache: dict[Any, _Names] = {}


@runs_user_code
def flatten_tree(tree: Any) -> FlatTree:
    """Flattens a pytree. None is a leaf here, so that it keeps its place.

    Paths and skeleton depend only on JAX's treedef. So a training loop that saves the same structure again gets the
    same objects again.

    Raises `UnsupportedError` for keys that no path can name, and for two leaves with one path.
    """
    global _cache
    import jax

    try:
        leaves, treedef = jax.tree.flatten(tree)
        names = _cache.get(treedef)
    except (RecursionError, SystemError):  # In some places JAX turns the first into the second.
        raise UnsupportedError("this tree is nested deeper than JAX can flatten") from None
    except (TypeError, ValueError):  # Keys cannot be sorted, which `_walk` reports, or static values do not compare.
        return _flatten_tree(tree)
    if names is None or (names.text is not None and names.text != str(treedef)):
        flat_tree = _flatten_tree(tree)
        nones = frozenset(n for n, leaf in enumerate(flat_tree.leaves) if leaf is None)
        if len(flat_tree.leaves) - len(nones) != len(leaves):
            raise UnsupportedError("a container of this tree flattens differently with and without key paths")
        only_text = all(
            type(key) is str for node in flat_tree.skeleton if isinstance(node, Node) for key in node.names()
        )
        text = None if only_text else str(treedef)
        names = _Names(flat_tree.paths, flat_tree.skeleton, flat_tree.boxes, nones, text, flat_tree.static)
        known = dict(_cache)
        known.pop(treedef, None)  # A dict keeps its old key if the new one is equal, but their texts may differ.
        _cache = {**dict(list(known.items())[1 - _MAX_KNOWN :]), treedef: names}
    if names.nones:
        rest = iter(leaves)
        leaves = [None if n in names.nones else next(rest) for n in range(len(names.paths))]
    return FlatTree(names.paths, leaves, names.skeleton, names.boxes, None if names.nones else treedef, names.static)


def flatten_split(split: flax.SplitTree) -> FlatTree:
    """Flattens a tree whose NNX graph objects were replaced by their states, with their static attributes."""
    flat_tree = flatten_tree(split.tree)
    if not split.objects:
        return flat_tree
    return flat_tree._replace(static={**flat_tree.static, **_static_of(split)})


_graph: tuple[Any, Any, Static] | None = None  # the last graph definition and outer structure, and their static values


def _static_of(split: flax.SplitTree) -> Static:
    """Returns the static attributes of NNX graph objects. It is fast if the graph is that of the last time."""
    global _graph
    last = _graph
    with contextlib.suppress(Exception):  # The user's static values may raise anything when they are compared.
        if last and bool(last[0] == split.graphdef) and bool(last[1] == split.outer):
            return last[2]
    found = static.graph_fields(_objects_by_path(split))
    _graph = split.graphdef, split.outer, found
    return found


def _objects_by_path(split: flax.SplitTree) -> dict[str, Any]:
    """Returns the NNX graph objects of a tree by their paths."""
    marks = [object() for _ in range(split.outer.num_leaves)]
    outer = flatten_tree(split.outer.unflatten(marks))
    at = {id(leaf): path for path, leaf in zip(outer.paths, outer.leaves, strict=True)}
    return {at[id(marks[number])]: node for number, node in split.objects.items()}


def check_no_static_tracers(split: flax.SplitTree, name: str) -> None:
    """Raises `UnsupportedError` if an NNX object of a template holds a tracer as a static value.

    `eval_shape` leaves it there if the object has a plain array or key as an attribute (Flax 0.12).
    """
    from jax.core import Tracer

    if not flax.has_static(split.graphdef, Tracer):
        return
    values = static.graph_values(_objects_by_path(split))
    found = [join(place, key, root=not place) for place, key, value in values if isinstance(value, Tracer)]
    raise UnsupportedError(
        f"{name}: expected a template of arrays or shapes, found what `eval_shape` leaves in an NNX module in place of "
        f"a plain array, a tracer: {join_names(tuple(found))}; wrap the array in `nnx.data`, or pass a module made "
        "without `eval_shape`"
    )


def forget_structures() -> None:
    """Forgets the structures that are remembered, because a function in one of them may hold a tracer."""
    global _cache, _graph
    _cache, _graph = {}, None
    flax.forget_structures()


@runs_user_code
def _flatten_tree(tree: Any) -> FlatTree:

    flatten_one = jax_private.flatten_one_level() or _flatten_one  # The public way takes four times as long.
    kinds = flax.box_types()
    types = tuple(kinds.values())
    boxes: dict[str, list[tuple[str, str]]] = {}
    paths: list[str] = []
    leaves: list[Any] = []
    skeleton: list[Node | int] = []
    found: dict[str, Mapping[str, Any]] = {}
    problems: list[str] = []
    stack: list[tuple[str, Any, bool]] = [("", tree, True)]
    while stack:
        path, value, root = stack.pop()
        try:
            flat = None if value is None else flatten_one(value)
            if flat is None:
                paths.append(path)
                leaves.append(value)
                skeleton.append(LEAF)
                continue
            pairs = list(flat[0])
            if types and len(pairs) == 1 and isinstance(value, types):
                kind = next(kind for kind, one in kinds.items() if isinstance(value, one))
                boxes.setdefault(path, []).append((kind, key_text(_plain_key(pairs[0][0]))))
                stack.append((path, pairs[0][1], root))
                continue
            node, names = _describe(value, [key for key, _ in pairs])
            if not isinstance(node.keys, int) and len(set(node.children())) != len(pairs):
                raise UnsupportedError(f"two children of this {type(value).__name__} have one key: {node.keys!r:.200}")
            skeleton.append(node)
            if fields := static.node_fields(value, names):
                found[path] = fields
            for (_, child), name in zip(reversed(pairs), reversed(names), strict=True):
                stack.append((join(path, name, root=root), child, False))
        except UnsupportedError as error:
            problems.append(f"  {path or '(root)'}: {error}")
        except (TypeError, ValueError) as error:  # JAX sorts dict keys, and keys of several types cannot be sorted.
            advice = "; give it keys of one type that sorts, such as str" if isinstance(value, dict) else ""
            problems.append(f"  {path or '(root)'}: JAX cannot flatten this {type(value).__name__}: {error}{advice}")
    if len(set(paths)) != len(paths):
        seen: set[str] = set()
        twice = {p for p in paths if p in seen or seen.add(p)}
        problems += [f"  {path or '(root)'}: two leaves have this path; rename one of them" for path in sorted(twice)]
    if problems:
        raise UnsupportedError("these leaves cannot be named:\n" + "\n".join(problems))
    return FlatTree(paths, leaves, skeleton, boxes, static=found)


def _flatten_one(value: Any) -> tuple[list[tuple[Any, Any]], Any] | None:
    """Returns the children of a container with their keys, or None for a leaf."""
    import jax

    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if pairs and not pairs[0][0]:
        return None
    return [(path[0], child) for path, child in pairs], treedef


class Level(NamedTuple):
    """A container without what is in its children.

    node, names: describe it; None and one empty name for a box that does not show in paths.
    make: makes such a container of other children.
    """

    node: Node | None
    names: Sequence[str]
    children: Sequence[Any]
    make: Any


@runs_user_code
def level_of(value: Any) -> Level | None:
    """Returns a container, or None for a leaf."""
    flat = None if value is None else _flatten_one(value)
    if flat is None:
        return None
    pairs, treedef = flat
    children = [child for _, child in pairs]
    if len(pairs) == 1 and isinstance(value, tuple(flax.box_types().values())):
        return Level(None, [""], children, treedef.unflatten)
    return Level(*_describe(value, [key for key, _ in pairs]), children, treedef.unflatten)


def replace_parts(tree: Any, parts: Mapping[str, Any], path: str = "") -> tuple[Any, dict[str, Any]]:
    """Returns a tree with other parts at some paths, and the parts that it had there, by path."""
    if path in parts:
        return parts[path], {path: tree}
    level = level_of(tree) if any(relative_to(at, path) is not None for at in parts) else None
    if level is None:
        return tree, {}
    had: dict[str, Any] = {}
    children: list[Any] = []
    for name, child in zip(level.names, level.children, strict=True):
        new, inside = replace_parts(child, parts, join(path, name, root=not path) if level.node else path)
        children.append(new)
        had |= inside
    return level.make(children), had


@runs_user_code
def flatten_leaves(tree: Any) -> tuple[list[Any], Any]:
    """Flattens a tree like `jax.tree.flatten`, with None as a leaf. The order is that of `flatten_tree`."""
    import jax

    return jax.tree.flatten(tree, is_leaf=lambda x: x is None)


@runs_user_code
def unflatten(tree: Any, leaves: Sequence[Any], structure: Any = None) -> Any:
    """Returns a tree with other leaves, which are in the order of `flatten_tree`.

    `structure` is the treedef of the tree.
    """
    import jax

    structure = jax.tree.structure(tree) if structure is None else structure
    if structure.num_leaves != len(leaves):  # Some leaves are None. Flattening with them is slow, so it is done late.
        structure = flatten_leaves(tree)[1]
    return structure.unflatten(leaves)


def _describe(value: Any, keys: list[Any]) -> tuple[Node, Sequence[str]]:
    """Returns the node of a container, and the path components of its children."""
    from jax.tree_util import DictKey, FlattenedIndexKey, SequenceKey

    kind = type(value)
    if kind is list or kind is tuple:
        return Node("list" if kind is list else "tuple", "", len(keys)), [str(i) for i in range(len(keys))]
    name = "" if kind is dict else kind.__name__
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple) and fields is not None and _are_fields(keys, fields):
        return Node("namedtuple", name, list(fields)), key_texts(fields)
    # Without children only the class says whether they would have names.
    if (
        all(isinstance(key, FlattenedIndexKey | SequenceKey) for key in keys)
        if keys
        else isinstance(value, list | tuple)
    ):
        return Node("positional", name, len(keys)), [str(i) for i in range(len(keys))]
    plain = [_plain_key(key) for key in keys]
    of_dict = kind is dict or (keys and isinstance(keys[0], DictKey))
    return Node("dict" if of_dict else "object", name, [encode_key(k) for k in plain]), [key_text(k) for k in plain]


def _are_fields(keys: Sequence[Any], fields: Sequence[str]) -> bool:
    """Returns True if children are the fields of a named tuple. Its class may be registered with other children."""
    from jax.tree_util import GetAttrKey

    if len(keys) != len(fields) or not all(isinstance(key, GetAttrKey) for key in keys):
        return False
    names = [key.name for key in keys]
    # JAX's registry (jaxlib 0.10) gives all children the name of the first field.
    return names == list(fields) or names == list(fields[:1]) * len(fields)


def _plain_key(key: Any) -> Any:
    """Returns the key or name in a key object of JAX. A class may also be registered with bare names."""
    from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

    if isinstance(key, DictKey | FlattenedIndexKey):
        key = key.key
    elif isinstance(key, GetAttrKey):
        key = key.name
    elif isinstance(key, SequenceKey):
        key = key.idx
    # Members of StrEnum and IntEnum, and NumPy's integers and texts, equal the plain value as keys of a dict.
    if type(key) is not str and isinstance(key, enum.Enum | np.integer | np.str_):
        return str.__str__(key) if isinstance(key, str) else int(key) if isinstance(key, int | np.integer) else key
    return key
