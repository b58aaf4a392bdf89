"""What a leaf may be, and where its bytes are at the moment of a save."""

import functools
import math
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import core
from jax.custom_batching import custom_vmap

from .._core import dtypes
from .._core.boxes import Box, extent, in_slices, local_shards, whole
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.lazy import LazyArray
from .._core.values import encode
from ..errors import UnsupportedError
from . import iterators

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
_SLICE = 16 << 20  # bytes of an array in a checkpoint that are read at a time
# Leaves that only stand where an array is shared from elsewhere in the tree.
_PLACEHOLDERS = ("equinox.nn._shared.SharedNode",)


class Source(msgspec.Struct, gc=False):
    """A part of an array leaf that this process has.

    `data` is the array that holds it until its bytes are handed over, and `dtype` what is stored; `copies` says
    that the bytes must be copied first: from a device, or because they are laid out otherwise, or because the
    caller may change them. A piece that is too large to be handed over at once is that of several sources, one
    after the other, and their `piece`.
    """

    leaf: int
    box: Box
    data: Any
    dtype: Any
    nbytes: int
    copies: bool
    piece: Box | None = None


class Content(NamedTuple):
    """Everything a save writes, described before anything is copied.

    `entries` are in tree order. `tied` maps a leaf to the earlier one that is the same array object, and
    `shardings` the leaves that are spread over devices to how; `global_leaves` are those of them of which this
    process has a part only, or nothing. `sources` are what it has, each part once.
    """

    entries: list[Entry]
    tied: dict[int, int]
    shardings: dict[int, jax.sharding.Sharding]
    global_leaves: set[int]
    sources: list[Source]


def collect(
    paths: Sequence[str], leaves: Sequence[Any], *, dtype: Any = None, detach: bool = False, alone: bool = True
) -> Content:
    """Describes every leaf and finds where the bytes of the arrays are.

    `dtype` is what floating-point arrays are cast to; `detach` says that NumPy arrays must be copied because
    the caller goes on while they are written, and `alone` that the job has no other processes. Raises one
    `UnsupportedError` that names every leaf that cannot be saved.
    """
    cast = None if dtype is None else dtypes.asked(dtype)
    content = Content([], {}, {}, set(), [])
    first_use: dict[int, int] = {}
    problems: list[str] = []
    for n, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        try:
            kind = _kind(type(leaf))
            if kind == "value":
                content.entries.append(ValueEntry(path, *encode(leaf)))
            elif kind == "entry":  # of a checkpoint
                content.entries.append(leaf.at(path))
            elif kind == "iterator":
                content.entries.append(iterators.together(path, [iterators.state_of(leaf)]))
            elif kind == "function":
                content.entries.append(ValueEntry(path, "function", _function_name(leaf)))
            elif id(leaf) in first_use:
                content.tied[n] = first_use[id(leaf)]
                content.entries.append(content.entries[content.tied[n]].at(path))
            else:
                if kind in ("numpy", "numpy-scalar"):
                    _add_numpy(content, path, kind, np.asarray(leaf), cast, detach)
                elif kind == "lazy":
                    _add_lazy(content, path, leaf, cast, alone)
                else:
                    _add_jax(content, path, kind, leaf, cast, alone)
                first_use[id(leaf)] = n
        except UnsupportedError as error:
            problems.append(f"  {path or '(root)'}: {error}")
            content.entries.append(ValueEntry(path, "none"))  # keeps the positions of the others
    if problems:
        count = f"{len(problems)} of {len(leaves)} leaves cannot be saved; nothing was written:"
        raise UnsupportedError("\n".join([count, *problems]))
    return content


