"""Moves steps of a run to another run: copies a step, reads the copy back, and only then deletes the step."""

import os
import posixpath
from collections.abc import Callable, Iterable

from .. import stores
from .._run import incoming
from .._run import run as _run
from .._run.directory import Directory
from ..errors import CorruptError, ExistsError, MismatchError
from ..formats.treering import metrics, summary
from ..stores.store import Store
from .copy import check_target, copy_all
from .one_copy import OneCopy
from .verify import verify


def check_place(run: Directory, paths: Iterable[str], to: str) -> None:
    """Checks the target of a move before anything is moved.

    Raises `MismatchError` for a target within the run itself or with another prefix of step names. Raises
    `ExistsError` if the target is neither missing nor a run, if a job writes it, and if it has another step of the
    same number.
    """
    here, there, prefix = run.steps.store, stores.of(to), run.steps.prefix
    if here is there and f"{there.real_path(to)}/".startswith(f"{here.real_path(run.root)}/"):
        raise MismatchError(f"{to}: expected a place outside the run {run.root}, found one inside it")
    if (found := there.stat(to)) and not found.is_folder:
        raise ExistsError(f"{to}: expected a run, or nothing, found a file")
    check_target(there, to, prefix)
    incoming.check(there, to)
    names = _run.committed(there, to, prefix)
    for path in paths:
        name = posixpath.basename(path)
        step = _run.parse(name, prefix)
        found = names.get(step) if step is not None else None
        if found and not (found == name and _is_same(here, path, there, posixpath.join(to, found))):
            other = posixpath.join(to, found)
            raise ExistsError(
                f"{other}: expected a copy of {path} or nothing, found another checkpoint or a damaged one; choose "
                "another place"
            )
        if found:
            _check_distinct(here, path, there, posixpath.join(to, found))


def copy_verified(path: str, to: str) -> Callable[[], None]:
    """Copies a step into another run, and reads the copy back.

    Returns a function to call just before the step is deleted. It adds to the copy the metrics and pins that the step
    received since. It raises `MismatchError` if the copy is the step itself, is gone, or lacks metrics of the step.

    Raises `CorruptError` if the step or its copy is damaged, `ExistsError` if the target has another step of its name,
    and `MismatchError` if the step was replaced meanwhile.
    """
    here, there = stores.of(path), stores.of(to)
    target = posixpath.join(to, posixpath.basename(path))
    # A copy with the same manifest may have damaged files, which `overwrite` repairs.
    copy_all(path, target, overwrite=_is_same(here, path, there, target))
    if not (report := verify(target, format="treering")).ok:
        raise CorruptError(f"{target}: expected a copy of {path}, found it damaged: {report.problems[0]}")
    if not _is_same(here, path, there, target):
        raise MismatchError(f"{path}: was replaced while it was copied to {target}; start again")
    known = summary.known_identity(there, target)

    def check() -> None:
        OneCopy(here, path, there, target).complete()
        _check_distinct(here, path, there, target)
        if known is None or summary.known_identity(there, target) != known:
            raise MismatchError(f"{target}: expected the copy of {path}, found it gone or replaced; the step stays")
        if {*metrics.names(here, path, known)} - {*metrics.names(there, target, known)}:
            raise MismatchError(f"{path}: metrics were recorded while it was moved to {target}; start again")

    return check


def _check_distinct(here: Store, path: str, there: Store, other: str) -> None:
    """Raises `MismatchError` if two paths lead to one folder, for instance through two mounts: it is not a copy."""
    on_disks = isinstance(here, stores.Filesystem) and isinstance(there, stores.Filesystem)
    if on_disks and os.path.samestat(os.stat(path), os.stat(other)):
        raise MismatchError(f"{other}: expected a copy of {path}, found the same folder, which is mounted twice")


def _is_same(here: Store, path: str, there: Store, other: str) -> bool:
    return summary.identity(here, path) == summary.known_identity(there, other)
