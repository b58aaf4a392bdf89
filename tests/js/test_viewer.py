"""The viewer in a real browser, on checkpoints that Treering has written; and its build."""

import json
import pathlib
import runpy
import shutil
import threading
import types
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import treering as tr
from js import chromium
from js.layout import look
from js.range_server import serve
from treering._core import units
from treering._core.describe import describe_leaf
from treering._printable import safe
from treering._tools.view import Served, ViewServer

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
pages = types.SimpleNamespace(**runpy.run_path(str(ROOT / "js" / "pages" / "build.py")))
PAGE = pages.TOOLS / "view" / "viewer.html"
HOSTILE = "<img src=x onerror=\"document.title='hacked'\">\u202e\x07"

in_browser = pytest.mark.skipif(chromium.BROWSER is None, reason=chromium.MISSING)
pytestmark = [pytest.mark.long, pytest.mark.whole]


def test_the_pages_are_a_fresh_build() -> None:
    stale = [path.name for path, content in pages.outputs().items() if path.read_text("utf-8") != content]
    assert not stale, "run `python js/pages/build.py`"


def test_the_builder_refuses_what_it_does_not_know() -> None:
    module = ROOT / "js" / "pages" / "viewer" / "sources.js"
    for text in ('import x from "./a.js";\n', "export default 1;\n", 'export { a } from "./a.js";\n'):
        with pytest.raises(ValueError, match="expected imports and exports of names"):
            pages._body(module, text, lambda path: 0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    with chromium.browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
    assert browser.errors == []


@pytest.fixture
def served(browser: chromium.Browser) -> Iterator[Callable[..., chromium.Page]]:
    """Opens the page that `treering view` serves for a path."""
    servers: list[ViewServer] = []

    def opened(path: pathlib.Path, **options: int) -> chromium.Page:
        server = ViewServer(Served(path), 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        return browser.page(server.url, **options)

    yield opened
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def page(browser: chromium.Browser) -> chromium.Page:
    """The page alone, as a file."""
    return browser.page(PAGE.as_uri())


def pairs(page: chromium.Page, selector: str) -> dict[str, str]:
    """Returns the terms of a list and their texts."""
    return dict(zip(page.texts(f"{selector} dt"), page.texts(f"{selector} dd"), strict=True))


def unfold(page: chromium.Page, path: str) -> dict[str, str]:
    """Opens a leaf, and returns its statistics."""
    page.click(f"[data-path={json.dumps(path)}]")
    page.wait("document.querySelector('.panel .stats, .panel pre, .panel .note')")
    return pairs(page, ".panel .stats")


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    w = np.random.default_rng(0).normal(size=(300, 400)).astype("float32")
    odd = w.copy()
    odd[0, :3] = np.nan, np.inf, 0
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (100, 200, 300):
            tree = {"w": w * step, "odd": odd, "same": jnp.ones(3, jnp.bfloat16), "step": step}
            ckpts.save(step, tree, metrics={"loss": 30 / step, "acc": float("nan") if step == 200 else 0.5})
    tr.record(tmp_path / "run", 300, {"late": 2.0})
    return tmp_path / "run"


# How many pixels of the first screen an element is below its top, negative if it ends above.
TOP = "document.querySelector({}).getBoundingClientRect().top + scrollY"


@in_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_the_first_screen_shows_the_model(
    run: pathlib.Path, served: Callable[..., chromium.Page], width: int, dark: bool
) -> None:
    page = served(run, width=width, dark=dark)
    page.wait("document.getElementById('run-status')?.textContent === '3 steps, 3 valid'")
    page.wait("document.querySelector('.node')")
    assert page.run(TOP.format("'.node:last-of-type'")) < 900  # all leaves, with shapes and sizes
    assert page.texts(".node .what") == ["float32[300,400]", "bfloat16[3]", "int 300", "float32[300,400]"]
    assert page.texts("#head")[0].startswith("treering · step 300 · 4 leaves · 965 KB · saved 20")
    assert page.texts("#metrics .card b")[:3] == ["loss", "acc", "late"]
    assert page.texts("#metrics .card .faint")[0] == "step 300: 0.1"
    assert page.texts("#metrics .card .ends span")[:4] == ["highest 0.3", "lowest 0.1", "step 100", "300"]
    assert pairs(page, "#values")["late"].startswith("2")
    look(page)
    page.run("location.hash += '&leaf=w&leaf=step'")  # An address opens what it names.
    page.wait("document.querySelector('.panel .heat') && document.querySelector('.panel pre')")
    look(page)
    page.run("document.querySelector('#run details').open = true")
    look(page)
    assert all(
        url.startswith(page.run("location.origin"))
        for url in page.run("performance.getEntries().map((e) => e.name)")
        if "://" in url
    )


@in_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_a_comparison_appears_where_it_was_asked_for(
    run: pathlib.Path, served: Callable[..., chromium.Page], width: int
) -> None:
    page = served(run, width=width)
    page.wait("document.querySelector('.node')")
    page.run("other = document.getElementById('other-step'); other.value = 'step-00000100'")
    page.run("other.dispatchEvent(new Event('change'))")
    page.wait("document.getElementById('diff-summary')?.textContent.includes('2 equal, 2 with other values.')")
    top = page.run("document.getElementById('comparison').getBoundingClientRect().top")
    assert 0 <= top < 400
    cells = page.run("Array.from(document.querySelectorAll('#diff tbody tr'), (r) => r.textContent)")
    # Reading again begins at once: until it ends, its progress is on the page.
    again = "(() => { document.getElementById('read-values').click(); return [bar.hidden, bar.value === bar.max]; })()"
    assert page.run(f"bar = document.querySelector('#comparison progress'), {again}") == [False, True]
    assert cells == ["stepdiffersint 300 → int 100100 %", "wdiffersfloat32[300,400]100 %946.4"]
    look(page)
    page.click("#tree .node")
    assert page.run("location.hash") == "#served&compare=step-00000100&leaf=odd"
    page.run("history.back()")
    page.wait("!document.querySelector('.panel')")
    page.run("document.body.focus()")
    page.key("Escape")
    assert page.run("location.hash") == "#served" and not page.texts("#comparison *")
    page.run("history.back()")
    page.wait("document.getElementById('diff-summary')")


@in_browser
def test_a_run_that_is_written_is_updated(run: pathlib.Path, served: Callable[..., chromium.Page]) -> None:
    page = served(run)
    page.wait("document.querySelector('.node')")
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(400, {"w": np.ones(2)}, metrics={"loss": 0.01})
    page.wait("document.getElementById('run-status').textContent === '4 steps, 4 valid'")
    assert "400" in page.texts("#metrics .card .faint")[0] and "step 300" in page.texts("#head")[0]
    page.click("#newer")
    page.wait("document.getElementById('head').textContent.includes('step 400')")
    (run.parent / "new" / "step-00000001").mkdir(parents=True)  # its first save is running
    page = served(run.parent / "new")
    page.wait("document.querySelector('#status .note')?.textContent.includes('expected a valid step, found none')")
    tr.save(run.parent / "new" / "step-00000002", {"w": np.ones(2)}, step=2)
    page.wait("document.getElementById('head')?.textContent.includes('step 2')")
    assert not page.texts("#status .note")


@in_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_runs_of_a_directory_are_in_one_chart(
    run: pathlib.Path, served: Callable[..., chromium.Page], width: int
) -> None:
    shutil.copytree(run, run.parent / "sweep" / "lr-0.1")
    shutil.copytree(run, run.parent / "sweep" / "lr-0.2")
    tr.save(run.parent / "sweep" / "other" / "7", {"w": np.ones(3)}, format="orbax")
    page = served(run.parent / "sweep", width=width, dark=True)
    page.wait("document.getElementById('runs')")
    assert page.texts("#runs-view .legend span") == ["lr-0.1", "lr-0.2", "other"]
    assert page.run("document.querySelector('#metrics .card').querySelectorAll('.curve').length") == 2
    look(page)
    page.run("Array.from(document.querySelectorAll('#runs .link')).at(-1).click()")
    page.wait("document.getElementById('head')?.textContent.startsWith('orbax · step 7 · 1 leaf')")
    assert unfold(page, "w")["mean"] == "1"
    page.click("#all-runs")
    page.wait("document.getElementById('runs')")


@in_browser
def test_tab_reaches_one_rectangle(run: pathlib.Path, served: Callable[..., chromium.Page]) -> None:
    tr.save(run.parent / "many", {"a": {str(n): np.ones(1000 + n) for n in range(36)}, "b": np.ones(90_000)})
    page = served(run.parent / "many")
    page.wait("document.querySelectorAll('#treemap button').length > 36")
    assert page.run("document.querySelectorAll('#treemap [tabindex=\"0\"]').length") == 1
    page.run("document.querySelector('#treemap [tabindex=\"0\"]').focus()")
    first = page.run("document.activeElement.dataset.path")
    page.key("ArrowRight")
    assert first != page.run("document.activeElement.dataset.path")
    page.run("document.querySelector('#treemap [data-path=a]').click()")
    assert page.texts(".crumbs button") == ["all", "a"]
    page.run("document.querySelector('#treemap [tabindex=\"0\"]').focus()")
    page.key("Escape")
    assert page.texts(".crumbs button") == ["all"]
    page.click("#treemap [data-path=b]")  # A leaf opens in the tree.
    page.wait("document.querySelector('.panel .stats')")


@in_browser
def test_a_page_alone_has_the_words_of_the_command_line(browser: chromium.Browser) -> None:
    for name in ("v1-everything", "v1-iterators", "v1-iterator-states"):
        page = browser.page(PAGE.as_uri())
        page.drop(".opener", GOLDEN / name)
        page.wait("document.querySelector('.node')")
        page.run("filter.value = '*'; filter.dispatchEvent(new Event('input'))")
        rows = "(one) => [one.dataset.path, one.querySelector('.what').textContent]"
        ckpt = tr.open(GOLDEN / name)
        expected = {safe(path): safe(describe_leaf(entry)) for path, entry in ckpt._source.entries.items()}
        found = dict(page.run(f"Array.from(document.querySelectorAll('.node'), {rows})"))
        assert found.keys() == expected.keys()
        # Arrays in the states of iterators are not printed as NumPy does.
        assert [
            (found[path], what) for path, what in expected.items() if found[path] != what and "array" not in what
        ] == []
        assert f"· {units.nbytes(ckpt.nbytes)} ·" in page.texts("#head")[0]


@in_browser
def test_statistics_are_those_of_numpy(run: pathlib.Path, served: Callable[..., chromium.Page]) -> None:
    page = served(run)
    page.wait("document.querySelector('.node')")
    found = unfold(page, "odd")
    w = np.asarray(tr.open(run)["odd"])
    finite = w[np.isfinite(w)].astype("float64")
    assert found["NaN"].startswith("1 (") and found["infinite"].startswith("1 (") and found["zeros"].startswith("1 (")
    expected = [finite.min(), finite.max(), finite.mean(), finite.std()]
    names = ("minimum", "maximum", "mean", "std")
    np.testing.assert_allclose([float(found[name]) for name in names], expected, rtol=1e-3)
    assert len(page.run("Array.from(document.querySelectorAll('.histogram rect'))")) > 20
    cells = page.run("[document.querySelector('.heat').width, document.querySelector('.heat').height]")
    assert cells == [256, 192]
    corner = page.run("Array.from(document.querySelector('.heat').getContext('2d').getImageData(0, 0, 1, 1).data)")
    assert corner == [255, 0, 200, 255]  # where the NaN is
    assert "blue below zero, red above" in page.texts(".panel .card:has(.heat) .legend")[0]
    page.run("document.querySelector('.heat').focus()")
    page.key("ArrowRight")
    assert page.texts(".panel .card header span[aria-live]")[0].startswith("[0…1, 2…3]")


@in_browser
def test_a_dropped_folder_is_read_and_locks_the_page(run: pathlib.Path, page: chromium.Page) -> None:
    with serve(run) as server:
        page.drop(".opener", run / "step-00000300")
        page.wait("document.getElementById('head')?.textContent.includes('step 300')")
        assert unfold(page, "same")["maximum"] == "1"
        logged = len(page.browser.errors)
        assert (
            page.run(f"fetch('{server.url}/step-00000300/treering.json').then(() => 'sent', () => 'refused')")
            == "refused"
        )
        page.run(f"location.hash = '#url={server.url}/step-00000300'")
        page.wait("document.querySelector('#status .note')?.textContent.includes('reload the page')")
        assert server.requests == []
    del page.browser.errors[logged:]  # The browser logs that it refused.


@in_browser
def test_a_url_is_read_by_ranges(run: pathlib.Path, browser: chromium.Browser) -> None:
    shutil.copy(PAGE, run)
    with serve(run) as server:
        page = browser.page(f"{server.url}/viewer.html")
        page.run("document.querySelector('input[type=url]').focus()")
        page.type(f"{server.url}/step-00000200/")
        page.key("Enter")
        page.wait("document.getElementById('head')?.textContent.includes('step 200')")
        assert unfold(page, "same")["mean"] == "1"
        page.run(f"location.hash = '#url={server.url}/none'")
        page.wait("document.querySelector('#status .note')?.textContent.includes('give the URL of one step or file')")
        del browser.errors[:]  # The browser logs the 404.


@in_browser
@pytest.mark.parametrize("golden", ["v1-differences", "v1-differences-in-parts"])
def test_versions_of_weights_are_read(golden: str, browser: chromium.Browser, tmp_path: pathlib.Path) -> None:
    """From a folder, where the base is next to the version, and from a server."""
    stream = tmp_path / "stream"
    shutil.copytree(GOLDEN / golden, stream)
    (*_, last) = sorted(stream.iterdir())
    array = np.asarray(tr.open(last)["bf16"]).astype(np.float64)
    folder = browser.page(PAGE.as_uri())
    folder.drop(".opener", stream)
    folder.wait("document.querySelector('.node')")
    shutil.copy(PAGE, stream)
    with serve(stream) as server:
        url = browser.page(f"{server.url}/viewer.html#url={server.url}/{last.name}")
        url.wait("document.querySelector('.node')")
        for page in (folder, url):
            found = unfold(page, "bf16")
            expected = [array.min(), array.max(), array.mean()]
            names = ("minimum", "maximum", "mean")
            np.testing.assert_allclose([float(found[name]) for name in names], expected, rtol=1e-3)


@in_browser
def test_safetensors_files_are_read(tmp_path: pathlib.Path, page: chromium.Page) -> None:
    half = np.linspace(-1, 1, 24).astype(ml_dtypes.bfloat16).reshape(4, 6)
    safetensors.numpy.save_file({"layers.0.w": half, "layers.0.b": np.arange(3)}, tmp_path / "model.safetensors")
    page.pick("input[multiple]", tmp_path / "model.safetensors")
    page.wait("document.getElementById('head')?.textContent === 'safetensors · 2 leaves · 216 B'")
    assert page.texts(".node .path") == ["layers", "0", "b", "w"]
    assert float(unfold(page, "layers.0.w")["minimum"]) == -1
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:-1])
    page.pick("input[multiple]", tmp_path / "short.safetensors")
    assert "short.safetensors" in page.wait("document.querySelector('#status .note')?.textContent")


