"""Plans say which job makes how many requests when, and what happens to requests. Explores the states in between."""

import collections
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import random
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener, wait
from typing import Any, NamedTuple, cast

from treering import stores
from treering.stores.objects.store import ObjectStore

from . import job, scenarios
from .scenario import Reports
from .server import EXPIRES_SECONDS, OUTCOMES, Answer, Server

ALL = 10**9  # requests
_KILLED = Answer(None, ("killed", ""), 0.0)
_STOPPED_SECONDS = (0.0, 0.0, 65.0, 100.0)  # leases are valid (twice), must be looked up, have expired
_LATER_SECONDS = 48 * 3600.0  # from the end of the other jobs to the last job
_numbers = itertools.count()  # of local folders


class Moment(NamedTuple):
    """A request, chosen by its text: the `time`-th one, from 1 on, that this regular expression matches.

    The text has the name and the arguments of the request: "put place/step-00000001/treering.json", "report local: 1",
    and for a change of a disk "disk unlink …/a/step-00000001/treering.json".
    """

    pattern: str
    time: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """`turns`: a job, and how many requests it makes next, or the last of them. Afterwards each job runs to its end.

    faults: process, request and outcome; the processes of all jobs are numbered together. A plan has failed if a
        `Moment` in it does not come.
    waited: the seconds that pass whenever a job waits for another job's lease.
    stopped: the seconds that pass after each turn.
    """

    turns: tuple[tuple[int, int | Moment], ...] = ()
    faults: tuple[tuple[int, int | Moment, str], ...] = ()
    waited: float = 100.0
    stopped: float = 0.0


@dataclasses.dataclass
class Count:
    """The results of a scenario."""

    plans: int = 0
    states: int = 0
    buckets: set[int] = dataclasses.field(default_factory=set)  # hashes of contents and reports
    distinct: set[int] = dataclasses.field(default_factory=set)  # the same with the number of requests of each job
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    limits: int = 0  # plans that reached the known limit, see `_StaleDeletes`
    failures: list[str] = dataclasses.field(default_factory=list)


