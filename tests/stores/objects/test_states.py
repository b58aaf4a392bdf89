"""What a bucket can look like after any request was lost, done without an answer, or the last of its process; and while
another job goes on. `make torture-buckets` tries a thousand plans for most scenarios, not some dozens.
"""

import pathlib

import pytest

from buckets import scenarios
from buckets.__main__ import explored
from buckets.explore import ALL, Explorer, Moment, Plan
from buckets.scenario import Reports, read_value
from samples import EVERY, some
from treering.formats.treering import manifest

# The quickest, and those with two jobs that meet in many ways.
_PLANS = {"saving": 120, "overwriting": 120, "two that save": 120, "two that overwrite": 120}


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios.ALL)
def test_any_request_of_any_job(name: str) -> None:
    number = (_PLANS.get(name, 80) if scenarios.ALL[name].processes == 1 else 30) // EVERY
    count = explored(name, number, seed=0)
    assert not count.failures, count.failures[0]
    assert count.plans == number and len(count.distinct) > min(number, 20) and len(count.ends) > 1


@pytest.mark.slow
def test_a_copy_that_comes_when_another_job_has_the_run(tmp_path: pathlib.Path) -> None:
    """Its job is not told that the step is there: the other one may replace it."""
    name = "a copied run, taken over"
    with Explorer(str(tmp_path)) as explorer:
        first, second = map(sum, explorer.requests(name))
        points = some(range(first // 2, first))
        late = (Plan(((0, number), (1, second * 2 // 3), (0, ALL))) for number in points)
        count = explorer.explore(name, late)
    assert not count.failures, count.failures[0]
    assert count.ends["SaveError, good"] > 3 // EVERY


@pytest.mark.slow
def test_a_job_that_stands_still_before_it_deletes_a_step(tmp_path: pathlib.Path) -> None:
    """Meanwhile another one takes the run, goes back, and saves other steps of the same numbers."""
    name = "a run, gone back"
    with Explorer(str(tmp_path)) as explorer:
        first = sum(explorer.requests(name)[0])
        late = (Plan(((0, number), (1, ALL), (0, ALL)), stopped=100.0) for number in some(range(first // 2, first)))
        count = explorer.explore(name, late)
    assert not count.failures, count.failures[0]
    assert count.ends["TakenOverError, good"] > 20 // EVERY and count.limits < 5


@pytest.mark.slow
def test_a_part_of_what_replaces_a_step_is_not_set_aside_with_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was killed before it could say that it has one.

    The first job commits its step 1 after the second one has looked at the disks, and before that commits its own.
    """
    name = "hosts' disks, other ranks"
    turns = ((0, Moment("disk rename .*/b/copied-to.json")), (1, Moment("disk make_dir .*/b/step-00000001")))
    committed = Moment("report near: 1|put place/step-00000001/")  # and nothing is copied yet
    scenario, found = scenarios.ALL[name], list[int]()

    def over(place: str, error: str | None, faults: int) -> None:
        """Disk a has an array file of the second job's step, and says no more than that it has the first one's."""
        (here,), (other,) = (tmp_path.glob(f"*/{disk}/step-00000001") for disk in "ab")
        data = (other / "treering.json").read_bytes()
        assert any((here / file).exists() for file in manifest.file_names(data))
        assert (here / "treering.json").exists() and not (here / f"part-of-{manifest.xxh3(data)}").exists()

    def end(place: str, reports: Reports) -> None:
        scenario.end(place, reports)
        found.append(read_value(place, 1))

    monkeypatch.setitem(scenarios.ALL, name, scenario._replace(over=over, end=end))
    plan = Plan(turns, ((0, committed, "killed before"), (2, committed, "killed before")), stopped=65.0)
    with Explorer(str(tmp_path)) as explorer:
        count = explorer.explore(name, iter([plan]))
    assert not count.failures, count.failures[0]
    assert count.limits == 0 and found == [201], "the step of the second job is whole"


@pytest.mark.slow
def test_a_plan_whose_moment_does_not_come_has_failed(tmp_path: pathlib.Path) -> None:
    """Or a test would stop testing what it says when the library makes other requests."""
    never = Moment("put nowhere")
    with Explorer(str(tmp_path)) as explorer:
        count = explorer.explore("saving", iter([Plan(), Plan(((0, never),)), Plan(faults=((0, never, "lost"),))]))
    assert len(count.failures) == 2 and all("did not come" in one for one in count.failures)
