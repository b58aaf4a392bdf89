"""The files of a checkpoint on one host's disk, where each host has a disk of its own.

Each disk has the manifest, and those array files that the processes of its host wrote.
"""

import logging
import posixpath
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import CorruptError, UnsupportedError
from ...stores import file_io
from ...stores.file_io import read_file
from ...stores.store import Store
from . import manifest, metrics, pins, removal, summary
from .manifest_fields import File
from .schema import MANIFEST, PIN, is_of_save, token_of

_log = logging.getLogger("treering")
Notes = Mapping[str, str]  # files that are sent as JSON, by name: text with one Latin-1 character per byte


class Inventory(NamedTuple):
    """The files of a checkpoint on one disk: the identity of the manifest ("" without one), and the array files.

    sizes: in bytes, of the array files.
    is_unreadable: True if there is a manifest that cannot be read, now or ever.
    """

    identity: str
    sizes: dict[str, int]
    is_unreadable: bool = False


def inventory(store: Store, path: str) -> Inventory:
    """Returns what this disk has of the checkpoint at a path."""
    own, listed = identity(store, path), store.list(path)
    return Inventory(own, sizes(store, path), not own and MANIFEST in listed)


def sizes(store: Store, path: str, token: str | None = None) -> dict[str, int]:
    """Returns the sizes in bytes of the array files at a path, or only of those with a token."""
    names = [name for name in store.list(path) if (own := token_of(name)) and token in (None, own)]
    return {name: there.nbytes for name in names if (there := store.stat(posixpath.join(path, name)))}


def identity(store: Store, path: str) -> str:
    """Returns the identity of the manifest at a path, or "" without one that can be read."""
    data = _manifest(store, path)
    return manifest.xxh3(data) if data else ""


def manifest_text(store: Store, path: str) -> str:
    """Returns the manifest at a path as in `Notes`, or "" without one that can be read."""
    return _manifest(store, path).decode("latin-1")


def notes(store: Store, path: str) -> dict[str, str]:
    """Returns the files that another disk needs to know this checkpoint: metrics, a pin, and last the manifest."""
    data = _manifest(store, path)
    if not data:
        return {}
    found = {PIN: b""} if pins.is_pinned(store, path) else {}
    for name in metrics.names(store, path, manifest.xxh3(data)):
        try:
            found[name] = read_file(store, posixpath.join(path, name))
        except (CorruptError, OSError) as error:
            _log.warning("%s: metrics ignored; they cannot be read and sent to process 0: %s", name, error)
    return {name: text.decode("latin-1") for name, text in {**found, MANIFEST: data}.items()}


def adopt(store: Store, path: str, found: Notes, *, unpin: bool = False) -> None:
    """Writes the notes that another disk has sent. The manifest comes last, because it commits the step on this disk.

    unpin: removes a pin on this disk unless the other disk has it too. False if the other disk may be out of date.
    """
    store.make_folders(path, [])
    if unpin and PIN not in found and pins.is_pinned(store, path):
        store.delete(posixpath.join(path, PIN))
    for name, text in found.items():
        with store.new_file(posixpath.join(path, name), overwrite=True) as file:
            file.write(text.encode("latin-1"))
    store.settle(path)


def adopt_manifest(store: Store, path: str, data: bytes) -> None:
    """Writes the manifest of a checkpoint that process 0 has committed on its disk. The files that it replaces go.

    Does nothing if the manifest is here, because another process of this host has written it.
    """
    if identity(store, path) == manifest.xxh3(data):
        return
    replaced = removal.member_files(store, path)
    with store.new_file(summary.manifest_path(path), overwrite=True) as file:
        file.write(data)
    store.settle(path)
    store.delete_all(path, [name for name in replaced if name not in manifest.file_names(data)])


def manifest_in(found: Notes) -> str:
    """Returns the manifest in notes."""
    return found[MANIFEST]


def identity_in(found: Notes) -> str:
    """Returns the identity of the manifest in notes."""
    return manifest.xxh3(found[MANIFEST].encode("latin-1"))


def has_files_of(store: Store, path: str, text: str) -> bool:
    """Returns True if this disk has array files of a manifest, given as in `Notes`."""
    try:
        return not set(manifest.file_names(text.encode("latin-1"))).isdisjoint(store.list(path))
    except (CorruptError, UnsupportedError):
        return False


def listed_files(store: Store, path: str) -> Sequence[File] | None:
    """Returns the array files that the manifest at a path lists; None without a manifest that can be read."""
    try:
        return manifest.summarize(_manifest(store, path), path).files
    except (CorruptError, UnsupportedError):
        return None


def is_in_use(store: Store, path: str) -> bool:
    """Returns True if a running save writes to a path."""
    return any(file_io.is_in_use(store, posixpath.join(path, name)) for name in filter(is_of_save, store.list(path)))


def _manifest(store: Store, path: str) -> bytes:
    """Returns the manifest at a path. Returns b"" for a damaged one: it would look like that of another checkpoint."""
    name = summary.manifest_path(path)
    try:
        data = read_file(store, name)
        manifest.check(data, name)
        return data
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return b""
