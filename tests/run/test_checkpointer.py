"""Tests of the Checkpointer in a training loop: what it keeps, when it saves, failures, and resuming."""

import argparse
import collections
import datetime
import errno
import gc
import logging
import math
import os
import pathlib
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from helpers import assert_same
from treering import stores
from treering._run import resume, step_fallback
from treering._run import step_catalog as _steps
from treering._run.plain_run import PlainRun
from treering.errors import CorruptError, ExistsError, MismatchError, NotFoundError, SaveError, UnsupportedError
from treering.formats.treering import summary
from treering.stores.posix import Disk


def damage(run: pathlib.Path, step: int, what: str) -> None:
    folder = run / f"step-{step:08}"
    file = folder / "treering.json" if what == "manifest" else next(folder.glob("*.safetensors"))
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-100 if what == "manifest" else -1] ^= 1
    file.write_bytes(data[:-1] if what == "truncated" else data)


def loop(run: pathlib.Path, steps: Any, keep: Any = None, metrics: Any = None, **options: Any) -> list[int]:
    with tr.Checkpointer(run, keep=keep, **options) as ckpts:
        for step in steps:
            ckpts.save(step, {"x": np.full(3, step)}, metrics=metrics and metrics(step))
        ckpts.wait()
        return ckpts.steps


# Kept steps: the sequences that users of other libraries rely on


def test_last_two_of_five(tmp_path: pathlib.Path) -> None:
    assert loop(tmp_path, range(5), tr.keep.last(2)) == [3, 4]


def test_every_fourth_and_the_last_two(tmp_path: pathlib.Path) -> None:
    assert loop(tmp_path, range(11), tr.keep.every(4) | tr.keep.last(2), save_every=2) == [0, 4, 8, 10]


def test_the_best_two_and_every_third(tmp_path: pathlib.Path) -> None:
    keep = tr.keep.best(2, "acc", "max") | tr.keep.every(3)
    assert loop(tmp_path, range(9), keep, lambda step: {"acc": step / 10}) == [0, 3, 6, 7, 8]
    assert loop(tmp_path, [9], keep, lambda step: {"acc": step / 10}) == [0, 3, 6, 8, 9]


def test_steps_without_the_metric_are_kept_or_not(tmp_path: pathlib.Path) -> None:
    scores = {43: 0.6, 44: 0.5, 45: 0.4}

    def metrics(step: int) -> Any:
        return {"acc": scores[step]} if step in scores else None

    assert loop(tmp_path, range(41, 46), tr.keep.best(1, "acc", "max"), metrics) == [41, 42, 43, 45]
    dropping = tr.keep.best(1, "acc", "max", unscored="drop")
    assert loop(tmp_path, [46], dropping, metrics) == [43, 46]
    late = tr.keep.best(3, "acc", "max", unscored="drop")
    assert loop(tmp_path / "late", range(5), late) == [2, 3, 4], "the evaluator has not begun"


def test_steps_are_saved_at_multiples_and_when_forced(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path, save_every=2) as ckpts:
        saved = [ckpts.save(step, {"x": step}) is not None for step in range(5)]
        ckpts.save(5, {"x": 5}, force=True)
        ckpts.wait()
        assert saved == [True, False, True, False, True]
        assert ckpts.steps == [0, 2, 4, 5] and ckpts.latest_step == 5


def test_a_nan_is_never_best(tmp_path: pathlib.Path) -> None:
    losses = {1: 0.5, 2: float("nan"), 3: 0.7}
    assert loop(tmp_path, losses, tr.keep.best(1, "loss", "min"), lambda s: {"loss": losses[s]}) == [1, 3]
    ckpts = tr.Checkpointer(tmp_path)
    assert ckpts.best_step("loss", "min") == 1 and ckpts.best_step("loss", "max") == 3
    with pytest.raises(MismatchError, match="metric='other': expected one that a step has, found loss"):
        ckpts.best_step("other", "max")
    with pytest.raises(MismatchError, match="mode"):
        ckpts.best_step("loss", "maximum")  # type: ignore[arg-type]
    assert tr.Checkpointer(tmp_path / "none").best_step("loss", "min") is None
    only = tmp_path / "only"
    loop(only, [1], metrics=lambda s: {"loss": float("nan")})
    assert tr.Checkpointer(only).best_step("loss", "min") is None


def test_what_was_just_saved_is_kept_even_when_it_is_an_old_step(tmp_path: pathlib.Path) -> None:
    """Retention keeps the step that was just saved, even if later steps exist."""
    loop(tmp_path, [5, 6])
    assert loop(tmp_path, [2], tr.keep.last(1)) == [2, 6]


def test_nested_metrics_are_answered_with_a_name(tmp_path: pathlib.Path) -> None:
    ckpts = tr.Checkpointer(tmp_path)
    with pytest.raises(MismatchError, match=r"metrics\['val'\]: .*, found \{'loss': 1.0\}; write 'val/loss': …"):
        ckpts.save(1, {"x": 1}, metrics={"val": {"loss": 1.0}})


def test_a_metric_that_no_step_has_is_named_seldom(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = tr.keep.best(1, "val_loss", "min") | tr.keep.best(1, "acc", "max") | tr.keep.last(1)
    loop(tmp_path / "a", range(5), keep, lambda step: {"val/loss": 1.0, "acc": 0.5})
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split("none of the ")[1].split()[0] for text in warnings] == ["2", "4"]
    assert all("val_loss" in text and "the closest name is val/loss" in text for text in warnings)
    caplog.clear()
    loop(tmp_path / "b", range(5), keep, lambda step: {"val_loss": 1.0, "acc": 0.5} if step == 1 else {})
    loop(tmp_path / "b", [5], keep)
    loop(tmp_path / "c", [1], keep)
    assert not caplog.records, "a step has the metric, or there is only one step"
    for steps in (7, 9):  # The metrics may come with the first evaluation, but not after the end.
        loop(tmp_path / f"{steps}", range(steps), tr.keep.best(5, "acc", "max", unscored="drop"))
        (text,) = caplog.messages
        assert "no metrics" in text
        caplog.clear()


def test_a_mode_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1, 2], metrics=lambda step: {"loss": step})
    with pytest.raises(MismatchError, match="expected the mode 'min' or 'max', found 'lowest'"):
        tr.Checkpointer(tmp_path).best_step("loss", "lowest")  # type: ignore[arg-type]


