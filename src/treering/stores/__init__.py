"""Where bytes live. A store knows files and how they become durable; what an array is, it does not know.

Whoever is called by the user asks `of` once which store a path is in, and hands that on.
"""

import contextlib
from collections.abc import Iterator

from .posix import Disk

_stores = {"": Disk()}  # by the scheme of URLs; those of paths have none


def register(store: Disk, scheme: str = "") -> None:
    """Puts a store in the place of the one for paths with this scheme."""
    _stores[scheme] = store


@contextlib.contextmanager
def using(store: Disk) -> Iterator[None]:
    """Puts a store in the place of the local file system within a `with` block, for tests."""
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
