"""Tests restores from every sharding to every other on the devices of one process, and the bytes that they read."""

import itertools
import math
import pathlib
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding

import treering as tr
from treering import stores
from treering.errors import MismatchError
from treering.formats.treering.read import Reader
from treering.stores.posix import Disk

pytestmark = pytest.mark.compat

P = jax.P
MIB = 1 << 20
# JAX (0.10) allows no array whose cells have different sizes: `device_put`, `jit` with `out_shardings` and
# `make_array_from_single_device_arrays` raise, and a constraint within a `jit` comes back replicated. So cells of a
# checkpoint and of a target that cross one another come from meshes of 8, 6, 4, 3 and 2 devices over 24 rows.
SHAPE = (24, 24, 4)
FIRST = tuple(range(8))


class Place(NamedTuple):
    """A sharding given by the sizes of its mesh and its spec. Without sizes it is the first device."""

    sizes: tuple[int, ...]
    spec: Any = P()
    devices: tuple[int, ...] = FIRST

    def mesh(self) -> Mesh:
        chosen = np.array([jax.devices()[n] for n in self.devices[: math.prod(self.sizes)]])
        return Mesh(chosen.reshape(self.sizes), tuple("xyz"[: len(self.sizes)]))

    def sharding(self, memory_kind: str | None = None) -> Any:
        if not self.sizes:
            return SingleDeviceSharding(jax.devices()[self.devices[0]], memory_kind=memory_kind)
        return NamedSharding(self.mesh(), self.spec, memory_kind=memory_kind)

    def __str__(self) -> str:
        devices = "" if self.devices == FIRST else f" on {''.join(map(str, self.devices))}"
        return f"{'x'.join(map(str, self.sizes)) or 'one device'} {self.spec}{devices}".replace("PartitionSpec", "P")


ONE = [P(), P("x"), P(None, "x")]
TWO = [P(), P("x"), P(None, "y"), P("x", "y"), P("y", "x"), P(("y", "x")), P(None, ("x", "y"))]
THREE = [P(), P("y"), P("x", "y", "z"), P(("z", "x"), "y"), P(("x", "y", "z")), P(None, ("z", "y")), P("y", None, "x")]
SPECS = {(1,): ONE, (2,): ONE, (4,): ONE, (8,): ONE, (2, 2): TWO, (4, 2): TWO, (2, 4): TWO, (2, 2, 2): THREE}
PLACES = [
    *(Place(sizes, spec) for sizes, specs in SPECS.items() for spec in specs),
    *(Place((), P(), (n,)) for n in (0, 5)),
    *(Place((6,), spec) for spec in ONE[1:]),
    *(Place((3, 2), spec) for spec in (P("x", "y"), P(("x", "y")), P("x"))),
    Place((3,), P("x"), (7, 2, 5)),
    Place((8,), P("x"), (7, 3, 5, 1, 0, 2, 4, 6)),
    Place((4,), P(None, "x"), (4, 5, 6, 7)),
    Place((2, 2), P("y", "x"), (1, 3, 5, 7)),
]
DTYPES = ["float32", "bfloat16", "int4", "bool", "float8_e4m3fn"]


def random_values(seed: int, name: str) -> np.ndarray:
    """Returns an array with every bit pattern of its dtype."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    bits = np.random.default_rng(seed).integers(0, 256, (*SHAPE, dtype.itemsize), np.uint8)
    if name == "int4":
        return (bits[..., 0] % 16).astype(np.int8).astype(dtype)
    return bits[..., 0] > 100 if name == "bool" else bits.view(dtype).reshape(SHAPE)


VALUES = {name: random_values(seed, name) for seed, name in enumerate(DTYPES)}


def spread(value: Any, place: Place, memory_kind: str | None = None) -> Any:
    return jax.device_put(value, place.sharding(memory_kind))


def shaped(value: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def plain_bytes(array: Any) -> bytes:
    """Returns the bytes of an array. Of int4, returns the values, because the upper bits of a byte have no meaning."""
    array = np.asarray(array)
    return (array.astype(np.int8) if array.dtype == ml_dtypes.int4 else array).tobytes()


def assert_there(array: Any, value: np.ndarray, sharding: Sharding) -> None:
    """Asserts that an array has a value, bit for bit on each device, and the expected sharding."""
    assert isinstance(array, jax.Array) and array.committed
    assert array.sharding == sharding and array.sharding.memory_kind == sharding.memory_kind
    assert array.dtype == value.dtype and array.shape == value.shape and not array.aval.weak_type  # type: ignore
    where = sharding.devices_indices_map(value.shape)
    assert {shard.device: shard.index for shard in array.addressable_shards} == where
    for shard in array.addressable_shards:
        assert shard.data.sharding.memory_kind == sharding.memory_kind
        assert shard.data.dtype == value.dtype and plain_bytes(shard.data) == plain_bytes(value[shard.index])


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Saves a checkpoint with an array of each dtype for each place: {dtype: {place: array}}."""
    path = tmp_path_factory.mktemp("topologies") / "c"
    tr.save(path, {name: {str(p): spread(value, p) for p in PLACES} for name, value in VALUES.items()})
    return path


