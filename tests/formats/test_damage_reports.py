"""Tests that every format names exactly the missing or damaged files, and reads all leaves that do not need them."""

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorstore as ts
from flax import serialization

import treering as tr
from helpers import assert_same
from tensorflow_bundles import Bundle
from treering import rules
from treering.errors import CorruptError
from treering.stores.posix import Disk

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LEAVES = {f"target/l{n}/w": np.arange(24.0).reshape(6, 4) + n for n in range(8)}
LEVANTER = {"timestamp": "2024-05-01T12:00:00.5"}
Files = dict[Path, list[str]]  # files, with the leaves that each holds


def nested(leaves: Mapping[str, Any]) -> Any:
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return root


def put(path: Path, array: np.ndarray, chunks: list[int]) -> dict[str, Any]:
    """Writes a zarr array and returns its TensorStore spec."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": {}}
    spec["metadata"] = {"chunks": chunks, "compressor": {"id": "zstd"}}
    stored = ts.open(spec, create=True, dtype=array.dtype.name, shape=array.shape).result()
    stored.write(array + 1).result()  # TensorStore leaves out chunks of zeros.
    stored.write(array).result()
    return spec


def parts() -> dict[int, list[str]]:
    """Returns the leaves of seven files. The first file has two leaves, the others one."""
    names = list(LEAVES)
    return {0: names[:2], **{n: [names[n + 1]] for n in range(1, 7)}}


def with_index(path: Path, name: str, write: Callable[[Path, dict[str, np.ndarray]], Any]) -> Files:
    path.mkdir(parents=True)
    stem, suffix = name.split(".", 1)
    files = {path / f"{stem}-{n + 1:05}-of-00007.{suffix}": leaves for n, leaves in parts().items()}
    for file, leaves in files.items():
        write(file, {leaf: LEAVES[leaf] for leaf in leaves})
    weights = {leaf: file.name for file, leaves in files.items() for leaf in leaves}
    (path / f"{name}.index.json").write_text(json.dumps({"weight_map": weights}))
    return files


def save_safetensors(path: Path) -> Files:
    return with_index(path, "model.safetensors", lambda file, leaves: safetensors.numpy.save_file(leaves, file))


def save_flax(path: Path) -> Files:
    def write(file: Path, leaves: dict[str, np.ndarray]) -> None:
        file.write_bytes(serialization.to_bytes(nested(leaves)))

    return with_index(path, "flax_model.msgpack", write)


def save_tensorflow(path: Path) -> Files:
    bundle = Bundle(shards=7)
    for n, leaves in parts().items():
        for leaf in leaves:
            bundle.add(leaf, LEAVES[leaf], shard=n)
    path.parent.mkdir(parents=True, exist_ok=True)
    bundle.save(path)
    return {Path(f"{path}.data-{n:05}-of-00007"): leaves for n, leaves in parts().items()}


def arrays(folder: Path, *, within: Callable[[str], str]) -> Files:
    for leaf, array in LEAVES.items():
        put(folder / within(leaf), array, [1, 4])
    return {folder / within(leaf) / ".zarray": [leaf] for leaf in LEAVES}


def save_flax_separate(path: Path) -> Files:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(serialization.to_bytes(nested({leaf: f"//GDAPlaceholder:{leaf}" for leaf in LEAVES})))
    return arrays(Path(f"{path}_gda"), within=str)


def save_t5x(path: Path) -> Files:
    files = arrays(path, within=lambda leaf: leaf.replace("/", "."))
    specs = {}
    for leaf, array in LEAVES.items():
        kvstore = {"driver": "file", "path": leaf.replace("/", ".") + "/"}
        specs[leaf] = {"driver": "zarr", "kvstore": kvstore, "metadata": {"shape": list(array.shape)}}
    state = {"version": 3, "optimizer": nested(specs)}
    (path / "checkpoint").write_bytes(serialization.msgpack_serialize(state, in_place=True))
    return files


def save_levanter(path: Path) -> Files:
    files = arrays(path, within=str)
    (path / "metadata.json").write_text(json.dumps({"step": int(path.name.split("-")[-1]), **LEVANTER}))
    return files


def save_orbax(path: Path) -> Files:
    path.parent.mkdir(parents=True, exist_ok=True)
    args = ocp.args.PyTreeSave(nested(LEAVES), nested(dict.fromkeys(LEAVES, ocp.SaveArgs(chunk_byte_size=32))))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, args=args)
    return {path / leaf.replace("/", ".") / ".zarray": [leaf] for leaf in LEAVES}


FORMATS: dict[str, tuple[str, Callable[[Path], Files]]] = {  # the name of a step, if the format has runs, and a writer
    "safetensors": ("", save_safetensors),
    "flax": ("", save_flax),
    "tensorflow": ("model.ckpt-{}", save_tensorflow),
    "flax, separate arrays": ("checkpoint_{}", save_flax_separate),
    "t5x": ("checkpoint_{}", save_t5x),
    "levanter": ("step-{}", save_levanter),
    "orbax": ("", save_orbax),
}
CHUNKED = ["flax, separate arrays", "t5x", "levanter", "orbax"]


def groups(files: list[Path]) -> Iterator[list[Path]]:
    """Yields each file alone, and some groups of files."""
    yield from ([file] for file in files)
    yield from (files[:2], files[::2], files[1:], files)


def made(tmp_path: Path, name: str) -> tuple[Path, Files]:
    step, save = FORMATS[name]
    path = tmp_path / "run" / (step or "{}").format(1)
    return path, save(path)


def named(path: Path, files: Files) -> tuple[list[Path], set[str]]:
    """Returns the files and the leaves that `verify` names. Asserts that each problem names one file."""
    found: list[Path] = []
    leaves: set[str] = set()
    for problem in tr.verify(path).problems:
        own = [file for file in files if re.search(re.escape(str(file)) + r"(?![\w.-])", problem.what)]
        assert len(own) == 1, problem
        found += own
        leaves |= set(problem.leaves)
    return found, leaves


def assert_rest(path: Path, gone: set[str]) -> None:
    """Asserts that every way of reading returns the intact leaves, and that none returns a leaf in `gone`."""
    ckpt = tr.open(path)
    assert set(ckpt) == set(LEAVES)
    rest = {leaf: array for leaf, array in LEAVES.items() if leaf not in gone}
    for leaf, array in rest.items():
        assert_same(np.asarray(ckpt[leaf]), array)
        assert_same(ckpt[leaf][2:4, 1:], array[2:4, 1:])
    for leaf in list(rest)[:1]:
        assert_same(tr.restore(path, at=leaf), LEAVES[leaf])
        assert_same(tr.restore(path, at=leaf.rpartition("/")[0]), {"w": LEAVES[leaf]})
    if rest:
        assert_same(ckpt.select(list(rest)).restore(), nested(rest))
        assert_same(tr.restore(path, nested(rest), extra=list(gone)), nested(rest))
        assert_same(tr.restore(path, nested(rest), extra="ignore"), nested(rest))
        renamed = [rules.drop(list(gone)), rules.rename("^target/", "model/")]
        model = {"model": nested(rest)["target"]}
        assert_same(tr.restore(path, model, rules=renamed), model)
        skipped = nested({leaf: ... if leaf in gone else array for leaf, array in LEAVES.items()})
        assert_same(tr.restore(path, skipped), skipped)
    for leaf in sorted(gone)[:2]:
        asked = nested({**rest, leaf: LEAVES[leaf]})
        for attempt in (
            lambda leaf=leaf: tr.open(path)[leaf],
            lambda leaf=leaf: tr.restore(path, at=leaf),
            lambda asked=asked: tr.restore(path, asked, extra="ignore"),
            lambda asked=asked: tr.restore(path, asked, extra="ignore", missing="template"),
            lambda leaf=leaf: ckpt.select(leaf).restore(),
        ):
            with pytest.raises(CorruptError):
                attempt()
    for attempt in (
        lambda: ckpt.restore(),
        lambda: ckpt.abstract(),
        lambda: tr.restore(path, nested(rest)),
        lambda: tr.restore(path, nested(LEAVES)),
        lambda: tr.restore(path, rules=[rules.rename("^target/", "model/")]),
        lambda: tr.convert(path, path.parent.parent / "copy"),
        lambda: tr.convert(path, path.parent.parent / "copy.safetensors"),
        lambda: tr.diff(path, path),
    ):
        with pytest.raises(CorruptError):
            attempt()
    assert [place.name for place in path.parent.parent.iterdir()] == ["run"]


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_every_file_that_is_gone_is_named(tmp_path: Path, name: str) -> None:
    path, files = made(tmp_path, name)
    for gone in groups(list(files)):
        contents = {file: file.read_bytes() for file in gone}
        for file in gone:
            file.unlink()
        leaves = {leaf for file in gone for leaf in files[file]}
        found, touched = named(path, files)
        assert sorted(found) == sorted(gone) and touched == leaves
        with pytest.raises(CorruptError) as caught:
            tr.restore(path)
        lines = str(caught.value).splitlines()
        assert len([line for line in lines if any(str(file) in line for file in gone)]) == min(len(gone), 5)
        assert lines[5:] == ([f"and {len(gone) - 5} more like these"] if len(gone) > 5 else [])
        assert_rest(path, leaves)
        for file, data in contents.items():
            file.write_bytes(data)
    assert tr.verify(path).ok
    assert_same(tr.restore(path), nested(LEAVES))


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_every_file_that_is_damaged_is_named(tmp_path: Path, name: str) -> None:
    path, files = made(tmp_path, name)
    good = {file: file.read_bytes() for file in files}
    for damage in (lambda data: data[:5], lambda data: b"", lambda data: data[:-1], lambda data: b"\xc1" + data[1:]):
        for gone in ([*files][:1], [*files][1:]):
            for file in gone:
                file.write_bytes(damage(good[file]))
            leaves = {leaf for file in gone for leaf in files[file]}
            places = {file.parent if file.name == ".zarray" else file: own for file, own in files.items()}
            found, touched = named(path, places)
            assert {*found} == {file for file, own in places.items() if leaves & {*own}} and touched <= leaves
            with pytest.raises(CorruptError):
                tr.restore(path)
            for leaf in LEAVES.keys() - leaves:
                assert_same(tr.restore(path, at=leaf), LEAVES[leaf])
            for file in gone:
                file.write_bytes(good[file])


@pytest.mark.long
@pytest.mark.parametrize("name", CHUNKED)
def test_every_chunk_that_is_gone_is_named(tmp_path: Path, name: str) -> None:
    path, files = made(tmp_path, name)
    chunks = {chunk: own for file, own in files.items() for chunk in sorted(file.parent.glob("[0-9]*"))}
    assert len(chunks) == len(LEAVES) * 6
    for gone in groups([*chunks][3:16]):
        contents = {file: file.read_bytes() for file in gone}
        for file in gone:
            file.unlink()
        found, leaves = named(path, chunks)
        assert sorted(found) == sorted(gone) and leaves == {leaf for file in gone for leaf in chunks[file]}
        with pytest.raises(CorruptError):
            tr.restore(path)
        for leaf in LEAVES.keys() - leaves:
            assert_same(tr.restore(path, at=leaf), LEAVES[leaf])
        for file, data in contents.items():
            file.write_bytes(data)
    for file in (*list(files)[::2], *list(chunks)[8:10]):
        file.unlink()
    found, leaves = named(path, files | chunks)
    assert sorted(found) == sorted([*list(files)[::2], *list(chunks)[8:10]])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, (step, _) in FORMATS.items() if step])
def test_an_earlier_step_is_taken(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (_, files), (step, save) = made(tmp_path, name), FORMATS[name]
    latest = save(tmp_path / "run" / step.format(2))
    if name == "tensorflow":
        (tmp_path / "run" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-2"\n')
    assert tr.open(tmp_path / "run").step == 2
    for gone in groups(list(latest)):
        contents = {file: file.read_bytes() for file in gone}
        for file in gone:
            file.unlink()
        caplog.clear()
        assert tr.open(tmp_path / "run").step == 1
        assert_same(tr.restore(tmp_path / "run"), nested(LEAVES))
        with tr.Checkpointer(tmp_path / "run") as run:
            state, number = run.restore_or_init(lambda: nested(LEAVES))
        assert number == 1
        assert_same(state, nested(LEAVES))
        assert caplog.text.count("step 2 is damaged") == 3 and str(gone[0]) in caplog.text
        # A set, because a folder of TensorFlow is verified both as a run and as its latest checkpoint.
        assert set(named(tmp_path / "run", files | latest)[0]) == set(gone)
        for file, data in contents.items():
            file.write_bytes(data)
    for file in (*files, *latest):
        file.unlink()
    for attempt in (tr.open, tr.restore):
        with pytest.raises(CorruptError, match=r"and \d more like these"):
            attempt(tmp_path / "run")


def test_bad_sectors_in_the_middle_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`problems` names each slice of an array that cannot be read."""
    monkeypatch.setattr("treering.formats._shared.reader._CHECK_SLICE_BYTES", 64)
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones((8, 16), np.float32), "b": np.ones(3, np.float32)}, path)
    reader: Any = tr.open(path)._source
    good = path.stat().st_size - 12 - 64 * 3

    read = Disk.read

    def fail(disk: Disk, fd: int, buffer: memoryview, offset: int) -> int:
        if offset + len(buffer) > good:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(disk, fd, buffer, offset)

    monkeypatch.setattr(Disk, "read", fail)
    problems = list(reader.problems())
    assert [problem.leaves for problem in problems] == [("a",)] * 3 + [("b",)]
    assert all(f"in [{row}:{row + 1}, 0:16]" in p.what for row, p in zip((5, 6, 7), problems, strict=False))


