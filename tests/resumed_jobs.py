"""Runs small jobs that are killed, resumes them in a new process, and reports every difference.

A set-up is a small training job: an initial state, a step, and the options of `restore_or_init`. Process 1 trains each
set-up of a group for three steps, saves, describes the saved state, and trains five more steps. It ends by SIGKILL in
the middle of a save. Process 2 resumes each set-up, describes what it got, and trains the same five steps. Process 1
also trains the five steps with a fresh `jax.jit`, which gives the number of traces and compilations to expect.
"""

import collections
import contextlib
import copy
import dataclasses
import faulthandler
import functools
import os
import pathlib
import pickle
import re
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import treering as tr
import zygote
from treering import stores
from treering.stores.posix import Disk
from xla_flags import xla_flags

SAVED_STEP, LAST_STEP = 3, 8
TIMEOUT_SECONDS = 240

# The harness


class Jitted:
    """Jits the body of a step, and counts how often it is traced and compiled."""

    def __init__(self, body: Callable[..., Any], jit: Callable[..., Any] = jax.jit, **options: Any) -> None:
        self._body, self._jit, self._options = body, jit, options
        self.renew()

    def renew(self) -> None:
        """Forgets every trace and every compiled program, as a new process has none."""
        self.traces = 0

        def counted(*arguments: Any) -> Any:
            self.traces += 1
            return self._body(*arguments)

        self._jitted = self._jit(counted, **self._options)

    def __call__(self, *arguments: Any) -> Any:
        return self._jitted(*arguments)

    @property
    def compiles(self) -> int:
        """Returns the number of compiled programs."""
        return getattr(self._jitted, "jitted_fn", self._jitted)._cache_size()  # `jitted_fn` is that of `nnx.jit`


class SetUp(NamedTuple):
    """Describes a job.

    init: makes the state.
    step: gives the next state, from a state and the number of the step.
    options: keyword arguments of `restore_or_init`.
    jitted: the jitted part of the step, if the step itself is not jitted.
    context: makes the context in which all of the job runs, such as `jax.set_mesh(mesh)`.
    copied: copies a state that the step changes in place.
    """

    init: Callable[[], Any]
    step: Callable[[Any, int], Any]
    options: Mapping[str, Any] = {}
    jitted: Jitted | None = None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    copied: Callable[[Any], Any] = lambda state: state

    def counted(self) -> Jitted | None:
        """Returns the jitted part of the step."""
        return self.step if isinstance(self.step, Jitted) else self.jitted

    def train(self, state: Any, keep: Callable[[Any], None]) -> Any:
        """Trains the steps after the saved one, and gives the state of each to `keep`."""
        for step in range(SAVED_STEP + 1, LAST_STEP + 1):
            state = self.step(state, step)
            keep(contents(state))
        return state


class NotAvailableError(Exception):
    """The installed libraries lack a feature that a set-up needs."""


class Record(NamedTuple):
    """The findings of one process about one set-up, as far as it came.

    state: the description of the saved or the restored state; see `describe`.
    later: the contents of the five states after it; see `contents`.
    counts: how often these steps were traced and compiled.
    error: where the set-up failed, and with what.
    missing: what the installed libraries lack.
    """

    state: dict[str, Any] | None = None
    later: Sequence[dict[str, Any]] = ()
    counts: dict[str, int] | None = None
    error: str = ""
    missing: str = ""


_TABLE: dict[str, dict[str, Callable[[], SetUp]]] = collections.defaultdict(dict)


def in_group(group: str) -> Callable[[Callable[[], SetUp]], Callable[[], SetUp]]:
    """Adds a set-up to the table."""

    def add(function: Callable[[], SetUp]) -> Callable[[], SetUp]:
        _TABLE[group][function.__name__] = function
        return function

    return add


def groups() -> dict[str, list[str]]:
    """Returns the names of the set-ups of each group."""
    return {group: [*functions] for group, functions in _TABLE.items()}


def problems(group: str, folder: pathlib.Path) -> list[str]:
    """Runs both processes of a group, and returns a line for every difference between its jobs and the resumed ones."""
    found: list[str] = []
    for function, expected in ((interrupted, -signal.SIGKILL), (resumed, 0)):
        code, output = start(function, group, folder)
        if code != expected:
            found.append(f"{function.__name__}: ended with {code} rather than {expected}: {output[-3000:]}")
    for name in _TABLE[group]:
        found += (f"{name}: {line}" for line in differences(*(_read(folder, name, job) for job in (1, 2))))
    return found


def start(function: Callable[[str, pathlib.Path], None], group: str, folder: pathlib.Path) -> tuple[int, str]:
    """Runs a function of this module in a new process. Returns its exit code and what it printed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(8)}
    script = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import pathlib, resumed_jobs
resumed_jobs.{function.__name__}({group!r}, pathlib.Path({str(folder)!r}))
"""
    return zygote.Process(script, environment).communicate(TIMEOUT_SECONDS)


def interrupted(group: str, folder: pathlib.Path) -> None:
    """Trains every set-up of a group, and dies in the middle of a save of the last one. This is process 1."""
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS - 5, exit=True)
    dying = False

    class Deadly(Disk):
        def sync(self, fd: int) -> None:
            if dying and f"step-{LAST_STEP:08}/" in os.readlink(f"/proc/self/fd/{fd}"):
                os.kill(os.getpid(), signal.SIGKILL)
            super().sync(fd)

    stores.register(stores.Filesystem(Deadly()))
    jobs: list[tr.Checkpointer] = []  # none is closed: the kill ends all of them
    state: Any = None

    def train(name: str, note: Callable[..., None]) -> None:
        nonlocal state
        set_up = _TABLE[group][name]()
        with set_up.context():
            jobs.append(tr.Checkpointer(folder / name))
            state, step = jobs[-1].restore_or_init(set_up.init, **set_up.options)
            assert step == 0
            for number in range(1, SAVED_STEP + 1):
                state = set_up.step(state, number)
            note(state=describe(state))
            jobs[-1].save(SAVED_STEP, state)
            jobs[-1].wait()
            saved, later, again = set_up.copied(state), [], []
            state = set_up.train(state, later.append)
            if jitted := set_up.counted():
                jitted.renew()
            set_up.train(saved, again.append)
            assert later == again, "the set-up itself does not give the same bits twice"
            note(later=later, counts=_counts(set_up))

    for name in _TABLE[group]:
        _recorded(name, folder / f"{name}.1", train)
    dying = True
    jobs[-1].save(LAST_STEP, state)
    jobs[-1].wait()  # the process dies here


