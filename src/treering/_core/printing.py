"""Shows a checkpoint, or a part of one, as text and as HTML: the names and shapes of its leaves.

In the HTML, which notebooks show, containers can be folded, and a click copies a path.
"""

import base64
import itertools
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from .._printable import safe
from .describe import describe_entry, describe_leaf, value_text
from .entries import ArrayEntry, Entry
from .outline import OutlineNode, outline
from .source import Source, arrays_of, full_source, source_name
from .units import count, nbytes, number, sharding

if TYPE_CHECKING:
    import numpy as np

_MAX_NODES = 2000  # nodes of a tree that are shown; more would make a notebook slow
_OPEN_LEVELS = 1  # levels of a tree that are unfolded at first
_MAX_CELLS = 128  # on a side of the picture of an array
# The colors of a picture: below zero, zero or the end next to it, above zero, not finite; as in the viewer.
_BELOW, _MIDDLE, _ABOVE, _ODD = (33, 102, 172), (240, 238, 232), (178, 60, 43), (255, 0, 200)

# All rules name an element with a class of its own, so that they change nothing else on the page.
_STYLE = (
    "<style>.treering{font-family:monospace;font-size:90%}.treering details,.treering .leaf{margin-left:1.2em}"
    ".treering summary{cursor:pointer;margin-left:-1.1em}.treering .path{cursor:copy;font-weight:bold}"
    ".treering .what{opacity:.7;margin-left:1em}.treering td,.treering th{text-align:left;padding:0 1em 0 0;"
    "white-space:nowrap}</style>"
)
_COPY = 'onclick="event.preventDefault();navigator.clipboard.writeText(this.title)"'


def text(value: object) -> str:
    """Returns text from a file as HTML that shows it. Markup in the text has no effect."""
    return escape(safe(value))


def path(full: str, shown: str) -> str:
    """Returns a path that is shown by a shorter name, and that a click copies."""
    return f'<span class="path" title="{text(full)}" {_COPY}>{text(shown)}</span>'


def page(title: str, *parts: str) -> str:
    """Returns the HTML that a notebook shows for one object."""
    return f'{_STYLE}<div class="treering"><div><b>{text(title)}</b></div>{"".join(parts)}</div>'


def line(*parts: str) -> str:
    """Returns a line of text, with a dot between its parts."""
    return f"<div>{text(' · '.join(part for part in parts if part))}</div>"


