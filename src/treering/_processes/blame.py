"""Which processes to name in the error of a process whose wait timed out, and what to say about them."""

import dataclasses
from collections.abc import Collection

from .roll import Roll

_USUAL_MISTAKE = (
    '`if jax.process_index() == 0:` around it is the usual mistake; processes="this" saves one process\'s data alone'
)
EVERYONE = f"; every process must make this call: {_USUAL_MISTAKE}"
_NOT_COMMITTED = "nothing was committed"
_NOT_KNOWN = "whether the checkpoint was committed is not known here"


@dataclasses.dataclass(frozen=True)
class Blame:
    """The processes to name, for how many seconds nothing was heard from the first one, and how the error ends."""

    processes: list[int]
    seconds: float
    ending: str


def find(
    roll: Roll, awaited: list[int], *, seen: Collection[int], here: int, seconds: float, known: bool, undecided: bool
) -> Blame:
    """Blames the dead first, then those that ended, and those that are alive only where the roll has none of these.

    Process `here` has heard nothing from `awaited` for so many seconds; `seen` are those of them that were in the call.
    `known`: the roll has every process that was dead when this one began to wait. A process that gave up because of
    another is never the cause if there is a better one.
    """
    outcome = _NOT_KNOWN if undecided else _NOT_COMMITTED
    dead = {**roll.silent, **dict.fromkeys(seen, seconds)}
    dead.pop(here, None)  # this process stood still itself
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
        return Blame(suspects, seconds, f"; alive{EVERYONE}")
    return Blame(awaited, seconds, f"; gave up waiting for another process and ended, and {outcome}")
