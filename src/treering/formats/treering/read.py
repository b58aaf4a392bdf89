"""Reads the native format: finds the bytes of a box, checks them and returns them as an array."""

import contextlib
import datetime
import functools
import itertools
import logging
import operator
import posixpath
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ..._core.boxes import Box, full_box
from ..._core.entries import ArrayEntry, Entry, IteratorEntry, IteratorInfo, StatesEntry
from ..._core.iterator_states import Packed, unpack
from ..._core.skeleton import Skeleton
from ..._core.source import EVERYTHING, Boxes, Problem, Share
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsupportedError
from ...stores.buffers import merge
from ...stores.file_io import read_file
from ...stores.read_errors import ReplacedError, raise_if_momentary
from ...stores.store import Store
from .._shared import strict_json
from . import deltas, manifest, metrics, summary, validity
from .manifest import BLOCK
from .manifest_fields import ArrayRow, Base, BoxesOfNodes, File, as_utc
from .open_files import OpenFiles
from .piece_locations import ContiguousLeaves, PieceLocations, read_objects
from .piece_reads import Memory, as_bools, assemble, ranges_by_file
from .schema import MANIFEST

_log = logging.getLogger("treering")
# Bases, for as long as one of the checkpoints that are made from them is open. So a program that reads one version of a
# stream after another does not open all versions before it every time.
_open_readers: weakref.WeakValueDictionary[tuple[str, str], "Reader"] = weakref.WeakValueDictionary()


