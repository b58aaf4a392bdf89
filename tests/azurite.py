"""Runs Azurite, a real server for Azure's blobs, on loopback in its own process.

npm installs it once, next to pytest.
"""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import s3

CONTAINER = "treering"
_ACCOUNT = "devstoreaccount1"  # Azurite's public default account
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-12-02"
_INSTALL_SECONDS = 300


class UnavailableError(Exception):
    """Azurite cannot be installed: npm is missing, or cannot reach its registry."""


@contextlib.contextmanager
def server(data: pathlib.Path) -> Iterator[str]:
    """Yields the URL of a server with one container, `CONTAINER`, while the `with` block runs."""
    program = _installed()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [str(program), "--blobPort", str(port), "--location", str(data)]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        s3.wait_for(port, process)
        _make_container(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def client(url: str) -> Any:
    """Returns a store object of obstore for the container."""
    from obstore.store import AzureStore

    return AzureStore(
        CONTAINER,
        account_name=_ACCOUNT,
        account_key=_KEY,
        endpoint=f"{url}/{_ACCOUNT}",
        client_options={"allow_http": True, "timeout": "20s"},
        retry_config={"max_retries": 3},
    )


def _installed() -> pathlib.Path:
    """Returns the program. The first test process installs it. Raises `UnavailableError`."""
    import fcntl  # missing on Windows

    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError("Azurite needs npm, which is not installed")
    folder = pathlib.Path(sys.prefix, "azurite")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = folder / "node_modules" / ".bin" / "azurite-blob"
        if not program.exists():
            command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "azurite@3"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
            if done.returncode:
                raise UnavailableError(f"npm cannot install Azurite: {done.stderr.strip()[-300:]}")
    return program


def _make_container(port: int) -> None:
    """Makes the container, which obstore cannot do.

    The request is signed by "Authorize with Shared Key" of Azure's reference.
    """
    date = email.utils.formatdate(usegmt=True)
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
    signed += f"/{_ACCOUNT}/{_ACCOUNT}/{CONTAINER}\nrestype:container"
    digest = hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)
    headers = {"x-ms-date": date, "x-ms-version": _VERSION, "Content-Length": "0"}
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("PUT", f"/{_ACCOUNT}/{CONTAINER}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 201, (answer.status, answer.read())
