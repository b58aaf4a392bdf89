"""Which files of a folder are the model, and the pieces of tensors that torch.distributed.checkpoint writes."""

import importlib.util
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from helpers import REAL, open_at
from treering import stores
from treering.errors import CorruptError, ExistsError, MismatchError, NotFoundError, TreeringError, UnsupportedError
from treering.formats.safetensors.folder import written_names
from treering.stores import open_file
from treering.stores.posix import Disk

Arrays = dict[str, np.ndarray]
A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int8)
NEW = {"a": A, "b": B}
OLD = {"a": -A, "b": -B}
DCP = REAL / "torch_dcp"
_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def same(found: Any, expected: Any) -> bool:
    return found.keys() == expected.keys() and all(
        (found[key].dtype, found[key].shape, found[key].tobytes())
        == (expected[key].dtype, expected[key].shape, expected[key].tobytes())
        for key in expected
    )


def single(folder: Path, arrays: Arrays, name: str = "model.safetensors") -> None:
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(arrays, folder / name, metadata={"format": "pt"})


def indexed(
    folder: Path, arrays: Arrays, index: str = "model.safetensors.index.json", stem: str = "model", **metadata: Any
) -> list[str]:
    """Writes a file for each array, and their index; returns the names of the files."""
    files = {key: f"{stem}-{n + 1:05}-of-{len(arrays):05}.safetensors" for n, key in enumerate(arrays)}
    for key, name in files.items():
        single(folder, {key: arrays[key]}, name)
    about = {"total_size": sum(array.nbytes for array in arrays.values()), **metadata}
    (folder / index).write_text(json.dumps({"metadata": about, "weight_map": files}))
    return [*files.values()]


def warnings(log: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in log.records if record.levelname == "WARNING")


# The model of a folder


@pytest.mark.parametrize("name", ["model", "diffusion_pytorch_model", "mine"])
def test_a_single_file_and_a_complete_index_are_two_models(tmp_path: Path, name: str) -> None:
    """transformers and accelerate load the single file of such a folder, diffusers and huggingface_hub the index."""
    index = f"{name}.safetensors.index.json"
    single(tmp_path / "m", OLD, f"{name}.safetensors")
    indexed(tmp_path / "m", NEW, index, name)
    with pytest.raises(UnsupportedError, match=rf"{name}\.safetensors, and the files of {index}.* Open one by its own"):
        tr.open(tmp_path / "m")
    assert same(tr.restore(tmp_path / "m" / index), NEW)
    assert same(tr.restore(tmp_path / "m" / f"{name}.safetensors"), OLD)


@pytest.mark.parametrize("gone", [[0], [1], [0, 1]])
def test_an_index_that_lacks_files_is_left_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: list[int]
) -> None:
    single(tmp_path / "m", NEW)
    files = indexed(tmp_path / "m", OLD)
    for n in gone:
        (tmp_path / "m" / files[n]).unlink()
    assert same(tr.restore(tmp_path / "m"), NEW) and tr.verify(tmp_path / "m").ok
    assert f"opens model.safetensors, not the index next to it, which lacks tensors: {tmp_path}/m/{files[gone[0]]}" in (
        warnings(caplog)
    )
    # It may be the index that the user means: nothing but the file that was opened is replaced.
    assert written_names(stores.get(""), str(tmp_path / "m")) == {"model.safetensors"}
    before = sorted(os.listdir(tmp_path / "m"))
    with pytest.raises(ExistsError, match=r"found .*model\.safetensors\.index\.json"):
        tr.save(tmp_path / "m", NEW, format="safetensors", max_shard_size="1GB", overwrite=True)
    assert sorted(os.listdir(tmp_path / "m")) == before and same(tr.restore(tmp_path / "m"), NEW)


def test_an_index_whose_files_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in indexed(tmp_path, OLD):
        (tmp_path / name).unlink()
    single(tmp_path, NEW, "adapter.safetensors")
    with pytest.raises(CorruptError, match=r"found none of them .*; fetch them, or open another .*: adapter\.safetens"):
        tr.open(tmp_path)
    for n, (key, array) in enumerate({**NEW, "c": B}.items()):
        single(tmp_path, {key: array}, f"model-{n:05}-of-00003.safetensors")
    assert same(tr.restore(tmp_path), {**NEW, "c": B})  # a complete set that has lost its index
    assert "opens model-00000-of-00003.safetensors, not the index next to it, which lacks" in warnings(caplog)


