"""Tests restoring: what a template decides, which differences are errors, and where arrays go."""

import collections
import itertools
import math
import pathlib
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import treering as tr
from helpers import assert_same, open_at
from treering import stores
from treering._core import describe as _differences
from treering._restore import array_placement
from treering.errors import CorruptError, MismatchError, NotFoundError
from treering.stores.posix import Disk

pytestmark = pytest.mark.compat


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> Any:
    """Saves a tree and returns the path."""

    def save(tree: Any) -> pathlib.Path:
        tr.save(tmp_path / "c", tree, overwrite=True)
        return tmp_path / "c"

    return save


MODEL = {
    "params": {"dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float32)}},
    "step": 7,
}


# What comes back


def test_a_template_leaf_decides_what_comes_back(saved: Any) -> None:
    value = np.arange(4, dtype=np.float32)
    path = saved({"x": value})
    for like, kind in [
        (jnp.zeros(4), jax.Array),
        (jax.ShapeDtypeStruct((4,), jnp.float32), jax.Array),
        (np.zeros(4, np.float32), np.ndarray),
    ]:
        found = tr.restore(path, like={"x": like})["x"]
        assert isinstance(found, kind)
        np.testing.assert_array_equal(found, value)
    assert isinstance(tr.restore(path)["x"], np.ndarray)


@pytest.mark.parametrize("mmap", [None, True, False])
def test_numpy_arrays_are_writable_and_the_file_never_changes(saved: Any, mmap: bool | None) -> None:
    path = saved({"x": np.zeros(100_000), "y": np.zeros(3)})
    found = tr.restore(path, like={"x": np.empty(100_000), "y": np.empty(3)}, mmap=mmap)
    found["x"][:] = 1
    found["y"] += 1
    assert tr.verify(path).ok
    assert not tr.restore(path)["x"].any()


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("mmap", [None, False])
def test_restored_arrays_outlive_their_checkpoint(saved: Any, tmp_path: pathlib.Path, mmap: bool | None) -> None:
    path = saved({"x": np.arange(1 << 20), "j": jnp.arange(1 << 20)})
    found = tr.restore(path, like={"x": np.empty(1 << 20, int), "j": jnp.zeros(1 << 20, int)}, mmap=mmap)
    saved({"x": 0})
    for array in found.values():
        np.testing.assert_array_equal(array, np.arange(1 << 20))


@pytest.mark.parametrize("mmap", [True, False])
def test_no_two_results_share_memory(saved: Any, mmap: bool) -> None:
    tied = np.zeros(1000)
    ckpt = tr.open(saved({"a": tied, "b": tied, "c": [np.zeros(3)]}))
    first, second = ckpt.restore(mmap=mmap), ckpt.restore(mmap=mmap)
    first["a"][:] = 1
    first["c"][0][:] = 1
    part = ckpt["a"][:10]
    part += 1
    assert not first["b"].any() and not second["a"].any() and not second["b"].any() and not second["c"][0].any()
    assert not ckpt["a"][:].any() and not ckpt.restore(mmap=mmap)["a"].any()


def test_aligned_mapped_arrays_are_not_copied(saved: Any) -> None:
    """JAX arrays on a CPU use the memory of the mapped file, if it is aligned."""
    state = {str(n): jnp.full((1 << 18,), n, jnp.float32) for n in range(4)} | {"odd": jnp.ones(3)}
    path = saved(state)
    found = tr.restore(path, like=state)
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps if str(path) in line]
    for n in range(4):
        pointer = found[str(n)].unsafe_buffer_pointer()
        assert any(begin <= pointer < end for begin, end in ranges)


@pytest.mark.long
@pytest.mark.whole
def test_a_donated_restored_array_leaves_the_file_alone(saved: Any) -> None:
    state = {"x": jnp.arange(1 << 18, dtype=jnp.float32)}
    path = saved(state)
    found = tr.restore(path, like=state)
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(found))
    assert tr.verify(path).ok
    np.testing.assert_array_equal(tr.restore(path)["x"], np.arange(1 << 18, dtype=np.float32))


def test_a_part_by_ellipsis_and_by_at(saved: Any) -> None:
    path = saved(MODEL)
    part = {"kernel": np.zeros((2, 3), np.float32), "bias": ...}
    found = tr.restore(path, like={"params": {"dense": part}, "step": ...})
    assert found["step"] is ... and found["params"]["dense"]["bias"] is ...
    found = tr.restore(path, like=part, at="params/dense")
    np.testing.assert_array_equal(found["kernel"], MODEL["params"]["dense"]["kernel"])
    assert tr.restore(path, at="step") == 7
    assert list(tr.restore(path, at="params")) == ["dense"]
    with pytest.raises(NotFoundError, match="nothing is at 'param'; closest: params"):
        tr.restore(path, at="param")


