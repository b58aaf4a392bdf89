"""Tests of the native format: an independent reader and every later release must read the same from it."""

import json
import math
import pathlib
import random
import shutil
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import golden_trees
import spec_reader
import treering as tr
from release import golden
from treering._core.skeleton import LEAF, Node, containers
from treering._processes import assignment
from treering._pytree import leaves as _leaves
from treering._pytree import walk
from treering._save import layout
from treering.errors import CorruptError, UnsupportedError
from treering.formats.treering import manifest, piece_reads
from treering.formats.treering.validity import leaf_paths

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TREES = {
    "v1-everything": golden_trees.everything,
    "v1-sharded": golden_trees.sharded,
    "v1-placement": golden_trees.placed,
    "v1-boxes": golden_trees.boxed,
}
if hasattr(jax.sharding.PartitionSpec, "partitions"):  # JAX 0.9 has no reduced axes.
    TREES["v1-reduced"] = golden_trees.reduced
RELEASED = sorted(golden.RELEASED.iterdir())
GOLDEN_TREES = TREES | {
    f"released/{folder.name}/{name}": tree
    for folder in RELEASED
    for name, tree in golden.TREES.items()
    if (folder / name).exists()  # A later release has more.
}


def host(leaf: Any) -> Any:
    """Returns a leaf as the independent reader returns it."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.generic | np.ndarray):
        return np.asarray(leaf)
    return None if callable(leaf) else leaf


def same(found: Any, expected: Any) -> bool:
    if not isinstance(expected, np.ndarray):
        return type(found) is type(expected) and repr(found) == repr(expected)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if expected.dtype.kind == "V":
        return expected.astype(np.float64).tobytes() == found.astype(np.float64).tobytes()
    return found.tobytes() == expected.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("name", GOLDEN_TREES)
def test_golden_files_are_read_by_an_independent_reader(name: str) -> None:
    flat_tree = walk.flatten_tree(GOLDEN_TREES[name]())
    found = spec_reader.read(GOLDEN / name)
    assert list(found) == list(flat_tree.paths)
    for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True):
        assert same(found[path], host(leaf)), path


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("name", GOLDEN_TREES)
def test_golden_files_restore(name: str) -> None:
    assert tr.verify(GOLDEN / name).ok
    tree = GOLDEN_TREES[name]()
    assert not tr.diff(GOLDEN / name, tree)
    with jax.enable_x64(True):
        found = tr.restore(GOLDEN / name, like=tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert not tr.diff(found, tree)


def test_every_release_has_a_golden_set() -> None:
    """A version that is no development version has its set before it is tagged."""
    assert "dev" in tr.__version__ or (golden.RELEASED / tr.__version__).exists(), (
        "expected the golden set of this version; write it with `PYTHONPATH=tests .venv/bin/python -m release.golden`"
    )
    for folder in RELEASED:
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 200_000
        checkpoints = {path.parent.relative_to(folder).as_posix() for path in files} - {"."}
        assert checkpoints <= {*golden.TREES, golden.METADATA}


@pytest.mark.parametrize("folder", RELEASED, ids=lambda folder: folder.name)
def test_the_run_of_a_release_continues(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A job of this release resumes the run, which then has steps of both releases. The export has the same values."""
    run = shutil.copytree(folder / "run", tmp_path / "run")
    assert {step: tr.open(run, step=step).metrics for step in tr.steps(run)} == golden.METRICS
    expected = golden_trees.trained(2)
    with tr.Checkpointer(run) as ckpts:
        state, step = ckpts.restore_or_init(lambda: expected)
        assert step == 2 and not tr.diff(state, expected)
        ckpts.save(3, golden_trees.trained(3))
    assert tr.steps(run) == [1, 2, 3] and tr.verify(run).ok
    assert tr.verify(folder / golden.EXPORT).ok and not tr.diff(folder / golden.EXPORT, expected["params"])