def resumed(group: str, folder: pathlib.Path) -> None:
    """Resumes every set-up of a group. This is process 2."""
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS - 5, exit=True)

    def go_on(name: str, note: Callable[..., None]) -> None:
        set_up = _TABLE[group][name]()
        with set_up.context(), tr.Checkpointer(folder / name) as ckpts:
            state, step = ckpts.restore_or_init(set_up.init, **set_up.options)
            assert step == SAVED_STEP, f"step {step} was restored"
            note(state=describe(state))
            later: list[Any] = []
            try:
                set_up.train(state, later.append)
            finally:
                note(later=later, counts=_counts(set_up))

    for name in _TABLE[group]:
        _recorded(name, folder / f"{name}.2", go_on)
    faulthandler.cancel_dump_traceback_later()


def _recorded(name: str, file: pathlib.Path, job: Callable[[str, Callable[..., None]], None]) -> None:
    """Runs the job of a set-up, and writes its record in any case."""
    record = Record()

    def note(**found: Any) -> None:
        nonlocal record
        record = record._replace(**found)

    try:
        job(name, note)
    except NotAvailableError as error:
        note(missing=str(error))
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)).partition("\n----")[0]  # JAX's remarks follow the line
        text = text.replace(f"{file.parent}/", "")
        lines = [line.strip() for line in text.splitlines() if line.strip() and "More about it" not in line]
        note(error=" | ".join(lines[:3])[:250])
    file.write_bytes(pickle.dumps(tuple(record)))


def _read(folder: pathlib.Path, name: str, job: int) -> Record:
    file = folder / f"{name}.{job}"
    return Record(*pickle.loads(file.read_bytes())) if file.exists() else Record(error="the process ended before it")


def _counts(set_up: SetUp) -> dict[str, int]:
    jitted = set_up.counted()
    return {"traces": jitted.traces, "compiles": jitted.compiles} if jitted else {}


# What is compared


def differences(first: Record, second: Record) -> list[str]:
    """Returns a line for every difference between a resumed job and the interrupted one, at most one for each leaf."""
    if first.missing or first.error:
        return [f"process 1: {first.error}"] if first.error else []
    lines = [f"process 2, after {len(second.later)} steps: {second.error}"] if second.error else []
    if second.missing:
        lines.append(f"process 2 lacks what process 1 had: {second.missing}")
    if first.state is None or second.state is None:
        return lines or ["no state was described"]
    if first.state["treedef"] != second.state["treedef"]:
        lines.append(f"treedef: saved {first.state['treedef']}, restored {second.state['treedef']}")
    ours, theirs = first.state["leaves"], second.state["leaves"]
    for path in {**ours, **theirs}:
        about = _leaf_differences(ours.get(path), theirs.get(path))
        for step, (one, other) in enumerate(zip(first.later, second.later, strict=False), SAVED_STEP + 1):
            if one.get(path) != other.get(path):
                about.append(f"other contents after step {step}")
                break
        if about:
            lines.append(f"{path or '(root)'}: {'; '.join(about)}")
    for step, (one, other) in enumerate(zip(first.later, second.later, strict=False), SAVED_STEP + 1):
        if added := [path for path in {**one, **other} if path not in ours and one.get(path) != other.get(path)]:
            lines.append(f"other contents after step {step}: {', '.join(added)}")
            break
    if not second.error and len(first.later) != len(second.later):
        lines.append(f"{len(first.later)} steps after the saved one, then {len(second.later)}")
    if first.counts != second.counts and not second.error:
        lines.append(f"a job that continues has {first.counts}, the resumed job {second.counts}")
    return lines


