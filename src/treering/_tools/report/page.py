"""Writes the page of a report: one HTML file that contains its data, style and script."""

import base64
import dataclasses
import datetime
import hashlib
import html
import importlib.resources
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ... import formats, stores
from ..._core import expansion
from ..._core.entries import check_count
from ..._core.leaf_paths import globs_of
from ..._core.tracebacks import hide_internal_frames
from ..._core.units import nbytes
from ..._printable import safe
from ..._version import __version__
from ...errors import ExistsError, MismatchError, SaveError, TreeringError
from ...stores.file_io import opened
from ...stores.store import Store
from ..runs_folder import scan_runs_folder
from .gather import gather, gather_runs

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


@dataclasses.dataclass(frozen=True, repr=False)
class ReportPage:
    """The result of `report`: where the page is, and what it is about. A notebook shows the page.

    The page has `nbytes` bytes, and the statistics of the steps in `read`. `notes` name what could not be read;
    `left_out` counts the runs and checkpoints that are not in the page.
    """

    path: str
    nbytes: int
    read: tuple[int, ...]
    notes: tuple[str, ...]
    left_out: int = 0
    _page: str = ""

    def _repr_html_(self) -> str:
        # The frame has an origin of its own, so the page cannot reach the notebook.
        shown = html.escape(self._page)
        return f'<iframe sandbox="allow-scripts" srcdoc="{shown}" style="border:0;width:100%;height:40em"></iframe>'

    def __repr__(self) -> str:
        return f"<ReportPage {self}>"

    def __str__(self) -> str:
        return f"{safe(self.path)}: {nbytes(self.nbytes)}"


@hide_internal_frames
def report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    output: str | os.PathLike[str] = "report.html",
    steps: int = 20,
    leaves: str | Sequence[str] = (),
    compare: tuple[int, int] | None = None,
    prefix: str | None = None,
    progress: bool = False,
    max_expansion: float = expansion.MAX_RATIO,
) -> ReportPage:
    """Writes an HTML page about a run: its timeline, sizes, statistics and differences. The page needs no network.

    >>> tr.report("runs/gpt", leaves=["params/**"])

    runs: a run, several runs, or a directory of runs. Of several runs, the page has the metrics in the same charts, and
        nothing of arrays.
    output: the file to write. It may replace an earlier report, and nothing else.
    steps: reads the arrays of this many steps, spread evenly over the run. 0 reads none.
    leaves: a glob or several, of the leaves with statistics; by default the 2,000 largest.
    compare: the two steps to compare value by value; by default the latest two, if arrays are read.
    prefix: the beginning of the step names; by default found from the steps.
    progress: shows a progress bar.
    max_expansion: as in `treering.restore`. The arrays of a step beyond it are not read, and the report says so.

    The report and the log name what could not be read. A notebook shows the page. The returned object has its `path`
    and size `nbytes`, the steps that were `read`, the `notes`, and the number of runs that are `left_out`.

    Raises `NotFoundError` if there is no run or no valid step, and `MismatchError` for a wrong argument, or if
    `compare` names a step that is not valid. Raises `SaveError` if the page cannot be written.
    """
    places = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    if not places:
        raise MismatchError("expected a run, found an empty list")
    expansion.check_bound(max_expansion)
    steps, globs = check_count("steps", steps, minimum=0), globs_of(leaves, "leaves")
    place = stores.absolute(output)
    store = stores.get(place)
    check_replaceable(store, place)
    several = find_several(places, prefix)
    if several and (leaves or compare):
        raise MismatchError("expected one run, because `leaves` or `compare` is given, found several runs")
    if several:
        found = gather_runs(several, prefix=prefix)
    else:
        found = gather(
            places[0],
            steps=steps,
            compare=compare or (),
            globs=globs,
            progress=progress,
            max_expansion=max_expansion,
            prefix=prefix,
        )
    text = page(found)
    data = text.encode()
    try:
        with store.new_file(place, overwrite=True) as file:
            file.write(data)
    except OSError as error:
        if isinstance(error, TreeringError):
            raise
        raise SaveError(f"{place}: the report cannot be written there: {error}; choose another place") from error
    return ReportPage(place, len(data), tuple(found["read"]), tuple(found["notes"]), found.get("leftOut", 0), text)


def find_several(places: Sequence[str | os.PathLike[str]], prefix: str | None) -> list[str]:
    """Returns the runs if there are several: those named, and all that is in directories of runs."""
    found: list[str] = []
    is_folder = False
    for place in dict.fromkeys(map(stores.absolute, places)):
        folder = scan_runs_folder(stores.get(place), place, None, prefix)
        is_folder |= bool(folder)
        # The report says of each checkpoint, and of each folder with runs further below, that it is no run.
        found += [*folder.runs, *folder.checkpoints, *folder.folders_below] if folder else [place]
    return found if is_folder or len(found) > 1 else []


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
