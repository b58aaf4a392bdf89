"""Runs a double of Google Cloud Storage on loopback in its own process. It has the XML interface of Google's reference.

The real store needs an account. No emulator on the package registries has this interface's conditions and uploads in
parts, and obstore uses this interface. The double differs from S3 as Google does:

- Conditions name the generation number of an object, and uploads in parts have no conditions.
- Deleting a missing object is an error. Completing or aborting an upload in parts a second time is not.
- An object changes at most once per second (`WRITE_SECONDS`). An earlier request gets a 429, whatever its conditions,
  and is not carried out.
"""

import contextlib
import hashlib
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import s3

BUCKET = "treering"
WRITE_SECONDS = 1.0
_PAGE = 1000  # names per page of a listing
_MIN_PART_BYTES = 5 << 20  # of each part except the last


@contextlib.contextmanager
def server(write_seconds: float = WRITE_SECONDS) -> Iterator[str]:
    """Yields the URL of a server with one bucket, `BUCKET`, while the `with` block runs."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, str(port), str(write_seconds)])
    try:
        s3.wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def client(url: str, bucket: str = BUCKET, **options: Any) -> Any:
    """Returns a store object of obstore for the bucket."""
    from obstore.store import GCSStore

    from treering.stores.objects.clients import _RETRIES  # as for URLs

    options.setdefault("retry_config", _RETRIES)
    return GCSStore(
        bucket,
        service_account_key=account(url),
        client_options={"allow_http": True, "timeout": "60s"},
        **options,
    )


def account(url: str) -> str:
    """Returns the contents of a service account file that needs no token and finds its buckets at a URL."""
    unused = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    return json.dumps({**unused, "gcs_base_url": url, "disable_oauth": True})


class _Object(NamedTuple):
    data: bytes
    generation: int
    etag: str
    modified: float


class _Answer(Exception):
    """An answer: status, body, headers."""


class _Bucket:
    """The objects. They change one at a time."""

    def __init__(self, write_seconds: float):
        self.objects: dict[str, _Object] = {}
        self.lock = threading.Lock()
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._ended: dict[str, _Object | None] = {}  # ended uploads, and their objects
        self._numbers = itertools.count(int(time.time() * 1e6))
        self._changed: dict[str, float] = {}
        self._write_seconds = write_seconds

    def put(self, key: str, data: bytes, headers: Any = None, parts: int = 0) -> _Object:
        self._limit(key)
        if headers is not None:
            self._check(key, headers)
        number = next(self._numbers)
        etag = f"{number:x}-{parts}" if parts else hashlib.md5(data).hexdigest()
        made = self.objects[key] = _Object(data, number, f'"{etag}"', time.time())
        return made

    def find(self, key: str, query: dict[str, str]) -> _Object:
        found = self.objects.get(key)
        if found is None or query.get("generation", str(found.generation)) != str(found.generation):
            raise _error(404, "NoSuchKey", "The specified key does not exist.")
        return found

    def delete(self, key: str, headers: Any) -> None:
        self._limit(key)
        self.find(key, {})
        self._check(key, headers)
        del self.objects[key]

    def _check(self, key: str, headers: Any) -> None:
        wanted = headers.get("x-goog-if-generation-match")
        there = self.objects.get(key)
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            message = "At least one of the pre-conditions you specified did not hold."
            raise _error(412, "PreconditionFailed", message)

    def _limit(self, key: str) -> None:
        now = time.monotonic()
        if now - self._changed.get(key, -self._write_seconds) < self._write_seconds:
            raise _error(429, "SlowDown", f"The object {key} exceeded the rate limit for object mutation operations.")
        self._changed[key] = now

    def begin(self) -> str:
        upload = str(next(self._numbers))
        self._uploads[upload] = {}
        return upload

    def parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self._uploads:
            raise _error(404, "NoSuchUpload", "The requested upload was not found.")
        return self._uploads[upload]

    def end(self, upload: str, made: _Object | None = None) -> None:
        if upload not in self._ended:
            self.parts(upload)
            del self._uploads[upload]
            self._ended[upload] = made

    def ended(self, upload: str) -> _Object | None:
        return self._ended.get(upload)


def _error(status: int, code: str, message: str) -> _Answer:
    return _Answer(status, f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode(), {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    disable_nagle_algorithm = True
    bucket: _Bucket

    def _handle(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        place = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(place.query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(place.path[1:]).partition("/")
        try:
            if bucket != BUCKET:
                raise _error(404, "NoSuchBucket", "The specified bucket does not exist.")
            with self.bucket.lock:
                status, body, headers = getattr(self, f"_{self.command.lower()}")(key, query, data)
        except _Answer as answer:
            status, body, headers = answer.args
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def log_message(self, format: str, *args: Any) -> None: ...

    def _get(self, key: str, query: dict[str, str], data: bytes) -> Any:
        if not key:
            return 200, self._listed(query), {}
        found = self.bucket.find(key, query)
        headers = {**_about(found), "Last-Modified": formatdate(found.modified, usegmt=True)}
        if self.headers.get("If-Match") not in (None, "*", found.etag):
            raise _error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
        if self.headers.get("If-None-Match") == found.etag:
            return 304, b"", headers
        begin, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not begin:
            return 200, found.data, headers
        first, last = int(begin), min(int(end or len(found.data)), len(found.data) - 1)
        if first >= len(found.data):
            raise _error(416, "InvalidRange", "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(found.data)}"
        return 206, found.data[first : last + 1], headers

    def _head(self, key: str, query: dict[str, str], data: bytes) -> Any:
        status, body, headers = self._get(key, query, data)
        return status, b"", {**headers, "Content-Length": str(len(body))}

    def _put(self, key: str, query: dict[str, str], data: bytes) -> Any:
        if "uploadId" in query:
            self.bucket.parts(query["uploadId"])[int(query["partNumber"])] = data
            return 200, b"", {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}
        if source := self.headers.get("x-goog-copy-source"):
            _, _, other = urllib.parse.unquote(source).partition("/")
            made = self.bucket.put(key, self.bucket.find(other, {}).data, self.headers)
            return 200, f"<CopyObjectResult><ETag>{made.etag}</ETag></CopyObjectResult>".encode(), _about(made)
        return 200, b"", _about(self.bucket.put(key, data, self.headers))

    def _post(self, key: str, query: dict[str, str], data: bytes) -> Any:
        if "uploads" in query:
            inside = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{self.bucket.begin()}</UploadId>"
            body = f"<InitiateMultipartUploadResult>{inside}</InitiateMultipartUploadResult>"
            return 200, body.encode(), {}
        made = self.bucket.ended(query["uploadId"]) or self._put_together(key, query["uploadId"], data)
        inside = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><ETag>{made.etag}</ETag>"
        return 200, f"<CompleteMultipartUploadResult>{inside}</CompleteMultipartUploadResult>".encode(), _about(made)

    def _put_together(self, key: str, upload: str, data: bytes) -> _Object:
        parts = self.bucket.parts(upload)
        listed = ElementTree.fromstring(data)
        asked = [(int(one.findtext("PartNumber", "")), one.findtext("ETag", "")) for one in listed]
        if any(tag.strip('"') != hashlib.md5(parts.get(n, b"")).hexdigest() for n, tag in asked):
            raise _error(400, "InvalidPart", "One or more of the specified parts could not be found.")
        if any(len(parts[n]) < _MIN_PART_BYTES for n, _ in asked[:-1]):
            raise _error(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size.")
        made = self.bucket.put(key, b"".join(parts[n] for n, _ in asked), parts=len(asked))
        self.bucket.end(upload, made)
        return made

    def _delete(self, key: str, query: dict[str, str], data: bytes) -> Any:
        if "uploadId" in query:
            self.bucket.end(query["uploadId"])
        else:
            self.bucket.delete(key, self.headers)
        return 204, b"", {}

    def _listed(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        entries: dict[str, str] = {}
        for key in sorted(self.bucket.objects):
            if not key.startswith(prefix):
                continue
            rest, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = prefix + rest + cut if cut else key
            if name > after:
                entries.setdefault(name, "folder" if cut else "object")
        page = list(entries.items())[: min(_PAGE, int(query.get("max-keys", _PAGE)))]
        body = "".join(self._entry(name, kind) for name, kind in page)
        if more := len(entries) > len(page):
            body += f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
        body += f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"
        return f"<ListBucketResult><Name>{BUCKET}</Name>{body}</ListBucketResult>".encode()

    def _entry(self, name: str, kind: str) -> str:
        if kind == "folder":
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        one = self.bucket.objects[name]
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(one.modified))
        when += f".{int(one.modified * 1e3) % 1000:03}Z"
        inside = f"<Key>{escape(name)}</Key><Generation>{one.generation}</Generation>"
        inside += f"<LastModified>{when}</LastModified><ETag>{one.etag}</ETag><Size>{len(one.data)}</Size>"
        return f"<Contents>{inside}</Contents>"


def _about(found: _Object) -> dict[str, str]:
    return {"ETag": found.etag, "x-goog-generation": str(found.generation), "x-goog-metageneration": "1"}


if __name__ == "__main__":
    _Handler.bucket = _Bucket(float(sys.argv[2]))
    http = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler)
    http.daemon_threads = True
    http.serve_forever()
