"""SIGKILL while a checkpoint is overwritten, by library: at random times, and at the system calls that each makes."""

import collections
import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import treering as tr

from . import forked_child, syscall_faults
from .scenarios import Scenario

PACKAGES = ("orbax-checkpoint", "safetensors")
LEAVES = 64
LEAF = 1 << 18  # bytes
STATES = ("old", "new", "mixture", "nothing")  # what there is afterwards; a mixture is restored without an error
STUCK, LEFT = "the next save fails", "left over"
_LOOKED = 20  # exit codes of children that look: this and the version, 0 for a mixture
MAX_CALLS = 12  # of one kind at which a process is killed; Orbax makes thousands


class Library(NamedTuple):
    """Both are called in children of their own: JAX must not begin anything in the process that forks them."""

    save: Callable[[Path, Any], Any]
    restore: Callable[[Path], Any]


def _orbax_save(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(path, tree, force=True)


def _orbax_restore(path: Path) -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointer().restore(path)


def _standard_save(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree, force=True)


def _standard_restore(path: Path) -> Any:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer().restore(path)


def _orbax_1_save(path: Path, tree: Any) -> None:
    import orbax.checkpoint.experimental.v1 as ocp

    ocp.save(path, tree, overwrite=True)


def _orbax_1_restore(path: Path) -> Any:
    import orbax.checkpoint.experimental.v1 as ocp

    return ocp.load(path)


def _safetensors_save(path: Path, tree: Any) -> None:
    from safetensors.numpy import save_file

    save_file(tree, path)


def _safetensors_restore(path: Path) -> Any:
    from safetensors.numpy import load_file

    return load_file(path)


OURS = Library(lambda path, tree: tr.save(path, tree, overwrite=True), tr.restore)
LIBRARIES = {
    "Treering, `overwrite=True`": OURS,
    "Orbax, `PyTreeCheckpointer`, `force=True`": Library(_orbax_save, _orbax_restore),
    "Orbax, `StandardCheckpointer`, `force=True`": Library(_standard_save, _standard_restore),
    "Orbax v1, `overwrite=True`": Library(_orbax_1_save, _orbax_1_restore),
    "safetensors, `save_file`": Library(_safetensors_save, _safetensors_restore),
}


def import_libraries() -> None:
    """So that the children need not, each for itself."""
    import orbax.checkpoint.experimental.v1  # noqa: F401
    import safetensors.numpy  # noqa: F401


def killed(library: Library, directory: Path, times: int) -> dict[str, int]:
    """Counts the states found after so many kills, at times drawn evenly from the duration of an overwrite."""
    rng, path = random.Random(0), directory / "c"
    found: collections.Counter[str] = collections.Counter()
    seconds = sorted(_overwriting(library, path, None)[1] for _ in range(5))[2]
    assert look(library, path) == "new"
    clean = _size(directory)
    while sum(found[state] for state in STATES) < times:
        shutil.rmtree(directory)
        directory.mkdir()
        code, _ = _overwriting(library, path, rng.uniform(0, seconds))
        assert code in (0, -signal.SIGKILL)
        if code:  # or else it was through before that
            found.update([look(library, path), *_next(library, path, clean)])
    return dict(found)


def killed_by_system_call(library: Library, directory: Path) -> dict[str, int]:
    """Counts the states found after kills at system calls that change something; of many of a kind, at some."""
    clean, after = 0, collections.Counter[str]()

    def prepare(place: Path) -> None:
        nonlocal clean
        place.mkdir()
        assert _ended(lambda: library.save(place / "c", _tree(1))) == 0
        clean = _size(place)

    scenario = Scenario(
        prepare,
        lambda place: library.save(place / "c", _tree(2)),
        lambda place: look(library, place / "c"),
        lambda place: after.update(_next(library, place / "c", clean)),
    )
    outcome = syscall_faults.everywhere(scenario, directory, most=MAX_CALLS)
    assert not outcome.wrong, outcome.wrong[0]
    return {**outcome.found, **after}


def _next(library: Library, path: Path, clean: int) -> Iterator[str]:
    """Yields the faults of the next save: it fails, or files of the killed save stay for good."""
    if _ended(lambda: library.save(path, _tree(2)), quiet=True) or look(library, path) != "new":
        yield STUCK
    if _size(path.parent) > clean + LEAF // 2:
        yield LEFT


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def look(library: Library, path: Path) -> str:
    """Returns the state at a path, as the library itself restores it."""
    code = forked_child.end(forked_child.start(lambda: os._exit(_LOOKED + _version(library.restore(path))), quiet=True))
    return {_LOOKED + 1: "old", _LOOKED + 2: "new", _LOOKED: "mixture"}.get(code, "nothing")


def _ended(do: Callable[[], Any], *, quiet: bool = False) -> int:
    return forked_child.end(forked_child.start(do, quiet=quiet))


def _overwriting(library: Library, path: Path, kill_after: float | None) -> tuple[int, float]:
    """A child that saves the old and then the new; killed after so many seconds of the latter: its end, the seconds."""
    reading, writing = os.pipe()

    def do() -> None:
        old, new = _tree(1), _tree(2)
        library.save(path, old)  # by the same process, as in training: what is made once is not in the time
        os.write(writing, b".")
        library.save(path, new)

    child = forked_child.start(do)
    os.close(writing)
    os.read(reading, 1)
    begun = time.perf_counter()
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    code = forked_child.end(child)
    os.close(reading)
    return code, time.perf_counter() - begun


@functools.cache
def _tree(version: int) -> dict[str, np.ndarray]:
    return {f"w{n:02}": np.full(LEAF // 4, version, np.float32) for n in range(LEAVES)}


def _version(tree: Any) -> int:
    """1 or 2; 0 for what is neither."""
    values = {float(value) for leaf in tree.values() for value in (leaf.min(), leaf.max())}
    return int(values.pop()) if len(tree) == LEAVES and len(values) == 1 and values <= {1.0, 2.0} else 0
