"""Lists a directory of runs or checkpoints: both, and folders with others further below."""

import posixpath
from typing import NamedTuple

from .. import formats
from ..errors import TreeringError
from ..formats.treering import summary
from ..stores.file_io import is_folder
from ..stores.store import Store
from .listing import SYSTEM_FOLDER, is_run, runs_in


class RunsFolder(NamedTuple):
    """The runs and checkpoints in a directory of runs. `folders_below` are folders that are neither, but contain one.

    Folders that this process may not read are among the runs and checkpoints, so that the check names them.
    """

    runs: list[str]
    checkpoints: list[str]
    folders_below: list[str]


def scan_runs_folder(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> RunsFolder | None:
    """Returns the contents of a directory of runs or checkpoints, or None if it has neither or is one itself.

    Weights whose files are in the directory itself are its first checkpoint.

    only: ignores checkpoints of other formats.
    prefix: the beginning of the step names; with it, checkpoints that are not in a run are ignored.
    """
    with store.glance(place):
        if _is_single(store, place, only, prefix):
            return None
        # Formats of folders have refused it already.
        weights = prefix is None and only is None and formats.has_single_file(store, place)
        found = RunsFolder(runs_in(store, place), [place] if weights else [], [])
        if prefix is None:
            _add_checkpoints(store, place, only, found)
        others = found.checkpoints != [place] or found.folders_below
        return found if found.runs or (found.checkpoints and others) else None


def _is_single(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> bool:
    if only is not None and formats.accepts(only, store, place):
        return True
    try:
        if summary.stat_manifest(store, place) or formats.has_folder(store, place):
            return True
        return not is_folder(store, place, links=True) or is_run(store, place, prefix)
    except (TreeringError, PermissionError):  # The check reports the same error.
        return True


def _add_checkpoints(store: Store, place: str, only: formats.Format | None, found: RunsFolder) -> None:
    # The files of weights are not checkpoints of their own.
    own = formats.detect(store, place) if found.checkpoints else None
    for name in sorted(store.list(place)):
        path = posixpath.join(place, name)
        if path in found.runs or name == SYSTEM_FOLDER:
            continue
        try:
            folder = is_folder(store, path, links=True)
            if own and not folder and formats.accepts(own, store, path):
                continue
            known = formats.is_known(store, path) if only is None else formats.accepts(only, store, path)
            if known:
                found.checkpoints.append(path)
            if folder and not formats.has_folder(store, path):
                found.folders_below.extend(
                    runs_in(store, path) if known else [path] * _has_run_or_checkpoint(store, path)
                )
        except PermissionError:
            found.checkpoints.append(path)


def _has_run_or_checkpoint(store: Store, folder: str) -> bool:
    """Returns True if a folder contains a run or a checkpoint."""
    if runs_in(store, folder):
        return True
    return any(formats.is_known(store, posixpath.join(folder, name)) for name in store.list(folder))
