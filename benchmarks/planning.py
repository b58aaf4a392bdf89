"""What a save of very many processes has to work out, without the processes: who writes what, and the manifest.

Each time in a fresh process (`python -m benchmarks.planning`), for JAX and Treering remember what they worked out.
"""

import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treering._core.boxes import Box, box_shape
from treering._core.entries import ArrayEntry, Entry
from treering._core.layouts import Holders, Layout
from treering._processes import assignment
from treering._processes.assignment import Assignment
from treering._pytree import walk
from treering._pytree.leaves import Catalogue, Described, LocalShard
from treering._pytree.walk import FlatTree
from treering._save import layout
from treering._save.layout import PlannedFile
from treering._threads.python_gc import gc_paused
from treering.formats.treering import manifest
from treering.formats.treering.manifest_fields import File, Manifest

from .table import Row

_PROCESSES = 4_096
_DEVICES = 4  # of each
_LAYERS = 100
_WIDTH = 4_096
_MANY_LEAVES = 24 * _PROCESSES
_STATES = {
    (kind, processes): f"{leaves}, {processes:,} processes"
    for processes in (_PROCESSES, _MANY_LEAVES)
    for kind, leaves in (
        ("transformer", f"{10 * _LAYERS:,} leaves"),
        ("shapes", "1,000 leaves of 100 shapes"),
        ("split", "1,000 leaves that no two processes share"),
    )
}


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as shardings look at."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "simulated"


def rows(repeats: int) -> list[Row]:
    found: list[Row] = []
    units = {"plan of a save": "s", "memory of the plan": "MiB", "size of the manifest": "MiB"}
    for (kind, processes), state in _STATES.items():
        command = [sys.executable, "-m", "benchmarks.planning", kind, str(processes)]
        runs = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            for _ in range(repeats)
        ]
        for what, unit in units.items():
            found.append(Row(what, state, unit, {"treering": statistics.median(run[what] for run in runs)}))
    return found


def _hundred_shapes(mesh: Mesh) -> Any:
    """A hundred shapes, each of ten arrays and cut into as many pieces as there are devices."""
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    shapes = [(_WIDTH * (1 + n % 10), _WIDTH * (1 + n // 10)) for n in range(100)]
    return {
        f"shape_{n:03d}": [jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)] * 10
        for n, shape in enumerate(shapes)
    }


def _split(mesh: Mesh) -> Any:
    """A thousand arrays of ten shapes, of which no element is in two devices."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shapes = [(mesh.size, 64 * (1 + n % 10)) for n in range(1_000)]
    return [jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for shape in shapes]


def _transformer(mesh: Mesh) -> Any:
    """The parameters of a transformer, cut along both axes of the mesh; what is small is in part replicated."""

    def leaf(cut: tuple[str | None, ...], *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*cut)))

    into, out = ("fsdp", "tensor"), ("tensor", "fsdp")
    return {
        f"layer_{n:03d}": {
            "norm_1": leaf((), _WIDTH),
            "qkv": leaf(into, _WIDTH, 3 * _WIDTH),
            "qkv_bias": leaf(("tensor",), 3 * _WIDTH),
            "proj": leaf(out, _WIDTH, _WIDTH),
            "norm_2": leaf((), _WIDTH),
            "gate": leaf(into, _WIDTH, 4 * _WIDTH),
            "up": leaf(into, _WIDTH, 4 * _WIDTH),
            "up_bias": leaf(("tensor",), 4 * _WIDTH),
            "down": leaf(out, 4 * _WIDTH, _WIDTH),
            "down_bias": leaf((), _WIDTH),
        }
        for n in range(_LAYERS)
    }


def _child(kind: str, processes: int) -> None:
    """Does the work of process 0; its peers do the same except for the manifest."""
    devices = [Device(n, n // _DEVICES) for n in range(processes * _DEVICES)]
    shape = (_PROCESSES, processes // _PROCESSES, _DEVICES)  # more processes are more replicas
    mesh = Mesh(np.array(devices).reshape(shape), ("fsdp", "replica", "tensor"))
    states = {"shapes": _hundred_shapes, "split": _split, "transformer": _transformer}
    flat_tree = walk.flatten_tree(states[kind](mesh))
    named = zip(flat_tree.paths, flat_tree.leaves, strict=True)
    entries: list[Entry] = [ArrayEntry(path, "jax", "float32", leaf.shape) for path, leaf in named]
    shardings = {n: leaf.sharding for n, leaf in enumerate(flat_tree.leaves)}
    catalogue = Catalogue(entries, {}, shardings, set(shardings), [None] * len(entries))
    before = _forget_peak()
    begun = time.perf_counter()
    with gc_paused():  # as in a save
        shares = assignment.assign(catalogue, processes)
        shards, _ = assignment.select_shards(_described(catalogue, shares), shares, 0)
        pieces = assignment.pieces(entries, shards, shares, 0)
        (file,) = layout.plan(entries, pieces)
        encoded = _manifest(flat_tree, catalogue, shares, file, processes)
    taken = time.perf_counter() - begun
    peak = _memory("VmHWM:") - before
    assert len(manifest.decode(encoded, "manifest").leaves) == len(entries)
    print(json.dumps({"plan of a save": taken, "memory of the plan": peak, "size of the manifest": len(encoded)}))


def _described(catalogue: Catalogue, shares: Mapping[int, Assignment]) -> Described:
    """Returns the shards of process 0, without the memory that they would take."""
    found: list[tuple[LocalShard, Any]] = []
    for leaf in shares:
        entry: Any = catalogue.entries[leaf]
        for box in _own(assignment.layout_of(catalogue.shardings[leaf], entry.shape)):
            data = np.broadcast_to(np.float32(0), box_shape(box))
            found.append((LocalShard(leaf, box, data.dtype, data.nbytes, False), data))
    return Described(catalogue, tuple(shard for shard, _ in found), [data for _, data in found])


def _own(array_layout: Layout) -> list[Box]:
    return [array_layout.boxes[n] for n in _held(array_layout.holders)]


@functools.cache
def _held(holders: Holders) -> list[int]:
    return [n for n, own in enumerate(holders) if 0 in own]


def _manifest(
    flat_tree: FlatTree, catalogue: Catalogue, shares: Mapping[int, Assignment], file: PlannedFile, processes: int
) -> bytes:
    """The manifest when every process has written a file like that of process 0."""
    size, header, checksum = len(file.header) + file.nbytes, len(file.header), manifest.xxh3(file.header)
    names = (name for n in range(processes) for name in layout.names("0123456789ab", 1, n, processes))
    rows = layout.rows(catalogue, shares, layout.FileIndex([[0]] * processes, lambda _: ()))
    return manifest.seal(
        Manifest(
            format=manifest.FORMAT,
            version=manifest.VERSION,
            created="2025-01-01T00:00:00+00:00",
            software={"jax": jax.__version__},
            files=[File(name, size, header, checksum) for name in names],
            layouts=rows.layouts,
            holders=rows.holders,
            tree=list(flat_tree.skeleton),
            leaves=rows.leaves,
        )
    )


def _forget_peak() -> int:
    """Bytes in use now, from which on the peak counts."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _memory("VmRSS:")


def _memory(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]))