def test_a_damaged_single_file_next_to_a_complete_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    single(tmp_path / "m", OLD)
    os.truncate(tmp_path / "m" / "model.safetensors", 100)
    files = indexed(tmp_path / "m", NEW)
    assert same(tr.restore(tmp_path / "m"), NEW)
    assert "opens model.safetensors.index.json, not the file next to it: " in warnings(caplog)
    (tmp_path / "m" / files[0]).unlink()
    with pytest.raises(CorruptError, match=r"expected the file that model\.safetensors\.index\.json names"):
        tr.restore(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CorruptError, match=r"expected an index .*; to open model\.safetensors, move the index out"):
        tr.open(tmp_path / "m")


def test_an_index_of_the_single_file_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """mlx_lm writes an index also for one file."""
    single(tmp_path / "m", NEW)
    index = {"metadata": {"total_size": 28}, "weight_map": dict.fromkeys(NEW, "model.safetensors")}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(tr.restore(tmp_path / "m"), NEW) and not warnings(caplog)
    own = {"model.safetensors", "model.safetensors.index.json"}
    assert written_names(stores.get(""), str(tmp_path / "m")) == own


def test_files_of_an_earlier_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    indexed(tmp_path / "m", NEW)
    single(tmp_path / "m", {"c": B}, "model-00003-of-00003.safetensors")
    single(tmp_path / "m", OLD, "consolidated.safetensors")
    caplog.set_level("INFO", "treering")
    assert same(tr.restore(tmp_path / "m"), NEW)
    left = "other files of this model are left over, or of another save: model-00003-of-00003.safetensors"
    assert warnings(caplog).endswith(left) and "open the others by their own paths: consolidated.safetensors" in (
        caplog.text
    )
    caplog.clear()
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    single(tmp_path / "m", OLD)
    assert same(tr.restore(tmp_path / "m"), OLD)
    assert "opens model.safetensors; other files of this model are left over" in warnings(caplog)


def test_two_numbered_sets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    indexed(tmp_path, NEW)
    (tmp_path / "model.safetensors.index.json").unlink()
    for n in (1, 3):
        single(tmp_path, {f"old{n}": B}, f"model-0000{n}-of-00003.safetensors")
    assert same(tr.restore(tmp_path), NEW)
    assert "left over, or of another save: model-00001-of-00003.safetensors, model-00003-of" in warnings(caplog)
    single(tmp_path, {"old2": B}, "model-00002-of-00003.safetensors")
    with pytest.raises(
        NotFoundError, match=r"several complete sets .* model-00001-of-00002.* and model-00001-of-00003"
    ):
        tr.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "stem"),
    [
        ("model.safetensors.index.fp16.json", "model.fp16"),  # transformers, diffusers
        ("diffusion_pytorch_model.fp16.safetensors.index.json", "diffusion_pytorch_model.fp16"),
        ("consolidated.index.json", "consolidated"),
        ("weights_index.json", "weights"),
    ],
)
def test_the_index_of_a_variant(tmp_path: Path, index: str, stem: str) -> None:
    indexed(tmp_path, NEW, index, stem)
    assert same(tr.restore(tmp_path / index), NEW)
    base = stem.split(".")[0]
    single(tmp_path, OLD, f"{base}.safetensors")
    if ".safetensors." in index:  # libraries load the default unless they are asked for the variant
        assert base in ("model", "diffusion_pytorch_model") and same(tr.restore(tmp_path), OLD)
    assert same(tr.restore(tmp_path / index), NEW)


