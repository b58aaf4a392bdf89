"""One checkpoint and its copy in another place."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from ..errors import CorruptError, ExistsError, UnsupportedError
from ..formats.treering import copy, metrics, pins, summary
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
        return summary.known_identity(self.there, self.to) != summary.known_identity(self.here, self.path)

    def check_unpinned(self) -> None:
        """Raises `ExistsError` if what is there is another checkpoint and pinned."""
        if self.differs() and pins.pinned(self.there, self.to):
            raise ExistsError(
                f"{self.to}: is pinned, and another checkpoint than {self.path}, or its manifest is damaged; unpin it "
                "before it is replaced"
            )

    def complete(self) -> None:
        """Adds to the copy the metrics and the pin that it lacks."""
        with contextlib.suppress(FileNotFoundError):  # A job deletes the checkpoint: the copy stays.
            metrics.copy(self.here, self.path, self.there, self.to, summary.identity(self.here, self.path))
            if pins.pinned(self.here, self.path):
                pins.pin(self.there, self.to, True)

    def make(self, moved: Callable[[int], None], *, absent: bool) -> None:
        """Copies the checkpoint, or repairs its copy, or replaces what is there; nothing was if it is `absent`.

        Raises what `formats.treering.copy` raises, what `check_unpinned` raises, and `ExistsError` if another writer
        was first.
        """
        replaced = summary.look(self.there, self.to) is not None
        if replaced and absent:
            raise ExistsError(f"{self.to}: another writer put a checkpoint there meanwhile; it is untouched")
        if replaced and summary.look(self.here, self.path) is None:
            raise CorruptError(f"{self.to}: is damaged or differs, and {self.path} was deleted before it was repaired")
        if replaced and not self.differs():
            copy.repair(self.here, self.path, self.there, self.to, moved=moved)
            self.complete()
            return
        if replaced:
            self.check_unpinned()
        copy.copy(self.here, self.path, self.there, self.to, overwrite=replaced, moved=moved)

    def measure(self, moved: Callable[[int], None]) -> None:
        """Counts what `make` would copy. Raises what `make` raises, as far as that shows without reading arrays."""
        reader = Reader(self.here, self.path)
        reader.check_present()
        is_there = summary.look(self.there, self.to) is not None
        bad = copy.damaged(self.there, self.to) if is_there and not self.differs() else None
        moved(sum(file.size for file in reader.files if bad is None or file.name in bad))