@pytest.mark.long
def test_the_last_by_time(tmp_path: pathlib.Path) -> None:
    keep = tr.keep.last(datetime.timedelta(seconds=1))
    assert loop(tmp_path, [1, 2], keep) == [1, 2]
    time.sleep(1.2)
    assert loop(tmp_path, [3, 4], keep) == [3, 4]


def test_pinned_steps_are_never_deleted(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, range(3))
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(1)) as ckpts:
        ckpts.pin(0)
        ckpts.pin(0)
        ckpts.save(3, {"x": 3})
        ckpts.wait()
        assert ckpts.steps == [0, 3] and ckpts.pinned == [0]
        with pytest.raises(MismatchError, match="pinned; unpin it first"):
            ckpts.delete(0)
        ckpts.unpin(0)
        ckpts.unpin(0)
        ckpts.delete(0)
        assert ckpts.steps == [3]
        for call in (ckpts.pin, ckpts.unpin, ckpts.delete, ckpts.open):
            with pytest.raises(NotFoundError, match="expected step 0, found 3"):
                call(0)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003"]


@pytest.mark.long
def test_a_step_that_is_still_being_saved_can_be_pinned(tmp_path: pathlib.Path, use_disk: Any) -> None:
    class Late(Disk):
        def link(self, old: str, new: str) -> None:
            time.sleep(0.2)
            super().link(old, new)

    use_disk(Late())
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(1)) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"x": step})
            ckpts.pin(step)
        ckpts.save(3, {"x": 3})
        ckpts.unpin(2)
        assert ckpts.pinned == [1]


def test_foreign_files_and_other_prefixes_are_left_alone(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1, 2], prefix="ema-")
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    assert loop(tmp_path, [2, 3], tr.keep.last(1)) == [3]
    assert sorted(os.listdir(tmp_path)) == ["ema-00000001", "ema-00000002", "step-00000001", "step-00000003"]
    with pytest.raises(ExistsError, match=r"notes\.txt"):
        loop(tmp_path, [1])


# Times of saves


def test_save_every_may_be_a_function_or_a_time(tmp_path: pathlib.Path) -> None:
    assert loop(tmp_path / "a", range(6), save_every=lambda step: step in (1, 4)) == [1, 4]
    assert loop(tmp_path / "b", range(6), save_every=datetime.timedelta(hours=1)) == []
    assert loop(tmp_path / "c", range(3), save_every=datetime.timedelta(0)) == [0, 1, 2]


@pytest.mark.long
def test_save_every_may_be_steps_or_a_time_whichever_comes_first(tmp_path: pathlib.Path) -> None:
    assert loop(tmp_path / "a", range(6), save_every=(2, datetime.timedelta(hours=1))) == [0, 2, 4]
    with tr.Checkpointer(tmp_path / "b", save_every=(100, datetime.timedelta(seconds=0.5))) as ckpts:
        begun = time.monotonic()
        saved = [step for step in range(101, 131) if not time.sleep(0.05) and ckpts.save(step, {"x": step})]
        assert 1 <= len(saved) <= (time.monotonic() - begun) / 0.5


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize(("hours", "saved"), [(2, [2]), (0.5, []), (-48, [])])
def test_a_time_counts_from_the_last_commit_of_an_earlier_job(
    tmp_path: pathlib.Path, monkeypatch: Any, restores: bool, hours: float, saved: list[int]
) -> None:
    """Jobs that are shorter than the interval save too, once each, and not before the interval has passed."""
    looks: list[object] = []
    real = resume.seconds_since_commit
    monkeypatch.setattr(resume, "seconds_since_commit", lambda directory: (looks.append(1), real(directory))[1])
    run = tmp_path / "remote"
    loop(run, [1])
    then = time.time() - 3600 * hours
    os.utime(run / "step-00000001" / "treering.json", (then, then))
    hour = datetime.timedelta(hours=1)
    for n, options in enumerate([{"save_every": (1000, hour), "local": tmp_path / "local"}, {"save_every": hour}]):
        looks.clear()
        with tr.Checkpointer(run, **options) as ckpts:
            if restores:
                ckpts.restore()
            assert [step for step in range(2, 6) if ckpts.save(step, {"x": step})] == ([] if n else saved)
        assert len(looks) == 1


def test_a_step_that_exists_is_an_error_or_skipped_or_replaced(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, {"x": 1})
        for _ in range(2):  # while it is being saved, and when it is committed
            with pytest.raises(ExistsError, match="step 1 is saved already"):
                ckpts.save(1, {"x": 2})
            assert ckpts.save(1, {"x": 2}, on_exists="skip") is None
            ckpts.wait()
        assert ckpts.restore() == {"x": 1}
        ckpts.save(1, {"x": 3}, on_exists="overwrite")
        assert ckpts.restore() == {"x": 3}
        ckpts.save(2, {"x": 4})
        ckpts.save(2, {"x": 5}, on_exists="overwrite")
        assert ckpts.restore() == {"x": 5}


def test_what_is_recorded_with_each_step(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path, metadata={"lr": 0.1}) as ckpts:
        ckpts.save(3, {"x": 1}, metrics={"loss": jnp.float32(0.25), "acc": np.float64(0.5), "n": 3})
        ckpt = ckpts.open()
        assert (ckpt.step, ckpt.metadata, ckpt.metrics) == (3, {"lr": 0.1}, {"loss": 0.25, "acc": 0.5, "n": 3.0})
        assert ckpt.path == ckpts.path(3) == str(tmp_path / "step-00000003")


@pytest.mark.parametrize(
    ("run", "step", "found"),
    [
        ({"lr": 0.1, "seed": 1}, {"seed": 2, "epoch": 3}, {"lr": 0.1, "seed": 2, "epoch": 3}),
        ({"model": {"width": 8, "depth": 2}}, {"model": {"width": 16}}, {"model": {"width": 16}}),
        ({"lr": 0.1}, None, {"lr": 0.1}),
        ({"lr": 0.1}, {}, {"lr": 0.1}),
        (None, {"epoch": 3}, {"epoch": 3}),
        ({"lr": 0.1}, "third", "third"),
        ("gpt", {"epoch": 3}, {"epoch": 3}),
        (["gpt"], 0, 0),
        ({"clip": math.inf}, {"floor": -math.inf}, {"clip": math.inf, "floor": -math.inf}),
        ({"lr": 0.1}, collections.OrderedDict(epoch=np.int64(3)), {"lr": 0.1, "epoch": 3}),
    ],
)
def test_metadata_of_a_step_goes_over_that_of_the_run(tmp_path: pathlib.Path, run: Any, step: Any, found: Any) -> None:
    with tr.Checkpointer(tmp_path, metadata=run) as ckpts:
        ckpts.save(1, {"x": 1}, metadata=step)
        ckpts.save(2, {"x": 1})
        assert ckpts.open(1).metadata == found and ckpts.open(2).metadata == run


