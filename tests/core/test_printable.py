"""Tests that names from files cannot control a terminal, in printed text, in errors and in the log."""

import logging
import pathlib
import shutil
import traceback

import numpy as np
import pytest

import treering as tr

EVIL = "w\x1b]0;title\x07\x1b[2J\n\u202egnp"
SHOWN = r"w\x1b]0;title\x07\x1b[2J\n\u202egnp"


def is_harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and SHOWN in text


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    tr.save(tmp_path / "c", {EVIL: np.ones(3, np.float32), "other": 1})
    return tmp_path / "c"


def test_what_is_printed_of_a_checkpoint(path: pathlib.Path) -> None:
    ckpt = tr.open(path)
    for text in (str(ckpt), repr(ckpt), str(tr.diff(ckpt, {"other": 1})), str(tr.diff({"other": 1}, ckpt))):
        assert is_harmless(text)
    assert is_harmless(str(tr.diff(ckpt, {EVIL: np.zeros(3, np.float32), "other": 1})))
    (arrays,) = path.glob("*.safetensors")
    arrays.chmod(0o644)
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"\xff")
    assert is_harmless(str(tr.verify(path)))


def test_errors(path: pathlib.Path) -> None:
    for like in ({"a": np.ones(3)}, {EVIL: np.ones(4, np.float32), "other": 1}):
        with pytest.raises(tr.errors.TreeringError) as error:
            tr.restore(path, like=like)
        assert is_harmless(str(error.value)) and is_harmless("".join(traceback.format_exception(error.value)[-2:]))


def test_the_log(path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (path.parent / EVIL).mkdir()
    shutil.copytree(path, path.parent / EVIL / "step-00000001")
    with caplog.at_level(logging.INFO):
        tr.restore(path.parent / EVIL, like={"other": 1}, extra="ignore")
    assert caplog.records and all(is_harmless(record.getMessage()) for record in caplog.records)
    tr.save(path.parent / "saved", {"a": 1})
