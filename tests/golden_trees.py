"""The trees behind the files in tests/golden: what a reader of every later release must find there.

The files were written by the release that introduced the version of the format, or by the release whose folder they are
in, and are never written again. So the trees never change, whatever ml_dtypes adds.
"""

import collections
import dataclasses
import functools
import struct
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from flax.core.meta import Partitioned
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

DTYPES = [
    "bfloat16",
    "float4_e2m1fn",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int1",
    "int2",
    "int4",
    "uint1",
    "uint2",
    "uint4",
]

Adam = collections.namedtuple("Adam", "count mu")


def metadata() -> Any:
    """Metadata with floats that JSON cannot write, and text that looks like one."""
    own = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    floats = {"clip": float("inf"), "a/b~": [-float("inf"), 0.5, {"": float("nan"), "ü\n": own}], "0": [[float("inf")]]}
    return {**floats, "text": ["nan", "inf", "-inf", "nan:fff8000000000001"], "none": None}


def everything() -> Any:
    """A leaf of every type, in a container of every kind."""
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tied = np.arange(5, dtype=np.int64)
    return {
        "dtypes": {
            **{name: np.array([0, 1]).astype(getattr(ml_dtypes, name)) for name in DTYPES},
            **{
                name: np.array([0, 1, 1]).astype(name) for name in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
            },
            **{name: np.array([1.5, -0.0, np.nan]).astype(name) for name in ("f2", "f4", "f8", "c8", "c16")},
            "datetime": np.array(["2026-11-20", "NaT"], "datetime64[D]"),
            "text": np.array(["a", "äöü"]),
            "bytes": np.array([b"ab", b"c"]),
        },
        "small": [np.array([-8, 7]).astype(ml_dtypes.int4), jnp.array([-2, 1]).astype(jnp.int2)],
        "jax": jnp.arange(6.0).reshape(2, 3),
        "weak": jnp.asarray(2.0),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "scalar": np.float32(1.5),
        "zero-d": np.array(3),
        "empty": np.zeros((0, 3), np.float32),
        "transposed": numbers.T,
        "tied": [tied, tied],
        "values": [
            True,
            1,
            2**70,
            -(2**60),
            -0.0,
            float("inf"),
            float("nan"),
            1 - 2j,
            "text\n\0",
            b"\xff",
            None,
            jax.nn.relu,
        ],
        "tuple": (1, (), {}),
        "named": Adam(3, {"w": numbers[0]}),
        "__metadata__": numbers[1],
        "a/b~c": {"": np.int8(1), " ": {"~@0": 2, "😀": 3}},
        "ints": {1: 1, 10: 2},
        "bools": {False: 1},
        "floats": {0.5: 1},
        "bytes": {b"\xff": 1},
    }


def sharded() -> Any:
    """Arrays in several pieces, on eight devices."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"rows": jax.P("data"), "both": jax.P("data", "model"), "swapped": jax.P("model", "data"), "all": jax.P()}
    values = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    return {
        name: jax.device_put(values + n, jax.NamedSharding(mesh, spec)) for n, (name, spec) in enumerate(specs.items())
    }


def trained(step: int) -> Any:
    """Returns the state of a small training job at a step."""
    weights = (jnp.arange(12.0).reshape(3, 4) * step).astype(jnp.bfloat16)
    return {
        "params": {"embed": {"w": weights}, "head": jnp.arange(4.0) / 4 + step},
        "opt": (Adam(jnp.asarray(step), {"mu": np.full(4, step / 8)}), ()),
        "rng": jax.random.fold_in(jax.random.key(3), step),
        "step": step,
    }


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["epoch", "sizes"])
@dataclasses.dataclass
class Static:
    w: Any
    epoch: int = 3
    sizes: tuple[int, ...] = (1, 2)


def placed() -> Any:
    """Arrays in places of every kind, and static values."""
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    backwards = Mesh(np.array(jax.devices()[:8][::-1]), ("x",))
    device = jax.devices()[3]
    square = np.arange(64, dtype=np.float32).reshape(8, 8)
    host = NamedSharding(backwards, jax.P("x"), memory_kind="pinned_host")
    tied = jax.device_put(square, NamedSharding(explicit, jax.P("data", None)))
    return {
        "uncommitted": jnp.arange(3.0),
        "device": jax.device_put(square[0], device),
        "layout": jax.device_put(square, Format(Layout((1, 0)), SingleDeviceSharding(device))),
        "explicit": jax.device_put(square, NamedSharding(explicit, jax.P(("data", "model")))),
        "tied": [tied, tied],
        "host": jax.device_put(square, host),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(backwards, jax.P("x"))),
        "numpy": square,
        "static": Static(jnp.ones(2)),
        "number": 1,
    }


def reduced() -> Any:
    """Arrays whose type says that mesh axes are reduced. JAX 0.9 has no such type."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x, both = frozenset("x"), frozenset("xy")
    specs = {"one": jax.P(None, reduced=x), "cut": jax.P("y", reduced=x), "both": jax.P(reduced=both)}
    return {
        name: jax.device_put(np.arange(8, dtype=np.float32) + n, NamedSharding(mesh, spec))
        for n, (name, spec) in enumerate(specs.items())
    }


