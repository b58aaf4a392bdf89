"""Restores by several processes from one shared disk, with `read="each"` and with `read="once"`.

The disk is a double that gives 200 or 50 MB/s to all processes together and caches nothing, like a network file system
with clients on different hosts. Run it as `python -m benchmarks.collective_restore --write
benchmarks/results/scale.md`. Each process of the job runs the same module, with `--child`.
"""

import argparse
import fcntl
import json
import os
import pathlib
import re
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
from treering import stores
from treering.stores.posix import Disk

from . import jobs
from .table import markdown

_RATE_BYTES_PER_SECOND, _SLOW_BYTES_PER_SECOND = 200e6, 50e6  # bytes a second
_LEAVES, _SHAPE = 64, (1_024, 1_024)  # float32: 268 MB
_REPEATS, _SLOW_REPEATS = 5, 2
_MIN_SPEEDUP_FRACTION = 0.8  # of the times by which fewer bytes are read
_MARKS = ("<!-- together -->", "<!-- end of together -->")
_TARGETS = {"replicated": PartitionSpec(), "rows": PartitionSpec("x"), "columns": PartitionSpec(None, "x")}
_JOBS = [
    *((count, what, _RATE_BYTES_PER_SECOND) for count in (4, 8) for what in _TARGETS),
    *((count, "replicated", _SLOW_BYTES_PER_SECOND) for count in (4, 8)),
]


class SharedDisk(Disk):
    """Moves so many bytes a second, of all processes together. Counts what this process reads of array files.

    folder: files below it are on this disk; the others are on a disk without a limit.
    """

    def __init__(self, clock: str, rate: float, folder: str = "/"):
        self.nbytes = 0
        self._clock, self._rate, self._folder = clock, rate, folder

    def is_local(self, fd: int) -> bool:
        return not _path(fd).startswith(self._folder) and super().is_local(fd)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        found = super().read(fd, buffer, offset)
        self._spend(_path(fd), found, is_read=True)
        return found

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        super().write(fd, data, offset)
        self._spend(_path(fd), len(data))

    def _spend(self, path: str, nbytes: int, *, is_read: bool = False) -> None:
        if not path.startswith(self._folder):
            return
        with open(self._clock, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # It excludes the other threads of this process too.
            if is_read and os.path.basename(path).startswith("arrays-"):
                self.nbytes += nbytes
            (free,) = struct.unpack("d", file.read(8))
            free = max(free, time.monotonic() - 0.02) + nbytes / self._rate
            file.seek(0)
            file.write(struct.pack("d", free))
            file.flush()
        time.sleep(max(0.0, free - time.monotonic()))


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def measure(directory: str) -> Iterator[list[str]]:
    tree = {f"w{n}": np.full(_SHAPE, n, np.float32) for n in range(_LEAVES)}
    saved = os.path.join(directory, "saved")
    tr.save(saved, tree)
    needed = sum(value.nbytes for value in tree.values())
    for count, what, rate in _JOBS:
        found = {read: _job(directory, count, what, rate, read) for read in ("each", "once")}
        each, once = (statistics.median(seconds for seconds, _ in found[read]) for read in ("each", "once"))
        shares = [found[read][0][1] / needed for read in ("each", "once")]
        yield [
            f"{count} processes, {what}",
            f"{rate / 1e6:.0f} MB/s",
            f"{shares[0]:.3f}",
            f"{shares[1]:.3f}",
            f"{each:.2f} s",
            f"{once:.2f} s",
            f"{each / once:.1f} ×",
            f"≥ {_MIN_SPEEDUP_FRACTION * shares[0]:.1f} ×" if shares[0] > 1.5 else "–",
            ("yes" if each / once >= _MIN_SPEEDUP_FRACTION * shares[0] else "**no**") if shares[0] > 1.5 else "–",
        ]


def _job(directory: str, count: int, what: str, rate: float, read: str) -> list[tuple[float, int]]:
    """The seconds of each restore, from the first process to begin until the last is done, and the bytes read."""
    pathlib.Path(directory, "clock").write_bytes(struct.pack("d", 0.0))
    outputs = jobs.run("benchmarks.collective_restore", count, directory, what, rate, read)
    rounds = zip(*outputs, strict=True)
    return [
        (max(end for _, end, _ in one) - min(begin for begin, _, _ in one), sum(n for *_, n in one)) for one in rounds
    ]


def _child(address: str, count: int, index: int, directory: str, what: str, rate: float, read: Any) -> None:
    jax.distributed.initialize(address, count, index)
    disk = SharedDisk(os.path.join(directory, "clock"), rate)
    stores.register(stores.Filesystem(disk))
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), _TARGETS[what])
    like = {f"w{n}": jax.ShapeDtypeStruct(_SHAPE, np.float32, sharding=sharding) for n in range(_LEAVES)}
    found: list[tuple[float, float, int]] = []
    for turn in range((_REPEATS if rate > _SLOW_BYTES_PER_SECOND else _SLOW_REPEATS) + 1):
        disk.nbytes = 0
        jobs.barrier(f"{turn}")
        begun = time.monotonic()
        restored = jax.block_until_ready(tr.restore(os.path.join(directory, "saved"), like, read=read))
        found.append((begun, time.monotonic(), disk.nbytes))
        for name, array in restored.items():
            for shard in array.addressable_shards:
                assert (np.asarray(shard.data) == int(name[1:])).all()
        del restored
        jobs.barrier(f"{turn} done")
    print(json.dumps(found[1:]))  # the first compiles, and connects the processes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        _child(*json.loads(arguments.child))
        return
    head = ["job", "disk", "read ÷ needed, each", "read ÷ needed, once", "each", "once", "quicker", "asked", "met"]
    with tempfile.TemporaryDirectory(dir=".") as directory:
        text = markdown(head, list(measure(os.path.abspath(directory))))
    print(text)
    if arguments.write:
        begin, end = map(re.escape, _MARKS)
        page = re.sub(
            f"{begin}.*{end}",
            lambda _: f"{_MARKS[0]}\n\n{text}\n{_MARKS[1]}",
            arguments.write.read_text(),
            flags=re.DOTALL,
        )
        arguments.write.write_text(page)


if __name__ == "__main__":
    main()
