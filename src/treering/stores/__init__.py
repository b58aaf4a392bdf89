"""The stores of bytes. A store knows files and how they become durable; it knows nothing of arrays.

A function that the user calls asks `of` once for the store of a path, and passes it on.
"""

import contextlib
import functools
import os
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .._core import leaf_paths
from ..errors import UnsupportedError
from .filesystem import Filesystem
from .objects import clients
from .posix import Disk
from .store import Store

if TYPE_CHECKING:
    from .objects.store import ObjectStore

_stores: dict[str, Store] = {"": Filesystem(Disk())}  # by the scheme of URLs; those of paths have none


def register(store: Store, scheme: str = "") -> None:
    """Makes `store` the one for paths with this scheme."""
    _stores[scheme] = store


@contextlib.contextmanager
def using(store: Store, scheme: str = "") -> Iterator[None]:
    """Puts a store in the place of the one for paths with this scheme within a `with` block, for tests."""
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
    """A path as absolute text, a URL as it is but for slashes at its end; see `treering._core.leaf_paths.absolute`.

    A store object of obstore's stands for the URL of its bucket, and is used from then on for all that lies in it.
    """
    if type(path).__module__.startswith("obstore") and not isinstance(path, str | os.PathLike):
        return _adopted(path)
    if isinstance(path, str) and path.startswith("file:///"):
        path = urllib.parse.unquote(path.removeprefix("file://"))
    return leaf_paths.absolute(path, {*_stores, *clients.EXTRAS})


def absolute_run(path: str | os.PathLike[str]) -> str:
    """The same for a run. Raises `UnsupportedError` for one on a web server, which cannot say what there is."""
    found = absolute(path)
    if found.startswith(clients.WEB):
        raise UnsupportedError(
            f"{found}: expected a path or the URL of a bucket, found that of a web server, where a run can neither be "
            "listed nor written; open a checkpoint there by its own URL"
        )
    return found


def of(path: str) -> Store:
    """The store that a path is in."""
    scheme, separator, _ = path.partition("://")
    scheme = scheme if separator else ""
    return _stores[scheme] if scheme in _stores else _buckets()


def _adopted(client: Any) -> str:
    url = clients.url_of(client)
    _buckets().add(url, client)
    return url


@functools.cache
def _buckets() -> "ObjectStore":
    """The object stores; only who uses one imports what it needs."""
    from .objects.store import ObjectStore

    return ObjectStore()
