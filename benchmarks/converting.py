"""Opening a large file of Flax, converting it, and the memory that converting takes from format to format."""

import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np

import treering as tr

from . import floor, measure
from .table import Row

_LEAVES = (5_000, (50_000,))  # float32: 1 GB
_LARGE = (24, (1 << 26,))  # float32: 6.4 GB
# Each is made from the one before. Equinox keeps no names, so it comes last but one.
_CHAIN = ("flax", "fjformer", "t5x", "levanter", "orbax", "safetensors", "equinox", "treering")
PAIRS = [(_CHAIN[n - 1], format) for n, format in enumerate(_CHAIN)]  # it begins and ends with ours


def rows(directory: str, repeats: int) -> list[Row]:
    """Seconds from the page cache, and the most resident memory of processes that each convert once."""
    place = os.path.join(directory, "converting")
    os.mkdir(place)
    found = [*_of_one_gigabyte(place, repeats), *_memory(place)]
    shutil.rmtree(place)
    return found


def _of_one_gigabyte(place: str, repeats: int) -> list[Row]:
    count, shape = _LEAVES
    random = np.random.default_rng(0)
    state = {f"leaf_{n:04d}": random.standard_normal(shape, np.float32) for n in range(count)}
    path, copy = os.path.join(place, "flax.msgpack"), os.path.join(place, "copy")
    tr.save(path, state)
    views = [array.view(np.uint8) for array in state.values()]
    measure.fill_cache(place)

    def once(work: Any) -> float:
        taken = measure.seconds(work)
        if os.path.exists(copy):
            os.unlink(copy)
        return taken

    opened = measure.race({"treering": lambda: once(lambda: tr.open(path))}, repeats)
    converted = measure.race(
        {
            "treering": lambda: once(lambda: tr.convert(path, copy, format="safetensors")),
            "floor": lambda: once(lambda: floor.write_large(copy, views)),
        },
        repeats,
    )
    os.unlink(path)
    return [
        Row("open what Flax wrote", f"1 GB, {count:,} leaves", "ms", opened),
        Row("convert Flax to safetensors, durably", "1 GB", "s", converted),
    ]


def _memory(place: str) -> list[Row]:
    count, shape = _LARGE
    before = os.path.join(place, "first")
    random = np.random.default_rng(0)
    tr.save(before, {f"leaf_{n:02d}": np.resize(random.standard_normal(4096, np.float32), shape) for n in range(count)})
    found: list[Row] = []
    for source, format in PAIRS:
        path = os.path.join(place, f"as-{format}")
        command = [sys.executable, "-m", "benchmarks.converting", before, path, format]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(
            Row("memory of converting", f"6.4 GB, {source} → {format}", "MiB", {"treering": float(done.stdout)})
        )
        shutil.rmtree(before) if os.path.isdir(before) else os.unlink(before)
        before = path
    return found


def _child(source: str, path: str, format: str) -> None:
    """Prints the most memory that was resident at any time, with that of Python and all libraries."""
    tr.convert(source, path, format=format)
    with open("/proc/self/status") as file:
        print(next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:")))


if __name__ == "__main__":
    _child(*sys.argv[1:])
