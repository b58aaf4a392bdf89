"""Saves and restores every kind of leaf and key, and compares every bit."""

import contextlib
import enum
import functools
import logging
import os
import random
import string
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.custom_batching
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx
from flax.linen import fp8_ops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import treering as tr
import treering.orbax as adapter
from helpers import assert_same, assert_survives, assert_survives_plainly, every_way
from treering.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.compat

ML_DTYPES = sorted(n for n, t in vars(ml_dtypes).items() if isinstance(t, type) and issubclass(t, np.generic))
NUMPY_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("datetime64[ns]", "datetime64[D]", "datetime64[25s]", "timedelta64[us]", "timedelta64"),
    *("S1", "S7", "U1", "U5"),
]
JAX_DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
WIDE_JAX_DTYPES = ["int64", "uint64", "float64", "complex128"]
FLOATS = [n for n in ML_DTYPES if "float" in n] + ["float16", "float32", "float64"]
BITS = {"int1": 1, "int2": 2, "int4": 4, "float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
KEY_IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]
NASTY_KEYS = [
    *(
        "",
        " ",
        "/",
        "//",
        ".",
        "..",
        "~",
        "~0",
        "~1",
        "~@",
        "~@0,0",
        "a/b",
        "a~b",
        "a.b",
        "a b",
        "\n",
        "\t",
        "\0",
        "a\0b",
    ),
    *("🌲", "é", "e\u0301", "__metadata__", "dtype:a", "xxh3", "treering.json", "..\\..", "*", "**", "?", "[0]", "0"),
    *('"', "'", "\\", "\\u0041", "\x7f", "\x85", "\u2028", "\ufeff", "a" * 300),
]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def filled(name: str) -> np.ndarray:
    """Returns an array with every bit pattern of a narrow dtype, or with random ones of a wider dtype."""
    dtype = dtype_of(name)
    if dtype.kind == "U":  # Not every integer is a code point.
        return np.array([["", "é🌲"], ["a\0b", "zzzzz"]], dtype)
    if name == "bool":
        return np.array([[True, False], [False, False]])
    if name.startswith(("int", "uint")) and name.lstrip("u") in BITS:
        bits = BITS[name.lstrip("u")]
        low = 0 if name.startswith("u") else -(1 << bits - 1)
        return np.arange(low, low + (1 << bits)).astype(dtype)
    if dtype.itemsize == 1 and dtype.kind != "S":
        return np.arange(1 << BITS.get(name, 8), dtype=np.uint8).view(dtype)
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
    return np.frombuffer(random.Random(name).randbytes(dtype.itemsize * 24), dtype).reshape(2, 3, 4)


@pytest.mark.parametrize("name", [*ML_DTYPES, *NUMPY_DTYPES])
def test_every_numpy_dtype_keeps_every_bit(tmp_path: Path, name: str) -> None:
    tree = {"a": filled(name), "scalar": filled(name).reshape(-1)[1]}
    assert_survives_plainly(tmp_path, tree)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("name", JAX_DTYPES)
def test_every_jax_dtype_keeps_every_bit(tmp_path: Path, name: str) -> None:
    array = filled(name)
    tree = {"a": jnp.asarray(array)}
    assert tree["a"].dtype == array.dtype and np.asarray(tree["a"]).tobytes() == array.tobytes()
    for restored, from_shape, on_host in every_way(tmp_path, tree, tree, jax.eval_shape(lambda: tree), {"a": array}):
        assert_same(restored, tree)
        assert_same(from_shape, tree)
        assert_same(on_host, {"a": array})
    for restored in every_way(tmp_path, {"a": array}, tree):
        assert_same(restored, tree)


