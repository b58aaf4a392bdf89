"""The processes of a job; the namespace `multihost` of version 1."""

from typing import Any

import jax
from jax.experimental import multihost_utils


def is_pathways_backend() -> bool:
    """Returns False: Pathways is not supported."""
    return False


def process_index() -> int:
    """Returns the number of this process."""
    return jax.process_index()


def process_count() -> int:
    """Returns the number of processes."""
    return jax.process_count()


def is_primary_host(primary_host: int | None = 0) -> bool:
    """Returns True in the process with this number, or in all processes for None."""
    return primary_host is None or jax.process_index() == primary_host


async def sync_global_processes(name: str, **options: Any) -> None:
    """Waits until all processes have made this call. Options have no effect."""
    multihost_utils.sync_global_devices(name)