def test_an_index_of_other_files(tmp_path: Path) -> None:
    for name, text in [
        ("pytorch_model.bin.index.json", '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}'),
        ("my_index.json", "{}"),
        ("index.json", "[1]"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(UnsupportedError, match=r"it is (an index of other files, such as pytorch|no index of saf)"):
            tr.open(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    ['{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', '{"weight_map": {}, "weight_map": {}}', "{}"],
)
def test_an_index_that_is_ambiguous(tmp_path: Path, text: str) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        single(tmp_path, {"a": A}, name)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptError, match=r"index\.json: expected an index .*(occurs twice|without weight_map)"):
        tr.open(tmp_path)


def test_metadata_of_an_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """huggingface_hub writes the user's metadata into the index if there are several files."""
    indexed(tmp_path / "m", NEW, who="me", tied={"c": "a"}, total_parameters=10)
    expected = {"format": "pt", "who": "me", "tied": {"c": "a"}}
    assert tr.open(tmp_path / "m").metadata == expected and not warnings(caplog)
    tr.convert(tmp_path / "m", tmp_path / "one.safetensors", dtype="bfloat16")
    assert tr.open(tmp_path / "one.safetensors").metadata == expected
    indexed(tmp_path / "m", NEW, format="np", treering=1)
    assert tr.open(tmp_path / "m").metadata == {"format": "pt"}
    assert "the index has other metadata than its files, which are used: format" in warnings(caplog)


@pytest.mark.parametrize(("total", "text"), [(0, None), (28, None), (28.0, None), ("x", None), (27, "27"), (99, "99")])
def test_total_size(tmp_path: Path, caplog: pytest.LogCaptureFixture, total: Any, text: str | None) -> None:
    indexed(tmp_path / "m", NEW, total_size=total)
    assert same(tr.restore(tmp_path / "m"), NEW)
    # Two ranks that save DTensors without `save_distributed` write one file. The size of the index counts both.
    expected = f"its total_size is {text} bytes, but the tensors in its files have 28" if text else ""
    assert expected in warnings(caplog) and bool(warnings(caplog)) == bool(text)


# Pieces


def test_a_few_tensors_open_their_files_alone(tmp_path: Path, use_disk: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors of one module come along: a scale may be in the next file, also in a module below or above."""
    caplog.set_level(logging.INFO, "treering")
    names = {f"layer{n}.{part}": f"model-{n:05}-of-00008.safetensors" for n in range(8) for part in ("weight", "bias")}
    names["layer3.bias"] = names["layer4.bias"]
    names["layer5.weight.state.scale"] = names["layer6.weight"]
    arrays = {key: np.full(3, n, np.float32) for n, key in enumerate(names)}
    for name in dict.fromkeys(names.values()):
        single(tmp_path / "m", {key: arrays[key] for key, file in names.items() if file == name}, name)
    about = {"metadata": {"total_size": 12 * len(names)}, "weight_map": names}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(about))
    disk = use_disk(Opens())

    def opened(*keys: str, **options: Any) -> tuple[int, list[float]]:
        disk.files.clear()
        found = tr.restore(tmp_path / "m", {key: np.zeros(3, np.float32) for key in keys}, **options)
        return len({name for name in disk.files if name.endswith(".safetensors")}), [found[key][0] for key in keys]

    assert opened("layer1.weight", extra="ignore") == (1, [2])
    assert "opens 1 of 8 files; 15 leaves are in the others" in caplog.text
    assert opened("layer5.weight", extra="ignore") == (2, [10])
    assert opened("layer5.weight.state.scale", extra="ignore") == (2, [16])
    assert opened("layer3.weight", extra="ignore") == (2, [6])
    assert opened("layer7.bias", "layer0.weight", extra="ignore") == (2, [15, 0])
    assert opened("layer1.weight", extra=["*"]) == (8, [2])
    with pytest.raises(MismatchError, match=r"layer9.weight: .*closest: layer"):
        opened("layer9.weight", extra="ignore")
    (tmp_path / "m" / names["layer2.weight"]).unlink()
    assert opened("layer1.weight", extra="ignore") == (1, [2]), "the missing file has none of its tensors"
    with pytest.raises(CorruptError, match=r"model-00002-of-00008.safetensors: expected the file"):
        opened("layer2.weight", extra="ignore")
    assert not tr.verify(tmp_path / "m").ok


class Opens(Disk):
    def __init__(self) -> None:
        self.files: list[str] = []

    def open(self, path: Any, *args: Any, **options: Any) -> int:
        self.files.append(os.path.basename(path))
        return super().open(path, *args, **options)


def rank(folder: Path, n: int, pieces: dict[str, tuple[np.ndarray, list[int]]], part: str = "00001-of-00001") -> Path:
    """Writes the file of a rank, as `HuggingFaceStorageWriter` does."""
    folder.mkdir(exist_ok=True)
    info = {key: {"saved_offsets": begins} for key, (_, begins) in pieces.items()}
    about = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
    path = folder / f"shard-{n:05}-model-{part}.safetensors"
    arrays = {key: np.array(array, order="C") for key, (array, _) in pieces.items()}
    safetensors.numpy.save_file(arrays, path, metadata=about)
    return path


def expected_of(folder: str) -> Arrays:
    return {
        key: np.array(about["values"])
        .astype(getattr(ml_dtypes, about["dtype"], about["dtype"]))
        .reshape(about["shape"])
        for key, about in json.loads((DCP / "expected.json").read_text())[folder].items()
    }


@pytest.mark.parametrize("folder", ["one_file", "two_files", "consolidated", "consolidated/sharded"])
def test_real_pieces(tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str) -> None:
    expected = expected_of(folder)
    for mmap in (None, True, False):
        assert same(tr.restore(DCP / folder, mmap=mmap), expected)
    ckpt = tr.open(DCP / folder)
    assert tr.verify(DCP / folder).ok and ckpt.metadata == (None if folder == "consolidated" else {"format": "pt"})
    assert same({key: ckpt[key][...] for key in ckpt}, expected) and same(
        {"": ckpt["rows"][1:3, ::2]}, {"": expected["rows"][1:3, ::2]}
    )
    said = re.search(r"has tensors of (\d) ranks, up to rank \1; check that these are all", warnings(caplog))
    assert bool(said) == (folder != "consolidated")
    tr.convert(DCP / folder, tmp_path / "x.safetensors")
    assert same(safetensors.numpy.load_file(tmp_path / "x.safetensors"), expected)
    assert b"DCP_" not in (tmp_path / "x.safetensors").read_bytes()
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    for spec in (PartitionSpec("x"), PartitionSpec(None, "y")):
        sharding = NamedSharding(mesh, spec)
        like = {key: jax.ShapeDtypeStruct(one.shape, one.dtype) for key, one in expected.items()}
        like["columns"] = jax.ShapeDtypeStruct((2, 8), np.float32, sharding=sharding)
        found = tr.restore(DCP / folder, like=like)
        assert found["columns"].sharding == sharding
        assert same({key: np.asarray(array) for key, array in found.items()}, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_of_numbers_of_four_bits(tmp_path: Path, axis: int) -> None:
    """PyTorch has two such numbers as an element, so its offsets on the last axis count bytes."""
    (tmp_path / "m").mkdir()
    packed = np.arange(32, dtype=np.uint8).reshape(4, 8)
    for n, half in enumerate(np.split(packed, 2, axis)):
        begin = [0, 0]
        begin[axis] = n * half.shape[axis]
        about = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": begin}}), "DCP_VERSION": "1.0"}
        shape = [half.shape[0], 2 * half.shape[1]]
        tensor = {"dtype": "F4", "shape": shape, "data_offsets": [0, half.size]}
        header = json.dumps({"__metadata__": about, "w": tensor}).encode()
        data = len(header).to_bytes(8, "little") + header + half.tobytes()
        (tmp_path / "m" / f"shard-0000{n + 1}-model-00001-of-00001.safetensors").write_bytes(data)
    expected = np.stack([packed & 15, packed >> 4], axis=-1).reshape(4, 16)
    found: Any = tr.open(tmp_path / "m")["w"]
    assert np.array_equal(found[...].view(np.uint8), expected) and found.dtype == ml_dtypes.float4_e2m1fn
    assert np.array_equal(found[1:, 3:11].view(np.uint8), expected[1:, 3:11])


class Counting(Disk):
    nbytes = 0

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.nbytes += len(buffer)
        return super().read(fd, buffer, offset)


def test_a_box_reads_its_pieces_alone(tmp_path: Path, use_disk: Any) -> None:
    full = np.arange(8 * 4096, dtype=np.float64).reshape(8, 4096)
    for n in range(4):
        rank(tmp_path / "m", n + 1, {"w": (full[2 * n : 2 * n + 2], [2 * n, 0])})
    disk = use_disk(Counting())
    ckpt = tr.open(tmp_path / "m")
    opened = disk.nbytes
    assert opened < 10_000
    assert (ckpt["w"][3:4] == full[3:4]).all() and disk.nbytes - opened <= full[:2].nbytes
    assert (ckpt["w"][:, 5:9] == full[:, 5:9]).all()


def test_a_piece_by_its_own_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of complete tensors opens, also if it is one of several ranks'."""
    folder = tmp_path / "m"
    first = rank(folder, 1, {"w": (A[:1], [0, 0])})
    second = rank(folder, 2, {"w": (A[1:], [1, 0])})
    third = rank(folder, 3, {"b": (B, [0])})
    advice = rf"open the folder with the files of all ranks: {folder}\n"
    with pytest.raises(UnsupportedError, match=rf"{second}: expected the complete tensor 'w'.* begins at \[1, 0\]\); "):
        tr.open(second)
    with pytest.raises(
        UnsupportedError, match=r"'w', found a piece .*\(files of other ranks have the rest\); " + advice
    ):
        tr.open(first)
    assert same(tr.restore(third), {"b": B}) and tr.open(third).metadata == {"format": "pt"}
    assert same(tr.restore(folder), {"w": A, "b": B})
    with pytest.raises(UnsupportedError, match=advice):
        tr.convert(second, tmp_path / "x.msgpack")
    assert not (tmp_path / "x.msgpack").exists()
    single(folder, OLD, "adapter.safetensors")  # of another program
    assert same(tr.restore(folder), {"w": A, "b": B})
    third.rename(folder / "shard-00005-model-00001-of-00001.safetensors")
    caplog.clear()
    tr.open(folder)
    assert "has tensors of 3 ranks, up to rank 5, without rank 3" in warnings(caplog)
    caplog.clear()
    alone = tmp_path / "alone"
    assert same(tr.restore(rank(alone, 1, {"w": (A[:1], [0, 0])})), {"w": A[:1]})  # may be all that there is
    assert f"{alone}/shard-00001-model-00001-of-00001.safetensors: has tensors of only rank 1; check" in warnings(
        caplog
    )
    lone = shutil.move(second, tmp_path / "renamed.safetensors")
    with pytest.raises(UnsupportedError, match=r"begins at \[1, 0\]"):
        tr.open(lone)
    index = {"weight_map": {"w": "renamed.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedError, match="an index names one file for each tensor; remove it"):
        tr.open(tmp_path)


def _info(text: Any, **more: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        about = {"DCP_SHARDING_INFO": text if isinstance(text, str) else json.dumps(text), **more}
        path = folder / "shard-00002-model-00001-of-00001.safetensors"
        safetensors.numpy.save_file({"w": A[1:]}, path, metadata=about)

    return write


def _rank(*args: Any, **kwargs: Any) -> Callable[[Path], object]:
    return lambda folder: rank(folder, *args, **kwargs)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (_rank(2, {"w": (A, [0, 0])}), "expected pieces without overlaps, found F32 .0:1, 0:3. in shard-00001"),
        (_rank(2, {"w": (A[1:], [2, 0])}), r"with all 9 elements of \[3, 3\], found 6 in shard-00001.*fetch the files"),
        (_rank(2, {"w": (A[1:, :2], [1, 0])}), "with all 6 elements .* found 5"),
        (_rank(2, {"w": (A[1:, :2], [2**62, 0])}), "expected pieces with all"),
        (
            _rank(2, {"w": (A[1:].astype("f8"), [1, 0])}),
            "of one dtype and number of axes, found F32 .* and F64 .1:2, 0:3",
        ),
        (_rank(2, {"w": (A[1], [3])}), "of one dtype and number of axes"),
        (_rank(2, {"w": (A[1:], [1, 0])}, "00002-of-00002"), "files of different saves .*; move those of one out"),
        (_info({}), r"shard-00002.*'w': expected DCP_SHARDING_INFO to say where its 2 axes begin, found nothing"),
        (_info({"w": {"saved_offsets": [1]}}), r"where its 2 axes begin, found \[1\]"),
        (_info({"w": {"saved_offsets": [-1, 0]}}), "expected DCP_SHARDING_INFO to have the saved_offsets"),
        (_info({"w": {}}), "expected DCP_SHARDING_INFO to have the saved_offsets"),
        (_info('{"w": {"saved_offsets": [0, 0]}, "w": {"saved_offsets": [1, 0]}}'), "a key occurs twice"),
        (_info("{"), "expected DCP_SHARDING_INFO to have the saved_offsets"),
        (_info({"w": {"saved_offsets": [1, 0]}}, DCP_VERSION="2.0"), "expected DCP_VERSION 1.0 of .*, found '2.0'"),
        (_info(""), "expected one leaf at w, found 'w' in shard-00001"),
    ],
)
def test_pieces_that_do_not_fit(tmp_path: Path, other: Any, text: str) -> None:
    rank(tmp_path, 1, {"w": (A[:1], [0, 0])})
    other(tmp_path)
    with pytest.raises(TreeringError, match=text) as raised:
        tr.open(tmp_path)
    assert str(tmp_path) in str(raised.value) and "open one of them" not in str(raised.value)


@pytest.mark.parametrize("pattern", ["model-rank-{}-part-0.safetensors", "model{}-mp2.safetensors"])
def test_tensor_parallel_ranks(tmp_path: Path, pattern: str) -> None:
    """vLLM's `save_sharded_state` and DeepSeek's converter record nothing about their pieces."""
    for n in range(2):
        single(tmp_path, {"w": A[n:]}, pattern.format(n))
    with pytest.raises(NotFoundError, match="has pieces of tensors, of one tensor-parallel rank") as raised:
        tr.open(tmp_path)
    assert "open one of them" not in str(raised.value)
    single(tmp_path / "one", {"w": A}, pattern.format(0))
    assert same(tr.restore(tmp_path / "one"), {"w": A})


def test_a_file_that_every_rank_lacks(tmp_path: Path) -> None:
    rank(tmp_path, 1, {"w": (A[:1], [0, 0])}, "00001-of-00002")
    rank(tmp_path, 2, {"w": (A[1:], [1, 0])}, "00001-of-00002")
    with pytest.raises(CorruptError, match=r"fetch shard-\*-model-00002-of-00002\.safetensors"):
        tr.open(tmp_path)
    rank(tmp_path, 2, {"b": (B, [0])}, "00002-of-00002")  # a rank without tensors for a file does not write it
    assert same(tr.restore(tmp_path), {"w": A, "b": B})


def test_pieces_that_are_no_grid(tmp_path: Path) -> None:
    """A sharding may be uneven in two axes; a rank without a part of a tensor still has an empty piece."""
    full = np.arange(9, dtype=np.float16).reshape(3, 3)
    rank(tmp_path, 1, {"w": (full[:1, :2], [0, 0]), "none": (np.zeros((0, 3)), [0, 0]), "0d": (np.array(3, "f4"), [])})
    rank(tmp_path, 2, {"w": (full[:2, 2:], [0, 2]), "none": (np.zeros((0, 3)), [0, 0])})
    rank(tmp_path, 3, {"w": (full[1:, :1], [1, 0])})
    rank(tmp_path, 4, {"w": (full[2:, 1:], [2, 1])})
    rank(tmp_path, 5, {"w": (full[1:2, 1:2], [1, 1]), "more": (np.zeros((0, 2)), [3, 0])})
    rank(tmp_path, 6, {"w": (full[3:], [3, 0]), "more": (np.ones((3, 2)), [0, 0])})
    expected = {"w": full, "none": np.zeros((0, 3)), "0d": np.array(3, np.float32), "more": np.ones((3, 2))}
    assert same(dict(sorted(tr.restore(tmp_path).items())), dict(sorted(expected.items())))


def test_bookkeeping_that_an_earlier_copy_has_kept(tmp_path: Path) -> None:
    """Metadata is never written where a reader would take it for places of pieces."""
    about = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [1, 0]}}), "x": "y"}
    tr.save(tmp_path / "x.safetensors", NEW, metadata=about)
    ckpt = tr.open(tmp_path / "x.safetensors")
    assert ckpt.metadata == about and same(ckpt.restore(), NEW)
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        assert "DCP_SHARDING_INFO" not in file.metadata()


