"""Describes the leaves of a tree that is saved: their kinds, their entries, and the arrays that hold their bytes."""

import functools
import math
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import core, export, stages
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from .._core import casts, dtypes, migration_hints, quantized
from .._core.boxes import Box, box_shape, full_box, local_shards, slice_boxes
from .._core.entries import ArrayEntry, Entry, StatesEntry, ValueEntry
from .._core.lazy import LazyArray
from .._core.leaf_paths import join_names
from .._core.values import encode
from ..errors import UnsupportedError
from . import iterators, placements, state_methods
from .devices import fetch, on_host

# Leaves that are a part of the program: functions, traced and compiled code, dtypes and structures.
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
    Jaxpr,
    ClosedJaxpr,
    Primitive,
    stages.Traced,
    stages.Lowered,
    stages.Compiled,
    export.Exported,
    np.dtype,
    jax.tree_util.PyTreeDef,
)
SLICE_BYTES = 16 << 20  # bytes of an array in a checkpoint that are read at a time
# Leaves that only mark the place of an array that is shared from elsewhere in the tree.
_PLACEHOLDERS = ("equinox.nn._shared.SharedNode",)


class LocalShard(msgspec.Struct, frozen=True, gc=False):
    """A part of an array leaf that this process has. The array that holds it is kept separately.

    leaf: the number of the leaf.
    box: the part of the array.
    dtype: the stored dtype.
    nbytes: the size as stored, in bytes.
    needs_copy: True if the bytes must be copied before they are written. They are on a device, or have another layout
        or dtype, or the caller may change them.
    piece: the piece that this shard is a part of, if the piece is too large to be read at once. All shards of a piece
        are next to each other in the list of shards.
    path: the path of the leaf, for errors.
    for_second_copy: True if this process stages the shard only to write a second copy of the file of another process.
    """

    leaf: int
    box: Box
    dtype: Any
    nbytes: int
    needs_copy: bool
    piece: Box | None = None
    path: str = ""
    for_second_copy: bool = False


class Catalogue(NamedTuple):
    """The leaves of a tree and their places, without their bytes. Leaves are known by their numbers in tree order.

    tied: maps a leaf to the earlier leaf that is the same array object.
    shardings: the shardings of the leaves that are spread over devices.
    global_leaves: the leaves of which this process has only a part, or nothing.
    places: the place of every JAX array as JSON (see `placements.placement_to_json`), and None for other leaves.
    """

    entries: Sequence[Entry]
    tied: Mapping[int, int]
    shardings: Mapping[int, jax.sharding.Sharding]
    global_leaves: Collection[int]
    places: Sequence[Mapping[str, Any] | None]
    static: Mapping[str, Mapping[str, Any]] = {}  # see `walk.FlatTree`, also for `boxes`
    boxes: Mapping[str, Sequence[tuple[str, str]]] = {}


class Described(NamedTuple):
    """The catalogue of a tree, the distinct shards that this process has of it, and the array that holds each shard.

    The shards are in the order in which one process would write all of them. When a structure is saved again, `shards`
    is the same object, so that results that depend on it can be cached. So it must not be changed, nor the catalogue.
    """

    catalogue: Catalogue
    shards: tuple[LocalShard, ...]
    data: list[Any]


class _Draft(NamedTuple):
    """The parts of a `Described` while it is made."""

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


