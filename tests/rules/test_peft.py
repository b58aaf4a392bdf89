"""Adapters of PEFT and qwix: the outputs that these libraries recorded, with the arrays that the rules make."""

import json
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import treering as tr
from helpers import REAL
from treering import rules
from treering.errors import MismatchError

PEFT, QWIX = REAL / "peft", REAL / "qwix"
CONFIG = "adapter_config.json"
BASE = "base_model.model."


def config_of(name: str = "plain") -> dict[str, Any]:
    return json.loads((PEFT / name / CONFIG).read_text())


def recorded(folder: pathlib.Path) -> Any:
    return json.loads((folder / "expected.json").read_text())


@pytest.mark.parametrize("name", ["plain", "patterns"])
def test_restored_layers_compute_what_peft_computed(name: str) -> None:
    ckpt = tr.open(PEFT / name)
    made = ckpt.apply([rules.from_peft(ckpt.metadata[CONFIG])])
    expected = recorded(PEFT)[name]
    assert {path.split("/")[0] for path in made if "/" in path} == expected.keys()
    for module, known in expected.items():
        weight, x, y = (jnp.asarray(known[key]) for key in ("weight", "x", "y"))
        if module == "embed":
            found = weight + made["embed/lora_embedding_a"][...] @ made["embed/lora_embedding_b"][...]
        else:
            a = made[f"{module}/lora_a"]
            layer = nnx.LoRALinear(
                weight.shape[1], weight.shape[0], lora_rank=a.shape[1], use_bias=False, rngs=nnx.Rngs(0)
            )
            layer.kernel.value = weight.T
            template = nnx.state(layer.lora, nnx.LoRAParam)
            nnx.update(layer.lora, made.restore(template, at=module))
            found = layer(x)
        np.testing.assert_allclose(found, y, atol=2e-6, rtol=2e-6)


def test_base_weights_and_adapter_come_from_their_own_files(tmp_path: pathlib.Path) -> None:
    known = {name: jnp.asarray(value) for name, value in recorded(PEFT)["plain"]["layers.1.q_proj"].items()}
    tr.save(tmp_path / "base.safetensors", {"layers.1.q_proj.weight": known["weight"]})
    layer = nnx.LoRALinear(6, 5, lora_rank=4, use_bias=False, rngs=nnx.Rngs(0))
    names = [rules.rename(r"^layers\.1\.q_proj\.weight$", "kernel"), rules.transpose("kernel", (1, 0))]
    restored = tr.restore(tmp_path / "base.safetensors", nnx.state(layer), rules=names, missing=["lora/**"])
    nnx.update(layer, restored)
    ckpt = tr.open(PEFT / "plain")
    names = [rules.from_peft(ckpt.metadata[CONFIG]), rules.rename(r"^layers\.1\.q_proj/", "lora/")]
    nnx.update(layer, ckpt.restore(nnx.state(layer, nnx.LoRAParam), rules=names, extra="ignore"))
    np.testing.assert_allclose(layer(known["x"]), known["y"], atol=2e-6, rtol=2e-6)


