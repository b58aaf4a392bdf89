"""Tests of `save_on_error`: a loop raises or is interrupted, and its newest state is saved if it still exists."""

import gc
import inspect
import logging
import pathlib
import signal
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from jobs import run_job
from treering.errors import UnsupportedError
from treering.stores.posix import Disk

from .test_checkpointer import Full


def advance(state: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, state)


def stop_at(run: pathlib.Path, last: int, error: BaseException, state: Any = None, **options: Any) -> None:
    """Runs a loop that saves every 100 steps and raises in the step after `last`."""
    with tr.Checkpointer(run, save_every=100, save_on_error=True, **options) as ckpts:
        state = {"w": jnp.zeros(3), "n": 0} if state is None else state
        for step in range(1, 1000):
            if step > last:
                raise error
            state = advance(state)
            ckpts.save(step, state, metrics={"loss": 1 / step}, metadata={"step": step})


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), SystemExit(3), StopIteration()], ids=repr)
def test_save_on_error_saves_state_and_reraises(
    tmp_path: pathlib.Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The state before an error is saved, and the error is still raised."""
    with pytest.raises(type(error)) as raised:
        stop_at(tmp_path, 7, error, metadata={"lr": 0.1})
    assert raised.value is error and raised.value.__context__ is None
    ckpt = tr.open(tmp_path)
    assert tr.steps(tmp_path) == [7] and ckpt.metrics == {"loss": 1 / 7} and ckpt.metadata == {"lr": 0.1, "step": 7}
    assert ckpt["n"] == 7 and (np.asarray(ckpt["w"]) == 7).all()
    assert f"step 7 is saved, because {type(error).__name__} ended the loop" in caplog.text


def test_without_the_option_nothing_is_saved_or_held(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=100) as ckpts:
        ckpts.save(1, {"w": jnp.zeros(3)})
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == []


def test_save_on_error_saves_nothing_more_without_an_error(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path, save_every=2, save_on_error=True) as ckpts:
        for step in range(6):
            ckpts.save(step, {"n": step})
    assert tr.steps(tmp_path) == [0, 2, 4]


def test_save_on_error_replaces_existing_step_on_request(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last save replaces an existing step only with `on_exists="overwrite"`."""
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=2, save_on_error=True) as ckpts:
        state = jnp.zeros(3)
        ckpts.save(2, state)
        state = donating(state)
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == [2] and not caplog.records
    said = {
        "error": "step 2 is not saved, though ZeroDivisionError ended the loop: ",
        "skip": "step 2 is not saved, though ZeroDivisionError ended the loop: it exists",
        "overwrite": "step 2 is saved, because ZeroDivisionError ended the loop",
    }
    for on_exists in ("error", "skip", "overwrite"):
        with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=100, save_on_error=True) as ckpts:
            ckpts.save(2, state, on_exists=on_exists)  # another state, which is not due
            raise ZeroDivisionError
        (record,) = caplog.records
        assert said[on_exists] in record.message
        assert (tr.restore(tmp_path) == (on_exists == "overwrite")).all()
        caplog.clear()


def test_all_that_a_call_says_is_remembered(tmp_path: pathlib.Path) -> None:
    rules = [tr.rules.drop("b")]
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=100, save_on_error=True) as ckpts:
        state = {"a": jnp.ones(2), "b": jnp.ones(2)}
        ckpts.save(2, state, rules=rules, dtype="bfloat16", metadata={"x": 1}, memory_limit=1, metrics={"loss": 1})
        rules.clear()
        raise ZeroDivisionError
    ckpt = tr.open(tmp_path)
    assert list(ckpt) == ["a"] and ckpt["a"].dtype == "bfloat16" and ckpt.metadata == {"x": 1}
    from treering._run.last_state import StepOptions

    assert {*StepOptions._fields, "step", "tree", "force"} == set(inspect.signature(ckpts.save).parameters)


