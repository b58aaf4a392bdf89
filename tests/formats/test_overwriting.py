"""Overwriting a checkpoint that is a folder replaces what belongs to it, and nothing else."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import treering as tr
from helpers import REAL, assert_same
from treering import stores
from treering.errors import ExistsError, TreeringError
from treering.stores.disk import Disk
from treering.testing import crashes
from treering.testing._doubles import FailingDisk
from treering.testing._recording import RecordingDisk
from treering.testing._scenarios import Scenario, label_at, tree
from treering.testing._subject import listing

OLD = {"a": np.zeros(20_000, np.float32), "b": {"c": np.ones(3)}}
NEW = {"b": {"c": np.ones(4)}}
FOLDERS: dict[str, dict[str, Any]] = {"safetensors": {"max_shard_size": 1000}, "orbax": {}, "t5x": {}, "levanter": {}}
OTHERS = {"config.json": b"{}", "tokenizer.json": b"[1, 2]", ".hidden": b"", "large.bin": bytes(9 << 20)}


def put_others(folder: pathlib.Path) -> None:
    for name, data in OTHERS.items():
        (folder / name).write_bytes(data)
    (folder / "link").symlink_to("config.json")
    (folder / "broken").symlink_to("nowhere")


class NoHardLinks(Disk):
    """A file system that has none, as many have."""

    def hard_link(self, old: str, new: str) -> bool:
        return False


@pytest.mark.parametrize("format", FOLDERS)
@pytest.mark.parametrize("links", [True, False])
def test_other_files_stay(tmp_path: pathlib.Path, format: str, links: bool, use_disk: Callable[[Disk], Disk]) -> None:
    path = tmp_path / "ckpt"
    tr.save(path, OLD, format=format, **FOLDERS[format])
    put_others(path)
    if not links:
        use_disk(NoHardLinks())
        (path / "broken").unlink()  # of which no copy can be made
    tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
    assert {name: (path / name).read_bytes() for name in OTHERS} == OTHERS
    assert (path / "link").read_bytes() == b"{}" and os.path.lexists(path / "broken") is links
    assert_same(tr.restore(path), NEW)
    (path / "fresh").mkdir()
    tr.save(path / "fresh" / "ckpt", NEW, format=format, **FOLDERS[format])
    written = {name for name in os.listdir(path / "fresh" / "ckpt") if not name.startswith("ocdbt")}
    kept = {name for name in os.listdir(path) if not name.startswith("ocdbt")}
    assert kept == written | OTHERS.keys() | {"link", "fresh"} | ({"broken"} if links else set())


@pytest.mark.parametrize("format", FOLDERS)
def test_a_folder_with_a_run_or_other_folders_in_it_is_refused(tmp_path: pathlib.Path, format: str) -> None:
    path = tmp_path / "run"
    tr.save(path, OLD, format=format, **FOLDERS[format])
    with tr.Checkpointer(path) as ckpts:
        ckpts.save(1, NEW)
        ckpts.save(2, NEW)
    for folder in ("logs", "best"):
        before = listing(path)
        with pytest.raises(ExistsError, match=r"folders in it that are no part of it: .*step-00000001"):
            tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
        assert listing(path) == before and tr.steps(path) == [1, 2]
        (path / folder).mkdir()
    tr.save(tmp_path / "other", OLD, format=format, **FOLDERS[format])
    tr.save(tmp_path / "other" / "best", OLD, format=format, **FOLDERS[format])
    if format not in ("t5x", "levanter"):  # of which arrays lie wherever their names say
        with pytest.raises(ExistsError, match="no part of it: best"):
            tr.save(tmp_path / "other", NEW, format=format, overwrite=True, **FOLDERS[format])


@pytest.mark.parametrize("format", FOLDERS)
@pytest.mark.parametrize("found", FOLDERS)
def test_a_checkpoint_of_another_format_is_not_replaced(tmp_path: pathlib.Path, format: str, found: str) -> None:
    tr.save(tmp_path / "ckpt", OLD, format=found, **FOLDERS[found])
    if format != found:
        before = listing(tmp_path)
        with pytest.raises(ExistsError, match=f"of the format '{format}' to replace, found one of .*'{found}'"):
            tr.save(tmp_path / "ckpt", NEW, format=format, overwrite=True, **FOLDERS[format])
        assert listing(tmp_path) == before


def test_what_their_own_libraries_wrote_is_replaced_as_a_whole(tmp_path: pathlib.Path) -> None:
    """Items of Orbax, T5X's state of the data: they are parts of the old checkpoint, and not of the new one."""
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(OLD), params=ocp.args.StandardSave(NEW), config=ocp.args.JsonSave({"a": 1})
        )
        manager.save(7, args=items)
    put_others(tmp_path / "orbax" / "7")
    tr.save(tmp_path / "orbax" / "7", NEW, format="orbax", overwrite=True)
    assert_same(tr.restore(tmp_path / "orbax" / "7"), NEW)
    assert (tmp_path / "orbax" / "7" / "config.json").read_bytes() == b"{}"
    assert not {"state", "params", "config"} & set(os.listdir(tmp_path / "orbax" / "7"))
    for source in (
        "t5x/one/checkpoint_20",
        "t5x/eight/checkpoint_1000",
        "levanter/1.1/step-20",
        "levanter/0.2.20/step-20",
    ):
        target = tmp_path / source
        shutil.copytree(REAL / source, target)
        put_others(target)
        format = source.split("/")[0]
        tr.save(target, NEW, format=format, overwrite=True)
        assert_same(tr.restore(target), NEW)
        assert all((target / name).read_bytes() == data for name, data in OTHERS.items())


