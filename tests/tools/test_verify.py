"""verify reports all damage, and only damage."""

import errno
import os
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import orbax.checkpoint as ocp
import pytest

import treering as tr
from hostile_input import flip
from treering.errors import NotFoundError
from treering.stores.posix import Disk


def test_a_report_names_the_file_the_leaves_and_the_block(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c"
    tr.save(path, {"a": np.zeros(3 << 20, np.uint8), "b": np.zeros(1 << 20, np.uint8)})
    (file,) = path.glob("*.safetensors")
    for block in (1, 3):
        flip(file, 4096 + (block << 20) + 17)
    report = tr.verify(path)
    assert not report.ok and not report
    assert [(p.file, p.leaves, p.block) for p in report.problems] == [(file.name, ("a",), 1), (file.name, ("b",), 3)]
    assert f"{file.name}, block 3: the bytes are not those that were saved (leaves: b)" in str(report)
    with pytest.raises(tr.errors.CorruptError, match=r"2 of 4 blocks .*block 1 first.*damaged leaves: a, b"):
        tr.restore(path)
    assert tr.restore(path, like={"a": ..., "b": ...}) == {"a": ..., "b": ...}
    assert tr.open(path)["a"][:100].sum() == 0
    with pytest.raises(tr.errors.CorruptError):
        tr.open(path)["a"][(1 << 20) - 1 : (1 << 20) + 1]
    assert tr.restore(path, verify=False)["a"].sum() == 1


def test_verify_of_run_checks_all_steps(tmp_path: pathlib.Path) -> None:
    """verify of a run checks all its steps."""
    for n in range(3):
        tr.save(tmp_path / f"step-{n:08}", {"x": np.zeros(10)})
    report = tr.verify(tmp_path)
    assert report.ok and report.nbytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    flip(tmp_path / "step-00000001" / "treering.json", 30)
    next((tmp_path / "step-00000002").glob("*.safetensors")).unlink()
    files = [problem.file for problem in tr.verify(tmp_path).problems]
    assert files[0] == "step-00000001/treering.json" and files[1].startswith("step-00000002/arrays-")
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(NotFoundError):
        tr.verify(tmp_path / "step-00000001")


@pytest.mark.long
def test_steps_of_other_libraries_are_verified_too(tmp_path: pathlib.Path) -> None:
    state = {"a": np.arange(1000.0), "b": np.ones(3)}
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state))
    for step in (3, 4):
        tr.save(tmp_path / "t5x" / f"checkpoint_{step}", {"target": {"w": np.ones(90_000)}}, format="t5x")
        tr.save(tmp_path / "flax" / f"checkpoint_{step}", state, format="flax")
    for run in ("orbax", "t5x", "flax"):
        for mixed in (False, True):
            if mixed:
                with tr.Checkpointer(tmp_path / run) as ckpts:
                    ckpts.save(5, state)
            report = tr.verify(tmp_path / run)
            assert report.ok and report.nbytes == sum(
                tr.open(tmp_path / run, step=n).nbytes for n in tr.steps(tmp_path / run)
            )
    for file in (
        next((tmp_path / "orbax" / "1").glob("**/d/*")),
        tmp_path / "t5x" / "checkpoint_3" / "target.w" / "0",
    ):
        file.unlink()
    (tmp_path / "flax" / "checkpoint_4").write_bytes((tmp_path / "flax" / "checkpoint_4").read_bytes()[:-5])
    for run, step in (("orbax", "1"), ("t5x", "checkpoint_3"), ("flax", "checkpoint_4")):
        report = tr.verify(tmp_path / run)
        assert not report.ok and all(step in str(problem) for problem in report.problems)


def test_verify_of_run_checks_weights_in_its_folder(tmp_path: pathlib.Path) -> None:
    """verify of a run also checks weights in the folder of the run."""
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, {"a": np.ones(3)})
    tr.save(tmp_path / "model.safetensors", {"w": np.ones(100)})
    assert tr.verify(tmp_path).ok
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    (problem,) = tr.verify(tmp_path).problems
    assert "model.safetensors" in str(problem)


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_step_changed_by_another_host_is_not_damaged(
    tmp_path: pathlib.Path, use_disk: Callable[[Disk], Disk], what: str
) -> None:
    """Over NFS, a file that another host removes is stale. Here the removal is real and the error is simulated."""
    for n in range(3):
        tr.save(tmp_path / f"step-{n:08}", {"x": np.full(10, n)})

    class Stale(Disk):
        meanwhile = 0

        def _stale(self, path: str) -> None:
            if "step-00000001" in path and not self.meanwhile:
                self.meanwhile = 1
                if what == "deleted":
                    shutil.rmtree(tmp_path / "step-00000001")
                else:
                    tr.save(tmp_path / "step-00000001", {"x": np.full(20, 7)}, overwrite=True)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

        def open(self, path: str) -> int:
            if path.endswith(".safetensors"):
                self._stale(path)
            return super().open(path)

    disk = use_disk(Stale())
    report = tr.verify(tmp_path)
    assert report.ok, str(report)
    assert disk.meanwhile  # type: ignore
    assert report.nbytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    use_disk(Stale())
    if what == "replaced":
        assert tr.verify(tmp_path / "step-00000001").ok
    else:
        tr.save(tmp_path / "step-00000001", {"x": 1 + np.ones(3)})
        with pytest.raises(NotFoundError, match="deleted during its check"):
            tr.verify(tmp_path / "step-00000001")


def test_a_step_that_is_being_deleted_is_skipped(tmp_path: pathlib.Path, use_disk: Callable[[Disk], Disk]) -> None:
    """Retention removes a manifest first, so `verify` may find the directory of a step without it."""
    for n in range(3):
        tr.save(tmp_path / f"step-{n:08}", {"x": np.full(10, n)})

    class Deleting(Disk):
        def open(self, path: str) -> int:
            if "step-00000000" in path and path.endswith(".safetensors"):
                (tmp_path / "step-00000001" / "treering.json").unlink(missing_ok=True)
            return super().open(path)

    use_disk(Deleting())
    report = tr.verify(tmp_path)
    assert report.ok and (tmp_path / "step-00000001").is_dir()
    with pytest.raises(NotFoundError):
        tr.verify(tmp_path / "step-00000001")


def test_damage_that_stays_is_reported_once(tmp_path: pathlib.Path, use_disk: Callable[[Disk], Disk]) -> None:
    """A missing file is damage if no process has replaced or deleted the checkpoint."""
    tr.save(tmp_path / "c", {"x": np.ones(3)})
    next((tmp_path / "c").glob("arrays-*")).unlink()
    (problem,) = tr.verify(tmp_path / "c").problems
    assert "found nothing" in str(problem)
