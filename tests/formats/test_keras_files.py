"""Weights of Keras: what Keras saves reads as Keras itself reads it, from HDF5 files that h5py wrote.

`real/keras` has files that Keras wrote. The tests of other files need h5py, which comes with Keras.
"""

import json
import logging
import os
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treering as tr
from helpers import REAL, assert_described, described
from treering import stores
from treering.errors import CorruptError, MismatchError, NotFoundError, UnsafeError, UnsupportedError
from treering.formats.keras.types import TypeRefused, parse_type

os.environ.setdefault("KERAS_BACKEND", "jax")
FILES = ("single.weights.h5", "half.weights.h5", "shards.weights.json", "model.keras")
_REASON = "Keras and h5py are installed for `make test` and not for `make lowest`"


@pytest.mark.parametrize("name", FILES)
def test_real_files_are_read_as_keras_reads_them(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)  # Importing it would raise an error.
    path, leaves = REAL / "keras" / name, described("keras")[name]
    ckpt = tr.open(path)
    assert ckpt.format == "keras" and tr.verify(path).ok
    assert_described(path, leaves)
    assert ckpt.metadata["layers/dense/vars"] == {"name": "head"}
    if name == "model.keras":
        assert ckpt.metadata["config.json"]["class_name"] == "Sequential"
    tr.convert(path, tmp_path / "native")
    assert_described(tmp_path / "native", leaves)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "mixed_bfloat16", "int8", "int4", "float8"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Layer .* does not have a")  # Keras's own
def test_what_keras_saves_is_what_keras_loads(tmp_path: Path, kind: str) -> None:
    keras = pytest.importorskip("keras", reason=_REASON)
    from keras.src.saving.saving_lib import H5IOStore, ShardedH5IOStore

    policy = "float32" if kind in ("int8", "int4", "float8") else kind

    def made() -> Any:
        layers = [keras.Input((6,)), *(keras.layers.Dense(6, dtype=policy) for _ in range(11))]
        model = keras.Sequential([*layers, keras.layers.BatchNormalization(dtype=policy), keras.layers.Dropout(0.5)])
        if policy != kind:
            model.quantize(kind)
        model.compile("adam", "mse")
        return model

    model = made()
    model.fit(np.ones((8, 6)), np.ones((8, 6)), verbose=0)
    files = {"m.weights.h5": H5IOStore, "m.weights.json": ShardedH5IOStore, "m.keras": H5IOStore}
    model.save_weights(tmp_path / "m.weights.h5")
    model.save_weights(tmp_path / "m.weights.json", max_shard_size=4.5e-6)
    model.save(tmp_path / "m.keras")
    for name, reader in files.items():
        path = tmp_path / name
        if name == "m.keras":
            shutil.unpack_archive(path, tmp_path / "unpacked", "zip")
            path = tmp_path / "unpacked" / "model.weights.h5"
        ckpt, store, count = tr.open(tmp_path / name), reader(path), 0
        for group in {leaf.rpartition("/vars/")[0] for leaf in ckpt}:
            entry = store.get(group)
            for key in entry.keys():  # noqa: SIM118 (not a dict)
                theirs, ours = entry[key], ckpt[f"{group}/vars/{key}"][...]
                assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
                count += 1
        store.close()
        assert count == len(ckpt) > 20
    loaded = made()
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "m.weights.h5")
    last = next(layer for layer in loaded.layers if isinstance(layer, keras.layers.BatchNormalization))
    for n, variable in enumerate([*last.trainable_variables, *last.non_trainable_variables]):
        assert np.array_equal(ckpt[f"layers/batch_normalization/vars/{n}"][...], np.asarray(variable.value))


def written(path: Path, make: Callable[[Any], object], **options: Any) -> Path:
    """Writes a file with h5py."""
    h5py = pytest.importorskip("h5py", reason=_REASON)
    with h5py.File(path, "w", **options) as file:
        make(file)
    return path


MATRIX = np.random.default_rng(0).standard_normal((50, 70)).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (16, 16)},
        {"compression": "gzip", "chunks": (7, 70)},
        {"compression": "gzip", "shuffle": True, "fletcher32": True, "chunks": (50, 9)},
        {"fletcher32": True, "chunks": (3, 5), "maxshape": (None, None)},
    ],
)
def test_layouts_of_h5py(tmp_path: Path, options: dict[str, Any]) -> None:
    path = written(tmp_path / "x.h5", lambda file: file.create_dataset("g/a", data=MATRIX, **options))
    ckpt = tr.open(path)
    for index in (np.s_[...], np.s_[3], np.s_[5:40:3, -20:], np.s_[49:, 69:], np.s_[10:10]):
        assert np.array_equal(ckpt["g/a"][index], MATRIX[index])
    assert tr.verify(path).ok and tr.restore(path)["g"]["a"].tobytes() == MATRIX.tobytes()


