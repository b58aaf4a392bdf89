"""A job in its own processes, which wait at each request until the explorer answers."""

import atexit
import builtins
import logging
import os
import signal
import tempfile
import threading
import types
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import obstore.exceptions

import treering as tr
from treering import stores
from treering._processes import assignment
from treering.errors import TreeringError
from treering.formats.treering import removal
from treering.stores.objects import bucket, heartbeat, lease
from treering.stores.objects.store import ObjectStore

from . import scenarios
from .server import Answer

SCHEME = "states"
ROOT = f"{SCHEME}://tests"
_CHANGES = ("make_dir", "remove_dir", "hard_link", "link", "rename", "rename_new", "exchange", "unlink", "create")


class Order(NamedTuple):
    """What process `rank` of job `number` of a scenario does. Its processes find each other at `meet`.

    The process connects to `address` and says that it is process `who`.
    """

    address: str
    who: int
    scenario: str
    number: int
    rank: int
    place: str
    local: str
    meet: str


class Job:
    """The first argument of a scenario's jobs. Its requests go to the explorer."""

    def __init__(self, connection: Connection, rank: int):
        self._connection = connection
        self._ask_lock = threading.Lock()
        self.rank = rank
        self.clock = 0.0

    def report(self, what: Any) -> None:
        """Reports that a call has returned, so the user of the job relies on its result."""
        self.ask("report", (what,), {})

    def ask(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Sends a request and waits for the answer, however long the explorer serves other jobs first."""
        with self._ask_lock:
            try:
                self._connection.send((name, args, options))
                answer: Answer = self._connection.recv()
            except (EOFError, OSError):  # the explorer has closed the connection
                os._exit(1)
            if answer.error == ("killed", ""):
                os.kill(os.getpid(), signal.SIGKILL)
            self.clock = answer.clock
        if answer.error:
            raise _error(*answer.error)
        return answer.result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Stands for the functions of obstore."""

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


def serve(orders: Connection) -> None:
    """Starts a process for each order, until the other end closes the connection."""
    logging.disable(logging.CRITICAL)
    # The forked processes share the modules that this loads.
    with tempfile.TemporaryDirectory() as folder, tr.Checkpointer(f"{folder}/run", local=f"{folder}/near") as ckpts:
        ckpts.save(1, {"w": np.zeros(1)})
        ckpts.restore()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children are not waited for
    while True:
        try:
            order = Order(*orders.recv())
        except EOFError:
            return
        if os.fork() == 0:
            orders.close()
            _do(order)


def _do(order: Order) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    atexit.unregister(lease._release_all)
    connection = Client(order.address)
    connection.send(order.who)
    job = Job(connection, order.rank)
    _simulate(job)
    scenario = scenarios.ALL[order.scenario]
    end: tuple[str, str | None] = ("end", None)
    try:
        if scenario.processes > 1:
            _join(job, order.meet, scenario.processes)
        scenario.jobs[order.number](job, order.place, order.local)
    except (TreeringError, OSError) as raised:
        end = "end", f"{type(raised).__name__}: {raised}"
    except BaseException as raised:
        end = "wrong", f"{type(raised).__name__}: {raised}"
    with job._ask_lock:  # From here on, no other thread of this process sends a request.
        connection.send((*end, {}))
        try:
            connection.recv()  # Answered when all processes are here: process 0 runs the service that they need.
        finally:
            os._exit(0)


def _simulate(job: Job) -> None:
    bucket.Bucket._obstore = job  # pyright: ignore[reportAttributeAccessIssue]
    bucket._PAUSE_SECONDS = 0
    bucket.now = heartbeat.now = lambda: job.clock
    heartbeat._start_renewals = lambda one: None  # no thread: `is_valid` renews it when that is due
    removal.time = types.SimpleNamespace(time=lambda: job.clock)
    lease.time = types.SimpleNamespace(sleep=lambda seconds: job.ask("sleep", (seconds,), {}))
    buckets = ObjectStore()
    buckets.add(ROOT, object())
    buckets._buckets[ROOT]._is_verified = True
    stores.register(buckets, SCHEME)


def _join(job: Job, meet: str, count: int) -> None:
    """Makes this process one of several of a job, with real JAX. Changes of its disk become requests too."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # JAX reports killed processes there
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(meet, count, job.rank)
    assignment._MIN_CUT_BYTES = 8  # small, so that each process writes something

    def asking(name: str) -> Callable[..., Any]:
        def change(self: Any, *args: Any) -> Any:
            job.ask("disk", (name, *map(str, args)), {})
            return getattr(stores.posix.Disk, name)(self, *args)

        return change

    disk = type("Asking", (stores.posix.Disk,), {name: asking(name) for name in _CHANGES})
    stores.register(stores.Filesystem(disk()))


def _error(name: str, text: str) -> Exception:
    kind = getattr(obstore.exceptions, name, None) or getattr(builtins, name)
    return kind(text)
