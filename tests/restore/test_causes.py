"""What an error about a template suggests is right: following it makes the restore work."""

import collections
import pathlib
import random
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treering as tr
from samples import some
from treering.errors import MismatchError


def layers(count: int, name: str = "layers", kernel: str = "kernel") -> Any:
    return {name: [{kernel: np.full((2, 2), n, np.float32), "bias": np.zeros(2, np.float32)} for n in range(count)]}


def stacked(count: int) -> Any:
    return {"layers": jax.tree.map(lambda *parts: np.stack(parts), *layers(count)["layers"])}


def params(classes: int = 10) -> Any:
    return {"body": {"w": jnp.ones((3, 4))}, "head": {"kernel": jnp.ones((4, classes)), "bias": jnp.zeros(classes)}}


def state(tx: optax.GradientTransformation, classes: int = 10) -> Any:
    own = params(classes)
    return {"params": own, "opt": tx.init(own), "step": 3}


def lines_of(error: MismatchError) -> list[str]:
    return [line for line in str(error).splitlines() if "likely: " in line]


def suggested(error: MismatchError, given: Any = ()) -> dict[str, Any]:
    """The arguments that an error suggests, as a reader would write them."""
    (line,) = lines_of(error)
    arguments = re.split(r": (?=(?:at|rules|missing|extra|dtype)=)", line, maxsplit=1)[1]
    return eval(f"dict({arguments.replace('[…', '[*given')})", {"tr": tr, "given": given})


ADAM, LION, SGD = optax.adam(1e-3), optax.lion(1e-3), optax.sgd(1e-3)
CLIPPED = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
MOMENTUM = optax.sgd(1e-3, momentum=0.9)
VALUES = {"a": {"k": {"value": np.ones(2)}, "b": {"value": np.ones(3)}}}
PLAIN = {"a": {"k": np.ones(2), "b": np.ones(3)}}
BF16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())

CASES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "a level more": ({"params": layers(3), "step": 1}, layers(3), {}, "the checkpoint has one level more: at='params'"),
    "two levels more": ({"a": {"b": layers(3)}}, layers(3), {}, "the checkpoint has 2 levels more: at='a/b'"),
    "below a level": ({"x": {"params": layers(3)}}, layers(3), {"at": "x"}, "at='x/params'"),
    "a level more after rules": (
        {"x": {"params": params()}},
        params(),
        {"at": "x", "rules": [tr.rules.cast("**", "bfloat16")]},
        r"rules=[…, tr.rules.rename('^params/', '')]",
    ),
    "a level less": (layers(3), {"params": layers(3)}, {}, "rules=[tr.rules.rename('^', 'params/')]"),
    "a level of another name": ({"m": layers(3, "blocks")}, {"m": layers(3)}, {}, "'blocks' where the template has"),
    "a level in all layers": (
        {"m": [{"attn": {"q": n}, "mlp": n} for n in range(12)]},
        {"m": [{"attention": {"q": n}, "mlp": n} for n in range(12)]},
        {},
        r"rename(r'^m/(\d+)/attn/', r'm/\1/attention/')",
    ),
    "a level in several places": (
        {"p": {"enc": {"mlp": {"w": np.ones(2)}}}, "mu": {"enc": {"mlp": {"w": np.ones(2)}}}},
        {"p": {"enc": {"ffn": {"w": np.ones(2)}}}, "mu": {"enc": {"ffn": {"w": np.ones(2)}}}},
        {},
        r"rename('(^|/)mlp/', r'\1ffn/')",
    ),
    "leaves of another name": (layers(3, kernel="w"), layers(3), {}, "has 'w' where the template has 'kernel'"),
    "names with numbers": (
        {f"layer_{n}": {"w": np.ones(2)} for n in range(30)},
        {f"block_{n}": {"w": np.ones(2)} for n in range(30)},
        {},
        "'layer_#' where the template has 'block_#'",
    ),
    "boxes": (VALUES, PLAIN, {}, "looks like Flax NNX or partitioned Linen"),
    "no boxes": (PLAIN, VALUES, {}, "each path of the template has 'value' at its end"),
    "a scanned model": (layers(12), stacked(12), {}, "rules=[tr.rules.stack('layers/*/**')]"),
    "a model that is not": (stacked(12), layers(12), {}, "rules=[tr.rules.unstack('layers/*/**')]"),
    "a new head": ({"params": params()}, {"params": params(20)}, {}, "all of it lies below 'params/head'"),
    "a new head and its moments": (state(ADAM), state(ADAM, 20), {}, "rules=[tr.rules.drop('**/head/**')]"),
    "more optimizer": (state(ADAM), state(CLIPPED), {}, "missing=['opt/**']"),
    "another optimizer": (state(ADAM), state(MOMENTUM), {}, "rules=[tr.rules.drop('opt/**')], missing=['opt/**']"),
    "a smaller optimizer": (state(ADAM), state(LION), {}, "all of it lies below 'opt'"),
    "an optimizer with a state": (state(SGD), state(ADAM), {}, "the checkpoint lacks 'opt': missing=['opt/**']"),
    "one without": (state(ADAM), state(SGD), {}, "the template lacks 'opt': rules=[tr.rules.drop('opt/**')]"),
    "adapters": (params(), {**params(), "lora": {"a": 1, "b": 2}}, {}, "the checkpoint lacks 'lora'"),
    "averages": ({"p": params(), "ema": params()}, {"p": params()}, {}, "the template lacks 'ema': extra=['ema/**']"),
    "a part of it": ({"a": {"x": 1, "y": 2}, "b": 3, "c": 4}, {"a": {"x": 5}, "c": 6}, {}, ": extra='ignore'"),
    "narrower floats": (params(), BF16, {}, "dtype='template'"),
    "nothing found": ({"params": params()}, params(), {"missing": "template", "extra": "ignore"}, "at='params'"),
}


