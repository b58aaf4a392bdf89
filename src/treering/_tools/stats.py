"""Computes statistics of single arrays, which it reads slice by slice."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import dtypes, expansion
from .._core.boxes import full_box, slice_boxes
from .._core.lazy import LazyArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLICE_BYTES = 32 << 20  # An array is read in slices of about this many bytes.
_SAMPLE_VALUES = 1 << 20  # Quantiles and histograms use at most this many values.
_SQUARABLE_RANGE = (
    1e-140,
    1e140,
)  # Squares of magnitudes in this range neither vanish nor overflow when float64 adds them.
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of the finite values of an array, or of their magnitudes if they are complex.

    The counts are of all values. `norm` is the root of the sum of squares. `quantiles` and `histogram` describe
    `sample` values, spread evenly over the array. The histogram counts values in bins of equal width from `low` to
    `high`. Without a finite value the other numbers are None.
    """

    size: int
    nan: int
    inf: int
    zeros: int
    low: float | None  # An int for arrays of integers.
    high: float | None
    mean: float | None
    std: float | None
    norm: float | None
    quantiles: dict[float, float]
    histogram: tuple[int, ...]
    sample: int


def has_stats(array: LazyArray) -> bool:
    """Returns True if the values of an array are numbers."""
    return array.entry.type != "key" and array.dtype.kind not in "MmUSO" and array.dtype.names is None


def stats(array: LazyArray, *, bins: int = 0) -> Stats:
    """Reads an array and describes its values. With `bins`, adds quantiles and a histogram of that many bins."""
    expansion.check_memory(array._reader, [(array.entry, full_box(array.shape))], array._reader.path)
    found = _RunningStats()
    stride = max(1, math.ceil(array.size / _SAMPLE_VALUES))
    samples: list[NDArray[np.float64]] = []
    integers: list[int] = []  # The extremes of each slice, because float64 rounds large integers.
    position = 0
    for box in slice_boxes(array.shape, dtypes.itemsize(array.entry.dtype), _SLICE_BYTES):
        exact = np.asarray(array.part(box))
        values = _floats(exact)
        found.add(values)
        if exact.dtype.kind in "iu" and exact.size:
            integers += [int(exact.min()), int(exact.max())]
        if bins:
            samples.append(values[-position % stride :: stride])
            position += values.size
    quantiles: dict[float, float] = {}
    histogram: tuple[int, ...] = ()
    sample = np.concatenate(samples) if samples else np.zeros(0)
    sample = sample[np.isfinite(sample)]
    if sample.size:
        # NumPy subtracts neighbors. The differences of the largest floats would overflow; those of their halves do not.
        halves = np.quantile(sample / 2, _QUANTILES)
        quantiles = dict(zip(_QUANTILES, map(float, 2 * halves), strict=True))
        histogram = _histogram(sample, bins)
    described = found.stats(array.size, quantiles, histogram, int(sample.size))
    return dataclasses.replace(described, low=min(integers), high=max(integers)) if integers else described


def _histogram(sample: "NDArray[np.float64]", bins: int) -> tuple[int, ...]:
    """Counts values in bins of equal width. The range may be narrower or wider than NumPy's histogram allows."""
    low, high = float(sample.min()), float(sample.max())
    if math.isinf(high - low):
        sample, low, high = sample / 2, low / 2, high / 2
    if low == high:
        return (int(sample.size),)
    places = ((sample - low) / (high - low) * bins).astype(np.int64)
    return tuple(map(int, np.bincount(np.minimum(places, bins - 1), minlength=bins)))


def _floats(values: "NDArray[Any]") -> "NDArray[np.float64]":
    """Returns the values as floats of one axis; of complex values, the magnitudes."""
    wide: Any = values.reshape(-1).astype(dtypes.compute_dtype(values.dtype))
    return np.abs(wide) if wide.dtype.kind == "c" else wide


class _RunningStats:
    """Running sums over the values. Deviations are combined as in Chan, Golub and LeVeque (1983)."""

    def __init__(self) -> None:
        self.nan = self.inf = self.zeros = self.count = 0
        self.low, self.high = math.inf, -math.inf
        self.mean = self.deviations = self.squares = np.longdouble(0)

    def add(self, values: "NDArray[np.float64]") -> None:
        finite: Any = values[np.isfinite(values)]
        nan = int(np.isnan(values).sum())
        self.nan += nan
        self.inf += values.size - finite.size - nan
        self.zeros += values.size - int(np.count_nonzero(values))
        if not finite.size:
            return
        self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        if not _SQUARABLE_RANGE[0] < max(abs(self.low), abs(self.high)) < _SQUARABLE_RANGE[1]:
            # The exponent of a long double has room for the squares, on machines that have such numbers.
            finite = finite.astype(np.longdouble)
        with np.errstate(all="ignore"):
            rounded = finite.mean()
            rest = finite - rounded
            # The mean is rounded. The correction matters if the values differ by less than that rounding.
            correction = rest.mean()
            mean = np.longdouble(rounded) + correction
            deviations = np.square(rest).sum() - finite.size * correction * correction
            total = self.count + finite.size
            gap = mean - self.mean
            self.deviations += deviations + gap * gap * self.count * finite.size / total
            self.mean += gap * finite.size / total
            self.squares += np.square(finite).sum()
        self.count = total

    def stats(self, size: int, quantiles: dict[float, float], histogram: tuple[int, ...], sample: int) -> Stats:
        counts = (size, self.nan, self.inf, self.zeros)
        if not self.count:
            return Stats(*counts, None, None, None, None, None, quantiles, histogram, sample)
        with np.errstate(all="ignore"):
            std, norm = np.sqrt(self.deviations / self.count), np.sqrt(self.squares)
            return Stats(
                *counts, self.low, self.high, float(self.mean), float(std), float(norm), quantiles, histogram, sample
            )
