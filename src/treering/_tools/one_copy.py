"""One checkpoint and its copy in another place."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from ..errors import CorruptError, ExistsError, UnsupportedError
from ..formats.treering import copy, metrics, pins, summary
from ..formats.treering.read import Reader
from ..stores.store import Store


class OneCopy(NamedTuple):
    """A checkpoint at `path` in the store `here`, and its copy, present or future, at `to` in the store `there`."""

    here: Store
    path: str
    there: Store
    to: str

    def is_same(self, *, thorough: bool) -> bool | None:
        """Returns True if the copy has the same manifest and files of the right size, and None if there is no copy.

        With `thorough`, reads every byte of the copy. If they differ, raises the error of a damaged manifest of the
        checkpoint itself, because that may be the reason.
        """
        if summary.look(self.there, self.to) is None:
            return None
        try:
            identity = summary.identity(self.here, self.path)
        except FileNotFoundError:
            return True  # A job has deleted the checkpoint since it was listed: the copy stays.
        try:
            is_same = identity == summary.identity(self.there, self.to)
            if is_same:
                reader = Reader(self.there, self.to)
                reader.check_present()
                is_same = not (thorough and any(reader.problems()))
        except (CorruptError, UnsupportedError, FileNotFoundError):
            is_same = False
        if not is_same:
            Reader(self.here, self.path)
        return is_same

    def differs(self) -> bool:
        """Returns True if the target has another checkpoint, rather than a damaged copy of this one."""
        return summary.known_identity(self.there, self.to) != summary.known_identity(self.here, self.path)

    def check_unpinned(self) -> None:
        """Raises `ExistsError` if the target has another checkpoint that is pinned."""
        if self.differs() and pins.pinned(self.there, self.to):
            raise ExistsError(
                f"{self.to}: expected a copy of {self.path}, found a pinned step that is another checkpoint, or whose "
                "manifest is damaged; unpin it before it is replaced"
            )

    def complete(self) -> None:
        """Adds to the copy the metrics and the pin that it lacks."""
        with contextlib.suppress(FileNotFoundError):  # A job deletes the checkpoint: the copy stays.
            metrics.copy(self.here, self.path, self.there, self.to, summary.identity(self.here, self.path))
            if pins.pinned(self.here, self.path):
                pins.pin(self.there, self.to, True)

    def make(self, moved: Callable[[int], None], *, absent: bool) -> None:
        """Copies the checkpoint, repairs its copy, or replaces another checkpoint. `absent`: the target was missing.

        Raises the errors of `formats.treering.copy` and `check_unpinned`, and `ExistsError` if another process wrote
        the target first.
        """
        replaced = summary.look(self.there, self.to) is not None
        if replaced and absent:
            raise ExistsError(
                f"{self.to}: expected nothing, found a checkpoint that another process wrote meanwhile; it is unchanged"
            )
        if replaced and summary.look(self.here, self.path) is None:
            raise CorruptError(f"{self.to}: is damaged or differs, and {self.path} was deleted before the repair")
        if replaced and not self.differs():
            copy.repair(self.here, self.path, self.there, self.to, moved=moved)
            self.complete()
            return
        if replaced:
            self.check_unpinned()
        copy.copy(self.here, self.path, self.there, self.to, overwrite=replaced, moved=moved)

    def measure(self, moved: Callable[[int], None]) -> None:
        """Counts the bytes that `make` would copy. Raises its errors, as far as they show without reading arrays."""
        reader = Reader(self.here, self.path)
        reader.check_present()
        is_there = summary.look(self.there, self.to) is not None
        bad = copy.damaged(self.there, self.to) if is_there and not self.differs() else None
        moved(sum(file.size for file in reader.files if bad is None or file.name in bad))
