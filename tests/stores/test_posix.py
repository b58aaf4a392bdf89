"""The operations of `Disk`, and their portable fallbacks."""

import errno
import mmap
import os
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import treering as tr
from helpers import open_at
from treering import stores
from treering.formats.treering import removal
from treering.stores import directories, file_io
from treering.stores import posix as module
from treering.stores.buffers import aligned, empty_aligned_array
from treering.stores.filesystem import Filesystem
from treering.stores.posix import Disk


@pytest.fixture(params=["native", "portable"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects Linux as it is, or a system without the calls that only some systems have."""
    if request.param == "portable":
        for name in ("O_DIRECT", "O_CLOEXEC", "pwrite", "preadv", "posix_fallocate"):
            monkeypatch.delattr(os, name)
        monkeypatch.setattr(module, "fcntl", None)
        monkeypatch.setattr(module.sys, "platform", "other")
        monkeypatch.setattr(module, "_CAN_POPULATE", False)
        monkeypatch.setattr(module, "HAS_DIR_FD", False)
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    return request.param


@pytest.mark.long
def test_saving_restoring_and_overwriting_work_everywhere(tmp_path: pathlib.Path, platform: str) -> None:
    rng = np.random.default_rng(0)
    for n in range(3):
        state = {"x": rng.random(1_500_000), "y": rng.random(7), "n": n}
        tr.save(tmp_path / "c", state, overwrite=True)
        for mapped in (None, True, False):
            found = tr.restore(tmp_path / "c", mmap=mapped)
            np.testing.assert_array_equal(found["x"], state["x"])
            np.testing.assert_array_equal(found["y"], state["y"])
    assert tr.verify(tmp_path / "c").ok
    left = len(list((tmp_path / "c").glob("*.safetensors")))
    assert left == 1  # replaced files are known without locks


@pytest.mark.usefixtures("platform")
def test_a_new_file_is_exclusive_and_read_only_in_the_end(tmp_path: pathlib.Path) -> None:
    """Creating an existing file fails, and a finished file is read-only."""
    disk, path = Disk(), str(tmp_path / "x")
    fd = disk.create(path)
    buffer = aligned(5000)
    buffer[:3] = b"abc"
    disk.write(fd, buffer, 0)
    disk.truncate(fd, 3)
    disk.make_read_only(fd)
    disk.sync(fd)
    disk.close(fd)
    assert file_io.read_file(Filesystem(disk), path) == b"abc"
    assert os.stat(path).st_mode & 0o777 == 0o444
    with pytest.raises(FileExistsError):
        disk.create(path)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no list of open descriptors")
def test_links_on_the_way_leave_no_descriptor_open(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real" / "run").mkdir(parents=True)
    (tmp_path / "relative").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    before = open_at(tmp_path)
    fd = module.open_trusted(str(tmp_path / "absolute" / "run"))
    if fd is not None:
        assert os.path.samestat(os.fstat(fd), os.stat(tmp_path / "real" / "run"))
        os.close(fd)
    assert open_at(tmp_path) == before


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no list of open descriptors")
def test_a_file_whose_writing_fails_is_closed(tmp_path: pathlib.Path) -> None:
    store = stores.get(str(tmp_path))
    for n in range(100):
        with pytest.raises(ZeroDivisionError), store.new_file(f"{tmp_path}/{n}", overwrite=bool(n % 2)) as file:
            file.write(bytes(1 // 0))
    assert len(open_at(tmp_path)) < 50 and not os.listdir(tmp_path)


def test_writes_go_on_after_short_ones(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:4096], offset))
    tr.save(tmp_path / "c", {"x": np.arange(100_000)})
    assert tr.verify(tmp_path / "c").ok
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 100)
    with pytest.raises(tr.errors.SaveError, match="less than a page"):
        tr.save(tmp_path / "d", {"x": np.arange(100_000)})


def test_reads_go_on_after_short_ones(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(tmp_path / "c", {"x": np.arange(100_000)})
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [b[:1000] for b in buffers], offset))
    for mapped in (True, False):
        np.testing.assert_array_equal(tr.restore(tmp_path / "c", mmap=mapped)["x"], np.arange(100_000))


def test_file_systems_that_refuse_direct_io(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, *rest, **more))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    tr.save(tmp_path / "c", {"x": np.arange(100_000)})
    assert tr.verify(tmp_path / "c").ok


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct writing")
def test_direct_writes_refused_to_several_threads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads get a refusal before the first of them has ended direct writing; all continue without it."""
    fcntl = pytest.importorskip("fcntl")
    real, together = os.pwrite, threading.Barrier(3)

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return real(fd, data, offset)
        together.wait(10)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwrite", refuse)
    disk = Disk()
    fd = disk.create(str(tmp_path / "x"))
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        disk.close(fd)
        pytest.skip("this file system has no direct writing")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: disk.write(fd, aligned(4096), 4096 * n), range(3)))
    assert disk.size(fd) == 3 * 4096
    disk.close(fd)


def test_nothing_is_opened_for_direct_writing_on_fuse(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct writing is not used on FUSE: some of its programs refuse it only when data is written."""
    real = os.open
    monkeypatch.setattr(module, "_filesystem_type", lambda place: 0x65735546)

    def check(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        assert not flags & getattr(os, "O_DIRECT", 0)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", check)
    tr.save(tmp_path / "c", {"x": np.arange(100_000)})
    assert tr.verify(tmp_path / "c").ok


def test_file_servers_that_go_by_the_mode_of_what_is_open(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file becomes read-only last: over 9P only root can truncate a read-only file, even an open one."""
    real = os.ftruncate

    def refuse(fd: int, size: int) -> None:
        if not os.fstat(fd).st_mode & 0o200:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real(fd, size)

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = os.umask(0o077)
    try:
        tr.save(tmp_path / "c", {"x": np.arange(1000)})
    finally:
        os.umask(before)
    tr.save(tmp_path / "c.safetensors", {"x": np.arange(1000)})
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()} == {0o400}


