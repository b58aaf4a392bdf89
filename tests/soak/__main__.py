"""`python -m soak --hours N [--seed S] [--write FILE]`: training jobs that are interrupted for N hours.

An episode is one run in one place: a small disk, a bucket, or a local tier in front of a slow bucket. A job of one, two
or four processes lives there several times, each time on another number of devices, and each life ends or suffers in
another way. An evaluator restores each step that appears, and the command line reads and prunes the run meanwhile. An
uninterrupted job gives the digest of every step. `make soak` runs this; the last line says what differed.
"""

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_proxy
import s3
import treering as tr
from xla_flags import xla_flags

from .job import read_journal

_TESTS = Path(__file__).parents[1]
_DISK_BYTES = 48 << 20
_START_SECONDS, _STILL_SECONDS = 600, 240  # on a busy machine a life may take much longer than its steps
_TOTAL_STEPS = 300
# What a process may use more at its end than after 60 steps: less than a byte for each step that it remembers.
_MORE = {"memory": 24 << 20, "descriptors": 4, "threads": 4}
_STORE_FAULTS = ("503 SlowDown", "500 InternalError", "lose", "twice", "late", "cut", "drop")


@dataclasses.dataclass
class Tally:
    """Counts what was done; `differed` has a line for everything that should not have been."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    differed: list[str] = dataclasses.field(default_factory=list)


class Place:
    """A place for a run: `run` for the job, `direct` for those next to it, `local` or nothing."""

    def __init__(self, kind: str, folder: Path, server: str, proxy: fault_proxy.Proxy) -> None:
        self.kind, self.proxy = kind, proxy
        self.small = folder / "small"
        self.small.mkdir()
        self.mounted = _mount(self.small) if kind != "bucket" else False
        self.local = [str(self.small / "local")] if kind == "tier" else []
        self.run = str(self.small / "run") if kind == "disk" else f"s3://{s3.BUCKET}/{folder.name}/run"
        self.server = server
        self._filler = self.small / "filler"

    def environment(self, *, direct: bool) -> dict[str, str]:
        """Returns the variables for a job, whose requests pass the proxy, or for what stands next to it."""
        url = self.server if direct else self.proxy.url
        return {**s3.environment(url), "AWS_ALLOW_HTTP": "true"}

    def fill(self) -> None:
        """Leaves no room on the small disk until `mend`."""
        with contextlib.suppress(OSError), open(self._filler, "wb", buffering=0) as file:
            while file.write(bytes(1 << 18)):
                pass

    def mend(self) -> None:
        """Ends all faults."""
        self._filler.unlink(missing_ok=True)
        self.proxy.fault, self.proxy.delay = (lambda request: None), 0.02 if self.kind == "tier" else 0.0

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", self.small], check=True)


def _mount(folder: Path) -> bool:
    if os.name != "posix" or os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", folder]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Episode:
    """One run from its first step to its last."""

    def __init__(self, number: int, seed: int, place: Place, folder: Path, tally: Tally) -> None:
        self.random, self.place, self.folder, self.tally = random.Random(seed), place, folder, tally
        self.processes = self.random.choice((1, 1, 2, 4))
        self.job = "adapters" if self.processes > 1 else self.random.choice(("modules", "adapters"))
        self.name = f"episode {number} (seed {seed}, {place.kind}, {self.job}, {self.processes} processes)"
        self.seed = seed % 1000
        self.committed = 0  # the newest step that must survive
        self.preempted: int | None = None
        self.expected: list[tuple[str, str]] = []

    def differs(self, text: str) -> None:
        """Notes a difference, and says it at once."""
        self.tally.differed.append(f"{self.name}: {text}")
        print("DIFFERS", self.tally.differed[-1], flush=True)

    def play(self, until: float) -> None:
        """Plays the lives of the job until it is done or the time is over."""
        base = {"job": self.job, "seed": self.seed, "total": _TOTAL_STEPS, "run": self.place.run}
        self._wait(self._start({**base, "name": "reference"}, "reference", 1, direct=True))
        lines = read_journal(self.folder / "reference-reference.jsonl")
        self.expected = [(line["digest"], line["position"]) for line in lines]
        if len(self.expected) != _TOTAL_STEPS + 1:
            raise RuntimeError(f"the reference ended early: {self._output('reference-reference')}")
        evaluator = self._start({**base, "name": "evaluator"}, "evaluator", 1, direct=True)
        done = False
        try:
            for number in itertools.count():
                if time.monotonic() > until or number == 40:
                    break
                done = self._live(f"life{number}", base, last=number == 39)
                if done:
                    break
            if done:
                self._wait(evaluator, 120)
        finally:
            evaluator.kill()
            evaluator.wait()
        self._check_evaluator(done)
        self.tally.counts["episodes"] += 1

    # One life

    def _live(self, name: str, base: dict[str, Any], *, last: bool) -> bool:
        place, choose = self.place, self.random
        kinds = ["end", "kill", "kill", "preempt", "long"]
        kinds += ["kill one"] * (self.processes > 1)
        kinds += ["full disk"] * place.mounted
        kinds += ["lost disk"] * (place.kind == "tier")
        kinds += ["failing store", "slow store"] * (place.kind != "disk")
        kind = choose.choice(kinds) if not last else "end"
        devices = choose.choice((1, 2, 4)) if self.job == "adapters" else 1
        steps = choose.randint(5, 40) if kind != "long" else 160
        life = {
            **base,
            "name": name,
            "processes": self.processes,
            "local": place.local * self.processes,
            "save_every": choose.choice((1, 1, 1, 2, 5)),
            "on_error": choose.choice(("raise", "log")),
            "pause": choose.choice((0.0, 0.005, 0.03)),
            "last": _TOTAL_STEPS if last else self.committed + steps if kind in ("end", "long") else _TOTAL_STEPS,
            "address": f"127.0.0.1:{_free_port()}",
        }
        place.mend()
        jobs = [self._start(life, str(index), devices, direct=False) for index in range(self.processes)]
        self.tally.counts["lives"] += 1
        journal = self.folder / f"{name}-0.jsonl"
        moved, requests = (time.monotonic(), -1), list[tuple[int, int]]()
        acted = self.random.random() < 0.3 and self._visit
        while any(one.poll() is None for one in jobs):
            lines = read_journal(journal)
            trained = [line["step"] for line in lines if line["kind"] == "trained"]
            resumed = next((line["step"] for line in lines if line["kind"] == "resumed"), None)
            requests.append((len(trained), len(place.proxy.requests)))
            if acted and len(trained) > 3:
                acted()
                acted = None
            if resumed is not None and trained and trained[-1] >= resumed + steps and kind not in ("end", "long"):
                self._strike(kind, jobs)
                self.tally.faults[kind] += 1
                break
            if len(lines) != moved[1]:
                moved = time.monotonic(), len(lines)
            elif time.monotonic() - moved[0] > _STILL_SECONDS:
                for one in jobs:
                    one.send_signal(signal.SIGUSR2)  # each writes where its threads stand
                time.sleep(2)
                stacks = "\n".join(self._output(f"{name}-{i}", 6000) for i in range(len(jobs)))
                self.differs(f"{name} ({kind}) stands still: {stacks}")
                for one in jobs:
                    one.kill()
                break
            time.sleep(0.02)
        codes = [self._wait(one, _STILL_SECONDS) for one in jobs]
        if kind in ("end", "long"):
            self.tally.faults["clean end"] += 1
        self._check_life(name, kind, codes, requests)
        place.mend()
        if kind == "lost disk":
            self._lose_disk()
        done = self._is_done(name)
        self._check_run(name, kind)
        return done

    def _strike(self, kind: str, jobs: list[subprocess.Popen[bytes]]) -> None:
        choose, place = self.random, self.place
        time.sleep(choose.uniform(0, 0.15))
        if kind in ("kill", "lost disk"):
            for one in jobs:
                one.kill()
        elif kind == "kill one":
            choose.choice(jobs).kill()
            time.sleep(choose.uniform(0, 1))
            for one in jobs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(60)
                one.kill()
        elif kind == "preempt":
            for one in jobs:
                one.send_signal(signal.SIGTERM)
        elif kind == "full disk":
            place.fill()
            self._suffer(jobs, choose.uniform(1, 5))
        elif kind == "slow store":
            place.proxy.delay = choose.uniform(0.1, 0.5)
            self._suffer(jobs, choose.uniform(2, 6))
        elif kind == "failing store":
            share = choose.uniform(0.05, 0.6)
            place.proxy.fault = lambda request: choose.choice(_STORE_FAULTS) if choose.random() < share else None
            self._suffer(jobs, choose.uniform(2, 6))

    def _suffer(self, jobs: list[subprocess.Popen[bytes]], seconds: float) -> None:
        """Lets a fault last, ends it, lets the jobs continue for a while, and kills what is left of them."""
        for wait in (seconds, 3.0):
            end = time.monotonic() + wait
            while time.monotonic() < end and any(one.poll() is None for one in jobs):
                time.sleep(0.05)
            self.place.mend()
        for one in jobs:
            one.kill()

    def _lose_disk(self) -> None:
        """Empties the local tier. What the remote tier lists must survive that."""
        self.committed = max(self._listed(), default=0)
        self.preempted = None
        shutil.rmtree(self.place.local[0], ignore_errors=True)

    def _listed(self) -> list[int]:
        with _credentials(self.place):
            return tr.steps(self.place.run)

    # Checks

    def _check_life(self, name: str, kind: str, codes: list[int], requests: list[tuple[int, int]]) -> None:
        before, preempted = self.committed, self.preempted
        for index in range(self.processes):
            lines = read_journal(self.folder / f"{name}-{index}.jsonl")
            for line in lines:
                if line["kind"] in ("resumed", "trained"):
                    self.tally.counts["states compared"] += 1
                    if (line["digest"], line["position"]) != self.expected[line["step"]]:
                        self.differs(f"{name}: process {index} {line['kind']} step {line['step']} with other bits")
                        break
            resumed = next((line["step"] for line in lines if line["kind"] == "resumed"), None)
            if resumed is not None and (resumed < before or (preempted or resumed) != resumed):
                self.differs(f"{name}: process {index} resumed {resumed} after {before}, preempted {preempted}")
            self._check_use(name, lines)
            if index == 0:
                self.tally.counts["steps trained"] += sum(line["kind"] == "trained" for line in lines)
                self.tally.counts["steps committed"] += sum(line["kind"] == "committed" for line in lines)
                self.committed = max([self.committed, *(one["step"] for one in lines if one["kind"] == "committed")])
                if resumed is not None:
                    self.tally.counts["restarts"] += 1
                    self.preempted = None
                if codes[0] == 143:
                    self.preempted = next(line["step"] for line in lines if line["kind"] == "preempted")
        wanted = {"end": {0}, "long": {0}, "preempt": {143, 0}, "kill": {-9}, "lost disk": {-9}}.get(kind)
        done = self._is_done(name)
        if wanted and not done and not set(codes) <= wanted:
            self.differs(f"{name} ({kind}) ended with {codes}: {self._output(f'{name}-0')}")
        elif wanted is None and not done:
            self.tally.counts["lives ended by an error"] += any(code > 0 for code in codes)
        half = len(requests) // 2
        if kind == "long" and self.place.kind == "bucket" and half and requests[-1][0] > 100:
            (s0, r0), (s1, r1), (s2, r2) = requests[0], requests[half], requests[-1]
            if s1 - s0 > 30 and s2 - s1 > 30 and (r2 - r1) / (s2 - s1) > 1.6 * (r1 - r0) / (s1 - s0):
                self.differs(f"{name}: {r1 - r0} requests for {s1 - s0} steps, then {r2 - r1} for {s2 - s1}")

    def _check_use(self, name: str, lines: list[dict[str, Any]]) -> None:
        used = [line for line in lines if line["kind"] == "used"]
        if len(used) >= 6:
            self.tally.counts["processes measured"] += 1
            for what, most in _MORE.items():
                if used[-1][what] > used[2][what] + most:
                    self.differs(f"{name}: {what} grew from {used[2][what]} to {used[-1][what]}")

    def _check_run(self, name: str, kind: str) -> None:
        """Verifies every step of the run while no job writes it."""
        if not self._listed():  # Nothing is uploaded yet.
            return
        code, output = self._command("verify", self.place.run)
        self.tally.counts["verifications"] += 1
        if code != 0:
            self.differs(f"after {name} ({kind}): verify ended with {code}: {output}")

    def _visit(self) -> None:
        """Runs a command next to the job."""
        if not self._listed():
            return
        what = self.random.choice(("ls", "verify", "prune", "cp"))
        self.tally.counts[f"treering {what}"] += 1
        run = self.place.run
        if what == "cp":
            copy = self.folder / f"copy{self.tally.counts['treering cp']}"
            code, output = self._command("cp", run, str(copy))
            if code == 0:
                code, output = self._command("verify", str(copy))
            shutil.rmtree(copy, ignore_errors=True)
            allowed = {0}
        elif what == "prune":
            code, output = self._command("prune", run, "last:4", "every:25", "--yes")
            allowed = {0, 1}
        else:
            code, output = self._command(what, run)
            allowed = {0}
        if code not in allowed:
            self.differs(f"treering {what} next to the job ended with {code}: {output}")

    def _check_evaluator(self, done: bool) -> None:
        lines = read_journal(self.folder / "evaluator-evaluator.jsonl")
        for line in lines:
            if line["kind"] == "unreadable":
                # Retention may delete a step while it is read. A bucket keeps no deleted object for its readers.
                gone = line["error"].startswith(("NotFoundError", "ReplacedError"))
                self.tally.counts["steps deleted while they were read"] += gone
                if not gone or self.place.kind == "disk":
                    self.differs(f"the evaluator: step {line['step']}: {line['error']}")
            if line["kind"] == "evaluated":
                self.tally.counts["steps evaluated"] += 1
                if line["digest"] != self.expected[line["step"]][0]:
                    self.differs(f"the evaluator: step {line['step']} has other bits")
        seen = {line["step"] for line in lines if line["kind"] == "evaluated"}
        if done and _TOTAL_STEPS not in seen:
            self.differs(f"the evaluator never saw the last step: {self._output('evaluator-evaluator')}")

    # Processes

    def _is_done(self, name: str) -> bool:
        lines = read_journal(self.folder / f"{name}-0.jsonl")
        return any(line["kind"] == "closed" and line["step"] == _TOTAL_STEPS for line in lines)

    def _start(self, life: dict[str, Any], number: str, devices: int, *, direct: bool) -> subprocess.Popen[bytes]:
        file = self.folder / f"{life['name']}.json"
        file.write_text(json.dumps({**life, "journals": str(self.folder)}))
        environment = {
            **os.environ,
            **self.place.environment(direct=direct),
            **{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices), "PYTHONUNBUFFERED": "1"},
        }
        with open(self.folder / f"{life['name']}-{number}.log", "wb") as log:
            command = [sys.executable, "-m", "soak.job", str(file), number]
            return subprocess.Popen(command, cwd=_TESTS, env=environment, stdout=log, stderr=log)

    def _wait(self, process: subprocess.Popen[bytes], seconds: float = _START_SECONDS) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            self.differs(f"a process did not end within {seconds:.0f} seconds")
            return process.wait()

    def _output(self, name: str, characters: int = 1500) -> str:
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return text[-characters:]

    def _command(self, *arguments: str) -> tuple[int, str]:
        environment = {**os.environ, **self.place.environment(direct=True)}
        command = [sys.executable, "-m", "treering", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, (done.stdout + done.stderr)[-1500:]


@contextlib.contextmanager
def _credentials(place: Place) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(place.environment(direct=True))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def soak(hours: float, seed: int) -> Tally:
    """Plays episodes until the time is over."""
    tally, end = Tally(), time.monotonic() + hours * 3600
    with s3.server() as server, contextlib.closing(fault_proxy.Proxy(server)) as proxy:
        for number in itertools.count():
            if time.monotonic() > end:
                return tally
            folder = Path(tempfile.mkdtemp(prefix="soak-"))
            place = Place(("disk", "bucket", "tier")[number % 3], folder, server, proxy)
            try:
                Episode(number, seed + number, place, folder, tally).play(end)
                kept = any(f"episode {number} " in line for line in tally.differed)
            finally:
                place.close()
            if kept:
                print("kept:", folder, flush=True)
            else:
                shutil.rmtree(folder)
            print(f"episode {number} on a {place.kind}:", dict(tally.counts), dict(tally.faults), flush=True)
    raise AssertionError


_END = "<!-- soak:end -->"


def write_row(file: Path, seed: int, hours: float, tally: Tally) -> None:
    """Adds a row to the table."""
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
    counts, faults = tally.counts, ", ".join(f"{n} {kind}" for kind, n in sorted(tally.faults.items()))
    numbers = ("episodes", "lives", "restarts", "steps trained", "steps committed", "steps evaluated")
    cells = [str(datetime.date.today()), commit.stdout.strip(), str(seed), f"{hours:.2f}"]
    cells += [f"{counts[name]:,}" for name in numbers]
    row = f"| {' | '.join([*cells, faults, str(len(tally.differed))])} |\n"
    file.write_text(file.read_text().replace(_END, row + _END))


def main() -> int:
    """Returns 1 if anything differed."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    logging.getLogger("treering").setLevel(logging.ERROR)
    print("seed", given.seed, flush=True)
    began = time.monotonic()
    tally = soak(given.hours, given.seed)
    hours = (time.monotonic() - began) / 3600
    if given.write:
        write_row(given.write, given.seed, hours, tally)
    print(f"{hours:.2f} hours, {dict(tally.counts)}, {dict(tally.faults)}")
    print(f"{len(tally.differed)} differed", *tally.differed, sep="\n")
    return bool(tally.differed)


if __name__ == "__main__":
    sys.exit(main())
