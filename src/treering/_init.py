"""An initial state, or only its shapes."""

from collections.abc import Callable
from typing import Any

import jax

from . import _flax, _place, _tree


class _Traced:
    """The result of `init`, with its arrays apart from everything else (numbers, functions, None, structure)."""

    def __init__(self, init: Callable[[], Any]):
        self._init = init
        self._rest: list[Any] = []
        self._assemble: Callable[[list[Any]], Any] = list
        self._tree: Any = None

    def arrays(self) -> list[Any]:
        """Calls `init` and returns its arrays; to be traced."""
        tree, join = _flax.split(self._init())
        leaves, treedef = _tree.flatten(tree)
        self._assemble = lambda new: join(treedef.unflatten(new))
        self._tree = lambda new: treedef.unflatten(new)
        self._rest = [_ARRAY if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def leaves(self, arrays: list[Any]) -> list[Any]:
        rest = iter(arrays)
        return [next(rest) if leaf is _ARRAY else leaf for leaf in self._rest]


_ARRAY = object()


def abstract(init: Callable[[], Any]) -> Any:
    """The tree that `init` returns, with a `jax.ShapeDtypeStruct` for every JAX array; nothing is computed."""
    traced = _Traced(init)
    shapes = jax.eval_shape(traced.arrays)
    return traced._assemble(traced.leaves(shapes))


def sharded(init: Callable[[], Any], sharding: Any) -> Any:
    """The tree that `init` returns, its JAX arrays made where they belong (see `_place.resolve`)."""
    traced = _Traced(init)
    leaves = traced.leaves(jax.eval_shape(traced.arrays))
    tree = traced._tree(leaves)
    paths = _tree.walk(tree).paths
    shaped = [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else None for leaf in leaves]
    places = _place.resolve(sharding, tree, paths, leaves, shaped)
    where = [place for place, leaf in zip(places, shaped, strict=True) if leaf is not None]
    return traced._assemble(traced.leaves(jax.jit(traced.arrays, out_shardings=where)()))
