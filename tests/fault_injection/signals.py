"""`python -m fault_injection.signals SIGINT|SIGTERM TIMES DIRECTORY [--only WHAT …]`: a signal at a random time.

In a loop that saves on preemption SIGTERM ends nothing: the step that it came in is saved, and the loop is left.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import treering as tr
from treering import stores

from . import forked_child
from .kill_points import Outcome
from .scenarios import SCENARIOS, Scenario, assert_tidy, tree, version

_STEPS, _EVERY = 13, 3  # of the loop: the last one, and how often it saves
_STATES = ("old", "between", "new")
_WENT_ON = 20  # exit codes of children that continued after an interrupt: this and the state


def _loop(place: Path) -> None:
    step, received = 0, list[int]()
    signal.signal(signal.SIGTERM, lambda *_: received.append(step))
    with tr.Checkpointer(place / "run", save_every=_EVERY, keep=tr.keep.last(2), save_on_preemption=True) as ckpts:
        for step in range(1, _STEPS + 1):  # which the handler looks at
            ckpts.save(step, tree(step), force=step == _STEPS)
            if ckpts.preempted:
                break
    assert tr.steps(place / "run")[-1] == step, f"left at {step}"
    assert not any(received) or step <= received[0] + 1, f"left at {step}, while SIGTERM came at {received[0]}"


def _look_at_loop(place: Path) -> str:
    """Some steps in a row, none of which is half there."""
    steps = tr.steps(place / "run") if (place / "run").exists() else []
    assert [version(place / "run" / f"step-{step:08}") for step in steps] == steps
    assert len(steps) <= 3, steps  # one more while it is being deleted
    return "new" if _STEPS in steps else "between" if steps else "old"


def _go_on_with_loop(place: Path) -> None:
    with tr.Checkpointer(place / "run", keep=tr.keep.last(2)) as ckpts:
        step = ckpts.latest_step or 0
        for n in (1, 2):
            ckpts.save(step + n, tree(step + n))
    names = [f"step-{step + n:08}" for n in (1, 2)]
    assert os.listdir(place) == ["run"] and sorted(os.listdir(place / "run")) == names
    for n, name in enumerate(names, 1):
        assert_tidy(place / "run" / name)
        assert version(place / "run" / name) == step + n


INTERRUPTED = {
    **{name: SCENARIOS[name] for name in ("save", "save_async", "overwrite", "overwrite_async", "step and retention")},
    "loop that saves on preemption": Scenario(lambda place: None, _loop, _look_at_loop, _go_on_with_loop),
}


_LOOP = INTERRUPTED["loop that saves on preemption"]
_AT_A_PATH = [INTERRUPTED[name] for name in ("save", "save_async", "overwrite", "overwrite_async")]


def signalled(scenario: Scenario, number: signal.Signals, directory: Path, times: int) -> Outcome:
    """Sends a signal to a child so many times, each at a time drawn evenly from those that it takes and a bit more.

    After every second ctrl-C without a run, the same process continues, as in a notebook; else another one does.
    """
    stores.register(stores.Filesystem(stores.Disk()))
    scenario.prepare(directory / "before")
    (directory / "before").mkdir(parents=True, exist_ok=True)
    rng, place = random.Random(0), directory / "place"
    seconds = sorted(_acting(scenario, number, directory, None)[1] for _ in range(5))[2]
    found: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for n in range(times):
        goes_on = number == signal.SIGINT and n % 2 == 1 and scenario in _AT_A_PATH
        code, _ = _acting(scenario, number, directory, rng.uniform(0, 1.1 * seconds), goes_on=goes_on)
        try:
            if code >= _WENT_ON:
                state = _STATES[code - _WENT_ON]
            else:
                assert code in (0, forked_child.RAISED if number == signal.SIGINT else -number)
                assert code != forked_child.RAISED or not goes_on
                state = scenario.look(place)
                assert state == "new" or code != 0 or scenario is _LOOP
                scenario.go_on(place)
            found[state] += 1
        except Exception:
            wrong.append(f"signal {n}, {'same process, ' * goes_on}exit code {code}:\n{traceback.format_exc()}")
    return Outcome(times, dict(found), wrong)


def _acting(
    scenario: Scenario, number: signal.Signals, directory: Path, after: float | None, *, goes_on: bool = False
) -> tuple[int, float]:
    """A child that acts and gets a signal after so many seconds: how it ended, and the seconds."""
    place = directory / "place"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(directory / "before", place)
    reading, writing = os.pipe()
    child = forked_child.start(functools.partial(_act, scenario, place, writing, goes_on))
    os.close(writing)
    os.read(reading, 1)
    begun = time.perf_counter()
    if after is not None:
        time.sleep(after)
        os.kill(child, number)  # it has not been waited for, so it is there, if only as a zombie
    code = forked_child.end(child)
    os.close(reading)
    return code, time.perf_counter() - begun


def _act(scenario: Scenario, place: Path, writing: int, goes_on: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs this may have it ignored
    try:
        os.write(writing, b".")
        scenario.act(place)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what comes from here on comes too late
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not goes_on:
            raise
        _finish_saves()
        state = scenario.look(place)
        scenario.go_on(place)
        os._exit(_WENT_ON + _STATES.index(state))
    finally:
        _finish_saves()


def _finish_saves() -> None:
    """As when a program ends, which waits for the saves in the background."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            with contextlib.suppress(RuntimeError):  # the interrupt came while it was being started
                thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fault_injection.signals", description=__doc__)
    parser.add_argument("number", type=lambda name: signal.Signals[name])
    parser.add_argument("times", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=list(INTERRUPTED), default="save")
    chosen = parser.parse_args()
    outcome = signalled(INTERRUPTED[chosen.only], chosen.number, chosen.directory, chosen.times)
    json.dump(outcome._asdict(), sys.stdout)
