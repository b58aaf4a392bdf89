"""`Publisher`: sends the weights of a trainer as a stream of versions."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from .._core.entries import step_number
from .._core.tracebacks import hide_internal_frames_of_methods
from .._run.checkpointer import Checkpointer
from .._run.pending_saves import OnError
from .._save.pending import PendingSave, SaveReport
from ..errors import MismatchError
from ..keep import Policy
from .encoder import Encoder

if TYPE_CHECKING:
    from ..rules import Rule

_MAX_FULL_EVERY = 1000  # A reader opens all versions back to the last complete one.


@hide_internal_frames_of_methods
class Publisher:
    """Publishes weights for workers that follow them with `treering.follow_weights`. Used as a context manager.

    >>> with tr.Publisher("gs://bucket/policy", keep=tr.keep.last(2)) as publisher:
    ...     publisher.publish(version, params)

    A stream is a run whose steps are the versions, so `treering.open`, `verify`, `diff`, `convert` and the command line
    read each of them. A version stores of each array only what has changed since the version before, if few elements
    have; every `full_every` versions it stores all. Needs the extra `publish`.

    stream: a directory, or a place in a bucket.
    full_every: from 1, which stores every version completely, to 1000.
    keep: the versions to keep, as for `Checkpointer`. Versions that those are made from stay, too.
    rules, dtype: change the leaves before they are published; see `treering.save`.
    metadata, on_save, on_error, timeout: as for `Checkpointer`.

    One `Publisher` at a time writes a stream. One that starts again continues it. With several processes, all make the
    same calls, and each writes what has changed in its part. Versions that one process must write for all are complete,
    which is logged: those of rules for which a process needs parts of its peers.
    """

    def __init__(
        self,
        stream: str | os.PathLike[str],
        *,
        full_every: int = 100,
        keep: Policy | None = None,
        rules: "Sequence[Rule]" = (),
        dtype: Any = None,
        metadata: Any = None,
        on_save: Callable[[SaveReport], object] | None = None,
        on_error: OnError = "raise",
        timeout: float = 30,
    ):
        if isinstance(full_every, bool) or not isinstance(full_every, int) or not 1 <= full_every <= _MAX_FULL_EVERY:
            raise MismatchError(f"full_every={full_every!r}: expected an integer from 1 to {_MAX_FULL_EVERY}")
        self._rules, self._dtype = rules, dtype
        self._run = Checkpointer(
            stream, keep=keep, metadata=metadata, timeout=timeout, on_save=on_save, on_error=on_error,
            reuse_unchanged=False,
        )  # fmt: skip
        self._run._saver.reuse = Encoder(self._run.directory, full_every).of_save
        self._newest: int | None = None
        self._pending: PendingSave | None = None
        self._has_looked = False

    @property
    def stream(self) -> str:
        """The absolute path of the stream."""
        return self._run.directory

    def publish(self, version: int, tree: Any, *, metrics: Mapping[str, Any] | None = None) -> PendingSave | None:
        """Publishes a tree as a version, in the background. The caller may change or donate its arrays afterwards.

        Waits for the version before. Returns None only with `on_error` and a call that fails at once.

        Raises `MismatchError` for a version that is not later than the newest one, or a tree with other leaves, shapes
        or dtypes than that has; `ExistsError` if another program publishes the stream; and the error of a version that
        failed in the background, after which the next one is published completely if it has to be.
        """
        version = step_number(version)
        if not self._has_looked or (self._pending and self._pending.failed):
            self._newest, self._has_looked = self._run.latest_step, True
        if self._newest is not None and version <= self._newest:
            raise MismatchError(
                f"{self.stream}: version {version}: expected a later one than {self._newest}, which is published"
            )
        pending = self._run.save(version, tree, metrics=metrics, force=True, rules=self._rules, dtype=self._dtype)
        if pending is not None:
            self._newest, self._pending = version, pending
        return pending

    def wait(self) -> None:
        """Waits until every version is published. Raises the error of one that failed."""
        self._run.wait()

    def finish(self) -> None:
        """Closes the publisher, and marks the stream as finished: those that follow it end after the last version."""
        self._run.finish()

    def close(self) -> None:
        """Waits for the last version, and lets another publisher continue the stream."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._run.__exit__(*error)

    def __repr__(self) -> str:
        return f"<Publisher {self.stream}>"
