"""Reads with FJFormer and EasyLM what Treering wrote. Run it like `make.py`, with Treering installed.

Treering converts the checkpoints in this folder to its own format and back: both readers must find the same bits.
Treering also writes a train state: each of their kinds of loading must fill a blank one from it.
"""

import json
import tempfile

import jax
import jax.numpy as jnp
import libraries
import make
import numpy as np
from flax import serialization

import treering as tr

expected = json.loads((make.HERE / "expected.json").read_text())
loaders = (libraries.CheckpointManager.load_checkpoint, libraries.StreamingCheckpointer.load_checkpoint)


def check_same(found: object, made: object) -> None:
    theirs, ours = jax.tree.leaves(found), jax.tree.leaves(made)
    assert len(theirs) == len(ours)
    for one, other in zip(theirs, ours, strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


with tempfile.TemporaryDirectory() as folder:
    for name, leaves in expected.items():
        if name.endswith(".safetensors"):
            tr.convert(make.HERE / name, f"{folder}/x.safetensors", format="safetensors")
            found = libraries.CheckpointManager.load_checkpoint_safe(f"{folder}/x.safetensors")[0]
            assert json.loads(json.dumps(make.described(found))) == leaves
            continue
        tr.convert(make.HERE / name, f"{folder}/own", overwrite=True)
        tr.convert(f"{folder}/own", f"{folder}/stream", format="fjformer", overwrite=True)
        for load in loaders:
            assert json.loads(json.dumps(make.described(load(f"{folder}/stream")))) == leaves, name
    made = make.state(7)
    tr.save(f"{folder}/live", serialization.to_state_dict(made), format="fjformer")
    tr.save(f"{folder}/params", made.params["params"], format="fjformer")
    tr.save(f"{folder}/flax", made.params["params"], format="flax")
    blank = jax.tree.map(jnp.zeros_like, made)
    for library, word in ((libraries.CheckpointManager, "state"), (libraries.StreamingCheckpointer, "trainstate")):
        for kind in (word, f"{word}_params", "params", "flax_params"):
            place = {"params": "params", "flax_params": "flax"}.get(kind, "live")
            if word == "state":
                state, params = library.load_state_checkpoint(kind, f"{folder}/{place}", blank)
            else:
                state, params = library.load_trainstate_checkpoint(f"{kind}::{folder}/{place}", blank)
            check_same(state if kind == word else params["params"], made if kind == word else made.params["params"])
            print(library.__name__, kind)
print(len(expected), "files")
