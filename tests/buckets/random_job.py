"""One job of `random_hosts`: its processes are threads, with the faults of a plan."""

import os
import pickle
import traceback
import types
from typing import Any, NamedTuple

import numpy as np
import obstore

import treering as tr
from thread_jobs import current_process, processes
from treering import stores
from treering._processes import assignment
from treering._run.tiers import exchange
from treering.errors import CorruptError, NotFoundError, PeerError, SaveError, TreeringError
from treering.formats.treering import removal
from treering.stores.objects import bucket, heartbeat, lease
from treering.stores.objects.store import ObjectStore
from treering.testing._doubles import SteppedDisk

from .job import _error, _Got
from .server import Answer, Server

SCHEME = "random"
ROOT = f"{SCHEME}://tests"
PLACE = f"{ROOT}/place"


class Plan(NamedTuple):
    """One job. Process n uses the disk named by letter n of `disks`.

    kill_at: the number of the change or request of `victim` at which it is killed; if it is None, of all processes,
        which are killed together.
    faults: the numbers of requests of the job, and their outcomes.
    unreachable: the numbers of the reads from peers that fail. flipped: those that bring a flipped bit.
    uploads, copies: for each step, True if the background work is done before the next step.
    """

    disks: str
    steps: int
    copies_wanted: int
    kill_at: int = 0
    victim: int | None = None
    faults: tuple[tuple[int, str], ...] = ()
    unreachable: frozenset[int] = frozenset()
    flipped: frozenset[int] = frozenset()
    uploads: tuple[bool, ...] = ()
    copies: tuple[bool, ...] = ()


class Outcome(NamedTuple):
    """What a job leaves: its reports, the bucket with times of changes, late requests, and what went wrong."""

    reports: list[tuple[Any, ...]]
    objects: dict[str, tuple[bytes, float]]
    late: list[tuple[Any, Any]]
    clock: float
    changes: int
    problem: str


def tree(value: int) -> dict[str, Any]:
    """Returns the state with a number. Its arrays are random, so that no part of one state is part of another."""
    chance = np.random.default_rng(value)
    return {
        "w": chance.standard_normal((5, 8)),
        "b": chance.integers(0, 256, 37, dtype=np.uint8),
        "n": value,
        "lists": [chance.standard_normal(3).astype(np.float32), float(value), f"text {value}"],
    }


def is_same(found: Any, value: int) -> bool:
    """Returns True if a tree is the state with a number, bit by bit."""
    return pickle.dumps(_plain(found)) == pickle.dumps(_plain(tree(value)))


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return [(key, _plain(node[key])) for key in sorted(node)]
    if isinstance(node, list | tuple):
        return [_plain(one) for one in node]
    return (node.dtype.str, node.shape, node.tobytes()) if isinstance(node, np.ndarray) else (str(type(node)), node)


class _Clients:
    """Stands for obstore: answers the requests of all processes of a job, with the faults of its plan."""

    def __init__(self, running: "_Running", server: Server):
        self._running, self.server = running, server
        self.late: list[tuple[Any, Any]] = []
        self._count = 0
        self._lists: dict[str, Answer] = {}  # the last answers to listings

    def __getattr__(self, name: str) -> Any:
        def ask(client: Any, *args: Any, **options: Any) -> Any:
            self._running.step()
            self._count += 1
            outcome = dict(self._running.plan.faults).get(self._count, "")
            args = tuple(one if isinstance(one, str | list) else bytes(one) for one in args)
            self.server.clock += 0.01
            answer = self._answer(name, args, options, outcome)
            if answer.error:
                raise _error(*answer.error)
            return _Got(*answer.result) if name == "get" else answer.result

        return ask

    def _answer(self, name: str, args: Any, options: Any, outcome: str) -> Answer:
        unanswered = Answer(None, ("GenericError", "no answer, max_retries: 0"), self.server.clock)
        if outcome == "lost":
            return unanswered
        if outcome == "stale" and (old := self._lists.get(f"{name} {options}")):
            return old
        answer = self.server.ask(name, args, options)
        if name.startswith("list"):
            self._lists[f"{name} {options}"] = answer
        if outcome == "late" and name == "put":
            self.late.append((args, options))
        if outcome == "repeated":
            answer = self.server.ask(name, args, options)
        return unanswered if outcome == "unanswered" else answer


class _Disk(SteppedDisk):
    """The disks of a job. A killed process cannot use them."""

    running: "_Running"

    def step(self, number: int, name: str, operation: Any, args: tuple[Any, ...]) -> Any:
        self.running.step()
        return operation(*args)


