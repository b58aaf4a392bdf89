"""The libraries of `make bench` save and restore the same bytes, and the tables say which did not take part."""

import importlib.util
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_ROOT)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.parametrize(
    "name",
    [
        "treering",
        "safetensors",
        "TensorStore",
        pytest.param("torch DCP", marks=_TORCH),
        pytest.param("torch.save", marks=_TORCH),
    ],
)
def test_contestants_restore_what_they_saved(tmp_path: pathlib.Path, name: str) -> None:
    """A restore returns new arrays or tensors with the bits of the state, also after a save in the background."""
    from benchmarks import contestants, states

    random = np.random.default_rng(0)
    state = {
        "half": jnp.asarray(random.standard_normal((3, 5)), jnp.bfloat16),
        "more": [jnp.asarray(random.standard_normal(n), jnp.float32) for n in (1, 7)],
        "odd": jnp.asarray([np.nan, -0.0, np.inf], jnp.float32),
    }
    one = contestants.MAKERS[name](state)
    one.save(str(tmp_path / "saved"))
    restored = one.restore(str(tmp_path / "saved"))
    states.check(state, one.arrays(restored), name)
    if name.startswith("torch"):
        import torch

        assert {leaf.dtype for leaf in restored} == {torch.bfloat16, torch.float32}
    assert (one.start is not None) == (name in contestants.WITH_ASYNC_SAVES)
    if one.start:
        one.start(str(tmp_path / "later"))()
        states.check(state, one.arrays(one.restore(str(tmp_path / "later"))), name)


def test_a_changed_bit_is_found() -> None:
    """The check that every contestant passes before it is timed compares bits, not values."""
    from benchmarks import states

    zeros = {"a": jnp.zeros(3, jnp.bfloat16)}
    with pytest.raises(AssertionError, match="DCP: leaf 0 came back changed"):
        states.check(zeros, jax.tree.map(jnp.negative, zeros), "DCP")


@pytest.mark.parametrize("found", [None, object()], ids=["missing", "installed"])
def test_a_report_names_libraries_that_are_missing(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    from benchmarks import __main__ as main
    from benchmarks import contestants

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(main.importlib.metadata, "version", lambda name: "1.0")
    assert ("torch DCP" in contestants.all_contestants()) == bool(found)
    sentence = "torch is not installed: torch DCP and torch.save do not take part."
    assert (sentence in main.report([], 3)) == (not found) == ("torch 1.0" not in main.report([], 3))


def test_every_row_shows_the_fastest_peer_and_the_verdict() -> None:
    from benchmarks import __main__ as main
    from benchmarks import table

    times = {"treering": 0.5, "floor": 0.4, "Orbax v0": 2.0, "torch DCP": 1.0, "safetensors": 1.5}
    text = main.report([table.Row("durable save", "large", "s", times)], 3)
    assert "| 0.8 | 4 × | 2 × torch DCP |" in text
    assert "| durable save | large | ≥ 0.93 of the floor | 0.80 of the floor | **no** |" in text


def test_the_page_has_the_main_rows_of_the_results() -> None:
    """PyTorch's columns stay, with dashes, where a run was without PyTorch. `make bench` fills them."""
    from benchmarks import chart, summary

    assert f"\n{summary.main_rows(chart.PAGE.read_text('utf-8'))}\n" in summary.PAGE.read_text("utf-8")
    head = "| operation | state | treering | torch DCP |\n| --- | --- | --: | --: |\n"
    for cell, ratio in (("0.2 s ±3%", "4 ×"), ("–", "–")):
        (line,) = summary.main_rows(f"{head}| restore, cold | large | 50 ms | {cell} |\n").splitlines()[2:]
        shown = cell.partition(" ±")[0]
        assert line == f"| restore, cold | large | 50 ms | – | – | – | {shown} | – | – | – | {ratio} |"


def test_pages_have_the_figures_of_the_results() -> None:
    """The front pages round the same figures. Another run of the benchmarks must change all of them."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in (_ROOT / "benchmarks" / "results" / "benchmarks.md").read_text().splitlines():
        operation, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 4:
            rows.setdefault((operation, cells[0]), cells[1:])

    def seconds(operation: str, state: str, *columns: int) -> float:
        found = [rows[operation, state][column].split() for column in columns]
        return min(float(one[0]) * {"s": 1, "ms": 1e-3}[one[1]] for one in found)

    save, stall = "durable save", "stall of an asynchronous save"
    figures = {  # each with its value in Treering's column, or the faster of Orbax's two
        "README.md": [
            (r"durable save, 16 arrays of 64 MiB \| ([\d.]+) s", seconds(save, "large", 0), 1),
            (r"durable save, 16 arrays of 64 MiB \| [\d.]+ s \| ([\d.]+) s", seconds(save, "large", 2, 3), 1),
            (r"durable save, 5,000 small leaves \| ([\d.]+) s", seconds(save, "small", 0), 1),
            (r"durable save, 5,000 small leaves \| [\d.]+ s \| ([\d.]+) s", seconds(save, "small", 2, 3), 1),
        ],
        "docs/migrate/orbax.md": [
            (r"5,000 small leaves takes ([\d.]+) s", seconds(save, "small", 0), 1),
            (r"with Orbax ([\d.]+) s and", seconds(save, "small", 2, 3), 1),
            (r"stalls the loop for ([\d.]+) ms", seconds(stall, "small", 0), 1e-3),
            (r"with Orbax [\d.]+ s and ([\d.]+) ms", seconds(stall, "small", 2, 3), 1e-3),
        ],
    }
    wrong = [
        f"{page}: {pattern}: expected {value}"
        for page, listed in figures.items()
        for pattern, value, unit in listed
        if (found := re.search(pattern, re.sub(r"\n +", " ", (_ROOT / page).read_text()))) is None
        or float(found[1]) * unit != pytest.approx(value, rel=0.03)
    ]
    assert not wrong