@pytest.mark.parametrize("name", WIDE_JAX_DTYPES)
def test_wide_dtypes_are_never_narrowed(tmp_path: Path, name: str) -> None:
    """64-bit dtypes are restored with x64, or if the template has them. Else a restore into JAX raises an error."""
    with jax.enable_x64(True):
        tree = {"a": jnp.asarray(filled(name))}
        assert tree["a"].dtype == name
        assert_survives(tmp_path, tree)
        template = jax.eval_shape(lambda: tree)
    path = next(tmp_path.glob("*/ckpt"))
    with pytest.raises(MismatchError, match="x64"):
        tr.restore(path, sharding=lambda *_: None)
    assert_same(tr.restore(path, like=template), tree)
    assert_same(tr.restore(path), {"a": filled(name)})


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (2, 3, 1, 2)])
def test_no_shape_is_special(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert_survives(tmp_path, {"np": array, "jax": jnp.asarray(array), "int4": array.astype(ml_dtypes.int4)})
    assert_survives(tmp_path, array)


def test_a_tree_of_nothing_but_empty_arrays(tmp_path: Path) -> None:
    assert_survives(tmp_path, {"a": np.zeros((0, 2)), "b": jnp.zeros((3, 0)), "c": np.zeros(0, "U3")})


@pytest.mark.parametrize("tree", [{}, [], (), None, [None], {"a": {}, "b": [(), [], None]}, 7, "text", {"a": 1.5}])
def test_a_tree_without_any_array(tmp_path: Path, tree: Any) -> None:
    assert_survives_plainly(tmp_path, tree)


def _unaligned() -> np.ndarray:
    array = np.frombuffer(bytes(range(33)), np.float64, 4, 1)
    assert not array.flags.aligned
    return array


BASE = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
LAYOUTS = {
    "fortran": np.asfortranarray(BASE),
    "transposed": BASE.transpose(2, 0, 1),
    "negative strides": BASE[::-1, :, ::-2],
    "every other": BASE[::2, 1::2],
    "stride 0": np.broadcast_to(np.float32(3), (5, 7)),
    "partly stride 0": np.broadcast_to(BASE[0], (2, 4, 5)),
    "0-d view": BASE[1, 2, 3, ...],
    "field of a record": np.zeros(5, [("pad", "u1"), ("x", "f4")])["x"],
    "unaligned": _unaligned(),
    "empty with strides": BASE[::-1][3:],
    "transposed int4": np.arange(-8, 8).astype(ml_dtypes.int4).reshape(4, 4).T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_an_array_lies_in_memory_does_not_matter(tmp_path: Path, layout: str) -> None:
    array = LAYOUTS[layout]
    for found in every_way(tmp_path, {"a": array}, {"a": array}, None):
        for restored in found:
            assert_same(restored, {"a": array})
            assert restored["a"].flags.c_contiguous


@pytest.mark.parametrize("dtype", [">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16", ">U3", ">M8[s]", ">m8[D]"])
def test_big_endian_arrays_come_back_as_their_template_is(tmp_path: Path, dtype: str) -> None:
    little = filled(np.dtype(dtype).newbyteorder("<").str)
    big = little.astype(dtype)
    assert big.byteswap().tobytes() == little.tobytes()
    for saved in (big, little):
        for as_big, as_little, plain in every_way(tmp_path, saved, big, little, None):
            assert_same(as_big, big)
            assert_same(as_little, little)
            assert_same(plain, little)


@pytest.mark.parametrize("name", ["int4", "uint4", "int2"])
def test_small_integers_are_equal_for_other_readers(tmp_path: Path, name: str) -> None:
    """The stored bytes of small integers do not depend on how the array was saved."""
    values = filled(name)
    tr.save(tmp_path / "a", {"np": values, "strided": values[::-1][::-1], "jax": jnp.asarray(values)})
    tr.save_async(tmp_path / "b", {"np": values, "jax": jnp.asarray(values)}).result()
    for directory in ("a", "b"):
        (file,) = (tmp_path / directory).glob("*.safetensors")
        for stored in safetensors.numpy.load_file(file).values():
            assert np.array_equal(stored.view(np.int8), values.astype(np.int8))  # sign-extended, says docs/format.md


def test_numpy_scalars_stay_numpy_scalars(tmp_path: Path) -> None:
    scalars = [
        *(np.float32(1.5), np.float64(-0.0), np.float16("nan"), np.int64(-(2**63)), np.uint64(2**64 - 1), np.int8(-1)),
        *(np.bool_(True), np.bool_(False), np.complex64(1 - 2j), np.complex128(complex("nan-0j"))),
        *(np.str_("é\0x"), np.str_(""), np.bytes_(b"a\0b"), np.bytes_(b"")),
        *(np.datetime64("2020-02-29T12:00"), np.datetime64("NaT", "s"), np.timedelta64(-3, "D")),
        # NumPy 2.5 no longer makes them without a unit. They still exist, also in older checkpoints.
        *(np.int64(-(2**63)).view(kind) for kind in ("datetime64", "timedelta64")),
        *(ml_dtypes.bfloat16(1.5), ml_dtypes.float8_e4m3fn(2), ml_dtypes.int4(-8), ml_dtypes.uint2(3)),
        np.frombuffer(b"\x01\x00\xa0\x7f", np.float32)[0],
    ]
    assert_survives_plainly(tmp_path, scalars)


def test_numpy_text_scalar_of_other_length_is_restored(tmp_path: Path) -> None:
    """A NumPy text scalar in a template takes a saved text of any length."""
    tree = {"s": np.str_("longer"), "b": np.bytes_(b"longer")}
    for restored in every_way(tmp_path, tree, {"s": np.str_("x"), "b": np.bytes_(b"x")}):
        assert_same(restored, tree)


def _nan(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


PYTHON_VALUES = {
    "bool": [True, False],
    "int": [0, 1, -1, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**63, -(2**63), 2**64, -(2**200)],
    "float": [0.0, -0.0, 1.0, 0.1, 5e-324, -5e-324, 1.7976931348623157e308, 1e16, 1e22, float("inf"), -float("inf")],
    "nan": [_nan(b) for b in (0x7FF8 << 48, 0xFFF8 << 48, 0x7FF8_0000_DEAD_BEEF, (0x7FF0 << 48) + 1, 2**64 - 1)],
    "complex": [1j, complex(-0.0, 0.0), complex(0.0, -0.0), complex(float("inf"), _nan(0xFFF8_0000_0000_0007))],
    "str": ["", "text", "é🌲\0\n\u2028", "nan:0", '"\\', "\x7f\x80", "a" * 100_000],
    "bytes": [b"", b"\0\xff", bytes(range(256)) * 40],
    "none": [None, [None], {"a": None}],
}


@pytest.mark.parametrize("kind", PYTHON_VALUES)
def test_python_values_keep_their_type_and_every_bit(tmp_path: Path, kind: str) -> None:
    tree = {"values": PYTHON_VALUES[kind]}
    assert_survives_plainly(tmp_path, tree)
    opened = tr.open(next(tmp_path.glob("*/ckpt"))).values()
    assert_same(list(opened), jax.tree.leaves(tree, is_leaf=lambda x: x is None))


def test_integers_of_6000_digits(tmp_path: Path) -> None:
    tree = {"big": 10**6000 + 7, "negative": -(10**6000)}
    assert_survives_plainly(tmp_path, tree)


def test_checkpoint_with_huge_integer_is_printable(tmp_path: Path) -> None:
    """Printing works for integers that Python refuses to write in decimal digits."""
    tr.save(tmp_path / "a", {"big": 10**6000, "w": np.ones(1)})
    assert "big" in repr(tr.open(tmp_path / "a"))


@pytest.mark.parametrize(
    "value", [2**63, 2**64, -(2**63) - 1, 10**30, 10**6000], ids=lambda v: f"{v.bit_length()} bits"
)
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_a_python_integer_too_big_for_the_template_is_a_mismatch(tmp_path: Path, value: int, dtype: str) -> None:
    tr.save(tmp_path / "a", {"n": value})
    with pytest.raises(MismatchError, match="n: expected"):
        tr.restore(tmp_path / "a", like={"n": np.zeros((), dtype)})


@pytest.mark.parametrize(
    ("saved", "template"),
    [
        *(("uint8", "int8"), ("uint16", "int16"), ("uint32", "int32"), ("uint64", "int64"), ("uint64", "int8")),
        *(("int8", "uint8"), ("int32", "uint32"), ("int64", "uint64"), ("int64", "int32"), ("int32", "int8")),
        *(("int8", "int4"), ("uint8", "int4"), ("int32", "uint4"), ("int4", "uint8"), ("int4", "uint32")),
        *(("int4", "uint4"), ("uint4", "int4"), ("int4", "int2"), ("uint2", "int2")),
    ],
)
def test_integer_overflow_of_template_is_refused(tmp_path: Path, saved: str, template: str) -> None:
    """An integer that is too large for the template's dtype raises an error."""
    have, want = dtype_of(saved), dtype_of(template)
    low, high = (int(f(ml_dtypes.iinfo(want))) for f in (lambda i: i.min, lambda i: i.max))
    info = ml_dtypes.iinfo(have)
    outside = [int(x) for x in (info.min, info.max, -1, high + 1) if info.min <= x <= info.max and not low <= x <= high]
    assert outside
    for n, value in enumerate(outside):
        tr.save(tmp_path / str(n), {"a": _integers([0, value], have)})
        with pytest.raises(MismatchError):
            tr.restore(tmp_path / str(n), like={"a": np.zeros(2, want)})
    tr.save(tmp_path / "fits", {"a": _integers([0, 1], have)})
    assert_same(tr.restore(tmp_path / "fits", like={"a": np.zeros(2, want)}), {"a": _integers([0, 1], want)})


def _integers(values: list[int], dtype: np.dtype[Any]) -> np.ndarray:
    return np.array(values, dtype) if dtype.kind in "iu" else np.array(values, np.int64).astype(dtype)


@pytest.mark.parametrize("saved", FLOATS)
def test_a_float_that_a_wider_template_takes_keeps_its_value(tmp_path: Path, saved: str) -> None:
    special = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan])
    values = filled(saved) if dtype_of(saved).itemsize <= 2 else special.astype(saved)
    tr.save(tmp_path / "a", {"a": values})
    taken, changed = [], {}
    for template in FLOATS:
        with contextlib.suppress(MismatchError):
            found = tr.restore(tmp_path / "a", like={"a": np.zeros(values.shape, dtype_of(template))})["a"]
            taken.append(template)
            with np.errstate(invalid="ignore"):  # signalling NaNs
                before, after = values.astype(np.float64), found.astype(np.float64)
            same = (before == after) & (np.signbit(before) == np.signbit(after)) | (np.isnan(before) & np.isnan(after))
            if not same.all():
                changed[template] = sorted({*before[~same].tolist()})
    assert saved in taken and "float64" in taken
    assert not changed


@pytest.mark.parametrize("saved", FLOATS)
def test_floats_are_cast_to_template_on_request(tmp_path: Path, saved: str) -> None:
    """With dtype='template' a float converts to any float dtype of the template."""
    values = np.array([0.5, 1.0, 2.0]).astype(dtype_of(saved))  # values that every float dtype has
    tr.save(tmp_path / "a", {"a": values})
    for template in map(dtype_of, FLOATS):
        found = tr.restore(tmp_path / "a", like={"a": np.zeros(3, template)}, dtype="template")
        assert_same(found, {"a": values.astype(np.float64).astype(template)})


@pytest.mark.long
@pytest.mark.parametrize("impl", KEY_IMPLS)
def test_typed_keys_of_every_implementation(tmp_path: Path, impl: str) -> None:
    key = jax.random.key(7, impl=impl)
    tree = {
        "one": key,
        "batch": jax.random.split(key, 3),
        "grid": jax.random.split(key, (2, 1, 2)),
        "none of them": jax.random.split(key, 3)[:0],
        "here": jax.device_put(key, jax.devices()[-1]),
        "raw": jax.random.key_data(key),
    }
    for restored, plain, from_shape in every_way(tmp_path, tree, tree, None, jax.eval_shape(lambda: tree)):
        assert_same(restored, tree)
        assert_same(plain["batch"], tree["batch"])
        assert jax.random.bits(plain["one"]) == jax.random.bits(key)
        assert isinstance(plain["raw"], np.ndarray)
        assert_same({**from_shape, "here": None}, {**tree, "here": None})


@pytest.mark.long
@pytest.mark.whole
def test_key_of_other_implementation_or_bits_is_refused(tmp_path: Path) -> None:
    """A typed key is not restored into a key of another implementation, nor into its data."""
    key = jax.random.key(0)
    tr.save(tmp_path / "a", {"k": key})
    for like in (jax.random.key(0, impl="rbg"), jax.random.key_data(key), jax.random.split(key, 2), 0):
        with pytest.raises(MismatchError, match="k: expected"):
            tr.restore(tmp_path / "a", like={"k": like})
    tr.save(tmp_path / "b", {"k": jax.random.key_data(key)})
    with pytest.raises(MismatchError, match="k: expected"):
        tr.restore(tmp_path / "b", like={"k": key})


@pytest.mark.long
def test_dict_keys_may_be_any_text(tmp_path: Path) -> None:
    for place, tree in enumerate(
        [
            {key: np.full(2, n) for n, key in enumerate(NASTY_KEYS)},
            {"in": {key: {key: jnp.full(2, n)} for n, key in enumerate(NASTY_KEYS)}},
            {key: key for key in NASTY_KEYS},
        ]
    ):
        directory = tmp_path / str(place)
        directory.mkdir()
        assert_survives(directory, tree)
        untemplated = tr.restore(next(directory.glob("*/ckpt")))
        assert_same(untemplated, jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, tree))


