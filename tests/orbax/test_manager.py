"""Tests of `treering.orbax.CheckpointManager`, with real Orbax as the other party."""

import datetime
import logging
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as real
import pytest
import xxhash

import treering as tr
import treering.orbax as ocp
from jobs import run_job
from treering import stores
from treering.errors import CorruptError, ExistsError, MismatchError, NotFoundError, UnsupportedError
from treering.formats.orbax.run import unpublish
from treering.orbax import policies, v1
from treering.orbax.options import preservation_policy
from treering.stores import file_io

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Options = ocp.CheckpointManagerOptions


def tree(step: float = 1) -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3) * step, "n": jnp.asarray(int(step), jnp.int32)}


def manager(path: Path, write: Any = None, **options: Any) -> Any:
    return ocp.CheckpointManager(path, options=Options(**options), write=write)


def save(ckpts: Any, *steps: int, **given: Any) -> list[bool]:
    return [ckpts.save(step, args=ocp.args.StandardSave(tree(step)), **given) for step in steps]


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.is_dir())


def same(found: Any, step: int) -> bool:
    expected = tree(step)
    return all((np.asarray(found[name]) == np.asarray(value)).all() for name, value in expected.items())


def _calls(library: Any, package: str, run: Path) -> int:
    """Returns the number of calls of functions of a package that making a manager, a save and a close take."""
    found = [0]

    def count(frame: FrameType, event: str, _: Any) -> None:
        is_ours = f"{os.sep}{package}{os.sep}" in frame.f_code.co_filename
        found[0] += event == "call" and is_ours and not frame.f_code.co_name.startswith("<")

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        with library.CheckpointManager(run) as ckpts:
            ckpts.save(0, args=library.args.StandardSave({str(n): jnp.ones(4) for n in range(6)}))
            ckpts.wait_until_finished()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found[0]


def test_a_save_takes_fewer_calls_than_in_orbax(tmp_path: Path) -> None:
    ours = [_calls(ocp, "treering", tmp_path / f"ours-{number}") for number in range(2)]
    theirs = [_calls(real, "orbax", tmp_path / f"theirs-{number}") for number in range(2)]
    assert ours[1] <= 0.6 * theirs[1]  # The first save of each imports modules.


# A run of both libraries


