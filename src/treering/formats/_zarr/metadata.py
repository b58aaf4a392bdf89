"""Checks the metadata of a zarr array before TensorStore sees any of it.

Knows both versions of zarr: ``.zarray`` (2) and ``zarr.json`` (3). TensorStore ends the process when it cannot
allocate what the metadata claims, so absurd claims must not reach it.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from ..._core import dtypes
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, UnsafeError, UnsupportedError

FILES = {"zarr": ".zarray", "zarr3": "zarr.json"}
_MAX_ELEMENTS = 1 << 62  # elements, and bytes of a chunk
_MAX_AXES = 32  # axes, the most that TensorStore supports
_MAX_DIGITS = 19  # decimal digits of a chunk's index along an axis
_NUMPY_DTYPE = re.compile(r"[<>|][biufc](\d+)")
_NAMED_DTYPE = re.compile(
    r"int[248]|float8_(?!e4m3$)\w+|float4_e2m1fn|bfloat16|bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)"
)
_COMPRESSORS = ("zlib", "gzip", "bz2", "blosc", "zstd")
_CODECS = ("bytes", "transpose", "gzip", "blosc", "zstd", "crc32c", "sharding_indexed")
_PLAIN = ("bytes", "transpose")

_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ELEMENTS)]
_Extent = Annotated[int, msgspec.Meta(ge=1, le=_MAX_ELEMENTS)]


class _Version2(msgspec.Struct):
    shape: list[_Size]
    chunks: list[_Extent]
    dtype: Any
    compressor: dict[str, Any] | None
    order: Literal["C", "F"]
    filters: list[Any] | None = None
    fill_value: Any = None
    dimension_separator: Literal[".", "/"] = "."


class _Named(msgspec.Struct):
    """An extension point of zarr 3: a data type, grid, encoding or codec. The name alone may stand for it."""

    name: str
    configuration: dict[str, Any] = msgspec.field(default_factory=dict)


class _Chunks(msgspec.Struct):
    chunk_shape: list[_Extent]


class _Version3(msgspec.Struct):
    node_type: Literal["array"]
    shape: list[_Size]
    data_type: str | _Named
    chunk_grid: str | _Named
    chunk_key_encoding: str | _Named
    codecs: list[str | _Named]
    fill_value: Any
    storage_transformers: list[Any] = msgspec.field(default_factory=list)


_MEMBERS = {*_Version3.__struct_fields__, "zarr_format", "attributes", "dimension_names"}

preload_decoders(_Version2, _Version3, _Chunks)


class ZarrLayout(NamedTuple):
    """Describes an array by its metadata. `spec` is the metadata reduced to what TensorStore needs."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]  # the shape of what one key stores
    cells: tuple[int, ...]  # the shape that is read at a time: the inner chunks of a shard, or the chunk itself
    spec: Mapping[str, Any]
    fill_value: Any  # in JSON; None if there is none
    start: str  # the first part of each chunk's key, "" for none
    separator: str
    plain: bool  # True if a chunk is stored as the bytes of its elements, uncompressed
    blosc: bool

    @property
    def itemsize(self) -> int:
        """Bytes of an element in memory, and in a chunk before compression."""
        return dtypes.itemsize(self.dtype)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk's elements."""
        return math.prod(self.chunks) * self.itemsize

    @property
    def cell_bytes(self) -> int:
        """The bytes of a cell's elements."""
        return math.prod(self.cells) * self.itemsize

    def key(self, index: Sequence[int]) -> str:
        """Returns the key of a chunk, relative to the array."""
        parts = [self.start] if self.start else []
        return self.separator.join([*parts, *map(str, index)]) or "0"

    def has_chunk(self, key: str) -> bool:
        """Returns True if a text is the key of one of the chunks, relative to the array."""
        numbers = re.findall(r"[0-9]+", key) if self.shape else []
        if len(numbers) != len(self.shape) or any(len(number) > _MAX_DIGITS for number in numbers):
            return False
        index = tuple(map(int, numbers))
        grid = (-(-n // chunk) for n, chunk in zip(self.shape, self.chunks, strict=True))
        return key == self.key(index) and all(n < max(count, 1) for n, count in zip(index, grid, strict=True))


def parse(data: bytes, driver: str, name: str) -> ZarrLayout:
    """Parses a metadata file into the layout it describes.

    Raises `CorruptError` for contents that are no metadata, `UnsafeError` for absurd sizes, and `UnsupportedError` for
    dtypes, codecs and extensions that Treering does not read.
    """
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
        version, expected = found.get("zarr_format"), 2 if driver == "zarr" else 3
        if type(version) is int and version > expected:
            raise UnsupportedError(
                f"{name}: expected zarr_format {expected}, found {str(version)[:100]}, of a later release"
            )
        if version != expected:
            raise CorruptError(f"{name}: expected zarr_format {expected}, found {version!r:.100}")
        made = _version_2(found, name) if driver == "zarr" else _version_3(found, name)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{name}: expected the metadata of a zarr array: {error}") from None
    if not len(made.shape) == len(made.chunks) == len(made.cells):
        raise CorruptError(f"{name}: expected chunks of {len(made.shape)} axes, found {len(made.chunks)}")
    if len(made.shape) > _MAX_AXES:
        raise UnsupportedError(f"{name}: {len(made.shape)} axes; TensorStore supports {_MAX_AXES} at most")
    if math.prod(max(n, 1) for n in made.shape) * made.itemsize > _MAX_ELEMENTS or made.chunk_bytes > _MAX_ELEMENTS:
        raise UnsafeError(f"{name}: shape {list(made.shape)} in chunks of {list(made.chunks)} is absurdly large")
    return made


def may_lack_zeros(data: bytes) -> bool:
    """Returns True if TensorStore before 0.1.17 may have written this metadata of zarr 2.

    TensorStore sorts the keys; Treering does not. The old releases did not have zstd.
    """
    found = msgspec.json.decode(data)
    compressor = found.get("compressor") or {}
    return list(found) == sorted(found) and compressor.get("id") != "zstd"


def _version_2(data: Mapping[str, Any], name: str) -> ZarrLayout:
    found = msgspec.convert(data, _Version2)
    kind = found.compressor and found.compressor.get("id")
    if found.compressor is not None and kind not in _COMPRESSORS:
        raise UnsupportedError(f"{name}: compressor {kind!r:.100}; Treering reads {', '.join(_COMPRESSORS)}")
    if found.filters:
        raise UnsupportedError(f"{name}: filters, which TensorStore does not support")
    spec = {
        "zarr_format": 2,
        "shape": found.shape,
        "chunks": found.chunks,
        "dtype": found.dtype,
        # Each of them stores in its chunks what decoding them takes. TensorStore refuses members that it does not know.
        "compressor": found.compressor and {"id": kind},
        "order": found.order,
        "filters": None,
        "fill_value": None,
        "dimension_separator": found.dimension_separator,
    }
    dtype = _dtype(found.dtype, name)
    plain, blosc = kind is None, kind == "blosc"
    shape, chunks = tuple(found.shape), tuple(found.chunks)
    return ZarrLayout(shape, dtype, chunks, chunks, spec, found.fill_value, "", found.dimension_separator, plain, blosc)


def _version_3(data: Mapping[str, Any], name: str) -> ZarrLayout:
    found = msgspec.convert(data, _Version3)
    for key in data.keys() - _MEMBERS:
        if not isinstance(data[key], dict) or data[key].get("must_understand") is not False:
            raise UnsupportedError(f"{name}: {key!r:.100}, an extension that Treering does not know")
    codecs = [_named(codec) for codec in found.codecs]
    names = [codec.name for codec in codecs]
    if unknown := [codec for codec in names if codec not in _CODECS]:
        raise UnsupportedError(f"{name}: codec {unknown[0]!r:.100}; Treering reads {', '.join(_CODECS)}")
    grid, encoding, kind = map(_named, (found.chunk_grid, found.chunk_key_encoding, found.data_type))
    if grid.name != "regular" or found.storage_transformers:
        raise UnsupportedError(f"{name}: expected a regular chunk grid and no storage transformers")
    if encoding.name not in ("default", "v2"):
        raise UnsupportedError(f"{name}: chunk key encoding {encoding.name!r}; Treering reads default, v2")
    separator = encoding.configuration.get("separator", "/" if encoding.name == "default" else ".")
    if separator not in (".", "/"):
        raise CorruptError(f"{name}: expected a separator '/' or '.', found {separator!r}")
    if kind.configuration:
        raise UnsupportedError(
            f"{name}: data type {kind.name!r:.100} with a configuration, which TensorStore cannot read"
        )
    dtype = _dtype(kind.name, name)
    if dtype != kind.name:
        raise CorruptError(f"{name}: expected a data type of zarr 3, found {kind.name!r}")
    chunks = cells = msgspec.convert(grid.configuration, _Chunks).chunk_shape
    if names[:1] == ["sharding_indexed"]:
        cells = msgspec.convert(codecs[0].configuration, _Chunks).chunk_shape
    spec = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": found.shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": encoding.name, "configuration": {"separator": separator}},
        "codecs": [_decoder(codec) for codec in codecs],
        "fill_value": found.fill_value,
    }
    start = "c" if encoding.name == "default" else ""
    plain, blosc = all(codec in _PLAIN for codec in names), names[-1:] == ["blosc"]
    shape = tuple(found.shape)
    return ZarrLayout(shape, dtype, tuple(chunks), tuple(cells), spec, found.fill_value, start, separator, plain, blosc)


