"""`python -m tests.fault_injection.kills --write benchmarks/results/kills.md` kills at every point and checks what
was left.

It takes `strace`, and permission to use it; the tests do the same on the disk's operations without. It takes
some twenty minutes.
"""

import argparse
import importlib.metadata
import itertools
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import interrupts, kill_points, overwrites, peers, signals, soak, syscall_faults
from .kill_points import Outcome
from .scenarios import SCENARIOS

_BEGIN, _END = "<!-- kills:begin -->", "<!-- kills:end -->"
_ERRORS = ("EIO", "ENOSPC")
_MORE_ERRORS = dict.fromkeys(("overwrite_async", "step and retention"), ("EDQUOT", "EACCES", "EINTR"))
_STATES = ("old", "between", "new")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_injection.kills", description=__doc__)
    parser.add_argument("--write", metavar="FILE", help=f"put the results between {_BEGIN} and {_END} of a file")
    parser.add_argument("--dir", default=".", help="where to write; it decides which disk is used (default: .)")
    parser.add_argument("--only", action="append", choices=list(CAMPAIGNS), help="a campaign; may be repeated")
    parser.add_argument("--times", type=int, default=100, help="kills and signals at random times (default: 100)")
    parser.add_argument("--every", type=int, default=1, help="of the points in several processes (default: 1, all)")
    parser.add_argument("--rounds", type=int, default=10_000, help="of the soak (default: 10000)")
    arguments = parser.parse_args()
    if not syscall_faults.available():
        sys.exit("expected an strace that may trace and tamper with calls, found none; install it, or allow ptrace")
    logging.getLogger("treering").setLevel(logging.CRITICAL)  # much is made to fail
    with tempfile.TemporaryDirectory(prefix="kills-", dir=arguments.dir) as directory:
        text, wrong = report(Path(directory).resolve(), arguments.only or list(CAMPAIGNS), arguments)
    if arguments.write:
        put(Path(arguments.write), text)
    sys.exit("\n".join(wrong) or None)


class Report:
    """What the campaigns write to: the rows, which are shown at once, and everything that was wrong."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.wrong: list[str] = []
        self._begun = time.monotonic()

    def table(self, *head: str) -> None:
        self.row(*head)
        self.row(*["---"] * len(head))

    def row(self, *cells: object) -> None:
        self.text.append(f"| {' | '.join(map(str, cells))} |\n")
        print(f"{time.monotonic() - self._begun:5.0f} s  {self.text[-1]}", end="", flush=True)

    def outcome(self, what: str, how: str, outcomes: Sequence[Outcome]) -> None:
        """A row of a table of outcomes."""
        counts = [
            sum(n for outcome in outcomes for key, n in outcome.found.items() if key.split(",")[0] == state)
            for state in _STATES
        ]
        wrong = [f"{what}, {how}: {problem}" for outcome in outcomes for problem in outcome.wrong]
        self.row(what, how, sum(outcome.killed for outcome in outcomes), *counts, len(wrong))
        self.wrong += wrong


_OUTCOMES = ("", "what", "points", *_STATES, "wrong")


def everywhere(directory: Path, arguments: argparse.Namespace, report: Report) -> None:
    report.table(*_OUTCOMES)
    for name, scenario in SCENARIOS.items():
        places = (directory / f"{name} {n}" for n in itertools.count())
        killed = kill_points.killed_everywhere(scenario, _made(places), thorough=True)
        report.outcome(name, "killed, by operation", [killed])
        report.outcome(name, "killed, by system call", [syscall_faults.everywhere(scenario, _made(places))])
        for errors in (_ERRORS, _MORE_ERRORS.get(name, ())):
            failed = [syscall_faults.everywhere(scenario, _made(places), error=error) for error in errors]
            if failed:
                report.outcome(name, f"{', '.join(errors)}, by system call", failed)


def several(directory: Path, arguments: argparse.Namespace, report: Report) -> None:
    report.table(*_OUTCOMES)
    for name, operation in peers.OPERATIONS.items():
        for who in ("process 0", "another"):
            outcomes = [
                peers.killed_everywhere(
                    operation,
                    count,
                    directory / f"{name} {who} {count}",
                    victims=[0] if who == "process 0" else range(1, count),
                    every=arguments.every,
                )
                for count in (2, 3, 4)
            ]
            report.outcome(name, f"{who} killed", outcomes)


def interrupted(directory: Path, arguments: argparse.Namespace, report: Report) -> None:
    report.table(*_OUTCOMES)
    for name, scenario in signals.INTERRUPTED.items():
        for number, how in ((signal.SIGINT, "ctrl-C"), (signal.SIGTERM, "SIGTERM")):
            place = directory / f"{name} {how}"
            report.outcome(name, how, [signals.signalled(scenario, number, place, arguments.times)])


def interrupted_everywhere(directory: Path, arguments: argparse.Namespace, report: Report) -> None:
    report.table(*_OUTCOMES)
    for name in interrupts.INTERRUPTED:
        command = [sys.executable, "-m", f"{__package__}.interrupts", str(directory / name), "--only", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # a process of its own, for it may hang
        report.outcome(name, "ctrl-C, wherever it is noticed", [Outcome(**json.loads(done.stdout))])


def overwritten(directory: Path, arguments: argparse.Namespace, report: Report) -> None:
    overwrites.import_libraries()
    report.table("overwritten by", "killed", "kills", *overwrites.STATES, overwrites.STUCK, overwrites.LEFT)
    for name, library in overwrites.LIBRARIES.items():
        places = (directory / f"{name[:10]} {n}" for n in itertools.count())
        for how, found in (
            ("at random times", overwrites.killed(library, _made(places), arguments.times)),
            ("by system call", overwrites.killed_by_system_call(library, _made(places))),
        ):
            counts = [found.get(state, 0) for state in overwrites.STATES]
            report.row(name, how, sum(counts), *counts, found.get(overwrites.STUCK, 0), found.get(overwrites.LEFT, 0))
            if library is overwrites.OURS and any(
                [*counts[2:], found.get(overwrites.STUCK), found.get(overwrites.LEFT)]
            ):
                report.wrong.append(f"{name}, killed {how}: {found}")


def soaked(directory: Path, arguments: argparse.Namespace, report: Report) -> None:
    command = [sys.executable, "-m", f"{__package__}.soak", str(arguments.rounds), str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    outcome = json.loads(done.stdout)
    report.table("rounds", "memory", "descriptors", "threads", "disk")
    for sample in (soak.Sample(**sample) for sample in outcome["samples"]):
        memory, disk = f"{sample.memory / 1e6:.1f} MB", f"{sample.disk / 1e6:.2f} MB"
        report.row(sample.rounds, memory, sample.descriptors, sample.threads, disk)
    report.wrong += [f"grown in {arguments.rounds} rounds: {what}" for what in outcome["grown"]]


def _made(places: Iterator[Path]) -> Path:
    (place := next(places)).mkdir()
    return place


_NOTE = """A process is killed (SIGKILL) at every operation on the disk: before it, after it, and half way through a
write. `strace` also kills it at every system call that changes something, and makes each such call fail.
Each point is a process of its own. Afterwards the old state or the new one must be in place. A step that
is saved while an older step is deleted has states between. Every byte is verified and compared; opening
the run works; the next save works and removes what the killed process left. `wrong` counts the points
where any of that did not hold. An error may also only prevent a clean-up, or repeat the system call
(EINTR); the save then succeeds."""

_SEVERAL = """## One process of several killed

