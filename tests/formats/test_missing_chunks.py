"""What a missing chunk of a zarr array means: the fill value, damage, or an error that says how to decide.

`real/orbax/0.9.1` and `real/t5x/0.1.*` have checkpoints whose writers left out chunks of zeros.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import treering as tr
from helpers import REAL, assert_read_as_by, assert_same
from treering.errors import CorruptError, UnsupportedError
from treering.formats._zarr import array as zarr
from treering.formats._zarr.folder import Folder
from treering.stores.filesystem import Filesystem
from treering.stores.posix import Disk

KERNEL = np.concatenate([np.zeros(16, np.float32), np.arange(16, 32, dtype=np.float32)]).reshape(8, 4)
TARGET = {"kernel": KERNEL, "bias": np.zeros(4, np.float32), "scale": np.ones(4, np.float32)}


def open_array(path: Path, missing: zarr.Missing, driver: Any = "zarr3") -> zarr.Array:
    (found,) = zarr.find(
        Folder(Filesystem(Disk()), str(path.parent), ocdbt=False), [path.name], driver, missing=missing
    )
    assert isinstance(found, zarr.Array)
    return found


def read_all(array: zarr.Array) -> np.ndarray:
    return array.read(tuple((0, size) for size in array.shape), False)


# Orbax


@pytest.mark.parametrize("name", ["zarr3", "zarr3-ocdbt"])
def test_orbax_before_0_10_left_out_zeros(tmp_path: Path, name: str) -> None:
    path = REAL / "orbax" / "0.9.1" / name
    assert not (path / "zeros" / "c").exists() and not (path / "half" / "c" / "0").exists()
    assert_read_as_by("orbax", f"0.9.1/{name}", tmp_path, format="orbax")


@pytest.mark.parametrize("name", ["zarr3", "zarr3-ocdbt"])
def test_orbax_since_0_10_stores_zeros(tmp_path: Path, name: str) -> None:
    """With the flag that Orbax 0.10 introduced, the same files are damaged."""
    shutil.copytree(REAL / "orbax" / "0.9.1" / name, tmp_path / "run" / "2")
    tr.save(tmp_path / "run" / "1", {"ones": np.ones(2)}, format="orbax")
    about = tmp_path / "run" / "2" / "_METADATA"
    for flag in (True, False, None):
        metadata = json.loads(about.read_text()) | {"store_array_data_equal_to_fill_value": flag}
        about.write_text(json.dumps(metadata))
        if not flag:
            assert tr.restore(tmp_path / "run")["step"] == 0
            continue
        assert tr.restore(tmp_path / "run")["ones"].shape == (2,)  # the step before
        with pytest.raises(CorruptError):
            tr.restore(tmp_path / "run" / "2")


def test_orbax_without_a_fill_value_always_stores_zeros(tmp_path: Path) -> None:
    """In zarr 2 Orbax records no fill value, so TensorStore stores every chunk, with the flag and without."""
    tr.save(tmp_path / "1", {"w": np.ones(2)}, format="orbax")
    about = tmp_path / "1" / "_METADATA"
    metadata = json.loads(about.read_text()) | {"use_ocdbt": False}
    metadata.pop("store_array_data_equal_to_fill_value")
    about.write_text(json.dumps(metadata))
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/1/w"}}
    ts.open(spec, create=True, dtype="float64", shape=[2]).result().write(np.zeros(2)).result()
    assert not tr.restore(tmp_path / "1")["w"].any()
    (tmp_path / "1" / "w" / "0").unlink()
    with pytest.raises(CorruptError, match="w/0: expected a chunk"):
        tr.restore(tmp_path / "1")


# TensorStore


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("fill", [0, "NaN", 7])
@pytest.mark.parametrize("driver", ["zarr", "zarr3", "sharded"])
def test_chunks_that_tensorstore_leaves_out(tmp_path: Path, driver: str, fill: Any, dtype: str) -> None:
    """Also inner chunks of a shard, and the part of a chunk beyond the edge of the array."""
    if fill == "NaN" and dtype == "int8":
        return
    array = np.full(10, np.nan if fill == "NaN" else fill).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    array[4] = 1
    metadata: dict[str, Any] = {"shape": [10], "fill_value": fill}
    if driver == "zarr":
        metadata |= {"chunks": [4], "dtype": dtype if dtype == "bfloat16" else array.dtype.str}
    else:
        grid = {"name": "regular", "configuration": {"chunk_shape": [8 if driver == "sharded" else 4]}}
        metadata |= {"data_type": dtype, "chunk_grid": grid}
    if driver == "sharded":
        metadata["codecs"] = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [4]}}]
    kind = "zarr" if driver == "zarr" else "zarr3"
    kvstore = {"driver": "file", "path": f"{tmp_path}/a"}
    ts.open({"driver": kind, "kvstore": kvstore, "metadata": metadata}, create=True).result().write(array).result()
    for missing in ("metadata", "fill", "doubt"):
        assert read_all(open_array(tmp_path / "a", missing, kind)).tobytes() == array.tobytes()
    with pytest.raises(CorruptError):
        read_all(open_array(tmp_path / "a", "damage", kind))


# Levanter


def test_levanter_with_zarr_3_leaves_out_zeros(tmp_path: Path) -> None:
    """JAX's serializer writes zarr 3 since 0.6.2, with `ocdbt=False` into files."""
    tr.save(tmp_path / "step-1", {"w": np.ones(2)}, format="levanter", step=1)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/step-1/zeros"}}
    ts.open(spec, create=True, dtype="float32", shape=[2]).result().write(np.zeros(2, np.float32)).result()
    assert not (tmp_path / "step-1" / "zeros" / "c" / "0").exists()
    assert_same(tr.restore(tmp_path)["zeros"], np.zeros(2, np.float32))
    (tmp_path / "step-1" / "w" / "0").unlink()
    with pytest.raises(CorruptError, match="w/0: expected a chunk"):
        tr.restore(tmp_path)