def test_only_the_part_asked_for_is_read(tmp_path: pathlib.Path, use_disk: Any) -> None:
    tree = {"params": np.zeros(1 << 20, np.uint8), "opt": np.zeros(8 << 20, np.uint8)}
    tr.save(tmp_path / "c", tree)

    class Counting(Disk):
        total = 0

        def read(self, fd: int, buffer: memoryview, offset: int) -> int:
            Counting.total += len(buffer)
            return super().read(fd, buffer, offset)

        def populate(self, fd: int, mapped: Any, offset: int, size: int) -> bool:
            Counting.total += size
            return super().populate(fd, mapped, offset, size)

    for mmap in (None, False):
        Counting.total = 0
        use_disk(Counting())
        tr.restore(tmp_path / "c", at="params", mmap=mmap)
        assert 1 << 20 <= Counting.total < 2 * (1 << 20) + 10_000


# Differences


def test_all_differences_come_in_one_error(saved: Any) -> None:
    path = saved(MODEL)
    like = {
        "params": {"dense": {"kernel": jnp.zeros((3, 2)), "biass": jnp.zeros(3)}},
        "step": "seven",
        "extra": {"x": jax.ShapeDtypeStruct((2,), jnp.int8)},
    }
    with pytest.raises(MismatchError) as caught:
        tr.restore(path, like=like)
    text = str(caught.value)
    assert text.startswith(f"{path}: the checkpoint does not fit the template: 5 differences\n")
    for line in [
        "  params/dense/kernel: expected float32[3,2], found float32[2,3]; shapes must be equal",
        "  params/dense/biass: expected float32[3], found nothing (closest: params/dense/bias); missing='template' or",
        "  step: expected str, found int; ",
        "  extra/x: expected int8[2], found nothing; ",
        "  params/dense/bias: expected nothing, found float32[3]; extra='ignore' or extra=['params/dense/bias'] leaves",
    ]:
        assert line in text


@pytest.mark.long
def test_a_level_too_many_over_a_thousand_layers_is_a_few_lines(saved: Any) -> None:
    layers = [{"kernel": np.ones((2, 2)), "bias": np.ones(2)} for _ in range(1000)]
    path = saved({"params": {"layers": layers}, "step": 7})
    with pytest.raises(MismatchError) as caught:
        tr.restore(path, like={"layers": layers})
    head, cause, *lines = str(caught.value).splitlines()
    assert head.endswith(": 4,001 differences") and cause == "  likely: the checkpoint has one level more: at='params'"
    assert len(lines) == 5
    assert any(line.startswith("  layers/*/kernel ×1,000: expected float64[2,2], found nothing; ") for line in lines)
    assert any(line.endswith("extra=['params/layers/*/bias'] leaves it out") for line in lines)
    assert len(caught.value.differences) == 4001
    one = caught.value.differences[2]
    assert (one.path, one.expected, one.found) == ("layers/1/bias", "float64[2]", "nothing")
    assert pickle.loads(pickle.dumps(caught.value)).differences == caught.value.differences


def test_a_glob_for_like_differences_names_nothing_else(saved: Any) -> None:
    path = saved({"layers": [np.ones(2)] + [np.ones(3)] * 30})
    like = {"layers": [np.zeros(2)] + [np.zeros(4)] * 30}
    with pytest.raises(MismatchError) as caught:  # layers/0 fits, and a rule for layers/* would drop it
        tr.restore(path, like=like)
    text = str(caught.value)
    assert "layers/* ×30, of which layers/1 is one: expected float64[4], found float64[3]; " in text
    assert "tr.rules.drop('layers/1')" in text and "drop('layers/*" not in text


def test_mismatch_error_fits_a_screen(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error has few lines, and looks for similar names only for those."""
    looks: list[str] = []
    monkeypatch.setattr(_differences, "closest", lambda path, names: looks.append(path) if names else None)
    names = ["".join(pair) for pair in itertools.product("abcdefghijklmnopqrst", repeat=2)]
    path = saved({f"old{name}": np.ones(n + 1) for n, name in enumerate(names)})
    with pytest.raises(MismatchError) as caught:
        tr.restore(path, like={f"new{name}": np.ones(n + 2) for n, name in enumerate(names)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 22 and lines[-1] == "  and 780 more; the error's `differences` has all of them"
    assert len(caught.value.differences) == 800 and len(looks) == 20


def test_missing_leaves_come_from_the_template_when_asked(saved: Any) -> None:
    path = saved({"a": np.zeros(2)})
    like = {"a": np.ones(2), "lora": {"x": np.full(3, 5.0), "y": 3}}
    for missing in ("template", "lora/*", ["a", "**/x", "lora/y"]):
        if missing == "lora/*":
            missing = ["lora/*"]
        found = tr.restore(path, like=like, missing=missing)
        assert found["lora"]["x"] is like["lora"]["x"] and found["lora"]["y"] == 3
        assert not found["a"].any()
    with pytest.raises(MismatchError, match="lora/y"):
        tr.restore(path, like=like, missing=["lora/x"])
    with pytest.raises(MismatchError, match="the template has only its shape; restore"):
        tr.restore(path, like={"a": np.ones(2), "b": jax.ShapeDtypeStruct((), float)}, missing="template")
    with pytest.raises(MismatchError, match="missing='ignore': expected 'error', 'template' or"):
        tr.restore(path, like=like, missing="ignore")


def test_extra_leaves_are_left_out_when_asked(saved: Any) -> None:
    path = saved({"a": np.zeros(2), "ema": {"a": np.zeros(2)}})
    assert list(tr.restore(path, like={"a": np.ones(2)}, extra="ignore")) == ["a"]
    assert list(tr.restore(path, like={"a": np.ones(2)}, extra=["ema/**"])) == ["a"]
    with pytest.raises(MismatchError, match="ema/a"):
        tr.restore(path, like={"a": np.ones(2)}, extra=["other/**"])


def test_names_that_match_nothing_are_named(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`extra` and `grow` may name what only an earlier checkpoint has, so that a typo is a warning."""
    path = saved({"a": np.zeros(2), "ema": {"a": np.zeros(2)}, "m": []})
    like = {"a": np.ones(2), "m": []}
    tr.restore(path, like=like, extra=["ema/*"], grow=["m", "a"])
    assert not caplog.messages
    with pytest.raises(MismatchError, match=r"expected nothing, found .*extra=\['ema/a'\] leaves it out"):
        tr.restore(path, like=like, extra=["emma/*"], grow=["n"])
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "extra: the glob 'emma/*' matches none of a, ema/a; the closest name is ema/a",
        "grow: the glob 'n' matches none of a, m, ema/a",
    ]