def _handler(library: Any) -> tuple[type, type]:
    """Returns the arguments to save and to restore the text of a handler of a program."""

    class Handler(library.CheckpointHandler):
        def save(self, directory: Any, args: Any) -> None:
            (directory / "text").write_text("own")

        def restore(self, directory: Any, args: Any = None) -> Any:
            return (directory / "text").read_text()

        def finalize(self, directory: Any) -> None: ...

        def close(self) -> None: ...

    class Save(library.args.CheckpointArgs): ...

    class Restore(library.args.CheckpointArgs): ...

    library.args.register_with_handler(Handler, for_save=True)(Save)
    library.args.register_with_handler(Handler, for_restore=True)(Restore)
    return Save, Restore


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("library", [ocp, real])
def test_a_step_of_only_a_handlers_files_counts_and_is_restored(
    tmp_path: Path, library: Any, several: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (saved, _), (_, restored) = _handler(library), _handler(ocp)
    given = {"write": "orbax"} if library is ocp else {}
    options = library.CheckpointManagerOptions(best_fn=lambda found: found["loss"])
    with library.CheckpointManager(tmp_path, options=options, **given) as ckpts:
        for step in (1, 2, 3):
            args = library.args.Composite(own=saved()) if several else saved()
            ckpts.save(step, args=args, metrics={"loss": float(step)})
    with manager(tmp_path, "orbax", best_fn=lambda found: -found["loss"], max_to_keep=2) as ours:
        assert ours.all_steps() == [1, 2, 3] and ours.best_step() == 1 and ours.metrics(2) == {"loss": 2.0}
        assert ours.metrics(9) is None  # as in Orbax
        if several:
            assert ours.restore(3, args=ocp.args.Composite(own=restored())) == {"own": "own"}
            assert dict(ours.item_metadata(3)) == {}
            with pytest.raises(UnsupportedError, match="or by its handler with treering"):
                ours.restore(3)
        else:
            assert ours.restore(3, args=restored()) == "own" and ours.item_metadata(3) is None
    # Treering itself reads none of it: opening says so in the log, and nothing else takes it for an empty tree.
    assert len(tr.open(tmp_path / "3")) == 0 and tr.open(tmp_path / "3").metrics == {"loss": 3.0}
    assert f"left out, because it cannot be read here: {'own' if several else 'default'} (files" in caplog.text
    for use in (tr.restore, tr.verify, lambda path: tr.convert(path, tmp_path / "to")):
        with pytest.raises(UnsupportedError, match="expected leaves that Treering can read, found only"):
            use(tmp_path / "3")
    with manager(tmp_path, "orbax", best_fn=lambda found: -found["loss"], max_to_keep=2) as ours:
        again = _handler(ocp)[0]
        ours.save(4, args=ocp.args.Composite(own=again()) if several else again(), metrics={"loss": 4.0})
        ours.wait_until_finished()
        assert ours.all_steps() == [1, 2, 4]


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_a_run_that_orbax_began_is_continued(tmp_path: Path, write: str) -> None:
    """Retention counts and deletes the steps of both, and both formats are restored."""
    with real.CheckpointManager(tmp_path, options=real.CheckpointManagerOptions(max_to_keep=3)) as theirs:
        for step in (0, 1, 2):
            theirs.save(step, args=real.args.StandardSave(tree(step)))
    with manager(tmp_path, write, max_to_keep=3) as ours:
        assert ours.all_steps() == [0, 1, 2] and ours.latest_step() == 2
        assert save(ours, 2, 3) == [False, True]
        ours.wait_until_finished()
        assert ours.all_steps() == [1, 2, 3] and names(tmp_path) == ["1", "2", "3"]
        for step in (1, 2, 3):
            assert same(ours.restore(step, args=ocp.args.StandardRestore(tree())), step)
        ours.delete(1)
        assert names(tmp_path) == ["2", "3"]
        assert tr.steps(tmp_path) == [2, 3] and tr.verify(tmp_path).ok


@pytest.mark.long
@pytest.mark.whole
def test_orbax_continues_a_run_that_was_written_in_its_format(tmp_path: Path) -> None:
    with manager(tmp_path, "orbax", best_fn=lambda metrics: metrics["acc"]) as ours:
        save(ours, 1, metrics={"acc": 0.5}, custom_metadata={"lr": 0.1})
        save(ours, 2, metrics={"acc": 0.25})
    options = real.CheckpointManagerOptions(best_fn=lambda metrics: metrics["acc"], max_to_keep=1)
    with real.CheckpointManager(tmp_path, options=options) as theirs:
        assert theirs.best_step() == 1 and theirs.metadata(1).custom_metadata == {"lr": 0.1}
        assert same(theirs.restore(2, args=real.args.StandardRestore(tree())), 2)
        theirs.save(3, args=real.args.StandardSave(tree(3)), metrics={"acc": 0.75})
        theirs.wait_until_finished()
        assert theirs.all_steps() == [3]


def test_items_in_the_format_of_orbax(tmp_path: Path) -> None:
    """Real Orbax restores a tree of numbers as a tree, values as JSON, and the files of a handler."""
    saved = ocp.args.Composite(state=ocp.args.StandardSave({"n": 3}), config=ocp.args.JsonSave([1, None, "a"]))
    with manager(tmp_path, "orbax") as ours:
        ours.save(7, args=saved)
    with real.CheckpointManager(tmp_path) as theirs:
        wanted = real.args.Composite(state=real.args.StandardRestore({"n": 0}), config=real.args.JsonRestore())
        found = theirs.restore(7, args=wanted)
    assert found.state == {"n": 3} and found.config == [1, None, "a"]
    with manager(tmp_path) as ours:
        assert ours.restore(7).config == [1, None, "a"]


def test_the_names_of_steps(tmp_path: Path) -> None:
    """The runs are ordinary runs of Treering, which needs no prefix for them."""
    for number, (options, name) in enumerate(
        [
            ({}, "12"),
            ({"step_prefix": "ckpt"}, "ckpt_12"),
            ({"step_prefix": "ckpt", "step_format_fixed_length": 4}, "ckpt_0012"),
            ({"step_name_format": real.path.step.standard_name_format(step_prefix="x")}, "x_12"),
        ]
    ):
        run = tmp_path / str(number) / "run"
        with manager(run, **options) as ours:
            save(ours, 12)
        assert names(run) == [name] and tr.steps(run) == [12] and same(tr.restore(run), 12)
        with manager(run, **options) as ours:
            assert ours.latest_step() == 12


# Saving


def test_a_step_that_exists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is passed over, which is logged once, or with `force` an error; nothing changes on the disk."""
    with manager(tmp_path) as ours:
        assert save(ours, 4, 4, 3, 2) == [True, False, False, False]
        assert sum("is not saved, because step 4 exists" in one.message for one in caplog.records) == 1
        for kind in (ValueError, ExistsError, ocp.checkpoint_manager.StepAlreadyExistsError):
            with pytest.raises(kind, match="step 4 exists"):
                ours.save(4, args=ocp.args.StandardSave(tree(9)), force=True)
        assert same(ours.restore(4), 4)


def test_the_first_step_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    with manager(tmp_path, save_interval_steps=5, save_on_steps=[8]) as ours:
        assert save(ours, 3, 4, 5, 6, 8) == [True, False, True, False, True]
        assert ours.latest_step() == 8  # also while it is being saved


def test_policies_decide_what_is_saved(tmp_path: Path) -> None:
    policies = ocp.checkpoint_managers
    either = policies.AnySavePolicy([policies.FixedIntervalPolicy(4), policies.SpecificStepsPolicy([1])])
    with manager(tmp_path / "a", save_decision_policy=either) as ours:
        assert save(ours, 0, 1, 2, 4) == [True, True, False, True]
    with manager(tmp_path / "b", should_save_fn=lambda step, latest: latest is None or step == latest + 2) as ours:
        assert save(ours, 1, 2, 3, 4, 5) == [True, False, True, False, True]
    spaced = policies.ContinuousCheckpointingPolicy(minimum_interval_secs=3600)
    with manager(tmp_path / "c", save_decision_policy=spaced) as ours:
        save(ours, 1)
        ours.wait_until_finished()
        assert save(ours, 2) == [False]


def test_a_policy_of_the_user_sees_all_saved_steps(tmp_path: Path) -> None:
    """Also a subclass of a policy whose decisions need only the number of the step."""
    policies = ocp.checkpoint_managers
    seen: list[list[int]] = []

    class Interval(policies.FixedIntervalPolicy):
        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            seen.append([one.step for one in previous_steps])
            return super().should_save(step, previous_steps, context=context)

    for name, policy in {"alone": Interval(1), "nested": policies.AnySavePolicy([Interval(1)])}.items():
        seen.clear()
        with manager(tmp_path / name, save_decision_policy=policy) as ours:
            assert save(ours, 1, 2, 3) == [True] * 3
        assert seen == [[], [1], [1, 2]]


@pytest.mark.parametrize("library", [ocp, real])
def test_a_subclass_reads_what_the_manager_knows(tmp_path: Path, library: Any) -> None:
    """Kauldron's subclass reads this private attribute for each list of steps."""

    class Manager(library.CheckpointManager):
        def all_steps(self, read: bool = False) -> list[int]:
            return [one.step for one in self._checkpoints]

    options = library.CheckpointManagerOptions(max_to_keep=2)
    with Manager(tmp_path / "run", options=options) as manager:
        for step in range(4):
            manager.save(step, args=library.args.StandardSave(tree(step)))
        assert manager.latest_step() == 3
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
    with Manager(tmp_path / "run", options=options) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([2, 3], 3)


def test_a_save_that_ends_while_the_steps_are_listed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with manager(tmp_path, should_save_fn=lambda step, latest: latest is None) as ours:
        save(ours, 1)

        def listed_before_the_commit() -> list[Any]:
            ours._run.wait()
            return []

        monkeypatch.setattr(ours._run, "infos", listed_before_the_commit)
        assert not ours.should_save(2)


def test_the_newest_step_is_never_deleted(tmp_path: Path) -> None:
    """Deliberately not as in Orbax: also if it is not among the best, and with `max_to_keep=0`."""
    with manager(tmp_path / "best", max_to_keep=1, best_fn=lambda metrics: metrics["acc"]) as ours:
        for step, acc in enumerate([0.9, 0.1, float("nan")]):
            save(ours, step, metrics={"acc": acc})
        ours.wait_until_finished()
        assert ours.all_steps() == [0, 2] and ours.best_step() == 0  # NaN is never best
    with manager(tmp_path / "none", max_to_keep=0) as ours:
        save(ours, 1, 2)
        ours.wait_until_finished()
        assert ours.all_steps() == [2]


@pytest.mark.long
@pytest.mark.whole
def test_which_steps_stay(tmp_path: Path) -> None:
    policies = ocp.checkpoint_managers
    hour = datetime.timedelta(hours=1)
    cases: dict[str, tuple[dict[str, Any], list[int]]] = {
        "period": ({"max_to_keep": 1, "keep_period": 3}, [0, 3, 6]),
        "time": ({"max_to_keep": 2, "keep_time_interval": hour}, [0, 5, 6]),
        "closest": ({"preservation_policy": policies.EveryNStepsClosest(4)}, [1, 4, 6]),
        "custom": ({"preservation_policy": policies.CustomSteps([2])}, [2, 6]),
        "apart": ({"preservation_policy": policies.EveryNSteps(2, exact_interval=False)}, [0, 2, 4, 6]),
        "limited": ({"preservation_policy": policies.EveryNSteps(2, max_to_keep=2)}, [4, 6]),
        "recent": ({"preservation_policy": policies.LatestDuration(hour)}, [0, 1, 2, 3, 4, 5, 6]),
        "all": ({"preservation_policy": policies.PreserveAll()}, [0, 1, 2, 3, 4, 5, 6]),
    }
    for name, (options, _) in cases.items():
        with manager(tmp_path / name, **options) as ours:
            save(ours, *range(7))
    # Steps at a distance in time come from a policy's own view, because no test can wait for an hour.
    assert {name: tr.steps(tmp_path / name) for name in cases if name != "closest"} == {
        name: steps for name, (_, steps) in cases.items() if name != "closest"
    }
    infos = [policies.PolicyCheckpointInfo(step, datetime.datetime.now(datetime.UTC), None) for step in (1, 5, 6, 9)]
    kept = policies.EveryNStepsClosest(4).should_preserve(infos, context=policies.PreservationContext())
    assert kept == [True, False, True, True] or kept == [True, True, False, True]


def test_an_interval_of_time_may_be_shorter_than_a_second() -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=1, keep_time_interval=datetime.timedelta(milliseconds=1500))
    begin = datetime.datetime.now(datetime.UTC)
    times = [begin + datetime.timedelta(seconds=second) for second in (0, 1.2, 1.6, 3, 3.2, 3.3)]
    infos = [policies.CheckpointInfo(step, time, None) for step, time in enumerate(times)]
    kept = preservation_policy(options).should_preserve(infos, context=policies.PreservationContext())
    assert kept == [True, False, True, False, True, True]


