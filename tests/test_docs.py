"""Every code block of the pages for users and contributors runs; every link leads somewhere."""

import inspect
import pathlib
import re
import shlex
import signal
from collections.abc import Iterator

import pytest

import treering as tr
from treering._cli import main as command_line

ROOT = pathlib.Path(__file__).parent.parent
FRONT = [
    ROOT / name
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "js/README.md", "js/libraries.md")
]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
PAGES = [*FRONT, *DOCS, *RESULTS]

WITH_COMMANDS = [page for page in PAGES if "```console" in page.read_text()]

MARKS = {  # pages that show the newest releases of other libraries, whose own warnings are theirs
    "keras": [pytest.mark.peers, pytest.mark.filterwarnings("default")],
    "migrate": [pytest.mark.peers],
    "integrations": [pytest.mark.peers, pytest.mark.slow, pytest.mark.rare, pytest.mark.filterwarnings("default")],
}
RUN = [pytest.param(page, marks=MARKS.get(page.stem, MARKS.get(page.parent.name, []))) for page in PAGES]


def named(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


QUIET = {  # other libraries ask for nothing outside of this machine
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_ERROR_REPORTING": "false",
}


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Ray and others set some, and would have what later tests send."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("page", RUN, ids=named)
def test_code_blocks_run(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    scope: dict[str, object] = {"__name__": "docs"}
    text = page.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        exec(compile("\n" * line + match[1], page, "exec"), scope)


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=named)
def test_commands_run(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    blocks = re.findall(r"^```(python|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "docs"}
    for kind, block in blocks:
        if kind == "python":
            exec(block, scope)
            continue
        for line in re.findall(r"^\$ treering (.*)", block, re.MULTILINE):
            command, _, code = line.partition(" # exit code ")
            assert command_line.main(shlex.split(command)) == int(code or 0), line


def test_the_page_of_the_command_names_every_command_and_option() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    names = [*command_line.cli.commands, *(name for option in command_line.cli.params for name in option.opts)]
    for command in command_line.cli.commands.values():
        names += [name for option in command.params for name in option.opts if name.startswith("--")]
    assert [name for name in dict.fromkeys(names) if not re.search(rf"(?<![\w-]){name}\b", page)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_tests_that_are_named_are_there(page: pathlib.Path) -> None:
    for file, name in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)", page.read_text()):
        assert re.search(rf"^ *def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_every_error_names_its_section_of_the_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = {heading.lower() for heading in re.findall(r"^#+ (\w+)$", page, re.MULTILINE)}
    kinds = [kind for kind in vars(tr.errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    assert len(kinds) == 10
    for kind in kinds:
        assert kind.entry in headings
        assert kind("a message").__notes__ == [
            f"More about it: docs/troubleshooting.md#{kind.entry} in the documentation of Treering"
        ]
        assert str(kind("a message")) == "a message"


def test_messages_of_the_troubleshooting_are_those_of_the_code() -> None:
    """The code contains what a heading quotes, with … for what is inserted; adjacent texts are joined first."""
    source = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that continue in the next line
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### (.*`.*)$", page, re.MULTILINE)
    messages = [message for heading in headings for message in re.findall("`([^`]*)`", heading)]
    quoted = [part.strip() for message in messages for part in message.split("…")]
    assert len(quoted) > 30
    assert [part for part in quoted if part not in source] == []


def test_every_page_is_in_the_site_and_llms_txt() -> None:
    site, listed = (ROOT / "docs" / "index.md").read_text(), (ROOT / "docs" / "llms.txt").read_text()
    assert "\n../benchmarks/results/*\n" in site
    for page in {*FRONT, *DOCS} - {ROOT / "README.md", ROOT / "docs" / "index.md"}:
        place = page.relative_to(ROOT).with_suffix("")
        entry = place.relative_to("docs") if page in DOCS else pathlib.Path("..", place)
        assert re.search(rf"^{entry.as_posix()}$", site, re.MULTILINE), place
        assert f"({place.as_posix()}.html)" in listed, place


def test_the_pages_stay_short() -> None:
    """A page that gains a section loses another: the budget is for all of them together."""
    words = {named(page): len(re.findall(r"\S*\w\S*", page.read_text())) for page in DOCS}
    assert sum(words.values()) <= 28_100, words


def test_the_api_page_has_everything_public() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    modules = {name for name in tr.__all__ if inspect.ismodule(getattr(tr, name))} | {"errors"}
    assert [name for name in sorted(modules) if f"automodule:: treering.{name}\n" not in page] == []
    names = [name for name in [*tr.__all__, "open"] if name not in modules and not name.startswith("__")]
    assert [name for name in names if not re.search(rf":: treering\.{name}(\(\))?$", page, re.MULTILINE)] == []
    for module in ("errors", "stores.key_values"):
        assert re.search(rf"automodule:: treering\.{module}\n   :members:\n", page)  # all of them
    assert ":: treering.testing.StoreConformance\n" in page
    for module in (tr.formats, tr.rules):
        members = re.search(rf"automodule:: {module.__name__}\n   :members:(.*)", page)
        assert members and (
            not members[1] or set(module.__all__) - {"Box", "Entry", "Skeleton"} <= set(re.findall(r"\w+", members[1]))
        )


def test_campaigns_write_into_pages_that_have_their_marks() -> None:
    targets = re.findall(r"--write (\S+)", (ROOT / "Makefile").read_text())
    assert {*targets} <= {named(page) for page in RESULTS} and len(targets) == 11
    assert [target for target in targets if ":begin -->" not in (ROOT / target).read_text()] == []


def test_the_picture_of_the_benchmarks_is_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import chart

    assert chart.PICTURE.read_text("utf-8") == chart.drawn(chart.PAGE.read_text("utf-8"))


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "pictures").iterdir()), ids=lambda path: path.name)
def test_pictures_fetch_nothing_and_are_shown(picture: pathlib.Path) -> None:
    assert any(f"pictures/{picture.name})" in page.read_text() for page in PAGES)
    if picture.suffix == ".svg":
        named = set(re.findall(r'https?://[^\s"]+', picture.read_text("utf-8")))
        assert named <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}  # neither is fetched
