"""Finds the bytes of an array: its pieces, and the parts of a wanted box that they hold."""

import math
from collections.abc import Iterable, Mapping

from ..._core import dtypes
from ..._core.boxes import Box, Cells, box_shape, full_box, intersect
from ..._core.entries import ArrayEntry, Entry
from . import manifest
from .array_file import ArrayFile
from .contiguous_leaves import stored_as
from .manifest import Manifest, piece_key
from .manifest_fields import ArrayRow
from .open_files import OpenFiles
from .piece_reads import PieceRead, join_contiguous, split_piece


class PieceLocations:
    """The locations of the pieces of a checkpoint's arrays.

    stored: by path, the bytes of iterators' states and of deltas, as arrays.
    """

    def __init__(
        self,
        path: str,
        read: Manifest,
        entries: Mapping[str, Entry],
        stored: Mapping[str, ArrayRow],
        files: OpenFiles,
    ):
        self._path, self._manifest, self._entries, self._stored_rows, self._files = path, read, entries, stored, files
        self._cells = [Cells(layout.cuts) for layout in read.layouts]

    def target(self, row: ArrayEntry) -> ArrayRow:
        """Returns the row that says where the bytes of an array are. A tied leaf names the row of another leaf."""
        row = self._stored_rows.get(row.path, row)
        assert isinstance(row, ArrayRow)
        found = self._entries[row.where] if isinstance(row.where, str) else row
        found = self._stored_rows.get(found.path, found)
        assert isinstance(found, ArrayRow)
        return found

    def resolve(self, row: ArrayEntry) -> ArrayRow:
        """Returns the same row as `target`. Raises `UnsupportedError` if only a later release can read the bytes."""
        found = self.target(row)
        if not isinstance(found.where, int | tuple | str):
            raise manifest.requiring(f"{self._path}: {found.path}", found.where.requires)
        return found

    def overlapping(self, row: ArrayRow, box: Box) -> Iterable[tuple[int, Box, str]]:
        """Yields file number, box and name in the file of each piece with a part of a box.

        Yields all pieces of an array without elements, whose headers are checked too.
        """
        if isinstance(row.where, int):
            yield row.where, full_box(row.shape), piece_key(row.path, None)
        elif isinstance(row.where, tuple):
            number, turn = row.where
            cells = self._cells[number]
            holders = self._manifest.holders[self._manifest.layouts[number].holders]
            for n in cells.overlapping(box) if math.prod(row.shape) else range(len(cells)):
                files = holders[n]
                yield files[turn % len(files)], cells[n], piece_key(row.path, None if len(cells) == 1 else cells[n])

    def files_of(self, row: ArrayRow) -> set[int]:
        """Returns the numbers of the files that have bytes of a leaf."""
        row = self.target(row)
        return {number for number, _, _ in self.overlapping(row, full_box(row.shape))}

    def tensor(self, file: ArrayFile, key: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the begin and end, in bytes, of a piece's tensor in a file's buffer.

        Raises `UnsupportedError` if the file's header has a tensor of another dtype, shape or size there, or none.
        """
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

    def begin(self, number: int, row: ArrayRow) -> int:
        """Returns the begin, in bytes, of an array that is one piece in a file. Raises the errors of `tensor`."""
        return self.tensor(self._files.get(number), piece_key(row.path, None), row.dtype, row.shape)[0]

    def parts(self, entry: ArrayEntry, box: Box, mmap: bool | None) -> list[PieceRead]:
        """Returns the parts of a box, each in one run of `ArrayFile.memory`.

        Raises `UnsupportedError` if header and manifest disagree. Both have the right checksum, so neither is damaged.
        """
        row = entry if isinstance(entry, ArrayRow) and isinstance(entry.where, int) else self.resolve(entry)
        if isinstance(row.where, int) and box == full_box(row.shape):  # Almost all reads take this branch.
            begin, end = self.tensor(self._files.get(row.where), piece_key(row.path, None), row.dtype, row.shape)
            return [PieceRead(row.where, begin, end, row.shape)] if begin < end else []
        parts: list[PieceRead] = []
        for number, piece, key in self.overlapping(row, box):
            parts += self.parts_in(self._files.get(number), number, row, box, piece, key, mmap)
        return join_contiguous(parts, box_shape(box))

    def parts_in(
        self, file: ArrayFile, number: int, row: ArrayRow, box: Box, piece: Box, key: str, mmap: bool | None
    ) -> list[PieceRead]:
        """Returns the parts of a box in one piece, which `file` (number `number`) stores under `key`."""
        begin, _ = self.tensor(file, key, row.dtype, box_shape(piece))
        inner = intersect(piece, box)
        if inner is None:
            return []
        # A view of a mapped file can have strides. Other reads get each row alone.
        single_rows = not file.can_mmap(mmap)
        return split_piece(number, begin, piece, inner, box, dtypes.itemsize(row.dtype), separate_rows=single_rows)
