"""Tests that no crash loses a checkpoint or leaves half of one, and that these tests would notice a defect."""

import contextlib
import itertools
import os
import pathlib
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import treering as tr
from crashes import checks
from crashes.recording import RecordingDisk, Tree
from crashes.scenarios import tree
from crashes.states import KEPT, LOST, Fate, Model, fates_of
from treering import stores
from treering._run import run_layout as _run
from treering.formats.treering import commit, removal, schema
from treering.stores import atomic
from treering.stores.posix import Disk
from treering.stores.store import Store

SCENARIOS = checks.scenarios()
ONCE = [name for name, one in SCENARIOS.items() if one.broken != "killed twice"]
# These have many states, and checking each takes long.
FOR_TORTURE = (
    "orbax",
    "flax",
    "stream",
    "several array files: killed",
    "run: an error of the disk, with unchanged arrays",
)
CHECKED = [
    *(name for name in ONCE if not (SCENARIOS[name].broken and name.startswith(FOR_TORTURE))),
    "killed twice, then saved, overwriting",
]
QUICK = {  # one scenario of each kind
    *("first save", "overwriting, three processes", "overwriting, several array files", "deleting, two at once"),
    *("an error of the disk, overwriting", "run: a step again", "run: killed while going back, then rewound"),
    *("run: killed, then recording metrics", "safetensors: killed, then saved, overwriting", "flax: overwriting"),
    *("safetensors, several files: overwriting", "safetensors, several files: overwriting, no exchange"),
}
MUTATED = [
    *(name for name in ONCE if ":" not in name and "threads" not in name),
    *(name for name in CHECKED if name.startswith("run")),
    *(name for name in ONCE if name.startswith("safetensors")),
    *("several array files: an error of the disk, overwriting", "several array files: killed, then saved, overwriting"),
    *("orbax: first save", "orbax: overwriting"),
    *("stream: publishing", "stream for slime: saving", "pull: a later version"),
]
# parts of the recordings that take long; they contain all mutations, and `make faults-disk` uses all recordings
PARTS = {
    "run: killed, then saved": (2, 6),
    "run: killed first, then saved": (4, 6),
    "several array files: killed, then saved, overwriting": (0, 5),
}
_SHARES = 4  # the mutations are divided among so many tests


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """Yields a scratch folder, in memory if possible, because tests make thousands of states there."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="treering-crashes-", dir=memory) as directory:
        yield pathlib.Path(directory)


# The library


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CHECKED]
)
def test_no_crash_loses_anything(name: str, folder: pathlib.Path) -> None:
    """Directory syncs fail here. `make faults-disk` lets every operation fail, and runs the omitted scenarios too."""
    count = checks.check(SCENARIOS[name], folder, kind="sync_dir", extra=2)
    assert not count.failures, "\n\n".join(map(str, count.failures))
    assert count.distinct >= 3


# Would the tests notice a defect?


@pytest.mark.slow
@pytest.mark.parametrize("share", range(_SHARES))
def test_every_fsync_and_every_order_matters(share: int, folder: pathlib.Path) -> None:
    """If one sync is left out, or done one step later, some crash loses something.

    Some mutations are listed as harmless. `make faults-disk` proves that, which takes minutes.
    """

    def among(mutation: str) -> bool:
        return zlib.crc32(mutation.encode()) % _SHARES == share and mutation not in checks.HARMLESS

    parts = ((SCENARIOS[name], PARTS.get(name, (0, 1))) for name in MUTATED)
    recordings = (one for scenario, part in parts for one in checks.recorded(scenario, folder, part=part))
    caught = checks.caught(recordings, folder, among=among)
    assert not {name for name, failure in caught.items() if failure is None}
    assert len(caught) > 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        (
            "killed, then saved, first save",
            lambda patch: patch.setattr(commit, "collect_garbage", lambda *args, **options: None),
        ),
        (
            "safetensors: killed, then saved, first save",
            lambda patch: patch.setattr(atomic, "_remove_leftovers", lambda *args: None),
        ),
        ("first save", lambda patch: patch.setattr(RecordingDisk, "sync", Disk.sync)),
        ("overwriting", lambda patch: patch.setattr(RecordingDisk, "sync_dir", Disk.sync_dir)),
        ("deleting", lambda patch: patch.setattr(removal, "delete", _arrays_first)),
        pytest.param(
            "orbax: overwriting",
            lambda patch: patch.setattr(atomic, "_exchange_names", _remove_first),
            marks=pytest.mark.slow,
        ),
        (
            "run: killed while going back, then rewound",
            lambda patch: patch.setattr(_run, "sync_archived", lambda disk, run: None),
        ),
        ("run: rewinding", lambda patch: patch.setattr(_run, "archive_steps", _by_linking)),
        ("flax: overwriting", lambda patch: patch.setattr(RecordingDisk, "rename", _by_copying)),
    ],
)
def test_what_is_wrong_is_found(
    name: str, break_it: Callable[[Any], None], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a scenario fails for each of these deliberate defects."""
    break_it(monkeypatch)
    assert checks.check(SCENARIOS[name], folder).failures


