"""Reading everything and reporting all damage."""

import dataclasses
import errno
import operator
import os
import posixpath
import time
from collections.abc import Iterator

from .. import formats, stores
from .._core import html
from .._core.readable import count, nbytes
from .._core.source import WHOLE, Problem, Share, Source
from .._core.tracebacks import at_the_caller
from .._run.latest_good import check_kind, check_known, check_there
from .._run.run import directories
from ..errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import summary
from ..stores.nfs import look_anew
from ..stores.read_errors import ReplacedError, UnreadableError, raise_if_momentary, reading
from ..stores.store import Store

_CHECK_ATTEMPTS = 5  # at checking a checkpoint that is replaced meanwhile
_DELETION_SECONDS = 2.0  # for which a step that is not recognized any more may still be there
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


@dataclasses.dataclass(frozen=True, repr=False)
class VerifyReport:
    """The result of `verify`: `problems` name the file, the leaves and the 1 MiB block; `nbytes` were read."""

    path: str
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was saved."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def _repr_html_(self) -> str:
        found = [(problem.file, str(problem)) for problem in self.problems]
        said = "all good" if self.ok else count(len(found), "problem")
        return html.page(self.path, html.line(nbytes(self.nbytes), said), html.listed("damage", found))

    def __repr__(self) -> str:
        found = f"{len(self.problems)} problems" if self.problems else "all good"
        return f"<VerifyReport {self.path}: {self.nbytes} bytes, {found}>"

    def __str__(self) -> str:
        found = f"{len(self.problems)} problems" if self.problems else "all good"
        return "\n".join([f"{self.path}: {self.nbytes} bytes, {found}", *(f"  {problem}" for problem in self.problems)])


@at_the_caller
def verify(
    path: str | os.PathLike[str], *, subset: tuple[int, int] | None = None, format: str | None = None
) -> VerifyReport:
    """Checks every byte of a checkpoint, or of all steps of a run (of any library), against its checksum.

    >>> assert tr.verify("runs/gpt").ok

    subset: ``(2, 5)`` reads the second of five equal parts of the arrays' bytes; all five together read every byte.
        What is small (manifests, headers) is checked each time. Parts are equal as far as arrays can be read in part:
        blocks of 1 MiB in the native format, up to 128 MiB in others, of which `nbytes` then says about how much.
    format: the format to read it in, whatever it is recognized as; of a run, only steps of this format are checked.

    Damage is reported, not raised. Raises `NotFoundError` when there is nothing to check, and `UnsupportedError` for
    what a later release wrote, when all else is checked: the message says what damage there is.
    """
    report, unsupported, parts = check(path, subset, format)
    if unsupported and parts == 1 and report.ok:
        raise unsupported[0]
    if unsupported:
        cannot = "\n".join(f"  {error}" for error in unsupported)
        raise UnsupportedError(
            f"{report.path}: {len(unsupported)} of {parts} checkpoints cannot be checked:\n{cannot}\nand of all else, "
            f"{report}"
        )
    return report


def check(
    path: str | os.PathLike[str], subset: tuple[int, int] | None, format: str | None = None
) -> tuple[VerifyReport, list[UnsupportedError], int]:
    """The result of `verify`, why some of the checkpoints cannot be checked, and how many there are."""
    place = stores.absolute(path)
    share = _share(subset)
    only = None if format is None else formats.get(format)
    try:
        with reading(place):
            return _verify(place, share, only)
    except UnreadableError as error:
        return VerifyReport(place, 0, (Problem(place, (), None, str(error)),)), [], 1


def _share(subset: tuple[int, int] | None) -> Share:
    if subset is None:
        return WHOLE
    wrong = f"subset={subset!r}: expected two numbers, such as (2, 5) for the second of five parts"
    try:
        number, count = (operator.index(n) for n in subset)
    except (TypeError, ValueError):
        raise MismatchError(wrong) from None
    if not 1 <= number <= count:
        raise MismatchError(wrong)
    return Share(number, count)


