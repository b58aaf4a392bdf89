"""Archives of NumPy: Treering reads what `numpy.savez` writes, unpickles nothing and trusts no sizes."""

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import treering as tr
from treering.errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsupportedError

SAVES = [np.savez, np.savez_compressed]
ARRAYS: dict[str, Any] = {
    "layers/0/w": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
    "layers/0/columns": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "layers/1/big-endian": np.arange(6, dtype=">f8").reshape(2, 3),
    "scalar": np.float32(2.5),
    "empty": np.zeros((0, 3), np.int8),
    "text": np.array(["a", "äöü"]),
    "~": np.array([True, False]),
    "half": np.arange(5).astype(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("save", SAVES)
def test_what_numpy_saves_comes_back(tmp_path: Path, save: Callable[..., None]) -> None:
    path = tmp_path / "x.npz"
    save(path, **ARRAYS)
    ckpt = tr.open(path)
    paths = {key.replace("~", "~0"): array for key, array in ARRAYS.items()}
    assert ckpt.format == "npz" and list(ckpt) == list(paths) and tr.verify(path).ok
    for name, array in paths.items():
        found = ckpt[name][...]
        assert (
            found.dtype == array.dtype.newbyteorder("=")
            and found.tobytes() == np.ascontiguousarray(array).astype(found.dtype).tobytes()
        )
    for index in (np.s_[1], np.s_[:, 1:3], np.s_[::2, -1:]):
        for name in ("layers/0/w", "layers/0/columns"):
            assert np.array_equal(ckpt[name][index], ARRAYS[name][index])
    tree = tr.restore(path)
    assert tree["layers"][0]["w"].tolist() == ARRAYS["layers/0/w"].tolist() and tree["scalar"] == 2.5
    tr.convert(path, tmp_path / "native")
    assert not tr.diff(path, tmp_path / "native")


def test_pickled_objects_are_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", fine=np.ones(2), config=np.array({"lr": 1}, object))
    with pytest.raises(
        UnsupportedError, match=r"x\.npz: 'config\.npy': a pickled Python object, which is never opened"
    ):
        tr.open(tmp_path / "x.npz")


def test_other_files_in_it_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("notes.txt", "hello")
    assert list(tr.open(tmp_path / "x.npz")) == ["a"]
    assert "left out, because it cannot be read here: notes.txt" in caplog.text


def test_a_leaf_with_leaves_below_it_needs_a_template(tmp_path: Path) -> None:
    """NumPy allows any names. There is no tree with such paths, and the advice of the error gives one."""
    arrays: dict[str, Any] = {"a": np.ones(2), "a/b": np.zeros(2)}
    np.savez(tmp_path / "x.npz", **arrays)
    assert tr.open(tmp_path / "x.npz")["a/b"][:].tolist() == [0, 0]
    with pytest.raises(UnsupportedError, match="restore with a template, or rename one by a rule"):
        tr.restore(tmp_path / "x.npz")
    assert tr.restore(tmp_path / "x.npz", {"a": {"b": np.ones(2)}}, extra="ignore")["a"]["b"].tolist() == [0, 0]
    renamed = tr.restore(tmp_path / "x.npz", rules=[tr.rules.rename("a/b", "b")])
    assert {path: array.tolist() for path, array in renamed.items()} == {"a": [1, 1], "b": [0, 0]}


@pytest.mark.rare
@pytest.mark.long
def test_what_expands_is_read_when_it_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.zeros(10_000_000, np.float64))
    assert tr.open(path)["a"][5:7].tolist() == [0, 0]
    for use in (
        lambda **options: tr.restore(path, **options),
        lambda **options: tr.convert(path, tmp_path / "c", **options),
    ):
        with pytest.raises(MismatchError, match="max_expansion"):
            use()
        use(max_expansion=math.inf)
    assert tr.restore(tmp_path / "c")["a"].shape == (10_000_000,)


def packed(change: Callable[[bytes], bytes] = lambda data: data, **options: Any) -> bytes:
    """Returns an archive with one array, whose `.npy` file `change` alters before it is packed."""
    array, file = io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(100, dtype=np.int32))
    with zipfile.ZipFile(file, "w", **options) as archive:
        archive.writestr("a.npy", change(array.getvalue()))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (packed(lambda data: data[:-1]), CorruptError, "expected 528 bytes, found 527"),
        (packed(lambda data: data + b"x"), CorruptError, "expected 528 bytes, found 529"),
        (packed(lambda data: data.replace(b"(100,), }   ", b"(10000000,)}")), CorruptError, "expected 40000128 bytes"),
        (packed(lambda data: b"x" + data[1:]), CorruptError, "expected an .npy record"),
        (packed(lambda data: data[:5]), CorruptError, "cut short"),
        (packed()[:-30], CorruptError, "File is not a zip file"),
        (packed().replace(struct.pack("<4i", 3, 4, 5, 6), struct.pack("<4i", 3, 4, 5, 7)), CorruptError, "Bad CRC-32"),
        (  # NumPy divides by the number when it compares such a dtype to another one, which ends the process.
            packed(lambda data: data.replace(b"'<i4'", b"'<M8[0s]'").replace(b"    \n", b"\n")),
            UnsupportedError,
            r"arrays of dtype <M8\[0s\] cannot be read here",
        ),
        (packed(compression=zipfile.ZIP_LZMA), UnsupportedError, "another compression"),
        (
            packed().replace(b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\x14\0\1\0"),
            UnsupportedError,
            "encrypted",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, data: bytes, kind: type[TreeringError], text: str) -> None:
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(kind, match=text):
        tr.restore(tmp_path / "x.npz")


@pytest.mark.long
def test_a_part_is_read_whatever_is_read_before(tmp_path: Path) -> None:
    array = np.arange(3_000_000, dtype=np.int32).reshape(1000, 3000)
    np.savez_compressed(tmp_path / "x.npz", a=array)
    lazy = tr.open(tmp_path / "x.npz")["a"]
    for index in (np.s_[900:], np.s_[:3], np.s_[3:6], np.s_[:], np.s_[:, 7], np.s_[999:]):
        assert np.array_equal(lazy[index], array[index])


def test_it_is_only_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="only read; choose another format, such as safetensors"):
        tr.save(tmp_path / "x.npz", {"a": 1}, format="npz")
    np.savez(tmp_path / "params.npz", a=np.ones(2))
    with pytest.raises(
        NotFoundError, match=r"params.npz in it is an archive of NumPy \(.npz\); open it by its own path"
    ):
        tr.open(tmp_path)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e8m0fnu", "int4", "int2"])
