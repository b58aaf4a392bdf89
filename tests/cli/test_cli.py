"""The `treering` command, as users and scripts call it."""

import csv
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from helpers import Closed
from treering import stores
from treering._cli.main import cli
from treering._core.outline import outline
from treering._core.units import nbytes, number
from treering._printable import safe
from treering.errors import MismatchError
from treering.stores import probe
from treering.stores.posix import Disk

ESCAPE = "\x1b[31m"


def state(step: int) -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharded = jax.device_put(np.arange(64.0, dtype="float32").reshape(8, 8), NamedSharding(mesh, PartitionSpec("data")))
    layers = [{"w": np.full((4, 4), step + n, "float32"), "b": np.zeros(4, "int32")} for n in range(5)]
    return {"params": {"embed": sharded, "layers": layers}, "step": step, "key": jax.random.key(0), "none": None}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> str:
    with tr.Checkpointer(tmp_path / "run", metadata={"lr": 0.1}) as ckpts:
        for step in (1, 2, 3, 4):
            ckpts.save(step, state(step), metrics={"val/loss": 1 / step, "acc": step / 8})
        ckpts.wait()
        ckpts.pin(1)
    return str(tmp_path / "run")


# Runs


def test_ls_shows_state_pins_best_and_latest(run: str, treering: Any) -> None:
    """The notes of ls name valid, damaged, unfinished, pinned, best and latest steps."""
    damaged = pathlib.Path(run, "step-00000003", "treering.json")
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    os.mkdir(os.path.join(run, "step-00000009"))
    found = treering("ls", run, "--best", "val/loss:max", "--keep", "last:1")
    assert found.code == 0 and "warning: step 3 is damaged" in found.err
    lines = {int(line.split()[0]): line for line in found.out.splitlines()[1:-1]}
    notes = {step: line.rsplit("  ", 1)[1].strip() for step, line in lines.items()}
    assert notes == {
        1: "best, pinned",
        2: "would be deleted",
        3: "damaged",
        4: "latest",
        9: "unfinished",
    }
    assert re.search(r"val/loss +acc +notes", found.out) and "5 steps" in found.out


def test_ls_as_json_has_everything(run: str, treering: Any) -> None:
    found = treering("ls", run, "--json", "--best", "acc:max", "--keep", "steps:2").json
    assert [row["step"] for row in found["steps"]] == [1, 2, 3, 4] and found["best"] == 4 and not found["finished"]
    assert [row["deleted"] for row in found["steps"]] == [False, False, True, False]
    assert found["steps"][3]["metrics"] == {"val/loss": 0.25, "acc": 0.5} and found["steps"][3]["latest"]
    assert found["steps"][0]["pinned"] and found["steps"][0]["created"].endswith("+00:00")
    assert sum(row["nbytes"] for row in found["steps"]) == sum(
        file.stat().st_size for file in pathlib.Path(run).glob("*/*") if file.name != "pinned"
    )


