"""Jobs whose hosts have disks of their own: a host is a process, or two, with a `local=` of its own."""

import pathlib
from typing import Any

from jobs import Result, run_job

ANY = dict.fromkeys(range(4))  # ends: JAX ends a process when it misses another
SIZE = 96

STATE = """
import logging
class Lines(logging.Handler):
    text = []
    def emit(self, record): self.text.append(record.getMessage())
logging.getLogger("treering").addHandler(Lines())
logging.getLogger("treering").setLevel(logging.INFO)
HOST = HOSTS[INDEX]
near, far = tmp / HOST, FAR or tmp / "far"
template = {"w": put(np.zeros(SIZE, np.float32), P("x")), "b": put(np.zeros(300_000, np.float32)), "n": 0}
def state(step):
    w, b = np.arange(SIZE, dtype=np.float32) + step, np.full(300_000, step, np.float32)
    return {"w": put(w, P("x")), "b": put(b), "n": step}
def is_state(tree, step):
    w, b = np.arange(SIZE, dtype=np.float32) + step, np.full(300_000, step, np.float32)
    return tree["n"] == step and same(tree["w"], w) and same(tree["b"], b)
def run(**options):
    return tr.Checkpointer(far, local=near, **{"timeout": 15, **options})
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


def job(tmp: pathlib.Path, body: str, hosts: str = "aabb", far: str = "", **options: Any) -> list[Result]:
    names = [f"near-{host}" for host in hosts]
    return run_job(tmp, STATE + body, processes=len(hosts), devices=1, HOSTS=names, SIZE=SIZE, FAR=far, **options)
