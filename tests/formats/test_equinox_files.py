"""Tests of Equinox's files: files that Equinox wrote, files that Treering wrote for Equinox, and bad ones."""

import io
import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from hostile_input import damaged, outcome, shuffled
from treering import formats, rules, stores
from treering._core.boxes import full_box
from treering.errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsafeError, UnsupportedError
from treering.formats.equinox.files import EquinoxReader
from treering.stores.posix import Disk

REAL = Path(__file__).parent.parent / "real" / "equinox" / "model.eqx"
KINDS = ["?", *"bBhHiIlLefdFD", "M8[D]", "m8[ns]", "U3", "S5"]
UNRECORDED = ["float8_e4m3fn", "float8_e5m2fnuz", "int4", "uint4", "int2"]


def noise(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns an array of random bits, which includes NaNs with payloads, subnormals and negative zeros."""
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    if dtype.name == "bool":
        bits &= 1
    if dtype.kind in "US":
        return np.array(["äß", "b", ""] * 20 if dtype.kind == "U" else [b"a\xff", b"b", b""] * 20, dtype)[
            : math.prod(shape)
        ].reshape(shape)
    if dtype.kind in "Mm" or dtype.name[-4:] in ("int4", "int2"):
        return (bits[: math.prod(shape)] % 2).reshape(shape).astype(dtype)
    return bits.view(dtype).reshape(shape)


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def reader(path: Path, disk: Disk | None = None) -> EquinoxReader:
    found = formats.get("equinox").open(stores.Filesystem(disk) if disk else stores.get(""), str(path))
    assert isinstance(found, EquinoxReader)
    return found


def record(descr: str, shape: str = "(2,)", order: str = "False", data: bytes = b"", version: int = 1) -> bytes:
    """Returns an .npy record with any header, which NumPy might not write."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode("latin1")
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


def npy(*arrays: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array, **options)
    return file.getvalue()


class Model(eqx.Module):
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    scale: Any
    name: str = eqx.field(static=True, default="m")


def model(seed: int = 0) -> Model:
    keys = jax.random.split(jax.random.key(seed), 3)
    layers = [eqx.nn.Linear(4, 4, key=keys[0]), eqx.nn.Linear(4, 2, use_bias=False, key=keys[1])]
    return Model(layers, eqx.nn.LayerNorm(4), {"a": 1.5 + seed, "b": (seed, True, 2j, None, jax.nn.relu)})


# Reading


@pytest.mark.long
def test_a_model_of_equinox(tmp_path: Path) -> None:
    path = tmp_path / "m.eqx"
    eqx.tree_serialise_leaves(path, model(0))
    for like in (model(1), eqx.filter_eval_shape(model, 1)):
        found = tr.restore(path, like=like)
        assert eqx.tree_equal(found, eqx.tree_deserialise_leaves(path, model(1)), model(0))
    ckpt = tr.open(path)
    assert ckpt.format == "equinox" and list(ckpt) == [str(n) for n in range(9)] and ckpt.metadata is None
    assert ckpt.nbytes == path.stat().st_size and tr.verify(path).ok
    assert type(tr.restore(path)) is list and len(tr.restore(path)) == 9


@pytest.mark.long
def test_a_real_file_with_its_line_of_json() -> None:
    ckpt = tr.open(REAL)
    assert ckpt.metadata == {"width": 16, "depth": 3}
    with open(REAL, "rb") as file:
        file.readline()
        for path in ckpt:
            assert same(ckpt[path][...], np.load(file))
        assert not file.read()
    with open(REAL, "rb") as file:
        file.readline()
        like = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in ckpt.values()]
        expected = eqx.tree_deserialise_leaves(file, like)
    assert eqx.tree_equal(tr.restore(REAL, like=like), expected)


