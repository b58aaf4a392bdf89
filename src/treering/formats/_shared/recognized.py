"""A file that is written must be recognized as what it is: by its beginning, its end and its name.

Formats are told apart by marks that are also keys or names that users choose. Whatever is written opens as the format
that it was written in, or the save is refused before the file is in place.
"""

import contextlib
import posixpath
from collections.abc import Iterable, Iterator

from ...errors import CorruptError, UnsupportedError
from ...stores.store import Stat, Store, Writer
from .. import detect, get

_BEGIN = 1 << 17  # bytes that are kept, unless a format looks at more
_END = 64  # bytes


@contextlib.contextmanager
def new_file(store: Store, path: str, format: str, *, overwrite: bool, begin: int = _BEGIN) -> Iterator[Writer]:
    """Yields a file to write, as `Store.new_file` does; `begin` is how many bytes of it show the format.

    Raises `UnsupportedError`, and leaves nothing, if the file would not open as this format.
    """
    with store.new_file(path, overwrite=overwrite) as file:
        watched = Watched(file, begin)
        yield watched
        check(path, {path: watched}, format)


class Watched:
    """A file that is written, of which the beginning and the end are kept."""

    def __init__(self, file: Writer, begin: int = _BEGIN):
        self._file, self._most = file, begin
        self.begin, self.end = bytearray(), b""

    @property
    def size(self) -> int:
        return self._file.size

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        view = memoryview(data).cast("B")
        self.begin += view[: max(self._most - len(self.begin), 0)]
        self.end = (self.end + bytes(view[-_END:]))[-_END:]


def check(path: str, files: dict[str, Watched], format: str) -> None:
    """Raises `UnsupportedError` if a checkpoint of these files would not be recognized as one of its format."""
    try:
        found = detect(_Planned(files), path).name  # pyright: ignore[reportArgumentType] (what telling formats apart needs)
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
    """Checks the same of a folder whose formats its files' names show. Names are paths within the folder."""
    check(path, {posixpath.join(path, name): Watched(_Nothing()) for name in names}, format)


class _Nothing:
    """An empty file."""

    size = 0

    def write(self, data: bytes | memoryview) -> None: ...


class _Planned:
    """The files of a checkpoint before they are in place, as far as telling formats apart reads a store."""

    def __init__(self, files: dict[str, Watched]):
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

    def open(self, path: str, *, expected: int = 0) -> "_Blob":
        if path not in self._files:
            raise FileNotFoundError(path)
        return _Blob(path, self._files[path])


class _Blob:
    """The beginning and the end of a file that is written."""

    def __init__(self, path: str, file: Watched):
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
