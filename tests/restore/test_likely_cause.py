"""Tests that the suggestions of errors about templates are right: a restore that follows them works."""

import collections
import pathlib
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import treering as tr
from sampling import sample_points
from tensorflow_bundles import Bundle
from treering._pytree.walk import flatten_tree
from treering._restore.origins import _Search
from treering._restore.policy import Policy
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
    """Returns the arguments that an error suggests, as a reader would write them."""
    (line,) = lines_of(error)
    arguments = re.split(r": (?=(?:at|rules|missing|extra|dtype|grow)=)", line, maxsplit=1)[1]
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
    "a list with names now": (
        {"p": [{"w": np.ones(2)}, {"w": np.ones(3)}], "mu": [{"w": np.ones(2)}, {"w": np.ones(3)}]},
        {
            "p": {"enc": {"w": np.ones(2)}, "dec": {"w": np.ones(3)}},
            "mu": {"enc": {"w": np.ones(2)}, "dec": {"w": np.ones(3)}},
        },
        {},
        "p is a list in the checkpoint, a dict in the template: rules=[tr.rules.rename('^mu/0/', 'mu/enc/'), ",
    ),
    "names that are a list now": (
        {"layers": {"z": np.ones(2), "b": np.ones(3)}},
        {"layers": [np.ones(3), np.ones(2)]},
        {},
        "tr.rules.rename('^layers/z$', 'layers/1')",
    ),
    "a list with names that count from 1": (
        layers(2),
        {"layers": {f"block_{n + 1}": layer for n, layer in enumerate(layers(2)["layers"])}},
        {},
        "tr.rules.rename('^layers/1/', 'layers/block_2/')",
    ),
    "a tuple with names now": (
        (params(), ADAM.init(params()), 3),
        state(ADAM),
        {},
        "(root) is a tuple in the checkpoint, a dict in the template: rules=[tr.rules.rename('^0/', 'params/'), ",
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
    "a leaf at the root": (
        params() | {"w": np.ones((3, 2))},
        params() | {"weight": np.ones((3, 2))},
        {},
        "has 'w' where",
    ),
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
    "a new head": ({"params": params()}, {"params": params(20)}, {}, "all differences are below 'params/head'"),
    "a new head and its moments": (state(ADAM), state(ADAM, 20), {}, "rules=[tr.rules.drop('**/head/**')]"),
    "more optimizer": (state(ADAM), state(CLIPPED), {}, "rules=[tr.rules.rename('^opt/', 'opt/1/')]"),
    "another optimizer": (state(ADAM), state(MOMENTUM), {}, "rules=[tr.rules.drop('opt/**')], missing=['opt/**']"),
    "a smaller optimizer": (state(ADAM), state(LION), {}, "all differences are below 'opt'"),
    "an optimizer with a state": (state(SGD), state(ADAM), {}, "the checkpoint lacks 'opt': missing=['opt/**']"),
    "one without": (state(ADAM), state(SGD), {}, "the template lacks 'opt': rules=[tr.rules.drop('opt/**')]"),
    "adapters": (params(), {**params(), "lora": {"a": 1, "b": 2}}, {}, "the checkpoint lacks 'lora'"),
    "averages": ({"p": params(), "ema": params()}, {"p": params()}, {}, "the template lacks 'ema': extra=['ema/**']"),
    "a part of it": ({"a": {"x": 1, "y": 2}, "b": 3, "c": 4}, {"a": {"x": 5}, "c": 6}, {}, ": extra='ignore'"),
    "narrower floats": (params(), BF16, {}, "dtype='template'"),
    "nothing found": ({"params": params()}, params(), {"missing": "template", "extra": "ignore"}, "at='params'"),
}

W = np.arange(12, dtype=np.float32).reshape(4, 3)


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


@pytest.mark.long
@pytest.mark.parametrize(("at", "inner"), [("params", ""), ("model/params", "model"), ("model/0", "model")])
def test_at_that_is_one_level_too_deep(tmp_path: pathlib.Path, at: str, inner: str) -> None:
    own: Any = [params(), {"step": 1}] if at.endswith("0") else {"params": params(), "step": 1}
    tr.save(tmp_path / "c", {inner: own} if inner else own)
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", own, at=at)
    (line,) = lines_of(caught.value)
    assert line.endswith("so at= is one level too deep: " + (f"at={inner!r}" if inner else "leave out at="))
    assert not tr.diff(tr.restore(tmp_path / "c", own, at=inner), own)


