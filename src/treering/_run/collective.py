"""Collective calls of a run: every process of the job makes them, and process 0 decides."""

import contextlib
from collections.abc import Callable, Iterator

from .._processes import coordinator
from ..errors import MismatchError, SaveError, TreeringError
from .saves_under_way import UnderWay, Verdict


class Collective:
    """Begins the collective calls of one run. An error in one process ends the call in all processes.

    The first call also calls `meet`. `closed` is True when the Checkpointer no longer writes.
    """

    def __init__(
        self, root: str, timeout: float, meet: Callable[[coordinator.Call], None], under_way: UnderWay
    ) -> None:
        self._root, self._timeout, self._under_way = root, timeout, under_way
        self._meet: Callable[[coordinator.Call], None] | None = meet
        self.closed = False

    def check_open(self) -> None:
        """Raises `MismatchError` when the Checkpointer is closed."""
        if self.closed:
            raise MismatchError(f"{self._root}: this Checkpointer is closed; make another to continue saving")

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[coordinator.Call]:
        """Begins a call, and ends it if the block raises. A block that returns must have ended it itself."""
        call = coordinator.begin(f"Checkpointer({self._root!r}).{what}", timeout=self._timeout)
        with coordinator.ending(call):
            call.doing("deciding")
            if self._meet:
                self._meet(call)
                self._meet = None
            yield call

    def settle(self, call: coordinator.Call) -> None:
        """Waits until every save is over. All processes raise a failure that process 0 has not raised yet."""
        self._under_way.settle(Verdict(*call.broadcast(self._under_way.after_all)))

    def once(
        self, what: str, do: Callable[[], object], *, first: Callable[[coordinator.Call], None] = lambda call: None
    ) -> None:
        """Calls `first` in all processes, then `do` in process 0. All processes wait for `do`, and raise its error."""

        def attempt() -> None:
            try:
                do()
            except TreeringError:
                raise
            except OSError as error:
                raise SaveError(f"{self._root}: {what} failed: {error}") from error

        with self.call(what) as call:
            first(call)
            call.broadcast(attempt)
            call.close()

    def once_settled(self, what: str, do: Callable[[], object]) -> None:
        """Calls `do` in process 0 once every save is over and all processes make this call.

        Because of the wait, the files that another process reads before its call still exist.
        """

        def gather_and_settle(call: coordinator.Call) -> None:
            call.gather_and_decide(None, lambda _: None)
            self.settle(call)

        self.once(what, do, first=gather_and_settle)
