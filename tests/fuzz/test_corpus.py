"""Reads the fuzzer's corpus without the fuzzer."""

from pathlib import Path

import pytest

from fuzz.targets import CORPUS, TARGETS, one


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_raises_nothing_but_our_errors(target: str, tmp_path: Path) -> None:
    files = sorted((CORPUS / target).iterdir())
    assert files
    for file in files:
        one(target, file.read_bytes(), tmp_path)
