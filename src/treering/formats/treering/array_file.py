"""Open array files: their header, and reads that verify the blocks.

The header says where the tensors are and gives the checksum of every block.
"""

import contextlib
import logging
import mmap
import posixpath
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from ..._core.leaf_paths import join_names
from ..._threads.pool import in_parallel
from ..._threads.preload_decoders import preload_decoders
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsupportedError
from ...stores.buffers import aligned, merge
from ...stores.file_io import open_with_checksums, opened
from ...stores.read_errors import reading
from ...stores.store import Store
from ..safetensors import header as safetensors
from . import manifest
from .manifest import BLOCK
from .manifest_fields import File
from .piece_reads import Memory, PieceRead

_LARGE_HEADER_BYTES = 1 << 20  # a header from this size on is not parsed to find a few tensors
_MAX_SINGLE_LOOKUPS = 4  # tensors that are found in the text of such a header before all of it is parsed
_log = logging.getLogger("treering")


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


class ArrayFile:
    """An open array file whose size and header are verified. For `expected` and `into` see `Store.open`."""

    def __init__(self, store: Store, directory: str, listed: File, expected: int = 0, into: memoryview | None = None):
        self._blob = blob = open_with_checksums(store, posixpath.join(directory, listed.name), expected, into)
        self.path, self.size = blob.path, blob.size
        size = self.size
        if size != listed.size:
            raise CorruptError(f"{self.path}: expected {listed.size} bytes, found {size}; it was cut short or changed")
        self.header = ArrayHeader(self._read_header(listed), size, self.path)
        self._verified = bytearray(self.header.blocks)
        # The last block of the previous read, with its number: the next read often begins in the same block.
        self._last_block: tuple[int, bytes] | None = None
        # Otherwise thousands of files may each keep a block in memory.
        self._keeps_last_block = store.object_bytes is None

    def _read_header(self, listed: File) -> bytearray:
        data = bytearray(listed.header)
        self._blob.read_into(memoryview(data), 0)
        if manifest.xxh3(data) != listed.xxh3:
            # The bytes may have changed in a cache or on the way. Only a second read from the place where they are
            # stored shows damage.
            self._blob.read_again(memoryview(data), 0)
            if manifest.xxh3(data) == listed.xxh3:
                self._report_second_reading("the header")
        if manifest.xxh3(data) != listed.xxh3:
            raise CorruptError(f"{self.path}: the header's checksum does not fit its bytes; it is damaged")
        return data

    def close(self) -> None:
        """Closes the file. Arrays that map it stay valid."""
        self._blob.close()

    def contents(self, listed: File) -> Iterator[tuple[int, memoryview]]:
        """The file from one end to the other, each block checked: offsets and aligned buffers, the last padded.

        The buffers are aligned, and the last one is padded. Raises `CorruptError` for damage.
        """
        header, size = self._read_header(listed), self.header.size
        for begin in range(0, self.size, self._blob.read_bytes):
            end = min(begin + self._blob.read_bytes, self.size)
            buffer = aligned(end - begin)
            inside = header[begin:end]
            buffer[: len(inside)] = inside
            if end > size:
                first, last = max(begin - size, 0), end - size
                memory = self.memory([(first, last)], verify=True, requested=False)
                bytes_ = memory.view(PieceRead(0, first, last, (last - first,)), np.dtype(np.uint8))
                buffer[len(inside) : end - begin] = bytes_.data
            yield begin, buffer

    def can_mmap(self, requested: bool | None) -> bool:
        """Returns True if the file is mapped rather than copied."""
        return self._blob.local if requested is None else requested

    def memory(self, ranges: list[tuple[int, int]], verify: bool, requested: bool | None) -> Memory:
        """Returns memory that holds the byte ranges of the buffer. With `verify`, raises `CorruptError` for damage."""
        within = [(begin + self.header.size, end + self.header.size) for begin, end in ranges]
        if self.can_mmap(requested) and (mapped := self._blob.mapped(within)) is not None:
            if not verify:
                self._blob.populate(mapped, within)
                return Memory([(-self.header.size, mapped)])
            if not (odd := self.bad_blocks(ranges, mapped)):
                return Memory([(-self.header.size, mapped)])
            # The mapping is shared with arrays that earlier unverified reads returned. A caller may have written into
            # such an array, and then the block in memory differs from the undamaged file. So the file itself is
            # checked here, and the bytes are read into memory of their own below.
            for block in odd:
                self._verified[block] = 0
            if bad := self.bad_blocks([(block * BLOCK, block * BLOCK + 1) for block in odd]):
                self._raise_damaged(bad)
        blocks = _blocks(ranges)
        places = [self.header.size + first * BLOCK for first, _ in blocks]
        lengths = [self._run_bytes(*run) for run in blocks]
        taken = self._blob.take([(at, at + length) for at, length in zip(places, lengths, strict=True)])
        memories = taken or [aligned(length) for length in lengths]
        runs = [(first * BLOCK, memory) for (first, _), memory in zip(blocks, memories, strict=True)]
        again, self._last_block = self._last_block, None
        bad: list[int] = []

        def work(job: tuple[int, int, int, memoryview]) -> None:
            first, last, start, memory = job
            target = memory[first * BLOCK - start :][: self._run_bytes(first, last)]
            if taken:
                pass
            elif again and again[0] == first:
                target[: len(again[1])] = again[1]
                self._read(first + 1, target[len(again[1]) :])
            else:
                self._read(first, target)
            if verify:
                bad.extend(self._find_bad_twice(first, last, target))

        jobs = [
            (*chunk, start, memory)
            for (start, memory), run in zip(runs, blocks, strict=True)
            for chunk in self._chunks(*run)
        ]
        in_parallel(jobs, work, self._blob.readers)
        self._blob.forget()
        if bad:
            self._raise_damaged(sorted(bad))
        if runs and self._keeps_last_block:
            start, memory = runs[-1]
            block = (start + len(memory) - 1) // BLOCK
            self._last_block = block, bytes(memory[block * BLOCK - start :][: self._run_bytes(block, block + 1)])
        return Memory(runs)

    def bad_blocks(self, ranges: list[tuple[int, int]], mapped: mmap.mmap | None = None) -> list[int]:
        """Returns the numbers of the damaged blocks among those that hold the byte ranges. Works in parallel.

        A block that was found undamaged before is not checked again. With `mapped`, the blocks are read into that
        mapping of the file and checked there.
        """
        jobs = [chunk for run in _blocks(ranges) for chunk in self._chunks(*run)]
        if mapped is None:
            jobs = [chunk for chunk in jobs if not all(self._verified[slice(*chunk)])]
        bad: list[int] = []
        scratch = threading.local()

        def work(job: tuple[int, int]) -> None:
            length = self._run_bytes(*job)
            if mapped is not None:
                begin = self.header.size + job[0] * BLOCK
                self._blob.populate(mapped, [(begin, begin + length)])
                if all(self._verified[slice(*job)]):
                    return
                target = memoryview(mapped)[begin : begin + length]
            else:
                if not hasattr(scratch, "buffer"):
                    scratch.buffer = aligned(self._blob.read_bytes)
                target = scratch.buffer[:length]
                self._read(job[0], target)
            bad.extend((self._find_bad if mapped is not None else self._find_bad_twice)(*job, target))

        in_parallel(jobs, work, self._blob.readers)
        self._blob.forget()
        return sorted(bad)

    def leaves(self, block: int) -> tuple[str, ...]:
        """Returns the paths of the leaves with bytes in a block."""
        begin, end = block * BLOCK, (block + 1) * BLOCK
        inside = (
            key.rsplit("~@", 1)[0]
            for key, tensor in self.header.tensors.items()
            if tensor.data_offsets[0] < end and tensor.data_offsets[1] > begin
        )
        return tuple(inside)

    def _read(self, first: int, target: memoryview) -> None:
        self._blob.read_into(target, self.header.size + first * BLOCK)

    def _chunks(self, first: int, last: int) -> list[tuple[int, int]]:
        step = self._blob.read_bytes // BLOCK
        return [(block, min(block + step, last)) for block in range(first, last, step)]

    def _find_bad(self, first: int, last: int, data: memoryview) -> list[int]:
        """Returns the blocks whose bytes differ from the saved ones."""
        bad = []
        for block in range(first, last):
            part = data[(block - first) * BLOCK : (block - first + 1) * BLOCK]
            if self._is_valid_block(block, part):
                self._verified[block] = 1
            else:
                bad.append(block)
        return bad

    def _find_bad_twice(self, first: int, last: int, data: memoryview) -> list[int]:
        """Returns the blocks whose bytes differ from the saved ones, even when they are read a second time."""
        bad = []
        for block in self._find_bad(first, last, data):
            part = data[(block - first) * BLOCK : (block - first + 1) * BLOCK]
            self._blob.read_again(part, self.header.size + block * BLOCK)
            if self._is_valid_block(block, part):
                self._verified[block] = 1
                self._report_second_reading(f"block {block}")
            else:
                bad.append(block)
        return bad

    def _is_valid_block(self, block: int, data: memoryview) -> bool:
        return manifest.xxh3(data) == self.header.checksums[16 * block : 16 * block + 16]

    def _report_second_reading(self, what: str) -> None:
        _log.warning(
            "%s: %s came wrong at first, and right when it was read once more: something on the way changes bytes; "
            "look at memory, network and disk",
            self.path,
            what,
        )

    def _run_bytes(self, first: int, last: int) -> int:
        return min(last * BLOCK, self.size - self.header.size) - first * BLOCK

    def _raise_damaged(self, blocks: list[int]) -> None:
        touched = dict.fromkeys(leaf for block in blocks for leaf in self.leaves(block))
        raise CorruptError(
            f"{self.path}: {len(blocks)} of {len(self._verified)} blocks are not what was saved (block {blocks[0]} "
            f"first); damaged leaves: {join_names(tuple(touched))}; restore an earlier step or a copy of this one"
        )


def _blocks(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the blocks that hold the byte ranges, as half-open runs of block numbers."""
    return merge([(begin // BLOCK, -(-end // BLOCK)) for begin, end in ranges if end > begin])
