"""The server of `treering view`: what it gives, to whom, and how it ends."""

import collections
import http.client
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering import stores
from treering._tools.view import Served, ViewServer
from treering.errors import NotFoundError
from treering.stores.memory import MemoryStore


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": np.arange(100)})
    return tmp_path / "run"


@pytest.fixture
def server(run: pathlib.Path) -> Iterator[ViewServer]:
    with ViewServer(Served(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(
    server: ViewServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Asks for a path below the token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path if path.startswith("//") else f"/{server.token}/{path}", headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


def asked(server: ViewServer, path: str) -> Any:
    status, body, _ = get(server, path)
    assert status == 200, body
    return json.loads(body)


def test_a_run_is_described_in_the_words_of_ls_and_show(run: pathlib.Path, server: ViewServer, treering: Any) -> None:
    about = asked(server, "about.json")
    listed = treering("ls", run, "--json").json["steps"]
    assert [(row["step"], row["nbytes"], row["state"]) for row in about["steps"]] == [
        (row["step"], row["nbytes"], row["state"]) for row in listed
    ]
    contents = asked(server, "contents.json?run=&step=step-00000002")
    lines = treering("show", run).out.splitlines()
    assert f"{contents['format']} · step 2 · 1 leaf" in lines[1]
    assert [leaf["what"] for leaf in contents["leaves"]] == [lines[-1].split("  ")[1]]
    body = get(server, "values?run=&step=step-00000002&leaf=w&box=3-10")[1]
    np.testing.assert_array_equal(np.frombuffer(body, "int64"), np.arange(3, 10))
    for box in ("3-101", "0-1,0-1", "-1-3", "4-3"):
        assert get(server, f"values?run=&step=step-00000002&leaf=w&box={box}")[0] == 404


def test_orbax_and_flax_steps_are_named_and_read(tmp_path: pathlib.Path) -> None:
    tree = {"params": {"w": np.arange(12, dtype="float32").reshape(3, 4)}}
    for step in (1, 2):
        tr.save(tmp_path / "o" / str(step), tree, format="orbax")
    tr.save(tmp_path / "f.msgpack", tree)
    for served, step in ((Served(tmp_path / "o"), "2"), (Served(tmp_path / "f.msgpack"), "")):
        rows = served.about("").get("steps", [])
        assert [row["format"] for row in rows] == (["orbax"] * 2 if step else [])
        contents = served.contents("", step)
        assert [(leaf["path"], leaf["what"]) for leaf in contents["leaves"]] == [("params/w", "float32[3,4]")]
        found = served.values("", step, "params/w", [(1, 3), (0, 2)])
        np.testing.assert_array_equal(np.frombuffer(found, "float32").reshape(2, 2), tree["params"]["w"][1:3, :2])


def test_a_page_of_another_site_gets_nothing(server: ViewServer) -> None:
    for host in ("evil.example:80", "evil.example", "127.0.0.1.evil.example", ""):
        assert get(server, "about.json", Host=host)[0] == 403
    assert get(server, "about.json", Host="localhost:9")[0] == 200  # a forwarded port has another number
    for path in ("//about.json", f"//{server.token[:-1]}/about.json", "//"):
        assert get(server, path)[0] == 404
    status, body, headers = get(server, "")
    assert (status, get(server, "", method="HEAD")[:2]) == (200, (200, b"")) and body
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers and headers["Content-Security-Policy"]


def test_python_serves_a_path_until_it_is_closed(run: pathlib.Path, server: ViewServer) -> None:
    view = tr.view(run)
    assert tr.view(str(run)) is view and view.url in repr(view) and f'src="{view.url}"' in view._repr_html_()
    address = urllib.parse.urlsplit(view.url)
    for url, frames in ((view.url, "http://127.0.0.1:*"), (server.url, "'none'")):
        with urllib.request.urlopen(url) as answer:
            assert frames in answer.headers["Content-Security-Policy"]
    view.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(view.url)
    again = tr.view(run)
    assert urllib.parse.urlsplit(again.url).path != address.path
    again.close()
    with pytest.raises(NotFoundError, match="expected a checkpoint or a run, found nothing"):
        tr.view(run.parent / "none")


def test_a_published_version_is_read_with_its_base(tmp_path: pathlib.Path) -> None:
    w = np.zeros(10_000, "float32")
    with tr.Publisher(tmp_path / "stream") as publisher:
        publisher.publish(1, {"w": w})
        w[7] = 3
        publisher.publish(2, {"w": w.copy()})
    served = Served(tmp_path / "stream")
    assert served.contents("", "step-00000002")["leaves"][0]["what"] == "float32[10000]"
    found = np.frombuffer(served.values("", "step-00000002", "w", [(5, 9)]), "float32")
    assert found.tolist() == [0, 0, 3, 0] and served.about("")["steps"][1]["nbytes"] < w.nbytes


def test_only_what_is_in_the_path_is_served(run: pathlib.Path, server: ViewServer) -> None:
    tr.save(run.parent / "secret", {"w": np.ones(3)})
    shutil.copytree(run, run.parent / "other")
    for query in ("run=&step=../secret", "run=../other&step=step-00000001", "run=/etc&step=", "run=&step=/etc", "x"):
        assert get(server, f"contents.json?{query}")[0] == 404, query
    for name in ("", "data/step-00000001/treering.json", "../about.json", "values?run=&step=&leaf=w&box=a-b", "%00"):
        assert name == "" or get(server, name)[0] in (400, 404), name


def test_a_run_in_another_store_is_served() -> None:
    with stores.using(MemoryStore(), "viewed"):
        with tr.Checkpointer("viewed://b/run") as ckpts:
            ckpts.save(1, {"w": np.arange(9)})
        served = Served("viewed://b/run")
        assert served.contents("", "step-00000001")["leaves"][0]["what"] == "int64[9]"
        assert served.values("", "step-00000001", "w", [(2, 3)]) == np.int64(2).tobytes()


class CountingStore(MemoryStore):
    """Counts how often each folder is listed."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: collections.Counter[str] = collections.Counter()

    def list(self, path: str) -> list[str]:
        self.lists[path] += 1
        return super().list(path)


def test_a_poll_lists_a_directory_of_runs_once() -> None:
    """The number of times that a poll lists each folder does not grow with the number of runs."""
    with stores.using(store := CountingStore(), "polled"):
        listed = []
        for number in range(1, 5):
            with tr.Checkpointer(f"polled://b/runs/{number}") as ckpts:
                ckpts.save(1, {"w": np.arange(9)})
            served = Served("polled://b/runs")
            store.lists.clear()
            assert len(served.about("")["runs"]) == number
            listed.append({path: count for path, count in store.lists.items() if path.endswith(("/runs", "/1"))})
        assert listed[0] == listed[-1], listed


def test_bad_paths_are_one_clear_error(tmp_path: pathlib.Path, treering: Any, server: ViewServer) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in (("none", "found nothing"), ("empty", "found an empty directory")):
        found = treering("view", tmp_path / path)
        assert found.code == 3 and str(tmp_path / path) in found.err and words.split(".")[0] in found.err, found.err
    found = treering("view", tmp_path / "run", "--port", server.server_port)
    assert found.code == 3 and f"127.0.0.1:{server.server_port}: expected a port that is free" in found.err


@pytest.mark.long
@pytest.mark.parametrize("over_ssh", [False, True])
def test_ctrl_c_ends_the_command_quietly(run: pathlib.Path, monkeypatch: pytest.MonkeyPatch, over_ssh: bool) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    if over_ssh:
        monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 5000 192.0.2.2 22")
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
        said = process.stderr.read()
        assert f": ssh -N -L {port}:127.0.0.1:{port} " in said if over_ssh else said == ""


def test_runs_of_a_directory_are_served_together(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(run, tmp_path / "sweep" / "a")
    shutil.copytree(run, tmp_path / "sweep" / "b")
    tr.save(tmp_path / "sweep" / "orbax", {"w": np.ones(3)}, format="orbax")
    served = Served(tmp_path / "sweep")
    runs = served.about("")["runs"]
    assert [(one["name"], len(one.get("steps", ()))) for one in runs] == [("a", 2), ("b", 2), ("orbax", 0)]
    assert served.contents("b", "step-00000002")["place"] == str(tmp_path / "sweep" / "b" / "step-00000002")
    assert served.contents("orbax", "")["format"] == "orbax"
