"""Makes a call of all processes of a job, through the key-value store of `jax.distributed`.

Rejected: device collectives, because calls also happen in background threads, and the store's barriers. A barrier
carries no values and no errors, and a process that leaves it early holds up the others until the time-out.

The processes form a tree (see `tree`). Each process collects the values of its children and sends them to its parent
with its own. Process 0 publishes its decision, which all read. In a call, each process renews its heartbeat. If a
heartbeat stops for `timeout` seconds, the parent considers that process dead and fails the call for all. A process that
is not in the call has no heartbeat there. Then `liveness` says whether it is alive, and `find_suspects` whom to name.

A call is identified by its description and by the number of earlier calls with that description. So a call that one
process omits does not disturb calls of another kind. The keys of a call, here for process 3, a child of process 0:
``heartbeat/0/3`` is its activity, or its error, or the signs of the processes of its host (see `host_relay`).
``0/0/3`` has its value and those of its descendants in exchange 0. ``0/answer`` is the decision of process 0.

A process that was suspended for longer than the timeout (a debugger, a sleeping machine) begins calls that its peers
have cancelled. All processes make the calls of the main thread in the same order, and ``treering/now/0/3`` is the
latest that process 3 has begun there. A process that waits for a peer which has begun a later call fails early, and so
catches up.
"""

import contextlib
import itertools
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .._threads.thread import Thread, start_threads
from ..errors import PeerError, TreeringError
from . import call_history, call_tree, host_relay, liveness, messages
from .call_history import History, listed_key
from .job_store import JobStore

_LATER_CALL_SECONDS = 2.0  # seconds, at most, for which a peer must be in a later call before this process fails
_KEEP_KEYS_SECONDS = 600.0  # seconds for which the keys of a finished call stay, for processes that are late
_TOKEN = "treering/token"  # key of a random name, by which the processes of this job find one another on a host
_RELAY_SECONDS = 2 * call_tree.HEARTBEAT_SECONDS  # seconds, at most, until a sign reaches the process that passes it on
_TOKEN_SECONDS = 5.0  # seconds for which a process waits until process 0 has made the token
_ROLL_CERTAIN_INTERVALS = 3.5  # intervals after which the roll lists every process that was dead at their begin
_ROLL_WAIT_INTERVALS = 4.0  # intervals, at most, of waiting after the timeout until the roll is settled


