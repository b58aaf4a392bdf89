"""Lets hosts read files on one another's local tiers: finds addresses, shares a secret, and begins to serve."""

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from .._core.calls import Call
from .._pytree.jax_private import coordinator_address
from ..errors import UnsupportedError
from ..stores.served_file import ServedRoot
from ..stores.store import Store
from .peer_files import PeerFiles
from .peer_server import PeerServer

_ANY_PORT = 9  # No packet is sent to it.


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
