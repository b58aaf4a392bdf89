"""The processes of a job, and the calls that they make together."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

from .._pytree.jax_private import imported_job_state, job_state
from ..errors import MismatchError, UnsupportedError
from . import roll
from .calls import Call, SingleProcess
from .multi_process import MultiProcess

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
    if not job:
        return SingleProcess()
    roll.join(*job)
    return MultiProcess(*job, what, timeout)


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


def join() -> None:
    """Tells the peers, before the first call of this process, that it is alive; returns if it has none.

    A child of `multiprocessing` may have inherited the job of its parent, in which it has no part.
    """
    if multiprocessing.parent_process() is None and (job := _job()):
        roll.join(*job)


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
