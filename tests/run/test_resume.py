"""Tests of resumed jobs that differ from the interrupted one, such as by `init`. `test_resumed_job` has equal ones."""

import dataclasses
import enum
import functools
import gc
import json
import logging
import os
import pathlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

import resumed_jobs
import treering as tr
from treering._restore import restore as restore_module
from treering.errors import MismatchError, UnsupportedError
from treering.formats.treering import manifest

P = jax.P


def resumed(run: pathlib.Path, init: Callable[[], Any], saved: Any = None, **options: Any) -> tuple[Any, Any]:
    """Saves the state of a first job, or `saved`, and returns it with the state of a second job."""
    with tr.Checkpointer(run) as ckpts:
        state, _ = ckpts.restore_or_init(init, **options)
        state = state if saved is None else saved
        ckpts.save(1, state)
    with tr.Checkpointer(run) as ckpts:
        return state, ckpts.restore_or_init(init, **options)[0]


def auto_mesh(count: int = 8, name: str = "x") -> jax.sharding.Mesh:
    return jax.make_mesh((count,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


@flax.struct.dataclass
class Meta:
    w: Any
    epoch: int = flax.struct.field(pytree_node=False, default=0)
    name: str = flax.struct.field(pytree_node=False, default="a")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["sizes"])
@dataclasses.dataclass
class Registered:
    w: Any
    sizes: tuple[int, ...] = (1, 2)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.w, self.epoch = nnx.Param(jnp.ones(3)), 0
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=nnx.Rngs(0))])


class Kind(enum.Enum):
    TRAIN, TEST = 1, 2


@dataclasses.dataclass(frozen=True)
class Config:
    dtype: Any
    activation: Any = jax.nn.relu
    inner: Any = None


STATIC = [
    ("nf4", jnp.uint4, "saved 'nf4', now dtype uint4"),
    (jnp.float8_e4m3fn, jnp.float8_e5m2, "saved dtype float8_e4m3fn, now dtype float8_e5m2"),
    (np.dtype("int8"), np.dtype("int4"), "saved dtype int8, now dtype int4"),
    (np.float32, ml_dtypes.bfloat16, "saved dtype float32, now dtype bfloat16"),
    (None, jnp.bfloat16, "saved None, now dtype bfloat16"),
    (float, int, "saved type float, now type int"),
    (np.int64(3), np.int64(4), "saved 3, now 4"),
    (np.float32(0.5), 0.5, None),
    (fp8_ops.fm32, jnp.float32, "saved dtype fp8_meta32, now dtype float32"),
    (Kind.TRAIN, Kind.TEST, "saved enum Kind.TRAIN, now enum Kind.TEST"),
    (("a", jnp.int8), ("a", jnp.int4), "saved ['a', {'dtype': 'int8'}]"),
    (Config(jnp.int8), Config(jnp.int4), "sizes/dtype (saved dtype int8, now dtype int4)"),
    (Config(1, inner=Config("a")), Config(1, inner=Config("b")), "sizes/inner/dtype (saved 'a', now 'b')"),
    (jnp.uint4, "uint4", None),
    ((np.dtype("uint4"),), ("uint4",), None),
    (jnp.bfloat16, np.dtype("bfloat16"), None),
    (jnp.float32, np.float32, None),
    (Config(jnp.int8), Config(np.dtype("int8"), activation=jax.nn.gelu), None),
    (jax.nn.relu, jax.nn.gelu, None),  # Functions have no value that could be compared.
    (Config(1), jax.nn.gelu, None),
]


@pytest.mark.parametrize(("old", "new", "text"), STATIC, ids=lambda value: str(value).split(" at 0x")[0][:30])
def test_static_values_that_say_what_leaves_mean_are_compared(
    old: Any, new: Any, text: str | None, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, [Registered(jnp.ones(2), old)])
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.restore_or_init(lambda: [Registered(jnp.ones(2), new)])
    assert text in caplog.text if text else "static values" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        tr.restore(tmp_path, like=[Registered(jnp.ones(2), new)])
    assert text in caplog.text if text else "static values" not in caplog.text


