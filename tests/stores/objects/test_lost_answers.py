"""Requests that fail at a bad moment: Treering concludes nothing from them, and removes nothing of other writers."""

import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import obstore.store
import pytest

import s3
import treering as tr
from treering import formats, stores
from treering._tools.listing import list_run
from treering.errors import ExistsError, NotFoundError, SaveError
from treering.formats.treering.commit import Transaction
from treering.stores.file_io import is_in_use, read_file
from treering.stores.memory import MemoryStore
from treering.stores.objects import heartbeat
from treering.stores.objects.bucket import Bucket
from treering.stores.objects.request_errors import ChangedError
from treering.stores.objects.store import ObjectStore
from treering.stores.objects.upload import IN_FLIGHT
from treering.stores.read_errors import RequestError, raise_if_momentary

pytestmark = pytest.mark.long
_ONE, _TWO = ({name: np.full(3, value, np.float32) for name in "abc"} for value in (1, 2))


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """Yields the bucket `odd://t`, which is in memory."""
    buckets = ObjectStore()
    buckets.add("odd://t", obstore.store.MemoryStore())
    with stores.using(buckets, "odd"):
        yield buckets._buckets["odd://t"]


def _failing(function: Any, when: Callable[[int, str], bool]) -> Callable[..., Any]:
    """Returns a method of a bucket that fails for the calls that `when` chooses by number and key."""
    numbers = itertools.count()

    def call(self: Bucket, key: str, *args: Any, **options: Any) -> Any:
        if when(next(numbers), key):
            raise RequestError(f"{self.url}/{key}: 503 SlowDown")
        return function(self, key, *args, **options)

    return call


