"""No damage goes unnoticed."""

import pathlib
import shutil

import numpy as np
import pytest

import treering as tr
from hostile import flip
from treering.errors import NotFoundError


def test_a_report_names_the_file_the_leaves_and_the_block(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c"
    tr.save(path, {"a": np.zeros(3 << 20, np.uint8), "b": np.zeros(1 << 20, np.uint8)})
    (file,) = path.glob("*.safetensors")
    for block in (1, 3):
        flip(file, 4096 + (block << 20) + 17)
    report = tr.verify(path)
    assert not report.ok and not report
    assert [(p.file, p.leaves, p.block) for p in report.problems] == [(file.name, ("a",), 1), (file.name, ("b",), 3)]
    assert f"{file.name}, block 3: the bytes are not those that were saved (leaves: b)" in str(report)
    with pytest.raises(tr.errors.CorruptError, match=r"2 of 4 blocks .*block 1 first.*damaged leaves: a, b"):
        tr.restore(path)
    assert tr.restore(path, like={"a": ..., "b": ...}) == {"a": ..., "b": ...}
    assert tr.open(path)["a"][:100].sum() == 0
    with pytest.raises(tr.errors.CorruptError):
        tr.open(path)["a"][(1 << 20) - 1 : (1 << 20) + 1]
    assert tr.restore(path, verify=False)["a"].sum() == 1


def test_a_run_is_verified_as_a_whole(tmp_path: pathlib.Path) -> None:
    for n in range(3):
        tr.save(tmp_path / f"step-{n:08}", {"x": np.zeros(10)})
    report = tr.verify(tmp_path)
    assert report.ok and report.nbytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    flip(tmp_path / "step-00000001" / "treering.json", 30)
    next((tmp_path / "step-00000002").glob("*.safetensors")).unlink()
    files = [problem.file for problem in tr.verify(tmp_path).problems]
    assert files[0] == "step-00000001/treering.json" and files[1].startswith("step-00000002/arrays-")
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(NotFoundError):
        tr.verify(tmp_path / "step-00000001")
