"""Runs the conformance tests on every store, and shows that these tests find broken stores."""

import contextlib
import functools
import ntpath
import os
import pathlib
import posixpath
import secrets
import sqlite3
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import obstore.store
import pytest

import azurite
import gcs
import s3
from treering import stores
from treering.errors import UnsupportedError
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


class _SqliteValues:
    """Bytes by key in a table of SQLite, which several processes may use. Written from the documentation alone."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        with self._open() as db:
            db.execute("CREATE TABLE IF NOT EXISTS kv (key TEXT PRIMARY KEY, data BLOB, modified REAL, version TEXT)")

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=60, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous=OFF")  # only for these tests: a power cut would lose data
            yield db

    def _find(self, db: sqlite3.Connection, key: str) -> Value | None:
        found = db.execute("SELECT key, length(data), modified, version FROM kv WHERE key=?", (key,)).fetchone()
        return found and Value(*found)

    def stat(self, key: str) -> Value | None:
        with self._open() as db:
            return self._find(db, key)

    def list(self, prefix: str) -> Iterable[Value]:
        query = "SELECT key, length(data), modified, version FROM kv WHERE substr(key, 1, ?) = ?"
        with self._open() as db:
            return [Value(*row) for row in db.execute(query, (len(prefix), prefix))]

    def read(self, key: str, begin: int, end: int) -> tuple[bytes, Value]:
        with self._open() as db:
            query = "SELECT substr(data, ?, ?), key, length(data), modified, version FROM kv WHERE key=?"
            found = db.execute(query, (begin + 1, end - begin, key)).fetchone()
        if found is None:
            raise FileNotFoundError(key)
        return found[0] or b"", Value(*found[1:])  # SQLite has NULL for no bytes

    def write(self, key: str, data: bytes, *, exclusive: bool, replaces: str | None) -> Value:
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            found = self._find(db, key)
            if (exclusive and found) or (replaces is not None and (found is None or found.version != replaces)):
                db.execute("ROLLBACK")
                raise FileExistsError(key)
            value = Value(key, len(data), time.time(), secrets.token_hex(8))
            db.execute("INSERT OR REPLACE INTO kv VALUES (?, ?, ?, ?)", (key, data, value.modified, value.version))
            db.execute("COMMIT")
            return value

    def delete(self, key: str) -> None:
        with self._open() as db:
            db.execute("DELETE FROM kv WHERE key=?", (key,))


class TestSqlite(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: pathlib.Path) -> Store:
        return KeyValueStore(_SqliteValues(tmp_path / "store.db"))

    @pytest.fixture
    def root(self) -> str:
        return "sqlite://runs/folder"


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
    ],
)
def test_what_is_wrong_is_found(store: type[MemoryStore], test: str) -> None:
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
