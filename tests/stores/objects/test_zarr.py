"""Checkpoints of zarr arrays in buckets: only the needed bytes are read, and a failed request is not damage."""

import logging
import os
import pathlib
import secrets
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import obstore
import obstore.store
import pytest

import s3
import treering as tr
from fault_proxy import Proxy, proxy
from treering import stores
from treering.errors import CorruptError, NotFoundError, TreeringError, UnsupportedError
from treering.formats._zarr.folder import errors
from treering.stores.objects import loopback, store
from treering.stores.read_errors import ReplacedError, RequestError
from treering.stores.tensorstore_memory import drain_memory, encode_error

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
_FORMATS = ["orbax", "t5x", "levanter"]
_RNG = np.random.default_rng(0)
_TREE = {
    "small": np.arange(1000, dtype=np.float32),
    "large": _RNG.random((12, 1 << 18), np.float32),  # in one to twelve chunks
}


@pytest.fixture
def between(s3_server: str) -> Any:
    with proxy(s3_server) as found:
        yield found


def _saved(between: Proxy, format: str) -> str:
    path = f"{stores.absolute(s3.client(between.url, prefix=secrets.token_hex(4)))}/c"  # type: ignore[arg-type]
    tr.save(path, _TREE, format=format)
    return path


@pytest.mark.parametrize("format", _FORMATS)
def test_only_what_is_needed_is_read(between: Proxy, format: str) -> None:
    path = _saved(between, format)
    between.sent = 0
    opened = tr.open(path)
    assert np.array_equal(opened["small"][...], _TREE["small"])
    assert between.sent < 1 << 20, "the large array has 12 MiB"
    assert np.array_equal(opened["large"][3:5], _TREE["large"][3:5])
    restored = tr.restore(path, _TREE)
    assert all(np.array_equal(restored[name], _TREE[name]) for name in _TREE)
    assert restored["large"].flags.writeable
    assert tr.verify(path).ok


@pytest.mark.parametrize("format", _FORMATS)
def test_what_is_replaced_while_it_is_open_is_said(between: Proxy, format: str) -> None:
    """Reading a checkpoint that was replaced while it was open raises an error that says so."""
    path = _saved(between, format)
    opened = tr.open(path)
    tr.save(path, {name: array + 1 for name, array in _TREE.items()}, format=format, overwrite=True)
    with pytest.raises(NotFoundError, match="replaced or deleted while it was open"):
        opened["large"][...]


@pytest.mark.parametrize("format", _FORMATS)
def test_a_request_that_is_refused_is_no_damage(between: Proxy, format: str) -> None:
    path = _saved(between, format)
    opened = tr.open(path)
    between.fault = lambda request: "403 AccessDenied" if request.method == "GET" else None
    with pytest.raises((TreeringError, OSError)) as caught:
        opened["large"][...]
    assert "does not allow" in str(caught.value) and not isinstance(caught.value, CorruptError), caught.value
    between.fault = lambda request: None
    assert np.array_equal(opened["large"][...], _TREE["large"])


@pytest.mark.rare
def test_many_chunks_take_few_requests(between: Proxy) -> None:
    path = f"{stores.absolute(s3.client(between.url, prefix=secrets.token_hex(4)))}/c"  # type: ignore[arg-type]
    array = _RNG.random((40, 1 << 20), np.float32)[:, ::2].copy()  # 80 MiB
    tr.save(path, {"w": array}, format="levanter")
    opened = tr.open(path)
    begun, sent = len(between.requests), between.sent
    assert np.array_equal(opened["w"][...], array)
    chunks = array.nbytes / (16 << 20)
    assert len(between.requests) - begun <= 2 * chunks + 2 and between.sent - sent < 1.01 * array.nbytes


def test_loopback_request_without_token_is_refused(between: Proxy) -> None:
    """Requests to the loopback server without a folder's token are refused."""
    path = _saved(between, "orbax")
    opened = tr.open(path)
    assert loopback._server
    url = f"http://127.0.0.1:{loopback._server.server_address[1]}"
    for guess in ("", "/manifest.ocdbt", f"/{secrets.token_hex(16)}/manifest.ocdbt", "/../../etc/passwd"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url + guess)
        caught.value.close()
        assert caught.value.code == 403
    opened["small"][...]


def test_by_way_of_memory_where_a_proxy_is_in_between(
    between: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a proxy in the environment, the checkpoint is read through memory, and the log says so."""
    path = _saved(between, "orbax")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost, example.com")
    with caplog.at_level(logging.WARNING, "treering"):
        restored = tr.restore(path, _TREE)
    assert "no_proxy" in caplog.text and np.array_equal(restored["large"], _TREE["large"])
    monkeypatch.setenv("no_proxy", "localhost, 127.0.0.1")
    caplog.clear()
    assert np.array_equal(tr.restore(path, _TREE)["large"], _TREE["large"]) and not caplog.text


@pytest.mark.rare
@pytest.mark.parametrize("format", ["orbax", "levanter"])
def test_memory_does_not_grow_with_the_checkpoint(s3_server: str, tmp_path: Any, format: str) -> None:
    """Converting to a bucket and back takes a fixed amount of memory.

    The process uses an allocator setting that returns free memory to the system.
    """
    tree = {f"w{n}": _RNG.random((8 << 20,), np.float32) for n in range(12)}  # 384 MiB
    tr.save(tmp_path / "c", tree)
    tr.save(tmp_path / "warm", {"a": np.zeros(1 << 20, np.float32)})
    code = f"""
    import resident_memory, s3, treering as tr
    from treering import stores
    root = stores.absolute(s3.client({s3_server!r}, prefix={secrets.token_hex(4)!r}))
    def convert(source, target, **options):
        print(resident_memory.peak_bytes(lambda: tr.convert(source, target, **options))[0])
    for name in ("warm", "c"):
        convert(f"{tmp_path}/{{name}}", f"{{root}}/{{name}}", format={format!r})
        convert(f"{{root}}/{{name}}", f"{tmp_path}/{{name}}-back")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2], check=True, env=environment
    )
    written, read = map(int, done.stdout.split()[2:])
    assert written < 128 and read < 128, done.stdout
    converted = tr.open(tmp_path / "c-back")
    assert all(np.array_equal(converted[name][...], array) for name, array in tree.items())