def test_dtypes_and_attributes_of_h5py(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays: dict[str, Any] = {
        **{dtype: np.arange(3).astype(dtype) for dtype in ("i1", "u1", ">i2", "i4", ">u8", "f2", ">f4", "f8", "?")},
        "text": np.array([b"ab", b"c"]),
        "scalar": np.int64(7),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.ones(3, ml_dtypes.bfloat16),
        "eighth": np.ones(3, ml_dtypes.float8_e4m3fn),
        "unnamed": np.ones(3, ml_dtypes.float8_e4m3fn),
    }

    def make(file: Any) -> None:
        for name, array in arrays.items():
            file[name] = array
        file["half"].attrs["dtype"] = "bfloat16"
        file["eighth"].attrs["dtype"] = "float8_e4m3fn"
        file["again"] = file["scalar"]
        values = {"name": "äöü", "n": 3, "names": ["a", "b"], "fixed": np.array([b"q"]), "yes": True, "many": MATRIX}
        file.attrs.update(values)
        file["i4"].attrs.update({"half": arrays["half"], "eighth": arrays["eighth"], "bytes": np.void(b"ab")})

    path = written(tmp_path / "x.h5", make)
    ckpt = tr.open(path)
    assert set(ckpt) == {*arrays, "again"} and ckpt["again"][...] == 7
    for name, array in arrays.items():
        found = ckpt[name][...]
        assert found.tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes() and found.shape == array.shape
        assert name == "unnamed" or found.dtype == array.dtype.newbyteorder("=")
    template = {"unnamed": arrays["unnamed"]}
    assert tr.restore(path, like=template, extra=["*"])["unnamed"].dtype == "float8_e4m3fn"
    assert ckpt.metadata[""] == {"name": "äöü", "n": 3, "names": ["a", "b"], "fixed": ["q"], "yes": True}
    assert "Keras has stored unnamed without the dtype" in caplog.text
    assert "left out, because it cannot be read here: the attribute many of the root" in caplog.text
    assert "i4" not in ckpt.metadata and all(f"attribute {n} of i4" in caplog.text for n in ("half", "eighth", "bytes"))


def _virtual(file: Any) -> None:
    import h5py

    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "a", (4,))
    file.create_virtual_dataset("g/it", layout)


def _link(kind: str, *target: str) -> Callable[[Any], None]:
    def make(file: Any) -> None:
        import h5py

        file["a"], file["g/it"] = 1.0, getattr(h5py, kind)(*target)

    return make


def _type(file: Any) -> None:
    file["g/it"] = np.dtype(np.float32)


def _again(file: Any) -> None:
    file["g/it"] = file.create_group("g")


def _not_ascii(file: Any) -> None:
    for n in range(9):
        file[f"g/größe{n}"] = 1.0


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (_link("SoftLink", "/a"), {}, "g/it: a soft link"),
        (_link("ExternalLink", "/etc/hostname", "/"), {}, "g/it: a link to another file"),
        (_virtual, {}, "g/it: a virtual dataset, whose bytes are in other files"),
        (lambda f: f.create_dataset("g/it", (4,), "f4", external=[("x", 0, 16)]), {}, "g/it: its bytes are in another"),
        (lambda f: f.create_dataset("g/it", data=["a"]), {}, "g/it: text or lists of any length"),
        (lambda f: f.create_dataset("g/it", data=np.ones(2, np.complex64)), {}, "g/it: records"),
        (lambda f: f.create_dataset("g/it", data=np.zeros(2, "V3")), {}, "g/it: opaque values of 3 bytes"),
        (_type, {}, "g/it: a named type"),
        (_again, {}, "g/it: a second path of the group g"),
        (_not_ascii, {}, "g: a group of HDF5's newer form, which many names have if one is not ASCII"),
        (lambda f: f.create_dataset("g/it", data=MATRIX, compression="lzf"), {}, "g/it: expected chunks .* found lzf"),
        (lambda f: f.create_dataset("g/it", data=1.0), {"libver": "latest"}, "superblock 3"),
        (lambda f: f.create_dataset("g/it", data=1.0), {"track_order": True}, r"\(root\): .*object header 2"),
    ],
)
def test_what_is_not_an_array_of_the_file_is_refused_by_name(
    tmp_path: Path, make: Callable[[Any], None], options: dict[str, Any], text: str
) -> None:
    path = written(tmp_path / "x.h5", make, **options)
    with pytest.raises(UnsupportedError, match=text) as caught:
        tr.open(path)
    assert str(path) in str(caught.value) and "save its arrays with treering.save" in str(caught.value)


