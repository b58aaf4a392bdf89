"""`python turns.py RUN LOCAL AFTER LAST END`: one turn of a job in a run that jobs of several releases share.

It runs with the library that is on the path, and uses only what every release since 1.0.0rc1 has. It must resume at the
step AFTER, or at the next one, which a killed job may have committed. END is "close", or "kill": SIGKILL while the step
after LAST is saved.
"""

import os
import signal
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treering as tr

_FROZEN = np.arange(1 << 18, dtype=np.float32)  # so large that steps share its file


def state(step: int) -> dict[str, Any]:
    """Returns the tree of a step."""
    return {
        "frozen": jnp.asarray(_FROZEN),
        "w": jnp.full((64, 32), step, jnp.bfloat16),
        "key": jax.random.key(step),
        "host": np.full(7, step, np.int16),
        "nested": [{"n": step}, (jnp.float32(step), None)],
    }


def bits(tree: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Returns dtype, shape and bytes of every leaf."""
    leaves = jax.tree.leaves({**tree, "key": jax.random.key_data(tree["key"])})
    return [(f"{np.asarray(leaf).dtype} {np.shape(leaf)}", np.asarray(leaf).tobytes()) for leaf in leaves]


def main(run: str, local: str, after: int, last: int, end: str) -> None:
    """Continues the run and saves steps."""
    keep = tr.keep.last(2) | tr.keep.best(1, "loss", "min")
    options: dict[str, Any] = {"local": local, "keep_local": tr.keep.last(1)} if local else {}
    with tr.Checkpointer(run, keep=keep, **options) as ckpts:
        tree, step = ckpts.restore_or_init(lambda: state(0))
        assert step in (after, after + 1), f"expected step {after}, found {step}"
        assert bits(tree) == bits(state(step)), f"step {step} has other bits"
        for number in range(step + 1, last + 1):
            ckpts.save(number, {**state(number), "frozen": tree["frozen"]}, metrics={"loss": abs(number - 3) + 0.5})
        ckpts.wait()
        ckpts.pin(last)
        if end == "kill":
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
            ckpts.save(last + 1, state(last + 1), metrics={"loss": 99.0})  # The policy keeps steps without metrics.
            signal.pause()
    tr.record(run, last, {"val": 1.0})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
