"""MLX, PyTorch and transformers read what Treering writes, and Treering reads what they write, bit for bit.

None of them is a test dependency, because they are large: ``pip install torch transformers 'mlx[cpu]'``. A test is
skipped where its tool is absent. `test_keras_files.py` and `tests/test_keras.py` do the same with Keras.
"""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treering as tr

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
RNG = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    **{f"layers.{n}.{d}": RNG.integers(0, 100, (3, 5)).astype(d) for n, d in enumerate(("int8", "uint8", "int32"))},
    "embed": RNG.standard_normal((7, 4)).astype(np.float32),
    "half": RNG.standard_normal((2, 3, 4)).astype(np.float16),
    "brain": RNG.standard_normal((9, 2)).astype(ml_dtypes.bfloat16),
    "special": np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32),
    "long": np.array([-(2**62), 2**62 + 1]),
    "flags": np.array([True, False, True]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        ours = np.asarray(found[key])
        assert (ours.dtype, ours.shape) == (array.dtype, array.shape), key
        assert ours.tobytes() == np.ascontiguousarray(array).tobytes(), key


def arrays_of(path: Path) -> dict[str, Any]:
    ckpt = tr.open(path)
    return {key: ckpt[key][...] for key in ckpt}


def from_mlx(array: Any) -> np.ndarray[Any, Any]:
    """NumPy has no bfloat16, so MLX cannot convert one itself."""
    import mlx.core as mx

    return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16) if array.dtype == mx.bfloat16 else np.array(array)


def to_mlx(array: np.ndarray[Any, Any]) -> Any:
    import mlx.core as mx

    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def test_mlx(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'mlx[cpu]'")
    given = {key: to_mlx(array) for key, array in ARRAYS.items()}
    assert_equal({key: from_mlx(array) for key, array in given.items()}, ARRAYS)
    mx.save_safetensors(str(tmp_path / "theirs.safetensors"), given, {"format": "mlx"})
    assert_equal(arrays_of(tmp_path / "theirs.safetensors"), ARRAYS)
    for save, name in ((mx.savez, "plain.npz"), (mx.savez_compressed, "packed.npz")):
        save(str(tmp_path / name), **given)
        assert_equal(arrays_of(tmp_path / name), ARRAYS)
    tr.save(tmp_path / "ours.safetensors", ARRAYS)
    loaded = mx.load(str(tmp_path / "ours.safetensors"))
    assert_equal({key: from_mlx(array) for key, array in loaded.items()}, ARRAYS)
    tr.save(tmp_path / "shards", ARRAYS, format="safetensors", max_shard_size=100)
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    loaded = {key: array for file in files for key, array in mx.load(str(file)).items()}
    assert len(files) > 2
    assert_equal({key: from_mlx(array) for key, array in loaded.items()}, ARRAYS)


def from_torch(tensor: Any) -> np.ndarray[Any, Any]:
    import torch  # type: ignore

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(array: np.ndarray[Any, Any]) -> Any:
    import torch  # type: ignore

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def test_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from safetensors.torch import load_file, save_file

    given = {key: to_torch(array) for key, array in ARRAYS.items()}
    save_file(given, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert_equal(arrays_of(tmp_path / "theirs.safetensors"), ARRAYS)
    torch.save(given, tmp_path / "theirs.pt")
    assert_equal(arrays_of(tmp_path / "theirs.pt"), ARRAYS)
    tr.save(tmp_path / "ours.safetensors", ARRAYS)
    assert_equal({key: from_torch(one) for key, one in load_file(tmp_path / "ours.safetensors").items()}, ARRAYS)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "training.pt")
    found = tr.restore(tmp_path / "training.pt")
    weights = {key: from_torch(one) for key, one in state["model"].items()}
    assert_equal(found["model"], weights)
    for number, moments in state["optimizer"]["state"].items():
        assert_equal(found["optimizer"]["state"][number], {key: from_torch(one) for key, one in moments.items()})
    assert found["epoch"] == 3 and found["optimizer"]["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]
    tr.save(tmp_path / "model.safetensors", found["model"])
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_equal({key: from_torch(one) for key, one in other.state_dict().items()}, weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", [None, "8KB"])
@pytest.mark.parametrize("kind", ["Bert", "Llama", "GPT2"])
def test_transformers(
    tmp_path: Path, kind: str, shard: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model_class, config = {
        "Bert": (transformers.BertModel, transformers.BertConfig(vocab_size=50, **sizes)),
        "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(vocab_size=50, **sizes)),
        # Its embedding and its head are tied: one tensor, which is stored once.
        "GPT2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)),
    }[kind]
    torch.manual_seed(0)
    model = model_class(config).to(getattr(torch, dtype)).eval()
    options: dict[str, Any] = {} if shard is None else {"max_shard_size": shard}
    model.save_pretrained(tmp_path / "theirs", **options)
    index = "model.safetensors.index.json"
    assert (tmp_path / "theirs" / index).exists() == (shard is not None)
    weights = {key: from_torch(one) for key, one in model.state_dict().items()}
    found = arrays_of(tmp_path / "theirs")
    tied = weights.keys() - found.keys()
    assert tied == ({"lm_head.weight"} if kind == "GPT2" else set())
    assert_equal(found, {key: one for key, one in weights.items() if key not in tied})
    assert dtype in {array.dtype.name for array in found.values()}

    tr.save(tmp_path / "ours", found, format="safetensors", max_shard_size=shard or "5GB")
    model.config.save_pretrained(tmp_path / "ours")
    assert (tmp_path / "ours" / index).exists() == (shard is not None)
    loaded, report = model_class.from_pretrained(tmp_path / "ours", dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    assert_equal({key: from_torch(one) for key, one in loaded.state_dict().items()}, weights)
    tokens = torch.arange(5)[None]
    assert torch.equal(model(tokens)[0], loaded.eval()(tokens)[0])
