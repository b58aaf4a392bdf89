"""Tests paths with slashes in their keys, such as Haiku's, as people write them, and selections of nothing."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import treering as tr
from helpers import REAL, assert_same
from treering.errors import MismatchError, NotFoundError

HAIKU = REAL / "haiku" / "params.msgpack"
LINEAR = "block/mlp/~/linear_0"  # a module as Haiku calls it, of which the key is one
PATH = "block~1mlp~1~0~1linear_0"


@pytest.fixture(params=["flax", "treering", "orbax"])
def params(request: Any, tmp_path: Path) -> tr.Checkpoint:
    if request.param != "flax":
        tr.convert(HAIKU, tmp_path / "params", format=request.param)
    return tr.open(HAIKU if request.param == "flax" else tmp_path / "params")


def test_a_leaf_and_a_module_are_found_by_what_people_write(params: tr.Checkpoint) -> None:
    assert f"{PATH}/w" in params
    for name in (LINEAR, PATH):
        assert params[f"{name}/w"].shape == (4, 3) and f"{name}/w" in params
        assert sorted(params.at(name)) == ["b", "w"]
        assert list(params.select(f"{name}/w")) == [f"{PATH}/w"]
        assert_same(tr.restore(params.path, at=name), params.at(PATH).restore())
    assert set(params.select([f"{LINEAR}/b", "linear/b"])) == {f"{PATH}/b", "linear/b"}


def test_globs_fit_what_people_write(params: tr.Checkpoint) -> None:
    both = [f"block~1mlp~1~0~1linear_{n}/w" for n in (0, 1)]
    for glob in ("block/mlp/~/*/w", "block/mlp/**/w", "block/**/w", "block~1mlp~1~0~1*/w", "**/linear_?/w", "block*/w"):
        assert sorted(params.select(glob)) == both, glob
    assert list(params.select("block/**")) == [path for path in params if path.startswith("block")]
    assert sorted(params.select("*/w")) == [*both, "linear/w"]  # a key is one, whatever is in it


def test_rules_and_what_may_be_missing_go_by_what_people_write(params: tr.Checkpoint) -> None:
    assert set(params) - set(params.apply([tr.rules.drop(f"{LINEAR}/w")])) == {f"{PATH}/w"}
    assert set(params.apply([tr.rules.drop("block/mlp/**")])) == {"block/scale", "linear/b", "linear/w"}
    cast = params.apply([tr.rules.cast(f"{LINEAR}/w", "float16")])
    assert [path for path, leaf in cast.items() if leaf.dtype == "float16"] == [f"{PATH}/w"]
    assert cast.apply([tr.rules.copy(LINEAR, "first")])["first/w"].dtype == "float16"
    template = jax.tree.map(np.zeros_like, params.restore())
    some = params.apply([tr.rules.drop("block/mlp/**")])
    some.restore(template, missing=["block/mlp/~/linear_1/*", f"{LINEAR}/w", f"{PATH}/b"])
    params.restore({"linear": template["linear"], "block": template["block"]}, extra=[f"{LINEAR}/w", "block/mlp/**/*"])
    with pytest.raises(MismatchError, match=r"matches none of .* \(in a key, / is written ~1 and ~ is written ~0\)"):
        params.apply([tr.rules.rename("mlp/~/linear", "x")])


def test_unescape_keeps_ambiguous_escapes(tmp_path: Path) -> None:
    """A path without escapes means the path that is spelled like that, if the tree has one."""
    tree = {"a/b": np.zeros(1), "a": {"b": np.ones(1), "~": np.ones(2)}, "c/d": {"e": 1}, "c": {"d/e": 2}}
    tr.save(tmp_path / "c", tree)
    ckpt = tr.open(tmp_path / "c")
    assert (ckpt["a/b"][0], ckpt["a~1b"][0]) == (1, 0) and ckpt["a/~"].shape == (2,)
    assert list(ckpt.select("a/b")) == ["a/b"] and list(ckpt.select("a~1b")) == ["a~1b"]
    assert set(ckpt) - set(ckpt.apply([tr.rules.drop("a/b")])) == {"a/b"}
    assert list(ckpt.select("a/*")) == ["a/b", "a/~0", "a~1b"]
    for find in (lambda: ckpt["c/d/e"], lambda: ckpt.select("c/d/e"), lambda: ckpt.apply([tr.rules.drop("c/d/e")])):
        with pytest.raises(MismatchError, match=r"'c/d/e': expected one path, found several .*: c/d~1e, c~1d/e"):
            find()
    assert (ckpt["c/d~1e"], ckpt["c~1d/e"]) == (2, 1)


def test_a_selection_of_nothing_says_so(params: tr.Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    says = "none of 7 leaves fits 'block/mlp/linear_0/w', found .*; the closest name is .*linear_0/w"
    with pytest.raises(NotFoundError, match=says):
        params.select("block/mlp/linear_0/w")
    for globs in ("**/kernel", ["**/kernel", "x"], []):
        with pytest.raises(NotFoundError, match=r"none of 7 leaves fits '.*', found linear/w, "):
            params.select(globs)
    with caplog.at_level(logging.WARNING, "treering"):
        assert len(params.select(["**/w", "**/kernel"])) == 3
    assert "fits '**/kernel'" in caplog.text
