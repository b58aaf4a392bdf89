"""Every code block of the README and the docs runs; every link leads somewhere."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


# That page shows the newest releases of other libraries.
RUN = [pytest.param(p, marks=pytest.mark.peers) if p.name == "coming-from.md" else p for p in PAGES]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_code_blocks_run(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "docs"}
    text = page.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        exec(compile("\n" * line + match[1], page, "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_are_named_are_there(page: pathlib.Path) -> None:
    for file, name in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)", page.read_text()):
        assert re.search(rf"^ *def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{file}::{name}"
