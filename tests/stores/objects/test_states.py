"""What a bucket can look like after any request was lost, done without an answer, or the last of its process.

The server is a double in memory (obstore's, behind a gate that fails requests), for no real one can be stopped between
any two requests a hundred thousand times. `TREERING_STATES=100000` tries so many combinations, not a few hundred.
"""

import itertools
import os
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import obstore
import obstore.exceptions
import obstore.store
import pytest

import treering as tr
from treering import stores
from treering.errors import NotFoundError, TreeringError
from treering.stores.objects import bucket, heartbeat
from treering.stores.objects.store import ObjectStore

_OUTCOMES = ("lost", "unanswered", "repeated", "killed before", "killed after")
_OLD, _NEW = {"w": np.zeros(5)}, {"w": np.arange(70_000.0)}  # the new arrays go on their way in the background
_COUNT = int(os.environ.get("TREERING_STATES", "600"))


class _KilledError(BaseException):
    """The process that makes the request is dead."""


class _Gate:
    """The functions of obstore on a store in memory; the requests of these numbers have other outcomes."""

    def __init__(self) -> None:
        self.reset({})

    def reset(self, outcomes: dict[int, str]) -> None:
        """Counts from 0 again."""
        self.outcomes, self.numbers, self.dead = outcomes, itertools.count(), False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: self._request(lambda: getattr(obstore, name)(*args, **options))

    def _request(self, ask: Callable[[], Any]) -> Any:
        if self.dead:
            raise _KilledError
        outcome = self.outcomes.get(next(self.numbers))
        if outcome == "killed before":
            self.dead = True
            raise _KilledError
        if outcome == "lost":
            raise obstore.exceptions.GenericError("no connection, max_retries: 0")
        try:
            answer = ask()
        finally:
            if outcome == "killed after":
                self.dead = True
                raise _KilledError
            if outcome == "unanswered":
                raise obstore.exceptions.GenericError("no answer, max_retries: 0")
        return ask() if outcome == "repeated" else answer


