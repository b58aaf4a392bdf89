"""Lists a directory of runs: the runs, the checkpoints next to them, and folders with others further below."""

import posixpath
from typing import NamedTuple

from .. import formats
from ..errors import TreeringError
from ..formats.treering import summary
from ..stores.store import Store
from ..stores.whole_files import is_folder
from .listing import OF_THE_SYSTEM, is_run, runs_in


class Folder(NamedTuple):
    """The runs and checkpoints in a directory of runs. `deeper` are folders that are neither, but contain one.

    Folders that this process may not read are among the runs and checkpoints, so that the check names them.
    """

    runs: list[str]
    checkpoints: list[str]
    deeper: list[str]


def look_into(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> Folder | None:
    """Returns the contents of a directory of runs, or None if the path is one run or checkpoint, or missing.

    Weights whose files are in the directory itself are its first checkpoint.

    only: ignores checkpoints of other formats.
    prefix: the beginning of the step names; with it, checkpoints that are not in a run are ignored.
    """
    with store.glance(place):
        if _is_single(store, place, only, prefix):
            return None
        weights = prefix is None and only is None and formats.is_known(store, place)
        runs = runs_in(store, place)
        if not (runs or weights):
            return None
        found = Folder(runs, [place] if weights else [], [])
        if prefix is None:
            _add_others(store, place, only, found)
        return found if runs or len(found.checkpoints) > 1 or found.deeper else None


def _is_single(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> bool:
    if only is not None and formats.accepts(only, store, place):
        return True
    try:
        if summary.look(store, place) or formats.has_folder(store, place):
            return True
        return not is_folder(store, place, links=True) or is_run(store, place, prefix)
    except (TreeringError, PermissionError):  # The check reports the same error.
        return True


def _add_others(store: Store, place: str, only: formats.Format | None, found: Folder) -> None:
    # The files of weights are not checkpoints of their own.
    own = formats.detect(store, place) if found.checkpoints else None
    for name in sorted(store.list(place)):
        path = posixpath.join(place, name)
        if path in found.runs or name == OF_THE_SYSTEM:
            continue
        try:
            folder = is_folder(store, path, links=True)
            if own and not folder and formats.accepts(own, store, path):
                continue
            known = formats.is_known(store, path) if only is None else formats.accepts(only, store, path)
            if known:
                found.checkpoints.append(path)
            if folder and not formats.has_folder(store, path):
                found.deeper.extend(runs_in(store, path) if known else [path] * _has_any(store, path))
        except PermissionError:
            found.checkpoints.append(path)


def _has_any(store: Store, folder: str) -> bool:
    """Returns True if a folder contains a run or a checkpoint."""
    if runs_in(store, folder):
        return True
    return any(formats.is_known(store, posixpath.join(folder, name)) for name in store.list(folder))
