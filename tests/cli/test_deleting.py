"""prune and delete: the step that is read first, the steps that are deleted or stay, and the messages."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering import stores
from treering._run.plain_run import PlainRun
from treering.formats.treering import removal


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    return _run(tmp_path / "run", [1, 2, 3, 4])


def _run(path: pathlib.Path, steps: Sequence[int], **options: Any) -> pathlib.Path:
    with tr.Checkpointer(path, **options) as ckpts:
        for step in steps:
            ckpts.save(step, {"x": np.full(2000, step)}, metrics={"loss": 1 / step})
    return path


def _damage(step: pathlib.Path) -> None:
    """Flips a byte of the largest file. Only reading the file detects it."""
    file = max((one for one in step.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-len(data) // 3] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.long
@pytest.mark.whole
def test_prune_keeps_newest_step_that_verifies(run: pathlib.Path, treering: Any) -> None:
    """prune reads the newest step that would stay; if it is damaged, the step before stays."""
    _damage(run / "step-00000004")
    for flags in (["--dry-run"], ["--yes"]):
        found = treering("prune", run, "last:1", *flags, "--json")
        assert found.code == 0 and "warning: step 4 is ignored, because it is damaged: arrays-" in found.err
        assert (found.json["deleted"], found.json["verified"], found.json["damaged"]) == ([1, 2], 3, [4])
    assert tr.steps(run) == [3, 4] and np.all(tr.restore(run)["x"] == 3)
    _damage(run / "step-00000003")
    assert treering("prune", run, "last:1", "--yes").out == "nothing to delete\n", "no valid step would stay"
    unread = treering("prune", run, "last:1", "--yes", "--no-verify")
    assert "no step was read (--no-verify): the newest that stays may be damaged" in unread.out
    assert unread.out.startswith("1 step deleted") and unread.err == "" and tr.steps(run) == [4]


def test_a_damaged_step_does_not_count_for_the_policy(run: pathlib.Path, treering: Any) -> None:
    _damage(run / "step-00000004")
    assert treering("prune", run, "last:2", "--yes", "--json").json["deleted"] == [1]
    assert tr.steps(run) == [2, 3, 4]


def test_a_step_of_which_only_the_manifest_is_left_is_pruned(run: pathlib.Path, treering: Any) -> None:
    """prune deletes it as a `Checkpointer` does, but not for --to, which copies what it deletes."""
    for step in (1, 2):
        next((run / f"step-0000000{step}").glob("arrays-*")).unlink()
    (run / "step-00000002" / "pinned").touch()
    moved = treering("prune", run, "last:1", "--yes", "--json", "--to", run.parent / "old").json
    assert moved["deleted"] == [3] and not moved["failed"]
    assert treering("prune", run, "last:1", "--yes", "--json").json["deleted"] == [1]
    assert tr.steps(run) == [2, 4] and not (run / "step-00000001").exists()


def test_steps_of_another_library_are_said_to_stay(tmp_path: pathlib.Path, treering: Any) -> None:
    for step in (1, 2):
        tr.save(tmp_path / "run" / str(step), {"x": np.ones(3)}, format="orbax")
    found = treering("prune", tmp_path / "run", "last:1", "--yes")
    assert (found.code, found.out) == (0, "nothing to delete; never deleted: 2 steps of another library\n")


def test_the_newest_step_may_be_of_another_library(run: pathlib.Path, treering: Any) -> None:
    tr.save(run / "7", {"x": np.arange(4000.0)}, format="orbax")
    assert treering("prune", run, "last:3", "--yes", "--json").json["verified"] == 7
    file = max((run / "7").rglob("*"), key=lambda one: one.stat().st_size)
    file.write_bytes(file.read_bytes()[:-10])
    assert tr.open(run).step == 7, "only reading its arrays detects the damage"
    _damage(run / "step-00000004")
    found = treering("prune", run, "last:1", "--yes", "--json").json
    assert (found["deleted"], found["verified"], found["damaged"]) == ([2], 3, [7, 4])


def test_nothing_is_read_where_nothing_would_go(run: pathlib.Path, treering: Any) -> None:
    """prune reads no arrays if it would delete nothing."""
    _damage(run / "step-00000004")
    found = treering("prune", run, "last:4", "--yes")
    assert (found.out, found.err) == ("nothing to delete\n", "")


def test_a_newest_step_that_cannot_be_read_now_ends_it(run: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    """An I/O error of the newest step that would stay ends prune before it deletes anything."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "arrays")

    monkeypatch.setattr("treering._tools.verify.verify", refuse)
    found = treering("prune", run, "last:1", "--yes")
    assert found.code == 3 and "step 4, the newest that would stay, cannot be read: nothing is deleted" in found.err
    assert tr.steps(run) == [1, 2, 3, 4]


