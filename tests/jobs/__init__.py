"""Jobs of several real processes under `jax.distributed`."""

import json
import os
import pathlib
import re
import socket
import textwrap
from collections.abc import Collection
from typing import Any, NamedTuple

import zygote
from xla_flags import xla_flags

_TESTS = str(pathlib.Path(__file__).parents[1])

# What each process runs first, and what it runs after the code `before`.
BEGIN = """
import faulthandler, json, os, pathlib, signal, sys, time
sys.path.insert(1, TESTS)
import jax, numpy as np
jax.config.update("jax_enable_recoverability", RECOVERABLE)
"""
CONNECT = """
from jobs import process
process.connect(INDEX, COUNT, DEVICES, LIFE, ADDRESS, TMP, TIMEOUT, IN_MEMORY, not LATE_IMPORT)
"""
# The names that a body may use which is text. A body in a file of this folder imports what it needs.
PRELUDE = """
from jobs.process import *
import jax.numpy as jnp
import treering as tr
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from treering import stores
from treering._processes import coordinator
from treering.errors import *
"""

# JAX kills the rest of a job when process 0 ends. A process that waits for a message of process 0 gets none.
END_OF_RECOVERABLE = """
import os, sys, time
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


def _code(body: str, names: Collection[str]) -> str:
    """Returns the code of a body: a call of the function "MODULE.FUNCTION" of this folder, or the text itself."""
    if not re.fullmatch(r"\w+\.\w+", body):
        return PRELUDE + textwrap.dedent(body)
    module, _, function = body.partition(".")
    arguments = ", ".join(f"{name}={name}" for name in names)
    return f"from jobs import {module} as bodies\nbodies.{function}({arguments})"


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

    The body is a function of a file of this folder, as "MODULE.FUNCTION", or text. `names` are its arguments, or more
    names that the text may use. The code `before` runs before the processes connect. Fails unless
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
            **{"RECOVERABLE": recoverable, "TIMEOUT": timeout, "OTHERS_ENDED": str(others_ended), "TESTS": _TESTS},
            **{"IN_MEMORY": in_memory, "LIFE": life, "LATE_IMPORT": "treering" in before},
            **names,
        }
        assignments = "\n".join(f"{name} = {value!r}" for name, value in known.items())
        end = END_OF_RECOVERABLE if recoverable else "faulthandler.cancel_dump_traceback_later()"
        script = "\n".join([assignments, BEGIN, before, CONNECT, _code(body, names), end])
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
