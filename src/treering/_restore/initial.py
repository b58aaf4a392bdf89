"""The initial state of a job, or only its shapes."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import core

from .._pytree import flax, walk
from .._pytree.leaks import find_tracer
from .._pytree.leaves import check_no_tracers
from ..errors import MismatchError
from . import place as _place

_log = logging.getLogger("treering")
_ARRAY = object()


class _Untraceable(Exception):
    """Says why `init` cannot be traced, and whether tracing it has left tracers behind."""

    def __init__(self, why: str, *, left_tracers: bool = False):
        super().__init__(why)
        self.left_tracers = left_tracers


class _Apart:
    """The tree of `init` as `flax.split` gives it, with its JAX arrays apart from everything else."""

    def __init__(self, split: flax.Split):
        leaves, self._treedef = walk.flatten(split.tree)
        self._split = split
        self.arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        self._rest = [_ARRAY if isinstance(leaf, jax.Array) else leaf for leaf in leaves]

    def with_arrays(self, arrays: Sequence[Any]) -> flax.Split:
        """Returns the tree with other arrays, or with their shapes."""
        new = iter(arrays)
        leaves = [next(new) if leaf is _ARRAY else leaf for leaf in self._rest]
        return self._split._replace(tree=self._treedef.unflatten(leaves))


class Initial:
    """The template that `init` gives a resumed job: its tree with a `jax.ShapeDtypeStruct` for every JAX array.

    `init` is traced, which computes nothing. If tracing fails, or leaves a tracer in a function or a static value of
    the tree, `init` is called instead and a warning says so.

    split: the tree without NNX graph objects, as `init` made it; see `flax.split`. `walked` is it, flattened.
    called: whether `init` was called. Then the sharding of every array is known. A traced array has the sharding that
        its type says, or none.
    """

    def __init__(self, init: Callable[[], Any]):
        self._init = init
        self.called = False
        try:
            self.split = _traced(init)
        except _Untraceable as error:
            _log.warning("init cannot be traced, so it is called for the shapes of the state: %s", error)
            self.split, self.called = self._from_call(), True
        self.walked = walk.walk_split(self.split)
        self.split = self.split._replace(objects={})  # which hold arrays, or tracers

    def _from_call(self) -> flax.Split:
        split = flax.split(self._init())
        apart = _Apart(split)
        if any(isinstance(array, core.Tracer) for array in apart.arrays):
            walked = walk.walk_split(split)
            check_no_tracers(walked.paths, walked.leaves, "init")
        return apart.with_arrays([_shape(array) for array in apart.arrays])

    @functools.cached_property
    def places(self) -> Sequence[_place.Where]:
        """The place of each leaf in the state that `init` returns, which is called for that if it was only traced."""
        split = self.split if self.called else self._from_call()
        if not self.called:
            _check_same(walk.walk(split.tree), self.walked)
        leaves, _ = walk.flatten(split.tree)
        return [leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None for leaf in leaves]


def first(init: Callable[[], Any], sharding: Any = None) -> Any:
    """Returns what `init` returns, in the first job of a run; with a `sharding`, its JAX arrays are made there.

    A resumed job takes the traced tree for its template. Raises `MismatchError` if tracing `init` gives another tree
    than calling it. If `init` cannot be traced, its arrays are made first and moved then.
    """
    tree = init() if sharding is None else None  # first, so that what init caches holds arrays
    try:
        traced = _traced(init)
    except _Untraceable as error:
        _log.info("init cannot be traced, so a resumed job will call it: %s", error)
        if sharding is None:
            if error.left_tracers:  # where arrays were
                del tree
                tree = init()
            return tree
        apart = _Apart(flax.split(init()))
        places = _array_places(sharding, apart.with_arrays([_shape(array) for array in apart.arrays]))
        moved = [one if to is None else jax.device_put(one, to) for one, to in zip(apart.arrays, places, strict=True)]
        return _joined(apart.with_arrays(moved))
    if sharding is None:
        _check_same(walk.walk(flax.split(tree).tree), walk.walk(traced.tree))
        return tree
    made: list[_Apart] = []

    def arrays() -> list[Any]:
        made[:] = [_Apart(flax.split(init()))]
        return made[0].arrays

    new = jax.jit(arrays, out_shardings=_array_places(sharding, traced))()
    return _joined(made[0].with_arrays(new))


def _traced(init: Callable[[], Any]) -> flax.Split:
    """Returns the tree of `init` with a shape for every JAX array. Raises `_Untraceable`."""
    made: list[_Apart] = []

    def arrays() -> list[Any]:
        made[:] = [_Apart(flax.split(init()))]
        return made[0].arrays

    try:
        shapes = jax.eval_shape(arrays)
    except Exception as error:  # if tracing is not the reason, calling init fails again
        raise _Untraceable(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None
    split = made[0].with_arrays(shapes)
    if holder := find_tracer([split.tree, split.graphdef, init]):
        why = f"{holder} holds an array that init makes, and tracing would leave a tracer there"
        raise _Untraceable(why, left_tracers=True)
    return split


def _array_places(sharding: Any, split: flax.Split) -> list[_place.Where]:
    """Returns the place that `sharding` has for each JAX array of a template (see `_place.resolve`)."""
    walked = walk.walk(split.tree)
    shaped = [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else None for leaf in walked.leaves]
    places = _place.resolve(sharding, split.tree, walked.paths, walked.leaves, lambda: shaped)
    return [place for place, leaf in zip(places, shaped, strict=True) if leaf is not None]


def _joined(split: flax.Split) -> Any:
    return split.join(split.tree)


def _check_same(real: walk.Walk, traced: walk.Walk) -> None:
    expected = dict(zip(real.paths, map(_described, real.leaves), strict=True))
    given = dict(zip(traced.paths, map(_described, traced.leaves), strict=True))
    problems = [
        f"  {path or '(root)'}: {expected.get(path, 'nothing')} when called, {given.get(path, 'nothing')} when traced"
        for path in {**expected, **given}
        if expected.get(path) != given.get(path)
    ]
    if problems:
        head = "init: expected the same tree when it is traced, which is how a resumed job learns its shapes, found:"
        raise MismatchError("\n".join([head, *problems[:10], *(["  …"] if len(problems) > 10 else [])]))


def _described(leaf: Any) -> str:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return f"{leaf.dtype}{list(leaf.shape)} of JAX"
    shape = getattr(leaf, "shape", None)
    return type(leaf).__name__ if shape is None else f"{leaf.dtype}{list(shape)} of {type(leaf).__name__}"


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    where = array.sharding if array.committed else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where, weak_type=getattr(array, "weak_type", False))