def test_ls_as_csv_has_a_column_for_each_metric(run: str, treering: Any) -> None:
    rows = list(csv.DictReader(treering("ls", run, "--csv", "--keep", "last:1").out.splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"] and rows[3]["latest"] == "true"
    assert [row["metrics.val/loss"] for row in rows][:2] == ["1.0", "0.5"] and rows[0]["pinned"] == "true"
    assert [row["deleted"] for row in rows] == ["false", "true", "true", "false"]
    name = 'a,"b\n=c'
    tr.record(run, 4, {name: 1.0})
    (row,) = [row for row in csv.DictReader(treering("ls", run, "--csv").out.splitlines()) if row["step"] == "4"]
    assert row[safe(f"metrics.{name}")] == "1.0" and row["linked_by"] == ""
    for link in ("best", "b"):
        os.symlink("step-00000004", os.path.join(run, link))
    (row,) = [row for row in csv.DictReader(treering("ls", run, "--csv").out.splitlines()) if row["step"] == "4"]
    assert sorted(row["linked_by"].split(", ")) == ["b", "best"]


def test_a_directory_of_runs_has_a_line_for_each(
    run: str, tmp_path: pathlib.Path, treering: Any, use_disk: Any
) -> None:
    with tr.Checkpointer(tmp_path / "other") as ckpts:
        ckpts.save(7, {"x": np.ones(3)})
        ckpts.finish()
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes").write_bytes(b"12345")
    _flip(run, 2)
    found = treering("ls", tmp_path)
    lines = found.out.splitlines()
    assert found.code == 0 and [line.split()[:3] for line in lines[1:3]] == [
        ["other", "treering", "1"],
        ["run", "treering", "4"],
    ]
    assert "finished" in lines[1] and lines[3].startswith("2 runs · ")
    rows = list(csv.DictReader(treering("ls", tmp_path, "--csv").out.splitlines()))
    assert [(row["path"], row["good"], row["finished"]) for row in rows] == [
        (str(tmp_path / "other"), "1", "true"),
        (run, "4", "false"),
    ]
    assert [line.split()[3] for line in lines[1:3]] == ["7", "4"]
    sizes = {part["path"]: part["nbytes"] for part in treering("du", tmp_path, "--json").json["parts"]}
    assert set(sizes) == {"other", "run", "logs", "(files)"} and sizes["(files)"] == 5
    assert sizes["other"] == sum(file.stat().st_size for file in (tmp_path / "other").rglob("*") if file.is_file())
    checked = treering("verify", tmp_path)
    assert checked.code == 1 and re.search(r"/other: .*, all good\n", checked.out)
    assert re.search(r"/run: .*, 1 problem\n  step-00000002/", checked.out)
    assert re.search(r"\n2 runs, [\d.]+ .?B, 1 with problems\n$", checked.out)
    assert treering("verify", tmp_path, "--subset", "10G", "--json").json["part"] == [1, 1]
    (tmp_path / "lost+found").mkdir()
    use_disk(Closed("lost+found"))
    assert treering("ls", tmp_path).code == 0, "lost+found belongs to the file system, not to the user"
    use_disk(Closed("other"))
    found = treering("ls", tmp_path, "--json")
    assert found.code == 3 and [bool(one["error"]) for one in found.json["runs"]] == [True, False]


def test_files_that_steps_share_count_once(tmp_path: pathlib.Path, treering: Any) -> None:
    """du, ls and prune say what the disk holds, and what a deletion frees, as du(1) does."""
    run = tmp_path / "run"
    with tr.Checkpointer(run) as ckpts:
        frozen = jnp.zeros(1 << 19)
        for step in range(1, 7):
            ckpts.save(step, {"frozen": frozen, "n": np.full(3, step)})
    files = [file for file in run.rglob("*") if file.is_file()]
    on_disk = sum({file.stat().st_ino: file.stat().st_size for file in files}.values())
    assert on_disk < 7 << 20 < 12 << 20 < sum(file.stat().st_size for file in files)
    sizes = treering("du", run, "--json").json
    folders = sum(part["nbytes"] for part in sizes["parts"] if part["path"] != "(files)")
    assert treering("ls", run, "--keep", f"size:{folders}").out.count("would be deleted") == 0
    assert treering("ls", run, "--keep", f"size:{folders - 1}").out.count("would be deleted") == 1
    assert sizes["nbytes"] == on_disk and folders <= on_disk
    total = sum(row["nbytes"] for row in treering("ls", run, "--json").json["steps"])
    last = treering("ls", run).out.splitlines()[-1]
    assert last.startswith(f"6 steps · {nbytes(total)}, {nbytes(folders)} on the disk · ") and total > 12 << 20
    free = treering("prune", run, "last:1", "--dry-run").out
    kept = sum(file.stat().st_size for file in (run / "step-00000006").iterdir())
    assert f"frees at most {nbytes(folders - kept)}: other steps share" in free
    treering("prune", run, "last:1", "--yes")
    assert "on the disk" not in treering("ls", run).out and "frees" not in treering("prune", run, "last:1").out
    assert treering("du", run, "--json").json["nbytes"] < kept + 10_000 and tr.verify(run).ok


def test_what_may_not_be_read_is_named_and_the_rest_is_done(run: str, treering: Any, use_disk: Any) -> None:
    """ls, du and verify name a step that this user may not read, do the rest, and end with 3."""
    use_disk(Closed("step-00000002"))
    listed = treering("ls", run, "--json")
    assert listed.code == 3 and [row["state"] for row in listed.json["steps"]] == ["good", "closed", "good", "good"]
    sizes = treering("du", run, "--json")
    assert sizes.code == 3 and sizes.json["closed"] == [f"{run}/step-00000002"] and "step-00000002" in sizes.err
    assert [part["path"] for part in sizes.json["parts"]] == ["step-00000001", "step-00000003", "step-00000004"]
    checked = treering("verify", run)
    assert checked.code == 3 and "1 of 4 checkpoints cannot be checked" in checked.out and "all good" not in checked.out
    assert re.search("cannot be checked: .*step-00000002", checked.out)
    use_disk(Closed("treering.json"))
    assert [row["state"] for row in treering("ls", run, "--json").json["steps"]] == ["closed"] * 4
    (arrays,) = pathlib.Path(run, "step-00000002").glob("arrays-*")
    use_disk(Closed(arrays.name))
    assert treering("verify", run).code == 3 and treering("verify", arrays.parent, "--json").json["nbytes"] == 0
    use_disk(Closed("step-00000002"))
    _flip(run, 3)
    both = treering("verify", run, "--json")
    assert both.code == 1 and len(both.json["closed"]) == 1 and len(both.json["problems"]) == 1 and not both.json["ok"]


@pytest.mark.parametrize("format", ["flax", "t5x", "orbax"])
def test_closed_steps_of_other_libraries_are_named(
    tmp_path: pathlib.Path, treering: Any, use_disk: Any, format: str
) -> None:
    names = {step: str(step) if format == "orbax" else f"checkpoint_{step}" for step in (1, 2)}
    for name in names.values():
        tr.save(tmp_path / name, {"target": {"w": np.ones(3)}}, format=format)
    use_disk(Closed(names[2]))
    for command in ("ls", "verify"):
        found = treering(command, tmp_path, "--json")
        assert found.code == 3 and len(found.json["closed"]) == 1 and names[2] in found.json["closed"][0]
    assert [row["step"] for row in treering("ls", tmp_path, "--json").json["steps"]] == [1]


def test_ls_shows_the_steps_of_other_libraries(tmp_path: pathlib.Path, treering: Any) -> None:
    tr.save(tmp_path / "checkpoint_7", {"x": np.ones(3)}, format="flax")
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(8, {"x": np.ones(3)})
    rows = treering("ls", tmp_path, "--json").json["steps"]
    assert [(row["step"], row["format"], row["state"]) for row in rows] == [
        (7, "flax", "good"),
        (8, "treering", "good"),
    ]


@pytest.mark.long
def test_prune_deletes_what_a_checkpointer_would(tmp_path: pathlib.Path, treering: Any) -> None:
    """prune deletes the same steps as a `Checkpointer` with the same policy."""
    policies = [
        (["last:2"], tr.keep.last(2)),
        (["every:4", "best:1:m:min"], tr.keep.every(4) | tr.keep.best(1, "m", "min")),
        (["best:2:a:b:max"], tr.keep.best(2, "a:b", "max", unscored="keep")),
        (["steps:3,5"], tr.keep.steps(3, 5)),
    ]
    for n, (texts, policy) in enumerate(policies):
        there, pruned = tmp_path / f"a{n}", tmp_path / f"b{n}"
        for at, keep in ((there, policy), (pruned, None)):
            with tr.Checkpointer(at, keep=keep) as ckpts:
                for step in range(9):
                    metrics = {"m": float((step - 4) ** 2)} | ({"a:b": float(step % 4)} if step > 3 else {})
                    ckpts.save(step, {"x": np.ones(2)}, metrics=metrics)
        before = tr.steps(pruned)
        dry = treering("prune", pruned, *texts, "--dry-run")
        assert dry.code == 0 and tr.steps(pruned) == before and "would be deleted" in dry.out
        assert treering("prune", pruned, *texts, "--yes").code == 0
        assert set(tr.steps(pruned)) <= set(before)
        # A run applies its policy after every save, so it may have deleted a step that is the best by now. It deletes
        # no step that prune keeps.
        assert set(tr.steps(pruned)) == policy.kept(_saved(before, pruned, treering)) | {8}
        assert set(tr.steps(there)) <= set(tr.steps(pruned)) | set(tr.steps(there))


def _saved(steps: list[int], run: pathlib.Path, treering: Any) -> list[Any]:
    def metrics(step: int) -> dict[str, float]:
        return {"m": float((step - 4) ** 2)} | ({"a:b": float(step % 4)} if step > 3 else {})

    return [tr.keep.Saved(step, metrics(step)) for step in steps]


def test_prune_asks_and_without_a_terminal_deletes_nothing(run: str, treering: Any) -> None:
    found = treering("prune", run, "last:1")
    assert found.code == 2 and "--yes" in found.err and tr.steps(run) == [1, 2, 3, 4]
    assert treering("prune", run, "last:1", "--yes", "--json").json["deleted"] == [2, 3]
    assert tr.steps(run) == [1, 4], "1 is pinned"
    assert treering("prune", run, "size:1K", "--yes").out == "nothing to delete\n"


@pytest.mark.parametrize(
    "keep",
    [
        "last",
        "last:",
        "last:x",
        "last:-1",
        "newest:3",
        "best:1:loss",
        "best:1:loss:low",
        "steps:1,x",
        "every:3y",
        "size:3x",
        "",
    ],
)
def test_wrong_policies_are_named_and_delete_nothing(run: str, treering: Any, keep: str) -> None:
    found = treering("prune", run, keep, "--yes")
    assert found.code == 2 and repr(keep) in found.err and "KEEP is last:N" in found.err
    assert "int()" not in found.err
    assert tr.steps(run) == [1, 2, 3, 4]


def test_the_help_of_prune_names_every_policy(treering: Any) -> None:
    from treering._cli.arguments import KEEP

    assert " ".join(KEEP.split()) in " ".join(treering("prune", "--help").out.split())


def test_pins_are_those_of_the_run(run: str, treering: Any) -> None:
    assert treering("pin", run, 2, 3) == (0, "pinned: 2, 3\n", "")
    assert treering("unpin", run, 1) == (0, "unpinned: 1\n", "")
    assert tr.Checkpointer(run).pinned == [2, 3]
    assert treering("pin", run, 9).code == 3


def test_pin_checks_all_steps_first_and_names_another_librarys(run: str, tmp_path: pathlib.Path, treering: Any) -> None:
    """pin marks nothing if one step is missing or of another library."""
    assert treering("pin", run, 2, 9).code == 3 and tr.Checkpointer(run).pinned == [1]
    assert treering("pin", run, 2, "--json").json == {"path": run, "steps": [2], "pinned": [1, 2]}
    tr.save(tmp_path / "flax" / "checkpoint_1", {"w": np.ones(3)}, format="flax")
    found = treering("pin", tmp_path / "flax", 1)
    assert found.code == 3 and "checkpoint_1" in found.err
    assert "another library wrote; Treering never deletes it, so it needs no pin" in found.err
    assert "found only steps of another library: 1" in treering("pin", tmp_path / "flax", 2).err


@pytest.mark.long
@pytest.mark.whole
def test_every_command_that_names_a_run_takes_its_prefix(tmp_path: pathlib.Path, treering: Any) -> None:
    run = tmp_path / "run"
    for prefix in ("best-", "ema-"):
        with tr.Checkpointer(run, prefix=prefix) as ckpts:
            for step in (1, 2, 3):
                ckpts.save(step, {"w": np.full(3, step)}, metrics={"loss": 1.0})
    calls = [
        ["ls", run], ["show", run], ["stats", run], ["diff", run, run], ["diff", run, "--steps", 2, 2], ["verify", run],
        ["convert", run, tmp_path / "c"], ["cp", run, tmp_path / "copy"], ["pin", run, 2], ["unpin", run, 2],
        ["report", run, "-o", tmp_path / "page.html", "--steps", 1], ["delete", run, 1, "-y"],
        ["prune", run, "last:1", "-y", "--to", tmp_path / "moved"], ["rewind", run, "--all"],
    ]  # fmt: skip
    takes = {name for name, command in cli.commands.items() if any(one.name == "prefix" for one in command.params)}
    assert takes == {call[0] for call in calls} | {"browse"}
    for call in calls:
        unclear = treering(*call)
        assert unclear.code == 3 and "best-, ema-" in unclear.err and "pass --prefix" in unclear.err, call
        missing = treering(*call, "--prefix", "nosuch-")
        assert missing.code == 3 and ("nosuch-" in missing.err or "pass --prefix 'ema-'" in missing.err), call
        found = treering(*call, "--prefix", "ema-")
        assert found.code == 0, (call, found.err)
    assert treering("du", run).code == 0, "du needs no prefix: it sizes every folder"
    assert sorted(os.listdir(run)) == ["best-00000001", "best-00000002", "best-00000003", "rewound-1"]
    assert sorted(os.listdir(tmp_path / "copy")) == ["ema-00000001", "ema-00000002", "ema-00000003"]
    assert os.listdir(tmp_path / "moved") == ["ema-00000002"]
    assert treering("cp", tmp_path / "c", tmp_path / "d", "--prefix", "ema-").code == 3, "it is not a run"


def test_best_is_a_step_of_diff_pin_and_rewind(run: str, treering: Any) -> None:
    best = int(treering("ls", run, "--json", "--best", "val/loss:min").json["best"])
    found = treering("diff", run, "--best", "val/loss:min")
    assert f"step {best}: val/loss " in found.err and found.code == int(best != tr.steps(run)[-1])
    assert best in treering("pin", run, "--best", "val/loss:min", "--json").json["pinned"]
    assert treering("rewind", run, "--best", "val/loss:min", "--dry-run", "--json").json["step"] == best
    for arguments in (["pin", run], ["pin", run, 1, "--best", "x"], ["rewind", run, "--all", "--best", "x"],
                      ["diff", run, "--best", "x", "--steps", 1, 2]):  # fmt: skip
        assert treering(*arguments).code == 2


def test_rewind_says_as_json_where_the_steps_are(run: str, treering: Any) -> None:
    about = {"path": run, "step": 2, "dry_run": False}
    place = os.path.join(run, "rewound-1")
    assert treering("rewind", run, 2, "--json").json == {**about, "set_aside": [3, 4], "to": place}
    assert treering("rewind", run, 2, "--json").json == {**about, "set_aside": [], "to": None}


@pytest.mark.long
def test_rewind_archives_steps_and_releases_the_lock(run: str, treering: Any) -> None:
    """rewind archives the later steps and releases the lock of the run."""
    found = treering("rewind", run, 2)
    assert found == (0, f"2 steps archived in {run}/rewound-1: 3, 4\n", "") and tr.steps(run) == [1, 2]
    assert treering("rewind", run, 2) == (0, "nothing to archive\n", "")
    assert "rewound-1" in treering("ls", run).out
    parts = {part["path"] for part in treering("du", run, "--json").json["parts"]}
    assert parts == {"step-00000001", "step-00000002", "rewound-1"}
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(3, {"x": 1})
        ckpts.wait()  # A job holds the lock from its first save on.
        assert program("rewind", run, 1).returncode == 3, "another process writes the run"
    assert tr.steps(run) == [1, 2, 3]


def test_steps_on_their_way_elsewhere_are_not_changed(tmp_path: pathlib.Path, treering: Any) -> None:
    """Commands refuse to change a local tier, whose steps are still to be uploaded."""
    with tr.Checkpointer(tmp_path / "far", local=tmp_path / "near", keep_local=None) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"x": step})
    for command in (["prune", tmp_path / "near", "last:1", "-y"], ["rewind", tmp_path / "near", 1]):
        found = treering(*command)
        assert found.code == 3 and str(tmp_path / "far") in found.err
    assert treering("ls", tmp_path / "near").code == 0 and tr.steps(tmp_path / "near") == [1, 2]


