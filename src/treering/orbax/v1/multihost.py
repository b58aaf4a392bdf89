"""The processes of a job; the namespace `multihost` of version 1."""

from typing import Any

from .. import multihost
from ..multihost import is_primary_host, process_count, process_index

__all__ = ["is_pathways_backend", "is_primary_host", "process_count", "process_index", "sync_global_processes"]


def is_pathways_backend() -> bool:
    """Returns False: Pathways is not supported."""
    return False


async def sync_global_processes(name: str, **options: Any) -> None:
    """Waits until all processes have made this call. `options` have no effect."""
    multihost.sync_global_processes(name)
