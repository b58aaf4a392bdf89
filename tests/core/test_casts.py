"""Tests that a cast which loses values is an error wherever it is asked for, and that no other cast is."""

import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
import treering.orbax as ocp
from treering import rules
from treering._core import casts, dtypes
from treering.errors import MismatchError
from treering.testing._samples import DTYPES

KINDS = [name for name in DTYPES if name.startswith(("int", "uint", "float", "bfloat"))]
NUMBERS = [0, -0.0, 1, 6.5, 7, 7.7, 7.75, 29, 30, 127, 127.5, 128, 128.5, 129, 240, 255, 256, 448, 464, 465, 57344]
NUMBERS += [61440, 65504, 65519, 65520, 2**31 - 1, 2**31, 2**63 - 1024, 2**63, 2**64 - 2048, 2**64, 3.38e38, 3.4e38]
NUMBERS += [1e300, np.inf, np.nan, 1e-45, 1e-300]
LAST = {"float4_e2m1fn": 7, "float6_e2m3fn": 7.75, "float6_e3m2fn": 30}  # numbers from here on are not rounded down


def values_of(name: str) -> np.ndarray:
    """Returns all values of a dtype of one byte, and otherwise those at the ends of other dtypes."""
    dtype = dtypes.to_numpy(name)
    with np.errstate(all="ignore"):
        if dtypes.is_integer(dtype):
            ends = [2**bits + more for bits in range(64) for more in (-1, 0)]
            return np.array(sorted({n & (2**64 - 1) for n in ends}), np.uint64).astype(dtype)
        if dtype.itemsize == 1:
            bits = int(name[5]) if name.startswith(("float4", "float6")) else 8
            return np.arange(1 << bits, dtype=np.uint8).view(dtype)
        return np.array([sign * n for n in NUMBERS for sign in (1, -1)], np.float64).astype(dtype)


def is_lost(before: Any, after: Any, new: str) -> bool:
    """Returns True if a value is not kept, except that it is rounded."""
    if "float" not in new:
        return not np.isfinite(before) or int(before) != int(after)
    if new in LAST:
        return not abs(before) < LAST[new]
    return bool(np.isnan(after) and not np.isnan(before)) or bool(np.isinf(after) and np.isfinite(before))


@pytest.mark.parametrize("old", [*KINDS, "bool"])
def test_a_cast_fails_if_and_only_if_it_loses_a_value(old: str) -> None:
    every = np.array([False, True]) if old == "bool" else values_of(old)
    exact = int if dtypes.is_integer(every.dtype) else float
    for new in KINDS:
        dtype = dtypes.to_numpy(new)
        with np.errstate(all="ignore"):
            after = dtypes.convert(every, dtype)
        number = int if dtypes.is_integer(dtype) else float
        lost = np.array([is_lost(exact(a), number(b), new) for a, b in zip(every, after, strict=True)])
        assert casts.cast(every[~lost], dtype, "x").tobytes() == after[~lost].tobytes()
        if count := np.count_nonzero(lost):
            text = rf"^x: expected values that fit {new} \(.*\), found {count} of {len(every)} {old} values"
            with pytest.raises(MismatchError, match=text):
                casts.cast(every, dtype, "x")


def test_a_cast_counts_what_it_loses_in_any_layout() -> None:
    array = np.ones((700, 900), np.float32)
    array[1::2, 7] = 1e6
    array[0] = np.nan
    for one in (array, array.T, array[::-1, ::3][:, 2::1]):
        count = np.count_nonzero(one == 1e6)
        shown = rf"x: .*, found {count} of {one.size:,} float32 values that do not, such as 1e\+06" if count else None
        if shown is None:
            assert np.isnan(casts.cast(one, np.dtype("f2"), "x")).any()
            continue
        with pytest.raises(MismatchError, match=shown):
            casts.cast(one, np.dtype("f2"), "x")
    made = casts.cast(np.array([1e6, -np.inf, np.nan]), np.dtype("f4"), "x")
    assert np.array_equal(made, np.array([1e6, -np.inf, np.nan], np.float32), equal_nan=True)


