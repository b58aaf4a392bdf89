"""Tests of formats that other packages declare as entry points, with real installed packages."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

_FORMAT = """
import numpy as np
from treering.formats.safetensors import FORMAT as SAFETENSORS

class _Format:
    name = "mine"
    suffixes = (".mine",)

    def __getattr__(self, name):
        return getattr(SAFETENSORS, name)

    def refuses(self, store, path):
        return None if path.endswith(".mine") else "no .mine"

FORMAT = _Format()
"""


def _install(folder: pathlib.Path, name: str, code: str, point: str) -> None:
    """Creates the files that pip installs for a package with one module."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[treering.formats]\n{point}\n")


@pytest.mark.long
def test_installed_formats_are_there_and_broken_ones_are_named(tmp_path: pathlib.Path) -> None:
    """Formats of installed packages work. One that fails to load is logged once, and shipped ones are not replaced."""
    _install(tmp_path, "mine_format", _FORMAT, "mine = mine_format:FORMAT")
    _install(tmp_path, "broken_format", "1 / 0", "broken = broken_format:FORMAT")
    _install(tmp_path, "shadowing", _FORMAT, "orbax = shadowing:FORMAT\nzarr = other:FORMAT")
    code = f"""
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    import numpy as np, treering as tr
    assert "mine_format" not in sys.modules
    tr.save({str(tmp_path / "x.mine")!r}, {{"x": np.arange(3)}}, format="mine")
    assert tr.open({str(tmp_path / "x.mine")!r})["x"][1:].tolist() == [1, 2]
    assert "mine" in tr.formats.names() and "broken" not in tr.formats.names()
    for name in ("orbax", "zarr"):
        assert tr.formats.get(name).__class__.__module__.startswith("treering")
    try:
        tr.save({str(tmp_path / "y")!r}, {{"x": 1}}, format="broken")
    except tr.errors.MismatchError as error:
        assert "'mine'" in str(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the format 'broken' of broken_format:FORMAT is not available") == 1
    assert done.stderr.count("is not available") == 1
