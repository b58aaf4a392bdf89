"""Tests that overwriting a checkpoint that is a folder replaces its own files and keeps all others."""

import contextlib
import itertools
import os
import pathlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import treering as tr
from crashes import checks
from crashes.recording import RecordingDisk
from crashes.scenarios import Scenario, label_at, tree
from helpers import REAL, assert_same
from treering import stores
from treering.errors import ExistsError, TreeringError
from treering.stores import atomic
from treering.stores.posix import Disk
from treering.testing._doubles import FailingDisk
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
    """A file system without hard links, like many network file systems."""

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
    tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
    assert {name: (path / name).read_bytes() for name in OTHERS} == OTHERS
    assert (path / "link").read_bytes() == b"{}" and os.readlink(path / "broken") == "nowhere"
    assert_same(tr.restore(path), NEW)
    (path / "fresh").mkdir()
    tr.save(path / "fresh" / "ckpt", NEW, format=format, **FOLDERS[format])
    written = {name for name in os.listdir(path / "fresh" / "ckpt") if not name.startswith("ocdbt")}
    kept = {name for name in os.listdir(path) if not name.startswith("ocdbt")}
    assert kept == written | OTHERS.keys() | {"link", "broken", "fresh"}


@pytest.mark.long
@pytest.mark.parametrize("format", FOLDERS)
def test_a_folder_with_a_run_or_other_folders_in_it_is_refused(tmp_path: pathlib.Path, format: str) -> None:
    path = tmp_path / "run"
    tr.save(path, OLD, format=format, **FOLDERS[format])
    for step in (1, 2):
        tr.save(path / f"step-{step:08}", NEW, step=step)
    for folder in ("logs", "best"):
        before = listing(path)
        with pytest.raises(ExistsError, match=r"folders in it that are not part of it: .*step-00000001"):
            tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
        assert listing(path) == before and tr.steps(path) == [1, 2]
        (path / folder).mkdir()
    tr.save(tmp_path / "other", OLD, format=format, **FOLDERS[format])
    tr.save(tmp_path / "other" / "best", OLD, format=format, **FOLDERS[format])
    if format not in ("t5x", "levanter"):  # of which arrays lie wherever their names say
        with pytest.raises(ExistsError, match="not part of it: best"):
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


