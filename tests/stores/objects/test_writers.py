"""Several writers of one bucket, some of which are killed or stopped in the middle."""

import functools
import itertools
import json
import logging
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import obstore
import obstore.store
import pytest

import s3
import treering as tr
from fault_proxy import Proxy, Request, proxy
from sampling import sample_points
from treering import stores
from treering._tools import copy as copying
from treering._tools.copy import copy_checkpoints
from treering.errors import ExistsError, SaveError, TreeringError
from treering.stores import lease_registry
from treering.stores.file_io import read_file, remove_unused
from treering.stores.objects import heartbeat, lease, sink, temporary_folder
from treering.stores.objects.store import ObjectStore

_SCRIPT = """
import sys
import numpy as np
import s3
import treering as tr
from treering import stores
from treering._tools import copy as copying
from treering._tools.copy import copy_checkpoints
from treering.errors import ExistsError, SaveError
from treering.stores.objects.store import ObjectStore

buckets = ObjectStore()
buckets.add("writers://tests", s3.client(sys.argv[1]))
stores.register(buckets, "writers")
"""


@pytest.fixture
def between(s3_server: str) -> Iterator[Proxy]:
    with proxy(s3_server) as one:
        buckets = ObjectStore()
        buckets.add("writers://tests", s3.client(one.url))
        with stores.using(buckets, "writers"):
            yield one


@pytest.fixture
def expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the leases of other processes look expired to this one, as they are 90 s after a kill."""
    monkeypatch.setattr(heartbeat, "LEASE_SECONDS", -1.0)


@pytest.fixture
def place() -> str:
    return f"writers://tests/{secrets.token_hex(4)}"


def _start(url: str, code: str, *arguments: str) -> "subprocess.Popen[str]":
    """Starts a process that uses the bucket behind a URL; `arguments` become `sys.argv[2:]`."""
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT + code, url, *arguments],
        env={**os.environ, "PYTHONPATH": os.path.dirname(s3.__file__), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ended(process: "subprocess.Popen[str]") -> int:
    process.communicate(timeout=60)
    return process.returncode


def _names(path: str) -> list[str]:
    return stores.get(path).list(path)


def _is_free(run: str) -> bool:
    """Returns True if the lease of a run was released."""
    return b"token" not in read_file(stores.get(run), f"{run}/writer.lock")


def _generation(run: str) -> int:
    """Returns the generation of the lease of a run."""
    return json.loads(read_file(stores.get(run), f"{run}/writer.lock"))["generation"]


_SAVING = """
path, overwrite = sys.argv[2], sys.argv[3] == "overwrite"
tr.save(path, {"w": np.arange(300_000)}, overwrite=overwrite)
"""


def _kill_at(number: int, processes: "list[subprocess.Popen[str]]", request: Request) -> str | None:
    if request.number < number:
        return None
    processes[0].kill()
    return "drop"


@pytest.mark.slow
@pytest.mark.usefixtures("expired")
@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_killed_at_any_request_of_a_save(between: Proxy, s3_server: str, place: str, mode: str) -> None:
    """After a kill, the old or the new checkpoint is in place, and the next save removes the leftovers."""
    old, new = np.zeros(10), np.arange(300_000)
    with proxy(s3_server) as counted:
        if mode == "overwrite":
            tr.save(f"{place}/counted", {"w": old})
        assert _ended(_start(counted.url, _SAVING, f"{place}/counted", mode)) == 0
        count = len(counted.requests)
    for number in sample_points(range(count + 1), first=mode == "overwrite"):
        path = f"{place}/{number}"
        if mode == "overwrite":
            tr.save(path, {"w": old})
        with proxy(s3_server) as deadly:
            processes: list[subprocess.Popen[str]] = []
            deadly.fault = functools.partial(_kill_at, number, processes)
            processes.append(_start(deadly.url, _SAVING, path, mode))
            assert (_ended(processes[0]) == -signal.SIGKILL) == (number < count)
        if mode == "overwrite" or "treering.json" in _names(path):
            found = tr.restore(path)["w"]
            assert np.array_equal(found, new) or (mode == "overwrite" and np.array_equal(found, old))
        tr.save(path, {"w": old + 1}, overwrite=True)
        assert np.array_equal(tr.restore(path)["w"], old + 1) and len(_names(path)) == 2, _names(path)


_COPYING = """
with tr.Checkpointer(sys.argv[2], local=sys.argv[3], keep=tr.keep.last(2)) as ckpts:
    for step in (1, 2, 3):
        ckpts.save(step, {"w": np.full(70_000, step)})
        ckpts.wait()
