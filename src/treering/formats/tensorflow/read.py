"""Reads TensorFlow's checkpoints: the index, and arrays with checksums."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, Cells, box_shape
from ..._core.entries import ArrayEntry, Entry, ValueEntry, lost_entry
from ..._core.values import encode
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import open_fetched
from ...stores.read_errors import ReplacedError, raise_if_momentary
from ...stores.store import Blob, Store
from .._shared.extents import Runs, check_shape
from .._shared.pieces import Pieces
from .._shared.reader import ForeignReader, Stored, attempt, beginning_within, check_file
from .table import (
    DTYPES,
    TEXT,
    Cursor,
    IndexTensor,
    box_of,
    crc32c,
    items,
    masked,
    part_key,
    path_of,
    read_header,
    read_tensor,
)

_CHECKSUM_SLICE_BYTES = 16 << 20  # bytes in memory while a checksum is computed
_MAX_TEXT_BYTES = 64 << 20  # bytes of all tensors of text together; opening a checkpoint reads them


class _Bundle:
    """Holds an index, and its files of data, each opened when it is first needed."""

    def __init__(self, store: Store, index: str):
        file = open_fetched(store, index)
        self.index, self.nbytes = index, file.size
        self.tensors = dict(items(file))
        if b"" not in self.tensors:
            raise CorruptError(f"{index}: expected an index with a header, found none")
        self.header = read_header(self.tensors.pop(b""), index)
        self._store, self._files = store, dict[int, Blob]()

    def tensor(self, key: bytes) -> IndexTensor:
        """Returns an entry of the index. Raises `CorruptError` if there is none."""
        if key not in self.tensors:
            raise CorruptError(f"{self.index}: expected an entry {key!r:.100}, found none")
        return read_tensor(self.tensors[key], self.index)

    def file(self, tensor: IndexTensor) -> Blob:
        """Returns the file with the bytes of a tensor."""
        shard = tensor.shard
        if shard not in self._files:
            if not 0 <= shard < self.header.shards:
                raise CorruptError(
                    f"{self.index}: expected one of {self.header.shards} files of data, found number {shard}"
                )
            path = f"{self.index.removesuffix('.index')}.data-{shard:05}-of-{self.header.shards:05}"
            self._files[shard] = open_fetched(self._store, check_file(self._store, path, self.index))
            self.nbytes += self._files[shard].size
        return self._files[shard]


class TensorFlowReader(ForeignReader):
    """Reads a checkpoint. Compares the checksum of an array once, when `verify` first reads a part of it."""

    has_checksums = True

    def __init__(self, store: Store, path: str, index: str, step: int | None):
        self._bundle = _Bundle(store, index)
        self._parts: dict[str, list[IndexTensor]] = {}
        self._verified_paths: set[str] = set()
        entries: list[Entry] = []
        arrays: dict[str, Stored] = {}
        problems: list[str] = []
        text = 0
        for key in self._bundle.tensors:
            if key.startswith(b"\0"):
                continue  # a part of a tensor, whose own entry lists it
            name, tensor = path_of(key, index), self._bundle.tensor(key)
            if tensor.dtype == TEXT and not tensor.parts:
                text += tensor.size
                if text > _MAX_TEXT_BYTES:
                    raise UnsupportedError(
                        f"{index}: expected at most {_MAX_TEXT_BYTES} bytes of text, found more, up to {name}"
                    )
                entries += _texts(self._bundle, name, tensor)
            elif tensor.dtype not in DTYPES:
                problems.append(f"  {name}: its dtype has the number {tensor.dtype} in TensorFlow")
            else:
                found, self._parts[name] = _stored(self._bundle, key, tensor)
                if isinstance(found, list):
                    entries.append(lost_entry(name, *found))
                else:
                    entries.append(ArrayEntry(name, "numpy", DTYPES[tensor.dtype], tensor.shape))
                    arrays[name] = found
        if problems:
            raise UnsupportedError("\n".join([f"{index}: Treering cannot read these tensors:", *problems]))
        super().__init__("tensorflow", path, entries, arrays, step=step, nbytes=self._bundle.nbytes)

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        for entry, _ in wanted if verify else ():
            self._verify(entry.path)
        return super().read(wanted, verify=verify, mmap=mmap)

    def _damage_of(self, entry: ArrayEntry, begin: int, end: int) -> Iterator[str]:
        for part in beginning_within(begin, end, ((part, part.size) for part in self._parts[entry.path])):
            try:
                self._verify_part(part, entry.path)
            except ReplacedError:
                raise
            except (CorruptError, OSError) as error:
                raise_if_momentary(error)
                yield str(error)

    def _verify(self, path: str) -> None:
        if path not in self._verified_paths:
            for part in self._parts.get(path, ()):  # a lost array has no parts
                self._verify_part(part, path)
            self._verified_paths.add(path)

    def _verify_part(self, part: IndexTensor, path: str) -> None:
        file, crc = self._bundle.file(part), 0
        buffer = np.empty(min(part.size, _CHECKSUM_SLICE_BYTES), np.uint8).data
        for begin in range(0, part.size, _CHECKSUM_SLICE_BYTES):
            data = buffer[: part.size - begin]
            file.read_into(data, part.offset + begin)
            crc = crc32c(data, crc)
        if masked(crc) != part.crc:
            raise CorruptError(
                f"{file.path}: the bytes of {path} are not what was saved; the checksum of the {part.size} from "
                f"{part.offset} on differs"
            )


def _stored(bundle: _Bundle, key: bytes, tensor: IndexTensor) -> tuple[Stored | list[str], list[IndexTensor]]:
    """Opens an array, or returns why it cannot be read; also returns the entries with its bytes."""
    check_shape(tensor.shape, bundle.index)
    if not tensor.parts:
        runs = _runs(bundle, tensor)
        return [str(runs)] if isinstance(runs, CorruptError) else runs, [tensor]
    boxes = [box_of(part, tensor.shape, bundle.index) for part in tensor.parts]
    try:
        cells, _ = Cells.of(boxes)
    except ValueError:
        cells = None
    if cells is None or cells.shape != tensor.shape:
        raise CorruptError(f"{bundle.index}: the parts of {key!r:.100} do not make up its shape {list(tensor.shape)}")
    parts = [bundle.tensor(part_key(key, part)) for part in tensor.parts]
    for part, box in zip(parts, boxes, strict=True):
        if part.parts or part.dtype != tensor.dtype or part.shape != box_shape(box):
            raise CorruptError(f"{bundle.index}: a part of {key!r:.100} has another dtype or size")
    found = [(box, _runs(bundle, part)) for box, part in zip(boxes, parts, strict=True)]
    if reasons := [str(runs) for _, runs in found if isinstance(runs, CorruptError)]:
        return reasons, parts
    own = [(box, runs) for box, runs in found if isinstance(runs, Runs)]
    return Pieces(own, dtypes.to_numpy(DTYPES[tensor.dtype])), parts


def _runs(bundle: _Bundle, tensor: IndexTensor) -> Runs | CorruptError:
    """Opens the bytes of an entry, or returns why they are missing."""
    dtype = dtypes.to_numpy(DTYPES[tensor.dtype])
    stored = np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype  # ml_dtypes are native-endian only
    order = "<" if bundle.header.order == "little" else ">"

    def runs() -> Runs:
        run = bundle.file(tensor), tensor.offset, tensor.size
        return Runs.of([run], tensor.shape, stored.newbyteorder(order), dtype)

    return attempt(runs)


def _texts(bundle: _Bundle, name: str, tensor: IndexTensor) -> list[Entry]:
    """Reads the elements of a tensor of text; a single lost entry stands for all if they cannot be read."""
    check_shape(tensor.shape, bundle.index)
    found = attempt(lambda: [*_read_texts(bundle, name, tensor)])
    return [lost_entry(name, str(found), tree=True)] if isinstance(found, CorruptError) else [*found]


def _read_texts(bundle: _Bundle, name: str, tensor: IndexTensor) -> Iterator[ValueEntry]:
    """Reads a tensor of text: first the sizes and their checksum, then the bytes."""
    count = math.prod(tensor.shape)
    if count > tensor.size:
        raise CorruptError(f"{bundle.index}: {name} has {count} elements in {tensor.size} bytes")
    if not tensor.size:
        return
    data = bundle.file(tensor).read(tensor.offset, tensor.size)
    cursor = Cursor(data, bundle.file(tensor).path)
    sizes = [cursor.varint() for _ in range(count)]
    crc = crc32c(b"".join(size.to_bytes(4 if size < 1 << 32 else 8, bundle.header.order) for size in sizes))
    checksum = cursor.take(4)
    texts = [cursor.take(size) for size in sizes]
    full_crc = crc32c(b"".join(texts), crc32c(checksum, crc))
    if int.from_bytes(checksum, bundle.header.order) != masked(crc) or masked(full_crc) != tensor.crc or cursor.left():
        raise CorruptError(f"{bundle.file(tensor).path}: the bytes of {name} are not what was saved")
    if not count:  # an empty tensor may claim any number of rows
        return
    for index, text in zip(itertools.product(*map(range, tensor.shape)), texts, strict=True):
        yield ValueEntry("/".join([name, *map(str, index)]), *encode(text))
