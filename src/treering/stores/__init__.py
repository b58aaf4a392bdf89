"""The stores of bytes. A store knows files and how they become durable; it knows nothing of arrays.

A function that the user calls asks `of` once for the store of a path, and passes it on.
"""

import contextlib
import os
from collections.abc import Iterator

from .._core import leaf_paths
from .filesystem import Filesystem
from .posix import Disk
from .store import Store

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
    """A path or URL of a registered scheme as absolute text; see `treering._core.leaf_paths.absolute`."""
    return leaf_paths.absolute(path, _stores)


def of(path: str) -> Store:
    """The store that a path is in."""
    scheme, separator, _ = path.partition("://")
    return _stores[scheme if separator else ""]
