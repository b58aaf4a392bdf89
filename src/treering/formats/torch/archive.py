"""Reads the archives of `torch.save`: a zip file with a pickle, and the bytes of each storage as a file of its own."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, box_shape
from ..._core.entries import ArrayType
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores.store import Blob
from .._shared.extents import Runs, check_shape
from .._shared.pickles import Global, Made, Persistent, attribute_names, read_pickle
from .._shared.reader import Stored
from .._shared.unknown_files import RESAVE_TORCH, TORCH_PICKLE
from .._shared.zips import ZipMember, damage_of, locate, open_zip

_SLICE_BYTES = 16 << 20  # bytes in memory while a checksum is computed
_MAX_SPAN_BYTES = 64 << 20  # that one call reads of an array whose elements are not side by side
_MAX_READ_BYTES = 2 << 30  # far more than any pickle without its tensors has
_MAX_SPARSE_BYTES = 16 << 20  # a file with holes may claim any size
_MAX_SIZE = (1 << 63) - 1
DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_UNTYPED = "UntypedStorage"  # its size is in bytes, and the tensor has the dtype
_TENSORS = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}  # arguments, without metadata
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_BUFFER_ATTRIBUTES = ("persistent", "_is_buffer")  # of every `torch.nn.Buffer`
_PLAIN_TYPES = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"))
_MAKE_PLAIN = "save it as a plain tensor, such as tensor.to_dense(), .dequantize() or .full_tensor() returns"


class Storage:
    """The bytes that one or several tensors share. Compares their checksum once."""

    def __init__(self, file: Blob, member: ZipMember, name: str):
        self.file, self.member, self._name = file, member, name
        self._is_checked = False

    @property
    def has_checksum(self) -> bool:
        """True unless PyTorch was set to compute no checksums; it writes 0 then."""
        return bool(self.member.crc) or not self.member.nbytes

    def check(self) -> None:
        """Raises `CorruptError` unless the bytes have their checksum, if there is one."""
        if self._is_checked:
            return
        begin, nbytes, expected = self.member
        crc, buffer = 0, np.empty(min(nbytes, _SLICE_BYTES), np.uint8).data
        for at in range(0, nbytes, _SLICE_BYTES):
            part = buffer[: nbytes - at]
            self.file.read_into(part, begin + at)
            crc = zlib.crc32(part, crc)
        if self.has_checksum and crc != expected:
            raise CorruptError(f"{self._name}: the bytes are not what was saved; their checksum differs")
        self._is_checked = True


class Placed(NamedTuple):
    """An array whose contents are found when they are read."""

    dtype: str
    shape: tuple[int, ...]
    stored: Stored
    check: Callable[[Box], None]
    type: ArrayType = "numpy"
    attributes: Sequence[str] = ()


class TorchTensor(NamedTuple):
    """A tensor in an archive. `attributes` are the names of those that a program has set."""

    dtype: str
    shape: tuple[int, ...]
    stored: Stored
    storage: Storage
    attributes: Sequence[str] = ()
    type: ArrayType = "numpy"

    def check(self, box: Box) -> None:
        """Compares the checksum of the bytes. Raises `CorruptError`."""
        self.storage.check()


class Archive:
    """An archive, which may be a range of a file. `name` begins the messages of errors."""

    def __init__(self, file: Blob, name: str, begin: int = 0, nbytes: int | None = None):
        self.name, self._file = name, file
        self._range = begin, file.size - begin if nbytes is None else nbytes
        with damage_of(name, "an archive of PyTorch", RESAVE_TORCH):
            members = open_zip(file, *self._range).infolist()
        self._members = {member.filename: member for member in members}
        if len(self._members) < len(members):
            raise CorruptError(f"{name}: two files in this archive have one name")
        if min((member.header_offset for member in members), default=0) != 0:
            raise CorruptError(f"{name}: expected one archive of PyTorch, found other data before it")
        found = [member for member in self._members if member.count("/") == 1 and member.endswith(TORCH_PICKLE)]
        if len(found) != 1:
            raise CorruptError(f"{name}: expected one archive of PyTorch, with a data.pkl, found {len(found)}")
        self._prefix = found[0].removesuffix(TORCH_PICKLE) + "/"
        self._order: Literal["<", ">"] = "<"
        if f"{self._prefix}byteorder" in self._members:
            order = self._read("byteorder")
            if order not in (b"little", b"big"):
                raise CorruptError(f"{name}: expected the byte order little or big, found {order!r:.100}")
            self._order = ">" if order == b"big" else "<"
        self._storages: dict[str, Storage] = {}

    def value(self) -> Any:
        """Returns what the archive contains; see `read_pickle`."""
        return read_pickle(self._read("data.pkl"), self.name)

    def pickle_nbytes(self) -> int:
        """Returns the size of the pickle, in bytes."""
        return self._members[f"{self._prefix}data.pkl"].file_size

    def tensor(self, made: Made) -> TorchTensor | None:
        """Returns the tensor that an object stands for; None for objects that are no tensors.

        Raises `CorruptError`, and `UnsupportedError` for tensors that are no plain arrays.
        """
        module, name = made.what
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            call, kind, arguments, *_ = [*made.arguments, None, None, None]
            if kind not in _PLAIN_TYPES or type(call) is not Global or type(arguments) is not tuple:
                name = str(kind) if type(kind) is Global else type(kind).__name__
                raise UnsupportedError(f"a tensor of the class {name:.100}; {_MAKE_PLAIN}")
            found = self.tensor(Made(call, arguments)) if call.module == "torch._utils" else None
            return found and found._replace(attributes=_own_attributes(made.arguments[3:4]))
        if module != "torch._utils":
            return None
        if name in _PARAMETERS and made.arguments:
            inner = made.arguments[0]
            found = self.tensor(inner) if type(inner) is Made and inner.what.name in _TENSORS else None
            return found and found._replace(attributes=_own_attributes(made.arguments[3:4]))
        if name not in _TENSORS:
            if name.startswith("_rebuild"):
                raise UnsupportedError(f"a tensor that PyTorch makes by {name:.100}; {_MAKE_PLAIN}")
            return None
        count = _TENSORS[name]
        if len(made.arguments) < count:
            raise CorruptError(f"expected {count} arguments of {name}, found {len(made.arguments)}")
        for flags in made.arguments[count:]:
            if flags:
                what = ", ".join(key for key in flags if type(key) is str) if type(flags) is dict else "unknown"
                raise UnsupportedError(f"a tensor with the flags {what:.100}; save tensor.resolve_conj().resolve_neg()")
        reference, offset, shape, strides = made.arguments[:4]
        return self._plain(reference, offset, sizes(shape), sizes(strides), made.arguments[6:7])

    def _plain(
        self, reference: Any, offset: Any, shape: tuple[int, ...], strides: tuple[int, ...], given: Sequence[Any]
    ) -> TorchTensor:
        """Opens a tensor, which is a view of the storage that `reference` names."""
        key = reference.key if type(reference) is Persistent else None
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[2]) is not str:
            raise CorruptError("expected a reference to the storage of a tensor")
        kind = key[1].name if type(key[1]) is Global else ""
        dtype = given[0].name if kind == _UNTYPED and given and type(given[0]) is Global else _STORAGES.get(kind, kind)
        if dtype not in DTYPES:
            # PyTorch converts no floats of four bits.
            advice = "tensor.to(torch.complex64)" if dtype == "complex32" else "tensor.view(torch.uint8)"
            raise UnsupportedError(f"a tensor of the dtype {dtype:.100}; save it as another one, such as {advice}")
        check_shape(shape, self.name)
        final = dtypes.to_numpy(dtype)
        if type(offset) is not int or not 0 <= offset <= _MAX_SIZE or len(strides) != len(shape):
            raise CorruptError(f"expected an offset and the strides of a tensor of shape {list(shape)}")
        storage = self._storage(key[2])
        stored = np.dtype(f"u{final.itemsize}") if final.kind == "V" else final  # ml_dtypes are native-endian only
        stored = stored.newbyteorder(self._order)
        strides = tuple(stride if n > 1 else 0 for n, stride in zip(shape, strides, strict=True))
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        begin, nbytes, _ = storage.member
        if not math.prod(shape):
            return TorchTensor(dtype, shape, Runs.of([(self._file, begin, 0)], shape, stored, final), storage)
        if (last + 1) * final.itemsize > nbytes:
            raise CorruptError(
                f"expected {(last + 1) * final.itemsize} bytes of the storage {key[2]!r:.50}, found {nbytes}"
            )
        begin += offset * final.itemsize
        if _is_contiguous(shape, strides):
            run = self._file, begin, math.prod(shape) * final.itemsize
            return TorchTensor(dtype, shape, Runs.of([run], shape, stored, final), storage)
        return TorchTensor(dtype, shape, _Strided(self._file, begin, strides, stored, final), storage)

    def _storage(self, key: str) -> Storage:
        if key not in self._storages:
            member = self._member(f"data/{key}")
            self._storages[key] = Storage(self._file, member, f"{self.name}: the storage {key!r:.50}")
        return self._storages[key]

    def _member(self, name: str) -> ZipMember:
        if self._prefix + name not in self._members:
            raise CorruptError(f"{self.name}: expected the file {name!r:.100} in this archive, found none")
        return locate(self._file, *self._range, self._members[self._prefix + name], self.name)

    def _read(self, name: str) -> bytes:
        offset, nbytes, crc = self._member(name)
        if nbytes > _MAX_READ_BYTES or (nbytes > _MAX_SPARSE_BYTES and self._file.has_holes):
            raise UnsafeError(f"{self.name}: {name!r} has {nbytes} bytes, too many to be read at once")
        data = self._file.read(offset, nbytes)
        if crc and zlib.crc32(data) != crc:
            raise CorruptError(f"{self.name}: the bytes of {name!r} are not what was saved; their checksum differs")
        return data


def _own_attributes(states: Sequence[Any]) -> list[str]:
    """Returns the names of the attributes that a program has set on a tensor."""
    return [name for state in states for name in attribute_names(state) if name not in _BUFFER_ATTRIBUTES]


class _Strided:
    """Reads an array whose elements are not side by side in C order; see `Stored`. Strides count elements."""

    def __init__(self, file: Blob, begin: int, strides: tuple[int, ...], stored: np.dtype, dtype: np.dtype):
        self._file, self._begin, self._strides, self._stored, self._dtype = file, begin, strides, stored, dtype

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        out = np.empty(box_shape(box), self._stored)
        if out.size:
            first = sum(start * stride for (start, _), stride in zip(box, self._strides, strict=True))
            self._fill(out, self._begin + first * self._stored.itemsize)
        return out.astype(self._stored.newbyteorder("="), copy=False).view(self._dtype)

    def _fill(self, out: np.ndarray, at: int) -> None:
        itemsize = self._stored.itemsize
        reach = [(n - 1) * stride * itemsize for n, stride in zip(out.shape, self._strides, strict=True)]
        if sum(reach) + itemsize <= _MAX_SPAN_BYTES:
            memory = self._file.read(at, sum(reach) + itemsize)
            out[...] = np.ndarray(out.shape, self._stored, memory, 0, [itemsize * n for n in self._strides])
            return
        axis = reach.index(max(reach))
        half = out.shape[axis] // 2
        before = (slice(None),) * axis
        self._fill(out[(*before, slice(half))], at)
        self._fill(out[(*before, slice(half, None))], at + half * self._strides[axis] * itemsize)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def sizes(value: Any) -> tuple[int, ...]:
    """Returns the sizes or strides of a tensor, given as a tuple or as `torch.Size`."""
    is_size = isinstance(value, Made) and value.what == ("torch", "Size") and len(value.arguments) == 1
    given: Any = value.arguments[0] if is_size else value
    if type(given) in (tuple, list) and all(type(n) is int and 0 <= n <= _MAX_SIZE for n in given):
        return tuple(given)
    raise CorruptError("expected the sizes of a tensor")
