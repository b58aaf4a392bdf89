#!/usr/bin/env bash
# jax 0.10.2 on CPUs, a job of one process.
#
# Guess: jax.distributed.initialize leaves SIGTERM alone, or at least signal.getsignal shows the handler that it sets. A
#   worker that multiprocessing forks afterwards ends when its parent calls terminate().
# Behaviour: initialize sets a handler in C. signal.getsignal still says SIG_DFL, SIGTERM no longer ends the process, and
#   a forked worker inherits the handler: terminate() returns, and the worker goes on. A worker that is spawned ends.
# Why it matters: a data loader with daemon workers is ended by terminate() and then joined when the interpreter ends, so
#   a finished job stands still. A library that asks getsignal whether somebody listens to SIGTERM gets the wrong answer.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$dir/job.py" <<'PY'
import multiprocessing, os, signal, socket, time, warnings

def work():
    time.sleep(60)

def ends(method):
    worker = multiprocessing.get_context(method).Process(target=work)
    worker.start()
    time.sleep(2)
    worker.terminate()
    worker.join(5)
    alive = worker.is_alive()
    worker.kill()
    worker.join()
    return not alive

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    import jax
    before = {"getsignal": signal.getsignal(signal.SIGTERM), "forked": ends("fork")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    jax.distributed.initialize(address, 1, 0)
    after = {"getsignal": signal.getsignal(signal.SIGTERM), "forked": ends("fork"), "spawned": ends("spawn")}
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    print("before initialize:", before)
    print("after initialize: ", after, "and SIGTERM did not end this process")
    wanted = {"getsignal": signal.SIG_DFL, "forked": True}
    assert before == wanted and after == {**wanted, "forked": False, "spawned": True}, "JAX behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
