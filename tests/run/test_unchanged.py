"""Arrays that have not changed since earlier steps are in files that steps share, and no step depends on another."""

import errno
import gc
import itertools
import logging
import os
import pathlib
import random
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import accelerator
import jobs
import treering as tr
from sampling import sample_points
from treering._pytree import staged_supply
from treering._pytree.staged_supply import StagedSupply
from treering._run.retention import Retention
from treering._run.tensorboard import TensorBoardScalars
from treering._save import save_reuse, saved_arrays
from treering.errors import MismatchError, NotFoundError, SaveError
from treering.stores.posix import Disk

_ELEMENTS = 20_000  # float32


@pytest.fixture(autouse=True)
def _small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares arrays of 80 kB too."""
    monkeypatch.setattr(saved_arrays, "MIN_BYTES", 64 << 10)


def _array(value: float) -> jax.Array:
    return jnp.full(_ELEMENTS, value, jnp.float32)


def _arrays(step: pathlib.Path) -> dict[int, pathlib.Path]:
    """Returns the array files of a step by the number of their bytes on the disk."""
    return {file.stat().st_ino: file for file in step.glob("arrays-*")}


def _check(run: pathlib.Path, expected: dict[int, Any]) -> None:
    """Checks each step bit by bit."""
    assert tr.steps(run) == sorted(expected)
    assert tr.verify(run).ok
    for step, tree in expected.items():
        restored = tr.restore(run, step=step)
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        for found, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
            assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def test_frozen_arrays_take_no_room(tmp_path: pathlib.Path) -> None:
    """From the fourth save on, only what was trained is written. A step can be copied and removed by itself."""
    run = tmp_path / "run"
    frozen = {"a": _array(1), "b": [_array(2), jnp.arange(5, dtype=jnp.int16)]}
    states = {step: {"frozen": frozen, "trained": _array(10 + step), "n": step} for step in range(1, 7)}
    with tr.Checkpointer(run, on_save=(reports := []).append) as ckpts:
        for step, tree in states.items():
            ckpts.save(step, tree)
            ckpts.wait()
    _check(run, states)
    shared = [report.shared_bytes for report in sorted(reports, key=lambda one: one.step)]
    assert shared[:3] == [0, 0, 0] and min(shared[3:]) > 2 * 4 * _ELEMENTS
    assert min(report.nbytes for report in reports) > 3 * 4 * _ELEMENTS and "shared with earlier" in str(reports[-1])
    assert len(set().union(*(_arrays(step) for step in run.glob("step-*")))) == 1 + 2 + 2 + 3
    for step in (2, 5):
        shutil.copytree(run / f"step-{step:08}", tmp_path / f"copy-{step}")
        shutil.rmtree(run / f"step-{step:08}")
        assert np.array_equal(tr.restore(tmp_path / f"copy-{step}")["frozen"]["a"], frozen["a"])
    _check(run, {step: tree for step, tree in states.items() if step not in (2, 5)})


def test_a_size_keeps_what_the_disk_has_room_for(tmp_path: pathlib.Path) -> None:
    """Two copies of the frozen array and ten small steps fit into three times its size."""
    frozen = _array(1)
    with tr.Checkpointer(tmp_path, keep=tr.keep.size(3 * frozen.nbytes)) as ckpts:
        for step in range(1, 13):
            ckpts.save(step, {"frozen": frozen, "n": np.full(3, step)})
            ckpts.wait()
        assert len(ckpts.steps) >= 9


def test_what_has_changed_is_written(tmp_path: pathlib.Path) -> None:
    """New arrays, arrays in other leaves or of another dtype, and those of NumPy are never taken from a file."""
    run, a, b, in_numpy = tmp_path / "run", _array(1), _array(2), np.zeros(_ELEMENTS)
    trees: dict[int, Any] = {step: {"a": a, "b": b, "n": in_numpy} for step in (1, 2, 3)}
    trees[4] = {"a": b, "b": a, "n": in_numpy}  # exchanged
    trees[5] = {"a": a, "b": jax.jit(lambda x: x + 0)(b), "n": in_numpy}  # equal, but another array
    trees[6] = {"a": {"a": a}, "b": b, "n": in_numpy}
    trees[7] = {"a": a, "b": a, "n": in_numpy}
    expected: dict[int, Any] = {}
    with tr.Checkpointer(run) as ckpts:
        for step, tree in trees.items():
            in_numpy += 1
            ckpts.save(step, tree)
            expected[step] = jax.tree.map(np.array, tree)
            ckpts.wait()
        report = ckpts.save(8, trees[3], dtype="bfloat16")
        assert report and not report.result().shared_bytes
        expected[8] = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), trees[3])
        ckpts.save(9, {"c": a}, rules=[tr.rules.rename("c", "a")])
        expected[9] = {"a": np.array(a)}
    _check(run, expected)


def _policy(choice: random.Random) -> tr.keep.Policy | None:
    return choice.choice(
        [
            *(None, tr.keep.last(1), tr.keep.last(2), tr.keep.last(3), tr.keep.last(1) | tr.keep.every(4)),
            *(tr.keep.best(2, "loss", "min", unscored="drop"), tr.keep.last(2) | tr.keep.best(1, "loss", "min")),
            tr.keep.size(1_000_000),
        ]
    )


@pytest.mark.parametrize("seed", sample_points(range(42)))
def test_two_copies_of_each_array_among_the_steps(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Under any policy, and whatever is deleted, pinned, rewound or overwritten, a new step has other files than the
    newest one that stays next to it. New objects may have equal values, also on accelerators. If one of these files is
    damaged, a good step is left."""
    if seed % 2:
        accelerator.install(monkeypatch)
    choice, run, step = random.Random(seed), tmp_path / "run", 0
    state = [_array(n) for n in range(4)]
    expected: dict[int, Any] = {}
    shares = 0
    policy = _policy(choice)
    with tr.Checkpointer(run, keep=policy) as ckpts:
        for _ in range(14):
            state = [choice.choice((array, array, array, array + 0, _array(choice.random()))) for array in state]
            overwrites = step > 0 and step not in ckpts.pinned and choice.random() < 0.15
            step += not overwrites
            pending = ckpts.save(
                step, state, on_exists="overwrite", metrics={"loss": choice.random()} if choice.random() < 0.8 else None
            )
            assert pending
            shares += pending.result().shared_bytes > 0
            expected[step] = list(state)
            ckpts._saver._retention.wait()
            here = tr.steps(run)
            if step in here and len(here) > 1:
                other = max(one for one in here if one != step)
                files = [_arrays(run / f"step-{one:08}").keys() for one in (other, step)]
                assert not files[0] & files[1], f"steps {other} and {step} of {here} share files"
            event = choice.choice(("", "", "", "pin", "delete", "rewind"))
            if event == "pin":
                ckpts.pin(step)
            elif event == "delete" and len(here) > 1 and here[0] not in ckpts.pinned:
                ckpts.delete(here[0])
            elif event == "rewind" and len(here) > 1 and not ckpts.pinned:
                ckpts.rewind(here[-2])
                step = here[-2]
    for one in tr.steps(run):
        for found, wanted in zip(tr.restore(run, step=one), expected[one], strict=True):
            assert np.array_equal(found, wanted)
    # Without another step there is no second copy, so nothing is shared.
    assert tr.verify(run).ok and (shares or policy == tr.keep.last(1))


