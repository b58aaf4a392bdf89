"""Draws the main rows of benchmarks/results/benchmarks.md as bars. `make bench` calls it after it has written them.

Run it alone as `python -m benchmarks.chart`.
"""

import html
import pathlib
import re

PAGE = pathlib.Path(__file__).parent / "results" / "benchmarks.md"
PICTURE = pathlib.Path(__file__).parent.parent / "docs" / "pictures" / "benchmarks.svg"

_ROWS = [  # of the table, and their titles
    ("durable save", "large", "durable save, 16 × 64 MiB"),
    ("durable save", "gpt2", "durable save, GPT-2 with Adam, 1.5 GB"),
    ("durable save", "small", "durable save, 5,000 small leaves"),
    ("stall of an asynchronous save", "small", "stall of save_async, 5,000 small leaves"),
    ("lost per step by saving each", "105 MB, 0.2 s", "lost per step by saving each, 105 MB"),
    ("restore, warm", "large", "restore, verified, from the page cache"),
    ("restore, cold", "large", "restore, verified, from a cold disk"),
    ("restore onto 4 × 2, warm", "sharded", "restore onto another mesh, 1 GiB"),
]
_COLUMNS = {"treering": "Treering", "floor": "the disk itself", "Orbax v0": "Orbax v0", "Orbax v1": "Orbax v1"}
_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
_LEFT, _WIDE, _LINE, _GAP = 110, 470, 17, 34  # pixels
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-weight: 600 }
.treering { fill: #b4552d }
.floor { fill: #9aa5ad }
.orbax { fill: #c9c0b2 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .treering { fill: #e08a5f } .orbax { fill: #6d675e } }
"""


def drawn(page: str) -> str:
    """The picture of a page: for each row a group of bars, of which the longest is as wide as the picture."""
    rows = table(page)
    parts: list[str] = []
    y = 20
    for operation, state, title in _ROWS:
        values = {name: seconds(text) for name, text in rows[operation, state].items() if name in _COLUMNS}
        times = {name: seconds for name, seconds in values.items() if seconds is not None}
        parts.append(f'<text class="title" x="0" y="{y}">{html.escape(title)}</text>')
        for name in [name for name in _COLUMNS if name in times]:
            y += _LINE
            width = max(_WIDE * times[name] / max(times.values()), 1)
            kind = name if name in ("treering", "floor") else "orbax"
            parts += [
                f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{_COLUMNS[name]}</text>',
                f'<rect class="{kind}" x="{_LEFT}" y="{y - 11}" width="{width:.1f}" height="13" rx="2"/>',
                f'<text x="{_LEFT + width + 6:.1f}" y="{y}">{rows[operation, state][name]}</text>',
            ]
        y += _GAP
    size = f'width="{_LEFT + _WIDE + 80}" height="{y - 10}" viewBox="0 0 {_LEFT + _WIDE + 80} {y - 10}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>Seconds by operation; less is better</title>'
    )
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


def table(page: str) -> dict[tuple[str, str], dict[str, str]]:
    """The first table of a page: cells by operation and state, then by column."""
    lines = [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", page, re.MULTILINE)]
    head = lines[0]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines[2:]:
        if len(line) != len(head):
            break
        cells = [cell.partition(" ±")[0] for cell in line[2:]]
        found[line[0], line[1]] = dict(zip(head[2:], cells, strict=True))
    return found


def seconds(text: str) -> float | None:
    value, _, unit = text.partition(" ")
    return None if unit not in _SECONDS else float(value.replace(",", "")) * _SECONDS[unit]


def draw() -> None:
    """Writes the picture of the page as it is."""
    PICTURE.write_text(drawn(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    draw()
