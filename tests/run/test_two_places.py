"""Runs in two tiers: saved to a local disk, and uploaded from there to the remote tier."""

import contextlib
import errno
import logging
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import obstore.store
import pytest

import s3
import treering as tr
from fault_proxy import Proxy, proxy
from jobs import run_job
from treering import stores
from treering._run.tiers import uploader as copies
from treering._run.tiers.journal import Claim, Generations, Journal, JournalContents, begin_series
from treering.errors import (
    CorruptError,
    ExistsError,
    MismatchError,
    NotFoundError,
    SaveError,
    TreeringError,
    UnsupportedError,
)
from treering.formats.treering import copy as treering_copy
from treering.formats.treering import host_files, manifest, removal
from treering.stores import probe
from treering.stores.objects.store import ObjectStore
from treering.stores.posix import Disk


@pytest.fixture(params=["disk", "memory", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[str]:
    """The remote tier of a run."""
    if request.param == "disk":
        yield str(tmp_path / "remote" / "run")
        return
    buckets = ObjectStore()
    memory = request.param == "memory"
    buckets.add(
        "remote://b", obstore.store.MemoryStore() if memory else s3.client(request.getfixturevalue("s3_server"))
    )
    with stores.using(buckets, "remote"):
        yield f"remote://b/{secrets.token_hex(4)}"


@pytest.fixture
def local(tmp_path: pathlib.Path) -> str:
    """The local tier of a run."""
    return str(tmp_path / "local")


def _state(step: int, size: int = 1000) -> dict[str, Any]:
    return {"w": np.full(size, step, np.float32), "n": step}


def _save(ckpts: tr.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpts.save(step, _state(step))
        ckpts.wait()


def _saved(ckpts: tr.Checkpointer, step: int) -> tr.PendingSave:
    pending = ckpts.save(step, _state(step))
    assert pending is not None
    return pending


def _check(tree: Any, step: int) -> None:
    assert tree["n"] == step and np.array_equal(tree["w"], _state(step)["w"])


def _manifest(path: str) -> bytes:
    blob = stores.get(path).open(f"{path}/treering.json")
    return blob.read(0, blob.size)


def _until(check: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.long
def test_steps_are_saved_locally_and_kept_remotely(local: str, remote: str) -> None:
    with tr.Checkpointer(remote, local=local, keep=tr.keep.last(3)) as ckpts:
        assert ckpts.restore_or_init(lambda: _state(0))[1] == 0
        for step in range(1, 6):
            pending = ckpts.save(step, _state(step), metrics={"loss": 1 / step})
            assert pending and pending.result().path == f"{local}/step-{step:08}"
        _check(ckpts.restore(), 5)
    assert tr.steps(local) == [5] and tr.steps(remote) == [3, 4, 5]
    assert _manifest(f"{local}/step-00000005") == _manifest(f"{remote}/step-00000005")
    for step in (3, 4, 5):
        _check(tr.restore(remote, step=step), step)
    assert tr.verify(remote) and tr.open(remote).metrics == {"loss": 0.2} and tr.open(remote).step == 5
    after = tr.Checkpointer(remote, local=local)
    assert after.steps == [3, 4, 5] and after.latest_step == 5 and after.best_step("loss", "min") == 5
    assert after.copies(5) == [f"{local}/step-00000005", f"{remote}/step-00000005"]
    assert after.copies(4) == [f"{remote}/step-00000004"] and after.path(6) == f"{local}/step-00000006"
    assert list(after.disk_usage) == [3, 4, 5]
    with pytest.raises(NotFoundError, match="expected step 1, found 3, 4, 5"):
        after.copies(1)


@pytest.fixture
def memory() -> Iterator[str]:
    """A local tier in memory."""
    if not probe.is_in_memory("/dev/shm/"):
        pytest.skip("/dev/shm is not a tmpfs")
    with tempfile.TemporaryDirectory(prefix="treering-", dir="/dev/shm") as folder:
        yield f"{folder}/run"


@pytest.mark.slow
def test_memory_is_freed_when_the_job_ends_well(memory: str, remote: str, caplog: pytest.LogCaptureFixture) -> None:
    """The journal stays, so the next job continues the branch; metrics of a late hook are in the remote tier."""
    for first, ends in ((1, "close"), (3, "finish")):
        evaluated = threading.Event()

        def evaluate(report: Any, evaluated: threading.Event = evaluated) -> None:
            evaluated.wait()
            tr.record(memory, report.step, {"loss": report.step})

        with caplog.at_level(logging.INFO):
            ckpts = tr.Checkpointer(
                remote, local=memory, keep=tr.keep.steps(1, 2, 3), keep_local=None, on_save=evaluate
            )
            assert ckpts.restore_or_init(lambda: _state(0))[1] == first - 1
            _save(ckpts, first, first + 1)
            ckpts.pin(first)
            assert [one.survives for one in ckpts.copies(first)][:1] == ["the process"]
            threading.Timer(0.3, evaluated.set).start()  # once the uploads are over
            getattr(ckpts, ends)()
        assert tr.steps(memory) == [] and os.listdir(memory)
        assert ckpts.copies(first) == [f"{remote}/step-{first:08}"] and ckpts.pinned[-1] == first
        assert ckpts.copies(first)[0].survives != "the process"
        assert f"{memory}: 2 steps removed from memory" in caplog.text
        _check(ckpts.restore(), first + 1)
        assert ckpts.open(first + 1).metrics == {"loss": first + 1}
    assert tr.steps(remote) == [1, 2, 3, 4] and "archived" not in caplog.text


@pytest.mark.parametrize("end", ["error", "interrupt", "upload", "lost", "save meanwhile"])
def test_memory_stays_unless_the_job_ends_well(
    memory: str, tmp_path: pathlib.Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = str(tmp_path / "remote")
    ckpts = tr.Checkpointer(remote, local=memory, keep_local=None)
    _save(ckpts, 1, 2)
    if end in ("error", "interrupt"):
        error = ValueError if end == "error" else KeyboardInterrupt
        with pytest.raises(error), ckpts:
            raise error
    elif end == "upload":
        _until(lambda: not ckpts.uncopied)
        monkeypatch.setattr(treering_copy, "copy", _refuse)
        ckpts.save(3, _state(3))
        with pytest.raises(SaveError, match="some steps were not uploaded"):
            ckpts.close()
    elif end == "lost":
        _until(lambda: not ckpts.uncopied)
        with tr.Checkpointer(remote, local=f"{tmp_path}/other") as other:
            _save(other, 3)
            ckpts.close()
    else:
        upload_all = ckpts._directory.upload_all  # type: ignore[attr-defined]

        def upload_and_save() -> None:
            upload_all()
            monkeypatch.setattr(treering_copy, "copy", _refuse)
            other_thread = threading.Thread(target=_save, args=[ckpts, 3])
            other_thread.start()
            other_thread.join()

        monkeypatch.setattr(ckpts._directory, "upload_all", upload_and_save)
        with pytest.raises(SaveError, match="some steps were not uploaded"):
            ckpts.close()
    assert tr.steps(memory)[:2] == [1, 2]
    monkeypatch.undo()
    with tr.Checkpointer(remote, local=memory) as after:
        assert after.steps == ([1, 2] if end in ("error", "interrupt") else [1, 2, 3])
        _save(after, 9)
    assert tr.steps(memory) == [] and 9 in tr.steps(remote)


class _StuckDisk(Disk):
    """A disk on which nothing in a folder can be removed, or which another folder cannot be listed of, once stuck."""

    def __init__(self, local: str, remote: str):
        self._local, self._remote, self.stuck = local, remote, ""

    def _check(self, what: str, path: str | os.PathLike[str], root: str) -> None:
        if self.stuck == what and str(path).startswith(root):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def unlink(self, path: Any) -> None:
        self._check("local", path, self._local)
        super().unlink(path)

    def list(self, path: Any) -> list[str]:
        self._check("remote", path, self._remote)
        return super().list(path)


@pytest.mark.parametrize(
    ("stuck", "said"), [("local", "step 2 stays in memory: "), ("remote", "steps stay in memory: ")]
)
def test_steps_that_stay_in_memory_are_logged(
    memory: str, tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture, stuck: str, said: str
) -> None:
    """They are uploaded, so the job ends well."""
    disk = use_disk(_StuckDisk(memory, f"{tmp_path}/remote"))
    ckpts = tr.Checkpointer(tmp_path / "remote", local=memory, keep_local=None)
    _save(ckpts, 1, 2)
    upload_all = ckpts._directory.upload_all  # type: ignore[attr-defined]

    def upload_and_stick() -> None:
        upload_all()
        disk.stuck = stuck

    ckpts._directory.upload_all = upload_and_stick  # type: ignore[attr-defined]
    ckpts.close()
    disk.stuck = ""
    assert f"{memory}: {said}" in caplog.text and tr.steps(tmp_path / "remote") == [1, 2]


def _refuse(*_: Any, **__: Any) -> str:
    raise OSError(errno.EIO, "no answer")


def test_local_steps_are_kept_up_to_a_number_of_bytes(local: str, tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path / "remote", local=local, keep_local=1 << 20) as ckpts:
        for step in range(1, 5):
            ckpts.save(step, {"w": np.zeros(100_000, np.float32)})  # 400 KB
    assert tr.steps(local) == [3, 4] and tr.steps(tmp_path / "remote") == [1, 2, 3, 4]


@pytest.mark.long
def test_the_nearest_good_copy_is_taken(local: str, remote: str, caplog: pytest.LogCaptureFixture) -> None:
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1, 2)
    file = next(pathlib.Path(local, "step-00000002").glob("arrays-*"))
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for step in (None, 2):
        caplog.clear()
        ckpts = tr.Checkpointer(remote, local=local)
        _check(ckpts.restore(step=step), 2)
        assert ckpts.restored_step == 2
        assert f"taking the copy of step 2 at {remote}/step-00000002" in caplog.text
    file.unlink()
    assert tr.Checkpointer(remote, local=local).open(2).path == f"{remote}/step-00000002"
    with tr.Checkpointer(remote, local=local + "-of-another-host") as ckpts:
        state, step = ckpts.restore_or_init(lambda: _state(0))
        _check(state, 2)
        assert step == 2
        _save(ckpts, 3)
    assert tr.steps(remote) == [1, 2, 3]


@pytest.mark.long
def test_what_is_not_copied_is_never_deleted(local: str, tmp_path: pathlib.Path, s3_server: str) -> None:
    """Without a network, saving continues locally, the steps that `keep` keeps stay, and the next job uploads them."""
    with proxy(s3_server) as between:
        buckets = ObjectStore()
        buckets.add("flaky://b", s3.client(between.url, retry_config={"max_retries": 0}))
        with stores.using(buckets, "flaky"):
            _save_without_network(between, local, f"flaky://b/{secrets.token_hex(4)}")


def _save_without_network(between: Proxy, local: str, remote: str) -> None:
    notified: list[tuple[BaseException, bool]] = []

    def notify(error: BaseException) -> None:
        notified.append((error, threading.current_thread() is threading.main_thread()))

    ckpts = tr.Checkpointer(remote, local=local, keep=tr.keep.last(3), on_error=notify)
    _save(ckpts, 1)
    _until(lambda: tr.steps(remote) == [1])
    between.fault = lambda request: "503 SlowDown"
    _save(ckpts, 2, 3, 4)
    _until(lambda: not ckpts._directory.busy)
    _save(ckpts, 5)
    assert notified and all("503" in str(error) and in_main for error, in_main in notified)
    with pytest.raises(
        SaveError, match=rf"{remote}: some steps were not uploaded.*503.*steps 3, 4, 5 are in {local}; the next job"
    ):
        ckpts.close()
    assert {3, 4, 5} <= set(tr.steps(local))
    between.fault = lambda request: None
    with tr.Checkpointer(remote, local=local, keep=tr.keep.last(3)) as ckpts:
        assert ckpts.latest_step == 5
        _save(ckpts, 6)
    assert tr.steps(remote) == [4, 5, 6] and tr.steps(local) == [6]


def test_a_step_that_is_not_copied_and_not_wanted_any_more_goes(local: str, tmp_path: pathlib.Path) -> None:
    """The policy sees the steps of both tiers together, also newer ones that are only remote."""
    remote = tmp_path / "remote"
    (remote / "step-00000002").mkdir(parents=True)
    (remote / "step-00000002" / "treering.json").mkdir()  # no step can be there
    with tr.Checkpointer(remote, local=local, keep=tr.keep.last(3)) as ckpts:
        _save(ckpts, 1, 2)
        for step in (3, 4, 5):
            _save(ckpts, step)
            _until(lambda step=step: step in tr.steps(remote))
            assert 2 in tr.steps(local)
    assert tr.steps(local) == [5] and tr.steps(remote) == [3, 4, 5]


def test_a_step_becomes_the_best_before_it_is_copied(local: str, tmp_path: pathlib.Path) -> None:
    """An evaluator records the metric of a step while the upload of a newer one takes long."""
    remote = tmp_path / "remote"
    (remote / "step-00000002" / "treering.json").mkdir(parents=True)  # no step can be there
    keep = tr.keep.best(1, "loss", "min", unscored="drop")
    ckpts = tr.Checkpointer(remote, local=local, keep=keep)
    places: Any = ckpts._directory
    ckpts.save(1, _state(1), metrics={"loss": 0.5})
    _save(ckpts, 2, 3)
    _until(lambda: tr.steps(remote) == [1, 3] and not places.busy)
    places._uploader._upload_all = lambda: None
    tr.record(local, 2, {"loss": 0.1})
    _save(ckpts, 4, 5)
    ckpts.close()
    assert 2 in tr.steps(local)


@pytest.mark.long
@pytest.mark.parametrize("change", ["rewind", "delete"])
def test_a_step_is_wanted_again_when_newer_ones_are_gone(local: str, tmp_path: pathlib.Path, change: str) -> None:
    """An earlier decision not to upload it is dropped, even if no upload decides again before the next save."""
    remote = tmp_path / "remote"
    (remote / "step-00000002" / "treering.json").mkdir(parents=True)  # no step can be there
    ckpts = tr.Checkpointer(remote, local=local, keep=tr.keep.last(3))
    places: Any = ckpts._directory
    for step in (2, 3, 4, 5):
        _save(ckpts, step)
        _until(lambda step=step: step == 2 or step in tr.steps(remote))
    _until(lambda: not places.busy)
    assert [one.step for one in places._seen_remote] == [3, 4, 5] and 2 in tr.steps(local)
    places._uploader._upload_all = lambda: None
    if change == "rewind":
        ckpts.rewind(2)
    else:
        ckpts.delete(3)
        ckpts.delete(4)
    _save(ckpts, 6)
    ckpts.close()
    assert tr.steps(local)[0] == 2


@pytest.mark.long
def test_copying_is_tried_again_without_another_save(
    local: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network fails for a moment after the only save in a long time."""
    monkeypatch.setattr(copies, "_MIN_RETRY_SECONDS", 0.05)
    with proxy(s3_server) as between:
        buckets = ObjectStore()
        buckets.add("away://b", s3.client(between.url, retry_config={"max_retries": 0}))
        remote = f"away://b/{secrets.token_hex(4)}"
        with stores.using(buckets, "away"), tr.Checkpointer(remote, local=local) as ckpts:
            _save(ckpts, 1)
            _until(lambda: tr.steps(remote) == [1])
            between.fault = lambda request: "503 SlowDown"
            _save(ckpts, 2)
            places: Any = ckpts._directory
            _until(lambda: places._uploader._wait > 0.15)  # The upload has failed more than once.
            between.fault = lambda request: None
            _until(lambda: ckpts.uncopied == [])
            assert tr.steps(remote) == [1, 2]


_SLOWLY = """
import sys
import numpy as np
import treering as tr

ckpts = tr.Checkpointer(sys.argv[1], local=sys.argv[2], upload_limit=2_000_000, keep_local=None)
for step in (1, 2, 3):
    ckpts.save(step, {"w": np.full(2_000_000, step, np.float32), "n": step})
    ckpts.wait()
    print(step, flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_job_is_finished_by_the_next(local: str, tmp_path: pathlib.Path, stop: signal.Signals) -> None:
    remote = str(tmp_path / "remote")
    with subprocess.Popen(
        [sys.executable, "-c", _SLOWLY, remote, local], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout and [job.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "3\n"]
        _until(lambda: list(pathlib.Path(remote).glob("step-*/arrays-*")))
        job.send_signal(stop)
    assert tr.steps(remote) == [] and tr.steps(local) == [1, 2, 3]
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        assert ckpts.steps == [1, 2, 3]
        assert ckpts.restore()["n"] == 3
        _save(ckpts, 4)
    assert tr.steps(remote) == [1, 2, 3, 4]
    for step in (1, 2, 3):
        assert np.all(tr.restore(remote, step=step)["w"] == step)
        assert len(os.listdir(f"{remote}/step-{step:08}")) == 2


@pytest.mark.long
def test_steps_of_a_job_that_was_overtaken(local: str, remote: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another host has continued the run. Steps only in the first host's local tier are an abandoned branch."""
    other = local + "-of-another-host"
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        _save(ckpts, 1, 2)
    store = stores.get(remote)
    with tr.Checkpointer(remote, local=other) as ckpts:
        ckpts.restore(step=1)
        ckpts.save(2, _state(20))
        ckpts.save(3, _state(30))
    assert store.list(remote).count("rewound-1") == 1
    back = tr.Checkpointer(remote, local=local, keep_local=None)
    assert back.steps == [1, 2, 3] and back.copies(2) == [f"{remote}/step-00000002"]  # not the local one
    assert back.copies(1) == [f"{local}/step-00000001", f"{remote}/step-00000001"]
    _check(back.restore(step=2), 20)
    _check(back.restore(), 30)
    with back:
        _save(back, 4)
    assert "since steps 2 were saved here; they are ignored" in caplog.text
    assert "steps that do not belong to the run were archived in" in caplog.text
    _check(tr.restore(f"{local}/rewound-1/step-00000002"), 2)
    assert tr.steps(remote) == [1, 2, 3, 4] and tr.steps(local) == [1, 4]


@pytest.mark.long
def test_a_job_without_a_local_place_comes_between(local: str, remote: str) -> None:
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1)
    with tr.Checkpointer(remote) as ckpts:
        ckpts.save(1, _state(10), on_exists="overwrite")
    back = tr.Checkpointer(remote, local=local)
    _check(back.restore(), 10)
    with back:
        _save(back, 2)
    assert tr.steps(remote) == [1, 2] and tr.steps(local) == [2]
    _check(tr.restore(remote, step=1), 10)


@pytest.mark.long
def test_a_local_run_moves_to_another_place(local: str, remote: str) -> None:
    with tr.Checkpointer(local) as ckpts:
        _save(ckpts, 1, 2)
        ckpts.pin(1)
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        _check(ckpts.restore(), 2)
        _save(ckpts, 3)
    assert tr.steps(remote) == [1, 2, 3] and tr.Checkpointer(remote).pinned == [1]


@pytest.mark.long
def test_overwriting_and_skipping(local: str, remote: str) -> None:
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1, 2)
        _until(lambda: tr.steps(remote) == [1, 2])
        for step in (1, 2):
            with pytest.raises(ExistsError, match=f"step {step} is saved already"):
                ckpts.save(step, _state(7))
            assert ckpts.save(step, _state(7), on_exists="skip") is None
        ckpts.save(1, _state(10), on_exists="overwrite")
        ckpts.save(2, _state(20), on_exists="overwrite")
    for step in (1, 2):
        _check(tr.restore(remote, step=step), 10 * step)
        _check(tr.Checkpointer(remote, local=local).restore(step=step), 10 * step)


@pytest.mark.long
def test_managing_both(local: str, remote: str) -> None:
    with tr.Checkpointer(
        remote, local=local, keep=tr.keep.last(2) | tr.keep.best(1, "loss", "min", unscored="drop"), keep_local=None
    ) as ckpts:
        ckpts.save(1, _state(1), metrics={"loss": 5})
        ckpts.save(2, _state(2), metrics={"loss": 3})
        ckpts.wait()
        ckpts.pin(2)
        tr.record(local, 1, {"loss": 1})  # before or after its upload
        _save(ckpts, 3, 4, 5)
        _until(lambda: tr.steps(remote) == [1, 2, 4, 5])
        _until(lambda: tr.Checkpointer(remote).pinned == [2] and tr.open(remote, step=1).metrics == {"loss": 1})
        with pytest.raises(MismatchError, match="pinned"):
            ckpts.delete(2)
        ckpts.delete(4)
        assert ckpts.pinned == [2] and 4 not in tr.steps(remote) and tr.steps(local) == [1, 2, 3, 5]
        ckpts.unpin(2)
        assert ckpts.pinned == []
        _save(ckpts, 6)
        ckpts.rewind(5)
        assert ckpts.latest_step == 5
        ckpts.save(6, _state(60))
        ckpts.finish()
    for place in (local, remote):
        assert tr.steps(place)[-2:] == [5, 6] and "finished" in stores.get(place).list(place)
        _check(tr.restore(place), 60)
    assert 1 in (ckpt.step for ckpt in tr.follow(remote))  # the best one


@pytest.mark.long
def test_a_step_is_gone_back_from(local: str, remote: str) -> None:
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        _save(ckpts, 1, 2, 3)
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        ckpts.restore(step=1)
        ckpts.save(2, _state(20))
    for place in (local, remote):
        assert tr.steps(place) == [1, 2]
        _check(tr.restore(place), 20)


@pytest.mark.long
def test_a_change_does_not_wait_for_a_slow_copy(local: str, remote: str) -> None:
    ckpts = tr.Checkpointer(remote, local=local, upload_limit=10)
    ckpts.save(1, _state(1))
    ckpts.wait()
    _until(lambda: "uploading step 1" in repr(ckpts))
    ckpts.save(2, _state(2))
    ckpts.wait()
    begun = time.monotonic()
    ckpts.delete(1)
    assert time.monotonic() - begun < 10 and ckpts.steps == [2]
    ckpts._directory._uploader._pace._rate = None  # type: ignore[attr-defined]
    ckpts.close()
    assert tr.steps(remote) == [2]


def test_delete_removes_the_copy_of_an_upload_that_just_ended(
    local: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload ends after `delete` has listed the copies of the step, and before it pauses the uploads."""
    remote, pause = tmp_path / "remote", copies.Uploader.paused
    with tr.Checkpointer(remote, local=local, upload_limit=10) as ckpts:
        ckpts.save(1, _state(1))
        ckpts.wait()
        _until(lambda: "uploading step 1" in repr(ckpts))

        def late(self: copies.Uploader) -> Any:
            self.lift_limit()
            self.wait()
            return pause(self)

        with monkeypatch.context() as patch:
            patch.setattr(copies.Uploader, "paused", late)  # the order of two threads, not what they do
            ckpts.delete(1)
        assert tr.steps(remote) == tr.steps(local) == []
        ckpts.save(2, _state(2))
    assert tr.steps(remote) == [2]


def test_a_step_that_retention_deletes_before_its_upload(
    local: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy drops the step after it was chosen for upload. This is no failure of an upload."""
    remote, copy, begin = tmp_path / "remote", treering_copy.copy, threading.Event()

    def late(*places: Any, **options: Any) -> Any:
        assert begin.wait(30)
        return copy(*places, **options)

    monkeypatch.setattr(treering_copy, "copy", late)  # the order of two threads, not what they do
    with caplog.at_level(logging.INFO, "treering"), tr.Checkpointer(remote, local=local, keep=tr.keep.last(1)) as ckpts:
        _save(ckpts, 1)
        _until(lambda: "uploading step 1" in repr(ckpts))
        _save(ckpts, 2, 3)
        _until(lambda: 1 not in tr.steps(local))
        begin.set()
    assert tr.steps(remote) == [3] and "step 1 was deleted before its upload had ended" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_step_that_is_deleted_just_after_its_upload(local: str, tmp_path: pathlib.Path) -> None:
    """Retention sees that the step is uploaded, and deletes it before the upload has noted that."""

    class Waits(dict[int, Any]):
        def __setitem__(self, step: int, seen: Any) -> None:
            super().__setitem__(step, seen)
            if step == 1:
                _until(lambda: 1 not in tr.steps(local))

    with tr.Checkpointer(tmp_path / "remote", local=local) as ckpts:
        places: Any = ckpts._directory
        places._copied = Waits()  # the order of two threads, not what they do
        _save(ckpts, 1)
        _until(lambda: 1 in places._copied)
        _save(ckpts, 2, 3)
    assert tr.steps(tmp_path / "remote") == [1, 2, 3]


@pytest.mark.long
def test_the_limit_is_kept(local: str, tmp_path: pathlib.Path) -> None:
    begun = time.monotonic()
    with tr.Checkpointer(tmp_path / "remote", local=local, upload_limit=10_000_000) as ckpts:
        ckpts.save(1, {"w": np.zeros(5_000_000, np.float32)})
        _until(lambda: ckpts.uncopied == [] and tr.steps(tmp_path / "remote") == [1])
        assert time.monotonic() - begun > 1.9  # 20 MB
        ckpts.save(2, {"w": np.zeros(50_000_000, np.float32)})
        ckpts.wait()
        begun = time.monotonic()
    assert time.monotonic() - begun < 15  # `close` lifts the limit.


@pytest.mark.long
def test_a_damaged_step_is_not_copied(local: str, remote: str, caplog: pytest.LogCaptureFixture) -> None:
    with tr.Checkpointer(local) as ckpts:
        _save(ckpts, 1, 2, 3)
    file = next(pathlib.Path(local, "step-00000002").glob("arrays-*"))
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(SaveError, match="damaged leaves: w"), tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 4)
    assert tr.steps(remote) == [1, 3, 4] and "damaged leaves: w" in caplog.text


@pytest.mark.long
def test_what_is_wrong_is_named(local: str, remote: str) -> None:
    for options, about in {
        "local": ({"local": remote}, "expected another directory, found that of the run"),
        "a count": ({"local": local, "keep_local": 3}, "keep_local=3: expected a policy .* or a number of bytes"),
        "upload_limit": ({"local": local, "upload_limit": 0}, "upload_limit=0: expected more than 0 bytes per second"),
        "keep alone": ({"keep_local": None}, "keep_local=None: expected local="),
        "limit alone": ({"upload_limit": 5}, "upload_limit=5: expected local="),
    }.values():
        with pytest.raises(MismatchError, match=about):
            tr.Checkpointer(remote, **options)  # type: ignore[arg-type]
    with tr.Checkpointer(remote) as other:
        other.save(1, _state(1))
        other.wait()
        code = textwrap.dedent("""
            import sys, treering as tr
            from treering.errors import ExistsError
            try:
                tr.Checkpointer(sys.argv[1], local=sys.argv[2]).save(2, {"n": 2})
            except ExistsError as error:
                sys.exit("writes this run" not in str(error))
        """)
        if "://" not in remote:
            assert subprocess.run([sys.executable, "-c", code, remote, local], check=False).returncode == 0
    assert not os.path.exists(f"{local}/step-00000002")


@pytest.mark.long
@pytest.mark.whole
def test_logs_say_what_is_where(local: str, remote: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1)
    assert f"saved {local}/step-00000001" in caplog.text and f"{remote}: step 1 uploaded in" in caplog.text


@pytest.mark.slow
def test_several_processes(tmp_path: pathlib.Path) -> None:
    """One process uploads for all. All processes take the remote copy of a step that is damaged locally."""
    body = """
ckpts = tr.Checkpointer(tmp / "remote", local=tmp / "local", keep=tr.keep.last(2), timeout=20)
like = {"w": put(np.zeros(60, np.float32), P("x")), "n": 0}
begun = ckpts.restore(like) if AGAIN else None
first = (ckpts.restored_step or 0) + 1
for step in range(first, first + 3):
    ckpts.save(step, {"w": put(np.arange(60, dtype=np.float32) + step, P("x")), "n": step})
ckpts.close()
report([begun and begun["n"], begun and same(begun["w"], np.arange(60, dtype=np.float32) + begun["n"]), ckpts.steps])
"""
    for result in run_job(tmp_path, body, processes=3, AGAIN=False):
        assert result.report == [None, None, [2, 3]]
    assert tr.steps(tmp_path / "local") == [3] and tr.steps(tmp_path / "remote") == [2, 3]
    for file in (tmp_path / "local" / "step-00000003").glob("arrays-*"):
        file.unlink()
    for result in run_job(tmp_path, body, processes=2, AGAIN=True):
        assert result.report == [3, True, [3, 5, 6]]
    assert tr.verify(tmp_path / "remote").ok and tr.steps(tmp_path / "local") == [3, 6]  # damaged, and restored


@pytest.mark.long
@pytest.mark.whole
def test_places_within_each_other(tmp_path: pathlib.Path) -> None:
    run = str(tmp_path / "run")
    for remote, local in ((run, f"{run}/local"), (f"{run}2/remote", f"{run}2")):
        with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
            _save(ckpts, 1, 2)
            ckpts.rewind(1)
            _save(ckpts, 2)
            ckpts.delete(1)
        assert tr.steps(remote) == tr.steps(local) == [2]
    os.symlink(run, tmp_path / "link")
    with pytest.raises(MismatchError, match="expected another directory, found that of the run"):
        tr.Checkpointer(run, local=tmp_path / "link")


@pytest.mark.long
def test_an_interrupt_while_a_change_waits_for_a_copy(local: str, tmp_path: pathlib.Path) -> None:
    """The upload continues after the interrupt, and `close` returns only once all steps are uploaded."""
    ckpts = tr.Checkpointer(tmp_path / "remote", local=local)
    ckpts.save(1, _state(1))
    ckpts.wait()
    _until(lambda: tr.steps(tmp_path / "remote") == [1])
    with ckpts._directory._uploader._change_lock:  # type: ignore[attr-defined] # a copy that takes long
        thread = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            ckpts.delete(1)
        thread.join()
    ckpts.save(2, _state(2))
    ckpts.close()
    assert tr.steps(tmp_path / "remote") == [1, 2]


def test_only_a_writer_copies(local: str, tmp_path: pathlib.Path) -> None:
    """A Checkpointer that only deletes or reads does not keep the lease, and uploads nothing."""
    with tr.Checkpointer(local) as ckpts:
        _save(ckpts, 1, 2)
    with tr.Checkpointer(tmp_path / "remote", local=local) as ckpts:
        ckpts.delete(1)
        assert ckpts.steps == [2]
    assert not (tmp_path / "remote").exists()


@pytest.mark.long
def test_one_that_was_taken_over_copies_nothing(local: str, remote: str) -> None:
    """A Checkpointer that lost its run to another one of this process names the steps that are not uploaded."""
    old = tr.Checkpointer(remote, local=local, upload_limit=1, keep=tr.keep.last(1))
    _save(old, 1)
    old._directory._uploader._stopped = True  # type: ignore[attr-defined] # It uploads nothing.
    _until(lambda: not old._directory.busy)
    with tr.Checkpointer(remote, local=local + "-of-another", keep_local=None) as new:
        new.save(1, _state(10))
        new.save(2, _state(20))
    with pytest.raises(SaveError, match="of this process, has acquired the run; steps 1 are in"):
        old.close()
    assert tr.steps(remote) == [1, 2]
    _check(tr.restore(remote, step=1), 10)


@pytest.mark.long
@pytest.mark.parametrize("change", ["rewind", "overwrite"])
def test_rewind_in_remote_tier_is_not_undone(local: str, remote: str, change: str) -> None:
    """Steps that another job archived or replaced in the remote tier do not come back from the local tier."""
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        _save(ckpts, 1, 2, 3)
    with tr.Checkpointer(remote) as ckpts:
        if change == "rewind":
            ckpts.rewind(1)
        else:
            ckpts.save(3, _state(30), on_exists="overwrite")
    ckpts = tr.Checkpointer(remote, local=local)
    _check(ckpts.restore(), 1 if change == "rewind" else 30)
    assert ckpts.steps == ([1] if change == "rewind" else [1, 2, 3])


@pytest.mark.long
def test_a_local_place_of_another_run(local: str, remote: str) -> None:
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1, 2)
    for call in (lambda ckpts: ckpts.restore_or_init(lambda: _state(0)), lambda ckpts: ckpts.save(1, _state(1))):
        with (
            pytest.raises(MismatchError, match=f"expected a directory for {remote}-2, found that of {remote}"),
            tr.Checkpointer(f"{remote}-2", local=local) as ckpts,
        ):
            call(ckpts)
    with tr.Checkpointer(remote, local=local) as ckpts:
        _check(ckpts.restore(), 2)


@pytest.mark.long
def test_an_attempt_elsewhere_ends_no_branch(local: str, tmp_path: pathlib.Path) -> None:
    """Another host begins and uploads nothing. When the first host is back, its local steps still belong to the run."""
    remote = str(tmp_path / "remote")
    with subprocess.Popen(
        [sys.executable, "-c", _SLOWLY, remote, local], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout and [job.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "3\n"]
        job.kill()
    other = tr.Checkpointer(remote, local=local + "-of-another")
    with pytest.raises(TreeringError), other:
        other.save(1, {"what": object()})
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        assert ckpts.restore()["n"] == 3
    assert tr.steps(remote) == [1, 2, 3]  # This job uploaded them though it saved nothing.


@pytest.mark.parametrize("more", [False, True])
def test_what_vanishes_before_it_is_copied_is_named(local: str, tmp_path: pathlib.Path, more: bool) -> None:
    ckpts = tr.Checkpointer(tmp_path / "remote", local=local, upload_limit=1)
    _save(ckpts, 1)
    assert ckpts.uncopied == [1]
    with ckpts._directory._uploader.paused():  # type: ignore[attr-defined]
        shutil.rmtree(f"{local}/step-00000001")
        if more:
            _save(ckpts, 2)
    with pytest.raises(SaveError, match=r"steps 1 are damaged in .*, or deleted"):
        ckpts.close()


@pytest.mark.long
def test_an_overwritten_step_is_judged_by_its_own_metrics(local: str, remote: str) -> None:
    keep = tr.keep.last(1) | tr.keep.best(1, "loss", "min")
    with tr.Checkpointer(remote, local=local, keep=keep) as ckpts:
        ckpts.save(1, _state(1), metrics={"loss": 4})
        ckpts.save(2, _state(2), metrics={"loss": 5})
        _until(lambda: 2 in tr.steps(remote))
        with ckpts._directory._uploader._change_lock:  # type: ignore[attr-defined] # a copy that takes long
            ckpts.save(2, _state(20), metrics={"loss": 0.1}, on_exists="overwrite")
            ckpts.save(3, _state(3), metrics={"loss": 3})
            ckpts.wait()
            assert ckpts.best_step("loss", "min") == 2
    assert tr.steps(remote) == [2, 3]
    _check(tr.restore(remote, step=2), 20)


@pytest.mark.long
def test_a_local_run_that_was_written_alone_meanwhile_goes_on(local: str, remote: str) -> None:
    """The run continues if the store was down, or if the local directory was cleared while a job ran."""
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1)
    with tr.Checkpointer(local) as ckpts:
        _save(ckpts, 2)
    with tr.Checkpointer(remote, local=local) as ckpts:
        assert ckpts.latest_step == 2
        _save(ckpts, 3)
        _until(lambda: ckpts.uncopied == [] and tr.steps(remote) == [1, 2, 3])
        shutil.rmtree(local)
        _save(ckpts, 4)
        assert "journal.json" in os.listdir(local)
    assert tr.steps(remote) == [1, 2, 3, 4]


def _later(data: bytes) -> bytes:
    kind = JournalContents if b'"disk"' in data else Generations
    return manifest.seal(msgspec.structs.replace(msgspec.json.decode(data, type=kind), version=2))


class _UnreadableDisk(Disk):
    """A disk on which a file cannot be opened."""

    def __init__(self, name: str, code: int):
        self._name, self._code = name, code

    def open(self, path: str) -> int:
        if path.endswith(self._name):
            raise OSError(self._code, os.strerror(self._code), path)
        return super().open(path)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("name", ["local/journal.json", "remote/generations.json"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda data: data[:-9], CorruptError, "found one that is cut short or changed; restore it from a backup, or"),
        (lambda data: data.replace(b"1", b"3", 1), CorruptError, "found one that is cut short or changed"),
        (lambda data: b"", CorruptError, "found one that is cut short or changed"),
        (_later, UnsupportedError, "found that of a later release of treering; upgrade treering, or"),
        (None, CorruptError, "expected a file, found a folder"),
        (errno.EIO, CorruptError, "cannot be read: .+; check the disk, or restore it from a backup, or"),
        (errno.EACCES, (PermissionError, SaveError), ""),
    ],
)
def test_bad_journal_or_generations(
    tmp_path: pathlib.Path, use_disk: Any, name: str, change: Any, error: Any, message: str
) -> None:
    """One error names the file before anything is written. Nothing is lost once the file is restored."""
    remote, local, file = tmp_path / "remote", tmp_path / "local", tmp_path / name
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1)
    with tr.Checkpointer(local) as ckpts:
        _save(ckpts, 2)
    good = file.read_bytes()
    if isinstance(change, int):
        use_disk(_UnreadableDisk(name, change))
    else:
        file.unlink()
        file.write_bytes(change(good)) if change else file.mkdir()

    def contents() -> dict[pathlib.Path, bytes | None]:
        files = (one for one in tmp_path.rglob("*") if one.name != "writer.lock")
        return {one: one.read_bytes() if one.is_file() else None for one in files}

    before = contents()
    calls: list[Callable[[tr.Checkpointer], Any]] = [
        *(lambda ckpts: ckpts.restore(), lambda ckpts: ckpts.steps, lambda ckpts: ckpts.save(3, _state(3))),
        *(lambda ckpts: ckpts.delete(1), lambda ckpts: ckpts.rewind(None)),
    ]
    for call in calls:
        ckpts = tr.Checkpointer(remote, local=local)
        with pytest.raises(error, match=re.escape(str(file)) + f".*{message}"):
            call(ckpts)
        with contextlib.suppress(TreeringError):
            ckpts.close()
    assert contents() == before
    use_disk(Disk())
    file.unlink() if file.is_file() else file.rmdir()
    file.write_bytes(good)
    with tr.Checkpointer(remote, local=local) as ckpts:
        assert ckpts.steps == [1, 2]


def test_a_borrowed_step_is_not_listed(tmp_path: pathlib.Path) -> None:
    """A job was killed after it had fetched a step from another disk, and before it claimed the run."""
    remote, local = str(tmp_path / "remote"), str(tmp_path / "local")
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1)
    with tr.Checkpointer(local) as ckpts:
        _save(ckpts, 2)
    assert tr.Checkpointer(remote, local=local).steps == [1, 2]
    store = stores.get(local)
    Journal(store, local, remote).borrow(host_files.identity(store, f"{local}/step-00000002"))
    assert tr.Checkpointer(remote, local=local).latest_step == 1


def test_local_directory_of_another_run_is_refused(local: str, tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path / "remote", local=local) as ckpts:
        _save(ckpts, 1)
    ckpts = tr.Checkpointer(tmp_path / "other", local=local)
    message = f"{local}: expected a directory for .*other, found that of .*remote; give each run its own local="
    for call in (ckpts.restore, lambda: ckpts.save(3, _state(3)), ckpts.close):
        with pytest.raises(MismatchError, match=message):
            call()
    assert tr.steps(local) == [1] and tr.steps(tmp_path / "other") == []


@pytest.mark.long
@pytest.mark.whole
def test_rewind_past_remote_steps_of_others_is_refused(local: str, tmp_path: pathlib.Path) -> None:
    """A rewind is refused if the remote tier has later steps of another library."""
    remote = str(tmp_path / "remote")
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        _save(ckpts, 1, 2)
    tr.save(f"{remote}/checkpoint_5", _state(5), format="flax")
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        for change in (lambda: ckpts.rewind(1), lambda: ckpts.save(3, _state(3))):
            ckpts.restore(step=1)
            with pytest.raises(UnsupportedError, match="written by another library"):
                change()
    assert tr.steps(local) == [1, 2] and tr.steps(remote) == [1, 2, 5]


@pytest.mark.long
def test_a_pin_that_was_removed_stays_so(local: str, remote: str) -> None:
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        _save(ckpts, 1, 2)
        ckpts.pin(1)
        _until(lambda: ckpts.uncopied == [])
    with tr.Checkpointer(remote) as ckpts:
        assert ckpts.pinned == [1]
        ckpts.unpin(1)
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        _save(ckpts, 3)
    assert tr.Checkpointer(remote).pinned == []


def test_damaged_remote_step_is_replaced_by_good_local_one(local: str, tmp_path: pathlib.Path) -> None:
    remote = tmp_path / "remote"
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1)
    next((remote / "step-00000001").glob("arrays-*")).unlink()
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 2)
    _check(tr.restore(remote, step=1), 1)