def test_suggestion_keeps_own_leaves_and_restores_others(tmp_path: pathlib.Path) -> None:
    """The suggested arguments restore each leaf of the template from its origin."""
    tr.save(tmp_path / "c", state(ADAM))
    like = jax.tree.map(lambda x: x + 5, state(MOMENTUM))
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like)
    found = tr.restore(tmp_path / "c", like, **suggested(caught.value))
    assert found["step"] == 3 and (found["params"]["body"]["w"] == 1).all()
    assert (found["opt"][0].trace["body"]["w"] == 5).all()


# For each leaf of the template, the leaf of the checkpoint that it must become; None for the template's own leaf.

SCHEDULED, LION_SCHEDULED = (tx(optax.cosine_decay_schedule(1e-3, 10)) for tx in (optax.adam, optax.lion))
GROUPED = optax.multi_transform({"a": ADAM, "b": SCHEDULED}, {"body": "a", "head": "b"})
AT_A, AT_B = "opt/inner_states/a/inner_state", "opt/inner_states/b/inner_state"
INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
INJECTED_SCHEDULE = optax.inject_hyperparams(optax.adam)(learning_rate=optax.cosine_decay_schedule(1e-3, 10))
SCALED = [optax.scale_by_adam(), optax.scale_by_schedule(optax.cosine_decay_schedule(1e-3, 10))]
WITH_DECAY = optax.chain(optax.masked(optax.add_decayed_weights(0.1), {"body": True, "head": False}), ADAM)
NAMES = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (4,)}
FLAT = {name: np.zeros(shape) for name, shape in NAMES.items()}
NESTED = {"a": {"weight": np.zeros((2, 3)), "bias": np.zeros(2)}, "b": {"weight": np.zeros(4)}}
TIED = {"embed": {"embedding": np.zeros((9, 4))}, "mlp": {"kernel": np.zeros((4, 4))}}
ONE_EACH = {"g": state(ADAM), "d": state(ADAM)}


Origins = Mapping[str, str | None]


def named(change: Callable[[str], str]) -> Any:
    return {change(name): value for name, value in FLAT.items()}


def after(prefix: str, only: str = "") -> tuple[Any, dict[str, str]]:
    names = {name: prefix + name if name.startswith(only) else name for name in NAMES}
    return named(names.__getitem__), {new: old for old, new in names.items()}


def untied(head: Any) -> tuple[Any, Any]:
    def tree_of(own: Any) -> Any:
        return {"params": own, "opt": ADAM.init(own)}

    return tree_of(TIED), tree_of({**TIED, **head})


def chains(*transformations: Any) -> tuple[Any, Any]:
    before, after = map(state, transformations)
    return before, after


def kept(old: Any, new: Any, origins: Origins) -> tuple[Any, Any, Origins]:
    return old, new, origins


def both_ways(name: str, old: Any, new: Any, origins: Origins, back: Origins) -> Any:
    return {name: kept(old, new, origins), f"{name}, taken back": kept(new, old, back)}


