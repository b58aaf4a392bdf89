"""Tests that a resumed job of several processes has each leaf on the devices where it was."""

import pathlib

import pytest

from jobs import run_job

pytestmark = pytest.mark.compat


@pytest.mark.slow
@pytest.mark.parametrize("read", ["each", "once"])
def test_arrays_of_a_job_of_two_processes_are_where_they_were(tmp_path: pathlib.Path, read: str) -> None:
    options = {"OPTIONS": {"read": read}}
    before = 'jax.config.update("jax_cpu_collectives_implementation", "gloo")'
    first = run_job(tmp_path, "resume.job", processes=2, devices=4, before=before, **options)
    second = run_job(tmp_path, "resume.job", processes=2, devices=4, before=before, **options)
    for one, other in zip(first, second, strict=True):
        assert one.report == other.report
        assert "cannot be placed" not in other.output and "init() is called" not in other.output
    (alone,) = run_job(tmp_path, "resume.job", processes=1, devices=8, OPTIONS={})  # the same devices in one process
    for name in ("spread", "explicit", "replicated", "free", "host"):
        assert alone.report[name] == first[0].report[name]
    assert "local (a mesh of 4 devices (own=4) in a job with 8)" in alone.output  # of one process, now


@pytest.mark.slow
def test_arrays_of_one_process_go_where_init_says(tmp_path: pathlib.Path) -> None:
    """Arrays of one process, such as pipeline stages, go where `init` says. A log says that no place is recorded."""
    run_job(tmp_path, "resume.halves", processes=2, devices=4)
    for result in run_job(tmp_path, "resume.halves", processes=2, devices=4):
        assert "they go where init() places them, and it is called to see where: 0 and 1 more (the devices of one" in (
            result.output
        )