@pytest.mark.parametrize("old", ["complex128", "complex64"])
def test_complex_numbers_keep_both_parts(old: str) -> None:
    for value in (1e300 + 1j, 1 - 1e300j) if old == "complex128" else (7e4 + 1j, 1 - 7e4j):
        new = "complex64" if old == "complex128" else "complex32"
        with pytest.raises(MismatchError, match=f"x: .*; use {old}(?m:$)"):
            casts.cast(np.array([1j, value], old), dtypes.to_numpy(new), "x")
    assert casts.cast(np.array([1 + 2j, np.inf], old), dtypes.to_numpy("bcomplex32"), "x").astype("c8")[0] == 1 + 2j


def test_casts_between_real_and_complex_numbers_lose_nothing(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"z": np.array([1 + 2j, 3]), "real": np.array([7, 8 + 0j]), "large": np.array([1e300, 1])})
    with pytest.raises(MismatchError, match=r"z: .* found 1 of 2 .* with an imaginary part; use") as caught:
        tr.restore(tmp_path / "c", rules=[rules.cast("z", "float32")])
    advice = re.search(r"before the cast: (.*)$", str(caught.value))
    assert advice
    made = tr.restore(tmp_path / "c", rules=[eval(advice[1]), rules.cast("z", "float32"), rules.cast("real", "int8")])
    assert made["z"].tolist() == [1, 3] and made["real"].tolist() == [7, 8]
    with pytest.raises(MismatchError, match=r"large: .*found 1 of 2 float64 values that do not, such as 1e\+300"):
        tr.restore(tmp_path / "c", rules=[rules.cast("large", "complex64")])


STATE = {
    "dense": {"kernel": jnp.array([1e6, 500.0, 2.0])},
    "large": np.array([[2.0, np.nan], [1e300, -np.inf]]),
    "half": jnp.array([99840, 1], jnp.bfloat16),
    "codes": np.array([300, -1]),
    "fine": jnp.array([-jnp.inf, jnp.nan, 65504.0]),
}
LOST = ("dense/kernel", "large", "half")


def narrow(of: Any = STATE) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, np.float16 if x.dtype != np.int64 else np.int8), of)