OWN = {f"opt/{name}": None for name in ("mini_step", "acc_grads", "hyperparams")}
KEPT: dict[str, tuple[Any, Any, Origins]] = {
    **both_ways("clip", *chains(ADAM, CLIPPED), {"opt/1": "opt"}, {"opt": "opt/1"}),
    **both_ways(
        "clip_by_global_norm",
        *chains(ADAM, optax.chain(optax.clip_by_global_norm(1.0), ADAM)),
        {"opt/1": "opt"},
        {"opt": "opt/1"},
    ),
    **both_ways(
        "a flat chain",
        *chains(optax.chain(*SCALED), optax.chain(optax.clip(1.0), *SCALED)),
        {"opt/1": "opt/0", "opt/2": "opt/1"},
        {"opt/0": "opt/1", "opt/1": "opt/2"},
    ),
    **both_ways("decayed weights", *chains(ADAM, WITH_DECAY), {"opt/1": "opt"}, {"opt": "opt/1"}),
    "a schedule": kept(*chains(ADAM, SCHEDULED), {"opt/1/count": "opt/0/count"}),
    "a constant rate": kept(*chains(SCHEDULED, ADAM), {}),
    "clip and a schedule": kept(
        *chains(ADAM, optax.chain(optax.clip(1.0), SCHEDULED)), {"opt/1/1/count": "opt/0/count", "opt/1": "opt"}
    ),
    "another order": kept(
        *chains(optax.chain(*SCALED), optax.chain(*SCALED[::-1])), {"opt/0": "opt/1", "opt/1": "opt/0"}
    ),
    **both_ways(
        "MultiSteps",
        *chains(ADAM, optax.MultiSteps(ADAM, 2)),
        {**OWN, "opt/gradient_step": "opt/0/count", "opt/inner_opt_state": "opt"},
        {"opt": "opt/inner_opt_state"},
    ),
    **both_ways(
        "inject_hyperparams",
        *chains(ADAM, INJECTED),
        {**OWN, "opt/count": "opt/0/count", "opt/inner_state": "opt"},
        {"opt": "opt/inner_state"},
    ),
    "a schedule that is injected": kept(
        *chains(SCHEDULED, INJECTED_SCHEDULE),
        {
            **OWN,
            "opt/count": "opt/1/count",
            "opt/hyperparams_states/learning_rate/count": "opt/1/count",
            "opt/inner_state": "opt",
        },
    ),
    "an injected schedule, no more": kept(
        *chains(INJECTED_SCHEDULE, SCHEDULED),
        {"opt/1/count": "opt/hyperparams_states/learning_rate/count", "opt/0": "opt/inner_state/0"},
    ),
    **both_ways(
        "multi_transform",
        *chains(ADAM, GROUPED),
        {f"{AT_B}/1/count": "opt/0/count", AT_A: "opt", AT_B: "opt"},
        {"opt/0/mu/head": f"{AT_B}/0/mu/head", "opt/0/nu/head": f"{AT_B}/0/nu/head", "opt": AT_A},
    ),
    "an optimizer of another kind": kept(
        *chains(SCHEDULED, LION_SCHEDULED), {"opt/0": None, "opt/2/count": "opt/1/count"}
    ),
    "an average, which begins at 0": kept(
        *chains(ADAM, optax.chain(ADAM, optax.ema(0.9))), {"opt/1": None, "opt/0": "opt"}
    ),
    "squares that mean something else": kept(*chains(optax.rmsprop(1e-3), optax.adagrad(1e-3)), {"opt/0": None}),
    "a count that means something else": kept(*chains(optax.adafactor(1e-3), ADAM), {"opt": None}),
    "clip and a new head": kept(
        state(ADAM),
        state(CLIPPED, 20),
        {**dict.fromkeys(["params/head", "opt/1/0/mu/head", "opt/1/0/nu/head"]), "opt/1": "opt"},
    ),
    "one of two optimizers": kept(ONE_EACH, {**ONE_EACH, "d": state(CLIPPED)}, {"d/opt/1": "d/opt"}),
    "both of two optimizers": kept(
        ONE_EACH, {"g": state(CLIPPED), "d": state(CLIPPED)}, {"d/opt/1": "d/opt", "g/opt/1": "g/opt"}
    ),
    **{f"before names: {it}": kept(FLAT, *after(it)) for it in ("module.", "model.", "_orig_mod.module.", "params/")},
    **{
        f"no more before names: {it}": kept(new, FLAT, {old: new for new, old in back.items()})
        for it in ("module.", "model.", "_orig_mod.module.", "params/")
        for new, back in [after(it.replace("/", "~1"))]
        if "/" not in it
    },
    "before some names": kept(FLAT, *after("model.", "a.w")),
    "before some names, no more": kept(after("model.", "a.w")[0], FLAT, {"a.weight": "model.a.weight"}),
    "another word before names": kept(
        after("module.")[0], after("model.")[0], {f"model.{name}": f"module.{name}" for name in NAMES}
    ),
    "dots and no levels": kept(FLAT, NESTED, {name.replace(".", "/"): name for name in NAMES}),
    "levels and no dots": kept(NESTED, FLAT, {name: name.replace(".", "/") for name in NAMES}),
    "dots, and a level more": kept(
        after("module.")[0],
        {"params": NESTED},
        {f"params/{name.replace('.', '/')}": f"module.{name}" for name in NAMES},
    ),
    "parameters and their averages": kept({"ema": NESTED, "model": NESTED}, NESTED, {"a": "model/a", "b": "model/b"}),
    **{
        f"no longer tied: {'/'.join(names)}": kept(
            *untied({names[0]: {names[1]: np.zeros(shape)}}),
            {f"{at}/{'/'.join(names)}": f"{at}/embed/embedding" for at in ("params", "opt/0/mu", "opt/0/nu")},
        )
        for names, shape in [
            (("head", "embedding"), (9, 4)),
            (("lm_head", "kernel"), (4, 9)),
            (("zz", "q"), (9, 4)),
        ]
    },
    "no longer tied, in names with dots": kept(
        {"model.wte.weight": np.zeros((9, 4)), "model.ln.weight": np.zeros(4)},
        {"wte.weight": np.zeros((9, 4)), "ln.weight": np.zeros(4), "lm_head.weight": np.zeros((9, 4))},
        {
            "wte.weight": "model.wte.weight",
            "ln.weight": "model.ln.weight",
            "lm_head.weight": "model.wte.weight",
        },
    ),
}


