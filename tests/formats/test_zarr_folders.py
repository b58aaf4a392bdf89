"""Folders of zarr arrays that are no checkpoint of a library: errors name them, and `format="zarr"` reads them.

zarr-python wrote those in `real/zarr`.
"""

import base64
import contextlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import treering as tr
from helpers import REAL, assert_same
from treering.errors import CorruptError, NotFoundError, TreeringError, UnsupportedError

WEIGHT = np.zeros((4, 4), np.float32)
WEIGHT[:2] = np.arange(8).reshape(2, 4)
ONES = np.ones(3, np.float32)
TREE = {
    "half": np.array([5, *[0] * 7], np.float16),
    "nan": np.full(2, np.nan),
    "params": {"b": np.full(3, 7), "w": WEIGHT},
}


def write(path: Path, driver: str, *, base: Path | None = None, array: Any = ONES) -> None:
    """Writes an array with TensorStore, into files or into the database of a folder."""
    files: dict[str, Any] = {"driver": "file", "path": f"{path}/"}
    kvstore = {"driver": "ocdbt", "base": f"file://{base}/", "path": f"{path}/"} if base else files
    stored = ts.open({"driver": driver, "kvstore": kvstore}, create=True, dtype=array.dtype, shape=array.shape)
    stored.result().write(array).result()


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_group_of_zarr_python(tmp_path: Path, version: str) -> None:
    path = REAL / "zarr" / version
    ckpt = tr.open(path, format="zarr")
    assert (ckpt.format, ckpt.step, ckpt.metadata) == ("zarr", None, {"note": "by zarr-python"})
    assert_same(tr.restore(path, format="zarr"), TREE)
    assert (ckpt["params/w"][1:3] == WEIGHT[1:3]).all()
    assert tr.verify(path, format="zarr").ok
    assert_same(tr.restore(path, TREE["params"], at="params", format="zarr"), TREE["params"])
    tr.convert(path, tmp_path / "ours", source_format="zarr")
    assert_same(tr.restore(tmp_path / "ours"), TREE)
    with pytest.raises(UnsupportedError, match="zarr arrays are only read"):
        tr.save(tmp_path / "x", TREE, format="zarr")
    with pytest.raises(NotFoundError, match=r"it is a zarr .*; open it with format='zarr' .* if it is complete; of no"):
        tr.open(path)


def test_an_array_alone() -> None:
    assert tr.restore(REAL / "zarr" / "array", format="zarr").tolist() == [0, 1, 2]
    with pytest.raises(TreeringError, match=r"it is a zarr array or group \(version 3\)"):
        tr.open(REAL / "zarr" / "array")


def test_arrays_without_groups(tmp_path: Path) -> None:
    write(tmp_path / "x" / "params" / "w", "zarr3")
    write(tmp_path / "x" / "params" / "b", "zarr")
    with pytest.raises(TreeringError, match="it is a folder of zarr arrays; open it with format='zarr'"):
        tr.open(tmp_path / "x")
    found = tr.restore(tmp_path / "x", format="zarr")
    assert_same(found, {"params": {"b": np.ones(3, np.float32), "w": np.ones(3, np.float32)}})
    (tmp_path / "x" / "params" / "b" / "0").unlink()  # TensorStore records no fill value in zarr 2
    with pytest.raises(CorruptError, match="b/0: expected a chunk"):
        tr.restore(tmp_path / "x", format="zarr")


def test_a_database(tmp_path: Path) -> None:
    write(Path("params/w"), "zarr3", base=tmp_path / "x")
    write(Path("params/zeros"), "zarr3", base=tmp_path / "x", array=np.zeros(4, np.int8))
    with pytest.raises(TreeringError, match="it is an OCDBT database of TensorStore; open it with format='zarr'"):
        tr.open(tmp_path / "x")
    found = tr.restore(tmp_path / "x", format="zarr")
    assert_same(found, {"params": {"w": np.ones(3, np.float32), "zeros": np.zeros(4, np.int8)}})
    for file in (tmp_path / "x" / "d").iterdir():
        file.unlink()
    with pytest.raises(CorruptError):
        tr.restore(tmp_path / "x", format="zarr")