def test_a_file_that_takes_the_name_of_a_new_one_is_not_replaced(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "ckpt", OLD, format="levanter")
    (tmp_path / "ckpt" / "w").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(ExistsError, match="w"):
        tr.save(tmp_path / "ckpt", {"w": np.ones(2)}, format="levanter", overwrite=True)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("format", FOLDERS)
def test_errors_of_the_disk_lose_no_file(
    tmp_path: pathlib.Path, format: str, use_disk: Callable[[Disk], Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    small = {name: data for name, data in OTHERS.items() if len(data) < 100}
    counted = FailingDisk()
    for at in range(200):
        if path.exists():
            shutil.rmtree(path)
        tr.save(path, OLD, format=format, **FOLDERS[format])
        for name, data in small.items():
            (path / name).write_bytes(data)
        disk = counted if at == 0 else FailingDisk(at)
        with monkeypatch.context() as patch:
            patch.setattr(stores, "DISK", disk)
            with contextlib.suppress(TreeringError):
                tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
        assert {name: (path / name).read_bytes() for name in small} == small, f"operation {at}"
        assert tr.verify(path).ok and (set(tr.open(path)) in ({"a", "b/c"}, {"b/c"}))
        if at > counted.count:
            break


@pytest.mark.parametrize("format", ["safetensors", "levanter"])
def test_a_crash_loses_no_file(tmp_path: pathlib.Path, format: str) -> None:
    def prepare(root: pathlib.Path) -> None:
        tr.save(root / "a", tree("old"), format=format, **FOLDERS[format])
        (root / "a" / "config.json").write_bytes(b"mine")

    def look(root: pathlib.Path) -> str:
        assert (root / "a" / "config.json").read_bytes() == b"mine"
        return label_at(root / "a", ["old", "new"])

    def record(root: pathlib.Path, disk: RecordingDisk) -> None:
        disk.expect("old", "new")
        tr.save(root / "a", tree("new"), format=format, overwrite=True, **FOLDERS[format])
        disk.expect("new")

    scenario = Scenario("beside another's file", record, look, lambda root, seen: None, prepare)
    count = crashes.check(scenario, tmp_path)
    assert count.states > 20 and not count.failures, count.failures[0]
