"""Tests that every change of a checkpoint's bytes either raises an error or leaves all values as they were."""

import json
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import treering as tr
from hostile_input import flip
from treering.errors import TreeringError
from treering.testing._samples import identity, sample, spread

_BLOCK = 1 << 20


def state() -> dict[str, Any]:
    """Returns a tree with several dtypes, an array in eight pieces, numbers and texts."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    pieces = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh, jax.P("d")))
    return {
        "pieces": pieces,
        "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
        "int4": np.array([-8, 7, 0]).astype(ml_dtypes.int4),
        "float64": sample("float64", (2, 3)),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3), np.int8),
        "key": jax.random.key(3),
        "values": [True, 2**70, -0.0, float("nan"), 1j, "text", b"\xff", None],
    }


def leaves(path: pathlib.Path, mmap: bool | None) -> list[Any]:
    """Returns the identities of all restored leaves, which are equal only if the leaves are equal bit for bit."""
    found = tr.restore(path, mmap=mmap)
    return [identity(leaf) for leaf in jax.tree.leaves(found, is_leaf=lambda x: x is None)]


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    tr.save(tmp_path / "c", state(), step=3, metrics={"loss": 0.5}, metadata={"a": [1]})
    for file in (tmp_path / "c").iterdir():
        file.chmod(0o644)
    return tmp_path / "c"


def is_noticed(path: pathlib.Path, before: Any, mmaps: tuple[bool | None, ...]) -> bool:
    """Returns True if a restore of a damaged checkpoint raises with every value of `mmap`.

    Asserts that a restore which does not raise returns the saved leaves.
    """
    outcomes = []
    for mmap in mmaps:
        try:
            assert leaves(path, mmap) == before
            outcomes.append(False)
        except TreeringError as error:
            outcomes.append(str(path) in str(error))
    return all(outcomes)


def check_report(path: pathlib.Path, file: pathlib.Path, position: int) -> None:
    """Asserts that `verify` names the file, the block and the leaves in which a byte was changed."""
    (problem,) = tr.verify(path).problems
    assert problem.file == file.name
    if file.name == "treering.json":
        assert (problem.leaves, problem.block) == ((), None)
        return
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    if position < 4096:
        assert problem.block is None
        return
    assert begin == 4096 and problem.block == (position - begin) // _BLOCK
    header = json.loads(data[8:begin])
    header.pop("__metadata__")
    first, last = problem.block * _BLOCK, (problem.block + 1) * _BLOCK
    held = {
        key.split("~@")[0]
        for key, entry in header.items()
        if entry["data_offsets"][0] < min(last, len(data)) and entry["data_offsets"][1] > first
    }
    assert set(problem.leaves) == held


def flips(path: pathlib.Path, most: int | None) -> Iterator[tuple[pathlib.Path, int, int]]:
    """Yields a file, a byte and a bit to flip in it, for each byte of all files, or for at most `most` of them."""
    places = [(file, at) for file in sorted(path.iterdir()) for at in range(file.stat().st_size)]
    for n in spread(len(places), most or len(places)):
        yield (*places[n], n % 8)


@pytest.mark.rare
@pytest.mark.long
@pytest.mark.parametrize("most", [400, pytest.param(None, marks=pytest.mark.slow)])
def test_a_flipped_bit(saved: pathlib.Path, most: int | None) -> None:
    before = leaves(saved, None)
    for turn, (file, at, bit) in enumerate(flips(saved, most)):
        flip(file, at, bit)
        assert is_noticed(saved, before, ((None, True, False)[turn % 3],)), (file.name, at, bit)
        check_report(saved, file, at)
        flip(file, at, bit)
    assert leaves(saved, None) == before and tr.verify(saved).ok


@pytest.mark.slow
def test_every_bit_of_some_bytes(saved: pathlib.Path) -> None:
    before = leaves(saved, None)
    for file, at, _ in flips(saved, 150):
        for bit in range(8):
            flip(file, at, bit)
            assert is_noticed(saved, before, (None, True, False))
            flip(file, at, bit)


@pytest.mark.rare
@pytest.mark.long
@pytest.mark.parametrize("most", [300, pytest.param(None, marks=pytest.mark.slow)])
def test_a_file_that_was_cut_off(saved: pathlib.Path, most: int | None) -> None:
    before = leaves(saved, None)
    for file in sorted(saved.iterdir()):
        data = file.read_bytes()
        for turn, size in enumerate(spread(len(data), most or len(data))):
            file.write_bytes(data[:size])
            assert is_noticed(saved, before, ((None, True, False)[turn % 3],)), (file.name, size)
            assert not tr.verify(saved).ok
        file.write_bytes(data)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize(("change", "problem"), [(-1, "it is cut short"), (1, "it has been changed")])
def test_a_file_of_another_size_is_named(saved: pathlib.Path, change: int, problem: str) -> None:
    file = next(saved.glob("*.safetensors"))
    size = file.stat().st_size
    os.truncate(file, size + change)
    with pytest.raises(tr.errors.CorruptError, match=f"expected {size} bytes, found {size + change}; {problem}"):
        tr.open(saved)


@pytest.mark.long
@pytest.mark.parametrize("mmap", [None, True, False])
def test_bytes_that_were_appended_and_pages_that_were_lost(saved: pathlib.Path, mmap: bool | None) -> None:
    before = leaves(saved, None)
    for file in sorted(saved.iterdir()):
        good = file.read_bytes()
        spoilt = [good + extra for extra in (b"\0", b"\n", b" ", b"x", bytes(4096), good)]
        for page in range(0, len(good), 4096):
            size = len(good[page : page + 4096])
            spoilt += [good[:page] + fill * size + good[page + size :] for fill in (b"\0", b"\xff")]
        for size in (1, 8, 64, 512):
            spoilt += [good[:at] + bytes(size) + good[at + size :] for at in spread(len(good) - size, 20)]
        for data in spoilt:
            file.write_bytes(data)
            assert is_noticed(saved, before, (mmap,)) or data == good
            assert tr.verify(saved).ok == (data == good)
        file.write_bytes(good)


def test_files_of_another_checkpoint(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A file of another checkpoint of the same tree and step is noticed. Only all files together are a checkpoint."""
    tr.save(tmp_path / "d", {**state(), "float64": sample("float64", (2, 3), 1)}, step=3)
    before, after = leaves(saved, None), leaves(tmp_path / "d", None)
    assert before != after
    (ours,), (theirs,) = saved.glob("*.safetensors"), (tmp_path / "d").glob("*.safetensors")
    ours.write_bytes(theirs.read_bytes())
    assert is_noticed(saved, before, (None, True, False)) and not tr.verify(saved).ok
    (saved / "treering.json").write_bytes((tmp_path / "d" / "treering.json").read_bytes())
    assert is_noticed(saved, before, (None, True, False)) and not tr.verify(saved).ok
    ours.rename(saved / theirs.name)
    assert leaves(saved, None) == after and tr.verify(saved).ok  # Now all files are those of the other checkpoint.