def test_to_the_native_format_and_back(tmp_path: Path) -> None:
    tr.convert(REAL, tmp_path / "native")
    tr.convert(tmp_path / "native", tmp_path / "again.eqx")
    assert (tmp_path / "again.eqx").read_bytes() == REAL.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype(tmp_path: Path, kind: str) -> None:
    arrays = [noise(kind, (3, 4)), noise(kind, ()), noise(kind, (0, 2)), np.asfortranarray(noise(kind, (2, 3, 4)))]
    arrays += [noise(kind, (4, 5)).T, noise(kind, (5,))[::2]]
    if np.dtype(kind).itemsize > 1 and kind != "S5":
        arrays.append(noise(kind, (3, 2)).astype(np.dtype(kind).newbyteorder(">")))
    path = tmp_path / "x.eqx"
    eqx.tree_serialise_leaves(path, arrays)
    found = reader(path)
    for entry, array in zip(found.entries.values(), arrays, strict=True):
        native = array.astype(array.dtype.newbyteorder("="))
        assert same(found.read([(entry, full_box(entry.shape))])[0], native)
        box = tuple((size // 2, size) for size in array.shape)
        (part,) = found.read([(entry, box)])
        assert same(part, native[(*(slice(*one) for one in box), ...)])
        part[...] = part  # This raises unless the array is writable.
    assert not found.ambiguous_dtypes
    expected = eqx.tree_deserialise_leaves(path, arrays)
    assert all(same(x, y) for x, y in zip(tr.restore(path, like=arrays), expected, strict=True))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_unnamed_numpy_dtypes_with_a_unique_code(tmp_path: Path, name: str) -> None:
    """A dtype that NumPy has no name for is still known from the file if no other dtype has its code."""
    arrays = [jnp.asarray(noise(getattr(ml_dtypes, name), shape)) for shape in [(3, 4), (), (0,)]]
    path = tmp_path / "x.eqx"
    eqx.tree_serialise_leaves(path, arrays)
    ckpt = tr.open(path)
    assert not reader(path).ambiguous_dtypes
    assert all(same(x[...], y) for x, y in zip(ckpt.values(), arrays, strict=True))
    assert all(same(x, y) for x, y in zip(tr.restore(path, like=arrays), arrays, strict=True))
    one = np.asarray(arrays[0])
    for order in "<|":
        path.write_bytes(record(f"'{order}{one.dtype.str[1:]}'", "(4, 3)", "True", one.tobytes()))
        assert same(tr.open(path)["0"][...], one.reshape(3, 4).T)
    if name == "bfloat16":
        path.write_bytes(record("'>V2'", "(12,)", data=one.view(np.uint16).byteswap().tobytes()))
        assert same(tr.open(path)["0"][...], one.reshape(-1))


@pytest.mark.parametrize("name", UNRECORDED)
def test_dtypes_that_the_file_does_not_record(tmp_path: Path, name: str) -> None:
    """A dtype that the file does not record is read as uint8, is marked as ambiguous, and comes from the template."""
    arrays = [jnp.asarray(noise(getattr(ml_dtypes, name), shape)) for shape in [(3, 4), (), (0,)]]
    path = tmp_path / "x.eqx"
    eqx.tree_serialise_leaves(path, [*arrays, np.arange(3, dtype=np.uint8)])
    found = reader(path)
    assert found.ambiguous_dtypes == {"0", "1", "2"}
    for entry, array in zip(found.entries.values(), arrays, strict=False):
        assert entry.dtype == "uint8" and entry.shape == array.shape
        assert found.read([(entry, full_box(entry.shape))])[0].tobytes() == np.asarray(array).tobytes()
    restored = tr.restore(path, like=[*arrays, np.zeros(3, np.uint8)])
    assert all(same(x, y) for x, y in zip(restored, arrays, strict=False)) and restored[3].tolist() == [0, 1, 2]


def test_recorded_dtype_is_not_restored_as_another(tmp_path: Path) -> None:
    """An array whose dtype the file records cannot be restored with another dtype of the same size."""
    path = tmp_path / "x.eqx"
    eqx.tree_serialise_leaves(path, [jnp.ones(2, jnp.float8_e4m3fn), np.arange(3, dtype=np.uint8)])
    with pytest.raises(MismatchError):
        tr.restore(path, like=[jnp.ones(2, jnp.float8_e4m3fn), jnp.ones(3, jnp.float8_e4m3fn)])


def test_python_numbers(tmp_path: Path) -> None:
    values = [
        True,
        False,
        0,
        -(2**63),
        2**63 - 1,
        2**64 - 1,
        -0.0,
        math.inf,
        5e-324,
        1e300,
        1 - 2j,
        np.float32(1.5),
        np.int8(-3),
    ]
    path = tmp_path / "x.eqx"
    eqx.tree_serialise_leaves(path, values)
    like = [type(value)(0) for value in values]
    found = tr.restore(path, like=like)
    assert [(type(x), str(x)) for x in found] == [(type(x), str(x)) for x in values]
    assert found == eqx.tree_deserialise_leaves(path, like)
    assert tr.open(path)["3"][...] == -(2**63)


def test_a_template_over_devices(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    arrays = [noise(np.float32, (8, 6)), np.asfortranarray(noise(np.int16, (8, 4, 2))), noise(np.float32, ())]
    path = tmp_path / "x.eqx"
    eqx.tree_serialise_leaves(path, arrays)
    split = NamedSharding(mesh, PartitionSpec("x", "y"))
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split if a.ndim else None) for a in arrays]
    found = tr.restore(path, like=like)
    assert all(same(a, b) for a, b in zip(found, arrays, strict=True)) and found[1].sharding == split


def test_more_leaves_than_records_and_fewer(tmp_path: Path) -> None:
    path = tmp_path / "x.eqx"
    eqx.tree_serialise_leaves(path, [np.ones(2), np.ones(3)])
    for like in ([np.ones(2)], [np.ones(2), np.ones(3), np.ones(4)], [np.ones(2), np.ones(4)]):
        with pytest.raises(MismatchError):
            tr.restore(path, like=like)


def test_a_part_is_chosen_by_numbers_for_there_are_no_names(tmp_path: Path) -> None:
    path = tmp_path / "x.eqx"
    part = {"c": np.zeros(3), "d": np.arange(3).astype("float8_e4m3fn"), "n": None, "k": 2.5}
    tree = {"a": np.ones(2), "b": part, "z": 7}
    eqx.tree_serialise_leaves(path, tree)
    for find in (
        lambda: tr.open(path).at("b"),
        lambda: tr.restore(path, part, at="b"),
        lambda: tr.restore(path, at="b"),
    ):
        with pytest.raises(NotFoundError, match=r"nothing is at 'b'; its leaves have only numbers.*\.select\("):
            find()
    blank = {**jax.tree.map(np.zeros_like, part), "k": 0.0}
    found = tr.open(path).select(["1", "2", "3"]).restore(blank)
    assert all(same(found[name], part[name]) for name in "cd") and (found["n"], found["k"]) == (None, 2.5)
    assert same(tr.restore(path, np.zeros(2), at="0"), tree["a"]) and tr.restore(path, 0, at="4") == 7
    with pytest.raises(
        MismatchError, match=r"expected the 1 arrays .* found 2 records.* is \(root\): expected \[2\], found"
    ):
        tr.open(path).select(["1", "2"]).restore(np.zeros(2))
    for like, where in (({**tree, "b": ...}, "at b"), ({**tree, "a": ..., "z": ...}, "at a, z")):
        with pytest.raises(MismatchError, match=rf"found \.\.\. {where}; the 5 records have no names"):
            tr.restore(path, like)


def test_rules_leave_the_order_or_give_names(tmp_path: Path) -> None:
    path = tmp_path / "x.eqx"
    tree = {"a": noise(np.float32, (2, 3)), "f": np.arange(3).astype("float8_e4m3fn"), "n": None, "k": 2.5}
    eqx.tree_serialise_leaves(path, tree)
    turned = {**jax.tree.map(np.zeros_like, tree), "a": np.zeros((3, 2), np.float32), "k": 0.0}
    found = tr.restore(path, turned, rules=[rules.transpose("0", (1, 0))])
    assert same(found["a"], np.ascontiguousarray(tree["a"].T)) and same(found["f"], tree["f"]) and found["k"] == 2.5
    part = {"f": turned["f"], "k": 0.0}
    assert same(tr.restore(path, part, rules=[rules.drop("0")])["f"], tree["f"])
    named = [rules.rename("^2$", "k"), rules.rename("^0$", "a"), rules.drop("1")]
    assert same(tr.restore(path, {"k": np.zeros(()), "a": turned["a"].T}, rules=named)["a"], tree["a"])
    for bytes_of_no_dtype in (rules.cast("1", "float32"), rules.rename("^1$", "f")):
        with pytest.raises(MismatchError, match=r"of a known dtype|found bytes of a dtype"):
            tr.restore(path, {**tree, "f": np.zeros(3, np.float32)}, rules=[bytes_of_no_dtype])


@pytest.mark.parametrize("value", [{"width": 3}, {}, [1, "é"], None, 5, "x", {"a": {"b": [math.inf, True]}}])
def test_a_line_of_json(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "x.eqx"
    with open(path, "wb") as file:
        file.write((json.dumps(value) + "\n").encode())
        eqx.tree_serialise_leaves(file, [np.ones(2), np.zeros(3)])
    ckpt = tr.open(path)
    assert ckpt.metadata == value and len(ckpt) == 2 and same(ckpt["1"][...], np.zeros(3))


def test_files_without_records(tmp_path: Path) -> None:
    path = tmp_path / "x.eqx"
    eqx.tree_serialise_leaves(path, {"f": jax.nn.relu, "n": None})
    assert path.stat().st_size == 0 and not tr.open(path)
    assert tr.restore(path, like={"f": jax.nn.relu, "n": None}) == {"f": jax.nn.relu, "n": None}
    path.write_text('{"a": 1}\n')
    assert tr.open(path).metadata == {"a": 1} and not tr.open(path)


def test_records_of_every_version_and_of_older_writers(tmp_path: Path) -> None:
    data = np.arange(6, dtype="<i4").tobytes()
    path = tmp_path / "x.eqx"
    path.write_bytes(
        record("'<i4'", "(2, 3)", data=data)
        + record("'<i4'", "(2L, 3L)", data=data, version=2)
        + record("'|i1'", "(24,)", data=data, version=3)
        + record("'>u2'", "(3,4)", order="True", data=data)
        + record("'<i4'", "()", data=data[:4])
        + record("'=i4'", "(6)", data=data)
    )
    found = [array[...] for array in tr.open(path).values()]
    assert same(found[0], np.arange(6, dtype=np.int32).reshape(2, 3)) and same(found[1], found[0])
    assert found[2].tobytes() == data and same(found[4], np.int32(0)) and found[5].shape == (6,)
    assert same(found[3], np.frombuffer(data, ">u2").reshape(4, 3).T.astype(np.uint16))
    with open(path, "rb") as file:
        assert all(same(x, np.load(file).astype(x.dtype)) for x in found[:1])


class Counting(Disk):
    nbytes = 0

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.nbytes += len(buffer)
        return super().read(fd, buffer, offset)


def test_opening_reads_headers_and_a_slice_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.eqx"
    with open(path, "wb") as file:
        for _ in range(4):
            file.write(record("'<f4'", "(1048576, 1024)"))
            file.seek(2**32, io.SEEK_CUR)
        file.truncate()
    disk = Counting()
    found = reader(path, disk)
    assert len(found.entries) == 4 and disk.nbytes < 20_000
    entry: Any = found.entries["2"]
    assert found.read([(entry, ((7, 9), (0, 1024)))])[0].shape == (2, 1024) and disk.nbytes < 30_000


# Writing


@pytest.mark.slow
def test_what_is_written_equinox_reads(tmp_path: Path) -> None:
    path = tmp_path / "deep/m.eqx"
    report = tr.save(path, model(0))
    eqx.tree_serialise_leaves(tmp_path / "theirs.eqx", model(0))
    assert path.read_bytes() == (tmp_path / "theirs.eqx").read_bytes() and report.nbytes == path.stat().st_size
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(path, model(1)), model(0))
    assert eqx.tree_equal(tr.restore(path, like=model(1)), model(0))
    with pytest.raises(tr.errors.ExistsError):
        tr.save(path, model(0))
    tr.save(path, model(2), overwrite=True)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(path, model(1)), model(2)) and os.listdir(path.parent) == [
        "m.eqx"
    ]


