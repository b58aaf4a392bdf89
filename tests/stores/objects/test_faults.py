"""Faults on the way to a bucket: a save is complete or absent, and wrong bytes are never returned."""

import contextlib
import datetime
import gzip
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
import pytest

import gcs
import s3
import treering as tr
from fault_proxy import Proxy, Request, proxy
from sampling import sample_points
from treering import stores
from treering.errors import CorruptError, ExistsError, NotFoundError, SaveError, TreeringError, UnsupportedError
from treering.stores.objects import bucket, heartbeat, lease
from treering.stores.objects.bucket import Bucket
from treering.stores.objects.store import ObjectStore

_ROOT = "faulty://tests"
_TREE = {"w": np.arange(300_000, dtype=np.float32), "b": np.ones(3)}
_LARGE = {"w": np.arange(8_800_000, dtype=np.float32)}  # one file, uploaded in parts
_CUT_UP = {"w": np.arange(4_400_000, dtype=np.float32), "b": np.ones(3)}  # the bytes of one leaf are in two objects
_KEY = re.compile(rb"<Key>(.*?)</Key>")


@pytest.fixture(scope="module")
def google() -> Iterator[str]:
    """Yields the URL of a double of Google's server that allows any number of changes per second."""
    with gcs.server(write_seconds=0) as url:
        yield url


