"""Zarr arrays through TensorStore: what Treering returns, which files it reads, and what it refuses."""

import gzip
import itertools
import json
import math
import os
import resource
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treering as tr
from treering._core import dtypes
from treering.errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from treering.formats._zarr import array as zarr
from treering.formats._zarr.array import ZarrArray
from treering.formats._zarr.chunks import Chunks
from treering.formats._zarr.folder import Folder
from treering.formats._zarr.metadata import can_hold
from treering.formats._zarr.writer import ZarrWriter
from treering.stores.filesystem import Filesystem
from treering.stores.posix import Disk

DTYPES = [*dtypes.SAFETENSORS, "int2", "int4", "complex128", "float8_e3m4", "float8_e4m3b11fnuz"]
LATER = ["float8_e8m0fnu", "float4_e2m1fn"]  # the oldest TensorStore lacks these
DTYPES = [text for text in dict.fromkeys([*DTYPES, *LATER]) if text not in LATER or can_hold(text)]


def spec(path: Path, driver: str, base: Path | None) -> dict[str, Any]:
    files = {"driver": "file", "path": f"{path}/"}
    kvstore = files if base is None else {"driver": "ocdbt", "base": f"file://{base}/", "path": f"{path}/"}
    return {"driver": driver, "kvstore": kvstore, "context": {"file_io_sync": False}}


def make(
    path: Path, array: np.ndarray, chunks: Any, driver: str = "zarr", base: Path | None = None, **more: Any
) -> None:
    """Writes an array with TensorStore itself."""
    if driver == "zarr":
        metadata = {"shape": array.shape, "chunks": chunks, **more}
    else:
        grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
        metadata = {"shape": array.shape, "chunk_grid": grid, **more}
    where = {**spec(path, driver, base), "metadata": metadata, "store_data_equal_to_fill_value": True}
    ts.open(where, create=True, dtype=array.dtype).result().write(array).result()


@pytest.mark.parametrize("format", ["orbax", "t5x", "levanter"])
def test_folders_whose_names_tensorstore_reads_otherwise(tmp_path: Path, format: str) -> None:
    """TensorStore reads a backslash as a slash, so it would store arrays where no reader finds them."""
    tree = {"w": np.ones((300, 300))}
    for name in ("a\\b/c", "c\\d"):
        with pytest.raises(UnsupportedError, match=r"expected a path without backslashes"):
            tr.save(tmp_path / name, tree, format=format)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    tr.save(tmp_path / "good", tree, format=format)
    (tmp_path / "good").rename(tmp_path / "c\\d")
    with pytest.raises(UnsupportedError, match=r"c\\d.*: expected a path without backslashes"):
        tr.restore(tmp_path / "c\\d")


def version_2(**changes: Any) -> dict[str, Any]:
    metadata = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "compressor": None}
    return {**metadata, "fill_value": None, "filters": None, "order": "C", **changes}


def version_3(**changes: Any) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": 0.0,
        **changes,
    }


def write(
    path: str, shape: Any, dtype: str, read_box: Any, *, chunks: Any, driver: Any = "zarr", base: Any = None
) -> None:
    """Writes one array, into a folder or under a name in a database."""
    folder, name = os.path.split(path) if base is None else (base, path)
    with ZarrWriter(Filesystem(Disk()), folder, driver=driver, ocdbt=base is not None) as writer:
        writer.add(name, shape, dtype, read_box, chunks=Chunks(chunks), compressor={"id": "gzip", "level": 1})


def lay(folder: Path, metadata: dict[str, Any] | bytes, chunks: dict[str, bytes]) -> ZarrArray:
    """Makes an array of files with these contents."""
    text = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    version_3 = isinstance(metadata, dict) and metadata.get("zarr_format") == 3
    for key, data in {("zarr.json" if version_3 else ".zarray"): text, **chunks}.items():
        place = folder / "a" / key
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return ZarrArray(Filesystem(Disk()), str(folder / "a"), driver="zarr3" if version_3 else "zarr")


def read_all(array: ZarrArray) -> np.ndarray:
    return array.read(tuple((0, size) for size in array.shape), False)


