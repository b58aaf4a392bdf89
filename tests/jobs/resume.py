"""The bodies of the jobs in tests/processes/test_resume.py."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import devices, mesh, report, same, tmp


def job(OPTIONS: Any) -> None:
    import logging

    logging.getLogger("treering").addHandler(logging.StreamHandler(sys.stdout))

    def describe(x):
        if not isinstance(x, jax.Array):
            return [type(x).__name__, str(x.dtype)]
        s = x.sharding
        mesh = getattr(s, "mesh", None)
        kinds = mesh is not None and [str(kind) for kind in mesh.axis_types]
        ids = [jax.devices().index(d) for d in (s.device_set if mesh is None else mesh.devices.flat)]
        return [
            type(s).__name__,
            str(getattr(s, "spec", "")),
            kinds,
            ids,
            s.memory_kind,
            x.committed,
            str(jax.typeof(x)),
        ]

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


def halves() -> None:
    import logging

    logging.getLogger("treering").addHandler(logging.StreamHandler(sys.stdout))
    halves = [NamedSharding(Mesh(devices[n : n + 4], ("x",)), P("x")) for n in (0, 4)]
    value = np.arange(8, dtype=np.float32)

    def init():
        return [
            jax.make_array_from_callback((8,), half, lambda index: value[index], dtype=value.dtype) for half in halves
        ]

    with tr.Checkpointer(tmp / "run", timeout=20) as ckpts:
        state, step = ckpts.restore_or_init(init)
        ckpts.save(step + 1, state)
    assert [array.sharding for array in state] == halves and all(same(array, value) for array in state)