def _append(path: pathlib.Path) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")


@pytest.mark.parametrize(
    "change", [pathlib.Path.unlink, _append, lambda path: os.replace(shutil.copy(path, f"{path}.x"), path)]
)
def test_a_file_that_is_not_as_it_was_written_is_not_shared(
    tmp_path: pathlib.Path, change: Callable[[pathlib.Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """A file of an earlier step was deleted, changed or replaced by another program: the arrays are written again."""
    run, frozen, large = tmp_path / "run", _array(1), tmp_path
    caplog.set_level(logging.INFO, "treering")
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 6):
            if step == 4:
                (large,) = (one for one in _arrays(run / "step-00000002").values() if one.stat().st_size > 80_000)
                change(large)
            ckpts.save(step, {"frozen": frozen, "n": np.full(3, step)})
            ckpts.wait()
    for step in (3, 4, 5):
        assert tr.verify(run / f"step-{step:08}").ok and np.array_equal(tr.restore(run, step=step)["frozen"], frozen)
    assert f"{large.name}: arrays in it that have not changed are written again" in caplog.text


class _DiskWithoutLinks(Disk):
    def hard_link(self, old: str, new: str) -> bool:
        return False if "arrays-" in old else super().hard_link(old, new)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_disk_without_hard_links(
    tmp_path: pathlib.Path, use_disk: Any, damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes are copied, which is logged. If they are damaged, one save fails. The next one writes all arrays."""
    use_disk(_DiskWithoutLinks())
    run, frozen = tmp_path / "run", _array(1)
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 7):
            if damaged and step == 4:
                (large,) = (one for one in _arrays(run / "step-00000002").values() if one.stat().st_size > 80_000)
                written = large.stat()
                _append(large)
                os.utime(large, ns=(written.st_atime_ns, written.st_mtime_ns))
            pending = ckpts.save(step, {"frozen": frozen, "n": np.full(3, step)})
            assert pending
            if damaged and step == 4:
                with pytest.raises(SaveError, match=r"damaged.*nothing is saved; the next save writes all arrays"):
                    pending.result()
            else:
                assert not pending.result().shared_bytes
    assert tr.steps(run) == [step for step in range(1, 7) if not (damaged and step == 4)]
    for step in tr.steps(run)[2:]:
        assert tr.verify(run / f"step-{step:08}").ok and np.array_equal(tr.restore(run, step=step)["frozen"], frozen)
    assert caplog.text.count("it got no second name") == 1  # Later saves write all arrays.


def test_a_file_is_replaced_right_before_it_is_shared(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """The file that was opened is copied, and not the one that has its name now."""

    class Replacing(Disk):
        def hard_link(self, old: str, new: str) -> bool:
            if "arrays-" in old:
                os.replace(shutil.copy(old, f"{old}.x"), old)
                _append(pathlib.Path(old))
            return super().hard_link(old, new)

    use_disk(Replacing())
    run, frozen = tmp_path / "run", _array(1)
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 5):
            ckpts.save(step, {"frozen": frozen, "n": np.full(3, step)})
    assert tr.verify(run / "step-00000004").ok and not tr.verify(run / "step-00000002").ok
    assert np.array_equal(tr.restore(run, step=4)["frozen"], frozen)


def test_arrays_are_not_kept_in_memory(tmp_path: pathlib.Path) -> None:
    """The loop may drop its arrays. A new one at the address of an old one is another array."""
    tree = {"w": _array(1)}
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in range(1, 5):
            pending = ckpts.save(step, tree)
            assert pending and (pending.result().shared_bytes > 0) == (step > 2)
        array = weakref.ref(tree.pop("w"))
        gc.collect()
        assert array() is None
        ckpts.save(5, {"w": _array(5)})
    assert np.array_equal(tr.restore(tmp_path / "run")["w"], _array(5))


def test_nothing_is_shared_on_request(tmp_path: pathlib.Path) -> None:
    frozen = _array(1)
    with tr.Checkpointer(tmp_path / "run", reuse_unchanged=False) as ckpts:
        for step in range(1, 6):
            ckpts.save(step, {"frozen": frozen})
    assert {file.stat().st_nlink for file in tmp_path.rglob("arrays-*")} == {1}


def test_the_step_after_a_restored_one(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """The save that archives the later steps shares no file with the step that it continues from, nor with those."""
    run, frozen = tmp_path / "run", _array(1)
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 7):
            ckpts.save(step, {"frozen": frozen, "n": step})
        ckpts.restore(step=5)
        ckpts.save(7, {"frozen": frozen, "n": 7})
    assert tr.steps(run) == [1, 2, 3, 4, 5, 7]
    assert not _arrays(run / "step-00000005").keys() & _arrays(run / "step-00000007").keys()
    assert "second name" not in caplog.text


def test_a_step_that_is_smaller_than_the_one_before(tmp_path: pathlib.Path) -> None:
    """By `keep.size`, a small step leaves room for the one before, so it shares no file with that."""
    run, frozen = tmp_path / "run", _array(1)
    with tr.Checkpointer(run, keep=tr.keep.size(500_000)) as ckpts:
        for step in range(1, 6):
            ckpts.save(step, {"frozen": frozen, "large": jnp.full(70_000, step, jnp.float32)})
        ckpts.save(6, {"frozen": frozen})
    assert tr.steps(run) == [5, 6]
    assert not _arrays(run / "step-00000005").keys() & _arrays(run / "step-00000006").keys()


def test_two_networks_that_are_trained_in_turns(tmp_path: pathlib.Path) -> None:
    """One of them has changed whenever the other has not, and the frozen one is in a file without them. Files of
    deleted steps are forgotten."""
    state, shared = {"frozen": _array(1), "a": _array(2), "b": _array(3)}, []
    with tr.Checkpointer(tmp_path / "run", keep=tr.keep.last(2)) as ckpts:
        for step in range(1, 12):
            state["ab"[step % 2]] = _array(10 + step)
            pending = ckpts.save(step, state)
            assert pending
            shared.append(pending.result().shared_bytes > 0)
        known = ckpts._saver._unchanged.state
        assert len(known.ledger.usable(None)) <= 6 and len(known.ledger._files) <= 3
        assert max(len(one.versions) for one in known.saved.arrays.values()) <= 3
    assert all(shared[4:])


class _FailingPolicy(tr.keep.Policy):
    def kept(self, saved: Sequence[Any]) -> set[int]:
        raise RuntimeError("a policy of the user")


@pytest.mark.parametrize("keep", [None, _FailingPolicy(())])
def test_few_names_of_files_are_known(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, keep: tr.keep.Policy | None
) -> None:
    """A run may have any number of steps. If it is unknown which of them stay, nothing is shared."""
    monkeypatch.setattr(save_reuse, "_MAX_BASES", 3)
    run, state, shared = tmp_path / "run", {"frozen": _array(1)}, []
    with tr.Checkpointer(run, keep=keep) as ckpts:
        for step in range(1, 13):
            pending = ckpts.save(step, state)
            assert pending
            shared.append(pending.result().shared_bytes > 0)
        assert sum(map(len, ckpts._saver._unchanged.state.ledger._files.values())) <= 4
    _check(run, dict.fromkeys(range(1, 13), state))
    assert shared == [False] * 2 + [keep is None] * 10


def test_a_step_has_few_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more array freezes at each step. A file of its own for each would take all descriptors of the process."""
    monkeypatch.setattr(save_reuse, "_MAX_SHARED_FILES", 2)
    run, state = tmp_path / "run", [_array(n) for n in range(8)]
    with tr.Checkpointer(run, keep=tr.keep.last(3)) as ckpts:
        for step in range(1, 16):
            state = [array if n < step else array + 1 for n, array in enumerate(state)]
            pending = ckpts.save(step, state)
            assert pending and pending.result() and len(_arrays(run / f"step-{step:08}")) <= 5
    _check(run, dict.fromkeys((13, 14, 15), state))


def test_an_array_file_that_is_a_link(tmp_path: pathlib.Path) -> None:
    """A program moved the array files and left links. Another name of a link would not be a file of the step's own."""
    run, frozen = tmp_path / "run", _array(1)
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 5):
            ckpts.save(step, {"frozen": frozen, "n": step})
            ckpts.wait()
            for file in run.glob("step-*/arrays-*") if step == 3 else ():
                file.symlink_to(file.rename(tmp_path / file.name))
    assert not any(file.is_symlink() for file in (run / "step-00000004").iterdir())
    assert np.array_equal(tr.restore(run)["frozen"], frozen)


class _FailingDisk(Disk):
    """Fails once: the link to an array file, because the disk is full, or the look at one after its commit."""

    def __init__(self, what: str) -> None:
        self.left = [what]

    def hard_link(self, old: str, new: str) -> bool:
        if "arrays-" in old and "link" in self.left:
            self.left = []
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), new)
        return super().hard_link(old, new)

    def stat(self, path: str) -> os.stat_result | None:
        if (
            "step-00000004/arrays-" in path
            and "stat" in self.left
            and os.path.exists(f"{os.path.dirname(path)}/treering.json")
        ):
            self.left = []
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().stat(path)


