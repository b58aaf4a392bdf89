"""Tests the order of leaves. If leaves have no names, only their order says which leaf is which."""

import pathlib
from typing import Any, NamedTuple

import flax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from helpers import assert_same
from treering import rules

pytestmark = pytest.mark.compat

COUNT = 12  # more than ten, because "10" comes before "2" if they are sorted as text
FORMATS = ["treering", "safetensors", "levanter", "orbax", "flax", "fjformer", "t5x"]


def leaves() -> list[np.ndarray]:
    """Returns leaves of one shape, so that only their values show their order."""
    return [np.full(3, n, np.float32) for n in range(COUNT)]


@pytest.mark.parametrize("format", FORMATS)
def test_unnamed_leaves_keep_order_in_every_format(tmp_path: pathlib.Path, format: str) -> None:
    """Every format keeps the order of leaves that have no names."""
    tr.save(tmp_path / "a.eqx", leaves())
    tr.convert(tmp_path / "a.eqx", tmp_path / "between", format=format)
    tr.convert(tmp_path / "between", tmp_path / "b.eqx")
    assert_same(tr.restore(tmp_path / "b.eqx", leaves()), leaves())
    tr.convert(tmp_path / "between", tmp_path / "c.eqx", rules=[rules.drop("3"), rules.cast("**", "float64")])
    kept = [leaf.astype(np.float64) for n, leaf in enumerate(leaves()) if n != 3]
    assert_same(tr.restore(tmp_path / "c.eqx", kept), kept)
    tr.save(tmp_path / "d.eqx", tr.open(tmp_path / "between").select(["2", "10", "1"]))
    assert_same(tr.restore(tmp_path / "d.eqx"), [leaves()[n] for n in (1, 2, 10)])


@pytest.mark.parametrize("format", ["treering", "safetensors", "levanter", "orbax"])
def test_restore_without_template_keeps_order_on_save(tmp_path: pathlib.Path, format: str) -> None:
    """A tree restored without a template and saved again has the same order of leaves."""
    tr.save(tmp_path / "a.eqx", leaves())
    assert_same(tr.restore(tmp_path / "a.eqx"), leaves())
    tr.save(tmp_path / "between", tr.restore(tmp_path / "a.eqx"), format=format)
    assert_same(tr.restore(tmp_path / "between"), leaves())
    assert_same(tr.open(tmp_path / "between").abstract()[10].shape, (3,))
    tr.save(tmp_path / "b.eqx", tr.restore(tmp_path / "between"))
    assert (tmp_path / "b.eqx").read_bytes() == (tmp_path / "a.eqx").read_bytes()


class Moments(NamedTuple):
    nu: Any
    mu: Any


@flax.struct.dataclass
class State:
    """A class whose fields are not in alphabetical order."""

    step: Any
    params: Any
    moments: Any


def state() -> State:
    parts = iter(np.arange(4.0 * COUNT, dtype=np.float32).reshape(-1, 1))
    layers = [{"b": jnp.asarray(next(parts)), "w": jnp.asarray(next(parts))} for _ in range(COUNT)]
    return State(jnp.asarray(next(parts)), layers, Moments(jnp.asarray(next(parts)), (jnp.asarray(next(parts)),)))


@pytest.mark.parametrize("format", ["treering", "orbax", "flax", "fjformer", "t5x"])
def test_the_order_is_that_of_the_tree_that_was_saved(tmp_path: pathlib.Path, format: str) -> None:
    tr.save(tmp_path / "named", state(), format=format)
    tr.convert(tmp_path / "named", tmp_path / "a.eqx")
    assert_same(tr.restore(tmp_path / "a.eqx", state()), state())
    tr.convert(tmp_path / "named", tmp_path / "b.eqx", rules=[rules.cast("**", "float32")])
    assert_same(tr.restore(tmp_path / "b.eqx", state()), state())
    tr.save(tmp_path / "c.eqx", tr.open(tmp_path / "named").at("params").select("**/w"))
    weights = [layer["w"] for layer in state().params]
    assert_same(tr.restore(tmp_path / "c.eqx", weights), weights)
    without = state().replace(step=None)
    tr.save(tmp_path / "d.eqx", tr.open(tmp_path / "named"), rules=[rules.drop("step")])
    assert_same(tr.restore(tmp_path / "d.eqx", without), without)


@pytest.mark.long
def test_what_flax_and_orbax_wrote_keeps_its_order(tmp_path: pathlib.Path) -> None:
    import orbax.checkpoint as ocp

    (tmp_path / "flax.msgpack").write_bytes(flax.serialization.to_bytes(state()))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state())
    for name in ("flax.msgpack", "orbax"):
        for rule in ([], [rules.cast("**", "float32")]):
            tr.convert(tmp_path / name, tmp_path / "a.eqx", rules=rule, overwrite=True)
            assert_same(tr.restore(tmp_path / "a.eqx", state()), state())


def test_renamed_leaves_are_in_the_order_of_their_new_tree(tmp_path: pathlib.Path) -> None:
    tree = {"a": np.zeros(2), "b": np.ones(2)}
    tr.save(tmp_path / "x.eqx", tree, rules=[rules.rename("^a$", "z")])
    expected = {"z": tree["a"], "b": tree["b"]}
    assert_same(tr.restore(tmp_path / "x.eqx", expected), expected)


