"""`python tests/coverage_table.py coverage.json FILE`: the share of lines and branches that the tests run, per folder.

Then each error and each warning that no test causes, by file and line.

With `GITHUB_STEP_SUMMARY`, the table is shown with the job, too.
"""

import ast
import collections
import json
import os
import sys
from pathlib import Path

_PACKAGE = "src/treering/"
_COUNTED = ("covered_lines", "num_statements", "covered_branches", "num_branches")
_HEAD = """# Coverage

`make coverage`: the share of lines and branches that `make test` runs, in all processes that it starts.
Processes that are killed count for nothing.
"""


def table(report: dict) -> str:
    """Returns the table of a report of `coverage json`. A folder's row counts the folders in it."""
    sums: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path, file in report["files"].items():
        folders = path.split(_PACKAGE)[-1].split("/")[:-1]
        counts = {name: file["summary"][name] for name in _COUNTED}
        for folder in {"", *folders[:1], "/".join(folders[:2])}:
            sums[folder].update(counts)
    rows = [
        "| folder of `src/treering` | lines | run | branches | taken |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for folder, found in sorted(sums.items()):
        cells = []
        for covered, everything in (_COUNTED[:2], _COUNTED[2:]):
            cells += [f"{found[everything]:,}", f"{100 * found[covered] / max(found[everything], 1):.1f} %"]
        rows.append(f"| {f'`{folder}`' if folder else 'all'} | {' | '.join(cells)} |")
    return "\n".join(rows)


def never_caused(report: dict) -> list[str]:
    """Returns a line for each `raise` and each logged warning or error that no test reached."""
    found = []
    for path, file in sorted(report["files"].items()):
        missing = set(file["missing_lines"])
        for node in ast.walk(ast.parse(Path(path).read_text())):
            if not isinstance(node, ast.Raise | ast.Call) or node.lineno not in missing:
                continue
            if isinstance(node, ast.Call):
                what = ast.unparse(node.func)
                if what not in ("_log.warning", "_log.error"):
                    continue
            elif node.exc:
                what = f"raise {ast.unparse(node.exc).partition('(')[0]}"
            else:
                continue
            found.append(f"- `{path.split(_PACKAGE)[-1]}`, line {node.lineno}: `{what}`")
    return found


def main() -> None:
    report, target = sys.argv[1:]
    counts = json.loads(Path(report).read_text())
    never = never_caused(counts)
    heading = f"## Errors and warnings that no test caused in this run: {len(never)}"
    text = "\n".join([_HEAD, table(counts), "", heading, "", *never, ""])
    Path(target).write_text(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