"""


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.usefixtures("expired")
def test_killed_at_requests_of_a_copy(between: Proxy, s3_server: str, place: str, tmp_path: pathlib.Path) -> None:
    """After a kill, remote steps are complete and the newest step is local. The next job uploads what is missing."""
    with proxy(s3_server) as counted:
        assert _ended(_start(counted.url, _COPYING, f"{place}/counted", str(tmp_path / "counted"))) == 0
        count = len(counted.requests)
    for number in sample_points(range(0, count + 1, 7)):
        remote, local = f"{place}/{number}", str(tmp_path / str(number))
        with proxy(s3_server) as deadly:
            processes: list[subprocess.Popen[str]] = []
            deadly.fault = functools.partial(_kill_at, number, processes)
            processes.append(_start(deadly.url, _COPYING, remote, local))
            _ended(processes[0])
        for step in tr.steps(remote):
            assert np.array_equal(tr.restore(remote, step=step)["w"], np.full(70_000, step))
        with tr.Checkpointer(remote, local=local, keep=tr.keep.last(2)) as ckpts:
            last = ckpts.latest_step
            assert last == max(tr.steps(local), default=None)
            ckpts.save(9, {"w": np.full(70_000, 9)})
        assert tr.steps(remote) == [*([last] if last else []), 9]
        assert set(_names(remote)) == {
            "generations.json",
            "writer.lock",
            *(f"step-{step:08}" for step in tr.steps(remote)),
        }
        for step in tr.steps(remote):
            assert tr.verify(tr.Checkpointer(remote).path(step)).ok and len(_names(f"{remote}/step-{step:08}")) == 2


_KEEPING = """
with tr.Checkpointer(sys.argv[2], keep=tr.keep.last(1)) as ckpts:
    for step in (1, 2):
        ckpts.save(step, {"w": np.full(70_000, step)})
        ckpts.wait()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("expired")
def test_killed_at_any_request_of_retention(between: Proxy, s3_server: str, place: str) -> None:
    """A kill after the commit of the second step leaves the first step complete or deleted."""
    with proxy(s3_server) as counted:
        assert _ended(_start(counted.url, _KEEPING, f"{place}/counted")) == 0
        requests = counted.requests
    commits = [one.number for one in requests if one.method == "PUT" and one.path.endswith("treering.json")]
    assert len(commits) == 2 and sum("delete" in one.path for one in requests[commits[1] :]) >= 2
    for number in sample_points(range(commits[1], len(requests) + 1)):
        run = f"{place}/{number}"
        with proxy(s3_server) as deadly:
            processes: list[subprocess.Popen[str]] = []
            deadly.fault = functools.partial(_kill_at, number, processes)
            processes.append(_start(deadly.url, _KEEPING, run))
            _ended(processes[0])
        steps = tr.steps(run)
        assert steps and set(steps) <= {1, 2} and (number == commits[1] or 2 in steps)
        for step in steps:
            assert np.array_equal(tr.restore(run, step=step)["w"], np.full(70_000, step))
        with tr.Checkpointer(run, keep=tr.keep.last(1)) as ckpts:
            assert np.array_equal(ckpts.restore()["w"], np.full(70_000, steps[-1]))
            ckpts.save(9, {"w": np.full(70_000, 9)})
        assert {9} <= set(tr.steps(run)) <= {steps[-1], 9}  # retention does not delete the restored step
        assert all(len(_names(f"{run}/step-{step:08}")) == 2 for step in tr.steps(run))
        assert set(_names(run)) == {"writer.lock", *(f"step-{step:08}" for step in tr.steps(run))} and _is_free(run)


_RUN = """
with tr.Checkpointer(sys.argv[2], keep=tr.keep.last(2)) as ckpts:
    for step in range(1, 100):
        ckpts.save(step, {"w": np.full(1000, step)})
        print(step, flush=True)
        if step == 5 and len(sys.argv) > 3:
            sys.stdin.read()
"""