@in_browser
def test_differences_are_found(run: pathlib.Path, page: chromium.Page) -> None:
    tr.save(run.parent / "b", {"w": np.asarray(tr.open(run)["w"]) + 1, "odd": jnp.ones(3), "new": 1, "step": 300})
    page.drop(".opener", run / "step-00000300")
    page.wait("document.querySelector('#compare .opener')")
    page.click("#compare summary")
    page.drop("#compare .opener", run.parent / "b")
    summary = "1 only in the second, 1 only in the first, 1 with another dtype or shape, 1 equal, 1 with other values."
    page.wait(f"document.getElementById('diff-summary')?.textContent === {json.dumps(summary)}")
    page.click("#comparison input")  # shows equal leaves, too
    rows = page.run(
        "Array.from(document.querySelectorAll('#diff tbody tr'), (row) => Array.from(row.cells, (c) => c.textContent))"
    )
    assert {row[0]: row[1] for row in rows} == {
        "new": "only in the second",
        "odd": "dtype or shape differs",
        "same": "only in the first",
        "step": "equal",
        "w": "differs",
    }
    assert next(row for row in rows if row[0] == "w")[3:] == ["100 %", "1"]


@in_browser
def test_damage_is_shown_where_it_is(run: pathlib.Path, served: Callable[..., chromium.Page]) -> None:
    (arrays,) = (run / "step-00000300").glob("*.safetensors")
    arrays.chmod(0o644)
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)
    (run / "step-00000200" / "treering.json").chmod(0o644)
    (run / "step-00000200" / "treering.json").write_bytes(b"{}")
    page = served(run, width=400, dark=True)
    page.wait("document.getElementById('run-status')?.textContent === '3 steps, 2 valid'")
    assert "step-00000200/treering.json: expected" in page.wait("document.querySelector('#run .note')?.textContent")
    for path in page.texts(".node .path"):
        page.click(f"[data-path={path}]")
    page.wait("document.querySelectorAll('.panel').length === 4 && document.querySelector('.panel .note')")
    assert "are not what was saved" in page.texts(".panel .note")[0]
    page.run("step.value = 'step-00000200'; step.dispatchEvent(new Event('change'))")
    page.wait("document.querySelector('#status .note')")  # and the rest of the run still shows
    assert page.texts("#metrics .card b")[0] == "loss" and page.texts("#step option") == [
        "step-00000300",
        "step-00000200 (damaged)",
        "step-00000100",
    ]
    look(page)
    del page.browser.errors[:]  # The browser logs the answers.


