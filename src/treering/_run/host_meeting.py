"""The first call of a job with a local place: whether all processes see the same one, and else what each disk has.

The disk of the process 0 of the job before has that job's manifests, and a mark which says so: it decides which steps
there are. If it is not that of this job's process 0, the manifests are brought there. If it is missing, what the other
disks have parts of is named.
"""

import contextlib
import logging
import os
import posixpath
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from .._processes.calls import Call
from ..errors import ExistsError, SaveError
from ..formats.treering import host_parts as parts
from ..stores.nfs import look_anew, wait_until
from ..stores.store import Store
from ..stores.temporary_names import place_of
from ..stores.whole_files import make_empty
from . import run
from .host_disks import HostDisks, folders, set_aside_of
from .origin import Origin, Standing
from .steps import Steps

_log = logging.getLogger("treering")
_OLD_SECONDS = 3600.0  # nobody meets for longer
_LOOK_SECONDS = 2.5  # for the mark of another process, before a disk counts as one's own


def meet(call: Call, near: Steps, far: Steps, origin: Origin, locked: Callable[[], Any]) -> HostDisks | None:
    """What the processes of a job know of their local places; None where all see the same one.

    `locked` holds the locks of the run within a `with` block. Raises `SaveError` where a process cannot write to its
    place, and `MismatchError` where one is another run's.
    """
    leader, leaders = _leaders(call, near.store, near.root)
    if leaders == [0]:
        return None
    if call.index == 0:
        _log.info("%s: the hosts have disks of their own, %d in all", near.root, len(leaders))
    leads = call.index in leaders
    standing = origin.standing() if leads else None
    near.hold_parts()
    stock = _Stock(near, far, origin, locked)
    own = {name: posixpath.join(near.root, name) for name in (folders(near) if leads else ())}
    found = {name: parts.inventory(near.store, path) for name, path in own.items()}
    asked, alone = call.gather_and_decide([standing, found] if leads else None, stock.choose)
    names = [name for name, index in asked.items() if index == call.index]
    notes = {name: own_notes for name in names if (own_notes := parts.notes(near.store, own[name]))}
    aside = set_aside_of(near, alone if leads else ())
    lacking, stale, mark = call.gather_and_decide([notes, sorted(aside)] if notes or aside else None, stock.take)
    disks = HostDisks(near, call.index, leads=leads, stale=leader in stale, lacking=set(lacking))
    disks.aside |= stock.aside
    if mark:  # from now on it is that of process 0's disk, and nothing is done before all others know it
        disks.take_part(origin, mark.encode(), ())
        call.gather_and_decide(None, lambda _: None)
    return disks


def _leaders(call: Call, store: Store, root: str) -> tuple[int, list[int]]:
    """The first of the processes that see the same place as this one, and of those of all other places.

    By files that each puts there for a moment.
    """
    if call.count == 1:
        return 0, [0]
    token = call.broadcast(lambda: os.urandom(3).hex())
    made: list[str] = []
    marks = [f".process-{n}.{token}.tmp" for n in range(call.index + 1)]
    own = posixpath.join(root, marks[-1])

    def first() -> int:
        there = {marks[-1], *store.list(root)}
        return next(n for n, mark in enumerate(marks) if mark in there)

    try:
        store.make_folders(root, made)
        make_empty(store, own)
    except OSError as error:
        raise SaveError(f"local={root!r}: expected a directory that this process can write to ({error})") from error
    try:
        call.gather_and_decide(None, lambda _: None)  # all are there
        if not store.is_local(root):  # over a network what others put there may show later
            wait_until(lambda: first() == 0, lambda: look_anew(store, root), _LOOK_SECONDS)
        mine = first()
        return mine, call.gather_and_decide(mine, lambda firsts: sorted(set(firsts)))
    finally:
        with contextlib.suppress(OSError):
            store.delete(own)
            _remove_old_marks(store, root)
            for folder in reversed(made):
                store.remove_folder(folder)


def _remove_old_marks(store: Store, root: str) -> None:
    """Removes the marks of processes that were killed while they met."""
    for name in store.list(root):
        path = posixpath.join(root, name)
        there = store.stat(path) if (place_of(name) or "").startswith("process-") else None
        if there and time.time() - there.modified > _OLD_SECONDS:
            store.delete(path)


