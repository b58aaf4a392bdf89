"""An initial state, or only its shapes."""

import logging
from collections.abc import Callable
from typing import Any

import jax

from .._pytree import flax, walk
from ..errors import MismatchError
from . import place as _place

_log = logging.getLogger("treering")


class _Traced:
    """The result of `init`, with its arrays apart from everything else (numbers, functions, None, structure)."""

    def __init__(self, init: Callable[[], Any]):
        self._init = init
        self._rest: list[Any] = []
        self._assemble: Callable[[list[Any]], Any] = list
        self._tree: Any = None

    def arrays(self) -> list[Any]:
        """Calls `init` and returns its arrays; JAX traces this."""
        tree, join = flax.split(self._init())
        leaves, treedef = walk.flatten(tree)
        self._assemble = lambda new: join(treedef.unflatten(new))
        self._tree = lambda new: treedef.unflatten(new)
        self._rest = [_ARRAY if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def leaves(self, arrays: list[Any]) -> list[Any]:
        rest = iter(arrays)
        return [next(rest) if leaf is _ARRAY else leaf for leaf in self._rest]


_ARRAY = object()


def abstract(init: Callable[[], Any]) -> Any:
    """The tree that `init` returns, with a `jax.ShapeDtypeStruct` for every JAX array.

    Nothing is computed, unless `init` cannot be traced: then it is called, and that is logged.
    """
    traced = _Traced(init)
    try:
        shapes = jax.eval_shape(traced.arrays)
    except Exception as error:  # if tracing is not the reason, the call below fails again
        _log.warning("init cannot be traced, so it is called for the shapes of the state: %s", _first_line(error))
        shapes = [_shape(array) for array in traced.arrays()]
    return traced._assemble(traced.leaves(shapes))


def sharded(init: Callable[[], Any], sharding: Any) -> Any:
    """The tree that `init` returns, its JAX arrays made where they belong (see `_place.resolve`).

    When `init` cannot be traced, they are moved there.
    """
    traced = _Traced(init)
    arrays: list[Any] | None = None
    try:
        shapes = jax.eval_shape(traced.arrays)
    except Exception as error:
        _log.warning("init cannot be traced, so its arrays are made first and moved then: %s", _first_line(error))
        arrays = traced.arrays()
        shapes = [_shape(array) for array in arrays]
    leaves = traced.leaves(shapes)
    tree = traced._tree(leaves)
    paths = walk.walk(tree).paths
    shaped = [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else None for leaf in leaves]
    places = _place.resolve(sharding, tree, paths, leaves, lambda: shaped)
    where = [place for place, leaf in zip(places, shaped, strict=True) if leaf is not None]
    if arrays is None:
        made = jax.jit(traced.arrays, out_shardings=where)()
    else:
        made = [array if w is None else jax.device_put(array, w) for array, w in zip(arrays, where, strict=True)]
    return traced._assemble(traced.leaves(made))


def check(init: Callable[[], Any], tree: Any) -> None:
    """Raises `MismatchError` when tracing `init` gives another tree than calling it did.

    A job that goes on would take the traced tree for the template. When `init` cannot be traced, that is only logged.
    """
    traced = _Traced(init)
    try:
        shapes = jax.eval_shape(traced.arrays)
    except Exception as error:
        _log.info("init cannot be traced; a job that goes on will call it: %s", _first_line(error))
        return
    found = traced._assemble(traced.leaves(shapes))
    real, walked = (walk.walk(flax.split(one)[0]) for one in (tree, found))
    expected = dict(zip(real.paths, map(_described, real.leaves), strict=True))
    given = dict(zip(walked.paths, map(_described, walked.leaves), strict=True))
    problems = [
        f"  {path or '(root)'}: {expected.get(path, 'nothing')} when called, {given.get(path, 'nothing')} when traced"
        for path in {**expected, **given}
        if expected.get(path) != given.get(path)
    ]
    if problems:
        head = (
            "init: expected the same tree when it is traced, which is how a job that goes on learns its shapes, found:"
        )
        raise MismatchError("\n".join([head, *problems[:10], *(["  …"] if len(problems) > 10 else [])]))


def _described(leaf: Any) -> str:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return f"{leaf.dtype}{list(leaf.shape)} of JAX"
    shape = getattr(leaf, "shape", None)
    return type(leaf).__name__ if shape is None else f"{leaf.dtype}{list(shape)} of {type(leaf).__name__}"


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    where = array.sharding if array.committed else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where, weak_type=getattr(array, "weak_type", False))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
