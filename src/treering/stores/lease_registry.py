"""The leases of this process, which may expire unnoticed, and the errors of processes that compete for a run."""

from typing import Protocol

from .._threads.forks import WeakRegistry
from ..errors import ExistsError, MismatchError, SaveError


class _ExpiringLease(Protocol):
    """The right to write a place and everything below it, which expires unless it is renewed.

    `check` raises `LeaseLostError` when it may have expired.
    """

    @property
    def place(self) -> str: ...

    def check(self) -> None: ...


_leases: "WeakRegistry[_ExpiringLease]" = WeakRegistry()


class LeaseLostError(SaveError):
    """Another job may have acquired the right to write here. The files in place stay as they are."""


def add(lease: _ExpiringLease) -> None:
    """Registers a lease for `check`, until the lease is garbage collected."""
    _leases.add(lease)


def check(path: str) -> None:
    """Raises `LeaseLostError` if this process had the right to write a path and another process may have it by now.

    It asks for all that cover the path: the run, the checkpoint and the temporary folder. Call it right before an
    operation that would harm the new holder and cannot be made conditional.
    """
    for lease in _leases.all():
        if path.startswith(lease.place + "/"):
            lease.check()


def lost_error(run: str) -> MismatchError:
    """Returns the error for a Checkpointer whose run another one of this process has acquired."""
    return MismatchError(f"{run}: another Checkpointer of this process writes this run by now; save with that one")


def held_error(run: str, holder: str, more: str = "") -> ExistsError:
    """Returns the error for a process that finds another process writing the run."""
    return ExistsError(
        f"{run}: {holder} writes this run; wait for it to end, or stop it, or choose another run (reading needs no "
        f"Checkpointer: treering.open, treering.follow){more}"
    )


def busy_error(run: str) -> ExistsError:
    """Returns the error for a Checkpointer that wants the run while another one of this process saves."""
    return ExistsError(
        f"{run}: another Checkpointer of this process is saving; call its wait() or close(), or try again when the "
        "save is over"
    )
