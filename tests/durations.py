"""Measures the time of the tests: seconds of CPU and of wall time per folder and of the slowest tests.

Registered by `conftest.py`. Each worker measures its tests (with the processes they start and wait for); the process
that began them adds up, and prints the time of each folder with its budget, which `CONTRIBUTING.md` states. With
`TEST_DURATIONS=FILE`, as `make durations` sets it, the table is written to a file.
"""

import collections
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import zygote

_ROOT = Path(__file__).parent
_BUDGETS = re.compile(r"^\| `([^`]+)` \| (\d+) \|", re.MULTILINE)  # seconds of CPU by folder, in CONTRIBUTING.md
_SLOWEST = 40
_took: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])  # seconds of CPU and of wall time by test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Remembers when a test began. It ends with its teardown's report, which is sent to who adds up."""
    item.stash[_BEGUN] = (_cpu_seconds(), time.perf_counter())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Adds what the test took to the report of its end."""
    report = yield
    if call.when == "teardown":
        cpu, begun = item.stash[_BEGUN]
        report.took = [_cpu_seconds() - cpu, time.perf_counter() - begun]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up, in the process that began the tests and in each worker, where the sum is unused."""
    for n, seconds in enumerate(getattr(report, "took", ())):
        _took[report.nodeid][n] += seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the folders, and writes the file if it is asked for."""
    lines = _table()
    terminalreporter.write_line("seconds of CPU / wall time (budget of CPU) per folder: " + ", ".join(lines[0]))
    if file := os.environ.get("TEST_DURATIONS"):
        Path(file).write_text("\n".join(lines[1]) + "\n")


def _table() -> tuple[list[str], list[str]]:
    """The folders as words, and the table of folders and of the slowest tests in Markdown."""
    budgets = dict(_BUDGETS.findall((_ROOT.parent / "CONTRIBUTING.md").read_text()))
    folders: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0])
    for test, seconds in _took.items():
        file = test.partition("::")[0].removeprefix("tests/")
        folder = folders[os.path.dirname(file) or file.removesuffix(".py")]
        folders[os.path.dirname(file) or file.removesuffix(".py")] = [
            folder[0] + seconds[0],
            folder[1] + seconds[1],
            folder[2] + 1,
        ]
    ordered = sorted(folders.items(), key=lambda one: -one[1][0])
    words = [f"{name} {cpu:.0f}/{wall:.0f} ({budgets.get(name, '–')})" for name, (cpu, wall, _) in ordered]
    rows = [
        f"| `{name}` | {budgets.get(name, '–')} | {cpu:.0f} | {wall:.0f} | {count} |"
        for name, (cpu, wall, count) in ordered
    ]
    slowest = sorted(_took.items(), key=lambda one: -one[1][1])[:_SLOWEST]
    tests = [f"| `{test.removeprefix('tests/')}` | {cpu:.1f} | {wall:.1f} |" for test, (cpu, wall) in slowest]
    head = ["| folder | budget, s of CPU | s of CPU | s of wall time | tests |", "| --- | --: | --: | --: | --: |"]
    return words, [*head, *rows, "", "| test | s of CPU | s of wall time |", "| --- | --: | --: |", *tests]


def _cpu_seconds() -> float:
    """Seconds of CPU of this process and of the processes it has waited for, or a zygote has for it."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + zygote.cpu_seconds()


_BEGUN = pytest.StashKey[tuple[float, float]]()