def test_a_checkpoint_without_a_record_of_dtypes_says_nothing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints of earlier releases record no dtypes, and those of later ones may record anything."""
    path = pathlib.Path(tr.save(tmp_path / "c", [Registered(jnp.ones(2), (1, jnp.int8))]).path)
    content = json.loads((path / "treering.json").read_text())
    assert content["static"] == {"0": {"sizes": [1, {"dtype": "int8"}]}}
    for value in (None, {"later": [1]}):
        changed = {k: v for k, v in content.items() if k != "xxh3"}
        changed["static"] = {} if value is None else {"0": {"sizes": value}}
        (path / "treering.json").write_bytes(manifest.seal(changed))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            tr.restore(path, like=[Registered(jnp.ones(2), (1, jnp.int8))])
        assert ("static values" in caplog.text) == (value is not None)


def test_keys_in_init_take_their_saved_data_and_nothing_else(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def init() -> Any:
        return {"rng": jax.random.key(0)}

    _, state = resumed(tmp_path / "data", init, {"rng": jax.random.PRNGKey(7)})
    assert state["rng"].dtype == np.uint32 and "rng (init key<fry>, saved uint32)" in caplog.text
    for n, dtype in enumerate((None, "template")):
        with pytest.raises(MismatchError, match=r"rng: expected key<threefry2x32>.*, found float32"):
            resumed(tmp_path / f"{n}", init, {"rng": jnp.float32(1)}, dtype=dtype)


@pytest.mark.long
def test_static_values_that_differ_are_named(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    def init() -> Any:
        return {"net": Net(), "meta": Meta(jnp.ones(2)), "registered": [Registered(jnp.ones(2))]}

    saved = init()
    saved["net"].epoch = 3
    saved["net"].eval()
    saved["meta"] = saved["meta"].replace(epoch=7)
    saved["registered"] = [Registered(jnp.ones(2), (1, 3))]
    _, state = resumed(tmp_path / "run", init, saved)
    (line,) = [record.getMessage() for record in caplog.records if "static values" in record.getMessage()]
    for text in (
        "4 static values",
        "meta/epoch (saved 7, now 0)",
        "net/epoch (saved 3, now 0)",
        "net/layers/0/deterministic (saved True, now False)",
        "registered/0/sizes (saved [1, 3], now [1, 2])",
    ):
        assert text in line
    assert state["meta"].epoch == 0 and state["net"].epoch == 0  # The values of the program stay.
    caplog.clear()
    resumed(tmp_path / "same", init)
    assert "static" not in caplog.text
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.restore_or_init(lambda: init()["meta"], at="meta")
    assert "1 static values differ" in caplog.text and "epoch (saved 7, now 0)" in caplog.text
    caplog.clear()
    copy = tr.save(tmp_path / "copy", tr.open(tmp_path / "run")).path
    with caplog.at_level(logging.INFO):
        tr.restore(copy, like=init())
    assert "net/epoch (saved 3, now 0)" in caplog.text and not [r for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.long
def test_other_dtypes_than_those_of_init_are_named(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    def init() -> Any:
        return {"w": jnp.ones(3), "n": 0, "same": jnp.ones(2)}

    saved = {"w": jnp.ones(3, jnp.bfloat16), "n": jnp.int32(5), "same": jnp.ones(2)}
    with caplog.at_level(logging.INFO):
        resumed(tmp_path / "run", init, saved)
    about = {record.levelname: record.getMessage() for record in caplog.records if "is kept" in record.getMessage()}
    assert "w (init float32, saved bfloat16); dtype='template' takes the dtype of init" in about["WARNING"]
    assert "n (init Python int, saved JAX int32)" in about["INFO"] and "same" not in "".join(about.values())
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        state, _ = ckpts.restore_or_init(init, dtype="template")
        assert state["w"].dtype == "float32" and state["n"].dtype == "int32"
        state, _ = ckpts.restore_or_init(init, dtype="float16")
        assert state["w"].dtype == "float16" and state["same"].dtype == "float16"
        assert ckpts.restore(init())["w"].dtype == "float32"  # A template decides the dtype.


@pytest.mark.parametrize(
    ("init", "text"),
    [
        (lambda: {"w": jnp.ones((3, 2))}, r"w: expected float32\[3,2\], found float32\[3\]"),
        (lambda: {"w": "text"}, r"w: expected str, found float32\[3\]"),
        (lambda: {"w": 1.0}, r"w: expected float, found float32\[3\]"),
    ],
)
def test_other_shapes_than_those_of_init_are_refused(tmp_path: pathlib.Path, init: Any, text: str) -> None:
    with pytest.raises(MismatchError, match=text):
        resumed(tmp_path / "run", init, {"w": jnp.ones(3)})


@pytest.mark.long
def test_a_dtype_that_jax_lacks_is_refused_unless_init_makes_it(tmp_path: pathlib.Path) -> None:
    where = NamedSharding(auto_mesh(), P("x"))
    format = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[3]))

    def init() -> Any:
        with jax.enable_x64(True):
            wide = {"w": jnp.arange(8.0) / 3, "n": jnp.asarray(2**40), "u": jnp.uint64(2**63), "z": jnp.asarray(1j / 3)}
            placed = {"laid": jax.device_put(jnp.ones((2, 3)) / 3, format), "spread": jax.device_put(wide["w"], where)}
        return {**wide, **placed, "single": jnp.ones(3), "key": jax.random.key(0)}

    def described(state: Any) -> Any:
        return resumed_jobs.describe(state)["leaves"]

    state, found = resumed(tmp_path / "run", init)
    assert [leaf.dtype for leaf in (state["w"], state["n"], state["z"])] == ["float64", "int64", "complex128"]
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        assert described(state) == described(found) == described(ckpts.restore(init()))
        with pytest.raises(MismatchError, match=r"w: expected float32, because jax_enable_x64 is off, found float64"):
            ckpts.restore_or_init(lambda: {**init(), "w": jnp.ones(8)})
        with pytest.raises(MismatchError, match=r"w: expected float32, because jax_enable_x64 is off, found float64"):
            ckpts.restore_or_init(lambda: {**init(), "w": np.ones(8)})
    assert not jax.config.read("jax_enable_x64")


def test_an_init_with_code_and_dtypes_as_leaves_is_resumed(tmp_path: pathlib.Path) -> None:
    def init() -> Any:
        jaxpr = jax.make_jaxpr(lambda x: x * 2)(jnp.ones(3)).jaxpr
        return {"w": jnp.ones(2), "dtypes": [np.dtype("float32"), np.float32, jnp.bfloat16, np.ndarray], "jac": jaxpr}

    state, found = resumed(tmp_path / "run", init)
    assert found["dtypes"] == state["dtypes"] and type(found["jac"]) is type(state["jac"])
    with tr.Checkpointer(tmp_path / "other") as ckpts:
        state, _ = ckpts.restore_or_init(lambda: {"w": jnp.ones(2), "mesh": auto_mesh()})
        with pytest.raises(UnsupportedError, match=r"mesh: .*Mesh; each array is saved with its sharding"):
            ckpts.save(1, state)


@pytest.mark.long
def test_one_array_in_two_leaves_is_read_once_and_stays_one(tmp_path: pathlib.Path) -> None:
    embedding = jax.device_put(jnp.ones((8, 4)), NamedSharding(auto_mesh(), P("x")))
    key = jax.random.key(1)
    saved = {"embed": embedding, "head": embedding, "other": jnp.ones((8, 4)), "keys": [key, key], "host": np.ones(2)}
    _, state = resumed(tmp_path / "run", lambda: dict(saved, head=jnp.zeros((8, 4))), saved)
    assert state["embed"] is state["head"] and state["keys"][0] is state["keys"][1]
    assert state["other"] is not state["embed"] and (np.asarray(state["head"]) == 1).all()
    restored = tr.restore(tmp_path / "run", like=saved)  # A template may be donated, so its leaves share no memory.
    assert restored["embed"] is not restored["head"]


def test_shared_array_is_split_if_shardings_differ(tmp_path: pathlib.Path) -> None:
    """`sharding=` may place two leaves of one shared array differently."""
    one = jnp.arange(8.0)
    places = {"a": SingleDeviceSharding(jax.devices()[1]), "b": SingleDeviceSharding(jax.devices()[2]), "c": None}
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, {"a": one, "b": one, "c": one})
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        state, _ = ckpts.restore_or_init(lambda: {"a": one, "b": one, "c": one}, sharding=places)
    assert [state[name].devices() for name in "abc"] == [{jax.devices()[n]} for n in (1, 2, 0)]
    assert all(state[name].tolist() == one.tolist() for name in "abc")


@pytest.mark.long
def test_other_mesh_than_the_one_set_is_kept(tmp_path: pathlib.Path) -> None:
    """Arrays on another mesh than the one that is set keep their mesh."""
    ambient, few = auto_mesh(), jax.sharding.Mesh(np.array(jax.devices()[6:]), ("x",))
    backwards = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("x",))
    meshes = {"set": ambient, "few": few, "backwards": backwards}

    def init() -> Any:
        return {name: jax.device_put(np.ones(8), NamedSharding(mesh, P("x"))) for name, mesh in meshes.items()}

    with jax.set_mesh(ambient):
        saved, state = resumed(tmp_path / "run", lambda: jax.tree.map(jnp.zeros_like, init()), init())
    assert all(state[name].sharding == saved[name].sharding for name in meshes)
    other = jax.make_mesh((2, 4), ("y", "x"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(other), tr.Checkpointer(tmp_path / "run") as ckpts:
        state, _ = ckpts.restore_or_init(lambda: jax.tree.map(jnp.zeros_like, init()))
    assert state["set"].sharding == NamedSharding(other, P("x")) and state["few"].sharding == saved["few"].sharding


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Numbered:
    w: Any
    step: int = 0

    def tree_flatten(self) -> Any:
        return (self.w, self.step), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Numbered":
        return cls(*children)


def test_a_field_that_is_a_leaf_is_no_static_value(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    _, state = resumed(tmp_path / "run", lambda: Numbered(jnp.ones(2)), Numbered(jnp.ones(2), 7))
    assert state.step == 7 and "static" not in caplog.text


@pytest.mark.long
def test_arrays_of_called_init_are_freed_before_restore(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays of a called `init` are freed before the step is restored."""
    made: list[weakref.ref[Any]] = []

    def init() -> Any:
        net = Net()
        if not isinstance(net.w.get_value(), jax.core.Tracer):
            made.append(weakref.ref(net.w.get_value()))
        return {"net": net, "n": float(jnp.ones(3).sum())}  # `float` cannot be traced.

    saved = init()
    made.clear()
    alive: list[bool] = []
    read = restore_module._values

    def reading(*args: Any) -> Any:
        gc.collect()
        alive.append(made[-1]() is not None)
        return read(*args)

    monkeypatch.setattr(restore_module, "_values", reading)
    resumed(tmp_path / "run", init, saved)
    assert alive == [False]


