"""PyTorch's checkpoints. The tensors share the memory of the state's arrays, and are made before anything is timed."""

import os
from typing import Any

import jax

from . import floor
from .contestant import Contestant, Wait, named


def torch_dcp(state: Any) -> Contestant:
    """PyTorch's distributed checkpoint, in one process. It syncs its files, but not their folder."""
    import torch
    import torch.distributed.checkpoint as dcp

    tensors = _tensors(state)

    def save(path: str) -> None:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, sync_files=True), no_dist=True)

    def start(path: str) -> Wait:
        writer = dcp.FileSystemWriter(path, sync_files=True)
        return dcp.async_save(tensors, storage_writer=writer, no_dist=True).result

    def restore(path: str) -> list[Any]:
        loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        dcp.load(loaded, checkpoint_id=path, no_dist=True)
        return list(loaded.values())

    return Contestant("torch DCP", save, restore, start, arrays=_arrays)


def torch_save(state: Any) -> Contestant:
    """`torch.save` with an fsync, and `torch.load`."""
    import torch

    tensors = _tensors(state)

    def save(path: str) -> None:
        os.mkdir(path)
        file = os.path.join(path, "state.pt")
        torch.save(tensors, file)
        floor.sync(file)

    def restore(path: str) -> list[Any]:
        loaded = torch.load(os.path.join(path, "state.pt"))
        return [loaded[name] for name in tensors]

    return Contestant("torch.save", save, restore, arrays=_arrays)


def _tensors(state: Any) -> dict[str, Any]:
    import torch

    return {name: torch.from_dlpack(leaf) for name, leaf in zip(named(state), jax.tree.leaves(state), strict=True)}


def _arrays(tensors: list[Any]) -> list[jax.Array]:
    return [jax.numpy.from_dlpack(tensor) for tensor in tensors]
