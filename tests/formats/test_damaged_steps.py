"""A step of another library that is too damaged to be recognized: it is there, and damaged, and said to be."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import treering as tr
from helpers import REAL
from treering.errors import CorruptError

TREE = {"w": np.arange(4, dtype=np.float32)}
# By format: the name of a step, and the file of it that is cut short.
STEPS = {
    "t5x": ("checkpoint_5", "checkpoint"),
    "flax": ("checkpoint_5", ""),
    "fjformer": ("streaming_params_5", ""),
    "levanter": ("step-5", "metadata.json"),
    "orbax": ("5", "_METADATA"),
    "tensorflow": ("model.ckpt-5.index", ""),
}


@pytest.mark.parametrize("kept", [0, 5])
@pytest.mark.parametrize("format", STEPS)
def test_it_counts_as_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str, kept: int) -> None:
    run = tmp_path / "run"
    tr.save(run / "step-00000003", TREE, step=3)
    name, file = STEPS[format]
    if format == "tensorflow":
        for one in (REAL / "tensorflow" / "t5").iterdir():
            shutil.copy(one, run / one.name.replace("-1000", "-5"))
    else:
        tr.save(run / name, TREE, format=format)
    assert tr.steps(run) == [3, 5] and tr.verify(run).ok and tr.open(run).step == 5
    target = run / name / file if file else run / name
    data = target.read_bytes()
    target.chmod(0o644)
    target.write_bytes(data[:kept])

    assert tr.steps(run) == [3, 5]
    report = tr.verify(run)
    assert not report.ok and name in str(report)
    with pytest.raises(CorruptError):
        tr.open(run, step=5)
    with caplog.at_level(logging.WARNING):
        assert tr.open(run).step == 3
    assert "step 5 is damaged" in caplog.text
    caplog.clear()
    with tr.Checkpointer(run) as checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.restore(like=TREE)
    assert "step 5 is damaged" in caplog.text


def test_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from treering._tools.listing import list_run

    tr.save(tmp_path / "step-00000003", TREE, step=3)
    tr.save(tmp_path / "checkpoint_5", TREE, format="t5x")
    (tmp_path / "checkpoint_5" / "checkpoint").write_bytes(b"\x82\xa7ver")
    rows = {row.step: (row.state, row.format) for row in list_run(tmp_path).rows}
    assert rows == {3: ("good", "treering"), 5: ("damaged", "t5x")}
