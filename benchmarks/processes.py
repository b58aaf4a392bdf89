"""Four processes with two devices each, beside one process with the same eight devices and the same bytes."""

import dataclasses
import os

from . import contestants, operations, workers
from .table import Row

_PROCESSES = 4
_STATE = "processes"


def rows(directory: str, repeats: int) -> list[Row]:
    place = os.path.join(directory, _STATE)
    with (
        operations.enter("sharded", contestants.WITH_SHARDINGS, place, repeats, count=_PROCESSES) as arena,
        workers.job("treering", "sharded") as one,
    ):
        one.tell("save", arena.kept("one"))
        one.tell("check", arena.kept("one"))
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
    return [dataclasses.replace(row, state=_STATE) for row in found]
