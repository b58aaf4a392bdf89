"""`python tests/thorough.py --minutes N --write FILE`: runs slices of `make thorough`, oldest results first.

A slice is a folder of tests or a file, with all cases at all points (`TEST_STRIDE=1`). FILE has a row for each, with
the commit on which it ran, so that all of it runs on one source within a few hours. A row is written when its slice
has ended. Exits with 1 if a test failed.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TESTS = Path(__file__).parent
_SEPARATE = 12  # A folder with more test files than this runs file by file.
_BEGIN, _END = "<!-- thorough:begin -->\n", "<!-- thorough:end -->"
_HEAD = """| slice | commit | date | passed | failed | skipped | minutes |
| --- | --- | --- | ---: | ---: | ---: | ---: |
"""


class Row(NamedTuple):
    """The last run of a slice. `date` is "" if it never ran."""

    name: str
    commit: str = ""
    date: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0

    def text(self) -> str:
        """Returns the row of the table."""
        cells = (self.name, self.commit, self.date, *map(str, self[3:6]), f"{self.minutes:.1f}")
        return f"| {' | '.join(cells)} |"


def slices() -> list[str]:
    """Returns the names of all slices: folders and files of `tests`."""
    files = sorted(str(path.relative_to(_TESTS)) for path in _TESTS.rglob("test_*.py"))
    folders: dict[str, list[str]] = {}
    for name in files:
        folders.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
    found: list[str] = []
    for folder, names in folders.items():
        found += names if len(names) > _SEPARATE or not folder else [folder]
    return found


def read_rows(text: str) -> dict[str, Row]:
    """Returns the rows of a table, by the names of their slices."""
    rows: dict[str, Row] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(Row._fields) and cells[5].isdigit():
            passed, failed, skipped = map(int, cells[3:6])
            rows[cells[0]] = Row(cells[0], cells[1], cells[2], passed, failed, skipped, float(cells[6]))
    return rows


def run(name: str) -> Row:
    """Runs a slice."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-rs", f"tests/{name}"]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=_TESTS.parent,
        env={**os.environ, "TEST_STRIDE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-20_000:])}
    failed = counts.get("failed", 0) + counts.get("error", 0) or int(done.returncode not in (0, 5))
    if failed:
        print(done.stdout[-20_000:], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
    minutes = (time.monotonic() - began) / 60
    return Row(
        name,
        commit.stdout.strip(),
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        counts.get("passed", 0),
        failed,
        counts.get("skipped", 0),
        minutes,
    )


def write(file: Path, rows: Mapping[str, Row]) -> None:
    """Writes the table into its page, without slices that are gone."""
    before, after = file.read_text().split(_BEGIN)[0], file.read_text().split(_END)[1]
    table = _HEAD + "".join(rows.get(name, Row(name)).text() + "\n" for name in slices())
    file.write_text(before + _BEGIN + table + _END + after)


def main() -> int:
    parser = argparse.ArgumentParser(prog="thorough", description=__doc__)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--write", type=Path, required=True)
    given = parser.parse_args()
    rows = read_rows(given.write.read_text())
    end, failed = time.monotonic() + 60 * given.minutes, 0
    for name in sorted(slices(), key=lambda name: rows.get(name, Row(name)).date):
        if time.monotonic() > end:
            break
        rows[name] = run(name)
        print(rows[name].text(), flush=True)
        failed += rows[name].failed
        write(given.write, rows)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
