"""Small objects that name a living writer and are renewed while it lives.

They replace locks in stores without locks.
"""

import contextlib
import datetime
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..._threads.alive import Alive
from ..._threads.decoding import learn
from ..._threads.pool import start
from ...errors import SaveError
from .bucket import Bucket, Found, Version, now
from .request_errors import ChangedError

LEASE_SECONDS = 90.0  # after its last renewal by the server's clock, another writer may acquire it
_RENEWAL_SECONDS = 20.0
SAFE_SECONDS = 60.0  # after its last renewal, no other writer can have acquired it
VERSION = 1
_MAX_BYTES = 4096  # larger objects are not heartbeats
_UNSEEN = "unseen"  # instead of the start time of a process, if it cannot be read
_ENDED = b'{"version":1}'  # the contents after a release: no token, so no holder
_log = logging.getLogger("treering")
_PROCESS = os.urandom(8).hex()  # names this process in the objects that it writes
_alive: "Alive[Heartbeat]" = Alive()


class About(msgspec.Struct):
    """The contents of the object: which process writes, and how to tell whether it lives."""

    version: Any = VERSION
    requires: Any = ()
    host: str = ""
    process: int = 0
    since: str = ""
    token: str = ""
    owner: str = ""  # a unique name of the process
    machine: str = ""  # the machine's boot and PID namespace; "" where they are not known
    started: str = ""  # the start time of the process, by that machine
    beats: int = 0

    @property
    def is_known(self) -> bool:
        """True if this release understands the contents. Those of a later release may mean anything."""
        return self.version == VERSION and not self.requires


learn(About)


class Heartbeat:
    """An object that names this process as a living writer.

    `lost` is True once another writer removed or replaced it.
    """

    def __init__(self, bucket: Bucket, key: str, *, replaces: Version | None = None):
        self.key, self.lost, self.stopped = key, False, False
        self._bucket = bucket
        self._about = _about_this_process()
        self._lock = threading.RLock()  # held while the object is renewed
        self._renewed = now()  # Read before the put: the lease must not seem to last longer here than on the server.
        self._version = bucket.put(key, self._data(), replaces=replaces)
        self._ending = threading.Event()
        _alive.add(self)
        _begin(self)

    @property
    def token(self) -> str:
        """The unique name of this writer."""
        return self._about.token

    def holds(self) -> bool:
        """Returns True if this writer still holds the object. Asks the server only if the last renewal is long ago."""
        if now() - self._renewed > SAFE_SECONDS and not self.lost:
            self.renew()
        return not self.lost and (now() - self._renewed <= SAFE_SECONDS or self.confirm())

    def confirm(self) -> bool:
        """Asks the server, and returns True if the object is as this writer wrote it last."""
        with self._lock:
            if self.lost:
                return False
            found = self._bucket.head(self.key)
            return found is not None and found.version[0] == self._version[0]

    def renew(self) -> None:
        """Writes the object again, unless another writer has it by now."""
        with self._lock:
            if self.lost or self.stopped:
                return
            begun = now()
            self._about.beats += 1
            try:
                try:
                    self._version = self._bucket.put(self.key, self._data(), replaces=self._version)
                    self._renewed = begun
                except (ChangedError, FileNotFoundError):
                    self._look()
            except OSError as error:
                _log.warning("%s/%s: not renewed: %s", self._bucket.url, self.key, error)

    def _look(self) -> None:
        """Finds out who holds the object.

        If the answer to a renewal was lost, it is this writer's in a newer version.
        """
        with contextlib.suppress(FileNotFoundError):
            about, found = read(self._bucket, self.key)
            if about is not None and about.token == self.token:
                self._version = found.version  # The next renewal uses it.
                return
        self.lost = True
        _log.warning("%s/%s: another writer has acquired or removed it", self._bucket.url, self.key)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[bytes]:
        """Yields the contents of the object, and does not renew it during the `with` block."""
        with self._lock:
            yield self._data()

    def stop(self, *, delete: bool) -> None:
        """Stops the renewals. With `delete` it also removes the object, unless another writer has it."""
        with self._lock:
            self.stopped = True
            self._ending.set()
            if delete and not self.lost and (now() - self._renewed <= SAFE_SECONDS or self.confirm()):
                self._bucket.delete([self.key])

    def give_back(self) -> None:
        """Stops the renewals and marks the object as held by no process, unless another writer has it.

        A delete cannot be conditional. If its answer were lost and it were repeated, it would hit an object that
        another writer has made meanwhile.
        """
        with self._lock:
            self.stopped = True
            self._ending.set()
            for _ in range(2):  # twice: after a lost answer to a renewal, the known version is outdated
                if self.lost:
                    return
                try:
                    self._version = self._bucket.put(self.key, _ENDED, replaces=self._version)
                    return
                except (ChangedError, FileNotFoundError):
                    self._look()

    def end(self) -> None:
        """Lets the thread that renews the object release it."""
        self._ending.set()

    def beat(self) -> None:
        """Renews the object regularly until `end` is called."""
        while not self._ending.wait(_RENEWAL_SECONDS):
            try:
                self.renew()
            except Exception:  # The loop continues: without renewals, a living writer would be taken for dead.
                _log.exception("%s/%s: not renewed", self._bucket.url, self.key)
        if not self.stopped:
            with contextlib.suppress(OSError):
                self.give_back()

    def _data(self) -> bytes:
        return msgspec.json.encode(self._about)


