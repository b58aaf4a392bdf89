"""Makes the directory of a run: a single one, or a local tier whose steps are uploaded to a remote tier."""

import os

from ... import stores
from ...keep import Policy
from ..failures import Failures
from ..metrics import LateMetrics
from ..pending_saves import PendingSaves
from ..plain_run import PlainRun
from ..retention import Retention
from ..run_directory import RunDirectory
from ..run_layout import RunLayout
from ..step_catalog import StepCatalog
from .tiered_run import TieredRun


def make_directory(
    root: str,
    local: str | os.PathLike[str] | None,
    *,
    layout: RunLayout,
    tensorboard: str | os.PathLike[str] | None,
    keep: Policy | None,
    upload_limit: float | None,
    failures: Failures,
    pending_saves: PendingSaves,
    timeout: float,
    local_copies: int,
) -> RunDirectory:
    """Returns the directory that a run is saved to. `keep` and `upload_limit` apply only to a remote tier."""
    made: list[TieredRun] = []

    def busy() -> bool:
        # This function must not refer to the `Checkpointer`, nor to the only directory. A cycle would delay the
        # finalizers of a dropped `Checkpointer`: they restore the handler of SIGTERM and release the lease.
        return pending_saves.busy() or any(one.busy for one in made)

    def directory_at(root: str) -> PlainRun:
        return PlainRun(StepCatalog(stores.get(root), root, layout, tensorboard), busy)

    plain = directory_at(root)
    if local is None:
        return plain
    tiered = TieredRun(
        directory_at(stores.absolute(local)), plain, keep, upload_limit, failures.notify, timeout, local_copies
    )
    made.append(tiered)
    return tiered


def late_metrics(directory: RunDirectory, retention: Retention, pending_saves: PendingSaves) -> LateMetrics:
    """Returns the object that applies the policy to late metrics: in the remote tier, or by `retention` without one."""
    if isinstance(directory, TieredRun):
        return LateMetrics(directory.remote, directory.remote_retention, pending_saves, directory.start_upload)
    assert isinstance(directory, PlainRun)
    return LateMetrics(directory, retention, pending_saves, None)
