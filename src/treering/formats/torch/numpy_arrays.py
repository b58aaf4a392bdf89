"""Finds the arrays and scalars of NumPy in what a pickle describes, without the calls that would make them."""

import math
from typing import Any, Literal

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box
from ...errors import CorruptError, UnsupportedError
from .._shared.extents import check_shape
from .._shared.npy import DTYPE
from .._shared.pickles import Global, Made
from .archive import Placed, sizes


def array_of(made: Made) -> Placed | None:
    """Returns the array or the scalar that an object stands for.

    Returns None for any other object, and for arrays of other dtypes than those of numbers, dates and text. Raises
    `CorruptError` if the bytes do not have the size of the array.
    """
    what = made.what.module.replace("numpy.core.", "numpy._core."), made.what.name  # NumPy 2 has moved them.
    given, state = made.arguments, made.state
    if what == ("numpy._core.multiarray", "scalar") and len(given) == 2:
        return _placed("numpy-scalar", given[0], given[1], ())
    if what == ("numpy._core.multiarray", "_reconstruct") and given and type(state) is tuple and len(state) == 5:
        _, shape, dtype, columns, data = state
        is_plain = type(given[0]) is Global and given[0] == ("numpy", "ndarray")  # and no subclass
        return _placed("numpy", dtype, data, shape, columns=bool(columns)) if is_plain else None
    if what == ("numpy._core.numeric", "_frombuffer") and len(given) == 4:  # of protocol 5
        data = given[0]
        data = data.arguments[0] if type(data) is Made and data.what == ("builtins", "bytearray") else data
        return _placed("numpy", given[1], data, given[2], columns=given[3] == "F")
    return None


class _InMemory:
    """An array whose bytes are those of the pickle; see `Stored`."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        part = self._array[(*(slice(*bounds) for bounds in box), ...)]
        return part.astype(part.dtype.newbyteorder("="), order="C")


def _placed(
    kind: Literal["numpy", "numpy-scalar"], dtype: Any, data: Any, shape: Any, *, columns: bool = False
) -> Placed | None:
    stored = _dtype(dtype)
    if stored is None or type(data) is not bytes:
        return None
    shape = sizes(shape)
    check_shape(shape, "an array of NumPy")
    nbytes = math.prod(shape) * stored.itemsize
    if nbytes != len(data):
        raise CorruptError(f"expected {nbytes} bytes of an array of NumPy, found {len(data)}")
    array = np.ndarray(shape, stored, data, order="F" if columns else "C")
    return Placed(dtypes.to_text(stored), shape, _InMemory(array), lambda box: None, kind)


def _dtype(made: Any) -> np.dtype | None:
    """Returns the dtype that an object stands for; None for one that has objects or fields, or is no dtype."""
    if type(made) is not Made or made.what != ("numpy", "dtype") or not made.arguments:
        return None
    kind, state = made.arguments[0], made.state
    if type(state) is not tuple or len(state) < 8 or state[2:5] != (None, None, None):
        return None
    try:
        if type(kind) is Global and kind.module == "ml_dtypes":
            return dtypes.to_numpy(kind.name)
        if type(kind) is not str or type(state[1]) is not str:
            return None
        text = state[1] + kind + (_unit(state[8]) if kind in ("M8", "m8") and len(state) > 8 else "")
        found = np.dtype(text) if DTYPE.fullmatch(text) else None
        return found if found and dtypes.to_text(found) else None
    except (UnsupportedError, TypeError, ValueError):
        return None


def _unit(metadata: Any) -> str:
    """Returns the unit of dates, such as ``[ns]``; "" if there is none, and "?" for what NumPy does not write."""
    unit = metadata[1] if type(metadata) is tuple and len(metadata) == 2 else None
    if type(unit) is not tuple or len(unit) != 4 or type(unit[0]) is not bytes or type(unit[1]) is not int:
        return "?"
    return "" if unit[0] == b"generic" else f"[{unit[1]}{unit[0].decode('latin1')}]"
