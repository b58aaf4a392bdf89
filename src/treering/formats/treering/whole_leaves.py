"""Arrays that lie whole in one file: found, laid out and made all at once, for there may be a hundred thousand."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, whole
from ..._core.entries import ArrayEntry
from .array_header import ArrayHeader
from .manifest_fields import ArrayRow
from .parts import Memory

_FEW = 8  # arrays; fewer are as quickly handled one by one, and of a large header only what is asked for is parsed

_NONE: Mapping[str, str] = {}


class _Kind(NamedTuple):
    """What arrays of one dtype and shape have in common; `code`, `stored`, `beside` are what a header says of them."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    box: Box
    nbytes: int
    code: str
    stored: tuple[int, ...]
    beside: str | None


@functools.lru_cache(maxsize=1024)
def _kind(dtype: str, shape: tuple[int, ...]) -> _Kind:
    code, stored, nbytes, beside = stored_as(dtype, shape)
    return _Kind(dtypes.to_numpy(dtype), shape, whole(shape), nbytes, code, stored, beside)


@functools.lru_cache(maxsize=1024)
def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int, str | None]:
    """The dtype and shape of the tensor that holds an array, its bytes, and the dtype that its file gives beside it."""
    code, itemsize, widened = dtypes.stored_as(dtype)
    beside = dtype if code == "U8" and dtype != "uint8" else None
    return code, (*shape, itemsize) if widened else shape, itemsize * math.prod(shape), beside


class WholeLeaves:
    """The arrays of one file that are wanted whole, with their `numbers` among all that is wanted."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._rows: list[ArrayRow] = []
        self._kinds: list[_Kind] = []
        self._begins = self._ends = np.zeros(0, np.int64)  # in the buffer of the file

    @staticmethod
    def among(wanted: Sequence[tuple[ArrayEntry, Box]]) -> "tuple[dict[int, WholeLeaves], Iterable[int]]":
        """Those among wanted boxes by their files, and the numbers of all others."""
        if len(wanted) < _FEW:
            return {}, range(len(wanted))
        found: dict[int, WholeLeaves] = {}
        rest: list[int] = []
        dtype, shape = wanted[0][0].dtype, wanted[0][0].shape  # the last, for asking a cache takes longer
        kind = _kind(dtype, shape)
        file, own = -1, WholeLeaves()
        for n, (row, box) in enumerate(wanted):
            where: Any = row.where  # type: ignore[attr-defined] (each is a row of the manifest)
            if row.shape != shape or row.dtype != dtype:
                dtype, shape = row.dtype, row.shape
                kind = _kind(dtype, shape)
            if type(where) is not int or box != kind.box or not kind.nbytes:
                rest.append(n)
                continue
            if where != file:
                file, own = where, found.setdefault(where, WholeLeaves())
            own.numbers.append(n)
            own._rows.append(row)  # type: ignore[arg-type]
            own._kinds.append(kind)
        return found, rest

    def find(self, header: ArrayHeader, otherwise: Callable[[ArrayRow], int]) -> None:
        """Looks up where they begin in the file's buffer.

        What a header does not have as the manifest has it goes to `otherwise`, which knows the exceptions.
        """
        tensors, beside = header.tensors, header.dtypes or _NONE
        begins: list[int] = []
        for row, kind in zip(self._rows, self._kinds, strict=True):
            tensor = tensors.get(row.path)
            if (
                tensor is None
                or tensor.dtype != kind.code
                or tensor.shape != kind.stored
                or tensor.data_offsets[1] - tensor.data_offsets[0] != kind.nbytes
                or beside.get(row.path) != kind.beside
            ):
                begins.append(otherwise(row))
            else:
                begins.append(tensor.data_offsets[0])
        self._begins = np.array(begins, np.int64)
        self._ends = self._begins + np.array([kind.nbytes for kind in self._kinds], np.int64)

    def ranges(self) -> list[tuple[int, int]]:
        """The bytes of the file's buffer that they take, in runs that do not touch."""
        order = np.argsort(self._begins, kind="stable")
        begins, ends = self._begins[order], np.maximum.accumulate(self._ends[order])
        edges = np.flatnonzero(begins[1:] > ends[:-1])  # the last before each gap
        firsts, lasts = begins[[0, *(edges + 1).tolist()]], ends[[*edges.tolist(), -1]]
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

    def arrays(self, memory: Memory) -> list[np.ndarray]:
        """The arrays, in memory that holds their ranges."""
        kinds = np.array([*map(id, self._kinds)])
        breaks = (kinds[1:] != kinds[:-1]) | (self._begins[1:] != self._ends[:-1])
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(self._kinds)]
        found: list[np.ndarray] = []
        for first, last in itertools.pairwise(edges):
            kind = self._kinds[first]
            found += memory.views(int(self._begins[first]), last - first, kind.shape, kind.dtype)
        return found