def _leaf_differences(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> list[str]:
    if ours is None or theirs is None:
        return ["there was no such leaf"] if ours is None else ["the leaf is missing"]
    if ours["type"] != theirs["type"]:  # No other property can be compared across types.
        return [f"type: saved {ours['type']}, restored {theirs['type']}"]
    return [
        f"other {name}" if name == "bits" else f"{name}: saved {ours.get(name)}, restored {theirs.get(name)}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]


def describe(state: Any) -> dict[str, Any]:
    """Returns all properties in which a restored state must equal the saved one."""
    paths: dict[int, str] = {}
    leaves: dict[str, dict[str, Any]] = {}
    for path, leaf in _leaves(state):
        leaves[path] = _described(leaf)
        if isinstance(leaf, jax.Array):
            leaves[path]["same object as"] = paths.setdefault(id(leaf), path)
    treedef = re.sub(r" at 0x[0-9a-f]+", "", str(jax.tree.structure(state)))
    return {"treedef": treedef, "leaves": leaves}


def contents(state: Any) -> dict[str, Any]:
    """Returns the type, the dtype, the shape and the bits of every leaf."""
    return {path: [*_value(leaf).values()] for path, leaf in _leaves(state)}


def _leaves(state: Any) -> list[tuple[str, Any]]:
    with_paths = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda leaf: leaf is None)
    leaves: dict[str, Any] = {}
    for keys, leaf in with_paths:
        path = jax.tree_util.keystr(keys)
        while path in leaves:  # Nodes without keys can give two leaves the same path.
            path += "'"
        leaves[path] = leaf
    return [*leaves.items()]


def _value(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, jax.Array):
        about = {"type": "jax.Array", "dtype": str(leaf.dtype), "shape": leaf.shape}
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            about["bits"] = np.asarray(jax.random.key_data(leaf)).tobytes()
            return {**about, "implementation": str(jax.random.key_impl(leaf))}
        return {**about, "bits": _bits(np.asarray(leaf))}
    if isinstance(leaf, np.ndarray | np.generic):
        return {"type": type(leaf).__name__, "dtype": str(leaf.dtype), "shape": leaf.shape, "bits": _bits(leaf)}
    if isinstance(leaf, Rows):
        return {"type": type(leaf).__name__, "value": leaf.get_state()}
    if isinstance(leaf, np.random.Generator):
        return {"type": type(leaf).__name__, "value": repr(leaf.bit_generator.state)}
    if callable(leaf):
        return {"type": type(leaf).__name__, "value": getattr(leaf, "__qualname__", "")}
    return {"type": type(leaf).__name__, "value": repr(leaf)}


def _described(leaf: Any) -> dict[str, Any]:
    about = _value(leaf)
    if isinstance(leaf, jax.Array):
        about |= {"committed": leaf.committed, "weak type": leaf.aval.weak_type, **_place(leaf.sharding)}
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # JAX has no layout for keys
            about["layout"] = leaf.format.layout and leaf.format.layout.major_to_minor
    return about


def _place(sharding: Any) -> dict[str, Any]:
    about = {"sharding": type(sharding).__name__, "memory kind": sharding.memory_kind}
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        about["mesh"] = (mesh.axis_names, mesh.axis_sizes, tuple(map(str, mesh.axis_types)))
        return {**about, "devices": [d.id for d in mesh.devices.flat], "spec": repr(sharding.spec)}
    if isinstance(sharding, SingleDeviceSharding):
        return {**about, "devices": [d.id for d in sharding.device_set]}
    return {**about, "repr": repr(sharding)}


def _bits(array: np.ndarray | np.generic) -> bytes:
    if array.dtype.name in ("int2", "int4", "uint2", "uint4"):
        array = array.astype(np.int8)  # The upper bits of these dtypes have no meaning.
    return array.tobytes()


# Set-ups of values: types, dtypes, weak types, keys, aliases, functions, iterators


def _weights(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Makes an array of different numbers."""
    return jnp.asarray(np.sin(np.arange(1, np.prod(shape) + 1)).reshape(shape), dtype)


def _change(state: Any, step: Any) -> Any:
    """Changes every number by a bounded amount, and keeps all dtypes and weak types; the body of many steps."""
    return jax.tree.map(lambda leaf: leaf + (leaf * 0.25).astype(leaf.dtype) * (leaf < 2), state)


@in_group("values")
def plain() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(jnp.ones((2, 8)) @ p["w"] + p["b"]) ** 2))(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "n": state["n"] + 1}

    return SetUp(lambda: {"params": {"w": _weights(8, 3), "b": jnp.zeros(3)}, "n": jnp.int32(0)}, Jitted(body))


@in_group("values")
def weak_in_init_and_strong_later() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean(jax.nn.softmax(p["w"] @ p["w"].T * p["scale"]).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: jnp.asarray(p - 0.1 * g, p.dtype), state, jax.grad(loss)(state))

    return SetUp(lambda: {"w": _weights(8, 8, dtype=jnp.bfloat16), "scale": jnp.log(1 / 0.07)}, Jitted(body))


@in_group("values")
def weak_in_init_and_weak_later() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        return {"w": state["w"] * state["scale"], "scale": state["scale"] * 0.9}

    return SetUp(lambda: {"w": _weights(8, dtype=jnp.bfloat16), "scale": jnp.log(1 / 0.07)}, Jitted(body))


@in_group("values")
def strong_in_init_and_weak_later() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        w = jnp.asarray(state["w"] * state["rate"], jnp.bfloat16)
        return {"w": w, "rate": 1.0 / (1 + 0.1 * step)}

    return SetUp(lambda: {"w": _weights(8, dtype=jnp.bfloat16), "rate": jnp.float32(1)}, Jitted(body))


@in_group("values")
def float32_in_init_and_bfloat16_later() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        return {"w": (jnp.sin(state["w"] * 1.1) * state["w"] + 0.01).astype(jnp.bfloat16)}

    return SetUp(lambda: {"w": jnp.linspace(1, 2, 64)}, Jitted(body))


@in_group("values")
def bfloat16_in_init_and_float32_later() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        return {"w": jnp.sin(state["w"].astype(jnp.float32) * 1.1) * state["w"] + 0.01}

    return SetUp(lambda: {"w": jnp.linspace(1, 2, 64, dtype=jnp.bfloat16)}, Jitted(body))


@in_group("values")
def python_zero_becomes_a_large_uint32() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        return {"tokens": jnp.uint32(state["tokens"]) + jnp.uint32(900_000_000)}

    return SetUp(lambda: {"tokens": 0}, Jitted(body))


@in_group("values")
def python_numbers_become_arrays() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        strong = jnp.float32(state["strong"]) * 0.9
        return {"weak": state["weak"] * 1.1, "strong": strong, "flag": state["flag"] ^ True, "n": state["n"] + 1}

    return SetUp(lambda: {"weak": 1.0, "strong": 1.0, "flag": False, "n": 0}, Jitted(body))


@in_group("values")
def arrays_become_python_numbers() -> SetUp:
    jitted = Jitted(lambda w, best, step: (w * 0.9, jnp.minimum(best, jnp.sum(w))))

    def step(state: Any, step: int) -> Any:
        w, best = jitted(state["w"], state["best"], step)
        return {"w": w, "best": float(best), "n": int(state["n"]) + 1}

    return SetUp(lambda: {"w": _weights(5), "best": jnp.inf * jnp.ones(()), "n": jnp.int32(0)}, step, jitted=jitted)


@in_group("values")
def python_values_change() -> SetUp:
    jitted = Jitted(_change)

    def init() -> Any:
        return {
            **{"w": _weights(5), "epoch": 0, "best": 1.5, "done": False, "name": "begin", "raw": b"", "z": 1j},
            "big": 1 << 62,
        }

    def step(state: Any, step: int) -> Any:
        return {
            **{"w": jitted(state["w"], step), "epoch": state["epoch"] + 1, "best": state["best"] / 3, "done": step > 1},
            **{"name": f"step {step}", "raw": bytes([step, 255]), "z": state["z"] * (0.5 + 1j)},
            "big": state["big"] * 3,
        }

    return SetUp(init, step, jitted=jitted)


@in_group("values")
def numpy_becomes_jax() -> SetUp:
    def init() -> Any:
        return {"w": np.linspace(0, 1, 6), "n": np.int64(0), "half": np.ones(2, np.float16), "flag": np.array([True])}

    def body(state: Any, step: Any) -> Any:
        return {"w": state["w"] * 1.1, "n": state["n"] + 1, "half": state["half"] / 3, "flag": ~state["flag"]}

    return SetUp(init, Jitted(body))


@in_group("values")
def jax_becomes_numpy() -> SetUp:
    jitted = Jitted(_change)

    def step(state: Any, step: int) -> Any:
        return {name: np.asarray(value) for name, value in jitted(state, step).items()}

    return SetUp(lambda: {"w": _weights(3, 2), "h": _weights(4, dtype=jnp.bfloat16)}, step, jitted=jitted)


@in_group("values")
def numpy_stays_numpy() -> SetUp:
    def init() -> Any:
        return {"w": np.linspace(0, 1, 6), "n": np.int64(1 << 40), "s": np.float32(1), "m": np.zeros((2, 0), np.uint8)}

    def step(state: Any, step: int) -> Any:
        return {"w": state["w"] / 3, "n": state["n"] + 1, "s": state["s"] / np.float32(3), "m": state["m"] + 1}

    return SetUp(init, step)


def _keys(implementation: str) -> SetUp:
    def init() -> Any:
        key = jax.random.key(3, impl=implementation)
        return {"w": _weights(3), "key": key, "many": jax.random.split(jax.random.fold_in(key, 1), 4)}

    def body(state: Any, step: Any) -> Any:
        key, own = jax.random.split(state["key"])
        many = jax.vmap(lambda one: jax.random.fold_in(one, 7))(state["many"])
        return {"w": state["w"] + jax.random.normal(own, (3,)), "key": key, "many": many}

    return SetUp(init, Jitted(body))


@in_group("values")
def threefry_keys() -> SetUp:
    return _keys("threefry2x32")


@in_group("values")
def rbg_keys() -> SetUp:
    return _keys("rbg")


@in_group("values")
def raw_key_becomes_a_typed_key() -> SetUp:
    def step(state: Any, step: int) -> Any:
        key = state["key"] if jnp.issubdtype(state["key"].dtype, jax.dtypes.prng_key) else jax.random.key(5)
        return jitted({"w": state["w"], "key": key}, step)

    def body(state: Any, step: Any) -> Any:
        key, own = jax.random.split(state["key"])
        return {"w": state["w"] + jax.random.normal(own, (3,)), "key": key}

    jitted = Jitted(body)
    return SetUp(lambda: {"w": _weights(3), "key": jax.random.PRNGKey(5)}, step, jitted=jitted)


@in_group("values")
def one_array_in_two_leaves() -> SetUp:
    jitted = Jitted(_change)

    def init() -> Any:
        w, key = _weights(3), jax.random.key(1)
        return {"in": w, "out": [w, jnp.zeros(3)], "key": key, "other_key": key}

    def step(state: Any, step: int) -> Any:
        w = jitted(state["in"], step)
        return {**state, "in": w, "out": [w, state["out"][1] + state["out"][0]]}

    return SetUp(init, step, jitted=jitted)


@in_group("values")
def one_array_in_two_leaves_after_a_step() -> SetUp:
    jitted = Jitted(_change)

    def step(state: Any, step: int) -> Any:
        w = jitted(state["in"], step)
        return {"in": w, "out": w}

    return SetUp(lambda: {"in": _weights(3), "out": _weights(3) * 2}, step, jitted=jitted)


@in_group("values")
def one_array_in_two_leaves_of_init_alone() -> SetUp:
    def init() -> Any:
        w = _weights(3)
        return {"w": w, "average": w}

    def body(state: Any, step: Any) -> Any:
        return {"w": state["w"] * 1.1, "average": state["average"] * 0.9 + state["w"] * 0.1}

    return SetUp(init, Jitted(body))


@in_group("values")
def unusual_dtypes_and_shapes() -> SetUp:
    def init() -> Any:
        return {
            **{"int4": jnp.arange(-3, 3).astype(jnp.int4), "uint4": jnp.arange(5).astype(jnp.uint4)},
            **{"bool": jnp.arange(5) < 2, "complex": _weights(3) * (1 + 2j), "f8": _weights(7, dtype=jnp.float8_e5m2)},
            **{"empty": jnp.zeros((0, 3)), "scalar": jnp.float16(0.5), "u8": jnp.arange(3, dtype=jnp.uint8)},
        }

    def body(state: Any, step: Any) -> Any:
        return {
            **{name: (state[name].astype(jnp.int8) + 1).astype(name) for name in ("int4", "uint4")},
            **{"bool": jnp.roll(state["bool"], 1), "complex": state["complex"] * jnp.complex64(0.6 + 0.8j)},
            **{"f8": (state["f8"].astype(jnp.float32) * 1.5).astype(jnp.float8_e5m2), "empty": state["empty"] + 1},
            **{"scalar": state["scalar"] * jnp.float16(0.7), "u8": state["u8"] * 3 + 1},
        }

    return SetUp(init, Jitted(body))


@in_group("values")
def special_floats() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        return {"w": jnp.roll(state["w"], 1), "sum": state["sum"] + state["w"][0]}

    nans = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000, 0x3F800000], np.uint32)
    return SetUp(lambda: {"w": jnp.asarray(nans.view(np.float32)), "sum": jnp.float32(0)}, Jitted(body))


@in_group("values")
def none_leaves() -> SetUp:
    def body(state: Any, step: Any) -> Any:
        return {**state, "w": state["w"] * 1.1}

    return SetUp(lambda: {"w": _weights(3), "ema": None, "more": [None, ()]}, Jitted(body))


class Point(NamedTuple):
    """Has two fields."""

    x: Any
    y: Any


@in_group("values")
def nested_containers() -> SetUp:
    def init() -> Any:
        ordered = collections.OrderedDict(b=_weights(2), a=_weights(3))
        return [Point(_weights(2), (_weights(1),)), {1: _weights(3), 2: {"a/b": _weights(4)}}, ordered]

    return SetUp(init, Jitted(_change))


@in_group("values")
def function_leaves() -> SetUp:
    jitted = Jitted(lambda w, activation, step: activation(w) * 1.1, static_argnums=1)

    def step(state: Any, step: int) -> Any:
        return {**state, "w": jitted(state["w"], state["activation"], step)}

    return SetUp(lambda: {"w": _weights(3), "activation": jnp.tanh}, step, jitted=jitted)


def _closure(**options: Any) -> SetUp:
    def init() -> Any:
        table = jnp.arange(1, 5) / 4.0
        return {"w": _weights(4), "scaled": lambda w: w * table}

    def step(state: Any, step: int) -> Any:
        return {**state, "w": jitted(state["w"], state["scaled"], step)}

    jitted = Jitted(lambda w, scaled, step: scaled(w) + 0.1, static_argnums=1)
    return SetUp(init, step, options, jitted=jitted)


@in_group("values")
def closure_around_an_array_of_init() -> SetUp:
    return _closure()


@in_group("values")
def closure_around_an_array_of_init_with_sharding() -> SetUp:
    return _closure(sharding=SingleDeviceSharding(jax.devices()[0]))


class Rows:
    """A data iterator with endless rows of numbers, of a kind that the library saves."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> "Rows":
        return self

    def __next__(self) -> np.ndarray:
        self.read += 1
        return np.sin(np.arange(3, dtype=np.float32) + self.read)

    def get_state(self) -> dict[str, int]:
        return {"read": self.read}

    def set_state(self, state: dict[str, int]) -> None:
        self.read = state["read"]


@in_group("values")
def data_iterators() -> SetUp:
    jitted = Jitted(lambda w, row, noise, step: w * 0.9 + row * noise)

    def step(state: Any, step: int) -> Any:
        row, noise = next(state["data"]), np.float32(state["noise"].normal())
        return {**state, "w": jitted(state["w"], row, noise, step)}

    def copied(state: Any) -> Any:
        return {"w": state["w"], "data": copy.deepcopy(state["data"]), "noise": copy.deepcopy(state["noise"])}

    init = lambda: {"w": _weights(3), "data": Rows(), "noise": np.random.default_rng(3)}  # noqa: E731
    return SetUp(init, step, jitted=jitted, copied=copied)


@in_group("values")
def init_that_cannot_be_traced() -> SetUp:
    def init() -> Any:
        w = _weights(6)
        return {"w": w / float(jnp.max(w)), "scale": jnp.log(1 / 0.07), "n": 0}

    def body(state: Any, step: Any) -> Any:
        scale = jnp.float32(state["scale"]) * 0.9
        return {"w": state["w"] * 0.9 + scale, "scale": scale, "n": state["n"] + 1}

    return SetUp(init, Jitted(body))


# Set-ups of placements: every way in which init decides the placement of an array

_ROWS = P("a")


def _start() -> dict[str, jax.Array]:
    return {"w": _weights(8, 16), "b": _weights(16, dtype=jnp.bfloat16), "n": jnp.int32(0)}


def _mesh(*sizes: int, kind: AxisType = AxisType.Auto, devices: Sequence[Any] | None = None) -> Mesh:
    chosen = np.array(devices or jax.devices())[: int(np.prod(sizes))]
    return Mesh(chosen.reshape(sizes), tuple("ab"[: len(sizes)]), axis_types=(kind,) * len(sizes))


def _on(mesh: Mesh, w: P = _ROWS, b: P = _ROWS, **options: Any) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, spec, **options) for name, spec in (("w", w), ("b", b), ("n", P()))}


