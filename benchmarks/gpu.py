"""Measures saves and restores of a state in the memory of an accelerator, and checks the restored bytes.

`make gpu` runs this on a machine with a GPU and a JAX that uses it; it needs nothing else that is installed there. The
floors: a copy of the state to pinned memory of the host, and direct writes and reads of the same bytes.
"""

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import treering as tr

from . import floor, measure, states
from .table import markdown

_BEGIN, _END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
_LEAVES = 32
_SMALL = 2_000
_SAVES = 50  # of which the memory is looked at
_SAVES_UNTIL_KNOWN = 8  # after which unchanged arrays are no longer copied


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--mib", type=int, default=2_048, help="size of the large state (default: 2048)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", default=".", help="where to write; it decides which disk is measured (default: .)")
    parser.add_argument("--write", metavar="FILE", help=f"put the table between {_BEGIN} and {_END} of a file")
    parser.add_argument("--cpu", action="store_true", help="run without an accelerator, which measures nothing")
    arguments = parser.parse_args()
    if jax.default_backend() == "cpu" and not arguments.cpu:
        raise SystemExit("make gpu: expected an accelerator that JAX uses, found only the CPU; nothing was measured")
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=os.path.abspath(arguments.dir)) as directory:
        check(directory)
        lines = rows(directory, arguments.mib, arguments.repeats)
    device = jax.devices()[0]
    head = f"Measured on {jax.device_count()} × {device.device_kind}, jax {jax.__version__}, treering {tr.__version__}."
    text = f"{head}\n\n{markdown(['', 'state', 'treering', 'floor', 'treering ÷ floor'], lines)}"
    print(text)
    if arguments.write:
        with open(arguments.write) as file:
            page = file.read()
        found = re.compile(f"{_BEGIN}.*{_END}", re.DOTALL)
        with open(arguments.write, "w") as file:
            file.write(found.sub(lambda _: f"{_BEGIN}\n\n{text}\n{_END}", page))


def check(directory: str) -> None:
    """Raises `AssertionError` unless every kind of array comes back bit for bit, donated or deleted after the call."""
    generator = np.random.default_rng(0)

    def bits(dtype: Any, *shape: int) -> np.ndarray:
        dtype = np.dtype(dtype)
        return generator.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)

    values = {
        **{name: bits(name, 64, 96) for name in ("float32", "float16", "complex64", "int8", "uint32")},
        **{name: bits(getattr(ml_dtypes, name), 64, 96) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")},
        "int4": generator.integers(-8, 8, (64, 96)).astype(ml_dtypes.int4),
        "bool": generator.integers(0, 2, (65,)).astype(bool),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(-0.0),
    }
    device = jax.devices()[0]
    state = {name: jax.device_put(value, device) for name, value in values.items()}
    state["key"] = jax.random.split(jax.random.key(7), 5)
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" in kinds:
        where = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        state["pinned"] = jax.device_put(values["float32"], where)
        values["pinned"] = values["float32"]
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    state["spread"] = jax.device_put(values["uint32"], jax.NamedSharding(mesh, jax.P(None, "x")))
    values["spread"] = values["uint32"]
    path = os.path.join(directory, "check")
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in state.items()}
    key = np.asarray(jax.random.key_data(state["key"]))
    pending = tr.save_async(path, state)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    pending.result()
    for limit in (None, 1 << 12):
        found = tr.restore(path, like, memory_limit=limit)
        assert (np.asarray(jax.random.key_data(found["key"])) == key).all(), "key"
        for name, value in values.items():
            assert found[name].sharding == like[name].sharding, name
            assert np.asarray(found[name]).tobytes() == value.tobytes(), name