def test_tiers_name_what_their_copies_survive(tmp_path: pathlib.Path, treering: Any) -> None:
    """ls names it in both tiers, and says nothing of it in a run without a local tier; doctor names it for a place."""
    remote, local = tmp_path / "remote", tmp_path / "local"
    for ckpts in (tr.Checkpointer(remote, local=local), tr.Checkpointer(tmp_path / "alone")):
        with ckpts:
            ckpts.save(1, {"x": 1})
    disk = "the process and a restart of the host"
    assert [one.survives for one in tr.Checkpointer(remote, local=local).copies(1)] == [disk, disk]
    for path, tier in ((remote, "remote"), (local, "local")):
        assert f"the {tier} tier of a run; these copies survive {disk}" in treering("ls", path).out
        found = treering("ls", path, "--json").json
        assert (found["tier"], found["survives"]) == (tier, disk)
    assert "tier" not in treering("ls", tmp_path / "alone").out
    assert treering("ls", tmp_path / "alone", "--json").json["survives"] is None
    for place, survives in {tmp_path: disk, "/dev/shm": "the process", "memory://bucket/there": "nothing"}.items():
        if place != "/dev/shm" or probe.is_in_memory("/dev/shm/"):
            assert re.search(f"a tier here survives +{survives}$", treering("doctor", place, "--size", "1K").out, re.M)