def test_text_that_no_dtype_has_is_refused() -> None:
    """NumPy raises a `TypeError` for it."""
    for nbytes in (100_000_000, 1 << 31, (1 << 32) - 1):
        with pytest.raises(TypeRefused, match=f"text of {nbytes} bytes"):
            parse_type(struct.pack("<BBBBI", 0x13, 1, 0, 0, nbytes), None)
    assert parse_type(struct.pack("<BBBBI", 0x13, 1, 0, 0, 99_999_999), None).dtype == "|S99999999"


def test_the_advice_about_hdf5_keeps_bfloat16(tmp_path: Path) -> None:
    array = np.array([[1, -2.5]], ml_dtypes.bfloat16)
    path = written(tmp_path / "x.h5", lambda f: f.create_dataset("w", data=array), libver="latest")
    with pytest.raises(UnsupportedError, match=r"dataset\[\.\.\.\]\.view\('bfloat16'\)"):
        tr.open(path)
    import h5py

    with h5py.File(path) as file:
        dataset: Any = file["w"]
        assert dataset[...].view("bfloat16").tobytes() == array.tobytes()


def _unwritten(file: Any) -> None:
    file.create_dataset("w", (3,), "f4")
    file.create_dataset("chunks", (10, 10), "f4", chunks=(5, 5))[:5] = 1
    file["fine"] = MATRIX


def test_bytes_that_were_never_written_are_damage(tmp_path: Path) -> None:
    """HDF5 itself would return the fill value, zeros."""
    path = written(tmp_path / "x.h5", _unwritten)
    ckpt = tr.open(path)
    assert np.array_equal(ckpt["fine"][...], MATRIX)
    for name, text in (("w", "expected 12 bytes, found none"), ("chunks", "expected 4 chunks, found 2")):
        with pytest.raises(CorruptError, match=f"{name}: {text}; HDF5 would show the fill value"):
            ckpt[name][...]
    assert {name for problem in tr.verify(path).problems for name in problem.leaves} == {"w", "chunks"}


def test_a_chunk_that_expands_too_much_is_refused(tmp_path: Path) -> None:
    """The limits of a restore count the array, but a part of a chunk needs all of it."""

    def make(file: Any) -> None:
        array = file.create_dataset("w", (10,), "f4", maxshape=(None,), chunks=(1 << 25,), compression="gzip")
        array.id.write_direct_chunk((0,), b"packed")

    path = written(tmp_path / "x.h5", make)
    with pytest.raises(UnsafeError, match=r"w: expected chunks of at most 10 times .* found 134217728 bytes in 6; "):
        tr.open(path)


def test_a_chunk_with_other_bytes_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "x.h5", lambda f: f.create_dataset("w", data=MATRIX, chunks=(50, 70), fletcher32=True))
    data, place = bytearray(path.read_bytes()), path.read_bytes().index(MATRIX.tobytes())
    data[place + 5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="w: the bytes of a chunk are not what was saved: their checksum differs"):
        tr.restore(path)


def test_a_file_that_is_written_while_it_is_open(tmp_path: Path) -> None:
    for options in ({}, {"compression": "gzip"}):
        path = tmp_path / "x.h5"
        path.unlink(missing_ok=True)
        written(path, lambda f, options=options: f.create_dataset("w", data=MATRIX, **options))
        ckpt = tr.open(path)
        with path.open("r+b") as file:
            file.seek(len(path.read_bytes()) - 100)
            file.write(b"new bytes")
        with pytest.raises(NotFoundError, match=r"x\.h5"):
            ckpt["w"][...]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own
