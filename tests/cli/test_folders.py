"""Directories of runs: verify reads or names everything in them."""

import pathlib
from typing import Any

import numpy as np
import pytest

import treering as tr
from hostile_input import flip


def _run(path: pathlib.Path) -> pathlib.Path:
    with tr.Checkpointer(path) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": np.full(1000, step)})
    return path


def _damage(checkpoint: pathlib.Path) -> None:
    (file,) = checkpoint.glob("arrays-*")
    flip(file, file.stat().st_size - 1)


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> pathlib.Path:
    _run(tmp_path / "runs" / "a")
    return tmp_path / "runs"


def _oks(found: Any) -> dict[str, bool]:
    return {pathlib.Path(one["path"]).name: one["ok"] for one in found.json["runs"]}


@pytest.mark.long
@pytest.mark.whole
def test_weights_next_to_runs_hide_none(runs: pathlib.Path, treering: Any) -> None:
    """Weights in a directory of runs do not hide the runs."""
    tr.save(runs / "base.safetensors", {"w": np.ones(4)})
    _damage(runs / "a" / "step-00000002")
    found = treering("verify", runs, "--json")
    assert found.code == 1 and _oks(found) == {"runs": True, "a": False}
    assert "1 run, 1 checkpoint" in treering("verify", runs).out
    sizes = treering("du", runs, "--json").json
    assert {part["path"] for part in sizes["parts"]} == {"a", "(files)"}
    assert _oks(treering("verify", runs, "--format", "treering", "--json")) == {"a": False}


def test_weights_next_to_checkpoints_hide_none(tmp_path: pathlib.Path, treering: Any) -> None:
    """Weights next to checkpoints do not hide the checkpoints."""
    tr.save(tmp_path / "base.safetensors", {"w": np.ones(4)})
    tr.save(tmp_path / "final", {"w": np.ones(4)})
    _damage(tmp_path / "final")
    assert treering("verify", tmp_path).code == 1


def test_checkpoints_next_to_runs_are_read(runs: pathlib.Path, treering: Any) -> None:
    tr.save(runs / "final.ckpt", {"w": np.ones(4)})
    tr.save(runs / "orbax", {"w": np.ones(4)}, format="orbax")
    np.savez(runs / "w.npz", w=np.ones(4))
    (runs / "notes").write_text("text")
    found = treering("verify", runs, "--json")
    assert found.code == 0 and set(_oks(found)) == {"a", "final.ckpt", "orbax", "w.npz"}
    _damage(runs / "final.ckpt")
    assert treering("verify", runs).code == 1


def test_what_lies_deeper_is_named(runs: pathlib.Path, treering: Any) -> None:
    """Folders with runs further below are named as not checked."""
    _run(runs / "group" / "b")
    tr.save(runs / "models" / "w.safetensors", {"w": np.ones(4)})
    _run(runs / "models" / "c")
    (runs / "logs" / "x").mkdir(parents=True)
    found = treering("verify", runs, "--json")
    assert found.json["not_checked"] == [str(runs / "group"), str(runs / "models" / "c")] and found.code == 0
    text = treering("verify", runs).out
    assert f"not checked: {runs / 'group'}" in text and "logs" not in text


@pytest.mark.parametrize("name", ["best", "eval-00000001"])
def test_checkpoints_next_to_steps_are_read(runs: pathlib.Path, treering: Any, name: str) -> None:
    tr.save(runs / "a" / name, {"w": np.ones(4)})
    (runs / "a" / "newest").symlink_to("step-00000002")
    assert treering("verify", runs / "a", "--json").json["checked"] == 3
    assert treering("verify", runs / "a", "--prefix", "step-", "--json").json["checked"] == 2
    _damage(runs / "a" / name)
    found = treering("verify", runs / "a", "--json")
    assert found.code == 1 and not tr.verify(runs / "a").ok
    assert found.json["problems"][0]["file"].startswith(name)