def test_metadata_that_is_not_json_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match=r"metadata\['f'\]: a function is not JSON"):
        tr.Checkpointer(tmp_path, metadata={"f": lambda: 1})
    with tr.Checkpointer(tmp_path, metadata={"lr": 0.1}) as ckpts:
        with pytest.raises(UnsupportedError, match=r"metadata\['epoch'\]: a complex is not JSON"):
            ckpts.save(1, {"x": 1}, metadata={"epoch": 1j})
        with pytest.raises(UnsupportedError, match=r"Namespace is not JSON; pass dicts, .* vars"):
            ckpts.save(1, {"x": 1}, metadata=argparse.Namespace(epoch=3))
        assert ckpts.steps == [] and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"save_every": 0}, "save_every=0"),
        ({"save_every": datetime.timedelta(-1)}, "save_every="),
        ({"save_every": (10,)}, "save_every="),
        ({"save_every": (0, datetime.timedelta(1))}, "save_every="),
        ({"save_every": (datetime.timedelta(1), 10)}, "save_every="),
        ({"save_every": (10, 20)}, "save_every="),
        ({"save_every": "sometimes"}, "save_every='sometimes'"),
        ({"keep": 3}, r"keep=3: expected a policy such as treering.keep.last\(3\)"),
        ({"prefix": "a/b"}, "prefix"),
        ({"prefix": "run2"}, "prefix"),
    ],
)
def test_wrong_arguments(tmp_path: pathlib.Path, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(MismatchError, match=error):
        tr.Checkpointer(tmp_path, **arguments)


def test_wrong_steps_and_modes(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path) as ckpts:
        for step in (-1, 1.0, "1", None):
            with pytest.raises(MismatchError, match="step="):
                ckpts.save(step, {"x": 1})  # type: ignore[arg-type]
        with pytest.raises(MismatchError, match="on_exists='replace'"):
            ckpts.save(1, {"x": 1}, on_exists="replace")  # type: ignore[arg-type]
        ckpts.save(jnp.int32(1), {"x": 1})  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="closed"):
        ckpts.save(2, {"x": 1})
    assert ckpts.restore() == {"x": 1}


def test_when_a_checkpoint_was_committed(tmp_path: pathlib.Path) -> None:
    begun = datetime.datetime.now(datetime.UTC)
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, {"x": np.ones(3)})
        created = ckpts.open().created
    assert created and created.utcoffset() == datetime.timedelta(0)
    assert begun <= created <= datetime.datetime.now(datetime.UTC)
    ckpt = ckpts.open()
    assert ckpt.at("x").created == ckpt.apply([tr.rules.cast("x", "float32")]).created == created
    tr.save(tmp_path / "a.safetensors", ckpt)
    assert tr.open(tmp_path / "a.safetensors").created is None, "the file does not record it"
    file = tmp_path / "step-00000001" / "treering.json"
    for text, found in [(b"1999-12-31T23:00:00-02:00", datetime.datetime(2000, 1, 1, 1)), (b"yesterday", None)]:
        file.chmod(0o644)
        seal(file, re.findall(rb'"created":"([^"]*)"', file.read_bytes())[0], text)
        if found:
            assert ckpts.open().created == found.replace(tzinfo=datetime.UTC)
        else:
            with pytest.raises(UnsupportedError, match="'yesterday' is not a time"):
                tr.open(file.parent)


def test_whether_a_save_is_under_way_and_where(tmp_path: pathlib.Path, use_disk: Any, monkeypatch: Any) -> None:
    """`is_saving` is True while a save runs; `directory` stays absolute after a change of the working directory."""

    class Held(Disk):
        gate = threading.Event()

        def preallocate(self, fd: int, size: int) -> None:
            assert self.gate.wait(30)
            super().preallocate(fd, size)

    use_disk(Held())
    monkeypatch.chdir(tmp_path)
    ckpts = tr.Checkpointer("run")
    monkeypatch.chdir("/")
    assert ckpts.directory == str(tmp_path / "run") and not ckpts.is_saving
    pending = ckpts.save(1, {"x": np.ones(3)})
    assert pending and ckpts.is_saving
    Held.gate.set()
    pending.result()
    assert not ckpts.is_saving and os.path.dirname(ckpts.path(1)) == ckpts.directory
    ckpts.close()


def test_making_one_touches_nothing(tmp_path: pathlib.Path) -> None:
    ckpts = tr.Checkpointer(tmp_path / "run")
    assert ckpts.steps == [] and ckpts.latest_step is None and ckpts.restored_step is None
    with pytest.raises(NotFoundError, match="expected a step, found none"):
        ckpts.restore()
    ckpts.close()
    assert os.listdir(tmp_path) == []


# Failures in the background


class Full(Disk):
    def write(self, fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["save", "wait", "close", "exit", "restore"])
def test_a_failed_save_raises_at_the_next_call(tmp_path: pathlib.Path, use_disk: Any, call: str) -> None:
    use_disk(Full())
    ckpts = tr.Checkpointer(tmp_path)
    pending = ckpts.save(1, {"x": np.ones(3)})
    assert pending is not None
    pending._finished.wait()
    with pytest.raises(SaveError, match="No space left"):
        if call == "save":
            ckpts.save(2, {"x": 1})
        elif call == "exit":
            with ckpts:
                pass
        else:
            getattr(ckpts, call)()
    stores.register(stores.Filesystem(Disk()))
    ckpts.wait()
    assert ckpts.steps == []


@pytest.mark.parametrize("call", ["save", "delete", "wait", "close", "restore", "pin", "rewind"])
def test_failure_raised_by_result_is_not_raised_again(tmp_path: pathlib.Path, use_disk: Any, call: str) -> None:
    """If the result of a save has raised its error, the next call does not raise it again, and does its work."""
    with tr.Checkpointer(tmp_path) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"n": step})
        ckpts.wait()
        use_disk(Full())  # for a moment
        pending = ckpts.save(3, {"n": 3})
        assert pending is not None
        with pytest.raises(SaveError, match="No space left"):
            pending.result()
        use_disk(Disk())
        if call == "save":
            assert ckpts.save(4, {"n": 4}) is not None
        elif call in ("delete", "pin", "rewind"):
            getattr(ckpts, call)(1)
        else:
            getattr(ckpts, call)()
    expected = {"save": [1, 2, 4], "delete": [2], "rewind": [1]}
    assert ckpts.steps == expected.get(call, [1, 2])


