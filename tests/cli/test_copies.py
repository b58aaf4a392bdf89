"""cp, convert and rewind with a run that a job writes or prunes; existing and damaged copies; dry runs."""

import contextlib
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import obstore
import pytest

import treering as tr
from treering import stores
from treering._tools import copy as copying
from treering._tools.copy import CopyResult, copy_checkpoints
from treering.formats.treering import copy as native_copy
from treering.formats.treering import removal
from treering.stores.objects.store import ObjectStore

_JOB = """
import sys
from treering import stores
lease = stores.get(sys.argv[1]).lease(sys.argv[1])
lease.acquire()
print(flush=True)
sys.stdin.read()
"""


def save_run(path: pathlib.Path, *steps: int) -> pathlib.Path:
    with tr.Checkpointer(path) as ckpts:
        for step in steps:
            ckpts.save(step, {"x": np.full(4000, step)})
    return path


def step_of(run: pathlib.Path, step: int) -> pathlib.Path:
    return run / f"step-{step:08}"


def change(run: pathlib.Path, step: int, *, size: int | None = None) -> None:
    """Flips the last bit of a step's array file, or truncates the file to `size` bytes."""
    (file,) = step_of(run, step).glob("arrays-*")
    file.chmod(0o644)
    data = bytearray(file.read_bytes()[:size])
    data[-1] ^= size is None
    file.write_bytes(data)


