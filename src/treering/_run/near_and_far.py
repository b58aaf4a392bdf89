"""Reads a run in two tiers: finds which tier has which step, and which copy of a step to read."""

import contextlib
import logging
import os
import posixpath
from collections.abc import Iterator, Mapping

from .._core.entries import step_number
from .._core.leaf_paths import few
from .._processes.calls import Call
from .._save.pending import as_save_error
from ..errors import CorruptError, MismatchError, NotFoundError
from ..formats.treering import host_parts, summary
from ..keep import Saved
from ..stores.read_errors import is_momentary
from . import host_meeting
from .directory import Directory
from .host_disks import HostDisks, steps_in_part
from .latest_good import Place
from .origin import Origin

_log = logging.getLogger("treering")


class NearAndFar:
    """The local and the remote directory of one run. See `Directory` for the methods.

    Both copies of a step have the same manifest, byte for byte. Local steps belong to the run as long as no other job
    has written the remote tier, which `Origin` knows. Otherwise only local steps that are also remote are used.

    `disks` is set if each host has its own local disk, which the first call of all processes finds out. Each host then
    reads the files on its own disk locally and all others remotely. A step that is not in the remote tier cannot be
    read.
    """

    def __init__(self, near: Directory, far: Directory):
        if near.steps.store.real_path(near.root) == far.steps.store.real_path(far.root):
            raise MismatchError(f"local={near.root!r}: expected another directory, found that of the run")
        self.near, self.far = near, far
        self.steps, self.root = near.steps, far.root
        self.origin = Origin(near.steps, far.steps)
        self.disks: HostDisks | None = None
        self.index = 0  # of this process
        self._claimed = False
        self._copied: dict[int, tuple[object, str]] = {}  # version and identity of the uploaded steps
        self._saved: set[int] = set()  # steps that are local, and not known to be uploaded

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
        self.far.reading = None

    @property
    def lost(self) -> bool:
        return self.near.lost or self.far.lost

    def meet(self, call: Call) -> None:
        self.index = call.index
        with as_save_error(self.near.root):
            self.disks = host_meeting.meet(call, self.near.steps, self.far.steps, self.origin, self._locked)
        if self.disks and self.disks.lacking and not self.index:
            _log.warning(
                "%s: steps %s are ignored; parts of them were not uploaded, and are on no disk of this job's hosts, "
                "or another job held the run when this one began",
                self.near.root,
                few(tuple(map(str, sorted(self.disks.lacking)))),
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds both leases, while the first call of a job changes the run."""
        self.near.acquire()
        try:
            self.far.acquire()
            yield
        finally:
            self.far.release()
            self.near.release()

    def all_steps(self) -> dict[int, str]:
        return dict(sorted({**self.far.all_steps(), **self.near_steps()}.items()))

    def candidates(self, step: int | None = None) -> list[Place]:
        near, far = self.near_steps(), self.far.located_steps()
        if step is not None and (number := step_number(step)) not in near:
            return self.far.candidates(number)
        places: list[Place] = []
        for number in sorted({*near, *far}, reverse=True) if step is None else [step_number(step)]:
            if number in near:
                places.append(self.place(number, near[number]))
            if number in far and not (number in near and self._differ(near[number], far[number].path)):
                places.append(self.far.place(number, *far[number]))
        return places

    def place(self, step: int, path: str, format: str | None = None) -> Place:
        if self.disks and self._side(path) is self.near:
            near, far = self.near, self.far
            both = host_parts.nearest(near.steps.store, near.root, far.steps.store, far.root)
            return Place(step, both, posixpath.join(near.root, posixpath.basename(path)))
        return self._side(path).place(step, path, format)

    def to_read(self, step: int | None = None) -> list[Place]:
        """Returns the candidates that can be read. If each host has its own disk, they are remote."""
        places = self.candidates(step)
        if not self.disks:
            return places
        there = {place.step for place in places if self._side(place.path) is self.far}
        if lacking := sorted({place.step for place in places if place.step > max(there, default=-1)}):
            _log.warning(
                "%s: steps %s are only on the disks of the hosts, and cannot be read before they are uploaded",
                self.root, few(tuple(map(str, lacking))),
            )  # fmt: skip
            if step is not None:
                raise NotFoundError(f"{self.root}: expected step {step}, found it only on the disks of the hosts")
        return [place for place in places if place.step in there]

    def good(self, *, foreign: bool = False) -> list[Saved]:
        near, far = self.near_steps(), self.far.steps.committed()
        found = {one.step: one for one in self.far.good(foreign=foreign)}
        for one in self.near.good():
            if one.step in near:
                same = one.step in found and self.is_copied(one.step, near[one.step], far.get(one.step))
                metrics = found[one.step].metrics if same else {}  # Otherwise they are the replaced step's.
                found[one.step] = Saved(one.step, {**one.metrics, **metrics}, one.created, one.nbytes)
        return [found[step] for step in sorted(found)]

    def mark_damaged(self, place: Place) -> None:
        side = self._side(place.path)
        if self.disks and side is self.near:
            return  # The damage may be in a file that was read from the remote tier.
        side.mark_damaged(place)

    def check_new(self) -> None:
        if self.disks and self.disks.lacking:
            lacking = few(tuple(map(str, sorted(self.disks.lacking))))
            raise CorruptError(
                f"{self.root}: expected a step, found none, and in {self.near.root} only parts of {lacking}: the other "
                "parts are on no disk of this job's hosts, or another job held the run when this one began; restart "
                "with the missing hosts, or end the other job; if they are lost, remove that directory on all hosts to "
                "start over"
            )
        standing = self.origin.standing()
        self.far.check_new(knows_local=standing is not None and standing.rank > 0)
        self.near.check_new(local=True)

    def path(self, step: int) -> str:
        return self.all_steps().get(step) or self.near.path(step)

    def existing(self, step: int) -> str:
        return self.candidates(step)[0].path

    def pinned(self) -> list[int]:
        near = self.near_steps()
        return sorted({*self.far.pinned(), *(step for step in self.near.pinned() if step in near)})

    def uncopied(self) -> list[int]:
        near = self._known_near()  # Listed once, because another job may archive steps meanwhile.
        unknown = self._not_known_to_be_far(near)
        if not unknown:
            return []
        try:
            far = self.far.steps.committed()
            return [step for step in unknown if not self.is_copied(step, near[step], far.get(step))]
        except OSError as error:
            if not is_momentary(error):
                raise
            return unknown

    def _not_known_to_be_far(self, near: Mapping[int, str]) -> list[int]:
        return [step for step, path in near.items() if not self._known_copied(step, path)]

    def _known_near(self) -> dict[int, str]:
        return self.near.steps.committed() if self._claimed else self.near_steps()

    def _side(self, path: str) -> Directory:
        return self.far if os.path.dirname(path) == self.far.root else self.near

    def near_steps(self) -> dict[int, str]:
        """Returns the local steps that belong to the run, and their paths."""
        if self.disks and self.index:
            return {} if self.disks.stale else dict(sorted(steps_in_part(self.near.steps).items()))
        lacking = self.disks.lacking if self.disks else ()
        own = {step: path for step, path in self.near.steps.committed().items() if step not in lacking}
        if not own or self._claimed or self.origin.is_newest():
            return own
        far = self.far.steps.committed()
        found = {step: path for step, path in own.items() if step in far and not self._differ(path, far[step])}
        if others := [str(step) for step in own if step not in found]:
            _log.warning(
                "%s: another job has written %s since steps %s were saved here; they are ignored",
                self.near.root, self.root, few(tuple(others)),
            )  # fmt: skip
        return found

    def _differ(self, path: str, other: str) -> bool:
        """Returns True if a local step is surely another than the remote one. A damaged manifest may be the same."""
        try:
            return self._identity(path) != summary.identity(self.far.steps.store, other)
        except (CorruptError, FileNotFoundError):
            return False

    def _identity(self, path: str) -> str:
        """Returns the identity of a local step. Raises `FileNotFoundError` if it was deleted."""
        if self.disks and self.index and (found := host_parts.part_of(self.near.steps.store, path)):
            return found[0]
        return summary.identity(self.near.steps.store, path)

    def _known_copied(self, step: int, path: str) -> bool:
        seen = summary.look(self.near.steps.store, path)
        return seen is not None and step in self._copied and self._copied[step][0] == seen.version

    def is_copied(self, step: int, path: str, far: str | None) -> bool:
        """Returns True if the local step at `path` is the same as the remote step at the path `far`."""
        if far is None:
            return False
        if not self._known_copied(step, path):
            try:
                seen = summary.look(self.near.steps.store, path)
                identity = self._identity(path)
                if identity != summary.identity(self.far.steps.store, far):
                    return False
            except (CorruptError, FileNotFoundError):
                return False
            if seen:
                self._note_copied(step, seen.version, identity)
        return True

    def _note_copied(self, step: int, version: object, identity: str) -> None:
        self._copied[step] = version, identity
        if self._known_copied(step, self.near.own_path(step)):  # Otherwise it was saved again meanwhile.
            self._saved.discard(step)