def test_a_failed_save_does_not_hide_the_error_of_the_loop(
    tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    use_disk(Full())
    with pytest.raises(ZeroDivisionError), tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, {"x": np.ones(3)})
        raise ZeroDivisionError
    assert "No space left" in caplog.text


def test_a_failed_deletion_does_not_fail_the_save(
    tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Sticky(Disk):
        def unlink(self, path: str) -> None:
            if path.endswith("step-00000001/treering.json"):
                raise OSError(errno.EIO, "Input/output error")
            super().unlink(path)

    use_disk(Sticky())
    assert loop(tmp_path, [1, 2, 3], tr.keep.last(1))[-1] == 3
    assert "deleting step 1 failed" in caplog.text
    stores.register(stores.Filesystem(Disk()))
    assert loop(tmp_path, [4], tr.keep.last(1)) == [4]


def test_one_step_that_cannot_be_deleted_stops_no_other(
    tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Sticky(Disk):
        def unlink(self, path: str) -> None:
            if "step-00000002" in path:
                raise OSError(errno.EBUSY, "Device or resource busy", path)
            super().unlink(path)

    use_disk(Sticky())
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(2)) as ckpts:
        for step in range(1, 9):
            ckpts.save(step, {"x": np.full(3, step)})
    assert ckpts.steps == [2, 7, 8]
    assert caplog.text.count("deleting step 2 failed; it is tried again") == 5
    assert len(list(tmp_path.iterdir())) == 3, "and no file of the other steps is left"


def test_a_slow_hook_holds_up_no_deletion(tmp_path: pathlib.Path) -> None:
    go_on, received = threading.Event(), []

    def slow(report: tr.SaveReport) -> None:
        go_on.wait(60)
        received.append(report.step)

    def on_disk() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("step-*"))

    with tr.Checkpointer(tmp_path, keep=tr.keep.last(1), on_save=slow) as ckpts:
        for step in range(1, 11):
            ckpts.save(step, {"x": np.full(3, step)})
        ckpts.wait()
        until = time.monotonic() + 30
        while len(on_disk()) > 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert on_disk() == ["step-00000010"] and received == []
        go_on.set()
    assert received == list(range(1, 11)), "the hook is called for all before it is closed"


# Resuming


def init() -> Any:
    return {"w": jnp.ones((2, 3)), "step": 0, "act": jax.nn.relu, "key": jax.random.key(1), "none": None}


def test_restore_or_init_begins_and_goes_on(tmp_path: pathlib.Path) -> None:
    calls: list[bool] = []

    def counted() -> Any:
        state = init()
        calls.append(isinstance(state["w"], jax.core.Tracer))
        return state

    with tr.Checkpointer(tmp_path) as ckpts:
        state, step = ckpts.restore_or_init(counted)
        assert step == 0 and calls == [False, True] and ckpts.restored_step is None
        calls.clear()
        ckpts.save(4, state | {"w": state["w"] * 2, "step": 4})
    with tr.Checkpointer(tmp_path) as ckpts:
        state, step = ckpts.restore_or_init(counted)
        assert calls == [True]
        assert step == 4 == ckpts.restored_step == state["step"]
        assert state["act"] is jax.nn.relu and state["none"] is None and float(state["w"][0, 0]) == 2.0
        assert state["key"] == jax.random.key(1)


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_an_init_that_cannot_be_traced_is_called(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, sharded: bool
) -> None:
    where = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))

    def init() -> Any:
        w = jnp.arange(8.0)
        return {"w": w, "scale": float(w.sum()), "host": np.asarray(w), "key": jax.random.key(int(w[3]))}

    options = {"sharding": lambda path, shape, dtype: where if path == "w" else None} if sharded else {}
    with caplog.at_level("INFO"), tr.Checkpointer(tmp_path) as ckpts:
        first, step = ckpts.restore_or_init(init, **options)
        assert step == 0 and "init cannot be traced" in caplog.text
        ckpts.save(1, {**first, "w": first["w"] + 1})
    caplog.clear()
    with tr.Checkpointer(tmp_path) as ckpts:
        state, step = ckpts.restore_or_init(init, **options)
    assert step == 1 and caplog.text.count("init cannot be traced, so it is called") == 1
    assert "ConcretizationTypeError" in caplog.text or "TracerArrayConversionError" in caplog.text
    assert_same({**state, "w": state["w"] - 1}, first)
    assert state["w"].committed is sharded and (not sharded or state["w"].sharding == where)


