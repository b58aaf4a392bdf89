"""The manifest of a native save, made in process 0 of what all processes report, and sealed."""

import datetime
import itertools
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .._core.boxes import Box, Cells
from .._core.entries import ArrayEntry
from .._core.skeleton import Skeleton
from .._processes import assignment
from .._processes.assignment import Assignment, Piece
from .._pytree.leaves import Catalogue
from .._threads.preload_decoders import preload_decoders
from .._threads.python_gc import gc_paused
from ..errors import TreeringError, UnsupportedError
from ..formats.treering import manifest
from ..formats.treering.manifest_fields import (
    BoxesOfNodes,
    Delta,
    File,
    Layout,
    Manifest,
    Placement,
    Published,
    delta_row,
    parts_row,
)
from . import array_files, layout
from .room import RoomMaker
from .save_reuse import SaveReuse
from .source import Deltas, Encoded, OwnParts
from .target import Info


class Job(NamedTuple):
    """The contents and the path of a save.

    `shares` names the processes that write each array. It is None if this process writes all of them. `hosts` has,
    for each process, the lowest process that shares its disk, if each host has a disk of its own at the path; else it
    is None. `room_maker` frees room if a disk is full. `reuse` finds arrays that earlier steps have; None writes all.
    `deltas` has made the differences that `encoded` describes.
    """

    path: str
    overwrite: bool
    tree: Skeleton
    catalogue: Catalogue
    shares: Mapping[int, Assignment] | None
    info: Info
    hosts: tuple[int, ...] | None = None
    room_maker: RoomMaker | None = None
    reuse: SaveReuse | None = None
    deltas: Deltas | None = None
    encoded: Encoded | None = None

    @property
    def own(self) -> OwnParts | None:
        """The parts of arrays that this process writes; None if it writes its shares of the leaves."""
        return self.encoded and self.encoded.own


class ReportedPart(msgspec.Struct, array_like=True, frozen=True):
    """A part of an array that a process has written.

    leaf, box: the numbers of the leaf and of its box; see `OwnParts`.
    file: the number of the file among those of the process.
    delta: how the part is a difference; None if it is stored as it is.
    """

    leaf: int
    box: int
    file: int
    delta: Delta | None


class ProcessReport(msgspec.Struct, array_like=True, frozen=True):
    """What a process has written, as it reports that to process 0.

    files: its array files, each with the number of the first piece in it.
    copies: its second copies of files.
    runs: the order of its pieces; see `FilePlan.runs`.
    parts: its parts of arrays with differences.
    """

    files: list[tuple[File, int]]
    copies: list[File]
    runs: list[tuple[int, int]] | None
    parts: list[ReportedPart]

    @property
    def listed(self) -> list[File]:
        """Its array files."""
        return [file for file, _ in self.files]


preload_decoders(ProcessReport)
# Arrays with differences, by leaf. Those of an array with several parts are in the order of its grid.
Differences = Mapping[int, tuple[Any, Delta | Sequence[Delta | None]]]


def seal(
    job: Job,
    pieces: Sequence[Piece],
    spread: Collection[int],
    reports: Sequence[ProcessReport],
    differences: Differences,
    published: Published | None,
) -> bytes:
    """Returns the bytes of the manifest. Raises `UnsupportedError` if no reader would accept it.

    pieces, spread: the pieces that this process writes, and the leaves with several; see `NativeSave`.
    """
    entries, everyone = job.catalogue.entries, job.shares

    def order(process: int) -> Iterable[tuple[int, Box]]:
        if everyone is None:
            return ((piece.leaf, piece.box) for piece in pieces)
        return array_files.in_order_of_files(assignment.piece_sizes(entries, everyone, process), reports[process].runs)

    with gc_paused():
        by_leaf = everyone if everyone is not None else assignment.assign_unshared(spread, pieces) if spread else {}
        firsts = [[first for _, first in report.files] for report in reports]
        index = _files_of_parts(by_leaf, reports) if job.own else layout.FileIndex(firsts, order)
        rows = layout.rows(job.catalogue, by_leaf, index)
        placement = layout.placement(job.catalogue)
    leaves: list[Any] = rows.leaves
    for leaf, (array, delta) in differences.items():
        row = leaves[leaf]
        leaves[leaf] = delta_row(array, row.where, delta) if isinstance(delta, Delta) else parts_row(row, delta)
    data = manifest.seal(
        Manifest(
            format=manifest.FORMAT,
            version=manifest.VERSION,
            created=datetime.datetime.now(datetime.UTC).isoformat(),
            software=job.info.software,
            step=job.info.step,
            metrics=job.info.metrics,
            base=job.encoded.base if job.encoded and differences else None,
            published=published,
            metadata=job.info.metadata,
            metadata_floats=job.info.metadata_floats,
            files=[file for report in reports for file in report.listed],
            layouts=rows.layouts,
            holders=rows.holders,
            placement=placement,
            static=job.catalogue.static,
            iterators=rows.iterators,
            boxes=_boxes(job) if job.catalogue.boxes else {},
            tree=list(job.tree),
            leaves=leaves,
        )
    )
    _check_readable(data, job, rows.layouts, placement)
    return data


