"""The server of `treering view`: what it gives, to whom, and how it ends."""

import http.client
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering import stores
from treering._tools.view import ServedFiles, ViewServer
from treering.stores.memory import MemoryStore


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": np.arange(100)})
    return tmp_path / "run"


@pytest.fixture
def server(run: pathlib.Path) -> Iterator[ViewServer]:
    with ViewServer(ServedFiles(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ViewServer, path: str, **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Asks for a path below the token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path if path.startswith("//") else f"/{server.token}/{path}", headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


def test_files_are_served_by_ranges(run: pathlib.Path, server: ViewServer) -> None:
    status, body, _ = get(server, "files.json")
    files = json.loads(body)["files"]
    manifest = (run / "step-00000001" / "treering.json").read_bytes()
    assert status == 200 and "step-00000001/treering.json" in files and len(files) == 4
    name = "data/step-00000001%2Ftreering.json"
    assert get(server, name)[:2] == (200, manifest)
    status, body, headers = get(server, name, Range="bytes=3-9")
    assert (status, body, headers["Content-Range"]) == (206, manifest[3:10], f"bytes 3-9/{len(manifest)}")
    assert get(server, name, Range="bytes=10-")[1] == manifest[10:]
    status, body, headers = get(server, name, Range=f"bytes={len(manifest)}-")
    assert (status, body, headers["Content-Range"]) == (416, b"", f"bytes */{len(manifest)}")


def test_a_page_of_another_site_gets_nothing(server: ViewServer) -> None:
    for host in ("evil.example:80", "evil.example", "127.0.0.1.evil.example", ""):
        assert get(server, "files.json", Host=host)[0] == 403
    assert get(server, "files.json", Host="localhost:9")[0] == 200  # a forwarded port has another number
    for path in ("//files.json", f"//{server.token[:-1]}/files.json", "//"):
        assert get(server, path)[0] == 404
    headers = get(server, "")[2]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers and headers["Content-Security-Policy"]


def test_only_files_of_the_path_are_served(run: pathlib.Path, server: ViewServer) -> None:
    (run.parent / "secret.json").write_text("secret")
    (run / "step-00000001" / "link.json").symlink_to(run.parent / "secret.json")
    (run / "out").symlink_to(run.parent)
    (run / "key.pem").write_text("secret")
    (run / "deep" / "er").mkdir(parents=True)
    (run / "deep" / "er" / "x.json").write_text("secret")
    for name in (
        "..%2Fsecret.json", "%2e%2e/secret.json", "step-00000001/link.json", "out/secret.json", "key.pem",
        "//etc/hosts", "deep/er/x.json", "step-00000001/../../secret.json", "%00.json", "..%5Csecret.json", "",
    ):  # fmt: skip
        assert get(server, f"data/{name}")[0] == 404, name
    assert not [name for name in json.loads(get(server, "files.json")[1])["files"] if name.startswith(("out", "deep"))]


def test_one_file_is_served_alone(run: pathlib.Path) -> None:
    tr.save(run.parent / "a.safetensors", {"w": np.ones(3)})
    tr.save(run.parent / "b.safetensors", {"w": np.ones(3)})
    files = ServedFiles(run.parent / "a.safetensors")
    assert files.names() == ["a.safetensors"]
    assert files.find("a.safetensors") and files.find("b.safetensors") is None


def test_a_run_in_another_store_is_served() -> None:
    with stores.using(MemoryStore(), "viewed"):
        with tr.Checkpointer("viewed://b/run") as ckpts:
            ckpts.save(1, {"w": np.arange(9)})
        files = ServedFiles("viewed://b/run")
        assert "step-00000001/treering.json" in files.names() and files.find("../x.json") is None
        assert files.read("step-00000001/treering.json", 0, 1) == b"{"


def test_bad_paths_are_one_clear_error(tmp_path: pathlib.Path, treering: Any, server: ViewServer) -> None:
    tr.save(tmp_path / "o", {"w": np.ones(3)}, format="orbax")
    (tmp_path / "empty").mkdir()
    for path, words in (("none", "found nothing"), ("o", "treering convert"), ("empty", "treering convert")):
        found = treering("view", tmp_path / path)
        assert found.code == 3 and str(tmp_path / path) in found.err and words.split(".")[0] in found.err, found.err
    found = treering("view", tmp_path / "run", "--port", server.server_port)
    assert found.code == 3 and f"127.0.0.1:{server.server_port}: expected a port that is free" in found.err


@pytest.mark.long
def test_ctrl_c_ends_the_command_quietly(run: pathlib.Path) -> None:
    command = [sys.executable, "-m", "treering", "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        url = process.stdout.readline().strip()
        port, path = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{22}/)#served", url).groups()  # type: ignore[union-attr]
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        connection.request("GET", path)
        assert b"<title>Treering viewer</title>" in connection.getresponse().read()
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_each_run_of_a_directory_has_a_url(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(run, tmp_path / "sweep" / "a")
    shutil.copytree(run, tmp_path / "sweep" / "b")
    tr.save(tmp_path / "sweep" / "orbax", {"w": np.ones(3)}, format="orbax")
    command = [sys.executable, "-m", "treering", "view", str(tmp_path / "sweep")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        lines = [process.stdout.readline().strip() for _ in range(2)]
        for name, line in zip("ab", lines, strict=True):
            path, _, url = line.partition(": ")
            assert path == str(tmp_path / "sweep" / name)
            with urllib.request.urlopen(url.replace("#served", "files.json"), timeout=30) as answer:
                assert json.load(answer)["path"] == path
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert (
            f"error: not shown: {tmp_path / 'sweep' / 'orbax'}: expected a Treering checkpoint" in process.stderr.read()
        )
