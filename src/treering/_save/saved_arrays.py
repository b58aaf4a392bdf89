"""The large arrays that a process has saved in a run."""

import itertools
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from .._core.entries import Entry
from .._processes.assignment import Piece
from .._pytree.device_digests import Digest
from ..formats.treering.ledger import WrittenFile
from ..formats.treering.manifest import BLOCK

MIN_BYTES = 1 << 20  # of an array; it takes 4 µs to look at one and to note it, 1 % of the time to write a megabyte


class LargeArray(NamedTuple):
    """An array of a save.

    tensor: its path, dtype and boxes. A file has its bytes only if all of these are the same.
    numbers: those of its pieces in this process.
    """

    leaf: int
    tensor: tuple[Any, ...]
    numbers: Sequence[int]


class SavedPart(NamedTuple):
    """The part of an array that one file has.

    checksums: those of the file that has this part, of the last save or an earlier one with the same array.
    span: the first and the end of its bytes in the buffer of that file; None if they are not successive.
    """

    checksums: str
    span: tuple[int, int] | None

    def is_equal(self, other: "SavedPart", *, also_mixed: bool) -> bool | None:
        """Returns True if another part probably has the same values.

        Compares the blocks that have only bytes of this array; without one, if `also_mixed`, those that have bytes of
        others too. Returns None if there is nothing to compare, or if the blocks have other parts of the array.
        """
        if self.span is None or other.span is None:
            return None
        (begin, end), (other_begin, other_end) = self.span, other.span
        if end - begin != other_end - other_begin or (begin - other_begin) % BLOCK:
            return None
        first, last = -(-other_begin // BLOCK), other_end // BLOCK
        if first >= last:
            if not also_mixed:
                return None
            first, last = other_begin // BLOCK, -(-other_end // BLOCK)
        shift = (begin - other_begin) // BLOCK
        return self.checksums[16 * (first + shift) : 16 * (last + shift)] == other.checksums[16 * first : 16 * last]


class SavedArray(NamedTuple):
    """An array as it was last saved.

    array: the object; None if it was no `jax.Array`.
    versions: of the files that certainly have all of it.
    times: the number of successive saves of this object, or of new ones with the same digest.
    equal_times: the number of other successive saves of a new object that probably had the values of the one before.
    parts: in the order of its pieces. A bucket has large arrays in several files.
    digest: that of the parts that the process had on its devices, if it was made.
    """

    array: "weakref.ref[Any] | None"
    versions: frozenset[Hashable]
    times: int
    equal_times: int
    parts: Sequence[SavedPart]
    digest: Digest | None = None

    def is_equal(self, parts: Sequence[SavedPart]) -> bool | None:
        """Returns True if these parts probably have the same values; None if that is not known."""
        for also_mixed in (False, True):
            pairs = zip(self.parts, parts, strict=False)
            found = {one.is_equal(other, also_mixed=also_mixed) for one, other in pairs}
            if known := found - {None}:
                return all(known)
        return None


class SavedArrays:
    """The arrays of the last save, by their tensors."""

    def __init__(self) -> None:
        self.arrays: Mapping[tuple[Any, ...], SavedArray] = {}
        self._last_pieces: tuple[Any, Sequence[LargeArray]] = (None, ())

    def large_arrays(self, entries: Sequence[Entry], pieces: Sequence[Piece]) -> Sequence[LargeArray]:
        """Returns the large arrays among the pieces of this process."""
        if self._last_pieces[0] is not pieces:
            self._last_pieces = pieces, _large_arrays(entries, pieces)
        return self._last_pieces[1]

    def note(
        self,
        files: Sequence[WrittenFile],
        versions: Mapping[Any, set[Hashable]],
        large: Sequence[LargeArray],
        objects: Mapping[int, "weakref.ref[Any]"],
        digests: Mapping[int, Digest],
        unchanged: Collection[int],
    ) -> None:
        """Notes the arrays in the files of a committed step.

        versions: those of the known files, also of these, by their contents.
        objects: the `jax.Array` of each leaf that has one.
        digests: of the leaves that have one.
        unchanged: the leaves that have the same object or the same digest as in the last save.
        """
        known = frozenset[Hashable]().union(*versions.values())
        by_file = [frozenset(versions.get(file.listed.content, ())) for file in files]
        reused = [file.is_reused for file in files]
        places = _places(files)
        arrays: dict[tuple[Any, ...], SavedArray] = {}
        for one in large:
            own = [places[n] for n in one.numbers]
            n = own[0][0]
            before, is_same, array = self.arrays.get(one.tensor), one.leaf in unchanged, objects.get(one.leaf)
            own_versions: frozenset[Hashable] = frozenset()
            if own[-1][0] == n:  # A process has all pieces of an array in successive files.
                is_reused, own_versions = reused[n], by_file[n]
                parts: Sequence[SavedPart] = [_part(files[n], own)]
            else:
                in_files = [(n, list(some)) for n, some in itertools.groupby(own, lambda place: place[0])]
                is_reused = all(reused[n] for n, _ in in_files)
                parts = [_part(files[n], some) for n, some in in_files]
            times, equal_times, digest = 0, 0, digests.get(one.leaf)
            if before and is_same:
                digest = digest or before.digest
                own_versions |= before.versions & known
                times = before.times
            elif before:
                equal = True if is_reused else before.is_equal(parts)
                equal_times = 0 if equal is False else before.equal_times + bool(equal)
            if before and is_reused:  # A reused file may have another layout than the last one.
                parts = before.parts
            arrays[one.tensor] = SavedArray(array, own_versions, times + 1, equal_times, parts, digest)
        self.arrays = arrays


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


def _part(file: WrittenFile, places: Sequence[tuple[int, int, int]]) -> SavedPart:
    """Returns the part of an array that a file has at these places, see `_places`."""
    if file.is_reused or any(end != begin for (_, _, end), (_, begin, _) in itertools.pairwise(places)):
        return SavedPart(file.checksums, None)
    return SavedPart(file.checksums, (places[0][1], places[-1][2]))
