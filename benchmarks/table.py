"""The results as markdown."""

import dataclasses
from collections.abc import Iterable, Sequence

COLUMNS = {  # of the table, by contestant
    "treering": "treering",
    "floor": "floor",
    "Orbax v0": "Orbax v0",
    "Orbax v1": "Orbax v1",
    "safetensors": "safetensors + fsync",
    "torch DCP": "torch DCP",
    "torch.save": "torch.save + fsync",
    "TensorStore": "TensorStore",
    "its library": "its own library",
}
TIMES = ("s", "ms", "µs")
_SCALES = {"s": 1.0, "ms": 1e3, "µs": 1e6, "MiB": 2.0**-20, "": 1.0}  # from seconds, bytes and counts


@dataclasses.dataclass(frozen=True)
class Row:
    """What each contestant took for an operation, in seconds or bytes; `unit` is how it is shown."""

    operation: str
    state: str
    unit: str
    values: dict[str, float]

    def amount(self, name: str) -> float:
        """The value in the row's unit."""
        return self.values[name] * _SCALES[self.unit]

    def shown(self, name: str) -> str:
        if name not in self.values:
            return "–"
        text = f"{_three_digits(self.amount(name))} {self.unit}".rstrip()
        spread = getattr(self.values[name], "spread", None)
        return text if spread is None else f"{text} ±{spread:.0%}"

    def of_floor(self) -> float | None:
        """Treering's throughput, with the floor's as 1."""
        return self.values["floor"] / self.values["treering"] if "floor" in self.values else None

    def fastest_peer(self) -> str | None:
        """The fastest other library; None for what is no time."""
        found = [name for name in self.values if name not in ("treering", "floor")]
        return None if self.unit not in TIMES else min(found, key=self.values.__getitem__, default=None)

    def times_peer(self) -> str:
        """Treering's speed, with the fastest peer's as 1, and the name of that peer."""
        name = self.fastest_peer()
        return f"{_three_digits(self.values[name] / self.values['treering'])} × {name}" if name else "–"

    def fastest_orbax(self) -> str | None:
        found = [name for name in ("Orbax v0", "Orbax v1") if name in self.values]
        return min(found, key=self.values.__getitem__, default=None)

    def times_orbax(self) -> float | None:
        """Returns the speed relative to the faster Orbax; None for memory, which has no speed."""
        name = self.fastest_orbax()
        return None if name is None or self.unit == "MiB" else self.values[name] / self.values["treering"]


def results(rows: Sequence[Row]) -> str:
    """One line per operation and state."""
    names = [name for name in COLUMNS if any(name in row.values for row in rows)]
    ratios = ["treering ÷ floor", "vs fastest Orbax", "vs fastest peer"]
    lines = [
        [
            row.operation,
            row.state,
            *(row.shown(name) for name in names),
            _ratio(row.of_floor(), ""),
            _ratio(row.times_orbax(), " ×"),
            row.times_peer(),
        ]
        for row in rows
    ]
    return markdown(["operation", "state", *(COLUMNS[name] for name in names), *ratios], lines)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table whose columns from the third on are numbers."""
    rule = ["---", "---", *("--:" for _ in head[2:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def _ratio(value: float | None, suffix: str) -> str:
    return "–" if value is None else _three_digits(value) + suffix


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{float(f'{value:.3g}'):g}"