def files(place: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Returns every path below a folder with its size and the time of its last change."""
    return {str(path): ((found := path.lstat()).st_mtime_ns, found.st_size) for path in place.rglob("*")}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    return save_run(tmp_path / "run", 1, 2, 3, 4)


@pytest.fixture
def written(tmp_path: pathlib.Path) -> Iterator[tuple[pathlib.Path, int]]:
    """Yields a run that another process writes, and the id of that process."""
    path = save_run(tmp_path / "written", 1, 2)
    command = [sys.executable, "-c", _JOB, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield path, process.pid
        process.communicate()


# A run that a job writes


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_nothing_comes_into_a_run_that_a_job_writes(
    written: tuple[pathlib.Path, int], run: pathlib.Path, treering: Any, dry: list[str]
) -> None:
    """cp and convert refuse a run that another process writes, and name that process."""
    there, job = written
    before = files(there)
    calls = [
        ["rewind", there, 1],
        ["cp", run, there],
        ["cp", run, there, "--overwrite"],
        ["cp", step_of(run, 4), step_of(there, 9)],
        ["convert", run, step_of(there, 9)],
        ["convert", run, there / "1000", "--format", "orbax"],
    ]
    for call in calls:
        found = treering(*call, *dry)
        assert found.code == 3 and f"process {job} on" in found.err and "Checkpointer" not in found.err, call
    with pytest.raises(tr.errors.ExistsError, match=f"process {job} on"):
        tr.convert(run, step_of(there, 9))
    assert files(there) == before
    assert treering("convert", run, there / "model.safetensors", *dry).code == 0, "the target is not a step"


def test_a_run_is_held_while_steps_come_into_it(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cp holds the lock of the target while it copies."""
    held: list[int] = []

    def moved(self: CopyResult, nbytes: int) -> None:
        command = [sys.executable, "-c", _JOB, str(tmp_path / "other")]
        held.append(subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode)

    monkeypatch.setattr(CopyResult, "_add_bytes", moved)
    assert treering("cp", run, tmp_path / "other", "--steps", 4).code == 0 and set(held) == {1}
    assert sorted(os.listdir(tmp_path / "other")) == ["step-00000004"], "the lock is released"


def test_a_job_may_convert_into_its_own_run(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path / "own") as ckpts:
        ckpts.save(1, {"x": 1})
        ckpts.wait()
        tr.convert(run, step_of(tmp_path / "own", 2))
        ckpts.save(3, {"x": 1})
    assert tr.steps(tmp_path / "own") == [1, 2, 3]


def test_nothing_comes_into_a_local_directory(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    """cp and convert refuse to write into a local tier."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        ckpts.save(1, {"x": 1})
    before = files(local)
    calls = [["cp", run, local], ["cp", step_of(run, 4), step_of(local, 4)], ["convert", run, step_of(local, 4)]]
    for call in [*calls, [*calls[0], "--dry-run"]]:
        found = treering(*call)
        assert found.code == 3 and str(remote) in found.err, call
    assert files(local) == before
    assert treering("cp", local, tmp_path / "copy").code == 0


@pytest.mark.long
@pytest.mark.whole
def test_steps_on_a_local_disk_count_after_others_came(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any
) -> None:
    """A copy into the remote tier leaves local steps valid that were not uploaded."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        for step in (5, 6, 7, 8):
            ckpts.save(step, {"x": step})
    removal.delete(stores.get(""), str(step_of(remote, 8)))  # The job might have been killed before the upload.
    calls = [
        ["cp", run, remote, "--steps", "1..3"],
        ["cp", step_of(run, 4), step_of(remote, 4), "--overwrite"],
        ["convert", step_of(run, 4), step_of(remote, 9), "--overwrite"],
    ]
    for call in calls:
        assert treering(*call).code == 0
        assert tr.Checkpointer(remote, local=local).copies(8) == [str(step_of(local, 8))], call


@pytest.mark.parametrize("command", ["cp", "convert"])
def test_cp_replaced_step_stays_replaced_with_local_tier(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, command: str
) -> None:
    """A local copy of a step that cp or convert replaced is no longer restored."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    with tr.Checkpointer(remote, local=local) as ckpts:
        ckpts.save(4, {"x": np.zeros(3)})
    assert treering(command, step_of(run, 4), step_of(remote, 4), "--overwrite").code == 0
    assert tr.Checkpointer(remote, local=local).restore()["x"][0] == 4


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_steps_that_a_job_deletes_meanwhile_are_named(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    source = str(run)
    if where == "bucket":
        copy_checkpoints(run, source := f"memory://{tmp_path.name}/run")

    def moved(self: CopyResult, nbytes: int) -> None:
        for step in doomed:
            removal.delete(stores.get(source), f"{source}/step-{step:08}")
        doomed.clear()

    monkeypatch.setattr(CopyResult, "_add_bytes", moved)
    doomed = [1, 3]
    found = treering("cp", source, tmp_path / "copy")
    assert found.code == 0 and "steps deleted since the copy began are not copied" in found.err, (
        "retention is no damage"
    )
    assert "step-00000003, step-00000001" in found.err and tr.steps(tmp_path / "copy") == [2, 4]
    doomed = [2]
    found = treering("cp", source, tmp_path / "again", "--json")
    assert found.json["gone"] == [f"{source}/step-00000002"] and found.json["left_behind"] == []


def test_steps_that_are_all_gone_are_an_error(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    names = copying._names_to_copy

    def listed(*arguments: Any) -> list[str]:
        found = names(*arguments)
        removal.delete(stores.get(""), str(step_of(run, 4)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_names_to_copy", listed)
        found = treering("cp", run, tmp_path / "copy", "--steps", 4)
    assert found.code == 3 and "deleted meanwhile" in found.err and not (tmp_path / "copy").exists()


def test_a_copy_of_a_step_that_is_gone_stays(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    copy = tmp_path / "copy"
    treering("cp", run, copy)
    for step in (1, 2, 3):
        removal.delete(stores.get(""), str(step_of(run, step)))
    assert treering("cp", run, copy).code == 0 and tr.steps(copy) == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.whole
def test_the_root_of_a_bucket_is_in_no_run(run: pathlib.Path, treering: Any) -> None:
    """A checkpoint at the root of a bucket is not taken for a step of a run."""
    buckets = ObjectStore()
    buckets.add("copies7://tests7", obstore.store.MemoryStore())
    with stores.using(buckets, "copies7"):
        assert treering("convert", run, "copies7://tests7").code == 0
        assert treering("cp", "copies7://tests7", "memory://tests7").code == 0


# Steps that cannot be copied


def test_one_bad_step_does_not_stop_the_others(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    treering("cp", run, copy, "--steps", "2")
    manifest = step_of(run, 2) / "treering.json"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    tr.save(run / "checkpoint_7", {"x": np.ones(3)}, format="flax")
    look = copying.summary.stat_manifest

    def closed(store: Any, path: str) -> Any:
        if path == str(step_of(run, 3)):
            raise PermissionError(13, "Permission denied", path)
        return look(store, path)

    monkeypatch.setattr(copying.summary, "stat_manifest", closed)
    found = treering("cp", run, copy, "--json")
    assert found.code == 1 and tr.steps(copy) == [1, 2, 4]
    assert set(found.json["left_behind"]) == {str(run / "checkpoint_7"), *(str(step_of(run, n)) for n in (2, 3))}
    assert "checkpoint_7: written by another library; convert it instead" in found.err
    assert "step-00000003: cannot be read by this user" in found.err and "step-00000002" in found.err
    assert treering("cp", run, copy, "--steps", "1,4").code == 0, "the bad steps were not requested"


# Existing copies


@pytest.mark.long
@pytest.mark.whole
def test_cp_reads_existing_copies_only_with_overwrite(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    """cp reads existing copies only with --overwrite, and says so."""
    copy = tmp_path / "copy"
    treering("cp", run, copy)
    change(copy, 2)
    assert "4 are there already (sizes checked, contents not read)" in treering("cp", run, copy).out
    assert treering("cp", run, copy, "--json").json["there_read"] is False
    found = treering("cp", run, copy, "--overwrite")
    assert found.out.endswith("3 are there already\n") and tr.verify(copy).ok
    change(copy, 3, size=1000)
    found = treering("cp", run, copy)
    assert found.code == 3 and str(step_of(copy, 3)) in found.err and "--overwrite" in found.err


@pytest.mark.long
@pytest.mark.whole
def test_a_damaged_copy_is_repaired_and_keeps_what_it_alone_has(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any
) -> None:
    """`cp --overwrite` repairs a damaged copy, which keeps its own pin and metrics."""
    for number, size in enumerate((None, 1000, 1)):
        copy = tmp_path / f"copy{number}"
        treering("cp", run, copy)
        tr.record(copy, 2, {"eval": 0.5})
        treering("pin", copy, 2)
        (lost,) = step_of(copy, 3).glob("arrays-*")
        lost.unlink()
        change(copy, 2, size=size)
        for step in (1, 3):  # A killed repair leaves such files.
            (step_of(copy, step) / f".{lost.name}.abcdef.tmp").touch()
        planned = treering("cp", run, copy, "--overwrite", "--dry-run", "--json").json
        found = treering("cp", run, copy, "--overwrite", "--json")
        assert found.code == 0 and found.json == {**planned, "dry_run": False} and tr.verify(copy).ok
        assert tr.Checkpointer(copy).pinned == [2] and tr.open(copy, step=2).metrics == {"eval": 0.5}
        assert lost.exists() and sorted(os.listdir(step_of(copy, 3))) == sorted(os.listdir(step_of(run, 3)))
        assert treering("delete", copy, 1, "--yes").code == 0 and not step_of(copy, 1).exists()


@pytest.mark.long
@pytest.mark.whole
def test_a_copy_in_a_bucket_is_repaired(run: pathlib.Path, treering: Any) -> None:
    buckets, copy = ObjectStore(), "copies8://tests8/copy"
    buckets.add("copies8://tests8", obstore.store.MemoryStore())
    with stores.using(buckets, "copies8"):
        copy_checkpoints(run, copy)
        for step in (2, 3):
            (name,) = (name for name in buckets.list(f"{copy}/step-0000000{step}") if name.startswith("arrays-"))
            if step == 2:
                buckets.delete(f"{copy}/step-00000002/{name}")
            else:
                with buckets.new_file(f"{copy}/step-00000003/{name}", overwrite=True) as file:
                    file.write(bytes(next(step_of(run, 3).glob("arrays-*")).stat().st_size))
        assert len(tr.verify(copy).problems) > 1 and treering("cp", run, copy, "--overwrite").code == 0
        assert tr.verify(copy).ok


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_copy_that_cannot_be_repaired_stays_as_it_is(
    run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    copy, source = tmp_path / "copy", str(run)
    treering("cp", run, copy)
    if where == "bucket":
        copy_checkpoints(run, source := f"memory://{tmp_path.name}/run")
    change(copy, 2)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}

    def interrupted(self: CopyResult, nbytes: int) -> None:
        raise KeyboardInterrupt

    damaged = native_copy.damaged_files

    def found_late(store: Any, path: str) -> Any:
        found = damaged(store, path)
        removal.delete(stores.get(source), f"{source}/step-00000002")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(CopyResult, "_add_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copy_checkpoints(source, copy, overwrite=True)
    monkeypatch.setattr(native_copy, "damaged_files", found_late)
    found = treering("cp", source, copy, "--overwrite")
    assert found.code == 1 and "was deleted before the repair ended" in found.err
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_pinned_step_is_not_replaced_by_another(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    other = save_run(tmp_path / "other", 3, 9)
    treering("pin", other, 3)
    before = files(other)
    for dry in ([], ["--dry-run"]):
        for source, target in ((run, other), (step_of(run, 3), step_of(other, 3))):
            found = treering("cp", source, target, "--overwrite", *dry)
            assert (
                found.code == 3
                and "found a pinned step that is another checkpoint" in found.err
                and files(other) == before
            )


# Dry runs


@pytest.mark.long
@pytest.mark.whole
def test_dry_runs_say_what_is_done_and_write_nothing(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    copy, out = tmp_path / "copy", tmp_path / "m.safetensors"
    treering("cp", run, copy, "--steps", "1")
    assert treering("rewind", run, 4, "--dry-run").out == "nothing to archive\n"
    calls = [["cp", run, copy], ["rewind", run, 2], ["rewind", run, "--all"]]
    for call in calls:
        before = files(tmp_path)
        said, planned = treering(*call, "--dry-run"), treering(*call, "--dry-run", "--json").json
        assert said.code == 0 and said.out and files(tmp_path) == before, call
        done = treering(*call, "--json").json
        assert done != planned and files(tmp_path) != before
        assert {**done, "dry_run": True, "to": None} == {"to": None, **planned}, call
    before = files(tmp_path)
    found = treering("convert", copy, out, "--drop", "nothing", "--dry-run")
    assert found.code == 3 and "matches none" in found.err
    found = treering("convert", copy, out, "--step", 3, "--dry-run")
    assert found.code == 0 and "would be written, safetensors, 1 leaf" in found.out
    found = treering("convert", copy, out, "--step", 3, "--dry-run", "--json").json
    assert found == {
        "path": str(out),
        "format": "safetensors",
        "step": 3,
        "leaves": 1,
        "nbytes": 32000,
        "dry_run": True,
    }
    assert files(tmp_path) == before and treering("convert", copy, out).code == 0
    assert treering("convert", copy, out, "--dry-run").code == 3, "the target exists"


def test_dry_runs_show_what_would_be_left_behind(run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    change(run, 2, size=1000)
    found = treering("cp", run, tmp_path / "copy", "--dry-run")
    assert found.code == 1 and "not copied" in found.err and "step-00000004, step-00000003, step-00000001" in found.out
    assert not (tmp_path / "copy").exists()


@pytest.mark.long
@pytest.mark.whole
def _arrays(step: pathlib.Path) -> dict[int, int]:
    """The array files of a step: their sizes by inode."""
    return {file.stat().st_ino: file.stat().st_size for file in step.glob("arrays-*")}


@pytest.mark.parametrize("chosen", [[], ["--steps", "2,4,6"]])
def test_what_steps_share_is_copied_twice(tmp_path: pathlib.Path, treering: Any, chosen: list[str]) -> None:
    """Two copies of the frozen array take turns, also if those steps are chosen that have the same one."""
    frozen = jax.numpy.arange(1 << 18)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in range(1, 9):
            ckpts.save(step, {"frozen": frozen, "n": np.full(3, step)})
    assert treering("cp", tmp_path / "run", tmp_path / "copy", *chosen).code == 0
    steps = sorted((tmp_path / "copy").glob("step-*"))
    arrays = [_arrays(step) for step in steps[-4:]]  # The first steps of a run have all arrays in one file.
    assert len(steps) == (3 if chosen else 8) and tr.verify(tmp_path / "copy").ok
    for n, (one, following) in enumerate(itertools.pairwise(arrays)):
        assert not one.keys() & following.keys()
        shared = one.keys() & arrays[n + 2].keys() if n + 2 < len(arrays) else ()
        assert max(map(one.__getitem__, shared), default=frozen.nbytes) >= frozen.nbytes
    assert sum({**arrays[0], **arrays[-1], **arrays[1]}.values()) < 2.1 * frozen.nbytes
    assert np.array_equal(tr.restore(tmp_path / "copy", step=6)["frozen"], frozen)


def test_a_step_that_is_left_behind_takes_no_turn(tmp_path: pathlib.Path, treering: Any) -> None:
    """The steps before and after it are neighbors in the copy, so they share no file."""
    frozen = jax.numpy.arange(1 << 18)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in range(1, 9):
            ckpts.save(step, {"frozen": frozen, "n": np.full(3, step)})
    damaged = sorted((tmp_path / "run" / "step-00000007").glob("arrays-*"))[-1]
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert treering("cp", tmp_path / "run", tmp_path / "copy").code == 1
    assert not (tmp_path / "copy" / "step-00000007").exists()
    before, after = (_arrays(tmp_path / "copy" / f"step-{step:08}") for step in (6, 8))
    assert not before.keys() & after.keys()


def test_steps_are_chosen_by_numbers_and_ranges(tmp_path: pathlib.Path, treering: Any) -> None:
    run, copy = save_run(tmp_path / "run", 1, 100, 200, 250, 300, 400), tmp_path / "copy"
    for steps in ("", "3..1", "1,,2", "a", "1..", "-1", "1-2"):
        found = treering("cp", run, copy, f"--steps={steps}")
        assert found.code == 2 and "100,200..300" in found.err, steps
    for steps, said in (("7", "expected step 7"), ("1,500..600", "expected steps from 500 to 600")):
        found = treering("cp", run, copy, "--steps", steps)
        assert found.code == 3 and said in found.err and not copy.exists()
    assert treering("cp", run, copy, "--steps", "100, 200..300").code == 0 and tr.steps(copy) == [100, 200, 250, 300]
    found = treering("cp", step_of(run, 1), tmp_path / "one", "--steps", "1")
    assert found.code == 3 and "expected a run to choose steps from, found one" in found.err


@pytest.mark.parametrize("format", ["safetensors", "flax", "equinox", "levanter", "t5x", "orbax"])
def test_a_dry_run_makes_the_checks_of_the_run(format: str, tmp_path: pathlib.Path, treering: Any) -> None:
    source, out = tmp_path / "a", tmp_path / "out"
    arrays = {"w": np.ones(3), "key": jax.random.key(0), "big": 1 << 70, "rng": np.random.default_rng(0)}
    tr.save(source, arrays)
    call = ("convert", source, out, "--format", format)
    dry, real = treering(*call, "--dry-run"), treering(*call)
    assert (dry.code, dry.err) == (real.code, real.err) == (3, dry.err)
    named = ["rng", "big", *(["key"] if format != "orbax" else [])]  # Orbax holds keys.
    assert all(name in dry.err for name in named) and list(tmp_path.iterdir()) == [source]
    call = (*call, *(f"--drop={name}" for name in named))
    assert treering(*call, "--dry-run").code == treering(*call).code == 0


def test_a_dry_run_refuses_options_of_other_formats(tmp_path: pathlib.Path, treering: Any) -> None:
    tr.save(tmp_path / "a", {"w": np.ones(3)})
    call = ("convert", tmp_path / "a", tmp_path / "b", "--format", "flax", "--max-shard-size", "1G")
    dry, real = treering(*call, "--dry-run"), treering(*call)
    assert dry.code == real.code == 3 and dry.err == real.err


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("call", ["cp", "prune", "convert", "orbax", "levanter", "flax", "report"])
def test_a_full_disk_is_named_with_its_bytes(
    call: str, small_disk: pathlib.Path, tmp_path: pathlib.Path, treering: Any
) -> None:
    run, to = tmp_path / "run", small_disk / "copy"
    with tr.Checkpointer(run) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": np.random.default_rng(step).random(1_000_000)})
    if call == "report":
        with contextlib.suppress(OSError), open(small_disk / "other", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    given = {
        "cp": ("cp", run, to),
        "prune": ("prune", run, "last:1", "--to", to, "--yes"),
        "report": ("report", run, "--steps", "0", "-o", to),
    }.get(call, ("convert", run, to, "--format", "treering" if call == "convert" else call))
    found = treering(*given)
    assert found.code == 3 and str(small_disk) in found.err and "No space left on device" in found.err
    assert re.search(r"\d+ bytes (were needed|free)|room for \d+ bytes", found.err), found.err
    assert re.search(r"\d+ (are free|bytes free)", found.err), found.err
    assert tr.steps(run) == [1, 2]


# What docs/how-to/save-and-restore.md says of other tools: the command, and True if it keeps shared files.
TOOLS = {
    "cp -r run copy": False,
    "cp -a run copy": True,
    "tar cf a.tar run && mkdir copy && tar xf a.tar -C copy": True,
    "zip -qr a.zip run && unzip -q a.zip -d copy": False,
    "rsync -a run/ copy/": False,
    "rsync -aH run/ copy/": True,
    "rclone copy run copy": False,
    f"{sys.executable} -m treering cp run copy": True,
}


@pytest.mark.parametrize("command", TOOLS)
def test_tools_copy_what_steps_share(command: str, tmp_path: pathlib.Path) -> None:
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        frozen = jax.numpy.zeros(1 << 19)
        for step in range(1, 7):
            ckpts.save(step, {"frozen": frozen, "n": np.full(3, step)})
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    copy = tmp_path / "copy" / "run" if (tmp_path / "copy" / "run").exists() else tmp_path / "copy"
    files = [file.stat() for file in copy.glob("step-*/arrays-*")]
    sizes = {one.st_ino: one.st_size for one in files}
    assert (sum(sizes.values()) < sum(one.st_size for one in files)) == TOOLS[command]
    assert tr.steps(copy) == [1, 2, 3, 4, 5, 6] and tr.verify(copy).ok and tr.restore(copy)["n"][0] == 6
    with tr.Checkpointer(copy, keep=tr.keep.last(2)) as ckpts:  # a job continues the copy, and deletes steps of it
        ckpts.save(7, {"frozen": frozen, "n": np.full(3, 7)})
    assert tr.steps(copy) == [6, 7] and tr.verify(copy).ok and tr.verify(tmp_path / "run").ok
