"""The commit of a checkpoint: array files first, all durable, then the manifest in one step, then tidying up.

A directory is a checkpoint when it holds the manifest. Array files are written under names that no other
save uses; the manifest is put in place last. A writer holds the lock of each of its files until its commit
is over, so a process that gets a file's lock and then finds it in no manifest knows that it is left over.
"""

import contextlib
import logging
import os
import posixpath
from collections.abc import Callable

from ...errors import ExistsError, SaveError
from ...stores.claims import TakenOverError
from ...stores.store import ABSENT, Store
from .new_files import CREATE_ATTEMPTS, Files, Outcome, write_whole
from .removal import check_removable, consists_of, disown, logged, remove_leftovers
from .schema import MANIFEST, OWN_FILES

_log = logging.getLogger("treering")


def check_free(store: Store, path: str, *, overwrite: bool) -> list[str]:
    """The names that are at a path already. Raises `ExistsError` when a save there would touch what it must not."""
    found = store.stat(path)
    if found is None and not store.has_folders:
        return []
    if found is None:
        parent = os.path.dirname(path)
        while (above := store.stat(parent)) is None and parent != os.path.dirname(parent):
            parent = os.path.dirname(parent)
        if above is not None and not above.is_folder:
            raise ExistsError(f"{path}: expected to create a directory, but {parent} is a file; choose another path")
        return []
    if not found.is_folder:
        raise ExistsError(f"{path}: expected a free path, found a file; choose another path or remove it")
    names = store.list(path)
    if MANIFEST in names:
        if not overwrite:
            raise ExistsError(f"{path}: expected a free path, found a checkpoint; pass overwrite=True to replace it")
        return names
    if other := [name for name in names if not OWN_FILES.fullmatch(name)]:
        shown = ", ".join(other[:3]) + (", …" if len(other) > 3 else "")
        raise ExistsError(f"{path}: expected a free path, found a directory with {shown}; choose a path below it")
    return names


class Transaction(Files):
    """One save into one directory: invisible to readers until `commit`, gone without a trace after `abort`.

    Process 0 makes the temporary manifest first: it shows the others that they write to the same file system.
    `token` is that of the files' names, a new one by default. With `retracts` a commit is taken back that another job
    may have taken for dead meanwhile.
    """

    retracts = True

    def __init__(self, store: Store, path: str, *, overwrite: bool, token: str = ""):
        with store.glance(path):
            names = check_free(store, path, overwrite=overwrite)
        if overwrite:
            check_removable(store, path)
        super().__init__(store, path, token or os.urandom(3).hex())
        self._overwrite = overwrite
        self._manifest = posixpath.join(path, MANIFEST)
        self._disowned: list[str] = []
        if any(OWN_FILES.fullmatch(name) for name in names):
            self._make_room()
        name = f"{MANIFEST}.{self.token}.tmp"
        self._temporary = posixpath.join(path, name)
        try:
            for attempt in range(CREATE_ATTEMPTS):
                try:
                    self._make_dir()
                    self.create(name, visible=True)
                    break
                except FileNotFoundError:  # another process removed the empty directory as a leftover
                    if attempt == CREATE_ATTEMPTS - 1:
                        raise
        except BaseException:
            self.abort()
            raise

    def commit(self, manifest: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Publishes the save, unless `check` raises just before. Raises `ExistsError` when another save was first."""
        self.store.settle(os.path.dirname(self.path))
        write_whole(self._open[self._temporary], manifest)
        self.store.settle(self.path)  # the array files' names come before the manifest that needs them
        for path, sink in self._open.items():
            if not sink.is_at(path):
                why = "do locks work here?" if self.store.has_locks else "did this job stand still for long?"
                raise SaveError(f"{path}: removed by another program while the save was under way; {why}")
        check()
        found = self.store.stat(self._manifest) if self._overwrite else None
        replaced = consists_of(self.store, self.path) if found else []
        self.outcome = None
        try:
            self._open[self._temporary].publish(
                self._manifest,
                overwrite=self._overwrite,
                version=found.version if found else ABSENT,
                retract=self.retracts,
            )
        except TakenOverError:
            if (found := self._look()) is not Outcome.ABORTED:
                self.outcome = found
            raise
        except OSError as error:
            found = self._look()  # the manifest may be in place in spite of the error, over a network
            if found is Outcome.IN_DOUBT:  # the files of both checkpoints are kept
                self.outcome = found
                raise SaveError(
                    f"{self.path}: it cannot be known whether the new checkpoint is in place, for neither putting it "
                    f"there nor looking was answered ({error}); "
                    + ("the old one or the new one is, whole" if self._overwrite else "it is, whole, or nothing is")
                ) from error
            if found is Outcome.ABORTED:
                if not isinstance(error, FileExistsError):
                    raise
                raise ExistsError(
                    f"{self.path}: another writer put a checkpoint there first; it is untouched"
                ) from None
        try:
            self.store.settle(self.path)
        except OSError as error:
            if not self._overwrite and self._roll_back() is Outcome.ABORTED:
                raise
            self.outcome = Outcome.COMMITTED
            raise SaveError(
                f"{self.path}: the new checkpoint is in place, but the disk failed to make that durable ({error}); "
                f"after a power cut it may be {'the old one again' if self._overwrite else 'gone'}"
            ) from error
        self.outcome = Outcome.COMMITTED
        with logged(self.path):
            if not self._overwrite:
                with contextlib.suppress(FileNotFoundError):  # gone already where a link had to be a rename
                    self.store.delete(self._temporary)
        self.close()
        if self._overwrite:
            with logged(self.path):  # the files of the replaced checkpoint, without locks: no save has them
                self.store.delete_all(self.path, replaced)
            if self.store.has_locks:
                remove_leftovers(self.store, self.path)
        with logged(self.path):
            self.store.delete_all(self.path, self._disowned)

    def abort(self) -> None:
        """Removes everything this save wrote, unless it is committed, or in place and cannot be taken back."""
        if self.outcome is None:
            self.outcome = self._roll_back()
        if self.outcome is Outcome.ABORTED:
            super().abort()
        else:
            self.close()

    def _roll_back(self) -> Outcome:
        """Removes the manifest of this save if it is in place and has replaced none. Returns the outcome."""
        found = self._look()
        if found is not Outcome.COMMITTED or self._overwrite:
            return found
        try:
            self.store.delete(self._manifest)  # it is not durable yet
            self.store.settle(self.path)
        except OSError:
            return self._look()
        return Outcome.ABORTED

    def _look(self) -> Outcome:
        """Returns the outcome by what is in place: the manifest of this save or not, or the store does not say."""
        sink = self._open.get(self._temporary)
        with contextlib.suppress(OSError):
            return Outcome.COMMITTED if sink is not None and sink.is_at(self._manifest) else Outcome.ABORTED
        return Outcome.IN_DOUBT

    def _make_room(self) -> None:
        """Removes what killed saves have left.

        Without locks a save that was only stopped counts as dead, too, and may go on. It must not commit arrays that
        are gone: they go when a commit of this save is in the way of its own.
        """
        if self.store.has_locks:
            remove_leftovers(self.store, self.path)
        else:
            self._disowned = disown(self.store, self.path)

    def _make_dir(self) -> None:
        """Makes the directory. The commit makes its name durable; the names of those above it are durable before."""
        if self.store.has_folders and self.store.stat(self.path) is None:
            self.store.make_folders(os.path.dirname(self.path), self.made)
            with contextlib.suppress(FileExistsError):
                self.store.make_folder(self.path)
                self.made.append(self.path)