def test_none_and_functions_are_no_arrays(saved: Any) -> None:
    path = saved({"f": jax.nn.relu, "n": None, "x": np.ones(2), "was": np.ones(2)})
    like = {"f": jnp.tanh, "n": None, "x": np.ones(2), "was": np.ones(2), "new": None}
    found = tr.restore(path, like=like)
    assert found["f"] is jnp.tanh and found["n"] is None and found["new"] is None
    for own, said in ((None, "None"), (jnp.tanh, "a function")):
        with pytest.raises(MismatchError, match=f"was: expected {said}, found float64.*; extra='ignore' or extra="):
            tr.restore(path, like=like | {"was": own})
    for name, said in (("n", "None"), ("f", "a function")):  # No path is suggested as the closest to itself.
        hint = rf"; missing='template' or missing=\['{name}'\]"
        with pytest.raises(MismatchError, match=rf"{name}: expected float64\[2\], found {said}{hint}"):
            tr.restore(path, like=like | {name: np.ones(2)})
        with pytest.raises(MismatchError, match=f"{name}: expected float32.*, found {said}; the template has only"):
            tr.restore(path, like=like | {name: jax.ShapeDtypeStruct((2,), "float32")})
        with pytest.raises(MismatchError, match=f"1, such as '{name}'") as error:
            tr.restore(path, like={name: np.ones(2)}, missing="template", extra="ignore")
        assert f"closest: {name}" not in str(error.value)
    without = tr.restore(path, like={"x": np.ones(2), "was": np.ones(2)})
    assert set(without) == {"x", "was"}


def test_another_named_tuple_at_the_same_path_is_noticed(saved: Any) -> None:
    a = collections.namedtuple("ScaleByAdamState", "count mu")
    b = collections.namedtuple("TraceState", "count mu")
    path = saved({"opt": (a(1, np.ones(2)), b(2, np.ones(2)))})
    tr.restore(path, like={"opt": (a(1, np.ones(2)), b(2, np.ones(2)))})
    with pytest.raises(MismatchError, match="opt/0: expected TraceState, found ScaleByAdamState; was the order"):
        tr.restore(path, like={"opt": (b(1, np.ones(2)), a(2, np.ones(2)))})
    tr.restore(path, like={"opt": [{"count": 0, "mu": np.ones(2)}] * 2})