def rows(directory: str, mib: int, repeats: int) -> list[list[str]]:
    found: list[list[str]] = []
    sizes = {"large": (_LEAVES, (mib << 18) // _LEAVES), "small": (_SMALL, 4_096)}
    for name, (leaves, elements) in sizes.items():
        state = {f"w{n:04}": jnp.full((elements,), n, jnp.float32) for n in range(leaves)}
        like = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in state.items()}
        jax.block_until_ready(state)
        place = os.path.join(directory, name)
        os.mkdir(place)
        found += _placement_rows(place, name, state, like, repeats)
    found.append(_unchanged(directory, mib, repeats))
    found.append(_memory(directory, mib))
    return found


def _placement_rows(place: str, name: str, state: Any, like: Any, repeats: int) -> list[list[str]]:
    numbers = iter(range(1_000_000))
    new: Callable[[], str] = lambda: os.path.join(place, str(next(numbers)))  # noqa: E731
    on_host = [np.asarray(leaf + 0) for leaf in state.values()]
    views = [value.view(np.uint8).reshape(-1) for value in on_host]
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    stalls: list[float] = []
    slowed: list[float] = []

    def save() -> None:
        begun = time.perf_counter()
        pending = tr.save_async(new(), state)
        stalls.append(time.perf_counter() - begun)
        pending.result()

    def donate() -> None:
        moving = jax.block_until_ready({path: leaf + 0 for path, leaf in state.items()})
        pending = tr.save_async(new(), moving)
        begun = time.perf_counter()
        jax.block_until_ready(bump(moving))
        slowed.append(time.perf_counter() - begun)
        pending.result()

    def write() -> None:
        _copy_to_host(state)
        floor.write_large(new(), views) if name == "large" else floor.write_small(new(), views)

    def put() -> None:
        jax.block_until_ready(jax.device_put(on_host, jax.devices()[0]))

    saved = new()
    tr.save(saved, state)
    raw = new()
    floor.write_large(raw, views)

    def restore() -> None:
        measure.drop_cache(saved)
        jax.block_until_ready(tr.restore(saved, like))

    def read() -> None:
        floor.read_large(raw)
        put()

    free: list[float] = []
    for _ in range(3):
        moving = jax.block_until_ready({path: leaf + 0 for path, leaf in state.items()})
        free.append(measure.seconds(lambda tree=moving: jax.block_until_ready(bump(tree))))
    runs = {
        "copy": lambda: _copy_to_host(state),
        "save": save,
        "write": write,
        "donate": donate,
        "restore": restore,
        "read": read,
    }
    taken = measure.race({who: lambda do=do: measure.seconds(do) for who, do in runs.items()}, repeats)
    stall, slow = float(np.median(stalls)), float(np.median(slowed))
    lines = {
        "stall of `save_async` (floor: the copy)": (stall, taken["copy"]),
        "durable save (floor: copy and write)": (taken["save"], taken["write"]),
        "restore, cold (floor: read and copy)": (taken["restore"], taken["read"]),
        "a step that donates, right after (floor: without a save)": (slow, min(free)),
    }
    return [[what, name, f"{a * 1e3:.4g} ms", f"{b * 1e3:.4g} ms", f"{a / b:.2f}"] for what, (a, b) in lines.items()]


def _pinned(sharding: Any) -> Any:
    kinds = [memory.kind for memory in next(iter(sharding.device_set)).addressable_memories()]
    return sharding.with_memory_kind("pinned_host") if "pinned_host" in kinds else sharding


def _unchanged(directory: str, mib: int, repeats: int) -> list[str]:
    """The stall of saves whose arrays are new, but have the values of the step before; the floor copies them."""
    state = {f"w{n:04}": jnp.full(((mib << 18) // _LEAVES,), n, jnp.float32) for n in range(_LEAVES)}
    again = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0, tree))
    stalls: list[float] = []
    copies: list[float] = []
    with tr.Checkpointer(os.path.join(directory, "unchanged"), keep=tr.keep.last(3)) as ckpts:
        for step in range(_SAVES_UNTIL_KNOWN + repeats):
            state = jax.block_until_ready(again(state))
            stalls.append(ckpts.save(step, state).result().stall_seconds)
            copies.append(measure.seconds(lambda tree=state: _copy_to_host(tree)))
    stall, copy = (float(np.median(taken[_SAVES_UNTIL_KNOWN:])) for taken in (stalls, copies))
    what = "stall, new arrays with the values before (floor: the copy)"
    return [what, "large", f"{stall * 1e3:.4g} ms", f"{copy * 1e3:.4g} ms", f"{stall / copy:.2f}"]


def _copy_to_host(state: Any) -> None:
    places = [_pinned(leaf.sharding) for leaf in state.values()]
    for copied in jax.device_put(list(state.values()), places):
        np.asarray(copied)


def _memory(directory: str, mib: int) -> list[str]:
    """The memory of this process after many saves, over that after a few."""
    state = {f"w{n}": jnp.full(((mib << 18) // 64,), n, jnp.float32) for n in range(8)}
    samples: list[int] = []
    with tr.Checkpointer(os.path.join(directory, "run"), keep=tr.keep.last(1)) as ckpts:
        for step in range(_SAVES):
            ckpts.save(step, state)
            if step in (_SAVES // 5, _SAVES - 1):
                ckpts.wait()
                samples.append(_resident())
    growth = (samples[1] - samples[0]) / (_SAVES - 1 - _SAVES // 5) / 2**20
    return ["memory of the host, growth a save", f"{states.nbytes(state) >> 20} MiB", f"{growth:.2f} MiB", "0 MiB", "–"]


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
