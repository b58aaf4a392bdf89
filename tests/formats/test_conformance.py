"""Runs the conformance tests of formats on every shipped format, and on one that another package might have."""

import inspect
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import tensorstore

import torch_files
import treering as tr
from tensorflow_bundles import CODES, Bundle
from treering._core.source import Source
from treering._pytree import walk
from treering.errors import CorruptError, ExistsError, MismatchError, UnsupportedError
from treering.formats import ArrayEntry, Box
from treering.formats._shared.extents import check_shape
from treering.formats._shared.reader import ForeignReader
from treering.formats.tensorflow.table import crc32c, masked
from treering.formats.zarr import FORMAT as ZARR_FORMAT
from treering.stores.file_io import read_file
from treering.stores.sequential import file_of_new_folder
from treering.stores.store import Store
from treering.testing import DTYPES, NAMES, VALUES, FormatConformance, sample

SAFETENSORS = DTYPES[: DTYPES.index("uint64") + 1]
NUMPY = (*(d for d in SAFETENSORS if "float8" not in d and d != "bfloat16"), "complex128")
NEW = ("float8_e8m0fnu", "float4_e2m1fn")  # not all releases of TensorStore have these
FLOAT8 = tuple(d for d in DTYPES if d.startswith("float8") and d != "float8_e4m3" and d not in NEW)
ZARR = (*NUMPY, *FLOAT8, *(d for d in NEW if hasattr(tensorstore, d)), "bfloat16", "int2", "int4")


@pytest.mark.compat
class TestTreering(FormatConformance):
    format = "treering"
    step_name = "step-{}"
    checksums = True


@pytest.mark.compat
class TestSafetensors(FormatConformance):
    format = "safetensors"
    suffix = ".safetensors"
    dtypes = SAFETENSORS
    values = ()
    left_out = ("none", "function")
    keys = False
    empty = False


