"""Another user puts a link where Treering writes: on the way, as the last name, or in place of a step.

What the link leads to must not change, whatever the operation. The same link made by this user is followed.
"""

import contextlib
import os
import shutil
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import treering as tr
import treering.orbax as ocp
from treering._cli.main import main
from treering.stores import posix

OTHER_USER = 65534
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another"),
]


def tree(n: int = 0) -> dict[str, Any]:
    return {"a": np.full(3, n, np.float32), "b": np.full(300_000, n % 2, np.float32)}


def nothing(place: Path) -> None: ...


def checkpoint(**options: Any) -> Callable[[Path], None]:
    return lambda place: tr.save(place, tree(), **options) and None


def run(place: Path) -> None:
    with tr.Checkpointer(place) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, tree(step))


def save(**options: Any) -> Callable[[Path], object]:
    return lambda place: tr.save(place, tree(7), **options)


def in_run(act: Callable[[tr.Checkpointer], object], **options: Any) -> Callable[[Path], None]:
    def do(place: Path) -> None:
        with tr.Checkpointer(place, **options) as ckpts:
            act(ckpts)

    return do


def prune_to(place: Path) -> None:
    run(own := place.parent.parent / "own")
    main(["prune", str(own), "last:1", "-y", "--to", str(place)])


def copy_to(*options: str) -> Callable[[Path], None]:
    def do(place: Path) -> None:
        tr.save(own := place.parent.parent / "own", tree(9))
        main(["cp", str(own), str(place), *options])

    return do


def report_to(place: Path) -> None:
    run(own := place.parent.parent / "own")
    main(["report", str(own), "-o", str(place)])


def convert_to(place: Path) -> None:
    tr.save(own := place.parent.parent / "own", tree(9))
    main(["convert", str(own), str(place), "--overwrite"])


def tiers(local: Path, remote: Path) -> None:
    with tr.Checkpointer(remote, local=local, keep_local=tr.keep.last(1)) as ckpts:
        ckpts.save(4, tree(4))


def manager(place: Path) -> None:
    with ocp.CheckpointManager(place, metadata={"secret": 1}) as manager:
        manager.save(4, args=ocp.args.StandardSave(tree(4)))
        manager.wait_until_finished()


def standard(**options: Any) -> Callable[[Path], None]:
    def do(place: Path) -> None:
        with ocp.StandardCheckpointer(**options) as saver:
            saver.save(place, tree(4), force=True)
            saver.wait_until_finished()

    return do


