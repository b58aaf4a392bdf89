"""Tests of a run over its life: rewinds, its one writer, late metrics, evaluators, background work."""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import treering as tr
from jobs import run_job
from treering import stores
from treering._run.pending_saves import PendingSaves
from treering._run.schedule import Interval
from treering._save.pending import PendingSave
from treering._tools.listing import list_run
from treering.errors import CorruptError, ExistsError, MismatchError, NotFoundError, SaveError, UnsupportedError
from treering.formats.treering import metrics as metrics_files
from treering.formats.treering import summary
from treering.stores.memory import MemoryStore
from treering.stores.posix import Disk


def save_steps(run: pathlib.Path, steps: Any, keep: Any = None, **options: Any) -> list[int]:
    with tr.Checkpointer(run, keep=keep) as ckpts:
        for step in steps:
            ckpts.save(step, {"x": np.full(3, step)}, **options)
        ckpts.wait()
        return ckpts.steps


def branch(run: pathlib.Path, step: int) -> float:
    """Returns the value that was saved for a step, which identifies its branch."""
    return float(tr.restore(run, step=step)["x"][0])


# Rewinding


@pytest.mark.long
@pytest.mark.whole
def test_rewind_archives_later_steps(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, range(1, 6))
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.pin(5)
        ckpts.rewind(2)
        assert ckpts.steps == [1, 2] and tr.steps(tmp_path) == [1, 2] and tr.open(tmp_path).step == 2
        assert tr.steps(tmp_path / "rewound-1") == [3, 4, 5] and branch(tmp_path / "rewound-1", 4) == 4
        assert ckpts.restore()["x"][0] == 2 and ckpts.restored_step == 2
        ckpts.save(3, {"x": np.full(3, 33)})
        ckpts.save(5, {"x": np.full(3, 55)})
    assert tr.steps(tmp_path) == [1, 2, 3, 5] and branch(tmp_path, 3) == 33
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.rewind(1)
        ckpts.rewind(1)
    assert tr.steps(tmp_path) == [1] and tr.steps(tmp_path / "rewound-2") == [2, 3, 5]
    assert not (tmp_path / "rewound-3").exists(), "there was no step to archive"


def test_wrong_rewinds(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [1, 3])
    ckpts = tr.Checkpointer(tmp_path)
    with pytest.raises(NotFoundError, match="expected step 2, found 1, 3"):
        ckpts.rewind(2)
    with pytest.raises(MismatchError, match="from 0"):
        ckpts.rewind(-1)
    ckpts.close()
    with pytest.raises(MismatchError, match="closed"):
        ckpts.rewind(1)
    assert tr.steps(tmp_path) == [1, 3]


@pytest.mark.parametrize("back", [None, 1])
def test_interrupted_rewind_leaves_an_earlier_state(tmp_path: pathlib.Path, use_disk: Any, back: int | None) -> None:
    """An interrupted rewind leaves steps that the run had at an earlier time."""

    class Sticky(Disk):
        moves = 0

        def rename_new(self, old: str, new: str) -> None:
            self.moves += 1
            if self.moves == 3:
                raise OSError(5, "Input/output error")
            super().rename_new(old, new)

    save_steps(tmp_path, range(1, 6))
    use_disk(Sticky())
    with tr.Checkpointer(tmp_path) as ckpts, pytest.raises(OSError, match="Input/output"):
        ckpts.rewind(back)
    assert tr.steps(tmp_path) == [1, 2, 3] and branch(tmp_path, 3) == 3 and tr.steps(tmp_path / "rewound-1") == [4, 5]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_foreign_file_named_like_an_archive_is_untouched(tmp_path: pathlib.Path, kind: str) -> None:
    """A file or link named like an archived run stays untouched."""
    save_steps(tmp_path / "run", [1, 2, 3, 4])
    place = tmp_path / "run" / "rewound-1"
    (tmp_path / "elsewhere").mkdir()
    place.touch() if kind == "file" else place.symlink_to(tmp_path / "elsewhere")
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.rewind(3)
        ckpts.restore(step=2)
        ckpts.save(5, {"x": np.full(3, 5)})
    assert tr.steps(tmp_path / "run") == [1, 2, 5]
    assert tr.steps(tmp_path / "run" / "rewound-2") == [4] and tr.steps(tmp_path / "run" / "rewound-3") == [3]
    assert place.is_file() if kind == "file" else place.is_symlink()


@pytest.mark.parametrize("call", ["rewind", "delete", "pin", "finish"])
def test_disk_error_of_writing_call_is_save_error(tmp_path: pathlib.Path, use_disk: Any, call: str) -> None:
    """A disk error of any writing call is raised as `SaveError`."""

    class Refusing(Disk):
        def refuse(self, *args: Any) -> Any:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        make_dir = unlink = create = refuse

    save_steps(tmp_path, [1, 2])
    use_disk(Refusing())
    ckpts = tr.Checkpointer(tmp_path)
    with pytest.raises(SaveError, match=rf"{call}\(.*\) failed: .*Read-only"):
        getattr(ckpts, call)(*[] if call == "finish" else [1])
    assert ckpts.steps == [1, 2] and not ckpts.pinned
    ckpts.close()