class TestSafetensorsFolder(TestSafetensors):
    suffix = ""
    options: ClassVar[Mapping[str, Any]] = {"max_shard_size": "40B"}

    def test_foreign_things_are_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        for place in (tmp_path / "folder" / "notes.txt", tmp_path / "file"):
            place.write_text("mine")
        self.make(tmp_path / "folder", self.small())  # This format may add its files to a folder with other files.
        self.assert_holds(tmp_path / "folder", self.small())
        for overwrite in (False, True):
            with pytest.raises(ExistsError):
                self.make(tmp_path / "file", self.small(), overwrite=overwrite)
        assert (tmp_path / "folder" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"

    def test_suffixes_choose_the_format(self, tmp_path: Path) -> None:
        tr.save(tmp_path / "x.safetensors", self.small(), **self.options)  # a folder with the suffix of a file
        self.assert_holds(tmp_path / "x.safetensors", self.small())


@pytest.mark.compat
class TestFlax(FormatConformance):
    format = "flax"
    suffix = ".msgpack"
    step_name = "checkpoint_{}"
    dtypes = tuple(d for d in DTYPES if d[0] not in "<|")
    values = tuple(v for v in VALUES if v != "bigint")
    keys = False
    fields = ()


class TestFJFormer(FormatConformance):
    format = "fjformer"
    step_name = "streaming_params_{}"
    dtypes = TestFlax.dtypes
    values = TestFlax.values
    keys = False
    empty = False
    fields = ()
    streams = True


class TestEquinox(FormatConformance):
    format = "equinox"
    suffix = ".eqx"
    dtypes = (*NUMPY, "bfloat16", "datetime64[ns]", "timedelta64[s]", "<U3", "|S5")
    values = tuple(v for v in VALUES if v not in ("bigint", "str", "empty str", "bytes"))
    left_out = ("none", "function", "str", "bytes")
    keys = False
    empty = False
    fields = ("metadata",)
    positional = True
    streams = True


@pytest.mark.compat
class TestT5X(FormatConformance):
    format = "t5x"
    step_name = "checkpoint_{}"
    dtypes = TestFlax.dtypes
    values = TestFlax.values
    keys = False
    fields = ()
    numbers_are_arrays = True
    most_memory = 256 << 20  # two chunks of 64 MiB, before and after compression

    def small(self) -> dict[str, Any]:
        return {**super().small(), "large": sample("float32", (130, 130))}


@pytest.mark.compat
class TestOrbax(FormatConformance):
    format = "orbax"
    step_name = "{}"
    dtypes = ZARR
    values = tuple(v for v in VALUES if v not in ("bigint", "complex", "bytes"))
    fields = ("metrics", "metadata")


class TestLevanter(FormatConformance):
    format = "levanter"
    step_name = "step-{}"
    dtypes = ZARR
    values = tuple(v for v in VALUES if v not in ("bigint", "str", "empty str", "bytes"))
    left_out = ("none", "function")
    keys = False
    names = tuple(name for name in NAMES if name and not set(name) & set("./\\\0") and len(name) < 256)
    empty = False
    fields = ("step",)
    numbers_are_arrays = True


class TestZarr(FormatConformance):
    """Groups of arrays without a fill value, of which no chunk may be missing. Detection does not know the format."""

    format = ZARR_FORMAT
    writes = False
    dtypes = ZARR
    values = ()
    keys = False
    names = TestLevanter.names
    empty = False
    fields = ()
    numbers_are_arrays = True
    most_memory = 256 << 20  # 64 MiB of TensorStore's cache, as much that is being read, and as much that is written

    def make(self, path: Path, tree: Any, **options: Any) -> None:
        flat_tree = walk.flatten_tree(tree)
        path.mkdir(parents=True)
        (path / ".zgroup").write_text('{"zarr_format": 2}')
        for name, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True):
            array = np.asarray(leaf)
            place = path / name.replace("~1", "/").replace("~0", "~")
            where = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{place}/"}}
            where["metadata"] = {"compressor": None}
            stored = tensorstore.open(where, create=True, dtype=array.dtype, shape=array.shape)
            stored.result().write(array).result()


class TestTensorFlow(FormatConformance):
    format = "tensorflow"
    suffix = ".index"
    step_name = "model.ckpt-{}.index"
    writes = False
    dtypes = tuple(CODES)
    values = ()
    keys = False
    names = ()
    empty = False
    fields = ()
    checksums = True

    def make(self, path: Path, tree: Any, **options: Any) -> None:
        bundle = Bundle()
        flat_tree = walk.flatten_tree(tree)
        for name, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True):
            array = np.asarray(leaf)
            array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
            data = array.reshape(-1).view(np.uint8).data
            bundle.add_bytes(name, CODES[array.dtype.name], np.shape(leaf), data, masked(crc32c(data)))
        path.parent.mkdir(exist_ok=True)
        bundle.save(path.with_suffix(""))

    def files(self, path: Path) -> list[Path]:
        return sorted(path.parent.glob(f"{path.stem}.*"))


class TestNpz(FormatConformance):
    format = "npz"
    suffix = ".npz"
    writes = False
    dtypes = (*NUMPY, "bfloat16", "float8_e5m2", "datetime64[ns]", "timedelta64[s]", "<U3", "|S5")
    values = ()
    keys = False
    names = tuple(name for name in NAMES if name and "\0" not in name)
    empty = False
    fields = ()
    compression = zipfile.ZIP_STORED

    def make(self, path: Path, tree: Any, **options: Any) -> None:
        """Writes what `numpy.savez` would write. That function accepts no key with the name "file"."""
        flat_tree = walk.flatten_tree(tree)
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w", self.compression) as archive:
            for name, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asarray(leaf), allow_pickle=False)


class TestNpzCompressed(TestNpz):
    compression = zipfile.ZIP_DEFLATED
    test_any_size_is_copied_in_bounded_memory: Any = None  # Ones expand beyond the bound; see test_npz.py.
    test_opening_reads_no_arrays: Any = None  # It wipes the plain bytes of arrays, which a compressed file lacks.