def test_golden_arrays_go_where_they_were(caplog: pytest.LogCaptureFixture) -> None:
    tree = golden_trees.placed()
    found = tr.restore(GOLDEN / "v1-placement", like=jax.eval_shape(lambda: tree), sharding="saved")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        if isinstance(one, jax.Array) and isinstance(other, jax.Array):
            assert one.sharding == other.sharding and one.committed == other.committed
            assert jax.typeof(one) == jax.typeof(other)
    assert found["layout"].format == tree["layout"].format
    with caplog.at_level("INFO"):
        tr.restore(GOLDEN / "v1-placement", like={**tree, "static": golden_trees.Static(jax.numpy.ones(2), 4, (1,))})
    assert "static/epoch (saved 3, now 4), static/sizes (saved [1, 2], now [1])" in caplog.text


@pytest.mark.skipif("v1-reduced" not in TREES, reason="JAX 0.9 has no reduced axes")
def test_golden_arrays_have_reduced_axes() -> None:
    tree = golden_trees.reduced()
    for like in (tree, jax.eval_shape(lambda: tree)):
        found = tr.restore(GOLDEN / "v1-reduced", like=like, sharding="saved")
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, tree)


def test_golden_boxes_are_levels_for_orbax(tmp_path: pathlib.Path) -> None:
    tr.convert(GOLDEN / "v1-boxes", tmp_path / "orbax", format="orbax")
    names = {"model/bias/value", "model/kernel/value", "cache/value/k", "cache/value/v", "linen/value", "n"}
    assert set(tr.open(tmp_path / "orbax")) == names


def test_golden_iterators_and_metrics() -> None:
    path = GOLDEN / "v1-iterators"
    expected = golden_trees.iterators()
    assert tr.verify(path).ok
    for found in (spec_reader.tree(path), tr.restore(path)):
        assert (
            all(repr(found[name]) == repr(expected[name]) for name in expected)
            and found["each"][0]["rng"].dtype == np.uint32
        )
    for metrics in (spec_reader.metrics(path), tr.open(path).metrics):
        assert metrics.pop("nan") != 0 and metrics == {"loss": 0.5, "val/loss": 0.125}


def test_golden_states_of_iterators_in_array_files(tmp_path: pathlib.Path) -> None:
    path = GOLDEN / "v1-iterator-states"
    expected = golden_trees.stored_states()
    tr.convert(path, tmp_path / "new")
    for place in (path, tmp_path / "new"):
        assert tr.verify(place).ok
        for found in (spec_reader.tree(place), tr.restore(place)):
            assert list(found) == list(expected) and repr(found) == repr(expected)
            assert found["data"][0]["rng"].dtype == np.uint32 and type(found["data"][0]["half"]) is np.float16


def test_golden_types_in_states_of_iterators(tmp_path: pathlib.Path) -> None:
    """The independent reader, which does not know the types, finds plain values."""
    path = GOLDEN / "v1-iterator-types"
    expected = golden_trees.typed_states()
    tr.convert(path, tmp_path / "new")
    for place in (path, tmp_path / "new"):
        assert tr.verify(place).ok
        (found,) = tr.open(place)["data"]
        assert repr(found) == repr(expected["data"][0]) and found["buffer"][2]["image"].weak_type
        (plain,) = spec_reader.tree(place)["data"]
        assert list(plain) == list(found) and plain["last"] == [1, 2] and type(plain["order"]) is dict


def test_golden_metrics_that_say_their_version() -> None:
    path = GOLDEN / "v1-late-metrics"
    assert tr.verify(path).ok and tr.open(path).metrics == {"loss": 0.5, "worst": math.inf}
    for found in (spec_reader.tree(path), tr.restore(path)):
        state = found["data"][0] if isinstance(found["data"], list) else found["data"]
        assert state["n"].dtype == "int4" and state["n"].astype(int).tolist() == [1, -1]
    assert spec_reader.metrics(path) == {"loss": 0.5, "worst": math.inf}