def test_deleted_steps_can_move_to_a_directory(tmp_path: Path) -> None:
    with real.CheckpointManager(tmp_path) as theirs:
        theirs.save(0, args=real.args.StandardSave(tree(0)))
    with manager(tmp_path, max_to_keep=1, todelete_subdir="trash") as ours:
        save(ours, 1, 2)
    assert names(tmp_path) == ["2", "trash"] and names(tmp_path / "trash") == ["0", "1"]
    assert same(tr.restore(tmp_path / "trash" / "1"), 1) and same(tr.restore(tmp_path / "trash" / "0"), 0)


@pytest.mark.slow
def test_a_program_that_ends_without_waiting_loses_nothing(tmp_path: Path) -> None:
    """Deliberately not as in Orbax."""
    code = """
import sys, numpy as np, treering.orbax as ocp
ocp.CheckpointManager(sys.argv[1]).save(5, args=ocp.args.StandardSave({"w": np.arange(3_000_000.0)}))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    assert (tr.restore(tmp_path / "run")["w"] == np.arange(3_000_000.0)).all()


@pytest.mark.slow
def test_after_a_kill_the_run_continues_from_the_step_before(tmp_path: Path) -> None:
    code = """
import os, signal, sys, numpy as np, treering.orbax as ocp
from treering import stores
ckpts = ocp.CheckpointManager(sys.argv[1])
ckpts.save(1, args=ocp.args.StandardSave({"w": np.ones(8)}))
ckpts.wait_until_finished()
stores.posix.Disk.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
stores.posix.Disk.rename = stores.posix.Disk.link
stores.posix.Disk.rename_new = stores.posix.Disk.link
ckpts.save(2, args=ocp.args.StandardSave({"w": np.zeros(8)}))
ckpts.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with manager(tmp_path) as ours:
        assert ours.latest_step() == 1 and (np.asarray(ours.restore(None)["w"]) == 1).all()
        assert save(ours, 2) == [True]
    assert names(tmp_path) == ["1", "2"] and tr.verify(tmp_path).ok