def test_shards_with_bools_have_their_total_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keras = pytest.importorskip("keras", reason=_REASON)

    class Masked(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mask = self.add_weight(shape=(9,), dtype="bool", initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            return x

    keras.Sequential([keras.Input((4,)), Masked()]).save_weights(tmp_path / "m.weights.json", max_shard_size=1)
    assert tr.open(tmp_path / "m.weights.json")["layers/masked/vars/0"].dtype == bool and not caplog.records


def _copied(tmp_path: Path) -> Path:
    for file in (REAL / "keras").glob("shards*"):
        shutil.copy(file, tmp_path)
    return tmp_path / "shards.weights.json"


def test_a_shard_of_another_save_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _copied(tmp_path)
    index = json.loads(path.read_text())

    def changed(key: str, value: Any) -> None:
        path.write_text(json.dumps({**index, key: value}))

    changed("metadata", {"total_size": 1234.0})
    assert len(tr.open(path)) == len(described("keras")[path.name])
    assert "its total_size is 1234 bytes, but the arrays in its files have 168" in caplog.text
    changed("weight_map", {**index["weight_map"], "/layers/dense_1/vars": "shards_00002.weights.h5"})
    with pytest.raises(CorruptError, match=r"shards_00002\.weights\.h5: expected layers/dense_1/vars, which shards"):
        tr.open(path)
    changed("weight_map", {"/vars": "../shards_00002.weights.h5"})
    with pytest.raises(UnsafeError, match="expected the name of something in this folder"):
        tr.open(path)
    changed("weight_map", [1])
    with pytest.raises(CorruptError, match="expected an index of Keras's weights"):
        tr.open(path)
    changed("weight_map", index["weight_map"])
    (tmp_path / "shards_00001.weights.h5").unlink()
    with pytest.raises(CorruptError, match=r"expected the file that shards\.weights\.json names, found nothing"):
        tr.open(path)


def test_archives_have_a_checksum(tmp_path: Path) -> None:
    path, name = tmp_path / "m.keras", "optimizer/vars/2"
    data = bytearray((REAL / "keras" / "model.keras").read_bytes())
    array = tr.open(REAL / "keras" / "model.keras")[name][...].tobytes()
    data[data.index(array)] ^= 1
    path.write_bytes(data)
    ckpt = tr.open(path)
    with pytest.raises(CorruptError, match=r"m\.keras: model\.weights\.h5: the bytes are not what was saved"):
        ckpt[name][...]
    assert not tr.verify(path).ok
    assert tr.restore(path, verify=False)["layers"]["dense"]


def test_archives_that_another_program_packed(tmp_path: Path) -> None:
    with zipfile.ZipFile(REAL / "keras" / "model.keras") as old:
        old.extractall(tmp_path / "unpacked")
    shutil.make_archive(str(tmp_path / "m"), "zip", tmp_path / "unpacked")
    (tmp_path / "m.zip").rename(tmp_path / "m.keras")
    with pytest.raises(UnsupportedError, match=r"unpack it, and open the model\.weights\.h5 in it"):
        tr.open(tmp_path / "m.keras")
    assert not tr.diff(tmp_path / "unpacked" / "model.weights.h5", REAL / "keras" / "model.keras")


def test_archives_with_json_larger_than_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.keras"
    with zipfile.ZipFile(REAL / "keras" / "model.keras") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr("more.json", b"[" + b"0," * (1 << 20) + b"0]", zipfile.ZIP_DEFLATED)
    assert "config.json" in tr.open(path).metadata and "more.json" not in tr.open(path).metadata
    assert "left out, because it cannot be read here: more.json" in caplog.text


def test_archives_in_name_only(tmp_path: Path) -> None:
    """Keras 2 wrote HDF5 under such names."""
    path = REAL / "keras" / "single.weights.h5"
    shutil.copy(path, tmp_path / "old.keras")
    assert not tr.diff(tmp_path / "old.keras", path)


def test_archives_without_weights_in_hdf5(tmp_path: Path) -> None:
    with zipfile.ZipFile(REAL / "keras" / "model.keras") as old, zipfile.ZipFile(tmp_path / "other.keras", "w") as new:
        new.writestr("metadata.json", old.read("metadata.json"))
        new.writestr("model.weights.npz", b"")
    with pytest.raises(UnsupportedError, match=r"expected model\.weights\.h5, found .*model\.save_weights"):
        tr.open(tmp_path / "other.keras")


def test_weights_are_only_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"only read; set the variables .* treering\.keras\.load.*save_weights"):
        tr.save(tmp_path / "m.weights.h5", {"w": np.ones(2)}, format="keras")
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own
def test_keras_loads_its_own_weights(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras", reason=_REASON)
    import treering.keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head"), keras.layers.BatchNormalization()])
    path = REAL / "keras" / "single.weights.h5"
    with pytest.raises(MismatchError, match=r"single\.weights\.h5: .* found weights of Keras; use model\.load_weig"):
        treering.keras.load(model, path)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    assert np.array_equal(np.asarray(model.layers[0].kernel.value), tr.open(path)["layers/dense/vars/0"][...])


def test_a_folder_names_the_weights_in_it(tmp_path: Path) -> None:
    for name, file in (("model.weights.h5", "single.weights.h5"), ("model.keras", "model.keras")):
        (tmp_path / name).mkdir()
        shutil.copy(REAL / "keras" / file, tmp_path / name / name)
        with pytest.raises(NotFoundError, match=rf"{name} in it is .*Keras.*; open it by its own path"):
            tr.open(tmp_path / name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["single.weights.h5", "shards.weights.json", "model.keras"])
def test_weights_in_a_bucket(name: str) -> None:
    obstore = pytest.importorskip("obstore")
    bucket = pytest.importorskip("obstore.store").MemoryStore()
    for file in (REAL / "keras").glob(f"{name.partition('.')[0]}*"):
        obstore.put(bucket, file.name, file.read_bytes())
    path = f"{stores.absolute(bucket)}/{name}"
    assert not tr.diff(path, REAL / "keras" / name) and tr.verify(path).ok
