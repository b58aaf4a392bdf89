"""Flips one bit after another in the files of a checkpoint, and counts the flips that reading it notices."""

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

import treering as tr
from hostile_input import flip
from treering.testing._samples import identity, spread


class Rot(NamedTuple):
    """Counts flips that raised an error, changed nothing, and silently changed values."""

    name: str
    nbytes: int
    flips: int
    noticed: int
    harmless: int
    wrong: int


def state() -> dict[str, np.ndarray]:
    """Returns random weights, as in training: no compression makes them smaller."""
    rng = np.random.default_rng(0)
    return {f"layer{n}": rng.normal(size=(16, 32)).astype(np.float32) for n in range(4)}


def measure(folder: Path, most: int) -> list[Rot]:
    """Flips bits of each library's files, at most `most` of each."""
    import orbax.checkpoint as ocp

    logging.disable()
    warnings.simplefilter("ignore")
    tree = state()
    tr.save(folder / "treering", tree)
    safetensors.numpy.save_file(tree, folder / "one.safetensors")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", tree)
        checkpointer.wait_until_finished()
        found = [
            _of("Treering", folder / "treering", most, lambda path: tr.restore(path)),
            _of(
                "Treering reading the safetensors file", folder / "one.safetensors", most, lambda path: tr.restore(path)
            ),
            _of("safetensors", folder / "one.safetensors", most, safetensors.numpy.load_file),
            _of("Treering reading the Orbax checkpoint", folder / "orbax", most, lambda path: tr.restore(path)),
            _of("Orbax", folder / "orbax", most, lambda path: checkpointer.restore(path, tree)),
        ]
    logging.disable(logging.NOTSET)
    return found


def _of(name: str, path: Path, most: int, restore: Callable[[Path], Any]) -> Rot:
    expected = {key: identity(leaf) for key, leaf in state().items()}
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    places = [(file, at) for file in files for at in range(file.stat().st_size)]
    assert {key: identity(leaf) for key, leaf in restore(path).items()} == expected
    noticed = harmless = wrong = flips = 0
    for n in spread(len(places), most):
        file, at = places[n]
        flip(file, at, n % 8)
        flips += 1
        try:
            found = {key: identity(leaf) for key, leaf in restore(path).items()}
            harmless += found == expected
            wrong += found != expected
        except Exception:
            noticed += 1
        flip(file, at, n % 8)
    return Rot(name, len(places), flips, noticed, harmless, wrong)


def exhaustive(folder: Path) -> tuple[int, int]:
    """Flips every bit of a small checkpoint of Treering; returns the number of flips, and of those not noticed."""
    path = folder / "small"
    tr.save(path, {"a": np.arange(1, 9, dtype=np.int16), "b": [1.5, "text"]})
    before = _values(path)
    flips = missed = 0
    for file in sorted(path.iterdir()):
        for at in range(file.stat().st_size):
            for bit in range(8):
                flip(file, at, bit)
                flips += 1
                try:
                    missed += _values(path) != before
                except tr.errors.TreeringError:
                    pass
                flip(file, at, bit)
    shutil.rmtree(path)
    return flips, missed


def _values(path: Path) -> Any:
    found = tr.restore(path, mmap=False)
    return identity(found["a"]), found["b"]
