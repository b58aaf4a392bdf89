"""`python -m tests.torture.kills --write docs/reliability.md`: kills and errors at every point, and what they left.

It takes `strace`, and permission to use it; the tests do the same on the disk's operations without.
"""

import argparse
import importlib.metadata
import sys
import tempfile
from pathlib import Path

from . import overwrites, points, soak, traced
from .points import Outcome
from .scenarios import SCENARIOS

_BEGIN, _END = "<!-- kills:begin -->", "<!-- kills:end -->"
_HEAD = "| | what | points | old | between | new | wrong |\n| --- | --- | --- | --- | --- | --- | --- |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.kills", description=__doc__)
    parser.add_argument("--write", metavar="FILE", help=f"put the results between {_BEGIN} and {_END} of a file")
    parser.add_argument("--dir", default=".", help="where to write; it decides which disk is used (default: .)")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="a scenario; may be repeated")
    parser.add_argument("--times", type=int, default=100, help="kills at random times, per library (default: 100)")
    parser.add_argument("--rounds", type=int, default=10_000, help="of the soak (default: 10000)")
    arguments = parser.parse_args()
    if not traced.available():
        sys.exit("expected an strace that may trace and tamper with calls, found none; install it, or allow ptrace")
    with tempfile.TemporaryDirectory(prefix="kills-", dir=arguments.dir) as directory:
        text, wrong = report(Path(directory).resolve(), arguments.only or list(SCENARIOS), arguments)
    print(text)
    if arguments.write:
        put(Path(arguments.write), text)
    sys.exit("\n".join(wrong))


def report(directory: Path, names: list[str], arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The section, and everything that was wrong."""
    rows, wrong = [_HEAD], list[str]()
    for name in names:
        campaigns = {
            "killed, by operation": lambda place, name=name: points.killed_everywhere(
                SCENARIOS[name], place, thorough=True
            ),
            "killed, by system call": lambda place, name=name: traced.everywhere(SCENARIOS[name], place),
            "EIO, by system call": lambda place, name=name: traced.everywhere(SCENARIOS[name], place, error="EIO"),
            "ENOSPC, by system call": lambda place, name=name: traced.everywhere(
                SCENARIOS[name], place, error="ENOSPC"
            ),
        }
        for what, campaign in campaigns.items():
            place = directory / f"{name} {what}"
            place.mkdir()
            outcome = campaign(place)
            rows.append(_row(name, what, outcome))
            wrong += [f"{name}, {what}: {problem}" for problem in outcome.wrong]
            print(rows[-1], flush=True)
    libraries = ["| overwritten by | killed | old | new | neither |\n| --- | --- | --- | --- | --- |"]
    for name, library in overwrites.LIBRARIES.items():
        (directory / "overwrites").mkdir(exist_ok=True)
        found = overwrites.killed(library, directory / "overwrites", arguments.times)
        counts = [found.get(key, 0) for key in ("old", "new", "neither")]
        libraries.append(f"| {name} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    samples = ["| rounds | memory | descriptors | threads | disk |\n| --- | --- | --- | --- | --- |"]
    (directory / "soak").mkdir()
    samples += [
        f"| {s.rounds} | {s.memory / 1e6:.1f} MB | {s.descriptors} | {s.threads} | {s.disk / 1e6:.2f} MB |"
        for s in soak.soak(arguments.rounds, directory / "soak")
    ]
    return "\n\n".join([_NOTE, "\n".join(rows), _OVERWRITES, "\n".join(libraries), _SOAK, "\n".join(samples)]), wrong


def _row(name: str, what: str, outcome: Outcome) -> str:
    states = [sum(n for key, n in outcome.found.items() if key.split(",")[0] == s) for s in ("old", "between", "new")]
    return f"| {name} | {what} | {outcome.killed} | " + " | ".join(map(str, states)) + f" | {len(outcome.wrong)} |"


def put(file: Path, text: str) -> None:
    """Replaces what is between the markers."""
    before, rest = file.read_text().split(_BEGIN)
    file.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{rest.split(_END)[1]}")


_VERSIONS = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("treering", "jax", "orbax-checkpoint"))
_NOTE = f"""{_VERSIONS}. A process is killed (SIGKILL) at every operation on the disk (before it,
after it, half way through a write) and, with `strace`, at every system call that changes something; and each
such call is made to fail. Every line of the
table counts processes of their own. After each, the old state or the new one must be there (a step that is saved while
an older one is deleted has states between), every byte of it verified and compared; opening the run works; the next
save works and nothing of the one that was killed is left. `wrong` counts where any of that did not hold. An
error may also be one
that only keeps from tidying up; then the save goes through."""
_OVERWRITES = f"""### Overwriting, killed at random times

{overwrites._LEAVES} arrays of {overwrites._LEAF >> 10} KiB; the times are drawn evenly from the time that an
overwrite takes.
`neither`: after the kill no checkpoint can be restored from the path."""
_SOAK = """### Thousands of saves in one process

A round is an asynchronous save of a run that keeps two steps, and its restore; every tenth also overwrites,
verifies, converts,
reads damage, and fails to save on a broken disk."""

if __name__ == "__main__":
    main()