def test_every_leaf_has_a_path_by_which_it_is_found(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", {"in": {key: np.full(2, n) for n, key in enumerate(NASTY_KEYS)}})
    ckpt = tr.open(tmp_path / "a")
    assert set(ckpt) == {"in/" + key.replace("~", "~0").replace("/", "~1") for key in NASTY_KEYS}
    for n, key in enumerate(NASTY_KEYS):
        assert ckpt["in/" + key.replace("~", "~0").replace("/", "~1")][0] == n


@pytest.mark.long
def test_an_array_at_the_root_and_one_under_an_empty_key(tmp_path: Path) -> None:
    for tree in (np.ones(2), {"": np.ones(2)}, {"": {"": np.ones(2)}}, [{"": 1}, {"": np.ones(2)}]):
        assert_survives_plainly(tmp_path, tree)


def test_an_empty_key_does_not_hide_its_siblings_in_a_selection(tmp_path: Path) -> None:
    tree = {"": np.ones(1), "a": np.ones(2), "b": {"": np.ones(3)}}
    tr.save(tmp_path / "a", tree)
    assert_same(tr.open(tmp_path / "a").select("**").restore(), tree)


@pytest.mark.parametrize(
    "keys",
    [
        *(
            [1, -1, 2**70, 10],
            [True, False],
            [1.0, -2.5, 1e300, float("inf")],
            [b"", b"a/~", b"\xff\0"],
            [1, 1.5, False],
        ),
        [("a", "b"), ("a, b",), ("a', 'b",), ("a\\', \\'b",), ("a",), (), ("a/~",), ("ä\n\u0378",)],
        [(0, -1), (2**70, 1.5), (True, 0), (1.0, False), (3,)],
    ],
    ids=["int", "bool", "float", "bytes", "mixed", "tuples of text", "tuples of numbers"],
)
def test_dict_keys_that_are_not_text(tmp_path: Path, keys: list[Any]) -> None:
    tree = {"a": {key: np.full(2, n) for n, key in enumerate(keys)}}
    assert_survives_plainly(tmp_path, tree)


@pytest.mark.long
def test_tuple_key_has_library_name_in_foreign_files(tmp_path: Path) -> None:
    """In files of other libraries, a tuple as a key has the name that these libraries use."""
    tree = {("a", "b/c"): np.ones(2), ("a", "b/d"): np.zeros(2), ("e",): np.arange(3)}
    (tmp_path / "flax.msgpack").write_bytes(flax.serialization.to_bytes(tree))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
    for format in ("flax", "t5x", "orbax", "safetensors"):
        tr.save(tmp_path / f"ours.{format}", tree, format=format)
    assert_same(flax.serialization.from_bytes(tree, (tmp_path / "ours.flax").read_bytes()), tree)
    for path in tmp_path.iterdir():
        assert list(tr.open(path)) == ["('a', 'b~1c')", "('a', 'b~1d')", "('e',)"], path
        assert_same(tr.restore(path, like=tree), tree)


@pytest.mark.long
@pytest.mark.whole
def test_keys_that_compare_equal_are_not_mixed_up_between_saves(tmp_path: Path) -> None:
    for n, key in enumerate([1, True, 1.0, 0, False, 0.0, -0.0, (1,), (True,), (1.0,)]):
        tr.save(tmp_path / str(n), {"a": {key: np.ones(2)}})
        found = tr.restore(tmp_path / str(n))
        assert [*map(repr, found["a"])] == [repr(key)]
        assert list(tr.open(tmp_path / str(n))) == [f"a/{key}"]


def test_a_dot_in_a_key_is_no_separator(tmp_path: Path) -> None:
    tree = {"a.b": np.ones(1), "a": {"b": np.zeros(1)}, "a/b": np.full(1, 2.0), "a~1b": np.full(1, 3.0)}
    assert_survives(tmp_path, tree)


@pytest.mark.long
@pytest.mark.whole
def test_a_tree_200_levels_deep(tmp_path: Path) -> None:
    tree: Any = {"w": np.ones(3), "n": 7}
    for level in range(200):
        tree = {"d": tree} if level % 3 == 0 else [tree] if level % 3 == 1 else (None, tree)
    assert_survives_plainly(tmp_path, tree)


@pytest.mark.long
def test_a_hundred_thousand_leaves(tmp_path: Path) -> None:
    tree = [list(row) for row in np.arange(100_000, dtype=np.int32).reshape(100, 1000)]
    tree = [[np.asarray(leaf) for leaf in row] for row in tree]
    tr.save(tmp_path / "a", tree)
    found = tr.restore(tmp_path / "a", like=tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert all(type(leaf) is np.ndarray and leaf.dtype == np.int32 for row in found for leaf in row)
    assert np.array_equal(np.array(found), np.array(tree))


def _array_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("make", [np.ones, jnp.ones], ids=["numpy", "jax"])
def test_an_array_in_two_leaves_is_written_once(tmp_path: Path, make: Any) -> None:
    array = make((300, 1000), np.float32)
    key = jax.random.key(1)
    tree = {"a": array, "b": [array, make((300, 1000), np.float32)], "c": (array,), "k": key, "l": key}
    for n, save in enumerate((tr.save, lambda p, t: tr.save_async(p, t).result())):
        save(tmp_path / str(n), tree)
        assert 2 * array.nbytes <= _array_bytes(tmp_path / str(n)) < 2.2 * array.nbytes
        for mmap in (None, False):
            assert_same(tr.restore(tmp_path / str(n), like=tree, mmap=mmap), tree)
        assert_same(tr.restore(tmp_path / str(n), at="c", like=(array,)), (array,))


@pytest.mark.parametrize("mmap", [None, True, False])
def test_restored_array_shares_no_memory(tmp_path: Path, mmap: bool | None) -> None:
    """Restored NumPy arrays share no memory with each other, nor with the file."""
    array = np.arange(300_000, dtype=np.float32)
    tr.save(tmp_path / "a", {"a": array, "b": array, "c": array.copy()})
    for like in (None, {name: array.copy() for name in "abc"}):
        found = tr.restore(tmp_path / "a", like=like, mmap=mmap)
        found["a"][:] = -1
        assert np.array_equal(found["b"], array) and np.array_equal(found["c"], array)
    assert tr.verify(tmp_path / "a").problems == ()
    assert_same(tr.restore(tmp_path / "a", like=dict.fromkeys("abc", array)), dict.fromkeys("abc", array))


@pytest.mark.parametrize("mmap", [None, True, False])
def test_restored_numpy_array_shares_no_memory_with_jax(tmp_path: Path, mmap: bool | None) -> None:
    """Restored NumPy and JAX arrays of one saved array share no memory."""
    array = np.arange(300_000, dtype=np.float32)
    tr.save(tmp_path / "a", {"a": array, "b": array})
    found = tr.restore(tmp_path / "a", like={"a": array, "b": jnp.asarray(array)}, mmap=mmap)
    found["a"][:] = -1
    assert np.array_equal(found["b"], array)


@pytest.mark.parametrize("mmap", [None, True, False])
def test_open_checkpoint_gives_independent_arrays(tmp_path: Path, mmap: bool | None) -> None:
    """Values that an open checkpoint returns share no memory with later ones."""
    tree = {"a": np.arange(300_000, dtype=np.float32)}
    tr.save(tmp_path / "a", tree)
    ckpt = tr.open(tmp_path / "a")
    on_device = ckpt.restore(like={"a": jnp.asarray(tree["a"])}, mmap=mmap)
    ckpt.restore(like=tree, mmap=mmap)["a"][:] = -1
    ckpt.restore(mmap=mmap)["a"][:] = -1
    ckpt["a"][100:200][:] = -1
    np.asarray(ckpt["a"])[:] = -1
    assert np.array_equal(on_device["a"], tree["a"])
    assert_same(ckpt.restore(like=tree, mmap=mmap), tree)
    assert_same(ckpt["a"][:], tree["a"])


@pytest.mark.long
@pytest.mark.parametrize("mmap", [None, True, False])
def test_donated_restored_array_changes_nothing_else(tmp_path: Path, mmap: bool | None) -> None:
    """A donated array shares no memory with another leaf, nor with the file."""
    array = jnp.arange(300_000, dtype=jnp.float32)
    tree = {"a": array, "b": array, "c": array + 0}
    tr.save(tmp_path / "a", tree)
    found = tr.restore(tmp_path / "a", like=tree, mmap=mmap)
    donated = jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(found["a"]))
    assert np.array_equal(found["b"], array) and np.array_equal(found["c"], array) and donated[5] == -1
    assert tr.verify(tmp_path / "a").problems == ()
    assert_same(tr.restore(tmp_path / "a", like=tree), tree)


@pytest.mark.long
@pytest.mark.whole
def test_save_async_ignores_later_changes_of_arrays(tmp_path: Path) -> None:
    """`save_async` saves the values that the arrays have when it is called."""
    array, given_away = np.arange(300_000, dtype=np.float32), jnp.arange(300_000, dtype=jnp.float32)
    expected = {"np": array.copy(), "strided": array[::3].copy(), "jax": jnp.array(given_away, copy=True)}
    pending = tr.save_async(tmp_path / "a", {"np": array, "strided": array[::3], "jax": given_away})
    array[:] = -1
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(given_away))
    pending.result()
    assert_same(tr.restore(tmp_path / "a", like=expected), expected)


