"""Serves the files of this host's local tier to the other processes of the job."""

import contextlib
import errno
import logging
import os
import socket
import threading
import time

from .._threads.forks import WeakRegistry
from .._threads.thread import Thread, start_threads
from ..errors import CorruptError, SaveError
from ..stores.served_file import ServedRoot
from .peer_connection import CUT_SHORT, Connection, Reply, Request

_log = logging.getLogger("treering")
_MAX_CONNECTIONS = 256  # each takes a thread; more of them wait until one of these is idle
_MAX_WAITING_CONNECTIONS = 1024
_IDLE_SECONDS = 5.0  # after which a connection without a request is closed
_RETRY_SECONDS = 0.1  # to wait if the process has no file descriptor for a new connection


class PeerServer:
    """Serves byte ranges of the plain files in the folders directly below `root`, as process `index` of the job.

    Daemon threads do the work: one accepts connections, and each connection has one of its own. They end with `close`
    or with the process. A connection whose other end takes no bytes for `timeout` seconds ends too.
    """

    def __init__(self, root: ServedRoot, secret: bytes, index: int, address: str, timeout: float):
        """Listens at a free port of an address. Raises `OSError` if it cannot, `SaveError` without a thread."""
        self._root, self._secret, self._index = root, secret, index
        self._timeout, self._is_closed = timeout, False
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._connected: WeakRegistry[socket.socket] = WeakRegistry()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=_MAX_WAITING_CONNECTIONS)
        self.port: int = self._listening.getsockname()[1]
        try:
            start_threads(Thread(target=self._accept, name="treering-serve", daemon=True))
        except BaseException:
            self._listening.close()
            raise

    def close(self) -> None:
        """Ends all connections. A thread that waits for one of them wakes."""
        self._is_closed = True
        for one in (self._listening, *self._connected.all()):
            with contextlib.suppress(OSError):  # It is closed already.
                one.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def forget(self) -> None:
        """Closes this process's descriptors, in a forked child. Otherwise peers of a dead parent would wait for it."""
        self._is_closed = True
        for one in (self._listening, *self._connected.all()):
            one.close()

    def _accept(self) -> None:
        while not self._is_closed:
            self._free.acquire()
            try:
                connected, _ = self._listening.accept()
            except OSError:
                self._free.release()
                if not self._is_closed:
                    time.sleep(_RETRY_SECONDS)
                continue
            try:
                start_threads(Thread(target=self._serve, args=[connected], name="treering-serve", daemon=True))
            except SaveError as error:  # The peer tries another host, or raises an error that names this one.
                _log.warning("%s: a peer's connection was closed: %s", self._root.path, error)
                connected.close()
                self._free.release()

    def _serve(self, connected: socket.socket) -> None:
        try:
            with connected:
                self._connected.add(connected)
                connection = Connection(connected)
                connection.limit(self._timeout)
                if not connection.admit(self._secret, self._index):
                    _log.warning("%s: refused a connection that does not know the secret of the job", self._root.path)
                    return
                while not self._is_closed:
                    connection.limit(_IDLE_SECONDS)
                    request = connection.receive_request()
                    connection.limit(self._timeout)
                    self._answer(connection, request)
        except OSError:  # The peer has closed its end, is idle, or has died. It raises an error itself if it is alive.
            return
        finally:
            self._free.release()

    def _answer(self, connection: Connection, request: Request) -> None:
        with contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(self._root.opened(request.folder, request.name))
                found = os.fstat(fd)
            except CorruptError:
                connection.send_reply(Reply(errno.EACCES))
                return
            except OSError as error:
                connection.send_reply(Reply(error.errno or errno.EACCES))
                return
            is_inside = request.offset + request.nbytes <= found.st_size
            state = found.st_size, found.st_ino, found.st_mtime_ns
            connection.send_reply(Reply(0 if is_inside else CUT_SHORT, *state))
            if is_inside and request.nbytes:
                connection.send_file(fd, request.offset, request.nbytes)