# T5X


def test_t5x_before_tensorstore_0_1_14() -> None:
    """The release shows in the specs."""
    assert not (REAL / "t5x" / "0.1.13" / "checkpoint_1000" / "target.bias" / "0").exists()
    assert_same(tr.restore(REAL / "t5x" / "0.1.13"), {"target": TARGET})


def test_t5x_before_tensorstore_0_1_17(tmp_path: Path) -> None:
    """The user decides, as the error says. Until then, no older step stands for the one in doubt."""
    shutil.copytree(REAL / "t5x" / "0.1.16", tmp_path / "run")
    tr.save(tmp_path / "run" / "checkpoint_1", {"target": TARGET}, format="t5x")
    path = tmp_path / "run" / "checkpoint_1000"
    with pytest.raises(
        UnsupportedError, match=r"target/kernel: .*kernel/0\.0: .*0\.1\.17.* format='t5x-without-zeros'"
    ):
        tr.restore(tmp_path / "run")
    with tr.Checkpointer(tmp_path / "run") as ckpts, pytest.raises(UnsupportedError, match="without-zeros"):
        ckpts.restore_or_init(lambda: {"target": TARGET})
    with pytest.raises(UnsupportedError, match=r"0\.1\.17"):
        tr.verify(path)
    assert (tr.open(path)["target/scale"][...] == 1).all()  # no chunk of this leaf is missing
    for place in (tmp_path / "run", path):
        assert_same(tr.restore(place, format="t5x-without-zeros"), {"target": TARGET})
    assert tr.verify(path, format="t5x-without-zeros").ok
    tr.convert(path, tmp_path / "new", source_format="t5x-without-zeros")
    assert_same(tr.restore(tmp_path / "new"), {"target": TARGET})


def test_t5x_of_later_releases(tmp_path: Path) -> None:
    """Treering's own files, and files with zstd, are younger than TensorStore 0.1.17."""
    tr.save(tmp_path / "checkpoint_1", {"target": {"w": np.ones((300, 300))}}, format="t5x")
    tr.save(tmp_path / "checkpoint_2", {"target": {"w": np.zeros((300, 300))}}, format="t5x")
    (tmp_path / "checkpoint_2" / "target.w" / "0.0").unlink()
    with pytest.raises(CorruptError, match=r"w/0\.0: expected a chunk"):
        tr.restore(tmp_path / "checkpoint_2")
    assert tr.restore(tmp_path)["target"]["w"].all()