@_TORCH
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_reads_what_is_written(tmp_path: Path) -> None:
    import torch  # type: ignore
    import torch.distributed.checkpoint as dcp  # type: ignore
    from torch.distributed.checkpoint.hf_storage import (  # type: ignore
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
    )

    arrays = {"a": A, "b": B, "c": np.arange(5, dtype=np.float64)}
    tr.save(tmp_path / "ours", arrays, format="safetensors", max_shard_size=32)
    tr.convert(DCP / "one_file", tmp_path / "joined", format="safetensors", max_shard_size=64)
    for folder, expected in (("ours", arrays), ("joined", expected_of("one_file"))):
        assert len(list((tmp_path / folder).glob("*.safetensors"))) > 1
        state = {key: torch.zeros(one.shape, dtype=getattr(torch, one.dtype.name)) for key, one in expected.items()}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / folder)), no_dist=True)
        assert all(state[key].double().tolist() == one.astype("f8").tolist() for key, one in expected.items())
    for options in ({}, {"save_distributed": True}):
        folder = tmp_path / f"theirs-{len(options)}"
        writer = HuggingFaceStorageWriter(str(folder), **options)
        dcp.save({key: torch.from_numpy(one) for key, one in arrays.items()}, storage_writer=writer, no_dist=True)
        assert same(tr.restore(folder), arrays)
        (file,) = folder.glob("*.safetensors")
        assert same(tr.restore(file), arrays)


