"""Collects the data of a report about a run, as values that JSON has."""

import base64
import contextlib
import logging
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from ... import stores
from ..._core import expansion
from ..._core.describe import describe_entry
from ..._core.entries import ArrayEntry
from ..._core.lazy import LazyArray
from ..._core.leaf_paths import Globs, glob_hint, join_names
from ..._core.outline import OutlineNode, outline
from ..._core.source import arrays_of
from ..._core.units import count, nbytes
from ..._core.units import sharding as sharding_text
from ..._printable import safe
from ..._processes.progress_bar import bar
from ..._restore.checkpoint import Checkpoint
from ..._run.open import open_checkpoint
from ...errors import MismatchError, NotFoundError, TreeringError
from ...stores.read_errors import raise_if_momentary
from ..diff import ValueChange, diff
from ..listing import Listing, Row, list_run
from ..page_data import rounded, run_fields, step_fields
from ..stats import Stats, array_stats, has_stats

_log = logging.getLogger("treering")

_BINS = 24
_MAX_HISTOGRAMS = 32  # Each leaf has histograms of at most this many steps.
_MAX_LEAVES = 2000  # At most this many leaves have statistics.
_MAX_CHANGES = 2000  # The comparison lists at most this many leaves.
_SMALLEST = 1e-4  # A leaf or subtree with a smaller share of all bytes has no rectangle of its own.
_NUMBERS = ("norm", "mean", "std", "low", "high")
_ALL = Globs()  # every leaf
_COUNTS = ("nan", "inf", "zeros")


def gather(
    path: str | os.PathLike[str],
    *,
    steps: int = 20,
    compare: Sequence[int] = (),
    globs: Globs = _ALL,
    progress: bool = False,
    max_expansion: float = expansion.MAX_RATIO,
    prefix: str | None = None,
) -> dict[str, Any]:
    """Reads a run and returns the data of its report, as values that JSON has.

    steps: reads the arrays of this many steps: the first, the latest and others evenly between them. 0 reads none.
    compare: the two steps to compare value by value; by default the latest two, if arrays are read.
    globs: the leaves with statistics; by default the 2,000 largest. The report says if it left out others.
    progress: shows a progress bar in a terminal.
    max_expansion: as in `treering.restore`. The arrays of a step beyond it are not read, and the report says so.
    prefix: the beginning of the step names; by default found from the steps.

    The report and the log name what could not be read. Raises `NotFoundError` if there is no run or no valid step, and
    `MismatchError` if `compare` names a step that is not valid.
    """
    place = stores.absolute(path)
    opened: dict[str, Checkpoint] = {}
    with stores.get(place).glance(place):  # In a bucket, one listing serves all steps, and a manifest is read once.
        listing = list_run(place, prefix=prefix)
        good = [row for row in listing.rows if row.state == "good"]
        if not good:
            raise NotFoundError(f"{listing.path}: expected a run with a valid step, found {len(listing.rows)} others")
        pair = _pair(listing, good, compare, read=steps > 0)
        chosen = [good[n] for n in _evenly(len(good), steps)]
        for row in (good[-1], *chosen, *(pair or ())):
            with contextlib.suppress(TreeringError):  # `_opened` opens it again, with a new listing.
                if row.path not in opened:
                    opened[row.path] = open_checkpoint(row.path)
    notes = [f"step {row.step} is {row.state}" for row in listing.rows if row.state not in ("good", "unfinished")]
    latest = _opened(good[-1], opened, notes)
    found = _Leaves(notes)
    if chosen:
        found.read([(row.step, _opened(row, opened, notes, max_expansion)) for row in chosen], globs, progress)
    sides = [_opened(row, opened, notes, max_expansion) for row in pair or ()]
    return {
        "run": safe(os.path.basename(listing.path) or listing.path),
        "path": safe(listing.path),
        "finished": listing.finished,
        "setAside": [safe(os.path.basename(one)) for one in listing.archived],
        "steps": [step_fields(row, listing) for row in listing.rows],
        "tree": _tree(latest) if latest else None,
        "treeStep": good[-1].step,
        "read": [row.step for row in chosen],
        "leaves": found.rows,
        "diff": _difference(pair, sides, notes) if pair and all(side is not None for side in sides) else None,
        "notes": [safe(note.split("\n")[0]) for note in dict.fromkeys(notes)],
    }


