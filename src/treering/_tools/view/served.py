"""What the page shows of a path: the steps of runs, the leaves of a checkpoint in words, and arrays as bytes."""

import json
import os
import posixpath
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import formats, stores
from ..._core import expansion
from ..._core.describe import describe_leaf
from ..._core.entries import ArrayEntry, Entry, StatesEntry
from ..._core.lazy import LazyArray
from ..._core.quantized import member_roles
from ..._core.source import source_name
from ..._core.units import sharding
from ..._printable import safe
from ..._restore.checkpoint import Checkpoint
from ..._run.open import open_checkpoint
from ...errors import NotFoundError, TreeringError
from ...stores.read_errors import raise_if_momentary
from ..listing import list_run
from ..page_data import run_fields, shown_metrics
from ..runs_folder import scan_runs_folder

_MAX_OPEN = 4  # checkpoints that are open at a time: the page shows one or two
_MAX_TEXT = 10_000  # characters of a value that is no array
_MAX_KEPT_BYTES = 256 << 20  # Larger arrays of formats with chunks are read part by part.
_READ_BY_PART = ("treering", "safetensors")


class Served:
    """The checkpoint, the run, or the directory of both that the page shows. It reads nothing that is elsewhere.

    Raises `NotFoundError` if the path has nothing that the page could show.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = stores.absolute(path)
        self._store = stores.get(self.path)
        self._open: dict[tuple[str, str], Checkpoint] = {}  # by run and step
        self._kept: tuple[Any, np.ndarray] | None = None  # the array that was read last, and what it is
        self._lock = threading.Lock()
        self.about("")

    def about(self, run: str) -> dict[str, Any]:
        """Returns the steps of a run, the runs of a directory, or neither for a checkpoint.

        run: the name of a run in the directory; empty for the path itself.
        """
        place = self._place(run)
        folder = None if run else scan_runs_folder(self._store, place, None, None)
        if folder:
            paths = [*folder.runs, *folder.checkpoints]
            return {"path": safe(place), "runs": [self._about_run(path) for path in paths]}
        if self._store.stat(place) is None:
            raise NotFoundError(f"{place}: expected a checkpoint or a run, found nothing. Check the path")
        if formats.is_known(self._store, place):
            return {"path": safe(place)}
        return run_fields(place)

    def _about_run(self, path: str) -> dict[str, Any]:
        name = posixpath.relpath(path, self.path)
        try:
            return {"name": name, **self.about(name)}
        except (TreeringError, PermissionError) as error:
            raise_if_momentary(error)
            return {"name": name, "path": safe(path), "error": safe(error)}

    def _place(self, run: str) -> str:
        if not run:
            return self.path
        folder = scan_runs_folder(self._store, self.path, None, None)
        place = posixpath.join(self.path, run) if run != "." else self.path
        if folder is None or place not in (*folder.runs, *folder.checkpoints):
            raise NotFoundError(f"{self.path}: expected the name of a run in it, found {run!r}")
        return place

    def contents(self, run: str, step: str) -> dict[str, Any]:
        """Opens a checkpoint, and returns what the page shows of it.

        step: the name of a step's directory; empty for a checkpoint that is no step.
        """
        ckpt = self._opened(run, step, again=True)
        created = ckpt.created and ckpt.created.timestamp()
        roles = member_roles(ckpt._source)
        return {
            "place": safe(source_name(ckpt._source)),
            "format": ckpt.format,
            "step": ckpt.step,
            "created": created,
            "nbytes": ckpt.nbytes,
            "metrics": shown_metrics(ckpt.metrics),
            "metadata": "" if ckpt.metadata is None else json.dumps(ckpt.metadata, indent=2, ensure_ascii=False),
            "leaves": [_leaf(ckpt, path, entry, roles) for path, entry in ckpt._source.entries.items()],
        }

    def _opened(self, run: str, step: str, *, again: bool = False) -> Checkpoint:
        """Returns an open checkpoint. `again` opens it even if it is open: another may have its name by now."""
        with self._lock:
            if not again and (run, step) in self._open:
                return self._open[run, step]
        place = self._place(run)
        if step:
            paths = {safe(posixpath.basename(row.path)): row.path for row in list_run(place).rows}
            if step not in paths:
                raise NotFoundError(f"{place}: expected the name of a step, found {step!r}. It may have been deleted")
            place = paths[step]
        ckpt = open_checkpoint(place)
        with self._lock:
            self._open.pop((run, step), None)
            self._open[run, step] = ckpt
            while len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
        return ckpt

    def values(self, run: str, step: str, leaf: str, box: Sequence[tuple[int, int]] | None) -> bytes:
        """Reads a box of an array as the native format stores it, or all of a leaf that is no array as text."""
        ckpt = self._opened(run, step)
        entry = ckpt._source.entries.get(leaf)
        if isinstance(entry, StatesEntry):
            return repr(entry.decode())[:_MAX_TEXT].encode("utf-8", "backslashreplace")
        found = ckpt[leaf]
        if not isinstance(found, LazyArray):
            return repr(found)[:_MAX_TEXT].encode("utf-8", "backslashreplace")
        if box is None or not _fits(box, found.shape):
            raise NotFoundError(f"{leaf}: expected a box within the shape {list(found.shape)}, found {box}")
        bounds = tuple(box)
        if ckpt.format in _READ_BY_PART or found.nbytes > _MAX_KEPT_BYTES:
            expansion.check_memory(ckpt._source, [(found.entry, bounds)], ckpt.path)
            return np.asarray(found.part(bounds)).tobytes()
        # A part of a compressed chunk costs as much as the chunk.
        array = self._read_and_keep((ckpt, leaf), found)
        return np.asarray(array[tuple(slice(a, b) for a, b in bounds)]).tobytes()

    def _read_and_keep(self, which: Any, array: LazyArray) -> np.ndarray:
        with self._lock:
            if self._kept is None or self._kept[0] != which:
                self._kept = which, np.asarray(array)
            return self._kept[1]


def _fits(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(0 <= a <= b <= size for (a, b), size in zip(box, shape, strict=True))


def _leaf(ckpt: Checkpoint, path: str, entry: Entry, roles: dict[str, str]) -> dict[str, Any]:
    about: dict[str, Any] = {"path": path, "what": safe(describe_leaf(entry))}
    if isinstance(entry, StatesEntry):
        return {**about, "nbytes": entry.nbytes}
    if not isinstance(entry, ArrayEntry):
        return about
    facts = {"type": entry.type, "sharding": sharding(ckpt._source.sharding(entry)), "quantized": roles.get(entry.path)}
    shown = {name: safe(text) for name, text in facts.items() if text}
    return {**about, "nbytes": entry.nbytes, "dtype": entry.dtype, "shape": entry.shape, "facts": shown}
