"""The generation of this job: a number that a job takes when it claims a run, and enters when it changes the run."""

import contextlib
from collections.abc import Iterable, Iterator

from ...stores.lease_registry import LeaseLostError
from ...stores.store import Store
from .journal import Claim, Generations, begin_series, read_generations, write_generations


class Generation:
    """The generation of one job in the run at `root`, whose lease the job holds during every call."""

    def __init__(self, store: Store, root: str):
        self._store, self._root = store, root
        self._base = Generations("")  # the generations of the run when this job took its own
        self._is_entered = False

    @contextlib.contextmanager
    def taking(self, claims: Iterable[Claim]) -> Iterator[tuple[Generations, Generations | None]]:
        """Takes the next generation. The disks record their claims within the block.

        claims: those that the disks have recorded. If the file of generations is lost, a new series begins above them.

        Yields the generations of which this job takes the next, and what the file said: None if a series begins.
        """
        found = read_generations(self._store, self._root)
        base = found or begin_series(claims)
        taken = Generations(base.series, base.next + 1, base.written_by)
        if found:  # First: no other job may get this generation.
            write_generations(self._store, self._root, taken)
        yield base, found
        if not found:  # Last: a new series ends the claims of all earlier ones.
            write_generations(self._store, self._root, taken)
        self._base = base

    def enter(self) -> None:
        """Records that this job changes the remote tier. Call it before the first change.

        Raises `LeaseLostError` if another job has taken a generation since this one did.
        """
        if self._is_entered:
            return
        base, found = self._base, read_generations(self._store, self._root)
        if found and (found.series != base.series or found.next > base.next + 1):
            raise LeaseLostError(f"{self._root}: another job has written this run since this one claimed it")
        write_generations(self._store, self._root, Generations(base.series, base.next + 1, base.next))
        self._is_entered = True
