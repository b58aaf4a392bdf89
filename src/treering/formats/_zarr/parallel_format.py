"""The methods that formats share whose checkpoints are folders of zarr arrays, written by several processes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._core.calls import SINGLE_PROCESS, Call
from ..._core.entries import ArrayEntry
from ..._core.source import Source
from ...stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..._core.layouts import Layout


class ZarrFolders:
    """Implements `treering.formats.JointFormat` for folders of zarr arrays.

    `_writer` of a subclass imports and returns its writing function, so that reading does not import it.
    """

    def _writer(self) -> Callable[..., int]:
        raise NotImplementedError

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        return self.write_together(store, path, contents, SINGLE_PROCESS, {}, overwrite=overwrite, **options)

    def splits(self, entry: ArrayEntry) -> bool:
        return True

    def write_together(
        self,
        store: Store,
        path: str,
        contents: Source,
        call: Call,
        layouts: "Mapping[str, Layout]",
        *,
        overwrite: bool,
        **options: Any,
    ) -> int:
        return self._writer()(store, path, contents, call, layouts, options, overwrite=overwrite)