@pytest.fixture
def between(request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """Yields a proxy in front of the server that the test names, by default S3.

    Paths with the scheme `faulty` use it.
    """
    which = getattr(request, "param", "s3_server")
    client = {"s3_server": s3.client, "google": gcs.client}[which]
    with proxy(request.getfixturevalue(which)) as one:
        buckets = ObjectStore()
        buckets.add(_ROOT, client(one.url, retry_config={"max_retries": 2, "backoff": _QUICK}))
        with stores.using(buckets, "faulty"):
            yield one


@pytest.fixture
def place(between: Proxy) -> str:
    """Returns a path in the bucket, after the test that the server obeys conditions."""
    place = f"{_ROOT}/{secrets.token_hex(4)}"
    tr.save(f"{place}/first", {"a": 1})
    return place


_QUICK: Any = {"init_backoff": datetime.timedelta(milliseconds=5), "base": 2}
_FAULTS = ["drop", "lose", "twice", "cut", "late", "503 SlowDown", "429 TooManyRequests", "500 InternalError"]
_FAULTS += ["409 OperationAborted"]


def _once(fault: str, which: int) -> Any:
    """Returns a fault for the request of this number, and for no other."""
    return lambda request: fault if request.number == which else None


def _deletes(request: Request) -> bool:
    return request.method == "DELETE" or (request.method == "POST" and "?delete" in request.path)


def _begins_parts(request: Request) -> bool:
    return request.method == "POST" and "?uploads" in request.path


def _sends_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber=" in request.path


def _ends_parts(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.path


def _puts_lease(request: Request) -> bool:
    return request.method == "PUT" and request.path.endswith("/writer.lock")


def _same(path: str, tree: Any) -> bool:
    found = tr.restore(path)
    return all(np.array_equal(found[name], tree[name]) for name in tree)


@pytest.mark.slow
@pytest.mark.parametrize("between", ["s3_server", "google"], indirect=True)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fault", _FAULTS)
def test_one_fault_at_any_request_of_a_save(between: Proxy, place: str, fault: str, overwrite: bool) -> None:
    """After one fault, either the save is done, or it raises an error and the old checkpoint is in place."""
    old = {"w": np.zeros(10)}
    if overwrite:
        tr.save(f"{place}/counted", old)
    begun = len(between.requests)
    tr.save(f"{place}/counted", _TREE, overwrite=overwrite)
    for number in sample_points(range(len(between.requests) - begun), first=_FAULTS.index(fault)):
        path = f"{place}/{number}"
        if overwrite:
            tr.save(path, old)
        between.fault = _once(fault, len(between.requests) + number)
        failed = None
        try:
            tr.save(path, _TREE, overwrite=overwrite)
        except (SaveError, ExistsError) as error:
            failed = error
        finally:
            between.fault = lambda request: None
        assert failed is None or not fault[0].isdigit(), "a request is repeated if the server asks for that"
        if failed is None:
            assert _same(path, _TREE)
        elif overwrite:
            assert _same(path, old)
        else:
            with pytest.raises(NotFoundError):
                tr.restore(path)
        tr.save(path, _TREE, overwrite=True)  # leftovers do not block the next save
        names = stores.get(path).list(path)
        assert len(names) == 2 and all(re.fullmatch(r"treering\.json|arrays-\S*", name) for name in names), names


_SILENT_FROM: dict[str, Callable[[Request], bool]] = {
    "the first": lambda request: True,
    "the mark": lambda request: request.method == "PUT" and request.path.endswith(".tmp"),
    "the arrays": lambda request: request.method == "PUT" and "/arrays-" in request.path,
    "the manifest": lambda request: request.method == "PUT" and request.path.endswith("/treering.json"),
    "the removal": _deletes,
}


@pytest.mark.slow
@pytest.mark.parametrize("silent_from", _SILENT_FROM)
def test_a_server_that_falls_silent_ends_in_an_error(s3_server: str, silent_from: str) -> None:
    """A save raises an error if the server stops answering at any moment. What it left does not block the next save."""
    root = f"silent://{secrets.token_hex(4)}"
    with proxy(s3_server) as between:
        buckets = ObjectStore()
        retries = {"max_retries": 1, "backoff": _QUICK, "retry_timeout": datetime.timedelta(seconds=1)}
        buckets.add(root, s3.client(between.url, timeout="1s", retry_config=retries))
        with stores.using(buckets, "silent"):
            path = f"{root}/{secrets.token_hex(4)}"
            tr.save(path, {"a": 1})
            silent: list[Request] = []

            def fault(request: Request) -> str | None:
                if silent or _SILENT_FROM[silent_from](request):
                    silent.append(request)
                return "silent" if silent else None

            between.fault = fault
            saving = tr.save_async(path, _TREE, overwrite=True)
            with pytest.raises(SaveError) as failed:
                saving.result(timeout=120)
            unknown = silent_from in ("the manifest", "the removal")
            assert silent and ("commit not confirmed" in str(failed.value)) == unknown
            for call in (tr.open, tr.restore, tr.verify, tr.steps):
                with pytest.raises((TreeringError, OSError), match=path):
                    call(path)
            with pytest.raises((TreeringError, OSError)), tr.Checkpointer(path) as ckpts:
                ckpts.restore_or_init(lambda: _TREE)
            between.fault = lambda request: None
            assert _same(path, _TREE if silent_from == "the removal" else {"a": 1})
            tr.save(path, _TREE, overwrite=True)
            assert _same(path, _TREE)


@pytest.mark.parametrize("between", ["s3_server", "google"], indirect=True)
@pytest.mark.long
@pytest.mark.parametrize("fault", ["drop", "cut", "flip", "short", "503 SlowDown", "500 InternalError"])
@pytest.mark.parametrize("tree", [_TREE, _CUT_UP], ids=["one object", "cut up"])
def test_one_fault_at_any_request_of_a_restore(between: Proxy, place: str, tree: Any, fault: str) -> None:
    """A restore returns only saved bytes, whatever fault happens."""
    path = f"{place}/c"
    tr.save(path, tree)
    begun = len(between.requests)
    assert _same(path, tree)
    count = len(between.requests) - begun
    for number in range(count):
        between.fault = _once(fault, len(between.requests) + number)
        try:
            assert _same(path, tree)
        except TreeringError:
            assert fault in ("flip", "short")
        finally:
            between.fault = lambda request: None


@pytest.mark.long
@pytest.mark.parametrize("tree", [_TREE, _CUT_UP], ids=["one object", "cut up"])
def test_a_flipped_bit_on_the_way_is_read_again_and_reported(
    between: Proxy, place: str, tree: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit that flips on the way is detected, read again and logged."""
    path = f"{place}/c"
    tr.save(path, tree)
    flipped = []

    def flip(request: Request) -> str | None:
        if request.method == "GET" and "arrays-" in request.path and not flipped:
            flipped.append(request)
            return "flip"
        return None

    between.fault = flip
    with caplog.at_level(logging.WARNING):
        assert _same(path, tree)
    assert flipped and "came wrong at first" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("tree", [_TREE, _CUT_UP], ids=["one object", "cut up"])
def test_what_stays_wrong_is_damage(between: Proxy, place: str, tree: Any) -> None:
    """Bytes that stay wrong when they are read again raise `CorruptError`."""
    path = f"{place}/c"
    tr.save(path, tree)
    between.fault = lambda request: "flip" if "arrays-" in request.path and request.method == "GET" else None
    with pytest.raises(CorruptError):
        tr.restore(path)


@pytest.mark.long
@pytest.mark.parametrize("between", ["s3_server", "google"], indirect=True)
def test_a_lost_answer_to_the_manifest_is_no_failure(between: Proxy, place: str) -> None:
    """A save succeeds if only the answer to its manifest is lost.

    The put is repeated where that is safe. Elsewhere, as with Google, the object is looked up.
    """
    path = f"{place}/c"
    lost: list[int] = []

    def lose_the_first(request: Request) -> str | None:
        if request.method != "PUT" or not unquote(request.path).endswith("/treering.json") or lost:
            return None
        lost.append(request.number)
        return "lose"

    between.fault = lose_the_first
    tr.save(path, _TREE)
    assert lost and _same(path, _TREE)


@pytest.mark.long
def test_failed_save_leaves_no_pending_uploads(between: Proxy, place: str) -> None:
    """A failed save waits for its running uploads, so that none creates an object later."""
    seen: list[str] = []

    def fail_the_second(request: Request) -> str | None:
        if request.method == "PUT" and "arrays-" in request.path:
            seen.append(request.path)
            if seen[1:2] != [request.path]:
                return "late"
            end = time.monotonic() + 20
            while len(seen) < 3 and time.monotonic() < end:  # else it would fail before the other uploads have started
                time.sleep(0.01)
            return "403 AccessDenied"
        return None

    between.fault = fail_the_second
    with pytest.raises(SaveError, match="credentials"):
        tr.save(f"{place}/c", {"w": np.zeros(100 << 20, np.uint8)})
    assert len(seen) > 2 and stores.get(place).list(f"{place}/c") == []


@pytest.mark.long
def test_a_list_that_fails_is_never_an_empty_run(between: Proxy, place: str) -> None:
    """A failed listing raises an error and is never taken for an empty run."""
    run = f"{place}/run"
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(1, _TREE)
    between.fault = lambda request: "503 SlowDown" if "list-type" in request.path else None
    for call in (
        lambda: tr.steps(run),
        lambda: tr.restore(run),
        lambda: tr.Checkpointer(run).restore_or_init(lambda: _TREE),
        lambda: tr.Checkpointer(run).latest_step,
    ):
        with pytest.raises(TreeringError, match="did not answer"):
            call()
    between.fault = lambda request: None
    assert tr.steps(run) == [1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ("403 AccessDenied", "credentials"),
        ("400 ExpiredToken", "expired"),
        ("404 NoSuchBucket", "no such bucket"),
    ],
)
def test_what_is_not_allowed_is_said(
    between: Proxy, place: str, answer: str, hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors about permissions, expired credentials and missing buckets name the cause."""
    tr.save(f"{place}/c", _TREE)
    between.fault = lambda request: answer
    for call in (lambda: tr.save(f"{place}/d", _TREE), lambda: tr.restore(f"{place}/c"), lambda: tr.steps(place)):
        with pytest.raises(TreeringError, match=hint):
            call()
    between.fault = lambda request: answer if request.method == "PUT" else None
    with pytest.raises(SaveError, match=hint):
        tr.save(f"{place}/d", _TREE)
    between.fault = lambda request: answer if _deletes(request) else None
    for _ in range(2):
        tr.save(f"{place}/e", _TREE, overwrite=True)  # a failed removal is only logged
        assert _same(f"{place}/e", _TREE)
    assert "tidying up failed" in caplog.text
    for of_parts in (_begins_parts, _sends_part, _ends_parts):
        between.fault = lambda request, chosen=of_parts: answer if chosen(request) else None
        with pytest.raises(SaveError, match=rf"d\.safetensors.*{hint}"):
            tr.save(f"{place}/d.safetensors", _LARGE)
        between.fault = lambda request: None
        with pytest.raises(NotFoundError):
            tr.restore(f"{place}/d.safetensors")


@pytest.mark.long
def test_what_may_not_be_deleted_is_said_at_once(
    between: Proxy, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused delete is reported at once and not repeated.

    S3 answers a bulk delete with success, and with an error for each refused object.
    """
    ask = between._ask

    def refuse(request: Request, body: bytes) -> Any:
        if not _deletes(request):
            return ask(request, body)
        error = b"<Error><Key>%b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        errors = [error % key for key in _KEY.findall(body)]
        return 200, {}, b"<?xml version='1.0'?><DeleteResult>%b</DeleteResult>" % b"".join(errors)

    monkeypatch.setattr(between, "_ask", refuse)
    begun = len(between.requests)
    tr.save(f"{place}/e", _TREE)
    deletes = [request for request in between.requests[begun:] if _deletes(request)]
    assert len(deletes) == 1 and "the credentials may list, get, put and delete" in caplog.text
    assert _same(f"{place}/e", _TREE)


@pytest.mark.slow
@pytest.mark.parametrize("between", ["s3_server", "google"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "overwrite"),
    [("drop", True), ("lose", True), ("lose", False), ("cut", True), ("short", False), ("503 SlowDown", False)],
)
def test_one_fault_at_any_request_of_a_file_in_parts(between: Proxy, place: str, fault: str, overwrite: bool) -> None:
    """After one fault the complete file is in place, or the error says that it is not, or that this is unknown."""
    old = {"w": np.zeros(10, np.float32)}
    if overwrite:
        tr.save(f"{place}/counted.safetensors", old)
    begun = len(between.requests)
    tr.save(f"{place}/counted.safetensors", _LARGE, overwrite=overwrite)
    for number in sample_points(range(len(between.requests) - begun), first=len(fault) + overwrite):
        path = f"{place}/{number}.safetensors"
        if overwrite:
            tr.save(path, old)
        between.fault = _once(fault, len(between.requests) + number)
        failed = ""
        try:
            tr.save(path, _LARGE, overwrite=overwrite)
        except (SaveError, ExistsError) as error:
            failed = str(error)
        finally:
            between.fault = lambda request: None
        if not failed:
            assert _same(path, _LARGE)
        elif "not confirmed" in failed:
            assert _same(path, _LARGE) or (overwrite and _same(path, old))
        elif overwrite:
            assert _same(path, old), failed
        else:
            with pytest.raises(NotFoundError):
                tr.restore(path)


@pytest.mark.long
def test_a_store_that_takes_nothing_and_has_nothing(
    between: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that can be neither created nor read ends in an error, not in an endless loop."""
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(bucket, "_PAUSE_SECONDS", 0.01)
    between.fault = lambda request: "409 OperationAborted" if _puts_lease(request) else None
    begun = len(between.requests)
    with pytest.raises(TreeringError, match="refuses to create this object"), tr.Checkpointer(f"{place}/run") as ckpts:
        ckpts.save(1, _TREE)
    assert len([request for request in between.requests[begun:] if _puts_lease(request)]) < 200


@pytest.mark.long
def test_a_lease_that_cannot_be_taken_over_ends_in_an_error(
    between: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that returns an old version of the lease ends in an error, not in an endless loop."""
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "LEASE_SECONDS", -1.0)
    with pytest.raises(TreeringError, match="from a cache"), tr.Checkpointer(f"{place}/run") as ckpts:
        dead = heartbeat.WriterRecord(host="another", process=2**22, token="its own", generation=1)
        with stores.get(place).new_file(f"{place}/run/writer.lock", overwrite=True) as lock:
            lock.write(msgspec.json.encode(dead))
        between.fault = lambda request: (
            "412 PreconditionFailed" if _puts_lease(request) and "if-match" in map(str.lower, request.headers) else None
        )
        ckpts.save(1, _TREE)
    assert "acquired from" not in caplog.text


@pytest.mark.long
def test_a_server_that_ignores_conditions_is_refused(between: Proxy, s3_server: str) -> None:
    with proxy(s3_server) as careless:
        ask = careless._ask

        def unconditional(request: Request, body: bytes) -> Any:
            kept = {name: value for name, value in request.headers.items() if not name.lower().startswith("if-")}
            return ask(request._replace(headers=kept), body)

        careless._ask = unconditional  # type: ignore[method-assign]
        buckets = ObjectStore()
        buckets.add(_ROOT, s3.client(careless.url))
        path = f"{_ROOT}/{secrets.token_hex(4)}"
        with stores.using(buckets, "faulty"):
            with pytest.raises(UnsupportedError, match="If-None-Match"):
                tr.save(path, _TREE)
            assert stores.get(path).list(path) == []
        allowed = ObjectStore(conditional=False)
        allowed.add(_ROOT, s3.client(careless.url))
        with stores.using(allowed, "faulty"):
            tr.save(path, _TREE)
            tr.save(path, {"w": np.ones(2)}, overwrite=True)
            assert _same(path, {"w": np.ones(2)})


def _span(request: Request, size: int) -> tuple[int, int]:
    begin, end = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
    return begin, min(end + 1, size)


def _answering(status: int, span: slice, said: tuple[int, int, int], encoding: str = "") -> Any:
    """Returns a function that changes the answer to a range: its status, bytes, Content-Range numbers or encoding."""

    def answer(request: Request, content: bytes) -> tuple[int, dict[str, str], bytes]:
        begin, end = _span(request, len(content))
        data = content if status == 200 else content[begin + span.start : end + span.stop]
        shown = f"bytes {begin + said[0]}-{end - 1 + said[1]}/{len(content) + said[2]}"
        headers = {"Content-Range": shown} if status == 206 else {}
        if encoding:
            data, headers = gzip.compress(data), {**headers, "Content-Encoding": encoding}
        return status, headers, data

    return answer


_SAME = (0, 0, 0)
_UNREADABLE: dict[str, Any] = {
    "ignores ranges": _answering(200, slice(0, 0), _SAME),
    "no range for all": lambda request, content: _answering(
        200 if _span(request, len(content)) == (0, len(content)) else 206, slice(0, 0), _SAME
    )(request, content),
    "all for a part": lambda request, content: _answering(
        206 if _span(request, len(content)) == (0, len(content)) else 200, slice(0, 0), _SAME
    )(request, content),
    "other bytes": lambda request, content: (206, *_answering(206, slice(0, 0), _SAME)(request, content[::-1])[1:]),
    "from the next byte on": _answering(206, slice(1, 0), (1, 0, 0)),
    "fewer": _answering(206, slice(0, -1), (0, -1, 0)),
    "fewer, and says more": _answering(206, slice(0, -1), _SAME),
    "another size": _answering(206, slice(0, 0), (0, 0, 7)),
    "numbers of others": _answering(206, slice(0, 0), (3, 3, 0)),
    "compressed": _answering(206, slice(0, 0), _SAME, "gzip"),
    "nothing": lambda request, content: (404, {}, b"<Error><Code>NoSuchKey</Code></Error>"),
}
_FIRST_SAVES: dict[str, Any] = {
    "native": lambda place: tr.save(f"{place}/c", _TREE),
    "file": lambda place: tr.save(f"{place}/c.safetensors", _TREE),
    "folder": lambda place: tr.save(f"{place}/c", _TREE, format="orbax"),
    "run": lambda place: tr.Checkpointer(f"{place}/run").save(1, _TREE).result(),  # type: ignore[union-attr]
}


@contextlib.contextmanager
def _odd_server(s3_server: str, answer: Any, *, conditional: bool) -> Iterator[str]:
    """Yields a path behind a proxy that changes the answers to ranges."""
    with proxy(s3_server) as odd:
        ask = odd._ask

        def change(request: Request, body: bytes) -> Any:
            ranged = {name: value for name, value in request.headers.items() if name.lower() != "range"}
            if request.method != "GET" or len(ranged) == len(request.headers):
                return ask(request, body)
            status, headers, content = ask(request._replace(headers=ranged), body)
            if status != 200:
                return status, headers, content
            named = {name.title(): value for name, value in request.headers.items()}
            status, new, data = answer(request._replace(headers=named), content)
            kept = {name: value for name, value in headers.items() if name.lower() in ("etag", "last-modified")}
            return status, {**kept, **new}, data

        odd._ask = change  # type: ignore[method-assign]
        buckets = ObjectStore(conditional=conditional)
        buckets.add(_ROOT, s3.client(odd.url, retry_config={"max_retries": 1, "backoff": _QUICK}))
        with stores.using(buckets, "faulty"):
            yield f"{_ROOT}/{secrets.token_hex(4)}"


@pytest.mark.long
@pytest.mark.parametrize("conditional", [False, True], ids=["unconditional", "conditional"])
@pytest.mark.parametrize("fault", _UNREADABLE)
def test_first_save_to_an_inconsistent_server_is_refused(
    s3_server: str, monkeypatch: pytest.MonkeyPatch, conditional: bool, fault: str
) -> None:
    """The first save refuses a server whose puts succeed and whose answers could not be restored."""
    monkeypatch.setattr(bucket, "_PAUSE_SECONDS", 0.001)
    with _odd_server(s3_server, _UNREADABLE[fault], conditional=conditional) as place:
        for save in _FIRST_SAVES.values():
            with pytest.raises(UnsupportedError, match=f"{_ROOT}: expected a server .*asked for its bytes") as refused:
                save(place)
            assert type(refused.value) is UnsupportedError
        left = [name for name in stores.get(place).list(place) if name != "run"]
        assert left == [] and stores.get(place).list(f"{place}/run") in ([], ["writer.lock"])


@pytest.mark.long
@pytest.mark.parametrize("conditional", [False, True], ids=["unconditional", "conditional"])
def test_the_trial_of_a_server_takes_few_requests_once(s3_server: str, conditional: bool) -> None:
    """The test of a server takes few requests, once per process."""
    with proxy(s3_server) as counted:
        buckets = ObjectStore(conditional=conditional)
        buckets.add(_ROOT, s3.client(counted.url))
        with stores.using(buckets, "faulty"):
            place, counts = f"{_ROOT}/{secrets.token_hex(4)}", []
            for n in range(3):
                begun = len(counted.requests)
                tr.save(f"{place}/{n}", _TREE)
                counts.append(len(counted.requests) - begun)
            tr.save(f"{place}/x.safetensors", _TREE)
            assert counts[0] <= counts[1] + 6 and counts[1] == counts[2]
            assert sorted(stores.get(place).list(place)) == ["0", "1", "2", "x.safetensors"]
            assert _same(f"{place}/x.safetensors", _TREE)


@pytest.mark.long
def test_a_server_that_deletes_or_lists_nothing_is_refused(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_PAUSE_SECONDS", 0.001)
    for fault in ("list", "delete"):
        with proxy(s3_server) as odd:
            ask = odd._ask

            def change(request: Request, body: bytes, fault: str = fault, ask: Any = ask) -> Any:
                if fault == "list" and "list-type" in request.path:
                    empty = b"<ListBucketResult><Name>b</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
                    return 200, {"Content-Type": "application/xml"}, empty + b"</ListBucketResult>"
                if fault == "delete" and _deletes(request):
                    named = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in _KEY.findall(body))
                    return 200, {}, b"<DeleteResult>" + named + b"</DeleteResult>"
                return ask(request, body)

            odd._ask = change  # type: ignore[method-assign]
            buckets = ObjectStore(conditional=False)
            buckets.add(_ROOT, s3.client(odd.url))
            with stores.using(buckets, "faulty"), pytest.raises(UnsupportedError, match=f"asked to {fault}"):
                tr.save(f"{_ROOT}/{secrets.token_hex(4)}", _TREE)


@pytest.mark.long
def test_who_may_not_delete_saves_a_file(s3_server: str, caplog: pytest.LogCaptureFixture) -> None:
    """A user who may not delete objects can save a file."""
    with proxy(s3_server) as odd:
        ask = odd._ask

        def change(request: Request, body: bytes) -> Any:
            if _deletes(request):
                return 403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>"
            return ask(request, body)

        odd._ask = change  # type: ignore[method-assign]
        buckets = ObjectStore()
        buckets.add(_ROOT, s3.client(odd.url))
        with stores.using(buckets, "faulty"):
            path = f"{_ROOT}/{secrets.token_hex(4)}/c.safetensors"
            tr.save(path, _TREE)
            assert _same(path, _TREE) and "stays, because it cannot be deleted" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("fault", ["cut", "short", "drop", "409 OperationAborted", "429 TooManyRequests", "400 Odd"])
def test_errors_of_a_store_are_public(between: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Every error that a store causes is of a public type."""
    monkeypatch.setattr(bucket, "_PAUSE_SECONDS", 0.001)
    tr.save(f"{place}/c.safetensors", _TREE)
    with tr.Checkpointer(f"{place}/run") as ckpts:
        ckpts.save(1, _TREE)
    fails = ("GET", "HEAD")
    calls: list[Any] = [tr.restore, tr.open, tr.verify, tr.steps]
    between.fault = lambda request: fault if request.method in fails else None
    for call in calls:
        for path in (f"{place}/first", f"{place}/c.safetensors", f"{place}/run"):
            found: Any = None
            try:
                call(path)
            except Exception as error:
                found = error
            assert found is None or vars(tr.errors).get(type(found).__name__) is type(found), found
            assert found is None or found.entry == type(found).__name__.lower()
    fails = ("GET", "HEAD", "PUT", "POST", "DELETE")
    with pytest.raises(SaveError) as failed:
        tr.save(f"{place}/new", _TREE)
    assert type(failed.value) is SaveError


@pytest.mark.long
def test_an_object_that_comes_while_it_is_looked_up(
    between: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that another process puts while it is being opened is opened."""
    store, asked = stores.get(place), iter([True])

    def absent(self: Bucket, key: str, nbytes: int, *into: memoryview) -> Any:
        if next(asked, False):
            with store.new_file(f"{place}/x", overwrite=False) as file:
                file.write(b"x")
            raise FileNotFoundError
        return beginning(self, key, nbytes, *into)

    beginning = Bucket.get_prefix
    monkeypatch.setattr(Bucket, "get_prefix", absent)
    assert store.open(f"{place}/x").read(0, 1) == b"x"
    with pytest.raises(CorruptError, match="names that begin with this one"):
        store.open(f"{place}/first")
