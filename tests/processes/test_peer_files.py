"""Tests that processes read the files of other hosts' local tiers: over real sockets, and in jobs of real processes."""

import contextlib
import errno
import logging
import os
import pathlib
import socket
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import treering as tr
from jobs import run_job
from treering import stores
from treering._core.calls import SINGLE_PROCESS
from treering._processes import peer_files, peer_server
from treering._processes.peer_files import PeerFiles
from treering._processes.peer_server import PeerServer
from treering._restore.checkpoint import Checkpoint
from treering.errors import CorruptError, PeerError
from treering.formats.treering.read import Reader
from treering.stores.nearest_copy import HeldFile, NearestCopyStore, Place
from treering.stores.read_errors import ReplacedError
from treering.stores.served_file import ServedRoot

SECRET, LOCALHOST = b"s" * 32, "127.0.0.1"


@pytest.fixture
def step(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "local" / "step-1"
    folder.mkdir(parents=True)
    return folder


def serve(root: pathlib.Path, index: int = 0, secret: bytes = SECRET, timeout: float = 5) -> PeerServer:
    return PeerServer(ServedRoot(stores.get(str(root)), str(root)), secret, index, LOCALHOST, timeout)


@contextlib.contextmanager
def reading_from(*roots: pathlib.Path, secret: bytes = SECRET, timeout: float = 5) -> Iterator[PeerFiles]:
    """Yields the files of hosts with these local tiers, which processes 0, 1, … serve; this process has none."""
    servers = [serve(root, index) for index, root in enumerate(roots)]
    addresses = {index: (LOCALHOST, server.port) for index, server in enumerate(servers)}
    files = PeerFiles(9, 9, addresses, secret, timeout, None)
    try:
        yield files
    finally:
        files.close()
        for server in servers:
            server.close()


def read(files: PeerFiles, name: str, nbytes: int, offset: int = 0, folder: str = "step-1") -> bytes:
    data = bytearray(nbytes)
    files.read_into(0, folder, name, memoryview(data), offset)
    return bytes(data)


def error_of(files: PeerFiles, *args: Any, **options: Any) -> Exception:
    with pytest.raises((OSError, CorruptError)) as caught:
        read(files, *args, **options)
    return caught.value


def test_ranges_of_files_arrive_in_many_threads(step: pathlib.Path) -> None:
    data = np.random.default_rng(0).bytes(20_000_000)
    (step / "a").write_bytes(data)
    (step / "empty").touch()
    with reading_from(step.parent) as files:
        assert read(files, "empty", 0) == b""
        assert read(files, "a", len(data)) == data
        wrong: list[int] = []

        def work(n: int) -> None:
            for begin in range(n, len(data), 2_500_001):
                part = data[begin : begin + 1_000_003]
                wrong.extend([begin] if read(files, "a", len(part), begin) != part else [])

        threads = [threading.Thread(target=work, args=[n]) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_only_plain_files_in_folders_of_the_root_are_served(step: pathlib.Path) -> None:
    outside = step.parents[1] / "secret"
    outside.write_text("outside")
    (step.parent / "beside").write_text("in the root")
    (step / "a").write_text("served")
    (step / ".hidden").write_text("hidden")
    (step / "link").symlink_to(outside)
    (step / "inner").mkdir()
    (step / "inner" / "a").write_text("too deep")
    os.mkfifo(step / "pipe")
    (step.parent / "linked").symlink_to(step)
    with reading_from(step.parent) as files:
        assert read(files, "a", 6) == b"served"
        for name in ("../../secret", "../beside", "inner/a", "..", ".", "", ".hidden", "a\0", "link", "pipe", "inner"):
            assert isinstance(error_of(files, name, 1), PermissionError), name
        for folder in ("..", ".", "", "/", str(step), f"../{step.parent.name}/step-1", "step-1/inner"):
            assert isinstance(error_of(files, "a", 1, folder=folder), PermissionError), folder
        assert isinstance(error_of(files, "a", 1, folder="linked"), FileNotFoundError)
        assert isinstance(error_of(files, "absent", 1), FileNotFoundError)
        assert isinstance(error_of(files, "a", 1, folder="x" * 5000), PeerError)
        assert read(files, "a", 6) == b"served"


def test_without_a_thread_a_connection_is_closed(step: pathlib.Path, monkeypatch: Any, caplog: Any) -> None:
    """A peer may read elsewhere, or raise. The next connection is served, once a thread can start."""

    def refused(*_: threading.Thread) -> None:
        raise tr.errors.SaveError("no thread can start")

    (step / "a").write_bytes(b"served")
    with reading_from(step.parent, timeout=0.5) as files:
        with monkeypatch.context() as patch:
            patch.setattr(peer_server, "start_threads", refused)
            assert isinstance(error_of(files, "a", 6), PeerError)
        assert f"{step.parent}: a peer's connection was closed: no thread can start" in caplog.text
        assert read(files, "a", 6) == b"served"


def test_changed_files_are_not_read(step: pathlib.Path) -> None:
    (step / "a").write_bytes(b"x" * 100)
    with reading_from(step.parent) as files:
        version = files.read_into(0, "step-1", "a", memoryview(bytearray(10)), 0)
        assert files.read_into(0, "step-1", "a", memoryview(bytearray(10)), 50, version) == version
        assert "expected 101 bytes, found 100" in str(error_of(files, "a", 1, 100))
        (step / "b").write_bytes(b"y" * 100)
        os.replace(step / "b", step / "a")
        with pytest.raises(ReplacedError):
            files.read_into(0, "step-1", "a", memoryview(bytearray(10)), 50, version)


@pytest.mark.parametrize(("index", "secret"), [(0, b"t" * 32), (1, SECRET)])
def test_another_job_or_process_is_refused(step: pathlib.Path, index: int, secret: bytes) -> None:
    """A process with another secret reads nothing, nor does one that reaches another process than it looks for."""
    (step / "a").write_text("served")
    server = serve(step.parent)
    files = PeerFiles(9, 9, {index: (LOCALHOST, server.port)}, secret, 5, None)
    with pytest.raises(PeerError, match=rf"process {index} .*does not know the secret"):
        files.read_into(index, "step-1", "a", memoryview(bytearray(1)), 0)
    server.close()


def test_requests_without_the_challenge_get_nothing(step: pathlib.Path) -> None:
    (step / "a").write_text("served")
    server = serve(step.parent)
    with socket.create_connection((LOCALHOST, server.port)) as raw:
        raw.sendall(bytes(64) + b"\0\6\0\1" + bytes(15) + b"\1" + b"step-1a")
        raw.settimeout(5)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := raw.recv(100):
                received += data
    assert len(received) == 32  # the nonce
    server.close()


def test_connections_end_and_begin_again(step: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection is opened again. A closed server is an error that names it, at once."""
    monkeypatch.setattr(peer_server, "_IDLE_SECONDS", 0.05)
    (step / "a").write_text("served")
    server = serve(step.parent)
    files = PeerFiles(9, 9, {0: (LOCALHOST, server.port), 1: "it has no network"}, SECRET, 5, None)
    assert read(files, "a", 6) == b"served"
    time.sleep(0.2)
    assert read(files, "a", 6) == b"served"
    server.close()
    assert f"process 0 (127.0.0.1 port {server.port}) within 5 s" in str(error_of(files, "a", 6))
    with pytest.raises(PeerError, match=r"process 1 .*it has no network"):
        files.read_into(1, "step-1", "a", memoryview(bytearray(1)), 0)


def test_a_peer_that_stands_still_is_an_error_in_time(step: pathlib.Path) -> None:
    with socket.create_server((LOCALHOST, 0)) as silent:
        files = PeerFiles(9, 9, {0: (LOCALHOST, silent.getsockname()[1])}, SECRET, 0.2, None)
        assert "timed out" in str(error_of(files, "a", 1))


class FullListener:
    """A listening socket that fails twice, because the process has no file descriptor for a connection."""

    def __init__(self, listening: socket.socket):
        self._listening, self.refused = listening, 0

    def accept(self) -> Any:
        if self.refused < 2:
            self.refused += 1
            raise OSError(errno.EMFILE, "no descriptors")
        return self._listening.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listening, name)


def test_a_server_with_too_many_connections_makes_them_wait(
    step: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "_MAX_CONNECTIONS", 1)
    monkeypatch.setattr(peer_server, "_IDLE_SECONDS", 0.05)
    (step / "a").write_text("served")
    server = serve(step.parent)
    files = [PeerFiles(9, 9, {0: (LOCALHOST, server.port)}, SECRET, 5, None) for _ in range(3)]
    monkeypatch.setattr(server, "_listening", FullListener(server._listening))
    for one in files:
        assert read(one, "a", 6) == b"served"
    assert server._listening.refused == 2
    server.close()


def test_a_forked_child_keeps_no_connection(step: pathlib.Path) -> None:
    """After the parent has closed its server, peers are refused although a child of it is alive."""
    (step / "a").write_text("served")
    server = serve(step.parent)
    files = PeerFiles(0, 0, {0: (LOCALHOST, server.port)}, SECRET, 5, server)
    other = PeerFiles(9, 9, {0: (LOCALHOST, server.port)}, SECRET, 5, None)
    assert read(other, "a", 6) == b"served"
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks. The child does nothing but wait.
        child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(server._listening.fileno() != -1)  # Otherwise the child of a killed parent would keep it open.
    try:
        assert read(other, "a", 6) == b"served"
        files.close()
        assert "refused" in str(error_of(other, "a", 1))
    finally:
        os.close(writer)
        assert os.waitpid(child, 0)[1] == 0
        os.close(reader)


class OneOf:
    """The call of process 0 of a job of two. `found` are the values that process 1 sends."""

    index, count, timeout = 0, 2, 5.0

    def __init__(self, *found: Any):
        self._found = list(found)

    def gather_and_decide(self, value: Any, decide: Any) -> Any:
        return decide([value, self._found.pop(0)])


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize(
    ("coordinator", "other", "listening"),
    [
        ("127.0.0.1:99", LOCALHOST, LOCALHOST),
        ("192.0.2.1:99", "same", LOCALHOST),  # one machine
        ("192.0.2.1:99", "192.0.2.7", "public"),
        ("localhost:99", "192.0.2.7", "public"),  # only its peer knows an address that others reach
        ("[::1]:99", "::1", "::1"),
        (None, LOCALHOST, None),
        ("unknown.invalid:99", LOCALHOST, None),
    ],
)
def test_a_process_listens_where_its_peers_can_reach_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, coordinator: Any, other: str, listening: Any
) -> None:
    public = peer_files._address_towards("192.0.2.1", 99)
    if (public is None and "192.0.2" in f"{coordinator} {other}") or (other == "::1" and not has_ipv6()):
        pytest.skip("this machine has no such network")
    monkeypatch.setattr(peer_files, "coordinator_address", lambda: coordinator)
    call: Any = OneOf([True, public if other == "same" else other], "it has no disk")
    files = peer_files.join(call, stores.get(str(tmp_path)), str(tmp_path), 0)
    address = files._addresses[0]
    files.close()
    if listening is None:
        assert address == "it cannot serve its files: found no address by which this host reaches process 0"
    else:
        assert address[0] == (public if listening == "public" else listening)
    assert files._addresses[1] == "it has no disk"


def test_a_single_host_serves_nothing(tmp_path: pathlib.Path) -> None:
    call: Any = OneOf([False, None], None)
    for one in (call, SINGLE_PROCESS):
        files = peer_files.join(one, stores.get(str(tmp_path)), str(tmp_path), 0)
        assert files._addresses == {}
        with pytest.raises(PeerError, match=r"process 1 .*it serves no files"):
            files.read_into(1, "step-1", "a", memoryview(bytearray(1)), 0)


def scattered(tmp_path: pathlib.Path, value: Any, *holders: pathlib.Path) -> Mapping[str, Any]:
    """Saves a value, and copies its array file to these local tiers. Returns arguments of `NearestCopyStore`."""
    tr.save(tmp_path / "saved", value)
    (name,) = [name for name in os.listdir(tmp_path / "saved") if name.startswith("arrays")]
    for root in holders:
        (root / "step-1").mkdir(parents=True)
        (root / "step-1" / name).write_bytes((tmp_path / "saved" / name).read_bytes())
    manifest = (tmp_path / "saved" / "treering.json").read_bytes()
    held = {name: HeldFile((tmp_path / "saved" / name).stat().st_size, range(len(holders)))}
    return {"small": {"treering.json": manifest}, "held": held}


def view(files: Any, root: pathlib.Path, **options: Any) -> NearestCopyStore:
    return NearestCopyStore(files, stores.get(str(root)), str(root / "step-1"), **options)


def restored(store: Any, root: pathlib.Path, **options: Any) -> Any:
    return Checkpoint(Reader(store, str(root / "step-1"))).restore(**options)


def damage_file(file: pathlib.Path, damage: str) -> None:
    data = bytearray(file.read_bytes())
    if damage.startswith("flipped"):
        data[20 if "header" in damage else len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "cut short":
        file.write_bytes(data[:-1_500_000])
    else:
        file.unlink()


DAMAGE = pytest.mark.parametrize("damage", ["flipped", "flipped header", "cut short", "deleted"])
VALUE = {"w": np.arange(700_000, dtype=np.float32), "n": 3}


@DAMAGE
def test_damage_of_one_copy_is_found_and_another_read(
    tmp_path: pathlib.Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, here = tmp_path / "a", tmp_path / "b", tmp_path / "here"
    given = scattered(tmp_path, VALUE, a, b)
    ((name, (nbytes, _)),) = given["held"].items()
    damage_file(a / "step-1" / name, damage)
    only_first = {**given, "held": {name: HeldFile(nbytes, [0])}}
    saved = stores.get(str(tmp_path)), str(tmp_path / "saved")
    with reading_from(a, b) as files:
        for index in (0, 9):  # Of two copies, processes with even numbers read the first one first.
            files.index = index
            caplog.clear()
            store = view(files, here, **given)
            np.testing.assert_array_equal(restored(store, here)["w"], VALUE["w"])
            assert store.read_bytes[Place.PEERS] >= VALUE["w"].nbytes and not store.read_bytes[Place.HERE]
            assert ("host of process 0" in caplog.text) == (index == 0)
        with pytest.raises(ReplacedError if damage == "deleted" else CorruptError):
            restored(view(files, here, **only_first), here)
        remote = view(files, here, remote=saved, **only_first)
        np.testing.assert_array_equal(restored(remote, here)["w"], VALUE["w"])
        assert remote.read_bytes[Place.REMOTE] > 0
    remote = view(files, here, remote=saved, **given)  # No host serves any more.
    np.testing.assert_array_equal(restored(remote, here)["w"], VALUE["w"])
    assert not remote.read_bytes[Place.PEERS]


@DAMAGE
def test_damage_on_this_host_is_found_and_a_peer_read(
    tmp_path: pathlib.Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    given = scattered(tmp_path, VALUE, a, b)
    (name,) = given["held"]
    with reading_from(a, b) as files:
        files.host = 0
        store = view(files, a, **given)
        np.testing.assert_array_equal(restored(store, a)["w"], VALUE["w"])
        assert store.read_bytes[Place.HERE] > 0 and not store.read_bytes[Place.PEERS] and not caplog.text
        with caplog.at_level(logging.INFO, "treering"):
            store.log_reads()
        assert "step-1: read 2.80 MB from this host, 0 B from peers, 0 B from the remote tier" in caplog.text
        caplog.clear()
        damage_file(a / "step-1" / name, damage)
        for mmap in (True, False):
            store = view(files, a, **given)
            np.testing.assert_array_equal(restored(store, a, mmap=mmap)["w"], VALUE["w"])
            assert store.read_bytes[Place.PEERS] > 0
            assert "this host" in caplog.text
            caplog.clear()
        if not damage.startswith("flipped"):
            found = restored(view(files, a, **given), a, mmap=True, verify=False)
            np.testing.assert_array_equal(found["w"], VALUE["w"])


class FewPeers:
    """Peers of which some cannot be reached. `asked` are the processes that were asked."""

    index = host = 9

    def __init__(self, *ended: int):
        self.ended, self.asked = set(ended), list[int]()

    def read_into(self, process: int, *args: Any, **options: Any) -> None:
        self.asked.append(process)
        if process in self.ended:
            raise PeerError(f"process {process} has ended")


def test_a_peer_that_ended_is_asked_once(tmp_path: pathlib.Path) -> None:
    """After an error, a peer is asked again only if it alone has a file. A file that failed may be read again."""
    asked = FewPeers(0)
    held = {name: HeldFile(4, holders) for name, holders in {"a": [1, 0], "b": [1, 0], "c": [0]}.items()}
    store = view(asked, tmp_path, small={}, held=held)
    a, b, c = (store.open(f"{tmp_path}/step-1/{name}") for name in held)
    assert [a.read(0, 4), a.read(0, 4), b.read(0, 4)] == [bytes(4)] * 3 and asked.asked == [0, 1, 1, 1]
    for _ in range(2):
        with pytest.raises(PeerError, match="process 0 has ended"):
            c.read(0, 4)
    asked.ended.clear()
    assert c.read(0, 4) == bytes(4) and asked.asked[4:] == [0, 0, 0]


def test_a_file_that_no_host_has_is_missing(tmp_path: pathlib.Path) -> None:
    """The store lists the files that exist anywhere. A missing one is an error when the checkpoint is opened."""
    here = tmp_path / "here"
    given = scattered(tmp_path, VALUE, tmp_path / "a")
    (name,) = given["held"]
    with reading_from() as files:
        folder = str(here / "step-1")
        assert view(files, here, **given).list(folder) == [name, "treering.json"]
        store = view(files, here, small=given["small"], held={name: HeldFile(given["held"][name].nbytes, [])})
        assert store.list(folder) == ["treering.json"]
        assert store.stat(f"{folder}/{name}") is None and store.stat(f"{folder}/other") is None
        assert store.stat(folder).is_folder
        with pytest.raises(CorruptError, match=f"{name}: expected an array file, found nothing"):
            restored(store, here)


# Processes of a job on the hosts that `HOSTS` names, with one device each. `step` saves a checkpoint and scatters it
# over the folders of the hosts. `opened` opens it in a process.
JOB = """
import posixpath, shutil, threading
from treering._processes import consistency, coordinator, peer_files
from treering._restore.checkpoint import Checkpoint
from treering.formats.treering.read import Reader
from treering.stores.nearest_copy import HeldFile, NearestCopyStore, Place
local, leader = tmp / HOSTS[INDEX], HOSTS.index(HOSTS[INDEX])
rng = np.random.default_rng(3)
tree = {"rows": rng.random((48, 50_000), np.float32), "columns": rng.integers(0, 9, (8, 24), np.int32),
        "all": rng.random(200_000, np.float32)}
first, again = mesh(4), mesh(2, 2, devices=devices[[2, 0, 3, 1]])
like = {"rows": jax.ShapeDtypeStruct((48, 50_000), np.float32, sharding=NamedSharding(again, P("y", "x"))),
        "columns": jax.ShapeDtypeStruct((8, 24), np.int32, sharding=NamedSharding(again, P(None, ("x", "y")))),
        "all": jax.ShapeDtypeStruct((200_000,), np.float32, sharding=NamedSharding(again, P()))}

def step(copies):
    '''Saves the tree and moves each array file to `copies` hosts. Returns what a view needs; the files are gone.'''
    specs = {"rows": P("x"), "columns": P(None, "x"), "all": P()}
    tr.save(tmp / "saved", {name: put(value, specs[name], first) for name, value in tree.items()})
    names = sorted(one.name for one in (tmp / "saved").iterdir() if one.name.startswith("arrays"))
    sizes = {name: (tmp / "saved" / name).stat().st_size for name in names}
    leaders = sorted({HOSTS.index(host) for host in HOSTS})
    held = {name: [leaders[(n + 1 + k) % len(leaders)] for k in range(copies)] for n, name in enumerate(names)}
    sync("saved")
    (local / "step-1").mkdir(parents=True, exist_ok=True)
    for name in names if leader == INDEX else ():
        if INDEX in held[name]:
            shutil.copy(tmp / "saved" / name, local / "step-1" / name)
    small = {"treering.json": (tmp / "saved" / "treering.json").read_bytes()}
    sync("copied")
    if INDEX == 0:
        shutil.rmtree(tmp / "saved")
    return small, {name: HeldFile(sizes[name], held[name]) for name in names}

def joined(timeout=20):
    call = coordinator.begin_call("peers", timeout=timeout)
    with coordinator.ending_call(call):
        files = peer_files.join(call, stores.get(str(local)), str(local), leader)
        call.close()
    return files

def opened(files, step, **options):
    store = NearestCopyStore(files, stores.get(str(local)), str(local / "step-1"), *step, **options)
    return store, Checkpoint(Reader(store, str(local / "step-1")))

def is_tree(found):
    return all(same(found[name], value) for name, value in tree.items())
"""


def job(tmp: pathlib.Path, body: str, hosts: str, **options: Any) -> list[Any]:
    return run_job(tmp, JOB + textwrap.dedent(body), processes=len(hosts), devices=1, HOSTS=hosts, **options)


@pytest.mark.long
def test_any_mesh_restores_from_files_on_several_hosts(tmp_path: pathlib.Path) -> None:
    """Four processes on three hosts restore to another mesh in another order. Reading once reads each byte once."""
    body = """
    found, files = step(1), joined()
    results = []
    for read in ("each", "once"):
        store, ckpt = opened(files, found)
        with coordinator.collective_call("restore", "restoring") as call:
            attempt = lambda: (ckpt._source.identity, ckpt._restore(like, call, read=read))
            good = is_tree(consistency.attempt_on_all_processes(call, attempt)[1])
        store.log_reads()
        results.append([good, store.read_bytes[Place.HERE], store.read_bytes[Place.PEERS]])
    report([results, files._addresses])
    sync("read")
    files.close()
    """
    results = [result.report for result in job(tmp_path, body, "abbc")]
    assert all(address == [LOCALHOST, 0] or address[0] == LOCALHOST for address in results[0][1].values())
    assert sorted(results[0][1]) == ["0", "1", "3"]
    each, once = zip(*(result[0] for result in results), strict=True)
    assert all(good for good, _, _ in (*each, *once))
    nbytes = 48 * 50_000 * 4 + 8 * 24 * 4 + 200_000 * 4
    total = sum(here + peers for _, here, peers in once)
    assert nbytes <= total < 1.2 * nbytes < sum(here + peers for _, here, peers in each)
    assert all(peers for _, _, peers in each)


@pytest.mark.long
def test_a_killed_host_is_an_error_or_another_copy(tmp_path: pathlib.Path) -> None:
    """After SIGKILL of a process, the others read the second copy of its files. Without one, they raise an error."""
    body = """
    found, files = step(2), joined()
    sync("joined")
    if INDEX == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        try:
            files.read_into(3, "step-1", "absent", memoryview(bytearray(1)), 0)
        except PeerError:
            break
        except FileNotFoundError:
            time.sleep(0.01)
    begun = time.monotonic()
    def same_bytes(a, b):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    def restored(step):
        ckpt = opened(files, step)[1]
        return all(same_bytes(np.asarray(ckpt[name]), value) for name, value in tree.items())
    good = restored(found)
    single = found[0], {name: HeldFile(n, [3] if 3 in own else own) for name, (n, own) in found[1].items()}
    report([good, caught(restored, single), time.monotonic() - begun])
    while len(list(tmp.glob("report-*.json"))) < 3:
        time.sleep(0.01)
    """
    results = job(tmp_path, body, "abcd", recoverable=True, expect={3: -9})
    for result in results[:3]:
        assert result.report, result.output
        good, (kind, text), seconds = result.report
        assert good and kind == "PeerError" and seconds < 15
        assert "process 3 (127.0.0.1 port" in text and "arrays-" in text
