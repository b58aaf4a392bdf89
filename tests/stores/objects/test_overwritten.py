"""Another job overwrites a checkpoint in a bucket while it is opened: the reader gets the old or the new one."""

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import obstore.store
import pytest

import treering as tr
from treering import stores
from treering.errors import CorruptError, NotFoundError
from treering.stores.objects import store as objects
from treering.stores.objects.bucket import Bucket

pytestmark = pytest.mark.long


def _tree(value: float, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}


_PAIRS = {
    "other names": (_tree(1, a=(4,), b=(2, 2)), _tree(2, a=(4,), c=(3,), d=(5,))),
    "other shapes": (_tree(1, a=(4,), b=(2, 2)), _tree(2, a=(4,), b=(3, 3))),
    "other values": (_tree(1, a=(4,), b=(2, 2)), _tree(2, a=(4,), b=(2, 2))),
    "more": (_tree(1, a=(4,)), _tree(2, a=(4,), b=(3, 3), c=(2,))),
}


class _Interruption:
    """Runs a function before the request of a given number, in whichever thread makes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._lock = threading.Lock()
        self._left, self._then = -1, lambda: None
        asked = Bucket.translate_errors

        @contextlib.contextmanager
        def interrupted(bucket: Bucket, key: str) -> Iterator[None]:
            with self._lock:
                self._left -= 1
                now = self._left == 0
            if now:
                other = threading.Thread(target=self._then)  # a thread has its own listing caches, as another job has
                other.start()
                other.join()
            with asked(bucket, key):
                yield

        monkeypatch.setattr(Bucket, "translate_errors", interrupted)

    def at(self, number: int, then: Callable[[], Any]) -> None:
        with self._lock:
            self._left, self._then = number, then

    @property
    def is_over(self) -> bool:
        return self._left <= 0


def _same(found: Any, tree: Any) -> bool:
    return found.keys() == tree.keys() and all(np.array_equal(found[name], tree[name]) for name in tree)


@pytest.mark.parametrize("listed", [5000, 0], ids=["all at once", "level by level"])
@pytest.mark.parametrize("pair", _PAIRS)
@pytest.mark.parametrize("format", ["treering", "safetensors", "orbax", "t5x", "levanter"])
def test_before_any_request_of_a_restore(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, format: str, pair: str, listed: int
) -> None:
    """A native checkpoint is never taken for damaged, and no format returns a mixture of both checkpoints."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(objects, "_MAX_CACHED_OBJECTS", listed)
    options: Any = {"max_shard_size": 20} if format == "safetensors" else {}
    old, new = _PAIRS[pair]
    interruption = _Interruption(monkeypatch)
    seen: set[str] = set()
    for number in itertools.count(1):
        path = f"{stores.absolute(obstore.store.MemoryStore())}/run/c"  # type: ignore[arg-type]
        tr.save(path, old, format=format, **options)
        interruption.at(number, lambda path=path: tr.save(path, new, format=format, overwrite=True, **options))
        try:
            found = tr.restore(path)
            seen.add("old" if _same(found, old) else "new" if _same(found, new) else f"{number}: {found}")
        except CorruptError as error:  # other formats do not overwrite a folder in one step
            seen.add(f"{number}: {error}" if format == "treering" else "an error")
        if not interruption.is_over:
            break
    assert {"old", "new"} <= seen <= {"old", "new", "an error"}


@pytest.mark.parametrize("listed", [5000, 0], ids=["all at once", "level by level"])
@pytest.mark.parametrize("format", ["treering", "safetensors", "t5x", "levanter"])
def test_save_before_any_request_of_a_restore(monkeypatch: pytest.MonkeyPatch, format: str, listed: int) -> None:
    """A checkpoint that is saved during a restore is found or not found.

    Answers from before and after are not combined.
    """
    monkeypatch.setattr(objects, "_MAX_CACHED_OBJECTS", listed)
    _, new = _PAIRS["more"]
    interruption = _Interruption(monkeypatch)
    seen: set[str] = set()
    for number in itertools.count(1):
        path = f"{stores.absolute(obstore.store.MemoryStore())}/run/c"  # type: ignore[arg-type]
        interruption.at(number, lambda path=path: tr.save(path, new, format=format))
        try:
            seen.add("new" if _same(tr.restore(path), new) else f"{number}: another")
        except NotFoundError as error:
            seen.add("nothing" if "found nothing" in str(error) else f"{number}: {error}")
        except CorruptError as error:  # other formats put the files of a folder one after another
            seen.add(f"{number}: {error}" if format in ("treering", "safetensors") else "an error")
        if not interruption.is_over:
            break
    assert number > 2 and {"new"} <= seen <= {"new", "nothing", "an error"}


def test_the_latest_step_of_a_run_is_not_taken_for_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwriting the latest step during a restore does not make it look damaged."""
    interruption = _Interruption(monkeypatch)
    for number in itertools.count(1):
        run = f"{stores.absolute(obstore.store.MemoryStore())}/run"  # type: ignore[arg-type]
        for step in (1, 2):
            tr.save(f"{run}/step-0000000{step}", {"a": step}, step=step)
        interruption.at(
            number, lambda run=run: tr.save(f"{run}/step-00000002", {"a": 3, "b": 4}, step=2, overwrite=True)
        )
        with tr.Checkpointer(run) as ckpts:
            assert ckpts.restore()["a"] in (2, 3)
            assert ckpts.steps == [1, 2]
        if not interruption.is_over:
            break
    assert number > 4


def test_what_is_overwritten_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification includes a step that is overwritten meanwhile."""
    interruption = _Interruption(monkeypatch)
    for number in itertools.count(1):
        run = f"{stores.absolute(obstore.store.MemoryStore())}/run"  # type: ignore[arg-type]
        for step in (1, 2):
            tr.save(f"{run}/step-0000000{step}", {"a": np.zeros(10_000)}, step=step)
        interruption.at(
            number, lambda run=run: tr.save(f"{run}/step-00000002", {"a": np.ones(10_000)}, step=2, overwrite=True)
        )
        report = tr.verify(run)
        assert report.ok and report.nbytes > 2 * 80_000, "no step is skipped"
        if not interruption.is_over:
            break
    assert number > 4
