"""Keeps the roll of a job: which of its processes are alive, also between their calls.

Processes see signs of life of one another only within calls (see `multi_process`). A process that waits in its training
step for a dead one makes no call, and without the roll its peers would blame it instead of the dead one. So each
process renews one key of the job's store every two seconds (less often in a large job). A process begins at its first
call, or when Treering is imported into a job that has formed, and stops when the process ends. Process 0 runs the store
and keeps the roll: it reads these signs without a request, and publishes which processes are silent. A process whose
wait timed out reads the roll.

Rejected: asking the peers only when one is missed. Each process would need a request that waits in the store. JAX's
client cannot cancel such a request, and a process crashes if its interpreter ends meanwhile. Also rejected:
`get_live_nodes`, JAX's own knowledge. It is a barrier of all survivors, and learns of a death only after 100 s.

Its keys: ``treering/alive/3`` is the latest sign of process 3, or how it ended; ``treering/roll`` is the roll.
"""

import atexit
import dataclasses
import itertools
import logging
import os
import queue
import secrets
import sys
import time
from collections.abc import Collection
from typing import Any

import msgspec

from .._core.leaf_paths import join_names
from .._pytree import jax_private
from .._threads.preload_decoders import preload_decoders
from .._threads.thread import Thread, start_threads
from ..errors import PeerError
from . import call_history, call_tree
from .call_history import History
from .job_store import JobStore

_log = logging.getLogger("treering")
_SIGNS, _ROLL = "treering/alive/", "treering/roll"
_ENDED, _GAVE_UP = "ended", "gave up"  # the last sign of a process
_DOUBTFUL_INTERVALS, _SILENT_INTERVALS = (
    1.5,
    2.0,
)  # intervals without a sign, after which a process may be dead, or counts as silent
_MAX_LISTED_PROCESSES = 1_000  # processes of each kind in the roll; a limit, because all processes may read it at once
_END_SECONDS = 2.0  # seconds that a process which ends waits for its last sign to be sent
_PEERS_END_SECONDS = 300.0  # seconds that process 0 waits at its end, as JAX does in jobs that are not recoverable
_PEERS_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 1.0  # seconds that a process needs after its last sign until JAX has left the job
_LOGGED_WAIT_SECONDS = 5.0  # seconds of such a wait, after which it is logged


class LivenessReport(msgspec.Struct, frozen=True):
    """The roll: the processes of the job that process 0 misses. If `is_settled`, every other one gave a sign lately."""

    silent: dict[int, float] = {}  # seconds of silence of processes that gave signs before; the longest first
    ended: list[int] = []  # processes whose interpreter ended
    gave_up: list[int] = []  # processes that ended after a `PeerError`, so that another process is the cause
    unknown: list[int] = []  # processes that never gave a sign
    is_settled: bool = False  # True if no process is late with its sign and not yet silent


preload_decoders(LivenessReport)


def read_report(store: JobStore, count: int) -> LivenessReport:
    """Returns the roll.

    If process 0 has not published one yet, it has only `unknown`: in a job of at most 64 processes those without a
    sign, else process 0.
    """
    if text := store.get(_ROLL, None):
        return msgspec.json.decode(text, type=LivenessReport)
    signs = store.list_values(_SIGNS) if count <= call_tree.FAN_OUT else {}
    return LivenessReport(unknown=[index for index in range(count) if index not in signs] if signs else [0])


def start_signs(client: Any, index: int, count: int) -> History:
    """Begins the signs of life of this process in a job, unless it gives them already. Returns its calls in the job."""
    global _member
    member = _member
    if member is None or member.client is not client or not member.thread.is_alive():
        history = member.history if member and member.client is client else History()
        member = _member = _Member(client, index, count, history)
        start_threads(member.thread)
    member.last_sign = _ENDED
    return member.history


def note_failed_call() -> None:
    """Notes that a call of this process failed because of a peer."""
    if member := _member:
        member.last_sign = _GAVE_UP


class _Member:
    """This process in its job."""

    def __init__(self, client: Any, index: int, count: int, history: History):
        self.client, self.process, self.history = client, os.getpid(), history
        self.thread = Thread(target=self._give_signs, name="treering-alive", daemon=True)
        # `here` makes requests without a second thread and a timeout: this thread may wait for the store.
        self._store = JobStore(client, "sign of life", here=True, timeout=0)
        self._index = index
        self._keeper = None if index else _ReportKeeper(self._store, count)
        self._interval = call_tree.idle_sign_seconds(count) / (2 if self._keeper else 1)
        self.last_sign = _ENDED
        self._end_requests: queue.SimpleQueue[None] = queue.SimpleQueue()

    def end(self) -> None:
        """Sends the last sign and ends the thread. A thread inside JAX's client would crash the interpreter at exit."""
        if self.process == os.getpid() and self.thread.is_alive():  # A forked child has no such thread.
            has_failed = self.last_sign == _GAVE_UP or getattr(sys, "last_value", None) is not None
            if self._keeper and call_history.is_recoverable() and not has_failed:
                self._keeper.wait_for_ends()
            if self.last_sign == _GAVE_UP and not call_history.is_recoverable():
                _log.warning(
                    "this process ends after the loss of a peer; JAX may hold it up until the time-out of its own "
                    "heartbeats, by default 100 s: see heartbeat_timeout_seconds of jax.distributed.initialize"
                )
            self._end_requests.put(None)
            self.thread.join(_END_SECONDS)

    def _give_signs(self) -> None:
        global _member
        life = secrets.token_hex(4)  # An earlier life of the process may have given signs with these numbers.
        for number in itertools.count():
            self._put(f"{life}-{number}")
            try:
                self._end_requests.get(timeout=self._interval)
            except queue.Empty:
                if (job := jax_private.job_state()) and job.client is self.client:
                    continue
            else:
                self._put(self.last_sign)
            break  # The interpreter ends, or `jax.distributed.shutdown` has ended the job.
        if _member is self:
            _member = None  # JAX destroys its client before the interpreter ends, if nothing refers to it.

    def _put(self, sign: str) -> None:
        try:
            self._store.put(f"{_SIGNS}{self._index}", sign)
            if self._keeper:
                self._keeper.publish()
        except PeerError:  # The next call raises it. The store may answer again, if process 0 was only suspended.
            return