def _train_state(place: Callable[[Any], Any]) -> dict[str, Any]:
    state = {
        "w": jnp.ones((4, 4)),
        "weak": jnp.asarray(0.5) * 2,
        "weak int": jnp.asarray(3),
        "step": jnp.zeros((), jnp.int32),
        "key": jax.random.key(0),
        "int4": jnp.ones(3, jnp.int4),
        "weak wide": jnp.full((2, 2), 1.5) * jnp.asarray(2.0),
    }
    assert state["weak"].weak_type and state["weak int"].weak_type and state["weak wide"].weak_type
    return jax.tree.map(place, state)


PLACES: dict[str, Callable[[Any], Any]] = {
    "uncommitted": lambda x: x,
    "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    "committed elsewhere": lambda x: jax.device_put(x, jax.devices()[-1]),
}


@contextlib.contextmanager
def _compilations(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    found: list[str] = []
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        yield found
    found += [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]


@pytest.mark.long
@pytest.mark.parametrize("mmap", [None, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_resumed_train_step_is_not_traced_or_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, mmap: bool | None
) -> None:
    traces = []

    @jax.jit
    def train_step(state: dict[str, Any]) -> dict[str, Any]:
        traces.append(1)
        key, use = jax.random.split(state["key"])
        w = state["w"] + jax.random.normal(use, state["w"].shape) * state["weak"] + state["weak int"]
        return {**state, "w": w, "key": key, "step": state["step"] + 1, "weak": state["weak"] * 0.5}

    state = _train_state(PLACES[place])
    with _compilations(caplog) as compiled:
        state = train_step(train_step(state))
    assert len(traces) == 1 and len(compiled) == 1

    tr.save(tmp_path / "a", state)
    templates = [state, jax.eval_shape(lambda: state)] if place == "uncommitted" else [state]
    for like in templates:
        restored = tr.restore(tmp_path / "a", like=like, mmap=mmap)
        assert_same(restored, state)
        with _compilations(caplog) as compiled:
            resumed = train_step(restored)
        assert not compiled
        assert_same(resumed, train_step(state))
    assert len(traces) == 1


@pytest.mark.long
@pytest.mark.whole
def test_weak_types_are_those_that_were_saved(tmp_path: Path) -> None:
    """The next step has the bits of the interrupted job, whose weak types may differ from those of `init`."""
    weak, strong = jnp.asarray(1.5), jnp.asarray(1.5, jnp.float32)
    assert weak.weak_type and not strong.weak_type
    for saved in (weak, strong):
        for found in every_way(tmp_path, saved, weak, strong):
            assert_same(list(found), [saved, saved])
    tr.save(tmp_path / "weak.msgpack", {"x": weak})  # The format records no weak types, so the template decides.
    for template in (weak, strong):
        assert_same(tr.restore(tmp_path / "weak.msgpack", {"x": template}), {"x": template})


@pytest.mark.long
def test_restored_arrays_follow_template_devices(tmp_path: Path) -> None:
    """Arrays are restored to the devices of the template's arrays."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding)
    tree = {"sharded": array, "int4": array.astype(jnp.int4), "third": jax.device_put(jnp.ones(3), jax.devices()[3])}
    for restored in every_way(tmp_path, tree, tree):
        assert_same(restored, tree)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, tree))


def _a_function(x: Any) -> Any:
    return x


class _WithMethods:
    def method(self, x: Any) -> Any:
        return x


FUNCTIONS = [
    *(_a_function, lambda x: x, len, str, jax.nn.relu, jax.nn.gelu, jnp.tanh, jax.jit(_a_function)),
    *(jax.vmap(_a_function), jax.grad(_a_function), functools.partial(jax.nn.gelu, approximate=False), _WithMethods),
    *(functools.partial(functools.partial(_a_function)), jax.custom_vjp(_a_function), jax.checkpoint(_a_function)),
    *(jnp.maximum, np.maximum, np.frompyfunc(_a_function, 1, 1), functools.partial(jnp.minimum, 6.0)),
    *(jax.custom_batching.custom_vmap(_a_function), jax.lax.sin_p, jax.tree.structure([1]), np.float32, np.ndarray),
    *(np.dtype("float32"), jnp.dtype("bfloat16"), jax.ShapeDtypeStruct, jax.make_jaxpr(_a_function)(1.0)),
    *(jax.make_jaxpr(_a_function)(1.0).jaxpr, jax.jit(_a_function).lower(1.0), jax.jit(_a_function).trace(1.0)),
    *(jax.jit(_a_function).lower(1.0).compile(), jax.export.export(jax.jit(_a_function))(1.0)),
]


def test_function_is_taken_from_template(tmp_path: Path) -> None:
    """A checkpoint records only the name of a function, a dtype or other code. A restore takes the template's."""
    tree = {"f": FUNCTIONS, "w": np.ones(1)}
    others = {"f": [_a_function] * len(FUNCTIONS), "w": np.ones(1)}
    for restored, from_others in every_way(tmp_path, tree, tree, others):
        assert_same(restored, tree)
        assert_same(from_others, others)
    assert tr.restore(next(tmp_path.glob("*/ckpt")))["f"] == [None] * len(FUNCTIONS)
    text = repr(tr.open(next(tmp_path.glob("*/ckpt"))))
    assert "_a_function" in text and "bfloat16" in text and "Jaxpr" in text


def test_none_and_array_do_not_replace_each_other(tmp_path: Path) -> None:
    """It is an error if only one of checkpoint and template has None at a path."""
    tr.save(tmp_path / "hole", {"a": None, "b": np.ones(1)})
    tr.save(tmp_path / "full", {"a": np.ones(2), "b": np.ones(1)})
    with pytest.raises(MismatchError, match="a: expected"):
        tr.restore(tmp_path / "hole", like={"a": np.ones(2), "b": np.ones(1)})
    with pytest.raises(MismatchError, match="a: expected"):
        tr.restore(tmp_path / "full", like={"a": None, "b": np.ones(1)})
    with pytest.raises(MismatchError, match="a: expected"):
        tr.restore(tmp_path / "full", like={"a": _a_function, "b": np.ones(1)})
    assert tr.restore(tmp_path / "hole", like={"a": _a_function, "b": np.ones(1)})["a"] is _a_function


def test_a_python_scalar_is_only_taken_for_its_own_type(tmp_path: Path) -> None:
    values = {"bool": True, "int": 1, "float": 1.0, "complex": 1 + 0j, "str": "1", "bytes": b"1"}
    for name, value in values.items():
        tr.save(tmp_path / name, {"a": value})
        for other, like in values.items():
            if other == name:
                assert_same(tr.restore(tmp_path / name, like={"a": like}), {"a": value})
            else:
                with pytest.raises(MismatchError, match=f"a: expected {other}, found {name}"):
                    tr.restore(tmp_path / name, like={"a": like})


@pytest.mark.long
def test_integer_and_0d_integer_array_are_exchangeable(tmp_path: Path) -> None:
    """An int and a 0-d integer array of NumPy or JAX restore into each other."""
    forms = [5, np.int64(5), np.array(5, np.int16), jnp.asarray(5), jnp.zeros((), jnp.uint8) + 5, ml_dtypes.int4(5)]
    for saved in forms:
        for found in every_way(tmp_path, {"a": saved}, *({"a": like} for like in forms)):
            assert_same(list(found), [{"a": like} for like in forms])


class _Loose(np.ndarray):
    pass


def _deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


UNSAVABLE = {
    "object": object(),
    "set": {1, 2},
    "objects": np.array([1, "a", None], object),
    "record": np.zeros(2, [("x", "f4")]),
    "float0": np.zeros(2, jax.dtypes.float0),
    "void": np.void(b"abc"),
    "shape": jax.ShapeDtypeStruct((2,), np.float32),
    "masked": np.ma.masked_array([1, 2], [True, False]),
    "subclass": np.ones(3).view(_Loose),
    "matrix/slash": np.ones((2, 2)).view(np.recarray),
    "longdouble": np.longdouble(1),
    "long doubles": np.ones(2, np.longdouble),
    "surrogate": "\ud800",
    "int subclass": type("Level", (int,), {})(3),
    "str subclass": type("Name", (str,), {})("x"),
    "path": Path("x"),
    "device": jax.devices()[0],
    "extended": jnp.ones((2, 3)).astype(fp8_ops.fm32),
}


@pytest.mark.parametrize("save", [tr.save, tr.save_async])
def test_unsupported_leaves_are_all_named(tmp_path: Path, save: Any) -> None:
    """One error names all leaves that cannot be saved, before anything is written."""
    deleted = _deleted()
    bad = {**UNSAVABLE, "deleted": deleted, "deleted key": jax.random.key(0)}
    bad["deleted key"].delete()
    with pytest.raises(UnsupportedError) as caught:
        save(tmp_path / "a", {"good": np.ones(3), "bad": bad, "list": [1, object()]})
    named = {line.strip().split(": ")[0] for line in str(caught.value).splitlines()[1:]}
    assert named == {*("bad/" + key.replace("/", "~1") for key in bad), "list/1"}
    assert os.listdir(tmp_path) == []


def test_gradients_of_integers_are_named(tmp_path: Path) -> None:
    gradient = jax.grad(lambda n: n * 2.0, allow_int=True)(1)
    with pytest.raises(UnsupportedError, match=r"x: .*float0.* gradients of integers.*; use None"):
        tr.save(tmp_path / "a", {"x": np.asarray(gradient)})


def test_the_advice_about_arrays_keeps_their_values(tmp_path: Path) -> None:
    """Keeps the values, the mask and the dtype by saving what each message says."""

    def advised(x: Any, *code: str, **names: Any) -> list[Any]:
        with pytest.raises(UnsupportedError) as caught:
            tr.save(tmp_path / "bad", {"x": x})
        assert all(one in str(caught.value) for one in code), str(caught.value)
        path = tmp_path / f"c{len(os.listdir(tmp_path))}"
        tr.save(path, [eval(one, {"x": x, "numpy": np, **names}) for one in code])
        return tr.restore(path)

    masked = np.ma.masked_array([1.0, -999.0, 3.0], [False, True, False])
    data, mask = advised(masked, "x.data", "numpy.ma.getmaskarray(x)")
    assert np.ma.masked_array(data, mask).tolist() == [1.0, None, 3.0]
    data, mask = advised(np.ma.masked_array([1.0, 2.0]), "x.data", "numpy.ma.getmaskarray(x)")
    assert mask.tolist() == [False, False]
    (plain,) = advised(np.arange(3.0).view(_Loose), "numpy.asarray(x)")
    assert plain.tolist() == [0, 1, 2]
    half = np.array([1, -2.5], ml_dtypes.bfloat16)
    (found,) = advised(half.view("V2"), "x.view(ml_dtypes.bfloat16)", ml_dtypes=ml_dtypes)
    assert found.dtype == half.dtype and (found == half).all()
    scale = jnp.full(1, 3.0).astype(fp8_ops.fm32)
    (found,) = advised(scale, "jax.lax.convert_element_type(x, 'float32')", jax=jax)
    again = jax.lax.convert_element_type(found, scale.dtype)
    assert again.dtype == fp8_ops.fm32 and jax.lax.convert_element_type(again, "float32").tolist() == [3]


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (np.dtypes.StringDType(), r"b: .*use fixed-width text, numpy\.array\(x\.tolist\(\)\), or bytes"),
        (np.dtype(np.longdouble), "b: .*whose layout differs between machines; cast it"),
    ],
)
def test_dtypes_without_a_layout_are_refused_with_advice(tmp_path: Path, dtype: Any, said: str) -> None:
    array = np.array(["1", "2"], np.dtypes.StringDType()).astype(dtype)
    with pytest.raises(UnsupportedError, match=said):
        tr.save(tmp_path / "a", {"a": 1, "b": array})
    fixed = np.array(array.tolist()) if dtype.kind == "T" else array.astype(float)
    tr.save(tmp_path / "a", {"b": fixed})
    assert np.array_equal(tr.restore(tmp_path / "a")["b"], fixed)