def test_leaves_that_were_saved_with_dtype_have_that_of_init(tmp_path: pathlib.Path) -> None:
    def init() -> Any:
        return {"w": jnp.ones(3), "weak": jnp.asarray(1.0), "host": np.ones(2, np.float32), "n": jnp.int8(1)}

    for n, options in enumerate(({}, {"rules": [tr.rules.rename("^other$", "new", optional=True)]})):
        with tr.Checkpointer(tmp_path / str(n)) as ckpts:
            ckpts.save(1, init(), dtype="bfloat16", **options)
        with tr.Checkpointer(tmp_path / str(n)) as ckpts:
            state, _ = ckpts.restore_or_init(lambda: {**init(), "n": 1})
        assert [state[name].dtype for name in ("w", "weak", "host", "n")] == ["float32"] * 3 + ["int8"]
        assert state["weak"].weak_type and type(state["host"]) is np.ndarray


@functools.lru_cache(maxsize=4)
def cached_table(count: int) -> Any:
    return jnp.arange(float(count))


@functools.cache
def cached_scale() -> Any:
    return jnp.float32(2)


@pytest.mark.long
def test_a_cache_holds_no_tracers(tmp_path: pathlib.Path) -> None:
    def init() -> Any:
        return {"w": cached_table(4) * cached_scale()}

    for n in range(2):
        cached_table.cache_clear()  # A new process has an empty cache.
        cached_scale.cache_clear()
        with tr.Checkpointer(tmp_path / "run") as ckpts:
            state, step = ckpts.restore_or_init(init)
            assert step == n and (state["w"] + cached_table(4)).tolist() == [0, 3, 6, 9]
            ckpts.save(n + 1, state)