@pytest.mark.parametrize("what", ["link", "stat"])
def test_an_error_of_the_disk(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The save waits for room, as with other files. Once it is committed, it does not fail."""
    disk = use_disk(_FailingDisk(what))
    monkeypatch.setattr(Retention, "wait_for_room", lambda *arguments: None)
    run, frozen = tmp_path / "run", _array(1)
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 8):
            ckpts.save(step, {"frozen": frozen, "n": step})
            if step == 4:
                ckpts.wait()
                ckpts.delete(3)
    assert not disk.left
    _check(run, {step: {"frozen": frozen, "n": step} for step in (1, 2, 4, 5, 6, 7)})
    files = [_arrays(run / f"step-{step:08}").keys() for step in (1, 2, 4, 5, 6, 7)]
    assert not any(one & other for one, other in itertools.pairwise(files[2:]))


def test_event_files_are_not_read_in_the_loop(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading new events takes long. Only a policy that uses metrics needs them to choose what a save may share."""
    pytest.importorskip("tensorboard")
    readers: list[threading.Thread] = []
    read = TensorBoardScalars.read

    def recorded(self: TensorBoardScalars, steps: Any) -> Any:
        readers.append(threading.current_thread())
        return read(self, steps)

    monkeypatch.setattr(TensorBoardScalars, "read", recorded)
    frozen = _array(1)
    with tr.Checkpointer(tmp_path / "run", keep=tr.keep.last(2), tensorboard=tmp_path) as ckpts:
        for step in range(1, 5):
            ckpts.save(step, {"frozen": frozen})
    assert readers and threading.current_thread() not in readers


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_new_arrays_with_the_values_of_earlier_ones(
    tmp_path: pathlib.Path, kind: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """They have changed only by their addresses, as arrays that a jitted step returns: the fifth save shares them. One
    other element is noticed, also where the checksums of files do not show which array has changed."""
    run, values = tmp_path / "run", np.random.default_rng(0).normal(size=(3, 700_001)).astype(np.float32)
    expected, shared = {}, {}
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 13):
            if step in (7, 12):
                values[1, -1 if step == 7 else 600_000] += 1
            tree = {"n": np.full(400_000, step, np.float32), "w": [kind(row.copy()) for row in values]}
            pending = ckpts.save(step, tree)
            assert pending
            shared[step] = pending.result().shared_bytes
            expected[step] = {"n": np.array(tree["n"]), "w": [np.array(row) for row in values]}
    _check(run, expected)
    assert [step for step, nbytes in shared.items() if nbytes > values.nbytes] == [5, 6, 9, 10, 11], shared


def test_arrays_that_a_jitted_step_returns(tmp_path: pathlib.Path) -> None:
    """An optimizer that masks parameters returns the frozen ones as new arrays. Sharded arrays are found too."""
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    params = {"frozen": jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), sharding), "trained": _array(0)}
    step_function = jax.jit(lambda params: {"frozen": params["frozen"] + 0, "trained": params["trained"] + 1})
    run, shared, states = tmp_path / "run", [], {}
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 8):
            params = step_function(params)
            pending = ckpts.save(step, params)
            assert pending
            shared.append(pending.result().shared_bytes > 4 << 20)
            states[step] = jax.tree.map(np.array, params)
    _check(run, states)
    assert shared == [False] * 4 + [True] * 3