def test_every_dtype_that_equinox_reads_back(tmp_path: Path) -> None:
    tree: list[Any] = [noise(kind, shape) for kind in KINDS for shape in [(2, 3), (), (0, 4)]]
    tree += [jnp.asarray(noise(ml_dtypes.bfloat16, shape)) for shape in [(2, 3), (), (0,)]]
    tree += [True, -5, 2**63, 2**64 - 1, -(2**63), -0.0, math.nan, 1j, np.float32(2), None, jax.nn.relu]
    path = tmp_path / "x.eqx"
    tr.save(path, tree)
    found = eqx.tree_deserialise_leaves(path, tree)
    for x, y in zip(found, tree, strict=True):
        assert type(x) is type(y) and (x is y or same(x, y))


def test_metadata_is_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "x.eqx"
    metadata = {"width": 3, "names": ["ä\n", None]}
    tr.save(path, [np.ones(2)], metadata=metadata)
    with open(path, "rb") as file:
        assert json.loads(file.readline()) == metadata
        assert same(eqx.tree_deserialise_leaves(file, [np.zeros(2)])[0], np.ones(2))
    assert tr.open(path).metadata == metadata and tr.open(path).step is None


@pytest.mark.long
def test_what_equinox_could_not_read_is_named(tmp_path: Path) -> None:
    tree: dict[str, Any] = {name: jnp.ones(2, name) for name in (*UNRECORDED, "float8_e5m2")}
    tree |= {"fine": np.ones(2), "key": jax.random.key(0), "text": "x", "big": 2**64, "small": -(2**63) - 1}
    with pytest.raises(UnsupportedError) as error:
        tr.save(tmp_path / "x.eqx", tree)
    lines = str(error.value).splitlines()
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(set(tree) - {"fine", "text"})
    with pytest.raises(MismatchError, match="no options, found max_shard_size"):
        tr.save(tmp_path / "x.eqx", {"a": np.ones(2)}, max_shard_size=4)
    assert not os.listdir(tmp_path)


