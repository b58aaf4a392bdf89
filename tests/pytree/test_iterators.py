"""Tests data iterators as leaves."""

import base64
import collections
import itertools
import json
import pathlib
import random
import re
import signal
import tracemalloc
import types
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spec_reader
import treering as tr
from helpers import assert_same
from jobs import run_job
from treering._cli.main import main as command
from treering._core import iterator_states as _states
from treering._core.entries import IteratorEntry, IteratorInfo
from treering._pytree import iterators
from treering._pytree.state_methods import is_iterator
from treering.errors import CorruptError, MismatchError, UnsupportedError
from treering.formats._shared import strict_json
from treering.formats.treering import manifest_fields

pytestmark = pytest.mark.compat


def dataset_iterator() -> Any:
    return iter(grain.MapDataset.range(1000).shuffle(seed=1).map(lambda x: x * 2).batch(4).to_iter_dataset())


def prefetched_iterator() -> Any:
    return iter(grain.MapDataset.range(1000).shuffle(seed=1).to_iter_dataset().filter(lambda x: x % 3 > 0).batch(4))


def loader_iterator() -> Any:
    sampler = grain.samplers.IndexSampler(1000, shuffle=True, seed=3, shard_options=grain.sharding.NoSharding())
    return iter(grain.DataLoader(data_source=range(1000), sampler=sampler, worker_count=0))


def elastic_iterator() -> Any:
    return iter(grain.experimental.ElasticIterator(grain.MapDataset.range(1000), 8, grain.sharding.NoSharding()))


def elastic_dataset() -> Any:
    return grain.experimental.ElasticIterator(grain.MapDataset.range(1000), 8, grain.sharding.NoSharding())


def mixed_iterator() -> Any:
    mixture = grain.IterDataset.mix([elastic_dataset(), elastic_dataset()], [0.7, 0.3])
    return iter(grain.experimental.LimitIterDataset(mixture, 30))


def zipped_iterator() -> Any:
    return iter(grain.experimental.ZipIterDataset([elastic_dataset(), elastic_dataset()]))