@pytest.mark.long
def test_local_step_stays_while_damaged_remote_is_replaced(local: str, tmp_path: pathlib.Path) -> None:
    """The damaged remote copy is deleted before the new one is complete. Until then the local step is the only copy."""
    remote = tmp_path / "remote"
    ckpts = tr.Checkpointer(remote, local=local, keep=None)
    ckpts.save(1, _state(1, 100_000))
    ckpts.wait()
    _until(lambda: ckpts.uncopied == [] and not ckpts._directory.busy)
    next((remote / "step-00000001").glob("arrays-*")).unlink()
    pace = ckpts._directory._uploader._pace  # type: ignore[attr-defined]
    pace._rate = 100_000  # bytes a second: the first step takes four
    try:
        _save(ckpts, 2)
        _until(lambda: "uploading step 1" in repr(ckpts))
        _until(lambda: 1 not in tr.steps(remote))
        uncopied = ckpts.uncopied
        _save(ckpts, 3, 4)
        time.sleep(0.5)  # time for retention to delete steps
        assert 1 in tr.steps(local) and 1 in uncopied
    finally:
        pace.lift()
    ckpts.close()
    assert tr.steps(remote) == [1, 2, 3, 4] and tr.verify(remote).ok


class _SmallDisk(Disk):
    """A disk with room for the arrays of two steps in `local`. It is full at `operation`, and deletes slowly."""

    def __init__(self, local: str, operation: str, name: str = "arrays-"):
        self._local, self._operation, self._name, self.is_remote_broken = local, operation, name, False

    def _check(self, operation: str, path: str) -> None:
        if operation == self._operation and path.startswith(self._local) and self._name in path:
            own = os.path.dirname(path)
            if len({str(file.parent) for file in pathlib.Path(self._local).glob("step-*/arrays-*")} - {own}) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.is_remote_broken and "/remote/" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def create(self, path: str) -> int:
        self._check("create", path)
        return super().create(path)

    def preallocate(self, fd: int, size: int) -> None:
        self._check("preallocate", os.readlink(f"/proc/self/fd/{fd}"))
        super().preallocate(fd, size)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self._check("write", os.readlink(f"/proc/self/fd/{fd}"))
        super().write(fd, data, offset)

    def unlink(self, path: str) -> None:
        if "arrays-" in path:
            time.sleep(0.1)
        super().unlink(path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("create", "treering.json"),
        ("create", "arrays-"),
        ("preallocate", "arrays-"),
        ("write", "arrays-"),
        ("write", "treering.json"),
    ],
)
def test_a_save_waits_for_room_that_an_upload_frees(
    local: str, tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture, operation: str, name: str
) -> None:
    """The loop continues meanwhile. Closing ends the limit of the upload, so that it does not wait for long."""
    caplog.set_level(logging.INFO, "treering")
    use_disk(_SmallDisk(local, operation, name))
    with tr.Checkpointer(tmp_path / "remote", local=local, when_busy="skip", upload_limit=1) as ckpts:
        for step in (1, 2):
            _saved(ckpts, step).result()
        pending = _saved(ckpts, 3)
        _until(lambda: "the save waits until step 1 is uploaded" in caplog.text)
        assert not pending.done() and ckpts.save(4, _state(4)) is None
    assert tr.steps(tmp_path / "remote") == [1, 2, 3] and tr.verify(tmp_path / "remote").ok
    assert "expected room for" in caplog.text and caplog.text.count("the save waits") == 1
    assert tr.steps(local) == [3]


