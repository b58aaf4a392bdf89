"""Serves a folder on loopback with support for ranges, records each request, and fails as servers do."""

import contextlib
import http.server
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any


class RangeServer:
    """A folder on a server: its URL, and the requests since `requests` was cleared as `(name, bytes sent)`.

    `faults` has what happens to the next requests for array files: a status with headers; `"cut"`: half of the body
    comes before the connection ends; or what is called before the answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[tuple[str, int]] = []
        self.faults: list[tuple[int, dict[str, str]] | str | Callable[[], object]] = []


@contextlib.contextmanager
def serve(folder: pathlib.Path, *, ranges: bool = True) -> Iterator[RangeServer]:
    """Yields a server of the folder. Without `ranges` it answers as if no range was asked for."""
    made: list[RangeServer] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = urllib.parse.unquote(self.path.lstrip("/"))
            path = folder / name
            if not path.is_file():
                made[0].requests.append((name, 0))
                return self._answer(404, b"")
            fault = made[0].faults.pop(0) if made[0].faults and name.endswith(".safetensors") else None
            if callable(fault):
                fault()
            if isinstance(fault, tuple) and fault[0] != 206:
                made[0].requests.append((name, 0))
                return self._answer(fault[0], b"", fault[1])
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if ranges else None
            first, end = (int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)) if asked else (0, size)
            made[0].requests.append((name, max(0, end - first)))
            if asked and first >= size:
                return self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
            with path.open("rb") as file:
                file.seek(first)
                body = file.read(end - first)
            described = {"Content-Range": f"bytes {first}-{end - 1}/{size}"} if asked else {}
            if isinstance(fault, tuple):
                described |= fault[1]
            return self._answer(206 if asked else 200, body, described, cut=fault == "cut")

        def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = cut

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        made.append(RangeServer(f"http://127.0.0.1:{server.server_port}"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield made[0]
        finally:
            server.shutdown()
            thread.join()
