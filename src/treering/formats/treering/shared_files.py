"""Array files that a save shares with an earlier step, because the arrays in them have not changed.

The save gives such a file another name in its own directory (a hard link), so every checkpoint stays complete by
itself. If the disk cannot do that, the bytes are copied and checked.
"""

import functools
import logging
import posixpath
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from ..._processes.assignment import Piece
from ...errors import CorruptError, SaveError
from ...stores.store import Store
from .array_file import ArrayFile
from .manifest_fields import File
from .room import PatientSink, Room
from .save_files import SaveFiles

_log = logging.getLogger("treering")


class SavedFile(NamedTuple):
    """An array file of a committed step.

    path: the step's directory.
    origin: names the bytes on the disk: that of the file when it was written. Shared files have the same one.
    version: that of the file, see `Stat`.
    pieces: the number of pieces in it.
    """

    path: str
    listed: File
    origin: str
    version: Hashable
    pieces: int


class SharedFile(NamedTuple):
    """A file that a save shares, and the pieces in it.

    held: the file, open, so that its bytes can be copied even if the step is deleted meanwhile.
    """

    saved: SavedFile
    held: ArrayFile
    pieces: Sequence[Piece]


class Reused(NamedTuple):
    """The unchanged arrays of a save.

    shared: the files that have them.
    groups: the number of shards in each file that is written, in order; () puts all into one.
    on_commit: called after the commit with each file of the save and its pieces, the shared ones first.
    """

    shared: Sequence[SharedFile] = ()
    groups: Sequence[int] = ()
    on_commit: Callable[[Sequence[tuple[File, Sequence[Piece]]]], None] | None = None

    def committed(self, report: Sequence[tuple[File, int]], pieces: Sequence[Piece]) -> None:
        """Calls `on_commit`. `report`: each file, and the number of its first piece."""
        if self.on_commit:
            ends = [*(first for _, first in report[1:]), len(pieces)]
            self.on_commit([(file, pieces[first:end]) for (file, first), end in zip(report, ends, strict=False)])


def hold(store: Store, saved: SavedFile) -> ArrayFile | None:
    """Opens a file of an earlier step to share it. Returns None if it is not as it was written, which is logged."""
    try:
        found = store.stat(posixpath.join(saved.path, saved.listed.name))
        if found and found.version == saved.version:
            return ArrayFile(store, saved.path, saved.listed)
        problem = "changed after it was written" if found else "deleted"
    except (CorruptError, OSError) as error:
        problem = str(error)
    _log.info("%s: arrays in it that have not changed are written again: %s", saved.listed.name, problem)
    return None


def version(store: Store, path: str, listed: File) -> Hashable:
    """Returns the version of a file of a committed step; None if it is not known, so that no save shares the file."""
    try:
        found = store.stat(posixpath.join(path, listed.name))
    except OSError:  # The step is committed all the same.
        return None
    return found and found.version


def share(files: SaveFiles, shared: Sequence[tuple[str, SharedFile]], room: Room) -> tuple[list[tuple[File, int]], int]:
    """Puts shared files into a save, under new names.

    Returns the entry of each file and the number of its first piece, and how many bytes take no room.

    room: waits for room if the disk is full.

    Raises `SaveError` if bytes must be copied and are damaged.
    """
    report: list[tuple[File, int]] = []
    first = nbytes = 0
    for name, (saved, held, pieces) in shared:
        listed = File(name, saved.listed.size, saved.listed.header, saved.listed.xxh3)
        old = posixpath.join(saved.path, saved.listed.name)
        link = functools.partial(files.share, name, old, saved.version)
        if room.retry(posixpath.join(files.path, name), 0, link):
            nbytes += listed.size
        else:
            _log.warning("%s: copied to %s, because it got no second name (hard link) there", old, files.path)
            _copy(PatientSink(room, files, name), listed, held.contents(saved.listed))
        held.close()  # Retention may delete the step that it was opened in.
        report.append((listed, first))
        first += len(pieces)
    return report, nbytes


def _copy(sink: PatientSink, listed: File, contents: Iterable[tuple[int, memoryview]]) -> None:
    sink.preallocate(listed.size)
    try:
        for offset, buffer in contents:
            sink.write(buffer, offset)
    except CorruptError as error:
        raise SaveError(f"{error}; this step is not saved; the next save writes all arrays") from error
    sink.finish(listed.size, read_only=True)
