"""Writes what T5X stored in early 2022, with TensorStore before 0.1.17, which left out chunks of zeros.

Run `python make_old.py` with one of the releases in `../README.md`. Specs, names and file are those of T5X at 7c8edb0;
T5X itself is not called. Before 0.1.14, TensorStore had paths in a bucket outside of `kvstore`. The tests do not run
this file.
"""

import pathlib
import shutil
import sys

import msgpack
import numpy as np
import tensorstore as ts

HERE = pathlib.Path(__file__).parent / sys.argv[1]  # the release of TensorStore


def stored(name: str, array: np.ndarray, chunks: list) -> dict:
    """Writes an array; returns its spec as T5X makes it, for a bucket before 0.1.14 and for files since then."""
    metadata = {"compressor": {"id": "gzip"}, "shape": array.shape, "chunks": chunks, "dtype": array.dtype.str}
    files = {"driver": "file", "path": str(HERE / "checkpoint_1000" / name)}
    ts.open({"driver": "zarr", "kvstore": files, "metadata": metadata}, create=True).result().write(array).result()
    if sys.argv[1] >= "0.1.14":
        return ts.Spec({"driver": "zarr", "kvstore": {"driver": "file", "path": name}, "metadata": metadata}).to_json()
    bucket = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
    return ts.Spec({"driver": "zarr", "kvstore": bucket, "path": name, "metadata": metadata}).to_json()


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    kernel = np.arange(32, dtype=np.float32).reshape(8, 4)
    kernel[:4] = 0
    target = {
        "kernel": stored("target.kernel", kernel, [4, 4]),
        "bias": stored("target.bias", np.zeros(4, np.float32), [4]),
        "scale": stored("target.scale", np.ones(4, np.float32), [2]),
    }
    data = msgpack.packb({"version": 3, "optimizer": {"target": target}})
    (HERE / "checkpoint_1000" / "checkpoint").write_bytes(data)
