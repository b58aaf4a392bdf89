"""URLs in every call: buckets with the environment's credentials, web servers, several processes."""

import functools
import http.server
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import obstore.store
import pytest

import s3
import treering as tr
from fault_proxy import Proxy, proxy
from jobs import run_job
from treering import stores
from treering.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError
from treering.formats.treering.array_file import ArrayFile
from treering.stores import buffers
from treering.stores.objects import blob, clients, upload
from treering.stores.objects import store as objects
from treering.stores.read_errors import RequestError


@pytest.mark.long
def test_a_store_in_memory_is_listed_while_another_thread_writes() -> None:
    """Listing does not deadlock with a writing thread.

    obstore before 0.12 lists its memory store with the GIL held, and a thread that overwrites may be waiting for the
    GIL.
    """
    code = """
import threading, obstore.store
from treering.stores.objects.bucket import Bucket
bucket = Bucket("memory://m", obstore.store.MemoryStore())
ended = threading.Event()
def write():
    while not ended.is_set():
        bucket.put("a", b"x" * 100, overwrite=True)
threading.Thread(target=write, daemon=True).start()
for _ in range(5000):
    bucket.list_all("")
ended.set()
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.long
def test_every_call_takes_a_url(bucket: str, tmp_path: pathlib.Path) -> None:
    tree = {"params": {"w": np.arange(12.0).reshape(3, 4)}, "step": np.array(7)}
    run = f"{bucket}/run"
    tr.save(f"{bucket}/a", tree, metadata={"note": "x"})
    tr.save_async(f"{bucket}/b", tree).result()
    assert tr.open(f"{bucket}/a").metadata == {"note": "x"} and not tr.diff(f"{bucket}/a", f"{bucket}/b")
    with tr.Checkpointer(run, keep=tr.keep.last(2)) as ckpts:
        for step in (1, 2, 3):
            ckpts.save(step, tree, metrics={"loss": 1 / step})
    tr.record(run, 3, {"accuracy": 0.5})
    assert tr.steps(run) == [2, 3] and tr.open(run).metrics == {"loss": 1 / 3, "accuracy": 0.5}
    assert [ckpt.step for ckpt in tr.follow(run, after=2, timeout=0)] == [3]
    assert tr.restore(run)["step"] == 7 and tr.verify(run).ok
    with tr.Checkpointer(run) as ckpts:
        ckpts.rewind(2)
    assert tr.steps(run) == [2] and tr.steps(f"{run}/rewound-1") == [3]
    for format in ("safetensors", "flax", "orbax", "t5x", "treering"):
        tr.convert(f"{bucket}/a", tmp_path / format, format=format)
        tr.convert(tmp_path / format, f"{bucket}/{format}", format=format)
        found = tr.restore(f"{bucket}/{format}", {"params": {"w": np.zeros((3, 4))}, "step": np.array(0)})
        np.testing.assert_array_equal(found["params"]["w"], tree["params"]["w"])


@pytest.mark.long
def test_a_profile_has_the_credentials(bucket: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_REGION")
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    (tmp_path / "config").write_text("[profile mine]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    tr.save(f"{bucket}/a", {"w": np.ones(3)})
    assert tr.restore(f"{bucket}/a")["w"].sum() == 3


def test_a_profile_names_the_endpoint(
    s3_server: str, bucket: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    (tmp_path / "config").write_text(f"[profile mine]\nregion = eu-west-3\nendpoint_url = {s3_server}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    client = clients.make_client(f"s3://{s3.BUCKET}")
    assert client.config["endpoint"] == s3_server and client.config["region"] == "eu-west-3"
    assert "unsigned_payload" not in client.config  # without TLS, only the signature protects the payload


def test_clients_of_other_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert clients.make_client("s3://b").config["unsigned_payload"]
    with pytest.raises(RequestError, match=r"az://c: no client can be made .*environment"):
        clients.make_client("az://c")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert clients.make_client("az://c").config["container_name"] == "c"
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert [clients.make_client(f"{scheme}://b").config["bucket"] for scheme in ("gs", "gcs")] == ["b", "b"]


@pytest.mark.long
def test_a_store_object_stands_for_its_bucket(s3_server: str) -> None:
    prefix = secrets.token_hex(4)
    client = s3.client(s3_server, prefix=prefix)
    report = tr.save(client, {"w": np.ones(3)})  # type: ignore[arg-type]
    assert report.path == f"s3://{s3.BUCKET}/{prefix}"
    assert tr.restore(report.path)["w"].sum() == 3 and tr.open(client)["w"].shape == (3,)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="LocalStore"):
        import obstore.store

        tr.save(obstore.store.LocalStore(), {})  # type: ignore[arg-type]


def test_a_file_url_is_a_path(tmp_path: pathlib.Path) -> None:
    tr.save(f"file://{tmp_path}/with%20space", {"w": 1})
    assert tr.restore(tmp_path / "with space") == {"w": 1}


@pytest.mark.long
def test_without_obstore_it_is_named() -> None:
    """Without obstore, the error names the package to install."""
    code = (
        "import sys; sys.modules['obstore'] = None\nimport treering as tr\n"
        "try: tr.steps('gs://bucket/run')\nexcept tr.errors.UnsupportedError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code.replace("tr.errors.", "")], capture_output=True, text=True)
    assert "pip install 'treering[gcs]'" in done.stdout + done.stderr


@pytest.mark.long
def test_importing_and_local_calls_leave_obstore_alone(tmp_path: pathlib.Path) -> None:
    code = f"import sys, treering as tr; tr.save({str(tmp_path / 'c')!r}, {{'a': 1}}); print('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.long
def test_requests_are_few(s3_server: str) -> None:
    """Saving and restoring small states takes few requests, which take about 50 ms each."""
    tree = {f"layer-{n}": np.full(1000, n, np.float32) for n in range(1000)}
    with proxy(s3_server) as counted:
        root = stores.absolute(s3.client(counted.url, prefix=secrets.token_hex(4)))  # type: ignore[arg-type]
        tr.save(f"{root}/first", {"a": 1})  # the server's conditions are tested once per process

        def requests(call: Any) -> int:
            begun = len(counted.requests)
            call()
            return len(counted.requests) - begun

        assert requests(lambda: tr.save(f"{root}/c", tree)) <= 8
        assert requests(lambda: tr.restore(f"{root}/c", tree)) <= 2
        opened = tr.open(f"{root}/c")
        assert requests(lambda: opened["layer-7"][...]) <= 2
        large = {"w": np.arange(7 << 20, dtype=np.float32)}  # in two objects
        tr.save(f"{root}/large", large)
        restored: list[Any] = []
        assert requests(lambda: restored.append(tr.restore(f"{root}/large"))) <= 1 + 2
        assert np.array_equal(restored[0]["w"], large["w"]) and restored[0]["w"].flags.writeable
        with tr.Checkpointer(f"{root}/run") as ckpts:
            for step in range(20):
                ckpts.save(step, {"a": step})
        assert requests(lambda: tr.steps(f"{root}/run")) == 1
        assert requests(lambda: tr.restore(f"{root}/run")) <= 4
        assert requests(lambda: tr.verify(f"{root}/run")) <= 2 + 4 * 20


@pytest.mark.parametrize("wanted", ["n", "w"])
def test_missing_object_without_wanted_bytes_is_found(wanted: str, caplog: pytest.LogCaptureFixture) -> None:
    """A restore reports a missing object even if it needs nothing from it."""
    client = obstore.store.MemoryStore()
    run = f"{stores.absolute(client)}/run"  # type: ignore[arg-type]
    for step in (1, 2):
        with tr.Checkpointer(run) as ckpts:
            state = {"n": step, "w": np.full(9, step), "x": np.ones(4 << 20, np.float32), "random": random.Random(step)}
            ckpts.save(step, state)
    found = obstore.list(client, "run/step-00000002").collect()
    largest = max(found, key=lambda one: one["size"])["path"]
    assert "arrays-" in largest and sum("arrays-" in one["path"] for one in found) == 2
    obstore.delete(client, largest)
    with pytest.raises(CorruptError, match=r"arrays-.*expected an array file, found nothing"):
        tr.restore(run, step=2, at=wanted)
    with pytest.raises(CorruptError, match=r"arrays-.*expected an array file, found nothing"):
        tr.restore(f"{run}/step-00000002", at=wanted)
    here = random.Random(7)
    like = {"n": ..., "w": ..., "x": ..., "random": here, wanted: {"n": 0, "w": np.zeros(9, int)}[wanted]}
    with pytest.raises(CorruptError, match=r"arrays-.*expected an array file, found nothing"):
        tr.restore(f"{run}/step-00000002", like)
    assert here.getstate() == random.Random(7).getstate(), "objects are changed in place last"
    assert np.all(tr.restore(run, at=wanted) == 1) and "step 2 is damaged" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("listed", [5000, 10], ids=["all at once", "level by level"])
@pytest.mark.parametrize(
    ("name", "format", "most"),
    [
        ("c", "treering", 2),
        ("c.safetensors", "safetensors", 3),
        ("c.msgpack", "flax", 3),
        ("c.eqx", "equinox", 3),
        ("c", "t5x", 3),
        ("c", "orbax", 12),
        ("c", "levanter", 8 + 2 * 20),  # each array has a file that describes it
    ],
)
def test_a_checkpoint_of_any_format_is_opened_in_few_requests(
    s3_server: str, monkeypatch: pytest.MonkeyPatch, name: str, format: str, most: int, listed: int
) -> None:
    monkeypatch.setattr(objects, "_MAX_CACHED_OBJECTS", listed)
    tree = {f"layer-{n}": np.full(10, n, np.float32) for n in range(20)}
    with proxy(s3_server) as counted:
        path = f"{stores.absolute(s3.client(counted.url, prefix=secrets.token_hex(4)))}/{name}"  # type: ignore[arg-type]
        tr.save(path, tree, format=format)
        begun = len(counted.requests)
        opened = tr.open(path)
        assert len(counted.requests) - begun <= most and len(opened) == 20
        restored = opened.restore(tree)
        assert all(np.array_equal(restored[leaf], array) for leaf, array in tree.items())


@pytest.mark.long
def test_a_signal_handler_reads_what_its_thread_is_reading(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = np.arange(1 << 20, dtype=np.float32)
    tr.save(f"{bucket}/c", {"w": saved})
    found: list[Any] = []

    def give_up(*_: object) -> None:
        raise TimeoutError

    def copying(target: memoryview, source: memoryview) -> None:
        if not found and len(target) > 4096:  # array data instead of the header
            found.append(None)
            os.kill(os.getpid(), signal.SIGUSR1)
        buffers.copy(target, source)

    usual = [
        signal.signal(signal.SIGUSR1, lambda *_: found.append(opened["w"][:10])),
        signal.signal(signal.SIGALRM, give_up),
    ]
    monkeypatch.setattr(blob, "copy", copying)
    signal.alarm(20)
    try:
        found.append(None)
        opened = tr.open(f"{bucket}/c")
        found.clear()
        assert np.array_equal(opened["w"][:1000], saved[:1000])
        assert len(found) == 2 and np.array_equal(found[1], saved[:10])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGUSR1, usual[0])
        signal.signal(signal.SIGALRM, usual[1])


@pytest.mark.rare
@pytest.mark.slow
def test_arrays_are_cut_into_objects(bucket: str) -> None:
    """Arrays are cut into several objects and restored correctly, from one device or many, with and without rules."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {
        "flat": np.arange(20_000_003, dtype=np.int32),
        "odd": (np.arange(7 * 1_500_001) % 999).astype(np.float32).reshape(7, 1_500_001),
        "spread": jax.device_put(np.arange(4 * 9_000_001, dtype=np.int8).reshape(4, -1), spread),
        "small": np.arange(5),
    }
    for n, options in enumerate(({}, {"memory_limit": None}, {"dtype": "float16"})):
        path = f"{bucket}/{n}"
        tr.save(path, tree, **options)  # type: ignore[arg-type]
        found = tr.restore(path)
        for name, array in tree.items():
            expected = np.asarray(array)
            if "dtype" in options and expected.dtype.kind == "f":
                expected = expected.astype(np.float16)
            np.testing.assert_array_equal(found[name], expected)
        store = stores.get(path)
        sizes = [stat.nbytes for one in store.list(path) if (stat := store.stat(f"{path}/{one}"))]
        assert len(sizes) > 4 and max(sizes) < 33 << 20
        part = tr.open(path)["odd"][2:5, 100:200]
        np.testing.assert_array_equal(part, np.asarray(found["odd"])[2:5, 100:200])
    local = f"{bucket}/copy"
    tr.save(local, tr.open(f"{bucket}/0"))
    assert not tr.diff(local, f"{bucket}/0")