def read(bucket: Bucket, key: str) -> tuple[About | None, Found]:
    """Returns the contents of such an object, or None if they cannot be decoded, and the object.

    Raises `FileNotFoundError`.
    """
    data, found = bucket.beginning(key, _MAX_BYTES)
    if found.nbytes < _MAX_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            about = msgspec.json.decode(bytes(data), type=About)
            return about, found
    return None, found


def has_writer(bucket: Bucket, key: str) -> bool:
    """Returns True if such an object names a living writer. Raises `FileNotFoundError`."""
    about, found = read(bucket, key)
    return about is not None and lives(bucket, about, found)


def lives(bucket: Bucket, about: About, found: Found) -> bool:
    """Returns True if the writer that an object names may still write. A writer of a later release may."""
    if not about.is_known:
        return True
    if not about.token:
        return False  # a released object, or a copied lock file of a disk, whose holder does not write here
    if about.owner == _PROCESS:
        return any(one.token == about.token and not one.stopped for one in _alive.all())
    if is_here(about):
        return _runs(about)
    return bucket.age(found, found.key) <= LEASE_SECONDS


def end(bucket: Bucket, key: str, check: Callable[[], bool] = lambda: True) -> bool:
    """Takes an object away from a dead writer. Returns False if the writer lives or `check` returns False.

    A writer that was wrongly taken for dead finds out, because its object has changed. An object that is not a
    heartbeat stays as it is. Raises `FileNotFoundError`.
    """
    about, found = read(bucket, key)
    if (about is not None and lives(bucket, about, found)) or not check():
        return False
    if about is not None:
        try:
            bucket.put(key, _ENDED, replaces=found.version)
        except (ChangedError, FileNotFoundError):
            return False  # its writer has renewed it meanwhile
    return True


def is_here(about: About) -> bool:
    """Returns True if the writer's process belongs to this machine, which therefore knows whether it lives."""
    return bool(about.machine) and about.machine == _machine()


def _about_this_process() -> About:
    return About(
        host=socket.gethostname(),
        process=os.getpid(),
        since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        token=os.urandom(8).hex(),
        owner=_PROCESS,
        machine=_machine(),
        started=_started(os.getpid()),
    )


@functools.cache
def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # Not Linux: then only the age of the object decides.


def _runs(about: About) -> bool:
    """Returns True if a process of this machine runs, or if this user may not ask."""
    try:
        os.kill(about.process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _started(about.process) in (about.started, _UNSEEN)


def _started(process: int) -> str:
    """Returns the start time of a process in ticks since the boot; "" after its end, `_UNSEEN` if it cannot be read."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _UNSEEN
    return "" if fields[0] in "ZX" else fields[19]


def _begin(one: Heartbeat) -> None:
    """Starts the thread that renews the object."""
    with contextlib.suppress(SaveError):  # Without room for a thread, `holds` renews the object.
        start(threading.Thread(target=one.beat, name="treering-heartbeat", daemon=True))


def _forget_after_fork() -> None:
    """Leaves all heartbeats to the process that this one was forked from."""
    global _PROCESS
    _PROCESS = os.urandom(8).hex()
    for one in _alive.all():
        one.stopped = one.lost = True
        one._lock = threading.RLock()  # a thread that does not exist in the child may hold the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