def init_of_a_global_object() -> Any:
    return TRAINER.init()


@pytest.mark.long
def test_a_function_as_sharding_is_asked_for_jax_arrays_alone(tmp_path: pathlib.Path) -> None:
    places = {"w": NamedSharding(auto_mesh(), P("x"))}
    init = lambda: {"w": jnp.ones(8), "n": np.ones(3)}  # noqa: E731
    first, second = resumed(tmp_path / "run", init, sharding=lambda path, shape, dtype: places[path])
    assert first["w"].sharding == second["w"].sharding == places["w"] and type(second["n"]) is np.ndarray


class Trainer:
    def init(self) -> Any:
        self.table = jnp.arange(4.0)
        return {"w": jnp.ones(4)}


TRAINER = Trainer()


def init_with_global() -> Any:
    global TABLE
    TABLE = jnp.arange(4.0)
    return {"w": jnp.ones(4), "f": lambda x: x * TABLE}


def init_with_partial() -> Any:
    return {"w": jnp.ones(4), "f": functools.partial(jnp.multiply, jnp.arange(4.0))}


def init_with_default() -> Any:
    table = jnp.arange(4.0)
    return {"w": jnp.ones(4), "f": lambda x, *, by=table: x * by}


def init_with_jitted() -> Any:
    table = jnp.arange(4.0)
    return {"w": jnp.ones(4), "f": jax.jit(lambda x: x * table)}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("init", [init_with_global, init_with_partial, init_with_default, init_with_jitted])
