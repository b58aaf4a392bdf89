"""A job of very many processes in simulated time: the real coordinator, over a simulated store.

Every process is a greenlet that runs the real code of a call; what it would wait for (the store's answers, its own
heartbeat) passes in simulated time, which one event loop keeps. The store answers so many requests a second, one after
the other, and the way there takes a random time. `python -m benchmarks.simulation --write benchmarks/results/scale.md`.
"""

import argparse
import bisect
import collections
import dataclasses
import functools
import heapq
import itertools
import pathlib
import queue
import re
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
import numpy as np

from treering._processes import call_tree, host_relay, multi_process
from treering._processes.call_history import History
from treering._processes.job_store import JobStore
from treering._processes.multi_process import MultiProcessCall
from treering.errors import PeerError

from .table import markdown

REQUESTS_PER_SECOND = 10_000  # requests a second that the store answers: what that of JAX does on a core of its own
ROUND_TRIP_SECONDS = 0.0005  # seconds there and back, the median; log-normal
PROCESSES_PER_HOST = 8  # processes, whose sockets are taken for perfect
PROCESS_COUNTS = (16, 1_000, 10_000, 100_000)
_MARKS = ("<!-- simulation -->", "<!-- end -->")


class World:
    """Simulated time, and what happens in it."""

    def __init__(self, seed: int = 0):
        self.now = 0.0
        self.random = np.random.default_rng(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._loop = greenlet.getcurrent()
        self.dead: set[int] = set()

    def at(self, moment: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(moment, self.now), next(self._order), do))

    def spawn(self, work: Callable[[], None]) -> None:
        one = greenlet.greenlet(work, parent=self._loop)
        self.at(self.now, one.switch)

    def wait(self, begin: Callable[[Callable[[Any], None]], None]) -> Any:
        """Lets the greenlet that calls this stand still until what it begins calls back, once."""
        me, over = greenlet.getcurrent(), []

        def back(value: Any) -> None:
            if not over:
                over.append(True)
                self.at(self.now, functools.partial(me.switch, value))

        begin(back)
        return self._loop.switch()

    def sleep(self, seconds: float) -> None:
        self.wait(lambda back: self.at(self.now + seconds, functools.partial(back, None)))

    def run(self, until: Callable[[], bool]) -> None:
        while self._events and not until():
            self.now, _, do = heapq.heappop(self._events)
            do()


class Server:
    """The key-value store in process 0: requests wait in line, and each takes its time."""

    def __init__(self, world: World):
        self._world = world
        self.values: dict[str, str] = {}
        self._names: list[str] = []  # sorted
        self._waiting: dict[str, list[Callable[[str], None]]] = collections.defaultdict(list)
        self._free = 0.0
        self.requests: list[float] = []  # when each was answered
        self.nbytes = self.max_nbytes = 0  # of names and values that it holds, now and at most

    def ask(self, answer: Callable[[], Any]) -> Any:
        """Returns the reply to a request, after the way there, the queue and the way back."""
        world = self._world
        there = float(world.random.lognormal(np.log(ROUND_TRIP_SECONDS / 2), 0.5))

        def arrive(back: Callable[[Any], None]) -> None:
            self._free = max(self._free, world.now + there) + 1 / REQUESTS_PER_SECOND
            self.requests.append(self._free)
            world.at(self._free, lambda: world.at(world.now + there, functools.partial(back, answer())))

        return world.wait(arrive)

    def set(self, key: str, value: str) -> None:
        if key in self.values:
            self.nbytes -= len(key) + len(self.values[key])
        else:
            bisect.insort(self._names, key)
        self.values[key] = value
        self.nbytes += len(key) + len(value)
        self.max_nbytes = max(self.max_nbytes, self.nbytes)
        for notify in self._waiting.pop(key, ()):
            notify(value)

    def delete(self, key: str) -> None:
        """Deletes a key or, if it ends in a slash, those below it."""
        first = bisect.bisect_left(self._names, key)
        last = bisect.bisect_left(self._names, f"{key}\U0010ffff" if key.endswith("/") else f"{key}\0")
        for name in self._names[first:last]:
            self.nbytes -= len(name) + len(self.values.pop(name))
        del self._names[first:last]

    def below(self, key: str) -> list[tuple[str, str]]:
        first = bisect.bisect_left(self._names, key)
        names = itertools.takewhile(
            lambda name: name.startswith(key), self._names[first : first + 2 * call_tree.FAN_OUT]
        )
        return [(name, self.values[name]) for name in names]

    def await_(self, key: str, seconds: float) -> str | None:
        """The value of a key as soon as there is one; None when there is none for so long."""
        if (known := self.ask(lambda: self.values.get(key))) is not None:
            return known
        world = self._world

        def begin(back: Callable[[Any], None]) -> None:
            self._waiting[key].append(back)
            world.at(world.now + seconds, functools.partial(back, None))

        return world.wait(begin)


