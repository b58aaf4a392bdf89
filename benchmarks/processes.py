"""Compares four processes with two devices each to one process with the same eight devices and the same bytes."""

import dataclasses
import os
import shutil

from . import contestants, measure, operations, workers
from .table import Row

_PROCESSES = 4
_STATE = "processes"


def rows(directory: str, repeats: int) -> list[Row]:
    place = os.path.join(directory, _STATE)
    with (
        operations.enter("sharded", contestants.WITH_SHARDINGS, place, repeats, count=_PROCESSES) as arena,
        workers.job("treering", "sharded") as one,
    ):
        one.request("save", arena.kept("one"))
        one.request("check", arena.kept("one"))
        saved, *_ = operations.save(dataclasses.replace(arena, entered={**arena.entered, "one": one}))
        share = saved.values.pop("one") / saved.values["treering"]
        found = [
            saved,
            Row("durable save, speed of 4 processes ÷ of 1", _STATE, "", {"treering": share}),
            arena.race(
                "restore, warm",
                {name: operations.from_cache(arena, arena.entered[name], name) for name in contestants.WITH_SHARDINGS},
            ),
            *operations.cold(arena),
        ]
    return [dataclasses.replace(row, state=_STATE) for row in (*found, *_per_host_storage(place, repeats))]


def _per_host_storage(place: str, repeats: int) -> list[Row]:
    """Saves on a local disk of each process, which are one here, and copies from there."""
    times: list[tuple[float, float, float]] = []
    with workers.job("treering on own disks", "sharded", count=_PROCESSES) as job:
        for n in range(repeats):
            path = os.path.join(place, str(n))
            job.request("begin", path)
            os.sync()
            stall = job.request("save", path)
            local = stall + job.request("wait", path)
            times.append((stall, local, local + job.request("close", path)))
    shutil.rmtree(place)
    names = ("stall of a save on own disks", "durable save on own disks", "until that is copied")
    return [
        Row(operation, _STATE, "ms" if operation.startswith("stall") else "s", {"treering": measure.Median.of(rounds)})
        for operation, rounds in zip(names, zip(*times, strict=True), strict=True)
    ]
