"""Compares rules with NumPy: each box of a rule's result is the same part of the array that NumPy makes."""

import inspect
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import treering as tr
from helpers import assert_same
from treering import rules
from treering._core import leaf_paths, views, views_groups
from treering._core.entries import ArrayEntry
from treering.errors import CorruptError, MismatchError, UnsupportedError


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("rules") / "c"
    tr.save(path, tree())
    return path


def tree() -> dict[str, Any]:
    kernels = {str(n): {"kernel": numbers(3, 4, start=12 * n), "bias": numbers(4, start=n)} for n in range(11)}
    return {
        "layers": kernels,
        "attention": {"qkv": numbers(2, 12), "out": numbers(6, 2)},
        "embed": numbers(5, 6).astype(ml_dtypes.bfloat16),
        "key": jax.random.key(1),
        "step": 3,
        "nothing": None,
    }


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


CASES: dict[str, tuple[rules.Rule, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "rename": (
        rules.rename(r"^layers/(\d+)/", r"blocks/block_\1/"),
        lambda t: {f"blocks/block_{n}/{k}": v for n, layer in t["layers"].items() for k, v in layer.items()},
    ),
    "drop": (rules.drop("layers/**"), lambda t: {"embed": t["embed"]}),
    "copy": (rules.copy("attention", "other/deep"), lambda t: {"other/deep/qkv": t["attention"]["qkv"]}),
    "copy a leaf": (rules.copy("embed", "head"), lambda t: {"head": t["embed"], "embed": t["embed"]}),
    "cast": (rules.cast("layers/*/bias", np.int16), lambda t: {"layers/3/bias": t["layers"]["3"]["bias"].astype("i2")}),
    "transpose": (rules.transpose("attention/*", (-1, 0)), lambda t: {"attention/out": t["attention"]["out"].T}),
    "reshape": (rules.reshape("embed", (3, -1, 1)), lambda t: {"embed": t["embed"].reshape(3, 10, 1)}),
    "stack": (
        rules.stack("layers/*/**"),
        lambda t: {"layers/kernel": np.stack([t["layers"][str(n)]["kernel"] for n in range(11)])},
    ),
    "stack at the end": (
        rules.stack("layers/*/kernel", axis=-1),
        lambda t: {"layers/kernel": np.stack([t["layers"][str(n)]["kernel"] for n in range(11)], -1)},
    ),
    "unstack": (
        rules.unstack("attention/*/q?v", axis=1),
        lambda t: {f"attention/{n}/qkv": t["attention"]["qkv"][:, n] for n in range(12)},
    ),
    "split": (
        rules.split(r"(.*)/qkv", [r"\1/q", r"\1/k", r"\1/v"], axis=1),
        lambda t: {
            f"attention/{x}": part for x, part in zip("qkv", np.split(t["attention"]["qkv"], 3, 1), strict=True)
        },
    ),
    "split in sizes": (
        rules.split(r"(.*)/qkv", [r"\1/q", r"\1/kv"], axis=-1, sizes=(4, 8)),
        lambda t: {"attention/q": t["attention"]["qkv"][:, :4], "attention/kv": t["attention"]["qkv"][:, 4:]},
    ),
    "concat": (
        rules.concat([r"layers/(0)/kernel", r"layers/1(0)/kernel"], r"both/\1"),
        lambda t: {"both/0": np.concatenate([t["layers"]["0"]["kernel"], t["layers"]["10"]["kernel"]])},
    ),
    "tile": (
        rules.tile("attention/*", (3, 2, 1)),
        lambda t: {"attention/qkv": np.tile(t["attention"]["qkv"], (3, 2, 1))},
    ),
    "tile the last axis": (rules.tile("embed", 2), lambda t: {"embed": np.tile(t["embed"], 2)}),
    "pad": (
        rules.pad("attention/qkv", ((0, 1), (4, 0)), -1),
        lambda t: {"attention/qkv": np.pad(t["attention"]["qkv"], ((0, 1), (4, 0)), constant_values=-1)},
    ),
    "scale": (
        rules.scale("layers/1(0)/kernel", r"layers/\1/kernel", "float16"),
        lambda t: {"layers/10/kernel": (t["layers"]["10"]["kernel"] * t["layers"]["0"]["kernel"]).astype("f2")},
    ),
    "take": (rules.take("attention/*", 1), lambda t: {f"attention/{x}": t["attention"][x][1] for x in ("qkv", "out")}),
    "take the last of an axis": (rules.take("embed", -1, axis=-1), lambda t: {"embed": t["embed"][:, -1]}),
    "combine": (
        rules.combine(["embed", "attention/out"], "both", lambda a, b: b @ b.T * a[0], shape=(6, 6), dtype="float32"),
        lambda t: {"both": t["attention"]["out"] @ t["attention"]["out"].T * t["embed"][0]},
    ),
    "map": (rules.map("embed", lambda x: x[::-1]), lambda t: {"embed": t["embed"][::-1]}),
    "map to a shape": (rules.map("embed", lambda x: x.sum(0), shape=(6,)), lambda t: {"embed": t["embed"].sum(0)}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_rule_makes_is_what_numpy_makes(layers: pathlib.Path, name: str) -> None:
    rule, expected = CASES[name]
    view = tr.open(layers).apply([rule])
    for path, array in expected(tree()).items():
        assert view[path].shape == array.shape and view[path].dtype == array.dtype
        found = np.asarray(view[path])
        assert found.dtype == array.dtype and found.tobytes() == np.ascontiguousarray(array).tobytes(), path


@pytest.mark.parametrize("name", CASES)
def test_rules_change_what_is_converted_and_saved(layers: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    rule, expected = CASES[name]
    state = tree()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(state["attention"], jax.NamedSharding(mesh, jax.P("x")))
    tr.convert(layers, tmp_path / "converted", rules=[rule])
    tr.save(tmp_path / "saved", state, rules=[rule])
    tr.save(tmp_path / "spread", {**state, "attention": spread}, rules=[rule])
    assert not tr.diff(tmp_path / "converted", tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "spread"):
        for leaf, array in expected(state).items():
            assert_same(np.asarray(tr.open(path)[leaf]), np.ascontiguousarray(array))


def test_every_rule_reads_boxes_as_numpy_does(layers: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    for rule, expected in CASES.values():
        view = tr.open(layers).apply([rule])
        for path, array in expected(tree()).items():
            for _ in range(10):
                ends = [sorted(rng.integers(0, size + 1, 2)) for size in array.shape]
                box = tuple(slice(int(a), int(b)) for a, b in ends)
                assert view[path][box].tobytes() == np.ascontiguousarray(array[box]).tobytes(), (path, box)


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_boxes_of_reshaped_and_transposed_arrays(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    array = numbers(*shape)
    entry = ArrayEntry("x", "numpy", "float32", shape)
    looks: list[int] = []

    class Memory:
        def read(self, wanted: Any, **options: Any) -> list[np.ndarray]:
            found = [array[tuple(slice(*ends) for ends in box)] for _, box in wanted]
            looks.extend(part.size for part in found)
            return found

    leaf, expected = views.plain_leaves({"x": entry})["x"], array
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            axes = data.draw(st.permutations(range(expected.ndim)))
            leaf, expected = views.transposed(leaf, axes), expected.transpose(axes)
        else:
            factors = data.draw(st.permutations([*expected.shape, 1]))
            merged = list(factors)
            if len(merged) > 1 and data.draw(st.booleans()):
                merged = [merged[0] * merged[1], *merged[2:]]
            leaf, expected = views_groups.reshaped(leaf, tuple(merged)), expected.reshape(merged)
    box = tuple((a, data.draw(st.integers(a, n))) for n in expected.shape for a in [data.draw(st.integers(0, n))])
    plan = leaf.plan_of(box)
    found = plan.make(Memory().read(plan.needs))
    assert found.tobytes() == np.ascontiguousarray(expected[tuple(slice(*ends) for ends in box)]).tobytes()
    assert sum(looks) <= array.size


def test_a_part_of_reshaped_layers_reads_itself_alone() -> None:
    found = views.plain_leaves({f"{n}": ArrayEntry(f"{n}", "numpy", "float32", (12, 8)) for n in range(3)})
    stacked = views.transposed(views_groups.stacked(list(found.values()), "x", 0), (0, 2, 1))
    split = views_groups.reshaped(stacked, (3, 2, 4, 4, 1, 3))
    for box, rows in {
        ((0, 3), (0, 2), (0, 4), (1, 3), (0, 1), (0, 3)): (
            (3, 9),
            (0, 8),
        ),  # a box along the first part of an axis that was split
        ((0, 3), (1, 2), (0, 4), (0, 4), (0, 1), (0, 3)): ((0, 12), (4, 8)),  # and another, transposed
        ((0, 3), (1, 2), (0, 4), (2, 3), (0, 1), (1, 2)): ((7, 8), (4, 8)),
        ((0, 3), (0, 2), (1, 3), (2, 3), (0, 1), (0, 3)): ((6, 9), (1, 7)),  # along its second: between the ends
    }.items():
        assert [(entry.path, part) for entry, part in split.plan_of(box).needs] == [(str(n), rows) for n in range(3)]
    assert split.plan_of(((0, 0), *((0, n) for n in (2, 4, 4, 1, 3)))).needs == []


class Memory:
    """A source that reads arrays from memory, and counts the elements that are read of each."""

    def __init__(self, **arrays: np.ndarray):
        self.arrays, self.looks = arrays, dict.fromkeys(arrays, 0)

    def leaves(self) -> dict[str, views.Leaf]:
        entries = {
            name: ArrayEntry(name, "numpy", tr._core.dtypes.to_text(array.dtype), array.shape)
            for name, array in self.arrays.items()
        }
        return views.plain_leaves(entries)

    def read(self, leaf: views.Leaf, box: Any) -> np.ndarray:
        plan = leaf.plan_of(box)
        found: list[np.ndarray] = []
        for entry, own in plan.needs:
            assert all(0 <= a <= b <= n for (a, b), n in zip(own, entry.shape, strict=True))
            found.append(self.arrays[entry.path][tuple(slice(*ends) for ends in own)])
            self.looks[entry.path] += found[-1].size
        return plan.make(found)


DTYPES = ["float32", "int16", "bool", "bfloat16", "float8_e4m3fn", "int4", "complex64", "<U3"]


def drawn(data: st.DataObject, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    bits = data.draw(st.binary(min_size=1, max_size=40))
    values = np.resize(np.frombuffer(bits, np.uint8) % 8, shape)
    return values.astype(np.float32).astype(ml_dtypes.int4 if dtype == "int4" else dtype)


def drawn_box(data: st.DataObject, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((a, data.draw(st.integers(a, n))) for n in shape for a in [data.draw(st.integers(0, n))])


def part_of(array: np.ndarray, box: Any) -> bytes:
    return np.ascontiguousarray(array[tuple(slice(*ends) for ends in box)]).tobytes()


@pytest.mark.long
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_boxes_of_tiled_and_padded_arrays(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    array = drawn(data, shape, data.draw(st.sampled_from(DTYPES)))
    memory = Memory(x=array)
    leaves, expected = memory.leaves(), array
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            repeats = data.draw(st.integers(1, 3) | st.lists(st.integers(1, 3), max_size=3))
            rule, expected = rules.tile("x", repeats), np.tile(expected, repeats)
        else:
            widths = data.draw(
                st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=expected.ndim, max_size=expected.ndim)
            )
            value = data.draw(st.sampled_from(["", "ab"] if array.dtype.kind == "U" else [0, 1]))
            filled = np.full([a + n + b for (a, b), n in zip(widths, expected.shape, strict=True)], value, array.dtype)
            inside = tuple(slice(a, a + n) for (a, _), n in zip(widths, expected.shape, strict=True))
            filled[inside] = expected
            if array.dtype.kind not in "UV":
                assert expected.ndim == 0 or (filled == np.pad(expected, widths, constant_values=value)).all()
            rule, expected = rules.pad("x", widths, value), filled
        leaves = rule.apply(leaves)
    assert leaves["x"].array.shape == expected.shape
    box = drawn_box(data, expected.shape)
    assert memory.read(leaves["x"], box).tobytes() == part_of(expected, box)
    assert memory.looks["x"] <= array.size


@pytest.mark.parametrize(
    ("dtype", "taken", "refused"),
    [
        ("int8", [-128, 5.0, True, np.uint64(7)], [128, 0.5, np.nan, 2**70, None, "1"]),
        ("uint64", [2**64 - 1], [-1, 2**64, -0.5]),
        ("int4", [-8, 7], [8, -9]),
        ("bool", [0, True, 1.0], [2, -1, np.nan]),
        ("float16", [65504, -np.inf, np.nan, 2**-24], [65505, 1e6, 1e-9]),
        ("bfloat16", [np.float32(-1.5), jax.numpy.float32(3), ml_dtypes.bfloat16(0.1)], [0.1, -1e9, 257]),
        ("float32", [2**24, 1e30 * 0, np.float32(0.1)], [2**24 + 1, 1e39]),
        ("float64", [0.1, 2**53], [2**53 + 1]),
        ("float8_e4m3fn", [448, np.nan], [np.inf, 449, 1000]),
        ("float8_e8m0fnu", [1, 2.0**-127], [0, -1, 3]),
        ("float4_e2m1fn", [6, -0.5], [7, 100, np.inf, np.nan]),
        ("complex64", [1j, 2, np.nan], [0.1j, 2**24 + 1]),
        ("<U2", ["ab", ""], [0, "abc"]),
        (
            "datetime64[D]",
            [np.datetime64("2024-01-01"), np.datetime64("NaT", "D")],
            [0, np.datetime64("2024-01-01T12")],
        ),
    ],
)
def test_arrays_are_padded_with_values_that_they_can_hold(dtype: str, taken: list[Any], refused: list[Any]) -> None:
    memory = Memory(x=np.zeros(1, tr._core.dtypes.to_numpy(dtype)))
    for value in taken:
        found = memory.read(rules.pad("x", [(0, 1)], value).apply(memory.leaves())["x"], ((1, 2),))
        assert found.dtype == memory.arrays["x"].dtype
        assert found[0] == value or (found[0] != found[0] and value != value)
    for value in refused:
        with pytest.raises(MismatchError, match=r"pad\('x', .*: x is .* in which .* (would|cannot) be"):
            rules.pad("x", [(0, 1)], value).apply(memory.leaves())


def test_a_part_of_tiled_and_padded_arrays_reads_itself_alone() -> None:
    memory = Memory(x=numbers(6, 8))
    tiled = rules.tile("x", (3, 2, 1)).apply(memory.leaves())["x"]
    padded = rules.pad("x", ((2, 4), (0, 8))).apply(memory.leaves())["x"]
    for leaf, box, own in [
        (tiled, ((1, 2), (0, 6), (2, 4)), [((0, 6), (2, 4))]),
        (tiled, ((0, 3), (7, 10), (0, 8)), [((1, 4), (0, 8))]),
        (tiled, ((0, 3), (6, 12), (0, 8)), [((0, 6), (0, 8))]),
        (tiled, ((0, 0), (6, 12), (0, 8)), []),
        (padded, ((0, 3), (0, 4)), [((0, 1), (0, 4))]),
        (padded, ((3, 5), (6, 16)), [((1, 3), (6, 8))]),
        (padded, ((8, 12), (0, 8)), []),
    ]:
        assert [part[-2:] for _, part in leaf.plan_of(box).needs] == own


def expanded(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
    """Returns a scale for each element."""
    for axis, (size, count) in enumerate(zip(shape, block, strict=True)):
        scales = np.repeat(scales, count, axis)[(slice(None),) * axis + (slice(size),)]
    return scales


QUANTIZED = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8", "uint8", "int4", "int16", "bfloat16", "float32"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@settings(deadline=None, max_examples=400)
@given(st.data())
def test_boxes_of_scaled_arrays(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))

    def bits(shape: tuple[int, ...], name: str) -> np.ndarray:
        dtype = tr._core.dtypes.to_numpy(name)
        raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        return (raw[..., 0] & 15).astype(dtype) if name == "int4" else raw.view(dtype).reshape(shape)

    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    block = tuple(data.draw(st.sampled_from([1, 2, 4, max(size, 1), 128])) for size in shape)
    weight = bits(shape, data.draw(st.sampled_from(QUANTIZED)))
    counts = tuple(-(-size // count) for size, count in zip(shape, block, strict=True))
    scales = bits(counts, data.draw(st.sampled_from(["float32", "bfloat16", "float16", "float8_e8m0fnu"])))
    dtype = data.draw(st.sampled_from(["bfloat16", "float32", "float16", "float64", "float8_e4m3fn"]))
    plain = all(count in (1, size) for count, size in zip(counts, shape, strict=True))
    stored = scales.reshape(data.draw(st.sampled_from([(), (1,), (1, 1)]))) if scales.size == 1 and plain else scales
    memory = Memory(w=weight, s=stored)
    rule = rules.scale("w", "s", dtype, None if plain and data.draw(st.booleans()) else block)
    if stored.shape != scales.shape:
        rule = rules.scale("w", "s", dtype)
    made = rule.apply(memory.leaves())
    with np.errstate(all="ignore"):
        factors = expanded(scales.astype(np.float32), shape, block)
        expected = (weight.astype(np.float32) * factors).astype(tr._core.dtypes.to_numpy(dtype))
    assert list(made) == ["w"]
    assert (made["w"].array.dtype, made["w"].array.shape) == (dtype, shape)
    box = drawn_box(data, shape)
    with np.errstate(all="ignore"):
        exact = weight.astype(np.float64) * expanded(scales.astype(np.float64), shape, block)
    inside = tuple(slice(*ends) for ends in box)
    # A finite product that becomes an infinity or NaN is an error, and so is an infinity in a dtype that has none.
    if (np.isfinite(exact) & ~np.isfinite(expected) | (np.isinf(exact) & np.isnan(expected)))[inside].any():
        with pytest.raises(MismatchError, match=r"^w: expected"):
            memory.read(made["w"], box)
        return
    found = memory.read(made["w"], box)
    wanted = np.frombuffer(part_of(expected, box), found.dtype).reshape(found.shape)
    # The processor instructions that NumPy uses decide which of two NaNs gives a product its bits.
    numbers = ~np.isnan(found.astype(np.float64))
    assert np.array_equal(numbers, ~np.isnan(wanted.astype(np.float64)))
    assert found[numbers].tobytes() == wanted[numbers].tobytes()
    cells = [len(range(a // n, -(-b // n))) for (a, b), n in zip(box, block, strict=True)]
    empty = any(a == b for a, b in box)
    assert memory.looks["w"] == np.prod([b - a for a, b in box], dtype=int)
    assert memory.looks["s"] == (0 if empty else np.prod(cells, dtype=int))


def test_scaled_values_are_rounded_to_float32_and_once_more() -> None:
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    every = every[np.isfinite(every.astype(np.float32))]
    scales = np.random.default_rng(0).integers(0, 2**31, 4000, np.uint32).view(np.float32)
    scales = scales[scales < 1e35][:, None]  # with subnormal ones, and those whose products are
    memory = Memory(w=np.broadcast_to(every, (len(scales), len(every))), s=scales)
    exact = every.astype(np.float64) * scales  # 4 bits times 24
    for dtype in ("float32", "bfloat16"):
        found = memory.read(
            rules.scale("w", "s", dtype).apply(memory.leaves())["w"], ((0, len(scales)), (0, every.size))
        )
        bits = exact.astype(np.float32).view(np.uint32)
        if dtype == "bfloat16":
            bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
        assert (found.view(bits.dtype) == bits).all()


@pytest.fixture
def quantized(tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[str, np.ndarray]]:
    """Writes a file with quantized weights like those of DeepSeek, and returns it with the scaled weights."""
    rng = np.random.default_rng(0)
    stored, expected = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for n, shape in enumerate([(512, 256), (576, 384), (256, 200)]):
        path = f"layers.{n}"
        weight = rng.standard_normal(shape, np.float32).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.random([-(-size // 128) for size in shape], np.float32) / 448
        norm = rng.standard_normal(shape[0], np.float32).astype(ml_dtypes.bfloat16)
        stored |= {f"{path}.weight": weight, f"{path}.weight_scale_inv": scales, f"{path}.norm.weight": norm}
        product = weight.astype(np.float32) * expanded(scales, shape, (128, 128))
        expected |= {f"{path}.weight": product.astype(ml_dtypes.bfloat16), f"{path}.norm.weight": norm}
    save_file(stored, tmp_path / "fp8.safetensors")
    return tmp_path / "fp8.safetensors", dict(sorted(expected.items()))


SCALE = rules.scale(r"(.*)\.weight", r"\1.weight_scale_inv", "bfloat16", block=(128, 128))


def test_weights_with_a_scale_for_each_block_of_128(quantized: Any, tmp_path: pathlib.Path) -> None:
    path, expected = quantized
    assert_same(tr.restore(path, rules=[SCALE]), expected)
    tr.convert(path, tmp_path / "bf16.safetensors", rules=[SCALE])
    assert_same(tr.restore(tmp_path / "bf16.safetensors"), expected)
    tr.save(tmp_path / "live", tr.restore(path), rules=[SCALE])
    assert_same(tr.restore(tmp_path / "live"), expected)
    view = tr.open(path).apply([SCALE])
    assert sorted(view) == sorted(expected)
    assert view["layers.1.weight"][500:, 100:300].tobytes() == part_of(
        expected["layers.1.weight"], ((500, 576), (100, 300))
    )


@pytest.mark.parametrize(
    ("rule", "most", "make"),
    [
        (SCALE, {"layers.0.weight": 64 * 256, "layers.0.weight_scale_inv": 2}, lambda w: w),
        (
            rules.dequantize("layers.0.*", "bfloat16"),
            {"layers.0.weight": 64 * 256, "layers.0.weight_scale_inv": 2},
            lambda w: w,
        ),
        (rules.tile("layers.0.norm.weight", (8, 3)), {"layers.0.norm.weight": 512}, lambda w: np.tile(w, (8, 3))),
        (
            rules.pad("layers.0.norm.weight", [(512, 1024)], -1),
            {"layers.0.norm.weight": 256},
            lambda w: np.concatenate([np.full(512, -1, w.dtype), w, np.full(1024, -1, w.dtype)]),
        ),
    ],
    ids=["scale", "dequantize", "tile", "pad"],
)
def test_each_of_eight_devices_reads_its_part(
    quantized: Any, rule: rules.Rule, most: dict[str, int], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = quantized
    name = next(iter(most))
    array = make(expected[name])
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh, jax.P("x"))
    ckpt = tr.open(path)
    reads: list[tuple[str, int]] = []
    read = ckpt._source.read

    def counted(wanted: Any, **options: Any) -> Any:
        reads.extend((entry.path, int(np.prod(tr._core.boxes.box_shape(box), dtype=int))) for entry, box in wanted)
        return read(wanted, **options)

    monkeypatch.setattr(ckpt._source, "read", counted)
    like = {name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)}
    found = ckpt.restore(like, rules=[rule], extra="ignore")[name]
    assert found.sharding == where and len(found.addressable_shards) == 8
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(array[shard.index]).tobytes()
    assert {path for path, _ in reads} == set(most)
    assert {path: max(size for other, size in reads if other == path) for path in most} == most


def test_which_arrays_are_scaled(tmp_path: pathlib.Path) -> None:
    fp8 = numbers(4, 6).astype(ml_dtypes.float8_e4m3fn)
    one = np.float32(0.5)
    tree = {"a": {"w": fp8, "s": one}, "b": {"w": fp8, "s": numbers(4, 1)}, "norm": {"w": numbers(4)}, "step": 3}
    tr.save(tmp_path / "c", tree)
    found = tr.restore(tmp_path / "c", rules=[rules.scale("(.*)/w", r"\1/s", "float32")])
    values = fp8.astype(np.float32)
    expected = {"a": {"w": values / 2}, "b": {"w": values * numbers(4, 1)}, "norm": {"w": numbers(4)}}
    assert_same(found, {**expected, "step": 3})
    shared = [rules.drop("b/s"), rules.scale("[ab]/w", "a/s", "float32")]
    assert_same(tr.restore(tmp_path / "c", rules=shared)["b"], {"w": values / 2})
    twice = [rules.scale("b/s", "a/s", "float32"), rules.scale("b/w", "b/s", "float32")]
    found = tr.restore(tmp_path / "c", rules=[rules.copy("a/s", "c"), *twice, rules.rename("^c$", "a/s")])
    assert_same(found["b"], {"w": values * (numbers(4, 1) / 2)})
    for changes, message in [
        ([rules.drop("a/s")], "a/w has one byte per element, and there is no a/s to scale it by"),
        ([rules.drop("*/s")], r"scale\('\(\.\*\)/w', .*matches none of the 4 leaves"),
        ([rules.copy("step", "norm/s")], "norm/s is not an array but a int"),
        ([rules.cast("b/s", "float64")], "b/s is float64, which float32 cannot hold exactly; cast it before"),
        ([rules.cast("b/w", "int32")], "b/w is int32, which float32 cannot hold exactly"),
        ([rules.cast("a/s", "complex64")], "a/s is complex64, which float32 cannot hold exactly"),
        ([rules.reshape("b/s", (4,))], r"b/w has the shape \[4, 6\] and its scale, b/s, \[4\]; expected one scale, or"),
        ([rules.tile("b/s", 3)], r"b/w has the shape \[4, 6\] and its scale, b/s, \[4, 3\]"),
    ]:
        with pytest.raises(MismatchError, match=message):
            tr.open(tmp_path / "c").apply([*changes, rules.scale("(.*)/w", r"\1/s", "float32")])
    for rule, message in [
        (lambda: rules.scale("b/w", "b/s", "float32", block=(2, 6)), r"a scale for each block of \[2, 6\]"),
        (lambda: rules.scale("b/w", "b/s", "float32", block=(2,)), r"a scale for each block of \[2\]"),
        (lambda: rules.scale("b/w", "b/s", "float32", block=(0, 6)), "an integer for each axis, at least 1"),
        (lambda: rules.scale("b/w", "b/s", "int8"), "expected a floating-point dtype, found 'int8'"),
        (lambda: rules.scale("b/w", r"\1", "float32"), "does not fit the pattern"),
        (lambda: rules.scale("(", "s", "float32"), "is not a regular expression"),
        (
            lambda: rules.scale("b/.", "b/s", "float32"),
            "b/s is a scale, and has the scale b/s; choose a narrower pattern",
        ),
    ]:
        with pytest.raises(MismatchError, match=message):
            tr.open(tmp_path / "c").apply([rule()])


def test_keys_are_not_scaled(layers: pathlib.Path) -> None:
    with pytest.raises(MismatchError, match="key is an array of PRNG keys"):
        tr.open(layers).apply([rules.copy("layers/0/bias", "s"), rules.scale("key", "s", "float32")])


def test_combine_function_gets_complete_arrays(layers: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def product(kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
        kernel *= bias  # its own
        return kernel.sum(0, dtype=np.float64)

    change = rules.combine(
        [r"layers/(\d+)/kernel", r"layers/(\d+)/bias"], r"sums/\1", product, shape=(4,), dtype="float64"
    )
    expected = {n: (x["kernel"] * x["bias"]).sum(0, dtype=np.float64) for n, x in tree()["layers"].items()}
    state = tree()
    others = {name: value for name, value in state.items() if name != "layers"}
    tr.save(tmp_path / "live", state, rules=[change])
    tr.convert(layers, tmp_path / "there", rules=[change])
    for path, changes in [(layers, [change]), (tmp_path / "live", []), (tmp_path / "there", [])]:
        found = tr.restore(path, {**others, "sums": expected}, rules=changes)
        assert_same(found, {**others, "sums": expected})
    assert_same(state["layers"], tree()["layers"])
    assert tr.open(layers).apply([change])["sums/3"][1:3].tobytes() == expected["3"][1:3].tobytes()
    for rule, message in [
        (rules.combine(["embed", "lacking"], "x", product), "combine.*: nothing matches 'lacking' for x"),
        (rules.combine(["lacking"], "x", product), "matches none of the 28 leaves"),
        (rules.combine(["embed", "step"], "x", product), "step is not an array but a int"),
        (rules.combine(["key"], "x", product), "PRNG keys"),
        (
            rules.combine([r"layers/\d+/bias"], "x", product),
            "layers/1/bias and layers/0/bias would both be part 0 of x",
        ),
        (rules.combine([r"embed"], "step", product), "two leaves would be called 'step'"),
    ]:
        with pytest.raises(MismatchError, match=message):
            tr.open(layers).apply([rule])
    with pytest.raises(MismatchError, match=r"combine.*expected a dtype, such as bfloat16 or int8, found 'float99'"):
        rules.combine(["embed"], "x", product, dtype="float99")
    wrong = tr.open(layers).apply([rules.combine(["layers/0/kernel", "layers/0/bias"], "x", product)])
    with pytest.raises(
        MismatchError, match=r"x: expected float32\[3, 4\] .*, found float64\[4\]; pass shape= and dtype="
    ):
        np.asarray(wrong["x"])


def test_rules_are_applied_in_order_and_back_again(layers: pathlib.Path, tmp_path: pathlib.Path) -> None:
    there = [
        rules.split(r"attention/qkv", ["attention/q", "attention/k", "attention/v"], axis=1),
        rules.stack("layers/*/**"),
        rules.transpose("layers/kernel", (0, 2, 1)),
        rules.rename("^layers/", "scanned/"),
    ]
    back = [
        rules.rename("^scanned/", "layers/"),
        rules.transpose("layers/kernel", (0, 2, 1)),
        rules.unstack("layers/*/**"),
        rules.concat(["attention/q", "attention/k", "attention/v"], "attention/qkv", axis=1),
    ]
    tr.convert(layers, tmp_path / "there", rules=there)
    assert tr.open(tmp_path / "there")["scanned/kernel"].shape == (11, 4, 3)
    tr.convert(tmp_path / "there", tmp_path / "back", rules=back)
    assert not tr.diff(layers, tmp_path / "back")
    state = tree()
    assert_same(tr.restore(tmp_path / "there", state, rules=back), state)
    # The same when a live tree is saved, in the background, and below a path.
    for n, save in enumerate((tr.save, lambda *a, **k: tr.save_async(*a, **k).result())):
        save(tmp_path / f"live-{n}", state, rules=there)
        assert not tr.diff(tmp_path / "there", tmp_path / f"live-{n}")
    part = tr.restore(layers, at="layers", rules=[rules.stack("*/bias"), rules.drop("*/kernel")])
    assert list(part) == ["bias"] and part["bias"].shape == (11, 4)


def test_rules_and_shardings(layers: pathlib.Path) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh, jax.P(None, "x"))
    like = {"layers": {"kernel": jax.ShapeDtypeStruct((11, 4, 3), np.float32, sharding=where)}}
    changes = [rules.stack("layers/*/kernel"), rules.transpose("layers/kernel", (0, 2, 1))]
    found = tr.restore(layers, like, rules=changes, extra="ignore")
    expected = np.stack([tree()["layers"][str(n)]["kernel"].T for n in range(11)])
    for shard in found["layers"]["kernel"].addressable_shards:
        assert (np.asarray(shard.data) == expected[shard.index]).all()
    assert found["layers"]["kernel"].sharding == where


@pytest.mark.parametrize("name", ["a~b", "~", "a~2/b", "a~1b/~0", "x/~/y"])
@pytest.mark.parametrize("rule", [rules.rename, rules.copy])
def test_a_new_name_may_be_given_as_people_write_it(tmp_path: pathlib.Path, rule: Any, name: str) -> None:
    tr.save(tmp_path / "a", {"w": 1, "v": 2}, rules=[rule("w", name)])
    (found,) = set(tr.open(tmp_path / "a")) - {"w", "v"}
    assert leaf_paths.split(found) == leaf_paths.split(name) and found == "/".join(
        map(leaf_paths.key_text, leaf_paths.split(name))
    )
    assert tr.open(tmp_path / "a")[name] == 1 == tr.open(tmp_path / "a").apply([rules.rename(found, "w2")])["w2"]


def test_what_a_rule_copies_are_two_arrays(layers: pathlib.Path) -> None:
    found = tr.restore(layers, rules=[rules.copy("attention/qkv", "again")])
    found["again"][:] = 0
    assert (found["attention"]["qkv"] == tree()["attention"]["qkv"]).all()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: [rules.rename("nowhere", "x")], "matches none of the 28 leaves"),
        (lambda: [rules.rename("(", "x")], "is not a regular expression"),
        (lambda: [rules.rename("embed", r"\1")], "does not fit the pattern"),
        (lambda: [rules.rename(r"layers/\d+/", "layers/")], "two leaves would be called 'layers/"),
        (lambda: [rules.transpose("embed", (0, 2))], "does not have the axes"),
        (lambda: [rules.reshape("embed", (7, -1))], r"\[5, 6\] cannot become \[7, -1\]"),
        (
            lambda: [rules.cast("embed", "float99")],
            "cast.*: expected a dtype, such as bfloat16 or int8, found 'float99'",
        ),
        (lambda: [rules.cast("embed", object)], "cast.*dtype object; pickled objects are never written"),
        (lambda: [rules.cast("step", "float32")], "step is not an array but a int"),
        (lambda: [rules.transpose("key", (0,))], r"key: an array of shape \[\] does not have the axes"),
        (lambda: [rules.reshape("key", (2,))], r"key: \[\] cannot become \[2\]"),
        (lambda: [rules.split("key", ["a", "b"])], "axis 0 of 0"),
        (lambda: [rules.unstack("*/key", -1)], "axis -1 of 0"),
        (lambda: [rules.cast("key", "int32")], "an array of PRNG keys, and this rule changes values"),
        (lambda: [rules.map("key", np.flip)], "an array of PRNG keys, and this rule changes values"),
        (lambda: [rules.stack("layers/**")], "expected a '\\*' at the place of the numbers"),
        (lambda: [rules.drop("layers/4/*"), rules.stack("layers/*/bias")], "with numbers from 0"),
        (lambda: [rules.split("attention/qkv", ["a", "b"], axis=1, sizes=(1, 2))], "has 12 along axis 1"),
        (lambda: [rules.split("embed", ["a", "b"], axis=2)], "axis 2 of 2"),
        (lambda: [rules.concat(["embed", "lacking"], "x")], "nothing matches 'lacking'"),
        (lambda: [rules.concat(["embed", "attention/out"], "x")], "arrays of one shape and dtype"),
        (
            lambda: [rules.tile("embed", (2, 0))],
            r"tile\('embed', \(2, 0\)\): expected an integer for each axis, at least 1",
        ),
        (lambda: [rules.tile("embed", (2.5,))], "expected an integer for each axis"),
        (lambda: [rules.tile("lacking", 2)], "matches none of the 28 leaves"),
        (lambda: [rules.tile("step", 2)], "step is not an array but a int"),
        (lambda: [rules.pad("embed", ((0, -1), (0, 0)))], "expected a pair of integers for each axis, at least 0"),
        (lambda: [rules.pad("embed", (1, 2))], "expected a pair of integers for each axis"),
        (lambda: [rules.pad("embed", ((1,), (1, 2)))], "expected a pair of integers for each axis"),
        (lambda: [rules.pad("embed", 2)], "expected a pair of integers for each axis"),
        (lambda: [rules.pad("embed", ((0, 1),))], r"embed of shape \[5, 6\] needs a pair for each axis"),
        (lambda: [rules.pad("embed", ((0, 1), (0, 0)), 0.1)], r"embed is bfloat16, in which 0.1 would be 0.10009"),
        (lambda: [rules.pad("embed", ((0, 1), (0, 0)), 1j)], r"embed is bfloat16, in which 1j cannot be"),
        (lambda: [rules.pad("embed", ((0, 1), (0, 0)), "a")], r"embed is bfloat16, in which 'a' cannot be"),
        (lambda: [rules.pad("embed", ((0, 1), (0, 0)), [1])], r"embed is bfloat16, in which \[1\] cannot be"),
        (lambda: [rules.pad("nothing", ((0, 1),))], "nothing is not an array but None"),
        (lambda: [rules.pad("key", ((0, 1),))], "an array of PRNG keys, and this rule changes values"),
        (lambda: [rules.take("embed", 5)], r"take\('embed', 5\): embed has 5 along axis 0, no index 5"),
        (lambda: [rules.take("embed", -6)], "has 5 along axis 0, no index -6"),
        (lambda: [rules.take("embed", 0, axis=2)], "axis 2 of 2"),
        (lambda: [rules.take("embed", 1.0)], "expected an integer, found 1.0"),
        (lambda: [rules.take("step", 0)], "step is not an array but a int"),
        (lambda: [rules.take("key", 0)], "axis 0 of 0"),
        (lambda: [rules.wrap_key_data("embed")], r"embed is bfloat16\[5,6\]; expected uint32 whose last axis has 2"),
        (lambda: [rules.wrap_key_data("key")], "an array of PRNG keys, and this rule changes values"),
        (lambda: ["rename"], "expected rules made by treering.rules"),
        (lambda: [rules.rename("a", 3)], "rename: expected text as new, found 3"),  # type: ignore[arg-type]
        (lambda: [rules.copy("a", 3)], "copy: expected text as dst, found 3"),  # type: ignore[arg-type]
        (lambda: [rules.stack(3)], "stack: expected text as glob, found 3"),  # type: ignore[arg-type]
        (lambda: [rules.concat(["a"], 3)], "concat: expected text as new, found 3"),  # type: ignore[arg-type]
        (lambda: [rules.drop(3)], r"drop\(3\): expected a glob or a list of them, found 3"),  # type: ignore[arg-type]
        (lambda: [rules.cast(3, "int8")], r"cast\(3, 'int8'\): expected a glob or a list"),  # type: ignore[arg-type]
        (lambda: [rules.dequantize(3)], r"dequantize\(3\): expected a glob or a list"),  # type: ignore[arg-type]
        (lambda: [rules.rename(["a"], "b")], r"\['a'\] is not a regular expression"),  # type: ignore[arg-type]
        (
            lambda: [rules.concat(r"layers/(\d+)/bias", "all")],
            r"concat\(…, 'all'\): expected a list of texts, found 'layers/.*; pass \['layers/",
        ),
        (lambda: [rules.concat({"embed", "step"}, "all")], "expected a list of texts, found {"),  # type: ignore[arg-type]
        (lambda: [rules.concat([b"embed"], "all")], "expected a list of texts, found"),  # type: ignore[list-item]
        (lambda: [rules.concat([], "all")], r"expected a list of texts, found \[\]"),
        (lambda: [rules.concat(None, "all")], "expected a list of texts, found None"),  # type: ignore[arg-type]
        (lambda: [rules.combine("embed", "all", np.add)], "combine.*expected a list of texts, found 'embed'"),
        (lambda: [rules.split("embed", "all")], "split.*expected a list of texts, found 'all'"),
        (lambda: [rules.split("embed", ["a", "b"], sizes="23")], "sizes='23': expected an integer for each axis"),  # type: ignore[arg-type]
        (
            lambda: [rules.transpose("embed", "10")],
            r"transpose\('embed', '10'\): expected an integer for each axis",
        ),  # type: ignore[arg-type]
        (lambda: [rules.transpose("embed", {1, 0})], "expected an integer for each axis"),  # type: ignore[arg-type]
        (lambda: [rules.reshape("embed", "30")], "expected an integer for each axis"),  # type: ignore[arg-type]
        (lambda: [rules.reshape("embed", -1)], "expected an integer for each axis"),  # type: ignore[arg-type]
        (lambda: [rules.map("embed", np.sum, shape="6")], "shape='6': expected an integer for each axis"),  # type: ignore[arg-type]
        (
            lambda: [rules.combine(["embed"], "all", np.sum, shape="6")],  # type: ignore[arg-type]
            "shape='6': expected an integer for each axis",
        ),
        (lambda: [rules.scale("embed", "step", "float32", block="22")], "expected an integer for each axis"),  # type: ignore[arg-type]
    ],
)
def test_a_rule_that_does_not_fit_says_so_at_once(layers: pathlib.Path, made: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        tr.open(layers).apply(made())


LAYERS_WITH_NONE = {
    "layers": [{"bias": None, "f": jax.nn.relu, "kernel": np.ones((2, 3))} for _ in range(2)],
    "norm": {"bias": None, "kernel": np.ones(3)},
}


@pytest.mark.parametrize(
    ("rule", "absent", "arrays"),
    [
        (rules.cast("**", "float16"), ["layers/0/bias", "layers/1/f"], ["layers/0/kernel", "norm/kernel"]),
        (rules.tile("layers/*/*", 2), ["layers/0/bias"], ["layers/0/kernel"]),
        (rules.map("**", lambda x: -x), ["norm/bias"], ["norm/kernel"]),
        (rules.stack("layers/*/**"), ["layers/bias", "layers/f"], ["layers/kernel"]),
        (rules.unstack("norm/*/**"), ["norm/0/bias", "norm/2/bias"], ["norm/0/kernel"]),
        (rules.split("layers/0/(.*)", [r"a/\1", r"b/\1"]), ["a/bias", "b/f"], ["a/kernel", "b/kernel"]),
        (rules.concat([r"layers/0/(.*)", r"layers/1/(.*)"], r"both/\1"), ["both/bias"], ["both/kernel"]),
        (rules.combine([r"layers/0/(.*)", r"layers/1/(.*)"], r"both/\1", np.add), ["both/f"], ["both/kernel"]),
        (rules.cast("*/bias", "float16", optional=True), ["norm/bias"], ["norm/kernel"]),
    ],
)
def test_rules_for_many_leaves_pass_over_none_and_functions(
    tmp_path: pathlib.Path, rule: rules.Rule, absent: list[str], arrays: list[str]
) -> None:
    tr.save(tmp_path / "c", LAYERS_WITH_NONE)
    changed = tr.open(tmp_path / "c").apply([rule])
    assert all(changed[path] is None for path in absent)
    assert all(changed[path][...].size for path in arrays)
    tr.save(tmp_path / "d", changed)
    assert dict(tr.open(tmp_path / "d")).keys() == dict(changed).keys()


@pytest.mark.parametrize(
    "rule",
    [
        rules.cast("norm/bias", "float16"),
        rules.cast("*/bias", "float16"),
        rules.unstack("*/norm/bias"),
        rules.split("norm/bias", ["a", "b"]),
        rules.concat(["layers/0/bias", "layers/1/bias"], "c"),
        rules.stack("layers/*/**", axis=0),
    ],
)
def test_rule_that_matches_none_is_refused(tmp_path: pathlib.Path, rule: rules.Rule) -> None:
    """A rule that names a None, or groups one with arrays, is an error."""
    tree = {**LAYERS_WITH_NONE, "layers": [*LAYERS_WITH_NONE["layers"], {"bias": np.ones(2)}]}
    tr.save(tmp_path / "c", tree)
    with pytest.raises(MismatchError, match="is not an array but None"):
        tr.open(tmp_path / "c").apply([rule])


@pytest.mark.parametrize("given", ["drop", None, iter([rules.drop("step")]), {rules.drop("step")}])
def test_rules_are_a_list(layers: pathlib.Path, tmp_path: pathlib.Path, given: Any) -> None:
    with pytest.raises(MismatchError, match="rules: expected a list of rules, found "):
        tr.open(layers).apply(given)
    for tree in ({"w": np.ones(2)}, tr.open(layers)):
        with pytest.raises(MismatchError, match="rules: expected a list of rules, found "):
            tr.save(tmp_path / "c", tree, rules=given)


def test_a_function_that_returns_something_else_is_found_out(layers: pathlib.Path) -> None:
    view = tr.open(layers).apply([rules.map("embed", lambda x: x.astype(np.float32)[:2])])
    with pytest.raises(MismatchError, match=r"bfloat16\[5, 6\] from the function of a rule, found float32\[2, 6\]"):
        np.asarray(view["embed"])


@pytest.mark.long
def test_what_a_function_changes_in_place_is_its_own(tmp_path: pathlib.Path) -> None:
    tree = {"x": numbers(3 << 20, 2)}  # more bytes than are written at a time

    def doubled(array: np.ndarray) -> np.ndarray:
        array *= 2
        return array

    for n, save in enumerate((tr.save, lambda *a, **k: tr.save_async(*a, **k).result())):
        save(tmp_path / f"{n}", tree, rules=[rules.map("x", doubled)])
        assert (tree["x"] == numbers(3 << 20, 2)).all()
        assert (tr.restore(tmp_path / f"{n}")["x"] == 2 * tree["x"]).all()


@pytest.mark.parametrize(
    "rule", [rules.reshape("x", (1,)), rules.map("x", lambda x: x[None], shape=(1,))], ids=["reshape", "map"]
)
def test_a_scalar_that_gets_axes_is_an_array(tmp_path: pathlib.Path, rule: rules.Rule) -> None:
    tr.save(tmp_path / "c", {"x": np.float32(3)}, rules=[rule])
    assert '"numpy","float32",[1]' in (tmp_path / "c" / "treering.json").read_text()
    assert_same(tr.restore(tmp_path / "c"), {"x": np.full(1, 3, np.float32)})
    assert_same(tr.restore(tmp_path / "c", rules=[rules.reshape("x", ())]), {"x": np.full((), 3, np.float32)})


@pytest.mark.long
def test_dtypes_of_rules_have_their_names_without_jax(layers: pathlib.Path) -> None:
    code = (
        "import sys, treering as tr\n"
        "assert not {'jax', 'ml_dtypes'} & set(sys.modules)\n"
        f"print(tr.open({str(layers)!r}).apply([tr.rules.cast('attention/*', 'bfloat16')]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "bfloat16[2,12]" in ran.stdout, ran.stderr


def test_optional_rules_may_match_nothing(layers: pathlib.Path) -> None:
    nothing = [
        rules.rename("x9", "y", optional=True),
        rules.drop("x9", optional=True),
        rules.copy("x9", "y", optional=True),
        rules.cast("x9", "int8", optional=True),
        rules.stack("x9/*", optional=True),
        rules.unstack("x9/*", optional=True),
        rules.split("x9", ["a"], optional=True),
        rules.concat(["x9"], "y", optional=True),
        rules.tile("x9", 2, optional=True),
        rules.scale("x9", "y", "float32", optional=True),
        rules.scale("embed", "y", "float32", optional=True),
        rules.combine(["x9"], "y", np.negative, optional=True),
        rules.pad("x9", [], optional=True),
        rules.dequantize("x9", optional=True),
        rules.pack("x9", optional=True),
        rules.unpack("x9", optional=True),
    ]
    assert list(tr.open(layers).apply(nothing)) == list(tr.open(layers))


@pytest.mark.long
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_rules_say_what_cannot_be_read(tmp_path: pathlib.Path) -> None:
    import orbax.checkpoint as ocp

    tree = {"a": numbers(2, 3), "b": numbers(2, 3)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "c", tree)
    shutil.rmtree(tmp_path / "c" / "a")
    for rule in (
        rules.cast("*", "float16"),
        rules.reshape("*", (3, 2)),
        rules.transpose("*", (1, 0)),
        rules.tile("*", (1, 1)),
        rules.pad("*", [(0, 1), (0, 0)]),
        rules.map("*", np.negative),
    ):
        view = tr.open(tmp_path / "c").apply([rule])
        assert "a  lost" in repr(view)
        expected = np.asarray(view["b"])
        assert_same(tr.restore(tmp_path / "c", {"b": expected}, rules=[rule], extra="ignore"), {"b": expected})
        for like in ({"a": expected, "b": expected}, None):
            with pytest.raises(CorruptError, match=r"a/\.zarray: expected an array's metadata"):
                tr.restore(tmp_path / "c", like, rules=[rule])
    for rule in (
        rules.concat(["a", "b"], "x"),
        rules.combine(["b", "a"], "x", np.add),
        rules.scale("a", "b", "float32"),
        rules.scale("b", "a", "float32"),
        rules.split("a", ["c", "d"]),
    ):
        with pytest.raises(CorruptError, match=r"a/\.zarray: expected an array's metadata"):
            tr.open(tmp_path / "c").apply([rule])
        assert "lost" not in repr(tr.open(tmp_path / "c").apply([rules.drop("a"), rules.rename("b", "c")]))


def test_a_view_is_printed_without_reading(layers: pathlib.Path, use_disk: Any) -> None:
    class Unread(tr.stores.posix.Disk):
        def map(self, fd: int, size: int) -> Any:
            raise AssertionError("an array was read")

    use_disk(Unread())
    shown = repr(tr.open(layers).apply([rules.stack("layers/*/**")]))
    assert any(line.split() == ["layers/kernel", "float32[11,3,4]"] for line in shown.splitlines())


def test_the_module_shows_its_rules_and_nothing_else() -> None:
    assert dir(rules) == sorted([*rules.__all__, "map"])
    for name in dir(rules):
        rule = getattr(rules, name)
        assert rule.__module__ == "treering.rules" and rule.__doc__
        assert inspect.signature(rule).parameters["optional"].kind is inspect.Parameter.KEYWORD_ONLY


def test_keys_that_new_names_turn_into_text_are_logged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"m": {1: np.ones(2), 2: np.zeros(2)}, "t": {"1": np.ones(2)}, "x": np.ones(3)}
    tr.save(tmp_path / "text", tree, rules=[rules.rename("^x$", "t/new")])
    tr.save(tmp_path / "kept", tree, rules=[rules.drop("m/1")])
    assert list(tr.restore(tmp_path / "kept")["m"]) == [2]
    assert "no text" not in caplog.text
    tr.save(tmp_path / "new", tree, rules=[rules.rename("^x$", "m/new")])
    assert list(tr.restore(tmp_path / "new")["m"]) == ["1", "2", "new"]
    assert "m: some of its keys were not text" in caplog.text
    caplog.clear()
    tr.save(tmp_path / "renamed", tree, rules=[rules.rename("^m/1$", "m/new")])
    assert "m: some of its keys were not text" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_rules_move_typed_keys(tmp_path: pathlib.Path, impl: str) -> None:
    """Axes are those that JAX shows. A restore, a slice of a view and a save of a live tree give the same keys."""
    keys = jax.random.split(jax.random.key(5, impl=impl), (4, 6))
    tree = {"keys": keys, "rows": {str(n): {"key": row} for n, row in enumerate(keys)}}
    tr.save(tmp_path / "c", {**tree, "data": jax.random.key_data(keys[0])})
    for change, path, expected in (
        (rules.transpose("keys", (1, -2)), "keys", keys.T),
        (rules.reshape("keys", (-1, 8)), "keys", keys.reshape(3, 8)),
        (rules.tile("keys", (2, 1, 3)), "keys", jnp.tile(keys, (2, 1, 3))),
        (rules.take("keys", 2, axis=-1), "keys", keys[:, 2]),
        (rules.split("keys", ["a", "b"], -1, sizes=(2, 4)), "b", keys[:, 2:]),
        (rules.concat(["rows/0/key", "rows/3/key"], "both", -1), "both", jnp.append(keys[0], keys[3])),
        (rules.stack("rows/*/key", -1), "rows/key", keys.T),
        (rules.unstack("keys/*", -1), "keys/5", keys[:, 5]),
    ):
        like = expected
        for name in reversed(path.split("/")):
            like = {name: like}
        view = tr.open(tmp_path / "c").apply([change])
        tr.save(tmp_path / "live", tree, rules=[change], overwrite=True)
        for ckpt in (view, tr.open(tmp_path / "live")):
            (found,) = jax.tree.leaves(ckpt.restore(like, extra="ignore"))
            assert found.dtype == keys.dtype and (found == expected).all()
        assert (view[path][1:3, ..., 1] == jax.random.key_data(expected)[1:3, ..., 1]).all()
    with pytest.raises(MismatchError, match=r"one shape and dtype, found .*key<.*\[6\] and data uint32"):
        tr.open(tmp_path / "c").apply([rules.concat(["rows/0/key", "data"], "x")])


@pytest.fixture
def replicated(tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    """Saves a state like programs with `pmap`: one copy for each of 4 devices along a leading axis, and raw keys."""
    data = np.arange(8, dtype=np.uint32).reshape(4, 2)
    state = {"params": {"w": numbers(6, 3)}, "step": np.int32(7), "rng": np.array([1, 2], np.uint32)}
    spread = jax.tree.map(lambda x: np.stack([x] * 4), state)
    tr.save(tmp_path / "c", {**spread, "dropout": data})
    return tmp_path / "c", {**state, "dropout": data[0]}


@pytest.mark.long
def test_rules_turn_replicated_raw_keys_into_typed_keys(replicated: Any, tmp_path: pathlib.Path) -> None:
    """Rules turn a state saved under `pmap` with raw keys into one with typed keys."""
    path, state = replicated
    changes = [rules.take("**", 0), rules.wrap_key_data("rng"), rules.wrap_key_data("dropout")]
    like = {**state, "rng": jax.random.key(0), "dropout": jax.random.key(0)}
    for restored in (
        tr.restore(path, like=like, rules=changes),
        tr.restore(path, like=tr.open(path).apply(changes).abstract(), rules=changes),
        tr.restore(path, rules=changes),  # without a template
    ):
        for name in ("rng", "dropout"):
            assert jax.random.key_impl(restored[name]) == jax.random.key_impl(jax.random.key(0))
            assert (jax.random.key_data(restored[name]) == state[name]).all()
        assert_same({"w": np.asarray(restored["params"]["w"])}, {"w": state["params"]["w"]})
        assert int(restored["step"]) == 7
    tr.convert(path, tmp_path / "new", rules=changes)  # After that no rules are needed.
    assert not tr.diff(tmp_path / "new", tr.restore(path, like=like, rules=changes))

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    live = jax.device_put(tr.restore(path), jax.NamedSharding(mesh, jax.P("x")))
    tr.save(tmp_path / "saved", live, rules=changes)  # The save puts a copy on each device.
    assert not tr.diff(tmp_path / "saved", tmp_path / "new")
    tr.convert(path, tmp_path / "orbax", format="orbax", rules=changes)
    assert tr.restore(tmp_path / "orbax")["rng"] == jax.random.wrap_key_data(state["rng"])


@pytest.mark.long
def test_a_run_with_raw_keys_goes_on_with_typed_ones(tmp_path: pathlib.Path) -> None:
    old = {"w": jnp.zeros(3), "rng": jax.random.key_data(jax.random.split(jax.random.key(3), (2, 5)))}
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, old)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        init = lambda: {"w": jnp.zeros(3), "rng": jax.random.split(jax.random.key(0), (2, 5))}  # noqa: E731
        state, step = ckpts.restore_or_init(init, rules=[rules.wrap_key_data("rng", optional=True)])
        assert step == 1 and (jax.random.key_data(state["rng"]) == old["rng"]).all()


@pytest.mark.long
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_key_data_becomes_keys_of_its_implementation(tmp_path: pathlib.Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(5, impl=impl), 8)
    tr.save(tmp_path / "c", {"keys": keys})
    tr.save(tmp_path / "data", {"keys": jax.random.key_data(keys)})
    view = tr.open(tmp_path / "data").apply([rules.wrap_key_data("keys", impl)])
    assert f"key<{impl}>[8]" in str(view)
    assert not tr.diff(view, tmp_path / "c")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = view.restore(sharding=None, like={"keys": jax.device_put(keys, jax.NamedSharding(mesh, jax.P("x")))})
    assert (jax.random.key_data(spread["keys"]) == jax.random.key_data(keys)).all()
    assert spread["keys"].sharding.spec == jax.P("x")
    # One of the copies, of keys and of their data: the keys do not have the axis of their data.
    for one in (view.apply([rules.take("keys", 3)]), tr.open(tmp_path / "c").apply([rules.take("keys", 3, axis=-1)])):
        assert (jax.random.key_data(one.restore()["keys"]) == jax.random.key_data(keys[3])).all()


def test_data_of_another_size_or_implementation_is_no_key(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"rng": np.zeros((3, 4), np.uint32), "one": np.uint32(1)})
    ckpt = tr.open(tmp_path / "c")
    with pytest.raises(MismatchError, match=r"rng is uint32\[3,4\]; expected uint32 whose last axis has 2"):
        ckpt.apply([rules.wrap_key_data("rng")])
    with pytest.raises(MismatchError, match="one is uint32"):
        ckpt.apply([rules.wrap_key_data("one", "rbg")])
    with pytest.raises(UnsupportedError, match="as a philox key"):  # JAX does not know this implementation
        ckpt.apply([rules.wrap_key_data("rng", "philox")]).select("rng").restore()
    assert ckpt.apply([rules.wrap_key_data("rng", "rbg")]).restore()["rng"].shape == (3,)


def test_an_index_reads_what_it_takes_and_no_more() -> None:
    """`take` reads one of 8 copies, and for a box of it only that box."""
    entry = ArrayEntry("w", "numpy", "float32", (8, 100, 50))
    (leaf,) = rules.take("w", 3).apply(views.plain_leaves({"w": entry})).values()
    assert leaf.array.shape == (100, 50)
    assert leaf.plan_of(((0, 100), (0, 50))).needs == [(entry, ((3, 4), (0, 100), (0, 50)))]
    assert leaf.plan_of(((10, 20), (0, 5))).needs == [(entry, ((3, 4), (10, 20), (0, 5)))]


def test_errors_about_keys_and_copies_name_the_rule_that_helps(replicated: Any) -> None:
    path, state = replicated
    with pytest.raises(MismatchError, match=r"w: expected .*tr\.rules\.take\('params/w', 0\) takes the first"):
        tr.restore(path, like=state)
    taken = [rules.take("**", 0)]
    with pytest.raises(MismatchError, match=r"rng: expected key.*tr\.rules\.wrap_key_data\('rng', 'threefry2x32'\)"):
        tr.restore(path, like={**state, "rng": jax.random.key(0)}, rules=taken)
    with pytest.raises(MismatchError, match=r"w: expected key.*only typed keys become typed keys\n"):
        tr.restore(path, like={**state, "params": {"w": jax.random.key(0)}}, rules=taken)


@pytest.mark.parametrize("empty", [np.ones(2), {"": np.ones(2)}, {"a": np.ones(2)}])
def test_what_has_no_name_can_be_dropped(tmp_path: pathlib.Path, empty: Any) -> None:
    """The path of an empty name at the root is that of the root."""
    tr.save(tmp_path / "a", {"": empty, "x": np.zeros(3)})
    first = next(path for path in tr.open(tmp_path / "a") if path != "x")
    tr.convert(tmp_path / "a", tmp_path / "b", rules=[tr.rules.drop(first)])
    assert list(tr.restore(tmp_path / "b")) == ["x"]


def test_text_is_not_cast_to_numbers(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "a", {"names": np.array(["a", "b"]), "bytes": np.array([b"1", b"2"]), "w": np.ones(2)})
    for name in ("names", "bytes"):
        with pytest.raises(MismatchError, match=rf"{name}: expected numbers to cast to float32, found .* is text"):
            tr.restore(tmp_path / "a", rules=[rules.cast(name, "float32")])
    assert tr.restore(tmp_path / "a", rules=[rules.cast("names", "S1")])["names"].tolist() == [b"a", b"b"]
    like = {"w": np.ones(2, np.float32)}
    assert tr.restore(tmp_path / "a", like, extra="ignore", rules=[rules.cast("**", "float32")])["w"].dtype == "f4"
    with pytest.raises(MismatchError, match="which is text"):
        tr.convert(tmp_path / "a", tmp_path / "c", rules=[rules.cast("**", "float32")])
    assert not (tmp_path / "c").exists()
    drops = (
        r"tr\.rules\.drop\('bytes'\)\n  names: <U1; text, which a cast does not change; .*tr\.rules\.drop\('names'\)"
    )
    with pytest.raises(UnsupportedError, match=drops):
        tr.convert(tmp_path / "a", tmp_path / "b.safetensors")
    tr.convert(tmp_path / "a", tmp_path / "b.safetensors", rules=[rules.drop("names"), rules.drop("bytes")])