def test_an_extended_dtype_is_refused_with_its_leaf(tmp_path: Path) -> None:
    """JAX has dtypes besides those of keys that are no dtypes of NumPy, such as Flax's fp32-max."""
    state = {"w": jnp.ones(2), "s": {"scale": jnp.ones((2, 3)).astype(fp8_ops.fm32)}}
    shapes = jax.eval_shape(lambda: state)
    for n, name in enumerate(["a", "b.safetensors", "e.eqx", "f.msgpack"]):
        with pytest.raises(UnsupportedError, match="s/scale: dtype fp8_meta32"):
            tr.save(tmp_path / name, state, **({"dtype": "bfloat16"} if n % 2 else {}))
    with tr.Checkpointer(tmp_path / "run") as ckpts, pytest.raises(UnsupportedError, match="s/scale: dtype fp8_meta32"):
        ckpts.save(1, state).result()
    args = {"w": adapter.SaveArgs(), "s": {"scale": adapter.SaveArgs(dtype=jnp.float32)}}
    for options in ({}, {"save_args": args}):
        with pytest.raises(UnsupportedError, match="s/scale: dtype fp8_meta32"):
            adapter.PyTreeCheckpointer().save(tmp_path / "orbax", state, **options)
    tr.save(tmp_path / "plain", {"w": jnp.ones(2), "s": {"scale": jnp.ones((2, 3))}})
    with pytest.raises(UnsupportedError, match="s/scale: dtype fp8_meta32"):
        tr.diff(tmp_path / "plain", state)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, tr.open(tmp_path / "plain"))
    for like in (state, shapes):
        for dtype in (None, "template"):
            with pytest.raises(MismatchError, match=r"s/scale: expected fp8_meta32.2,3., found float32.2,3.; no array"):
                tr.restore(tmp_path / "plain", like, dtype=dtype)
            with (
                tr.Checkpointer(tmp_path / "run") as ckpts,
                pytest.raises(MismatchError, match="scale: expected fp8"),
            ):
                ckpts.restore_or_init(lambda like=like: like, dtype=dtype)
    with pytest.raises(MismatchError, match="scale: expected fp8"):
        adapter.StandardCheckpointer().restore(tmp_path / "plain", shapes)
    with pytest.raises(UnsupportedError, match=r"metadata\['scale'\]"):
        tr.save(tmp_path / "meta", {"w": 1}, metadata={"scale": jnp.float32(3).astype(fp8_ops.fm32)})


