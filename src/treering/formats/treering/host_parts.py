"""The files of a checkpoint on one host's disk, where each host has a disk of its own.

Process 0 has the manifest on its disk. The disks of the other hosts have array files, with the token of the save in
their names, and an empty mark. The mark is named ``part-of-`` and the identity of the manifest. It says that the
checkpoint was committed: array files without a mark are leftovers of a killed save, array files with one never are.

The key of a file is the token or the identity in its name. Temporary files and metrics have keys too.
"""

import contextlib
import logging
import posixpath
from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

from ...errors import CorruptError, UnsupportedError
from ...stores import file_io
from ...stores.file_io import make_empty, read_file
from ...stores.local_first import LocalFirstStore
from ...stores.store import Store
from . import manifest, metrics, pins, summary
from .schema import MANIFEST, PART, PIN, identity_of, is_of_save, key_of, token_of

_log = logging.getLogger("treering")


class Inventory(NamedTuple):
    """The files of a checkpoint on one disk."""

    manifest: str  # the identity of the manifest; "" if this disk does not have it
    part_of: list[str]  # the identities in the marks
    kept: str  # the identity of a demoted manifest, see `give_up_manifest`; "" without one
    sizes: dict[str, int]  # of the array files


def inventory(store: Store, path: str) -> Inventory:
    """Returns what this disk has of the checkpoint at a path."""
    data = manifest_of(store, path)
    sizes = {name: size for name in _array_files(store, path) if (size := _size(store, path, name)) is not None}
    kept = kept_manifest(store, path)
    return Inventory(
        manifest.xxh3(data) if data else "", part_of(store, path), manifest.xxh3(kept) if kept else "", sizes
    )


def part_of(store: Store, path: str) -> list[str]:
    """Returns the identities of the committed checkpoints at a path whose manifest is on another disk."""
    return [identity for name in store.list(path) if (identity := identity_of(name))]


def identities(store: Store, path: str) -> set[str]:
    """Returns the identities of `part_of`, and that of the manifest if this disk has it."""
    data = manifest_of(store, path)
    return {*part_of(store, path), *([manifest.xxh3(data)] if data else [])}


def kept_manifest(store: Store, path: str) -> bytes:
    """Returns the manifest that `give_up_manifest` has demoted on this disk, or b"" without one."""
    for identity in part_of(store, path):
        with contextlib.suppress(CorruptError, FileNotFoundError):
            if manifest.xxh3(data := read_file(store, posixpath.join(path, PART + identity))) == identity:
                return data
    return b""


def notes(store: Store, path: str) -> dict[str, str]:
    """Returns the files that another disk needs to replace this one, by name: metrics, a pin, and last the manifest.

    The contents are text with one Latin-1 character per byte, because they are sent as JSON.
    """
    data = manifest_of(store, path) or kept_manifest(store, path)
    if not data:
        return {}
    found = {PIN: b""} if pins.is_pinned(store, path) else {}
    for name in metrics.names(store, path, manifest.xxh3(data)):
        try:
            found[name] = read_file(store, posixpath.join(path, name))
        except (CorruptError, OSError) as error:
            _log.warning("%s: metrics ignored; they cannot be read and sent to process 0: %s", name, error)
    return {name: text.decode("latin-1") for name, text in {**found, MANIFEST: data}.items()}


def has_files_of(store: Store, path: str, notes: Mapping[str, str]) -> bool:
    """Returns True if this disk has array files of the manifest in `notes`, which another disk has sent."""
    try:
        return not set(manifest.file_names(notes[MANIFEST].encode("latin-1"))).isdisjoint(store.list(path))
    except (CorruptError, UnsupportedError):
        return False


def take_over(store: Store, path: str, notes: Mapping[str, str], *, unpin: bool) -> None:
    """Writes the files that another disk has sent, and makes this the disk that has the manifest.

    unpin: removes a pin on this disk unless the other disk has it too. False if the other disk may be out of date.
    """
    store.make_folders(path, [])
    if unpin and PIN not in notes and pins.is_pinned(store, path):
        store.delete(posixpath.join(path, PIN))
    for name, text in notes.items():  # in the order of `notes`: the manifest comes last, because it commits the step
        with store.new_file(posixpath.join(path, name), overwrite=True) as file:
            file.write(text.encode("latin-1"))
    forget(store, path)


