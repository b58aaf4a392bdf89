"""The messages between a process that serves files of its host and a process that reads them.

1. The server sends a nonce. The client answers with a nonce of its own and a code of both, made with the secret of the
   job. The server answers with its code. Each code also covers the index of the process that serves. So a client never
   reads from a server of another job, nor from another process that got the same address.
2. The client sends requests, one at a time. The server answers each with the state of the file, and then the bytes.

The challenge follows `multiprocessing.connection`, with SHA-256 and in one round trip less. That module itself is not
used, because it has no timeouts. Nothing is encrypted, as in JAX's own messages between processes, and the bytes of
files are not authenticated: the reader verifies each block with the checksums in the manifest.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from typing import NamedTuple

CUT_SHORT = -1  # the status of a request for bytes behind the end of the file; others are 0 or an `errno`
_NONCE_BYTES = 32
_MAX_NAME_BYTES = 4096
_REQUEST = struct.Struct("!HHQQ")  # bytes of the folder's name and of the file's name, offset, number of bytes
_REPLY = struct.Struct("!iQQQ")  # status, and of the file: bytes, inode, time of its last change in ns


class Request(NamedTuple):
    """A request for a range of the bytes of a file."""

    folder: str
    name: str
    offset: int
    nbytes: int


class Reply(NamedTuple):
    """The status of a request, and the state of the file when it was opened. With status 0 the bytes follow."""

    status: int
    size: int = 0
    inode: int = 0
    modified_ns: int = 0

    @property
    def version(self) -> tuple[int, int, int]:
        """Equal for the same file, different for a file that replaced it."""
        return self[1:]


class Connection:
    """One end of a connection. Until the next call of `limit`, all its operations together take limited time.

    All operations raise `OSError`: a `TimeoutError` after that time, a `ConnectionError` if the other end has closed.
    """

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self._deadline = 0.0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit(self, seconds: float) -> None:
        """Sets the time for the next operations."""
        self._deadline = time.monotonic() + seconds

    def send(self, data: bytes) -> None:
        self._set_timeout()
        self.socket.sendall(data)

    def receive_into(self, target: memoryview) -> None:
        while len(target):
            self._set_timeout()
            if not (count := self.socket.recv_into(target)):
                raise ConnectionResetError("the other end closed the connection")
            target = target[count:]

    def receive(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Sends a range of a file from the page cache, without a copy in this process. Raises if the file ends."""
        with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
            self._set_timeout()
            if self.socket.sendfile(file, offset, nbytes) != nbytes:
                raise ConnectionAbortedError("the file was cut short while it was sent")

    def close(self) -> None:
        self.socket.close()

    def _set_timeout(self) -> None:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self.socket.settimeout(left)

    # The challenge

    def admit(self, secret: bytes, index: int) -> bool:
        """Challenges a client, as process `index`. Returns False if it does not know the secret."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.send(nonce)
        nonces = nonce + self.receive(_NONCE_BYTES)
        if not hmac.compare_digest(self.receive(_NONCE_BYTES), _code(secret, b"client", index, nonces)):
            return False
        self.send(_code(secret, b"server", index, nonces))
        return True

    def enter(self, secret: bytes, index: int) -> None:
        """Answers the challenge of process `index`. Raises `ConnectionRefusedError` if its code is wrong."""
        own = secrets.token_bytes(_NONCE_BYTES)
        nonces = self.receive(_NONCE_BYTES) + own
        self.send(own + _code(secret, b"client", index, nonces))
        try:
            code = self.receive(_NONCE_BYTES)
        except ConnectionError:
            code = b""
        if not hmac.compare_digest(code, _code(secret, b"server", index, nonces)):
            raise ConnectionRefusedError("it does not know the secret of this job; another program may be there")

    # Requests

    def send_request(self, request: Request) -> None:
        folder, name = os.fsencode(request.folder), os.fsencode(request.name)
        self.send(_REQUEST.pack(len(folder), len(name), request.offset, request.nbytes) + folder + name)

    def receive_request(self) -> Request:
        """Waits for the next request. Raises `ConnectionError` for one that no client of Treering sends."""
        folder, name, offset, nbytes = _REQUEST.unpack(self.receive(_REQUEST.size))
        if max(folder, name) > _MAX_NAME_BYTES:
            raise ConnectionAbortedError("the names in a request are too long")
        return Request(os.fsdecode(self.receive(folder)), os.fsdecode(self.receive(name)), offset, nbytes)

    def send_reply(self, reply: Reply) -> None:
        self.send(_REPLY.pack(*reply))

    def receive_reply(self) -> Reply:
        return Reply(*_REPLY.unpack(self.receive(_REPLY.size)))


def _code(secret: bytes, side: bytes, index: int, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + index.to_bytes(4, "big") + nonces, "sha256")