def test_parts_and_texts_of_tensorflow(tmp_path: Path) -> None:
    """A variable with parts in several files names each missing file. So does text, whose elements are leaves."""
    bundle, array = Bundle(shards=4), np.arange(12.0).reshape(6, 2)
    bundle.add_parts("p", array, [((0, 2), (0, -1)), ((2, 2), (0, -1)), ((4, 2), (0, -1))], [0, 1, 2])
    bundle.add_text("t", [b"x", b"yz"], (2,))
    bundle.add("w", array, shard=3)
    path = bundle.save(tmp_path / "x")
    files = {Path(f"{tmp_path}/x.data-{n:05}-of-00004"): leaves for n, leaves in enumerate(("pt", "p", "p", "w"))}
    for gone in groups(list(files)):
        contents = {file: file.read_bytes() for file in gone}
        for file in gone:
            file.unlink()
        found, leaves = named(path, {file: list(own) for file, own in files.items()})
        assert sorted(found) == sorted(gone) and leaves == {leaf for file in gone for leaf in files[file]}
        with pytest.raises(CorruptError) as caught:
            tr.restore(path)
        assert len(str(caught.value).splitlines()) == len(gone)
        if "t" in leaves:
            for attempt in (lambda: tr.restore(path, at="t/0"), lambda: tr.open(path).select("t/*").restore()):
                with pytest.raises(CorruptError, match="data-00000"):
                    attempt()
        for file, data in contents.items():
            file.write_bytes(data)
    for file in list(files)[:3]:
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    found, _ = named(path, {file: list(own) for file, own in files.items()})
    assert sorted(found) == sorted([*files][:1] + [*files][:3])  # The first file also holds the text.
    assert_same(tr.restore(path, at="w"), array)


