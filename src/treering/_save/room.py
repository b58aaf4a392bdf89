"""Waits for room on a full disk during a save, if something under way is about to free it.

The write that found the disk full is repeated, so no estimate of free room is needed: quotas and other writers make
every estimate unreliable.

Only process 0 can free room. A process whose disk is full reports that in the exchange that precedes the commit. Its
peers join this exchange once they have written their files, or their disks are full too. Then process 0 waits for room,
and all processes repeat the exchange.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .._core.calls import Call, error_watcher
from ..errors import SaveError
from ..stores.read_errors import is_full
from ..stores.store import Store

T = TypeVar("T")


class RoomMaker(Protocol):
    """Frees room during a save."""

    def wait_for_room(self, problem: str, step: int | None, check: Callable[[], None]) -> str | None:
        """Waits until room was freed, and returns None. If nothing under way frees room, returns the reason.

        Process 0 calls it. Log lines begin with `problem`. `step` is being saved. Calls `check` often, which raises if
        the save has failed meanwhile.
        """
        ...

    def free_on_all_hosts(self) -> None:
        """Frees room on the disks of all hosts. Every process calls it after `wait_for_room` has returned None."""
        ...


class Room:
    """Repeats the writes of one save that found the disk full, after room was freed.

    Without a `maker`, nothing can free room.
    """

    def __init__(self, store: Store, call: Call, maker: RoomMaker | None, step: int | None, check: Callable[[], None]):
        self._store, self._call, self._maker, self._step, self._check = store, call, maker, step, check
        self._lock = threading.Lock()  # held by the thread that waits for room, and then writes first
        self._error: BaseException | None = None  # the error of the last wait
        # True in process 0 while its peers wait for its decision, so that it must not exchange
        self.decides = call.index == 0

    def retry(self, path: str, nbytes: int, write: Callable[[], T]) -> T:
        """Calls `write`, which needs `nbytes` bytes of room, until the disk at the path is not full.

        Raises `SaveError` if nothing under way frees room. Several threads may call it: the others wait while one does.
        """
        with self._lock:
            while True:
                try:
                    return write()
                except OSError as error:
                    if not is_full(error):
                        raise
                    if self._error:
                        raise self._error from error
                    self._wait(path, nbytes, error)

    def gather_and_decide(self, value: Any, decide: Callable[[Sequence[Any]], Any], problem: str = "") -> Any:
        """Does what `Call.gather_and_decide` does, and repeats it until no process waits for room.

        `decide` must not return None, which stands for a process that waits. With a `problem`, this process waits for
        room: then it returns None after the first exchange.
        """

        def decide_or_wait(reports: Sequence[Any]) -> Any:
            if full := [problem for _, problem in reports if problem]:
                self._wait_for_room(full[0])
                return None
            self.decides = True
            return decide([value for value, _ in reports])

        while True:
            try:
                decision = self._call.gather_and_decide([value, problem], decide_or_wait)
            finally:
                if problem:
                    self._call.in_doubt = False  # No commit follows while a process lacks room.
            if decision is None and self._maker:
                self._maker.free_on_all_hosts()
            if problem or decision is not None:
                return decision

    def _wait(self, path: str, nbytes: int, error: OSError) -> None:
        needed = f"{nbytes} bytes" if nbytes else "a new file"
        problem = f"{path}: expected room for {needed}, found {self._free(path)} ({os.strerror(error.errno or 0)})"
        try:
            # While process 0 decides, it cannot begin another exchange. Without a maker no process can free room.
            if self.decides or self._maker is None:
                self._wait_for_room(problem)
            else:
                self._call.set_activity("waiting for room on the disk")
                self.gather_and_decide(None, _never_called, problem)
                self._call.set_activity("writing")
        except BaseException as failure:
            self._error = failure
            if isinstance(failure, SaveError):
                raise failure from error
            raise

    def _free(self, path: str) -> str:
        ask = getattr(self._store, "free_bytes", None)  # Only a file system knows.
        found = ask and ask(path)
        return "an unknown amount" if found is None else f"{found} bytes free"

    def _wait_for_room(self, problem: str) -> None:
        raise_errors_of_peers = error_watcher(self._call)

        def check() -> None:
            self._check()
            raise_errors_of_peers()

        reason = self._maker.wait_for_room(problem, self._step, check) if self._maker else "this save frees no room"
        if reason is not None:
            raise SaveError(f"{problem}; {reason}; delete files there or save to a larger disk, then save again")


def _never_called(_: Sequence[Any]) -> Any:
    """Stands for `decide` in an exchange of a process that lacks room, which ends without a decision."""
    raise AssertionError("a process lacks room")
