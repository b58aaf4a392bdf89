"""What Treering promises, and whether it held."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from . import converting
from .table import Row, markdown


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound on what `measure` names of one row.

    "floor": the share of the floor's throughput; "time": how many times the floor's time; "orbax": how many times
    the speed of the faster Orbax; "own" and "safetensors": the same of the library that wrote it, and of that one;
    "value": the value itself, in the row's unit; "least": the same, from below.
    """

    operation: str
    state: str
    measure: Literal["floor", "time", "orbax", "own", "safetensors", "value", "least"]
    bound: float

    def text(self) -> str:
        number = f"{self.bound:g}"
        return {
            "floor": f"≥ {number} of the floor",
            "orbax": f"≥ {number} × Orbax",
            "own": f"≥ {number} × its own library",
            "safetensors": f"≥ {number} × safetensors",
            "time": f"≤ {number} × the floor's time",
            "value": f"≤ {number}",
            "least": f"≥ {number}",
        }[self.measure]

    def judge(self, row: Row) -> tuple[str, bool]:
        """Returns the measured value as text, and True if it meets the target."""
        if self.measure == "value":
            return row.shown("treering"), row.amount("treering") <= self.bound
        if self.measure == "least":
            return row.shown("treering"), row.amount("treering") >= self.bound
        if self.measure in ("own", "safetensors"):
            other, name = (
                ("its library", "its own library") if self.measure == "own" else ("safetensors", "safetensors")
            )
            ratio = row.values[other] / row.values["treering"]
            return f"{ratio:.3g} × {name}", ratio >= self.bound
        if self.measure == "orbax":
            ratio = row.times_orbax() or 0
            return f"{ratio:.3g} × {row.fastest_orbax()}", ratio >= self.bound
        share = row.of_floor() or 0
        if self.measure == "time":
            return f"{1 / share:.2f} × the floor's time", 1 / share <= self.bound
        return f"{share:.2f} of the floor", share >= self.bound


TARGETS = [
    Bound("durable save", "large", "floor", 0.93),
    Bound("durable save", "gpt2", "floor", 0.93),
    Bound("durable save", "small", "time", 1.8),
    Bound("durable save", "large", "orbax", 2.5),
    Bound("durable save", "gpt2", "orbax", 2.5),
    Bound("durable save", "small", "orbax", 50),
    Bound("stall of an asynchronous save", "large", "value", 2),
    Bound("stall of an asynchronous save", "small", "value", 12),
    Bound("restore, warm", "large", "orbax", 10),
    Bound("restore, warm", "small", "orbax", 25),
    Bound("restore, warm", "small", "value", 0.045),
    Bound("restore into NumPy, warm", "small", "safetensors", 1),
    Bound("restore, warm, verify=False", "large", "orbax", 200),
    Bound("restore, cold", "large", "orbax", 4),
    Bound("restore, cold", "gpt2", "orbax", 4),
    Bound("restore, cold", "large", "floor", 0.93),
    Bound("restore, cold", "gpt2", "floor", 0.93),
    Bound("memory over the state, save", "large", "value", 64),
    Bound("memory over the state, restore", "large", "value", 64),
    Bound("JAX and NumPy modules that `import treering` loads", "–", "value", 0),
    Bound("open and read a slice", "100,000 leaves", "value", 0.15),
    Bound("lost per step by saving each", "105 MB, 0.2 s", "time", 0.4),
    Bound("lost per step by saving each", "105 MB, 0.2 s", "orbax", 2),
    Bound("a `save` that is skipped", "–", "value", 20),
    Bound("list the steps of a run", "1,000 steps", "value", 100),
    *(
        Bound(f"read what {library} wrote", state, "own", 1)
        for library in ("safetensors", "Flax", "Equinox", "Orbax")
        for state in ("16 × 16 MiB", "2,000 small")
    ),
    Bound("open what Flax wrote", "1 GB, 5,000 leaves", "value", 50),
    Bound("convert Flax to safetensors, durably", "1 GB", "value", 2),
    *(Bound("memory of converting", f"6.4 GB, {a} → {b}", "value", 1536) for a, b in converting.PAIRS),
    Bound("durable save", "sharded", "floor", 0.85),
    Bound("durable save", "sharded", "orbax", 2.5),
    Bound("restore, warm", "sharded", "orbax", 10),
    Bound("restore, cold", "sharded", "orbax", 4),
    Bound("restore, cold", "sharded", "floor", 0.93),
    Bound("restore onto 4 × 2, warm", "sharded", "orbax", 10),
    Bound("restore onto 4 devices, warm", "sharded", "orbax", 6),
    Bound("durable save, speed of 4 processes ÷ of 1", "processes", "least", 0.8),
    Bound("durable save", "processes", "orbax", 2.5),
    Bound("restore, warm", "processes", "orbax", 10),
    Bound("save to a bucket", "256 MiB in objects of 16 MiB", "floor", 0.9),
    Bound("restore from a bucket", "256 MiB in objects of 16 MiB", "floor", 0.9),
    Bound("requests: save to a bucket", "1,000 small leaves", "value", 8),
    Bound("requests: restore from a bucket", "1,000 small leaves", "value", 8),
    Bound("plan of a save", "1,000 leaves, 4,096 processes", "value", 2),
    Bound("memory of the plan", "1,000 leaves, 4,096 processes", "value", 190),
    Bound("size of the manifest", "1,000 leaves, 4,096 processes", "value", 19),
    *(
        Bound(what, f"{leaves}, 98,304 processes", "value", most)
        for what, most in (("plan of a save", 2), ("memory of the plan", 190))
        for leaves in ("1,000 leaves", "1,000 leaves of 100 shapes", "1,000 leaves that no two processes share")
    ),
]


def verdicts(rows: Sequence[Row]) -> str:
    """The targets whose operations were measured."""
    found = {(row.operation, row.state): row for row in rows}
    lines = []
    for target in TARGETS:
        if row := found.get((target.operation, target.state)):
            measured, met = target.judge(row)
            unit = f" {row.unit}" if target.measure == "value" and row.unit else ""
            lines.append([target.operation, target.state, target.text() + unit, measured, "yes" if met else "**no**"])
    return markdown(["operation", "state", "target", "measured", "met"], lines)
