"""An error of a command names its options, and never an argument of Python."""

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering._cli.main import cli, to_shell_wording

_SOURCE = pathlib.Path(tr.__file__).parent
# No command prints the messages of these modules: jobs, processes, templates, rules without an option, and help.
# What `migrate` prints is about Python programs.
_NOT_PRINTED = (
    *("testing", "keras", "orbax", "_processes", "_pytree", "_restore", "_threads", "_core/migration_hints.py"),
    *("_run/checkpointer.py", "_run/collective.py", "_rules/groups.py", "rules.py", "_cli", "_tools/migrate"),
)
_PYTHON = re.compile(r"pass [a-z_]+=|\bCheckpointer\b|treering\.(rules|open|save|follow)|=(True|False)\b|math\.inf")
_OF_PROGRAMS = (  # Messages about the caller's program, and one of PyTorch.
    "weights_only=", "mmap=True maps", "Checkpointer of this process", "another Checkpointer, which",
    "on_exists=", "closed without saving", "save_on_preemption=", "rules: expected rules made by",
    "load it in the program that wrote it",
)  # fmt: skip


def _messages() -> Iterator[tuple[str, str]]:
    """Yields the texts of the library and their places, with a word for each inserted value. Skips docstrings."""
    for file in sorted(_SOURCE.rglob("*.py")):
        where = file.relative_to(_SOURCE).as_posix()
        if not where.startswith(_NOT_PRINTED):
            tree = ast.parse(file.read_text())
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "'x'" for part in node.values)
                    yield where, "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | inner):
                    yield where, node.value


@pytest.mark.long
@pytest.mark.whole
def test_no_printed_message_advises_a_python_argument() -> None:
    """No message that a command prints advises to pass a Python argument."""
    found = [(where, text) for where, text in _messages() if _PYTHON.search(text) and " " in text]
    found = [(where, text) for where, text in found if not any(one in text for one in _OF_PROGRAMS)]
    assert len(found) > 5, "the pattern matches real messages"
    left = [
        (where, said)
        for where, text in found
        if _PYTHON.search(said := to_shell_wording(text, cli.commands, ["convert"]))
    ]
    assert left == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "c", "m", "--drop", "nothing"], "--drop 'nothing': matches none of the 1 leaves (x)\n"),
        (["convert", "c", "m", "--rename", "y=z"], "--rename 'y': matches none of the 1 leaves (x)\n"),
        (["convert", "c", "c"], "pass --overwrite to replace it\n"),
        (["convert", "c", "m", "--step", "3"], "--step 3 was asked for"),
        (["convert", "c", "m", "--dtype", "int3"], "--dtype 'int3': expected"),
        (["show", "step=1", "--step", "3"], "/step=1: --step 3 was asked for"),
        (["show", "my step=1; pass step=2", "--step", "3"], "/my step=1; pass step=2: --step 3 was asked for"),
        (["cp", "my step=1; pass step=2", "c", "--steps", "3"], "/my step=1; pass step=2: expected a run to choose"),
        (["convert", "zeros", "m"], "pass --max-expansion inf\n"),
        (["ls", "several"], "found several other prefixes: a-, b-; open a step by its own path, or pass --prefix\n"),
        (["ls", "other"], "a-1 is in it; pass --prefix 'a-'\n"),
        (["show", "foo://x"], ", s3, s3a (a folder of that name has an absolute path)\n"),
        (["report", "other", "--prefix", "a-", "-o", "c.html/x"], "/c.html/x: the report cannot be written there: "),
        (["pull", "stream", "m"], "and drop it by a rule: `treering convert --drop text`\n"),
    ],
)
def test_errors_name_the_options_of_the_command(
    tmp_path: pathlib.Path, treering: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("treering._core.expansion._EXEMPT_BYTES", 1000)
    for name in ("c", "step=1", "my step=1; pass step=2", "several/a-00000001", "several/b-00000001"):
        tr.save(tmp_path / name, {"x": np.ones(3)})
    (tmp_path / "c.html").touch()
    tr.save(tmp_path / "stream" / "step-00000001", {"x": np.ones(3), "text": "t"})
    same = np.ones(10_000)
    tr.save(tmp_path / "zeros", dict.fromkeys(map(str, range(200)), same))
    tr.save(tmp_path / "other" / "a-1", {"x": np.ones(3)})
    found = treering(*arguments)
    assert found.code == 3 and said in found.err.partition("More about it")[0], found.err
