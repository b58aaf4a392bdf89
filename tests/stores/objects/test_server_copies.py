"""In a bucket, the server copies the objects of arrays that have not changed. Every step stays complete by itself."""

import logging
import pathlib
import pickle
import re
import secrets
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import obstore
import obstore.store
import pytest

import azurite
import gcs
import jobs
import s3
import treering as tr
from fault_proxy import Proxy, Request, proxy
from treering import stores
from treering._save import saved_arrays
from treering._tools.listing import freed_bytes
from treering.errors import TreeringError
from treering.formats.treering.ledger import CopiedFiles, Ledger
from treering.formats.treering.manifest_fields import File
from treering.formats.treering.save_files import SaveFiles
from treering.stores.memory import MemoryStore
from treering.stores.objects.store import ObjectStore
from treering.stores.store import Stored

pytestmark = [pytest.mark.long, pytest.mark.whole]
_MIB = 1 << 20
_LARGE = np.random.default_rng(0).normal(size=3 * _MIB // 4 + 100_000).astype(np.float32)  # 3.4 MB, four objects
_CLIENTS = {"s3_server": s3.client, "gcs_server": gcs.client, "azure_server": azurite.client}


@pytest.fixture(autouse=True)
def _small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_arrays, "MIN_BYTES", 64 << 10)
    monkeypatch.setattr(ObjectStore, "object_bytes", _MIB)


