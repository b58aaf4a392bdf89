"""Finds the arrays of a save in the files of steps that earlier jobs have written."""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from .._core.boxes import full_box
from .._core.entries import Entry
from .._processes.assignment import Piece
from .._threads.python_gc import gc_paused
from ..errors import TreeringError
from ..formats.treering import manifest, summary
from ..formats.treering.array_file import ArrayFile
from ..stores.file_io import read_file
from ..stores.store import Store
from .saved_arrays import LargeArray, SavedArray, SavedArrays, SavedPart
from .shared_files import SavedFile, version

_log = logging.getLogger("treering")


def adopt(
    saved: SavedArrays,
    store: Store,
    paths: Sequence[str],
    entries: Sequence[Entry],
    pieces: Sequence[Piece],
    large: Sequence[LargeArray],
    index: int,
    count: int,
) -> dict[int, int]:
    """Notes the files of committed steps, as if this job had saved them.

    Returns the number of the file that has a piece in the newest step, by the number of the piece. If the save has the
    same pieces in each file, it can share those whose bytes are the same.

    paths: those of the steps, the newest first.
    index, count: only the files that process `index` of `count` has written are opened.
    """
    keys = {_key(entries, piece): n for n, piece in enumerate(pieces)}
    found: dict[int, int] = {}
    arrays: dict[tuple[Any, ...], SavedArray] = {}
    for path in paths:
        try:
            opened = _open_files(store, path, index, count)
        except (TreeringError, OSError) as error:
            _log.info("%s: its files are not shared: %s", path, error)
            continue
        for number, (file, tensors) in enumerate(opened):
            saved.files.setdefault(file.version, {})[path] = file
            if path != paths[0]:
                continue
            places = {keys[key]: span for key, span in tensors.items() if key in keys}
            found.update(dict.fromkeys(places, number))
            for one in large:
                if all(n in places for n in one.numbers):
                    spans = [places[n] for n in one.numbers]
                    is_run = all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
                    part = SavedPart(file.checksums, (spans[0][0], spans[-1][1]) if is_run else None)
                    arrays[one.tensor] = SavedArray(None, frozenset(), 0, 1, [part])
    saved.arrays = arrays
    return found


def _key(entries: Sequence[Entry], piece: Piece) -> str:
    entry: Any = entries[piece.leaf]
    return manifest.piece_key(entry.path, None if piece.box == full_box(entry.shape) else piece.box)


def _open_files(store: Store, path: str, index: int, count: int) -> list[tuple[SavedFile, dict[str, tuple[int, int]]]]:
    """Returns the array files of a step that a process has written, and the place of each tensor in them."""
    name = summary.manifest_path(path)
    with gc_paused():
        files = manifest.decode(read_file(store, name), name).files
    found: list[tuple[SavedFile, dict[str, tuple[int, int]]]] = []
    for listed in files:
        number = listed.name.partition("-of-")[0].rpartition("-")[2]
        if not number.isdecimal() or int(number) % count != index:
            continue
        own_version = version(store, path, listed)
        file = ArrayFile(store, path, listed)
        file.close()
        tensors = {key: tensor.data_offsets for key, tensor in file.header.tensors.items()}
        found.append((SavedFile(path, listed, own_version, len(tensors), file.header.checksums, False), tensors))
    return found
