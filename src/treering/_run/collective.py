"""Calls on a run that every process of the job makes, in which process 0 decides."""

import contextlib
from collections.abc import Callable, Iterator

from .._processes import coordinator
from ..errors import MismatchError, SaveError, TreeringError
from .saves_under_way import UnderWay, Verdict


class Collective:
    """Begins the calls of one run; an error in one process ends a call in all processes. The first calls `meet`.

    `closed`: the Checkpointer writes nothing any more.
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
            raise MismatchError(f"{self._root}: this Checkpointer is closed; make another to go on saving")

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[coordinator.Call]:
        """Begins a call, and ends it when the block raises; otherwise the block ends it."""
        call = coordinator.begin(f"Checkpointer({self._root!r}).{what}", timeout=self._timeout)
        with coordinator.ending(call):
            call.doing("deciding")
            if self._meet:
                self._meet(call)
                self._meet = None
            yield call

    def settle(self, call: coordinator.Call) -> None:
        """Returns when every save is over; all processes raise a failure that process 0 has not raised yet."""
        self._under_way.settle(Verdict(*call.broadcast(self._under_way.after_all)))

    def once(
        self, what: str, do: Callable[[], object], *, first: Callable[[coordinator.Call], None] = lambda call: None
    ) -> None:
        """Calls `first` in all processes, then `do` in process 0; all return when that is done, or raise its error."""

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
        """Calls `do` in process 0 when every save is over and all processes make this call.

        So whatever another process reads before its call is still in place.
        """

        def gather_and_settle(call: coordinator.Call) -> None:
            call.gather_and_decide(None, lambda _: None)
            self.settle(call)

        self.once(what, do, first=gather_and_settle)
