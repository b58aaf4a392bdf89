"""Random trees with every dtype, type of leaf and kind of container."""

import collections
import random
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SMALL_FLOATS = [
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn",
]  # fmt: skip
SMALL_INTEGERS = ["int1", "int2", "int4", "uint1", "uint2", "uint4"]
DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "complex32", "bcomplex32", "datetime64[25s]", "timedelta64[ns]", "<U3", "|S5",
    *SMALL_FLOATS, *SMALL_INTEGERS,
]  # fmt: skip
VALUES = [
    None, True, 0, -1, 2**53, 2**53 + 1, -(2**70), 1.0, -0.0, 1e300, float("nan"), float("-inf"), complex(1, -0.0), "",
    "text\n\0\U0001f600", b"", b"\x00\xff", b"abc", np.float32(1.5), np.int64(7),
]  # fmt: skip
# The bits that elements of less than a byte have, by the end of the dtype's name.
_BITS = {"1": 1, "2": 3, "4": 15, "4_e2m1fn": 15, "6_e2m3fn": 63, "6_e3m2fn": 63}
_Pair = collections.namedtuple("_Pair", "mu nu")


def dtype_of(name: str) -> np.dtype:
    """Returns the dtype of a name of the format page."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def random_array(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array with random bits, NaNs of all kinds included."""
    dtype = dtype_of(name)
    count = int(np.prod(shape, dtype=np.int64))
    if name == "<U3":
        return rng.choice(["", "a", "äöü", "\U0001f600", "x\0y"], shape).astype(name)
    raw = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    if name == "bool":
        raw &= 1
    raw &= np.uint8(_BITS.get(name.lstrip("uintfloa"), 255))
    array = raw.view(dtype).reshape(shape)
    return array if name not in SMALL_INTEGERS else array.astype(np.int8).astype(dtype)


class RandomTrees:
    """Makes random trees from one seed."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.arrays: list[Any] = []

    def tree(self, depth: int = 0) -> Any:
        """Returns a tree of at most a few dozen leaves."""
        kind = self.choice.choice(["dict", "list", "tuple", "pair", "keys", "leaf"]) if depth else "dict"
        if kind == "leaf" or depth > 3:
            return self.leaf()
        children = [self.tree(depth + 1) for _ in range(self.choice.randint(0, 4))]
        if kind == "list":
            return children
        if kind == "tuple":
            return tuple(children)
        if kind == "pair":
            return _Pair(self.tree(depth + 1), self.leaf())
        return dict(zip(self.keys(len(children), kind == "dict"), children, strict=True))

    def keys(self, count: int, is_text: bool) -> list[Any]:
        """Returns different keys of one type, which JAX can sort."""
        kinds = [
            ["w", "b", "", "a/b~c", "~@0", "__metadata__", "é\U0001f600", "\uffff", "constructor", "__proto__"],
            [0, 1, -3, 10, 2**53, 2**60, -(2**64)],
            [0.5, -0.0, 1e16, 1.5e-05, 123.0, float("inf"), 0.0001],
            [b"", b"\xff", b"a/", b"\xc3\xa4\xe2\x82", b"\xed\xa0\x80"],
            [(1, "a"), (1, "it's"), (2,), (3, 1.5, False), ()],
        ]
        return self.choice.sample(kinds[0] if is_text else self.choice.choice(kinds[1:]), count)

    def leaf(self) -> Any:
        """Returns an array or a value."""
        draw = self.choice.random()
        if draw < 0.15 and self.arrays:
            return self.choice.choice(self.arrays)
        if draw < 0.65:
            shape = tuple(self.choice.choice([0, 1, 2, 3, 5, 8, 16]) for _ in range(self.choice.randint(0, 3)))
            array: Any = random_array(self.numbers, self.choice.choice(DTYPES), shape)
            if not shape and self.choice.random() < 0.5:
                return array[()]
            self.arrays.append(array)
            return array
        if draw < 0.8:
            return self.jax_leaf()
        return self.choice.choice(VALUES)

    def jax_leaf(self) -> Any:
        """Returns a JAX array: plain, weakly typed, keys, or in pieces."""
        draw = self.choice.randrange(4)
        if draw == 0:
            return jax.random.key(self.choice.randrange(9), impl=self.choice.choice(["threefry2x32", "rbg"]))
        if draw == 1:
            return jnp.asarray(self.choice.random())
        array = self.numbers.standard_normal((8, self.choice.choice([2, 4, 6]))).astype(np.float32)
        if draw == 2:
            return jnp.asarray(array, self.choice.choice(["float32", "bfloat16", "float8_e4m3fn"]))
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
        spec = self.choice.choice([PartitionSpec("x"), PartitionSpec("x", "y"), PartitionSpec(("y", "x"))])
        return jax.device_put(array, NamedSharding(mesh, spec))
