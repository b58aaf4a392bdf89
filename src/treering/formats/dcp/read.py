"""Reads distributed checkpoints of PyTorch: the metadata when one is opened, each chunk when it is first needed."""

import functools
import itertools
import posixpath
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, full_box, intersect
from ..._core.source import Source
from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ...stores.file_io import open_fetched, opened, read_file
from ...stores.read_errors import ReplacedError, reading
from ...stores.store import Blob, Stat, Store
from .._shared.extents import check_shape
from .._shared.pickles import Global, Made, read_pickle
from .._shared.pieces import Pieces, tile
from .._shared.reader import attempt, check_file
from .._shared.safety import check_inside
from ..torch.archive import DTYPES, Archive, Placed, TorchTensor, sizes
from ..torch.tree import Branch, Inside, TorchLeaves, TorchReader

_CONVERT = (
    "convert it where PyTorch is, and open the new file: python -m torch.distributed.checkpoint.format_utils "
    "dcp_to_torch FOLDER model.pt"
)
_MAX_KEY = 1 << 63
_MAX_VALUE_BYTES = 256 << 20  # bytes of the pickles of all values together; opening a checkpoint reads them


class _ArchiveRange(NamedTuple):
    """Where the archive of a chunk or a value is."""

    file: str
    begin: int
    nbytes: int


def open_checkpoint(store: Store, path: str, index: str, step: int | None) -> Source:
    """Opens a checkpoint. Raises `CorruptError` and `UnsupportedError`."""
    data = read_file(store, index)
    try:
        metadata = _DcpMetadata(read_pickle(data, index), index)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; {_CONVERT}") from None
    files = _Files(store, path, index)
    files.check_kind(metadata.first_file())
    metadata.check_overlaps()
    tree, places = Branch(), metadata.places()
    room = _MAX_VALUE_BYTES
    for name, about in metadata.leaves.items():
        if about.what.name == "BytesStorageMetadata":
            archive = attempt(functools.partial(files.archive, metadata.range_of(name, None)))
            if isinstance(archive, Archive):
                room -= archive.pickle_nbytes()
                if room < 0:
                    raise UnsupportedError(f"{index}: expected values of at most {_MAX_VALUE_BYTES} bytes, found more")
                value = attempt(archive.value)
                found = value if isinstance(value, CorruptError) else Inside(archive, value)
            else:
                found = archive
        else:
            found = attempt(functools.partial(_tensor, metadata, files, name, about))
        _insert(tree, places.get(name, (name,)), found, index)
    nbytes = len(data) + sum(files.sizes.values())
    return TorchReader("dcp", path, TorchLeaves(tree, None, index), nbytes=nbytes, step=step)


def _insert(tree: Branch, place: Sequence[Any], leaf: Any, index: str) -> None:
    for key in place[:-1]:
        tree = tree.setdefault(key, Branch())
        if type(tree) is not Branch:
            raise CorruptError(f"{index}: {key!r:.100} is a leaf and also has leaves below it")
    if place[-1] in tree:
        raise CorruptError(f"{index}: two leaves have one path, which ends in {place[-1]!r:.100}")
    tree[place[-1]] = leaf


