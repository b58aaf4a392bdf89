"""Tests where a restore places arrays, as the template, `sharding=` and the checkpoint say."""

import contextlib
import json
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

import treering as tr
from jobs import run_job
from treering._restore import array_placement
from treering.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.compat

P = jax.P


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def test_a_sharding_makes_jax_arrays_of_numpy_leaves(tmp_path: pathlib.Path, mesh: Mesh) -> None:
    where = NamedSharding(mesh, P("x"))
    tree = {"a": np.arange(16.0, dtype=np.float32), "b": np.ones((8, 2), np.int32), "s": np.float32(2), "n": 3}
    tr.save(tmp_path / "c", tree)
    found = tr.restore(tmp_path / "c", like=tree, sharding={"a": where, "b": None, "s": None, "n": None})
    assert isinstance(found["a"], jax.Array) and found["a"].sharding == where
    assert (np.asarray(found["a"]) == tree["a"]).all()
    assert type(found["b"]) is np.ndarray and type(found["s"]) is np.float32 and found["n"] == 3
    found = tr.restore(tmp_path / "c", like=tree, sharding=NamedSharding(mesh, P()))
    assert all(isinstance(found[name], jax.Array) for name in "abs") and type(found["n"]) is int
    wish = lambda path, shape, dtype: where if shape and shape[0] % 8 == 0 and dtype == "int32" else None  # noqa: E731
    found = tr.restore(tmp_path / "c", like=tree, sharding=wish)
    assert type(found["a"]) is np.ndarray and found["b"].sharding == where
    tr.save(tmp_path / "wide", {"a": np.ones(8)})
    with pytest.raises(MismatchError, match="jax_enable_x64"):
        tr.restore(tmp_path / "wide", like={"a": np.ones(8)}, sharding=where)


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", None)])
def test_sharding_with_too_many_axes_names_arrays(
    tmp_path: pathlib.Path, mesh: Mesh, spec: jax.P, template: bool
) -> None:
    """The error about a spec with too many axes names the arrays and an argument that works."""
    state = {"count": jnp.int32(3), "w": jnp.zeros((8, 8)), "moments": {"b": jnp.zeros(8), "scale": jnp.zeros(())}}
    tr.save(tmp_path / "c", state)
    fitting = {"w": True, "moments/b": spec[0] == "x"}
    for ambient in (False, True):
        with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
            given = spec if ambient else NamedSharding(mesh, spec)
            with pytest.raises(MismatchError, match="expected shardings that fit the shapes:") as error:
                tr.restore(tmp_path / "c", state if template else None, sharding=given)
            lines = str(error.value).splitlines()
            named = {line.split(":")[0].strip() for line in lines[1:-1]}
            assert named == {"count", "moments/scale", *(path for path, fits in fitting.items() if not fits)}
            assert f"count: [] on {spec}: the array has 0 axes, and the spec divides axis {spec.index('x')}" in lines[1]
            call = lines[-1].removeprefix("sharding=").removesuffix(" leaves out arrays with fewer axes")
            follow = eval(call, {"P": jax.P, "PartitionSpec": jax.P, "NamedSharding": NamedSharding, "mesh": mesh})
            found = tr.restore(tmp_path / "c", state if template else None, sharding=follow)
            for path, array in (("w", found["w"]), ("moments/b", found["moments"]["b"])):
                assert (not array.sharding.is_fully_replicated) == fitting[path]


@pytest.mark.long
def test_saved_places_of_every_kind(tmp_path: pathlib.Path, mesh: Mesh) -> None:
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    backwards = Mesh(np.array(jax.devices()[::-1]), ("x",))
    four = Mesh(np.array(jax.devices()[2:6]), ("x",))
    device = jax.devices()[3]
    tree = {
        "uncommitted": jnp.ones(2),
        "device": jax.device_put(jnp.ones(2), device),
        "host": jax.device_put(jnp.ones(2), SingleDeviceSharding(device, memory_kind="pinned_host")),
        "mesh": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, "x"), memory_kind="pinned_host")),
        "explicit": jax.device_put(jnp.ones((8, 8)), NamedSharding(explicit, P(("x", "y")))),
        "backwards": jax.device_put(jnp.arange(8), NamedSharding(backwards, P("x"))),
        "four": jax.device_put(jnp.arange(8), NamedSharding(four, P())),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x"))),
        "layout": jax.device_put(jnp.arange(6.0).reshape(2, 3), Format(Layout((1, 0)), SingleDeviceSharding(device))),
    }
    with jax.default_device(jax.devices()[5]):
        tree["elsewhere"] = jnp.ones(2)
    tree["free layout"] = array_placement.uncommitted(tree["layout"])
    tree["free host"] = array_placement.uncommitted(tree["host"])
    tr.save(tmp_path / "c", tree)
    tr.save(tmp_path / "copy", tr.open(tmp_path / "c"))
    tr.save(tmp_path / "inlined", {**tr.open(tmp_path / "c")})
    for name in ("c", "copy", "inlined"):
        for like in (None, jax.eval_shape(lambda: tree)):
            found = tr.restore(tmp_path / name, like, sharding="saved")
            for path, leaf in tree.items():
                assert found[path].sharding == leaf.sharding and found[path].committed == leaf.committed, path
                assert jax.typeof(found[path]) == jax.typeof(leaf), path
            assert found["layout"].format == tree["layout"].format
            assert found["layout"].tolist() == tree["layout"].tolist()
            assert found["explicit"].sharding.mesh.axis_types == explicit.axis_types