@in_browser
def test_later_versions_are_named(page: chromium.Page) -> None:
    folder = sorted((GOLDEN / "future").iterdir())[0]
    page.drop(".opener", folder)
    assert "read it with the release that wrote it" in page.wait("document.querySelector('#status .note')?.textContent")


@in_browser
def test_names_are_no_markup(tmp_path: pathlib.Path, page: chromium.Page) -> None:
    tr.save(tmp_path / "a", {HOSTILE: np.ones(3), "t": HOSTILE}, metrics={HOSTILE: 1.0}, metadata={HOSTILE: HOSTILE})
    page.drop(".opener", tmp_path / "a")
    page.wait("document.querySelector('.node')")
    page.run("document.querySelectorAll('.node').forEach((node) => node.click())")
    page.wait("document.querySelectorAll('.panel').length === 2")
    assert page.run("document.querySelectorAll('img').length") == 0 and "hacked" not in page.run("document.title")
    assert "\u202e" not in page.run("document.body.innerText") and "\\u{202e}" in page.texts(".node .path")[0]


@in_browser
def test_shardings_are_shown(page: chromium.Page) -> None:
    page.drop(".opener", GOLDEN / "v1-placement")
    page.wait("document.querySelector('.node')")
    page.run("document.querySelectorAll('.node').forEach((node) => node.click())")
    assert " on data=" in page.wait(
        "Array.from(document.querySelectorAll('.panel dd'), (one) => one.textContent).join('; ')"
    )


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page_is_used_with_keys(run: pathlib.Path, served: Callable[..., chromium.Page], dark: bool) -> None:
    page = served(run, width=400, dark=dark)
    page.wait("document.querySelector('.node')")
    page.key("/")
    page.type("am")
    assert page.texts(".node .path") == ["same"]
    page.key("ArrowDown")
    page.key("Enter")
    page.wait("document.querySelector('.panel .heat')")
    assert page.run("document.activeElement.dataset.path") == "same"
    page.key("ArrowLeft")
    assert page.texts(".panel") == []
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    back = page.run("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(23, 24, 26)" if dark else "rgb(251, 250, 248)")


@in_browser
def test_text_of_the_pictures_fits_its_boxes(browser: chromium.Browser) -> None:
    outside = """
    Array.from(document.querySelectorAll("text"), (text) => {
      const own = text.getBBox(), middle = own.x + own.width / 2;
      const around = Array.from(document.querySelectorAll("rect"), (rect) => rect.getBBox()).find((box) =>
        middle > box.x && middle < box.x + box.width && own.y > box.y && own.y < box.y + box.height);
      return around && own.width > around.width - 4 ? text.textContent : "";
    }).filter(Boolean)
    """
    for picture in ("save.svg", "benchmarks.svg"):
        assert browser.page((ROOT / "docs" / "pictures" / picture).as_uri()).run(outside) == [], picture