def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    ours = manager(tmp_path)
    save(ours, 1)
    ours.wait_until_finished()
    os.rename(tmp_path / "1", tmp_path / "elsewhere")
    (tmp_path / "2").write_text("in the way")
    with pytest.raises((tr.errors.SaveError, ExistsError)):
        save(ours, 2)
        ours.wait_until_finished()
    os.remove(tmp_path / "2")
    assert save(ours, 2) == [True]
    ours.close()
    with pytest.raises(MismatchError, match="closed"):  # deliberately not as in Orbax, where `save` returns True
        save(ours, 3)


# Restoring


def test_a_damaged_step(tmp_path: Path) -> None:
    """A flipped bit is an error, deliberately not as in Orbax; without a step, the one before is restored."""
    with manager(tmp_path) as ours:
        save(ours, 1, 2)
    (file,) = (tmp_path / "2").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    os.chmod(file, 0o644)
    file.write_bytes(data)
    with manager(tmp_path) as ours:
        with pytest.raises(CorruptError):
            ours.restore(2, args=ocp.args.StandardRestore(tree()))
        assert same(ours.restore(None, args=ocp.args.StandardRestore(tree())), 1)


def test_restoring_an_earlier_step_changes_nothing(tmp_path: Path) -> None:
    with manager(tmp_path) as ours:
        save(ours, 1, 2, 3)
        assert same(ours.restore(1, args=ocp.args.StandardRestore(tree())), 1)
        assert save(ours, 2, 4) == [False, True]
    assert names(tmp_path) == ["1", "2", "3", "4"]


def test_there_is_nothing_to_restore(tmp_path: Path) -> None:
    with manager(tmp_path) as ours:
        assert ours.latest_step() is None and ours.best_step() is None and ours.all_steps() == []
        for step in (None, 3):
            with pytest.raises(FileNotFoundError):
                ours.restore(step, args=ocp.args.StandardRestore())
        with pytest.raises(FileNotFoundError):
            ours.delete(3)
    with manager(tmp_path / "missing", read_only=True) as reader:
        assert reader.latest_step() is None and not (tmp_path / "missing").exists()
        with manager(tmp_path / "missing") as ours:
            save(ours, 1)
        reader.reload()
        assert reader.latest_step() == 1


def test_one_manager_of_a_directory_saves(tmp_path: Path) -> None:
    with manager(tmp_path) as first, manager(tmp_path) as second:
        save(first, 1)
        first.wait_until_finished()
        save(second, 2)
        second.wait_until_finished()
        with pytest.raises(ValueError, match="another Checkpointer of this process writes this run"):
            save(first, 3)
        assert same(first.restore(2, args=ocp.args.StandardRestore(tree())), 2)


