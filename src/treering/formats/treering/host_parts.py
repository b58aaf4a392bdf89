"""The part of a checkpoint that lies on one host's disk, where each host has another: array files, on one the manifest.

What is there is known by keys: the token in the names of a save's array files, and the identity of a manifest.
"""

import contextlib
import logging
import posixpath
from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

from ...errors import CorruptError, UnsupportedError
from ...stores.nearest import Nearest
from ...stores.store import Store
from ...stores.whole_files import read_file
from . import manifest, summary
from .schema import MANIFEST, token_of

_log = logging.getLogger("treering")


class Inventory(NamedTuple):
    """What a disk has of a checkpoint: whether the manifest, and the sizes of array files."""

    has_manifest: bool
    sizes: dict[str, int]


def inventory(store: Store, path: str) -> Inventory:
    """What this disk has of the checkpoint at a path."""
    sizes = {name: size for name in _array_files(store, path) if (size := _size(store, path, name)) is not None}
    return Inventory(summary.look(store, path) is not None, sizes)


def is_whole(store: Store, path: str, data: bytes, elsewhere: Mapping[str, int]) -> bool:
    """Whether the files that a manifest names are all here or elsewhere, where there are some of these sizes."""
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


def needed(store: Store, path: str) -> set[str]:
    """The keys of the manifest that is here, and of the array files that it names."""
    if not (data := manifest_of(store, path)):
        return set()
    try:
        return {manifest.xxh3(data), *filter(None, map(token_of, manifest.file_names(data)))}
    except (CorruptError, UnsupportedError):
        return {manifest.xxh3(data)}


def there(store: Store, path: str) -> set[str]:
    """The keys of what is here and of no living save."""
    found, used = set[str](), set[str]()
    if data := manifest_of(store, path):
        found.add(manifest.xxh3(data))
    for name, token in _array_files(store, path).items():
        found.add(token)
        with contextlib.suppress(FileNotFoundError):
            if store.is_in_use(posixpath.join(path, name)):
                used.add(token)
    return found - used


def take_away(store: Store, path: str, keys: Collection[str], aside: str = "") -> None:
    """Removes what has one of these keys, and the folder if nothing else is in it; or moves it `aside`."""
    try:
        chosen = [name for name, token in _array_files(store, path).items() if token in keys]
        if keys and (data := manifest_of(store, path)) and manifest.xxh3(data) in keys:
            chosen.append(MANIFEST)
        if aside and chosen:
            store.make_folders(aside, [])
        for name in chosen:
            with contextlib.suppress(FileNotFoundError):
                if aside:
                    store.move(posixpath.join(path, name), posixpath.join(aside, name), last=MANIFEST)
                else:
                    store.delete_unused(posixpath.join(path, name), lambda: True)
        if chosen and not store.list(path):
            store.remove_folder(path)
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def nearest(near_store: Store, near: str, far_store: Store, far: str) -> Store:
    """The checkpoints below `far`, of which the array files that are below `near` as well are read there."""
    return cast(Store, Nearest(near_store, near, far_store, far, lambda name: token_of(name) is not None))


def _array_files(store: Store, path: str) -> dict[str, str]:
    """The array files in a folder, and their tokens."""
    return {name: token for name in store.list(path) if (token := token_of(name))}


def _size(store: Store, path: str, name: str) -> int | None:
    found = store.stat(posixpath.join(path, name))
    return found and found.nbytes
