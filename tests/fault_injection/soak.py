"""`python -m fault_injection.soak ROUNDS DIRECTORY [--quick]`: saves and restores in one process; nothing grows."""

import errno
import gc
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import treering as tr
from treering import stores
from treering.testing._doubles import FailingDisk, QuickDisk


class Sample(NamedTuple):
    """What the process has after so many rounds. A round is a save and a restore; every tenth has a few more
    of both."""

    rounds: int
    memory: int  # bytes, resident
    descriptors: int
    threads: int
    disk: int  # bytes


# What the last sample may have more than the first: less than one state kept in 17 rounds of 300, or in 600 of 10,000;
# and an array file more on the disk, where a deletion failed.
_MORE_MEMORY, _MORE_DISK = 8 << 20, 1 << 20
_THREADS = 1 + 3  # those of the last save may not have ended yet


def grown(samples: list[Sample]) -> list[str]:
    """Returns the resources of which more is in use at the end than in the beginning; a state is 0.5 MB."""
    first, *_, last = samples
    return [
        f"{name}: {now}, at the most {most} are expected"
        for name, now, most in (
            ("bytes of memory", last.memory, first.memory + _MORE_MEMORY),
            ("descriptors", last.descriptors, first.descriptors),
            ("threads", last.threads, _THREADS),
            ("bytes on the disk", last.disk, first.disk + _MORE_DISK),
        )
        if now > most
    ]


def soak(rounds: int, directory: Path, *, quick: bool = False) -> list[Sample]:
    """Ten samples at equal distances."""
    logging.getLogger("treering").setLevel(logging.CRITICAL)  # some of the saves are made to fail
    usual = stores.Filesystem(QuickDisk() if quick else stores.Disk())
    stores.register(usual)
    samples: list[Sample] = []
    init = _state(0)
    ckpts = tr.Checkpointer(directory / "run", keep=tr.keep.last(2))
    for n in range(1, rounds + 1):
        pending = ckpts.save(n, _state(n), metrics={"loss": 1 / n})
        assert pending and pending.result().step == n
        found = ckpts.restore(init)
        assert found["n"] == n and float(found["w"][-1]) == n and found["host"][0] == n
        if n % 10 == 0:
            _others(directory, n)
            stores.register(usual)
            ckpts.close()
            ckpts = tr.Checkpointer(directory / "run", keep=tr.keep.last(2))
        if n % (rounds // 10) == 0:
            samples.append(_sample(n, directory))
    ckpts.close()
    return samples


def _state(n: int) -> dict[str, object]:
    small = {str(k): jnp.full(3, n) for k in range(10)}
    return {"w": jnp.full(1 << 16, n, jnp.float32), "host": np.full(1 << 15, n), "small": small, "n": n}


def _others(directory: Path, n: int) -> None:
    """An overwrite, a verification, a copy, damage that is found, a save that fails, one that is refused, a
    deletion."""
    path = directory / "c"
    tr.save_async(path, _state(n), overwrite=True).result()
    assert tr.verify(path).ok
    tr.save(directory / "copy.msgpack", tr.open(path), overwrite=True)
    assert tr.restore(directory / "copy.msgpack")["w"][0] == n
    (arrays,) = path.glob("arrays-*")
    arrays.chmod(0o644)
    with arrays.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    stores.register(stores.Filesystem(FailingDisk(1 + n // 10 % 50, errno.ENOSPC)))
    for call in (
        lambda: tr.restore(path),
        lambda: tr.save(path, _state(n)),
        lambda: tr.save_async(path, _state(n), overwrite=True).result(),
        lambda: tr.save(path, {"x": object()}),
    ):
        try:
            call()
        except tr.errors.TreeringError:
            pass


def _sample(n: int, directory: Path) -> Sample:
    gc.collect()
    jax.clear_caches()
    threads = threading.active_count()
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return Sample(n, pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/dev/fd")), threads, size)


if __name__ == "__main__":
    found = soak(int(sys.argv[1]), Path(sys.argv[2]), quick="--quick" in sys.argv)
    json.dump({"samples": [sample._asdict() for sample in found], "grown": grown(found)}, sys.stdout)