@pytest.mark.long
def test_a_save_ends_its_wait_for_room_when_the_upload_fails(
    local: str, tmp_path: pathlib.Path, use_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "treering")
    disk = use_disk(_SmallDisk(local, "preallocate"))
    with tr.Checkpointer(tmp_path / "remote", local=local, on_error="log", upload_limit=1) as ckpts:
        for step in (1, 2):
            _saved(ckpts, step).result()
        pending = _saved(ckpts, 3)
        _until(lambda: "the save waits" in caplog.text)
        disk.is_remote_broken = True
        ckpts._directory.lift_limit()  # type: ignore[union-attr]
        with pytest.raises(SaveError, match=r"step-00000003/arrays-.*expected room for \d+ bytes, found \d+") as caught:
            pending.result()
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
        for part in ("No space left on device", "uploading steps failed: ", "Input/output error", "delete files there"):
            assert part in str(caught.value)
        disk.is_remote_broken = False
        assert "it is retried within ten minutes, and with the next save: " in caplog.text
        _saved(ckpts, 4).result()  # This save begins the upload again, and waits for it.
    assert tr.steps(tmp_path / "remote") == [1, 2, 4] and tr.verify(tmp_path / "remote").ok


@pytest.mark.long
def test_a_save_does_not_wait_if_no_upload_frees_room(local: str, tmp_path: pathlib.Path, use_disk: Any) -> None:
    use_disk(_SmallDisk(local, "write"))
    with tr.Checkpointer(tmp_path / "remote", local=local, keep_local=None, on_error="log") as ckpts:
        for step in (1, 2):
            _saved(ckpts, step).result()
        with pytest.raises(SaveError, match=r"expected room for .*no upload under way frees room"):
            _saved(ckpts, 3).result()
    assert tr.steps(tmp_path / "remote") == [1, 2]