def describe_leaves(
    paths: Sequence[str],
    leaves: Sequence[Any],
    *,
    dtype: Any = None,
    detach: bool = False,
    single_process: bool = True,
    collective: bool = False,
) -> Described:
    """Describes a flattened tree.

    dtype: what floating-point arrays are cast to, except those of quantized weights.
    detach: True if NumPy arrays must be copied, because the caller continues while they are written.
    single_process: True if the job has only this process.
    collective: True if several processes save the tree.

    Raises one `UnsupportedError` that names every leaf that cannot be saved.
    """
    wanted = cast = None if dtype is None else dtypes.requested_dtype(dtype)
    groups = [] if wanted is None else quantized.find_groups(quantized.catalogue(paths, leaves))
    kept = {path for group in groups for path in group.members.values()}
    quantized.warn_of_kept("save", groups, wanted)
    found = _Draft([], {}, {}, set(), [None] * len(leaves), [], [])
    first_use: dict[int, int] = {}
    problems: list[str] = []
    cause: BaseException | None = None  # what an iterator's own method raised
    for n, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        try:
            kind = leaf_kind(type(leaf))
            cast = None if path in kept else wanted
            if kind == "value":
                found.entries.append(value_entry(path, leaf))
            elif kind == "entry":  # a value of an open checkpoint
                found.entries.append(leaf.at(path))
            elif kind == "iterator":
                _add_iterator(found, path, iterators.freeze(leaf), collective)
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
                    _add_lazy(found, path, leaf, cast, single_process)
                else:
                    _add_jax(found, path, kind, leaf, cast, single_process)
                first_use[id(leaf)] = n
        except UnsupportedError as error:
            problems.append(f"  {path or '(root)'}: {error}")
            cause = cause or error.__cause__
            found.entries.append(ValueEntry(path, "none"))  # A stand-in: `len(entries)` must stay the next number.
    if problems:
        count = f"{len(problems)} of {len(leaves)} leaves cannot be saved; nothing was written:"
        raise UnsupportedError("\n".join([count, *problems])) from cause
    # The shards of a piece stay together.
    keys = [write_order_key(one.nbytes if one.piece is None else _piece_nbytes(one)) for one in found.shards]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shards = tuple([found.shards[n] for n in order])
    return Described(Catalogue(*found[:5]), shards, [found.data[n] for n in order])


def value_entry(path: str, leaf: Any) -> ValueEntry:
    """Returns the entry of a plain value. Raises `UnsupportedError` for a value that cannot be written."""
    return ValueEntry(path, *encode(leaf))


def local_parts(leaf: jax.Array) -> list[tuple[Box, Any]]:
    """Returns the distinct parts of an array, or of the data of keys, on devices of this process, each with its box."""
    return local_shards(jax.random.key_data(leaf) if leaf_kind(type(leaf)) == "key" else leaf)


def write_order_key(nbytes: int) -> int:
    """Returns the sort key of a piece of `nbytes` bytes in the order of writing.

    Sizes that are multiples of 64 come first, then those that are only multiples of 32, of 16, and so on down to odd
    sizes. So every piece begins at a multiple of the largest power of two, up to 64, that divides its size. There its
    elements are aligned, because their size is a power of two that divides the size of the piece.
    """
    divisor = nbytes & -nbytes
    return -divisor if 0 < divisor < 64 else -64


def _piece_nbytes(shard: LocalShard) -> int:
    assert shard.piece is not None
    return math.prod(box_shape(shard.piece)) * np.dtype(shard.dtype).itemsize


