"""Jobs that write a run, alone or with their own local tier."""

from collections.abc import Callable, Iterable
from typing import Any

import treering as tr
from treering import stores
from treering.errors import CorruptError
from treering.formats.treering import manifest, summary
from treering.stores.file_io import read_file

from .scenario import KEPT, LAST, Reports, Scenario, read_value, tree, with_frozen


def _prepare_run(place: str, local: str) -> None:
    with tr.Checkpointer(place) as ckpts:
        for step in (1, 2):
            ckpts.save(step, tree(100 + step))


def _prepare_pinned(place: str, local: str) -> None:
    _prepare_run(place, local)
    tr.Checkpointer(place).pin(1)


def _read_run(job: Any, place: str, local: str) -> None:
    """Reads the newest step and checks its value, while steps come and go."""
    for _ in range(2):
        ckpts = tr.Checkpointer(place)
        assert int(ckpts.restore()["w"][0]) == 100 + (ckpts.restored_step or 0)


def _train(
    number: int, steps: int, make: Callable[[int], dict[str, Any]] = tree, **options: Any
) -> Callable[..., None]:
    """Returns a job that saves `steps` further steps, and reports each of them with the restored step."""

    def job(job: Any, place: str, local: str) -> None:
        with tr.Checkpointer(place, keep=KEPT, **options) as ckpts:
            begun = int(ckpts.restore()["w"][0]) % 100 if ckpts.latest_step else 0
            for step in range(begun + 1, begun + 1 + steps):
                ckpts.save(step, make(100 * number + step))
                ckpts.wait()
                job.report((begun, step))

    return job


def _copy(number: int, steps: int) -> Callable[..., None]:
    """Returns a job that saves `steps` further steps to its local tier.

    It reports those that must be remote when it has closed.
    """

    def job(job: Any, place: str, local: str) -> None:
        with tr.Checkpointer(place, keep=KEPT, local=f"{local}/{number}") as ckpts:
            begun = int(ckpts.restore()["w"][0]) % 100 if ckpts.latest_step else 0
            save_local(job, ckpts, number, range(begun + 1, begun + steps + 1))
        report_uploads(job, begun, steps)

    return job


def save_local(job: Any, ckpts: tr.Checkpointer, number: int, steps: Iterable[int]) -> None:
    """Saves steps and reports each as present in the local tier of the job."""
    for step in steps:
        ckpts.save(step, tree(100 * number + step))
        ckpts.wait()
        job.report(f"local: {step}")


def report_uploads(job: Any, begun: int, steps: int) -> None:
    """Reports the steps that must be remote after `steps` steps from `begun` on were saved and uploaded."""
    end = begun + steps
    for step in range(max(begun + 1, end - 1), end + 1):
        job.report((begun, step))


def _change(job: Any, place: str, local: str) -> None:
    """Saves, pins, deletes and rewinds, and saves other steps instead of the archived ones."""
    with tr.Checkpointer(place, keep=KEPT) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, tree(100 + step))
            ckpts.wait()
            job.report((0, step))
        ckpts.pin(2)
        ckpts.delete(3)
        job.report("deleted")
        ckpts.save(4, tree(104))
        ckpts.wait()
        job.report((0, 4))
        ckpts.rewind(2)
        job.report("rewound")
        ckpts.save(3, tree(103))
        ckpts.wait()
        job.report((0, 3))


def _resume_run(job: Any, place: str, local: str) -> None:
    """Saves five further steps."""
    with tr.Checkpointer(place, keep=KEPT) as ckpts:
        begun = int(ckpts.restore()["w"][0])
        job.report("after the other" if begun > 200 else "first")
        for step in range(begun % 100 + 1, begun % 100 + 6):
            ckpts.save(step, tree(100 + step))
            ckpts.wait()
            job.report((begun % 100, step))


def _rewind_run(job: Any, place: str, local: str) -> None:
    """Rewinds to step 1 and saves other steps instead of those after it. Deletes none."""
    with tr.Checkpointer(place) as ckpts:
        ckpts.restore(step=1)
        job.report("back")
        for step in (2, 3, 4, 5):
            ckpts.save(step, tree(200 + step))
            ckpts.wait()
            job.report((1, step))


def _not_archived(reports: Reports) -> Reports:
    """Returns the reports of steps that were not archived.

    Those are all, except the first job's steps once the second job has rewound. If the first job continued after the
    second one, its steps count too.
    """
    reported = {what for _, what in reports if isinstance(what, str)}
    gone = "back" in reported and "after the other" not in reported
    return [(number, what) for number, what in reports if not isinstance(what, str) and not (gone and number == 1)]


def _check_rewound(place: str, reports: Reports) -> None:
    """Asserts that the second job's steps exist, unless the first job has continued from them. Step 1 is pinned."""
    assert read_value(place, 1) == 101
    check_run(place, reported := _not_archived(reports))
    for number, (_, step) in reported if (1, "after the other") not in reports else ():
        assert number == 1 or read_value(place, step) == 200 + step


def _end_rewound(place: str, reports: Reports) -> None:
    end_run(place, _not_archived(reports))


