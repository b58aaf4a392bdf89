"""`python -m attacks`: tries the corpus, or the attacks that match `--only`, and counts what flipped bits do.

`tests` must be on the path. `--write FILE` puts the tables between two marks of a file.
"""

import argparse
import re
import tempfile
from collections import Counter
from pathlib import Path

from . import bit_rot, load
from .runner import NBYTES, SECONDS, run
from .trial import Trial

_BEGIN, _END = "<!-- damage:begin -->", "<!-- damage:end -->"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attacks", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression that names have to match")
    parser.add_argument(
        "--flips", type=int, default=1500, help="bits that are flipped for each library (default: 1500)"
    )
    parser.add_argument("--write", metavar="FILE", type=Path, help=f"put the tables between {_BEGIN} and {_END}")
    arguments = parser.parse_args()
    names = [name for name in load() if re.search(arguments.only, name)]
    with tempfile.TemporaryDirectory() as folder:
        trials = run(names, Path(folder), report=_report)
    lines = table(trials)
    if not arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            lines += ["", *rotten(bit_rot.measure(Path(folder), arguments.flips), *bit_rot.exhaustive(Path(folder)))]
    print("\n".join(lines))
    if arguments.write:
        put(arguments.write, lines)


def _report(trial: Trial) -> None:
    marks = ["wrong"] * bool(trial.wrong) + ["slow"] * (trial.seconds > SECONDS) + ["large"] * (trial.nbytes > NBYTES)
    if marks:
        print(
            f"{', '.join(marks)}: {trial.name}: {trial.seconds:.2f} s, {trial.nbytes >> 20} MiB; {trial.wrong}",
            flush=True,
        )


def table(trials: list[Trial]) -> list[str]:
    """Returns a table with one line for each format."""
    corpus = load()
    lines = [
        "| format | attacks | refused | legal | gone wrong | slowest | most memory |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.name.split("/")[0], []).append(trial)
    for format, own in [*sorted(groups.items()), ("all", trials)]:
        counts = Counter(
            "wrong" if trial.wrong else "legal" if trial.outcomes.get("restore") == "fine" else "refused"
            for trial in own
        )
        slowest, largest = max(trial.seconds for trial in own), max(trial.nbytes for trial in own)
        lines.append(
            f"| {format} | {len(own)} | {counts['refused']} | {counts['legal']} | {counts['wrong']} | {slowest:.1f} s | "
            f"{largest >> 20} MiB |"
        )
    kinds = Counter(corpus[trial.name].verdict for trial in trials)
    return [
        *lines,
        "",
        f"Of these, {kinds['refused'] + kinds['unread']} must be refused; the others may be read as what they say.",
    ]


def rotten(rots: list[bit_rot.Rot], flips: int, missed: int) -> list[str]:
    """Returns a table of what flipped bits did."""
    lines = [
        "| read by | bytes | flips | error | no effect | silently other values |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in rots:
        share = f"{100 * one.wrong / one.flips:.0f} %"
        lines.append(
            f"| {one.name} | {one.nbytes:,} | {one.flips:,} | {one.noticed:,} | {one.harmless:,} | {one.wrong:,} ({share}) |"
        )
    return [*lines, "", f"Every single bit of a small checkpoint of Treering's: {flips:,} flips, {missed} not noticed."]


def put(file: Path, lines: list[str]) -> None:
    """Replaces the lines between the marks."""
    text = file.read_text()
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    file.write_text(before + "\n".join([_BEGIN, *lines, _END]) + after)


if __name__ == "__main__":
    main()