def test_a_function_that_holds_an_array_of_init_works(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, init: Callable[[], Any], sharded: bool
) -> None:
    options = {"sharding": SingleDeviceSharding(jax.devices()[2])} if sharded else {}
    first, second = resumed(tmp_path / "run", init, **options)
    for state in (first, second):
        assert state["f"](jax.device_get(state["w"])).tolist() == [0, 1, 2, 3]
        assert state["w"].committed is sharded
    assert caplog.text.count("init cannot be traced, so it is called") == 1  # by the second job


def test_an_object_on_which_init_leaves_an_array_has_that_array(tmp_path: pathlib.Path) -> None:
    trainer = Trainer()
    resumed(tmp_path / "run", trainer.init)
    assert trainer.table.tolist() == [0, 1, 2, 3]
    resumed(tmp_path / "global", init_of_a_global_object)
    assert TRAINER.table.tolist() == [0, 1, 2, 3]


@pytest.mark.long
def test_an_init_that_leaves_nothing_is_only_traced(tmp_path: pathlib.Path) -> None:
    calls: list[bool] = []

    def init() -> Any:
        model, tx = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optax.adam(optax.cosine_decay_schedule(1e-3, 10))
        calls.append(isinstance(model.kernel.get_value(), jax.core.Tracer))
        return {"model": model, "opt": nnx.Optimizer(model, tx, wrt=nnx.Param), "f": lambda x: x}

    resumed(tmp_path / "run", init)
    assert calls == [False, True, True]