class _DcpMetadata:
    """The parsed metadata: a description of each leaf by name, and where its chunks are."""

    def __init__(self, value: Any, index: str):
        self._index = index
        state = self.state(value, "Metadata")
        leaves, ranges = state.get("state_dict_metadata"), state.get("storage_data")
        if type(leaves) is not dict or type(ranges) is not dict:
            raise CorruptError(f"{index}: expected the leaves and the places of a checkpoint, found none")
        kinds = ("BytesStorageMetadata", "TensorStorageMetadata")
        for name, about in leaves.items():
            if type(name) is not str or type(about) is not Made or about.what.name not in kinds:
                raise CorruptError(f"{index}: expected the names and descriptions of leaves, found another object")
        self.leaves: dict[str, Made] = leaves
        self._planner = state.get("planner_data")
        self._ranges: dict[tuple[str, tuple[int, ...] | None], _ArchiveRange] = {}
        for key, info in ranges.items():
            about = self.state(key, "MetadataIndex")
            offset = about.get("offset")
            name, place = about.get("fqn"), None if offset is None else sizes(offset)
            if type(name) is not str or (name, place) in self._ranges:
                raise CorruptError(f"{index}: expected one place for each chunk, found another one")
            self._ranges[name, place] = self._range(name, info)

    def first_file(self) -> str | None:
        """Returns the name of a file, if there is any."""
        return next((one.file for one in self._ranges.values()), None)

    def check_overlaps(self) -> None:
        """Raises `UnsafeError` if two chunks have common bytes."""
        for one, following in itertools.pairwise(sorted(self._ranges.values())):
            if one.file == following.file and one.begin + one.nbytes > following.begin:
                raise UnsafeError(f"{self._index}: two chunks overlap in {one.file[:200]}, at {following.begin}")

    def state(self, value: Any, kind: str) -> dict[Any, Any]:
        """Returns the attributes of an object of DCP."""
        if type(value) is not Made or value.what.name != kind or not value.what.module.startswith("torch.distributed."):
            what = str(value.what)[:100] if type(value) is Made else type(value).__name__
            raise CorruptError(f"{self._index}: expected the {kind} of torch.distributed.checkpoint, found {what}")
        if type(value.state) is not dict:
            raise CorruptError(f"{self._index}: expected the attributes of a {kind}, found none")
        return value.state

    def places(self) -> dict[str, Sequence[Any]]:
        """Returns the keys on the way to each leaf, by name, for the names of which they are recorded."""
        given = self._planner if type(self._planner) is dict else {}
        return {
            name: keys
            for name, keys in given.items()
            if type(keys) in (tuple, list)
            and keys
            and all(type(key) is str or (type(key) is int and abs(key) < _MAX_KEY) for key in keys)
        }

    def range_of(self, name: str, offset: tuple[int, ...] | None) -> _ArchiveRange:
        """Returns where a value is, or the chunk of a tensor that begins at an offset."""
        if (name, offset) not in self._ranges:
            raise CorruptError(f"{self._index}: expected the place of {name[:200]!r} at {offset}, found none")
        return self._ranges[name, offset]

    def _range(self, name: str, info: Any) -> _ArchiveRange:
        about = self.state(info, "_StorageInfo")
        if about.get("transform_descriptors"):
            raise UnsupportedError(f"{self._index}: {name[:200]} was saved with extensions, such as compression")
        file, numbers = about.get("relative_path"), (about.get("offset"), about.get("length"))
        if type(file) is not str:
            raise CorruptError(f"{self._index}: expected the name of a file, found a {type(file).__name__}")
        try:
            return _ArchiveRange(file, *sizes(numbers))
        except CorruptError:
            raise CorruptError(f"{self._index}: expected the place of {name[:200]!r} in {file:.200}") from None


class _Files:
    """The files of a checkpoint, each opened when it is first needed. `sizes` has the bytes of those that exist."""

    def __init__(self, store: Store, folder: str, index: str):
        self._store, self._folder, self.index = store, folder, index
        self.sizes: dict[str, int] = {}
        self._found: dict[str, Stat] = {}  # as the files were when the checkpoint was opened
        self._missing: dict[str, CorruptError] = {}
        self._open: dict[str, Blob] = {}

    def check_kind(self, name: str | None) -> None:
        """Raises `UnsupportedError` if a file is one of safetensors, as DCP writes it on request."""
        path = posixpath.join(self._folder, name or "")
        if name and _is_file_inside(self._store, self._folder, name):
            with reading(path), opened(self._store, path) as blob:
                if blob.read_up_to(9)[8:] == b"{":
                    raise UnsupportedError(
                        f"{path}: expected the archives of torch.save, found safetensors; save without "
                        "serialization_format=SerializationFormat.SAFETENSORS, or with HuggingFaceStorageWriter"
                    )

    def check(self, place: _ArchiveRange) -> None:
        """Raises `CorruptError` if a range is outside its file or if there is no file, and `UnsafeError` for a name."""
        name = place.file
        if name in self._missing:
            raise self._missing[name]
        path = posixpath.join(self._folder, name)
        if name not in self.sizes:
            check_inside(self._folder, name)
            try:
                check_file(self._store, path, self.index)
            except CorruptError as error:
                self._missing[name] = error
                raise
            there = self._store.stat(path)
            if there is None:
                raise self._replaced(path)
            self._found[name], self.sizes[name] = there, there.nbytes
        if place.begin + place.nbytes > self.sizes[name]:
            expected = place.begin + place.nbytes
            raise CorruptError(f"{path}: expected {expected} bytes, found {self.sizes[name]}; it is cut short")

    def archive(self, place: _ArchiveRange) -> Archive:
        """Opens the archive in a range of a file."""
        self.check(place)
        name, begin, nbytes = place
        path = posixpath.join(self._folder, name)
        if name not in self._open:
            with reading(path):
                file = open_fetched(self._store, path)
            if self._store.stat(path) != self._found[name]:
                raise self._replaced(path)
            self._open[name] = file
        file = self._open[name]
        return Archive(file, f"{path}: the archive at {begin}", begin, nbytes)

    def _replaced(self, path: str) -> ReplacedError:
        return ReplacedError(f"{path}: another save has replaced it since the checkpoint was opened; open it again")


