"""Streams of weights as slime and SkyRL publish them, written here from their descriptions alone."""

import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import sys
import types
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash

import treering as tr
from helpers import assert_same
from hostile_input import flip
from treering import stores
from treering.errors import CorruptError, ExistsError, MismatchError, UnsafeError, UnsupportedError

zstandard = pytest.importorskip("zstandard")
RECEIVER = os.environ.get("SLIME_RECEIVER", "")  # the file local_checkpoint.py of slime's patch to SGLang
SKYRL = os.environ.get("SKYRL_RECEIVER", "")  # the folder weight_sync of SkyRL, next to the packages that it is in
CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}


def _versions(count: int = 6) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    found = [
        {
            "model.a.weight": rng.standard_normal((30, 40)).astype(ml_dtypes.bfloat16),
            "model.b.weight": rng.standard_normal(700).astype(np.float32),
            "model.c.bias": np.ones(9, np.float32),
            "one": np.array(2, np.float32),
        }
    ]
    for _ in range(count - 1):
        new = {name: array.copy() for name, array in found[-1].items()}
        for name in ("model.a.weight", "model.b.weight"):
            data = new[name].reshape(-1).view(np.uint8)
            data[rng.integers(0, data.size, 20)] ^= 5
        found.append(new)
    return found


def _changed(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> dict[str, tuple[bytes, bytes]]:
    pairs = {name: (old[name].tobytes(), new[name].tobytes()) for name in new}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _packed(old: bytes, new: bytes, encoding: str) -> np.ndarray:
    a, b = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        data = (a ^ b).tobytes()
    else:
        at = np.flatnonzero(a != b).astype("<u4")
        data = np.uint32(at.size).tobytes() + at.tobytes() + b[at].tobytes()
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(data), np.uint8)


def _full(folder: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")


def slime(stream: pathlib.Path, number: int, old: Any, new: Any, encoding: str, checksum: str) -> pathlib.Path:
    folder = stream / f"weight_v{number:06d}"
    folder.mkdir(parents=True)
    weights = {}
    pairs = list(_changed(old, new).items())
    for n, (name, pair) in enumerate(pairs):
        file = f"model-{n:05d}-of-{len(pairs):05d}.safetensors"
        weights[name] = file
        about = {name: CHECKSUMS[checksum](pair[1])}
        safetensors.numpy.save_file({name: _packed(*pair, encoding)}, folder / file, about)
    about = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}", "delta_encoding": encoding}
    about |= {"compression_format": "zstd", "checksum_format": checksum}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": about, "weight_map": weights}))
    return folder


def skyrl(stream: pathlib.Path, number: int, old: Any, new: Any, encoding: str, checksum: str) -> pathlib.Path:
    folder = stream / f"delta-{number:08d}"
    folder.mkdir(parents=True)
    records, payloads = [], {}
    for n, (name, pair) in enumerate(_changed(old, new).items()):
        payloads[f"t{n}"] = _packed(*pair, "xor")
        sums = {"sha256": CHECKSUMS["sha256"](pair[1])}
        if checksum != "sha256":
            sums = {"checksum": CHECKSUMS[checksum](pair[1]), "checksum_algorithm": checksum}
        record = {"name": name, "dtype": "bfloat16", "shape": [1], **sums, "payload_file": "p.safetensors"}
        record |= {"payload_key": f"t{n}", "uncompressed_num_bytes": len(pair[1])}
        records.append({**record, "compressed_num_bytes": payloads[f"t{n}"].size})
    safetensors.numpy.save_file(payloads, folder / "p.safetensors")
    about = {"version": number, "base_version": number - 1, "tensors": records, "payload_files": ["p.safetensors"]}
    (folder / "manifest.json").write_text(json.dumps(about))
    return folder


LAYOUTS = [(slime, "xor", "xxh3-128"), (slime, "overwrite", "adler32"), (skyrl, "xor", "xxh3-128")]
LAYOUTS += [(skyrl, "xor", "sha256")]
Write = Callable[..., pathlib.Path]


