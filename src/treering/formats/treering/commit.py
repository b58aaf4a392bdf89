"""Commits a checkpoint: all array files are durable first, then the manifest is put in place in one step.

A directory is a checkpoint if it holds the manifest. The names of array files are unique to a save. Only copies of a
checkpoint use the names of the original, for files with the same bytes. A writer holds the locks of its files until its
commit is over; in a store without locks it renews an object instead. So a file is a leftover if no manifest lists it
and its writer is gone.
"""

import contextlib
import logging
import os
import posixpath
from collections.abc import Callable, Sequence

from ...errors import ExistsError, SaveError
from ...stores.lease_registry import LeaseLostError
from ...stores.store import ABSENT, Store
from .removal import check_removable, collect_garbage, is_temporary, logging_errors, member_files, revoke_stale_saves
from .save_files import CREATE_ATTEMPTS, LOCK_ADVICE, Outcome, Retry, SaveFiles, run_once, write_small_file
from .schema import MANIFEST, OWN_FILES

_log = logging.getLogger("treering")


def check_free(store: Store, path: str, *, overwrite: bool) -> list[str] | None:
    """Returns the names in the directory at a path, None if it is missing.

    Raises `ExistsError` if a save may not write there.
    """
    if (found := store.stat(path)) is None:
        if not store.has_folders:
            return None
        parent = os.path.dirname(path)
        while (above := store.stat(parent)) is None and parent != os.path.dirname(parent):
            parent = os.path.dirname(parent)
        if above is not None and above.kind != "folder":
            raise ExistsError(f"{path}: expected to create a directory, but {parent} is a file; choose another path")
        return None
    if found.kind != "folder":
        raise ExistsError(f"{path}: expected a free path, found a file; choose another path or remove it")
    names = store.list(path)
    if MANIFEST in names:
        if not overwrite:
            raise ExistsError(f"{path}: expected a free path, found a checkpoint; pass overwrite=True to replace it")
        return names
    if other := [name for name in names if not (OWN_FILES.fullmatch(name) or is_temporary(name))]:
        shown = ", ".join(other[:3]) + (", …" if len(other) > 3 else "")
        raise ExistsError(f"{path}: expected a free path, found a directory with {shown}; choose a path below it")
    return names