def test_leaves_that_an_index_claims(tmp_path: Path) -> None:
    """`verify` names a leaf that the index assigns to an existing file which does not have it."""
    for save in (save_safetensors, save_flax):
        files = save(tmp_path / save.__name__)
        (index,) = (tmp_path / save.__name__).glob("*.index.json")
        weights = json.loads(index.read_text())["weight_map"]
        file = next(iter(files))
        index.write_text(json.dumps({"weight_map": {**weights, "more/x": file.name, "more/y": file.name}}))
        report = tr.verify(tmp_path / save.__name__)
        assert [problem.leaves for problem in report.problems] == [("more/x",), ("more/y",)]
        assert all(str(file) in problem.what for problem in report.problems)
        assert_same(tr.restore(index, at="target"), nested(LEAVES)["target"])
        with pytest.raises(CorruptError, match="more/y"):
            tr.restore(index)


@pytest.mark.long
@pytest.mark.whole
def test_keys_of_a_database_of_levanter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "step-3"
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    for leaf, array in [*LEAVES.items(), ("n", np.array(3.0))]:
        spec = {"driver": "zarr3", "kvstore": {**base, "path": leaf}}
        ts.open(spec, create=True, dtype="float64", shape=array.shape).result().write(array + 1).result()
    (path / "metadata.json").write_text(json.dumps({"step": 3, **LEVANTER}))
    assert set(tr.open(path)) == {*LEAVES, "n"} and tr.verify(path).ok
    store = ts.KvStore.open(base).result()
    gone = {*list(LEAVES)[::2], "n"}
    for leaf in gone:
        store.delete_range(ts.KvStore.KeyRange(f"{leaf}/zarr.json", f"{leaf}/zarr.json\0")).result()
    problems = tr.verify(path).problems
    assert {problem.leaves for problem in problems} == {(leaf,) for leaf in gone}
    assert all(f"{problem.leaves[0]}/zarr.json: expected" in problem.what for problem in problems)
    for leaf in LEAVES.keys() - gone:
        assert_same(tr.restore(path, at=leaf), LEAVES[leaf] + 1)