def _stream(place: pathlib.Path, write: Write, encoding: str, checksum: str) -> list[pathlib.Path]:
    """Writes a stream whose base is version 0; returns the folders of the versions from that on."""
    trees = _versions()
    folders = [place / ("weight_v000000" if write is slime else "delta-00000000")]
    _full(folders[0], trees[0])
    for number, (old, new) in enumerate(itertools.pairwise(trees), 1):
        folders.append(write(place, number, old, new, encoding, checksum))
    return folders


@pytest.mark.parametrize(("write", "encoding", "checksum"), LAYOUTS)
def test_every_version_of_a_stream(write: Write, encoding: str, checksum: str, tmp_path: pathlib.Path) -> None:
    folders = _stream(tmp_path, write, encoding, checksum)
    for number, (folder, tree) in enumerate(zip(folders, _versions(), strict=True)):
        ckpt = tr.open(folder)
        assert_same(ckpt.restore(), tree)
        assert tr.verify(folder).ok and np.array_equal(ckpt["model.a.weight"][3:5, 1], tree["model.a.weight"][3:5, 1])
        assert number == 0 or (ckpt.format, ckpt.step) == (write.__name__, number)
    assert tr.steps(tmp_path) == list(range(6))
    assert_same(tr.open(tmp_path).restore(), _versions()[-1])
    tr.convert(folders[3], tmp_path / "model.safetensors")
    assert_same(tr.restore(tmp_path / "model.safetensors"), _versions()[3])


def test_workers_follow_a_stream_of_slime(tmp_path: pathlib.Path) -> None:
    """A complete version in between begins the chain again, so versions before it may be deleted."""
    trees = _versions()
    folders = _stream(tmp_path, slime, "xor", "xxh3-128")
    weights = tr.follow_weights(tmp_path, timeout=5)
    found = next(weights)
    assert found.version == 5
    assert_same(found.tree, trees[5])
    _full(tmp_path / "weight_v000006", trees[2])
    assert_same(next(weights).tree, trees[2])
    for folder in folders:
        shutil.rmtree(folder)
    slime(tmp_path, 7, trees[2], trees[4], "overwrite", "xxh3-128")
    found = next(weights)
    assert found.version == 7
    assert_same(found.tree, trees[4])


