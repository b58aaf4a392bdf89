"""Tests signal handlers that save, restore or delete while the main thread is inside such a call."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import treering as tr
from sampling import STRIDE

# A real SIGTERM arrives at each disk operation of the call `OUTER` in turn, and its handler makes the call `INNER`.
# Background operations send it too. It then interrupts the main thread where that waits.
BODY = """
import faulthandler, os, shutil, signal, sys, threading
faulthandler.dump_traceback_later(100, exit=True)
import json, pathlib, numpy as np, treering as tr
from treering import stores
from treering.testing._doubles import SteppedDisk
tmp, outer, inner = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
tree = {"w": np.arange(30_000.0).reshape(2, -1).T, "n": 1}  # `w` must be copied, so the call waits for room

class Signals(SteppedDisk):
    at = armed = 0
    def step(self, number, name, operation, args):
        if self.armed:
            self.at -= 1
            if self.at == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return operation(*args)

def result(pending):
    return pending and pending.result()

class Again(Exception):
    "What a handler raises to end the loop."

calls = {
    "tr.save": lambda c, n: tr.save(tmp / f"free-{n}", tree),
    "tr.save_async": lambda c, n: tr.save_async(tmp / f"free-{n}", tree).result(),
    "save": lambda c, n: result(c.save(n, tree, memory_limit=1000, on_exists="overwrite")),
    "wait": lambda c, n: c.wait(), "close": lambda c, n: c.close(), "delete": lambda c, n: c.delete(1),
    "restore": lambda c, n: c.restore(), "pin": lambda c, n: c.pin(2), "rewind": lambda c, n: c.rewind(2),
    "finish": lambda c, n: c.finish(), "open": lambda c, n: dict(c.open()),
}
found = {"worked": 0, "refused": 0}
disk = Signals(looking=True)
stores.register(stores.Filesystem(disk))
at = 0
while True:
    at += 1
    seen = []
    number = 10 * at
    ckpts = tr.Checkpointer(tmp / f"run-{at}")
    for step in (1, 2, 3):
        ckpts.save(step, tree)
    ckpts.wait()
    def handler(*args):
        disk.armed = 0
        try:
            calls[inner](ckpts, number + 1)
            seen.append("worked")
        except tr.errors.MismatchError as error:
            if "handler of a signal" in str(error):
                seen.append("refused")
                assert "set a flag" in str(error) and "save_on_preemption" in str(error)
            elif "is closed" not in str(error):
                raise
        except (tr.errors.ExistsError, tr.errors.NotFoundError):  # both calls save or delete the same step
            seen.append("worked")
    signal.signal(signal.SIGTERM, handler)
    disk.at, disk.armed = at, 1
    if outer == "close":
        result = lambda pending: pending  # so that the save is still in progress
        ckpts.save(number + 5, tree)
        result = lambda pending: pending and pending.result()
    try:
        calls[outer](ckpts, number)
    except (tr.errors.ExistsError, tr.errors.NotFoundError) as error:
        assert seen == ["worked"], error
    except tr.errors.MismatchError as error:
        assert "is closed" in str(error) and seen == ["worked"], error
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ckpts.close()
    if disk.armed:  # the call has no more operations
        disk.armed = 0
        break
    disk.armed = 0
    for kind in seen:
        found[kind] += 1
    if outer in ("save", "tr.save"):
        path = ckpts.path(number) if outer == "save" else tmp / f"free-{number}"
        if os.path.exists(path):
            assert (tr.restore(path)["w"] == tree["w"]).all()
    ckpts = tr.Checkpointer(tmp / f"run-{at}")
    ckpts.save(number + 9, tree)  # no leftover blocks it
    ckpts.close()
    assert tr.steps(tmp / f"run-{at}")[-1] == number + 9 and tr.verify(tmp / f"run-{at}").ok
    for left in tmp.iterdir():  # otherwise all of this takes gigabytes
        shutil.rmtree(left)
print(json.dumps([at, found]))
"""
OUTER = ["tr.save", "tr.save_async", "save", "restore", "close", "delete", "pin", "rewind"]
INNER = ["tr.save", "tr.save_async", "save", "wait", "close", "delete", "restore", "pin", "rewind", "finish", "open"]


@pytest.mark.slow
@pytest.mark.parametrize("outer", OUTER)
def test_reentrant_call_works_or_is_refused(tmp_path: pathlib.Path, outer: str) -> None:
    """Each outer call is tried with a save, and with one or two other calls. `make thorough` tries all pairs."""
    refused = 0
    for inner in INNER if STRIDE == 1 else sorted({"save", *INNER[OUTER.index(outer) :: len(OUTER)]}):
        at = tmp_path / inner
        at.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", BODY, str(at), outer, inner], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (inner, done.stderr[-4000:])
        points, found = json.loads(done.stdout)
        assert points > 3 and sum(found.values()) > 0, (inner, points, found)
        refused += found["refused"]
    assert refused


@pytest.mark.long
def test_save_in_signal_handler_is_refused_with_advice(tmp_path: pathlib.Path) -> None:
    """A handler that saves while the main thread is in a save gets an error that says what to do."""
    code = """
import faulthandler, os, signal, sys, time
faulthandler.dump_traceback_later(20, exit=True)
import numpy as np, treering as tr
from treering import stores
class Slow(stores.posix.Disk):
    def write(self, fd, data, offset):
        if not signalled:
            signalled.append(1)
            time.sleep(0.2)  # the caller waits for room by now
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        super().write(fd, data, offset)
signalled = []
stores.register(stores.Filesystem(Slow()))
state = {"w": np.ones((600, 600)).T, "v": np.ones((600, 600)).T}
ckpts = tr.Checkpointer(sys.argv[1])
def handler(*args):
    ckpts.save(2, state, force=True).result()
    sys.exit(0)
signal.signal(signal.SIGTERM, handler)
try:
    ckpts.save(1, state, memory_limit=1000)
except tr.errors.MismatchError as error:
    print(error)
ckpts.save(3, state)
ckpts.close()
print(ckpts.steps)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    error, steps = done.stdout.splitlines()
    assert error.startswith("save(2): called by the handler of a signal") and steps == "[3]"


class Calls:
    """A data iterator that makes a call while its state is read or set."""

    def __init__(self) -> None:
        self.call: Any = None

    def get_state(self) -> dict[str, int]:
        call, self.call = self.call, None
        if call:
            call()
        return {"n": 1}

    def set_state(self, state: dict[str, int]) -> None:
        self.get_state()


def test_iterators_may_make_calls_of_their_own(tmp_path: pathlib.Path) -> None:
    """`get_state` and `set_state` of an iterator may call Treering."""
    data = Calls()
    with tr.Checkpointer(tmp_path / "run") as ckpts, tr.Checkpointer(tmp_path / "other") as other:
        calls = {
            "tr.save": lambda: tr.save(tmp_path / f"{len(list(tmp_path.iterdir()))}", {"n": 1}),
            "restore": lambda: tr.restore(tmp_path / "other"),
            "wait": ckpts.wait,
            "other": lambda: other.save(len(other.steps), {"n": 2}),
        }
        other.save(0, {"n": 0})
        other.wait()
        for step, call in enumerate(calls.values(), 1):
            data.call = call
            ckpts.save(step, {"data": data, "x": np.arange(3)})
        ckpts.wait()
        for call in (*calls.values(), ckpts.open, lambda: ckpts.pin(1)):
            data.call = call
            ckpts.restore({"data": data, "x": np.arange(3)})
        assert ckpts.steps == [1, 2, 3, 4] and ckpts.pinned == [1]
    assert len(tr.steps(tmp_path / "other")) == 3
