"""What users write, for type checkers: `test_types.py` runs them over it, and nothing runs it.

They are to report the lines that end in `# error`, and no others.
"""

import datetime
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import treering as tr
from treering import rules


class State(NamedTuple):
    params: dict[str, jax.Array]
    step: int


def init() -> State:
    return State({"w": jnp.ones(3)}, 0)


def restores(path: pathlib.Path, state: State, anything: Any) -> None:
    assert_type(tr.restore(path, state), State)
    assert_type(
        tr.restore(path, like=state, step=3, at="a", missing=["head/**"], extra="ignore", dtype="bfloat16"), State
    )
    assert_type(tr.restore(path, state.params), dict[str, jax.Array])
    assert_type(tr.restore(path), Any)
    assert_type(tr.restore(path, like=None, sharding="saved"), Any)
    assert_type(tr.restore(path, anything), Any)
    print(tr.restore(path, state).parms)  # error
    tr.restore(path, state, mising="template")  # error
    tr.restore(path, state, missing=3)  # error
    tr.restore(path, state, "params")  # error
    tr.restore(path, state, rules=[rules.drop("head/**"), "head"])  # error


def opens(path: pathlib.Path, state: State) -> None:
    ckpt = tr.open(path, step=3)
    assert_type(ckpt, tr.Checkpoint)
    assert_type(ckpt.restore(state, memory_limit=1 << 20), State)
    assert_type(ckpt.restore(), Any)
    assert_type(ckpt.select("**/w").at("a").restore(state.params), dict[str, jax.Array])
    assert_type(ckpt["w"], tr.LazyArray | Any)
    for name, leaf in ckpt.items():
        assert_type(name, str)
        if isinstance(leaf, tr.LazyArray):
            assert_type(leaf, tr.LazyArray)
    np.asarray(ckpt["w"][:10])
    print(ckpt["w"].shape, ckpt["w"].dtype, ckpt["w"].sharding)
    assert_type(ckpt.step, int | None)
    assert_type(ckpt.created, datetime.datetime | None)
    ckpt.restore(state, step=3)  # error
    print(ckpt["w"].shap)  # error
    tr.opn(path)  # error


def saves(path: pathlib.Path, state: State, ckpt: tr.Checkpoint) -> None:
    assert_type(tr.save(path, state, overwrite=True, metrics={"loss": 0.5}), tr.SaveReport)
    assert_type(tr.save_async(path, state, metadata={"lr": 0.1}).result(), tr.SaveReport)
    tr.save(path, ckpt, format="safetensors", max_shard_size="5GB", rules=[rules.cast("**", "float16")])
    tr.convert(path, "model.safetensors", at="params", filename_pattern="model-{}.safetensors")
    tr.save(path, state, format="orbax", composite=True)
    tr.save(path, state, ovewrite=True)  # error
    tr.save_async(path, state, ovewrite=True)  # error
    tr.save(path, state, max_shard_size=None)  # error
    tr.save(path, state, format="orbax", composite=["params"])  # error
    tr.save(path, state, processes="one")  # error
    tr.convert(path, path, ovewrite=True)  # error


def trains(update: Callable[[State], tuple[State, jax.Array]]) -> None:
    keep = tr.keep.last(3) | tr.keep.best(2, "loss", "min") | tr.keep.every(datetime.timedelta(hours=1))
    with tr.Checkpointer("runs/a", save_every=(100, datetime.timedelta(minutes=10)), keep=keep) as ckpts:
        assert_type(ckpts, tr.Checkpointer)
        state, step = ckpts.restore_or_init(init, sharding="saved", missing="template")
        assert_type(state, State)
        assert_type(step, int)
        for step in range(step + 1, 1000):
            state, loss = update(state)
            assert_type(ckpts.save(step, state, metrics={"loss": loss}), tr.PendingSave | None)
        assert_type(ckpts.restore(state, step=3, fallback=False, at="params"), State)
        assert_type(ckpts.restore(), Any)
        assert_type(ckpts.best_step("loss", "min"), int | None)
        ckpts.save(1, state, force=True, ovewrite=True)  # error
        ckpts.save(1, state, on_exists="ignore")  # error
        ckpts.restore(state, setp=3)  # error
        ckpts.restore_or_init(init, shardin=None)  # error
        ckpts.restore_or_init(init())  # error
        ckpts.best_step("loss", "minimum")  # error
    tr.Checkpointer("runs/a", keep=3)  # error
    tr.Checkpointer("runs/a", when_busy="drop")  # error
    tr.keep.best(2, "loss", "least")  # error
    for found in tr.follow("runs/a"):
        assert_type(found, tr.Checkpoint)
