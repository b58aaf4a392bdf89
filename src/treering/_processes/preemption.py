"""Notices that a job will be stopped soon: clusters announce it by a signal, usually SIGTERM.

What holds in this module:

- A signal belongs to the process: once it came, every Checkpointer that listens to it is notified. One that is made
  later is notified unless the program has seen the signal, in `preempted`, and continues nevertheless.
- Our handler calls the one that Python had before. If another one takes its place, the next `save` puts ours in front
  again. JAX takes SIGTERM in C when a job is formed, which Python does not see; ours then replaces JAX's.
- With several processes, the process that gets the signal notifies JAX's preemption service. JAX chooses one question
  of each process, at which all learn of the signal together. So all processes ask equally often, and no process acts on
  what it knows alone. JAX does this once in a job.
- A forked child is not the job: it has the handlers that its parent had before.
- A signal that the program has never seen is sent again when the last Checkpointer is closed, if it would have ended
  the process without Treering.
"""

import _thread
import contextlib
import functools
import itertools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax

from .._pytree import jax_private
from .._threads.forks import WeakRegistry
from .._threads.thread import Latch
from ..errors import MismatchError, UnsupportedError
from . import coordinator

Signals = bool | int | Collection[int]  # True means SIGTERM

_log = logging.getLogger("treering")
_turns = itertools.count(1)  # numbers the calls of `save` of all Checkpointers of this process


class _Call(NamedTuple):
    """A call of `save`: its number among those of all Checkpointers, and the step. A new Checkpointer has made none."""

    turn: int
    step: int = -1
    is_saved: bool = False


class Preemption:
    """The announcements of one or more signals, for one Checkpointer.

    `is_handled` is True once a step was saved because of one.
    """

    def __init__(self, signals: Signals, run: str, secure: Callable[[], None]) -> None:
        """`secure`, a method, saves the state of the newest call of `save`, or holds it. It is referred to weakly."""
        self._secure = weakref.WeakMethod(secure)  # type: ignore[arg-type]
        self._signals = [_known.setdefault(number, _Signal(number)) for number in _numbers(signals)]
        self.is_handled = False
        self._handled = 0  # the announcements for which a step was saved
        self._last, self._before_last = _Call(next(_turns)), _Call(0)
        self._is_deferred = self._is_closed = self._is_multi_process = False
        self._jaxs_manager: Any = None  # JAX's object of the service, which is made when JAX takes SIGTERM
        self._listened: list[_Signal] | None = None
        self._listen()
        _alive.add(self)
        if any(one.is_seen for one in self._signals):
            self._handled = self._count()
        if self.is_announced:
            _log.warning(
                "%s: %s came before this Checkpointer was made, so the first `save` saves in any case", run, self.names
            )

    @property
    def names(self) -> str:
        """The names of the signals that came to this process, or else of all, for messages."""
        came = [one for one in self._signals if one.received] or self._signals
        return " or ".join(signal.Signals(one.number).name for one in came)

    @property
    def is_known(self) -> bool:
        """True if a signal came, as far as this process knows without asking JAX."""
        return self.is_handled or self.is_announced

    @property
    def is_announced(self) -> bool:
        """True if a signal came for which no step was saved, as far as this process knows without asking JAX."""
        return self._count() > self._handled

    def ask(self) -> bool:
        """Returns the same, and asks JAX if there are several processes. All of them must call this equally often."""
        return self._ask(begins_block=False)

    def note_seen(self) -> None:
        """Notes that the program has seen the signals, and secures the states of the loop, which it may leave."""
        for one in self._signals:
            one.is_seen = True
        for other in _alive.all():
            if other.is_announced and not other._is_closed and (secure := other._secure()):
                secure()

    def is_due(self, step: int) -> bool:
        """Returns True if `save` must save this step. All processes must make the same calls.

        Two Checkpointers of a loop save the same step: if one has just passed this step without saving it, both save
        the next one.
        """
        if self._listened is None:  # A forked child that saves is a job of its own.
            self._listen()
        for one in self._listened or ():
            one.come_first()
        if self._is_closed or not self._ask(begins_block=True):
            return False
        passed = (one._last for one in _alive.all() if not one._is_closed and one._last.turn > self._last.turn)
        if not self._is_deferred and any(one.step == step and not one.is_saved for one in passed):
            self._is_deferred = True
            return False
        return True

    @property
    def is_ahead(self) -> bool:
        """True if another Checkpointer of the loop has yet to save the step that this one was called with last."""
        before = self._before_last
        return any(
            before.turn < one._last.turn < self._last.turn and 0 <= one._last.step == before.step
            for one in _alive.all()
            if one.is_announced and not one._is_closed
        )

    def is_due_at_close(self) -> bool:
        """Returns True if a signal came after the last step that was saved. Call it in all processes."""
        self.defer_no_more()
        return not self._is_closed and self._ask(begins_block=True)

    def defer_no_more(self) -> None:
        """Notes that no later step may follow, which two Checkpointers could save instead."""
        self._is_deferred = True

    @contextlib.contextmanager
    def staying_due(self) -> Iterator[None]:
        """Saves a step within the block without an effect on later calls: the program may call `save` once more."""
        self.defer_no_more()
        before = self._handled, self.is_handled
        try:
            yield
        finally:
            self._handled, self.is_handled = before

    def note(self, step: int, *, is_saved: bool, was_due: bool) -> None:
        """Notes the end of a call of `save`."""
        self._before_last, self._last = self._last, _Call(next(_turns), step, is_saved)
        if was_due:
            self._handled, self.is_handled, self._is_deferred = self._count(), True, False

    def close(self) -> None:
        """Restores the earlier handlers, unless others were set since."""
        if not self._is_closed:
            self._is_closed = True
            for one in self._listened or ():
                one.stop_listening()

    @property
    def swallows(self) -> bool:
        """True if a signal that ends the process came, and the program has never seen it."""
        return any(one.is_swallowed() for one in self._listened or ())

    def send_again(self, prepare: Callable[[], None]) -> None:
        """Sends the signals again that the program has not seen and that end the process. Call it after `close`.

        prepare: called before a signal is sent.
        """
        for one in self._listened or ():
            if one.is_swallowed():
                prepare()
                one.send()

    def _listen(self) -> None:
        self._listened, own = [], self._signals
        if not _is_main_thread():
            # JAX's own handler of SIGTERM notifies the service, too.
            own = [one for one in self._signals if not (self._is_in_job() and one.number == signal.SIGTERM)]
            if own:
                raise UnsupportedError(
                    "save_on_preemption: Python sets signal handlers only in the main thread; make the Checkpointer "
                    "there, or catch the signal yourself and save with force=True"
                )
        self._is_in_job()  # This may raise, so no handler is set yet.
        for one in own:
            one.listen()
        self._listened = own

    def _ask(self, *, begins_block: bool) -> bool:
        if self._is_in_job():
            _service.ask(begins_block=begins_block)
        return self.is_announced

    def _is_in_job(self) -> bool:
        """Returns True if there are several processes, which use JAX's service. The job may be formed late."""
        manager = jax_private.preemption_manager()
        if manager is not self._jaxs_manager:
            self._jaxs_manager = manager
            for one in self._listened or ():
                one.come_first(replaced_in_c=True)
        was_in_job, self._is_multi_process = self._is_multi_process, coordinator.is_multi_process()
        if self._is_multi_process and not was_in_job:
            _check_service()
            if any(one.received for one in self._listened or ()):  # It came before the job was formed.
                _service.notify()
        return self._is_multi_process

    def _count(self) -> int:
        if self._is_multi_process:
            return int(_service.announced.is_set())
        return sum(one.received for one in self._signals)


