"""All that depends on the device: where arrays lie, how they come to the host, which transfers JAX lets through."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._core.boxes import box_shape

_GUARDS = ("host_to_device", "device_to_device", "device_to_host")
_OF_IMPLICIT_ONES = ("disallow", "log")  # and not "disallow_explicit"


def start_copies(arrays: list[Any]) -> Iterator[Any]:
    """Begins all device-to-host copies at once, into pinned memory where the backend has it."""
    pinned = {n: where for n, a in enumerate(arrays) if isinstance(a, jax.Array) and (where := _pinned(a.sharding))}
    if pinned:
        moved = jax.device_put([arrays[n] for n in pinned], list(pinned.values()))
        for n, copy in zip(pinned, moved, strict=True):
            arrays[n] = copy
    for n, array in enumerate(arrays):
        if isinstance(array, jax.Array) and n not in pinned:
            array.copy_to_host_async()
    arrays.reverse()
    while arrays:
        yield arrays.pop()  # and let go of it: what was collected is not to be held twice


def _pinned(sharding: Any) -> Any:
    """The same sharding in pinned host memory; None on CPUs and where there is no such memory."""
    device = next(iter(sharding.device_set))
    if device.platform == "cpu" or all(memory.kind != "pinned_host" for memory in device.addressable_memories()):
        return None
    return sharding.with_memory_kind("pinned_host")


def part_of(array: jax.Array, box: Sequence[tuple[int, int]]) -> jax.Array:
    """A box of an array, cut out on its device. Values are moved, whatever they are: nothing looks for NaN in them.

    Indices are of 64 bits: those of 32 wrap around beyond 2^31 elements, without an error.
    """
    with jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False):
        return jax.lax.dynamic_slice(array, [np.int64(start) for start, _ in box], box_shape(tuple(box)))


def on_cpu(sharding: jax.sharding.Sharding) -> bool:
    """Whether arrays of this sharding lie in the memory of the host."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):  # which takes longer to look up than to ask
        (device,) = sharding.device_set
        return device.platform == "cpu"
    return _all_on_cpu(sharding)


@functools.lru_cache(maxsize=512)
def _all_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


@contextlib.contextmanager
def explicit() -> Iterator[None]:
    """Allows transfers where JAX forbids implicit ones alone: a call of save or restore asks for them."""
    with contextlib.ExitStack() as stack:
        for guard in _GUARDS:
            if getattr(jax.config, f"jax_transfer_guard_{guard}", None) in _OF_IMPLICIT_ONES:
                stack.enter_context(getattr(jax, f"transfer_guard_{guard}")("allow"))
        yield
