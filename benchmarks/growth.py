"""How costs grow: each axis at three sizes, for Treering and Orbax in turns, in one process."""

import functools
import importlib.metadata
import logging
import math
import os
import pathlib
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

import treering as tr

from . import measure
from .table import markdown

_MAX_REPEATS = 5
_NOTE = (
    "Both libraries take turns in one process. A cell has the three times; the exponent is the slope between the two "
    "larger sizes: 0 is flat, 1 linear, 2 quadratic. Orbax is its `CheckpointManager` for runs, and its "
    "`StandardCheckpointer` for single checkpoints. Leaves have 32 bytes, so that a time is what a leaf, a level or a "
    "step costs."
)
_ORBAX_OPTIONS = ocp.CheckpointManagerOptions(max_to_keep=None, enable_async_checkpointing=False)
Work = Callable[[], object]
Pair = tuple[str, Work, Work]  # what is measured, by Treering, by Orbax


class Axis(NamedTuple):
    """What grows, its three sizes, and what is measured at a size in an empty folder."""

    name: str
    sizes: tuple[int, int, int]
    pairs: Callable[[pathlib.Path, int], Iterator[Pair]]


def _leaf(n: int = 0) -> np.ndarray:
    return np.full(8, n, np.float32)


def _of_tree(place: pathlib.Path, tree: Any) -> Iterator[Pair]:
    ours, theirs = str(place / "treering"), place / "orbax"
    orbax = ocp.StandardCheckpointer()

    def save_orbax() -> None:
        orbax.save(theirs, tree, force=True)
        orbax.wait_until_finished()

    yield "save", lambda: tr.save(ours, tree, overwrite=True), save_orbax
    yield "restore", lambda: tr.restore(ours, tree), lambda: orbax.restore(theirs, tree)
    orbax.close()


def _leaves(place: pathlib.Path, size: int) -> Iterator[Pair]:
    return _of_tree(place, {f"leaf_{n:05d}": _leaf(n) for n in range(size)})


def _levels(place: pathlib.Path, size: int) -> Iterator[Pair]:
    return _of_tree(place, functools.reduce(lambda below, n: {f"level_{n}": below}, range(size), _leaf()))


def _steps(place: pathlib.Path, size: int) -> Iterator[Pair]:
    """A run that keeps every step; the step that is measured is one more each time."""
    tree = {"w": _leaf()}
    with (
        tr.Checkpointer(place / "treering") as ours,
        ocp.CheckpointManager(place / "orbax", options=_ORBAX_OPTIONS) as theirs,
    ):
        next_ours, next_theirs = iter(range(1 << 30)).__next__, iter(range(1 << 30)).__next__

        def save_ours() -> None:
            pending = ours.save(next_ours(), tree)
            assert pending
            pending.result()

        def save_theirs() -> None:
            theirs.save(next_theirs(), args=ocp.args.StandardSave(tree))

        for _ in range(size):
            save_ours()
            save_theirs()
        yield "save of one more", save_ours, save_theirs
        yield "newest step, asked again", lambda: ours.latest_step, theirs.latest_step
    yield "newest step, by a new reader", *_newest(place)


def _files(place: pathlib.Path, size: int) -> Iterator[Pair]:
    """A run of three steps, with files of other programs in its folder."""
    for _ in _steps(place, 3):
        pass
    for name in ("treering", "orbax"):
        for n in range(size):
            (place / name / f"events.{n}").write_bytes(b"event")
    yield "newest step, by a new reader", *_newest(place)


def _newest(place: pathlib.Path) -> tuple[Work, Work]:
    def orbax() -> None:
        with ocp.CheckpointManager(place / "orbax", options=_ORBAX_OPTIONS) as manager:
            manager.latest_step()

    return lambda: tr.open(place / "treering").step, orbax


_AXES = [
    Axis("leaves", (100, 500, 2_500), _leaves),
    Axis("levels of the tree", (10, 40, 160), _levels),
    Axis("kept steps", (10, 50, 250), _steps),
    Axis("files of other programs in the run", (10, 100, 1_000), _files),
]


def report(directory: str, repeats: int) -> str:
    """Returns the table of all axes."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    repeats = min(repeats, _MAX_REPEATS)
    lines = [line for axis in _AXES for line in _measure(axis, directory, repeats)]
    versions = f"treering {tr.__version__}, orbax-checkpoint {importlib.metadata.version('orbax-checkpoint')}"
    head = f"Medians of {repeats} rounds; {versions}, jax {jax.__version__}."
    columns = ["what grows", "sizes", "measured", "Treering", "exponent", "Orbax", "exponent"]
    return "\n\n".join([head, _NOTE, markdown(columns, lines)])


def _measure(axis: Axis, directory: str, repeats: int) -> list[list[str]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for size in axis.sizes:
        place = pathlib.Path(directory, "growth")
        os.mkdir(place)
        for name, ours, theirs in axis.pairs(place, size):
            # The first round is warm-up.
            rounds = [(measure.seconds(ours), measure.seconds(theirs)) for _ in range(1 + repeats)]
            first, second = map(statistics.median, zip(*rounds[1:], strict=True))
            found.setdefault(name, []).append((first, second))
        shutil.rmtree(place)
    sizes = " / ".join(f"{size:,}" for size in axis.sizes)
    return [
        [axis.name, sizes, name, *(cell for one in zip(*times, strict=True) for cell in _cells(axis.sizes, one))]
        for name, times in found.items()
    ]


def _cells(sizes: Sequence[int], times: Sequence[float]) -> tuple[str, str]:
    """Returns the times, and the slope between the two larger sizes."""
    slope = math.log(times[2] / times[1]) / math.log(sizes[2] / sizes[1])
    return " / ".join(f"{float(f'{1e3 * one:.3g}'):,g}" for one in times) + " ms", f"{slope:.1f}"
