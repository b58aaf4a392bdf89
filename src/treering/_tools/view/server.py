"""A server on loopback for the viewer: its page, and the answers of `Served` to it."""

import http.server
import importlib.resources
import json
import logging
import os
import secrets
import sys
import threading
import urllib.parse
from http import HTTPStatus
from typing import Any

from ... import stores
from ..._core import printing
from ..._core.tracebacks import hide_internal_frames
from ..._printable import safe
from ..._version import __version__
from ...errors import ExistsError, NotFoundError, TreeringError
from .served import Served

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