Jobs of 2, 3 and 4 processes under `jax.distributed`. Each process in turn is killed: before it creates its file,
during the write, before and after the sync, and before and after it reports its files as written. Process 0 is also
killed before and after it commits, and before, during and after it removes the old checkpoint. Its peers must end
by themselves, with one error that names the missing process, or succeed; what process 0 reports must be true. (JAX
ends the peers when process 0 is gone.) The old or the new state is in place as above. The next job saves and cleans
up."""

_INTERRUPTED = """## Ctrl-C and SIGTERM at random times

The times are drawn evenly from the time that the operation takes. After every second ctrl-C of a save the same
process saves again; otherwise a new process does. The loop makes 13 steps, saves every third and the last, and
keeps two. With `save_on_preemption` it ends after SIGTERM, and its last step must be the latest saved one."""

_EVERY_INTERRUPT = """## Ctrl-C wherever Python notices it

Python looks for signals when a function begins and when a C function returns. Each row counts the places of that
kind in the calling thread. One process gets a ctrl-C at each place in turn and continues, as a notebook does. Each
time the call raises `KeyboardInterrupt` and nothing else, every thread ends, the old or the new state is in place,
and the next save works."""

_OVERWRITES = f"""## Overwriting, by library

A process saves {overwrites.LEAVES} arrays of {overwrites.LEAF >> 10} KiB and overwrites them. One script
kills it at times drawn evenly from the time of an overwrite, and at the system calls that change something
(at most {overwrites.MAX_CALLS} of a kind). Then the library itself restores: the old state, the new one, a
mixture of both without an error, or nothing. `{overwrites.STUCK}`: the library can no longer save there.
`{overwrites.LEFT}`: files of the killed process still take room on the disk after the next save."""

_SOAK = """## Thousands of saves in one process

A round saves a step of a run that keeps two steps, in the background, and restores it. Every tenth round also
overwrites, verifies, converts, reads damage, and fails to save on a broken disk. Against the first row, the last
row may have 8 MiB more memory, 1 MiB more on the disk (one state has 0.5 MB), and no more descriptors."""

CAMPAIGNS: dict[str, tuple[str, Callable[[Path, argparse.Namespace, Report], None]]] = {
    "everywhere": (_NOTE, everywhere),
    "processes": (_SEVERAL, several),
    "signals": (_INTERRUPTED, interrupted),
    "interrupts": (_EVERY_INTERRUPT, interrupted_everywhere),
    "overwrites": (_OVERWRITES, overwritten),
    "soak": (_SOAK, soaked),
}


def report(directory: Path, names: list[str], arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The section, and everything that was wrong. A campaign that fails costs none of the others their rows."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("treering", "jax", *overwrites.PACKAGES))
    parts, wrong = [f"{', '.join(versions)}."], list[str]()
    for name in names:
        note, campaign = CAMPAIGNS[name]
        found = Report()
        (directory / name).mkdir()
        try:
            campaign(directory / name, arguments, found)
        except Exception:
            found.text.append("\nNot finished.\n")
            found.wrong.append(f"{name} was not finished:\n{traceback.format_exc()}")
        parts += [note, "".join(found.text).rstrip("\n")]
        wrong += found.wrong
    return "\n\n".join(parts), wrong


def put(file: Path, text: str) -> None:
    """Replaces what is between the markers."""
    before, rest = file.read_text().split(_BEGIN)
    file.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{rest.split(_END)[1]}")


if __name__ == "__main__":
    main()
