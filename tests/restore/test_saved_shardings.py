"""Tests recorded shardings, and restores that place arrays where they were."""

import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
import zygote
from treering.errors import MismatchError

pytestmark = pytest.mark.compat


@pytest.fixture
def spread(tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    """Saves arrays on a mesh of 4 x 2 devices, and arrays elsewhere."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    tree = {
        "w": put(jax.numpy.arange(64.0).reshape(8, 8), "x", "y"),
        "both": put(jax.numpy.arange(16), ("x", "y")),
        "rows": put(jax.numpy.ones((4, 3), jax.numpy.bfloat16), "x"),
        "replicated": put(jax.numpy.ones(3)),
        "keys": put(jax.random.split(jax.random.key(0), 8), "x"),
        "alone": jax.numpy.ones(2),
        "numpy": np.arange(3),
        "step": 7,
    }
    tr.save(tmp_path / "c", tree)
    return tmp_path / "c", tree


def assert_as_saved(found: Any, tree: Any) -> None:
    for name, leaf in tree.items():
        assert type(found[name]) is type(leaf)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            assert found[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
    plain = {name: leaf for name, leaf in tree.items() if name != "keys"}
    jax.tree.map(np.testing.assert_array_equal, {name: found[name] for name in plain}, plain)
    assert (jax.random.key_data(found["keys"]) == jax.random.key_data(tree["keys"])).all()


@pytest.mark.skipif(not hasattr(jax.sharding.PartitionSpec, "partitions"), reason="JAX 0.9 has no reduced axes")
def test_reduced_axes_are_a_part_of_the_type(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    specs = [jax.P(None, reduced={"x"}), jax.P("y", reduced={"x"}), jax.P(reduced={"x", "y"})]
    tree = [jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, spec)) for spec in specs]
    tr.save(tmp_path / "c", tree)
    for found in (tr.restore(tmp_path / "c", tree), tr.restore(tmp_path / "c", tree, sharding="saved")):
        assert [*map(jax.typeof, found)] == [*map(jax.typeof, tree)]
        jax.tree.map(np.testing.assert_array_equal, found, tree)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, tree)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        found, _ = ckpts.restore_or_init(lambda: [jax.numpy.zeros(8)] * 3)
    assert [*map(jax.typeof, found)] == [*map(jax.typeof, tree)]


def test_a_target_of_partial_sums_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = NamedSharding(mesh, jax.P(None, unreduced={"x"}))
    tr.save(tmp_path / "c", {"grads": np.ones(4, np.float32)})
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    like = {"grads": jax.ShapeDtypeStruct((4,), np.float32, sharding=place)}
    for options in ({"like": like}, {"like": {"grads": shape}, "sharding": place}, {"sharding": place}):
        with pytest.raises(MismatchError, match=r"grads: .*partial sums over the mesh axes x"):
            tr.restore(tmp_path / "c", **options)


@pytest.mark.long
def test_arrays_go_where_they_were(spread: Any, tmp_path: pathlib.Path) -> None:
    path, tree = spread
    assert_as_saved(tr.restore(path, sharding="saved"), tree)  # on a mesh like the saved one
    shapes = tr.open(path).abstract()
    found = tr.restore(path, {**shapes, "numpy": tree["numpy"]}, sharding="saved")
    assert_as_saved({**found, "alone": tree["alone"]}, tree)
    names = [tr.rules.rename("^w$", "weight"), tr.rules.drop("step"), tr.rules.cast("weight", "bfloat16")]
    found = tr.restore(path, rules=names, sharding="saved")
    assert found["weight"].sharding.is_equivalent_to(tree["w"].sharding, 2) and found["weight"].dtype == "bfloat16"
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        assert ckpts.restore_or_init(lambda: {"a": 1}, sharding="saved") == ({"a": 1}, 0)
        ckpts.save(1, tree)
        assert_as_saved(ckpts.restore(sharding="saved"), tree)


@pytest.mark.long
@pytest.mark.whole
def test_the_mesh_that_is_set_comes_first(spread: Any) -> None:
    path, tree = spread
    mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        found = tr.restore(path, sharding="saved")
        assert found["w"].sharding == NamedSharding(mesh, PartitionSpec("x", "y"))
        assert (np.asarray(found["w"]) == np.asarray(tree["w"])).all()
    with (
        jax.set_mesh(jax.make_mesh((8,), ("z",))),
        pytest.raises(MismatchError, match="does not fit the mesh that is set"),
    ):
        tr.restore(path, sharding="saved")


def test_what_cannot_go_where_it_was_is_refused(
    spread: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = spread
    with pytest.raises(MismatchError, match="sharding='save': expected 'saved'"):
        tr.restore(path, sharding="save")
    tr.save(tmp_path / "plain.safetensors", {"a": np.ones(2)})
    with pytest.raises(MismatchError, match="expected arrays whose sharding is recorded, found none"):
        tr.restore(tmp_path / "plain.safetensors", sharding="saved")
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)  # a mock: a machine with fewer devices
    with pytest.raises(MismatchError, match=r"a mesh of 8 devices \(x=4, y=2\) in a job with 4"):
        tr.restore(path, sharding="saved")


@pytest.mark.parametrize("axes", [(0, 1), (("a", 1), "b"), ("a", 1)])
def test_mesh_with_non_text_axis_names_is_not_recorded(tmp_path: pathlib.Path, axes: Any) -> None:
    """A mesh whose axis names are not text is not recorded."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), axes)
    for spec in (PartitionSpec(), PartitionSpec(axes[1])):
        x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec))
        tr.save(tmp_path / "c", {"x": x}, overwrite=True)
        assert (tr.restore(tmp_path / "c")["x"] == np.asarray(x)).all()


def test_numpy_states_begin_no_backend(tmp_path: pathlib.Path) -> None:
    """A backend takes memory of accelerators, and its start waits for all processes of a job."""
    script = f"""
import numpy as np, treering as tr
from jax._src import xla_bridge
state = {{"w": np.zeros(3), "n": 1}}
with tr.Checkpointer({str(tmp_path / "run")!r}) as ckpts:
    ckpts.save(1, state)
    ckpts.restore(state)
    ckpts.restore_or_init(lambda: state)
assert not xla_bridge.backends_are_initialized()
"""
    code, output = zygote.Process(script, os.environ).communicate(60)
    assert code == 0, output
