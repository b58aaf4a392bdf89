"""Tests saves in formats of other libraries by several processes: each writes its part of the arrays, nothing twice."""

import os
import pathlib
import signal
from typing import Any

import numpy as np
import pytest

import treering as tr
from jobs import run_job
from treering._core.boxes import Cells
from treering._core.calls import SingleProcessCall
from treering._core.entries import ArrayEntry
from treering._core.layouts import Layout
from treering.formats._zarr.chunks import assign_chunks

FORMATS = ["orbax", "t5x", "levanter"]
VALUES: dict[str, Any] = {
    "rows": (0, (1024, 2048)),
    "columns": (1, (2048, 1032)),
    "replicated": (2, (1009, 1024)),
    "grid": (3, (1024, 1024)),
    "empty": (5, (0, 64)),
    "long": (6, (524_296,)),
    "small": (7, (8,)),
    "alone": (8, (9, 5)),
}


def check(found: Any) -> None:
    """Asserts that a tree has the values of the state, bit for bit."""
    for name, (seed, shape) in VALUES.items():
        expected = np.random.default_rng(seed).standard_normal(shape, np.float32)
        assert np.asarray(found[name]).tobytes() == expected.tobytes(), name
        assert np.shape(found[name]) == shape
    assert found["bf16"].dtype == "bfloat16" and found["bf16"].shape == (512, 64)
    assert found["scalar"] == np.float32(2.5) and int(found["step"]) == 7
    assert np.asarray(found["here"]).tolist() == [0, 1, 2, 3, 4]
    numbers = np.random.default_rng(9).integers(0, 1 << 30, 500_000, np.int32)
    assert (np.asarray(found["numpy"]) == numbers).all()


def files(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_process_writes_its_part(tmp_path: pathlib.Path, processes: int) -> None:
    results = run_job(tmp_path, "parallel_formats.each_process_writes_its_part", processes=processes, FORMATS=FORMATS)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    for format in FORMATS:
        size = files(tmp_path / format)
        counts = [result.report[format][0] for result in results]
        assert [result.report[format][1] for result in results] == [size] * processes
        assert sum(counts) < 1.1 * size, (format, counts, size)  # All processes together write the state once.
        # Each writes about the same number of bytes.
        assert max(counts) < size / processes + (4 << 20), (format, counts, size)
        for name in (format, f"{format} later"):
            assert tr.verify(tmp_path / name).ok
            check(tr.restore(tmp_path / name))
    keys = np.asarray(tr.open(tmp_path / "keys")["keys"])
    assert keys.tolist() == np.arange(32).reshape(16, 2).tolist()
    renamed = tr.open(tmp_path / "rules")["renamed"]
    expected = np.random.default_rng(0).standard_normal((1024, 2048), np.float32)
    assert renamed.dtype == "bfloat16" and (renamed[...] == expected.astype(renamed.dtype)).all()


@pytest.mark.slow
@pytest.mark.peers
def test_their_libraries_read_what_several_have_written(tmp_path: pathlib.Path) -> None:
    """Orbax reads the checkpoint. For T5X and Levanter, TensorStore reads the arrays by the names that were written."""
    import orbax.checkpoint as ocp
    import tensorstore as ts

    run_job(tmp_path, "parallel_formats.save_in_each", processes=2, FORMATS=FORMATS)
    # The database refers to its files by relative paths, so it can be moved.
    (tmp_path / "orbax").rename(tmp_path / "moved")
    with ocp.StandardCheckpointer() as theirs:
        check(theirs.restore(tmp_path / "moved"))
    for format, name in (("t5x", "columns"), ("levanter", "columns"), ("t5x", "small"), ("levanter", "small")):
        kvstore = {"driver": "file", "path": f"{tmp_path / format / name}/"}
        array = ts.open({"driver": "zarr", "kvstore": kvstore}).result().read().result()
        seed, shape = VALUES[name]
        assert array.tobytes() == np.random.default_rng(seed).standard_normal(shape, np.float32).tobytes()


@pytest.mark.slow
@pytest.mark.peers
def test_items_of_orbax_that_several_have_written(tmp_path: pathlib.Path) -> None:
    import orbax.checkpoint as ocp

    for result in run_job(tmp_path, "parallel_formats.items_of_orbax_that_several_have_written", processes=2):
        assert result.report[0] == "ExistsError" and "pass overwrite=True" in result.report[1]
    assert {"ocdbt.process_0", "ocdbt.process_1"} < {*os.listdir(tmp_path / "c" / "params")}
    (tmp_path / "c").rename(tmp_path / "moved")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as theirs:
        found = theirs.restore(tmp_path / "moved")
    for one in (found, tr.restore(tmp_path / "moved")):
        check({**one["params"], **one["state"]})
        assert one["small"]["x"].tolist() == [0, 1, 2]
        assert (one["config"], one["bare"]) == ({"a": [1, "b"]}, {"none": None})
    assert tr.verify(tmp_path / "moved").ok and tr.restore(tmp_path / "values") == {"config": {"a": 1}}
    across = tr.open(tmp_path / "across")["params/rows"]
    assert across.shape == (2048, 1024) and np.array_equal(across[...].T, found["params"]["rows"])


@pytest.mark.slow
def test_what_one_process_cannot_write_in_parts(tmp_path: pathlib.Path) -> None:
    """Some saves go through a temporary native checkpoint, which process 0 converts.

    Here: rules that need parts of several processes, and arrays that T5X stores without files of their own.
    """
    run_job(tmp_path, "parallel_formats.what_one_process_cannot_write_in_parts", processes=2)
    big = np.arange(64 * 40, dtype=np.float32).reshape(64, 40)
    assert (tr.restore(tmp_path / "across")["rows"] == big.T).all()
    factors = tr.restore(tmp_path / "factors")
    assert (factors["rows"] == big).all() and (factors["w"]["v_row"] == big[:, 0]).all()
    assert not (tmp_path / "factors" / "w.v_row").exists()
    assert sorted(os.listdir(tmp_path)) == ["across", "factors", "report-0.json", "report-1.json"]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "who"), [("orbax", 0), ("orbax", 1), ("t5x", 1), ("levanter", 1)])