@pytest.mark.long
@pytest.mark.whole
def test_a_save_waits_for_room_that_a_deletion_frees(local: str, use_disk: Any) -> None:
    """Without a local tier, old steps are deleted in the background while the next save is written."""
    use_disk(_SmallDisk(local, "create"))
    with tr.Checkpointer(local, keep=tr.keep.last(1)) as ckpts:
        for step in range(1, 5):
            _saved(ckpts, step).result()
    assert tr.steps(local) == [4]


@pytest.mark.long
def test_step_that_retention_deleted_is_not_uploaded_again(local: str, remote: str) -> None:
    """Retention deleted the remote step because of a metric that only the remote step has."""
    ckpts = tr.Checkpointer(remote, local=local, keep=tr.keep.best(1, "loss", "min"), keep_local=tr.keep.last(3))
    places: Any = ckpts._directory
    for step, loss in ((5, 1.0), (6, 2.0)):
        ckpts.save(step, _state(step), metrics={"loss": loss})
        ckpts.wait()
        _until(lambda: not places.busy)
    tr.record(remote, 5, {"loss": 3.0})
    ckpts.save(7, _state(7), metrics={"loss": 4.0})
    ckpts.close()
    assert (
        tr.steps(remote) == [6, 7] and tr.steps(local) == [5, 6, 7] and tr.open(local, step=5).metrics == {"loss": 3.0}
    )
    with tr.Checkpointer(remote, local=local, keep=tr.keep.best(1, "loss", "min"), keep_local=tr.keep.last(3)) as ckpts:
        ckpts.restore()  # restores step 7, which therefore stays
        ckpts.save(8, _state(8), metrics={"loss": 5.0})
    assert tr.steps(remote) == [6, 7, 8]


