"""TensorStore's view of a folder in a bucket: it asks a server on this machine, which asks the bucket.

TensorStore has drivers for buckets of its own, but not with the credentials, endpoints and proxies of a client of
obstore's. So its driver for web servers reads from the loopback interface here, and only what it needs is read.
"""

import hashlib
import http.server
import os
import re
import secrets
import threading
import urllib.parse
import weakref
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from ..._threads.pool import in_parallel, start
from ...errors import RequestError
from ..buffers import aligned
from ..key_values import as_text
from ..read_errors import ReplacedError
from .bucket import Bucket, Found
from .keys import below
from .request_errors import ChangedError

_HOST = "127.0.0.1"
_PIECE_BYTES = 16 << 20  # bytes that are asked for at a time
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_server: "_Server | None" = None  # while there are folders
_changing = threading.RLock()  # a signal handler may open something while its thread holds it


def is_reachable() -> bool:
    """Whether TensorStore asks this machine directly, and not the proxy that its environment names."""
    environment = {name.lower(): value for name, value in os.environ.items()}
    proxy = os.environ.get("http_proxy") or environment.get("all_proxy")  # the first has to be in small letters
    direct = {one.strip() for one in environment.get("no_proxy", "").split(",")}
    return not proxy or not direct.isdisjoint((_HOST, "*"))


def served(bucket: Bucket, key: str, found: Sequence[Found], context: Any) -> dict[str, Any]:
    """The specification of a folder whose objects are those that were found, as long as the context lives.

    What is not among them is not there; one that was replaced since is an error.
    """
    global _server
    token = secrets.token_hex(16)  # for nobody else on this machine may read the bucket
    with _changing:
        if _server is None or _server.process != os.getpid():
            _server = _Server()
        server = _server
        server.folders[token] = bucket, {below(key, one.key): one for one in found}
    start(threading.Thread(target=server.serve, name="treering-loopback", daemon=True))
    weakref.finalize(context, server.folders.pop, token, None)
    return {"driver": "http", "base_url": f"http://{_HOST}:{server.server_address[1]}", "path": f"/{token}/"}


class _Server(http.server.ThreadingHTTPServer):
    """Serves folders by their tokens, and ends with the last of them."""

    daemon_threads = True
    request_queue_size = 128  # connections that are opened at once; of more, one waits a second until it tries again
    timeout = 0.5  # seconds between looks whether there are any

    def __init__(self) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.process = os.getpid()
        self.folders: dict[str, tuple[Bucket, dict[str, Found]]] = {}
        self._begun = False

    def serve(self) -> None:
        """Answers until there are no folders, unless another thread does so already."""
        global _server
        with _changing:
            if self._begun:
                return
            self._begun = True
        while True:
            self.handle_request()
            with _changing:
                if not self.folders:
                    _server = None
                    break
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of connections that TensorStore has given up."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any  # the `_Server`
    disable_nagle_algorithm = True
    timeout = 60.0  # seconds after which a connection on which nothing comes is closed

    def do_GET(self) -> None:
        token, _, name = urllib.parse.unquote(self.path).lstrip("/").partition("/")
        bucket, there = self.server.folders.get(token, (None, {}))
        if bucket is None:
            self._refuse(RequestError("it is not open any more"))
            return
        if (found := there.get(name)) is None:
            self._say(HTTPStatus.NOT_FOUND)
            return
        tag = f'"{hashlib.sha256(repr(found).encode()).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._say(HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
            return
        span = self._span(found.nbytes)
        if span is None:
            self._say(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers={"Content-Range": f"bytes */{found.nbytes}"})
            return
        begin, end, is_part = span
        try:
            data = _read(bucket, found, begin, end)  # all of it first: of an answer that breaks off no reason is told
        except (ChangedError, FileNotFoundError):
            self._refuse(ReplacedError("it was replaced or deleted while it was open; open it again"))
            return
        except Exception as error:  # an answer that does not come would be asked for again and again
            self._refuse(error)
            return
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if is_part:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{found.nbytes}"
        self._say(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK, data, headers)

    def _span(self, size: int) -> tuple[int, int, bool] | None:
        """The bytes that are asked for, and whether that is a part; None where there are none."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            return 0, size, False
        first, last = match.groups()
        if not first:
            begin, end = max(size - int(last), 0), size
        else:
            begin, end = int(first), min(int(last) + 1 if last else size, size)
        return (begin, end, True) if begin < end else None

    def _refuse(self, error: Exception) -> None:
        self._say(HTTPStatus.FORBIDDEN, as_text(error).encode())  # which TensorStore does not ask for again

    def _say(
        self, status: HTTPStatus, body: bytes | memoryview = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


def _read(bucket: Bucket, found: Found, begin: int, end: int) -> memoryview:
    data = aligned(end - begin)[: end - begin]

    def read(at: int) -> None:
        bucket.read_into(data[at : at + _PIECE_BYTES], found.key, begin + at, found)

    in_parallel(list(range(0, len(data), _PIECE_BYTES)), read)
    return data