@in_group("placement")
def out_shardings() -> SetUp:
    return SetUp(jax.jit(_start, out_shardings=_on(_mesh(8))), Jitted(_change))


@in_group("placement")
def with_sharding_constraint() -> SetUp:
    where = _on(_mesh(8))
    return SetUp(jax.jit(lambda: jax.lax.with_sharding_constraint(_start(), where)), Jitted(_change))


@in_group("placement")
def device_put_to_a_mesh() -> SetUp:
    return SetUp(lambda: jax.device_put(_start(), _on(_mesh(8))), Jitted(_change))


@in_group("placement")
def device_put_of_some_leaves() -> SetUp:
    def init() -> Any:
        return {**_start(), "w": jax.device_put(_weights(8, 16), NamedSharding(_mesh(8), P("a")))}

    return SetUp(init, Jitted(_change))


@in_group("placement")
def device_put_to_device_3() -> SetUp:
    return SetUp(lambda: jax.device_put(_start(), SingleDeviceSharding(jax.devices()[3])), Jitted(_change))


@in_group("placement")
def device_put_to_device_0() -> SetUp:
    """Commits leaves to device 0, where they would be anyway."""
    return SetUp(lambda: jax.device_put(_start(), jax.devices()[0]), Jitted(_change))


@in_group("placement")
def uncommitted_on_device_5() -> SetUp:
    """Keeps two leaves as init made them, uncommitted and away from device 0."""
    jitted = Jitted(_change)

    def init() -> Any:
        with jax.default_device(jax.devices()[5]):
            return _start()

    def step(state: Any, step: int) -> Any:
        return {**state, "n": jitted(state["n"], step)}

    return SetUp(init, step, jitted=jitted)


