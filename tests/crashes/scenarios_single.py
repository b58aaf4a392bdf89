"""One checkpoint, of any format, is saved, overwritten or deleted when the crash comes."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from treering import stores
from treering._run.open import open_checkpoint
from treering._save import array_files, layout
from treering._save.save import save
from treering.errors import NotFoundError, TreeringError
from treering.formats.treering import manifest, metrics, removal, schema

from .recording import RecordingDisk, View
from .scenarios import NOTHING, Broken, Record, Scenario, label_at, tree

_KILLED = ("first", "second")  # what those save that are killed
_LABELS = ("old", "new", *_KILLED, "large new")  # the trees that may be there


def native() -> Iterator[Scenario]:
    """Treering's own format, written by one process."""
    yield single("first save", saving(NOTHING, "new"))
    yield single("first save, several threads", _in_threads)
    yield single("overwriting", saving("old", "new"), before="old")
    yield single("overwriting, no locks", _without_locks, before="old")
    yield single("deleting", _deleting, before="old")
    yield single("deleting, two at once", _deleting_together, before="old")
    yield from _broken("", twice=True)
    yield _several_files(single("first save, several array files", saving(NOTHING, "new")))
    yield _several_files(single("overwriting, several array files", saving("old", "new"), before="old"))
    yield _several_files(single("deleting, several array files", _deleting, before="old"))
    yield from map(_several_files, _broken("several array files: ", twice=False))


def foreign() -> Iterator[Scenario]:
    """Formats of other libraries."""
    yield from _foreign("safetensors", "a/b/c.safetensors")
    yield from _foreign("safetensors", "a/b/c", max_shard_size=100)
    yield from _foreign("flax", "a/b/c.msgpack")
    yield from _foreign("orbax", "a/b/c")


def _foreign(format: str, where: str, **options: Any) -> Iterator[Scenario]:
    options = {"format": format, **options}
    several = len(options) > 1
    kind = format + (", several files: " if several else ": ")
    yield single(f"{kind}first save", saving(NOTHING, "new", **options), where=where, **options)
    yield single(f"{kind}overwriting", saving("old", "new", **options), where=where, before="old", **options)
    if several:
        name = f"{kind}overwriting, no exchange"
        yield single(name, _without_exchange(**options), where=where, before="old", **options)
    yield from _broken(kind, twice=format == "safetensors", where=where, **options)


def _broken(kind: str, *, twice: bool, where: str = "a/b/c", **options: Any) -> Iterator[Scenario]:
    """Yields what goes wrong before the crash, during a first save and during an overwriting one."""
    for before, name in ((NOTHING, "first save"), ("old", "overwriting")):

        def one(what: str, record: Record, broken: Broken, before: str = before, name: str = name) -> Scenario:
            return single(f"{kind}{what}, {name}", record, where=where, before=before, broken=broken, **options)

        yield one("an error of the disk", _failing(before, **options), "failing")
        yield one("killed, then saved", _killed(before, 1, **options), "killed")
        if twice:
            yield one("killed twice, then saved", _killed(before, 2, **options), "killed twice")


def single(
    name: str,
    record: Record,
    *,
    where: str = "a/b/c",
    before: str = NOTHING,
    broken: Broken = "",
    **options: Any,
) -> Scenario:
    """A scenario about one checkpoint, of any format."""

    def prepare(root: Path) -> None:
        if before != NOTHING:
            save(root / where, tree(before), **options)

    def again(root: Path, seen: View) -> None:
        path = root / where
        save(path, tree("next"), overwrite=True, **options)
        _assert_tidy(root, path)
        _assert_next(path)
        if not options:
            assert_tidy_inside(path)

    return Scenario(
        name=name,
        record=lambda root, disk: record(root / where, disk),
        look=lambda root: _look_at(root / where),
        again=again,
        prepare=prepare,
        broken=broken,
        subject=f"{where} {options}",
    )


def _look_at(path: Path) -> View:
    try:
        open_checkpoint(path)
    except NotFoundError:
        moved = path.parent.glob(f".{path.name}.*.tmp")
        return "old, moved" if any(map(_is_old, moved)) else NOTHING
    return label_at(path, _LABELS)


def _is_old(path: Path) -> bool:
    with contextlib.suppress(TreeringError, KeyError, AssertionError):
        return label_at(path, ["old"]) == "old"
    return False


def _assert_next(path: Path) -> None:
    """It is what `again` saves. The same files are looked at once: nothing else is there, so most are alike."""
    inside = ((str(one), one.read_bytes() if one.is_file() else b"") for one in (path, *path.rglob("*")))
    key = hash(frozenset((name.removeprefix(str(path.parent)), data) for name, data in inside))
    if key not in _known:
        assert label_at(path, ["next"])
        _known.add(key)


