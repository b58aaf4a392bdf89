"""The roll of a job: which of its processes are alive, also between their calls.

Processes hear one another in calls alone (see `multi_process`). A process that waits in its training step for a dead
one makes no call, and its peers would blame it. So each process renews one key of the job's store every two seconds
(less often in a large job), from its first call, or from the import of Treering into a job that has formed, to its end.
Process 0, which runs the store, keeps the roll: it reads these signs without a request, and publishes which processes
are silent. A process whose wait timed out reads the roll.

To ask the peers only when one is missed would need a request in each process that waits in the store. JAX's client
cannot cancel one, and a process whose interpreter ends meanwhile crashes. `get_live_nodes`, JAX's own knowledge, is a
barrier of all that survive, and learns of a death after 100 s.

Its keys: ``treering/alive/3`` is the latest sign of process 3, or how it ended; ``treering/roll`` is the roll.
"""

import atexit
import itertools
import os
import queue
import threading
import time
from typing import Any

import msgspec

from .._pytree import jax_private
from .._threads.decoding import learn
from .._threads.pool import start
from ..errors import PeerError
from . import tree
from .job_store import JobStore

_SIGNS, _ROLL = "treering/alive/", "treering/roll"
_ENDED, _GAVE_UP = "ended", "gave up"  # the last sign of a process
_DOUBTFUL, _SILENT = 1.5, 2.0  # intervals without a sign, after which a process may be dead, and is silent
_MAX_NAMED = 1_000  # processes of a kind in the roll, which all may read at once
_END_SECONDS = 2.0  # for which a process that ends waits until its peers are told


class Roll(msgspec.Struct, frozen=True):
    """What process 0 knows of the processes of the job; those that it does not list gave a sign of life lately."""

    silent: dict[int, float] = {}  # those that gave signs and give none now, for how many seconds; the longest first
    ended: list[int] = []  # those whose interpreter ended
    gave_up: list[int] = []  # those of which it ended after `PeerError`, which others are the cause of
    unknown: list[int] = []  # those that gave no sign so far
    is_settled: bool = False  # no process is late with its sign but not yet silent


learn(Roll)


def read(store: JobStore, count: int) -> Roll:
    """Returns the roll; while process 0 does not keep one, only which processes of a small job gave no sign so far."""
    if text := store.get(_ROLL, None):
        return msgspec.json.decode(text, type=Roll)
    signs = store.listed(_SIGNS) if count <= tree.FAN_OUT else {}
    return Roll(unknown=[index for index in range(count) if index not in signs] if signs else [0])


def join(client: Any, index: int, count: int) -> None:
    """Begins the signs of life of this process in a job, unless it gives them already."""
    global _member
    member = _member
    if member is None or member.client is not client or not member.thread.is_alive():
        member = _member = _Member(client, index, count)
        start(member.thread)
    member.last_sign = _ENDED


def give_up() -> None:
    """Notes that a call of this process failed because of a peer."""
    if member := _member:
        member.last_sign = _GAVE_UP


class _Member:
    """This process in its job."""

    def __init__(self, client: Any, index: int, count: int):
        self.client, self.process = client, os.getpid()
        self.thread = threading.Thread(target=self._give_signs, name="treering-alive", daemon=True)
        self._store = JobStore(client, "sign of life", here=True, timeout=0)  # only this thread waits for the store
        self._index = index
        self._keeper = None if index else _Keeper(self._store, count)
        self._interval = tree.roll_seconds(count) / (2 if self._keeper else 1)
        self.last_sign = _ENDED
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()

    def end(self) -> None:
        """Tells the peers that this process ends. A thread inside JAX's client would crash the interpreter's end."""
        if self.process == os.getpid() and self.thread.is_alive():  # a forked child has no such thread
            self._ends.put(None)
            self.thread.join(_END_SECONDS)

    def _give_signs(self) -> None:
        global _member
        for number in itertools.count():
            self._put(str(number))
            try:
                self._ends.get(timeout=self._interval)
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
        except PeerError:  # The next call says so. The store may answer again, after process 0 stood still.
            return


class _Keeper:
    """Process 0, which keeps the roll."""

    def __init__(self, store: JobStore, count: int):
        self._store, self._count, self._interval = store, count, tree.roll_seconds(count)
        self._heard: dict[int, tuple[str, float]] = {}  # the latest sign of each process, and its age in seconds
        self._looked = time.monotonic()

    def publish(self) -> None:
        signs = self._store.listed(_SIGNS)
        now = time.monotonic()
        since, self._looked = min(now - self._looked, self._interval), now  # a job that stood still as a whole lives
        for index, sign in signs.items():
            before, age = self._heard.get(index, ("", 0.0))
            self._heard[index] = sign, age + since if sign == before else 0.0
        ended = {index: sign for index, (sign, _) in self._heard.items() if sign in (_ENDED, _GAVE_UP)}
        ages = {index: age for index, (_, age) in self._heard.items() if index not in ended}
        silent = {index: age for index, age in ages.items() if age > _SILENT * self._interval}
        roll = Roll(
            dict(sorted(silent.items(), key=lambda item: -item[1])[:_MAX_NAMED]),
            [index for index, sign in ended.items() if sign == _ENDED][:_MAX_NAMED],
            [index for index, sign in ended.items() if sign == _GAVE_UP][:_MAX_NAMED],
            [index for index in range(self._count) if index not in self._heard][:_MAX_NAMED],
            not any(age > _DOUBTFUL * self._interval for index, age in ages.items() if index not in silent),
        )
        self._store.put(_ROLL, msgspec.json.encode(roll).decode())


_member: _Member | None = None


@atexit.register
def _end() -> None:
    if _member:
        _member.end()
