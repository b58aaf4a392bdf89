"""Removing checkpoints, and the leftovers of killed or replaced saves.

A checkpoint of which any part is of a later version of the format is never moved, replaced or deleted.
"""

import contextlib
import logging
import posixpath
import time
from collections.abc import Callable, Iterable, Iterator

import xxhash

from ..._threads.pool import in_parallel
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsupportedError
from ...stores import claims
from ...stores.nfs import warn_of_no_locks
from ...stores.read_errors import UnreadableError
from ...stores.store import Store
from ...stores.temporary_names import place_of
from ...stores.whole_files import read_file
from . import manifest, metrics
from .manifest import file_names
from .schema import MANIFEST, OWN_FILES, PIN, identity_of, token_of

_STOPPED_SECONDS = 24 * 3600.0  # for longer, nobody stops a save and has it go on
_log = logging.getLogger("treering")


def check_removable(store: Store, path: str) -> None:
    """Raises `UnsupportedError` when a checkpoint, or a part of it, is of a later version; a damaged one passes.

    The manifest is decoded as a whole, and of the array files the headers are read. Metrics are read last, for they
    may be added at any time.
    """
    from . import array_header  # with NumPy, which who marks or lists steps need not wait for

    name = posixpath.join(path, MANIFEST)
    try:
        data = read_file(store, name)
        with gc_paused():  # three times as fast
            found = manifest.decode(data, name)
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return
    manifest.check_known(found, name)
    in_parallel(found.files, lambda file: array_header.check_version(store, posixpath.join(path, file.name), file))
    with contextlib.suppress(UnreadableError):
        for _, late in metrics.read(store, path, manifest.xxh3(data)):
            if isinstance(late, UnsupportedError):
                raise late


def remove_leftovers(store: Store, path: str, *, remove_empty: bool = False) -> None:
    """Removes the leftovers of crashed or replaced saves in a directory; with `remove_empty` also the empty directory.

    The files of living writers stay, and so do foreign ones. Errors of the system are logged, not raised: the next
    writer tries again. Beside a checkpoint in a store without locks arrays stay for a day as well: a save that was only
    stopped could still put them in its place.
    """

    def are_old(name: str) -> bool:
        found = store.stat(posixpath.join(path, name))
        return found is not None and time.time() - found.modified > _STOPPED_SECONDS

    with logged(path):
        names = store.list(path)
        remove_temporaries(store, path, names)
        if any(OWN_FILES.fullmatch(name) for name in names):
            at_once = store.has_locks or MANIFEST not in names
            _remove_leftovers(store, path, (lambda name: True) if at_once else are_old)
        if remove_empty and store.stat(path):
            left = store.list(path)
            if left == [PIN]:  # of a step that was deleted when another disk had its manifest
                store.delete(posixpath.join(path, PIN))
            if left in ([], [PIN]):
                store.remove_folder(path)


def remove_temporaries(store: Store, path: str, names: Iterable[str]) -> None:
    """Removes what killed writers of single files have left in a directory, of what is there."""
    for name in names:
        place = place_of(name)
        if place in (MANIFEST, PIN) or (place and (identity_of(place) or token_of(place))):
            with contextlib.suppress(FileNotFoundError):
                store.remove_leftover(posixpath.join(path, name))


def disown(store: Store, path: str) -> list[str]:
    """Takes their temporary manifests away from the saves that count as dead.

    Returns the names of their array files, or of all that are there beside a damaged manifest. Whoever then puts
    another manifest in place may remove them: no save that goes on can replace that, for it looks at its temporary
    manifest after it has looked at what it is to replace.
    """
    with logged(path):
        _remove_leftovers(store, path, lambda name: False)
        try:
            found = _left_over(store, path)
        except CorruptError:
            found = store.list(path)
        except UnsupportedError:
            return []
        return [name for name in found if (token := token_of(name)) and _temporary_of(token) not in found]
    return []