def boxed() -> Any:
    """Boxes of Flax around leaves and around a container."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model.kernel, model.bias = nnx.Param(jnp.arange(6.0).reshape(2, 3)), nnx.Param(jnp.arange(3.0))
    cache = nnx.Cache({"k": jnp.ones(2), "v": jnp.zeros(2)})
    return {"model": nnx.state(model), "cache": cache, "linen": Partitioned(jnp.ones((2, 2)), ("in", None)), "n": 3}


DEEP = {"n": 3, "rng": np.arange(3, dtype=np.uint32), "half": np.float16(1.5), "deep": ({1: b"x", None: 2.5}, [True])}


def iterators() -> Any:
    """Data iterators of two processes, one that has a state in each of them and one with a state for all."""
    states = [DEEP, {**DEEP, "n": 4}]
    return {"each": states, "all": [{"global_next_index": 40}], "x": np.arange(8, dtype=np.float32)}


def stored_states() -> Any:
    """Returns an iterator of two processes whose states are in array files: every type that a state may have."""
    state = {**DEEP, "b": b"\xff" * 70, b"key": "ä\n", 2**70: [float("nan"), -0.0, 1 - 2j, True, b"", np.zeros((0, 3))]}
    return {"data": [state, b"of the other"], "x": np.arange(8, dtype=np.float32)}


def typed_states() -> Any:
    """Returns an iterator of one process whose state has values that are not plain."""
    state = {
        "order": collections.OrderedDict(b=jax.random.key(3), a=jnp.arange(3)),
        "seen": {2, 1},
        "last": collections.deque([1, 2], 4),
        "counts": [collections.Counter("aab"), collections.defaultdict(list, {1: [frozenset([1])]})],
        "buffer": [{"image": jnp.full(2, 1), "label": n} for n in range(3)],
    }
    return {"data": [state], "x": np.arange(8, dtype=np.float32)}


def versions() -> list[dict[str, Any]]:
    """Versions of published weights: a few elements differ, then none, then the sign of all."""
    numbers = np.linspace(-3, 3, 600)
    first = {
        "bf16": numbers.astype(ml_dtypes.bfloat16),
        "f32": numbers.astype(np.float32).reshape(20, 30),
        "f64": numbers,
        "i8": np.arange(600, dtype=np.int8),
        "same": np.ones(100, np.float32),
    }
    second = {name: array.copy() for name, array in first.items()}
    for array in (second["bf16"], second["f32"].reshape(-1), second["f64"], second["i8"]):
        array[[0, 7, 599]] += np.ones((), array.dtype)
    second["f32"].reshape(-1)[300] = np.float32(-1e30)
    return [first, second, {name: array.copy() for name, array in second.items()}, {**second, "f32": -second["f32"]}]
