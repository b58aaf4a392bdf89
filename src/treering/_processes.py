"""The processes of a job, and how they agree.

Everything goes through the key-value store of `jax.distributed`: never through device collectives, so that it
may happen in a background thread, and never through its barriers, of which one that timed out stays broken.
Process 0 hears everyone and tells everyone; nobody else listens to anybody but process 0. In a call, each
process shows a pulse, and who shows none for `timeout` seconds is taken for dead.

The keys of a call, below its number: ``pulse/3`` is what process 3 is doing, or what it failed with; ``0/3`` is its
word in the first exchange, and ``0/answer`` what process 0 made of the words.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from . import errors
from .errors import MismatchError, PeerError, SaveError, TreeringError

_PULSE = 1.0  # seconds between signs of life
_LOOK = 0.25  # seconds between looks at them
_FAILED = "failed "

_numbers = itertools.count()  # of the calls; the same in every process, for all make the same calls
_over: list[int] = []  # calls whose keys may be deleted once everybody is known to be past them


class Call(Protocol):
    """One collective call, seen from one process.

    `undecided` says that this process gave its word and does not know what became of it.
    """

    index: int
    count: int
    undecided: bool

    def doing(self, what: str) -> None:
        """Says what this process does now, for the others' error messages; begins the pulse."""
        ...

    def agree(self, mine: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Process 0 gets every process's word (JSON) and decides; all return its decision, or raise its error."""
        ...

    def tell(self, decide: Callable[[], Any]) -> Any:
        """Process 0 decides without hearing the others; all return its decision, or raise its error."""
        ...

    def check(self) -> None:
        """Raises what process 0 failed with, if it has failed."""
        ...

    def cancel(self, reason: BaseException) -> None:
        """Ends the waiting of another thread, which raises the reason."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Ends the call for this process; with an error, the others' as well."""
        ...


class Alone:
    """A call in a job of one process, or one that concerns this process alone."""

    index, count, undecided = 0, 1, False

    def doing(self, what: str) -> None: ...

    def agree(self, mine: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        return decide([mine])

    def tell(self, decide: Callable[[], Any]) -> Any:
        return decide()

    def check(self) -> None: ...

    def cancel(self, reason: BaseException) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...


def begin(what: str, *, timeout: float = 30, processes: str = "all") -> Call:
    """A collective call of the processes of this job; `what` describes it and is the same everywhere."""
    if processes not in ("all", "this"):
        raise MismatchError(f"processes={processes!r}: expected 'all' or 'this'")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise MismatchError(f"timeout={timeout!r}: expected a number of seconds")
    job = _job() if processes == "all" else None
    return Together(*job, what, timeout) if job else Alone()


def several() -> bool:
    """Whether this job has more than one process."""
    return _job() is not None


def _job() -> tuple[Any, int, int] | None:
    """The store, this process's index and how many there are; None when there is only one."""
    from jax._src import distributed  # JAX has no public way to its store

    state = distributed.global_state
    if state.client is None or not state.num_processes or state.num_processes == 1:
        return None
    return state.client, state.process_id, state.num_processes


class Together:
    """A call that every process of the job makes, in the same order of calls."""

    def __init__(self, client: Any, index: int, count: int, what: str, timeout: float):
        self.index, self.count, self.undecided = index, count, False
        self._client, self._what, self._timeout = client, what, timeout
        self._number = next(_numbers)
        self._exchanges = itertools.count()
        self._doing = ""
        self._cancelled: BaseException | None = None
        self._heard: dict[int, tuple[str, float]] = {}  # the last pulse of a process and when it changed
        self._ended = threading.Event()
        self._setting = threading.Lock()
        self._pulse: threading.Thread | None = None

    def doing(self, what: str) -> None:
        self._doing = what
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._beat, name="treering-pulse", daemon=True)
            self._pulse.start()

    def agree(self, mine: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        exchange = next(self._exchanges)
        if self.index:
            self._set(f"{exchange}/{self.index}", [self._what, mine])
            self.undecided = True
            return self._told(exchange)
        words = self._gather(exchange, mine)
        self._delete_old()
        return self._answer(exchange, decide(words))

    def tell(self, decide: Callable[[], Any]) -> Any:
        exchange = next(self._exchanges)
        return self._told(exchange) if self.index else self._answer(exchange, decide())

    def check(self) -> None:
        if self.index:
            self._check([0], time.monotonic())

    def cancel(self, reason: BaseException) -> None:
        self._cancelled = reason

    def close(self, error: BaseException | None = None) -> None:
        with self._setting:  # no pulse comes after this
            if self._ended.is_set():
                return
            self._ended.set()
            if error:
                kind = type(error).__name__ if isinstance(error, TreeringError) else ""
                text = str(error) or type(error).__name__
                try:
                    self._put(f"pulse/{self.index}", _FAILED + msgspec.json.encode([kind, text]).decode())
                except Exception:  # process 0 is gone, and its store
                    return
        if not self.index:
            _over.append(self._number)

    # What process 0 does

    def _gather(self, exchange: int, mine: Any) -> list[Any]:
        words: dict[int, Any] = {0: mine}
        since = time.monotonic()
        while True:
            for index, text in self._listed(f"{exchange}/").items():
                what, words[index] = msgspec.json.decode(text)
                if what != self._what:
                    self._raise_different(index, what)
            missing = [index for index in range(self.count) if index not in words]
            if not missing:
                return [words[index] for index in range(self.count)]
            self._check(missing, since)
            self._await(f"{exchange}/{missing[0]}")

    def _answer(self, exchange: int, answer: Any) -> Any:
        self._set(f"{exchange}/answer", [self._what, answer])
        return answer

    def _delete_old(self) -> None:
        """Everybody has spoken in this call, so everybody is past the calls before it that are over here."""
        for number in [n for n in _over if n < self._number]:
            _over.remove(number)
            self._reach(self._client.key_value_delete, f"treering/{number}/")

    # What the others do

    def _told(self, exchange: int) -> Any:
        since = time.monotonic()
        while (text := self._await(f"{exchange}/answer")) is None:
            self._check([0], since)
        self.undecided = False
        what, answer = msgspec.json.decode(text)
        if what != self._what:
            self._raise_different(0, what)
        return answer

    # What all do

    def _check(self, awaited: list[int], since: float) -> None:
        """Raises what an awaited process failed with, or `PeerError` when one has been silent for too long."""
        if self._cancelled:
            raise self._cancelled
        pulses = self._listed("pulse/")
        now = time.monotonic()
        silent: list[int] = []
        for index in awaited:
            pulse = pulses.get(index, "")
            if pulse.startswith(_FAILED):
                self.undecided = False
                self._raise_failed(index, *msgspec.json.decode(pulse.removeprefix(_FAILED)))
            if index not in self._heard or pulse != self._heard[index][0]:
                self._heard[index] = pulse, now if pulse else since
            if now - self._heard[index][1] > self._timeout:
                silent.append(index)
        if silent:
            self._raise_silent(silent)

    def _raise_silent(self, silent: list[int]) -> None:
        seen = {index: self._heard[index][0].partition(" ")[2] for index in silent}
        shown = [
            f"process {index} ({f'last seen {doing}' if doing else 'not in this call'})"
            for index, doing in seen.items()
        ]
        hint = "; it is dead or cut off, and nothing was committed"
        if not any(seen.values()):
            hint = (
                "; every process must make this call: `if jax.process_index() == 0:` around it is the usual mistake; "
                'processes="this" saves one process\'s data alone'
            )
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        raise PeerError(f"{self._what}: nothing heard for {self._timeout:g} s from {', '.join(shown[:5])}{more}{hint}")

    def _raise_failed(self, index: int, kind: str, text: str) -> None:
        found = getattr(errors, kind, SaveError) if kind else SaveError
        raise found(text if text.startswith("process ") else f"process {index}: {text}")

    def _raise_different(self, index: int, what: str) -> None:
        raise PeerError(
            f"expected the same call from every process, found {self._what} from process {self.index} and {what} from "
            f"process {index}; all must make the same calls in the same order"
        )

    def _beat(self) -> None:
        for beat in itertools.count():
            with self._setting:
                if self._ended.is_set():
                    return
                try:
                    self._put(f"pulse/{self.index}", f"{beat} {self._doing}")
                except Exception:  # process 0 is gone, and its store; who waits for it finds out
                    return
            self._ended.wait(_PULSE)

    def _set(self, key: str, value: Any) -> None:
        self._reach(self._put, key, msgspec.json.encode(value).decode())

    def _put(self, key: str, text: str) -> None:
        self._client.key_value_set(f"treering/{self._number}/{key}", text, allow_overwrite=True)

    def _listed(self, directory: str) -> dict[int, str]:
        """The values below a key by process."""
        found = self._reach(self._client.key_value_dir_get, f"treering/{self._number}/{directory}")
        named = ((key.rpartition("/")[2], value) for key, value in found)
        return {int(name): value for name, value in named if name.isdigit()}

    def _await(self, key: str) -> str | None:
        """The value of a key, None when there is none after a while."""
        get = functools.partial(self._client.blocking_key_value_get, f"treering/{self._number}/{key}")
        return self._reach(get, int(_LOOK * 1000))

    def _reach(self, ask: Callable[..., Any], *args: Any) -> Any:
        try:
            return ask(*args)
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise PeerError(f"{self._what}: process 0, which coordinates, cannot be reached: {error}") from error
