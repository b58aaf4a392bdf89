"""Copies of checkpoints in other places: the same files, and the same manifest byte for byte."""

import contextlib
import posixpath
from collections.abc import Callable

from ...stores.claims import TakenOverError
from ...stores.store import Store
from ...stores.whole_files import read_file
from . import metrics, pins
from .commit import Transaction
from .manifest import file_names
from .read import Reader


def copy(
    source: Store,
    path: str,
    target: Store,
    to: str,
    *,
    overwrite: bool = False,
    moved: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Copies a checkpoint, verified as it is read, with its pin and the metrics that were added to it.

    Returns its identity.

    moved: told the bytes of every part before it is written; what it raises ends the copy. Nothing is left of it, but
        in a store without locks arrays, which the next copy or save there removes.

    Raises `CorruptError` for a damaged one, `UnsupportedError` for one of a later release, `ReplacedError` for one that
    is deleted meanwhile, and what a save raises.
    """
    reader = Reader(source, path)
    reader.check_present()
    reader.hold()
    # Others see that the writer of these files lives by the token in their names: see `remove_leftovers`.
    token = reader.files[0].name.split("-")[1] if reader.files else ""
    files = _Copy(target, to, overwrite=overwrite, token=token)
    try:
        for number, listed in enumerate(reader.files):
            sink = files.create(listed.name, expected=listed.size)
            for offset, buffer in reader.contents(number):
                moved(min(len(buffer), listed.size - offset))
                sink.write(buffer, offset)
            sink.finish(listed.size, read_only=True)
        files.commit(reader.manifest_bytes)
    except BaseException:
        files.abort()
        raise
    metrics.copy(source, path, target, to, reader.identity)
    if pins.pinned(source, path):
        pins.pin(target, to, True)
    return reader.identity


class _Copy(Transaction):
    """A save whose files and manifest are those of another copy of the same checkpoint, by name and byte for byte.

    In a store without locks the other job may have been taken for dead, and so may this one: what it would remove may
    be what the other has committed. While the temporary manifest is there, of which there is one for all, no other
    copy writes.
    """

    def __init__(self, store: Store, path: str, *, overwrite: bool, token: str):
        super().__init__(store, path, overwrite=overwrite, token=token)
        self.retracts = store.has_locks
        if names := [name for name in self._disowned if self._is_own(name)]:  # what an interrupted copy has left
            self._disowned = [name for name in self._disowned if name not in names]
            try:
                self._remove_own()
            except BaseException:
                self.abort()
                raise

    def commit(self, manifest: bytes, check: Callable[[], None] = lambda: None) -> None:
        """As every save does it. When another job has removed arrays meanwhile, the manifest goes, too."""
        try:
            super().commit(manifest, check)
        except TakenOverError:
            with contextlib.suppress(OSError):
                arrays = [path for path in self._open if self._is_own(posixpath.basename(path))]
                if self._in_place() and any(self.store.stat(path) is None for path in arrays):
                    self.store.delete(self._manifest)
            raise

    def abort(self) -> None:
        """Ends it. Without locks what it wrote stays for the next copy or save to remove: it may be another's."""
        if not self.store.has_locks and not self.committed:
            if self._temporary in self._open:
                with contextlib.suppress(OSError):
                    self.store.delete(self._temporary)
            self.committed = True  # as far as anybody knows
        super().abort()

    def _remove_own(self) -> None:
        """Removes the files of these names unless they are committed. Raises `OSError` where that is not known."""
        try:
            committed = file_names(read_file(self.store, self._manifest))
        except FileNotFoundError:
            committed = []
        names = [name for name in self.store.list(self.path) if self._is_own(name) and name not in committed]
        self.store.delete_all(self.path, names)

    def _is_own(self, name: str) -> bool:
        return name.startswith(f"arrays-{self.token}-")
