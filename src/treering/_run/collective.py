"""Calls on a run that every process of the job makes, in which process 0 decides."""

import contextlib
from collections.abc import Callable, Iterator

from .._processes import coordinator
from ..errors import SaveError, TreeringError


class Collective:
    """Begins the calls of one run; an error in one process ends a call in all processes. The first calls `meet`."""

    def __init__(self, root: str, timeout: float, meet: Callable[[coordinator.Call], None]):
        self._root, self._timeout = root, timeout
        self._meet: Callable[[coordinator.Call], None] | None = meet

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
