"""Files and distributed checkpoints of PyTorch: Treering runs nothing that is in their pickles, and trusts no sizes."""

import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

import treering as tr
from torch_files import Call, Distributed, Name, View, archive, size, tensor
from treering.errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsafeError, UnsupportedError

REAL = Path(__file__).parent.parent / "real" / "torch"
ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.mark.parametrize("name", ["training.pt", "one", "two"])
def test_real_checkpoints(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = tr.open(REAL / name)
    expected = json.loads((REAL / "expected.json").read_text())[name]
    assert ckpt.format == ("torch" if name.endswith(".pt") else "dcp") and set(ckpt) == set(expected)
    assert (
        name == "two"
        or f"{name}: left out, because it cannot be read here: arguments (argparse.Namespace)" in caplog.text
    )
    for path, about in expected.items():
        leaf: Any = ckpt[path]
        if not isinstance(about, dict):
            assert (leaf.hex() if isinstance(leaf, bytes) else leaf) == about, path
            continue
        found = leaf[...]
        assert (found.dtype.name, list(found.shape), found.tobytes().hex()) == tuple(about.values()), path
        half = tuple(slice(size // 2, None) for size in found.shape)
        assert leaf[half].tobytes() == np.ascontiguousarray(found[half]).tobytes(), path
    assert tr.verify(REAL / name).ok


def test_the_tree_is_that_of_the_program(tmp_path: Path) -> None:
    """Without a template, dicts, lists and tuples come back as they were, with the types of their keys."""
    tree = tr.restore(REAL / "training.pt")
    assert tree["plain"] == [1.5, None, True, "text", b"bytes", (2**70, {}), (2, 3)]
    assert list(tree["optimizer"]["state"]) == [0, 1, 2, 3] and tree["optimizer"]["param_groups"][0]["betas"] == (
        0.9,
        0.999,
    )
    assert tr.restore(REAL / "one")["plain"] == tree["plain"]
    tr.convert(REAL / "two", tmp_path / "native")
    assert not tr.diff(REAL / "two", tmp_path / "native")


def test_chunks_go_to_the_devices_that_need_them(tmp_path: Path) -> None:
    """A restore onto a mesh reads only the chunks that have a part of its boxes."""
    saved = Distributed()
    saved.add(["w"], ROWS, [((n, n + 2), (0, 4)) for n in (0, 2, 4)], ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"])
    path = saved.save(tmp_path / "c")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    like = {"w": jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=spec)}
    assert np.asarray(tr.restore(path, like)["w"]).tolist() == ROWS.tolist()
    damaged = bytearray((path / "__1_0.distcp").read_bytes())
    damaged[damaged.index(ROWS[2:4].tobytes())] ^= 1
    (path / "__1_0.distcp").write_bytes(damaged)
    lazy: Any = tr.open(path)["w"]
    assert np.array_equal(lazy[:2], ROWS[:2]) and np.array_equal(lazy[4:], ROWS[4:])
    with pytest.raises(
        CorruptError, match=r"__1_0.distcp: the archive at 0: the storage '0': the bytes are not what was"
    ):
        lazy[1:3]
    assert not tr.verify(path).ok


@pytest.mark.parametrize("order", ["little", "big"])
def test_byte_orders_and_views(tmp_path: Path, order: str) -> None:
    """Tensors that share a storage, at any offset and with any strides, are read in the byte order of the file."""
    flat = ROWS.reshape(-1)
    half = np.arange(6).astype(jax.numpy.bfloat16)
    tree = {
        "all": View(flat, (6, 4), (4, 1)),
        "tied": View(flat, (6, 4), (4, 1)),
        "columns": View(flat, (4, 6), (1, 4)),
        "block": View(flat, (2, 2), (8, 2), 5),
        "repeated": View(flat, (3, 4), (0, 1), 8),
        "window": View(flat, (3, 2), (1, 1), 20),
        "one": View(flat, (), (), 23),
        "none": View(flat, (0, 3), (3, 1), 24),
        "odd stride": View(flat, (1, 4), (999, 1), 4),
        "half": View(half, (2, 3), (3, 1)),
        "complex": tensor(np.array([1 + 2j], np.complex64)),
        "small": tensor(np.arange(3).astype(jax.numpy.float8_e4m3fn)),
    }
    path = tmp_path / "x.pt"
    path.write_bytes(archive(tree, order=order))
    ckpt = tr.open(path)
    for name, view in tree.items():
        strides = [n * view.flat.itemsize for n in view.strides]
        expected = np.lib.stride_tricks.as_strided(view.flat[view.offset :], view.shape, strides)
        found: Any = ckpt[name]
        assert found.dtype == expected.dtype and found[...].tobytes() == np.ascontiguousarray(expected).tobytes(), name
        if expected.ndim == 2:
            assert np.array_equal(found[1:, 1:], expected[1:, 1:]) and np.array_equal(found[:, -1], expected[:, -1])


def test_large_views_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.formats.torch.archive._MAX_SPAN_BYTES", 16)
    flat = np.arange(240, dtype=np.int16)
    (tmp_path / "x.pt").write_bytes(archive({"w": View(flat, (4, 5, 6), (1, 48, 8))}))
    found: Any = tr.open(tmp_path / "x.pt")["w"]
    expected = np.lib.stride_tricks.as_strided(flat, (4, 5, 6), (2, 96, 16))
    assert np.array_equal(found[...], expected) and np.array_equal(found[1:3, 2:, 4], expected[1:3, 2:, 4])


# What is not read


def arrays() -> dict[str, Any]:
    """Returns what training programs put in files together with tensors: states of generators, and values of NumPy."""
    text = np.array([["ab", ""], ["c", "\u00e4"]])
    return {
        "legacy": np.random.RandomState(3).get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "arrays": [np.arange(6.0).reshape(2, 3), np.arange(6, dtype=">i2").reshape(2, 3).T, np.zeros((0, 2)), text],
        "turned": np.asfortranarray(ROWS),
        "dates": np.array(["2020-01-01", "NaT"], "M8[25s]"),
        "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2020", "ns"), np.str_("x")],
        "half": np.arange(3).astype(jax.numpy.bfloat16),
        "without axes": np.array(7, np.uint8),
        "bytes": {b"key": b"value", b"": b""},
    }


@pytest.mark.parametrize(
    ("protocol", "numpy"), [(2, "numpy._core"), (2, "numpy.core"), (4, "numpy._core"), (5, "numpy._core")]
)
def test_values_of_numpy(tmp_path: Path, protocol: int, numpy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Arrays and scalars of NumPy 1 and 2 are leaves, without a call of what their pickles name."""
    data, path, given = pickle.dumps(arrays(), protocol), tmp_path / "x.pt", arrays()
    if protocol == 2:  # whose names end with a line, and need no lengths
        data = data.replace(b"numpy._core", numpy.encode())
    path.write_bytes(with_pickle(data))
    tree = tr.restore(path)
    assert jax.tree.structure(tree) == jax.tree.structure(given) and "left out" not in caplog.text
    for (where, found), expected in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(given), strict=True):
        assert type(found) is type(expected), where
        if isinstance(expected, np.ndarray | np.generic):
            little = expected.dtype.newbyteorder("=")
            assert (found.dtype, found.shape) == (little, expected.shape), where
            assert found.tobytes() == expected.astype(little).tobytes(), where
    half: Any = tr.open(path)["turned"]
    assert np.array_equal(half[1:3, 2:], ROWS[1:3, 2:]) and tree["turned"].flags.writeable
    tr.convert(path, tmp_path / "native")
    assert not tr.diff(path, tmp_path / "native") and tr.verify(path).ok
    np.random.RandomState().set_state(tree["legacy"])


def test_other_arrays_of_numpy_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = np.zeros(2, [("a", "i4"), ("b", "f4")])
    others = {"object": np.array([1, "x"], object), "fields": fields, "long": np.zeros(2, np.longdouble), "w": ROWS}
    masked = np.ma.array([1.0], mask=[True])
    (tmp_path / "x.pt").write_bytes(with_pickle(pickle.dumps({**others, "masked": masked, "set": {1}}, 2)))
    assert list(tr.restore(tmp_path / "x.pt")) == ["w"]
    for name, what in (("object", "_reconstruct"), ("masked", "_mareconstruct"), ("set", "set")):
        assert re.search(rf"{name} \(\S+{what}\)", caplog.text), name
    damaged = pickle.dumps({"w": ROWS}, 4).replace(b"K\x06K\x04", b"K\x07K\x04")
    (tmp_path / "x.pt").write_bytes(with_pickle(damaged))
    with pytest.raises(CorruptError, match="w: expected 112 bytes of an array of NumPy, found 96"):
        tr.open(tmp_path / "x.pt")


KEYS = {
    "the key None,": {None: 1},
    r"the key torch\.float32,": {Name("torch", "float32"): 1},
    r"the key __main__\.Color,": {Call("__main__", "Color", 1): 1},
    "the keys 1 and '1', which read the same": {1: 1, "1": 2},
}


@pytest.mark.parametrize("text", KEYS)
def test_keys_that_no_path_can_have(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.pt").write_bytes(archive({"a": KEYS[text]}))
    with pytest.raises(UnsupportedError, match=rf"^{tmp_path}/x.pt: a: a dict with {text}.*; rename it where PyTorch"):
        tr.open(tmp_path / "x.pt")


def test_attributes_that_are_left_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Attributes are lost, except those that PyTorch itself sets: on every `state_dict`, and on every buffer."""
    one, call = tensor(ROWS), Name("torch._utils", "_rebuild_tensor_v2")
    ordered, none = Call("collections", "OrderedDict"), Call("collections", "OrderedDict")
    usual = [of_type(Name("torch.nn.parameter", "Buffer"), one), rebuilt("_rebuild_parameter", one, True, none)]
    usual[0].arguments = (*usual[0].arguments[:3], {"persistent": True, "_is_buffer": True})
    ordered.state = {"_metadata": {"": {"version": 1}}}
    (tmp_path / "x.pt").write_bytes(archive([*usual, ordered]))
    tr.open(tmp_path / "x.pt")
    assert not caplog.text
    ordered.state["note"] = 1
    own = (call, Name("torch", "Tensor"), (one.flat, 0, one.shape, one.strides, False, none), {"tag": 1})
    odd = [Call("torch._tensor", "_rebuild_from_type_v2", *own), ordered]
    odd.append(rebuilt("_rebuild_parameter_with_state", one, True, none, ({}, {"slot": 2})))
    (tmp_path / "x.pt").write_bytes(archive(odd))
    assert list(tr.open(tmp_path / "x.pt")) == ["0", "2"]
    assert "x.pt: attributes of ordered dicts are left out: note" in caplog.text
    assert "here: 0.tag (an attribute), 2.slot (an attribute)" in caplog.text


class _Touch:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_no_code_is_run_and_the_rest_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Objects of other programs are left out by name; a list without one is a dict of its numbers."""
    touch, data = Call("os", "system", f"touch {tmp_path}/was-run"), io.BytesIO()
    path = tmp_path / "x.pt"
    extra = [Call("argparse", "Namespace", state={"lr": 1}), tensor(ROWS), touch]
    path.write_bytes(archive({"w": tensor(ROWS), "extra": extra, "dtype": Name("torch", "float32"), "text": "\ud800"}))
    tree = tr.restore(path)
    assert list(tree) == ["w", "extra"] and list(tree["extra"]) == [1] and np.array_equal(tree["extra"][1], ROWS)
    assert (
        "left out, because it cannot be read here: dtype (torch.float32), text (a str that is not valid Unicode (a "
        "lone surrogate)), extra/0 (argparse.Namespace), extra/2 (os.system)"
    ) in caplog.text
    with zipfile.ZipFile(data, "w") as packed:
        packed.writestr("archive/data.pkl", pickle.dumps(_Touch(tmp_path / "was-run"), 2))
    path.write_bytes(data.getvalue())
    with pytest.raises(
        UnsupportedError, match=r"x.pt: expected tensors .* found an object of posix.system, which only"
    ):
        tr.open(path)
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(_Touch(tmp_path / "was-run")))
    with pytest.raises(
        CorruptError, match=r"expected the Metadata of torch.distributed.checkpoint, found posix.system"
    ):
        tr.open(folder)
    assert not (tmp_path / "was-run").exists()


def rebuilt(name: str, *arguments: Any) -> Call:
    return Call("torch._utils", name, *arguments)


def of_type(kind: Name, view: View) -> Call:
    arguments = (view.flat, 0, view.shape, view.strides, False, Call("collections", "OrderedDict"))
    call = Name("torch._utils", "_rebuild_tensor_v2")
    return Call("torch._tensor", "_rebuild_from_type_v2", call, kind, arguments, {})


def test_parameters_and_subclasses(tmp_path: Path) -> None:
    one, path = tensor(ROWS), tmp_path / "x.pt"
    parameter = rebuilt("_rebuild_parameter", one, True, Call("collections", "OrderedDict"))
    path.write_bytes(archive({"a": parameter, "b": of_type(Name("torch.nn.parameter", "Parameter"), one)}))
    assert all(np.array_equal(leaf, ROWS) for leaf in tr.restore(path).values())


TENSORS = {
    "flags conj": View(ROWS.reshape(-1), (2,), (1,), 0, {"conj": True}),
    "_rebuild_sparse_tensor": rebuilt("_rebuild_sparse_tensor", Name("torch", "sparse_coo"), ()),
    "_rebuild_qtensor": rebuilt("_rebuild_qtensor", 1, 2, 3),
    "class torch.distributed.tensor.DTensor": of_type(Name("torch.distributed.tensor", "DTensor"), tensor(ROWS)),
}


@pytest.mark.parametrize("text", TENSORS)
def test_other_tensors_are_refused_by_name(tmp_path: Path, text: str) -> None:
    """Leaving out weights would change the model, so a tensor that is no plain array is an error."""
    (tmp_path / "x.pt").write_bytes(archive({"model": {"w": TENSORS[text]}}))
    with pytest.raises(UnsupportedError, match=f"^{tmp_path}/x.pt: model/w: a tensor .*{text}.*; save"):
        tr.open(tmp_path / "x.pt")


def test_advice_for_what_cannot_be_read(tmp_path: Path) -> None:
    """PyTorch casts no floats of four bits, and `treering.orbax` has no handlers for its files."""
    numbers, hooks = np.zeros(2, np.uint16), Call("collections", "OrderedDict")
    pairs = rebuilt("_rebuild_tensor_v3", numbers, 0, (4,), (1,), False, hooks, Name("torch", "float4_e2m1fn_x2"))
    halves = rebuilt("_rebuild_tensor_v3", numbers, 0, (1,), (1,), False, hooks, Name("torch", "complex32"))
    for leaf, advice in [
        (pairs, r"such as tensor\.view\(torch\.uint8\)\n"),
        (halves, r"such as tensor\.to\(torch\.complex64\)\n"),
        (Call("a", "B"), r"library that wrote it\n"),
    ]:
        (tmp_path / "x.pt").write_bytes(archive({"w": leaf}))
        with pytest.raises(UnsupportedError, match=advice):
            tr.restore(tmp_path / "x.pt")


def test_it_is_only_read(tmp_path: Path) -> None:
    for name in ("torch", "dcp"):
        with pytest.raises(UnsupportedError, match="only read; choose another format"):
            tr.save(tmp_path / "x.pt", {"a": 1}, format=name)
    (tmp_path / "pytorch_model.bin").write_bytes(archive({"w": tensor(ROWS)}))
    with pytest.raises(NotFoundError, match=r"pytorch_model.bin in it is a file of PyTorch; open it by its own path"):
        tr.open(tmp_path)


# Damage and harm


def with_pickle(data: bytes) -> bytes:
    return archive(None, change=lambda files: files.update({"data.pkl": data}))


def laughs() -> bytes:
    """Returns the pickle of a list of ten lists, each of ten of the next, thirty levels deep, in 600 bytes."""
    level = b"]q\0N" + b"a"
    for n in range(30):
        level += b"0]q" + bytes([n + 1]) + b"(" + (b"h" + bytes([n])) * 10 + b"e"
    return b"\x80\x02" + level + b"."


def repeated(value: bytes) -> bytes:
    return b"\x80\x02](" + value + b"q\0" + b"h\0" * 20 + b"e."


PICKLES: dict[str, tuple[bytes, type[TreeringError], str]] = {
    "objects that share objects": (laughs(), UnsafeError, "objects contain each other"),
    "a list in itself": (b"\x80\x02]q\0h\0a.", UnsafeError, "objects contain each other"),
    "a text many times": (repeated(b"X\0\0\1\0" + b"x" * (1 << 16)), UnsafeError, "objects contain each other"),
    "bytes many times": (repeated(b"B\0\0\1\0" + b"x" * (1 << 16)), UnsafeError, "objects contain each other"),
    "bytes that are no Latin-1": (
        b"\x80\x02c_codecs\nencode\nX\3\0\0\0\xe2\x82\xacX\6\0\0\0latin1\x86R.",
        CorruptError,
        "it is damaged",
    ),
    "20,000 levels": (b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".", UnsafeError, "objects contain each other"),
    "a key of 100,000 levels": (b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.", UnsupportedError, "a key of type tuple"),
    "more objects than bytes allow": (
        b"\x80\x02" + b"(" + b"}" * 400_000 + b".",
        UnsafeError,
        "at most one object for",
    ),
    "text of 4 GB": (b"\x80\x02X\xff\xff\xff\xff.", CorruptError, "4294967295 bytes at 7"),
    "a number of 2 GB": (b"\x80\x02\x8b\xff\xff\xff\x7f.", CorruptError, "2147483647 bytes at 7"),
    "no end": (b"\x80\x02N", CorruptError, "it is damaged"),
    "two objects": (b"\x80\x02NN.", CorruptError, "one object, found another number"),
    "nothing on the stack": (b"\x80\x02.", CorruptError, "it is damaged"),
    "a mark that is missing": (b"\x80\x02Nt.", CorruptError, "it is damaged"),
    "a memo that is missing": (b"\x80\x02h\x09.", CorruptError, "it is damaged"),
    "a call of a number": (b"\x80\x02K\1)R.", CorruptError, "a call of something that is no name"),
    "an item of a number": (b"\x80\x02K\1K\2a.", CorruptError, "items of a int"),
    "protocol 0": (b"I1\n.", UnsupportedError, "the opcode b'I'"),
    "protocol 9": (b"\x80\x09N.", UnsupportedError, "at most protocol 5, found 9"),
    "an extension": (b"\x80\x02\x82\1.", UnsupportedError, r"the opcode b'\\x82'"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_no_program_writes(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering.formats._shared.pickles._FREE_OBJECTS", 1 << 17)  # so that the test is short
    monkeypatch.setattr("treering.formats.torch.tree._MAX_NODE_CHARACTERS", 1 << 20)
    data, kind, text = PICKLES[name]
    (tmp_path / "x.pt").write_bytes(with_pickle(data))
    with pytest.raises(kind, match=f"^{tmp_path}/x.pt: .*{text}"):
        tr.open(tmp_path / "x.pt")


def of_storage(view: View, **files: bytes | None) -> bytes:
    def change(found: dict[str, bytes]) -> None:
        for name, data in files.items():
            key = "data/0" if name == "storage" else name
            if data is None:
                del found[key]
            else:
                found[key] = data

    return archive({"w": view}, change=change)


FLAT = ROWS.reshape(-1)
FILES: dict[str, tuple[bytes, type[TreeringError], str]] = {
    "a storage that is cut short": (
        of_storage(View(FLAT, (24,), (1,)), storage=bytes(95)),
        CorruptError,
        "96 bytes of the",
    ),
    "no storage": (of_storage(View(FLAT, (24,), (1,)), storage=None), CorruptError, "expected the file 'data/0'"),
    "strides beyond the storage": (of_storage(View(FLAT, (3, 4), (8, 3))), CorruptError, "expected 104 bytes"),
    "an offset beyond the storage": (of_storage(View(FLAT, (4,), (1,), 21)), CorruptError, "expected 100 bytes"),
    "an offset below zero": (of_storage(View(FLAT, (4,), (1,), -4)), CorruptError, "expected an offset"),
    "a size below zero": (
        of_storage(View(FLAT, (-4,), (1,))),
        CorruptError,
        "expected the sizes of a tensor",
    ),
    "a size of 8,000 bits": (
        of_storage(View(FLAT, (1 << 8000,), (1,))),
        CorruptError,
        "expected the sizes of a tensor",
    ),
    "a shape of 2^60": (of_storage(View(FLAT, (1 << 60,), (0,))), UnsafeError, "no array can have the shape"),
    "another byte order": (of_storage(View(FLAT, (24,), (1,)), byteorder=b"middle"), CorruptError, "little or big"),
    "no pickle": (of_storage(View(FLAT, (24,), (1,)), **{"data.pkl": None}), UnsupportedError, "of no format"),
}


@pytest.mark.parametrize("name", FILES)
def test_archives_that_no_program_writes(tmp_path: Path, name: str) -> None:
    data, kind, text = FILES[name]
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(kind, match=text):
        tr.open(tmp_path / "x.pt")


def test_a_small_file_of_a_large_tensor(tmp_path: Path) -> None:
    """A tensor that repeats its bytes may be larger than the file; a part of it is read."""
    (tmp_path / "x.pt").write_bytes(archive({"w": View(FLAT, (1 << 40, 4), (0, 1))}))
    lazy: Any = tr.open(tmp_path / "x.pt")["w"]
    assert lazy[5:7].tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(MismatchError, match="max_expansion"):
        tr.restore(tmp_path / "x.pt")


def test_a_checksum_is_compared_unless_there_is_none(tmp_path: Path) -> None:
    data = archive({"w": tensor(ROWS)})
    at, path = data.index(ROWS.tobytes()), tmp_path / "x.pt"
    path.write_bytes(data[:at] + b"x" + data[at + 1 :])
    checked = tr.verify(path)
    assert not checked.ok and not checked.without_checksums and tr.restore(path, verify=False)["w"][0, 1] == 1
    with pytest.raises(CorruptError, match="the storage '0': the bytes are not what was saved"):
        tr.restore(path)
    with zipfile.ZipFile(path) as packed:
        places = [(info.header_offset, info.CRC) for info in packed.infolist()]
    changed = bytearray(path.read_bytes())
    for _, crc in places:  # torch.serialization.set_crc32_options(False) writes 0
        for found in re.finditer(re.escape(struct.pack("<I", crc)), bytes(changed)):
            changed[found.start() : found.end()] = bytes(4)
    path.write_bytes(changed)
    checked = tr.verify(path)
    assert checked.ok and checked.without_checksums and tr.restore(path)["w"][0, 1] == 1


# Distributed checkpoints


def sharded(boxes: Any, **options: Any) -> Distributed:
    saved = Distributed()
    saved.add(["w"], ROWS, boxes, **options)
    return saved


L_SHAPE = [((0, 2), (0, 4)), ((2, 6), (0, 1)), ((2, 6), (1, 4))]


@pytest.mark.parametrize(
    "boxes", [[((0, 6), (0, 4))], [((n, n + 1), (0, 4)) for n in range(6)], L_SHAPE, [*L_SHAPE, ((6, 6), (0, 4))]]
)
def test_chunks_of_any_layout(tmp_path: Path, boxes: Any) -> None:
    path = sharded(boxes).save(tmp_path / "c")
    assert np.array_equal(tr.restore(path)["w"], ROWS) and tr.verify(path).ok


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 5), (0, 4))],
        [((0, 4), (0, 4)), ((2, 6), (0, 4))],
        [((0, 2), (0, 4)), ((2, 6), (0, 1))],
        [((0, 2), (0, 4)), ((1, 5), (0, 3)), ((2, 6), (0, 1))],
    ],
)
def test_chunks_that_overlap_or_leave_holes(tmp_path: Path, boxes: Any) -> None:
    with pytest.raises(CorruptError, match=r"w: the chunks do not make up its shape \[6, 4\]"):
        tr.restore(sharded(boxes).save(tmp_path / "c"))


def test_a_missing_file_loses_its_tensors_only(tmp_path: Path) -> None:
    saved = sharded([((0, 3), (0, 4)), ((3, 6), (0, 4))], files=["__0_0.distcp", "__1_0.distcp"])
    saved.add(["b"], np.ones(2, np.float32))
    saved.add_value(["lr"], 0.5, "__1_0.distcp")
    path = saved.save(tmp_path / "c")
    (path / "__1_0.distcp").unlink()
    ckpt = tr.open(path)
    assert np.asarray(ckpt["b"]).tolist() == [1, 1]
    for name in ("w", "lr"):
        with pytest.raises(CorruptError, match=r"__1_0.distcp: expected the file that .metadata names, found nothing"):
            np.asarray(ckpt[name])
    (path / "__1_0.distcp").write_bytes(saved.files["__1_0.distcp"][:-1])
    with pytest.raises(CorruptError, match=r"__1_0.distcp: expected \d+ bytes, found \d+; it is cut short"):
        tr.restore(path)


def change_range(**change: Any) -> Callable[[Distributed], None]:
    return lambda saved: next(iter(saved.ranges.values())).state.update(change)


def overlapping(saved: Distributed) -> None:
    saved.add_value(["lr"], 0.5)
    saved.ranges[list(saved.ranges)[-1]].state["offset"] = 10


def without_ranges(saved: Distributed) -> None:
    saved.ranges.clear()


def other_tensor(saved: Distributed) -> None:
    saved.files["__0_0.distcp"][:] = archive(tensor(ROWS.T))


HARM: dict[str, tuple[Callable[[Distributed], None], type[TreeringError], str]] = {
    "chunks that share bytes": (overlapping, UnsafeError, "two chunks overlap in __0_0.distcp, at 10"),
    "a name that leads out": (change_range(relative_path="../x"), UnsafeError, "something in this folder"),
    "an absolute name": (change_range(relative_path="/etc/passwd"), UnsafeError, "something in this folder"),
    "an offset beyond the file": (change_range(offset=1 << 40), CorruptError, "it is cut short"),
    "an offset below zero": (change_range(offset=-1), CorruptError, "expected the place of 'w' in __0_0"),
    "an offset of 8,000 bits": (change_range(offset=1 << 8000), CorruptError, "expected the place of 'w' in __0_0"),
    "an extension": (change_range(transform_descriptors=["zstd"]), UnsupportedError, "extensions.*dcp_to_torch"),
    "no places": (without_ranges, CorruptError, "expected the place of 'w'"),
    "a tensor of another shape": (
        other_tensor,
        CorruptError,
        r"expected a tensor float32\[6, 4\], found float32\[4, 6\]",
    ),
}


@pytest.mark.parametrize("name", HARM)
def test_metadata_that_no_program_writes(tmp_path: Path, name: str) -> None:
    change, kind, text = HARM[name]
    saved = sharded(None)
    change(saved)
    with pytest.raises(kind, match=text):
        tr.restore(saved.save(tmp_path / "c"))


def test_a_file_of_a_checkpoint_is_not_one(tmp_path: Path) -> None:
    """A file of chunks ends as an archive of its last tensor, which is not what the path means."""
    path = sharded([((0, 3), (0, 4)), ((3, 6), (0, 4))]).save(tmp_path / "c")
    with pytest.raises(UnsupportedError, match=r"it is a file of PyTorch; open its folder; of no format"):
        tr.open(path / "__0_0.distcp")
    shutil.copy(path / "__0_0.distcp", tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="expected one archive of PyTorch, found other data before it"):
        tr.open(tmp_path / "x.pt")


def test_one_tensor_is_a_tree(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(archive(tensor(ROWS)))
    assert np.array_equal(tr.restore(tmp_path / "x.pt"), ROWS)
    (tmp_path / "x.pt").write_bytes(archive(7))
    assert tr.restore(tmp_path / "x.pt") == 7
    Distributed().save(tmp_path / "none")
    assert tr.restore(tmp_path / "none") == {}


def test_names_without_a_recorded_tree_are_keys(tmp_path: Path) -> None:
    saved = Distributed()
    saved.add(["model", "layers", 0, "w"], ROWS)
    assert tr.restore(saved.save(tmp_path / "tree"))["model"]["layers"][0]["w"].shape == (6, 4)
    assert list(tr.open(saved.save(tmp_path / "flat", planner_data=None))) == ["model.layers.0.w"]
    saved.places["other"] = ("model", "layers", 0, "w", "x")
    saved.leaves["other"], saved.ranges = saved.leaves["model.layers.0.w"], {}
    with pytest.raises(CorruptError):
        tr.open(saved.save(tmp_path / "both"))


def test_steps_of_a_run(tmp_path: Path) -> None:
    for step in (1, 2):
        sharded(None).save(tmp_path / f"step-{step}")
    assert tr.steps(tmp_path) == [1, 2] and tr.open(tmp_path).step == 2
    (tmp_path / "step-2" / ".metadata").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"step-2.*metadata"):
        tr.open(tmp_path, step=2)
    shutil.rmtree(tmp_path / "step-2")
    assert tr.open(tmp_path).step == 1


def test_metadata_of_older_releases(tmp_path: Path) -> None:
    """Releases before 2.2 had the properties of a tensor in another module, and no version."""
    saved = sharded(None)
    old = "torch.distributed._shard.sharded_tensor.metadata"
    saved.leaves["w"].state["properties"].what = Name(old, "TensorProperties")
    assert np.array_equal(tr.restore(saved.save(tmp_path / "c", version=None, planner_data=None))["w"], ROWS)


# Advice


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*torch.jit:DeprecationWarning")
def test_advice_of_messages_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users get a file that opens if they run the lines in the messages with PyTorch."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    monkeypatch.chdir(tmp_path)
    tied = torch.ones(3)
    state = {"model": {"w": torch.ones(2), "embed": tied, "head": tied}, "epoch": 3}

    def advised(path: str) -> None:
        with pytest.raises(UnsupportedError) as caught:
            tr.open(path)
        line = re.search(r"torch\.save\(.*?'model\.pt'\)", str(caught.value))
        assert line, caught.value
        exec(line[0], {"torch": torch, "path": path})

    torch.save(state, "old.pt", _use_new_zipfile_serialization=False)
    advised("old.pt")
    assert tr.restore("model.pt")["epoch"] == 3 and tr.restore("model.pt")["model"]["head"].tolist() == [1, 1, 1]
    torch.save(torch.nn.Linear(2, 1), "object.pt")
    advised("object.pt")
    assert list(tr.open("model.pt")) == ["weight", "bias"]
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 1)), "script.pt")
    advised("script.pt")
    assert tr.restore("model.pt")["weight"].shape == (1, 3)
    dcp.save(state, checkpoint_id="dcp", no_dist=True)
    command = ["-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", "dcp", "converted.pt"]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    assert not tr.diff("dcp", "converted.pt")


def test_two_saves_are_never_mixed(tmp_path: Path) -> None:
    """After a checkpoint was opened, files of another save at its path raise; nothing is read from both."""
    first, second = Distributed(), Distributed()
    for saved, value in ((first, 1.0), (second, 2.0)):
        saved.add(["a"], np.full(4, value), files=["__0_0.distcp"])
        saved.add(["b"], np.full(4, value), [((0, 4),)], ["__1_0.distcp"])
        saved.add_value(["epoch"], int(value), "__0_0.distcp")
    for removed in (True, False):
        opened = tr.open(first.save(tmp_path / f"c{removed}"))
        assert opened["a"][0] == 1
        if removed:
            shutil.rmtree(tmp_path / f"c{removed}")
        time.sleep(0.02)  # Two writes within a few milliseconds may have one time.
        second.save(tmp_path / f"c{removed}")
        with pytest.raises(NotFoundError, match=r"another (program wrote|save has)"):
            opened.restore()
        found = tr.restore(tmp_path / f"c{removed}")
        assert found["a"][0] == found["b"][0] == found["epoch"] == 2


def test_a_nested_class_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Protocol 2 gets a nested class by `getattr`, and calls what that returns. This is no damage."""
    body = b"(X\x04\0\0\0modec__builtin__\ngetattr\nc__main__\nCfg\nX\x04\0\0\0Mode\x86RK\x01\x85RX\x01\0\0\0aK\x05"
    path = tmp_path / "x.pt"
    path.write_bytes(archive({}, change=lambda files: files.update({"data.pkl": b"\x80\x02}" + body + b"u."})))
    assert tr.restore(path) == {"a": 5} and tr.verify(path).ok
    assert "mode (__main__.Cfg.Mode)" in caplog.text


def test_distributed_files_in_safetensors_are_unsupported(tmp_path: Path) -> None:
    saved = Distributed()
    saved.add(["a"], np.ones(4))
    saved.files["__0_0.distcp"] = bytearray(safetensors.numpy.save({"a": np.ones(4)}).ljust(4096))
    with pytest.raises(UnsupportedError, match=r"expected the archives of torch\.save, found safetensors"):
        tr.open(saved.save(tmp_path / "c"))


def test_claims_of_a_sparse_archive(tmp_path: Path) -> None:
    """A file of a few bytes with a hole of gigabytes takes no memory."""
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("archive/data.pkl", b"")
        (member,) = packed.infolist()
        hole = 3 << 30
        packed.fp.seek(hole, os.SEEK_CUR)
        member.file_size = member.compress_size = hole
        packed.start_dir = packed.fp.tell()
    with pytest.raises(UnsafeError, match=r"x.pt: 'data.pkl' has \d+ bytes, too many to be read at once"):
        tr.open(path)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_of_thousands_of_digits_as_a_key(tmp_path: Path, sign: int) -> None:
    (tmp_path / "x.pt").write_bytes(archive({sign * 10**5000: 1}))
    with pytest.raises(UnsupportedError, match="a whole number of 16610 bits as a key"):
        tr.open(tmp_path / "x.pt")


def test_offsets_beyond_64_bits(tmp_path: Path) -> None:
    saved = Distributed()
    saved.add(["a"], np.ones(4), [((0, 2),), ((2, 4),)], ["__0_0.distcp"] * 2)
    (about,) = saved.leaves.values()
    about.state["chunks"][1].state["offsets"] = size([(1 << 63) - 1])
    (*_, key) = saved.ranges
    key.state["offset"] = size([(1 << 63) - 1])
    with pytest.raises(CorruptError, match="the chunks do not make up its shape"):
        tr.restore(saved.save(tmp_path / "c"))