PEFT, CONFIG = REAL / "peft", "adapter_config.json"


@pytest.mark.parametrize("name", ["plain", "patterns", "dora"])
def test_every_copy_keeps_the_config_of_an_adapter(tmp_path: Path, name: str) -> None:
    source = PEFT / name
    expected = {"format": "pt", CONFIG: json.loads((source / CONFIG).read_text())}
    assert tr.open(source).metadata == tr.open(source / "adapter_model.safetensors").metadata == expected
    tr.convert(source, tmp_path / "native")
    tr.convert(tmp_path / "native", tmp_path / "one.safetensors")
    tr.convert(tmp_path / "one.safetensors", tmp_path / "adapter", format="safetensors", max_shard_size="1GB")
    assert sorted(os.listdir(tmp_path / "adapter")) == [CONFIG, "adapter_model.safetensors"]
    for copy in ("native", "one.safetensors", "adapter"):
        assert tr.open(tmp_path / copy).metadata == expected
        assert not tr.diff(source, tmp_path / copy)
    # The files of other names cannot have one next to them.
    options: dict[str, Any] = {"format": "safetensors", "filename_pattern": "model{suffix}.safetensors"}
    tr.convert(source, tmp_path / "model", **options)
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    assert tr.open(tmp_path / "model").metadata == expected