def test_large_arrays_are_written_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treering.formats.equinox import files

    monkeypatch.setattr(files, "_SLICE_BYTES", 100)
    tree = [noise(np.float32, (7, 11, 3)), noise(np.int8, (555,)), noise(np.float64, ())]
    tr.save(tmp_path / "x.eqx", tree)
    assert all(same(x, y) for x, y in zip(eqx.tree_deserialise_leaves(tmp_path / "x.eqx", tree), tree, strict=True))


# Leaves that Equinox does not save


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm
    linear: eqx.nn.Linear
    rest: tuple[Any, ...]

    def __init__(self, seed: int):
        self.norm = eqx.nn.BatchNorm(4, "batch" if seed == 0 else "other", mode="ema")  # Its axis name is a leaf.
        self.linear = eqx.nn.Linear(4, 4, key=jax.random.key(seed))
        self.rest = (f"text {seed}", b"bytes %d" % seed, seed, 0.5 + seed, None, jnp.tanh)


def stateful(seed: int) -> tuple[Stateful, eqx.nn.State]:
    """Returns a model, and a state with the averages of one batch."""
    model, state = eqx.nn.make_with_state(Stateful)(seed)
    x = jax.random.normal(jax.random.key(seed + 1), (5, 4))
    apply = jax.vmap(model.norm, axis_name=("batch" if seed == 0 else "other"), in_axes=(0, None), out_axes=(0, None))
    return model, apply(x, state)[1]