ELASTIC = """
import os, sys
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"
import contextlib, logging, jax, jax.numpy as jnp, treering as tr
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
auto = (jax.sharding.AxisType.Auto,)
def init():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    make = jax.jit(lambda: jnp.arange(48.0).reshape(24, 2), out_shardings=jax.NamedSharding(mesh, jax.P("data")))
    return {"w": make(), "n": jnp.zeros(())}
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
with jax.set_mesh(mesh) if sys.argv[3] == "set" else contextlib.nullcontext(), tr.Checkpointer(sys.argv[2]) as ckpts:
    state, step = ckpts.restore_or_init(init)
    assert (state["w"] == jnp.arange(48.0).reshape(24, 2)).all()
    w, n = state["w"].sharding, state["n"].sharding
    print("devices", len(w.device_set), *w.spec, len(n.device_set))
    ckpts.save(step + 1, state)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["set", "not set"])
def test_a_job_with_more_or_fewer_devices_goes_where_init_says(tmp_path: pathlib.Path, how: str) -> None:
    for count in (4, 8, 1, 2):
        command = [sys.executable, "-c", ELASTIC, str(count), str(tmp_path / "run"), how]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"devices {count} data {count if how == 'set' else 1}" in said
        assert ("so all arrays go where init() places them" in said) is (how == "not set" and count != 4)


# Prints for each state the places of its arrays, those of `init`, the calls of `init`, the warnings, and the step.
PLACES = """
import os, sys
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"
import contextlib, json, logging, jax, jax.numpy as jnp, numpy as np, treering as tr
devices, count, warnings = jax.devices(), jax.device_count(), []
def mesh(part, *names):
    return jax.sharding.Mesh(np.array(part).reshape((-1, *[2] * (len(names) - 1))), names)
def put(*where, kind=None):
    if len(where) > 1:
        used = where[0] if isinstance(where[0], jax.sharding.Mesh) else mesh(where[0], *where[1].split())
        where = [jax.NamedSharding(used, jax.P(*where[2:]), memory_kind=kind)]
    return jax.device_put(np.arange(64.0, dtype=np.float32).reshape(16, 4), where[0])
