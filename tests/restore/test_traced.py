"""Tests calls within a function that JAX traces: each raises an error that says what to do instead."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import treering as tr
from treering.errors import TreeringError

IN_A_TRACE: dict[str, tuple[Callable[[Any, pathlib.Path], Any], str]] = {
    "restore": (lambda x, path: tr.restore(path / "c", {"w": x}), r"found tracers: w; call restore outside of jit"),
    "a part": (lambda x, path: tr.restore(path / "c", x, at="w"), r"tracers: \(root\); call restore outside of jit"),
    "open": (lambda x, path: tr.open(path / "c").restore({"w": x}), "found tracers: w"),
    "once": (lambda x, path: tr.restore(path / "c", {"w": x}, read="once"), "found tracers: w"),
    "allowed": (lambda x, path: tr.restore(path / "c", {"x": x}, missing="template", extra="ignore"), "tracers: x"),
    "a module": (lambda x, path: tr.restore(path / "c", {"m": Module(x)}), "found tracers: m/w"),
    "a run": (lambda x, path: tr.Checkpointer(path / "run").restore({"w": x}), "found tracers: w"),
    "init": (lambda x, path: tr.Checkpointer(path / "run").restore_or_init(lambda: {"w": x}), "init: .* tracers: w"),
    "sharding": (lambda x, path: tr.restore(path / "c", sharding=x), "sharding: expected a Sharding, Partitio"),
    "shardings": (lambda x, path: tr.restore(path / "c", sharding={"w": x}), "sharding: expected a Sharding, Partitio"),
    "at": (lambda x, path: tr.restore(path / "c", at=x), "expected a path within the checkpoint, as text"),
    "select": (lambda x, path: tr.open(path / "c").select(x), "select: expected a glob or a list of them, found"),
    "step": (lambda x, path: tr.restore(path / "run", step=x), "expected an integer from 0"),
    "rules": (lambda x, path: tr.rules.pad("w", ((x[0], 0),)), "expected a pair of integers for each axis"),
    "a value": (lambda x, path: tr.restore(path / "c", rules=[tr.rules.pad("w", ((1, 1),), x[0])]), "cannot be"),
    "save": (lambda x, path: tr.save(path / "d", {"w": x}), "w: a tracer: call save outside of jit"),
    "metrics": (
        lambda x, path: tr.save(path / "d", {}, metrics={"l": x[0]}),
        r"metrics\['l'\]: expected a name and a real",
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    w: Any


@pytest.mark.parametrize("case", IN_A_TRACE)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(f)(jnp.ones(3)),
        lambda f: jax.vmap(f)(jnp.ones((2, 3))),
        lambda f: jax.linearize(f, jnp.ones(3)),
    ],
    ids=["jit", "vmap", "linearize"],
)
def test_what_is_called_within_a_trace_says_what_to_do(tmp_path: pathlib.Path, case: str, transform: Any) -> None:
    call, message = IN_A_TRACE[case]
    tr.save(tmp_path / "c", {"w": jnp.ones(3)})
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, {"w": jnp.ones(3)})

    def traced(x: Any) -> Any:
        call(x, tmp_path)
        return x

    with pytest.raises(TreeringError, match=message):
        transform(traced)
