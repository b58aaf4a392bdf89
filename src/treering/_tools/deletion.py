"""Deleting or moving steps of a run on a person's behalf: what must be read before, what goes, and what stays."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from .. import formats, stores
from .._run.directory import Directory
from ..errors import MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import removal, summary
from ..stores.store import Store
from .listing import Row, State, list_run

_log = logging.getLogger("treering")
_STOPPED = "the run was changed meanwhile, so nothing more is deleted; look at the run, then start again"


class ChangedError(MismatchError):
    """The run is no longer what was listed, so nothing more may go."""


class Inspection:
    """Reads all of the step that would stay as the newest, and of older ones until one is good; each is read once.

    Without `wanted` nothing is read, and what a step's manifest says counts. `begins` is called before a step is read.
    """

    def __init__(self, wanted: bool, begins: Callable[[Row], None]):
        self.wanted = wanted
        self.good: int | None = None  # the newest step that was read and is good
        self.damaged: list[int] = []
        self._begins = begins
        self._known: dict[tuple[str, float | None, int | None, str | None], State] = {}
        self._newest: tuple[Row, str | None] | None = None  # the good step that stays, and its identity

    def judge(self, row: Row) -> State:
        """Returns the state of a step. Raises `OSError` where it cannot be known."""
        # Before it is read; other libraries' steps have none.
        known = summary.known_identity(stores.of(row.path), row.path) if row.format == "treering" else None
        key = row.path, row.created, row.nbytes, known
        if self.wanted and key not in self._known:
            self._begins(row)
            self._known[key] = self._read(row)
        state = self._known[key] if self.wanted else row.state
        if state == "good":
            self.good = row.step if self.wanted else None
            self._newest = row, known
        return state

    def check_stays(self) -> None:
        """Raises `ChangedError` if the step that shall stay is not there any more.

        Where only damaged steps go, none need stay.
        """
        if self._newest is None:
            return
        (row, known), store = self._newest, stores.of(self._newest[0].path)
        stays = (
            summary.known_identity(store, row.path) == known
            if row.format == "treering"
            else formats.is_known(store, row.path)
        )
        if not stays:
            self.good = None
            raise ChangedError(f"{row.path}: expected the good step that stays, found it gone or replaced; {_STOPPED}")

    def find_newer(self, directory: Directory) -> None:
        """Has the newest step stay if the one that should has gone: its job may have saved that and deleted this.

        Raises `ChangedError` if there is no good step that is newer.
        """
        try:
            self.check_stays()
        except ChangedError:
            assert self._newest is not None
            step = self._newest[0].step
            rows = reversed(list_run(directory.root, prefix=directory.steps.prefix).rows)
            if not any(self.judge(row) == "good" for row in rows if row.step > step and row.state == "good"):
                raise

    def _read(self, row: Row) -> State:
        from .verify import verify  # with NumPy, which is not needed where nothing would go

        try:
            report = verify(row.path, format=row.format)
        except NotFoundError:
            return "gone"
        except UnsupportedError as error:
            _log.warning("step %d cannot be read by this release and does not count: %s", row.step, error)
            return "unsupported"
        except OSError:
            _log.error("step %d would stay as the newest, and cannot be read: nothing is deleted", row.step)
            raise
        if report.ok:
            return "good"
        self.damaged.append(row.step)
        _log.warning("step %d is damaged and does not count: %s", row.step, report.problems[0])
        return "damaged"


def named(
    directory: Directory,
    rows: Sequence[Row],
    steps: Collection[int],
    *,
    pinned: bool,
    judge: Callable[[Row], State],
) -> list[Row]:
    """Returns the rows of the steps to delete, if all of them may be.

    Raises `NotFoundError` for a step that the run lacks, `MismatchError` for one that is pinned (unless `pinned`), is a
    link, or that a link leads to, and if no good step would stay; `UnsupportedError` for one of another library or of a
    later release.
    """
    store = directory.steps.store
    for step in sorted({*steps} - directory.all_steps().keys()):
        directory.existing(step)  # which says that it is not there
    chosen = [row for row in rows if row.step in steps]
    for row in chosen:
        if row.format != "treering":
            raise UnsupportedError(f"{row.path}: written by another library, so it is left alone; delete it yourself")
        directory.check_may_go(row.path, pinned=pinned)
        removal.check_removable(store, row.path)
    rest = (row for row in reversed(rows) if row.step not in steps)
    is_good = (judge(row) == "good" for row in rest if row.state == "good")
    if any(row.state == "good" for row in chosen) and not any(is_good):
        raise MismatchError(
            f"{directory.root}: expected a good step that stays, found none beside those to delete; to start over use "
            "rewind --all, and to remove the whole run delete its folder"
        )
    return chosen


@dataclasses.dataclass
class Removed:
    """The steps that went, those that another process deleted at the same time, and why others stay."""

    deleted: list[Row] = dataclasses.field(default_factory=list)
    gone: list[int] = dataclasses.field(default_factory=list)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)


def identities(directory: Directory) -> dict[str, str | None]:
    """What tells the steps of a run from those that others put in their places, by their paths.

    It is to be asked before the run is listed: then a step that is replaced meanwhile does not pass for the listed one.
    """
    return {path: summary.known_identity(directory.steps.store, path) for path in directory.steps.committed().values()}


def remove(
    directory: Directory,
    rows: Sequence[Row],
    known: Mapping[str, str | None],
    inspection: Inspection,
    done: Removed,
    *,
    to: str | None = None,
    pinned: bool = False,
    each: Callable[[], None] = lambda: None,
) -> None:
    """Deletes steps one by one, and notes in `done` what became of each; `each` is called after each.

    It stops where a step is not the one that was listed any more, or the good step that stays has gone.

    known: the `identities` of the steps that were listed.
    inspection: knows the step that stays.
    to: where a verified copy of each is put before.
    pinned: whether pins do not count.
    """
    store = directory.steps.store
    for row in rows:
        try:
            if _remove_one(directory, row, known.get(row.path), inspection, to, pinned):
                done.deleted.append(row)
            else:
                done.gone.append(row.step)
        except ChangedError as error:
            done.failed[row.step] = str(error)
            return
        except (TreeringError, OSError) as error:
            if isinstance(error, FileNotFoundError) and summary.look(store, row.path) is None:
                done.gone.append(row.step)
            else:
                done.failed[row.step] = str(error)
        except BaseException:
            if summary.look(store, row.path) is None:  # the interrupt came when only files were left to remove
                done.deleted.append(row)
            raise
        each()


def _remove_one(
    directory: Directory, row: Row, known: str | None, inspection: Inspection, to: str | None, pinned: bool
) -> bool:
    """Deletes a step; returns False if another process has done so at the same time."""
    check_copy: Callable[[], None] = lambda: None  # noqa: E731

    def check() -> None:
        _check_listed(directory.steps.store, row, known)
        check_copy()
        inspection.check_stays()

    _check_listed(directory.steps.store, row, known)
    inspection.find_newer(directory)
    if to is not None:
        from .move import copy_verified

        check_copy = copy_verified(row.path, to)
        inspection.find_newer(directory)
    return directory.delete_listed(row.path, pinned=pinned, check=check)


def _check_listed(store: Store, row: Row, known: str | None) -> None:
    """Raises `ChangedError` if another step is in the place of one that was listed; none may be."""
    if summary.known_identity(store, row.path) != known and summary.look(store, row.path):
        raise ChangedError(f"{row.path}: expected the step that was listed, found another in its place; {_STOPPED}")
