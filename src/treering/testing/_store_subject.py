"""The declarations of a store under test."""

from collections.abc import Iterator
from typing import Any

import pytest

from .. import stores
from ..stores.store import Store

PAGE = 4096  # bytes; sinks are written at multiples of it


class StoreSubject:
    """What `treering.testing.StoreConformance` has to be told, and what its tests share."""

    formats = ("treering", "safetensors", "flax", "equinox", "fjformer", "orbax", "t5x", "levanter")

    @pytest.fixture
    def store(self) -> Any:
        """The store."""
        raise NotImplementedError

    @pytest.fixture
    def root(self) -> str:
        """A path in it that no other test uses: a URL whose scheme is none of Treering's, or a folder."""
        raise NotImplementedError

    @pytest.fixture
    def registered(self, store: Store, root: str) -> Iterator[str]:
        """The root, while all calls of Treering that are given such a path use the store."""
        scheme = root.partition("://")[0] if "://" in root else ""
        with stores.using(store, scheme):
            yield root


def put(store: Store, path: str, data: bytes) -> None:
    with store.new_file(path, overwrite=False) as file:
        file.write(data)