def test_a_renamed_class_of_named_tuples_is_taken_with_a_warning(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    old, new, third = (collections.namedtuple(name, "w n") for name in ("TrainState", "LearnerState", "Actor"))
    path = saved({"s": old(np.ones(3), 1)})
    found = tr.restore(path, like={"s": new(np.zeros(3), 0)})
    assert type(found["s"]) is new and found["s"].w[0] == 1
    assert "TrainState is now LearnerState" in caplog.text
    swapped = saved({"a": old(np.ones(3), 1), "b": third(np.zeros(3), 2)})
    with pytest.raises(
        MismatchError, match=r"a: expected Actor, found TrainState; .* restore with the class 'TrainState'"
    ):
        tr.restore(swapped, like={"a": third(np.zeros(3), 0), "b": old(np.zeros(3), 0)})


def test_a_state_of_an_optimizer_is_no_renamed_class(saved: Any) -> None:
    adam, belief = optax.scale_by_adam().init(np.ones(2)), optax.scale_by_belief().init(np.ones(2))
    own = collections.namedtuple("MyState", "count mu nu")
    path = saved({"opt": adam})
    for other in (belief, own(*adam)):
        with pytest.raises(MismatchError, match=r"opt: expected .*State, found ScaleByAdamState"):
            tr.restore(path, like={"opt": other})


# Dtypes


def test_floats_widen_by_themselves_and_narrow_when_asked(saved: Any) -> None:
    path = saved({"x": np.array([1.1, 2], np.float32)})
    assert tr.restore(path, like={"x": np.zeros(2)})["x"].dtype == np.float64
    half = {"x": jnp.zeros(2, jnp.bfloat16)}
    with pytest.raises(MismatchError, match=r"x: expected bfloat16\[2\], found float32\[2\]; dtype='template'"):
        tr.restore(path, like=half)
    assert tr.restore(path, like=half, dtype="template")["x"].dtype == jnp.bfloat16
    assert tr.restore(path, like=half, dtype=jnp.float16)["x"].dtype == jnp.float16
    assert tr.restore(path, dtype="float16")["x"].dtype == np.float16
    with pytest.raises(MismatchError, match="dtype='int8'"):
        tr.restore(path, dtype="int8")


@pytest.mark.parametrize(
    ("old", "new", "widens"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("float8_e4m3fn", "bfloat16", True),
        ("float8_e5m2", "float16", True),
        ("float8_e8m0fnu", "float32", True),
        ("float8_e8m0fnu", "float16", False),
        ("float4_e2m1fn", "float8_e4m3fn", True),
        ("float8_e4m3fn", "float8_e5m2", False),
    ],
)
def test_widening_means_that_every_value_survives(saved: Any, old: str, new: str, widens: bool) -> None:
    kinds = [np.dtype(getattr(ml_dtypes, name, name)) for name in (old, new)]
    every = np.arange(2 ** min(8 * kinds[0].itemsize, 16)).astype(f"u{kinds[0].itemsize}").view(kinds[0])
    if old == "float4_e2m1fn":
        every = every[:16]
    path = saved({"x": every})
    like = {"x": np.zeros(every.shape, kinds[1])}
    if widens:
        found = tr.restore(path, like=like)["x"]
        with np.errstate(all="ignore"):
            numbers = ~np.isnan(found.astype(np.float64))
            same = found.astype(kinds[0]).view(f"u{kinds[0].itemsize}") == every.view(f"u{kinds[0].itemsize}")
        assert numbers.any() and same[numbers].all()
    else:
        with pytest.raises(MismatchError):
            tr.restore(path, like=like)


def test_integers_change_width_when_every_value_fits(saved: Any) -> None:
    path = saved({"x": np.array([-1, 127], np.int64)})
    assert tr.restore(path, like={"x": jnp.zeros(2, jnp.int8)})["x"].tolist() == [-1, 127]
    with pytest.raises(MismatchError, match=r"x: expected values that fit uint8 .0 to 255., found 1 of 2 int64 values"):
        tr.restore(path, like={"x": np.zeros(2, np.uint8)})
    path = saved({"x": np.array([2**63], np.uint64)})
    with pytest.raises(MismatchError, match="x: expected values that fit int64"):
        tr.restore(path, like={"x": np.zeros(1, np.int64)})


def test_an_int_and_a_0d_integer_array_stand_for_one_another(saved: Any) -> None:
    path = saved({"step": 7})
    found = tr.restore(path, like={"step": jnp.zeros((), jnp.int32)})["step"]
    assert isinstance(found, jax.Array) and found.dtype == jnp.int32 and found == 7
    assert isinstance(tr.restore(path, like={"step": np.array(0, np.int16)})["step"], np.ndarray)
    path = saved({"step": 2**40})
    with pytest.raises(MismatchError, match="it does not fit int32; use an int in the template"):
        tr.restore(path, like={"step": jnp.zeros((), jnp.int32)})
    assert tr.restore(path, like={"step": 0}) == {"step": 2**40}


def test_a_number_in_the_template_takes_a_0d_array(saved: Any) -> None:
    """A number in `init` is an array after the first jitted step."""
    kinds = {"f": [jnp.float32, jnp.bfloat16, np.float64], "i": [jnp.int32, np.uint64, jnp.int4], "b": [jnp.bool_]}
    kinds["c"] = [jnp.complex64, np.complex128]
    numbers = {"f": 0.25, "i": 3, "b": True, "c": 0.5 + 2j}
    state = {f"{name}{n}": kind(numbers[name]) for name in kinds for n, kind in enumerate(kinds[name])}
    expected = {path: numbers[path[0]] for path in state}
    found = tr.restore(saved({**state, "weak": jnp.asarray(0.25)}), like={**expected, "weak": 1.0})
    assert_same(found, {**expected, "weak": 0.25})
    for value, number in ((jnp.float32(3), 3), (jnp.int32(3), 3.0), (jnp.int32(1), True), (jnp.ones(1), 1.0)):
        with pytest.raises(MismatchError, match="x: expected"):
            tr.restore(saved({"x": value}), like={"x": number})


def test_the_shape_of_a_python_number_takes_any_digits(saved: Any) -> None:
    """The template that `jax.eval_shape` makes of a number in `init` has a weak type."""
    state = {"half": 0.5, "tenth": 0.1, "nan": math.nan, "n": 7, "flag": True, "z": 0.1 + 0.2j}
    found = tr.restore(saved(state), like=jax.eval_shape(lambda: state))
    assert_same(found, jax.tree.map(jnp.asarray, state))
    shape = jax.eval_shape(lambda: {"x": 0.5})
    for value in (1e300, 1e-300, 3, 0.1j, True):  # infinite, zero, or of another kind
        with pytest.raises(MismatchError, match="x: expected"):
            tr.restore(saved({"x": value}), like=shape)


@pytest.mark.parametrize(
    ("value", "like"),
    [
        (1.5, 1),
        (True, 1),
        (1, 1.5),
        (1, True),
        (np.ones(2), np.ones(2, bool)),
        (np.ones(2, int), np.ones(2)),
        ("a", b"a"),
    ],
)
def test_one_kind_does_not_become_another(saved: Any, value: Any, like: Any) -> None:
    with pytest.raises(MismatchError, match="x: expected"):
        tr.restore(saved({"x": value}), like={"x": like})


def test_64_bit_arrays_are_never_truncated_for_jax(saved: Any) -> None:
    path = saved({"x": np.array([2.0**60]), "i": np.array([2**60])})
    with pytest.raises(
        MismatchError, match=r"(?s)i: expected int32, because jax_enable_x64 is off.*x: expected float32"
    ):
        tr.restore(path, sharding=lambda *_: None)
    with jax.enable_x64(True):
        found = tr.restore(path, sharding=lambda *_: None)
        assert found["i"].dtype == jnp.int64 and int(found["i"][0]) == 2**60


# Where arrays go


def mesh_of(*axes: int) -> jax.sharding.Mesh:
    names = ("x", "y", "z")[: len(axes)]
    return jax.make_mesh(axes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


P = jax.P
SOURCES = [(1, P()), (8, P("x")), ((2, 4), P("x", "y")), ((4, 2), P(None, "x")), ((2, 2, 2), P(("z", "x"), "y"))]
TARGETS = [(1, P()), (4, P("x")), ((2, 4), P("y", "x")), ((2, 4), P(None, ("x", "y"))), ((2, 2), P("x"))]


@pytest.mark.parametrize("mmap", [None, False])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_any_sharding_to_any_other(saved: Any, source: Any, target: Any, mmap: bool | None) -> None:
    def sharding(spec: Any) -> jax.NamedSharding:
        axes = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
        return jax.NamedSharding(mesh_of(*axes), spec[1])

    value = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    path = saved({"x": jax.device_put(value, sharding(source))})
    found = tr.restore(
        path, like={"x": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(target))}, mmap=mmap
    )
    assert found["x"].sharding == sharding(target)
    np.testing.assert_array_equal(found["x"], value)
    np.testing.assert_array_equal(tr.restore(path)["x"], value)
    np.testing.assert_array_equal(tr.open(path)["x"][3:11, 5::3], value[3:11, 5::3])


def test_each_byte_of_a_replicated_array_is_written_once(saved: Any) -> None:
    value = jax.device_put(np.zeros((64, 64), np.float32), jax.NamedSharding(mesh_of(2, 4), P("x")))
    path = saved({"x": value, "copy": jax.device_put(np.zeros(1024), jax.NamedSharding(mesh_of(8), P()))})
    (file,) = path.glob("*.safetensors")
    assert file.stat().st_size == 4096 + value.nbytes + 1024 * 4


@pytest.mark.long
def test_the_sharding_argument_wins_over_the_templates(saved: Any) -> None:
    mesh = mesh_of(8)
    row, all_of_it = jax.NamedSharding(mesh, P("x")), jax.NamedSharding(mesh, P())
    state = {"params": {"w": jnp.zeros((8, 2)), "b": jnp.zeros(8)}, "n": 3}
    path = saved(state)
    for wish in (
        row,
        {"params": row, "n": None},
        lambda path, shape, dtype: row,
        {"params": {"w": row, "b": row}, "n": None},
    ):
        found = tr.restore(path, like=state, sharding=wish)
        assert found["params"]["w"].sharding == found["params"]["b"].sharding == row
        found = tr.restore(path, sharding=wish)
        assert found["params"]["w"].sharding == row and isinstance(found["params"]["w"], jax.Array) and found["n"] == 3
    seen: list[Any] = []
    tr.restore(path, like=state, sharding=lambda *a: seen.append(a) or all_of_it)
    assert seen == [("params/b", (8,), np.float32), ("params/w", (8, 2), np.float32)]
    with jax.set_mesh(mesh):
        assert tr.restore(path, like=state, sharding=P("x"))["params"]["b"].sharding == row
        assert tr.restore(path, like=jax.eval_shape(lambda: state))["params"]["b"].sharding == all_of_it
    with pytest.raises(MismatchError, match="needs a mesh"):
        tr.restore(path, like=state, sharding=P("x"))
    with pytest.raises(MismatchError, match="prefix of the template"):
        tr.restore(path, like=state, sharding={"params": [row]})


def test_a_recorded_sharding_is_a_template_on_another_machine(saved: Any) -> None:
    value = jax.device_put(np.zeros((16, 4), np.float32), jax.NamedSharding(mesh_of(2, 4), P(("x", "y"), None)))
    path = saved({"x": value, "y": jnp.zeros(3)})
    ckpt = tr.open(path)
    recorded = ckpt["x"].sharding
    assert recorded.spec == P(("x", "y"), None) and dict(recorded.mesh.shape) == {"x": 2, "y": 4}
    assert ckpt["y"].sharding is None
    with jax.set_mesh(mesh_of(4, 2)):
        like = {"x": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=recorded), "y": ...}
        assert tr.restore(path, like=like)["x"].sharding.mesh.shape == {"x": 4, "y": 2}


