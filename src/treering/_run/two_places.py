"""A run that is saved on a local disk and copied from there to where it stays."""

import logging
import os
import secrets
from collections.abc import Callable, Collection, Hashable

from .._core.entries import step_number
from ..errors import CorruptError, MismatchError, SaveError
from ..formats.treering import copy, pins, summary
from ..keep import Policy, Saved
from ..stores.read_errors import is_momentary
from ..stores.store import Store
from ..stores.whole_files import read_file
from . import run
from .directory import Directory
from .latest_good import Place
from .retention import Retention
from .uploads import Uploads

_log = logging.getLogger("treering")


class TwoPlaces:
    """The `Directory` of such a run: steps are saved `near`, and stay `far`. See there for the methods.

    The copies of a step have the same manifest, byte for byte. What is near belongs to the run as long as no other job
    has written far: both hold the same token then. Otherwise only what is far, too, counts, and the next save sets the
    rest aside.
    """

    def __init__(self, near: Directory, far: Directory, keep: Policy | None, bytes_per_second: float | None):
        if near.steps.store.real_path(near.root) == far.steps.store.real_path(far.root):
            raise MismatchError(f"local={near.root!r}: expected another directory than that of the run")
        self.near, self.far = near, far
        self.steps, self.root = near.steps, far.root
        self._keep = keep
        self.claimed = False  # both locks are held, and what is near belongs to the run
        self._copied: dict[int, Hashable] = {}  # versions of manifests near that are known to be far as well
        self._ever_far: set[int] = set()  # no other step is there: saving one needs no look at it
        self._uploads = Uploads(self, Retention(far, keep, None), bytes_per_second)

    # Both

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
        """The step that is being copied."""
        return self._uploads.step

    @property
    def busy(self) -> bool:
        """Whether steps are being copied."""
        return self._uploads.busy

    # Reading

    def all_steps(self) -> dict[int, str]:
        return dict(sorted({**self.far.all_steps(), **self._near_steps()}.items()))

    def candidates(self, step: int | None = None) -> list[Place]:
        near, far = self._near_steps(), self.far.all_steps()
        if step is not None and (number := step_number(step)) not in near:
            return self.far.candidates(number)
        numbers = sorted({*near, *far}, reverse=True) if step is None else [step_number(step)]
        places = ((number, side[number]) for number in numbers for side in (near, far) if number in side)
        return [self.place(number, path) for number, path in places]

    def place(self, step: int, path: str) -> Place:
        return self._side(path).place(step, path)

    def good(self, *, foreign: bool = False) -> list[Saved]:
        near = self._near_steps()
        found = {one.step: one for one in self.far.good(foreign=foreign)}
        for one in self.near.good():
            if one.step in near:
                metrics = found[one.step].metrics if one.step in found else {}
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
        if not own or self.claimed or self._is_newest():
            return own
        far = self.far.steps.committed()
        return {step: path for step, path in own.items() if self._same(path, far.get(step))}

    def _is_newest(self) -> bool:
        """Whether the steps far were all copied from here."""
        near, far = (_origin(one.steps.store, one.root) for one in (self.near, self.far))
        return near == far if far else not self.far.all_steps()

    def _same(self, path: str, other: str | None) -> bool:
        """Whether a step near is, byte for byte, the one that is far."""
        try:
            return other is not None and summary.identity(self.near.steps.store, path) == summary.identity(
                self.far.steps.store, other
            )
        except (CorruptError, FileNotFoundError):
            return False

    # Writing

    def _claim(self) -> None:
        """Takes both locks, and sets aside what does not belong to the run, once."""
        self.near.acquire()
        try:
            self.far.acquire()
        except OSError as error:
            if not self.claimed or not is_momentary(error):
                raise
            _log.warning("%s: cannot be reached; steps are saved to %s: %s", self.far.root, self.near.root, error)
        if self.claimed:
            return
        if self._is_newest():
            token = _origin(self.near.steps.store, self.near.root)
        else:
            far, token = self.far.steps.committed(), ""
            others = {
                step: path for step, path in self.near.steps.committed().items() if not self._same(path, far.get(step))
            }
            if others:
                place = run.set_aside(self.near.steps.store, self.near.root, list(reversed(others.values())))
                _log.warning(
                    "%s: another job has written %s since steps %s were saved here; they were set aside to %s",
                    self.near.root, self.far.root, ", ".join(map(str, others)), place,
                )  # fmt: skip
        token = token or secrets.token_hex(16)
        # Near first: after a kill in between, what is near is still the newest where far is empty.
        _set_origin(self.near.steps.store, self.near.root, token)
        _set_origin(self.far.steps.store, self.far.root, token)
        self._ever_far.update(self.far.steps.committed())
        self.claimed = True
        self._uploads.begin()

    def place_for(self, step: int, on_exists: str, under_way: Collection[int | None]) -> tuple[str, bool] | None:
        self._claim()
        if step in self._ever_far and self.far.place_for(step, on_exists, under_way) is None:
            return None
        return self.near.place_for(step, on_exists, under_way)

    def enter(self) -> None:
        self._claim()
        if self.back_to is not None:
            with self._uploads.paused():
                self.near.enter()
                self.far.enter()

    def begin(self) -> None:
        for one in (self.near, self.far):
            one.unmark_finished()

    def committed(self, retain: Callable[[], None]) -> None:
        self._uploads.begin(retain)

    def needed(self) -> set[int]:
        return {*self.near.needed(), *self.to_copy()}

    def leave(self) -> SaveError | None:
        problem = self._uploads.finish() if self.claimed else None
        for one in (self.far, self.near):
            try:
                one.leave()
            except BaseException:  # the other is left all the same, and what was not copied is said
                _log.exception("%s: its lock was not given back", one.root)
        return problem

    def pin(self, step: int, wanted: bool) -> None:
        places = self.candidates(step)
        for place in places:
            pins.pin(place.store, place.path, wanted)

    def delete(self, step: int) -> None:
        with self._uploads.paused():
            places = self.candidates(step)
            if any(pins.pinned(place.store, place.path) for place in places):
                raise MismatchError(f"{places[0].path}: the step is pinned; unpin it first")
            for place in places:  # near first: what is only near would be copied
                self._side(place.path).delete(step)

    def rewind(self, step: int) -> None:
        self.existing(step)
        self._claim()
        with self._uploads.paused():
            self.near.set_aside_after(step)
            self.far.set_aside_after(step)

    def finish(self) -> None:
        self._claim()
        self.copy_all()
        self.near.finish()
        self.far.finish()

    # Copying

    def copy_all(self) -> None:
        """Waits until all is copied. Raises `SaveError`."""
        if self.claimed and (problem := self._uploads.finish()):
            raise problem

    def to_copy(self) -> list[int]:
        """The good steps that are only near and that the policy wants, the newest first."""
        near, far = self.near.steps.committed(), self.far.steps.committed()
        good = [one.step for one in self.near.good() if one.step in near]
        lacking = [step for step in good if not self._is_copied(step, near[step], far.get(step))]
        if lacking and self._keep:
            both = self.good()
            wanted = self._keep.kept(both) | {both[-1].step}
            lacking = [one for one in lacking if one in wanted or pins.pinned(self.near.steps.store, near[one])]
        return lacking[::-1]

    def _is_copied(self, step: int, path: str, far: str | None) -> bool:
        if far is None:
            return False
        seen = summary.look(self.near.steps.store, path)
        if not (seen and self._copied.get(step) == seen.version):
            if not self._same(path, far):
                return False
            self._copied[step] = seen and seen.version
        return True

    def copy(self, step: int, moved: Callable[[int], None]) -> None:
        """Copies a step."""
        near, far = self.near.steps.store, self.far.steps.store
        to = self.far.path(step)
        overwrite = summary.look(far, to) is not None
        self._ever_far.add(step)
        copy.copy(near, self.near.path(step), far, to, overwrite=overwrite, moved=moved)

    def copy_marks(self) -> None:
        """Copies the metrics and pins that steps got since they were copied."""
        near, far = self.near.steps.store, self.far.steps.store
        there = self.far.steps.committed()
        for step, path in self.near.steps.committed().items():
            if step in self._copied and step in there:
                copy.copy_marks(near, path, far, there[step], summary.identity(near, path))


def _origin(store: Store, root: str) -> str:
    """The token of the place from which the newest steps of a run were copied; "" without one."""
    try:
        return read_file(store, os.path.join(root, run.ORIGIN)).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _set_origin(store: Store, root: str, token: str) -> None:
    if _origin(store, root) != token:
        store.make_folders(root, [])
        with store.new_file(os.path.join(root, run.ORIGIN), overwrite=True) as file:
            file.write(token.encode())
