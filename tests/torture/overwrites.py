"""SIGKILL at random times while a checkpoint is overwritten: what a reader finds afterwards, by library."""

import collections
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import treering as tr

from . import forks

_LEAVES = 64
_LEAF = 1 << 18  # bytes
_DONE = 20  # exit codes of children that look: this and the version


class Library(NamedTuple):
    """Both are called in children of their own."""

    save: Callable[[Path, Any], Any]
    restore: Callable[[Path], Any]


def _orbax_save(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(path, tree, force=True)


def _orbax_restore(path: Path) -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointer().restore(path)


LIBRARIES = {
    "Treering, `overwrite=True`": Library(lambda path, tree: tr.save(path, tree, overwrite=True), tr.restore),
    "Orbax, `force=True`": Library(_orbax_save, _orbax_restore),
}


def killed(library: Library, directory: Path, times: int) -> dict[str, int]:
    """How often the old, the new, or neither was readable, and how often it was through before it could be killed."""
    import orbax.checkpoint  # noqa: F401  # so that children need not

    rng, path = random.Random(0), directory / "c"
    found: collections.Counter[str] = collections.Counter()
    seconds = sorted(_seconds(library, path) for _ in range(5))[2]
    assert _found(library, path) == "new"
    for _ in range(times):
        shutil.rmtree(directory)
        directory.mkdir()
        assert forks.end(forks.start(lambda: library.save(path, _tree(1)))) == 0
        child, begun = _saving(library, path, 2)
        os.read(begun, 1)
        time.sleep(rng.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.close(begun)
        if forks.end(child) == 0:
            found["through"] += 1
            continue
        found[_found(library, path)] += 1
    return dict(found)


def _found(library: Library, path: Path) -> str:
    code = forks.end(forks.start(lambda: os._exit(_DONE + _version(library.restore(path)))))
    return {_DONE + 1: "old", _DONE + 2: "new"}.get(code, "neither")


def _seconds(library: Library, path: Path) -> float:
    child, begun = _saving(library, path, 2)
    os.read(begun, 1)
    start = time.perf_counter()
    assert forks.end(child) == 0
    os.close(begun)
    return time.perf_counter() - start


def _saving(library: Library, path: Path, version: int) -> tuple[int, int]:
    """A child that overwrites a checkpoint, and the end of a pipe that says when it begins."""
    reading, writing = os.pipe()

    def do() -> None:
        tree = _tree(version)
        os.write(writing, b".")
        library.save(path, tree)

    child = forks.start(do)
    os.close(writing)
    return child, reading


def _tree(version: int) -> dict[str, np.ndarray]:
    return {f"w{n:02}": np.full(_LEAF // 4, version, np.float32) for n in range(_LEAVES)}


def _version(tree: Any) -> int:
    values = {float(value) for leaf in tree.values() for value in (leaf.min(), leaf.max())}
    assert len(tree) == _LEAVES and len(values) == 1, "a mixture"
    return int(values.pop())
