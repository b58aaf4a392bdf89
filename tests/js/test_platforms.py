"""Tests the package where the README says that it runs, installed from the tarball that npm would publish."""

import contextlib
import functools
import gzip
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from js import chromium, node

TOOLS = [
    "esbuild@0.25", "vite@7", "typescript@5.9", "@types/node@20", "publint@0.3", "@arethetypeswrong/cli@0.18", "wabt@1",
    "node@22", "@tensorflow/tfjs-core@4", "@tensorflow/tfjs-backend-cpu@4",
]  # fmt: skip
_INSTALL_SECONDS = 300
READ = """
export async function read(place) {
  const ckpt = await open(place);
  return `step ${ckpt.step}: ${(await ckpt.leaf("w").read()).data[2]}`;
}
"""
ANSWER = "step 7: 2"
NO_ICON = '<!doctype html><link rel="icon" href="data:,">\n'

pytestmark = [pytest.mark.long, pytest.mark.rare, pytest.mark.whole]


def run(command: list[object], cwd: pathlib.Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


class App:
    """A project that has installed the package. `tarball` is what it installed."""

    def __init__(self, folder: pathlib.Path, tarball: pathlib.Path) -> None:
        self.folder, self.tarball = folder, tarball

    def tool(self, name: str, *arguments: object, node: str = "node") -> str:
        """Runs a tool of npm in the folder."""
        return run([node, self.folder / "node_modules" / ".bin" / name, *arguments], self.folder)

    def write(self, name: str, text: str) -> pathlib.Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    def bundle(self, name: str, form: str, target: str, *more: str) -> None:
        binary = self.folder / "node_modules" / ".bin" / "esbuild"
        run(
            [binary, name, "--bundle", f"--format={form}", f"--outfile={target}", "--log-level=error", *more],
            self.folder,
        )


def tools() -> pathlib.Path:
    """Returns a folder with the tools. The first test process installs them, next to pytest; skips if it cannot."""
    import fcntl  # missing on Windows

    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs Node and npm")
    folder = pathlib.Path(sys.prefix, "js-tools")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installed = folder / "installed.json"
        if not installed.exists() or installed.read_text() != json.dumps(TOOLS):
            (folder / "package.json").write_text('{"private": true}')
            command = [npm, "install", "--prefer-offline", "--no-audit", "--no-fund", *TOOLS]
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=_INSTALL_SECONDS, check=False)
            if done.returncode:
                pytest.skip(f"npm cannot install {', '.join(TOOLS)}: {done.stderr.decode()[-300:]}")
            installed.write_text(json.dumps(TOOLS))
    return folder / "node_modules"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> App:
    modules = tools()
    folder = tmp_path_factory.mktemp("app")
    shutil.copytree(node.ROOT / "js", folder / "js", ignore=shutil.ignore_patterns("node_modules", "cjs"))
    name = run(["npm", "pack", "--silent"], folder / "js").split()[-1]
    shutil.unpack_archive(folder / "js" / name, folder / "packed", "gztar")
    (folder / "node_modules").mkdir()
    for one in [*modules.iterdir()]:
        (folder / "node_modules" / one.name).symlink_to(one)
    shutil.move(folder / "packed" / "package", folder / "node_modules" / "treering")
    made = App(folder, folder / "js" / name)
    made.write("package.json", '{"private": true, "type": "module"}')
    made.write("read.js", 'import { open } from "treering";' + READ)
    tr.save(folder / "web" / "c", {"w": np.arange(3, dtype=np.float32)}, step=7)
    return made


def in_node(app: App, command: str) -> None:
    assert run([command, "--version"], app.folder)[1:3] in ("20", "22") or command == "node"
    app.write("main.mjs", 'import { read } from "./read.js"; console.log(await read("web/c"));')
    required = 'const { open } = require("treering");' + READ.replace("export ", "")
    app.write("main.cjs", required + 'read("web/c").then(console.log);')
    for name in ("main.mjs", "main.cjs"):
        assert run([command, name], app.folder).strip() == ANSWER


