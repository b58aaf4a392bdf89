"""The states of a bucket after lost requests, requests without an answer, and requests that were the last of a process.

In some of them another job continues. These tests try some dozens of plans per scenario; `make faults-bucket` tries
a thousand for most.
"""

import collections
import multiprocessing
import pathlib
from concurrent.futures import ProcessPoolExecutor

import pytest

from buckets import random_hosts, scenarios
from buckets.__main__ import explored
from buckets.explore import ALL, Explorer, Moment, Plan
from sampling import STRIDE, sample_points

# More plans for the fastest scenarios, and for those in which two jobs can interleave in many ways.
_PLANS = {"saving": 120, "overwriting": 120, "two that save": 120, "two that overwrite": 120}


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios.ALL)
def test_any_request_of_any_job(name: str) -> None:
    """After a fault at any request of any job, the checks of the scenario hold."""
    number = (_PLANS.get(name, 80) if scenarios.ALL[name].processes == 1 else 30) // STRIDE
    count = explored(name, number, seed=0)
    assert not count.failures, count.failures[0]
    # A sample of a few plans may have the same end, and some of the same states.
    assert count.plans == number and len(count.distinct) > (20 if number >= 30 else number // 2)
    assert len(count.ends) > 1 or number < 10


@pytest.mark.slow
def test_random_jobs_on_hosts_with_disks() -> None:
    """No step is lost and no wrong tree restored after random faults. `make faults-hosts` plays thousands of jobs."""
    # Each job is a fork, which needs a process without JAX's threads. Other tests have started them in this one.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        results = [*pool.map(random_hosts.played, sample_points(range(70)))]
    assert not (failures := [failure for _, failure in results if failure]), failures[0]
    counts = sum((count for count, _ in results), collections.Counter[str]())
    assert counts["killed"] and counts["restored"] and counts["flip"] and counts["empty"], counts


@pytest.mark.slow
def test_a_commit_comes_again_after_retention_deleted_its_step(tmp_path: pathlib.Path) -> None:
    """The next job deletes the manifest that a delayed duplicate of a commit brought back."""
    with Explorer(str(tmp_path)) as explorer:
        commits = (Moment(r"put place/step-\d+/treering.json$", number) for number in (1, 2, 3))
        count = explorer.explore("a run", (Plan(faults=((0, commit, "late"),)) for commit in commits))
    assert not count.failures, count.failures[0]


@pytest.mark.slow
def test_a_copy_that_comes_when_another_job_has_the_run(tmp_path: pathlib.Path) -> None:
    """An upload that ends after another job has acquired the run is not reported: that job may replace its step."""
    name = "an uploaded run, new owner"
    with Explorer(str(tmp_path)) as explorer:
        first, second = map(sum, explorer.requests(name))
        points = sample_points(range(first // 2, first))
        late = (Plan(((0, number), (1, second * 2 // 3), (0, ALL))) for number in points)
        count = explorer.explore(name, late)
    assert not count.failures, count.failures[0]
    assert count.ends["SaveError, good"] > 3 // STRIDE


@pytest.mark.slow
def test_a_job_that_stands_still_before_it_deletes_a_step(tmp_path: pathlib.Path) -> None:
    """A job pauses before it deletes a step.

    Meanwhile another job acquires the run and saves new steps of the same numbers.
    """
    name = "a run, rewound"
    with Explorer(str(tmp_path)) as explorer:
        first = sum(explorer.requests(name)[0])
        late = (
            Plan(((0, number), (1, ALL), (0, ALL)), stopped=100.0) for number in sample_points(range(first // 2, first))
        )
        count = explorer.explore(name, late)
    assert not count.failures, count.failures[0]
    assert count.ends["LeaseLostError, good"] > 20 // STRIDE and count.limits < 5


@pytest.mark.slow
def test_a_plan_whose_moment_does_not_come_has_failed(tmp_path: pathlib.Path) -> None:
    """A plan fails if its named request never comes. Otherwise a test could stop testing its claim without notice."""
    never = Moment("put nowhere")
    with Explorer(str(tmp_path)) as explorer:
        count = explorer.explore("saving", iter([Plan(), Plan(((0, never),)), Plan(faults=((0, never, "lost"),))]))
    assert len(count.failures) == 2 and all("did not come" in one for one in count.failures)