def test_memory_kinds_are_kept(saved: Any) -> None:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")
    path = saved({"x": jax.device_put(jnp.arange(4.0), where)})
    found = tr.restore(path, like={"x": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where)})["x"]
    assert found.sharding == where and found.tolist() == [0, 1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("limit", [1, 5000, None])
def test_restoring_in_bounded_groups_gives_the_same(saved: Any, limit: int | None) -> None:
    state = {str(n): jnp.full((n * 100,), n) for n in range(20)}
    found = tr.restore(saved(state), like=state, memory_limit=limit, mmap=False)
    assert all((found[k] == state[k]).all() for k in state)


# Reading while others write


def test_a_reader_during_an_overwrite_gets_the_old_or_the_new(tmp_path: pathlib.Path, use_disk: Any) -> None:
    path = tmp_path / "c"
    tr.save(path, {"x": np.zeros(1000)})

    class Overwritten(Disk):
        """A store in which another writer replaces the checkpoint just before its array file is opened."""

        times = 2

        def open(self, path: str) -> int:
            if path.endswith(".safetensors") and self.times:
                self.times -= 1
                now = stores.get("")
                stores.register(stores.Filesystem(Disk()))
                tr.save(tmp_path / "c", {"x": np.full(1000, 5 - self.times)}, overwrite=True)
                stores.register(now)
            return super().open(path)

    use_disk(Overwritten())
    assert tr.restore(path)["x"][0] == 5
    held = tr.open(path)
    stores.register(stores.Filesystem(Disk()))
    tr.save(path, {"x": np.ones(1000)}, overwrite=True)
    with pytest.raises(NotFoundError, match="was replaced while it was open; open it again"):
        held["x"][:]


def test_an_open_array_survives_an_overwrite(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"x": np.zeros(1000)})
    held = tr.open(tmp_path / "c")["x"]
    assert held[0] == 0
    tr.save(tmp_path / "c", {"x": np.ones(1000)}, overwrite=True)
    assert held[999] == 0


