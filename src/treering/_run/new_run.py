"""A directory without steps: checks that a run may begin in it, and finds similar runs in case the path is wrong."""

import itertools
import logging
import posixpath
import re
from collections.abc import Container, Iterator, Mapping

from .. import formats
from .._core.leaf_paths import closest, join_names
from ..errors import MismatchError, TreeringError, UnsupportedError
from ..formats.treering import summary
from ..stores.file_io import is_folder
from ..stores.store import Store
from . import run_layout

_log = logging.getLogger("treering")
_MAX_SEARCHED_FOLDERS = 100  # in a directory that are searched for runs
_NUMBERED_NAME = re.compile(r"((?:.*[^0-9])?)([0-9]{1,16})", re.DOTALL)


def check_can_begin(store: Store, root: str, prefix: str) -> None:
    """Checks a directory without steps. Raises `MismatchError` if it is a file or a checkpoint, and so not a run.

    Raises `UnsupportedError` if there are directories of steps that this process cannot read.
    """
    names = store.list(root)
    for name in names:
        if run_layout.parse_step_name(name, prefix) is not None:
            run_layout.check_step_readable(store, posixpath.join(root, name), UnsupportedError)
    if not names and is_folder(store, root, links=True):  # An empty directory is no checkpoint of any format.
        return
    format = formats.detect(store, root).name if formats.is_known(store, root) else None
    # A folder may hold pretrained weights next to the steps of the run.
    weights = format == "safetensors" or (format == "flax" and is_folder(store, root, links=True))
    if format is not None and not weights:
        if step := describe_step(store, root):
            raise MismatchError(f"{root}: expected a run, found {step}")
        raise MismatchError(
            f"{root}: expected a run, found a checkpoint of the format {format!r}, which is not a step; begin in "
            "another directory, and restore this one with treering.restore where the run begins"
        )
    if store.has_folders and (found := store.stat(root)) and found.is_file:
        raise MismatchError(f"{root}: expected a directory for the run, found a file")


def warn_of_other_runs(store: Store, root: str, *, local: bool = False, has_last_local_tier: bool = False) -> None:
    """Logs similar steps and runs that the caller may mean instead of a directory without steps.

    local: the directory is the local tier of a run.
    has_last_local_tier: the job has the local tier of the job that wrote the run last.
    """
    found = _checkpoints_within(store, root)
    if not local:
        archived = _archived_steps(store, root)
        found += [*archived, *_runs_within(store, root), *_runs_around(store, root)]
        if not (has_last_local_tier or archived) and store.stat(posixpath.join(root, run_layout.GENERATIONS)):
            found.append("it was written from another local= directory, which may have steps that are not uploaded")
    if found:
        _log.warning("%s: starts over, but %s", root, "; ".join(found))


def warn_of_newer_steps(store: Store, root: str, prefix: str, newest: str) -> None:
    """Logs newer steps of other names if a run continues from a step of another library, at the path `newest`.

    `treering.orbax` may have saved them: its steps have the names of Orbax.
    """
    name = posixpath.basename(newest)
    numbered = _NUMBERED_NAME.fullmatch(name)
    if run_layout.parse_step_name(name, prefix) is not None or numbered is None:
        return
    last = int(numbered[2])
    newer = {other: steps for other, steps in numbered_steps(store, root).items() if max(steps)[0] > last}
    if found := _advise_prefixes(newer):
        _log.warning("%s: continues from %s of another library, but %s", root, name, "; ".join(found))


def describe_step(store: Store, path: str) -> str:
    """Returns a message that names the step and the run that a checkpoint is; "" if it is not a step."""
    for place in (path, posixpath.dirname(path)):  # Orbax has a folder for each item of a step
        above = parent(place)
        if above is None:
            break
        numbered = _NUMBERED_NAME.fullmatch(posixpath.basename(place))
        try:
            steps = run_layout.located_steps(store, above, numbered and numbered[1])
        except (TreeringError, OSError) as error:
            _log.info("%s: not searched for the run: %s", above, error)
            continue
        for step, one in steps.items():
            if one.path == place and (one.format is not None or _is_step_name(store, place)):
                return f"step {step} of the run {above}; pass the run"
    return ""


def suggest_run(store: Store, root: str) -> str:
    """Returns the end of a message that lists similar steps and runs, or says what reads a single checkpoint."""
    if formats.is_known(store, root) and (step := describe_step(store, root)):
        return f"; it is {step}"
    if formats.has_folder(store, root):
        return f"; `treering show {root}` reads it"
    above = parent(root)
    if above and summary.stat_manifest(store, above):
        return f"; it belongs to the checkpoint {above}"
    found = [*_checkpoints_within(store, root), *_archived_steps(store, root), *_runs_within(store, root)]
    found = found or _runs_around(store, root) or _runs_within(store, root, levels=2)
    if not found and formats.is_known(store, root):  # a folder with a checkpoint of one file, and perhaps others
        return f"; `treering show {root}` reads it"
    return "".join(f"; {one}" for one in found)


def suggest_path(store: Store, path: str) -> str:
    """Returns the end of a message that names what was probably meant by a path that does not exist."""
    if not store.has_folders:
        return ""
    above, rest = parent(path), [posixpath.basename(path)]
    try:
        while above and store.stat(above) is None:
            above, rest = parent(above), [posixpath.basename(above), *rest]
        if above is None:
            return ""
        if summary.stat_manifest(store, above):
            part = "/".join(rest)
            advice = f"pass at={part!r} (tr.open: .at({part!r}))"
            return f"; {above} is a checkpoint, so {part!r} can only be a part of it; {advice}"
        names, place = sorted(store.list(above)), posixpath.join(above, rest[0])
        if rest[0] in names:
            return f"; {place} is a link to a path where there is nothing" if store.is_link(place) else ""
        similar = closest(rest[0], names)
        if similar is None:
            return ""
        meant = posixpath.join(above, similar, *rest[1:])
        return f"; the closest path is {posixpath.join(above, similar) if store.stat(meant) is None else meant}"
    except (TreeringError, OSError) as error:
        _log.info("%s: not searched for a similar path: %s", path, error)
        return ""