class _ReportKeeper:
    """Keeps the roll, in process 0."""

    def __init__(self, store: JobStore, count: int):
        self._store, self._count, self._interval = store, count, call_tree.idle_sign_seconds(count)
        self._sign_ages: dict[int, tuple[str, float]] = {}  # the latest sign of each process, and its age in seconds
        self._last_poll = time.monotonic()
        self._silent: set[int] = set()

    def wait_for_ends(self) -> None:
        """Waits until no other process gives signs of life, or for five minutes.

        JAX ends a process that has lost the store, which ends with process 0. In a job that is not recoverable, JAX
        itself makes all processes wait for one another.
        """
        begun, is_logged = time.monotonic(), False
        while (waited := time.monotonic() - begun) < _PEERS_END_SECONDS:
            signs = self._store.list_values(_SIGNS)
            ended = {index for index, sign in signs.items() if sign in (_ENDED, _GAVE_UP)}
            if not (living := sorted(signs.keys() - ended - self._silent - {0})):
                time.sleep(_LEAVE_SECONDS if ended else 0)
                return
            if waited > _LOGGED_WAIT_SECONDS and not is_logged:
                is_logged = True
                _log.warning(
                    "process 0 waits for processes %s to end, for %g s at most, because they need the job's store, "
                    "which ends with it", join_names(tuple(map(str, living))), _PEERS_END_SECONDS,
                )  # fmt: skip
            time.sleep(_PEERS_POLL_SECONDS)

    def publish(self) -> None:
        signs = self._store.list_values(_SIGNS)
        now = time.monotonic()
        # At most one interval is added, so that no process looks dead after all were suspended together.
        since, self._last_poll = min(now - self._last_poll, self._interval), now
        for index, sign in signs.items():
            before, age = self._sign_ages.get(index, ("", 0.0))
            self._sign_ages[index] = sign, age + since if sign == before else 0.0
        ended = {index: sign for index, (sign, _) in self._sign_ages.items() if sign in (_ENDED, _GAVE_UP)}
        ages = {index: age for index, (_, age) in self._sign_ages.items() if index not in ended}
        silent = {index: age for index, age in ages.items() if age > _SILENT_INTERVALS * self._interval}
        self._silent = set(silent)
        roll = LivenessReport(
            dict(sorted(silent.items(), key=lambda item: -item[1])[:_MAX_LISTED_PROCESSES]),
            [index for index, sign in ended.items() if sign == _ENDED][:_MAX_LISTED_PROCESSES],
            [index for index, sign in ended.items() if sign == _GAVE_UP][:_MAX_LISTED_PROCESSES],
            [index for index in range(self._count) if index not in self._sign_ages][:_MAX_LISTED_PROCESSES],
            not any(age > _DOUBTFUL_INTERVALS * self._interval for index, age in ages.items() if index not in silent),
        )
        self._store.put(_ROLL, msgspec.json.encode(roll).decode())


_member: _Member | None = None


@atexit.register
def _end() -> None:
    if _member:
        _member.end()


_USUAL_MISTAKE = (
    '`if jax.process_index() == 0:` around it is the usual mistake; processes="this" saves one process\'s data alone'
)
ALL_MUST_CALL = f"; every process must make this call: {_USUAL_MISTAKE}"
_NOT_COMMITTED = "nothing was committed"
_IN_DOUBT = "this process does not know whether the checkpoint was committed"


@dataclasses.dataclass(frozen=True)
class Blame:
    """The processes to name, the seconds of silence of the first one, and the end of the error message."""

    processes: list[int]
    seconds: float
    ending: str


def find_suspects(
    roll: LivenessReport,
    awaited: list[int],
    *,
    seen: Collection[int],
    here: int,
    seconds: float,
    known: bool,
    in_doubt: bool,
) -> Blame:
    """Blames dead processes first, then processes that ended, and live ones only if the roll has none of these.

    here: the index of this process.
    awaited: the processes from which this one has heard nothing for `seconds` seconds.
    seen: those of `awaited` that were in this call before.
    known: True if the roll lists every process that was dead when this one began to wait.
    in_doubt: True if the commit is in doubt for this process.

    A process that cancelled its call because of a peer is blamed only if no other process can be.
    """
    outcome = _IN_DOUBT if in_doubt else _NOT_COMMITTED
    dead = {**roll.silent, **dict.fromkeys(seen, seconds)}
    dead.pop(here, None)  # The roll lists this process as silent if it was suspended itself.
    if dead:
        return Blame(list(dead), next(iter(dead.values())), f"; dead, stopped or cut off, and {outcome}")
    if roll.ended:
        return Blame(roll.ended, seconds, f"; ended without this call, and {outcome}")
    unknown = [index for index in roll.unknown if index != here]
    suspects = [index for index in awaited if index not in roll.gave_up]
    if unknown or (suspects and not known):
        both = list(dict.fromkeys([*unknown, *suspects]))
        return Blame(both, seconds, f"; dead, or alive without making this call: {_USUAL_MISTAKE}")
    if suspects:
        return Blame(suspects, seconds, f"; alive{ALL_MUST_CALL}")
    return Blame(awaited, seconds, f"; stopped waiting for another process and ended, and {outcome}")