@pytest.mark.long
@pytest.mark.parametrize("tiered", [True, False], ids=["local", "alone"])
def test_metrics_after_the_end_prune_where_the_run_stays(local: str, remote: str, tiered: bool) -> None:
    keep = tr.keep.last(1) | tr.keep.best(1, "val", "min")
    options: dict[str, Any] = {"local": local, "keep_local": None} if tiered else {}
    with tr.Checkpointer(remote, keep=keep, **options) as ckpts:
        _save(ckpts, *range(1, 5))
        ckpts.finish()
    assert tr.steps(remote) == [1, 2, 3, 4]
    for step in (1, 2, 3):
        tr.record(remote, step, {"val": abs(step - 2.0)})
    assert tr.steps(remote) == [2, 4] and not [
        path for path in stores.get(remote).list(remote) if path == "step-00000001"
    ]
    with tr.Checkpointer(remote, keep=keep, **options) as ckpts:
        ckpts.restore()
        _save(ckpts, 5)
    assert tr.steps(remote) == [2, 4, 5], "step 4 was restored"


@pytest.mark.long
def test_metrics_during_upload_prune_before_next_save(local: str, remote: str) -> None:
    """Late metrics that arrive during an upload delete remote steps before the next save."""
    ckpts = tr.Checkpointer(remote, local=local, keep=tr.keep.last(1) | tr.keep.best(1, "val", "min"))
    _save(ckpts, *range(1, 5))
    _until(lambda: ckpts.uncopied == [])
    for step in (1, 2, 3):
        tr.record(remote, step, {"val": abs(step - 2.0)})
    _until(lambda: tr.steps(remote) == [2, 4])
    ckpts.close()