def _is_file_inside(store: Store, folder: str, name: str) -> bool:
    check_inside(folder, name)
    there = store.stat(posixpath.join(folder, name))
    return there is not None and there.is_file


class _ChunkTensor:
    """A tensor in an archive of its own, which is opened when the tensor is first read; see `Stored`."""

    def __init__(self, open: Callable[[], Archive], dtype: str, shape: tuple[int, ...]):
        self._open, self._dtype, self._shape = open, dtype, shape

    @functools.cached_property
    def _tensor(self) -> TorchTensor:
        archive = self._open()
        value = archive.value()
        try:
            found = archive.tensor(value) if type(value) is Made else None
        except TreeringError as error:
            raise type(error)(f"{archive.name}: {str(error).removeprefix(f'{archive.name}: ')}") from None
        if found is None or (found.dtype, found.shape) != (self._dtype, self._shape):
            what = "another object" if found is None else f"{found.dtype}{list(found.shape)}"
            raise CorruptError(f"{archive.name}: expected a tensor {self._dtype}{list(self._shape)}, found {what}")
        return found

    def can_map(self) -> bool:
        return False

    def check(self, box: Box) -> None:
        self._tensor.check(box)

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        return self._tensor.stored.read(box, mmap)


def _tensor(metadata: _DcpMetadata, files: _Files, name: str, about: Made) -> Placed:
    """Opens a tensor of one or several chunks."""
    state = metadata.state(about, "TensorStorageMetadata")
    properties, chunks = state.get("properties"), state.get("chunks")
    given = properties.state if type(properties) is Made else None
    kind = given[0] if type(given) is tuple and given else None
    if type(kind) is not Global or type(chunks) is not list:
        raise CorruptError(f"{files.index}: {name[:200]}: expected the dtype and the chunks of a tensor, found none")
    if kind.name not in DTYPES:
        raise UnsupportedError(f"{files.index}: {name[:200]} has the dtype {kind.name:.100}; {_CONVERT}")
    shape = sizes(state.get("size"))
    check_shape(shape, f"{files.index}: {name[:200]}")
    found: dict[Box, _ChunkTensor] = {}
    for chunk in chunks:
        part = metadata.state(chunk, "ChunkStorageMetadata")
        offset, lengths = sizes(part.get("offsets")), sizes(part.get("sizes"))
        box = tuple((start, start + n) for start, n in zip(offset, lengths, strict=False))
        if len(offset) != len(lengths) or len(offset) != len(shape):
            raise CorruptError(f"{files.index}: {name[:200]}: expected chunks of {len(shape)} axes")
        check_shape(lengths, f"{files.index}: {name[:200]}")
        place = metadata.range_of(name, offset)
        files.check(place)
        found[box] = _ChunkTensor(functools.partial(files.archive, place), kind.name, lengths)
    if not tile(shape, list(found)):
        raise CorruptError(f"{files.index}: {name[:200]}: the chunks do not make up its shape {list(shape)}")
    if found.keys() == {full_box(shape)}:
        (chunk,) = found.values()
        return Placed(kind.name, shape, chunk, chunk.check)

    def check(box: Box) -> None:
        for place, chunk in found.items():
            if intersect(place, box):
                chunk.check(box)

    return Placed(kind.name, shape, Pieces(list(found.items()), dtypes.to_numpy(kind.name)), check)