def sample(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random bits, except for bools and numbers of less than a byte."""
    kind = dtypes.to_numpy(dtype)
    data = np.random.default_rng(0).integers(0, 256, (*shape, kind.itemsize), np.uint8)
    if dtype in ("bool", "int2", "int4", "float4_e2m1fn"):
        return (data[..., 0] % 2).astype(kind)
    return data.view(kind).reshape(shape)


@pytest.mark.long
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_round_trip_with_tensorstore(tmp_path: Path, driver: Any, ocdbt: bool) -> None:
    """Treering reads arrays that TensorStore writes, and TensorStore reads those that Treering writes."""
    base = tmp_path if ocdbt else None
    for dtype, (shape, chunks) in itertools.product(
        DTYPES, [((), ()), ((0, 3), (1, 3)), ((5, 7), (2, 4)), ((3,), (3,))]
    ):
        array = sample(dtype, shape)
        for own in (True, False):
            name = f"{dtype}-{len(shape)}-{array.size}-{own}"
            path = Path(name) if ocdbt else tmp_path / name
            if own:
                write(
                    str(path),
                    shape,
                    dtype,
                    lambda box, array=array: array[tuple(slice(*bounds) for bounds in box)],
                    chunks=chunks,
                    driver=driver,
                    base=base and str(base),
                )
                theirs = ts.open(spec(path, driver, base)).result()
                assert theirs.dtype.numpy_dtype == array.dtype
                assert theirs.read().result().tobytes() == array.tobytes()
            else:
                make(path, array, chunks, driver, base)
            found = ZarrArray(Filesystem(Disk()), str(path), driver=driver, base=base and str(base))
            assert (found.shape, found.dtype, found.can_map()) == (shape, dtype, False)
            data = read_all(found)
            assert data.dtype == array.dtype and data.shape == shape and data.tobytes() == array.tobytes()
            assert data.flags.writeable
            if shape == (5, 7):
                assert found.read(((1, 4), (3, 7)), False).tobytes() == array[1:4, 3:7].tobytes()
                assert found.read(((2, 2), (0, 7)), False).shape == (0, 7)


def test_only_dtypes_that_tensorstore_has_can_be_written(tmp_path: Path) -> None:
    assert len(DTYPES) >= 23 and all(map(can_hold, DTYPES))
    others = ["uint4", "uint2", "float8_e4m3", "float6_e2m3fn", "complex32", "<U3", "|S2", "datetime64[s]"]
    assert [text for text in others if can_hold(text)] == []
    for text in ("uint4", "<U3"):
        with pytest.raises(UnsupportedError, match="dtype"):
            write(str(tmp_path / "a"), (), text, lambda box: np.zeros(()), chunks=())


@pytest.mark.parametrize(
    "compressor", [None, {"id": "gzip", "level": 1}, {"id": "zstd", "level": 3}, {"id": "zlib"}, {"id": "blosc"}]
)
def test_compressors(tmp_path: Path, compressor: Any) -> None:
    array = sample("float32", (40, 30))
    make(tmp_path / "a", array, [16, 16], compressor=compressor)
    make(Path("a"), array, [16, 16], base=tmp_path / "o", compressor=compressor)
    assert read_all(ZarrArray(Filesystem(Disk()), str(tmp_path / "a"))).tobytes() == array.tobytes()
    assert read_all(ZarrArray(Filesystem(Disk()), "a", base=str(tmp_path / "o"))).tobytes() == array.tobytes()


def test_big_endian_fortran_order_and_other_keys(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    metadata = version_2(shape=[2, 3], chunks=[2, 3], dtype=">i4", order="F", dimension_separator="/")
    found = lay(tmp_path, metadata, {"0/0": array.tobytes("F")})
    assert found.dtype == "int32" and read_all(found).dtype == np.int32 and (read_all(found) == array).all()
    keys = {"name": "v2", "configuration": {"separator": "."}}
    codecs = [{"name": "transpose", "configuration": {"order": [1, 0]}}, *version_3()["codecs"]]
    grid = {"name": "regular", "configuration": {"chunk_shape": [2, 3]}}
    metadata = version_3(
        shape=[2, 3], chunk_grid=grid, data_type="int32", chunk_key_encoding=keys, codecs=codecs, fill_value=0
    )
    found = lay(tmp_path / "3", metadata, {"0.0": array.astype("<i4").tobytes("F")})
    assert (read_all(found) == array).all()


class Counting(Disk):
    """Records the names of the files whose status is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def stat(self, path: str) -> os.stat_result | None:
        self.asked.append(os.path.basename(path))
        return super().stat(path)


def test_a_slice_needs_its_chunks_alone(tmp_path: Path) -> None:
    array = np.arange(40, dtype=np.int32).reshape(4, 10)
    make(tmp_path / "a", array, [2, 5])
    for key in ("0.0", "0.1", "1.0"):
        (tmp_path / "a" / key).unlink()
    disk = Counting()
    found = ZarrArray(Filesystem(disk), str(tmp_path / "a"))
    assert (found.read(((2, 3), (7, 9)), False) == array[2:3, 7:9]).all()
    assert disk.asked == [".zarray", "1.1"]


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_a_missing_chunk_is_named(tmp_path: Path, driver: Any, ocdbt: bool) -> None:
    base = tmp_path if ocdbt else None
    path = Path("a") if ocdbt else tmp_path / "a"
    make(path, np.zeros((4, 40), np.int32), [2, 2], driver, base)
    store = ts.KvStore.open(spec(path, driver, base)["kvstore"]).result()
    key = "1.19" if driver == "zarr" else "c/1/19"
    store.delete_range(ts.KvStore.KeyRange(key, key + "\0")).result()
    found = ZarrArray(Filesystem(Disk()), str(path), driver=driver, base=base and str(base))
    assert found.read(((0, 4), (0, 38)), False).shape == (4, 38)
    with pytest.raises(CorruptError, match=key):
        found.read(((3, 4), (38, 40)), False)
    with pytest.raises(CorruptError, match=key):
        read_all(found)


def test_omitted_chunks_have_the_fill_value(tmp_path: Path) -> None:
    """If the writer leaves out chunks, a missing chunk has the fill value; without, it is an error."""
    make(Path("a"), np.full((4,), 7, np.int32), [2], "zarr3", tmp_path, fill_value=7, data_type="int32")
    store = ts.KvStore.open(spec(Path("a"), "zarr3", tmp_path)["kvstore"]).result()
    store.delete_range(ts.KvStore.KeyRange("c/0", "c/1")).result()
    folder = Folder(Filesystem(Disk()), str(tmp_path), ocdbt=True)
    (strict,), (filled,) = zarr.find(folder, ["a"], "zarr3"), zarr.find(folder, ["a"], "zarr3", missing="fill")
    assert zarr.read([(filled, ((0, 4),))])[0].tolist() == [7] * 4
    with pytest.raises(CorruptError):
        zarr.read([(strict, ((0, 4),))])


@pytest.mark.long
def test_many_boxes_in_little_memory(tmp_path: Path) -> None:
    array = np.arange(1 << 16, dtype=np.int32).reshape(256, 256)
    make(tmp_path / "a", array, [16, 16])
    found = ZarrArray(Filesystem(Disk()), str(tmp_path / "a"))
    boxes = [((n, n + 100), (n, 256 - n)) for n in range(50)]
    for limit in (1, 5000, 1 << 20):
        for box, data in zip(boxes, zarr.read([(found, box) for box in boxes], limit), strict=True):
            assert (data == array[tuple(slice(*bounds) for bounds in box)]).all()
        for box in boxes:
            parts = list(found.split(box, limit))
            assert sum(math.prod(stop - start for start, stop in part) for part, _ in parts) == math.prod(
                stop - start for start, stop in box
            )
            assert all(nbytes <= max(limit, 1024 + 4096) for _, nbytes in parts)


@pytest.mark.long
def test_slices_of_one_chunk_decode_it_once(tmp_path: Path) -> None:
    array = np.arange(8 << 20, dtype=np.int32)
    make(tmp_path / "a", array, array.shape, compressor={"id": "zstd", "level": 1})
    found = ZarrArray(Filesystem(Disk()), str(tmp_path / "a"))
    step = 2 << 20
    before = read_bytes()
    for start in range(0, array.size, step):
        assert (found.read(((start, start + step),), False) == array[start : start + step]).all()
    assert read_bytes() - before < 1.5 * os.path.getsize(tmp_path / "a" / "0")
    assert found.folder.cached_array is None  # the end has been read


def read_bytes() -> int:
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for one in found for value in one["values"])


