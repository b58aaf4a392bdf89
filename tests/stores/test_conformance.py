"""Runs the conformance tests on every store, and shows that these tests find broken stores."""

import contextlib
import functools
import inspect
import ntpath
import os
import pathlib
import posixpath
import re
import secrets
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import obstore.store
import pytest

import azurite
import gcs
import s3
import sqlite_store
import treering as tr
from sqlite_store import SqliteValues
from treering import stores
from treering.errors import MismatchError, RequestError, SaveError, UnsupportedError
from treering.stores.file_io import files_in, is_in_use
from treering.stores.key_values import KeyValueStore, Value
from treering.stores.memory import MemoryStore, MemoryValues
from treering.stores.objects import heartbeat
from treering.stores.objects.store import ObjectStore
from treering.stores.store import Stat, Store, Writer
from treering.testing import StoreConformance
from treering.testing._doubles import QuickDisk

_BUCKET = "bucket://tests"


class TestFilesystem(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return stores.Filesystem(QuickDisk())

    @pytest.fixture
    def root(self, tmp_path: pathlib.Path) -> str:
        return str(tmp_path / "root")


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()

    @pytest.fixture
    def root(self) -> str:
        return "memory://bucket/folder"


class TestSqlite(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: pathlib.Path) -> Store:
        return KeyValueStore(SqliteValues(tmp_path / "store.db"))

    @pytest.fixture
    def root(self) -> str:
        return "sqlite://runs/folder"

    @pytest.mark.long
    def test_of_several_processes_one_wins(self, registered: str, tmp_path: pathlib.Path) -> None:
        """One of several processes that save to one path commits, and the others raise `ExistsError`."""
        code = """
import sys
import numpy as np
import treering as tr
from sqlite_store import SqliteValues
from treering import stores
from treering.stores.key_values import KeyValueStore

stores.register(KeyValueStore(SqliteValues(sys.argv[1])), "sqlite")
try:
    tr.save("sqlite://runs/folder/c", {"w": np.full(300_000, int(sys.argv[2]))})
except tr.errors.ExistsError:
    sys.exit(3)
"""
        command = [sys.executable, "-c", code, str(tmp_path / "store.db")]
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(sqlite_store.__file__), "JAX_PLATFORMS": "cpu"}
        jobs = [subprocess.Popen([*command, str(number)], env=environment) for number in range(3)]
        ends = [job.wait(60) for job in jobs]
        assert sorted(ends) == [0, 3, 3]
        assert tr.restore(f"{registered}/c")["w"][0] == ends.index(0) and tr.verify(f"{registered}/c").ok
        assert len(stores.get(registered).list(f"{registered}/c")) == 2


class _Buckets(StoreConformance):
    """The tests on a client of obstore. Each test uses its own beginning of names."""

    @pytest.fixture
    def store(self, client: Any) -> Store:
        buckets = ObjectStore()
        buckets.add(_BUCKET, client)
        return buckets

    @pytest.fixture
    def root(self) -> str:
        return f"{_BUCKET}/{secrets.token_hex(4)}/folder"


class TestObstoreMemory(_Buckets):
    @pytest.fixture
    def client(self) -> Any:
        return obstore.store.MemoryStore()


class TestRootOfBucket(_Buckets):
    """A store object or a URL without a path."""

    @pytest.fixture
    def client(self) -> Any:
        return obstore.store.MemoryStore()

    @pytest.fixture
    def root(self) -> str:
        return _BUCKET


