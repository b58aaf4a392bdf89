"""Tests `make gpu` without a GPU: it reports that, and runs its checks and rows on the CPU on request."""

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_without_an_accelerator_nothing_is_measured(tmp_path: pathlib.Path) -> None:
    done = run("--dir", str(tmp_path))
    assert done.returncode == 1 and "found only the CPU; nothing was measured" in done.stderr


def test_the_checks_and_rows_run(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gpu:begin -->\nstale\n<!-- gpu:end -->\nafter\n")
    done = run("--cpu", "--mib", "4", "--repeats", "1", "--dir", str(tmp_path), "--write", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    assert "stall of `save_async`" in text and "growth a save" in text and "× cpu" in text


def test_it_needs_nothing_but_jax_and_what_the_makefile_names() -> None:
    code = "import sys, benchmarks.gpu; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"orbax", "flax", "safetensors", "torch", "pytest", "obstore"} & set(eval(done.stdout))
