"""Opens an Orbax checkpoint and reads the files about all of it. For its items see `items`."""

import base64
import datetime
import json
import os
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..._core.entries import ArrayEntry
from ..._core.source import EVERYTHING, Problem, Share
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError
from ...stores.read_errors import raise_if_momentary
from ...stores.store import Store
from .._zarr import array as zarr
from .._zarr.leaves import ZarrReader, folder_size
from .items import Items, numbers, read_items, read_tree_of
from .iterators import HANDLERS
from .run import read_run_metadata
from .schema import CHECKPOINT, ONE_DEVICE, SHARDINGS, deleted_item, read_checkpoint_metadata, read_json

_VERSION_1 = "orbax.checkpoint"  # an empty file


class OrbaxReader(ZarrReader):
    """Reads an Orbax checkpoint; see `treering.formats.Source`."""

    def __init__(self, store: Store, path: str, items: Items, of_step: Any, *, nbytes: int, **about: Any):
        tree, level, damage = items.tree, items.level, items.damage
        about = {"skeleton": tree.skeleton, "numbers_are_arrays": tree.numbers_are_arrays, **about}
        about["left_out"] = items.left_out
        super().__init__("orbax", path, tree.entries, tree.arrays, nbytes=nbytes, **about)
        self._store, self._damage = store, damage
        self.level = level  # the name of an only item: a template may have this level, the paths here do not
        self.item_names = items.names
        self.step_metadata = of_step  # `metadata` has those of the run, too
        self._shardings: dict[str, Mapping[str, Any]] = {}  # by the folder of an item

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        array = self._arrays[entry.path]
        if not isinstance(array, zarr.Array):
            return None
        folder = array.folder.path
        if folder not in self._shardings:
            self._shardings[folder] = _read_shardings(self._store, folder)
        return self._shardings[folder].get(array.name)

    def problems(self, share: Share = EVERYTHING) -> Iterator[Problem]:
        if self._damage:
            yield Problem(self.path, (), None, self._damage)
        yield from super().problems(share)


class _CheckpointInfo(NamedTuple):
    """Facts about a checkpoint: the items that must exist, the one that is being deleted, metrics and metadata."""

    items: dict[str, str]  # the classes of the items' handlers, by item
    handler: str  # the class of the handler for the folder itself, "" if there are items
    version_1: bool
    deleted: Any
    metrics: Mapping[str, float]
    metadata: Any
    created: datetime.datetime | None


def open_checkpoint(store: Store, path: str, step: int | None) -> OrbaxReader:
    """Opens a folder. Raises `CorruptError` and `UnsupportedError`."""
    with gc_paused():
        about = _read_checkpoint_info(store, path)
        direct = read_tree_of(store, path, None)
        if direct is not None:
            found = Items(direct, {})
        else:
            found = read_items(store, path, about.items, about.deleted, version_1=about.version_1)
            if about.handler in HANDLERS and not found.tree.entries:
                raise CorruptError(f"{path}: expected the states of an iterator, found nothing")
    metadata = of_step = about.metadata or found.tree.metadata
    # If the folder above is a checkpoint itself, this folder is an item of it and not a step of a run.
    if step is not None and store.stat(posixpath.join(os.path.dirname(path), CHECKPOINT)) is None:
        of_run = read_run_metadata(store, os.path.dirname(path))
        both = isinstance(of_run, dict) and isinstance(metadata, dict)
        metadata = {**of_run, **metadata} if both else of_run if metadata is None else metadata
    metrics = {**about.metrics, **found.metrics}
    about_all = {"step": step, "metrics": metrics, "metadata": metadata, "created": about.created}
    return OrbaxReader(store, path, found, of_step, nbytes=folder_size(store, path), **about_all)


def _read_checkpoint_info(store: Store, path: str) -> _CheckpointInfo:
    names = store.list(path)
    found = read_checkpoint_metadata(store, path) if CHECKPOINT in names else {}
    if not isinstance(found, dict):
        raise CorruptError(f"{path}: expected a map in {CHECKPOINT}")
    deleted = deleted_item(store, path)
    handlers = found.get("item_handlers")
    items = handlers if isinstance(handlers, dict) else {}
    version_1 = _VERSION_1 in names or any(".v1." in str(handler) for handler in items.values())
    metrics = numbers(found.get("metrics")) or {}
    classes = {name: str(handler).rpartition(".")[2] for name, handler in items.items()}
    metadata, created = found.get("custom_metadata"), _time(found.get("commit_timestamp_nsecs"))
    handler = handlers.rpartition(".")[2] if isinstance(handlers, str) else ""
    return _CheckpointInfo(classes, handler, version_1, deleted, metrics, metadata, created)


def _time(nanoseconds: Any) -> datetime.datetime | None:
    """Returns a time given in nanoseconds since 1970; None for anything else."""
    if type(nanoseconds) is not int or nanoseconds <= 0:
        return None
    try:
        return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=nanoseconds // 1000)
    except OverflowError:
        return None


def _read_shardings(store: Store, folder: str) -> dict[str, Any]:
    """Reads the shardings of arrays, by their names in a folder, without those that Treering does not understand."""
    found: dict[str, Any] = {}
    try:
        listed = read_json(store, posixpath.join(folder, SHARDINGS))
        for name, text in listed.items():
            about = json.loads(text)
            # Treering writes a mesh with the axis `_` for an array without a mesh.
            if about["sharding_type"] == "NamedSharding" and about["axis_names"] != ONE_DEVICE["axis_names"]:
                mesh = dict(zip(about["axis_names"], about["shape"], strict=True))
                place = {"mesh": mesh, "spec": about["partition_spec"]}
                kinds = [kind.removeprefix("AxisType.").lower() for kind in about.get("axis_types") or ()]
                if {*kinds} - {"auto"}:
                    place["axis_types"] = kinds
                found[base64.urlsafe_b64decode(name).decode()] = place
    except (OSError, CorruptError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise_if_momentary(error)  # shardings are only information: without them, an array can still be read
    return found
