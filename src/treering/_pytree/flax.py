"""Supports what JAX does not know about the pytrees of Flax and Haliax, if the user has imported these libraries."""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_MAX_STRUCTURES = 16  # that are remembered
_plain: dict[Any, bool] = {}  # treedefs of trees without graph objects; True if they have Variables, none of them empty
UNFIT = (TypeError, ValueError, RecursionError, SystemError)  # errors of JAX for trees that it cannot flatten

_BOXES = {  # by kind: the module of the class, and its name
    "variable": ("flax.nnx", "Variable"),
    "axis-metadata": ("flax.core.meta", "AxisMetadata"),
    "named-array": ("haliax.core", "NamedArray"),
}


def box_types() -> dict[str, type]:
    """Returns the classes of pytree nodes that only wrap one value and do not show in paths, by their kind."""
    modules = {kind: (sys.modules.get(module), name) for kind, (module, name) in _BOXES.items()}
    return {kind: getattr(module, name) for kind, (module, name) in modules.items() if module}


def unbox_graph_modules(tree: Any) -> Any:
    """Returns a tree that JAX can flatten: NNX graph objects that are not pytrees are replaced by their states."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    import jax

    try:
        graph = any(isinstance(leaf, nnx.Pytree) for leaf in jax.tree.leaves(tree))
    except (TypeError, ValueError):  # Some keys cannot be sorted. `walk` raises an error that says where.
        return tree
    return split(tree).tree if graph else tree


class SplitTree(NamedTuple):
    """A tree without NNX graph objects, and the function that puts them back into a tree of the same structure.

    graphdef: what NNX records in addition to the states.
    outer: the structure of the tree that has the graph objects as leaves.
    objects: the graph objects, by their number among these leaves.
    """

    tree: Any
    join: Callable[[Any], Any]
    graphdef: Any = None
    outer: Any = None
    objects: Mapping[int, Any] = {}


class Outline(NamedTuple):
    """The leaves and the structure of a tree. In a tree with NNX graph objects, these and Variables are leaves.

    objects, variables: the numbers of the leaves that are one. A plain tree has none.
    """

    leaves: list[Any]
    structure: Any
    objects: Sequence[int] = ()
    variables: Sequence[int] = ()


def outline(tree: Any) -> Outline:
    """Returns the outline of a tree. Raises one of `UNFIT` if JAX cannot flatten it."""
    import jax

    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return Outline(*jax.tree.flatten(tree))
    kinds = nnx.Pytree, nnx.Variable
    if plain := _flatten_known_plain(tree, kinds):
        return plain
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, kinds))
    objects = [i for i, leaf in enumerate(leaves) if isinstance(leaf, nnx.Pytree)]
    variables = [i for i, leaf in enumerate(leaves) if isinstance(leaf, nnx.Variable)]
    if objects or len({id(leaves[i]) for i in variables}) < len(variables):
        return Outline(leaves, structure, objects, variables)
    plain = Outline(*jax.tree.flatten(tree))
    _remember_plain(tree, plain, [leaves[i] for i in variables])
    return plain


def split(tree: Any) -> SplitTree:
    """Replaces every NNX graph object by its state, which contains a shared Variable once.

    All objects are split together. So Variables that they share with each other, or with the rest of the tree, stay
    shared.
    """
    nnx = sys.modules.get("flax.nnx")
    try:
        found = None if nnx is None else outline(tree)
    except UNFIT:  # `walk` raises an error that says where.
        found = None
    if nnx is None or found is None or not (found.objects or found.variables):
        return SplitTree(tree, _unchanged)
    leaves, outer, objects, variables = list(found.leaves), found.structure, list(found.objects), list(found.variables)
    at = objects + variables  # in this order, so that a Variable of an object keeps its path in the object
    graph = {i: leaves[i] for i in objects}
    graphdef, state = _split_with_shapes(nnx, [leaves[i] for i in at])
    for n, i in enumerate(at):
        own = state.get(n, {})
        leaves[i] = own if isinstance(own, nnx.Variable) else nnx.State(own)

    held = [n in state for n in range(len(at))]  # `join` keeps only this, so that the state's arrays can be released
    del state

    def join(restored: Any) -> Any:
        new = outer.flatten_up_to(restored)
        merged = nnx.merge(graphdef, nnx.State({n: new[i] for n, i in enumerate(at) if held[n]}))
        for n, i in enumerate(at):
            new[i] = merged[n]
        return outer.unflatten(new)

    return SplitTree(outer.unflatten(leaves), join, graphdef, outer, graph)


def _split_with_shapes(nnx: Any, parts: list[Any]) -> tuple[Any, Any]:
    """Splits as `nnx.split` does, but shapes and `...` in containers of objects are leaves, as the arrays there are.

    NNX takes only arrays in a dict for leaves, and other values for static ones. So copies of the objects get arrays.
    """
    import jax

    graphdef, state = nnx.split(parts)
    shapes = (jax.ShapeDtypeStruct, type(...))
    if not has_static(graphdef, *shapes):
        return graphdef, state
    stands_for: dict[int, Any] = {}
    marks: list[Any] = []  # keeps the marks alive, so that no id is used twice

    def mark(kinds: tuple[type, ...], value: Any) -> Any:
        if not isinstance(value, kinds):
            return value
        marks.append(np.empty(0))
        stands_for[id(marks[-1])] = value
        return marks[-1]

    def is_object(value: Any) -> bool:
        return isinstance(value, nnx.Pytree | nnx.Variable)

    copies = nnx.merge(graphdef, state)
    for node in [one for _, one in nnx.iter_graph(copies) if isinstance(one, nnx.Pytree)]:
        children = set(map(id, jax.tree.leaves(node, is_leaf=functools.partial(operator.is_not, node))))
        is_pytree = children != {id(node)}  # In other objects, each attribute with an array is data.
        for name, value in list(vars(node).items()):
            if not is_object(value) and (id(value) in children or not is_pytree):
                put = functools.partial(mark, shapes if is_pytree else shapes[:1])
                object.__setattr__(node, name, jax.tree.map(put, value, is_leaf=is_object))
    graphdef, state = nnx.split(copies)
    return graphdef, jax.tree.map(lambda leaf: stands_for.get(id(leaf), leaf), state, is_leaf=is_object)


def has_static(graphdef: Any, *kinds: type) -> bool:
    """Returns True if NNX objects hold a value of one of these types as a static one."""
    return any(isinstance(getattr(kind, "value", None), kinds) for _, kind in getattr(graphdef, "attributes", ()))


def unshare(tree: Any, *, objects: bool) -> Any:
    """Returns a tree in which each place of an NNX Variable has a Variable of its own, with the same arrays.

    objects: True to replace each NNX graph object by its state. Otherwise objects stay, with what they share.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    import jax

    kinds = nnx.Pytree, nnx.Variable

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Pytree) and objects:
            leaf = split(leaf).tree
        return jax.tree.map(lambda x: x, leaf) if isinstance(leaf, nnx.Variable | nnx.State) else leaf

    try:
        leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, kinds))
        held = any(isinstance(leaf, kinds) for leaf in leaves)
        return structure.unflatten(map(copy, leaves)) if held else tree
    except UNFIT:  # `walk` raises an error that says where.
        return tree


