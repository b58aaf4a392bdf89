"""Reads a run in two tiers: finds which tier has which step, and which copy of a step to read."""

import contextlib
import logging
import os
import posixpath
from collections.abc import Iterator, Mapping

from ..._core.calls import Call
from ..._core.entries import step_number
from ..._core.leaf_paths import join_names
from ..._save.pending import as_save_error
from ...errors import CorruptError, MismatchError, NotFoundError
from ...formats.treering import host_files, summary
from ...keep import Saved
from ...stores.read_errors import is_momentary
from .. import run_layout
from ..plain_run import PlainRun
from ..step_fallback import StepCopy
from . import step_states
from .host_group import HostGroup
from .journal import read_generations
from .local_tier import LocalTier
from .meeting import Meeting, find_hosts

_log = logging.getLogger("treering")


class TierReads:
    """The local and the remote directory of one run. See `RunDirectory` for the methods.

    Both copies of a step have the same manifest, byte for byte. Local steps belong to the run until another job writes
    the remote tier; the journal and the generations of the run show that. After that, only local steps that are also
    remote are used.

    `discover_hosts` sets `host_group` if the hosts of this job, or of an earlier one, have local disks of their own. A
    restore then reads each file from the disk of its host, or from that of another host over the network, or remotely.
    """

    def __init__(self, local: PlainRun, remote: PlainRun):
        if local.steps.store.real_path(local.root) == remote.steps.store.real_path(remote.root):
            raise MismatchError(f"local={local.root!r}: expected another directory, found that of the run")
        self.local, self.remote = local, remote
        # Steps are saved to the local tier, and messages name the run by the path of its remote tier.
        self.steps, self.root = local.steps, remote.root
        self.tier = LocalTier(local.steps, remote.root)
        self.host_group: HostGroup | None = None
        self.index = 0  # of this process
        self._claimed = False
        self._copied: dict[int, tuple[object, str]] = {}  # version and identity of the uploaded steps
        self._saved: set[int] = set()  # steps that are local, and not known to be uploaded

    @property
    def back_to(self) -> int | None:
        return self.local.back_to

    @back_to.setter
    def back_to(self, step: int | None) -> None:
        self.local.back_to = self.remote.back_to = step

    @property
    def restored_step(self) -> int | None:
        return self.local.restored_step

    @restored_step.setter
    def restored_step(self, step: int | None) -> None:
        self.local.restored_step = self.remote.restored_step = step

    @property
    def lost(self) -> bool:
        return self.local.lost or self.remote.lost

    def discover_hosts(self, call: Call) -> None:
        """Finds out which processes share a disk, and what the disks have. Every process calls it first."""
        self.index = call.index
        with as_save_error(self.local.root):
            hosts = find_hosts(call, self.local.steps.store, self.local.root)
            # The other files of the steps may be on hosts that this job lacks.
            had_others = call.broadcast(lambda: self.tier.journal.had_other_disks)
            if len(set(hosts)) == 1 and not had_others:
                return
            if call.index == 0:
                _log.info("%s: the hosts have disks of their own, %d in all", self.local.root, len(set(hosts)))
            self.local.steps.allow_missing_files()
            meeting = Meeting(self.tier, self.remote.steps, self._locked)
            self.host_group = HostGroup(self.tier, self.remote.steps, meeting, call, hosts, self.local.acquire)
        if self.host_group.missing and not self.index:
            _log.warning(
                "%s: steps %s are ignored: some of their files are neither uploaded nor on a disk of this job's hosts. "
                "The cause may also be another job that held the run when this one began",
                self.local.root, join_names(tuple(map(str, sorted(self.host_group.missing)))),
            )  # fmt: skip

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds both leases, while the first call of a job changes the run."""
        self.local.acquire()
        try:
            self.remote.acquire()
            yield
        finally:
            self.remote.release()
            self.local.release()

    def all_steps(self) -> dict[int, str]:
        return dict(sorted({**self.remote.all_steps(), **self.local_steps()}.items()))

    def newest_step(self) -> int | None:
        return max(self.all_steps(), default=None)

    def step_copies(self, step: int | None = None) -> list[StepCopy]:
        local, remote = self.local_steps(), dict(self.remote.located_steps())
        if step is not None and (number := step_number(step)) not in local:
            return self.remote.step_copies(number)
        places: list[StepCopy] = []
        for number in sorted({*local, *remote}, reverse=True) if step is None else [step_number(step)]:
            if number in local:
                places.append(self.copy_at(number, local[number]))
            if number in remote and not (number in local and self._differ(local[number], remote[number].path)):
                places.append(self.remote.copy_at(number, *remote[number]))
        return places

    def copy_at(self, step: int, path: str, format: str | None = None) -> StepCopy:
        name = posixpath.basename(path)
        if self.host_group and self._side(path) is self.local and self.host_group.exchange.find(name):
            return StepCopy(step, self.host_group.exchange.store(name), self.tier.path(name))
        return self._side(path).copy_at(step, path, format)

    def _find_remote(self, name: str) -> str:
        """Returns the path of the remote step that is the same as a local step, or "" if there is none."""
        remote, step = self.remote.steps, run_layout.parse_step_name(name, self.local.steps.prefix)
        to = remote.committed().get(step) if step is not None else None
        if step is None or to is None or remote.is_damaged(step, to):
            return ""
        return to if self.is_copied(step, self.tier.path(name), to) else ""

    def readable_copies(self, step: int | None = None) -> list[StepCopy]:
        """Returns the copies of steps that can be read: if each host has its own disk, those with all files.

        Before `begin_restore`, which all processes call together, only the disk of this host can be read.
        """
        places = self.step_copies(step)
        if not self.host_group:
            return places
        all_steps = {place.step for place in places}
        remote = {place.step for place in places if self._side(place.path) is self.remote}
        local = {place.step for place in places if self._side(place.path) is self.local and self._is_readable(place)}
        places = [one for one in places if one.step in (remote if self._side(one.path) is self.remote else local)]
        # An unreadable step matters only if it is newer than all others: an older step would be read instead of it.
        newest = max({*remote, *local}, default=-1)
        if missing := sorted(one for one in all_steps if one > newest):
            _log.warning(
                "%s: steps %s are only on the disks of several hosts; `restore` reads them, in all processes together",
                self.root, join_names(tuple(map(str, missing))),
            )  # fmt: skip
            if step is not None:
                raise NotFoundError(
                    f"{self.root}: expected step {step} on the disk of this host, found it only on those of several "
                    "hosts; restore it in all processes together"
                )
        return places

    def _is_readable(self, place: StepCopy) -> bool:
        assert self.host_group
        if found := self.host_group.exchange.find(posixpath.basename(place.path)):
            return found.is_readable
        store = self.local.steps.store
        listed, own = host_files.listed_files(store, place.path), host_files.sizes(store, place.path)
        return listed is not None and all(own.get(file.name) == file.size for file in listed)

    def valid_steps(self, *, foreign: bool = False) -> list[Saved]:
        local, remote = self.local_steps(), self.remote.steps.committed()
        found = {one.step: one for one in self.remote.valid_steps(foreign=foreign)}
        for one in self.local.valid_steps():
            if one.step in local:
                same = one.step in found and self.is_copied(one.step, local[one.step], remote.get(one.step))
                metrics = found[one.step].metrics if same else {}  # A remote step that differs will be replaced.
                found[one.step] = Saved(one.step, {**one.metrics, **metrics}, one.created, one.nbytes)
        return [found[step] for step in sorted(found)]

    def mark_damaged(self, place: StepCopy) -> None:
        side = self._side(place.path)
        side.mark_damaged(place)

    def begin_restore(self, call: Call) -> None:
        if self.host_group:
            self.host_group.exchange.locate(call, self._located_identities, self._find_remote)

    def end_restore(self) -> None:
        if self.host_group:
            self.host_group.exchange.end()

    def _located_identities(self) -> dict[str, str]:
        found = {path: host_files.identity(self.local.steps.store, path) for path in self.local_steps().values()}
        return {posixpath.basename(path): identity for path, identity in found.items() if identity}

    def check_new(self) -> None:
        """Checks both tiers of a run without steps. Raises `CorruptError` if the local disks have parts of steps."""
        if self.host_group and self.host_group.missing:
            missing = join_names(tuple(map(str, sorted(self.host_group.missing))))
            raise CorruptError(
                f"{self.root}: expected a step, found none, and in {self.local.root} only some files of steps "
                f"{missing}. The other files are neither uploaded nor on a disk of this job's hosts: restart with the "
                "hosts that have them. If another job held the run when this one began, end it and restart. If the "
                "files are lost, remove that directory on all hosts to start over"
            )
        has_last_local_tier = bool(self.tier.journal.contents.claims) and self._is_heir()
        self.remote.check_new(has_last_local_tier=has_last_local_tier)
        self.local.check_new(local=True)

    def path(self, step: int) -> str:
        return self.all_steps().get(step) or self.local.path(step)

    def committed_path(self, step: int) -> str:
        return self.step_copies(step)[0].path

    def pinned(self) -> list[int]:
        local = self.local_steps()
        return sorted({*self.remote.pinned(), *(step for step in self.local.pinned() if step in local)})

    def uncopied(self) -> list[int]:
        """Returns the steps that are not uploaded yet, or not known to be."""
        local = self._known_local()  # Listed once, because another job may archive steps meanwhile.
        unknown = self._not_known_remote(local)
        if not unknown:
            return []
        try:
            remote = self.remote.steps.committed()
            return [step for step in unknown if not self.is_copied(step, local[step], remote.get(step))]
        except OSError as error:
            if not is_momentary(error):
                raise
            return unknown

    def _not_known_remote(self, local: Mapping[int, str]) -> list[int]:
        return [step for step, path in local.items() if not self._known_copied(step, path)]

    def _known_local(self) -> dict[int, str]:
        return self.local.steps.committed() if self._claimed else self.local_steps()

    def _side(self, path: str) -> PlainRun:
        return self.remote if os.path.dirname(path) == self.remote.root else self.local

    def _is_heir(self) -> bool:
        """Returns True if the steps on this disk belong to the run.

        They do if no other job has written the remote tier since the last claim of this disk, and if the run is new.

        Raises the errors of `Journal.read`.
        """
        self.tier.journal.read()
        generations = read_generations(self.remote.steps.store, self.remote.root)
        is_empty = generations is None and not self.remote.steps.committed()
        disks = {0: step_states.DiskReport(self.tier.journal.contents, {})}
        claim = step_states.last_claim(disks, generations, is_empty=is_empty)
        return bool(step_states.heirs_of(disks, claim, is_new=is_empty))

    def local_steps(self) -> dict[int, str]:
        """Returns the local steps that belong to the run, and their paths."""
        own = self.local.steps.committed()
        if self.host_group:
            return {step: path for step, path in own.items() if self.host_group.is_of_run(path)}
        if not own or self._claimed:
            return own
        if self._is_heir():
            store, borrowed = self.local.steps.store, self.tier.journal.contents.borrowed
            return {n: at for n, at in own.items() if not borrowed or host_files.identity(store, at) not in borrowed}
        remote = self.remote.steps.committed()
        found = {step: path for step, path in own.items() if step in remote and not self._differ(path, remote[step])}
        if others := [str(step) for step in own if step not in found]:
            _log.warning(
                "%s: another job has written %s since steps %s were saved here; they are ignored",
                self.local.root, self.root, join_names(tuple(others)),
            )  # fmt: skip
        return found

    def _abandoned(self) -> list[str]:
        """Returns the paths of local steps without an equal remote step: other jobs have continued without them."""
        local = self.local.steps.committed()
        remote = self.remote.steps.committed() if local else {}
        return [path for step, path in local.items() if step not in remote or self._differ(path, remote[step])]

    def _differ(self, path: str, other: str) -> bool:
        """Returns True if a local and a remote step surely differ. With a damaged manifest they may be the same."""
        try:
            return summary.identity(self.local.steps.store, path) != summary.identity(self.remote.steps.store, other)
        except (CorruptError, FileNotFoundError):
            return False

    def _known_copied(self, step: int, path: str) -> bool:
        seen = summary.stat_manifest(self.local.steps.store, path)
        return seen is not None and step in self._copied and self._copied[step][0] == seen.version

    def is_copied(self, step: int, path: str, remote: str | None) -> bool:
        """Returns True if the local step at `path` is the same as the remote step at the path `remote`."""
        if remote is None:
            return False
        if not self._known_copied(step, path):
            try:
                seen = summary.stat_manifest(self.local.steps.store, path)
                identity = summary.identity(self.local.steps.store, path)
                if identity != summary.identity(self.remote.steps.store, remote):
                    return False
            except (CorruptError, FileNotFoundError):
                return False
            if seen:
                self._note_copied(step, seen.version, identity)
        return True

    def _note_copied(self, step: int, version: object, identity: str) -> None:
        self._copied[step] = version, identity
        seen = summary.stat_manifest(self.local.steps.store, self.local.step_path(step))
        if seen is None or seen.version == version:  # Retention may delete it at once. Otherwise it was saved again.
            self._saved.discard(step)
