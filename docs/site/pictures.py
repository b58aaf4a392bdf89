"""Draws the pictures of docs/pictures that show a run, from a run that it makes: `python docs/site/pictures.py`.

The report is taken by Chromium, where there is one.
"""

import asyncio
import contextlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

import treering as tr
from treering._cli.browser import Browser
from treering._cli.main import main

PICTURES = pathlib.Path(__file__).parents[1] / "pictures"


def make_run(path: str) -> None:
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    split = jax.sharding.NamedSharding(mesh, jax.P(None, "model"))

    def layer() -> dict:
        draw = lambda *shape: jax.device_put(rng.normal(0, 0.02, shape).astype("float32"), split)  # noqa: E731
        return {
            "attention": {"qkv": draw(64, 192), "out": draw(64, 64)},
            "mlp": {"up": draw(64, 256), "down": draw(256, 64)},
        }

    params = {"embed": rng.normal(0, 0.02, (2000, 64)).astype("float32"), "layers": [layer() for _ in range(12)]}
    with tr.Checkpointer(path, keep=tr.keep.last(20)) as ckpts:
        for step in range(1000, 11000, 1000):
            params = jax.tree.map(lambda x: x * np.float32(1.02) + np.float32(rng.normal(0, 1e-3)), params)
            loss = 4.2 * (step / 1000) ** -0.3 + rng.normal(0, 0.02)
            ckpts.save(step, {"params": params, "step": step}, metrics={"loss": loss, "val/loss": loss + 0.1})


def command(*arguments: str) -> None:
    """The output of the command as an SVG, in a terminal of 90 columns."""
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    os.environ["COLUMNS"] = "90"
    with contextlib.redirect_stdout(out):
        assert main(arguments) == 0
    console = Console(record=True, width=90, file=io.StringIO())
    console.print(Text.from_ansi(out.getvalue()))
    write(f"{arguments[0]}.svg", console.export_svg(title=" ".join(["treering", *arguments])))


def write(name: str, svg: str) -> None:
    """Without the fonts that the picture would fetch, and without the place of this run."""
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.DOTALL)
    svg = re.sub(rf'textLength="[0-9.]+"([^>]*>){os.getcwd()}/', r"\1", svg)
    (PICTURES / name).write_text(svg, "utf-8")


async def browse(path: str) -> None:
    app = Browser([tr.open(path)])  # As wide as its text can be read on the page.
    async with app.run_test(size=(114, 25)) as pilot:
        await pilot.press("l", "j", "l", "j", "j", "l", "j", "l", "j", "l", "j", "s")
        await pilot.pause(1)
        write("browse.svg", app.export_screenshot(title="treering browse runs/gpt"))


def report(path: str) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("report.png is not drawn: expected Chromium on the PATH, found none")
    main(["report", path, "-o", "report.html"])
    page = pathlib.Path("report.html")
    page.write_text(page.read_text("utf-8").replace(f"{os.getcwd()}/", ""), "utf-8")
    quiet = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    place = [f"--screenshot={PICTURES / 'report.png'}", "--window-size=1000,1250", "--hide-scrollbars"]
    options = [*(f"--{name}" for name in quiet), *place, f"--user-data-dir={os.getcwd()}/chromium"]
    subprocess.run([chromium, *options, f"file://{os.getcwd()}/report.html"], check=True, capture_output=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(os.path.realpath(directory))
        make_run("runs/gpt")
        command("ls", "runs/gpt", "--best", "val/loss:min")
        command("show", "runs/gpt")
        asyncio.run(browse("runs/gpt"))
        report("runs/gpt")
