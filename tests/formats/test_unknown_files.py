"""Tests of files that are not checkpoints. The error first says what they are and what to do."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import scipy.io

import torch_files
import treering as tr
from helpers import REAL
from tensorflow_bundles import Bundle
from treering import formats, stores
from treering.errors import CorruptError, NotFoundError, TreeringError, UnsupportedError

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
TREE = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "c": {"b": np.ones(700)}}
RANDOM = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8).tobytes()


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def assert_pointer(path: Path, file: Path) -> None:
    """Asserts that restoring raises an error that names the file with the pointer, and says what to do."""
    with pytest.raises(CorruptError) as caught:
        tr.open(path).restore()
    assert str(caught.value) == f"{file}: found a git-lfs pointer instead of the file; run `git lfs pull` there"


@pytest.mark.parametrize("suffix", ["", ".safetensors", ".eqx", ".msgpack", ".bin", ".index"])
def test_a_pointer_of_git_lfs(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(POINTER)
    assert_pointer(path, path)
    for name in ("safetensors", "flax", "fjformer"):  # A run opens a step that it found by its name in this way.
        with pytest.raises(CorruptError, match="git lfs pull"):
            formats.get(name).open(stores.get(""), str(path))


@pytest.mark.parametrize("name", ["model.safetensors", "flax_model.msgpack", "pytorch_model.bin", "x/checkpoint"])
def test_a_pointer_in_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(POINTER)
    (tmp_path / "config.json").write_text("{}")
    assert_pointer(tmp_path, tmp_path / name)


def test_a_pointer_in_the_place_of_an_index_of_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt-10.index").write_bytes(POINTER)
    assert_pointer(tmp_path / "model.ckpt-10", tmp_path / "model.ckpt-10.index")
    real = Path(__file__).parent.parent / "real" / "tensorflow" / "t5"
    shutil.copytree(real, tmp_path / "t5")
    data = next(file for file in files_of(tmp_path / "t5") if ".data-" in file.name)
    data.write_bytes(POINTER)
    assert_pointer(tmp_path / "t5", data)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("treering", {}),
        ("safetensors", {"max_shard_size": 1000}),
        ("flax", {}),
        ("fjformer", {}),
        ("orbax", {}),
        ("t5x", {}),
        ("levanter", {}),
    ],
)
def test_each_file_of_a_checkpoint_as_a_pointer(tmp_path: Path, format: str, options: dict[str, Any]) -> None:
    tr.save(tmp_path / "whole", TREE, format=format, **options)
    pointed = 0
    for file in files_of(tmp_path / "whole"):
        copy = tmp_path / "copy"
        (shutil.copytree if (tmp_path / "whole").is_dir() else shutil.copy)(tmp_path / "whole", copy)
        place = copy / file.relative_to(tmp_path / "whole")
        os.chmod(place, 0o644)
        place.write_bytes(POINTER)
        try:
            tr.open(copy).restore()
        except TreeringError:
            assert_pointer(copy, place)
            pointed += 1
        finally:
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
    files = len(files_of(tmp_path / "whole"))
    # The database of Orbax leaves files that no reader needs.
    assert pointed == files or (format == "orbax" and pointed >= 4)


def zipped(**files: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def tarred() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    return data.getvalue()


def matlab() -> bytes:
    data = io.BytesIO()
    scipy.io.savemat(data, {"w": np.ones(3)})
    return data.getvalue()


LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)  # the first bytes of torch.save before 1.6
KINDS = [
    ("epoch=3.ckpt", LEGACY, "a file of PyTorch before 1.6, a pickle.*; save it again where PyTorch is"),
    ("model.pt", zipped(**{"model/data/0": b""}), r"probably a program of TorchScript; .*torch.jit.load"),
    ("state.pkl", pickle.dumps({"w": [1.0]}), "a pickle, which is never opened"),
    ("old.pickle", pickle.dumps({"w": [1.0]}, 2), "a pickle, which is never opened"),
    ("model.zip", zipped(a=b"b"), "a zip archive; unpack it"),
    ("model.tar", tarred(), "a tar archive; unpack it"),
    ("model.tar.gz", gzip.compress(tarred()), "compressed by gzip; unpack it"),
    ("model.safetensors.gz", gzip.compress(RANDOM), "compressed by gzip; unpack it"),
    ("model.bz2", bz2.compress(RANDOM), "compressed by bzip2"),
    ("model.xz", lzma.compress(RANDOM), "compressed by xz"),
    ("model.gguf", b"GGUF\x03\0\0\0" + bytes(500), "GGUF"),
    ("model.onnx", b"\x08\x08\x12\x07pytorch" + bytes(500), "ONNX"),
    ("data.mat", matlab(), "a file of MATLAB; load it with scipy.io.loadmat"),
    ("new.mat", b"MATLAB 7.3 MAT-file".ljust(512) + b"\x89HDF\r\n\x1a\n", "a file of MATLAB, in HDF5"),
    ("data.parquet", b"PAR1\x15\x04" + bytes(500), "Parquet, a table; load it with pandas.read_parquet"),
    ("data.arrow", b"ARROW1\0\0" + bytes(500), "Arrow, a table"),
    ("model.bin", b"<!DOCTYPE html><html><head>", "a page of HTML"),
    ("empty", b"", "empty"),
]


@pytest.mark.parametrize(("name", "data", "text"), KINDS, ids=[name for name, _, _ in KINDS])
def test_files_of_other_kinds(tmp_path: Path, name: str, data: bytes, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match=rf"^{path}: it is {text}.*; of no format .*:\n  (tree|torch)"):
        tr.open(path)
    if name.endswith((".bin", ".pt", ".ckpt", ".pkl", ".h5", ".onnx", ".mat", ".parquet")):
        with pytest.raises(NotFoundError, match=rf"^{tmp_path}: {name} in it is {text}.*; of no format"):
            tr.open(tmp_path)


def folders(path: Path, **files: str) -> None:
    """Writes a folder for each file of tensors, and one without any."""
    for folder, name in {**files, "logs": ""}.items():
        (path / folder.replace("_", "-")).mkdir(parents=True)
        if name:
            safetensors.numpy.save_file({"w": np.ones(3)}, path / folder.replace("_", "-") / name)


def test_the_output_of_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    """The advice names the checkpoints, and not how to read `training_args.bin`, which is a pickle."""
    folders(tmp_path, checkpoint_500="model.safetensors", checkpoint_1000="adapter_model.safetensors", checkpoint_9="")
    (tmp_path / "training_args.bin").write_bytes(torch_files.archive({"w": torch_files.tensor(np.ones(3))}))
    text = "checkpoints in it; open one by its own path: checkpoint-1000, checkpoint-500; of no"
    for read in (tr.open, tr.restore, tr.verify):
        with pytest.raises(NotFoundError, match=text):
            read(tmp_path)
    assert tr.restore(tmp_path / "checkpoint-1000")["w"].tolist() == [1, 1, 1]
    for file in tmp_path.glob("*/*.safetensors"):
        file.with_name("pytorch_model.bin").write_bytes(torch_files.archive({"w": torch_files.tensor(np.ones(3))}))
        file.unlink()
    with pytest.raises(
        NotFoundError, match=r": checkpoint-1000/pytorch_model.bin in it is a file of PyTorch; open it by its own path"
    ):
        tr.open(tmp_path)


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    folders(tmp_path, unet="diffusion_pytorch_model.safetensors", vae="model.safetensors")
    (tmp_path / "model_index.json").write_text('{"_class_name": "Pipeline", "unet": ["diffusers", "UNet"]}')
    with pytest.raises(NotFoundError, match="in it; open one by its own path: unet, vae; of no"):
        tr.open(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "lightning_logs/version_10/checkpoints/epoch=3-step=100.ckpt",
        "global_step10/mp_rank_00_model_states.pt",  # DeepSpeed
        "iter_0000100/mp_rank_00/model_optim_rng.pt",  # Megatron
    ],
)
def test_files_of_pytorch_below_a_folder(tmp_path: Path, file: str) -> None:
    """The newest is named."""
    for name in (file, file.replace("10", "9")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(torch_files.archive({"w": torch_files.tensor(np.ones(3))}))
    with pytest.raises(NotFoundError) as raised:
        tr.open(tmp_path)
    assert f"{tmp_path}: {file} in it is a file of PyTorch; open it by its own path; of no" in str(raised.value)


def test_files_of_pytorch_with_one_model(tmp_path: Path) -> None:
    """Opening one of them is half of the model. Following the advice gives all of it."""
    files = [tmp_path / f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for n, file in enumerate(files):
        file.write_bytes(torch_files.archive({f"{n}.w": torch_files.tensor(np.ones(3))}))
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {f"{n}.w": file.name for n, file in enumerate(files)}}))
    for path, words in (
        (tmp_path, "pytorch_model-00002-of-00002.bin in it is one of the 2 files of PyTorch of one model"),
        (index, "it is an index of files of PyTorch"),
    ):
        with pytest.raises((NotFoundError, UnsupportedError), match=f": {words}; open each .*: first | second; of no"):
            tr.open(path)
    first, second = (tr.restore(file) for file in files)
    assert sorted(first | second) == ["0.w", "1.w"]


def test_shards_of_keras_are_named_by_their_index(tmp_path: Path) -> None:
    for file in (REAL / "keras").glob("shards*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(NotFoundError, match=r": shards\.weights\.json in it is an index of files of Keras; open it by"):
        tr.open(tmp_path)


def test_a_distributed_checkpoint_without_its_metadata(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(torch_files.archive({"w": torch_files.tensor(np.ones(3))}))
    with pytest.raises(NotFoundError, match=r": it is a distributed checkpoint of PyTorch without its file \.metadata"):
        tr.open(tmp_path)


def test_a_saved_model_of_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01")
    (tmp_path / "variables").mkdir()
    bundle = Bundle()
    bundle.add("w", np.ones(3, np.float32))
    bundle.save(tmp_path / "variables/variables")
    with pytest.raises(NotFoundError, match=r"variables/variables.index in it is a checkpoint of TensorFlow; open"):
        tr.open(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="it is an empty folder; of no"):
        tr.open(tmp_path)


def test_a_folder_of_checkpoints_of_any_format(tmp_path: Path) -> None:
    for format in ("treering", "orbax", "t5x"):
        tr.save(tmp_path / f"best-{format}", TREE, format=format)
    with pytest.raises(NotFoundError, match="in it; open one by its own path: best-orbax, best-t5x, best-treering"):
        tr.open(tmp_path)


def test_an_array_of_numpy_that_is_a_pickle(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}], object))
    with pytest.raises(UnsupportedError, match="a pickled Python object, which is never opened"):
        tr.open(tmp_path / "x.npy")


def test_log_names_a_fallback_only_if_one_exists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the step that replaces a damaged one only if there is an earlier step."""
    with tr.Checkpointer(tmp_path) as ckpts:
        for step in (1, 2):
            ckpts.save(step, TREE)
    for step, expected in [(2, ["step 2 is damaged", "taking step 1, the one before step 2"]), (1, None)]:
        (tmp_path / f"step-{step:08}" / "treering.json").chmod(0o644)
        (tmp_path / f"step-{step:08}" / "treering.json").write_bytes(b"{}")
        caplog.clear()
        if expected:
            assert tr.open(tmp_path).step == 1
        else:
            with pytest.raises(CorruptError):
                tr.open(tmp_path)
            expected = ["step 2 is damaged", "taking step 1, the one before step 2", "step 1 is damaged"]
        assert [record.getMessage().split(":")[0] for record in caplog.records] == expected


@pytest.mark.parametrize("named", formats.names())
def test_what_is_not_of_the_named_format_is_named(tmp_path: Path, named: str) -> None:
    """Neither `open` nor `verify` says that a job writes there. The error of `open` names the path."""
    tr.save(tmp_path / "native", TREE)
    tr.save(tmp_path / "orbax", TREE, format="orbax")
    tr.save(tmp_path / "x.safetensors", TREE)
    (tmp_path / "empty").mkdir()
    own = {"treering": "native", "orbax": "orbax", "safetensors": "x.safetensors"}.get(named)
    # The differences of these are read from the same files.
    same = "x.safetensors" if named in ("slime", "skyrl") else own
    for name in sorted({"native", "orbax", "x.safetensors", "empty"} - {own, same}):
        path = tmp_path / name
        with pytest.raises((CorruptError, UnsupportedError, NotFoundError), match=f"^{re.escape(str(path))}: "):
            tr.open(path, format=named)
        with contextlib.suppress(UnsupportedError):
            found = tr.verify(path, format=named)
            assert found.problems and f"{path}: {path}" not in str(found)
