"""Finds the methods that get and set the states of leaves: data iterators and generators of random numbers.

An iterator has the methods `get_state` and `set_state`, like those of Grain, or `state_dict` and `load_state_dict`, or
`getstate` and `setstate`, like `random.Random`. A generator of NumPy and a `NumpyIterator` of TensorFlow are iterators
too.
"""

import enum
import functools
import logging
import operator
import random
import sys
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core.entries import IteratorInfo

_log = logging.getLogger("treering")
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"), ("getstate", "setstate"))
# Libraries whose iterable objects are no pipelines of data.
_NO_PIPELINES = ("builtins", "collections", "equinox", "flax", "jax", "jaxlib", "numpy", "optax")
_CONTAINERS = (str, bytes, list, tuple, Mapping, Set, enum.Flag)
# The class of `tf.data.Dataset.as_numpy_iterator()`. It is recognized by its name, because other classes, such as those
# that save entire models, have methods `save` and `restore` too.
_TENSORFLOW_TYPE = ("tensorflow.python.data.ops.dataset_ops", "NumpyIterator")
_SPAWNED = "n_children_spawned"  # NumPy's name for the number of generators spawned by one; its state lacks it


class StateMethods(NamedTuple):
    """The functions that get and set the state of leaves of a type, and the names of their methods.

    is_immediate: True if a state that was set is known to be the leaf's state from then on.
    """

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], object]
    names: tuple[str, str]
    is_immediate: bool = False


def is_iterator(leaf_type: type) -> bool:
    """Returns True if leaves of a type have a state to save."""
    return find_methods(leaf_type) is not None


def is_generator(leaf_type: type) -> bool:
    """Returns True if leaves of a type generate random numbers, and not data."""
    return issubclass(leaf_type, np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random)


def unsupported_hint(leaf_type: type) -> str:
    """Returns advice for data and iterators that have no state to save, or "" for a type that is neither."""
    if hint := _array_hint(leaf_type):
        return hint
    if leaf_type.__module__.startswith("tensorflow.python.data."):
        return "put as_numpy_iterator() of the dataset into the tree, which has a state"
    methods = "get_state and set_state, or state_dict and load_state_dict (Grain's iterators have the former)"
    instead = "or save how much of it was used as a number, and begin from there"
    if hasattr(leaf_type, "__next__"):
        return f"an iterator needs the methods {methods}; give it these, {instead}"
    # `hasattr` would also find the `__iter__` of a metaclass, which makes an enum itself iterable but not its members.
    iterable = any("__iter__" in vars(base) for base in leaf_type.__mro__)
    other = issubclass(leaf_type, _CONTAINERS) or hasattr(leaf_type, "__array__")
    if iterable and not other and leaf_type.__module__.partition(".")[0] not in _NO_PIPELINES:
        return f"put iter(…) of it into the tree, if that has the methods {methods}, {instead}"
    return ""


@functools.lru_cache(maxsize=512)
def mutable_hint(leaf_type: type) -> str:
    """Returns advice for a mutable array of JAX, a hijax Variable of Flax or a tensor of PyTorch, or "".

    They have a shape and a dtype, and yet are no arrays: JAX returns the same object from `device_get`, so a save in
    the background would write what it is later. Tensors have dtypes of their own.
    """
    if leaf_type.__name__ == "HijaxVariable" and leaf_type.__module__.startswith("flax."):
        return "nnx.to_pure_dict(nnx.state(model)) has its value, and nnx.replace_by_pure_dict takes it back"
    if issubclass(leaf_type, getattr(jax, "Ref", ())):
        return "use its value, x[...] or jax.freeze(x); for a state of NNX, nnx.to_pure_dict(state) has all values"
    if leaf_type.__module__.partition(".")[0] == "torch" and hasattr(leaf_type, "numpy"):
        return (
            "convert it to an array: x.numpy(force=True), or x.float().numpy(force=True) of bfloat16; on the device "
            "meta it has no values, so load them first"
        )
    return ""


def _array_hint(leaf_type: type) -> str:
    if issubclass(leaf_type, jax.sharding.PartitionSpec | jax.sharding.Sharding | jax.sharding.Mesh):
        return "each array is saved with its sharding, and the program makes its mesh; so it need not be saved"
    return mutable_hint(leaf_type)


@functools.lru_cache(maxsize=512)
def info_of(leaf_type: type) -> IteratorInfo:
    """Returns what is recorded next to the state of a leaf: its class, and the version of the library that has it."""
    library = leaf_type.__module__.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return IteratorInfo(leaf_type.__module__, leaf_type.__qualname__, version if isinstance(version, str) else "")


@functools.lru_cache(maxsize=512)
def find_methods(leaf_type: type) -> StateMethods | None:
    """Returns the methods of leaves of a type, or None if they have no state."""
    if issubclass(leaf_type, np.random.Generator | np.random.BitGenerator):
        return StateMethods(_numpy_state, _set_numpy_state, ("state", "state"), True)
    if any((base.__module__, base.__qualname__) == _TENSORFLOW_TYPE for base in leaf_type.__mro__):
        return StateMethods(_tensorflow_state, functools.partial(_call, "restore"), ("save", "restore"), True)
    for names in _METHODS:
        if all(callable(getattr(leaf_type, name, None)) for name in names):
            put = functools.partial(_call, names[1])
            return StateMethods(operator.methodcaller(names[0]), put, names, is_generator(leaf_type))
    return None


def _call(method: str, leaf: Any, state: Any) -> None:
    getattr(leaf, method)(state)
    # The `Loader` of torchdata.nodes keeps an iterator that its state_dict() has made, and would use that one once more
    # instead of the state that it has just been given.
    if getattr(leaf, "_iter_for_state_dict", False) is True:
        leaf._iter_for_state_dict = False


def _tensorflow_state(iterator: Any) -> bytes:
    return iterator.save().numpy()  # the bytes in a tensor of text without axes


def _numpy_state(generator: Any) -> dict[str, Any]:
    bits = getattr(generator, "bit_generator", generator)
    return {**bits.state, _SPAWNED: getattr(bits.seed_seq, _SPAWNED, 0)}


def _set_numpy_state(generator: Any, state: dict[str, Any]) -> None:
    bits = getattr(generator, "bit_generator", generator)
    spawned = state.pop(_SPAWNED)
    bits.state = state
    rest = spawned - getattr(bits.seed_seq, _SPAWNED, 0)
    if rest > 0:
        bits.seed_seq.spawn(rest)  # so that the next spawned generator is a new one
    elif rest < 0:
        _log.warning(
            "a generator of NumPy had spawned %d generators when it was saved and has now spawned %d, which cannot be "
            "undone: the next ones are not those that it would have spawned then; restore into a new generator",
            spawned,
            spawned - rest,
        )
