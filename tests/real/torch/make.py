"""Writes the checkpoints in this folder, and `expected.json`, with PyTorch 2.13. The tests do not run it.

`training.pt` is what `torch.save` writes of a training state: tied weights, views, every dtype, numbers and text. `one`
is a distributed checkpoint of one process, and `two` is one of two processes whose tensors are sharded unevenly.
"""

import argparse
import json
import pathlib
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

HERE = pathlib.Path(__file__).parent
DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def sample(dtype: str, shape: tuple[int, ...] = (2, 3), seed: int = 0) -> torch.Tensor:
    kind = getattr(torch, dtype)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    if dtype == "bool":
        return numbers > 0
    return (numbers.abs() if "uint" in dtype or "e8m0" in dtype else numbers).to(kind)


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "bytes": data.hex()}
    return value.hex() if isinstance(value, bytes) else value


def flat(value: Any, path: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        return {path: described(value)}
    found: dict[str, Any] = {}
    for key, child in items:
        found |= flat(child, f"{path}/{key}" if path else str(key))
    return found


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    table = sample("float32", (6, 5))
    views = {"transposed": table.t(), "slice": table[1:, 1:4:2], "expanded": table[:1].expand(3, 5), "row": table[4]}
    return {
        "model": {**model.state_dict(), "embed": table, "head": table},
        "optimizer": optimizer.state_dict(),
        "views": views,
        "dtypes": {name: sample(name) for name in DTYPES},
        "parameter": torch.nn.Parameter(sample("float32", (2,))),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "epoch": 3,
        "plain": [1.5, None, True, "text", b"bytes", (2**70, {}), torch.Size([2, 3])],
    }


def within(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "model": {
            "rows": distribute_tensor(sample("float32", (5, 3)), mesh, [Shard(0)]),
            "columns": distribute_tensor(sample("bfloat16", (2, 4)), mesh, [Shard(1)]),
            "few": distribute_tensor(sample("int32", (1, 2)), mesh, [Shard(0)]),
            "replicated": distribute_tensor(sample("float32", (2,)), mesh, [Replicate()]),
        },
        "layers": [{"w": sample("float16", (2, 2), 1)}, {"w": sample("float16", (2, 2), 2)}],
        "step": 7,
    }
    dcp.save(state, checkpoint_id=HERE / "two")
    dist.destroy_process_group()


def main() -> None:
    for name in ("one", "two"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    state = training()
    expected = {"training.pt": flat(state)}
    torch.save({**state, "arguments": argparse.Namespace(lr=0.1)}, HERE / "training.pt")
    small = {name: state[name] for name in ("model", "views", "epoch", "plain", "scalar", "empty", "parameter")}
    dcp.save({**small, "arguments": argparse.Namespace(lr=0.1)}, checkpoint_id=HERE / "one", no_dist=True)
    expected["one"] = flat(small)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(within, (folder,), nprocs=2)
    expected["two"] = flat(
        {
            "model": {
                "rows": sample("float32", (5, 3)),
                "columns": sample("bfloat16", (2, 4)),
                "few": sample("int32", (1, 2)),
                "replicated": sample("float32", (2,)),
            },
            "layers": [{"w": sample("float16", (2, 2), 1)}, {"w": sample("float16", (2, 2), 2)}],
            "step": 7,
        }
    )
    (HERE / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