def test_an_adapter_in_several_files_has_one_config(tmp_path: Path) -> None:
    expected = tr.open(PEFT / "plain").metadata
    tr.convert(PEFT / "plain", tmp_path / "a", format="safetensors", max_shard_size=500)
    names = os.listdir(tmp_path / "a")
    assert CONFIG in names and "adapter_model.safetensors.index.json" in names and len(names) > 4
    assert tr.open(tmp_path / "a").metadata == expected and not tr.diff(PEFT / "plain", tmp_path / "a")


def test_a_new_adapter_replaces_the_config_and_keeps_other_files(tmp_path: Path) -> None:
    shutil.copytree(PEFT / "plain", tmp_path / "a")
    (tmp_path / "a" / "README.md").write_text("x")
    with pytest.raises(ExistsError):
        tr.convert(PEFT / "patterns", tmp_path / "a", format="safetensors", max_shard_size="1GB")
    tr.convert(PEFT / "patterns", tmp_path / "a", format="safetensors", max_shard_size="1GB", overwrite=True)
    assert tr.open(tmp_path / "a").metadata == tr.open(PEFT / "patterns").metadata
    tr.save(tmp_path / "a", NEW, format="safetensors", max_shard_size="1GB", overwrite=True)
    # The config of the arrays that are gone would scale the new ones.
    assert sorted(os.listdir(tmp_path / "a")) == ["README.md", "model.safetensors"]
    assert tr.open(tmp_path / "a").metadata is None


