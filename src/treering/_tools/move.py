"""Moves steps of a run to another run: copies a step, reads the copy back, and only then deletes the step."""

import os
import posixpath
from collections.abc import Callable, Iterable

from .. import stores
from .._run import external_writes
from .._run import run_layout as _run
from .._run.plain_run import PlainRun
from ..errors import CorruptError, ExistsError, MismatchError
from ..formats.treering import metrics, summary
from ..stores.store import Store
from .copy import CheckpointCopy, check_target, copy_checkpoints
from .verify import verify


def check_target_run(run: PlainRun, paths: Iterable[str], to: str) -> None:
    """Checks the target of a move before anything is moved.

    Raises `MismatchError` for a target within the run itself or with another prefix of step names. Raises
    `ExistsError` if the target is neither missing nor a run, if a job writes it, and if it has another step of the
    same number.
    """
    source_store, target_store, prefix = run.steps.store, stores.get(to), run.steps.prefix
    if source_store is target_store and f"{target_store.real_path(to)}/".startswith(
        f"{source_store.real_path(run.root)}/"
    ):
        raise MismatchError(f"{to}: expected a place outside the run {run.root}, found one inside it")
    check_target(target_store, to, prefix)
    external_writes.check_no_writer(target_store, to)
    names = _run.own_steps(target_store, to, prefix)
    for path in paths:
        name = posixpath.basename(path)
        step = _run.parse_step_name(name, prefix)
        found = names.get(step) if step is not None else None
        if found and not (found == name and _is_same(source_store, path, target_store, posixpath.join(to, found))):
            copy_path = posixpath.join(to, found)
            raise ExistsError(
                f"{copy_path}: expected a copy of {path} or nothing, found another checkpoint or a damaged one; choose "
                "another place"
            )
        if found:
            _check_distinct(source_store, path, target_store, posixpath.join(to, found))


def copy_verified(path: str, to: str) -> Callable[[], None]:
    """Copies a step into another run, and reads the copy back.

    Returns a function to call just before the step is deleted. It adds to the copy the metrics and pins that the step
    received since. It raises `MismatchError` if the copy is the step itself, is gone, or lacks metrics of the step.

    Raises `CorruptError` if the step or its copy is damaged, `ExistsError` if the target has another step of its name,
    and `MismatchError` if the step was replaced meanwhile.
    """
    source_store, target_store = stores.get(path), stores.get(to)
    target = posixpath.join(to, posixpath.basename(path))
    # A copy with the same manifest may have damaged files, which `overwrite` repairs.
    copy_checkpoints(path, target, overwrite=_is_same(source_store, path, target_store, target))
    if not (report := verify(target, format="treering")).ok:
        raise CorruptError(f"{target}: expected a copy of {path}, found it damaged: {report.problems[0]}")
    if not _is_same(source_store, path, target_store, target):
        raise MismatchError(f"{path}: was replaced while it was copied to {target}; start again")
    known = summary.identity_or_none(target_store, target)

    def check() -> None:
        CheckpointCopy(source_store, path, target_store, target).complete()
        _check_distinct(source_store, path, target_store, target)
        if known is None or summary.identity_or_none(target_store, target) != known:
            raise MismatchError(f"{target}: expected the copy of {path}, found it gone or replaced; the step stays")
        if {*metrics.names(source_store, path, known)} - {*metrics.names(target_store, target, known)}:
            raise MismatchError(f"{path}: metrics were recorded while it was moved to {target}; start again")

    return check


def _check_distinct(source_store: Store, path: str, target_store: Store, copy_path: str) -> None:
    """Raises `MismatchError` if two paths lead to one folder, for instance through two mounts: it is not a copy."""
    on_disks = isinstance(source_store, stores.Filesystem) and isinstance(target_store, stores.Filesystem)
    if on_disks and os.path.samestat(os.stat(path), os.stat(copy_path)):
        raise MismatchError(f"{copy_path}: expected a copy of {path}, found the same folder, which is mounted twice")


def _is_same(source_store: Store, path: str, target_store: Store, copy_path: str) -> bool:
    return summary.identity(source_store, path) == summary.identity_or_none(target_store, copy_path)