@pytest.mark.long
@pytest.mark.parametrize("target", PLACES, ids=str)
def test_from_every_place_to_every_other(everywhere: pathlib.Path, target: Place) -> None:
    where, at = target.sharding(), PLACES.index(target)
    for turn, mmap in enumerate((None, False)):
        like: dict[str, dict[str, Any]] = {}
        for n, source in enumerate(PLACES):  # each pair has one dtype, and each dtype goes to and from each place
            name = DTYPES[(n + at + turn) % len(DTYPES)]
            like.setdefault(name, {})[str(source)] = shaped(VALUES[name], where)
        found = tr.restore(everywhere, like, extra="ignore", mmap=mmap)
        for name, arrays in found.items():
            for array in arrays.values():
                assert_there(array, VALUES[name], where)


@pytest.mark.long
@pytest.mark.parametrize("target", PLACES, ids=str)
def test_every_way_of_saying_where(everywhere: pathlib.Path, target: Place) -> None:
    """All ways to pass a target sharding give the same result."""
    where, names = target.sharding(), ("bfloat16", "bool")
    some = [str(place) for place in PLACES[PLACES.index(target) % 3 :: 17]]
    bare = {name: {source: shaped(VALUES[name]) for source in some} for name in names}

    def check(like: Any, sharding: Any = None, **others: Any) -> None:
        found = tr.restore(everywhere, like, sharding=sharding, extra="ignore")
        for name, source in itertools.product(names, some):
            assert_there(found[name][source], VALUES[name], others.get(name, where))

    check(bare, where)
    other = PLACES[len(PLACES) - 1 - PLACES.index(target)].sharding()
    check(bare, {"bfloat16": where, "bool": dict.fromkeys(some, other)}, bool=other)
    check(bare, lambda path, shape, dtype: other if path.startswith("bool/") else where, bool=other)
    check({name: dict.fromkeys(some, spread(np.zeros_like(VALUES[name]), target)) for name in names})
    if target.sizes:
        abstract = AbstractMesh((8, 1), ("x", "y")) if len(target.sizes) < 3 else AbstractMesh((2, 2, 2), tuple("xyz"))
        elsewhere = NamedSharding(abstract, target.spec)
        with jax.set_mesh(target.mesh()):
            check(bare, target.spec)
            check({name: dict.fromkeys(some, shaped(VALUES[name], elsewhere)) for name in names})


@pytest.mark.long
@pytest.mark.whole
def test_restore_without_a_template_follows_sharding(everywhere: pathlib.Path) -> None:
    """Without a template, the arrays go where `sharding=` says."""
    where = Place((2, 4), P("y", "x")).sharding()
    found = tr.restore(everywhere, at="float8_e4m3fn", sharding=where)
    assert len(found) == len(PLACES)
    for array in found.values():
        assert_there(array, VALUES["float8_e4m3fn"], where)


@pytest.mark.long
def test_sharded_arrays_are_complete_on_the_host(everywhere: pathlib.Path) -> None:
    """Without a template and sharding, spread arrays become complete NumPy arrays."""
    for mmap in (None, False):
        found = tr.restore(everywhere, mmap=mmap)
        for name, value in VALUES.items():
            assert all(plain_bytes(found[name][str(place)]) == plain_bytes(value) for place in PLACES)
    ckpt = tr.open(everywhere)
    for place in PLACES:
        part = ckpt[f"float32/{place}"][5:19, ::-5, 1]
        assert part.tobytes() == VALUES["float32"][5:19, ::-5, 1].tobytes()


