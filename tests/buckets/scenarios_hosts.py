"""Runs of two processes, each with its own local tier, which upload together.

The disks are named by letters: process n of a job uses the n-th letter of the job's `disks`. Processes are killed
between requests, and between changes of their disks.
"""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import treering as tr
from treering import stores
from treering.errors import NotFoundError
from treering.formats.treering import manifest

from .scenario import KEPT, LAST, Reports, Scenario, read_value, tree
from .scenarios_runs import check_no_leftovers, check_run, end_run, report_uploads, save_local

_NEWEST = (0, 1, 2, 3, 2, 4, 2, 3)  # the newest step, by the number of changes of `_change` that were made
_TIMEOUT_SECONDS = 2.0  # seconds that its peers wait for a killed process
_PATIENCE_SECONDS = 30.0  # seconds, in jobs where no process is killed


def _run(
    job: Any, place: str, local: str, disks: str, timeout: float = _TIMEOUT_SECONDS, copies: int = 1
) -> tr.Checkpointer:
    local = f"{local}/{disks[job.rank]}"
    return tr.Checkpointer(place, keep=KEPT, local=local, timeout=timeout, local_copies=copies)


def _begin(ckpts: tr.Checkpointer) -> int:
    """Restores and returns the step to continue from."""
    try:
        found = ckpts.restore(read="each")  # else JAX waits for minutes for a dead process when it makes its devices
    except NotFoundError:
        return 0
    step = ckpts.restored_step or 0
    assert int(found["w"][0]) % 100 == step, f"step {step} has {found}"
    return step


def _copy(number: int, steps: int, disks: str) -> Callable[..., None]:
    """Returns a job that saves `steps` further steps, and reports those that must be remote when it has closed."""

    def job(job: Any, place: str, local: str) -> None:
        with _run(job, place, local, disks) as ckpts:
            begun = _begin(ckpts)
            save_local(job, ckpts, number, range(begun + 1, begun + steps + 1))
        report_uploads(job, begun, steps)

    return job


def _change(job: Any, place: str, local: str) -> None:
    """Saves, deletes and rewinds, and saves other steps instead of the archived ones."""
    with _run(job, place, local, "ab") as ckpts:

        def save(step: int, value: int = 100) -> None:
            ckpts.save(step, tree(value + step))
            ckpts.wait()

        changes: list[Callable[[], None]] = [
            *(lambda step=step: save(step) for step in (1, 2, 3)),
            lambda: ckpts.delete(3),
            lambda: save(4),
            lambda: ckpts.rewind(2),
            lambda: save(3, 200),
        ]
        for number, change in enumerate(changes, 1):
            change()
            job.report(f"changed: {number}")


def _copy_twice(steps: int, disks: str) -> Callable[..., None]:
    """Returns a job that saves steps with two copies, and reports those whose copies are made."""

    def job(job: Any, place: str, local: str) -> None:
        with _run(job, place, local, disks, copies=2) as ckpts:
            directory: Any = ckpts._directory
            for step in range(1, steps + 1):
                ckpts.save(step, tree(100 + step))
                ckpts.wait()
                copies = directory.host_changes._copies
                copies.wait()
                if not job.rank and copies.is_safe(directory.local.step_path(step)):
                    job.report(f"local: {step}")
        report_uploads(job, 0, steps)

    return job


def _last(disks: str, *, check_archived: bool = False, lost: str = "", copies: int = 1) -> Callable[..., None]:
    """Returns a job that continues from the existing steps, on the disks of the job before or on others.

    check_archived: archived steps must be complete. Used only if all jobs use the same disks.
    lost: a disk that is emptied before the job.
    """

    def job(job: Any, place: str, local: str) -> None:
        if lost and not job.rank:  # The processes find out together which disks there are, after this.
            shutil.rmtree(pathlib.Path(local, lost), ignore_errors=True)
        with _run(job, place, local, disks, _PATIENCE_SECONDS, copies) as ckpts:
            begun = _begin(ckpts)
            ckpts.save(LAST, tree(LAST))
        if not job.rank:
            for disk in disks:
                steps = {f"step-{begun:08}", f"step-{LAST:08}"}
                left = [file for file in pathlib.Path(local, disk).glob("step-*/*") if file.parent.name not in steps]
                assert not left, f"left over: {left}"
            if check_archived:
                _check_archived(place, local)
            job.report((begun, LAST))

    return job


def _check_archived(place: str, local: str) -> None:
    """Asserts that each archived step with a manifest is complete: all its files are archived or remote."""
    disks, remote = pathlib.Path(local), stores.get(place)
    for file in disks.glob("*/rewound-*/*/treering.json"):
        step = file.parent.name
        folders = [f"{place}/{name}/{step}" for name in remote.list(place) if name.startswith("rewound-")]
        for name in manifest.file_names(file.read_bytes()):
            found = [*disks.glob(f"*/rewound-*/{step}/{name}")]
            found += [folder for folder in (f"{place}/{step}", *folders) if remote.stat(f"{folder}/{name}")]
            assert found, f"{file}: expected {name} in this step on some disk or in the bucket, found it nowhere"


def _end_local(place: str, reports: Reports) -> None:
    """Asserts that the last job continued from the newest step that was committed locally, and has uploaded it."""
    newest = max((int(what[7:]) for _, what in reports if isinstance(what, str)), default=0)
    _, (begun, _) = reports[-1]
    assert begun >= newest, f"continued from {begun}, reported {reports}"
    assert not begun or read_value(place, begun) == 100 + begun
    check_no_leftovers(place, reports)


def _check_changed(place: str, reports: Reports) -> None:
    values = {step: read_value(place, step) for step in tr.steps(place)}
    done = _done(reports)
    allowed = {1: 101, 2: 102}
    if done < 4:
        allowed[3] = 103
    if done < 6:
        allowed[4] = 104
    else:
        allowed[3] = 203
    assert all(allowed.get(step) == value for step, value in values.items()), f"{values} after {done} changes"


def _end_changed(place: str, reports: Reports) -> None:
    _, (begun, _) = reports[-1]
    done = _done(reports)
    assert begun in _NEWEST[done : done + 2], f"continued from {begun} after {done} changes"
    check_no_leftovers(place, reports)


def _done(reports: Reports) -> int:
    return max((int(what[9:]) for _, what in reports if isinstance(what, str)), default=0)


HOSTS = {
    "hosts' disks": Scenario([_copy(1, 3, "ab"), _last("ba")], check_run, _end_local, processes=2),
    "hosts' disks, changed": Scenario(
        [_change, _last("ab", check_archived=True)], _check_changed, _end_changed, processes=2
    ),
    "hosts' disks, one lost": Scenario([_copy(1, 3, "ab"), _last("ac")], check_run, end_run, processes=2),
    "hosts' disks, two copies": Scenario(
        [_copy_twice(3, "ab"), _last("cb", lost="a", copies=2)], check_run, _end_local, processes=2
    ),
    "hosts' disks, exchanged": Scenario([_copy(1, 3, "abc"), _last("cab")], check_run, _end_local, processes=3),
    "hosts' disks, other hosts": Scenario(
        [_copy(1, 2, "ab"), _copy(2, 2, "cd"), _last("ba")], check_run, end_run, processes=2
    ),
    "hosts' disks, other ranks": Scenario(
        [_copy(1, 2, "ab"), _copy(2, 2, "ba"), _last("ab")], check_run, end_run, processes=2
    ),
}
