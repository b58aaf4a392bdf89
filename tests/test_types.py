"""Tests the errors that type checkers report for users' code."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import treering as tr
from sampling import sample_points

EXAMPLES = pathlib.Path(__file__).parent / "typed" / "examples.py"
SOURCES = pathlib.Path(tr.__file__).parents[1]


def _by_pyright(folder: pathlib.Path) -> dict[int, str]:
    settings = {"extraPaths": [str(SOURCES)], "typeCheckingMode": "strict", "reportUnknownMemberType": "none"}  # JAX's
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    shutil.copy(EXAMPLES, folder)
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(folder)]
    found = json.loads(subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True).stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    errors = [one for one in found["generalDiagnostics"] if one["severity"] == "error"]
    return {one["range"]["start"]["line"] + 1: one["message"] for one in errors}


def _by_mypy(folder: pathlib.Path) -> dict[int, str]:
    command = ["mypy", "--strict", "--follow-imports=silent", "--no-error-summary", f"--cache-dir={folder}"]
    command += [f"--python-executable={sys.executable}", "--config-file=", str(EXAMPLES)]
    environment = {**os.environ, "MYPYPATH": str(SOURCES)}
    found = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, env=environment)
    assert found.returncode in (0, 1) and not found.stderr, found.stdout + found.stderr
    lines = re.findall(r"^\S*examples\.py:(\d+): error: (.*)$", found.stdout, re.MULTILINE)
    return {int(line): message for line, message in lines}


@pytest.mark.slow
@pytest.mark.parametrize("checker", sample_points([_by_pyright, _by_mypy]))
def test_a_type_checker_reports_what_is_wrong_and_nothing_else(checker: object, tmp_path: pathlib.Path) -> None:
    assert callable(checker)
    found = checker(tmp_path)
    lines = enumerate(EXAMPLES.read_text().splitlines(), 1)
    assert found.keys() == {n for n, line in lines if line.endswith("# error")}, found