DATA = np.arange(4, dtype="<f4").tobytes()
ZIPPED = gzip.compress(DATA, mtime=0)  # fixed time: the names of tests must be the same in every process
GZIP = {"id": "gzip", "level": 1}


@pytest.mark.parametrize(
    "metadata",
    [
        version_2(chunks=[0]),
        version_2(chunks=[-1]),
        version_2(shape=[-4]),
        version_2(shape=[2**70]),
        version_2(shape=[2**62, 2**62], chunks=[1, 1]),
        version_2(chunks=[2**62]),
        version_2(chunks=[2, 2]),
        version_2(shape=[4] * 33, chunks=[4] * 33),
        version_2(shape="x"),
        version_2(shape=[4.5]),
        version_2(zarr_format=1),
        version_2(compressor={"id": "lzma"}),
        version_2(compressor={}),
        version_2(compressor={"id": "gzip", "level": "high"}),
        version_2(filters=[{"id": "delta"}]),
        version_2(order="K"),
        version_2(dimension_separator="-"),
        version_2(dtype="<f3"),
        version_2(dtype="<f16"),
        version_2(dtype="|O"),
        version_2(dtype="<U4"),
        version_2(dtype="|V2"),
        version_2(dtype="uint4"),
        version_2(dtype=[["a", "<f4"]]),
        version_2(dtype=5),
        version_3(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [0]}}),
        version_3(chunk_grid={"name": "rectangular", "configuration": {"chunk_shape": [4]}}),
        version_3(chunk_grid={"name": "regular"}),
        version_3(chunk_key_encoding={"name": "other"}),
        version_3(chunk_key_encoding={"name": "default", "configuration": {"separator": ".."}}),
        version_3(data_type="<f4"),
        version_3(data_type="string"),
        version_3(node_type="group"),
        version_3(codecs=[{"name": "vlen"}]),
        version_3(codecs=[{"name": "gzip"}]),
        version_3(codecs=[{"name": "sharding_indexed"}]),
        version_3(codecs=[{"name": "sharding_indexed", "configuration": {"chunk_shape": [3], "codecs": []}}]),
        version_3(storage_transformers=[{}]),
        version_3(fill_value=None),
        version_3(fill_value={"a": 2**80}),
        b"",
        b"[]",
        b"{" * 5000,
        b'{"shape":' + b"[" * 100_000,
        b"\xff",
        b'{"zarr_format":2}',
    ],
)
def test_metadata_that_lies_is_refused(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(TreeringError):
        read_all(lay(tmp_path, metadata, {"0": DATA, "c/0": DATA, "0.0": DATA}))


def test_metadata_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / ".zarray", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsafeError):
        ZarrArray(Filesystem(Disk()), str(tmp_path / "a"))
    with pytest.raises(CorruptError, match="found nothing"):
        ZarrArray(Filesystem(Disk()), str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("metadata", "chunk"),
    [
        (version_2(), DATA[:-1]),
        (version_3(), DATA[:-1]),
        (version_2(), DATA + b"\0"),
        (version_2(), b""),
        (version_2(compressor=GZIP), ZIPPED[:-13]),
        (version_2(compressor=GZIP), gzip.compress(DATA[:-1], mtime=0)),
        (version_2(compressor=GZIP), gzip.compress(DATA + b"\0", mtime=0)),
        (version_2(compressor=GZIP), b"\0" * 40),
        (version_2(compressor=GZIP), ZIPPED[:-5] + b"\xff" + ZIPPED[-4:]),  # the checksum
        (version_2(compressor={"id": "blosc"}), b"\2\1\x21\1" + struct.pack("<3I", 16, 16, 32) + DATA[:-4]),
        (version_2(compressor={"id": "zstd"}), b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little")),
    ],
)
def test_chunks_that_do_not_fit_are_corrupt(tmp_path: Path, metadata: Any, chunk: bytes) -> None:
    plain = metadata.get("compressor") is None
    with pytest.raises(
        CorruptError, match=f"expected a chunk of 16 bytes, found {len(chunk)}" if plain else str(tmp_path)
    ):
        read_all(lay(tmp_path, metadata, {"0": chunk, "c/0": chunk}))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.long
def test_claims_without_measure_take_no_memory(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(200 << 20), 9)
    blosc = np.zeros(200 << 20, np.uint8)
    make(tmp_path / "blosc", blosc, blosc.shape, compressor={"id": "blosc", "cname": "zstd"})
    frame = (tmp_path / "blosc" / "0").read_bytes()
    blocks = ((131072 << 3) | 2).to_bytes(3, "little") + b"\0"
    zstd = b"\x28\xb5\x2f\xfd\0\x80" + blocks * 2000
    huge = {"shape": [1 << 50], "chunks": [1 << 50]}
    before = peak()
    cases: list[tuple[Any, bytes, type]] = [
        (version_2(compressor=GZIP), bomb, CorruptError),
        (version_2(compressor={"id": "blosc"}), frame, CorruptError),
        (version_2(compressor={"id": "zstd"}), zstd, CorruptError),
        (version_2(**huge), DATA, UnsupportedError),
        (version_2(**huge, compressor=GZIP), ZIPPED, UnsupportedError),
        (version_2(shape=[1 << 50]), DATA, UnsupportedError),
        (version_2(chunks=[1 << 50]), DATA, UnsupportedError),
        (version_2(chunks=[1 << 50], compressor=GZIP), ZIPPED, UnsupportedError),
        (version_2(chunks=[1 << 28], compressor=GZIP), ZIPPED, CorruptError),
        (version_2(shape=[1 << 30], chunks=[1]), DATA[:4], CorruptError),
    ]
    for n, (metadata, chunk, error) in enumerate(cases):
        with pytest.raises(error):
            read_all(lay(tmp_path / str(n), metadata, {"0": chunk}))
    base = tmp_path / "o"
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{base}/"}).result()
    for n, (metadata, chunk, _) in enumerate(cases):
        store.write(f"{n}/.zarray", json.dumps(metadata)).result()
        store.write(f"{n}/0", chunk).result()
        with pytest.raises(TreeringError):
            read_all(ZarrArray(Filesystem(Disk()), str(n), base=str(base)))
    with open(tmp_path / "0" / "a" / "0", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsafeError):
        read_all(ZarrArray(Filesystem(Disk()), str(tmp_path / "0" / "a")))
    assert peak() - before < 100


@pytest.mark.parametrize("offset", [1 << 60, (1 << 64) - 1, 5])
def test_sharded_chunks_whose_index_lies(tmp_path: Path, offset: int) -> None:
    inner = version_3()["codecs"]
    codec = {"chunk_shape": [2], "codecs": inner, "index_codecs": inner, "index_location": "end"}
    metadata = version_3(codecs=[{"name": "sharding_indexed", "configuration": codec}])
    good = lay(tmp_path / "good", metadata, {"c/0": DATA + struct.pack("<4Q", 0, 8, 8, 8)})
    assert read_all(good).tobytes() == DATA
    with pytest.raises(CorruptError):
        read_all(lay(tmp_path, metadata, {"c/0": DATA + struct.pack("<4Q", offset, 8 + offset % 2, 8, 8)}))
    with pytest.raises(CorruptError):  # an inner chunk that is absent
        read_all(lay(tmp_path, metadata, {"c/0": DATA + struct.pack("<4Q", *[(1 << 64) - 1] * 2, 8, 8)}))


@pytest.mark.long
def test_every_truncation_and_flipped_byte_of_an_array(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32)
    make(tmp_path / "a", array, [12], compressor=GZIP)
    found = 0
    for name in (".zarray", "0"):
        path = tmp_path / "a" / name
        data = path.read_bytes()
        flipped = [data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :] for n in range(len(data))]
        for broken in [*(data[:n] for n in range(len(data))), *flipped]:
            path.write_bytes(broken)
            try:
                result = read_all(ZarrArray(Filesystem(Disk()), str(tmp_path / "a")))
            except TreeringError:
                found += 1
                continue
            assert name == ".zarray" or (result == array).all()
        path.write_bytes(data)
    assert found > 200


