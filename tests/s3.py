"""Runs a real S3 server, moto, on loopback in its own process."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

BUCKET = "treering"
_START_SECONDS = 60

# S3 carries out the requests for one key one after another. moto checks a condition some time before it carries out the
# request, so two create-only puts can both succeed. The lock makes it behave like S3.
# `moto_server` finds out with each request which of Amazon's services is meant, which takes longer than to answer it.
_SERVER = """
import logging, sys, threading
from moto.s3.responses import S3Response
from moto.server import create_backend_app
from werkzeug.serving import run_simple

lock = threading.Lock()

def one_at_a_time(respond):
    def respond_alone(self, *arguments, **options):
        with lock:
            return respond(self, *arguments, **options)
    return respond_alone

for name in ("_key_response_put", "_key_response_post", "_key_response_delete"):
    setattr(S3Response, name, one_at_a_time(getattr(S3Response, name)))
logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
run_simple("127.0.0.1", int(sys.argv[1]), create_backend_app("s3"), threaded=True)
"""


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Yields the URL of a server with one bucket, `BUCKET`, while the `with` block runs."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-c", _SERVER, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(port, process)
        _boto(url).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        process.kill()
        process.wait()


def client(url: str, bucket: str = BUCKET, timeout: str = "20s", **options: Any) -> Any:
    """Returns a store object of obstore for the bucket."""
    from obstore.store import S3Store

    options.setdefault("retry_config", {"max_retries": 3})
    return S3Store(
        bucket,
        endpoint=url,
        access_key_id="testing",
        secret_access_key="testing",
        region="us-east-1",
        client_options={"allow_http": True, "timeout": timeout},
        **options,
    )


def keep_versions(url: str, bucket: str) -> None:
    """Makes a bucket that keeps old versions of overwritten and deleted objects."""
    _boto(url).create_bucket(Bucket=bucket)
    _boto(url).put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})


def environment(url: str) -> dict[str, str]:
    """Returns the environment variables with which a program uses the server as if it were S3."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }


def _boto(url: str) -> Any:
    import boto3

    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=url, **keys)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Returns when the server process listens on a port of the loopback interface."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError("the server did not start")