def test_remote_retention_waits_for_a_good_step(local: str, tmp_path: pathlib.Path) -> None:
    """Retention deletes no remote step until this job has saved, uploaded or restored a step."""
    remote = tmp_path / "remote"
    with tr.Checkpointer(remote) as ckpts:
        _save(ckpts, 1, 2)
    file = next((remote / "step-00000002").glob("arrays-*"))
    file.chmod(0o644)
    file.write_bytes(bytes(file.stat().st_size))
    with tr.Checkpointer(remote, local=local, keep=tr.keep.last(1)) as ckpts:
        places: Any = ckpts._directory
        places.acquire_run()
        _until(lambda: not places.busy)
        assert tr.steps(remote) == [1, 2], "no process has read step 2"
        _save(ckpts, 3)
    assert tr.steps(remote) == [3]


def test_a_step_that_a_link_leads_to_is_deleted_nowhere(local: str, tmp_path: pathlib.Path) -> None:
    remote = tmp_path / "remote"
    with tr.Checkpointer(remote, local=local, keep_local=None) as ckpts:
        _save(ckpts, 1, 2)
        _until(lambda: ckpts.uncopied == [])
        os.symlink("step-00000001", remote / "best")
        with pytest.raises(MismatchError, match="the link best leads to this step"):
            ckpts.delete(1)
    assert tr.steps(local) == tr.steps(remote) == [1, 2]