def test_metrics_are_saved_as_they_were_at_the_call(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=100, save_on_error=True) as ckpts:
        state, loss, gone, nan = {"w": jnp.ones(2)}, np.zeros(()), jnp.ones(()), jnp.full((), jnp.nan)
        before = jnp.ones(()) * 2
        before.delete()
        metrics = {"loss": loss, "gone": gone, "before": before, "jax": jnp.ones(()) * 3, "text": "x", "nan": nan}
        ckpts.save(7, state, metrics=metrics)
        loss[...] = 99
        gone.delete()
        metrics["jax"] = 99
        del metrics["nan"]
        raise ZeroDivisionError
    found = tr.open(tmp_path).metrics
    assert np.isnan(found.pop("nan")) and found == {"loss": 0.0, "jax": 3.0}
    for name in ("gone", "before", "text"):
        assert f"the metric {name!r} is left out" in caplog.text


@pytest.mark.long
def test_donated_arrays_are_not_saved_and_the_log_says_so(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    donating = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=100, save_on_error=True) as ckpts:
        state = {"key": jax.random.split(jax.random.key(0)), "w": jnp.zeros(3), "same": jnp.zeros(2)}
        ckpts.save(1, state)
        donating(state["w"])
        state["same"] = donating(state["same"])
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == []
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "step 1 is not saved, though ZeroDivisionError" in record.message
    assert "2 of its 3 arrays are gone: the loop has donated" in record.message


@pytest.mark.long
def test_no_array_lives_longer_for_it(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """`save_on_error` keeps no JAX array alive."""
    import weakref

    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=100, save_on_error=True) as ckpts:
        state = {"w": jnp.zeros(3) + 1, "layers": [jax.random.key(3)]}
        arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(state)]
        ckpts.save(1, state)
        del state
        gc.collect()
        assert [array() for array in arrays] == [None, None]
        raise ZeroDivisionError
    assert "2 of its 2 arrays are gone: the loop has donated" in caplog.text and tr.steps(tmp_path) == []


def test_save_on_error_keeps_only_the_newest_state(tmp_path: pathlib.Path) -> None:
    """The state of the newest call is saved; each call replaces the noted one."""
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=10, save_on_error=True) as ckpts:
        states = {step: {"n": jnp.full(2, step)} for step in (10, 11, 12)}
        for step, state in states.items():
            ckpts.save(step, state)
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == [10, 12] and (tr.restore(tmp_path)["n"] == 12).all()


class Counter:
    """A data iterator."""

    def __init__(self) -> None:
        self.n = 0

    def __next__(self) -> int:
        self.n += 1
        return self.n

    def get_state(self) -> dict[str, int]:
        return {"n": self.n}

    def set_state(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_what_changes_in_place_is_saved_as_it_was_at_the_call(tmp_path: pathlib.Path) -> None:
    data, buffer, metadata = Counter(), np.arange(3), {"list": [1]}
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=100, save_on_error=True) as ckpts:
        next(data)
        state = {"data": data, "buffer": buffer, "tied": buffer, "scalar": np.float32(2), "text": "a", "none": None}
        ckpts.save(1, state, metadata=metadata)
        next(data)
        buffer += 100
        metadata["list"].append(2)
        state["more"] = "not there at the call"
        raise ZeroDivisionError
    fresh = Counter()
    found = tr.restore(tmp_path, {**{name: state[name] for name in list(state)[:-1]}, "data": fresh})
    assert fresh.n == 1 and (found["buffer"] == [0, 1, 2]).all() and "more" not in tr.open(tmp_path)
    assert tr.open(tmp_path).metadata == {"list": [1]}
    tr.save(tmp_path / "directly", {**state, "data": fresh, "buffer": (b := np.arange(3)), "tied": b})
    assert not tr.diff(tmp_path / "step-00000001", tr.open(tmp_path / "directly").apply([tr.rules.drop("more")]))