def _named(found: str | _Named) -> _Named:
    return _Named(found) if isinstance(found, str) else found


def _decoder(codec: _Named) -> dict[str, Any]:
    """Returns a codec as TensorStore takes it, also those within shards."""
    configuration = dict(codec.configuration)
    for key in ("codecs", "index_codecs"):
        if key in configuration:
            inner = msgspec.convert(configuration[key], list[str | _Named])
            configuration[key] = [_decoder(_named(one)) for one in inner]
    return {"name": codec.name, "configuration": configuration}


def _dtype(found: Any, name: str) -> str:
    try:
        if isinstance(found, str) and can_hold(found):
            return dtypes.to_text(dtypes.to_numpy(found))
        if isinstance(found, str) and _NUMPY_DTYPE.fullmatch(found):
            return dtypes.to_text(np.dtype(found))
    except TypeError:
        pass
    raise UnsupportedError(f"{name}: dtype {found!r:.100}, which TensorStore cannot read as an array of numbers")


def new(
    driver: str, shape: Sequence[int], dtype: str, chunks: Sequence[int], compressor: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Builds the metadata of an array to be written, for TensorStore. Raises `UnsupportedError` for other dtypes."""
    if not can_hold(dtype):
        raise UnsupportedError(f"dtype {dtype}, which TensorStore cannot store in zarr arrays")
    if driver == "zarr":
        named = dtype.startswith(("bfloat", "float8", "float4", "int2", "int4"))
        return {
            "zarr_format": 2,
            "shape": list(shape),
            "chunks": list(chunks),
            "dtype": dtype if named else np.dtype(dtype).str,
            "compressor": compressor,
            "order": "C",
            "filters": None,
            "fill_value": None,
            "dimension_separator": ".",
        }
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compressor:
        rest = {key: value for key, value in compressor.items() if key != "id"}
        codecs.append({"name": compressor["id"], "configuration": rest})
    zero: Any = False if dtype == "bool" else [0.0, 0.0] if dtype.startswith("complex") else 0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": codecs,
        "fill_value": zero if "float" not in dtype else 0.0,
    }


@functools.lru_cache(maxsize=512)
def can_hold(dtype: str) -> bool:
    """Returns True if the installed release of TensorStore can store a dtype in zarr arrays."""
    import tensorstore as ts

    try:
        return bool(_NAMED_DTYPE.fullmatch(dtype) and ts.dtype(dtype))
    except ValueError:
        return False