def test_the_template_says_the_dtype_that_numpy_does_not_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Bytes never become numbers of another kind, with a template or without."""
    path, dtype = tmp_path / "x.npz", np.dtype(getattr(ml_dtypes, name))
    saved = np.array([1, -2, 0.5] if "float" in name else [1, -2, 0]).astype(dtype)
    np.savez(path, **{"w": saved, "head/b": saved[:1], "n": np.arange(3, dtype=np.int8)})
    like = {"w": np.zeros(3, dtype), "head": {"b": jnp.zeros(1, dtype)}, "n": np.zeros(3, np.int8)}
    for found in (
        tr.restore(path, like),
        {**tr.restore(path, like), "head": tr.restore(path, like["head"], at="head")},
        tr.restore(path, like, rules=[tr.rules.copy("w", "v"), tr.rules.drop("w"), tr.rules.rename("^v$", "w")]),
    ):
        assert found["w"].dtype == found["head"]["b"].dtype == dtype
        assert found["w"].tobytes() == saved.tobytes() and np.asarray(found["head"]["b"])[0] == saved[0]
        assert found["n"].tolist() == [0, 1, 2]
    for other in (np.zeros(3, np.int8), np.zeros(3, bool), jnp.zeros(3), np.zeros(3, ml_dtypes.bfloat16)):
        with pytest.raises(
            MismatchError, match=r"w: expected .*, found bytes of a dtype .* put the dtype that was saved"
        ):
            tr.restore(path, {**like, "w": other})
    for rule in (tr.rules.cast("w", name), tr.rules.reshape("w", (3, 1)), tr.rules.concat(["w", "w"], "w")):
        with pytest.raises(MismatchError, match="expected rules for arrays of a known dtype, found w") as caught:
            tr.restore(path, like, rules=[tr.rules.rename("^head/b$", "b"), rule])
    assert "restore it without these rules into a template" in str(caught.value)
    tr.save(tmp_path / "copy", tr.restore(path, like))
    turned = tr.restore(tmp_path / "copy", rules=[tr.rules.reshape("w", (3, 1))])["w"]
    np.testing.assert_array_equal(turned[:, 0].astype(float), saved.astype(float))
    caplog.clear()
    assert tr.restore(path)["w"].tobytes() == saved.tobytes()
    assert f"{path}: NumPy has stored head/b, w without the dtype" in caplog.text


def test_a_number_in_the_template_takes_no_bytes(tmp_path: Path) -> None:
    """A Python number does not become the code of a float8 number."""
    np.savez(tmp_path / "x.npz", w=np.array(1, ml_dtypes.float8_e4m3fn))
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", {"w": jnp.ones((), jnp.float8_e4m3fn)})
    for name in ("x.npz", "x.eqx"):
        with pytest.raises(MismatchError, match="expected float, found bytes of a dtype"):
            tr.restore(tmp_path / name, {"w": 0.0})
        assert tr.restore(tmp_path / name, {"w": jnp.zeros((), jnp.float8_e4m3fn)})["w"] == 1


@pytest.mark.parametrize(
    "name", ["out.npz", "model.pt", "model.pth", "m.weights.h5", "m.keras", "w.npy", "run.tar", "old.tar.gz", "m.PKL"]
)
def test_an_ending_of_other_files_is_no_name_for_a_folder(tmp_path: Path, name: str) -> None:
    """A native folder with such a name would be taken for a file of that kind. Naming the format allows it."""
    tr.save(tmp_path / "c", {"w": np.ones(2)})
    for call in (lambda path: tr.save(path, {"w": np.ones(2)}), lambda path: tr.convert(tmp_path / "c", path)):
        with pytest.raises(UnsupportedError, match=r"(which is only read|that none of them is); choose another ending"):
            call(tmp_path / name)
    assert os.listdir(tmp_path) == ["c"]
    tr.save(tmp_path / name, {"w": np.ones(2)}, format="treering")
    assert tr.restore(tmp_path / name)["w"].tolist() == [1, 1]


def test_a_misspelt_format_is_answered_with_the_closest(tmp_path: Path) -> None:
    tr.save(tmp_path / "c", {"w": np.ones(2)})
    said = r"format='Safetensor': expected 'safetensors', or another of 'treering', "
    with pytest.raises(MismatchError, match=said):
        tr.save(tmp_path / "d", {"w": np.ones(2)}, format="Safetensor")
    with pytest.raises(MismatchError, match=said):
        tr.open(tmp_path / "c", format="Safetensor")


def test_an_unknown_format_lists_those_to_write(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"format='pickle': expected one of 'treering', .*'orbax'") as caught:
        tr.save(tmp_path / "c", {"w": np.ones(2)}, format="pickle")
    assert not any(f"'{name}'" in str(caught.value) for name in ("npz", "torch", "keras", "tensorflow", "dcp", "zarr"))
    with pytest.raises(UnsupportedError, match="files of PyTorch are only read"):  # before "cannot store step"
        tr.save(tmp_path / "c", {"w": np.ones(2)}, step=1, format="torch")
    with pytest.raises(MismatchError, match="'torch'"):
        tr.open(tmp_path / "c", format="pickle")


@pytest.mark.parametrize(("name", "first"), [("m.safetensors", "safetensors"), ("m.pt", "torch"), ("m.npz", "npz")])
def test_reasons_begin_with_the_format_of_the_ending(tmp_path: Path, name: str, first: str) -> None:
    (tmp_path / name).write_bytes(b"neither of these" * 10)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_bytes(b"text")
    with pytest.raises(UnsupportedError) as caught:
        tr.open(tmp_path / name)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(f"{name}: of no format that is known here:") and lines[1].startswith(f"  {first}: "), lines
    assert not any(": it is a file" in line for line in lines)  # of formats that are folders
    with pytest.raises(tr.errors.TreeringError) as found:
        tr.open(tmp_path / "folder")
    lines = str(found.value).splitlines()
    assert lines[1].startswith("  treering: ") and not any(": not a file" in line for line in lines), lines
