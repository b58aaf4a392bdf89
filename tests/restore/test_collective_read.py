"""Tests that a job reads data which several processes need only once, and that every bit of it arrives in each."""

import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import run_job
from sampling import sample_points
from treering._restore.collective_read import assign_reads, exchange_members
from treering._threads.pool import prefetch

pytestmark = pytest.mark.long


def test_every_bit_arrives_wherever_it_goes(tmp_path: pathlib.Path) -> None:
    for result in run_job(tmp_path, "collective_read.every_bit_arrives_wherever_it_goes", processes=3):
        assert result.report == []


@pytest.mark.rare
def test_files_of_other_libraries_are_read_once(tmp_path: pathlib.Path) -> None:
    """Files with contiguous arrays are read once. Chunks are read by each process, and "once" is an error for them."""
    results = run_job(tmp_path, "collective_read.files_of_other_libraries_are_read_once", processes=2, devices=1)
    needed = results[0].report[0]
    for name in results[0].report[1]:
        (first, right, error), (second, also_right, other_error) = (result.report[1][name] for result in results)
        if name.startswith(("orbax", "t5x")) and name.endswith("once"):
            assert "in chunks" in error and "in chunks" in other_error and right is also_right is None
            continue
        assert right and also_right, name
        if name.endswith("once"):
            assert first + second <= 1.1 * needed and min(first, second) >= 0.3 * needed, (name, first, second, needed)


@pytest.mark.rare
@pytest.mark.slow
def test_messages_stay_within_a_quarter_of_the_memory_limit(tmp_path: pathlib.Path) -> None:
    for result in run_job(
        tmp_path, "collective_read.messages_stay_within_a_quarter_of_the_memory_limit", processes=4, devices=1
    ):
        (most, rounds), (limited, more_rounds) = result.report
        assert limited <= 6 << 20 < most, result.report  # 4 MiB that were received, and the next message
        assert more_rounds > rounds


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("count", sample_points([4, 8]))
def test_the_job_reads_every_byte_once(tmp_path: pathlib.Path, count: int) -> None:
    results = run_job(
        tmp_path, "collective_read.the_job_reads_every_byte_once", processes=count, devices=1, timeout=240
    )
    needed = results[0].report[0]
    read = {
        name: [sum(result.report[1][name][n] for result in results) / needed for n in range(2)]
        for name in results[0].report[1]
    }
    for name, (counted, by_system) in read.items():
        assert counted <= by_system  # The disk counts the bytes that the system has read, and headers.
        if name.endswith("once"):
            assert by_system <= 1.05, read
    assert read["alone everywhere each"][0] >= count, read  # Otherwise this test would measure nothing.


def test_checkpointer_reads_network_files_once(tmp_path: pathlib.Path) -> None:
    for result in run_job(tmp_path, "collective_read.checkpointer_reads_network_files_once", processes=2):
        assert all(good for _, good in result.report.values())
        shares = {name: share for name, (share, _) in result.report.items()}
        once = [shares["True None"], shares["True once"], shares["False once"]]
        assert all(0.3 < share < 0.7 for share in once), shares
        assert min(shares["True each"], shares["False None"], shares["False each"]) >= 1, shares


def test_damage_that_one_process_reads_is_known_to_all(tmp_path: pathlib.Path) -> None:
    """One process reads damage. All processes fall back to the step before, or raise without one."""
    results = run_job(tmp_path, "collective_read.damage_that_one_process_reads_is_known_to_all", processes=3)
    for result in results:
        step, good, back, (kind, text), _ = result.report
        assert (step, good, back, kind) == (1, True, True, "CorruptError"), result.report
        assert "blocks are not what was saved" in text and ("process 1" in text or result is results[1])


def test_collective_read_restarts_after_replacement(tmp_path: pathlib.Path) -> None:
    results = run_job(tmp_path, "collective_read.collective_read_restarts_after_replacement", processes=2)
    assert results[1].report[2] == 1
    assert [result.report[:2] for result in results] == [results[0].report[:2]] * 2
    assert any(results[0].report[:2])


@pytest.mark.slow
def test_a_process_that_dies_meanwhile_is_an_error_in_the_others(tmp_path: pathlib.Path) -> None:
    """Its peers raise an error. Process 0 is left out, because JAX ends all processes with it."""
    results = run_job(
        tmp_path,
        "collective_read.a_process_that_dies_meanwhile_is_an_error_in_the_others",
        processes=3,
        recoverable=True,
        expect={1: -9},
    )
    assert [results[n].report[0] for n in (0, 2)] == ["PeerError"] * 2, results


def test_collective_read_falls_back_or_is_refused(tmp_path: pathlib.Path) -> None:
    """If processes cannot read together, "once" is an error and the default is "each"."""
    for result in run_job(tmp_path, "collective_read.collective_read_falls_back_or_is_refused", processes=2):
        differing, unable, nonsense, *good = result.report
        assert differing[0] == "MismatchError" and "process 1 restores other leaves" in differing[1]
        assert unable[0] == "UnsupportedError" and "jax_cpu_collectives_implementation" in unable[1]
        assert nonsense[0] == "MismatchError" and "'each' or 'once'" in nonsense[1]
        assert good == [True, True]