TEXT = "0/norm/axis_name, 0/rest/0, 0/rest/1"


@pytest.mark.long
def test_text_is_the_templates_as_equinox_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treering")
    saved, like, path = stateful(0), stateful(1), tmp_path / "theirs.eqx"
    eqx.tree_serialise_leaves(path, saved)
    expected = eqx.tree_deserialise_leaves(path, like)
    assert expected[0].norm.axis_name == "other" and expected[0].rest[:3] == ("text 1", b"bytes 1", 0)
    abstract = eqx.filter_eval_shape(stateful, 1)
    assert eqx.tree_equal(tr.restore(path, like), tr.restore(path, abstract), expected)
    assert not eqx.tree_equal(expected[1], like[1])
    messages = [line for record in caplog.records if "restored" not in (line := record.getMessage())]
    assert messages == [f"{path}: text and bytes are the template's, because the file has none: {TEXT}"] * 2
    part = [(like[0].norm.axis_name, like[0].norm.weight), "alone"]
    assert eqx.tree_equal(tr.open(path).select("0").restore(part), [("other", saved[0].norm.weight), "alone"])


@pytest.mark.long
def test_text_is_left_out_as_equinox_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treering")
    saved, path = stateful(0), tmp_path / "ours.eqx"
    tr.save(path, saved)
    eqx.tree_serialise_leaves(tmp_path / "theirs.eqx", saved)
    assert path.read_bytes() == (tmp_path / "theirs.eqx").read_bytes()
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert said == [f"{path}: left out, because Equinox takes text and bytes from the template: {TEXT}"]
    expected = eqx.tree_deserialise_leaves(tmp_path / "theirs.eqx", stateful(1))
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(path, stateful(1)), tr.restore(path, stateful(1)), expected)
    tr.save(tmp_path / "native", saved)
    tr.convert(tmp_path / "native", tmp_path / "converted.eqx")
    assert (tmp_path / "converted.eqx").read_bytes() == path.read_bytes()