@pytest.mark.parametrize("write", [slime, skyrl])
def test_workers_leave_out_damaged_versions(
    write: Write, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    trees = _versions()
    folders = _stream(tmp_path, write, "xor", "xxh3-128")
    (file, *_) = folders[4].glob("*.safetensors")
    flip(file, file.stat().st_size - 2)
    weights = tr.follow_weights(tmp_path, timeout=0)
    found = next(weights)
    assert found.version == 3 and "version 5 is left out" in caplog.text and "version 4 is left out" in caplog.text
    assert_same(found.tree, trees[3])


@pytest.mark.parametrize(("write", "encoding", "checksum"), LAYOUTS)
def test_damage_and_gaps_are_errors(write: Write, encoding: str, checksum: str, tmp_path: pathlib.Path) -> None:
    folders = _stream(tmp_path, write, encoding, checksum)
    file = sorted(folders[2].glob("*.safetensors"))[0]
    flip(file, file.stat().st_size - 2)
    for folder in folders[2:]:
        assert not tr.verify(folder).ok
        with pytest.raises(CorruptError, match=folders[2].name):
            tr.restore(folder)
    assert_same(tr.restore(folders[1]), _versions()[1])
    folders[2].rename(tmp_path / "gone")
    with pytest.raises(CorruptError, match=f"expected {folders[2].name} next to it"):
        tr.open(folders[3])
    folders[0].rename(tmp_path / "base")
    with pytest.raises(CorruptError, match=f"link the checkpoint that .* to .*{folders[0].name}"):
        tr.open(folders[1])
    os.symlink(tmp_path / "base", folders[0])  # what the error advises
    assert_same(tr.restore(folders[1]), _versions()[1])


def test_another_trainer_continues_no_stream(tmp_path: pathlib.Path) -> None:
    trees = _versions(2)
    _full(tmp_path / "weight_v000001", trees[0])
    slime(tmp_path, 2, trees[0], trees[1], "xor", "xxh3-128")
    with tr.Publisher(tmp_path) as publisher, pytest.raises(MismatchError, match="found weight_v000001, which another"):
        publisher.publish(3, trees[1])
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("write", [slime, skyrl])
def test_a_delta_is_never_taken_for_a_model(write: Write, tmp_path: pathlib.Path) -> None:
    """Its tensors are compressed differences. Elsewhere, or without its base, it does not open."""
    folders = _stream(tmp_path, write, "xor", "xxh3-128")
    for name in ("model", "copy/weight_v000002", "copy/delta-00000002"):
        shutil.copytree(folders[2], tmp_path / name)
        with pytest.raises((UnsupportedError, CorruptError), match=r"difference|next to it"):
            tr.restore(tmp_path / name)


def test_wrong_versions_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    trees = _versions(3)
    _full(tmp_path / "weight_v000000", trees[0])
    folder = slime(tmp_path, 1, trees[0], trees[1], "xor", "xxh3-128")
    index = folder / "model.safetensors.index.json"
    sound = json.loads(index.read_text())
    changes: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"delta_encoding": "add"}, UnsupportedError, "encoding xor or overwrite, found 'add'"),
        ({"compression_format": "lz4"}, UnsupportedError, "compression zstd"),
        ({"checksum_format": "blake3"}, UnsupportedError, "checksum xxh3-128 or"),
        ({"checksum_format": "adler32"}, CorruptError, "adler32 checksum"),
        ({"base_version": "000001"}, CorruptError, "expected version"),
        ({"version": 1}, CorruptError, "expected the number of a version in digits"),
    ]
    for change, error, match in changes:
        index.write_text(json.dumps({**sound, "metadata": {**sound["metadata"], **change}}))
        with pytest.raises(error, match=match):
            tr.restore(folder)
    for name, error in (("../x.safetensors", UnsafeError), ("model-00007.safetensors", CorruptError)):
        index.write_text(json.dumps({**sound, "weight_map": {"model.a.weight": name}}))
        with pytest.raises(error):
            tr.restore(folder)
    index.write_text(json.dumps({**sound, "weight_map": {"other": "model-00000-of-00002.safetensors"}}))
    with pytest.raises(CorruptError, match="found 'other'"):
        tr.open(folder)
    index.write_text(json.dumps(sound))
    large = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(1 << 26)), np.uint8)
    about = {"model.a.weight": "0"}
    safetensors.numpy.save_file({"model.a.weight": large}, folder / "model-00000-of-00002.safetensors", about)
    with pytest.raises(CorruptError, match="expected a zstd frame of 2400 bytes, found one of 67108864"):
        tr.restore(folder)


