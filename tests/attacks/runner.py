"""Runs the corpus in child processes, and ends those that hang."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .trial import Trial

PATIENCE = 60.0  # seconds without output, on the busiest machine; an attack takes a fraction of one second
SECONDS, NBYTES = 1.0, 200 << 20  # limits of an operation; on a busy machine, the first is only reported


def run(
    names: Iterable[str], folder: Path, patience: float = PATIENCE, report: Callable[[Trial], None] = lambda trial: None
) -> list[Trial]:
    """Tries attacks one after another. If one hangs or ends the process, its trial says so in `wrong`."""
    left, trials = list(names), list[Trial]()
    while left:
        folder.mkdir(parents=True, exist_ok=True)
        done = _run(left, folder / str(len(trials)), patience, report)
        trials += done
        left = left[len(done) :]
    return trials


def _run(names: list[str], folder: Path, patience: float, report: Callable[[Trial], None]) -> list[Trial]:
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
        quiet = patience if current else 60 + patience  # the process imports everything first
        ready, _, _ = select.select([process.stdout], [], [], quiet)
        if not ready:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
            trials.append(Trial(current, ["it hangs"], {}, time.monotonic() - begun, 0))
            report(trials[-1])
            return trials
        line = process.stdout.readline()
        if not line:
            break
        found = json.loads(line)
        current, begun = found[0], time.monotonic()
        if len(found) > 1:
            trials.append(Trial(*found))
            report(trials[-1])
            current = ""
    errors = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    if process.wait() == 0:
        return trials
    assert current, errors  # the process could not even start
    trials.append(Trial(current, [f"the process ended with {process.returncode}: {errors[-300:]}"], {}, 0.0, 0))
    report(trials[-1])
    return trials
