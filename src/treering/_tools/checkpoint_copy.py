"""One checkpoint and its copy in another place."""

import contextlib
import posixpath
from collections.abc import Callable, Collection
from typing import NamedTuple

from ..errors import CorruptError, ExistsError, MismatchError, UnsupportedError
from ..formats.treering import copy, metrics, pins, summary
from ..formats.treering.ledger import Ledger
from ..formats.treering.read import Reader
from ..stores.store import Store


class CheckpointCopy(NamedTuple):
    """A checkpoint at `path` in the store `source_store`, and its copy, present or future, at `target` in the store
    `target_store`.
    """

    source_store: Store
    path: str
    target_store: Store
    target: str

    def is_same(self, *, thorough: bool) -> bool | None:
        """Returns True if the copy has the same manifest and files of the right size, and None if there is no copy.

        With `thorough`, reads every byte of the copy. If they differ, raises the error of a damaged manifest of the
        checkpoint itself, because that may be the reason.
        """
        if summary.stat_manifest(self.target_store, self.target) is None:
            return None
        try:
            identity = summary.identity(self.source_store, self.path)
        except FileNotFoundError:
            return True  # A job has deleted the checkpoint since it was listed: the copy stays.
        try:
            is_same = identity == summary.identity(self.target_store, self.target)
            if is_same:
                reader = Reader(self.target_store, self.target)
                reader.check_present()
                is_same = not (thorough and any(reader.problems()))
        except (CorruptError, UnsupportedError, FileNotFoundError):
            is_same = False
        if not is_same:
            Reader(self.source_store, self.path)
        return is_same

    def differs(self) -> bool:
        """Returns True if the target has another checkpoint, rather than a damaged copy of this one."""
        return summary.identity_or_none(self.target_store, self.target) != summary.identity_or_none(
            self.source_store, self.path
        )

    def check_unpinned(self) -> None:
        """Raises `ExistsError` if the target has another checkpoint that is pinned."""
        if self.differs() and pins.is_pinned(self.target_store, self.target):
            raise ExistsError(
                f"{self.target}: expected a copy of {self.path}, found a pinned step that is another checkpoint, "
                "or whose "
                "manifest is damaged; unpin it before it is replaced"
            )

    def check_base(self, targets: Collection[str]) -> None:
        """Raises `MismatchError` if the copy would lack its base, unless that is one of the other targets."""
        if base := Reader(self.source_store, self.path).made_from:
            folder = posixpath.dirname(self.target)
            place = posixpath.join(folder, base.name)
            if place not in targets and summary.identity_or_none(self.target_store, place) != base.xxh3:
                raise MismatchError(
                    f"{self.path}: it is stored as the difference to {base.name}, which {folder} does not have; copy "
                    "that too, or convert this one, which writes a complete checkpoint"
                )

    def complete(self) -> None:
        """Adds to the copy the metrics and the pin that it lacks."""
        with contextlib.suppress(FileNotFoundError):  # A job deletes the checkpoint: the copy stays.
            metrics.copy(
                self.source_store,
                self.path,
                self.target_store,
                self.target,
                summary.identity(self.source_store, self.path),
            )
            if pins.is_pinned(self.source_store, self.path):
                pins.pin(self.target_store, self.target, True)

    def make(self, moved: Callable[[int], None], *, absent: bool, ledger: Ledger) -> None:
        """Copies the checkpoint, repairs its copy, or replaces another checkpoint.

        absent: the target was missing. ledger: the files of the checkpoints that were copied before.

        Raises the errors of `formats.treering.copy` and `check_unpinned`, and `ExistsError` if another process wrote
        the target first.
        """
        replaced = summary.stat_manifest(self.target_store, self.target) is not None
        if replaced and absent:
            raise ExistsError(
                f"{self.target}: expected nothing, found a checkpoint that another process wrote meanwhile; it "
                "is unchanged"
            )
        if replaced and summary.stat_manifest(self.source_store, self.path) is None:
            raise CorruptError(f"{self.target}: is damaged or differs, and {self.path} was deleted before the repair")
        if replaced and not self.differs():
            copy.repair(self.source_store, self.path, self.target_store, self.target, on_progress=moved)
            self.complete()
            return
        if replaced:
            self.check_unpinned()
        copy.copy(
            self.source_store, self.path, self.target_store, self.target,
            overwrite=replaced, on_progress=moved, ledger=ledger,
        )  # fmt: skip

    def measure(self, moved: Callable[[int], None]) -> None:
        """Counts the bytes that `make` would copy. Raises its errors, as far as they show without reading arrays."""
        reader = Reader(self.source_store, self.path)
        reader.check_present()
        is_there = summary.stat_manifest(self.target_store, self.target) is not None
        bad = copy.damaged_files(self.target_store, self.target) if is_there and not self.differs() else None
        moved(sum(file.size for file in reader.files if bad is None or file.name in bad))