def test_an_unsavable_object_in_two_leaves_is_named_twice(tmp_path: Path) -> None:
    deleted, objects = _deleted(), np.array([object()])
    with pytest.raises(UnsupportedError) as caught:
        tr.save(tmp_path / "a", {"a": objects, "b": objects, "c": deleted, "d": deleted})
    assert all(f"  {name}: " in str(caught.value) for name in "abcd")
    assert os.listdir(tmp_path) == []


def test_tracers_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    def inside(x: jax.Array, key: jax.Array) -> jax.Array:
        with pytest.raises(UnsupportedError) as caught:
            tr.save(tmp_path / "a", {"x": x, "key": key, "y": [x + 1], "constant": np.ones(2)})
        assert all(f"  {path}: a tracer" in str(caught.value) for path in ("x", "key", "y/0"))
        return x

    jax.jit(inside)(jnp.ones(2), jax.random.key(0))
    assert os.listdir(tmp_path) == []


@jax.tree_util.register_pytree_with_keys_class
class _TwoNames:
    """A container with an item and an attribute of the same name."""

    def __init__(self, item: Any, attribute: Any):
        self.children = item, attribute

    def tree_flatten_with_keys(self) -> Any:
        keys = jax.tree_util.DictKey("1"), jax.tree_util.GetAttrKey("1")
        return tuple(zip(keys, self.children, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "_TwoNames":
        return cls(*children)


@pytest.mark.parametrize(
    "tree",
    [_TwoNames(np.ones(1), np.zeros(1)), {b"\xff": np.ones(1), b"\\xff": np.ones(2)}],
    ids=["item and attribute", "bytes"],
)
def test_two_leaves_of_one_path_are_refused(tmp_path: Path, tree: Any) -> None:
    with pytest.raises(UnsupportedError):
        tr.save(tmp_path / "a", {"ok": np.ones(1), "t": tree})
    assert os.listdir(tmp_path) == []
    with pytest.raises(UnsupportedError):
        tr.save_async(tmp_path / "a", {"ok": np.ones(1), "t": tree})
    assert os.listdir(tmp_path) == []


def test_containers_of_one_path_below_two_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="t: two children of this _TwoNames have one key"):
        tr.save(tmp_path / "a", {"t": _TwoNames({"w": np.ones(1)}, {"w": np.zeros(1)})})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "keys",
    [
        tuple(enum.StrEnum("Part", "HEAD ENCODER")),
        tuple(enum.IntEnum("Layer", "FIRST SECOND")),
        tuple(np.arange(-1, 2)),
        (np.uint8(3), 4),
        (np.str_("b/c"), "a"),
    ],
    ids=repr,
)
def test_keys_that_equal_plain_ones_are_saved_as_these(tmp_path: Path, keys: Any) -> None:
    """Members of StrEnum and IntEnum, and NumPy's integers and texts. A template has them again."""
    tree = {key: np.full(2, n) for n, key in enumerate(keys)}
    tr.save(tmp_path / "a", {"in": [tree]})
    plain = [key.item() if isinstance(key, np.generic) else getattr(key, "value", key) for key in sorted(keys)]
    found = tr.restore(tmp_path / "a")["in"][0]
    assert [*map(type, found)] == [*map(type, plain)] and [*found] == plain
    again = tr.restore(tmp_path / "a", {"in": [dict.fromkeys(keys, np.zeros(2, int))]})["in"][0]
    assert [*map(type, again)] == [*map(type, sorted(keys))]
    for one in (found, again):
        assert all(np.array_equal(one[key], tree[key]) for key in keys)


