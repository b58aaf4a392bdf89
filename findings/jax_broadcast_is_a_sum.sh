#!/usr/bin/env bash
# jax 0.10.2 on CPUs, a job of two processes; jax.experimental.multihost_utils, with 64-bit types off.
#
# Guess: broadcast_one_to_all gives each process the value of process 0 bit for bit, or raises. assert_equal raises in
#   all processes if the values differ, and in none if they are equal.
# Behaviour: the broadcast is a sum with the zeros of the other processes, in JAX's 32-bit types. 2**40 + 5 arrives as
#   5, on process 0 too, without a warning, although jnp.asarray of that number raises. -0.0 arrives as 0.0.
#   assert_equal compares with the result of that sum. If all processes have 2**40 + 5, it raises in all of them. If
#   process 0 has that and process 1 has 5, process 1 passes. In a job of one process, the number arrives as it is.
# Why it matters: counts of tokens, seeds and times in nanoseconds are what a job broadcasts before it restores. A test
#   with one process passes, and the large job resumes with other numbers. Where some processes pass a check and others
#   raise, those that passed wait for their peers.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import socket
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

TOKENS = 2**40 + 5


def name_of_error(function, value):
    try:
        function(value)
    except (AssertionError, OverflowError) as error:
        return type(error).__name__
    return "no error"


def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, address]
    running = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in (0, 1)]
    found = [process.communicate(timeout=120)[0].splitlines()[-1] for process in running]
    print("one process, broadcast of 2**40 + 5:", multihost_utils.broadcast_one_to_all(TOKENS))
    print("jnp.asarray(2**40 + 5):", name_of_error(jnp.asarray, TOKENS))
    for n, line in enumerate(found):
        print(f"process {n} of two:", line)
    assert multihost_utils.broadcast_one_to_all(TOKENS) == TOKENS, "JAX behaves otherwise now"
    assert name_of_error(jnp.asarray, TOKENS) == "OverflowError", "JAX behaves otherwise now"
    both = "broadcast 5 int32, -0.0 as 0.0, warnings 0; both have 2**40 + 5: AssertionError; one has 5: "
    assert found == [both + "AssertionError", both + "no error"], "JAX behaves otherwise now"


def process(address, index):
    jax.distributed.initialize(address, 2, index)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = multihost_utils.broadcast_one_to_all(TOKENS)
        zero = multihost_utils.broadcast_one_to_all(np.float32(-0.0))
    equal = name_of_error(multihost_utils.assert_equal, TOKENS)
    other = name_of_error(multihost_utils.assert_equal, 5 if index else TOKENS)
    print(f"broadcast {tokens} {tokens.dtype}, -0.0 as {zero}, warnings {len(caught)}; ", end="")
    print(f"both have 2**40 + 5: {equal}; one has 5: {other}")


process(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
