"""Measures runs with a disk on each host: restarts after hosts are lost, and what second copies cost a save.

A folder stands in for the disk of each of four hosts, with a process each. All these folders are on one disk here. The
remote tier is a double that gives 200 MB/s to all processes together. Each process runs this module with `--child`.
"""

import json
import logging
import os
import pathlib
import shutil
import statistics
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
from treering import stores

from . import jobs, measure
from .collective_restore import SharedDisk
from .table import markdown

_PROCESSES = 4
_REMOTE_BYTES_PER_SECOND = 200e6
_LEAVES, _COLUMNS = 16, 2048  # float32
_REPLICATED_LEAVES = {"sharded": 0, "mixed": 4, "replicated": _LEAVES}  # the others are cut over the processes
_MAX_REPEATS = 3
_SAFE_SECONDS = 600  # the longest wait for second copies
_NOTE = (
    "Four processes, each with a folder as its disk. All folders are on one disk, so hosts with disks of their own are "
    "faster. The remote tier gives 200 MB/s to all processes together. A restart is timed from the first process that "
    "begins to the last that has its arrays, with a cold page cache. A quarter of its state is replicated, the rest is "
    "cut over the processes. Bytes from the remote tier are those of arrays; a few kB of notes are not counted."
)


class Run(NamedTuple):
    """A run to save: the copies of each local file, and whether the step is uploaded before the job ends."""

    name: str
    copies: int
    uploaded: bool


class Restart(NamedTuple):
    """A restart of a run whose named hosts have lost their disks."""

    label: str
    run: Run
    lost: Sequence[int]


_TWO, _ONE, _KILLED = Run("two", 2, True), Run("one", 1, True), Run("killed", 1, False)
_SAVES = [Run("one", 1, False), Run("two", 2, False)]
# The restart that loses all disks comes last of its run, because no later one can have them.
RESTARTS = [
    Restart("two copies", _TWO, [1]),
    Restart("one copy", _ONE, [1]),
    Restart("one copy, not uploaded", _KILLED, []),
    Restart("two copies", _TWO, range(_PROCESSES)),
]


def report(directory: str, repeats: int, mib: int) -> str:
    """Returns the two tables. `mib` is the size of the state."""
    repeats = min(repeats, _MAX_REPEATS)
    versions = f"treering {tr.__version__}, jax {jax.__version__}"
    head = f"Medians of {repeats} rounds; {mib:,} MiB in {_LEAVES} arrays; {versions}."
    restarts = markdown(
        ["restart", "disks lost", "step restored after", "arrays read from the remote tier"],
        measure_restarts(directory, repeats, mib),
    )
    saves = markdown(
        ["state", "local copies", "loop blocked", "save", "all files on two disks", "written per host, at most"],
        [line for kind in ("replicated", "sharded") for line in _measure_saves(directory, kind, repeats, mib)],
    )
    return "\n\n".join([head, _NOTE, restarts, saves])


def measure_restarts(directory: str, repeats: int, mib: int, restarts: Sequence[Restart] = RESTARTS) -> list[list[str]]:
    """Returns a line for each restart."""
    place = os.path.join(directory, "restarts")
    os.mkdir(place)
    pathlib.Path(place, "clock").write_bytes(struct.pack("d", 0.0))
    jobs.run(__name__, _PROCESSES, "save", place, mib, "mixed", list({one.run: one.run for one in restarts}), 1)
    lines: list[list[str]] = []
    for label, run, lost in restarts:
        rounds: list[tuple[float, int]] = []
        for _ in range(repeats):
            for host in lost:
                shutil.rmtree(_disk(place, host, run), ignore_errors=True)
            measure.drop_cache(place)
            begun, done, nbytes = zip(*jobs.run(__name__, _PROCESSES, "restart", place, mib, "mixed", run), strict=True)
            rounds.append((max(done) - min(begun), sum(nbytes)))
        seconds, read = map(statistics.median, zip(*rounds, strict=True))
        what = "all" if len(lost) == _PROCESSES else f"{len(lost)} of {_PROCESSES}"
        lines.append([label, what, f"{seconds:.2f} s", _megabytes(read)])
        if 0 < len(lost) < run.copies and read:
            raise AssertionError(
                f"{label}, {what} disks lost: expected 0 bytes of arrays from the remote tier, found {read:,}"
            )
    shutil.rmtree(place)
    return lines


def _measure_saves(directory: str, kind: str, repeats: int, mib: int) -> list[list[str]]:
    place = os.path.join(directory, kind)
    os.mkdir(place)
    # The first round makes the processes meet.
    found = jobs.run(__name__, _PROCESSES, "save", place, mib, kind, _SAVES, 1 + repeats)
    lines: list[list[str]] = []
    for number, run in enumerate(_SAVES):
        rounds = [
            [max(process[n][number][moment] for process in found) for moment in range(3)] for n in range(1, 1 + repeats)
        ]
        blocked, saved, safe = map(statistics.median, zip(*rounds, strict=True))
        disks = [_files(place, host, run) for host in range(_PROCESSES)]
        for name in {name for disk in disks for name in disk if name.startswith("arrays-")}:
            if (count := sum(name in disk for disk in disks)) != run.copies:
                raise AssertionError(f"{name} of {run}: expected it on {run.copies} disks, found it on {count}")
        written = max(sum(disk.values()) for disk in disks)
        safe_after = f"{safe:.2f} s" if run.copies > 1 else "–"
        lines.append(
            [kind, str(run.copies), f"{blocked * 1e3:.0f} ms", f"{saved:.2f} s", safe_after, _megabytes(written)]
        )
    shutil.rmtree(place)
    return lines


