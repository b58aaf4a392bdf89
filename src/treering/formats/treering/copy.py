"""Copies of checkpoints in other places: the same files, and the same manifest byte for byte."""

from collections.abc import Callable

from ...stores.store import Store
from . import metrics, pins
from .commit import Transaction
from .read import Reader


def copy(
    source: Store,
    path: str,
    target: Store,
    to: str,
    *,
    overwrite: bool = False,
    moved: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Copies a checkpoint, verified as it is read, with its pin and the metrics that were added to it.

    Returns its identity.

    moved: told the bytes of every part before it is written; what it raises ends the copy, and nothing is left of it.

    Raises `CorruptError` for a damaged one, `UnsupportedError` for one of a later release, `ReplacedError` for one that
    is deleted meanwhile, and what a save raises.
    """
    reader = Reader(source, path)
    reader.check_present()
    reader.hold()
    # Others see that the writer of these files lives by the token in their names: see `remove_leftovers`.
    token = reader.files[0].name.split("-")[1] if reader.files else ""
    files = Transaction(target, to, overwrite=overwrite, token=token)
    try:
        for number, listed in enumerate(reader.files):
            sink = files.create(listed.name, expected=listed.size)
            for offset, buffer in reader.contents(number):
                moved(min(len(buffer), listed.size - offset))
                sink.write(buffer, offset)
            sink.finish(listed.size, read_only=True)
        files.commit(reader.manifest_bytes)
    except BaseException:
        files.abort()
        raise
    metrics.copy(source, path, target, to, reader.identity)
    if pins.pinned(source, path):
        pins.pin(target, to, True)
    return reader.identity
