"""Tests progress bars."""

import io
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import treering as tr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.long
@pytest.mark.parametrize("target", ["c", "c.safetensors"])
def test_bars_show_everything_there_is_to_move(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A bar ends at the number of bytes that the call moves."""
    state = {str(n): np.ones(1_000_000) for n in range(5)}
    calls = {
        "save": lambda: tr.save(tmp_path / target, state, progress=True),
        "in the background": lambda: tr.save_async(tmp_path / f"b{target}", state, progress=True).result(),
        "restore": lambda: tr.restore(tmp_path / target, progress=True),
        "convert": lambda: tr.convert(tmp_path / target, tmp_path / f"d{target}", progress=True),
    }
    for name, call in calls.items():
        shown = Terminal()
        monkeypatch.setattr(sys, "stderr", shown)
        call()
        text = shown.getvalue()
        assert "40.0/40.0 MB" in text, f"{name}: {text!r:.500}"


def test_no_bar_is_shown_without_a_terminal(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No bar is shown if stderr is not a terminal."""
    tr.save(tmp_path / "c", {"x": np.ones(1_000_000)}, progress=True)
    tr.convert(tmp_path / "c", tmp_path / "c.safetensors", progress=True)
    tr.restore(tmp_path / "c.safetensors", progress=True)
    assert capfd.readouterr() == ("", "")


def test_without_asking_there_are_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bar is shown without `progress=True`."""
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    tr.save(tmp_path / "c", {"x": np.ones(1_000_000)})
    tr.restore(tmp_path / "c")
    assert not shown.getvalue()


@pytest.mark.long
def test_a_real_terminal(tmp_path: pathlib.Path) -> None:
    pty = pytest.importorskip("pty")  # only on POSIX
    code = f"import numpy as np, treering as tr; tr.save({str(tmp_path / 'c')!r}, dict(x=np.ones(9**7)), progress=True)"
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # The other end is closed.
            pass
        assert process.wait() == 0
    assert b"38.3/38.3 MB" in shown
