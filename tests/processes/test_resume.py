"""Tests that a resumed job of several processes has each leaf on the devices where it was."""

import pathlib

import pytest

from jobs import run_job

pytestmark = pytest.mark.compat

JOB = """
import logging
logging.getLogger("treering").addHandler(logging.StreamHandler(sys.stdout))

def describe(x):
    if not isinstance(x, jax.Array):
        return [type(x).__name__, str(x.dtype)]
    s = x.sharding
    mesh = getattr(s, "mesh", None)
    kinds = mesh is not None and [str(kind) for kind in mesh.axis_types]
    ids = [jax.devices().index(d) for d in (s.device_set if mesh is None else mesh.devices.flat)]
    return [type(s).__name__, str(getattr(s, "spec", "")), kinds, ids, s.memory_kind, x.committed, str(jax.typeof(x))]

explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
local = Mesh(np.array(jax.local_devices())[::-1], ("own",))
second = jax.local_devices()[1]

def init():
    where = NamedSharding(mesh(8), P("x"))
    return {
        "spread": jax.jit(lambda: jnp.arange(16.0), out_shardings=where)(),
        "explicit": jax.jit(lambda: jnp.ones((8, 8)), out_shardings=NamedSharding(explicit, P("model", "data")))(),
        "replicated": jax.jit(lambda: jnp.ones(3), out_shardings=NamedSharding(mesh(8), P()))(),
        "local": jax.device_put(jnp.ones(8), NamedSharding(local, P("own"))),
        "second": jax.device_put(jnp.ones(2), second),
        "free": jnp.zeros(()),
        "host": np.ones(2),
    }

with tr.Checkpointer(tmp / "run", timeout=20) as ckpts:
    state, step = ckpts.restore_or_init(init, **OPTIONS)
    ckpts.save(step + 1, state)
assert same(state["spread"], np.arange(16, dtype=np.float32))
report({name: describe(leaf) for name, leaf in state.items()})
"""


@pytest.mark.slow
@pytest.mark.parametrize("read", ["each", "once"])
def test_arrays_of_a_job_of_two_processes_are_where_they_were(tmp_path: pathlib.Path, read: str) -> None:
    options = {"OPTIONS": {"read": read}}
    before = 'jax.config.update("jax_cpu_collectives_implementation", "gloo")'
    first = run_job(tmp_path, JOB, processes=2, devices=4, before=before, **options)
    second = run_job(tmp_path, JOB, processes=2, devices=4, before=before, **options)
    for one, other in zip(first, second, strict=True):
        assert one.report == other.report
        assert "cannot be placed" not in other.output and "init() is called" not in other.output
    (alone,) = run_job(tmp_path, JOB, processes=1, devices=8, OPTIONS={})  # the same devices in one process
    for name in ("spread", "explicit", "replicated", "free", "host"):
        assert alone.report[name] == first[0].report[name]
    assert "local (a mesh of 4 devices (own=4) in a job with 8)" in alone.output  # of one process, now


HALVES = """
import logging
logging.getLogger("treering").addHandler(logging.StreamHandler(sys.stdout))
halves = [NamedSharding(Mesh(devices[n : n + 4], ("x",)), P("x")) for n in (0, 4)]
value = np.arange(8, dtype=np.float32)

def init():
    return [jax.make_array_from_callback((8,), half, lambda index: value[index], dtype=value.dtype) for half in halves]

with tr.Checkpointer(tmp / "run", timeout=20) as ckpts:
    state, step = ckpts.restore_or_init(init)
    ckpts.save(step + 1, state)
assert [array.sharding for array in state] == halves and all(same(array, value) for array in state)
"""


@pytest.mark.slow
def test_arrays_of_one_process_go_where_init_says(tmp_path: pathlib.Path) -> None:
    """Arrays of one process, such as pipeline stages, go where `init` says. A log says that no place is recorded."""
    run_job(tmp_path, HALVES, processes=2, devices=4)
    for result in run_job(tmp_path, HALVES, processes=2, devices=4):
        assert "they go where init() places them, and it is called to see where: 0 and 1 more (the devices of one" in (
            result.output
        )
