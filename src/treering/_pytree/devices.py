"""Contains everything that depends on devices: copies to the host, transfers between processes, transfer guards."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core.boxes import box_shape
from .._core.values import encode_float
from .._threads.pool import Task
from ..errors import MismatchError

_log = logging.getLogger("treering")
_HOST_KINDS = ("pinned_host", "unpinned_host")
_GUARDS = ("host_to_device", "device_to_device", "device_to_host")
_CHECK_SECONDS = 0.25  # between checks of the peers during a transfer
_IMPLICIT_GUARDS = ("disallow", "log")  # guard levels that concern only implicit transfers; not "disallow_explicit"


def start_copies(arrays: list[Any]) -> Iterator[Any]:
    """Starts all device-to-host copies at once, in pinned memory if the backend has it and grants it.

    Yields the copies in order. No copy is the caller's own object, which would keep its host copy; see `fetch`.
    """
    originals = dict(enumerate(arrays))
    pinned = {n: where for n, a in enumerate(arrays) if isinstance(a, jax.Array) and (where := _pinned(a.sharding))}
    if pinned:
        try:
            moved = _moved([arrays[n] for n in pinned], list(pinned.values()))
        except RuntimeError as error:
            _report_refusal(error)
            pinned = {}
        else:
            for n, copy in zip(pinned, moved, strict=True):
                arrays[n] = copy
    for n, array in enumerate(arrays):
        if isinstance(array, jax.Array) and n not in pinned:
            arrays[n] = _alias(array)
            arrays[n].copy_to_host_async()
    numbers = iter(range(len(arrays)))
    refused = False
    arrays.reverse()
    while arrays:
        array, n = arrays.pop(), next(numbers)  # removed from the list, so that memory is free after the caller uses it
        original = originals.pop(n)
        if n in pinned:
            try:
                array.block_until_ready()
            except RuntimeError as error:
                if not refused:  # logged once, because thousands of arrays may be refused
                    _report_refusal(error)
                refused = True
                array = _alias(original)
        del original
        yield array


def _moved(arrays: list[Any], shardings: list[Any]) -> list[Any]:
    return jax.device_put(arrays, shardings)


def fetch(array: Any) -> np.ndarray:
    """Returns the values of an array on the host.

    It asks for them through another object: JAX keeps a host copy as long as the object that was asked exists.
    """
    return np.asarray(_alias(array) if isinstance(array, jax.Array) else array)


def _alias(array: jax.Array) -> jax.Array:
    """Returns the same array as another object."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _report_refusal(error: RuntimeError) -> None:
    _log.warning("pinned host memory for copies from devices was refused; pageable memory is used: %s", error)


def _pinned(sharding: Any) -> Any:
    """Returns the same sharding in pinned host memory, or None for CPUs and devices without such memory."""
    device = next(iter(sharding.device_set))
    if device.platform == "cpu" or all(memory.kind != "pinned_host" for memory in device.addressable_memories()):
        return None
    return sharding.with_memory_kind("pinned_host")


def slice_on_device(array: jax.Array, box: Sequence[tuple[int, int]]) -> jax.Array:
    """Returns a box of an array, cut out on its device.

    JAX's checks for NaN and infinity are off, because the values are only moved. Indices have 64 bits, because 32-bit
    indices wrap around beyond 2^31 elements without an error.
    """
    with jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False):
        return jax.lax.dynamic_slice(array, [np.int64(start) for start, _ in box], box_shape(tuple(box)))


def on_host(sharding: jax.sharding.Sharding) -> bool:
    """Returns True if arrays of this sharding are in host memory, as on a CPU or in an accelerator's host memory."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):  # Looking it up in a cache would take longer.
        (device,) = sharding.device_set
        return device.platform == "cpu" or sharding.memory_kind in _HOST_KINDS
    return _all_on_host(sharding)


@functools.lru_cache(maxsize=512)
def _all_on_host(sharding: jax.sharding.Sharding) -> bool:
    return sharding.memory_kind in _HOST_KINDS or all(device.platform == "cpu" for device in sharding.device_set)


def can_exchange() -> str:
    """Returns why the devices of several processes cannot send data to each other now, or "" if they can."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return "devices cannot send data within a function that is traced"
    collectives = getattr(jax.config, "jax_cpu_collectives_implementation", None)
    if jax.default_backend() == "cpu" and not collectives:
        return "the CPU devices of this job cannot send anything: jax_cpu_collectives_implementation is not set"
    return ""


