"""The methods of a format whose checkpoints are folders of zarr arrays, which several processes can write."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._core.entries import ArrayEntry
from ..._core.source import Source
from ..._processes.calls import ALONE, Call
from ...stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..._processes.assignment import Layout


class ZarrFolders:
    """See `treering.formats.JointFormat`. A format says which function writes a folder, imported when it is needed."""

    def _writer(self) -> Callable[..., int]:
        raise NotImplementedError

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        return self.write_together(store, path, contents, ALONE, {}, overwrite=overwrite, **options)

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