def distinct(tree: Any, sign: int) -> Any:
    """A tree with values of which no two are equal, nor equal to those of the other sign."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = [np.shape(leaf) for leaf in leaves]
    values = [sign * (1000 * n + np.arange(np.prod(s)).reshape(s)) for n, s in enumerate(shapes, 1)]
    return structure.unflatten(
        [int(v) if isinstance(leaf, int) else v.astype(leaf.dtype) for v, leaf in zip(values, leaves, strict=True)]
    )


def by_path(tree: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(at, simple=True, separator="/"): leaf for at, leaf in pairs}


def origin(path: str, origins: Origins) -> str | None:
    for new, old in origins.items():
        if path == new or path.startswith(f"{new}/"):
            return None if old is None else old + path[len(new) :]
    return path


@pytest.mark.parametrize("case", KEPT)
def test_no_suggestion_loses_what_a_rule_keeps(tmp_path: pathlib.Path, case: str) -> None:
    old, new, origins = KEPT[case]
    saved, like = distinct(old, 1), distinct(new, -1)
    tr.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like)
    restored = tr.restore(tmp_path / "c", like, **suggested(caught.value))
    found, before, own = map(by_path, (restored, saved, like))
    for path, value in found.items():
        there = origin(path, origins)
        expected = own[path] if there is None else before[there]
        expected = expected if np.shape(value) == np.shape(expected) else np.transpose(expected)
        np.testing.assert_array_equal(value, expected, err_msg=f"{path}: not {there}, by {lines_of(caught.value)[0]}")


@pytest.mark.parametrize("format", ["treering", "flax", "orbax"])
@pytest.mark.parametrize("tx", [SCHEDULED, optax.chain(optax.clip(1.0), SCHEDULED)])
def test_the_moments_and_the_counts_of_an_nnx_optimizer_are_kept(
    tmp_path: pathlib.Path, tx: optax.GradientTransformation, format: str
) -> None:
    def of(tx: optax.GradientTransformation, sign: int) -> Any:
        states = nnx.state(nnx.Optimizer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param))
        return distinct(states, sign) if format != "flax" else nnx.to_pure_dict(distinct(states, sign))

    saved, like = of(ADAM, 1), of(tx, -1)
    tr.save(tmp_path / "c", saved, format=format)
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like)
    found = by_path(tr.restore(tmp_path / "c", like, **suggested(caught.value)))
    count = next(value for path, value in by_path(saved).items() if path.removesuffix("/value").endswith("/0/count"))
    counts = [value for path, value in found.items() if path.removesuffix("/value").endswith("/count")]
    assert len(counts) == 2 and all(value == count for value in counts)
    assert all((value > 0).all() for value in found.values())


def test_mismatch_hint_names_t5_in_tensorflow(tmp_path: pathlib.Path) -> None:
    bundle = Bundle()
    block = "encoder/block_000/layer_000"
    for name in (
        f"{block}/SelfAttention/q",
        f"{block}/layer_norm/scale",
        "shared/embedding",
        "shared/embedding_slot_vr",
    ):
        bundle.add(name, np.full(3, len(name), np.float32))
    path = bundle.save(tmp_path / "model.ckpt-1")
    for level in ("target", "params", ""):
        layer = {"attention": {"query": {"kernel": np.zeros(3, np.float32)}}}
        like: Any = {"encoder": {"layers_0": layer}, "token_embedder": {"embedding": np.zeros(3, np.float32)}}
        like["encoder"]["layers_0"]["pre_attention_layer_norm"] = {"scale": np.zeros(3, np.float32)}
        like = {level: like} if level else like
        with pytest.raises(MismatchError) as caught:
            tr.restore(path, like)
        found = tr.restore(path, like, **suggested(caught.value))
        found = found[level] if level else found
        assert found["encoder"]["layers_0"]["attention"]["query"]["kernel"][0] == len(f"{block}/SelfAttention/q")
        assert found["token_embedder"]["embedding"][0] == len("shared/embedding")


IN_DOUBT: dict[str, tuple[Any, Any, str]] = {
    "two levels": ({"ema": NESTED, "model": NESTED}, NESTED, "'ema'"),
    "two words before names": ({**after("ema.")[0], **after("model.")[0]}, FLAT, "'ema.'"),
    "two places for names": (FLAT, {**after("ema.")[0], **after("model.")[0]}, "'ema.'"),
}


@pytest.mark.parametrize("case", IN_DOUBT)
def test_a_suggestion_in_doubt_names_the_other_choice(tmp_path: pathlib.Path, case: str) -> None:
    saved, like, other = IN_DOUBT[case]
    tr.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like)
    (line,) = lines_of(caught.value)
    assert f"{other} would fit as well" in line
    tr.restore(tmp_path / "c", like, **suggested(caught.value))


NOT_TIED: dict[str, Any] = {
    "a square matrix": {"new": np.ones((4, 4))},
    "a new block": {"new": {"up": np.ones((9, 4)), "down": np.ones((4, 9))}},
    "one more layer": {"mlp_1": {"kernel": np.ones((9, 4))}},
}


@pytest.mark.parametrize("case", NOT_TIED)
def test_mismatch_hint_calls_no_new_part_a_copy(tmp_path: pathlib.Path, case: str) -> None:
    old = {"mlp_0": {"kernel": np.ones((9, 4))}, "sq": np.ones((4, 4))}
    tr.save(tmp_path / "c", old)
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", {**old, **NOT_TIED[case]})
    assert "copy" not in str(caught.value)


def test_closest_suggestion_may_leave_a_difference(tmp_path: pathlib.Path) -> None:
    """The error names the closest cause, even if one difference is left."""
    tr.save(tmp_path / "c", {"params": layers(20)})
    like = {**layers(20), "new": np.ones(3)}
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", like)
    (line,) = lines_of(caught.value)
    assert line.endswith("at='params', which leaves 1 of the 81")
    with pytest.raises(MismatchError, match="1 difference\n  new: expected"):
        tr.restore(tmp_path / "c", like, **suggested_without_rest(caught.value))
    with pytest.raises(MismatchError, match=r"found none of them.*at='params', which leaves 1 of the 41"):
        tr.restore(tmp_path / "c", like, **LENIENT)


def suggested_without_rest(error: MismatchError) -> dict[str, Any]:
    return suggested(MismatchError(str(error).replace(", which leaves 1 of the 81", "")))


UNLIKE: dict[str, tuple[Any, Any]] = {
    "other trees": ({"a": np.ones(2), "b": np.ones(3)}, {"x": np.ones(4), "y": np.ones(5), "z": 1}),
    "other shapes in it": ({"a": layers(3), "b": 1}, {**layers(3), "b": "text", "layers": [1, 2]}),
    "one number": ({"a": {"count": 3, "x": 1}}, {"a": {"sum": 3, "x": 1}}),
    # If arguments are enough, no rule is suggested that would also drop leaves that match.
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
def test_mismatch_names_rule_that_resolves_leaf(tmp_path: pathlib.Path, rule: str) -> None:
    """If no argument resolves a difference, the hint of the leaf names a rule that does."""
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


def test_mismatch_hint_for_shapes_says_where_values_come_from(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"params": params()})
    like = jax.eval_shape(lambda: {"params": params(20)})
    with pytest.raises(MismatchError, match=r"if it has an array and not only a shape, as init\(\) has") as caught:
        tr.restore(tmp_path / "c", like)
    (line,) = lines_of(caught.value)
    restore = line.partition("can keep its own: ")[2]
    found = eval(
        restore, {"tr": tr, "restore": tr.open(tmp_path / "c").restore, "init": lambda: {"params": params(20)}}
    )
    assert found["params"]["head"]["kernel"].shape == (4, 20)
    said = r"the template has only its shape; restore\(like=init\(\), missing=\['params/head/"
    with pytest.raises(MismatchError, match=said):
        tr.restore(tmp_path / "c", like, rules=[tr.rules.drop("params/head/**")], missing="template")


def closed(text: str) -> bool:
    return text.endswith(")") and text.count("(") == text.count(")")


# Whatever the trees


def grown(draw: random.Random, depth: int = 0) -> Any:
    """Draws a tree of containers of all kinds, with names that have a meaning in globs, rules and paths."""
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
    """Draws another version of a tree, with other levels, other names, and leaves that are gone or new."""
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


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("seed", sample_points(range(4)))
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
            # A part is no promise, and neither is advice that leaves the rules to the reader.
            if not any("which leaves" in line or line.endswith(UNSAID) for line in lines_of(error) or [UNSAID]):
                tr.restore(tmp_path / "c", like, **{**options, **suggested(error)})
                followed += 1
    assert followed > 20


LENIENT = {"missing": "template", "extra": "ignore"}
UNSAID = "in the template; use the same in the template, or rename each item by a rule"


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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({f"layers_{n}": {"k": W} for n in range(4)}, {f"layers_{n}": {"k": W} for n in range(1, 5)}),
        ({"pos_embedding": W, "x": W[0]}, {"pos_embedding": W, "x": W[0], "classifier": W}),
        ({"wpe": W, "x": W[0]}, {"wpe": W, "x": W[0], "lm_head": W}),
        (
            {"params": {"a": W, "b": W[0]}, "ema": {"a": W, "b": W[0]}},
            {"ema_params": {"a": W, "b": W[0]}, "params_": {"a": W, "b": W[0]}},
        ),
    ],
    ids=["layers from 0 and from 1", "positions", "positions by another name", "an average"],
)
def test_no_suggestion_puts_an_array_in_the_place_of_another(tmp_path: pathlib.Path, old: Any, new: Any) -> None:
    tr.save(tmp_path / "c", old)
    with pytest.raises(MismatchError) as error:
        tr.restore(tmp_path / "c", like=new)
    said = str(error.value)
    assert not any(f"rules.{name}(" in said for name in ("rename", "copy"))


@pytest.mark.rare
@pytest.mark.long
def test_leaves_that_all_moved_in_ways_of_their_own(tmp_path: pathlib.Path) -> None:
    """As many rules as leaves are not suggested, and the search does not take quadratic time."""
    old = {f"layer{n}": {f"w{n}": np.zeros(2)} for n in range(20_000)}
    new = {f"layer{n}": {"inner": {f"w{n}": np.zeros(2)}} for n in range(20_000)}
    tr.save(tmp_path / "c", old)
    with pytest.raises(MismatchError) as error:
        tr.restore(tmp_path / "c", like=new)
    assert "rules.rename" not in str(error.value)


def test_items_of_lists_that_are_alike_are_not_guessed(tmp_path: pathlib.Path) -> None:
    """No rule is right for sure, and the template's own values in their place would be wrong."""
    tr.save(tmp_path / "x", {"layers": [np.ones(3), np.zeros(3)], "step": 1})
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "x", {"layers": {"first": np.ones(3), "second": np.ones(3)}, "step": 1})
    (line,) = lines_of(caught.value)
    assert line.endswith(UNSAID)