class _Stock:
    """What all disks have, as process 0 sees it."""

    def __init__(self, near: Steps, far: Steps, origin: Origin, locked: Callable[[], Any]):
        self._near, self._far, self._origin, self._locked = near, far, origin, locked
        self._sizes: dict[str, dict[str, int]] = {}  # of the array files on all disks, by the names of steps
        self._wanted: dict[str, str] = {}  # the identities of the manifests that count, by the names of steps
        self._stale: list[int] = []  # the first processes of disks that do not count
        self._elsewhere = False  # another disk than this one has them
        self._counts = False  # and this one is of that job
        self._mark = ""  # of that disk
        self._parts: dict[str, set[str]] = {}  # of which there are parts, if that disk is missing
        self._alone: dict[str, set[str]] = {}  # of which there are parts and no manifest that counts
        self.aside: set[int] = set()  # steps that were set aside on some disks, and not on all
        self._identities_aside: set[str] = set()

    def choose(self, reports: Sequence[Any]) -> list[Any]:
        """Which process is to send the manifest of which step, and of which steps there are parts and no manifest."""
        asked = self._choose(reports)
        for name in self._wanted:
            self._alone.pop(name, None)
        return [asked, sorted(self._alone)]

    def _choose(self, reports: Sequence[Any]) -> dict[str, int]:
        known: dict[int, tuple[Standing | None, dict[str, parts.Inventory]]] = {}
        for index, report in enumerate(reports):
            if report:
                found = {name: parts.Inventory(*one) for name, one in report[1].items()}
                known[index] = Standing(*report[0]) if report[0] else None, found
                for name, one in found.items():
                    self._sizes.setdefault(name, {}).update(one.sizes)
                    if one.part_of:
                        self._alone.setdefault(name, set()).update(one.part_of)
        newest = {index: (standing, found) for index, (standing, found) in known.items() if standing}
        self._stale = [index for index in known if index not in newest]
        if not newest:
            return {}
        best = max(standing[:2] for standing, _ in newest.values())
        last = next(standing for standing, _ in newest.values() if standing[:2] == best)
        owners = [n for n, (standing, _) in newest.items() if standing.token == last.token and not standing.part]
        owner = max(owners, key=lambda n: (any(one.manifest for one in newest[n][1].values()), -n), default=None)
        if owner == 0:
            self._wanted = {name: one.manifest for name, one in newest[0][1].items() if one.manifest}
            if len(owners) > 1:  # the job before was killed when another disk had just taken the place of this one
                self._mark = newest[0][0].text
            return {}
        asked: dict[str, int] = {}
        for index, (_, found) in newest.items():
            for name, one in found.items():
                identity = one.manifest if owner is not None else one.manifest or one.kept
                if identity and (owner is None or index == owner):
                    self._wanted[name], asked[name] = identity, index
                if owner is None:
                    self._parts.setdefault(name, set()).update(filter(None, [one.manifest, *one.part_of]))
        if owner is not None or asked:
            self._mark = last.text if owner is None else newest[owner][0].text
            self._elsewhere, self._counts = True, owner is not None and 0 in newest
        return asked

    def take(self, answers: Sequence[Any]) -> list[Any]:
        """Takes over the manifests that process 0 lacks, and what was added to their steps.

        Returns the steps of which parts are missing, the disks that do not count, and the mark, if it was taken over.
        """
        notes: dict[str, dict[str, str]] = {}
        for own, identities in filter(None, answers):
            notes.update(own)
            self._identities_aside.update(identities)
        self.aside = self._steps(name for name, own in self._alone.items() if own & self._identities_aside)
        if self._elsewhere:
            try:
                with self._locked():
                    self._take_over(notes)
            except ExistsError as error:
                _log.warning("%s: what other hosts' disks have of the run does not count: %s", self._near.root, error)
                return [self._not_far(self._wanted.keys() | self._parts.keys()), self._stale, ""]
        lacking = {name for name in self._wanted if not self._is_whole(name)}
        lacking |= self._parts.keys() - self._wanted.keys()
        return [self._not_far(lacking), self._stale, self._mark]

    def _not_far(self, names: Collection[str]) -> list[int]:
        return sorted(self._steps(names) - self._steps(name for name in names if self._is_far(name)))

    def _steps(self, names: Iterable[str]) -> set[int]:
        return {step for name in names if (step := run.parse(name, self._near.prefix)) is not None}

    def _take_over(self, notes: dict[str, dict[str, str]]) -> None:
        store, root = self._near.store, self._near.root
        own = {name: parts.identities(store, posixpath.join(root, name)) for name in folders(self._near)}
        stale = [name for name, identities in own.items() if identities and self._wanted.get(name) not in identities]
        if self._counts:  # then the owner has deleted what is only a part of it, unless it has set it aside
            lone = (one for one in stale if not own[one] & self._identities_aside)
            for name in [one for one in lone if not parts.manifest_of(store, posixpath.join(root, one))]:
                parts.forget(store, posixpath.join(root, name))
                stale.remove(name)
        if stale:
            place = run.set_aside(store, root, [posixpath.join(root, name) for name in stale[::-1]])
            self.aside |= self._steps(name for name in stale if name not in self._wanted)
            _log.warning(
                "%s: a later job has saved on other disks; what does not count was set aside to %s", root, place
            )
        for name, own in notes.items():
            parts.take_over(store, posixpath.join(root, name), own, unpin=not self._parts)
        if self._mark:
            self._origin.take_over(self._mark.encode(), part=False)

    def _is_whole(self, name: str) -> bool:
        return parts.is_whole(self._near.store, posixpath.join(self._near.root, name), self._sizes.get(name))

    def _is_far(self, name: str) -> bool:
        step = run.parse(name, self._near.prefix)
        path = None if step is None else self._far.committed().get(step)
        identities = {*self._parts.get(name, ()), *filter(None, [self._wanted.get(name)])}
        return path is not None and identities <= parts.identities(self._far.store, path)
