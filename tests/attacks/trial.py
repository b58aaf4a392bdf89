"""Tries attacks in one process, one after another: `python -m attacks.trial FOLDER NAME...`.

Prints a line of JSON when an attack begins, and one when it is over. The process that reads them ends this one if
nothing arrives for too long.
"""

import gc
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import treering as tr
from treering.errors import TreeringError

from . import CANARY, OUTSIDE, Attack, load, subjects

_ROOM = 40 << 30  # bytes of addresses: a failing attack must not use up the machine's memory


class Trial(NamedTuple):
    """The result of an attack: problems (none if all is well), the outcome of each operation, seconds and bytes."""

    name: str
    wrong: list[str]
    outcomes: dict[str, str]
    seconds: float
    nbytes: int


def attempt(name: str, attack: Attack, folder: Path) -> Trial:
    """Tries every operation on the files that an attack makes."""
    inside, outside = folder / "inside", folder / OUTSIDE
    inside.mkdir(parents=True)
    outside.mkdir()
    (outside / "canary").write_bytes(CANARY * 64)
    path = attack.make(inside)
    before = _listing(folder)
    wrong: list[str] = []
    outcomes: dict[str, str] = {}
    slowest, largest = 0.0, 0
    destinations = {f"convert to {name}": folder / "converted" / f"x{suffix}" for name, suffix in _DESTINATIONS.items()}
    if not name.startswith("names/"):
        destinations = {"convert": folder / "converted" / "x"}
    operations: dict[str, Callable[[], Any]] = {
        "open": lambda: str(tr.open(path)),
        "restore": lambda: restored(path),
        "verify": lambda: tr.verify(path),
        **{what: lambda to=to, what=what: converted(path, to, what.split()[-1]) for what, to in destinations.items()},
    }
    for what, operation in operations.items():
        (folder / "converted").mkdir()
        memory, begun = _Memory(), time.perf_counter()
        try:
            found = operation()
            outcomes[what] = "fine"
            if what == "verify" and not found.ok:
                outcomes[what] = "problems"
            if _has_canary(found, folder / "converted"):
                wrong.append(f"{what}: data from outside came back")
            if what == "restore" and attack.verdict == "right" and not _is_tree(found):
                wrong.append(f"{what}: something else came back: {found!r:.300}")
        except TreeringError as error:
            outcomes[what] = type(error).__name__
            if len(str(error)) > 20_000 or _text(CANARY) in str(error):
                wrong.append(f"{what}: a message of {len(str(error))} characters, or with data from outside")
            if os.listdir(folder / "converted"):
                wrong.append(f"{what}: left {os.listdir(folder / 'converted')} behind")
        except Exception as error:
            outcomes[what] = type(error).__name__
            wrong.append(f"{what}: {type(error).__name__}: {error!s:.300}")
        slowest = max(slowest, time.perf_counter() - begun)
        largest = max(largest, memory.taken())
        shutil.rmtree(folder / "converted")
    if attack.verdict == "unread" and outcomes["restore"] == "fine":
        wrong.append("restore: it was taken")
    if attack.verdict == "refused":
        wrong += [f"{what}: it was taken" for what in ("restore", "verify") if outcomes[what] == "fine"]
        wrong += ["convert: it was taken"] if outcomes.get("convert") == "fine" else []
    if (after := _listing(folder)) != before:
        wrong.append(f"files have changed: {sorted(set(after.items()) ^ set(before.items()))}")
    return Trial(name, wrong, outcomes, slowest, largest)


_DESTINATIONS = {
    "treering": "",
    "safetensors": ".safetensors",
    "flax": ".msgpack",
    "fjformer": "",
    "equinox": ".eqx",
    "orbax": "",
    "composite": "",
    "t5x": "",
    "levanter": "",
}


def restored(path: Path) -> Any:
    """Restores all of a checkpoint."""
    return tr.restore(path, subjects.template() if tr.open(path).format == "equinox" else None)


def converted(path: Path, to: Path, format: str) -> None:
    """Converts a checkpoint to another format."""
    if format == "composite":
        tr.convert(path, to, format="orbax", composite=True)
    elif format == "convert":
        tr.convert(path, to)
    else:
        tr.convert(path, to, format=format)


def _is_tree(found: Any) -> bool:
    expected = subjects.tree()
    for path in (["target"], []):
        for key in path if isinstance(found, dict) and path[0:1] == list(found) else ():
            found = found[key]
    same = jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=False)
    return same and all(np.asarray(a).tobytes() == b.tobytes() for a, b in pairs)


def _has_canary(found: Any, folder: Path) -> bool:
    """Returns True if the canary is in a result, in memory or in a file."""
    small = [leaf.tobytes() for leaf in _leaves(found) if isinstance(leaf, np.ndarray) and leaf.nbytes < 1 << 20]
    texts = [
        leaf if isinstance(leaf, bytes) else leaf.encode() for leaf in _leaves(found) if isinstance(leaf, str | bytes)
    ]
    written = [Path(base) / name for base, _, names in os.walk(folder) for name in names]
    small += [file.read_bytes() for file in written if file.stat().st_size < 1 << 20]
    return any(CANARY in data for data in small + texts)


def _leaves(tree: Any) -> list[Any]:
    """Returns the leaves of containers of any depth."""
    found, stack = [], [tree]
    while stack:
        one = stack.pop()
        if isinstance(one, dict | list | tuple):
            stack += one.values() if isinstance(one, dict) else one
        else:
            found.append(one)
    return found


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the kind and size of everything in a folder; does not follow links."""
    found = (Path(base) / name for base, folders, names in os.walk(folder) for name in folders + names)
    return {str(path): ((there := path.lstat()).st_mode, there.st_size) for path in found}


def _text(data: bytes) -> str:
    return data.decode()


class _Memory:
    """Measures the peak of the process's memory, in bytes above the use at this moment."""

    def __init__(self) -> None:
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak
        self._before = _status("VmRSS")

    def taken(self) -> int:
        return max(_status("VmHWM") - self._before, 0)


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:"))


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    corpus = load()
    resource.setrlimit(resource.RLIMIT_AS, (_ROOM, _ROOM))
    gc.freeze()  # imported modules are never garbage
    for n, name in enumerate(names):
        print(json.dumps([name]), flush=True)
        trial = attempt(name, corpus[name], folder / str(n))
        print(json.dumps(trial), flush=True)
        shutil.rmtree(folder / str(n), ignore_errors=True)


if __name__ == "__main__":
    main()
