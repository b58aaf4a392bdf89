"""A proxy between a client and an S3 server. It can drop, cut, delay, change and repeat requests and answers."""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Request(NamedTuple):
    """A request that passes the proxy: its number, method, path with query, and headers."""

    number: int
    method: str
    path: str
    headers: dict[str, str]


# The fault of a request; None passes it on. "drop": it never arrives. "lose": it is carried out, and its answer is
# lost. "twice": it is carried out twice. "cut": the connection ends within the answer's body. "short": the answer has
# fewer bytes, and its headers say so. "flip": one bit of the answer's body is flipped. "late": it is passed on after
# half a second. "silent": it is never answered. A status and an S3 code, such as "503 SlowDown", are the answer.
Fault = Callable[[Request], str | None]


class Proxy:
    """A running proxy. `fault` may be replaced at any time. `requests` lists the requests in order.

    `sent` counts the bytes of the answers' bodies.
    """

    def __init__(self, server: str):
        self.fault: Fault = lambda request: None
        self.requests: list[Request] = []
        self.sent = 0
        self.delay = 0.0  # seconds before each request is passed on
        self._ended = threading.Event()
        self._server = urlsplit(server).netloc
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet, else each answer would wait for an acknowledgement
            disable_nagle_algorithm = True

            def _handle(self) -> None:
                proxy._pass_on(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

            def log_message(self, format: str, *args: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda request, client_address: None  # a client that was killed
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the proxy."""
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        with self._lock:
            request = Request(len(self.requests), handler.command, handler.path, dict(handler.headers))
            self.requests.append(request)
        if self.delay:
            time.sleep(self.delay)
        fault = self.fault(request)
        if fault == "late":
            time.sleep(0.5)
        if fault == "silent":
            self._ended.wait()
        if fault in ("drop", "silent"):
            self._hang_up(handler)
            return
        if fault and fault[0].isdigit():
            status, _, code = fault.partition(" ")
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self._answer(handler, int(status), {"Content-Type": "application/xml"}, text)
            return
        for _ in range(2 if fault == "twice" else 1):
            status, headers, answer = self._ask(request, body)
        if fault == "lose":
            self._hang_up(handler)
            return
        if fault == "flip" and answer:
            middle = len(answer) // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
        if fault == "short":
            answer = answer[: len(answer) // 2]
            headers["Content-Length"] = str(len(answer))
        self._answer(handler, status, headers, answer, cut=fault == "cut")

    def _ask(self, request: Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._server, timeout=60)
        with contextlib.closing(connection):
            connection.request(request.method, request.path, body, {**request.headers, "Connection": "close"})
            answer = connection.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _OF_CONNECTION}
            return answer.status, headers, answer.read()

    def _answer(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if "content-length" not in map(str.lower, headers):
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            with self._lock:
                self.sent += len(body)
            handler.wfile.write(body[: len(body) // 2] if cut else body)
        handler.wfile.flush()
        if cut:
            self._hang_up(handler)

    @staticmethod
    def _hang_up(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.flush()
            handler.connection.shutdown(2)


_OF_CONNECTION = ("connection", "transfer-encoding", "date", "server")


@contextlib.contextmanager
def proxy(server: str) -> Iterator[Proxy]:
    """Yields a proxy in front of a server, while the `with` block runs."""
    one = Proxy(server)
    try:
        yield one
    finally:
        one.close()
