"""Tests of the files that a release consists of, and of those that make one."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

from release import distributions

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel of the working tree. It is built without a network."""
    pytest.importorskip("hatchling", reason="hatchling is installed for `make test`")
    folder = tmp_path_factory.mktemp("dist")
    build = f"import hatchling.build; hatchling.build.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.mark.long
@pytest.mark.whole
def test_the_wheel_has_the_package_and_nothing_else(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert distributions.wheel_problems(wheel) == []
    wrong = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(wrong, "w") as other:
        for name in archive.namelist():
            if name != "treering/py.typed":
                other.writestr(name, archive.read(name) + b"#" * (name == "treering/errors.py"))
        other.writestr("tests/conftest.py", "")
    assert distributions.wheel_problems(wrong) == [
        f"{wheel.name}: expected treering/py.typed, found no such file",
        f"{wheel.name}: expected no file tests/conftest.py",
        f"{wheel.name}: treering/errors.py: expected the bytes of src/treering/errors.py, found others",
    ]