_known: set[int] = set()


def _assert_tidy(root: Path, path: Path) -> None:
    """Only the checkpoint is there."""
    while path != root:
        there = set(os.listdir(path.parent))
        assert there == {path.name}, f"{sorted(there - {path.name})} is left over in {path.parent}"
        path = path.parent


def assert_tidy_inside(path: Path) -> None:
    """Only what the manifest names is there, and the metrics that were recorded for it."""
    data = (path / schema.MANIFEST).read_bytes()
    named = {
        schema.MANIFEST,
        *manifest.file_names(data),
        *metrics.names(stores.get(""), str(path), manifest.xxh3(data)),
    }
    assert set(os.listdir(path)) == named, f"{sorted(set(os.listdir(path)) - named)} is left over in {path}"


# What happens


def saving(before: str, after: str, **options: Any) -> Record:
    """One save, of which nothing goes wrong."""

    def record(path: Path, disk: RecordingDisk) -> None:
        disk.expect(before, after)
        save(path, tree(after), overwrite=before != NOTHING, **options)
        disk.expect(after)

    return record


def _in_threads(path: Path, disk: RecordingDisk) -> None:
    """Several threads write a file of several chunks."""
    chunk, array_files.CHUNK_BYTES = array_files.CHUNK_BYTES, manifest.BLOCK
    try:
        saving(NOTHING, "large new")(path, disk)
    finally:
        array_files.CHUNK_BYTES = chunk


def _without_locks(path: Path, disk: RecordingDisk) -> None:
    """Saves without locks: no process can recognize the remains of killed saves, but replaced files are removed."""
    disk.lock = disk.lock_shared = lambda fd: None
    saving("old", "new")(path, disk)


def _without_exchange(**options: Any) -> Record:
    """Saves where directories cannot be exchanged: the old one is moved away first."""

    def record(path: Path, disk: RecordingDisk) -> None:
        disk.exchange = lambda a, b: False
        disk.expect("old", "old, moved", "new")
        save(path, tree("new"), overwrite=True, **options)
        disk.expect("new")

    return record


def _deleting(path: Path, disk: RecordingDisk) -> None:
    disk.expect("old", NOTHING)
    removal.delete(stores.Filesystem(disk), str(path))
    disk.expect(NOTHING)


def _deleting_together(path: Path, disk: RecordingDisk) -> None:
    """Another process deletes it as well, and has come first, but stands still before it has made that durable."""
    disk.expect("old", NOTHING)
    unlink = disk.unlink

    def both(path: str) -> None:
        unlink(path)
        if os.path.basename(path) == schema.MANIFEST:
            raise FileNotFoundError(path)

    disk.unlink = both
    removal.delete(stores.Filesystem(disk), str(path))
    disk.expect(NOTHING)


def _failing(before: str, **options: Any) -> Record:
    """A save that an error of the disk ends; what it says it did must hold."""

    def record(path: Path, disk: RecordingDisk) -> None:
        disk.expect(before, "new")
        try:
            save(path, tree("new"), overwrite=before != NOTHING, **options)
        except TreeringError:
            seen = _look_at(path)
            assert seen == before or before != NOTHING, f"{path}: the save failed, but {seen} is there"
            disk.expect(before, seen)
        else:
            disk.expect("new")

    return record


def _killed(before: str, times: int, **options: Any) -> Record:
    """So many saves are killed; another process saves there later, before anything of them is known to be durable."""

    def record(path: Path, disk: RecordingDisk) -> None:
        possible = [before]
        for label in _KILLED[:times]:
            disk.expect(*possible, label)
            done = False
            with contextlib.suppress(TreeringError):
                save(path, tree(label), overwrite=possible != [NOTHING], **options)
                done = True
            disk.revive()
            possible = [label] if done else [*possible, label]
        disk.expect(*possible, "new")
        save(path, tree("new"), overwrite=True, **options)
        disk.expect("new")

    return record


def _several_files(scenario: Scenario) -> Scenario:
    """Each array in a file of its own, as when one file's header would be too long."""

    def plan() -> Any:
        return mock.patch.object(layout, "plan", functools.partial(layout.plan, header_limit=1))

    def prepare(root: Path) -> None:
        with plan():
            scenario.prepare(root)

    def record(root: Path, disk: RecordingDisk) -> None:
        with plan():
            scenario.record(root, disk)

    return dataclasses.replace(scenario, prepare=prepare, record=record)