def exchange(messages: np.ndarray, processes: tuple[int, ...], check: Callable[[], None]) -> np.ndarray:
    """Sends messages from device to device, and returns the received ones: a row of words for each of the processes.

    messages: uint32, with the shape (1, words) for one message to all processes, or (number of processes, words) for
        one message to each. They are moved as integers without any computation, so every bit arrives as it is.
    processes: the indices of the processes that make this call, ascending, each with messages of this shape.
    check: called a few times a second, because the backend may wait forever. It may raise.

    The thread of the caller waits, so that this process runs no other collective at the same time. Raises `ValueError`
    or `RuntimeError` if one of the processes has ended.
    """
    job = Task(functools.partial(_sent, messages, processes), daemon=True)
    while not job.wait(_CHECK_SECONDS):
        check()
    return job.result()


@contextlib.contextmanager
def _default_config(mesh: Mesh) -> Iterator[None]:
    """Sets JAX's options to their defaults, even if the caller has set others, and the mesh to that of the messages."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.set_mesh(mesh))
        yield


def _sent(messages: np.ndarray, processes: tuple[int, ...]) -> np.ndarray:
    mesh, send = _exchange(processes, len(messages) == 1)
    (own,) = (device for device in mesh.local_devices)
    with _default_config(mesh):
        by_process = NamedSharding(mesh, PartitionSpec("processes"))
        part = jax.device_put(messages[None], own)
        sent = jax.make_array_from_single_device_arrays((len(processes), *messages.shape), by_process, [part])
        (shard,) = send(sent).addressable_shards
        came = np.asarray(shard.data)
    if came.size != len(processes) * messages.shape[1]:
        raise RuntimeError(f"expected {len(processes)} messages of {messages.shape[1]} words, found {came.shape}")
    return came.reshape(len(processes), -1)


@functools.lru_cache(maxsize=64)
def _exchange(processes: tuple[int, ...], same: bool) -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """Returns a mesh of one device of each process, and the compiled function that moves rows to their receivers."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[process] for process in processes]), ("processes",))
    if same:
        return mesh, jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
    by_process = NamedSharding(mesh, PartitionSpec("processes"))
    return mesh, jax.jit(lambda rows: rows.swapaxes(0, 1), out_shardings=by_process)


@contextlib.contextmanager
def allow_transfers() -> Iterator[None]:
    """Allows transfers if JAX's guards forbid only implicit ones, because a save or restore asks for its transfers."""
    with contextlib.ExitStack() as stack:
        for guard in _GUARDS:
            if getattr(jax.config, f"jax_transfer_guard_{guard}", None) in _IMPLICIT_GUARDS:
                stack.enter_context(getattr(jax, f"transfer_guard_{guard}")("allow"))
        yield


@allow_transfers()
def encode_metrics(found: Mapping[str, Any] | None) -> dict[str, float | str]:
    """Encodes metrics as the manifest records them.

    A masked scalar is NaN. Raises `MismatchError` unless each name is text and each value is a real scalar.
    """
    if not isinstance(found, Mapping | None):
        raise MismatchError(f"metrics={found!r:.60}: expected a dict of names and real scalars")
    numbers: dict[str, float | str] = {}
    for name, value in (found or {}).items():
        try:
            array = np.asarray(value)
        except Exception:  # NumPy raises for a tracer and for uneven lists. Objects of trackers raise anything.
            array = None
        if not isinstance(name, str) or array is None or array.shape != () or array.dtype.kind not in "biufV":
            inner = next(iter(value), None) if isinstance(value, Mapping) else None
            flat = f"; write {f'{name}/{inner}'!r}: …" if isinstance(inner, str) else ""
            raise MismatchError(f"metrics[{name!r}]: expected a name and a real scalar, found {value!r:.60}{flat}")
        # NumPy's mean of values that are all hidden is such a scalar. The number below a mask means nothing.
        is_hidden = isinstance(value, np.ma.MaskedArray) and bool(np.ma.getmaskarray(value))
        numbers[name] = encode_float(math.nan if is_hidden else float(array))
    return numbers