# Metadata that TensorStore does not know


def orbax_array(folder: Path, driver: str) -> dict[str, Any]:
    """Writes an Orbax checkpoint with one array in plain files and returns the array's metadata."""
    tr.save(folder, {"w": np.ones(2)}, format="orbax")
    about = json.loads((folder / "_METADATA").read_text()) | {"use_ocdbt": False, "use_zarr3": driver == "zarr3"}
    (folder / "_METADATA").write_text(json.dumps(about))
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/w"}}
    metadata = {"compressor": {"id": "zstd"}} if driver == "zarr" else {"codecs": [{"name": "zstd"}]}
    spec |= {"metadata": metadata, "create": True}
    ts.open(spec, dtype="float64", shape=[2]).result().write(np.ones(2)).result()
    return json.loads((folder / "w" / (".zarray" if driver == "zarr" else "zarr.json")).read_text())


@pytest.mark.parametrize(
    ("driver", "changes"),
    [
        ("zarr", {"compressor": {"id": "zstd", "level": 0, "checksum": True}}),
        ("zarr", {"compressor": {"id": "zstd", "level": "high"}}),
        ("zarr", {"fill_value": {"any": "thing"}}),
        ("zarr3", {"data_type": {"name": "float64"}}),
        ("zarr3", {"chunk_key_encoding": "default"}),
        ("zarr3", {"attributes": {"a": 1}, "dimension_names": ["x"]}),
        ("zarr3", {"note": {"must_understand": False}}),
    ],
)
def test_metadata_that_is_read(tmp_path: Path, driver: str, changes: dict[str, Any]) -> None:
    metadata = orbax_array(tmp_path / "1", driver) | changes
    (tmp_path / "1" / "w" / (".zarray" if driver == "zarr" else "zarr.json")).write_text(json.dumps(metadata))
    assert (tr.restore(tmp_path / "1")["w"] == 1).all()


@pytest.mark.parametrize(
    ("driver", "changes"),
    [
        ("zarr", {"zarr_format": 4}),
        ("zarr", {"filters": [{"id": "delta"}]}),
        ("zarr", {"compressor": {"id": "lzma"}}),
        ("zarr", {"dtype": "<M8[ns]"}),
        ("zarr3", {"zarr_format": 4}),
        ("zarr3", {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s"}}}),
        ("zarr3", {"data_type": {"name": "float64", "configuration": {"byte": "order"}}}),
        ("zarr3", {"chunk_grid": {"name": "rectilinear", "configuration": {"chunk_shapes": [[2]]}}}),
        ("zarr3", {"chunk_grid": "whole"}),
        ("zarr3", {"chunk_key_encoding": {"name": "hashed"}}),
        ("zarr3", {"codecs": ["bytes", "lz4"]}),
        ("zarr3", {"codecs": [{"name": "bytes", "configuration": {"endian": "little", "align": 8}}]}),
        ("zarr3", {"codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3, "window": 9}}]}),
        ("zarr3", {"codecs": ["bytes", "zstd"], "fill_value": {"any": "thing"}}),
        ("zarr3", {"storage_transformers": [{"name": "other"}]}),
        ("zarr3", {"note": {"must_understand": True}}),
        ("zarr3", {"note": 1}),
    ],
)
def test_metadata_that_is_unsupported_is_not_damage(tmp_path: Path, driver: str, changes: dict[str, Any]) -> None:
    """An unsupported step is never passed over; a damaged one is."""
    tr.save(tmp_path / "1", {"w": np.zeros(2)}, format="orbax")
    metadata = orbax_array(tmp_path / "2", driver) | changes
    (tmp_path / "2" / "w" / (".zarray" if driver == "zarr" else "zarr.json")).write_text(json.dumps(metadata))
    with pytest.raises(UnsupportedError, match="/2/w"):
        tr.restore(tmp_path)
