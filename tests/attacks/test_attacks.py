"""Tries the attacks of the corpus in child processes, which end when they hang. `make damage` measures them all."""

from pathlib import Path

import pytest

from attacks import load
from attacks.runner import run
from sampling import sample_points

FORMATS = sorted({name.split("/")[0] for name in load()})
QUICK = 16  # `make quick` tries one of this many


def check(names: list[str], folder: Path) -> None:
    trials = run(names, folder)
    assert [trial.name for trial in trials] == names
    wrong = [f"{trial.name}: {problem}" for trial in trials for problem in trial.wrong]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_no_attack_succeeds(format: str, tmp_path: Path) -> None:
    check(sample_points(name for name in load() if name.split("/")[0] == format), tmp_path / "x")


@pytest.mark.rare
@pytest.mark.slow
def test_a_sample_of_the_attacks(tmp_path: Path) -> None:
    check(list(load())[::QUICK], tmp_path / "x")
