"""Small objects that name a living writer and are renewed while it lives.

They replace locks in stores without locks. An object that was not renewed for `LEASE_SECONDS` belongs to no process.
Nothing else shows that a writer is dead. A process number that is not in use here shows nothing, even with the boot id
of this machine: the writer may live on a clone of this virtual machine, which has the same boot id.
"""

import contextlib
import datetime
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from ..._threads.forks import WeakRegistry, free_in_children
from ..._threads.preload_decoders import preload_decoders
from ..._threads.thread import Thread, start_threads
from ...errors import SaveError
from .. import lease_registry
from .bucket import Bucket, ObjectMeta, Version, now
from .request_errors import ChangedError

LEASE_SECONDS = 90.0  # Another writer may acquire an object that is older than this by the server's clock.
_RENEWAL_SECONDS = 20.0
# For so long after a renewal, by this machine's clock, its writer writes without asking the server: no other writer can
# have acquired the object. It is shorter than `LEASE_SECONDS`, so that the write that follows has time to end.
LEASE_SAFE_SECONDS = 60.0
VERSION = 1
_MAX_RECORD_BYTES = 4096  # larger objects are not heartbeats
_log = logging.getLogger("treering")
_heartbeats: "WeakRegistry[Heartbeat]" = WeakRegistry()


class WriterRecord(msgspec.Struct):
    """The contents of the object: which process writes.

    `generation` orders the holders of one object: each has a larger number than the one before. `beat` differs in each
    renewal, so that a writer recognizes its own. The `token` alone does not identify a writer: if a virtual machine is
    cloned while it writes, both machines have the same.
    """

    version: Any = VERSION
    requires: Any = ()
    host: str = ""
    process: int = 0
    since: str = ""
    token: str = ""
    generation: int = 0
    beat: str = ""

    @property
    def is_supported(self) -> bool:
        """True if this release understands the contents. Those of a later release may mean anything."""
        return self.version == VERSION and not self.requires


preload_decoders(WriterRecord)


class Heartbeat:
    """An object that names this process as a living writer of a place, and of everything below it.

    `lost` is True once another writer removed or replaced it.
    """

    def __init__(self, bucket: Bucket, key: str, place: str, *, replaces: Version | None = None, generation: int = 1):
        self.key, self.place, self.generation, self.lost, self.stopped = key, place, generation, False, False
        self._bucket = bucket
        self._record = WriterRecord(
            host=socket.gethostname(),
            process=os.getpid(),
            since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            token=os.urandom(8).hex(),
            generation=generation,
            beat=os.urandom(8).hex(),
        )
        self._unconfirmed = {self._record.beat}  # beats that this writer has put since the last answer
        self._lock = free_in_children(threading.RLock())  # held while the object is renewed
        self._renewed_at = now()  # Read before the put: the lease must not seem to last longer here than on the server.
        self._version = bucket.put(key, self._data(), replaces=replaces)
        self._stop_requested = threading.Event()
        _heartbeats.add(self)
        lease_registry.add(self)
        _start_renewals(self)

    def check(self) -> None:
        """Raises `LeaseLostError` if another writer has acquired or removed the object. See `is_valid`."""
        if not self.stopped and not self.is_valid():
            raise lease_registry.LeaseLostError(
                f"{self.place}: another job has acquired this place, because this one did not renew its lease in time; "
                "this job writes nothing there any more; stop one of the two jobs, and continue in a new process"
            )

    def is_valid(self) -> bool:
        """Returns True if this writer still holds the object. Asks the server only if the last renewal is long ago."""
        if now() - self._renewed_at > LEASE_SAFE_SECONDS and not self.lost:
            self.renew()
        return not self.lost and (now() - self._renewed_at <= LEASE_SAFE_SECONDS or self.verify())

    def verify(self) -> bool:
        """Asks the server, and returns True if the object is as this writer wrote it last."""
        with self._lock:
            if self.lost:
                return False
            found = self._bucket.head(self.key)
            # Each renewal has another `beat`, so its ETag is enough to recognize it.
            return found is not None and found.version[0] == self._version[0]

    def renew(self) -> None:
        """Writes the object again, unless another writer has it by now."""
        with self._lock:
            if self.lost or self.stopped:
                return
            begun = now()
            self._record.beat = os.urandom(8).hex()
            self._unconfirmed.add(self._record.beat)
            try:
                try:
                    self._version = self._bucket.put(self.key, self._data(), replaces=self._version)
                    self._renewed_at, self._unconfirmed = begun, {self._record.beat}
                except (ChangedError, FileNotFoundError):
                    self._check_owner()
            except OSError as error:
                _log.warning("%s/%s: not renewed: %s", self._bucket.url, self.key, error)

    def _check_owner(self) -> None:
        """Finds out whether this writer still holds the object, after a conditional put has failed. Else sets `lost`.

        If the answer to an earlier renewal was lost, the object has a version that this writer does not know, and a
        beat of this writer.
        """
        with contextlib.suppress(FileNotFoundError):
            record, found = read(self._bucket, self.key)
            if record is not None and record.generation == self.generation and record.beat in self._unconfirmed:
                self._version = found.version  # The next renewal uses it.
                return
        self.lost = True
        _log.warning("%s/%s: another writer has acquired or removed it", self._bucket.url, self.key)

    @contextlib.contextmanager
    def without_renewal(self) -> Iterator[bytes]:
        """Yields the contents of the object, and does not renew it during the `with` block."""
        with self._lock:
            yield self._data()

    def stop(self, *, delete: bool) -> None:
        """Stops the renewals. With `delete` it also removes the object, unless another writer has it."""
        with self._lock:
            self.stopped = True
            self._stop_requested.set()
            if delete and not self.lost and (now() - self._renewed_at <= LEASE_SAFE_SECONDS or self.verify()):
                self._bucket.delete([self.key])

    def release(self) -> None:
        """Stops the renewals and marks the object as held by no process, unless another writer has it.

        A delete cannot be conditional. If its answer were lost and it were repeated, it would hit an object that
        another writer has made meanwhile.
        """
        with self._lock:
            self.stopped = True
            self._stop_requested.set()
            for _ in range(2):  # twice: after a lost answer to a renewal, the known version is outdated
                if self.lost:
                    return
                try:
                    self._version = self._bucket.put(self.key, _released(self.generation), replaces=self._version)
                    return
                except (ChangedError, FileNotFoundError):
                    self._check_owner()

    def release_soon(self) -> None:
        """Lets the thread that renews the object release it."""
        self._stop_requested.set()

    def renew_until_stopped(self) -> None:
        """Renews the object regularly until `stop`, `release` or `release_soon` is called. The last lets it release."""
        while not self._stop_requested.wait(_RENEWAL_SECONDS):
            try:
                self.renew()
            except Exception:  # The loop continues: without renewals, a living writer would be taken for dead.
                _log.exception("%s/%s: not renewed", self._bucket.url, self.key)
        if not self.stopped:
            with contextlib.suppress(OSError):
                self.release()

    def _data(self) -> bytes:
        return msgspec.json.encode(self._record)


