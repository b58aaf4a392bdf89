"""Tests saves and restores of several processes: any job restores them, and no process waits for a dead one."""

import itertools
import os
import pathlib
import signal

import numpy as np
import pytest
from jax._src import distributed

import treering as tr
from jobs import run_job
from sampling import sample_points
from treering._processes import coordinator
from treering._processes.call_history import History

KILLED = -signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_several_processes_save_together_restores_anywhere(tmp_path: pathlib.Path, processes: int) -> None:
    results = run_job(
        tmp_path, "coordinator.what_several_processes_save_together_restores_anywhere", processes=processes
    )
    size = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert [result.report for result in results] == [[size, 7]] * processes
    big = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    for name in ("c", "again"):
        assert tr.verify(tmp_path / name).ok
        tree = tr.restore(tmp_path / name)
        wanted = {"rows": big, "columns": big + 1, "replicated": big + 2, "grid": big + 3, "elsewhere": big[:8] + 4}
        assert all(tree[key].tobytes() == value.tobytes() for key, value in wanted.items())
        assert (tree["alone"] == big[:9] + 5).all() and (tree["numpy"] == np.arange(3_000_000)).all()
        # The job writes each byte once, even if it is replicated, and evenly.
        files = sorted((tmp_path / name).glob("arrays-*"))
        assert len(files) == processes
        sizes = [file.stat().st_size for file in files]
        assert sum(sizes) < sum(array.nbytes for array in wanted.values()) + 14_000_000
        assert max(sizes) < 1.25 * sum(sizes) / processes
    for fewer in (1, 3):
        found = (
            run_job(tmp_path, "coordinator.others_restore_what_several_processes_saved", processes=fewer)
            if fewer < processes
            else []
        )
        assert all(result.report for result in found)


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_save_with_rules_and_in_any_format(tmp_path: pathlib.Path, processes: int) -> None:
    formats = ["safetensors", "flax", "orbax", "t5x", "levanter"]
    results = run_job(
        tmp_path,
        "coordinator.several_processes_save_with_rules_and_in_any_format",
        processes=processes,
        FORMATS=formats,
    )
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    assert all(result.report[0] for result in results)
    big = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    in_place = tr.restore(tmp_path / "in place")
    assert len(list((tmp_path / "in place").glob("arrays-*"))) == processes
    assert (in_place["renamed"] == big).all() and "rows" not in in_place and "alone" not in in_place
    assert in_place["columns"].dtype == "bfloat16" and (in_place["columns"] == (big + 1).astype("bfloat16")).all()
    assert tr.open(tmp_path / "in place")["renamed"].sharding is not None and tr.open(tmp_path / "in place").step == 3
    across = tr.open(tmp_path / "across")
    assert across.metadata == {"a": 1} and across["step"] == 7 and across["numpy"][-1] == 2_999_999
    assert (across["rows"][...] == big.T).all()
    assert (across["stacked"][...] == np.concatenate([big + 1, big + 2], axis=1)).all()
    assert set(tr.open(tmp_path / "copy")) == {"stacked", "rows", "step"} and not tr.diff(
        tmp_path / "copy", across.select(["stacked", "rows", "step"])
    )
    assert (tr.restore(tmp_path / "lone")["lone"] == big[:9].reshape(-1) + 5).all()
    assert tr.restore(tmp_path / "bf16")["grid"].dtype == "bfloat16"
    for version in range(3):
        found = tr.open(tmp_path / "policy", step=version)
        assert found.format == ("slime" if version else "safetensors") and tr.verify(found.path).ok
        assert (found["numpy"][-1], found["columns"].dtype) == (2_999_999 + version, "bfloat16")
        assert (found["renamed"][...] == big).all()
    for name in ("in place", "across", "bf16", "copy", *formats):
        assert tr.verify(tmp_path / name).ok, name
        if name in formats:
            found = tr.open(tmp_path / name)
            assert found.format == name
            root = found if "renamed" in found else found.at("target")
            assert (root["renamed"][...] == big).all() and root["columns"].dtype == "bfloat16"
            assert root["numpy"][-1] == 2_999_999