def give_up_manifest(store: Store, path: str) -> None:
    """Demotes the manifest on this disk: moves its bytes into a mark, because another disk has the manifest now."""
    if data := manifest_of(store, path):
        # The mark comes before the removal: without both, the arrays here would be taken for leftovers.
        with store.new_file(posixpath.join(path, PART + manifest.xxh3(data)), overwrite=True) as file:
            file.write(data)
        store.delete(summary.manifest_path(path))
        store.settle(path)


def note_part(store: Store, path: str, identity: str) -> None:
    """Writes the mark of a committed checkpoint, durably, unless this disk has the manifest."""
    if summary.stat_manifest(store, path) is not None:
        return
    with contextlib.suppress(FileExistsError):  # Another process of this host has written the mark.
        make_empty(store, posixpath.join(path, PART + identity))
    store.settle(path)


def forget(store: Store, path: str) -> None:
    """Removes the marks at a path. Without a manifest, the files there then no longer belong to a committed one."""
    for identity in part_of(store, path):
        with contextlib.suppress(FileNotFoundError):
            store.delete(posixpath.join(path, PART + identity))


def is_complete(store: Store, path: str, elsewhere: Mapping[str, int] | None = None) -> bool:
    """Returns True if each file that the manifest names has the right size, on this disk or in `elsewhere`.

    elsewhere: the sizes in bytes of the files on other disks.
    """
    elsewhere, data = elsewhere or {}, manifest_of(store, path)
    try:
        files = manifest.summarize(data, path).files
    except (CorruptError, UnsupportedError):
        return False
    return all(file.size in (elsewhere.get(file.name), _size(store, path, file.name)) for file in files)


def manifest_of(store: Store, path: str) -> bytes:
    """Returns the bytes of the manifest at a path, or b"" without one that can be read."""
    try:
        return read_file(store, summary.manifest_path(path))
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return b""


def needed(store: Store, path: str) -> set[str] | None:
    """Returns the keys of the files that belong to the checkpoint at a path; none without a manifest.

    Returns None if the manifest cannot be read, because then any file may belong to it.
    """
    try:
        data = read_file(store, summary.manifest_path(path))
        return {manifest.xxh3(data), *filter(None, map(token_of, manifest.file_names(data)))}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except (CorruptError, UnsupportedError, OSError):
        return None


def there(store: Store, path: str) -> set[str]:
    """Returns the keys of the files at a path, without the keys that a running save uses."""
    found, used = identities(store, path), set[str]()
    for name, key in _keyed(store, path).items():
        found.add(key)
        if is_of_save(name) and file_io.is_in_use(store, posixpath.join(path, name)):
            used.add(key)
    return found - used


def is_in_use(store: Store, path: str) -> bool:
    """Returns True if a running save writes to a path."""
    return any(file_io.is_in_use(store, posixpath.join(path, name)) for name in filter(is_of_save, store.list(path)))


def take_away(store: Store, path: str, keys: Collection[str]) -> None:
    """Removes the files with one of these keys, and then the folder if it is empty."""
    try:
        if (data := manifest_of(store, path)) and manifest.xxh3(data) in keys:
            store.delete(summary.manifest_path(path))
        for identity in set(part_of(store, path)).intersection(keys):
            store.delete(posixpath.join(path, PART + identity))
        store.settle(path)  # After a crash no manifest or mark may remain whose arrays are gone.
        for name, key in _keyed(store, path).items():
            if key in keys:
                file_io.remove_unused(store, posixpath.join(path, name))
        if store.list(path) == [PIN]:  # The pin of a step that was deleted on the disk with the manifest.
            store.delete(posixpath.join(path, PIN))
        if not store.list(path):
            store.remove_folder(path)
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def local_first(local_store: Store, local: str, remote_store: Store, remote: str) -> Store:
    """Returns a store that shows, below the path `local`, the checkpoints of the remote tier below `remote`.

    It reads an array file from the local tier if that has it.
    """
    return cast(
        Store, LocalFirstStore(local_store, local, remote_store, remote, lambda name: token_of(name) is not None)
    )


def _array_files(store: Store, path: str) -> dict[str, str]:
    """Returns the names of the array files in a folder, with their tokens."""
    return {name: token for name in store.list(path) if (token := token_of(name))}


def _keyed(store: Store, path: str) -> dict[str, str]:
    """Returns the names of the files in a folder that have a key, with their keys; array files come last."""
    found = {name: key for name in store.list(path) if (key := key_of(name))}
    return dict(sorted(found.items(), key=lambda one: token_of(one[0]) is not None))


def _size(store: Store, path: str, name: str) -> int | None:
    found = store.stat(posixpath.join(path, name))
    return found and found.nbytes
