"""Describes runs and their steps as values that JSON has, for the report and the viewer."""

import math
from collections.abc import Mapping
from typing import Any

from .._printable import safe
from .listing import Listing, Row, list_run

_DIGITS = 5


def run_fields(path: str, prefix: str | None = None) -> dict[str, Any]:
    """Lists a run, and returns what a page shows of it."""
    listing = list_run(path, prefix=prefix)
    rows = [step_fields(row, listing) for row in listing.rows]
    return {"path": safe(listing.path), "steps": rows, "finished": listing.finished}


def step_fields(row: Row, listing: Listing) -> dict[str, Any]:
    """Returns what a page shows of a step."""
    marks = {"pinned": row.pinned, "link": row.link, "latest": row.step == listing.latest}
    return {
        "step": row.step,
        "name": safe(row.path.rpartition("/")[2]),
        "state": row.state,
        "format": row.format,
        "created": row.created,
        "nbytes": row.nbytes,
        "metrics": shown_metrics(row.metrics),
        "marks": [name for name, is_so in marks.items() if is_so],
    }


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float | str | None]:
    """Returns metrics by printable names. Two names that would look alike stay distinct."""
    found: dict[str, float | str | None] = {}
    for name, value in metrics.items():
        found[safe(name) if safe(name) not in found else repr(name)] = rounded(value)
    return found


def rounded(value: float | None, digits: int = _DIGITS) -> float | str | None:
    """Rounds a number to the digits that a chart needs. A number that JSON lacks becomes a text."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
