"""Copies and conversions of checkpoints, and runs that other libraries began."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import treering as tr
from helpers import assert_same
from treering import formats, rules
from treering.errors import ExistsError, MismatchError, NotFoundError, UnsupportedError


def state() -> dict[str, Any]:
    return {
        "params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": jnp.arange(4, dtype=jnp.bfloat16)},
        "list": [np.zeros((0, 3), np.int8), np.float64(2.5), (), {"deep": None}],
        "key": jax.random.key(3),
        "step": 2**60,
        "nan": float("nan"),
        "large": np.random.default_rng(0).random((5000, 1001), dtype=np.float32),  # It has more than one slice.
        "function": len,
    }


@pytest.mark.long
def test_a_copy_of_a_checkpoint_is_equal_to_it(tmp_path: pathlib.Path) -> None:
    tree = state()
    tr.save(tmp_path / "a", tree, step=7, metrics={"loss": 0.5}, metadata={"lr": [1, None]})
    ways = {
        "convert": lambda dst: tr.convert(tmp_path / "a", dst),
        "save": lambda dst: tr.save(dst, tr.open(tmp_path / "a")),
        "async": lambda dst: tr.save_async(dst, tr.open(tmp_path / "a")).result(),
        "little memory": lambda dst: tr.convert(tmp_path / "a", dst, memory_limit=1),
    }
    for name, copy in ways.items():
        report = copy(tmp_path / name)
        copied = tr.open(tmp_path / name)
        assert not tr.diff(tmp_path / "a", copied) and tr.verify(tmp_path / name).ok
        assert (
            (copied.step, copied.metrics, copied.metadata)
            == (7, {"loss": 0.5}, {"lr": [1, None]})
            == (
                report.step,
                copied.metrics,
                copied.metadata,
            )
        )
        assert_same(tr.restore(tmp_path / name, tree), tree)
        assert len(list((tmp_path / name).iterdir())) == 2
    tr.save(tmp_path / "other", tr.open(tmp_path / "a"), step=8, metrics={}, metadata="x")
    other = tr.open(tmp_path / "other")
    assert (other.step, other.metrics, other.metadata) == (8, {}, "x")


def test_parts_casts_and_selections(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "a", state())
    tr.convert(tmp_path / "a", tmp_path / "params", at="params", dtype="float16")
    found = tr.restore(tmp_path / "params")
    assert {name: array.dtype.name for name, array in found.items()} == {"b": "float16", "w": "float16"}
    tr.save(tmp_path / "some", tr.open(tmp_path / "a").select("**/w"))
    assert list(tr.open(tmp_path / "some")) == ["params/w"]


@pytest.mark.long
def test_the_format_is_what_is_asked_for_or_what_the_suffix_says(tmp_path: pathlib.Path) -> None:
    tree = {"w": np.ones((2, 3), np.float32)}
    for path, wish, expected in [
        ("a", None, "treering"),
        ("b.safetensors", None, "safetensors"),
        ("c.msgpack", None, "flax"),
        ("d.eqx", None, "equinox"),
        ("e.safetensors", "treering", "treering"),
        ("f", "flax", "flax"),
        ("g", "easylm", "fjformer"),
    ]:
        tr.save(tmp_path / path, tree, format=wish)
        assert tr.open(tmp_path / path).format == expected
        assert_same(tr.restore(tmp_path / path, tree), tree)
        tr.save_async(tmp_path / ("async-" + path), tree, format=wish).result()
        assert_same(tr.restore(tmp_path / ("async-" + path), tree), tree)
    with pytest.raises(MismatchError, match="format='hdf5': expected one of 'treering'"):
        tr.save(tmp_path / "x", tree, format="hdf5")
    with pytest.raises(MismatchError, match="max_shard_size: the native format has no such option"):
        tr.save(tmp_path / "x", tree, max_shard_size=100)
    with pytest.raises(MismatchError):
        tr.save(tmp_path / "x.safetensors", tree, shard_size=100)
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.safetensors").exists()


def test_async_save_in_other_format_copies_at_the_call(tmp_path: pathlib.Path) -> None:
    """A background save in another format writes the values at the time of the call."""
    host, device = np.arange(5.0), jnp.arange(6.0)
    pending = tr.save_async(tmp_path / "a.safetensors", {"host": host, "device": device})
    host[:] = 0
    device.delete()
    pending.result()
    found = tr.restore(tmp_path / "a.safetensors")
    assert (found["host"] == np.arange(5.0)).all() and (found["device"] == np.arange(6.0)).all()


def test_other_formats_contain_complete_sharded_arrays(tmp_path: pathlib.Path) -> None:
    """Other formats contain the complete array of a sharded leaf."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(value, jax.NamedSharding(mesh, jax.P("y", "x")))
    tr.save(tmp_path / "a.safetensors", {"w": array}, rules=[rules.transpose("w", (1, 0))])
    assert (tr.restore(tmp_path / "a.safetensors")["w"] == value.T).all()
    like = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=array.sharding)}
    for shard in tr.restore(tmp_path / "a.safetensors", like)["w"].addressable_shards:
        assert (np.asarray(shard.data) == value.T[shard.index]).all()


