"""What jobs do with a bucket, and what must hold after every request of theirs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import treering as tr
from treering import stores
from treering._tools.copy import copy_all
from treering.errors import CorruptError, NotFoundError

_SIZE, _LARGE = 9, 40_000  # elements; objects of the second size go on their way in the background
_KEPT = tr.keep.last(2)
_LAST = 90  # the step that the job after all others saves

Reports = Sequence[tuple[int, Any]]  # the number of a job, from 1 on, and what its user was told


class Scenario(NamedTuple):
    """Jobs that each write at a place, and the one that comes after them; `check` is to hold at every moment.

    A job is called with a `Job`, and arguments that all jobs share: the place, a URL, and a local folder.
    `over` is what must hold before the last job, with the error of the first one and the number of faults; `end` when
    the last one is over.
    """

    jobs: Sequence[Callable[..., None]]  # the last one comes when the others are over, and nothing fails in it
    check: Callable[[str, Reports], None]
    end: Callable[[str, Reports], None]
    before: Callable[[str, str], None] = lambda place, local: None
    over: Callable[[str, str | None, int], None] = lambda place, error, faults: None


def _tree(value: int, size: int = _SIZE) -> dict[str, Any]:
    return {"w": np.full(size, value)}


def _value(place: str, step: int | None = None) -> int:
    """The value of a checkpoint, whole and verified."""
    array = tr.restore(place, step=step)["w"] if step is not None else tr.restore(place)["w"]
    assert array.shape in ((_SIZE,), (_LARGE,)) and (array == array[0]).all(), array
    return int(array[0])


# One checkpoint


def _prepare(place: str, local: str) -> None:
    tr.save(place, _tree(0))


def _save(value: int, *, overwrite: bool) -> Callable[..., None]:
    def job(job: Any, place: str, local: str) -> None:
        tr.save(place, _tree(value, _LARGE), overwrite=overwrite)
        job.report(value)

    return job


def _prepare_source(place: str, local: str) -> None:
    tr.save(f"{local}/source", _tree(1, _LARGE))


def _copy_one(job: Any, place: str, local: str) -> None:
    """A copy has the names of its source: two of them are not told apart by those."""
    copy_all(f"{local}/source", place)
    job.report(1)


def _check_one(allowed: Sequence[int | None], *, first: bool) -> Callable[[str, Reports], None]:
    """One of the values is there; `first`: once one was reported it is that one, for nobody overwrites."""

    def check(place: str, reports: Reports) -> None:
        try:
            found: int | None = _value(place)
        except NotFoundError:
            found = None
        told = [value for _, value in reports]
        assert found in allowed, f"found {found}"
        assert not told or found not in (None, 0), f"found {found}, but {told} was reported"
        if first and told:
            assert told == [found], f"found {found}, but {told} was reported"

    return check


def _check_untold(before: int | None) -> Callable[[str, str | None, int], None]:
    """One request that fails is told apart: a save that raises an error has changed nothing."""

    def over(place: str, error: str | None, faults: int) -> None:
        if faults == 1 and error not in (None, "killed") and "KilledError" not in str(error):
            try:
                found: int | None = _value(place)
            except NotFoundError:
                found = None
            assert found == before, f"found {found}, though the save raised {error}"

    return over


def _last_save(job: Any, place: str, local: str) -> None:
    tr.save(place, _tree(_LAST), overwrite=True)
    job.report(_LAST)


def _end_one(place: str, reports: Reports) -> None:
    assert _value(place) == _LAST
    names = stores.of(place).list(place)
    assert len(names) == 2, f"left over: {names}"


def _read(job: Any, place: str, local: str) -> None:
    for _ in range(2):
        job.report(_value(place))


def _check_read(place: str, reports: Reports) -> None:
    """A reader gets the old one or the new one, and not the old one once it has got the new one."""
    read = [value for number, value in reports if number == 2]
    assert read in ([], [0], [1], [0, 0], [0, 1], [1, 1]), read
    if (1, 1) in reports:
        after = reports[reports.index((1, 1)) + 1 :]
        assert after[1:] in ([], [(2, 1)]), reports  # the first may have been under way


# Runs


def _prepare_run(place: str, local: str) -> None:
    with tr.Checkpointer(place) as ckpts:
        for step in (1, 2):
            ckpts.save(step, _tree(100 + step))


def _read_run(job: Any, place: str, local: str) -> None:
    """Reads the newest step, which is the one that it says; steps come and go meanwhile."""
    for _ in range(2):
        ckpts = tr.Checkpointer(place)
        assert int(ckpts.restore()["w"][0]) == 100 + (ckpts.restored_step or 0)


def _train(number: int, steps: int, **options: Any) -> Callable[..., None]:
    """Saves some steps more than there are, and reports each of them with the step that was restored."""

    def job(job: Any, place: str, local: str) -> None:
        with tr.Checkpointer(place, keep=_KEPT, **options) as ckpts:
            begun = int(ckpts.restore()["w"][0]) % 100 if ckpts.latest_step else 0
            for step in range(begun + 1, begun + 1 + steps):
                ckpts.save(step, _tree(100 * number + step))
                ckpts.wait()
                job.report((begun, step))

    return job


def _copy(number: int, steps: int) -> Callable[..., None]:
    """Saves some steps more than there are on a disk of its own; reports those that must be far when it has closed."""

    def job(job: Any, place: str, local: str) -> None:
        with tr.Checkpointer(place, keep=_KEPT, local=f"{local}/{number}") as ckpts:
            begun = int(ckpts.restore()["w"][0]) % 100 if ckpts.latest_step else 0
            end = begun + steps
            for step in range(begun + 1, end + 1):
                ckpts.save(step, _tree(100 * number + step))
                ckpts.wait()
                job.report(f"near: {step}")
        for step in range(max(begun + 1, end - 1), end + 1):
            job.report((begun, step))

    return job


def _change(job: Any, place: str, local: str) -> None:
    """Saves, pins, deletes, goes back, and saves other steps in the place of those that were set aside."""
    with tr.Checkpointer(place, keep=_KEPT) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, _tree(100 + step))
            ckpts.wait()
            job.report((0, step))
        ckpts.pin(2)
        ckpts.delete(3)
        job.report("deleted")
        ckpts.save(4, _tree(104))
        ckpts.wait()
        job.report((0, 4))
        ckpts.rewind(2)
        job.report("rewound")
        ckpts.save(3, _tree(103))
        ckpts.wait()
        job.report((0, 3))


def _check_run(place: str, reports: Reports) -> None:
    """The two newest steps that were reported are there, whole, or newer ones are; others are whole or not told of."""
    told = {what[1]: 100 * number + what[1] for number, what in reports if not isinstance(what, str)}
    newest = sorted(told)[-2:]
    steps = tr.steps(place)
    values: dict[int, int | None] = {}
    for step in steps:
        try:
            values[step] = value = _value(place, step)
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
    values = {step: _value(place, step) for step in steps}
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
    with tr.Checkpointer(place, keep=_KEPT) as ckpts:
        if ckpts.latest_step is not None:
            assert int(ckpts.restore()["w"][0]) % 100 == ckpts.restored_step
        ckpts.save(_LAST, _tree(_LAST))
    job.report((ckpts.restored_step or 0, _LAST))


def _last_copy(job: Any, place: str, local: str) -> None:
    """The next job on the disk of the first one."""
    with tr.Checkpointer(place, keep=_KEPT, local=f"{local}/1") as ckpts:
        if ckpts.latest_step is not None:
            assert int(ckpts.restore()["w"][0]) % 100 == ckpts.restored_step
        ckpts.save(_LAST, _tree(_LAST))
    job.report((ckpts.restored_step or 0, _LAST))


def _end_copy(place: str, reports: Reports) -> None:
    """The last job went on from the newest step that was near, and has copied it."""
    near = max((int(what[6:]) for _, what in reports if isinstance(what, str)), default=0)
    _, (begun, _) = reports[-1]
    assert begun >= near, f"went on from {begun}, reported {reports}"
    assert tr.steps(place) == [*([begun] if begun else []), _LAST], tr.steps(place)
    assert not begun or _value(place, begun) == 100 + begun
    _end_changed(place, reports)


def _end_run(place: str, reports: Reports) -> None:
    """The last job went on from the newest step that was reported, or a later one; nothing is left over."""
    *told, (begun, _) = [what for _, what in reports if not isinstance(what, str)]
    assert begun >= max((step for _, step in told), default=0), f"went on from {begun}, reported {told}"
    _end_changed(place, reports)


def _end_changed(place: str, reports: Reports) -> None:
    """Nothing is left over."""
    steps = tr.steps(place)
    assert steps[-1] == _LAST and _value(place, _LAST) == _LAST, steps
    names = stores.of(place).list(place)
    assert all(name.startswith(("step-", "rewound-", "origin")) for name in names), names
    for name in names:
        if name.startswith("step-"):
            there = set(stores.of(place).list(f"{place}/{name}")) - {"pinned"}
            assert len(there) == 2, f"left over: {there}"


ALL = {
    "saving": Scenario(
        [_save(1, overwrite=False), _last_save],
        _check_one([None, 1], first=True),
        _end_one,
        over=_check_untold(None),
    ),
    "overwriting": Scenario(
        [_save(1, overwrite=True), _last_save],
        _check_one([0, 1], first=True),
        _end_one,
        _prepare,
        _check_untold(0),
    ),
    "overwriting, read": Scenario([_save(1, overwrite=True), _read, _last_save], _check_read, _end_one, _prepare),
    "two that save": Scenario(
        [_save(1, overwrite=False), _save(2, overwrite=False), _last_save],
        _check_one([None, 1, 2], first=True),
        _end_one,
    ),
    "two that overwrite": Scenario(
        [_save(1, overwrite=True), _save(2, overwrite=True), _last_save],
        _check_one([0, 1, 2], first=False),
        _end_one,
        _prepare,
    ),
    "two that copy": Scenario(
        [_copy_one, _copy_one, _last_save], _check_one([None, 1], first=False), _end_one, _prepare_source
    ),
    "a run": Scenario([_train(1, 5), _last_step], _check_run, _end_run),
    "a run, read": Scenario([_train(1, 4), _read_run, _last_step], _check_run, _end_run, _prepare_run),
    "a run, changed": Scenario([_change, _last_step], _check_changed, _end_changed),
    "a run, copied": Scenario([_copy(1, 3), _last_copy], _check_run, _end_copy),
    "a copied run, taken over": Scenario([_copy(1, 2), _copy(2, 2), _last_step], _check_run, _end_run),
    "a run, taken over": Scenario([_train(1, 3), _train(2, 3), _last_step], _check_run, _end_run),
}
