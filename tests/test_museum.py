"""Silent losses of state that users have reported: what other libraries do today, and what Treering does."""

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import pathlib

import pytest

from museum.outcomes import Case, Outcome, outcome
from treering.errors import MismatchError

os.environ.setdefault("KERAS_BACKEND", "jax")
pytest.importorskip("keras", reason="Keras is installed for `make test` and not for `make lowest`")
pytest.importorskip("orbax.checkpoint", reason="Orbax is installed for `make test`")

pytestmark = [pytest.mark.peers, pytest.mark.long, pytest.mark.whole]

HERE = pathlib.Path(__file__).parent / "museum"
PAGE = pathlib.Path(__file__).parents[1] / "benchmarks" / "results" / "museum.md"
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in {"__init__", "outcomes"})
CASES: dict[str, Case] = {name: importlib.import_module(f"museum.{name}").CASE for name in NAMES}
ADAPTER = importlib.util.find_spec("treering.orbax") is not None
ABOUT_ORBAX = [name for name in NAMES if CASES[name].about_orbax] if ADAPTER else []


@pytest.mark.parametrize("name", NAMES)
def test_the_library_of_the_report_does_this_today(name: str, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    package, version = case.version.split()
    today = outcome(lambda: case.reported(importlib.import_module("orbax.checkpoint"), tmp_path), case.says)
    installed = importlib.metadata.version(package)
    if today != case.today and installed != version:
        pytest.skip(
            f"{package} {installed} gives: {today}. {version} gave: {case.today}. Change the case and the page."
        )
    assert today == case.today


@pytest.mark.parametrize("name", NAMES)
def test_treering_is_never_silent(name: str, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    assert outcome(lambda: case.native(tmp_path), case.says) == case.treering != Outcome.SILENT


@pytest.mark.parametrize("name", ABOUT_ORBAX)
def test_the_same_program_with_the_adapter_is_never_silent(name: str, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    adapter = importlib.import_module("treering.orbax")
    found = outcome(lambda: case.reported(adapter, tmp_path), case.says)
    assert found != Outcome.SILENT
    assert found == case.adapter


def test_the_page_has_these_outcomes() -> None:
    """Each row is that of a case, in any order."""
    section = PAGE.read_text("utf-8")
    rows = [line for line in section.splitlines() if "github.com" in line]
    assert sorted(rows) == sorted(case.row for case in CASES.values())
    assert all(
        f"{package} {version}" in section
        for package, version in {tuple(case.version.split()) for case in CASES.values()}
    )


def _warns(message: str) -> bool:
    logging.getLogger("treering").warning(message)
    return False


def _raises(error: Exception) -> bool:
    raise error


def test_outcomes_are_distinguished() -> None:
    assert outcome(lambda: True, "head") == Outcome.RIGHT
    assert outcome(lambda: False, "head") == Outcome.SILENT
    assert outcome(lambda: _warns("head: expected float32, found nothing"), "head") == Outcome.WARNING
    assert outcome(lambda: _warns("something else"), "head") == Outcome.SILENT
    assert outcome(lambda: _raises(OSError("the disk is full")), "head") == Outcome.ERROR
    assert outcome(lambda: _raises(MismatchError("head: expected float32, found nothing")), "head") == Outcome.ERROR
    with pytest.raises(MismatchError):  # an error of Treering about another matter
        outcome(lambda: _raises(MismatchError("something else")), "head")
    with pytest.raises(AttributeError):  # a mistake in the program
        outcome(lambda: _raises(AttributeError("restore")), "head")
