"""`python -m benchmarks`: runs everything, or what `--only` names, and prints the tables."""

import argparse
import importlib.metadata
import os
import pathlib
import tempfile
import warnings
from collections.abc import Set

from . import (
    chart,
    contestants,
    converting,
    first_step,
    growth,
    loop,
    measure,
    memory,
    objects,
    opening,
    operations,
    planning,
    processes,
    publish,
    reading,
    sharded,
    states,
    summary,
    table,
    targets,
    tiers,
    unchanged,
)

_BEGIN, _END = "<!-- bench:begin -->", "<!-- bench:end -->"
_NOTE = (
    "The floor moves the same bytes without names and checksums: 4 threads write 4 MiB buffers in huge pages by "
    "direct I/O, or one write for each leaf of `small`, and an fsync. safetensors and torch.save do not sync their "
    "files; an fsync follows their saves. TensorStore writes a zarr3 array of one chunk for each leaf, and syncs "
    "each file. torch DCP syncs its files, but not their folder. Treering and Orbax restore JAX arrays, safetensors "
    "and TensorStore NumPy arrays, PyTorch tensors. `sharded` is 1 GiB in 16 leaves, each cut along its first axis "
    "over 8 CPU devices of one process. `processes` is the same over 4 processes with 2 devices each, timed from the "
    "first start to the last end; its floor writes one file per process. The floor of the loop is one thread that "
    "writes the same bytes by ordinary writes and syncs them; Orbax v0 is its CheckpointManager there. The floor of "
    "a later step writes 10 MiB into a new file. The bucket is a Python server on this machine; its floor is obstore "
    "with the same objects and as many in flight, into new arrays. Orbax writes to no bucket but Google's. The floor "
    "of the first step is the compilation or the restore alone, whichever takes longer."
)
_SEPARATE = [
    "memory",
    "open",
    "first step",
    "loop",
    "reading",
    "converting",
    "sharded",
    "processes",
    "planning",
    "objects",
    "requests",
    "unchanged",
]  # each by itself
_NAMES = [*operations.OPERATIONS, *_SEPARATE, *states.STATES]
_TIERS, _GROWTH, _PUBLISH = "tiers", "growth", "publish"  # have pages of their own
_PUBLISHED_STEPS = 50
_ROUNDS = 9
_QUICK = {"save", "stall", "warm", "cold", "large", "small", "unchanged", "objects"}  # what has the main rows
_QUICK_ROUNDS = 3
_QUICK_WITHOUT = {"Orbax v1"}  # hardly differs from v0, and needs a minute
_QUICK_NOTE = f"A quick run: the main rows alone, in few rounds, without {' and '.join(_QUICK_WITHOUT)}."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=[*_NAMES, _TIERS, _GROWTH, _PUBLISH],
        help="an operation or a state; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="the ten main rows, in about three minutes")
    parser.add_argument("--repeats", type=int, help="rounds in which all take turns (default: 9, or 3 with --quick)")
    parser.add_argument("--dir", default=".", help="where to write; it decides which disk is measured (default: .)")
    parser.add_argument("--write", metavar="FILE", help=f"put the tables between {_BEGIN} and {_END} of a file")
    parser.add_argument("--mib", type=int, default=1024, help=f"MiB of the state of `{_TIERS}` (default: 1024)")
    arguments = parser.parse_args()
    if arguments.quick and (arguments.only or arguments.write):
        parser.error("--quick: expected neither --only nor --write, because it prints the main rows and writes none")
    only = _QUICK if arguments.quick else set(arguments.only or _NAMES)
    repeats = arguments.repeats or (_QUICK_ROUNDS if arguments.quick else _ROUNDS)
    if (page := next((name for name in (_TIERS, _GROWTH, _PUBLISH) if name in only), None)) and len(only) > 1:
        parser.error(f"--only {page}: expected no other name, because it writes a page of its own")
    warnings.simplefilter("ignore")  # the peers' own
    with tempfile.TemporaryDirectory(prefix="bench-", dir=os.path.abspath(arguments.dir)) as directory:
        with open(os.path.join(directory, ".gitignore"), "w") as file:
            file.write("*\n")  # gigabytes that no commit should contain
        if _TIERS in only:
            text = tiers.report(directory, repeats, arguments.mib)
        elif _GROWTH in only:
            text = growth.report(directory, repeats)
        elif _PUBLISH in only:
            text = publish.report(directory, _PUBLISHED_STEPS)
        else:
            rows = run(directory, repeats, only, _QUICK_WITHOUT if arguments.quick else frozenset())
            if arguments.quick:
                print(_QUICK_NOTE)
                rows = [row for row in rows if (row.operation, row.state) in summary.MAIN]
            text = report(rows, repeats)
    print(text)
    if arguments.write:
        put(arguments.write, text)
        if not arguments.only and os.path.samefile(arguments.write, chart.PAGE):
            chart.draw()
            summary.write()


def run(directory: str, repeats: int, only: set[str], without: Set[str] = frozenset()) -> list[table.Row]:
    """All rows, operation by operation, without some contestants.

    An operation without a state means all states, and the other way round.
    """
    names = [name for name in contestants.all_contestants() if name not in without]
    chosen = [name for name in operations.OPERATIONS if name in only]
    arenas = [name for name in states.STATES if name in only]
    if arenas and not chosen and not only.intersection(_SEPARATE):
        chosen = list(operations.OPERATIONS)
    rows: dict[str, list[table.Row]] = {name: [] for name in chosen}
    for state in (arenas or states.STATES) if chosen else ():
        place = os.path.join(directory, state)
        with operations.enter(state, names, place, repeats) as arena:
            for name in chosen:
                rows[name] += operations.OPERATIONS[name](arena)
    found = [row for name in chosen for row in rows[name]]
    if "memory" in only:
        found += memory.rows(directory)
    if "open" in only:
        found += opening.rows(directory, repeats)
    if "first step" in only:
        found += first_step.rows(directory, min(repeats, 5))
    if "loop" in only:
        found += loop.rows(directory, repeats)
    if "reading" in only:
        found += reading.rows(directory, repeats)
    if "converting" in only:
        found += converting.rows(directory, repeats)
    if "sharded" in only:
        found += sharded.rows(directory, repeats)
    if "processes" in only:
        found += processes.rows(directory, repeats)
    if "planning" in only:
        found += planning.rows(min(repeats, 3))  # which hardly differ
    if "objects" in only:
        found += objects.rows(repeats)
    if "requests" in only:
        found += objects.requests(repeats)
    if "unchanged" in only:
        found += unchanged.rows(directory, repeats)
    return found


def report(rows: list[table.Row], repeats: int) -> str:
    missing = contestants.missing()
    packages = [
        "treering",
        "jax",
        "numpy",
        "orbax-checkpoint",
        "safetensors",
        "tensorstore",
        *(() if missing else ["torch"]),
    ]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    slow = measure.slow_rounds(repeats)
    rounds = f"Medians of {repeats} interleaved rounds (of {slow} for what takes seconds)"
    spread = "± half the distance between the quartiles of what was taken in more rounds than two"
    head = f"{rounds}, and {spread}; {versions}."
    return "\n\n".join([head, *([missing] if missing else []), _NOTE, table.results(rows), targets.verdicts(rows)])


def put(path: str, text: str) -> None:
    """Replaces what lies between the markers of a file."""
    page = pathlib.Path(path)
    page.write_text(summary.replaced(page.read_text("utf-8"), text, (_BEGIN, _END)), "utf-8")


if __name__ == "__main__":
    main()
