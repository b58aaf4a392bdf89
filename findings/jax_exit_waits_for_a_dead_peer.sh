#!/usr/bin/env bash
# jax 0.10.2 on CPUs, a job of two processes.
#
# Guess: in a job whose process 1 was killed, process 0 can end at once: an error that leaves its program ends it with code
#   1. With jax_enable_recoverability, a process that still works when process 0 has ended is not disturbed.
# Behaviour: the end of the interpreter waits for the dead process until the time-out of JAX's heartbeats (100 s by
#   default, 10 s here), and JAX then aborts the process: SIGABRT instead of code 1. In a recoverable job, process 0 ends
#   at once, and JAX aborts the process that outlives it, although it has done nothing wrong.
# Why it matters: launchers wait for the slowest process and read the exit code. A failed job holds its machines for minutes,
#   and a finished one looks like a failed one.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$dir/job.py" <<'PY'
import os, signal, subprocess, sys, socket, time

def job(kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, address, kind]
    running = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for n in (0, 1)]
    out = running[0].stdout.readline()
    begun = time.monotonic()
    codes = [process.wait(150) for process in running]
    return codes, time.monotonic() - begun

if len(sys.argv) == 1:
    (failed, seconds), (outlived, _) = job("killed"), job("late")
    print(f"process 1 killed, process 0 raises: exit codes {failed}, {seconds:.0f} s after it raised")
    print(f"recoverable, process 1 works 3 s longer than process 0: exit codes {outlived}")
    assert failed == [-signal.SIGABRT, -signal.SIGKILL] and seconds > 5, "JAX behaves otherwise now"
    assert outlived == [0, -signal.SIGABRT], "JAX behaves otherwise now"
    sys.exit()

import jax

address, kind, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_enable_recoverability", kind == "late")
jax.distributed.initialize(address, 2, index, heartbeat_timeout_seconds=10)
jax.devices()
if kind == "killed":
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
print("ends", flush=True)
if kind == "killed":
    raise ZeroDivisionError
time.sleep(3 * index)
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" "$dir/job.py"