def _arrays_first(store: Store, path: str) -> None:
    for name in sorted(store.list(path)):
        store.delete(os.path.join(path, name))
        store.settle(path)


def _remove_first(disk: Disk, new: str, old: str) -> None:
    atomic.remove_tree(disk, old)
    disk.rename_new(new, old)


def _by_copying(disk: RecordingDisk, old: str, new: str) -> None:
    data = pathlib.Path(old).read_bytes()
    disk.unlink(new)
    fd = disk.create(new)
    disk.write(fd, memoryview(data), 0)
    disk.sync(fd)
    disk.close(fd)


def _by_linking(store: Any, run: str, paths: list[str]) -> None:
    """Renames by linking: each file loses its first name before the second one is durable."""
    place, disk = os.path.join(run, f"rewound-{len(_run.archived_runs(store, run)) + 1}"), store.disk
    disk.make_dir(place)
    for path in paths:
        disk.make_dir(os.path.join(place, os.path.basename(path)))
        for name in disk.list(path):
            disk.link(os.path.join(path, name), os.path.join(place, os.path.basename(path), name))
        removal.delete(store, path)
    disk.sync_dir(place)
    disk.sync_dir(run)


@pytest.mark.long
def test_a_failure_says_where_and_why(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure names the operations before the crash, and what is wrong after it."""
    monkeypatch.setattr(RecordingDisk, "sync", Disk.sync)
    (failure,) = checks.check(SCENARIOS["first save"], folder).failures
    text = str(failure)
    assert "first save: something is there in part (CorruptError)" in text
    assert "lost write a/b/c/" in text and "there is: a/, a/b/, a/b/c/" in text


# The recordings


def test_the_log_explains_what_is_there(folder: pathlib.Path) -> None:
    """A log has the operations of all processes. `check` fails if a file was written without the disk."""
    for name in ("first save, three processes", "orbax: overwriting"):
        (recording,) = checks.recorded(SCENARIOS[name], folder)
        assert {"create", "write", "sync", "sync_dir", "expect"} <= {op.kind for op in recording.log}
    disk = RecordingDisk(str(folder))
    os.close(disk.create(str(folder / "known")))
    disk.check()
    (folder / "unknown").write_bytes(b"x")
    with pytest.raises(AssertionError, match=r"does not explain .*unknown"):
        disk.check()
    disk.list(str(folder))
    disk.check()
    (folder / "unknown").write_bytes(b"other")
    with pytest.raises(AssertionError, match=r"does not explain .*unknown"):
        disk.check()


@pytest.mark.parametrize("name", ["run: recording metrics", "run: going back"])
def test_a_scenario_is_recorded_alike_every_time(name: str, folder: pathlib.Path) -> None:
    """Two recordings of a scenario are equal. Otherwise equal states would be counted twice."""
    (first,), (second,) = (checks.recorded(SCENARIOS[name], folder) for _ in range(2))
    assert first.log == second.log


@pytest.mark.long
def test_a_second_process_is_killed_at_each_of_its_operations(folder: pathlib.Path) -> None:
    once, twice = SCENARIOS["killed, then saved, first save"], SCENARIOS["killed twice, then saved, first save"]
    first = [one.variant for one in checks.recorded(once, folder, kind="sync_dir")]
    assert first[0] == ", killed at operation 1" and len(first) == len(set(first)) > 5
    both = list(checks.recorded(twice, folder, kind="sync_dir"))
    points = [one.variant.removeprefix(", killed twice at operation ").split(" and ") for one in both]
    assert {a for a, _ in points} == {one.removeprefix(", killed at operation ") for one in first}
    assert len({b for a, b in points if a == "1"}) == len(first), "nothing is there, as before the first"
    assert len({tuple(map(str, one.log)) for one in both}) > len(both) / 2


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.endswith(", three processes")])
def test_of_several_processes_each_writes_a_file(name: str, folder: pathlib.Path) -> None:
    """Each of several processes writes an array file."""
    *_, last = checks.recorded(SCENARIOS[name], folder, kind="sync_dir")
    assert {one.process for one in last.log if one.kind == "write" and "arrays-" in one.path} == {0, 1, 2}


@pytest.mark.long
def test_what_recordings_begin_with_alike_is_looked_at_once(folder: pathlib.Path) -> None:
    """States that several recordings have in common are checked only once."""
    scenario = SCENARIOS["safetensors: killed, then saved, first save"]
    each = [checks.examine(one, folder) for one in checks.recorded(scenario, folder, kind="sync_dir")]
    count = checks.check(scenario, folder, kind="sync_dir")
    assert count.looked_at == set().union(*(one.looked_at for one in each))
    assert count.states < sum(one.states for one in each)


def test_all_that_changes_the_disk_is_recorded() -> None:
    """The recording disk overrides every method of a disk that changes it."""
    looking = {
        "stat",
        "lock",
        "lock_shared",
        "same_file",
        "size",
        "has_holes",
        "version",
        "open_dir",
        "read",
        "map",
        "populate",
        "is_local",
    }
    operations = {name for name in vars(Disk) if not name.startswith("_")}
    assert operations - looking <= set(vars(RecordingDisk))


# What a crash can leave


def _trees(base: pathlib.Path, do: Callable[[RecordingDisk], None]) -> list[Tree]:
    """Returns all states that a crash after some operations can leave, by trying all combinations."""
    disk = RecordingDisk(str(base))
    do(disk)
    disk.check()
    model = Model(disk.base, disk.log)
    for op in disk.log:
        model.do(op)
    found: list[Tree] = []
    for fates in itertools.product((KEPT, LOST), repeat=len(model.pending)):
        tree = model.tree(dict(enumerate(fates)))
        if tree not in found:
            found.append(tree)
    return found


def _put(disk: RecordingDisk, path: pathlib.Path, data: bytes, *, sync: bool) -> None:
    fd = disk.create(str(path))
    disk.write(fd, memoryview(data), 0)
    if sync:
        disk.sync(fd)
    disk.close(fd)


def test_what_is_not_synced_may_be_lost(tmp_path: pathlib.Path) -> None:
    a = tmp_path / "a"
    (tmp_path / "x").mkdir()
    assert _trees(tmp_path / "x", lambda disk: _put(disk, tmp_path / "x" / "a", b"1", sync=True)) == [{"a": b"1"}, {}]

    def named(disk: RecordingDisk) -> None:
        _put(disk, a, b"1", sync=False)
        disk.sync_dir(str(tmp_path))

    assert _trees(tmp_path, named) == [{"x": None, "x/a": b"1", "a": b"1"}, {"x": None, "x/a": b"1", "a": b""}]


def test_rename_is_atomic_in_a_crash(tmp_path: pathlib.Path) -> None:
    """A crash leaves a rename done or not done, and nothing in between."""
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    found = _trees(tmp_path, lambda disk: disk.rename(str(tmp_path / "a"), str(tmp_path / "b")))
    assert found == [{"b": b"1"}, {"a": b"1", "b": b"2"}]


def test_exchange_is_atomic_in_a_crash(tmp_path: pathlib.Path) -> None:
    """A crash leaves an exchange of two names done or not done, and nothing in between."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    found = _trees(tmp_path, lambda disk: disk.exchange(str(tmp_path / "a"), str(tmp_path / "b")) and None)
    assert found == [
        {"a": None, "a/b": b"", "b": None, "b/a": b""},
        {"a": None, "a/a": b"", "b": None, "b/b": b""},
    ]


@pytest.mark.parametrize("synced", ["", "a", "b", "ba"])
def test_rename_between_folders_needs_both_synced(tmp_path: pathlib.Path, synced: str) -> None:
    """A rename between two folders is durable only after both folders were synced."""
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "b").mkdir()

    def do(disk: RecordingDisk) -> None:
        disk.rename_new(str(tmp_path / "a" / "x"), str(tmp_path / "b" / "y"))
        for name in synced:
            disk.sync_dir(str(tmp_path / name))

    moved, there = {"a": None, "b": None, "b/y": None}, {"a": None, "a/x": None, "b": None}
    assert _trees(tmp_path, do) == ([moved] if len(synced) == 2 else [moved, there])