@pytest.mark.long
def test_scalars_and_arrays_without_elements(tmp_path: pathlib.Path) -> None:
    scalar, empty = np.asarray(2.5, np.float32), np.zeros((0, 24, 4), ml_dtypes.bfloat16)
    tr.save(
        tmp_path / "c",
        {
            "scalar": {str(p): spread(scalar, p) for p in PLACES if p.spec == P()},
            "empty": {str(p): spread(empty, p) for p in PLACES},
        },
    )
    for target, mmap in itertools.product(PLACES, (None, False)):
        where = target.sharding()
        found = tr.restore(
            tmp_path / "c", {"empty": {str(p): shaped(empty, where) for p in PLACES}, "scalar": ...}, mmap=mmap
        )
        for array in found["empty"].values():
            assert_there(array, empty, where)
        if target.spec == P():
            for array in tr.restore(tmp_path / "c", at="scalar", sharding=where, mmap=mmap).values():
                assert_there(array, scalar, where)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_a_sharding_that_a_leaf_cannot_have_names_the_leaf(tmp_path: pathlib.Path, spec: Any) -> None:
    tr.save(tmp_path / "c", {"w": np.zeros(16, np.float32), "b": np.zeros(10, np.float32)})
    with pytest.raises(MismatchError, match="b: "):
        tr.restore(tmp_path / "c", sharding=NamedSharding(Place((8,)).mesh(), spec))


# Memory kinds


KINDS = [memory.kind for memory in jax.devices()[0].addressable_memories()]
IN_MEMORY = [
    Place((8,), P("x")),
    Place((2, 4), P("y", "x")),
    Place((4,)),
    Place((4,), P(None, "x")),
    Place((), P(), (3,)),
]


@pytest.mark.long
def test_from_every_kind_of_memory_to_every_other(tmp_path: pathlib.Path) -> None:
    if not {"pinned_host", "unpinned_host"} <= set(KINDS):
        pytest.skip("devices here have one kind of memory")
    pairs = [(name, kind, place) for name in ("float32", "int4") for kind in KINDS for place in IN_MEMORY]
    tr.save(tmp_path / "c", {str(n): spread(VALUES[name], p, kind) for n, (name, kind, p) in enumerate(pairs)})
    for kind, target, mmap in itertools.product(KINDS, IN_MEMORY, (None, False)):
        where = target.sharding(kind)
        like = {str(n): shaped(VALUES[name], where) for n, (name, *_) in enumerate(pairs)}
        for given in ({"like": like}, {"sharding": where}):
            found = tr.restore(tmp_path / "c", **given, mmap=mmap)
            for n, (name, *_) in enumerate(pairs):
                assert_there(found[str(n)], VALUES[name], where)


def test_a_kind_of_memory_without_devices(everywhere: pathlib.Path) -> None:
    if "pinned_host" not in KINDS:
        pytest.skip("devices here have one kind of memory")
    elsewhere = NamedSharding(AbstractMesh((16,), ("x",)), P("x"), memory_kind="pinned_host")
    target = Place((4,), P("x"))
    with jax.set_mesh(target.mesh()):
        like = {"float32": {str(PLACES[3]): shaped(VALUES["float32"], elsewhere)}}
        found = tr.restore(everywhere, like, extra="ignore")["float32"][str(PLACES[3])]
    assert_there(found, VALUES["float32"], target.sharding("pinned_host"))


# Typed keys


def keys(shape: tuple[int, ...], impl: str) -> Any:
    bits = np.random.default_rng(7).integers(0, 1 << 32, (*shape, 4 if impl == "rbg" else 2), np.uint32)
    return jax.random.wrap_key_data(bits, impl=impl)


def assert_keys(found: Any, value: Any, sharding: Sharding) -> None:
    """Asserts that an array of keys has a value, bit for bit on each device, and the expected sharding."""
    assert found.dtype == value.dtype and found.shape == value.shape and found.committed
    # JAX extends the spec of keys to all their axes, so an equivalent spec may look different.
    assert found.sharding.is_equivalent_to(sharding, found.ndim)
    assert found.sharding.memory_kind == sharding.memory_kind
    data, shards = np.asarray(jax.random.key_data(value)), jax.random.key_data(found).addressable_shards
    where = {device: (*index, slice(None)) for device, index in sharding.devices_indices_map(value.shape).items()}
    assert {shard.device: shard.index for shard in shards} == where
    for shard in shards:
        assert shard.data.dtype == np.uint32 and np.asarray(shard.data).tobytes() == data[shard.index].tobytes()


def admits(place: Place, shape: tuple[int, ...]) -> bool:
    """Returns True if an array of this shape can have the sharding."""
    axes = [axes if isinstance(axes, tuple) else (axes,) for axes in place.spec]
    sizes = dict(zip("xyz", place.sizes, strict=False)) | {None: 1}
    parts = [math.prod(sizes[axis] for axis in own) for own in axes]
    return len(parts) <= len(shape) and not any(size % n for size, n in zip(shape, parts, strict=False))


