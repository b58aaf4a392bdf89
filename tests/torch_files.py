"""A writer of PyTorch's files, without PyTorch.

It pickles what PyTorch pickles: names of its modules and calls of its functions. It shares nothing with the reader.
"""

import dataclasses
import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHECKPOINT = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
    "bool": "BoolStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
}
UNTYPED = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
DTYPES = (*STORAGES, *UNTYPED, "float8_e8m0fnu")


@dataclasses.dataclass(frozen=True)
class Name:
    """A name of a module of PyTorch."""

    module: str
    name: str


class Call:
    """A call of a function or a class of PyTorch, and the attributes that the result then gets."""

    def __init__(self, module: str, name: str, *arguments: Any, state: Any = None):
        self.what, self.arguments, self.state = Name(module, name), arguments, state


@dataclasses.dataclass
class View:
    """A tensor: a view of a flat array, whose numbers may be shared by several tensors."""

    flat: np.ndarray
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int = 0
    metadata: dict[str, bool] | None = None


_InPython: Any = pickle._Pickler  # pyright: ignore[reportAttributeAccessIssue] (the pickler that is written in Python)


class _Pickler(_InPython):
    def __init__(self, file: Any, protocol: int, storages: list[np.ndarray]):
        super().__init__(file, protocol)
        self.storages = storages

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, np.ndarray):
            return None
        places = [n for n, storage in enumerate(self.storages) if storage is obj]
        if not places:
            places = [len(self.storages)]
            self.storages.append(obj)
        name = obj.dtype.name
        kind = Name("torch", STORAGES[name]) if name in STORAGES else Name("torch.storage", "UntypedStorage")
        return ("storage", kind, str(places[0]), "cpu", obj.size if name in STORAGES else obj.nbytes)

    def save(self, obj: Any, *arguments: Any, **options: Any) -> None:
        if type(obj) is Name:
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
        elif type(obj) is View:
            self.save(_rebuilt(obj))
        elif type(obj) is Call:
            if id(obj) in self.memo:
                self.write(self.get(self.memo[id(obj)][0]))
                return
            self.save(obj.what)
            self.save(tuple(obj.arguments))
            self.write(pickle.REDUCE)
            self.memoize(obj)
            if obj.state is not None:
                self.save(obj.state)
                self.write(pickle.BUILD)
        else:
            super().save(obj, *arguments, **options)


def _rebuilt(view: View) -> Call:
    hooks = Call("collections", "OrderedDict")
    own = [view.flat, view.offset, tuple(view.shape), tuple(view.strides), False, hooks]
    if view.flat.dtype.name not in STORAGES:
        own.append(Name("torch", view.flat.dtype.name))
    if view.metadata:
        own.append(view.metadata)
    return Call("torch._utils", f"_rebuild_tensor_v{2 if view.flat.dtype.name in STORAGES else 3}", *own)


def tensor(array: Any) -> View:
    """Returns a contiguous tensor of an array."""
    array = np.asarray(array)
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
    strides = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
    return View(array.reshape(-1), array.shape, strides)


def pickled(value: Any, protocol: int = 2, storages: list[np.ndarray] | None = None) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol, [] if storages is None else storages).dump(value)
    return out.getvalue()


def archive(value: Any, *, order: str = "little", change: Any = None) -> bytes:
    """Returns what `torch.save` writes; `change` may change the files before they are packed."""
    storages: list[np.ndarray] = []
    files = {"data.pkl": pickled(value, storages=storages), "byteorder": order.encode()}
    for n, storage in enumerate(storages):
        raw = storage.view(f"V{storage.itemsize}" if storage.dtype.kind == "V" else storage.dtype)
        if order == "big" and storage.dtype.kind != "V":
            raw = raw.byteswap()
        elif order == "big":
            raw = storage.view(f"u{storage.itemsize}").byteswap()
        files[f"data/{n}"] = raw.tobytes()
    files["version"] = b"3\n"
    if change:
        change(files)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, data in files.items():
            packed.writestr(f"archive/{name}", data)
    return out.getvalue()


def size(shape: Sequence[int]) -> Call:
    return Call("torch", "Size", tuple(shape))


class Distributed:
    """What becomes a distributed checkpoint: metadata, and files with an archive for each chunk."""

    def __init__(self) -> None:
        self.leaves: dict[str, Call] = {}
        self.places: dict[str, tuple[Any, ...]] = {}
        self.ranges: dict[Call, Call] = {}
        self.files: dict[str, bytearray] = {}

    def add(self, place: Sequence[str | int], array: Any, boxes: Any = None, files: Sequence[str] = ()) -> None:
        """Adds a tensor in one chunk, or in one for each box."""
        array = np.asarray(array)
        name = ".".join(map(str, place))
        boxes = [tuple((0, n) for n in array.shape)] if boxes is None else boxes
        chunks: list[Call] = []
        for n, box in enumerate(boxes):
            part = array[(*(slice(*ends) for ends in box), ...)]
            offset, lengths = size([start for start, _ in box]), size([stop - start for start, stop in box])
            chunks.append(Call(CHECKPOINT, "ChunkStorageMetadata", state={"offsets": offset, "sizes": lengths}))
            self._store(name, offset, archive(tensor(part)), files[n] if files else "__0_0.distcp")
        layout = Call("torch.serialization", "_get_layout", "torch.strided")
        memory = Call(CHECKPOINT, "_MEM_FORMAT_ENCODING", 0)
        state = (Name("torch", array.dtype.name), layout, False, memory, False)
        about = {
            "properties": Call(CHECKPOINT, "TensorProperties", state=state),
            "size": size(array.shape),
            "chunks": chunks,
        }
        self.leaves[name] = Call(CHECKPOINT, "TensorStorageMetadata", state=about)
        self.places[name] = tuple(place)

    def add_value(self, place: Sequence[str | int], value: Any, file: str = "__0_0.distcp") -> None:
        name = ".".join(map(str, place))
        self.leaves[name] = Call(CHECKPOINT, "BytesStorageMetadata")
        self.places[name] = tuple(place)
        self._store(name, None, archive(value), file)

    def _store(self, name: str, offset: Any, data: bytes, file: str) -> None:
        out = self.files.setdefault(file, bytearray())
        key = Call(CHECKPOINT, "MetadataIndex", state={"fqn": name, "offset": offset, "index": None})
        about = {"relative_path": file, "offset": len(out), "length": len(data)}
        self.ranges[key] = Call(FILESYSTEM, "_StorageInfo", state=about)
        out += data

    def metadata(self, **change: Any) -> Call:
        state = {
            "state_dict_metadata": self.leaves,
            "planner_data": self.places,
            "storage_data": self.ranges,
            "version": "1.0.0",
        }
        return Call(CHECKPOINT, "Metadata", state={**state, **change})

    def save(self, folder: Path, **change: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        (folder / ".metadata").write_bytes(pickled(self.metadata(**change), 4))
        return folder