@pytest.mark.long
def test_overwrite_removes_all_that_another_library_wrote(tmp_path: pathlib.Path) -> None:
    """An overwrite removes all that another library wrote: items of Orbax, and iterator states of T5X."""
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
    for items in ({"state": NEW, "config": {"a": 1}, "gone": NEW}, {"state": OLD, "config": {"a": 2}}):
        tr.save(tmp_path / "orbax" / "7", items, format="orbax", overwrite=True, composite=True, metrics={"loss": 1})
        assert_same(tr.restore(tmp_path / "orbax" / "7", like=items), items)
        assert (tmp_path / "orbax" / "7" / "config.json").read_bytes() == b"{}"
    tr.save(tmp_path / "orbax" / "7", NEW, format="orbax", overwrite=True)
    assert not {"state", "config", "gone", "metrics"} & set(os.listdir(tmp_path / "orbax" / "7"))
    with pytest.raises(ExistsError, match=r"link"):  # A foreign file has the name that the item needs.
        tr.save(tmp_path / "orbax" / "7", {"link": NEW}, format="orbax", overwrite=True, composite=True)
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
    """A foreign file with a name that the new checkpoint needs is not replaced; the save raises."""
    tr.save(tmp_path / "ckpt", OLD, format="levanter")
    (tmp_path / "ckpt" / "w").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(ExistsError, match="w"):
        tr.save(tmp_path / "ckpt", {"w": np.ones(2)}, format="levanter", overwrite=True)
    assert listing(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("format", FOLDERS)
def test_errors_of_the_disk_lose_no_file(
    tmp_path: pathlib.Path, format: str, use_disk: Callable[[Disk], Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error at any operation, all foreign files exist, and the old or the new checkpoint is complete."""
    path = tmp_path / "ckpt"
    small = {name: data for name, data in OTHERS.items() if len(data) < 100}
    counted = FailingDisk()
    for at in itertools.count():
        if path.exists():
            shutil.rmtree(path)
        tr.save(path, OLD, format=format, **FOLDERS[format])
        for name, data in small.items():
            (path / name).write_bytes(data)
        disk = counted if at == 0 else FailingDisk(at)
        with stores.using(stores.Filesystem(disk)), contextlib.suppress(TreeringError):
            tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
        assert {name: (path / name).read_bytes() for name in small} == small, f"operation {at}"
        report = tr.verify(path)
        assert report.ok, f"operation {at}, {disk.failed}: {[str(one) for one in report.problems]}, {listing(path)}"
        assert set(tr.open(path)) in ({"a", "b/c"}, {"b/c"})
        if at > counted.count:
            break
    assert at > 10


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "levanter"])
def test_a_crash_loses_no_file(tmp_path: pathlib.Path, format: str) -> None:
    """After a crash at any point, the foreign file exists, and the old or the new checkpoint is complete."""

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

    scenario = Scenario("next to a foreign file", record, look, lambda root, seen: None, prepare)
    count = checks.check(scenario, tmp_path)
    assert count.states > 20 and not count.failures, count.failures[0]


PARAMS = {"target": {"w": np.arange(40_000.0, dtype=np.float32)}, "state": {"step": np.int32(1)}}
PLACED: dict[str, list[str]] = {
    "orbax": [
        *("d", "descriptor", "array_metadatas", "ocdbt.process_0", "ocdbt.process_0/d", "state", "metrics", "default"),
        *("_METADATA.d", "a", "eval", "logs"),
    ],
    "t5x": ["target.w", "train_ds-000-of-001", "train_ds-000-of-001.index", "mine", "other/deeper"],
    "levanter": ["d", "ocdbt.process_0", "target", "target/w", "target/w/0", "mine"],
    "safetensors": ["model-00001-of-00009.safetensors", "mine", ".cache/huggingface"],
}
FOREIGN: dict[str, bytes] = {
    **dict.fromkeys(("notes.txt", "metrics", "data.json", "metadata", "checkpoint", "0.txt", "c"), b"precious"),
    **dict.fromkeys((".zarray", "zarr.json", "_METADATA", "manifest.ocdbt", "commit_success.txt"), b"{}"),
    "process_0.txt": b"{}",
    "treering.json": b'{"treering": {"version": 99}}',
}


def put(folder: pathlib.Path, name: str, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize("format", PLACED)
def test_foreign_files_in_an_owned_looking_folder_stay(tmp_path: pathlib.Path, format: str) -> None:
    """A foreign file in a folder whose name looks like one of the format stays. The save raises."""
    tr.save(tmp_path / "kept", PARAMS, format=format, **FOLDERS[format])
    for inside in PLACED[format]:
        for name, data in FOREIGN.items():
            shutil.rmtree(tmp_path / "ckpt", ignore_errors=True)
            shutil.copytree(tmp_path / "kept", tmp_path / "ckpt")
            folder = tmp_path / "ckpt" / inside
            if folder.is_file() or (folder / name).exists() or any(one.is_file() for one in folder.parents):
                continue
            put(folder, name, data)
            with pytest.raises(TreeringError, match=r"found|holds"):
                tr.save(tmp_path / "ckpt", PARAMS, format=format, overwrite=True, **FOLDERS[format])
            assert (folder / name).read_bytes() == data, f"{inside}/{name}"


@pytest.mark.long
@pytest.mark.parametrize("format", PLACED)
@pytest.mark.parametrize("inner", ["treering", "run", "orbax", "t5x", "safetensors", "later"])
def test_a_checkpoint_within_a_checkpoint_stays(tmp_path: pathlib.Path, format: str, inner: str) -> None:
    """A folder with another checkpoint inside is not overwritten; the save raises."""
    path = tmp_path / "7"  # the name of a step of Orbax's manager
    tr.save(path, PARAMS, format=format, **FOLDERS[format])
    places = [path / "best", path / "state", path / "deep" / "er", path / "d" / "x", path / "train_ds-000-of-001"]
    for place in (place for place in places if not place.exists()):
        if inner == "run":
            with tr.Checkpointer(place) as ckpts:
                ckpts.save(1, OLD)
        elif inner == "later":
            tr.save(place, OLD)
            about = place / "treering.json"
            about.chmod(0o644)
            about.write_bytes(about.read_bytes().replace(b'"version":', b'"version":9', 1))
        else:
            tr.save(place, PARAMS, format=inner, **FOLDERS.get(inner, {}))
        before = listing(tmp_path)
        with pytest.raises(ExistsError, match="not part of it"):
            tr.save(path, PARAMS, format=format, overwrite=True, **FOLDERS[format])
        assert listing(tmp_path) == before
        shutil.rmtree(path / place.relative_to(path).parts[0])
        tr.save(path, PARAMS, format=format, overwrite=True, **FOLDERS[format])


def test_several_checkpoints_of_orbax_in_a_folder_stay(tmp_path: pathlib.Path) -> None:
    for name in ("tree", "other"):
        shutil.copytree(REAL / "orbax" / "0.4.4" / "tree", tmp_path / "mine" / name)
    before = listing(tmp_path)
    with pytest.raises(TreeringError, match="found"):
        tr.save(tmp_path / "mine", NEW, format="orbax", overwrite=True)
    assert listing(tmp_path) == before


@pytest.mark.long
def test_all_that_orbax_wrote_is_replaced(tmp_path: pathlib.Path) -> None:
    for place in (REAL / "orbax").glob("*/*/_METADATA"):
        shutil.copytree(place.parent, tmp_path / place.parent.relative_to(REAL / "orbax"))
    for release in ("0.2.3", "0.4.4", "0.5.20"):
        for name in ("tree", "items/3", "manager/3", "flax/checkpoint_7"):
            target = tmp_path / release / name
            if not target.exists():
                shutil.copytree(REAL / "orbax" / release / name, target)
            tr.save(target, NEW, format="orbax", overwrite=True)
            assert_same(tr.restore(target), NEW)
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        items: dict[str, Any] = {
            "state": ocp.args.StandardSave(OLD),
            "config": ocp.args.JsonSave({"a": 1}),
            "key": ocp.args.JaxRandomKeySave(jax.random.key(0)),
            "array": ocp.args.ArraySave(np.ones(3)),
        }
        manager.save(7, args=ocp.args.Composite(**items), metrics={"loss": 1.0})
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(tmp_path / "files", {**OLD, "n": 1})
    ocp.v1.save(tmp_path / "v1", OLD)
    for name in ("run/7", "files", "v1"):
        tr.save(tmp_path / name, NEW, format="orbax", overwrite=True)
        assert_same(tr.restore(tmp_path / name), NEW)
        tr.save(tmp_path / "new", NEW, format="orbax")
        assert {one for one in os.listdir(tmp_path / name) if not one.startswith("ocdbt")} == {
            one for one in os.listdir(tmp_path / "new") if not one.startswith("ocdbt")
        }
        shutil.rmtree(tmp_path / "new")


@pytest.mark.parametrize("format", FOLDERS)
def test_overwriting_through_a_link_replaces_its_target(tmp_path: pathlib.Path, format: str) -> None:
    """An overwrite through a link to a folder keeps the link and replaces the checkpoint in that folder."""
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real", tmp_path / "link"
    tr.save(real, OLD, format=format, **FOLDERS[format])
    (real / "notes.txt").write_text("mine")
    link.symlink_to("elsewhere/real")
    tr.save(link, NEW, format=format, overwrite=True, **FOLDERS[format])
    assert link.is_symlink() and not real.is_symlink() and (real / "notes.txt").read_text() == "mine"
    assert_same(tr.restore(real), NEW)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "link"] and os.listdir(tmp_path / "elsewhere") == ["real"]


def test_links_are_not_followed_when_something_is_removed(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "ckpt", OLD, format="orbax")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / ".ckpt.abcdef.tmp").symlink_to("mine")
    (tmp_path / "ckpt" / "data").symlink_to("../mine")
    shutil.rmtree(tmp_path / "ckpt" / "d")
    (tmp_path / "ckpt" / "d").symlink_to("../mine")
    with pytest.raises(ExistsError):  # A folder of the checkpoint has become a link.
        tr.save(tmp_path / "ckpt", NEW, format="orbax", overwrite=True)
    (tmp_path / "ckpt" / "d").unlink()
    tr.save(tmp_path / "ckpt", NEW, format="orbax", overwrite=True)
    atomic.remove_tree(Disk(), str(tmp_path / ".ckpt.abcdef.tmp"))
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    assert os.readlink(tmp_path / "ckpt" / "data") == "../mine"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("format", FOLDERS)
@pytest.mark.parametrize("moment", ["sync", "exchange", "exchanged"])
def test_what_appears_meanwhile_stays(
    tmp_path: pathlib.Path, format: str, moment: str, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that another process adds or changes during an overwrite are kept.

    moment: before or after the foreign files are linked into the new folder, or after the new folder is in place.
    """
    path = tmp_path / "ckpt"
    tr.save(path, OLD, format=format, **FOLDERS[format])
    (path / "config.json").write_text("old")
    (path / "written.log").write_text("old")
    folder = next((one for one in sorted(path.iterdir()) if one.is_dir()), None)

    def change() -> None:
        (path / "late.txt").write_text("late")
        (path / "config.tmp").write_text("new")
        os.replace(path / "config.tmp", path / "config.json")
        with (path / "written.log").open("a") as log:
            log.write(" and new")
        if moment == "exchange":
            (path / "logs" / "deep").mkdir(parents=True)
            (path / "logs" / "deep" / "late.txt").write_text("late")
            if folder:
                (folder / "late.txt").write_text("late")

    class Busy(Disk):
        done = False

        def hard_link(self, old: str, new: str) -> bool:
            return links and super().hard_link(old, new)

        def sync(self, fd: int) -> None:
            super().sync(fd)
            self.once("sync")

        def exchange(self, a: str, b: str) -> bool:
            self.once("exchange")
            done = super().exchange(a, b)
            self.once("exchanged")
            return done

        def once(self, now: str) -> None:
            if now == moment and not self.done:
                self.done = True
                change()

    stores.register(stores.Filesystem(Busy()))
    tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
    assert (path / "late.txt").read_text() == "late" and (path / "config.json").read_text() == "new"
    assert (path / "written.log").read_text() == "old and new"
    if moment == "exchange":
        assert (path / "logs" / "deep" / "late.txt").read_text() == "late"
        assert folder is None or (folder / "late.txt").read_text() == "late"
        shutil.rmtree(path / "logs")
    assert os.listdir(tmp_path) == ["ckpt"]
    assert_same(tr.restore(path), NEW)


def test_late_file_that_cannot_be_moved_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A late file whose name the new folder already has is kept in a folder `kept-*`, which the log names."""
    path = tmp_path / "ckpt"
    tr.save(path, OLD, format="orbax")

    class Busy(Disk):
        def exchange(self, a: str, b: str) -> bool:
            (path / "late.txt").write_text("late")
            (pathlib.Path(a) / "late.txt").write_text("another")
            return super().exchange(a, b)

    with stores.using(stores.Filesystem(Busy())):
        tr.save(path, NEW, format="orbax", overwrite=True)
    (kept,) = tmp_path.glob("ckpt.kept-*")
    assert os.listdir(kept) == ["late.txt"] and (kept / "late.txt").read_text() == "late"
    assert (path / "late.txt").read_text() == "another" and str(kept) in caplog.text
    tr.save(path, OLD, format="orbax", overwrite=True)
    assert (kept / "late.txt").exists()


@pytest.mark.parametrize("size", [1000, "5GB"])
@pytest.mark.parametrize("name", ["lora.safetensors.index.json", "adapter.safetensors", "config.json"])
def test_what_opens_afterwards_is_what_was_written(tmp_path: pathlib.Path, name: str, size: int | str) -> None:
    """A foreign file that would decide what the folder opens as makes the save raise. Others are kept."""
    path, big = tmp_path / "ckpt", {"a": np.zeros(400), "b": np.ones(400)}
    for first, pattern in ((5000, "model{suffix}.safetensors"), (5000, "w{suffix}.safetensors"), (1000, None)):
        shutil.rmtree(path, ignore_errors=True)
        tr.save(path, big, format="safetensors", max_shard_size=first, filename_pattern="model{suffix}.safetensors")
        lone = tmp_path / "lone"
        lone.write_bytes(b'{"weight_map": {"x": "adapter.safetensors"}}')
        shutil.copy(lone if name.endswith("json") else path / os.listdir(path)[0], path / name)
        before = listing(path)
        written: str | None = None
        try:
            tr.save(path, big, format="safetensors", max_shard_size=size, filename_pattern=pattern, overwrite=True)
        except ExistsError as error:
            written = str(error)
        if written is None:
            assert_same(tr.restore(path), {"a": big["a"], "b": big["b"]})
            assert (path / name).exists()
        else:
            assert name in written and listing(path) == before and name != "config.json"


@pytest.mark.parametrize("format", FOLDERS)
def test_the_mode_stays(tmp_path: pathlib.Path, format: str) -> None:
    path = tmp_path / "ckpt"
    tr.save(path, OLD, format=format, **FOLDERS[format])
    for mode in (0o700, 0o755, 0o770):
        path.chmod(mode)
        (path / "secret.txt").write_text("mine")
        (path / "secret.txt").chmod(0o600)
        tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert stat.S_IMODE((path / "secret.txt").stat().st_mode) == 0o600


@pytest.mark.parametrize("format", FOLDERS)
def test_what_cannot_be_kept_is_found_before_anything_is_written(
    tmp_path: pathlib.Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign file that an overwrite cannot keep makes the save raise before it creates a folder."""
    path = tmp_path / "ckpt"
    tr.save(path, OLD, format=format, **FOLDERS[format])
    monkeypatch.setattr(Disk, "make_dir", lambda self, path: pytest.fail(f"{path} was made"))
    os.mkfifo(path / "pipe")
    with pytest.raises(ExistsError, match="pipe"):
        tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
    (path / "pipe").unlink()
    taken = {"safetensors": "model.safetensors", "orbax": "d", "t5x": "w", "levanter": "w"}[format]
    if format == "orbax":
        shutil.rmtree(path / taken)
    (path / taken).write_text("mine")
    new = {"w": np.ones(40_000)}
    with pytest.raises(TreeringError, match=taken):
        tr.save(path, new, format=format, overwrite=True, **FOLDERS[format])
    assert (path / taken).read_text() == "mine"


@pytest.mark.parametrize("name", ["0", "12.3", "data"])
def test_levanter_takes_nothing_else_for_an_array(tmp_path: pathlib.Path, name: str) -> None:
    """Foreign files and links with names that arrays of Levanter may have are not replaced; the save raises."""
    tr.save(tmp_path / "ckpt", OLD, format="levanter")
    (tmp_path / "mine").mkdir()
    if name == "data":
        (tmp_path / "ckpt" / name).symlink_to("../mine")
    else:
        (tmp_path / "ckpt" / name).write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(TreeringError, match=f"/{name}\\b"):
        tr.save(tmp_path / "ckpt", NEW, format="levanter", overwrite=True)
    assert listing(tmp_path) == before


@pytest.mark.long
@pytest.mark.parametrize("format", FOLDERS)
def test_two_writers_overwrite_at_once(tmp_path: pathlib.Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process overwrites the folder during an overwrite, the result has no files of that process."""
    path = tmp_path / "ckpt"
    tr.save(path, OLD, format=format, **FOLDERS[format])
    (path / "config.json").write_text("mine")
    options = FOLDERS[format] | ({"filename_pattern": "w{suffix}.safetensors"} if format == "safetensors" else {})
    other = (
        "import numpy as np, treering as tr; tree = {'x': {'y': np.zeros((300, 300))}}; "
        f"tr.save({str(path)!r}, tree, format={format!r}, overwrite=True, **{options!r})"
    )

    class Slow(Disk):
        done = False

        def exchange(self, a: str, b: str) -> bool:
            if not self.done:
                self.done = True
                subprocess.run([sys.executable, "-c", other], check=True)
            return super().exchange(a, b)

    stores.register(stores.Filesystem(Slow()))
    tr.save(path, NEW, format=format, overwrite=True, **FOLDERS[format])
    assert_same(tr.restore(path), NEW)
    assert (path / "config.json").read_text() == "mine" and os.listdir(tmp_path) == ["ckpt"]
    tr.save(tmp_path / "fresh", NEW, format=format, **FOLDERS[format])
    written = {name for name in os.listdir(tmp_path / "fresh") if not name.startswith("ocdbt")}
    assert {name for name in os.listdir(path) if not name.startswith("ocdbt")} == written | {"config.json"}
