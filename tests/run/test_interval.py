"""Tests of `save_every="auto"`: a simulated job and a real one lose the least time with the chosen interval."""

import datetime
import logging
import pathlib
import time
from typing import Any

import numpy as np
import pytest

import treering as tr
from sampling import sample_points
from treering._run import schedule
from treering._run.schedule import Interval, Schedule, optimal_interval
from treering._save.pending import SaveReport
from treering.errors import MismatchError

WORK = 400_000.0  # seconds of steps
STEP = 1.0
RESTART = 60.0


class Job:
    """A job in simulated time: steps, saves that stall it and slow it down, failures, and repeated work."""

    def __init__(self, seed: int, mtbf: float, stall: float, write: float, slower: float):
        self.now = 0.0
        self._random = np.random.default_rng(seed)
        self._mtbf, self._stall, self._write, self._slower = mtbf, stall, write, slower

    def run(self, make: Any) -> float:
        """Returns the seconds that all work takes. `make(busy)` returns the schedule of an attempt between failures."""
        saved = done = 0.0
        while done < WORK:
            done = saved
            failure = self.now + self._random.exponential(self._mtbf)
            pending: list[tuple[float, float]] = []  # of each save: the time it ends, and the saved work
            chosen = make(lambda pending=pending: bool(pending))
            while done < WORK and self.now < failure:
                self.now += STEP * (1 + self._slower) if pending else STEP
                done += STEP
                if pending and self.now >= pending[0][0]:
                    ((_, saved),) = pending
                    pending.clear()
                    chosen.on_commit(SaveReport("run", 0, 1, self._stall, self._write + self._stall))
                if chosen.is_due(0) and not pending:
                    self.now += self._stall
                    pending.append((self.now + self._write, done))
                    chosen.on_save_started()
            if done < WORK:
                self.now += RESTART
        return self.now


class Fixed:
    """A schedule with a fixed interval."""

    def __init__(self, job: Job, seconds: float):
        self._job, self._seconds, self._since = job, seconds, job.now

    def is_due(self, step: int) -> bool:
        return self._job.now - self._since >= self._seconds

    def on_save_started(self) -> None:
        self._since = self._job.now

    def on_commit(self, report: SaveReport) -> None: ...


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mtbf", "stall", "write", "slower"),
    sample_points(
        [
            (20_000, 5, 20, 0.0),
            (5_000, 2, 60, 0.0),
            (40_000, 0.1, 30, 0.3),
            (3_000, 20, 20, 0.0),
            (100_000, 60, 120, 0.1),
        ],
        first=1,
    ),
)
def test_auto_interval_loses_at_most_five_percent(
    monkeypatch: pytest.MonkeyPatch, mtbf: float, stall: float, write: float, slower: float
) -> None:
    """The chosen interval takes at most 5 % more time than the best fixed interval."""
    seeds = range(6)

    def average(run: Any) -> float:
        return float(np.mean([run(Job(seed, mtbf, stall, write, slower)) for seed in seeds])) - WORK

    def automatic(job: Job) -> float:
        monkeypatch.setattr(schedule.time, "monotonic", lambda: job.now)
        given = datetime.timedelta(seconds=mtbf)
        return job.run(lambda busy: Schedule("auto", given, busy))

    lost = average(automatic)
    monkeypatch.undo()
    cost = stall + slower / (1 + slower) * write
    guess = np.sqrt(2 * cost * mtbf)
    best = min(
        average(lambda job, s=guess * factor: job.run(lambda busy: Fixed(job, s)))
        for factor in np.geomspace(0.4, 2.5, 9)
    )
    assert WORK + lost <= 1.05 * (WORK + best), (lost, best)
    assert lost <= 1.3 * best, (lost, best)  # compares only the loss, which varies because failures are few


def test_the_estimate_is_that_of_daly() -> None:
    for mtbf in (3_600, 86_400):
        for cost in (0.1, 1, 60):
            work = np.geomspace(cost / 10, mtbf, 20_000)
            # Expected seconds for each second of work if failures are a Poisson process (Daly, equation 20).
            expected = mtbf * (np.exp((work + cost) / mtbf) - 1) / work
            chosen = optimal_interval(cost, mtbf)
            own = mtbf * (np.exp((chosen + cost) / mtbf) - 1) / chosen
            assert own <= 1.0005 * expected.min()
    assert optimal_interval(10_000, 3_600) == 3_600


def test_a_save_is_over_before_the_next_one_begins() -> None:
    interval = Interval(datetime.timedelta(seconds=100))
    interval.add_save(SaveReport("run", 0, 1, 0.001, 50.0))
    assert interval.seconds >= 49


def test_without_a_mean_time_it_is_that_of_many_jobs(caplog: pytest.LogCaptureFixture) -> None:
    interval = Interval(None)
    with caplog.at_level(logging.INFO, "treering"):
        interval.add_save(SaveReport("run", 0, 1, 0.05, 1.0))
        interval.add_save(SaveReport("run", 0, 1, 0.05, 1.0))
    assert interval.seconds == pytest.approx(optimal_interval(0.05, 50_000 * 3600 / 8))  # the tests have 8 devices
    assert len(caplog.records) == 1 and "a save costs the loop 0.05 s" in caplog.text