@pytest.mark.slow
def test_several_processes(tmp_path: pathlib.Path) -> None:
    """Each process shares the files that it wrote: of sharded arrays, and of those that one of all holders writes."""
    results = jobs.run_job(tmp_path, "unchanged.job", processes=2)
    assert all(result.report[1] for result in results)
    assert results[1].report[2] > 2_400_000 and max(result.report[3] for result in results) <= 4
    totals = [sum(result.report[0][n] for result in results) for n in range(9)]
    # From the fourth save on the frozen arrays, from the fifth on those that are new objects with equal values
    assert totals[:3] == [0] * 3 and totals[3] > 6_500_000 and totals[4] > 14_500_000
    assert totals[7] < totals[6] and totals[8] < totals[6]  # One array has changed.
    assert tr.verify(tmp_path / "run").ok
    names = {file.stat().st_ino: file.stat().st_nlink for file in (tmp_path / "run").rglob("arrays-*")}
    assert max(names.values()) > 1
    restored = tr.restore(tmp_path / "run")
    assert np.array_equal(restored["frozen"], np.arange(1 << 20)) and restored["n"] == 9


@pytest.mark.slow
def test_arrays_that_all_processes_have(tmp_path: pathlib.Path) -> None:
    """The processes compare these before they know what is shared, so the caller copies them at once."""
    results = jobs.run_job(tmp_path, "unchanged.job_with_accelerators", processes=2)
    assert [result.report[0] for result in results] == [[1, 2]] * 2  # "global", and "made" by its digests
    assert sum(result.report[1] for result in results) > 7_600_000
    assert tr.verify(tmp_path / "run").ok


