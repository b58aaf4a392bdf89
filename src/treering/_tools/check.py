"""Checks every byte of the checkpoints at a path, and names what it could not read."""

import dataclasses
import errno
import logging
import operator
import os
import posixpath
import time
from collections.abc import Iterator

from .. import formats, stores
from .._core.source import EVERYTHING, Problem, Share, Source
from .._core.subtree import check_not_left_out
from .._run.step_fallback import check_format, detect_or_explain
from ..errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import summary
from ..stores.nfs import refresh_dir_cache
from ..stores.read_errors import READ_ATTEMPTS, ReplacedError, UnreadableError, raise_if_momentary, reading
from ..stores.store import Store
from .check_targets import find_check_targets

_log = logging.getLogger("treering")
_MAX_DELETION_SECONDS = 2.0  # A step that is being deleted is unrecognizable for at most this long before it is gone.
_GONE_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


@dataclasses.dataclass
class CheckResult:
    """The result of `check`: the damage, and what was not read. `targets` checkpoints with `nbytes` bytes were read.

    `unsupported` and `closed` say why some checkpoints cannot be checked. `deleted` are the paths of checkpoints that
    were deleted meanwhile. `passed_over` is the number of checkpoints that were committed before `since`. `archived`
    are directories of archived steps; their steps are among the parts. `unfinished` are steps without a manifest.
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

    @property
    def ok(self) -> bool:
        """True if every requested byte was read and is as it was saved."""
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
            nbytes = _check_one(store, target, format, below, done.problems, share, since, last)
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
    found: list[Problem],
    share: Share,
    since: float | None,
    last: list[Source],
) -> int | None:
    """Adds the damage to `found` and returns about how many bytes were read, or None if the commit is before `since`.

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
            found.append(Problem(file, (), None, str(error)))
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
            found.extend(problems)
            last[:] = [reader]
            if unchecked_error:
                raise unchecked_error
            begin, end = share.of(reader.nbytes)
            return end - begin
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