@pytest.mark.slow
def test_trees_that_differ_between_processes_are_refused(tmp_path: pathlib.Path) -> None:
    for index, result in enumerate(
        run_job(tmp_path, "coordinator.trees_that_differ_between_processes_are_refused", processes=2)
    ):
        errors, listed = result.report
        assert errors.pop("good") is None and "good" in listed
        assert not set(errors) & set(listed)  # no files are left
        kind, text = errors.pop("unsavable")
        assert kind == "UnsupportedError" and "a: object" in text.replace("builtins.", "")
        assert all(kind == "MismatchError" for kind, _ in errors.values()), errors
        found = {name: text for name, (_, text) in errors.items()}
        assert (
            "step: process 0 has int 0, process 1 int 1" in found["value"]
            and "same" not in found["value"].split("\n")[1]
        )
        assert "deep/x: process 0 has numpy int64[3], process 1 numpy int64[3] (other values)" in found["bytes"]
        assert "deep/y" not in found["bytes"]
        assert "0: process 0 has numpy float64[3], process 1 numpy float64[4]" in found["shape"]
        assert "b: process 0 has nothing, process 1 int 2" in found["leaf"]
        assert "a: process 0 has float 1.0, process 1 numpy-scalar float32[]" in found["kind"]
        assert "containers" in found["container"] and "other values" in found["local"]
        assert "spread over processes in another way" in found["spread"] and "a:" in found["here"]
        assert index == 0 or text.startswith("process") or "process 1" in text or "a: " in text


@pytest.mark.slow
def test_calls_that_differ_and_guards_are_refused(tmp_path: pathlib.Path) -> None:
    results = run_job(tmp_path, "coordinator.calls_that_differ_and_guards_are_refused", processes=2)
    for result in results:
        errors, listed = result.report
        assert [kind for kind, _ in errors[:2]] == ["PeerError"] * 2
        assert "not in this call; its last is save(" in errors[0][1] and "step=" in errors[1][1]
        assert "together" in listed
        assert not {"name-0", "name-1", "steps", "guarded"} & set(listed)
    kind, text = results[0].report[0][2]
    assert kind == "PeerError" and "process 1 (not in this call" in text and "process_index() == 0" in text
    assert results[0].report[0][3] < 10  # A bound, not a measurement: the call must end.
    assert results[0].report[0][4:] == [None, True]


@pytest.mark.rare
@pytest.mark.slow
def test_a_file_system_that_is_not_shared_is_found_out(tmp_path: pathlib.Path) -> None:
    """A save fails if the processes see different file systems at the path."""
    for result in run_job(tmp_path, "coordinator.a_file_system_that_is_not_shared_is_found_out", processes=2):
        for kind, text in result.report:
            assert kind == "SaveError" and "file system that all processes share" in text
    assert sorted(os.listdir(tmp_path)) == ["report-0.json", "report-1.json"]


@pytest.mark.slow
def test_stale_network_listing_is_read_again(tmp_path: pathlib.Path) -> None:
    """A file that a stale cache reports as missing is looked up again.

    NFS caches attributes like this. The disk is a double, because real NFS needs two hosts.
    """
    for result in run_job(tmp_path, "coordinator.stale_network_listing_is_read_again", processes=2):
        assert result.report == [[None] * 5, 2, 2, True]


@pytest.mark.slow
def test_an_error_in_one_process_is_everybodys(tmp_path: pathlib.Path) -> None:
    """All processes raise the error of a process that fails."""
    for index, result in enumerate(run_job(tmp_path, "coordinator.an_error_in_one_process_is_everybodys", processes=3)):
        *errors, exists, listed = result.report
        for n, (kind, text) in enumerate(errors):
            assert kind == "SaveError" and "No space left" in text
            assert index == n // 2 or f"process {n // 2}" in text
        assert exists[0] == "ExistsError" and listed == ["c"]
    assert tr.verify(tmp_path / "c").ok and len(list((tmp_path / "c").iterdir())) == 4


@pytest.mark.slow
def test_who_finds_the_directory_gone_waits_for_the_reason(tmp_path: pathlib.Path) -> None:
    """A process that finds the directory gone waits for the error of process 0, which removes its files first."""
    for result in run_job(tmp_path, "coordinator.who_finds_the_directory_gone_waits_for_the_reason", processes=2):
        kind, text = result.report
        assert kind == "SaveError" and "No space left" in text