def read(bucket: Bucket, key: str) -> tuple[WriterRecord | None, ObjectMeta]:
    """Returns the contents of such an object, or None if they cannot be decoded, and the object.

    Raises `FileNotFoundError`.
    """
    data, found = bucket.get_prefix(key, _MAX_RECORD_BYTES)
    if found.nbytes < _MAX_RECORD_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            record = msgspec.json.decode(bytes(data), type=WriterRecord)
            return record, found
    return None, found


def has_writer(bucket: Bucket, key: str) -> bool:
    """Returns True if such an object names a living writer. Raises `FileNotFoundError`."""
    record, found = read(bucket, key)
    return record is not None and is_alive(bucket, record, found)


def is_alive(bucket: Bucket, record: WriterRecord, found: ObjectMeta) -> bool:
    """Returns True if the writer that an object names may still write. Records of later releases count as alive."""
    if not record.is_supported:
        return True
    if not record.token:
        return False  # It was released, or it is the lock file of a directory that was copied here, which has no token.
    for one in _heartbeats.all():
        # A clone of this machine may have put a later version with the same token.
        if one._record.token == record.token and one._version[0] == found.version[0] and not one.lost:
            return not one.stopped
    return bucket.age(found, found.key) <= LEASE_SECONDS


def revoke(bucket: Bucket, key: str) -> bool:
    """Takes an object away from a dead writer. Returns True if no living writer has it, so that it may be removed.

    A writer that was wrongly taken for dead notices that its object has changed. An object that is not a heartbeat
    names no writer: it stays as it is, and the result is True. Raises `FileNotFoundError`.
    """
    record, found = read(bucket, key)
    if record is not None:
        if is_alive(bucket, record, found):
            return False
        try:
            bucket.put(key, _released(record.generation), replaces=found.version)
        except (ChangedError, FileNotFoundError):
            return False  # its writer has renewed it meanwhile
    return True


def _released(generation: int) -> bytes:
    """Returns the contents after a release: no token, so no holder. The next holder has a larger generation."""
    return msgspec.json.encode({"version": VERSION, "generation": generation})


def _start_renewals(one: Heartbeat) -> None:
    """Starts the thread that renews the object."""
    with contextlib.suppress(SaveError):  # Without room for a thread, `is_valid` renews the object.
        start_threads(Thread(target=one.renew_until_stopped, name="treering-heartbeat", daemon=True))


def _forget_after_fork() -> None:
    """Leaves all heartbeats to the process that this one was forked from."""
    for one in _heartbeats.all():
        one.stopped = one.lost = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