@pytest.mark.long
def test_broken_databases(tmp_path: Path) -> None:
    make(Path("a"), np.arange(300, dtype=np.float32), [100], base=tmp_path)
    found = 0
    for path in [place for place in tmp_path.rglob("*") if place.is_file()]:
        data = path.read_bytes()
        changes = [data[:n] for n in range(0, len(data), 3)]
        changes += [data[:n] + bytes([data[n] ^ 16]) + data[n + 1 :] for n in range(0, len(data), 3)]
        for broken in changes:
            path.write_bytes(broken)
            try:
                read_all(ZarrArray(Filesystem(Disk()), "a", base=str(tmp_path)))
            except TreeringError:
                found += 1
        path.unlink()
        with pytest.raises(CorruptError):
            read_all(ZarrArray(Filesystem(Disk()), "a", base=str(tmp_path)))
        path.write_bytes(data)
    assert found > 50


@pytest.mark.long
@pytest.mark.parametrize("ocdbt", [False, True])
def test_after_an_error_nothing_is_written_any_more(tmp_path: Path, ocdbt: bool) -> None:
    def read_box(box: Any) -> np.ndarray:
        if box[0][0] == 8:
            raise OSError("the source")
        return np.ones((1, 1 << 20), np.float32)

    for n in range(20):
        folder = tmp_path / str(n)
        writer = ZarrWriter(Filesystem(Disk()), str(folder), driver="zarr", ocdbt=ocdbt)
        with pytest.raises(OSError, match="the source"):
            writer.add("a", (9, 1 << 20), "float32", read_box, chunks=Chunks((1, 1 << 20)), compressor=None)
        shutil.rmtree(folder)
        time.sleep(0.01)
        assert not folder.exists()