@in_group("placement")
def default_device_5() -> SetUp:
    return SetUp(_start, Jitted(_change), context=lambda: jax.default_device(jax.devices()[5]))


@in_group("placement")
def uncommitted_next_to_a_mesh() -> SetUp:
    """Keeps a leaf of init that never goes through a jitted function."""
    jitted = Jitted(_change)

    def init() -> Any:
        return {"trained": jax.device_put(_start(), _on(_mesh(8))), "frozen": _weights(4)}

    def step(state: Any, step: int) -> Any:
        return {"trained": jitted(state["trained"], step), "frozen": state["frozen"]}

    return SetUp(init, step, jitted=jitted)


@in_group("placement")
def moved_to_a_mesh_by_a_step() -> SetUp:
    where = _on(_mesh(8))
    return SetUp(_start, Jitted(lambda s, i: jax.lax.with_sharding_constraint(_change(s, i), where)))


@in_group("placement")
def moved_off_a_mesh_by_a_step() -> SetUp:
    jitted = Jitted(_change)

    def step(state: Any, step: int) -> Any:
        return jax.device_put(jitted(state, step), jax.devices()[2])

    return SetUp(lambda: jax.device_put(_start(), _on(_mesh(8))), step, jitted=jitted)


def _in_memory(kind: str, sharding: Any) -> SetUp:
    if kind not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        raise NotAvailableError(f"no memory of the kind {kind}")
    jitted, outside = Jitted(_change), sharding.with_memory_kind(kind)

    def init() -> Any:
        return {"w": jax.device_put(_weights(8, 16), sharding), "mu": jax.device_put(_weights(8, 16), outside)}

    def step(state: Any, step: int) -> Any:
        new = jitted({**state, "mu": jax.device_put(state["mu"], sharding)}, step)
        return {**new, "mu": jax.device_put(new["mu"], outside)}

    return SetUp(init, step, jitted=jitted)


@in_group("placement")
def pinned_host() -> SetUp:
    return _in_memory("pinned_host", SingleDeviceSharding(jax.devices()[0]))


@in_group("placement")
def pinned_host_on_a_mesh() -> SetUp:
    return _in_memory("pinned_host", NamedSharding(_mesh(8), P("a")))


@in_group("placement")
def unpinned_host() -> SetUp:
    return _in_memory("unpinned_host", SingleDeviceSharding(jax.devices()[0]))


@in_group("placement")
def four_of_eight_devices() -> SetUp:
    mesh = _mesh(4, devices=jax.devices()[2:6])
    return SetUp(jax.jit(_start, out_shardings=_on(mesh)), Jitted(_change))


@in_group("placement")
def devices_in_reverse() -> SetUp:
    mesh = _mesh(8, devices=jax.devices()[::-1])
    return SetUp(jax.jit(_start, out_shardings=_on(mesh)), Jitted(_change))


@in_group("placement")
def partition_specs() -> SetUp:
    specs = [P(("a", "b")), P(None, "b"), P(), P("b", "a"), P("a", None), P(("b", "a")), P(None, None), P(("a",))]
    where = [NamedSharding(_mesh(2, 4), spec) for spec in specs]
    init = jax.jit(lambda: [_weights(8, 8) for _ in specs], out_shardings=where)
    return SetUp(init, Jitted(_change, out_shardings=where))


@in_group("placement")
def two_meshes() -> SetUp:
    jitted = Jitted(_change)

    def init() -> Any:
        return [jax.device_put(_start(), _on(mesh)) for mesh in (_mesh(2, 4), _mesh(4, devices=jax.devices()[4:]))]

    return SetUp(init, lambda state, step: [jitted(part, step) for part in state], jitted=jitted)


@in_group("placement")
def set_mesh_auto() -> SetUp:
    mesh = _mesh(2, 4)
    init = jax.jit(lambda: jax.lax.with_sharding_constraint(_start(), {"w": P("a", "b"), "b": P("b"), "n": P()}))
    return SetUp(init, Jitted(_change), context=lambda: jax.set_mesh(mesh))


def _explicit(init: Callable[[], Any]) -> SetUp:
    mesh = _mesh(2, 4, kind=AxisType.Explicit)
    return SetUp(init, Jitted(_change), context=lambda: jax.set_mesh(mesh))


@in_group("placement")
def set_mesh_explicit() -> SetUp:
    return _explicit(jax.jit(lambda: {**_start(), "w": jax.reshard(_weights(8, 16), P("a", "b"))}))


@in_group("placement")
def set_mesh_explicit_without_jit() -> SetUp:
    return _explicit(lambda: {**_start(), "w": jax.device_put(_weights(8, 16), P("a", "b"))})


