"""The stores of bytes. A store knows files and how they become durable; it knows nothing of arrays.

A function that the user calls asks `of` once for the store of a path, and passes it on.
"""

import contextlib
from collections.abc import Iterator

from .posix import Disk

_stores = {"": Disk()}  # by the scheme of URLs; those of paths have none


def register(store: Disk, scheme: str = "") -> None:
    """Makes `store` the one for paths with this scheme."""
    _stores[scheme] = store


@contextlib.contextmanager
def using(store: Disk) -> Iterator[None]:
    """Replaces the local file system by another store within a `with` block, for tests."""
    before = _stores[""]
    register(store)
    try:
        yield
    finally:
        register(before)


def of(path: str) -> Disk:
    """The store that a path is in."""
    scheme, separator, _ = path.partition("://")
    return _stores[scheme if separator else ""]
