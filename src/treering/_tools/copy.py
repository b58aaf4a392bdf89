"""Copies of checkpoints and runs in other places, byte for byte."""

import dataclasses
import logging
import os

from .. import formats, stores
from .._run import run as _run
from .._run.latest_good import check_known
from ..errors import CorruptError, ExistsError, UnsupportedError
from ..formats.treering import copy, summary
from ..stores.store import Store

_log = logging.getLogger("treering")


@dataclasses.dataclass
class Copied:
    """The paths that were copied, those that were there already, damaged ones, and the bytes that were moved."""

    copied: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    damaged: list[str] = dataclasses.field(default_factory=list)
    nbytes: int = 0


def copy_all(source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False) -> Copied:
    """Copies a checkpoint of the native format, or all steps of a run that the target lacks, the newest first.

    With `overwrite`, steps that are there and differ are replaced; without, they raise `ExistsError` before anything
    is copied. Damaged steps are logged and not copied. Raises `UnsupportedError` for other libraries' checkpoints.
    """
    path, to = stores.absolute(source), stores.absolute(target)
    here, there = stores.of(path), stores.of(to)
    done = Copied()

    def one(path: str, to: str, overwrite: bool) -> None:
        copy.copy(here, path, there, to, overwrite=overwrite, moved=_adding(done))
        done.copied.append(to)

    if summary.look(here, path):
        one(path, to, overwrite)
        return done
    names = _run.committed(here, path)
    if others := formats.foreign_steps(here, path, set(names.values())):
        raise UnsupportedError(f"{next(iter(others.values()))}: written by another library; convert it instead")
    if not names:
        check_known(here, path)
        raise UnsupportedError(f"{path}: written by another library; convert it instead")
    same = {name: _same(here, os.path.join(path, name), there, os.path.join(to, name)) for name in names.values()}
    if differing := [name for name, is_same in same.items() if is_same is False and not overwrite]:
        raise ExistsError(
            f"{os.path.join(to, differing[0])}: another checkpoint is there; pass overwrite to replace it"
        )
    for name in reversed(list(names.values())):
        if same[name]:
            done.left_out.append(os.path.join(to, name))
            continue
        try:
            one(os.path.join(path, name), os.path.join(to, name), overwrite)
        except CorruptError as error:
            _log.error("not copied: %s", error)
            done.damaged.append(os.path.join(path, name))
    if not done.copied and not done.left_out:
        raise CorruptError(f"{path}: nothing was copied, for all steps are damaged")
    return done


def _adding(done: Copied):
    def moved(nbytes: int) -> None:
        done.nbytes += nbytes

    return moved


def _same(here: Store, path: str, there: Store, to: str) -> bool | None:
    """Whether the same checkpoint lies at both paths; None when there is none at the second."""
    if summary.look(there, to) is None:
        return None
    try:
        return summary.identity(here, path) == summary.identity(there, to)
    except (CorruptError, FileNotFoundError):
        return False
