#!/usr/bin/env bash
# jax 0.10.2 on CPUs, jobs of two processes.
#
# Guess: once a preemption is known, multihost_utils.reached_preemption_sync_point(step) is true for the agreed step and
#   all later ones, and a second SIGTERM is announced like the first.
# Behaviour: it is true for one number alone. A loop that asks with every tenth step passes the agreed number, which is the
#   largest so far plus one, and is never notified. After that point no further signal of the job is announced.
# Why it matters: a job that asks only where it would save anyway loses the work since its last checkpoint when the
#   machine is taken away. Questions need numbers of their own, which count questions and not steps.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$dir/job.py" <<'PY'
import os, signal, subprocess, sys, socket, time

def job(stride):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, address, str(stride)]
    running = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for n in (0, 1)]
    return [process.communicate(timeout=120)[0].split() for process in running]

if len(sys.argv) == 1:
    each, tenth = job(1), job(10)
    print("asked with every step, true at:      ", *each)
    print("asked with every tenth step, true at:", *tenth)
    assert each[0] == each[1] and len(each[0]) == 1 and tenth == [[], []], "JAX behaves otherwise now"
    sys.exit()

import jax
from jax.experimental import multihost_utils

address, stride, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, 2, index)
for step in range(0, 160 * stride, stride):
    if index == 1 and step in (20 * stride, 100 * stride):
        os.kill(os.getpid(), signal.SIGTERM)  # twice
    if multihost_utils.reached_preemption_sync_point(step):
        print(step, flush=True)
    time.sleep(0.05)
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" "$dir/job.py"
