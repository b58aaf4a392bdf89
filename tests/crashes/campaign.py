"""`python -m crashes.campaign`: every crash of every scenario, in several processes, and the tables of it.

With `tests` on the path.
"""

import argparse
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from treering._version import __version__

from . import checks
from .checks import Count

_BEGIN, _END = "<!-- crashes:begin -->", "<!-- crashes:end -->"
_PARTS = {"": 1, "failing": 2, "killed": 2, "killed twice": 6}  # in each, states that are the same are looked at once
# They make many files: errors and kills come where a directory is synced only, as with one file they do everywhere.
_ONLY_SYNCS = ("orbax", "safetensors, several files: killed twice, then saved, overwriting")


class Task(NamedTuple):
    """What one process does at a time: a part of a scenario, or its mutations."""

    scenario: str
    part: tuple[int, int]
    mutations: bool
    seed: int
    extra: int
    folder: str | None


class Result(NamedTuple):
    """What came of a task: the count, failures in words, and by which scenario mutations were caught, and how."""

    scenario: str
    counted: Count
    failures: list[str]
    caught: dict[str, tuple[str, str] | None]


def main() -> None:
    """Runs everything, or the scenarios whose names begin with what `--only` says; ends with 1 if anything fails."""
    parser = argparse.ArgumentParser(prog="python -m crashes.campaign", description=__doc__)
    parser.add_argument("--only", action="append", help="the beginning of the name of a scenario; may be repeated")
    parser.add_argument("--extra", type=int, default=10, help="states at random after each operation (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of those at random (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: as many as CPUs)")
    parser.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None, help="for scratch files")
    parser.add_argument("--write", metavar="FILE", help=f"put the tables between {_BEGIN} and {_END} of a file")
    wish = parser.parse_args()
    begun = time.monotonic()
    results = list(_run(list(_tasks(wish)), wish.jobs))
    text, failed = _report(results, time.monotonic() - begun, wish)
    print(text)
    if wish.write:
        _put(wish.write, text)
    raise SystemExit(int(failed))


def _tasks(wish: argparse.Namespace) -> Iterator[Task]:
    """The longest first. What is killed twice shows no mutations that one that is killed once would not."""
    found = [one for one in checks.scenarios().values() if not wish.only or one.name.startswith(tuple(wish.only))]
    for scenario in sorted(found, key=lambda one: (len(one.broken), one.name), reverse=True):
        name, parts = scenario.name, _PARTS[scenario.broken]
        for number in range(parts):
            yield Task(name, (number, parts), False, wish.seed, wish.extra, wish.dir)
            if not (scenario.broken and name.startswith(_ONLY_SYNCS)) and scenario.broken != "killed twice":
                yield Task(name, (number, parts), True, wish.seed, 0, wish.dir)


def _run(tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for n, result in enumerate(pool.map(_do, tasks), 1):
            print(f"{n} of {len(tasks)}: {result.scenario}", file=sys.stderr, flush=True)
            for failure in result.failures:
                print(failure, "\n", flush=True)
            yield result


def _do(task: Task) -> Result:
    scenario = checks.scenarios()[task.scenario]
    kind = "sync_dir" if task.scenario.startswith(_ONLY_SYNCS) else ""
    with tempfile.TemporaryDirectory(prefix="treering-crashes-", dir=task.folder) as directory:
        folder = Path(directory)
        if task.mutations:
            recordings = checks.recorded(scenario, folder, kind=kind, part=task.part)
            caught = checks.caught(recordings, folder)
            results = {name: failure and (failure.where, failure.what) for name, failure in caught.items()}
            return Result(task.scenario, Count(), [], results)
        count = checks.check(
            scenario, folder, kind=kind, part=task.part, seed=task.seed, extra=task.extra, most_failures=3
        )
    failures, count.failures = [str(failure) for failure in count.failures], []
    return Result(task.scenario, count, failures, {})


def _report(results: Sequence[Result], seconds: float, wish: argparse.Namespace) -> tuple[str, bool]:
    """The tables, and whether anything has failed."""
    counts: dict[str, Count] = {}
    failures: dict[str, int] = {}
    caught: dict[str, tuple[str, str] | None] = {}
    for result in results:
        counts[result.scenario] = counts.get(result.scenario, Count()) + result.counted
        failures[result.scenario] = failures.get(result.scenario, 0) + len(result.failures)
        for name, how in result.caught.items():
            caught[name] = caught.get(name) or how
    names = [name for name in checks.scenarios() if name in counts]
    total = sum((counts[name] for name in names), Count())
    rows = [_row(name, counts[name], failures[name]) for name in names]
    scenarios = [
        "| scenario | recordings | operations | states | distinct | failures |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *rows,
        _row("**all**", total, sum(failures.values())),
    ]
    missed = {name for name, how in caught.items() if not how and name not in checks.HARMLESS}
    changes = ["| mutation | found by | as |", "| --- | --- | --- |"]
    for name, how in sorted(caught.items(), key=lambda item: (item[1] is None, item[0])):
        where, what = how or ("**nothing**", checks.HARMLESS.get(name, "**to be explained**"))
        changes.append(f"| {name} | {where} | {what} |")
    found = sum(how is not None for how in caught.values())
    head = (
        f"{total.states:,} states, {total.distinct:,} of them distinct, {sum(failures.values())} failures; {found} of "
        f"{len(caught)} mutations found. Treering {__version__}, Python {platform.python_version()}, "
        f"{wish.jobs} processes, {seconds:.0f} s, seed {wish.seed}, {wish.extra} states at random after each operation."
    )
    failed = bool(missed) or any(failures.values())
    return "\n\n".join([head, "\n".join(scenarios), "\n".join(changes)]), failed


def _row(name: str, count: Count, failures: int) -> str:
    numbers = (count.recordings, count.operations, count.states, count.distinct, failures)
    return f"| {name} | " + " | ".join(f"{number:,}" for number in numbers) + " |"


def _put(path: str, text: str) -> None:
    """Replaces what lies between the markers of a file."""
    old = Path(path).read_text(encoding="utf-8")
    new, count = re.subn(f"{_BEGIN}.*{_END}", lambda _: f"{_BEGIN}\n\n{text}\n\n{_END}", old, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{path}: expected {_BEGIN} and {_END} once each, found them {count} times")
    Path(path).write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