def _receiver(file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("local_checkpoint", file)
    assert spec and spec.loader
    receiver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(receiver)
    return receiver


@pytest.mark.skipif(not RECEIVER, reason="SLIME_RECEIVER names no file local_checkpoint.py of slime's patch to SGLang")
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_it_reads_what_the_receiver_of_slime_makes(encoding: str, tmp_path: pathlib.Path) -> None:
    receiver = _receiver(RECEIVER)
    folders = _stream(tmp_path / "s", slime, encoding, "xxh3-128")
    for number, folder in enumerate(folders):
        receiver.pull(str(tmp_path / "local"), str(folders[0]), str(tmp_path / "s"), number)
        theirs = safetensors.numpy.load_file(tmp_path / "local" / "model.safetensors")
        assert_same(tr.open(folder).restore(), {name: theirs[name] for name in _versions()[number]})


def test_a_stream_that_begins_again_is_pulled(tmp_path: pathlib.Path) -> None:
    """A version with the number of the one before, but other weights, takes its place."""
    from treering._publish.pull import pull

    trees = _versions()
    for new in (trees[1], trees[2]):
        _full(tmp_path / "s" / "weight_v000000", trees[0])
        slime(tmp_path / "s", 1, trees[0], new, "xor", "xxh3-128")
        assert [version for version, _ in pull(tmp_path / "s", tmp_path / "engine")] == [1]
        assert_same(tr.restore(tmp_path / "engine"), new)
        shutil.rmtree(tmp_path / "s")


def _read_slime(stream: pathlib.Path, number: int) -> dict[str, np.ndarray]:
    """Reads a version as the receiver of slime does: from the newest complete one, with all after it."""
    first = number
    index = "model.safetensors.index.json"
    while "delta_encoding" in _json(stream / f"weight_v{first:06d}" / index).get("metadata", {}):
        first -= 1
    found = safetensors.numpy.load_file(stream / f"weight_v{first:06d}" / "model.safetensors")
    for n in range(first + 1, number + 1):
        folder = stream / f"weight_v{n:06d}"
        about = {"version": f"{n:06d}", "base_version": f"{n - 1:06d}", "delta_encoding": "xor"}
        about |= {"compression_format": "zstd", "checksum_format": "xxh3-128"}
        found_index = _json(folder / index)
        assert found_index["metadata"] == about
        assert {*found_index["weight_map"].values()} == {one.name for one in folder.glob("*.safetensors")}
        for name, file in found_index["weight_map"].items():
            with safetensors.safe_open(folder / file, "numpy") as opened:
                _apply(found, name, opened.get_tensor(name), opened.metadata()[name])
    return found


def _read_skyrl(stream: pathlib.Path, number: int) -> dict[str, np.ndarray]:
    found = safetensors.numpy.load_file(stream / "delta-00000000" / "model.safetensors")
    for n in range(1, number + 1):
        folder = stream / f"delta-{n:08d}"
        about = _json(folder / "manifest.json")
        records = about["tensors"]
        assert (about["version"], about["base_version"]) == (n, n - 1)
        assert about["payload_files"] == sorted({one["payload_file"] for one in records})
        assert about["total_compressed_num_bytes"] == sum(one["compressed_num_bytes"] for one in records)
        assert about["total_uncompressed_num_bytes"] == sum(one["uncompressed_num_bytes"] for one in records)
        for one in records:
            packed = safetensors.numpy.load_file(folder / one["payload_file"])[one["payload_key"]]
            array = found[one["name"]]
            assert (one["dtype"], one["shape"]) == (array.dtype.name, list(array.shape))
            assert (one["uncompressed_num_bytes"], one["compressed_num_bytes"]) == (array.nbytes, packed.size)
            _apply(found, one["name"], packed, one["checksum"])
            assert one["checksum_algorithm"] == "xxh3-128"
    return found


def _json(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _apply(found: dict[str, np.ndarray], name: str, packed: np.ndarray, checksum: str) -> None:
    old, change = found[name].tobytes(), zstandard.ZstdDecompressor().decompress(packed.tobytes())
    new = bytes(a ^ b for a, b in zip(old, change, strict=True))
    assert new != old and checksum == xxhash.xxh3_128_hexdigest(new)
    found[name] = np.frombuffer(new, found[name].dtype).reshape(found[name].shape)


WRITTEN = [("slime", "weight_v{:06d}", _read_slime), ("skyrl", "delta-{:08d}", _read_skyrl)]


def _trees(count: int = 23) -> list[dict[str, Any]]:
    """Returns versions, of which one is as the version before."""
    layer = {"w": jnp.ones((30, 40), "bfloat16"), "n": jnp.arange(9)}
    found: list[dict[str, Any]] = []
    for number in range(count):
        if number != 7:
            w, n = layer["w"].at[number % 5, number].add(0.5), layer["n"].at[-1].add(number % 2)
            layer = {"w": w, "n": n}
        found.append({"layer": layer, "one": np.array(2.0 ** min(number, 6)), "none": np.ones((0, 3))})
    return found


@pytest.mark.parametrize(("format", "name", "read"), WRITTEN)
def test_other_readers_get_what_is_written(format: str, name: str, read: Any, tmp_path: pathlib.Path) -> None:
    """Written from the description alone, they read every version, bit for bit."""
    for number, tree in enumerate(_trees()):
        path = tmp_path / name.format(number)
        tr.save(path, tree, format=format)
        if number == 0:
            (path / "config.json").write_text("{}")
        assert_same(tr.restore(path, tree), tree)
        theirs = read(tmp_path, number)
        flat = {"layer/w": tree["layer"]["w"], "layer/n": tree["layer"]["n"], "one": tree["one"], "none": tree["none"]}
        assert theirs.keys() == flat.keys()
        for key, array in flat.items():
            assert theirs[key].dtype == array.dtype and theirs[key].tobytes() == np.asarray(array).tobytes()
        complete = number == 0 or (format == "slime" and number == 20)
        assert (path / "model.safetensors").exists() == (path / "config.json").exists() == complete
    assert tr.steps(tmp_path) == list(range(23)) and tr.verify(tmp_path).ok


@pytest.mark.parametrize(("format", "name", "read"), WRITTEN)
def test_a_stream_of_ours_is_converted(format: str, name: str, read: Any, tmp_path: pathlib.Path) -> None:
    trees = _trees(3)
    with tr.Publisher(tmp_path / "ours") as publisher:
        for number, tree in enumerate(trees):
            publisher.publish(number + 7, tree, metrics={"reward": 1.0})
    for number, step in enumerate(tr.steps(tmp_path / "ours")):
        path = tmp_path / "theirs" / name.format(number)
        tr.convert(tmp_path / "ours", path, step=step, format=format)
        assert (tr.open(path).step, tr.open(path).metrics, tr.open(path).metadata) == (number, {}, None)
    assert read(tmp_path / "theirs", 2)["layer/w"].tobytes() == np.asarray(trees[2]["layer"]["w"]).tobytes()
    assert next(tr.follow_weights(tmp_path / "theirs", timeout=0)).version == 2


@pytest.mark.parametrize(("format", "name", "read"), WRITTEN)
def test_versions_that_cannot_be_written(
    format: str, name: str, read: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    trees = _trees(3)
    for number, tree in enumerate(trees):
        tr.save(tmp_path / name.format(number), tree, format=format)
    tree = trees[2]
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        ("new", tree, MismatchError, f"such as {name.format(7)}, found 'new'"),
        (name.format(3), {**tree, "one": np.ones(2)}, MismatchError, "found others: one; begin another stream"),
        (name.format(3), {**tree, "x": np.ones(2)}, MismatchError, "found others: x"),
        (name.format(3), {**tree, "x": "text"}, UnsupportedError, "x: str"),
    ]
    if format == "skyrl":
        wrong.append((name.format(9), tree, MismatchError, f"expected {name.format(8)} next to it, found none"))
    for place, given, error, match in wrong:
        with pytest.raises(error, match=match):
            tr.save(tmp_path / place, given, format=format)
    with pytest.raises(ExistsError, match=r"expected no version 2, found .*, which is made from this one"):
        tr.save(tmp_path / name.format(1), tree, format=format, overwrite=True)
    with pytest.raises(MismatchError, match="expected no options, found max_shard_size"):
        tr.save(tmp_path / name.format(3), tree, format=format, max_shard_size=5)
    tr.save(tmp_path / name.format(2), tree, format=format, overwrite=True)
    (file,) = (tmp_path / name.format(2)).glob("*.safetensors")
    flip(file, file.stat().st_size - 2)
    if format == "skyrl":
        with pytest.raises(CorruptError, match=name.format(2)):
            tr.save(tmp_path / name.format(3), tree, format=format)
        assert sorted(os.listdir(tmp_path)) == [name.format(number) for number in range(3)]
        return
    for gone in (1, 3):  # what version 2 is made from, then version 3 itself, which is complete
        tr.save(tmp_path / name.format(3), tree, format=format)
        assert "the version before cannot be read, so this one is complete" in caplog.text
        assert_same(tr.restore(tmp_path / name.format(3), tree), tree)
        shutil.rmtree(tmp_path / name.format(gone))
        shutil.rmtree(tmp_path / name.format(3), ignore_errors=True)
        caplog.clear()


def test_a_version_in_a_bucket(bucket: str) -> None:
    """There a killed writer may leave differences without their index."""
    trees = _trees(3)
    paths = [f"{bucket}/s/weight_v{number:06d}" for number in range(4)]
    for path, tree in zip(paths, trees, strict=False):
        tr.save(path, tree, format="slime")
        assert_same(tr.restore(path, tree), tree)
    stores.get(bucket).delete(f"{paths[2]}/model.safetensors.index.json")
    assert tr.steps(f"{bucket}/s") == [0, 1]
    tr.save(paths[3], trees[1], format="slime")
    tr.save(paths[2], trees[2], format="slime", overwrite=True)
    for path, tree in zip(paths, [*trees, trees[1]], strict=True):
        assert_same(tr.restore(path, tree), tree)


@pytest.mark.skipif(not RECEIVER, reason="SLIME_RECEIVER names no file local_checkpoint.py of slime's patch to SGLang")
def test_the_receiver_of_slime_reads_what_is_written(tmp_path: pathlib.Path) -> None:
    receiver = _receiver(RECEIVER)
    for number, tree in enumerate(_trees()):
        tr.save(tmp_path / "s" / f"weight_v{number:06d}", tree, format="slime")
        receiver.pull(str(tmp_path / "local"), str(tmp_path / "s" / "weight_v000000"), str(tmp_path / "s"), number)
        theirs = safetensors.numpy.load_file(tmp_path / "local" / "model.safetensors")
        assert theirs["layer/w"].tobytes() == np.asarray(tree["layer"]["w"]).tobytes()


@pytest.mark.skipif(not SKYRL, reason="SKYRL_RECEIVER names no folder weight_sync of SkyRL; it needs torch")
def test_the_receiver_of_skyrl_reads_what_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    names = ["skyrl", "backends", "skyrl_train", "weight_sync"]
    for count in range(1, 5):  # The packages import what needs a GPU.
        package = types.ModuleType(".".join(names[:count]))
        package.__path__ = [SKYRL] if count == 4 else []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    receiver = importlib.import_module(f"{'.'.join(names)}.delta_checkpoint")
    stream = tmp_path / "s"
    for number, tree in enumerate(_trees()):
        tr.save(stream / f"delta-{number:08d}", tree, format="skyrl")
    local = receiver.LocalCheckpointStore(str(stream / "delta-00000000"), str(tmp_path / "local"))
    for number in (1, 7, 22):
        local.fetch(number, sync_dir=str(stream))
        theirs = safetensors.numpy.load_file(tmp_path / "local" / "weights" / "model.safetensors")
        assert theirs["layer/w"].tobytes() == np.asarray(_trees()[number]["layer"]["w"]).tobytes()


@pytest.mark.parametrize(("write", "mark"), [(slime, "model.safetensors.index.json"), (skyrl, "manifest.json")])
def test_unfinished_versions_are_no_models(write: Write, mark: str, tmp_path: pathlib.Path) -> None:
    """A trainer writes the files of differences first, which alone look like those of a model."""
    trees = _versions()
    folders = _stream(tmp_path, write, "xor", "xxh3-128")
    (folders[5] / mark).rename(tmp_path / "later")
    weights = tr.follow_weights(tmp_path, timeout=5)
    assert next(weights).version == 4 and tr.steps(tmp_path) == list(range(5))
    with pytest.raises(CorruptError, match=f"{folders[5].name}: expected {mark}, found differences without it"):
        tr.open(folders[5])
    following = str(folders[5]).replace("05", "06")
    if write is slime:
        tr.save(following, trees[2], format="slime")
        assert_same(tr.restore(following), trees[2])
        shutil.rmtree(following)
    else:
        with pytest.raises(CorruptError, match="found differences without it"):
            tr.save(following, trees[2], format="skyrl")
    (tmp_path / "later").rename(folders[5] / mark)
    found = next(weights)
    assert found.version == 5
    assert_same(found.tree, trees[5])


@pytest.mark.parametrize(("format", "name", "read"), WRITTEN)
def test_versions_are_written_again(format: str, name: str, read: Any, tmp_path: pathlib.Path) -> None:
    """Also a complete one, one that a killed trainer has left, and a complete one in place of differences."""
    trees = _trees(3)
    paths = [tmp_path / name.format(number) for number in range(2)]
    for tree in trees[1:]:
        tr.save(paths[0], tree, format=format, overwrite=True)
    for tree in trees[:2]:
        tr.save(paths[1], tree, format=format, overwrite=True)
    assert_same(tr.restore(paths[1], trees[1]), trees[1])
    (paths[1] / ("manifest.json" if format == "skyrl" else "model.safetensors.index.json")).unlink()
    tr.save(paths[1], trees[0], format=format, overwrite=True)
    assert read(tmp_path, 1)["layer/w"].tobytes() == np.asarray(trees[0]["layer"]["w"]).tobytes()
    if format == "slime":
        shutil.rmtree(paths[0])
        tr.save(paths[1], trees[2], format=format, overwrite=True)
        assert os.listdir(paths[1]) == ["model.safetensors"]
        assert_same(tr.restore(paths[1], trees[2]), trees[2])


def test_names_are_those_that_receivers_look_for(tmp_path: pathlib.Path) -> None:
    tree = _trees(1)[0]
    tr.save(tmp_path / "weight_v000000", tree, format="slime")
    for wrong in ("weight_v0000001", "weight_v1", "weight_v-00001"):
        with pytest.raises(MismatchError, match=r"such as weight_v000007, found"):
            tr.save(tmp_path / wrong, tree, format="slime")
    assert os.listdir(tmp_path) == ["weight_v000000"]


@pytest.mark.parametrize("why", ["gap", "no index", "damaged", "turn"])
def test_complete_versions_keep_the_configuration(why: str, tmp_path: pathlib.Path) -> None:
    """A receiver takes the folder in place of its own, so an engine would lose the files that are not there."""
    trees = _trees(3)
    first = 18 if why == "turn" else 1
    folders = [tmp_path / f"weight_v{number:06d}" for number in range(first, first + 3)]
    for folder, tree in zip(folders[:2], trees, strict=False):
        tr.save(folder, tree, format="slime")
        (folders[0] / "config.json").write_text("{}")
    (file,) = folders[1].glob("*.safetensors")
    if why == "gap":
        shutil.rmtree(folders[1])
    elif why == "no index":
        (folders[1] / "model.safetensors.index.json").unlink()
    elif why == "damaged":
        flip(file, file.stat().st_size - 2)
    tr.save(folders[2], trees[2], format="slime")
    assert sorted(os.listdir(folders[2])) == ["config.json", "model.safetensors"]
    (folders[2] / "config.json").write_text("[]")
    tr.save(folders[2], trees[2], format="slime", overwrite=True)
    assert (folders[2] / "config.json").read_text() == "[]"
    assert_same(tr.restore(folders[2], trees[2]), trees[2])


@pytest.mark.parametrize("write", [slime, skyrl])
def test_large_tensors_are_made_once(write: Write, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slice by slice, each would be unpacked again, with all versions that it is made from."""
    from treering.formats.weight_streams import deltas

    folders = _stream(tmp_path, write, "xor", "xxh3-128")
    unpacked = list[int]()
    unpack = deltas.unpack

    def count(packed: np.ndarray, nbytes: int) -> np.ndarray:
        unpacked.append(nbytes)
        return unpack(packed, nbytes)

    monkeypatch.setattr(deltas, "unpack", count)
    ckpt = tr.open(folders[5])
    slices = [np.asarray(ckpt["model.a.weight"][n : n + 10]) for n in (0, 10, 20)]
    assert np.array_equal(np.concatenate(slices), _versions()[5]["model.a.weight"])
    assert len(unpacked) == 5
    first = np.asarray(ckpt["model.a.weight"][:10])
    slices[0].view(np.uint8)[:] = 0  # It belongs to the caller.
    assert np.array_equal(np.asarray(ckpt["model.a.weight"][:10]), first) and first.view(np.uint8).any()


def test_large_files_next_to_weights_stay(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treering.formats.weight_streams import write

    monkeypatch.setattr(write, "_MAX_COMPANION_BYTES", 3)
    tree = _trees(1)[0]
    tr.save(tmp_path / "weight_v000019", tree, format="slime")
    (tmp_path / "weight_v000019" / "config.json").write_text("{}")
    (tmp_path / "weight_v000019" / "model.gguf").write_text("large")
    tr.save(tmp_path / "weight_v000020", tree, format="slime")
    assert sorted(os.listdir(tmp_path / "weight_v000020")) == ["config.json", "model.safetensors"]
    assert "model.gguf: is not copied to the next complete version, because it is large" in caplog.text
