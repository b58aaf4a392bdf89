"""Tests of the contents of a checkpoint and of all ways to read them."""

import collections
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from .. import rules
from .._core import dtypes
from .._core.entries import ArrayEntry, ValueEntry
from .._core.lazy import LazyArray
from .._core.skeleton import build
from .._run.open import open_checkpoint, restore
from .._save.save import save
from .._tools.diff import diff
from .._tools.verify import verify
from ..errors import UnsupportedError
from ._samples import identity, odd_layouts, sample
from ._subject import Subject, listing

_Pair = collections.namedtuple("_Pair", "left right")
_MAPPED = (None, True, False)


class Reading(Subject):
    """See `treering.testing.FormatConformance`."""

    def test_a_reader_says_what_there_is(self, tmp_path: Path) -> None:
        """A reader has every attribute of the protocol, and they agree with each other."""
        tree = {**self.small(), "list": [sample("float32"), sample("float32", seed=1)]}
        path = self.made(tmp_path, tree)
        reader = self.reader(path)
        assert reader.format == self.name and reader.path == str(path)
        assert all(
            path == entry.path and isinstance(entry, ArrayEntry | ValueEntry) for path, entry in reader.entries.items()
        )
        assert set(reader.entries) == set(self.leaves(tree))
        if reader.skeleton is not None:
            built = build(reader.skeleton, list(reader.entries))  # It raises unless skeleton and entries fit together.
            assert jax.tree.leaves(built) and set(jax.tree.leaves(built)) == set(reader.entries)
        assert reader.step is None or type(reader.step) is int
        assert all(type(name) is str and type(value) is float for name, value in dict(reader.metrics).items())
        assert isinstance(reader.identity, str) and reader.positional is self.positional
        assert reader.numbers_are_arrays is self.numbers_are_arrays
        assert set(reader.ambiguous_dtypes) <= set(reader.entries)
        assert reader.nbytes == sum(file.stat().st_size for file in self.files(path))
        assert all(isinstance(reader.can_mmap(wish), bool) for wish in _MAPPED)
        reader.check_present()
        for entry in reader.entries.values():
            spread = reader.sharding(entry) if isinstance(entry, ArrayEntry) else None
            assert spread is None or isinstance(spread, dict)
        assert list(reader.problems()) == [] and reader.read([]) == []

    def test_arrays_come_back_bit_for_bit(self, tmp_path: Path) -> None:
        """Arrays of every dtype and of several shapes, also without axes or elements, are read bit for bit."""
        shapes = [(3, 5), (), (0,), (4, 0, 2), (1, 1, 1, 2)]
        tree = {f"d{n:02}": [sample(d, shape, n) for shape in shapes] for n, d in enumerate(self.dtypes)}
        path = self.made(tmp_path, tree)
        self.assert_holds(path, tree)
        for mmap in _MAPPED:
            self.assert_restores(path, tree, mmap=mmap)

    def test_large_arrays_and_odd_layouts(self, tmp_path: Path) -> None:
        """Large arrays, and transposed, strided, reversed, broadcast and big-endian ones, are read bit for bit."""
        odd = {n: a for n, a in odd_layouts().items() if dtypes.to_text(a.dtype) in self.dtypes}
        tree = {
            "large": sample("float32", (1031, 1009)),
            "odd": list(odd.values()),
            "long": sample("uint8", (3 << 20,)),
        }
        path = self.made(tmp_path, tree)
        self.assert_holds(path, tree)
        for mmap in _MAPPED:
            self.assert_restores(path, {**tree, "odd": [_native(a) for a in tree["odd"]]}, mmap=mmap)

    def test_values_come_back(self, tmp_path: Path) -> None:
        """Numbers, text, bytes, None and functions are read, with a template and without one."""
        tree = {"w": sample("float32"), "values": self.held()}
        path = self.made(tmp_path, tree)
        self.assert_holds(path, tree)
        self.assert_restores(path, tree)

    def test_typed_keys_come_back(self, tmp_path: Path) -> None:
        """Typed PRNG keys of several implementations are read, single keys and arrays of them."""
        if not self.keys:
            pytest.skip(f"{self.name} stores no typed keys")
        keys = [jax.random.key(1), jax.random.split(jax.random.key(2, impl="rbg"), (2, 3))]
        path = self.made(tmp_path, {"keys": keys})
        self.assert_holds(path, {"keys": keys})
        self.assert_restores(path, {"keys": keys})
        if not self.positional:
            found = [open_checkpoint(path).abstract()["keys"][n] for n in (0, 1)]
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in keys]

    def test_names_come_back(self, tmp_path: Path) -> None:
        """Unusual keys of leaves and of containers are read, and so are keys that are not text."""
        tree: dict[str, Any] = {"n": {name: {name: sample("int32", (n,))} for n, name in enumerate(self.names)}}
        tree["numbers"] = {10: sample("int32", (2,)), 9: sample("int32", (3,))}
        tree["many"] = {f"layer{n}": {"w": sample("float32", (2,), n)} for n in range(300)}
        path = self.made(tmp_path, tree)
        self.assert_holds(path, tree)
        self.assert_restores(path, tree)

    def test_containers_come_back(self, tmp_path: Path) -> None:
        """A template restores all containers. Without one, empty containers exist if the format records them."""
        a, b, c = (sample("float32", (2,), n) for n in range(3))
        tree = {"pair": _Pair(a, [b]), "tuple": (c,), "empty": {"dict": {}, "list": [], "tuple": ()}}
        path = self.made(tmp_path, tree)
        self.assert_holds(path, tree)
        self.assert_restores(path, tree)
        if not self.positional:
            found = open_checkpoint(path).abstract()
            kept = {name: len(there) for name, there in found.get("empty", {}).items()}
            assert kept == ({"dict": 0, "list": 0, "tuple": 0} if self.empty else {})

    def test_step_metrics_and_metadata_come_back(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Step, metrics and metadata are read if the format stores them.

        Otherwise a save with them names them in an error and writes nothing.
        """
        about = {
            "step": 7,
            "metrics": {"loss": 0.1, "worst": math.inf, "ü": -0.0},
            "metadata": {
                "lr": 1e-3,
                "names": ["a", None, {"deep": True}],
                "n": 2**53 + 1,
                "text": "ü\n",
                "clip": [math.inf, math.nan],
            },
        }
        kept = {name: about[name] for name in about if name in self.fields}
        path = self.made(tmp_path, self.small(), **(kept if self.writes else {}))
        for name in (about.keys() - kept.keys()) if self.writes else ():
            before = listing(tmp_path)
            with pytest.raises(UnsupportedError, match=name):
                self.make(self.place(tmp_path, "refused"), self.small(), **{name: about[name]})
            assert listing(tmp_path) == before
        ckpt = open_checkpoint(path)
        for name in self.fields:
            assert repr(getattr(ckpt, name)) == repr(about[name])
        self.assert_holds(path, self.small())
        if self.writes:
            save(tmp_path / "with all", self.small(), **about)
            self.make(self.place(tmp_path, "copy"), open_checkpoint(tmp_path / "with all"))
            lost = " and ".join(name for name in about if name not in self.fields)
            assert f"{lost} left out" in caplog.text if lost else "left out" not in caplog.text
        plain = open_checkpoint(self.made(tmp_path, self.small(), "plain"))
        assert dict(plain.metrics) == {}
        if "metadata" in self.fields:
            assert not plain.metadata

    def test_templates_say_what_comes_back(self, tmp_path: Path) -> None:
        """A template decides between JAX and NumPy arrays and may widen floats. Wrong shapes and names raise."""
        tree = {"a": jax.numpy.arange(6.0).reshape(2, 3), "b": sample("int32"), "c": np.float32(1.5)}
        path = self.made(tmp_path, tree)
        self.assert_restores(path, tree)
        for mmap in _MAPPED:
            skipped = tree["c"] if self.positional else ...
            like = {"a": np.zeros((2, 3)), "b": jax.ShapeDtypeStruct((3, 5), "int32"), "c": skipped}
            found = restore(path, like, mmap=mmap)
            assert found["a"].dtype == np.float64 and np.array_equal(found["a"], tree["a"]) and found["c"] == skipped
            assert isinstance(found["b"], jax.Array) and np.array_equal(found["b"], tree["b"])
        for wrong in ({**tree, "a": np.zeros((3, 2), np.float32)}, {"a": tree["a"], "b": tree["b"]}):
            with pytest.raises(ValueError, match="expected"):
                restore(path, wrong)

    def test_arrays_go_to_many_devices_and_come_from_there(self, tmp_path: Path) -> None:
        """Arrays are restored onto all devices, sharded along every axis, and saved from there."""
        devices = jax.devices()
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        array = sample("float32", (2 * len(devices), 3 * len(devices)))
        path = self.made(tmp_path, {"w": array})
        for spec in (("x",), (None, "x"), ()):
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            for mmap in _MAPPED:
                like = {"w": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)}
                found = restore(path, like, mmap=mmap)["w"]
                assert found.sharding.is_equivalent_to(sharding, 2) and identity(found) == identity(array)
            if self.writes:
                again = self.made(tmp_path, {"w": jax.device_put(array, sharding)}, f"again{spec}")
                self.assert_holds(again, {"w": array})

    def test_slices_are_those_of_numpy(self, tmp_path: Path) -> None:
        """Slices of many kinds, also with steps, negative and empty ones, equal NumPy's. So do boxes of one call."""
        arrays = [sample("float32", s, n) for n, s in enumerate([(7, 5, 6), (), (0, 4), (600, 700), (2, 1, 3, 2)])]
        path = self.made(tmp_path, {"a": arrays})
        ckpt, reader = open_checkpoint(path), self.reader(path)
        rng = np.random.default_rng(0)
        wanted, expected = [], []
        for name, array in self.leaves({"a": arrays}).items():
            lazy, entry = ckpt[name], reader.entries[name]
            for index in [*itertools.islice(_indices(array.shape, rng), 25), (), ...]:
                found, part = lazy[index], array[index]
                assert found.shape == part.shape and found.dtype == part.dtype
                assert found.tobytes() == part.tobytes(), (array.shape, index)
            for _ in range(10):
                box = tuple(tuple(sorted(map(int, rng.integers(0, size + 1, 2)))) for size in array.shape)
                wanted.append((entry, box))
                expected.append(array[tuple(slice(*ends) for ends in box)])
        for mmap in _MAPPED:
            found = reader.read(wanted, verify=mmap is not None, mmap=mmap)
            assert [(x.shape, x.tobytes()) for x in found] == [(x.shape, x.tobytes()) for x in expected]
            for one, part in zip(found, expected, strict=True):
                one[...] = 0
                assert one.dtype == part.dtype
        assert ckpt[next(iter(self.leaves({"a": arrays})))][0, 0].tobytes() == arrays[0][0, 0].tobytes()

    def test_arrays_are_writable_and_share_nothing(self, tmp_path: Path) -> None:
        """A change of one array changes no other array, no second reader and no file."""
        tree = {"a": sample("float32", (64, 64)), "b": sample("int32", (9,)), "c": sample("float32", (), 2)}
        path = self.made(tmp_path, tree)
        for mmap in _MAPPED:
            first, second = restore(path, tree, mmap=mmap), restore(path, tree, mmap=mmap)
            ckpt = open_checkpoint(path)
            slices = [ckpt[name][...] for name in self.leaves(tree)] + [ckpt[next(iter(ckpt))][1:3]]
            boxes = self.reader(path)
            entry = next(iter(boxes.entries.values()))
            assert isinstance(entry, ArrayEntry)
            box = tuple((0, size) for size in entry.shape)
            twice = [boxes.read([(entry, box)], mmap=mmap)[0], boxes.read([(entry, box)], mmap=mmap)[0]]
            arrays = [*first.values(), *second.values(), *slices, *twice]
            assert not any(np.may_share_memory(x, y) for x, y in itertools.combinations(arrays, 2))
            for array in (*first.values(), *slices, twice[0]):
                if isinstance(array, np.ndarray):  # A slice of an array without axes is a scalar.
                    assert array.flags.writeable
                    array[...] = 1
            for name, array in tree.items():
                assert identity(second[name]) == identity(array)
            assert twice[1].tobytes() == np.asarray(ckpt[entry.path]).tobytes()
            self.assert_holds(path, tree)

    def test_everything_else_works_on_it(self, tmp_path: Path) -> None:
        """The methods and tools of checkpoints work: `at`, `select`, `apply`, `abstract`, `print`, `diff`, `verify`."""
        tree = {"deep": {"w": sample("float32", (4, 6)), "b": sample("int32", (3,))}, "w": sample("float32", (2,), 1)}
        path = self.made(tmp_path, tree)
        ckpt, leaves = open_checkpoint(path), self.leaves(tree)
        name = next(path for path, leaf in leaves.items() if leaf.shape == (4, 6))
        assert ckpt.format == self.name and all(f"{path} " in str(ckpt) for path in leaves)
        self.assert_same(ckpt.at(name)[""], tree["deep"]["w"], name)
        assert set(ckpt.select([name, "nothing/**"])) == {name}
        changed = ckpt.apply(
            [rules.transpose(name, (1, 0)), rules.rename(f"^{name}$", "new/w"), rules.cast("new/w", "float64")]
        )
        expected = dtypes.convert(tree["deep"]["w"].T, np.dtype(np.float64))
        self.assert_same(changed["new/w"], expected, "new/w")
        assert identity(changed.restore(at="new")["w"]) == identity(expected)
        assert identity(changed["new/w"][2:4, 1]) == identity(expected[2:4, 1])
        shapes = {(x.shape, str(x.dtype)) for x in jax.tree.leaves(ckpt.abstract())}
        assert shapes == {(x.shape, str(x.dtype)) for x in leaves.values()}
        if not self.positional:
            assert set(ckpt.at("deep")) == {"w", "b"} and set(ckpt.select("**/w")) == {"w", "deep/w"}
            assert identity(restore(path, at="deep")["b"]) == identity(tree["deep"]["b"])
            assert not diff(path, tree)
            other = {**tree, "w": sample("float32", (2,), 2)}
            assert list(diff(path, other).changed) == ["w"]
        assert not diff(path, ckpt)
        report = verify(path)
        assert report.ok and report.nbytes == ckpt.nbytes
        assert all(isinstance(leaf, LazyArray) for leaf in ckpt.values())


def _native(array: np.ndarray) -> np.ndarray:
    native = array.dtype.newbyteorder("=")
    return array if array.dtype == native else array.byteswap().view(native)


def _indices(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Yields random basic indices of an array, without end."""
    while True:
        parts: list[Any] = []
        for size in shape:
            start, stop = (int(n) for n in rng.integers(-size - 1, size + 2, 2))
            step = int(rng.choice([1, 1, 2, 3, -1, -2]))
            is_integer = size > 0 and rng.random() < 0.3
            parts.append(int(rng.integers(-size, size)) if is_integer else slice(start, stop, step))
        count = int(rng.integers(0, len(parts) + 1))
        yield tuple(parts[:count]) if rng.random() < 0.5 else (..., *parts[len(parts) - count :])
