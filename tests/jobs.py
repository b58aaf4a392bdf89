"""Jobs of several real processes under `jax.distributed`."""

import json
import os
import pathlib
import socket
import textwrap
from collections.abc import Collection
from typing import Any, NamedTuple

import zygote
from xla_flags import xla_flags

# The code that each process runs first. The body of a job uses these names.
PRELUDE = """
import faulthandler, json, os, pathlib, signal, sys, time
import jax, numpy as np
jax.config.update("jax_enable_recoverability", RECOVERABLE)
exec(BEFORE)
jax.distributed.initialize(ADDRESS, COUNT, INDEX)
import jax.numpy as jnp
import treering as tr
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from treering import stores
from treering._processes import coordinator
from treering.errors import *
from treering.stores import survival
survival.is_in_memory = lambda path: IN_MEMORY  # whatever file system the tests run on
if "treering" not in BEFORE:
    coordinator.announce_alive()  # as its import does, which the zygote made before there was a job
faulthandler.dump_traceback_later(TIMEOUT - 5, exit=True)

tmp = pathlib.Path(TMP)
devices = np.array(jax.devices())

def mesh(*sizes, devices=devices):
    return Mesh(devices[: int(np.prod(sizes))].reshape(sizes), tuple("xyz"[: len(sizes)]))

def put(value, spec=P(), mesh=Mesh(devices, ("x",))):
    '''A global array with the given contents; each process makes its own shards.'''
    value = np.asarray(value)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)

def same(array, value):
    '''Returns True if every shard of an array that this process has holds its part of a value.'''
    value = np.asarray(value)
    shards = ((np.asarray(s.data), value[s.index]) for s in array.addressable_shards)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in shards)

def caught(call, *args, **options):
    '''Returns the error that a call raises, as [class, text]; None if it raises none.'''
    try:
        call(*args, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None

def die_at(operation, name=""):
    '''Kills this process by SIGKILL instead of a disk operation on a file with this text in its name.'''
    def dead(self, *args):
        paths = [os.readlink(f"/proc/self/fd/{a}") if isinstance(a, int) else str(a) for a in args[:2] if a is not None]
        if any(name in path for path in paths):
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(stores.posix.Disk, operation)(self, *args)
    stores.register(stores.Filesystem(type("Deadly", (stores.posix.Disk,), {operation: dead})()))

def sync(name):
    '''Waits for the other processes of the test, without the library that is tested.'''
    from jax._src import distributed
    distributed.global_state.client.wait_at_barrier(name, 60_000)

def report(value):
    '''What the test gets to see of this process.'''
    (tmp / f"report-{INDEX}.json").write_text(json.dumps(value))
"""

# JAX kills the rest of a job when process 0 ends. A process that waits for a message of process 0 gets none.
END_OF_RECOVERABLE = """
sys.stdout.flush()
end = time.monotonic() + 30
while INDEX == 0 and not os.path.exists(OTHERS_ENDED) and time.monotonic() < end:
    time.sleep(0.01)
os._exit(0)
"""


class Result(NamedTuple):
    """The result of a process: its exit code, its report (None if it made none), and its output."""

    code: int
    report: Any
    output: str


def run_job(
    tmp: pathlib.Path,
    body: str,
    *,
    processes: int,
    devices: int = 2,
    recoverable: bool = False,
    expect: dict[int, int | None] | None = None,
    timeout: int = 120,
    before: str = "",
    in_memory: bool = False,
    restarts: Collection[int] = (),
    **names: Any,
) -> list[Result]:
    """Runs a body in every process of a new job, and returns their results.

    `names` are more names that the body may use. The code `before` runs before the processes connect. Fails unless
    every process ends with code 0, or with the code that `expect` has for it (None: any code). Processes of a
    recoverable job end without waiting for one another, except process 0, which ends last. With `in_memory`, all paths
    count as memory. The processes in `restarts` are started again, once, when they are killed; then `LIFE` is 2.
    """
    others_ended = tmp / "others-ended"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def start(index: int, life: int) -> zygote.Process:
        (tmp / f"report-{index}.json").unlink(missing_ok=True)
        known = {
            **{"INDEX": index, "COUNT": processes, "DEVICES": devices, "ADDRESS": address, "TMP": str(tmp)},
            **{"RECOVERABLE": recoverable, "TIMEOUT": timeout, "BEFORE": before, "OTHERS_ENDED": str(others_ended)},
            **{"IN_MEMORY": in_memory, "LIFE": life},
            **names,
        }
        assignments = "\n".join(f"{name} = {value!r}" for name, value in known.items())
        end = END_OF_RECOVERABLE if recoverable else "faulthandler.cancel_dump_traceback_later()"
        script = "\n".join([assignments, PRELUDE, textwrap.dedent(body), end])
        environment = {**os.environ, "XLA_FLAGS": xla_flags(devices), "JAX_PLATFORMS": "cpu"}
        return zygote.Process(script, environment)

    running = [start(index, 1) for index in range(processes)]
    ended: list[tuple[int, str]] = []
    for index, process in enumerate(running[1:], 1):
        code, output = process.communicate(timeout=timeout + 30)
        if index in restarts and code == -9:
            code, output = start(index, 2).communicate(timeout=timeout + 30)
        ended.append((code, output))
    others_ended.touch()
    ended.insert(0, running[0].communicate(timeout=timeout + 30))
    others_ended.unlink()  # Tests list the folder.
    results: list[Result] = []
    for index, (code, output) in enumerate(ended):
        file = tmp / f"report-{index}.json"
        results.append(Result(code, json.loads(file.read_text()) if file.exists() else None, output))
    for index, result in enumerate(results):
        wanted = (expect or {}).get(index, 0)
        assert wanted is None or result.code == wanted, (
            f"process {index} ended with {result.code}, not {wanted}:\n{result.output[-4000:]}"
        )
    return results
