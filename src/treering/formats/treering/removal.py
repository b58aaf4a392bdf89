"""Removes checkpoints, and the leftovers of killed or replaced saves.

A checkpoint with any part in a later version of the format is never moved, replaced or deleted.
"""

import contextlib
import logging
import posixpath
import time
from collections.abc import Callable, Iterable, Iterator

import xxhash

from ..._threads.pool import in_parallel
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, ExistsError, UnsupportedError
from ...stores import lease_registry
from ...stores.file_io import is_in_use, read_file, remove_unused
from ...stores.read_errors import UnreadableError
from ...stores.store import Store
from ...stores.temporary_names import final_name
from . import manifest, metrics
from .manifest import file_names
from .schema import MANIFEST, OWN_FILES, PIN, token_of

_MAX_PAUSE_SECONDS = 24 * 3600.0  # a save that has been stopped for longer does not continue
_log = logging.getLogger("treering")


def check_removable(store: Store, path: str) -> None:
    """Raises `UnsupportedError` if any part of a checkpoint is in a later version. A damaged checkpoint passes.

    Reads all of the manifest and the headers of the array files. Reads metrics last, because another process may add
    some at any time.
    """
    from . import array_file  # It imports NumPy, which is slow and which listing and marking steps do not need.

    name = posixpath.join(path, MANIFEST)
    try:
        data = read_file(store, name)
        with gc_paused():  # This makes decoding three times as fast.
            found = manifest.decode(data, name)
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return
    manifest.check_known(found, name)
    in_parallel(found.files, lambda file: array_file.check_version(store, posixpath.join(path, file.name), file))
    with contextlib.suppress(UnreadableError):
        for _, late in metrics.read(store, path, manifest.xxh3(data)):
            if isinstance(late, UnsupportedError):
                raise late


def collect_garbage(store: Store, path: str, *, remove_empty: bool = False) -> None:
    """Removes the leftovers of killed or replaced saves in a directory, and with `remove_empty` an empty directory.

    The files of running saves and foreign files stay. An `OSError` is logged, not raised: the next writer tries again.
    In a store without locks, arrays next to a checkpoint also stay for a day. A save that was only stopped could still
    continue and replace the checkpoint by one with these arrays.
    """

    def are_old(name: str) -> bool:
        found = store.stat(posixpath.join(path, name))
        return found is not None and time.time() - found.modified > _MAX_PAUSE_SECONDS

    with logging_errors(path):
        names = store.list(path)
        remove_temporaries(store, path, names)
        if any(OWN_FILES.fullmatch(name) for name in names):
            at_once = store.has_locks or MANIFEST not in names
            _collect_garbage(store, path, (lambda name: True) if at_once else are_old)
        if remove_empty and (found := store.stat(path)) and not found.is_file:  # as Flax writes a step
            left = store.list(path)
            if left == [PIN]:  # The pin of a step that was deleted while another disk had its manifest.
                store.delete(posixpath.join(path, PIN))
            if left in ([], [PIN]):
                store.remove_folder(path)


def is_temporary(name: str) -> bool:
    """Returns True if a killed writer of a single file of a checkpoint may have left a file with this name."""
    place = final_name(name)
    return place in (MANIFEST, PIN) or bool(place and token_of(place))


def remove_temporaries(store: Store, path: str, names: Iterable[str]) -> None:
    """Removes the temporary files, among `names`, that killed writers of single files have left in a directory."""
    for name in names:
        if is_temporary(name):
            remove_unused(store, posixpath.join(path, name))


def revoke_stale_saves(store: Store, path: str) -> list[str]:
    """Removes the temporary manifests of the saves that are taken for dead, so that they can no longer commit.

    Returns the names of their array files. If the manifest is damaged, returns all array files of no running save. The
    caller may remove these files once it has committed another manifest. If one of those saves continues, it cannot
    replace that manifest: it looks at the manifest to replace before it looks for its temporary manifest.
    """
    with logging_errors(path):
        _collect_garbage(store, path, lambda name: False)
        try:
            found = _unnamed_files(store, path)
        except CorruptError:
            found = store.list(path)
        except UnsupportedError:
            return []
        return [name for name in found if (token := token_of(name)) and _temporary_manifest(token) not in found]
    return []


def _unnamed_files(store: Store, path: str) -> list[str]:
    """Returns the files of saves in a directory that belong to no checkpoint.

    A file belongs to one if the manifest here names it.
    """
    names = store.list(path)
    try:
        data = read_file(store, posixpath.join(path, MANIFEST))
        keep, metrics = set(file_names(data)), f"metrics-{xxhash.xxh3_64_hexdigest(data)}-"
    except FileNotFoundError:
        keep, metrics = set(), "/"
    found = [name for name in names if OWN_FILES.fullmatch(name) and name not in keep]
    return [name for name in found if not name.startswith(metrics)]


