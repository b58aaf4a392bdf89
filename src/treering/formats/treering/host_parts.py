"""The part of a checkpoint that lies on one host's disk, where each host has another.

Process 0 has the manifest on its disk. The disks of the other hosts have array files, known by the token in their
names, and an empty file, ``part-of-`` and the identity of the manifest, which says that the checkpoint was committed:
without one its array files are what a killed save has left, and with one they are never taken for that. These tokens
and identities are the keys of what is in a folder, of temporary files and metrics as well.
"""

import contextlib
import logging
import posixpath
from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

from ...errors import CorruptError, UnsupportedError
from ...stores.nearest import Nearest
from ...stores.nfs import warn_of_no_locks
from ...stores.store import Store
from ...stores.whole_files import make_empty, read_file
from . import manifest, metrics, pins, summary
from .schema import MANIFEST, PART, PIN, identity_of, is_of_save, key_of, token_of

_log = logging.getLogger("treering")


class Inventory(NamedTuple):
    """What a disk has of a checkpoint: the identities of its manifest, if that is here, and of which it is a part.

    `kept`: that of a manifest that was here before another disk took its place.
    """

    manifest: str
    part_of: list[str]
    kept: str
    sizes: dict[str, int]  # of the array files


def inventory(store: Store, path: str) -> Inventory:
    """What this disk has of the checkpoint at a path."""
    data = manifest_of(store, path)
    sizes = {name: size for name in _array_files(store, path) if (size := _size(store, path, name)) is not None}
    kept = kept_manifest(store, path)
    return Inventory(
        manifest.xxh3(data) if data else "", part_of(store, path), manifest.xxh3(kept) if kept else "", sizes
    )


def part_of(store: Store, path: str) -> list[str]:
    """The identities of the committed checkpoints at a path of which this disk has a part, and another the manifest."""
    return [identity for name in store.list(path) if (identity := identity_of(name))]


def identities(store: Store, path: str) -> set[str]:
    """Those, and that of the manifest if it is here."""
    data = manifest_of(store, path)
    return {*part_of(store, path), *([manifest.xxh3(data)] if data else [])}


def kept_manifest(store: Store, path: str) -> bytes:
    """The manifest that was here before another disk took its place; b"" where there was none."""
    for identity in part_of(store, path):
        with contextlib.suppress(CorruptError, FileNotFoundError):
            if manifest.xxh3(data := read_file(store, posixpath.join(path, PART + identity))) == identity:
                return data
    return b""


def notes(store: Store, path: str) -> dict[str, str]:
    """What another disk gets that takes the place of this one, by names: metrics, a pin, and last the manifest.

    Each byte is a character.
    """
    data = manifest_of(store, path) or kept_manifest(store, path)
    if not data:
        return {}
    found = {PIN: b""} if pins.pinned(store, path) else {}
    for name in metrics.names(store, path, manifest.xxh3(data)):
        try:
            found[name] = read_file(store, posixpath.join(path, name))
        except (CorruptError, OSError) as error:
            _log.warning("%s: the metrics in it do not count, for process 0 is on another host: %s", name, error)
    return {name: text.decode("latin-1") for name, text in {**found, MANIFEST: data}.items()}


def has_files_of(store: Store, path: str, notes: Mapping[str, str]) -> bool:
    """Whether array files are here of the manifest in what `notes` has returned on another disk."""
    try:
        return not set(manifest.file_names(notes[MANIFEST].encode("latin-1"))).isdisjoint(store.list(path))
    except (CorruptError, UnsupportedError):
        return False


def take_over(store: Store, path: str, notes: Mapping[str, str], *, unpin: bool) -> None:
    """Puts here what another disk has had, and makes this the disk that has the manifest.

    unpin: what is pinned here is not any more unless it is there; not where that disk may know less.
    """
    store.make_folders(path, [])
    if unpin and PIN not in notes and pins.pinned(store, path):
        store.delete(posixpath.join(path, PIN))
    for name, text in notes.items():
        with store.new_file(posixpath.join(path, name), overwrite=True) as file:
            file.write(text.encode("latin-1"))
    forget(store, path)


