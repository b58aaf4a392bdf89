"""The kinds of leaves, and where their bytes are at the moment of a save."""

import functools
import math
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import core
from jax.custom_batching import custom_vmap

from .._core import dtypes, habits
from .._core.boxes import Box, box_shape, in_slices, local_shards, whole
from .._core.entries import ArrayEntry, Entry, StatesEntry, ValueEntry
from .._core.lazy import LazyArray
from .._core.leaf_paths import few
from .._core.states import Packed
from .._core.values import encode
from ..errors import UnsupportedError
from . import iterators, placements
from .devices import fetched, on_host

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
    type(jax.jit(lambda: None)),
    jax.custom_jvp,
    jax.custom_vjp,
    custom_vmap,
    np.ufunc,
    jnp.ufunc,
)
SLICE_BYTES = 16 << 20  # bytes of an array in a checkpoint that are read at a time
# Leaves that only stand where an array is shared from elsewhere in the tree.
_PLACEHOLDERS = ("equinox.nn._shared.SharedNode",)


class LocalShard(msgspec.Struct, frozen=True, gc=False):
    """A part of an array leaf that this process has; the array that holds it is kept beside.

    `dtype` is the stored dtype; `copies` says that the bytes must be copied before they are written: from a device, or
    because they are laid out otherwise, or because the caller may change them. A piece that is too large to be staged
    at once is split into several shards, one after the other; it is their `piece`.
    """

    leaf: int
    box: Box
    dtype: Any
    nbytes: int
    copies: bool
    piece: Box | None = None


class Catalogue(NamedTuple):
    """The leaves of a tree, by their numbers in tree order, and where their bytes lie; not the bytes.

    `tied` maps a leaf to the earlier one that is the same array object, and `shardings` maps the leaves that are spread
    over devices to their shardings; `global_leaves` are those of which this process has a part only, or nothing.
    `places` has the place of every JAX array as JSON (see `placements.describe`), and None for other leaves.
    """

    entries: Sequence[Entry]
    tied: Mapping[int, int]
    shardings: Mapping[int, jax.sharding.Sharding]
    global_leaves: Collection[int]
    places: Sequence[Mapping[str, Any] | None]
    static: Mapping[str, Mapping[str, Any]] = {}  # see `walk.Walk`


class Described(NamedTuple):
    """The catalogue of a tree, the shards that this process has of it, each once, and the array that holds each.

    The shards are in the order in which one process would write all of them. The same structure has the same object of
    them whenever it is saved, so that what follows from it is worked out once; nobody changes it, or the catalogue.
    """

    catalogue: Catalogue
    shards: tuple[LocalShard, ...]
    data: list[Any]


class _Found(NamedTuple):
    """What is described while it is made."""

    entries: list[Entry]
    tied: dict[int, int]
    shardings: dict[int, jax.sharding.Sharding]
    global_leaves: set[int]
    places: list[Mapping[str, Any] | None]
    shards: list[LocalShard]
    data: list[Any]

    def add(self, shard: LocalShard, data: Any) -> None:
        self.shards.append(shard)
        self.data.append(data)


def describe(
    paths: Sequence[str],
    leaves: Sequence[Any],
    *,
    dtype: Any = None,
    detach: bool = False,
    alone: bool = True,
    together: bool = False,
) -> Described:
    """Describes a flattened tree.

    `dtype` is what floating-point arrays are cast to; `detach` says that NumPy arrays must be copied because
    the caller goes on while they are written, `alone` that the job has no other processes, and `together` that several
    processes save the tree. Raises one `UnsupportedError` that names every leaf that cannot be saved.
    """
    cast = None if dtype is None else dtypes.asked(dtype)
    found = _Found([], {}, {}, set(), [None] * len(leaves), [], [])
    first_use: dict[int, int] = {}
    problems: list[str] = []
    for n, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        try:
            kind = kind_of(type(leaf))
            if kind == "value":
                found.entries.append(value_entry(path, leaf))
            elif kind == "entry":  # of a checkpoint
                found.entries.append(leaf.at(path))
            elif kind == "iterator":
                _add_iterator(found, path, iterators.state_of(leaf), together)
            elif kind == "function":
                found.entries.append(ValueEntry(path, "function", _function_name(leaf)))
            elif id(leaf) in first_use:
                found.tied[n] = first_use[id(leaf)]
                found.places[n] = found.places[found.tied[n]]
                found.entries.append(found.entries[found.tied[n]].at(path))
            else:
                if kind in ("numpy", "numpy-scalar"):
                    _add_numpy(found, path, kind, np.asarray(leaf), cast, detach)
                elif kind == "lazy":
                    _add_lazy(found, path, leaf, cast, alone)
                else:
                    _add_jax(found, path, kind, leaf, cast, alone)
                first_use[id(leaf)] = n
        except UnsupportedError as error:
            problems.append(f"  {path or '(root)'}: {error}")
            found.entries.append(ValueEntry(path, "none"))  # keeps the positions of the others
    if problems:
        count = f"{len(problems)} of {len(leaves)} leaves cannot be saved; nothing was written:"
        raise UnsupportedError("\n".join([count, *problems]))
    order = sorted(range(len(found.shards)), key=lambda n: _misalignment(found.shards[n]))
    shards = tuple(found.shards[n] for n in order)
    return Described(Catalogue(*found[:5]), shards, [found.data[n] for n in order])