def _files_of_parts(shares: Mapping[int, Assignment], reports: Sequence[ProcessReport]) -> layout.FileIndex:
    """Returns the files of the parts that all processes report."""
    before = itertools.accumulate((len(report.files) for report in reports), initial=0)
    return layout.ReportedFiles(
        {
            (one.leaf, shares[one.leaf].boxes[one.box]): first + one.file
            for first, report in zip(before, reports, strict=False)
            for one in report.parts
        }
    )


def published(job: Job, differences: Differences) -> Published:
    """Returns what a version sends, for the list of the stream."""
    assert job.deltas
    elements = changed = 0
    for leaf, entry in enumerate(job.catalogue.entries):
        if leaf in job.catalogue.tied or not isinstance(entry, ArrayEntry):
            continue
        array, delta = differences.get(leaf, (entry, None))
        size = math.prod(array.shape)
        elements += size
        if isinstance(delta, Delta):
            changed += min(delta.count, size)
        elif delta is None or not job.shares:
            changed += size
        else:
            sizes = Cells.of(job.shares[leaf].boxes)[0].sizes().tolist()
            changed += sum(min(part.count, own) if part else own for part, own in zip(delta, sizes, strict=True))
    return Published(elements, time.perf_counter() - job.deltas.begun, changed if differences else None)


def arrays_with_differences(job: Job, reports: Sequence[ProcessReport]) -> Differences:
    """Returns the arrays with differences."""
    if not job.own or not job.shares:
        return job.encoded.differences if job.encoded else {}
    found: dict[int, tuple[Any, Any]] = {}
    known = {(one.leaf, one.box): one.delta for report in reports for one in report.parts}
    for leaf in {leaf for (leaf, _), delta in known.items() if delta}:
        _, order = Cells.of(job.shares[leaf].boxes)
        deltas = [known[leaf, box] for box in order]
        found[leaf] = job.catalogue.entries[leaf], deltas if len(deltas) > 1 else deltas[0]
    return found


_last_boxes: tuple[Any, ...] = (None, None, {})  # a tree, its boxes, and the record of them


def _boxes(job: Job) -> Any:
    """Returns the record of the boxes of Flax. It is fast if the tree is the last one."""
    global _last_boxes
    boxes = job.catalogue.boxes
    if _last_boxes[0] is not job.tree or _last_boxes[1] is not boxes:
        _last_boxes = job.tree, boxes, BoxesOfNodes.of(job.tree, boxes)
    return _last_boxes[2]


# The structure of the last manifest that passed `_check_readable`, without values
_last_read_back: tuple[Any, ...] = ()


def _check_readable(data: bytes, job: Job, layouts: Sequence[Layout], placement: Placement | None) -> None:
    """Reads a manifest before it is committed. Raises `UnsupportedError` for one that no reader would accept.

    A manifest with the structure of the last one is not read again: in a training loop only values differ from step to
    step.
    """
    global _last_read_back
    structure = (job.tree, layouts, placement, job.catalogue.static, job.info.metadata, job.info.metadata_floats)
    if _last_read_back and job.tree is _last_read_back[0] and structure[1:] == _last_read_back[1:]:
        return
    try:
        manifest.decode(data, "manifest")
    except TreeringError as error:
        raise UnsupportedError(
            f"{job.path}: expected a tree that can be read back, found one that makes an invalid manifest ({error}); "
            "nothing is written; please report this"
        ) from error
    _last_read_back = structure