_JOB = """
run = URL + "/run"
value = (np.arange(40_000_000) % 999).astype(np.float32).reshape(8, -1)
tree = {"w": put(value, P("x")), "same": np.arange(3)}
with tr.Checkpointer(run) as ckpts:
    ckpts.save(1, tree)
    ckpts.wait()
    found = ckpts.restore(tree)
    assert same(found["w"], value)
tr.save(URL + "/cast", tree, dtype="float16")
tr.save(URL + "/flax", tree, format="flax")
report(tr.steps(run))
"""


@pytest.mark.slow
def test_several_processes_write_one_checkpoint(bucket: str, s3_server: str, tmp_path: pathlib.Path) -> None:
    body = f"os.environ.update({s3.environment(s3_server)!r})\n" + _JOB
    for result in run_job(tmp_path, body, processes=2, URL=bucket):
        assert result.code == 0 and result.report == [1], result.output
    value = (np.arange(40_000_000) % 999).astype(np.float32).reshape(8, -1)
    np.testing.assert_array_equal(tr.restore(f"{bucket}/run")["w"], value)
    np.testing.assert_array_equal(tr.restore(f"{bucket}/flax")["w"], value)
    assert tr.restore(f"{bucket}/cast")["w"].dtype == np.float16 and tr.verify(f"{bucket}/run").ok


