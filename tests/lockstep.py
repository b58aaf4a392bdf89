"""Runs the processes of a job as threads that take turns, so that a test can repeat every order of events."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from treering.errors import PeerError, SaveError

_current = threading.local()


def current_process() -> int | None:
    """Returns the index of the process that this thread stands for; None in other threads."""
    return getattr(_current, "process", None)


class Lockstep:
    """A job of `count` processes. One process runs at a time, until it waits for its peers or ends."""

    def __init__(self, count: int):
        self.count = count
        self.errors: dict[int, BaseException] = {}  # of the processes that ended with one
        self._waiting: dict[int, tuple[int, str, Callable[[Sequence[Any]], Any]]] = {}
        self._results: dict[int, Any] = {}
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._over = threading.Semaphore(0)
        self._begun = [0] * count

    def run(self, body: Callable[[int], None]) -> None:
        """Calls `body` with the index of each process."""
        threads = [threading.Thread(target=self._stand_for, args=(n, body)) for n in range(self.count)]
        for thread in threads:
            thread.start()
        ready = list(range(self.count))
        while ready:
            for process in ready:
                self._turns[process].release()
                self._over.acquire()
            self._decide()
            ready = sorted(self._results)
        for thread in threads:
            thread.join()

    def begin_call(self, *_: Any, **__: Any) -> "LockstepCall":
        """Begins the next call of the current process. Takes the arguments of `coordinator.begin_call`."""
        process = current_process()
        assert process is not None
        self._begun[process] += 1
        return LockstepCall(self, process, self._begun[process])

    def meet(self, process: int, call: int, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        self._waiting[process] = call, json.dumps(value), decide
        self._over.release()
        self._turns[process].acquire()
        result = self._results.pop(process)
        if isinstance(result, BaseException):
            raise result
        return json.loads(result)

    def _stand_for(self, process: int, body: Callable[[int], None]) -> None:
        _current.process = process
        self._turns[process].acquire()
        try:
            body(process)
        except BaseException as error:
            self.errors[process] = error
        finally:
            self._over.release()

    def _decide(self) -> None:
        """Ends the wait of the processes in the oldest call: with a decision if all are in it."""
        if not self._waiting:
            return
        oldest = min(call for call, _, _ in self._waiting.values())
        there = [n for n, (call, _, _) in sorted(self._waiting.items()) if call == oldest]
        met = [self._waiting.pop(n) for n in there]
        if len(there) < self.count:
            self._results = {n: PeerError("a peer has left this call, or has ended") for n in there}
            return
        _current.process = 0
        try:
            found = json.dumps(met[0][2]([json.loads(value) for _, value, _ in met]))
            self._results = dict.fromkeys(there, found)
        except BaseException as error:
            self._results = {n: SaveError(str(error)) if n else error for n in there}
        finally:
            _current.process = None


class LockstepCall:
    """One call of one process; see `treering._core.calls.Call`."""

    name, timeout, in_doubt = "", 5.0, False

    def __init__(self, job: Lockstep, index: int, number: int):
        self.index, self.count, self._job, self._number = index, job.count, job, number

    def gather_and_decide(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        self.in_doubt = True
        found = self._job.meet(self.index, self._number, value, decide)
        self.in_doubt = False
        return found

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        return self.gather_and_decide(None, lambda _: decide())

    def set_activity(self, what: str) -> None: ...

    def check(self) -> None: ...

    def check_all(self) -> None: ...

    def cancel(self, reason: BaseException) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...
