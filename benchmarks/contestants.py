"""Who takes part: every library saves and restores a state in its own plain way."""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from . import floor, states

Wait = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Functions of a path. `save` returns when the save is over; `restore` when the arrays are ready.

    `start` begins a save in the background and returns the function that waits for its end. `more` are others by name.
    """

    name: str
    save: Callable[[str], object]
    restore: Callable[[str], Any]
    start: Callable[[str], Wait] | None = None
    more: Mapping[str, Callable[[str], object]] = dataclasses.field(default_factory=dict)


WITH_SHARDINGS = ("treering", "Orbax v0", "Orbax v1")  # those that know of several devices and processes


def all_contestants() -> list[str]:
    return [*WITH_SHARDINGS, "safetensors", *(["torch DCP"] if importlib.util.find_spec("torch") else [])]


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

    named = _named(state)

    def save(path: str) -> None:
        os.mkdir(path)
        file = os.path.join(path, "state.safetensors")
        save_file(named, file)
        for name in (file, path):
            fd = os.open(name, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def restore(path: str) -> list[np.ndarray]:
        loaded = load_file(os.path.join(path, "state.safetensors"))
        return [loaded[name] for name in named]

    return Contestant("safetensors", save, restore)


def torch_dcp(state: Any) -> Contestant:
    """PyTorch's distributed checkpoint, of tensors that share the arrays' memory."""
    import torch
    import torch.distributed.checkpoint as dcp

    named = {name: torch.from_dlpack(leaf) for name, leaf in zip(_named(state), jax.tree.leaves(state), strict=True)}

    def restore(path: str) -> list[np.ndarray]:
        loaded = {name: torch.empty_like(tensor) for name, tensor in named.items()}
        dcp.load(loaded, checkpoint_id=path, no_dist=True)
        return [tensor.numpy() for tensor in loaded.values()]

    return Contestant("torch DCP", lambda path: dcp.save(named, checkpoint_id=path, no_dist=True), restore)


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


def _named(state: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


MAKERS: dict[str, Callable[[Any], Contestant]] = {
    "treering": treering,
    "treering, verify=False": functools.partial(treering, verify=False),
    "treering into NumPy": treering_into_numpy,
    "treering on own disks": treering_per_host_storage,
    "Orbax v0": orbax_v0,
    "Orbax v1": orbax_v1,
    "safetensors": safetensors,
    "torch DCP": torch_dcp,
    "floor": plain_floor,
}
