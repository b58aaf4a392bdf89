"""The processes of a job, and how they agree.

Everything goes through the key-value store of `jax.distributed`: never through device collectives, so that it
may happen in a background thread, and never through its barriers: one that timed out stays broken.
Process 0 reads the values of all processes and publishes its decision; the others read only what process 0 writes.
In a call, each process renews its heartbeat; a process whose heartbeat stops for `timeout` seconds is taken for dead.

A call is known by what it does and how many of that kind came before it, so that a call which one process leaves
out disturbs no call of another kind. Its keys: ``heartbeat/3`` is what process 3 is doing, or what it failed with;
``0/3`` is its value in the first exchange, and ``0/answer`` the decision of process 0.

A process that stood still for longer than the timeout (a debugger, a suspended machine) comes to calls which the others
have given up. All make the calls of the main thread in one order, and ``treering/now/3`` is the latest that process 3
has begun there: a process that waits for one that has gone on gives up early, and so catches up with the others.
"""

import collections
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import xxhash

from .. import errors
from .._pytree.jax_private import imported_job_state, job_state
from .._threads.pool import start
from ..errors import MismatchError, PeerError, TreeringError, UnsupportedError
from .calls import Call, SingleProcess

_HEARTBEAT_SECONDS = 1.0  # seconds between signs of life
_POLL_SECONDS = 0.25  # seconds between looks at them
_LATER_CALL_SECONDS = 2.0  # seconds, at most, that another process is seen in a later call before that is believed
_KEEP_KEYS_SECONDS = 600.0  # seconds for which the keys of a call that is over are kept for processes that are behind
_MAX_COUNTED_CALLS = 10_000  # kinds of calls that are counted
_FAILED = "failed "
_NOW, _NOWHERE = "treering/now/", '["",-1,0]'  # the latest call of a process: its kind, number and ordinal
_EVERYONE = (
    "; every process must make this call: `if jax.process_index() == 0:` around it is the usual mistake; "
    'processes="this" saves one process\'s data alone'
)

_counts: collections.OrderedDict[str, int] = collections.OrderedDict()  # the number of the last call, by what it does
_over: collections.deque[tuple[float, str]] = collections.deque()  # calls that are over, and since when
_ordinal = 0  # of the latest call that the main thread has begun
_inherited: Any = None  # the store of the parent's job, in a forked child


def check_timeout(timeout: Any) -> None:
    """Raises `MismatchError` for anything but a positive number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise MismatchError(f"timeout={timeout!r}: expected a number of seconds")


def begin(what: str, *, timeout: float = 30, processes: str = "all") -> Call:
    """Begins a collective call of the processes of this job; `what` describes it and is the same in all of them."""
    if processes not in ("all", "this"):
        raise MismatchError(f"processes={processes!r}: expected 'all' or 'this'")
    check_timeout(timeout)
    job = _job() if processes == "all" else None
    if job and job[0] is None:
        import jax

        raise UnsupportedError(
            f"{what}: expected the key-value store of the job, which JAX has no public way to, found none where JAX "
            f"{jax.__version__} should have it; use a treering for this JAX, or processes='this'"
        )
    if job and job[0] is _inherited:
        raise UnsupportedError(f"{what}: this is a forked child of a process of the job, and not one itself")
    return MultiProcess(*job, what, timeout) if job else SingleProcess()


@contextlib.contextmanager
def ending(call: Call) -> Iterator[None]:
    """Ends the call in every process when the block raises."""
    try:
        yield
    except BaseException as error:
        call.close(error)
        raise


@contextlib.contextmanager
def begun(what: str, doing: str) -> Iterator[Call]:
    """A call of all processes within a block, which ends it; `doing` is what the others are told of this one."""
    call = begin(what)
    with ending(call):
        call.doing(doing)
        yield call
        call.close()


def several() -> bool:
    """Whether this job has more than one process."""
    return _job() is not None


def position() -> tuple[int, int]:
    """The index of this process in its job, and the number of processes."""
    job = _job()
    return job[1:] if job else (0, 1)


def forget_after_fork() -> None:
    """Notes that a forked child is no process of its parent's job; it may join a job that is formed later."""
    global _inherited
    if job := imported_job_state():
        _inherited = job.client


