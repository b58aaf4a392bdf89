"""Versions of weights that trainers publish as compressed differences to the version before.

The layouts are those of slime (read in its `disk_delta.py` and in the receiver that it adds to SGLang) and of SkyRL
(`delta_checkpoint.py`), both of August 2026. A version without deltas is a checkpoint of Hugging Face.

Version 0 is the checkpoint that the engines were started from. It is not in the stream. To read versions that are made
from it, put it or a link to it next to them, under the name that a version 0 would have.
"""

import hashlib
import posixpath
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from ..._core import dtypes
from ..._core.boxes import Box, full_box
from ..._core.entries import ArrayEntry
from ..._core.source import Source
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores.store import Store
from .._shared.reader import ForeignReader, Stored, check_file
from .._shared.zstd import unpack
from ..safetensors import FORMAT as SAFETENSORS
from ..safetensors.folder import SUFFIX
from ..safetensors.read import open_file
from ..safetensors.schema import path_of

_MAX_CHAIN = 100_000  # versions back to a complete one


class TensorDelta(NamedTuple):
    """The difference of a tensor: the file with it, its key there, and the checksum of the tensor's new bytes.

    Without `checksum`, the metadata of the file has it under the key of the tensor.
    """

    file: str
    key: str
    algorithm: str
    checksum: str | None = None


class VersionDelta(NamedTuple):
    """A version. `parts` has the tensors that have changed, by their keys; `encoding` is "xor" or "overwrite"."""

    path: str
    number: int
    base: int
    encoding: str
    parts: Mapping[str, TensorDelta]
    nbytes: int


class WrittenDelta(NamedTuple):
    """A tensor that has changed: its key, its file, the checksum of its new bytes, and the bytes of its difference."""

    key: str
    entry: ArrayEntry
    file: str
    checksum: str
    nbytes: int


class DeltaFormat(Protocol):
    """A format of deltas; see `weight_streams.DeltaStream`."""

    name: str
    mark: str
    complete_every: int | None

    def is_delta(self, store: Store, path: str) -> bool: ...
    def is_complete(self, store: Store, path: str) -> bool: ...
    def is_unfinished(self, store: Store, path: str) -> bool: ...
    def number_of(self, name: str) -> int | None: ...
    def path_of(self, stream: str, number: int) -> str: ...
    def read_delta(self, store: Store, path: str) -> VersionDelta | None: ...
    def file_name(self, number: int, count: int) -> str: ...
    def describe(self, number: int, changes: Sequence[WrittenDelta]) -> dict[str, Any]: ...


def open_version(layout: DeltaFormat, store: Store, path: str) -> Source:
    """Opens a version together with those that it is made from, back to a complete one, which is opened as it is.

    Raises `CorruptError` if one is missing, damaged or out of order, and `UnsupportedError` for an unknown encoding.
    """
    chain, at = find_chain(layout, store, path)
    base: Any = SAFETENSORS.open(store, at)
    if not chain:
        return base
    entries = {entry.path: entry for entry in base.entries.values() if isinstance(entry, ArrayEntry)}
    arrays: dict[str, Stored] = dict(base._arrays)
    for delta in reversed(chain):
        files: dict[str, Any] = {}
        for key, part in delta.parts.items():
            if (entry := entries.get(path_of(key))) is None:
                raise CorruptError(f"{delta.path}: expected only tensors of {at}, found {key!r}")
            if part.file not in files:
                files[part.file] = _opened(store, delta.path, part.file)
            file = files[part.file]
            checksum = part.checksum or (file.metadata.get(key) if isinstance(file.metadata, dict) else None)
            if not isinstance(checksum, str):
                raise CorruptError(f"{file.path}: expected the checksum of {key!r} in the metadata, found none")
            old = arrays[entry.path]
            kept = (old.base, old.steps) if isinstance(old, _Changed) else (old, ())
            arrays[entry.path] = _Changed(
                entry, kept[0], (*kept[1], _VersionStep(delta, part._replace(checksum=checksum), file))
            )
    return ForeignReader(
        layout.name, path, [*base.entries.values()], arrays, skeleton=base.skeleton, step=chain[0].number,
        metadata=base.metadata, nbytes=chain[0].nbytes, numbers_are_arrays=base.numbers_are_arrays,
    )  # fmt: skip


