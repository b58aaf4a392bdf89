"""Deletes or moves steps of a run for a user, by default after reading the step that stays.

Jobs and other users may change the run at the same time. So each deletion checks, before and after, that the deleted
step and the step that stays are still those that the user saw.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from .. import formats, stores
from .._run.plain_run import PlainRun
from ..errors import MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import removal, summary
from ..stores.store import Store
from .listing import Row, State, list_run

_log = logging.getLogger("treering")
_STOPPED_TEXT = "the run has changed, so nothing more is deleted; look at the run, then start again"


class ChangedRunError(MismatchError):
    """The run is no longer what was listed, so nothing more may be deleted."""


class Inspection:
    """Reads steps that would stay, each once, and remembers the first valid one.

    If `enabled` is false, it reads nothing and trusts the state in the listing. It calls `on_begin` before it reads a
    step.
    """

    def __init__(self, enabled: bool, on_begin: Callable[[Row], None]):
        self.enabled = enabled
        self.verified_step: int | None = None  # The newest step that was read and is valid.
        self.damaged: list[int] = []
        self._on_begin = on_begin
        self._states: dict[tuple[str, float | None, int | None, str | None], State] = {}
        self._kept_step: tuple[Row, str | None] | None = None  # The valid step that stays, and its identity.

    def inspect(self, row: Row) -> State:
        """Returns the state of a step. Raises `OSError` if the step cannot be read."""
        # The identity is taken before the read, so that a replacement during the read is noticed. Steps of other
        # libraries have no identity.
        known = summary.identity_or_none(stores.get(row.path), row.path) if row.format == "treering" else None
        key = row.path, row.created, row.nbytes, known
        if self.enabled and key not in self._states:
            self._on_begin(row)
            self._states[key] = self._read_state(row)
        state = self._states[key] if self.enabled else row.state
        if state == "good":
            self.verified_step = row.step if self.enabled else None
            self._kept_step = row, known
        return state

    def check_kept_step(self) -> None:
        """Raises `ChangedRunError` if the step that must stay is gone or replaced.

        If only damaged steps are deleted, no step must stay.
        """
        if self._kept_step is None:
            return
        (row, known), store = self._kept_step, stores.get(self._kept_step[0].path)
        stays = (
            summary.identity_or_none(store, row.path) == known
            if row.format == "treering"
            else formats.is_known(store, row.path)
        )
        if not stays:
            self.verified_step = None
            raise ChangedRunError(
                f"{row.path}: expected the valid step that stays, found it gone or replaced; {_STOPPED_TEXT}"
            )

    def accept_newer_step(self, directory: PlainRun) -> None:
        """Chooses a newer step to stay if the job has saved one and deleted the chosen one.

        Raises `ChangedRunError` if no newer step is valid.
        """
        try:
            self.check_kept_step()
        except ChangedRunError:
            assert self._kept_step is not None
            step = self._kept_step[0].step
            rows = reversed(list_run(directory.root, prefix=directory.steps.prefix).rows)
            if not any(self.inspect(row) == "good" for row in rows if row.step > step and row.state == "good"):
                raise

    def _read_state(self, row: Row) -> State:
        from .verify import verify  # It imports NumPy, which is slow and not needed if nothing is deleted.

        try:
            report = verify(row.path, format=row.format)
        except NotFoundError:
            return "gone"
        except UnsupportedError as error:
            _log.warning("step %d is ignored, because this release cannot read it: %s", row.step, error)
            return "unsupported"
        except OSError:
            _log.error("step %d, the newest that would stay, cannot be read: nothing is deleted", row.step)
            raise
        if report.ok:
            return "good"
        self.damaged.append(row.step)
        _log.warning("step %d is ignored, because it is damaged: %s", row.step, report.problems[0])
        return "damaged"


def select_steps(
    directory: PlainRun,
    rows: Sequence[Row],
    steps: Collection[int],
    *,
    pinned: bool,
    inspect: Callable[[Row], State],
) -> list[Row]:
    """Returns the rows of the steps to delete, if all of them may be deleted.

    Raises `NotFoundError` for a step that the run lacks, and `UnsupportedError` for a step of another library or a
    later release. Raises `MismatchError` for a step that is pinned (unless `pinned`), is a link, or that a link leads
    to, and if no valid step would stay.
    """
    store = directory.steps.store
    for step in sorted({*steps} - directory.all_steps().keys()):
        directory.committed_path(step)  # It raises the error for a missing step.
    chosen = [row for row in rows if row.step in steps]
    for row in chosen:
        if row.format != "treering":
            raise UnsupportedError(
                f"{row.path}: expected a step of Treering, found one of another library; delete its folder yourself"
            )
        directory.check_unpinned_and_unlinked(row.path, pinned=pinned)
        removal.check_removable(store, row.path)
    for row in rows:
        if row.step not in steps and row.saved and row.saved.base in steps:
            raise MismatchError(
                f"{row.path}: step {row.step} would stay, and is stored as the difference to step {row.saved.base}; "
                "delete both or neither"
            )
    rest = (row for row in reversed(rows) if row.step not in steps)
    is_good = (inspect(row) == "good" for row in rest if row.state == "good")
    if any(row.state == "good" for row in chosen) and not any(is_good):
        raise MismatchError(
            f"{directory.root}: expected a valid step that stays, found none except those to delete; to start over use "
            "rewind --all, and to remove the run delete its folder"
        )
    return chosen


@dataclasses.dataclass
class RemovalResult:
    """The steps that were deleted, the steps that another process deleted meanwhile, and why others stay."""

    deleted: list[Row] = dataclasses.field(default_factory=list)
    gone: list[int] = dataclasses.field(default_factory=list)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)


def listed_identities(directory: PlainRun) -> dict[str, str | None]:
    """Returns the identities of the committed steps of a run by path.

    Call it before the run is listed: then a step that is replaced in between is not mistaken for the listed one.
    """
    return {
        path: summary.identity_or_none(directory.steps.store, path) for path in directory.steps.committed().values()
    }


def remove_steps(
    directory: PlainRun,
    rows: Sequence[Row],
    known: Mapping[str, str | None],
    inspection: Inspection,
    done: RemovalResult,
    *,
    to: str | None = None,
    pinned: bool = False,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Deletes steps one by one and notes the result of each in `done`. Calls `on_step` after each step.

    It stops if a step is no longer the listed one, or if the valid step that stays is gone.

    known: the `listed_identities` of the listed steps.
    inspection: knows the step that stays.
    to: puts a verified copy of each step into this run before it deletes the step.
    pinned: deletes pinned steps too.
    """
    store = directory.steps.store
    # A step goes before the base that it is stored as the difference to.
    for row in reversed(rows) if any(row.saved and row.saved.base is not None for row in rows) else rows:
        try:
            if _remove_one(directory, row, known.get(row.path), inspection, to, pinned):
                done.deleted.append(row)
            else:
                done.gone.append(row.step)
        except ChangedRunError as error:
            done.failed[row.step] = str(error)
            return
        except (TreeringError, OSError) as error:
            if isinstance(error, FileNotFoundError) and summary.stat_manifest(store, row.path) is None:
                done.gone.append(row.step)
            else:
                done.failed[row.step] = str(error)
        except BaseException:
            # The manifest is deleted first. Without it the step is deleted, even if an interrupt left files.
            if summary.stat_manifest(store, row.path) is None:
                done.deleted.append(row)
            raise
        on_step()


def _remove_one(
    directory: PlainRun, row: Row, known: str | None, inspection: Inspection, to: str | None, pinned: bool
) -> bool:
    """Deletes a step. Returns False if another process deleted it at the same time."""
    check_copy: Callable[[], None] = lambda: None  # noqa: E731

    def check() -> None:
        _check_listed(directory.steps.store, row, known)
        check_copy()
        inspection.check_kept_step()

    _check_listed(directory.steps.store, row, known)
    inspection.accept_newer_step(directory)
    if to is not None:
        from .move import copy_verified

        check_copy = copy_verified(row.path, to)
        inspection.accept_newer_step(directory)  # Again, because copying and reading back may take long.
    return directory.remove(row.path, pinned=pinned, guard=check)()


def _check_listed(store: Store, row: Row, known: str | None) -> None:
    """Raises `ChangedRunError` if another step has replaced the listed one. A missing step is no error."""
    if summary.identity_or_none(store, row.path) != known and summary.stat_manifest(store, row.path):
        raise ChangedRunError(f"{row.path}: expected the listed step, found another in its place; {_STOPPED_TEXT}")
