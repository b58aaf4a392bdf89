#!/usr/bin/env bash
# zarr-python 3.1.5 with its default settings: a fill value of 0, and no chunks that equal it.
#
# Guess: a chunk of -0.0 comes back as -0.0 for floats and for complex numbers, because zarr-python compares the bits of
#   zeros: its default must not change what is stored.
# Behaviour: it does so for floats only. A chunk of complex -0.0 is left out, and comes back as +0.0. If one element of
#   the chunk is not zero, the signs stay. TensorStore keeps them in both cases.
# Why it matters: the sign of a zero decides on which side of a branch cut sqrt and log are. So the bits of a complex
#   array depend on the chunks that it is stored in, and a copy is not what was copied.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet zarr==3.1.5 numpy==2.3.5 tensorstore==0.1.86
cat > "$dir/job.py" <<'PY'
import numpy as np
import tensorstore
import zarr


def copied(array):
    stored = zarr.create_array(zarr.storage.MemoryStore(), shape=array.shape, chunks=(2,), dtype=array.dtype)
    stored[:] = array
    return stored[:]


def by_tensorstore(array):
    where = {"driver": "zarr3", "kvstore": {"driver": "memory"}}
    stored = tensorstore.open(where, create=True, dtype=array.dtype, shape=array.shape).result()
    stored.write(array).result()
    return stored.read().result()


floats = np.full(2, -0.0, np.float32)
zeros = np.full(2, complex(-1, -0.0), np.complex64)
zeros.real = -0.0
mixed = np.array([zeros[0], 1], np.complex64)
root = {name: np.sqrt(array[0] - 1) for name, array in (("written", zeros), ("read", copied(zeros)))}
print("float32 -0.0 comes back as:        ", copied(floats)[0])
print("complex64 -0.0 comes back as:      ", copied(zeros)[0])
print("next to a number that is not zero: ", copied(mixed)[0])
print("by TensorStore:                    ", by_tensorstore(zeros)[0])
print("sqrt(x - 1) of what was written and of what was read:", root["written"], root["read"])
kept = [copied(floats).tobytes() == floats.tobytes(), copied(mixed).tobytes() == mixed.tobytes()]
kept.append(by_tensorstore(zeros).tobytes() == zeros.tobytes())
assert all(kept) and copied(zeros).tobytes() != zeros.tobytes(), "zarr-python behaves otherwise now"
assert root["written"].imag == -1 and root["read"].imag == 1, "zarr-python behaves otherwise now"
PY
"$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
