"""Runs the corpus in processes that are ended when they hang."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .trial import Trial

PATIENCE = 60.0  # seconds without a word, on the busiest of machines; all of an attack takes a fraction of one
SECONDS, NBYTES = 1.0, 200 << 20  # what an operation may take; on a busy machine the first is only reported


def run(
    names: Iterable[str], folder: Path, patience: float = PATIENCE, tell: Callable[[Trial], None] = lambda trial: None
) -> list[Trial]:
    """Tries attacks one after another. One that hangs or ends the process is a trial with that as what is wrong."""
    left, trials = list(names), list[Trial]()
    while left:
        folder.mkdir(parents=True, exist_ok=True)
        done = _run(left, folder / str(len(trials)), patience, tell)
        trials += done
        left = left[len(done) :]
    return trials


def _run(names: list[str], folder: Path, patience: float, tell: Callable[[Trial], None]) -> list[Trial]:
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "attacks.trial", str(folder), *names]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=env
    )
    trials: list[Trial] = []
    current, begun = "", time.monotonic()
    assert process.stdout and process.stderr
    while True:
        quiet = patience if current else 60 + patience  # it starts with importing everything
        ready, _, _ = select.select([process.stdout], [], [], quiet)
        if not ready:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
            trials.append(Trial(current, ["it hangs"], {}, time.monotonic() - begun, 0))
            tell(trials[-1])
            return trials
        line = process.stdout.readline()
        if not line:
            break
        told = json.loads(line)
        current, begun = told[0], time.monotonic()
        if len(told) > 1:
            trials.append(Trial(*told))
            tell(trials[-1])
            current = ""
    errors = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    if process.wait() == 0:
        return trials
    assert current, errors  # it could not even start
    trials.append(Trial(current, [f"the process ended with {process.returncode}: {errors[-300:]}"], {}, 0.0, 0))
    tell(trials[-1])
    return trials