class Locked(NamedTuple):
    """Saves a checkpoint of {name: {place: array of keys}}."""

    path: pathlib.Path
    values: dict[str, Any]
    places: dict[str, list[Place]]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Locked:
    values = {"line": keys((8,), "threefry2x32"), "cube": keys(SHAPE, "threefry2x32"), "rbg": keys(SHAPE, "rbg")}
    places = {name: [place for place in PLACES if admits(place, value.shape)] for name, value in values.items()}
    places |= {"cube": places["cube"][::4], "rbg": places["rbg"][1::8]}
    path = tmp_path_factory.mktemp("keys") / "c"
    tr.save(path, {name: {str(p): spread(value, p) for p in places[name]} for name, value in values.items()})
    return Locked(path, values, places)


@pytest.mark.long
@pytest.mark.parametrize("mmap", [None, False])
def test_keys_from_every_place_to_every_other(locked: Locked, mmap: bool | None) -> None:
    for target in PLACES:
        where = target.sharding()
        fitting = {name: value for name, value in locked.values.items() if admits(target, value.shape)}
        like = {
            name: dict.fromkeys(map(str, locked.places[name]), jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where))
            for name, v in fitting.items()
        }
        for name, arrays in tr.restore(locked.path, like, extra="ignore", mmap=mmap).items():
            for array in arrays.values():
                assert_keys(array, locked.values[name], where)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_in_every_kind_of_memory(tmp_path: pathlib.Path, kind: str) -> None:
    value = keys((8,), "threefry2x32")
    tr.save(tmp_path / "c", [spread(value, place, kind) for place in (Place((8,), P("x")), Place((), P(), (3,)))])
    for target in (Place((4,), P("x")), Place((2, 4), P("x")), Place((8,)), Place((), P(), (6,))):
        where = target.sharding(kind)
        for found in tr.restore(tmp_path / "c", [shaped(value, where)] * 2):
            assert_keys(found, value, where)
            assert found.sharding.memory_kind == kind


# The bytes that a restore reads


class Ledger(Disk):
    """Records the bytes of each file that are read, or that are loaded if the file is mapped."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self._paths: dict[int, str] = {}
        self._mapped: list[tuple[Any, str]] = []  # kept alive, so that no other mapping gets the same id
        self._noting = threading.Lock()

    def open(self, path: str) -> int:
        fd = super().open(path)
        self._paths[fd] = path
        return fd

    def map(self, fd: int, size: int) -> Any:
        mapped = super().map(fd, size)
        self._mapped.append((mapped, self._paths[fd]))
        return mapped

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._note(self._paths[fd], offset, len(buffer))
        return super().read(fd, buffer, offset)

    def populate(self, fd: int, mapped: Any, offset: int, size: int) -> bool:
        self._note(next(path for one, path in self._mapped if one is mapped), offset, size)
        return super().populate(fd, mapped, offset, size)

    def _note(self, path: str, offset: int, size: int) -> None:
        with self._noting:
            self.ranges.append((pathlib.Path(path).name, offset, offset + size))

    def nbytes(self) -> int:
        """Returns the number of bytes that were read from array files."""
        return sum(end - begin for name, begin, end in self.ranges if name != "treering.json")

    def twice(self) -> list[tuple[str, int, int]]:
        """Returns the ranges that were read more than once."""
        pairs = itertools.pairwise(sorted(self.ranges))
        return [(a[0], b[1], min(a[2], b[2])) for a, b in pairs if a[0] == b[0] and b[1] < a[2]]


BIG = (8192, 2048)  # 64 MiB of float32, 8 KiB a row
BROAD = (16, 1 << 20)  # as much, 4 MiB a row


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Makes a directory with checkpoints of 64 MiB each."""
    path = tmp_path_factory.mktemp("large")
    value = np.arange(math.prod(BIG), dtype=np.float32)
    for name, shape, place in [
        ("rows", BIG, Place((8,), P("x"))),
        ("columns", BIG, Place((8,), P(None, "x"))),
        ("grid", BIG, Place((2, 4), P("x", "y"))),
        ("whole", BIG, Place(())),
        ("broad", BROAD, Place(())),
        ("broad columns", BROAD, Place((8,), P(None, "x"))),
    ]:
        tr.save(path / name, {"x": spread(value.reshape(shape), place), "y": spread(value[:999], Place(()))})
    return path


