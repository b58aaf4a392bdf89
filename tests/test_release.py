"""Tests of the files that a release consists of, and of those that make one."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

import treering as tr
from release import distributions
from treering._cli import main

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "workflows").glob("*.yml"))}
JOBS = {f"{name}/{job}": one for name, flow in WORKFLOWS.items() for job, one in flow["jobs"].items()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel of the working tree. It is built without a network."""
    pytest.importorskip("hatchling", reason="hatchling is installed for `make test`")
    folder = tmp_path_factory.mktemp("dist")
    build = f"import hatchling.build; hatchling.build.build_wheel({str(folder)!r})"
    environment = {**os.environ, "GITHUB_REPOSITORY": "owner/name"}
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, env=environment, check=True, capture_output=True)
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


def test_links_of_the_description_lead_to_files_of_the_tag(wheel: pathlib.Path) -> None:
    assert distributions.link_problems(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"treering-{tr.__version__}.dist-info/METADATA").decode()
    blob, raw = "https://github.com/owner/name/blob", "https://raw.githubusercontent.com/owner/name"
    links = re.findall(rf"(!?)\[[^\]]*\]\((?:{blob}|{raw})/v{tr.__version__}/([^)#]*)", text)
    assert len(links) > 15 and all((ROOT / path).exists() for _, path in links)
    assert {picture for picture, path in links if path.endswith(".svg")} == {"!"}


def test_a_tag_needs_its_version_changelog_and_golden_files() -> None:
    problems = distributions.tag_problems("v9.8.7")
    assert problems == [
        f"tag: expected v{tr.__version__}, found v9.8.7",
        "CHANGELOG.md: expected a heading ## 9.8.7, found none",
        *(
            f"changes/{path.name}: expected in CHANGELOG.md; run `towncrier build`"
            for path in distributions.fragments()
        ),
    ]


def test_news_fragments_are_bullets_of_a_kind() -> None:
    """towncrier leaves out files with other names in silence."""
    kinds = [kind["directory"] for kind in distributions.PROJECT["tool"]["towncrier"]["type"]]
    for path in (ROOT / "changes").iterdir():
        if path.name not in distributions.PROJECT["tool"]["towncrier"]["ignore"]:
            assert re.fullmatch(rf"\+[\w-]+\.({'|'.join(kinds)})\.md", path.name), path.name
            assert all(re.match(r"- \S|  \S|$", line) for line in path.read_text().splitlines()), path.name


def _steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in JOBS.items():
        yield from ((name, step) for step in job["steps"])


def test_workflows_may_do_only_what_they_need() -> None:
    """Every workflow reads only. Two jobs identify themselves, and one of them deploys the site."""
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    assert {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job} == {
        "docs/deploy": {"pages": "write", "id-token": "write"},
        "release/publish": {"id-token": "write"},
    }
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert all("timeout-minutes" in job for job in JOBS.values())
    assert all("cancel-in-progress" in flow["concurrency"] for flow in WORKFLOWS.values())


def test_actions_are_pinned() -> None:
    """A pin is a commit with the version after it; PyPA's action is the only exception."""
    lines = [line for path in (GITHUB / "workflows").glob("*.yml") for line in path.read_text().splitlines()]
    used = [line.partition("uses: ")[2] for line in lines if "uses: " in line]
    pinned = re.compile(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert {one for one in used if not pinned.fullmatch(one)} == {"pypa/gh-action-pypi-publish@release/v1"}
    assert len({one.partition("@")[0] for one in used}) == len(set(used))  # one version of each
    assert all(s["with"]["persist-credentials"] is False for _, s in _steps() if "checkout@" in s.get("uses", ""))


def test_workflows_run_targets_that_exist_with_declared_pythons() -> None:
    """All targets are those of the Makefile. Jobs that may not fail have the versions of Python of the classifiers."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run, pythons = set(), set()
    for name, step in _steps():
        for values in _combinations(JOBS[name].get("strategy", {}).get("matrix", {})):

            def filled(text: str, values: dict[str, str] = values) -> str:
                return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: values[match[1]], text)

            run |= {filled(step["run"])} if "run" in step else set()
            if "setup-python@" in step.get("uses", "") and not JOBS[name].get("continue-on-error"):
                pythons.add(filled(step["with"]["python-version"]))
    made = {re.fullmatch(r"make ([\w-]+)(?: PYTHON\w*=python)*", command) for command in run}
    assert {match[1] for match in made if match} == {
        "coverage", "dist", "docs", "lint", "lowest", "newest", "quick", "test", "thorough",
    }  # fmt: skip
    assert None not in made and {match[1] for match in made if match} <= targets
    classifiers = distributions.PROJECT["project"]["classifiers"]
    declared = {match[1] for one in classifiers if (match := re.search(r":: (3\.\d+)$", one))}
    assert pythons == declared and min(declared) == distributions.PROJECT["project"]["requires-python"].strip(">=")


def _combinations(matrix: dict[str, Any]) -> list[dict[str, str]]:
    if "include" in matrix:
        return matrix["include"]
    return [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]


def test_the_other_files_fit_this_version() -> None:
    """They name the version. Hooks run files that exist. Forms ask for the output of commands that exist."""
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == tr.__version__
    of_npm = tr.__version__.replace("rc", "-rc.")  # npm writes candidates in another way
    for name in ("package.json", "package-lock.json"):
        assert json.loads((ROOT / "js" / name).read_text())["version"] == of_npm
    assert f'VERSION = "{of_npm}"' in (ROOT / "js/src/version.js").read_text()
    assert f"- This is {tr.__version__}. " in (ROOT / "docs/explanation/alternatives.md").read_text()
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = " ".join(hook["entry"] for hook in repository["hooks"])
    assert repository["repo"] == "local" and all((ROOT / name).exists() for name in re.findall(r"tests/\S+", hooks))
    forms = [yaml.safe_load(path.read_text()) for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml")]
    commands = re.findall(r"treering (\w+)", str(forms))
    assert {"doctor", "show", "verify"} == set(commands) <= set(main.cli.commands)