class MultiProcessCall:
    """A call that every process of the job makes."""

    def __init__(self, client: Any, index: int, count: int, what: str, timeout: float, history: History):
        self.index, self.count, self.in_doubt = index, count, False
        self._description, self._requested_timeout, self.timeout = what, timeout, call_tree.timeout(timeout, count)
        self._store = JobStore(client, what, here=not index, timeout=self.timeout)
        self._history = history
        self._children = call_tree.children(index, count)
        self._heartbeat_seconds = min(call_tree.heartbeat_seconds(count), self.timeout / 4)
        self._poll_seconds = min(call_tree.poll_seconds(count, hears=bool(self._children)), self.timeout / 4)
        self._hash = call_history.hash_of(what)
        self._exchange_count = 0  # exchanges that have begun
        self._answer_count = 0  # exchanges that process 0 has answered
        self._activity = "beginning"
        self._cancel_reason: BaseException | None = None
        self._has_peer_error = False
        # The last heartbeat of each process, and its age in seconds
        self._last_signs: dict[int, tuple[str, float]] = {}
        self._last_poll = time.monotonic()
        self._is_closed = False
        self._sign_keys: set[str] = set()  # the keys of the signs of life that this process has put
        # `SimpleQueue` is written in C, so that an interrupt cannot leave a lock of it held.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._heartbeat: Thread | None = None
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._ordinal = 0
        self._saw_process_0 = False  # True once process 0 was seen in this call
        self._later_call_since: dict[int, float] = {}  # the time at which each process was first seen in a later call
        try:
            self._history.begin_life(self._store, index)
        finally:
            if self._in_main_thread:  # A call that fails in a request has an ordinal too.
                self._history.ordinal += 1
                self._ordinal = self._history.ordinal
        self._number = -1
        try:
            self._number = self._history.next_number(self._store, index, what)
            while index and self._store.get(self._heartbeat_of(0), "").startswith(f'{messages.FAILED}["PeerError"'):
                # Process 0 has made that call without this process, and it has failed.
                self._number = self._history.next_number(self._store, index, what)
        except PeerError:
            self._history.free_number(what, self._number)
            raise
        if not index:
            self._history.note(self._store, what, self._number, is_over=False)

    def set_activity(self, what: str) -> None:
        self._activity = what
        if self.count <= call_tree.FAN_OUT:  # In a large job the store would get the signs of all processes at once.
            self._wake.put(None)
        if self._heartbeat is None:
            self._heartbeat = Thread(target=self._run_heartbeat, name="treering-heartbeat", daemon=True)
            start_threads(self._heartbeat)

    def gather_and_decide(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        exchange = self._next_exchange()
        values = self._gather(exchange, value)
        if not self.index:
            return self._answer(exchange, decide([values[index] for index in range(self.count)]))
        self.in_doubt = True  # Set before sending, because a value may arrive although its sending failed.
        self._put_value(f"{exchange}/{call_tree.parent(self.index)}/{self.index}", values)
        return self._receive(exchange)

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        exchange = self._next_exchange()
        return self._receive(exchange) if self.index else self._answer(exchange, decide())

    def check(self) -> None:
        if self.index and self._is_due:
            self._check([0])

    def check_all(self) -> None:
        if self._is_due:
            self._check([*([0] if self.index else []), *self._children])

    @property
    def _is_due(self) -> bool:
        """True if it is time to poll again. In a large job the store could not bear a request at every call."""
        return self.count <= call_tree.FAN_OUT or time.monotonic() - self._last_poll >= self._poll_seconds

    def cancel(self, reason: BaseException) -> None:
        self._cancel_reason = reason

    def close(self, error: BaseException | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if isinstance(error, PeerError):
            liveness.note_failed_call()
        self._wake.put(None)
        # An interrupt may have come before the thread began. It then ends at once when it begins.
        if self._heartbeat and self._heartbeat.is_alive():
            self._heartbeat.join(self.timeout)  # Otherwise a heartbeat could overwrite the error that is put next.
        if isinstance(error, PeerError) and self.index and not self._saw_process_0:
            self._withdraw()
        elif error:
            try:
                self._store.put(self._heartbeat_of(self.index), messages.encode_error(error))
                if not self.index:
                    # The peers wait for this answer, or will. An answer that was published before stays valid.
                    key = f"{self.name}/{max(self._exchange_count - 1, self._answer_count)}/answer"
                    self._store.put_new(key, messages.encode_error(error))
            except PeerError:  # Process 0 is gone, and the store with it.
                return
        if not self.index:
            self._history.note(self._store, self._description, self._number, is_over=True)
            self._history.ended_calls.append((time.monotonic(), self.name))
            self._delete_old()

    def _withdraw(self) -> None:
        """Removes the traces of a call that process 0 has not made."""
        self._history.free_number(self._description, self._number)
        with contextlib.suppress(PeerError):
            for key in list(
                self._sign_keys
            ):  # A copy: after an interrupt the heartbeat thread may still change the set.
                self._store.delete(key)

    # In processes with children

    def _gather(self, exchange: int, value: Any) -> dict[int, Any]:
        """Returns the values of this process and of all its descendants in the tree, by process."""
        values: dict[int, Any] = {self.index: value}
        missing = list(self._children)
        while missing:
            for index, text in self._store.list_values(f"{self.name}/{exchange}/{self.index}/").items():
                if index in missing:
                    values.update(messages.decode(text, dict[int, Any]))
            missing = [index for index in missing if index not in values]
            if missing:
                self._check([*([0] if self.index else []), *missing])
                self._wait_for_key(f"{exchange}/{self.index}/{missing[0]}")
        return values

    # In process 0

    def _answer(self, exchange: int, answer: Any) -> Any:
        self._put_value(f"{exchange}/answer", answer)
        self._answer_count = exchange + 1
        return answer

    def _delete_old(self) -> None:
        over = self._history.ended_calls
        while over and time.monotonic() - over[0][0] > _KEEP_KEYS_SECONDS:
            self._store.delete(f"{over.popleft()[1]}/")

    # In all processes except process 0

    def _receive(self, exchange: int) -> Any:
        while (text := self._wait_for_key(f"{exchange}/answer")) is None:
            try:
                self._check([0])
            except TreeringError:
                if not self._has_peer_error:
                    raise
                # Process 0 may have failed after it had answered. Then its answer is valid.
                if (text := self._store.get(f"{self.name}/{exchange}/answer", None)) is None:
                    self.in_doubt = False
                    raise
                break
        self.in_doubt, self._saw_process_0 = False, True
        if self._in_main_thread and not self._history.has_met:
            self._history.meet(self._store, self._description)
            self._ordinal = self._history.ordinal
        if text.startswith(messages.FAILED):
            raise messages.decode_error(text, 0)
        return messages.decode(text)

    # In all processes

    def _check(self, awaited: list[int]) -> None:
        """Raises the error of an awaited process that failed, or `PeerError` if one has been silent for too long."""
        if self._cancel_reason:
            raise self._cancel_reason
        found = self._store.list_values(f"{self.name}/heartbeat/{self.index}/") if awaited != [0] else {}
        heartbeats, every = host_relay.decode_signs(found)
        if 0 in awaited:
            heartbeats[0] = self._store.get(self._heartbeat_of(0), "")
        now = time.monotonic()
        since, self._last_poll = now - self._last_poll, now
        for index in awaited:
            heartbeat = heartbeats.get(index, "")
            if heartbeat.startswith(messages.FAILED):
                self._has_peer_error = True
                raise messages.decode_error(heartbeat, index)
            before, silence = self._last_signs.get(index, ("", 0.0))
            # At most one interval is added, so that no process looks dead after all were suspended together.
            silence += min(since, every.get(index, self._heartbeat_seconds))
            self._last_signs[index] = heartbeat, silence if heartbeat == before else 0.0
        self._saw_process_0 = self._saw_process_0 or bool(self._last_signs.get(0, ("",))[0])
        patience = {
            index: call_tree.silence_limit(self._requested_timeout, seconds) for index, seconds in every.items()
        }
        is_new = self._history.is_restarted and not self._history.has_met
        usual = self.timeout * (call_history.PATIENCE if is_new else 1)
        silent = [index for index in awaited if self._last_signs[index][1] > patience.get(index, usual)]
        if silent:
            self._raise_if_known(silent, patience.get(silent[0], usual))
        if self._in_main_thread:  # A process that was seen in this call is still in it, however slow it is.
            self._check_gone([index for index in awaited if not self._last_signs[index][0]], now)

    def _check_gone(self, quiet: list[int], now: float) -> None:
        """Raises `PeerError` if a process in `quiet` has begun a later call that this process has not reached."""
        if not quiet:
            return
        latest = self._store.list_values(f"{call_history.NOW}{self.index}/") if quiet != [0] else {}
        if 0 in quiet:
            latest[0] = self._store.get(call_history.NOW + listed_key(0), call_history.NOWHERE)
        for index in quiet:
            what, number, ordinal = messages.decode(latest.get(index, call_history.NOWHERE))
            if ordinal <= self._ordinal or number <= self._history.counts.get(what, -1):
                self._later_call_since.pop(index, None)
            elif now - self._later_call_since.setdefault(index, now) >= min(_LATER_CALL_SECONDS, self.timeout / 8):
                found = liveness.read_report(self._store, self.count)
                if found.silent.keys() - {self.index}:  # A dead process is the cause, also of the peer's later call.
                    self._raise_silent([], 0, found, known=True)
                if ordinal > call_history.AHEAD:
                    raise self._peer_error(
                        f"process {index} (not in this call) was started again in its job, and is in {what}; it waits "
                        "there until its peers make that call"
                    )
                raise self._peer_error(
                    f"process {index} (not in this call; its last is {what}) continued without it; if one of the two "
                    f"stood still for long, they meet again at a later call{liveness.ALL_MUST_CALL}"
                )

    def _raise_if_known(self, silent: list[int], seconds: float) -> None:
        """Raises `PeerError`, unless the roll will soon say which process the silent ones wait for."""
        found, interval = liveness.read_report(self._store, self.count), call_tree.idle_sign_seconds(self.count)
        waited = max(self._last_signs[index][1] for index in silent)
        known = found.is_settled and waited >= _ROLL_CERTAIN_INTERVALS * interval
        is_seen = any(self._last_signs[index][0] for index in silent)  # It was in this call, so its silence is certain.
        if is_seen or known or 0 in found.unknown or waited > seconds + _ROLL_WAIT_INTERVALS * interval:
            self._raise_silent(silent, seconds, found, known=known)

    def _raise_silent(self, silent: list[int], seconds: float, found: liveness.LivenessReport, *, known: bool) -> None:
        seen = {index: doing for index in silent if (doing := self._last_signs[index][0].partition(" ")[2])}
        here, in_doubt = self.index, self.in_doubt
        cause = liveness.find_suspects(
            found, silent, seen=seen, here=here, seconds=seconds, known=known, in_doubt=in_doubt
        )
        shown = [f"process {index} ({self._activity_of(index, seen)})" for index in cause.processes[:5]]
        more = f" and {len(cause.processes) - 5} more" if len(cause.processes) > 5 else ""
        silence = f"nothing heard for {cause.seconds:.3g} s from {', '.join(shown)}{more}"
        raise self._peer_error(f"{silence}{cause.ending}")

    def _peer_error(self, text: str) -> PeerError:
        if self._history.is_restarted:
            text = text.removesuffix(liveness.ALL_MUST_CALL)
            text += "; this process was started again in its job, and meets its peers when they make this call next"
        return PeerError(f"{self._description}: {text}")

    def _activity_of(self, index: int, seen: dict[int, str]) -> str:
        if index in seen:
            return f"last seen {seen[index]}"
        what = messages.decode(self._store.get(call_history.NOW + listed_key(index), call_history.NOWHERE))[0]
        return f"not in this call; its last is {what}" if what else "not in this call, nor in one before"

    def _run_heartbeat(self) -> None:
        try:
            if self._ordinal == self._history.ordinal:  # Also if the call is over, because peers may look for it.
                where = [self._description, self._number, self._ordinal]
                self._store.put(call_history.NOW + listed_key(self.index), messages.encode(where))
            relay = self._join_host() if call_tree.is_large(self.count) and not self._is_closed else None
            with contextlib.closing(relay) if relay else contextlib.nullcontext():
                given = -math.inf  # the time of the last sign that this process has put
                for beat in itertools.count():
                    if self._is_closed:
                        return
                    sign = f"{beat} {self._activity}"
                    if relay:
                        signs = relay.signs(self.index, sign)
                        if not self.index:
                            signs[0] = sign  # All processes poll the sign of process 0, so no other may pass it on.
                        given = self._pass_on(signs, given)
                    else:
                        self._put_sign(self._heartbeat_of(self.index), sign)
                    with contextlib.suppress(queue.Empty):
                        self._wake.get(timeout=call_tree.HEARTBEAT_SECONDS if relay else self._heartbeat_seconds)
        except PeerError:  # Process 0 is gone, and the store with it. The thread in the call raises this error itself.
            return

    def _join_host(self) -> host_relay.HostRelay | None:
        """Connects this process to those of its host. Returns None if it must put its signs into the store itself."""
        history = self._history
        if not history.token and self.index:
            history.token = self._store.wait_for(_TOKEN, min(_TOKEN_SECONDS, self.timeout / 4)) or ""
        elif not history.token:
            history.token = secrets.token_hex(16)
            self._store.put(_TOKEN, history.token)
        return host_relay.join_host(f"{history.token}/{self.name}") if history.token else None

    def _pass_on(self, signs: dict[int, str], given: float) -> float:
        """Puts signs of life into the store unless the last ones are recent. Returns the time of the last ones.

        `given` is the time of the last ones before, by `time.monotonic`.
        """
        if not signs:
            # Another process passes them on. `host_relay.decode_signs` uses its interval only if this process has no
            # sign of
            # its own.
            while self._sign_keys:
                self._store.delete(self._sign_keys.pop())
            return -math.inf
        by_parent: dict[int, dict[int, str]] = {}
        for index, sign in signs.items():
            if index or not self.index:  # Only process 0 puts its own sign.
                by_parent.setdefault(call_tree.parent(index), {})[index] = sign
        now, every = time.monotonic(), call_tree.heartbeat_seconds(self.count * len(by_parent) / len(signs))
        if now - given < every:
            return given
        for parent, group in by_parent.items():
            if group.keys() == {self.index}:
                self._put_sign(self._heartbeat_of(self.index), group[self.index])
            else:
                self._put_sign(
                    f"{self.name}/heartbeat/{parent}/{self.index}",
                    host_relay.encode_signs(every + _RELAY_SECONDS, group),
                )
        return now

    def _put_sign(self, key: str, sign: str) -> None:
        self._sign_keys.add(key)
        self._store.put(key, sign)

    def _next_exchange(self) -> int:
        self._exchange_count += 1
        return self._exchange_count - 1

    @property
    def name(self) -> str:
        return call_history.call_name(self._hash, self._number)

    def _heartbeat_of(self, index: int) -> str:
        return call_history.heartbeat_key(self.name, index)

    def _put_value(self, key: str, value: Any) -> None:
        self._store.put(f"{self.name}/{key}", messages.encode(value))

    def _wait_for_key(self, key: str) -> str | None:
        """Returns the value of a key, or None if it has none after `_poll_seconds`."""
        return self._store.wait_for(f"{self.name}/{key}", self._poll_seconds)
