"""Metrics that come after their step was saved. Retention applies its policy when they arrive, or when a job resumes.

A process that only reads deletes nothing: another job may have restored a step that this policy does not keep.
"""

import logging
import os
import threading
from collections.abc import Callable

from .. import stores
from .._processes import coordinator
from .._threads.alive import Alive
from ..errors import ExistsError
from .directory import Directory
from .retention import Retention
from .saves_under_way import UnderWay

_log = logging.getLogger("treering")


class LateMetrics:
    """Applies the policy of one `Checkpointer` to metrics that any thread or job records.

    A process without the policy deletes nothing: the next save, `close` or `restore_or_init` of the job does so.
    `retention` is that of the remote tier, or of the run's only directory. With a local tier, `copying` begins an
    upload, which ends with retention.
    """

    def __init__(
        self, directory: Directory, retention: Retention, under_way: UnderWay, copying: Callable[[], None] | None
    ):
        self.closed = False
        self.directory, self._retention, self._under_way, self._copying = directory, retention, under_way, copying
        self._alone = threading.Lock()  # several threads may record at a time
        self.process = os.getpid()
        self.place = directory.steps.store.real_path(directory.root)
        _alive.add(self)

    def resumed(self, step: int) -> None:
        """Applies the policy when a job continues from a step, unless its saves and `close` apply it already."""
        if not self.directory.has_written:
            self._take_and_retain(step)

    def arrived(self) -> None:
        """Applies the policy when a step has got metrics. While a save is running, that save applies it."""
        with self._alone:
            if not self.directory.held:
                self._take_and_retain()
            elif self._copying:
                self._copying()
            elif not self._under_way.busy():
                with self._under_way.writing():
                    self._retention.retain_late(self._under_way.check_no_save)

    def _take_and_retain(self, step: int | None = None) -> None:
        """Applies the policy with the lease, only if a step has to be deleted and no other process has the lease."""
        directory, of_run = self.directory, _of(self.directory.root)
        if directory.lost or directory.back_to is not None or any(one.directory.held for one in of_run):
            return
        if coordinator.position()[0] != 0:  # Process 0 decides for all.
            return
        needed = {step}.union(*(one.directory.needed() for one in of_run if not one.closed))
        try:
            if self._retention.has_late(needed):
                with self._under_way.writing():
                    directory.acquire()
                    try:
                        self._retention.retain(*needed)
                        self._retention.wait()
                    finally:
                        directory.release()
        except ExistsError as error:
            _log.info("%s: late metrics are left to the job that writes the run: %s", directory.root, error)
        except Exception as error:  # A policy may be the user's code, and the caller has only read.
            _log.warning("%s: steps that late metrics rule out are not deleted yet: %s", directory.root, error)


_alive: Alive[LateMetrics] = Alive()


def _of(root: str) -> list[LateMetrics]:
    """Returns the LateMetrics of the Checkpointers that this process has made for a run, the oldest first."""
    place = stores.of(root).real_path(root)  # Links may give it several paths.
    return [one for one in _alive.all() if one.place == place and one.process == os.getpid()]


def arrived(root: str) -> None:
    """Applies the policy when a step of a run has got metrics: that of the Checkpointer of this process that writes the
    run, or wrote it last."""
    of_run = _of(root)
    writing = [one for one in of_run if one.directory.held]
    for one in writing or [one for one in of_run if one.closed and one.directory.has_written][-1:]:
        one.arrived()