def test_an_error_of_the_disk_at_a_link_is_no_word_about_links(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EIO from `link` does not mean that links are unsupported: over a network, the link may exist already."""
    real = os.link

    def made(*args: Any, **more: Any) -> None:
        real(*args, **more)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", made)
    (tmp_path / "a").write_text("1")
    Disk().link(str(tmp_path / "a"), str(tmp_path / "b"))
    assert os.path.samefile(tmp_path / "a", tmp_path / "b")

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Disk().link(str(tmp_path / "gone"), str(tmp_path / "c"))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EIO, errno.EXDEV])
def test_file_systems_without_hard_links(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    tr.save(tmp_path / "c", {"x": np.arange(10)})
    assert tr.verify(tmp_path / "c").ok and len(os.listdir(tmp_path / "c")) == 2
    transaction = Disk()
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    with pytest.raises(FileExistsError):
        transaction.link(str(tmp_path / "a"), str(tmp_path / "b"))


def test_local_file_systems_are_recognized(tmp_path: pathlib.Path) -> None:
    with directories.opened(Disk(), "/proc/self/maps") as fd:
        assert not Disk().is_local(fd)
    (tmp_path / "x").write_text("x")
    with directories.opened(Disk(), str(tmp_path / "x")) as fd:
        assert Disk().is_local(fd)


@pytest.mark.parametrize("shape", [(3,), (1000, 7), (512, 1024)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16, np.complex64])
def test_jax_takes_adoptable_memory_over_without_a_copy(shape: tuple[int, ...], dtype: Any) -> None:
    """JAX adopts memory from `empty_aligned_array` without copying it."""
    arrays = [empty_aligned_array(shape, np.dtype(dtype)) for _ in range(5)]
    for array in arrays:
        array[...] = 1
        assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize("times", [1, 1000])
def test_stale_name_is_looked_up_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A stale NFS name (ESTALE) is looked up again, a limited number of times.

    Real ones would need two hosts, so the errors are simulated wherever names are looked up.
    """
    tr.save(tmp_path / "c", {"x": np.ones(3)})
    left = {"open": times, "stat": times, "listdir": times}

    def stale(name: str) -> Any:
        real = getattr(os, name)

        def call(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).startswith(str(tmp_path / "c")) and left[name]:
                left[name] -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return real(path, *args, **options)

        return call

    for name in left:
        monkeypatch.setattr(os, name, stale(name))
    if times == 1:
        assert (tr.restore(tmp_path / "c")["x"] == 1).all() and tr.verify(tmp_path / "c").ok
        assert not left["open"] and not left["stat"]
    else:
        for call in (tr.restore, tr.open, tr.verify):
            with pytest.raises(tr.errors.NotFoundError):
                call(tmp_path / "c")
        assert tr.steps(tmp_path / "c") == []


@pytest.mark.parametrize("times", range(1, 5))
def test_file_that_goes_stale_while_open_is_looked_up_again(tmp_path: pathlib.Path, times: int) -> None:
    """A file that becomes stale while it is open is opened again, and never counts as missing.

    Otherwise files of a valid checkpoint would be removed as leftovers.
    """

    class Stale(Disk):
        left = times

        def size(self, fd: int) -> int:
            if self.left:
                self.left -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().size(fd)

    tr.save(tmp_path / "c", {"x": np.ones(3)})
    before = sorted(os.listdir(tmp_path / "c"))
    assert file_io.read_file(Filesystem(Stale()), str(tmp_path / "c/treering.json"))
    removal.collect_garbage(Filesystem(Stale()), str(tmp_path / "c"))
    assert sorted(os.listdir(tmp_path / "c")) == before
    with stores.using(Filesystem(Stale())):
        assert (tr.restore(tmp_path / "c")["x"] == 1).all()


class WithoutFolders(Disk):
    """A disk that cannot open directories, as on Windows."""

    def open_dir(self, path: str) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


@pytest.mark.parametrize("disk", [Disk(), WithoutFolders()], ids=["folders are opened", "as on Windows"])
def test_trees_are_replaced_and_removed_everywhere(
    tmp_path: pathlib.Path, platform: str, disk: Disk, use_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing and removing directories works on every platform, and never follows a link out of them."""
    if isinstance(disk, WithoutFolders):
        monkeypatch.setattr(module, "HAS_DIR_FD", False)
    use_disk(disk)
    outside, path = tmp_path / "outside", tmp_path / "c"
    outside.mkdir()
    (outside / "precious").touch()
    for n in range(2):
        tr.save(path, {"a": np.full(3, n), "b": np.zeros(3)}, format="safetensors", max_shard_size=10, overwrite=True)
        (path / "notes").touch()
        if not n:
            (path / "link").symlink_to(outside)
    assert (tr.restore(path)["a"] == 1).all() and {"notes", "link"} < set(os.listdir(path))
    with stores.get("").scratch_folder(str(path)) as scratch:
        for folder in (scratch, f"{scratch}/d", f"{scratch}/d/e"):
            os.makedirs(folder, exist_ok=True)
            os.symlink(outside, f"{folder}/link")
            pathlib.Path(folder, "file").touch()
    with tr.Checkpointer(tmp_path / "run", keep=tr.keep.last(1)) as ckpts:
        for step in range(3):
            ckpts.save(step, {"n": step})
    assert tr.steps(tmp_path / "run") == [2] and (tmp_path / "run" / "step-00000002").is_dir()
    assert sorted(os.listdir(tmp_path)) == ["c", "outside", "run"] and os.listdir(outside) == ["precious"]
