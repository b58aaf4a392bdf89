"""The right to write a run in a store without locks: an object that names the writer, and is renewed while it lives."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from ..._threads.alive import Alive
from ...errors import ExistsError, RequestError, UnsupportedError
from .. import claims
from ..store import LOCK_NAME
from . import heartbeat, round_trip
from .bucket import Bucket, Version
from .heartbeat import LEASE_SECONDS, About, Heartbeat
from .keys import joined
from .request_errors import ChangedError

_POLL_SECONDS = 2.0
_MOST_CHANGES = 10  # that others may make while the lease is being taken
_log = logging.getLogger("treering")
_alive: "Alive[ObjectLease]" = Alive()
_taking: "dict[str, threading.RLock]" = {}  # by run: held while its lease is taken, one at a time in this process


class ObjectLease:
    """The right to write a run. See `stores.store.Lease`.

    Within a process the newest claim counts. Of other processes' leases one whose process is known to be dead counts no
    longer, and any that was not renewed for `LEASE_SECONDS` by the server's clock.
    """

    def __init__(self, bucket: Bucket, key: str, busy: Callable[[], bool]):
        self.run, self.lost = joined(bucket.url, key), False
        self._bucket, self._key, self._busy = bucket, joined(key, LOCK_NAME), busy
        self._beat: Heartbeat | None = None
        _alive.add(self)
        claims.add(self)
        weakref.finalize(self, _drop, held := [])
        self._held: list[Heartbeat] = held  # what is left when the `Checkpointer` was dropped without `close`

    @property
    def _alone(self) -> threading.RLock:
        return _taking.setdefault(self.run, threading.RLock())

    def acquire(self) -> None:
        with self._alone:
            if self.lost:
                raise claims.lost(self.run)
            if self._beat is not None:
                self.check()
                return
            self._take_over()
            self._wait_for_it()

    def check_free(self) -> None:
        """Raises an `ExistsError` for another process of this machine; of others that would take waiting."""
        with self._alone:
            if any(one._beat is not None and one.run == self.run for one in _alive.all()):
                return
            try:
                holder, found = heartbeat.read(self._bucket, self._key)
            except FileNotFoundError:
                return
            if holder is None or not holder.is_known or not heartbeat.is_here(holder):
                return
            if heartbeat.lives(self._bucket, holder, found):
                raise _held_by(self.run, holder)

    def _take_over(self) -> None:
        """Takes the lease away from an idle owner in this process. Raises `ExistsError` for one that is saving."""
        for other in _alive.all():
            if other is self or other._beat is None or other.run != self.run:
                continue
            if other._busy():
                raise claims.busy(self.run)
            _log.warning("%s: taken over from another Checkpointer of this process, which was not closed", self.run)
            other.lost = True
            other.release()

    def _wait_for_it(self) -> None:
        """Takes the lease once its holder is dead, which may take `LEASE_SECONDS` to see. Raises `ExistsError`."""
        first: About | None = None
        gone = 0
        while not self._taken(None):
            try:
                holder, found = heartbeat.read(self._bucket, self._key)
            except FileNotFoundError:  # it was removed meanwhile
                gone += 1
                if gone == _MOST_CHANGES:
                    raise RequestError(
                        f"{self.run}/{LOCK_NAME}: the store refuses to create it as one that is there, and says that "
                        "there is none, again and again; look whether the store works"
                    ) from None
                time.sleep(_POLL_SECONDS * gone / _MOST_CHANGES)
                continue
            if holder is None or not holder.is_known:
                raise UnsupportedError(
                    f"{self.run}/{LOCK_NAME}: expected version {heartbeat.VERSION} of this object, found another; a "
                    "later release of treering writes this run: upgrade treering, or make sure that no job writes it "
                    "and remove the object"
                )
            if not heartbeat.lives(self._bucket, holder, found):
                if self._taken(found.version):
                    if holder.token:  # or it was given back
                        _log.warning(
                            "%s: taken over from process %d on %s, which is dead", self.run, holder.process, holder.host
                        )
                    return
                gone += 1  # another one was faster, or what is read here is not what is there
                if gone == _MOST_CHANGES:
                    raise RequestError(
                        f"{self.run}/{LOCK_NAME}: the store gives this object to read again and again, and refuses to "
                        "replace that; does it, or something on the way, answer from a cache, as for public objects?"
                    )
                time.sleep(_POLL_SECONDS * gone / _MOST_CHANGES)
                continue
            if heartbeat.is_here(holder) or (first and (first.token, first.beats) != (holder.token, holder.beats)):
                raise _held_by(self.run, holder)
            if first is None:
                first = holder
                _log.warning(
                    "%s: process %d on %s wrote this run; waiting for up to %d s to see whether it still does",
                    self.run, holder.process, holder.host, LEASE_SECONDS,
                )  # fmt: skip
            time.sleep(_POLL_SECONDS)

    def _taken(self, replaces: Version | None) -> bool:
        """Whether the lease is this one's now: there was none, or the one that it replaces."""
        try:
            self._beat = Heartbeat(self._bucket, self._key, replaces=replaces)
        except ChangedError:
            return False
        self._held[:] = [self._beat]
        try:
            round_trip.check(self._bucket, self._beat)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        with self._alone:
            if self._beat is not None:
                beat, self._beat = self._beat, None
                self._held.clear()
                try:
                    beat.give_back()
                except OSError as error:
                    _log.warning("%s: its lease was not given back, and runs out: %s", self.run, error)

    def check(self) -> None:
        """Raises `TakenOverError` when another may write the run by now."""
        beat = self._beat
        if beat is not None and not beat.holds():
            raise claims.TakenOverError(
                f"{self.run}: another job has taken this run over, for this one did not renew its lease in time; this "
                "one saves nothing there any more; stop one of the two, and go on in a new process"
            )


def _held_by(run: str, holder: About) -> ExistsError:
    return claims.held(run, f"process {holder.process} on {holder.host}, since {holder.since},")


def _drop(held: list[Heartbeat]) -> None:
    """Gives back the lease of a `Checkpointer` that was dropped; the thread that renews it does so, at its end."""
    for beat in held:
        beat.end()


@atexit.register
def _release_all() -> None:
    """Gives back the leases of Checkpointers that were not closed, or jobs elsewhere would wait. All saves are over."""
    for lease in _alive.all():
        lease.release()


def _forget_after_fork() -> None:
    _taking.clear()  # they may be held by threads that the child does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
