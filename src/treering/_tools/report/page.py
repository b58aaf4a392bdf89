"""Writes the page of a report: one HTML file that contains its data, style and script."""

import base64
import datetime
import hashlib
import html
import importlib.resources
import json
import os
from collections.abc import Mapping
from typing import Any

from ... import formats
from ..._version import __version__
from ...errors import ExistsError
from ...stores.file_io import opened
from ...stores.store import Store

_MARK = '<meta name="generator" content="Treering report">'
_MARK_WITHIN = 200  # An earlier report has the mark within its first 200 bytes.

_HEAD = f"""<!doctype html>
<html lang="en">
<head>
{_MARK}
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src '{{hash}}'">
<title>{{title}}</title>
<style>
{{style}}</style>
</head>
<body>
<main id="report"></main>
<noscript><p>This page draws its charts with JavaScript, which is off. The steps:</p>{{table}}</noscript>
<script type="application/json" id="data">{{data}}</script>
<script>{{script}}</script>
</body>
</html>
"""


def check_replaceable(store: Store, path: str) -> None:
    """Raises `ExistsError` if a path exists and is not a report, or is within a checkpoint."""
    folder = os.path.dirname(path)
    if formats.has_folder(store, folder):
        raise ExistsError(
            f"{path}: expected a place for the report, found the checkpoint {folder}; choose another path"
        )
    found = store.stat(path)
    if found is None:
        return
    if found.is_file:
        with opened(store, path) as blob:
            if _MARK.encode() in blob.read_up_to(_MARK_WITHIN):
                return
    raise ExistsError(f"{path}: expected a free path or an earlier report, found something else; choose another path")


def page(report: Mapping[str, Any]) -> str:
    """Returns the page for the data of `gather`. No text from a file becomes markup or code.

    All data is one JSON text, which the script shows as text. The Content-Security-Policy allows no other script.
    """
    files = importlib.resources.files(__name__.rpartition(".")[0])
    script = "\n" + (files / "page.js").read_text("utf-8")
    style = (files / "page.css").read_text("utf-8")
    made = datetime.datetime.now(datetime.UTC).timestamp()
    data = json.dumps({**report, "made": made, "version": __version__}, separators=(",", ":"), allow_nan=False)
    return _HEAD.format(
        hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=html.escape(f"{report['run']} · Treering report"),
        style=style,
        table=_table(report),
        data=data.replace("<", "\\u003c"),  # A name with "</script>" could end the element.
        script=script,
    )


def _table(report: Mapping[str, Any]) -> str:
    """Returns the steps as a table, for browsers that run no scripts."""
    runs = report.get("runs") or [{"name": report["run"], **report}]
    fields = ("step", "state", "nbytes", "metrics")
    rows = [(run["name"], *(row[one] for one in fields)) for run in runs for row in run["steps"]]
    cells = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