@pytest.mark.parametrize("keep", ["steps:9", "steps:2,9"])
def test_a_policy_of_a_step_that_is_not_there_is_refused(run: pathlib.Path, treering: Any, keep: str) -> None:
    found = treering("prune", run, "last:1", keep, "--yes")
    assert found.code == 3 and "expected step 9, found 1, 2, 3, 4" in found.err and tr.steps(run) == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.whole
def test_steps_that_links_lead_to_stay_and_the_links_are_named(
    run: pathlib.Path, treering: Any, caplog: pytest.LogCaptureFixture
) -> None:
    os.symlink("step-00000001", run / "best")
    os.symlink(next((run / "step-00000002").glob("arrays-*")), run / "weights.safetensors")
    os.symlink("nothing", run / "broken")
    os.symlink(run.parent, run / "above")
    listed = treering("ls", run, "--json").json["steps"]
    assert [row["linked_by"] for row in listed] == [["best"], ["weights.safetensors"], [], []]
    found = treering("prune", run, "last:1", "--yes")
    assert found.err.splitlines() == [
        "warning: step 1 stays: the link best leads to it",
        "warning: step 2 stays: the link weights.safetensors leads to it",
    ]
    assert tr.steps(run) == [1, 2, 4]
    with tr.Checkpointer(run, keep=tr.keep.last(1)) as ckpts:
        for step in (5, 6):
            ckpts.save(step, {"x": step})
        with pytest.raises(tr.errors.MismatchError, match="the link best leads to this step"):
            ckpts.delete(1)
        assert ckpts.steps == [1, 2, 6] and caplog.text.count("step 1 stays: the link best leads to it") == 1
        ckpts.rewind(1)
    assert f"the link weights.safetensors leads to step-00000002, which was archived in {run}/rewound-1" in caplog.text
    assert "the link best leads to step-00000001, which" not in caplog.text


def test_a_step_that_is_a_link_to_another_keeps_that(run: pathlib.Path, treering: Any) -> None:
    """A step stays if a newer step of the run is a link to it."""
    os.symlink("step-00000001", run / "step-00000009")
    assert treering("prune", run, "last:1", "--yes").code == 0
    assert tr.steps(run) == [1, 9] and tr.verify(run).ok


