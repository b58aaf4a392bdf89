"""Makes the directory of a run: a single one, or a local tier whose steps are uploaded to a remote tier."""

import os

from .. import stores
from ..keep import Policy
from .directory import Directory
from .failures import Failures
from .late_metrics import LateMetrics
from .retention import Retention
from .saves_under_way import UnderWay
from .steps import Steps
from .two_places import TwoPlaces


def make_directory(
    root: str,
    local: str | os.PathLike[str] | None,
    *,
    prefix: str,
    tensorboard: str | os.PathLike[str] | None,
    keep: Policy | None,
    upload_limit: float | None,
    failures: Failures,
    under_way: UnderWay,
    timeout: float,
) -> Directory | TwoPlaces:
    """Returns the directory that a run is saved to. `keep` and `upload_limit` apply only to a remote tier."""
    made: list[Directory | TwoPlaces] = []

    def busy() -> bool:
        # This function must not refer to the `Checkpointer`. A cycle would delay its finalizer, which restores the
        # handler of SIGTERM.
        return under_way.busy() or any(one.busy for one in made)

    def directory_at(root: str) -> Directory:
        return Directory(Steps(stores.of(root), root, prefix, tensorboard), busy)

    directory: Directory | TwoPlaces = directory_at(root)
    if local is not None:
        near = directory_at(stores.absolute(local))
        directory = TwoPlaces(near, directory, keep, upload_limit, failures.tell, timeout)
    made.append(directory)
    return directory


def late_metrics(directory: Directory | TwoPlaces, retention: Retention, under_way: UnderWay) -> LateMetrics:
    """Returns the object that applies the policy to late metrics: in the remote tier, or by `retention` without one."""
    if isinstance(directory, TwoPlaces):
        return LateMetrics(directory.far, directory.far_retention, under_way, directory.begin_copying)
    return LateMetrics(directory, retention, under_way, None)
