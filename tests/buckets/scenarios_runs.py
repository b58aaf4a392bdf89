"""Jobs that write a run, alone or with a disk of their own beside the bucket."""

from collections.abc import Callable, Iterable
from typing import Any

import treering as tr
from treering import stores
from treering.errors import CorruptError
from treering.formats.treering import manifest, summary
from treering.stores.whole_files import read_file

from .scenario import KEPT, LAST, Reports, Scenario, read_value, tree


def _prepare_run(place: str, local: str) -> None:
    with tr.Checkpointer(place) as ckpts:
        for step in (1, 2):
            ckpts.save(step, tree(100 + step))


def _prepare_pinned(place: str, local: str) -> None:
    _prepare_run(place, local)
    tr.Checkpointer(place).pin(1)


def _read_run(job: Any, place: str, local: str) -> None:
    """Reads the newest step, which is the one that it says; steps come and go meanwhile."""
    for _ in range(2):
        ckpts = tr.Checkpointer(place)
        assert int(ckpts.restore()["w"][0]) == 100 + (ckpts.restored_step or 0)


def _train(number: int, steps: int, **options: Any) -> Callable[..., None]:
    """Saves some steps more than there are, and reports each of them with the step that was restored."""

    def job(job: Any, place: str, local: str) -> None:
        with tr.Checkpointer(place, keep=KEPT, **options) as ckpts:
            begun = int(ckpts.restore()["w"][0]) % 100 if ckpts.latest_step else 0
            for step in range(begun + 1, begun + 1 + steps):
                ckpts.save(step, tree(100 * number + step))
                ckpts.wait()
                job.report((begun, step))

    return job


def _copy(number: int, steps: int) -> Callable[..., None]:
    """Saves some steps more than there are on a disk of its own; reports those that must be far when it has closed."""

    def job(job: Any, place: str, local: str) -> None:
        with tr.Checkpointer(place, keep=KEPT, local=f"{local}/{number}") as ckpts:
            begun = int(ckpts.restore()["w"][0]) % 100 if ckpts.latest_step else 0
            save_near(job, ckpts, number, range(begun + 1, begun + steps + 1))
        report_far(job, begun, steps)

    return job


def save_near(job: Any, ckpts: tr.Checkpointer, number: int, steps: Iterable[int]) -> None:
    """Saves steps, and reports each as one that is there on the disk of the job."""
    for step in steps:
        ckpts.save(step, tree(100 * number + step))
        ckpts.wait()
        job.report(f"near: {step}")


def report_far(job: Any, begun: int, steps: int) -> None:
    """Reports the steps that must be far when so many were saved from one on, and copied."""
    end = begun + steps
    for step in range(max(begun + 1, end - 1), end + 1):
        job.report((begun, step))


def _change(job: Any, place: str, local: str) -> None:
    """Saves, pins, deletes, goes back, and saves other steps in the place of those that were set aside."""
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


def _go_on(job: Any, place: str, local: str) -> None:
    """Saves five steps more than there are."""
    with tr.Checkpointer(place, keep=KEPT) as ckpts:
        begun = int(ckpts.restore()["w"][0])
        job.report("after the other" if begun > 200 else "first")
        for step in range(begun % 100 + 1, begun % 100 + 6):
            ckpts.save(step, tree(100 + step))
            ckpts.wait()
            job.report((begun % 100, step))


def _go_back(job: Any, place: str, local: str) -> None:
    """Goes back to step 1, and saves others in the place of those that came after it; deletes none."""
    with tr.Checkpointer(place) as ckpts:
        ckpts.restore(step=1)
        job.report("back")
        for step in (2, 3, 4, 5):
            ckpts.save(step, tree(200 + step))
            ckpts.wait()
            job.report((1, step))


def _not_set_aside(reports: Reports) -> Reports:
    """The reports of steps, without those of the first job once the second goes back, unless it went on from there."""
    told = {what for _, what in reports if isinstance(what, str)}
    gone = "back" in told and "after the other" not in told
    return [(number, what) for number, what in reports if not isinstance(what, str) and not (gone and number == 1)]


def _check_gone_back(place: str, reports: Reports) -> None:
    """What the second job has saved is there, unless the first has gone on from it; step 1 is pinned."""
    assert read_value(place, 1) == 101
    check_run(place, told := _not_set_aside(reports))
    for number, (_, step) in told if (1, "after the other") not in reports else ():
        assert number == 1 or read_value(place, step) == 200 + step


def _end_gone_back(place: str, reports: Reports) -> None:
    end_run(place, _not_set_aside(reports))


