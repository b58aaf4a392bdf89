"""Reading the native format: which bytes a box needs, checked, and as an array."""

import datetime
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from ... import _dtypes
from ..._catalogue import ArrayEntry, Entry, decode
from ..._collector import paused
from ..._crew import in_parallel
from ..._sharding import Box, Grid, extent, intersect, whole
from ..._tree import LEAF, Node, Skeleton
from ...errors import CorruptError, NotFoundError, UnsupportedError
from ...stores import lfs
from ...stores.buffers import adoptable
from ...stores.disk import Disk, read_file
from ...stores.local import MANIFEST
from .. import Problem, safetensors
from . import manifest, metrics
from .files import ArrayFile, Memory, Part, merge, parts_of
from .manifest import ArrayRow, piece_key

_log = logging.getLogger("treering")
_ALONE = 16 << 20  # bytes that are not worth more threads than one
_MOST = 1 << 58  # elements of an array; NumPy counts bytes in 63 bits


class ReplacedError(NotFoundError):
    """The checkpoint was overwritten or deleted since it was opened."""


class Reader:
    """An open checkpoint. Array files are opened when they are first needed, and from then on outlive a delete."""

    format = "treering"
    positional = False
    numbers_are_arrays = False
    untold: frozenset[str] = frozenset()

    def __init__(self, disk: Disk, path: str):
        self.path = path
        self._disk = disk
        name = os.path.join(path, MANIFEST)
        try:
            self._manifest_bytes = read_file(disk, name)
        except (FileNotFoundError, NotADirectoryError):
            raise ReplacedError(
                f"{path}: expected a checkpoint, found no {MANIFEST}; was it deleted meanwhile?"
            ) from None
        with paused():
            self._manifest = manifest.decode(self._manifest_bytes, name)
        self.identity = manifest.xxh3(self._manifest_bytes)
        self.entries: dict[str, Entry] = {row.path: row for row in self._manifest.leaves}
        if len(self.entries) != len(self._manifest.leaves):
            raise CorruptError(f"{name}: two leaves have one path")
        for row in self._manifest.leaves:
            if isinstance(row, ArrayRow):
                _check_row(row, name)
            else:
                row.decode()
        _check_tree(self._manifest.tree, len(self._manifest.leaves), name)
        self.skeleton: Skeleton = self._manifest.tree
        self.step = self._manifest.step
        self.metrics = {n: decode("float", v) for n, v in self._manifest.metrics.items()}
        for _, found in metrics.read(disk, path, self.identity):
            if isinstance(found, dict):  # damaged ones are told by `problems`
                self.metrics.update(found)
            elif isinstance(found, UnsupportedError):
                _log.warning("metrics that were recorded are left out: %s", found)
        self.metadata = self._manifest.metadata
        self.nbytes = len(self._manifest_bytes) + sum(file.size for file in self._manifest.files)
        self._files: dict[int, ArrayFile] = {}
        self._grids: dict[int, Grid] = {}  # by layout
        self._opening = threading.Lock()

    @property
    def created(self) -> datetime.datetime:
        """When it was committed, in UTC. Raises `CorruptError`."""
        return manifest.as_utc(self._manifest.created)

    def check_present(self) -> None:
        """Raises `CorruptError` unless every array file is there in its full size."""
        for file in self._manifest.files:
            path = os.path.join(self.path, file.name)
            found = self._disk.stat(path)
            if found is None:
                self._raise_missing(file.name)
            if found.st_size != file.size:
                lfs.check_all(self._disk, path)
                raise CorruptError(f"{path}: expected {file.size} bytes, found {found.st_size}; it is cut short")

    def hold(self) -> None:
        """Opens all array files, so that they can be read when the checkpoint has been deleted."""
        for number in range(len(self._manifest.files)):
            self._file(number)

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        """How an array was spread when it was saved: `{"mesh": {axis: size}, "spec": [...]}`, if it was."""
        row = self._resolve(entry)
        return self._layout(row)[0].sharding if isinstance(row.where, tuple) else None

    def maps(self, wish: bool | None) -> bool:
        """Whether arrays come as views of the mapped files, which take no memory."""
        return not self._manifest.files or self._file(0).maps(wish)  # all lie in one directory

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, map: bool | None = None
    ) -> list[np.ndarray]:
        """The boxes of the arrays, in memory that is the caller's to change.

        `map=None` adopts the mapped file where that is safe, True always, False never. With `verify` every
        block that holds a wanted byte is checked before anything is returned; raises `CorruptError`.
        """
        parts = [self._parts(entry, box, map) for entry, box in wanted]
        ranges: dict[int, list[tuple[int, int]]] = {}
        for found in parts:
            for part in found:
                ranges.setdefault(part.file, []).extend(part.ranges or [(part.begin, part.end)])
        memory = {number: self._file(number).memory(merge(found), verify, map) for number, found in ranges.items()}
        arrays = _assemble(wanted, parts, memory)
        held = sum(one.nbytes for one in memory.values())
        if sum(array.nbytes for array in arrays) * 2 < held:
            return [array.copy() for array in arrays]  # or a small leaf would keep the blocks around it
        # What was one array when it was saved comes back as several that share nothing.
        owners: dict[str, str] = {}
        for n, (entry, _) in enumerate(wanted):
            if owners.setdefault(self._resolve(entry).path, entry.path) != entry.path:
                arrays[n] = arrays[n].copy()
        return arrays

    def problems(self) -> Iterator[Problem]:
        """Reads every byte and yields all damage. Raises `UnsupportedError` at the end for files of a later release."""
        unread: set[int] = set()
        unsupported: list[UnsupportedError] = []
        for number, listed in enumerate(self._manifest.files):
            try:
                file = self._file(number)
                sizes = [_item_size(file.header, key) for key in file.header.tensors]
                safetensors.check(file.header, sizes, listed.size, file.path)
                bad = file.bad_blocks([(0, listed.size - listed.header)])
            except (CorruptError, OSError) as error:
                yield Problem(listed.name, self._leaves_in(number), None, str(error))
                unread.add(number)
                continue
            except UnsupportedError as error:
                unsupported.append(error)
                unread.add(number)
                continue
            for block in bad:
                yield Problem(listed.name, file.leaves(block), block, "the bytes are not those that were saved")
        for name, found in metrics.read(self._disk, self.path, self.identity):
            if isinstance(found, CorruptError):
                yield Problem(name, (), None, str(found))
        for row in self._manifest.leaves:
            if isinstance(row, ArrayRow) and not unread.intersection(self._files_of(row)):
                try:
                    self._parts(row, whole(row.shape), None)
                except CorruptError as error:
                    yield Problem(MANIFEST, (row.path,), None, str(error))
        if unsupported:
            raise unsupported[0]

    def _parts(self, entry: ArrayEntry, box: Box, map: bool | None) -> list[Part]:
        """Where the bytes of a box are, each part in one run of memory as `map` has it.

        Raises `CorruptError` when header and manifest disagree about that.
        """
        row = self._resolve(entry)
        size = _dtypes.itemsize(row.dtype)
        if isinstance(row.where, int) and box == whole(row.shape):  # by far the most frequent case
            nbytes = size * math.prod(row.shape)
            begin = self._tensor(row.where, piece_key(row.path, None), nbytes)
            return [Part(row.where, begin, begin + nbytes, row.shape)] if nbytes else []
        parts: list[Part] = []
        covered = 0
        for number, piece, key in self._pieces(row, box):
            inner = intersect(piece, box)
            if inner is not None:
                begin = self._tensor(number, key, size * math.prod(extent(piece)))
                covered += math.prod(extent(inner))
                apart = not self._file(number).maps(map)  # a mapped file holds the rows as one array with strides
                parts += parts_of(number, begin, piece, inner, box, size, apart=apart)
        if covered != math.prod(extent(box)):
            raise CorruptError(f"{self.path}: the pieces of {row.path!r} do not cover it; the manifest is wrong")
        return parts

    def _tensor(self, number: int, key: str, nbytes: int) -> int:
        """Where a tensor begins in the buffer of a file."""
        file = self._files.get(number) or self._file(number)
        tensor = file.header.tensors.get(key)
        begin, end = tensor.data_offsets if tensor else (0, -1)
        if end - begin != nbytes:
            raise CorruptError(f"{file.path}: expected a tensor {key!r} of {nbytes} bytes, found {tensor}")
        if begin < 0 or file.header.size + end > file.size:
            raise CorruptError(f"{file.path}: {key!r} lies outside of the file")
        return begin

    def _pieces(self, row: ArrayRow, box: Box) -> Iterable[tuple[int, Box, str]]:
        """The pieces that have a part of a box: file, box, and name in the file."""
        if isinstance(row.where, int):
            yield row.where, whole(row.shape), piece_key(row.path, None)
        elif isinstance(row.where, tuple):
            layout, grid = self._layout(row)
            for n in grid.overlapping(box) if grid.complete else range(len(layout.boxes)):
                piece, holders = layout.boxes[n], layout.files[n]
                full = piece == whole(row.shape)
                yield holders[row.where[1] % len(holders)], piece, piece_key(row.path, None if full else piece)

    def _resolve(self, row: ArrayEntry) -> ArrayRow:
        """The row that says where the bytes are."""
        assert isinstance(row, ArrayRow)
        if not isinstance(row.where, str):
            return row
        target = self.entries.get(row.where)
        if not isinstance(target, ArrayRow) or isinstance(target.where, str) or target.shape != row.shape:
            raise CorruptError(f"{self.path}: {row.path!r} is said to be the array {row.where!r}, which it cannot be")
        return target

    def _layout(self, row: ArrayRow) -> tuple[manifest.Layout, Grid]:
        """How an array is cut. Its cells are those of a grid, unless it has no elements."""
        assert isinstance(row.where, tuple)
        number = row.where[0]
        if not 0 <= number < len(self._manifest.layouts):
            raise CorruptError(f"{self.path}: the manifest has no layout {number}")
        layout = self._manifest.layouts[number]
        if number not in self._grids:
            if len(layout.boxes) != len(layout.files) or len({len(box) for box in layout.boxes}) != 1:
                raise CorruptError(f"{self.path}: layout {number} has not one list of files for each box")
            if not all(layout.files):
                raise CorruptError(f"{self.path}: layout {number} has a box without a file")
            grid = Grid(layout.boxes)
            if not grid.complete and all(start < stop for start, stop in layout.boxes[0]):
                raise CorruptError(f"{self.path}: the boxes of layout {number} are not the cells of a grid")
            self._grids[number] = grid
        if len(layout.boxes[0]) != len(row.shape):
            raise CorruptError(f"{self.path}: the layout of {row.path!r} does not fit its shape")
        return layout, self._grids[number]

    def _file(self, number: int) -> ArrayFile:
        if found := self._files.get(number):
            return found
        if not 0 <= number < len(self._manifest.files):
            raise CorruptError(f"{self.path}: the manifest has no file {number}")
        with self._opening:
            if number not in self._files:
                try:
                    self._files[number] = ArrayFile(self._disk, self.path, self._manifest.files[number])
                except FileNotFoundError:
                    self._raise_missing(self._manifest.files[number].name)
            return self._files[number]

    def _raise_missing(self, name: str) -> NoReturn:
        try:
            now = manifest.xxh3(read_file(self._disk, os.path.join(self.path, MANIFEST)))
        except (FileNotFoundError, NotADirectoryError):
            raise ReplacedError(f"{self.path}: the checkpoint was deleted while it was open") from None
        if now != self.identity:
            raise ReplacedError(f"{self.path}: the checkpoint was replaced while it was open; open it again") from None
        raise CorruptError(f"{os.path.join(self.path, name)}: expected an array file, found nothing") from None

    def _leaves_in(self, number: int) -> tuple[str, ...]:
        rows = (row for row in self._manifest.leaves if isinstance(row, ArrayRow))
        return tuple(row.path for row in rows if number in self._files_of(row))

    def _files_of(self, row: ArrayRow) -> set[int]:
        """The files that a leaf lies in; none when the manifest contradicts itself about that."""
        try:
            row = self._resolve(row)
            if isinstance(row.where, int):
                return {row.where}
            return {number for number, _, _ in self._pieces(row, whole(row.shape))}
        except CorruptError:
            return set()