@pytest.mark.long
def test_a_run_goes_on_once_a_killed_jobs_lease_has_expired(
    between: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that renews its lease keeps the run. After a kill a new job acquires it, with a larger generation."""
    quick = "from treering.stores.objects import heartbeat\nheartbeat._RENEWAL_SECONDS = 0.5\n"
    job = _start(between.url, quick + _RUN, place, "stay")
    monkeypatch.setattr(heartbeat, "LEASE_SECONDS", 5.0)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.2)
    assert job.stdout is not None
    while job.stdout.readline().strip() != "5":
        pass
    with pytest.raises(ExistsError, match=f"process {job.pid} on"), tr.Checkpointer(place) as ckpts:
        ckpts.save(6, {"w": np.full(1000, 6)})
    first = _generation(place)
    job.kill()
    _ended(job)
    with tr.Checkpointer(place, keep=tr.keep.last(2)) as ckpts:
        step = ckpts.latest_step
        assert step is not None and step >= 4
        assert np.array_equal(ckpts.restore()["w"], np.full(1000, step))
        ckpts.save(step + 1, {"w": np.full(1000, step + 1)})
        ckpts.wait()
        second = _generation(place)
    assert f"process {job.pid} on " in caplog.text and " wrote this run; waiting for up to " in caplog.text
    third = _generation(place)
    assert (first, second, third) == (1, 2, 2)
    assert tr.steps(place)[-1] == step + 1
    assert _is_free(place)
    for name in set(_names(place)) - {"writer.lock"}:
        assert name.startswith("step-") and len(_names(f"{place}/{name}")) == 2


def test_clones_of_a_machine_do_not_take_each_other_for_dead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two clones share the processes and the heartbeats. The one that renews first keeps the lease, the other stops."""
    buckets = ObjectStore()
    buckets.add("clones://tests", obstore.store.MemoryStore())
    bucket, _ = buckets._find("clones://tests/run")
    mine = heartbeat.Heartbeat(bucket, "run/writer.lock", "clones://tests/run")
    clone = object.__new__(heartbeat.Heartbeat)
    clone.__dict__.update(
        vars(mine), _record=msgspec.structs.replace(mine._record), _unconfirmed=set(mine._unconfirmed)
    )
    mine.renew()
    monkeypatch.setattr(heartbeat._heartbeats, "all", lambda: [clone])  # as the process of the clone sees it
    clone.stopped = True  # this process has ended in the clone
    record, found = heartbeat.read(bucket, "run/writer.lock")
    assert record is not None and record.token == clone._record.token and heartbeat.is_alive(bucket, record, found)
    clone.stopped = False
    clone.renew()
    assert clone.lost and mine.verify() and not mine.lost
    assert "run/writer.lock: another writer has acquired or removed it" in caplog.text
    with pytest.raises(SaveError, match="another job has acquired this place"):
        clone.check()
    mine.stop(delete=True)


@pytest.mark.long
def test_a_program_that_ends_gives_its_lease_back(between: Proxy, place: str) -> None:
    """A program that ends without `close` releases its lease."""
    code = "ckpts = tr.Checkpointer(sys.argv[2])\nckpts.save(1, {'w': 1})\n"  # is never closed
    assert _ended(_start(between.url, code, place)) == 0
    assert tr.steps(place) == [1] and _is_free(place)


@pytest.mark.long
def test_repeated_release_takes_no_lease_of_another_job(between: Proxy, place: str) -> None:
    """A repeated release does not take the lease from another job.

    The answer to the first release was lost. When it is repeated, another job holds the run.
    """
    code = """
ckpts = tr.Checkpointer(sys.argv[2])
ckpts.save(1, {"w": 1})
ckpts.wait()
print("saved", flush=True)
sys.stdin.readline()
ckpts.close()
"""
    repeated, taken = threading.Event(), threading.Event()
    which = itertools.count()

    def fault(request: Request) -> str | None:
        if request.method == "GET" or repeated.is_set():  # closing makes no other requests
            return None
        if next(which) == 0:
            return "lose"
        repeated.set()
        taken.wait(30)
        return None

    job = _start(between.url, code, place)
    assert job.stdin is not None and job.stdout is not None and job.stdout.readline() == "saved\n"
    between.fault = fault
    print(file=job.stdin, flush=True)
    assert repeated.wait(30)
    with tr.Checkpointer(place) as ckpts:
        ckpts.save(2, {"w": 2})
        ckpts.wait()
        taken.set()
        assert _ended(job) == 0
        (held,) = [one for one in heartbeat._heartbeats.all() if one.key.endswith("writer.lock") and not one.stopped]
        assert held.verify()
    assert tr.steps(place) == [1, 2]


@pytest.mark.long
def test_a_forked_child_leaves_the_lease_alone(between: Proxy, place: str) -> None:
    code = """
import os, warnings
ckpts = tr.Checkpointer(sys.argv[2])
ckpts.save(1, {"w": 1})
ckpts.wait()
warnings.simplefilter("ignore")
if os.fork() == 0:
    sys.exit()
print(os.waitstatus_to_exitcode(os.wait()[1]))
ckpts.save(2, {"w": 2})
ckpts.close()
"""
    child = _start(between.url, code, place)
    assert child.communicate(timeout=60)[0] == "0\n" and child.returncode == 0
    assert tr.steps(place) == [1, 2] and _is_free(place)


@pytest.mark.long
def test_a_writer_that_was_stopped_too_long_cannot_commit(
    between: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer that was stopped for longer than its lease lasts cannot commit among the steps of its successor."""
    stopped = _start(
        between.url,
        """
import os, signal, time
from treering.stores import lease_registry
from treering.stores.objects import heartbeat
heartbeat._RENEWAL_SECONDS, heartbeat.LEASE_SAFE_SECONDS = 0.3, 1.0
put = lease_registry.check
def stop_before(path):
    lease_registry.check = put
    print("committing", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # else this thread continues for a moment
    put(path)
ckpts = tr.Checkpointer(sys.argv[2])
ckpts.save(1, {"w": np.zeros(10)})
ckpts.wait()
lease_registry.check = stop_before
try:
    ckpts.save(2, {"w": np.zeros(10)})
    ckpts.wait()
except SaveError as error:
    print("refused", error, flush=True)
""",
        place,
    )
    assert stopped.stdout is not None and stopped.stdout.readline() == "committing\n"
    monkeypatch.setattr(heartbeat, "LEASE_SECONDS", 2.0)
    time.sleep(0.5)
    with caplog.at_level(logging.WARNING), tr.Checkpointer(place) as ckpts:
        ckpts.save(3, {"w": np.ones(10)})
        assert "which did not renew its lease" in caplog.text
        stopped.send_signal(signal.SIGCONT)
        assert "another job has acquired this place" in stopped.communicate(timeout=60)[0]
        assert tr.steps(place) == [1, 3]
        assert not any(r.method == "PUT" and r.path.endswith("2/treering.json") for r in between.requests)
        ckpts.save(4, {"w": np.ones(10)})
    assert tr.steps(place) == [1, 3, 4]


@pytest.mark.long
@pytest.mark.parametrize("doing", ["delete", "rewind"])
def test_a_writer_that_was_stopped_too_long_removes_nothing(
    between: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    """The step that a stopped writer was about to delete or archive belongs to another job by now, and stays."""
    stopped = _start(
        between.url,
        """
import os, signal, time
from treering.formats.treering import removal
from treering.stores.objects import heartbeat
from treering.stores.objects.bucket import Bucket
heartbeat._RENEWAL_SECONDS, heartbeat.LEASE_SAFE_SECONDS = 0.3, 1.0
def stop_after(owner, name):
    call = getattr(owner, name)
    def stop(*args):
        setattr(owner, name, call)
        result = call(*args)
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)  # else this thread continues for a moment
        return result
    setattr(owner, name, stop)
ckpts = tr.Checkpointer(sys.argv[2], keep=tr.keep.last(2))
for step in (1, 2):
    ckpts.save(step, {"w": np.zeros(10)})
ckpts.wait()
if sys.argv[3] == "delete":
    stop_after(removal, "member_files")
    ckpts.save(3, {"w": np.zeros(10)})
    ckpts.wait()
else:
    stop_after(Bucket, "copy")
    try:
        ckpts.rewind(1)
    except SaveError as error:
        print("refused", error, flush=True)
""",
        place,
        doing,
    )
    assert stopped.stdout is not None and stopped.stdout.readline() == "stopped\n"
    monkeypatch.setattr(heartbeat, "LEASE_SECONDS", 2.0)
    time.sleep(0.5)
    with tr.Checkpointer(place) as ckpts:
        ckpts.rewind(ckpts.steps[-1])  # acquires the run and changes nothing
        for step in ckpts.steps:
            ckpts.delete(step)
            ckpts.save(step, {"w": np.ones(10)})
        ckpts.wait()
        stopped.send_signal(signal.SIGCONT)
        said = stopped.communicate(timeout=60)[0]
        assert doing == "delete" or "another job has acquired this place" in said
        for step in (1, 2):
            assert np.array_equal(tr.restore(place, step=step)["w"], np.ones(10))


def test_commit_checks_the_lease_at_the_root_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit checks the lease of a run at the root of a bucket."""
    bucket = obstore.store.MemoryStore()
    publish = sink.ObjectSink.publish

    def late(one: sink.ObjectSink, *args: Any, **options: Any) -> None:
        (held,) = [beat for beat in heartbeat._heartbeats.all() if beat.key == "writer.lock"]
        held.lost = True
        publish(one, *args, **options)

    with tr.Checkpointer(bucket) as ckpts:
        ckpts.save(1, {"w": 1}).result()
        monkeypatch.setattr(sink.ObjectSink, "publish", late)
        with pytest.raises(SaveError, match="another job has acquired this place"):
            ckpts.save(2, {"w": 1}).result()
    assert tr.steps(bucket) == [1]


@pytest.mark.long
def test_two_saves_to_one_path_at_a_time(between: Proxy, place: str) -> None:
    saves = [_start(between.url, _SAVING, place, "new") for _ in range(3)]
    outcomes = [_ended(save) for save in saves]
    assert outcomes.count(0) == 1
    assert np.array_equal(tr.restore(place)["w"], np.arange(300_000)) and len(_names(place)) == 2


@pytest.mark.long
def test_overwriting_is_tied_to_what_was_there(between: Proxy, place: str) -> None:
    """If another job replaces the checkpoint after it was looked up, the overwrite is refused with an error."""
    tr.save(place, {"w": np.zeros(3)})
    seen: list[Request] = []

    def replace(request: Request) -> str | None:
        if request.method == "PUT" and request.path.endswith("/treering.json") and not seen:
            seen.append(request)
            tr.save(place, {"w": np.ones(3)}, overwrite=True)
        return None

    job = _start(
        between.url,
        "try:\n    tr.save(sys.argv[2], {'w': np.full(3, 2.0)}, overwrite=True)\nexcept SaveError as error:\n"
        "    print('no', error)\nexcept ExistsError as error:\n    print('refused', error)\n",
        place,
    )
    between.fault = replace
    assert job.communicate(timeout=60)[0].startswith("refused")
    between.fault = lambda request: None
    assert np.array_equal(tr.restore(place)["w"], np.ones(3)) and len(_names(place)) == 2


@pytest.mark.long
def test_lease_of_later_release_is_recognized_and_refused(between: Proxy, place: str) -> None:
    """A lease object of a later release is recognized and refused."""
    with stores.get(place).new_file(f"{place}/writer.lock", overwrite=False) as file:
        file.write(b'{"version": 2, "token": "x"}')
    with pytest.raises(TreeringError, match="a later release"), tr.Checkpointer(place) as ckpts:
        ckpts.save(1, {"w": np.zeros(3)})


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_stopped_writer_does_not_remove_what_another_has_put(monkeypatch: Any, overwrite: bool) -> None:
    """A writer that wakes right after its manifest was put does not remove the manifest of another writer."""
    buckets = ObjectStore()
    buckets.add("writers://tests", obstore.store.MemoryStore())
    path = "writers://tests/c/treering.json"
    writer = buckets.create(f"{path}.abcdef.tmp", visible=True)
    writer.write(memoryview(b"mine"), 0)
    writer.finish(4)
    check, turns = lease_registry.check, itertools.count()

    def stopped(place: str) -> None:
        if next(turns) == 1:
            with buckets.new_file(path, overwrite=True) as file:
                file.write(b"another's")
            assert writer.heartbeat is not None
            writer.heartbeat.lost = True
        check(place)

    monkeypatch.setattr(lease_registry, "check", stopped)
    monkeypatch.setattr(heartbeat, "LEASE_SAFE_SECONDS", -1.0)
    with pytest.raises(SaveError, match="another job has acquired this place"):
        writer.publish(path, overwrite=overwrite)
    assert buckets.open(path).read_up_to(100) == b"another's"
    writer.close()


@pytest.mark.long
def test_a_renewal_whose_answer_is_lost_loses_no_lease(between: Proxy, place: str) -> None:
    """A writer keeps its lease if the answer to a renewal is lost."""
    with tr.Checkpointer(place) as ckpts:
        ckpts.save(1, {"w": 1})
        ckpts.wait()
        (held,) = [one for one in heartbeat._heartbeats.all() if one.key.endswith("writer.lock") and not one.stopped]
        between.fault = lambda request: "lose" if request.method == "PUT" else None
        held.renew()
        between.fault = lambda request: None
        held.renew()
        held.renew()
        assert not held.lost and held.verify()
        ckpts.save(2, {"w": 2})
        ckpts.wait()
        between.fault = lambda request: "lose" if request.method == "PUT" else "503 SlowDown"
        held.renew()  # Now this writer does not know the version of its lease.
        between.fault = lambda request: None
    assert tr.steps(place) == [1, 2] and _is_free(place)


@pytest.mark.rare
@pytest.mark.long
def test_a_fork_while_arrays_are_on_their_way(between: Proxy, place: str) -> None:
    """A save continues if its process forks while arrays are being uploaded."""
    code = """
import os, warnings
warnings.simplefilter("ignore")
pending = tr.save_async(sys.argv[2], {"w": np.zeros(80_000_000, np.uint8)})
import time; time.sleep(0.3)
if os.fork() == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
pending.result()
"""
    between.fault = lambda request: "late" if request.method == "PUT" else None
    child = _start(between.url, code, place)
    assert child.communicate(timeout=60)[0] == "0\n" and child.returncode == 0
    between.fault = lambda request: None
    assert tr.restore(place)["w"].shape == (80_000_000,)


def test_a_writer_loses_its_mark_before_its_files_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leftover's mark is invalidated before its files are removed, so a paused writer cannot put them in place."""
    buckets = ObjectStore()
    buckets.add("memory://marks", obstore.store.MemoryStore())
    path = "memory://marks/c"
    with pytest.raises(SaveError, match="another job has acquired this place"), buckets.scratch_folder(path) as files:
        folder = files.rpartition("/")[0]
        with buckets.new_file(f"{files}/x", overwrite=False) as file:
            file.write(b"x")
        remove_unused(buckets, folder)
        assert buckets.list(files) == ["x"]  # its writer lives
        writer = next(one for one in heartbeat._heartbeats.all() if one.key.startswith("." + "c."))
        monkeypatch.setattr(heartbeat, "is_alive", lambda *_: writer.renew() or False)
        remove_unused(buckets, folder)
        assert buckets.list(files) == ["x"] and writer.verify()  # renewed after it was read and before its removal
        monkeypatch.setattr(heartbeat, "is_alive", lambda *_: False)
        monkeypatch.setattr(temporary_folder, "_delete_contents", lambda *_: None)
        remove_unused(buckets, folder)
        assert buckets.list(files) == ["x"] and not writer.verify()
        writer.renew()
        assert writer.lost


def test_overwriting_a_damaged_checkpoint_leaves_nothing_of_it() -> None:
    """Overwriting a damaged checkpoint removes its files, although its manifest no longer names them."""
    buckets = ObjectStore()
    buckets.add("damaged://tests", client := obstore.store.MemoryStore())
    with stores.using(buckets, "damaged"):
        path = "damaged://tests/c"
        tr.save(path, {"w": np.zeros(70_000)})
        obstore.put(client, "c/treering.json", b"{")
        tr.save(path, {"w": np.ones(70_000)}, overwrite=True)
        assert np.array_equal(tr.restore(path)["w"], np.ones(70_000)) and len(_names(path)) == 2, _names(path)


def test_a_copy_that_comes_second_touches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """A copy changes nothing if another copy was made first."""
    buckets = ObjectStore()
    buckets.add("copies://tests", obstore.store.MemoryStore())
    with stores.using(buckets, "copies"):
        tr.save(tmp_path / "c", {"w": np.ones(70_000)})
        copy_checkpoints(tmp_path / "c", path := "copies://tests/c")
        there = [stores.get(path).stat(f"{path}/{name}") for name in _names(path)]
        # Another copy was made after this check
        monkeypatch.setattr(copying.CheckpointCopy, "is_same", lambda *_, **__: None)
        with pytest.raises(ExistsError, match="meanwhile; it is unchanged"):
            copy_checkpoints(tmp_path / "c", path)
        look = copying.summary.stat_manifest  # here after the second check
        monkeypatch.setattr(
            copying.summary, "stat_manifest", lambda at, path: None if "://" in path else look(at, path)
        )
        with pytest.raises(ExistsError, match="pass overwrite=True"):
            copy_checkpoints(tmp_path / "c", path)
        assert [stores.get(path).stat(f"{path}/{name}") for name in _names(path)] == there
