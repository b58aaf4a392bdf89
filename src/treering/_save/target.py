"""The target of a save: its place, format and options, and what it records with the tree.

The checks that a save makes before it writes there are methods of the target.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple, TypedDict, cast

import jax
import msgspec
import numpy as np
from jax import core

from .. import formats, stores
from .._core import dtypes, expansion
from .._core.calls import Call
from .._core.entries import step_number
from .._core.source import INFO_FIELDS
from .._core.values import floats_to_text
from .._core.views import View
from .._pytree.devices import encode_metrics
from .._version import __version__
from ..errors import ExistsError, MismatchError, UnsupportedError
from ..formats import Format
from ..formats.treering.commit import check_free
from ..rules import Rule
from ..stores.file_io import is_folder
from ..stores.store import Store
from .room import RoomMaker

_log = logging.getLogger("treering")
_MAX_DEPTH = 100  # of metadata


class Info(NamedTuple):
    """The information that a save records together with the tree."""

    step: int | None
    metrics: dict[str, float | str]
    metadata: msgspec.Raw | None
    metadata_floats: list[str]
    software: dict[str, str]


class FormatOptions(TypedDict, total=False):
    """The keyword arguments that only some formats have.

    safetensors has `max_shard_size` and `filename_pattern`; Orbax has `composite`.
    """

    max_shard_size: int | str
    filename_pattern: str
    composite: bool


class SaveOptions(NamedTuple):
    """The arguments of `treering.save`, which documents them.

    `given` names those of step, metrics and metadata that the caller passed; the rest come from a copied checkpoint.
    hosts: for each process, the lowest process that shares its disk, if each host has its own disk at the path. Process
        0 then writes the manifest, and each process writes its own arrays on the disk of its host. None if all
        processes share one place.
    copies: the number of disks that have each array file, 1 or 2. Processes write second copies of what they hold in
        memory. `host_copies.missing_copies` finds the files that still lack one after the commit.
    room_maker: frees room if a disk is full.
    reuse: looks for arrays of a save that files of earlier steps have; see `UnchangedArrays`. None writes all.
    """

    format: str | None
    overwrite: bool
    rules: Sequence[Rule]
    dtype: Any
    memory_limit: int | None
    background: bool
    progress: bool
    format_options: Mapping[str, Any]
    explicit_info: frozenset[str] = frozenset()
    hosts: tuple[int, ...] | None = None
    copies: int = 1
    room_maker: RoomMaker | None = None
    reuse: Callable[[Any, Any], Any] | None = None


class SaveTarget(NamedTuple):
    """The place, format and options of a save in the format of another library.

    memory_ok: see `StagedSupply`. None if the copies of this process cannot make another process of the job short of
        memory.
    """

    call: Call
    store: Store
    path: str
    format: Format
    info: Info
    options: SaveOptions
    memory_ok: Callable[[int], bool] | None = None

    writes_live_trees = False  # True if the format has the arrays of a live tree as they are, without a view of it

    def requested(self) -> str:
        """Returns as text the options that must be the same in every process."""
        options = self.options
        dtype = "" if options.dtype is None else f", dtype={dtypes.to_text(dtypes.requested_dtype(options.dtype))}"
        format_options = "".join(f", {name}={value!r}" for name, value in sorted(options.format_options.items()))
        return f"format={self.format.name!r}{format_options}{dtype}, {len(options.rules)} rules"

    def check_at_once(self) -> None:
        """Raises `ExistsError` for a path in use, if the caller's thread can tell quickly.

        The background thread checks every path: process 0 checks it for all processes, and a request to a bucket would
        block the caller too long.
        """

    def check_path_free(self) -> None:
        """Raises `ExistsError` for a path in use, before several processes write anything.

        The format checks the path again when it writes. That would be late here, after all have saved a temporary tree.
        """
        joins = self.options.format_options.keys() - {"composite"}  # Shards may be added to a used directory.
        if not (self.options.overwrite or joins) and self.store.stat(self.path) is not None:
            what = "directory" if is_folder(self.store, self.path, links=True) else "file"
            raise ExistsError(f"{self.path}: expected a free path, found a {what}; pass overwrite=True to replace it")
        self.check_replaceable()

    def check_replaceable(self) -> None:
        """Raises `ExistsError` if `overwrite` would replace a directory that is not a checkpoint of the format."""
        store, place = self.store, self.path
        if self.options.overwrite and is_folder(store, place, links=True):
            found = formats.detect(store, place).name if formats.is_known(store, place) else None
            if found is None and not store.list(place):
                return  # An empty directory, as programs make before they save.
            if found != self.format.name:
                what = "a directory that is not a checkpoint" if found is None else f"one of the format {found!r}"
                raise ExistsError(
                    f"{place}: expected a checkpoint of the format {self.format.name!r} to replace, found {what}; "
                    "choose another path or remove it yourself"
                )

    def check_info_kept(self, view: View) -> None:
        """Checks whether the format can store the step, metrics and metadata.

        Raises `UnsupportedError` if one that the caller gave would be lost. Logs one that a copied checkpoint loses.
        """
        format, place = self.format, self.path
        there = [
            name for name in INFO_FIELDS if getattr(view, name) is not None and (name != "metrics" or view.metrics)
        ]
        lost = [name for name in there if name not in format.keeps(place, view)]
        if given := [name for name in lost if name in self.options.explicit_info]:
            raise UnsupportedError(
                f"{place}: the format {format.name!r} cannot store {' and '.join(given)}; "
                "remove it, put it into the tree, or save in the native format"
                + (" (a step can be part of the name, as in the format's library)" if "step" in given else "")
            )
        if lost:
            _log.warning("%s: %s left out: the format %r cannot store it", place, " and ".join(lost), format.name)

    def check_iterators(self, view: View) -> None:
        """Raises `UnsupportedError` if the tree has iterators and the format cannot hold their states.

        The error names the other leaves that the format cannot hold, too.
        """
        found = [path for path, entry in view.entries.items() if entry.type == "iterator"]
        if found and getattr(self.format, "holds_iterators", False):
            self.check_leaves(view)
        elif found:
            only = "only the native format holds the state of data iterators, and the format 'orbax' that of Grain's"
            lines = [f"{self.path}: {', '.join(found)}: {only}; leave it out with treering.rules.drop"]
            try:
                rest = {path: leaf for path, leaf in view.leaves.items() if path not in found}
                self.check_leaves(view.changed(rest, None))
            except UnsupportedError as error:
                lines.append(str(error))
            raise UnsupportedError("\n".join(lines))

    def check_leaves(self, view: View) -> None:
        """Makes the checks of the format before it writes anything, and raises their errors."""
        if not type(self.format).__module__.startswith("treering."):
            return  # Another package's format may write without the store.
        with contextlib.suppress(_WriteBegins):
            options, unwritten = self.options, cast(Store, _UnwrittenStore(self.store))
            self.format.write(unwritten, self.path, view, overwrite=options.overwrite, **options.format_options)


class _WriteBegins(BaseException):
    """Ends the checks of a format. It is not an error, so no code of the format handles it."""


class _UnwrittenStore:
    """A store to read from. The first request to write raises `_WriteBegins`."""

    _WRITES = frozenset({"create", "delete", "make_folder", "make_folders", "new_file", "new_folder", "remove_folder"})

    def __init__(self, store: Store):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name in self._WRITES:
            raise _WriteBegins
        return getattr(self._store, name)


class NativeTarget(SaveTarget):
    """The place and options of a save in the native format, which each process writes its own part of."""

    writes_live_trees = True

    def check_at_once(self) -> None:
        if self.call.count == 1 and self.store.has_folders:
            check_free(self.store, self.path, overwrite=self.options.overwrite)

    def check_path_free(self) -> None:
        check_free(self.store, self.path, overwrite=self.options.overwrite)

    def check_leaves(self, view: View) -> None:
        """Accepts all: this format holds every leaf."""


def target_of(call: Call, path: str, info: Info, options: SaveOptions) -> SaveTarget:
    """Returns the target of a save. Raises `MismatchError` for an unknown format or an option that it does not have."""
    expansion.check_memory_limit(options.memory_limit)
    format = formats.for_path(path, options.format)
    kind = NativeTarget if format.name == "treering" else SaveTarget
    if kind is NativeTarget and options.format_options:
        raise MismatchError(f"{', '.join(options.format_options)}: the native format has no such option")
    return kind(call, stores.get(path), path, format, info, options)


def encode_info(step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> Info:
    """Encodes the information that is recorded with the tree, as it is now.

    Raises `MismatchError` for a bad step or metric, and `UnsupportedError` for metadata that is not JSON.
    """
    number = None if step is None else step_number(step)
    numbers = {} if metrics is None else encode_metrics(metrics)
    metadata_floats: list[str] = []
    raw = None
    try:
        if metadata is not None:
            metadata = floats_to_text(metadata_to_json(metadata), "", metadata_floats)
            raw = msgspec.Raw(msgspec.json.encode(metadata))
        msgspec.json.encode(numbers)
    except (UnicodeEncodeError, OverflowError) as error:
        raise UnsupportedError(f"metadata and the names of metrics must be valid Unicode and JSON: {error}") from None
    software = {"treering": __version__, "jax": jax.__version__, "numpy": np.__version__}
    return Info(number, numbers, raw, metadata_floats, software)


def metadata_to_json(value: Any, where: str = "metadata", depth: int = 0) -> Any:
    """Returns a value as a restore will return it, made of JSON values only.

    Mappings, `ConfigDict`s, dataclasses and named tuples become dicts. Other tuples and mutable sequences become lists,
    paths become text, and scalars of NumPy and JAX become Python numbers. NaN and infinities stay, because the formats
    keep them. Raises an `UnsupportedError` that names the first part that JSON cannot hold.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"{where[:100]}…: nested more than {_MAX_DEPTH} levels deep, or within itself")
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise UnsupportedError(f"{where}: an integer beyond 64 bits; write it as text")
        return value
    if kind in (list, tuple) or (isinstance(value, MutableSequence) and not isinstance(value, bytearray)):
        return [metadata_to_json(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    if (items := _items(value, where)) is not None:
        return {name: metadata_to_json(item, f"{where}[{name!r}]", depth + 1) for name, item in items}
    if isinstance(value, pathlib.PurePath):
        return os.fspath(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return metadata_to_json(_scalar(value, where), where, depth)
    raise _unsupported(value, where)


def _items(value: Any, where: str) -> Iterable[tuple[str, Any]] | None:
    """Returns the names and values of a value that becomes a dict, and None for any other value."""
    if dataclasses.is_dataclass(type(value)):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(type(value))]
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return None if names is None else zip(names, value, strict=True)
    # A `ConfigDict` is not a `Mapping`. A program that holds one has imported ml_collections already.
    configs: Any = getattr(sys.modules.get("ml_collections"), "ConfigDict", Mapping)
    if not isinstance(value, Mapping | configs):
        return None
    try:
        items = list(value.items())
    except Exception as error:  # A `ConfigDict` raises for a required placeholder that has no value.
        raise UnsupportedError(f"{where}: {error}") from error
    for name, _ in items:
        if type(name) is not str:
            raise UnsupportedError(
                f"{where}: the key {name!r} has the type {type(name).__name__}; JSON has only text as keys"
            )
    return items


def _scalar(array: Any, where: str) -> Any:
    """Returns the Python number, bool or text of an array without axes. Raises `UnsupportedError` for other arrays."""
    if array.shape == () and not isinstance(array, core.Tracer | np.ma.MaskedArray):
        is_plain = not jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)  # keys are not
        item = np.asarray(array).item() if is_plain else None
        if type(item) in (bool, int, float, str):
            return item
    raise _unsupported(array, where)


def _unsupported(value: Any, where: str) -> UnsupportedError:
    kind = type(value).__qualname__
    named = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    what = f"an array of shape {list(value.shape)}" if getattr(value, "shape", ()) else named
    return UnsupportedError(
        f"{where}: {what} is not JSON; pass dicts, lists, text, numbers, bools and None, or objects made of these: "
        "ConfigDicts, dataclasses, paths, scalars (and vars(…) of a Namespace); arrays belong in the tree"
    )