@pytest.fixture
def between(request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """Yields a proxy in front of the server that the test names, by default S3. The scheme `copying` leads to it."""
    which = getattr(request, "param", "s3_server")
    with proxy(request.getfixturevalue(which)) as one:
        buckets = ObjectStore()
        buckets.add("copying://tests", _CLIENTS[which](one.url))
        with stores.using(buckets, "copying"):
            yield one


@pytest.fixture
def run(between: Proxy) -> str:
    return f"copying://tests/{secrets.token_hex(4)}"


class _Loop:
    """A training loop with a frozen object, a frozen array that is a new object at each step, and a trained one."""

    def __init__(self) -> None:
        self.large, self.frozen = _LARGE.copy(), jnp.full(100_000, 3, jnp.float32)
        self.expected: dict[int, Any] = {}

    def save(self, ckpts: tr.Checkpointer, step: int) -> int:
        """Saves a step. Returns the bytes that were not uploaded."""
        trained = jnp.full(50_000, step, jnp.float32)
        tree = {"trained": trained, "frozen": self.frozen, "large": jnp.asarray(self.large.copy()), "n": step}
        pending = ckpts.save(step, tree)
        assert pending
        shared = pending.result().shared_bytes
        self.expected[step] = jax.tree.map(np.array, tree)
        ckpts.wait()
        return shared

    def check(self, run: str, steps: list[int]) -> None:
        """Checks each step bit by bit."""
        assert tr.steps(run) == steps and tr.verify(run).ok
        for step in steps:
            found = tr.restore(run, step=step)
            assert all(np.array_equal(found[name], self.expected[step][name]) for name in found)


def _is_copy(request: Request) -> bool:
    return any("copy-source" in name.lower() for name in request.headers)


def _uploaded(requests: list[Request]) -> int:
    return sum(
        int(value) for one in requests for name, value in one.headers.items() if name.lower() == "content-length"
    )


def _key(request: Request) -> str:
    """Returns the key of the object that a request copies."""
    (source,) = (value for name, value in request.headers.items() if name.lower() == "x-amz-copy-source")
    return unquote(source).removeprefix(f"/{s3.BUCKET}/").removeprefix(f"{s3.BUCKET}/")


@pytest.mark.parametrize("between", ["s3_server", "gcs_server", "azure_server"], indirect=True)
def test_only_what_has_changed_is_uploaded(between: Proxy, run: str) -> None:
    """From the fourth save on, the object of each unchanged part is copied. Retention deletes a step and no copies."""
    loop, uploaded, shared, copies = _Loop(), {}, {}, {}
    with tr.Checkpointer(run, keep=tr.keep.last(2)) as ckpts:
        for step in range(1, 8):
            if step == 6:
                loop.large[_MIB // 2] += 1
            begun = len(between.requests)
            shared[step] = loop.save(ckpts, step)
            uploaded[step] = _uploaded(between.requests[begun:])
            copies[step] = sum(map(_is_copy, between.requests[begun:]))
    loop.check(run, [6, 7])
    total = _LARGE.nbytes + loop.frozen.nbytes
    assert uploaded[1] > total and shared[1] == copies[1] == 0
    for step in (4, 5):
        assert uploaded[step] < 250_000 and shared[step] > total and copies[step] == 5
    assert _MIB < uploaded[6] < 250_000 + _MIB and shared[6] > total - _MIB - 4096 and copies[6] == 4
    assert copies[7] == 4  # A part of an array that has just changed is in one object with other arrays.


def test_a_local_tier_sends_only_what_has_changed(between: Proxy, run: str, tmp_path: pathlib.Path) -> None:
    """Files that one of the last two uploaded steps has are copied by the server, unless both are deleted."""
    loop, uploaded, copies = _Loop(), {}, {}
    with tr.Checkpointer(run, local=tmp_path / "local") as ckpts:
        for step in range(1, 9):
            if step == 7:
                ckpts.delete(6)
            elif step == 8:
                ckpts.delete(5)
                ckpts.delete(7)
            begun = len(between.requests)
            loop.save(ckpts, step)
            while ckpts.uncopied:
                time.sleep(0.01)
            uploaded[step] = _uploaded(between.requests[begun:])
            copies[step] = sum(map(_is_copy, between.requests[begun:]))
    loop.check(run, [1, 2, 3, 4, 8])
    total = _LARGE.nbytes + loop.frozen.nbytes
    assert uploaded[1] > total and not copies[1] and uploaded[8] > total
    for step in (5, 6):
        assert uploaded[step] < 250_000 and copies[step] == 2


def _delete(client: Any, key: str) -> None:
    obstore.delete(client, key)


def _replace(client: Any, key: str) -> None:
    obstore.put(client, key, bytes(obstore.head(client, key)["size"]))


@pytest.mark.parametrize("change", [_delete, _replace])
def test_an_object_that_another_program_changes(
    between: Proxy, run: str, s3_server: str, change: Callable[[Any, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Right before it is copied. The bytes are uploaded, and the next save copies those."""
    caplog.set_level(logging.INFO, "treering")
    loop, changed, shared = _Loop(), list[str](), {}

    def fault(request: Request) -> None:
        if step == 5 and not changed and _is_copy(request):
            changed.append(_key(request))
            change(s3.client(s3_server), changed[0])

    between.fault = fault
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 7):
            shared[step] = loop.save(ckpts, step)
    assert 0 < shared[5] < shared[4] == shared[6]
    assert re.search(rf"uploaded again, not copied from {changed[0]}", caplog.text)
    assert not tr.verify(f"{run}/step-00000004").ok
    for step in (5, 6):
        assert tr.verify(f"{run}/step-{step:08}").ok
        found = tr.restore(run, step=step)
        assert all(np.array_equal(found[name], loop.expected[step][name]) for name in found)


def test_an_upload_that_is_repeated_copies_again(between: Proxy, run: str, tmp_path: pathlib.Path) -> None:
    """The objects of the failed attempt are gone, but not those of the step before."""
    loop, refused = _Loop(), list[int]()

    def fault(request: Request) -> str | None:
        commits = request.method == "PUT" and request.path.endswith("step-00000005/treering.json")
        if refused or not commits:
            return None
        refused.append(len(between.requests))
        return "403 AccessDenied"

    between.fault = fault
    with tr.Checkpointer(run, local=tmp_path / "local") as ckpts:
        for step in range(1, 6):
            loop.save(ckpts, step)
            while step < 5 and ckpts.uncopied:
                time.sleep(0.01)
    loop.check(run, [1, 2, 3, 4, 5])
    again = between.requests[refused[0] :]
    assert sum(map(_is_copy, again)) == 2 and _uploaded(again) < 250_000


def test_an_overwritten_step_is_forgotten() -> None:
    """A loop that uploads to one path again and again needs no more memory."""
    ledger, sizes = Ledger(max_checkpoints=2), list[int]()
    for n in range(9):
        files = SaveFiles(MemoryStore(), "memory://run/step-00000001", f"{n:06}")
        sink: Any = types.SimpleNamespace(stored=Stored((f"{n}", None), False))
        copied = CopiedFiles(ledger, files)
        copied.note(File(f"arrays-{n:06}", 5, 5, f"{n:016}"), sink)
        copied.end()
        sizes.append(len(pickle.dumps(vars(ledger))))
    assert sizes[-1] == sizes[2]


@pytest.mark.parametrize("between", ["s3_server", "gcs_server", "azure_server"], indirect=True)
def test_a_local_tier_sends_what_another_program_replaced(
    between: Proxy, run: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    """The server has copied wrong bytes already. They make room for the right ones."""
    loop, client = _Loop(), _CLIENTS[request.node.callspec.params["between"]](between.url)
    with tr.Checkpointer(run, local=tmp_path / "local") as ckpts:
        for step in range(1, 6):
            if step == 5:
                for page in obstore.list(client, prefix=f"{run.removeprefix('copying://tests/')}/step-00000004/"):
                    for key in (one["path"] for one in page if "/arrays-" in one["path"]):
                        _replace(client, key)
            begun = len(between.requests)
            loop.save(ckpts, step)
            while step < 5 and ckpts.uncopied:
                time.sleep(0.01)
    assert any(map(_is_copy, between.requests[begun:])) and tr.verify(f"{run}/step-00000005").ok
    found = tr.restore(run, step=5)
    assert all(np.array_equal(found[name], loop.expected[5][name]) for name in found)


def test_versions_that_say_nothing_of_the_bytes() -> None:
    """A store whose copies have other ETags. A replaced object of the same size is not copied."""
    memory: Any = obstore.store.MemoryStore()
    loop, shared = _Loop(), {}
    with tr.Checkpointer(memory) as ckpts:
        for step in range(1, 7):
            if step == 5:
                (key, *_) = (
                    one["path"]
                    for page in obstore.list(memory)
                    for one in page
                    if "step-00000004/arrays" in one["path"] and one["size"] > 512_000
                )
                _replace(memory, key)
            shared[step] = loop.save(ckpts, step)
    assert 0 < shared[5] < shared[4] == shared[6]
    for step in (5, 6):
        assert tr.verify(f"{ckpts.directory}/step-{step:08}").ok


@pytest.mark.parametrize("answer", ["403 AccessDenied", "501 NotImplemented"])
def test_a_server_that_refuses_copies(between: Proxy, run: str, answer: str, caplog: pytest.LogCaptureFixture) -> None:
    """All arrays are uploaded. After the first save with refused copies, none is requested."""
    between.fault = lambda request: answer if _is_copy(request) else None
    loop, copies = _Loop(), {}
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 4):
            begun = len(between.requests)
            assert not loop.save(ckpts, step)
            copies[step] = sum(map(_is_copy, between.requests[begun:]))
    loop.check(run, [1, 2, 3])
    assert copies[2] and not copies[3]
    assert caplog.text.count("unchanged arrays are uploaded from now on") == 1


def test_a_save_that_fails_after_its_copies(between: Proxy, run: str, s3_server: str) -> None:
    """It leaves no object behind, and the next save copies again."""
    loop = _Loop()
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 5):
            loop.save(ckpts, step)
        between.fault = lambda request: (
            "403 AccessDenied" if request.method == "PUT" and request.path.endswith("treering.json") else None
        )
        begun = len(between.requests)
        with pytest.raises(TreeringError, match="does not allow this"):
            loop.save(ckpts, 5)
        assert sum(map(_is_copy, between.requests[begun:])) == 5
        between.fault = lambda request: None
        prefix = f"{run.removeprefix('copying://tests/')}/step-00000005"
        assert not [one for page in obstore.list(s3.client(s3_server), prefix=prefix) for one in page]
        assert loop.save(ckpts, 6) > _LARGE.nbytes
    loop.check(run, [1, 2, 3, 4, 6])


def test_prune_asks_for_no_sizes_of_files(between: Proxy, run: str) -> None:
    """No steps share files in a bucket, and each size would take a request."""
    assert freed_bytes(stores.get(run), [f"{run}/step-00000001"], [f"{run}/step-00000002"]) is None
    assert not between.requests


def test_a_store_that_cannot_copy() -> None:
    """The bytes of a copy would travel through this process, so they are written as usual."""
    loop, run = _Loop(), "uncopied://tests/run"
    with stores.using(MemoryStore(), "uncopied"):
        with tr.Checkpointer(run) as ckpts:
            assert not any(loop.save(ckpts, step) for step in range(1, 6))
        loop.check(run, [1, 2, 3, 4, 5])


_JOB = """
shared = []
with tr.Checkpointer(URL) as ckpts:
    for step in range(1, 6):
        frozen = put(np.arange(1 << 20, dtype=np.float32), P("x"))
        tree = {"frozen": frozen, "trained": put(np.full(600_000, step, np.float32), P("x"))}
        shared.append(ckpts.save(step, tree).result().shared_bytes)
report(shared)
"""


_HOSTS_JOB = """
import time
from treering.formats.treering.ledger import CopiedFiles
share, reused, shared = CopiedFiles.share, [], []
def observed(self, listed):
    reused[-1] += listed.size * (done := share(self, listed))
    return done
CopiedFiles.share = observed
with tr.Checkpointer(URL, local=f"{LOCAL}-{jax.process_index()}", keep_local=tr.keep.last(3)) as ckpts:
    for step in range(1, 7):
        reused.append(0)
        frozen = put(np.arange(1 << 20, dtype=np.float32), P("x"))
        tree = {"frozen": frozen, "trained": put(np.full(600_000, step, np.float32), P("x"))}
        shared.append(ckpts.save(step, tree).result().shared_bytes)
        while step not in tr.steps(URL):
            time.sleep(0.05)
report([reused, shared])
"""


@pytest.mark.slow
def test_several_hosts_with_disks(tmp_path: pathlib.Path, bucket: str) -> None:
    """Each shares files on its own disk, and what it has uploaded is not sent again."""
    for result in jobs.run_job(tmp_path, _HOSTS_JOB, processes=2, URL=bucket, LOCAL=str(tmp_path / "local")):
        for nbytes in result.report:
            assert nbytes[0] == 0 and min(nbytes[4:]) > 2 * _MIB
    assert tr.verify(bucket).ok and tr.steps(bucket) == [1, 2, 3, 4, 5, 6]
    assert (tr.restore(bucket, step=6)["trained"] == 6).all()


@pytest.mark.slow
def test_several_processes(tmp_path: pathlib.Path, bucket: str) -> None:
    """The objects that each process wrote are copied, although peers wrote the others of the same array."""
    for result in jobs.run_job(tmp_path, _JOB, processes=2, URL=bucket):
        assert result.report[0] == 0 and min(result.report[3:]) > 2 * _MIB
    assert tr.verify(bucket).ok
    for step in (4, 5):
        found = tr.restore(bucket, step=step)
        assert np.array_equal(found["frozen"], np.arange(1 << 20)) and (found["trained"] == step).all()