def test_numbers_with_gaps_are_in_the_order_of_the_numbers(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "x.safetensors", {"9": np.zeros(1), "10": np.ones(1), "007": np.ones(2)})
    assert set(tr.restore(tmp_path / "x.safetensors")) == {"9", "10", "007"}  # one of these keys is not a number
    tr.save(tmp_path / "y.safetensors", {"9": np.zeros(1), "10": np.ones(1)})
    tr.convert(tmp_path / "y.safetensors", tmp_path / "y.eqx")
    assert_same(tr.restore(tmp_path / "y.eqx"), [np.zeros(1), np.ones(1)])


class Norm(NamedTuple):
    """A class whose fields have one shape and are not in alphabetical order."""

    weight: Any
    bias: Any


def norm() -> Norm:
    return Norm(np.full(3, 1.0), np.full(3, 2.0))


KINDS = {
    "norm": norm(),
    "text": {str(n): np.full(2, float(n)) for n in range(12)},  # as JAX sorts them: "0", "1", "10", "11", "2"
    "gaps": {str(n): np.full(2, float(n)) for n in (1, 2, 10)},
    "numbers": {5: np.zeros(1), 40: np.ones(1)},
    "tuple": (np.zeros(2), {"empty": {}, "none": None}, ()),
    "list": [np.zeros(1), np.ones(1), np.full(1, 2.0)],
    "x": np.zeros(4),
}


def test_what_rules_leave_alone_stays_what_it_was(tmp_path: pathlib.Path) -> None:
    expected = {**{name: value for name, value in KINDS.items() if name != "x"}, "y": KINDS["x"]}
    tr.save(tmp_path / "native", KINDS)
    for name, source in {"live": KINDS, "checkpoint": tr.open(tmp_path / "native")}.items():
        tr.save(tmp_path / name, source, rules=[rules.rename("^x$", "y")])
        assert_same(tr.restore(tmp_path / name, expected), expected)
        plain = tr.restore(tmp_path / name)
        assert_same({**plain, "norm": Norm(**plain["norm"])}, expected)
        moved = {"all": {name: value for name, value in KINDS.items() if name != "list"}}
        tr.save(tmp_path / f"{name}, moved", source, rules=[rules.drop("list/**"), rules.rename("^", "all/")])
        plain = tr.restore(tmp_path / f"{name}, moved")["all"]
        assert_same({**plain, "norm": Norm(**plain["norm"])}, moved["all"])
        tr.save(tmp_path / f"{name}, fewer", source, rules=[rules.drop("list/2"), rules.drop("numbers/5")])
        plain = tr.restore(tmp_path / f"{name}, fewer")
        assert_same(plain["list"], KINDS["list"][:2])
        assert_same(plain["tuple"], KINDS["tuple"])
        assert_same(plain["numbers"], {40: np.ones(1)})


@pytest.mark.parametrize("name", ["norm", "text", "gaps", "numbers"])
def test_files_without_names_have_the_order_of_the_tree(tmp_path: pathlib.Path, name: str) -> None:
    tree = KINDS[name]
    tr.save(tmp_path / "native", {name: tree, "note": "x"})
    ckpt = tr.open(tmp_path / "native")
    ways: dict[str, tuple[Any, dict[str, Any], Any]] = {
        "part": (ckpt.at(name), {}, tree),
        "leaf": ({"m": ckpt.at(name)}, {}, {"m": tree}),
        "leaves": ({"a": ckpt.at(name), "b": [ckpt.at(name)]}, {}, {"a": tree, "b": [tree]}),
        "selection": (ckpt.select(f"{name}/**"), {}, {name: tree}),
        "dropped": ({name: tree, "note": "x"}, {"rules": [rules.drop("note")]}, {name: tree}),
        "renamed": ({"m": tree}, {"rules": [rules.rename("^m/", "n/")]}, {"n": tree}),
        "of a checkpoint": (ckpt, {"rules": [rules.drop("note"), rules.cast("**", "float64")]}, {name: tree}),
    }
    for way, (source, options, expected) in ways.items():
        tr.save(tmp_path / f"{way}.eqx", source, **options)
        assert_same(tr.restore(tmp_path / f"{way}.eqx", expected), expected)


def test_an_order_that_is_only_inferred_is_logged(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    tr.save(tmp_path / "x.safetensors", norm()._asdict())
    tr.convert(tmp_path / "x.safetensors", tmp_path / "x.eqx")
    assert "the leaves in (root) are in the order of their names" in caplog.text
    caplog.clear()
    tr.save(tmp_path / "numbers.safetensors", {str(n): leaf for n, leaf in enumerate(leaves())})
    tr.convert(tmp_path / "numbers.safetensors", tmp_path / "numbers.eqx")
    tr.save(tmp_path / "plain.eqx", KINDS["text"])
    swap = [rules.rename("^weight$", "w"), rules.rename("^bias$", "weight"), rules.rename("^w$", "bias")]
    tr.save(tmp_path / "dict.eqx", {"b": np.ones(2), "a": np.zeros(2)}, rules=[rules.rename("^b$", "c")])
    tr.save(tmp_path / "swapped.eqx", norm(), rules=swap)
    assert_same(tr.restore(tmp_path / "swapped.eqx", norm()), Norm(norm().bias, norm().weight))
    assert "order" not in caplog.text
    tr.save(tmp_path / "new.eqx", norm(), rules=[rules.rename("^weight$", "scale")])
    assert "the leaves in (root)" in caplog.text