def in_node_22(app: App) -> None:
    in_node(app, str(app.folder / "node_modules" / ".bin" / "node"))


@contextlib.contextmanager
def page(app: App, tmp_path: pathlib.Path) -> Iterator[tuple[chromium.Page, chromium.Browser]]:
    """Yields an empty page of a server without ranges that has what is in `web`."""
    if not chromium.BROWSER:
        pytest.skip(chromium.MISSING)
    app.write("web/index.html", NO_ICON)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    handler = functools.partial(Handler, directory=str(app.folder / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with chromium.browser(tmp_path) as browser:
                yield browser.page(f"http://127.0.0.1:{server.server_port}/index.html"), browser
        finally:
            server.shutdown()
            thread.join()


ASK = """new Promise((resolve, reject) => {
  addEventListener("error", reject);
  const answers = new MessageChannel();
  answers.port1.onmessage = (event) => resolve(event.data);
  const target = (worker) => worker.postMessage("/c", [answers.port2]);
  %s
})"""


def in_chromium(app: App, tmp_path: pathlib.Path) -> None:
    """A page, a web worker that gets a message at once, and a service worker."""
    worker = 'import { read } from "./read.js";\nself.onmessage = async ({ data, ports }) => {\n'
    app.write("worker.js", worker + "  ports[0].postMessage(await read(data).catch(String));\n};")
    app.bundle("read.js", "esm", "web/read.js")
    app.bundle("worker.js", "esm", "web/worker.js")
    app.bundle("worker.js", "iife", "web/classic.js")
    starts = [
        'target(new Worker("/worker.js", { type: "module" }));',
        'target(new Worker("/classic.js"));',
        'const all = navigator.serviceWorker; all.register("/classic.js"); all.ready.then((it) => target(it.active));',
    ]
    opened = 'import { open } from "treering";\nimport { differences } from "treering/differences";\n'
    app.write("weights.js", opened + "export const read = async (at) => (await open(at, { differences })).verify();")
    app.bundle("weights.js", "esm", "web/weights.js")
    shutil.copytree(node.ROOT / "tests" / "golden" / "v1-differences", app.folder / "web" / "weights")
    with page(app, tmp_path) as (one, browser):
        assert one.run('import("/weights.js").then(({ read }) => read("/weights/step-00000003"))') == []
        assert one.run('import("/read.js").then(({ read }) => read("/c"))') == ANSWER
        assert [one.run(ASK % start) for start in starts] == [ANSWER] * 3
        assert browser.errors == []


def by_vite(app: App, tmp_path: pathlib.Path) -> None:
    app.write("vite/index.html", NO_ICON + '<script type="module" src="./main.js"></script>')
    worker = 'new Worker(new URL("./w.js", import.meta.url), { type: "module" })'
    app.write(
        "vite/main.js", f"const w = {worker}; w.onmessage = (e) => (globalThis.answer = e.data); w.postMessage('/c');"
    )
    app.write(
        "vite/w.js",
        'import { read } from "../read.js";\nself.onmessage = async (e) => postMessage(await read(e.data));',
    )
    app.tool("vite", "build", "vite", "--base=/dist/", "--outDir=../web/dist", "--logLevel=error")
    with page(app, tmp_path) as (one, browser):
        one.call("Page.navigate", url=one.run("location.origin") + "/dist/index.html")
        assert one.wait("globalThis.answer") == ANSWER
        assert browser.errors == []


def by_esbuild(app: App) -> None:
    """Bundles for Node; `open` alone takes 20 KB in a page."""
    for form, end in (("esm", "mjs"), ("cjs", "cjs"), ("iife", "cjs")):
        app.write("entry.js", 'import { read } from "./read.js";\nread("web/c").then(console.log);')
        app.bundle("entry.js", form, f"{form}.{end}", "--platform=node")
        assert run(["node", f"{form}.{end}"], app.folder).strip() == ANSWER
    app.write("open.js", 'import { open } from "treering"; globalThis.open = open;')
    app.bundle("open.js", "esm", "size.js", "--minify")
    assert len(gzip.compress((app.folder / "size.js").read_bytes())) <= 20_000


def by_tsc(app: App) -> None:
    """The examples of the README, as modules of both kinds, with and without the types of Node and the DOM."""
    text = (node.ROOT / "js" / "README.md").read_text("utf-8")
    (example,) = re.findall(r"^```ts\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    app.write("example.ts", example)
    app.write(
        "types.cts", 'import treering = require("treering");\nexport const open: typeof treering.open = treering.open;'
    )
    app.write(
        "differences.ts",
        'import { open } from "treering";\nimport { differences } from "treering/differences";\n'
        'export const opened = open("https://example.org", { differences });',
    )
    app.write("plain.d.ts", "declare var console: { log(...data: unknown[]): void };")
    common = {"strict": True, "noEmit": True, "skipDefaultLibCheck": True, "target": "es2022", "module": "nodenext"}
    for types, library, files in ((["node"], ["es2022", "dom"], []), ([], ["es2022"], ["plain.d.ts"])):
        options = common | {"types": types, "lib": library}
        app.write(
            "tsconfig.json", json.dumps({"compilerOptions": options, "files": ["example.ts", "types.cts", *files]})
        )
        app.tool("tsc", "-p", ".")


def by_linters(app: App) -> None:
    """No complaint of publint and arethetypeswrong, and WebAssembly that is built of its text."""
    app.tool("publint", "run", app.tarball, "--strict")
    app.tool("attw", app.tarball)
    built = (app.folder / "js" / "src" / "xxh3_wasm.js").read_text("utf-8")
    (app.folder / "js" / "node_modules").symlink_to(app.folder / "node_modules")
    run(["node", "build.mjs", "wasm"], app.folder / "js")
    assert (app.folder / "js" / "src" / "xxh3_wasm.js").read_text("utf-8") == built


ROWS: dict[str, Callable[..., None]] = {
    "Node 20": lambda app, tmp_path: in_node(app, "node"),
    "Node 22": lambda app, tmp_path: in_node_22(app),
    "Chromium": in_chromium,
    "Vite": by_vite,
    "esbuild": lambda app, tmp_path: by_esbuild(app),
    "`tsc --strict`": lambda app, tmp_path: by_tsc(app),
    "publint, arethetypeswrong": lambda app, tmp_path: by_linters(app),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_table_holds(app: App, tmp_path: pathlib.Path, row: str) -> None:
    text = (node.ROOT / "js" / "README.md").read_text("utf-8")
    table = text.partition("| place | what is tested |\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:] == list(ROWS)
    ROWS[row](app, tmp_path)


def test_weights_are_used_in_tensorflow_js(app: App) -> None:
    """The example of the page: a model of JAX gives the same numbers."""
    text = (node.ROOT / "js" / "libraries.md").read_text("utf-8")
    (example,) = re.findall(r"^```js\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    numbers = np.random.default_rng(0)
    x = jnp.asarray(numbers.standard_normal((2, 4)), jnp.float32)
    layers = [
        {"kernel": jnp.asarray(numbers.standard_normal(shape), jnp.bfloat16), "bias": jnp.ones(shape[1])}
        for shape in ((4, 8), (8, 3))
    ]
    tr.save(app.folder / "mlp", {"layers": layers})
    expected = jnp.maximum(x @ layers[0]["kernel"] + layers[0]["bias"], 0) @ layers[1]["kernel"] + layers[1]["bias"]
    app.write("tfjs.mjs", example + f"\nconsole.log(JSON.stringify(apply(tf.tensor({x.tolist()})).arraySync()));")
    found = json.loads(run(["node", "tfjs.mjs"], app.folder))
    np.testing.assert_allclose(found, np.asarray(expected, np.float32), rtol=1e-5)