def test_each_of_two_prunes_counts_what_it_deleted(run: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    check = PlainRun.prepare_removal

    def another_is_faster(self: PlainRun, path: str, **options: Any) -> None:
        check(self, path, **options)
        if path.endswith("2"):
            monkeypatch.undo()
            removal.delete(stores.get(path), path)
            removal.delete(stores.get(path), path.replace("02", "03"))

    monkeypatch.setattr(PlainRun, "prepare_removal", another_is_faster)
    found = treering("prune", run, "last:1", "--yes")
    assert found.code == 0 and found.out.startswith("1 of 3 deleted, ") and tr.steps(run) == [4]
    assert "2 deleted by another process meanwhile: 2, 3" in found.out


@pytest.mark.long
def test_two_prunes_at_once_delete_each_step_once(tmp_path: pathlib.Path) -> None:
    run = _run(tmp_path / "run", range(1, 41))
    command = [sys.executable, "-m", "treering", "prune", run, "last:1", "--yes", "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    found = [json.loads(one.communicate()[0]) for one in both]
    assert all(one.returncode == 0 for one in both)
    assert sorted(found[0]["deleted"] + found[1]["deleted"]) == list(range(1, 40)) and tr.steps(run) == [40]


def test_what_an_interrupt_leaves_is_said(run: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    remove = stores.Filesystem.delete_all

    def interrupt(self: Any, path: str, names: Any) -> None:
        if path.endswith("2"):  # Its manifest is deleted by now.
            raise KeyboardInterrupt
        remove(self, path, names)

    monkeypatch.setattr(stores.Filesystem, "delete_all", interrupt)
    found = treering("prune", run, "last:1", "--yes")
    assert found.code == 130 and found.err.endswith("interrupted\n")
    assert found.out.startswith("2 of 3 deleted, ") and ": 1, 2\n" in found.out and tr.steps(run) == [3, 4]


def test_delete_deletes_the_steps_that_are_named(run: pathlib.Path, treering: Any) -> None:
    assert treering("delete", run, 1).code == 2 and tr.steps(run) == [1, 2, 3, 4], "without a terminal it cannot ask"
    dry = treering("delete", run, 1, 3, "--dry-run")
    assert dry.out.startswith("2 steps would be deleted, ") and tr.steps(run) == [1, 2, 3, 4]
    found = treering("delete", run, 3, 1, "--yes", "--json").json
    assert found.pop("nbytes") > 2 * 2000 * 8
    about = {"path": str(run), "dry_run": False, "to": None, "verified": 4, "damaged": []}
    assert found == {**about, "deleted": [1, 3], "failed": {}, "gone": []} and tr.steps(run) == [2, 4]


def test_delete_deletes_all_or_nothing(run: pathlib.Path, treering: Any) -> None:
    tr.save(run / "7", {"x": np.ones(3)}, format="orbax")
    os.symlink("step-00000001", run / "best")
    tr.save(run.parent / "elsewhere", {"x": 1})
    os.symlink(run.parent / "elsewhere", run / "step-00000008")
    tr.Checkpointer(run).pin(2)
    for step, what in {
        6: "expected step 6, found",
        7: "expected a step of Treering, found one of another library",
        1: "the link best leads to this step",
        8: "expected a directory of this run, found a link",
        2: "the step is pinned",
    }.items():
        found = treering("delete", run, 3, step, "--yes")
        assert found.code == 3 and what in found.err and tr.steps(run) == [1, 2, 3, 4, 7, 8], step
    assert treering("delete", run, 2, "--pinned", "--yes").code == 0
    assert tr.steps(run) == [1, 3, 4, 7, 8] and not (run / "step-00000002").exists()


def test_delete_leaves_a_good_step(run: pathlib.Path, treering: Any) -> None:
    for step in (1, 2):
        _damage(run / f"step-{step:08}")
    found = treering("delete", run, 3, 4, "--yes")
    assert found.code == 3 and "expected a valid step that stays, found none" in found.err
    assert tr.steps(run) == [1, 2, 3, 4]
    assert treering("delete", run, 1, 2, "--yes", "--json").json["verified"] == 4
    assert treering("delete", run, 3, 4, "--yes", "--no-verify").code == 3, "no step with a valid manifest would stay"
    assert treering("delete", run, 4, "--yes").code == 0 and tr.steps(run) == [3], "no process writes the run"
    assert os.listdir(run) == ["step-00000003"], "the lock is released"


@pytest.mark.long
def test_delete_refuses_the_newest_step_of_a_running_job(run: pathlib.Path) -> None:
    """delete refuses the newest step of a run while a job writes the run."""
    command = [sys.executable, "-m", "treering", "delete", run, "--yes"]
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(5, {"x": 5})
        ckpts.wait()
        refused = subprocess.run([*command, "4", "5"], capture_output=True, text=True)
        assert refused.returncode == 3 and "process" in refused.stderr and tr.steps(run) == [1, 2, 3, 4, 5]
        assert subprocess.run([*command, "3"], capture_output=True).returncode == 0 and tr.steps(run) == [1, 2, 4, 5]


def test_prune_moves_steps(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    tr.record(run, 2, {"late": 2.0})
    archive = tmp_path / "archive"
    dry = treering("prune", run, "last:2", "--to", archive, "--dry-run")
    assert dry.out.startswith(f"2 steps would be moved to {archive}, ") and not archive.exists()
    found = treering("prune", run, "last:2", "--to", archive, "--yes", "--json").json
    assert (found["deleted"], found["to"], tr.steps(run), tr.steps(archive)) == ([1, 2], str(archive), [3, 4], [1, 2])
    assert tr.open(archive, step=2).metrics == {"loss": 0.5, "late": 2.0} and tr.verify(archive).ok
    _damage(run / "step-00000003")
    failed = treering("prune", run, "last:1", "--to", archive, "--yes")
    assert failed.code == 3 and failed.out.startswith(f"0 of 1 moved to {archive}") and tr.steps(run) == [3, 4]
    assert "step 3 is not moved" in failed.err and tr.steps(archive) == [1, 2]


@pytest.mark.long
@pytest.mark.whole
def test_a_move_that_was_interrupted_goes_on(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    archive = tmp_path / "archive"
    assert treering("cp", run, archive).code == 0
    _damage(archive / "step-00000002")
    assert treering("prune", run, "last:1", "--to", archive, "--yes").code == 0
    assert tr.steps(run) == [4] and tr.steps(archive) == [1, 2, 3, 4] and tr.verify(archive).ok


def test_a_copy_that_is_damaged_deletes_nothing(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: Any
) -> None:
    from treering._tools import move

    def copy(path: str, to: str, **options: Any) -> None:
        copy_checkpoints(path, to, **options)
        _damage(pathlib.Path(to))

    copy_checkpoints = move.copy_checkpoints
    monkeypatch.setattr(move, "copy_checkpoints", copy)
    found = treering("prune", run, "last:3", "--to", tmp_path / "archive", "--yes")
    assert found.code == 3 and "found it damaged: arrays-" in found.err and tr.steps(run) == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.whole
def test_places_that_steps_are_not_moved_to(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    tr.save(tmp_path / "one", {"x": 1})
    (tmp_path / "file").write_text("text")
    for place, what in {
        run / "old": "expected a place outside the run",
        run: "expected a place outside the run",
        tmp_path / "one": "found one checkpoint",
        tmp_path / "file": "found a file",
        _run(tmp_path / "other", [1]): "found another checkpoint or a damaged one",
        _run(tmp_path / "names", [1], prefix="ckpt-"): "step names that begin with 'step-'",
    }.items():
        for flag in ("--dry-run", "--yes"):
            found = treering("prune", run, "last:1", "--to", place, flag)
            assert found.code == 3 and what in found.err, found.err
    assert tr.steps(run) == [1, 2, 3, 4] and not (run / "old").exists()


def _in_another_process(run: pathlib.Path, *, rewind: int, save: Sequence[int]) -> None:
    code = """if True:
        import sys, numpy as np, treering as tr
        with tr.Checkpointer(sys.argv[1]) as ckpts:
            ckpts.rewind(int(sys.argv[2]))
            for step in map(int, sys.argv[3:]):
                ckpts.save(step, {"x": np.full(2000, -step)})
    """
    command = [sys.executable, "-c", code, str(run), str(rewind), *map(str, save)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--no-verify"]])
def test_prune_keeps_steps_that_a_job_saves_again(
    run: pathlib.Path, treering: Any, monkeypatch: Any, flags: list[str]
) -> None:
    """Steps that a job saves again while prune reads are not deleted."""

    def meanwhile(self: Any, *args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        _in_another_process(run, rewind=1, save=[2, 3, 4])
        return remove(self, *args, **options)

    remove = PlainRun.remove
    monkeypatch.setattr(PlainRun, "remove", meanwhile)
    found = treering("prune", run, "last:1", *flags, "--yes")
    assert (found.code, tr.steps(run)) == (3, [1, 2, 3, 4]) and found.out.startswith("0 of 3 deleted, ")
    assert "step 1 is not deleted: " in found.err and "expected the valid step that stays, found it gone" in found.err
    assert np.all(tr.restore(run, step=2)["x"] == -2)


def test_prune_stops_at_a_step_that_was_replaced(run: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    def meanwhile(self: Any, path: str, **options: Any) -> None:
        check(self, path, **options)
        if path.endswith("2"):
            with tr.Checkpointer(run) as ckpts:
                ckpts.save(2, {"x": -2}, on_exists="overwrite")

    check = PlainRun.prepare_removal
    monkeypatch.setattr(PlainRun, "prepare_removal", meanwhile)
    found = treering("prune", run, "last:1", "--yes", "--json")
    assert (found.code, found.json["deleted"], tr.steps(run)) == (3, [1], [2, 3, 4])
    assert "found another in its place" in found.json["failed"]["2"] and tr.restore(run, step=2)["x"] == -2


@pytest.mark.slow
@pytest.mark.parametrize("to", [[], ["--to"]])
def test_prune_stops_when_the_step_that_stays_has_gone(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: Any, to: list[str]
) -> None:
    from treering._tools import verify

    def rewound(path: str, **options: Any) -> Any:
        report = read(path, **options)
        if (run / "step-00000004").exists():
            _in_another_process(run, rewind=3, save=[])
        return report

    read = verify.verify
    monkeypatch.setattr("treering._tools.move.verify" if to else "treering._tools.verify.verify", rewound)
    found = treering("prune", run, "last:1", *to, *([tmp_path / "archive"] if to else []), "--yes")
    assert (found.code, tr.steps(run)) == (3, [1, 2, 3]) and "nothing more is deleted" in found.err
    assert "which stays" not in found.out


def test_a_newer_step_of_the_job_may_stay_instead(run: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    """If the job deletes the step that stays, a newer valid step stays instead."""
    from treering._tools import verify

    def retained(path: str, **options: Any) -> Any:
        report = read(path, **options)
        if path.endswith("4"):
            with tr.Checkpointer(run) as ckpts:
                ckpts.save(5, {"x": 5})
                ckpts.wait()
                ckpts.delete(4)
        return report

    read = verify.verify
    monkeypatch.setattr(verify, "verify", retained)
    found = treering("prune", run, "last:1", "--yes", "--json")
    assert (found.code, found.json["deleted"], found.json["verified"], tr.steps(run)) == (0, [1, 2, 3], 5, [5])


def test_delete_is_undone_if_the_kept_step_disappears(run: pathlib.Path, treering: Any, monkeypatch: Any) -> None:
    """prune restores the last manifest if the step that stays disappears during the deletion."""

    def both(store: Any, path: str, check: Any, guard: Any) -> Any:
        def too() -> None:
            monkeypatch.undo()
            removal.delete(store, str(run / "step-00000004"))
            guard()

        return unpublish(store, path, check, too)

    unpublish = removal.unpublish
    tr.record(run, 1, {"late": 1.0})
    monkeypatch.setattr(removal, "unpublish", both)
    found = treering("prune", run, "last:1", "--yes")
    assert (found.code, tr.steps(run)) == (3, [1, 2, 3]) and tr.verify(run).ok
    assert tr.open(run, step=1).metrics["late"] == 1


def test_a_second_mount_of_the_run_is_no_other_place(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: Any
) -> None:
    """`prune --to` refuses the same folder under a second mount."""
    os.symlink(run, tmp_path / "mount")  # A link stands for the mount: `real_path` no longer resolves it.
    monkeypatch.setattr(stores.Filesystem, "real_path", lambda self, path: path)
    for flag in ("--dry-run", "--yes"):
        found = treering("prune", run, "last:1", "--to", tmp_path / "mount", flag)
        assert found.code == 3 and "which is mounted twice" in found.err and tr.steps(run) == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.whole
def test_a_step_comes_back_if_its_copy_goes_with_it(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: Any
) -> None:
    """prune restores the manifest of a moved step if its copy disappears with it."""

    def the_same(store: Any, path: str, check: Any, guard: Any) -> Any:
        def too() -> None:
            (tmp_path / "archive" / "step-00000001" / "treering.json").unlink()
            monkeypatch.undo()
            guard()

        return unpublish(store, path, check, too)

    unpublish = removal.unpublish
    monkeypatch.setattr(removal, "unpublish", the_same)
    found = treering("prune", run, "last:3", "--to", tmp_path / "archive", "--yes")
    assert found.code == 3 and "found it gone or replaced; the step stays" in found.err
    assert tr.steps(run) == [1, 2, 3, 4] and tr.verify(run).ok


@pytest.mark.parametrize("late", [False, True])
def test_metrics_that_are_recorded_during_a_move_are_not_lost(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: Any, late: bool
) -> None:
    from treering._tools import move

    def read(path: str, **options: Any) -> Any:
        report = verify(path, **options)
        tr.record(run, 1, {"late": 1.0})
        return report

    def complete(self: Any) -> None:
        add(self)
        tr.record(run, 1, {"later": 1.0})

    verify, add = move.verify, move.CheckpointCopy.complete
    if late:
        monkeypatch.setattr(move.CheckpointCopy, "complete", complete)
    else:
        monkeypatch.setattr(move, "verify", read)
    found = treering("prune", run, "last:3", "--to", tmp_path / "archive", "--yes")
    if late:
        assert found.code == 3 and "metrics were recorded while it was moved" in found.err and tr.steps(run)[0] == 1
    else:
        assert found.code == 0 and tr.open(tmp_path / "archive", step=1).metrics["late"] == 1


@pytest.mark.long
@pytest.mark.whole
def test_a_step_that_goes_during_its_move_is_no_error(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: Any
) -> None:
    from treering._tools import move

    def read(path: str, **options: Any) -> Any:
        report = verify(path, **options)
        if path.endswith("2"):
            removal.delete(stores.get(str(run)), str(run / "step-00000002"))
        return report

    verify = move.verify
    monkeypatch.setattr(move, "verify", read)
    found = treering("prune", run, "last:1", "--to", tmp_path / "archive", "--yes", "--json")
    assert (found.code, found.json["deleted"], found.json["gone"]) == (0, [1, 3], [2])