def test_init_whose_trace_differs_is_refused_by_first_job(tmp_path: pathlib.Path) -> None:
    """The first job already refuses an `init` whose trace gives another tree than its call."""

    def init() -> Any:
        w = jnp.ones(3)
        return {"w": w, "n": 1} if isinstance(w, jax.core.Tracer) else {"w": jnp.ones((3, 2)), "n": 1.5, "more": w}

    with tr.Checkpointer(tmp_path) as ckpts, pytest.raises(MismatchError) as error:
        ckpts.restore_or_init(init)
    for line in (
        "w: float32[3, 2] of JAX when called, float32[3] of JAX when traced",
        "n: float when called, int when",
    ):
        assert line in str(error.value)
    assert "more: float32[3] of JAX when called, nothing when traced" in str(error.value)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("run", "treering"),
        ("run", "orbax"),
        ("run/streaming_params", "fjformer"),
        ("run", "flax"),
        ("run/checkpoint", "t5x"),
    ],
)
def test_a_directory_that_is_one_checkpoint_is_no_run(tmp_path: pathlib.Path, name: str, format: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    tr.save(tmp_path / "saved", {"w": np.ones(3, np.float32)}, format=format)
    saved = tmp_path / "saved"
    (saved / "checkpoint" if format == "t5x" else saved).rename(tmp_path / name)
    ckpts = tr.Checkpointer(tmp_path / "run")
    with pytest.raises(MismatchError, match=rf"run: expected a run, found a checkpoint of the format '{format}'"):
        ckpts.restore_or_init(init)


@pytest.mark.parametrize("weights", ["model.safetensors", "flax_model.msgpack"])
def test_run_may_begin_in_the_folder_of_its_weights(tmp_path: pathlib.Path, weights: str) -> None:
    tr.save(tmp_path / "real" / weights, {"w": np.ones(3, np.float32)})
    (tmp_path / "run").symlink_to(tmp_path / "real")
    for run, step in (("run", 0), ("real", 1)):
        with tr.Checkpointer(tmp_path / run) as ckpts:
            assert ckpts.restore_or_init(init)[1] == step
            ckpts.save(step + 1, init())
    assert tr.steps(tmp_path / "run") == [1, 2]


def test_run_that_begins_among_other_checkpoints_logs_them(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def begin() -> None:
        with tr.Checkpointer(tmp_path, prefix="b-") as ckpts:
            assert ckpts.restore_or_init(init)[1] == 0

    loop(tmp_path, [1], prefix="a-")
    for name in ("config.json", "notes_1", "model.msgpack"):
        (tmp_path / name).write_bytes(b"\x81\xa1w\x01" if name.endswith("msgpack") else b"?")
    begin()
    assert "starts over, but a-00000001 is in it; pass prefix='a-' to continue from there\n" in caplog.text
    for name in ("gen_1", "dis_1", "checkpoint_0.5"):
        (tmp_path / name).write_bytes(b"\x81\xa1w\x01")
    begin()
    assert "from there; there are checkpoints in it that are not steps: checkpoint_0.5, dis_1, gen_1\n" in caplog.text


def test_restore_or_init_puts_arrays_where_they_belong(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.NamedSharding(mesh, jax.P("x"))

    def wide() -> Any:
        return {"w": jnp.arange(16.0), "n": 3, "key": jax.random.key(0)}

    where = {"w": spread, "n": None, "key": None}
    with tr.Checkpointer(tmp_path) as ckpts:
        for _ in range(2):  # initialized, then restored
            state, step = ckpts.restore_or_init(wide, sharding=where)
            assert state["w"].sharding == spread and state["n"] == 3
            assert state["w"].tolist() == list(range(16))
            if not step:
                ckpts.save(1, state)


@pytest.mark.parametrize("what", ["manifest", "bytes", "truncated"])
def test_a_damaged_newest_step_is_reported_skipped_and_replaced(
    tmp_path: pathlib.Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop(tmp_path, [1, 2, 3])
    damage(tmp_path, 3, what)
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(2)) as ckpts:
        with caplog.at_level(logging.ERROR, "treering"):
            state = ckpts.restore({"x": np.zeros(3, int)})
        assert "step 3 is damaged" in caplog.text
        assert state["x"][0] == 2 == ckpts.restored_step
        with pytest.raises(CorruptError):
            ckpts.restore(step=3)
        ckpts.save(3, {"x": np.full(3, 33)})
        assert ckpts.restore()["x"][0] == 33
        assert ckpts.steps == [2, 3]
    assert tr.verify(tmp_path).ok


def test_a_damaged_step_is_replaced_without_having_been_restored(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1])
    damage(tmp_path, 1, "truncated")
    assert loop(tmp_path, [1]) == [1]
    assert tr.verify(tmp_path).ok


def test_damaged_steps_do_not_count(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, range(4))
    damage(tmp_path, 3, "manifest")
    assert loop(tmp_path, [4], tr.keep.last(2)) == [2, 3, 4]


def test_a_wrong_template_is_no_reason_to_fall_back(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1, 2])
    with pytest.raises(MismatchError):
        tr.Checkpointer(tmp_path).restore({"y": 1})


def test_run_with_only_damaged_steps_does_not_start_over(tmp_path: pathlib.Path) -> None:
    """A run with only damaged steps raises an error instead of starting over."""
    loop(tmp_path, [1, 2])
    for step in (1, 2):
        damage(tmp_path, step, "bytes")
    ckpts = tr.Checkpointer(tmp_path)
    with pytest.raises(CorruptError, match="step-00000002"):
        ckpts.restore_or_init(lambda: {"x": np.zeros(3, int)})
    with pytest.raises(CorruptError):
        ckpts.restore(fallback=False)


def test_leftovers_of_killed_writer_are_ignored_and_removed(tmp_path: pathlib.Path) -> None:
    """The next job removes the leftovers of a killed writer. Readers ignore them."""
    loop(tmp_path, [1])
    new, old = tmp_path / "step-00000002", tmp_path / "step-00000001"
    new.mkdir()
    for folder in (new, old):
        (folder / "arrays-abcdef-00000-of-00001.safetensors").write_bytes(b"half")
        (folder / "treering.json.abcdef.tmp").write_bytes(b"{")
    (tmp_path / "step-00000003").mkdir()
    assert tr.steps(tmp_path) == [1] and tr.open(tmp_path).step == 1
    ckpts = tr.Checkpointer(tmp_path)
    assert ckpts.latest_step == 1 and (new / "treering.json.abcdef.tmp").exists()
    with ckpts:
        ckpts.save(4, {"x": 1})
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000004"]
    assert len(os.listdir(old)) == 2


def test_names_that_lead_out_of_the_directory_are_never_followed(tmp_path: pathlib.Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for step, name in ((1, str(precious)), (2, "../../precious")):
        loop(tmp_path / "run", [step])
        file = tmp_path / "run" / f"step-0000000{step}" / "treering.json"
        body = file.read_bytes()
        start = body.index(b'"name":"') + 8
        seal(file, body[start : body.index(b'"', start)], name.encode())
        with pytest.raises(UnsupportedError, match="not the name of a file next to"):
            tr.open(file.parent)
        loop(tmp_path / "run", [step + 5], tr.keep.last(1))
        with pytest.raises(UnsupportedError, match="not the name of a file next to"):
            tr.Checkpointer(tmp_path / "run").delete(step)
        assert precious.read_text() == "mine" and file.exists()


def test_what_is_a_step_and_what_is_not(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    loop(tmp_path, [3])
    names = [
        "foo7",
        "9",
        "x12",
        "STEP-00000008",
        "step-1e00000",
        "step-٣",
        "ema-00000004",
        "step-5",
        "step-" + "9" * 17,
    ]
    for name in names:
        shutil.copytree(tmp_path / "step-00000003", tmp_path / name)
    (tmp_path / "step-00000010" / "treering.json").mkdir(parents=True)
    (tmp_path / "step-00000011").mkdir()
    (tmp_path / "step-00000011" / "treering.json").touch()  # A save never leaves an empty manifest: it is damage.
    assert tr.steps(tmp_path) == tr.Checkpointer(tmp_path).steps == [3, 5, 11]
    assert tr.Checkpointer(tmp_path, prefix="ema-").steps == [4]
    with pytest.raises(CorruptError):
        tr.restore(tmp_path, step=11)
    assert tr.restore(tmp_path)["x"][0] == 3
    assert tr.Checkpointer(tmp_path).best_step("loss", "min") is None
    assert "step 11 is damaged and is ignored: " in caplog.text


def test_without_a_prefix_the_only_one_there_counts(tmp_path: pathlib.Path) -> None:
    """Without `prefix=`, the only prefix in the folder is used; several prefixes are an error."""
    loop(tmp_path, [1, 2], prefix="ema-")
    shutil.copytree(tmp_path / "ema-00000001", tmp_path / "foo7")
    assert tr.steps(tmp_path) == [1, 2] and tr.open(tmp_path).path.endswith("ema-00000002")
    loop(tmp_path, [3], prefix="best-")
    for use in (tr.steps, tr.open, tr.restore, tr.verify, lambda run: next(tr.follow(run, timeout=0))):
        with pytest.raises(MismatchError, match=r"prefixes: best-, ema-; open .*, or pass prefix= to Checkp"):
            use(tmp_path)
    loop(tmp_path, [4])
    assert tr.steps(tmp_path) == [4]


def test_a_copied_step_counts_as_what_its_name_says(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copied step has the number in its new name, not the number that it was saved with."""
    loop(tmp_path, [1])
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")
    assert tr.steps(tmp_path) == [1, 2] and caplog.text == ""
    assert tr.restore(tmp_path)["x"][0] == 1
    assert "step-00000002 is step 2, as its name says, but was saved as step 1" in caplog.text
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.restore()
        assert ckpts.restored_step == ckpts.open().step == ckpts.open(2).step == 2
    assert tr.open(tmp_path).step == tr.open(tmp_path, step=2).step == 2 and tr.open(tmp_path, step=1).step == 1
    assert tr.open(tmp_path / "step-00000002").step == 1  # by its own path it is not a step of a run
    for ckpt in tr.follow(tmp_path, timeout=0):  # the loop of an evaluator
        tr.record(tmp_path, ckpt.step, {"loss": float(os.path.basename(ckpt.path)[-1])})
    assert [tr.open(tmp_path, step=step).metrics["loss"] for step in (1, 2)] == [1, 2]
    tr.convert(tmp_path, tmp_path / "converted")
    assert tr.open(tmp_path / "converted").step == 2


def test_steps_are_numbers_that_every_reader_can_take(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [2**53])
    assert tr.open(tmp_path).step == 2**53
    for use in (lambda: loop(tmp_path, [2**53 + 1]), lambda: tr.save(tmp_path / "c", 1, step=2**53 + 1)):
        with pytest.raises(MismatchError, match=r"expected an integer from 0 to 2\^53"):
            use()


def test_steps_that_are_links_are_read_and_never_deleted(tmp_path: pathlib.Path) -> None:
    loop(tmp_path / "archive", [2])
    loop(tmp_path / "run", [1])
    (tmp_path / "run" / "step-00000002").symlink_to(tmp_path / "archive" / "step-00000002")
    with tr.Checkpointer(tmp_path / "run", keep=tr.keep.last(1)) as ckpts:
        assert ckpts.restore()["x"][0] == 2
        ckpts.save(3, {"x": 3})
        ckpts.save(4, {"x": 4})
        with pytest.raises(MismatchError, match="found a link"):
            ckpts.delete(2)
    assert tr.steps(tmp_path / "run") == [2, 4] and tr.verify(tmp_path / "archive" / "step-00000002").ok


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: pathlib.Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    loop(tmp_path / "run", [1])
    (tmp_path / "run" / "writer.lock").symlink_to(precious)
    with pytest.raises(SaveError, match=r"writer\.lock"):
        tr.Checkpointer(tmp_path / "run").save(2, {"x": 2})
    assert precious.read_text() == "mine" and tr.steps(tmp_path / "run") == [1]


def test_damage_next_door_does_not_fail_a_save(tmp_path: pathlib.Path) -> None:
    """A damaged step does not fail the save of another step."""
    loop(tmp_path, [1])
    file = tmp_path / "step-00000001" / "treering.json"
    for old, new in [(b'"created":"2', b'"created":"x'), (b'"version":1', b'"version":7')]:
        seal(file, old, new)
        step = max(tr.steps(tmp_path)) + 1
        assert loop(tmp_path, [step], tr.keep.last(1)) == [1, step]


def test_a_step_that_another_job_repaired_is_good_again(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1, 2])
    damage(tmp_path, 2, "bytes")
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.restore()
        assert ckpts.restored_step == 1
        tr.save(ckpts.path(2), {"x": np.full(3, 22)}, overwrite=True, step=2)
        with pytest.raises(ExistsError):
            ckpts.save(2, {"x": 3})
        assert ckpts.restore()["x"][0] == 22


def test_step_replaced_during_check_is_not_damaged(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """A step that is replaced between two reads is read again, and not considered damaged."""

    class Replaced(Disk):
        again = True

        def stat(self, path: str) -> os.stat_result | None:
            if self.again and path.endswith(".safetensors"):  # the manifest has been read
                self.again = False
                tr.save(os.path.dirname(path), {"x": np.zeros(5)}, overwrite=True)
            return super().stat(path)

    tr.save(tmp_path / "step-00000001", {"x": np.ones(3)})
    use_disk(Replaced())
    ckpts = tr.Checkpointer(tmp_path)
    assert list(ckpts.disk_usage) == []
    assert list(ckpts.disk_usage) == [1]
    with ckpts, pytest.raises(ExistsError, match="step 1 is saved already"):
        ckpts.save(1, {"x": np.ones(3)})


def test_nothing_is_remembered_of_deleted_steps(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of verdicts forgets deleted steps."""
    monkeypatch.setattr(_steps, "_MTIME_SETTLE_SECONDS", 0.0)
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(1)) as ckpts:
        for step in range(5):
            ckpts.save(step, {"x": step})
        ckpts.wait()
        assert list(ckpts.disk_usage) == list(ckpts._directory.steps._cached_status) == [4]


@pytest.fixture
def evaluated(tmp_path: pathlib.Path) -> Iterator[tr.Checkpointer]:
    """A job that remembers old steps and keeps the best two. None of them has the metric yet."""
    with tr.Checkpointer(tmp_path, keep=tr.keep.best(2, "loss", "min")) as ckpts:
        for step in range(1, 6):
            ckpts.save(step, {"x": step})
        ckpts.wait()
        for step in ckpts.steps:
            os.utime(ckpts.path(step), (0, 0))
        assert list(ckpts.disk_usage) == [1, 2, 3, 4, 5]
        yield ckpts


def evaluate_elsewhere(run: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records metrics as another process does: the job is not notified."""
    with monkeypatch.context() as patch:
        patch.setattr(summary, "listeners", [])
        for step in (1, 2, 3):
            tr.record(run, step, {"loss": float(step)})


def test_late_metrics_count_although_steps_are_remembered(
    tmp_path: pathlib.Path, evaluated: tr.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tr.record(tmp_path, 4, {"loss": 4.0})
    evaluate_elsewhere(tmp_path, monkeypatch)
    evaluated.save(6, {"x": 6}).result()
    assert evaluated.steps == [1, 2, 5, 6]
    tr.record(tmp_path, 5, {"loss": 0.0})
    assert evaluated.steps == [1, 5, 6]


def train(run: pathlib.Path, steps: Iterable[int], keep: tr.keep.Policy | None) -> tr.Checkpointer:
    with tr.Checkpointer(run, keep=keep) as ckpts:
        for step in steps:
            ckpts.save(step, {"x": step})
    return ckpts


@pytest.mark.parametrize("newest", ["held", "collected", "has not saved", "has not saved, and is collected"])
def test_only_the_newest_policy_counts_late_metrics(tmp_path: pathlib.Path, newest: str) -> None:
    earlier = train(tmp_path, [1], tr.keep.best(2, "m", "max", unscored="drop"))
    held = [train(tmp_path, [42, 43, 44], None)]
    if "not saved" in newest:
        held = [tr.Checkpointer(tmp_path), earlier]
    if "collected" in newest:
        del held[0]
        gc.collect()
    for step in (42, 43, 44):
        tr.record(tmp_path, step, {"m": 1 / step})
    assert tr.steps(tmp_path) == [1, 42, 43, 44]


def test_late_metrics_count_at_the_end(
    tmp_path: pathlib.Path, evaluated: tr.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate_elsewhere(tmp_path, monkeypatch)
    evaluated.close()
    assert tr.steps(tmp_path) == [1, 2, 4, 5]


def test_names_without_a_step_do_not_disturb_retention(
    tmp_path: pathlib.Path, evaluated: tr.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-00000007").touch()
    (tmp_path / "step-00000008" / "treering.json").mkdir(parents=True)
    (tmp_path / "step-00000009").symlink_to("nowhere")
    evaluated.save(10, {"x": 10}, metrics={"loss": 1.0}).result()
    assert evaluated.steps == [1, 2, 3, 4, 5, 10] and not caplog.records


def test_a_step_of_flax_is_judged_by_the_names_around_it(tmp_path: pathlib.Path) -> None:
    """Flax's steps of fractions hide the others, unless the newest step is a whole number."""
    for name in ("3", "9", "7.5"):
        tr.save(tmp_path / f"checkpoint_{name}", {"x": np.zeros(2)}, format="flax")
    ckpts = tr.Checkpointer(tmp_path, prefix="checkpoint_")
    assert ckpts.steps == [3, 9] and ckpts.open(3).path.endswith("checkpoint_3")


def test_steps_that_are_files_need_no_tidying(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        tr.save(tmp_path / f"checkpoint_{step}", {"x": np.zeros(2)}, format="flax")
    with tr.Checkpointer(tmp_path, prefix="checkpoint_") as ckpts:
        ckpts.save(3, {"x": np.zeros(2)})
    assert tr.steps(tmp_path) == [1, 2, 3] and not [one for one in caplog.records if one.levelname == "WARNING"]


def test_the_newest_step_is_deleted_while_its_age_is_asked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop(tmp_path, [1, 2])
    newest_step = PlainRun.newest_step

    def delete_after(run: PlainRun) -> int | None:
        newest = newest_step(run)
        shutil.rmtree(tmp_path / "step-00000002")
        return newest

    monkeypatch.setattr(PlainRun, "newest_step", delete_after)
    with tr.Checkpointer(tmp_path, save_every=datetime.timedelta(hours=1)) as ckpts:
        assert ckpts.save(3, {"x": 3}) is None


def test_a_pinned_step_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1])
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.pin(1)
        with pytest.raises(ExistsError, match="pinned"):
            ckpts.save(1, {"x": 2}, on_exists="overwrite")


def test_restore_skips_step_deleted_meanwhile(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """If a step is deleted during a restore, the restore takes an earlier step."""
    loop(tmp_path, [1, 2])

    class Pruned(Disk):
        """Another job deletes the newest step just before its arrays are opened."""

        def open(self, path: str) -> int:
            if "step-00000002/arrays" in path:
                shutil.rmtree(tmp_path / "step-00000002")
            return super().open(path)

    use_disk(Pruned())
    ckpts = tr.Checkpointer(tmp_path)
    assert ckpts.restore()["x"][0] == 1 and ckpts.restored_step == 1
    assert tr.verify(tmp_path).ok


def test_two_kinds_of_steps_in_one_directory(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1, 2])
    loop(tmp_path, [2, 3], prefix="ema-")
    assert tr.steps(tmp_path) == tr.Checkpointer(tmp_path).steps == [1, 2]
    assert tr.open(tmp_path).path.endswith("step-00000002")
    assert tr.Checkpointer(tmp_path, prefix="ema-").open().path.endswith("ema-00000003")
    assert tr.Checkpointer(tmp_path).open().path.endswith("step-00000002")
    damage(tmp_path, 2, "bytes")
    assert [problem.file.split("/")[0] for problem in tr.verify(tmp_path).problems] == ["step-00000002"]


def test_restore_without_checkpointer_falls_back(tmp_path: pathlib.Path, caplog: Any) -> None:
    """`tr.restore` of a run also skips damaged steps."""
    loop(tmp_path, [1, 2])
    damage(tmp_path, 2, "bytes")
    assert tr.restore(tmp_path)["x"][0] == 1 and "step 2 is damaged" in caplog.text
    with pytest.raises(CorruptError):
        tr.restore(tmp_path, step=2)
    next((tmp_path / "step-00000002").glob("*.safetensors")).unlink()
    assert tr.open(tmp_path).step == 1


@pytest.mark.long
def test_fallback_frees_memory_of_damaged_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frees the damaged step first. Otherwise a model that fills the devices could not be restored."""
    for step in (1, 2):
        tr.save(tmp_path / f"step-0000000{step}", {"w": np.full(2 << 20, step, np.float32), "x": np.ones(9)}, step=step)
    damage(tmp_path, 2, "bytes")  # the bytes of `x`, which is read when `w` is already in JAX
    like = {"w": jax.ShapeDtypeStruct((2 << 20,), np.float32), "x": np.zeros(9)}
    gc.collect()  # of tests before this one
    opened, before, left = step_fallback.open_in_store, sum(one.nbytes for one in jax.live_arrays()), []

    def open_in_store(store: Any, path: str, *args: Any) -> Any:
        gc.collect()
        left.append(sum(one.nbytes for one in jax.live_arrays()) - before)
        return opened(store, path, *args)

    monkeypatch.setattr(step_fallback, "open_in_store", open_in_store)
    assert tr.restore(tmp_path, like, memory_limit=1 << 20, mmap=False)["w"][0] == 1
    assert left == [0, 0]


def test_failed_save_raises_only_in_its_checkpointer(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """Only the Checkpointer of a failed save raises its error; other calls on the run do not."""
    use_disk(Full())
    ckpts = tr.Checkpointer(tmp_path / "run")
    pending = ckpts.save(1, {"x": np.ones(3)})
    assert pending is not None
    pending._finished.wait()
    stores.register(stores.Filesystem(Disk()))
    tr.save(tmp_path / "other", {"x": 1})
    with pytest.raises(SaveError):
        ckpts.wait()
    ckpts.wait()


@pytest.mark.long
def test_a_thousand_steps_are_listed_once_per_operation(tmp_path: pathlib.Path, use_disk: Any) -> None:
    class Counting(Disk):
        stats = 0

        def stat(self, path: str) -> Any:
            Counting.stats += 1
            return super().stat(path)

    loop(tmp_path, range(100))
    use_disk(Counting())
    ckpts = tr.Checkpointer(tmp_path)
    for operation in (lambda: ckpts.best_step("loss", "min"), lambda: ckpts.path(3), ckpts.restore):
        Counting.stats = 0
        operation()
        assert Counting.stats <= 400


def seal(file: pathlib.Path, old: bytes, new: bytes) -> None:
    """Changes a manifest, and gives it a matching checksum."""
    body = file.read_bytes()[:-28].replace(old, new)
    file.chmod(0o644)
    file.write_bytes(body + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n')


def test_a_step_of_a_later_release_is_not_taken_for_damaged(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1, 2])
    file = tmp_path / "step-00000002" / "treering.json"
    seal(file, b'"version":1', b'"version":2')
    before = file.read_bytes()
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(1)) as ckpts:
        with pytest.raises(ExistsError, match="saved already"):
            ckpts.save(2, {"x": 3})
        with pytest.raises(UnsupportedError):
            ckpts.restore()
        ckpts.save(3, {"x": 3})
    assert file.read_bytes() == before


def test_a_pinned_step_that_is_damaged_is_not_replaced_either(tmp_path: pathlib.Path) -> None:
    loop(tmp_path, [1])
    tr.Checkpointer(tmp_path).pin(1)
    damage(tmp_path, 1, "truncated")
    with pytest.raises(ExistsError, match="pinned"):
        loop(tmp_path, [1])


def test_two_jobs_may_delete_the_same_step(tmp_path: pathlib.Path, use_disk: Any) -> None:
    loop(tmp_path, [1, 2])

    class Beaten(Disk):
        """Another job deletes the same step between two operations."""

        def unlink(self, path: str) -> None:
            if path.endswith("step-00000001/treering.json"):
                shutil.rmtree(tmp_path / "step-00000001")
            super().unlink(path)

    use_disk(Beaten())
    assert loop(tmp_path, [3], tr.keep.last(1)) == [3]


def test_restore_of_constantly_overwritten_newest_step(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """A restore takes the newest step even if another job overwrites it repeatedly."""
    loop(tmp_path, [1, 2])

    class Busy(Disk):
        """Another job overwrites the newest step twice while it is being opened."""

        times = 2

        def open(self, path: str) -> int:
            if "step-00000002/arrays" in path and self.times:
                self.times -= 1
                now = stores.get("")
                stores.register(stores.Filesystem(Disk()))
                tr.save(tmp_path / "step-00000002", {"x": np.full(3, 22)}, overwrite=True, step=2)
                stores.register(stores.Filesystem(now))
            return super().open(path)

    for use in (lambda: tr.restore(tmp_path), lambda: tr.Checkpointer(tmp_path).restore()):
        use_disk(Busy())
        assert use()["x"][0] == 22


def test_a_step_that_is_deleted_between_listing_and_opening(tmp_path: pathlib.Path, use_disk: Any) -> None:
    loop(tmp_path, [1])
    for step in (2, 3):
        loop(tmp_path, [step])

        class Gone(Disk):
            def open(self, path: str) -> int:
                newest = tmp_path / f"step-{max(tr.steps(tmp_path)):08}"
                if path == str(newest / "treering.json") and newest.name != "step-00000001":
                    shutil.rmtree(newest)
                return super().open(path)

        use_disk(Gone())
        assert (tr.restore(tmp_path) if step == 2 else tr.Checkpointer(tmp_path).restore())["x"][0] == 1
        stores.register(stores.Filesystem(Disk()))


def test_init_that_restores_is_traced_on_resume(tmp_path: pathlib.Path) -> None:
    """A resumed job can trace an `init` that itself restores a checkpoint."""
    tr.save(tmp_path / "base", {"w": np.ones(2, np.float32)})
    like = {"w": jax.ShapeDtypeStruct((2,), np.float32)}
    for job in range(2):
        with tr.Checkpointer(tmp_path / "run") as ckpts:
            state, step = ckpts.restore_or_init(lambda: tr.restore(tmp_path / "base", like))
            assert step == job and (np.asarray(state["w"]) == 1 + job).all()
            ckpts.save(step + 1, {"w": state["w"] + 1})