def test_mtbf_needs_an_automatic_interval(tmp_path: pathlib.Path) -> None:
    for save_every, mtbf in ((5, 1), ("auto", 0), ("auto", -1)):
        with pytest.raises(MismatchError, match="expected a timedelta above 0, together with save_every='auto'"):
            tr.Checkpointer(tmp_path, save_every=save_every, mtbf=datetime.timedelta(mtbf))


def test_auto_interval_in_a_real_loop(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real loop saves at its first step, and then at the chosen interval."""
    state = {"w": np.zeros(1 << 16, np.float32)}
    hour = datetime.timedelta(hours=1)
    with (
        caplog.at_level(logging.INFO, "treering"),
        tr.Checkpointer(tmp_path / "a", save_every="auto", mtbf=hour) as ckpts,
    ):
        assert ckpts.save(1, state) is not None
        ckpts.wait()
        for step in range(2, 40):
            time.sleep(0.001)
            assert ckpts.save(step, state) is None, "a save of milliseconds is not worth making again within seconds"
        assert ckpts.save(40, state, force=True) is not None
    assert "saving every" in caplog.text and "every 1 hours" in caplog.text
    often = datetime.timedelta(seconds=1e-3)
    with tr.Checkpointer(tmp_path / "b", save_every="auto", mtbf=often) as ckpts:
        step, on_save_started = 0, time.monotonic()
        while len(ckpts.steps) <= 3:
            assert time.monotonic() < on_save_started + 60
            time.sleep(0.002)
            ckpts.save(step := step + 1, state)


def test_a_loop_that_ends_with_an_unsaved_step_says_so(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def train(save_every: int, steps: int, force: bool = False, finish: bool = False) -> list[tuple[str, str]]:
        caplog.clear()
        with tr.Checkpointer(tmp_path / "run", save_every=save_every) as ckpts:
            begin = ckpts.restore_or_init(lambda: {"w": np.zeros(3)})[1]
            for step in range(begin + 1, steps + 1):
                ckpts.save(step, {"w": np.zeros(3)}, force=force and step == steps)
            if finish:
                ckpts.finish()
        found = [(one.levelname, one.getMessage()) for one in caplog.records]
        return [(level, text.partition(": closed ")[2]) for level, text in found if ": closed " in text]

    said = "without saving step {}, the newest, which was not due; force=True saves it"
    assert train(100, 3) == [("WARNING", said.format(3))]  # The job has saved nothing.
    assert train(2, 5, finish=True) == [("INFO", said.format(5))]
    assert train(2, 7, force=True) == train(2, 8) == []
    with pytest.raises(ValueError), tr.Checkpointer(tmp_path / "run", save_every=100) as ckpts:
        ckpts.save(9, {"w": np.zeros(3)})
        raise ValueError
    assert "closed" not in caplog.text


def test_a_step_that_the_run_has_is_not_called_unsaved(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = {"w": np.zeros(3)}
    with tr.Checkpointer(tmp_path / "run", save_every=100) as ckpts:
        ckpts.save(3, state, force=True)
        ckpts.save(3, state)  # after the loop, which has saved it
    with tr.Checkpointer(tmp_path / "run", save_every=100) as ckpts:
        ckpts.save(ckpts.restore_or_init(lambda: state)[1], state)  # the loop had nothing to do
    with tr.Checkpointer(tmp_path / "run", save_every=100) as ckpts:
        ckpts.save(4, state)
        with pytest.raises(tr.errors.UnsupportedError):
            ckpts.save(5, {"w": object()}, force=True)
    assert "closed" not in caplog.text
    with tr.Checkpointer(tmp_path / "run", save_every=100, when_busy="skip") as ckpts:
        ckpts.save(6, state)
    assert "not due, or came while another one was being saved; force=True" in caplog.text


def test_a_save_that_fails_does_not_end_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "above").write_text("in the way")
    with (
        pytest.raises(tr.errors.SaveError),
        tr.Checkpointer(tmp_path / "above" / "run", save_every="auto", on_error="log") as ckpts,
    ):
        for step in range(3):
            ckpts.save(step, {"w": np.zeros(3)})
            time.sleep(0.05)
        (tmp_path / "above").unlink()
        ckpts.save(3, {"w": np.zeros(3)})
        ckpts.wait()
        assert ckpts.steps == [3]
        raise tr.errors.SaveError("the end")


@pytest.mark.parametrize(
    "options",
    [{"save_every": "often"}, {"mtbf": datetime.timedelta(1)}, {"save_every": "auto", "mtbf": datetime.timedelta(0)}],
)
def test_what_makes_no_sense_is_refused(tmp_path: pathlib.Path, options: Any) -> None:
    """Wrong values of `save_every` and `mtbf` raise errors."""
    with pytest.raises(MismatchError):
        tr.Checkpointer(tmp_path / "run", **options)
