"""One checkpoint and its copy in another place."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from ..errors import CorruptError, ExistsError, UnsupportedError
from ..formats.treering import copy, metrics, pins, removal, summary
from ..formats.treering.read import Reader
from ..stores.store import Store


class OneCopy(NamedTuple):
    """A checkpoint at `path` in the store `here`, and where its copy is or will be: `to` in the store `there`."""

    here: Store
    path: str
    there: Store
    to: str

    def is_same(self, *, thorough: bool) -> bool | None:
        """Returns whether the copy has the same manifest, and files of the right size; None if there is no copy.

        With `thorough`, every byte of the copy is read. Raises what reading the checkpoint's manifest raises if that
        may be why they differ.
        """
        if summary.look(self.there, self.to) is None:
            return None
        try:
            identity = summary.identity(self.here, self.path)
        except FileNotFoundError:
            return True  # A job has deleted it since it was listed: the copy stays.
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
        """Whether what is there is another checkpoint, rather than a damaged copy of this one."""
        return identity(self.there, self.to) != identity(self.here, self.path)

    def complete(self) -> None:
        """Adds to the copy the metrics and the pin that it lacks."""
        with contextlib.suppress(FileNotFoundError):  # A job deletes the checkpoint: the copy stays.
            metrics.copy(self.here, self.path, self.there, self.to, summary.identity(self.here, self.path))
            if pins.pinned(self.here, self.path):
                pins.pin(self.there, self.to, True)

    def make(self, moved: Callable[[int], None], *, absent: bool) -> None:
        """Copies the checkpoint, in the place of another or of a damaged copy, unless nothing was there (`absent`).

        Raises what `formats.treering.copy` raises, and `ExistsError` if another writer was first.
        """
        replaced = summary.look(self.there, self.to) is not None
        if replaced and absent:
            raise ExistsError(f"{self.to}: another writer put a checkpoint there meanwhile; it is untouched")
        if replaced and identity(self.there, self.to) == identity(self.here, self.path):
            # Its files have the names of the new copy's: it is deleted first, unless it may be the better one.
            if problem := next(Reader(self.here, self.path).problems(), None):
                raise CorruptError(str(problem))
            removal.delete(self.there, self.to)
            replaced = False
        copy.copy(self.here, self.path, self.there, self.to, overwrite=replaced, moved=moved)

    def measure(self, moved: Callable[[int], None]) -> None:
        """Counts what `make` would copy. Raises what `make` raises, as far as that shows without reading arrays."""
        reader = Reader(self.here, self.path)
        reader.check_present()
        moved(sum(file.size for file in reader.files))


def identity(store: Store, path: str) -> str | None:
    """What tells a checkpoint from others, or None where there is none that can be read."""
    try:
        return summary.identity(store, path)
    except (CorruptError, FileNotFoundError):
        return None
