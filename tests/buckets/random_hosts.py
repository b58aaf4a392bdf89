"""`python -m buckets.random_hosts`: random jobs on hosts with disks of their own, in memory and with random faults.

Each scenario follows from its seed. The jobs use the real `Checkpointer`; their processes are threads of one process
(`thread_jobs`), and their remote tier is the bucket of `server`. Between jobs disks are emptied and bytes are flipped,
and processes get other disks. Two things must hold for every restore. The tree is one that was saved, bit by bit. No
step is skipped that was committed, belongs to the run, and has an undamaged copy of each file somewhere.

It needs `tests` on the path.
"""

import argparse
import collections
import contextlib
import functools
import logging
import os
import pathlib
import pickle
import random
import shutil
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import obstore
import xxhash

import treering as tr
from thread_jobs import current_process, processes
from treering import stores
from treering._processes import assignment
from treering._run.tiers import exchange
from treering.errors import CorruptError, NotFoundError, PeerError, SaveError, TreeringError
from treering.formats.treering import manifest, removal
from treering.stores.objects import bucket, heartbeat, lease
from treering.stores.objects.store import ObjectStore
from treering.testing._doubles import SteppedDisk

from .job import _error, _Got
from .server import Answer, Server

_SCHEME = "random"
_ROOT = f"{_SCHEME}://tests"
_PLACE = f"{_ROOT}/place"
_LATER_SECONDS = 48 * 3600.0  # between two jobs
_OUTCOMES = ("lost", "unanswered", "repeated", "late", "stale")


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


