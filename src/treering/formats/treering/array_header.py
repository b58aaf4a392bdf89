"""The header of an array file: where its tensors are, and the checksums of its blocks."""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ..._threads.decoding import learn
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsupportedError
from ...stores.read_errors import reading
from ...stores.store import Store
from ...stores.whole_files import opened
from ..safetensors import header as safetensors
from . import manifest
from .manifest import BLOCK
from .manifest_fields import File

_LARGE = 1 << 20  # bytes of a header that is not parsed for the sake of a few tensors
_FEW = 4


class ArrayHeader:
    """The header of an array file of `file_size` bytes, given by its bytes, whose checksum is right.

    `checksums` has 16 hexadecimal digits for each block, `dtypes` those of the tensors whose dtype safetensors does not
    have. What is not as this version has it raises `UnsupportedError`, about single tensors when one is looked up.
    """

    def __init__(self, data: bytearray, file_size: int, path: str):
        self._data, self._file_size, self._path = data, file_size, path
        self._tensors: Mapping[str, safetensors.Tensor] | None = None
        self._found = 0  # tensors, without parsing the others
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
                raise CorruptError(f"{path}: the header is no JSON object that is padded with spaces")
            if safetensors.header_size(bytes(data[:8]), file_size, path) != self.size:
                raise CorruptError(f"{path}: the header does not have the size that the manifest gives")
            self.checksums = metadata.get("xxh3", "")
            if metadata.get("block") != str(BLOCK) or not _is_checksums(self.checksums, self.blocks):
                raise CorruptError(f"{path}: expected {self.blocks} checksums of blocks of {BLOCK} bytes")
        except CorruptError as error:
            raise manifest.invalid(str(error)) from None
        of_tensors = ((key, value) for key, value in metadata.items() if key.startswith("dtype:"))
        self.dtypes = {key.removeprefix("dtype:"): dtype for key, dtype in of_tensors}
        self._metadata = metadata
        if self.size < _LARGE:
            self.tensors  # noqa: B018 (checked at once)

    @property
    def tensors(self) -> Mapping[str, safetensors.Tensor]:
        """All tensors by their keys, in the order of the header."""
        data = self._data  # first: another thread drops it when it has parsed it
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
        """A tensor by its key; None when there is none."""
        if self._tensors is None and self._found < _FEW:
            self._found += 1
            tensor = safetensors.find_tensor(self._data, key)
            if tensor and 0 <= tensor.data_offsets[0] <= tensor.data_offsets[1] <= self._file_size - self.size:
                return tensor
        return (self._tensors or self.tensors).get(key)


class _About(msgspec.Struct):
    metadata: Any = msgspec.field(name="__metadata__", default=None)


learn(_About)


def check_version(store: Store, path: str, listed: File) -> None:
    """Raises `UnsupportedError` when a later version wrote an array file; one whose checksum is wrong is damaged."""
    try:
        with reading(path), opened(store, path, expected=listed.header) as blob:
            header = blob.read_up_to(min(listed.header, safetensors.MAX_HEADER + 8))
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return  # that header cannot be checked
    if manifest.xxh3(header) == listed.xxh3:
        _check_version(_metadata(header), path)


def _metadata(header: bytes | bytearray) -> Any:
    """The metadata of a header, of whatever type a later version gives them; `UNSET` for what is no JSON object."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(memoryview(header)[8:], type=_About).metadata
    return msgspec.UNSET


def _check_version(metadata: Any, path: str) -> None:
    """Raises `UnsupportedError` for the metadata of a later version; the checksum of their header is right."""
    if metadata is msgspec.UNSET:
        return  # decoding the whole header says what is wrong
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
