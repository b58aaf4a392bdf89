"""Digests of arrays, made on their devices, so that an array with the values of an earlier one need not be copied.

A digest has 128 bits: four sums over all elements of a hash of the element's bits and its position. The hash is the
final mix of MurmurHash3 (Austin Appleby, public domain). Digests are compared only within a process.
"""

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._core.boxes import Box
from .devices import on_host
from .leaves import LocalShard
from .placements import layout_of

_log = logging.getLogger("treering")
_MAX_BYTES = 1 << 32  # Positions have 32 bits.
_COMPILE_SECONDS = 1.0  # in a save
# An odd factor and a summand for each of the four sums.
_LANES = ((0x9E3779B1, 0x243F6A89), (0x85EBCA77, 0x85A308D3), (0xC2B2AE3D, 0x13198A2F), (0x27D4EB2F, 0x03707345))

Digest = tuple[str, tuple[Box, ...], bytes]  # the dtype, and the boxes and digests of the parts that the process has


class _DigestKind(NamedTuple):
    """Arrays of one kind share a compiled function: those whose parts have this shape, one on each of the devices."""

    shape: tuple[int, ...]
    dtype: Any
    devices: tuple[Any, ...]

    @property
    def joined(self) -> jax.ShapeDtypeStruct:
        """One array of all parts, one after the other along the first axis."""
        mesh = jax.sharding.Mesh(np.array(self.devices), ("parts",))
        shape = (len(self.devices) * self.shape[0], *self.shape[1:])
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=NamedSharding(mesh, PartitionSpec("parts")))

    def compiled(self) -> Any:
        """Returns the function that makes a digest of each part, on its device."""
        sharding: Any = self.joined.sharding
        function = jax.shard_map(_digest, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec)
        with _own_modes():
            return jax.jit(function).lower(self.joined).compile()


class DeviceDigests:
    """The digests of arrays of one run. Functions are compiled only by `compile`, which may take a second for each."""

    def __init__(self) -> None:
        self._functions: dict[_DigestKind, Any] = {}
        self._missing: set[_DigestKind] = set()

    def of(self, leaves: Collection[int], shards: Sequence[LocalShard], data: Sequence[Any]) -> dict[int, Digest]:
        """Returns the digests of the arrays on accelerators whose functions are compiled, by their leaves.

        It waits until the devices have made the arrays.

        leaves: the numbers of the wanted arrays.
        shards, data: those of the save.
        """
        boxes: dict[int, list[Box]] = {leaf: [] for leaf in leaves}
        parts: dict[int, list[Any]] = {leaf: [] for leaf in leaves}
        for shard, array in zip(shards, data, strict=True) if leaves else ():
            if shard.leaf in parts:
                boxes[shard.leaf].append(shard.box)
                parts[shard.leaf].append(array)
        begun: dict[int, Any] = {}
        try:
            for leaf, arrays in parts.items():
                if (kind := _kind(arrays)) is None:
                    continue
                if kind not in self._functions:
                    self._missing.add(kind)
                elif function := self._functions[kind]:
                    wanted: Any = kind.joined
                    joined = jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, arrays)
                    with _own_modes():
                        begun[leaf] = function(joined)
            words = jax.device_get(begun)
        except Exception as error:  # The arrays are copied as usual, which raises what is wrong with them.
            _log.info("arrays are copied from their devices although they may be unchanged: %s", error)
            return {}
        return {
            leaf: (str(parts[leaf][0].dtype), tuple(boxes[leaf]), np.asarray(own).tobytes())
            for leaf, own in words.items()
        }

    def compile(self) -> None:
        """Compiles functions that `of` did not have: at least one, and no more after a while. Does not raise.

        The save that calls this ends later, and the next one waits for it. So the others are left to later saves.
        """
        begun = time.monotonic()
        while self._missing:
            kind = self._missing.pop()
            try:
                self._functions[kind] = kind.compiled()
            except Exception as error:  # The save has succeeded.
                self._functions[kind] = None
                _log.info("unchanged arrays of %s%s are copied from their devices: %s", kind.dtype, kind.shape, error)
            if time.monotonic() - begun >= _COMPILE_SECONDS:
                return


@contextlib.contextmanager
def _own_modes() -> Iterator[None]:
    """Sets the modes of JAX in which compiled functions take arrays of all dtypes, whatever those of the caller are."""
    with jax.enable_x64(True), jax.disable_jit(False):
        yield


def _kind(parts: Sequence[Any]) -> _DigestKind | None:
    """Returns the kind of the array with these parts; None if it is not on accelerators or has no digest."""
    first = parts[0]
    if not isinstance(first, jax.Array) or on_host(first.sharding) or not 0 < first.nbytes < _MAX_BYTES:
        return None
    if not first.ndim or _bits(first.dtype) not in (8, 16, 32, 64):
        return None
    if any(part.shape != first.shape or layout_of(part) for part in parts):
        return None
    return _DigestKind(first.shape, first.dtype, tuple(part.device for part in parts))


def _bits(dtype: Any) -> int:
    """Returns the size of an element; 0 for complex numbers, whose bits JAX cannot take."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return 8
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 0
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits


def _digest(array: jax.Array) -> jax.Array:
    """Returns the digest of an array as four words, in a new first axis of one element."""
    bits = _bits(array.dtype)
    if jnp.issubdtype(array.dtype, jnp.bool_):
        words = array
    elif bits == 64:
        words = jax.lax.bitcast_convert_type(array, jnp.uint32)  # two words for each element, in a new last axis
    else:
        words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))
    words = words.astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, stride in enumerate(_strides(words.shape)):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
    # Each sum mixes the positions by itself. If all keys were multiples of one mix, the keys of some pairs of positions
    # would differ in just the highest bit in all sums. Then the signs of two equal elements could change unnoticed.
    keys = [_mixed(place * np.uint32(odd) + np.uint32(add)) for odd, add in _LANES]
    sums = [_mixed(words ^ key).sum(dtype=jnp.uint32) for key in keys]
    return jnp.stack(sums)[None]


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [int(np.prod(shape[axis + 1 :], dtype=np.uint64)) for axis in range(len(shape))]


def _mixed(words: jax.Array) -> jax.Array:
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(13)
    words *= np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