def _job() -> tuple[Any, int, int] | None:
    """The store, the index of this process and the number of processes; None when there is only one.

    The store itself is None where this JAX keeps it in another place.
    """
    if job := job_state():
        several = job.client is not None and (job.num_processes or 1) > 1
        return (job.client, job.process_id, job.num_processes) if several else None
    import jax

    if not jax.distributed.is_initialized() or jax.process_count() == 1:  # the second choice:
        return None  # `process_count` starts the backends
    return None, jax.process_index(), jax.process_count()


class MultiProcess:
    """A call that every process of the job makes."""

    def __init__(self, client: Any, index: int, count: int, what: str, timeout: float):
        self.index, self.count, self.undecided = index, count, False
        self._client, self._what, self.timeout = client, what, timeout
        self._hash = xxhash.xxh3_64_hexdigest(what.encode("utf-8", "backslashreplace"))
        self._exchanges = itertools.count()
        self._doing = "beginning"
        self._cancelled: BaseException | None = None
        self._heard_of_failure = False
        self._silent: dict[int, tuple[str, float]] = {}  # the last heartbeat of a process, and its age in seconds
        self._looked = time.monotonic()
        self._ended = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # in C: an interrupt leaves no lock of it held
        self._heartbeat: threading.Thread | None = None
        self._ordered = threading.current_thread() is threading.main_thread()
        self._ordinal = 0
        self._met = False  # whether process 0 was seen in this call
        self._ahead: dict[int, float] = {}  # since when a process is seen in a later call
        if self._ordered:  # a call that fails below counts as well
            global _ordinal
            _ordinal = self._ordinal = _ordinal + 1
        self._number = self._next()
        try:
            while index and self._get(f"{self.name}/heartbeat/0", "").startswith(f'{_FAILED}["PeerError"'):
                self._number = self._next()  # process 0 has made that call without this process
        except PeerError:
            self._uncount()
            raise

    def doing(self, what: str) -> None:
        self._doing = what
        self._wake.put(None)
        if self._heartbeat is None:
            self._heartbeat = threading.Thread(target=self._beat, name="treering-heartbeat", daemon=True)
            start(self._heartbeat)

    def gather_and_decide(self, mine: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        exchange = next(self._exchanges)
        if not self.index:
            return self._answer(exchange, decide(self._gather(exchange, mine)))
        self.undecided = True  # before the value is sent: one whose sending failed may have arrived all the same
        self._set(f"{exchange}/{self.index}", mine)
        return self._received(exchange)

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        exchange = next(self._exchanges)
        return self._received(exchange) if self.index else self._answer(exchange, decide())

    def check(self) -> None:
        if self.index:
            self._check([0])

    def check_all(self) -> None:
        self._check([0] if self.index else list(range(1, self.count)))

    def cancel(self, reason: BaseException) -> None:
        self._cancelled = reason

    def close(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        self._wake.put(None)
        if self._heartbeat and self._heartbeat.is_alive():  # or an interrupt came first: the thread ends when it begins
            self._heartbeat.join(self.timeout)  # so that no heartbeat overwrites the failure that is put there next
        if isinstance(error, PeerError) and self.index and not self._met:
            self._withdraw()
        elif error:
            kind = type(error).__name__ if isinstance(error, TreeringError) else ""
            text = (str(error) or type(error).__name__).encode("utf-8", "backslashreplace").decode()
            try:
                self._put(f"{self.name}/heartbeat/{self.index}", _FAILED + msgspec.json.encode([kind, text]).decode())
            except PeerError:  # process 0 is gone, and the store with it
                return
        if not self.index:
            _over.append((time.monotonic(), self.name))
            self._delete_old()

    def _withdraw(self) -> None:
        """Removes the traces of a call that process 0 has not made."""
        self._uncount()
        with contextlib.suppress(PeerError):
            self._reach(self._client.key_value_delete, f"{self.name}/heartbeat/{self.index}")

    def _uncount(self) -> None:
        """Gives the number of this call to the next one of its kind, for process 0 has not used it yet."""
        if _counts.get(self._what) == self._number:
            _counts[self._what] -= 1

    # In process 0

    def _gather(self, exchange: int, mine: Any) -> list[Any]:
        words: dict[int, Any] = {0: mine}
        while True:
            for index, text in self._listed(f"{self.name}/{exchange}/").items():
                if index not in words:
                    words[index] = msgspec.json.decode(text)
            missing = [index for index in range(self.count) if index not in words]
            if not missing:
                return [words[index] for index in range(self.count)]
            self._check(missing)
            self._await(f"{exchange}/{missing[0]}")

    def _answer(self, exchange: int, answer: Any) -> Any:
        self._set(f"{exchange}/answer", answer)
        return answer

    def _delete_old(self) -> None:
        while _over and time.monotonic() - _over[0][0] > _KEEP_KEYS_SECONDS:
            self._reach(self._client.key_value_delete, f"{_over.popleft()[1]}/")

    # In the other processes

    def _received(self, exchange: int) -> Any:
        while (text := self._await(f"{exchange}/answer")) is None:
            try:
                self._check([0])
            except TreeringError:
                if not self._heard_of_failure:
                    raise
                # Process 0 may have failed after it had answered, and then its answer holds.
                if (text := self._get(f"{self.name}/{exchange}/answer", None)) is None:
                    self.undecided = False
                    raise
                break
        self.undecided, self._met = False, True
        return msgspec.json.decode(text)

    # In all processes

    def _check(self, awaited: list[int]) -> None:
        """Raises what an awaited process failed with, or `PeerError` when one has been silent for too long."""
        if self._cancelled:
            raise self._cancelled
        keys = f"{self.name}/heartbeat/"
        heartbeats = self._listed(keys) if self.index == 0 else {0: self._get(f"{keys}0", "")}
        now = time.monotonic()
        since = min(now - self._looked, _HEARTBEAT_SECONDS)  # a job that was stopped as a whole is not dead
        self._looked = now
        for index in awaited:
            heartbeat = heartbeats.get(index, "")
            if heartbeat.startswith(_FAILED):
                self._heard_of_failure = True
                kind, text = msgspec.json.decode(heartbeat.removeprefix(_FAILED))
                raise getattr(errors, kind, PeerError)(
                    text if text.startswith("process ") else f"process {index}: {text}"
                )
            before, silence = self._silent.get(index, ("", 0.0))
            self._silent[index] = heartbeat, silence + since if heartbeat == before else 0.0
        self._met = self._met or bool(self._silent.get(0, ("",))[0])
        silent = [index for index in awaited if self._silent[index][1] > self.timeout]
        if silent:
            self._raise_silent(silent)
        if self._ordered:  # a process that was seen in this call is in it, however slow
            self._check_gone([index for index in awaited if not self._silent[index][0]], now)

    def _check_gone(self, quiet: list[int], now: float) -> None:
        """Raises `PeerError` when a process in `quiet` has gone on to a call that this process has not reached."""
        if not quiet:
            return
        latest = self._listed(_NOW) if self.index == 0 else {0: self._get(f"{_NOW}0", _NOWHERE)}
        for index in quiet:
            what, number, ordinal = msgspec.json.decode(latest.get(index, _NOWHERE))
            if ordinal <= self._ordinal or number <= _counts.get(what, -1):
                self._ahead.pop(index, None)
            elif now - self._ahead.setdefault(index, now) >= min(_LATER_CALL_SECONDS, self.timeout / 8):
                raise PeerError(
                    f"{self._what}: process {index} (not in this call; its last is {what}) has gone on without it; if "
                    f"one of the two stood still for long, they find together again at a later call{_EVERYONE}"
                )

    def _raise_silent(self, silent: list[int]) -> None:
        seen = {index: self._silent[index][0].partition(" ")[2] for index in silent}
        shown = []
        for index, doing in list(seen.items())[:5]:
            what = "" if doing else msgspec.json.decode(self._get(f"{_NOW}{index}", _NOWHERE))[0]
            elsewhere = "not in this call" + (f"; its last is {what}" if what else "")
            shown.append(f"process {index} ({f'last seen {doing}' if doing else elsewhere})")
        more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
        hint = "; it is dead or cut off, and nothing was committed"
        if self.undecided:
            hint = "; it is dead or cut off, and whether the checkpoint was committed is not known here"
        if not any(seen.values()):
            hint = _EVERYONE
        raise PeerError(f"{self._what}: nothing heard for {self.timeout:g} s from {', '.join(shown)}{more}{hint}")

    def _beat(self) -> None:
        try:
            for beat in itertools.count():
                if not beat and self._ordinal == _ordinal:  # even if the call is over: the others look for this process
                    where = [self._what, self._number, self._ordinal]
                    self._put(f"{_NOW}{self.index}", msgspec.json.encode(where).decode())
                if self._ended:
                    return
                self._put(f"{self.name}/heartbeat/{self.index}", f"{beat} {self._doing}")
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=min(_HEARTBEAT_SECONDS, self.timeout / 4))
        except PeerError:  # process 0 is gone, and the store with it; the thread that waits for it finds out
            return

    @property
    def name(self) -> str:
        return f"treering/{self._hash}/{self._number}"

    def _next(self) -> int:
        """The number of the next call of this kind."""
        n = _counts.pop(self._what, -1) + 1
        _counts[self._what] = n
        if len(_counts) > _MAX_COUNTED_CALLS:
            _counts.popitem(last=False)
        return n

    def _set(self, key: str, value: Any) -> None:
        self._put(f"{self.name}/{key}", msgspec.json.encode(value).decode())

    def _put(self, key: str, text: str) -> None:
        self._reach(lambda: self._client.key_value_set(key, text, allow_overwrite=True))

    def _get(self, key: str, default: Any) -> Any:
        return self._reach(self._client.key_value_try_get, key, absent=("NOT_FOUND", default))

    def _listed(self, directory: str) -> dict[int, str]:
        """The values below a key by process."""
        found = self._reach(self._client.key_value_dir_get, directory, absent=("NOT_FOUND", []))
        named = ((key.rpartition("/")[2], value) for key, value in found)
        return {int(name): value for name, value in named if name.isdigit()}

    def _await(self, key: str) -> str | None:
        """The value of a key; None when there is none after `_POLL_SECONDS`."""
        get = self._client.blocking_key_value_get
        return self._reach(get, f"{self.name}/{key}", int(_POLL_SECONDS * 1000), absent=("DEADLINE_EXCEEDED", None))

    def _reach(self, ask: Callable[..., Any], *args: Any, absent: tuple[str, Any] = ("", None)) -> Any:
        """Asks the store. Raises `PeerError` when it fails, or has not answered after the timeout.

        `absent`: a part of the error's text that says there is no such key, and what to return then.
        """
        found: list[Any] = []

        def work() -> None:
            try:
                found.append((ask(*args), None))
            except RuntimeError as error:
                found.append((None, error))

        if self.index == 0:  # the store is in this process
            work()
        else:  # its client waits for ever for a process 0 that stands still
            thread = threading.Thread(target=work, name="jax-store", daemon=True)
            start(thread)
            thread.join(self.timeout)
        if not found:
            raise PeerError(f"{self._what}: process 0 has not answered for {self.timeout:g} s")
        value, error = found[0]
        if error is None:
            return value
        if absent[0] and absent[0] in str(error):
            return absent[1]
        raise PeerError(f"{self._what}: process 0, which coordinates, cannot be reached: {error}") from error
