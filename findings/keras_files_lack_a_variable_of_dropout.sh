#!/usr/bin/env bash
# keras 3.15.1 with the backend JAX, jax 0.10.2.
#
# Guess: a .keras file has all variables of the model and of its optimizer, so training that continues from it without a
#   shuffle is the training that was interrupted.
# Behaviour: the state of the generator in Dropout is among model.non_trainable_variables, but neither .keras nor
#   .weights.h5 holds it: the group of the layer is empty. A loaded model with a seed draws its first masks again after
#   every restart; without a seed it draws others. Without Dropout, and with a list of all variables, the resumed
#   training is the same bit for bit.
# Why it matters: a job that is restarted once a day trains on the same few masks or noises, with an error nowhere.
#   The number of restarts becomes a part of the result.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import sys

import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


def make(layer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), layer(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(model, epochs):
    model.fit(x, x[:, :1], epochs=epochs, batch_size=8, shuffle=False, verbose=0)
    return model


def weights(model):
    return np.concatenate([np.ravel(array) for array in model.get_weights()])


def by_file(model):
    model.save(file := f"{sys.argv[1]}/model.keras")
    return keras.models.load_model(file)


def by_variables(layer):
    model, other = fit(make(layer), 2), make(layer)
    other.optimizer.build(other.trainable_variables)
    for old, new in zip((*model.variables, *model.optimizer.variables), (*other.variables, *other.optimizer.variables)):
        new.assign(old)
    return fit(other, 2)


def dropout():
    return keras.layers.Dropout(0.5, seed=3)


def activation():
    return keras.layers.Activation("tanh")


same = {}
for layer in (activation, dropout):
    wanted = weights(fit(make(layer), 4))
    model = fit(make(layer), 2)
    loaded = by_file(model)
    if layer is dropout:
        states = [one.layers[0].seed_generator.state.value.tolist() for one in (model, loaded)]
        paths = [variable.path.split("/")[-1] for variable in model.non_trainable_variables]
    found = weights(fit(loaded, 2)), weights(by_variables(layer))
    same[layer.__name__] = [np.array_equal(wanted, one) for one in found]
print("non-trainable variables of the model with Dropout:", paths)
print("the generator's state before the save and after the load:", *states)
print("the resumed training is the same, by .keras and by a list of variables:", same)
assert paths == ["seed_generator_state"] and states == [[3, 8], [3, 0]], "Keras behaves otherwise now"
assert same == {"activation": [True, True], "dropout": [False, True]}, "Keras behaves otherwise now"
PY
export KERAS_BACKEND=jax KERAS_HOME="$dir/home" JAX_PLATFORMS=cpu
"$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
