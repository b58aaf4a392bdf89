"""Tests the HTML for notebooks: it is well formed, and text from files cannot become markup."""

import base64
import html.parser
import pathlib
import re
import struct
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treering as tr
from treering._core.entries import ArrayEntry
from treering._core.outline import outline

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m"
VOID = {"br", "img", "meta"}


class Page(html.parser.HTMLParser):
    """Collects the elements and what a click on each path copies, and checks that elements are nested."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.paths: list[str | None] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.tags.append(tag)
        if dict(attrs).get("class") == "path":
            self.paths.append(dict(attrs)["title"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def ckpt(tmp_path: pathlib.Path) -> tr.Checkpoint:
    tree = {"a": {HOSTILE: np.ones((2, 3)), "n": HOSTILE}, "layers": [{"w": np.ones(4)} for _ in range(3)], "f": len}
    tr.save(tmp_path / "c", tree, step=3, metrics={HOSTILE: 2 / 3})
    return tr.open(tmp_path / "c")


def test_checkpoints_and_arrays(ckpt: tr.Checkpoint) -> None:
    page = Page(ckpt._repr_html_())
    assert "script" not in page.tags and "<script>" in page.text and "\x1b" not in ckpt._repr_html_()
    assert page.tags.count("details") == 3 and "0…2 ×3" in page.text and "float64[2,3]" in page.text
    assert "layers/0/w" in page.paths and "step 3" in page.text and "0.666667" in page.text
    assert "0.6666666" not in page.text
    array = Page(ckpt["layers/0/w"]._repr_html_())
    assert "float64[4]" in array.text and "32 B" in array.text
    assert "float64[2,3]" in Page(ckpt.at("a")._repr_html_()).text


def _pixels(page: str) -> np.ndarray:
    data = base64.b64decode(re.search(r'src="data:image/png;base64,([^"]*)"', page)[1])  # type: ignore[index]
    width, height = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    rows = np.frombuffer(zlib.decompress(data[start + 4 : start + 4 + length]), np.uint8).reshape(height, 1 + 3 * width)
    return rows[:, 1:].reshape(height, width, 3)


def test_a_lazy_array_is_a_picture(tmp_path: pathlib.Path) -> None:
    wide = np.full((300, 1000), 3.0, "float32")
    wide[0, 0] = np.nan
    tree = {"small": np.array([[-1, 0, 2], [1, np.inf, -2]], ml_dtypes.bfloat16), "text": np.array(["a", "b"])}
    tr.save(tmp_path / "p", {**tree, "wide": wide, "large": np.zeros(1_100_000, "float32")})
    ckpt = tr.open(tmp_path / "p")
    small = _pixels(ckpt["small"]._repr_html_())
    assert small.shape == (2, 3, 3) and small[0, 1].tolist() == [240, 238, 232]
    assert small[0, 2].tolist() == [178, 60, 43] and small[1, 2].tolist() == [33, 102, 172]
    assert small[1, 1].tolist() == [255, 0, 200]
    pixels = _pixels(ckpt["wide"]._repr_html_())
    assert pixels.shape == (128, 128, 3) and pixels[0, 0].tolist() == [255, 0, 200]
    assert "<img" not in ckpt["large"]._repr_html_() + ckpt["text"]._repr_html_()
    (file,) = (tmp_path / "p").glob("arrays-*")
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-16:] = bytes(16 * [1])
    file.write_bytes(data)
    shown = [tr.open(tmp_path / "p")[name]._repr_html_() for name in ("small", "wide")]
    assert any("what was saved" in one and "<img" not in one for one in shown)


def test_reports(ckpt: tr.Checkpoint, tmp_path: pathlib.Path) -> None:
    other = {"a": {HOSTILE: np.zeros((2, 3))}, "layers": [{"w": np.ones(4)}], "new": 1}
    report = tr.save(tmp_path / "d", other)
    assert str(tmp_path / "d") in Page(report._repr_html_()).text
    found = Page(tr.diff(ckpt, tmp_path / "d")._repr_html_())
    assert "1 leaf is equal" in found.text and "new" in found.paths and "6 of 6 values differ" in found.text
    assert "script" not in found.tags
    assert "all good" in Page(tr.verify(tmp_path / "d")._repr_html_()).text
    (file,) = (tmp_path / "d").glob("arrays-*")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])
    assert "1 problem" in Page(tr.verify(tmp_path / "d")._repr_html_()).text


@pytest.mark.long
def test_what_is_large_or_deep_ends(tmp_path: pathlib.Path) -> None:
    deep = "/".join("a" * 5000)
    names = [deep, *(f"{'x' * (n % 97)}y{n}z{'w' * (n % 3)}/{n}" for n in range(5000))]
    entries = {name: ArrayEntry(name, "numpy", "float32", (n + 1,)) for n, name in enumerate(names)}
    nodes = list(outline(entries).walk())
    assert max(level for level, _ in nodes) == 64 and sum(node.entry is not None for _, node in nodes) == 5001
    from treering._core import printing as _html

    text = _html.tree(entries, lambda entry: "")
    assert "more lines" in text and len(text) < 1_000_000
    Page(text)
