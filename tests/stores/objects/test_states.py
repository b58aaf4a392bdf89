"""What a bucket can look like after any request was lost, done without an answer, or the last of its process; and while
another job goes on. `make torture-buckets` tries a thousand plans for most scenarios, not some dozens.
"""

import pathlib

import pytest

from buckets import scenarios
from buckets.__main__ import explored
from buckets.explore import ALL, Explorer, Plan
from samples import EVERY, some

# The quickest, and those with two jobs that meet in many ways.
_PLANS = {"saving": 120, "overwriting": 120, "two that save": 120, "two that overwrite": 120}


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios.ALL)
def test_any_request_of_any_job(name: str) -> None:
    number = (_PLANS.get(name, 80) if scenarios.ALL[name].processes == 1 else 30) // EVERY
    count = explored(name, number, seed=0)
    assert not count.failures, count.failures[0]
    assert count.plans == number and len(count.distinct) > 20 and len(count.ends) > 1


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
def test_a_part_of_what_replaces_a_step_is_not_set_aside_with_it(tmp_path: pathlib.Path) -> None:
    """Its process was killed before it could say that it has one."""
    # At which request that was has changed since, with the number of requests before it: so several are tried.
    plans = [
        Plan(turns=((0, 42 + more), (1, 39), (0, 10)), faults=((2, 50 + more, "killed after"),), stopped=65.0)
        for more in range(-2, 6)
    ]
    with Explorer(str(tmp_path)) as explorer:
        count = explorer.explore("hosts' disks, other ranks", iter(plans))
    assert not count.failures, count.failures[0]
    assert any("killed" in end for end in count.ends) and len(count.ends) > 1