def runs_below(store: Store, root: str, levels: int = 1) -> str:
    """Returns the runs in a directory, for a message; "" if there are none.

    levels: without a run in the directory itself, its folders are searched, so many levels down in all.
    """
    folders = [root]
    for _ in range(levels):
        inner = (path for folder in folders for path in _folders_in(store, folder, may_fail=folder == root))
        folders = list(itertools.islice(inner, _MAX_SEARCHED_FOLDERS))
        if next(inner, None) is not None:
            _log.info("%s: only the first %d directories were searched for runs", root, len(folders))
        if found := tuple(run for path in folders for run in _describe_run(store, path)):
            return join_names(found)
    return ""


def _folders_in(store: Store, folder: str, *, may_fail: bool) -> Iterator[str]:
    """Yields the folders that may be runs. A folder that this process may not read has none, unless `may_fail`."""
    try:
        names = [name for name in store.list(folder) if run_layout.ARCHIVE_NAME.fullmatch(name) is None]
        yield from (path for name in names if is_folder(store, path := posixpath.join(folder, name), links=True))
    except OSError as error:
        if may_fail:
            raise
        _log.info("%s: not searched for runs: %s", folder, error)


def _checkpoints_within(store: Store, root: str) -> list[str]:
    """Returns messages about the checkpoints in a directory that are not steps of the run."""
    own = numbered_steps(store, root)
    found = _advise_prefixes(own)
    committed = {name for steps in own.values() for _, name in steps}
    rest = [name for name in store.list(root) if re.search("[0-9]", name) and name not in committed]
    rest = [name for name in rest if not summary.is_own_file(name)]
    if others := tuple(
        name
        for name in rest
        if run_layout.is_committed(store, root, name) or formats.is_foreign(store, posixpath.join(root, name))
    ):
        found.append(f"there are checkpoints in it that are not steps: {join_names(others)}")
    return found


def numbered_steps(store: Store, root: str) -> dict[str, list[tuple[int, str]]]:
    """Returns the native checkpoints in a directory whose names end with their steps, by the text before these.

    It reads only the newest of each.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(store.list(root)):
        if (numbered := _NUMBERED_NAME.fullmatch(name)) and run_layout.is_committed(store, root, name):
            found.setdefault(numbered[1], []).append((int(numbered[2]), name))
    return {
        prefix: steps
        for prefix, steps in sorted(found.items())
        if _is_step_name(store, posixpath.join(root, max(steps)[1]))
    }


def other_checkpoints(store: Store, root: str, steps: Container[str]) -> list[str]:
    """Returns the names of the native checkpoints in a run besides its steps. Links are left out."""
    names = [name for name in sorted(store.list(root)) if name not in steps and not summary.is_own_file(name)]
    own = [name for name in names if not store.is_link(posixpath.join(root, name))]
    return [name for name in own if run_layout.is_committed(store, root, name)]


def _is_step_name(store: Store, path: str) -> bool:
    """Returns False if the number in the name of a native checkpoint is not that of its step, but a time, for instance.

    A checkpoint that was not saved as a step may have any number, unless there are other numbers before it.
    """
    numbered = _NUMBERED_NAME.fullmatch(posixpath.basename(path))
    if numbered is None:
        return False
    if summary.is_step(store, path, int(numbered[2])):
        return True
    is_other = summary.is_step(store, path, -1) is False  # None if the manifest cannot be read
    return not is_other and not re.search("[0-9]", numbered[1])


def _advise_prefixes(steps: Mapping[str, list[tuple[int, str]]]) -> list[str]:
    return [
        f"{max(found)[1]} is in it; pass prefix={prefix!r} to continue from there" for prefix, found in steps.items()
    ]


def _archived_steps(store: Store, root: str) -> list[str]:
    found = tuple(one for place in run_layout.archived_runs(store, root) for one in _describe_run(store, place))
    return [f"it has archived steps, which `treering cp` brings back: {join_names(found)}"] if found else []


def _runs_within(store: Store, root: str, levels: int = 1) -> list[str]:
    found = runs_below(store, root, levels)
    return [f"it has runs in it: {found}; pass the one that is meant"] if found else []


def _runs_around(store: Store, root: str) -> list[str]:
    above = parent(root)
    found = _describe_run(store, above, only=formats.get("treering")) if above else []
    return [f"it is within the run {one}" for one in found]


def _describe_run(store: Store, path: str, only: formats.Format | None = None) -> list[str]:
    """Returns the run at a path, as messages name it; empty if there are no steps."""
    try:
        steps = run_layout.located_steps(store, path, only=only)
    except MismatchError:  # their names have several prefixes
        return [path]
    except (TreeringError, OSError) as error:
        _log.info("%s: not searched for steps: %s", path, error)
        return []
    return [f"{path} (newest step {max(steps)})"] if steps else []


def parent(path: str) -> str | None:
    """Returns the parent directory of a path; None for the root of a file system or a bucket."""
    found = posixpath.dirname(path)
    is_bucket = "://" in path and found.endswith(":")
    return None if is_bucket or found == path or not found else found