class Stateful:
    """A double of the stateful loaders of PyTorch."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> "Stateful":
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "rng": np.arange(self.n, dtype=np.uint32), "deep": ({1: b"x", None: 2.5}, [True])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rng = state.pop("rng")
        assert rng.dtype == np.uint32 and rng.tolist() == list(range(state["n"])) and rng.flags.writeable
        assert repr(state) == repr({"n": state["n"], **DEEP})
        self.n = state["n"]


DEEP = {"deep": ({1: b"x", None: 2.5}, [True])}
KINDS = {
    "dataset": dataset_iterator,
    "prefetched": prefetched_iterator,
    "loader": loader_iterator,
    "elastic": elastic_iterator,
    "stateful": Stateful,
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drawn", [0, 1, 7])
def test_an_iterator_goes_on_where_it_was_saved(tmp_path: pathlib.Path, kind: str, drawn: int) -> None:
    data = KINDS[kind]()
    for _ in range(drawn):
        next(data)
    pending = tr.save_async(tmp_path / "c", {"step": drawn, "data": data, "w": jnp.ones(3)})
    expected = list(itertools.islice(data, 5))  # The state is copied during the call, not later.
    pending.result()
    other = KINDS[kind]()
    next(other)
    found = tr.restore(tmp_path / "c", like={"step": 0, "data": other, "w": jnp.zeros(3)})
    assert found["data"] is other and found["step"] == drawn
    assert_same(list(itertools.islice(other, 5)), expected)


def test_a_numpy_generator_of_the_old_kind_is_one_too(tmp_path: pathlib.Path) -> None:
    rng = np.random.RandomState(3)
    rng.rand(7)
    tr.save(tmp_path / "c", {"rng": rng})
    expected = rng.rand(5)
    other = np.random.RandomState(0)
    tr.restore(tmp_path / "c", like={"rng": other})
    assert (other.rand(5) == expected).all()


GENERATORS = {
    "PCG64": (lambda seed: np.random.default_rng(seed), lambda rng: rng.normal(size=5).tolist()),
    "MT19937": (
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda rng: rng.integers(9, size=5).tolist(),
    ),
    "Philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda rng: rng.bytes(5)),
    "SFC64, its bits": (lambda seed: np.random.SFC64(seed), lambda bits: bits.random_raw(5).tolist()),
    "Python": (random.Random, lambda rng: [rng.gauss(0, 1) for _ in range(5)]),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_random_numbers_go_on(tmp_path: pathlib.Path, kind: str) -> None:
    make, draw = GENERATORS[kind]
    rng = make(3)
    draw(rng)
    tr.save(tmp_path / "c", {"rng": rng, "w": np.ones(1)})
    expected = draw(rng)
    for other in (make(3), make(0)):
        draw(other), draw(other)
        assert tr.restore(tmp_path / "c", like={"rng": other, "w": np.ones(1)})["rng"] is other
        assert draw(other) == expected
    with pytest.raises(MismatchError, match="rng: this Stateful does not accept the saved state"):
        tr.restore(tmp_path / "c", like={"rng": Stateful(), "w": np.ones(1)})


def test_what_a_numpy_generator_spawns_is_not_spawned_again(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(3)
    rng.spawn(2)
    tr.save(tmp_path / "c", {"rng": rng})
    expected = rng.spawn(1)[0].random()
    for other, drawn in ((np.random.default_rng(3), 0), (np.random.default_rng(3), 2)):
        other.spawn(drawn) if drawn else None
        tr.restore(tmp_path / "c", like={"rng": other})
        assert other.spawn(1)[0].random() == expected
    assert "spawned" not in caplog.text
    tr.restore(tmp_path / "c", like={"rng": other})
    assert "had spawned 2 generators when it was saved and has now spawned 3" in caplog.text


def test_a_generator_does_not_take_the_state_of_another_kind(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"rng": np.random.default_rng(3)})
    other = np.random.Generator(np.random.Philox(3))
    with pytest.raises(MismatchError, match=r"rng: this Generator does not accept the saved state: .*Philox"):
        tr.restore(tmp_path / "c", like={"rng": other})


def _python_generator() -> Any:
    yield 1


class _Dataset:  # such as those of TensorFlow, PyTorch and Hugging Face, which need not be installed
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.filterwarnings("ignore:Python iterable type")  # of JAX, about generators
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            _python_generator(),
            "generator; an iterator needs the methods get_state and set_state, or state_dict and load",
        ),
        (itertools.count(), "count; an iterator needs the methods get_state"),
        (iter([1]), "list_iterator; an iterator needs the methods get_state"),
        (
            grain.MapDataset.range(5),
            r"MapDataset; put iter\(…\) of it into the tree, if that has the methods get_state",
        ),
        (_Dataset(), r"_Dataset; put iter\(…\) of it into the tree"),
        ({1}, "set; convert it to an array"),
        (signal.SIGTERM, "Signals; convert it to an array"),
        (re.DOTALL, "RegexFlag; convert it to an array"),
        (collections.UserString("a"), "UserString; convert it to an array"),
    ],
)
def test_iterator_without_state_is_refused_with_advice(tmp_path: pathlib.Path, data: Any, says: str) -> None:
    """The error for data without a state names the methods that an iterator needs."""
    with pytest.raises(UnsupportedError, match=f"a/data: .*{says}"):
        tr.save(tmp_path / "c", {"a": {"data": data}})
    assert not list(tmp_path.iterdir())
    tr.save(tmp_path / "c", {"a": {"data": dataset_iterator()}})
    with pytest.raises(MismatchError, match=f"a/data: .*{says.partition('; convert')[0].partition('; ')[2]}"):
        tr.restore(tmp_path / "c", like={"a": {"data": data}})


def test_without_a_template_the_states_come_back(tmp_path: pathlib.Path) -> None:
    data = dataset_iterator()
    next(data)
    tr.save(tmp_path / "c", {"data": data})
    assert tr.restore(tmp_path / "c") == {"data": [{"next_index": 1}]} and tr.open(tmp_path / "c")["data"] == [
        {"next_index": 1}
    ]
    assert "data  iterator [{'next_index': 1}]" in str(tr.open(tmp_path / "c"))
    assert tr.verify(tmp_path / "c").ok and not tr.diff(tmp_path / "c", tmp_path / "c")


def test_nothing_is_set_unless_everything_else_matched(tmp_path: pathlib.Path) -> None:
    data = Stateful()
    next(data)
    tr.save(tmp_path / "c", {"data": data, "w": np.ones(100_000), "z": 1})
    other = Stateful()
    with pytest.raises(MismatchError, match="w: expected float64"):
        tr.restore(tmp_path / "c", like={"data": other, "w": np.ones(4), "z": 1})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError):
        tr.restore(tmp_path / "c", like={"data": other, "w": np.ones(100_000), "z": 1})
    assert other.n == 0
    tr.restore(tmp_path / "c", like={"data": other, "w": ..., "z": 1})
    assert other.n == 1


def test_what_does_not_fit(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"data": Stateful(), "x": 1})
    for like, error in (
        ({"data": 1, "x": 1}, "data: expected int, found iterator"),
        ({"data": np.ones(3), "x": 1}, "data: expected float64.*, found iterator"),
        ({"data": Stateful(), "x": Stateful()}, "x: expected the state of a Stateful, found int"),
        ({"data": Stateful(), "x": 1, "y": Stateful()}, "y: expected Stateful, found nothing"),
        ({"x": 1}, "data: expected nothing, found iterator"),
    ):
        with pytest.raises(MismatchError, match=error):
            tr.restore(tmp_path / "c", like=like)
    own = Stateful()
    found = tr.restore(tmp_path / "c", like={"data": Stateful(), "x": 1, "y": own}, missing=["y"])
    assert found["y"] is own

    class Refuses(Stateful):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("position")

    with pytest.raises(MismatchError, match=r"data: this Refuses does not accept the saved state: KeyError"):
        tr.restore(tmp_path / "c", like={"data": Refuses(), "x": 1})


def test_states_that_are_not_plain(tmp_path: pathlib.Path) -> None:
    class Odd(Stateful):
        state: Any = None

        def state_dict(self) -> Any:
            return {"inner": [1, self.state]}

    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    for state, error in (
        (object(), r"data: an iterator with a builtins.object in its state, at \['inner'\]\[1\]"),
        (deep, "more than 100 levels deep"),
        (
            np.array([None]),
            r"data: an iterator with an array of dtype object in its state, at .*; pickled objects are never written",
        ),
    ):
        Odd.state = state
        with pytest.raises(UnsupportedError, match=error):
            tr.save(tmp_path / "c", {"data": Odd()})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("format", ["safetensors", "flax", "fjformer", "equinox", "orbax", "t5x", "levanter"])
def test_other_formats_refuse_iterators_by_name(tmp_path: pathlib.Path, format: str) -> None:
    says = "the state of an iterator, which Orbax holds as an item" if format == "orbax" else "only the native format"
    with pytest.raises(UnsupportedError, match=f"a/data: {says}"):
        tr.save(tmp_path / "c", {"a": {"data": Stateful()}, "w": np.ones(3)}, format=format)
    assert not (tmp_path / "c").exists()
    tr.save(tmp_path / "n", {"a": {"data": Stateful()}, "w": np.ones(3, np.float32)})
    tr.convert(tmp_path / "n", tmp_path / "c", format=format, rules=[tr.rules.drop("a/data")])


@pytest.mark.long
def test_an_iterator_in_a_run(tmp_path: pathlib.Path) -> None:
    def init(data: Any) -> Any:
        return {"n": jnp.zeros((), jnp.int32), "data": data}

    expected = list(itertools.islice(dataset_iterator(), 12))
    seen: list[Any] = []
    for _ in range(3):
        data = dataset_iterator()
        with tr.Checkpointer(tmp_path) as ckpts:
            tree, step = ckpts.restore_or_init(lambda data=data: init(data))
            assert tree["data"] is data and int(tree["n"]) == step == len(seen)
            for number in range(step + 1, step + 5):
                seen.append(next(tree["data"]))
                tree = {**tree, "n": tree["n"] + 1}
                ckpts.save(number, tree)
    assert_same(seen, expected)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.long
@given(json_like)
def test_every_plain_state_comes_back(state: Any) -> None:
    class Fixed(Stateful):
        def state_dict(self) -> Any:
            return state

    frozen = iterators.freeze(Fixed())
    for several in (False, True):
        (found,) = iterators.entry_of("x", frozen, several=several).decode()
        assert found == state and repr(found) == repr(state)
    assert repr(spec_reader.unpack(frozen.state.data.tobytes())) == repr(state)


@given(st.binary(max_size=40), json_like, st.integers(-9, 9))
def test_hostile_bytes_are_corrupt_and_nothing_else(data: bytes, value: Any, more: int) -> None:
    """Bytes that are no packed state raise `CorruptError`, and two readers agree on that."""
    text = json.dumps(value, default=str).encode()
    for content in (data, (len(text) + more).to_bytes(8, "little", signed=True) + text + data):
        try:
            found = _states.unpack(_states.Packed(np.frombuffer(content, np.uint8), {}), strict_json.parse)
        except (CorruptError, UnsupportedError, *strict_json.MALFORMED):
            found = "unsupported"
        try:
            expected = spec_reader.unpack(content)
        except spec_reader.Unsupported:
            expected = "unsupported"
        assert repr(found) == repr(expected)


@pytest.mark.long
@given(json_like)
def test_hostile_states_are_corrupt_and_nothing_else(value: Any) -> None:
    for entry in (value, ["each", value], ["all", [value]], ["each", [["array", value]]], ["each", [["dict", value]]]):
        try:
            _states.decode_states(entry, IteratorInfo().types_of)
        except (CorruptError, UnsupportedError):
            pass


LARGE = {
    "buffer": bytes(range(256)) * 5000,
    "text": "ä\n" * 300_000,
    "rng": np.arange(5, dtype=np.int16),
    "deep": ({1: b"x", None: 2.5, b"key": b""}, [True, np.float32(1.5), np.zeros((0, 3))]),
    "nan": float("nan"),
    "big": 2**70,
}


class Large(Stateful):
    """An iterator over data with a large buffer, such as one that shuffles."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.slow
