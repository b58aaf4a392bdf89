"""What goes wrong on the way to a bucket: a save is there as a whole or not at all; nothing wrong is ever read."""

import datetime
import logging
import re
import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import s3
import treering as tr
from fault_proxy import Proxy, Request, proxy
from treering import stores
from treering.errors import CorruptError, ExistsError, NotFoundError, SaveError, TreeringError, UnsupportedError
from treering.stores.objects.bucket import Bucket
from treering.stores.objects.store import ObjectStore

_ROOT = "faulty://tests"
_TREE = {"w": np.arange(300_000, dtype=np.float32), "b": np.ones(3)}


@pytest.fixture
def between(s3_server: str) -> Iterator[Proxy]:
    """The proxy before the server; all paths with the scheme `faulty` go through it."""
    with proxy(s3_server) as one:
        buckets = ObjectStore()
        buckets.add(_ROOT, s3.client(one.url, retry_config={"max_retries": 2, "backoff": _QUICK}))
        with stores.using(buckets, "faulty"):
            yield one


@pytest.fixture
def place(between: Proxy) -> str:
    """A path in the bucket, where the server was seen to keep to conditions."""
    place = f"{_ROOT}/{secrets.token_hex(4)}"
    tr.save(f"{place}/first", {"a": 1})
    return place


_QUICK: Any = {"init_backoff": datetime.timedelta(milliseconds=5), "base": 2}
_FAULTS = ["drop", "lose", "twice", "cut", "late", "503 SlowDown", "429 TooManyRequests", "500 InternalError"]


def _once(fault: str, which: int) -> Any:
    """Does it to the request of this number, and to no other."""
    return lambda request: fault if request.number == which else None


def _same(path: str, tree: Any) -> bool:
    found = tr.restore(path)
    return all(np.array_equal(found[name], tree[name]) for name in tree)


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fault", _FAULTS)
def test_one_fault_at_any_request_of_a_save(between: Proxy, place: str, fault: str, overwrite: bool) -> None:
    """It is done, or an error says that it is not, and what was there is."""
    old = {"w": np.zeros(10)}
    tr.save(f"{place}/counted", old)
    begun = len(between.requests)
    tr.save(f"{place}/counted", _TREE, overwrite=overwrite or True)
    for number in range(len(between.requests) - begun):
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
        if failed is None:
            assert _same(path, _TREE)
        elif overwrite:
            assert _same(path, old)
        else:
            with pytest.raises(NotFoundError):
                tr.restore(path)
        tr.save(path, _TREE, overwrite=True)  # whatever was left behind is in nobody's way
        names = stores.of(path).list(path)
        assert len(names) == 2 and all(re.fullmatch(r"treering\.json|arrays-\S*", name) for name in names), names


@pytest.mark.long
@pytest.mark.parametrize("fault", ["drop", "cut", "flip", "short", "503 SlowDown", "500 InternalError"])
def test_one_fault_at_any_request_of_a_restore(between: Proxy, place: str, fault: str) -> None:
    """Nothing but what was saved is ever returned."""
    path = f"{place}/c"
    tr.save(path, _TREE)
    begun = len(between.requests)
    assert _same(path, _TREE)
    count = len(between.requests) - begun
    for number in range(count):
        between.fault = _once(fault, len(between.requests) + number)
        try:
            assert _same(path, _TREE)
        except TreeringError:
            assert fault in ("flip", "short")
        finally:
            between.fault = lambda request: None


def test_a_flipped_bit_on_the_way_is_read_again_and_reported(
    between: Proxy, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"{place}/c"
    tr.save(path, _TREE)
    flipped = []

    def flip(request: Request) -> str | None:
        if request.method == "GET" and "arrays-" in request.path and not flipped:
            flipped.append(request)
            return "flip"
        return None

    between.fault = flip
    with caplog.at_level(logging.WARNING):
        assert _same(path, _TREE)
    assert flipped and "came wrong at first" in caplog.text


def test_what_stays_wrong_is_damage(between: Proxy, place: str) -> None:
    path = f"{place}/c"
    tr.save(path, _TREE)
    between.fault = lambda request: "flip" if "arrays-" in request.path and request.method == "GET" else None
    with pytest.raises(CorruptError):
        tr.restore(path)


def test_a_lost_answer_to_the_manifest_is_no_failure(between: Proxy, place: str) -> None:
    path = f"{place}/c"
    between.fault = lambda request: (
        "lose" if request.method == "PUT" and request.path.endswith("/treering.json") and not lost(request) else None
    )
    seen: list[int] = []

    def lost(request: Request) -> bool:
        seen.append(request.number)
        return len(seen) > 1

    tr.save(path, _TREE)
    assert len(seen) == 2 and _same(path, _TREE)


@pytest.mark.long
def test_a_save_that_fails_leaves_nothing_that_is_still_on_its_way(between: Proxy, place: str) -> None:
    seen: list[str] = []

    def fail_the_second(request: Request) -> str | None:
        if request.method == "PUT" and "arrays-" in request.path:
            seen.append(request.path)
            if seen[1:2] != [request.path]:
                return "late"
            end = time.monotonic() + 20
            while len(seen) < 3 and time.monotonic() < end:  # or it would fail before the others are on their way
                time.sleep(0.01)
            return "403 AccessDenied"
        return None

    between.fault = fail_the_second
    with pytest.raises(SaveError, match="credentials"):
        tr.save(f"{place}/c", {"w": np.zeros(100 << 20, np.uint8)})
    assert len(seen) > 2 and stores.of(place).list(f"{place}/c") == []


def test_a_list_that_fails_is_never_an_empty_run(between: Proxy, place: str) -> None:
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
def test_what_is_not_allowed_is_said(between: Proxy, place: str, answer: str, hint: str) -> None:
    tr.save(f"{place}/c", _TREE)
    between.fault = lambda request: answer
    for call in (lambda: tr.save(f"{place}/d", _TREE), lambda: tr.restore(f"{place}/c"), lambda: tr.steps(place)):
        with pytest.raises(TreeringError, match=hint):
            call()
    between.fault = lambda request: answer if request.method == "PUT" else None
    with pytest.raises(SaveError, match=hint):
        tr.save(f"{place}/d", _TREE)
    between.fault = lambda request: answer if request.method == "DELETE" else None
    tr.save(f"{place}/e", _TREE)  # what could not be removed is logged
    assert _same(f"{place}/e", _TREE)


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
            assert stores.of(path).list(path) == []
        allowed = ObjectStore(conditional=False)
        allowed.add(_ROOT, s3.client(careless.url))
        with stores.using(allowed, "faulty"):
            tr.save(path, _TREE)
            tr.save(path, {"w": np.ones(2)}, overwrite=True)
            assert _same(path, {"w": np.ones(2)})


def test_an_object_that_comes_while_it_is_looked_up(
    between: Proxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = stores.of(place), iter([True])

    def absent(self: Bucket, key: str, nbytes: int) -> Any:
        if next(asked, False):
            with store.new_file(f"{place}/x", overwrite=False) as file:
                file.write(b"x")
            raise FileNotFoundError
        return beginning(self, key, nbytes)

    beginning = Bucket.beginning
    monkeypatch.setattr(Bucket, "beginning", absent)
    assert store.open(f"{place}/x").read(0, 1) == b"x"
    with pytest.raises(CorruptError, match="names that begin with this one"):
        store.open(f"{place}/first")