class _Peers:
    """Stands for `PeerFiles`: reads other hosts' disks."""

    def __init__(self, running: "_Running", index: int, host: int):
        self._running, self.index, self.host = running, index, host

    def read_into(
        self, process: int, folder: str, name: str, target: memoryview, offset: int, version: Any = None
    ) -> tuple[int, int, int]:
        running = self._running
        running.job.check_alive()
        running.reads += 1
        if process in running.job.dead or running.reads in running.plan.unreachable:
            raise PeerError(f"{folder}/{name}: process {process} does not answer")
        with open(f"{running.local}/{running.plan.disks[process]}/{folder}/{name}", "rb") as file:
            file.seek(offset)
            data = bytearray(file.read(len(target)))
            there = os.fstat(file.fileno())
        if len(data) < len(target):
            raise CorruptError(f"{folder}/{name}: it is cut short")
        if running.reads in running.plan.flipped and data:
            data[len(data) // 2] ^= 4
        target[:] = data
        return there.st_size, there.st_mtime_ns, there.st_ino

    def close(self) -> None: ...


class _Running:
    """One job in a process of its own, which ends with it."""

    def __init__(self, plan: Plan, local: str, objects: dict[str, tuple[bytes, float]], clock: float, number: int):
        self.plan, self.local, self.number = plan, local, number
        self.reports: list[tuple[Any, ...]] = []
        self.changes = self.reads = 0
        self.clients = _Clients(self, server_with(objects, clock))
        self.finish: Any = None

    def step(self) -> None:
        """Counts a change of a disk or a request. Kills the victim when its time has come."""
        self.job.check_alive()
        victim = self.plan.victim
        self.changes += victim is None or current_process() == victim
        if 0 < self.changes == self.plan.kill_at:
            if victim is None:
                self.finish(self.outcome(""))
            else:
                self.job.kill(victim)
            self.job.check_alive()

    def outcome(self, problem: str) -> Outcome:
        return Outcome(
            self.reports, objects_of(self.clients.server), self.clients.late, self.clients.server.clock, self.changes,
            problem,
        )  # fmt: skip

    def run(self) -> Outcome:
        self._simulate()
        with processes(len(self.plan.disks)) as self.job:
            self.job.run(self._process)
        expected = (TreeringError, OSError)
        is_calm = not (self.plan.faults or self.plan.kill_at or self.plan.unreachable or self.plan.flipped)
        problems = [
            "".join(traceback.format_exception(error))
            for index, error in sorted(self.job.errors.items())
            if is_calm or not (isinstance(error, expected) or index in self.job.dead)
        ]
        return self.outcome("\n".join(problems))

    def _simulate(self) -> None:
        bucket.Bucket._obstore = self.clients  # type: ignore[assignment]
        bucket._PAUSE_SECONDS, bucket._OBSTORE._first_process = 0, None
        clock = lambda: self.clients.server.clock  # noqa: E731
        bucket.now = heartbeat.now = clock
        heartbeat._start_renewals = lambda one: None
        removal.time = types.SimpleNamespace(time=clock)  # type: ignore[assignment]

        def sleep(seconds: float) -> None:
            self.clients.server.clock += 100.0

        lease.time = types.SimpleNamespace(sleep=sleep)  # type: ignore[assignment]
        buckets = ObjectStore()
        buckets.add(ROOT, object())
        buckets._buckets[ROOT]._is_verified = True
        stores.register(buckets, SCHEME)
        disk = _Disk()
        disk.running = self
        stores.register(stores.Filesystem(disk))
        assignment._MIN_CUT_BYTES = 8  # small, so that each process writes something
        exchange.peer_files.join = lambda call, store, root, host: _Peers(self, call.index, host)  # type: ignore[assignment]

    def report(self, *what: Any) -> None:
        self.job.check_alive()
        self.reports.append((current_process(), *what))

    def _process(self, index: int) -> None:
        plan = self.plan
        ckpts = tr.Checkpointer(
            PLACE, local=f"{self.local}/{plan.disks[index]}", keep=tr.keep.last(2), timeout=5,
            local_copies=plan.copies_wanted,
        )  # fmt: skip
        try:
            found = ckpts.restore(read="each")
        except NotFoundError:
            step = 0
        except CorruptError:
            self.report("restored", -1, 0)
            return
        else:
            step, value = ckpts.restored_step or 0, found["n"]
            if not is_same(found, value):
                raise AssertionError(f"step {step}: not a tree that was saved: {found}")
            self.report("restored", step, value)
        if not step:
            self.report("restored", 0, 0)
        directory: Any = ckpts._directory
        for n in range(plan.steps):
            step += 1
            value = 1000 * self.number + step
            self.report("saving", step, value)
            ckpts.save(step, tree(value))
            ckpts.wait()
            self.report("committed", step, value)
            if plan.copies[n] and directory.host_changes and directory.host_changes._copies:
                directory.host_changes._copies.wait()
            if plan.uploads[n]:
                directory._uploader.wait()
        try:
            ckpts.close()
        except SaveError as error:
            if "uploading them failed" not in str(error):
                raise
            self.report("not uploaded", step, str(error))  # A local copy is damaged; it is named.
        else:
            self.report("closed", step, 0)


def server_with(objects: dict[str, tuple[bytes, float]], clock: float) -> Server:
    """Returns a server with objects that have these times of change."""
    server = Server()
    server.clock = clock
    for key, (data, modified) in objects.items():
        obstore.put(server.memory, key, data)
        server._note(key, data)
        server._modified[key] = modified
    return server


def objects_of(server: Server) -> dict[str, tuple[bytes, float]]:
    """Returns the objects of a server, and when each was changed."""
    return {
        key: (bytes(obstore.get(server.memory, key).bytes()), modified) for key, modified in server._modified.items()
    }


def run_job(plan: Plan, local: str, objects: dict[str, tuple[bytes, float]], clock: float, number: int) -> Outcome:
    """Runs a job in a forked process, so that a killed job leaves nothing in this one."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(read)

            def finish(outcome: Outcome) -> None:
                with open(write, "wb") as file:
                    pickle.dump(outcome, file)
                os._exit(0)

            running = _Running(plan, local, objects, clock, number)
            running.finish = finish
            finish(running.run())
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    with open(read, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else Outcome([], objects, [], clock, 0, "the job ended without an outcome")