def read_box(disk: Disk, path: pathlib.Path, box: Any, mmap: bool | None) -> None:
    """Reads and checks a part of an array, as a process with such a shard does."""
    reader = Reader(stores.Filesystem(disk), str(path))
    entry: Any = reader.entries["x"]
    (found,) = reader.read([(entry, box)], mmap=mmap)
    (a, b), (c, d) = box
    width = entry.shape[1]
    wanted = (np.arange(a, b, dtype=np.int64)[:, None] * width + np.arange(c, d)).astype(np.float32)
    assert found.shape == wanted.shape and (found == wanted).all()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("first", [0, 3 * 1024, 500, 7 * 1024 - 1])
def test_an_eighth_of_the_rows_reads_an_eighth(large: pathlib.Path, use_disk: Any, first: int, mmap: bool) -> None:
    needed = math.prod(BIG) * 4 // 8
    for name, pieces in [("rows", 1 if first % 1024 == 0 else 2), ("whole", 1)]:
        disk = use_disk(Ledger())
        read_box(disk, large / name, ((first, first + 1024), (0, 2048)), mmap)
        assert needed <= disk.nbytes() <= 1.05 * needed + 2 * MIB * pieces
        assert not disk.twice()
    disk = use_disk(Ledger())
    assert tr.open(large / "rows")["x"][first : first + 1024, 7].shape == (1024,)
    assert disk.nbytes() <= 1.05 * needed + 4 * MIB and not disk.twice()


# The wanted columns, and the number of pieces that have some of them.
COLUMNS = {(0, 256): 1, (256, 512): 1, (200, 256): 1, (255, 257): 2, (300, 700): 2, (100, 1000): 4}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_read_the_pieces_that_have_some(
    large: pathlib.Path, use_disk: Any, columns: tuple[int, int], mmap: bool
) -> None:
    """A read of some columns reads only the pieces that have some of them."""
    disk = use_disk(Ledger())
    read_box(disk, large / "columns", ((0, 8192), columns), mmap)
    assert disk.nbytes() <= COLUMNS[columns] * (8 * MIB + 2 * MIB) and not disk.twice()
    disk = use_disk(Ledger())
    read_box(disk, large / "columns", ((4096, 4097), columns), mmap)
    assert disk.nbytes() <= COLUMNS[columns] * 2 * MIB and not disk.twice()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("eighth", range(0, 8, 3))
def test_columns_of_long_rows_are_read_alone(large: pathlib.Path, use_disk: Any, eighth: int, mmap: bool) -> None:
    """If rows are long, a read of some columns reads these ranges of each row only."""
    columns = eighth << 17, eighth + 1 << 17
    needed = math.prod(BROAD) * 4 // 8
    for name, ranges in [("broad", BROAD[0]), ("broad columns", 1)]:
        disk = use_disk(Ledger())
        read_box(disk, large / name, ((0, BROAD[0]), columns), mmap)
        assert needed <= disk.nbytes() <= 1.05 * needed + 2 * MIB * ranges and not disk.twice()


@pytest.mark.long
@pytest.mark.parametrize("mmap", [None, False])
@pytest.mark.parametrize("name", ["rows", "columns", "grid", "whole"])
def test_a_restore_reads_nothing_twice(large: pathlib.Path, use_disk: Any, name: str, mmap: bool | None) -> None:
    size = sum(file.stat().st_size for file in (large / name).glob("*.safetensors"))
    for target in (Place((8,), P(None, "x")), Place((4, 2), P("y", "x")), Place((6,))):
        disk = use_disk(Ledger())
        like = {"x": jax.ShapeDtypeStruct(BIG, jnp.float32, sharding=target.sharding()), "y": jnp.zeros(999)}
        found = tr.restore(large / name, like, mmap=mmap)
        assert float(found["x"][-1, -1]) == math.prod(BIG) - 1
        assert disk.nbytes() == size and not disk.twice()


@pytest.mark.parametrize("mmap", [None, False])
def test_a_block_with_several_wanted_leaves_is_read_once(
    tmp_path: pathlib.Path, use_disk: Any, mmap: bool | None
) -> None:
    tr.save(tmp_path / "c", {f"{n:02}": np.full(12_800, n) for n in range(64)})  # about ten leaves in each block
    disk = use_disk(Ledger())
    like = {f"{n:02}": np.zeros(12_800, int) for n in (0, 2, 5, 6, 33, 35)}
    found = tr.restore(tmp_path / "c", like, extra="ignore", mmap=mmap)
    assert all((array == int(n)).all() for n, array in found.items())
    assert 2 * MIB < disk.nbytes() < 2.1 * MIB and not disk.twice()