def test_only_lora_b_is_scaled_and_powers_of_two_are_exact() -> None:
    ckpt = tr.open(PEFT / "plain")  # the scaling is 2
    made = ckpt.apply([rules.from_peft(config_of())])
    module = "layers.1.v_proj"
    a, b = (ckpt[f"{BASE}{module}.lora_{one}.weight"][...] for one in "AB")
    np.testing.assert_array_equal(made[f"{module}/lora_a"][...], a.T)
    np.testing.assert_array_equal(made[f"{module}/lora_b"][...], 2 * b.T)
    np.testing.assert_array_equal(made["head.weight"][...], ckpt[f"{BASE}head.weight"][...])
    for rows in (slice(1, 3), slice(0, 0)):  # a part of an array reads the same values
        np.testing.assert_array_equal(made[f"{module}/lora_b"][rows], 2 * b.T[rows])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_lora_b_keeps_its_dtype_and_is_rounded_once(dtype: str, tmp_path: pathlib.Path) -> None:
    b = np.random.default_rng(0).standard_normal((5, 3)).astype(dtype)
    tr.save(tmp_path / "a.safetensors", {"q.lora_A.weight": np.ones((3, 2), dtype), "q.lora_B.weight": b})
    config = {**config_of(), "r": 3, "lora_alpha": 7, "use_rslora": True}
    made = tr.open(tmp_path / "a.safetensors").apply([rules.from_peft(config)])["q/lora_b"][...]
    expected = (b.astype(np.float64) * (7 / np.sqrt(3))).astype(dtype).T
    assert made.dtype == expected.dtype
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("alpha", [None, 6, 4.0])
@pytest.mark.parametrize("name", ["plain", "patterns"])
def test_to_peft_undoes_from_peft(name: str, alpha: float | None, tmp_path: pathlib.Path) -> None:
    config = config_of(name)
    there, back = rules.from_peft(config, alpha), rules.to_peft(config, alpha)
    tr.convert(PEFT / name, tmp_path / "jax", rules=[there, rules.rename(r"\.", "/")])
    tr.convert(tmp_path / "jax", tmp_path / "again", format="safetensors", rules=[back], max_shard_size="1GB")
    assert (tmp_path / "again" / "adapter_model.safetensors").exists()
    before, after = tr.open(PEFT / name), tr.open(tmp_path / "again")
    assert json.loads((tmp_path / "again" / CONFIG).read_text()) == config
    assert before.metadata == after.metadata and list(before) == sorted(after)
    for path in before:
        if name == "plain" and alpha != 6:
            np.testing.assert_array_equal(after[path][...], before[path][...])
        else:
            np.testing.assert_allclose(after[path][...], before[path][...], rtol=2e-7)