@in_group("placement")
def mesh_of_both_axis_types() -> SetUp:
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    where = _on(mesh, w=P("a", None), b=P("a"))
    return SetUp(jax.jit(_start, out_shardings=where), Jitted(_change), context=lambda: jax.set_mesh(mesh))


@in_group("placement")
def sharding_function_that_returns_none() -> SetUp:
    def where(path: str, shape: Any, dtype: Any) -> Any:
        return NamedSharding(_mesh(8), P("a")) if path == "w" else None

    return SetUp(_start, Jitted(_change), {"sharding": where})


@in_group("placement")
def sharding_function_that_returns_none_for_frozen_leaves() -> SetUp:
    def where(path: str, shape: Any, dtype: Any) -> Any:
        return NamedSharding(_mesh(8), P("a")) if path == "w" else None

    jitted = Jitted(_change)
    return SetUp(_start, lambda s, i: {**s, "w": jitted(s["w"], i)}, {"sharding": where}, jitted=jitted)


@in_group("placement")
def sharding_tree() -> SetUp:
    return SetUp(_start, Jitted(_change), {"sharding": _on(_mesh(2, 4), w=P("b", "a"), b=P(("a", "b")))})


@in_group("placement")
def one_sharding_for_all() -> SetUp:
    return SetUp(_start, Jitted(_change), {"sharding": NamedSharding(_mesh(8), P())})


@in_group("placement")
def sharding_saved() -> SetUp:
    return SetUp(lambda: jax.device_put(_start(), _on(_mesh(8))), Jitted(_change), {"sharding": "saved"})


@in_group("placement")
def loop_of_device_put() -> SetUp:
    jitted = Jitted(_change)

    def init() -> Any:
        state = [np.sin(np.arange(n, dtype=np.float32)) for n in range(1, 6)]
        return [jax.device_put(value, device) for value, device in zip(state, jax.devices()[2:], strict=False)]

    return SetUp(init, lambda state, step: [jitted(leaf, step) for leaf in state], jitted=jitted)


@in_group("placement")
def make_array_from_callback() -> SetUp:
    value, where = np.arange(16, dtype=np.float32).reshape(8, 2), NamedSharding(_mesh(8), P("a"))

    def init() -> Any:
        return {"w": jax.make_array_from_callback(value.shape, where, lambda index: value[index])}

    return SetUp(init, Jitted(_change))


@in_group("placement")
def shard_map() -> SetUp:
    mesh = _mesh(8)

    def per_device() -> Any:
        return jnp.full((1, 4), jax.lax.axis_index("a"), jnp.float32)

    init = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=(), out_specs=P("a")))
    return SetUp(lambda: {"w": init(), "n": jnp.int32(0)}, Jitted(_change))


@in_group("placement")
def layouts() -> SetUp:
    format = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0]))
    place = {"w": format, "b": format.sharding}
    init = lambda: jax.device_put({"w": _weights(3, 4), "b": _weights(4)}, place)  # noqa: E731
    return SetUp(init, Jitted(_change, out_shardings=place))


@in_group("placement")
def layouts_on_a_mesh() -> SetUp:
    format = Format(Layout((1, 0)), NamedSharding(_mesh(8), P("a")))
    init = lambda: {"w": jax.device_put(_weights(8, 4), format)}  # noqa: E731
    return SetUp(init, Jitted(_change, out_shardings={"w": format}))


@in_group("placement")
def layouts_in_the_signature() -> SetUp:
    """Needs the layout: the step refuses any other one."""
    place = {"w": Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0]))}
    jitted = Jitted(lambda state: _change(state, 0), in_shardings=(place,), out_shardings=place)
    return SetUp(lambda: jax.device_put({"w": _weights(3, 4)}, place), lambda s, i: jitted(s), jitted=jitted)


@in_group("placement")
def keys_on_a_mesh() -> SetUp:
    where = NamedSharding(_mesh(8), P("a"))

    def body(state: Any, step: Any) -> Any:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 7))(state["keys"])
        return {"keys": keys, "w": state["w"] + jax.vmap(jax.random.uniform)(keys)}

    def init() -> Any:
        return jax.device_put({"keys": jax.random.split(jax.random.key(0), 8), "w": jnp.zeros(8)}, where)

    return SetUp(init, Jitted(body, out_shardings=where))


@in_group("placement")
def other_values_on_a_mesh() -> SetUp:
    """Combines a mesh with weak types, other dtypes, Python numbers and an alias."""
    mesh, jitted = _mesh(2, 4), Jitted(lambda s, i: {**_change(s, i), "half": s["half"].astype(jnp.bfloat16) * 1.5})

    def init() -> Any:
        scale = jax.device_put(jnp.log(1 / 0.07), NamedSharding(mesh, P()))
        w = jax.device_put(_weights(8, 16), NamedSharding(mesh, P("b", "a")))
        return {"w": w, "tied": w, "scale": scale, "n": 0, "rate": 1.0, "half": w * 0.5}

    def step(state: Any, step: int) -> Any:
        new = jitted({name: state[name] for name in ("w", "scale", "half", "rate")}, step)
        return {**new, "tied": new["w"], "n": state["n"] + 1}

    return SetUp(init, step, jitted=jitted)


# Set-ups of models: Flax Linen, Flax NNX, Equinox, dataclasses

_X = np.cos(np.arange(6, dtype=np.float32)).reshape(2, 3)


def _mean_square(y: jax.Array) -> jax.Array:
    return jnp.mean((y.astype(jnp.float32) - 1) ** 2)


@in_group("models")
def linen_train_state() -> SetUp:
    import optax
    from flax import linen as nn
    from flax.training.train_state import TrainState

    model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])

    def init() -> Any:
        return TrainState.create(
            apply_fn=model.apply, params=model.init(jax.random.key(0), _X)["params"], tx=optax.adam(1e-2)
        )

    def body(state: Any, step: Any) -> Any:
        return state.apply_gradients(
            grads=jax.grad(lambda p: _mean_square(state.apply_fn({"params": p}, _X)))(state.params)
        )

    return SetUp(init, Jitted(body))


@in_group("models")
def linen_partitioned() -> SetUp:
    import optax
    from flax import linen as nn
    from flax.training.train_state import TrainState

    mesh = _mesh(2, 4)
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "b"))
    model = nn.Dense(8, kernel_init=kernel_init)

    def make() -> Any:
        return TrainState.create(
            apply_fn=model.apply, params=model.init(jax.random.key(0), _X)["params"], tx=optax.adam(1e-2)
        )

    def init() -> Any:
        return jax.jit(make, out_shardings=nn.get_sharding(jax.eval_shape(make), mesh))()

    def body(state: Any, step: Any) -> Any:
        return state.apply_gradients(
            grads=jax.grad(lambda p: _mean_square(state.apply_fn({"params": p}, _X)))(state.params)
        )

    return SetUp(init, Jitted(body), context=lambda: jax.set_mesh(mesh))


