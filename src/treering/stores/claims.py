"""Those who claim one run: their errors, and leases that run out without their owner's knowing."""

from typing import Protocol

from .._threads.alive import Alive
from ..errors import ExistsError, MismatchError, SaveError


class _Expiring(Protocol):
    """A lease that counts no longer when it was not renewed. `check` raises `TakenOverError` then."""

    run: str

    def check(self) -> None: ...


_expiring: "Alive[_Expiring]" = Alive()


class TakenOverError(SaveError):
    """Another job may write here by now. What is in place stays as it is."""


def add(lease: _Expiring) -> None:
    """Has `check` ask a lease, until it is collected."""
    _expiring.add(lease)


def check(path: str) -> None:
    """Raises `TakenOverError` for a path in a run whose lease this process had, and another may have by now.

    To be called right before what would harm that one and cannot be tied to a condition.
    """
    for lease in _expiring.all():
        if path.startswith(lease.run + "/"):
            lease.check()


def lost(run: str) -> MismatchError:
    """The error for one who had the right to write a run."""
    return MismatchError(f"{run}: another Checkpointer of this process has taken this run over; save with that one")


def held(run: str, holder: str, more: str = "") -> ExistsError:
    """The error for one who finds that another process writes a run."""
    return ExistsError(
        f"{run}: {holder} writes this run; wait for it to end, or stop it, or choose another run (reading needs no "
        f"Checkpointer: treering.open, treering.follow){more}"
    )


def busy(run: str) -> ExistsError:
    """The error for one who wants it while another saves."""
    return ExistsError(
        f"{run}: another Checkpointer of this process is saving; call its wait() or close(), or try again when the "
        "save is over"
    )
