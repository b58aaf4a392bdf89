"""Prints a leaf or container as lines of text: its description, values and statistics."""

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .._core.units import count, nbytes, number
from .._core.units import sharding as sharding_text
from .._printable import safe

if TYPE_CHECKING:
    from .._core.lazy import LazyArray
    from .._core.outline import OutlineNode
    from .._restore.checkpoint import Checkpoint
    from .._tools.stats import Stats

_BARS = " ▁▂▃▄▅▆▇█"
_HISTOGRAM_BINS = 40
_EDGE_ITEMS = 3  # items at both ends of an axis that are shown


def describe_node(ckpt: "Checkpoint", node: "OutlineNode", roles: Mapping[str, str] | None = None) -> str:
    """Returns the description of a node: dtype, shape, size and sharding, or the leaves and bytes of a container.

    roles: those of `member_roles`.
    """
    from .._core.describe import describe_leaf
    from .._core.entries import ArrayEntry

    entry = node.entry
    if entry is None:
        return f"{count(node.leaves, 'leaf', 'leaves')}, {nbytes(node.nbytes)}"
    if not isinstance(entry, ArrayEntry):
        return safe(describe_leaf(entry))
    spec = sharding_text(ckpt._source.sharding(entry))
    parts = [safe(describe_leaf(entry)), nbytes(node.nbytes), spec, safe((roles or {}).get(entry.path, ""))]
    return "  ".join(filter(None, parts))


def statistics(leaf: Any) -> "Stats | None":
    """Returns the statistics of a leaf with quantiles and a histogram, or None if it has no numbers."""
    from .._core.lazy import LazyArray
    from .._tools.stats import array_stats, has_stats

    return array_stats(leaf, bins=_HISTOGRAM_BINS) if isinstance(leaf, LazyArray) and has_stats(leaf) else None


def leaf_lines(ckpt: "Checkpoint", path: str) -> Iterator[str]:
    """Reads a leaf and yields the lines that describe it."""
    from .._core.describe import describe_entry, shorten, value_text
    from .._core.entries import StatesEntry
    from .._core.lazy import LazyArray
    from .._core.quantized import member_roles

    if isinstance(entry := ckpt._source.entries.get(path), StatesEntry):
        processes = count(len(entry.value), "process", "processes")
        yield f"{safe(path)}  {describe_entry(entry)} {value_text(entry)}, {processes}"
        return
    leaf = ckpt[path]
    if not isinstance(leaf, LazyArray):
        yield safe(shorten(leaf) if isinstance(leaf, int) else repr(leaf))
        return
    spec = [text] if (text := sharding_text(leaf.place)) else []
    yield safe(path)
    role = [safe(text)] if (text := member_roles(ckpt._source).get(leaf.entry.path)) else []
    yield "  ".join([safe(describe_entry(leaf.entry)), nbytes(leaf.nbytes), *spec, *role])
    yield ""
    yield from _values(leaf)
    if found := statistics(leaf):
        yield ""
        yield from _statistics_lines(found)


def _values(leaf: "LazyArray") -> Iterator[str]:
    """Yields the corners of an array as NumPy prints them. Reads only the corners."""
    import numpy as np

    # A small array with the same corners prints alike: of an axis with more than seven items NumPy shows three at
    # each end.
    small = np.zeros([min(size, 2 * _EDGE_ITEMS + 1) for size in leaf.shape], leaf.dtype)
    ends = [
        [(0, size)] if size <= 2 * _EDGE_ITEMS + 1 else [(0, _EDGE_ITEMS), (size - _EDGE_ITEMS, size)]
        for size in leaf.shape
    ]
    for box in itertools.product(*ends):
        place = tuple(slice(a, b) if a == 0 else slice(-_EDGE_ITEMS, None) for a, b in box)
        small[place] = np.asarray(leaf.part(box))
    with np.printoptions(threshold=0, edgeitems=_EDGE_ITEMS, linewidth=100, precision=5):
        yield from (safe(line) for line in str(small).split("\n"))


def _statistics_lines(found: "Stats") -> Iterator[str]:
    odd = [f"{found.nan:,} NaN"] * bool(found.nan) + [f"{found.inf:,} infinite"] * bool(found.inf)
    yield ", ".join([count(found.size, "value"), *odd, f"{found.zeros:,} zeros"])
    if found.low is None or found.high is None:
        return
    names = ("min", "max", "mean", "std", "norm")
    numbers = (found.low, found.high, found.mean, found.std, found.norm)
    yield "  ".join(f"{name} {number(value or 0.0)}" for name, value in zip(names, numbers, strict=True))
    if found.histogram:
        of = "" if found.sample >= found.size - found.nan - found.inf else f" of a sample of {found.sample:,}"
        yield "  ".join(f"{100 * q:g}% {number(value)}" for q, value in found.quantiles.items()) + of
        yield ""
        most = max(found.histogram)
        bars = "".join(_BARS[-(-(len(_BARS) - 1) * n // most)] for n in found.histogram)
        yield f"{number(found.low)} {bars} {number(found.high)}"
