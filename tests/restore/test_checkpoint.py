"""Tests open checkpoints."""

import copy
import functools
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from treering import Checkpoint
from treering._core.entries import ValueEntry
from treering._core.source import subtree_of
from treering.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError

TREE = {
    "params": {
        "layers": [{"w": np.arange(24, dtype=np.int16).reshape(2, 3, 4)}, {"w": np.ones(3, np.float32)}],
        "b": jnp.ones(2),
    },
    "step": 3,
    "key": jax.random.key(5),
    "none": None,
}


@pytest.fixture
def ckpt(tmp_path: pathlib.Path) -> Any:
    tr.save(tmp_path / "c", TREE, step=9)
    return tr.open(tmp_path / "c")


def test_it_is_a_mapping_of_paths(ckpt: Any) -> None:
    assert len(ckpt) == 6
    assert list(ckpt) == ["key", "none", "params/b", "params/layers/0/w", "params/layers/1/w", "step"]
    assert "params/b" in ckpt and "params" not in ckpt
    assert ckpt["step"] == 3 and ckpt["none"] is None
    assert (ckpt.format, ckpt.step, ckpt.metrics, ckpt.metadata) == ("treering", 9, {}, None)
    with pytest.raises(KeyError, match="it is a container of 3 leaves"):
        ckpt["params"]
    with pytest.raises(KeyError, match="the closest name is params/b"):
        ckpt["param/b"]


INDICES = [
    ...,
    0,
    -1,
    np.int64(1),
    slice(1, 2),
    (slice(None), slice(2, 0, -1)),
    (..., slice(None, None, -2)),
    (1, ..., 3),
    (0, 1, 2),
    (0, 1, 2, ...),
    (slice(5, 9),),
    (slice(None), slice(0, 0)),
]


@pytest.mark.parametrize("index", INDICES)
def test_slices_are_those_of_numpy(ckpt: Any, index: Any) -> None:
    lazy, array = ckpt["params/layers/0/w"], TREE["params"]["layers"][0]["w"]
    found = lazy[index]
    assert type(found) is type(array[index])
    np.testing.assert_array_equal(found, array[index])
    assert found.shape == array[index].shape


@pytest.mark.parametrize("index", [..., ()])
def test_slices_of_arrays_without_axes_are_those_of_numpy(tmp_path: pathlib.Path, index: Any) -> None:
    tr.save(tmp_path / "ckpt", {"w": np.array(2.5, np.float32)})
    found = tr.open(tmp_path / "ckpt")["w"][index]
    assert type(found) is type(np.array(2.5, np.float32)[index]) and found == 2.5


@pytest.mark.parametrize("index", [2, (0, 3), (0, 0, 0, 0), (..., ...), "a", [0, 1], None, True, 1.0])
def test_other_indices_are_refused(ckpt: Any, index: Any) -> None:
    with pytest.raises((IndexError, TypeError)):
        ckpt["params/layers/0/w"][index]


def test_the_error_of_an_index_says_what_is_wrong(ckpt: Any) -> None:
    array = ckpt["params/layers/0/w"]
    for index, axis in ((2, 0), (-3, 0), ((0, 3), 1), ((..., np.int64(4)), 2)):
        with pytest.raises(IndexError, match=rf"index -?\d is out of bounds for axis {axis} with size {2 + axis}$"):
            array[index]
    for other in (np.ones(2, bool), np.array([0, 1]), (0, np.array([0]))):
        with pytest.raises(TypeError, match="only integers, slices and an ellipsis"):
            array[other]
    assert array[np.int64(1), np.array(2)].shape == (4,)


@pytest.mark.parametrize("key", [0, ("params", "layers"), None])
def test_a_key_that_is_no_text_is_an_error_of_a_mapping(ckpt: Any, key: Any) -> None:
    assert key not in ckpt and ckpt.get(key) is None
    with pytest.raises(KeyError, match=r"there is no leaf .*; a path is text, such as 'key'"):
        ckpt[key]


def test_an_attribute_that_is_a_part_names_the_call(ckpt: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'params'; in Treering: ckpt\.at\('params'\)$"):
        _ = ckpt.params
    tr.save(tmp_path / "one", {"w": np.ones(3)})
    with pytest.raises(AttributeError, match=r"no attribute 'w'; in Treering: ckpt\['w'\]$"):
        _ = tr.open(tmp_path / "one").w
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = ckpt.nothing
    assert copy.copy(ckpt).at("params").path == ckpt.path and not hasattr(ckpt, "__array__")


def test_lazy_arrays_have_what_arrays_have(ckpt: Any) -> None:
    lazy = ckpt["params/layers/0/w"]
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.size, lazy.nbytes, len(lazy)) == ((2, 3, 4), np.int16, 3, 24, 48, 2)
    assert np.asarray(lazy).tolist() == TREE["params"]["layers"][0]["w"].tolist()
    assert np.asarray(lazy, np.float32).dtype == np.float32
    assert repr(lazy) == "<LazyArray 'params/layers/0/w' int16[2,3,4]>"
    with pytest.raises(ValueError, match="without reading it"):
        np.array(lazy, copy=False)
    with pytest.raises(TypeError):
        len(tr.open(ckpt.path)["params/b"][0])


def test_parts_and_selections(ckpt: Any) -> None:
    part = ckpt.at("params/layers")
    assert list(part) == ["0/w", "1/w"]
    assert list(part.at("1")) == ["w"]
    assert list(ckpt.at("step")) == [""] and ckpt.at("step").restore() == 3
    assert isinstance(part.restore(), list) and part.restore()[1]["w"].tolist() == [1, 1, 1]
    assert list(ckpt.select("**/w")) == ["params/layers/0/w", "params/layers/1/w"]
    assert list(ckpt.select(["step", "*/b"])) == ["params/b", "step"]
    assert ckpt.select("params/b").restore()["params"]["b"].tolist() == [1, 1]
    with pytest.raises(NotFoundError, match="closest: params/layers"):
        ckpt.at("params/layer")


