"""Metrics: named real numbers that say how good a checkpoint is."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from .. import formats, stores
from .._core.entries import step_number
from .._core.paths import absolute
from .._core.tracebacks import at_the_caller
from .._save.metrics import encoded
from ..errors import NotFoundError, SaveError, UnsupportedError
from ..formats.treering import manifest, metrics
from ..stores.local import MANIFEST
from ..stores.on_disk import read_file
from ..stores.posix import Disk
from ..stores.reading import reading
from . import run as _run

_log = logging.getLogger("treering")


@at_the_caller
def record(run: str | os.PathLike[str], step: int, metrics: Mapping[str, Any]) -> None:
    """Adds metrics to a step that is saved already, durably; of those with one name the last counts.

    >>> tr.record("runs/gpt", 1000, {"val/loss": 0.5})

    Any job may do so, an evaluator beside the one that trains, whose `keep.best` and `best_step` then know them.
    Raises `NotFoundError` when there is no such step (any more), `MismatchError` for what is no real scalar,
    `UnsupportedError` for a step that another library wrote; `SaveError` when writing fails.
    """

    place, number, numbers = absolute(run), step_number(step), encoded(metrics)
    path = _run.all_steps(place).get(number)
    if path is None:
        raise NotFoundError(f"{place}: expected step {number}, found none; was it deleted meanwhile?")
    _write(path, number, numbers)


def _write(path: str, step: int, numbers: Mapping[str, float | str]) -> None:
    with reading(path):
        there = stores.DISK.stat(os.path.join(path, MANIFEST))
    if not there and formats.is_known(stores.DISK, path):
        raise UnsupportedError(f"{path}: step {step} was written by another library; metrics are not added to it")
    try:
        data = read_file(stores.DISK, os.path.join(path, MANIFEST))
        manifest.check(data, path)
        manifest.check_envelope(data, path)
        metrics.write(stores.DISK, path, manifest.xxh3(data), numbers)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: expected step {step}, but it was deleted meanwhile") from None
    except OSError as error:
        raise SaveError(f"{path}: the metrics cannot be added: {error}") from error


def recorded(disk: Disk, path: str, identity: str) -> dict[str, float]:
    """What was added to a checkpoint. A damaged file is logged, and does not count.

    Raises `UnsupportedError` for what a later release added, by which nothing can be judged.
    """
    found: dict[str, float] = {}
    for _, content in metrics.read(disk, path, identity):
        if isinstance(content, dict):
            found.update(content)
        elif isinstance(content, UnsupportedError):
            raise content
        else:
            _log.warning("metrics that were recorded do not count: %s", content)
    return found