class TestUrlsOnWindows(TestObstoreMemory):
    """URLs have slashes, even where system paths have backslashes."""

    @pytest.fixture(autouse=True)
    def windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Applies the `os.path` functions of Windows to URLs only, because this machine does not run Windows."""

        def on_windows(name: str) -> Any:
            here, there = getattr(posixpath, name), getattr(ntpath, name)
            return lambda path, *rest: (there if "://" in str(path) else here)(path, *rest)

        functions = ("abspath", "basename", "dirname", "join", "normpath", "realpath", "relpath", "split")
        known = {**vars(posixpath), **{name: on_windows(name) for name in functions}}
        monkeypatch.setattr(os, "path", types.SimpleNamespace(**known))


@pytest.mark.long
class TestS3(_Buckets):
    @pytest.fixture
    def client(self, s3_server: str) -> Any:
        return s3.client(s3_server)


@pytest.mark.slow
class TestAzure(_Buckets):
    @pytest.fixture
    def client(self, azure_server: str) -> Any:
        return azurite.client(azure_server)


@pytest.mark.slow
class TestGoogle(_Buckets):
    @pytest.fixture
    def client(self, gcs_server: str) -> Any:
        return gcs.client(gcs_server)


class _Forgetful(MemoryStore):
    """Lists no names of folders."""

    def list(self, path: str) -> list[str]:
        return [name for name in super().list(path) if (found := self.stat(f"{path}/{name}")) and found.is_file]


class _Overwriting(MemoryStore):
    """Replaces an existing file instead of raising an error."""

    def create(self, path: str, **options: Any) -> Any:
        self.values.delete(_key(path))
        return super().create(path, **options)


class _Careless(MemoryStore):
    """Removes a file although its writer lives."""

    @contextlib.contextmanager
    def unused(self, path: str) -> Iterator[Callable[[], None] | None]:
        with super().unused(path):
            yield lambda: self.delete(path)


class _Hasty(MemoryStore):
    """Removes leftovers before the caller has decided."""

    @contextlib.contextmanager
    def unused(self, path: str) -> Iterator[Callable[[], None] | None]:
        with super().unused(path) as remove:
            if remove:
                remove()
            yield remove


class _Early(MemoryStore):
    """Shows a new file while it is being written."""

    @contextlib.contextmanager
    def new_file(self, path: str, *, overwrite: bool) -> Iterator[Writer]:
        with super().new_file(path, overwrite=overwrite) as writer:
            self.values.write(_key(path), b"early", exclusive=False, replaces=None)
            yield writer


class _Generous(MemoryStore):
    """Gives the lease of a run to every caller."""

    def lease(self, run: str, busy: Callable[[], bool] = lambda: False) -> Any:
        return super().lease(f"{run}/{id(busy)}", busy)


class _Moving(MemoryStore):
    """Moves a folder into an existing one."""

    def move(self, old: str, new: str, *, last: str) -> None:
        _move(self, f"{old}/", f"{new}/")


class _Greedy(MemoryStore):
    """Replaces a folder together with other files in it."""

    def new_folder(self, path: str, **options: Any) -> Any:
        return super().new_folder(path, **{**options, "owned": lambda store, folder: list(files_in(store, folder))})


class _Ageless(MemoryStore):
    """Reports the same version for everything."""

    def stat(self, path: str) -> Stat | None:
        found = super().stat(path)
        return found and found._replace(version=0)


class _Timeless(MemoryStore):
    """Reports no time and no version for a folder."""

    def stat(self, path: str) -> Stat | None:
        found = super().stat(path)
        return Stat("folder", 0, 0.0, None) if found and found.is_folder else found


class _Paging(MemoryStore):
    """Lists only the first page."""

    def list(self, path: str) -> list[str]:
        return super().list(path)[:1000]


class _Prefixed(MemoryStore):
    """Moves every name that begins with the old path, even without a slash."""

    def move(self, old: str, new: str, *, last: str) -> None:
        _move(self, old, new)


class _Racing(MemoryValues):
    """Checks that a key is free and takes it later."""

    def write(self, key: str, data: bytes, *, exclusive: bool, replaces: str | None) -> Value:
        if exclusive and self.stat(key):
            raise FileExistsError(key)
        time.sleep(0.001)
        return super().write(key, data, exclusive=False, replaces=replaces)


class _RacingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.values = _Racing()


def _store_of(write: Callable[..., Value]) -> Callable[[], KeyValueStore]:
    """Returns a maker of stores with another `write`, which gets the values and the arguments."""
    return lambda: KeyValueStore(type("Values", (MemoryValues,), {"write": write})())


def _replaces_absent(self: MemoryValues, key: str, data: bytes, *, exclusive: bool, replaces: str | None) -> Value:
    """Writes a value that is to replace one that was deleted."""
    return MemoryValues.write(self, key, data, exclusive=exclusive, replaces=replaces if self.stat(key) else None)


def _deletes_first(self: MemoryValues, key: str, data: bytes, *, exclusive: bool, replaces: str | None) -> Value:
    """Deletes a value before it writes the new one."""
    if not exclusive and replaces is None:
        self.delete(key)
    return MemoryValues.write(self, key, data, exclusive=exclusive, replaces=replaces)


def _counts_from_one(self: MemoryValues, key: str, data: bytes, *, exclusive: bool, replaces: str | None) -> Value:
    """Uses the first version again after a delete."""
    found = self.stat(key)
    value = MemoryValues.write(self, key, data, exclusive=exclusive, replaces=replaces)
    value = value._replace(version=f"v{int(found.version[1:]) + 1 if found else 1}")
    self.data[key] = value, data
    return value


class _Patterns(MemoryValues):
    """Takes a prefix for a pattern, as LIKE of SQL does."""

    def list(self, prefix: str) -> list[Value]:
        pattern = re.compile(re.escape(prefix).replace("_", ".").replace("%", ".*"), re.IGNORECASE)
        return [value for value in super().list("") if pattern.match(value.key)]


class _Hidden(MemoryStore):
    """Lists no file that is being written."""

    def list(self, path: str) -> list[str]:
        return [name for name in super().list(path) if not is_in_use(self, f"{path}/{name}")]


class _Staring(MemoryStore):
    """Caches `stat` forever once a glance has begun."""

    @contextlib.contextmanager
    def glance(self, path: str) -> Iterator[None]:
        self.stat = functools.cache(super().stat)  # type: ignore[method-assign]
        yield


def _key(path: str) -> str:
    return path.partition("://")[2]


def _move(store: MemoryStore, old: str, new: str) -> None:
    for value in store.values.list(_key(old)):
        data, _ = store.values.read(value.key, 0, value.nbytes)
        store.values.write(_key(new) + value.key[len(_key(old)) :], data, exclusive=False, replaces=None)
        store.values.delete(value.key)


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (_Staring, "a_glance_shows_what_is_there"),
        (_Forgetful, "what_is_written_is_read"),
        (_Overwriting, "a_name_is_given_once"),
        (_Careless, "what_a_living_writer_has_is_not_removed"),
        (_Hasty, "what_a_living_writer_has_is_not_removed"),
        (_Early, "new_file_is_atomic"),
        (_Generous, "a_run_has_one_writer"),
        (_Moving, "folders_are_moved"),
        (_Greedy, "new_folder_is_atomic"),
        (_Ageless, "other_contents_have_another_version"),
        (_Timeless, "a_folder_changes_with_its_contents"),
        (_Paging, "a_folder_has_many_names"),
        (_Prefixed, "a_name_may_begin_with_another"),
        (_RacingStore, "of_many_writers_one_wins"),
        (_Hidden, "a_file_is_seen_while_it_is_written"),
        (_store_of(_replaces_absent), "conditions_of_write_hold"),
        (_store_of(_counts_from_one), "conditions_of_write_hold"),
        (_store_of(_deletes_first), "a_value_is_replaced_in_one_step"),
        (lambda: KeyValueStore(_Patterns()), "prefixes_are_literal"),
    ],
)
def test_what_is_wrong_is_found(store: Callable[[], Store], test: str) -> None:
    """The conformance tests pass with a correct store and fail with each broken one."""
    run = getattr(TestMemory(), f"test_{test}")
    run(store=MemoryStore(), root="memory://bucket/folder")
    with pytest.raises((AssertionError, pytest.fail.Exception, UnsupportedError)):
        run(store=store(), root="memory://bucket/folder")
    for one in heartbeat._heartbeats.all():
        one.stop(delete=False)  # The test that failed has not closed its writers.


class _Broken(MemoryStore):
    """Fails in one of several threads that write at once."""

    def create(self, path: str, **options: Any) -> Any:
        if path.endswith("temporary-3-1"):
            raise RuntimeError("no more names")
        return super().create(path, **options)


def test_what_a_thread_meets_is_what_the_test_raises() -> None:
    """The test raises the error of the thread, instead of waiting for that thread until it times out."""
    with pytest.raises(RuntimeError, match="no more names"):  # and not a timeout of the waiting threads
        TestMemory().test_of_many_writers_one_wins(store=_Broken(), root="memory://bucket/folder")
    for one in heartbeat._heartbeats.all():
        one.stop(delete=False)


class _Faulty(MemoryValues):
    """Raises `error` in the method `on` while it is set; `write` does so once it has written."""

    on, error = "", OSError()

    def _fail(self, method: str) -> None:
        if method == self.on:
            raise self.error

    def stat(self, key: str) -> Value | None:
        self._fail("stat")
        return super().stat(key)

    def list(self, prefix: str) -> list[Value]:
        self._fail("list")
        return super().list(prefix)

    def read(self, key: str, begin: int, end: int) -> tuple[bytes, Value]:
        self._fail("read")
        return super().read(key, begin, end)

    def write(self, key: str, data: bytes, **conditions: Any) -> Value:
        value = super().write(key, data, **conditions)
        if key.endswith("/treering.json"):
            self._fail("write")
        return value


@pytest.fixture
def faulty() -> Iterator[_Faulty]:
    values = _Faulty()
    with stores.using(KeyValueStore(values), "faulty"):
        yield values


@pytest.mark.parametrize("method", ["list", "read"])
def test_errors_of_five_methods_name_the_path(faulty: _Faulty, method: str) -> None:
    """A run neither starts over nor falls back to an earlier step. The error says what failed, and where."""
    run = "faulty://db/run"
    for step in (1, 2):
        tr.save(f"{run}/step-{step:08d}", {"w": np.full(3, step)}, step=step)
    faulty.on = method
    for error in (ConnectionError("lost"), TimeoutError("late"), FileNotFoundError(2, "gone", "/data/values.tar")):
        if method == "read" and isinstance(error, FileNotFoundError):
            continue  # It says that the value is absent.
        faulty.error = error
        with tr.Checkpointer(run) as ckpts, pytest.raises(RequestError) as caught:
            ckpts.restore_or_init(lambda: {"w": np.zeros(3)})
        assert str(caught.value).startswith(run) and caught.value.__cause__ is error
        assert f"`{method}` raised {type(error).__name__}: {error}; try again" in str(caught.value)
    faulty.error = PermissionError(13, "not allowed")
    with pytest.raises(PermissionError, match=f"not allowed: '{run}"):
        tr.restore(run)
    faulty.on = ""
    assert tr.restore(run)["w"][0] == 2


@pytest.mark.parametrize("error", [TimeoutError("no reply"), OSError(5, "no reply")], ids=["time-out", "EIO"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_write_may_raise_after_it_has_written(faulty: _Faulty, error: OSError, overwrite: bool) -> None:
    """The save finds its manifest in place, succeeds, and leaves no other files."""
    path = "faulty://db/c"
    if overwrite:
        tr.save(path, {"w": np.zeros(3)})
    faulty.on, faulty.error = "write", error
    tr.save(path, {"w": np.ones(3)}, overwrite=overwrite)
    assert tr.restore(path)["w"][0] == 1 and len(stores.get(path).list(path)) == 2


@pytest.mark.parametrize(
    ("method", "answer", "found"),
    [
        ("write", lambda value: None, "found None"),
        ("write", lambda value: value._replace(version=None), "found Value(key='db/c"),
        ("stat", lambda value: types.SimpleNamespace(**value._asdict()), "found namespace(key='db/c"),
        ("list", lambda values: [one.key for one in values], "found 'db/c"),
        ("read", lambda answer: answer[0], "found b'"),
        ("read", lambda answer: (answer[0][:-1], answer[1]), "bytes, found"),
    ],
)
def test_answers_of_five_methods_are_checked(method: str, answer: Callable[[Any], Any], found: str) -> None:
    """The error names the method, and says which values it returns."""

    def wrong(self: Any, *arguments: Any, **options: Any) -> Any:
        right = getattr(MemoryValues, method)(self, *arguments, **options)
        return right if method != "write" and not right else answer(right)

    values = type("Wrong", (MemoryValues,), {} if method == "list" else {method: wrong})()
    with stores.using(KeyValueStore(values), "wrong"), pytest.raises(OSError, match="wrong://db/c") as caught:
        tr.save("wrong://db/c", {"w": np.zeros(3)})
        values.list = wrong.__get__(values)
        tr.steps("wrong://db/c")
    assert isinstance(caught.value, RequestError | SaveError)
    assert f"expected `{method}` to return" in str(caught.value) and found in str(caught.value)


@pytest.mark.parametrize(
    ("store", "scheme", "problem"),
    [
        (MemoryValues(), "mine", "expected a store, found a MemoryValues without `has_folders`"),
        (MemoryStore, "mine", "expected a store, found a class"),
        (MemoryStore(), "mine://", "'mine://': expected the name of a scheme alone"),
        (MemoryStore(), 5, "5: expected the name of a scheme alone"),
    ],
)
def test_only_stores_and_names_are_registered(store: Any, scheme: Any, problem: str) -> None:
    with pytest.raises(MismatchError, match=problem):
        stores.register(store, scheme)


def test_an_unknown_scheme_names_the_known_ones(faulty: _Faulty) -> None:
    with pytest.raises(UnsupportedError, match=r"nowhere://x: .* faulty, .* s3, .*; treering.stores.register"):
        tr.save("nowhere://x", {})


@pytest.mark.parametrize("name", ["store", "root"])
def test_missing_fixtures_of_the_suite_are_named(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"_Buckets: define the fixture `{name}`"):
        inspect.unwrap(getattr(StoreConformance, name))(_Buckets())