def value_entry(path: str, leaf: Any) -> ValueEntry:
    """The entry of a plain value. Raises `UnsupportedError` for one that cannot be written."""
    return ValueEntry(path, *encode(leaf))


def parts_of(leaf: jax.Array) -> list[tuple[Box, Any]]:
    """The distinct parts of an array, or of the data of keys, that lie here, each with its box."""
    return local_shards(jax.random.key_data(leaf) if kind_of(type(leaf)) == "key" else leaf)


def alignment(nbytes: int) -> int:
    """The sort key of a piece of `nbytes` bytes in the order of writing.

    Multiples of 64 bytes come first, then falling powers of two, so that each piece begins at an address from
    which its elements can be used.
    """
    return -min(nbytes & -nbytes, 64) if nbytes else -64


def _misalignment(shard: LocalShard) -> int:
    """The sort key of the piece that a shard is a part of, so that the parts stay together."""
    if shard.piece is None:
        return alignment(shard.nbytes)
    return alignment(math.prod(box_shape(shard.piece)) * np.dtype(shard.dtype).itemsize)


def host_bytes(shard: LocalShard, data: Any, on_host: Any = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a shard that must be copied, C-ordered and little-endian, in memory of their own.

    `data` is the array that holds the shard, and `on_host` a copy of it on the host if there is one.
    """
    array = fetched(data) if on_host is None else np.asarray(on_host)
    if array.dtype != shard.dtype or not array.flags.c_contiguous or isinstance(data, np.ndarray):
        array = dtypes.cast(array, shard.dtype)
    return dtypes.whole_bytes(array).reshape(-1).view(np.uint8)


def _add_lazy(found: _Found, path: str, array: LazyArray, cast: Any, alone: bool) -> None:
    entry = array.entry
    stored, text, _ = _storage(array.dtype, None if entry.type == "key" else cast)
    leaf = len(found.entries)
    found.places[leaf] = array.place
    found.entries.append(ArrayEntry(path, entry.type, text, entry.shape, entry.impl))
    box = whole(array.shape)
    for part in in_slices(array.shape, stored.itemsize, SLICE_BYTES) if alone else (box,):
        nbytes = math.prod(box_shape(part)) * stored.itemsize
        found.add(LocalShard(leaf, part, stored, nbytes, True, box), array.part(part))


def _add_iterator(found: _Found, path: str, state: Packed, together: bool) -> None:
    entry = iterators.entry_of(path, state, several=together)
    if isinstance(entry, StatesEntry):
        found.add(LocalShard(len(found.entries), entry.box(0), state.dtype, state.nbytes, False), state)
    found.entries.append(entry)


def _add_numpy(found: _Found, path: str, kind: Any, array: np.ndarray, cast: Any, detach: bool) -> None:
    stored, text, packed = _storage(array.dtype, cast)
    leaf = len(found.entries)
    found.places[leaf] = placements.CAST if cast is not None and stored != array.dtype else None
    found.entries.append(ArrayEntry(path, kind, text, array.shape))
    copies = detach or packed or array.dtype != stored or not array.flags.c_contiguous
    found.add(LocalShard(leaf, whole(array.shape), stored, array.size * stored.itemsize, copies), array)


def _add_jax(found: _Found, path: str, kind: Any, array: Any, cast: Any, alone: bool) -> None:
    impl = ""
    if array.is_deleted():
        raise UnsupportedError("this array was deleted; was it donated to a jitted function before the save?")
    layout = placements.layout_of(array) if array.ndim > 1 else None
    at, committed = array.sharding, array.committed
    if kind == "key":
        impl, array = str(jax.random.key_impl(array)), jax.random.key_data(array)
    aval, sharding = array.aval, array.sharding  # a third of the time of asking the array for each by itself
    stored, text, packed = _storage(aval.dtype, cast)
    if not (single := isinstance(sharding, jax.sharding.SingleDeviceSharding)):
        _check_reduced(sharding)
    leaf = len(found.entries)
    found.places[leaf] = placements.describe(at, committed, layout, cast is not None and stored != aval.dtype)
    kind = "jax-weak" if aval.weak_type else kind
    found.entries.append(ArrayEntry(path, kind, text, aval.shape, impl))
    # A CPU array's buffer can be looked at as it is, unless JAX would have to unpack it.
    copies = packed or aval.dtype != stored or not on_host(sharding)
    if single and (alone or sharding.is_fully_addressable):
        nbytes = math.prod(aval.shape) * stored.itemsize
        found.add(LocalShard(leaf, whole(aval.shape), stored, nbytes, copies), array)
        return
    found.shardings[leaf] = sharding
    if not (alone or array.is_fully_addressable):
        found.global_leaves.add(leaf)
    for box, data in local_shards(array):
        found.add(LocalShard(leaf, box, stored, data.size * stored.itemsize, copies), data)


def _check_reduced(sharding: jax.sharding.Sharding) -> None:
    if unreduced := getattr(getattr(sharding, "spec", None), "unreduced", None):
        axes = ", ".join(sorted(map(str, unreduced)))
        raise UnsupportedError(
            f"an array of partial sums over the mesh axes {axes} (an unreduced sharding); add them up first, for "
            "example by jax.reshard to a PartitionSpec without unreduced="
        )


@functools.lru_cache(maxsize=512)
def _storage(dtype: np.dtype[Any], cast: np.dtype[Any] | None) -> tuple[np.dtype[Any], str, bool]:
    """The stored dtype for a dtype, its text, and whether elements are smaller than a byte."""
    stored = dtypes.to_numpy(dtypes.to_text(dtype))
    if cast is not None and dtypes.is_float(stored):
        stored = cast
    return stored, dtypes.to_text(stored), dtype.name.endswith(("int4", "int2", "int1", "float4_e2m1fn"))


@functools.lru_cache(maxsize=512)
def kind_of(leaf_type: type) -> str:
    """The way in which leaves of a type are saved. Raises `UnsupportedError` for types that are not."""
    name = f"{leaf_type.__module__}.{leaf_type.__qualname__}"
    if leaf_type in (bool, int, float, complex, str, bytes, type(None)):
        return "value"
    if issubclass(leaf_type, core.Tracer):
        raise UnsupportedError("a tracer: call save outside of jit, grad and vmap")
    if issubclass(leaf_type, np.generic):
        return "numpy-scalar"
    if issubclass(leaf_type, np.ndarray):
        if leaf_type is not np.ndarray:
            raise UnsupportedError(f"{name}, a subclass of numpy.ndarray that would not come back; use numpy.asarray")
        return "numpy"
    if leaf_type is LazyArray:
        return "lazy"
    if leaf_type is ValueEntry:
        return "entry"
    if leaf_type is jax.ShapeDtypeStruct:
        raise UnsupportedError("a jax.ShapeDtypeStruct, which has no values")
    if leaf_type.__name__ == "PRNGKeyArray":
        return "key"
    if isinstance(leaf_type, type(jax.Array)) or issubclass(leaf_type, jax.Array):
        return "jax"
    if issubclass(leaf_type, _FUNCTIONS) or issubclass(leaf_type, functools.partial) or name in _PLACEHOLDERS:
        return "function"
    if iterators.is_iterator(leaf_type):
        return "iterator"
    if answer := habits.of_leaf(leaf_type):
        raise UnsupportedError(f"{name}; {answer}")
    hint = iterators.why_not(leaf_type) or "convert it to an array, a number, text or bytes"
    raise UnsupportedError(f"{name}; {hint}, or leave it out of the tree")


def check_no_tracers(paths: Sequence[str], leaves: Sequence[Any], name: str) -> None:
    """Raises `UnsupportedError` for a template with tracers, which have neither values nor a place."""
    kinds = {kind for kind in set(map(type, leaves)) if issubclass(kind, core.Tracer)}
    if kinds:
        found = tuple(path or "(root)" for path, leaf in zip(paths, leaves, strict=True) if type(leaf) in kinds)
        raise UnsupportedError(
            f"{name}: expected a template of arrays or shapes, found tracers: {few(found)}; call restore outside of "
            "jit, grad and vmap, and pass the arrays to the function"
        )


def _function_name(leaf: Any) -> str:
    if isinstance(leaf, functools.partial):
        if not is_function(leaf):
            raise UnsupportedError("a functools.partial of something that is not a plain function")
        return _function_name(leaf.func)
    return getattr(leaf, "__qualname__", None) or getattr(leaf, "__name__", None) or type(leaf).__name__


def is_function(leaf: Any) -> bool:
    """Whether a leaf is a function or a placeholder, which count as "no array here"."""
    while type(leaf) is functools.partial:
        leaf = leaf.func
    return _is_function_type(type(leaf))


@functools.lru_cache(maxsize=512)
def _is_function_type(leaf_type: type) -> bool:
    return issubclass(leaf_type, _FUNCTIONS) or f"{leaf_type.__module__}.{leaf_type.__qualname__}" in _PLACEHOLDERS
