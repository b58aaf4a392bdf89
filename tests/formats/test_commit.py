"""Tests of commits, of deletion, and of the removal of leftovers."""

import contextlib
import errno
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import treering as tr
from treering import stores
from treering.errors import SaveError
from treering.formats.treering import removal
from treering.formats.treering.commit import Transaction
from treering.formats.treering.save_files import Outcome, SaveFiles
from treering.stores.posix import Disk
from treering.stores.store import FinishedFile


class Recording(Disk):
    """A disk that logs its operations, with the beginning of each file's name."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}

    def _note(self, operation: str, path: str) -> None:
        self.log.append((operation, os.path.basename(path).split("-")[0]))

    def make_dir(self, path: str) -> None:
        self._note("make_dir", path)
        super().make_dir(path)

    def create(self, path: str) -> int:
        self._note("create", path)
        fd = super().create(path)
        self.names[fd] = path
        return fd

    def sync(self, fd: int) -> None:
        self._note("sync", self.names[fd])
        super().sync(fd)

    def sync_dir(self, path: str) -> None:
        self._note("sync_dir", path)
        super().sync_dir(path)

    def link(self, old: str, new: str) -> None:
        self._note("link", new)
        super().link(old, new)

    def rename(self, old: str, new: str) -> None:
        self._note("rename", new)
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        self._note("unlink", path)
        super().unlink(path)

    def close(self, fd: int) -> None:
        if fd in self.names:
            self._note("close", self.names.pop(fd))
        super().close(fd)


def short(log: list[tuple[str, str]]) -> list[str]:
    """Returns the operations as text, with every temporary name replaced by "tmp"."""
    return [f"{operation} {'tmp' if name.endswith('.tmp') else name}" for operation, name in log]


def test_the_order_of_a_commit(tmp_path: pathlib.Path, use_disk) -> None:
    disk = use_disk(Recording())
    tr.save(tmp_path / "run" / "c", {"x": np.ones(3)})
    assert short(disk.log) == [
        # The process that made this folder may have been killed before it made the name durable.
        f"sync_dir {tmp_path.parent.name.split('-')[0]}",
        "make_dir run",
        f"sync_dir {tmp_path.name.split('-')[0]}",
        "make_dir c",
        "create tmp",  # The temporary manifest is empty. It shows the other processes that they share a file system.
        "create arrays",
        "sync arrays",
        "sync_dir run",
        "sync tmp",
        "sync_dir c",
        "link treering.json",
        "sync_dir c",
        "unlink tmp",
        "close tmp",
        "close arrays",
    ]
    disk.log.clear()
    tr.save(tmp_path / "run" / "c", {"x": np.ones(3)}, overwrite=True)
    assert short(disk.log) == [
        "create tmp",
        "create arrays",
        "sync arrays",
        "sync_dir run",
        "sync tmp",
        "sync_dir c",
        "rename treering.json",
        "sync_dir c",
        "close tmp",
        "close arrays",
        "unlink arrays",
    ]


def test_deleting_takes_the_manifest_first(tmp_path: pathlib.Path, use_disk) -> None:
    """A delete removes the manifest first. A crash in between then leaves no damaged checkpoint."""
    tr.save(tmp_path / "c", {"x": np.ones(3)})
    disk = use_disk(Recording())
    removal.delete(stores.Filesystem(disk), str(tmp_path / "c"))
    assert short(disk.log) == ["unlink treering.json", "sync_dir c", "unlink arrays"]
    assert os.listdir(tmp_path) == []


def test_arrays_of_a_stale_save_stay_until_a_commit(tmp_path: pathlib.Path) -> None:
    """In a store without locks it may only be suspended, before it replaces the manifest that is there."""
    tr.save(tmp_path / "c", {"x": np.ones(3)})
    left, arrays = (
        tmp_path / "c" / name for name in ("treering.json.a1b2c3.tmp", "arrays-a1b2c3-00000-of-00001.safetensors")
    )
    left.touch()
    arrays.touch()
    assert removal.revoke_stale_saves(stores.Filesystem(Disk()), str(tmp_path / "c")) == [arrays.name]
    assert arrays.exists() and not left.exists()


WRITER = """
    import sys, threading, numpy as np, treering as tr
    from treering import stores
    class Held(stores.Disk):
        def sync(self, fd):
            print("writing", flush=True)
            sys.stdin.readline()
            super().sync(fd)
    stores.register(stores.Filesystem(Held()))
    tr.save(sys.argv[1], {"x": np.ones(3)}, overwrite=True)
    """


def start_writer(path: pathlib.Path) -> subprocess.Popen[str]:
    """Starts a process that overwrites a checkpoint, and waits until it is about to sync its first file."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "writing\n"
    return process


