"""Reads with T5X what Treering wrote for it. Run it like `make.py`, with Treering installed.

Treering converts the checkpoints in this folder: `load_t5x_checkpoint` must find the same bits. Treering also writes
a train state: `Checkpointer.restore` must fill a blank one from it, over eight devices.
"""

import json
import pathlib
import tempfile

import make
import numpy as np
from library import adafactor, checkpoints, partitioning

import treering as tr
from treering.formats.t5x import write

write.MAX_INLINE_BYTES, write.CHUNK_BYTES = (
    64,
    256,
)  # small limits: otherwise such small arrays get no files of their own
expected = json.loads((make.HERE / "expected.json").read_text())
with tempfile.TemporaryDirectory() as folder:
    for name, leaves in expected.items():
        path = pathlib.Path(folder) / name
        tr.convert(make.HERE / name, path, format="t5x")
        found = json.loads(json.dumps(make.described(str(path))))
        assert found == leaves, {key: (found.get(key), leaves[key]) for key in leaves if found.get(key) != leaves[key]}
        chunks = [file for file in path.rglob("*") if file.is_file()]
        print(
            f"{name}: {len(leaves)} leaves, {len(chunks)} files, {checkpoints.latest_step(str(path.parent))} the latest"
        )
    rules = adafactor.standard_logical_factor_rules()
    partitioner = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=make.RULES)
    adam = make.state(adafactor.Adafactor(0.1, logical_factor_rules=rules, beta1=0.5, min_dim_size_to_factor=4))
    state = make.spread(adam, partitioner)
    leaves = state.state_dict()
    leaves["state"]["step"] = int(leaves["state"]["step"])
    tr.save(f"{folder}/live/checkpoint_7", leaves, format="t5x")
    blank = state.replace_params(make.jax.tree.map(make.jnp.zeros_like, state.params))
    back = checkpoints.Checkpointer(blank, partitioner, f"{folder}/live").restore()
    for one, other in zip(make.jax.tree.leaves(state), make.jax.tree.leaves(back), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    print("restored into a train state:", len(make.jax.tree.leaves(back)), "leaves")
