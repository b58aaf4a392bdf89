"""Contains every use of JAX's private names. If a version of JAX lacks one, callers use the public way instead."""

import contextlib
import datetime
import gc
import logging
import sys
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("treering")


def job_state() -> Any:
    """Returns JAX's record of a job of several processes, with its key-value store, or None if this JAX lacks it."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    fields = ("client", "process_id", "num_processes", "preemption_sync_manager")
    return global_state if all(hasattr(global_state, name) for name in fields) else None


def imported_job_state() -> Any:
    """Returns the same, or None if the program has not imported that part of JAX yet."""
    return job_state() if "jax._src.distributed" in sys.modules else None


def preemption_manager() -> Any:
    """Returns JAX's object of the preemption service; None before `jax.distributed.initialize`, or without it."""
    return getattr(imported_job_state(), "preemption_sync_manager", None)


def announce_preemption() -> None:
    """Notifies JAX's preemption service that this process is about to be stopped, as its own handler of SIGTERM does.

    That handler sets this key of the job's store, for which the services of all processes wait.
    """
    client = getattr(job_state(), "client", None)
    if client is not None:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        try:
            client.key_value_set("RECEIVED_PREEMPTION_NOTICE", now)
        except Exception as error:  # JAX has no public class for these errors.
            if "ALREADY_EXISTS" not in str(error):
                _log.warning("JAX's preemption service cannot be notified of the signal: %s", error)


def coordinator_address() -> str | None:
    """Returns the address of process 0 as ``host:port``, as this process was given it; None if this JAX lacks it."""
    return getattr(job_state(), "coordinator_address", None)


def put_shards() -> Callable[..., Any] | None:
    """Returns the function that `jax.device_put` calls last, or None if this JAX lacks it.

    It makes an array of an aval, a sharding, shards on the host, a list of devices, and True for a committed array.
    """
    with contextlib.suppress(ImportError):
        from jaxlib import xla_client

        return getattr(xla_client, "batched_device_put", None)
    return None


def placed_aval(aval: Any, sharding: Any) -> Any:
    """Returns the type of an array with a sharding. Explicit mesh axes and the memory space are part of the type."""
    with contextlib.suppress(ImportError):
        from jax._src import core

        if update := getattr(core, "update_aval_with_sharding", None):
            aval = update(aval, sharding)
        if (space := getattr(core, "mem_kind_to_space", None)) and sharding.memory_kind:
            aval = aval.update(memory_space=space(sharding.memory_kind))
    return aval


def trace_of(tracer: Any) -> Any:
    """Returns the trace that a tracer belongs to, or the tracer itself if this JAX does not say it."""
    return getattr(tracer, "_trace", tracer)


def end_traces(outer: Any) -> None:
    """Ends a trace, and the traces within it, that an exception has left open.

    JAX would keep the tracers of such a trace for the rest of the process, although the program no longer can use them.
    """
    for trace in [one for one in gc.get_objects() if type(one) is type(outer)]:
        chain = trace
        while chain is not None and chain is not outer:
            chain = getattr(chain, "parent_trace", None)
        if chain is outer and (end := getattr(trace, "invalidate", None)):
            end()


def flatten_one_level() -> Callable[[Any], Any] | None:
    """Returns the function that flattens one level of a pytree with keys, or None if this JAX lacks it."""
    import jax

    registry = getattr(jax.tree_util, "default_registry", None)
    return getattr(registry, "flatten_one_level_with_keys", None)