def test_a_large_state_comes_back_from_an_array_file(tmp_path: pathlib.Path) -> None:
    """A large state is restored exactly, with every type, and an independent reader finds the same state."""
    tree = {"a": {"data": Large(LARGE)}, "small": Large({"n": 1}), "w": np.ones(3)}
    tr.save_async(tmp_path / "c", tree).result()
    assert (tmp_path / "c" / "treering.json").stat().st_size < 2000 < 1 << 20 < tr.open(tmp_path / "c").nbytes
    tr.save(tmp_path / "rules", tree, rules=[tr.rules.rename("^small$", "little")])
    tr.convert(tmp_path / "c", tmp_path / "again", rules=[tr.rules.rename("^small$", "little")])
    assert command(["cp", str(tmp_path / "c"), str(tmp_path / "copy")]) == 0
    for name, path in (("c", "small"), ("rules", "little"), ("again", "little"), ("copy", "small")):
        like = {"a": {"data": Large()}, path: Large(), "w": np.zeros(3)}
        found = tr.restore(tmp_path / name, like=like)
        assert found["a"]["data"] is like["a"]["data"] and repr(found["a"]["data"].state) == repr(LARGE)
        assert type(found["a"]["data"].state["deep"][1][1]) is np.float32 and found[path].state == {"n": 1}
        assert repr(spec_reader.read(tmp_path / name)["a/data"]) == repr([LARGE])
        assert tr.verify(tmp_path / name).ok and repr(tr.restore(tmp_path / name)["a"]["data"]) == repr([LARGE])
    renamed = Large()
    tr.restore(tmp_path / "c", like={"x": renamed}, rules=[tr.rules.rename("^a/data$", "x")], extra="ignore")
    assert repr(renamed.state) == repr(LARGE)