@given(
    st.lists(st.integers(0, 3 << 20), max_size=60), st.integers(1, 9), st.integers(1 << 18, 4 << 20), st.integers(0, 20)
)
def test_everything_is_dealt_once_in_equal_runs(nbytes: list[int], count: int, most: int, first: int) -> None:
    rounds = assign_reads(nbytes, count, most, first)
    by_process: list[list[int]] = [[] for _ in range(count)]
    for dealt in rounds:
        assert len(dealt) == count and any(dealt)
        for process, numbers in enumerate(dealt):
            assert len(numbers) <= 1 or sum(nbytes[n] for n in numbers) <= most
            by_process[process] += numbers
    assert sorted(n for own in by_process for n in own) == list(range(len(nbytes)))
    readers = [own for own in by_process if own]
    assert all(own == list(range(own[0], own[-1] + 1)) for own in readers)  # one contiguous run of bytes on disk
    fair = sum(nbytes) / max(1, min(count, sum(nbytes) >> 20))
    assert all(sum(nbytes[n] for n in own) <= fair + max(nbytes) for own in readers)


def test_what_comes_next_is_done_ahead_but_no_more() -> None:
    begun: list[int] = []

    def job(n: int) -> int:
        begun.append(n)
        if n == 3:
            raise ValueError("three")
        return n

    def jobs() -> list[Any]:
        return [lambda n=n: job(n) for n in range(6)]

    found = []
    with pytest.raises(ValueError, match="three"):
        for n in prefetch(jobs()):
            found.append(n)
            assert len(begun) <= n + 2
    assert found == [0, 1, 2] and begun == [0, 1, 2, 3]
    begun.clear()
    for n in prefetch(jobs()):
        if n == 1:
            break
    assert max(begun) <= 2
    assert list(prefetch([])) == []
    assert np.array_equal(list(prefetch(jobs()[:3])), [0, 1, 2])


# A case that an attack has found


def test_whatever_is_set_or_differs_nothing_wrong_comes_back(tmp_path: pathlib.Path) -> None:
    for result in run_job(tmp_path, "collective_read.whatever_is_set_or_differs_nothing_wrong_comes_back", processes=2):
        found = result.report
        right = ("disable_jit", "settings", "progress in one", "limit in one", "foreign", "at last")
        assert [found[name] for name in right] == [True] * len(right), found
        assert found["traced"][0] == "UnsupportedError" and "traced" in found["traced"][1]
        for name in ("verify in one", "rules", "more"):
            assert found[name][0] == "MismatchError" and "process 1 restores other leaves" in found[name][1], found
        assert found["nothing more"] is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "interrupt", "changed", "copying"])
def test_a_process_that_leaves_in_the_middle_is_missed_at_once(tmp_path: pathlib.Path, kind: str) -> None:
    results = run_job(
        tmp_path,
        "collective_read.a_process_that_leaves_in_the_middle_is_missed_at_once",
        processes=3,
        recoverable=True,
        KIND=kind,
    )
    own = {"memory": "MemoryError", "interrupt": "KeyboardInterrupt", "changed": "PeerError", "copying": "MemoryError"}
    (error, _), *others = [results[n].report for n in (1, 0, 2)]
    assert error[0] == own[kind], error
    if kind == "changed":
        assert "expected the bytes that process 2 has read" in error[1]
    for error, seconds in others:
        assert error[0] == "PeerError" and "process 1" in error[1] and seconds < 20, (error, seconds)


def test_read_with_rules_restarts_after_replacement(tmp_path: pathlib.Path) -> None:
    for result in run_job(tmp_path, "collective_read.read_with_rules_restarts_after_replacement", processes=2):
        assert result.report == [True, 2]


@pytest.mark.rare
@pytest.mark.slow
def test_collective_read_survives_slow_group(tmp_path: pathlib.Path) -> None:
    """A group that starts late does not time out, even after longer than backends wait."""
    for result in run_job(tmp_path, "collective_read.collective_read_survives_slow_group", processes=3):
        assert result.report == [True, True]


@pytest.mark.parametrize("count", [2, 1024, 1025, 5000])
def test_circles_of_those_that_read_together(count: int) -> None:
    """Each process is in one circle, all members agree on it, and their messages fit into memory."""
    processes = tuple(range(0, 3 * count, 3))
    found = {index: exchange_members(processes, index) for index in processes}
    assert all(index in one for index, one in found.items())
    assert all(found[other] == one for one in found.values() for other in (one[0], one[-1]))
    assert sum(map(len, set(found.values()))) == count
    assert max(map(len, found.values())) * 96 << 10 <= 96 << 20


@pytest.mark.long
def test_collective_read_makes_devices_only_if_needed(tmp_path: pathlib.Path) -> None:
    """JAX makes devices with all processes together, and waits minutes for a dead one."""
    for result in run_job(tmp_path, "collective_read.collective_read_makes_devices_only_if_needed", processes=2):
        assert result.report == [[True, 0], [True, 0], [True, 1]]


def test_a_value_that_a_cast_would_lose_in_one_process_fails_all(tmp_path: pathlib.Path) -> None:
    for result in run_job(
        tmp_path, "collective_read.a_value_that_a_cast_would_lose_in_one_process_fails_all", processes=3
    ):
        errors, is_written = result.report
        assert len(errors) == 4 and not is_written
        assert all("w: expected values that fit" in error for error in errors)
