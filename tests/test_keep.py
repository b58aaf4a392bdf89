"""Retention policies, which are pure functions."""

import datetime
import itertools
import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from treering import keep
from treering.errors import MismatchError
from treering.keep import Saved


def saved(*steps: Any, created: Any = None) -> list[Saved]:
    """Makes `Saved` steps from numbers or (step, loss) pairs."""
    pairs = [step if isinstance(step, tuple) else (step, None) for step in steps]
    return [
        Saved(step, {} if loss is None else {"loss": loss}, created[n] if created else 0.0)
        for n, (step, loss) in enumerate(pairs)
    ]


def test_last() -> None:
    assert keep.last(2).kept(saved(1, 5, 9)) == {5, 9}
    assert keep.last(5).kept(saved(1, 5)) == {1, 5}
    assert keep.last(1).kept([]) == set()
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \|: 'Policy' and 'int'"):
        keep.last(2) | 3  # type: ignore[operator]  # pyright: ignore


def test_best_in_both_modes_with_ties_and_nan() -> None:
    steps = saved((1, 0.5), (2, math.nan), (3, 0.5), (4, 0.9), (5, -math.inf), (6, None))
    assert keep.best(2, "loss", "min", unscored="drop").kept(steps) == {5, 3}
    assert keep.best(1, "loss", "max", unscored="drop").kept(steps) == {4}
    assert keep.best(1, "loss", "max").kept(steps) == {4, 6}
    assert keep.rank(steps, "loss", "min") == [5, 3, 1, 4, 2]


def test_steps_without_the_metric_take_the_free_places() -> None:
    """The job keeps its newest steps if the evaluator is late or down."""
    dropping = keep.best(3, "loss", "min", unscored="drop")
    assert dropping.kept(saved(1, 2, 3, 4, 5)) == {3, 4, 5}
    assert dropping.kept(saved(1, (2, 0.5), 3, (4, 0.1), 5, 6)) == {2, 4, 6}
    assert dropping.kept(saved((1, 0.5), (2, 0.6), (3, math.nan), 4)) == {1, 2, 3}
    assert dropping.kept(saved(1)) == {1} and dropping.kept([]) == set()


def test_size_keeps_what_fits_and_the_newest() -> None:
    steps = [Saved(step, {}, nbytes=nbytes) for step, nbytes in ((1, 1), (2, 30), (3, 40), (4, 60))]
    assert {n: keep.size(n).kept(steps) for n in (1, 60, 99, 100, 130, 131)} == {
        1: {4}, 60: {4}, 99: {4}, 100: {3, 4}, 130: {2, 3, 4}, 131: {1, 2, 3, 4}
    }  # fmt: skip
    assert keep.size(5).kept([]) == set()


def test_a_file_that_steps_share_counts_once() -> None:
    """Steps of 10 bytes share files of 90 bytes: an old one, and two that take turns."""
    files = {1: "old", 2: "a", 3: "b", 4: "a", 5: "b", 6: "a"}
    steps = [Saved(step, {}, nbytes=100, linked={file: 90}) for step, file in files.items()]
    assert {n: len(keep.size(n).kept(steps)) for n in (199, 200, 209, 210, 230, 329, 330)} == {
        199: 1, 200: 2, 209: 2, 210: 3, 230: 5, 329: 5, 330: 6
    }  # fmt: skip


def test_every_counts_step_0() -> None:
    assert keep.every(4).kept(saved(0, 2, 4, 6, 8)) == {0, 4, 8}


def test_every_keeps_the_first_step_at_or_after_each_multiple() -> None:
    assert keep.every(1000).kept(saved(7, 507, 1007, 1507, 2007)) == {7, 1007, 2007}
    assert keep.every(10).kept(saved(*range(1, 40, 2))) == {1, 11, 21, 31}
    assert keep.every(10).kept(saved(3, 47, 48, 50)) == {3, 47, 50}
    for steps in itertools.combinations(range(14), 5):  # Once for all steps, and once after each save.
        wanted = {next(step for step in steps if step >= at) for at in range(0, steps[-1] + 1, 4)}
        assert keep.every(4).kept(saved(*steps)) == wanted
        left: set[int] = set()
        for step in steps:
            left = keep.every(4).kept(saved(*sorted(left), step))
        assert left == wanted


def test_last_by_time_counts_back_from_the_newest() -> None:
    """`last` with a time keeps the steps saved within that time before the newest."""
    hour = datetime.timedelta(hours=1)
    assert keep.last(hour).kept(saved(1, 2, 3, 4, created=[0, 1000, 4000, 4600])) == {2, 3, 4}
    assert keep.last(hour).kept(saved(1)) == {1} and keep.last(hour).kept([]) == set()
    overwritten = keep.last(hour).kept(saved(1, 2, 3, created=[9000, 100, 5000]))
    assert overwritten == {1, 3}, "a step saved after the newest step is not older than it"


def test_every_interval_of_time_keeps_the_first() -> None:
    times = [0, 10, 50, 61, 70, 200]
    found = keep.every(datetime.timedelta(minutes=1)).kept(saved(*range(6), created=times))
    assert found == {0, 3, 5}
    ahead = keep.every(datetime.timedelta(minutes=1)).kept(saved(1, 2, 3, created=[9e9, 0, 61]))
    assert ahead == {1, 2, 3}, "a clock that was once wrong does not expire the other steps"


def test_steps() -> None:
    assert keep.steps(1, 7).kept(saved(1, 2)) == {1}


def test_a_union_keeps_what_any_of_its_parts_keeps() -> None:
    policies = [keep.last(1), keep.every(3), keep.steps(4), keep.best(1, "loss", "min", unscored="drop")]
    for n in range(7):
        for losses in itertools.product([0.1, None], repeat=n):
            steps = saved(*enumerate(losses))
            union = policies[0] | policies[1] | policies[2] | policies[3]
            assert union.kept(steps) == set().union(*(policy.kept(steps) for policy in policies))


@pytest.mark.parametrize(
    "make",
    [
        lambda: keep.last(0),
        lambda: keep.last(True),
        lambda: keep.last(1.5),  # type: ignore[arg-type]
        lambda: keep.last(datetime.timedelta(0)),
        lambda: keep.steps(1, 2.5),  # type: ignore[arg-type]
        lambda: keep.steps(-1),
        lambda: keep.best(1, None, "min"),  # type: ignore[arg-type]
        lambda: keep.every(1.5),  # type: ignore[arg-type]
        lambda: keep.every(datetime.timedelta(0)),
        lambda: keep.best(1, "loss", "lowest"),  # type: ignore[arg-type]
        lambda: keep.best(1, "loss", "min", unscored="maybe"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make: Any) -> None:
    with pytest.raises(MismatchError, match=r"keep\."):
        make()


def test_a_scalar_of_jax_is_the_number_of_a_step() -> None:
    assert keep.steps(jnp.int32(5)) == keep.steps(np.array(5)) == keep.steps(5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: keep.size(5e9), "keep.size: expected an integer from 1, found 5000000000.0; write 5000000000\n"),
        (lambda: keep.last("3"), "keep.last: expected an integer from 1, found '3'\n"),
        (lambda: keep.steps([1, 2]), "keep.steps: expected integers, found [1, 2]; write keep.steps(*numbers)\n"),
        (lambda: keep.best("loss", 1, "min"), "found 1; the order is keep.best(n, metric, mode)\n"),
    ],
)
def test_errors_say_what_to_write(make: Any, said: str) -> None:
    with pytest.raises(MismatchError, match=re.escape(said)):
        make()