def test_save_on_error_copies_or_omits_metadata(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last save has the metadata of the call. Metadata that cannot be saved is left out and logged."""
    frozen = types.MappingProxyType({"path": tmp_path})
    for run, metadata, found in (("a", frozen, {"path": str(tmp_path)}), ("b", {1}, None)):
        options: Any = {"save_every": 9, "save_on_error": True}
        with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path / run, **options) as ckpts:
            ckpts.save(1, {"n": 1}, metadata=metadata)
            raise ZeroDivisionError
        assert tr.restore(tmp_path / run) == {"n": 1} and tr.open(tmp_path / run).metadata == found
    assert "step 1: its metadata is left out: metadata: a set is not JSON" in caplog.text


def test_save_on_error_of_module_updated_in_place(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A module that the loop has updated in place is not saved under the step of an earlier call."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path / "a", save_every=9, save_on_error=True) as ckpts:
        ckpts.save(1, {"model": model, "n": 1})
        raise ZeroDivisionError
    tr.save(tmp_path / "b", {"model": model, "n": 1})
    assert not tr.diff(tmp_path / "a", tmp_path / "b")
    assert list(tr.open(tmp_path / "a")) == list(tr.open(tmp_path / "b")) == ["model/bias", "model/kernel", "n"]
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path / "c", save_every=9, save_on_error=True) as ckpts:
        ckpts.save(1, {"model": model, "n": 1})
        model.kernel[...] = model.kernel[...] + 1
        raise ZeroDivisionError
    assert tr.steps(tmp_path / "c") == [] and "the loop has changed or dropped its NNX objects since" in caplog.text


@pytest.mark.parametrize("back", ["rewind", "restore", "restore_or_init", "delete"])
def test_a_state_that_was_left_behind_is_not_saved(tmp_path: pathlib.Path, back: str) -> None:
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=10, save_on_error=True) as ckpts:
        state = {"n": jnp.zeros(2)}
        ckpts.save(10, state)
        if back != "delete":
            ckpts.save(15, state)
        ckpts.wait()
        {
            "rewind": lambda: ckpts.rewind(10),
            "restore": lambda: ckpts.restore(step=10),
            "restore_or_init": lambda: ckpts.restore_or_init(lambda: state),
            "delete": lambda: ckpts.delete(10),
        }[back]()
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == ([] if back == "delete" else [10])


def test_save_on_error_on_new_branch_archives_the_old_one(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path) as ckpts:
        for step in (10, 20, 30):
            ckpts.save(step, {"n": np.array(step)})
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=10, save_on_error=True) as ckpts:
        ckpts.restore(step=10)
        ckpts.save(15, {"n": np.array(15)})
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == [10, 15] and tr.steps(tmp_path / "rewound-1") == [20, 30]


def test_save_on_error_after_a_failed_save(
    tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failed save, an error of the loop saves the newest state once more."""
    use_disk(Full())
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_on_error=True) as ckpts:
        state = {"n": jnp.ones(2)}
        pending = ckpts.save(1, state)
        assert pending
        pending._finished.wait()
        use_disk(Disk())
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == [1] and "No space left" in caplog.text
    use_disk(Full())
    caplog.clear()
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_on_error=True) as ckpts:
        ckpts.save(2, state)
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == [1] and "step 2 is not saved" in caplog.text and "No space left" in caplog.text


def test_what_cannot_be_saved_hides_no_error(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    for tree in ({"x": object()}, {1: 0, "a": 0}, {"x": jax.ShapeDtypeStruct((), "int32")}):
        with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=9, save_on_error=True) as ckpts:
            ckpts.save(1, tree)
            raise ZeroDivisionError
        assert "step 1 is not saved" in caplog.text and tr.steps(tmp_path) == []
        caplog.clear()
    with pytest.raises(UnsupportedError), tr.Checkpointer(tmp_path, save_every=2, save_on_error=True) as ckpts:
        state = {"x": jnp.zeros(3)}
        ckpts.save(1, state)
        ckpts.save(2, {**state, "y": object()})
    assert tr.steps(tmp_path) == [] and "step 2 is not saved" in caplog.text


def test_a_closed_run_is_not_written(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path, save_every=9, save_on_error=True) as ckpts:
        state = {"x": jnp.zeros(3)}
        ckpts.save(1, state)
        ckpts.close()
        raise ZeroDivisionError
    assert tr.steps(tmp_path) == [] and "this Checkpointer is closed" in caplog.text


