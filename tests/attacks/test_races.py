"""Another user with write access to a directory replaces folders by links, just before each operation.

A link leads to a copy of what it replaces, so everything that Treering would remove, move or change exists there, too.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering import stores
from treering._run import run_layout as _run
from treering.formats.treering import removal
from treering.stores import posix
from treering.testing._doubles import SteppedDisk

OTHER_USER = 65534
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another")
pytestmark = pytest.mark.skipif(not posix.HAS_DIR_FD, reason="this platform only has paths")
Tree = dict[str, Any]
LEFT = ".c.safetensors.abcdef.tmp"


def tree(n: int = 0) -> Tree:
    return {"a": np.full(3, n, np.float32), "b": {"c": np.full(5, n, np.int32)}}


def _leftover(place: Path) -> None:
    inner = place / LEFT / "d" / "e"
    inner.mkdir(parents=True)
    for folder in (inner, *inner.parents[:2]):
        (folder / "precious").write_text("precious")


def _saved_folder(format: str, **options: Any) -> Callable[[Path], object]:
    def prepare(place: Path) -> None:
        tr.save(place / "c", tree(), format=format, **options)
        (place / "c" / "notes").write_text("mine")
        (place / "c").chmod(0o2750)

    return prepare


def _overwriting(format: str, **options: Any) -> Callable[[Path], object]:
    return lambda place: tr.save(place / "c", tree(1), format=format, overwrite=True, **options)


def _scratch(place: Path) -> None:
    with stores.get("").scratch_folder(str(place / "c")) as folder:
        _leftover(Path(folder))
        store = stores.get("")
        store.list(folder)  # a moment in which another user may act
        store.settle(folder)


def _steps(place: Path) -> None:
    for step in (1, 2):
        tr.save(place / f"step-{step:08}", tree(step))


def _killed(place: Path) -> None:
    _steps(place)
    (place / "step-00000001" / "arrays-abcdef-00000-of-00001.safetensors").touch()
    (place / "step-00000001" / ".treering.json.abcdef.tmp").mkdir()
    (place / "step-00000001" / ".treering.json.abcdef.tmp" / "precious").touch()


def _retention(place: Path, step: int = 3) -> None:
    with tr.Checkpointer(place, keep=tr.keep.last(1)) as ckpts:
        ckpts.save(step, tree(step))


def _archived(place: Path) -> None:
    (place / "rewound-1").mkdir()
    _killed(place)
    shutil.move(place / "step-00000001", place / "rewound-1")


TEMPORARY = r"\.c\.[0-9a-f]{6}\.tmp"
SHARDS, ORBAX = (
    (_saved_folder(format, **options), _overwriting(format, **options))
    for format, options in (("safetensors", {"max_shard_size": 10}), ("orbax", {}))
)
RACES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "a leftover": (_leftover, lambda place: tr.save(place / "c.safetensors", tree()), LEFT),
    "a folder in a leftover": (_leftover, lambda place: tr.save(place / "c.safetensors", tree()), f"{LEFT}/d"),
    "a new folder": (*SHARDS, TEMPORARY),
    "a folder in a new one": (*ORBAX, f"{TEMPORARY}/[^/]+"),
    "a scratch folder": (lambda place: None, _scratch, TEMPORARY),
    "a folder in a scratch folder": (lambda place: None, _scratch, f"{TEMPORARY}/{LEFT}"),
}
BY_OTHERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "a folder that is replaced": (*SHARDS, "c"),
    "a folder of another format that is replaced": (*ORBAX, "c"),
    "a step that is deleted": (
        _steps,
        lambda place: removal.delete(stores.get(""), str(place / "step-00000001")),
        "step-00000001",
    ),
    "a step that retention deletes": (_steps, _retention, "step-00000001"),
    "a step with leftovers": (_killed, _retention, "step-00000001"),
    "a folder of archived steps": (_archived, _retention, "rewound-1"),
    "a folder that steps are moved to": (
        _steps,
        lambda place: _run.archive_steps(stores.get(""), str(place), [str(place / "step-00000002")]),
        "rewound-1",
    ),
}


class Attacked(SteppedDisk):
    """Replaces a folder by a link to a copy of it, before the operation number `at`."""

    def __init__(self, at: int, place: Path, pattern: str, outside: Path, owner: int | None):
        super().__init__(looking=True)
        self._at, self._place, self._pattern, self._outside = at, place, re.compile(pattern), outside
        self._owner = owner
        self.before: dict[str, tuple[Any, ...]] = {}  # the files outside at that time

    def step(self, number: int, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if number == self._at:
            self._replace()
        return operation(*args)

    def _replace(self) -> None:
        for folder in self._place.rglob("*"):
            if self._pattern.fullmatch(folder.relative_to(self._place).as_posix()) and _is_folder(folder):
                shutil.copytree(folder, self._outside, symlinks=True)
                folder.rename(self._place / f"moved-{os.urandom(3).hex()}")
                folder.symlink_to(self._outside)
                if self._owner is not None:
                    os.lchown(folder, self._owner, self._owner)
                self.before = _seen(self._outside)
                break


def _is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def _seen(folder: Path) -> dict[str, tuple[Any, ...]]:
    found = {"": folder.lstat(), **{str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}}
    return {
        name: (one.st_mode, one.st_gid, one.st_ino, 0 if stat.S_ISDIR(one.st_mode) else one.st_nlink)
        for name, one in found.items()
    }


def _race(
    race: tuple[Callable[[Path], object], Callable[[Path], object], str], folder: Path, owner: int | None
) -> None:
    prepare, act, pattern = race
    met = at = 0
    while True:
        at += 2 if prepare is ORBAX[0] else 1
        place, outside = folder / str(at) / "shared", folder / str(at) / "outside"
        place.mkdir(parents=True)
        prepare(place)
        if owner is not None:
            place.chmod(0o777)
        disk = Attacked(at, place, pattern, outside, owner)
        with stores.using(stores.Filesystem(disk)), contextlib.suppress(tr.errors.TreeringError, OSError):
            act(place)
        if before := disk.before:
            met += 1
            after = _seen(outside)
            changed = {name: (one, after.get(name)) for name, one in before.items() if after.get(name) != one}
            assert not changed, f"before operation {at}"
            if owner is not None:
                assert after.keys() == before.keys(), f"before operation {at}"
        shutil.rmtree(folder / str(at))
        if disk.count < at:
            break
    assert met > 2, "no folder was replaced"


@pytest.mark.long
@pytest.mark.parametrize("name", RACES)
def test_folder_replaced_by_link_touches_nothing_outside(name: str, tmp_path: Path) -> None:
    """Replacing a folder by a link at any moment never makes Treering change what the link leads to."""
    _race(RACES[name], tmp_path, None)


@pytest.mark.long
@as_root
@pytest.mark.parametrize("name", BY_OTHERS)
def test_links_of_others_not_followed_by_removal_or_move(name: str, tmp_path: Path) -> None:
    """Removing and moving steps neither changes nor adds anything behind the link of another user."""
    _race(BY_OTHERS[name], tmp_path, OTHER_USER)


# Files of other users that existed before


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Makes a directory that every user may write to."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.mark.long
@pytest.mark.whole
@as_root
@pytest.mark.parametrize("mode", [0o1777, 0o775, 0o755])
def test_files_of_other_users_are_not_leftovers(mode: int, shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another user's files stay if others may write to the directory. Otherwise this user's jobs left them."""
    shared.chmod(mode)
    _leftover(shared)
    (shared / ".c.safetensors.012345.tmp").write_text("x")
    step = shared / "step-00000001"
    tr.save(step, tree())
    step.chmod(mode)
    (step / "arrays-abcdef-00000-of-00001.safetensors").touch()
    (step / ".treering.json.abcdef.tmp").mkdir()
    planted = [shared / LEFT, shared / ".c.safetensors.012345.tmp", *step.glob("*abcdef*"), *step.glob(".*")]
    for path in planted:
        os.chown(path, OTHER_USER, OTHER_USER)
    for n in range(3, 5):
        tr.save(shared / "c.safetensors", tree(), overwrite=True)
        _retention(shared, n)  # deletes the step
    assert [path.exists() for path in planted] == [mode != 0o755] * len(planted)
    for path in planted:
        assert caplog.text.count(f"{path}: it looks like a file that a killed save left") == (mode != 0o755)


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o2775])
def test_a_run_behind_the_link_of_a_colleague_is_pruned(mode: int, tmp_path: Path) -> None:
    """A group that shares a directory trusts its members, as Linux does outside sticky directories."""
    project, disk = tmp_path / "project", tmp_path / "disk"
    project.mkdir()
    disk.mkdir()
    (project / "run").symlink_to(disk)
    os.lchown(project / "run", OTHER_USER, OTHER_USER)
    project.chmod(mode)
    with tr.Checkpointer(project / "run", keep=tr.keep.last(1)) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, tree(step))
        ckpts.finish()
    assert tr.steps(disk) == [3]