@pytest.mark.parametrize("format", _FORMATS)
def test_arrays_are_sent_while_they_are_written(between: Proxy, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def counting(folder: str, context: Any, which: Any, put: Any, in_flight: int) -> None:
        sizes: list[int] = []
        drain_memory(folder, context, which, lambda name, data: (sizes.append(len(data)), put(name, data)), in_flight)
        sent.append(sum(sizes))

    monkeypatch.setattr(store, "drain_memory", counting)
    path = f"{stores.absolute(s3.client(between.url, prefix=secrets.token_hex(4)))}/c"  # type: ignore[arg-type]
    tree = {f"w{n}": _RNG.random((8 << 20,), np.float32) for n in range(6)}  # 192 MiB
    tr.save(path, tree, format=format)
    assert len(sent) >= 3 and max(sent) < 100 << 20, sent
    opened = tr.open(path)
    assert all(np.array_equal(opened[name][...], array) for name, array in tree.items())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ReplacedError("gone"), ReplacedError),
        (RequestError("it's [not] there"), RequestError),
        (PermissionError(13, "no"), PermissionError),
        (MemoryError(), RequestError),
        (KeyError("a"), RequestError),
    ],
)
def test_errors_come_by_way_of_tensorstore(error: Exception, expected: type[Exception]) -> None:
    """An error keeps its type on its way through TensorStore, which puts the error's text between other text."""
    text = encode_error(error).replace("'", "\\'")
    shown = f"PERMISSION_DENIED: Error reading: [HTTP code 403] [http_response_body='{text}'] [tensorstore_spec='{{}}']"
    with pytest.raises(expected) as caught, errors(stores.get("/tmp"), "/tmp/place"):
        raise ValueError(shown)
    assert type(caught.value) is expected and "/tmp/place" in str(caught.value)


@pytest.mark.parametrize("format", ["treering", "safetensors", *_FORMATS])
def test_a_bucket_that_keeps_versions(s3_server: str, format: str) -> None:
    """A bucket with versions works, although its listings lack the version numbers that its other answers have."""
    bucket = f"versions-{secrets.token_hex(4)}"
    s3.keep_versions(s3_server, bucket)
    buckets = store.ObjectStore()
    buckets.add("versions://b", s3.client(s3_server, bucket))
    tree = {"w": np.arange(9_000_000, dtype=np.float32)}
    with stores.using(buckets, "versions"):
        for first in (1, 2):
            tree["w"][0] = first
            tr.save("versions://b/c", tree, format=format, overwrite=True)
            found = tr.restore("versions://b/c", tree)["w"]
            np.testing.assert_array_equal(found, tree["w"])
        with tr.Checkpointer("versions://b/run", keep=tr.keep.last(1)) as ckpts:
            for step in (1, 2):
                ckpts.save(step, tree)
        assert tr.steps("versions://b/run") == [2] and tr.verify("versions://b/run").ok


def _as_a_bucket(folder: pathlib.Path) -> Any:
    """Returns a store that has the files of a folder at its root."""
    bucket = obstore.store.MemoryStore()
    for file in folder.rglob("*"):
        if file.is_file():
            obstore.put(bucket, str(file.relative_to(folder)), file.read_bytes())
    return bucket


@pytest.mark.parametrize("format", _FORMATS)
def test_checkpoint_at_the_root_of_a_bucket_is_read(tmp_path: pathlib.Path, format: str) -> None:
    """A checkpoint at the root of a bucket is read, even if one name is another without its first letter."""
    tree = {"a": np.full(3, 7.0, np.float32), "ba": np.full(3, 9.0, np.float32)}
    tr.save(tmp_path / "c", tree, format=format)
    bucket = _as_a_bucket(tmp_path / "c")
    opened = tr.open(bucket)
    for name, array in tree.items():
        assert np.array_equal(opened[name][...], array)
    assert tr.verify(bucket).ok


@pytest.mark.parametrize("format", _FORMATS)
def test_save_of_folder_to_the_root_of_a_bucket_is_refused(tmp_path: pathlib.Path, format: str) -> None:
    """A folder cannot be saved to the root of a bucket, and nothing is changed there."""
    (tmp_path / "nothing").mkdir()
    tr.save(tmp_path / "c", _TREE, format=format)
    for folder, overwrite in (("nothing", False), ("c", True)):
        bucket = _as_a_bucket(tmp_path / folder)
        before = [one["path"] for page in obstore.list(bucket) for one in page]
        with pytest.raises(UnsupportedError, match="expected a name within a bucket"):
            tr.save(bucket, _TREE, format=format, overwrite=overwrite)
        assert [one["path"] for page in obstore.list(bucket) for one in page] == before