def test_second_interrupt_ends_last_save_and_releases_run(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """A second interrupt cancels the last save and releases the lease."""

    class Interrupting(Disk):
        def preallocate(self, fd: int, size: int) -> None:
            signal.pthread_kill(main, signal.SIGINT)
            super().preallocate(fd, size)

    import threading

    main = threading.main_thread().ident
    assert main is not None
    use_disk(Interrupting())
    with pytest.raises(KeyboardInterrupt) as raised:
        stop_at(tmp_path, 7, ZeroDivisionError())
    assert isinstance(raised.value.__context__, ZeroDivisionError)
    use_disk(Disk())
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(8, {"x": 1})
    assert tr.steps(tmp_path)[-1] == 8


def test_interrupt_while_remembering_keeps_previous_state(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an interrupt comes while a state is noted, the state of the previous call is saved."""

    def interrupt(leaf: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tr.Checkpointer(tmp_path, save_every=9, save_on_error=True) as ckpts:
        first = {"a": jnp.ones(2), "data": Counter()}
        ckpts.save(1, first)
        with monkeypatch.context() as patch:
            patch.setattr("treering._pytree.iterators.freeze", interrupt)
            ckpts.save(2, {"a": jnp.ones(2) + 1, "data": Counter()})
    assert tr.steps(tmp_path) == [1] and (tr.restore(tmp_path, {"a": first["a"], "data": ...})["a"] == 1).all()


@pytest.mark.slow
def test_ctrl_c_of_a_real_loop(tmp_path: pathlib.Path) -> None:
    code = f"""
import time, jax, jax.numpy as jnp, treering as tr
step_fn = jax.jit(lambda s: {{"n": s["n"] + 1, "w": s["w"] * 1.5}})
with tr.Checkpointer({str(tmp_path)!r}, save_every=10**9, save_on_error=True) as ckpts:
    state, step = ckpts.restore_or_init(lambda: {{"n": jnp.zeros((), int), "w": jnp.ones(1000)}})
    while True:
        step += 1
        state = step_fn(state)
        ckpts.save(step, state)
        print(step, flush=True)
        time.sleep(0.05)
"""
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
            assert process.stdout and process.stderr
            for _ in range(3):
                process.stdout.readline()
            process.send_signal(signal.SIGINT)
            errors = process.stderr.read()
            assert process.wait() == -signal.SIGINT and "KeyboardInterrupt" in errors, errors
    steps = tr.steps(tmp_path)
    assert len(steps) == 2 and steps[1] >= steps[0] + 3 and tr.restore(tmp_path)["n"] == steps[1]


@pytest.mark.slow
def test_several_processes_save_together_or_not_at_all(tmp_path: pathlib.Path) -> None:
    body = """
import logging
lines = []
class Lines(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("treering").addHandler(Lines())
def loop(run, last):
    with tr.Checkpointer(tmp / run, save_every=100, save_on_error=True, timeout=3) as ckpts:
        for step in range(1, 10):
            state = {"w": put(np.full(8, step, np.float32), P("x")), "n": step}
            ckpts.save(step, state)
            if step == last:
                raise ZeroDivisionError
together = caught(lambda: loop("together", 5))
sync("together")
alone = caught(lambda: loop("alone", 5 if INDEX == 1 else 99))
sync("alone")
separate = caught(lambda: loop("separate", 5 + INDEX))
report([together, alone, separate, [tr.steps(tmp / run) for run in ("together", "alone", "separate")], lines])
"""
    for index, result in enumerate(run_job(tmp_path, body, processes=2)):
        together, alone, separate, steps, lines = result.report
        assert together == separate == ["ZeroDivisionError", ""] and alone == (together if index else None)
        assert steps == [[5], [], []]
        failed = [line for line in lines if "is not saved" in line]
        assert len(failed) == 1 + index and all("nothing heard" in line or "process" in line for line in failed)
