"""Compares a run with a model of it: after any operations in any order, both have the same steps."""

import contextlib
import dataclasses
import logging
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import treering as tr
from treering import stores
from treering.testing._doubles import FailingDisk, QuickDisk

KEEP = tr.keep.last(2) | tr.keep.best(1, "loss", "min") | tr.keep.every(5)


@dataclasses.dataclass
class Step:
    version: int
    loss: float
    pinned: bool = False
    damaged: bool = False


class Run(RuleBasedStateMachine):
    ckpts: Any

    def __init__(self) -> None:
        super().__init__()
        stores.register(stores.Filesystem(QuickDisk()))
        self.place = pathlib.Path(tempfile.mkdtemp())
        self.model: dict[int, Step] = {}
        self.versions = 0
        self.ckpts = None
        self.restart()

    @rule()
    def restart(self) -> None:
        if self.ckpts:
            with contextlib.suppress(tr.errors.SaveError):
                self.ckpts.close()
        self.gone_back = False  # True after a restore of an earlier step: the next save archives the later steps
        self.ckpts = tr.Checkpointer(self.place / "run", keep=KEEP)
        self.restored: int | None = None
        self.aside: set[int] = set()
        self.marked: set[int] = set()  # steps known to be damaged, because they were read

    @rule(ahead=st.integers(1, 3), loss=st.integers(0, 9), wait=st.booleans())
    def save(self, ahead: int, loss: int, wait: bool) -> None:
        pending = self.ckpts.save(*self._next(ahead, loss), metrics={"loss": loss})
        if wait and pending:
            pending.result()
        self._saved(loss)

    @precondition(lambda self: any(not step.pinned for step in self.model.values()))
    @rule(data=st.data(), loss=st.integers(0, 9))
    def overwrite(self, data: st.DataObject, loss: int) -> None:
        step = data.draw(st.sampled_from(sorted(n for n, step in self.model.items() if not step.pinned)))
        self.ckpts.wait()
        number, tree = self._next(0, loss, step)
        self.ckpts.save(number, tree, metrics={"loss": loss}, on_exists="overwrite")
        self._saved(loss)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), wanted=st.booleans())
    def pin(self, data: st.DataObject, wanted: bool) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.ckpts.wait()
        (self.ckpts.pin if wanted else self.ckpts.unpin)(step)
        self.model[step].pinned = wanted

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[step].pinned:
            with pytest.raises(tr.errors.MismatchError, match="pinned"):
                self.ckpts.delete(step)
        else:
            self.ckpts.delete(step)
            del self.model[step]

    @precondition(lambda self: any(not step.damaged for step in self.model.values()))
    @rule(data=st.data(), where=st.sampled_from(["arrays-*", "treering.json"]))
    def damage(self, data: st.DataObject, where: str) -> None:
        self.ckpts.wait()
        step = data.draw(st.sampled_from(sorted(n for n, step in self.model.items() if not step.damaged)))
        (file,) = (self.place / "run" / f"step-{step:08}").glob(where)
        contents = bytearray(file.read_bytes())
        contents[data.draw(st.integers(0, len(contents) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        file.chmod(0o644)
        file.write_bytes(contents)
        self.model[step].damaged = True
        if where == "treering.json":
            self.marked.add(step)

    @rule()
    def restore(self) -> None:
        good = [step for step, one in self.model.items() if not one.damaged]
        if not good:
            with pytest.raises(tr.errors.CorruptError if self.model else tr.errors.NotFoundError):
                self.ckpts.restore()
            self.marked |= set(self.model)
            return
        found = self.ckpts.restore()
        self._assert_version(found, self.model[max(good)].version)
        assert self.ckpts.restored_step == max(good)
        self.restored, self.gone_back = max(good), False
        self.aside = {step for step in self.model if step > self.restored}
        self.marked |= self.aside

    @precondition(lambda self: any(not step.damaged for step in self.model.values()))
    @rule(data=st.data())
    def restore_one(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[step].damaged:
            with pytest.raises(tr.errors.CorruptError):
                self.ckpts.restore(step=step)
            self.marked.add(step)
        else:
            self._assert_version(self.ckpts.restore(step=step), self.model[step].version)
            self.restored, self.gone_back = step, True

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.ckpts.rewind(step)
        self.model = {n: one for n, one in self.model.items() if n <= step}
        self.gone_back = False

    @precondition(lambda self: not self.gone_back)
    @rule(at=st.integers(1, 60), ahead=st.integers(1, 3), loss=st.integers(0, 9))
    def crash(self, at: int, ahead: int, loss: int) -> None:
        """From some operation on, no write reaches the disk. Then another job continues the run."""
        self.ckpts.wait()
        step, tree = self._next(ahead, loss)
        before = dict(self.model)
        stores.register(stores.Filesystem(FailingDisk(at, lasting=True)))
        try:
            pending = self.ckpts.save(step, tree, metrics={"loss": loss})
            assert pending
            pending.result()
        except tr.errors.SaveError:
            pass
        finally:
            stores.register(stores.Filesystem(QuickDisk()))
        found = tr.steps(self.place / "run")
        if step in found:
            self._saved(loss)
        assert set(self.model) <= set(found) <= {*before, *self.model}  # some steps may not be deleted yet
        self.model = {n: self.model.get(n) or before[n] for n in found}
        self.restart()

    @invariant()
    def the_steps_are_those_of_the_model(self) -> None:
        self.ckpts.wait()
        assert self.ckpts.steps == tr.steps(self.place / "run") == sorted(self.model)
        for step, expected in self.model.items():
            path = self.place / "run" / f"step-{step:08}"
            assert tr.verify(path).ok == (not expected.damaged)
            assert (path / "pinned").exists() == expected.pinned
            if not expected.damaged:
                self._assert_version(tr.restore(path), expected.version)
                assert tr.open(path).metrics == {"loss": expected.loss}

    def teardown(self) -> None:
        self.ckpts.close()
        shutil.rmtree(self.place)

    def _next(self, ahead: int, loss: int, step: int | None = None) -> tuple[int, Any]:
        self.versions += 1
        self.step = max(self.model, default=0) + ahead if step is None else step
        return self.step, {"x": np.full(50, self.versions), "n": self.versions}

    def _first_of_fives(self, steps: list[int]) -> set[int]:
        return {step for n, step in enumerate(steps) if not n or step // 5 > steps[n - 1] // 5}

    def _saved(self, loss: float) -> None:
        """Updates the model after a save: keeps the new step, other wanted steps, and steps that retention ignores."""
        if self.gone_back:
            self.model = {n: one for n, one in self.model.items() if n <= self.restored}
            self.gone_back = False
        self.model[self.step] = Step(self.versions, loss)
        self.aside.discard(self.step)
        self.marked.discard(self.step)
        counted = sorted(step for step in self.model if step not in self.aside | self.marked)
        best = min(counted, key=lambda step: (self.model[step].loss, -step))
        wanted = {*counted[-2:], best, self.step, self.restored, *self._first_of_fives(counted)}
        for step in counted:
            if step not in wanted and not self.model[step].pinned:
                del self.model[step]

    def _assert_version(self, found: Any, version: int) -> None:
        assert found["n"] == version and found["x"].tolist() == [version] * 50


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    stores.register(stores.Filesystem(stores.get("")))
    monkeypatch.setattr(logging.getLogger("treering"), "disabled", True)


Run.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True)
TestRun = pytest.mark.slow(Run.TestCase)