def host_bytes(source: Source, data: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a source that must be copied, C-ordered and little-endian, in memory of their own.

    `data` is the source's array, or what became of it on the host.
    """
    array = np.asarray(data)
    if array.dtype != source.dtype or not array.flags.c_contiguous or isinstance(source.data, np.ndarray):
        array = dtypes.cast(array, source.dtype)
    return dtypes.whole_bytes(array).reshape(-1).view(np.uint8)


def lazy_sources(leaf: int, array: LazyArray, stored: np.dtype[Any], *, sliced: bool = True) -> Iterator[Source]:
    """The parts of an array that is still in a checkpoint, each of which is read when its bytes are wanted."""
    box = whole(array.shape)
    for part in in_slices(array.shape, stored.itemsize, _SLICE) if sliced else (box,):
        yield Source(leaf, part, array.part(part), stored, math.prod(extent(part)) * stored.itemsize, True, box)


def _add_lazy(content: Content, path: str, array: LazyArray, cast: Any, alone: bool) -> None:
    entry = array.entry
    stored, text, _ = _storage(array.dtype, None if entry.type == "key" else cast)
    leaf = len(content.entries)
    content.entries.append(ArrayEntry(path, entry.type, text, entry.shape, entry.impl))
    content.sources.extend(lazy_sources(leaf, array, stored, sliced=alone))


def _add_numpy(content: Content, path: str, kind: Any, array: np.ndarray, cast: Any, detach: bool) -> None:
    stored, text, packed = _storage(array.dtype, cast)
    leaf = len(content.entries)
    content.entries.append(ArrayEntry(path, kind, text, array.shape))
    copies = detach or packed or array.dtype != stored or not array.flags.c_contiguous
    content.sources.append(Source(leaf, whole(array.shape), array, stored, array.size * stored.itemsize, copies))


def _add_jax(content: Content, path: str, kind: Any, array: Any, cast: Any, alone: bool) -> None:
    impl = ""
    if array.is_deleted():
        raise UnsupportedError("this array was deleted; was it donated to a jitted function before the save?")
    if kind == "key":
        impl, array = str(jax.random.key_impl(array)), jax.random.key_data(array)
    aval, sharding = array.aval, array.sharding  # a third of the time of asking the array for each by itself
    stored, text, packed = _storage(aval.dtype, cast)
    leaf = len(content.entries)
    kind = "jax-weak" if aval.weak_type else kind
    content.entries.append(ArrayEntry(path, kind, text, aval.shape, impl))
    # A CPU array's buffer can be looked at as it is, unless JAX would have to unpack it.
    copies = packed or aval.dtype != stored or not _on_cpu(sharding)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding) and (alone or sharding.is_fully_addressable):
        nbytes = math.prod(aval.shape) * stored.itemsize
        content.sources.append(Source(leaf, whole(aval.shape), array, stored, nbytes, copies))
        return
    content.shardings[leaf] = sharding
    if not (alone or array.is_fully_addressable):
        content.global_leaves.add(leaf)
    for box, data in local_shards(array):
        content.sources.append(Source(leaf, box, data, stored, data.size * stored.itemsize, copies))


@functools.lru_cache(maxsize=512)
def _storage(dtype: np.dtype[Any], cast: np.dtype[Any] | None) -> tuple[np.dtype[Any], str, bool]:
    """What is stored for a dtype, its text, and whether elements are smaller than their byte."""
    stored = dtypes.to_numpy(dtypes.to_text(dtype))
    if cast is not None and dtypes.is_float(stored):
        stored = cast
    return stored, dtypes.to_text(stored), dtype.name.endswith(("int4", "int2", "int1", "float4_e2m1fn"))


def _on_cpu(sharding: jax.sharding.Sharding) -> bool:
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):  # which takes longer to look up than to ask
        (device,) = sharding.device_set
        return device.platform == "cpu"
    return _all_on_cpu(sharding)


@functools.lru_cache(maxsize=512)
def _all_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


@functools.lru_cache(maxsize=512)
def _kind(leaf_type: type) -> str:
    """How leaves of a type are saved. Raises `UnsupportedError` for those that are not."""
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
    hint = iterators.why_not(leaf_type) or "convert it to an array, a number, text or bytes"
    raise UnsupportedError(f"{name}; {hint}, or leave it out of the tree")


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