def _left_over(store: Store, path: str) -> list[str]:
    """The files in a directory that no manifest names, here or, if they say so, on another host's disk."""
    names = store.list(path)
    try:
        data = read_file(store, posixpath.join(path, MANIFEST))
        keep, metrics = set(file_names(data)), f"metrics-{xxhash.xxh3_64_hexdigest(data)}-"
    except FileNotFoundError:
        keep, metrics = set(), "/"
        if any(map(identity_of, names)):
            keep = {name for name in names if token_of(name) or identity_of(name)}
    found = [name for name in names if OWN_FILES.fullmatch(name) and name not in keep]
    return [name for name in found if not name.startswith(metrics)]


def _remove_leftovers(store: Store, path: str, may_go: Callable[[str], bool]) -> None:
    """Removes what is left over; of array files those that may go."""
    settled = False
    try:
        found = _left_over(store, path)
        if found:
            check_removable(store, path)
        # Temporary manifests first: a save that has none any more does not commit.
        for name in sorted(found, key=lambda name: token_of(name) is not None):
            if (token := token_of(name)) and (not may_go(name) or _in_a_living_save(store, path, token)):
                continue

            def still_left_over(name: str = name) -> bool:
                nonlocal settled
                if name not in _left_over(store, path):
                    return False
                if not settled:  # the manifest that no longer names it must outlive a power cut
                    store.settle(path)
                    settled = True
                return True

            with contextlib.suppress(FileNotFoundError):
                if not store.delete_unused(posixpath.join(path, name), still_left_over):
                    warn_of_no_locks(path)
    except (CorruptError, UnsupportedError):
        return  # the files of a damaged checkpoint, or of one of a later version, cannot be known


def _temporary_of(token: str) -> str:
    """The temporary manifest of the save whose array files have this token. It is made before them."""
    return f"{MANIFEST}.{token}.tmp"


def _in_a_living_save(store: Store, path: str, token: str) -> bool:
    """Whether the save whose array files have this token may still commit: its temporary manifest is locked.

    The process that wrote the file may be gone; process 0, which commits, is not.
    """
    try:
        return store.is_in_use(posixpath.join(path, _temporary_of(token)))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def logged(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def delete(store: Store, path: str) -> None:
    """Removes a checkpoint: the manifest first, so that it is gone at once and as a whole."""
    unpublish(store, path)()


def unpublish(store: Store, path: str, check: Callable[[], None] = lambda: None) -> Callable[[], bool]:
    """Removes the manifest of a checkpoint, which is quick; returns a function that removes its files, which is not.

    That one returns False if another process has removed the manifest at the same time, where the store says so.
    `check` is called right before, and may raise. Raises `UnsupportedError` for a checkpoint of a later release, and
    `TakenOverError` in a run that another job writes by now.
    """
    manifest = posixpath.join(path, MANIFEST)
    check_removable(store, path)
    names = consists_of(store, path)
    check()
    claims.check(path)  # or it may be another job's by now
    try:
        store.delete(manifest)
        is_ours = True
    except FileNotFoundError:  # another process is deleting it, too
        is_ours = False

    def remove_files() -> bool:
        with contextlib.suppress(FileNotFoundError):  # another process has removed the directory as well
            store.settle(path)  # or after a power cut the manifest might be there without its files
        # The manifest is durably gone, so no save commits them any more. But a copy may have put them there again.
        again = set(consists_of(store, path))
        store.delete_all(path, [name for name in names if name not in again])
        remove_leftovers(store, path, remove_empty=True)
        return is_ours

    return remove_files


def consists_of(store: Store, path: str) -> list[str]:
    """The files that a manifest names, and the metrics that were added to it.

    [] when the manifest cannot be read: `remove_leftovers` finds them once it is gone.
    """
    try:
        data = read_file(store, posixpath.join(path, MANIFEST))
        added = f"metrics-{xxhash.xxh3_64_hexdigest(data)}-"
        return [*file_names(data), *(name for name in store.list(path) if name.startswith(added))]
    except (CorruptError, UnsupportedError, OSError):
        return []