def test_one_that_is_killed_leaves_what_was_there(tmp_path: pathlib.Path, format: str, who: int) -> None:
    """A killed process leaves the earlier checkpoint in place."""
    expect = {n: -signal.SIGKILL if n == who else None for n in range(2)}
    body, names = "parallel_formats.one_ends_after_its_part", {"FORMAT": format, "WHO": who, "KILLED": True}
    results = run_job(tmp_path, body, processes=2, recoverable=True, expect=expect, **names)
    if who:  # Otherwise JAX ends the peers as well.
        assert results[0].report[0] == "PeerError"
    found = tr.restore(tmp_path / "c")
    assert (found["w"] == 1).all() and (found["n"] == np.arange(9)).all()
    # Removes the leftovers of the killed process.
    tr.save(tmp_path / "c", {"w": np.zeros(3)}, format=format, overwrite=True)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "who"), [("orbax", 1), ("t5x", 0), ("levanter", 1)])
def test_one_that_fails_fails_all_and_leaves_nothing(tmp_path: pathlib.Path, format: str, who: int) -> None:
    """If one process fails, all processes raise, and no files are left."""
    body, names = "parallel_formats.one_ends_after_its_part", {"FORMAT": format, "WHO": who, "KILLED": False}
    results = run_job(tmp_path, body, processes=2, **names)
    for kind, text in (result.report for result in results):
        assert kind == "SaveError" and "No space left" in text
    assert (tr.restore(tmp_path / "c")["w"] == 1).all()
    assert sorted(os.listdir(tmp_path)) == ["c", "report-0.json", "report-1.json"]


@pytest.mark.rare
@pytest.mark.slow
def test_a_chunk_that_process_0_does_not_see_is_no_checkpoint(tmp_path: pathlib.Path) -> None:
    """Process 0 does not commit if it misses a chunk of a peer, as if they used different file systems.

    TensorStore reads missing chunks as zeros, or as an empty database.
    """
    gone = {"orbax": "ocdbt.process_1", "t5x": "w/2.0", "levanter": "w/3.0"}
    for result in run_job(
        tmp_path, "parallel_formats.a_chunk_that_process_0_does_not_see_is_no_checkpoint", processes=2, GONE=gone
    ):
        for kind, text in result.report:
            assert kind == "SaveError" and "do all processes see the same file system?" in text
    assert all(tr.verify(tmp_path / format).ok for format in gone)  # the earlier checkpoint


