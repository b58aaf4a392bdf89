"""Tests the types that values in the state of an iterator may have: each comes back as it was, or is an error."""

import collections
import dataclasses
import datetime
import enum
import json
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xxhash
from flax.linen import fp8_ops
from hypothesis import given
from hypothesis import strategies as st

import spec_reader
import treering as tr
from jobs import run_job
from treering._core.iterator_states import encode_state, pack, unpack, with_types
from treering.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.compat


class Loader:
    """A loader with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def exactly(value: Any) -> Any:
    """Returns what two values have in common only if they have the same types, order and bits."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value)).tolist()
    if isinstance(value, jax.Array):
        return "jax", value.weak_type, exactly(np.asarray(value))
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, collections.defaultdict):
        return value.default_factory, [(exactly(key), exactly(one)) for key, one in value.items()]
    if isinstance(value, dict):
        return type(value), [(exactly(key), exactly(one)) for key, one in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), value
    if isinstance(value, list | tuple | collections.deque):
        return type(value), getattr(value, "maxlen", 0), [exactly(one) for one in value]
    if type(value).__module__ == "torch":
        return "torch", str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    return type(value), repr(value)


KEY = jax.random.key(3)
STATES = {
    "key": lambda: {"key": KEY, "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3)},
    "jax": lambda: [jnp.arange(3), jnp.ones((2, 2), "bfloat16"), jnp.zeros((0, 3)), jnp.asarray([1, -1], "int4")],
    "weak": lambda: [jnp.asarray(7), jnp.full((2, 3), 1.5), jnp.full(2, 1j), jnp.asarray(True), jnp.full((0,), 1)],
    "ordered": lambda: collections.OrderedDict(b=1, a=collections.OrderedDict(z=[KEY])),
    "default": lambda: [collections.defaultdict(list, {1: [2]}), collections.defaultdict(), collections.Counter("aab")],
    "sets": lambda: {"a": {3, 1, "x", (1, 2)}, "b": frozenset([b"x", frozenset([1])]), "c": set()},
    "deque": lambda: (collections.deque([1, {2}], 5), collections.deque(), bytearray(b"abc")),
    "numpy": lambda: [np.float32(1.5), np.bool_(True), np.str_("ä"), np.datetime64("2026"), ml_dtypes.bfloat16(2)],
    "legacy": lambda: np.random.RandomState(3).get_state(),
    "buffer": lambda: [{"image": jnp.full(2, n), "label": n} for n in range(50)],
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_state_comes_back_with_its_types(tmp_path: pathlib.Path, name: str, large: bool) -> None:
    """Also in a second save, a copy, and a large state, which is in an array file."""
    state = {"it": STATES[name](), "buffer": bytes(3 << 20) if large else b"", "last": KEY}
    tr.save(tmp_path / "c", {"data": Loader(state), "w": np.ones(1)})
    tr.convert(tmp_path / "c", tmp_path / "d", rules=[tr.rules.rename("^data$", "x")])
    one = tr.restore(tmp_path / "c", like={"data": Loader(), "w": ...})["data"]
    tr.save_async(tmp_path / "e", {"y": one}).result()
    two = tr.restore(tmp_path / "d", like={"x": Loader(), "w": ...})["x"]
    three = tr.restore(tmp_path / "e", like={"y": Loader()})["y"]
    found = [one.state, two.state, three.state, *tr.restore(tmp_path / "e")["y"], *tr.open(tmp_path / "d")["x"]]
    assert all(exactly(other) == exactly(state) for other in found)
    assert tr.verify(tmp_path / "c").ok and not tr.diff(tmp_path / "c", {"data": Loader(state), "w": np.ones(1)})
    spec_reader.read(tmp_path / "c")  # another reader finds plain values


def test_places_that_are_alike_are_recorded_once(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"data": Loader({"n": 1, "buffer": STATES["buffer"](), "key": KEY})})
    found = json.loads((tmp_path / "c" / "treering.json").read_bytes())["iterators"]["data"]
    assert found["types"] == [{"1/*/0": "jax-weak", "2": "key:threefry2x32"}]


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Record:
    x: int


class MyDict(dict[str, int]):
    pass


def deleted() -> jax.Array:
    array = jnp.ones(2)
    array.delete()
    return array


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "enum": (lambda: Color.RED, "Color"),
    "int enum": (lambda: Level.LOW, "Level"),
    "named tuple": (lambda: Point(1), "Point"),
    "dataclass": (lambda: Record(1), "Record"),
    "subclass": (lambda: MyDict(), "MyDict"),
    "time": (lambda: datetime.datetime(2026, 1, 1), "datetime.datetime"),
    "path": (lambda: pathlib.PurePosixPath("a"), "PurePosixPath"),
    "generator": (lambda: np.random.default_rng(), "numpy.random._generator.Generator"),
    "objects": (lambda: np.array([None]), "an array of dtype object"),
    "masked": (lambda: np.ma.masked_array([1], [True]), "MaskedArray"),
    "factory": (lambda: collections.defaultdict(lambda: 1), "a defaultdict that makes its values by .function"),
    "deleted": (deleted, "a jax.Array that was deleted"),
    "extended": (lambda: jnp.ones(2).astype(fp8_ops.fm32), "dtype fp8_meta32, which only JAX has"),
    "sharded": (lambda: jax.device_put(np.ones(8), jax.NamedSharding(jax.make_mesh((8,), "x"), jax.P("x"))), "several"),
    "odd key": (lambda: {frozenset([1]): 1}, "the key frozenset"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_would_change_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    """The error names the leaf, and the place in its state."""
    make, says = REFUSED[name]
    with pytest.raises(UnsupportedError, match=rf"loop/data: an iterator with .*{says}.*\['it'\]\[0\]"):
        tr.save(tmp_path / "c", {"loop": {"data": Loader({"it": [make()]})}})
    assert not (tmp_path / "c").exists()


def test_more_types_than_a_manifest_takes_are_refused(tmp_path: pathlib.Path) -> None:
    odd = [{n} if n % 2 else n for n in range(30_000)]
    with pytest.raises(UnsupportedError, match="data: an iterator with 15000 tensors, sets or other values"):
        tr.save(tmp_path / "c", {"data": Loader(odd)})


def test_types_that_this_process_cannot_make(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore is an error; readers without a template get the plain value."""
    with jax.enable_x64(True):
        tr.save(tmp_path / "c", {"data": Loader({"wide": jnp.arange(3)})})
    with pytest.raises(
        UnsupportedError, match=r"data: the state .* has a jax.Array of int64, which would become int32"
    ):
        tr.restore(tmp_path / "c", like={"data": Loader()})
    weak = jnp.full(2, 3)
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match=r"data: .* a weakly typed jax.Array of int32"):
        tr.save(tmp_path / "d", {"data": Loader({"weak": weak})})
    assert exactly(tr.restore(tmp_path / "c")["data"][0]["wide"]) == exactly(np.arange(3))
    for bad in ({"0": "later"}, {"7": "jax"}, {"0": "torch"}, {"x": "jax"}, {"0/0": "deque:x"}):
        plain = {"a": [1]}
        assert with_types(plain, bad, exact=False) == {"a": [1]}
        with pytest.raises(UnsupportedError):
            with_types(plain, bad)


def test_what_is_recorded_about_iterators_is_only_information(tmp_path: pathlib.Path) -> None:
    """A manifest in which it has another form is valid. Types that may be missing are not guessed."""
    tr.save(tmp_path / "c", {"data": Loader({"s": {1}}), "w": 1})
    file = tmp_path / "c" / "treering.json"
    manifest = json.loads(file.read_bytes())
    del manifest["xxh3"]
    (types,) = manifest["iterators"]["data"]["types"]
    for recorded, state in (
        (None, {"s": [1]}),
        ([], {"s": [1]}),
        ({"data": 7}, {"s": [1]}),
        ({"data": {"types": 7}}, {"s": [1]}),
        ({"w": {"class": "X"}, "data": {"types": [types], "more": 1}}, {"s": {1}}),
        ({"data": {"types": [types, types]}}, {"s": {1}}),
        ({"data": {"types": [{"0": "of a later release"}]}}, None),
        ({"data": {"types": [{"5": "set"}]}}, None),
    ):
        body = json.dumps({**manifest, "iterators": recorded}).encode()[:-1]
        file.chmod(0o644)
        file.write_bytes(body + b',"xxh3":"%b"}\n' % xxhash.xxh3_64_hexdigest(body).encode())
        assert tr.verify(tmp_path / "c").ok and spec_reader.read(tmp_path / "c")["data"] == [{"s": [1]}]
        assert tr.open(tmp_path / "c")["data"] == [state or {"s": [1]}]
        if state:
            assert tr.restore(tmp_path / "c", like={"data": Loader(), "w": 1})["data"].state == state
        else:
            with pytest.raises(UnsupportedError, match="data: the state of an iterator has"):
                tr.restore(tmp_path / "c", like={"data": Loader(), "w": 1})


hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=9),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    hashable | st.sampled_from([KEY, np.arange(3), np.int8(1)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, max_size=3).map(collections.deque)
    ),
    max_leaves=10,
)


@given(values)
def test_any_nesting_of_types_comes_back(state: Any) -> None:
    content, names = encode_state(state)
    assert exactly(unpack(pack(state))) == exactly(state)
    assert pack(state).digest == pack(unpack(pack(state))).digest
    assert len(names) < 50 and json.dumps(content)


class Tensor:
    """A double of `torch.Tensor` of PyTorch 2.13, for an environment without it: what Treering calls of it."""

    device = types.SimpleNamespace(type="cpu")
    layout, is_nested, requires_grad = "strided", False, False

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)
        self.dtype, self.shape = f"torch.{self._array.dtype.name}", self._array.shape

    def numel(self) -> int:
        return self._array.size

    def numpy(self, *, force: bool = False) -> Any:
        return self._array

    resolve_conj = resolve_neg = contiguous = lambda self: self

    def reshape(self, *shape: Any) -> "Tensor":
        return Tensor(self._array.reshape(*shape))

    def view(self, dtype: Any) -> "Tensor":
        return Tensor(self._array.view(str(dtype).removeprefix("torch.")))


Tensor.__module__ = "torch"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch if it is installed, else a double of it."""
    try:
        import torch as found  # pyright: ignore[reportMissingImports]
    except ImportError:
        found: Any = types.ModuleType("torch")
        found.Tensor, found.strided, found.from_numpy, found.tensor = Tensor, "strided", Tensor, Tensor
        for name in ("uint8", "int64", "float32", "bfloat16", "bool"):
            setattr(found, name, f"torch.{name}")
        found.empty = lambda shape, dtype: Tensor(np.empty(shape, dtype.removeprefix("torch.")))
        monkeypatch.setitem(sys.modules, "torch", found)
    return found


def test_tensors_come_back_as_tensors(tmp_path: pathlib.Path, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of dtypes that NumPy lacks. A reader without PyTorch finds NumPy arrays."""
    bits = torch.tensor(np.arange(6, dtype=np.uint8)).view(torch.bfloat16)
    state = {
        "generator": torch.tensor(np.arange(9, dtype=np.uint8)),
        "deep": [(torch.tensor(np.float32(1.5)), torch.tensor(np.zeros((0, 2), np.int64)))],
        "bfloat16": bits,
        "mask": torch.tensor(np.array([[True, False]])),
    }
    tr.save(tmp_path / "c", {"data": Loader(state)})
    found = tr.restore(tmp_path / "c", like={"data": Loader()})["data"].state
    assert exactly_torch(found) == exactly_torch(state)
    assert exactly_torch(tr.open(tmp_path / "c")["data"][0]) == exactly_torch(state)
    monkeypatch.delitem(sys.modules, "torch")
    plain = tr.open(tmp_path / "c")["data"][0]
    assert plain["generator"].dtype == np.uint8 and plain["bfloat16"].dtype == ml_dtypes.bfloat16
    monkeypatch.setitem(sys.modules, "torch", None)  # not installed
    with pytest.raises(UnsupportedError, match=r"data: the state of an iterator has a torch.Tensor.*install it"):
        tr.restore(tmp_path / "c", like={"data": Loader()})


def exactly_torch(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: exactly_torch(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [exactly_torch(one) for one in value]
    data = value.reshape(-1).view(sys.modules["torch"].uint8).numpy().tobytes() if value.numel() else b""
    return type(value), str(value.dtype), tuple(value.shape), data


def test_tensors_that_would_change_are_refused(tmp_path: pathlib.Path, torch: Any) -> None:
    cases = [
        ("device", types.SimpleNamespace(type="meta"), "on meta, which has no values"),
        ("requires_grad", True, "requires a gradient"),
    ]
    for name, value, says in cases:
        tensor = torch.tensor(np.ones(2, np.float32))
        if type(tensor) is Tensor:
            setattr(tensor, name, value)
        elif name == "device":
            tensor = tensor.to("meta")
        else:
            tensor.requires_grad_()
        with pytest.raises(UnsupportedError, match=rf"data: an iterator with a torch.Tensor .*{says}.*\['t'\]"):
            tr.save(tmp_path / "c", {"data": Loader({"t": tensor})})


def test_a_tensor_as_a_leaf_is_named(tmp_path: pathlib.Path, torch: Any) -> None:
    """As a leaf of a state and of a template. Its dtype is none of NumPy's."""
    tensor, advice = torch.tensor(np.ones(2, np.float32)), r"w: .*torch\.Tensor.*x\.numpy\(force=True\)"
    with pytest.raises(UnsupportedError, match=advice):
        tr.save(tmp_path / "c", {"w": tensor})
    tr.save(tmp_path / "c", {"w": tensor.numpy(force=True)})
    with pytest.raises(MismatchError, match=advice):
        tr.restore(tmp_path / "c", {"w": tensor})
    assert tr.restore(tmp_path / "c", {"w": tensor.numpy(force=True)})["w"].tolist() == [1, 1]


@pytest.mark.slow
def test_the_types_of_several_processes(tmp_path: pathlib.Path) -> None:
    """Process 0 records the types of the states of all processes, also of states in array files."""
    body = """
import collections
class Loader:
    def __init__(self, state=None):
        self.state = state
    def get_state(self):
        return self.state
    def set_state(self, state):
        self.state = state
def tree():
    kind = [collections.OrderedDict, dict][INDEX]
    return {name: Loader(kind(a={INDEX}, b=bytes(size))) for name, size in (("small", 0), ("large", 3 << 20))}
w = put(np.ones((4, 2), np.float32), P("x"))
tr.save(tmp / "c", {**tree(), "w": w}, timeout=20)
found = tr.restore(tmp / "c", like={"small": Loader(), "large": Loader(), "w": ...})
for name, one in tree().items():
    assert type(found[name].state) is type(one.state) and found[name].state == one.state
report(None)
"""
    run_job(tmp_path, body, processes=2)
    for states in (tr.open(tmp_path / "c")["small"], tr.restore(tmp_path / "c")["large"]):
        assert [type(state) for state in states] == [collections.OrderedDict, dict]
        assert [state["a"] for state in states] == [{0}, {1}]
