"""Reading the native format: the bytes of a box are found, checked, and returned as an array."""

import contextlib
import datetime
import functools
import itertools
import logging
import math
import operator
import posixpath
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, Cells, box_shape, intersect, slices, whole
from ..._core.entries import ArrayEntry, Entry, StatesEntry
from ..._core.skeleton import Skeleton
from ..._core.source import WHOLE, Problem, Share
from ..._core.states import unpack
from ..._threads.pool import in_parallel
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsupportedError
from ...stores import git_lfs
from ...stores.buffers import adoptable
from ...stores.ranges import merge
from ...stores.read_errors import ReplacedError, raise_if_momentary
from ...stores.store import Store
from ...stores.whole_files import opened, read_file
from .._shared import strict_json
from . import manifest, metrics, validity
from .files import ArrayFile
from .manifest import BLOCK, ArrayRow, piece_key
from .parts import Memory, Part, as_bools, assemble, joined, parts_of, ranges_of
from .schema import MANIFEST
from .whole_leaves import WholeLeaves, stored_as

_log = logging.getLogger("treering")
_OBJECTS = 10  # of a bucket that are read at a time, and may be in memory beside what is returned


class Reader:
    """An open checkpoint. Array files are opened when they are first needed, and from then on outlive a delete."""

    format = "treering"
    positional = False
    numbers_are_arrays = False
    records_kinds = True
    ambiguous_dtypes: frozenset[str] = frozenset()

    def __init__(self, store: Store, path: str, *, expected: int = 0):
        """Reads the manifest; for `expected` see `read_file`. Raises `ReplacedError` when there is none."""
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
        self._stored: dict[str, ArrayRow] = {}  # the states of iterators, as arrays
        if manifest.STATES.encode() in self._manifest_bytes:
            self._find_states()
        self.skeleton: Skeleton = self._manifest.tree
        self.step = self._manifest.step
        self.metadata = self._manifest.metadata
        self.nbytes = len(self._manifest_bytes) + sum(file.size for file in self._manifest.files)
        self._is_checked = False  # whether all array files are known to be there
        self._files: dict[int, ArrayFile] = {}
        self._cells = [Cells(layout.cuts) for layout in self._manifest.layouts]
        self._opening = threading.RLock()  # a signal handler may read while its thread holds it

    def _find_states(self) -> None:
        """Puts the iterators whose states lie in array files among the entries."""
        this: weakref.ref[Reader] = weakref.ref(self)  # or the entries, which it has, would keep it open
        for row in self._manifest.leaves:
            if isinstance(row, ArrayRow) and (found := row.of_states()):
                lengths, self._stored[row.path] = found
                read = functools.partial(_read_state, this, row.path)
                self.entries[row.path] = StatesEntry(row.path, "iterator", lengths, read)

    def _state(self, path: str, process: int) -> Any:
        """Reads the state of an iterator in a process. Raises `UnsupportedError` for bytes that are no state."""
        row, entry = self._stored[path], self.entries[path]
        assert isinstance(entry, StatesEntry)
        (data,) = self.read([(row, entry.box(process))], mmap=False)
        try:
            return unpack(data, strict_json.parse)
        except (*strict_json.MALFORMED, CorruptError) as error:
            raise manifest.invalid(f"{self.path}: {path}: {error}", self._manifest.software) from None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Those of the manifest, and those that were recorded until they were asked for first."""
        return self._metrics

    @functools.cached_property
    def _metrics(self) -> Mapping[str, float]:  # apart, for what is cached could be set, which `Source` forbids
        numbers = validity.metrics(self._manifest.metrics)
        for _, found in metrics.read(self._store, self.path, self.identity):
            if isinstance(found, dict):  # `problems` yields the damaged ones
                numbers.update(found)
            elif isinstance(found, UnsupportedError):
                _log.warning("metrics that were recorded are left out: %s", found)
        return numbers

    @functools.cached_property
    def expands(self) -> bool:
        """Whether leaves are one array, and so more bytes than are stored."""
        rows = self._manifest.leaves
        if set(map(type, rows)) != {ArrayRow}:
            rows = [row for row in rows if isinstance(row, ArrayRow)]
        return str in set(map(type, map(operator.attrgetter("where"), rows)))

    @property
    def created(self) -> datetime.datetime:
        """The time of the commit, in UTC."""
        return manifest.as_utc(self._manifest.created)

    def check_present(self) -> None:
        """Raises `CorruptError` unless every array file is there in its full size: those that are open are."""
        if self._is_checked:
            return
        unopened = [file for number, file in enumerate(self._manifest.files) if number not in self._files]
        with self._store.glance(self.path) if len(unopened) > 1 else contextlib.nullcontext():
            for file in unopened:
                self._check_present(file)
        self._is_checked = True

    def _check_present(self, file: manifest.File) -> None:
        path = posixpath.join(self.path, file.name)
        found = self._store.stat(path)
        if found is not None and found.nbytes == file.size:
            return
        size = self._size_now(file.name)  # what was listed may be older than the manifest
        if size != file.size:
            git_lfs.check_all(self._store, path)
            raise CorruptError(f"{path}: expected {file.size} bytes, found {size}; it is cut short")

    def _size_now(self, name: str) -> int:
        try:
            with opened(self._store, posixpath.join(self.path, name), expected=1) as blob:
                return blob.size
        except FileNotFoundError:
            self._raise_missing(name)

    def hold(self, numbers: Iterable[int] | None = None) -> None:
        """Opens array files, by default all, to be read when the checkpoint has been deleted; objects never can."""
        if self._store.object_bytes is not None:
            return
        for number in range(len(self.files)) if numbers is None else numbers:
            if not self.files[number].requires:
                self._file(number)

    @property
    def manifest_bytes(self) -> bytes:
        """The manifest as it is."""
        return self._manifest_bytes

    @property
    def files(self) -> Sequence[manifest.File]:
        """The array files."""
        return self._manifest.files

    def contents(self, number: int) -> Iterator[tuple[int, memoryview]]:
        """An array file as it is, each block checked; see `ArrayFile.contents`."""
        return self._file(number).contents(self._manifest.files[number])

    def sharding(self, entry: ArrayEntry) -> Mapping[str, Any] | None:
        """Returns where an array was when it was saved, as JSON, or None if that is not recorded."""
        if self._places is not None:
            return self._places[entry.path]
        where = self._target(entry).where  # an earlier release recorded the shardings of arrays in pieces alone
        return self._manifest.layouts[where[0]].sharding if isinstance(where, tuple) else None

    @functools.cached_property
    def _places(self) -> Mapping[str, Mapping[str, Any] | None] | None:
        placement = self._manifest.placement
        return None if placement is None else dict(zip(self.entries, placement.by_leaf(), strict=True))

    @property
    def static(self) -> Mapping[str, Mapping[str, Any]]:
        """The static values of containers that are not part of the tree, by path and name."""
        return self._manifest.static

    def origin(self, path: str) -> str:
        """Returns the path of the first leaf that was the same array object as a leaf."""
        where = getattr(self.entries[path], "where", None)
        return where if isinstance(where, str) else path

    def can_mmap(self, requested: bool | None) -> bool:
        """Whether arrays come as views of the mapped files, which take no memory."""
        if self._store.object_bytes is not None:
            return False  # and no object is asked for that alone
        known = next((n for n, file in enumerate(self._manifest.files) if not file.requires), None)
        return known is None or self._file(known).can_mmap(requested)  # all lie in one directory

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        """The boxes of the arrays, in memory that is the caller's to change.

        `mmap=None` adopts the mapped file where that is safe, True always, False never. With `verify` every
        block that holds a wanted byte is checked before anything is returned; raises `CorruptError`.
        """
        read = self._read_files if self._store.object_bytes is None else self._read_objects
        if self._stored:
            wanted = [(self._stored.get(entry.path, entry), box) for entry, box in wanted]
        arrays, memory = read(wanted, verify, mmap)
        if "bool" in {entry.dtype for entry, _ in wanted}:
            arrays = [
                as_bools(array) if entry.dtype == "bool" else array
                for array, (entry, _) in zip(arrays, wanted, strict=True)
            ]
        held = sum(one.nbytes for one in memory.values())
        if held and sum([array.nbytes for array in arrays]) * 2 < held:
            return [array.copy() for array in arrays]  # or a small leaf would keep the blocks around it
        # Leaves that were one array when they were saved come back as several that share no memory.
        owners: dict[str, str] = {}
        for n, (entry, _) in enumerate(wanted if len(wanted) > 1 and self.expands else ()):
            if owners.setdefault(self._resolve(entry).path, entry.path) != entry.path:
                arrays[n] = arrays[n].copy()
        return arrays

    def pieces(self, entry: ArrayEntry, box: Box) -> list[tuple[int, Box]]:
        """See `treering._core.source.pieces`."""
        return [(number, piece) for number, piece, _ in self._pieces(self._resolve(entry), box)]

    def _read_files(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], verify: bool, mmap: bool | None
    ) -> tuple[list[np.ndarray], dict[int, Memory]]:
        """The boxes of the arrays, and the memory that they may be parts of, by file."""
        leaves, others = WholeLeaves.among(wanted)
        for number, own in leaves.items():
            own.find(self._file(number).header, functools.partial(self._begin, number))
        rest = [wanted[n] for n in others]
        parts = [self._parts(entry, box, mmap) for entry, box in rest]
        ranges = ranges_of(itertools.chain.from_iterable(parts))
        for number, own in leaves.items():
            ranges.setdefault(number, []).extend(own.ranges())
        memory = {number: self._file(number).memory(merge(own), verify, mmap) for number, own in ranges.items()}
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

    def _read_objects(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], verify: bool, mmap: bool | None
    ) -> tuple[list[np.ndarray], dict[int, Memory]]:
        """The same of a bucket, where each object is opened, read and checked by itself, several at a time.

        Those that are read for the most part come with all their bytes when they are opened. What lies in several is
        put together as they come, or as much memory as it takes would be needed once more.
        """
        inside: dict[int, list[tuple[int, ArrayRow, Box, Box, str]]] = {}
        nbytes: dict[int, int] = {}
        own: dict[int, np.ndarray] = {}  # what lies in several
        for n, (entry, box) in enumerate(wanted):
            row = self._resolve(entry)
            pieces = list(self._pieces(row, box))
            if len(pieces) > 1 and len({number for number, _, _ in pieces}) > 1:
                own[n] = adoptable(box_shape(box), dtypes.to_numpy(row.dtype))
            for number, piece, key in pieces:
                inner = piece if piece == box else intersect(piece, box)
                size = dtypes.itemsize(row.dtype) * math.prod(box_shape(inner)) if inner else 0
                nbytes[number] = nbytes.get(number, 0) + size
                inside.setdefault(number, []).append((n, row, box, piece, key))
        memory: dict[int, Memory] = {}

        def read(number: int) -> None:
            size = self._manifest.files[number].size
            expected = size if nbytes[number] * 2 > size else 0
            # No other read knows a file that is opened here before all is taken that came with opening it: it would
            # take that for its own, which may lie in an array that is about to be returned.
            file = self._files.get(number) or self._open(number, expected, self._all_of(number, inside[number], own))
            ranges: list[tuple[int, int]] = []
            copies: list[tuple[np.ndarray, Part]] = []
            for n, row, box, piece, key in inside[number]:
                if piece == box:  # without parts, for there may be thousands
                    begin, end = self._tensor(file, key, row.dtype, box_shape(piece))
                    ranges += [(begin, end)] if begin < end else []
                    continue
                for part in self._parts_in(file, number, row, box, piece, key, mmap):
                    ranges += part.ranges or [(part.begin, part.end)]
                    copies += [(own[n], part)] if n in own else []
            if ranges:
                found = file.memory(merge(ranges), verify, mmap)
                for array, part in copies:
                    there, came = array[part.at], found.view(part, array.dtype)
                    if there.ctypes.data != came.ctypes.data:  # or they came right there
                        there[...] = came
                if not all(n in own for n, *_ in inside[number]):
                    memory[number] = found
            self._files.setdefault(number, file)

        in_parallel(list(inside), read, _OBJECTS)
        rest = [one for n, one in enumerate(wanted) if n not in own]
        others = iter(assemble(rest, [self._parts(entry, box, mmap) for entry, box in rest], memory))
        return [own[n] if n in own else next(others) for n in range(len(wanted))], memory

    def problems(self, share: Share = WHOLE) -> Iterator[Problem]:
        """Reads every byte, or a share, and yields all damage.

        Raises at the end: `UnsupportedError` for later files, `PermissionError` for those that may not be read.
        """
        unread: set[int] = set()
        refused: list[UnsupportedError | PermissionError] = []
        begin, end = share.of(sum(listed.size - listed.header for listed in self._manifest.files))
        for number, listed in enumerate(self._manifest.files):
            size = listed.size - listed.header
            first, last = (-(-max(edge, 0) // BLOCK) * BLOCK for edge in (begin, end))  # a block is where it begins
            begin, end = begin - size, end - size
            try:
                file = self._file(number)
                file.header.tensors  # noqa: B018 (all are checked)
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
            if isinstance(row, ArrayRow) and not unread.intersection(self._files_of(row)):
                try:
                    self._parts(row, whole(row.shape), None)
                    self._check_states(row.path, share)
                except UnsupportedError as error:
                    refused.append(error)
        if refused:
            raise refused[0]

    def _check_states(self, path: str, share: Share) -> None:
        """Reads the states at a path, if there are any, one by one. Raises `UnsupportedError` for what is no state."""
        entry = self.entries[path]
        if isinstance(entry, StatesEntry) and share.number == 1:
            with contextlib.suppress(CorruptError):  # of a block that is told already
                for process in range(len(entry.value)):
                    entry.state(process)

    def _parts(self, entry: ArrayEntry, box: Box, mmap: bool | None) -> list[Part]:
        """The parts of a box, each in one run of `ArrayFile.memory`.

        Raises `UnsupportedError` when header and manifest disagree about them, for both are as they were written.
        """
        row = self._resolve(entry)
        if isinstance(row.where, int) and box == whole(row.shape):  # by far the most frequent case
            begin, end = self._tensor(self._file(row.where), piece_key(row.path, None), row.dtype, row.shape)
            return [Part(row.where, begin, end, row.shape)] if begin < end else []
        parts: list[Part] = []
        for number, piece, key in self._pieces(row, box):
            parts += self._parts_in(self._file(number), number, row, box, piece, key, mmap)
        return joined(parts, box_shape(box))

    def _parts_in(
        self, file: ArrayFile, number: int, row: ArrayRow, box: Box, piece: Box, key: str, mmap: bool | None
    ) -> list[Part]:
        """The parts of a box in one piece, which lies in the file of a number under a key."""
        begin, _ = self._tensor(file, key, row.dtype, box_shape(piece))
        inner = intersect(piece, box)
        if inner is None:
            return []
        apart = not file.can_mmap(mmap)  # a mapped file holds the rows as one array with strides
        return parts_of(number, begin, piece, inner, box, dtypes.itemsize(row.dtype), apart=apart)

    def _begin(self, number: int, row: ArrayRow) -> int:
        """Where an array that is whole in a file begins in its buffer. Raises as `_tensor` does."""
        return self._tensor(self._file(number), piece_key(row.path, None), row.dtype, row.shape)[0]

    def _tensor(self, file: ArrayFile, key: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Where a piece's tensor is in the buffer of a file. Raises `UnsupportedError` if it is another tensor."""
        tensor = file.header.tensor(key)
        begin, end = tensor.data_offsets if tensor else (0, 0)
        found = tensor and (tensor.dtype, tensor.shape, end - begin, file.header.dtypes.get(key))
        if found != stored_as(dtype, shape):
            about = file.header.dtypes.get(key) or "no other dtype"
            found = tensor and f"{tensor.dtype} {list(tensor.shape)} in {end - begin} bytes, of {about}"
            code, stored, *_ = stored_as(dtype, shape)
            expected = f"expected a tensor {key!r:.100} of {code} {list(stored)} for {dtype}"
            raise manifest.invalid(f"{file.path}: {expected}, found {found}", self._manifest.software)
        return begin, end

    def _pieces(self, row: ArrayRow, box: Box) -> Iterable[tuple[int, Box, str]]:
        """The pieces that have a part of a box, or all of an array without elements: file, box, name in the file."""
        if isinstance(row.where, int):
            yield row.where, whole(row.shape), piece_key(row.path, None)
        elif isinstance(row.where, tuple):
            number, turn = row.where
            cells = self._cells[number]
            holders = self._manifest.holders[self._manifest.layouts[number].holders]
            for n in cells.overlapping(box) if math.prod(row.shape) else range(len(cells)):
                files = holders[n]
                yield files[turn % len(files)], cells[n], piece_key(row.path, None if len(cells) == 1 else cells[n])

    def _target(self, row: ArrayEntry) -> ArrayRow:
        """The row that says where the bytes are."""
        row = self._stored.get(row.path, row)
        assert isinstance(row, ArrayRow)
        found = self.entries[row.where] if isinstance(row.where, str) else row
        found = self._stored.get(found.path, found)
        assert isinstance(found, ArrayRow)
        return found

    def _resolve(self, row: ArrayEntry) -> ArrayRow:
        """The row that says where the bytes are. Raises `UnsupportedError` when only a later release can read them."""
        found = self._target(row)
        if not isinstance(found.where, int | tuple | str):
            raise manifest.requiring(f"{self.path}: {found.path}", found.where.requires)
        return found

    def _all_of(
        self, number: int, inside: Sequence[tuple[int, ArrayRow, Box, Box, str]], own: Mapping[int, np.ndarray]
    ) -> memoryview | None:
        """The memory for all that an array file holds, if that is one piece which is one run of bytes of an array."""
        n, _, box, piece, _ = inside[0]
        if len(inside) > 1 or n not in own or intersect(piece, box) != piece:
            return None
        there = own[n][slices(piece, box)]
        listed = self._manifest.files[number]
        if not there.flags.c_contiguous or there.nbytes != listed.size - listed.header:
            return None
        return there.reshape(-1).view(np.uint8).data

    def _file(self, number: int) -> ArrayFile:
        """An array file, opened when it is asked for first."""
        if found := self._files.get(number):
            return found
        if self._store.object_bytes is not None:
            return self._files.setdefault(number, self._open(number))
        with self._opening:
            if number not in self._files:
                self._files[number] = self._open(number)
            return self._files[number]

    def _open(self, number: int, expected: int = 0, into: memoryview | None = None) -> ArrayFile:
        """Opens an array file; for `expected` and `into` see `Store.open`."""
        listed = self._manifest.files[number]
        if listed.requires:
            raise manifest.requiring(posixpath.join(self.path, listed.name), listed.requires)
        try:
            return ArrayFile(self._store, self.path, listed, expected, into)
        except ReplacedError:
            raise
        except FileNotFoundError:
            self._raise_missing(listed.name)

    def _raise_missing(self, name: str) -> NoReturn:
        try:
            path, expected = posixpath.join(self.path, MANIFEST), len(self._manifest_bytes)
            now = manifest.xxh3(read_file(self._store, path, expected=expected))
        except (FileNotFoundError, NotADirectoryError):
            raise ReplacedError(f"{self.path}: the checkpoint was deleted while it was open") from None
        if now != self.identity:
            raise ReplacedError(f"{self.path}: the checkpoint was replaced while it was open; open it again") from None
        raise CorruptError(f"{posixpath.join(self.path, name)}: expected an array file, found nothing") from None

    def _leaves_in(self, number: int) -> tuple[str, ...]:
        rows = (row for row in self._manifest.leaves if isinstance(row, ArrayRow))
        return tuple(row.path for row in rows if number in self._files_of(row))

    def _files_of(self, row: ArrayRow) -> set[int]:
        """The files that a leaf lies in."""
        row = self._target(row)
        return {number for number, _, _ in self._pieces(row, whole(row.shape))}


def _read_state(reader: "weakref.ref[Reader]", path: str, process: int) -> Any:
    found = reader()
    assert found is not None
    return found._state(path, process)