def test_save_archives_steps_after_the_restored_one(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a restore of an earlier step, the next save archives the later steps."""
    save_steps(tmp_path, [10, 20, 30])
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(2)) as ckpts:
        ckpts.restore(step=20)
        assert ckpts.steps == [10, 20, 30], "looking back changes nothing"
        ckpts.save(21, {"x": np.full(3, 21)})
        assert "; 1 later step archived in " in caplog.text
        ckpts.save(30, {"x": np.full(3, 300)})
        ckpts.wait()
        assert ckpts.steps == [20, 21, 30], "what was restored stays"
    assert branch(tmp_path, 30) == 300 and branch(tmp_path / "rewound-1", 30) == 30
    with tr.Checkpointer(tmp_path) as ckpts:  # The job is killed, and begins again on the new branch.
        assert ckpts.restore()["x"][0] == 300


def test_save_without_the_lock_archives_nothing(tmp_path: pathlib.Path, use_disk: Any) -> None:
    save_steps(tmp_path, [1, 2, 3])
    second = tr.Checkpointer(tmp_path)
    second.restore(step=1)
    disk = use_disk(Slow())
    with tr.Checkpointer(tmp_path) as first:
        first.save(4, {"x": np.full(3, 4)})
        with pytest.raises(ExistsError, match="another Checkpointer of this process is saving; call its wait"):
            second.save(2, {"x": 22})
        assert first.committed_steps == [1, 2, 3] and not (tmp_path / "rewound-1").exists()
        assert first.steps == [1, 2, 3, 4] and first.latest_step == 4, "as `save` sees the run"
        with pytest.raises(ExistsError):
            first.save(first.latest_step, {"x": 4}, force=True)
        disk.gate.set()
        first.wait()
        assert first.committed_steps == first.steps == [1, 2, 3, 4]
    second.save(2, {"x": 22})
    second.close()
    assert tr.steps(tmp_path) == [1, 2] and tr.steps(tmp_path / "rewound-1") == [2, 3, 4]


def test_refused_save_archives_nothing(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [1, 2, 3])
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.restore(step=1)
        with pytest.raises(UnsupportedError):
            ckpts.save(2, {"x": object()})
        with pytest.raises(MismatchError):
            ckpts.save(2, {"x": 1}, metrics={"loss": "high"})
        assert ckpts.steps == [1, 2, 3]
        ckpts.restore()
        ckpts.save(4, {"x": np.full(3, 4)})
        ckpts.wait()
        assert ckpts.steps == [1, 2, 3, 4], "the later restore has cancelled the rewind"
        ckpts.restore(step=1)
        ckpts.save(2, {"x": np.full(3, 22)})
    assert tr.steps(tmp_path) == [1, 2] and tr.steps(tmp_path / "rewound-1") == [2, 3, 4] and branch(tmp_path, 2) == 22


def test_save_after_restoring_latest_step_archives_nothing(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [1, 2])
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.restore(step=1)
        ckpts.restore()
        ckpts.save(3, {"x": np.ones(3)})
    assert tr.steps(tmp_path) == [1, 2, 3] and not (tmp_path / "rewound-1").exists()


@pytest.mark.long
@pytest.mark.whole
def test_steps_of_another_library_are_never_archived(tmp_path: pathlib.Path) -> None:
    from flax.training import checkpoints

    for step in (1, 5):
        checkpoints.save_checkpoint(str(tmp_path), {"x": np.ones(3)}, step, keep=10)
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.restore(step=1)
        with pytest.raises(UnsupportedError, match=r"checkpoint_5: after step 1, and written by another library"):
            ckpts.save(2, {"x": np.ones(3)})
    assert tr.steps(tmp_path) == [1, 5]


# One writer


@pytest.mark.long
def test_second_writer_is_refused_with_name_of_first(tmp_path: pathlib.Path) -> None:
    code = f"""
import sys, treering as tr
ckpts = tr.Checkpointer({str(tmp_path)!r})
ckpts.save(1, {{"x": 1}}); ckpts.wait()
print("ready", flush=True); sys.stdin.read(1)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as first:
        assert first.stdout and first.stdout.readline() == "ready\n"
        ckpts = tr.Checkpointer(tmp_path)
        assert ckpts.steps == [1] and ckpts.restore()["x"] == 1, "readers need no lock"
        for step, on_exists in [
            (2, "error"),
            (1, "error"),
            (1, "skip"),
            (1, "overwrite"),
        ]:  # the other job saved step 1
            with pytest.raises(
                ExistsError, match=rf"process {first.pid} on \S+, since 20\d\d-\S+, writes this run; wait"
            ):
                ckpts.save(step, {"x": 2}, on_exists=on_exists)
        first.kill()
        first.wait()
        assert (tmp_path / "writer.lock").exists()
        ckpts.save(2, {"x": 2})
        ckpts.close()
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@pytest.mark.long
@pytest.mark.parametrize("local", [False, True])
def test_a_step_behind_the_latest_is_logged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, local: bool
) -> None:
    """A job did not restore, so `keep` also counts later steps that the job does not know."""
    run = tmp_path / "run"
    save_steps(run, (10, 20), keep=tr.keep.last(2))
    options: Any = {"keep": tr.keep.last(2), "local": tmp_path / "local" if local else None}
    with tr.Checkpointer(run, **options) as ckpts:
        for step in (1, 2, 20):
            ckpts.save(step, {"x": np.full(3, -step)}, on_exists="overwrite")
            ckpts.wait()
    lines = [record.getMessage() for record in caplog.records if "which stays the latest" in record.getMessage()]
    assert len(lines) == 1 and ": saving step 1 after step 20, which" in lines[0] and "rewind" in lines[0]
    caplog.clear()
    with tr.Checkpointer(run, **{**options, "keep": None}) as ckpts:
        first = ckpts.steps[0]
        ckpts.restore(step=first)
        ckpts.save(first + 1, {"x": np.zeros(3)})  # archives the later steps
        ckpts.save(first + 2, {"x": np.zeros(3)})
        ckpts.rewind(first + 1)
        ckpts.save(first + 2, {"x": np.zeros(3)})
        ckpts.save(30, {"x": np.zeros(3)})
        ckpts.save(30, {"x": np.ones(3)}, on_exists="overwrite")
    for place in (run, *[tmp_path / "local"] * local):
        if (file := next((place / "step-00000030").glob("arrays-*"), None)) is not None:
            file.unlink()
    with tr.Checkpointer(run, **{**options, "keep": None}) as ckpts:
        restored = ckpts.restore()["x"].shape and ckpts.restored_step
        assert restored is not None and restored < 20
        ckpts.save(25, {"x": np.ones(3)})  # 30 is damaged
    assert not [record for record in caplog.records if "which stays the latest" in record.getMessage()]


def test_a_save_that_is_skipped_or_refused_takes_no_run(tmp_path: pathlib.Path) -> None:
    old, new = tr.Checkpointer(tmp_path), tr.Checkpointer(tmp_path)
    old.save(1, {"x": 1})
    old.wait()
    assert new.save(1, {"x": 1}, on_exists="skip") is None
    with pytest.raises(ExistsError, match="step 1 is saved already"):
        new.save(1, {"x": 1})
    old.save(2, {"x": 2})  # It still has the lease.
    old.close()
    assert new.save(2, {"x": 2}, on_exists="skip") is None
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="expected root, to become a user who may not write")
def test_a_run_that_may_only_be_read_is_skipped_as_well() -> None:
    with tempfile.TemporaryDirectory() as folder:  # Other users cannot enter pytest's folders.
        save_steps(pathlib.Path(folder, "run"), [1])
        os.chmod(folder, 0o755)
        code = f"""
import os, treering as tr
with tr.Checkpointer({folder + "/other"!r}) as ckpts:  # imports all modules, from folders that other users cannot read
    ckpts.save(1, {{"x": 1}})
    ckpts.wait()
    ckpts.save(1, {{"x": 1}}, on_exists="skip")
os.setgid(65534); os.setuid(65534)
ckpts = tr.Checkpointer({folder + "/run"!r})
assert ckpts.save(1, {{"x": 1}}, on_exists="skip") is None
try:
    ckpts.save(1, {{"x": 1}})
except tr.errors.ExistsError as error:
    assert "saved already" in str(error)
ckpts.close()
"""
        subprocess.run([sys.executable, "-c", code], check=True)


def test_lock_released_by_close_and_garbage_collection(tmp_path: pathlib.Path) -> None:
    """`close` releases the lease, and so does the garbage collector."""
    first, second = tr.Checkpointer(tmp_path), tr.Checkpointer(tmp_path)
    first.save(1, {"x": 1})
    first.wait()
    assert (tmp_path / "writer.lock").exists()
    first.close()
    assert not (tmp_path / "writer.lock").exists()
    second.save(2, {"x": 1})
    second.wait()
    del second
    save_steps(tmp_path, [3])
    assert tr.steps(tmp_path) == [1, 2, 3]


@pytest.mark.long
def test_a_child_does_not_hold_its_dead_parents_lock(tmp_path: pathlib.Path) -> None:
    code = f"""
import os, sys, time, treering as tr
ckpts = tr.Checkpointer({str(tmp_path)!r})
ckpts.save(1, {{"x": 1}}); ckpts.wait()
child = os.fork()
if not child:
    print(os.getpid(), flush=True); time.sleep(60)
os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=-1, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        parent.wait()
        try:
            assert save_steps(tmp_path, [2]) == [1, 2]
        finally:
            os.kill(child, 9)


@pytest.mark.slow
def test_a_lock_that_belongs_to_another_is_never_removed(tmp_path: pathlib.Path, use_disk: Any) -> None:
    class Stale(Disk):
        def read(self, fd: int, buffer: memoryview, offset: int) -> int:
            raise OSError(errno.ESTALE, "Stale file handle")

    run = tmp_path / "run"
    first = tr.Checkpointer(run)
    first.save(1, {"x": 1})
    first.wait()
    shutil.rmtree(run)
    code = f"""
import sys, treering as tr
ckpts = tr.Checkpointer({str(run)!r})
ckpts.save(1, {{"x": 1}}); ckpts.wait()
print("ready", flush=True); sys.stdin.read(1)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as second:
        assert second.stdout and second.stdin and second.stdout.readline() == "ready\n"
        first.close()
        for word in (b"", b'{"\xff": 1}'):
            (run / "writer.lock").write_bytes(word)
            with pytest.raises(ExistsError, match="another process writes this run"):
                tr.Checkpointer(run).save(2, {"x": 2})
        use_disk(Stale())
        third = tr.Checkpointer(run)
        stores.register(stores.Filesystem(Disk()))
        for _ in range(2):
            with pytest.raises(ExistsError, match="another process writes this run"):
                third.save(2, {"x": 2})
        second.stdin.write("x")
        second.stdin.flush()
        assert second.wait(60) == 0


