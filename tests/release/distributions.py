"""Builds the wheel and the sdist and checks them: ``make dist``, or ``python -m release.distributions FOLDER``.

Another build must give the same bytes: the builder gives every file the time SOURCE_DATE_EPOCH, or a fixed one. The
wheel must run the demo in an environment that has no other files of the project. If the environment variable TAG is
set, the project must be ready for that tag.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

from treering._version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
METADATA = {
    f"treering-{__version__}.dist-info/{name}"
    for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
}


def fragments() -> list[Path]:
    """Returns the files that say what has changed since the last release."""
    return sorted((ROOT / "changes").glob("+*"))


def tag_problems(tag: str) -> list[str]:
    """Returns what the project lacks before it can have a tag: the version, its changelog, and its golden files."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    golden = ROOT / "tests" / "golden" / "released" / __version__
    return [
        *([] if tag == f"v{__version__}" else [f"tag: expected v{__version__}, found {tag}"]),
        *(
            []
            if any(re.match(rf"## {re.escape(tag[1:])}\b", line) for line in changelog)
            else [f"CHANGELOG.md: expected a heading ## {tag[1:]}, found none"]
        ),
        *(f"{path.relative_to(ROOT)}: expected in CHANGELOG.md; run `towncrier build`" for path in fragments()),
        *(
            []
            if golden.exists()
            else [f"{golden}: expected checkpoints of this version, found none; run `python -m release.golden`"]
        ),
    ]


def link_problems(wheel: Path) -> list[str]:
    """Returns the links of the description that lead nowhere on PyPI."""
    with zipfile.ZipFile(wheel) as archive:
        description = archive.read(f"treering-{__version__}.dist-info/METADATA").decode()
    relative = re.findall(r"\]\((?!https?:|#)([^)]*)", description)
    return [
        f"README.md: expected an absolute link, found {link}; set GITHUB_REPOSITORY=OWNER/NAME" for link in relative
    ]


def wheel_problems(wheel: Path) -> list[str]:
    """Returns what is wrong with a wheel. It must have the files of the package, its metadata, and no others."""
    source = ROOT / "src"
    paths = [path for path in (source / "treering").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    package = {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    differing = sorted(name for name in package.keys() & found.keys() if package[name] != found[name])
    return [
        *_missing_and_extra(wheel, {*package, *METADATA, "treering/py.typed"}, {*found}),
        *(f"{wheel.name}: {name}: expected the bytes of src/{name}, found others" for name in differing),
    ]


def sdist_problems(sdist: Path) -> list[str]:
    """Returns what is wrong with an sdist. It must have the files of Git that pyproject.toml includes, no others."""
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    command = ["git", "ls-files", "-z", "--", *listed]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    return [
        *(
            f"pyproject.toml: sdist includes {name}: expected a file, found none"
            for name in listed
            if not (ROOT / name).exists()
        ),
        *_missing_and_extra(sdist, {*tracked, "PKG-INFO", "pyproject.toml", ".gitignore"} - {""}, found),
    ]


def _missing_and_extra(archive: Path, expected: set[str], found: set[str]) -> list[str]:
    return [
        *(f"{archive.name}: expected {name}, found no such file" for name in sorted(expected - found)),
        *(f"{archive.name}: expected no file {name}" for name in sorted(found - expected)),
    ]


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the sdist, and the wheel from it, in `folder`. Returns both."""
    _run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def differences_of_another_build(wheel: Path, sdist: Path) -> list[str]:
    """Returns the names of the archives whose bytes another build, from copied files with new times, changes."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "copy")
        with tarfile.open(sdist) as archive:
            archive.extractall(copy, filter="data")
        (source,) = copy.iterdir()
        for path in source.rglob("*"):
            os.utime(path)
        _run(sys.executable, "-m", "build", "--sdist", "--wheel", "--outdir", Path(temporary, "again"), source)
        again = Path(temporary, "again")
        return [
            f"{one.name}: expected the same bytes from each build, found others"
            for one in (wheel, sdist)
            if (again / one.name).read_bytes() != one.read_bytes()
        ]


def run_demo(wheel: Path) -> None:
    """Runs the demo with the wheel in an environment of its own, from a folder that has only the examples."""
    with tempfile.TemporaryDirectory() as temporary:
        python = Path(temporary, "environment", "bin", "python")
        venv.create(python.parents[1], with_pip=True)
        _run(python, "-m", "pip", "install", "--quiet", f"{wheel}[demo]")
        examples = shutil.copytree(ROOT / "examples", Path(temporary, "examples"))
        imported = _run(python, "-c", "import treering; print(treering.__file__)", cwd=examples, output=True)
        if not Path(imported).is_relative_to(python.parents[1]):
            sys.exit(f"expected the treering of the wheel, found {imported.strip()}")
        printed = _run(python.with_name("treering"), "--version", cwd=examples, output=True)
        if __version__ not in printed:
            sys.exit(f"treering --version: expected {__version__}, found {printed.strip()}")
        _run(python, "demo.py", cwd=examples)


def _run(*command: str | Path, cwd: Path = ROOT, output: bool = False) -> str:
    """Runs a command and returns its output if asked to. No variable leads to the files of the project."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        check=True,
        text=True,
        stdout=subprocess.PIPE if output else None,
    )
    return done.stdout or ""


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    wheel, sdist = build(folder)
    _run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    tag = os.environ.get("TAG")
    problems = tag_problems(tag) + link_problems(wheel) if tag else []
    problems += wheel_problems(wheel) + sdist_problems(sdist) + differences_of_another_build(wheel, sdist)
    if problems:
        sys.exit("\n".join(problems))
    run_demo(wheel)
    print(f"{wheel.name} and {sdist.name}: contents, a second build and the demo are as expected")


if __name__ == "__main__":
    main()
