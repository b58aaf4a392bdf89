"""Tests of keys and file names of users that are also the marks by which some format is recognized.

Every checkpoint opens as the format in which it was written, with all leaves. Otherwise the save is refused before it
writes anything.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import serialization

import treering as tr
from helpers import READ_ONLY, assert_same
from treering import formats
from treering._cli.main import main
from treering.errors import MismatchError, NotFoundError, TreeringError, UnsupportedError

WRITTEN = [name for name in formats.names() if name not in READ_ONLY]
_SUFFIX = {"flax": ".msgpack", "safetensors": ".safetensors", "equinox": ".eqx"}
W = np.arange(6, dtype=np.float32).reshape(2, 3)
_MARKS = """
    version optimizer target state flax_mutables checkpoint treering.json metadata.json _METADATA default 0
    _CHECKPOINT_METADATA manifest.ocdbt _sharding array_metadatas commit_success.txt model.safetensors
    model.safetensors.index.json model-00001-of-00002.safetensors flax_model.msgpack flax_model.msgpack.index.json
    streaming_params streaming_train_state __metadata__ __msgpack_chunked_array__ .zarray zarr.json .zgroup
    model.ckpt-5.index checkpoint_5 step-1 x_gda x.orbax-checkpoint-tmp-1 format driver kvstore metadata
"""
MARKERS = _MARKS.split()
TREES = {
    **{marker: {marker: W, "~x": {marker: W}, "~y": {marker: 2}} for marker in MARKERS},
    **{f"{marker} above": {marker: {"w": 2}} for marker in MARKERS},
    "version first": {"version": 2, "~w": W},
    "version, optimizer": {"version": 3, "optimizer": {"target": {"w": W}, "state": {"step": 1}}},
    "optimizer, version": {"optimizer": {"target": {"w": W}}, "version": 5},
    "version within": {"optimizer": {"state": {"w": W}}, "~m": {"a": 1, "version": 3}},
    "version 1": {"version": 1, "params": {"w": W}},
    "levels of T5X": {"state": {"step": 1}, "target": {"w": W}},
    "length of a header": {"\0\0\0\0\0\0{": W, "w": np.zeros(20_000, np.float32)},
    "spec": {"w": {"driver": "zarr", "kvstore": {"driver": "file", "path": "w/"}, "metadata": {"shape": [2]}}, "v": W},
    **{
        f"text {text}": {"note": text + "w", "w": W}
        for text in ("PLACEHOLDER://", "AGGREGATED://", "//GDAPlaceholder:", "__npy__", "model_checkpoint_path: ")
    },
    "number": 3,
    "array": W,
    "text": "{}",
    "text with a header": "\0\0\0\0\0\0{" + "x" * 50_000,
    "empty": {},
}
_NAMES = """
    plain checkpoint checkpoint_5 x.msgpack x.eqx x.safetensors x.pkl x_gda x.index 7 step-3 streaming_params_3
    model.safetensors.index.json flax_model.msgpack flax_model.msgpack.index.json x.orbax-checkpoint-tmp-1 x.flax
    ckpt-3.flax model.ckpt-5 rewound-1 step-00000001