class _Signal:
    """A signal, as this process receives it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.received = 0  # how often the signal came
        self.is_seen = False  # True once the program has seen one. It may come again while the program ends.
        self._listeners = 0
        self._handler: Any = None
        self._is_handling = self._has_warned = False

    def listen(self) -> None:
        """Installs the handler, unless it is installed."""
        self._listeners += 1  # first, because the new handler may run at once
        self._install()

    def come_first(self, *, replaced_in_c: bool = False) -> None:
        """Installs the handler again if another one has taken its place. That one is called, too.

        replaced_in_c: True if JAX has, so that Python still names ours.
        """
        if not self._listeners or not _is_main_thread():
            return
        if replaced_in_c and self._is_installed():
            signal.signal(self.number, self._handler)
        elif not self._is_installed():
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s has another handler since save_on_preemption was set: %r; it is still called, after Treering's",
                    signal.Signals(self.number).name, signal.getsignal(self.number),
                )  # fmt: skip
            self._install()

    def _install(self) -> None:
        if not self._is_installed():
            self._handler = functools.partial(self._handle, signal.getsignal(self.number))
            signal.signal(self.number, self._handler)

    @property
    def is_handled(self) -> bool:
        """True if the signal has ever been handled in this process."""
        return self._handler is not None

    def _is_installed(self) -> bool:
        return self._handler is not None and signal.getsignal(self.number) is self._handler

    def stop_listening(self) -> None:
        """Restores the earlier handler after the last listener, unless another one was set since."""
        self._listeners -= 1
        # JAX's handler cannot be restored, and without one the service would never learn of the signal.
        is_jaxs = self.number == signal.SIGTERM and coordinator.is_multi_process()
        if not self._listeners and not is_jaxs and _is_main_thread() and self._is_installed():
            self._set(self._before)

    def is_swallowed(self) -> bool:
        """Returns True if the signal came unseen, no Checkpointer listens any more, and it would end the process."""
        handler = self._before if self._is_installed() else signal.getsignal(self.number)
        is_unseen = self.received > 0 and not self.is_seen and not self._listeners
        return is_unseen and handler == signal.SIG_DFL and not coordinator.is_multi_process()

    def send(self) -> None:
        """Sends the signal to this process."""
        self.is_seen = True
        os.kill(os.getpid(), self.number)

    def leave_to_parent(self) -> None:
        """Restores the earlier handler in a forked child."""
        self.received = self._listeners = 0
        self.is_seen = self._is_handling = False
        with contextlib.suppress(ValueError):  # raised in subinterpreters
            # Without ours, this replaces JAX's, which the child inherits, and which would ignore `terminate`.
            self._set(self._before if self._is_installed() else signal.getsignal(self.number))

    @property
    def _before(self) -> Any:
        return self._handler.args[0] if self._handler else None

    def _set(self, handler: Any) -> None:
        if handler is not None:  # Python cannot restore a handler that was set in C.
            signal.signal(self.number, handler)

    def _handle(self, before: Any, number: int, frame: Any) -> None:
        is_outer = not self._is_handling  # A handler that was set between two of ours calls the inner one.
        try:
            self._is_handling = True
            self.received += is_outer
            is_multi = coordinator.is_multi_process()
            if is_outer and is_multi:
                _service.notify()
            if callable(before):
                before(number, frame)
            elif before == signal.SIG_DFL and not self._listeners and not is_multi:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        finally:
            if is_outer:
                self._is_handling = False


class _Service:
    """JAX's preemption service, which tells all processes of a job at the same question.

    It takes questions with growing numbers, and chooses the number after the largest that any process has used. One
    process may read `preempted` once more than others before it calls `save`, such as for a log line of process 0. So
    each call of `save` begins a new block of numbers, and asks first with all that are left of the old block.
    """

    _BLOCK = 64
    _EACH = 32  # After so many questions in a block, only every 32nd has a number.
    _LAST = 2**31 - 1  # the largest number that JAX takes

    def __init__(self) -> None:
        self.announced = Latch()
        self._asked = 0  # in this block

    def notify(self) -> None:
        """Notifies the service of a signal, in a thread: the store may be slow, and a handler must not wait."""
        with contextlib.suppress(RuntimeError):  # No thread can be started any more, as at the end of the program.
            _thread.start_new_thread(jax_private.announce_preemption, ())

    def ask(self, *, begins_block: bool) -> None:
        """Sets `announced` if all processes are to know of the signal at this question."""
        from jax.experimental import multihost_utils

        history = coordinator.call_history()  # A process that was started again takes its number from process 0.
        self._asked = 0 if begins_block else self._asked + 1
        # The first half of all numbers lasts for 16 million calls. Blocks of one number then last much longer.
        block = self._BLOCK if history.questions < self._LAST // 2 else 1
        end = (history.questions // block + 1) * block
        numbers = range(history.questions + 1, end + 1)
        if not begins_block:
            has_number = self._asked <= self._EACH or self._asked % self._EACH == 0
            numbers = numbers[:-1][: int(has_number)]
        for number in numbers:
            if self.announced.is_set() or number > self._LAST:
                return
            history.questions = number
            if multihost_utils.reached_preemption_sync_point(number):
                self.announced.set()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_known: dict[int, _Signal] = {}
_service = _Service()
_alive: "WeakRegistry[Preemption]" = WeakRegistry()


def _numbers(signals: Signals) -> list[int]:
    """Returns the numbers of signals. Raises `MismatchError` for what is no signal that can be handled."""
    given = [signal.SIGTERM] if signals is True else [signals] if isinstance(signals, int) else signals
    try:
        numbers = sorted({int(signal.Signals(one)) for one in given if not isinstance(one, bool)})
    except (TypeError, ValueError):
        numbers = []
    if not numbers or {signal.Signals(one).name for one in numbers} & {"SIGKILL", "SIGSTOP"}:
        raise MismatchError(
            f"save_on_preemption={signals!r}: expected False, True (SIGTERM), or signals that a program can handle, "
            "such as signal.SIGUSR1 or (signal.SIGTERM, signal.SIGUSR1)"
        )
    return numbers


def _check_service() -> None:
    job = jax_private.job_state()
    # Without JAX's private state, only the option is known. If the service is missing all the same, JAX raises later.
    if job.preemption_sync_manager is None if job else not jax.config.jax_enable_preemption_service:  # type: ignore
        raise MismatchError(
            "save_on_preemption: expected JAX's preemption service, by which all processes agree on the step to "
            "save, found none; set jax_enable_preemption_service before jax.distributed.initialize"
        )


def _leave_to_parent() -> None:
    for one in _alive.all():
        one._listened = None
    for one in _known.values():
        one.leave_to_parent()


class _Fork(threading.local):
    """The mask of signals that a thread had before the fork that it makes, if signals are blocked for the fork."""

    mask: Any = None


def _block_signals() -> None:
    """Blocks the signals until a forked child has its own handlers.

    A signal that a parent sends to its child at once would reach the handler of the job, and be lost.
    """
    if numbers := [one.number for one in _known.values() if one.is_handled]:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock_signals() -> None:
    if _fork.mask is not None:
        mask, _fork.mask = _fork.mask, None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become_child() -> None:
    try:
        _leave_to_parent()
    finally:
        _unblock_signals()


_fork = _Fork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_become_child)
