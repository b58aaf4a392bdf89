"""The array files that a process has copied to a run, so that equal files of other checkpoints are not sent again."""

import contextlib
import posixpath

from ...stores.store import FinishedFile, Sink
from .manifest_fields import File
from .save_files import SaveFiles

_Files = dict[tuple[int, int, str], FinishedFile]


class CopiedFiles:
    """The array files of the last two checkpoints that this process has copied to a run, by content.

    All of their bytes were verified. In a bucket the server copies them to checkpoints with equal files. With `links`,
    on a disk, a checkpoint gets hard links to files of the last but one. So two copies take turns, and damage to one
    leaves the checkpoint next to it. If a file was deleted or replaced, as its version tells, it is sent as usual.
    """

    def __init__(self, *, links: bool = False) -> None:
        self._links = links
        self._copy = ("", "")  # the path and the token of the checkpoint that is copied
        self._files, self._last, self._last_but_one = _Files(), _Files(), _Files()

    def reuse(self, files: SaveFiles, listed: File) -> bool:
        """Makes a file of `files` from an equal one. Returns False if it must be sent."""
        self._begin(files)
        path = posixpath.join(files.path, listed.name)
        for known in self._sources(files.store.sharing):
            old = known.get(listed.content)
            if old is None or old.path == path:  # An attempt that failed noted its own files, which are removed.
                continue
            with contextlib.suppress(FileNotFoundError):
                if sink := files.share(listed.name, old):
                    self.note(files, listed, sink)
                    return True
        return False

    def note(self, files: SaveFiles, listed: File, sink: Sink) -> None:
        """Notes a finished file of a checkpoint."""
        self._begin(files)
        path = posixpath.join(files.path, listed.name)
        if sink.stored:
            version = sink.stored.version
        elif self._links and (found := files.store.stat(path)):
            version = found.version
        else:
            return
        self._files[listed.content] = FinishedFile(path, version, listed.size)

    def _begin(self, files: SaveFiles) -> None:
        # An overwritten checkpoint has the same path, and other names of files.
        if self._copy != (files.path, files.token):
            self._copy = files.path, files.token
            if self._files:
                self._files, self._last, self._last_but_one = _Files(), self._files, self._last

    def _sources(self, sharing: str | None) -> tuple[_Files, ...]:
        if sharing == "copies":
            return self._last, self._last_but_one
        return (self._last_but_one,) if self._links and sharing == "links" else ()
