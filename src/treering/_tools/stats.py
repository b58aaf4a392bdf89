"""Computes statistics of arrays, which it reads slice by slice."""

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import dtypes, expansion, printing
from .._core.boxes import full_box, slice_boxes
from .._core.describe import describe_entry
from .._core.entries import StatesEntry, check_count
from .._core.lazy import LazyArray, read_ahead
from .._core.source import complete_arrays
from .._core.tracebacks import hide_internal_frames
from .._core.units import count, number
from .._printable import safe
from .._restore.checkpoint import Checkpoint
from .._run.open import open_checkpoint
from ..errors import MismatchError

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
    `sample` values, spread evenly over the array; without bins they are empty. The histogram counts values in bins of
    equal width from `low` to `high`. Without a finite value the other numbers are None.
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


_HEAD = ("leaf", "values", "min", "max", "mean", "std", "norm", "zeros", "NaN", "infinite")


@dataclasses.dataclass(frozen=True, repr=False)
class StatsReport:
    """The result of `stats`: the statistics of each array of numbers in the checkpoint `path`, by the leaf's path.

    `others` leaves are no arrays of numbers. Print it to read the table.
    """

    path: str
    leaves: dict[str, Stats]
    others: int = 0

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the table as text: its head, and one row for each array. Omits empty columns."""
        rows: list[list[str]] = []
        for path, one in self.leaves.items():
            numbers = (one.low, one.high, one.mean, one.std, one.norm)
            cells = ["" if value is None else number(value) for value in numbers]
            odd = (f"{n:,}" if n else "" for n in (one.zeros, one.nan, one.inf))
            rows.append([safe(path), f"{one.size:,}", *cells, *odd])
        used = [n for n in range(len(_HEAD)) if n < 2 or any(row[n] for row in rows)]
        return [_HEAD[n] for n in used], [[row[n] for n in used] for row in rows]

    def _summary(self) -> str:
        """Returns the number of arrays and values, and the norm of all of them, as one line of text."""
        norm = sum((one.norm or 0.0) ** 2 for one in self.leaves.values()) ** 0.5
        left = f"; {count(self.others, 'leaf', 'leaves')} without numbers" if self.others else ""
        values = count(sum(one.size for one in self.leaves.values()), "value")
        return f"{count(len(self.leaves), 'array')}, {values}, norm {number(norm)}{left}"

    def _repr_html_(self) -> str:
        return printing.page(self.path, printing.line(self._summary()), printing.grid(*self._table()))

    def __repr__(self) -> str:
        return f"<StatsReport {safe(self.path)}: {self._summary()}>"

    def __str__(self) -> str:
        head, rows = self._table()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = (
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
            for row in (head, *rows)
        )
        return "\n".join([*(line.rstrip() for line in lines), self._summary()])


@hide_internal_frames
def stats(source: "str | os.PathLike[str] | Checkpoint | LazyArray", *, bins: int = 0) -> StatsReport:
    """Reads the arrays of a checkpoint and computes the range, mean, norm, zeros, NaN and infinities of each.

    >>> tr.stats(tr.open("runs/gpt").select("params/**"))

    source: a path, an open checkpoint, a part of one, or one array of it. Of a run, its newest valid step.
    bins: adds quantiles and a histogram with this many bins to the statistics of each array.

    Print the returned object to read a table, which a notebook shows. Its `leaves` have the statistics by path: `size`,
    `nan`, `inf`, `zeros`, `low`, `high`, `mean`, `std`, `norm`, `quantiles` and `histogram`. NaN and infinities are
    counted; the other numbers are those of the finite values. Arrays are read in slices. Raises `MismatchError` for an
    array without numbers, or for `bins` that are no number from 0.
    """
    bins = check_count("bins", bins, minimum=0)
    if isinstance(source, LazyArray):
        entry = source.entry
        if not has_stats(source):
            raise MismatchError(f"{entry.path}: expected an array of numbers, found {describe_entry(entry)}")
        return StatsReport(source._reader.path, {entry.path: array_stats(source, bins=bins)})
    ckpt = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    expansion.check_memory(ckpt._source, complete_arrays(ckpt._source), ckpt.path)
    found: dict[str, Stats] = {}
    entries = ckpt._source.entries
    leaves = [None if isinstance(entry, StatesEntry) else ckpt[path] for path, entry in entries.items()]
    for path, leaf in zip(entries, read_ahead(leaves), strict=True):
        if isinstance(leaf, LazyArray) and has_stats(leaf):
            found[path] = array_stats(leaf, bins=bins)
    return StatsReport(ckpt.path, found, len(entries) - len(found))


def has_stats(array: LazyArray) -> bool:
    """Returns True if the values of an array are numbers."""
    return array.entry.type != "key" and array.dtype.kind not in "MmUSO" and array.dtype.names is None


def array_stats(array: LazyArray, *, bins: int = 0) -> Stats:
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