def test_a_missing_array_file_is_damage(saved: Any) -> None:
    path = saved({"x": np.zeros(1000)})
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(CorruptError, match="expected an array file, found nothing"):
        tr.restore(path)


@pytest.mark.long
@pytest.mark.parametrize("public", [False, True])
def test_arrays_are_the_same_by_the_public_way_of_making_them(
    saved: Any, monkeypatch: pytest.MonkeyPatch, public: bool
) -> None:
    if public:
        monkeypatch.setattr(array_placement.jax_private, "put_shards", lambda: None)
    else:  # The public way must not have replaced the fast one without a log line.
        monkeypatch.delattr(array_placement, "_put_publicly")
    mesh = mesh_of(2, 4)
    state = {
        "free": jnp.arange(100.0),
        "weak": jnp.asarray(2.0) * jnp.asarray(1),
        "bound": jax.device_put(np.arange(7), jax.devices()[3]),
        "rows": jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), jax.NamedSharding(mesh, P("x"))),
        "weak rows": jax.device_put(jnp.full((8,), 1.0), jax.NamedSharding(mesh, P("x"))),
        "all": jax.device_put(np.arange(8, dtype=np.int8), jax.NamedSharding(mesh, P())),
        "host": jax.device_put(np.arange(8, dtype=np.int8), jax.NamedSharding(mesh, P("y"), memory_kind="pinned_host")),
        "half": jnp.ones((3, 5), jnp.bfloat16),
        "four": jnp.arange(-4, 4).astype(jnp.int4),
        "empty": jnp.zeros((0, 4)),
        "zero-d": jnp.int32(4),
    }
    assert_same(tr.restore(saved(state), like=state), state)


def test_many_small_reads_hold_neither_descriptors_nor_mappings(saved: Any) -> None:
    ckpt = tr.open(saved({str(n): np.full((100, 10), n) for n in range(64)}))
    ckpt["0"][0]

    def held() -> tuple[int, int]:
        maps = pathlib.Path("/proc/self/maps").read_text()
        return len(open_at(pathlib.Path(ckpt.path))), maps.count(str(ckpt.path))

    before = held()
    rows = [ckpt[path][n] for n in range(10) for path in ckpt]
    after = held()
    assert after[0] <= before[0] + 1 and after[1] <= before[1] and rows[-1][0] == 9
    tree = ckpt.restore(memory_limit=1)
    assert held()[1] <= before[1] + 1 and tree["63"][0, 0] == 63