@pytest.mark.long
def test_processes_that_were_called_otherwise(tmp_path: pathlib.Path) -> None:
    """Processes with different rules or formats are refused. They would write chunks of different leaves."""
    for result in run_job(tmp_path, "parallel_formats.processes_that_were_called_otherwise", processes=2):
        for name, (kind, text) in result.report.items():
            assert kind == "MismatchError" and "nothing was written" in text, name
            if name.endswith("rules"):
                assert "the same rules" in text, name
            else:
                assert "the same call" in text and "process 0 saves with" in text and "process 1 with" in text, name
    assert sorted(os.listdir(tmp_path)) == ["good", "report-0.json", "report-1.json"]
    assert tr.open(tmp_path / "good")["a"][...].tolist() == list(range(100, 108))


@pytest.mark.slow
def test_what_is_still_in_a_checkpoint_is_read_in_parts(tmp_path: pathlib.Path) -> None:
    """Leaves that are arrays of a checkpoint are read in parts, in bounded memory."""
    tr.save(tmp_path / "source", {"big": np.arange(1 << 24, dtype=np.float32)})
    for result in run_job(
        tmp_path, "parallel_formats.what_is_still_in_a_checkpoint_is_read_in_parts", processes=2, FORMATS=FORMATS
    ):
        for total, largest in result.report.values():
            # It reads everything once to compare it with its peers, and again what it writes.
            assert total <= 2 * (64 << 20)
            assert largest <= 64 << 20
    for format in FORMATS:
        assert (tr.open(tmp_path / format)["big"][-3:] == np.arange(1 << 24, dtype=np.float32)[-3:]).all()
        assert tr.verify(tmp_path / format).ok


@pytest.mark.slow
def test_arrays_of_one_process_and_names_of_orbax_in_t5x(tmp_path: pathlib.Path) -> None:
    run_job(tmp_path, "parallel_formats.arrays_of_one_process_and_names_of_orbax_in_t5x", processes=2)
    found = tr.open(tmp_path / "c")
    assert found.format == "t5x" and tr.verify(tmp_path / "c").ok
    assert found["prime"][...].tolist() == list(range(1031)) and len(os.listdir(tmp_path / "c" / "prime")) == 2
    assert found["empty"].shape == (0, 3) and found["_METADATA"][...].tolist() == list(range(8))
    assert found["manifest/ocdbt"][...].tolist() == list(range(1, 9))


# The chunks


class _Call(SingleProcessCall):
    def __init__(self, index: int, count: int):
        self.index, self.count = index, count


@pytest.mark.parametrize("most", [1, 64, 1000, 1 << 20, 1 << 22])
def test_every_element_is_written_by_one_that_has_it(most: int) -> None:
    """Exactly one process writes each element, and that process holds it."""
    rng = np.random.default_rng(most)
    for _ in range(50):
        count = int(rng.integers(2, 6))
        arrays: list[ArrayEntry] = []
        layouts: dict[str, Layout] = {}
        for n in range(4):
            cells = rng.integers(1, 4, size=rng.integers(0, 4))
            sizes = rng.integers(1, 300 if len(cells) < 2 else 40, size=len(cells))
            boxes = Cells(range(0, int(c * s) + 1, int(s)) for c, s in zip(cells, sizes, strict=True))
            holders = [tuple(sorted({int(p) for p in rng.integers(0, count, size=2)})) for _ in boxes]
            entry = ArrayEntry(str(n), "jax", "float32", tuple(int(c * s) for c, s in zip(cells, sizes, strict=True)))
            arrays.append(entry)
            if n:
                layouts[entry.path] = Layout(boxes, holders)
        chosen = [
            assign_chunks(_Call(k, count), arrays, layouts, most, lambda entry: entry.shape) for k in range(count)
        ]
        for entry in arrays:
            times = np.zeros(entry.shape, int)
            assert len({tuple(own[entry.path].shape) for own in chosen}) == 1
            for process, own in enumerate(chosen):
                for box in own[entry.path].written(entry.shape):
                    times[tuple(slice(*bounds) for bounds in box)] += 1
                    layout = layouts.get(entry.path)
                    if layout:
                        (cell,) = layout.boxes.overlapping(box)  # No chunk crosses the border of two parts.
                        assert process in layout.holders[cell]
            assert (times == 1).all()
