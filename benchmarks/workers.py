"""Starts processes that save and restore on command, by lines of JSON.

Each contestant has its own process, so that none runs in the memory that another has left behind: in a process with
Orbax, code that makes many Python objects takes 1.7 times as long. `python -m benchmarks.workers` is one such process.
"""

import contextlib
import ctypes
import functools
import gc
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from . import contestants, states

_LARGE_BYTES = 256 << 20  # of a state; its process gives freed memory back
_DEVICES = 8  # of all processes of a job together, where the state is spread over them


class Job:
    """The running processes of one contestant."""

    def __init__(self, running: list[subprocess.Popen[str]]):
        self._running = running

    def request(self, what: str, path: str) -> float:
        """Has every process do something. Returns the seconds from the first beginning to the last end."""
        for process in self._running:
            print(json.dumps([what, path]), file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in self._running if process.stdout]
        if not all(answers):
            raise RuntimeError("a process has ended early; what it printed says why")
        begun, done = zip(*map(json.loads, answers), strict=True)
        return max(done) - min(begun)


@contextlib.contextmanager
def job(who: str, state: str, *, onto: str = "", count: int = 1) -> Iterator[Job]:
    """So many processes that have a state of `states` together, as one job of `jax.distributed`.

    With `onto`, the name of a template, they only restore, and what is restored is like that.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    devices = _DEVICES // count if states.is_spread(state) else 1
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    running: list[subprocess.Popen[str]] = []
    try:
        for index in range(count):
            options = json.dumps([who, state, onto, address, count, index])
            command = [sys.executable, "-m", "benchmarks.workers", options]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            running.append(subprocess.Popen(command, env=environment, **pipes))
        yield Job(running)
        for process in running:
            assert process.stdin
            process.stdin.close()
        for process in running:  # none ends before all have the command to end
            process.wait()
    finally:
        for process in running:
            process.kill()
            process.wait()


def _child(who: str, saved: str, onto: str, address: str, count: int, index: int) -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Gloo greets everyone there
    if count > 1:
        jax.distributed.initialize(address, count, index)
    state = states.template(onto) if onto else states.make(saved)
    one = contestants.MAKERS[who](state)

    def check(path: str) -> None:
        expected = states.make(saved) if onto else state
        if who == "floor":
            contestants.check_floor(path, state)
        else:
            states.check(expected, one.arrays(one.restore(path)), who, state if onto else None)

    def read(path: str) -> Any:
        restored = one.restore(path)
        return restored, sum(float(np.asarray(leaf).sum()) for leaf in jax.tree.leaves(restored))

    works: dict[str, Callable[[str], Any]] = {"save": one.save, "restore": one.restore, "check": check, "read": read}
    works.update(one.more)
    if one.start:
        works["start"] = one.start
    nbytes = states.nbytes(state)
    for line in sys.stdin:
        what, path = json.loads(line)
        work = functools.partial(works[what], path)
        begun = time.perf_counter()  # of the same clock in every process
        kept = work()
        done = time.perf_counter()
        if what == "start":
            kept()
        del kept
        gc.collect()  # nothing is mapped any more when the next one begins, and no garbage is left to it
        if nbytes > _LARGE_BYTES:
            _return_free_memory()
        print(json.dumps([begun, done]), file=answers)


def _return_free_memory() -> None:
    """Gives freed memory back to the system: some libraries leave several GB, and all contestants have to fit."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    _child(*json.loads(sys.argv[1]))
