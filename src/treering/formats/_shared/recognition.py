"""Checks that a new file will open as the format in which it was written.

Treering recognizes a format by the beginning, the end and the name of a file. These may contain keys and names that
users choose, and so look like another format. Then the save is refused before the file is in place.
"""

import contextlib
import posixpath
from collections.abc import Iterable, Iterator

from ...errors import CorruptError, UnsupportedError
from ...stores.store import Stat, Store, Writer
from .. import detect, get

_BEGIN_BYTES = 1 << 17  # that are kept of the beginning of a file, unless a format asks for more
_END_BYTES = 64  # that are kept of its end


@contextlib.contextmanager
def new_file(store: Store, path: str, format: str, *, overwrite: bool, begin: int = _BEGIN_BYTES) -> Iterator[Writer]:
    """Yields a file to write, as `Store.new_file` does.

    begin: the number of bytes at its beginning that are needed to recognize the format.

    Raises `UnsupportedError`, and leaves no file, if the file would not open as this format.
    """
    with store.new_file(path, overwrite=overwrite) as file:
        watched = RecordingWriter(file, begin)
        yield watched
        check(path, {path: watched}, format)


class RecordingWriter:
    """A file that is being written. It keeps the beginning and the end of the data in memory."""

    def __init__(self, file: Writer, begin: int = _BEGIN_BYTES):
        self._file, self._head_bytes = file, begin
        self.begin, self.end = bytearray(), b""

    @property
    def size(self) -> int:
        return self._file.size

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        view = memoryview(data).cast("B")
        self.begin += view[: max(self._head_bytes - len(self.begin), 0)]
        self.end = (self.end + bytes(view[-_END_BYTES:]))[-_END_BYTES:]


def check(path: str, files: dict[str, RecordingWriter], format: str) -> None:
    """Raises `UnsupportedError` if Treering would not recognize a checkpoint of these files as one of this format."""
    try:
        found = detect(_PlannedStore(files), path).name  # pyright: ignore[reportArgumentType] (what telling formats apart needs)
    except (UnsupportedError, CorruptError):
        found = None
    if found != format:
        what = "would not be recognized when it is opened" if found is None else f"would open as {found!r}"
        raise UnsupportedError(
            f"{path}: a checkpoint of the format {format!r} with this name and these leaves {what}, so nothing was "
            f"written; choose another name ({', '.join(map('*'.__add__, get(format).suffixes)) or 'any other'}), "
            "rename the leaves with treering.rules.rename, or save in the native format"
        )


def check_names(path: str, names: Iterable[str], format: str) -> None:
    """Checks a folder whose format is recognized by the names of its files, as `check` does.

    names: paths within the folder.
    """
    check(path, {posixpath.join(path, name): RecordingWriter(_EmptyFile()) for name in names}, format)


class _EmptyFile:
    """An empty file."""

    size = 0

    def write(self, data: bytes | memoryview) -> None: ...


class _PlannedStore:
    """The files of a checkpoint that is not in place yet. It has the methods of `Store` that `detect` calls."""

    def __init__(self, files: dict[str, RecordingWriter]):
        self._files = files

    def glance(self, path: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def list(self, path: str) -> list[str]:
        below = posixpath.join(path, "")
        return sorted({file[len(below) :].partition("/")[0] for file in self._files if file.startswith(below)})

    def stat(self, path: str) -> Stat | None:
        if path in self._files:
            return Stat("file", self._files[path].size, 0.0, 0)
        return Stat("folder", 0, 0.0, 0) if self.list(path) else None

    def open(self, path: str, *, expected: int = 0) -> "_PlannedBlob":
        if path not in self._files:
            raise FileNotFoundError(path)
        return _PlannedBlob(path, self._files[path])


class _PlannedBlob:
    """The beginning and the end of a file that is being written, to read."""

    def __init__(self, path: str, file: RecordingWriter):
        self.path, self.size = path, file.size
        self._file = file

    def read_up_to(self, nbytes: int) -> bytes:
        return bytes(self._file.begin[:nbytes])

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset + nbytes <= len(self._file.begin):
            return bytes(self._file.begin[offset : offset + nbytes])
        begin = offset - (self.size - len(self._file.end))
        if begin < 0:
            raise CorruptError("expected the beginning or the end of a file")
        return self._file.end[begin : begin + nbytes]

    def close(self) -> None: ...