def test_a_run_that_has_just_begun_is_no_failure(runs: pathlib.Path, treering: Any) -> None:
    (runs / "b" / "step-00000001").mkdir(parents=True)
    (runs / "c").mkdir()
    (runs / "c" / "finished").touch()
    found = treering("verify", runs)
    assert found.code == 0 and f"{runs / 'b'}: 0 B, nothing to check yet\n" in found.out
    assert str(runs / "c") not in found.out
    (runs / "finished").touch()
    assert "2 runs · " in treering("ls", runs).out and treering("verify", runs).out == found.out
    assert treering("ls", runs / "c").code == 0, "the user calls it a run"
    assert treering("verify", runs / "b").code == 3


def test_a_run_without_a_size_ends_no_subset(runs: pathlib.Path, treering: Any) -> None:
    """A run of unknown size does not end `verify --subset`."""
    for name in ("x-00000001", "y-00000001"):
        tr.save(runs / "m" / name, {"w": np.ones(4)})
    found = treering("verify", runs, "--subset", "1G", "--json")
    assert found.code == 3 and _oks(found) == {"a": True, "m": False}
    assert found.json["part"] == [1, 1] and found.json["runs"][1]["unsupported"]


def test_a_bucket_is_such_a_folder(runs: pathlib.Path, treering: Any) -> None:
    """verify finds runs, checkpoints and weights in a bucket as in a folder."""
    assert treering("cp", runs / "a", "memory://folders/runs/a").code == 0
    tr.save("memory://folders/runs/final", {"w": np.ones(4)})
    tr.save("memory://folders/runs/base.safetensors", {"w": np.ones(4)})
    found = treering("verify", "memory://folders/runs", "--json")
    assert found.code == 0 and set(_oks(found)) == {"a", "final", "runs"}
    tr.save("memory://folders/runs/a/best", {"w": np.ones(4)})
    assert treering("verify", "memory://folders/runs/a", "--json").json["checked"] == 3


def test_each_run_of_a_directory_is_copied_and_pruned(tmp_path: pathlib.Path, treering: Any) -> None:
    sweep, copy, old = tmp_path / "sweep", tmp_path / "copy", tmp_path / "old"
    for name in ("a", "b"):
        with tr.Checkpointer(sweep / name) as ckpts:
            for step in (1, 2, 3):
                ckpts.save(step, {"w": np.full(3, step)})
    tr.save(sweep / "final", {"w": np.ones(3)})
    found = treering("cp", sweep, copy)
    assert found.code == 0 and found.out.count("3 checkpoints copied") == 2 and found.out.startswith("final:\n1 check")
    assert tr.steps(copy / "a") == tr.steps(copy / "b") == [1, 2, 3] and tr.verify(copy / "final").ok
    dry = treering("prune", sweep, "last:1", "--to", old, "--dry-run")
    assert dry.code == 0 and dry.out.count("2 steps would be moved") == 2 and not old.exists()
    found = treering("prune", sweep, "last:1", "--to", old, "--yes", "--json").json
    assert [(pathlib.Path(one["path"]).name, one["deleted"]) for one in found["runs"]] == [("a", [1, 2]), ("b", [1, 2])]
    assert tr.steps(sweep / "a") == [3] and tr.steps(old / "b") == [1, 2]
    found = treering("prune", sweep, "steps:2", "--yes")  # no run has it
    assert found.code == 3 and found.err.count("not pruned: ") == 2 and tr.steps(sweep / "a") == [3]
    (next((sweep / "a").glob("step*")) / "treering.json").write_bytes(b"{")
    found = treering("prune", sweep, "steps:3", "--yes")
    assert found.code in (0, 3) and tr.steps(sweep / "b") == [3]
    found = treering("cp", sweep, tmp_path / "more")
    assert found.code == 1 and "not copied" in found.err and tr.steps(tmp_path / "more" / "b") == [3]
