"""What a bucket can look like after any request was lost, done without an answer, or the last of its process; and while
another job goes on. `make torture-buckets` tries thousands of plans for each scenario, not some hundred.
"""

import pathlib

import pytest

from buckets import scenarios
from buckets.__main__ import explored
from buckets.explore import ALL, Explorer, Plan

# The quickest, and those with two jobs that meet in many ways.
_PLANS = {"saving": 120, "overwriting": 120, "two that save": 200, "two that overwrite": 200}


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios.ALL)
def test_any_request_of_any_job(name: str) -> None:
    number = _PLANS.get(name, 80) if scenarios.ALL[name].processes == 1 else 10
    count = explored(name, number, seed=0)
    assert not count.failures, count.failures[0]
    assert count.plans == number and len(count.distinct) > 20 and len(count.ends) > 1


@pytest.mark.slow
def test_a_copy_that_comes_when_another_job_has_the_run(tmp_path: pathlib.Path) -> None:
    """Its job is not told that the step is there: the other one may replace it."""
    name = "a copied run, taken over"
    with Explorer(str(tmp_path)) as explorer:
        first, second = map(sum, explorer.requests(name))
        late = (Plan(((0, number), (1, second * 2 // 3), (0, ALL))) for number in range(first // 2, first))
        count = explorer.explore(name, late)
    assert not count.failures, count.failures[0]
    assert count.ends["SaveError, good"] > 3
