"""Gives TensorStore access to a folder in a bucket, through a server on this machine that asks the bucket.

TensorStore has its own drivers for buckets, but they lack the credentials, endpoints and proxies of obstore's client.
So its driver for web servers reads from the loopback interface, and only the bytes that it needs are fetched.
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

from ..._threads.forks import free_in_children
from ..._threads.pool import in_parallel
from ..._threads.thread import Thread, start_threads
from ...errors import RequestError
from ..buffers import aligned
from ..read_errors import ReplacedError
from ..tensorstore_memory import encode_error
from .bucket import Bucket, ObjectMeta, relative_key
from .request_errors import ChangedError

_HOST = "127.0.0.1"
_CHUNK_BYTES = 16 << 20  # per request to the bucket
_RANGE_PATTERN = re.compile(r"bytes=(\d*)-(\d*)")
_server: "_Server | None" = None  # runs while it serves any folder
_server_lock = free_in_children(threading.RLock())  # reentrant: a signal handler may open a folder as well


def is_reachable() -> bool:
    """Returns True if TensorStore asks this machine directly, and not through the proxy of its environment."""
    environment = {name.lower(): value for name, value in os.environ.items()}
    proxy = os.environ.get("http_proxy") or environment.get("all_proxy")  # only `http_proxy` must be in lower case
    direct = {one.strip() for one in environment.get("no_proxy", "").split(",")}
    return not proxy or not direct.isdisjoint((_HOST, "*"))


def serve(bucket: Bucket, key: str, found: Sequence[ObjectMeta], context: Any) -> dict[str, Any]:
    """Returns the specification of a folder with exactly the objects in `found`, which works while the context lives.

    Other objects do not exist for TensorStore. Reading an object that was replaced since raises an error.
    """
    global _server
    token = secrets.token_hex(16)  # part of the URL, so other users of this machine cannot read the bucket
    with _server_lock:
        if _server is None or _server.process != os.getpid():
            _server = _Server()
        server = _server
        server.folders[token] = bucket, {relative_key(key, one.key): one for one in found}
    start_threads(Thread(target=server.serve, name="treering-loopback", daemon=True))
    weakref.finalize(context, server.folders.pop, token, None)
    return {"driver": "http", "base_url": f"http://{_HOST}:{server.server_address[1]}", "path": f"/{token}/"}


class _Server(http.server.ThreadingHTTPServer):
    """Serves folders by their tokens, and ends when the last folder is released."""

    daemon_threads = True
    request_queue_size = 128  # connections opened at once; a further one would wait a second before it tries again
    timeout = 0.5  # seconds between checks whether any folder is left

    def __init__(self) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.process = os.getpid()
        self.folders: dict[str, tuple[Bucket, dict[str, ObjectMeta]]] = {}
        self._is_started = False

    def serve(self) -> None:
        """Answers requests until no folder is left, unless another thread does so already."""
        global _server
        with _server_lock:
            if self._is_started:
                return
            self._is_started = True
        while True:
            self.handle_request()
            with _server_lock:
                if not self.folders:
                    _server = None
                    break
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that TensorStore has closed."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any  # the `_Server`
    disable_nagle_algorithm = True
    timeout = 60.0  # seconds after which an idle connection is closed

    def do_GET(self) -> None:
        token, _, name = urllib.parse.unquote(self.path).lstrip("/").partition("/")
        bucket, there = self.server.folders.get(token, (None, {}))
        if bucket is None:
            self._respond_with_error(RequestError("it is not open any more"))
            return
        if (found := there.get(name)) is None:
            self._respond(HTTPStatus.NOT_FOUND)
            return
        tag = f'"{hashlib.sha256(repr(found).encode()).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._respond(HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
            return
        span = self._requested_range(found.nbytes)
        if span is None:
            self._respond(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers={"Content-Range": f"bytes */{found.nbytes}"}
            )
            return
        begin, end, is_part = span
        try:
            data = _read(bucket, found, begin, end)  # first all bytes: a broken answer states no reason
        except (ChangedError, FileNotFoundError):
            self._respond_with_error(ReplacedError("it was replaced or deleted while it was open; open it again"))
            return
        except Exception as error:  # TensorStore would repeat a request without an answer again and again
            self._respond_with_error(error)
            return
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if is_part:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{found.nbytes}"
        self._respond(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK, data, headers)

    def _requested_range(self, size: int) -> tuple[int, int, bool] | None:
        """Returns the first byte, the end and whether the request has a range; None for a range without bytes."""
        match = _RANGE_PATTERN.fullmatch(self.headers.get("Range", ""))
        if match is None:
            return 0, size, False
        first, last = match.groups()
        if not first:
            begin, end = max(size - int(last), 0), size
        else:
            begin, end = int(first), min(int(last) + 1 if last else size, size)
        return (begin, end, True) if begin < end else None

    def _respond_with_error(self, error: Exception) -> None:
        self._respond(HTTPStatus.FORBIDDEN, encode_error(error).encode())  # TensorStore does not repeat such a request

    def _respond(
        self, status: HTTPStatus, body: bytes | memoryview = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


def _read(bucket: Bucket, found: ObjectMeta, begin: int, end: int) -> memoryview:
    data = aligned(end - begin)[: end - begin]

    def read(at: int) -> None:
        bucket.read_into(data[at : at + _CHUNK_BYTES], found.key, begin + at, found)

    in_parallel(list(range(0, len(data), _CHUNK_BYTES)), read)
    return data
