"""Clears a local tier in memory when its job ends well, because the memory would stay taken after the job."""

import logging
from collections.abc import Callable

from ...errors import TreeringError
from ...stores.lease_registry import LeaseLostError
from ..plain_run import PlainRun

_log = logging.getLogger("treering")


def clear_steps(local: PlainRun, remote: PlainRun, missing: Callable[[], list[int]]) -> None:
    """Removes the steps of the local tier on this disk, unless steps are missing remotely. Logs errors.

    The journal stays: it says which job has written the run last.

    missing: uploads added metrics, and returns the steps that are to be uploaded.
    """
    removed = 0
    try:
        steps, valid = local.steps.committed(), {one.step for one in local.valid_steps()}
        if missing():  # Another thread has saved a step since the last upload.
            return
        uploaded = {one.step for one in remote.valid_steps()}
        for step, path in steps.items():
            if step not in valid and step not in uploaded:
                _log.warning("%s: step %d is damaged and not uploaded, so it stays in memory", local.root, step)
                continue
            try:
                local.check_unpinned_and_unlinked(path, pinned=True)
                local.remove(path, pinned=True)()
                removed += 1
            except LeaseLostError:
                raise
            except (TreeringError, OSError) as error:
                _log.warning("%s: step %d stays in memory: %s", local.root, step, error)
    except (TreeringError, OSError) as error:  # Nothing is lost, so the job still ends well.
        _log.warning("%s: steps stay in memory: %s", local.root, error)
    if removed:
        _log.info("%s: %d steps removed from memory; %s has what `keep` keeps", local.root, removed, remote.root)
