"""`python -m fault_injection.interrupts DIRECTORY [--only WHAT] [--every N]`: ctrl-C wherever Python lets one in.

Python looks for signals when a function begins and when one of C returns. A save or a restore is interrupted at each
such place of its caller's thread in turn, and the same process continues, as in a notebook.
"""

import argparse
import collections
import contextlib
import faulthandler
import itertools
import json
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import treering as tr

from .kill_points import Outcome
from .scenarios import SCENARIOS, Scenario, at_path, tree, version

_TIMEOUT = 60  # seconds; far more than any of them needs


def _reading(read: Callable[[Path], Any]) -> Scenario:
    def prepare(place: Path) -> None:
        tr.save(place / "c", tree(4))
        jax.devices()  # JAX begins here; otherwise nine of ten interrupts would come while it does

    def look(place: Path) -> str:
        assert version(place / "c") == 4
        return "old"

    return Scenario(prepare, lambda place: read(place / "c"), look, look)


INTERRUPTED = {
    **{name: SCENARIOS[name] for name in ("save", "save_async", "overwrite", "overwrite_async", "step and retention")},
    "save_async that waits for room": at_path(
        lambda path: tr.save_async(path, tree(4), memory_limit=1000).result(), old=False
    ),
    "restore": _reading(tr.restore),
    "restore into memory": _reading(lambda path: tr.restore(path, like=tree(4), mmap=False)),
    "verify": _reading(tr.verify),
}


def interrupted(scenario: Scenario, directory: Path, every: int) -> Outcome:
    """Interrupts a scenario at every so many places, always in this process: whatever hangs or crashes ends it."""
    scenario.prepare(directory / "before")
    (directory / "before").mkdir(parents=True, exist_ok=True)
    place = directory / "place"
    found: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    killed = 0
    for at in itertools.count(1, every):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(directory / "before", place)
        faulthandler.dump_traceback_later(_TIMEOUT, exit=True)
        error, where = _act(scenario, place, at)
        try:
            _finish_threads()
            state = scenario.look(place)
            assert error is None or isinstance(error, KeyboardInterrupt), repr(error)
            scenario.go_on(place)
            _finish_threads()
            if where:
                found[state] += 1
        except Exception:
            wrong.append(f"interrupt {at}:\n{where}\n{traceback.format_exc()}")
        if not where:
            break
        killed += 1
    faulthandler.cancel_dump_traceback_later()
    return Outcome(killed, dict(found), wrong)


def _act(scenario: Scenario, place: Path, at: int) -> tuple[BaseException | None, str]:
    """Acts with an interrupt: what came out, and where that was; "" when it was over before."""
    left, where = at, ""

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal left, where
        if event in ("call", "c_return"):
            left -= 1
            if not left:
                where = "".join(traceback.format_stack(frame))
                raise KeyboardInterrupt

    error = None
    sys.setprofile(profile)
    try:
        scenario.act(place)
    except BaseException as raised:
        error = raised.with_traceback(None)  # and holds nothing that the interrupted call had
    finally:
        sys.setprofile(None)
    return error, where


def _finish_threads() -> None:
    """Waits for all threads, those included that were only about to begin when the interrupt came."""
    time.sleep(0.002)
    while ours := [thread for thread in threading.enumerate() if thread.name.startswith("treering")]:
        for thread in ours:
            with contextlib.suppress(RuntimeError):  # it is being started
                thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fault_injection.interrupts", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=list(INTERRUPTED), default="save")
    parser.add_argument("--every", type=int, default=1, help="only every so many places")
    chosen = parser.parse_args()
    faulthandler.enable()
    json.dump(interrupted(INTERRUPTED[chosen.only], chosen.directory, chosen.every)._asdict(), sys.stdout)
