"""A job in a process of its own, that waits at each request until it is told to go on."""

import atexit
import builtins
import logging
import threading
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import obstore.exceptions

from treering import stores
from treering.errors import TreeringError
from treering.formats.treering import removal
from treering.stores import lease as locks
from treering.stores.objects import bucket, heartbeat, lease
from treering.stores.objects.store import ObjectStore

from . import scenarios
from .server import Answer

SCHEME = "states"
ROOT = f"{SCHEME}://tests"


class KilledError(BaseException):
    """The process that makes the request is dead."""


class Job:
    """What a scenario is given: `report` what the user of the job now relies on. Its requests go to the explorer."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._one = threading.Lock()
        self._dead = False
        self.clock = 0.0

    def begin(self) -> None:
        """A new process: what the last one knew is forgotten."""
        for one in heartbeat._alive.all():
            one.stopped = True
        heartbeat._forget_after_fork()
        self._dead = False

    def end(self) -> None:
        """The end of the process, which lets go of its locks."""
        self._dead = True
        for one in locks._alive.all():
            one.release()

    def report(self, what: Any) -> None:
        """Says that a call has returned."""
        self.ask("report", (what,), {})

    def ask(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Asks, and waits for the answer, however long the explorer lets others go first."""
        with self._one:
            if self._dead:
                raise KilledError
            self._connection.send((name, args, options))
            answer: Answer = self._connection.recv()
            self.clock = answer.clock
            self._dead = answer.error == ("killed", "")
        if self._dead:
            raise KilledError
        if answer.error:
            raise _error(*answer.error)
        return answer.result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The functions of obstore."""

        def ask(client: Any, *args: Any, **options: Any) -> Any:
            args = tuple(one if isinstance(one, str | list) else bytes(one) for one in args)
            result = self.ask(name, args, options)
            return _Got(*result) if name == "get" else result

        return ask


class _Got:
    """The answer to `get`."""

    def __init__(self, meta: dict[str, Any], data: bytes):
        self.meta, self._data = meta, data

    def stream(self, min_chunk_size: int) -> list[bytes]:
        return [self._data]

    def bytes(self) -> bytes:
        return self._data


def serve(connection: Connection, name: str) -> None:
    """Runs one scenario's job after the other: what the other end names, until it hangs up."""
    logging.disable(logging.CRITICAL)
    job = Job(connection)
    bucket.Bucket._obstore = job  # pyright: ignore[reportAttributeAccessIssue]
    bucket._PAUSE_SECONDS = 0
    bucket.now = heartbeat.now = lambda: job.clock
    heartbeat._begin = lambda one: None  # `holds` renews it where that is due
    heartbeat._machine = lambda: name  # another than that of the other jobs, of which only the age of a lease tells
    removal.time = types.SimpleNamespace(time=lambda: job.clock)
    atexit.unregister(lease._release_all)  # the last job may have been killed
    lease.time = types.SimpleNamespace(sleep=lambda seconds: job.ask("sleep", (seconds,), {}))
    while True:
        try:
            scenario, number, *arguments = connection.recv()
        except EOFError:
            return
        buckets = ObjectStore()
        buckets.add(ROOT, object())
        buckets._buckets[ROOT]._honours = True
        stores.register(buckets, SCHEME)
        job.begin()
        error = None
        try:
            scenarios.ALL[scenario].jobs[number](job, *arguments)
        except (TreeringError, OSError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        except KilledError:
            error = "killed"
        finally:
            job.end()
        connection.send(("end", error, {}))


def _error(name: str, text: str) -> Exception:
    kind = getattr(obstore.exceptions, name, None) or getattr(builtins, name)
    return kind(text)
