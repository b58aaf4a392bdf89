"""Statistics of single arrays, read slice by slice."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import dtypes
from .._core.boxes import in_slices
from .._core.lazy import LazyArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLICE_BYTES = 32 << 20  # bytes of an array that are read at a time
_SAMPLE = 1 << 20  # values by which quantiles and histograms are found
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of an array: of its finite values, but for the counts; of complex ones, of their magnitudes.

    `norm` is the root of the sum of squares, `quantiles` and `histogram` are those of `sample` values that lie evenly
    in the array: counts in bins of equal width from `low` to `high`. Without a finite value the rest is None.
    """

    size: int
    nan: int
    inf: int
    zeros: int
    low: float | None
    high: float | None
    mean: float | None
    std: float | None
    norm: float | None
    quantiles: dict[float, float]
    histogram: tuple[int, ...]
    sample: int


def has_stats(array: LazyArray) -> bool:
    """Whether the values of an array are numbers."""
    return array.entry.type != "key" and array.dtype.kind not in "MmUSO" and array.dtype.names is None


def stats(array: LazyArray, *, bins: int = 0) -> Stats:
    """Reads an array and describes its values; with `bins`, by quantiles and a histogram as well."""
    found = _Sums()
    every = max(1, math.ceil(array.size / _SAMPLE))
    samples: list[NDArray[np.float64]] = []
    at = 0
    for box in in_slices(array.shape, dtypes.itemsize(array.entry.dtype), _SLICE_BYTES):
        values = _floats(np.asarray(array.part(box)))
        found.add(values)
        if bins:
            samples.append(values[-at % every :: every])
            at += values.size
    quantiles: dict[float, float] = {}
    histogram: tuple[int, ...] = ()
    sample = np.concatenate(samples) if samples else np.zeros(0)
    sample = sample[np.isfinite(sample)]
    if sample.size:
        points = np.quantile(sample, _QUANTILES)
        quantiles = dict(zip(_QUANTILES, map(float, points), strict=True))
        histogram = tuple(map(int, np.histogram(sample, bins, _bounds(found.low, found.high))[0]))
    return found.stats(array.size, quantiles, histogram, int(sample.size))


def _floats(values: "NDArray[Any]") -> "NDArray[np.float64]":
    """The values, of complex ones the magnitudes."""
    wide: Any = values.reshape(-1).astype(dtypes.widest(values.dtype))
    return np.abs(wide) if wide.dtype.kind == "c" else wide


def _bounds(low: float, high: float) -> tuple[float, float]:
    """A range with a width, for a histogram."""
    return (low, high) if low < high and math.isfinite(high - low) else (low - 0.5, low + 0.5)


class _Sums:
    """What is known of the values so far; the deviation is combined as Chan, Golub and LeVeque (1983) do it."""

    def __init__(self) -> None:
        self.nan = self.inf = self.zeros = self.count = 0
        self.low, self.high = math.inf, -math.inf
        self.mean = self.deviations = self.squares = 0.0

    def add(self, values: "NDArray[np.float64]") -> None:
        finite = values[np.isfinite(values)]
        nan = int(np.isnan(values).sum())
        self.nan += nan
        self.inf += values.size - finite.size - nan
        self.zeros += values.size - int(np.count_nonzero(values))
        if not finite.size:
            return
        with np.errstate(over="ignore", invalid="ignore"):  # of float64 near its limits the result is inf
            mean = float(finite.mean())
            deviations = float(np.square(finite - mean).sum())
            self.squares += float(np.square(finite).sum())
        total = self.count + finite.size
        gap = mean - self.mean
        self.deviations += deviations + gap * gap * self.count * finite.size / total
        self.mean += gap * finite.size / total
        self.count = total
        self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))

    def stats(self, size: int, quantiles: dict[float, float], histogram: tuple[int, ...], sample: int) -> Stats:
        counts = (size, self.nan, self.inf, self.zeros)
        if not self.count:
            return Stats(*counts, None, None, None, None, None, quantiles, histogram, sample)
        std, norm = math.sqrt(self.deviations / self.count), math.sqrt(self.squares)
        return Stats(*counts, self.low, self.high, self.mean, std, norm, quantiles, histogram, sample)