@pytest.mark.long
@pytest.mark.whole
def test_what_shows_and_compares_large_states(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    tr.save(tmp_path / "c", {"data": Large(LARGE), "w": np.ones(3)})
    other = {**LARGE, "rng": np.array([0, 1, 2, 3, 5], np.int16)}
    tr.save(tmp_path / "d", {"data": Large(other), "w": np.ones(3)})
    tr.save(tmp_path / "small", {"data": Large({"n": 1}), "w": np.ones(3)})
    for same in (tmp_path / "c", {"data": Large(LARGE), "w": np.ones(3)}):
        assert not tr.diff(tmp_path / "c", same)
    assert "data: iterator[0]['rng']: 1 of 5 values differ" in str(tr.diff(tmp_path / "c", tmp_path / "d"))
    assert "data: iterator[0]: keys" in str(tr.diff(tmp_path / "c", tmp_path / "small"))
    assert "data  iterator 2.48 MB" in str(tr.open(tmp_path / "c"))
    for arguments, shown in (
        (["show"], "data  iterator 2.48 MB"),
        (["show", "--json"], '"nbytes": 24'),
        (["stats"], "1 leaf"),
    ):
        assert command([arguments[0], str(tmp_path / "c"), *arguments[1:]]) == 0
        assert shown in capsys.readouterr().out
    with pytest.raises(UnsupportedError, match="data: only the native format holds the state of data iterators"):
        tr.convert(tmp_path / "c", tmp_path / "f", format="safetensors")
    with pytest.raises(MismatchError, match="data is not an array but a iterator"):
        tr.open(tmp_path / "c").apply([tr.rules.cast("data", "float32")])


def test_damage_in_a_large_state_is_found_before_anything_is_set(tmp_path: pathlib.Path) -> None:
    tree = {"data": Large(LARGE), "first": Stateful(), "w": np.ones(3)}
    tr.save(tmp_path / "c", tree)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (problem,) = tr.verify(tmp_path / "c").problems
    assert problem.leaves == ("data",)
    like = {"data": Large(), "first": Stateful(), "w": np.ones(3)}
    next(like["first"])
    with pytest.raises(CorruptError, match="damaged leaves: data"):
        tr.restore(tmp_path / "c", like=like)
    assert like["data"].state is None and like["first"].n == 1
    assert tr.restore(tmp_path / "c", like={**like, "data": ...})["first"].n == 0


def test_old_release_reads_all_but_large_iterator_state(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older release reads everything except the large state."""
    tr.save(tmp_path / "c", {"data": Large(LARGE), "w": np.ones(3)})
    monkeypatch.setattr(manifest_fields, "STATES", "of-a-later-release")
    assert tr.open(tmp_path / "c")["w"][:].tolist() == [1, 1, 1]
    with pytest.raises(UnsupportedError, match=r"data: .* requires iterator-states; .*upgrade treering"):
        tr.restore(tmp_path / "c")
    with pytest.raises(MismatchError, match="data: expected the state of a Large, found uint8"):
        tr.restore(tmp_path / "c", like={"data": Large(), "w": np.zeros(3)})
    with pytest.raises(UnsupportedError, match="requires iterator-states"):
        tr.verify(tmp_path / "c")


def test_the_memory_that_a_large_state_takes(tmp_path: pathlib.Path) -> None:
    """Saving and restoring a large state takes the memory of one copy in addition to the state."""
    state, size = {"buffer": bytes(1 << 25)}, 1 << 25
    most: list[float] = []
    other = Large()
    for call in (
        lambda: tr.save(tmp_path / "c", {"data": Large(state)}),
        lambda: tr.restore(tmp_path / "c", like={"data": other}),
    ):
        tracemalloc.start()
        call()
        most.append(tracemalloc.get_traced_memory()[1] / size)
        tracemalloc.stop()
    assert other.state == state and most[0] < 1.5 and most[1] < 2.5, most


class NumpyIterator:
    """A double of TensorFlow's iterator, which need not be installed.

    It has the class name, module and methods that TensorFlow 2.21 has in tensorflow/python/data/ops/dataset_ops.py:
    `save(self)` returns a tensor of text without axes, and `restore(self, state)` takes that tensor, or its bytes.
    """

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> "NumpyIterator":
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n

    def save(self) -> Any:
        text = b"%d," % self.n + b"x" * (2 << 20)
        return types.SimpleNamespace(numpy=lambda: text)

    def restore(self, state: Any) -> None:
        assert type(state) is bytes
        self.n = int(state.partition(b",")[0])


NumpyIterator.__module__ = "tensorflow.python.data.ops.dataset_ops"


def test_an_iterator_of_tensorflow_goes_on(tmp_path: pathlib.Path) -> None:
    data = NumpyIterator()
    next(data), next(data)
    pending = tr.save_async(tmp_path / "c", {"data": data, "w": np.ones(3)})
    assert next(data) == 3
    pending.result()
    other = NumpyIterator()
    assert tr.restore(tmp_path / "c", like={"data": other, "w": np.ones(3)})["data"] is other
    assert next(other) == 3
    tr.save(tmp_path / "other", {"data": {"state": b"4,"}})
    with pytest.raises(MismatchError, match=r"set it with restore\(tr.restore\(path, at='data'\)\)"):
        tr.restore(tmp_path / "other", like={"data": other})


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        ("tensorflow.python.checkpoint.checkpoint", "Checkpoint", "convert it to an array"),
        ("keras.src.models.model", "NumpyIterator", "convert it to an array"),
        (
            "tensorflow.python.data.ops.dataset_ops",
            "DatasetV2",
            r"put as_numpy_iterator\(\) of the dataset into the tree",
        ),
    ],
)
def test_what_only_saves_and_restores_is_no_iterator(tmp_path: pathlib.Path, module: str, name: str, says: str) -> None:
    methods = {"save": NumpyIterator.save, "restore": NumpyIterator.restore}
    other = type(name, (), {**methods, "__module__": module})()
    assert not is_iterator(type(other)) and not is_iterator(tr.Checkpointer)
    with pytest.raises(UnsupportedError, match=f"data: {module}.{name}; {says}"):
        tr.save(tmp_path / "c", {"data": other})


@pytest.mark.slow
def test_the_large_states_of_several_processes(tmp_path: pathlib.Path) -> None:
    """Each process writes its own state in an array file if one of the states is large."""
    run_job(tmp_path, "iterators.the_large_states_of_several_processes", processes=2)
    for name in ("c", "rules", "made", "again"):
        found = tr.restore(tmp_path / name)
        assert [len(state[1]) for state in found["one"]] == [3 << 20, 0]
        assert all([state[0] for state in found[one]] == [0, 1] for one in ("all", "one", "none"))
        assert repr(spec_reader.tree(tmp_path / name)["one"]) == repr(found["one"])
        assert tr.verify(tmp_path / name).ok
        rows = {row[1]: row for row in spec_reader.Checkpoint(tmp_path / name).manifest["leaves"]}
        assert [rows[one][0] for one in ("all", "one", "none")] == ["array", "array", "value"]
    with pytest.raises(MismatchError, match=r"all: expected the states of 1 iterators, .* found those of 2"):
        tr.restore(tmp_path / "c", like={"all": Large(), "one": ..., "none": ..., "w": ...})


@pytest.mark.slow
def test_every_process_has_its_own_state(tmp_path: pathlib.Path) -> None:
    results = run_job(tmp_path, "iterators.every_process_has_its_own_state", processes=2)
    assert results[0].report[0] != results[1].report[0]
    for result in results:
        kind, text = result.report[1]
        assert kind == "MismatchError" and "shared: an elastic iterator is at another position" in text
    with pytest.raises(MismatchError, match=r"data: expected the states of 1 iterators, .* found those of 2; restore"):
        tr.restore(tmp_path / "c", like={"data": dataset_iterator(), "shared": elastic_iterator()}, extra="ignore")
    with pytest.raises(MismatchError, match=r"partly: expected the states of 1 iterators, .*mixes or zips such"):
        tr.restore(tmp_path / "c", like={"partly": zipped_iterator()}, extra="ignore")
    alone, mix, zipped = elastic_iterator(), mixed_iterator(), zipped_iterator()
    tr.restore(tmp_path / "c", like={"shared": alone, "mix": mix, "zip": zipped}, extra=["data", "partly", "w"])
    assert next(alone).tolist() == list(range(40, 48))
    expected = mixed_iterator(), zipped_iterator()
    for _ in range(5):
        next(expected[0]), next(expected[1])
    assert_same(
        [list(itertools.islice(mix, 9)), next(zipped)], [list(itertools.islice(expected[0], 9)), next(expected[1])]
    )
    counts = {path: len(tr.open(tmp_path / "c")[path]) for path in ("data", "shared", "mix", "zip", "partly")}
    assert counts == {"data": 2, "shared": 1, "mix": 1, "zip": 1, "partly": 2}


def test_equal_states_of_an_elastic_mixture_are_one(tmp_path: pathlib.Path) -> None:
    """Also in a checkpoint of an earlier release, which has one for each process."""
    state = _states.encode_state({"parents": [{"global_next_index": 8}, {"global_next_index": 0}], "index": 1})[0]
    assert iterators.state_for_process(IteratorEntry("x", "iterator", ["each", [state] * 4]), 0, 3)[1] == 3
    for other in ({"next_index": 8}, {"parent": {"global_next_index": 8}, "batch_idx": 1}, {"parents": []}, [], {}):
        state = _states.encode_state(other)[0]
        entry = iterators.join_states("x", [(state, {})] * 4, IteratorInfo())
        assert entry.value == ["each", [state] * 4] and iterators.state_for_process(entry, 0, 3) == (None, 4)


@pytest.mark.parametrize(("dtype", "expected"), [("int4", b"\1\xff"), ("int2", b"\1\xff"), ("uint4", b"\1\3")])
def test_small_integers_in_states_are_encoded_as_in_array_files(dtype: str, expected: bytes) -> None:
    """Integers of less than 8 bits are sign-extended, so that every stored bit is defined."""
    array = np.array([1, -1 if dtype[0] == "i" else 3], np.int8).astype(dtype)
    (kind, (_, text, shape, data)), _ = _states.encode_state(array)
    assert (kind, text, shape, base64.b64decode(data)) == ("array", dtype, [2], expected)
    back = _states.decode_state([kind, [True, text, shape, data]], 0)
    assert back.dtype == dtype and back.tolist() == array.tolist()


class NamelessSource:
    """A data source with the default repr."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> int:
        return int(index)


def test_a_loader_that_no_restart_can_restore(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Grain compares the reprs of the data sources. The default one has an address, which differs after a restart."""

    def make(source: Any) -> Any:
        sampler = grain.samplers.IndexSampler(8, shard_options=grain.sharding.NoSharding(), num_epochs=1)
        return iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))

    tr.save(tmp_path / "named", {"data": make(range(8))})
    assert not caplog.messages
    source, other = NamelessSource(), NamelessSource()
    for step in (1, 2):
        tr.save(tmp_path / f"{step}", {"data": make(source)})
    (message,) = caplog.messages
    assert "so Grain refuses it after a restart" in message and f" at {hex(id(source))}>" in message
    tr.restore(tmp_path / "1", like={"data": make(source)})
    with pytest.raises(MismatchError, match="does not accept the saved state"):
        tr.restore(tmp_path / "1", like={"data": make(other)})