class TestKeras(FormatConformance):
    format = "keras"
    suffix = ".weights.h5"
    writes = False
    dtypes = (*(d for d in NUMPY if "complex" not in d), "bfloat16", "|S5")
    values = ()
    keys = False
    names = tuple(name for name in NAMES if name.strip(".") and "\0" not in name)
    empty = False
    fields = ()
    packing: ClassVar[Mapping[str, Any]] = {}

    def make(self, path: Path, tree: Any, **options: Any) -> None:
        h5py = pytest.importorskip("h5py", reason="h5py comes with Keras, for `make test` and not for `make lowest`")
        flat_tree = walk.flatten_tree(tree)
        path.parent.mkdir(exist_ok=True)
        with h5py.File(path, "w") as file:
            for name, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True):
                file.create_dataset(name, data=np.asarray(leaf), **(self.packing if np.size(leaf) > 1 else {}))


class TestKerasChunks(TestKeras):
    packing: ClassVar[Mapping[str, Any]] = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    test_any_size_is_copied_in_bounded_memory: Any = None  # As in TestNpzCompressed.
    test_opening_reads_no_arrays: Any = None


class TestTorch(FormatConformance):
    format = "torch"
    suffix = ".pt"
    writes = False
    dtypes = torch_files.DTYPES
    keys = False
    left_out = ("function",)
    fields = ()
    checksums = True

    def make(self, path: Path, tree: Any, **options: Any) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(torch_files.archive(_with_tensors(tree)))


