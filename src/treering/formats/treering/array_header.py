"""The header of an array file. It says where the tensors are and gives the checksum of every block."""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ..._threads.preload_decoders import preload_decoders
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import opened
from ...stores.read_errors import reading
from ...stores.store import Store
from ..safetensors import header as safetensors
from . import manifest
from .manifest import BLOCK
from .manifest_fields import File

_LARGE_HEADER_BYTES = 1 << 20  # a header from this size on is not parsed to find a few tensors
_MAX_SINGLE_LOOKUPS = 4  # tensors that are found in the text of such a header before all of it is parsed


class ArrayHeader:
    """The header of an array file of `file_size` bytes. The caller has verified the checksum of its bytes, `data`.

    `checksums` has 16 hexadecimal digits for each block. `dtypes` maps the keys of tensors to dtypes that safetensors
    lacks. Raises `UnsupportedError` for a header that breaks the rules of this version. If the header is large, the
    entries of single tensors are checked only when they are looked up.
    """

    def __init__(self, data: bytearray, file_size: int, path: str):
        self._data, self._file_size, self._path = data, file_size, path
        self._tensors: Mapping[str, safetensors.Tensor] | None = None
        self._lookups = 0  # of single tensors, without parsing all of the header
        self.size = len(data)
        self.blocks = -(-(file_size - self.size) // BLOCK)
        try:
            metadata = safetensors.decode_metadata(data, path)
        except CorruptError as error:
            _check_version(_metadata(data), path)
            raise manifest.invalid(str(error)) from None
        _check_version(metadata, path)
        try:
            if data[8:9] != b"{" or not data.rstrip(b" ").endswith(b"}"):
                raise CorruptError(f"{path}: expected a header that is a JSON object padded with spaces")
            if safetensors.header_size(bytes(data[:8]), file_size, path) != self.size:
                raise CorruptError(f"{path}: the size of the header differs from the one in the manifest")
            self.checksums = metadata.get("xxh3", "")
            if metadata.get("block") != str(BLOCK) or not _is_checksums(self.checksums, self.blocks):
                raise CorruptError(f"{path}: expected {self.blocks} checksums of blocks of {BLOCK} bytes")
        except CorruptError as error:
            raise manifest.invalid(str(error)) from None
        of_tensors = ((key, value) for key, value in metadata.items() if key.startswith("dtype:"))
        self.dtypes = {key.removeprefix("dtype:"): dtype for key, dtype in of_tensors}
        self._metadata = metadata
        if self.size < _LARGE_HEADER_BYTES:
            self.tensors  # noqa: B018 (parses and checks all of them now)

    @property
    def tensors(self) -> Mapping[str, safetensors.Tensor]:
        """The tensors by their keys, in the order of the header."""
        data = self._data  # Taken before the test below: another thread replaces it once it has parsed the header.
        if self._tensors is not None:
            return self._tensors
        try:
            with gc_paused():
                header = safetensors.decode_header(data, self._path, self._metadata)
            safetensors.check_side_by_side(header, self._file_size, self._path)
        except CorruptError as error:
            raise manifest.invalid(str(error)) from None
        self._tensors = header.tensors
        self._data = bytearray()
        return header.tensors

    def tensor(self, key: str) -> safetensors.Tensor | None:
        """Returns the tensor with a key, or None without one."""
        if self._tensors is None and self._lookups < _MAX_SINGLE_LOOKUPS:
            self._lookups += 1
            tensor = safetensors.find_tensor(self._data, key)
            if tensor and 0 <= tensor.data_offsets[0] <= tensor.data_offsets[1] <= self._file_size - self.size:
                return tensor
        return (self._tensors or self.tensors).get(key)


class _HeaderMetadata(msgspec.Struct):
    metadata: Any = msgspec.field(name="__metadata__", default=None)


preload_decoders(_HeaderMetadata)


def check_version(store: Store, path: str, listed: File) -> None:
    """Raises `UnsupportedError` when a later version wrote an array file; one whose checksum is wrong is damaged."""
    try:
        with reading(path), opened(store, path, expected=listed.header) as blob:
            header = blob.read_up_to(min(listed.header, safetensors.MAX_HEADER_BYTES + 8))
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return  # A header that cannot be read is damage, which this function does not report.
    if manifest.xxh3(header) == listed.xxh3:
        _check_version(_metadata(header), path)


def _metadata(header: bytes | bytearray) -> Any:
    """Returns the metadata of a header, of any type because a later version may change it.

    Returns `UNSET` for bytes that are not a JSON object.
    """
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(memoryview(header)[8:], type=_HeaderMetadata).metadata
    return msgspec.UNSET


def _check_version(metadata: Any, path: str) -> None:
    """Raises `UnsupportedError` for the metadata of a later version. The caller has verified the header's checksum."""
    if metadata is msgspec.UNSET:
        return  # The caller decodes all of the header next, and that names the fault.
    about = metadata if isinstance(metadata, dict) else {}
    version = about.get("version")
    requires = f" that requires {about['requires']!r:.100}" if "requires" in about else ""
    if about.get("format") != manifest.FORMAT or version != str(manifest.VERSION) or requires:
        raise UnsupportedError(
            f"{path}: expected an array file of version {manifest.VERSION}, found version {version!r:.40}{requires}; "
            "it is undamaged, but a later release wrote it: upgrade treering to read it"
        )


def _is_checksums(text: str, count: int) -> bool:
    return len(text) == 16 * count and not text.strip("0123456789abcdef")