@pytest.mark.parametrize("format", ["orbax", "flax", "t5x", "levanter", "equinox", "fjformer", "safetensors"])
def test_unreachable_checkpoint_is_not_taken_for_absent(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """A failed request raises an error instead of hiding a checkpoint, because a run would otherwise start over."""
    name = {"flax": "checkpoint_3", "t5x": "checkpoint_3", "levanter": "step-3", "safetensors": "3.safetensors"}
    path = f"odd://t/run/{name.get(format, '3')}"
    tr.save(path, _ONE, format=format)
    monkeypatch.setattr(Bucket, "get_prefix", _failing(Bucket.get_prefix, lambda number, key: True))
    for call in (tr.open, tr.restore, tr.verify):
        with pytest.raises(RequestError, match="503"):
            call(path)
    with pytest.raises(RequestError, match="503"), tr.Checkpointer("odd://t/run") as ckpts:
        ckpts.restore_or_init(lambda: _TWO)


@pytest.mark.parametrize(
    ("number", "raised"), [(24, True), (110, True), (12, True), (13, False), (2, False), (21, False)]
)
def test_errors_of_the_moment(number: int, raised: bool) -> None:
    """EMFILE, ETIMEDOUT and ENOMEM say nothing about the files. EACCES, ENOENT and EISDIR do."""
    error = OSError(number, os.strerror(number))
    if raised:
        with pytest.raises(OSError, match=os.strerror(number)):
            raise_if_momentary(error)
    else:
        raise_if_momentary(error)


def test_what_fails_while_it_is_verified_is_no_damage(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails during a verification is not reported as damage."""
    for format in ("treering", "orbax", "safetensors"):
        path = f"odd://t/{format}" + ("" if format != "safetensors" else ".safetensors")
        tr.save(path, {"w": np.zeros(3_000_000)}, format=format)
        with monkeypatch.context() as patch:
            # Requests for array data; the first request for a file of safetensors is for its header.
            arrays = lambda number, key: "/arrays-" in key or "/d/" in key or ("/" not in key and number > 0)  # noqa: E731
            patch.setattr(Bucket, "_bytes", _failing(Bucket._bytes, arrays))
            with pytest.raises(RequestError):
                tr.verify(path)


@pytest.mark.parametrize("published", [False, True])
def test_a_save_that_fails_removes_no_other_ones_manifest(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """A failed save does not remove another writer's manifest, even if looking it up fails too."""
    save = Transaction(stores.get("odd://t/c"), "odd://t/c", overwrite=False)
    bucket.put("c/treering.json", b"another one's")
    if published:
        with pytest.raises(ExistsError, match="another writer"):
            save.commit(b"this one's")
    looks: list[str] = []

    def fails(number: int, key: str) -> bool:
        looks.append(key)
        return True

    monkeypatch.setattr(Bucket, "get_prefix", _failing(Bucket.get_prefix, fails))
    save.abort()
    monkeypatch.undo()
    assert looks == ["c/treering.json"] * published, "a manifest that was not put is not looked up"
    assert bytes(bucket.get_prefix("c/treering.json", 99)[0]) == b"another one's"


def test_a_manifest_whose_answer_was_lost_is_looked_after(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save fails if its arrays are gone, even though its manifest was put.

    While that put was running, another job considered the writer dead and removed the arrays.
    """
    put = Bucket.put

    def lost(self: Bucket, key: str, data: Any, **options: Any) -> Any:
        if key != "c/treering.json":
            return put(self, key, data, **options)
        put(self, key, data, **options)
        self.delete([one.key for one in self.list_all("c") if one.key != key])
        for one in heartbeat._heartbeats.all():
            one._renewed_at -= 1000  # the machine was suspended
        raise RequestError("no answer")

    monkeypatch.setattr(Bucket, "put", lost)
    with pytest.raises(SaveError, match="another job has acquired this place"):
        tr.save("odd://t/c", _ONE)
    monkeypatch.undo()
    with pytest.raises(NotFoundError):
        tr.restore("odd://t/c")


@pytest.fixture(params=["objects", "s3", "memory"])
def run(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields a run in a bucket of obstore, in a server of S3, or in the store for tests."""
    buckets: Any = MemoryStore() if request.param == "memory" else ObjectStore()
    if request.param == "objects":
        buckets.add("late://t", obstore.store.MemoryStore())
    elif request.param == "s3":
        buckets.add("late://t", s3.client(request.getfixturevalue("s3_server")))
    with stores.using(buckets, "late"):
        yield f"late://t/{os.urandom(4).hex()}"


def _empty(path: str, *, but: int = 0) -> None:
    """Removes the array files of a step, except `but` of them."""
    store = stores.get(path)
    names = [name for name in store.list(path) if name.startswith("arrays-")]
    store.delete_all(path, names[but:])


def test_a_commit_that_arrives_after_its_step_was_deleted(run: str, caplog: pytest.LogCaptureFixture) -> None:
    """A delayed duplicate of a commit brings back only a manifest. The next save deletes it, as `keep` asks."""
    with tr.Checkpointer(run, keep=tr.keep.last(1)) as ckpts:
        ckpts.save(1, _ONE)
        ckpts.wait()
        path = f"{run}/step-00000001/treering.json"
        commit = read_file(stores.get(run), path)
        ckpts.save(2, _ONE)
        ckpts.wait()
        for step in (3, 4):  # The same job, and the next one.
            while stores.get(run).list(f"{run}/step-00000001"):  # A thread deletes it.
                time.sleep(0.01)
            with stores.get(run).new_file(path, overwrite=False) as late:
                late.write(commit)
            assert ckpts.latest_step == step - 1
            assert [row.step for row in list_run(run, tr.keep.last(1)).rows if row.deleted] == [1]
            assert [one.step for one in tr.follow(run, timeout=0)] == [step - 1]
            if step == 3:
                ckpts.save(3, _ONE)
                ckpts.wait()
        ckpts.close()
        with tr.Checkpointer(run, keep=tr.keep.last(1)) as later:
            later.save(4, _ONE)
    assert tr.steps(run) == [4] and tr.verify(run).ok and [row.step for row in list_run(run).rows] == [4]
    assert caplog.text.count("only the manifest is left of step 1") == 2
    assert not any(name.startswith("step-00000001") for name in stores.get(run).list(run))


@pytest.mark.parametrize("left", ["one array file", "the pin", "the manifest of a kept step", "the latest manifest"])
def test_a_damaged_step_is_not_taken_for_a_late_commit(run: str, left: str) -> None:
    """A step that retention would have kept, or of which anything else is left, stays and is reported as damaged."""
    wide = {"a": np.zeros(5 << 20, np.float32), "b": np.zeros(3)}
    with tr.Checkpointer(run) as ckpts:
        for step in (1, 2):
            ckpts.save(step, wide if left == "one array file" else _ONE)
        ckpts.wait()
        if left == "the pin":
            ckpts.pin(1)
    damaged = 2 if left == "the latest manifest" else 1
    _empty(f"{run}/step-{damaged:08}", but=left == "one array file")
    keep = tr.keep.steps(damaged) if "kept" in left else tr.keep.last(1)
    with tr.Checkpointer(run, keep=keep) as ckpts:
        ckpts.save(3, _ONE)
        if damaged == 1:
            ckpts.save(4, _ONE)
    if left == "the latest manifest":  # A later step does not need it.
        assert tr.steps(run) == [3]
        return
    assert tr.steps(run)[0] == 1
    report = tr.verify(run)
    assert not report.ok and "step-00000001" in str(report.problems)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_cannot_be_put_in_place_is_kept(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, overwrite: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If an overwrite fails after it removed the old folder, the new one is kept until a later save is done."""
    path = "odd://t/c"
    if overwrite:
        tr.save(path, _ONE, format="orbax")
    for n in range(2):  # A second failure keeps its folder too.
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "copy", _failing(Bucket.copy, lambda number, key: number == 2))
            with pytest.raises(SaveError, match=r"it is not complete there.*all files of the new one are in") as error:
                tr.save(path, _TWO, format="orbax", overwrite=True)
        assert ("the old checkpoint may be gone" in str(error.value)) == (overwrite and n == 0)
        kept = str(error.value).rpartition("all files of the new one are in ")[2].partition(":  ")[0].split(": copy")[0]
        assert np.array_equal(tr.restore(kept)["a"], _TWO["a"])
    tr.save(path, _TWO, format="orbax", overwrite=True)
    assert np.array_equal(tr.restore(path)["a"], _TWO["a"]) and stores.get(path).list("odd://t") == ["c"]


def test_refused_removal_leaves_checkpoint_complete(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first request of an overwrite's last step is refused, the old checkpoint stays complete."""
    path = "odd://t/c"
    tr.save(path, _ONE, format="orbax")
    delete = Bucket.delete

    def refused(self: Bucket, keys: Any) -> None:
        if any(key.startswith("c/") for key in keys):
            raise RequestError("403 Forbidden")
        delete(self, keys)

    monkeypatch.setattr(Bucket, "delete", refused)
    with pytest.raises(SaveError, match="403 Forbidden"):
        tr.save(path, _TWO, format="orbax", overwrite=True)
    assert np.array_equal(tr.restore(path)["a"], _ONE["a"])


def test_an_interrupt_while_a_folder_is_put_in_place(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An interrupt stays an interrupt, and the log says where the new checkpoint is."""
    store = stores.get("odd://t/c")

    def interrupted(self: Bucket, key: str, other: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bucket, "copy", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        store.new_folder("odd://t/c", overwrite=False, owned=lambda store, path: ()) as folder,
    ):
        bucket.put(f"{folder.removeprefix('odd://t/')}/x", b"new")
    assert f"all files of the new one are in {folder}" in caplog.text and store.list(folder) == ["x"]


def test_two_that_write_one_folder(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is refused while another puts its files in the same folder: the result is all of one, or nothing."""
    path = "odd://t/step-1"
    for n, tree in enumerate((_ONE, _TWO)):
        tr.save(f"odd://t/{n}", tree)
    one, two = (tr.open(f"odd://t/{n}")._source for n in range(2))
    copy, numbers = Bucket.copy, itertools.count()
    refused: list[BaseException] = []

    def copying(self: Bucket, key: str, other: str) -> None:
        if next(numbers) == 0:
            try:
                formats.get("levanter").write(stores.get(path), path, two, overwrite=False)
            except ExistsError as error:
                refused.append(error)
        copy(self, key, other)

    monkeypatch.setattr(Bucket, "copy", copying)
    formats.get("levanter").write(stores.get(path), path, one, overwrite=False)
    assert "another job is writing it too" in str(refused[0])
    assert np.array_equal(tr.restore(path)["a"], _ONE["a"])


def test_a_renewal_that_fails_ends_no_other(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that fails does not stop the renewals of other leases."""
    monkeypatch.setattr(heartbeat, "_RENEWAL_SECONDS", 0.05)
    one, other = heartbeat.Heartbeat(bucket, "one", "1"), heartbeat.Heartbeat(bucket, "other", "2")
    put = Bucket.put

    def changed(self: Bucket, key: str, data: Any, **options: Any) -> Any:
        if key == "one":
            raise ChangedError(17, "exists", key)  # as after a lost answer; the following reads fail too
        return put(self, key, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", changed)
        patch.setattr(Bucket, "get_prefix", _failing(Bucket.get_prefix, lambda number, key: True))
        time.sleep(0.5)
    beats = one._record.beat, other._record.beat
    time.sleep(0.5)
    assert one._record.beat != beats[0] and other._record.beat != beats[1] and one.is_valid() and other.is_valid()
    one.stop(delete=True)
    other.stop(delete=True)


@pytest.mark.long
def test_the_age_of_an_object_is_never_overrated(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computed age of an object is never too large.

    Here the put of the object that shows the server's clock is slow, and another process removes it before it is read.
    """
    begun = time.monotonic()
    bucket.put("one", b"1")
    found = bucket.head("one")
    put, head, heads = Bucket.put, Bucket.head, itertools.count()

    def slow(self: Bucket, key: str, data: Any, **options: Any) -> Any:
        time.sleep(0.6)
        return put(self, key, data, **options)

    monkeypatch.setattr(Bucket, "put", slow)
    monkeypatch.setattr(Bucket, "head", lambda self, key: head(self, key) if next(heads) else None)
    assert found and 0 < bucket.age(found, "beside") <= time.monotonic() - begun
    assert next(heads) > 1, "the removed object was put and read again"


def test_the_first_upload_that_fails_ends_a_save(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first failed upload, a save starts no further ones."""
    puts: list[str] = []
    put = Bucket.put

    def broken(self: Bucket, key: str, data: Any, **options: Any) -> Any:
        if "arrays-" in key:
            puts.append(key)
            time.sleep(0.05)
            raise RequestError("503")
        return put(self, key, data, **options)

    monkeypatch.setattr(Bucket, "put", broken)
    with pytest.raises(SaveError, match="503"):
        tr.save("odd://t/c", {f"w{n}": np.zeros(4_500_000) for n in range(16)})
    assert len(puts) <= IN_FLIGHT + 1 < 48, "only uploads that had started already"


def test_markers_of_folders_are_no_files(s3_server: str) -> None:
    """Empty objects whose names end in a slash are ignored. Consoles and mounted buckets leave them."""
    buckets = ObjectStore()
    buckets.add("markers://t", s3.client(s3_server))
    run = f"markers://t/markers-{time.time_ns()}"
    with stores.using(buckets, "markers"):
        for format, path in (("treering", f"{run}/step-1"), ("orbax", f"{run}-o/1")):
            tr.save(path, _ONE, format=format)
            for place in (path, f"{path}/d"):
                key = place.removeprefix("markers://t/") + "/"
                s3._boto(s3_server).put_object(Bucket=s3.BUCKET, Key=key, Body=b"")
            assert tr.steps(os.path.dirname(path)) == [1]
            assert np.array_equal(tr.restore(path)["a"], _ONE["a"])


@pytest.mark.long
def test_forked_child_gets_an_error() -> None:
    """A forked child that uses a bucket gets an error that recommends 'spawn'."""
    code = """
import os, numpy as np, obstore.store, treering as tr
from treering.errors import UnsupportedError
tr.save(obstore.store.MemoryStore(), {"n": 1}) if False else None
from treering import stores
from treering.stores.objects.store import ObjectStore
from treering.stores.objects.upload import IN_FLIGHT
buckets = ObjectStore()
buckets.add("odd://t", obstore.store.MemoryStore())
stores.register(buckets, "odd")
tr.save("odd://t/c", {"n": 1})
pid = os.fork()
if not pid:
    try:
        tr.restore("odd://t/c")
    except UnsupportedError as error:
        os._exit(7 if "spawn" in str(error) else 1)
    os._exit(2)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, check=False).returncode == 7


def test_a_run_that_was_dropped_gives_its_lease_back(bucket: Bucket) -> None:
    """A `Checkpointer` that is garbage collected without `close` releases its lease."""
    ckpts = tr.Checkpointer("odd://t/run")
    ckpts.save(1, _ONE)
    ckpts.wait()
    assert b"token" in bytes(bucket.get_prefix("run/writer.lock", 200)[0])
    del ckpts
    end = time.monotonic() + 10
    while b"token" in bytes(bucket.get_prefix("run/writer.lock", 200)[0]):
        gc.collect()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_lease_that_is_not_released_is_logged(bucket: Bucket, monkeypatch: Any, caplog: Any) -> None:
    ckpts = tr.Checkpointer("odd://t/run")
    ckpts.save(1, _ONE)
    ckpts.wait()
    monkeypatch.setattr(Bucket, "put", _failing(Bucket.put, lambda number, key: key.endswith("writer.lock")))
    ckpts.close()
    assert "run: its lease was not released, and will expire: " in caplog.text
    assert tr.steps("odd://t/run") == [1]


def test_a_lock_that_was_copied_from_a_disk_is_nobodys(bucket: Bucket, tmp_path: Any) -> None:
    """A lock file that was copied from a disk to a bucket does not hold the run."""
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, _ONE)
        ckpts.wait()
        lock = (tmp_path / "writer.lock").read_bytes()
    bucket.put("run/writer.lock", lock)
    with tr.Checkpointer("odd://t/run") as ckpts:
        ckpts.save(1, _ONE)
    assert tr.steps("odd://t/run") == [1]


def test_a_later_releases_writer_lives(bucket: Bucket) -> None:
    """The heartbeat of a later release counts as a living writer."""
    bucket.put("c/treering.json.abcdef.tmp", b'{"version": 2, "token": "later"}')
    assert is_in_use(stores.get("odd://t/c"), "odd://t/c/treering.json.abcdef.tmp")


def test_files_of_others_are_not_replaced_without_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without conditions checks for another writer's file before it puts its own."""
    buckets = ObjectStore(conditional=False)
    buckets.add("loose://t", obstore.store.MemoryStore())
    with (
        stores.using(buckets, "loose"),
        pytest.raises(ExistsError, match="another writer"),
        buckets.new_file("loose://t/f", overwrite=False) as file,
    ):
        file.write(b"mine")
        buckets._buckets["loose://t"].put("f", b"another's", overwrite=True)