@pytest.mark.parametrize("names", [("enc1_2", "enc2_1"), ("conv1", "dense1")])
def test_numbers_that_may_mean_two_orders_are_not_guessed(tmp_path: pathlib.Path, names: tuple[str, str]) -> None:
    tr.save(tmp_path / "x", {"layers": [np.ones(3), np.zeros(3)]})
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "x", {"layers": dict.fromkeys(names, np.ones(3))})
    assert "rename(" not in lines_of(caught.value)[0]


@pytest.mark.parametrize("numbers", [("0", "1"), (0, 1)])
def test_a_list_whose_paths_a_dict_has_too_is_no_cause(tmp_path: pathlib.Path, numbers: tuple[Any, Any]) -> None:
    tr.save(tmp_path / "x", {"layers": [np.ones(3), np.zeros(3)]})
    head = {"w": np.ones(2), "b": np.ones(1)}
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "x", {"layers": dict.fromkeys(numbers, np.ones(3)), "head": head})
    assert "missing=['head/**']" in lines_of(caught.value)[0]


def test_keys_of_two_kinds_are_different_leaves(tmp_path: pathlib.Path) -> None:
    """Their data has the same shape."""
    key, other = jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")
    tr.save(tmp_path / "x", {"other": other, "key": key})
    search = _Search(flatten_tree({"of": key}), tr.open(tmp_path / "x")._source.entries, None, Policy())
    assert [search.fits("of", path) for path in ("other", "key")] == [False, True]
