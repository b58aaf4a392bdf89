"""The errors of those who claim one run within a process."""

from ..errors import ExistsError, MismatchError, SaveError


class TakenOverError(SaveError):
    """Another job may write here by now. What is in place stays as it is."""


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