@pytest.mark.parametrize("case", CASES)
def test_following_what_is_suggested_makes_it_work(tmp_path: pathlib.Path, case: str) -> None:
    saved, like, options, words = CASES[case]
    tr.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like, **options)
    (line,) = lines_of(caught.value)
    assert words in line and "which leaves" not in line
    found = tr.restore(tmp_path / "c", like, **{**options, **suggested(caught.value, options.get("rules", ()))})
    assert jax.tree.structure(found) == jax.tree.structure(like)


def test_what_is_suggested_keeps_what_the_template_has_and_restores_the_rest(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", state(ADAM))
    like = jax.tree.map(lambda x: x + 5, state(MOMENTUM))
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like)
    found = tr.restore(tmp_path / "c", like, **suggested(caught.value))
    assert found["step"] == 3 and (found["params"]["body"]["w"] == 1).all()
    assert (found["opt"][0].trace["body"]["w"] == 5).all()


def test_the_closest_cause_is_told_although_it_leaves_a_difference(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"params": layers(20)})
    like = {**layers(20), "new": np.ones(3)}
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like)
    (line,) = lines_of(caught.value)
    assert line.endswith("at='params', which leaves 1 of the 81")
    with pytest.raises(MismatchError, match="1 difference\n  new: expected"):
        tr.restore(tmp_path / "c", like, **suggested_without_rest(caught.value))


def suggested_without_rest(error: MismatchError) -> dict[str, Any]:
    return suggested(MismatchError(str(error).replace(", which leaves 1 of the 81", "")))


UNLIKE: dict[str, tuple[Any, Any]] = {
    "other trees": ({"a": np.ones(2), "b": np.ones(3)}, {"x": np.ones(4), "y": np.ones(5), "z": 1}),
    "other shapes in it": ({"a": layers(3), "b": 1}, {**layers(3), "b": "text", "layers": [1, 2]}),
    "one number": ({"a": {"count": 3, "x": 1}}, {"a": {"sum": 3, "x": 1}}),
    # Rules that would drop what fits, where arguments would do, are not suggested.
    "one shape of many": (
        {"m": [{"w": np.ones(2), "v": np.ones(2)}, {"w": np.ones(2), "v": np.ones(2)}]},
        {"m": [{"w": np.ones(3), "v": np.ones(2)}, {"w": np.ones(2), "v": np.ones(3)}]},
    ),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_nothing_is_suggested_that_would_not_help(tmp_path: pathlib.Path, case: str) -> None:
    saved, like = UNLIKE[case]
    tr.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like)
    assert not lines_of(caught.value)


RULES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "transpose": (np.arange(24.0).reshape(2, 3, 4), np.ones((4, 2, 3)), lambda x: x.transpose(2, 0, 1)),
    "reshape": (np.arange(4.0).reshape(2, 2), np.ones(4), lambda x: x.reshape(4)),
    "pad": (np.arange(3.0), np.ones(5), lambda x: np.pad(x, (0, 2))),
    "cast": (np.arange(3), np.ones(3, np.float32), lambda x: x.astype(np.float32)),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_leaf_that_no_argument_resolves_names_the_rule_that_does(tmp_path: pathlib.Path, rule: str) -> None:
    saved, like, expected = RULES[rule]
    tr.save(tmp_path / "c", {"x": saved, "y": 1})
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", {"x": like, "y": 1})
    (one,) = caught.value.differences
    at = one.hint.index(f"tr.rules.{rule}(")
    end = next(n for n in range(at, len(one.hint) + 1) if closed(one.hint[at:n]))
    found = tr.restore(tmp_path / "c", {"x": like, "y": 1}, rules=[eval(one.hint[at:end], {"tr": tr})])
    np.testing.assert_array_equal(found["x"], expected(saved))