def _verify(place: str, share: Share, only: formats.Format | None) -> tuple[VerifyReport, list[UnsupportedError], int]:
    store = stores.of(place)
    with store.glance(place):
        parts = _parts(store, place, only)
    total = 0
    found: list[Problem] = []
    unsupported: list[UnsupportedError] = []
    for part, format in parts.items():
        below = "" if part == place else posixpath.relpath(part, place)
        try:
            total += _verify_one(store, part, format, below, found, share)
        except NotFoundError as error:
            if part == place:
                raise
            if not _is_deleted(store, part, native=format == "treering"):
                found.append(Problem(below, (), None, str(error)))
        except UnsupportedError as error:
            unsupported.append(error)
    return VerifyReport(place, total, tuple(found)), unsupported, len(parts)


def _parts(store: Store, place: str, only: formats.Format | None) -> dict[str, str | None]:
    """The paths to check and their formats: None where it is recognized when it is opened."""
    single = summary.look(store, place) is not None
    native, foreign = only is None or only.name == "treering", only is None or only.name != "treering"
    names = [name for _, name in directories(store, place)] if native and not single else []
    parts: dict[str, str | None] = {posixpath.join(place, name): "treering" for name in names}
    if foreign and not single:
        others = set(formats.foreign_steps(store, place, set(names), only).values())
        known = {posixpath.basename(one.path) for one in others}.union(names)
        # A damaged step beside a good one of the same number does not count, but it is still damage.
        rest = [name for name in store.list(place) if name not in known]
        others.update(one for _, one in formats.damaged_steps(store, place, rest, only))
        parts.update({one.path: one.format for one in sorted(others, key=lambda one: one.path)})
    if not parts:
        return {place: None if only is None else check_there(store, place, only).name}
    # Beside the steps of a run may lie the weights that it began with.
    weights = formats.is_known(store, place) if only is None else formats.accepts(only, store, place)
    given = None if only is None else only.name
    return {place: given, **parts} if weights else parts


def _is_deleted(store: Store, step: str, *, native: bool) -> bool:
    """Returns True if a step that was listed is gone, or is going.

    Of ours the manifest goes first; of another library the directory must be gone a moment later.
    """
    end = time.monotonic() + _DELETION_SECONDS
    while True:
        with reading(step):
            if store.stat(step) is None or (native and summary.look(store, step) is None):
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def _verify_one(store: Store, path: str, known: str | None, below: str, found: list[Problem], share: Share) -> int:
    """Adds the damage to `found` and returns about how many bytes. Raises `UnsupportedError` when that is done."""
    for _ in range(_CHECK_ATTEMPTS):
        file = path
        try:
            with reading(path), store.glance(path):
                format = check_known(store, path) if known is None else formats.get(known)
                file = summary.file(below) if format.name == "treering" else path
                reader = format.open(store, path)
        except ReplacedError:
            continue
        except CorruptError as error:
            found.append(Problem(file, (), None, str(error)))
            return 0
        except OSError as error:
            if isinstance(error, TreeringError):
                raise
            if error.errno not in _GONE:
                raise
            if known == "treering" and summary.look(store, path) is None:
                raise NotFoundError(f"{path}: expected a checkpoint, found nothing") from None
            if known != "treering":
                check_kind(store, path, known)
            continue  # it was deleted after it was recognized
        problems: list[Problem] = []
        unsupported: UnsupportedError | None = None
        try:
            problems.extend(
                problem._replace(file=posixpath.join(below, problem.file)) for problem in _problems(reader, share)
            )
        except UnsupportedError as error:
            unsupported = error
        if not problems or format.name != "treering" or _is_current(store, path, reader.identity):
            found.extend(problems)
            if unsupported:
                raise unsupported
            begin, end = share.of(reader.nbytes)
            return end - begin
    raise ReplacedError(f"{path}: it is replaced faster than it can be checked")


def _problems(reader: Source, share: Share) -> Iterator[Problem]:
    """All damage; formats of other packages need not know of shares."""
    return reader.problems() if share == WHOLE else reader.problems(share)


def _is_current(store: Store, path: str, identity: str) -> bool:
    """Whether the checkpoint at a path is still the one that was opened, so that what its files lack is damage.

    Another host may have replaced it. Raises `ReplacedError` when it was deleted.
    """
    look_anew(store, path)
    try:
        return summary.identity(store, path) == identity
    except (CorruptError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _GONE:
            raise ReplacedError(f"{path}: it was deleted while it was checked") from None
        raise_if_momentary(error)
        return True
