"""Tests saves of a tree whose leaves are checkpoints or their arrays."""

import pathlib
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import treering as tr
from helpers import assert_same
from hostile_input import flip
from treering.errors import CorruptError, SaveError, UnsupportedError

PARAMS = {
    "layers": [{"w": np.full((3, 4), n, np.float32)} for n in range(12)],
    "half": np.arange(5, dtype=ml_dtypes.bfloat16),
    "none": None,
    "name": "täxt",
    "empty": {},
}


@pytest.fixture
def parts(tmp_path: pathlib.Path) -> dict[str, tr.Checkpoint]:
    tr.save(tmp_path / "native", {"params": PARAMS, "key": jax.random.key(1), "step": 7, "opt": (jnp.ones(2),)})
    tr.save(tmp_path / "x.safetensors", {"0": np.zeros(2), "1": np.ones(2)})
    return {"native": tr.open(tmp_path / "native"), "other": tr.open(tmp_path / "x.safetensors")}


@pytest.mark.parametrize("background", [False, True])
def test_one_tree_of_several_checkpoints(tmp_path: pathlib.Path, parts: dict[str, Any], background: bool) -> None:
    native = parts["native"]
    tree = {
        "encoder": native.at("params"),
        "head": {"w": native["params/layers/10/w"], "live": jnp.arange(3)},
        "key": native["key"],
        "other": parts["other"],
        "opt": native.at("opt"),
        "step": native["step"],
        "part": native.select("**/half"),
    }
    if background:
        tr.save_async(tmp_path / "joined", tree).result()
    else:
        tr.save(tmp_path / "joined", tree)
    found = tr.restore(tmp_path / "joined")
    expected = {
        "encoder": PARAMS,
        "head": {"w": PARAMS["layers"][10]["w"], "live": np.arange(3, dtype=np.int32)},
        "key": jax.random.key(1),
        "other": [np.zeros(2), np.ones(2)],
        "opt": (np.ones(2, np.float32),),
        "step": 7,
        "part": {"params": {"half": PARAMS["half"]}},
    }
    assert_same(found, expected)
    assert tr.verify(tmp_path / "joined").ok and not tr.diff(tmp_path / "joined", tree)
    assert [type(tr.open(tmp_path / "joined")[f"encoder/layers/{n}/w"]) for n in (0, 11)] == [tr.LazyArray] * 2


@pytest.mark.parametrize("format", ["orbax", "flax", "levanter"])
def test_into_other_formats_and_through_rules(tmp_path: pathlib.Path, parts: dict[str, Any], format: str) -> None:
    tree = {"a": parts["native"].at("params/layers"), "b": parts["other"]}
    change = [tr.rules.stack("a/*/w"), tr.rules.cast("b/*", "float32")]
    tr.save(tmp_path / "joined", tree, format=format, rules=change)
    like = {"a": {"w": np.zeros((12, 3, 4), np.float32)}, "b": [np.zeros(2, np.float32)] * 2}
    found = tr.restore(tmp_path / "joined", like)
    assert (found["a"]["w"] == np.arange(12)[:, None, None]).all()
    assert_same(found["b"], [np.zeros(2, np.float32), np.ones(2, np.float32)])


def test_a_checkpoint_may_stand_in_two_places(tmp_path: pathlib.Path, parts: dict[str, Any]) -> None:
    """A checkpoint may be at two paths of the tree."""
    params = parts["native"].at("params")
    tr.save(tmp_path / "joined", {"a": params, "b": [params]})
    assert_same(tr.restore(tmp_path / "joined"), {"a": PARAMS, "b": [PARAMS]})


def test_functions_stay_functions(tmp_path: pathlib.Path) -> None:
    """Functions in a joined checkpoint are recorded by name again."""
    tr.save(tmp_path / "f", {"act": jax.nn.relu, "w": np.ones(2)})
    tr.save(tmp_path / "joined", {"a": tr.open(tmp_path / "f")})
    assert "relu" in str(tr.open(tmp_path / "joined"))


def test_floats_are_cast(tmp_path: pathlib.Path, parts: dict[str, Any]) -> None:
    tr.save(tmp_path / "joined", {"a": parts["other"], "k": parts["native"]["key"]}, dtype="float16")
    assert_same(tr.restore(tmp_path / "joined")["a"], [np.zeros(2, np.float16), np.ones(2, np.float16)])


@pytest.mark.long
def test_large_arrays_pass_in_slices(tmp_path: pathlib.Path) -> None:
    """Large arrays of a checkpoint are copied in slices, in bounded memory."""
    large = np.arange(24 << 20, dtype=np.float32)  # 96 MiB
    tr.save(tmp_path / "large", {"w": large, "small": np.ones(3, np.int8)})
    ckpt = tr.open(tmp_path / "large")
    tracemalloc.start()
    tr.save(tmp_path / "joined", {"x": ckpt["w"], "small": ckpt["small"]}, memory_limit=32 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 << 20
    found = tr.restore(tmp_path / "joined")
    assert (found["x"] == large).all() and (found["small"] == 1).all()


def test_a_damaged_part_is_not_joined(tmp_path: pathlib.Path, parts: dict[str, Any]) -> None:
    """A joined checkpoint with damaged bytes fails the save."""
    (file,) = (tmp_path / "native").glob("*.safetensors")
    flip(file, file.stat().st_size - 9)
    with pytest.raises((CorruptError, SaveError)):
        tr.save(tmp_path / "joined", {"a": parts["native"]})
    assert not (tmp_path / "joined").exists()


class Counter:
    """A data iterator."""

    def get_state(self) -> dict[str, int]:
        return {"n": 3}

    def set_state(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def test_the_state_of_an_iterator_is_no_part(tmp_path: pathlib.Path) -> None:
    """A joined checkpoint may not have the state of a data iterator."""
    tr.save(tmp_path / "data", {"data": Counter(), "w": np.ones(2)})
    with pytest.raises(UnsupportedError, match=r"data: the state of a data iterator cannot be saved as a part"):
        tr.save(tmp_path / "joined", {"a": tr.open(tmp_path / "data")})
    assert not (tmp_path / "joined").exists()
    tr.save(tmp_path / "joined", {"a": tr.open(tmp_path / "data").select("w")})
    assert_same(tr.restore(tmp_path / "joined"), {"a": {"w": np.ones(2)}})
