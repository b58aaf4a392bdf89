"""Second copies of array files, written during a save if each host has a disk of its own.

With a copy on the disk of another host, the step outlives its host before it is uploaded. Copies are made from memory,
without network traffic: a keeper (see `_processes.keepers`) also holds the pieces of a file, and writes the same bytes
as the process whose file it copies. After the commit, `complete_copies` fetches the files that still lack a copy.
"""

import contextlib
import logging
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from .._core.entries import Entry
from .._processes import assignment
from .._processes.assignment import Assignment, Piece
from .._pytree.leaves import LocalShard
from ..formats.treering.manifest_fields import File
from ..formats.treering.removal import logging_errors
from ..formats.treering.save_files import SaveFiles
from ..stores.store import Sink
from . import layout
from .layout import PlannedFile

_log = logging.getLogger("treering")


class PlannedCopy(NamedTuple):
    """A second copy before it is written.

    name, file: the name and the plan of the file that it copies, which another process writes.
    pieces: the pieces of that file, as shards of this process.
    """

    name: str
    file: PlannedFile
    pieces: Sequence[Piece]


def plan(
    entries: Sequence[Entry],
    shards: Sequence[LocalShard],
    shares: Mapping[int, Assignment],
    index: int,
    count: int,
    token: str,
) -> list[PlannedCopy]:
    """Returns the second copies that process `index` of `count` writes."""
    found: list[PlannedCopy] = []
    for writer, pieces in assignment.kept_pieces(entries, shards, shares, index).items():
        # All files of the writer are planned again here, because the name of each depends on how many there are.
        files: dict[int, list[PlannedFile]] = {}
        for keeper, sizes in assignment.sizes_by_keeper(entries, shares, writer).items():
            # The pieces of other keepers are only planned, so they need no shard: -1 stands for it.
            own = pieces if keeper == index else [Piece(leaf, box, -1, 0, nbytes) for leaf, box, nbytes in sizes]
            files[keeper] = layout.plan(entries, own)
        names = iter(layout.names(token, sum(map(len, files.values())), writer, count))
        named = [(keeper, next(names), file) for keeper, own in files.items() for file in own]
        found += [PlannedCopy(name, file, pieces) for keeper, name, file in named if keeper == index]
    return found


class OptionalSink:
    """Writes a second copy; see `Sink`. An `OSError` ends the copy and not the save: later calls do nothing."""

    def __init__(self, files: SaveFiles, name: str):
        self._files, self._name = files, name
        self._sink: Sink | None = None
        self._problem: OSError | None = None
        with self._ending_copy_on_error():
            self._sink = files.create(name, waits=False)

    def preallocate(self, nbytes: int) -> memoryview | None:
        if sink := self._sink:
            with self._ending_copy_on_error():
                return sink.preallocate(nbytes)
        return None

    def write(self, data: memoryview, offset: int) -> None:
        if sink := self._sink:
            with self._ending_copy_on_error():
                sink.write(data, offset)

    def finish(self, nbytes: int) -> None:
        if sink := self._sink:
            with self._ending_copy_on_error():
                sink.finish(nbytes, read_only=True)

    def end(self) -> bool:
        """Returns True if the copy is complete. Otherwise removes it and logs the error."""
        if self._problem is None:
            return True
        self._files.discard(self._name)
        path = posixpath.join(self._files.path, self._name)
        _log.warning(
            "%s: this second copy cannot be written: %s. It is fetched over the network after the commit; if that "
            "fails too, check this disk",
            path, self._problem,
        )  # fmt: skip
        return False

    @contextlib.contextmanager
    def _ending_copy_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._sink, self._problem = None, error


def differing_copies(listed: Sequence[Sequence[File]], copies: Sequence[Sequence[File]]) -> list[str]:
    """Returns the names of the copies whose bytes differ from the files that they copy.

    listed: the files that each process has written. copies: the second copies that each process has written.
    """
    files = {file.name: file for own in listed for file in own}
    return [copy.name for own in copies for copy in own if files.get(copy.name) != copy]


def remove(files: SaveFiles, names: Collection[str]) -> None:
    """Removes the copies with these names, which differ from the files that they copy."""
    for name in names:
        files.discard(name)
        _log.warning(
            "%s: this second copy is removed, because it differs from the file that it copies: two processes hold "
            "different values of a replicated array. The checkpoint has those of the other process; make the array "
            "equal in all processes, such as by the same seed",
            posixpath.join(files.path, name),
        )
    if names:
        with logging_errors(files.path):
            files.store.settle(files.path)