def test_name_reused_after_rename_keeps_new_content(tmp_path: pathlib.Path) -> None:
    """A file that takes the old name of a renamed file keeps that name after a crash."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"old")
    (tmp_path / "b").mkdir()

    def do(disk: RecordingDisk) -> None:
        disk.rename(str(tmp_path / "a" / "x"), str(tmp_path / "b" / "x"))
        _put(disk, tmp_path / "a" / "x", b"new", sync=True)
        disk.sync_dir(str(tmp_path / "a"))

    new = {"a": None, "a/x": b"new", "b": None}
    assert _trees(tmp_path, do) == [{**new, "b/x": b"old"}, new]


def test_names_in_one_folder_are_lost_in_any_order(tmp_path: pathlib.Path) -> None:
    for name in "ab":
        (tmp_path / name).touch()

    def do(disk: RecordingDisk) -> None:
        for name in "ab":
            disk.unlink(str(tmp_path / name))

    assert _trees(tmp_path, do) == [{}, {"b": b""}, {"a": b""}, {"a": b"", "b": b""}]


def test_a_folder_is_durable_when_its_parent_is_synced(tmp_path: pathlib.Path) -> None:
    def do(disk: RecordingDisk) -> None:
        disk.make_dir(str(tmp_path / "a"))
        _put(disk, tmp_path / "a" / "b", b"1", sync=True)
        disk.sync_dir(str(tmp_path / "a"))

    assert _trees(tmp_path, do) == [{"a": None, "a/b": b"1"}, {}]
    assert not (tmp_path / "c").exists()


def test_writes_are_lost_torn_and_reordered(tmp_path: pathlib.Path) -> None:
    disk = RecordingDisk(str(tmp_path))
    fd = disk.create(str(tmp_path / "a"))
    disk.preallocate(fd, 8192)
    disk.write(fd, memoryview(b"1" * 4096), 0)
    disk.write(fd, memoryview(b"2" * 4096), 4096)
    disk.truncate(fd, 8000)
    disk.close(fd)
    disk.sync_dir(str(tmp_path))
    model = Model(disk.base, disk.log)
    for op in disk.log:
        model.do(op)
    chosen = list(fates_of(model.pending, random.Random(0), 0))
    found = {model.tree(fates)["a"] for fates in chosen}
    one, two, none = b"1" * 4096, b"2" * 3904, b"\0" * 4096
    assert {one + two, none + two, one + none[:3904], b"", one + b"2" * 4096} <= found
    assert {b"1" * 512 + none[512:] + two, none[:512] + b"1" * 3584 + two, none[:2048] + b"1" * 2048 + two} <= found
    assert one + b"2" * 512 + none[: 3904 - 512] in found
    assert b"\xa5" * 8000 in found
    alone = [op.kind for op in model.pending].index("write")
    assert model.tree({alone: Fate("cut", 100)})["a"] == b"1" * 100


def test_foreign_rubbish_is_removed_by_the_next_writer_alone(tmp_path: pathlib.Path) -> None:
    """The next writer removes leftovers. It keeps a living writer's temporary file, and files with similar names."""
    path, mine = tmp_path / "c.safetensors", tmp_path / ".c.safetensors.mine.tmp"
    mine.touch()
    (tmp_path / ".d.safetensors.0a1b2c.tmp").touch()
    (tmp_path / ".c.safetensors.0a1b2c.tmp").write_bytes(b"left over")
    (tmp_path / ".c.safetensors.0a1b2d.tmp").mkdir()
    (tmp_path / ".c.safetensors.0a1b2d.tmp" / "inside").write_bytes(b"left over")
    kept = {mine.name, ".d.safetensors.0a1b2c.tmp"}
    with stores.get("").new_file(str(path), overwrite=True) as file:
        file.write(b"slow")
        tr.save(path, tree("new"))
        assert {one.name for one in tmp_path.iterdir()} == {*kept, path.name, os.path.basename(file.path)}
        np.testing.assert_array_equal(tr.restore(path)["w"], tree("new")["w"])
    assert path.read_bytes() == b"slow"
    assert {one.name for one in tmp_path.iterdir()} == {*kept, path.name}


