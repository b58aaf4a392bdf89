"""A server on loopback for the viewer: its page, and the answers of `Served` to it.

`Served` has what the page shows of a path: the steps of runs, the leaves of a checkpoint in words, and arrays as bytes.
"""

import http.server
import importlib.resources
import json
import logging
import os
import posixpath
import secrets
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import numpy as np

from ... import formats, stores
from ..._core import expansion, printing
from ..._core.describe import describe_leaf
from ..._core.entries import ArrayEntry, Entry, StatesEntry
from ..._core.lazy import LazyArray
from ..._core.quantized import member_roles
from ..._core.source import source_name
from ..._core.tracebacks import hide_internal_frames
from ..._core.units import sharding
from ..._printable import safe
from ..._restore.checkpoint import Checkpoint
from ..._run.open import open_checkpoint
from ..._run.step_fallback import not_found
from ..._version import __version__
from ...errors import ExistsError, NotFoundError, TreeringError
from ...stores.read_errors import raise_if_momentary
from ..listing import list_run
from ..page_data import run_fields, shown_metrics
from ..runs_folder import scan_runs_folder

_log = logging.getLogger("treering")
_HOSTS = ("127.0.0.1", "localhost")
_IN_NOTEBOOKS = (
    "frame-ancestors http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:* vscode-webview:"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_MAX_OPEN = 4  # checkpoints that are open at a time: the page shows one or two
_MAX_TEXT = 10_000  # characters of a value that is no array
_MAX_KEPT_BYTES = 256 << 20  # Larger arrays of formats with chunks are read part by part.
_READ_BY_PART = ("treering", "safetensors")


class Served:
    """The checkpoint, the run, or the directory of both that the page shows. It reads nothing that is elsewhere.

    Raises `NotFoundError` if the path has nothing that the page could show.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = stores.absolute(path)
        self._store = stores.get(self.path)
        self._open: dict[tuple[str, str], Checkpoint] = {}  # by run and step
        self._kept: tuple[Any, np.ndarray] | None = None  # the array that was read last, and what it is
        self._lock = threading.Lock()
        self.about("")

    def about(self, run: str) -> dict[str, Any]:
        """Returns the steps of a run, the runs of a directory, or neither for a checkpoint.

        run: the name of a run in the directory; empty for the path itself.
        """
        place = self._place(run)
        folder = None if run else scan_runs_folder(self._store, place, None, None)
        if folder:
            paths = [*folder.runs, *folder.checkpoints]
            return {"path": safe(place), "runs": [self._about_run(path) for path in paths]}
        return self._about(place)

    def _about(self, place: str) -> dict[str, Any]:
        if self._store.stat(place) is None:
            raise not_found(self._store, place)
        if formats.is_known(self._store, place):
            return {"path": safe(place)}
        return run_fields(place)

    def _about_run(self, path: str) -> dict[str, Any]:
        name = posixpath.relpath(path, self.path)
        try:
            return {"name": name, **self._about(path)}
        except (TreeringError, PermissionError) as error:
            raise_if_momentary(error)
            return {"name": name, "path": safe(path), "error": safe(error)}

    def _place(self, run: str) -> str:
        if not run:
            return self.path
        folder = scan_runs_folder(self._store, self.path, None, None)
        place = posixpath.join(self.path, run) if run != "." else self.path
        if folder is None or place not in (*folder.runs, *folder.checkpoints):
            raise NotFoundError(f"{self.path}: expected the name of a run in it, found {run!r}")
        return place

    def contents(self, run: str, step: str) -> dict[str, Any]:
        """Opens a checkpoint, and returns what the page shows of it.

        step: the name of a step's directory; empty for a checkpoint that is no step.
        """
        ckpt = self._opened(run, step, again=True)
        created = ckpt.created and ckpt.created.timestamp()
        roles = member_roles(ckpt._source)
        return {
            "place": safe(source_name(ckpt._source)),
            "format": ckpt.format,
            "step": ckpt.step,
            "created": created,
            "nbytes": ckpt.nbytes,
            "metrics": shown_metrics(ckpt.metrics),
            "metadata": "" if ckpt.metadata is None else json.dumps(ckpt.metadata, indent=2, ensure_ascii=False),
            "leaves": [_leaf(ckpt, path, entry, roles) for path, entry in ckpt._source.entries.items()],
        }

    def _opened(self, run: str, step: str, *, again: bool = False) -> Checkpoint:
        """Returns an open checkpoint. `again` opens it even if it is open: another may have its name by now."""
        with self._lock:
            if not again and (run, step) in self._open:
                return self._open[run, step]
        place = self._place(run)
        if step:
            paths = {safe(posixpath.basename(row.path)): row.path for row in list_run(place).rows}
            if step not in paths:
                raise NotFoundError(f"{place}: expected the name of a step, found {step!r}. It may have been deleted")
            place = paths[step]
        ckpt = open_checkpoint(place)
        with self._lock:
            self._open.pop((run, step), None)
            self._open[run, step] = ckpt
            while len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
        return ckpt

    def values(self, run: str, step: str, leaf: str, box: Sequence[tuple[int, int]] | None) -> bytes:
        """Reads a box of an array as the native format stores it, or all of a leaf that is no array as text."""
        ckpt = self._opened(run, step)
        entry = ckpt._source.entries.get(leaf)
        if isinstance(entry, StatesEntry):
            return repr(entry.decode())[:_MAX_TEXT].encode("utf-8", "backslashreplace")
        found = ckpt[leaf]
        if not isinstance(found, LazyArray):
            return repr(found)[:_MAX_TEXT].encode("utf-8", "backslashreplace")
        if box is None or not _fits(box, found.shape):
            raise NotFoundError(f"{leaf}: expected a box within the shape {list(found.shape)}, found {box}")
        bounds = tuple(box)
        if ckpt.format in _READ_BY_PART or found.nbytes > _MAX_KEPT_BYTES:
            expansion.check_memory(ckpt._source, [(found.entry, bounds)], ckpt.path)
            return np.asarray(found.part(bounds)).tobytes()
        # A part of a compressed chunk costs as much as the chunk.
        array = self._read_and_keep((ckpt, leaf), found)
        return np.asarray(array[tuple(slice(a, b) for a, b in bounds)]).tobytes()

    def _read_and_keep(self, which: Any, array: LazyArray) -> np.ndarray:
        with self._lock:
            if self._kept is None or self._kept[0] != which:
                self._kept = which, np.asarray(array)
            return self._kept[1]


def _fits(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(0 <= a <= b <= size for (a, b), size in zip(box, shape, strict=True))


def _leaf(ckpt: Checkpoint, path: str, entry: Entry, roles: dict[str, str]) -> dict[str, Any]:
    about: dict[str, Any] = {"path": path, "what": safe(describe_leaf(entry))}
    if isinstance(entry, StatesEntry):
        return {**about, "nbytes": entry.nbytes}
    if not isinstance(entry, ArrayEntry):
        return about
    facts = {"type": entry.type, "sharding": sharding(ckpt._source.sharding(entry)), "quantized": roles.get(entry.path)}
    shown = {name: safe(text) for name, text in facts.items() if text}
    return {**about, "nbytes": entry.nbytes, "dtype": entry.dtype, "shape": entry.shape, "facts": shown}


class ViewServer(http.server.ThreadingHTTPServer):
    """Serves the page and what it shows to programs of this machine that know the random token in the URL.

    port: 0 chooses a free one. Raises `ExistsError` if the port is taken.
    in_notebook: lets notebooks of this machine show the page in a frame.
    """

    daemon_threads = True
    # Another user's process must not get the port while this one runs.
    allow_reuse_port = False

    def __init__(self, served: Served, port: int, *, in_notebook: bool = False) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ExistsError(
                f"127.0.0.1:{port}: expected a port that is free, found {error.strerror or error}; choose another port"
            ) from None
        self.served = served
        # The page has the other rules. It cannot have this one, which has an effect in headers alone.
        self.frames = _IN_NOTEBOOKS if in_notebook else "frame-ancestors 'none'"
        self.token = secrets.token_urlsafe(16)
        self.page = (importlib.resources.files(__package__ or __name__) / "viewer.html").read_bytes()

    @property
    def url(self) -> str:
        """The address that shows the path."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/#served"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error of this program. The browser may close a connection at any time."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            _log.exception("the viewer's request failed")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ViewServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version = f"Treering/{__version__}"
    sys_version = ""
    timeout = 60  # seconds that an idle connection keeps its thread
    disable_nagle_algorithm = True  # The body would wait 40 ms for the browser to acknowledge the headers.

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        # A page of another site can make its own name lead to 127.0.0.1. The browser still sends that name.
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            return self._answer(HTTPStatus.FORBIDDEN, b"expected the host 127.0.0.1 or localhost\n")
        path, _, query = self.path.partition("?")
        token, _, rest = path.lstrip("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._answer(HTTPStatus.NOT_FOUND, b"expected the URL that `treering view` has printed\n")
        if rest == "":
            return self._answer(HTTPStatus.OK, self.server.page, {"Content-Type": "text/html; charset=utf-8"})
        try:
            fields = dict(urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
            return self._answer(HTTPStatus.OK, *self._found(rest, fields))
        except (NotFoundError, KeyError, ValueError) as error:
            return self._answer(HTTPStatus.NOT_FOUND, _text(error))
        except (TreeringError, OSError) as error:
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, _text(error))

    def _found(self, name: str, fields: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        """Returns the body of an answer and its headers. Raises `ValueError` for what the page never asks."""
        served, run, step = self.server.served, fields.get("run", ""), fields.get("step", "")
        if name == "about.json":
            return _json(served.about(run))
        if name == "contents.json":
            return _json(served.contents(run, step))
        if name == "values":
            axes = (axis.split("-", 1) for axis in fields["box"].split(",") if axis) if "box" in fields else None
            box = None if axes is None else [(int(begin), int(end)) for begin, end in axes]
            return served.values(run, step, fields["leaf"], box), {}
        raise ValueError(f"expected about.json, contents.json or values, found {safe(name)}")

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        own = {"Content-Type": "application/octet-stream", "Content-Length": str(len(body))}
        own |= {"Content-Security-Policy": self.server.frames}
        for name, value in {**own, **_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def _json(value: object) -> tuple[bytes, dict[str, str]]:
    return json.dumps(value, allow_nan=False).encode(), {"Content-Type": "application/json"}


def _text(error: Exception) -> bytes:
    text = error.args[0] if isinstance(error, KeyError) else error  # The text of a KeyError is in quotes.
    return safe(text).encode()


class RunningView:
    """The result of `view`: the viewer of a path, at `url`. A notebook shows it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._server = ViewServer(Served(path), 0, in_notebook=True)
        threading.Thread(target=self._server.serve_forever, name="treering-view", daemon=True).start()

    @property
    def url(self) -> str:
        """The address, which only this machine can open. It has a random token."""
        return self._server.url

    def close(self) -> None:
        """Ends the viewer. It also ends with the process."""
        self._server.shutdown()
        self._server.server_close()
        for key in [key for key, one in _views.items() if one is self]:
            del _views[key]

    def _repr_html_(self) -> str:
        link = f'<a href="{self.url}" target="_blank" rel="noopener">{printing.text(self.url)}</a>'
        frame = f'<iframe src="{self.url}" style="border:0;width:100%;height:40em"></iframe>'
        return printing.page(self._server.served.path, link, frame)

    def __repr__(self) -> str:
        return f"<RunningView {self.url}>"


_views: dict[tuple[int, str], RunningView] = {}  # by process and path: a fork has no threads


@hide_internal_frames
def view(path: str | os.PathLike[str]) -> RunningView:
    """Shows a checkpoint of any format, a run or a directory of runs in the notebook, or in the browser at its `url`.

    >>> tr.view("runs/gpt")

    It serves the path to this machine only, until `close()` or the end of the process, and writes nothing. A second
    call for a path returns the viewer that runs. If the notebook's kernel is on another machine, forward the port of
    `url` from there. Raises `NotFoundError` if the path has nothing to show.
    """
    key = os.getpid(), stores.absolute(path)
    if key not in _views:
        _views[key] = RunningView(path)
    return _views[key]
