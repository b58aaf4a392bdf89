"""Defines the calls that all processes of a job make together, as one process sees them."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_ERROR_POLLS = 50  # number of polls for the error of process 0, a tenth of a second apart
_WATCH_SECONDS = 1.0  # seconds between polls for failures of peers, while this process works
_call_numbers = itertools.count()  # numbers of the calls that only this process makes


class Call(Protocol):
    """One collective call, as one process sees it.

    index, count: the index of this process and the number of processes.
    timeout: seconds without a sign of life after which another process is considered dead.
    in_doubt: True if this process has sent its value to process 0 and does not know the decision yet.
    name: the name of the call, the same in all processes.
    """

    index: int
    count: int
    timeout: float
    in_doubt: bool

    @property
    def name(self) -> str: ...

    def set_activity(self, what: str) -> None:
        """Sets the activity of this process, for the errors of its peers. The first use begins the heartbeat."""
        ...

    def gather_and_decide(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Sends `value` (JSON) to process 0, which calls `decide` with the values of all processes, by index.

        Every process returns the decision, or raises the error of `decide`.
        """
        ...

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        """Calls `decide` in process 0. Every process returns the decision, or raises the error of `decide`."""
        ...

    def check(self) -> None:
        """Raises the error of process 0 if it has failed."""
        ...

    def check_all(self) -> None:
        """Raises the error of process 0, and the errors of the processes that this one hears (see `tree`).

        Raises `PeerError` if one of these has died.
        """
        ...

    def cancel(self, reason: BaseException) -> None:
        """Ends the wait of the thread that is in this call. That thread raises `reason`."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Ends the call for this process. With an error, also for its peers, which raise that error."""
        ...


class SingleProcessCall:
    """A call in a job of one process, or a call that concerns only this process."""

    index, count, timeout, in_doubt = 0, 1, 0.0, False

    def __init__(self) -> None:
        self.name = f"alone/{next(_call_numbers)}"

    def set_activity(self, what: str) -> None: ...

    def gather_and_decide(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        return decide([value])

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        return decide()

    def check(self) -> None: ...

    def check_all(self) -> None: ...

    def cancel(self, reason: BaseException) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...


SINGLE_PROCESS = SingleProcessCall()  # passed by code that needs a `Call` and makes none


def raise_error_of_process_0(call: Call) -> None:
    """Raises the error that process 0 is about to send; returns if none comes within five seconds.

    Used when the files that this process writes are gone: process 0 removes them when it fails, and its error says why.
    """
    if call.index:
        for _ in range(_ERROR_POLLS):
            call.check()
            time.sleep(0.1)


def error_watcher(call: Call) -> Callable[[], None]:
    """Returns a function to call often while this process works. About once a second it raises errors of peers."""
    looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked >= _WATCH_SECONDS:
            looked = time.monotonic()
            call.check_all()

    return look