def test_the_directory_of_another_run(tmp_path: Path) -> None:
    with manager(tmp_path / "a") as ours:
        save(ours, 1, 2)
    with manager(tmp_path / "b") as ours:
        assert same(ours.restore(1, directory=tmp_path / "a"), 1)
        assert same(ours.restore(None, directory=tmp_path / "a"), 2)
        assert isinstance(ours.directory, pathlib.PurePath) and str(ours.directory) == str(tmp_path / "b")


# Items


def test_one_item_or_several_is_decided_once(tmp_path: Path) -> None:
    one, several = ocp.args.StandardSave(tree()), ocp.args.Composite(a=ocp.args.StandardSave(tree()))
    with manager(tmp_path / "one") as ours:
        ours.save(1, args=one)
        with pytest.raises(ValueError, match="one item without a name"):
            ours.save(2, args=several)
        with pytest.raises(ValueError, match="one item without a name"):
            ours.restore(1, args=ocp.args.Composite(a=ocp.args.StandardRestore()))
    with manager(tmp_path / "several") as ours:
        ours.save(1, args=several)
        with pytest.raises(ValueError, match="several items"):
            ours.save(2, args=one)
    for name, found in (("one", dict), ("several", ocp.args.Composite)):
        with manager(tmp_path / name) as ours:
            assert isinstance(ours.restore(1), found)
            assert (ours.item_metadata(1) if name == "one" else ours.item_metadata(1).a)["w"].shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: ocp.CheckpointManager(path, item_names=("metrics",)), "Orbax uses this name itself"),
        (lambda path: ocp.CheckpointManager(path, ocp.PyTreeCheckpointer(), item_names=("a",)), "old style"),
        (lambda path: ocp.CheckpointManager(path).save(1, tree()), "expected args="),
        (lambda path: ocp.CheckpointManager(path).save(1), "expected args="),
        (lambda path: ocp.CheckpointManager(path).save(1, args=tree()), "found a dict"),
        (lambda path: ocp.CheckpointManager(path).save(1, ocp.args.StandardSave(tree())), "as args="),
        (
            lambda path: ocp.CheckpointManager(path, item_names=("a",)).save(
                1, args=ocp.args.Composite(b=ocp.args.StandardSave(tree()))
            ),
            "b does not match",
        ),
        (
            lambda path: ocp.CheckpointManager(path).save(1, args=ocp.args.Composite(metrics=ocp.args.JsonSave({}))),
            "rename the item",
        ),
        (lambda path: ocp.CheckpointManager(path, write="t5x"), "'treering' or 'orbax'"),
    ],
)
def test_wrong_arguments(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "run")
    assert not (tmp_path / "run").exists() or names(tmp_path / "run") == []


def test_the_old_style_of_calls(tmp_path: Path) -> None:
    checkpointers = {
        "state": ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    ours = ocp.CheckpointManager(tmp_path, checkpointers, Options(max_to_keep=1))
    for step in (1, 2):
        assert ours.save(step, {"state": tree(step), "config": {"lr": 0.1}}) is True
        assert names(tmp_path) == [str(step)]  # saved while the caller waited
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree())
    found = ours.restore(2, {"state": tree()}, restore_kwargs={"state": {"restore_args": restore_args}})
    assert same(found["state"], 2) and "config" not in found
    ours.close()


def test_metadata_and_metrics(tmp_path: Path) -> None:
    options = Options(best_fn=lambda metrics: metrics["acc"])
    with ocp.CheckpointManager(tmp_path, options=options, metadata={"version": 2}) as ours:
        save(ours, 1, metrics={"acc": jnp.float32(0.5)}, custom_metadata={"lr": 0.1})
        ours.wait_until_finished()
    with ocp.CheckpointManager(tmp_path, metadata={"version": 3}) as ours:  # logged: the run's stay
        assert ours.metadata().custom_metadata == {"version": 2}
        about = ours.metadata(1)
        assert about.custom_metadata == {"lr": 0.1} and about.metrics == {"acc": 0.5} == ours.metrics(1)
    assert tr.open(tmp_path).metrics == {"acc": 0.5}
    with real.CheckpointManager(tmp_path) as theirs:
        assert theirs.metadata().custom_metadata == {"version": 2}


