"""Makes small mistakes in the library and looks which test notices: ``PYTHONPATH=tests python -m mutants``.

``choose`` takes some mutants of each folder at random, the same for the same seed, and lists them in ``mutants.tsv``
next to this file. ``add`` takes some of named files, in place of those whose file is gone. ``cover`` runs the tests
once and notes which of them execute which lines; it needs pytest-cov.
``run`` puts each mutant in a copy of the library and runs tests until one fails: those that execute its line and those
of its folder, or without ``cover`` those that are named here for its file, then for its folder. It notes the first test
that failed; ``survives`` is what none has noticed, and a reason may follow it by hand. A suite that has changed is run
again with ``run --again``: it must notice what the one before has noticed.
"""

import argparse
import csv
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .mutate import mutants, mutated

_ROOT = Path(__file__).parents[2]
_TABLE = Path(__file__).with_name("mutants.tsv")
# The tests that are run first, those that are likely to notice: of single files, and of folders.
_TESTS_OF_FILES = {
    "formats/treering/commit.py": ("tests/formats/test_commit.py", "tests/stores/objects/test_lost_answers.py"),
    "formats/treering/ledger.py": ("tests/run/test_unchanged.py", "tests/cli/test_copies.py"),
    "formats/treering/removal.py": ("tests/formats/test_commit.py", "tests/cli/test_deleting.py"),
    "_run/pending_saves.py": ("tests/run/test_on_error.py", "tests/run/test_run.py"),
    "_run/step_fallback.py": ("tests/formats/test_damaged_steps.py", "tests/run/test_checkpointer.py"),
    "_run/tiers/": ("tests/run/test_step_states.py", "tests/run/test_two_places.py", "tests/run/test_host_disks.py"),
    "_save/pending.py": ("tests/core/test_threads.py", "tests/save/test_save.py", "tests/run/test_on_error.py"),
    "_save/save_manifest.py": ("tests/formats/test_box_levels.py", "tests/publish/test_publisher.py"),
}
_FOLDERS = {
    "_publish": ("tests/publish", "tests/formats/test_weight_streams.py", "tests/cli"),
    "_save": ("tests/save", "tests/run"),
    "_restore": ("tests/restore", "tests/formats/test_treering.py"),
    "formats/treering": (
        "tests/formats/test_treering.py",
        "tests/formats/test_commit.py",
        "tests/save",
        "tests/formats",
    ),
    "stores": ("tests/stores", "tests/formats/test_overwriting.py", "tests/save"),
    "_run": ("tests/run", "tests/test_keep.py", "tests/cli", "tests/tools"),
    "_processes": (
        "tests/processes",
        "tests/restore/test_collective_read.py",
        "tests/run/test_host_disks.py",
        "tests/save/test_parallel_formats.py",
    ),
}
_COVERED = _ROOT / ".coverage"  # by `cover`
_MAX_COVERING = 150  # of the tests that execute a line, those of the mutant's folder first
_COLUMNS = ("file", "number", "line", "what", "noticed")
_SECONDS = 900  # for one run of tests
_TEST_SECONDS = 120  # for one test; one that hangs is noticed, too
# A name may have spaces. Captured lines of the log begin with "ERROR" and several.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


def choose(seed: int, each: int) -> None:
    """Writes a new table of mutants that are not run yet."""
    rows: list[dict[str, object]] = []
    for folder in _FOLDERS:
        source = _ROOT / "src" / "treering" / folder
        files = sorted(source.rglob("*.py")) if folder != "stores" else sorted(source.glob("*.py"))
        known = [(file, one) for file in files for one in mutants(file.read_text())]
        for file, one in sorted(random.Random(f"{seed} {folder}").sample(known, each), key=lambda row: str(row[0])):
            path = file.relative_to(_ROOT / "src" / "treering").as_posix()
            rows.append({"file": path, "number": one.number, "line": one.line, "what": one.what, "noticed": ""})
    _write(rows)


def add(files: list[str], seed: int, each: int) -> None:
    """Adds mutants of files to the table, and drops those of files that are gone."""
    source = _ROOT / "src" / "treering"
    rows = [row for row in _read() if (source / row["file"]).exists()]
    for file in files:
        known = mutants((source / file).read_text())
        chosen = sorted(random.Random(f"{seed} {file}").sample(known, each), key=lambda one: one.line)
        fields = ({"number": str(one.number), "line": str(one.line), "what": one.what} for one in chosen)
        rows += [{"file": file, **one, "noticed": ""} for one in fields]
    _write(rows)


