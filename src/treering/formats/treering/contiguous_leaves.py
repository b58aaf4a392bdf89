"""Leaves that are contiguous in one file. They are handled together, because there may be a hundred thousand."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, full_box
from ..._core.entries import ArrayEntry
from .array_file import ArrayHeader
from .manifest_fields import ArrayRow
from .piece_reads import Memory

# Fewer arrays are as fast one by one. Then only the entries of these arrays are parsed from a large header.
_MIN_ARRAYS = 8

_NO_DTYPES: Mapping[str, str] = {}


class _LeafKind(NamedTuple):
    """The properties that arrays of one dtype and shape share.

    The header of a file has `code` and `stored` as the dtype and the shape of their tensors. It has `noted` as their
    dtype in its metadata, which is None if the dtype of the tensor is the dtype of the array.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    box: Box
    nbytes: int
    code: str
    stored: tuple[int, ...]
    noted: str | None


@functools.lru_cache(maxsize=1024)
def _leaf_kind(dtype: str, shape: tuple[int, ...]) -> _LeafKind:
    code, stored, nbytes, noted = stored_as(dtype, shape)
    return _LeafKind(dtypes.to_numpy(dtype), shape, full_box(shape), nbytes, code, stored, noted)


@functools.lru_cache(maxsize=1024)
def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int, str | None]:
    """Returns the dtype and shape of the tensor that holds an array, its bytes, and the dtype in the file's metadata.

    The last is None for a dtype that safetensors has.
    """
    code, itemsize, widened = dtypes.safetensors_layout(dtype)
    noted = dtype if code == "U8" and dtype != "uint8" else None
    return code, (*shape, itemsize) if widened else shape, itemsize * math.prod(shape), noted


class ContiguousLeaves:
    """The contiguous arrays of one file of which a reader wants every element.

    `numbers` are their positions in the list of all wanted boxes.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._rows: list[ArrayRow] = []
        self._kinds: list[_LeafKind] = []
        self._begins = self._ends = np.zeros(0, np.int64)  # byte offsets in the buffer of the file

    @staticmethod
    def group_by_file(wanted: Sequence[tuple[ArrayEntry, Box]]) -> "tuple[dict[int, ContiguousLeaves], Iterable[int]]":
        """Returns the contiguous leaves among the wanted boxes by their files, and the numbers of all other boxes."""
        if len(wanted) < _MIN_ARRAYS:
            return {}, range(len(wanted))
        found: dict[int, ContiguousLeaves] = {}
        rest: list[int] = []
        # The kind of the previous array. Comparing with it is faster than a look-up in the cache of `_leaf_kind`.
        dtype, shape = wanted[0][0].dtype, wanted[0][0].shape
        kind = _leaf_kind(dtype, shape)
        file, own = -1, ContiguousLeaves()
        for n, (row, box) in enumerate(wanted):
            where: Any = row.where  # type: ignore[attr-defined] (each is a row of the manifest)
            if row.shape != shape or row.dtype != dtype:
                dtype, shape = row.dtype, row.shape
                kind = _leaf_kind(dtype, shape)
            if type(where) is not int or box != kind.box or not kind.nbytes:
                rest.append(n)
                continue
            if where != file:
                file, own = where, found.setdefault(where, ContiguousLeaves())
            own.numbers.append(n)
            own._rows.append(row)  # type: ignore[arg-type]
            own._kinds.append(kind)
        return found, rest

    def locate(self, header: ArrayHeader, fallback: Callable[[ArrayRow], int]) -> None:
        """Looks up the offsets of the arrays in the file's buffer.

        fallback: returns the offset of an array whose tensor differs from the manifest. It knows the exceptions, and
            raises for the rest.
        """
        tensors, noted = header.tensors, header.dtypes or _NO_DTYPES
        begins: list[int] = []
        for row, kind in zip(self._rows, self._kinds, strict=True):
            tensor = tensors.get(row.path)
            if (
                tensor is None
                or tensor.dtype != kind.code
                or tensor.shape != kind.stored
                or tensor.data_offsets[1] - tensor.data_offsets[0] != kind.nbytes
                or noted.get(row.path) != kind.noted
            ):
                begins.append(fallback(row))
            else:
                begins.append(tensor.data_offsets[0])
        self._begins = np.array(begins, np.int64)
        self._ends = self._begins + np.array([kind.nbytes for kind in self._kinds], np.int64)

    def ranges(self) -> list[tuple[int, int]]:
        """Returns the byte ranges of the file's buffer that the arrays take. Adjacent ranges are merged."""
        order = np.argsort(self._begins, kind="stable")
        begins, ends = self._begins[order], np.maximum.accumulate(self._ends[order])
        edges = np.flatnonzero(begins[1:] > ends[:-1])  # the last array before each gap
        firsts, lasts = begins[[0, *(edges + 1).tolist()]], ends[[*edges.tolist(), -1]]
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    def arrays(self, memory: Memory) -> list[np.ndarray]:
        """Returns the arrays as views of memory that holds their ranges."""
        kinds = np.array([*map(id, self._kinds)])
        breaks = (kinds[1:] != kinds[:-1]) | (self._begins[1:] != self._ends[:-1])
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(self._kinds)]
        found: list[np.ndarray] = []
        for first, last in itertools.pairwise(edges):
            kind = self._kinds[first]
            found += memory.views(int(self._begins[first]), last - first, kind.shape, kind.dtype)
        return found
