"""A run in two tiers: steps are saved to the local tier and uploaded from there to the remote tier."""

import logging
import os
import posixpath
import time
from collections.abc import Callable, Collection, Sequence

from ... import stores
from ..._core.calls import Call
from ..._core.entries import step_number
from ...errors import CorruptError, ExistsError, NotFoundError, SaveError
from ...formats.treering import copy, metrics, pins, removal, summary
from ...keep import Policy, Saved
from ...stores import probe
from ...stores.read_errors import is_full
from .. import run_layout
from ..metrics import LateMetrics
from ..pending_saves import Failures, PendingSaves
from ..plain_run import PlainRun
from ..retention import Retention
from ..run_directory import RunDirectory
from ..run_layout import RunLayout
from ..step_catalog import StepCatalog
from ..step_fallback import StepCopy
from .host_copies import HostCopies
from .joint_changes import JointChanges
from .journal import Claim, Generation
from .local_tier import clear_steps
from .tier_reads import TierReads
from .uploader import Uploader, upload_error

_log = logging.getLogger("treering")
_POLL_SECONDS = 0.1


class TieredRun(TierReads):
    """Saves steps locally and uploads them. The next save archives local steps of abandoned branches."""

    def __init__(
        self,
        local: PlainRun,
        remote: PlainRun,
        keep: Policy | None,
        bytes_per_second: float | None,
        notify: Callable[[BaseException], None],
        timeout: float,
        copies: int,
    ):
        super().__init__(local, remote)
        self._keep, self._timeout, self._copies = keep, timeout, copies
        self._process = os.getpid()
        self._seen_remote: Sequence[Saved] = []  # the valid steps of the remote tier, as of the last listing
        self._ended = False
        self._dropped: dict[int, str] = {}  # steps that the policy has deleted remotely, and their identities
        local.on_delete, remote.on_delete = self._on_local_delete, self._on_remote_delete
        self._retain: Callable[[int | None], None] = lambda step: None
        self._ever_remote: set[int] = set()  # A save looks at the remote tier only for these steps.
        self._generation = Generation(remote.steps.store, remote.root)
        self.remote_retention = Retention(remote, keep)
        self._has_deleted = False  # True if local steps were deleted since a save last waited for room
        self.host_changes: JointChanges | None = None
        self._uploader = Uploader(self, self.remote_retention, bytes_per_second, notify, timeout)

    @property
    def uploads(self) -> "TieredRun":
        return self

    @property
    def claimed(self) -> bool:
        """True if this process holds the leases of both tiers, and the local steps belong to the run."""
        return self._claimed and not self.lost and os.getpid() == self._process

    is_held = False  # Each of the two directories has its own lease.

    @property
    def lease_seconds(self) -> float:
        return self.local.lease_seconds + self.remote.lease_seconds

    def start_upload(self) -> None:
        """Uploads missing steps in the background, and deletes the steps that the policy does not keep."""
        self._uploader.begin()

    def is_on_two_hosts(self, path: str) -> bool:
        """Returns True if the disks of two hosts have each file of the local step at a path."""
        return self.host_changes is not None and self.host_changes.is_on_two_hosts(path)

    @property
    def uploading_step(self) -> int | None:
        return self._uploader.step

    @property
    def busy(self) -> bool:
        return self._uploader.busy

    def lift_limit(self) -> None:
        """Ends the limit of bytes a second. A save may wait for room that an upload frees."""
        self._uploader.lift_limit()

    def discover_hosts(self, call: Call) -> None:
        super().discover_hosts(call)
        group, copies = self.host_group, None
        if self._copies > 1 and group and len(set(group.hosts)) > 1:
            copies = HostCopies(self.tier, group.exchange, group.hosts, self.root, self._timeout)
        elif self._copies > 1 and not self.index:
            _log.warning(
                "%s: local_copies=2: found one disk; if it is lost, so are the steps that are not uploaded; for a "
                "second copy give each of several hosts a disk of its own", self.local.root,
            )  # fmt: skip
        if group:
            self.host_changes = JointChanges(self.root, self.local.root, group, self._uploader, copies, self.retain)

    # Writing

    def _claim(self) -> None:
        """Acquires both leases, and archives local steps that do not belong to the run."""
        self.local.acquire()
        if self._claimed:
            if self.remote.lost:
                self.remote.acquire()  # This raises the error.
            self._uploader.check()
            self.tier.journal.write()
            return
        self.remote.acquire()
        is_heir = self.host_group is None and self._is_heir()  # Before this job takes a generation.
        claims = self.host_group.claims() if self.host_group else self.tier.journal.contents.claims
        with self._generation.taking(claims) as (base, found):
            if self.host_group:
                self.host_group.claim(base, found)
            else:
                # Archive first: the claim declares that all local steps belong to the run.
                self.tier.archive(() if is_heir else self._abandoned())
                disk = (self.tier.journal.disk,)
                claim = Claim(base.next, base.written_by, disk, disk if is_heir else (), base.series)
                self.tier.journal.claim(claim, {})
        self._ever_remote.update(self.remote.steps.committed())
        self._claimed = True
        self._uploader.begin()

    def reserve_step(self, step: int, on_exists: str, pending_steps: Collection[int | None]) -> tuple[str, bool] | None:
        self._claim()
        if self.back_to is not None:
            self.remote.check_movable_after(self.back_to)
        if step in self._ever_remote and self.remote.reserve_step(step, on_exists, pending_steps) is None:
            return None
        remote = () if self.back_to is not None else self._ever_remote
        complete = [
            one for one in remote if not (one > step and self.remote.steps.is_damaged(one, self.remote.step_path(one)))
        ]
        return self.local.reserve_step(step, on_exists, pending_steps, complete)

    def acquire_for_save(self) -> None:
        self._claim()
        if self.back_to is not None:
            self._archive_after(self.back_to)

    def clear_finished(self) -> None:
        for one in (self.local, self.remote):
            one.unmark_finished()

    def before_write(self, retain: Callable[[int | None], None]) -> bool:
        self._retain = retain
        retain(None)  # No save is running now. This deletes the steps that were uploaded since the last save.
        return True  # A local disk may not have room for another step.

    def wait_for_room(self, problem: str, retain: Callable[[], None], check: Callable[[], None]) -> str | None:
        logged = False
        while True:
            busy, step = self.busy, self.uploading_step  # Read first: an upload may end during `retain`.
            retain()
            if self._has_deleted:  # Other hosts have perhaps not deleted their files yet.
                self._has_deleted = False
                return None
            if not busy or not self.claimed:
                error = self._uploader.error
                return f"uploading steps failed: {error}" if error else "no upload under way frees room"
            if step is not None and not logged:
                _log.info("%s; the save waits until step %d is uploaded and an old step is deleted", problem, step)
                logged = True
            while self.busy and self.claimed and self.uploading_step == step:
                check()
                time.sleep(_POLL_SECONDS)

    def on_commit(self, step: int | None, retain: Callable[[int | None], None]) -> None:
        if step is not None:
            self._saved.add(step)
            self._copied.pop(step, None)
            if self.host_group:
                self.host_group.committed()
        self._ended = False
        self._uploader.begin()

    def protected_steps(self) -> set[int]:
        """Returns the local steps that must stay: those that the policy keeps and that may not be uploaded yet."""
        valid = self.local.valid_steps()
        wanted = {one.step for one in valid if self._keep is None or one is valid[-1]}
        if self._keep is not None:  # The remote tier alone may have newer steps.
            both = {one.step: one for one in [*self._seen_remote, *valid]}
            wanted |= self._keep.kept([both[step] for step in sorted(both)])
        self._saved -= {one.step for one in valid} - wanted  # These may be deleted without an upload.
        return {*self.local.protected_steps(), *wanted.intersection(self._not_known_remote(self._known_local()))}

    def retain(self) -> None:
        """Deletes old local steps, as after a save."""
        self._retain(None)

    def end_writing(self) -> SaveError | None:
        if self.host_changes:
            self.host_changes.wait_for_copies()  # They write to this disk, which the next job may acquire after this.
        if self.index:
            self._uploader.lift_limit()
            self._uploader.wait()  # Process 0 leads the upload and waits for it there.
        own = self._claimed and os.getpid() == self._process and not self._ended
        problem = self._problem(self._finish_uploads()) if own else None
        self._claimed = False
        for one in (self.remote, self.local):
            try:
                one.end_writing()
            except BaseException:  # Release the other lease as well, and return the problem with the upload.
                _log.exception("%s: the lease of the run was not released", one.root)
        return problem

    def remove(self, path: str, *, guard: Callable[[], None] | None = None) -> Callable[[], bool]:
        return self._side(path).remove(path, guard=guard)

    def pin(self, step: int, wanted: bool) -> None:
        places = self.step_copies(step)
        if places[0].path in self.local_steps().values():  # First: an upload that ends meanwhile then copies the pin.
            pins.pin(self.local.steps.store, places[0].path, wanted)
        if path := self.remote.steps.committed().get(step_number(step)):
            pins.pin(self.remote.steps.store, path, wanted)

    def delete(self, step: int) -> None:
        def deletable() -> tuple[list[StepCopy], bool]:
            """Returns the copies of the step, and True if one is remote."""
            places = self.step_copies(step)
            for place in places:
                self._side(place.path).check_unpinned_and_unlinked(place.path)
            return places, any(self._side(place.path) is self.remote for place in places)

        _, is_remote = deletable()
        if is_remote:
            self._claim()
        with self._uploader.paused():
            places, is_remote = deletable()  # Listed again: until the pause an upload may have ended.
            self._seen_remote = []
            if is_remote:
                self._generation.enter()  # Otherwise an older local tier, which this job lacks, would upload it again.
            for place in places:  # Local first: a step that is only local would be uploaded again.
                self._side(place.path).delete(step)
            self._saved.discard(step_number(step))
            self._ever_remote.discard(step_number(step))

    def rewind(self, step: int) -> None:
        if step > 0:
            self.committed_path(step)
        self._claim()
        self._archive_after(step)

    def _archive_after(self, step: int) -> None:
        with self._uploader.paused():
            self._seen_remote = []
            for one in (self.local, self.remote):
                one.check_movable_after(step)
            if self.host_group:
                later = [path for one, path in self.local.steps.committed().items() if one > step]
                self.tier.retire(later, "archived")
            self.local.archive_after(step)
            self._generation.enter()
            self.remote.archive_after(step)
            self._saved = {one for one in self._saved if one <= step}
            self._ever_remote = {one for one in self._ever_remote if one <= step}

    def finish(self) -> None:
        self._claim()
        self.upload_all()
        self._generation.enter()
        for one in (self.local, self.remote):
            one.mark_finished()

    # Copying

    def acquire_for_upload(self) -> bool:
        """Acquires the leases if a step is to be uploaded and this job has saved or restored one."""
        if not self._claimed and self.restored_step is not None and self.uncopied():
            self.acquire_if_free()
        return self._claimed

    def acquire_if_free(self) -> bool:
        """Acquires the leases; logs it if another job writes the run. Returns True if this job has them."""
        try:
            return self._claimed or self.acquire_run()
        except ExistsError as error:
            _log.warning("%s: steps are not uploaded from %s: %s", self.root, self.local.root, error)
            return False

    def acquire_run(self) -> bool:
        """Acquires the leases."""
        self._claim()
        return True

    def upload_all(self) -> None:
        """Waits until all local steps are uploaded, also those of earlier jobs. Raises `SaveError`."""
        if os.getpid() != self._process:
            return
        if self.acquire_for_upload():
            self._ended = True  # `end_writing` does not try again.
            error = self._finish_uploads()
            self._retain(None)
            if problem := self._problem(error):
                raise problem

    def _finish_uploads(self) -> BaseException | None:
        return self._uploader.finish() if self.claimed else self._uploader.lost_lease_error

    def clear_memory(self, call: Call) -> None:
        """Removes the steps from all disks if that of process 0 is in memory, and this job writes the run.

        Every process calls it, once all steps are uploaded.
        """
        local = self.local

        def missing() -> list[int]:
            self.upload_metrics()  # They may have come after the last upload.
            return self.to_upload()

        if not call.broadcast(lambda: self.claimed and probe.is_memory_of_host(local.steps.store, local.root)):
            return
        if self.host_changes:
            self.host_changes.wait_for_copies()  # They would bring files back.
        call.broadcast(lambda: clear_steps(local, self.remote, missing))
        if self.host_group:
            self.host_group.clear(call)

    def _problem(self, error: BaseException | None) -> SaveError | None:
        """Returns an error that names the steps that are not in the remote tier, and why. None if all are."""
        local = self.local.steps.committed()
        missing = self._saved.union(self.to_upload() if self.claimed and not error else self.uncopied())
        gone = sorted(step for step in missing if step not in local or self.local.steps.is_damaged(step, local[step]))
        if error is None and not gone and (self.claimed or not missing):
            return None
        there = sorted(missing.difference(gone))
        return upload_error(self.root, self.local.root, there, gone, error, lost=self.lost)

    def to_upload(self) -> list[int]:
        """Returns the valid local steps to upload, newest first: the policy keeps them, and no valid copy is remote."""
        local, remote = self.local.steps.committed(), self.remote.steps.committed()
        self._seen_remote = self.remote.valid_steps()
        complete = {one.step for one in self._seen_remote}
        valid = [one.step for one in self.local.valid_steps() if one.step in local]

        def lacks(step: int) -> bool:
            if step not in remote and step in self._dropped and self._known_copied(step, local[step]):
                return self._dropped[step] != self._copied[step][1] or pins.is_pinned(
                    self.local.steps.store, local[step]
                )
            return step not in complete or not self.is_copied(step, local[step], remote.get(step))

        missing = [step for step in valid if lacks(step)]
        if missing and self._keep:
            both = self.valid_steps()
            wanted = self._keep.kept(both) | {both[-1].step}
            wanted.update(step for step in missing if pins.is_pinned(self.local.steps.store, local[step]))
            self._saved.difference_update(set(missing) - wanted)
            missing = [step for step in missing if step in wanted]
        return missing[::-1]

    def upload(self, step: int, on_progress: Callable[[int], None]) -> bool:
        """Uploads a step. Returns False if the remote tier has it already. `on_progress`: see `copy.copy`."""
        local, remote = self.local.steps.store, self.remote.steps.store
        self._generation.enter()
        self._ever_remote.add(step)
        there = self.remote.steps.committed().get(step)
        path, to = self.local.step_path(step), there or self.remote.step_path(step)
        if there and not self.remote.steps.is_damaged(step, there) and self.is_copied(step, path, there):
            # An earlier request failed, so the upload seemed to be missing. Uploading a step over itself would remove
            # its files.
            return False
        others = self.host_group and self.host_group.joint_upload(path, to)
        try:
            if there and self.remote.steps.is_damaged(step, there):
                copy.check(local, path, others)  # Otherwise the damaged remote step may be the better one.
                self._copied.pop(step, None)  # From here on the local step is the only copy.
                removal.delete(remote, there)  # Its files may have the names of the uploaded ones.
            seen = summary.stat_manifest(local, path)
            overwrite = summary.stat_manifest(remote, to) is not None
            identity = copy.copy(
                local, path, remote, to,
                overwrite=overwrite, on_progress=on_progress, others=others,
                ledger=self.tier.uploads if remote.sharing == "copies" else None,
            )  # fmt: skip
        except (NotFoundError, CorruptError, FileNotFoundError) as error:
            # Retention deletes steps that the policy has dropped, whether they are uploaded or not.
            if not others and step not in self._saved and summary.stat_manifest(local, path) is None:
                _log.info("%s: step %d was deleted before its upload had ended", self.root, step)
                return False
            if others and isinstance(
                error, CorruptError
            ):  # No restore would find the damage: it would read the remote copy.
                self.local.steps.mark_damaged(step, path)
            raise
        if seen:
            self._note_copied(step, seen.version, identity)
        return True

    def _on_local_delete(self, path: str) -> None:
        """Records that a local step is about to be deleted, so that the other hosts delete their files of it."""
        self._has_deleted = True
        if self.host_group and not self.index:
            try:
                self.tier.retire([path], "deleted")
            except OSError as error:
                if not is_full(error):
                    raise
                # The deletion makes room. After a crash the other hosts archive their files of the step.
                _log.warning("%s: deleted without a record: %s", path, error)

    def _on_remote_delete(self, path: str) -> None:
        """Notes a remote step that is about to be deleted. Keeps its metrics: local steps are ranked by them."""
        step = run_layout.parse_step_name(posixpath.basename(path), self.remote.steps.prefix)
        local = self.local.steps.committed().get(step) if step is not None else None
        if step is not None and local and self.is_copied(step, local, path):
            metrics.copy(self.remote.steps.store, path, self.local.steps.store, local, self._copied[step][1])
            self._dropped[step] = self._copied[step][1]

    def upload_metrics(self) -> None:
        """Uploads the metrics that steps got after their upload."""
        local, remote = self.local.steps.store, self.remote.steps.store
        there = self.remote.steps.committed()
        for step, path in self.local.steps.committed().items():
            if step in there and self._known_copied(step, path):
                metrics.copy(local, path, remote, there[step], self._copied[step][1])


