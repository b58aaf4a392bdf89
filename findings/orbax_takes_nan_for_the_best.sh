#!/usr/bin/env bash
# orbax-checkpoint 0.12.8, CheckpointManager with best_fn and best_mode="min".
#
# Guess: a step whose loss is NaN counts as the worst, and best_step() is the step with the lowest number. The order of
#   the steps does not matter.
# Behaviour: the steps are sorted with comparisons that NaN makes false. Of the losses 1, 2, NaN, 3 with max_to_keep=2,
#   the steps with NaN and 3 are kept, the best one is deleted, and best_step() is the one with 3. If the last loss is
#   NaN, that step is the best. Without NaN, the steps with 1 and 2 are kept.
# Why it matters: one NaN in an evaluation deletes the best model, and a later one deletes others. A job that diverged
#   is when the best step is needed.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2
cat > "$dir/job.py" <<'PY'
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp

NAN = float("nan")


def kept(name, losses):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(f"{sys.argv[1]}/{name}", options=options) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, args=ocp.args.StandardSave({"weights": jnp.ones(1)}), metrics={"loss": loss})
        manager.wait_until_finished()
        found = sorted(manager.all_steps()), manager.best_step()
    print(f"losses {losses}: kept {[losses[step] for step in found[0]]}, the best is {losses[found[1]]}")
    return found


numbers = kept("numbers", [1.0, 2.0, 4.0, 3.0])
middle = kept("middle", [1.0, 2.0, NAN, 3.0])
end = kept("end", [1.0, 2.0, 3.0, NAN])
assert numbers == ([0, 1], 0), "Orbax behaves otherwise now"
assert middle == ([2, 3], 3) and end == ([0, 3], 3), "Orbax behaves otherwise now"
PY
export JAX_PLATFORMS=cpu
"$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