_PREEMPTED = """
tree = {"w": put(np.arange(1 << 20, dtype=np.float32).reshape(8, -1), P("x"))}
with tr.Checkpointer(URL + "/run", save_every=1000, save_on_preemption=True) as ckpts:
    for step in range(1, 900):
        time.sleep(0.02)  # JAX's service takes a while to notify all processes
        if step == 5 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        ckpts.save(step, tree)
        if ckpts.preempted:
            break
again = tr.Checkpointer(URL + "/run")
assert same(again.restore(tree)["w"], np.arange(1 << 20, dtype=np.float32).reshape(8, -1))
again.close()
report(step)
"""


@pytest.mark.slow
def test_preempted_job_saves_in_a_bucket(bucket: str, s3_server: str, tmp_path: pathlib.Path) -> None:
    """One process gets the signal; all save the same step and release the lease, so the next job starts at once."""
    body = f"import signal\nos.environ.update({s3.environment(s3_server)!r})\n" + _PREEMPTED
    found = run_job(tmp_path, body, processes=2, URL=bucket)
    assert [result.code for result in found] == [0, 0], found[0].output
    steps = {result.report for result in found}
    assert len(steps) == 1 and tr.steps(f"{bucket}/run") == list(steps) and tr.verify(f"{bucket}/run").ok


