"""Writes the folders here, and `expected.json`, with PyTorch 2.13 and safetensors 0.8. The tests do not run it.

Two or four processes save tensors in pieces by torch.distributed.checkpoint's `HuggingFaceStorageWriter`. `one_file`
has one file for each rank, `two_files` has two. `consolidated` has the complete tensors, and their pieces in `sharded`.
"""

import json
import pathlib
import shutil
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

HERE = pathlib.Path(__file__).parent


def tensors() -> dict[str, torch.Tensor]:
    def count(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.arange(torch.tensor(shape).prod().item()).reshape(shape).to(dtype)

    return {
        "rows": count(4, 6),
        "columns": count(2, 8),
        "uneven": count(5, 3, dtype=torch.bfloat16),  # over four ranks: 2, 2, 1 and none
        "deep": count(4, 4, 2, dtype=torch.float16),  # PyTorch 2.13 fails to consolidate integers
        "same": count(3),
        "scalar": torch.tensor(7.0),
    }


def placed(name: str, mesh: Any) -> tuple[Any, ...]:
    if mesh.ndim == 2:
        kinds = {"rows": (Shard(0), Replicate()), "columns": (Replicate(), Shard(1)), "deep": (Shard(0), Shard(1))}
        return kinds.get(name, (Replicate(), Replicate()))
    kinds = {"rows": (Shard(0),), "columns": (Shard(1),), "uneven": (Shard(0),), "deep": (Shard(1),)}
    return kinds.get(name, (Replicate(),))


def save(rank: int, ranks: int, port: int, folder: str, mesh_shape: tuple[int, ...], options: dict[str, Any]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", mesh_shape)
    state = {name: distribute_tensor(one, mesh, placed(name, mesh)) for name, one in tensors().items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(HERE / folder), **options))
    dist.destroy_process_group()


def main() -> None:
    two = dict.fromkeys(tensors(), 1) | {"deep": 2, "same": 2}
    saves: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("one_file", (4,), {"save_distributed": True}),
        ("two_files", (2, 2), {"save_distributed": True, "fqn_to_index_mapping": two}),
        ("consolidated", (2,), {"save_distributed": True, "enable_consolidation": True}),
    ]
    for n, (folder, mesh, options) in enumerate(saves):
        shutil.rmtree(HERE / folder, ignore_errors=True)
        ranks = int(torch.tensor(mesh).prod())
        spawn(save, (ranks, 29610 + n, folder, mesh, options), nprocs=ranks)
    expected = {}
    for folder in ("one_file", "two_files", "consolidated", "consolidated/sharded"):
        found = {name: torch.zeros_like(one) for name, one in tensors().items()}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(HERE / folder)), no_dist=True)
        saved = tensors()
        if folder == "consolidated":  # PyTorch 2.13 consolidates every tensor without axes as 0.
            saved["scalar"] = torch.tensor(0.0)
        assert all(torch.equal(found[name], one) for name, one in saved.items())
        expected[folder] = {
            name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape), "values": one.tolist()}
            for name, one in found.items()
        }
    (HERE / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
