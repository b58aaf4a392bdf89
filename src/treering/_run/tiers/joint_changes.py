"""Collective changes of a run in which each host has its own disk, with a part of each step."""

import contextlib
import logging
import posixpath
from collections.abc import Callable, Iterator
from typing import Any

from ..._core.calls import Call
from ..._save.pending import as_save_error
from ...errors import TreeringError
from .host_copies import HostCopies
from .host_group import HostGroup
from .uploader import Uploader

_log = logging.getLogger("treering")


class JointChanges:
    """Does on the other hosts' disks what process 0 does on its own disk, and begins uploads from all disks.

    Every process of the job calls each of these methods in the same order, except `orders`, which process 0 calls.
    """

    def __init__(
        self,
        root: str,
        local: str,
        group: HostGroup,
        uploader: Uploader,
        copies: HostCopies | None,
        retain: Callable[[], None],
    ):
        """`copies` is None if one copy of each file is enough. `retain` deletes old local steps."""
        self._root, self._local, self._retain = root, local, retain
        self._group, self._uploader, self._copies = group, uploader, copies
        self.hosts = group.hosts

    @property
    def local_copies(self) -> int:
        """The number of disks that are to have each array file."""
        return 1 if self._copies is None else 2

    def is_on_two_hosts(self, path: str) -> bool:
        """Returns True if the disks of two hosts have each file of a local step. Only process 0 knows it."""
        return self._copies is not None and self._copies.is_safe(path)

    def wait_for_copies(self) -> None:
        """Waits until no second copies are made."""
        if self._copies:
            self._copies.wait()

    def orders(self) -> Any:
        """Returns what the other disks have to do before a save. Process 0 sends it to them."""
        return self._group.orders()

    def prepare(self, path: str, orders: Any, back_to: int | None) -> str:
        """Obeys the orders, and archives the steps after `back_to`. Returns the path of the new step on this disk."""
        self._group.obey(orders)
        if back_to is not None:
            with as_save_error(self._local):
                self._group.archive_after(back_to)
        path = posixpath.join(self._local, posixpath.basename(path))
        with as_save_error(self._local):
            self._group.replace(path)
        return path

    def claim(self, call: Call, claim: Callable[[], bool]) -> bool:
        """Claims the run on all disks before it is changed. Returns False if `claim` in process 0 does."""

        def claimed() -> bool:
            with as_save_error(self._root):
                return claim()

        return self._group.claim_together(call, claimed)

    def saved(self, step: int) -> None:
        """Begins to copy and to upload a step that was committed."""
        if self._copies:
            self._copies.begin(f"step {step}")
        self._upload(f"step {step}")

    def deleted(self, step: int) -> None:
        """Deletes the parts of a step that process 0 has deleted."""
        with self._logging_errors(f"deleting step {step}"):
            self._group.delete(step)
        self._upload(f"the deletion of step {step}")

    def pinned(self, step: int, wanted: bool) -> None:
        """Marks a step never to be deleted, or removes the mark, as process 0 has done on its disk."""
        with as_save_error(self._local):
            self._group.pin(step, wanted)

    def rewound(self, step: int) -> None:
        """Archives the parts of later steps after a rewind."""
        after = "the rewind" if step < 0 else f"the rewind to step {step}"
        with self._logging_errors(after):
            self._group.archive_after(step)
        self._upload(after)

    def free_room(self) -> None:
        """Waits for a round, in which the hosts delete the files of steps that process 0 has deleted."""
        self._upload("a save found a disk full")
        self._uploader.wait()

    @contextlib.contextmanager
    def _logging_errors(self, what: str) -> Iterator[None]:
        """Logs errors of a change on the disk of this host, and continues: the peers wait for this process in a round.

        Process 0 has recorded what leaves the run, so a later round changes this disk too.
        """
        try:
            yield
        except (TreeringError, OSError) as error:
            _log.warning("%s: %s failed on this disk; the next upload tries again: %s", self._local, what, error)

    def _upload(self, after: str, **options: Any) -> None:
        self._uploader.begin_together(self._group, after, self._group.index, **options)

    def upload_last(self, call: Call, claim: Callable[[], bool]) -> None:
        """Begins to upload the remaining steps, without the limit, if `claim` returns True in process 0."""
        if self.claim(call, claim):
            self._uploader.lift_limit()
            self._upload("the last one", then=self._retain)