@pytest.mark.parametrize("format", ["safetensors", "flax", "orbax"])
def test_other_formats_take_such_keys(tmp_path: Path, format: str) -> None:
    tree = {part: np.full(2, n) for n, part in enumerate(enum.StrEnum("Part", "HEAD ENCODER"))}
    tr.save(tmp_path / "a", tree, format=format)
    assert {key: value.tolist() for key, value in tr.restore(tmp_path / "a", tree).items()} == {
        "head": [0, 0],
        "encoder": [1, 1],
    }


def _mutable(kind: str) -> Any:
    if kind == "ref":
        return {"w": jax.new_ref(jnp.arange(3.0))}
    if kind == "hijax" and jax.__version_info__ < (0, 10):
        pytest.skip("Flax makes hijax Variables with JAX 0.10 or later")
    with nnx.var_defaults(hijax=True) if kind == "hijax" else nnx.var_defaults(ref=True):
        return nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("kind", ["ref", "hijax", "variables with refs"])
def test_mutable_arrays_are_refused_with_advice_that_works(tmp_path: Path, kind: str) -> None:
    """JAX returns the object itself as its host copy, so a save in the background would write what it is later."""
    tree = _mutable(kind)
    with pytest.raises(UnsupportedError) as refused:
        tr.save(tmp_path / "a", tree)
    assert "iter(" not in str(refused.value) and os.listdir(tmp_path) == []
    pure = {"w": tree["w"][...]} if kind == "ref" else nnx.to_pure_dict(tree)
    assert "x[...]" in str(refused.value) if kind == "ref" else "nnx.to_pure_dict" in str(refused.value)
    tr.save(tmp_path / "a", pure)
    with pytest.raises(MismatchError, match=r"Ref|HijaxVariable"):
        tr.restore(tmp_path / "a", tree)
    found = tr.restore(tmp_path / "a", pure)
    if kind == "ref":
        assert jax.freeze(tree["w"]).tolist() == found["w"].tolist() == [0, 1, 2]
        with pytest.raises(UnsupportedError, match=r"jax\.freeze\(x\)"):  # Freed by now.
            tr.save(tmp_path / "b", tree)
        with pytest.raises(MismatchError, match=r"jax\.freeze\(x\)"):
            tr.restore(tmp_path / "a", tree)
        return
    nnx.replace_by_pure_dict(tree, jax.tree.map(lambda x: x + 1, found))
    assert all((nnx.to_pure_dict(tree)[name] == pure[name] + 1).all() for name in pure)