def gather_runs(paths: Sequence[str], *, prefix: str | None = None) -> dict[str, Any]:
    """Lists several runs and returns the data of their report. It reads no arrays.

    The report and the log name the runs that cannot be listed; `leftOut` is their number. Raises `NotFoundError` if
    none can be listed.
    """
    places = [stores.absolute(path) for path in paths]
    common = os.path.commonpath(places) if all(place.startswith("/") for place in places) else ""
    notes: list[str] = []
    runs: list[dict[str, Any]] = []
    for place in places:
        name = safe(os.path.relpath(place, common) if common else place)
        try:
            runs.append({"name": name, **run_fields(place, prefix)})
        except (TreeringError, PermissionError) as error:
            raise_if_momentary(error)
            notes.append(f"{name} is left out: {error}")
            _log.error("not in the report: %s", error)
    if not runs:
        raise NotFoundError(f"{safe(common) or paths[0]}: expected runs, found none that can be listed: {notes[0]}")
    title = safe(os.path.basename(common)) or count(len(runs), "run")
    found = {"run": title, "path": safe(common), "runs": runs, "leftOut": len(places) - len(runs), "read": []}
    return {**found, "notes": [safe(note.split("\n")[0]) for note in notes]}


def _pair(listing: Listing, good: list[Row], compare: Sequence[int], *, read: bool) -> tuple[Row, Row] | None:
    """Returns the two steps to compare. Raises `MismatchError` for a step that is not valid, or named twice."""
    if not compare:
        return (good[-2], good[-1]) if read and len(good) > 1 else None
    by_step = {row.step: row for row in good}
    for step in compare:
        if step not in by_step:
            known = ", ".join(map(str, list(by_step)[-10:]))
            raise MismatchError(f"{listing.path}: expected two valid steps to compare, found {step}; there are {known}")
    first, second = (by_step[step] for step in compare)
    if first is second:
        raise MismatchError(f"{listing.path}: expected two steps to compare, found {first.step} twice")
    return first, second


def _evenly(many: int, most: int) -> list[int]:
    """Chooses at most `most` of the numbers below `many`, evenly spread. The last is chosen first, then the first."""
    if most >= many:
        return list(range(many))
    if most <= 1:
        return [many - 1] * most
    return [round(n * (many - 1) / (most - 1)) for n in range(most)]


def _opened(row: Row, opened: dict[str, Checkpoint], notes: list[str], most: float = math.inf) -> Checkpoint | None:
    """Opens a step unless `opened` has it. Notes an error and returns None if that fails, or it expands too much."""
    try:
        ckpt = opened[row.path] if row.path in opened else open_checkpoint(row.path)
        expansion.check(ckpt._source, arrays_of(ckpt._source), row.path, most)
        return ckpt
    except TreeringError as error:
        raise_if_momentary(error)
        gone = stores.get(row.path).stat(row.path) is None
        _note(notes, f"step {row.step} is left out: {'it was deleted meanwhile' if gone else error}")
        return None


def _note(notes: list[str], text: str) -> None:
    _log.warning("%s", text)
    notes.append(text)


def _tree(ckpt: Checkpoint) -> dict[str, Any]:
    """Returns the tree by size. Nodes that are too small to see are merged into one part of their parent."""
    root = outline(ckpt._source.entries, about=lambda entry: sharding_text(ckpt._source.sharding(entry)))
    total = sum(node.nbytes for node in root.children)

    def part(node: OutlineNode, times: int) -> dict[str, Any]:
        """Describes a node that stands for `times` nodes that are alike."""
        name = safe(node.name) + (f" ×{node.alike}" if node.alike > 1 else "")
        size, leaves = times * node.nbytes, times * node.leaves
        about: dict[str, Any] = {"name": name, "path": safe(node.path), "nbytes": size, "leaves": leaves}
        if isinstance(node.entry, ArrayEntry):
            about |= {"what": safe(describe_entry(node.entry)), "dtype": node.entry.dtype}
        times *= node.alike
        least = _SMALLEST * total
        small = [child for child in node.children if 0 < times * child.nbytes <= least]
        parts = [part(child, times) for child in node.children if times * child.nbytes > least]
        if small:
            leaves, size = (times * sum(getattr(child, of) for child in small) for of in ("leaves", "nbytes"))
            parts.append({"name": f"{len(small):,} smaller", "path": "", "nbytes": size, "leaves": leaves})
        return {**about, "parts": parts} if parts else about

    root.leaves, root.nbytes = len(ckpt), total
    return part(root, 1)