@in_group("models")
def linen_dynamic_scale() -> SetUp:
    from flax.training.dynamic_scale import DynamicScale

    def body(state: Any, step: Any) -> Any:
        scale, finite, _, grad = state["scale"].value_and_grad(lambda w: jnp.sum(w**2))(state["w"])
        return {"w": jnp.where(finite, state["w"] - 0.1 * grad, state["w"]), "scale": scale}

    return SetUp(lambda: {"w": _weights(3), "scale": DynamicScale(growth_interval=2)}, Jitted(body))


@in_group("models")
def linen_batch_norm() -> SetUp:
    import optax
    from flax import linen as nn

    model, tx = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False), nn.Dense(2)]), optax.sgd(0.1)

    def init() -> Any:
        variables = model.init(jax.random.key(0), _X)
        return {**variables, "optimizer": tx.init(variables["params"])}

    def body(state: Any, step: Any) -> Any:
        def loss(params: Any) -> Any:
            stats = state["batch_stats"]
            y, new = model.apply({"params": params, "batch_stats": stats}, _X, mutable=["batch_stats"])
            return _mean_square(y), new

        grads, new = jax.grad(loss, has_aux=True)(state["params"])
        updates, optimizer = tx.update(grads, state["optimizer"])
        return {"params": optax.apply_updates(state["params"], updates), **new, "optimizer": optimizer}

    return SetUp(init, Jitted(body))


def _made_in_init(make: Callable[[], Any]) -> SetUp:
    from flax.training.train_state import TrainState

    def init() -> Any:
        return TrainState.create(apply_fn=None, params={"w": _weights(3)}, tx=make())

    return SetUp(init, Jitted(lambda state, step: state.apply_gradients(grads=state.params)))


@in_group("models")
def linen_rate_made_in_init() -> SetUp:
    import optax

    return _made_in_init(lambda: optax.sgd(jnp.float32(1e-2)))


@in_group("models")
def linen_schedule_made_in_init() -> SetUp:
    import optax

    def make() -> Any:
        rates = jnp.linspace(0.1, 0.2, 10)
        return optax.sgd(lambda count: rates[count])

    return _made_in_init(make)


def _nnx(make: Callable[[], Any], forward: Callable[[Any], Any] = lambda net: net(_X), **options: Any) -> SetUp:
    """Makes a set-up whose state is a module and its optimizer, which the step changes in place."""
    import optax
    from flax import nnx

    def init() -> Any:
        net = make()
        return {"net": net, "optimizer": nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)}

    def body(state: Any) -> None:
        state["optimizer"].update(state["net"], nnx.grad(lambda net: _mean_square(forward(net)))(state["net"]))

    jitted = Jitted(body, nnx.jit)

    def step(state: Any, step: int) -> Any:
        jitted(state)
        return state

    return SetUp(init, step, jitted=jitted, copied=nnx.clone, **options)


@in_group("models")
def nnx_module_and_optimizer() -> SetUp:
    from flax import nnx

    return _nnx(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)))


@in_group("models")
def nnx_module_alone() -> SetUp:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w, self.count = nnx.Param(_weights(3)), nnx.Variable(jnp.int32(0))

    def body(net: Any) -> None:
        net.w[...] *= 1.1
        net.count[...] += 1

    jitted = Jitted(body, nnx.jit)

    def step(net: Any, step: int) -> Any:
        jitted(net)
        return net

    return SetUp(Net, step, jitted=jitted, copied=nnx.clone)


@in_group("models")
def nnx_module_of_a_pure_step() -> SetUp:
    """Treats a module as a pytree, in a step of `jax.jit`."""
    from flax import nnx

    return SetUp(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)), Jitted(_change))


@in_group("models")
def nnx_state() -> SetUp:
    from flax import nnx

    return SetUp(lambda: nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0))), Jitted(_change))


@in_group("models")
def nnx_dropout() -> SetUp:
    from flax import nnx

    def make() -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(8, rngs=rngs))

    return _nnx(make)


@in_group("models")
def nnx_array_attribute() -> SetUp:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w, self.table = nnx.Param(_weights(3)), jnp.arange(3.0)

    def forward(net: Any) -> Any:
        net.table = net.table * 0.5 + 1
        return net.w[...] * net.table

    return _nnx(Net, forward)


@in_group("models")
def nnx_list_of_arrays() -> SetUp:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w, self.tables = nnx.Param(_weights(3)), nnx.List([jnp.ones(3), jnp.arange(3.0)])

    def forward(net: Any) -> Any:
        net.tables[1] = net.tables[1] * 0.5 + 1
        return net.w[...] * net.tables[0] * net.tables[1]

    return _nnx(Net, forward)


@in_group("models")
def nnx_tied_variable() -> SetUp:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.encoder = nnx.Param(_weights(3, 4))
            self.decoder = self.encoder

    return _nnx(Net, lambda net: jnp.tanh(_X @ net.encoder[...]) @ net.decoder[...].T)


@in_group("models")
def nnx_weight_norm() -> SetUp:
    from flax import nnx

    if not hasattr(nnx, "WeightNorm"):
        raise NotAvailableError("nnx.WeightNorm")
    return _nnx(lambda: nnx.WeightNorm(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))


@in_group("models")
def nnx_partitioned() -> SetUp:
    from flax import nnx

    mesh = _mesh(2, 4)
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "b"))

    def make() -> Any:
        return nnx.Linear(3, 8, kernel_init=kernel_init, rngs=nnx.Rngs(0))

    return _nnx(make, context=lambda: jax.set_mesh(mesh))


@in_group("models")
def nnx_made_by_nnx_jit() -> SetUp:
    from flax import nnx

    mesh = _mesh(2, 4)

    @nnx.jit
    def make() -> Any:
        net = nnx.Linear(3, 8, rngs=nnx.Rngs(0))
        net.kernel[...] = jax.lax.with_sharding_constraint(net.kernel[...], P(None, "b"))
        return net

    return _nnx(make, context=lambda: jax.set_mesh(mesh))


def _equinox(make: Callable[[], Any], update: Callable[[Any], Any]) -> SetUp:
    """Makes a set-up whose step jits the arrays of a state; everything else in the state is static."""
    import equinox as eqx

    def step(state: Any, step: int) -> Any:
        arrays, rest = eqx.partition(state, eqx.is_array)
        return eqx.combine(jitted(arrays, _Static(rest)), rest)

    def body(arrays: Any, rest: _Static) -> Any:
        return eqx.filter(update(eqx.combine(arrays, rest.value)), eqx.is_array)

    jitted = Jitted(body, static_argnums=1)
    return SetUp(make, step, jitted=jitted)


