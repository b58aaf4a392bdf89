"""The first call of a job with a local tier: finds out which processes share a disk, and which steps each disk has.

The disk of the previous job's process 0 has that job's manifests, and a mark that says so: it is authoritative. If this
job's process 0 has another disk, the manifests are copied there. If the authoritative disk is missing, the steps of
which other disks have parts are named.
"""

import contextlib
import logging
import os
import posixpath
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from .._processes.calls import Call
from ..errors import ExistsError, SaveError
from ..formats.treering import host_parts as parts
from ..stores.file_io import make_empty
from ..stores.nfs import refresh_dir_cache, wait_until
from ..stores.store import Store
from ..stores.temporary_names import final_name
from . import deleted, run_layout
from .host_disks import HostDisks, archived_identities, folders
from .origin import Origin, Standing
from .step_catalog import StepCatalog

_log = logging.getLogger("treering")
_OLD_SECONDS = 3600.0  # No discovery takes longer than this.
_LOOK_SECONDS = 2.5  # to wait for the marks of other processes on a network file system


def discover_hosts(
    call: Call, local: StepCatalog, remote: StepCatalog, origin: Origin, locked: Callable[[], Any]
) -> HostDisks | None:
    """Returns the disk of this host, as all processes of the job agree on it; None if all share one local directory.

    `locked` holds the leases of the run within a `with` block. Raises `SaveError` if a process cannot write to its
    local directory, and `MismatchError` if that is another run's.
    """
    leader, leaders = _leaders(call, local.store, local.root)
    if leaders == [0]:
        return None
    if call.index == 0:
        _log.info("%s: the hosts have disks of their own, %d in all", local.root, len(leaders))
    leads = call.index in leaders
    standing = origin.standing() if leads else None
    local.allow_missing_files()
    own = {name: posixpath.join(local.root, name) for name in (folders(local) if leads else ())}
    found = {name: parts.inventory(local.store, path) for name, path in own.items()}
    marks = sorted(deleted.noted(local.store, local.root)) if leads else []
    with contextlib.ExitStack() as locks:
        stock = _Stock(local, remote, origin, lambda: locks.enter_context(locked()))
        asked, unknown = call.gather_and_decide([standing, found, marks] if leads else None, stock.choose)
        names = [name for name, index in asked.items() if index == call.index]
        notes = {name: own_notes for name in names if (own_notes := parts.notes(local.store, own[name]))}
        archived = archived_identities(local, unknown if leads else ())
        missing, stale, mark = call.gather_and_decide(
            [notes, sorted(archived)] if notes or archived else None, stock.take
        )
        disks = HostDisks(local, remote, call.index, leads=leads, stale=leader in stale, missing=set(missing))
        disks.to_archive |= stock.to_archive
        disks.known |= stock.deleted | stock.copied
        if mark:  # Process 0's disk is authoritative from now on. No process continues before all know it.
            disks.take_part(origin, mark.encode(), ())
            call.gather_and_decide(None, lambda _: None)
    return disks