def test_golden_metadata_with_floats_that_json_cannot_write(tmp_path: pathlib.Path) -> None:
    def exactly(value: Any) -> Any:
        """Returns the value with floats replaced by their bits, because NaNs are not equal."""
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return type(value), [(key, exactly(part)) for key, part in items]
        return struct.pack(">d", value) if isinstance(value, float) else value

    expected = golden_trees.metadata()
    tr.save(tmp_path / "new", {"x": 1}, metadata=expected)
    tr.convert(tmp_path / "new", tmp_path / "again")
    written = [GOLDEN / "v1-metadata", *(folder / golden.METADATA for folder in RELEASED)]
    for path in (*written, tmp_path / "new", tmp_path / "again"):
        assert tr.verify(path).ok
        for found in (tr.open(path).metadata, spec_reader.Checkpoint(path).metadata):
            assert exactly(found) == exactly(expected)
    for alone in (math.nan, -math.inf, np.float32("inf")):
        tr.save(tmp_path / "new", {"x": 1}, metadata=alone, overwrite=True)
        for found in (tr.open(tmp_path / "new").metadata, spec_reader.Checkpoint(tmp_path / "new").metadata):
            assert repr(found) == repr(float(alone))


@pytest.mark.parametrize("path", sorted((GOLDEN / "future").iterdir()), ids=lambda path: path.name)
def test_golden_files_of_later_versions_are_no_damage(path: pathlib.Path) -> None:
    for use in (tr.open, tr.restore, tr.verify):
        with pytest.raises(UnsupportedError, match="upgrade treering"):
            use(path)


@pytest.mark.parametrize("name", TREES)
def test_what_is_written_now_is_read_by_the_independent_reader(tmp_path: pathlib.Path, name: str) -> None:
    tree = TREES[name]()
    tr.save(tmp_path / "c", tree, step=3, metrics={"loss": math.inf})
    flat_tree = walk.flatten_tree(tree)
    found = spec_reader.read(tmp_path / "c")
    assert list(found) == list(flat_tree.paths)
    assert all(same(found[p], host(leaf)) for p, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True))
    assert jax.tree.structure(spec_reader.tree(tmp_path / "c")) == jax.tree.structure(tr.restore(tmp_path / "c"))


def test_array_files_are_plain_safetensors_files(tmp_path: pathlib.Path) -> None:
    tree = {"a": jnp.ones((3, 5)), "b": {"c": np.arange(7, dtype=np.int16), "": np.zeros((0, 2)), "x\n": np.ones(64)}}
    tree["__metadata__"] = np.arange(3)
    tr.save(tmp_path / "c", tree)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    tensors = safetensors.numpy.load_file(file)
    assert set(tensors) == {"a", "b/c", "b/", "b/x\n", "__metadata__~@"}
    np.testing.assert_array_equal(tensors["b/c"], tree["b"]["c"])
    with safetensors.safe_open(file, "numpy") as opened:
        assert opened.metadata()["format"] == "treering"