@pytest.mark.parametrize("metrics", [{"loss": 0.5, "eval": {"acc": 0.9}, "note": "x"}, 0.5, [0.5]])
def test_without_best_fn_any_metrics_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: Any) -> None:
    """Orbax drops them then."""
    with ocp.CheckpointManager(tmp_path / "ours") as ours, real.CheckpointManager(tmp_path / "theirs") as theirs:
        for step in (1, 2):
            assert ours.save(step, metrics=metrics, args=ocp.args.StandardSave(tree(step)))
            assert theirs.save(step, metrics=metrics, args=real.args.StandardSave(tree(step)))
        assert ours.metrics(2) == ({"loss": 0.5} if isinstance(metrics, dict) else None)
    assert "are not saved: eval, note" in caplog.text or not isinstance(metrics, dict)
    assert "only numbers by name" in caplog.text
    best = Options(best_fn=lambda found: found["loss"])
    with ocp.CheckpointManager(tmp_path / "best", options=best) as ours, pytest.raises(ValueError, match="metrics"):
        ours.save(1, metrics=metrics, args=ocp.args.StandardSave(tree()))
    with v1.training.Checkpointer(tmp_path / "v1") as ours, pytest.raises(ValueError, match="metrics"):  # Orbax saves.
        ours.save(1, tree(), metrics=metrics)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_mode": "best"}, "best_mode"),
        ({"max_to_keep": -1}, "max_to_keep"),
        ({"todelete_full_path": "trash"}, "treering prune --to"),
        ({"todelete_subdir": "3"}, "todelete_subdir"),
        ({"enable_per_process_directory_creation": True}, "leave the option out"),
        ({"multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=None)}, "primary_host=0"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, UnsupportedError), match=message):
        Options(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_deletion_threads": 3},
        {"async_options": ocp.AsyncOptions(timeout_secs=5)},
        {"read_only": True, "max_to_keep": 3},
        {"file_options": ocp.options.FileOptions(skip_sync_file_validations=True)},
    ],
)
def test_options_without_effect_are_logged(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    Options(**options)
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    if "read_only" in options:
        assert "CheckpointManagerOptions: read_only=True, so max_to_keep is ignored" in caplog.text


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_steps_have_no_more_rights_than_asked_for(tmp_path: Path, write: str) -> None:
    files = ocp.options.FileOptions(path_permission_mode=0o750)
    with manager(tmp_path / "run", write, file_options=files) as ours:
        save(ours, 1)
    found = [stat.S_IMODE(os.stat(one).st_mode) for one in (tmp_path / "run", tmp_path / "run" / "1")]
    with real.CheckpointManager(tmp_path / "real", options=real.CheckpointManagerOptions(file_options=files)) as theirs:
        theirs.save(1, args=real.args.StandardSave(tree()))
        theirs.wait_until_finished()
    assert found == [stat.S_IMODE(os.stat(one).st_mode) for one in (tmp_path / "real", tmp_path / "real" / "1")]
    assert [mode & 0o077 & ~0o050 for mode in found] == [0, 0]


def test_a_bucket_has_no_mode_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    files = ocp.options.FileOptions(path_permission_mode=0o750)
    with ocp.CheckpointManager("memory://modes/run", options=Options(file_options=files)) as ours:
        save(ours, 1)
    assert "path_permission_mode has no effect" in caplog.text


def test_a_manager_that_only_reads(tmp_path: Path) -> None:
    with manager(tmp_path) as writer, manager(tmp_path, read_only=True) as reader:
        assert save(reader, 1) == [False] and reader.latest_step() is None
        save(writer, 1)
        writer.wait_until_finished()
        assert reader.latest_step() is None  # until it looks again
        reader.reload()
        assert reader.latest_step() == 1 and reader.should_save(2) is False
        reader.delete(1)
    assert names(tmp_path) == ["1"]


def test_a_step_without_metrics_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path, best_fn=lambda found: found["loss"], max_to_keep=2) as ours:
        save(ours, 1, metrics={"loss": 0.5})
        assert not caplog.records
        save(ours, 2)
        assert "step 2 has no metrics, and best_fn needs them" in caplog.text
        with pytest.raises(ValueError, match="step 2 exists; delete it first"):
            save(ours, 2, force=True)


def test_a_callback_after_each_commit(tmp_path: Path) -> None:
    calls: list[int] = []
    with manager(tmp_path, async_options=ocp.AsyncOptions(post_finalization_callback=lambda: calls.append(1))) as ours:
        save(ours, 1, 2)
    assert calls == [1, 1]


@pytest.mark.long
def test_several_processes(tmp_path: Path) -> None:
    """All processes save and restore together, and process 0 decides by the clock."""
    body = """
import treering.orbax as ocp
policies = ocp.checkpoint_managers
timed = policies.AnySavePolicy([policies.ContinuousCheckpointingPolicy(), policies.FixedIntervalPolicy(1)])
options = ocp.CheckpointManagerOptions(max_to_keep=2, save_decision_policy=timed)
value = np.arange(8, dtype=np.float32)
Composite, StandardSave, JsonSave = ocp.args.Composite, ocp.args.StandardSave, ocp.args.JsonSave
def items(step):
    return Composite(state=StandardSave({"w": put(value * step, P("x"))}), n=JsonSave({"n": step}))
with ocp.CheckpointManager(tmp / "run", options=options, metadata={"a": 1}) as ckpts:
    took = [ckpts.save(step, args=items(step)) for step in range(4)]
    ckpts.wait_until_finished()
    target = {"w": put(value, P("x"))}
    found = ckpts.restore(3, args=Composite(state=ocp.args.StandardRestore(target), n=ocp.args.JsonRestore()))
    report([took, ckpts.all_steps(), same(found.state["w"], value * 3), found.n, ckpts.metadata().custom_metadata])
"""
    for one in run_job(tmp_path, body, processes=2):
        assert one.report == [[True] * 4, [2, 3], True, {"n": 3}, {"a": 1}], one.output


# Other programs


@pytest.mark.long
@pytest.mark.whole
def test_an_evaluator_follows_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It gets the newest step each time, of either format, and ends after the timeout."""
    asked: list[int] = []

    def has_ended() -> bool:
        asked.append(1)
        return len(asked) > 1

    with manager(tmp_path, "orbax") as theirs:
        save(theirs, 1, 2)
    found: list[int] = []
    options = {"timeout": 0.05, "timeout_fn": has_ended, "snapshot_dir": tmp_path / "snapshots"}
    for step in ocp.checkpoint_utils.checkpoints_iterator(tmp_path, **options):
        found.append(step)
        if step == 2:
            with manager(tmp_path) as ours:
                save(ours, 3)
    assert found == [2, 3] and len(asked) == 2
    assert "snapshot_dir= has no effect" in caplog.text
    assert ocp.utils.checkpoint_steps(tmp_path) == [1, 2, 3] and ocp.step.latest_step(tmp_path) == 3
    with ocp.checkpoint_utils.wait_for_new_checkpoint(tmp_path, until_step=2, timeout=0.05) as step:
        assert step == 3
    with ocp.checkpoint_utils.wait_for_new_checkpoint(tmp_path, until_step=9, timeout=0.05) as step:
        assert step == -1
    named = ocp.path.step.standard_name_format()
    newest = ocp.path.step.latest_step_metadata(tmp_path, named)
    assert newest.step == 3 and newest.path == ocp.path.step.build_step_path(tmp_path, named, 3)
    assert ocp.path.step.latest_step_metadata(tmp_path / "3" / "none", named) is None
    assert [path.name for path in ocp.utils.checkpoint_steps_paths(tmp_path)] == ["1", "2", "3"]
    assert ocp.utils.is_checkpoint_finalized(tmp_path / "3") and not ocp.utils.is_checkpoint_finalized(tmp_path)


# What a review found


def test_separate_checkpoints_are_no_run(tmp_path: Path) -> None:
    for step in (1, 2):
        tr.save(tmp_path / "names" / f"seed_{step}", tree(step))
        tr.save(tmp_path / "numbers" / str(step), tree(step))
    for folder in ("names", "numbers"):
        assert tr.steps(tmp_path / folder) == []
        with pytest.raises(NotFoundError):
            tr.restore(tmp_path / folder)


@pytest.mark.long
@pytest.mark.whole
def test_the_metrics_of_a_replaced_step(tmp_path: Path) -> None:
    """A step in Orbax's format that is saved again counts with its new metrics."""
    with manager(tmp_path, "orbax", best_fn=lambda metrics: metrics["a"], max_to_keep=2) as ours:
        save(ours, 1, metrics={"a": 0.9})
        save(ours, 2, metrics={"a": 0.5})
        ours.wait_until_finished()
        ours.delete(1)
        save(ours, 1, metrics={"a": 0.1}, force=True)
        save(ours, 3, metrics={"a": 0.6})
        save(ours, 4, metrics={"a": 0.05})
        ours.wait_until_finished()
        assert ours.all_steps() == [2, 3, 4] and ours.best_step() == 3


def test_a_failed_step_is_saved_again(tmp_path: Path) -> None:
    """It is not passed over as a step that exists."""
    with manager(tmp_path) as ours:
        save(ours, 1)
        ours.wait_until_finished()
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "treering.json").mkdir()
        with pytest.raises((tr.errors.TreeringError, OSError)):
            save(ours, 2)
            ours.wait_until_finished()
        os.rmdir(tmp_path / "2" / "treering.json")
        assert save(ours, 2) == [True]
    assert tr.steps(tmp_path) == [1, 2]


