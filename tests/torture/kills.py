"""`python -m tests.torture.kills --write docs/evidence.md`: kills and errors at every point, and what they left.

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

from . import interrupts, overwrites, peers, points, signals, soak, traced
from .points import Outcome
from .scenarios import SCENARIOS

_BEGIN, _END = "<!-- kills:begin -->", "<!-- kills:end -->"
_ERRORS = ("EIO", "ENOSPC")
_MORE_ERRORS = dict.fromkeys(("overwrite_async", "step and retention"), ("EDQUOT", "EACCES", "EINTR"))
_STATES = ("old", "between", "new")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.kills", description=__doc__)
    parser.add_argument("--write", metavar="FILE", help=f"put the results between {_BEGIN} and {_END} of a file")
    parser.add_argument("--dir", default=".", help="where to write; it decides which disk is used (default: .)")
    parser.add_argument("--only", action="append", choices=list(CAMPAIGNS), help="a campaign; may be repeated")
    parser.add_argument("--times", type=int, default=100, help="kills and signals at random times (default: 100)")
    parser.add_argument("--every", type=int, default=1, help="of the points in several processes (default: 1, all)")
    parser.add_argument("--rounds", type=int, default=10_000, help="of the soak (default: 10000)")
    arguments = parser.parse_args()
    if not traced.available():
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
        killed = points.killed_everywhere(scenario, _made(places), thorough=True)
        report.outcome(name, "killed, by operation", [killed])
        report.outcome(name, "killed, by system call", [traced.everywhere(scenario, _made(places))])
        for errors in (_ERRORS, _MORE_ERRORS.get(name, ())):
            failed = [traced.everywhere(scenario, _made(places), error=error) for error in errors]
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


_NOTE = """A process is killed (SIGKILL) at every operation on the disk (before it, after it, half way through a
write) and, with `strace`, at every system call that changes something; and each such call is made to fail. Every line
of the table counts processes of their own. After each, the old state or the new one must be there (a step that is
saved while an older one is deleted has states between), every byte of it verified and compared; opening the run
works; the next save works and nothing of the one that was killed is left. `wrong` counts where any of that did not
hold. An error may also be one that only keeps from tidying up, or one after which the system call is made again
(EINTR); then the save goes through."""

_SEVERAL = """### One process of several killed

Jobs of 2, 3 and 4 processes under `jax.distributed`, of which each process in turn is killed: before its file is made,
while it is written, before and after its sync, before and after its word that all is written; when process 0 is about
to commit and when it has, and before, while and after it removes the old. The others must end by themselves, with one
error that says which process is gone, or go through, and what process 0 says of it must be so (JAX ends the others when
process 0 is gone); old or new is there as above; and the next job, of all processes, saves, and tidies up."""

_INTERRUPTED = """### Ctrl-C and SIGTERM at random times

The times are drawn evenly from the time that it takes. After every second ctrl-C of a save the same process saves
again, else another one does. The loop makes 13 steps, of which it saves every third and the last, and keeps two; with
`save_on_preemption` it is left after SIGTERM, and the step that it is left at is the latest."""

_EVERY_INTERRUPT = """### Ctrl-C wherever Python notices it

Python looks for signals when a function begins and when one of C returns. Each line counts the places of that kind in
the thread that calls, with a ctrl-C at each in turn, all in one process, which goes on after it as in a notebook: what
comes out is `KeyboardInterrupt` and nothing else, every thread ends, the old state or the new one is there, and the
next save works."""

_OVERWRITES = f"""### Overwriting, by library

{overwrites.LEAVES} arrays of {overwrites.LEAF >> 10} KiB, overwritten by the process that saved them. The same script
kills it at times that are drawn evenly from the time that an overwrite takes, and at the system calls that change
something (at {overwrites.MOST_CALLS} of a kind, where there are more). Then the library itself restores what is there:
the old or the new, a mixture of both without an error, or nothing. `{overwrites.STUCK}`: the library cannot save there
any more; `{overwrites.LEFT}`: what was killed still takes room on the disk after the next save."""

_SOAK = """### Thousands of saves in one process

A round is an asynchronous save of a run that keeps two steps, and its restore; every tenth also overwrites, verifies,
converts, reads damage, and fails to save on a broken disk. The last line may have 8 MiB of memory and 1 MiB on the disk
more than the first (a state is 0.5 MB), and no more descriptors."""

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