@as_root
@pytest.mark.parametrize("name", ["c.safetensors", "c"])
def test_link_of_another_user_at_the_path_is_not_followed(name: str, shared: Path) -> None:
    outside = shared.parent / name

    def save(n: int, path: Path = shared / name) -> None:
        shards: Any = {} if "." in name else {"max_shard_size": 10}
        tr.save(path, tree(n), format="safetensors", overwrite=True, **shards)

    save(0, outside)
    (shared / name).symlink_to(outside)
    save(1)
    np.testing.assert_array_equal(tr.restore(outside)["a"], tree(1)["a"])
    os.lchown(shared / name, OTHER_USER, OTHER_USER)
    with pytest.raises(tr.errors.ExistsError, match=f"found a link that user {OTHER_USER} owns, in a directory that"):
        save(2)
    np.testing.assert_array_equal(tr.restore(outside)["a"], tree(1)["a"])


def test_what_a_link_of_a_steps_name_leads_to_is_left_alone(tmp_path: Path) -> None:
    outside, place = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    _killed(outside)
    place.mkdir()
    (place / "step-00000001").symlink_to(outside / "step-00000001")
    before = _seen(outside)
    _retention(place)
    assert _seen(outside) == before


@pytest.mark.long
def test_a_leftover_of_any_depth_and_kind_never_fails_a_save(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save removes a leftover with three open directories, and without recursion."""
    os.mkfifo(shared / ".c.safetensors.000000.tmp")
    (shared / LEFT).mkdir()
    script = "import os, sys; os.chdir(sys.argv[1])\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    subprocess.run([sys.executable, "-c", script, str(shared / LEFT)], check=True)
    try:
        tr.save(shared / "c.safetensors", tree())
        assert sorted(os.listdir(shared)) == [".c.safetensors.000000.tmp", "c.safetensors"] and not caplog.records
    finally:
        subprocess.run(["rm", "-rf", str(shared / LEFT)], check=True)  # pytest cannot remove it


def test_the_writers_file_is_not_written_through_a_hard_link(tmp_path: Path) -> None:
    place, secret = tmp_path / "run", tmp_path / "secret"
    place.mkdir()
    secret.write_text("precious")
    os.link(secret, place / "writer.lock")
    with tr.Checkpointer(place) as ckpts:
        ckpts.save(1, tree())
    assert secret.read_text() == "precious" and tr.steps(place) == [1]


def test_who_replaces_a_file_gets_none_that_runs_as_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.safetensors"
    tr.save(path, tree())
    path.chmod(0o6755)
    tr.save(path, tree(), overwrite=True)
    assert path.stat().st_mode & 0o7777 == 0o755
    folder = tmp_path / "c"
    tr.save(folder, tree(), format="safetensors", max_shard_size=10)
    (folder / "notes").touch()
    (folder / "notes").chmod(0o6755)
    monkeypatch.setattr(posix, "_hard_link", lambda old, new: False)
    tr.save(folder, tree(), format="safetensors", max_shard_size=10, overwrite=True)
    assert (folder / "notes").stat().st_mode & 0o7777 == 0o755
