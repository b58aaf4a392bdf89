"""The hosts of a job, each with a disk of its own that has a part of every step.

Every disk has the manifests. Process 0 decides; the leader of each other host, one of its processes, does the same on
its disk: in the call of a save, of a rewind or of a deletion, and at the end of every upload. Steps are uploaded in
rounds, which process 0 leads and the others `follow`.
"""

import contextlib
import logging
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._core.calls import Call
from ..._processes import coordinator
from ..._save.pending import as_save_error
from ...errors import TreeringError
from ...formats.treering import host_files, pins, removal
from .. import run_layout
from ..step_catalog import StepCatalog
from .exchange import Exchange
from .joint_upload import JointUpload, Progress, only_process_0, take_part
from .journal import Claim, Generations
from .local_tier import LocalTier, Orders, decode, encode
from .meeting import Meeting

_log = logging.getLogger("treering")


class HostGroup:
    """The disks of the job. `missing`: steps of the run that lack files which no disk of the job has.

    Every process makes one, in a call of all. `hosts`: for each process, the lowest process that shares its disk. It
    leads the host: it changes the disk and serves its files.
    """

    def __init__(
        self,
        local: LocalTier,
        remote: StepCatalog,
        meeting: Meeting,
        call: Call,
        hosts: Sequence[int],
        acquire: Callable[[], None],
    ):
        """`acquire` acquires the lease of this host's disk."""
        self._acquire = acquire
        self.hosts, leads = tuple(hosts), hosts[call.index] == call.index
        self._local, self._remote, self._meeting = local, remote, meeting
        self.index, self._leads = call.index, leads
        self._begun: dict[str, str] | None  # until the claim: the names and identities of the steps of the run
        self._begun, self.missing = meeting.run(call, leads=leads)
        self.exchange = Exchange(local, remote.store, call, hosts)
        self._orders: Orders | None = None  # of the claim, until a commit shows that all disks have obeyed
        self._call: Call | None = None  # the round that process 0 leads

    # Changes that all hosts make. Every process of the job calls these methods in the same order.

    def claims(self) -> list[Claim]:
        """Returns, in process 0, the claims that the disks had recorded when this job began."""
        return self._meeting.claims()

    def claim(self, base: Generations, found: Generations | None) -> None:
        """Claims the run for all disks. Process 0 calls it; `orders` tells the other disks. See `Meeting.orders`."""
        self._orders = self._meeting.orders(base, found)
        self._local.obey(self._orders)
        self._on_claim()

    def orders(self) -> Any:
        """Returns, in process 0, what the other disks have to do before a save."""
        return self._orders and encode(self._orders)

    def obey(self, orders: Any) -> None:
        """Obeys the orders of process 0 on the disk of this host."""
        if orders is not None:
            with as_save_error(self._local.root):
                if self._leads and self.index:
                    self._acquire()  # A job that stood still for long must not change this disk after another one.
                    self._local.obey(decode(orders, Orders))
            self._on_claim()

    def _on_claim(self) -> None:
        """Notes that all steps on the disk of this host belong to the run."""
        self._begun = None
        self.missing.clear()

    def is_of_run(self, path: str) -> bool:
        """Returns True if a step on the disk of this host belongs to the run, and its files are on disks of the job."""
        if self._begun is None:
            return True
        identity = host_files.identity(self._local.store, path)
        return self._begun.get(posixpath.basename(path)) == identity

    def claim_together(self, call: Call, claim: Callable[[], bool]) -> bool:
        """Claims the run on all disks before anything is changed. Returns False if `claim` does in process 0."""

        done, orders = call.broadcast(lambda: [claim(), self.orders()])
        self.obey(orders)
        call.gather_and_decide(None, lambda _: None)
        return done

    def committed(self) -> None:
        """Notes that a step was committed: all disks have obeyed the orders that came with it."""
        self._orders = None

    def replace(self, path: str) -> None:
        """Records, before a save, the step that it is to replace on the disk of this host.

        Once a disk has the new manifest, this one is known to be older, even on disks that a later job has without it.
        """
        if self._leads:
            self._local.journal.write()  # It may have been removed while this job runs.
            self._local.retire([path], "deleted")

    def delete(self, step: int) -> None:
        """Deletes a step that process 0 has deleted."""
        if paths := self._own_paths(step):
            self._local.retire(paths, "deleted")
            for path in paths:
                with removal.logging_errors(path):
                    removal.delete(self._local.store, path)

    def clear(self, call: Call) -> None:
        """Deletes the steps that process 0 has deleted, before its lease is released. Every process calls it."""
        orders = call.broadcast(lambda: encode(Orders(retired=self._local.journal.contents.retired)))
        if self._leads and self.index:
            with removal.logging_errors(self._local.root):
                self._local.obey(decode(orders, Orders))
                self._local.clear()
        call.gather_and_decide(None, lambda _: None)

    def pin(self, step: int, wanted: bool) -> None:
        """Does to a step on this disk what `pins.pin` does."""
        for path in self._own_paths(step):
            if host_files.identity(self._local.store, path):
                pins.pin(self._local.store, path, wanted)

    def archive_after(self, step: int) -> None:
        """Archives the steps after one, as process 0 has done."""
        paths = self._paths(lambda one: one > step)
        self._local.retire(paths, "archived")
        self._local.archive(paths)

    def _own_paths(self, step: int) -> list[str]:
        """Returns the folder of a step, unless it belongs to an abandoned branch, which the claim archives."""
        paths = self._paths(lambda one: one == step)
        if self._begun is None:
            return paths
        own = {path: host_files.identity(self._local.store, path) for path in paths}
        return [path for path in paths if own[path] in ("", self._begun.get(posixpath.basename(path)))]

    def _paths(self, chosen: Callable[[int], bool]) -> list[str]:
        if not (self._leads and self.index):
            return []
        steps = {name: run_layout.parse_step_name(name, self._local.steps.prefix) for name in self._local.folders()}
        return [self._local.path(name) for name, step in steps.items() if step is not None and chosen(step)]

    # Rounds of uploads, in process 0

    @contextlib.contextmanager
    def round(self, what: str, timeout: float) -> Iterator[None]:
        """Lets all hosts upload steps within the block, and remove what left the run after it."""
        call = coordinator.begin_call(what, timeout=timeout)
        with coordinator.ending_call(call):
            call.set_activity("uploading steps")
            found: list[dict[str, str]] = []
            call.gather_and_decide(None, lambda reports: found.extend(filter(None, reports)))
            self._call = call
            try:
                yield
            finally:
                self._call = None
            call.broadcast(lambda: None)
            call.broadcast(lambda: encode(self._orders_after(found)))
            call.gather_and_decide(None, lambda _: None)  # Wait for the deletions of all, however long they take.
            there = {identity for disk in found for identity in disk.values()}
            gone = self._local.journal.contents.retired.keys() - there - set(self._local.identities().values())
            self._local.journal.forget(gone)
            call.close()

    def check(self) -> None:
        """Raises the error of another process in this round, or `PeerError` if a process has died."""
        if call := self._call:
            call.check_all()

    def cancel(self, reason: BaseException) -> None:
        """Cancels the round that process 0 leads."""
        if call := self._call:
            call.cancel(reason)

    def joint_upload(self, path: str, to: str) -> JointUpload:
        """Returns the peers that upload the step at `path` to the path `to` together with process 0."""
        assert self._call is not None
        return JointUpload(self._call, self._local, self.exchange, path, to)

    def _orders_after(self, found: Sequence[dict[str, str]]) -> Orders:
        """Returns what the other disks have to do after a round, given the identities of the steps that they have."""
        current, journal = self._local.identities(), self._local.journal
        manifests: dict[str, str] = {}
        strange: dict[str, str] = {}
        for name, identity in sorted({item for disk in found for item in disk.items()}):
            if identity == current.get(name):
                continue
            if name in current:
                if not current[name] and self._local.has_manifest(name):
                    continue  # This disk cannot read it now.
                manifests |= self._local.manifest_of(name)
            if identity and identity not in journal.contents.retired and (why := self._why_strange(name, identity)):
                strange[identity] = why
        if strange:
            journal.retire(strange)
        # A change that was cut short has left a record of a step that is still here.
        retired = {one: why for one, why in journal.contents.retired.items() if one not in current.values()}
        return Orders(retired=retired, manifests=manifests)

    def _why_strange(self, name: str, identity: str) -> str:
        """Returns why a step that only other disks have left the run: "deleted" if it is complete remotely.

        Returns "" if that cannot be known now, and while the remote step is damaged.
        """
        step = run_layout.parse_step_name(name, self._local.steps.prefix)
        try:
            path = self._remote.committed().get(step) if step is not None else None
            if step is not None and path is not None:
                if self._remote.is_damaged(step, path):
                    return ""
                if host_files.identity(self._remote.store, path) == identity:
                    return "deleted"
        except OSError:
            return ""
        _log.warning(
            "%s: other hosts' disks have parts of %s that this disk does not know: the step is ignored, and archived",
            self._local.root, name,
        )  # fmt: skip
        return "archived"

    # In the other processes

    def follow(self, what: str, timeout: float, on_progress: Progress) -> None:
        """Takes part in a round. `on_progress` is that of `joint_upload.take_part`."""
        try:
            call = coordinator.begin_call(what, timeout=timeout)
            with coordinator.ending_call(call):
                call.set_activity("uploading steps")
                mine = self._local.identities() if self._leads else None
                call.gather_and_decide(mine, only_process_0)
                local = self._local if self._leads else None
                while job := call.broadcast(only_process_0):
                    take_part(call, local, self.exchange, self.index, *job, on_progress=on_progress)
                orders = call.broadcast(only_process_0)
                if self._leads:
                    with removal.logging_errors(self._local.root):
                        self._local.obey(decode(orders, Orders))
                        self._local.clear()
                call.gather_and_decide(None, only_process_0)
                call.close()
        except (TreeringError, OSError) as error:  # Process 0 reports it to the user.
            _log.info("%s: %s ended: %s", self._local.root, what, error)
