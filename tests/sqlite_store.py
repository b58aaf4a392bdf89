"""A store of another package, written from the documentation alone: bytes by key in a table of SQLite."""

import contextlib
import pathlib
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator

from treering.stores.key_values import Value


class SqliteValues:
    """The methods of `treering.stores.key_values.KeyValues`. Several processes may use one file."""

    def __init__(self, path: str | pathlib.Path) -> None:
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