class _World(NamedTuple):
    gate: _Gate
    root: str

    def new_process(self) -> None:
        """What is not written down is forgotten; the writers so far are dead."""
        for one in heartbeat._alive.all():
            one.stopped = True
        self.gate.reset({})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[_World]:
    gate = _Gate()
    monkeypatch.setattr(bucket.Bucket, "_obstore", gate)
    monkeypatch.setattr(bucket, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(heartbeat, "_begin", lambda one: None)  # no renewals between the requests that are counted
    buckets = ObjectStore()
    buckets.add("states://tests", obstore.store.MemoryStore())
    buckets._buckets["states://tests"]._honours = True
    with stores.using(buckets, "states"):
        yield _World(gate, "states://tests")


def _save(path: str) -> None:
    tr.save(path, _NEW)


def _overwrite(path: str) -> None:
    tr.save(path, _NEW, overwrite=True)


def _found(path: str) -> str:
    """Which of the two is there, whole and verified."""
    try:
        array = tr.restore(path)["w"]
    except NotFoundError:
        return "none"
    names = [name for name, tree in {"old": _OLD, "new": _NEW}.items() if np.array_equal(array, tree["w"])]
    return names[0]


def _plans(count: int, requests: int, seed: int) -> Iterator[dict[int, str]]:
    """Every single outcome of every request, then pairs and triples by chance."""
    singles = [{number: outcome} for number in range(requests) for outcome in _OUTCOMES]
    yield from singles
    chance = random.Random(seed)
    for _ in range(count - len(singles)):
        yield {chance.randrange(requests): chance.choice(_OUTCOMES) for _ in range(chance.choice((2, 2, 3)))}


@pytest.mark.slow
@pytest.mark.parametrize("operation", [_save, _overwrite])
def test_any_request_of_a_save(world: _World, operation: Callable[[str], None]) -> None:
    path = f"{world.root}/c"
    before = "old" if operation is _overwrite else "none"
    states = set()
    requests = 30
    for plan in _plans(_COUNT // 2, requests, seed=1):
        if before == "old":
            tr.save(path, _OLD)
        world.gate.reset(plan)
        error: BaseException | None = None
        try:
            operation(path)
        except (TreeringError, _KilledError) as raised:
            error = raised
        world.new_process()
        try:
            found = _found(path)
        except TreeringError as wrong:
            raise AssertionError(f"{plan}: {wrong}, after {error!r}") from wrong
        names = tuple(sorted(name.split("-")[0].split(".")[-1] for name in stores.of(path).list(path)))
        states.add((found, names))
        assert found == "new" if error is None else found in (before, "new"), (plan, error, found)
        if found == "new" and len(plan) == 1 and error is not None:
            assert "killed" in next(iter(plan.values())), (plan, error)
        tr.save(path, _OLD, overwrite=True)  # the next one removes all that is left
        assert _found(path) == "old" and len(stores.of(path).list(path)) == 2, (plan, stores.of(path).list(path))
        _remove(path)
    assert len(states) > 3


def _remove(path: str) -> None:
    store = stores.of(path)
    store.delete_all(path, store.list(path))


@pytest.mark.slow
def test_any_request_of_a_run(world: _World) -> None:
    """Steps that are saved, deleted by `keep` and gone back from: each that is there is whole, and the newest is."""
    for n, plan in enumerate(_plans(_COUNT // 2, 120, seed=2)):
        run = f"{world.root}/{n}"
        saved: list[int] = []
        world.gate.reset(plan)
        try:
            with tr.Checkpointer(run, keep=tr.keep.last(2)) as ckpts:
                for step in range(1, 6):
                    ckpts.save(step, {"w": np.full(9, step)})
                    ckpts.wait()
                    saved.append(step)
                saved.remove(5)  # from here on it may be there or not
                ckpts.rewind(4)
        except (TreeringError, _KilledError, OSError):
            pass
        world.new_process()
        steps = tr.steps(run)
        for step in steps:
            assert np.array_equal(tr.restore(run, step=step)["w"], np.full(9, step)), (plan, steps)
        assert not saved or (steps and max(steps) >= max(saved)), (plan, saved, steps)
        with tr.Checkpointer(run, keep=tr.keep.last(2)) as ckpts:
            ckpts.save(9, {"w": np.full(9, 9)})
        assert tr.steps(run)[-1] == 9 and "writer.lock" not in stores.of(run).list(run)
        for name in stores.of(run).list(run):
            if name.startswith("step-"):
                assert len(stores.of(run).list(f"{run}/{name}")) == 2, (plan, stores.of(run).list(f"{run}/{name}"))


@pytest.mark.slow
def test_any_request_of_a_copy(world: _World, tmp_path: pathlib.Path) -> None:
    """Steps that are copied from a local disk, overwritten and deleted by `keep`; the next job of that disk goes on."""
    states = set()
    for n, plan in enumerate(_plans(_COUNT // 2, 100, seed=3)):
        far, near = f"{world.root}/{n}", str(tmp_path / str(n))
        saved: dict[int, int] = {}
        world.gate.reset(plan)
        try:
            with tr.Checkpointer(far, local=near, keep=tr.keep.last(2)) as ckpts:
                for step, value in ((1, 1), (2, 2), (3, 3), (3, 30)):
                    ckpts.save(step, {"w": np.full(9, value)}, on_exists="overwrite")
                    ckpts.wait()
                    saved[step] = value
            copied = True
        except (TreeringError, _KilledError, OSError):
            copied = False
        world.new_process()
        for step in tr.steps(far):
            found = tr.restore(far, step=step)["w"]
            assert any(np.array_equal(found, np.full(9, value)) for value in (step, 10 * step)), (plan, step)
        states.add((copied, *tr.steps(far), *tr.steps(near)))
        after = tr.Checkpointer(far, local=near, keep=tr.keep.last(2))
        if saved:
            assert np.array_equal(after.restore()["w"], np.full(9, saved[max(saved)])), (plan, saved)
        if copied:
            assert tr.steps(far) == [2, 3] and np.array_equal(tr.restore(far)["w"], np.full(9, 30)), plan
        with after:
            after.save(9, {"w": np.full(9, 9)})
        assert tr.steps(far)[-2:] == [*sorted(saved)[-1:], 9][-2:], (plan, saved, tr.steps(far))
        if saved:
            assert np.array_equal(tr.restore(far, step=max(saved))["w"], np.full(9, saved[max(saved)])), plan
        assert set(stores.of(far).list(far)) == {"origin", *(f"step-{step:08}" for step in tr.steps(far))}, plan
        for step in tr.steps(far):
            assert len(stores.of(far).list(f"{far}/step-{step:08}")) == 2, plan
    assert len(states) > 5
