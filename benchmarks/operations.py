"""The operations on one state, each a race of all contestants."""

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping

from . import contestants, measure, workers
from .table import Row


@dataclasses.dataclass(frozen=True)
class Arena:
    """A state, the jobs of its contestants, and a directory that holds one checkpoint of each under its name."""

    name: str
    entered: dict[str, workers.Job]
    directory: str
    repeats: int

    def kept(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def race(self, operation: str, runs: Mapping[str, Callable[[], float]]) -> Row:
        return Row(operation, self.name, "s", measure.race(runs, self.repeats))

    def save(self, job: workers.Job, what: str = "save") -> float:
        """The seconds of a save to a new place."""
        path = self.kept("new")
        os.sync()  # no contestant waits for the writes of another
        taken = job.request(what, path)
        shutil.rmtree(path)
        return taken

    def restore(self, job: workers.Job, prepare: Callable[[str], None], name: str, what: str = "restore") -> float:
        """The seconds of restoring what a contestant keeps."""
        prepare(self.kept(name))
        return job.request(what, self.kept(name))


@contextlib.contextmanager
def enter(state: str, names: Iterable[str], directory: str, repeats: int, *, count: int = 1) -> Iterator[Arena]:
    """Everyone, each in so many processes, saves once, and what comes back is compared; this also warms them up."""
    os.makedirs(directory)
    with contextlib.ExitStack() as running:
        jobs = {name: running.enter_context(workers.job(name, state, count=count)) for name in [*names, "floor"]}
        arena = Arena(state, jobs, directory, repeats)
        for name, job in jobs.items():
            job.request("save", arena.kept(name))
            job.request("check", arena.kept(name))
        yield arena
    shutil.rmtree(directory)


def save(arena: Arena) -> list[Row]:
    """Seconds until the save is durable."""
    runs = {name: functools.partial(arena.save, job) for name, job in arena.entered.items()}
    return [arena.race("durable save", runs)]


def stall(arena: Arena) -> list[Row]:
    """Measures the seconds until the program continues."""
    if arena.name == "gpt2":
        return []  # like `large` in all that matters here
    starters = {name: arena.entered[name] for name in contestants.WITH_ASYNC_SAVES if name in arena.entered}
    found = arena.race(
        "stall of an asynchronous save",
        {name: functools.partial(arena.save, job, "start") for name, job in starters.items()},
    )
    return [dataclasses.replace(found, unit="ms")]


def warm(arena: Arena) -> list[Row]:
    """Restores from the page cache."""
    runs = {name: from_cache(arena, job, name) for name, job in _readers(arena).items()}
    return [arena.race("restore, warm", runs)]


def unverified(arena: Arena) -> list[Row]:
    """Restores from the page cache, Treering with `verify=False`; then the same with a use of every byte."""
    with workers.job("treering, verify=False", arena.name, onto=arena.name) as treering:
        treering.request("check", arena.kept("treering"))
        readers = {**_readers(arena), "treering": treering}
        whats = {"restore, warm, verify=False": "restore"}
        if arena.name == "large":
            whats["restore, warm, verify=False, and read every byte"] = "read"
        return [
            arena.race(operation, {name: from_cache(arena, job, name, what) for name, job in readers.items()})
            for operation, what in whats.items()
        ]


def _readers(arena: Arena) -> dict[str, workers.Job]:
    """Returns those that make arrays of what they read."""
    return {name: job for name, job in arena.entered.items() if name != "floor"}


def into_numpy(arena: Arena) -> list[Row]:
    """Restores into NumPy arrays, as safetensors does."""
    if arena.name != "small":
        return []
    with workers.job("treering into NumPy", arena.name, onto=arena.name) as treering:
        treering.request("check", arena.kept("treering"))
        jobs = {"treering": treering, "safetensors": arena.entered["safetensors"]}
        runs = {name: from_cache(arena, job, name) for name, job in jobs.items()}
        return [arena.race("restore into NumPy, warm", runs)]


def from_cache(arena: Arena, job: workers.Job, name: str, what: str = "restore") -> Callable[[], float]:
    """A restore of what a contestant keeps, from the page cache."""
    return functools.partial(arena.restore, job, measure.fill_cache, name, what)


def cold(arena: Arena) -> list[Row]:
    """Restores from the disk."""
    if arena.name == "small":
        return []
    runs = {
        name: functools.partial(arena.restore, job, measure.drop_cache, name) for name, job in arena.entered.items()
    }
    return [arena.race("restore, cold", runs)]


OPERATIONS = {"save": save, "stall": stall, "warm": warm, "unverified": unverified, "numpy": into_numpy, "cold": cold}
