"""The namespace `multihost` of Orbax: the few functions that programs call, by `jax.experimental.multihost_utils`."""

from typing import Any

from .namespaces import lookup

__getattr__ = lookup("multihost")


def process_index() -> int:
    """Returns the index of this process."""
    import jax

    return jax.process_index()


def process_count() -> int:
    """Returns the number of processes of the job."""
    import jax

    return jax.process_count()


def is_primary_host(primary_host: int | None = 0) -> bool:
    """Returns True in the primary process, or in all with None."""
    return primary_host is None or process_index() == primary_host


def unique_barrier_key(key: str, *, prefix: str | None = None, suffix: str | None = None) -> str:
    """Returns a name for a barrier."""
    return "_".join(part for part in (prefix, key, suffix) if part)


def coordination_timeout() -> int:
    """Returns the seconds that Orbax waits for other processes. Treering waits as long as they live."""
    return 300


def sync_global_processes(name: str, *, timeout: int | None = None, processes: Any = None, **_: Any) -> None:
    """Waits until all processes have made this call."""
    from jax.experimental import multihost_utils

    if process_count() > 1:
        multihost_utils.sync_global_devices(name)


def is_pathways_backend() -> bool:
    """Returns False: Pathways is not supported."""
    return False


def is_jax_distributed_client_initialized() -> bool:
    """Returns True after `jax.distributed.initialize`."""
    import jax

    return jax.distributed.is_initialized()


def process_index_from_device(device: Any) -> int:
    """Returns the index of the process that has a device."""
    return device.process_index


def unique_processes_from_devices(device_array: Any) -> set[int]:
    """Returns the indices of the processes that have the devices of an array, such as those of a mesh."""
    return {device.process_index for device in device_array.flat}


def should_skip_process_sync(processes: set[int] | None = None) -> bool:
    """Returns True if there is no other process to wait for."""
    return process_count() == 1 or processes == {process_index()}


async def await_global_processes(name: str, **options: Any) -> None:
    """Waits until all processes have made this call, as version 1 of Orbax does. `options` have no effect."""
    sync_global_processes(name)


def reached_preemption(step: int) -> bool:
    """Returns True at the step at which JAX tells all processes to stop; only in a job of several processes."""
    from jax.experimental import multihost_utils

    return process_count() > 1 and bool(multihost_utils.reached_preemption_sync_point(step))


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """Returns the tree of the source process, by default process 0, in all processes.

    JAX adds the values of all processes, in its types. That changes large integers and the sign of zeros, so it gets
    the bytes.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if process_count() == 1:
        return multihost_utils.broadcast_one_to_all(in_tree, is_source=is_source)
    leaves, structure = jax.tree.flatten(in_tree)
    arrays = [np.asarray(leaf) for leaf in leaves]
    jax.eval_shape(lambda *arrays: None, *arrays)  # It refuses text and objects, as JAX's broadcast does.
    sent = [np.frombuffer(array.tobytes(), np.uint8) for array in arrays]
    sent = multihost_utils.broadcast_one_to_all(sent, is_source=is_source)
    found = [data.view(array.dtype).reshape(array.shape) for data, array in zip(sent, arrays, strict=True)]
    return structure.unflatten(found)