def _unchanged(restored: Any) -> Any:
    return restored


def forget_structures() -> None:
    """Forgets the structures that are remembered."""
    global _plain
    _plain = {}


def _remember_plain(tree: Any, plain: Outline, variables: list[Any]) -> None:
    """Remembers the structure of a tree without graph objects, if its leaves show which Variables are shared.

    They do not if a Variable has no leaf, or if its leaves are new objects whenever it is flattened. No lock is held,
    because the user's code runs here. If two threads remember a structure at the same time, one may be lost.
    """
    global _plain
    import jax

    with contextlib.suppress(*UNFIT):
        leaves = plain.leaves
        again = jax.tree.leaves(tree) if variables else leaves
        lasting = len(leaves) == len(again) and all(map(operator.is_, leaves, again))
        if lasting and all(map(jax.tree.leaves, variables)) and plain.structure not in _plain:
            last = list(_plain.items())[1 - _MAX_STRUCTURES :]
            _plain = {**dict(last), plain.structure: bool(variables)}


def _flatten_known_plain(tree: Any, kinds: tuple[type, ...]) -> Outline | None:
    """Returns the outline of a tree if its structure is known to have no graph objects, and no Variable is shared.

    This saves time: looking at each node, as `outline` does, takes eight times as long as flattening the tree.
    """
    if not _plain:
        return None
    import jax

    with contextlib.suppress(*UNFIT):  # The caller flattens the tree again and handles the error.
        leaves, structure = jax.tree.flatten(tree)
        variables = _plain.get(structure)
        if variables is None or any(issubclass(kind, kinds) for kind in set(map(type, leaves))):
            return None
        if not variables or len(set(map(id, leaves))) == len(leaves):
            return Outline(leaves, structure)
    return None


def partitioning(tree: Any) -> list[Any] | None:
    """Returns for each leaf the `PartitionSpec` of the Linen box or NNX Variable around it. None is a leaf here.

    Returns None if no leaf has one. Logical axis names are translated by the box's own rules, or else by those that
    are set.
    """
    meta, nnx = sys.modules.get("flax.core.meta"), sys.modules.get("flax.nnx")
    if meta is None and nnx is None:
        return None
    import jax

    boxes = (*((meta.AxisMetadata,) if meta else ()), *((nnx.Variable,) if nnx else ()))
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: x is None or isinstance(x, boxes))
    specs = [_spec_of(node, meta, nnx) if isinstance(node, boxes) else None for node in nodes]
    if not any(spec is not None for spec in specs):
        return None
    found: list[Any] = []
    for node, spec in zip(nodes, specs, strict=True):
        found += [spec] * len(jax.tree.leaves(node, is_leaf=lambda x: x is None))
    return found


def _spec_of(box: Any, meta: Any, nnx: Any) -> Any:
    if nnx and isinstance(box, nnx.Variable):
        about = box.get_metadata()
        if not any(about.get(name) for name in ("out_sharding", "sharding_names", "sharding")):
            return None
        import jax

        (spec,) = jax.tree.leaves(nnx.get_partition_spec(box), is_leaf=lambda x: x is None) or [None]
        return spec
    if not isinstance(box, meta.Partitioned):
        return None
    spec = box.get_partition_spec()
    if hasattr(box, "rules"):  # a LogicallyPartitioned, so Linen itself is imported
        return sys.modules["flax.linen"].logical_to_mesh_axes(tuple(spec), box.rules)
    return spec
