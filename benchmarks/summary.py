"""Writes the main rows of benchmarks/results/benchmarks.md into docs/explanation/benchmarks.md, as `make bench` does.

Run it alone as `python -m benchmarks.summary`.
"""

import pathlib

from . import chart, table

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "explanation" / "benchmarks.md"
MARKS = ("<!-- main:begin -->", "<!-- main:end -->")

MAIN = [  # operations and states
    ("durable save", "large"),
    ("durable save", "small"),
    ("stall of an asynchronous save", "large"),
    ("stall of an asynchronous save", "small"),
    ("restore, warm", "large"),
    ("restore, warm", "small"),
    ("restore, cold", "large"),
    ("durable save of a later step", "1 GiB frozen, 10 MiB trained"),
    ("save to a bucket", "256 MiB in objects of 16 MiB"),
    ("restore from a bucket", "256 MiB in objects of 16 MiB"),
]
_PEERS = ["Orbax v0", "Orbax v1", "torch DCP", "torch.save + fsync", "TensorStore", "safetensors + fsync"]
_COLUMNS = {"treering": "Treering", "floor": "floor", **{name: name.removesuffix(" + fsync") for name in _PEERS}}


def main_rows(page: str) -> str:
    """Returns the table of the main rows that a page of results has, with a dash for what it lacks."""
    found = chart.table(page)
    lines = [
        [*row, *(found[row].get(name, "–") for name in _COLUMNS), _ratio(found[row])] for row in MAIN if row in found
    ]
    return table.markdown(["operation", "state", *_COLUMNS.values(), "speed against the fastest"], lines)


def _ratio(cells: dict[str, str]) -> str:
    times = {name: chart.seconds(cells.get(name, "–")) for name in _PEERS}
    fastest = min((time for time in times.values() if time is not None), default=None)
    own = chart.seconds(cells["treering"])
    return f"{fastest / own:.2g} ×" if fastest and own else "–"


def replaced(text: str, new: str, marks: tuple[str, str]) -> str:
    """Returns a page with other contents between its marks. Raises `SystemExit` unless it has each of them once."""
    begin, end = marks
    if [text.count(mark) for mark in marks] != [1, 1]:
        raise SystemExit(f"expected {begin} and {end} once each; put both into the page")
    return f"{text[: text.index(begin)]}{begin}\n\n{new}\n\n{text[text.index(end) :]}"


def write() -> None:
    """Writes the main rows of the page of results, as it is, into the page for readers."""
    rows = main_rows(chart.PAGE.read_text("utf-8"))
    PAGE.write_text(replaced(PAGE.read_text("utf-8"), rows, MARKS), "utf-8")


if __name__ == "__main__":
    write()
