"""Who takes part: every library saves and restores a state in its own plain way."""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import floor, states, torch_contestants
from .contestant import Contestant, Wait, named

WITH_SHARDINGS = ("treering", "Orbax v0", "Orbax v1")  # those that know of several devices and processes
WITH_ASYNC_SAVES = (*WITH_SHARDINGS, "torch DCP")
_OF_TORCH = ("torch DCP", "torch.save")


def all_contestants() -> list[str]:
    return [*WITH_SHARDINGS, "safetensors", "TensorStore", *(() if missing() else _OF_TORCH)]


def missing() -> str:
    """Returns a sentence that names those that cannot take part, or nothing."""
    if importlib.util.find_spec("torch"):
        return ""
    return f"torch is not installed: {' and '.join(_OF_TORCH)} do not take part. `make .venv/bench-torch` installs it."


def treering(state: Any, *, verify: bool = True) -> Contestant:
    """`state` need only be abstract where nothing is saved; so it is for Orbax."""
    import treering as tr

    return Contestant(
        "treering",
        lambda path: tr.save(path, state),
        lambda path: jax.block_until_ready(tr.restore(path, like=state, verify=verify)),
        lambda path: tr.save_async(path, state).result,
    )


def treering_into_numpy(state: Any) -> Contestant:
    import treering as tr

    return dataclasses.replace(treering(state), restore=tr.restore)


def treering_per_host_storage(state: Any) -> Contestant:
    """A run with a local disk of each process, as each host has one; `begin` makes the processes meet."""
    import treering as tr

    runs: dict[str, tr.Checkpointer] = {}

    def begin(path: str) -> None:
        runs[path] = tr.Checkpointer(path, local=f"{path}-near-{jax.process_index()}")
        runs[path].save(0, {"n": 0})
        runs[path].wait()

    return dataclasses.replace(
        treering(state),
        save=lambda path: runs[path].save(1, state),
        more={"begin": begin, "wait": lambda path: runs[path].wait(), "close": lambda path: runs.pop(path).close()},
    )


def orbax_v0(state: Any) -> Contestant:
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    like = states.abstract(state)

    def start(path: str) -> Wait:
        checkpointer.save(path, state)
        return checkpointer.wait_until_finished

    return Contestant(
        "Orbax v0",
        lambda path: start(path)(),
        lambda path: jax.block_until_ready(checkpointer.restore(path, like)),
        start,
    )


def orbax_v1(state: Any) -> Contestant:
    import orbax.checkpoint.experimental.v1 as ocp

    like = states.abstract(state)
    return Contestant(
        "Orbax v1",
        lambda path: ocp.save(path, state),
        lambda path: jax.block_until_ready(ocp.load(path, like)),
        lambda path: ocp.save_async(path, state).result,
    )


def safetensors(state: Any) -> Contestant:
    """NumPy in, NumPy out. Its own `save_file` is not durable, so an fsync follows."""
    from safetensors.numpy import load_file, save_file

    arrays = named(state)

    def save(path: str) -> None:
        os.mkdir(path)
        file = os.path.join(path, "state.safetensors")
        save_file(arrays, file)
        floor.sync(file)

    def restore(path: str) -> list[np.ndarray]:
        loaded = load_file(os.path.join(path, "state.safetensors"))
        return [loaded[name] for name in arrays]

    return Contestant("safetensors", save, restore)


def tensorstore(state: Any) -> Contestant:
    """TensorStore alone: a zarr3 array of one chunk for each leaf. It syncs each file and its folder."""
    import tensorstore as ts

    arrays = named(state)
    context = ts.Context({"file_io_sync": True})

    def opened(path: str, name: str, **options: Any) -> Any:
        place = {"driver": "file", "path": f"{os.path.join(path, name)}/"}
        return ts.open({"driver": "zarr3", "kvstore": place}, context=context, **options)

    def created(path: str, name: str, array: np.ndarray) -> Any:
        chunk = ts.ChunkLayout(chunk_shape=array.shape)
        return opened(path, name, create=True, dtype=ts.dtype(array.dtype), shape=array.shape, chunk_layout=chunk)

    def save(path: str) -> None:
        places = [created(path, name, array) for name, array in arrays.items()]
        writes = [place.result().write(array) for place, array in zip(places, arrays.values(), strict=True)]
        for write in writes:
            write.result()

    def restore(path: str) -> list[np.ndarray]:
        reads = [place.result().read() for place in [opened(path, name) for name in arrays]]
        return [read.result() for read in reads]

    return Contestant("TensorStore", save, restore)


def plain_floor(state: Any) -> Contestant:
    """The bytes alone: each process has a file of its own."""
    write = floor.write_small if states.is_small(state) else floor.write_large
    views = states.views(state)

    def save(path: str) -> None:
        os.makedirs(path, exist_ok=True)
        write(_floor_file(path), views)

    return Contestant("floor", save, lambda path: floor.read_large(_floor_file(path)))


def check_floor(path: str, state: Any) -> None:
    """Raises `AssertionError` unless it wrote the bytes of the state."""
    floor.check(_floor_file(path), states.views(state))


def _floor_file(path: str) -> str:
    return os.path.join(path, str(jax.process_index()))


MAKERS: dict[str, Callable[[Any], Contestant]] = {
    "treering": treering,
    "treering, verify=False": functools.partial(treering, verify=False),
    "treering into NumPy": treering_into_numpy,
    "treering on own disks": treering_per_host_storage,
    "Orbax v0": orbax_v0,
    "Orbax v1": orbax_v1,
    "safetensors": safetensors,
    "TensorStore": tensorstore,
    "torch DCP": torch_contestants.torch_dcp,
    "torch.save": torch_contestants.torch_save,
    "floor": plain_floor,
}