@pytest.mark.parametrize("closed_again", [True, False])
def test_an_interrupt_forgets_no_save_and_keeps_the_lock_for_it(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch, closed_again: bool
) -> None:
    """An interrupt of a wait loses no save, and the lease is held until that save is over."""

    def interrupt(pending: PendingSave) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        pending._finished.wait()

    slow = Slow()
    use_disk(slow)
    ckpts = tr.Checkpointer(tmp_path)
    pending = ckpts.save(1, {"x": np.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr(PendingSave, "_wait", interrupt)
        for call in (lambda: ckpts.save(2, {"x": 2}), ckpts.wait, ckpts.close):
            with pytest.raises(KeyboardInterrupt):
                call()
    with pytest.raises(ExistsError, match="another Checkpointer of this process is saving"):
        tr.Checkpointer(tmp_path).save(2, {"x": 2})
    slow.gate.set()
    if closed_again:
        ckpts.close()
    for thread in threading.enumerate():
        if thread.name == "treering-upkeep":
            thread.join(30)
    assert pending and pending.done() and tr.steps(tmp_path) == [1]
    assert save_steps(tmp_path, [2]) == [1, 2]
    ckpts.close()


def test_interrupted_close_still_releases_the_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` releases the lease even if an interrupt ends its wait for a hook."""
    inside, go = threading.Event(), threading.Event()
    ckpts = tr.Checkpointer(tmp_path, on_save=lambda report: (inside.set(), go.wait(30)))
    ckpts.save(1, {"x": 1})
    assert inside.wait(30)
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        join(thread, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpts.close()
    assert (tmp_path / "writer.lock").exists()
    go.set()
    for thread in threading.enumerate():
        if thread.name == "treering-upkeep":
            thread.join(30)
    assert not (tmp_path / "writer.lock").exists() and save_steps(tmp_path, [2]) == [1, 2]


def test_unsavable_tree_neither_creates_nor_locks_run(tmp_path: pathlib.Path) -> None:
    """An unsupported tree raises an error before the run's directory or lease exists."""
    ckpts = tr.Checkpointer(tmp_path / "run")
    with pytest.raises(UnsupportedError):
        ckpts.save(1, {"x": object()})
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_two_writers_that_begin_at_the_same_time_are_one(tmp_path: pathlib.Path) -> None:
    for n in range(20):
        won: list[Any] = []

        def write(run: pathlib.Path = tmp_path / str(n), won: list[Any] = won) -> None:
            ckpts = tr.Checkpointer(run)
            with contextlib.suppress(ExistsError):
                ckpts.save(1, {"x": 1})
                won.append(ckpts)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        won[0].close()


# Concurrent saves


class Slow(Disk):
    """A disk that waits before it writes each file, until the test lets it continue."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def preallocate(self, fd: int, size: int) -> None:
        assert self.gate.wait(30)
        super().preallocate(fd, size)


def test_a_save_while_another_is_under_way_is_skipped_on_demand(tmp_path: pathlib.Path, use_disk: Any) -> None:
    disk = use_disk(Slow())
    ckpts = tr.Checkpointer(tmp_path, when_busy="skip")
    first = ckpts.save(1, {"x": 1})
    assert first and ckpts.save(2, {"x": 2}) is None
    disk.gate.set()
    first.result()
    assert ckpts.save(3, {"x": 3})
    disk.gate.clear()
    threading.Timer(0.1, disk.gate.set).start()
    assert ckpts.save(4, {"x": 4}, force=True), "a forced one waits"
    ckpts.close()
    assert ckpts.steps == [1, 3, 4]


def test_no_more_than_one_state_is_held_at_a_time(tmp_path: pathlib.Path, use_disk: Any) -> None:
    disk = use_disk(Slow())
    ckpts = tr.Checkpointer(tmp_path)
    first = ckpts.save(1, {"x": 1})
    assert first
    threading.Timer(0.2, disk.gate.set).start()
    ckpts.save(2, {"x": 2})
    assert first.done()
    ckpts.close()
    assert ckpts.steps == [1, 2]


def test_slow_deletions_hold_no_save_up(tmp_path: pathlib.Path, use_disk: Any) -> None:
    class SlowToDelete(Slow):
        def preallocate(self, fd: int, size: int) -> None: ...

        def unlink(self, path: str) -> None:
            if path.endswith(".safetensors"):
                assert self.gate.wait(30)
            super().unlink(path)

    disk = use_disk(SlowToDelete())
    ckpts = tr.Checkpointer(tmp_path, keep=tr.keep.last(1))
    for step in range(5):
        ckpts.save(step, {"x": np.ones(10)})
        ckpts.wait()
        assert ckpts.steps == [step], "they are gone at once"
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 5
    disk.gate.set()
    ckpts.close()
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1 and os.listdir(tmp_path) == ["step-00000004"]


@pytest.mark.long
def test_save_after_failure_waits_for_deleted_space(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """The disk is a double with room for two steps that deletes slowly."""

    class Small(Disk):
        def create(self, path: str) -> int:
            if "arrays-" in path and len(list(tmp_path.glob("*/arrays-*"))) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return super().create(path)

        def unlink(self, path: str) -> None:
            if "arrays-" in path:
                time.sleep(0.3)
            super().unlink(path)

    use_disk(Small())
    with tr.Checkpointer(tmp_path, keep=tr.keep.last(1), on_error="log") as ckpts:
        for step in range(1, 5):
            ckpts.save(step, {"x": np.ones(10)})
    assert ckpts.steps == [4]


@pytest.mark.long
def test_next_job_removes_leftovers_of_killed_deletions(tmp_path: pathlib.Path) -> None:
    """The next job completes the deletions that a kill interrupted."""
    code = f"""
import os, numpy as np, treering as tr
from treering import stores
class Deadly(stores.posix.Disk):
    def unlink(self, path):
        if path.endswith(".safetensors"):
            os._exit(9)
        super().unlink(path)
stores.register(stores.Filesystem(Deadly()))
with tr.Checkpointer({str(tmp_path)!r}, keep=tr.keep.last(1)) as ckpts:
    ckpts.save(1, {{"x": np.ones(3)}}); ckpts.save(2, {{"x": np.ones(3)}})
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert tr.steps(tmp_path) == [2] and len(os.listdir(tmp_path)) == 3
    save_steps(tmp_path, [3])
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


# Reports


def test_every_save_is_reported_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treering")
    reports: list[tr.SaveReport] = []
    with tr.Checkpointer(tmp_path, on_save=reports.append, save_every=2) as ckpts:
        for step in range(5):
            ckpts.save(step, {"x": np.full(1_000_000, step)})  # Equal arrays would need no sync.
    assert [report.step for report in reports] == [0, 2, 4]
    for report in reports:
        assert report.nbytes > 8_000_000 and report.path == ckpts.path(report.step or 0)
        parts = report.write_seconds, report.sync_seconds, report.commit_seconds
        assert all(part > 0 for part in parts) and sum(parts) <= report.seconds and report.stall_seconds > 0
        own = report.seconds - report.wait_seconds - report.lease_seconds
        assert report.gb_per_second == pytest.approx(report.nbytes / 1e9 / own)
    lines = [record.message for record in caplog.records if record.levelno >= logging.INFO]
    assert len(lines) == 3 and all(line.startswith("saved /") and "B/s" in line for line in lines)


@pytest.mark.long
def test_report_has_stall_and_wait_seconds(
    tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A report has the seconds of the stall, and those of it spent on the previous save."""
    disk = use_disk(Slow())
    ckpts = tr.Checkpointer(tmp_path)
    first = ckpts.save(1, {"x": np.ones(1000)})
    threading.Timer(1.2, disk.gate.set).start()
    begun = time.perf_counter()
    second = ckpts.save(2, {"x": np.ones(1000)})
    stood = time.perf_counter() - begun
    assert first and second
    quick, held_up = first.result(), second.result()
    assert quick.wait_seconds < 0.01 and quick.stall_seconds < 1
    assert 1 < held_up.wait_seconds <= held_up.stall_seconds <= stood <= held_up.stall_seconds + 0.1
    assert held_up.stall_seconds <= held_up.seconds
    own = held_up.seconds - held_up.wait_seconds - held_up.lease_seconds
    assert held_up.gb_per_second == pytest.approx(held_up.nbytes / 1e9 / own)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "step 2: the loop stood still for 1." in warning and "for the previous save" in warning
    assert "save_every" in warning and 'when_busy="skip"' in warning and "1." in str(held_up)
    ckpts.close()


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [1, 2])
def test_report_has_the_seconds_of_the_lease(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, tiers: int
) -> None:
    """A wait for the lease of a killed job is neither for the copy nor a cost of saving."""

    class Waiting(MemoryStore):
        def lease(self, run: str, busy: Callable[[], bool] = lambda: False) -> Any:
            lease = super().lease(run, busy)
            acquire, pauses = lease.acquire, [1.1]

            def wait_and_acquire() -> None:
                time.sleep(pauses.pop() if pauses else 0)
                acquire()

            lease.acquire = wait_and_acquire  # type: ignore[method-assign]
            return lease

    with stores.using(Waiting(), "waiting"):
        with tr.Checkpointer("waiting://db/run", local=tmp_path / "fast" if tiers == 2 else None) as ckpts:
            first = ckpts.save(1, {"x": np.ones(3)})
            second = ckpts.save(2, {"x": np.ones(3)})
        assert first and second
        report, later = first.result(), second.result()
    assert 1.1 < report.lease_seconds <= report.stall_seconds and report.wait_seconds < 0.1
    assert later.lease_seconds < 0.1 and "for the lease of the run" not in str(later)
    own = report.seconds - report.wait_seconds - report.lease_seconds
    assert report.gb_per_second == pytest.approx(report.nbytes / 1e9 / own)
    (warning,) = [record.message for record in caplog.records if "stood still" in record.message]
    assert (
        f"{report.lease_seconds:.1f} s of it for the lease of the run; only a job's first save waits for it" in warning
    )
    assert "ms for the lease of the run" in str(report)
    interval = Interval(None)
    interval.add_save(report)
    assert interval._cost() < 0.5


@pytest.mark.long
def test_stall_seconds_of_a_blocking_save(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """The stall of `tr.save`, which returns after the commit, is its complete duration."""
    disk = use_disk(Slow())
    first = tr.save_async(tmp_path / "a", {"x": np.ones(1000)})
    threading.Timer(0.5, disk.gate.set).start()
    report = tr.save(tmp_path / "b", {"x": np.ones(1000)})
    assert 0.3 < report.wait_seconds < report.stall_seconds == report.seconds
    assert first.result().wait_seconds == 0 and first.result().stall_seconds < first.result().seconds


@pytest.mark.long
def test_wait_seconds_include_waiting_for_memory(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """Waiting for memory that another save holds is reported as `wait_seconds`."""
    disk = use_disk(Slow())
    tr.save_async(tmp_path / "a", {"x": np.ones(1000)})
    threading.Timer(0.5, disk.gate.set).start()
    report = tr.save_async(tmp_path / "b", {n: np.ones(1000) for n in "xyz"}, memory_limit=8000).result()
    assert 0.3 < report.wait_seconds <= report.stall_seconds <= report.seconds


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_failing_hook_affects_no_save(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """An error in `on_save` is logged, and affects no save."""

    def hook(report: tr.SaveReport) -> None:
        raise error

    with tr.Checkpointer(tmp_path, on_save=hook) as ckpts:
        ckpts.save(1, {"x": 1})
        ckpts.save(2, {"x": 1})
    assert ckpts.steps == [1, 2] and caplog.text.count("on_save failed") == 2


@pytest.mark.long
def test_a_forked_child_does_not_wait_for_its_parents_hooks(tmp_path: pathlib.Path) -> None:
    code = f"""
import os, signal, threading, treering as tr
begun, go_on = threading.Event(), threading.Event()
def hook(report):
    begun.set(); go_on.wait()
ckpts = tr.Checkpointer({str(tmp_path)!r}, on_save=hook)
saved = ckpts.save(1, {{"x": 1}})
begun.wait()
saved.result()  # The hook may begin a moment before, and a child cannot wait for a save of its parent.
child = os.fork()
if not child:
    signal.alarm(20)
    ckpts.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
go_on.set()
ckpts.close()
os._exit(os.waitstatus_to_exitcode(status) != 0)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_disk_usage_is_what_is_there(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path) as ckpts:
        for step, size in ((1, 10), (2, 1_000_000)):
            ckpts.save(step, {"x": np.ones(size, np.int8)})
        ckpts.wait()
        there = {step: sum(file.stat().st_size for file in (tmp_path / f"step-{step:08}").iterdir()) for step in (1, 2)}
        assert ckpts.disk_usage == there and there[2] > 1_000_000


@pytest.mark.parametrize("options", [{"when_busy": "queue"}, {"on_save": 3}, {"save_every": 0}], ids=str)
def test_wrong_options(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match=next(iter(options))):
        tr.Checkpointer(tmp_path, **options)


# Late metrics


def test_recorded_metrics_decide_what_is_kept_and_what_is_best(tmp_path: pathlib.Path) -> None:
    keep = tr.keep.best(1, "acc", "max") | tr.keep.last(1)
    with tr.Checkpointer(tmp_path, keep=keep) as ckpts:
        for step, acc in ((1, 0.2), (2, 0.9), (3, 0.5)):
            ckpts.save(step, {"x": step}, metrics={"loss": 1.0})
            ckpts.wait()
            tr.record(tmp_path, step, {"acc": acc})
        assert ckpts.steps == [2, 3] and ckpts.best_step("acc", "max") == 2
        ckpts.save(4, {"x": 4})
        ckpts.wait()
        assert ckpts.steps == [2, 4]
        assert ckpts.open(2).metrics == {"loss": 1.0, "acc": 0.9} == tr.open(tmp_path, step=2).metrics


def test_last_record_wins_and_dies_with_its_checkpoint(tmp_path: pathlib.Path) -> None:
    """The last recorded value is used. A new checkpoint of the step has no recorded metrics."""
    save_steps(tmp_path, [1, 2], metrics={"a": 0})
    tr.record(tmp_path, 1, {"a": 1, "b": float("nan")})
    tr.record(tmp_path, 1, {"a": np.float32(2)})
    found = tr.open(tmp_path, step=1).metrics
    assert found["a"] == 2 and np.isnan(found["b"])
    assert tr.verify(tmp_path).ok
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, {"x": np.ones(3)}, on_exists="overwrite", metrics={"a": 5})
        ckpts.wait()
        assert ckpts.open(1).metrics == {"a": 5}
        assert not list((tmp_path / "step-00000001").glob("metrics-*"))
        tr.record(tmp_path, 1, {"a": 6})
        ckpts.delete(1)
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_metrics_belong_to_the_checkpoint_that_was_measured(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a rewind or an overwrite another checkpoint has the number of the step. Late metrics are not its own."""
    save_steps(tmp_path, [10, 20, 30])
    old = {step: tr.open(tmp_path, step=step) for step in (10, 20, 30)}
    assert old[20].select("x").record({"val": np.float32(2)}) and old[20].at("x").record({"more": 1})
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.rewind(20)
        ckpts.save(30, {"x": np.zeros(3)})
        ckpts.save(10, {"x": np.zeros(3)}, on_exists="overwrite")
        ckpts.wait()
        assert not old[30].record({"val": 3}) and not old[10].record({"val": 1})
        ckpts.delete(10)
        assert not old[10].record({"val": 1})
        (tmp_path / "step-00000030" / "treering.json").unlink()
        assert not old[30].record({"val": 1})
        ckpts.save(30, {"x": np.zeros(3)}, on_exists="overwrite")
    assert [tr.open(tmp_path, step=step).metrics for step in (20, 30)] == [{"val": 2, "more": 1}, {}]
    gone = [record for record in caplog.records if "are not recorded, because the checkpoint" in record.message]
    assert len(gone) == 4 and "step-00000030: the metrics {'val': 3.0}" in gone[0].message
    for wrong, error in (({"a": "high"}, MismatchError), (3, MismatchError)):
        with pytest.raises(error):
            old[20].record(wrong)  # type: ignore[arg-type]
    tr.save(tmp_path / "a.safetensors", {"x": np.zeros(3)})
    with pytest.raises(UnsupportedError, match=r"a\.safetensors: it was written by another library"):
        tr.open(tmp_path / "a.safetensors").record({"a": 1})


def test_metrics_of_an_open_checkpoint_outlive_its_local_copy(tmp_path: pathlib.Path) -> None:
    keep = tr.keep.last(1) | tr.keep.best(1, "val", "min")
    with tr.Checkpointer(tmp_path / "run", local=tmp_path / "local", keep=keep) as ckpts:
        ckpts.save(1, {"x": np.zeros(3)}).result()
        ckpt = ckpts.open()
        assert ckpt.path.startswith(str(tmp_path / "local"))
        for step in (2, 3):
            ckpts.save(step, {"x": np.zeros(3)}).result()
        ckpts.close()
        assert not os.path.exists(ckpt.path) and ckpt.record({"val": 1})
        for step in (2, 3):
            assert tr.open(tmp_path / "run", step=step).record({"val": 2})
    assert tr.steps(tmp_path / "run") == [1, 3]


def test_wrong_records(tmp_path: pathlib.Path) -> None:
    from flax.training import checkpoints

    save_steps(tmp_path, [1])
    checkpoints.save_checkpoint(str(tmp_path), {"x": np.ones(3)}, 7)
    for step, metrics, error in (
        (2, {"a": 1}, NotFoundError),
        (-1, {"a": 1}, MismatchError),
        (1, {"a": "high"}, MismatchError),
        (1, {"a": np.ones(2)}, MismatchError),
        (7, {"a": 1}, UnsupportedError),
    ):
        with pytest.raises(error):
            tr.record(tmp_path, step, metrics)
    with pytest.raises(NotFoundError, match="deleted meanwhile"):
        tr.record(tmp_path, 2, {})
    with pytest.raises(NotFoundError, match=f"found none; it is within the run {tmp_path}"):
        tr.record(tmp_path / "nowhere", 1, {})
    assert len(list((tmp_path / "step-00000001").iterdir())) == 2


def test_record_raises_save_error_for_disk_error(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """`record` raises `SaveError` for a disk error."""

    class Full(Disk):
        def write(self, fd: int, data: memoryview, offset: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    save_steps(tmp_path, [1])
    use_disk(Full())
    with pytest.raises(SaveError, match=r"step-00000001: the metrics cannot be added: .*No space left"):
        tr.record(tmp_path, 1, {"loss": 1})
    assert not list(tmp_path.glob("*/metrics*"))


def test_pin_and_record_of_a_step_deleted_meanwhile(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """Pinning or recording a step that was deleted meanwhile raises `NotFoundError`."""

    class Deleting(Disk):
        looks = 0  # at the manifest, before it is deleted

        def stat(self, path: str) -> os.stat_result | None:
            if path.endswith("treering.json"):
                self.looks -= 1
                if self.looks == 0:
                    super().unlink(path)
            return super().stat(path)

    disk = Deleting()
    use_disk(disk)
    ckpts = tr.Checkpointer(tmp_path)
    for use in (lambda: tr.record(tmp_path, 1, {"loss": 1}), lambda: ckpts.pin(1)):
        save_steps(tmp_path, [1])
        disk.looks = 2
        with pytest.raises(NotFoundError, match="deleted meanwhile"):
            use()
    assert save_steps(tmp_path, [1]) == [1]


@pytest.mark.long
def test_damaged_records_do_not_count_and_verify_names_them(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, [1])
    tr.record(tmp_path, 1, {"a": 1})
    (file,) = (tmp_path / "step-00000001").glob("metrics-*")
    file.chmod(0o644)
    good = file.read_bytes()
    for n in range(len(good)):
        file.write_bytes(good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :])
        assert tr.open(tmp_path).metrics == {}
        report = tr.verify(tmp_path / "step-00000001")
        assert [problem.file for problem in report.problems] == [file.name]
    assert tr.Checkpointer(tmp_path).best_step("a", "min") is None and "metrics are ignored" in caplog.text


def test_a_record_that_is_killed_leaves_nothing_that_stays(tmp_path: pathlib.Path, use_disk: Any) -> None:
    save_steps(tmp_path, [1])
    folder = tmp_path / "step-00000001"
    (folder / "metrics.json.abcdef.tmp").write_bytes(b"{")

    class Broken(Disk):
        def link(self, old: str, new: str) -> None:
            raise OSError(5, "Input/output error")

    use_disk(Broken())
    with pytest.raises(OSError, match="Input"):
        tr.record(tmp_path, 1, {"a": 1})
    stores.register(stores.Filesystem(Disk()))
    assert tr.open(tmp_path).metrics == {}
    save_steps(tmp_path, [2])
    assert len(list(folder.iterdir())) == 2


# Evaluators


def follow_in_background(run: pathlib.Path, **options: Any) -> tuple[list[int], threading.Thread]:
    seen: list[int] = []

    def work() -> None:
        for ckpt in tr.follow(run, **options):
            assert ckpt.step is not None
            seen.append(ckpt.step)

    thread = threading.Thread(target=work)
    thread.start()
    return seen, thread


def until(condition: Any) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("this never came")


@pytest.mark.parametrize("follow", [tr.follow, tr.follow_weights])
def test_waiting_at_a_path_that_is_no_run_is_logged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, follow: Any
) -> None:
    tr.save(tmp_path / "shards", {"w": np.ones(3)}, format="safetensors", max_shard_size=1000)
    tr.save(tmp_path / "pulled" / "model.safetensors", {"w": np.ones(3)})
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").touch()
    for name, said in {
        "shards": f"; `treering show {tmp_path}/shards` reads it",
        "pulled": f"; `treering show {tmp_path}/pulled` reads it",
        "pulled/model.safetensors": f"; it is a file; `treering show {tmp_path}/pulled/model.safetensors` reads it",
        "notes.txt": "; it is a file",
        "new": "",
    }.items():
        caplog.clear()
        caplog.set_level(logging.WARNING if said else logging.INFO)
        assert list(follow(tmp_path / name, timeout=0.01)) == []
        assert caplog.messages == [f"{tmp_path}/{name}: waits for the first step{said}"]


def test_following_a_run_next_to_an_object_of_its_name(caplog: pytest.LogCaptureFixture) -> None:
    run = "memory://following/run"
    tr.save(run, {"w": np.ones(3)}, format="safetensors")
    tr.save(f"{run}/step-00000001", {"w": np.ones(3)}, step=1)
    assert [ckpt.step for ckpt in tr.follow(run, timeout=0)] == [1]
    assert not caplog.messages


def test_recording_where_no_run_is_says_what_is_meant(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, {"w": np.ones(3)})
    for path, step, said in (
        ("rum", 1, f"none; the closest path is {tmp_path}/run\\n"),
        ("nothing", 1, "none; the run has no steps\\n"),
        ("run", 2, r"none; was it deleted meanwhile\?\n"),
    ):
        with pytest.raises(NotFoundError, match=f"expected step {step}, found {said}"):
            tr.record(tmp_path / path, step, {"loss": 1.0})


@pytest.mark.slow
def test_follow_yields_each_step_once_until_finished(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """`follow` yields each step once, ascending, and ends when the run is finished."""
    run = tmp_path / "run"
    seen, thread = follow_in_background(run)  # before the run exists
    with tr.Checkpointer(run) as ckpts:
        for step in (0, 10):
            ckpts.save(step, {"x": step})
        until(lambda: seen == [0, 10])
    assert caplog.text.count("there is nothing yet; waits for the first step") == 1
    time.sleep(0.7)
    assert thread.is_alive(), "leaving the block does not end it"
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(20, {"x": 20})
        until(lambda: seen == [0, 10, 20])
        ckpts.save(30, {"x": 30})
        ckpts.finish()
    thread.join(30)
    assert not thread.is_alive() and seen == [0, 10, 20, 30]
    assert [ckpt.step for ckpt in tr.follow(run, after=10)] == [20, 30]
    with pytest.raises(MismatchError, match="closed"):
        ckpts.save(40, {"x": 1})


def test_following_a_long_run_finds_a_replaced_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each poll looks again at a few steps, so that one that another has replaced is found some polls later."""
    monkeypatch.setattr("treering._run.follow._POLL_SECONDS", 0.001)
    for step in range(1, 61):
        tr.save(tmp_path / f"step-{step:08}", {"n": step}, step=step)
    steps = tr.follow(tmp_path, timeout=10)
    assert [next(steps).step for _ in range(60)] == [*range(1, 61)]
    for step in (3, 30, 58):
        tr.save(tmp_path / f"step-{step:08}", {"n": -step}, step=step, overwrite=True)
        assert next(steps)["n"] == -step


def test_a_finished_run_that_goes_on_is_not_finished(tmp_path: pathlib.Path) -> None:
    ckpts = tr.Checkpointer(tmp_path)
    ckpts.save(1, {"x": 1})
    ckpts.finish()
    assert (tmp_path / "finished").exists()
    with tr.Checkpointer(tmp_path) as ckpts:
        assert ckpts.restore()["x"] == 1 and (tmp_path / "finished").exists(), "reading changes nothing"
        ckpts.save(2, {"x": 2})
    assert not (tmp_path / "finished").exists()
    assert [ckpt.step for ckpt in tr.follow(tmp_path, timeout=0)] == [1, 2]


def test_follow_of_deleted_steps(tmp_path: pathlib.Path) -> None:
    """`follow` leaves out deleted steps. A yielded step can be read after its deletion."""
    save_steps(tmp_path, range(1, 6))
    steps = tr.follow(tmp_path, timeout=0)
    first = next(steps)
    with tr.Checkpointer(tmp_path) as ckpts:
        for step in (1, 2, 3):
            ckpts.delete(step)
    assert first.step == 1 and first.restore()["x"][0] == 1
    assert [ckpt.step for ckpt in steps] == [4, 5]


@pytest.mark.long
def test_damaged_steps_are_left_out_until_they_are_saved_again(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [1, 2, 3])
    (file,) = (tmp_path / "step-00000002").glob("*.safetensors")
    os.truncate(file, 100) if os.access(file, os.W_OK) else None
    steps = tr.follow(tmp_path, timeout=1)
    assert [next(steps).step, next(steps).step] == [1, 3]
    save_steps(tmp_path, [2])
    assert [ckpt.step for ckpt in steps] == [2]


@pytest.mark.long
def test_steps_that_are_saved_again_after_a_rewind_are_new(tmp_path: pathlib.Path) -> None:
    save_steps(tmp_path, [1, 2])
    steps = tr.follow(tmp_path, timeout=0.5)
    assert [next(steps).step, next(steps).step] == [1, 2]
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.rewind(1)
        ckpts.save(2, {"x": np.full(3, 22)})
        ckpts.wait()
        (again,) = steps
        assert again.step == 2 and again.restore()["x"][0] == 22


@pytest.mark.long
def test_a_slow_evaluator_gets_the_newest_steps(tmp_path: pathlib.Path, caplog: Any) -> None:
    """With `newest` it gets no step twice, and always the last one. Retention deletes steps, and one is damaged."""
    caplog.set_level(logging.INFO, "treering")
    ckpts = tr.Checkpointer(tmp_path, keep=tr.keep.last(2))
    steps = tr.follow(tmp_path, newest=True, after=1)
    for step in range(1, 5):
        ckpts.save(step, {"x": np.full(3, step)}).result()
    first = next(steps)
    assert first.step == 4 and first.restore()["x"][0] == 4 and "step 4 is the newest; left out: 3" in caplog.text
    for step in range(5, 9):
        ckpts.save(step, {"x": np.full(3, step)}).result()
    until(lambda: tr.steps(tmp_path) == [7, 8])
    (file,) = (tmp_path / "step-00000008").glob("*.safetensors")
    file.unlink()
    assert next(steps).step == 7 and "step 8 is left out" in caplog.text
    for step in (8, 7):  # A step that is saved again is new, also if it is older than the last one.
        ckpts.rewind(7)
        ckpts.save(step, {"x": np.full(3, 10 * step)}, on_exists="overwrite").result()
        again = next(steps)
        assert again.step == step and again.restore()["x"][0] == 10 * step
    ckpts.save(9, {"x": np.full(3, 9)})
    ckpts.finish()
    assert [ckpt.step for ckpt in steps] == [9]


@pytest.mark.long
def test_the_newest_step_is_never_older_than_the_one_before(tmp_path: pathlib.Path) -> None:
    """Uploads of older steps may end later than those of newer ones."""
    seen, thread = follow_in_background(tmp_path / "run", newest=True, timeout=20)  # before the run exists
    save_steps(tmp_path / "run", [5])
    until(lambda: seen == [5])
    save_steps(tmp_path / "run", [3])
    time.sleep(0.7)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(6, {"x": 6})
        ckpts.finish()
    thread.join(30)
    assert not thread.is_alive() and seen == [5, 6]


def test_an_evaluator_follows_the_run_of_another_library(tmp_path: pathlib.Path) -> None:
    from flax.training import checkpoints

    for step in (1, 2):
        checkpoints.save_checkpoint(str(tmp_path), {"x": np.ones(3)}, step, keep=10)
    assert [path for path in tr.follow(tmp_path, timeout=0) for path in [os.path.basename(path.path)]] == [
        "checkpoint_1",
        "checkpoint_2",
    ]


@pytest.mark.parametrize(
    "options", [{"after": "x"}, {"after": -1}, {"timeout": -1}, {"timeout": "x"}, {"newest": 5}], ids=str
)
def test_follow_raises_at_the_call_for_wrong_arguments(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    with pytest.raises(MismatchError):
        tr.follow(tmp_path, **options)


# Steps that late metrics rule out

KEEP = tr.keep.best(1, "val", "min") | tr.keep.last(1)


def evaluate(run: pathlib.Path, *steps: int) -> None:
    """Records a metric for the steps of a run, in another process without a policy. Step 2 is the best."""
    code = (
        "import sys, treering as tr\nfor n in map(int, sys.argv[2:]): tr.record(sys.argv[1], n, {'val': abs(n - 2.0)})"
    )
    subprocess.run([sys.executable, "-c", code, str(run), *map(str, steps)], check=True)


@pytest.mark.parametrize("finish", [True, False], ids=["finish", "close"])
def test_metrics_after_the_last_save_prune_where_the_policy_is(tmp_path: pathlib.Path, finish: bool) -> None:
    """Metrics that are recorded after the last save delete steps only in a process with the policy."""
    with tr.Checkpointer(tmp_path, keep=KEEP) as ckpts:
        ckpts.save(1, {"x": 1}, force=True)
        ckpts.restore()
        for step in range(2, 6):
            ckpts.save(step, {"x": step})
        ckpts.wait()
        first = ckpts
        ckpts.pin(4)
        if finish:
            ckpts.finish()
    assert tr.steps(tmp_path) == [1, 2, 3, 4, 5]
    tr.record(tmp_path, 1, {"other": 0.0})
    tr.record(tmp_path, 3, {"val": 1.0})
    assert tr.steps(tmp_path) == [1, 2, 3, 4, 5], "the others may be better"
    for step in (1, 2, 4):
        tr.record(tmp_path, step, {"val": abs(step - 2.0)})
    assert tr.steps(tmp_path) == [1, 2, 4, 5], "1 was restored, 4 is pinned, 5 is the last"
    assert (tmp_path / "finished").exists() == finish and not list(tmp_path.glob("*.lock"))
    assert not (tmp_path / "step-00000003").exists()
    with tr.Checkpointer(tmp_path, keep=KEEP) as ckpts:
        ckpts.restore()
        held = ckpts.open(1)
        assert ckpts.open().step == ckpts.restored_step == 5
    assert tr.steps(tmp_path) == [1, 2, 4, 5], "reading changes nothing"
    assert held["x"] == 1
    with tr.Checkpointer(tmp_path, keep=KEEP) as ckpts:
        ckpts.restore_or_init(lambda: {"x": 0})
        assert ckpts.steps == [2, 4, 5], (
            "this job continues, and the first one no longer protects its step, though it is alive"
        )
    assert first.restored_step == 1


@pytest.mark.long
def test_metrics_while_the_run_is_written_prune_at_once(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path, keep=KEEP) as ckpts:
        for step in range(1, 6):
            ckpts.save(step, {"x": step})
        ckpts.wait()
        until(lambda: not ckpts.is_saving)
        for step in (1, 2, 3):
            tr.record(tmp_path, step, {"val": abs(step - 2.0)})
        assert ckpts.steps == [2, 4, 5]
        evaluate(tmp_path, 4)
        assert ckpts.steps == [2, 4, 5], "the other process has no policy"
    assert tr.steps(tmp_path) == [2, 5], "close() applies the policy once more"


def test_a_step_returns_if_a_save_begins_while_it_is_deleted(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """A save that began meanwhile judges the step itself, perhaps by another metric."""
    looks, check = itertools.count(1), PendingSaves.check_no_save

    def begun(self: PendingSaves) -> None:
        save_begins = next(looks) % 2 == 0  # right after the manifest was removed
        with self.changing_run() if save_begins else contextlib.nullcontext():
            check(self)

    with tr.Checkpointer(tmp_path, keep=KEEP) as ckpts:
        for step in range(1, 6):
            ckpts.save(step, {"x": step})
        ckpts.wait()
        until(lambda: not ckpts.is_saving)
        before = ckpts.steps
        with monkeypatch.context() as patch:
            patch.setattr(PendingSaves, "check_no_save", begun)
            for step in (1, 2, 3):
                tr.record(tmp_path, step, {"val": abs(step - 2.0)})
        assert next(looks) > 2 and ckpts.steps == before and tr.restore(tmp_path, step=1) == {"x": 1}


def test_metrics_that_a_hook_records_prune_at_the_end(tmp_path: pathlib.Path) -> None:
    def evaluator(report: Any) -> None:
        for step in range(1, 6) if report.step == 5 else ():
            tr.record(tmp_path, step, {"val": abs(step - 2.0)})

    with tr.Checkpointer(tmp_path, keep=KEEP, on_save=evaluator) as ckpts:
        for step in range(1, 6):
            ckpts.save(step, {"x": step})
    assert tr.steps(tmp_path) == [2, 5]


OPENING = {
    "restore_or_init": lambda ckpts: ckpts.restore_or_init(lambda: {"x": np.zeros(3, int)}),
    "finish": lambda ckpts: ckpts.finish(),
    "save": lambda ckpts: ckpts.save(6, {"x": 6}).result(),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", OPENING)
def test_late_metrics_prune_at_next_open(tmp_path: pathlib.Path, how: str) -> None:
    """Metrics from another process delete steps when the next job applies its policy."""
    save_steps(tmp_path, range(1, 6), KEEP)
    evaluate(tmp_path, 1, 2, 3, 4, 5)
    assert tr.steps(tmp_path) == [1, 2, 3, 4, 5]
    reader = tr.Checkpointer(tmp_path, keep=tr.keep.last(2))
    reader.restore()
    reader.close()
    assert tr.steps(tmp_path) == [1, 2, 3, 4, 5], "this policy uses no metric; its next save applies it"
    OPENING[how](ckpts := tr.Checkpointer(tmp_path, keep=KEEP))
    assert tr.steps(tmp_path) == [2, 6 if how == "save" else 5]
    ckpts.close()
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{n:08}" for n in ckpts.steps}


def test_reading_deletes_nothing(tmp_path: pathlib.Path) -> None:
    """Another job may have restored a step that the policy does not keep. It acquires the lease with its next save."""
    save_steps(tmp_path, range(1, 6), KEEP)
    for step in range(1, 6):
        store, path = stores.get(str(tmp_path)), f"{tmp_path}/step-{step:08}"
        metrics_files.write(
            store, path, summary.identity(store, path), {"val": abs(step - 2.0)}
        )  # as another process does
    with tr.Checkpointer(tmp_path, keep=KEEP) as reader:
        held = reader.open(3)
        reader.restore()
        reader.open()
    assert tr.steps(tmp_path) == [1, 2, 3, 4, 5] and held.restore()["x"][0] == 3


@pytest.mark.slow
def test_going_back_to_a_step_that_late_metrics_rule_out(tmp_path: pathlib.Path) -> None:
    """A restored step stays, even if late metrics rule it out."""
    save_steps(tmp_path, range(1, 6), KEEP)
    evaluate(tmp_path, 1, 2, 3, 4, 5)
    with tr.Checkpointer(tmp_path, keep=KEEP) as ckpts:
        assert ckpts.restore(step=3)["x"][0] == 3
    assert tr.steps(tmp_path) == [1, 2, 3, 4, 5], "nothing was saved after it"
    with tr.Checkpointer(tmp_path, keep=KEEP) as ckpts:
        ckpts.restore(step=3)
        ckpts.save(4, {"x": 4})
    assert tr.steps(tmp_path) == [2, 3, 4]


@pytest.mark.slow
def test_open_deletes_nothing_while_another_job_writes(tmp_path: pathlib.Path) -> None:
    """`restore_or_init` with late metrics deletes no step while another job writes the run."""
    code = f"""
import sys, treering as tr
ckpts = tr.Checkpointer({str(tmp_path)!r})
for step in range(1, 6):
    ckpts.save(step, {{"x": step}})
ckpts.wait()
print("saved", flush=True)
sys.stdin.read()
ckpts.close()
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as job:
        assert job.stdout and job.stdout.readline() == b"saved\n"
        for step in range(1, 6):
            tr.record(tmp_path, step, {"val": abs(step - 2.0)})
        with tr.Checkpointer(tmp_path, keep=KEEP) as ckpts:
            ckpts.restore()
        assert tr.steps(tmp_path) == [1, 2, 3, 4, 5]
        job.communicate(b"")
        assert job.returncode == 0


def test_a_reader_takes_the_lock_from_no_other_checkpointer(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path) as writer:
        for step in range(1, 6):
            writer.save(step, {"x": step})
        writer.wait()
        until(lambda: not writer.is_saving)
        for step in range(1, 6):
            tr.record(tmp_path, step, {"val": abs(step - 2.0)})
        with tr.Checkpointer(tmp_path, keep=KEEP) as reader:
            assert reader.restore_or_init(lambda: {"x": 0})[0]["x"] == 5
        (link := tmp_path.with_name("link")).symlink_to(tmp_path)
        with tr.Checkpointer(link, keep=KEEP) as reader:
            assert reader.restore_or_init(lambda: {"x": 0})[0]["x"] == 5
        writer.save(6, {"x": 6})
    assert tr.steps(tmp_path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_evaluator_process_feeds_retention_of_training(tmp_path: pathlib.Path) -> None:
    """Metrics that an evaluator records in another process decide which steps the training job keeps."""
    code = f"""
import treering as tr
for ckpt in tr.follow({str(tmp_path)!r}, timeout=60):
    tr.record({str(tmp_path)!r}, ckpt.step, {{"val/loss": abs(float(ckpt["x"][()]) - 3)}})
"""
    with subprocess.Popen([sys.executable, "-c", code]) as evaluator:
        with tr.Checkpointer(tmp_path, keep=tr.keep.best(1, "val/loss", "min")) as ckpts:
            for step in range(1, 6):
                ckpts.save(step, {"x": np.float32(step)})
                ckpts.wait()
                until(lambda step=step: "val/loss" in tr.open(tmp_path, step=step).metrics)
            assert ckpts.best_step("val/loss", "min") == 3
            ckpts.save(6, {"x": np.float32(6)})
            ckpts.finish()
        assert evaluator.wait(60) == 0
    assert ckpts.steps == [3, 6]


# Metrics of TensorBoard


@pytest.fixture
def events(tmp_path: pathlib.Path) -> Iterator[Any]:
    """Writes scalars into an event file, in the old and in the new way of TensorFlow."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    writers: dict[str, Any] = {}

    def write(
        run: str,
        tag: str,
        step: int,
        value: float,
        *,
        as_tensor: bool = False,
        job: str = "",
        purge_step: int | None = None,
    ) -> None:
        folder = str(tmp_path / "logs" / run)
        writer = writers[folder + job] = writers.get(folder + job) or EventFileWriter(folder, filename_suffix=job)
        if purge_step is not None:
            writer.add_event(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        if as_tensor:
            one = Summary.Value(tag=tag, tensor=make_tensor_proto(np.float32(value)))
            one.metadata.plugin_data.plugin_name = "scalars"
        else:
            one = Summary.Value(tag=tag, simple_value=value)
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[one])))
        writer.flush()

    yield write
    for writer in writers.values():
        writer.close()


@pytest.mark.long
def test_metrics_are_found_in_event_files_when_they_arrive(tmp_path: pathlib.Path, events: Any) -> None:
    run = tmp_path / "run"
    keep = tr.keep.best(1, "eval/acc", "max")
    with tr.Checkpointer(run, keep=keep, tensorboard=tmp_path / "logs") as ckpts:
        for step, acc in ((41, None), (42, None), (43, 0.6), (44, 0.5), (45, 0.4)):
            ckpts.save(step, {"x": step})
            ckpts.wait()
            if acc is not None:
                events("eval", "acc", step, acc, as_tensor=step == 44)
        assert ckpts.best_step("eval/acc", "max") == 43
        ckpts.save(46, {"x": 46})
        ckpts.wait()
        assert ckpts.steps == [41, 42, 43, 46]
    keep = tr.keep.best(1, "eval/acc", "max", unscored="drop")
    with tr.Checkpointer(run, keep=keep, tensorboard=tmp_path / "logs") as ckpts:
        events("", "top", 43, 7)
        assert ckpts.best_step("top", "min") == 43
        ckpts.save(47, {"x": 47}, metrics={"eval/acc": 0.1})
        ckpts.wait()
        assert ckpts.steps == [43, 47]


def test_runs_behind_links_are_read(tmp_path: pathlib.Path, events: Any) -> None:
    """As TensorBoard does. Links may lead to each other."""
    for step in (1, 2):
        events("../elsewhere/run-7", "loss", step, step)
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / "latest").symlink_to(tmp_path / "elsewhere" / "run-7")
    (tmp_path / "elsewhere" / "run-7" / "around").symlink_to(tmp_path / "logs")
    with tr.Checkpointer(tmp_path / "run", tensorboard=tmp_path / "logs") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"x": step})
        ckpts.wait()
        assert ckpts.best_step("latest/loss", "max") == 2


def test_a_restarted_writer_forgets_later_scalars(tmp_path: pathlib.Path, events: Any) -> None:
    """As TensorBoard does for `purge_step`: the job went back to step 2, and wrote no accuracy of step 3 since."""
    for step, value in ((1, 0.1), (2, 0.2), (3, 0.9)):
        events("", "acc", step, value, job=".1")
        events("other", "acc", step, value)
    events("", "acc", 4, 0.3, job=".2", purge_step=3)
    with tr.Checkpointer(tmp_path / "run", tensorboard=tmp_path / "logs") as ckpts:
        for step in (1, 2, 3, 4):
            ckpts.save(step, {"x": step})
        ckpts.wait()
        assert ckpts.best_step("acc", "max") == 4 and ckpts.best_step("other/acc", "max") == 3


def test_metrics_of_event_files_count_for_other_programs(tmp_path: pathlib.Path, events: Any) -> None:
    run, keep = tmp_path / "run", tr.keep.last(4) | tr.keep.best(1, "eval/acc", "max")
    with tr.Checkpointer(run, keep=keep, tensorboard=tmp_path / "logs") as ckpts:
        for step, acc in ((1, 0.5), (2, float("nan")), (3, 0.4)):
            events("eval", "acc", step, acc)
            ckpts.save(step, {"x": step}, metrics={"eval/acc": 0.3} if step == 3 else None).result()
            ckpts.wait()
        assert {row.step: row.metrics.get("eval/acc") for row in list_run(run).rows}[1] == 0.5
        files = sorted(run.rglob("metrics-*"))
        events("eval", "acc", 1, 0.6)  # a later value replaces it
        ckpts.save(4, {"x": 4}).result()
        ckpts.wait()
    metrics = {row.step: row.metrics for row in list_run(run).rows}
    assert metrics[1] == {"eval/acc": pytest.approx(0.6)} and metrics[3] == {"eval/acc": 0.3} and not metrics[4]
    assert np.isnan(metrics[2]["eval/acc"]) and len(sorted(run.rglob("metrics-*"))) == len(files) + 1
    assert tr.open(run, step=1).metrics == metrics[1]


@pytest.mark.parametrize("url", ["s3://bucket/logs", "gs:/bucket/logs"])
def test_event_files_in_a_bucket_are_refused(url: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match=r"found a URL; event files are read only from disks: sync them to one"):
        tr.Checkpointer(tmp_path / "run", tensorboard=url)


def test_a_tag_without_its_run_is_named_again(tmp_path: pathlib.Path, events: Any, caplog: Any) -> None:
    """The first warning comes before the first evaluation, when the right name cannot be in it."""
    keep = tr.keep.last(1) | tr.keep.best(1, "val/acc", "max")
    with tr.Checkpointer(tmp_path / "run", keep=keep, tensorboard=tmp_path / "logs") as ckpts:
        for step in range(1, 13):
            events("eval", "loss", step, 1 / step)
            if step > 2:
                events("eval", "val/acc", step, step)
            ckpts.save(step, {"x": step}).result()
            ckpts.wait()
    said = [text for text in caplog.messages if "none of the" in text]
    assert [text.split("none of the ")[1].split()[0] for text in said] == ["2", "3", "6", "12"]
    assert said[1].endswith("they have eval/loss, eval/val/acc; the closest name is eval/val/acc")


@pytest.mark.long
@pytest.mark.whole
def test_two_jobs_may_write_events_into_one_directory(tmp_path: pathlib.Path, events: Any) -> None:
    with tr.Checkpointer(tmp_path / "run", tensorboard=tmp_path / "logs") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"x": step})
            ckpts.wait()
            events("", "loss", step, -step)
            events("", "acc", step, step, job=".eval")
            assert ckpts.best_step("acc", "max") == step
            assert ckpts.best_step("loss", "min") == step


def test_event_files_that_cannot_be_read_delete_nothing(tmp_path: pathlib.Path, events: Any, caplog: Any) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    events("", "loss", 1, 0.5)
    (tmp_path / "logs" / "b.tfevents").symlink_to("nowhere")
    with tr.Checkpointer(tmp_path / "run", keep=tr.keep.last(1), tensorboard=tmp_path / "logs") as ckpts:
        ckpts.save(1, {"x": 1})
        ckpts.wait()
        assert ckpts.best_step("loss", "min") == 1
        with open(tmp_path / "logs" / "c.tfevents", "wb") as file:
            RecordWriter(file).write(b"no event")
        ckpts.save(2, {"x": 2})
        ckpts.wait()
        assert ckpts.steps == [1, 2] and "c.tfevents: expected TensorBoard's events" in caplog.text
    with pytest.raises(CorruptError, match=r"c\.tfevents: expected TensorBoard's events"):
        tr.Checkpointer(tmp_path / "run", tensorboard=tmp_path / "logs").best_step("loss", "min")


def test_what_was_given_with_a_step_counts_more_than_event_files(tmp_path: pathlib.Path, events: Any) -> None:
    for step in (1, 2):
        events("eval", "loss", step, 3 - step)
    with tr.Checkpointer(tmp_path / "run", tensorboard=tmp_path / "logs") as ckpts:
        ckpts.save(1, {"x": 1}, metrics={"eval/loss": 0.0})
        ckpts.save(2, {"x": 2})
        ckpts.wait()
        assert ckpts.best_step("eval/loss", "min") == 1
    with tr.Checkpointer(tmp_path / "run", tensorboard=tmp_path / "none") as ckpts:
        assert ckpts.best_step("eval/loss", "min") == 1, "a directory that is not there yet"


def test_metrics_of_foreign_steps_count_for_the_best(tmp_path: pathlib.Path) -> None:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in ((1, 0.5), (2, 0.1)):
            manager.save(step, args=ocp.args.StandardSave({"x": np.ones(3)}), metrics={"loss": loss})
        manager.wait_until_finished()
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(3, {"x": np.ones(3)}, metrics={"loss": 0.3})
        ckpts.wait()
        assert ckpts.best_step("loss", "min") == 2 and ckpts.best_step("loss", "max") == 1


def test_rules_change_what_a_run_saves(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, {"w": np.ones((2, 3)), "old": 1}, rules=[tr.rules.drop("old"), tr.rules.transpose("w", (1, 0))])
        ckpts.wait()
        assert {path: leaf.shape for path, leaf in ckpts.open(1).items()} == {"w": (3, 2)}


# Several processes


@pytest.mark.long
def test_peers_wait_for_the_lease_in_the_first_save(tmp_path: pathlib.Path) -> None:
    """A bucket's lease takes up to 90 seconds, more than `timeout`. Here acquiring is made slow in process 0."""
    results = run_job(tmp_path, "runs.peers_wait_for_the_lease_in_the_first_save", processes=2)
    assert [result.report for result in results] == [[1, 2], [1, 2]]


@pytest.mark.slow
def test_several_processes_decide_together(tmp_path: pathlib.Path) -> None:
    results = run_job(tmp_path, "runs.several_processes_decide_together", processes=2)
    for index, result in enumerate(results):
        reports, steps, rewound, branched, refused, finished, taken, slow = result.report
        assert reports == ([1, 2, 3, 4, 5, 4] if index == 0 else [])
        assert (steps, rewound, branched) == ([3, 4, 5], [3, 4], [3, 4])
        assert refused[0] == "MismatchError" and "another Checkpointer of this process writes this run" in refused[1]
        assert finished == [3, 4, 5, 6] and taken == [True, False] and slow == [1]
    assert tr.steps(tmp_path / "run" / "rewound-1") == [5] and tr.steps(tmp_path / "run" / "rewound-2") == [4]


def test_next_job_removes_leftovers_next_to_steps(tmp_path: pathlib.Path) -> None:
    """One process's share of a tree of several processes is first saved under a temporary name. A kill leaves that."""
    names = [".step-00000005.0fe007.tmp", ".step-00000006.0fe008.tmp", ".other.0fe007.tmp", ".step-00000007.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    fd = os.open(tmp_path / names[1], os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # Its writer is alive.
        save_steps(tmp_path, [8])
        assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], "step-00000008"])
    finally:
        os.close(fd)
