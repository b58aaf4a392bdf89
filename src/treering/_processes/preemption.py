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
        self._is_announced = self._closed = False
        self._is_multi_process = coordinator.is_multi_process()
        if self._is_multi_process:
            _check_service()
            return
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedError(
                "save_on_preemption=True: Python sets signal handlers only in the main thread; make the Checkpointer "
                "there, or catch SIGTERM yourself and save with force=True"
            )
        self._previous_handler: Any = signal.getsignal(signal.SIGTERM)  # Set first: the new handler may run at once.
        signal.signal(signal.SIGTERM, self._handle)

    def is_due(self) -> bool:
        """Returns True from the moment when the job should save. All processes must call this equally often."""
        if (
            not self._is_multi_process and coordinator.is_multi_process()
        ):  # The job was formed since, and JAX now handles the signal.
            _check_service()
            self._is_multi_process = True
        if self._is_multi_process and not self._is_announced:
            from jax.experimental import multihost_utils

            # The numbers count calls, not training steps. JAX chooses the number after the largest that it has seen,
            # and a loop that asks only every hundredth step would never ask with exactly that step.
            if _announced.is_set() or multihost_utils.reached_preemption_sync_point(next(_calls)):
                _announced.set()
                self._is_announced = True
        return self._is_announced

    def close(self) -> None:
        """Restores the earlier handler, unless another one was set since."""
        self._closed = True
        here = threading.current_thread() is threading.main_thread()
        if here and not self._is_multi_process and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous_handler)

    def _handle(self, number: int, frame: Any) -> None:
        self._is_announced = True
        previous = self._previous_handler
        while isinstance(one := getattr(previous, "__self__", None), Preemption) and one._closed:
            previous = one._previous_handler  # A closed one would end the process, and this one must prevent that.
        if callable(previous):
            previous(number, frame)
        elif self._closed and previous == signal.SIG_DFL:  # A handler that was set since then has called this one.
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
