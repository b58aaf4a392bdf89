"""Begins the calls that the processes of a job make together, and tells this process its position in the job."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

from .._core.calls import Call, SingleProcessCall
from .._pytree.jax_private import imported_job_state, job_state
from ..errors import MismatchError, UnsupportedError
from . import liveness
from .call_history import History
from .multi_process import MultiProcessCall

_inherited_client: Any = None  # in a forked child, the client of the store of the parent's job


def check_timeout(timeout: Any) -> None:
    """Raises `MismatchError` for anything but a positive number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise MismatchError(f"timeout={timeout!r}: expected a number of seconds")


def begin_call(what: str, *, timeout: float = 30, processes: str = "all") -> Call:
    """Begins a collective call of the processes of this job. `what` describes it and is the same in all of them.

    Raises `MismatchError` for bad arguments or if the job was shut down, and `UnsupportedError` if the store of the job
    cannot be reached or if this process is a forked child.
    """
    if processes not in ("all", "this"):
        raise MismatchError(f"processes={processes!r}: expected 'all' or 'this'")
    check_timeout(timeout)
    if processes == "this" or (job := _job(what)) is None:
        return SingleProcessCall()
    if job[0] is None:
        import jax

        raise UnsupportedError(
            f"{what}: expected the key-value store of the job in the private module where JAX keeps it, found none in "
            f"JAX {jax.__version__}; use a Treering for this JAX, or processes='this'"
        )
    if job[0] is _inherited_client:
        raise UnsupportedError(f"{what}: this is a forked child of a process of the job, and not one itself")
    return MultiProcessCall(*job, what, timeout, liveness.start_signs(*job))


@contextlib.contextmanager
def ending_call(call: Call) -> Iterator[None]:
    """Ends the call in every process if the block raises."""
    try:
        yield
    except BaseException as error:
        call.close(error)
        raise


@contextlib.contextmanager
def collective_call(what: str, doing: str) -> Iterator[Call]:
    """Makes a call of all processes for a block, and ends it after the block.

    `doing` is the activity of this process that the errors of its peers name.
    """
    call = begin_call(what)
    with ending_call(call):
        call.set_activity(doing)
        yield call
        call.close()


def call_history() -> History:
    """Returns the calls of this process in its job of several processes."""
    job = _job()
    assert job
    return liveness.start_signs(*job)


def announce_alive() -> None:
    """Begins the signs of life of this process before its first call. Does nothing in a job of one process.

    A child of `multiprocessing` may have inherited the job of its parent, but is not part of it.
    """
    if multiprocessing.parent_process() is None and (job := _job()):
        liveness.start_signs(*job)


def is_multi_process() -> bool:
    """Returns True if this job has more than one process."""
    return _job() is not None


def process_index_and_count() -> tuple[int, int]:
    """Returns the index of this process in its job, and the number of processes."""
    job = _job()
    return job[1:] if job else (0, 1)


def forget_after_fork() -> None:
    """Notes that a forked child is not a process of its parent's job. It may join a job that is formed later."""
    global _inherited_client
    if job := imported_job_state():
        _inherited_client = job.client


def _job(what: str | None = None) -> tuple[Any, int, int] | None:
    """Returns the client of the store, the index of this process and the number of processes; None for one process.

    The client is None if this release of JAX does not keep it where Treering looks.

    Raises `MismatchError` for the call `what` if there are still several processes, but no store by which they agree.
    """
    import jax

    if job := job_state():
        if (job.num_processes or 1) == 1:
            return None
        if job.client is not None:
            return job.client, job.process_id, job.num_processes
        if what and (count := jax.process_count()) > 1:
            raise MismatchError(
                f"{what}: expected a job of {count} processes, found that jax.distributed.shutdown() has ended it; "
                "make this call before, or pass processes='this' to save the data of this process alone"
            )
        return None
    # This is the second choice, because `process_count` starts JAX's backends.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return None, jax.process_index(), jax.process_count()
