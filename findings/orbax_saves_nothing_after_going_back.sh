#!/usr/bin/env bash
# orbax-checkpoint 0.12.8, CheckpointManager (v0) and training.Checkpointer (v1).
#
# Guess: after restore(2), save(3) writes step 3 of the new branch. If a step 3 exists already, it is replaced, or save
#   raises StepAlreadyExistsError.
# Behaviour: v0 returns False for each step up to the latest one, whether that step exists or not, without a warning.
#   v1 raises for steps that exist, and returns False for those between. In a job that goes back from step 6 to 2 and
#   then stops at step 5, nothing of the new branch is there: latest_step() is 6, with the weights that the job went
#   back from. Numbers above 6 are saved as usual.
# Why it matters: a job goes back because the loss exploded. When it is interrupted before it has caught up, it resumes
#   from the exploded weights, and what it trained since is lost. Few programs look at what save returns.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2
cat > "$dir/job.py" <<'PY'
import logging
import math
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1


def state(loss):
    return {"loss": jnp.float32(loss)}


def by_manager():
    with ocp.CheckpointManager(f"{sys.argv[1]}/v0") as manager:
        def save(step, loss):
            return manager.save(step, args=ocp.args.StandardSave(state(loss)))

        for step, loss in ((0, 4.0), (2, 3.0), (4, math.nan), (6, math.nan)):
            assert save(step, loss)
        manager.wait_until_finished()
        manager.restore(2, args=ocp.args.StandardRestore(state(0.0)))
        returned = [save(step, 1.0) for step in (3, 4, 5)]
        manager.wait_until_finished()
    with ocp.CheckpointManager(f"{sys.argv[1]}/v0") as manager:
        latest = manager.latest_step()
        loss = manager.restore(latest, args=ocp.args.StandardRestore(state(0.0)))["loss"]
        return returned, manager.all_steps(), latest, float(loss)


def by_checkpointer():
    with v1.training.Checkpointer(f"{sys.argv[1]}/v1") as checkpointer:
        def save(step, loss):
            try:
                return checkpointer.save_pytree(step, state(loss))
            except v1.training.errors.StepAlreadyExistsError as error:
                return type(error).__name__

        for step, loss in ((0, 4.0), (2, 3.0), (4, math.nan), (6, math.nan)):
            assert save(step, loss) is True
        checkpointer.load_pytree(2, state(0.0))
        returned = [save(step, 1.0) for step in (3, 4, 5)]
        return returned, [one.step for one in checkpointer.checkpoints], checkpointer.latest.step


class Warnings(logging.Handler):
    def emit(self, record):
        caught.append(record.getMessage())


caught = []
logging.getLogger().addHandler(Warnings(logging.WARNING))
returned, steps, latest, loss = by_manager()
warned = [text for text in caught if "step" in text.lower()]
print("v0: saves of 3, 4, 5 after going back to 2 return", returned, "- steps:", steps, "- warnings of a step:", warned)
print("    a new process resumes from step", latest, "with the loss", loss)
found = by_checkpointer()
print("v1: saves of 3, 4, 5 after going back to 2 return", found[0], "- steps:", found[1], "- the latest:", found[2])
assert returned == [False] * 3 and steps == [0, 2, 4, 6], "Orbax behaves otherwise now"
assert latest == 6 and math.isnan(loss), "Orbax behaves otherwise now"
assert not warned, "Orbax warns now"
assert found[0] == [False, "StepAlreadyExistsError", False] and found[2] == 6, "Orbax behaves otherwise now"
PY
export JAX_PLATFORMS=cpu
"$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
