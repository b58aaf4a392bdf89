"""A server on loopback for the viewer: its page, the list of the files, and parts of them."""

import http.server
import importlib.resources
import json
import logging
import re
import secrets
import sys
import urllib.parse
from http import HTTPStatus
from typing import Any

from ..._version import __version__
from ...errors import ExistsError, TreeringError
from .files import ServedFiles

_log = logging.getLogger("treering")
_HOSTS = ("127.0.0.1", "localhost")
_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{0,19})")
_PART_BYTES = 8 << 20  # a file is read and sent in parts of this size
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page has the rest, where this rule has no effect
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ViewServer(http.server.ThreadingHTTPServer):
    """Serves the page and some files to programs of this machine that know the random token in the URL.

    port: 0 chooses a free one. Raises `ExistsError` if the port is taken.
    """

    daemon_threads = True
    # Another user's process must not get the port while this one runs.
    allow_reuse_port = False

    def __init__(self, files: ServedFiles, port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ExistsError(
                f"127.0.0.1:{port}: expected a port that is free, found {error.strerror or error}; choose another port"
            ) from None
        self.files = files
        self.token = secrets.token_urlsafe(16)
        self.page = (importlib.resources.files(__package__ or __name__) / "viewer.html").read_bytes()

    @property
    def url(self) -> str:
        """The address that shows the files."""
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

    def do_GET(self) -> None:
        # A page of another site can make its own name lead to 127.0.0.1. The browser still sends that name.
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            return self._answer(HTTPStatus.FORBIDDEN, b"expected the host 127.0.0.1 or localhost\n")
        token, _, rest = self.path.partition("?")[0].lstrip("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return self._answer(HTTPStatus.NOT_FOUND, b"expected the URL that `treering view` has printed\n")
        if rest == "":
            return self._answer(HTTPStatus.OK, self.server.page, {"Content-Type": "text/html; charset=utf-8"})
        try:
            if rest == "files.json":
                listed = {"path": self.server.files.path, "files": self.server.files.names()}
                return self._answer(HTTPStatus.OK, json.dumps(listed).encode(), {"Content-Type": "application/json"})
            return self._answer_file(urllib.parse.unquote(rest.removeprefix("data/")) if "data/" in rest[:5] else "")
        except (TreeringError, OSError) as error:
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode())

    def _answer_file(self, name: str) -> None:
        found = self.server.files.find(name)
        if found is None:
            return self._answer(HTTPStatus.NOT_FOUND, b"expected a file that the viewer shows\n")
        size = found.nbytes
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            return self._send_file(HTTPStatus.OK, name, 0, size, {})
        first, end = int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)
        if first >= end:
            return self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", {"Content-Range": f"bytes */{size}"})
        described = {"Content-Range": f"bytes {first}-{end - 1}/{size}"}
        return self._send_file(HTTPStatus.PARTIAL_CONTENT, name, first, end, described)

    def _send_file(self, status: HTTPStatus, name: str, first: int, end: int, headers: dict[str, str]) -> None:
        part = self.server.files.read(name, first, min(_PART_BYTES, end - first))
        self._send_headers(status, {"Content-Length": str(end - first), **headers})
        try:
            while True:
                self.wfile.write(part)
                first += len(part)
                if first >= end:
                    return
                part = self.server.files.read(name, first, min(_PART_BYTES, end - first))
        except (TreeringError, OSError):
            self.close_connection = True  # The answer has begun, so only its end can tell the page.

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._send_headers(status, {"Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _send_headers(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/octet-stream", **_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""
