"""Copies of checkpoints and runs in other places, byte for byte."""

import dataclasses
import logging
import os
import posixpath
from collections.abc import Callable

from .. import formats, stores
from .._core.leaf_paths import few
from .._run import run as _run
from .._run.latest_good import check_known
from ..errors import CorruptError, ExistsError, MismatchError, UnsupportedError
from ..formats.treering import copy, metrics, pins, removal, summary
from ..formats.treering.read import Reader
from ..stores.store import Store

_log = logging.getLogger("treering")


@dataclasses.dataclass
class Copied:
    """The paths that were copied, those that were there already, those left behind, and the bytes that were moved."""

    copied: list[str] = dataclasses.field(default_factory=list)
    there: list[str] = dataclasses.field(default_factory=list)
    left_behind: list[str] = dataclasses.field(default_factory=list)
    nbytes: int = 0

    def _moved(self, nbytes: int) -> None:
        self.nbytes += nbytes


def copy_all(source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False) -> Copied:
    """Copies a checkpoint of the native format, or all steps of a run that the target lacks, the newest first.

    To those that are there, pins and recorded metrics are added. With `overwrite`, steps that are there and differ, or
    are damaged there, are replaced; without, those that differ raise `ExistsError` before anything is copied. Damaged
    steps, and those of a later release, are logged and left behind.

    Raises `UnsupportedError` for other libraries' checkpoints, `MismatchError` for a target that is the source, or a
    run with other names of its steps.
    """
    path, to = stores.absolute(source), stores.absolute(target)
    here, there = stores.of(path), stores.of(to)
    if here is there and here.real_path(path) == there.real_path(to):
        raise MismatchError(f"{to}: expected another place than that of the source")
    single = summary.look(here, path) is not None
    if single:
        pairs = {path: to}
    else:
        pairs = {posixpath.join(path, name): posixpath.join(to, name) for name in _names(here, path).values()}
        _check_target(there, to, _run.prefix_of(here, path))
    same = {one: _is_same(here, one, there, other, thorough=overwrite) for one, other in pairs.items()}
    if not overwrite and (differing := [pairs[one] for one, is_same in same.items() if is_same is False]):
        raise ExistsError(f"{differing[0]}: another checkpoint is there, or a damaged one; overwrite=True replaces it")
    done = Copied()
    for one, other in reversed(pairs.items()):
        try:
            if same[one]:
                metrics.copy(here, one, there, other, summary.identity(here, one))
                if pins.pinned(here, one):
                    pins.pin(there, other, True)
                done.there.append(other)
            else:
                _copy(here, one, there, other, done._moved, absent=same[one] is None)
                done.copied.append(other)
        except (CorruptError, UnsupportedError) as error:
            if single:
                raise
            _log.error("not copied: %s", error)
            done.left_behind.append(one)
    if aside := _run.aside(here, path):
        _log.warning("%s: steps that were set aside are not copied: %s", path, few(tuple(aside)))
    return done


def _copy(here: Store, path: str, there: Store, to: str, moved: Callable[[int], None], *, absent: bool) -> None:
    """Copies a checkpoint, in the place of another or of a damaged copy of it, unless nothing was there."""
    replaced = summary.look(there, to) is not None
    if replaced and absent:
        raise ExistsError(f"{to}: another writer put a checkpoint there meanwhile; it is untouched")
    if replaced and _identity(there, to) == _identity(here, path):  # whose files have the names of the copy's
        if problem := next(Reader(here, path).problems(), None):  # what is there may be better
            raise CorruptError(str(problem))
        removal.delete(there, to)
        replaced = False
    copy.copy(here, path, there, to, overwrite=replaced, moved=moved)


def _identity(store: Store, path: str) -> str | None:
    try:
        return summary.identity(store, path)
    except (CorruptError, FileNotFoundError):
        return None


def _names(store: Store, path: str) -> dict[int, str]:
    """The steps of a run, all of the native format, and the names of their directories."""
    names = _run.committed(store, path)
    foreign = "written by another library; convert it instead"
    if others := formats.foreign_steps(store, path, set(names.values())):
        raise UnsupportedError(f"{next(iter(others.values())).path}: {foreign}")
    if not names:
        check_known(store, path)
        raise UnsupportedError(f"{path}: {foreign}")
    return names


def _check_target(store: Store, to: str, prefix: str) -> None:
    """Checks where a run is to be copied to: it is a run with the same names of steps, or there is nothing."""
    if formats.has_folder(store, to):
        raise ExistsError(f"{to}: expected a run, or nothing, found one checkpoint")
    if _run.directories(store, to) and (found := _run.prefix_of(store, to)) != prefix:
        raise MismatchError(
            f"{to}: expected names of steps that begin with {prefix!r}, as in the source, found {found!r}"
        )


def _is_same(here: Store, path: str, there: Store, to: str, *, thorough: bool) -> bool | None:
    """Whether the same checkpoint lies at both paths, undamaged at the second as far as is looked at; None for none."""
    if summary.look(there, to) is None:
        return None
    try:
        if summary.identity(here, path) != summary.identity(there, to):
            return False
        reader = Reader(there, to)
        reader.check_present()
        return not (thorough and any(reader.problems()))
    except (CorruptError, UnsupportedError, FileNotFoundError):
        return False