class Operation(NamedTuple):
    """What exists at the path before, and the call.

    name: the last name of the path.
    follows: False if a link of this user is not followed as the last name: it is replaced, or an error says so.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    name: str = "c"
    follows: bool = True


OPERATIONS = {
    "a new checkpoint": Operation(nothing, save()),
    "a checkpoint that is replaced": Operation(checkpoint(), save(overwrite=True)),
    "a new file": Operation(nothing, save(), "c.safetensors"),
    "a file that is replaced": Operation(checkpoint(), save(overwrite=True), "c.safetensors"),
    "a folder of shards": Operation(nothing, save(format="safetensors", max_shard_size=10)),
    "a folder of shards that is replaced": Operation(
        checkpoint(format="safetensors", max_shard_size=10),
        save(format="safetensors", max_shard_size=10, overwrite=True),
    ),
    "a folder in the format of Orbax": Operation(nothing, save(format="orbax")),
    "a folder in the format of Orbax that is replaced": Operation(
        checkpoint(format="orbax"), save(format="orbax", overwrite=True)
    ),
    "metrics": Operation(checkpoint(step=1), lambda place: tr.open(place).record({"m": 1.0})),
    "a copy": Operation(nothing, copy_to()),
    "a copy over another": Operation(checkpoint(), copy_to("--overwrite")),
    "a conversion": Operation(nothing, convert_to, "c.safetensors"),
    "a conversion over another file": Operation(checkpoint(), convert_to, "c.safetensors"),
    "a test of the place": Operation(run, lambda place: main(["doctor", str(place), "--size", "1M"])),
    "a program that is migrated": Operation(
        lambda place: place.write_text("import orbax.checkpoint as ocp\n"),
        lambda place: main(["migrate", "--write", str(place)]),
        "train.py",
        follows=False,
    ),
    "a report": Operation(nothing, report_to, "report.html"),
    "a new run": Operation(nothing, run),
    "the next step": Operation(run, in_run(lambda ckpts: ckpts.save(4, tree(4)))),
    "a step that is replaced": Operation(run, in_run(lambda ckpts: ckpts.save(3, tree(4), on_exists="overwrite"))),
    "a step that is deleted": Operation(run, in_run(lambda ckpts: ckpts.delete(1))),
    "a step that retention deletes": Operation(run, in_run(lambda ckpts: ckpts.save(4, tree(4)), keep=tr.keep.last(1))),
    "a step that is pinned": Operation(run, in_run(lambda ckpts: ckpts.pin(2))),
    "metrics of a step": Operation(run, lambda place: tr.record(place, 2, {"m": 1.0})),
    "an archive": Operation(run, in_run(lambda ckpts: ckpts.rewind(1))),
    "the end of a run": Operation(run, in_run(lambda ckpts: ckpts.finish())),
    "steps that are moved there": Operation(nothing, prune_to),
    "a remote tier": Operation(run, lambda place: tiers(place.parent.parent / "own", place)),
    "a local tier": Operation(nothing, lambda place: tiers(place, place.parent.parent / "own")),
    "a manager for Orbax": Operation(Path.mkdir, manager),
    "a checkpoint of the adapter": Operation(checkpoint(), standard()),
    "a checkpoint of the adapter for Orbax": Operation(checkpoint(format="orbax"), standard(write="orbax")),
    "an item of the adapter over one of Orbax": Operation(checkpoint(format="orbax"), standard(), follows=False),
    "a directory that the adapter empties": Operation(checkpoint(), ocp.utils.erase_and_create_empty, follows=False),
}


def on_the_way(shared: Path, elsewhere: Path, name: str) -> tuple[Path, list[Path]]:
    (shared / "out").symlink_to(elsewhere)
    return shared / "out" / name, [shared / "out"]


def as_the_last_name(shared: Path, elsewhere: Path, name: str) -> tuple[Path, list[Path]]:
    (shared / name).symlink_to(elsewhere / name)
    return shared / name, [shared / name]


def as_the_step(shared: Path, elsewhere: Path, name: str) -> tuple[Path, list[Path]]:
    (shared / name).mkdir()
    (shared / name).chmod(0o777)
    for inner in (elsewhere / name).iterdir() if (elsewhere / name).is_dir() else ():
        (shared / name / inner.name).symlink_to(inner)
    links = [*(shared / name).iterdir()]
    for inner in ("metadata", "step-00000004", "rewound-1", "4"):  # that an operation would make
        if inner not in {link.name for link in links}:
            (elsewhere / inner).mkdir()
            (shared / name / inner).symlink_to(elsewhere / inner)
            links.append(shared / name / inner)
    return shared / name, links


def seen(folder: Path) -> dict[str, Any]:
    """Returns everything in a folder, with what shows that it was changed."""
    found: dict[str, Any] = {}
    for path in (folder, *folder.rglob("*")):
        one = path.lstat()
        links = 0 if stat.S_ISDIR(one.st_mode) else one.st_nlink
        found[str(path.relative_to(folder))] = one.st_ino, one.st_mode, one.st_uid, links, one.st_size, one.st_mtime_ns
    return found


def attempt(operation: Operation, where: Callable[..., Any], top: Path, owner: int) -> tuple[bool, str]:
    """Returns True if anything elsewhere has changed, and the name of the error."""
    shared, elsewhere = top / "shared", top / "elsewhere"
    shared.mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    operation.prepare(elsewhere / operation.name)
    shared.chmod(0o777)
    place, links = where(shared, elsewhere, operation.name)
    for link in links:
        os.lchown(link, owner, owner)
    before, said = seen(elsewhere), ""
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(SystemExit):
            operation.act(place)
    except (tr.errors.TreeringError, OSError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    changed = seen(elsewhere) != before
    shutil.rmtree(top)
    return changed, said


@pytest.mark.parametrize("where", [on_the_way, as_the_last_name, as_the_step])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_write_goes_through_the_link_of_another_user(name: str, where: Callable[..., Any], tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    changed, said = attempt(operation, where, tmp_path / "of another", OTHER_USER)
    assert not changed, said
    if where is on_the_way or (where is as_the_last_name and operation.prepare is not nothing and operation.follows):
        changed, said = attempt(operation, where, tmp_path / "own", 0)
        assert changed and not said, f"a link of this user is not followed: {said}"


@pytest.mark.parametrize("name", ["a checkpoint that is replaced", "an archive", "steps that are moved there"])
@pytest.mark.parametrize("lacks", ["no /proc", "links cannot be opened, as on macOS"])
def test_links_of_others_on_systems_with_fewer_calls(
    name: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "_OPEN_FILES", "/nowhere")
    if "macOS" in lacks:
        monkeypatch.setattr(posix, "_PATH_FLAGS", None)
    changed, said = attempt(OPERATIONS[name], on_the_way, tmp_path / "of another", OTHER_USER)
    assert not changed, said
    changed, said = attempt(OPERATIONS[name], on_the_way, tmp_path / "own", 0)
    assert changed and not said, said


CHANGES = {  # what each call of a disk that changes a name does with a path
    "make_dir": lambda disk, path, own: disk.make_dir(f"{path}/new"),
    "remove_dir": lambda disk, path, own: disk.remove_dir(f"{path}/folder"),
    "hard_link": lambda disk, path, own: disk.hard_link(f"{own}/file", f"{path}/new"),
    "copy_link": lambda disk, path, own: disk.copy_link(f"{own}/link", f"{path}/new"),
    "link": lambda disk, path, own: disk.link(f"{own}/file", f"{path}/new"),
    "rename": lambda disk, path, own: disk.rename(f"{own}/file", f"{path}/file"),
    "rename from there": lambda disk, path, own: disk.rename(f"{path}/file", f"{own}/new"),
    "rename_new": lambda disk, path, own: disk.rename_new(f"{own}/file", f"{path}/new"),
    "rename_new from there": lambda disk, path, own: disk.rename_new(f"{path}/file", f"{own}/new"),
    "exchange": lambda disk, path, own: disk.exchange(f"{own}/file", f"{path}/file"),
    "unlink": lambda disk, path, own: disk.unlink(f"{path}/file"),
    "create": lambda disk, path, own: os.close(disk.create(f"{path}/new")),
    "open_shared": lambda disk, path, own: os.close(disk.open_shared(f"{path}/new")),
}
BY_DESCRIPTOR = {"set_mode", "set_group", "make_read_only", "preallocate", "write", "truncate"}
READS = {
    *("stat", "list", "sync_dir", "sync", "lock", "lock_shared", "same_file", "close", "open", "open_dir", "size"),
    *("version", "has_holes", "read", "map", "populate", "is_local"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_call_of_a_disk_follows_the_link_of_another_user(name: str, tmp_path: Path) -> None:
    methods = {one for one, value in vars(posix.Disk).items() if callable(value) and not one.startswith("_")}
    assert methods == {one.partition(" ")[0] for one in CHANGES} | BY_DESCRIPTOR | READS, "each call is in one of these"
    shared, elsewhere, own = tmp_path / "shared", tmp_path / "elsewhere", tmp_path / "own"
    for folder in (shared, elsewhere / "folder", own):
        folder.mkdir(parents=True)
    for folder in (elsewhere, own):
        (folder / "file").write_text(folder.name)
    (own / "link").symlink_to("file")
    (shared / "out").symlink_to(elsewhere)
    shared.chmod(0o777)
    before = seen(elsewhere)
    os.lchown(shared / "out", OTHER_USER, OTHER_USER)
    with pytest.raises(PermissionError, match=f"user {OTHER_USER} has made the link out on the way"):
        CHANGES[name](posix.Disk(), str(shared / "out"), str(own))
    assert seen(elsewhere) == before
    os.lchown(shared / "out", 0, 0)
    CHANGES[name](posix.Disk(), str(shared / "out"), str(own))
    assert seen(elsewhere) != before
