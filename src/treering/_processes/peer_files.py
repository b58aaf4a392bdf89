"""Reads files on other hosts' local tiers: one process of each host serves the files on its disk to the job.

The bytes are not trusted. A peer's disk may be damaged, and the network may change bytes. The reader of the native
format verifies every block of an array file with the checksums in the manifest, wherever the block came from.

The idea is that of torchft, where each replica serves its checkpoint to its peers over HTTP. HTTP is not used here: it
would take more code for ranges, timeouts and a secret than these messages need.
"""

import collections
import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.calls import Call
from .._pytree.jax_private import coordinator_address
from .._threads.forks import WeakRegistry
from ..errors import CorruptError, PeerError, UnsupportedError
from ..stores.read_errors import ReplacedError, reading
from ..stores.served_file import ServedRoot
from ..stores.store import Store
from .peer_connection import CUT_SHORT, Connection, Reply, Request
from .peer_server import PeerServer

Version = tuple[int, int, int]
_Idle = collections.deque[Connection]  # Its methods are atomic, so an interrupt breaks no lock.
_ANY_PORT = 9  # No packet is sent to it.
_alive: "WeakRegistry[PeerFiles]" = WeakRegistry()


class PeerFiles:
    """The files on the local tiers of all hosts of a job, as this process reads them over the network.

    index: this process. host: the process that serves the files of this process's host. Threads may share it.
    """

    def __init__(
        self,
        index: int,
        host: int,
        addresses: Mapping[int, tuple[str, int] | str],
        secret: bytes,
        timeout: float,
        server: PeerServer | None,
    ):
        """`addresses` has the address and port of each process that serves files, or the reason why it does not."""
        self.index, self.host = index, host
        self._addresses, self._secret, self._timeout, self._server = addresses, secret, timeout, server
        self._idle: dict[int, _Idle] = {process: collections.deque() for process in addresses}
        self._finalizer = weakref.finalize(self, _close, server, self._idle)
        _alive.add(self)

    def close(self) -> None:
        """Stops serving files and reading those of others. Garbage collection and the end of the process do too.

        Peers that still read from this host raise `PeerError`, so all processes first end their reads together.
        """
        self._finalizer()

    def read_into(
        self, process: int, folder: str, name: str, target: memoryview, offset: int, version: Version | None = None
    ) -> Version:
        """Fills a buffer from an offset of a file, and returns the version of the file. Takes at most the timeout.

        process: the process that serves the file. folder, name: its place below the local tier of that host.
        version: the result of an earlier call for this file.

        Raises `PeerError` if the process cannot be reached or breaks off, `FileNotFoundError` if it does not have the
        file, `ReplacedError` if the file has another version, `CorruptError` if the file ends earlier or cannot be
        read, and other `OSError`s as that process got them.
        """
        place = f"{folder}/{name} on the host of process {process}"
        try:
            reply = self._request(process, Request(folder, name, offset, len(target)), target)
        except OSError as error:
            address = self._addresses.get(process)
            where = f" ({address[0]} port {address[1]})" if isinstance(address, tuple) else ""
            raise PeerError(
                f"{place}: expected an answer of process {process}{where} within {self._timeout:g} s, found none: "
                f"{error}; it has ended, or the network lets no connection through"
            ) from error
        if reply.status == CUT_SHORT:
            expected = offset + len(target)
            raise CorruptError(f"{place}: expected {expected} bytes, found {reply.size}; it is cut short")
        if reply.status in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        if reply.status:
            with reading(place):
                raise OSError(reply.status, os.strerror(reply.status), place)
        if version and version != reply.version:
            raise ReplacedError(f"{place}: it was replaced while it was open; open it again")
        return reply.version

    def _request(self, process: int, request: Request, target: memoryview) -> Reply:
        """Sends a request and receives the bytes, over an idle connection if there is one."""
        try:
            connection = self._idle[process].pop()
        except LookupError:
            return self._exchange(self._connect(process), process, request, target)
        try:
            return self._exchange(connection, process, request, target)
        except ConnectionError:  # The server closes connections that are idle for long.
            return self._exchange(self._connect(process), process, request, target)

    def _connect(self, process: int) -> Connection:
        address = self._addresses.get(process, "it serves no files")
        if isinstance(address, str):
            raise ConnectionRefusedError(address)
        if not self._finalizer.alive:
            raise ConnectionAbortedError("this process has closed its run")
        connection = Connection(socket.create_connection(address, self._timeout))
        try:
            connection.limit(self._timeout)
            connection.enter(self._secret, process)
        except BaseException:
            connection.close()
            raise
        return connection

    def _exchange(self, connection: Connection, process: int, request: Request, target: memoryview) -> Reply:
        """Sends a request and receives the bytes. Keeps the connection for later requests unless that fails."""
        is_usable = False
        try:
            connection.limit(self._timeout)
            connection.send_request(request)
            reply = connection.receive_reply()
            if not reply.status:
                connection.receive_into(target)
            is_usable = True
            return reply
        finally:
            if is_usable and self._finalizer.alive:
                self._idle[process].append(connection)
            else:
                connection.close()

    def _forget(self) -> None:
        """Closes the descriptors of the parent in a forked child, which is not a process of the job."""
        self._finalizer.detach()
        if self._server:
            self._server.forget()
        _close(None, self._idle)