class Transaction(SaveFiles):
    """One save into one directory: readers do not see it before `commit`, and `abort` removes all of it.

    Process 0 makes the temporary manifest first. Its peers look for it to check that they see the same file system.
    `token` is the unique part of the file names, a new one by default.

    rolls_back: True if the new manifest is removed when the lease was lost during the commit, because another job may
        have removed files of this save. False for copies in a store without locks: there the manifest may be that of
        another job's copy, which has the same bytes.
    """

    rolls_back = True

    def __init__(self, store: Store, path: str, *, overwrite: bool, token: str = "", retry: Retry = run_once):
        with store.glance(path):
            names = check_free(store, path, overwrite=overwrite)
        if overwrite:
            check_removable(store, path)
        super().__init__(store, path, token or os.urandom(3).hex(), retry=retry)
        self._overwrite = overwrite
        self._manifest = posixpath.join(path, MANIFEST)
        self._orphans: list[str] = []
        if names and any(OWN_FILES.fullmatch(name) for name in names):
            self._remove_stale()
        name = f"{MANIFEST}.{self.token}.tmp"
        self._temporary = posixpath.join(path, name)
        try:
            for attempt in range(CREATE_ATTEMPTS):
                try:
                    if names is None or attempt:
                        retry(path, 0, self._make_dir)
                    self._new_manifest = self.create(name, visible=True)
                    break
                except FileNotFoundError:  # Another process removed the empty directory as a leftover.
                    if attempt == CREATE_ATTEMPTS - 1:
                        raise
        except BaseException:
            self.abort()
            raise

    def commit(self, manifest: bytes, check: Callable[[], None] | None = None) -> None:
        """Puts the manifest in place, unless `check` raises just before. Then removes what it replaced.

        Raises `ExistsError` if another save committed first, and `SaveError` if the commit is in doubt, is not durable,
        or if another program removed files of this save.
        """
        self.store.settle(os.path.dirname(self.path))
        write_small_file(self._new_manifest, manifest)
        self.store.settle(self.path)  # The names of the array files must be durable before a manifest lists them.
        for path, sink in self._sinks.items():
            if not sink.is_at(path):
                why = LOCK_ADVICE if self.store.has_locks else "this job may have stood still for too long; save again"
                raise SaveError(f"{path}: removed by another program while the save was under way; {why}")
        if check:
            check()
        old = self.store.stat(self._manifest) if self._overwrite else None
        replaced = member_files(self.store, self.path) if old else []
        self.outcome = None  # From here on, an interrupt may leave the manifest in place; `abort` finds out.
        try:
            self._sinks[self._temporary].publish(
                self._manifest, overwrite=self._overwrite, version=old.version if old else ABSENT
            )
        except LeaseLostError:
            self.outcome = self._roll_back() if self.rolls_back else self._look()
            raise
        except OSError as error:
            # Over a network, the manifest may be in place in spite of the error. Then the commit continues below.
            outcome = self._look()
            if outcome is Outcome.IN_DOUBT:  # The files of both checkpoints stay, because either may be valid.
                self.outcome = outcome
                raise self._in_doubt(error) from error
            if outcome is Outcome.ABORTED:
                if not isinstance(error, FileExistsError):
                    raise
                raise ExistsError(
                    f"{self.path}: another writer put a checkpoint there first; it is untouched"
                ) from None
        try:
            self.store.settle(self.path)
        except OSError as error:
            # Overwriting destroyed the old manifest, so rolling that back would leave no checkpoint.
            if not self._overwrite and self._roll_back() is Outcome.ABORTED:
                raise
            self.outcome = Outcome.COMMITTED
            raise SaveError(
                f"{self.path}: the new checkpoint is in place, but the disk failed to make that durable ({error}); "
                f"after a power cut it may be {'the old one again' if self._overwrite else 'gone'}"
            ) from error
        self.outcome = Outcome.COMMITTED
        self._tidy_up(replaced)

    def _in_doubt(self, error: OSError) -> SaveError:
        which = (
            "either the new or the old checkpoint is in place, and it is complete"
            if self._overwrite
            else "the new checkpoint may be in place; if it is, it is complete"
        )
        return SaveError(f"{self.path}: commit not confirmed ({error}); {which}; open it to find out")

    def _tidy_up(self, replaced: Sequence[str]) -> None:
        """Removes what the new manifest does not need, and closes the files. Errors are logged: the save is over."""
        store, path = self.store, self.path
        if not self._overwrite:
            # Without links, it was renamed to the manifest.
            with logging_errors(path), contextlib.suppress(FileNotFoundError):
                store.delete(self._temporary)
        self.close()
        if self._overwrite:
            with logging_errors(path):  # Files of the replaced checkpoint need no locks: no save writes them.
                store.delete_all(path, replaced)
            if store.has_locks:
                collect_garbage(store, path)
        if self._orphans:
            with logging_errors(path):
                store.delete_all(path, self._orphans)

    def abort(self) -> None:
        """Removes everything that this save wrote, unless it is committed, in doubt, or cannot be rolled back."""
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
            self.store.delete(self._manifest)  # No caller was promised this checkpoint: it is not durable yet.
            self.store.settle(self.path)
        except OSError:
            return self._look()
        return Outcome.ABORTED

    def _look(self) -> Outcome:
        """Returns `COMMITTED` if the manifest of this save is in place, and `IN_DOUBT` if the store does not answer."""
        sink = self._sinks.get(self._temporary)
        with contextlib.suppress(OSError):
            return Outcome.COMMITTED if sink is not None and sink.is_at(self._manifest) else Outcome.ABORTED
        return Outcome.IN_DOUBT

    def _remove_stale(self) -> None:
        """Removes the files that killed saves have left.

        In a store without locks, a save that looks killed may only be suspended, right before it puts its manifest in
        place. That fails once this save has committed. So its array files are removed only then: no manifest must list
        files that are gone.
        """
        if self.store.has_locks:
            collect_garbage(self.store, self.path)
        else:
            self._orphans = revoke_stale_saves(self.store, self.path)

    def _make_dir(self) -> None:
        """Makes the directory. Its parents are durable when this returns; the commit makes its own name durable."""
        if self.store.has_folders:
            self.store.make_folders(os.path.dirname(self.path), self.made)
            with contextlib.suppress(FileExistsError):
                self.store.make_folder(self.path)
                self.made.append(self.path)
