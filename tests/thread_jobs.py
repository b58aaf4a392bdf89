"""Jobs whose processes are threads of one process, and whose job store is in memory, so that a job takes milliseconds.

A thread belongs to the process whose thread has made it. A process that is killed makes no change from then on: its
threads raise `Killed`, and its peers get a `PeerError` at once.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from treering import errors
from treering._processes import coordinator, liveness
from treering._save.pending import PendingSave
from treering.errors import PeerError

_TIMEOUT_SECONDS = 3.0  # to wait for a peer that lives and makes another call, which is rare
_ENDED_SECONDS = 0.1  # to wait for a peer that has ended: its background threads may still make calls
_init = threading.Thread.__init__


class Killed(BaseException):
    """Ends a process like SIGKILL: no error handling of the library stops it."""


def current_process() -> int | None:
    """Returns the index of the process that this thread belongs to."""
    # `current_thread` would make an object for a thread that Python does not know.
    return getattr(threading._active.get(threading.get_ident()), "process_index", None)  # type: ignore[attr-defined]


def _init_in_process(thread: threading.Thread, *args: Any, **options: Any) -> None:
    _init(thread, *args, **options)
    thread.process_index = current_process()  # type: ignore[attr-defined]


class ThreadJob:
    """A job of `count` processes."""

    def __init__(self, count: int):
        self.count = count
        self.errors: dict[int, BaseException] = {}  # of the processes that ended with one
        self.dead: set[int] = set()
        self._ended: set[int] = set()  # processes
        self._news = threading.Condition()
        self._values: dict[tuple[str, int], dict[int, str]] = {}  # by exchange, the values of processes
        self._decisions: dict[tuple[str, int], str] = {}
        self._deciding: set[tuple[str, int]] = set()
        self._failed: dict[str, BaseException] = {}  # by call

    def run(self, body: Callable[[int], None]) -> None:
        """Calls `body` with the index of each process, and waits until all threads have ended."""
        before = set(threading.enumerate())
        threads = [threading.Thread(target=self._stand_for, args=(n, body)) for n in range(self.count)]
        for index, thread in enumerate(threads):
            thread.process_index = index  # type: ignore[attr-defined]
            thread.start()
        for thread in threads:
            thread.join()
        while left := [one for one in set(threading.enumerate()) - before if not one.daemon]:
            if left[0].is_alive():  # or else it is about to begin
                left[0].join()

    def check_alive(self) -> None:
        """Raises `Killed` in a thread of a killed process."""
        if current_process() in self.dead:
            raise Killed

    def kill(self, process: int) -> None:
        with self._news:
            self.dead.add(process)
            self._news.notify_all()

    def fail(self, call: str, error: BaseException) -> None:
        """Ends a call with an error for all processes."""
        with self._news:
            self._failed.setdefault(call, error)
            self._news.notify_all()

    def check(self, call: str) -> None:
        """Raises the error with which a process has ended a call."""
        self.check_alive()
        if error := self._failed.get(call):
            kind = getattr(errors, type(error).__name__, PeerError)
            raise kind(str(error) or "a peer has failed")

    def meet(self, call: "ThreadCall", value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Waits until all processes are in an exchange of a call, and returns the decision of process 0."""
        key = call.name, call.exchanges
        with self._news:
            values = self._values.setdefault(key, {})
            values[call.index] = json.dumps(value)
            self._news.notify_all()
            self._wait_for(key, lambda: key in self._decisions if call.index else len(values) == self.count)
            self._deciding.add(key)
        if call.index == 0:
            try:
                decision = json.dumps(decide([json.loads(values[n]) for n in range(self.count)]))
            except BaseException as error:
                call.close(error)
                raise
            with self._news:
                self._decisions[key] = decision
                self._news.notify_all()
        return json.loads(self._decisions[key])

    def _wait_for(self, key: tuple[str, int], is_over: Callable[[], bool]) -> None:
        end = time.monotonic() + _TIMEOUT_SECONDS
        while not is_over():
            self.check(key[0])
            missing = {0} if key in self._deciding else set(range(self.count)) - self._values[key].keys()
            left = end - time.monotonic()
            if (missing or {0}) & self.dead or (left < 0 and key not in self._deciding):
                raise PeerError("a peer has ended, or is in another call")
            if missing & self._ended:
                end = min(end, time.monotonic() + _ENDED_SECONDS)
            self._news.wait(0.1)

    def _stand_for(self, process: int, body: Callable[[int], None]) -> None:
        try:
            body(process)
        except BaseException as error:
            self.errors[process] = error
        with self._news:
            self._ended.add(process)
            self._news.notify_all()


class ThreadCall:
    """One call of one process; see `treering._core.calls.Call`."""

    timeout, in_doubt = 5.0, False

    def __init__(self, job: ThreadJob, index: int, name: str):
        self.index, self.count, self.name, self._job, self.exchanges = index, job.count, name, job, 0

    def gather_and_decide(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        self.exchanges += 1
        self.in_doubt = self.index > 0
        found = self._job.meet(self, value, decide)
        self.in_doubt = False
        return found

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        return self.gather_and_decide(None, lambda _: decide())

    def set_activity(self, what: str) -> None: ...

    def check(self) -> None:
        self._job.check(self.name)

    check_all = check

    def cancel(self, reason: BaseException) -> None:
        self._job.fail(self.name, reason)

    def close(self, error: BaseException | None = None) -> None:
        if error and not isinstance(error, Killed):
            self._job.fail(self.name, error)


@contextmanager
def processes(count: int) -> Iterator[ThreadJob]:
    """Makes the library see the processes of a `ThreadJob` within a `with` block."""
    job, numbers = ThreadJob(count), dict[tuple[int, str], int]()

    def begin(client: Any, index: int, count: int, what: str, timeout: float, history: Any) -> ThreadCall:
        numbers[index, what] = number = numbers.get((index, what), 0) + 1
        return ThreadCall(job, index, f"{what} {number}")

    def job_of_thread(what: str | None = None) -> tuple[Any, int, int] | None:
        index = current_process()
        return None if index is None or count == 1 else (job, index, count)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(coordinator, "_job", job_of_thread))
        stack.enter_context(mock.patch.object(coordinator, "MultiProcessCall", begin))
        stack.enter_context(mock.patch.object(liveness, "start_signs"))
        # A save would wait for the one of another process, because the latest save is global.
        stack.enter_context(mock.patch.object(PendingSave, "_wait_for_previous"))
        stack.enter_context(mock.patch.object(threading.Thread, "__init__", _init_in_process))
        yield job