# Contents


def test_show_has_one_line_for_layers_that_are_alike(run: str, treering: Any) -> None:
    found = treering("show", run).out
    assert re.search(r"^    0…4 ×5 +10 leaves, 400 B$", found, re.MULTILINE)
    assert re.search(r"embed +float32\[8,8\]  256 B  P\('data', None\) on data=4, model=2|embed.*P\('data'\)", found)
    assert "step 4" in found and "val/loss 0.25" in found and '{"lr": 0.1}' in found
    assert re.search(r"^step +int 4$", found, re.MULTILINE) and re.search(r"^none +none$", found, re.MULTILINE)
    every = treering("show", run, "--all", "--step", 2).out
    assert "step 2" in every and len(re.findall(r"w +float32\[4,4\]", every)) == 5
    shallow = treering("show", run, "params", "--depth", 1).out
    assert shallow.splitlines()[-2:] == ["embed   " + _rest(shallow, "embed"), "layers  10 leaves, 400 B"]


def _rest(text: str, name: str) -> str:
    return next(line[len(name) :].strip() for line in text.splitlines() if line.startswith(name))


@pytest.mark.long
@pytest.mark.whole
def test_show_of_a_leaf_has_its_values_and_statistics(run: str, treering: Any) -> None:
    found = treering("show", run, "params/embed").out
    assert "[[ 0.  1.  2. ...  5.  6.  7.]" in found and "64 values, 1 zeros" in found
    assert "min 0  max 63.0  mean 31.5" in found and "50% 31.5" in found
    assert treering("show", run, "step").out == "4\n"
    leaf = treering("show", run, "params/layers/2/b", "--json").json
    assert leaf["dtype"] == "int32" and leaf["stats"]["zeros"] == 4
    assert treering("show", run, "params/layers/9").code == 3


@pytest.mark.long
@pytest.mark.whole
def test_show_as_json_lists_every_leaf(run: str, treering: Any) -> None:
    found = treering("show", run, "--json").json
    assert found["metrics"] == {"val/loss": 0.25, "acc": 0.5} and found["metadata"] == {"lr": 0.1}
    assert found["leaves"]["params/embed"] == {
        "type": "jax",
        "dtype": "float32",
        "shape": [8, 8],
        "nbytes": 256,
        "sharding": {"mesh": {"data": 4, "model": 2}, "spec": found["leaves"]["params/embed"]["sharding"]["spec"]},
    }
    assert found["leaves"]["step"] == {"type": "int", "value": 4}


def test_show_names_the_parts_of_quantized_weights(tmp_path: pathlib.Path, treering: Any) -> None:
    weight = {"qvalue": np.zeros((4, 4), np.int8), "scale": np.ones((1, 4), np.float32)}
    layers = {"0": {"kernel": weight}, "1": {"kernel": weight}, "2": {"kernel": {"qvalue": weight["qvalue"]}}}
    tr.save(tmp_path / "q", {"layers": layers, "norm": {"scale": np.ones(4, np.float32)}})
    found = treering("show", tmp_path / "q").out
    assert re.findall(r"(\S+) +\S+\[\S+  \d+ B(?:  (.*))?$", found, re.MULTILINE) == [
        ("qvalue", "codes (qwix)"), ("scale", "scale (qwix)"), ("qvalue", "codes (qwix) without scale"), ("scale", ""),
    ]  # fmt: skip
    assert "codes (qwix) without scale" in treering("show", tmp_path / "q", "layers/2/kernel/qvalue").out


def test_convert_keeps_quantized_weights(tmp_path: pathlib.Path, treering: Any) -> None:
    tree = {"qvalue": np.ones((4, 4), np.int8), "scale": np.ones((1, 4), np.float32), "norm": np.ones(4, np.float32)}
    tr.save(tmp_path / "q", tree)
    found = treering("convert", tmp_path / "q", tmp_path / "c", "--dtype", "bfloat16")
    assert found.code == 0 and "codes and scales of 1 quantized weight (qwix) keep their dtypes" in found.err
    dtypes = {path: leaf.dtype.name for path, leaf in tr.open(tmp_path / "c").items()}
    assert dtypes == {"qvalue": "int8", "scale": "float32", "norm": "bfloat16"}


def test_only_what_is_the_same_is_joined() -> None:
    """show joins siblings in one line only if their leaves have the same shapes and values."""
    tree = {f"layers/{n}/w": np.ones(3 if n != 4 else 2, "float32") for n in range(7)}
    tree |= {f"h_{n}/b": n for n in (1, 2, 5)} | {"w1": 1, "w2": 1, "x/1": np.ones(2), "x/2": np.ones(2, "int8")}
    ckpt = _saved_tree(tree)
    names = [(level, node.name, node.alike) for level, node in outline(ckpt._source.entries).walk()]
    assert (1, "0…3,5…6", 6) in names and (1, "4", 1) in names, "another shape"
    assert [name for _, name, _ in names if name.startswith("h_")] == ["h_1", "h_2", "h_5"], "their values differ"
    assert (0, "w1…2", 2) in names and (1, "1", 1) in names and (1, "2", 1) in names
    assert sum(node.leaves for level, node in outline(ckpt._source.entries).walk() if level == 0) == len(tree)
    every = [node.path for _, node in outline(ckpt._source.entries, collapse=False).walk() if node.entry]
    assert every == list(ckpt)