class Reader:
    """An open checkpoint. It opens an array file when it first needs it. An open file outlives a delete."""

    format = "treering"
    positional = False
    numbers_are_arrays = False
    records_kinds = True
    has_checksums = True
    ambiguous_dtypes: frozenset[str] = frozenset()

    def __init__(self, store: Store, path: str, *, expected: int = 0):
        """Reads the manifest. For `expected` see `read_file`. Raises `ReplacedError` if the directory has none."""
        self.path = path
        self._store = store
        name = posixpath.join(path, MANIFEST)
        try:
            self._manifest_bytes = read_file(store, name, expected=expected)
        except (FileNotFoundError, NotADirectoryError):
            raise ReplacedError(
                f"{path}: expected a checkpoint, found no {MANIFEST}; was it deleted meanwhile?"
            ) from None
        with gc_paused():
            self._manifest = manifest.decode(self._manifest_bytes, name)
        self.identity = manifest.xxh3(self._manifest_bytes)
        self.entries: dict[str, Entry] = {row.path: row for row in self._manifest.leaves}
        self._stored_rows: dict[str, ArrayRow] = {}  # the bytes of iterators' states and of deltas, as arrays
        self._is_sound = False  # True once all bytes, and those of its bases, were found right
        # The arrays that are stored as differences to those of `base`, piece by piece.
        self.deltas: dict[str, Sequence[deltas.Part]] = {}
        if b'"iterator' in self._manifest_bytes:  # a value of this type, or the name of the feature `STATES`
            self._find_iterators()
        self.skeleton: Skeleton = self._manifest.tree
        self.step = self._manifest.step
        self.metadata = self._manifest.metadata
        self.nbytes = len(self._manifest_bytes) + sum(file.size for file in self._manifest.files)
        self._files = OpenFiles(store, path, self._manifest.files, self.identity, len(self._manifest_bytes))
        self._locations = PieceLocations(path, self._manifest, self.entries, self._stored_rows, self._files)
        if self._manifest.base:
            self._find_deltas()

    def _find_iterators(self) -> None:
        """Adds to the entries what is recorded about iterators, and those whose states are stored in array files."""
        # A strong reference would be a cycle through the entries, and keep the files open until Python collects it.
        this: weakref.ref[Reader] = weakref.ref(self)
        for row in self._manifest.leaves:
            if isinstance(row, ArrayRow) and (found := row.of_states()):
                lengths, self._stored_rows[row.path] = found
                read = functools.partial(_read_state, this, row.path)
                self.entries[row.path] = StatesEntry(row.path, "iterator", lengths, self._iterator_info(row.path), read)
            elif row.type == "iterator":
                self.entries[row.path] = IteratorEntry(row.path, row.type, row.value, self._iterator_info(row.path))

    def _find_deltas(self) -> None:
        for row in self._manifest.leaves:
            if isinstance(row, ArrayRow) and (place := row.of_delta()):
                stored = self._stored_rows[row.path] = place.stored
                if place.is_parted:
                    pieces = self._locations.overlapping(stored, full_box(stored.shape))
                    self.deltas[row.path] = [
                        deltas.part_of(stored, piece, number, key, delta)
                        for delta, (number, piece, key) in zip(place.parts, pieces, strict=True)
                    ]
                else:
                    self.deltas[row.path] = [deltas.Part(None, stored, place.parts[0])]

    @property
    def made_from(self) -> Base | None:
        """The checkpoint next to this one that `deltas` refers to; None if this one is complete."""
        return self._manifest.base

    @property
    def base(self) -> "Reader":
        """The open checkpoint that `made_from` names. Raises `CorruptError` if it is gone or was replaced."""
        return self._base

    @functools.cached_property
    def _base(self) -> "Reader":  # A protocol has a read-only property; a cached one could be set.
        assert self._manifest.base
        name, identity = self._manifest.base.name, self._manifest.base.xxh3
        folder = posixpath.dirname(self._store.real_path(self.path))  # A link may lead here.
        path, outside = (posixpath.join(place, name) for place in (folder, posixpath.dirname(folder)))
        if not summary.stat_manifest(self._store, path) and summary.stat_manifest(self._store, outside):
            path = outside  # This one was archived, and its base was not.
        if (known := _open_readers.get((path, identity))) and summary.stat_manifest(self._store, path):
            return known
        try:
            found = Reader(self._store, path)
        except ReplacedError:
            raise CorruptError(
                f"{self.path}: expected {name} next to it, because some of its arrays are stored as differences to "
                "those in there, found none: it was deleted, or not copied along"
            ) from None
        if found.identity != identity:
            raise CorruptError(
                f"{self.path}: expected the checkpoint {identity} as {name} next to it, found another one "
                f"({found.identity}), to which its differences do not apply"
            )
        _open_readers[path, identity] = found
        return found

    def read_parts(self, parts: "Sequence[deltas.Part]") -> list[np.ndarray]:
        """Returns the stored bytes of parts of `deltas`."""
        return self._read_stored([(part.stored, full_box(part.stored.shape)) for part in parts], True, None)

    def _iterator_info(self, path: str) -> IteratorInfo:
        """Returns what is recorded about an iterator, or nothing if that is not as it should be."""
        recorded = self._manifest.iterators
        try:
            return msgspec.convert(recorded.get(path, {}) if isinstance(recorded, dict) else {}, IteratorInfo)
        except msgspec.ValidationError:
            return IteratorInfo()

    def _read_process_state(self, path: str, process: int, exact: bool) -> Any:
        """Reads the state of an iterator in a process. Raises `UnsupportedError` for bytes that are not a state."""
        row, entry = self._stored_rows[path], self.entries[path]
        assert isinstance(entry, StatesEntry)
        (data,) = self._read_stored([(row, entry.box(process))], True, False)
        try:
            return unpack(Packed(data, entry.info.types_of(process)), strict_json.parse, exact=exact)
        except (*strict_json.MALFORMED, CorruptError) as error:
            raise manifest.invalid(f"{self.path}: {path}: {error}", self._manifest.software) from None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the manifest, and those that were recorded before this property was first read."""
        return self._metrics

    @functools.cached_property
    def _metrics(self) -> Mapping[str, float]:  # `Source` has a read-only property; a cached one could be set.
        numbers = validity.metrics(self._manifest.metrics)
        for _, found in metrics.read(self._store, self.path, self.identity):
            if isinstance(found, dict):  # Damaged ones are skipped here; `problems` yields them.
                numbers.update(found)
            elif isinstance(found, UnsupportedError):
                _log.warning("metrics that were recorded are left out: %s", found)
        return numbers

    @functools.cached_property
    def expands(self) -> bool:
        """True if several leaves are the same stored array, so that all leaves have more bytes than are stored."""
        rows = self._manifest.leaves
        if set(map(type, rows)) != {ArrayRow}:
            rows = [row for row in rows if isinstance(row, ArrayRow)]
        return str in set(map(type, map(operator.attrgetter("where"), rows)))

    @property
    def created(self) -> datetime.datetime:
        """The time of the commit, in UTC."""
        return as_utc(self._manifest.created)

    def check_present(self) -> None:
        """Raises `CorruptError` unless every array file is present in its full size. Open files were checked before."""
        self._files.check_present()
        one = self
        while one.made_from:
            one = one.base
            one._files.check_present()

    def open_files(self, numbers: Iterable[int] | None = None) -> None:
        """Opens array files, by default all, so that they can be read after a delete. Does nothing in a bucket."""
        self._files.open_files(numbers)

    def close_files(self) -> None:
        """Closes the array files. Each is opened again when it is needed."""
        self._files.close()

    @property
    def manifest_bytes(self) -> bytes:
        """The bytes of the manifest file."""
        return self._manifest_bytes

    @property
    def files(self) -> Sequence[File]:
        """The array files that the manifest lists, in its order."""
        return self._manifest.files

    def contents(self, number: int) -> Iterator[tuple[int, memoryview]]:
        """Yields the bytes of an array file, each block checked; see `ArrayFile.contents`."""
        return self._files.get(number).contents(self._manifest.files[number])

    def sharding(self, entry: ArrayEntry) -> Mapping[str, Any] | None:
        """Returns where an array was when it was saved, as JSON, or None if that is not recorded."""
        if self._placements is not None:
            return self._placements[entry.path]
        where = self._locations.target(entry).where
        # An earlier release recorded the shardings of arrays in pieces alone.
        return self._manifest.layouts[where[0]].sharding if isinstance(where, tuple) else None

    @functools.cached_property
    def _placements(self) -> Mapping[str, Mapping[str, Any] | None] | None:
        placement = self._manifest.placement
        return None if placement is None else dict(zip(self.entries, placement.by_leaf(), strict=True))

    @property
    def static(self) -> Mapping[str, Mapping[str, Any]]:
        """The static values of containers that are not part of the tree, by path and name."""
        return self._manifest.static

    @functools.cached_property
    def flax_boxes(self) -> Boxes:
        """The boxes of Flax around leaves and containers, or nothing if the record is not as it should be."""
        try:
            found = msgspec.convert(self._manifest.boxes or {"kinds": [], "nodes": []}, BoxesOfNodes)
            return found.by_path(self.skeleton) if found.nodes else {}
        except (ValueError, IndexError, OverflowError):
            return {}

    def origin(self, path: str) -> str:
        """Returns the path of the first leaf that was the same array object as a leaf."""
        where = getattr(self.entries[path], "where", None)
        return where if isinstance(where, str) else path

    @property
    def is_local(self) -> bool:
        """True if all files are on disks of this host, so that no process needs to read for another."""
        return self._store.is_local(self.path)

    def can_mmap(self, requested: bool | None) -> bool:
        """Returns True if arrays are returned as views of the mapped files, which take no memory."""
        return self._files.can_mmap(requested)

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        """Returns the boxes of the arrays, in memory that the caller may change.

        `mmap=None` returns views of the mapped file where that is safe, True always, False never. With `verify`, every
        block that holds a wanted byte is checked before anything is returned. Raises `CorruptError` for a wrong one.
        """
        if self.deltas:
            return self._read_with_deltas(wanted, verify, mmap)
        return self._read_stored(wanted, verify, mmap)

    def _read_with_deltas(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], verify: bool, mmap: bool | None
    ) -> list[np.ndarray]:
        """Reads some boxes of arrays that may be stored as differences. These take new memory in any case."""
        paths = [self.origin(entry.path) for entry, _ in wanted]
        rest = [n for n, path in enumerate(paths) if path not in self.deltas]
        found = dict(zip(rest, self._read_stored([wanted[n] for n in rest], verify, mmap), strict=True))
        made = deltas.read_arrays(self, {path for path in paths if path in self.deltas})
        for n, (entry, box) in enumerate(wanted):
            if n not in found:
                found[n] = deltas.piece_of(made[paths[n]], entry, box).copy()
        return [found[n] for n in range(len(wanted))]

    def _read_stored(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], verify: bool, mmap: bool | None
    ) -> list[np.ndarray]:
        if self._stored_rows:
            wanted = [(self._stored_rows.get(entry.path, entry), box) for entry, box in wanted]
        if self._store.object_bytes is None:
            arrays, memory = self._read_files(wanted, verify, mmap)
        else:
            arrays, memory = read_objects(wanted, verify, mmap, self._files, self._locations)
        if "bool" in {entry.dtype for entry, _ in wanted}:
            arrays = [
                as_bools(array) if entry.dtype == "bool" else array
                for array, (entry, _) in zip(arrays, wanted, strict=True)
            ]
        held = sum(one.nbytes for one in memory.values())
        if held and sum([array.nbytes for array in arrays]) * 2 < held:
            return [array.copy() for array in arrays]  # Otherwise a small leaf would keep the blocks around it alive.
        # Leaves that were one array when they were saved are returned as several arrays that share no memory.
        owners: dict[str, str] = {}
        for n, (entry, _) in enumerate(wanted if len(wanted) > 1 and self.expands else ()):
            if owners.setdefault(self._locations.resolve(entry).path, entry.path) != entry.path:
                arrays[n] = arrays[n].copy()
        return arrays

    def pieces(self, entry: ArrayEntry, box: Box) -> list[tuple[int, Box]]:
        """Returns file number and box of each piece with a part of a box; see `treering._core.source.pieces`."""
        if self.origin(entry.path) in self.deltas:
            return [(0, full_box(entry.shape))]
        row = self._locations.resolve(entry)
        return [(number, piece) for number, piece, _ in self._locations.overlapping(row, box)]

    def _read_files(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], verify: bool, mmap: bool | None
    ) -> tuple[list[np.ndarray], dict[int, Memory]]:
        """Returns the boxes of the arrays, and the memory that they may be parts of, by file."""
        leaves, others = ContiguousLeaves.group_by_file(wanted, self.files)
        for number, own in leaves.items():
            own.locate(self._files.get(number).header, functools.partial(self._locations.begin, number))
        rest = [wanted[n] for n in others]
        parts = [self._locations.parts(entry, box, mmap) for entry, box in rest]
        ranges = ranges_by_file(itertools.chain.from_iterable(parts))
        for number, own in leaves.items():
            ranges.setdefault(number, []).extend(own.ranges())
        memory = {number: self._files.get(number).memory(merge(own), verify, mmap) for number, own in ranges.items()}
        made = assemble(rest, parts, memory)
        if not leaves:
            return made, memory
        arrays: list[Any] = [None] * len(wanted)
        for n, array in zip(others, made, strict=True):
            arrays[n] = array
        for number, own in leaves.items():
            for n, array in zip(own.numbers, own.arrays(memory[number]), strict=True):
                arrays[n] = array
        return arrays, memory

    def problems(self, share: Share = EVERYTHING) -> Iterator[Problem]:
        """Reads every byte, or a share of them, and yields all damage. A base with damage is one problem of this.

        Raises at the end `UnsupportedError` if a later release wrote a file, and `PermissionError` if a file may not be
        read.
        """
        is_sound = True
        for problem in self._own_problems(share):
            is_sound = False
            yield problem
        for base, why in self._damaged_bases(share) if self.deltas else ():
            is_sound = False
            yield Problem(base, tuple(self.deltas), None, why)
        if is_sound and share == EVERYTHING:
            self._is_sound = True
            _open_readers[self.path, self.identity] = self

    def _damaged_bases(self, share: Share) -> Iterator[tuple[str, str]]:
        """Checks a share of the bytes of the bases. Yields the name of one that is damaged or missing, and why."""
        one = self
        while (made_from := one.made_from) and not one._is_sound:
            try:
                one = one.base
                found = None if one._is_sound else next((p for p in one._own_problems(share) if p.leaves), None)
                one.close_files()
            except (CorruptError, OSError) as error:
                raise_if_momentary(error)
                yield made_from.name, str(error)
                return
            if found:
                yield made_from.name, str(found)

    def _own_problems(self, share: Share) -> Iterator[Problem]:
        unread: set[int] = set()
        refused: list[UnsupportedError | PermissionError] = []
        begin, end = share.of(sum(listed.size - listed.header for listed in self._manifest.files))
        for number, listed in enumerate(self._manifest.files):
            size = listed.size - listed.header
            # Both edges are rounded up, so that each block belongs to the one share in which it begins.
            first, last = (-(-max(edge, 0) // BLOCK) * BLOCK for edge in (begin, end))
            begin, end = begin - size, end - size
            try:
                file = self._files.get(number)
                file.header.tensors  # noqa: B018 (reading the property checks all tensors)
                bad = file.bad_blocks([(min(first, size), min(last, size))])
            except (UnsupportedError, PermissionError) as error:
                refused.append(error)
                unread.add(number)
                continue
            except (CorruptError, OSError) as error:
                raise_if_momentary(error)
                yield Problem(listed.name, self._leaves_in(number), None, str(error))
                unread.add(number)
                continue
            for block in bad:
                yield Problem(listed.name, file.leaves(block), block, "the bytes are not those that were saved")
        for name, found in metrics.read(self._store, self.path, self.identity):
            if isinstance(found, CorruptError):
                yield Problem(name, (), None, str(found))
            elif isinstance(found, UnsupportedError):
                refused.append(found)
        for row in self._manifest.leaves:
            if isinstance(row, ArrayRow) and not unread.intersection(self._locations.files_of(row)):
                try:
                    parts = self.deltas.get(self.origin(row.path))
                    for stored in [part.stored for part in parts] if parts else [self._locations.target(row)]:
                        self._locations.parts(stored, full_box(stored.shape), None)
                    self._check_states(row.path, share)
                except UnsupportedError as error:
                    refused.append(error)
        if refused:
            raise refused[0]

    def _check_states(self, path: str, share: Share) -> None:
        """Reads the iterator states at a path, if it has any. Raises `UnsupportedError` for one that is not a state."""
        entry = self.entries[path]
        if isinstance(entry, StatesEntry) and share.number == 1:
            with contextlib.suppress(CorruptError):  # `problems` has yielded the damaged block already.
                for process in range(len(entry.value)):
                    self._read_process_state(path, process, False)

    def _leaves_in(self, number: int) -> tuple[str, ...]:
        rows = (row for row in self._manifest.leaves if isinstance(row, ArrayRow))
        return tuple(row.path for row in rows if number in self._locations.files_of(row))


def _read_state(reader: "weakref.ref[Reader]", path: str, process: int, exact: bool) -> Any:
    found = reader()
    assert found is not None
    return found._read_process_state(path, process, exact)