@pytest.mark.parametrize("memory_limit", [None, 500_000])
def test_shared_arrays_are_not_copied_from_the_device(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, memory_limit: int | None
) -> None:
    """CPU devices stand for accelerators. From the fifth save on, new objects with equal values are not copied either.
    One other bit is noticed."""
    monkeypatch.setattr(staged_supply, "_COPIED_BYTES_PER_SECOND", 1e5)
    double = accelerator.install(monkeypatch)
    run, frozen, copied, shared = tmp_path / "run", jnp.arange(500_000, dtype=jnp.float32), [], []
    states, held = {}, [0]
    reserve = StagedSupply._reserve

    def recorded(self: StagedSupply, nbytes: int) -> bool:
        reserved = reserve(self, nbytes)
        held.append(self._held_bytes)
        return reserved

    monkeypatch.setattr(StagedSupply, "_reserve", recorded)
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 13):
            before = double.nbytes
            equal = jnp.full(700_000, 3.0).at[-1].set(-0.0 if step > 9 else 0.0)
            states[step] = {"frozen": frozen, "equal": equal, "a": _array(step)}
            pending = ckpts.save(step, states[step], memory_limit=memory_limit)
            assert pending
            shared.append(pending.result().shared_bytes)
            copied.append(double.nbytes - before)
        pending = ckpts.save(13, states[1], dtype="bfloat16")  # The caller need not wait for what cannot be shared.
        assert pending and pending.result() and isinstance(supply := pending._supply, StagedSupply)
        assert supply._planned.is_set()
        ckpts.delete(13)
    assert memory_limit is None or max(held) == 2_800_000  # one array at a time
    _check(run, states)
    total = sum(array.nbytes for array in states[1].values())
    without_frozen = total - frozen.nbytes
    assert copied == [total] * 3 + [without_frozen] + [_array(0).nbytes] * 5 + [without_frozen] * 3
    assert min(shared[3:]) > frozen.nbytes and min(shared[4:9]) > frozen.nbytes + 2_800_000


