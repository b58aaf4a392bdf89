"""The stores of bytes: the file system, memory and buckets. A store knows files and durability, but not arrays.

A public function calls `get` once for the store of its path, and passes that store on.
"""

import contextlib
import functools
import os
import re
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .._core import leaf_paths
from ..errors import MismatchError, UnsupportedError
from .filesystem import Filesystem
from .objects import clients
from .posix import Disk
from .store import Store

if TYPE_CHECKING:
    from .objects.store import ObjectStore

_stores: dict[str, Store] = {"": Filesystem(Disk())}  # by URL scheme; a path has the scheme ""


def register(store: Store, scheme: str = "") -> None:
    """Makes `store` the store of all paths with this scheme (``mine`` of ``mine://``), in this process.

    Raises `MismatchError` for anything but a `Store` and the name of a scheme.
    """
    if not isinstance(scheme, str) or not re.fullmatch(r"(?:[A-Za-z][\w+.-]*)?", scheme):
        raise MismatchError(
            f"{scheme!r}: expected the name of a scheme alone, found other text; pass 'mine' for mine://"
        )
    if isinstance(store, type):
        raise MismatchError(f"{scheme}://: expected a store, found a class; pass an object of it")
    missing = [name for name in vars(Store) if not name.startswith("_") and not hasattr(store, name)]
    if missing:
        raise MismatchError(
            f"{scheme}://: expected a store, found a {type(store).__name__} without `{missing[0]}`; if it has the "
            "methods of `KeyValues`, pass treering.stores.key_values.KeyValueStore(…) with it"
        )
    _stores[scheme] = store


@contextlib.contextmanager
def using(store: Store, scheme: str = "") -> Iterator[None]:
    """Replaces the store of a scheme within a `with` block, for tests."""
    before = _stores.get(scheme)
    register(store, scheme)
    try:
        yield
    finally:
        if before is None:
            del _stores[scheme]
        else:
            register(before, scheme)


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns a path as absolute text; see `treering._core.leaf_paths.absolute`.

    A URL only loses the slashes at its end. A store object of obstore stands for the URL of its bucket. From then on,
    all paths in that bucket use the object.
    """
    if type(path).__module__.startswith("obstore") and not isinstance(path, str | os.PathLike):
        return _register_client(path)
    if isinstance(path, str) and path.startswith("file:///"):
        path = urllib.parse.unquote(path.removeprefix("file://"))
    return leaf_paths.absolute(path, {*_stores, *clients.EXTRAS})


def absolute_run(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a run. Raises `UnsupportedError` for a web server, which cannot list its files."""
    found = absolute(path)
    if found.startswith(clients.WEB):
        raise UnsupportedError(
            f"{found}: expected a path or the URL of a bucket, found that of a web server, where a run can neither be "
            "listed nor written; open one checkpoint by its own URL"
        )
    return found


def get(path: str) -> Store:
    """Returns the store that holds a path."""
    scheme, separator, _ = path.partition("://")
    scheme = scheme if separator else ""
    return _stores[scheme] if scheme in _stores else _buckets()


def why_private(path: str) -> str:
    """Returns why another process cannot open a path by its text; "" if it can."""
    store = get(path)
    if path.startswith("memory://") or getattr(store, "is_in_memory", False):
        return "in the memory of this process"
    if (has_client := getattr(store, "has_given_client", None)) and has_client(path):
        return "opened with a store object of obstore, whose credentials do not go into a pickle"
    return ""


def _register_client(client: Any) -> str:
    url = clients.url_of(client)
    _buckets().add(url, client)
    return url


@functools.cache
def _buckets() -> "ObjectStore":
    """Returns the store of all buckets. It is made on first use, so that other users do not import obstore's part."""
    from .objects.store import ObjectStore

    return ObjectStore()
