"""Orbax's checkpoints with aggregated leaves, which are together in one file in MessagePack.

Flax aggregated leaves from February 2023 to August 2024. `real/orbax` has checkpoints of old releases.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization
from flax.training import train_state

import treering as tr
from helpers import REAL, assert_read_as_by, assert_same, described
from treering import formats, stores
from treering.errors import CorruptError, NotFoundError

FOLDER = REAL / "orbax"
NAMES = sorted(name for name in described("orbax") if "/zarr3" not in name)
RELEASES = sorted({name.partition("/")[0] for name in NAMES})


def test_there_are_several_releases() -> None:
    assert RELEASES == ["0.2.3", "0.4.4", "0.5.20"] and len(NAMES) == 4 * len(RELEASES)
    assert not list((FOLDER / "0.2.3").rglob("_METADATA")) and list((FOLDER / "0.2.3").rglob(".zarray"))


@pytest.mark.parametrize("name", NAMES)
def test_as_its_own_release_reads_it(tmp_path: Path, name: str) -> None:
    assert_read_as_by("orbax", name, tmp_path, format="orbax")


@pytest.mark.parametrize("release", RELEASES)
def test_runs_and_items(release: str) -> None:
    for name, step in (("flax", 7), ("manager", 3), ("items", 3)):
        assert tr.steps(FOLDER / release / name) == [step] and tr.open(FOLDER / release / name).step == step
    found = tr.restore(FOLDER / release / "items")
    assert found["config"] == {"rate": 0.5}
    assert_same(found["state"], tr.restore(FOLDER / release / "flax"))
    assert_same(tr.restore(FOLDER / release / "manager"), tr.restore(FOLDER / release / "manager" / "3" / "default"))


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_a_train_state_as_the_template(release: str) -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2)(nn.relu(nn.Dense(3)(x)))

    params = Model().init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    like = train_state.TrainState.create(apply_fn=Model().apply, params=params, tx=optimizer)
    found = tr.restore(FOLDER / release / "flax", like)
    assert found.step == 1 and found.opt_state[1][0].count == 1 and found.opt_state[1][0].mu["Dense_0"]["bias"].any()
    assert_same(tr.restore(FOLDER / release / "flax", params, at="params"), found.params)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_as_orbax_of_today_reads_it(name: str) -> None:
    import orbax.checkpoint as ocp

    ours = tr.restore(FOLDER / name)
    arrays, others = ocp.RestoreArgs(restore_type=np.ndarray), ocp.RestoreArgs()
    asked = jax.tree.map(lambda leaf: arrays if isinstance(leaf, np.ndarray) else others, ours)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=not name.startswith("0.2.3"))
    with ocp.Checkpointer(handler) as theirs:
        assert_same(ours, theirs.restore(FOLDER / name, restore_args=asked))


def test_leaves_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "7"
    shutil.copytree(FOLDER / "0.4.4" / "tree", path)
    leaves = described("orbax")["0.4.4/tree"]
    state = serialization.msgpack_restore((path / "checkpoint").read_bytes())
    del state["host"]["f16"], state["list"]
    (path / "checkpoint").write_bytes(serialization.msgpack_serialize(state))
    gone = sorted(name for name in leaves if name == "host/f16" or name.startswith("list/"))
    assert sorted(problem.leaves[0] for problem in tr.verify(path).problems) == gone
    with pytest.raises(CorruptError, match=r"checkpoint: expected the leaf 'host.f16', found none"):
        tr.restore(path)
    assert tr.restore(path, at="numbers") == {"big": 2**40, "float": 1.5, "int": 3, "on": True}
    (path / "checkpoint").unlink()
    with pytest.raises(CorruptError, match=r"'host.bool'"):
        tr.restore(path)
    assert tr.restore(path, at="spread").shape == (2, 3)
    (path / "_METADATA").unlink()
    with pytest.raises(CorruptError, match="_METADATA"):
        tr.restore(path)


def test_every_array_next_to_the_file_is_named(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "0.2.3" / "tree", tmp_path / "7")
    for file in sorted((tmp_path / "7").rglob(".zarray")):
        file.unlink()
    assert [p.leaves for p in tr.verify(tmp_path / "7").problems] == [("spread",), ("spread more/a",)]
    with pytest.raises(CorruptError, match=r"spread/\.zarray(.|\n)*spread more\.a/\.zarray"):
        tr.restore(tmp_path / "7")
    assert tr.restore(tmp_path / "7", at="numbers")["int"] == 3
    state = serialization.msgpack_restore((tmp_path / "7" / "checkpoint").read_bytes())
    state["spread"] = "AGGREGATED://spread"  # the first prefix of text that stands for an array
    (tmp_path / "7" / "checkpoint").write_bytes(serialization.msgpack_serialize(state))
    shutil.copy(FOLDER / "0.2.3" / "tree" / "spread" / ".zarray", tmp_path / "7" / "spread" / ".zarray")
    assert_same(tr.restore(tmp_path / "7", at="spread"), np.arange(6, dtype=np.float32).reshape(2, 3))


def test_what_only_looks_alike(tmp_path: Path) -> None:
    t5x = tmp_path / "models" / "small"
    t5x.mkdir(parents=True)
    state = {"version": 3, "optimizer": {"target": {"w": np.ones(2)}, "state": {"step": 1}}}
    (t5x / "checkpoint").write_bytes(serialization.msgpack_serialize(state))
    assert tr.open(t5x).format == "t5x"
    assert "folder without" in str(formats.get("orbax").refuses(stores.get(""), str(tmp_path / "models")))
    tensorflow = tmp_path / "tensorflow"
    tensorflow.mkdir()
    (tensorflow / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"\n')
    with pytest.raises(NotFoundError):
        tr.open(tensorflow)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "checkpoint").write_text(json.dumps({"a": 1}))
    with pytest.raises(NotFoundError):
        tr.open(plain)