def table(rows: Mapping[str, object] | Sequence[tuple[str, object]]) -> str:
    """Returns a table of names and values."""
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    cells = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in pairs)
    return f"<table>{cells}</table>"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table with a head, whose first column has paths that a click copies."""
    lines = ["".join(f"<th>{text(one)}</th>" for one in head)]
    lines += [
        f"<td>{path(row[0], row[0])}</td>" + "".join(f"<td>{text(cell)}</td>" for cell in row[1:])
        for row in rows[:_MAX_NODES]
    ]
    more = len(rows) - _MAX_NODES
    rest = line(f"and {more:,} more; print() shows all") if more > 0 else ""
    return f"<table>{''.join(f'<tr>{one}</tr>' for one in lines)}</table>{rest}"


def listed(title: str, items: Sequence[tuple[str, str]]) -> str:
    """Returns a list of paths, each with a text, that unfolds below a title. Returns "" for no paths."""
    if not items:
        return ""
    lines = [f'<div class="leaf">{path(one, one)}<span class="what">{text(what)}</span></div>' for one, what in items]
    more = len(lines) - _MAX_NODES
    rest = f'<div class="leaf">and {more:,} more</div>' if more > 0 else ""
    return f"<details open><summary>{text(title)}</summary>{''.join(lines[:_MAX_NODES])}{rest}</details>"


def tree(entries: Mapping[str, Entry], what: Callable[[Entry], str]) -> str:
    """Returns the leaves as a tree. Similar siblings are one node. `what` returns the text for a leaf."""
    left = _MAX_NODES

    def shown(node: OutlineNode, level: int) -> str:
        nonlocal left
        left -= 1
        if left < 0:
            return ""
        name = path(node.path, node.name + (f" ×{node.alike}" if node.alike > 1 else ""))
        if node.entry is not None:
            size = nbytes(node.nbytes) if isinstance(node.entry, ArrayEntry) else ""
            about = f'<span class="what">{text(what(node.entry))} {text(size)}</span>'
            return f'<div class="leaf">{name}{about}</div>'
        about = f'<span class="what">{text(count(node.leaves, "leaf", "leaves"))}, {text(nbytes(node.nbytes))}</span>'
        inside = "".join(shown(child, level + 1) for child in node.children)
        opened = " open" if level < _OPEN_LEVELS else ""
        return f"<details{opened}><summary>{name}{about}</summary>{inside}</details>"

    parts = "".join(shown(child, 0) for child in outline(entries, about=what).children)
    return parts + (f'<div class="leaf">and {-left:,} more lines; print() shows all</div>' if left < 0 else "")


def checkpoint_text(source: Source, max_leaves: int) -> str:
    """Returns the names and shapes of at most `max_leaves` leaves, one per line."""
    entries = source.entries
    step = "" if source.step is None else f", step {source.step}"
    head = f"Checkpoint {safe(source_name(source))} ({source.format}{step}, {len(entries)} leaves)"
    shown = dict(itertools.islice(entries.items(), max_leaves))
    width = max(map(len, shown), default=0)
    lines = []
    for path, entry in shown.items():
        value = "" if isinstance(entry, ArrayEntry) else f" {value_text(entry)}"
        if entry.type == "function":  # The file has only its name, which may be any text.
            value = f" {entry.value:.60}" if isinstance(entry.value, str) and entry.value.isprintable() else ""
        lines.append(f"  {safe(path) or '(root)':{min(width, 60)}}  {safe(describe_entry(entry))}{value}")
    if more := len(entries) - len(shown):
        lines.append(f"  and {more} more; print() shows all")
    return "\n".join([head, *lines])


def checkpoint_page(source: Source) -> str:
    """Returns the HTML that a notebook shows."""

    def what(entry: Entry) -> str:
        if not isinstance(entry, ArrayEntry):
            return describe_leaf(entry)
        return f"{describe_leaf(entry)} {sharding(source.sharding(entry))}".rstrip()

    step = "" if source.step is None else f"step {source.step}"
    saved = "" if source.created is None else f"saved {source.created:%Y-%m-%d %H:%M:%S} UTC"
    leaves = count(len(source.entries), "leaf", "leaves")
    head = line(source.format, step, leaves, nbytes(_size(source)), saved)
    metrics = table({name: number(value, 6) for name, value in source.metrics.items()}) if source.metrics else ""
    return page(source_name(source), head, metrics, tree(source.entries, what))


def _size(source: Source) -> int:
    """Returns the bytes of a checkpoint on the disk or, for a part of one, those of its arrays."""
    is_part = full_source(source) is not source
    return sum(entry.nbytes for entry in arrays_of(source)) if is_part else source.nbytes


def heat_map(array: "np.ndarray[Any, Any]") -> str:
    """Returns the HTML of a picture of an array: the last axis from left to right. A cell is a mean."""
    import numpy as np

    values = np.abs(array) if "complex" in array.dtype.name else array
    columns = array.shape[-1] if array.ndim > 1 else min(array.size, _MAX_CELLS)
    rows = -(-array.size // columns)
    flat = np.full(rows * columns, np.nan)
    flat[: array.size] = values.reshape(-1)
    cells, is_padding = flat.reshape(rows, columns), np.arange(rows * columns).reshape(rows, columns) >= array.size
    is_odd = ~np.isfinite(cells) & ~is_padding
    sums, odd, used = (
        _join_cells(one) for one in (np.where(np.isfinite(cells), cells, 0.0), is_odd, ~(is_odd | is_padding))
    )
    means = sums / np.maximum(used, 1)
    known = means[used > 0]
    if not known.size:
        return ""
    low, high = float(known.min()), float(known.max())
    if low < 0 < high:
        share, end = np.abs(means) / max(-low, high), np.where(means < 0, -1, 1)
    else:
        share, end = (means - low) / ((high - low) or 1.0), np.ones_like(means)
        share, end = (1 - share, -end) if high <= 0 else (share, end)
    tints = np.where(end[..., None] < 0, _BELOW, _ABOVE)
    pixels = np.asarray(_MIDDLE) + share[..., None] * (tints - np.asarray(_MIDDLE))
    pixels[odd > 0] = _ODD
    pixels[(used == 0) & (odd == 0)] = 128
    source = base64.b64encode(_png(pixels.round().astype(np.uint8))).decode()
    range_text = f"{'means of cells ' if means.size < array.size else ''}{number(low)} to {number(high)}"
    style = "width:256px;max-width:100%;image-rendering:pixelated;border:1px solid #8888"
    image = f'<img alt="heat map, {range_text}" style="{style}" src="data:image/png;base64,{source}">'
    return f"{image}<div>{range_text}</div>"


def _join_cells(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Adds up neighbors, so that no side has more than `_MAX_CELLS`."""
    import numpy as np

    for axis in (0, 1):
        size = values.shape[axis]
        if size > _MAX_CELLS:
            values = np.add.reduceat(
                values, [n * size // _MAX_CELLS for n in range(_MAX_CELLS)], axis, dtype=np.float64
            )
    return values.astype(np.float64)


def _png(pixels: "np.ndarray[Any, Any]") -> bytes:
    """Encodes rows of RGB pixels of 8 bits."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
