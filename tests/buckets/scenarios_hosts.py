"""Runs of two processes with a disk each beside the bucket, which copy to it together.

The disks are named by letters, and process n of a job has the n-th that are named for it. Processes are killed between
requests, and between changes of their disks.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import treering as tr
from treering import stores
from treering.errors import NotFoundError
from treering.formats.treering import manifest

from .scenario import KEPT, LAST, Reports, Scenario, read_value, tree
from .scenarios_runs import check_run, end_run, nothing_left, report_far, save_near

_NEWEST = (0, 1, 2, 3, 2, 4, 2, 3)  # step after so many changes of `_change`
_TIMEOUT = 2.0  # seconds; a process that is killed is missed for so long
_PATIENCE = 30.0  # seconds, where none is


def _run(job: Any, place: str, local: str, disks: str, timeout: float = _TIMEOUT) -> tr.Checkpointer:
    return tr.Checkpointer(place, keep=KEPT, local=f"{local}/{disks[job.rank]}", timeout=timeout)


def _begin(ckpts: tr.Checkpointer) -> int:
    """The step to go on from."""
    try:
        found = ckpts.restore(read="each")  # or JAX, when it makes the devices, waits for minutes for one that is dead
    except NotFoundError:
        return 0
    step = ckpts.restored_step or 0
    assert int(found["w"][0]) % 100 == step, f"step {step} has {found}"
    return step


def _copy(number: int, steps: int, disks: str) -> Callable[..., None]:
    """Saves some steps more than there are; reports those that must be far when it has closed."""

    def job(job: Any, place: str, local: str) -> None:
        with _run(job, place, local, disks) as ckpts:
            begun = _begin(ckpts)
            save_near(job, ckpts, number, range(begun + 1, begun + steps + 1))
        report_far(job, begun, steps)

    return job


def _change(job: Any, place: str, local: str) -> None:
    """Saves, deletes, goes back, and saves other steps in the place of those that were set aside."""
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


def _last(disks: str, *, aside: bool = False) -> Callable[..., None]:
    """Goes on from what is there, on the disks of the job before or others.

    aside: what is set aside must be whole, for all disks are in all jobs.
    """

    def job(job: Any, place: str, local: str) -> None:
        with _run(job, place, local, disks, _PATIENCE) as ckpts:
            begun = _begin(ckpts)
            ckpts.save(LAST, tree(LAST))
        if not job.rank:
            for disk in disks:
                steps = {f"step-{begun:08}", f"step-{LAST:08}"}
                left = [file for file in pathlib.Path(local, disk).glob("step-*/*") if file.parent.name not in steps]
                assert not left, f"left over: {left}"
            if aside:
                _aside_is_whole(place, local)
            job.report((begun, LAST))

    return job


def _aside_is_whole(place: str, local: str) -> None:
    """Of each step that was set aside where its manifest is, all files are among what was set aside, or far."""
    near, far = pathlib.Path(local), stores.of(place)
    for file in near.glob("*/rewound-*/*/treering.json"):
        step = file.parent.name
        folders = [f"{place}/{name}/{step}" for name in far.list(place) if name.startswith("rewound-")]
        for name in manifest.file_names(file.read_bytes()):
            there = [*near.glob(f"*/rewound-*/{step}/{name}")]
            there += [folder for folder in (f"{place}/{step}", *folders) if far.stat(f"{folder}/{name}")]
            assert there, f"{file}: expected {name} beside it on some disk, found it nowhere"


def _end_near(place: str, reports: Reports) -> None:
    """The last job went on from the newest step that was committed near, and has copied it."""
    near = max((int(what[6:]) for _, what in reports if isinstance(what, str)), default=0)
    _, (begun, _) = reports[-1]
    assert begun >= near, f"went on from {begun}, reported {reports}"
    assert not begun or read_value(place, begun) == 100 + begun
    nothing_left(place, reports)


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
    assert begun in _NEWEST[done : done + 2], f"went on from {begun} after {done} changes"
    nothing_left(place, reports)


def _done(reports: Reports) -> int:
    return max((int(what[9:]) for _, what in reports if isinstance(what, str)), default=0)


HOSTS = {
    "hosts' disks": Scenario([_copy(1, 3, "ab"), _last("ba")], check_run, _end_near, processes=2),
    "hosts' disks, changed": Scenario([_change, _last("ab", aside=True)], _check_changed, _end_changed, processes=2),
    "hosts' disks, one lost": Scenario([_copy(1, 3, "ab"), _last("ac")], check_run, end_run, processes=2),
    "hosts' disks, other hosts": Scenario(
        [_copy(1, 2, "ab"), _copy(2, 2, "cd"), _last("ba")], check_run, end_run, processes=2
    ),
    "hosts' disks, other ranks": Scenario(
        [_copy(1, 2, "ab"), _copy(2, 2, "ba"), _last("ab")], check_run, end_run, processes=2
    ),
}