# Bad files


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = tmp_path / "x.eqx"
    path.write_bytes(npy(np.ones(2)) + npy(np.array([Trap()], object), allow_pickle=True))
    with pytest.raises(UnsupportedError, match="record 1, at 144: a pickled Python object"):
        tr.open(path)
    with open(path, "wb") as file:
        pickle.dump(Trap(), file)
    with pytest.raises(UnsupportedError):
        tr.open(path)
    eqx.tree_serialise_leaves(path, [2**70])  # Equinox pickles such a large integer.
    with pytest.raises(UnsupportedError, match="pickled"):
        tr.open(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (record("'<f4'", "(9,)", data=bytes(35)), CorruptError, "expected 104 bytes, found 103|cut short"),
        (record("'<f4'", f"({2**62},)"), CorruptError, "shape"),
        (record("'<f4'", f"(0, {2**62})"), UnsafeError, "shape"),
        (record("'<f4'", f"({'1,' * 65})", data=bytes(4)), UnsafeError, "shape"),
        (record("'<f4'", "(" + "9" * 30 + ",)"), CorruptError, "header"),
        (record("'<f4'", "(-1,)"), CorruptError, "header"),
        (record("'<f4'", "('a',)"), CorruptError, "header"),
        (record("'<f4'", "__import__('os')"), CorruptError, "header"),
        (record("[('a', '<f4')]", data=bytes(8)), UnsupportedError, "dtype"),
        (record("'<f16'", data=bytes(32)), UnsupportedError, "float128|longdouble"),
        (record("'|V3'", data=bytes(6)), UnsupportedError, "V3"),
        (record("'|V4'", data=bytes(8)), UnsupportedError, "V4"),
        (record("'<f9'", data=bytes(18)), UnsupportedError, "f9"),
        (record("'<U0'"), UnsupportedError, "U0"),
        (record("'a5'", data=bytes(10)), UnsupportedError, "a5"),
        (record("'<f4'", version=4, data=bytes(8)), CorruptError, "npy record"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", UnsafeError, "4294967295"),
        (b"\x93NUMPY\x02\x00\xff\xff\x00\x00{", CorruptError, "cut short"),
        (record("'<i1'", data=b"ab") + b"PK\x03\x04 and more", CorruptError, "record 1, at .*expected an .npy record"),
    ],
)
def test_bad_records(tmp_path: Path, data: bytes, error: Any, text: str) -> None:
    path = tmp_path / "x.eqx"
    path.write_bytes(data)
    with pytest.raises(error, match=text):
        tr.open(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"{}\n",
        b"\x80\x04.",
        b'{"a": 1}\nhello',
        b"text\n\x93NUMPY",
        b"[" * 50_000 + b"\n\x93NUMPY",
        b"1" * 5000 + b"\n\x93NUMPY",
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    assert formats.get("equinox").refuses(stores.get(""), str(path))
    with pytest.raises(CorruptError):
        formats.get("equinox").open(stores.get(""), str(path))
    os.mkfifo(tmp_path / "fifo.eqx")
    for name in (tmp_path, tmp_path / "fifo.eqx", tmp_path / "none.eqx"):
        assert formats.get("equinox").refuses(stores.get(""), str(name))


SMALL = (
    b'{"a": [1]}\n'
    + npy(np.arange(3, dtype=np.int16), np.asfortranarray(np.ones((2, 2), ">f4")))
    + record("'<V2'", data=b"abcd")
)


@pytest.mark.slow
def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "x.eqx"
    for data in damaged(SMALL):
        path.write_bytes(data)
        try:
            found = reader(path)
            for entry in found.entries.values():
                found.read([(entry, full_box(entry.shape))])  # type: ignore[arg-type]
        except TreeringError:
            pass
    for size in range(1, len(SMALL)):
        path.write_bytes(SMALL[:size])
        assert outcome(path) != "fine" or size in (11, 145, 289), size


@pytest.mark.long
@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shuffled_files(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "x.eqx"
    path.write_bytes(shuffled(SMALL, seed))
    outcome(path)
