"""Sample leaves for the tests of formats, and the comparison of two leaves."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from .._core import dtypes
from .._core.entries import ArrayEntry
from .._core.lazy import LazyArray
from .._core.values import encode
from .._pytree.leaves import is_function

DTYPES: tuple[str, ...] = (
    *dtypes.SAFETENSORS,
    *("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
    *("int1", "uint1", "int2", "uint2", "int4", "uint4"),
    *("complex32", "bcomplex32", "complex128"),
    *("datetime64[ns]", "timedelta64[s]", "<U3", "|S5"),
)
"""The text of every dtype that Treering knows. Of dtypes with a unit or a length, it has one example each."""

VALUES: dict[str, Any] = {
    "bool": True,
    "int": -7,
    "int64": 2**63 - 1,
    "uint64": 2**64 - 1,
    "bigint": -(2**80),
    "float": 0.1,
    "-0.0": -0.0,
    "inf": -math.inf,
    "nan": math.nan,
    "complex": complex(-0.0, 2.5),
    "str": "tëxt\n\0",
    "empty str": "",
    "bytes": b"\0\xff",
    "none": None,
    "function": max,
}
"""Leaves that are not arrays, by name. A format declares by these names which of them it can store."""

NAMES: tuple[str, ...] = (
    *("", " ", ".", "..", "a.b", "a/b", "/", "~", "~1", "a\\b", "a\nb", "ü", "😀", "{}", '"', "%2e", "\0"),
    *("0", "-1", "None", "x" * 300, "__metadata__", "treering.json", "~@0,2", "c", "zarr.json"),
)
"""Keys of dicts that some formats store wrongly."""

_SPECIAL = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0 << 48}  # infinities
_PARTS = {"complex64": "float32", "complex128": "float64"}
_WIDTH = {"1": 1, "2": 2, "4": 4}


def sample(dtype: str, shape: tuple[int, ...] = (3, 5), seed: int = 0) -> np.ndarray:
    """Returns an array of random bits, which includes NaNs with payloads, signaling NaNs and negative zeros."""
    kind = dtypes.to_numpy(dtype)
    count = math.prod(shape)
    rng = np.random.default_rng(seed)
    if dtype[:2] == "<U":
        return np.array([("aé", "", "😀x", "abc")[n % 4] for n in range(count)], kind).reshape(shape)
    if dtype in _PARTS:
        return sample(_PARTS[dtype], (count, 2), seed).view(kind).reshape(shape)
    raw = rng.integers(0, 256, (count, kind.itemsize), np.uint8)
    if dtype == "bool":
        raw %= 2
    elif dtype.startswith("float6") or dtype.startswith("float4"):
        raw %= 1 << int(dtype[5])
    elif kind.itemsize == 1 and dtype.strip("uint") in _WIDTH:
        limits = ml_dtypes.iinfo(kind)
        return rng.integers(int(limits.min), int(limits.max) + 1, shape).astype(np.int8).astype(kind)
    flat = np.ascontiguousarray(raw).view(kind).reshape(-1)
    if dtype in _SPECIAL:
        sign, infinity = 1 << (8 * kind.itemsize - 1), _SPECIAL[dtype]
        special = np.array([sign, sign | infinity | 5, infinity | 1, infinity, 1], f"u{kind.itemsize}").view(kind)
        flat[: len(special)] = np.roll(special, seed)[:count]
    return flat.reshape(shape)


def odd_layouts() -> dict[str, np.ndarray]:
    """Returns arrays whose layout in memory differs from the layout in files."""
    block = sample("float32", (6, 8))
    return {
        "transposed": block.T,
        "strided": block[::2, 1::3],
        "reversed": block[::-1, ::-1],
        "fortran": np.asfortranarray(sample("int16", (4, 3, 2))),
        "broadcast": np.broadcast_to(sample("float32", (3,)), (4, 3)),
        "big-endian floats": sample("float32", (7,)).astype(">f4"),
        "big-endian ints": sample("int64", (2, 3)).astype(">i8")[:, ::2],
        "big-endian halves": sample("float16", (7,)).byteswap().view(">f2"),
        "big-endian complex": sample("complex64", (4,)).byteswap().view(">c8"),
    }


def identity(leaf: Any, *, numbers_as_arrays: bool = False) -> tuple[Any, ...]:
    """Returns a value that is equal for two leaves with equal contents, bit for bit.

    JAX and NumPy arrays with the same contents have the same identity.
    """
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        return "key", str(jax.random.key_impl(leaf)), data.shape, data.tobytes()
    if isinstance(leaf, LazyArray):
        entry: ArrayEntry = leaf._entry
        array = np.asarray(leaf)
        assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype), f"{leaf}: {array.dtype}{array.shape} was read"
        return ("key", entry.impl, array.shape, array.tobytes()) if entry.type == "key" else identity(array)
    if numbers_as_arrays and type(leaf) in (bool, int, float, complex):
        leaf = np.array(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        array = np.asarray(leaf)
        native = array.dtype.newbyteorder("=")
        # Swapping bytes keeps every bit. A conversion of the dtype could change signaling NaNs.
        swapped = array.byteswap().view(native) if array.dtype != native else array
        if swapped.dtype.name.strip("uint") in _WIDTH:
            swapped = swapped.astype(np.int8)  # The upper bits of these dtypes are undefined.
        return "array", dtypes.to_text(native), array.shape, swapped.tobytes()
    return ("none", None) if is_function(leaf) else encode(leaf)


def same_kind(found: Any, template: Any) -> bool:
    """Returns True if a restored leaf is of the same kind as its template."""
    for kind in (jax.Array, np.ndarray, np.generic):
        if isinstance(template, kind) or (kind is jax.Array and isinstance(template, jax.ShapeDtypeStruct)):
            return isinstance(found, kind)
    return type(found) is type(template)


def spread(count: int, most: int) -> Iterator[int]:
    """Yields at most `most` of the numbers below `count`: the first, the last, and others at equal distances."""
    if count <= most:
        yield from range(count)
    else:
        yield from sorted({n * (count - 1) // (most - 1) for n in range(most)})
