"""The exit codes of every command in every situation: a row for each command, a column for each situation."""

import io
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import treering as tr
from helpers import Closed
from hostile_input import flip
from treering._cli.main import cli

CALLS = {  # {run} is the place of the column, {out} a free path.
    "ls": "ls {run}",
    "du": "du {run}",
    "show": "show {run}",
    "stats": "stats {run}",
    "diff": "diff {run} {run}",
    "verify": "verify {run}",
    "convert": "convert {run} {out}",
    "convert--dry-run": "convert {run} {out} --dry-run",
    "cp": "cp {run} {out}",
    "cp--dry-run": "cp {run} {out} --dry-run",
    "report": "report {run} --steps 0 --output {out}",
    "prune": "prune {run} last:1 --yes",
    "prune--to": "prune {run} last:1 --yes --to {out}",
    "delete": "delete {run} 1 --yes",
    "pin": "pin {run} 2",
    "unpin": "unpin {run} 2",
    "rewind": "rewind {run} 2",
    "rewind--dry-run": "rewind {run} 2 --dry-run",
    "doctor": "doctor {run} --size 1K",
    "browse": "browse {run}",
    "migrate": "migrate {run}",
    "pull": "pull {run} {out}",
}
TABLE = """
                 good  missing  no-run  empty  finished  damaged  closed  closed-run  foreign  runs  mixed
ls               0     3        3       3      0         0        3       3           0        0     3
du               0     3        3       3      0         0        3       3           0        0     0
show             0     3        3       3      3         0        0       3           0        3     3
stats            0     3        3       3      3         0        0       3           0        3     3
diff             0     3        3       3      3         0        0       3           0        3     3
verify           0     3        3       3      3         1        3       3           0        0     3
convert          0     3        3       3      3         0        0       3           0        3     3
convert--dry-run 0     3        3       3      3         0        0       3           0        3     3
cp               0     3        3       3      3         1        1       3           3        0     3
cp--dry-run      0     3        3       3      3         0        1       3           3        0     3
report           0     3        3       3      3         0        0       3           0        0     3
prune            0     3        3       3      0         0        0       3           0        0     3
prune--to        0     3        3       3      0         3        0       3           0        0     3
delete           0     3        3       3      3         0        0       3           3        3     3
pin              0     3        3       3      3         0        3       3           3        3     3
unpin            0     3        3       3      3         0        3       3           3        3     3
rewind           0     3        3       3      3         0        3       3           0        3     3
rewind--dry-run  0     3        3       3      3         0        3       3           0        3     3
doctor           0     3        0       0      0         0        0       3           0        0     0
browse           2     2        2       2      2         2        2       2           2        2     2
migrate          0     3        0       0      0         0        0       0           0        0     0
pull             0     3        3       3      3         0        0       3           0        3     3
"""
NO_JSON = {"browse", "completion", "pull"}
ASKS = {"prune": "prune {run} last:1", "delete": "delete {run} 1"}  # Without a terminal to ask, the exit code is 2.


