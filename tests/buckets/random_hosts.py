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
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import xxhash

import treering as tr
from treering import stores
from treering.errors import CorruptError
from treering.formats.treering import manifest
from treering.stores.objects.store import ObjectStore

from .random_job import PLACE, ROOT, SCHEME, Outcome, Plan, is_same, objects_of, run_job, server_with

_LATER_SECONDS = 48 * 3600.0  # between two jobs
_OUTCOMES = ("lost", "unanswered", "repeated", "late", "stale")


class Chain(NamedTuple):
    """The steps of the run as one job left them: their values by step, and those that were committed for sure."""

    values: dict[int, int]
    committed: frozenset[int]
    disks: frozenset[str]  # of the job that left them


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
            assert tr.steps(PLACE)[-1] == step and tr.verify(PLACE).ok, f"{tr.steps(PLACE)}, expected {step}"
            assert is_same(tr.restore(PLACE), 9000 + step)

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
        reader.add(ROOT, server_with(self.objects, self.clock).memory)
        with stores.using(reader, SCHEME):
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
