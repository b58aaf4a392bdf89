"""Reads zip files, and archives that are a range of a file."""

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ...stores.store import Blob

_BUFFER_BYTES = 1 << 16  # bytes of the file that are read at a time; a smaller archive is read by one call
_MAX_DIRECTORY_BYTES = 256 << 20  # of the names and places of all files in an archive
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # magic, length of the name, length of the extra field
_ENCRYPTED = 1


def open_zip(file: Blob, begin: int = 0, nbytes: int | None = None) -> zipfile.ZipFile:
    """Opens the archive in a range of a file. Use it within `damage_of`."""
    size = file.size - begin if nbytes is None else nbytes
    if size <= _BUFFER_BYTES:
        return zipfile.ZipFile(io.BytesIO(file.read(begin, size)))
    return zipfile.ZipFile(_Buffered(_Raw(file, begin, size), _BUFFER_BYTES))


class ZipMember(NamedTuple):
    """Says where the bytes of an uncompressed file in an archive are. `crc` is its checksum."""

    offset: int
    nbytes: int
    crc: int


def locate(file: Blob, begin: int, nbytes: int, member: zipfile.ZipInfo, name: str) -> ZipMember:
    """Returns the place of a stored file in the archive that is a range of a file."""
    at = begin + member.header_offset
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
        raise UnsupportedError(f"{name}: expected {member.filename!r} uncompressed; unpack it, and save it again")
    if not begin <= at <= begin + nbytes - _LOCAL_HEADER.size:
        raise CorruptError(f"{name}: {member.filename!r} is outside the archive")
    magic, *lengths = _LOCAL_HEADER.unpack(file.read(at, _LOCAL_HEADER.size))
    offset = at + _LOCAL_HEADER.size + sum(lengths)
    if magic != b"PK\x03\x04" or offset + member.file_size > begin + nbytes:
        raise CorruptError(f"{name}: expected the {member.file_size} bytes of {member.filename!r}, found fewer")
    return ZipMember(offset, member.file_size, member.CRC)


@contextlib.contextmanager
def damage_of(name: str, kind: str, advice: str) -> Iterator[None]:
    """Turns errors of damaged zip files into `CorruptError`, those of files Python cannot unpack into others.

    kind: the expected kind of archive.
    advice: what to do with files that have a password or are of a later version of the zip format.
    """
    try:
        yield
    except UnsafeError as error:
        raise UnsafeError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None
    except TreeringError:
        raise
    except RuntimeError as error:  # of a password or a later version
        raise UnsupportedError(f"{name}: {error}; {advice}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, LookupError, OverflowError, struct.error) as error:
        raise CorruptError(f"{name}: expected {kind}: {error}") from None


class _Buffered(io.BufferedReader):
    """Refuses to read very much at once, as for a directory of files whose claimed size has no bytes behind it."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY_BYTES:
            raise UnsafeError(f"an archive with {size} bytes of names, too many to be read at once")
        return super().read(size)


class _Raw(io.RawIOBase):
    """Presents a range of a blob as a file that `zipfile` can read."""

    def __init__(self, blob: Blob, begin: int, nbytes: int):
        self._blob, self._begin, self._nbytes, self._position = blob, begin, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._position, self._nbytes)[whence]
        if at < 0:
            raise ValueError("an offset before the beginning")
        self._position = at
        return at

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] (parameter name)
        nbytes = max(min(len(buffer), self._nbytes - self._position), 0)
        if nbytes:
            self._blob.read_into(memoryview(buffer)[:nbytes], self._begin + self._position)
        self._position += nbytes
        return nbytes
