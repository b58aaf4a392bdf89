"""`python -m soak.job LIFE INDEX`: one process of a training job, as its user would write it.

LIFE is a file of JSON that the campaign has written. Each process appends lines of JSON to its journal: what it
resumed from, the digest of each step, what was committed, and what it uses.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

import treering as tr

from .training import JOBS


class Journal:
    """A file of JSON lines. A line is complete or torn at the end, whatever kills the process."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - until the process ends

    def __call__(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}).encode() + b"\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a journal."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def reference(kind: str, seed: int, steps: int, journal: Journal) -> None:
    """Trains without a checkpoint."""
    job = JOBS[kind](seed)
    state = job.adopt(job.init())
    journal("trained", step=0, **_contents(job, state))
    for step in range(1, steps + 1):
        state = job.step(state)
        journal("trained", step=step, **_contents(job, state))


def live(life: dict[str, Any], index: int, journal: Journal) -> int:
    """Continues the run until its last step, or until the last one of this life. Returns the exit code."""
    if life["processes"] > 1:
        jax.distributed.initialize(life["address"], life["processes"], index)
    job = JOBS[life["job"]](life["seed"])
    keep = tr.keep.last(3) | tr.keep.every(25)
    options = {"local": life["local"][index], "keep_local": tr.keep.last(2)} if life["local"] else {}
    report = (lambda done: journal("committed", step=done.step)) if index == 0 else None
    with tr.Checkpointer(
        life["run"],
        save_every=life["save_every"],
        keep=keep,
        save_on_preemption=True,
        on_error=life["on_error"],
        on_save=report,
        timeout=20,
        **options,
    ) as ckpts:
        tree, step = ckpts.restore_or_init(job.init)
        state = job.adopt(tree)
        del tree
        journal("resumed", step=step, **_contents(job, state))
        last = min(life["last"], life["total"])
        for step in range(step + 1, last + 1):  # noqa: B020 - the loop that users are shown
            state = job.step(state)
            journal("trained", step=step, **_contents(job, state))
            ckpts.save(step, job.saved(state), metrics={"loss": 1 / step}, force=step == last)
            if ckpts.preempted:
                journal("preempted", step=step)
                break
            if step % 20 == 0:
                journal("used", step=step, **_used())
            time.sleep(life["pause"])
        if step >= life["total"] and not ckpts.preempted:
            ckpts.finish()
    journal("closed", step=step)
    return 143 if ckpts.preempted else 0


def _contents(job: Any, state: dict[str, Any]) -> dict[str, str]:
    return {"digest": job.digest(state), "position": repr(state["data"].get_state())}


def _used() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    descriptors = len(os.listdir("/proc/self/fd"))
    return {
        "memory": pages * os.sysconf("SC_PAGESIZE"),
        "descriptors": descriptors,
        "threads": threading.active_count(),
    }


def evaluate(life: dict[str, Any], journal: Journal) -> None:
    """Restores each step that appears, as an evaluator next to the job does, until the run is finished."""
    job = JOBS[life["job"]](life["seed"])
    for ckpt in tr.follow(life["run"]):
        template = job.init()
        del template["data"]  # several processes have saved a position each
        try:
            tree = ckpt.restore(template, extra=["data"])
        except tr.errors.TreeringError as error:
            journal("unreadable", step=ckpt.step, error=f"{type(error).__name__}: {error}")
            continue
        journal("evaluated", step=ckpt.step, digest=job.digest(tree))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2)
    given, number = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    written = Journal(Path(given["journals"]) / f"{given['name']}-{number}.jsonl")
    if number == "reference":
        reference(given["job"], given["seed"], given["total"], written)
    elif number == "evaluator":
        evaluate(given, written)
    else:
        sys.exit(live(given, int(number), written))