def test_an_abstract_tree_is_a_template(ckpt: Any) -> None:
    shapes = ckpt.abstract()
    assert shapes["params"]["layers"][0]["w"] == jax.ShapeDtypeStruct((2, 3, 4), np.int16)
    assert shapes["key"].dtype == TREE["key"].dtype and shapes["step"] == 3
    found = ckpt.restore(like=shapes)
    assert isinstance(found["params"]["layers"][0]["w"], jax.Array)
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(TREE["key"]).tolist()


def test_printing_shows_names_and_shapes(ckpt: Any) -> None:
    assert str(ckpt) == (
        f"Checkpoint {ckpt.path} (treering, step 9, 6 leaves)\n"
        "  key                key<threefry2x32>[]\n"
        "  none               none None\n"
        "  params/b           float32[2]\n"
        "  params/layers/0/w  int16[2,3,4]\n"
        "  params/layers/1/w  float32[3]\n"
        "  step               int 3"
    )
    assert "at params, 9" not in str(ckpt.at("params")) and ", at params (" in str(ckpt.at("params"))


def test_printing_shows_the_names_of_functions(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"f": jax.numpy.sum, "g": functools.partial(len), "long": type("x" * 99, (), {})})
    shown = ["  f     function sum", "  g     function len", "  long  function " + "x" * 60]
    assert str(tr.open(tmp_path / "c")).splitlines()[1:] == shown
    odd = Checkpoint(subtree_of(tr.open(tmp_path / "c")._source, {"a": ValueEntry("a", "function", "x\ny")}, None))
    assert str(odd).splitlines()[1:] == ["  a  function"]  # No release of Treering has written this.


def test_a_run_opens_at_its_latest_good_step(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    for n in (0, 1, 2):
        tr.save(tmp_path / f"step-{n:08}", {"n": n}, step=n)
    assert tr.open(tmp_path)["n"] == 2
    assert tr.open(tmp_path, step=0)["n"] == 0
    assert tr.restore(tmp_path, step=1) == {"n": 1}
    with pytest.raises(NotFoundError, match="expected step 5, found 0, 1, 2"):
        tr.open(tmp_path, step=5)
    with pytest.raises(MismatchError, match="this is one checkpoint"):
        tr.open(tmp_path / "step-00000001", step=1)
    manifest = tmp_path / "step-00000002" / "treering.json"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert tr.open(tmp_path)["n"] == 1
    assert "step 2 is damaged" in caplog.text
    with pytest.raises(CorruptError):
        tr.open(tmp_path, step=2)


@pytest.mark.parametrize("content", [None, "empty", "file", "other"])
def test_where_there_is_no_checkpoint(tmp_path: pathlib.Path, content: str | None) -> None:
    path = tmp_path / "x"
    if content == "file":
        path.write_text("hello")
    elif content:
        path.mkdir()
        if content == "other":
            (path / "arrays-000000-00000-of-00001.safetensors").write_text("left over")
    for use in (tr.open, tr.restore, tr.verify):
        with pytest.raises(UnsupportedError if content == "file" else NotFoundError):
            use(path)
    assert tr.steps(path) == []


def test_steps_are_committed_directories_alone(tmp_path: pathlib.Path) -> None:
    for name in ("step-00000010", "step-9", "notes", "12.tmp"):
        tr.save(tmp_path / name, {"x": 1})
    (tmp_path / "step-00000011").mkdir()
    (tmp_path / "step-12").write_text("a file")
    assert tr.steps(tmp_path) == [9, 10]


SMALL = """
import sys, time
import treering as tr
loaded = [name for name in ("jax", "jaxlib", "numpy", "tensorstore", "flax") if name in sys.modules]
assert not loaded, loaded
tr.steps(sys.argv[1])
assert "jax" not in sys.modules
ckpt = tr.open(sys.argv[1])
print(ckpt["x"][1:3], len(ckpt))
assert "jax" not in sys.modules, "reading NumPy arrays needs no JAX"
"""


@pytest.mark.long
def test_importing_loads_nothing_heavy_and_reading_needs_no_jax(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"x": np.arange(4)})
    done = subprocess.run([sys.executable, "-c", SMALL, str(tmp_path / "c")], capture_output=True, text=True)
    assert done.stdout == "[1 2] 1\n", done.stderr


@pytest.mark.long
def test_an_abstract_tree_is_a_template_for_what_jax_has_not(tmp_path: pathlib.Path) -> None:
    tree = {
        "wide": np.arange(3),
        "date": np.array(["2020-01-01"], "M8[D]"),
        "text": np.array(["a", "bc"]),
        "complex": np.zeros((2, 0), complex),
        "large": np.zeros((1 << 20,), np.float64),
        "jax": jax.numpy.ones(2),
    }
    tr.save(tmp_path / "c", tree)
    shapes = tr.open(tmp_path / "c").abstract()
    assert isinstance(shapes["jax"], jax.ShapeDtypeStruct) and shapes["large"].strides == (0,)
    for found in (tr.restore(tmp_path / "c", shapes), tr.open(tmp_path / "c").restore(shapes, mmap=False)):
        assert {name: (type(a), a.dtype, a.tolist()) for name, a in found.items() if name != "jax"} == {
            name: (np.ndarray, a.dtype, a.tolist()) for name, a in tree.items() if name != "jax"
        }
        assert found["wide"].flags.writeable and isinstance(found["jax"], jax.Array)