class Client:
    """The store as a process sees it, with the methods of JAX's client."""

    def __init__(self, server: Server):
        self._server = server

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if key in self._server.values and not allow_overwrite:
            raise RuntimeError("ALREADY_EXISTS")
        self._server.ask(lambda: self._server.set(key, value))

    def key_value_try_get(self, key: str) -> str:
        found = self._server.ask(lambda: self._server.values.get(key))
        if found is None:
            raise RuntimeError("NOT_FOUND")
        return found

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return self._server.ask(lambda: self._server.below(key))

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        found = self._server.await_(key, milliseconds / 1000)
        if found is None:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return found

    def key_value_delete(self, key: str) -> None:
        self._server.ask(lambda: self._server.delete(key))


class Thread:
    """A thread, as far as the coordinator needs one."""

    def __init__(self, world: World, target: Callable[[], None], name: str = "", daemon: bool = False):
        self._world, self._target = world, target
        self._over = False
        self._joined: list[Callable[[Any], None]] = []

    def start(self) -> None:
        self._world.spawn(self._run)

    def _run(self) -> None:
        self._target()
        self._over = True
        for back in self._joined:
            back(None)

    def is_alive(self) -> bool:
        return not self._over

    def join(self, seconds: float) -> None:
        if not self._over:
            self._world.wait(self._begin_to_join(seconds))

    def _begin_to_join(self, seconds: float) -> Callable[[Callable[[Any], None]], None]:
        def begin(back: Callable[[Any], None]) -> None:
            self._joined.append(back)
            self._world.at(self._world.now + seconds, functools.partial(back, None))

        return begin


class Queue:
    """A queue with one reader."""

    def __init__(self, world: World):
        self._world, self._items = world, 0
        self._back: Callable[[Any], None] | None = None

    def put(self, item: None) -> None:
        self._items += 1
        if self._back:
            self._back(None)

    def get(self, timeout: float) -> None:
        if not self._items:

            def begin(back: Callable[[Any], None]) -> None:
                self._back = back
                self._world.at(self._world.now + timeout, functools.partial(back, None))

            self._world.wait(begin)
            self._back = None
        if not self._items:
            raise queue.Empty
        self._items -= 1


