"""What Flax needs and JAX alone cannot tell; nothing here imports Flax, it only looks whether somebody did."""

import sys
from collections.abc import Callable
from typing import Any


def box_types() -> tuple[type, ...]:
    """Pytree nodes that only wrap one value and do not show in paths."""
    types = []
    if nnx := sys.modules.get("flax.nnx"):
        types.append(nnx.Variable)
    if meta := sys.modules.get("flax.core.meta"):
        types.append(meta.AxisMetadata)
    return tuple(types)


def split(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Replaces every NNX graph object by its state, in which a shared Variable stands once.

    Returns the new tree and the function that turns a restored tree of the same structure back into graph
    objects. All objects are split together, so what they share with each other, and with Variables that lie
    in the tree by themselves, stays shared as well.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree, lambda restored: restored
    import jax

    try:
        leaves, outer = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable))
    except (TypeError, ValueError):  # keys that cannot be sorted; naming the leaves will say where
        return tree, lambda restored: restored
    objects = [i for i, leaf in enumerate(leaves) if isinstance(leaf, nnx.Pytree)]
    variables = [i for i, leaf in enumerate(leaves) if isinstance(leaf, nnx.Variable)]
    if not objects and len({id(leaves[i]) for i in variables}) == len(variables):
        return tree, lambda restored: restored
    at = objects + variables  # in this order, so that what both hold keeps the object's path
    graphdef, state = nnx.split([leaves[i] for i in at])
    for n, i in enumerate(at):
        found = state.get(n, {})
        leaves[i] = found if isinstance(found, nnx.Variable) else nnx.State(found)

    def join(restored: Any) -> Any:
        new = outer.flatten_up_to(restored)
        merged = nnx.merge(graphdef, nnx.State({n: new[i] for n, i in enumerate(at) if n in state}))
        for n, i in enumerate(at):
            new[i] = merged[n]
        return outer.unflatten(new)

    return outer.unflatten(leaves), join