def _close(server: PeerServer | None, idle: Mapping[int, _Idle]) -> None:
    if server:
        server.close()
    for connections in idle.values():
        while connections:
            connections.pop().close()


def _forget_after_fork() -> None:
    for one in _alive.all():
        one._forget()


def join(call: Call, store: Store, root: str, host: int) -> PeerFiles:
    """Begins to serve and to read files. All processes of a job make this call together.

    root: the local tier of this process's host. host: the process that serves the files of this process's host, the
        same in all processes of a host. If all have the same, none serves files.

    If a process cannot listen, its peers raise `PeerError` with the reason when they need its files.
    """
    serves = host == call.index
    own = _own_address() if serves and call.count > 1 else None

    def decide(found: Sequence[Any]) -> Any:
        serving = [address for is_serving, address in found if is_serving]
        return [secrets.token_hex(32), len(serving) > 1, _public_address(serving)]

    text, is_needed, public = call.gather_and_decide([serves, own], decide)
    secret, server, listening = bytes.fromhex(text), None, None
    try:
        if serves and is_needed:
            try:
                address = _listening_address(own, public)
                server = PeerServer(ServedRoot(store, root), secret, call.index, address, call.timeout)
                listening = [address, server.port]
            except (OSError, UnsupportedError) as error:
                listening = f"it cannot serve its files: {error}"
        found = call.gather_and_decide(listening, list)
    except BaseException:
        if server:
            server.close()
        raise
    addresses = {n: one if isinstance(one, str) else tuple(one) for n, one in enumerate(found) if one}
    return PeerFiles(call.index, host, addresses, secret, call.timeout, server)


def _own_address() -> str | None:
    """Returns the address from which this host reaches process 0 of the job, or None if it cannot be found."""
    host, _, port = (coordinator_address() or "").rpartition(":")
    return _address_towards(host.strip("[]"), int(port)) if host and port.isdigit() else None


def _public_address(addresses: Sequence[str | None]) -> str | None:
    """Returns one of the addresses that other machines can reach; None if all processes are on one machine.

    Some programs pass ``localhost`` to process 0 as its own address. Then only its peers know a public address.
    """
    public = [one for one in addresses if one and not ipaddress.ip_address(one).is_loopback]
    return public[0] if public and len({*addresses}) > 1 else None


def _listening_address(own: str | None, public: str | None) -> str:
    """Returns the address at which this process listens. Raises `OSError` if it finds none.

    own, public: the results of `_own_address` here and of `_public_address`.
    """
    if own is None:
        raise OSError("found no address by which this host reaches process 0")
    address = ipaddress.ip_address(own)
    if public is None:
        return "::1" if address.version == 6 else "127.0.0.1"
    found = _address_towards(public, _ANY_PORT) if address.is_loopback else own
    if found is None:
        raise OSError(f"found no address by which this host reaches {public}")
    return found


def _address_towards(host: str, port: int) -> str | None:
    """Returns the local address of the route to a host. Sends nothing: a datagram socket only looks up the route."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return probe.getsockname()[0]
    return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
