"""Small objects that say who writes, renewed while the writer lives: the locks of a store that has none."""

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

LEASE_SECONDS = 90.0  # after which one that was not renewed may be taken over, by the server's clock
_RENEWAL_SECONDS = 20.0
SAFE_SECONDS = 60.0  # since the last renewal, within which no other writer can have taken it over
VERSION = 1
_MAX_BYTES = 4096  # of such an object; larger ones are none
_UNSEEN = "unseen"  # in the place of the time when a process began
_ENDED = b'{"version":1}'  # nobody's
_log = logging.getLogger("treering")
_PROCESS = os.urandom(8).hex()  # names this process in the objects that it writes
_alive: "Alive[Heartbeat]" = Alive()


class About(msgspec.Struct):
    """The contents of the object: who writes, and how to tell whether that process lives."""

    version: Any = VERSION
    requires: Any = ()
    host: str = ""
    process: int = 0
    since: str = ""
    token: str = ""
    owner: str = ""  # the process, by a name that no other has
    machine: str = ""  # the machine, its boot and the space of its process numbers; "" where that is not known
    started: str = ""  # when the process began, by that machine
    beats: int = 0

    @property
    def is_known(self) -> bool:
        """Whether this release knows what it says; what a later one wrote may mean anything."""
        return self.version == VERSION and not self.requires


learn(About)


class Heartbeat:
    """An object that names this process as a living writer. `lost`: it was removed or replaced by another."""

    def __init__(self, bucket: Bucket, key: str, *, replaces: Version | None = None):
        self.key, self.lost, self.stopped = key, False, False
        self._bucket = bucket
        self._about = _about_this_process()
        self._lock = threading.RLock()  # held while it is renewed
        self._renewed = now()
        self._version = bucket.put(key, self._data(), replaces=replaces)
        self._ending = threading.Event()
        _alive.add(self)
        _begin(self)

    @property
    def token(self) -> str:
        """The name of this writer among all."""
        return self._about.token

    def holds(self) -> bool:
        """Whether it is this writer's still; asks the server only when the last renewal is long ago."""
        if now() - self._renewed > SAFE_SECONDS and not self.lost:
            self.renew()
        return not self.lost and (now() - self._renewed <= SAFE_SECONDS or self.confirm())

    def confirm(self) -> bool:
        """Whether the object is there as it was written last, which is looked up."""
        with self._lock:
            if self.lost:
                return False
            found = self._bucket.head(self.key)
            return found is not None and found.version[0] == self._version[0]

    def renew(self) -> None:
        """Writes it once more, unless it is another's by now."""
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
        """Finds out whose the object is. A renewal whose answer was lost has made it another version of this one's."""
        with contextlib.suppress(FileNotFoundError):
            about, found = read(self._bucket, self.key)
            if about is not None and about.token == self.token:
                self._version = found.version  # and it is renewed the next time
                return
        self.lost = True
        _log.warning("%s/%s: taken over or removed by another writer", self._bucket.url, self.key)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[bytes]:
        """Yields what the object holds, and renews it only after the `with` block."""
        with self._lock:
            yield self._data()

    def stop(self, *, delete: bool) -> None:
        """Renews it no longer, and removes the object unless it is another's."""
        with self._lock:
            self.stopped = True
            self._ending.set()
            if delete and not self.lost and (now() - self._renewed <= SAFE_SECONDS or self.confirm()):
                self._bucket.delete([self.key])

    def give_back(self) -> None:
        """Renews it no longer, and leaves the object as nobody's, unless it is another's.

        A delete cannot be tied to what was seen: one that is repeated because its answer was lost would hit whatever
        another writer has put there meanwhile.
        """
        with self._lock:
            self.stopped = True
            self._ending.set()
            for _ in range(2):  # the version is another than known where the answer to a renewal was lost
                if self.lost:
                    return
                try:
                    self._version = self._bucket.put(self.key, _ENDED, replaces=self._version)
                    return
                except (ChangedError, FileNotFoundError):
                    self._look()

    def end(self) -> None:
        """Gives it back in the thread that renews it."""
        self._ending.set()

    def beat(self) -> None:
        """Renews it again and again until its end."""
        while not self._ending.wait(_RENEWAL_SECONDS):
            try:
                self.renew()
            except Exception:  # it is tried again, for without it a living writer would be taken for dead
                _log.exception("%s/%s: not renewed", self._bucket.url, self.key)
        if not self.stopped:
            with contextlib.suppress(OSError):
                self.give_back()

    def _data(self) -> bytes:
        return msgspec.json.encode(self._about)


def read(bucket: Bucket, key: str) -> tuple[About | None, Found]:
    """What such an object says; None for one that says nothing. Raises `FileNotFoundError`."""
    data, found = bucket.beginning(key, _MAX_BYTES)
    if found.nbytes < _MAX_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            about = msgspec.json.decode(bytes(data), type=About)
            return about, found
    return None, found


def has_writer(bucket: Bucket, key: str) -> bool:
    """Whether such an object names a writer that lives. Raises `FileNotFoundError`."""
    about, found = read(bucket, key)
    return about is not None and lives(bucket, about, found)


def lives(bucket: Bucket, about: About, found: Found) -> bool:
    """Whether the writer that an object names may still write; that of a later release may."""
    if not about.is_known:
        return True
    if not about.token:
        return False  # the lock of a disk, which was copied: who had that does not write here
    if about.owner == _PROCESS:
        return any(one.token == about.token and not one.stopped for one in _alive.all())
    if is_here(about):
        return _runs(about)
    return bucket.age(found, found.key) <= LEASE_SECONDS


def end(bucket: Bucket, key: str, check: Callable[[], bool] = lambda: True) -> bool:
    """Takes an object away from a writer that is dead, or will know it by that; False for one that lives.

    For an object of another kind nothing is done. False as well unless `check` agrees. Raises `FileNotFoundError`.
    """
    about, found = read(bucket, key)
    if (about is not None and lives(bucket, about, found)) or not check():
        return False
    if about is not None:
        try:
            bucket.put(key, _ENDED, replaces=found.version)
        except (ChangedError, FileNotFoundError):
            return False  # it was renewed meanwhile
    return True


def is_here(about: About) -> bool:
    """Whether its process, dead or alive, is one of this machine, which knows which of the two."""
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
        return ""  # not Linux: there the age alone decides


def _runs(about: About) -> bool:
    """Whether a process of this machine runs; one that may not be looked at does."""
    try:
        os.kill(about.process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _started(about.process) in (about.started, _UNSEEN)


def _started(process: int) -> str:
    """The time when a process began, in ticks since the boot; "" when it has ended, `_UNSEEN` where that is unknown."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _UNSEEN
    return "" if fields[0] in "ZX" else fields[19]


def _begin(one: Heartbeat) -> None:
    """Starts the thread that renews."""
    with contextlib.suppress(SaveError):  # no more threads are allowed: `holds` renews it itself
        start(threading.Thread(target=one.beat, name="treering-heartbeat", daemon=True))


def _forget_after_fork() -> None:
    """Leaves all of them to the process that this one was forked from."""
    global _PROCESS
    _PROCESS = os.urandom(8).hex()
    for one in _alive.all():
        one.stopped = one.lost = True
        one._lock = threading.RLock()  # the old one may be held by a thread that the child does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