def _saved_tree(tree: dict[str, Any]) -> tr.Checkpoint:
    import tempfile

    nested: dict[str, Any] = {}
    for path, leaf in tree.items():
        *above, name = path.split("/")
        place = nested
        for one in above:
            place = place.setdefault(one, {})
        place[name] = leaf
    folder = os.path.join(tempfile.mkdtemp(), "c")
    tr.save(folder, nested)
    return tr.open(folder)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "uint64", "bool", "complex64", "complex32", "float64"]
)
def test_statistics_are_those_of_numpy(tmp_path: pathlib.Path, treering: Any, dtype: str, monkeypatch: Any) -> None:
    import ml_dtypes  # noqa: F401

    from treering._tools import stats

    monkeypatch.setattr(stats, "_SLICE_BYTES", 64)  # Each array has several slices.
    values = np.random.default_rng(0).normal(size=(9, 7)) * 3
    values = np.abs(values) if dtype in ("uint64",) else values
    array = values.astype(np.dtype(dtype))
    if array.dtype.kind == "f" and dtype != "float8_e4m3fn":
        array[3, 3], array[4, 4], array[5, 5] = np.nan, np.inf, 0
    tr.save(tmp_path / "c", {"x": array})
    found = treering("stats", tmp_path / "c", "--json").json["leaves"]["x"]
    wide = np.abs(array.astype("complex128")) if "complex" in dtype else array.astype("float64")
    finite = wide[np.isfinite(wide)]
    assert (found["size"], found["nan"], found["inf"]) == (63, np.isnan(wide).sum(), np.isinf(wide).sum())
    assert found["zeros"] == (wide == 0).sum()
    expected = (finite.min(), finite.max(), finite.mean(), finite.std(), np.sqrt((finite**2).sum()))
    got = [found[name] for name in ("low", "high", "mean", "std", "norm")]
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_python_has_the_statistics_of_the_command(tmp_path: pathlib.Path, treering: Any) -> None:
    tree = {"a": np.array([1, np.nan, 3], "float32"), "n": {"w": np.zeros((2, 3), "int8")}, "text": "x"}
    tr.save(tmp_path / "run" / "step-00000001", tree)
    found = tr.stats(tmp_path / "run")
    assert treering("stats", tmp_path / "run").out == f"{found}\n"
    assert found.leaves["a"].nan == 1 and found.leaves["n/w"].zeros == 6 and found.others == 1
    assert repr(found).endswith("2 arrays, 9 values, norm 3.16; 1 leaf without numbers>")
    ckpt = tr.open(tmp_path / "run")
    assert tr.stats(ckpt.at("n")).leaves == {"w": found.leaves["n/w"]}
    one = tr.stats(ckpt["a"], bins=2).leaves["a"]
    assert one.histogram == (1, 1) and one.quantiles[0.5] == 2 and one.mean == found.leaves["a"].mean
    with pytest.raises(MismatchError, match="bins: expected an integer from 0, found -1"):
        tr.stats(ckpt["a"], bins=-1)
    tr.save(tmp_path / "texts", {"t": np.array(["a", "b"])})
    with pytest.raises(MismatchError, match="expected an array of numbers, found"):
        tr.stats(tr.open(tmp_path / "texts")["t"])


def test_statistics_of_nothing_and_of_what_is_no_number(tmp_path: pathlib.Path, treering: Any) -> None:
    tree = {
        "empty": np.zeros((0, 3)),
        "nan": np.full(3, np.nan),
        "text": np.array(["a"]),
        "key": jax.random.key(1),
        "n": 1,
    }
    tr.save(tmp_path / "c", tree)
    found = treering("stats", tmp_path / "c").out
    assert "2 arrays" in found and "3 leaves without numbers" in found
    assert treering("stats", tmp_path / "c", "--json").json["leaves"]["nan"]["mean"] is None
    assert "nan" in treering("show", tmp_path / "c", "nan").out and treering("show", tmp_path / "c", "empty").code == 0
    assert treering("stats", tmp_path / "c", "nan", "no*").code == 0
    assert treering("stats", tmp_path / "c", "no*").code == 3


def test_diff_prints_the_differences_of_values(tmp_path: pathlib.Path, treering: Any) -> None:
    """diff prints the largest and the relative difference and the cosine."""
    a = {"w": np.arange(4.0), "same": np.ones(2), "gone": 1, "t": np.ones(2, "float32")}
    b = {"w": np.arange(4.0) * [1, 1, 1, -1], "same": np.ones(2), "new": 1, "t": np.ones(3, "float32")}
    tr.save(tmp_path / "a", a)
    tr.save(tmp_path / "b", b)
    found = treering("diff", tmp_path / "a", tmp_path / "b")
    assert found.code == 1 and found.out.splitlines() == [
        "1 leaf is equal",
        "- gone",
        "+ new",
        "~ t: float32[2] → float32[3]",
        "~ w: 1 of 4 values differ, at most by 6, relative 2, cosine -0.2857143",
    ]
    values = treering("diff", tmp_path / "a", tmp_path / "b", "--json").json["values"]["w"]
    assert values["cosine"] == pytest.approx((0 + 1 + 4 - 9) / 14) and values["largest"] == 6
    same = treering("diff", tmp_path / "a", tmp_path / "a")
    assert same.code == 0 and same.out == "4 leaves are equal\n"


def _flip(run: str, step: int) -> int:
    """Flips a bit of a step's array file; returns the file's size."""
    (file,) = pathlib.Path(run, f"step-{step:08}").glob("arrays-*")
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return len(data)


def test_verify_names_damage_and_its_code_says_so(run: str, treering: Any) -> None:
    assert treering("verify", run).code == 0
    _flip(run, 2)
    found = treering("verify", run)
    assert found.code == 1 and "1 problem" in found.out and "step-00000002" in found.out
    assert treering("verify", run, "--json").json["problems"][0]["block"] == 0


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("closed", ["", "rewound-1", "step-00000004"])
def test_verify_reads_archived_steps_or_names_them(run: str, treering: Any, use_disk: Any, closed: str) -> None:
    treering("rewind", run, 2)
    use_disk(Closed(closed))
    found = treering("verify", run, "--json")
    assert found.code == (3 if closed else 0) and all(closed in error for error in found.json["closed"])
    assert found.json["checked"] == {"": 4, "rewound-1": 2, "step-00000004": 3}[closed]
    assert found.json["archived"] == ([] if closed == "rewound-1" else ["rewound-1"])
    use_disk(Disk())
    _flip(os.path.join(run, "rewound-1"), 3)
    found = treering("verify", run)
    assert found.code == 1 and "rewound-1/step-00000003" in found.out