def test_nothing_is_read_without_being_asked_for(tmp_path: Path) -> None:
    """An unfinished checkpoint of another library looks like a folder of arrays."""
    tr.save(tmp_path / "run" / "step-1", {"w": np.ones(3)}, format="levanter", step=1)
    tr.save(tmp_path / "run" / "step-2", {"w": np.ones(3)}, format="levanter", step=2)
    (tmp_path / "run" / "step-2" / "metadata.json").unlink()
    assert tr.steps(tmp_path / "run") == [1]
    with pytest.raises(NotFoundError, match="levanter: it is a folder without"):
        tr.open(tmp_path / "run" / "step-2")
    for name in ("v2", "v3"):  # datasets next to the steps
        shutil.copytree(REAL / "zarr" / name, tmp_path / "run" / f"step-{name[1]}0")
    assert tr.steps(tmp_path / "run") == [1] and tr.open(tmp_path / "run").step == 1


def test_folders_that_are_only_named(tmp_path: Path) -> None:
    for names, text in [
        (
            ["pytreedef.json", "array_store/manifest.ocdbt"],
            "a checkpoint of JAX's pytree_serialization; open it with format='zarr'",
        ),
        (["snapshots/A", "manifests/B", "transactions/C", "refs/branch.main/ref.json"], "a repository of Icechunk"),
    ]:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        for name in names:
            (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "x" / name).write_text("{}")
        with pytest.raises(TreeringError, match=f"it is {text}"):
            tr.open(tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x.zarr.zip", "w") as archive:
        archive.writestr("w/.zarray", "{}")
    write(Path("w"), "zarr3", base=tmp_path / "database")
    for place, text in [
        (tmp_path / "x.zarr.zip", "a zip archive of zarr arrays; unpack it first"),
        (tmp_path / "database" / "manifest.ocdbt", "a file of an OCDBT database of TensorStore; open the folder"),
    ]:
        with pytest.raises(TreeringError, match=f"it is {text}"):
            tr.open(place)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TreeringError, match="expected a folder of zarr arrays, found none"):
        tr.open(tmp_path / "empty", format="zarr")


JAX = REAL / "jax" / "tree"


def test_a_checkpoint_of_jax(tmp_path: Path) -> None:
    """Its own serializer leaves out chunks of zeros, and numbers the arrays."""
    with pytest.raises(NotFoundError, match="it is a checkpoint of JAX's pytree_serialization; open it with format='z"):
        tr.open(JAX)
    tree = {
        "half": np.array([0, 0, 1, 2], ml_dtypes.bfloat16),
        "list": [np.arange(3, dtype=np.int32), None, (np.array(1.5, np.float32),), [], {}],
        "a/b": np.ones((2, 2), np.float32),
        "pair": {"x": np.zeros(2, np.float32), "y": np.zeros((0, 2), np.float32)},
    }
    assert_same(tr.restore(JAX, format="zarr"), tree)
    assert tr.verify(JAX, format="zarr").ok
    tr.convert(JAX, tmp_path / "ours", source_format="zarr")
    assert_same(tr.restore(tmp_path / "ours"), tree)


def test_damage_of_a_checkpoint_of_jax(tmp_path: Path) -> None:
    shutil.copytree(JAX, tmp_path / "x")
    file = tmp_path / "x" / "pytreedef.json"
    text = file.read_text()
    for old, new in [("bfloat16[4]", "bfloat16[5]"), ("Array(int32[3])", "Array(int32[3]"), ("    null,\n", "")]:
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
        with pytest.raises(TreeringError, match=r"pytreedef\.json: expected"):
            tr.restore(tmp_path / "x", format="zarr")
    file.write_text(text)
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/x/array_store/"}).result()
    store.delete_range(ts.KvStore.KeyRange("1/", "2")).result()  # the array half
    with pytest.raises(CorruptError, match=r"array_store/1/zarr\.json: expected an array's metadata, found nothing"):
        tr.restore(tmp_path / "x", format="zarr")
    assert tr.open(tmp_path / "x", format="zarr")["a~1b"].shape == (2, 2)


@pytest.mark.long
def test_any_change_of_the_tree_of_jax(tmp_path: Path) -> None:
    """Each byte of the FlatBuffer is changed in three ways; none ends in another error, or takes long."""
    shutil.copytree(JAX, tmp_path / "x")
    file = tmp_path / "x" / "pytreedef.json"
    about = json.loads(file.read_text())
    data = base64.b64decode(about["__jax_pytreedef_repr"])
    for at in range(len(data)):
        for value in (0, data[at] ^ 4, 255):
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            file.write_text(json.dumps({**about, "__jax_pytreedef_repr": base64.b64encode(changed).decode()}))
            with contextlib.suppress(TreeringError):
                tr.open(tmp_path / "x", format="zarr")