def test_pieces_are_aligned_for_their_elements(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    tree = {str(n): rng.integers(0, 9, n).astype(f"u{2 ** (n % 4)}") for n in range(60)}
    tr.save(tmp_path / "c", tree)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert (8 + size) % 4096 == 0
    for name, array in tree.items():
        begin, end = header[name]["data_offsets"]
        assert begin % array.itemsize == 0 and end - begin == array.nbytes
        if array.nbytes % 64 == 0:
            assert begin % 64 == 0


@pytest.mark.long
@pytest.mark.whole
def test_headers_stay_below_the_limit_by_starting_another_file(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    plan = layout.plan
    monkeypatch.setattr(layout, "plan", lambda *args, **options: plan(*args, **options, header_limit=5000))
    tree = {f"leaf-{n}": np.full(n, n, np.uint8) for n in range(200)}
    tr.save(tmp_path / "c", tree)
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(files) > 5 and files[-1].name.endswith(f"-of-{len(files):05}.safetensors")
    for mmap in (None, False):
        found = tr.restore(tmp_path / "c", mmap=mmap)
        assert all((found[name] == array).all() for name, array in tree.items())
    assert tr.verify(tmp_path / "c").ok and len(spec_reader.read(tmp_path / "c")) == 200


def test_the_header_estimate_is_never_too_low() -> None:
    names = ["\x01" * 50, "é" * 40, "plain"]
    leaves = [np.zeros((3,) * n, np.uint8) for n in (1, 5, 9)] * 50
    paths = [f"{names[n % 3]}{n}" for n in range(150)]
    catalogue, shards, _ = _leaves.describe_leaves(paths, leaves)
    pieces = assignment.pieces(catalogue.entries, shards, None, 0)
    for limit in (1000, 5000, 50_000):
        for file in layout.plan(catalogue.entries, pieces, header_limit=limit):
            if len(file.begins) > 1:
                assert len(file.header) <= limit + 4096


def test_neighbouring_pieces_come_as_one_view(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that follow each other in the file as in the array are restored as one view, without a copy.

    A box whose bytes have another order in the file gets memory of its own.
    """
    asked: list[tuple[int, ...]] = []
    real = piece_reads.empty_aligned_array
    monkeypatch.setattr(
        piece_reads, "empty_aligned_array", lambda shape, dtype: asked.append(shape) or real(shape, dtype)
    )

    def on(count: int, *axes: str | None) -> jax.NamedSharding:
        mesh = jax.make_mesh((count,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
        return jax.NamedSharding(mesh, jax.P(*axes))

    value = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    deep = np.arange(16 * 64, dtype=np.int16).reshape(1, 16, 64)
    saved = {"w": jax.device_put(value, on(8, "x")), "deep": jax.device_put(deep, on(4, None, "x"))}
    path = tmp_path / "c"
    tr.save(path, saved)

    def restored(w: Any, mmap: bool | None = None) -> list[tuple[int, ...]]:
        asked.clear()
        template = {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=w), "deep": np.zeros_like(deep)}
        found = tr.restore(path, template, mmap=mmap)
        assert np.array_equal(found["w"], value) and np.array_equal(found["deep"], deep)
        return list(asked)

    for mmap in (None, False):
        for count in (8, 4, 2, 1):
            assert restored(on(count, "x"), mmap) == []
        assert restored(on(2, None, "x"), mmap) == [(64, 16)] * 2
    assert np.array_equal(tr.open(path)["w"][5:41, 3], value[5:41, 3])
    reversed_mesh = jax.sharding.Mesh(np.array(jax.devices()[7::-1]), ("x",))
    tr.save(path, {**saved, "w": jax.device_put(value, jax.NamedSharding(reversed_mesh, jax.P("x")))}, overwrite=True)
    for count in (8, 4, 1):  # The values are right in either order of the pieces.
        restored(on(count, "x"))


# Invalid manifests


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tied = np.ones(3)
    spread = jax.device_put(np.arange(16.0, dtype=np.float32), jax.NamedSharding(mesh, jax.P("x")))
    tr.save(tmp_path / "c", {"a": np.arange(4), "s": spread, "t": [tied, tied], "v": 1.5}, step=1, metadata={"x": 1})
    return tmp_path / "c"


def rewrite(path: pathlib.Path, change: Any, text: bool = False) -> None:
    """Changes a manifest and gives it the checksum of its new bytes."""
    file = path / "treering.json"
    content: Any = file.read_bytes()[:-28] + b"}"
    if text:
        body = change(content)
    else:
        content = json.loads(content)
        change(content)
        body = json.dumps(content).encode()
    file.chmod(0o644)
    file.write_bytes(body[:-1] + b',"xxh3":"' + manifest.xxh3(body[:-1]).encode() + b'"}\n')


CONTRADICTIONS = [
    lambda m: m["leaves"].append(m["leaves"][0]),
    lambda m: m["leaves"].pop(),
    lambda m: m["leaves"].append(["value", "zz", "int", 1]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [4], "", 7]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [4], "", -1]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [4], "", [9, 0]]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [4], "", [0, 0]]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [4], "", [0, -1]]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [4], "", "s"]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [4], "", "a"]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [4], "", "nothing"]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [-4], "", 0]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [2**62, 4], "", 0]),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "key", "int64", [], "threefry2x32", 0]),
    lambda m: m["leaves"].__setitem__(4, ["value", "v", "int", 1.5]),
    lambda m: m["layouts"][0]["cuts"][0].pop(),
    lambda m: m["layouts"][0]["cuts"][0].__setitem__(1, 0),
    lambda m: m["layouts"][0]["cuts"].append([0, 1]),
    lambda m: m["layouts"][0].update(holders=1),
    lambda m: m["holders"][0].__setitem__(0, []),
    lambda m: m["holders"][0].__setitem__(0, [5]),
    lambda m: m["holders"][0].pop(),
    lambda m: m["files"][0].update(name="../c/" + m["files"][0]["name"]),
    lambda m: m["files"][0].update(name="/etc/passwd"),
    lambda m: m["files"][0].update(size=1),
    lambda m: m["files"][0].update(header=10**15),
    lambda m: m["files"][0].update(xxh3="0" * 15),
    lambda m: m["tree"].append(0),
    lambda m: m["tree"].pop(),
    lambda m: m["tree"].__setitem__(0, ["list", "", 10**9]),
    lambda m: m["tree"].__setitem__(0, ["dict", "", [[1], 2, 3, 4]]),
    lambda m: m.update(metrics={"loss": "many"}),
]
# Manifests that a later version might write.
CONTRADICTIONS += [
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", [2**53 + 1, 0], "", 0]),
    lambda m: m["leaves"].__setitem__(0, ["value", "a", "iterator", ["all", [["dict", {}]]]]),
    lambda m: m.update(metadata=json.loads("[" * 201 + "]" * 201)),
    lambda m: m.pop("leaves"),
    lambda m: m.pop("created"),
    lambda m: m.update(version="1"),
    lambda m: m.update(format="other"),
    lambda m: m.update(step="x"),
    lambda m: m["leaves"].__setitem__(0, ["array", "a", "tensor", "int64", [4], "", 0]),
    lambda m: m["leaves"].__setitem__(0, ["thing", "a"]),
    lambda m: m["leaves"].__setitem__(0, 7),
    lambda m: m["files"][0].update(header=-1),
    lambda m: m["tree"].__setitem__(0, ["list", "", -1]),
    lambda m: m["tree"].__setitem__(0, ["set", "", 4]),
    lambda m: m["tree"][0].append("more"),
    lambda m: m["leaves"][0].append("more"),
    lambda m: m["leaves"][-1].append("more"),
]
# Leaf rows whose error shows only in the header of the array file.
OTHER_TENSORS = [
    ["array", "a", "numpy", "int64", [5], "", 0],
    ["array", "a", "numpy", "int64", [2, 2], "", 0],
    ["array", "a", "numpy", "float64", [4], "", 0],
    ["array", "a", "numpy", "int4", [32], "", 0],
]


# Entries of files that differ from the file. Either of the two may be damaged.
OTHER_FILES = [
    lambda m: m["files"][0].update(name="missing.safetensors"),
    lambda m: m["files"][0].update(header=100),
    lambda m: m["files"][0].update(xxh3="0" * 16),
    lambda m: m["files"][0].update(size=m["files"][0]["size"] + 1),
]


@pytest.mark.parametrize("number", range(len(OTHER_FILES)))
def test_an_array_file_that_is_not_the_one_listed_is_corrupt(saved: pathlib.Path, number: int) -> None:
    rewrite(saved, OTHER_FILES[number])
    with pytest.raises(CorruptError):
        tr.restore(saved)


@pytest.mark.parametrize("number", range(len(CONTRADICTIONS)))
def test_a_sealed_manifest_that_does_not_add_up_is_no_damage(saved: pathlib.Path, number: int) -> None:
    """A manifest that contradicts itself under a right checksum is unsupported: a later version may have written it."""
    rewrite(saved, CONTRADICTIONS[number])
    for use in (tr.restore, tr.open, tr.verify):
        with pytest.raises(UnsupportedError, match="it is undamaged"):
            use(saved)


@pytest.mark.parametrize("row", OTHER_TENSORS)
def test_a_tensor_that_is_not_the_leaf_is_never_read(saved: pathlib.Path, row: list[Any]) -> None:
    rewrite(saved, lambda m: m["leaves"].__setitem__(0, row))
    assert tr.open(saved)["v"] == 1.5
    for use in (tr.restore, tr.verify, lambda path: tr.open(path)["a"][:]):
        with pytest.raises(UnsupportedError, match=r"expected a tensor 'a' .*; it is undamaged"):
            use(saved)


TEXTS = [
    lambda t: t.replace(b'"step":1', b'"step":1,"step":2'),
    lambda t: t.replace(b'"x":1', b'"x":1,"x":2'),
    lambda t: t.replace(b'"x":1', b'"x":NaN'),
    lambda t: t.replace(b'"x":1', b'"x":1e999'),
    lambda t: t.replace(b'"x":1', b'"x":' + b"9" * 5000),
    lambda t: t.replace(b'"x":1', b'"x":' + b"[" * 100_000 + b"]" * 100_000),
    lambda t: t.replace(b'"x":1', b'"x":"\xff"'),
    lambda t: b"[]",
    lambda t: b"{}",
    lambda t: t[:-10] + b"}",
]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_sealed_manifest_must_be_strict_json(saved: pathlib.Path, number: int) -> None:
    """A manifest with a right checksum that is not strict JSON is unsupported, not damaged."""
    rewrite(saved, TEXTS[number], text=True)
    for use in (tr.restore, tr.verify):
        with pytest.raises(UnsupportedError):
            use(saved)


def test_later_versions_and_unknown_features_are_refused_by_name(saved: pathlib.Path) -> None:
    rewrite(saved, lambda m: m.update(requires=["zstd"]))
    with pytest.raises(
        UnsupportedError, match=r"found that it requires zstd; it is undamaged: treering .* wrote it; upgrade"
    ):
        tr.open(saved)
    rewrite(saved, lambda m: m.update(version=2, requires=[]))
    with pytest.raises(UnsupportedError, match=r"expected format version 1 without further features.*found version 2"):
        tr.restore(saved)
    with pytest.raises(UnsupportedError):
        tr.verify(saved)


def test_fields_may_be_added_within_a_version(saved: pathlib.Path) -> None:
    rewrite(saved, lambda m: m.update(more={"a": [1]}))
    assert tr.restore(saved)["v"] == 1.5


def test_a_holder_is_found_by_its_turn(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A replicated piece is read from the holder whose turn it is, not from the other file that may hold it."""
    (file,) = saved.glob("*.safetensors")
    shutil.copy(file, saved / "second.safetensors")

    def share(m: Any) -> None:
        m["files"].append({**m["files"][0], "name": "second.safetensors"})
        m["holders"][0] = [[0, 1]] * 8
        m["leaves"][1][-1] = [0, 3]

    rewrite(saved, share)
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    begin = spec_reader_begin(data, "s~@0")
    data[begin] ^= 1  # The reader must not read the piece from this file.
    file.write_bytes(data)
    np.testing.assert_array_equal(tr.open(saved)["s"][:], np.arange(16, dtype=np.float32))


def spec_reader_begin(data: bytes, key: str) -> int:
    size = int.from_bytes(data[:8], "little")
    return 8 + size + json.loads(bytes(data[8 : 8 + size]))[key]["data_offsets"][0]


def test_tensors_that_share_bytes_are_refused(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"a": np.zeros(8), "b": np.ones(8)})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = file.read_bytes().replace(b"[64,128]", b"[0,64]  ")
    file.chmod(0o644)
    file.write_bytes(data)
    rewrite(tmp_path / "c", lambda m: m["files"][0].update(xxh3=manifest.xxh3(data[:4096])))
    with pytest.raises(UnsupportedError, match=r"without gaps and overlaps.*undamaged"):
        tr.restore(tmp_path / "c")


@pytest.mark.parametrize("shape", [[2**61, 0], [2**40, 2**40], [1] * 65, [-1], [0] * 64 + [1]])
def test_shapes_that_numpy_cannot_have_are_refused(saved: pathlib.Path, shape: list[int]) -> None:
    rewrite(saved, lambda m: m["leaves"].__setitem__(0, ["array", "a", "numpy", "int64", shape, "", 0]))
    with pytest.raises(UnsupportedError, match="cannot have the shape"):
        tr.restore(saved)


@pytest.mark.parametrize("count", [10**8, 2**70, 4])
def test_tree_larger_than_its_file_is_refused_at_once(saved: pathlib.Path, count: int) -> None:
    """A tree with more or fewer children than leaves is refused, without allocating memory for its claim."""
    rewrite(saved, lambda m: m["tree"].__setitem__(0, ["list", "", count if count != 4 else 3]))
    with pytest.raises(UnsupportedError):
        tr.open(saved)


def test_one_key_twice_in_a_container_loses_nothing_silently(saved: pathlib.Path) -> None:
    rewrite(saved, lambda m: m["tree"][0].__setitem__(2, ["a", "a", "t", "v"]))
    with pytest.raises(UnsupportedError, match="one key twice"):
        tr.restore(saved)


def test_a_manifest_of_a_terabyte_is_not_read(saved: pathlib.Path) -> None:
    (saved / "treering.json").chmod(0o644)
    with (saved / "treering.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptError, match="too many to be read at once"):
        tr.open(saved)
    assert not tr.verify(saved).ok


def test_a_key_of_an_unknown_implementation_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"k": jax.random.key(0)})
    rewrite(tmp_path / "c", lambda m: m["leaves"][0].__setitem__(5, "mine"))
    for use in (lambda: tr.restore(tmp_path / "c"), lambda: tr.open(tmp_path / "c").abstract()):
        with pytest.raises(UnsupportedError, match="as a mine key"):
            use()


@pytest.mark.parametrize("keys", [(1, True), (0.0, -0.0), ((1,), (True,)), (2, 2.0)])
def test_keys_that_are_equal_and_not_the_same(keys: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    """Keys that are equal in Python but differ, such as 1 and True, stay distinct in neighboring containers."""
    tree = [{keys[0]: np.zeros(3)}, {keys[1]: np.ones(3)}, {keys[0]: np.ones(2)}]
    tr.save(tmp_path / "c", tree)
    restored: Any = tr.restore(tmp_path / "c")
    assert repr([list(one) for one in restored]) == repr([list(one) for one in tree])
    assert not tr.diff(tmp_path / "c", tree)


@pytest.mark.long
@pytest.mark.whole
def test_the_paths_of_a_tree_are_those_of_its_places() -> None:
    """`leaf_paths` returns the paths that a simple walk gives, for random trees.

    The trees have containers of leaves only and repeated containers, which `leaf_paths` handles in a fast way.
    """
    draw = random.Random(0)

    def tree(depth: int) -> list[Node | int]:
        if depth > 4 or draw.random() < 0.4:
            return [LEAF]
        kind = draw.choice(["dict", "list", "tuple", "namedtuple", "object"])
        count = draw.choice([0, 1, 2, 3, 4, 9])
        repeated = [LEAF] if draw.random() < 0.5 else tree(depth + 1)
        parts = [repeated if draw.random() < 0.8 else tree(depth + 1) for _ in range(count)]
        keys = (
            count if kind in ("list", "tuple") else [draw.choice(["k", "a/b", "~", ""]) + str(n) for n in range(count)]
        )
        return [Node(kind, "", keys), *(node for part in parts for node in part)]  # type: ignore[arg-type]

    for _ in range(2000):
        nodes = tree(0)
        expected = [path for _, path, node in containers(nodes) if node == LEAF]
        assert leaf_paths(nodes, len(expected)) == expected
        if len(nodes) > 1:
            with pytest.raises(ValueError, match="tree"):
                leaf_paths(nodes[:-1], len(expected) - (nodes[-1] == LEAF))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("place", ["ckpt", "ckpt.safetensors", "ckpt.msgpack"])
def test_bools_with_other_bytes_are_writable(tmp_path: pathlib.Path, place: str, shape: tuple[int, ...]) -> None:
    """A bool whose byte is neither 0 nor 1 is restored as True, in a writable array."""
    tr.save(tmp_path / place, {"w": np.full(shape, 2, np.uint8).view(bool)})
    found = tr.restore(tmp_path / place)["w"]
    assert isinstance(found, np.ndarray) and found.shape == shape and found.view(np.uint8).all()
    found[...] = False
    assert not found.any()