def test_databases_that_point_out_of_their_folder(tmp_path: Path) -> None:
    context = ts.Context()  # the store in memory allows names that the file system's does not
    base = {"driver": "memory", "path": "ckpt/"}
    database = {"driver": "ocdbt", "base": base, "value_data_prefix": "../outside/", "assume_config": True}
    where = {"driver": "zarr", "kvstore": {**database, "config": {"max_inline_value_bytes": 0}, "path": "a/"}}
    ts.open(where, create=True, dtype="uint8", shape=[3], context=context).result().write(np.ones(3, "u1")).result()
    store = ts.KvStore.open({"driver": "memory"}, context=context).result()
    for key in store.list().result():
        place = Path(os.path.normpath(tmp_path / key.decode()))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(store.read(key).result().value)
    assert list((tmp_path / "outside").iterdir())
    with pytest.raises(CorruptError, match="Invalid key"):
        read_all(ZarrArray(Filesystem(Disk()), "a", base=str(tmp_path / "ckpt")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(version=st.sampled_from([version_2, version_3]), data=st.data())
def test_any_change_of_metadata(tmp_path: Path, version: Any, data: st.DataObject) -> None:
    metadata = version()
    field = data.draw(st.sampled_from([*metadata, "dimension_separator", "attributes"]))
    metadata[field] = data.draw(JSON | st.lists(st.integers(-1, 5), max_size=2))
    try:
        read_all(lay(tmp_path, metadata, {"0": DATA, "c/0": DATA}))
    except TreeringError:
        pass


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    compressor=st.sampled_from([None, GZIP, {"id": "zstd"}, {"id": "blosc"}, {"id": "bz2"}, {"id": "zlib"}]),
    chunk=st.binary(max_size=60),
)
def test_any_chunk(tmp_path: Path, compressor: Any, chunk: bytes) -> None:
    try:
        found = read_all(lay(tmp_path, version_2(compressor=compressor), {"0": chunk}))
    except TreeringError:
        return
    assert found.shape == (4,)
