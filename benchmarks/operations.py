"""The operations on one state, each a race of all contestants."""

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import treering as tr

from . import contestants, floor, measure, states
from .contestants import Contestant
from .table import Row


@dataclasses.dataclass(frozen=True)
class Arena:
    """A state, its contestants, and a directory that holds one checkpoint of each under its name."""

    name: str
    state: Any
    entered: list[Contestant]
    directory: str
    repeats: int

    def kept(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def row(self, operation: str, runs: dict[str, Callable[[], float]]) -> Row:
        return Row(operation, self.name, "s", measure.race(runs, self.repeats))


def enter(name: str, state: Any, entered: list[Contestant], directory: str, repeats: int) -> Arena:
    """Everyone saves once, and what comes back is compared; this also warms everyone up."""
    arena = Arena(name, state, entered, directory, repeats)
    os.makedirs(directory)
    for contestant in arena.entered:
        contestant.save(arena.kept(contestant.name))
        states.check(state, contestant.restore(arena.kept(contestant.name)), contestant.name)
    os.mkdir(arena.kept("floor"))
    file = os.path.join(arena.kept("floor"), "bytes")
    _floor(arena)(file, states.views(state))
    floor.check(file, states.views(state))
    return arena


def save(arena: Arena) -> list[Row]:
    """Seconds until the save is durable."""
    views = states.views(arena.state)

    def floor_save(path: str) -> None:
        os.mkdir(path)
        _floor(arena)(os.path.join(path, "bytes"), views)

    savers = {contestant.name: contestant.save for contestant in arena.entered} | {"floor": floor_save}

    def run(name: str) -> float:
        path = arena.kept("new")
        os.sync()  # nobody pays for what others have written
        taken = measure.seconds(lambda: savers[name](path))
        shutil.rmtree(path)
        return taken

    return [arena.row("durable save", {name: functools.partial(run, name) for name in savers})]


def stall(arena: Arena) -> list[Row]:
    """Seconds until the program may go on."""
    if arena.name == "gpt2":
        return []  # like `large` in all that matters here

    def run(start: Callable[[str], Callable[[], object]]) -> float:
        path = arena.kept("new")
        os.sync()
        waits: list[Callable[[], object]] = []
        taken = measure.seconds(lambda: waits.append(start(path)))
        waits[0]()
        shutil.rmtree(path)
        return taken

    starters = {c.name: functools.partial(run, c.start) for c in arena.entered if c.start}
    return [dataclasses.replace(arena.row("stall of an asynchronous save", starters), unit="ms")]


def warm(arena: Arena) -> list[Row]:
    """Restores from the page cache."""

    def run(restore: Callable[[str], Any], name: str, use: bool) -> float:
        measure.fill_cache(arena.kept(name))

        def work() -> Any:
            restored = restore(arena.kept(name))
            return restored, _read(restored) if use else None

        return measure.seconds(work)

    unverified = contestants.treering(arena.state, verify=False)
    runs = {c.name: functools.partial(run, c.restore, c.name, False) for c in arena.entered}
    found = arena.row(
        "restore, warm", {**runs, "unverified": functools.partial(run, unverified.restore, "treering", False)}
    )
    second = found.values.pop("unverified")
    rows = [found, Row("restore, warm, verify=False", arena.name, "s", {**found.values, "treering": second})]
    if arena.name == "small":
        plain = {c.name: c.restore for c in arena.entered if c.name == "safetensors"} | {"treering": tr.restore}
        runs = {name: functools.partial(run, restore, name, False) for name, restore in plain.items()}
        rows.append(arena.row("restore into NumPy, warm", runs))
    if arena.name == "large":
        uses = {c.name: functools.partial(run, c.restore, c.name, True) for c in [*arena.entered[1:], unverified]}
        rows.append(arena.row("restore, warm, verify=False, and read every byte", uses))
    return rows


def cold(arena: Arena) -> list[Row]:
    """Restores from the disk."""
    if arena.name == "small":
        return []
    kept = arena.kept("treering")
    file = max((os.path.join(kept, name) for name in os.listdir(kept)), key=os.path.getsize)

    def run(restore: Callable[[], Any], name: str) -> float:
        measure.drop_cache(arena.kept(name))
        return measure.seconds(restore)

    runs = {
        c.name: functools.partial(run, functools.partial(c.restore, arena.kept(c.name)), c.name) for c in arena.entered
    }
    runs["floor"] = functools.partial(run, lambda: floor.read_large(file), "treering")
    return [arena.row("restore, cold", runs)]


def _floor(arena: Arena) -> Callable[[str, list[np.ndarray]], None]:
    return floor.write_small if arena.name == "small" else floor.write_large


def _read(restored: Any) -> float:
    return sum(float(np.asarray(leaf).sum()) for leaf in jax.tree.leaves(restored))


OPERATIONS = {"save": save, "stall": stall, "warm": warm, "cold": cold}