def test_a_job_that_goes_on_shares_files_of_the_one_before(tmp_path: pathlib.Path) -> None:
    """Its first save finds the frozen arrays in the files of an earlier step, by the checksums of their blocks."""
    run, values, shared, expected = tmp_path / "run", np.arange(700_000, dtype=np.float32), [], {}
    for job in range(3):
        with tr.Checkpointer(run) as ckpts:
            frozen = [jnp.asarray(values), jnp.asarray(values[:300_000])]
            for step in range(6 * job, 6 * job + 6):
                expected[step] = {"frozen": frozen, "n": jnp.full(400_000, step), "step": step}
                pending = ckpts.save(step, expected[step])
                assert pending
                shared.append(pending.result().shared_bytes > values.nbytes)
    _check(run, expected)
    assert shared == [False] * 3 + [True] * 15


def test_a_save_with_the_files_of_another_checkpoint(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """`base=` shares each file whose bytes are the same. All others are written, whatever has happened to the base."""
    base, tree = tmp_path / "base", {"w": jnp.arange(600_000), "n": 1}
    first = tr.save(base, tree)
    again = tr.save(tmp_path / "again", {**tree, "n": 2}, base=tr.open(base))
    assert again.shared_bytes > 2_400_000 > first.shared_bytes == 0 and again.nbytes - again.shared_bytes < 4096
    assert tr.save(base, tree, base=base, overwrite=True).shared_bytes == again.shared_bytes
    other = {"w": tree["w"].at[-1].add(1), "n": 2}
    for changed in (other, {"w": tree["w"].astype(jnp.float32)}, {"v": tree["w"]}):
        assert not tr.save_async(tmp_path / "other", changed, base=base, overwrite=True).result().shared_bytes
        assert all(np.array_equal(tr.restore(tmp_path / "other")[name], changed[name]) for name in changed)
    for file in base.glob("arrays-*"):
        _append(file)
    assert not tr.save(tmp_path / "other", tree, base=base, overwrite=True).shared_bytes
    assert "not shared, and its arrays are written again: block 2 is damaged" in caplog.text
    shutil.rmtree(base)
    with pytest.raises(NotFoundError, match="expected a checkpoint in the native format, found none"):
        tr.save(tmp_path / "new", tree, base=base)
    with pytest.raises(MismatchError, match="leave out base= or save the tree as it is"):
        tr.save(tmp_path / "new", tree, base=tmp_path / "again", rules=[tr.rules.rename("w", "v")])
    assert not (tmp_path / "new").exists()


class _BadSector(Disk):
    """Cannot read the arrays in the files of the first job."""

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "arrays-" in path and any(f"step-{n:08}" in path for n in range(6)) and offset >= 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().read(fd, into, offset)


def test_what_a_job_cannot_share_with_the_one_before(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files with bad sectors are not shared, nor are more files than a process should open. The save succeeds."""
    tree = {"frozen": jnp.arange(700_000, dtype=jnp.float32), "n": jnp.ones(400_000)}
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in range(6):
            ckpts.save(step, {**tree, "n": tree["n"] * step})
    use_disk(_BadSector())
    for step, limit in ((6, 64), (7, 0)):
        monkeypatch.setattr(save_reuse, "_MAX_SHARED_FILES", limit)
        with tr.Checkpointer(tmp_path / "run") as ckpts:
            pending = ckpts.save(step, tree)
            assert pending and not pending.result().shared_bytes
    assert "not shared, and its arrays are written again" in caplog.text
    assert np.array_equal(tr.restore(tmp_path / "run")["frozen"], tree["frozen"])


def test_a_step_is_deleted_right_before_it_is_shared(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """The bytes are copied from the open file, and later saves share again."""

    class Deleting(Disk):
        left = 1

        def hard_link(self, old: str, new: str) -> bool:
            if "arrays-" in old and self.left:
                self.left = 0
                shutil.rmtree(os.path.dirname(old))
            return super().hard_link(old, new)

    use_disk(Deleting())
    run, frozen, shared = tmp_path / "run", _array(1), []
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 9):
            pending = ckpts.save(step, {"frozen": frozen, "n": step})
            assert pending
            shared.append(pending.result().shared_bytes > 0)
    assert shared == [False] * 3 + [True] * 5
    assert tr.verify(run).ok and np.array_equal(tr.restore(run, step=3)["frozen"], frozen)


def test_a_base_on_an_accelerator(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies fit the memory limit, so they can be compared."""
    accelerator.install(monkeypatch)
    tree = {"w": jnp.arange(600_000)}
    tr.save(tmp_path / "base", tree)
    assert tr.save(tmp_path / "again", tree, base=tmp_path / "base").shared_bytes