@pytest.mark.long
def test_steps_without_metrics_are_not_copied_again_and_again(local: str, remote: str) -> None:
    """A step without the policy's metric is not uploaded again after its remote deletion."""
    keep = tr.keep.last(1) | tr.keep.best(1, "val", "min")
    ckpts = tr.Checkpointer(remote, local=local, keep=keep)
    places: Any = ckpts._directory
    for step in range(1, 7):
        _save(ckpts, step)
        _until(lambda: not places.busy)
        tr.record(remote, step, {"val": abs(step - 2.0)})
    ckpts.close()
    assert tr.steps(remote) == [2, 6]


@pytest.mark.long
def test_remote_deletion_spares_files_of_new_upload(local: str, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deleted step and its new upload have files of the same names."""
    with tr.Checkpointer(remote, local=local) as ckpts:
        _save(ckpts, 1)
    remove = removal.unpublish(stores.get(remote), f"{remote}/step-00000001")
    with tr.Checkpointer(remote, local=local) as ckpts:
        ckpts.restore()
    assert tr.steps(remote) == [1]
    remove()
    assert tr.verify(remote).ok


def test_a_step_that_is_pinned_while_it_is_about_to_go_stays(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tr.Checkpointer(local, keep=tr.keep.last(1)) as ckpts:
        _save(ckpts, 1)
        check = removal.check_removable

        def pin(store: Any, path: str) -> None:
            check(store, path)
            if path.endswith("1"):
                tr.Checkpointer(local).pin(1)

        monkeypatch.setattr(removal, "check_removable", pin)
        _save(ckpts, 2, 3)
        assert ckpts.pinned == [1]
    assert tr.steps(local) == [1, 3]


@pytest.mark.long
def test_pinned_or_remotely_lost_step_is_uploaded_again(local: str, tmp_path: pathlib.Path) -> None:
    """Only the steps that the policy has deleted remotely are not uploaded again."""
    remote = tmp_path / "remote"
    ckpts = tr.Checkpointer(remote, local=local, keep=tr.keep.last(2), keep_local=None)
    places: Any = ckpts._directory
    _save(ckpts, 1, 2, 3, 4)
    _until(lambda: not places.busy and tr.steps(remote) == [3, 4])
    ckpts.pin(1)
    shutil.rmtree(remote / "step-00000003")
    _save(ckpts, 5)
    _until(lambda: not places.busy)
    assert tr.steps(remote) == [1, 4, 5]
    shutil.rmtree(remote / "step-00000004")
    ckpts.close()
    assert tr.steps(remote) == [1, 4, 5]


def test_lost_generations_begin_above_all_claims() -> None:
    """Otherwise a job after the loss would look older than the jobs whose claims the disks still have."""
    claims = [Claim(generation, 0, (), (), "a") for generation in (3, 7, 5)]
    assert begin_series(claims).next == 8 and begin_series([]).next == 1
