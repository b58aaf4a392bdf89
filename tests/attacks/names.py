"""Names of leaves that point outside, in valid checkpoints: converting to a format of folders must not follow them."""

import json
from functools import partial
from pathlib import Path

import numpy as np

import treering as tr
from treering.orbax import nodes

from . import OUTSIDE, add

_NAMES = (
    f"../{OUTSIDE}/evil", f"../../../{OUTSIDE}/evil", "/tmp/evil", "..", ".", "a/../../../evil", "a//b", "a\0b", "\\..\\evil", "", "~", "a/", "c:evil",
    "metadata.json", ".zarray", "d/evil", "x" * 300, "/".join("a" * 400), "\n", "%2e%2e/evil", "treering.json",
)  # fmt: skip


def _named(name: str, folder: Path) -> Path:
    path = folder / "x.safetensors"
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    text = json.dumps({name: entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(16)))
    return path


def _file_of_handler(name: str, folder: Path) -> Path:
    files = nodes.handler_files({name: np.zeros(4, np.uint8)})
    tr.save(folder / "x", nodes.composite({"own": files, "b": {"w": np.ones(2)}}))
    return folder / "x"


for name in _NAMES:
    add(
        "names",
        f"a handler's file called {name!r:.40}",
        "is written elsewhere",
        partial(_file_of_handler, name),
        "harmless",
    )
    add("names", f"a leaf called {name!r:.40}", "is written elsewhere", partial(_named, name), "harmless")
