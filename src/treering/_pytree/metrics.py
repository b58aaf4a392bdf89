"""Encodes metrics for the manifest."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._core.values import encode_float
from ..errors import MismatchError
from . import devices


@devices.allow_transfers()
def encode_metrics(found: Mapping[str, Any] | None) -> dict[str, float | str]:
    """Encodes metrics as the manifest records them.

    Raises `MismatchError` unless each name is text and each value is a real scalar.
    """
    if not isinstance(found, Mapping | None):
        raise MismatchError(f"metrics={found!r:.60}: expected a dict of names and real scalars")
    numbers: dict[str, float | str] = {}
    for name, value in (found or {}).items():
        try:
            array = np.asarray(value)
        except Exception:  # NumPy raises for a tracer and for uneven lists. Objects of trackers raise anything.
            array = None
        if not isinstance(name, str) or array is None or array.shape != () or array.dtype.kind not in "biufV":
            raise MismatchError(f"metrics[{name!r}]: expected a name and a real scalar, found {value!r:.60}")
        numbers[name] = encode_float(float(array))
    return numbers
