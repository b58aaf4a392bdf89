"""Four processes with two devices each, beside one process with the same eight devices and the same bytes.

Both jobs run all the time (`python -m benchmarks.processes` is one process of a job) and do what they are told by
lines of JSON, so that their saves can take turns.
"""

import contextlib
import functools
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from . import contestants, floor, measure, sharded, states
from .contestants import Contestant
from .table import Row

Job = list[subprocess.Popen[str]]

_DEVICES = 8
_PROCESSES = 4
_STATE = "processes"
_WHO = ("treering", "Orbax v0", "Orbax v1", "floor")


def rows(directory: str, repeats: int) -> list[Row]:
    place = os.path.join(directory, _STATE)
    os.mkdir(place)
    with _job(1) as one, _job(_PROCESSES) as several:
        for who in _WHO:  # this also warms everyone up
            _tell(several, "save", who, os.path.join(place, who))
            _tell(several, "check", who, os.path.join(place, who))
        _tell(one, "save", "treering", os.path.join(place, "one"))
        _tell(one, "check", "treering", os.path.join(place, "one"))

        def save(job: Job, who: str) -> float:
            path = os.path.join(place, "new")
            os.sync()  # nobody pays for what others have written
            taken = _tell(job, "save", who, path)
            shutil.rmtree(path)
            return taken

        def restore(prepare: Callable[[str], None], who: str) -> float:
            prepare(os.path.join(place, who))
            return _tell(several, "restore", who, os.path.join(place, who))

        savers = {who: functools.partial(save, several, who) for who in _WHO}
        saved = measure.race({**savers, "one": functools.partial(save, one, "treering")}, repeats)
        share = saved.pop("one") / saved["treering"]
        warm = {who: functools.partial(restore, measure.fill_cache, who) for who in _WHO if who != "floor"}
        cold = {who: functools.partial(restore, measure.drop_cache, who) for who in _WHO}
        found = [
            Row("durable save", _STATE, "s", saved),
            Row("durable save, speed of 4 processes ÷ of 1", _STATE, "", {"treering": share}),
            Row("restore, warm", _STATE, "s", measure.race(warm, repeats)),
            Row("restore, cold", _STATE, "s", measure.race(cold, repeats)),
        ]
    shutil.rmtree(place)
    return found


@contextlib.contextmanager
def _job(count: int) -> Iterator[Job]:
    """So many processes that have the eight devices together; a job of several is one of `jax.distributed`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    running: list[subprocess.Popen[str]] = []
    try:
        for index in range(count):
            command = [sys.executable, "-m", "benchmarks.processes", address, str(count), str(index)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            running.append(subprocess.Popen(command, env=sharded.with_devices(_DEVICES // count), **pipes))
        yield running
        for process in running:
            assert process.stdin
            process.stdin.close()
        for process in running:  # none ends before all are told to
            process.wait()
    finally:
        for process in running:
            process.kill()
            process.wait()


def _tell(job: Job, what: str, who: str, path: str) -> float:
    """Has every process do something; seconds from when the first began until the last was done."""
    for process in job:
        print(json.dumps([what, who, path]), file=process.stdin, flush=True)
    answers = [process.stdout.readline() for process in job if process.stdout]
    if not all(answers):
        raise RuntimeError("a process has ended early; what it printed says why")
    begun, done = zip(*map(json.loads, answers), strict=True)
    return max(done) - min(begun)


def _child(address: str, count: int, index: int) -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Gloo greets everyone there
    if count > 1:
        jax.distributed.initialize(address, count, index)
    state = states.make_sharded(states.sharded(Mesh(np.array(jax.devices()), ("x",)), "x"))
    entered = {one.name: one for one in [*contestants.with_shardings(state), _floor(state, index)]}

    def check(contestant: Contestant, path: str) -> None:
        if contestant.name == "floor":
            floor.check(os.path.join(path, str(index)), states.views(state))
        else:
            states.check(state, contestant.restore(path), contestant.name)

    for line in sys.stdin:
        what, who, path = json.loads(line)
        one = entered[who]
        work = {"save": one.save, "restore": one.restore, "check": functools.partial(check, one)}[what]
        begun = time.perf_counter()  # of the same clock in every process
        kept = work(path)
        done = time.perf_counter()
        del kept
        gc.collect()  # nothing is mapped any more when the next one begins
        print(json.dumps([begun, done]), file=answers)


def _floor(state: Any, index: int) -> Contestant:
    """Each process has a file of its own."""
    views = states.views(state)

    def save(path: str) -> None:
        os.makedirs(path, exist_ok=True)
        floor.write_large(os.path.join(path, str(index)), views)

    return Contestant("floor", save, lambda path: floor.read_large(os.path.join(path, str(index))))


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