half, rest = devices[: count // 2], devices[count // 2 :]
backwards = lambda: put(devices[::-1], "x", "x")
inits = {
    "two models": lambda: {"actor": put(half, "x", "x"), "ref": put(rest, "x", "x"), "n": jnp.zeros(())},
    "replicated": lambda: {"actor": put(half, "x"), "ref": put(rest, "x")},
    "single devices": lambda: {"actor": put(devices[0]), "ref": put(devices[-1])},
    "first device": lambda: {"actor": put(devices[count // 8])},
    "two kinds": lambda: {"all": put(devices, "x y", "x", "y"), "some": put(rest, "z", None, "z"), "one": put(rest[0])},
    "host memory": lambda: {"w": put(devices, "x", "x"), "mu": put(rest, "x", "x", kind="pinned_host")},
    "backwards": lambda: {"w": backwards(), "v": put(half[::-1], "x", "x")},
    "only with many": lambda: {"w": put(devices, "x", "x") if count == 8 else jnp.ones((16, 4))},
    "not placed": lambda: {"w": jnp.ones((16, 4)), "host": np.ones(3)},
    "explicit": lambda: {"w": put(explicit(devices), "e", "e"), "v": put(explicit(rest), "e", None, "e"),
        "r": put(explicit(devices), "e"), "free": jnp.zeros(3)},
}
def explicit(part):
    return jax.sharding.Mesh(np.array(part).reshape(-1, 2), ("d", "e"), (jax.sharding.AxisType.Explicit,) * 2)
def described(state):
    arrays = {path: x for path, x in state.items() if isinstance(x, jax.Array)}
    shardings = {path: x.sharding for path, x in arrays.items()}
    return {path: [[d.id for d in getattr(s, "_device_assignment")], str(getattr(s, "spec", "")), s.memory_kind,
        str(arrays[path].committed)] for path, s in shardings.items()}
class Handler(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())
logging.getLogger("treering").addHandler(Handler(logging.WARNING))
found = {}
for name, init in inits.items():
    calls = []
    def counted():
        state = init()
        calls.extend(isinstance(x, jax.core.Tracer) for x in list(state.values())[:1])
        return state
    warnings.clear()
    set_mesh = jax.set_mesh(mesh(devices, "x")) if sys.argv[3] == "set" else contextlib.nullcontext()
    with set_mesh, tr.Checkpointer(f"{sys.argv[2]}/{name}") as ckpts:
        state, step = ckpts.restore_or_init(counted)
        ckpts.save(step + 1, state)
        found[name] = [described(state), described(init()), calls.count(False), list(warnings), step]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["set", "not set"])
def test_arrays_of_a_job_with_other_devices_are_placed_together(tmp_path: pathlib.Path, how: str) -> None:
    """Taken one by one, the saved places that still exist could bring two models together on the same devices."""
    for step, count in enumerate((8, 8, 4, 4, 8)):
        command = [sys.executable, "-c", PLACES, str(count), str(tmp_path), how]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        for name, (places, of_init, calls, warnings, found) in json.loads(said).items():
            if how == "set" and name in ("only with many", "not placed"):  # Their arrays go to the mesh that is set.
                assert calls == (step == 0) and not warnings
                continue
            assert found == step and places == of_init, f"{name} with {count} devices: {places}, init() says {of_init}"
            if step in (0, 1, 3):
                assert calls == (step == 0) and not warnings, f"{name} with {count} devices: {calls} calls, {warnings}"
            else:
                (warning,) = warnings
                assert calls == 1 and "so all arrays go where init() places them, and it is called" in warning
                assert name != "two models" or ("actor (a mesh of" in warning and "ref (a mesh of" in warning)


def test_arrays_of_unknown_place_go_where_init_says(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    where = NamedSharding(auto_mesh(), P("x"))
    init = jax.jit(lambda: {"w": jnp.ones(8)}, out_shardings={"w": where})
    tr.save(tmp_path / "run" / "checkpoint_5", {"w": np.arange(8.0, dtype=np.float32)}, format="flax")
    with tr.Checkpointer(tmp_path / "run", prefix="checkpoint_") as ckpts:
        state, step = ckpts.restore_or_init(init)
        assert step == 5 and state["w"].sharding == where and state["w"].tolist() == list(range(8))
    assert "init() is called to see where it places arrays whose place is not known: w" in caplog.text


def test_a_sharding_goes_before_the_saved_place(tmp_path: pathlib.Path) -> None:
    x, y = NamedSharding(auto_mesh(), P("x")), NamedSharding(auto_mesh(4, "y"), P("y"))
    init = jax.jit(lambda: {"w": jnp.ones(8), "v": jnp.ones(8)}, out_shardings={"w": x, "v": x})
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        state, _ = ckpts.restore_or_init(init)
        ckpts.save(1, state)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for wish in ({"w": y, "v": None}, lambda path, shape, dtype: y if path == "w" else None):
            state, _ = ckpts.restore_or_init(init, sharding=wish)
            assert state["w"].sharding == y and state["v"].sharding == x