class Hosts:
    """The sockets by which the processes of a host find one another."""

    def __init__(self, world: World):
        self._world = world
        self._speakers: dict[tuple[str, int], int] = {}
        self._last_signs: dict[tuple[str, int], dict[int, str]] = collections.defaultdict(dict)

    def join(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(signs=functools.partial(self._signs, name), close=lambda: None)

    def _signs(self, name: str, index: int, text: str) -> dict[int, str]:
        place = name, index // PROCESSES_PER_HOST
        speaker = self._speakers.setdefault(place, index)
        if speaker in self._world.dead:
            return {index: text}
        self._last_signs[place][index] = text
        return dict(self._last_signs[place]) if speaker == index else {}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a simulated call showed."""

    processes: int
    agreed: float  # seconds from the begin of the first process until the last has the answer
    busiest: int  # requests in the busiest second
    calm: float  # requests a second while all of them work and none of them waits
    noticed: float  # seconds from the death of a process until all know
    values_read: int  # values that process 0 reads
    held: int  # bytes of names and values in the store, at most
    memory: float  # bytes for each process of the simulation, which is no limit of the library
    seconds: float  # that the simulation took


def simulate(count: int, *, death: bool = True, spread: float = 1.0) -> Outcome:
    """Two calls of so many processes: they agree; then one of them dies.

    They begin within `spread` seconds of one another, and work for as long before the second exchange.
    """
    begun = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    world = World()
    server = Server(world)
    with _in(world):
        ready: list[float] = []
        arrivals: list[float] = []
        failures: list[float] = []
        histories = [History() for _ in range(count)]
        work = 3 * _sign_seconds(count)

        def first(index: int) -> None:
            world.sleep(float(world.random.uniform(0, spread)))
            call = MultiProcessCall(Client(server), index, count, "save", 30, histories[index])
            call.set_activity("writing")
            mine = ["format='treering', 0 rules", f"{index:032x}", "0" * 32, []]  # as large as those of a save
            assert call.gather_and_decide(mine, len) == count
            ready.append(world.now)
            if len(ready) == count:
                arrivals.append(world.now)
            world.sleep(work)
            name = f"arrays-0123ab-{index:05}-of-{count:05}.safetensors"
            call.gather_and_decide([[{"name": name, "size": 1 << 30, "header": 4096, "xxh3": "0" * 16}, 0]], len)
            call.close()
            arrivals.append(world.now)

        for index in range(count):
            world.spawn(functools.partial(first, index))
        world.run(lambda: len(arrivals) >= 1)
        agreed = world.now
        at_work = len(server.requests)
        world.run(lambda: world.now > agreed + work * 0.9)
        calm = (len(server.requests) - at_work) / (work * 0.9)
        world.run(lambda: len(arrivals) > count)
        busiest = _busiest(server.requests)
        noticed = float("nan")
        if death:
            victim = int(world.random.integers(1, count))
            died: list[float] = []

            def second(index: int) -> None:
                call = MultiProcessCall(Client(server), index, count, "save again", 30, histories[index])
                call.set_activity("writing")
                if index == victim:
                    world.sleep(1)
                    call._is_closed = True  # no heartbeat any more: dead
                    died.append(world.now)
                    world.dead.add(index)
                    return
                try:
                    call.gather_and_decide(index, lambda values: len(values))
                except PeerError as error:
                    call.close(error)
                    failures.append(world.now)

            for index in range(count):
                world.spawn(functools.partial(second, index))
            world.run(lambda: len(failures) >= count - 1)
            noticed = failures[-1] - died[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = (peak - before) * 1024 / count
    values_read, seconds = len(call_tree.children(0, count)), time.perf_counter() - begun
    return Outcome(count, agreed, busiest, calm, noticed, values_read, server.max_nbytes, memory, seconds)


def _sign_seconds(count: int) -> float:
    """The seconds between signs of life: of each process or, in a large job, of each host."""
    return call_tree.heartbeat_seconds(count / PROCESSES_PER_HOST if call_tree.is_large(count) else count)


def _busiest(moments: list[float]) -> int:
    return max(collections.Counter(map(int, moments)).values())


class _in:
    """The coordinator in simulated time, for the time of a `with` block."""

    def __init__(self, world: World):
        main = object()
        replaced = {
            "time": types.SimpleNamespace(monotonic=lambda: world.now),
            "queue": types.SimpleNamespace(SimpleQueue=_Generic(functools.partial(Queue, world)), Empty=queue.Empty),
            "Thread": functools.partial(Thread, world),
            "threading": types.SimpleNamespace(current_thread=lambda: main, main_thread=lambda: main),
            # That a process 0 stands still is not simulated, so no thread has to ask it.
            "JobStore": lambda client, what, here, timeout: JobStore(client, what, here=True, timeout=timeout),
            "host_relay": types.SimpleNamespace(**{**vars(host_relay), "join_host": Hosts(world).join}),
            "start_threads": lambda *started: [one.start() for one in started],
        }
        module: Any = multi_process
        self._swap = [(module, name, value) for name, value in replaced.items()]

    def __enter__(self) -> None:
        self._before = [(module, name, getattr(module, name)) for module, name, _ in self._swap]
        for module, name, value in self._swap:
            setattr(module, name, value)

    def __exit__(self, *_: object) -> None:
        for module, name, value in self._before:
            setattr(module, name, value)


class _Generic:
    """A function that is called like a generic class."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make

    def __call__(self) -> Any:
        return self._make()

    def __getitem__(self, _: Any) -> "_Generic":
        return self


def table(outcomes: list[Outcome]) -> str:
    def rows() -> Iterator[list[str]]:
        for one in outcomes:
            yield [
                f"{one.processes:,}",
                str(one.values_read),
                f"{one.agreed:.2f} s",
                f"{one.busiest:,}",
                f"{one.calm:,.0f}",
                f"{_sign_seconds(one.processes):g} s",
                f"{one.noticed:.1f} s",
                f"{one.held / 1e6:.2f} MB",
            ]

    head = [
        "processes",
        "process 0 hears",
        "agreed after",
        "requests, busiest second",
        "requests a second while writing",
        "sign of life every",
        "a death is known to all after",
        "in the store, at most",
    ]
    return markdown(head, list(rows()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("sizes", nargs="*", type=int)
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for count in arguments.sizes or PROCESS_COUNTS:
        outcomes.append(simulate(count))
        print(outcomes[-1], file=sys.stderr, flush=True)
    text = table(outcomes)
    if arguments.write:
        page = arguments.write.read_text()
        begin, end = map(re.escape, _MARKS)
        arguments.write.write_text(
            re.sub(f"{begin}.*{end}", f"{_MARKS[0]}\n\n{text}\n{_MARKS[1]}", page, flags=re.DOTALL)
        )
    print(text)


if __name__ == "__main__":
    main()