def test_an_adapter_joins_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "README.md").write_text("x")
    tr.convert(PEFT / "plain", tmp_path / "a", format="safetensors", max_shard_size="1GB")
    assert tr.open(tmp_path / "a").metadata == tr.open(PEFT / "plain").metadata
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(ExistsError, match=f"{CONFIG}.*move it out of the folder"):
        tr.convert(PEFT / "plain", tmp_path / "a", format="safetensors", max_shard_size="1GB")
    (tmp_path / "a" / CONFIG).rename(tmp_path / "elsewhere.json")
    tr.convert(PEFT / "plain", tmp_path / "a", format="safetensors", max_shard_size="1GB")


def test_the_config_of_an_adapter_belongs_to_no_other_model(tmp_path: Path) -> None:
    shutil.copytree(PEFT / "plain", tmp_path / "a")
    single(tmp_path / "a", NEW)
    assert tr.open(tmp_path / "a").metadata == {"format": "pt"}


@pytest.mark.parametrize("text", ["[1]", "{", '{"r": 1, "r": 2}', '{"lora_alpha": NaN}', ""])
def test_a_damaged_config_of_an_adapter(tmp_path: Path, text: str) -> None:
    shutil.copytree(PEFT / "plain", tmp_path / "a")
    (tmp_path / "a" / CONFIG).write_text(text)
    with pytest.raises(CorruptError, match=f"{CONFIG}: expected a JSON object"):
        tr.open(tmp_path / "a")
    (tmp_path / "a" / CONFIG).rename(tmp_path / "elsewhere.json")  # what the message advises
    assert tr.open(tmp_path / "a").metadata == {"format": "pt"}


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    metadata = {CONFIG: {"lora_alpha": float("inf")}}
    with pytest.raises(UnsupportedError, match=CONFIG):
        tr.save(tmp_path / "a", NEW, format="safetensors", max_shard_size="1GB", metadata=metadata)
    assert not (tmp_path / "a").exists()