@pytest.mark.parametrize("like", [np.full((2, 3), 5.0), jnp.full((7,), 5.0)])
def test_an_array_of_another_shape_can_be_the_templates(tmp_path: pathlib.Path, like: Any) -> None:
    tr.save(tmp_path / "c", {"x": np.ones((2, 2)), "y": 1})
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", {"x": like, "y": 2})
    assert str(caught.value).endswith("tr.rules.drop('x') with missing=['x'] takes the template's")
    found = tr.restore(tmp_path / "c", {"x": like, "y": 2}, rules=[tr.rules.drop("x")], missing=["x"])
    assert (found["x"] == 5).all() and found["y"] == 1


def test_a_template_of_shapes_is_told_where_values_come_from(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"params": params()})
    like = jax.eval_shape(lambda: {"params": params(20)})
    with pytest.raises(MismatchError, match=r"where there is an array and not only a shape, as in init\(\)") as caught:
        tr.restore(tmp_path / "c", like)
    (line,) = lines_of(caught.value)
    restore = line.partition("can keep its own: ")[2]
    found = eval(
        restore, {"tr": tr, "restore": tr.open(tmp_path / "c").restore, "init": lambda: {"params": params(20)}}
    )
    assert found["params"]["head"]["kernel"].shape == (4, 20)
    with pytest.raises(MismatchError, match=r"where the template has an array and not only a shape, as init\(\) has"):
        tr.restore(tmp_path / "c", like, rules=[tr.rules.drop("params/head/**")], missing="template")


def closed(text: str) -> bool:
    return text.endswith(")") and text.count("(") == text.count(")")


# Whatever the trees


def grown(draw: random.Random, depth: int = 0) -> Any:
    """A tree of containers of all kinds, with names that mean something to globs, rules and paths."""
    leaves = [np.ones((2, 3)), np.ones(3, np.float32), jnp.ones((3, 2)), 3, 1.5, "text", None, np.arange(4), KEY]
    if depth > 3 or draw.random() < 0.25:
        return draw.choice(leaves)
    names = ["a", "b", "head", "layer_1", "layer_2", "value", "w*", "x.y", "q/r", "opt", "1"]
    children = [grown(draw, depth + 1) for _ in range(draw.randint(0, 4))]
    kind = draw.choice([dict, dict, list, tuple, Pair, Other])
    if kind in (Pair, Other):
        return kind(grown(draw, depth + 1), grown(draw, depth + 1))
    return {draw.choice(names): child for child in children} if kind is dict else kind(children)


def changed(draw: random.Random, tree: Any) -> Any:
    """Another version of a tree: levels more and less, names, leaves that went and came."""
    chance = draw.random()
    if chance < 0.12:
        return {draw.choice(["a", "params", "value"]): tree}
    if isinstance(tree, dict):
        if chance < 0.2 and tree:
            return draw.choice(list(tree.values()))
        names = {name: draw.choice(["z", "blocks"]) if draw.random() < 0.08 else name for name in tree}
        return {names[name]: changed(draw, child) for name, child in tree.items() if draw.random() > 0.06}
    if type(tree) in (list, tuple):
        return type(tree)(changed(draw, child) for child in tree)
    return grown(draw, 4) if chance > 0.94 else tree


KEY = jax.random.key(0)
Pair, Other = collections.namedtuple("Pair", "a b"), collections.namedtuple("Other", "a b")


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(4)))
def test_no_suggestion_is_wrong_whatever_the_trees(tmp_path: pathlib.Path, seed: int) -> None:
    draw, followed = random.Random(seed), 0
    for _ in range(400):
        tree: Any = {"root": grown(draw)}
        like = changed(draw, tree)
        tr.save(tmp_path / "c", tree, overwrite=True)
        options = {name: word for name, word in LENIENT.items() if draw.random() < 0.15}
        try:
            tr.restore(tmp_path / "c", like, **options)
        except MismatchError as error:
            if lines_of(error) and "which leaves" not in lines_of(error)[0]:
                tr.restore(tmp_path / "c", like, **{**options, **suggested(error)})
                followed += 1
    assert followed > 20


LENIENT = {"missing": "template", "extra": "ignore"}


def test_names_that_no_suggestion_was_made_for_hide_no_error(tmp_path: pathlib.Path) -> None:
    deep: Any = {"kernel": {"w": np.ones(2)}}
    other: Any = {"weight": np.ones(2)}
    for _ in range(9):
        deep, other = [deep], [other]
    many = {"a" + "_1" * 97: np.ones(2)}, {"b" + "_1" * 97: np.ones(2)}
    for n, (saved, template) in enumerate([(deep, other), many]):
        tr.save(tmp_path / str(n), saved)
        with pytest.raises(MismatchError, match="found nothing"):
            tr.restore(tmp_path / str(n), template)
