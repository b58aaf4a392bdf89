"""Notices that a job will be stopped soon: clusters announce it by SIGTERM."""

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

_calls = itertools.count(1)  # numbers the requests to JAX of all Checkpointers of this process
_announced = Latch()  # set once JAX has said that all processes know of the preemption


class Preemption:
    """Listens for the announcement.

    With several processes, JAX listens. It chooses one call of `reached` at which all processes learn of it together.
    """

    def __init__(self) -> None:
        self._noticed = self._closed = False
        self._together = coordinator.several()
        if self._together:
            _check_service()
            return
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedError(
                "save_on_preemption=True: Python sets signal handlers only in the main thread; make the Checkpointer "
                "there, or catch SIGTERM yourself and save with force=True"
            )
        self._earlier: Any = signal.getsignal(signal.SIGTERM)  # Set first: the new handler may run at once.
        signal.signal(signal.SIGTERM, self._handle)

    def reached(self) -> bool:
        """Returns True from the moment when the job should save. All processes must call this equally often."""
        if not self._together and coordinator.several():  # The job was formed since, and JAX now handles the signal.
            _check_service()
            self._together = True
        if self._together and not self._noticed:
            from jax.experimental import multihost_utils

            # The numbers count calls, not training steps. JAX chooses the number after the largest that it has seen,
            # and a loop that asks only every hundredth step would never ask with exactly that step.
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
            earlier = one._earlier  # A closed one would end the process, and this one must prevent that.
        if callable(earlier):
            earlier(number, frame)
        elif self._closed and earlier == signal.SIG_DFL:  # A handler that was set since then has called this one.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _check_service() -> None:
    job = jax_private.job_state()
    # Without JAX's private state, only the option is known. If the service is missing all the same, JAX raises later.
    if job.preemption_sync_manager is None if job else not jax.config.jax_enable_preemption_service:  # type: ignore
        raise MismatchError(
            "save_on_preemption=True: expected JAX's preemption service, by which all processes agree on the step to "
            "save, found none; set jax_enable_preemption_service before jax.distributed.initialize"
        )