class _Leaves:
    """Collects the statistics of leaves step by step. `rows` has one row for each leaf of any step."""

    def __init__(self, notes: list[str]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._notes = notes

    def read(self, steps: Sequence[tuple[int, Checkpoint | None]], globs: Globs, progress: bool) -> None:
        """Reads the arrays of these steps one after another. Raises `MismatchError` if the globs match none."""
        arrays = [(step, _arrays(ckpt, globs) if ckpt else {}) for step, ckpt in steps]
        sizes: dict[str, int] = {}
        for _, found in arrays:
            for path, array in found.items():
                sizes[path] = max(sizes.get(path, 0), array.nbytes)
        if globs and not sizes:
            names = dict.fromkeys(name for _, ckpt in steps if ckpt for name in _arrays(ckpt, Globs()))
            hint = glob_hint(globs[0], names)
            raise MismatchError(f"expected arrays named {', '.join(globs)}, found {join_names(tuple(names))}{hint}")
        kept = set(sorted(sizes, key=lambda path: -sizes[path])[:_MAX_LEAVES])
        if len(kept) < len(sizes):
            left = len(sizes) - len(kept)
            size = nbytes(sum(size for path, size in sizes.items() if path not in kept))
            _note(
                self._notes,
                f"the {left:,} smallest arrays ({size}) have no statistics here; name leaves to choose others",
            )
        places = {path: n for n, path in enumerate(path for path in sizes if path in kept)}
        self.rows = [_empty(path, len(steps)) for path in places]
        total = sum(array.nbytes for _, found in arrays for path, array in found.items() if path in places)
        histograms = set(_evenly(len(steps), _MAX_HISTOGRAMS))
        with bar("reading", total, progress) as moved:
            for n, (step, found) in enumerate(arrays):
                failed: list[TreeringError] = []
                for path, array in found.items():
                    if path in places:
                        try:
                            _fill(self.rows[places[path]], n, array, n in histograms)
                        except TreeringError as error:
                            raise_if_momentary(error)
                            failed.append(error)
                        moved(array.nbytes)
                if failed:
                    what = count(len(failed), "array is", "arrays are")
                    _note(self._notes, f"step {step}: {what} left out, because they cannot be read: {failed[0]}")
        for row in self.rows:
            for name in _COUNTS:
                if not any(row[name]):
                    del row[name]  # Most leaves have none, and the page stays small.


def _fill(row: dict[str, Any], n: int, array: LazyArray, histogram: bool) -> None:
    """Reads an array and puts its statistics into the row of its leaf, as the `n`-th step."""
    found = array_stats(array, bins=_BINS if histogram else 0)
    row |= {"what": safe(describe_entry(array.entry)), "nbytes": array.nbytes, "size": found.size}
    row["there"][n] = 1
    for name in _NUMBERS:
        row[name][n] = rounded(getattr(found, name))
    for name in _COUNTS:
        row[name][n] = getattr(found, name)
    if found.histogram:
        row["bins"][str(n)] = _bars(found)


def _arrays(ckpt: Checkpoint, globs: Globs) -> dict[str, LazyArray]:
    """Returns the numeric arrays that the globs match, by path."""
    leaves = {path: ckpt[path] for path in ckpt if not globs or globs.match(path)}
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, LazyArray) and has_stats(leaf)}


def _empty(path: str, steps: int) -> dict[str, Any]:
    """Returns the row of a leaf without statistics: None for each step."""
    numbers: dict[str, Any] = {name: [None] * steps for name in (*_NUMBERS, *_COUNTS)}
    return {"path": safe(path), "what": "", "nbytes": 0, "size": 0, "there": [0] * steps, **numbers, "bins": {}}


def _bars(found: Stats) -> str:
    """Encodes a histogram as text: one byte for each bin. The fullest bin is 255, and only an empty bin is 0."""
    most = max(found.histogram)
    return base64.b64encode(bytes(-(-255 * many // most) for many in found.histogram)).decode()


def _difference(pair: tuple[Row, Row], opened: Sequence[Any], notes: list[str]) -> dict[str, Any] | None:
    """Returns the leaves that differ between two steps, or None if the comparison fails, which is noted."""
    a, b = pair
    try:
        found = diff(*opened)
    except TreeringError as error:
        raise_if_momentary(error)
        _note(notes, f"steps {a.step} and {b.step} are not compared: {error}")
        return None
    changed = [_change(path, what, found.values.get(path)) for path, what in found.changed.items()]
    if len(changed) > _MAX_CHANGES:
        _note(
            notes,
            f"{len(changed):,} leaves differ between {a.step} and {b.step}; the first {_MAX_CHANGES:,} are listed",
        )
    sides = {"a": a.step, "b": b.step, "equal": found.equal, "differing": len(changed)}
    only = {"onlyA": _listed(found.only_a), "onlyB": _listed(found.only_b)}
    return {**sides, **only, "changed": changed[:_MAX_CHANGES]}


def _listed(paths: Iterable[str]) -> list[str]:
    return [safe(path) for path in paths]


def _change(path: str, what: str, change: ValueChange | None) -> dict[str, Any]:
    about: dict[str, Any] = {"path": safe(path), "what": safe(what)}
    if change is None:
        return about
    numbers = {"share": change.differing / max(change.size, 1), "largest": change.largest, "relative": change.relative}
    # The cosine of arrays that differ a little is almost 1.
    return {**about, **{name: rounded(one) for name, one in numbers.items()}, "cosine": rounded(change.cosine, 7)}
