"""Shows progress bars in terminals and notebooks."""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._core.boxes import Box
from .._core.entries import ArrayEntry
from . import coordinator

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from .._core.source import Source

_log = logging.getLogger("treering")


def _console() -> "Console | None":
    """Returns the console of a terminal or a notebook, or None if stderr is neither."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_jupyter:
        return console if sys.stderr.isatty() else None
    if importlib.util.find_spec("ipywidgets"):
        return console
    _log.warning("progress=True: no bar is shown, because a notebook needs the package ipywidgets for it")
    return None


@contextlib.contextmanager
def bar(what: str, nbytes: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Shows a bar for `nbytes` bytes, and yields a function to call with each number of bytes that was moved.

    Shows nothing unless `wanted` is True, stderr is a terminal or a notebook, and this is process 0.
    """
    console = _console() if wanted and not coordinator.process_index_and_count()[0] else None
    if console is None:
        yield lambda nbytes: None
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as shown:
        task = shown.add_task(what, total=nbytes)
        yield lambda nbytes: shown.advance(task, nbytes)


class ObservedSource:
    """A source that calls `moved` with the bytes of each read, and `check`, which may raise, before each read."""

    def __init__(self, source: "Source", moved: Callable[[int], None], check: Callable[[], None]):
        self._source, self._moved, self._check = source, moved, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, wanted: Sequence[tuple[ArrayEntry, Box]], **options: Any) -> "list[np.ndarray]":
        self._check()
        arrays = self._source.read(wanted, **options)
        self._moved(sum([array.nbytes for array in arrays]))
        return arrays
