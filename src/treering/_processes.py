"""The processes of a job, and how they agree.

Everything goes through the key-value store of `jax.distributed`: never through device collectives, so that it
may happen in a background thread, and never through its barriers, of which one that timed out stays broken.
Process 0 hears everyone and answers everyone; nobody else listens to anybody but process 0. While a call
lasts, each process shows a pulse; who shows none for `timeout` seconds is taken for dead.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from . import errors
from .errors import PeerError, TreeringError

_PULSE = 1.0  # seconds between signs of life
_POLL = 0.005, 0.2  # seconds between looks: at first, and later
_calls = itertools.count()

Decide = Callable[[Sequence[Any]], Any]


class Call(Protocol):
    """One collective call, seen from one process."""

    index: int
    count: int

    def agree(self, phase: str, mine: Any, decide: Decide) -> Any:
        """Process 0 gets what every process says (JSON) and decides; all return its decision, or raise its error."""
        ...

    def close(self) -> None:
        """Ends the pulse."""
        ...


class Alone:
    """A call in a job of one process, or one that concerns this process alone."""

    index = 0
    count = 1

    def agree(self, phase: str, mine: Any, decide: Decide) -> Any:
        """What `decide` makes of this process's word."""
        del phase
        return decide([mine])

    def close(self) -> None:
        """Nothing to end."""


class Together:
    """A call that every process of the job makes, in the same order."""

    def __init__(self, client: Any, index: int, count: int, what: str, timeout: float):
        self.index, self.count, self._timeout, self._what = index, count, timeout, what
        self._client = client
        self._root = f"treering/{next(_calls)}"
        self._phase = "beginning"
        self._ended = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="treering-pulse", daemon=True)
        self._pulse.start()

    def agree(self, phase: str, mine: Any, decide: Decide) -> Any:
        """See `Call`. Raises `PeerError` when a process is silent for longer than the timeout."""
        self._phase = phase
        self._set(f"{phase}/{self.index}", json.dumps({"value": mine, "call": self._what}))
        if self.index:
            answer = self._answer(phase)
        else:
            try:
                answer = {"value": decide(self._gather(phase))}
            except TreeringError as error:
                answer = {"error": type(error).__name__, "text": str(error)}
                self._set(f"{phase}/answer", json.dumps(answer))
                raise
            self._set(f"{phase}/answer", json.dumps(answer))
        if "error" in answer:
            kind = getattr(errors, answer["error"], TreeringError)
            raise kind(answer["text"])
        return answer["value"]

    def close(self) -> None:
        """Ends the pulse. The keys of a call are deleted by process 0 in the next one but one."""
        self._ended.set()

    # Process 0

    def _gather(self, phase: str) -> list[Any]:
        words: dict[int, Any] = {}
        for found in self._looks():
            for key, value in found.items():
                part, _, index = key.rpartition("/")
                if part == phase and index.isdigit():
                    words[int(index)] = json.loads(value)
            if len(words) == self.count:
                break
            self._check([p for p in range(self.count) if p not in words], found)
        calls = {index: word["call"] for index, word in sorted(words.items())}
        if len(set(calls.values())) > 1:
            other = next(index for index, call in calls.items() if call != calls[0])
            raise PeerError(
                f"the processes do not make the same call: process 0 {calls[0]}, process {other} {calls[other]}; "
                "every process must make the same calls in the same order"
            )
        return [words[index]["value"] for index in range(self.count)]

    # The others

    def _answer(self, phase: str) -> dict[str, Any]:
        for found in self._looks(f"{phase}/answer", "pulse/0"):
            if answer := found.get(f"{phase}/answer"):
                return json.loads(answer)
            self._check([0], found)
        raise AssertionError("unreachable")

    # Both

    def _looks(self, *keys: str) -> Any:
        """What the store holds of this call, again and again; only some keys where these are named."""
        self._heard: dict[int, tuple[str, float]] = {}
        self._since = time.monotonic()
        wait = _POLL[0]
        while True:
            if keys:
                yield {key: value for key in keys if (value := self._get(key)) is not None}
            else:
                cut = len(self._root) + 1
                yield {key[cut:]: value for key, value in self._client.key_value_dir_get(self._root)}
            time.sleep(wait)
            wait = min(wait * 1.5, _POLL[1])

    def _check(self, awaited: list[int], found: dict[str, str]) -> None:
        """Raises `PeerError` when an awaited process has been silent for too long."""
        now = time.monotonic()
        silent: list[str] = []
        for process in awaited:
            pulse = found.get(f"pulse/{process}", "")
            before, at = self._heard.get(process, ("", self._since))
            if pulse != before:
                self._heard[process] = pulse, now
            elif now - at > self._timeout:
                last = pulse.partition(" ")[2]
                silent.append(f"process {process} ({f'last seen {last}' if last else 'not seen in this call'})")
        if silent:
            unseen = all("not seen" in text for text in silent)
            hint = (
                "did it make this call? `if jax.process_index() == 0:` around a save is the usual cause"
                if unseen
                else "it is dead, or its machine is; nothing was committed, and the last checkpoint stands"
            )
            raise PeerError(
                f"{self._what}: nothing heard for {self._timeout:g} s from {', '.join(silent[:5])}"
                f"{f' and {len(silent) - 5} more' if len(silent) > 5 else ''}; {hint}"
            )

    def _beat(self) -> None:
        for n in itertools.count():
            try:
                self._set(f"pulse/{self.index}", f"{n} {self._phase}")
            except Exception:  # the coordinator is gone, and JAX is about to end this process
                return
            if self._ended.wait(_PULSE):
                return

    def _get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(f"{self._root}/{key}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _set(self, key: str, value: str) -> None:
        self._client.key_value_set(f"{self._root}/{key}", value, allow_overwrite=True)


def begin(what: str, timeout: float, processes: str = "all") -> Call:
    """A new collective call of the processes of this job; `what` says in words which."""
    if processes == "all" and (found := _client()):
        client, index, count = found
        return Together(client, index, count, what, timeout)
    return Alone()


def _client() -> tuple[Any, int, int] | None:
    """The store's client, this process's index and their count; None in a job of one process."""
    from jax._src import distributed  # JAX has no public way to its store

    state = distributed.global_state
    if state.client is None or not state.num_processes or state.num_processes == 1:
        return None
    return state.client, state.process_id, state.num_processes
