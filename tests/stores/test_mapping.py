"""Mapped files: what mappings cost, what arrays share, and what happens with pages that cannot be read."""

import errno
import mmap
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treering as tr
from helpers import open_at
from treering.stores import posix as module
from treering.stores.posix import Disk

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists and limits mappings")
NAMES = {"treering": "c", "safetensors": "c.safetensors"}


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns a path for a checkpoint of a format whose files are mapped."""
    return tmp_path / NAMES[request.param]


@LINUX
def test_leaves_read_one_by_one_share_a_mapping(path: pathlib.Path) -> None:
    """Leaves that are read one by one share one mapping and its descriptor."""
    tr.save(path, {f"{n:03}": np.full(1000, n, np.float32) for n in range(120)})
    ckpt = tr.open(path)

    def leaf(n: int) -> np.ndarray:
        return ckpt.select(f"{n:03}").restore(mmap=True)[f"{n:03}"]

    first = leaf(0)
    before = open_at(path)
    held = [first, *(leaf(n) for n in range(119, 0, -1))]
    assert open_at(path) == before != []
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    assert sum(str(path) in line for line in maps) == 1
    assert [array[0] for array in held] == [0, *range(119, 0, -1)]


def test_what_is_written_into_one_array_shows_in_no_other(path: pathlib.Path) -> None:
    """Writing to one restored array changes no other array."""
    tree = {"a": np.arange(6000, dtype=np.float32), "b": np.arange(6000, dtype=np.float32)}
    tr.save(path, tree)
    ckpt = tr.open(path)
    first, part = np.asarray(ckpt["a"]), ckpt.restore()
    first[:] = -1
    part["b"][:] = -2
    again, other = np.asarray(ckpt["a"]), np.asarray(ckpt["b"])
    for found in (again, part["a"]):
        np.testing.assert_array_equal(found, tree["a"])
    np.testing.assert_array_equal(other, tree["b"])
    again[:] = -3
    del first, part, other
    np.testing.assert_array_equal(ckpt.restore()["a"], tree["a"])


def test_writing_into_an_unverified_array_is_no_damage(tmp_path: pathlib.Path) -> None:
    """Writing to an unverified array does not make a later read of its block report damage."""
    tree = {"a": np.arange(200_000.0), "b": np.arange(200_000.0)}  # both are in the second block
    tr.save(tmp_path / "c", tree)
    ckpt = tr.open(tmp_path / "c")
    written = ckpt.restore({"a": tree["a"], "b": ...}, verify=False)["a"]
    written[:] = -1
    np.testing.assert_array_equal(np.asarray(ckpt["b"]), tree["b"])
    (file,) = (tmp_path / "c").glob("arrays-*")
    file.chmod(0o644)
    with file.open("r+b") as damaged:
        damaged.seek(file.stat().st_size - 1)
        damaged.write(b"\1")
    ckpt = tr.open(tmp_path / "c")
    written = ckpt.restore({"a": tree["a"], "b": ...}, verify=False)["a"]
    written[:] = -1
    with pytest.raises(tr.errors.CorruptError, match="damaged leaves: b"):
        np.asarray(ckpt["b"])


def test_damage_that_comes_between_two_reads_is_seen(tmp_path: pathlib.Path) -> None:
    """Damage between two reads is detected, although the first read has verified the block."""
    tr.save(tmp_path / "c", {"a": np.zeros(65_544), "b": np.ones(393_216)})  # both are in the first block
    ckpt = tr.open(tmp_path / "c")
    first = ckpt.select("a").restore(mmap=True)["a"]
    (file,) = (tmp_path / "c").glob("arrays-*")
    file.chmod(0o644)
    with file.open("r+b") as damaged:
        damaged.seek(4096 + 600_000)
        damaged.write(b"\xee")
    with pytest.raises(tr.errors.CorruptError, match=r"damaged leaves: .*b"):
        ckpt.select("b").restore(mmap=True)
    assert not first.any()


def test_nested_mapping_gets_its_own_memory(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """A signal handler that maps a file while its thread maps the same file gets its own memory."""
    tr.save(tmp_path / "c", {"a": np.arange(100_000.0), "b": np.arange(100.0)})

    class Interrupted(Disk):
        """A disk whose `map` is interrupted by a signal handler that reads the same file."""

        handler: Callable[[], None] | None = None

        def map(self, fd: int, size: int) -> mmap.mmap:
            handler, self.handler = self.handler, None
            if handler:
                handler()
            return super().map(fd, size)

    disk = use_disk(Interrupted())
    ckpt = tr.open(tmp_path / "c")
    found: list[np.ndarray] = []
    disk.handler = lambda: found.append(ckpt.select("a").restore(mmap=True)["a"])
    found.append(ckpt.select("a").restore(mmap=True)["a"])
    assert len(found) == 2 and not np.shares_memory(*found)
    for n, array in enumerate(found):
        array[:] = -1 - n
    for name, size in (("a", 100_000), ("b", 100)):
        np.testing.assert_array_equal(ckpt.select(name).restore(mmap=True)[name], np.arange(float(size)))
    assert [array[0] for array in found] == [-1, -2]


class Unmapped(Disk):
    """A disk that cannot map, for lack of address space, descriptors or support."""

    def __init__(self, error: Exception):
        self.error = error

    def map(self, fd: int, size: int) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "x"), OSError(errno.EMFILE, "x"), OSError(errno.ENODEV, "x"), ValueError("x")]
)
@pytest.mark.parametrize("verify", [True, False])
def test_where_mapping_is_refused_files_are_read(
    path: pathlib.Path, use_disk: Any, error: Exception, verify: bool
) -> None:
    """Files are read where they cannot be mapped."""
    tree = {"a": np.arange(300_000, dtype=np.float32), "b": np.arange(6, dtype=np.float32)}
    tr.save(path, tree)
    use_disk(Unmapped(error))
    for mapped in (None, True):
        found = tr.restore(path, mmap=mapped, verify=verify)
        assert all((found[key] == tree[key]).all() for key in tree)
    np.testing.assert_array_equal(np.asarray(tr.open(path)["b"]), tree["b"])


LITTLE = """
    import pathlib, resource, sys
    import numpy as np
    import treering as tr
    np.asarray(tr.open(sys.argv[2])["b"])  # loads all code before memory is limited
    status = pathlib.Path("/proc/self/status").read_text()
    used = int(status.split("VmSize:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
    assert np.asarray(tr.open(sys.argv[1])["b"]).tolist() == [0, 1, 2, 3, 4, 5]
    assert tr.open(sys.argv[1])["a"][7:9].tolist() == [7, 8]
    """


@LINUX
@pytest.mark.slow
def test_slice_of_a_file_larger_than_the_address_space(path: pathlib.Path) -> None:
    """A few bytes of a file can be read even if the address space has no room for all of it."""
    small = path.with_name(f"small-{path.name}")
    tr.save(path, {"a": np.arange(16 << 20, dtype=np.float32), "b": np.arange(6, dtype=np.float32)})
    tr.save(small, {"b": np.arange(6, dtype=np.float32)})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LITTLE), str(path), str(small)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Pages that cannot be read. A double simulates the bad sector: a real one needs the kernel's device mapper.


class BadSector(Disk):
    """A disk on which one page cannot be read, in every file that is long enough to have it."""

    AT = 3 << 20

    def _read_some(self, fd: int, buffer: memoryview, offset: int) -> int:
        if offset <= self.AT < offset + len(buffer) and self.size(fd) > self.AT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super()._read_some(fd, buffer, offset)


class Populated(mmap.mmap):
    """A mapping that reports an unreadable page when it is populated, on any kernel."""

    asked = 0

    def madvise(self, *args: Any) -> None:
        Populated.asked += 1
        begin, size = args[1:] if len(args) == 3 else (0, 0)
        if begin <= BadSector.AT < begin + size:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


@LINUX
@pytest.mark.parametrize("trusted", [True, False], ids=["6.9", "older"])
@pytest.mark.parametrize("verify", [True, False])
def test_unreadable_page_is_damage_before_it_is_accessed(
    path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch, trusted: bool, verify: bool
) -> None:
    """An unreadable page raises `CorruptError` when it is read, and no signal on access."""
    monkeypatch.setattr(module, "_CAN_POPULATE", trusted)
    monkeypatch.setattr(module.mmap, "mmap", Populated)
    tr.save(path, {"a": np.zeros(1000, np.uint8), "b": np.zeros(5 << 20, np.uint8)})
    Populated.asked = 0
    tr.restore(path, verify=verify, mmap=True)
    assert bool(Populated.asked) == trusted  # not called on kernels where it may never return
    use_disk(BadSector())
    for read in (
        lambda: tr.restore(path, verify=verify, mmap=True),
        lambda: np.asarray(tr.open(path)["b"]),
        lambda: tr.open(path)["b"][(3 << 20) - 10_000 : (3 << 20) + 5000],
    ):
        with pytest.raises(tr.errors.CorruptError, match=rf"{path.name}.*cannot be read: .*EIO"):
            read()
    assert np.asarray(tr.open(path)["a"]).size == 1000


@pytest.mark.parametrize(
    ("release", "trusted"),
    [("6.18.44-x", True), ("6.9.0", True), ("6.8.12", False), ("5.14.0-427.el9", False), ("?", False)],
)
def test_which_kernels_may_be_asked_to_populate(monkeypatch: pytest.MonkeyPatch, release: str, trusted: bool) -> None:
    """Only kernels from 6.9 on populate mappings."""
    monkeypatch.setattr(module.os, "uname", lambda: type("", (), {"release": release}))
    monkeypatch.setattr(module.sys, "platform", "linux")
    assert module._can_populate() == trusted


_OTHERS = ("x.safetensors", "x.msgpack", "x.npz", "x.eqx", "x.stream")


@pytest.mark.parametrize("name", _OTHERS)
@pytest.mark.parametrize("rows", [1000, 4])
def test_a_program_writes_into_a_file_in_place(tmp_path: pathlib.Path, name: str, rows: int) -> None:
    """Restored arrays stay as they are. An open checkpoint raises, and never mixes bytes of two versions."""
    path, other = tmp_path / name, tmp_path / f"other-{name}"
    like = {"w": np.zeros((1000, 128), np.float32)}
    for place, value, count in ((path, 1, 1000), (other, 7, rows)):
        tree = {"w": np.full((count, 128), value, np.float32)}
        if name == "x.npz":
            np.savez(place, **tree)
        else:
            tr.save(place, tree, format="fjformer" if name == "x.stream" else None)
    os.utime(path, (1, 1))  # Two writes within a few milliseconds may have one time.
    given = {"like": like} if name == "x.eqx" else {}
    restored, opened = tr.restore(path, **given)["w"], tr.open(path)
    with path.open("wb") as file:
        file.write(other.read_bytes())
    assert (restored == 1).all()
    with pytest.raises(tr.errors.NotFoundError, match=f"{name}: another program wrote into it while it was open; open"):
        opened.restore(**given)
    if rows == 1000:
        assert (tr.restore(path, **given)["w"] == 7).all()


def test_a_file_that_is_written_during_a_restore_is_opened_again(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """The restore returns the arrays of one version."""
    path, other = tmp_path / "x.safetensors", tmp_path / "other.safetensors"
    for place, value in ((path, 1.0), (other, 7.0)):
        tr.save(place, {"a": np.full(20_000, value), "b": np.full(20_000, value)})
    os.utime(path, (1, 1))

    class Writing(Disk):
        """A disk on which a program writes into the file after the first array was read."""

        def read(self, fd: int, buffer: memoryview, offset: int) -> int:
            count = super().read(fd, buffer, offset)
            if len(buffer) == 160_000 and path.stat().st_mtime == 1:
                path.write_bytes(other.read_bytes())
            return count

    use_disk(Writing())
    found = tr.restore(path)
    assert found["a"][0] == found["b"][0] == 7