WAYS: dict[str, tuple[Callable[[pathlib.Path], Any], tuple[str, ...]]] = {
    "restore": (lambda at: tr.restore(at / "c", dtype="float16"), LOST),
    "template": (lambda at: tr.restore(at / "c", narrow(), dtype="template"), (*LOST, "codes")),
    "restore of a run": (lambda at: tr.Checkpointer(at / "run").restore(dtype="float16"), LOST),
    "rule": (lambda at: tr.open(at / "c").apply([rules.cast("codes", "int8")])["codes"][:1], ("codes",)),
    "restore with rules": (lambda at: tr.restore(at / "c", rules=[rules.cast("**", "int8")]), (*LOST, "codes", "fine")),
    "save": (lambda at: tr.save(at / "new", STATE, dtype="float16"), ("",)),
    "save_async": (lambda at: tr.save_async(at / "new", STATE, dtype="float16").result(), ("",)),
    "save with rules": (lambda at: tr.save(at / "new", STATE, rules=[rules.cast("half", "float16")]), ("half",)),
    "save of a checkpoint": (lambda at: tr.save(at / "new", tr.open(at / "c"), dtype="float16"), LOST),
    "save of a lazy array": (lambda at: tr.save(at / "new", {"x": tr.open(at / "c")["half"]}, dtype="f2"), ("x",)),
    "save as another format": (lambda at: tr.save(at / "new.safetensors", STATE, dtype="float16"), ("",)),
    **{
        f"convert to {name}": (lambda at, name=name: tr.convert(at / "c", at / f"new{name}", dtype="float16"), ("",))
        for name in (".safetensors", ".msgpack", "")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_cast_that_loses_values_names_the_leaves(name: str, tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", STATE)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, STATE)
    before = sorted(tmp_path.iterdir())
    way, paths = WAYS[name]
    with pytest.raises(MismatchError) as caught:
        way(tmp_path)
    named = set(re.findall(r"^ *([\w/]+): expected values", str(caught.value), re.MULTILINE))
    assert named == set(paths) if paths != ("",) else named and named <= set(LOST)
    assert sorted(tmp_path.iterdir()) == before


def test_the_advice_works_as_it_is_written(tmp_path: pathlib.Path) -> None:
    """The dtype that an error proposes takes the values, and the rules that it proposes clip them."""
    tr.save(tmp_path / "c", {**STATE, "small": np.array([-8, 7], "int4"), "whole": np.array([0.5, 1e9, np.nan], "f4")})
    for path, dtype in [
        *((path, dtype) for path in LOST for dtype in ("float16", "float8_e4m3fn", "float4_e2m1fn", "int8")),
        ("large", "float32"), ("large", "bfloat16"), ("codes", "int8"),
        ("codes", "float8_e8m0fnu"), ("small", "int2"), ("small", "float4_e2m1fn"), ("whole", "int4"),
        ("fine", "float8_e4m3fn"), ("fine", "int32"),
    ]:  # fmt: skip
        with pytest.raises(MismatchError) as caught:
            tr.restore(tmp_path / "c", rules=[rules.cast(path, dtype)])
        found = re.search(r"; use (\w+), or clip them with rules before the cast: (\[.*\])$", str(caught.value), re.M)
        assert found, str(caught.value)
        wide = tr.restore(tmp_path / "c", rules=[rules.cast(path, found[1])])
        clipped = tr.restore(tmp_path / "c", rules=[*eval(found[2]), rules.cast(path, dtype)])
        for name in path.split("/"):
            wide, clipped = wide[name], clipped[name]
        assert clipped.dtype.name == dtype and np.isfinite(np.asarray(wide, np.float64)).any()


def test_a_scale_never_overflows_in_silence(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"w": np.array([400, 2], "float8_e4m3fn"), "s": np.float32(1e3), "t": np.float32(3e38)})
    with pytest.raises(MismatchError, match=r"w: expected values that fit float16 .* as 384000; use bfloat16(?m:$)"):
        tr.restore(tmp_path / "c", rules=[rules.drop("t"), rules.scale("w", "s", "float16")])
    with pytest.raises(MismatchError, match="w: expected products with t within float32"):
        tr.restore(tmp_path / "c", rules=[rules.drop("s"), rules.scale("w", "t", "float64")])


@pytest.mark.long
def test_the_command_line_names_the_leaf(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", STATE)
    command = [
        sys.executable,
        "-m",
        "treering",
        "convert",
        tmp_path / "c",
        tmp_path / "x.msgpack",
        "--dtype",
        "float16",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 3 and "dense/kernel: expected values that fit float16" in done.stderr
    assert "rules" not in done.stderr and not (tmp_path / "x.msgpack").exists()


def test_the_adapter_refuses_what_a_dtype_lacks(tmp_path: pathlib.Path) -> None:
    saver = ocp.PyTreeCheckpointer()
    for leaf in (STATE["large"], STATE["dense"]["kernel"], 1e300):
        with pytest.raises(MismatchError, match=r"w: expected values that fit float16 .*; use "):
            saver.save(tmp_path / "a", {"w": leaf}, save_args={"w": ocp.SaveArgs(dtype=jnp.float16)})
    with pytest.raises(MismatchError, match="w: expected real numbers for float32, found 1 of 1 complex64 values"):
        saver.save(tmp_path / "a", {"w": jnp.array([1 + 2j])}, save_args={"w": ocp.SaveArgs(dtype=jnp.float32)})
    assert not (tmp_path / "a").exists()
    saver.save(tmp_path / "a", {"w": STATE["dense"]["kernel"]}, save_args={"w": ocp.SaveArgs(dtype=jnp.bfloat16)})
    with pytest.raises(MismatchError, match="w: expected values that fit float16"):
        saver.restore(tmp_path / "a", restore_args={"w": ocp.ArrayRestoreArgs(dtype=jnp.float16)})
