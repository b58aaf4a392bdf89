"""`python -m buckets`: runs plans for every scenario in several processes, and prints a table of the results.

It needs `tests` on the path.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from treering._version import __version__

from . import scenarios
from .explore import Count, Explorer, plans

_BEGIN, _END = "<!-- buckets:begin -->", "<!-- buckets:end -->"


def main() -> None:
    """Runs all scenarios, or those whose names begin with `--only`. Exits with 1 if any plan fails."""
    parser = argparse.ArgumentParser(prog="python -m buckets", description=__doc__)
    parser.add_argument("--only", default="", help="the beginning of the names of scenarios")
    parser.add_argument("--plans", type=int, default=1000, help="for each scenario (default: 1000; a fifth with hosts)")
    parser.add_argument("--seed", type=int, default=0, help="of the random plans (default: 0)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=2 * (os.cpu_count() or 1),
        help="processes; they mostly wait (default: 2 per CPU)",
    )
    parser.add_argument("--write", metavar="FILE", help=f"put the table between {_BEGIN} and {_END} of a file")
    wish = parser.parse_args()
    begun = time.monotonic()
    names = [name for name in scenarios.ALL if name.startswith(wish.only)]
    longest_first = sorted(names, key=lambda name: (scenarios.ALL[name].processes, len(scenarios.ALL[name].jobs)))[::-1]
    with ProcessPoolExecutor(wish.jobs) as pool:
        share = {name: 1 if scenarios.ALL[name].processes == 1 else 5 for name in names}
        futures = {name: pool.submit(explored, name, wish.plans // share[name], wish.seed) for name in longest_first}
    counts = {name: futures[name].result() for name in names}
    text = _table(counts, time.monotonic() - begun, wish)
    print(text)
    failures = [failure for count in counts.values() for failure in count.failures]
    print(*failures[:20], sep="\n", file=sys.stderr)
    if wish.write:
        path = Path(wish.write)
        before, _, rest = path.read_text().partition(_BEGIN)
        path.write_text(f"{before}{_BEGIN}\n\n{text}\n{_END}{rest.partition(_END)[2]}")
    raise SystemExit(bool(failures))


def explored(name: str, count: int, seed: int) -> Count:
    """Runs `count` plans for a scenario and returns the results."""
    logging.disable(logging.CRITICAL)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    try:
        with tempfile.TemporaryDirectory(dir=memory) as folder, Explorer(folder) as explorer:
            return explorer.explore(name, plans(explorer.requests(name), count, seed))
    finally:
        logging.disable(logging.NOTSET)


def _table(counts: dict[str, Count], seconds: float, wish: argparse.Namespace) -> str:
    states, distinct, buckets, failures = (
        sum(number(count) for count in counts.values())
        for number in (
            lambda count: count.states,
            lambda count: len(count.distinct),
            lambda count: len(count.buckets),
            lambda count: len(count.failures),
        )
    )
    limits = sum(count.limits for count in counts.values())
    total = f"{states:,} states, {distinct:,} of them distinct, {buckets:,} buckets; {failures} failures, "
    total += f"{limits} plans that came to the known limit."
    lines = [
        f"{total} Treering {__version__}, {wish.jobs} processes, {seconds:.0f} s, seed {wish.seed}.",
        "",
        "| scenario | plans | states | distinct | buckets | how the jobs ended, most often first | limit | failures |",
        "| --- | --: | --: | --: | --: | --- | --: | --: |",
    ]
    for name, one in counts.items():
        ends = "; ".join(f"{end} {number:,}" for end, number in one.ends.most_common(5))
        lines.append(
            f"| {name} | {one.plans:,} | {one.states:,} | {len(one.distinct):,} | {len(one.buckets):,} "
            f"| {ends} | {one.limits} | {len(one.failures)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