def test_a_config_next_to_a_file_counts_more_than_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PEFT reads only the file next to it."""
    tr.save(tmp_path / "adapter_model.safetensors", NEW, metadata={CONFIG: {"r": 4}, "note": "x"})
    assert tr.open(tmp_path).metadata == {CONFIG: {"r": 4}, "note": "x"}
    (tmp_path / CONFIG).write_text('{"r": 4}')
    assert tr.open(tmp_path).metadata == {CONFIG: {"r": 4}, "note": "x"} and not warnings(caplog)
    (tmp_path / CONFIG).write_text('{"r": 8}')
    assert tr.open(tmp_path).metadata == {CONFIG: {"r": 8}, "note": "x"} and CONFIG in warnings(caplog)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="it counts descriptors by /proc")
def test_files_of_a_model_sleep_if_they_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may open 256 files by default on macOS. They are opened again when they are read."""
    monkeypatch.setattr(open_file, "_max_awake", lambda: 3)
    tree = {f"layer{n}": np.full((40, 2), n, np.float32) for n in range(12)}
    tr.save(tmp_path / "m", tree, format="safetensors", max_shard_size="400B")
    shards = sorted((tmp_path / "m").glob("*-of-*"))
    assert len(shards) == 12

    def awake() -> int:
        return len(open_at(tmp_path / "m"))

    ckpt = tr.open(tmp_path / "m")
    assert 0 < awake() <= 3
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: ckpt.restore(), range(24)):
            assert all(np.array_equal(found[name], tree[name]) for name in tree)
    assert all(np.array_equal(ckpt.restore(mmap=True)[name], tree[name]) for name in tree)
    assert awake() <= 3
    os.replace(shutil.copy(shards[0], tmp_path / "copy"), shards[0])
    shards[1].unlink()
    for name, text in (("layer0", "another file has its name"), ("layer1", "deleted since it was opened")):
        ckpt["layer11"][:], ckpt["layer10"][:], ckpt["layer9"][:]  # These are awake then.
        with pytest.raises(NotFoundError, match=text):
            ckpt[name][:]