@pytest.mark.long
def test_a_living_writers_files_stay_and_a_killed_ones_go(tmp_path: pathlib.Path) -> None:
    """Removing leftovers keeps the files of a running save, and the next save removes those of a killed one."""
    path = tmp_path / "c"
    writer = start_writer(path)
    half = {p.name for p in path.iterdir()}
    assert len(half) == 2  # the array file and the temporary manifest
    removal.collect_garbage(stores.get(""), str(path))
    assert {p.name for p in path.iterdir()} == half
    tr.save(path, {"x": np.zeros(3)})  # It commits while the writer still runs. The writer then replaces it.
    assert half < {p.name for p in path.iterdir()}
    writer.communicate("go\n" * 3, timeout=60)
    assert tr.restore(path)["x"][0] == 1 and len(list(path.iterdir())) == 2

    writer = start_writer(path)
    writer.kill()
    writer.communicate()
    assert len(list(path.iterdir())) == 4
    assert tr.restore(path)["x"][0] == 1
    tr.save(path, {"x": np.full(3, 2)}, overwrite=True)
    assert tr.restore(path)["x"][0] == 2 and len(list(path.iterdir())) == 2


@pytest.mark.long
def test_a_file_that_can_never_be_locked_fails_the_save_soon(tmp_path: pathlib.Path, use_disk) -> None:
    """If the file system refuses every lock, a save raises after a limited number of attempts."""

    class Refusing(Disk):
        tries = 0

        def lock(self, fd: int) -> bool:
            self.tries += 1
            return False

        def create(self, path: str) -> int:
            self.tries += 1
            return super().create(path)

    disk = use_disk(Refusing())
    with pytest.raises(tr.errors.SaveError, match="check that file locks"):
        tr.save(tmp_path / "c", {"x": np.ones(3)})
    assert disk.tries < 100


def test_file_removed_before_it_was_locked_is_made_again(tmp_path: pathlib.Path, use_disk) -> None:
    """A save survives that another process removes its new file as a leftover before it is locked."""

    class Unlucky(Disk):
        times = 2

        def lock(self, fd: int) -> bool:
            if self.times:
                self.times -= 1
                (file,) = (tmp_path / "c").iterdir()
                file.unlink()
                (tmp_path / "c").rmdir()
            return super().lock(fd)

    disk = use_disk(Unlucky())
    tr.save(tmp_path / "c", {"x": np.ones(3)})
    assert tr.verify(tmp_path / "c").ok and not disk.times


def test_a_damaged_checkpoint_keeps_its_files(tmp_path: pathlib.Path) -> None:
    """The array files of a damaged manifest are not leftovers. Only an overwrite removes them."""
    path = tmp_path / "c"
    tr.save(path, {"x": np.ones(3)})
    (path / "treering.json").chmod(0o644)
    (path / "treering.json").write_bytes(b"{}")
    removal.collect_garbage(stores.get(""), str(path))
    assert len(list(path.iterdir())) == 2
    tr.save(path, {"x": np.ones(3)}, overwrite=True)
    assert tr.verify(path).ok and len(list(path.iterdir())) == 2


class Unanswered(Disk):
    """Fails like a network file system: the link of a manifest fails, done or not, and perhaps the look at it too."""

    def __init__(self, linked: bool, answers: bool):
        self.linked, self.answers = linked, answers

    def link(self, old: str, new: str) -> None:
        if self.linked:
            super().link(old, new)
        raise OSError(errno.EIO, "no answer")

    def same_file(self, fd: int, path: str) -> bool:
        if str(path).endswith("/treering.json") and not self.answers:
            raise OSError(errno.EIO, "no answer")
        return super().same_file(fd, path)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("answers", [False, True])
def test_the_outcome_of_a_commit_whose_reply_is_lost(tmp_path: pathlib.Path, linked: bool, answers: bool) -> None:
    """`abort` removes the files if the manifest is not in place. If the commit is in doubt, they stay."""
    files = Transaction(stores.Filesystem(Unanswered(linked, answers)), f"{tmp_path}/c", overwrite=False)
    files.create("arrays-0.safetensors")
    with contextlib.nullcontext() if linked and answers else pytest.raises((OSError, SaveError)):
        files.commit(b"{}")
    outcome = Outcome.IN_DOUBT if not answers else Outcome.COMMITTED if linked else Outcome.ABORTED
    files.abort()
    assert files.outcome is outcome and files.must_stay == (outcome is not Outcome.ABORTED)
    found = os.listdir(tmp_path / "c") if os.path.exists(tmp_path / "c") else []
    assert ("arrays-0.safetensors" in found) == files.must_stay and ("treering.json" in found) == linked


def test_shared_files_stay_on_the_disk_of_a_host(tmp_path: pathlib.Path) -> None:
    """The temporary manifest of process 0 is on another disk, and a link has no lock that shows a living save."""
    store, path, name = stores.get(str(tmp_path)), f"{tmp_path}/step-2", "arrays-abcdef-00001-of-00002.safetensors"
    old = f"{tmp_path}/old"
    pathlib.Path(old).write_bytes(b"frozen")
    found = store.stat(old)
    assert found
    one, two = (SaveFiles.join_per_host(store, path, "abcdef") for _ in range(2))  # two processes of the host
    assert two.share(name, FinishedFile(old, found.version, found.nbytes))
    removal.collect_garbage(store, path, remove_empty=True)
    assert name in store.list(path)
    for files in (two, one):
        files.unmark()
    assert store.list(path) == [name]
    two.close()
    removal.collect_garbage(store, path, remove_empty=True)
    assert store.list(path) == [] and store.stat(old)