def test_qwix_computes_what_it_recorded(tmp_path: pathlib.Path) -> None:
    """The layers of qwix multiply by alpha / rank, here 6 / 4, themselves."""
    known = recorded(QWIX)
    x, y, q_proj, heads = (np.asarray(known[key]) for key in ("x", "y", "q_proj", "heads"))
    config = {**config_of(), "target_modules": ["q_proj", "heads"], "modules_to_save": None, "lora_alpha": 6}
    names = [rules.rename(r"/kernel_lora_", "/lora_"), rules.reshape("heads/lora_b", (4, 6))]
    tr.convert(
        QWIX / "lora.safetensors", tmp_path / "peft", format="safetensors", rules=[*names, rules.to_peft(config, 6)],
        max_shard_size="1GB",
    )  # fmt: skip
    found = {path: array[...] for path, array in tr.open(tmp_path / "peft").items()}

    def peft_linear(x: np.ndarray, name: str, weight: np.ndarray) -> np.ndarray:
        a, b = (found[f"{BASE}{name}.lora_{one}.weight"] for one in "AB")
        return x @ weight.T + 6 / 4 * (x @ a.T @ b.T)

    h = peft_linear(x, "q_proj", q_proj.T)
    np.testing.assert_allclose(peft_linear(h, "heads", heads.reshape(5, 6).T).reshape(3, 2, 3), y, rtol=1e-5)

    back = [
        rules.from_peft(config, alpha=6),
        rules.reshape("heads/lora_b", (4, 2, 3)),
        rules.rename(r"/lora_", "/kernel_lora_"),
    ]
    tr.convert(tmp_path / "peft", tmp_path / "qwix.safetensors", rules=back)
    assert not tr.diff(QWIX / "lora.safetensors", tmp_path / "qwix.safetensors")


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no rank": ({"r": None}, "expected r, a positive integer, found None"),
    "rank 0": ({"r": 0}, "expected r, a positive integer, found 0"),
    "rank True": ({"r": True}, "expected r, a positive integer, found True"),
    "no alpha": ({"lora_alpha": ...}, "expected lora_alpha, a finite number other than 0, found nothing"),
    "alpha text": ({"lora_alpha": "16"}, "lora_alpha.*found '16'"),
    "alpha too large": ({"lora_alpha": 10**400}, "lora_alpha.*found 1000"),
    "alpha NaN": ({"lora_alpha": float("nan")}, "lora_alpha.*found nan"),
    "no type": ({"peft_type": ...}, "peft_type.*'LORA', found nothing"),
    "IA3": ({"peft_type": "IA3"}, "peft_type.*'LORA', found 'IA3'"),
    "LOHA": ({"peft_type": "LOHA"}, "peft_type.*'LORA', found 'LOHA'"),
    "DoRA": ({"use_dora": True}, "use_dora.*merge_and_unload"),
    "a later kind": ({"use_something": True}, "use_something.*merge_and_unload"),
    "biases": ({"lora_bias": True}, "lora_bias.*merge_and_unload"),
    "parameters": ({"target_parameters": ["experts.w"]}, "target_parameters.*merge_and_unload"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights.*merge_and_unload"),
    "rank pattern": ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern.*q_proj.*positive integer, found '8'"),
    "alpha pattern": ({"alpha_pattern": [1]}, "alpha_pattern.*found \\[1\\]"),
    "no regular expression": ({"alpha_pattern": {"(": 1}}, "'\\('.*not a regular expression"),
    "rslora": ({"use_rslora": "yes"}, "use_rslora.*True or False, found 'yes'"),
    "targets": ({"target_modules": 3}, "target_modules.*found 3"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
@pytest.mark.parametrize("rule", [rules.from_peft, rules.to_peft])
def test_configs_that_say_no_scale(rule: Any, case: str) -> None:
    changed, text = BAD_CONFIGS[case]
    config = {key: value for key, value in {**config_of(), **changed}.items() if value is not ...}
    with pytest.raises(MismatchError, match=text):
        rule(config)


def test_arguments_that_are_no_config() -> None:
    for wrong in (tr.open(PEFT / "plain").metadata, str(PEFT / "plain" / CONFIG), None):
        with pytest.raises(MismatchError, match=r"from_peft.*peft_type|from_peft.*expected the dict"):
            rules.from_peft(wrong)  # pyright: ignore[reportArgumentType]
    for alpha in (0, float("inf"), "16", True):
        with pytest.raises(MismatchError, match="alpha"):
            rules.to_peft(config_of(), alpha)  # pyright: ignore[reportArgumentType]


A, B = np.ones((4, 6), np.float32), np.ones((5, 4), np.float32)
BAD_LEAVES: dict[str, tuple[dict[str, Any], str]] = {
    "B is missing": ({"q.lora_A.weight": A}, r"q\.lora_A\.weight has no .*q\.lora_B\.weight"),
    "A is missing": ({"q.lora_B.weight": B}, r"q\.lora_B\.weight has no .*q\.lora_A\.weight"),
    "another rank": ({"q.lora_A.weight": A[:2], "q.lora_B.weight": B}, r"q\.lora_A.*\[2, 6\].*rank 4"),
    "another rank of B": ({"q.lora_A.weight": A, "q.lora_B.weight": B[:, :2]}, r"q\.lora_B.*\[5, 2\].*rank 4"),
    "a convolution": ({"q.lora_A.weight": A[..., None, None], "q.lora_B.weight": B}, "two axes.*4, 6, 1, 1"),
    "integers": ({"q.lora_A.weight": A, "q.lora_B.weight": B.astype("i1")}, "floating-point.*int8"),
    "magnitudes": (
        {"q.lora_A.weight": A, "q.lora_B.weight": B, "q.lora_magnitude_vector": B[:, 0]},
        "lora_magnitude_vector",
    ),
    "a bias": ({"q.lora_A.weight": A, "q.lora_B.weight": B, "q.lora_B.bias": B[:, 0]}, r"lora_B\.bias"),
    "an adapter's name": ({"q.lora_A.default.weight": A, "q.lora_B.default.weight": B}, r"lora_A\.default\.weight"),
    "nothing": ({"head.weight": B}, "matches none"),
    "both names": (
        {f"{p}q.lora_{n}.weight": x for p in ("", BASE) for n, x in (("A", A), ("B", B))},
        "two leaves would be called 'q/lora_a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LEAVES)
def test_arrays_that_do_not_fit_the_config(case: str, tmp_path: pathlib.Path) -> None:
    arrays, text = BAD_LEAVES[case]
    tr.save(tmp_path / "a.safetensors", arrays)
    with pytest.raises(MismatchError, match=text):
        tr.open(tmp_path / "a.safetensors").apply([rules.from_peft(config_of())])


BAD_TREES: dict[str, tuple[dict[str, Any], str]] = {
    "names of qwix": ({"q_proj": {"kernel_lora_a": A.T, "kernel_lora_b": B.T}}, "q_proj/kernel_lora_a.*rename"),
    "no target": ({"q_proj": {"lora": {"lora_a": A.T, "lora_b": B.T}}}, "q_proj.lora.*target_modules"),
    "another rank": ({"q_proj": {"lora_a": A.T[:, :2], "lora_b": B.T}}, r"lora_a.*\[6, 2\].*rank 4"),
    "several axes": ({"q_proj": {"lora_a": A.T, "lora_b": B.T[..., None]}}, "two axes.*reshape"),
    "one of two": ({"q_proj": {"lora_a": A.T}}, "q_proj/lora_a has no .*q_proj/lora_b"),
}


@pytest.mark.parametrize("case", BAD_TREES)
def test_trees_that_peft_would_not_load(case: str, tmp_path: pathlib.Path) -> None:
    tree, text = BAD_TREES[case]
    with pytest.raises(MismatchError, match=text):
        tr.save(tmp_path / "a", tree, rules=[rules.to_peft(config_of())])
    assert not (tmp_path / "a").exists()


def test_a_scale_that_overflows_is_an_error(tmp_path: pathlib.Path) -> None:
    arrays = {"q.lora_A.weight": A.astype("f2"), "q.lora_B.weight": np.full((5, 4), 60000, np.float16)}
    tr.save(tmp_path / "a.safetensors", arrays)
    made = tr.open(tmp_path / "a.safetensors").apply([rules.from_peft(config_of())])
    with pytest.raises(MismatchError, match=r"q\.lora_B\.weight.*float16.*cast"):
        made["q/lora_b"][...]
    wider = [rules.cast("**", "float32"), rules.from_peft(config_of())]
    assert (tr.restore(tmp_path / "a.safetensors", rules=wider)["q"]["lora_b"] == 120000).all()


def test_target_modules_may_be_one_regular_expression(tmp_path: pathlib.Path) -> None:
    tree = {"layers": {"0": {"q_proj": {"lora_a": A.T, "lora_b": B.T}}}}
    for targets in (r".*\.q_proj", "all-linear", None, ["0.q_proj"]):
        config = {**config_of(), "target_modules": targets}
        tr.save(tmp_path / "a", tree, rules=[rules.to_peft(config)], overwrite=True)
        assert list(tr.open(tmp_path / "a")) == [f"{BASE}layers.0.q_proj.lora_{one}.weight" for one in "AB"]
    with pytest.raises(MismatchError, match=re.escape("layers.0.q_proj")):
        tr.save(tmp_path / "b", tree, rules=[rules.to_peft({**config_of(), "target_modules": "q_proj"})])


@pytest.mark.filterwarnings("default")  # of PEFT and its dependencies
def test_peft_loads_what_is_written(tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.v_proj = torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 6, bias=False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

    config = config_of("patterns")
    tr.convert(PEFT / "patterns", tmp_path / "nnx", rules=[rules.from_peft(config), rules.rename(r"\.", "/")])
    tree = tr.restore(tmp_path / "nnx")
    tr.save(
        tmp_path / "peft", tree, format="safetensors", rules=[rules.to_peft(config)],
        filename_pattern="adapter_model{suffix}.safetensors", metadata={CONFIG: config},
    )  # fmt: skip
    model = peft.PeftModel.from_pretrained(Model(), tmp_path / "peft")
    for name, known in recorded(PEFT)["patterns"].items():
        layer = model.base_model.model.get_submodule(name)
        layer.base_layer.weight.data = torch.tensor(known["weight"])
        found = layer(torch.tensor(known["x"])).detach().numpy()
        np.testing.assert_allclose(found, known["y"], atol=1e-6, rtol=1e-6)