@pytest.mark.long
@pytest.mark.whole
def test_an_array_of_levanter_of_which_nothing_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "step-1"
    files = save_levanter(path)
    for file in next(iter(files)).parent.iterdir():
        file.unlink()
    assert len(tr.open(path)) == len(LEAVES) - 1 and "target/l0/w: skipped an empty folder" in caplog.text


def test_a_step_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint opens without a step if only its state has the number and that leaf cannot be read."""
    path, array = tmp_path / "state", np.array(7, np.int32)
    put(path / "state.step", array, [])
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": "state.step/"}, "metadata": {"shape": []}}
    state = {"version": 3, "optimizer": {"state": {"step": spec}, "target": {"w": np.ones(3)}}}
    (path / "checkpoint").write_bytes(serialization.msgpack_serialize(state, in_place=True))
    assert tr.open(path).step == 7
    for file in ("0", ".zarray"):
        (path / "state.step" / file).unlink()
        caplog.clear()
        assert tr.open(path).step is None and f"state.step/{file}: expected" in caplog.text
        assert [problem.leaves for problem in tr.verify(path).problems] == [("state/step",)]
        assert_same(tr.restore(path, at="target"), {"w": np.ones(3)})


@pytest.mark.parametrize("save", [save_safetensors, save_flax, save_tensorflow])
def test_pointers_of_git_lfs(tmp_path: Path, save: Callable[[Path], Files]) -> None:
    files = save(tmp_path / "x")
    for file in files:
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    pointers = [f"{file}: found a git-lfs pointer instead of the file; run `git lfs pull` there" for file in files]
    assert sorted(problem.what for problem in tr.verify(tmp_path / "x").problems) == sorted(pointers)
    with pytest.raises(CorruptError) as caught:
        tr.restore(tmp_path / "x")
    assert str(caught.value).splitlines() == [*pointers[:5], "and 2 more like these"]