@pytest.mark.long
@pytest.mark.whole
def test_steps_of_orbax_in_a_bucket(tmp_path: Path) -> None:
    """A step is gone at once, at every moment of its deletion, and its name is free."""
    run = f"memory://{tmp_path.name}/run"
    with ocp.CheckpointManager(run, write="orbax") as ours:
        save(ours, 1, 2)
        ours.wait_until_finished()
        store, root = stores.get(run), ours._run.directory
        remove = unpublish(store, f"{root}/1")
        assert ours.all_steps(read=True) == [2]
        remove()
        assert not list(file_io.files_in(store, f"{root}/1"))
        assert save(ours, 1, force=True) == [True]
    with pytest.raises(UnsupportedError, match="bucket"):
        ocp.CheckpointManager(run, options=Options(todelete_subdir="trash"))


def test_unfinished_saves_of_orbax(tmp_path: Path) -> None:
    (tmp_path / "3.orbax-checkpoint-tmp-0" / "default").mkdir(parents=True)
    (tmp_path / "notes.orbax-checkpoint-tmp-0").mkdir()
    with manager(tmp_path) as ours:
        save(ours, 1)
    assert "3.orbax-checkpoint-tmp-0" in names(tmp_path)
    with manager(tmp_path, cleanup_tmp_directories=True) as ours:
        save(ours, 2)
    assert names(tmp_path) == ["1", "2", "notes.orbax-checkpoint-tmp-0"]


