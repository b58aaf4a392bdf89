"""The native format: a manifest next to safetensors files. `docs/format.md` specifies it."""

import posixpath
from collections.abc import Collection
from typing import Any

from ..._core.source import INFO_FIELDS, Source
from ...errors import UnsupportedError
from ...stores.store import Store
from .._shared.format_parts import FormatDefaults
from .schema import MANIFEST


class Native(FormatDefaults):
    """See `treering.formats.Format`. `treering._run` lists the steps of native runs, including damaged ones."""

    name = "treering"
    holds_iterators = True

    def refuses(self, store: Store, path: str) -> str | None:
        return None if store.stat(posixpath.join(path, MANIFEST)) else f"there is no {MANIFEST}"

    def open(self, store: Store, path: str) -> Source:
        from .read import Reader as NativeReader

        return NativeReader(store, path)

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return INFO_FIELDS

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        raise UnsupportedError("treering._save writes the native format, because it uses several threads and processes")


FORMAT = Native()
