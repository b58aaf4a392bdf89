"""Makes the initial state of a job, or only the shapes of it, from the caller's function `init`."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import core

from .._pytree import flax, walk
from .._pytree.leaves import check_no_tracers
from .._pytree.trace_effects import WITHOUT_TRACING, TraceEffects
from .._threads.python_gc import gc_paused
from ..errors import MismatchError
from . import array_placement as _place

_log = logging.getLogger("treering")
_ARRAY = object()


class _Untraceable(Exception):
    """`init` cannot be traced. The text says why. What the trace left in the program was undone as far as possible."""

    def __init__(self, why: str, effects: TraceEffects):
        super().__init__(why)
        self.effects = effects

    def call(self, init: Callable[[], Any]) -> Any:
        """Returns what `init` returns. Raises `UnsupportedError` if the program still holds a tracer."""
        try:
            tree = init()
        except Exception as error:  # It may depend on what the trace has changed and `effects` has not undone.
            self.effects.check(error)
            error.add_note(f"Treering traced init before it called it ({self}). {WITHOUT_TRACING}.")
            raise
        self.effects.check()
        return tree


class _SeparateArrays:
    """The tree of `init` as `flax.split` returns it, with its JAX arrays in a list of their own."""

    def __init__(self, split: flax.SplitTree):
        leaves, self._treedef = walk.flatten_leaves(split.tree)
        self._split = split
        self.arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        self._other_leaves = [_ARRAY if isinstance(leaf, jax.Array) else leaf for leaf in leaves]

    def with_arrays(self, arrays: Sequence[Any]) -> flax.SplitTree:
        """Returns the tree with other arrays, or with their shapes."""
        new = iter(arrays)
        leaves = [next(new) if leaf is _ARRAY else leaf for leaf in self._other_leaves]
        return self._split._replace(tree=self._treedef.unflatten(leaves))


class Initial:
    """The template of a resumed job: the tree that `init` returns, with a `jax.ShapeDtypeStruct` for each JAX array.

    Treering traces `init`, which computes nothing. If tracing fails, or leaves a tracer in the tree or in the program,
    Treering puts the program back as it was, calls `init` instead and logs a warning.

    split: the tree without NNX graph objects, as `init` made it; see `flax.split`. `flat_tree` is the same, flattened.
    called: True if `init` was called. Then the sharding of every array is known. A traced array has the sharding that
        its type says, or none.
    """

    def __init__(self, init: Callable[[], Any]):
        self._init = init
        self.called = False
        try:
            self.split, self.flat_tree = _traced(init)
        except _Untraceable as error:
            _log.warning("init cannot be traced, so it is called for the shapes of the state: %s", error)
            self.split, self.flat_tree = _flattened(_from_tree(error.call(init)))
            self.called = True

    @functools.cached_property
    def places(self) -> Mapping[str, _place.ShardingOrNone]:
        """The place of each leaf that `init` makes, by path. Calls `init` if it was only traced before."""
        split = self.split if self.called else _from_tree(self._init())
        if not self.called:
            _check_same(walk.flatten_tree(split.tree), self.flat_tree)
        leaves, _ = walk.flatten_leaves(split.tree)
        places = [leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None for leaf in leaves]
        return dict(zip(self.flat_tree.paths, places, strict=True))


def first_state(init: Callable[[], Any], sharding: Any = None) -> Any:
    """Returns the state that `init` makes, for the first job of a run. With a `sharding`, JAX arrays are made there.

    If `init` cannot be traced, its arrays are made first and moved afterwards.

    Raises `MismatchError` if tracing `init` gives another tree than calling it. A resumed job would take the traced
    tree for its template, so the first job fails at once instead.
    """
    tree = init() if sharding is None else None  # before tracing, so that whatever init caches holds arrays
    try:
        traced, flat_tree = _traced(init)
    except _Untraceable as error:
        _log.info("init cannot be traced, so a resumed job will call it: %s", error)
        if sharding is None:
            if not error.effects.are_over():
                del tree
                tree = error.call(init)
            return tree
        separate = _SeparateArrays(flax.split(error.call(init)))
        arrays = separate.arrays
        places = _array_places(sharding, separate.with_arrays([_shape(array) for array in arrays]))
        moved = [one if to is None else jax.device_put(one, to) for one, to in zip(arrays, places, strict=True)]
        return _joined(separate.with_arrays(moved))
    if sharding is None:
        _check_same(walk.flatten_tree(flax.split(tree).tree), flat_tree)
        return tree
    made: list[_SeparateArrays] = []

    def make_arrays() -> list[Any]:
        made[:] = [_SeparateArrays(flax.split(init()))]
        return made[0].arrays

    new = jax.jit(make_arrays, out_shardings=_array_places(sharding, traced))()
    return _joined(made[0].with_arrays(new))


def _traced(init: Callable[[], Any]) -> tuple[flax.SplitTree, walk.FlatTree]:
    """Returns the tree of `init` with a shape for every JAX array, and the same flattened. Raises `_Untraceable`."""
    made: list[_SeparateArrays] = []
    effects = TraceEffects(init)

    def make_arrays(argument: Any) -> list[Any]:
        effects.begin(argument)
        made[:] = [_SeparateArrays(flax.split(init()))]
        return made[0].arrays

    if effects.held:
        raise _Untraceable(f"{effects.held} holds a tracer", effects)
    why, shapes = "", None
    with gc_paused():  # The objects of the trace stay young, so that those left behind are found at once.
        try:
            shapes = jax.eval_shape(make_arrays, 0.0)
        except Exception as error:  # If `init` itself is at fault, it fails again when it is called.
            made.clear()
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if shapes is not None:
            split, flat_tree = _flattened(made.pop().with_arrays(shapes))
            trees = [split.tree, split.graphdef]
            if effects.are_over(trees):
                return split, flat_tree
            holder = effects.find_holder(trees)
            why = f"{holder} holds an array that init makes, and tracing would leave a tracer there"
            del split, flat_tree, trees
        walk.forget_structures()
        effects.undo()
    raise _Untraceable(why, effects)


def _from_tree(tree: Any) -> flax.SplitTree:
    """Returns a tree with a shape for every JAX array. Raises `UnsupportedError` for a tree with tracers."""
    split = flax.split(tree)
    separate = _SeparateArrays(split)
    if any(isinstance(array, core.Tracer) for array in separate.arrays):
        flat_tree = walk.flatten_split(split)
        check_no_tracers(flat_tree.paths, flat_tree.leaves, "init")
    return separate.with_arrays([_shape(array) for array in separate.arrays])


def _flattened(split: flax.SplitTree) -> tuple[flax.SplitTree, walk.FlatTree]:
    """Returns a tree without its NNX graph objects, which would keep arrays or tracers alive, and it flattened."""
    flat_tree = walk.flatten_split(split)
    return split._replace(objects={}), flat_tree


def _array_places(sharding: Any, split: flax.SplitTree) -> list[_place.ShardingOrNone]:
    """Returns the place that `sharding` gives each JAX array of a template; see `_place.choose_shardings`."""
    flat_tree = walk.flatten_tree(split.tree)
    shaped = [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else None for leaf in flat_tree.leaves]
    places, _ = _place.choose_shardings(sharding, split.tree, flat_tree.paths, flat_tree.leaves, lambda: shaped)
    return [place for place, leaf in zip(places, shaped, strict=True) if leaf is not None]


def _joined(split: flax.SplitTree) -> Any:
    return split.join(split.tree)


def _check_same(real: walk.FlatTree, traced: walk.FlatTree) -> None:
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
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return type(leaf).__name__
    kind = "JAX" if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)} of {kind}"


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    where = array.sharding if array.committed else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where, weak_type=getattr(array, "weak_type", False))
