"""Shows a checkpoint, or a part of one, as text and as HTML: the names and shapes of its leaves."""

import itertools

from .._printable import safe
from . import html, units
from .describe import describe_entry, describe_leaf, value_text
from .entries import ArrayEntry, Entry
from .source import Source, arrays_of
from .subtree import full_source, source_name


def text(source: Source, most: int) -> str:
    """Returns the names and shapes of at most `most` leaves, one per line."""
    entries = source.entries
    step = "" if source.step is None else f", step {source.step}"
    head = f"Checkpoint {safe(source_name(source))} ({source.format}{step}, {len(entries)} leaves)"
    shown = dict(itertools.islice(entries.items(), most))
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


def page(source: Source) -> str:
    """Returns the HTML that a notebook shows."""

    def what(entry: Entry) -> str:
        if not isinstance(entry, ArrayEntry):
            return describe_leaf(entry)
        return f"{describe_leaf(entry)} {units.sharding(source.sharding(entry))}".rstrip()

    step = "" if source.step is None else f"step {source.step}"
    saved = "" if source.created is None else f"saved {source.created:%Y-%m-%d %H:%M:%S} UTC"
    leaves = units.count(len(source.entries), "leaf", "leaves")
    head = html.line(source.format, step, leaves, units.nbytes(_size(source)), saved)
    metrics = html.table(source.metrics) if source.metrics else ""
    return html.page(source_name(source), head, metrics, html.tree(source.entries, what))


def _size(source: Source) -> int:
    """Returns the bytes of a checkpoint on the disk or, for a part of one, those of its arrays."""
    is_part = full_source(source) is not source
    return sum(entry.nbytes for entry in arrays_of(source)) if is_part else source.nbytes