def make_directory(
    root: str,
    local: str | os.PathLike[str] | None,
    *,
    layout: RunLayout,
    tensorboard: str | os.PathLike[str] | None,
    keep: Policy | None,
    upload_limit: float | None,
    failures: Failures,
    pending_saves: PendingSaves,
    timeout: float,
    local_copies: int,
) -> RunDirectory:
    """Returns the directory that a run is saved to. `keep` and `upload_limit` apply only to a remote tier."""
    made: list[TieredRun] = []

    def busy() -> bool:
        # This function must not refer to the `Checkpointer`, nor to the only directory. A cycle would delay the
        # finalizers of a dropped `Checkpointer`: they restore the handler of SIGTERM and release the lease.
        return pending_saves.busy() or any(one.busy for one in made)

    def directory_at(root: str) -> PlainRun:
        return PlainRun(StepCatalog(stores.get(root), root, layout, tensorboard), busy)

    plain = directory_at(root)
    if local is None:
        return plain
    tiered = TieredRun(
        directory_at(stores.absolute(local)), plain, keep, upload_limit, failures.notify, timeout, local_copies
    )
    made.append(tiered)
    return tiered


def late_metrics(directory: RunDirectory, retention: Retention, pending_saves: PendingSaves) -> LateMetrics:
    """Returns the object that applies the policy to late metrics: in the remote tier, or by `retention` without one."""
    if isinstance(directory, TieredRun):
        return LateMetrics(directory.remote, directory.remote_retention, pending_saves, directory.start_upload)
    assert isinstance(directory, PlainRun)
    return LateMetrics(directory, retention, pending_saves, None)
