"""Measures the memory that saving to a bucket and restoring from it take beyond the state, each in its own process."""

import os
import pathlib
import secrets
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
_MAX_MIB = {"save": 256, "restore": 192}  # for any size of the state and of its leaves
_PROGRAM = """
import s3, sys, jax, numpy as np, treering as tr
from resident_memory import peak_bytes
from treering import stores

url, prefix, format, mib, leaf, what = sys.argv[1:]
root = stores.absolute(s3.client(url, prefix=prefix))

leaves, size = int(mib) // int(leaf), int(leaf) << 18
if what == "save":
    state = {f"w{n}": jax.device_put(np.full((size,), n, np.float32)) for n in range(leaves)}
    jax.block_until_ready(state)
    tr.save(f"{root}/warm", {"w": state["w0"][:1]}, format=format)  # frees the memory that making the state has left
    print(peak_bytes(lambda: tr.save(f"{root}/c", state, format=format))[0])
else:
    like = {f"w{n}": jax.ShapeDtypeStruct((size,), np.float32) for n in range(leaves)}
    tr.restore(f"{root}/warm", {"w": jax.ShapeDtypeStruct((1,), np.float32)})
    grown, found = peak_bytes(lambda: tr.restore(f"{root}/c", like))
    assert all((np.asarray(found[f"w{n}"]) == n).all() for n in range(leaves))
    print(grown - (leaves * size * 4 >> 20))
"""


@pytest.mark.rare
@pytest.mark.parametrize(("format", "mib", "leaf"), [("treering", 768, 128), ("safetensors", 256, 32)])
def test_what_a_save_and_a_restore_take(s3_server: str, format: str, mib: int, leaf: int) -> None:
    """A save and a restore stay below a fixed amount of memory beyond the state."""
    arguments = [s3_server, secrets.token_hex(4), format, str(mib), str(leaf)]
    # With this threshold the allocator returns free memory to the system.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    tests = pathlib.Path(__file__).parents[2]
    for what in ("save", "restore"):
        command = [sys.executable, "-c", _PROGRAM, *arguments, what]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tests, check=True, env=environment)
        assert int(done.stdout) <= _MAX_MIB[what], f"{what} took {done.stdout} MiB more than the state"