@pytest.mark.long
def test_a_format_is_a_sharding_with_a_layout(tmp_path: pathlib.Path, mesh: Mesh) -> None:
    """`sharding=` takes what `jax.device_put` takes: for all arrays, by path, as a tree, and without a template."""
    device = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[1]))
    spread = Format(Layout((1, 0)), NamedSharding(mesh, P("x")))
    tree = {"a": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b": np.ones((8, 2), np.float32)}
    tr.save(tmp_path / "c", tree)
    for wish in (device, spread, lambda path, shape, dtype: spread, {"a": device, "b": spread}):
        for like in ({"like": jax.tree.map(jnp.zeros_like, tree)}, {}):
            found = tr.restore(tmp_path / "c", sharding=wish, **like)
            for name, array in found.items():
                wanted = wish[name] if isinstance(wish, dict) else spread if callable(wish) else wish
                assert array.format.layout.major_to_minor == (1, 0) and array.sharding == wanted.sharding
                assert np.array_equal(array, tree[name])


def test_a_layout_of_other_axes_is_refused_by_name(tmp_path: pathlib.Path, mesh: Mesh) -> None:
    tr.save(tmp_path / "c", {"b": jnp.ones(4), "w": jnp.arange(8.0).reshape(4, 2)})
    place = NamedSharding(mesh, P())
    for order in ((0,), (0, 2, 1), (0, 0)):
        wish = Format(Layout(order), place)
        like = {"b": jnp.ones(4), "w": jax.ShapeDtypeStruct((4, 2), np.float32, sharding=wish)}
        for restore in (
            lambda like=like: tr.restore(tmp_path / "c", like),
            lambda wish=wish: tr.restore(tmp_path / "c", sharding={"b": None, "w": wish}),
            lambda wish=wish: tr.Checkpointer(tmp_path / "run").restore_or_init(
                lambda: {"w": jnp.ones((4, 2))}, sharding=wish
            ),
        ):
            with pytest.raises(MismatchError, match=r"w: expected a layout that orders the 2 axes of .4, 2.") as error:
                restore()
            assert f"found the order {order}" in str(error.value)


def test_a_spec_of_partial_sums_is_refused(tmp_path: pathlib.Path) -> None:
    """A spec refers to the mesh that is set. JAX would raise NotImplementedError."""
    tr.save(tmp_path / "c", {"w": jnp.ones((4, 4))})
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(MismatchError, match="w: expected a sharding of complete values"):
        tr.restore(tmp_path / "c", sharding=P(unreduced={"d"}))
    with jax.set_mesh(mesh), pytest.raises(MismatchError, match="does not fit the mesh that is set: Reduced axes x"):
        tr.restore(tmp_path / "c", sharding=P(reduced={"x"}))


@pytest.mark.slow
def test_arrays_of_several_processes_keep_their_layout(tmp_path: pathlib.Path) -> None:
    body = """
    from jax.experimental.layout import Format, Layout
    place = Format(Layout((1, 0)), NamedSharding(mesh(2), P("x")))
    init = lambda: {"w": jax.jit(lambda: jnp.arange(32.0).reshape(4, 8), out_shardings=place)()}
    with tr.Checkpointer(tmp / "run") as ckpts:
        state, _ = ckpts.restore_or_init(init)
        ckpts.save(1, state)
    with tr.Checkpointer(tmp / "run") as ckpts:
        again, _ = ckpts.restore_or_init(init)
    found = [again["w"], tr.restore(tmp / "run", sharding="saved")["w"], tr.restore(tmp / "run", state)["w"]]
    report([[array.format.layout.major_to_minor, same(array, np.arange(32, dtype=np.float32).reshape(4, 8))]
            for array in (state["w"], *found)])
    """
    for result in run_job(tmp_path, body, processes=2, devices=1):
        assert result.report == [[[1, 0], True]] * 4


def test_a_layout_of_the_template_is_kept(tmp_path: pathlib.Path, mesh: Mesh) -> None:
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.arange(64.0).reshape(8, 8)}
    one = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[1]))
    spread = Format(Layout((1, 0)), NamedSharding(mesh, P("x")))
    tr.save(tmp_path / "c", tree)
    arrays = {"a": jax.device_put(tree["a"], one), "b": jax.device_put(tree["b"], spread)}
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format) for name, x in arrays.items()}
    for like in (arrays, shapes):
        found = tr.restore(tmp_path / "c", like)
        for name, array in arrays.items():
            assert found[name].format == array.format and found[name].tolist() == array.tolist()


