"""The lease of a run in a store without locks: an object that names the writer and is renewed while it lives."""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable

from ..._threads.forks import WeakRegistry, free_in_children
from ...errors import ExistsError, RequestError, UnsupportedError
from .. import lease_registry
from ..store import LOCK_NAME
from . import heartbeat, round_trip
from .bucket import Bucket, Version, join_key
from .heartbeat import LEASE_SECONDS, Heartbeat, WriterRecord
from .request_errors import ChangedError

_POLL_SECONDS = 2.0
_MAX_ATTEMPTS = 10  # failed attempts, after which the store is considered broken
_log = logging.getLogger("treering")
_leases: "WeakRegistry[ObjectLease]" = WeakRegistry()
_run_locks: "dict[str, threading.RLock]" = {}  # by run; held while its lease is acquired or released


class ObjectLease:
    """The right to write a run. See `stores.store.Lease`.

    Within a process the newest claim wins. The lease of another process is free once that process has released it, or
    has not renewed it for `LEASE_SECONDS` by the server's clock. Each acquisition has a larger generation.
    """

    def __init__(self, bucket: Bucket, key: str, busy: Callable[[], bool]):
        self.run, self.lost = join_key(bucket.url, key), False
        self._bucket, self._key, self._busy = bucket, join_key(key, LOCK_NAME), busy
        self._heartbeat: Heartbeat | None = None
        _leases.add(self)
        weakref.finalize(self, _release_dropped, held := [])
        self._unclosed: list[Heartbeat] = held  # for the finalizer: a `Checkpointer` may be dropped without `close`

    @property
    def _acquire_lock(self) -> threading.RLock:
        return _run_locks.setdefault(self.run, free_in_children(threading.RLock()))

    def acquire(self) -> None:
        with self._acquire_lock:
            if self.lost:
                raise lease_registry.lost_error(self.run)
            if self._heartbeat is not None:
                self._heartbeat.check()
                return
            self._take_from_this_process()
            self._wait_and_acquire()

    def check_free(self) -> None:
        """Does nothing: only a wait of up to `LEASE_SECONDS` would show that another process lives."""

    def _take_from_this_process(self) -> None:
        """Releases the lease of an idle owner in this process. Raises `ExistsError` if that owner is saving."""
        for other in _leases.all():
            if other is self or other._heartbeat is None or other.run != self.run:
                continue
            if other._busy():
                raise lease_registry.busy_error(self.run)
            _log.warning("%s: acquired from another Checkpointer of this process, which was not closed", self.run)
            other.lost = True
            other.release()

    def _wait_and_acquire(self) -> None:
        """Acquires the lease once it is free, which may take `LEASE_SECONDS` to find out.

        Raises `ExistsError`.
        """
        first: WriterRecord | None = None
        lost_races = 0
        while not self._try_acquire(None, 1):
            try:
                holder, found = heartbeat.read(self._bucket, self._key)
            except FileNotFoundError:  # another process has removed it meanwhile
                lost_races += 1
                if lost_races == _MAX_ATTEMPTS:
                    raise RequestError(
                        f"{self.run}/{LOCK_NAME}: the store refuses to create this object because it exists, and then "
                        "says that it does not exist, again and again; check whether the store works"
                    ) from None
                time.sleep(_POLL_SECONDS * lost_races / _MAX_ATTEMPTS)
                continue
            if holder is None or not holder.is_supported:
                raise UnsupportedError(
                    f"{self.run}/{LOCK_NAME}: expected version {heartbeat.VERSION} of this object, found another; a "
                    "later release of treering writes this run: upgrade treering, or make sure that no job writes it "
                    "and remove the object"
                )
            if not heartbeat.is_alive(self._bucket, holder, found):
                if self._try_acquire(found.version, holder.generation + 1):
                    if holder.token:  # else the holder has released it
                        _log.warning(
                            "%s: acquired from process %d on %s, which did not renew its lease",
                            self.run, holder.process, holder.host,
                        )  # fmt: skip
                    return
                lost_races += 1  # another process was faster, or a cache answers reads with an old version
                if lost_races == _MAX_ATTEMPTS:
                    raise RequestError(
                        f"{self.run}/{LOCK_NAME}: the store refuses to replace this object in the version that it "
                        "returns, again and again; does the store, or a proxy on the way, answer from a cache, as for "
                        "public objects?"
                    )
                time.sleep(_POLL_SECONDS * lost_races / _MAX_ATTEMPTS)
                continue
            if first and first.beat != holder.beat:  # It was renewed during the wait: its holder lives.
                raise _held_error(self.run, holder)
            if first is None:
                first = holder
                _log.warning(
                    "%s: process %d on %s wrote this run; waiting for up to %d s to see whether it still does",
                    self.run, holder.process, holder.host, LEASE_SECONDS,
                )  # fmt: skip
            time.sleep(_POLL_SECONDS)

    def _try_acquire(self, replaces: Version | None, generation: int) -> bool:
        """Tries to acquire the lease if its object is absent, or has the version `replaces`.

        Returns True on success.
        """
        try:
            self._heartbeat = Heartbeat(self._bucket, self._key, self.run, replaces=replaces, generation=generation)
        except ChangedError:
            return False
        self._unclosed[:] = [self._heartbeat]
        try:
            round_trip.check(self._bucket, self._heartbeat)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        with self._acquire_lock:
            if self._heartbeat is not None:
                beat, self._heartbeat = self._heartbeat, None
                self._unclosed.clear()
                try:
                    beat.release()
                except OSError as error:
                    _log.warning("%s: its lease was not released, and will expire: %s", self.run, error)


def _held_error(run: str, holder: WriterRecord) -> ExistsError:
    return lease_registry.held_error(run, f"process {holder.process} on {holder.host}, since {holder.since},")


def _release_dropped(held: list[Heartbeat]) -> None:
    """Releases the lease of a `Checkpointer` that was dropped. The thread that renews it does so before it ends."""
    for beat in held:
        beat.release_soon()


@atexit.register
def _release_all() -> None:
    """Releases the leases of Checkpointers that were not closed, or jobs elsewhere would wait.

    All saves are over by then.
    """
    for lease in _leases.all():
        lease.release()