@pytest.mark.long
def test_blocks_that_changed_places(tmp_path: pathlib.Path) -> None:
    """Two undamaged blocks that are exchanged, and single bits in any block, are noticed."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 256, size << 18, np.uint8) for name, size in {"a": 9, "b": 3, "c": 2}.items()}
    path = tmp_path / "c"
    tr.save(path, arrays)
    before = leaves(path, None)
    (file,) = path.glob("*.safetensors")
    file.chmod(0o644)
    data = file.read_bytes()
    blocks = [data[4096 + n * _BLOCK :][:_BLOCK] for n in range(4)]
    assert len(data) == 4096 + 3 * _BLOCK + _BLOCK // 2
    for first, second in ((0, 1), (1, 2), (0, 2)):
        moved = list(blocks)
        moved[first], moved[second] = moved[second], moved[first]
        file.write_bytes(data[:4096] + b"".join(moved))
        assert is_noticed(path, before, (None, True, False))
        assert [problem.block for problem in tr.verify(path).problems] == [first, second]
    draw = random.Random(1)
    file.write_bytes(data)
    edges = [4096 + n * _BLOCK + d for n in range(4) for d in (-1, 0, 1)][1:]
    for at in [*edges, len(data) - 1, *(draw.randrange(4096, len(data)) for _ in range(20))]:
        flip(file, at, at % 8)
        check_report(path, file, at)
        assert is_noticed(path, before, (False,))
        flip(file, at, at % 8)
