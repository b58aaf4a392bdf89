"""Tests small checkpoints whose arrays are large: these are read only if the caller allows that."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import orbax.checkpoint as ocp
import pytest
import xxhash

import treering as tr
from torch_files import View, archive
from treering._cli.main import main
from treering._tools.report.gather import gather
from treering.errors import MismatchError

_MANY = 130


def one_array_many_times(path: Path) -> Path:
    """Writes an array of 1 MiB, and a manifest that has it as 130 leaves."""
    tr.save(path, {"a0": np.random.default_rng(0).random(1 << 17)}, step=1)
    file = path / "treering.json"
    manifest = json.loads(file.read_bytes())
    del manifest["xxh3"]
    names = [f"a{n}" for n in range(_MANY)]
    manifest["leaves"] += [["array", name, *manifest["leaves"][0][2:6], "a0"] for name in names[1:]]
    manifest["tree"] = [["dict", "", names]] + [0] * _MANY
    text = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    file.chmod(0o644)
    file.write_bytes(text + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}\n')
    return path


@pytest.mark.rare
@pytest.mark.long
@pytest.mark.parametrize("kind", ["treering", "orbax", "t5x"])
def test_it_is_read_only_when_asked_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run" / "step-00000001"
    if kind == "treering":
        one_array_many_times(path)
        size = _MANY << 20
    else:
        path = tmp_path / "run" / {"orbax": "1", "t5x": "checkpoint_1"}[kind]
        zeros = {"a0": np.zeros(80 << 20, np.uint8)}
        if kind == "orbax":  # the writer of this library compresses
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(path, zeros)
        else:
            tr.save(path, zeros, format=kind)
        size = 80 << 20
    for read in (
        lambda: tr.restore(path),
        lambda: tr.open(path).restore(),
        lambda: tr.open(path).apply([tr.rules.rename("^a", "b")]).restore(),
        lambda: (
            tr.restore(path.parent, like={f"a{n}": np.zeros(1 << 17) for n in range(_MANY)}, extra="ignore")
            if kind == "treering"
            else tr.restore(path.parent, like={"a0": np.zeros(80 << 20, np.uint8)})
        ),
        lambda: tr.convert(path, tmp_path / "out"),
    ):
        with pytest.raises(MismatchError, match="pass max_expansion"):
            read()
    assert not (tmp_path / "out").exists()
    report = gather(path.parent)
    assert not report["leaves"] and any("expected arrays of at most 100 times" in note for note in report["notes"])
    assert gather(path.parent, max_expansion=math.inf)["leaves"]
    assert main(["convert", str(path), str(tmp_path / "out"), "--max-expansion", "inf"]) == 0
    tree = tr.restore(path, max_expansion=math.inf)
    assert sum(leaf.nbytes for leaf in tree.values()) == size
    assert tr.verify(path).ok


def test_a_part_of_it_is_read(tmp_path: Path) -> None:
    path = one_array_many_times(tmp_path / "c")
    assert tr.restore(path, at="a7").nbytes == 1 << 20


def test_what_is_tied_and_what_is_small_is_read_as_before(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random(1 << 17)
    tr.save(tmp_path / "tied", {str(n): array for n in range(48)})
    assert len(tr.restore(tmp_path / "tied")) == 48
    tr.save(tmp_path / "zeros", {"w": np.zeros(8 << 20, np.uint8)}, format="orbax")
    assert tr.restore(tmp_path / "zeros")["w"].nbytes == 8 << 20


def with_zeros(path: Path) -> Path:
    if path.suffix == ".npz":
        np.savez_compressed(path, w=np.zeros(80 << 20, np.uint8))
    else:
        tr.save(path, {"w": np.zeros(80 << 20, np.uint8)}, format="t5x")
    return path


def repeated(path: Path) -> Path:
    path.write_bytes(archive({"w": View(np.arange(4, dtype=np.float32), (1 << 40, 4), (0, 1))}))
    return path


READS: dict[str, Callable[[Path], object]] = {
    "a slice": lambda path: tr.open(path)["w"][:],
    "NumPy": lambda path: np.asarray(tr.open(path)["w"]),
    "a rule": lambda path: tr.open(path).apply([tr.rules.rename("w", "v")])["v"][1:],
    "diff": lambda path: tr.diff(path, path),
    "stats": lambda path: tr.stats(cast("tr.LazyArray", tr.open(path)["w"])),
    "restore": lambda path: tr.restore(path, max_expansion=math.inf),
    "restore in parts": lambda path: tr.restore(path, max_expansion=math.inf, memory_limit=1 << 20),
    "a template": lambda path: tr.restore(path, tr.open(path).abstract(), max_expansion=math.inf),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", ["x.pt", "x.npz", "t5x"])
def test_what_no_memory_can_hold_is_refused(
    tmp_path: Path, name: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, a few bytes that claim terabytes take hours, or end in a bare `MemoryError`."""
    path = repeated(tmp_path / name) if name == "x.pt" else with_zeros(tmp_path / name)
    if name != "x.pt":  # 16 TiB are too much anywhere
        monkeypatch.setattr("treering._core.host_memory.total", lambda: 70 << 20)
    with pytest.raises(MismatchError, match=rf"^{path}: expected arrays of at most the .* of memory here") as caught:
        READS[read](path)
    advice = re.search(r"In Python, (\S+) reads a part", str(caught.value))
    assert advice and len(eval(advice[1], {"tr": tr, "path": path, "leaf": "w"})) == 10


def test_what_no_memory_can_hold_together_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = one_array_many_times(tmp_path / "c")
    assert not tr.diff(path, path)
    monkeypatch.setattr("treering._core.host_memory.total", lambda: 70 << 20)
    assert main(["stats", str(path)]) == main(["diff", str(path), str(path)]) == 3
    with pytest.raises(MismatchError, match="of memory here"):
        tr.restore(path, max_expansion=math.inf, mmap=False)
    assert len(tr.restore(path, max_expansion=math.inf, mmap=True)) == _MANY  # A mapping takes no memory.


@pytest.mark.parametrize("wrong", [0, 0.5, -1, math.nan, True, "100", None])
def test_other_bounds_are_refused(tmp_path: Path, wrong: float) -> None:
    tr.save(tmp_path / "c", {"w": np.zeros(2)})
    with pytest.raises(MismatchError, match="max_expansion"):
        tr.restore(tmp_path / "c", max_expansion=wrong)
    with pytest.raises(MismatchError, match="max_expansion"):
        tr.convert(tmp_path / "c", tmp_path / "d", max_expansion=wrong)