def find_chain(layout: DeltaFormat, store: Store, path: str) -> tuple[list[VersionDelta], str]:
    """Returns a version and those that it is made from, newest first, and the path of the complete one before them.

    Raises `CorruptError` and `UnsupportedError`, as `open_version` does.
    """
    stream = posixpath.dirname(path)
    chain: list[VersionDelta] = []
    at = path
    while delta := layout.read_delta(store, at):
        if (chain and delta.number != chain[-1].base) or delta.base >= delta.number or len(chain) == _MAX_CHAIN:
            raise CorruptError(f"{at}: expected version {chain[-1].base if chain else '?'}, found {delta.number}")
        chain.append(delta)
        at = layout.path_of(stream, delta.base)
        if store.stat(at) is None:
            base = posixpath.basename(at)
            raise CorruptError(
                f"{path}: expected {base} next to it, because version {delta.number} is stored as the difference to "
                "it, found none"
                + (f"; link the checkpoint that the engines were started from to {at}" if not delta.base else "")
            )
    if layout.is_unfinished(store, at):
        raise CorruptError(
            f"{at}: expected {layout.mark}, found differences without it; the trainer is writing them, or was killed"
        )
    return chain, at


def _opened(store: Store, folder: str, name: str) -> Any:
    if not name.endswith(SUFFIX) or "/" in name or "\\" in name or "\0" in name:
        raise UnsafeError(f"{folder}: expected names of files in its folder, found {name!r:.200}")
    return open_file(store, check_file(store, posixpath.join(folder, name), folder))


class _VersionStep(NamedTuple):
    """A change of a tensor, and the open file that has it."""

    delta: VersionDelta
    part: TensorDelta
    file: Any


class _Changed:
    """A tensor that is made from that of a complete version by the changes of the versions after it; see `Stored`."""

    def __init__(self, entry: ArrayEntry, base: Stored, steps: tuple[_VersionStep, ...]):
        self._entry, self.base, self.steps = entry, base, steps
        self._made: np.ndarray | None = None  # while it is read in parts, up to the last one

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        shape = self._entry.shape
        if box == full_box(shape):
            return self._make()
        array = self._make() if self._made is None else self._made
        self._made = None if all(end == size for (_, end), size in zip(box, shape, strict=True)) else array
        return array[(*(slice(begin, end) for begin, end in box), ...)].copy()

    def _make(self) -> np.ndarray:
        old = self.base.read(full_box(self._entry.shape), False)
        data = old.reshape(-1).view(np.uint8)
        for delta, part, file in self.steps:
            entry = file.entries.get(path_of(part.key))
            if entry is None or entry.dtype != "uint8":
                raise CorruptError(f"{file.path}: expected a difference of the dtype uint8 as {part.key!r}, found none")
            (packed,) = file.read([(entry, full_box(entry.shape))])
            try:
                _CHANGES[delta.encoding](data, packed)
            except CorruptError as error:
                raise CorruptError(f"{delta.path}: {self._entry.path}: {error}") from None
            if (found := CHECKSUMS[part.algorithm](data)) != part.checksum:
                raise CorruptError(
                    f"{delta.path}: {self._entry.path}: expected the {part.algorithm} checksum {part.checksum} after "
                    f"the change, found {found}"
                )
        return data.view(dtypes.to_numpy(self._entry.dtype)).reshape(self._entry.shape)


def _xor(data: np.ndarray, packed: np.ndarray) -> None:
    data ^= unpack(packed, data.size)


def _overwrite(data: np.ndarray, packed: np.ndarray) -> None:
    """Sets bytes: a number of positions, the positions (four bytes each), and a byte for each."""
    # An element of the positions and its byte, for each byte at most.
    found = unpack(packed, None, max_bytes=4 + 5 * data.size)
    count = int.from_bytes(found[:4].tobytes(), "little")
    if found.size != 4 + 5 * count:
        raise CorruptError(f"expected {count} changed bytes, found {max(found.size - 4, 0) / 5:g}")
    places = found[4 : 4 + 4 * count].view("<u4")
    if count and int(places.max()) >= data.size:
        raise CorruptError("it changes bytes beyond the tensor")
    data[places] = found[4 + 4 * count :]


_CHANGES: Mapping[str, Callable[[np.ndarray, np.ndarray], None]] = {"xor": _xor, "overwrite": _overwrite}
CHECKSUMS: Mapping[str, Callable[[np.ndarray], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data.data),
    "adler32": lambda data: f"{zlib.adler32(data.data):08x}",
    "sha256": lambda data: hashlib.sha256(data.data).hexdigest(),
}


def check_known(path: str, encoding: object, compression: object, algorithm: object) -> None:
    """Raises `UnsupportedError` for an encoding, compression or checksum that cannot be read."""
    for what, found, known in (
        ("encoding", encoding, [*_CHANGES]),
        ("compression", compression, ["zstd"]),
        ("checksum", algorithm, [*CHECKSUMS]),
    ):
        if found not in known:
            raise UnsupportedError(
                f"{path}: expected a delta with the {what} {' or '.join(known)}, found {found!r:.80}"
            )
