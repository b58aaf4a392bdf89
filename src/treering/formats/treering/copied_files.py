"""The array files that a process has copied to a bucket, so that equal files of later checkpoints need no upload."""

from ...stores.store import FinishedFile, Stored
from .manifest_fields import File
from .save_files import SaveFiles
from .shared_files import content


class CopiedFiles:
    """The array files of the last two checkpoints that this process has copied to a run in a bucket, by content.

    All of their bytes were verified. The server copies them to checkpoints with equal files. If one was deleted or
    replaced, as its version tells, the file is uploaded as usual.
    """

    def __init__(self) -> None:
        self._newest: tuple[str, dict[tuple[int, int, str], FinishedFile]] = ("", {})
        self._before: dict[tuple[int, int, str], FinishedFile] = {}

    def reuse(self, files: SaveFiles, listed: File) -> bool:
        """Lets the server make a file of `files` from an equal one. Returns False if it must be uploaded."""
        key = content(listed)
        old = self._newest[1].get(key) or self._before.get(key)
        if old is None or files.store.sharing != "copies":
            return False
        try:
            sink = files.share(listed.name, old)
        except FileNotFoundError:
            return False
        if sink is not None:
            self.note(files.path, listed, sink.stored)
        return sink is not None

    def note(self, path: str, listed: File, stored: Stored | None) -> None:
        """Notes a file of the checkpoint at `path`, by the answer of the store."""
        if stored is None:
            return
        if path != self._newest[0]:
            self._before, self._newest = self._newest[1], (path, {})
        self._newest[1][content(listed)] = FinishedFile(f"{path}/{listed.name}", stored.version, listed.size)