def test_spread_arrays_without_placement_are_named(
    tmp_path: pathlib.Path, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names arrays that were spread over devices and now have no place."""
    tree = {"w": jax.device_put(jnp.ones(8), NamedSharding(mesh, P("x"))), "b": jnp.ones(3)}
    tr.save(tmp_path / "c", tree)
    shapes = jax.eval_shape(lambda: {"w": jnp.ones(8), "b": jnp.ones(3)})
    tr.restore(tmp_path / "c", like=shapes)
    (record,) = [one for one in caplog.records if "were spread over devices when they were saved" in one.getMessage()]
    assert record.levelno == logging.WARNING and "1 arrays" in record.getMessage() and "sharding='saved'" in caplog.text
    caplog.clear()
    for like, options in ((tree, {}), (shapes, {"sharding": "saved"}), (None, {}), (tr.open(tmp_path / "c"), {})):
        if not isinstance(like, tr.Checkpoint):
            tr.restore(tmp_path / "c", like, **options)
    assert not caplog.records


@pytest.mark.long
@pytest.mark.parametrize("eager", [False, True])
def test_partition_metadata_of_nnx_places_shapes(tmp_path: pathlib.Path, eager: bool) -> None:
    def make() -> nnx.Module:
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        return nnx.Linear(8, 8, rngs=nnx.Rngs(0), kernel_init=kernel)

    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with nnx.use_eager_sharding(eager), jax.set_mesh(mesh):
        shapes = nnx.eval_shape(make)
        tr.save(tmp_path / "c", make())
        for like in (shapes, nnx.state(shapes)):
            found = tr.restore(tmp_path / "c", like=like)
            kernel, bias = (getattr(found, name, None) or found[name] for name in ("kernel", "bias"))
            assert kernel.get_value().sharding == NamedSharding(mesh, P(None, "model"))
            assert bias.get_value().sharding == NamedSharding(mesh, P())


@pytest.mark.long
def test_unreduced_arrays_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P(None, "d")))
        y = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("d", None)))
        out = P(None, None, unreduced={"d"})
        partial = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), out_sharding=out))(x, y)
        for save in (tr.save, lambda *args: tr.save_async(*args).result()):
            with pytest.raises(
                UnsupportedError, match=r"grads: an array of partial sums over the mesh axes d"
            ) as error:
                save(tmp_path / "c", {"w": x, "grads": partial})
            assert "jax.reshard" in str(error.value) and not (tmp_path / "c").exists()


HOSTILE: list[dict[str, Any]] = [
    {"mesh": {"x": 1 << 53}, "spec": ["x"]},
    {"mesh": {"x": 2}, "spec": ["y"]},
    {"mesh": {"x": 2}, "spec": ["x", "x"]},
    {"mesh": {"x": 2}, "spec": ["x", None, None, None]},
    {"mesh": {"x": 2}, "spec": ["x"], "devices": [1 << 53, 0], "job_devices": 1 << 53},
    {"mesh": {"x": 3}, "spec": ["x"], "job_devices": 8},
    {"mesh": {}, "spec": []},
    {"device": 1 << 53},
    {"memory_kind": "none", "device": 0},
    {"platform": "quantum", "device": 0},
    {"layout": [5, 5]},
    {"unrecorded": "a reason"},
]
FOLLOWED_ON_REQUEST = ({"mesh": {}, "spec": []}, {"layout": [5, 5]})


@pytest.mark.parametrize("place", HOSTILE, ids=str)
def test_a_place_that_this_job_does_not_have_changes_no_value(
    tmp_path: pathlib.Path, place: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from treering.formats.treering import manifest

    step = tmp_path / "run" / "step-00000001"
    tr.save(step, {"w": jnp.arange(8.0)}, step=1)
    content = json.loads((step / "treering.json").read_bytes())
    content["placement"]["places"] = [place]
    del content["xxh3"]
    body = json.dumps(content, separators=(",", ":")).encode()[:-1]
    (step / "treering.json").chmod(0o644)
    (step / "treering.json").write_bytes(body + b',"xxh3":"' + manifest.xxh3(body).encode() + b'"}\n')
    assert tr.verify(step).ok and tr.restore(step)["w"].tolist() == list(range(8))
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        state, _ = ckpts.restore_or_init(lambda: {"w": jnp.zeros(8)})
        assert state["w"].tolist() == list(range(8))
    followed = place == {"layout": [5, 5]}
    assert ("cannot be placed where they were saved" in caplog.text) is not followed
    if place in FOLLOWED_ON_REQUEST:
        assert tr.restore(step, sharding="saved")["w"].tolist() == list(range(8))
    else:
        with pytest.raises(MismatchError, match="sharding='saved': expected a job that has every saved place"):
            tr.restore(step, sharding="saved")
