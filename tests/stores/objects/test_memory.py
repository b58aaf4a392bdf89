"""The memory that saves to a bucket and restores from it take beyond the state, each in a process of its own."""

import os
import pathlib
import secrets
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
_MOST = 320  # MiB, whatever the size of the state: ten objects, of which five are in flight
_PROGRAM = """
import re, s3, sys, threading, jax, numpy as np, treering as tr
from treering import stores

url, prefix, format, mib, what = sys.argv[1:]
root = stores.absolute(s3.client(url, prefix=prefix))

def now():  # MiB, without the pages of mapped files
    status = open("/proc/self/status").read()
    return sum(int(re.search(rf"{kind}:\\s+(\\d+)", status)[1]) for kind in ("RssAnon", "RssShmem")) >> 10

def most(call):
    over, seen = threading.Event(), [now()]
    def watch():
        while not over.wait(0.005):
            seen.append(now())
    watching = threading.Thread(target=watch)
    watching.start()
    found = call()
    over.set()
    watching.join()
    return max(seen) - seen[0], found

def measure(name, leaves, size):
    if what == "save":
        state = {f"w{n}": jax.device_put(np.full((size,), n, np.float32)) for n in range(leaves)}
        return most(lambda: tr.save(f"{root}/{name}", state, format=format))[0]
    like = {f"w{n}": jax.ShapeDtypeStruct((size,), np.float32) for n in range(leaves)}
    grown, found = most(lambda: tr.restore(f"{root}/{name}", like))
    assert all((np.asarray(found[f"w{n}"]) == n).all() for n in range(leaves))
    return grown - (leaves * size * 4 >> 20)

measure("warm", 1, 1 << 18)
print(measure("c", int(mib) // 32, 8 << 20))
"""


@pytest.mark.parametrize(("format", "mib"), [("treering", 768), ("safetensors", 256)])
def test_what_a_save_and_a_restore_take(s3_server: str, format: str, mib: int) -> None:
    arguments = [s3_server, secrets.token_hex(4), format, str(mib)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # what is free is given back
    tests = pathlib.Path(__file__).parents[2]
    for what in ("save", "restore"):
        command = [sys.executable, "-c", _PROGRAM, *arguments, what]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tests, check=True, env=environment)
        assert int(done.stdout) <= _MOST, f"{what} took {done.stdout} MiB more than the state"