def run(*, again: bool) -> None:
    """Runs the tests with each mutant that was not run, or that was noticed, and notes what noticed it."""
    rows = _read()
    for row in rows:
        if row["noticed"] and not (again and not _is_unnoticed(row)):
            continue
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            row["noticed"] = _noticed(Path(folder), row)
        print(f"{row['file']}:{row['line']} {row['what']}: {row['noticed']}", flush=True)
        _write(rows)
    noticed = sum(not _is_unnoticed(row) for row in rows)
    print(f"{noticed} of {len(rows)} mutants are noticed")


def _is_unnoticed(row: dict[str, str]) -> bool:
    return not row["noticed"] or row["noticed"].startswith(("survives", "gone"))


def _noticed(folder: Path, row: dict[str, str]) -> str:
    """The first test that fails with a mutant."""
    shutil.copytree(_ROOT / "src", folder / "src")  # with the bytecode, which all other files still fit
    file = folder / "src" / "treering" / row["file"]
    source = file.read_text() if file.exists() else ""
    alike = [one for one in mutants(source) if one.what == row["what"]]
    if not alike:
        return "gone"  # the library has changed there; another is chosen in its place
    nearest = min(alike, key=lambda one: abs(one.line - int(row["line"])))
    row |= {"line": str(nearest.line), "number": str(nearest.number)}
    file.write_text(mutated(source, nearest.number))
    folder.chmod(0o755)  # a test becomes another user, who must get at its files
    first = next(tests for name, tests in _FOLDERS.items() if row["file"].startswith(name + "/"))
    own = next((tests for name, tests in _TESTS_OF_FILES.items() if row["file"].startswith(name)), first)
    covering = _covering_tests(row["file"], nearest.line, first)
    # Tests that execute a line only in processes that they start are not among the covering ones.
    for tests in (covering, first) if covering else dict.fromkeys((own, first)):
        ignored: list[str] = []
        stride = {"TEST_STRIDE": "1"} if tests is own else {}  # a sample may leave out the test that notices
        while name := _first_failure(folder, folder / "src", "" if covering else "not slow", tests, ignored, stride):
            if name.startswith("no test") or not _first_failure(folder, _ROOT / "src", "", (name,), [], stride):
                return name
            ignored.append(name)  # This test fails here without the mutant too.
    return "survives"


def _cover() -> None:
    """Runs the tests and notes which of them execute which lines."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow"]
    command += ["--cov=treering", "--cov-context=test", "--cov-report="]
    subprocess.run(command, cwd=_ROOT, env={**os.environ, "PYTHONPATH": f"src:{os.environ['PYTHONPATH']}"}, check=False)


def _covering_tests(file: str, line: int, first: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the tests that execute a line, if `cover` has run; those in `first` come first."""
    if not _COVERED.exists():
        return ()
    from coverage import CoverageData

    covered = CoverageData(str(_COVERED))
    covered.read()
    contexts = covered.contexts_by_lineno(str(_ROOT / "src" / "treering" / file)).get(line, [])
    tests = sorted({context.rpartition("|")[0] for context in contexts} - {""})
    return tuple(sorted(tests, key=lambda test: not test.startswith(first))[:_MAX_COVERING])


def _first_failure(
    folder: Path, source: Path, marks: str, tests: tuple[str, ...], ignored: list[str], stride: dict[str, str]
) -> str | None:
    """The first test that fails, "no test ends" when the tests hang, None when all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "2", "-m", marks, "--maxfail=1", *tests]
    command += [f"-o=faulthandler_timeout={_TEST_SECONDS}", *(f"--deselect={name}" for name in ignored)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "TMPDIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        **stride,
    }
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "no test ends"
    if done.returncode == 0:
        return None
    found = _FAILED.search(done.stdout)
    return found[1] if found else "no test begins"


def _read() -> list[dict[str, str]]:
    with _TABLE.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def _write(rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    with _TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(_COLUMNS), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    chooses = commands.add_parser("choose")
    chooses.add_argument("--seed", type=int, default=0)
    chooses.add_argument("--each", type=int, default=11, help="mutants of each folder (default: 11)")
    adds = commands.add_parser("add")
    adds.add_argument("files", nargs="+", help="below src/treering")
    adds.add_argument("--seed", type=int, default=0)
    adds.add_argument("--each", type=int, default=2, help="mutants of each file (default: 2)")
    commands.add_parser("cover")
    runs = commands.add_parser("run")
    runs.add_argument("--again", action="store_true", help="run those that were noticed once more")
    arguments = parser.parse_args()
    if arguments.command == "choose":
        choose(arguments.seed, arguments.each)
    elif arguments.command == "add":
        add(arguments.files, arguments.seed, arguments.each)
    elif arguments.command == "cover":
        _cover()
    else:
        run(again=arguments.again)


if __name__ == "__main__":
    main()
