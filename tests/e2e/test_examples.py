"""Runs the examples. Each must print the lines that it promises."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "promises"),
    [
        ("demo.py", ["killed in the middle of saving step-000000", "bit-identical: True", "tensors"]),
        ("minilm.py", ["22.7 million parameters", "equal to the last bit: True"]),
    ],
)
def test_examples(name: str, promises: list[str]) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert all(promise in done.stdout for promise in promises), done.stdout