def _leaders(call: Call, store: Store, root: str) -> tuple[int, list[int]]:
    """Returns the lowest index of the processes that share this one's local directory, and those of all directories.

    Each process makes a file there for a moment, and looks which files of other processes it sees.
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
        call.gather_and_decide(None, lambda _: None)  # All files exist now.
        if not store.is_local(root):  # Over a network, new files of other hosts may show later.
            wait_until(lambda: first() == 0, lambda: refresh_dir_cache(store, root), _LOOK_SECONDS)
        mine = first()
        return mine, call.gather_and_decide(mine, lambda firsts: sorted(set(firsts)))
    finally:
        with contextlib.suppress(OSError):
            store.delete(own)
            _remove_old_marks(store, root)
            for folder in reversed(made):
                store.remove_folder(folder)


def _remove_old_marks(store: Store, root: str) -> None:
    """Removes the files of processes that were killed during this call."""
    for name in store.list(root):
        path = posixpath.join(root, name)
        there = store.stat(path) if (final_name(name) or "").startswith("process-") else None
        if there and time.time() - there.modified > _OLD_SECONDS:
            store.delete(path)


class _Stock:
    """The inventory of all disks, as process 0 sees it.

    `to_archive`: the identities of steps to archive on all disks. `deleted`: those of steps that were deleted.
    `copied`: those of uploaded steps that process 0's disk does not know.
    """

    def __init__(self, local: StepCatalog, remote: StepCatalog, origin: Origin, lock: Callable[[], Any]):
        self._local, self._remote, self._origin, self._lock = local, remote, origin, lock
        self._sizes: dict[str, dict[str, int]] = {}  # bytes of the array files on all disks, by step name
        self._wanted: dict[str, str] = {}  # identities of the valid manifests, by step name
        self._unknown: dict[str, set[str]] = {}  # identities of steps that have parts and no valid manifest
        self._stale: list[int] = []  # first processes of disks that left the run
        self._elsewhere = False  # True if not process 0's disk has the manifests
        self._owned = True  # True if the job has the authoritative disk
        self._committed: dict[int, str] | None = None  # the remote steps, listed on first use
        self._remote_identities: dict[str, set[str]] = {}  # their identities, by step name
        self._mark = ""  # that of the authoritative disk, or of another disk of that job
        self.to_archive: set[str] = set()
        self.deleted: set[str] = set()
        self.copied: set[str] = set()
        self._there: set[str] = set()  # the identities of steps of which any disk has a part

    def choose(self, reports: Sequence[Any]) -> list[Any]:
        """Returns which process is to send the manifest of which step, and the steps with parts but no manifest."""
        known: dict[int, tuple[Standing | None, dict[str, parts.Inventory]]] = {}
        alive: set[str] = set()
        for index, report in enumerate(reports):
            if report:
                found = {name: parts.Inventory(*one) for name, one in report[1].items()}
                known[index] = Standing(*report[0]) if report[0] else None, found
                self.deleted.update(report[2])
                for name, one in found.items():
                    self._sizes.setdefault(name, {}).update(one.sizes)
                    self._there.update(one.part_of, [one.manifest])
                    alive.add(one.manifest)
        self.deleted -= alive  # A crash interrupted their deletion.
        asked = self._choose({index: (one, found) for index, (one, found) in known.items() if one})
        self._stale = [index for index, (standing, _) in known.items() if not standing]
        for index, (_, found) in known.items():
            self._find_unknown(index, found)
        asked = {name: index for name, index in asked.items() if name not in self._unknown or self._owned}
        return [asked, sorted(self._unknown)]

    def _choose(self, newest: dict[int, tuple[Standing, dict[str, parts.Inventory]]]) -> dict[str, int]:
        if not newest:
            return {}
        best = max(standing[:2] for standing, _ in newest.values())
        last = next(standing for standing, _ in newest.values() if standing[:2] == best)
        owners = [n for n, (standing, _) in newest.items() if standing.token == last.token and not standing.part]
        owner = max(owners, key=lambda n: (any(one.manifest for one in newest[n][1].values()), -n), default=None)
        if owner == 0:
            self._wanted = {name: one.manifest for name, one in newest[0][1].items() if one.manifest}
            if len(owners) > 1:  # The job before was killed just after another disk replaced this one.
                self._mark = newest[0][0].text
            return {}
        self._owned = owner is not None
        asked: dict[str, int] = {}
        for index, (_, found) in newest.items():
            for name, one in found.items():
                identity = one.manifest if owner is not None else one.manifest or one.kept
                if identity and (owner is None or index == owner):
                    self._wanted[name], asked[name] = identity, index
        if owner is not None or asked:
            self._mark = last.text if owner is None else newest[owner][0].text
            self._elsewhere = True
        return asked

    def _find_unknown(self, index: int, found: dict[str, parts.Inventory]) -> None:
        """Finds the checkpoint ids that no valid manifest explains: the authoritative disk neither deleted nor replaced
        them.

        If that disk is missing, one of two ids may have replaced the other; which one is not known.
        """
        if index == 0 and self._owned:
            return  # `_take_over` looks at this disk, or else the first save does.
        for name, one in found.items():
            rest = {*one.part_of, *filter(None, [one.manifest])} - self.deleted - {self._wanted.get(name)}
            if rest and (name not in self._wanted or index in self._stale or not self._owned):
                self._unknown.setdefault(name, set()).update(rest)

    def take(self, answers: Sequence[Any]) -> list[Any]:
        """Adopts the manifests that process 0 lacks, with the pins and metrics of their steps.

        Returns the steps that miss parts or are unknown, the disks that no longer belong to the run, and the mark if
        this disk adopted it, else "".
        """
        notes: dict[str, dict[str, str]] = {}
        known_archived: set[str] = set()
        for own, identities in filter(None, answers):
            notes.update(own)
            known_archived.update(identities)
        was_archived = {name for name, own in self._unknown.items() if own & known_archived}
        self.to_archive.update(*(self._unknown[name] for name in was_archived))
        missing = {
            name for name in self._unknown if name not in was_archived and not (self._owned and name in self._wanted)
        }
        remote = {name for name, own in self._unknown.items() if self._is_remote(name, own)}
        self.copied.update(*(self._unknown[name] for name in remote if not self._is_damaged_remote(name)))
        self.to_archive.update(*(own for name, own in self._unknown.items() if name not in remote))
        if self._elsewhere:
            try:
                self._lock()
                missing |= self._take_over(notes)
            except ExistsError as error:
                _log.warning("%s: the steps on other hosts' disks are ignored: %s", self._local.root, error)
                return [self._not_remote(self._wanted.keys() | self._unknown.keys()), self._stale, ""]
        missing |= {name for name in self._wanted if not self._is_complete(name)}
        return [self._not_remote(missing), self._stale, self._mark]

    def _not_remote(self, names: Collection[str]) -> list[int]:
        """Returns the steps with these names that are not in the remote tier. They are archived on all disks."""
        found: set[int] = set()
        for name in names:
            own = {*self._unknown.get(name, ()), *filter(None, [self._wanted.get(name)])}
            if (
                not self._is_remote(name, own)
                and (step := run_layout.parse_step_name(name, self._local.prefix)) is not None
            ):
                found.add(step)
                self.to_archive |= own
        return sorted(found)

    def _take_over(self, notes: dict[str, dict[str, str]]) -> set[str]:
        """Adopts manifests. Returns the names of stale steps here, which are archived when the run is acquired."""
        store, root = self._local.store, self._local.root
        own = {name: parts.identities(store, posixpath.join(root, name)) for name in folders(self._local)}
        stale = [name for name, identities in own.items() if identities and self._wanted.get(name) not in identities]
        for name in list(stale):
            path = posixpath.join(root, name)
            if name in notes and parts.has_files_of(store, path, notes[name]):
                stale.remove(name)  # A job was killed before it noted its part of the new step.
            elif own[name] <= self.deleted:
                parts.forget(store, path)
                stale.remove(name)
        later = {name for name in stale if not parts.manifest_of(store, posixpath.join(root, name))}
        at_once = [name for name in stale if name not in later or name in notes]
        self.to_archive.update(*(own[name] for name in stale))
        if at_once:
            place = run_layout.archive_steps(store, root, [posixpath.join(root, name) for name in at_once[::-1]])
            _log.warning("%s: a later job has saved on other disks; older steps were archived in %s", root, place)
        for name, one in notes.items():
            parts.take_over(store, posixpath.join(root, name), one, unpin=self._owned)
        deleted.note_all(store, root, self.deleted & self._there - deleted.noted(store, root))
        if self._mark:  # Without the authoritative disk, this disk stays a part until the run is acquired.
            self._origin.take_over(self._mark.encode(), part=not self._owned)
        for name in later.difference(at_once):
            self._unknown.setdefault(name, set()).update(own[name])
        return later.difference(at_once)

    def _is_complete(self, name: str) -> bool:
        return parts.is_complete(self._local.store, posixpath.join(self._local.root, name), self._sizes.get(name))

    def _is_remote(self, name: str, identities: Collection[str]) -> bool:
        path = self._remote_path(name)
        if path and name not in self._remote_identities:
            self._remote_identities[name] = parts.identities(self._remote.store, path)
        return path is not None and set(identities) <= self._remote_identities[name]

    def _is_damaged_remote(self, name: str) -> bool:
        step, path = run_layout.parse_step_name(name, self._local.prefix), self._remote_path(name)
        return step is not None and path is not None and self._remote.is_damaged(step, path)

    def _remote_path(self, name: str) -> str | None:
        if self._committed is None:
            self._committed = self._remote.committed()
        step = run_layout.parse_step_name(name, self._local.prefix)
        return None if step is None else self._committed.get(step)