def test_unsupported_tree_is_refused_without_leftovers(tmp_path: pathlib.Path) -> None:
    """A leaf that a format cannot store is refused before a file is written."""
    for save in (tr.save, lambda *a: tr.save_async(*a).result()):
        with pytest.raises(UnsupportedError) as caught:
            save(tmp_path / "a.safetensors", state())
        assert all(name in str(caught.value) for name in ("key", "step", "nan"))
        assert list(tmp_path.iterdir()) == []


def test_metrics_that_a_copy_loses_are_logged(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    tr.save(tmp_path / "a", {"w": np.ones(3)}, step=1, metrics={"loss": 0.5}, metadata={"lr": 0.1})
    tr.convert(tmp_path / "a", tmp_path / "b", format="flax")
    assert "step and metrics and metadata left out: the format 'flax' cannot store it" in caplog.text
    assert tr.open(tmp_path / "b").metrics == {}


@pytest.mark.parametrize("format", ["flax", "fjformer", "t5x", "levanter", "safetensors", "equinox"])
def test_what_a_format_cannot_hold_can_be_dropped(tmp_path: pathlib.Path, format: str) -> None:
    tr.save(tmp_path / "a", {"key": jax.random.key(0), "n": 1, "s": "x", "w": np.ones(3)})
    refused: list[str] = []
    while True:  # Each error names more leaves to drop.
        rules = [tr.rules.drop(name) for name in refused]
        try:
            tr.convert(tmp_path / "a", tmp_path / "b", format=format, rules=rules)
            break
        except UnsupportedError as error:
            lines = str(error).splitlines()[1:]
            assert lines and all("drop it by a rule: tr.rules.drop(" in line for line in lines)
            refused += [line.split(":")[0].strip() for line in lines]
    assert "key" in refused and (list(tr.open(tmp_path / "b").values())[-1][...] == 1).all()


def test_a_file_in_use_is_not_replaced_unless_asked_for(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.safetensors"
    tr.save(path, {"w": np.zeros(3)})
    with pytest.raises(ExistsError):
        tr.save(path, {"w": np.ones(3)})
    assert (tr.restore(path)["w"] == 0).all()
    tr.save(path, {"w": np.ones(3)}, overwrite=True)
    assert (tr.restore(path)["w"] == 1).all() and list(tmp_path.iterdir()) == [path]


def test_a_path_of_no_known_format_says_why_each_refuses(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x00" * 100)
    with pytest.raises(UnsupportedError) as caught:
        tr.open(tmp_path / "x.bin")
    names = [name for name in formats.names() if name not in ("orbax", "dcp", "levanter")]  # which are folders
    lines = str(caught.value).splitlines()[1:]
    assert all(f"  {name}: " in line for name, line in zip(names, lines, strict=True)), lines
    with pytest.raises(NotFoundError):
        tr.convert(tmp_path / "nothing", tmp_path / "y")


@pytest.mark.parametrize("format", ["flax", "t5x", "orbax", "levanter"])
def test_a_run_of_another_library_goes_on(tmp_path: pathlib.Path, format: str) -> None:
    """A `Checkpointer` continues a run that another library began."""
    names = {"flax": "checkpoint_{}", "t5x": "checkpoint_{}", "orbax": "{}", "levanter": "step-{}"}
    trees = {
        n: {"w": np.full((3, 4), n, np.float32), "half": np.full(3, n).astype(ml_dtypes.bfloat16)} for n in (0, 30)
    }
    for step, tree in trees.items():
        path = tmp_path / "run" / names[format].format(step)
        saved = {"target": tree, "state": {"step": np.int32(step)}} if format == "t5x" else tree
        tr.save(path, saved, format=format, step=step)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    at = "target" if format == "t5x" else ""
    assert tr.steps(tmp_path / "run") == [0, 30] and tr.open(tmp_path / "run").format == format
    assert_same(tr.restore(tmp_path / "run", trees[30], at=at), trees[30])
    assert_same(tr.restore(tmp_path / "run", trees[0], at=at, step=0), trees[0])
    with tr.Checkpointer(tmp_path / "run", keep=tr.keep.last(1)) as ckpts:
        tree, step = ckpts.restore_or_init(lambda: {n: jnp.asarray(x) for n, x in trees[0].items()}, at=at)
        assert step == 30 and (np.asarray(tree["w"]) == 30).all()
        for later in (31, 32, 33):
            ckpts.save(later, tree)
        ckpts.wait()
        assert ckpts.steps == [0, 30, 33] and ckpts.latest_step == 33
        with pytest.raises(NotFoundError):
            ckpts.delete(30)
    assert {path: path.read_bytes() for path in before} == before
    assert tr.open(tmp_path / "run").format == "treering"


def test_a_source_and_a_target_that_are_swapped(tmp_path: pathlib.Path) -> None:
    """The error of a missing source says if the target is what was meant."""
    tr.save(tmp_path / "c", {"w": np.ones(3)})
    hint = "the source comes first, and the target .* has a checkpoint"
    with pytest.raises(NotFoundError, match=f"new.safetensors: expected a checkpoint .*{hint}"):
        tr.convert(tmp_path / "new.safetensors", tmp_path / "c")
    for src, dst in ((tmp_path / "new", tmp_path / "other"), (tmp_path / "c", tmp_path / "c")):
        with pytest.raises((NotFoundError, ExistsError)) as caught:
            tr.convert(src, dst)
        assert "the source comes first" not in str(caught.value)