def host_bytes(shard: LocalShard, data: Any, host_copy: Any = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of a shard that must be copied, C-ordered and little-endian, in memory of their own.

    data: the array that holds the shard.
    host_copy: a copy of that array on the host, if one was made.
    """
    array = fetch(data) if host_copy is None else np.asarray(host_copy)
    if array.dtype != shard.dtype or not array.flags.c_contiguous or isinstance(data, np.ndarray):
        array = casts.cast(array, shard.dtype, shard.path)
    return dtypes.defined_bytes(array).reshape(-1).view(np.uint8)


def _add_lazy(found: _Draft, path: str, array: LazyArray, cast: Any, single_process: bool) -> None:
    entry = array.entry
    stored, text, _ = _storage(array.dtype, None if entry.type == "key" else cast)
    leaf = len(found.entries)
    found.places[leaf] = array.place
    found.entries.append(ArrayEntry(path, entry.type, text, entry.shape, entry.impl))
    box = full_box(array.shape)
    for part in slice_boxes(array.shape, stored.itemsize, SLICE_BYTES) if single_process else (box,):
        nbytes = math.prod(box_shape(part)) * stored.itemsize
        found.add(LocalShard(leaf, part, stored, nbytes, True, box, path), array.part(part))


def _add_iterator(found: _Draft, path: str, frozen: iterators.Frozen, collective: bool) -> None:
    entry = iterators.entry_of(path, frozen, several=collective)
    if isinstance(entry, StatesEntry):
        data = frozen.state.data
        found.add(LocalShard(len(found.entries), entry.box(0), data.dtype, data.nbytes, False), data)
    found.entries.append(entry)


def _add_numpy(found: _Draft, path: str, kind: Any, array: np.ndarray, cast: Any, detach: bool) -> None:
    stored, text, packed = _storage(array.dtype, cast)
    leaf = len(found.entries)
    found.places[leaf] = placements.CAST if cast is not None and stored != array.dtype else None
    found.entries.append(ArrayEntry(path, kind, text, array.shape))
    needs_copy = detach or packed or array.dtype != stored or not array.flags.c_contiguous
    nbytes = array.size * stored.itemsize
    found.add(LocalShard(leaf, full_box(array.shape), stored, nbytes, needs_copy, None, path), array)


def _add_jax(found: _Draft, path: str, kind: Any, array: Any, cast: Any, single_process: bool) -> None:
    impl = ""
    _reject_deleted(array)
    own = array
    if kind == "key":
        impl, array = str(jax.random.key_impl(array)), jax.random.key_data(array)
    aval, sharding = array.aval, array.sharding  # three times as fast as asking the array for its shape and dtype
    stored, text, packed = _storage(aval.dtype, cast)
    if not (single := isinstance(sharding, jax.sharding.SingleDeviceSharding)):
        _reject_unreduced(sharding)
    leaf = len(found.entries)
    layout = placements.layout_of(own) if own.ndim > 1 else None
    found.places[leaf] = placements.placement_to_json(
        own.sharding, own.committed, layout, cast is not None and stored != aval.dtype
    )
    kind = "jax-weak" if aval.weak_type else kind
    found.entries.append(ArrayEntry(path, kind, text, aval.shape, impl))
    # The buffer of a CPU array can be written as it is, unless JAX would have to unpack its elements.
    needs_copy = packed or aval.dtype != stored or not on_host(sharding)
    if single and (single_process or sharding.is_fully_addressable):
        nbytes = math.prod(aval.shape) * stored.itemsize
        found.add(LocalShard(leaf, full_box(aval.shape), stored, nbytes, needs_copy, path=path), array)
        return
    found.shardings[leaf] = sharding
    if not (single_process or array.is_fully_addressable):
        found.global_leaves.add(leaf)
    for box, data in local_shards(array):
        _reject_deleted(data)  # JAX donates each shard on its own: a NumPy view of one keeps that one alone.
        found.add(LocalShard(leaf, box, stored, data.size * stored.itemsize, needs_copy, path=path), data)


def _reject_deleted(array: Any) -> None:
    if array.is_deleted():
        raise UnsupportedError("this array was deleted; was it donated to a jitted function before the save?")


def _reject_unreduced(sharding: jax.sharding.Sharding) -> None:
    if unreduced := getattr(getattr(sharding, "spec", None), "unreduced", None):
        axes = ", ".join(sorted(map(str, unreduced)))
        raise UnsupportedError(
            f"an array of partial sums over the mesh axes {axes} (an unreduced sharding); sum it before the save, for "
            "example with jax.reshard to a PartitionSpec without unreduced="
        )


@functools.lru_cache(maxsize=512)
def _storage(dtype: np.dtype[Any], cast: np.dtype[Any] | None) -> tuple[np.dtype[Any], str, bool]:
    """Returns the stored dtype for a dtype, its text, and True if elements are smaller than a byte."""
    stored = dtypes.to_numpy(dtypes.to_text(dtype))
    if cast is not None and dtypes.is_float(stored):
        stored = cast
    return stored, dtypes.to_text(stored), dtype.name.endswith(("int4", "int2", "int1", "float4_e2m1fn"))


@functools.lru_cache(maxsize=512)
def leaf_kind(leaf_type: type) -> str:
    """Returns how leaves of a type are saved. Raises `UnsupportedError` for types that cannot be saved."""
    name = f"{leaf_type.__module__}.{leaf_type.__qualname__}"
    if leaf_type in (bool, int, float, complex, str, bytes, type(None)):
        return "value"
    if issubclass(leaf_type, core.Tracer):
        raise UnsupportedError("a tracer: call save outside of jit, grad and vmap")
    if issubclass(leaf_type, np.generic):
        return "numpy-scalar"
    if issubclass(leaf_type, np.ndarray):
        if leaf_type is not np.ndarray:
            if issubclass(leaf_type, np.ma.MaskedArray):
                raise UnsupportedError(
                    f"{name}; save x.filled(…), or x.data and numpy.ma.getmaskarray(x) as two leaves"
                )
            raise UnsupportedError(
                f"{name}, a subclass of numpy.ndarray, which would be restored as a plain array; save that array, "
                "numpy.asarray(x), and what the class adds (such as a unit) as leaves of their own"
            )
        return "numpy"
    if leaf_type is LazyArray:
        return "lazy"
    if leaf_type is ValueEntry:
        return "entry"
    if leaf_type is jax.ShapeDtypeStruct:
        raise UnsupportedError(
            "a jax.ShapeDtypeStruct, which has no values; save the arrays that restore returns for it, or that the "
            "function given to jax.eval_shape returns"
        )
    if leaf_type.__name__ == "PRNGKeyArray":
        return "key"
    if isinstance(leaf_type, type(jax.Array)) or issubclass(leaf_type, jax.Array):
        return "jax"
    if issubclass(leaf_type, _FUNCTIONS) or issubclass(leaf_type, functools.partial) or name in _PLACEHOLDERS:
        return "function"
    if state_methods.is_iterator(leaf_type):
        return "iterator"
    if answer := migration_hints.leaf_hint(leaf_type):
        raise UnsupportedError(f"{name}; {answer}")
    hint = state_methods.unsupported_hint(leaf_type) or "convert it to an array, a number, text or bytes"
    raise UnsupportedError(f"{name}; {hint}, or leave it out of the tree")


def check_no_tracers(paths: Sequence[str], leaves: Sequence[Any], name: str) -> None:
    """Raises `UnsupportedError` for a template with tracers, because these have neither values nor a place."""
    kinds = {kind for kind in set(map(type, leaves)) if issubclass(kind, core.Tracer)}
    if kinds:
        found = tuple(path or "(root)" for path, leaf in zip(paths, leaves, strict=True) if type(leaf) in kinds)
        raise UnsupportedError(
            f"{name}: expected a template of arrays or shapes, found tracers: {join_names(found)}; call restore "
            "outside of "
            "jit, grad and vmap, and pass the arrays to the function"
        )


def _function_name(leaf: Any) -> str:
    if isinstance(leaf, functools.partial):
        if not is_function(leaf):
            raise UnsupportedError("a functools.partial of something that is not a plain function")
        return _function_name(leaf.func)
    if isinstance(leaf, np.dtype):
        return leaf.name
    return getattr(leaf, "__qualname__", None) or getattr(leaf, "__name__", None) or type(leaf).__name__


def is_function(leaf: Any) -> bool:
    """Returns True if a leaf is code or a placeholder. Both mean that the tree has no array at this place."""
    while type(leaf) is functools.partial:
        leaf = leaf.func
    return _is_function_type(type(leaf))


@functools.lru_cache(maxsize=512)
def _is_function_type(leaf_type: type) -> bool:
    return issubclass(leaf_type, _FUNCTIONS) or f"{leaf_type.__module__}.{leaf_type.__qualname__}" in _PLACEHOLDERS