def give_up_manifest(store: Store, path: str) -> None:
    """Makes what is here a part of the checkpoint whose manifest is here, for another disk has taken its place."""
    if data := manifest_of(store, path):
        with store.new_file(posixpath.join(path, PART + manifest.xxh3(data)), overwrite=True) as file:
            file.write(data)
        store.delete(summary.file(path))
        store.settle(path)


def note_part(store: Store, path: str, identity: str) -> None:
    """Says, durably, that what is here is a part of a committed checkpoint, unless the manifest is here."""
    if summary.look(store, path) is not None:
        return
    with contextlib.suppress(FileExistsError):  # another process of this host was faster
        make_empty(store, posixpath.join(path, PART + identity))
    store.settle(path)


def forget(store: Store, path: str) -> None:
    """Says that nothing here is a part of a committed checkpoint any more, if the manifest is not here."""
    for identity in part_of(store, path):
        with contextlib.suppress(FileNotFoundError):
            store.delete(posixpath.join(path, PART + identity))


def is_whole(store: Store, path: str, elsewhere: Mapping[str, int] | None = None) -> bool:
    """Whether the files that a manifest names are all here or elsewhere, where there are some of these sizes."""
    elsewhere, data = elsewhere or {}, manifest_of(store, path)
    try:
        files = manifest.summarize(data, path).files
    except (CorruptError, UnsupportedError):
        return False
    return all(file.size in (elsewhere.get(file.name), _size(store, path, file.name)) for file in files)


def manifest_of(store: Store, path: str) -> bytes:
    """The manifest at a path; b"" where there is none that can be read."""
    try:
        return read_file(store, summary.file(path))
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return b""


def needed(store: Store, path: str) -> set[str] | None:
    """The keys of what is needed of the checkpoint whose manifest is here; None when that cannot be known."""
    try:
        data = read_file(store, summary.file(path))
        return {manifest.xxh3(data), *filter(None, map(token_of, manifest.file_names(data)))}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except (CorruptError, UnsupportedError, OSError):
        return None


def there(store: Store, path: str) -> set[str]:
    """The keys of what is here and of no living save."""
    found, used = identities(store, path), set[str]()
    for name, key in _keyed(store, path).items():
        found.add(key)
        with contextlib.suppress(FileNotFoundError):
            if is_of_save(name) and store.is_in_use(posixpath.join(path, name)):
                used.add(key)
    return found - used


def is_in_use(store: Store, path: str) -> bool:
    """Whether a living save writes there."""
    for name in filter(is_of_save, store.list(path)):
        with contextlib.suppress(FileNotFoundError):
            if store.is_in_use(posixpath.join(path, name)):
                return True
    return False


def take_away(store: Store, path: str, keys: Collection[str]) -> None:
    """Removes what has one of these keys, and then the folder if it is empty."""
    try:
        if (data := manifest_of(store, path)) and manifest.xxh3(data) in keys:
            store.delete(summary.file(path))
        for identity in set(part_of(store, path)).intersection(keys):
            store.delete(posixpath.join(path, PART + identity))
        store.settle(path)  # what says that arrays are a part goes before them
        for name, key in _keyed(store, path).items():
            if key in keys:
                with contextlib.suppress(FileNotFoundError):
                    if not store.delete_unused(posixpath.join(path, name), lambda: True):
                        warn_of_no_locks(path)
        if store.list(path) == [PIN]:  # of what was deleted where the manifest was
            store.delete(posixpath.join(path, PIN))
        if not store.list(path):
            store.remove_folder(path)
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def nearest(near_store: Store, near: str, far_store: Store, far: str) -> Store:
    """The checkpoints below `far`, of which the array files that are below `near` as well are read there."""
    return cast(Store, Nearest(near_store, near, far_store, far, lambda name: token_of(name) is not None))


def _array_files(store: Store, path: str) -> dict[str, str]:
    """The array files in a folder, and their tokens."""
    return {name: token for name in store.list(path) if (token := token_of(name))}


def _keyed(store: Store, path: str) -> dict[str, str]:
    """The files in a folder that have a key, and their keys; array files last."""
    found = {name: key for name in store.list(path) if (key := key_of(name))}
    return dict(sorted(found.items(), key=lambda one: token_of(one[0]) is not None))


def _size(store: Store, path: str, name: str) -> int | None:
    found = store.stat(posixpath.join(path, name))
    return found and found.nbytes
