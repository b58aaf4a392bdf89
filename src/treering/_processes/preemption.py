"""Notices that a job is about to be stopped, which the machines of a cluster announce by SIGTERM."""

import itertools
import os
import signal
import threading
from typing import Any

import jax

from .._pytree import jax_private
from .._threads.latch import Latch
from ..errors import MismatchError, UnsupportedError
from . import coordinator

_calls = itertools.count(1)  # the numbers of the calls that ask JAX, of all Checkpointers of a process
_announced = Latch()  # set when JAX has announced it


class Preemption:
    """Listens for the announcement; with several processes JAX does, and says at which call all processes know it."""

    def __init__(self) -> None:
        self._noticed = self._closed = False
        self._together = coordinator.several()
        if self._together:
            _check_service()
            return
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedError(
                "save_on_preemption=True: Python sets signal handlers in the main thread alone; make the Checkpointer "
                "there, or catch SIGTERM yourself and save with force=True"
            )
        self._earlier: Any = signal.getsignal(signal.SIGTERM)  # before SIGTERM may come
        signal.signal(signal.SIGTERM, self._handle)

    def reached(self) -> bool:
        """Whether to save now; True from then on. With several processes, all call this equally often."""
        if not self._together and coordinator.several():  # the job was formed since; JAX has taken the signal over
            _check_service()
            self._together = True
        if self._together and not self._noticed:
            from jax.experimental import multihost_utils

            # Numbered by calls, not by steps: JAX chooses the number after the largest that it has heard of.
            if _announced.is_set() or multihost_utils.reached_preemption_sync_point(next(_calls)):
                _announced.set()
                self._noticed = True
        return self._noticed

    def close(self) -> None:
        """Restores the earlier handler, unless another one was set since."""
        self._closed = True
        here = threading.current_thread() is threading.main_thread()
        if here and not self._together and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._earlier)

    def _handle(self, number: int, frame: Any) -> None:
        self._noticed = True
        earlier = self._earlier
        while isinstance(one := getattr(earlier, "__self__", None), Preemption) and one._closed:
            earlier = one._earlier  # a closed one would end the process, which this one is to prevent
        if callable(earlier):
            earlier(number, frame)
        elif self._closed and earlier == signal.SIG_DFL:  # a handler that was set since has called this one
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _check_service() -> None:
    job = jax_private.job_state()
    # Whether it was asked for is all that can be known in public; if it is missing all the same, JAX says so later.
    if job.preemption_sync_manager is None if job else not jax.config.jax_enable_preemption_service:  # type: ignore
        raise MismatchError(
            "save_on_preemption=True: expected JAX's preemption service, by which all processes agree on the step to "
            "save; set jax_enable_preemption_service before jax.distributed.initialize"
        )
