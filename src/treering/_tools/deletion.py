"""Deleting or moving steps of a run on a person's behalf: what must be read before, what goes, and what stays."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence

from .._run.directory import Directory
from ..errors import MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import removal, summary
from .listing import Row, State

_log = logging.getLogger("treering")


class Inspection:
    """Reads all of the step that would stay as the newest, and of older ones until one is good; each is read once.

    Without `wanted` nothing is read, and what a step's manifest says counts. `begins` is called before a step is read.
    """

    def __init__(self, wanted: bool, begins: Callable[[Row], None]):
        self.wanted = wanted
        self.good: int | None = None  # the newest step that was read and is good
        self.damaged: list[int] = []
        self._begins = begins
        self._known: dict[tuple[str, float | None, int | None], State] = {}

    def judge(self, row: Row) -> State:
        """Returns the state of a step. Raises `OSError` where it cannot be known."""
        if not self.wanted:
            return row.state
        key = row.path, row.created, row.nbytes
        if key not in self._known:
            self._begins(row)
            self._known[key] = self._read(row)
        if self._known[key] == "good":
            self.good = row.step
        return self._known[key]

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
            f"{directory.root}: expected a good step that stays, found none beside those to delete; to begin anew use "
            "rewind --all, and to remove the whole run delete its folder"
        )
    return chosen


@dataclasses.dataclass
class Removed:
    """The steps that went, those that another process deleted at the same time, and why others stay."""

    deleted: list[Row] = dataclasses.field(default_factory=list)
    gone: list[int] = dataclasses.field(default_factory=list)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)


def remove(
    directory: Directory,
    rows: Sequence[Row],
    done: Removed,
    *,
    to: str | None = None,
    pinned: bool = False,
    each: Callable[[], None] = lambda: None,
) -> None:
    """Deletes steps one by one, and notes in `done` what became of each; `each` is called after each.

    to: where a verified copy of each is put before.
    pinned: whether pins do not count.
    """
    store = directory.steps.store
    for row in rows:
        try:
            if to is not None:
                from .move import copy_verified

                copy_verified(row.path, to)
            if directory.delete_listed(row.path, pinned=pinned):
                done.deleted.append(row)
            else:
                done.gone.append(row.step)
        except NotFoundError:
            done.gone.append(row.step)
        except (TreeringError, OSError) as error:
            done.failed[row.step] = str(error)
        except BaseException:
            if summary.look(store, row.path) is None:  # the interrupt came when only files were left to remove
                done.deleted.append(row)
            raise
        each()