def test_verify_names_what_is_deleted_meanwhile(run: str, treering: Any, use_disk: Any) -> None:
    class Deleting(Disk):
        def __init__(self, *steps: int):
            self._steps = steps

        def open(self, path: str) -> int:
            for step in self._steps:
                pathlib.Path(run, f"step-{step:08}", "treering.json").unlink(missing_ok=True)
            return super().open(path)

    use_disk(Deleting(2))
    found = treering("verify", run)
    assert found.code == 0 and "all good" in found.out and "deleted meanwhile: step-00000002" in found.out
    use_disk(Deleting(1, 3, 4))
    found = treering("verify", run)
    assert found.code == 3 and "all good" not in found.out and "deleted meanwhile" in found.err


def test_verify_can_pass_over_what_is_old(
    run: str, tmp_path: pathlib.Path, treering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify --newer` skips and counts checkpoints that were committed earlier."""
    before = time.time()
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(5, {"x": np.ones(3)})
    tr.save(tmp_path / "m.safetensors", {"x": np.ones(3)})  # The format records no time of the save.
    monkeypatch.setattr(time, "time", lambda: before + 7 * 86400)
    found = treering("verify", run, "--newer", "7d")
    assert found.code == 0 and "skipped, committed earlier: 4 checkpoints" in found.out and "all good" in found.out
    counts = treering("verify", run, "--newer", "1w", "--json").json
    assert (counts["checked"], counts["passed_over"]) == (1, 4)
    none = treering("verify", run, "--newer", "12h")
    assert none.code == 0 and "nothing was checked" in none.out and "all good" not in none.out
    assert "no damage found" in treering("verify", tmp_path / "m.safetensors", "--newer", "7d").out
    os.utime(tmp_path / "m.safetensors", (0, 0))
    assert "skipped" in treering("verify", tmp_path / "m.safetensors", "--newer", "7d").out


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_all_parts_together_check_every_byte_once(tmp_path: pathlib.Path, treering: Any, parts: int) -> None:
    tree = {f"x{n}": np.random.default_rng(n).integers(0, 255, (3 << 20) + n, "uint8") for n in range(2)}
    tr.save(tmp_path / "c", tree)
    tr.save(tmp_path / "c.safetensors", tree)
    (file,) = (tmp_path / "c").glob("arrays-*")
    file.chmod(0o644)
    original = file.read_bytes()
    size = tr.verify(tmp_path / "c").nbytes
    read = [tr.verify(tmp_path / "c", subset=(n + 1, parts)).nbytes for n in range(parts)]
    assert sum(read) == size
    for at in range(len(original) - 6 * (1 << 20), len(original), 1 << 20):
        data = bytearray(original)
        data[at] ^= 1
        file.write_bytes(data)
        found = [not tr.verify(tmp_path / "c", subset=(n + 1, parts)).ok for n in range(parts)]
        assert found.count(True) == 1, at
        text = f"{found.index(True) + 1}/{parts}"
        assert treering("verify", tmp_path / "c", "--subset", text).code == 1
    assert all(tr.verify(tmp_path / "c.safetensors", subset=(n + 1, parts)).ok for n in range(parts))


@pytest.mark.long
@pytest.mark.whole
def test_a_subset_may_be_a_size(run: str, treering: Any) -> None:
    total = tr.verify(run).nbytes
    found = treering("verify", run, "--subset", f"{total // 3}B", "--json").json
    assert found["part"][1] in (3, 4) and 0 < found["nbytes"] <= total // 3 + 4
    assert treering("verify", run, "--subset", "10G", "--json").json["part"] == [1, 1]
    for wrong in ("0/5", "6/5", "x", "1/", "-3", "5", "1.5"):
        assert treering("verify", run, "--subset", wrong).code == 2
    for bad in ((0, 5), (6, 5), (1,), "1/5", 3):
        with pytest.raises(tr.errors.MismatchError, match="subset="):
            tr.verify(run, subset=bad)  # type: ignore[arg-type]


# Copies


@pytest.mark.long
@pytest.mark.whole
def test_convert_has_the_rules_that_people_need(run: str, tmp_path: pathlib.Path, treering: Any) -> None:
    out = tmp_path / "m.safetensors"
    options = ["--at", "params", "--drop", "layers/*/b", "--rename", "embed=tok", "--dtype", "bfloat16", "--step", 3]
    found = treering("convert", run, out, *options)
    assert found.code == 0
    ckpt = tr.open(out)
    assert ckpt.step == 3 and list(ckpt) == ["tok", *(f"layers/{n}/w" for n in range(5))]
    assert {str(ckpt[path].dtype) for path in ckpt} == {"bfloat16"}
    assert treering("convert", run, out).code == 3, "the target exists"
    assert treering("convert", run, tmp_path / "c.npz", "--format", "npz").code == 3
    assert treering("convert", run, tmp_path / "d", "--memory-limit", "lots").code == 2
    assert treering("convert", run, tmp_path / "d", "--rename", "a").code == 2
    assert treering("convert", run, tmp_path / "shards", "--format", "safetensors", "--at", "params",
                    "--max-shard-size", "200", "--json").json["nbytes"] > 0  # fmt: skip
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    items = ["convert", run, tmp_path / "items", "--format", "orbax", "--composite", "--step", 4]
    assert treering(*items).code == 3, "the tree has leaves at the top"
    assert treering(*items, "--drop", "*").code == 0
    folders = [path.name for path in (tmp_path / "items").iterdir() if path.is_dir()]
    assert sorted(folders) == ["metrics", "params"]


@pytest.mark.long
@pytest.mark.whole
def test_cp_copies_runs_between_disks_and_buckets(run: str, tmp_path: pathlib.Path, treering: Any) -> None:
    found = treering("cp", run, "memory://bucket/run", "--json").json
    assert len(found["copied"]) == 4 and found["there"] == []
    assert tr.Checkpointer("memory://bucket/run").pinned == [1]
    again = treering("cp", run, "memory://bucket/run")
    assert again.out == "0 checkpoints copied, 0 B of arrays; 4 are there already (sizes checked, contents not read)\n"
    back = tmp_path / "back"
    assert treering("cp", "memory://bucket/run", back).code == 0
    for step in (1, 2, 3, 4):
        name = f"step-{step:08}"
        assert (back / name / "treering.json").read_bytes() == pathlib.Path(run, name, "treering.json").read_bytes()
    assert treering("cp", os.path.join(run, "step-00000002"), tmp_path / "one").code == 0
    assert treering("diff", tmp_path / "one", os.path.join(run, "step-00000002")).code == 0
    assert [row["step"] for row in treering("ls", "memory://bucket/run", "--json").json["steps"]] == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.whole
def test_cp_replaces_only_with_overwrite(run: str, tmp_path: pathlib.Path, treering: Any) -> None:
    """cp replaces a differing step only with --overwrite."""
    other = tmp_path / "other"
    with tr.Checkpointer(other) as ckpts:
        ckpts.save(2, {"x": 1})
    found = treering("cp", run, other)
    assert found.code == 3 and "found another checkpoint or a damaged copy" in found.err and tr.steps(other) == [2]
    assert treering("cp", run, other, "--overwrite").code == 0
    assert tr.steps(other) == [1, 2, 3, 4] and "params/embed" in tr.open(other, step=2)


@pytest.mark.long
@pytest.mark.whole
def test_cp_leaves_damaged_steps_behind_and_says_so(run: str, tmp_path: pathlib.Path, treering: Any) -> None:
    _flip(run, 3)
    found = treering("cp", run, tmp_path / "copy")
    assert "not copied" in found.err and tr.steps(tmp_path / "copy") == [1, 2, 4]
    assert found.code == 1
    assert treering("cp", os.path.join(run, "step-00000003"), tmp_path / "one").code == 3
    assert not (tmp_path / "one").exists()
    tr.convert(run, tmp_path / "m.safetensors", at="params")
    assert "convert it instead" in treering("cp", tmp_path / "m.safetensors", tmp_path / "n").err


# The place


def test_doctor_leaves_nothing_behind(tmp_path: pathlib.Path, treering: Any) -> None:
    found = {one["name"]: one["value"] for one in treering("doctor", tmp_path, "--size", "1M", "--json").json}
    assert found["locks"] is True and found["one writer wins"] is True and found["save"] > 0 and found["restore"] > 0
    assert os.listdir(tmp_path) == []
    assert treering("doctor", tmp_path / "nowhere").code == 3
    assert "save" in treering("doctor", "memory://bucket/there", "--size", "1M").out
    assert stores.get("memory://bucket").list("memory://bucket/there") == []


def test_doctor_says_what_to_do_about_what_is_missing(tmp_path: pathlib.Path, treering: Any, use_disk: Any) -> None:
    """doctor gives advice for each feature that a place lacks."""

    class Poor(type(stores.get("/").disk)):  # type: ignore[misc]
        def lock(self, fd: int) -> None:
            return None

        def is_local(self, fd: int) -> bool:
            return False

    use_disk(Poor())
    found = treering("doctor", tmp_path, "--size", "1M").out
    assert re.search(r"locks +no", found) and "locks: files of killed saves are not removed" in found
    assert "mmap=True" in found


# Every command


def program(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treering", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_hostile_names_never_reach_the_terminal(tmp_path: pathlib.Path, treering: Any) -> None:
    name = f"{ESCAPE}\r\n\u202ename"
    tree = {name: {"w": np.ones(3)}, "text": ESCAPE, "fn": len}
    with tr.Checkpointer(tmp_path / "run", metadata={ESCAPE: ESCAPE}) as ckpts:
        ckpts.save(1, tree, metrics={name: 1.0})
        ckpts.save(2, {**tree, name: {"w": np.zeros(3)}}, metrics={name: 1.0})
    a, b = (tmp_path / "run" / f"step-0000000{n}" for n in (1, 2))
    calls = [["ls", tmp_path / "run"], ["show", a], ["show", a, "text"], ["show", a, f"{name}/w"], ["stats", a],
             ["diff", a, b], ["du", a], ["show", a, f"{name}x"], ["ls", f"/{name}"], ["show", a, "--json"],
             ["ls", "--json", tmp_path / "run"], ["ls", tmp_path / "run", "--best", "x:min"]]  # fmt: skip
    for call in calls:
        found = treering(*call)
        text = found.out + found.err
        assert (
            "\x1b[31m" not in text.replace("\x1b[31merror:\x1b[0m", "") and "\r" not in text and "\u202e" not in text
        ), call
    assert safe(name) == r"\x1b[31m\r\n\u202ename"


@pytest.mark.long
def test_every_format_is_shown(tmp_path: pathlib.Path, treering: Any) -> None:
    tree = {"a": {"w": np.arange(6.0, dtype="float32").reshape(2, 3)}, "b": np.ones(2, "int32")}
    paths = {
        "treering": "c",
        "safetensors": "c.safetensors",
        "flax": "c.msgpack",
        "orbax": "o",
        "t5x": "t",
        "levanter": "l",
    }
    for format, name in paths.items():
        at = {"target": tree, "state": {}} if format == "t5x" else tree
        tr.save(tmp_path / name, at, format=format)
        for call in (["show"], ["show", "--json"], ["stats"], ["du"], ["verify"], ["verify", "--subset", "1/2"]):
            found = treering(call[0], tmp_path / name, *call[1:])
            assert found.code == 0 and found.out, (format, call, found.err)
        assert format in treering("show", tmp_path / name).out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["show", "/nowhere/at/all"], 3, "found nothing"),
        (["ls", "/nowhere/at/all"], 3, "expected a run"),
        (["du", "/nowhere/at/all"], 3, "found nothing"),
        (["verify", "/nowhere/at/all"], 3, "nothing"),
        (["cp", "/nowhere/at/all", "/tmp/x"], 3, "nothing"),
        (["migrate", "/nowhere/at/all"], 3, "/nowhere/at/all: expected a Python file"),
        (["migrate", "s3://bucket/code"], 3, "s3://bucket/code: expected a Python file on a local disk"),
        (["show", "ftp://x/y"], 3, "ftp"),
        (["show"], 2, "Missing argument"),
        (["shwo"], 2, "No such command 'shwo'; perhaps 'show'\n"),
        (["rm"], 2, "No such command 'rm'; there are browse, completion, convert, "),
        (["show", "--deep", "x"], 2, "No such option"),
        (["ls", "x", "--best", ":min"], 2, "METRIC:min"),
        (["show", "x", "--best", "loss:min", "--step", "1"], 2, "--step or --best"),
        (["diff", "x", "--best", "loss:min", "--steps", "1", "2"], 2, "--steps or --best, found both"),
        (["pull", "x", "y", "--version", "1", "--watch"], 2, "--version or --watch, found both"),
        (["ls", "x", "--json", "--csv"], 2, "--json or --csv, found both"),
        (["pin", "x"], 2, "expected STEPS or --best"),
        (["browse", "x"], 2, "browse needs a terminal; use ls and show instead"),
    ],
)
def test_wrong_calls_are_one_clear_error(treering: Any, arguments: list[str], code: int, said: str) -> None:
    found = treering(*arguments)
    assert found.code == code and said in found.err and "Traceback" not in found.err and found.out == ""


def test_a_damaged_checkpoint_is_an_error_without_a_traceback(run: str, treering: Any) -> None:
    path = pathlib.Path(run, "step-00000001", "treering.json")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-5])
    found = treering("show", path.parent)
    assert found.code == 3 and found.err.startswith("error: ") and str(path.parent) in found.err
    debugged = treering("--debug", "show", path.parent)
    assert debugged.code == 3 and "Traceback" in debugged.err and "CorruptError" in debugged.err


def test_migrate_prints_a_diff_and_what_is_left(
    tmp_path: pathlib.Path, treering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = "import orbax.checkpoint as ocp\n", "import treering.orbax as ocp\n"
    program = tmp_path / "a.py"
    program.write_text(before)
    found = treering("migrate", tmp_path)
    assert (found.code, found.err) == (0, "") and f"-{before}+{after}" in found.out and program.read_text() == before
    assert found.out.endswith("\n1 file read; 1 would change; 0 places left to do by hand\n")
    assert treering("migrate", program, "--write").out == "1 file read; 1 changed; 0 places left to do by hand\n"
    assert program.read_text() == after and treering("migrate", program).code == 0
    program.write_text(f"{before}# {ESCAPE}\nocp.serialization\n")
    os.symlink(program, tmp_path / "b.py")
    found = treering("migrate", tmp_path, "--native")
    assert found.code == 1 and found.err.startswith(f"{program}:3: ocp.serialization is not in treering.orbax; ")
    assert "1 file read, 1 link not read; 1 would change; 1 place left" in found.out
    os.mkfifo(tmp_path / "pipe.py")
    found = treering("migrate", tmp_path, "--json")
    assert found.code == 3 and found.json["failed"] == {str(tmp_path / "pipe.py"): "not a regular file"}
    for name in [name for name in sys.modules if name.startswith(("libcst", "treering._tools.migrate"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    found = treering("migrate", tmp_path)
    assert found.code == 3 and "error: migrating needs LibCST: pip install 'treering[migrate]'" in found.err


@pytest.mark.long
def test_looking_imports_neither_jax_nor_numpy(run: str) -> None:
    """Commands that only read manifests import neither JAX nor NumPy, and start quickly."""
    code = f"""
import sys
from treering._cli.main import main
for call in (["--help"], ["ls", {run!r}], ["pin", {run!r}, "2"], ["prune", {run!r}, "last:3", "--yes"], ["du", {run!r}],
             ["show", {run!r}], ["show", {run!r}, "--json"], ["rewind", {run!r}, "3"], ["cp", {run!r}, {run + "-2"!r}]):
    assert main(call) == 0, call
    loaded = {{"jax", "libcst", "tensorstore"}} | ({{"numpy"}} if call[0] in ("--help", "ls", "pin", "du") else set())
    assert not loaded & set(sys.modules), (call, loaded & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_it_quietly(tmp_path: pathlib.Path, options: list[str], unbuffered: str) -> None:
    tr.save(tmp_path / "c", {f"leaf{'x' * 200}{n}y{n}": np.ones(n) for n in range(2000)})
    command = [sys.executable, "-m", "treering", "show", "--all", str(tmp_path / "c"), *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 128 + signal.SIGPIPE


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="expected /dev/full, found none")
def test_a_full_disk_is_an_error(run: str) -> None:
    for options in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "treering", "ls", run, *options]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 3 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("module", ["click", "treering._cli", "treering._cli.runs", "treering._run.plain_run"])
def test_an_interrupt_ends_it_without_a_traceback(run: str, tmp_path: pathlib.Path, module: str) -> None:
    """Ctrl-C arrives while a module is imported, before the command runs or while it runs."""
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTING.format(module=module))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = program("pin", run, 2, env={**os.environ, "PYTHONPATH": path})
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert tr.Checkpointer(run).pinned == [1]


_INTERRUPTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.long
def test_colours_go_to_terminals_alone_and_narrow_ones_cut(run: str) -> None:
    import pty

    def on_terminal(columns: int, *arguments: str, **environment: str) -> str:
        fd, end = pty.openpty()
        variables = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **environment}
        command = [sys.executable, "-m", "treering", *arguments]
        process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=variables)
        os.close(end)
        read = b""
        with open(fd, "rb", buffering=0, closefd=True) as terminal:
            while True:
                try:
                    some = terminal.read(4096)
                except OSError:
                    break
                if not some:
                    break
                read += some
        assert process.wait() == 0
        return read.decode()

    coloured = on_terminal(100, "ls", run, "--keep", "last:1")
    assert "\x1b[33mwould be deleted\x1b[0m" in coloured
    assert "\x1b" not in on_terminal(100, "ls", run, "--keep", "last:1", NO_COLOR="1")
    narrow = on_terminal(40, "show", run, NO_COLOR="1")
    assert max(map(len, narrow.split("\r\n")[2:])) <= 40 and "…" in narrow
    assert on_terminal(20, "ls", run) and "\x1b" not in program("ls", run, "--keep", "last:1").stdout


@pytest.mark.long
def test_completions_are_printed_for_every_shell() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_TREERING_COMPLETE" in program("completion", shell).stdout
    environment = {**os.environ, "_TREERING_COMPLETE": "bash_complete", "COMP_WORDS": "treering pr", "COMP_CWORD": "1"}
    assert program(env=environment).stdout == "plain,prune\n"


def test_sizes_and_numbers_have_three_digits() -> None:
    sizes = [0, 999, 1000, 1234, 99_949, 999_499, 999_500, 10**9, 1.5e12]
    assert [nbytes(n) for n in sizes] == [
        "0 B", "999 B", "1.00 KB", "1.23 KB", "99.9 KB", "999 KB", "1.00 MB", "1.00 GB", "1.50 TB",
    ]  # fmt: skip
    assert [number(x) for x in (0, 1.0, -2.5, 1234.5, 1e-7, float("nan"), float("inf"))] == [
        "0", "1.00", "-2.50", "1.23e+03", "1e-07", "nan", "inf",
    ]  # fmt: skip
