"""A job in processes of its own, which wait at each request until they are told to go on."""

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
    """What process `rank` of the `number`-th job of a scenario is to do. `meet`: where its processes find each other.

    It connects to `address`, and says that it is `who`.
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
    """What a scenario is given: `report` what the user of the job now relies on. Its requests go to the explorer."""

    def __init__(self, connection: Connection, rank: int):
        self._connection = connection
        self._one = threading.Lock()
        self.rank = rank
        self.clock = 0.0

    def report(self, what: Any) -> None:
        """Says that a call has returned."""
        self.ask("report", (what,), {})

    def ask(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Asks, and waits for the answer, however long the explorer lets others go first."""
        with self._one:
            try:
                self._connection.send((name, args, options))
                answer: Answer = self._connection.recv()
            except (EOFError, OSError):  # the explorer has given up
                os._exit(1)
            if answer.error == ("killed", ""):
                os.kill(os.getpid(), signal.SIGKILL)
            self.clock = answer.clock
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


def serve(orders: Connection) -> None:
    """Begins a process for each order, until the other end hangs up."""
    logging.disable(logging.CRITICAL)
    # What it loads for this no process of a job need load.
    with tempfile.TemporaryDirectory() as folder, tr.Checkpointer(f"{folder}/run", local=f"{folder}/near") as ckpts:
        ckpts.save(1, {"w": np.zeros(1)})
        ckpts.restore()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
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
    _simulate(job, f"machine {order.who}")
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
    with job._one:  # no other thread says anything any more
        connection.send((*end, {}))
        try:
            connection.recv()  # when all its processes have come here: process 0 has what they meet by
        finally:
            os._exit(0)


def _simulate(job: Job, machine: str) -> None:
    bucket.Bucket._obstore = job  # pyright: ignore[reportAttributeAccessIssue]
    bucket._PAUSE_SECONDS = 0
    bucket.now = heartbeat.now = lambda: job.clock
    heartbeat._begin = lambda one: None  # `holds` renews it where that is due
    heartbeat._machine = lambda: machine  # another than that of the other jobs, of which only the age of a lease tells
    removal.time = types.SimpleNamespace(time=lambda: job.clock)
    lease.time = types.SimpleNamespace(sleep=lambda seconds: job.ask("sleep", (seconds,), {}))
    buckets = ObjectStore()
    buckets.add(ROOT, object())
    buckets._buckets[ROOT]._honours = True
    stores.register(buckets, SCHEME)


def _join(job: Job, meet: str, count: int) -> None:
    """Makes this a process of a job of several, in which JAX is real; what it changes on its disk is asked for, too."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # JAX tells of those that were killed
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(meet, count, job.rank)
    assignment._MIN_CUT_BYTES = 8  # so that each of them writes something

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
