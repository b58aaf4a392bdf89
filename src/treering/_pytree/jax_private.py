"""All that is used of JAX and has no public name. Where a JAX lacks one of these, its public way is taken."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any


def job_state() -> Any:
    """JAX's record of a job of several processes, with its key-value store; None where this JAX has no such thing."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    fields = ("client", "process_id", "num_processes", "preemption_sync_manager")
    return global_state if all(hasattr(global_state, name) for name in fields) else None


def imported_job_state() -> Any:
    """The same, unless JAX has not been asked for it yet."""
    return job_state() if "jax._src.distributed" in sys.modules else None


def put_shards() -> Callable[..., Any] | None:
    """The function in which `jax.device_put` ends: it makes an array of an aval, a sharding, shards on the host, a list
    of devices, and whether it is committed to them."""
    with contextlib.suppress(ImportError):
        from jaxlib import xla_client

        return getattr(xla_client, "batched_device_put", None)
    return None


def placed_aval(aval: Any, sharding: Any) -> Any:
    """Returns the type of an array that has a sharding: explicit mesh axes and the memory space are part of it."""
    with contextlib.suppress(ImportError):
        from jax._src import core

        if update := getattr(core, "update_aval_with_sharding", None):
            aval = update(aval, sharding)
        if (space := getattr(core, "mem_kind_to_space", None)) and sharding.memory_kind:
            aval = aval.update(memory_space=space(sharding.memory_kind))
    return aval


def flatten_one_level() -> Callable[[Any], Any] | None:
    """The function that flattens one level of a pytree with keys."""
    import jax

    registry = getattr(jax.tree_util, "default_registry", None)
    return getattr(registry, "flatten_one_level_with_keys", None)