"""
NAMES = _NAMES.split()


@pytest.mark.long
@pytest.mark.parametrize("format", WRITTEN)
def test_keys_that_are_marks_of_formats(tmp_path: Path, format: str) -> None:
    problems = [
        f"{label}: {problem}"
        for n, (label, tree) in enumerate(TREES.items())
        if (problem := _wrong(tmp_path / f"{n}{_SUFFIX.get(format, '')}", tree, format))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.long
@pytest.mark.parametrize("format", WRITTEN)
def test_names_that_are_marks_of_formats(tmp_path: Path, format: str) -> None:
    trees = {"tree": {"w": W}, "T5X": TREES["version, optimizer"], "levels": TREES["levels of T5X"], "number": 3}
    problems = [
        f"{name}, {label}: {problem}"
        for name in NAMES
        for label, tree in trees.items()
        if (problem := _wrong(tmp_path / label / name, tree, format))
    ]
    assert not problems, "\n".join(problems)


def _wrong(path: Path, tree: Any, format: str) -> str | None:
    """Saves and opens a tree. Returns the problem, or None if the tree is unchanged or its save was refused."""
    try:
        tr.save(path, tree, format=format)
    except UnsupportedError:
        assert not os.path.lexists(path)
        assert not path.parent.exists() or not any(".tmp" in name for name in os.listdir(path.parent) if name[0] == ".")
        return None
    try:
        ckpt = tr.open(path)
        found = {name: np.asarray(leaf) for name, leaf in ckpt.items()}
        again = tr.open(path, format=format)
    except tr.errors.TreeringError as error:
        return f"written, then {type(error).__name__}: {str(error)[:300]}"
    if not ckpt.format == again.format == format:
        return f"written, then opened as {ckpt.format!r}"
    wanted = tr.open(_native(path, tree))
    if format == "equinox":
        wanted = {str(n): leaf for n, leaf in enumerate(leaf for leaf in wanted.values() if not isinstance(leaf, str))}
    if sorted(found) != sorted(wanted):
        return f"written, then the leaves {list(found)}"
    if not all(np.array_equal(found[name], np.asarray(leaf)) for name, leaf in wanted.items()):
        return "written, then other values"
    return None


def _native(path: Path, tree: Any) -> Path:
    native = path.parent / f"native of {path.name} "
    tr.save(native, tree, format="treering")
    return native


@pytest.mark.long
@pytest.mark.whole
def test_a_format_that_is_given_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`format=` overrides the recognized format, for files that look like another format."""
    file = tmp_path / "x"
    file.write_bytes(serialization.to_bytes(TREES["version, optimizer"]))  # Flax's file has the same bytes as T5X's.
    assert tr.open(file).format == "t5x"
    assert_same(tr.restore(file, format="flax"), TREES["version, optimizer"])
    assert list(tr.open(file, format="flax")) == ["version", "optimizer/target/w", "optimizer/state/step"]
    assert tr.verify(file, format="flax").ok
    tr.convert(file, tmp_path / "native", source_format="flax")
    assert_same(tr.restore(tmp_path / "native"), TREES["version, optimizer"])
    assert main(["show", str(file), "--format", "flax", "--json"]) == 0
    assert "version" in json.loads(capsys.readouterr().out)["leaves"]
    for command in ("verify", "stats"):
        assert main([command, str(file), "--format", "flax"]) == 0
    assert main(["convert", str(file), str(tmp_path / "x.eqx"), "--source-format", "flax"]) == 0
    with pytest.raises(MismatchError, match="expected one of"):
        tr.open(file, format="flaks")
    with pytest.raises(NotFoundError):
        tr.open(tmp_path / "nothing", format="flax")
    (tmp_path / "empty").mkdir()
    tr.save(tmp_path / "folder", {"w": W})
    for path in (file, tmp_path / "empty", tmp_path / "folder"):
        for name in ("safetensors", "orbax", "levanter", "equinox", "treering"):
            if (path.name, name) == ("folder", "treering"):
                continue
            for call in (tr.open, tr.restore, lambda path, format: tr.verify(path, format=format).ok or _refuse()):
                with pytest.raises(TreeringError):
                    call(path, format=name)


def test_the_format_of_the_steps_that_count(tmp_path: Path) -> None:
    """With `format=`, a run has only the steps of that format."""
    tr.save(tmp_path / "step-00000001", {"w": W}, step=1)
    tr.save(tmp_path / "checkpoint_2", {"w": W + 1}, format="t5x")
    tr.save(tmp_path / "checkpoint_3", {"w": W + 2}, format="flax")
    for format, step in (("treering", 1), ("t5x", 2), ("flax", 3)):
        ckpt = tr.open(tmp_path, format=format)
        assert (ckpt.format, ckpt.step) == (format, step)
        assert_same(tr.restore(tmp_path, format=format, step=step), {"w": W + step - 1})
        assert tr.verify(tmp_path, format=format).ok
    with pytest.raises(NotFoundError):
        tr.open(tmp_path, format="t5x", step=3)


def _refuse() -> None:
    raise TreeringError
