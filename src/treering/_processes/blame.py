"""Chooses the processes that the error of a timed-out wait names, and the words about them."""

import dataclasses
from collections.abc import Collection

from .liveness import LivenessReport

_USUAL_MISTAKE = (
    '`if jax.process_index() == 0:` around it is the usual mistake; processes="this" saves one process\'s data alone'
)
ALL_MUST_CALL = f"; every process must make this call: {_USUAL_MISTAKE}"
_NOT_COMMITTED = "nothing was committed"
_IN_DOUBT = "this process does not know whether the checkpoint was committed"


@dataclasses.dataclass(frozen=True)
class Blame:
    """The processes to name, the seconds of silence of the first one, and the end of the error message."""

    processes: list[int]
    seconds: float
    ending: str


def find_suspects(
    roll: LivenessReport,
    awaited: list[int],
    *,
    seen: Collection[int],
    here: int,
    seconds: float,
    known: bool,
    in_doubt: bool,
) -> Blame:
    """Blames dead processes first, then processes that ended, and live ones only if the roll has none of these.

    here: the index of this process.
    awaited: the processes from which this one has heard nothing for `seconds` seconds.
    seen: those of `awaited` that were in this call before.
    known: True if the roll lists every process that was dead when this one began to wait.
    in_doubt: True if the commit is in doubt for this process.

    A process that cancelled its call because of a peer is blamed only if no other process can be.
    """
    outcome = _IN_DOUBT if in_doubt else _NOT_COMMITTED
    dead = {**roll.silent, **dict.fromkeys(seen, seconds)}
    dead.pop(here, None)  # The roll lists this process as silent if it was suspended itself.
    if dead:
        return Blame(list(dead), next(iter(dead.values())), f"; dead, stopped or cut off, and {outcome}")
    if roll.ended:
        return Blame(roll.ended, seconds, f"; ended without this call, and {outcome}")
    unknown = [index for index in roll.unknown if index != here]
    suspects = [index for index in awaited if index not in roll.gave_up]
    if unknown or (suspects and not known):
        both = list(dict.fromkeys([*unknown, *suspects]))
        return Blame(both, seconds, f"; dead, or alive without making this call: {_USUAL_MISTAKE}")
    if suspects:
        return Blame(suspects, seconds, f"; alive{ALL_MUST_CALL}")
    return Blame(awaited, seconds, f"; stopped waiting for another process and ended, and {outcome}")