def _assemble(
    wanted: Sequence[tuple[ArrayEntry, Box]], parts: list[list[Part]], memory: dict[int, Memory]
) -> list[np.ndarray]:
    """The arrays: views where one part is all of a box, else memory of their own, filled by several threads."""
    arrays: list[np.ndarray] = []
    copies: list[tuple[np.ndarray, Part]] = []
    for (entry, box), found in zip(wanted, parts, strict=True):
        dtype = _dtypes.to_numpy(entry.dtype)
        if len(found) == 1:
            arrays.append(memory[found[0].file].view(found[0], dtype))
            continue
        own = adoptable(extent(box), dtype)
        arrays.append(own)
        copies += [(own, part) for part in found]

    def copy(job: tuple[np.ndarray, Part]) -> None:
        own, part = job
        own[part.at] = memory[part.file].view(part, own.dtype)

    if sum(own[part.at].nbytes for own, part in copies) > _ALONE:
        in_parallel(copies, copy)
    else:
        for job in copies:
            copy(job)
    return arrays


def _check_row(row: ArrayRow, name: str) -> None:
    size = 1
    for length in row.shape:
        size *= length or 1
    if size >= _MOST or min(row.shape, default=0) < 0 or len(row.shape) > 64 or (row.impl and not row.shape):
        raise CorruptError(f"{name}: {row.path!r} cannot have the shape {list(row.shape)}")
    if isinstance(row.where, tuple) and min(row.where) < 0:
        raise CorruptError(f"{name}: {row.path!r} has no place {row.where}")


def _check_tree(tree: Skeleton, leaves: int, name: str) -> None:
    """Every place of the tree filled once, and as many leaves as are listed: before anything trusts a count."""
    places, left = 1, len(tree)
    for node in tree:
        left -= 1
        places -= 1
        if isinstance(node, Node):
            places += node.count()
            if node.names() and len(set(node.children())) != node.count():
                raise CorruptError(f"{name}: a container of the tree has one key twice")
        elif node == LEAF:
            leaves -= 1
        else:
            places = -1
        if not 0 <= places <= left or (places == 0) != (left == 0):
            raise CorruptError(f"{name}: the containers of the tree do not add up")
    if leaves or places:
        raise CorruptError(f"{name}: the tree has not the leaves that are listed")


def _item_size(header: safetensors.Header, key: str) -> int:
    sizes = dict(_dtypes.SAFETENSORS.values())
    code = header.tensors[key].dtype
    if code not in sizes:
        raise CorruptError(f"{key}: safetensors has no dtype {code}")
    return sizes[code]