def test_a_small_part_does_not_keep_what_was_read_around_it(saved: Any) -> None:
    path = saved({"big": np.zeros(8 << 20, np.uint8), "small": np.arange(4)})
    small = tr.restore(path, at="small", mmap=False)
    assert small.base is None and small.tolist() == [0, 1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("mmap", [True, False])
def test_reading_stops_at_the_first_error(tmp_path: pathlib.Path, use_disk: Any, mmap: bool) -> None:
    tr.save(tmp_path / "c", {"x": np.zeros(200 << 20, np.uint8)})

    class Failing(Disk):
        calls = 0

        def fail(self) -> None:
            self.calls += 1
            if self.calls > 3:
                raise OSError(5, "Input/output error")

        def populate(self, fd: int, mapped: Any, offset: int, size: int) -> bool:
            self.fail()
            return True

        def read(self, fd: int, buffer: memoryview, offset: int) -> int:
            if len(buffer) > 1 << 20:
                self.fail()
            return super().read(fd, buffer, offset)

    disk = use_disk(Failing())
    with pytest.raises(CorruptError, match="Input/output error"):
        tr.restore(tmp_path / "c", mmap=mmap)
    assert disk.calls < 15
    disk.calls = 0
    (problem,) = tr.verify(tmp_path / "c").problems
    assert "Input/output error" in str(problem)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_tied_leaves_share_no_memory_however_they_are_cut(saved: Any, mmap: bool, order: str, spec: Any) -> None:
    tied = np.zeros((8, 4096), np.float32)
    path = saved({"a": tied, "b": tied})
    spread = jax.ShapeDtypeStruct(tied.shape, tied.dtype, sharding=jax.NamedSharding(mesh_of(8), spec))
    found = tr.restore(path, like={order[0]: tied, order[1]: spread}, mmap=mmap)
    found[order[0]][:] = 1
    assert not np.asarray(found[order[1]]).any()


@pytest.mark.parametrize("mmap", [True, False])
def test_an_array_file_that_is_cut_short_while_open_is_damage(saved: Any, mmap: bool) -> None:
    path = saved({"x": np.zeros(1 << 20)})
    ckpt = tr.open(path)
    assert ckpt["x"][0] == 0
    (file,) = path.glob("*.safetensors")
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.truncate(100_000)
    with pytest.raises(CorruptError, match="cut short while open"):
        ckpt.restore(mmap=mmap)


def test_number_becomes_0d_array_without_loss(tmp_path: pathlib.Path) -> None:
    """A saved Python number restores into a 0-d array that can hold it exactly."""
    numbers = {"a": 0.5, "b": float("nan"), "c": -0.0, "d": 1.5 + 2j, "e": True, "f": 0.1, "g": 0.1j}
    tr.save(tmp_path / "c", numbers)
    skipped = dict.fromkeys("fg", ...)
    like = {
        "a": jnp.float32(0),
        "b": np.zeros((), np.float16),
        "c": jnp.bfloat16(0),
        "d": np.zeros((), np.complex64),
        "e": jnp.array(False),
        **skipped,
    }
    found = tr.restore(tmp_path / "c", like)
    assert_same(
        found,
        {
            "a": jnp.float32(0.5),
            "b": np.array(np.nan, np.float16),
            "c": jnp.bfloat16(-0.0),
            "d": np.array(1.5 + 2j, np.complex64),
            "e": jnp.array(True),
            **skipped,
        },
    )
    exact = {**dict.fromkeys("abcde", ...), "f": np.zeros(()), "g": np.zeros((), complex)}
    assert (tr.restore(tmp_path / "c", exact)["f"], tr.restore(tmp_path / "c", exact)["g"]) == (0.1, 0.1j)
    narrow = {**dict.fromkeys("abcde", ...), "f": jnp.float32(0), "g": ...}
    with pytest.raises(
        MismatchError, match=r"f: expected float32\[\], found float 0.1; it would become 0.1000.*'template'"
    ):
        tr.restore(tmp_path / "c", narrow)
    assert_same(tr.restore(tmp_path / "c", narrow, dtype="template")["f"], jnp.float32(0.1))
    assert_same(tr.restore(tmp_path / "c", narrow, dtype="bfloat16")["f"], jnp.bfloat16(0.1))
    wrong = {**dict.fromkeys("abcdef", ...), "g": np.zeros((), np.complex64)}
    with pytest.raises(MismatchError, match=r"g: expected complex64.*it would become"):
        tr.restore(tmp_path / "c", wrong)
    for kind in (np.zeros(1), np.zeros((), int), np.zeros((), bool)):
        with pytest.raises(MismatchError, match="found float; a template leaf of type float would take it"):
            tr.restore(tmp_path / "c", {**dict.fromkeys("bcdefg", ...), "a": kind})


def test_what_jax_has_not_is_said_of_the_side_that_has_it(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"a": np.arange(3, dtype=np.int32), "d": np.array(["2020-01-01"], "M8[D]")})
    with pytest.raises(MismatchError, match=r"a: expected int64 \(the template has it\).*found int32\[3\]; use int32"):
        tr.restore(tmp_path / "c", {"a": jax.ShapeDtypeStruct((3,), np.int64), "d": ...})
    with pytest.raises(MismatchError, match=r"d: expected a dtype that JAX has, found .*restore it into a NumPy array"):
        tr.restore(tmp_path / "c", {"a": ..., "d": jax.ShapeDtypeStruct((1,), "M8[D]")})
    with pytest.raises(MismatchError, match="d: expected a dtype that JAX has"):
        tr.restore(tmp_path / "c", sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_a_restore_that_finds_nothing_has_failed(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"model": {"w": np.ones(3), "b": np.ones(2)}, "step": 7})
    lenient = {"missing": "template", "extra": "ignore"}
    for like in ({"w": np.zeros(3), "b": np.zeros(2)}, {"params": {"w": jnp.zeros(3)}, "act": jax.nn.relu, "n": None}):
        with pytest.raises(MismatchError, match=r"found none of them.*; the checkpoint has model/b, model/w, step"):
            tr.restore(tmp_path / "c", like, **lenient)
    with pytest.raises(MismatchError, match=r"\(1, such as 'w'\), found none of them, so nothing would be restored"):
        tr.restore(tmp_path / "c", {"w": np.zeros(3)}, missing=["w"], extra="ignore")
    assert tr.restore(tmp_path / "c", {"act": None}, **lenient) == {
        "act": None
    }  # The template wants nothing from the checkpoint.
    assert tr.restore(tmp_path / "c", ..., **lenient) is ...
    found = tr.restore(tmp_path / "c", {"model": {"w": np.zeros(3)}, "new": np.zeros(1)}, **lenient)
    assert found["model"]["w"].sum() == 3


