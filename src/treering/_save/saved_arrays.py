"""The large arrays that a process has saved in a run, and the files that have them."""

import itertools
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from .._core.entries import Entry
from .._processes.assignment import Piece
from ..formats.treering.manifest import BLOCK
from ..formats.treering.shared_files import SavedFile, WrittenFile

MIN_BYTES = 1 << 20  # of an array; it takes 4 µs to look at one and to note it, 1 % of the time to write a megabyte


class LargeArray(NamedTuple):
    """An array of a save.

    tensor: its path, dtype and boxes. A file has its bytes only if all of these are the same.
    numbers: those of its pieces in this process.
    """

    leaf: int
    tensor: tuple[Any, ...]
    numbers: Sequence[int]


class SavedArray(NamedTuple):
    """An array as it was last saved.

    array: the object; None if it was no `jax.Array`.
    versions: of the files that certainly have it.
    times: the number of successive saves of this object.
    equal_times: the number of successive saves of a new object that probably had the values of the one before.
    checksums: those of the file of the last save, or of an earlier one with the same array.
    span: the first and the end of its bytes in the buffer of that file; None if they are not successive.
    """

    array: "weakref.ref[Any] | None"
    versions: frozenset[Hashable]
    times: int
    equal_times: int
    checksums: str
    span: tuple[int, int] | None

    def is_equal(self, checksums: str, span: tuple[int, int] | None) -> bool | None:
        """Returns True if another file, with these checksums, probably has the same values.

        Compares the blocks that have only bytes of this array. Without one, compares those that have bytes of others
        too. Returns None if the blocks of the two files have other parts of the array.
        """
        if self.span is None or span is None or (self.span[0] - span[0]) % BLOCK:
            return None
        first, end = -(-span[0] // BLOCK), span[1] // BLOCK
        if first >= end:
            first, end = span[0] // BLOCK, -(-span[1] // BLOCK)
        shift = (self.span[0] - span[0]) // BLOCK
        return self.checksums[16 * (first + shift) : 16 * (end + shift)] == checksums[16 * first : 16 * end]


class SavedArrays:
    """The arrays and files of the last saves.

    arrays: those of the last save, by their tensors.
    files: by their versions, and then by the paths of the steps that have them.
    """

    def __init__(self) -> None:
        self.arrays: Mapping[tuple[Any, ...], SavedArray] = {}
        self.files: dict[Hashable, dict[str, SavedFile]] = {}
        self._last_pieces: tuple[Any, Sequence[LargeArray]] = (None, ())

    def forget(self) -> None:
        """Forgets all arrays, so that the next save writes all."""
        self.arrays, self.files = {}, {}

    def forget_files(self, left: Collection[str | None]) -> None:
        """Forgets the files of all steps except those with the paths `left`."""
        files = {own: {path: file for path, file in of.items() if path in left} for own, of in self.files.items()}
        self.files = {own: of for own, of in files.items() if of}

    def large_arrays(self, entries: Sequence[Entry], pieces: Sequence[Piece]) -> Sequence[LargeArray]:
        """Returns the large arrays among the pieces of this process."""
        if self._last_pieces[0] is not pieces:
            self._last_pieces = pieces, _large_arrays(entries, pieces)
        return self._last_pieces[1]

    def note(
        self,
        path: str,
        files: Sequence[tuple[WrittenFile, Hashable]],
        large: Sequence[LargeArray],
        objects: Mapping[int, "weakref.ref[Any]"],
        unchanged: Collection[int],
    ) -> None:
        """Notes the files of a committed step, each with its version, and the arrays in them.

        objects: the `jax.Array` of each leaf that has one.
        unchanged: the leaves whose object is that of the last save.
        """
        for of in self.files.values():  # A step that was here before is replaced.
            of.pop(path, None)
        saved = [SavedFile(path, one.listed, own, len(one.numbers), one.checksums) for one, own in files]
        for file in saved:
            self.files.setdefault(file.version, {})[path] = file
        versions: dict[Any, set[Hashable]] = {}  # of the files with equal contents
        for own, of in self.files.items():
            for file in of.values():
                versions.setdefault(file.content, set()).add(own)
        by_file = [frozenset(versions.get(file.content, ())) for file in saved]
        reused = [one.is_reused for one, _ in files]
        places = _places([one for one, _ in files])
        arrays: dict[tuple[Any, ...], SavedArray] = {}
        for one in large:
            n = places[one.numbers[0]][0]
            if len(one.numbers) > 1 and any(places[number][0] != n for number in one.numbers):
                continue
            before, is_same, own_versions = self.arrays.get(one.tensor), one.leaf in unchanged, by_file[n]
            times = equal_times = 0
            if before and is_same:
                own_versions |= before.versions & self.files.keys()
                times = before.times
            if before and reused[n]:  # The file need not have the layout of the last one.
                checksums, span, equal = before.checksums, before.span, True
            else:
                checksums, span = saved[n].checksums, joined([places[number][1:] for number in one.numbers])
                equal = before and not is_same and before.is_equal(checksums, span)
            if before and not is_same and equal is not False:
                equal_times = before.equal_times + bool(equal)
            array = objects.get(one.leaf)
            arrays[one.tensor] = SavedArray(array, own_versions, times + 1, equal_times, checksums, span)
        self.arrays = arrays
        known = {own for one in arrays.values() for own in one.versions}
        self.files = {own: of for own, of in self.files.items() if of and own in known}


def _large_arrays(entries: Sequence[Entry], pieces: Sequence[Piece]) -> list[LargeArray]:
    by_leaf: dict[int, list[int]] = {}
    for n, piece in enumerate(pieces):
        by_leaf.setdefault(piece.leaf, []).append(n)
    found: list[LargeArray] = []
    for leaf, numbers in by_leaf.items():
        if sum(pieces[n].nbytes for n in numbers) >= MIN_BYTES:
            entry: Any = entries[leaf]
            tensor = entry.path, entry.dtype, *(pieces[n].box for n in numbers)
            found.append(LargeArray(leaf, tensor, numbers))
    return found


def _places(files: Sequence[WrittenFile]) -> dict[int, tuple[int, int, int]]:
    """Returns, for the number of each piece, the number of its file, and where it begins and ends in the buffer."""
    found: dict[int, tuple[int, int, int]] = {}
    for n, one in enumerate(files):
        begins = [0] * (len(one.numbers) + 1) if one.is_reused else one.begins
        found.update(zip(one.numbers, zip(itertools.repeat(n), begins, begins[1:]), strict=False))
    return found


def joined(places: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the first and the end of bytes at these places; None if the places are not successive."""
    if any(end != begin for (_, end), (begin, _) in itertools.pairwise(places)):
        return None
    return places[0][0], places[-1][1]
