"""A run that is saved on a local disk and copied from there to where it stays."""

import logging
import os
from collections.abc import Callable, Collection

from .._core.entries import step_number
from .._core.leaf_paths import few
from ..errors import CorruptError, ExistsError, MismatchError, SaveError
from ..formats.treering import copy, metrics, pins, removal, summary
from ..formats.treering.read import Reader
from ..keep import Policy, Saved
from ..stores.read_errors import is_momentary
from . import run
from .copies import Copies
from .directory import Directory
from .latest_good import Place
from .origin import Origin
from .retention import Retention

_log = logging.getLogger("treering")


class TwoPlaces:
    """The `Directory` of such a run: steps are saved `near`, and stay `far`. See there for the methods.

    The copies of a step have the same manifest, byte for byte. What is near belongs to the run as long as no other job
    has written far, which `Origin` knows. Otherwise only what is far, too, counts, and the next save sets the rest
    aside.
    """

    def __init__(
        self,
        near: Directory,
        far: Directory,
        keep: Policy | None,
        bytes_per_second: float | None,
        tell: Callable[[BaseException], None],
    ):
        if near.steps.store.real_path(near.root) == far.steps.store.real_path(far.root):
            raise MismatchError(f"local={near.root!r}: expected another directory than that of the run")
        self.near, self.far = near, far
        self.steps, self.root = near.steps, far.root
        self.origin = Origin(near.steps, far.steps)
        self._keep = keep
        self._process = os.getpid()
        self._claimed = False
        self._copied: dict[int, tuple[object, str]] = {}  # versions and identities of manifests near that are far, too
        self._seen_far: list[Saved] = []  # when it was last looked
        self._saved: set[int] = set()  # here, and not known to be far
        self._ended = False
        self._retain: Callable[[int | None], None] = lambda step: None
        self._ever_far: set[int] = set()  # no other step is there: saving one needs no look at it
        self._copies = Copies(self, Retention(far, keep), bytes_per_second, tell)

    # Both

    @property
    def claimed(self) -> bool:
        """Whether this process holds both locks, and what is near belongs to the run."""
        return self._claimed and not self.lost and os.getpid() == self._process

    @property
    def back_to(self) -> int | None:
        return self.near.back_to

    @back_to.setter
    def back_to(self, step: int | None) -> None:
        self.near.back_to = self.far.back_to = step

    @property
    def restored(self) -> int | None:
        return self.near.restored

    @restored.setter
    def restored(self, step: int | None) -> None:
        self.near.restored = self.far.restored = step

    @property
    def lost(self) -> bool:
        return self.near.lost or self.far.lost

    @property
    def copying(self) -> int | None:
        return self._copies.step

    @property
    def busy(self) -> bool:
        return self._copies.busy

    # Reading

    def all_steps(self) -> dict[int, str]:
        return dict(sorted({**self.far.all_steps(), **self._near_steps()}.items()))

    def candidates(self, step: int | None = None) -> list[Place]:
        near, far = self._near_steps(), self.far.all_steps()
        if step is not None and (number := step_number(step)) not in near:
            return self.far.candidates(number)
        places: list[Place] = []
        for number in sorted({*near, *far}, reverse=True) if step is None else [step_number(step)]:
            if number in near:
                places.append(self.near.place(number, near[number]))
            if number in far and not (number in near and self._differ(near[number], far[number])):
                places.append(self.far.place(number, far[number]))
        return places

    def place(self, step: int, path: str) -> Place:
        return self._side(path).place(step, path)

    def good(self, *, foreign: bool = False) -> list[Saved]:
        near, far = self._near_steps(), self.far.steps.committed()
        found = {one.step: one for one in self.far.good(foreign=foreign)}
        for one in self.near.good():
            if one.step in near:
                same = one.step in found and self._is_copied(one.step, near[one.step], far.get(one.step))
                metrics = found[one.step].metrics if same else {}  # or they are those of what it has replaced
                found[one.step] = Saved(one.step, {**one.metrics, **metrics}, one.created, one.nbytes)
        return [found[step] for step in sorted(found)]

    def mark_damaged(self, place: Place) -> None:
        self._side(place.path).mark_damaged(place)

    def check_new(self) -> None:
        self.far.check_new()
        self.near.check_new()

    def path(self, step: int) -> str:
        return self.all_steps().get(step) or self.near.path(step)

    def existing(self, step: int) -> str:
        return self.candidates(step)[0].path

    def pinned(self) -> list[int]:
        near = self._near_steps()
        return sorted({*self.far.pinned(), *(step for step in self.near.pinned() if step in near)})

    def _side(self, path: str) -> Directory:
        return self.near if os.path.dirname(path) == self.near.root else self.far

    def _near_steps(self) -> dict[int, str]:
        """The steps near that belong to the run, and their paths."""
        own = self.near.steps.committed()
        if not own or self._claimed or self.origin.is_newest():
            return own
        far = self.far.steps.committed()
        found = {step: path for step, path in own.items() if step in far and not self._differ(path, far[step])}
        if others := [str(step) for step in own if step not in found]:
            _log.warning(
                "%s: another job has written %s since steps %s were saved here; they do not count",
                self.near.root, self.root, few(tuple(others)),
            )  # fmt: skip
        return found

    def _differ(self, path: str, other: str) -> bool:
        """Whether a step near is another than the one far; a manifest that is damaged may be of the same."""
        try:
            near = summary.identity(self.near.steps.store, path)
            return near != summary.identity(self.far.steps.store, other)
        except (CorruptError, FileNotFoundError):
            return False

    # Writing

    def _claim(self) -> None:
        """Takes both locks, and sets aside what does not belong to the run."""
        self.near.acquire()
        if self._claimed:
            if self.far.lost:
                self.far.acquire()  # which says so
            self._copies.check()
            self.origin.keep_near()
            return
        self.far.acquire()
        if not self.origin.is_newest():
            far = self.far.steps.committed()
            others = {
                step: path
                for step, path in self.near.steps.committed().items()
                if step not in far or self._differ(path, far[step])
            }
            if others:
                place = run.set_aside(self.near.steps.store, self.near.root, list(reversed(others.values())))
                _log.warning("%s: what does not count was set aside to %s", self.near.root, place)
        self.origin.set_near()
        self._ever_far.update(self.far.steps.committed())
        self._claimed = True
        self._copies.begin()

    def place_for(self, step: int, on_exists: str, under_way: Collection[int | None]) -> tuple[str, bool] | None:
        self._claim()
        if self.back_to is not None:
            self.far.check_own_after(self.back_to)
        if step in self._ever_far and self.far.place_for(step, on_exists, under_way) is None:
            return None
        far = () if self.back_to is not None else self._ever_far
        whole = [one for one in far if not (one > step and self.far.steps.is_damaged(one, self.far.own_path(one)))]
        return self.near.place_for(step, on_exists, under_way, whole)

    def enter(self) -> None:
        self._claim()
        if self.back_to is not None:
            self._set_aside_after(self.back_to)

    def begin(self) -> None:
        for one in (self.near, self.far):
            one.unmark_finished()

    def about_to_save(self, retain: Callable[[int | None], None]) -> bool:
        self._retain = retain
        retain(None)  # here, where no save is under way; what was copied since the last one goes
        return True  # a local disk may have room for no more

    def committed(self, step: int | None, retain: Callable[[int | None], None]) -> None:
        if step is not None:
            self._saved.add(step)
            self._copied.pop(step, None)
        self._ended = False
        self._copies.begin()

    def needed(self) -> set[int]:
        """What is not known to be far stays; if the policy wants it, as far as that is known here."""
        good = self.near.good()
        wanted = {one.step for one in good if self._keep is None or one is good[-1]}
        if self._keep is not None:  # newer ones may be far alone
            both = {one.step: one for one in [*self._seen_far, *good]}
            wanted |= self._keep.kept([both[step] for step in sorted(both)])
        self._saved -= {one.step for one in good} - wanted  # they may go, and need no copy
        return {*self.near.needed(), *wanted.intersection(self._not_known_to_be_far())}

    def uncopied(self) -> list[int]:
        unknown = self._not_known_to_be_far()
        if not unknown:
            return []
        near = self.near.steps.committed()
        try:
            far = self.far.steps.committed()
            return [step for step in unknown if not self._is_copied(step, near[step], far.get(step))]
        except OSError as error:
            if not is_momentary(error):
                raise
            return unknown

    def _not_known_to_be_far(self) -> list[int]:
        near = self.near.steps.committed() if self._claimed else self._near_steps()
        return [step for step, path in near.items() if not self._known_copied(step, path)]

    def leave(self) -> SaveError | None:
        own = self._claimed and os.getpid() == self._process and not self._ended
        problem = self._problem(self._copies.finish() if self.claimed else self._copies.taken_over) if own else None
        self._claimed = False
        for one in (self.far, self.near):
            try:
                one.leave()
            except BaseException:  # the other is left all the same, and what was not copied is said
                _log.exception("%s: its lock was not given back", one.root)
        return problem

    def pin(self, step: int, wanted: bool) -> None:
        places = self.candidates(step)
        if places[0].path in self._near_steps().values():  # first: a copy that ends meanwhile takes it over
            pins.pin(places[0].store, places[0].path, wanted)
        if path := self.far.steps.committed().get(step_number(step)):
            pins.pin(self.far.steps.store, path, wanted)

    def delete(self, step: int) -> None:
        with self._copies.paused():
            self._seen_far = []
            places = self.candidates(step)
            if any(pins.pinned(place.store, place.path) for place in places):
                raise MismatchError(f"{places[0].path}: the step is pinned; unpin it first")
            for place in places:  # near first: what is only near would be copied
                self._side(place.path).delete(step)
            self._saved.discard(step_number(step))
            self._ever_far.discard(step_number(step))

    def rewind(self, step: int) -> None:
        self.existing(step)
        self._claim()
        self._set_aside_after(step)

    def _set_aside_after(self, step: int) -> None:
        with self._copies.paused():
            self._seen_far = []
            for one in (self.near, self.far):
                one.check_own_after(step)
            self.near.set_aside_after(step)
            self.origin.set_far()
            self.far.set_aside_after(step)
            self._saved = {one for one in self._saved if one <= step}
            self._ever_far = {one for one in self._ever_far if one <= step}

    def finish(self) -> None:
        self._claim()
        self.copy_all()
        self.origin.set_far()
        for one in (self.near, self.far):
            one.mark_finished()

    # Copying

    def copy_all(self) -> None:
        """Waits until all is copied that this job has saved, or a job before it. Raises `SaveError`."""
        if os.getpid() != self._process:
            return
        if not self._claimed and self.restored is not None and self.uncopied():
            try:
                self._claim()
            except ExistsError as error:  # this job has only looked
                _log.warning("%s: steps are not copied from %s: %s", self.root, self.near.root, error)
        if self._claimed:
            self._ended = True  # `leave` need not try again
            error = self._copies.finish() if self.claimed else self._copies.taken_over
            self._retain(None)
            if problem := self._problem(error):
                raise problem

    def _problem(self, error: BaseException | None) -> SaveError | None:
        """What is not far when copying has ended, and why."""
        near = self.near.steps.committed()
        lacking = self._saved.union(self.to_copy() if self.claimed and not error else self.uncopied())
        gone = sorted(step for step in lacking if step not in near or self.near.steps.is_damaged(step, near[step]))
        if error is None and not gone and (self.claimed or not lacking):
            return None
        there = ", ".join(str(step) for step in sorted(lacking) if step not in gone)
        parts = [f"{self.root}: not all steps are there, for copying them failed"]
        parts += ["another job has taken the run over, or another Checkpointer of this process"] if self.lost else []
        parts += [str(error)] if error else []
        parts += (
            [f"steps {there} are in {self.near.root}, and the next job that saves from there copies them"]
            if there
            else []
        )
        parts += [f"steps {', '.join(map(str, gone))} are damaged in {self.near.root}, or gone"] if gone else []
        problem = SaveError("; ".join(parts))
        problem.__cause__ = error
        return problem

    def to_copy(self) -> list[int]:
        """The good steps that are not far, or not whole there, and that the policy wants, the newest first."""
        near, far = self.near.steps.committed(), self.far.steps.committed()
        self._seen_far = self.far.good()
        whole = {one.step for one in self._seen_far}
        good = [one.step for one in self.near.good() if one.step in near]
        lacking = [step for step in good if step not in whole or not self._is_copied(step, near[step], far.get(step))]
        if lacking and self._keep:
            both = self.good()
            wanted = self._keep.kept(both) | {both[-1].step}
            wanted.update(step for step in lacking if pins.pinned(self.near.steps.store, near[step]))
            self._saved.difference_update(set(lacking) - wanted)
            lacking = [step for step in lacking if step in wanted]
        return lacking[::-1]

    def _known_copied(self, step: int, path: str) -> bool:
        seen = summary.look(self.near.steps.store, path)
        return seen is not None and step in self._copied and self._copied[step][0] == seen.version

    def _is_copied(self, step: int, path: str, far: str | None) -> bool:
        if far is None:
            return False
        if not self._known_copied(step, path):
            try:
                seen = summary.look(self.near.steps.store, path)
                identity = summary.identity(self.near.steps.store, path)
                if seen is None or identity != summary.identity(self.far.steps.store, far):
                    return False
            except (CorruptError, FileNotFoundError):
                return False
            self._note_copied(step, seen.version, identity)
        return True

    def copy(self, step: int, moved: Callable[[int], None]) -> None:
        """Copies a step."""
        near, far = self.near.steps.store, self.far.steps.store
        self.origin.set_far()
        self._ever_far.add(step)
        there = self.far.steps.committed().get(step)
        path, to = self.near.own_path(step), there or self.far.own_path(step)
        if there and self.far.steps.is_damaged(step, there):
            if problem := next(Reader(near, path).problems(), None):  # what is left far may be better
                raise CorruptError(str(problem))
            self._copied.pop(step, None)  # from here on what is near is the only copy
            removal.delete(far, there)  # the names of its files may be those of the copy
        seen = summary.look(near, path)
        identity = copy.copy(near, path, far, to, overwrite=summary.look(far, to) is not None, moved=moved)
        if seen:
            self._note_copied(step, seen.version, identity)

    def _note_copied(self, step: int, version: object, identity: str) -> None:
        self._copied[step] = version, identity
        if self._known_copied(step, self.near.own_path(step)):  # or it was saved again meanwhile
            self._saved.discard(step)

    def copy_metrics(self) -> None:
        """Copies the metrics that steps got since they were copied."""
        near, far = self.near.steps.store, self.far.steps.store
        there = self.far.steps.committed()
        for step, path in self.near.steps.committed().items():
            if step in there and self._known_copied(step, path):
                metrics.copy(near, path, far, there[step], self._copied[step][1])
