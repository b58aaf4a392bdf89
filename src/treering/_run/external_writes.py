"""Checks and locks for writing into a run from outside its job, such as copies, moves and conversions."""

import contextlib
import posixpath
from collections.abc import Iterator

from ..stores.store import LOCK_NAME, Store
from . import run_layout
from .new_run import parent
from .plain_run import PlainRun
from .step_catalog import StepCatalog
from .tiers.journal import check_not_local


def enclosing_run(store: Store, path: str) -> str | None:
    """Returns the run of which a checkpoint at a path would be a step, if a job writes that run or may do so.

    A job keeps its lock in the run while it writes, and its marks in the run and in its `local=` directory. In every
    format the name of a step ends in a digit, so any other name is no step and needs no check.
    """
    root = parent(path)
    if root is None or not path[-1].isdecimal():
        return None
    marks = (posixpath.join(root, name) for name in (LOCK_NAME, run_layout.JOURNAL, run_layout.GENERATIONS))
    return root if any(store.stat(mark) is not None for mark in marks) else None


def check_no_writer(store: Store, root: str) -> None:
    """Checks that a run may be written from outside. Acquires no lease.

    Raises `MismatchError` for a `local=` directory, and an `ExistsError` that names the other process that writes the
    run. In a bucket no process is known; `locked_run` finds them.
    """
    check_not_local(store, root)
    store.lease(root).check_free()


@contextlib.contextmanager
def locked_run(store: Store, root: str, prefix: str = run_layout.DEFAULT_PREFIX, *, replaces: bool) -> Iterator[None]:
    """Holds the lease of a run within a `with` block, as its job does. Raises what `check_no_writer` raises.

    replaces: True if a step of the run is replaced. Jobs then ignore their local copies of it, because they would
        upload the old step again. Adding steps leaves the local tiers valid.
    """
    check_not_local(store, root)
    directory = PlainRun(StepCatalog(store, root, run_layout.RunLayout(prefix)), lambda: True)
    try:
        if replaces:
            directory.acquire_run()
        else:
            directory.acquire()
        yield
    finally:
        directory.release()