class _Hub(http.server.SimpleHTTPRequestHandler):
    """Serves a folder with ranges, and redirects requests for `/resolve/…`, as the Hugging Face Hub does."""

    def do_GET(self) -> None:
        if self.path.startswith("/resolve/"):
            self.send_response(302)
            self.send_header("Location", self.path.replace("/resolve/", "/files/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path = pathlib.Path(self.directory, os.path.basename(urllib.parse.unquote(self.path)))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        begin, end = 0, len(data)
        if asked := self.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - begin))
        if "untagged" not in self.path:
            self.send_header("ETag", '"one"')
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[begin:end])

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> Iterator[Proxy]:
    handler = functools.partial(_Hub, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with proxy(f"http://127.0.0.1:{server.server_port}") as counted:
            yield counted
        server.shutdown()


@pytest.mark.long
def test_a_file_on_the_web_is_read_by_ranges(hub: Proxy, tmp_path: pathlib.Path) -> None:
    weights = {"big": np.arange(8_000_000, dtype=np.float32).reshape(8, -1), "small": np.ones(4, np.float32)}
    tr.save(tmp_path / "model.safetensors", weights)
    url = f"{hub.url}/resolve/model.safetensors"
    ckpt = tr.open(url)
    assert ckpt.format == "safetensors" and ckpt["big"].shape == (8, 1_000_000)
    opened = len(hub.requests)
    assert opened <= 2 * 3, "each request is redirected once"
    np.testing.assert_array_equal(ckpt["big"][5, :1000], weights["big"][5, :1000])
    asked = sum(_length(request.headers) for request in hub.requests[opened:] if request.method == "GET")
    assert asked <= 2 << 20, "one row needs some ranges, not the file"
    np.testing.assert_array_equal(tr.restore(url)["big"], weights["big"])
    with pytest.raises(UnsupportedError, match="only read"):
        tr.save(f"{hub.url}/new", {"a": 1})
    with pytest.raises(NotFoundError):
        tr.open(f"{hub.url}/nothing.safetensors")
    for end in ("?download=true", "#weights"):
        with pytest.raises(UnsupportedError, match="without a query and a fragment"):
            tr.open(url + end)
    tr.save(tmp_path / "my model.safetensors", weights)
    np.testing.assert_array_equal(tr.restore(f"{hub.url}/resolve/my%20model.safetensors")["small"], weights["small"])


@pytest.mark.long
def test_web_file_without_a_version_is_logged(
    hub: Proxy, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names a file for which the server sends neither an ETag nor Last-Modified."""
    tr.save(tmp_path / "untagged.safetensors", {"w": np.ones(4, np.float32)})
    assert tr.restore(f"{hub.url}/files/untagged.safetensors")["w"].sum() == 4
    assert "neither an ETag nor Last-Modified" in caplog.text


@pytest.mark.parametrize("call", [tr.steps, tr.follow, tr.Checkpointer])
def test_run_on_a_web_server_is_refused(call: Any) -> None:
    """A run on a web server raises an error, because it cannot be listed."""
    with pytest.raises(UnsupportedError, match="can neither be listed nor written"):
        call("https://example.org/run")


def _length(headers: dict[str, str]) -> int:
    asked = {name.lower(): value for name, value in headers.items()}.get("range", "bytes=0-99999999")
    first, last = asked.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


@pytest.mark.long
def test_nothing_is_held_of_what_was_opened() -> None:
    """If most of an object is read, all of it is fetched, and the bytes that no caller requested are freed."""
    bucket = obstore.store.MemoryStore()
    report = tr.save(bucket, {"w": np.zeros((1000, 9000))})
    ckpt = tr.open(report.path)
    assert ckpt["w"][:, :6000].shape == (1000, 6000)
    files = ckpt._source._files.opened.values()
    assert len(files) > 1 and not any(file._blob._prefetched for file in files)


@pytest.mark.long
@pytest.mark.whole
def test_two_threads_that_read_one_leaf_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are fetched directly into the array of one thread are never given to another thread."""
    saved = np.arange(6_000_000, dtype=np.float32)  # in two objects
    ckpt = tr.open(tr.save(obstore.store.MemoryStore(), {"w": saved}).path)
    opened, taken, written = threading.Event(), threading.Event(), threading.Event()
    right: dict[str, bool] = {}
    memory = ArrayFile.memory

    def in_turns(self: ArrayFile, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is first and not opened.is_set():
            opened.set()  # before it takes the fetched bytes
            taken.wait(20)
            return memory(self, *arguments, **options)
        found = memory(self, *arguments, **options)
        if threading.current_thread() is second and not taken.is_set():
            taken.set()
            written.wait(20)
        return found

    def read_and_write() -> None:
        array = ckpt["w"][...]
        right["first"] = np.array_equal(array, saved)
        array[:] = -1
        written.set()

    def read() -> None:
        opened.wait(20)
        right["second"] = np.array_equal(ckpt["w"][...], saved)

    monkeypatch.setattr(ArrayFile, "memory", in_turns)
    # In the very threads that are begun here
    monkeypatch.setattr("treering.formats.treering.piece_reads._MAX_READS", 1)
    first, second = threading.Thread(target=read_and_write), threading.Thread(target=read)
    for one in (first, second):
        one.start()
    for one in (first, second):
        one.join(60)
    assert right == {"first": True, "second": True}


@pytest.mark.long
@pytest.mark.parametrize("holds", [False, True])
def test_upload_buffers_are_reused_once_the_client_drops_them(
    s3_server: str, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upload buffers are used again once the client has released them."""
    monkeypatch.setattr(upload, "IN_FLIGHT", 2)
    made: list[int] = []
    monkeypatch.setattr(upload, "aligned", lambda nbytes: made.append(nbytes) or buffers.aligned(nbytes))
    client = obstore.store.MemoryStore() if holds else s3.client(s3_server, prefix=secrets.token_hex(4))
    store = stores.get(stores.absolute(client))
    monkeypatch.setattr(store._uploads, "_slots", threading.BoundedSemaphore(1))
    saved = np.random.default_rng(0).integers(0, 256, 12 * upload.OBJECT_BYTES, np.uint8)
    tr.save(client, {"w": saved})
    assert len(made) >= 12 if holds else len(made) < 6
    assert store._uploads._free_buffers == []
    assert np.array_equal(tr.restore(client)["w"], saved)


def test_buffers_without_reference_checks_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload buffers are not used again on a system without `mremap`, here a double: its mappings cannot be resized."""
    uploads = upload.Uploads()
    uploads._pending["other"] = upload.Upload("other", lambda: None, uploads._slots)
    monkeypatch.setattr(upload, "aligned", lambda nbytes: memoryview(bytes(nbytes)))
    uploads.release_buffer(uploads.acquire_buffer(1 << 20))
    assert uploads._free_buffers == []


@pytest.mark.parametrize("view", [lambda one: one[1:5], lambda one: one.cast("H"), lambda one: np.frombuffer(one, "B")])
def test_buffers_held_by_the_client_are_not_reused(view: Any) -> None:
    """An upload buffer is not used again while the client holds a part of it."""
    uploads = upload.Uploads()
    uploads._pending["other"] = upload.Upload("other", lambda: None, uploads._slots)
    memory = uploads.acquire_buffer(1 << 20)
    held = view(memory)
    uploads.release_buffer(memory)
    assert uploads._free_buffers == [] and len(held)
    memory = uploads.acquire_buffer(1 << 20)
    uploads.release_buffer(memory)
    assert len(uploads._free_buffers) == 1