def test_a_glob_of_what_may_be_missing_fits_something(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"w": np.ones(3)})
    like = {"w": np.zeros(3), "lora": {"a": np.zeros(2)}}
    for globs in (["lora/**"], iter(["lora/**"]), ("lora/**", "w")):
        assert tr.restore(tmp_path / "c", like, missing=globs)["w"].sum() == 3
    with pytest.raises(MismatchError, match=r"missing=\['lorra/\*\*'\]: expected a glob that matches a leaf"):
        tr.restore(tmp_path / "c", like, missing=["lora/**", "lorra/**"])


def test_the_log_says_what_was_restored_and_what_was_not(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(7, {"w": np.ones(3), "n": 3})
        with caplog.at_level("INFO"):
            ckpts.restore(
                {"w": np.zeros(3), "n": 0, "head": {str(n): np.zeros(1) for n in range(7)}}, missing=["head/*"]
            )
    (line,) = [record.getMessage() for record in caplog.records if "restored" in record.getMessage()]
    assert line.startswith(f"restored 2 leaves of step 7, {tmp_path / 'run' / 'step-00000007'} in ")
    assert line.endswith("7 taken from the template: head/0, head/1, head/2, head/3, head/4 and 2 more")
    caplog.clear()
    with caplog.at_level("INFO"):
        tr.restore(tmp_path / "run")
    assert "restored 2 leaves of step 7" in caplog.text and "taken" not in caplog.text


def test_a_number_never_overflows(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"a": 1e300})
    for dtype, name in ((None, "float32"), ("template", "float32"), ("float16", "float16")):
        with pytest.raises(MismatchError, match=f"a: .* it does not fit {name}; use a float in the template"):
            tr.restore(tmp_path / "c", {"a": jnp.float32(0)}, dtype=dtype)
    assert tr.restore(tmp_path / "c", {"a": 0.0}, dtype="float16") == {"a": 1e300}


def test_restore_log_counts_restored_and_skipped_leaves(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log counts the restored leaves, and names those that were not restored."""
    tr.save(tmp_path / "c", {"w": np.ones(3), "ema": {"a": 1, "b": 2}, "f": jnp.tanh, "n": None, "later": 5})
    like = {"w": np.zeros(3), "f": jnp.tanh, "n": None, "later": ...}
    with caplog.at_level("INFO"):
        tr.restore(tmp_path / "c", like, extra=["ema/**"])
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("restored")]
    assert line.startswith("restored 1 leaves of ") and line.endswith("; 3 left in the checkpoint: ema/a, ema/b, later")


@pytest.mark.long
def test_a_function_sees_typed_keys_without_a_template(tmp_path: pathlib.Path) -> None:
    """A function passed as `sharding=` sees the shapes of keys, not those of their data."""
    keys = {"one": jax.random.key(1), "many": jax.random.split(jax.random.key(2), 8)}
    tr.save(tmp_path / "c", keys)
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    seen: dict[str, tuple[int, ...]] = {}

    def where(path: str, shape: tuple[int, ...], dtype: Any) -> Any:
        seen[path] = shape
        return jax.NamedSharding(mesh, jax.P("x") if shape else jax.P())

    found = tr.restore(tmp_path / "c", sharding=where)
    assert seen == {"one": (), "many": (8,)}
    assert all((jax.random.key_data(found[name]) == jax.random.key_data(keys[name])).all() for name in keys)
    assert found["many"].sharding.spec == jax.P("x")


def test_a_rule_makes_integers_of_another_dtype(tmp_path: pathlib.Path) -> None:
    """`dtype` is about floats. The error names the rule for other leaves."""
    tr.save(tmp_path / "c", {"n": np.arange(3)})
    with pytest.raises(MismatchError, match=r"such as 'bfloat16'; tr.rules.cast changes the dtype of other leaves"):
        tr.restore(tmp_path / "c", dtype="int32")
    restored = tr.restore(tmp_path / "c", rules=[tr.rules.cast("n", "int32")])
    assert restored["n"].dtype == "int32" and restored["n"].tolist() == [0, 1, 2]
