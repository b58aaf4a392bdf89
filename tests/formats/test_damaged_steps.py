"""Tests of foreign steps that are too damaged to be recognized: Treering lists and reports them as damaged."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import serialization

import treering as tr
from helpers import REAL
from treering import formats
from treering.errors import CorruptError

TREE = {"w": np.arange(4, dtype=np.float32)}
# By format: the name of a step, and the file in it that the tests cut short.
STEPS = {
    "t5x": ("checkpoint_5", "checkpoint"),
    "flax": ("checkpoint_5", ""),
    "fjformer": ("streaming_params_5", ""),
    "levanter": ("step-5", "metadata.json"),
    "orbax": ("5", "_METADATA"),
    "tensorflow": ("model.ckpt-5.index", ""),
}


@pytest.mark.parametrize("kept", [0, 5])
@pytest.mark.parametrize("format", STEPS)
def test_it_counts_as_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str, kept: int) -> None:
    run = tmp_path / "run"
    tr.save(run / "step-00000003", TREE, step=3)
    name, file = STEPS[format]
    if format == "tensorflow":
        for one in (REAL / "tensorflow" / "t5").iterdir():
            shutil.copy(one, run / one.name.replace("-1000", "-5"))
    else:
        tr.save(run / name, TREE, format=format)
    assert tr.steps(run) == [3, 5] and tr.verify(run).ok and tr.open(run).step == 5
    target = run / name / file if file else run / name
    data = target.read_bytes()
    target.chmod(0o644)
    target.write_bytes(data[:kept])

    assert tr.steps(run) == [3, 5]
    report = tr.verify(run)
    assert not report.ok and name in str(report)
    with pytest.raises(CorruptError):
        tr.open(run, step=5)
    with caplog.at_level(logging.WARNING):
        assert tr.open(run).step == 3
    assert "step 5 is damaged" in caplog.text
    caplog.clear()
    with tr.Checkpointer(run) as checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.restore(like=TREE)
    assert "step 5 is damaged" in caplog.text


def test_what_is_good_is_not_hidden(tmp_path: Path) -> None:
    """A damaged step does not hide an undamaged step with the same number. `verify` reports it."""
    tr.save(tmp_path / "5", TREE, format="orbax")
    (tmp_path / "checkpoint_5").write_bytes(b"")
    assert tr.open(tmp_path).format == "orbax" and tr.steps(tmp_path) == [5]
    assert [Path(problem.file).name for problem in tr.verify(tmp_path).problems] == ["checkpoint_5"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.json", json.dumps({"rows": ["x" * 100] * 1000}).encode()),  # Treering looks at 64 KiB of it.
        ("metadata.json", b'{"loss": NaN}'),
        ("metadata.json", b"[1, 2"),
        ("checkpoint", b"text"),
    ],
)
def test_other_directories_with_such_names(tmp_path: Path, name: str, text: bytes) -> None:
    tr.save(tmp_path / "step-00000003", TREE, step=3)
    for directory in ("step-100", "checkpoint_100"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / name).write_bytes(text)
    assert tr.steps(tmp_path) == [3] and tr.verify(tmp_path).ok and tr.open(tmp_path).step == 3


def test_a_save_of_orbax_that_is_under_way(tmp_path: Path) -> None:
    """A running save of Orbax is not a damaged step of T5X.

    On stores that cannot rename directories, Orbax writes under the final name from the beginning.
    """
    tr.save(tmp_path / "step-00000003", TREE, step=3)
    path = tmp_path / "checkpoint_7"
    tr.save(path, TREE, format="orbax")
    about = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    about |= {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": None}
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
    (path / "commit_success.txt").unlink(missing_ok=True)
    (path / "checkpoint").write_bytes(serialization.to_bytes({"a": 1}))
    assert tr.steps(tmp_path) == [3] and tr.verify(tmp_path).ok


def test_a_step_of_orbax_without_its_metadata(tmp_path: Path) -> None:
    tr.save(tmp_path / "4", TREE, format="orbax")
    tr.save(tmp_path / "5", TREE, format="orbax")
    for file in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding"):
        (tmp_path / "5" / file).unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "5" / "array_metadatas", ignore_errors=True)
    assert tr.steps(tmp_path) == [4, 5] and tr.open(tmp_path).step == 4
    assert [Path(problem.file).name for problem in tr.verify(tmp_path).problems] == ["5"]


def test_a_step_of_orbax_without_its_tree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tr.save(tmp_path / "4", TREE, format="orbax")
    (file,) = tmp_path.rglob("_METADATA")
    file.unlink()
    assert np.array_equal(tr.open(tmp_path / "4")["w"], TREE["w"])
    with pytest.raises(CorruptError, match="_METADATA: expected the list of the tree's leaves"):
        tr.restore(tmp_path / "4")
    assert "its file _METADATA is gone; leaves are named like their arrays" in caplog.text


def test_a_lone_file_of_t5x_in_a_run(tmp_path: Path) -> None:
    """A single file of T5X, whose name could also be one of Flax, is recognized by its contents."""
    file = next((REAL / "t5x").rglob("test_t5_tiny.checkpoint_0"))
    shutil.copy(file, tmp_path / file.name)
    assert tr.open(tmp_path).format == tr.open(tmp_path / file.name).format == "t5x"
    assert list(tr.open(tmp_path)) == list(tr.open(tmp_path / file.name))


@pytest.mark.parametrize("format", [name for name in STEPS if name != "tensorflow"])
def test_a_step_that_is_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Steps that another library's job deletes while Treering reads the run are skipped."""
    name = STEPS[format][0]
    for step in ("4", "5"):
        tr.save(tmp_path / name.replace("5", step), TREE, format=format)
    foreign_steps = formats.foreign_steps

    def listed(*arguments: Any) -> Any:
        found = foreign_steps(*arguments)
        path = tmp_path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(formats, "foreign_steps", listed)
    assert tr.verify(tmp_path).ok
    tr.save(tmp_path / name, TREE, format=format)
    ckpt = tr.open(tmp_path)
    assert ckpt.path == str(tmp_path / name.replace("5", "4")) and list(ckpt) == ["w"]


def test_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from treering._tools.listing import list_run

    tr.save(tmp_path / "step-00000003", TREE, step=3)
    tr.save(tmp_path / "checkpoint_5", TREE, format="t5x")
    (tmp_path / "checkpoint_5" / "checkpoint").write_bytes(b"\x82\xa7ver")
    rows = {row.step: (row.state, row.format) for row in list_run(tmp_path).rows}
    assert rows == {3: ("good", "treering"), 5: ("damaged", "t5x")}