def _with_tensors(tree: Any) -> Any:
    """Returns a tree with tensors in place of arrays, dicts in place of named tuples, and without functions."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, dict):
        return {key: _with_tensors(child) for key, child in tree.items() if not callable(child)}
    if isinstance(tree, list | tuple):
        return (list if isinstance(tree, list) else tuple)(map(_with_tensors, tree))
    return torch_files.tensor(tree) if hasattr(tree, "dtype") else tree


class TestDcp(TestTorch):
    format = "dcp"
    suffix = ""
    step_name = "step-{}"

    def make(self, path: Path, tree: Any, **options: Any) -> None:
        """Writes what `torch.distributed.checkpoint.save` would write."""
        saved = torch_files.Distributed()
        self._add(saved, (), tree)
        saved.save(path)

    def _add(self, saved: torch_files.Distributed, place: tuple[Any, ...], tree: Any) -> None:
        if isinstance(tree, dict | list) and tree:
            for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
                self._add(saved, (*place, key), child)
        elif hasattr(tree, "dtype"):
            saved.add(place, tree)
        elif not callable(tree):
            saved.add_value(place, _with_tensors(tree))


INDEX = "index.json"


class _Index(msgspec.Struct):
    arrays: list[tuple[str, str, tuple[int, ...]]]
    step: int | None
    metrics: dict[str, float]
    metadata: Any


class _Npy:
    """An array in an .npy file."""

    def __init__(self, path: str, dtype: str, shape: tuple[int, ...]):
        check_shape(shape, path)
        self._path, self._dtype, self._shape = path, dtype, shape

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        try:
            array = np.load(self._path, mmap_mode="r" if all(self._shape) else None, allow_pickle=False)
        except Exception as error:
            raise CorruptError(f"{self._path}: {error}") from None
        if array.dtype != self._dtype or array.shape != self._shape:
            raise CorruptError(f"{self._path}: expected {self._dtype}{self._shape}, found {array.dtype}{array.shape}")
        return np.array(array[tuple(slice(*ends) for ends in box)])


class NpyFolder:
    """A folder of .npy files with an index in JSON. It shows all that a new format needs."""

    name = "npy-folder"
    suffixes = (".npys",)
    boxes = ()

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            return None if store.stat(os.path.join(path, INDEX)) else f"there is no {INDEX}"
        except OSError as error:
            return str(error)

    def open(self, store: Store, path: str) -> Source:
        try:
            index = msgspec.convert(json.loads(read_file(store, os.path.join(path, INDEX))), _Index)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise CorruptError(f"{path}: {error}") from None
        about = {"step": index.step, "metrics": index.metrics, "metadata": index.metadata}
        entries = [ArrayEntry(name, "numpy", dtype, shape) for name, dtype, shape in index.arrays]
        arrays = {e.path: _Npy(os.path.join(path, f"{n}.npy"), e.dtype, e.shape) for n, e in enumerate(entries)}
        nbytes = sum(os.stat(os.path.join(path, name)).st_size for name in store.list(path))
        return ForeignReader(self.name, path, entries, arrays, **about, nbytes=nbytes)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        found = [(re.fullmatch(r"npy-(\d+)", name), name) for name in names]
        return {int(m[1]): n for m, n in found if m and self.refuses(store, os.path.join(folder, n)) is None}

    def keeps(self, path: str, contents: Source) -> tuple[str, ...]:
        return ("step", "metrics", "metadata")

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        if options:
            raise MismatchError(f"unknown options: {', '.join(options)}")
        entries = list(contents.entries.values())
        bad = [e.path for e in entries if not isinstance(e, ArrayEntry) or e.type == "key" or e.dtype not in NUMPY]
        if bad:
            raise UnsupportedError("\n".join(["these are no arrays of NumPy:", *(f"  {path}" for path in bad)]))
        with store.new_folder(path, overwrite=overwrite, owned=lambda store, path: store.list(path)) as folder:
            return self.fill(store, folder, contents)

    def fill(self, store: Store, folder: str, contents: Source) -> int:
        entries: list[Any] = list(contents.entries.values())
        listed = [(self.key(entry.path), entry.dtype, entry.shape) for entry in entries]
        index = _Index(listed, contents.step, dict(contents.metrics), contents.metadata)
        for n, entry in enumerate(entries):
            self._put(store, f"{folder}/{n}.npy", self._npy(contents, entry))
        self._put(store, f"{folder}/{INDEX}", [json.dumps(msgspec.to_builtins(index)).encode()])
        return sum(os.stat(f"{folder}/{name}").st_size for name in store.list(folder))

    def key(self, path: str) -> str:
        return path

    def _npy(self, contents: Source, entry: Any) -> Any:
        head = io.BytesIO()
        about = {"descr": np.dtype(entry.dtype).str, "fortran_order": False, "shape": entry.shape}
        np.lib.format.write_array_header_1_0(head, about)
        yield head.getvalue()
        row = max(1, (16 << 20) // max(1, 16 * int(np.prod(entry.shape[1:]))))
        for start in range(0, entry.shape[0], row) if entry.shape else [None]:
            first = () if start is None else ((start, min(start + row, entry.shape[0])),)
            yield contents.read([(entry, (*first, *((0, size) for size in entry.shape[1:])))])[0].tobytes()

    def _put(self, store: Store, path: str, parts: Any) -> None:
        with file_of_new_folder(store, path) as file:
            for part in parts:
                file.write(part)


class TestNpyFolder(FormatConformance):
    format = NpyFolder()
    suffix = ".npys"
    step_name = "npy-{}"
    dtypes = NUMPY
    values = ()
    keys = False
    empty = False


# Formats with one flaw each. Every conformance test must find the flaw that it is about.


def reading(read: Callable[[Any, np.ndarray, tuple[slice, ...]], Any]) -> dict[str, Any]:
    """Returns a flaw: arrays are read with `read`, which gets the full array and the wanted slices."""

    class Other(_Npy):
        def read(self, box: Box, mmap: bool) -> np.ndarray:
            full = super().read(tuple((0, size) for size in self._shape), mmap)
            return np.asarray(read(self, full, tuple(slice(*ends) for ends in box)))

    return opening(lambda reader, store: [setattr(array, "__class__", Other) for array in reader._arrays.values()])


def opening(change: Callable[[Any, Store], Any]) -> dict[str, Any]:
    """Returns a flaw: `change` changes a reader right after it is opened."""

    def open(self: NpyFolder, store: Store, path: str) -> Source:
        reader = NpyFolder.open(self, store, path)
        change(reader, store)
        return reader

    return {"open": open}


def writing(before: Callable[[str, Source], Any], change: int = 0) -> dict[str, Any]:
    """Returns a flaw: `write` calls `before` first, ignores its options, and adds `change` to the size it returns."""

    def write(self: NpyFolder, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        before(path, contents)
        return NpyFolder.write(self, store, path, contents, overwrite=overwrite) + change

    return {"write": write}


def claiming(look: Callable[[Store, str], Any]) -> dict[str, Any]:
    """Returns a flaw: the format claims every path for which `look` is true."""
    return {"refuses": lambda self, store, path: None if look(store, path) else "there is none"}


def write_in_place(self: Any, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
    os.makedirs(path, exist_ok=True)
    for name in store.list(path):
        store.delete(os.path.join(path, name))
    return self.fill(store, path, contents)


def refuse_first(path: str, contents: Source) -> None:
    for entry in contents.entries.values():
        if not isinstance(entry, ArrayEntry) or entry.type == "key" or entry.dtype not in NUMPY:
            raise UnsupportedError(entry.path)


def open_carelessly(self: NpyFolder, store: Store, path: str) -> Source:
    json.loads(read_file(store, os.path.join(path, INDEX)))
    return NpyFolder.open(self, store, path)


def kept(array: Any, full: np.ndarray) -> np.ndarray:
    """Returns the same array for every read, so that a change of one result changes the others."""
    return vars(array).setdefault("kept", full)


class Padded(_Npy):
    """An array that reads the missing end of a file as zeros."""

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        data = Path(self._path).read_bytes()[128:] if os.path.exists(self._path) else b""
        array = np.zeros(self._shape, self._dtype)
        array.reshape(-1).view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        return array[tuple(slice(*ends) for ends in box)]


FROM_THE_START = reading(lambda self, full, part: full[tuple(slice(s.stop - s.start) for s in part)])
FLAWS: dict[str, tuple[dict[str, Any], str]] = {
    "a_reader_says_what_there_is": (opening(lambda reader, store: setattr(reader, "nbytes", 0)), "nbytes"),
    "arrays_come_back_bit_for_bit": (
        reading(lambda self, full, part: np.where(full, full, np.abs(full))[part]),
        "float16.*found",
    ),
    "large_arrays_and_odd_layouts": (
        reading(lambda self, full, part: (full[:999].tolist(), full[:1000])[1][part]),
        "was read",
    ),
    "values_come_back": ({"values": ("int",)}, "no arrays of NumPy"),
    "typed_keys_come_back": ({"keys": True}, "keys/1"),
    "names_come_back": ({"key": lambda self, path: path.replace("\n", " ")}, "n/a b/a b"),
    "containers_come_back": ({"empty": True}, "'dict': 0"),
    "step_metrics_and_metadata_come_back": (opening(lambda reader, store: reader.metrics.clear()), "loss"),
    "templates_say_what_comes_back": (reading(lambda self, full, part: np.zeros_like(full)[part]), "found"),
    "arrays_go_to_many_devices_and_come_from_there": (FROM_THE_START, "is_equivalent_to"),
    "slices_are_those_of_numpy": (FROM_THE_START, "assert b'"),
    "arrays_are_writable_and_share_nothing": (reading(lambda self, full, part: kept(self, full)[part]), r"any\("),
    "everything_else_works_on_it": (
        opening(lambda reader, store: setattr(reader, "problems", lambda: iter([None]))),
        "_replace",
    ),
    "every_format_claims_its_own_checkpoints_only": (claiming(lambda store, path: store.stat(path)), "claims one of"),
    "suffixes_choose_the_format": ({"suffixes": (".safetensors",)}, "safetensors"),
    "junk_is_refused": (claiming(lambda store, path: store.list(path)), "'/'"),
    "what_may_not_be_read_is_refused": (claiming(lambda store, path: INDEX in store.list(path)), "permission denied"),
    "a_look_is_cheap": (
        claiming(lambda store, path: store.stat(path) and read_file(store, os.path.join(path, INDEX))),
        "33554432 bytes",
    ),
    "opening_reads_no_arrays": (
        opening(lambda reader, store: [read_file(store, a._path) for a in reader._arrays.values()]),
        "bytes were read",
    ),
    "steps_of_a_run_are_found": (
        {"steps": lambda self, store, folder, names: {int(n[4:]): n for n in names if n[4:].isdecimal()}},
        r"\[0, 3, 20, 30, 31\]",
    ),
    "what_it_cannot_hold_is_refused_by_name": (writing(refuse_first), "d04"),
    "trees_without_containers_or_leaves": (
        writing(lambda path, contents: next(iter(contents.entries))),
        "StopIteration",
    ),
    "colliding_names_are_kept_or_refused": ({"key": lambda self, path: path.replace("~1", "/")}, "two leaves"),
    "there_and_back": (writing(lambda path, contents: None, 1), "SaveReport"),
    "parts_and_casts_are_written": (reading(lambda self, full, part: full[::-1][part]), "a: expected"),
    "any_size_is_copied_in_bounded_memory": (reading(lambda self, full, part: full[part]), "MiB of memory"),
    "unknown_options_are_refused": (writing(lambda path, contents: None), "DID NOT RAISE"),
    "formats_that_are_only_read_say_so": ({"writes": False}, "DID NOT RAISE"),
    "overwriting_is_asked_for": ({"write": write_in_place}, "DID NOT RAISE"),
    "foreign_things_are_never_replaced": (claiming(lambda store, path: store.stat(path)), "DID NOT RAISE"),
    "errors_of_the_disk_leave_nothing": ({"write": write_in_place}, "operation 1 of"),
    "nothing_is_seen_before_it_is_durable": ({"write": write_in_place}, "bit by bit"),
    "file_systems_without_links": (writing(lambda path, contents: os.link(path, f"{path}.lock")), "no links here"),
    "errors_of_the_source_leave_nothing": ({"write": write_in_place}, "read 1, overwrite"),
    "of_two_writers_one_wins": ({"write": write_in_place}, "File exists"),
    "files_cut_off_anywhere": (
        opening(lambda reader, store: [setattr(array, "__class__", Padded) for array in reader._arrays.values()]),
        "cut off at 0: other values",
    ),
    "bytes_changed_anywhere": ({"open": open_carelessly}, "UnicodeDecodeError"),
}


@pytest.mark.long
@pytest.mark.parametrize("test", FLAWS)
def test_every_test_finds_a_flaw(
    test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flaw, complaint = FLAWS[test]
    declared = {name: value for name, value in flaw.items() if hasattr(FormatConformance, name)}
    made = {name: value for name, value in flaw.items() if name not in declared}
    suite = type("Suite", (TestNpyFolder,), {"format": type("Flawed", (NpyFolder,), made)(), **declared})()
    suite.prepare(monkeypatch)
    run = getattr(suite, f"test_{test}")
    given = {"tmp_path": tmp_path, "monkeypatch": monkeypatch, "caplog": caplog}
    with pytest.raises((Exception, pytest.fail.Exception), match=f"(?s){complaint}"):
        run(**{name: given[name] for name in inspect.signature(run).parameters})


def test_there_is_a_flaw_for_every_test() -> None:
    assert {name for name in dir(FormatConformance) if name.startswith("test_")} == {f"test_{name}" for name in FLAWS}
