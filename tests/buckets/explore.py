"""Plans of which job makes how many requests when, and of what becomes of requests; and what is found between them."""

import collections
import contextlib
import dataclasses
import itertools
import multiprocessing
import random
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from treering import stores
from treering.stores.objects.store import ObjectStore

from . import job, scenarios
from .server import EXPIRES_SECONDS, OUTCOMES, Answer, Server

ALL = 10**9  # requests
_KILLED = Answer(None, ("killed", ""), 0.0)
_STOPPED_SECONDS = (0.0, 0.0, 65.0, 100.0)  # leases hold, are to be looked up, have run out
_LATER_SECONDS = 48 * 3600.0  # after the end of the others the last job comes
_numbers = itertools.count()  # of local folders


@dataclasses.dataclass(frozen=True)
class Plan:
    """`turns`: a job and how many requests of it come next; then the rest of each job. `faults`: job, request, outcome.

    waited: the seconds that pass whenever a job waits for another's lease. stopped: those after each turn.
    """

    turns: tuple[tuple[int, int], ...] = ()
    faults: tuple[tuple[int, int, str], ...] = ()
    waited: float = 100.0
    stopped: float = 0.0


@dataclasses.dataclass
class Count:
    """What was looked at."""

    plans: int = 0
    states: int = 0
    buckets: set[int] = dataclasses.field(default_factory=set)  # contents, and what was reported by then
    distinct: set[int] = dataclasses.field(default_factory=set)  # those, and how far each job had come
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    limits: int = 0  # plans that came to the known one, see `_Late`
    failures: list[str] = dataclasses.field(default_factory=list)


class Explorer:
    """A server, and processes for the jobs that use it. Made within a `with` block."""

    def __init__(self, local: str):
        self.server, self.local = Server(), local
        self.reader = ObjectStore()
        self.reader.add(job.ROOT, self.server.memory)
        self.pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> "Explorer":
        context = multiprocessing.get_context("spawn")
        for number in range(3):
            here, there = context.Pipe()
            process = context.Process(target=job.serve, args=(there, f"machine {number}"), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self._processes, strict=True):
            pipe.close()
            process.join()

    def requests(self, name: str) -> list[int]:
        """How many requests each job of a scenario makes that comes first."""
        jobs = range(len(scenarios.ALL[name].jobs) - 1)
        return [self._run(name, Plan(((number, ALL),)), Count())[number] for number in jobs]

    def explore(self, name: str, plans: Iterator[Plan]) -> Count:
        """Looks at all that plans lead to."""
        count = Count()
        for plan in plans:
            self._run(name, plan, count)
        return count

    def _run(self, name: str, plan: Plan, count: Count) -> list[int]:
        play = _Play(self, name, plan, count)
        play.run()
        return play.numbers


class _Late:
    """Whether a job takes back a manifest that it put when its lease had run out, and removes that of another instead.

    It has looked, but no store deletes what it saw and nothing else: the limit that `docs/object-stores.md` names.
    """

    def __init__(self) -> None:
        self._renewed: dict[int, float] = {}  # by jobs: when a lease or mark of theirs was put
        self._putters: dict[str, int] = {}  # by manifests: the job that put it
        self._late: set[tuple[int, str]] = set()

    def put(self, who: int, key: str, clock: float) -> None:
        """Takes note of an object that was put."""
        if key.endswith(("/writer.lock", ".tmp")):
            self._renewed[who] = clock
        elif key.endswith("/treering.json"):
            self._putters[key] = who
            if clock - self._renewed.get(who, clock) > EXPIRES_SECONDS:
                self._late.add((who, key))

    def removes_others(self, who: int, keys: str | list[str]) -> bool:
        """Whether it is about to happen."""
        keys = [keys] if isinstance(keys, str) else keys
        return any((who, key) in self._late and self._putters[key] != who for key in keys)


