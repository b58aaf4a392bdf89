"""Formats numbers and text from files for people to read."""

import math
from collections.abc import Mapping
from typing import Any

from .._printable import safe

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")


def nbytes(count: float | None) -> str:
    """Returns a number of bytes with three digits and a decimal unit: ``1.53 GB``."""
    if count is None:
        return ""
    for unit in _UNITS:
        if abs(count) < 999.5 or unit == _UNITS[-1]:
            return f"{int(count)} B" if unit == "B" else f"{number(count)} {unit}"
        count /= 1000
    raise AssertionError


def number(value: float, digits: int = 3) -> str:
    """Returns a number with `digits` significant digits; an int with all of its digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.{digits}g}")
    return f"{value:#.{digits}g}".rstrip(".") if 1 <= abs(value) < 10**digits else f"{value:.{digits}g}"


def count(many: int, one: str, several: str = "") -> str:
    """Returns a number of things: ``1 leaf``, ``5,012 leaves``."""
    return f"{many:,} {one if many == 1 else several or one + 's'}"


def sharding(place: Mapping[str, Any] | None) -> str:
    """Formats a recorded sharding as ``P('data', None) on data=8, model=4``. Returns "" if `place` has no mesh."""
    spec, mesh = (place.get("spec"), place.get("mesh")) if place else (None, None)
    if not isinstance(spec, list) or not isinstance(mesh, dict):
        return ""
    axes = ", ".join(repr(tuple(axis) if isinstance(axis, list) else axis) for axis in spec)
    return safe(f"P({axes}) on {', '.join(f'{name}={size}' for name, size in mesh.items())}")
