"""Tests `save` and `save_async`, and their errors."""

import collections
import dataclasses
import errno
import gc
import logging
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tracemalloc
import types
import weakref
from typing import Any

import flax
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

import treering as tr
from treering import stores
from treering._pytree import leaves
from treering._save import layout
from treering._save import plan as planning
from treering.stores.posix import Disk
from treering.testing import _doubles as doubles
from treering.testing._doubles import HeldDisk


class FailingDisk(Disk):
    """Fails one operation from some call on, like a full or broken disk. A directory sync fails only once."""

    def __init__(self, operation: str, code: int, after: int = 0):
        self.operation, self.code, self.left = operation, code, after

    def __getattribute__(self, name: str) -> Any:
        if name != "operation" and name == object.__getattribute__(self, "operation"):
            self.left -= 1
            if self.left == -1 or (self.left < 0 and name != "sync_dir"):
                raise OSError(self.code, os.strerror(self.code))
        return object.__getattribute__(self, name)


def everything(path: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_report_and_what_is_recorded(tmp_path: pathlib.Path) -> None:
    report = tr.save(
        tmp_path / "a" / "b", {"x": jnp.ones(3)}, step=7, metrics={"loss": jnp.float32(0.5)}, metadata={"lr": (1, 2)}
    )
    assert report.path == str(tmp_path / "a" / "b")
    assert report.nbytes == sum(p.stat().st_size for p in (tmp_path / "a" / "b").iterdir())
    assert 0 < report.stall_seconds <= report.seconds
    ckpt = tr.open(tmp_path / "a" / "b")
    assert (ckpt.step, ckpt.metrics, ckpt.metadata) == (7, {"loss": 0.5}, {"lr": [1, 2]})
    assert ckpt.nbytes == report.nbytes


def test_relative_paths_and_pathlike(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pending = tr.save_async("here", {"x": np.ones(3)})
    monkeypatch.chdir("/")
    pending.result()
    assert tr.open(tmp_path / "here").path == str(tmp_path / "here")
    assert tr.open(os.fsencode(tmp_path / "here"))["x"].shape == (3,)


# A save writes the values that the arrays had at the call


@pytest.mark.long
@pytest.mark.whole
def test_donation_right_after_the_call_changes_nothing(tmp_path: pathlib.Path, use_disk: Any) -> None:
    disk = use_disk(HeldDisk())
    state = {"w": jnp.arange(1 << 20, dtype=jnp.float32), "n": jnp.zeros((), jnp.int32)}
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    pending = tr.save_async(tmp_path / "c", state)
    for _ in range(3):
        state = jax.block_until_ready(step(state))
    disk.go.set()
    pending.result()
    found = tr.restore(tmp_path / "c")
    np.testing.assert_array_equal(found["w"], np.arange(1 << 20, dtype=np.float32))
    assert found["n"] == 0


def test_arrays_may_be_deleted_after_the_call(tmp_path: pathlib.Path, use_disk: Any) -> None:
    disk = use_disk(HeldDisk())
    state = {"x": jnp.arange(1 << 16)}
    pending = tr.save_async(tmp_path / "c", state)
    state["x"].delete()
    disk.go.set()
    pending.result()
    np.testing.assert_array_equal(tr.restore(tmp_path / "c")["x"], np.arange(1 << 16))


def test_numpy_leaves_may_change_after_the_call(tmp_path: pathlib.Path, use_disk: Any) -> None:
    disk = use_disk(HeldDisk())
    state = {"a": np.zeros(1000), "t": np.zeros((30, 40), np.int16).T, "list": [1, 2]}
    pending = tr.save_async(tmp_path / "c", state)
    state["a"] += 1
    state["t"] += 1
    state["list"].append(3)
    state["new"] = 1
    disk.go.set()
    pending.result()
    found = tr.restore(tmp_path / "c")
    assert set(found) == {"a", "t", "list"} and found["list"] == [1, 2]
    assert not found["a"].any() and not found["t"].any()


@pytest.mark.long
def test_the_accelerator_path_copies_before_it_returns(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without an accelerator, CPU arrays are treated as device arrays, so that they are copied through pinned memory.
    from treering._pytree import devices

    monkeypatch.setattr(leaves, "on_host", lambda sharding: False)
    monkeypatch.setattr(devices, "_pinned", lambda sharding: sharding.with_memory_kind("pinned_host"))
    disk = use_disk(HeldDisk())
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices())
    spread = jax.device_put(np.arange(64.0, dtype=np.float32), jax.NamedSharding(mesh, jax.P("x")))
    state = {"w": jnp.arange(4096.0), "spread": spread, "dropped": jnp.ones(7)}
    dropped = weakref.ref(state["dropped"])
    pending = tr.save_async(tmp_path / "c", state)
    del state["dropped"]
    gc.collect()
    assert dropped() is None, "a state that is not donated would stay in the device's memory"
    for leaf in state.values():
        leaf.delete()
    disk.go.set()
    pending.result()
    found = tr.restore(tmp_path / "c")
    np.testing.assert_array_equal(found["w"], np.arange(4096.0, dtype=np.float32))
    np.testing.assert_array_equal(found["spread"], np.arange(64.0, dtype=np.float32))


# Order, waiting, failures


def test_saves_are_committed_in_order(tmp_path: pathlib.Path, use_disk: Any) -> None:
    disk = use_disk(HeldDisk())
    pending = [tr.save_async(tmp_path / str(n), {"x": np.full(1 << (18 - 2 * n), n)}) for n in range(4)]
    assert not any(p.done() for p in pending)
    with pytest.raises(TimeoutError):
        pending[0].result(timeout=0.01)
    disk.go.set()
    pending[-1].result()
    assert all(p.done() for p in pending)
    times = [(tmp_path / str(n) / "treering.json").stat().st_mtime_ns for n in range(4)]
    assert times == sorted(times)


def test_an_interrupted_save_lets_no_later_one_overtake(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """Ctrl-C ends a save that waits for an earlier one. The save after it still waits for the earlier one."""

    class HoldsFirst(HeldDisk):
        def create(self, path: str) -> int:
            return super().create(path) if "/first" in path else Disk.create(self, path)

    disk = use_disk(HoldsFirst())
    first = tr.save_async(tmp_path / "first", {"x": np.ones(3)})
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        tr.save(tmp_path / "interrupted", {"x": np.ones(3)})
    timer.join()
    last = tr.save_async(tmp_path / "last", {"x": np.ones(3)})
    with pytest.raises(TimeoutError):
        last.result(timeout=0.5)
    assert not first.done()
    disk.go.set()
    last.result()
    assert first.done() and sorted(os.listdir(tmp_path)) == ["first", "last"]


def test_a_failure_in_the_background_raises_at_the_next_call(tmp_path: pathlib.Path, use_disk: Any) -> None:
    use_disk(FailingDisk("sync", errno.EIO))
    pending = tr.save_async(tmp_path / "a", {"x": np.ones(3)})
    pending._finished.wait()
    stores.register(stores.Filesystem(Disk()))
    with pytest.raises(tr.errors.SaveError, match="Input/output error"):
        tr.save(tmp_path / "b", {"x": np.ones(3)})
    tr.save(tmp_path / "b", {"x": np.ones(3)})


def test_a_failure_in_the_background_raises_from_the_result(tmp_path: pathlib.Path, use_disk: Any) -> None:
    use_disk(FailingDisk("write", errno.ENOSPC))
    pending = tr.save_async(tmp_path / "a", {"x": np.ones(3)})
    with pytest.raises(tr.errors.SaveError, match=f"{tmp_path}/a.*No space left") as caught:
        pending.result()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.long
def test_leaving_the_program_finishes_the_save(tmp_path: pathlib.Path) -> None:
    done = run(
        """
        import sys, numpy as np, treering as tr
        for n in range(3):
            tr.save_async(f"{sys.argv[1]}/{n}", {"x": np.full((1 << 22,), n)})
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert [tr.restore(tmp_path / str(n))["x"][-1] for n in range(3)] == [0, 1, 2]


@pytest.mark.long
def test_unraised_failure_is_printed_at_exit(tmp_path: pathlib.Path) -> None:
    """The error of a background save that no call raises is printed at exit."""
    done = run(
        """
        import resource, signal, sys, numpy as np, treering as tr
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        tr.save_async(sys.argv[1] + "/x", {"x": np.ones(1 << 20)})
        """,
        tmp_path,
    )
    assert f"a save in the background failed: {tmp_path}/x" in done.stderr
    assert "Traceback" in done.stderr and "File too large" in done.stderr
    assert everything(tmp_path) == []


def test_a_masked_metric_is_nan(tmp_path: pathlib.Path) -> None:
    """`numpy.ma.masked` has the number 0 below its mask, which would be the best loss of a run."""
    hidden = np.ma.array([1.0, 2.0], mask=True)
    metrics = {"mean": hidden.mean(), "one": hidden[0], "seen": np.ma.array(2.0)}
    tr.save(tmp_path / "c", {"x": 1}, metrics=metrics)
    found = tr.open(tmp_path / "c").metrics
    assert np.isnan(found["mean"]) and np.isnan(found["one"]) and found["seen"] == 2


@pytest.mark.parametrize("first", [False, True])
def test_a_save_in_a_function_of_atexit(tmp_path: pathlib.Path, first: bool) -> None:
    """Python has waited for threads by then, those that upload too. It calls what was registered first last."""
    done = run(
        f"""
        import atexit, sys
        def end():
            ckpts.save(2, {{"x": np.ones(1 << 20)}})
            tr.save_async(sys.argv[1] + "/x", {{"x": np.ones(1 << 20)}})
        {"atexit.register(end)" if first else ""}
        import numpy as np, treering as tr
        ckpts = tr.Checkpointer(sys.argv[1] + "/run", local=sys.argv[1] + "/local", upload_limit=2e7)
        ckpts.save(1, {{"x": np.ones(3)}})
        {"" if first else "atexit.register(end)"}
        """,
        tmp_path,
    )
    if "more are allowed here" not in done.stderr:  # Python 3.12 and later start no threads then.
        assert (tr.steps(tmp_path / "run"), tr.open(tmp_path / "x")["x"].shape) == ([1, 2], (1 << 20,)), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_while_saving_leaves_nothing_half_done(tmp_path: pathlib.Path, background: bool) -> None:
    done = run(
        """
        import os, signal, sys, threading, numpy as np, treering as tr
        from treering import stores
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the test runner may ignore SIGINT
        class Disk(stores.Disk):
            def preallocate(self, fd, size):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.3)
        stores.register(stores.Filesystem(Disk()))
        try:
            if sys.argv[2] == "True":
                tr.save_async(sys.argv[1] + "/x", {"x": np.ones(1 << 20)}).result()
            else:
                tr.save(sys.argv[1] + "/x", {"x": np.ones(1 << 20)})
        except KeyboardInterrupt:
            print("interrupted", os.path.exists(sys.argv[1] + "/x"))
        """,
        tmp_path,
        background,
    )
    assert done.stdout.startswith("interrupted"), done.stderr
    if background:  # Only the wait was interrupted, so the save continues.
        assert tr.verify(tmp_path / "x").ok
    else:
        assert done.stdout == "interrupted False\n" and everything(tmp_path) == []


def test_ctrl_c_at_start_of_save_thread_is_raised_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in `Thread.start`, after the thread has begun, fails the save. No later call raises that error again."""
    gate, begun, start = threading.Event(), list[threading.Thread](), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "treering-save":
            return start(thread)
        begun.append(threading.Thread(target=lambda: (gate.wait(30), thread.run())))
        start(begun[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tr.save_async(tmp_path / "x", {"x": np.ones(3)})
    gate.set()
    begun[0].join(30)
    assert everything(tmp_path) == []
    tr.save(tmp_path / "x", {"x": np.ones(3)})  # does not raise the earlier error again


# Memory in flight


class Watcher(Disk):
    """Records the bytes of copies that are held at each write."""

    def __init__(self) -> None:
        self.feed: Any = None
        self.held: list[int] = []

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self.held.append(self.feed._held_bytes)
        super().write(fd, data, offset)


@pytest.mark.long
@pytest.mark.parametrize("limit", [1, 10_000_000, None])
def test_no_more_than_the_memory_limit_is_in_flight(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    watcher = use_disk(Watcher())
    make = planning.StagedSupply

    def feed(*args: Any) -> Any:
        watcher.feed = make(*args)
        return watcher.feed

    monkeypatch.setattr(planning, "StagedSupply", feed)
    sizes = [3_000_000, 5_000_000, 100, 9_000_000, 12_345_677, 8, 0, 4_000_000]
    tree = {str(n): np.full(size, n, np.uint8) for n, size in enumerate(sizes)}
    tr.save_async(tmp_path / "c", tree, memory_limit=limit).result()
    for n, size in enumerate(sizes):
        np.testing.assert_array_equal(tr.restore(tmp_path / "c")[str(n)], np.full(size, n, np.uint8))
    if limit is not None:
        assert max(watcher.held) <= max(limit, max(sizes))
    assert watcher.feed._held_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("format", ["treering", "safetensors", "flax", "orbax", "equinox", "t5x", "levanter"])
def test_the_memory_limit_holds_with_rules_and_in_other_formats(
    tmp_path: pathlib.Path, background: bool, format: str
) -> None:
    tree = {f"w{n:02}": np.ones((2 << 20, 2), np.float32)[:, 0] for n in range(60)}  # 8 MiB each, once copied
    rules = [tr.rules.rename("w(..)", r"v\1")]
    save = tr.save_async if background else tr.save
    tracemalloc.start()
    try:
        found = save(
            tmp_path / f"c{'.eqx' if format == 'equinox' else ''}",
            tree,
            format=format,
            rules=rules,
            memory_limit=16 << 20,
        )
        for array in tree.values():
            array[:] = 2  # the checkpoint must not have this value
        if background:
            found.result()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 240 << 20  # Not 480 MiB. Threads and encoded values come on top of the limit.
    (path,) = tmp_path.iterdir()
    assert all((np.asarray(value) == 1).all() for value in tr.open(path).values())


# Bad input


def test_save_names_every_unsupported_leaf(tmp_path: pathlib.Path) -> None:
    """The error names every leaf that cannot be saved, and nothing is written."""
    tree = {"good": np.ones(3), "bad": [object(), {"x": np.array([{}])}], "s": jax.ShapeDtypeStruct((2,), "float32")}
    for save in (tr.save, tr.save_async):
        with pytest.raises(tr.errors.UnsupportedError) as caught:
            save(tmp_path / "new" / "c", tree)
        message = str(caught.value)
        assert "3 of 4 leaves" in message
        assert all(f"\n  {path}: " in message for path in ("bad/0", "bad/1/x", "s"))
    assert everything(tmp_path) == []


@dataclasses.dataclass
class _Config:
    path: pathlib.Path
    layers: Any
    rate: Any = 0.5


_Version = collections.namedtuple("_Version", "major minor")
_CONFIG = ml_collections.ConfigDict({"width": ml_collections.config_dict.required_placeholder(int)})


class NestedSummary:
    """As wandb's `SummarySubDict`: every attribute is a key."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


LOOP: list[Any] = []
LOOP.append(LOOP)
DICT_LOOP: dict[str, Any] = {}
DICT_LOOP["a"] = DICT_LOOP


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"step": -1}, "step=-1: expected an integer from 0 to"),
        ({"step": 1.5}, "step=1.5: expected an integer"),
        ({"metrics": {"eval": NestedSummary()}}, r"metrics\['eval'\]: expected a name and a real scalar"),
        ({"metrics": {"loss": np.ones(3)}}, r"metrics\['loss'\]: expected a name and a real scalar"),
        ({"metadata": {"a": [1, {2: 3}]}}, r"metadata\['a'\]\[1\]: the key 2 has the type int"),
        ({"metadata": {"a": object()}}, r"metadata\['a'\]: an object is not JSON"),
        ({"metadata": LOOP}, "within itself"),
        ({"metadata": DICT_LOOP}, "within itself"),
        (
            {"metadata": {"w": [np.ones((2, 3))]}},
            r"metadata\['w'\]\[0\]: an array of shape \[2, 3\] is not JSON; .* tree",
        ),
        ({"metadata": {"w": jax.random.key(0)}}, r"metadata\['w'\]: a PRNGKeyArray is not JSON"),
        ({"metadata": [np.complex64(1), 1]}, r"metadata\[0\]: a complex64 is not JSON"),
        ({"metadata": np.longdouble(1)}, "metadata: a longdouble is not JSON"),
        ({"metadata": [b"abc"]}, r"metadata\[0\]: a bytes is not JSON"),
        ({"metadata": {"a": np.ma.masked}}, r"metadata\['a'\]: a MaskedConstant is not JSON"),
        ({"metadata": [_Config]}, r"metadata\[0\]: a type is not JSON"),
        ({"metadata": _CONFIG}, "metadata: None value found in required reference"),
        ({"metadata": ml_collections.ConfigDict({"a": {1: 2}})}, r"metadata\['a'\]: the key 1 has the type int"),
        ({"metadata": "\ud800"}, "valid Unicode"),
        ({"metadata": 2**64}, "beyond 64 bits"),
        ({"metadata": -(2**63) - 1}, "beyond 64 bits"),
        ({"metrics": {"loss": None}}, "real scalar"),
        ({"metrics": {"loss": "0.5"}}, "real scalar"),
        ({"metrics": {"loss": [[1.0], [1.0, 2.0]]}}, "real scalar"),
        ({"metrics": "loss"}, "metrics='loss': expected a dict of names and real scalars"),
        ({"metrics": {"loss": 1j}}, "real scalar"),
        ({"dtype": "int32"}, "expected a floating-point dtype"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: pathlib.Path, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(tr.errors.TreeringError, match=error):
        tr.save(tmp_path / "c", {"x": np.ones(3)}, **arguments)
    assert everything(tmp_path) == []


def test_metadata_may_be_what_configurations_are_made_of(tmp_path: pathlib.Path) -> None:
    """Metadata may have dataclasses, ConfigDicts, paths and scalars, and restores as JSON values."""
    config = ml_collections.ConfigDict(
        {"model": {"width": 8, "name": ml_collections.FieldReference("gpt")}, "to": (1,)}
    )
    config.model.depth = config.model.get_ref("width") * 2
    numbers = [
        np.int64(3),
        np.float32(0.1),
        jnp.float32(0.5),
        jnp.bfloat16(2),
        np.array(True),
        np.str_("x"),
        jnp.int4(-3),
    ]
    inner = _Config(pathlib.PurePosixPath("a/b"), [_Config(tmp_path, None)], types.MappingProxyType({"x": (1, [2])}))
    metadata = {
        "config": config,
        "frozen": ml_collections.FrozenConfigDict(config),
        "data": inner,
        "numbers": numbers,
        "others": collections.UserList([_Version(1, 2), flax.core.freeze({"a": 1})]),
    }
    tr.save(tmp_path / "c", {"x": 1}, metadata=metadata)
    plain = {"model": {"width": 8, "name": "gpt", "depth": 16}, "to": [1]}
    assert tr.open(tmp_path / "c").metadata == {
        "config": plain,
        "frozen": plain,
        "data": {
            "path": "a/b",
            "layers": [{"path": str(tmp_path), "layers": None, "rate": 0.5}],
            "rate": {"x": [1, [2]]},
        },
        "numbers": [3, float(np.float32(0.1)), 0.5, 2.0, True, "x", -3],
        "others": [{"major": 1, "minor": 2}, {"a": 1}],
    }
    with tr.Checkpointer(tmp_path / "run", metadata=config) as ckpts:
        ckpts.save(1, {"x": 1}, metadata={"to": _Version(3, 4)})
        assert ckpts.open(1).metadata == {**plain, "to": {"major": 3, "minor": 4}}


def test_dtype_casts_floats_alone(tmp_path: pathlib.Path) -> None:
    tree = {"w": jnp.full((3,), 1.1), "n": jnp.arange(3), "d": np.full((3,), 1.1), "f": 1.1}
    tr.save(tmp_path / "c", tree, dtype=jnp.bfloat16)
    found = tr.restore(tmp_path / "c")
    assert found["w"].dtype == found["d"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["w"], np.asarray(tree["w"].astype(jnp.bfloat16)))
    assert found["n"].dtype == np.int32 and found["f"] == 1.1


def test_an_existing_checkpoint_is_replaced_only_when_asked(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"x": np.zeros(3)})
    before = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()}
    with pytest.raises(tr.errors.ExistsError, match="pass overwrite=True"):
        tr.save(tmp_path / "c", {"x": np.ones(3)})
    assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} == before
    tr.save(tmp_path / "c", {"y": np.ones(3)}, overwrite=True)
    assert list(tr.restore(tmp_path / "c")) == ["y"]
    assert len(everything(tmp_path / "c")) == 2


def test_paths_in_use_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("x")
    for path, what in [("file", "a file"), ("folder", "thesis.tex"), ("file/below", "is a file")]:
        for overwrite in (False, True):
            with pytest.raises(tr.errors.ExistsError, match=what):
                tr.save(tmp_path / path, {"x": np.ones(3)}, overwrite=overwrite)
    assert everything(tmp_path) == ["file", "folder", "folder/thesis.tex"]
    (tmp_path / "empty").mkdir()
    tr.save(tmp_path / "empty", {"x": np.ones(3)})


@pytest.mark.long
@pytest.mark.whole
def test_a_dangling_link_is_an_error_and_no_endless_loop(tmp_path: pathlib.Path) -> None:
    """A path through a dangling link raises an error and does not loop."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "c")
    with pytest.raises(tr.errors.SaveError, match="No such file"):
        tr.save(tmp_path / "link", {"x": np.ones(3)})


def test_foreign_files_in_a_checkpoint_survive_an_overwrite(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"x": np.zeros(3)})
    (tmp_path / "c" / "notes.txt").write_text("good run")
    tr.save(tmp_path / "c", {"x": np.ones(3)}, overwrite=True)
    assert (tmp_path / "c" / "notes.txt").read_text() == "good run"


@pytest.mark.long
def test_save_race_for_new_path_has_one_winner(tmp_path: pathlib.Path) -> None:
    """Two processes save to a new path at once: one commits, and the other raises ExistsError."""
    code = """
        import sys, numpy as np, treering as tr
        from treering.formats.treering.commit import Transaction
        commit = Transaction.commit
        def late(self, data, *rest):
            print("ready", flush=True)
            sys.stdin.readline()
            commit(self, data, *rest)
        Transaction.commit = late
        try:
            tr.save(sys.argv[1], {"who": int(sys.argv[2])})
            print("won")
        except tr.errors.ExistsError as error:
            print("lost", error)
        """
    path = tmp_path / "c"
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    pipe = subprocess.PIPE
    writers = [subprocess.Popen([*command, str(n)], stdin=pipe, stdout=pipe, text=True) for n in range(2)]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
    outputs = [writer.communicate("go\n", timeout=60)[0] for writer in writers]
    assert outputs[0] == "won\n"
    assert outputs[1].startswith("lost") and "another writer" in outputs[1]
    assert tr.restore(path) == {"who": 0}
    assert len(everything(path)) == 1  # The tree has no arrays, so only a manifest is written.


@pytest.mark.parametrize("operation", ["create", "preallocate", "write", "truncate", "sync", "sync_dir", "link"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_full_or_broken_disk_leaves_nothing_behind(
    tmp_path: pathlib.Path, use_disk: Any, operation: str, code: int
) -> None:
    for after in range(6):
        use_disk(FailingDisk(operation, code, after))
        pending = tr.save_async(tmp_path / "new" / "c", {"x": np.ones(1 << 20)})
        if pending._finished.wait() and not pending._error:
            break
        with pytest.raises(tr.errors.SaveError, match=os.strerror(code)) as caught:
            pending.result()
        assert isinstance(caught.value.__cause__, OSError)
        assert everything(tmp_path) == []
    assert after > 0
    assert tr.verify(tmp_path / "new" / "c").ok


@pytest.mark.parametrize("operation", ["create", "preallocate", "write", "truncate", "sync", "sync_dir", "rename"])
def test_a_failed_overwrite_leaves_the_old_checkpoint(tmp_path: pathlib.Path, use_disk: Any, operation: str) -> None:
    for after in range(8):
        stores.register(stores.Filesystem(Disk()))
        tr.save(tmp_path / "c", {"x": np.zeros(1000)}, overwrite=after > 0)
        use_disk(FailingDisk(operation, errno.ENOSPC, after))
        try:
            tr.save(tmp_path / "c", {"x": np.ones(1000)}, overwrite=True)
        except tr.errors.SaveError:
            assert tr.verify(tmp_path / "c").ok
            assert tr.restore(tmp_path / "c")["x"][0] == 0 or operation == "sync_dir"
        else:
            break
    assert after > 0
    stores.register(stores.Filesystem(Disk()))
    assert tr.restore(tmp_path / "c")["x"][0] == 1
    tr.save(tmp_path / "c", {"x": np.ones(1000)}, overwrite=True)  # removes what the failing disk could not remove
    assert len(everything(tmp_path / "c")) == 2


@pytest.mark.long
def test_a_really_full_file_system_names_the_cause(tmp_path: pathlib.Path) -> None:
    done = run(
        """
        import resource, signal, sys, numpy as np, treering as tr
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tr.save(sys.argv[1], {"x": np.zeros(10)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            tr.save(sys.argv[1], {"x": np.ones(1 << 20)}, overwrite=True)
        except tr.errors.SaveError as error:
            print(error)
        print(tr.restore(sys.argv[1])["x"].sum())
        """,
        tmp_path / "c",
    )
    assert "File too large" in done.stdout and done.stdout.endswith("0.0\n"), done.stderr
    assert len(everything(tmp_path / "c")) == 2


def test_a_read_only_directory_names_the_cause(tmp_path: pathlib.Path) -> None:
    if os.geteuid() == 0:  # Root may write anywhere except on a read-only file system of the kernel.
        target = pathlib.Path("/proc/sys/treering")
    else:
        target = tmp_path / "ro" / "c"
        target.parent.mkdir(mode=0o555)
    with pytest.raises(tr.errors.SaveError, match=r"Permission denied|No such file|Operation not permitted|Read-only"):
        tr.save(target, {"x": np.ones(3)})


@pytest.mark.long
def test_a_forked_child_does_not_wait_for_its_parents_saves(tmp_path: pathlib.Path) -> None:
    done = run(
        """
        import os, sys, threading, numpy as np, treering as tr
        from treering import stores
        go = threading.Event()
        class Disk(stores.Disk):
            def create(self, path):
                go.wait()
                return super().create(path)
        stores.register(stores.Filesystem(Disk()))
        tr.save_async(sys.argv[1] + "/parent", {"x": 1})
        child = os.fork()
        if not child:
            stores.register(stores.Filesystem(stores.Disk()))
            tr.save(sys.argv[1] + "/child", {"x": 2})
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        go.set()
        """,
        tmp_path,
    )
    assert done.stdout == "0\n", done.stderr
    assert tr.restore(tmp_path / "child") == {"x": 2}
    assert tr.restore(tmp_path / "parent") == {"x": 1}


@pytest.mark.parametrize("operation", ["create", "preallocate", "write", "truncate", "sync"])
def test_a_caller_that_waits_for_room_hears_of_every_failure(
    tmp_path: pathlib.Path, use_disk: Any, operation: str
) -> None:
    """A caller that waits for room raises every failure of its save, and does not hang."""
    tree = {str(n): np.full(1000, n) for n in range(50)}
    use_disk(FailingDisk(operation, errno.ENOSPC))
    with pytest.raises(tr.errors.SaveError, match="No space left"):
        tr.save_async(tmp_path / "c", tree, memory_limit=10_000).result()
    stores.register(stores.Filesystem(Disk()))
    tr.save_async(tmp_path / "same", tree, memory_limit=10_000)
    with pytest.raises(tr.errors.ExistsError):
        tr.save_async(tmp_path / "same", tree, memory_limit=10_000).result()


def test_metrics_and_metadata_are_those_of_the_call(tmp_path: pathlib.Path, use_disk: Any) -> None:
    disk = use_disk(HeldDisk())
    metadata, loss, acc = {"position": [1]}, np.array(0.5), jnp.float32(2)
    pending = tr.save_async(tmp_path / "c", {"x": 1}, metrics={"loss": loss, "acc": acc}, metadata=metadata)
    metadata["position"].append(float("nan"))
    loss += 7
    acc.delete()
    disk.go.set()
    pending.result()
    ckpt = tr.open(tmp_path / "c")
    assert ckpt.metadata == {"position": [1]} and ckpt.metrics == {"loss": 0.5, "acc": 2.0}


@pytest.mark.long
def test_a_failed_save_keeps_no_arrays_alive(tmp_path: pathlib.Path, use_disk: Any) -> None:
    use_disk(FailingDisk("sync", errno.EIO))
    big = jnp.ones(1 << 20)
    alive = weakref.ref(big)
    pending = tr.save_async(tmp_path / "c", {"x": big, "y": np.ones(10)})
    with pytest.raises(tr.errors.SaveError) as caught:
        pending.result()
    del big
    gc.collect()
    assert alive() is None
    del caught, pending


def test_an_array_file_that_vanishes_fails_the_save(tmp_path: pathlib.Path, use_disk: Any) -> None:
    class Meddled(Disk):
        """Another program removes the array file, as on a file system without locks between hosts."""

        def sync(self, fd: int) -> None:
            super().sync(fd)
            for path in (tmp_path / "c").glob("arrays-*"):
                path.unlink()

    use_disk(Meddled())
    with pytest.raises(tr.errors.SaveError, match="removed by another program"):
        tr.save(tmp_path / "c", {"x": np.ones(3)})
    assert tr.steps(tmp_path) == [] and everything(tmp_path) == []


def test_what_no_reader_would_take_is_not_committed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save checks its own manifest, and does not commit one that readers would refuse."""
    tr.save(tmp_path / "c", {"x": jnp.ones(8)})
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P("a")))
    # A mock: a defect of the writer that no other check finds.
    monkeypatch.setattr(layout, "sharding_to_json", lambda sharding: {"mesh": {"a": 0}, "spec": []})
    for path in (tmp_path / "c", tmp_path / "new"):
        with pytest.raises(tr.errors.UnsupportedError, match=rf"{path}: expected a tree that can be read back, .*mesh"):
            tr.save(path, {"x": x}, overwrite=True)
    monkeypatch.undo()
    assert everything(tmp_path) == sorted(["c", *(f"c/{name}" for name in os.listdir(tmp_path / "c"))])
    assert len(os.listdir(tmp_path / "c")) == 2 and (tr.restore(tmp_path / "c")["x"] == np.ones(8)).all()


def test_a_commit_whose_answer_was_lost_is_a_commit(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """A save succeeds if its manifest is in place although the link failed."""

    class Network(Disk):
        def link(self, old: str, new: str) -> None:
            super().link(old, new)
            raise FileExistsError(errno.EEXIST, "the second try found what the first had done")

    use_disk(Network())
    tr.save(tmp_path / "c", {"x": np.ones(3)})
    assert tr.verify(tmp_path / "c").ok and len(everything(tmp_path / "c")) == 2


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_systems_without_locks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for n in range(2):
        tr.save(tmp_path / "c", {"x": np.full(3, n)}, overwrite=True)
    assert tr.restore(tmp_path / "c")["x"][0] == 1


def test_what_fails_after_the_commit_is_no_failed_save(tmp_path: pathlib.Path, use_disk: Any, caplog: Any) -> None:
    """An error after the commit is logged and not raised."""
    tr.save(tmp_path / "c", {"x": np.zeros(3)})
    use_disk(FailingDisk("unlink", errno.EACCES))
    tr.save(tmp_path / "c", {"x": np.ones(3)}, overwrite=True)
    assert tr.restore(tmp_path / "c")["x"][0] == 1 and "tidying up failed" in caplog.text


def test_an_overwrite_that_may_not_be_durable_says_so(tmp_path: pathlib.Path, use_disk: Any) -> None:
    tr.save(tmp_path / "c", {"x": np.zeros(3)})

    class Unsure(Disk):
        def sync_dir(self, path: str) -> None:
            if tr.restore(tmp_path / "c")["x"][0] == 1:
                raise OSError(errno.EIO, "Input/output error")

    use_disk(Unsure())
    with pytest.raises(tr.errors.SaveError, match="in place, but the disk failed to make that durable"):
        tr.save(tmp_path / "c", {"x": np.ones(3)}, overwrite=True)
    # A power cut may leave either manifest, so the arrays of both stay.
    assert len(list((tmp_path / "c").glob("arrays-*"))) == 2


@pytest.mark.long
def test_abort_does_not_remove_what_another_committed(tmp_path: pathlib.Path, use_disk: Any) -> None:
    class Race(Disk):
        raced = False

        def link(self, old: str, new: str) -> None:
            super().link(old, new)
            stores.register(stores.Filesystem(Disk()))
            tr_save = native_save(tmp_path / "c", {"x": np.ones(3)})
            assert tr_save
            self.raced = True

        def sync_dir(self, path: str) -> None:
            if self.raced:
                raise OSError(errno.EIO, "Input/output error")
            super().sync_dir(path)

    use_disk(Race())
    with pytest.raises(tr.errors.SaveError):
        tr.save(tmp_path / "c", {"x": np.zeros(3)})
    assert tr.restore(tmp_path / "c")["x"][0] == 1


def native_save(path: pathlib.Path, tree: Any) -> bool:
    """Overwrites from another process, because the saves of one process run one after another."""
    code = "import sys, numpy as np, treering as tr; tr.save(sys.argv[1], {'x': np.ones(3)}, overwrite=True)"
    return subprocess.run([sys.executable, "-c", code, str(path)], timeout=60).returncode == 0


def test_a_users_own_empty_directory_stays_as_it_is(tmp_path: pathlib.Path, use_disk: Any) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    before = (tmp_path / "mine").stat()
    use_disk(FailingDisk("sync", errno.EIO))
    with pytest.raises(tr.errors.SaveError):
        tr.save(tmp_path / "mine", {"x": np.ones(3)})
    stores.register(stores.Filesystem(Disk()))
    tr.save(tmp_path / "mine", {"x": np.ones(3)})
    after = (tmp_path / "mine").stat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)


def test_log_handler_that_raises_fails_no_save(tmp_path: pathlib.Path) -> None:
    """A log handler that raises does not fail a save."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError

    logger, handler = logging.getLogger("treering"), Broken()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        tr.save(tmp_path / "c", {"x": 1})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.long
def test_save_works_with_fewer_threads(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """If the system starts no more threads, fewer threads do the work. No thread is left over."""
    real, started = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        started.append(self)
        if len(started) == limit:
            raise RuntimeError("can't start new thread")
        real(self)

    for limit in (1, 2, 3):
        started.clear()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            if limit == 1:  # not even the writing thread can start
                with pytest.raises(tr.errors.SaveError, match=r"no more are allowed .*start new thread.*ulimit -u"):
                    tr.save(tmp_path / "c", {"x": np.ones(3)})
            else:
                tr.save(tmp_path / f"c-{limit}", {"x": np.ones(3_000_000)})
        for thread in started[: limit - 1]:
            thread.join(10)
            assert not thread.is_alive()
    tr.save(tmp_path / "c", {"x": np.ones(3)})
    assert all(tr.verify(tmp_path / name).ok for name in ("c", "c-2", "c-3"))


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root becomes another, whom the limit binds"
)
def test_save_under_thread_limit_works_or_is_refused() -> None:
    """Under a real limit on threads, a save and a restore succeed or raise an error that names the limit."""
    code = """
import os, resource, sys
import numpy as np, treering as tr
tree = {"w": np.arange(4_000_000.0)}
def use(run):
    with tr.Checkpointer(run, keep=tr.keep.last(1), on_save=lambda report: None) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, tree)
    assert tr.steps(run) == [3] and tr.verify(run).ok
    assert (tr.restore(run, mmap=False)["w"] == tree["w"]).all() and (tr.restore(run)["w"] == tree["w"]).all()
use(sys.argv[1] + "/unlimited")
os.setgid(65534); os.setuid(65534)
refused, worked, most = 0, 0, resource.getrlimit(resource.RLIMIT_NPROC)[1]
for spare in range(12):
    there = len(os.listdir("/proc/self/task"))
    resource.setrlimit(resource.RLIMIT_NPROC, (there + spare, most))
    try:
        use(f"{sys.argv[1]}/{spare}")
        worked += 1
    except tr.errors.SaveError as error:
        assert "no more are allowed here" in str(error), error
        refused += 1
        assert (tr.restore(sys.argv[1] + "/unlimited", mmap=False)["w"] == tree["w"]).all()
    resource.setrlimit(resource.RLIMIT_NPROC, (there + 100, most))
print(refused, worked)
"""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    refused, worked = map(int, done.stdout.split())
    assert refused >= 1 and worked >= 6


@pytest.mark.rare
@pytest.mark.slow
def test_writers_cleaners_and_readers_at_once(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"x": np.zeros(1000)})
    code = """
        import sys, time, numpy as np, treering as tr
        from treering import stores
        from treering.formats.treering import removal
        from treering.formats.treering import removal
        path, role, end = sys.argv[1], sys.argv[2], time.time() + 6
        n = 0
        while time.time() < end:
            n += 1
            if role == "write":
                tr.save(path, {"x": np.full(1000, n)}, overwrite=True)
            elif role == "clean":
                removal.collect_garbage(stores.get(""), path)
            else:
                x = tr.restore(path)["x"]
                assert (x == x[0]).all()
        print(n)
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "c")]
    roles = [
        subprocess.Popen([*command, role], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for role in ("write", "write", "clean", "read")
    ]
    outputs = [role.communicate(timeout=60) for role in roles]
    assert [role.returncode for role in roles] == [0] * 4, outputs
    assert tr.verify(tmp_path / "c").ok
    tr.save(tmp_path / "c", {"x": 1}, overwrite=True)
    assert len(everything(tmp_path / "c")) == 1


@pytest.mark.long
@pytest.mark.parametrize("limit", [None, 1000])
def test_a_failed_save_lets_go_of_what_was_never_handed_over(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """A failed save keeps no references to arrays that it has not staged yet."""
    monkeypatch.setattr(leaves, "on_host", lambda sharding: False)  # then each array needs a copy, and room for it
    use_disk(FailingDisk("preallocate", errno.ENOSPC))
    state = [jnp.full(300, n) for n in range(8)]
    alive = [weakref.ref(array) for array in state]
    pending = tr.save_async(tmp_path / "c", state, memory_limit=limit)
    del state
    pending._finished.wait()
    gc.collect()
    assert not any(array() is not None for array in alive)
    with pytest.raises(tr.errors.SaveError):
        pending.result()


@pytest.mark.slow
def test_save_interrupted_after_locking_does_not_hang(tmp_path: pathlib.Path) -> None:
    """Ctrl-C right after a lock was acquired hangs no thread.

    `threading.Condition` is Python code, which may be interrupted before `with` knows that it has the lock.
    """
    done = run(
        """
        import faulthandler, os, signal, sys, threading, numpy as np, treering as tr
        faulthandler.dump_traceback_later(60, exit=True)
        enter, main, place = threading.Condition.__enter__, threading.main_thread(), sys.argv[1]
        def entered(self):
            global left
            found = enter(self)
            if threading.get_ident() == main.ident:
                left -= 1
                if not left:
                    raise KeyboardInterrupt
            return found
        tree = {"x": np.ones(3 << 20)}  # enough for several threads
        tr.save(place + "/x", tree)
        threading.Condition.__enter__ = entered
        for at in range(1, 5):
            for act in (
                lambda: tr.save_async(place + "/y", tree, overwrite=True).result(),
                lambda: tr.save(place + "/y", tree, overwrite=True, memory_limit=1000),
                lambda: tr.restore(place + "/x", mmap=False),
            ):
                left = at
                try:
                    act()
                except KeyboardInterrupt:
                    pass
                left = 0
                for thread in threading.enumerate():
                    if thread is not main:
                        thread.join()
        tr.save(place + "/y", tree, overwrite=True)
        print(tr.verify(place + "/x").ok and tr.verify(place + "/y").ok)
        """,
        tmp_path,
    )
    assert done.stdout == "True\n", done.stderr


# Saves that read the tree while they write it


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Treering treat CPU arrays as device arrays, whose bytes must be copied. This is a mock."""
    monkeypatch.setattr(leaves, "on_host", lambda sharding: False)


@pytest.mark.rare
@pytest.mark.slow
def test_parts_behind_the_first_two_billion_elements(tmp_path: pathlib.Path) -> None:
    """A 32-bit index would wrap around there without an error. JAX's int4 arrays must be copied on CPUs too."""
    # Repeating a few numbers so often would take half a minute.
    some = np.resize(np.arange(-8, 7, dtype=np.int8), 15 << 16)
    values = np.resize(some, 2**31 + 1000)
    tree = {"w": jnp.asarray(values.astype("int4"))}
    tr.save(tmp_path / "c", tree, rules=[tr.rules.rename("w", "v")], memory_limit=1)
    tail = 2**31 - 1000
    assert (np.asarray(tr.open(tmp_path / "c")["v"][tail:]).astype(np.int8) == values[tail:]).all()


TURNED = [tr.rules.transpose("w*", (1, 0))]


@pytest.mark.long
def test_parts_of_arrays_are_those_that_were_asked_for(tmp_path: pathlib.Path, accelerator: None) -> None:
    """A save with rules and little memory reads and writes the right parts of each array."""
    mesh = jax.make_mesh((8,), ("x",))
    tree = {
        "w0": jnp.arange(6 << 20, dtype=jnp.float32).reshape(-1, 2),
        "w1": jax.device_put(jnp.arange(6 << 20).reshape(2, -1), jax.NamedSharding(mesh, jax.P(None, "x"))),
        "v": jnp.arange(1 << 20).astype(jnp.int4),
    }
    tr.save(tmp_path / "c", tree, rules=[*TURNED, tr.rules.rename("v", "u")], memory_limit=1)
    found = tr.restore(tmp_path / "c")
    for name in ("w0", "w1"):
        np.testing.assert_array_equal(found[name], np.asarray(tree[name]).T)
    assert (found["u"] == np.asarray(tree["v"])).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["c", "c.safetensors"])
def test_a_save_that_has_read_everything_keeps_no_arrays(tmp_path: pathlib.Path, accelerator: None, name: str) -> None:
    tree = {f"w{n}": jnp.full((300, 2), n) for n in range(8)}
    alive = [weakref.ref(array) for array in tree.values()]
    pending = tr.save_async(tmp_path / name, tree, rules=TURNED, memory_limit=1)
    del tree
    pending.result()
    gc.collect()
    assert not any(array() is not None for array in alive)


@pytest.mark.parametrize("name", ["c", "c.safetensors"])
@pytest.mark.parametrize("limit", [None, 1])
def test_a_function_of_a_rule_cannot_save(
    tmp_path: pathlib.Path, name: str, limit: int | None, accelerator: None
) -> None:
    """A rule's function that calls `save` gets an error instead of a deadlock."""

    def inner(array: Any) -> Any:
        tr.save(tmp_path / "inner", {"x": array})
        return array

    for save in (tr.save, lambda *args, **options: tr.save_async(*args, **options).result()):
        with pytest.raises(tr.errors.MismatchError, match="a function of a rule, in the middle of another call"):
            save(tmp_path / name, {"w": jnp.ones(3)}, rules=[tr.rules.map("w", inner)], memory_limit=limit)
    assert everything(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("setting", ["jax_transfer_guard", "jax_debug_nans"])
def test_what_is_read_while_it_is_written_obeys_guards(tmp_path: pathlib.Path, accelerator: None, setting: str) -> None:
    """Reads in the background work under JAX's transfer guards."""
    tree = {"w": jnp.full((6 << 20, 2), jnp.nan).block_until_ready()}
    before = getattr(jax.config, setting)
    jax.config.update(setting, "disallow" if "guard" in setting else True)
    try:
        tr.save(tmp_path / "c", tree, rules=TURNED, memory_limit=1)
    finally:
        jax.config.update(setting, before)
    assert np.isnan(tr.restore(tmp_path / "c")["w"]).all()


@pytest.mark.long
@pytest.mark.parametrize("format", ["treering", "safetensors", "flax"])
def test_ctrl_c_ends_a_copy_of_a_checkpoint(tmp_path: pathlib.Path, format: str) -> None:
    tr.save(tmp_path / "c", {f"w{n}": np.ones(6 << 20, np.float32) for n in range(8)})
    source = doubles.interrupted(tr.open(tmp_path / "c")._source, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = everything(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        ckpt = tr.Checkpoint(Slow(source))
        tr.save(tmp_path / "copy", ckpt, format=format)
    assert everything(tmp_path) == before


class Slow:
    """A source with slow reads."""

    def __init__(self, source: Any):
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, *args: Any, **options: Any) -> Any:
        found = self._source.read(*args, **options)
        time.sleep(0.2)
        return found