def check_run(place: str, reports: Reports) -> None:
    """Asserts that the two newest reported steps are complete, or newer steps are. Unreported steps may be damaged."""
    reported = {what[1]: 100 * number + what[1] for number, what in reports if not isinstance(what, str)}
    newest = sorted(reported)[-2:]
    steps = tr.steps(place)
    values: dict[int, int | None] = {}
    for step in steps:
        try:
            values[step] = value = read_value(place, step)
            assert value % 100 == step, values
        except CorruptError:  # A job whose lease has expired has put it, and has not yet noticed and removed it.
            assert step not in newest, f"{step} is damaged, found {values}, reported {reported}"
            values[step] = None
    complete = [step for step in values if values[step]]
    for step in newest:
        kept = values.get(step) == reported[step] or len([one for one in complete if one > step]) >= 2
        assert kept, f"found {values}, reported {reported}"


def _check_changed(place: str, reports: Reports) -> None:
    steps = tr.steps(place)
    values = {step: read_value(place, step) for step in steps}
    assert all(value == 100 + step for step, value in values.items()), values
    reported = [what for _, what in reports]
    if reported and reported[-1] not in ("deleted", "rewound"):
        newest = reported[-1][1]
        later = {3: [1, 2] if len(reported) == 3 else [2]}  # `delete` and `rewind` may be in progress
        assert newest in steps or set(steps) & set(later.get(newest, [2])), f"found {values}, reported {reported}"
    if len(reported) > 2:
        assert 2 in values, f"found {values}, reported {reported}, and 2 is kept"
    if len(reported) > 3 and reported[-1] == "deleted":
        assert 3 not in values, f"found {values}, reported {reported}"
    if reported and reported[-1] == "rewound":
        assert 4 not in values, f"found {values}, reported {reported}"


def _last_step(job: Any, place: str, local: str) -> None:
    with tr.Checkpointer(place, keep=KEPT) as ckpts:
        if ckpts.latest_step is not None:
            assert int(ckpts.restore()["w"][0]) % 100 == ckpts.restored_step
        ckpts.save(LAST, tree(LAST))
    job.report((ckpts.restored_step or 0, LAST))


def _last_copy(job: Any, place: str, local: str) -> None:
    """Continues on the local tier of the first job."""
    with tr.Checkpointer(place, keep=KEPT, local=f"{local}/1") as ckpts:
        if ckpts.latest_step is not None:
            assert int(ckpts.restore()["w"][0]) % 100 == ckpts.restored_step
        ckpts.save(LAST, tree(LAST))
    job.report((ckpts.restored_step or 0, LAST))


def _end_copy(place: str, reports: Reports) -> None:
    """Asserts that the last job continued from the newest local step, and has uploaded it."""
    newest = max((int(what[7:]) for _, what in reports if isinstance(what, str)), default=0)
    _, (begun, _) = reports[-1]
    assert begun >= newest, f"continued from {begun}, reported {reports}"
    assert tr.steps(place) == [*([begun] if begun else []), LAST], tr.steps(place)
    assert not begun or read_value(place, begun) == 100 + begun
    check_no_leftovers(place, reports)


def end_run(place: str, reports: Reports) -> None:
    """Asserts that the last job continued from the newest reported step or a later one, and nothing is left over."""
    *reported, (begun, _) = [what for _, what in reports if not isinstance(what, str)]
    assert begun >= max((step for _, step in reported), default=0), f"continued from {begun}, reported {reported}"
    check_no_leftovers(place, reports)


def check_no_leftovers(place: str, reports: Reports) -> None:
    """Asserts that no files are left over, and that the lease is released."""
    steps = tr.steps(place)
    assert steps[-1] == LAST and read_value(place, LAST) == LAST, steps
    assert b"token" not in read_file(stores.get(place), f"{place}/writer.lock")
    names = set(stores.get(place).list(place)) - {"writer.lock"}
    assert all(name.startswith(("step-", "rewound-", "generations")) for name in names), names
    for name in names:
        if name.startswith("step-"):
            there = set(stores.get(place).list(f"{place}/{name}")) - {"pinned"}
            if there == {"treering.json"} and int(name[5:]) in steps[-2:]:
                continue  # The commit of a deleted step came late. `KEPT` would keep the step, so it stays.
            named = manifest.file_names(read_file(stores.get(place), summary.manifest_path(f"{place}/{name}")))
            assert there == {"treering.json", *named}, f"left over: {there}"


RUNS = {
    "a run": Scenario([_train(1, 5), _last_step], check_run, end_run),
    "a run, unchanged": Scenario([_train(1, 5, with_frozen), _last_step], check_run, end_run),
    "a run, read": Scenario([_train(1, 4), _read_run, _last_step], check_run, end_run, _prepare_run),
    "a run, changed": Scenario([_change, _last_step], _check_changed, check_no_leftovers),
    "a run, uploaded": Scenario([_copy(1, 3), _last_copy], check_run, _end_copy),
    "an uploaded run, new owner": Scenario([_copy(1, 2), _copy(2, 2), _last_step], check_run, end_run),
    "a run, rewound": Scenario([_resume_run, _rewind_run, _last_step], _check_rewound, _end_rewound, _prepare_pinned),
    "a run, new owner": Scenario([_train(1, 3), _train(2, 3), _last_step], check_run, end_run),
}
