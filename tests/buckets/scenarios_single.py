"""Jobs that write one checkpoint."""

from collections.abc import Callable, Sequence
from typing import Any

import treering as tr
from treering import stores
from treering._tools.copy import copy_checkpoints
from treering.errors import NotFoundError

from .scenario import LARGE, LAST, Reports, Scenario, read_value, tree


def _prepare(place: str, local: str) -> None:
    tr.save(place, tree(0))


def _save(value: int, *, overwrite: bool) -> Callable[..., None]:
    def job(job: Any, place: str, local: str) -> None:
        tr.save(place, tree(value, LARGE), overwrite=overwrite)
        job.report(value)

    return job


def _prepare_source(place: str, local: str) -> None:
    tr.save(f"{local}/source", tree(1, LARGE))


def _copy_one(job: Any, place: str, local: str) -> None:
    """Copies a checkpoint. A copy has the file names of its source, so two copies have the same names."""
    copy_checkpoints(f"{local}/source", place)
    job.report(1)


def _check_one(allowed: Sequence[int | None], *, first: bool) -> Callable[[str, Reports], None]:
    """Returns a check that the place has one of the `allowed` values.

    first: once a value was reported, it stays, because no job overwrites.
    """

    def check(place: str, reports: Reports) -> None:
        try:
            found: int | None = read_value(place)
        except NotFoundError:
            found = None
        reported = [value for _, value in reports]
        assert found in allowed, f"found {found}"
        assert not reported or found not in (None, 0), f"found {found}, but {reported} was reported"
        if first and reported:
            assert reported == [found], f"found {found}, but {reported} was reported"

    return check


def _check_unreported(before: int | None) -> Callable[[str, str | None, int], None]:
    """Returns a check that a save which raised an error has changed nothing. Only used after a single fault."""

    def over(place: str, error: str | None, faults: int) -> None:
        if faults == 1 and error not in (None, "killed"):
            try:
                found: int | None = read_value(place)
            except NotFoundError:
                found = None
            assert found == before, f"found {found}, though the save raised {error}"

    return over


def _last_save(job: Any, place: str, local: str) -> None:
    tr.save(place, tree(LAST), overwrite=True)
    job.report(LAST)


def _end_one(place: str, reports: Reports) -> None:
    assert read_value(place) == LAST
    names = stores.get(place).list(place)
    assert len(names) == 2, f"left over: {names}"


def _read(job: Any, place: str, local: str) -> None:
    for _ in range(2):
        job.report(read_value(place))


def _check_read(place: str, reports: Reports) -> None:
    """Asserts that a reader gets the old value or the new one, and never the old one after the new one."""
    read = [value for number, value in reports if number == 2]
    assert read in ([], [0], [1], [0, 0], [0, 1], [1, 1]), read
    if (1, 1) in reports:
        after = reports[reports.index((1, 1)) + 1 :]
        assert after[1:] in ([], [(2, 1)]), reports  # the first read may have started before


SINGLE = {
    "saving": Scenario(
        [_save(1, overwrite=False), _last_save],
        _check_one([None, 1], first=True),
        _end_one,
        over=_check_unreported(None),
    ),
    "overwriting": Scenario(
        [_save(1, overwrite=True), _last_save],
        _check_one([0, 1], first=True),
        _end_one,
        _prepare,
        _check_unreported(0),
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
}
