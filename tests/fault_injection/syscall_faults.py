"""SIGKILL, or an error, at every system call of a scenario, by `strace`: what the code really does."""

import collections
import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from pathlib import Path

from treering import stores

from . import forked_child
from .kill_points import Outcome
from .scenarios import Scenario

# What changes a disk, or says that it is changed. The others are of no interest to what is left behind.
CALLS = [
    *("openat", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "link", "linkat", "rename", "renameat", "renameat2"),
    *("fsync", "fdatasync", "ftruncate", "fallocate", "write", "pwrite64", "close", "flock", "fcntl"),
]


def available() -> bool:
    """Returns True if there is an `strace` that may trace and tamper."""
    if not shutil.which("strace"):
        return False
    done = subprocess.run(["strace", "-qq", "-e", "inject=rmdir:error=EIO", "true"], capture_output=True, check=False)
    return done.returncode == 0


def everywhere(scenario: Scenario, directory: Path, *, error: str | None = None, most: int | None = None) -> Outcome:
    """Kills at each call of each kind in turn, or makes it fail. The calls are counted by thread, as strace does.

    Of more than `most` of a kind it takes so many, evenly spread.
    """
    found: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    stores.register(stores.Filesystem(stores.Disk()))
    scenario.prepare(directory / "before")
    (directory / "before").mkdir(exist_ok=True)
    for call, count in _counted(scenario, directory).items():
        for at in _spread(count, most or count):
            place = directory / "place"
            shutil.copytree(directory / "before", place)
            inject = f"inject={call}:{f'error={error}' if error else 'signal=KILL'}:when={at}"
            code = _traced(scenario, place, ["-e", f"trace={call}", "-e", inject, "-o", "/dev/null"])
            where = f"{call} {at} of {count}, exit code {code}"
            try:
                state = scenario.look(place)
                if error:
                    assert code in (0, forked_child.RAISED) and not (code == 0 and state == "old")
                    state = f"{state}, {'raised' if code else 'passed'}"
                elif code == 0:
                    state = "survived"  # another thread did it this time
                else:
                    assert code == -signal.SIGKILL
                scenario.go_on(place)
                found[state] += 1
            except Exception:
                wrong.append(f"{where}:\n{traceback.format_exc()}")
            shutil.rmtree(place)
    found.pop("survived", 0)
    return Outcome(sum(found.values()), dict(found), wrong)


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers from 1 to `count`, the first and the last among them."""
    if count <= most:
        return list(range(1, count + 1))
    return [1 + round(n * (count - 1) / (most - 1)) for n in range(most)]


def _counted(scenario: Scenario, directory: Path) -> dict[str, int]:
    """Counts how often the busiest thread makes each call."""
    place, log = directory / "place", directory / "log"
    shutil.copytree(directory / "before", place)
    assert _traced(scenario, place, ["-e", f"trace={','.join(CALLS)}", "-o", str(log)]) == 0
    shutil.rmtree(place)
    seen = collections.Counter(re.findall(r"^(\d+) +(\w+)\(", log.read_text(), re.MULTILINE))
    return {call: max((n for (_, name), n in seen.items() if name == call), default=0) for call in CALLS}


def _traced(scenario: Scenario, place: Path, options: list[str]) -> int:
    """Performs a scenario in a child under strace, which is attached before it begins. Returns its exit code."""
    reading, writing = os.pipe()

    def do() -> None:
        os.close(writing)
        os.read(reading, 1)
        scenario.act(place)

    child = forked_child.start(do)
    tracer = subprocess.Popen(["strace", "-f", "-qq", *options, "-p", str(child)], stderr=subprocess.DEVNULL)
    status = Path(f"/proc/{child}/status")
    while tracer.poll() is None and "TracerPid:\t0\n" in status.read_text():
        time.sleep(0.001)
    time.sleep(0.005)  # time for the process to be stopped and continued
    os.close(writing)
    os.close(reading)
    code = forked_child.end(child)
    tracer.wait()
    return code
