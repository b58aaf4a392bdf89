"""Pickles open checkpoints, so that they can go to workers of data loaders, Ray or Dask.

A pickle has the path of a checkpoint and no bytes of it. Where it is read, the checkpoint is opened again, which runs
no more than `treering.open` does.
"""

import contextlib
from typing import Any

from .. import formats, stores
from .._core.source import Source
from ..errors import NotFoundError, TreeringError, UnsupportedError
from ..stores.read_errors import ReplacedError, reading


def identify(source: Source) -> tuple[str, str, list[Any]]:
    """Returns the path and the format of a checkpoint, and values of which one changes when another replaces it.

    Raises `UnsupportedError` if other processes cannot open the checkpoint by its path.
    """
    if reason := stores.why_private(source.path):
        raise UnsupportedError(
            f"{source.path}: expected a checkpoint that other processes can open by its path, found one {reason}; "
            "open it in the worker"
        )
    return source.path, source.format, _marks(source)


def _marks(source: Source) -> list[Any]:
    marks: list[Any] = [source.identity, source.nbytes]
    if source.format != "treering":  # The identities of other formats do not cover the values.
        with contextlib.suppress(OSError, TreeringError):
            found = stores.get(source.path).stat(source.path)
            marks += [found.modified] if found and found.is_file else []
    return marks


def open_again(path: str, format: str, marks: list[Any]) -> Source:
    """Opens a checkpoint that was pickled.

    Raises `NotFoundError` if it is gone, or if another checkpoint has replaced it.
    """
    place = stores.absolute(path)
    store, what = stores.get(place), "expected the checkpoint that was open when it was pickled, found"
    try:
        with reading(place), store.glance(place):
            source = formats.get(format).open(store, place)
            source.check_present()
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{place}: {what} nothing; was it deleted, or is it on the disk of another host?"
        ) from error
    if _marks(source) != marks:
        raise ReplacedError(f"{place}: {what} another one, which has replaced it; open it again")
    return source
