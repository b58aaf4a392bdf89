"""How much memory a save and a restore need beyond the state itself.

Each runs in a process of its own (`python -m benchmarks.memory`), where no allocator can serve it from what
another operation has freed.
"""

import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

import jax

from . import contestants, states
from .table import Row

_STATE = "large"
_SAMPLE_SECONDS = 0.005
_FIELDS = ("Anonymous:", "Pss_Shmem:")  # buffers for direct I/O are shared memory to the kernel
_LIBRARIES = {"treering": contestants.treering, "Orbax v0": contestants.orbax_v0}


def rows(directory: str) -> list[Row]:
    """Bytes; a restored state counts as its own, not as memory over it, wherever it is anonymous."""
    found: dict[str, dict[str, float]] = {"save": {}, "restore": {}}
    for who in _LIBRARIES:
        path = os.path.join(directory, who)
        for operation, peaks in found.items():  # the restore is of what the save has left
            command = [sys.executable, "-m", "benchmarks.memory", who, operation, path]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            peaks[who] = float(done.stdout.split()[-1])
        shutil.rmtree(path)
    return [Row(f"memory over the state, {operation}", _STATE, "MiB", peaks) for operation, peaks in found.items()]


def _child(who: str, operation: str, path: str) -> None:
    warm = path + "-warm"
    tiny = {"w": jax.numpy.zeros(4)}
    first = _LIBRARIES[who](tiny)  # what is loaded and started once per process is not the operation's
    first.save(warm)
    first.restore(warm)
    shutil.rmtree(warm)
    if operation == "save":
        contestant = _LIBRARIES[who](states.make(_STATE))
        print(_peak(lambda: contestant.save(path)))
    else:
        template = states.template(_STATE)
        contestant = _LIBRARIES[who](template)
        peak = _peak(lambda: contestant.restore(path))
        # Treering's arrays are the mapped file: nothing of them is anonymous.
        print(peak if who == "treering" else peak - states.nbytes(template))


def _peak(work: Callable[[], object]) -> int:
    """The most memory in use while `work` runs, above what was in use before."""
    gc.collect()
    before = _in_use()
    seen = [before]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            seen.append(_in_use())

    sampler = threading.Thread(target=sample)
    sampler.start()
    kept = work()
    seen.append(_in_use())
    over.set()
    sampler.join()
    del kept
    return max(seen) - before


def _in_use() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(_FIELDS))


if __name__ == "__main__":
    _child(*sys.argv[1:])