class _Static:
    """Makes a tree hashable, by its leaves and structure."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key = jax.tree.flatten(value)[0], jax.tree.structure(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key[1])


@in_group("models")
def equinox_mlp() -> SetUp:
    import equinox as eqx
    import optax

    tx = optax.adam(1e-2)

    def make() -> Any:
        net = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
        return net, tx.init(eqx.filter(net, eqx.is_inexact_array))

    def update(state: Any) -> Any:
        net, optimizer = state
        grads = eqx.filter_grad(lambda one: _mean_square(jax.vmap(one)(_X)))(net)
        updates, optimizer = tx.update(grads, optimizer)
        return eqx.apply_updates(net, updates), optimizer

    return _equinox(make, update)


@in_group("models")
def equinox_static_fields() -> SetUp:
    import equinox as eqx

    class Net(eqx.Module):
        w: jax.Array
        scale: jax.Array
        rate: float
        name: str = eqx.field(static=True)
        activation: Callable[..., Any] = eqx.field(static=True)

    def update(net: Net) -> Any:
        w = net.w * net.rate + net.activation(net.scale)
        return eqx.tree_at(lambda one: (one.w, one.scale), net, (w, net.scale * jnp.float32(0.9)))

    return _equinox(lambda: Net(_weights(3), jnp.log(1 / 0.07), 0.5, "net", jnp.tanh), update)


@in_group("models")
def equinox_state() -> SetUp:
    import equinox as eqx

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        linear: eqx.nn.Linear

        def __init__(self) -> None:
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
            self.linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))

        def __call__(self, x: Any, state: Any) -> Any:
            return self.norm(self.linear(x), state)

    def update(both: Any) -> Any:
        net, state = both
        y, state = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(_X, state)
        return eqx.tree_at(lambda one: one.linear.bias, net, net.linear.bias * 0.9 + y[0]), state

    return _equinox(lambda: eqx.nn.make_with_state(Net)(), update)


@in_group("models")
def flax_dataclass() -> SetUp:
    from flax import struct

    @struct.dataclass
    class State:
        w: Any
        count: Any
        name: str = struct.field(pytree_node=False, default="state")

    def body(state: State, step: Any) -> State:
        return state.replace(w=state.w * 1.1, count=state.count + 1)

    return SetUp(lambda: State(_weights(3), 0), Jitted(body))


@in_group("models")
def registered_dataclass() -> SetUp:
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "scale"], meta_fields=["name"])
    @dataclasses.dataclass
    class State:
        w: Any
        scale: Any
        name: str

    def body(state: State, step: Any) -> State:
        return State(state.w * state.scale, jnp.float32(state.scale) * 0.9, state.name)

    return SetUp(lambda: State(_weights(3, dtype=jnp.bfloat16), jnp.log(1 / 0.07), "state"), Jitted(body))


@in_group("models")
def registered_without_keys() -> SetUp:
    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, first: Any, second: Any) -> None:
            self.both = (first, second)

        def tree_flatten(self) -> tuple[Any, None]:
            return self.both, None

        @classmethod
        def tree_unflatten(cls, _: None, both: Any) -> "Pair":
            return cls(*both)

    def body(pair: Any, step: Any) -> Any:
        return Pair(pair.both[0] * 1.1, pair.both[1] + 1)

    return SetUp(lambda: Pair(_weights(3), 0), Jitted(body))


# Set-ups of optimizers: what Optax has


def _optimizers() -> dict[str, Callable[[], Any]]:
    """Returns how to make each optimizer; Optax is only imported by the process that makes one."""

    def of(make: Callable[[Any], Any]) -> Callable[[], Any]:
        def made() -> Any:
            import optax
            import optax.contrib

            return make(optax)

        return made

    def cosine(optax: Any) -> Any:
        return optax.cosine_decay_schedule(0.1, 20)

    made = {
        "adam": lambda o: o.adam(0.1),
        "adamw": lambda o: o.adamw(cosine(o), mask={"w": True, "b": False}),
        "sgd_momentum": lambda o: o.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
        "lion": lambda o: o.lion(0.01),
        "lamb": lambda o: o.lamb(0.1),
        "adafactor": lambda o: o.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
        "rmsprop": lambda o: o.rmsprop(0.1, centered=True, momentum=0.9),
        "adagrad": lambda o: o.adagrad(0.1),
        "novograd": lambda o: o.novograd(0.1),
        "yogi": lambda o: o.yogi(0.1),
        "amsgrad": lambda o: o.amsgrad(0.1),
        "adabelief": lambda o: o.adabelief(0.1),
        "sm3": lambda o: o.sm3(0.1),
        "noisy_sgd": lambda o: o.noisy_sgd(0.1, key=3),
        "clipped_adam": lambda o: o.chain(o.clip_by_global_norm(0.1), o.adam(cosine(o))),
        "centralized": lambda o: o.chain(o.centralize(), o.sgd(0.1)),
        "ema": lambda o: o.chain(o.adam(0.1), o.ema(0.9)),
        "multi_steps": lambda o: o.MultiSteps(o.adam(0.1), 2),
        "injected": lambda o: o.inject_hyperparams(o.adamw)(cosine(o), weight_decay=0.1),
        "masked": lambda o: o.chain(o.masked(o.trace(0.9), {"w": True, "b": False}), o.scale(-0.1)),
        "partition": lambda o: o.partition({"x": o.adam(0.1), "y": o.sgd(0.1)}, {"w": "x", "b": "y"}),
        "line_search": lambda o: o.chain(o.sgd(1.0), o.scale_by_backtracking_linesearch(5)),
        "lookahead": lambda o: o.lookahead(o.sgd(0.1), 2, 0.5),
        "apply_if_finite": lambda o: o.apply_if_finite(o.adam(0.1), 3),
        "schedule_free": lambda o: o.contrib.schedule_free_sgd(0.1, warmup_steps=2),
        "reduced_on_plateau": lambda o: o.chain(o.adam(0.1), o.contrib.reduce_on_plateau(patience=2, cooldown=1)),
    }
    return {name: of(make) for name, make in made.items()}


def _optimizer(make: Callable[[], Any]) -> SetUp:
    tx = make()
    import optax

    tx = optax.with_extra_args_support(tx)

    def init() -> Any:
        params = {"w": _weights(3, 4), "b": jnp.zeros(4)}
        if make is _OPTIMIZERS["lookahead"]:
            params = optax.LookaheadParams.init_synced(params)
        return {"params": params, "optimizer": tx.init(params)}

    def loss(params: Any) -> Any:
        return _mean_square(_X @ params["w"] + params["b"])

    def body(state: Any, step: Any) -> Any:
        params = state["params"]
        value, grads = jax.value_and_grad(loss)(getattr(params, "fast", params))
        more = {"value": value, "grad": grads, "value_fn": loss}
        updates, optimizer = tx.update(grads, state["optimizer"], params, **more)
        return {"params": optax.apply_updates(params, updates), "optimizer": optimizer}

    return SetUp(init, Jitted(body))


_OPTIMIZERS = _optimizers()
_TABLE["optimizers"] |= {f"optax_{name}": functools.partial(_optimizer, make) for name, make in _OPTIMIZERS.items()}
