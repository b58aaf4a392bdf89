"""Writes the folders here, and `expected.json`, with PEFT 0.21.2 and PyTorch 2.13. The tests do not run it.

`plain` has linear layers, an embedding and a module that is saved entirely. `patterns` has ranks and alphas of its own
for some modules, and rank-stabilized scaling. `dora` has magnitudes. `expected.json` records for each linear layer its
weight, an input and PEFT's output, and for the embedding the vectors of all tokens.
"""

import json
import pathlib
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

HERE = pathlib.Path(__file__).parent
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "embed"], "modules_to_save": ["head"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
        "rank_pattern": {"v_proj": 3, r"layers\.1\.q_proj": 2},
        "alpha_pattern": {r"layers\.0\..*": 5},
    },
    "dora": {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "use_dora": True},
}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(6, 5, bias=False)
        self.v_proj = torch.nn.Linear(5, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_proj(self.q_proj(x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    expected: dict[str, Any] = {}
    for folder, config in CONFIGS.items():
        model = get_peft_model(Model(), LoraConfig(**config))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
        model.save_pretrained(HERE / folder)
        (HERE / folder / "README.md").unlink()
        expected[folder] = {}
        for name, module in model.base_model.model.named_modules():
            if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
                continue
            base = module.base_layer
            x = torch.arange(7) if isinstance(base, torch.nn.Embedding) else torch.randn(3, base.in_features)
            found = {"weight": base.weight, "x": x, "y": module(x)}
            expected[folder][name] = {key: value.tolist() for key, value in found.items()}
    (HERE / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
