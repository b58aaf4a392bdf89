"""What the body of a job uses in each of its processes. They are connected before a body is imported."""

import faulthandler
import functools
import json
import os
import pathlib
import signal
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treering import stores
from treering._processes import coordinator
from treering.stores import probe

# `connect` gives these their values. A body is imported later, so it may import them.
INDEX: int  # the number of this process
COUNT: int  # the number of the processes
DEVICES: int  # devices of each process
LIFE: int  # 2 in a process that was started again after it was killed
TMP: str
tmp: pathlib.Path  # the folder of the test
devices: np.ndarray  # all devices of the job


def connect(
    index: int,
    count: int,
    each: int,
    life: int,
    address: str,
    folder: str,
    timeout: int,
    in_memory: bool,
    announce: bool,
) -> None:
    """Connects this process to the others of its job, and gives the names above their values."""
    global INDEX, COUNT, DEVICES, LIFE, TMP, tmp, devices
    INDEX, COUNT, DEVICES, LIFE, TMP, tmp = index, count, each, life, folder, pathlib.Path(folder)
    jax.distributed.initialize(address, count, index)
    probe.is_in_memory = lambda path: in_memory  # whatever file system the tests run on
    if announce:
        coordinator.announce_alive()  # as its import does, which the zygote made before there was a job
    faulthandler.dump_traceback_later(timeout - 5, exit=True)
    devices = np.array(jax.devices())


def mesh(*sizes: int, devices: Any = None) -> Mesh:
    """Returns a mesh with axes x, y and z of the first devices."""
    chosen = globals()["devices"] if devices is None else devices
    return Mesh(chosen[: int(np.prod(sizes))].reshape(sizes), tuple("xyz"[: len(sizes)]))


@functools.cache
def _row() -> Mesh:
    return Mesh(devices, ("x",))


def put(value: Any, spec: P = P(), mesh: Mesh | None = None) -> jax.Array:
    """Returns a global array with the given contents; each process makes its own shards."""
    value = np.asarray(value)
    sharding = NamedSharding(mesh or _row(), spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)


def same(array: jax.Array, value: Any) -> bool:
    """Returns True if every shard of an array that this process has holds its part of a value."""
    value = np.asarray(value)
    shards = ((np.asarray(s.data), value[s.index]) for s in array.addressable_shards)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in shards)


def caught(call: Callable[..., Any], *args: Any, **options: Any) -> Sequence[str] | None:
    """Returns the error that a call raises, as [class, text]; None if it raises none."""
    try:
        call(*args, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def die_at(operation: str, name: str = "") -> None:
    """Makes this process kill itself by SIGKILL instead of a disk operation on a file with this text in its name."""

    def dead(self: Any, *args: Any) -> Any:
        paths = [os.readlink(f"/proc/self/fd/{a}") if isinstance(a, int) else str(a) for a in args[:2] if a is not None]
        if any(name in path for path in paths):
            die()
        return getattr(stores.posix.Disk, operation)(self, *args)

    stores.register(stores.Filesystem(type("Deadly", (stores.posix.Disk,), {operation: dead})()))


def die() -> NoReturn:
    """Kills this process by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL did not end the process")


def sync(name: str) -> None:
    """Waits for the other processes of the test, without the library that is tested."""
    from jax._src import distributed

    distributed.global_state.client.wait_at_barrier(name, 60_000)


def report(value: Any) -> None:
    """Gives the test a value, which JSON can hold, of this process."""
    (tmp / f"report-{INDEX}.json").write_text(json.dumps(value))
