"""`python -m fuzz.seeds`: writes the small files that a fuzzer starts from into the corpus."""

import pickle
import struct
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import treering as tr
from attacks.subjects import SUBJECTS
from helpers import REAL

from .targets import CORPUS

_ARRAYS = {"a": np.arange(4).reshape(2, 2).T, "b": [np.float32(1), np.array(["2020"], "M8[25s]")], "c": {b"x": 1}}


def seeds(folder: Path) -> dict[str, list[bytes]]:
    """Returns the seeds by target."""
    from tensorflow_bundles import data_block, field, shape_of, snappy

    made = {name: make(folder / name.replace(", ", "-")) for name, make in SUBJECTS.items() if not _mkdir(folder, name)}
    tree = {"a": [1, 2.5, None, True, "x", b"y", 1j, 2**70, (), {}], "b": jnp.ones(2), "c": np.float32(1)}
    tr.save(folder / "values", tree, step=3, metrics={"loss": 0.5, "nan": float("nan")}, metadata={"a": [1]})
    entry = field(1, 1) + field(2, shape_of((3, 4))) + field(5, 48) + field(6, 7, fixed=True)
    blocks = data_block([(b"", field(1, 1)), (b"deep/bias", entry), (b"weight", entry)], 2)
    single = made["safetensors"].read_bytes()
    return {
        "manifest": [(path / "treering.json").read_bytes()[:-28] for path in (made["treering"], folder / "values")],
        "header": [single[8 : 8 + struct.unpack("<Q", single[:8])[0]]],
        "flax": [made["flax"].read_bytes()],
        "stream": [made["fjformer"].read_bytes()],
        "records": [made["equinox"].read_bytes(), b'{"a": 1}\n' + made["equinox"].read_bytes()],
        "table": [Path(f"{made['tensorflow']}.index").read_bytes()],
        "block": [blocks, snappy(blocks) + bytes(len(snappy(blocks)))],
        "archive": [made["torch"].read_bytes()],
        "hdf5": [(REAL / "keras" / f"{name}.weights.h5").read_bytes() for name in ("single", "half")],
        "pickle": [(made["dcp"] / ".metadata").read_bytes(), *(pickle.dumps(_ARRAYS, protocol) for protocol in (2, 5))],
        "zarr": [
            (made["levanter"] / "weight" / ".zarray").read_bytes().replace(b'": ', b'":'),
            (
                b'{"zarr_format":3,"node_type":"array","shape":[12],"data_type":"float32","chunk_grid":{"name":"regular",'
                b'"configuration":{"chunk_shape":[12]}},"chunk_key_encoding":{"name":"default"},"codecs":[{"name":"bytes",'
                b'"configuration":{"endian":"little"}}],"fill_value":0}'
            ),
        ],
    }


def _mkdir(folder: Path, name: str) -> None:
    (folder / name.replace(", ", "-")).mkdir()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for target, files in seeds(Path(folder)).items():
            (CORPUS / target).mkdir(parents=True, exist_ok=True)
            for n, data in enumerate(files):
                (CORPUS / target / f"seed-{n}").write_bytes(data)


if __name__ == "__main__":
    main()
