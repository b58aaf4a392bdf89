"""Shows a checkpoint, or a part of one, as text and as HTML: the names and shapes of its leaves.

In the HTML, which notebooks show, containers can be folded, and a click copies a path.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from html import escape

from .._printable import safe
from .describe import describe_entry, describe_leaf, value_text
from .entries import ArrayEntry, Entry
from .outline import OutlineNode, outline
from .source import Source, arrays_of, full_source, source_name
from .units import count, nbytes, sharding

_MAX_NODES = 2000  # nodes of a tree that are shown; more would make a notebook slow
_OPEN_LEVELS = 1  # levels of a tree that are unfolded at first

# All rules name an element with a class of its own, so that they change nothing else on the page.
_STYLE = (
    "<style>.treering{font-family:monospace;font-size:90%}.treering details,.treering .leaf{margin-left:1.2em}"
    ".treering summary{cursor:pointer;margin-left:-1.1em}.treering .path{cursor:copy;font-weight:bold}"
    ".treering .what{opacity:.7;margin-left:1em}.treering td,.treering th{text-align:left;padding:0 1em 0 0}</style>"
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


def checkpoint_text(source: Source, most: int) -> str:
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
    metrics = table(source.metrics) if source.metrics else ""
    return page(source_name(source), head, metrics, tree(source.entries, what))


def _size(source: Source) -> int:
    """Returns the bytes of a checkpoint on the disk or, for a part of one, those of its arrays."""
    is_part = full_source(source) is not source
    return sum(entry.nbytes for entry in arrays_of(source)) if is_part else source.nbytes
