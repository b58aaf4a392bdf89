"""Saving, in the background and not, and everything that can go wrong with it."""

import errno
import gc
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from treering import _save, stores
from treering.stores.disk import Disk


class HeldDisk(Disk):
    """Writes nothing until it is told to go on."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def create(self, path: str) -> int:
        assert self.go.wait(30)
        return super().create(path)


class FailingDisk(Disk):
    """Fails one operation, as a full or broken disk would."""

    def __init__(self, operation: str, code: int, after: int = 0):
        self.operation, self.code, self.left = operation, code, after

    def __getattribute__(self, name: str) -> Any:
        if name != "operation" and name == object.__getattribute__(self, "operation"):
            self.left -= 1
            if self.left < 0:
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


# What is saved is what the arrays held at the call


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


def test_the_accelerator_path_copies_before_it_returns(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No accelerator here: CPU arrays are taken for device arrays, so that they are copied through pinned host memory.
    from treering import _leaves, _snapshot

    monkeypatch.setattr(_leaves, "_on_cpu", lambda sharding: False)
    monkeypatch.setattr(_snapshot, "_pinned", lambda sharding: sharding.with_memory_kind("pinned_host"))
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


def test_a_failure_in_the_background_raises_at_the_next_call(tmp_path: pathlib.Path, use_disk: Any) -> None:
    use_disk(FailingDisk("sync", errno.EIO))
    pending = tr.save_async(tmp_path / "a", {"x": np.ones(3)})
    pending._finished.wait()
    stores.DISK = Disk()
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


def test_a_failure_nobody_asked_about_is_printed_at_the_end(tmp_path: pathlib.Path) -> None:
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


@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_while_saving_leaves_nothing_half_done(tmp_path: pathlib.Path, background: bool) -> None:
    done = run(
        """
        import os, signal, sys, threading, numpy as np, treering as tr
        from treering import stores
        class Disk(stores.Disk):
            def preallocate(self, fd, size):
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(0.3)
        stores.DISK = Disk()
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
    if background:  # the save was not what was interrupted, and goes on
        assert tr.verify(tmp_path / "x").ok
    else:
        assert done.stdout == "interrupted False\n" and everything(tmp_path) == []


# Memory in flight


class Watcher(Disk):
    """Records how many bytes of copies are held at each write."""

    def __init__(self) -> None:
        self.feed: Any = None
        self.held: list[int] = []

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self.held.append(self.feed._held)
        super().write(fd, data, offset)


@pytest.mark.parametrize("limit", [1, 10_000_000, None])
def test_no_more_than_the_memory_limit_is_in_flight(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    watcher = use_disk(Watcher())
    make = _save.Feed

    def feed(*args: Any) -> Any:
        watcher.feed = make(*args)
        return watcher.feed

    monkeypatch.setattr(_save, "Feed", feed)
    sizes = [3_000_000, 5_000_000, 100, 9_000_000, 12_345_677, 8, 0, 4_000_000]
    tree = {str(n): np.full(size, n, np.uint8) for n, size in enumerate(sizes)}
    tr.save_async(tmp_path / "c", tree, memory_limit=limit).result()
    for n, size in enumerate(sizes):
        np.testing.assert_array_equal(tr.restore(tmp_path / "c")[str(n)], np.full(size, n, np.uint8))
    if limit is not None:
        assert max(watcher.held) <= max(limit, max(sizes))
    assert watcher.feed._held == 0


# Bad input


def test_every_leaf_that_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: pathlib.Path) -> None:
    tree = {"good": np.ones(3), "bad": [object(), {"x": np.array([{}])}], "s": jax.ShapeDtypeStruct((2,), "float32")}
    for save in (tr.save, tr.save_async):
        with pytest.raises(tr.errors.UnsupportedError) as caught:
            save(tmp_path / "new" / "c", tree)
        message = str(caught.value)
        assert "3 of 4 leaves" in message
        assert all(f"\n  {path}: " in message for path in ("bad/0", "bad/1/x", "s"))
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"step": -1}, "step: expected an integer from 0, found -1"),
        ({"step": 1.5}, "step: expected an integer"),
        ({"metrics": {"loss": np.ones(3)}}, r"metrics\['loss'\]: expected a name and a scalar"),
        ({"metadata": {"a": [1, {2: 3}]}}, r"metadata\['a'\]\[1\]: the key 2 is a int"),
        ({"metadata": {"a": object()}}, r"metadata\['a'\]: a object is not JSON"),
        ({"metadata": float("nan")}, "metadata: nan is not JSON"),
        ({"dtype": "int32"}, "expected a floating-point dtype"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: pathlib.Path, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(tr.errors.TreeringError, match=error):
        tr.save(tmp_path / "c", {"x": np.ones(3)}, **arguments)
    assert everything(tmp_path) == []


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


def test_a_dangling_link_is_an_error_and_no_endless_loop(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "c")
    with pytest.raises(tr.errors.SaveError, match="No such file"):
        tr.save(tmp_path / "link", {"x": np.ones(3)})


def test_foreign_files_in_a_checkpoint_survive_an_overwrite(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"x": np.zeros(3)})
    (tmp_path / "c" / "notes.txt").write_text("good run")
    tr.save(tmp_path / "c", {"x": np.ones(3)}, overwrite=True)
    assert (tmp_path / "c" / "notes.txt").read_text() == "good run"


def test_of_two_writers_of_a_new_path_one_wins_and_the_other_is_told(tmp_path: pathlib.Path) -> None:
    code = """
        import sys, numpy as np, treering as tr
        from treering.stores.local import Transaction
        commit = Transaction.commit
        def late(self, data):
            print("ready", flush=True)
            sys.stdin.readline()
            commit(self, data)
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
    assert len(everything(path)) == 1  # no arrays, so the manifest alone


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
        stores.DISK = Disk()
        tr.save(tmp_path / "c", {"x": np.zeros(1000)}, overwrite=after > 0)
        use_disk(FailingDisk(operation, errno.ENOSPC, after))
        try:
            tr.save(tmp_path / "c", {"x": np.ones(1000)}, overwrite=True)
        except tr.errors.SaveError:
            assert tr.verify(tmp_path / "c").ok
            assert tr.restore(tmp_path / "c")["x"][0] == 0 or operation == "sync_dir"
        else:
            break
    assert tr.restore(tmp_path / "c")["x"][0] == 1
    assert len(everything(tmp_path / "c")) == 2


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
    if os.geteuid() == 0:  # root may write anywhere; the kernel's own read-only file system is refused to it as well
        target = pathlib.Path("/proc/sys/treering")
    else:
        target = tmp_path / "ro" / "c"
        target.parent.mkdir(mode=0o555)
    with pytest.raises(tr.errors.SaveError, match=r"Permission denied|No such file|Operation not permitted|Read-only"):
        tr.save(target, {"x": np.ones(3)})


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
        stores.DISK = Disk()
        tr.save_async(sys.argv[1] + "/parent", {"x": 1})
        child = os.fork()
        if not child:
            stores.DISK = stores.Disk()
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
