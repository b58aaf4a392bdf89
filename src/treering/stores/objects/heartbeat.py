"""Small objects that say who writes, renewed while the writer lives: the locks of a store that has none."""

import contextlib
import datetime
import functools
import logging
import os
import secrets
import socket
import threading
import time
from typing import Any

import msgspec

from ..._threads.alive import Alive
from ..._threads.pool import start
from ...errors import SaveError
from .bucket import Bucket, ChangedError, Found, Version

LEASE_SECONDS = 90.0  # after which one that was not renewed may be taken over, by the server's clock
_RENEWAL_SECONDS = 20.0
SAFE_SECONDS = 60.0  # since the last renewal, within which nobody can have taken it over
VERSION = 1
_MAX_BYTES = 4096  # of such an object; larger ones are none
_UNSEEN = "unseen"  # in the place of the time when a process began
_log = logging.getLogger("treering")
_PROCESS = secrets.token_hex(8)  # names this process in the objects that it writes
_alive: "Alive[Heartbeat]" = Alive()
_beating = threading.Lock()  # held while the thread begins, or decides to end
_thread: threading.Thread | None = None
_stopped = threading.Event()  # one of them needs no renewal any more


def _now() -> float:
    """Seconds that go on while the machine is suspended, where the system can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


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


class Heartbeat:
    """An object that names this process as a living writer. `lost`: it was removed or replaced by another."""

    def __init__(self, bucket: Bucket, key: str, *, replaces: Version | None = None):
        self.key, self.lost, self.stopped = key, False, False
        self._bucket = bucket
        self._about = _about_this_process()
        self._lock = threading.RLock()  # held while it is renewed
        self._renewed = _now()
        self._version = bucket.put(key, self._data(), replaces=replaces)
        _alive.add(self)
        _begin()

    @property
    def token(self) -> str:
        """The name of this writer among all."""
        return self._about.token

    def check(self) -> bool:
        """Whether it is this writer's still; asks the server only when the last renewal is long ago."""
        if _now() - self._renewed > SAFE_SECONDS and not self.lost:
            self.renew()
        return not self.lost and _now() - self._renewed <= SAFE_SECONDS

    def confirm(self) -> bool:
        """Whether the object is there as it was written last, which is looked up."""
        with self._lock:
            found = self._bucket.head(self.key)
            return not self.lost and found is not None and found.version[0] == self._version[0]

    def renew(self) -> None:
        """Writes it once more, unless it is another's by now."""
        with self._lock:
            if self.lost or self.stopped:
                return
            begun = _now()
            self._about.beats += 1
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

    def stop(self, *, delete: bool) -> None:
        """Renews it no longer, and removes the object unless it is another's."""
        with self._lock:
            self.stopped = True
            _stopped.set()
            if delete and not self.lost and (_now() - self._renewed <= SAFE_SECONDS or self.confirm()):
                self._bucket.delete([self.key])

    def _data(self) -> bytes:
        return msgspec.json.encode(self._about)


def read(bucket: Bucket, key: str) -> tuple[About | None, Found]:
    """What such an object says; None for another object. Raises `FileNotFoundError`."""
    data, found = bucket.beginning(key, _MAX_BYTES)
    if found.nbytes < _MAX_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            about = msgspec.json.decode(bytes(data), type=About)
            return (about if about.token else None), found
    return None, found


def lives(bucket: Bucket, about: About, found: Found) -> bool:
    """Whether the writer that an object names may still write."""
    if about.owner == _PROCESS:
        return any(one.token == about.token and not one.stopped for one in _alive.all())
    if is_here(about):
        return _runs(about)
    return bucket.age(found, found.key) <= LEASE_SECONDS


def is_here(about: About) -> bool:
    """Whether its process, dead or alive, is one of this machine, which knows which of the two."""
    return bool(about.machine) and about.machine == _machine()


def _about_this_process() -> About:
    return About(
        host=socket.gethostname(),
        process=os.getpid(),
        since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        token=secrets.token_hex(8),
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
    """The time when a process began, in ticks since the boot; "" when it has ended, `_UNSEEN` when nobody says."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _UNSEEN
    return "" if fields[0] in "ZX" else fields[19]


def _begin() -> None:
    """Starts the thread that renews, unless it runs."""
    global _thread
    with _beating:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_beat, name="treering-heartbeat", daemon=True)
            with contextlib.suppress(SaveError):  # `check` renews them itself
                start(_thread)


def _beat() -> None:
    """Renews all of them again and again, until none is left."""
    global _thread
    due = time.monotonic() + _RENEWAL_SECONDS
    while True:
        _stopped.wait(max(due - time.monotonic(), 0))
        _stopped.clear()
        with _beating:
            if all(one.stopped for one in _alive.all()):
                _thread = None
                return
        if time.monotonic() >= due:
            due = time.monotonic() + _RENEWAL_SECONDS
            for one in _alive.all():
                one.renew()


def _forget_after_fork() -> None:
    """Leaves all of them to the process that this one was forked from."""
    global _PROCESS, _thread, _beating, _stopped
    _PROCESS, _thread, _beating, _stopped = secrets.token_hex(8), None, threading.Lock(), threading.Event()
    for one in _alive.all():
        one.stopped = one.lost = True
        one._lock = threading.RLock()  # the old one may be held by a thread that the child does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
