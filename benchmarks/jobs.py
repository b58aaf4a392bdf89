"""Jobs of processes that each run a module of this package as `python -m MODULE --child ARGUMENTS`."""

import json
import os
import socket
import subprocess
import sys
from typing import Any


def run(module: str, count: int, *arguments: object) -> list[Any]:
    """Returns the last line that each process prints, as JSON.

    The module gets the address of process 0, the number of processes, the index of the process, and the arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, "--child", json.dumps([address, count, index, *arguments])],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(count)
    ]
    outputs = [process.communicate()[0].splitlines() for process in running]
    if not all(outputs):
        raise RuntimeError("a process has ended early; what it printed says why")
    return [json.loads(lines[-1]) for lines in outputs]


def barrier(name: str) -> None:
    """Waits for all processes of the job. Each barrier has another name."""
    from jax._src import distributed

    state: Any = distributed.global_state
    state.client.wait_at_barrier(name, 600_000)
