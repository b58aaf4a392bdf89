"""Lets one process of a host pass on the signs of life of all processes on that host.

A very large job needs this, because the store in process 0 cannot take a sign of each process often enough. The first
process of a host that enters a call listens at a socket. Its peers on the host send it their signs, and it answers. A
process that gets no answer puts its sign into the store itself: the listening process is dead or has left the call.

The sockets are abstract: they have names but no files, and end with their process. Only Linux has them. On other
systems, and in a container of its own, every process puts its signs into the store itself.
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

from . import messages

_MAX_WAITING_PROCESSES = 1024  # connections that may wait to be accepted
_MAX_MESSAGE_BYTES = 1 << 16  # bytes of a message
_UNANSWERED_SECONDS = 3.0  # seconds without an answer, after which a process puts its signs into the store itself


class HostRelay(Protocol):
    """The connection of this process to the processes of its host, in one call. Only one thread may use it."""

    def signs(self, index: int, text: str) -> dict[int, str]:
        """Returns the signs of life that this process must put into the store, by process.

        `index` and `text` are this process and its own sign.
        """
        ...

    def close(self) -> None: ...


class _Speaker:
    """The process that passes on the signs of all processes of its host."""

    def __init__(self, listening: socket.socket):
        self._listening = listening
        self._connections: list[socket.socket] = []
        # The last sign of each process. That of a dead process stays and is not renewed, so its peers notice.
        self._signs: dict[int, str] = {}

    def signs(self, index: int, text: str) -> dict[int, str]:
        with contextlib.suppress(OSError):  # No connection waits, or this process has no more file descriptors.
            while True:
                connection, _ = self._listening.accept()
                connection.setblocking(False)
                self._connections.append(connection)
                if not _is_same_user(connection):
                    self._connections.remove(connection)
                    connection.close()
        for connection in list(self._connections):
            if not self._read_signs(connection):
                self._connections.remove(connection)
                connection.close()
        return {**self._signs, index: text}

    def _read_signs(self, connection: socket.socket) -> bool:
        """Reads the messages of one process. Returns False if its connection is closed or invalid."""
        try:
            while message := _receive(connection):
                index, text = msgspec.json.decode(message, type=tuple[int, str | None])
                if text is None:
                    self._signs.pop(index, None)
                else:
                    self._signs[index] = text
                connection.send(b"heard")
        except BlockingIOError:
            return True
        except (OSError, ValueError, msgspec.MsgspecError):
            pass
        return False

    def close(self) -> None:
        for connection in (self._listening, *self._connections):
            connection.close()


class _Relayed:
    """A process whose signs another process passes on, as long as that one answers."""

    def __init__(self, speaker: socket.socket):
        self._speaker, self._answered, self._index = speaker, time.monotonic(), -1

    def signs(self, index: int, text: str) -> dict[int, str]:
        self._index = index
        try:
            with contextlib.suppress(BlockingIOError):
                while self._speaker.recv(_MAX_MESSAGE_BYTES):
                    self._answered = time.monotonic()
            self._speaker.send(msgspec.json.encode((index, text)))
        except OSError:
            return {index: text}
        return {} if time.monotonic() - self._answered < _UNANSWERED_SECONDS else {index: text}

    def close(self) -> None:
        with contextlib.suppress(OSError):  # Without this message the peers would consider this process dead.
            self._speaker.send(msgspec.json.encode((self._index, None)))
        self._speaker.close()


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_MAX_MESSAGE_BYTES)
    except ConnectionResetError:  # The peer left without reading its answers. Its own messages can still be read.
        return connection.recv(_MAX_MESSAGE_BYTES)


def _is_same_user(connection: socket.socket) -> bool:
    """Returns True if the process at the other end has the same user. Any user of the host can see socket names."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user == os.getuid()


def encode_signs(every: float, signs: Mapping[int, str]) -> str:
    """Returns the text with the signs of a host that its listening process puts into the store.

    `every` is the longest time in seconds until it puts the next one.
    """
    return msgspec.json.encode((every, signs)).decode()


def decode_signs(found: Mapping[int, str]) -> tuple[dict[int, str], dict[int, float]]:
    """Returns the sign of each process, and for relayed processes the seconds between their signs.

    A process can have a sign of its own and a relayed one. Both become one text, so that a change of either is noticed.
    `found` has the texts in the store by process. A text that begins with `[` is one of `encode_signs`.
    """
    signs = {index: text for index, text in found.items() if not text.startswith("[")}
    every: dict[int, float] = {}
    for text in found.values():
        if text.startswith("["):
            seconds, passed_on = msgspec.json.decode(text, type=tuple[float, dict[int, str]])
            for index, sign in passed_on.items():
                before = signs.get(index, "")
                if not before or index in every:
                    every[index] = max(seconds, every.get(index, 0))
                signs[index] = before if before.startswith(messages.FAILED) else f"{before}, {sign}" if before else sign
    return signs, every


def join_host(name: str) -> HostRelay | None:
    """Connects this process to the processes of its host that use the same name.

    Returns None if this process must put its signs into the store itself.
    """
    if sys.platform != "linux":
        return None
    with contextlib.ExitStack() as made:
        try:
            connection = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.setblocking(False)
            try:
                connection.bind(f"\0treering/{name}")
                connection.listen(_MAX_WAITING_PROCESSES)
                host: HostRelay = _Speaker(connection)
            except OSError:  # Another process of the host listens already.
                connection.connect(f"\0treering/{name}")
                if not _is_same_user(connection):
                    return None
                host = _Relayed(connection)
        except OSError:
            return None
        made.pop_all()
        return host
