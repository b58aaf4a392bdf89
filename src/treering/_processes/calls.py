"""A call that all processes of a job make together, as each of them sees it."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_ERROR_POLLS = 50  # looks for the error of process 0, a tenth of a second apart
_LOOK_SECONDS = 1.0  # seconds between looks for failures of other processes, while this one has something to do
_alone = itertools.count()  # calls of this process alone


class Call(Protocol):
    """One collective call, seen from one process; `name` is the same in all processes.

    After `timeout` seconds without a sign of life another process is taken for dead. `undecided`: this process has sent
    its value to process 0 and does not know the decision.
    """

    index: int
    count: int
    timeout: float
    undecided: bool

    @property
    def name(self) -> str: ...

    def doing(self, what: str) -> None:
        """Says what this process does now, for the error messages of the others; begins the heartbeat."""
        ...

    def gather_and_decide(self, mine: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Sends `mine` (JSON) to process 0, which decides; every process returns its decision or raises its error."""
        ...

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        """Process 0 decides without values of the others; every process returns its decision or raises its error."""
        ...

    def check(self) -> None:
        """Raises what process 0 failed with, if it has failed."""
        ...

    def check_all(self) -> None:
        """The same; in process 0, what any process failed with, or `PeerError` for one that has died."""
        ...

    def cancel(self, reason: BaseException) -> None:
        """Ends the waiting of the thread that is in this call, which raises `reason`."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Ends the call for this process; with an error, for the other processes as well."""
        ...


class SingleProcess:
    """A call in a job of one process, or one that concerns this process alone."""

    index, count, timeout, undecided = 0, 1, 0.0, False

    def __init__(self) -> None:
        self.name = f"alone/{next(_alone)}"

    def doing(self, what: str) -> None: ...

    def gather_and_decide(self, mine: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        return decide([mine])

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        return decide()

    def check(self) -> None: ...

    def check_all(self) -> None: ...

    def cancel(self, reason: BaseException) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...


ALONE = SingleProcess()  # for what is no call of its own


def raise_cause(call: Call) -> None:
    """Raises what process 0 is about to say, which has removed what this process was writing; returns if it doesn't."""
    if call.index:
        for _ in range(_ERROR_POLLS):
            call.check()
            time.sleep(0.1)


def watching(call: Call) -> Callable[[], None]:
    """A function to call again and again while this process works: now and then it raises what another failed with."""
    looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked >= _LOOK_SECONDS:
            looked = time.monotonic()
            call.check_all()

    return look