@pytest.mark.parametrize("leaf", [jax.P("x", None), jax.sharding.SingleDeviceSharding(jax.devices()[0])])
def test_a_place_as_a_leaf_gets_no_advice_for_data(tmp_path: Path, leaf: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"w: .*each array is saved with its sharding") as refused:
        tr.save(tmp_path / "a", {"w": leaf})
    assert "iter(" not in str(refused.value)


@pytest.mark.parametrize(
    "key", [None, ((1, 2),), (1, None), (b"a",), enum.Enum("Part", "A").A, "\ud800", type("Name", (str,), {})("a")]
)
def test_a_key_that_no_path_can_name_is_refused_with_its_place(tmp_path: Path, key: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"in/0: .*key"):
        tr.save(tmp_path / "a", {"in": [{key: np.ones(1)}], "ok": np.ones(1)})
    assert os.listdir(tmp_path) == []


def test_keys_that_jax_cannot_sort_are_refused_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"in/0: JAX cannot flatten this dict: .*keys of one type that sorts"):
        tr.save(tmp_path / "a", {"in": [{1: np.ones(1), "a": np.ones(1)}], "ok": np.ones(1)})
    assert os.listdir(tmp_path) == []


DTYPES = st.sampled_from([*NUMPY_DTYPES[:14], "bfloat16", "int4", "float8_e4m3fn", "U3", "S2", "datetime64[ns]"])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.text(
    string.ascii_letters + "/~.@", max_size=3
)


@st.composite
def _arrays(draw: st.DrawFn) -> Any:
    array = filled(draw(DTYPES)).reshape(-1)
    shape = draw(SHAPES)
    offset = draw(st.integers(0, array.size - 1))
    array = np.resize(np.roll(array, offset), shape)
    array = draw(st.sampled_from([lambda a: a, lambda a: a.T, lambda a: a[::-1] if a.ndim else a, np.asfortranarray]))(
        array
    )
    narrow = array.dtype.kind not in "MUS" and array.dtype.itemsize <= 4
    return jnp.asarray(array) if narrow and draw(st.booleans()) else array


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.binary(max_size=6)
    | _arrays()
    | _arrays().map(lambda a: a.reshape(-1)[0] if isinstance(a, np.ndarray) and a.size else a)
    | st.builds(lambda n: jax.random.key(n), st.integers(0, 9))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(NAMES, inner, max_size=4)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.dictionaries(st.binary(max_size=2).filter(bytes.isascii), inner, max_size=2)
    ),
    max_leaves=12,
)


@pytest.mark.long
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(tree=TREES, background=st.booleans(), mmap=st.sampled_from([None, True, False]))
def test_any_tree_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, tree: Any, background: bool, mmap: bool | None
) -> None:
    path = tmp_path_factory.mktemp("any") / "a"
    if background:
        tr.save_async(path, tree).result()
    else:
        tr.save(path, tree)
    assert_same(tr.restore(path, like=tree, mmap=mmap), tree)
    assert_same(
        tr.restore(path, mmap=mmap),
        jax.tree.map(lambda x: x if _is_key(x) or not isinstance(x, jax.Array) else np.asarray(x), tree),
    )
    assert tr.verify(path).problems == ()


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
