"""Collective calls of a run: every process of the job makes them, and process 0 decides."""

import contextlib
from collections.abc import Callable, Iterator

from .._processes import coordinator
from ..errors import MismatchError, SaveError, TreeringError
from .pending_saves import PendingSaves, PendingStatus
from .run_directory import Uploads


class CollectiveCalls:
    """Begins the collective calls of one run. An error in one process ends the call in all processes.

    The first call also finds out which hosts have local disks of their own. `closed` is True when the Checkpointer no
    longer writes.
    """

    def __init__(
        self,
        root: str,
        timeout: float,
        uploads: Uploads | None,
        pending_saves: PendingSaves,
    ) -> None:
        self._root, self._timeout, self._pending_saves = root, timeout, pending_saves
        self._undiscovered = uploads
        self.closed = False

    def check_open(self) -> None:
        """Raises `MismatchError` when the Checkpointer is closed."""
        if self.closed:
            raise MismatchError(f"{self._root}: this Checkpointer is closed; make another to continue saving")

    @contextlib.contextmanager
    def call(self, call_name: str) -> Iterator[coordinator.Call]:
        """Begins a call, and ends it if the block raises. A block that returns must have ended it itself."""
        # A process that was started again must not find hosts while its peers, which know them, do something else.
        first = ", its first call" if self._undiscovered else ""
        call = coordinator.begin_call(f"Checkpointer({self._root!r}).{call_name}{first}", timeout=self._timeout)
        with coordinator.ending_call(call):
            call.set_activity("deciding")
            if self._undiscovered:
                self._undiscovered.discover_hosts(call)
                self._undiscovered = None
            yield call

    def wait_for_saves(self, call: coordinator.Call) -> None:
        """Waits until every save is over. All processes raise a failure that process 0 has not raised yet."""
        self._pending_saves.reap(PendingStatus(*call.broadcast(self._pending_saves.wait_for_status)))

    def run_on_process_0(
        self,
        call_name: str,
        action: Callable[[], object],
        *,
        on_all_processes: Callable[[coordinator.Call], None] = lambda call: None,
        afterwards: Callable[[coordinator.Call], None] = lambda call: None,
    ) -> None:
        """Calls `on_all_processes` in all processes, then `action` in process 0, then `afterwards` in all processes.

        All processes wait for `action`, and raise its error instead of calling `afterwards`.
        """

        def attempt() -> None:
            try:
                action()
            except TreeringError:
                raise
            except OSError as error:
                raise SaveError(f"{self._root}: {call_name} failed: {error}") from error

        with self.call(call_name) as call:
            on_all_processes(call)
            call.broadcast(attempt)
            afterwards(call)
            call.close()

    def once_settled(self, call_name: str, action: Callable[[], object]) -> None:
        """Calls `action` in process 0 once every save is over and all processes make this call.

        Because of the wait, the files that another process reads before its call still exist.
        """

        def gather_and_settle(call: coordinator.Call) -> None:
            call.gather_and_decide(None, lambda _: None)
            self.wait_for_saves(call)

        self.run_on_process_0(call_name, action, on_all_processes=gather_and_settle)