class Place(NamedTuple):
    """The directory that a command is called with, and the folders in it that this user may not read."""

    path: pathlib.Path
    closed: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Saves a run of three steps, of which each test takes a copy."""
    place = tmp_path_factory.mktemp("codes") / "run"
    with tr.Checkpointer(place) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, {"w": np.arange(4.0) + step})
    return place


def damaged(path: pathlib.Path) -> None:
    (file,) = (path / "step-00000002").glob("arrays-*")
    flip(file, file.stat().st_size - 1)


def foreign(path: pathlib.Path) -> Place:
    for step in (1, 2):
        tr.save(path / f"checkpoint_{step}", {"w": np.ones(3)}, format="flax")
    return Place(path)


def made(path: pathlib.Path, *files: str) -> Place:
    path.mkdir()
    for file in files:
        (path / file).touch()
    return Place(path)


def copied(run: pathlib.Path, path: pathlib.Path, change: Callable[[pathlib.Path], None] | None = None) -> Place:
    shutil.copytree(run, path)
    if change:
        change(path)
    return Place(path)


def several(run: pathlib.Path, path: pathlib.Path, prefix: str = "step-") -> Place:
    shutil.copytree(run, path / "a")
    shutil.copytree(run, path / "b")
    for name in ("step-00000001", "step-00000002"):
        os.rename(path / "b" / name, path / "b" / name.replace("step-", prefix))
        prefix = f"{prefix}x-" if prefix != "step-" else prefix
    shutil.rmtree(path / "b" / "step-00000003")
    return Place(path)


SITUATIONS: dict[str, Callable[[pathlib.Path, pathlib.Path], Place]] = {
    "good": copied,
    "missing": lambda run, path: Place(path),
    "no-run": lambda run, path: made(path, "notes.txt"),
    "empty": lambda run, path: made(path),
    "finished": lambda run, path: made(path, "finished"),  # A finished run without steps.
    "damaged": lambda run, path: copied(run, path, damaged),
    "closed": lambda run, path: copied(run, path)._replace(closed=("step-00000002",)),
    "closed-run": lambda run, path: copied(run, path)._replace(closed=(path.name,)),
    "foreign": lambda run, path: foreign(path),
    "runs": several,
    "mixed": lambda run, path: several(run, path, "ema-"),  # One of the runs has steps of several prefixes.
}


def cells() -> list[Any]:
    head, *rows = (line.split() for line in TABLE.strip().splitlines())
    assert head == list(SITUATIONS)
    assert {row[0] for row in rows} == set(CALLS)
    # view runs until it is interrupted; test_view.py has its codes.
    assert {name.partition("--")[0] for name in CALLS} == set(cli.commands) - {"completion", "view"}
    return [
        pytest.param(name, situation, int(code), id=f"{name}-{situation}")
        for name, *codes in rows
        for situation, code in zip(head, codes, strict=True)
    ]


def words(command: str, place: Place, tmp_path: pathlib.Path) -> list[str]:
    return [word.format(run=place.path, out=tmp_path / "out") for word in command.split()]


@pytest.mark.parametrize(("name", "situation", "code"), cells())
def test_the_table_holds(
    name: str, situation: str, code: int, run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, use_disk: Any
) -> None:
    place = SITUATIONS[situation](run, tmp_path / "place")
    if place.closed:
        use_disk(Closed(*place.closed))
    found = treering(*words(CALLS[name], place, tmp_path))
    assert found.code == code, found.err or found.out
    # These do the rest.
    if code in (2, 3) and name.partition("--")[0] not in ("ls", "du", "verify", "prune", "cp", "report"):
        assert found.err and not found.out
    for closed in place.closed:
        assert code not in (1, 3) or closed in found.err + found.out


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_wrong_usage(name: str, run: pathlib.Path, tmp_path: pathlib.Path, treering: Any) -> None:
    call = words(CALLS[name], Place(run), tmp_path)
    empty = ["" if word == str(run) else word for word in call]
    calls = [call[:1], empty, [*call, "--no-such-option"]]
    if name not in ("stats", "report"):  # They accept any globs, or runs.
        calls.append([*call, "one", "two", "three", "many"])
    for wrong in calls:
        found = treering(*wrong)
        assert found.code == 2 and "Error: " in found.err and not found.out, wrong


@pytest.mark.parametrize(
    "call",
    [
        "show {run} --step x", "show {run} --format nosuch", "show {run} --depth 0", "stats {run} --format nosuch",
        "verify {run} --newer soon", "verify {run} --newer 7", "verify {run} --subset 3/2",
        "verify {run} --format nosuch",
        "ls {run} --best :min", "show {run} --step 1 --best x",
        "ls {run} --keep newest", "ls {run} --json --csv", "du {run} --depth 0",
        "diff {run}", "diff {run} --steps 1", "pin {run} x", "unpin {run} 1.5", "rewind {run}", "rewind {run} 1 --all",
        "delete {run} x", "delete {run} -- -1",
        "prune {run} newest:1", "convert {run} {out} --source-format nosuch", "convert {run} {out} --format nosuch",
        "show {run} --step -1", "pin {run} 99999999999999999999", "diff {run} --steps 1 99999999999999999999",
        "convert {run} {out} --rename (=x", "convert {run} {out} --max-expansion 0", "doctor {run} --size 9999999999T",
        "doctor {run} --size none", "report {run} --steps -1",
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_wrong_usage(
    call: str, run: pathlib.Path, tmp_path: pathlib.Path, treering: Any
) -> None:
    found = treering(*words(call, Place(run), tmp_path))
    assert found.code == 2 and "Error: " in found.err and not found.out


@pytest.mark.parametrize("name", CALLS)
def test_commands_with_stdin_closed_do_not_ask(
    name: str, run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stdin closed, prune and delete end with 2 instead of asking."""
    place = copied(run, tmp_path / "run")
    monkeypatch.setattr(sys, "stdin", None)
    found = treering(*words(ASKS.get(name, CALLS[name]), place, tmp_path))
    sys.stdin.close()  # The command has opened /dev/null.
    if name in ASKS:
        assert found.code == 2 and "cannot ask" in found.err and tr.steps(place.path) == [1, 2, 3]
    else:
        assert found.code == (2 if name == "browse" else 0), found.err


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NO_JSON])
@pytest.mark.parametrize("unbuffered", [False, True])
def test_exit_code_differs_if_the_reader_has_gone(
    name: str, unbuffered: bool, run: pathlib.Path, tmp_path: pathlib.Path, treering: Any, monkeypatch: Any
) -> None:
    """If the reader of the output has gone, the exit code is 141 instead of 0."""
    for n, options in enumerate(([], ["--json"])):
        place = copied(run, tmp_path / f"run{n}")
        read, write = os.pipe()
        os.close(read)
        raw = io.FileIO(write, "w")
        with io.TextIOWrapper(raw if unbuffered else io.BufferedWriter(raw), write_through=unbuffered) as stream:  # type: ignore[arg-type]
            monkeypatch.setattr(sys, "stdout", stream)
            folder = tmp_path / str(n)
            found = treering(*words(CALLS[name], place, folder), *options)
            assert found.code == 141
            assert "Traceback" not in found.err and "error" not in found.err
