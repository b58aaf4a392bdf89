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
from js.range_server import serve
from treering._tools.view import ServedFiles, ViewServer

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
        server = ViewServer(ServedFiles(path), 0)
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


@in_browser
def test_a_run_has_curves_and_its_steps(run: pathlib.Path, served: Callable[..., chromium.Page]) -> None:
    page = served(run)
    page.wait("document.getElementById('run-status')?.textContent === '3 steps, 3 valid'")
    assert page.texts("#metrics .card b")[:3] == ["loss", "acc", "late"]
    assert page.texts("#metrics .card .faint")[0] == "300: 0.1"
    assert page.texts("#head") == ["treering · step 300 · 4 leaves · 960 KB"]
    assert pairs(page, "#values")["late"].startswith("2")
    assert all(
        url.startswith(page.run("location.origin"))
        for url in page.run("performance.getEntries().map((e) => e.name)")
        if "://" in url
    )
    page.run("step.selectedIndex = 0; step.dispatchEvent(new Event('change'))")
    page.wait("document.getElementById('head').textContent.includes('step 100')")
    page.run("document.getElementById('other-step').selectedIndex = 2")
    page.run("document.getElementById('other-step').dispatchEvent(new Event('change'))")
    page.wait("document.getElementById('diff-summary')")
    assert "4 not read" in page.texts("#diff-summary")[0]


@in_browser
def test_statistics_are_those_of_numpy(run: pathlib.Path, served: Callable[..., chromium.Page]) -> None:
    page = served(run)
    page.wait("document.querySelector('.node')")
    found = unfold(page, "odd")
    w = np.asarray(tr.open(run)["odd"])
    finite = w[np.isfinite(w)].astype("float64")
    assert found["NaN"].startswith("1 (") and found["infinite"].startswith("1 (") and found["zeros"].startswith("1 (")
    expected = [finite.min(), finite.max(), finite.mean(), finite.std()]
    names = ("minimum", "maximum", "mean", "deviation")
    np.testing.assert_allclose([float(found[name]) for name in names], expected, rtol=1e-3)
    assert len(page.run("Array.from(document.querySelectorAll('.histogram rect'))")) > 20
    cells = page.run("[document.querySelector('.heat').width, document.querySelector('.heat').height]")
    assert cells == [256, 192]
    corner = page.run("Array.from(document.querySelector('.heat').getContext('2d').getImageData(0, 0, 1, 1).data)")
    assert corner == [255, 0, 200, 255]  # where the NaN is
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
def test_safetensors_files_are_read(tmp_path: pathlib.Path, page: chromium.Page) -> None:
    half = np.linspace(-1, 1, 24).astype(ml_dtypes.bfloat16).reshape(4, 6)
    safetensors.numpy.save_file({"layers.0.w": half, "layers.0.b": np.arange(3)}, tmp_path / "model.safetensors")
    page.pick("input[multiple]", tmp_path / "model.safetensors")
    page.wait("document.getElementById('head')?.textContent === 'safetensors · 2 leaves · 72 B'")
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
    page.drop("#compare .opener", run.parent / "b")
    page.wait("document.getElementById('diff-summary')")
    page.click("#read-values")
    summary = "1 only in the second, 1 only in the first, 1 with another dtype or shape, 1 equal, 1 with other values."
    page.wait(f"document.getElementById('diff-summary').textContent === {json.dumps(summary)}")
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
    assert next(row for row in rows if row[0] == "w")[4:] == ["100 %", "1"]


@in_browser
def test_damage_is_shown_where_it_is(run: pathlib.Path, served: Callable[..., chromium.Page]) -> None:
    (arrays,) = (run / "step-00000300").glob("*.safetensors")
    arrays.chmod(0o644)
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)
    (run / "step-00000200" / "treering.json").chmod(0o644)
    (run / "step-00000200" / "treering.json").write_bytes(b"{}")
    page = served(run)
    page.wait("document.getElementById('run-status')?.textContent === '3 steps, 2 valid'")
    assert page.texts("#run .note")[0].startswith("step-00000200: treering.json: expected the checksum")
    for path in page.texts(".node .path"):
        page.click(f"[data-path={path}]")
    page.wait("document.querySelectorAll('.panel').length === 4 && document.querySelector('.panel .note')")
    assert "expected the checksum" in page.texts(".panel .note")[0]


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