def test_a_step_of_a_later_release_is_not_moved(tmp_path: Path) -> None:
    with manager(tmp_path, todelete_subdir="trash") as ours:
        save(ours, 1, 2)
        ours.wait_until_finished()
        file = tmp_path / "1" / "treering.json"
        later = file.read_bytes().replace(b'"version":1,', b'"version":1,"requires":["later"],', 1)
        assert later != file.read_bytes()
        body = later[: later.rindex(b',"xxh3"')]
        os.chmod(file, 0o644)
        file.write_bytes(body + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n')
        with pytest.raises(UnsupportedError):
            ours.delete(1)
    assert names(tmp_path) == ["1", "2"]
    with pytest.raises(UnsupportedError, match="uses this name"):
        manager(tmp_path, todelete_subdir="ckpt_9", step_prefix="ckpt")


def test_a_golden_run_is_restored(tmp_path: Path) -> None:
    """Every later release restores the items of a step that this one saved."""

    class Lines(ocp.CheckpointHandler):
        def save(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

        def restore(self, directory: Any, *args: Any, **kwargs: Any) -> list[str]:
            return (directory / "sub" / "lines.txt").read_text().split("\n")

    run = shutil.copytree(Path(__file__).parents[1] / "golden" / "v1-orbax-run", tmp_path / "run")
    handlers = {
        "state": ocp.StandardCheckpointHandler(),
        "config": ocp.JsonCheckpointHandler(),
        "empty": ocp.JsonCheckpointHandler(),
        "lines": Lines(),
    }
    with ocp.CheckpointManager(run, item_handlers=handlers) as ours:
        found = ours.restore(1)
        assert isinstance(found.state["w"], jnp.ndarray) and (found.state["w"] == jnp.arange(6.0).reshape(2, 3)).all()
        assert found.state["n"] == 3 and (found.empty, found.lines) == ([], ["a", "b"])
        assert found.config == {"z": 1, "a": [None, True, "x", {}]} and list(found.config) == ["z", "a"]
        about = ours.metadata(1)
        assert (about.metrics, about.custom_metadata) == ({"acc": 0.5}, {"lr": 0.1})
        assert ours.metadata().custom_metadata == {"version": 1}
    assert tr.open(run)["config/a/2"] == "x" and tr.steps(run) == [1]


def test_directories_that_are_no_run_of_orbax(tmp_path: Path) -> None:
    """Each is one error before anything is written, and never a new beginning next to what is saved."""
    with tr.Checkpointer(tmp_path / "native") as ckpts:
        ckpts.save(1, tree())
    tr.save(tmp_path / "t5x" / "checkpoint_7", {"target": tree(), "state": {"step": 7}}, format="t5x")
    ocp.PyTreeCheckpointer().save(tmp_path / "one", tree())
    for name, found in (("native", "treering.Checkpointer"), ("t5x", "T5X"), ("one", "a checkpoint")):
        before = sorted((tmp_path / name).rglob("*"))
        with pytest.raises(ValueError, match=f"expected the directory of a CheckpointManager, found .*{found}"):
            manager(tmp_path / name)
        assert sorted((tmp_path / name).rglob("*")) == before


def test_a_handler_without_a_method_to_save(tmp_path: Path) -> None:
    class Lines:
        def restore(self, directory: Any, args: Any = None) -> None: ...

    ours = ocp.CheckpointManager(tmp_path, item_handlers=Lines())
    with pytest.raises(ValueError, match="Lines: expected"):
        ours.save(1, [1])
    assert names(tmp_path) == []


def test_a_step_whose_error_another_call_raised_is_saved_again(tmp_path: Path) -> None:
    with manager(tmp_path) as ours:
        save(ours, 1)
        ours.wait_until_finished()
        (tmp_path / "2" / "treering.json").mkdir(parents=True)
        with pytest.raises((tr.errors.TreeringError, OSError)):
            save(ours, 2)
            ours.metrics(1)
        os.rmdir(tmp_path / "2" / "treering.json")
        assert save(ours, 2) == [True]
    assert tr.steps(tmp_path) == [1, 2]


def test_a_loop_that_skips_steps_lists_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        manager(tmp_path, save_interval_steps=100) as ours,
        ocp.v1.training.Checkpointer(
            tmp_path / "v1", save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(100)
        ) as theirs,
    ):
        save(ours, 0)
        theirs.save(0, tree())
        ours.wait_until_finished()
        ours.latest_step()
        monkeypatch.setattr(stores.posix.Disk, "list", lambda *_: pytest.fail("listed"))
        for step in range(1, 5):
            assert save(ours, step) == [False] and ours.latest_step() == 0
            assert not theirs.save(step, tree())
        monkeypatch.undo()


def test_steps_that_a_program_names_itself(tmp_path: Path) -> None:
    """They are a run for all who list them, also if every one is damaged."""
    for step in (1, 2):
        ocp.PyTreeCheckpointer().save(tmp_path / str(step), tree(step))
    assert ocp.utils.checkpoint_steps(tmp_path) == [1, 2] == tr.steps(tmp_path) == manager(tmp_path).all_steps()
    for step in (1, 2):
        file = tmp_path / str(step) / "treering.json"
        os.chmod(file, 0o644)
        file.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    assert tr.steps(tmp_path) == [1, 2]
    with pytest.raises(CorruptError):
        tr.open(tmp_path)