def test_a_living_writers_directory_is_not_removed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c"
    options: Any = {"format": "safetensors", "max_shard_size": 100}
    with stores.get("").new_folder(str(path), overwrite=True, owned=lambda store, path: store.list(path)) as folder:
        tr.save(path, tree("new"), **options)
        assert os.path.isdir(folder)
        tr.save(folder + "/inside", tree("old"), **options)
    assert [one.name for one in tmp_path.iterdir()] == ["c"]
    np.testing.assert_array_equal(tr.restore(path / "inside")["w"], tree("old")["w"])


def test_a_file_that_was_taken_for_left_over_is_made_again(tmp_path: pathlib.Path, use_disk: Any) -> None:
    """Another process takes a new file for a leftover: it gets the lock before the writer, and removes the file."""

    class Hasty(Disk):
        taken = 0

        def lock(self, fd: int) -> bool | None:
            if self.taken < 2:
                self.taken += 1
                with contextlib.suppress(OSError):
                    for name in self.list(str(tmp_path)):
                        atomic._remove(self, str(tmp_path / name))
                return self.taken == 1 and super().lock(fd)
            return super().lock(fd)

    for format, name in (("flax", "c.msgpack"), ("orbax", "c")):
        disk = use_disk(Hasty())
        tr.save(tmp_path / name, tree("new"), format=format)
        assert disk.taken == 2
        assert [one.name for one in tmp_path.iterdir()] == [name]
        atomic._remove(disk, str(tmp_path / name))


def test_delete_survives_deletion_by_another_process(tmp_path: pathlib.Path) -> None:
    """Another process deletes the checkpoint and its directory while this one is about to remove the manifest."""

    class Slow(Disk):
        def unlink(self, path: str) -> None:
            if os.path.basename(path) == schema.MANIFEST:
                removal.delete(stores.get(""), os.path.dirname(path))
            super().unlink(path)

    tr.save(tmp_path / "c", {"x": np.ones(3)})
    removal.delete(stores.Filesystem(Slow()), str(tmp_path / "c"))
    assert not os.listdir(tmp_path)
