"""Makes a small checkpoint of each format and layout, to be damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import treering as tr


def tree() -> dict[str, Any]:
    """Returns the tree in all of them. Nothing in it is zero, because zarr may leave out zeros."""
    return {
        "weight": np.arange(1, 13, dtype=np.float32).reshape(3, 4),
        "deep": {"bias": np.arange(1, 6, dtype=np.int32)},
    }


def _saved(suffix: str = "", **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / f"made{suffix}"
        tr.save(path, tree(), **options)
        return path

    return make


def _flax_shards(folder: Path) -> Path:
    """Saves shards as Hugging Face lays them out."""
    path = folder / "made"
    path.mkdir()
    weights = {}
    for n, (name, leaf) in enumerate((("weight", tree()["weight"]), ("deep", tree()["deep"])), 1):
        file = f"flax_model-{n:05}-of-00002.msgpack"
        tr.save(path / file, {name: leaf}, format="flax")
        weights["weight" if n == 1 else "deep/bias"] = file
    (path / "flax_model.msgpack.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return path


def _orbax_files(folder: Path) -> Path:
    """Writes an Orbax checkpoint without a database: each array is a folder of zarr 2."""
    path = folder / "made"
    leaves = {"weight": ["weight"], "deep.bias": ["deep", "bias"]}
    about = {
        str(tuple(keys)): {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for keys in leaves.values()
    }
    for name, keys in leaves.items():
        write_zarr(path / name, tree()["weight"] if len(keys) == 1 else tree()["deep"]["bias"])
    (path / "_METADATA").write_text(json.dumps({"tree_metadata": about, "use_ocdbt": False, "use_zarr3": False}))
    return path


def _t5x(folder: Path) -> Path:
    """Saves the arrays in the state dict of T5X."""
    path = folder / "checkpoint_3"
    tr.save(path, {"target": tree()}, format="t5x")
    return path


def _levanter_database(folder: Path) -> Path:
    """Writes a checkpoint like new releases of Levanter: one database of zarr 3."""
    import tensorstore as ts

    path = folder / "step-3"
    for name, array in (("weight", tree()["weight"]), ("deep/bias", tree()["deep"]["bias"])):
        base = {"driver": "file", "path": f"{path}/"}
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        ts.open(spec, create=True, dtype=array.dtype.name, shape=array.shape).result().write(array).result()
    (path / "metadata.json").write_text(json.dumps({"step": 3, "timestamp": "2026-01-01T00:00:00"}))
    return path


def _tensorflow(folder: Path) -> Path:
    from tensorflow_bundles import Bundle

    bundle = Bundle()
    bundle.add("weight", tree()["weight"])
    bundle.add("deep/bias", tree()["deep"]["bias"])
    bundle.save(folder / "model.ckpt-3")
    return folder / "model.ckpt-3"


def _torch(folder: Path) -> Path:
    from torch_files import archive, tensor

    path, made = folder / "made.pt", tree()
    path.write_bytes(archive({"weight": tensor(made["weight"]), "deep": {"bias": tensor(made["deep"]["bias"])}}))
    return path


def _dcp(folder: Path) -> Path:
    """Saves a distributed checkpoint of two processes."""
    from torch_files import Distributed

    saved, made = Distributed(), tree()
    saved.add(["weight"], made["weight"], [((0, 2), (0, 4)), ((2, 3), (0, 4))], ["__0_0.distcp", "__1_0.distcp"])
    saved.add(["deep", "bias"], made["deep"]["bias"])
    return saved.save(folder / "made")


def write_zarr(path: Path, array: np.ndarray, **change: Any) -> None:
    """Writes an array of zarr 2 in one chunk, uncompressed, as files; `change` replaces entries of its metadata."""
    path.mkdir(parents=True)
    about = {"zarr_format": 2, "shape": array.shape, "chunks": array.shape, "dtype": array.dtype.str, "order": "C"}
    about |= {"compressor": None, "filters": None, "fill_value": None, "dimension_separator": "."}
    (path / ".zarray").write_text(json.dumps({**about, **change}))
    (path / ".".join("0" * array.ndim or "0")).write_bytes(array.tobytes())


SUBJECTS: dict[str, Callable[[Path], Path]] = {
    "treering": _saved(),
    "safetensors": _saved(".safetensors"),
    "safetensors, shards": _saved(format="safetensors", max_shard_size=40),
    "flax": _saved(".msgpack"),
    "flax, shards": _flax_shards,
    "fjformer": _saved(format="fjformer"),
    "equinox": _saved(".eqx"),
    "orbax": _saved(format="orbax"),
    "orbax, files": _orbax_files,
    "t5x": _t5x,
    "levanter": _saved(format="levanter", step=3),
    "levanter, database": _levanter_database,
    "tensorflow": _tensorflow,
    "torch": _torch,
    "dcp": _dcp,
}
"""Makers of checkpoints, by format and layout."""


FILES: dict[str, list[str]] = {
    "treering": ["treering.json", "arrays-*"],
    "safetensors": [""],
    "safetensors, shards": ["*.index.json", "model-*"],
    "flax": [""],
    "flax, shards": ["*.index.json", "flax_model-*"],
    "fjformer": [""],
    "equinox": [""],
    "orbax": ["_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "d/*"],
    "orbax, files": ["_METADATA", "weight/.zarray", "weight/0.0"],
    "t5x": ["checkpoint"],
    "levanter": ["metadata.json", "weight/.zarray", "weight/0.0"],
    "levanter, database": ["metadata.json", "manifest.ocdbt", "d/*"],
    "tensorflow": [".index", ".data-*"],
    "torch": [""],
    "dcp": [".metadata", "__*.distcp"],
}
"""Patterns of the files that a subject consists of, by its name."""


def files(subject: str, pattern: str, path: Path) -> list[Path]:
    """Returns the files of a checkpoint that match one of the patterns in `FILES`."""
    if subject == "tensorflow":
        return list(path.parent.glob(path.name + pattern))
    return list(path.glob(pattern)) if pattern else [path]


def template() -> Any:
    """Returns the template for a checkpoint without names."""
    return {"weight": np.zeros((3, 4), np.float32), "deep": {"bias": np.zeros(5, np.int32)}}
