"""The steps of a run at a glance: what is there, what is good, what a policy would delete."""

import dataclasses
import logging
import os
import posixpath
from collections.abc import Callable
from typing import Literal

from .. import formats, stores
from .._run import links, new_run
from .._run import run as _run
from .._run.latest_good import open_one
from .._run.steps import Steps
from ..errors import NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import pins, removal, summary
from ..keep import Policy, Saved
from ..stores.read_errors import UnreadableError, raise_if_momentary, reading
from ..stores.store import Store

_log = logging.getLogger("treering")
State = Literal["good", "damaged", "unsupported", "unfinished", "closed", "gone"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A step of a run. `created` is in seconds since the epoch, `nbytes` its size on the disk; None where not known.

    `unfinished` is a directory without a manifest: its save is under way, or was killed, and the next job removes it.
    """

    step: int
    path: str
    state: State
    format: str = "treering"
    created: float | None = None
    nbytes: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    pinned: bool = False
    link: bool = False
    linked_by: tuple[str, ...] = ()  # links in the run that lead to this step, which stays
    deleted: bool = False  # by the policy


@dataclasses.dataclass(frozen=True)
class Listing:
    """The steps of a run, ascending; `set_aside` are the directories of those that do not count since a `rewind`."""

    path: str
    rows: tuple[Row, ...]
    set_aside: tuple[str, ...]
    finished: bool

    @property
    def latest(self) -> int | None:
        """The newest good step."""
        return max((row.step for row in self.rows if row.state == "good"), default=None)


def list_run(
    path: str | os.PathLike[str], keep: Policy | None = None, judge: Callable[[Row], State] = lambda row: row.state
) -> Listing:
    """Lists a run; with `keep` it says which steps that policy would delete. Reads manifests, and no arrays.

    judge: returns the state of a step that it has looked at more closely. As long as a step would be deleted, it is
        called for the newest step that counts as good, until one is.

    Raises `NotFoundError` where there is no run.
    """
    place = stores.absolute(path)
    store = stores.of(place)
    check_run(store, place)
    with store.glance(place):
        prefix = _run.prefix_of(store, place)
        steps = Steps(store, place, prefix)
        own = steps.committed()
        names = {os.path.basename(one) for one in own.values()}
        rows = [_row(steps, step, one) for step, one in own.items()]
        others = formats.foreign_steps(store, place, names)
        rows += [_foreign(store, step, *one) for step, one in others.items() if step not in own]
        known = {row.step for row in rows}
        for name in store.list(place):
            step = _run.parse(name, prefix)
            if step is not None and step not in known:
                rows.append(_uncommitted(store, step, posixpath.join(place, name)))
        rows.sort(key=lambda row: row.step)
        aside = tuple(_run.aside(store, place))
        finished = store.stat(posixpath.join(place, _run.FINISHED)) is not None
        linked = links.to_steps(store, place)
        rows = [dataclasses.replace(row, linked_by=linked.get(os.path.basename(row.path), ())) for row in rows]
    if keep:
        for n in reversed(range(len(rows))):
            if rows[n].state != "good":
                continue
            if all(row.linked_by for row in _unwanted(keep, rows)):
                break
            rows[n] = dataclasses.replace(rows[n], state=judge(rows[n]))
            if rows[n].state == "good":
                break
        rows = _marked(store, place, keep, rows)
    return Listing(place, tuple(rows), aside, finished)


def check_run(store: Store, place: str) -> None:
    """Raises `NotFoundError` where there is no directory with steps, or with what a save has left."""
    with reading(place):
        if summary.look(store, place):
            raise NotFoundError(f"{place}: expected a run, found one checkpoint{new_run.meant(store, place)}")
        if store.stat(place) is None and not store.list(place):
            raise NotFoundError(f"{place}: expected a run, found nothing")
        names = store.list(place)
        steps = any(_run.parse(name, _run.PREFIX) is not None for name in names)
        if not (steps or _run.FINISHED in names or _run.all_steps(store, place)):
            found = "no step in it" if names else "an empty directory"
            what = "one checkpoint" if formats.is_known(store, place) else found
            raise NotFoundError(f"{place}: expected a run, found {what}{new_run.meant(store, place)}")


def _counting(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.state == "good" and row.format == "treering"]


def _unwanted(keep: Policy, rows: list[Row]) -> list[Row]:
    """The steps that the policy does not keep, with those that links lead to, except pinned ones and links."""
    good = [Saved(row.step, row.metrics, row.created or 0.0, row.nbytes or 0) for row in _counting(rows)]
    wanted = keep.kept(good) | {one.step for one in good[-1:]}
    return [row for row in _counting(rows) if row.step not in wanted and not (row.pinned or row.link)]


def _marked(store: Store, place: str, keep: Policy, rows: list[Row]) -> list[Row]:
    """The rows, with those marked that a `Checkpointer` with this policy would delete after its next look."""
    unwanted = {row.step for row in _unwanted(keep, rows)}
    for metric in keep.metrics - {name for row in _counting(rows) for name in row.metrics}:
        _log.warning("%s: no step has the metric %r; see best(unscored=): those without it are kept", place, metric)
    marked: list[Row] = []
    for row in rows:
        if row.step in unwanted and row.linked_by:
            _log.warning("step %d stays: %s to it", row.step, links.described(row.linked_by))
        elif row.step in unwanted:
            try:
                removal.check_removable(store, row.path)
                row = dataclasses.replace(row, deleted=True)
            except UnsupportedError as error:
                _log.warning("step %d is left alone: %s", row.step, error)
                row = dataclasses.replace(row, state="unsupported")
        marked.append(row)
    return marked


def tree_bytes(store: Store, path: str) -> int:
    """The bytes of all files in a directory, or of a file."""
    found = store.stat(path)
    if found is not None and found.is_file:
        return found.nbytes
    if (found is not None and not found.is_folder) or store.is_link(path):
        return 0
    return sum(tree_bytes(store, posixpath.join(path, name)) for name in store.list(path))


def _row(steps: Steps, step: int, path: str) -> Row:
    verdict = steps.look(step, path)
    pinned, link = pins.pinned(steps.store, path), steps.store.is_link(path)
    if isinstance(verdict, Saved):
        metrics = dict(verdict.metrics)
        return Row(step, path, "good", "treering", verdict.created, verdict.nbytes, metrics, pinned, link)
    return Row(step, path, verdict, nbytes=tree_bytes(steps.store, path), pinned=pinned, link=link)


def _foreign(store: Store, step: int, path: str, format: str | None) -> Row:
    try:
        ckpt = open_one(store, path, format)
    except TreeringError as error:
        raise_if_momentary(error)
        return Row(step, path, "damaged", format or "?", nbytes=tree_bytes(store, path), link=store.is_link(path))
    created = ckpt.created and ckpt.created.timestamp()
    return Row(step, path, "good", ckpt.format, created, ckpt.nbytes, ckpt.metrics, link=store.is_link(path))


def _uncommitted(store: Store, step: int, path: str) -> Row:
    state: State = "unfinished"
    try:
        with reading(path):
            summary.look(store, path)
    except PermissionError:
        return Row(step, path, "closed")
    except UnreadableError:
        state = "damaged"
    return Row(step, path, state, nbytes=tree_bytes(store, path))