def check_run(place: str, reports: Reports) -> None:
    """The two newest steps that were reported are there, whole, or newer ones are; others are whole or not told of."""
    told = {what[1]: 100 * number + what[1] for number, what in reports if not isinstance(what, str)}
    newest = sorted(told)[-2:]
    steps = tr.steps(place)
    values: dict[int, int | None] = {}
    for step in steps:
        try:
            values[step] = value = read_value(place, step)
            assert value % 100 == step, values
        except CorruptError:  # one that a job has put whose lease had run out, before that looks and removes it
            assert step not in newest, f"{step} is damaged, found {values}, reported {told}"
            values[step] = None
    whole = [step for step in values if values[step]]
    for step in newest:
        kept = values.get(step) == told[step] or len([one for one in whole if one > step]) >= 2
        assert kept, f"found {values}, reported {told}"


def _check_changed(place: str, reports: Reports) -> None:
    steps = tr.steps(place)
    values = {step: read_value(place, step) for step in steps}
    assert all(value == 100 + step for step, value in values.items()), values
    told = [what for _, what in reports]
    if told and told[-1] not in ("deleted", "rewound"):
        newest = told[-1][1]
        later = {3: [1, 2] if len(told) == 3 else [2]}  # `delete` and `rewind` may be under way
        assert newest in steps or set(steps) & set(later.get(newest, [2])), f"found {values}, reported {told}"
    if len(told) > 2:
        assert 2 in values, f"found {values}, reported {told}, and 2 is kept"
    if len(told) > 3 and told[-1] == "deleted":
        assert 3 not in values, f"found {values}, reported {told}"
    if told and told[-1] == "rewound":
        assert 4 not in values, f"found {values}, reported {told}"


def _last_step(job: Any, place: str, local: str) -> None:
    with tr.Checkpointer(place, keep=KEPT) as ckpts:
        if ckpts.latest_step is not None:
            assert int(ckpts.restore()["w"][0]) % 100 == ckpts.restored_step
        ckpts.save(LAST, tree(LAST))
    job.report((ckpts.restored_step or 0, LAST))


def _last_copy(job: Any, place: str, local: str) -> None:
    """The next job on the disk of the first one."""
    with tr.Checkpointer(place, keep=KEPT, local=f"{local}/1") as ckpts:
        if ckpts.latest_step is not None:
            assert int(ckpts.restore()["w"][0]) % 100 == ckpts.restored_step
        ckpts.save(LAST, tree(LAST))
    job.report((ckpts.restored_step or 0, LAST))


def _end_copy(place: str, reports: Reports) -> None:
    """The last job went on from the newest step that was near, and has copied it."""
    near = max((int(what[6:]) for _, what in reports if isinstance(what, str)), default=0)
    _, (begun, _) = reports[-1]
    assert begun >= near, f"went on from {begun}, reported {reports}"
    assert tr.steps(place) == [*([begun] if begun else []), LAST], tr.steps(place)
    assert not begun or read_value(place, begun) == 100 + begun
    nothing_left(place, reports)


def end_run(place: str, reports: Reports) -> None:
    """The last job went on from the newest step that was reported, or a later one; nothing is left over."""
    *told, (begun, _) = [what for _, what in reports if not isinstance(what, str)]
    assert begun >= max((step for _, step in told), default=0), f"went on from {begun}, reported {told}"
    nothing_left(place, reports)


def nothing_left(place: str, reports: Reports) -> None:
    """Nothing is left over, and the lease is given back."""
    steps = tr.steps(place)
    assert steps[-1] == LAST and read_value(place, LAST) == LAST, steps
    assert read_file(stores.of(place), f"{place}/writer.lock") == b'{"version":1}'
    names = set(stores.of(place).list(place)) - {"writer.lock"}
    assert all(name.startswith(("step-", "rewound-", "origin")) for name in names), names
    for name in names:
        if name.startswith("step-"):
            there = set(stores.of(place).list(f"{place}/{name}")) - {"pinned"}
            named = manifest.file_names(read_file(stores.of(place), summary.file(f"{place}/{name}")))
            assert there == {"treering.json", *named}, f"left over: {there}"


RUNS = {
    "a run": Scenario([_train(1, 5), _last_step], check_run, end_run),
    "a run, read": Scenario([_train(1, 4), _read_run, _last_step], check_run, end_run, _prepare_run),
    "a run, changed": Scenario([_change, _last_step], _check_changed, nothing_left),
    "a run, copied": Scenario([_copy(1, 3), _last_copy], check_run, _end_copy),
    "a copied run, taken over": Scenario([_copy(1, 2), _copy(2, 2), _last_step], check_run, end_run),
    "a run, gone back": Scenario([_go_on, _go_back, _last_step], _check_gone_back, _end_gone_back, _prepare_pinned),
    "a run, taken over": Scenario([_train(1, 3), _train(2, 3), _last_step], check_run, end_run),
}
