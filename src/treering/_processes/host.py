"""The processes of a job on one host, of which one gives the signs of life of all.

For jobs so large that the store in process 0 cannot hear each of them often. The first process of a host that comes to
a call listens at a socket; the others tell it again and again that they live, and are answered. Who gets no answer
speaks for itself: the one that listened is dead, or has left the call. The sockets have names but no files, and end
with their process. Linux alone has such; elsewhere, and in a container of its own, every process speaks for itself.
"""

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

FAILED = "failed "  # begins what a process has failed with, in the place of its sign
_WAITING = 1024  # processes that may wait until they are let in
_MOST_BYTES = 1 << 16  # of what one says
_UNANSWERED_SECONDS = 3.0  # after which one speaks for itself


class Host(Protocol):
    """This process among those of its host, in one call; for one thread."""

    def signs(self, index: int, text: str) -> dict[int, str]:
        """The signs of life that this process is to pass on, by process, when its own is `text`."""
        ...

    def close(self) -> None: ...


class _Listening:
    """The process that speaks for all."""

    def __init__(self, listening: socket.socket):
        self._listening = listening
        self._others: list[socket.socket] = []
        self._signs: dict[int, str] = {}  # the last one of a process stays when that has ended, and is not renewed

    def signs(self, index: int, text: str) -> dict[int, str]:
        with contextlib.suppress(OSError):  # nobody waits, or there are no more files for them
            while True:
                one, _ = self._listening.accept()
                one.setblocking(False)
                self._others.append(one)
                if not _is_ours(one):
                    self._others.remove(one)
                    one.close()
        for one in list(self._others):
            if not self._hear(one):
                self._others.remove(one)
                one.close()
        return {**self._signs, index: text}

    def _hear(self, one: socket.socket) -> bool:
        """Whether the process at the other end lives."""
        try:
            while message := _received(one):
                index, text = msgspec.json.decode(message, type=tuple[int, str | None])
                if text is None:
                    self._signs.pop(index, None)
                else:
                    self._signs[index] = text
                one.send(b"heard")
        except BlockingIOError:
            return True
        except (OSError, ValueError, msgspec.MsgspecError):
            pass
        return False

    def close(self) -> None:
        for one in (self._listening, *self._others):
            one.close()


class _Telling:
    """A process that another speaks for, as long as that answers."""

    def __init__(self, speaker: socket.socket):
        self._speaker, self._answered, self._index = speaker, time.monotonic(), -1

    def signs(self, index: int, text: str) -> dict[int, str]:
        self._index = index
        try:
            with contextlib.suppress(BlockingIOError):
                while self._speaker.recv(_MOST_BYTES):
                    self._answered = time.monotonic()
            self._speaker.send(msgspec.json.encode((index, text)))
        except OSError:
            return {index: text}
        return {} if time.monotonic() - self._answered < _UNANSWERED_SECONDS else {index: text}

    def close(self) -> None:
        with contextlib.suppress(OSError):  # one that leaves is not to be taken for dead
            self._speaker.send(msgspec.json.encode((self._index, None)))
        self._speaker.close()


def _received(one: socket.socket) -> bytes:
    try:
        return one.recv(_MOST_BYTES)
    except ConnectionResetError:  # it has left answers unread; what it has said can be read all the same
        return one.recv(_MOST_BYTES)


def _is_ours(one: socket.socket) -> bool:
    """Whether the process at the other end is of the same user: names of sockets are no secrets."""
    _, user, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()


def as_text(every: float, signs: Mapping[int, str]) -> str:
    """What the process that speaks puts into the store, at least every so many seconds."""
    return msgspec.json.encode((every, signs)).decode()


def each(found: Mapping[int, str]) -> tuple[dict[int, str], dict[int, float]]:
    """The sign of each process, by what was found in the store; and how often those come that do not come of itself."""
    signs = {index: text for index, text in found.items() if not text.startswith("[")}
    every: dict[int, float] = {}
    for text in found.values():
        if text.startswith("["):
            seconds, passed_on = msgspec.json.decode(text, type=tuple[float, dict[int, str]])
            for index, sign in passed_on.items():
                before = signs.get(index, "")
                if not before or index in every:
                    every[index] = max(seconds, every.get(index, 0))
                signs[index] = before if before.startswith(FAILED) else f"{before}, {sign}" if before else sign
    return signs, every


def join(name: str) -> Host | None:
    """This process among those of its host that say the same name; None where it can only speak for itself."""
    if sys.platform != "linux":
        return None
    with contextlib.ExitStack() as made:
        try:
            one = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            one.setblocking(False)
            try:
                one.bind(f"\0treering/{name}")
                one.listen(_WAITING)
                host: Host = _Listening(one)
            except OSError:  # another one has come first
                one.connect(f"\0treering/{name}")
                if not _is_ours(one):
                    return None
                host = _Telling(one)
        except OSError:
            return None
        made.pop_all()
        return host