POINTS = {
    "planning": ("_processes.assignment", "assign", ""),
    "comparing": ("_processes.consistency", "_digests", ""),
    "creating": ("disk", "create", "arrays-"),
    "writing": ("disk", "write", "arrays-"),
    "syncing": ("disk", "sync", "arrays-"),
    "after writing": ("disk", "sync_dir", "/c"),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", sample_points([*POINTS, "before the commit"], first=1))
def test_a_process_that_dies_is_named_and_costs_nothing(tmp_path: pathlib.Path, point: str) -> None:
    """The error names a dead process, and its files do not stay."""
    module, name, file = POINTS.get(point, ("_processes.coordinator", "MultiProcessCall.gather_and_decide", ""))
    names = {"MODULE": module, "NAME": name, "FILE": file}
    results = run_job(
        tmp_path,
        "coordinator.a_process_that_dies_is_named_and_costs_nothing",
        processes=3,
        recoverable=True,
        expect={2: KILLED},
        **names,
    )
    for result in results[:2]:
        (kind, text), seconds, committed, _ = result.report
        assert kind == "PeerError" and "process 2" in text and seconds < 40 and not committed
    assert "last seen" in results[0].report[0][1]
    assert tr.verify(tmp_path / "b").ok and (tr.restore(tmp_path / "b")["n"] == np.arange(5_000_000)).all()
    run_job(tmp_path, "coordinator.a_process_that_dies_is_named_and_costs_nothing_2", processes=2)
    # The files of the dead process are gone.
    assert tr.verify(tmp_path / "c").ok and len(list((tmp_path / "c").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", sample_points(["create arrays-", "write arrays-", "sync tmp", "link tmp", "unlink tmp"], first=3)
)
def test_when_process_0_dies_there_is_no_half_checkpoint(tmp_path: pathlib.Path, point: str) -> None:
    # JAX decides how the other process then ends.
    results = run_job(
        tmp_path,
        "coordinator.when_process_0_dies_there_is_no_half_checkpoint",
        processes=2,
        expect={0: KILLED, 1: None},
        POINT=point,
    )
    assert results[1].code != 0
    committed = (tmp_path / "c" / "treering.json").exists()
    assert committed == (point == "unlink tmp")
    if committed:
        assert tr.verify(tmp_path / "c").ok
    assert tr.verify(tmp_path / "b").ok
    body = 'tr.save(tmp / "c", {"n": np.arange(7)}, overwrite=True)'
    run_job(tmp_path, body, processes=2)
    assert tr.verify(tmp_path / "c").ok and len(list((tmp_path / "c").iterdir())) == 2


def test_a_forked_child_of_a_process_of_the_job_is_none_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child cannot make calls of its parent's job, but can join a job of its own (see
    `fault_injection.peers`).
    """
    monkeypatch.setattr(coordinator, "_inherited_client", None)
    monkeypatch.setattr(coordinator.liveness, "start_signs", lambda *job: History())  # this fake job has no store
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)
    monkeypatch.setattr(distributed.global_state, "process_id", 0)
    monkeypatch.setattr(distributed.global_state, "client", object())
    assert isinstance(coordinator.begin_call("save"), coordinator.MultiProcessCall)
    coordinator.forget_after_fork()
    with pytest.raises(tr.errors.UnsupportedError, match="forked child"):
        coordinator.begin_call("save")
    assert isinstance(coordinator.begin_call("save", processes="this"), coordinator.SingleProcessCall)
    monkeypatch.setattr(distributed.global_state, "client", object())
    assert isinstance(coordinator.begin_call("save"), coordinator.MultiProcessCall)


@pytest.mark.slow
def test_a_run_of_several_processes(tmp_path: pathlib.Path) -> None:
    results = run_job(tmp_path, "coordinator.a_run_of_several_processes", processes=2, recoverable=False)
    for result in results:
        steps, exists, skipped, pinned, undeletable, after, step, first = result.report
        assert steps == [2, 6, 10, 12] and exists[0] == "ExistsError" and skipped is None
        assert pinned == [2, 6, 10, 12, 14, 16]
        assert undeletable[0] == "MismatchError" and after == step == 12
        assert first  # Process 0 decides, and its interval is over.
    assert tr.steps(tmp_path / "timed") == [1]


@pytest.mark.slow
def test_failure_of_one_process_is_raised_by_all(tmp_path: pathlib.Path) -> None:
    reports = [
        result.report
        for result in run_job(tmp_path, "coordinator.failure_of_one_process_is_raised_by_all", processes=2)
    ]
    failed = [[step for step in range(1, 8) if log[step - 1]] for log, *_ in reports]
    # A process raises its own error at once, and again when all raise it after process 0 has learned of it.
    last = failed[0][-1]
    assert failed == [[2, 3, last], [3, 5, last]] and last in (6, 7)
    for _, steps, skipped, later in reports:
        assert steps == sorted({1, 4, 6, 7} - {last}) and skipped is None and later == ["ExistsError", None, None]


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped", "where", "call"),
    sample_points(
        itertools.product([0, 1], ["between the calls", "while it writes"], ["Checkpointer", "save"]), first=1
    ),
)
def test_processes_meet_again_after_one_was_stopped(
    tmp_path: pathlib.Path, stopped: int, where: str, call: str
) -> None:
    """After one process was suspended for longer than the timeout, all make the same calls again.

    SIGSTOP stands for a debugger or a suspended machine. The loop has no collectives and continues after errors.
    """
    results = run_job(
        tmp_path,
        "coordinator.processes_meet_again_after_one_was_stopped",
        processes=3,
        STOPPED=stopped,
        WHERE=where,
        CALL=call,
    )
    reports = [result.report for result in results]
    missed = [{step for step, *_ in errors} for _, errors in reports]
    assert any(missed), "the time-out was passed"
    assert {last for last, _ in reports} == {40}, reports
    steps = tr.steps(tmp_path / "run")
    assert set(range(33, 41)) <= set(steps) and tr.verify(tmp_path / "run").ok
    for step in steps:
        assert (tr.restore(tmp_path / "run", step=step)["w"] == np.arange(66.0) + step).all()
    for index, (_, errors) in enumerate(reports):  # without an error, no step is missing
        assert {kind for _, kind, _ in errors} <= {"PeerError"}, (index, errors)


@pytest.mark.slow
def test_all_processes_restore_one_and_the_same_checkpoint(tmp_path: pathlib.Path) -> None:
    """All processes restore the same checkpoint, although another job replaces it meanwhile."""
    found = [
        result.report
        for result in run_job(tmp_path, "coordinator.all_processes_restore_one_and_the_same_checkpoint", processes=2)
    ]
    assert found == [[[1.0, 1.0], [1.0, 1.0]]] * 2


@pytest.mark.slow
def test_committed_step_keeps_files_if_sync_is_in_doubt(tmp_path: pathlib.Path) -> None:
    """A checkpoint in place keeps all files if its sync failed.

    Its durability is in doubt, and all processes raise the error.
    """
    for result in run_job(tmp_path, "coordinator.committed_step_keeps_files_if_sync_is_in_doubt", processes=2):
        kind, text = result.report
        assert kind == "SaveError" and "the new checkpoint is in place" in text
    assert tr.verify(tmp_path / "c").ok and (tr.restore(tmp_path / "c")["x"] == 1).all()


@pytest.mark.slow
def test_files_stay_if_a_commit_is_in_doubt(tmp_path: pathlib.Path) -> None:
    """A process whose last message may have arrived keeps its files, because the commit is in doubt."""
    found = [
        result.report for result in run_job(tmp_path, "coordinator.files_stay_if_a_commit_is_in_doubt", processes=2)
    ]
    assert found[0] is None and found[1] is not None
    assert tr.verify(tmp_path / "c").ok and (tr.restore(tmp_path / "c")["x"] == 1).all()


@pytest.mark.slow
def test_files_of_stopped_process_are_not_removed(tmp_path: pathlib.Path) -> None:
    """Another job keeps the array files that a suspended process 0 is about to commit.

    They include those of a dead peer, which no process locks any more.
    """
    results = run_job(
        tmp_path,
        "coordinator.files_of_stopped_process_are_not_removed",
        processes=2,
        recoverable=True,
        expect={1: KILLED},
    )
    assert results[0].report is None
    assert tr.verify(tmp_path / "c").ok and tr.restore(tmp_path / "c")["x"].shape == (3 << 18,)
