"""Jobs whose hosts have separate local disks. A host is one or two processes with their own `local=`."""

import pathlib
from typing import Any

from jobs import Result, run_job

ANY = dict.fromkeys(range(4))  # any exit code: JAX ends a process when a peer is missing
SIZE = 96

STATE = """
import logging
class Lines(logging.Handler):
    text = []
    def emit(self, record): self.text.append(record.getMessage())
logging.getLogger("treering").addHandler(Lines())
logging.getLogger("treering").setLevel(logging.INFO)
HOST = HOSTS[INDEX]
local, remote = tmp / HOST, REMOTE or tmp / "remote"
HELD = np.zeros((3, 7), np.int16)  # a NumPy leaf, which all processes hold
template = {"w": put(np.zeros(SIZE, np.float32), P("x")), "b": put(np.zeros(300_000, np.float32)), "h": HELD, "n": 0}
def state(step):
    w, b = np.arange(SIZE, dtype=np.float32) + step, np.full(300_000, step, np.float32)
    return {"w": put(w, P("x")), "b": put(b), "h": HELD + step, "n": step}
def is_state(tree, step):
    w, b = np.arange(SIZE, dtype=np.float32) + step, np.full(300_000, step, np.float32)
    held = tree["h"].dtype == np.int16 and np.array_equal(tree["h"], HELD + step)
    return tree["n"] == step and held and same(tree["w"], w) and same(tree["b"], b)
def run(**options):
    return tr.Checkpointer(remote, local=local, **{"timeout": 15, **options})
def save(ckpts, *steps, **options):
    for step in steps:
        ckpts.save(step, state(step), **options)
        ckpts.wait()
def until(check):
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)
"""


def job(tmp: pathlib.Path, body: str, hosts: str = "aabb", remote: str = "", **options: Any) -> list[Result]:
    """Runs a body in a job with one process for each letter of `hosts`, which names the process's host."""
    names = [f"local-{host}" for host in hosts]
    return run_job(tmp, STATE + body, processes=len(hosts), devices=1, HOSTS=names, SIZE=SIZE, REMOTE=remote, **options)
