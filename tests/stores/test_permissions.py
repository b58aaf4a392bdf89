"""Kernels and volumes that differ from this machine. Most are doubles, because the real ones are rarely available."""

import errno
import fcntl
import json
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import refused_syscalls
import treering as tr
from helpers import Closed
from treering.errors import NotFoundError, UnsupportedError
from treering.stores import buffers, nfs
from treering.stores.posix import Disk

as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can change its user, or owners"
)


class NoHints(mmap.mmap):
    """Memory on a kernel without transparent huge pages, where the hint raises an error."""

    def madvise(self, *_: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such hint")
def test_a_hint_never_fails_a_save_or_a_verification(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save or verification succeeds if the kernel refuses a memory hint."""
    monkeypatch.setattr(buffers.mmap, "mmap", NoHints)
    tree = {"w": np.arange(2 << 20, dtype=np.float32)}
    tr.save(tmp_path / "c", tree)
    tr.save(tmp_path / "c.safetensors", tree)
    assert tr.verify(tmp_path / "c").ok and tr.verify(tmp_path / "c.safetensors").ok
    assert (tr.restore(tmp_path / "c", mmap=False)["w"] == tree["w"]).all()


NO_HINTS = """
    import errno, sys
    import numpy as np
    import treering as tr
    import refused_syscalls
    refused_syscalls.refuse("madvise", errno.EPERM)
    place, tree = sys.argv[1], {"w": np.arange(2 << 20, dtype=np.float32)}
    for name in ("c", "c.safetensors"):
        tr.save(f"{place}/{name}", tree)
        for how in ({}, {"verify": False}, {"mmap": True}, {"mmap": False}):
            assert (tr.restore(f"{place}/{name}", **how)["w"] == tree["w"]).all()
        assert tr.verify(f"{place}/{name}").ok
    """


@pytest.mark.slow
@pytest.mark.skipif(not refused_syscalls.available(), reason="no system call can be refused here")
def test_no_hint_is_needed_where_the_kernel_takes_none(tmp_path: pathlib.Path) -> None:
    """Everything works on a kernel that refuses all memory hints."""
    tests = os.path.dirname(os.path.dirname(__file__))
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    script = [sys.executable, "-c", textwrap.dedent(NO_HINTS), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.whole
def test_what_cannot_be_looked_into_is_no_step(
    tmp_path: pathlib.Path, use_disk: Callable[[Disk], Disk], caplog: pytest.LogCaptureFixture
) -> None:
    """A directory without read permission is not listed as a step, and the log says so once."""
    nfs.warn_unlistable.cache_clear()
    with tr.Checkpointer(tmp_path) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"n": step})
    closed = ("lost+found", "data", "streaming_state", "checkpoint_x", "x7", "checkpoint_7", "7", "step-00000007")
    for name in closed:
        (tmp_path / name).mkdir()
    use_disk(Closed(*closed))
    for _ in range(3):
        assert tr.steps(tmp_path) == [1, 2] and tr.restore(tmp_path) == {"n": 2}
        assert [ckpt.step for ckpt in tr.follow(tmp_path, timeout=0)] == [1, 2]
    with tr.Checkpointer(tmp_path) as ckpts:
        assert ckpts.restore_or_init(lambda: {"n": 0}) == ({"n": 2}, 2)
        ckpts.save(8, {"n": 8})
    assert tr.steps(tmp_path) == [1, 2, 8]
    with pytest.raises(PermissionError, match="4 of 7 checkpoints cannot be checked"):  # those with a number
        tr.verify(tmp_path)
    assert tr.open(tmp_path).step == 8
    for name in closed[5:]:  # The message appears only once.
        assert caplog.text.count(f"/{name}: it cannot be read (Permission denied)") == 1, name


def test_run_with_only_unlistable_steps_is_not_restarted(
    tmp_path: pathlib.Path, use_disk: Callable[[Disk], Disk]
) -> None:
    """A run whose steps are all unreadable raises an error, instead of starting from the beginning."""
    with tr.Checkpointer(tmp_path) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"n": step})
    use_disk(Closed("step-00000001", "step-00000002"))
    assert tr.steps(tmp_path) == []
    with tr.Checkpointer(tmp_path) as ckpts:
        with pytest.raises(
            UnsupportedError, match=r"step-00000001: .*cannot be looked into \(Permission denied, owned by user "
        ):
            ckpts.restore_or_init(lambda: {"n": 0})
        with pytest.raises(NotFoundError):
            ckpts.restore()
        for call in (ckpts.delete, ckpts.pin, ckpts.open, lambda step: ckpts.restore(step=step)):
            with pytest.raises(NotFoundError, match="cannot be looked into"):
                call(2)
    use_disk(Disk())
    with tr.Checkpointer(tmp_path) as ckpts:
        assert ckpts.restore_or_init(lambda: {"n": 0}) == ({"n": 2}, 2)


@as_root
@pytest.mark.slow
def test_a_volume_of_which_root_has_closed_folders() -> None:
    """A job without root's rights uses a volume with real directories that only root may read.

    The volume is outside the test's own directory, which other users may not enter.
    """
    code = """
import os, sys
import treering as tr
def use(run):
    with tr.Checkpointer(run, keep=tr.keep.last(2)) as ckpts:
        for step in (8, 9, 10):
            ckpts.save(step, {"n": step})
    with tr.Checkpointer(run) as ckpts:
        assert ckpts.restore_or_init(lambda: {"n": 0}) == ({"n": 10}, 10)
    assert tr.steps(run) == [9, 10] and tr.restore(run) == {"n": 10} and tr.open(run).step == 10
    assert [ckpt.step for ckpt in tr.follow(run, timeout=0)] == [9, 10]
use(sys.argv[1] + "/as-root")  # also imports everything
os.setgid(65534); os.setuid(65534)
use(sys.argv[1])
try:
    tr.verify(sys.argv[1])
except PermissionError as error:
    assert "3 of 5 checkpoints cannot be checked" in str(error)
else:
    raise AssertionError("not all of it was read")
"""
    with tempfile.TemporaryDirectory() as place:
        for name in ("lost+found", "7", "checkpoint_7", "step-00000007"):
            os.mkdir(f"{place}/{name}", mode=0o700)
        os.chmod(place, 0o777)
        done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("lost+found") == 0 and done.stderr.count("step-00000007: it cannot be read") == 1


class LocksAsOverNFS(Disk):
    """Refuses exclusive locks for files that are open only for reading, as NFSv4 does (EBADF)."""

    def lock(self, fd: int) -> bool | None:
        return super().lock(fd) if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR else None


class NoLocks(Disk):
    """Has no locks, as Lustre without `-o flock` (ENOSYS)."""

    def lock(self, fd: int) -> bool | None:
        return None

    lock_shared = lock


@pytest.mark.long
@pytest.mark.whole
def test_over_nfs_leftovers_go_and_live_files_stay(tmp_path: pathlib.Path, use_disk: Callable[[Disk], Disk]) -> None:
    """Over NFS, files of a killed save are removed and those of a running save stay."""
    use_disk(LocksAsOverNFS())
    path = tmp_path / "c"
    for n in range(3):
        tr.save(path, {"n": np.full(3, n)}, overwrite=True)
    for name in ("arrays-abcdef-00000-of-00001.safetensors", "treering.json.abcdef.tmp"):
        (path / name).touch()  # of a killed save
    (path / "arrays-012345-00000-of-00001.safetensors").touch()
    (path / "arrays-012345-00001-of-00002.safetensors").touch()
    with open(path / "treering.json.012345.tmp", "w+b") as living:  # of a save that runs elsewhere
        fcntl.flock(living, fcntl.LOCK_EX)
        tr.save(path, {"n": np.full(3, 3)}, overwrite=True)
        assert sum("012345" in name for name in os.listdir(path)) == 3 and len(os.listdir(path)) == 5
    tr.save(path, {"n": np.full(3, 4)}, overwrite=True)
    assert len(os.listdir(path)) == 2 and (tr.restore(path)["n"] == 4).all()


@pytest.mark.long
def test_without_locks_leftovers_stay_and_are_logged(
    tmp_path: pathlib.Path, use_disk: Callable[[Disk], Disk], caplog: pytest.LogCaptureFixture
) -> None:
    """Without locks, replaced and deleted files are removed, and the log names the leftovers that stay."""
    nfs.warn_no_locks.cache_clear()
    use_disk(NoLocks())
    path = tmp_path / "c"
    for n in range(10):
        tr.save(path, {"n": np.full(3, n)}, overwrite=True)
    assert len(os.listdir(path)) == 2 and not caplog.records
    (path / "arrays-abcdef-00000-of-00001.safetensors").touch()  # of a killed save, or of one that runs elsewhere
    for n in range(2):
        tr.save(path, {"n": np.full(3, n)}, overwrite=True)
    assert len(os.listdir(path)) == 3
    assert caplog.text.count("files cannot be locked on this file system") == 1
    with tr.Checkpointer(tmp_path / "run", keep=tr.keep.last(1)) as ckpts:
        for step in range(4):
            ckpts.save(step, {"n": step})
            ckpts.wait()
            tr.record(tmp_path / "run", step, {"loss": 1.0})
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000003"]
    assert "another job" in caplog.text and caplog.text.count("cannot be locked") == 2


def test_leftovers_that_cannot_be_listed_are_logged(
    tmp_path: pathlib.Path, use_disk: Callable[[Disk], Disk], caplog: pytest.LogCaptureFixture
) -> None:
    class Unlisted(Disk):
        def list(self, path: Any) -> list[str]:
            raise PermissionError(errno.EACCES, "Permission denied")

    use_disk(Unlisted())
    tr.save(tmp_path / "w.safetensors", {"w": np.ones(3)})
    assert "w.safetensors: removing what killed writers left failed: " in caplog.text
    assert (tmp_path / "w.safetensors").exists()


@pytest.mark.long
def test_a_colleague_of_the_group_may_go_on_after_a_killed_job(tmp_path: pathlib.Path) -> None:
    """The modes of all files allow another user of the group to continue after a killed job."""
    before = os.umask(0o002)
    try:
        code = "import os, signal, sys, treering as tr; c = tr.Checkpointer(sys.argv[1]); c.save(1, {'n': 1}); c.wait()"
        subprocess.run([sys.executable, "-c", f"{code}; os.kill(os.getpid(), signal.SIGKILL)", str(tmp_path / "run")])
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes.pop("run/writer.lock") == 0o664
    for name, mode in modes.items():  # Files never change, so they are read-only; directories decide about the rest.
        assert mode == (0o775 if "." not in name else 0o444), (name, oct(mode))


@as_root
@pytest.mark.slow
def test_two_colleagues_one_after_the_other() -> None:
    """Two users of a group continue a run in turns, each after the other's job was killed."""
    code = """
import os, signal, sys
import treering as tr
with tr.Checkpointer(sys.argv[1] + "/warm", keep=tr.keep.last(1)) as ckpts:
    ckpts.save(1, {"n": 1}), ckpts.save(2, {"n": 2})
    ckpts.restore()
os.umask(0o002); os.setgroups([]); os.setgid(54321); os.setuid(int(sys.argv[2]))
ckpts = tr.Checkpointer(sys.argv[1] + "/run", keep=tr.keep.last(1))
state, step = ckpts.restore_or_init(lambda: {"n": 0})
assert state == {"n": step}
ckpts.save(step + 1, {"n": step + 1}).result()
ckpts.pin(step + 1), ckpts.unpin(step + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, 0, 54321)
        os.chmod(place, 0o2775)
        for n, user in enumerate(("50001", "50002", "50001")):
            run = [sys.executable, "-c", code, place, user]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            assert done.returncode == -9, done.stderr[-3000:]
            assert tr.steps(f"{place}/run")[-1] == n + 1
            shutil.rmtree(f"{place}/warm")


OWNS = "is owned by user 5001, mode 2755, and user 5002 may not write to it; ask them for `chmod g+w"
MOVE = "or, if it is not needed, `mv /run/step-00000003 /run/step-00000003.old`"
STAYS = (
    "/run/writer.lock is owned by user 5001, mode 644, who alone may remove or move it in a sticky directory; ask them"
)


@as_root
@pytest.mark.slow
def test_what_a_killed_colleague_owns_is_no_obstacle_or_is_named() -> None:
    """With umask 022, a colleague may write the run, but not what the first job has made in it."""
    cases: dict[tuple[str, str, bool], tuple[list[int], list[str]]] = {
        # the mode of the run, what happens there, and True if the first job lives: the steps, and what is said
        ("2775", "save", False): ([1, 2, 3, 4, 5], ["the lock names us"]),
        ("3775", "save", False): ([1, 2, 3, 4, 5], [f"{STAYS} for `rm /run/writer.lock`", "the lock names another"]),
        ("2775", "save", True): ([1, 2, 3], ["ExistsError /run: process", "writes this run"]),
        ("3775", "save", True): ([1, 2, 3], ["ExistsError /run: process", "writes this run"]),
        ("2755", "save", False): ([1, 2, 3], ["SaveError", f"/run {OWNS} /run`"]),
        ("2775", "unreadable", False): ([], ["/run/writer.lock: owned by user 5001, mode 600", "rm /run/writer.lock"]),
        ("2775", "link", False): ([1, 2, 3], ["/run/writer.lock: expected", "found a link that is owned by user 5001"]),
        ("2775", "retention", False): ([1, 2, 3, 5], [f"step 1 stays until this user may delete it: .*{OWNS}"]),
        ("3775", "finished", False): ([1, 2, 3, 4, 5], ["stays marked as finished", "ask them for `rm /run/finished`"]),
        ("2775", "finished", False): ([1, 2, 3, 4, 5], ["the lock names us"]),
        ("2775", "partial", False): ([1, 2], [f"SaveError .*/run/step-00000003 {OWNS} /run/step-00000003` {MOVE}"]),
        ("2775", "record", False): ([1, 2, 3], [f"SaveError .*/run/step-00000002 {OWNS}"]),
        ("2775", "pin", False): ([1, 2, 3], [f"SaveError .*/run/step-00000002 {OWNS}"]),
        ("2775", "delete", False): ([1, 2, 3], [f"SaveError .*/run/step-00000002 {OWNS}"]),
        ("2775", "rewind", False): ([1, 2, 3], [f"SaveError .*/run/step-00000003 {OWNS}"]),
    }
    script = [sys.executable, os.path.join(os.path.dirname(__file__), "two_users.py"), json.dumps([*cases])]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for (case, (steps, said)), (found, text) in zip(cases.items(), json.loads(done.stdout), strict=True):
        assert found == steps, (case, text)
        for each in said:
            assert re.search(re.escape(each).replace(r"\.\*", ".*"), text), (case, each, text)


def test_a_lock_file_of_another_user_that_cannot_be_locked(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """Over NFS, only who may write a file can lock it. The error says what to remove, and nothing is written."""

    class Nfs(Disk):
        def open_shared(self, path: str) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

        def lock(self, fd: int) -> None:
            return None  # EBADF

    (tmp_path / "writer.lock").touch()
    use_disk(Nfs())
    with tr.Checkpointer(tmp_path) as ckpts, pytest.raises(tr.errors.SaveError, match=r"rm .*writer\.lock"):
        ckpts.save(1, {"x": 1}).result()
    assert os.listdir(tmp_path) == ["writer.lock"]


@pytest.mark.parametrize("umask", [0o022, 0o027])
@pytest.mark.parametrize(
    ("change", "is_linked"),
    [
        (lambda file: None, True),
        (lambda file: file.chmod(file.stat().st_mode | 0o200), True),  # as copied by another tool
        (lambda file: file.chmod(0o464), False),  # others could change it later
        (lambda file: file.chmod(0o400), False),  # readers of the new checkpoint could not read it
        pytest.param(lambda file: os.chown(file, 65534, 65534), False, marks=as_root),
        pytest.param(lambda file: os.chown(file, 65534, -1), False, marks=as_root),
    ],
    ids=["same", "writable", "group", "private", "owner", "owner alone"],
)
def test_files_of_another_owner_or_mode_are_not_linked(
    tmp_path: pathlib.Path, umask: int, change: Callable[[pathlib.Path], object], is_linked: bool
) -> None:
    """A checkpoint shares files with its base only if the same users may read and change them."""
    tree = {"w": np.random.default_rng(0).standard_normal(400_000).astype(np.float32)}
    before = os.umask(umask)
    try:
        tr.save(tmp_path / "base", tree)
        (file,) = (tmp_path / "base").glob("*.safetensors")
        change(file)
        tr.save(tmp_path / "c", tree, base=tmp_path / "base")
    finally:
        os.umask(before)
    assert file.stat().st_nlink == 1 + is_linked
    (made,) = (tmp_path / "c").glob("*.safetensors")
    assert made.stat().st_uid == os.geteuid() and made.stat().st_mode & 0o577 == 0o444 & ~umask
    assert tr.verify(tmp_path / "c").ok and np.array_equal(tr.restore(tmp_path / "c")["w"], tree["w"])
