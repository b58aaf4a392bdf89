"""Clears a local tier in memory when its job ends well, because the memory would stay taken after the job."""

import logging
from typing import TYPE_CHECKING

from ..._processes.calls import Call
from ...errors import TreeringError
from ...stores import survival
from ...stores.lease_registry import LeaseLostError

if TYPE_CHECKING:
    from .tiered_run import TieredRun

_log = logging.getLogger("treering")


def clear_memory(run: "TieredRun", call: Call) -> None:
    """Removes the local steps on all disks, if that of process 0 is in memory and this job writes the run.

    Every process calls it, once all steps are uploaded. The journal stays: it says which job has written the run last.
    """
    if call.broadcast(lambda: _clear(run)) and run.host_group:
        run.host_group.clear(call)


def _clear(run: "TieredRun") -> bool:
    """Removes the local steps of process 0. Returns False if there are none to remove. Logs errors."""
    local, store = run.local, run.local.steps.store
    if not run.claimed or not survival.is_memory_of_host(store, local.root):
        return False
    removed = 0
    try:
        run.upload_metrics()  # The last upload may have been before they were added.
        steps, valid = local.steps.committed(), {one.step for one in local.valid_steps()}
        if run.to_upload():  # Another thread has saved a step since.
            return False
        uploaded = {one.step for one in run.remote.valid_steps()}
        for step, path in steps.items():
            if step not in valid and step not in uploaded:
                _log.warning("%s: step %d is damaged and not uploaded, so it stays in memory", local.root, step)
                continue
            try:
                local.check_unpinned_and_unlinked(path, pinned=True)
                local.delete_listed(path, pinned=True)
                removed += 1
            except LeaseLostError:
                raise
            except (TreeringError, OSError) as error:
                _log.warning("%s: step %d stays in memory: %s", local.root, step, error)
    except (TreeringError, OSError) as error:  # Nothing is lost, so the job still ends well.
        _log.warning("%s: steps stay in memory: %s", local.root, error)
    if removed:
        _log.info("%s: %d steps removed from memory; %s has what `keep` keeps", local.root, removed, run.root)
    return removed > 0