class Chain(NamedTuple):
    """The steps of the run as one job left them: their values by step, and those that were committed for sure."""

    values: dict[int, int]
    committed: frozenset[int]
    disks: frozenset[str]  # of the job that left them


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
        bucket._PAUSE_SECONDS, bucket._first_process = 0, None
        clock = lambda: self.clients.server.clock  # noqa: E731
        bucket.now = heartbeat.now = clock
        heartbeat._start_renewals = lambda one: None
        removal.time = types.SimpleNamespace(time=clock)  # type: ignore[assignment]

        def sleep(seconds: float) -> None:
            self.clients.server.clock += 100.0

        lease.time = types.SimpleNamespace(sleep=sleep)  # type: ignore[assignment]
        buckets = ObjectStore()
        buckets.add(_ROOT, object())
        buckets._buckets[_ROOT]._is_verified = True
        stores.register(buckets, _SCHEME)
        disk = _Disk()
        disk.running = self
        stores.register(stores.Filesystem(disk))
        assignment._MIN_CUT_BYTES = 8  # small, so that each process writes something
        exchange.peers.join = lambda call, store, root, host: _Peers(self, call.index, host)  # type: ignore[assignment]

    def report(self, *what: Any) -> None:
        self.job.check_alive()
        self.reports.append((current_process(), *what))

    def _process(self, index: int) -> None:
        plan = self.plan
        ckpts = tr.Checkpointer(
            _PLACE, local=f"{self.local}/{plan.disks[index]}", keep=tr.keep.last(2), timeout=5,
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
            if plan.copies[n] and directory.together and directory.together._copies:
                directory.together._copies.wait()
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


class World:
    """A run with its disks and its bucket, and the model of its steps."""

    def __init__(self, local: str, seed: int, damaged: str = "arrays-*"):
        self.local, self.chance, self.damaged = local, random.Random(seed), damaged
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.late: list[tuple[Any, Any]] = []
        self.clock = 1.7e9
        self.copies = self.chance.choice((1, 2, 2))
        self.hashes: dict[str, int] = {}  # of files, by their names; of manifests, by their contents
        self.lives = dict.fromkeys("abcd", 0)  # how often each disk was emptied
        self.chains = [Chain({}, frozenset(), frozenset())]  # one of these is the run
        self.manifests: dict[int, bytes] = {}  # by value
        self.changes = 250  # of a job
        self.log: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def life(self, disk: str) -> str:
        return f"{disk}{self.lives[disk]}"

    def play(self) -> None:
        """Runs some jobs with faults, and a last one without, which must upload its step."""
        for number in range(1, self.chance.choice((2, 2, 3, 4)) + 1):
            self._job(self._plan(), number)
            for _ in range(self.chance.choice((0, 1, 1, 2))):
                self._disturb()
        last = Plan(self._disks(), 2, self.copies, uploads=(False, True), copies=(True, False))
        outcome = self._job(last, 9)
        if any(what[1:3] == ("restored", -1) for what in outcome.reports):
            return  # All steps are damaged.
        if any(what[1] == "not uploaded" for what in outcome.reports):
            assert self.counts["flip"] + self.counts["cut"], outcome.reports
            self.counts["not uploaded"] += 1
        step = max(what[2] for what in outcome.reports if what[1] == "committed")
        with self._reading():
            assert tr.steps(_PLACE)[-1] == step and tr.verify(_PLACE).ok, f"{tr.steps(_PLACE)}, expected {step}"
            assert is_same(tr.restore(_PLACE), 9000 + step)

    def _plan(self) -> Plan:
        chance, disks = self.chance, self._disks()
        steps = chance.choice((1, 2, 2, 3))
        kill_at = chance.choice((0, chance.randrange(1, self.changes), chance.randrange(1, self.changes)))
        numbers = range(1, 80)
        return Plan(
            disks, steps, self.copies, kill_at,
            None if chance.random() < 0.5 else chance.randrange(len(disks)),
            tuple((chance.choice(numbers), chance.choice(_OUTCOMES)) for _ in range(chance.choice((0, 0, 0, 1, 3)))),
            frozenset(chance.sample(range(1, 12), chance.choice((0, 0, 1)))),
            frozenset(chance.sample(range(1, 12), chance.choice((0, 0, 0, 1)))),
            tuple(chance.random() < 0.4 for _ in range(steps)),
            tuple(chance.random() < 0.7 for _ in range(steps)),
        )  # fmt: skip

    def _disks(self) -> str:
        """Returns disks for a job, in any order. Some of them are of the jobs that may be the last one."""
        chance = self.chance
        for _ in range(50):
            disks = "".join(chance.sample("abcd", chance.choice((2, 2, 3, 3, 4))))
            lives = {*map(self.life, disks)}
            if all(not one.disks or lives & one.disks for one in self.chains):
                return disks
        return "".join(chance.sample("abcd", 4))

    def _job(self, plan: Plan, number: int) -> Outcome:
        if self.late:
            server = server_with(self.objects, self.clock)
            for args, options in self.late:
                server.ask("put", args, options)
            self.objects = objects_of(server)
        self.clock += _LATER_SECONDS
        self.log.append(f"job {number}: {plan}")
        intact = {
            value for chain in self.chains for value in chain.values.values() if self._is_intact(value, plan.disks)
        }
        outcome = run_job(plan, self.local, self.objects, self.clock, number)
        self.log.append(f"  {outcome.reports}, {outcome.changes} changes")
        assert not outcome.problem, outcome.problem
        _, self.objects, self.late, self.clock, changes, _ = outcome
        self.counts["jobs"] += 1
        self.counts["killed"] += 0 < plan.kill_at <= changes
        self._learn_files()
        self._judge(outcome.reports, plan, intact, number)
        return outcome

    def _judge(self, reports: list[tuple[Any, ...]], plan: Plan, intact: set[int], number: int) -> None:
        """Compares what a job has restored with the model, and adds its steps to it."""
        restored = {what[2:] for what in reports if what[1] == "restored"}
        assert len(restored) < 2, f"processes have restored different steps: {restored}"
        if not restored:
            return
        ((step, value),) = restored
        self.counts["restored"] += step > 0
        lives = frozenset(map(self.life, plan.disks))
        problems: list[str] = []
        fitting: list[Chain] = []
        for chain in self.chains:
            heirs = bool(chain.disks & lives)
            required = {
                one
                for one in chain.committed
                if chain.values[one] in intact and (heirs or self._is_remote(chain.values[one]))
            }
            if step < 0 and (plan.flipped or plan.unreachable):
                fitting.append(chain)  # The only good copy came damaged, or did not come. The error says so.
            elif step > 0 and chain.values.get(step) != value:
                problems.append(f"{step} was saved by another job than expected: {chain}")
            elif max(required, default=-1) > step:
                problems.append(f"step {max(required)} was committed and has all files, restored {step}")
            else:
                fitting.append(chain)
        assert fitting, "; ".join(problems)
        saving = {what[2]: what[3] for what in reports if what[1] == "saving"}
        if not saving:
            return
        done = frozenset(what[2] for what in reports if what[1] == "committed")
        new = [
            Chain(
                {**{one: old for one, old in chain.values.items() if one <= step}, **saving},
                frozenset({*(one for one in chain.committed if one <= step), *done}),
                lives,
            )
            for chain in fitting
        ]
        self.chains = new if done else [*fitting, *new]

    def _learn_files(self) -> None:
        """Notes the contents of new files, and the manifests by the values of their steps."""
        found = [
            (path.name, path.read_bytes()) for path in pathlib.Path(self.local).glob("*/step-*/*") if path.is_file()
        ]
        found += [(key.rpartition("/")[2], data) for key, (data, _) in self.objects.items() if "/step-" in key]
        for name, data in found:
            if name.startswith("arrays-") and not name.endswith(".tmp"):
                self.hashes.setdefault(name, xxhash.xxh3_64_intdigest(data))
            elif name == "treering.json":
                with contextlib.suppress(CorruptError):
                    manifest.check(data, name)
                    self.manifests[_value_in(data)] = data

    def _is_intact(self, value: int, disks: str) -> bool:
        """Returns True if disks and the bucket have the manifest and all files of a state, undamaged."""
        data = self.manifests.get(value)
        if data is None:
            return False
        folder = f"step-{value % 1000:08}"
        places = [pathlib.Path(self.local, disk, folder) for disk in disks]
        remote = self.objects.get(f"place/{folder}/treering.json", (b"", 0.0))[0] == data
        if not remote and not any(_read(place / "treering.json") == data for place in places):
            return False
        for name in manifest.file_names(data):
            contents = [_read(place / name) for place in places]
            if remote:
                contents.append(self.objects.get(f"place/{folder}/{name}", (b"", 0.0))[0])
            if not any(one and xxhash.xxh3_64_intdigest(one) == self.hashes.get(name) for one in contents):
                return False
        return True

    def _is_remote(self, value: int) -> bool:
        return self._is_intact(value, "")

    def _disturb(self) -> None:
        chance, disk = self.chance, self.chance.choice("abcd")
        what = chance.choice(("empty", "flip", "flip", "cut"))
        files = sorted(pathlib.Path(self.local).glob(f"{disk}/step-*/{self.damaged}"))
        if what == "empty":
            shutil.rmtree(f"{self.local}/{disk}", ignore_errors=True)
            self.lives[disk] += 1
        elif files:
            file = chance.choice(files)
            data = bytearray(file.read_bytes())
            file.chmod(0o600)
            if data and what == "flip":
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data[: len(data) // 2] if what == "cut" else data)
            disk = str(file)
        self.counts[what] += 1
        self.log.append(f"{what}: {disk}")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        reader = ObjectStore()
        reader.add(_ROOT, server_with(self.objects, self.clock).memory)
        with stores.using(reader, _SCHEME):
            yield


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _value_in(data: bytes) -> int:
    """Returns the number of the state that a manifest describes: it holds the text of the state."""
    begin = data.index(b"text ") + 5
    return int(data[begin : data.index(b'"', begin)])


def played(seed: int, damaged: str = "arrays-*") -> tuple[collections.Counter[str], str]:
    """Plays the scenario of a seed. Returns counts, and a description of the failure or ""."""
    logging.disable(logging.CRITICAL)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as local:
        world = World(local, seed, damaged)
        try:
            world.play()
        except Exception as error:
            text = str(error) if isinstance(error, AssertionError) else "".join(traceback.format_exception(error))
            return world.counts, f"seed {seed}: {text}\n" + "\n".join(world.log)
        finally:
            logging.disable(logging.NOTSET)
    return world.counts, ""


def main() -> None:
    """Plays scenarios until the time is over. Exits with 1 if any fails."""
    parser = argparse.ArgumentParser(prog="python -m buckets.random_hosts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="after which no further scenario begins")
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario")
    parser.add_argument("--number", type=int, default=10**9, help="of scenarios, at most")
    parser.add_argument("--damaged", default="arrays-*", help="the pattern of the files of a step that are damaged")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    wish = parser.parse_args()
    begun, counts, failures, seed = time.monotonic(), collections.Counter[str](), list[str](), wish.seed
    with ProcessPoolExecutor(wish.jobs) as pool:
        while time.monotonic() < begun + wish.seconds and seed < wish.seed + wish.number:
            batch = range(seed, min(seed + 20 * wish.jobs, wish.seed + wish.number))
            for found, failure in pool.map(functools.partial(played, damaged=wish.damaged), batch):
                counts += found
                failures += [failure] if failure else []
            seed = batch.stop
    print(f"{seed - wish.seed} scenarios from seed {wish.seed}, {time.monotonic() - begun:.0f} s: {dict(counts)}")
    print(f"{len(failures)} failures", *failures[:5], sep="\n\n")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
