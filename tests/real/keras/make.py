"""Writes the files in this folder with Keras 3.15 and h5py 3.16. The tests do not run it.

`expected.json` has what Keras's own reader finds, by the names of the groups and variables.
"""

import hashlib
import json
import os
import pathlib

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from keras.src.saving.saving_lib import H5IOStore, ShardedH5IOStore

HERE = pathlib.Path(__file__).parent


def model(policy: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head"), keras.layers.BatchNormalization()])
    made.compile("adam", "mse")
    made.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    return made


def described(store: H5IOStore) -> dict[str, dict[str, object]]:
    found = {}
    for group in ("layers/dense", "layers/batch_normalization", "optimizer"):
        entry = store.get(group)
        for name in entry.keys():  # noqa: SIM118 (not a dict)
            array = np.asarray(entry[name])
            about = {"dtype": array.dtype.name, "shape": list(array.shape)}
            found[f"{group}/vars/{name}"] = {**about, "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
    store.close()
    return found


expected = {}
for name, policy in (("single", "float32"), ("half", "bfloat16")):
    model(policy).save_weights(HERE / f"{name}.weights.h5")
    expected[f"{name}.weights.h5"] = described(H5IOStore(HERE / f"{name}.weights.h5"))
model("float32").save_weights(HERE / "shards.weights.json", max_shard_size=8e-8)
expected["shards.weights.json"] = described(ShardedH5IOStore(HERE / "shards.weights.json"))
model("float32").save(HERE / "model.keras")
expected["model.keras"] = expected["single.weights.h5"]  # the same variables
(HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
