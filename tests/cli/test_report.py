"""The report of a run: its data, and its page in a real browser if one is installed."""

import base64
import html.parser
import json
import pathlib
import re
import shutil
from typing import Any

import numpy as np
import pytest

import treering as tr
from js import chromium
from js.layout import look
from treering.errors import MismatchError

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(64, 32)).astype("float32")
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in range(1, 9):
            layers = [{"w": w * step, "b": np.full(16, step, "float32")} for _ in range(3)]
            tree = {"layers": layers, "new": w} if step == 8 else {"layers": layers, HOSTILE: w, "lr": 0.1}
            if step == 7:
                layers[1]["w"] = np.where(w > 2, np.nan, w)
            metrics = {"loss": 1 / step if step < 8 else float("nan"), "<b>": float("nan")}
            ckpts.save(10 * step, tree, metrics=metrics | ({"constructor": 1.0} if step > 3 else {}))
    return tmp_path / "run"


class _Data(html.parser.HTMLParser):
    """Collects the data of a page and all its elements."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self._inside, self._text = False, ""
        self.feed(page)
        self.data = json.loads(self._text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self._text += data


def _report(treering: Any, run: pathlib.Path, *options: object) -> dict[str, Any]:
    page = run.parent / "report.html"
    found = treering("report", run, "-o", page, *options)
    assert found.code == 0, found.err
    return _Data(page.read_text("utf-8")).data


@pytest.mark.long
def test_the_data_are_those_of_the_run(run: pathlib.Path, treering: Any) -> None:
    data = _report(treering, run)
    assert [row["step"] for row in data["steps"]] == data["read"] == list(range(10, 90, 10))
    assert data["steps"][1]["metrics"] == {"loss": 0.5, "<b>": "nan"} and data["steps"][-1]["marks"] == ["latest"]
    leaves = {leaf["path"]: leaf for leaf in data["leaves"]}
    layers = {f"layers/{n}/{name}" for n in range(3) for name in "wb"}
    assert set(leaves) == {*layers, HOSTILE.replace("/", "~1"), "new"}
    assert leaves["new"]["there"] == [0] * 7 + [1] and "nan" not in leaves["new"]
    norms = [float(np.linalg.norm(tr.open(run, step=step)["layers/0/w"])) for step in data["read"]]
    np.testing.assert_allclose(leaves["layers/0/w"]["norm"], norms, rtol=1e-4)
    assert leaves["new"]["norm"][:-1] == [None] * 7 and leaves["new"]["norm"][-1]
    assert leaves["layers/1/w"]["nan"][6] > 0 and leaves["layers/1/w"]["nan"][7] == 0
    assert leaves[HOSTILE.replace("/", "~1")]["mean"][7] is None
    bins = np.frombuffer(base64.b64decode(leaves["layers/0/w"]["bins"]["0"]), np.uint8)
    low, high = (leaves["layers/0/w"][edge][0] for edge in ("low", "high"))
    counts, _ = np.histogram(np.asarray(tr.open(run, step=10)["layers/0/w"]), len(bins), (low, high))
    assert np.abs(bins / 255 - counts / counts.max()).max() < 0.05
    assert data["tree"]["nbytes"] == sum(part["nbytes"] for part in data["tree"]["parts"])
    assert (data["diff"]["a"], data["diff"]["b"], data["diff"]["onlyB"]) == (70, 80, ["new"])
    assert {row["path"] for row in data["diff"]["changed"]} == layers


@pytest.mark.long
def test_steps_leaves_and_the_two_that_are_compared_are_chosen(run: pathlib.Path, treering: Any) -> None:
    data = _report(treering, run, "--steps", 3, "--leaves", "layers/*/b", "--compare", 10, 30)
    assert data["read"][0] == 10 and data["read"][-1] == 80 and len(data["read"]) == 3
    assert [leaf["path"] for leaf in data["leaves"]] == [f"layers/{n}/b" for n in range(3)]
    assert (data["diff"]["a"], data["diff"]["b"]) == (10, 30)
    nothing = _report(treering, run, "--steps", 0)
    assert nothing["read"] == nothing["leaves"] == [] and nothing["diff"] is None
    assert _report(treering, run, "--steps", 1)["read"] == [80]
    assert [leaf["path"] for leaf in _report(treering, run, "--leaves", "new")["leaves"]] == ["new"]
    found = treering("report", run, "-o", run.parent / "report.html", "--steps", 2, "--json").json
    assert found["read"] == [10, 80] and found["nbytes"] == (run.parent / "report.html").stat().st_size


def test_layers_that_are_alike_count_with_all_their_bytes(run: pathlib.Path, treering: Any) -> None:
    def leaves(part: dict[str, Any]) -> int:
        return sum(map(leaves, part["parts"])) if "parts" in part else part["nbytes"]

    tree = _report(treering, run)["tree"]
    assert leaves(tree) == tree["nbytes"] == sum(np.asarray(leaf).nbytes for leaf in tr.open(run).values())


@pytest.mark.long
def test_what_is_damaged_is_named_in_the_page_and_on_stderr(run: pathlib.Path, treering: Any) -> None:
    (arrays,) = (run / "step-00000030").glob("*.safetensors")
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)
    found = treering("report", run, "-o", run.parent / "report.html")
    notes = _Data((run.parent / "report.html").read_text("utf-8")).data["notes"]
    assert found.code == 0 and "step 30" in found.err
    assert len(notes) == 1 and "step 30: 7 arrays are left out" in notes[0]
    (run / "step-00000030" / "treering.json").write_bytes(b"{}")
    assert treering("report", run, "-o", run.parent / "report.html", "--json").json["notes"] == ["step 30 is damaged"]


def test_bad_calls_write_nothing(run: pathlib.Path, treering: Any) -> None:
    page = run.parent / "report.html"
    page.write_text("my own page")
    found = treering("report", run, "-o", page)
    assert found.code == 3 and "an earlier report" in found.err and page.read_text() == "my own page"
    page.unlink()
    found = treering("report", run, "-o", run / "step-00000010" / "report.html")  # Deleting the step would leave it.
    assert found.code == 3 and "found the checkpoint" in found.err
    for options, words in [
        (["--compare", "10", "11"], "found 11"),
        (["--compare", "10", "10"], "found 10 twice"),
        (["--leaves", "nothing/**"], "nothing/**"),
        (["--steps", "-1"], "--steps"),
    ]:
        found = treering("report", run, "-o", page, *options)
        assert found.code in (2, 3) and words in found.err and not page.exists(), found.err
    assert treering("report", run.parent / "none", "-o", page).code == 3 and not page.exists()


def test_python_writes_the_page_of_the_command(run: pathlib.Path, treering: Any) -> None:
    page = run.parent / "report.html"
    found = tr.report(run, output=page, steps=2, leaves=["layers/*/b"], compare=(10, 30))
    assert _Data(page.read_text("utf-8")).data["diff"]["b"] == 30 and found.read == (10, 80)
    options = ("--steps", 2, "--leaves", "layers/*/b", "--compare", 10, 30)
    asked = treering("report", run, "-o", page, "--json", *options).json
    assert asked["path"] == found.path == str(page) and asked["nbytes"] == page.stat().st_size
    assert abs(found.nbytes - asked["nbytes"]) < 20  # The page says when it was made.
    assert found.notes == () and 'sandbox="allow-scripts"' in found._repr_html_() and str(page) in repr(found)
    leaves = _Data(page.read_text("utf-8")).data["leaves"]
    tr.report(run, output=page, steps=2, leaves="layers/*/b")
    assert _Data(page.read_text("utf-8")).data["leaves"] == leaves
    for wrong, words in (
        ({"leaves": 3}, "leaves: expected a glob or a list of them, found 3"),
        ({"steps": "x"}, "steps: expected an integer from 0, found 'x'"),
        ({"max_expansion": "x"}, "expected a number from 1"),
    ):
        with pytest.raises(MismatchError, match=words):
            tr.report(run, output=page, **wrong)  # type: ignore[arg-type]
    runs = [run, shutil.copytree(run, run.parent / "other")]
    assert tr.report(runs, output=page).left_out == 0
    for wrong in ({"leaves": ["new"]}, {"compare": (10, 30)}):
        with pytest.raises(MismatchError, match="expected one run"):
            tr.report(runs, output=page, **wrong)  # type: ignore[arg-type]
    assert treering("report", *runs, "--leaves", "new", "-o", page).code == 2
    with pytest.raises(MismatchError, match="found an empty list"):
        tr.report([], output=page)


@pytest.mark.long
def test_files_next_to_weights_are_written_and_replaced(run: pathlib.Path, treering: Any) -> None:
    """report and cp write into a folder with weights, which is a checkpoint but not only that."""
    for name in ("model.safetensors", "flax_model.msgpack", "streaming_params"):
        folder = run.parent / name.partition(".")[0]
        format = {"format": "fjformer"} if name.startswith("streaming") else {}
        tr.save(folder / name, {"w": np.ones(3, np.float32)}, **format)
        for _ in range(2):
            assert treering("report", run, "-o", folder / "report.html").code == 0
        found = treering("report", run, "-o", folder / name)
        assert found.code == 3 and f"{folder / name}: expected a free path or an earlier report" in found.err
        assert treering("cp", run, folder).code == 0 and tr.steps(folder) == tr.steps(run)
        assert treering("cp", run, folder / name).code == 3
    tr.save(run.parent / "o", {"w": np.ones(3)}, format="orbax")
    for output in (["report", run, "-o", run.parent / "o" / "report.html"], ["cp", run, run.parent / "o"]):
        assert treering(*output).code == 3, "deleting the checkpoint would delete the output"


def test_the_page_asks_for_nothing_and_names_are_no_markup(run: pathlib.Path, treering: Any) -> None:
    _report(treering, run)
    page = (run.parent / "report.html").read_text("utf-8")
    tags = _Data(page).tags
    assert tags.count("script") == 2 and not {"img", "link", "iframe"} & set(tags)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


DRIVER = """
const texts = (query) => [...document.querySelectorAll(query)].map((one) => one.textContent);
const found = {charts: texts("#timeline .card b"), paths: texts("#leaves td.path")};
found.readouts = texts("#timeline .card header span");
const filter = document.getElementById("filter");
filter.value = "layers *b";
filter.dispatchEvent(new Event("input"));
found.filtered = texts("#leaves td.path");
document.querySelector("#leaves tr.leaf").click();
found.detail = texts("#leaves .inside .card b");
found.bars = document.querySelectorAll("#leaves .inside rect").length;
document.querySelector("#leaves tr.leaf").click();
found.closed = document.querySelectorAll("#leaves .inside").length;
filter.value = "";
filter.dispatchEvent(new Event("input"));
document.querySelectorAll("#leaves th button")[4].click(); // by norm, the largest first
found.sorted = texts("#leaves td.path");
const before = document.querySelectorAll("#treemap button").length;
document.querySelector('#treemap button[data-path="layers"]').click();
found.map = [before, document.querySelectorAll("#treemap button").length, texts(".crumbs button")];
document.querySelectorAll(".crumbs button")[0].click();
found.back = document.querySelectorAll("#treemap button").length;
const first = document.getElementById("compare-a");
first.value = "1";
first.dispatchEvent(new Event("change"));
found.compared = texts("#compared tbody tr:first-child td");
found.summary = texts("#diff-summary");
found.title = document.title;
return found;
"""


@pytest.mark.skipif(chromium.BROWSER is None, reason=chromium.MISSING)
@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_works_in_a_browser(run: pathlib.Path, treering: Any, tmp_path: pathlib.Path, width: int) -> None:
    _report(treering, run)
    with chromium.browser(tmp_path) as browser:
        page = browser.page(f"file://{run.parent / 'report.html'}", width=width, dark=width == 400)
        look(page)
        found = page.run(f"(() => {{{DRIVER}}})()")
        look(page)
    assert browser.errors == []
    assert found["charts"] == ["loss", "<b>", "constructor", "size", "time between saves"]
    assert found["readouts"][:3] == ["step 80: nan", "", "step 80: 1"]  # The newest values, finite or not.
    assert len(found["paths"]) == 8 and found["filtered"] == [f"layers/{n}/b" for n in range(3)]
    assert found["detail"][:2] == ["norm", "mean ± std"] and found["bars"] > 0 and found["closed"] == 0
    assert found["sorted"][0].startswith("layers/") and found["sorted"][0].endswith("/w")
    before, inside, crumbs = found["map"]
    assert inside < before == found["back"] and crumbs == ["all", "layers"]
    assert found["compared"][3] == "300 %" and re.match("Leaves: [0-9]+ equal, ", found["summary"][0])
    assert "hacked" not in found["title"]


@pytest.mark.skipif(chromium.BROWSER is None, reason=chromium.MISSING)
def test_an_empty_section_says_why(run: pathlib.Path, treering: Any, tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path / "bare" / "run") as ckpts:
        ckpts.save(1, {"w": np.ones(3)})
    _report(treering, tmp_path / "bare" / "run", "--steps", 0)
    _report(treering, run)
    with chromium.browser(tmp_path) as browser:
        page = browser.page(f"file://{tmp_path / 'bare' / 'report.html'}")
        assert page.texts("#no-leaves") == ["No statistics: --steps N computes them for N steps."]
        assert page.texts("#no-metrics")[0].startswith("No step has a metric.")
        full = browser.page(f"file://{tmp_path / 'report.html'}")
        assert not full.texts("#no-leaves") and not full.texts("#no-metrics")
    assert browser.errors == []


def test_runs_of_a_directory_are_one_report(run: pathlib.Path, treering: Any, tmp_path: pathlib.Path) -> None:
    shutil.copytree(run, tmp_path / "sweep" / "a")
    shutil.copytree(run, tmp_path / "sweep" / "b")
    data = _report(treering, tmp_path / "sweep")
    assert [(one["name"], len(one["steps"])) for one in data["runs"]] == [("a", 8), ("b", 8)]
    (tmp_path / "sweep" / "c").mkdir()
    found = treering("report", tmp_path / "sweep" / "a", run, tmp_path / "sweep" / "c", "-o", tmp_path / "some.html")
    assert found.code == 3 and f"not in the report: {tmp_path / 'sweep' / 'c'}: expected a run" in found.err
    data = _Data((tmp_path / "some.html").read_text("utf-8")).data
    assert [one["name"] for one in data["runs"]] == ["sweep/a", "run"]
    assert "sweep/c is left out" in data["notes"][0]
    assert treering("report", tmp_path / "sweep", "--compare", 10, 20).code == 2
    shutil.copytree(run / "step-00000010", tmp_path / "single" / "final")
    shutil.copytree(run, tmp_path / "single" / "below" / "run")
    found = treering("report", run, tmp_path / "single", "-o", tmp_path / "some.html")
    data = _Data((tmp_path / "some.html").read_text("utf-8")).data
    named = [f"not in the report: {tmp_path / 'single' / name}: expected a run" for name in ("final", "below")]
    assert found.code == 3 and all(text in found.err for text in named) and len(data["notes"]) == 2
    if chromium.BROWSER is None:
        pytest.skip(chromium.MISSING)
    with chromium.browser(tmp_path) as browser:
        page = browser.page(f"file://{tmp_path / 'report.html'}", width=400, dark=True)
        assert page.run("document.querySelector('.chart').querySelectorAll('.curve').length") == 2
        # The curves are equal: both are to be seen.
        assert page.run("document.querySelectorAll('.chart .curve[stroke-dasharray]').length") >= 1
        look(page)
    assert browser.errors == []


@pytest.mark.skipif(chromium.BROWSER is None, reason=chromium.MISSING)
def test_arrays_that_differ_a_little_have_no_cosine_of_1(treering: Any, tmp_path: pathlib.Path) -> None:
    values = np.linspace(1, 2, 1000, dtype="float32")
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": values + (step == 2) * np.sin(np.arange(1000)).astype("float32") / 200, "same": 1})
    _report(treering, tmp_path / "run")
    with chromium.browser(tmp_path) as browser:
        page = browser.page(f"file://{tmp_path / 'report.html'}")
        cells = page.run("[...document.querySelectorAll('#changed tbody tr td')].map((one) => one.textContent)")
        assert page.run("document.getElementById('diff-summary').textContent") == "Leaves: 1 equal, 1 different."
    assert (
        cells[-1].startswith("0.99999")
        and f"cosine {cells[-1]}\n" in treering("diff", tmp_path / "run", "--steps", 1, 2).out
    )