class Explorer:
    """A server, and a process from which the processes of jobs are forked. Used as a context manager."""

    def __init__(self, local: str):
        self.server, self.local = Server(), local
        self.reader = ObjectStore()
        self.reader.add(job.ROOT, self.server.memory)

    def __enter__(self) -> "Explorer":
        context = multiprocessing.get_context("spawn")
        self._orders, there = context.Pipe()
        self._process = context.Process(target=job.serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        self._listener = Listener(os.path.join(self.local, "explorer"), "AF_UNIX", backlog=8)
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._process.join()
        self._listener.close()

    def begin(self, orders: list[job.Order]) -> dict[int, Connection]:
        """Starts processes; returns the connections to them by their numbers."""
        for order in orders:
            self._orders.send(order._replace(address=self._listener.address))
        made = [self._listener.accept() for _ in orders]
        return {one.recv(): one for one in made}

    def requests(self, name: str) -> list[list[int]]:
        """Returns how many requests each process of each job makes if that job runs first."""
        jobs = range(len(scenarios.ALL[name].jobs) - 1)
        plays = (self._run(name, Plan(((number, ALL),)), Count()) for number in jobs)
        return [[play.numbers[who] for who in play.processes(number)] for number, play in enumerate(plays)]

    def explore(self, name: str, plans: Iterator[Plan]) -> Count:
        """Runs plans and returns the results."""
        count = Count()
        for plan in plans:
            self._run(name, plan, count)
        return count

    def _run(self, name: str, plan: Plan, count: Count) -> "_Play":
        play = _Play(self, name, plan, count)
        play.run()
        return play


class _StaleDeletes:
    """Detects that a job whose lease has expired removes another job's manifest.

    It has looked, and then stood still before it asked, and no store deletes what it saw and nothing else: the limit
    that `docs/reference/limits.md` names.
    """

    def __init__(self) -> None:
        self._renewed: dict[int, float] = {}  # by process: when it last put a lease or mark
        self._answered_at: dict[int, float] = {}  # by process: when it got its last answer
        self._putters: dict[str, int] = {}  # by manifest: the process that put it
        self._stale_puts: set[tuple[int, str]] = set()  # manifests that were put after the lease had expired

    def put(self, who: int, key: str, clock: float) -> None:
        """Records an object that was put."""
        if key.endswith(("/writer.lock", ".tmp")):
            self._renewed[who] = clock
        elif key.endswith("/treering.json"):
            self._putters[key] = who
            if self._is_late(who, clock):
                self._stale_puts.add((who, key))

    def answered(self, who: int, clock: float) -> None:
        """Records an answer, after which a process continues."""
        self._answered_at[who] = clock

    def removes_others(self, who: int, keys: str | list[str], clock: float) -> bool:
        """Returns True if a delete is about to do that."""
        keys = [keys] if isinstance(keys, str) else keys
        stood_still = self._is_late(who, clock) and not self._is_late(who, self._answered_at.get(who, clock))
        others = [key for key in keys if self._putters.get(key, who) != who]
        return any(stood_still or (who, key) in self._stale_puts for key in others)

    def _is_late(self, who: int, clock: float) -> bool:
        return clock - self._renewed.get(who, clock) > EXPIRES_SECONDS


class _Countdown:
    """Counts requests up to a given one."""

    def __init__(self, to: int | Moment):
        self._to = to
        self._pattern, self.left = to if isinstance(to, Moment) else ("", to)

    def is_next(self, text: str) -> bool:
        """Counts a request; returns True if it is the given one."""
        self.left -= re.search(self._pattern, text) is not None
        return self.left == 0

    def missed(self) -> str:
        """Returns a message if the given moment has not come, else ""."""
        return f"expected {self._to}, which did not come" if isinstance(self._to, Moment) and self.left > 0 else ""


class _Play:
    """One run of a scenario by a plan."""

    def __init__(self, explorer: Explorer, name: str, plan: Plan, count: Count):
        self._name, self._plan, self._count = name, plan, count
        self._scenario = scenarios.ALL[name]
        self._explorer, self._server, self._reader = explorer, explorer.server, explorer.reader
        self._place, self._local = f"{job.ROOT}/place", f"{explorer.local}/{next(_numbers)}"
        self._turn = _Countdown(0)
        self._faults = [
            (who, _Countdown(at if isinstance(at, Moment) else at + 1), outcome) for who, at, outcome in plan.faults
        ]
        self._last_job = len(self._scenario.jobs) - 1
        self.numbers = [0] * len(self._scenario.jobs) * self._scenario.processes  # of requests so far
        self._started_jobs: set[int] = set()  # jobs
        self._pipes: dict[int, Connection] = {}  # of running processes
        self._waiting: dict[int, Connection] = {}  # of processes that are done and wait for the others of their job
        self._ended: dict[int, str | None] = {}  # ended processes, and their errors
        self._reports: list[tuple[int, Any]] = []
        self._problem = ""
        self._stale_deletes, self._is_known_limit = _StaleDeletes(), False
        self._late_puts: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # arrive again before the last job

    def processes(self, job: int) -> range:
        """Returns the numbers of a job's processes."""
        return range(job * self._scenario.processes, (job + 1) * self._scenario.processes)

    def run(self) -> None:
        """Runs the jobs, and checks the bucket after each request and at the end."""
        self._count.plans += 1
        try:
            with self._reading():
                self._scenario.before(self._place, self._local)
            self._server.adopt()
            for who, requests in self._plan.turns:
                self._serve(who, requests)
                self._problem = self._problem or self._turn.missed()
                self._server.clock += self._plan.stopped
            for who in range(self._last_job):
                self._serve(who, ALL)
            ends = [self._end(number) for number in range(self._last_job)]
            self._check_bucket(lambda place, _: self._scenario.over(place, ends[0], len(self._faults)))
            for args, options in self._late_puts:
                self._server.ask("put", args, options)
            self._serve(self._last_job, ALL)
            if (end := self._end(self._last_job)) is not None:
                self._problem = self._problem or f"the job after them: {end}"
            self._check_bucket(self._scenario.end)
            self._problem = self._problem or "".join(countdown.missed() for _, countdown, _ in self._faults)
        finally:
            for pipe in (*self._pipes.values(), *self._waiting.values()):
                pipe.close()
            self._server.clear()
            shutil.rmtree(self._local, ignore_errors=True)
        self._count.ends[", ".join("good" if end is None else end.partition(":")[0] for end in ends)] += 1
        self._count.limits += self._is_known_limit
        if self._problem and not self._is_known_limit:
            self._count.failures.append(f"{self._name}: {self._plan}: {self._problem}; processes ended: {self._ended}")

    def _end(self, job: int) -> str | None:
        """Returns "killed" if any process of a job was killed, else the job's first error or None."""
        errors = [error for who in self.processes(job) if (error := self._ended[who]) is not None]
        return "killed" if "killed" in errors else next(iter(errors), None)

    def _begin(self, number: int) -> None:
        self._started_jobs.add(number)
        if number == self._last_job:
            self._server.clock += _LATER_SECONDS
        meet = ""
        if self._scenario.processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                meet = f"127.0.0.1:{free.getsockname()[1]}"
        orders = [
            job.Order("", who, self._name, number, rank, self._place, self._local, meet)
            for rank, who in enumerate(self.processes(number))
        ]
        self._pipes.update(self._explorer.begin(orders))

    def _serve(self, number: int, requests: int | Moment) -> None:
        """Answers this many requests of a job, or all up to a moment."""
        if number not in self._started_jobs:
            self._begin(number)
        processes = self.processes(number)
        self._turn = _Countdown(requests)
        while pipes := {self._pipes[who]: who for who in processes if who in self._pipes}:
            for pipe in cast("list[Connection]", wait(pipes)):
                if self._turn.left <= 0:
                    return
                self._receive(pipes[pipe], pipe)
        for who in processes:
            if pipe := self._waiting.pop(who, None):
                pipe.send("all have ended")
                pipe.close()

    def _receive(self, who: int, pipe: Connection) -> None:
        """Receives and answers one request of a process."""
        try:
            name, args, options = pipe.recv()
        except (EOFError, ConnectionError):
            self._ended[who] = "killed"
            self._pipes.pop(who).close()
            if not any("killed" in outcome for _, _, outcome in self._faults):
                self._problem = self._problem or f"process {who} has died"
            return
        if name in ("end", "wrong"):
            self._ended[who] = args
            self._waiting[who] = self._pipes.pop(who)
            if name == "wrong":
                self._problem = self._problem or f"process {who}: {args}"
        elif name == "sleep":
            self._server.clock += self._plan.waited
            pipe.send(Answer(None, None, self._server.clock))
        else:
            pipe.send(self._answer(who, name, args, options))

    def _answer(self, who: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        text = " ".join(str(one) for one in (name, *args) if not isinstance(one, bytes))
        outcome = "".join([outcome for one, at, outcome in self._faults if one == who and at.is_next(text)][-1:])
        self._turn.is_next(text)
        self.numbers[who] += 1
        self._server.clock += 0.01
        try:
            return self._answered(who, outcome, name, args, options)
        finally:
            self._stale_deletes.answered(who, self._server.clock)

    def _answered(self, who: int, outcome: str, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        if outcome == "killed before" or (name in ("report", "disk") and "killed" in outcome):
            return _KILLED
        if name in ("report", "disk"):
            if name == "report":
                self._reports.append((who // self._scenario.processes + 1, *args))
                self._record_state()
            return Answer(None, None, self._server.clock)
        unanswered = Answer(None, ("GenericError", "no answer, max_retries: 0"), self._server.clock)
        if outcome == "lost":
            return unanswered
        if (
            name == "delete"
            and not self._problem
            and self._stale_deletes.removes_others(who, args[0], self._server.clock)
        ):
            self._is_known_limit = True
        answer = self._server.ask(name, args, options)
        if name == "put" and not answer.error:
            self._stale_deletes.put(who, args[0], self._server.clock)
        self._record_state()
        if outcome == "late" and name == "put":
            self._late_puts.append((args, options))
        if outcome == "repeated":
            answer = self._server.ask(name, args, options)
            self._record_state()
        return {"unanswered": unanswered, "killed after": _KILLED}.get(outcome, answer)

    def _record_state(self) -> None:
        """Counts the state, and checks the bucket unless an equal one was checked before."""
        self._count.states += 1
        if self._last_job in self._started_jobs:
            return
        bucket = hash((self._name, self._server.contents(), repr(self._reports)))
        self._count.distinct.add(hash((bucket, *self.numbers)))
        if bucket not in self._count.buckets:
            self._count.buckets.add(bucket)
            self._check_bucket(self._scenario.check)

    def _check_bucket(self, check: Callable[[str, Reports], None]) -> None:
        if self._problem or self._is_known_limit:
            return
        with self._reading():
            try:
                check(self._place, self._reports)
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}, after {self.numbers} requests"

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return stores.using(self._reader, job.SCHEME)


def plans(requests: list[list[int]], count: int, seed: int) -> Iterator[Plan]:
    """Yields every fault of every request and every two moments at which a job stops for the other; then random plans.

    requests: the number of requests of each process of each job. If there are more such plans than half of `count`, a
        random selection of them is used.
    """
    chance = random.Random(seed)
    every = [
        Plan(faults=((who, number, outcome),))
        for who, most in enumerate(itertools.chain(*requests))
        for number in range(most)
        for outcome in OUTCOMES
    ]
    if len(requests) == 2:
        first, second = map(sum, requests)
        moments = itertools.product(range(first + 1), range(1, second + 1), (0.0, 100.0))
        every += [Plan(((0, turn), (1, other), (0, ALL)), stopped=stopped) for turn, other, stopped in moments]
    chosen = every if 2 * len(every) <= count else chance.sample(every, count // 2)
    yield from chosen
    for _ in range(count - len(chosen)):
        yield _random_plan(requests, chance)


def _random_plan(requests: list[list[int]], chance: random.Random) -> Plan:
    turns: list[tuple[int, int]] = []
    if len(requests) == 2:
        first = chance.randrange(2)
        for turn in range(chance.choice((1, 2, 3, 4, 6))):
            number = (first + turn) % 2
            turns.append((number, chance.randrange(1, sum(requests[number]) + 1 if turn < 2 else 12)))
    faults: list[tuple[int, int, str]] = []
    every = list(itertools.chain(*requests))
    for _ in range(chance.choice((0, 1, 1, 2) if turns else (2, 2, 3))):
        who = chance.randrange(len(every))
        faults.append((who, chance.randrange(every[who]), chance.choice(OUTCOMES)))
    return Plan(tuple(turns), tuple(faults), chance.choice((100.0, 100.0, 65.0, 30.0)), chance.choice(_STOPPED_SECONDS))
