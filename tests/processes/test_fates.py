"""Tests what peers see of a process that dies, stops, ends or is late. docs/explanation/scale.md has the table."""

import pathlib
from typing import Any

import pytest

import treering as tr
from jobs import run_job

BODY = """
def act(call):
    match FATE:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "ended":
            raise SystemExit
        case "late":
            time.sleep(5)

armed = []
class Armed(stores.posix.Disk):
    def sync(self, fd):
        if armed == ["save"] and "arrays-" in os.readlink(f"/proc/self/fd/{fd}"):
            act(armed.pop())
        super().sync(fd)
    def open(self, path):
        if armed == ["restore"] and "arrays-" in path:
            act(armed.pop())
        return super().open(path)

if INDEX == 2:
    stores.register(stores.Filesystem(Armed()))
state = {"x": put(np.arange(3 << 19, dtype=np.float32), P("x")), "n": 1}
local = {"local": tmp / "local"} if CALL == "close" else {}
ckpts = tr.Checkpointer(tmp / "run", timeout=3, **local)
ckpts.save(1, state).result()
calls = {
    "save": lambda: ckpts.save(2, state).result(),
    "restore": lambda: ckpts.restore(state, read="once"),
    "close": ckpts.close,
    "between": lambda: ckpts.save(2, state).result(),
}
if INDEX == 2:
    (tmp / "victim").write_text(str(os.getpid()))
    if CALL in ("save", "restore"):
        armed.append(CALL)
    else:
        act(CALL)
error = caught(calls[CALL])
if FATE == "stopped" and INDEX == 0:
    os.kill(int((tmp / "victim").read_text()), signal.SIGCONT)
met = None
if FATE in ("stopped", "late"):
    later = tr.Checkpointer(tmp / "run", timeout=3)
    for attempt in range(4):  # A process that stood still fails the calls that its peers have cancelled.
        met = caught(lambda: later.save(9, state, on_exists="overwrite").result())
        if met is None:
            break
report([error, met, tr.steps(tmp / "run")])
"""
FATES = [
    *((fate, call) for fate in ("killed", "stopped", "late") for call in ("save", "restore", "close", "between")),
    *(("ended", call) for call in ("close", "between")),
]


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize(("fate", "call"), FATES)
def test_peers_learn_the_fate_of_a_process(tmp_path: pathlib.Path, fate: str, call: str) -> None:
    options: dict[str, Any] = {"devices": 1, "recoverable": fate == "killed", "expect": {2: None}, "timeout": 90}
    results = run_job(tmp_path, BODY, processes=3, FATE=fate, CALL=call, **options)
    for error, met, steps in [result.report for result in results[:2]]:
        if fate == "late" or call == "close":  # Process 0 uploads alone.
            assert error is None
        else:
            assert error and error[0] == "PeerError" and "process 2 (" in error[1]
            says = "ended without this call" if fate == "ended" else "dead, stopped or cut off"
            assert says in error[1], error[1]
        assert met is None and (2 in steps) == (fate == "late" and call in ("save", "between"))
        assert (9 in steps) == (fate in ("stopped", "late"))
    assert tr.verify(tmp_path / "run").ok