def _collect_garbage(store: Store, path: str, may_delete: Callable[[str], bool]) -> None:
    """Removes the leftovers in a directory; of the array files, only those for which `may_delete` is True."""
    settled = False
    try:
        found = _unnamed_files(store, path)
        if found:
            check_removable(store, path)
        # Temporary manifests go first: a save without one cannot commit, so its arrays can be removed safely.
        for name in sorted(found, key=lambda name: token_of(name) is not None):
            if (token := token_of(name)) and (not may_delete(name) or _is_in_live_save(store, path, token)):
                continue

            def still_left_over(name: str = name) -> bool:
                nonlocal settled
                if name not in _unnamed_files(store, path):
                    return False
                # The manifest no longer names this file. A power cut must not bring back an older one that does.
                if not settled:
                    store.settle(path)
                    settled = True
                return True

            remove_unused(store, posixpath.join(path, name), still_left_over)
    except (CorruptError, UnsupportedError):
        return  # Without a readable manifest, any file may belong to the checkpoint.


def _temporary_manifest(token: str) -> str:
    """Returns the name of the temporary manifest of the save with this token. A save creates it before its arrays."""
    return f"{MANIFEST}.{token}.tmp"


def _is_in_live_save(store: Store, path: str, token: str) -> bool:
    """Returns True if the save with this token may still commit, because its temporary manifest is locked.

    The lock of an array file alone is not enough: the process that wrote it may have ended while process 0, which
    commits, still runs.
    """
    return is_in_use(store, posixpath.join(path, _temporary_manifest(token)))


@contextlib.contextmanager
def logging_errors(path: str) -> Iterator[None]:
    """Logs an `OSError` of the `with` block instead of raising it."""
    try:
        yield
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def delete(store: Store, path: str) -> None:
    """Removes a checkpoint. Its manifest goes first, so that readers never see half of it."""
    unpublish(store, path)()


def unpublish(
    store: Store, path: str, check: Callable[[], None] = lambda: None, guard: Callable[[], None] | None = None
) -> Callable[[], bool]:
    """Removes the manifest of a checkpoint, which is quick. Returns a function that removes its files, which is slow.

    The returned function returns False if another process has removed the manifest at the same time and the store can
    tell.

    check: called right before the manifest is removed; it may raise.
    guard: called right after that. If it raises, the manifest is published again while all files exist. So two
        processes that each rely on the step that the other removes do not both miss its removal.

    Raises `UnsupportedError` for a checkpoint of a later release, and `LeaseLostError` if another job has acquired the
    lease of the run.
    """
    manifest = posixpath.join(path, MANIFEST)
    check_removable(store, path)
    names, data = member_files(store, path), None
    if guard:
        with contextlib.suppress(FileNotFoundError, CorruptError):
            data = read_file(store, manifest)
    check()
    lease_registry.check(path)  # Another job may have acquired the lease since. Then the checkpoint may be that job's.
    try:
        store.delete(manifest)
        is_ours = True
    except FileNotFoundError:  # Another process deletes the same checkpoint.
        is_ours = False
    try:
        if guard:
            guard()
    except BaseException:
        if data is not None and all(store.stat(posixpath.join(path, name)) for name in names):
            with contextlib.suppress(ExistsError), store.new_file(manifest, overwrite=False) as file:
                file.write(data)
        raise

    def remove_files() -> bool:
        with contextlib.suppress(FileNotFoundError):  # The other process has removed the directory too.
            store.settle(path)  # Otherwise a power cut could bring back the manifest without its files.
        # The manifest is durably removed, so no save names these files any more. But a copy has the same file names
        # and may have committed them again.
        again = set(member_files(store, path))
        store.delete_all(path, [name for name in names if name not in again])
        collect_garbage(store, path, remove_empty=True)
        return is_ours

    return remove_files


def member_files(store: Store, path: str) -> list[str]:
    """Returns the names of the files of a checkpoint: those that the manifest names, and the added metrics.

    Returns [] if the manifest cannot be read. Once that manifest is gone, `collect_garbage` finds the files.
    """
    try:
        data = read_file(store, posixpath.join(path, MANIFEST))
        added = f"metrics-{xxhash.xxh3_64_hexdigest(data)}-"
        return [*file_names(data), *(name for name in store.list(path) if name.startswith(added))]
    except (CorruptError, UnsupportedError, OSError):
        return []
