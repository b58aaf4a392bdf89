"""Checks every byte of the checkpoints at a path, and names what it could not read."""

import dataclasses
import errno
import logging
import operator
import os
import posixpath
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from .. import formats, stores
from .._core.source import EVERYTHING, Problem, Share, Source, check_not_left_out, has_checksums
from .._run import run_layout
from .._run.step_fallback import check_exists, check_format, detect_or_explain
from ..errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import summary
from ..stores.nfs import refresh_dir_cache
from ..stores.read_errors import READ_ATTEMPTS, ReplacedError, UnreadableError, raise_if_momentary, reading
from ..stores.store import Store

_log = logging.getLogger("treering")
_MAX_DELETION_SECONDS = 2.0  # A step that is being deleted is unrecognizable for at most this long before it is gone.
_GONE_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class CheckTargets(NamedTuple):
    """The paths to check with their formats, and unreadable paths. A format of None is recognized on opening.

    `archived` are the directories of archived steps; their steps are among the paths. `unfinished` are the paths of
    steps without a manifest, whose save or copy is not complete.
    """

    formats: dict[str, str | None]
    closed: dict[str, PermissionError]
    archived: list[str]
    unfinished: list[str]


def find_check_targets(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> CheckTargets:
    """Returns the checkpoint itself, or the steps of a run, its archived steps and the checkpoints next to them.

    only: ignores other formats.
    prefix: the beginning of the step names.
    """
    with store.glance(place):
        single = summary.stat_manifest(store, place) is not None
        found = CheckTargets({}, {}, [], []) if single else _steps(store, place, only, prefix)
        if not (found.formats or found.closed):
            if prefix is not None:
                raise NotFoundError(f"{place}: expected a run with steps whose names begin with {prefix!r}, found none")
            return CheckTargets({place: None if only is None else check_exists(store, place, only).name}, {}, [], [])
        # The folder of a run may also have the weights that the run began with.
        weights = formats.is_known(store, place) if only is None else formats.accepts(only, store, place)
    given = None if only is None else only.name
    return found._replace(formats={place: given, **found.formats}) if weights else found


def _steps(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> CheckTargets:
    native, foreign = only is None or only.name == "treering", only is None or only.name != "treering"
    names = [name for _, name in run_layout.list_step_names(store, place, prefix)] if native else []
    found: dict[str, str | None] = {posixpath.join(place, name): "treering" for name in names}
    if foreign:
        others = set(formats.foreign_steps(store, place, set(names), only).values())
        known = {posixpath.basename(one.path) for one in others}.union(names)
        # A run ignores a damaged step if it has a valid one of the same number, but it is still damage.
        rest = [name for name in store.list(place) if name not in known]
        others.update(one for _, one in formats.damaged_steps(store, place, rest, only))
        found.update({one.path: one.format for one in sorted(others, key=lambda one: one.path)})
    if native and found and prefix is None:
        found.update(dict.fromkeys(_neighbors(store, place, found), "treering"))
    closed = dict(unreadable_steps(store, place, found))
    archived: list[str] = []
    unfinished: list[str] = []
    if native and found:
        known = {posixpath.basename(path) for path in found}
        names = unfinished_steps(store, place, prefix, known)
        unfinished += [path for name in names if (path := posixpath.join(place, name)) not in closed]
    for folder in run_layout.archived_runs(store, place):
        if folder in closed:
            continue
        try:
            below = _steps(store, folder, only, None)
        except PermissionError as error:
            closed[folder] = error
            continue
        archived += [folder, *below.archived] if below.formats or below.closed else []
        found.update(below.formats)
        closed.update(below.closed)
        unfinished += below.unfinished
    return CheckTargets(found, closed, archived, unfinished)


def unfinished_steps(store: Store, run: str, prefix: str | None, known: Collection[str]) -> list[str]:
    """Returns the names in a run that are those of steps, without the `known` steps."""
    prefix = run_layout.find_prefix(store, run) if prefix is None else prefix
    names = [name for name in sorted(store.list(run)) if name not in known]
    return [name for name in names if run_layout.parse_step_name(name, prefix) is not None]


def _neighbors(store: Store, place: str, steps: Collection[str]) -> Iterator[str]:
    """Yields the native checkpoints next to the steps of a run, such as ``best``. Skips links to steps."""
    linked = {link for names in run_layout.find_links(store, place).values() for link in names}
    for name in sorted(store.list(place)):
        path = posixpath.join(place, name)
        if path in steps or name in linked:
            continue
        try:
            with reading(path):
                is_there = summary.stat_manifest(store, path) is not None
        except PermissionError:  # `unreadable_steps` names it if it may be a step.
            continue
        except UnreadableError:
            is_there = True  # The check reports it as damage.
        if is_there:
            yield path


def unreadable_steps(store: Store, place: str, known: Collection[str]) -> Iterator[tuple[str, PermissionError]]:
    """Yields unreadable paths that may be steps or contain steps: those with a digit, as every step name has one.

    known: the paths of steps that were read.
    """
    for name in store.list(place):
        path = posixpath.join(place, name)
        if path in known or not any(letter.isdigit() for letter in name):
            continue
        try:
            with reading(path):
                summary.stat_manifest(store, path)
                formats.check_open(store, place, name)
        except PermissionError as error:
            yield path, error
        except UnreadableError:  # The check reports it as damage.
            continue


@dataclasses.dataclass
class CheckResult:
    """The result of `check`: the damage, and what was not read. `targets` checkpoints with `nbytes` bytes were read.

    `unsupported` and `closed` say why some checkpoints cannot be checked. `deleted` are the paths of checkpoints that
    were deleted meanwhile. `passed_over` is the number of checkpoints that were committed before `since`. `archived`
    are directories of archived steps; their steps are among the parts. `unfinished` are steps without a manifest.
    `without_checksums` are the paths of checkpoints that were only read and decoded; "." is the place itself.
    """

    path: str
    nbytes: int = 0
    problems: list[Problem] = dataclasses.field(default_factory=list)
    checkpoints: int = 0
    unsupported: list[TreeringError] = dataclasses.field(default_factory=list)
    closed: list[PermissionError] = dataclasses.field(default_factory=list)
    deleted: list[str] = dataclasses.field(default_factory=list)
    passed_over: int = 0
    archived: list[str] = dataclasses.field(default_factory=list)
    unfinished: list[str] = dataclasses.field(default_factory=list)
    without_checksums: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every requested byte was read, and no damage was found."""
        return not self.problems and not self.unsupported and not self.closed


def check(
    path: str | os.PathLike[str],
    subset: tuple[int, int] | None,
    format: str | None = None,
    *,
    prefix: str | None = None,
    since: float | None = None,
) -> CheckResult:
    """Checks every byte of a checkpoint, or of a run's steps, and says what was not read.

    prefix: the beginning of the names of a run's steps.
    since: skips checkpoints that were committed before this time, in seconds since the epoch. If a format has no time
        of the commit, the time of the file or directory is used.
    """
    place = stores.absolute(path)
    share = _share_of(subset)
    only = None if format is None else formats.get(format)
    try:
        with reading(place):
            return _check_all(place, share, only, prefix, since)
    except UnreadableError as error:
        return CheckResult(place, problems=[Problem(place, (), None, str(error))])


def _share_of(subset: tuple[int, int] | None) -> Share:
    if subset is None:
        return EVERYTHING
    wrong = f"subset={subset!r}: expected two numbers, such as (2, 5) for the second of five parts"
    try:
        number, count = (operator.index(n) for n in subset)
    except (TypeError, ValueError):
        raise MismatchError(wrong) from None
    if not 1 <= number <= count:
        raise MismatchError(wrong)
    return Share(number, count)


def _check_all(
    place: str, share: Share, only: formats.Format | None, prefix: str | None, since: float | None
) -> CheckResult:
    store = stores.get(place)
    targets = find_check_targets(store, place, only, prefix)
    archived = [posixpath.relpath(one, place) for one in targets.archived]
    unfinished = [posixpath.relpath(one, place) for one in targets.unfinished]
    done = CheckResult(place, closed=list(targets.closed.values()), archived=archived, unfinished=unfinished)
    last: list[Source] = []  # While it is open, the next one does not check it again if it is made from it.
    for target, format in targets.formats.items():
        below = "" if target == place else posixpath.relpath(target, place)
        try:
            nbytes = _check_one(store, target, format, below, done, share, since, last)
        except NotFoundError as error:
            if target == place:
                raise
            if _is_deleted(store, target, native=format == "treering"):
                _log.info("%s: deleted meanwhile, and not checked", target)
                done.deleted.append(below)
                continue
            done.problems.append(Problem(below, (), None, str(error)))
            nbytes = 0
        except UnsupportedError as error:
            done.unsupported.append(error)
            continue
        except PermissionError as error:
            done.closed.append(error)
            continue
        if nbytes is None:
            done.passed_over += 1
        else:
            done.checkpoints += 1
            done.nbytes += nbytes
    if done.deleted and len(done.deleted) == len(targets.formats) + len(targets.closed):
        raise NotFoundError(f"{place}: expected steps to check, found none; all were deleted meanwhile")
    return done


def _is_deleted(store: Store, step: str, *, native: bool) -> bool:
    """Returns True if a step that was listed is gone, or is going.

    Treering deletes the manifest of a step first, so a native step without one is being deleted. A step of another
    library is only known to be deleted when its directory is gone, which may take a moment.
    """
    end = time.monotonic() + _MAX_DELETION_SECONDS
    while True:
        with reading(step):
            if store.stat(step) is None or (native and summary.stat_manifest(store, step) is None):
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def _check_one(
    store: Store,
    path: str,
    known: str | None,
    below: str,
    done: CheckResult,
    share: Share,
    since: float | None,
    last: list[Source],
) -> int | None:
    """Adds the damage to `done` and returns about how many bytes were read, or None if the commit is before `since`.

    last: the open checkpoint before this one, which this one replaces there.

    Raises `UnsupportedError` and `PermissionError` only after it has read the rest.
    """
    for _ in range(READ_ATTEMPTS):
        file = path
        try:
            with reading(path), store.glance(path):
                format = detect_or_explain(store, path) if known is None else formats.get(known)
                file = summary.manifest_path(below) if format.name == "treering" else path
                reader = format.open(store, path)
            check_not_left_out(reader)
        except ReplacedError:
            continue
        except CorruptError as error:
            done.problems.append(Problem(file, (), None, str(error)))
            return 0
        except OSError as error:
            if isinstance(error, TreeringError):
                raise
            if error.errno not in _GONE_ERRORS:
                raise
            if known == "treering" and summary.stat_manifest(store, path) is None:
                raise NotFoundError(f"{path}: expected a checkpoint, found nothing") from None
            if known != "treering":
                check_format(store, path, known)
            continue  # It was deleted after it was recognized.
        if since is not None and _committed_at(store, path, reader) < since:
            return None
        problems: list[Problem] = []
        unchecked_error: UnsupportedError | PermissionError | None = None
        try:
            problems.extend(
                problem._replace(file=posixpath.join(below, problem.file)) for problem in _problems(reader, share)
            )
        except ReplacedError:
            continue
        except (UnsupportedError, PermissionError) as error:
            unchecked_error = error
        # Missing files are no damage if the checkpoint was replaced while it was read: then it is read again.
        if not problems or format.name != "treering" or _is_current(store, path, reader.identity):
            done.problems.extend(problems)
            last[:] = [reader]
            if not has_checksums(reader):
                done.without_checksums.append(below or ".")
            if unchecked_error:
                raise unchecked_error
            begin, end = share.of(reader.nbytes)
            return end - begin
    if not below:
        check_format(store, path, known)
    raise ReplacedError(
        f"{path}: expected a checkpoint that stays during its check, found it replaced {READ_ATTEMPTS} times; "
        "check it when no job writes it"
    )


def _committed_at(store: Store, path: str, reader: Source) -> float:
    """Returns the time of a commit in seconds since the epoch, from the format or else from the store."""
    if reader.created is not None:
        return reader.created.timestamp()
    found = store.stat(path)
    return found.modified if found else time.time()


def _problems(reader: Source, share: Share) -> Iterator[Problem]:
    """Yields all damage. Passes no share for a full check, because formats of other packages need not support it."""
    return reader.problems() if share == EVERYTHING else reader.problems(share)


def _is_current(store: Store, path: str, identity: str) -> bool:
    """Returns True if the checkpoint at a path is still the one that was opened: then missing files are damage.

    Another host may have replaced it. Raises `ReplacedError` if it was deleted.
    """
    refresh_dir_cache(store, path)
    try:
        return summary.identity(store, path) == identity
    except (CorruptError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _GONE_ERRORS:
            raise ReplacedError(f"{path}: was deleted during its check") from None
        raise_if_momentary(error)
        return True
