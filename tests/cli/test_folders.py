"""Directories of runs: verify reads or names everything in them."""

import csv
import os
import pathlib
import shutil
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treering as tr
from hostile_input import flip
from sqlite_store import SqliteValues
from treering import stores
from treering._cli import output
from treering.formats.treering import removal
from treering.stores.key_values import KeyValueStore, Value


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


def test_problems_are_named_within_the_run(runs: pathlib.Path, treering: Any) -> None:
    for step in (1, 2):
        (file,) = (runs / "a" / f"step-0000000{step}").glob("arrays-*")
        os.truncate(file, 100)
    (runs / "a" / "step-00000009").mkdir()
    (runs / "a" / "step-00000009" / "treering.json").write_bytes(b'{"version": 99}')
    for path in (runs, runs / "a"):
        (first, *lines) = treering("verify", path).out.splitlines()[: None if path.name == "a" else -1]
        assert first.startswith(f"{runs / 'a'}: ") and len(lines) == 3
        assert all(line.count("step-0000000") == 1 and str(runs) not in line for line in lines), lines


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
    assert dry.out.endswith("\n2 runs: 4 steps would be moved, " + dry.out.rsplit(", ", 1)[1])
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


@pytest.fixture
def sweep(tmp_path: pathlib.Path, treering: Any) -> pathlib.Path:
    """Returns a folder with two native runs, one of Orbax and a checkpoint next to them."""
    path = tmp_path / "sweep"
    for name, factor in (("small", 1.0), ("large", 0.5), ("other", 9.0)):
        with tr.Checkpointer(path / name) as ckpts:
            for step in (1, 2, 3):
                loss = {"val/loss": factor * abs(step - 2)} if name != "other" else {"aux": 1.0}
                ckpts.save(step, {"w": np.full(3, step)}, metrics={**loss, **({"acc": step / 4} if step < 3 else {})})
    assert treering("convert", path / "other", path / "orbax", "--format", "orbax").code == 0
    shutil.rmtree(path / "other")
    tr.save(path / "final", {"w": np.ones(3)})
    return path


def test_ls_of_runs_has_metrics_and_the_best(sweep: pathlib.Path, treering: Any) -> None:
    found = treering("ls", sweep, "--best", "val/loss:min", "--sort", "val/loss", "--json").json
    names = [pathlib.Path(one["path"]).name for one in found["runs"]]
    assert names == ["orbax", "large", "small"] and found["not_listed"] == ["final"]
    assert [(one["best"], one["best_value"], one["format"]) for one in found["runs"]] == [
        (None, None, "orbax"), (2, 0.0, "treering"), (2, 0.0, "treering")
    ]  # fmt: skip
    assert found["runs"][2]["metrics"] == {"val/loss": 1.0, "acc": 0.5}, "acc is that of step 2"
    text = treering("ls", sweep, "--best", "val/loss:min", "--metrics", "acc", "--keep", "last:1")
    head, *lines, total = text.out.splitlines()
    assert head.split() == ["run", "format", "steps", "latest", "age", "size", "acc", "best", "val/loss", "at", "notes"]
    assert len(lines) == 3 and "2 would be deleted" in lines[0] and total.startswith("3 runs · ")
    assert "1 other path with checkpoints (final)" in text.err
    (row,) = csv.DictReader(treering("ls", sweep, "--csv", "--sort", "size", "--last", "1").out.splitlines())
    assert row["metrics.acc"] == "0.5" and row["format"] == "treering"


@pytest.mark.parametrize("column", ["run", "format", "steps", "latest", "age", "saved", "size", "best", "val/loss"])
def test_ls_of_runs_sorts_by_each_column(column: str, sweep: pathlib.Path, treering: Any) -> None:
    os.rename(sweep / "small" / "step-00000001", sweep / "small" / "step-00000009")  # Now damaged.
    found = treering("ls", sweep, "--best", "acc:max", "--sort", column, "--json").json["runs"]
    order = [pathlib.Path(one["path"]).name for one in found]
    assert order.index("orbax") == {"run": 1, "age": 0}.get(column, order.index("orbax"))
    field = {"run": "path", "steps": "good", "age": "created", "saved": "created", "size": "nbytes"}
    values = [one.get(field.get(column, column)) for one in found]
    known = [one for one in values if isinstance(one, int | float | str)]
    assert known == sorted(known, reverse=column == "age") or column == "best"


def test_ls_names_the_columns_to_sort_by(sweep: pathlib.Path, treering: Any) -> None:
    found = treering("ls", sweep, "--sort", "los")
    assert found.code == 3 and "one of the columns run, format, steps, latest, age, saved, size, or a step" in found.err
    assert "expected one of the columns step, saved, size" in treering("ls", sweep / "small", "--sort", "x").err
    assert treering("ls", sweep, "--metrics", "x").code == treering("ls", sweep, "--best", "x").code == 3
    for name in ("small", "large"):
        shutil.rmtree(sweep / name)
    shutil.rmtree(sweep / "orbax")
    found = treering("ls", sweep, "--best", "x")
    assert found.code == 2 and "found a directory of checkpoints" in found.err
    assert len(treering("ls", sweep, "--sort", "size", "--last", "1", "--json").json["checkpoints"]) == 1


@pytest.mark.parametrize("run", ["", "large"])
def test_metrics_leave_room_for_the_rest(run: str, sweep: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    tr.record(sweep / "large", 3, {f"layer{n}/norm": 1.0 for n in range(20)})
    monkeypatch.setattr(output, "terminal_columns", lambda: 80)
    lines = treering("ls", sweep / run).out.splitlines()
    assert (max(map(len, lines[:-2])) <= 80 and "acc" in lines[0] and "notes" not in lines[0]) or run
    assert "no room for" in lines[-2] and "choose with --metrics" in lines[-2]
    assert "layer19/norm" in treering("ls", sweep / run, "--metrics", "layer19/norm").out.splitlines()[0]


class _Interrupted(SqliteValues):
    """A store in which another process makes a change just before the next read of a manifest."""

    change: Callable[[], object] | None = None

    def read(self, key: str, begin: int, end: int) -> tuple[bytes, Value]:
        change = self.change if key.endswith("treering.json") else None
        if change:
            self.change = None
            thread = threading.Thread(target=change)  # It does not inherit the listings of this one.
            thread.start()
            thread.join()
        return super().read(key, begin, end)


def test_ls_and_du_list_again_what_a_job_changes(treering: Any, tmp_path: pathlib.Path) -> None:
    values = _Interrupted(tmp_path / "bucket")

    def replace() -> None:
        tr.save("jobs://b/checkpoints/last", {"w": np.zeros(8)}, overwrite=True)

    def advance() -> None:
        tr.save("jobs://b/runs/two/step-00000002", {"w": np.ones(8)}, step=2)
        removal.delete(stores.get("jobs://b"), "jobs://b/runs/two/step-00000001")

    with stores.using(KeyValueStore(values), "jobs"):
        for name in ("checkpoints/first", "checkpoints/last", "runs/one/step-00000001", "runs/two/step-00000001"):
            tr.save(f"jobs://b/{name}", {"w": np.ones(4)}, step=1)
        for command in (("ls", "jobs://b/checkpoints"), ("du", "jobs://b/checkpoints/last")):
            values.change = replace
            found = treering(*command)
            assert (found.code, found.err, values.change) == (0, "", None), command
        values.change = advance
        found = treering("ls", "jobs://b/runs", "--json").json
        assert [one["latest"] for one in found["runs"]] == [1, 2]
