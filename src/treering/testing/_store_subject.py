"""The declarations of a store under test."""

from collections.abc import Iterator
from typing import Any

import pytest

from .. import stores
from ..stores.store import Store

PAGE = 4096  # bytes; sinks are written at multiples of it


class StoreSubject:
    """The declarations of `treering.testing.StoreConformance`, which its subclasses override."""

    formats = ("treering", "safetensors", "flax", "equinox", "fjformer", "orbax", "t5x", "levanter")

    @pytest.fixture
    def store(self) -> Any:
        """The store under test. One process writes to it, with several threads."""
        raise self._missing("store", "the store under test")

    @pytest.fixture
    def root(self) -> str:
        """A path in the store that no other test uses: a folder, or a URL with any scheme, registered or not."""
        raise self._missing("root", "a path in the store, another one for each test")

    def _missing(self, name: str, returned: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__}: define the fixture `{name}`; it returns {returned}")

    @pytest.fixture
    def registered(self, store: Store, root: str) -> Iterator[str]:
        """The root. While a test runs, Treering uses the store for all paths with this scheme."""
        scheme = root.partition("://")[0] if "://" in root else ""
        with stores.using(store, scheme):
            yield root


def put(store: Store, path: str, data: bytes) -> None:
    """Writes a new file."""
    with store.new_file(path, overwrite=False) as file:
        file.write(data)