class _Play:
    """One run of a scenario by a plan."""

    def __init__(self, explorer: Explorer, name: str, plan: Plan, count: Count):
        self._name, self._plan, self._count = name, plan, count
        self._scenario = scenarios.ALL[name]
        self._server, self._pipes, self._reader = explorer.server, explorer.pipes, explorer.reader
        self._place, self._local = f"{job.ROOT}/place", f"{explorer.local}/{next(_numbers)}"
        self._faults = {(who, number): outcome for who, number, outcome in plan.faults}
        self._last = len(self._scenario.jobs) - 1
        self.numbers = [0] * len(self._scenario.jobs)  # of requests so far
        self._begun: set[int] = set()
        self._over: dict[int, str | None] = {}  # jobs that have ended, and their errors
        self._reports: list[tuple[int, Any]] = []
        self._wrong = ""
        self._late, self._limit = _Late(), False

    def run(self) -> None:
        """Runs the jobs, and looks at the bucket after each request and at the end."""
        self._count.plans += 1
        try:
            with self._reading():
                self._scenario.before(self._place, self._local)
            self._server.adopt()
            for who, requests in self._plan.turns:
                self._serve(who, requests)
                self._server.clock += self._plan.stopped
            for who in range(self._last):
                self._serve(who, ALL)
            self._look(lambda place, _: self._scenario.over(place, self._over[0], len(self._faults)))
            self._serve(self._last, ALL)
            if self._over[self._last] is not None:
                self._wrong = self._wrong or f"the job after them: {self._over[self._last]}"
            self._look(self._scenario.end)
        finally:
            self._server.clear()
            shutil.rmtree(self._local, ignore_errors=True)
        ends = [str(self._over[who]).partition(":")[0] for who in range(self._last)]
        self._count.ends[", ".join("good" if end == "None" else end for end in ends)] += 1
        self._count.limits += self._limit
        if self._wrong and not self._limit:
            self._count.failures.append(f"{self._name}: {self._plan}: {self._wrong}; jobs ended: {self._over}")

    def _serve(self, who: int, requests: int) -> None:
        """Answers so many requests of a job."""
        pipe = self._pipes[who]
        if who not in self._begun:
            self._begun.add(who)
            if who == self._last:
                self._server.clock += _LATER_SECONDS
            pipe.send((self._name, who, self._place, self._local))
        until = self.numbers[who] + requests
        while who not in self._over and self.numbers[who] < until:
            name, args, options = pipe.recv()
            if name == "end":
                self._over[who] = args
            elif name == "sleep":
                self._server.clock += self._plan.waited
                pipe.send(Answer(None, None, self._server.clock))
            else:
                pipe.send(self._answer(who, name, args, options))

    def _answer(self, who: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        outcome = self._faults.get((who, self.numbers[who]), "")
        self.numbers[who] += 1
        self._server.clock += 0.01
        if outcome == "killed before" or (name == "report" and "killed" in outcome):
            return _KILLED
        if name == "report":
            self._reports.append((who + 1, *args))
            self._see()
            return Answer(None, None, self._server.clock)
        unanswered = Answer(None, ("GenericError", "no answer, max_retries: 0"), self._server.clock)
        if outcome == "lost":
            return unanswered
        if name == "delete" and not self._wrong and self._late.removes_others(who, args[0]):
            self._limit = True
        answer = self._server.ask(name, args, options)
        if name == "put" and not answer.error:
            self._late.put(who, args[0], self._server.clock)
        self._see()
        if outcome == "repeated":
            answer = self._server.ask(name, args, options)
            self._see()
        return {"unanswered": unanswered, "killed after": _KILLED}.get(outcome, answer)

    def _see(self) -> None:
        """Counts the state, and looks at the bucket unless one like it was seen."""
        self._count.states += 1
        if self._last in self._begun:
            return
        bucket = hash((self._name, self._server.contents(), repr(self._reports)))
        self._count.distinct.add(hash((bucket, *self.numbers)))
        if bucket not in self._count.buckets:
            self._count.buckets.add(bucket)
            self._look(self._scenario.check)

    def _look(self, check: Callable[[str, scenarios.Reports], None]) -> None:
        if self._wrong or self._limit:
            return
        with self._reading():
            try:
                check(self._place, self._reports)
            except Exception as error:
                self._wrong = f"{type(error).__name__}: {error}, after {self.numbers} requests"

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return stores.using(self._reader, job.SCHEME)


def plans(requests: list[int], count: int, seed: int) -> Iterator[Plan]:
    """Every fault of every request, and every two moments at which one job stops for the other; then both by chance.

    Where those are more than half of the count, as many of them by chance.
    """
    chance = random.Random(seed)
    every = [
        Plan(faults=((who, number, outcome),))
        for who, most in enumerate(requests)
        for number in range(most)
        for outcome in OUTCOMES
    ]
    if len(requests) == 2:
        moments = itertools.product(range(requests[0] + 1), range(1, requests[1] + 1), (0.0, 100.0))
        every += [Plan(((0, first), (1, second), (0, ALL)), stopped=stopped) for first, second, stopped in moments]
    chosen = every if 2 * len(every) <= count else chance.sample(every, count // 2)
    yield from chosen
    for _ in range(count - len(chosen)):
        yield _by_chance(requests, chance)


def _by_chance(requests: list[int], chance: random.Random) -> Plan:
    turns: list[tuple[int, int]] = []
    if len(requests) == 2:
        first = chance.randrange(2)
        for turn in range(chance.choice((1, 2, 3, 4, 6))):
            who = (first + turn) % 2
            turns.append((who, chance.randrange(1, requests[who] + 1 if turn < 2 else 12)))
    faults: list[tuple[int, int, str]] = []
    for _ in range(chance.choice((0, 1, 1, 2) if turns else (2, 2, 3))):
        who = chance.randrange(len(requests))
        faults.append((who, chance.randrange(requests[who]), chance.choice(OUTCOMES)))
    return Plan(tuple(turns), tuple(faults), chance.choice((100.0, 100.0, 65.0, 30.0)), chance.choice(_STOPPED_SECONDS))