def _disk(place: str, host: int, run: Run) -> str:
    return os.path.join(place, f"host-{host}", run.name)


def _files(place: str, host: int, run: Run) -> dict[str, int]:
    """Returns the sizes of the files of the newest step on a host."""
    step = max(pathlib.Path(_disk(place, host, run)).glob("step-*"))
    return {file.name: file.stat().st_size for file in step.iterdir()}


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


# In the processes of a job


class _Copied(logging.Handler):
    """Notes the message of process 0 that a step is on two disks. Prints warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "is on two disks" in record.msg:
            self.event.set()
        if record.levelno >= logging.WARNING:
            print(record.getMessage(), file=sys.stderr)


def _template(mib: int, kind: str) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (mib * 2**20 // (4 * _LEAVES * _COLUMNS), _COLUMNS)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    specs = [PartitionSpec() if n < _REPLICATED_LEAVES[kind] else PartitionSpec("x") for n in range(_LEAVES)]
    return {
        f"layer_{n:02d}": jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for n, spec in enumerate(specs)
    }


def _make(template: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns arrays with random contents, of which each process makes its own parts."""

    def array(n: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        assert leaf.sharding
        shape = leaf.sharding.shard_shape(leaf.shape)

        def part(index: Any) -> np.ndarray:
            return np.random.default_rng([n, index[0].start or 0]).random(shape, np.float32)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    return jax.block_until_ready({name: array(n, leaf) for n, (name, leaf) in enumerate(template.items())})


def _open(place: str, run: Run, **options: Any) -> tr.Checkpointer:
    if run.copies > 1:
        options["local_copies"] = run.copies
    local = _disk(place, jax.process_index(), run)
    return tr.Checkpointer(os.path.join(place, "remote", run.name), local=local, timeout=120, **options)


def _save(place: str, mib: int, kind: str, runs: list[list[Any]], rounds: int) -> list[list[tuple[float, ...]]]:
    """Saves steps, the runs in turns. Returns the seconds for each round and run.

    They are those that the loop was blocked, until the save was over, and until all files were on two disks.
    """
    state, copied = _make(_template(mib, kind)), _Copied()
    logger = logging.getLogger("treering")
    logger.setLevel(logging.INFO)
    logger.addHandler(copied)
    all_runs = [Run(*run) for run in runs]
    # Uploads at a byte a second leave the disk to the saves.
    each = [(run, _open(place, run, upload_limit=None if run.uploaded else 1)) for run in all_runs]
    found: list[list[tuple[float, ...]]] = []
    for step in range(rounds):
        found.append([])
        for run, ckpts in each:
            copied.event.clear()
            jobs.barrier(f"{step} {run.name}")
            begun = time.perf_counter()
            pending = ckpts.save(step, state)
            blocked = time.perf_counter() - begun
            assert pending
            pending.result()
            saved = time.perf_counter() - begun
            if run.copies > 1 and jax.process_index() == 0 and not copied.event.wait(_SAFE_SECONDS):
                raise TimeoutError(f"{ckpts.directory}: expected step {step} on two disks after {_SAFE_SECONDS} s")
            found[-1].append((blocked, saved, time.perf_counter() - begun))
            jobs.barrier(f"{step} {run.name} safe")
    for run, ckpts in each:
        if run.uploaded:
            ckpts.close()
    return found


def _restart(place: str, mib: int, kind: str, run: list[Any]) -> tuple[float, float, int]:
    """Restores the step. Returns the moments of its begin and its end, and the bytes of arrays from the remote tier."""
    remote = SharedDisk(os.path.join(place, "clock"), _REMOTE_BYTES_PER_SECOND, os.path.join(place, "remote"))
    stores.register(stores.Filesystem(remote))
    template = _template(mib, kind)
    jobs.barrier("begin")
    begun = time.perf_counter()  # of the same clock in every process
    restored = jax.block_until_ready(_open(place, Run(*run)).restore(template))
    done, nbytes = time.perf_counter(), remote.nbytes
    expected = _make(template)
    for name, array in restored.items():
        for a, b in zip(array.addressable_shards, expected[name].addressable_shards, strict=True):
            assert np.array_equal(np.asarray(a.data), np.asarray(b.data)), name
    return begun, done, nbytes


_ACTIONS = {"save": _save, "restart": _restart}


def _child(address: str, count: int, index: int, action: str, *arguments: Any) -> None:
    jax.distributed.initialize(address, count, index)
    print(json.dumps(_ACTIONS[action](*arguments)), flush=True)
    jobs.barrier("end")
    if index == 0:
        time.sleep(1)  # JAX kills the others if process 0 ends first.
    os._exit(0)  # as a killed job: nothing more is uploaded


if __name__ == "__main__":
    _child(*json.loads(sys.argv[2]))
