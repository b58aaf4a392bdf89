"""Runs the conformance tests on every store, and shows that these tests find broken stores."""

import contextlib
import functools
import ntpath
import os
import pathlib
import posixpath
import secrets
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import obstore.store
import pytest

import azurite
import gcs
import s3
import sqlite_store
import treering as tr
from sqlite_store import SqliteValues
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
