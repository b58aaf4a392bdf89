"""Tests saves whose array files lie on the disks of two hosts: real processes, each host with a folder of its own."""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treering as tr
from jobs import Result, run_job
from treering import stores
from treering._run.tiers import host_copies
from treering.errors import SaveError
from treering.formats.treering import manifest
from treering.formats.treering.copy import damaged_files

JOB = """
import logging
from treering._processes import coordinator
from treering._save.job import start_save
from treering._save.target import SaveOptions, encode_info
from treering._run.tiers import host_copies
from treering.formats.treering import manifest
from treering.formats.treering.manifest_fields import File
lines = []
class Lines(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("treering").addHandler(Lines())
disks = sorted(set(HOSTS))
hosts = tuple(disks.index(name) for name in HOSTS)
store = stores.get(str(tmp))

def folder(name, process=INDEX):
    return tmp / HOSTS[process] / name

def save(name, tree, copies=2, rules=(), memory_limit=None, dtype=None, timeout=15, **more):
    call = coordinator.begin_call(f"save {name}", timeout=timeout)
    options = SaveOptions(None, False, rules, dtype, memory_limit, True, False, {}, hosts=hosts, copies=copies, **more)
    with coordinator.ending_call(call):
        pending = start_save(call, str(folder(name)), tree, encode_info(None, None, None), options)
    return pending.result()

def committed(name):
    '''Returns the manifest, and the array files that it lists.'''
    data = (tmp / HOSTS[0] / name / "treering.json").read_bytes()
    return data, manifest.decode(data, name).files

def sizes(name):
    there = {disk: tmp / HOSTS[hosts.index(disk)] / name for disk in set(hosts)}
    return {disk: {f.name: f.stat().st_size for f in at.iterdir()} for disk, at in there.items() if at.exists()}

def kept(name):
    '''Returns the hosts whose disks have each array file right after the save.'''
    sync(f"{name} is written")
    return {file.name: [disks[n] for n, own in sizes(name).items() if file.name in own] for file in committed(name)[1]}

def complete(name, fetch=None):
    '''Completes the copies as a job would, each process its part. Returns the bytes that this process has fetched.'''
    fetched = []
    def read(process, file, offset, into):
        with open(folder(name, process) / file, "rb") as source:
            source.seek(offset)
            assert source.readinto(into) == len(into)
        fetched.append(len(into))
    sync(f"{name} is saved")
    data, files = committed(name)
    identity = manifest.xxh3(data)
    missing = host_copies.missing_copies(files, sizes(name), hosts).get(INDEX, [])
    sync(f"{name} is listed")
    found = host_copies.complete_copies(store, str(folder(name)), identity, missing, fetch or read)
    sync(f"{name} is complete")
    return sum(fetched), [one.file.name for one in missing], found
"""

TREES = """
class Stream:
    def __init__(self): self.position = INDEX
    def __iter__(self): return self
    def __next__(self): return 1
    def get_state(self): return {"position": self.position, "buffer": b"x" * 2_000_000}
    def set_state(self, state): self.position = state["position"]
wide = np.arange(3 * 512 * 700, dtype=np.float32).reshape(512, -1)
square = mesh(2, 2)
TREES = {
    "replicated": {"w": put(wide), "b": put(np.arange(7, dtype=np.int8)), "n": 3},
    "sharded": {"w": put(wide, P("x")), "v": put(wide * 2, P("x")), "m": put(wide * 3, P(None, "x"))},
    "mixed": {"w": put(wide, P("x")), "b": put(wide * 4), "n": 3, "s": put(np.float32(5)), "t": np.arange(5)},
    "hybrid": {"w": put(wide, P("x"), square), "v": put(wide, P("y"), square), "k": put(wide[:, :8], P("x"), square)},
    "numpy": {"w": wide.copy(), "t": wide[::-1].copy(), "u": jnp.arange(300_000)},
    "values": {"n": 3, "text": "abc"},
    "iterators": {"data": Stream(), "w": put(wide)},
}
"""


FAULTS = """
import errno, re
def break_disk(breaks):
    '''Makes a disk on which the files for which `breaks` is True are full after the first MiB.'''
    class Full(stores.posix.Disk):
        def write(self, fd, data, offset):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if breaks(name) and offset + len(data) > 1 << 20:
                raise OSError(errno.ENOSPC, "no space left", name)
            super().write(fd, data, offset)
    stores.register(stores.Filesystem(Full()))
def writer_of(name):
    found = re.search("arrays-[0-9a-f]{6}-([0-9]+)-of", name)
    return found and int(found[1]) % COUNT
wide = np.arange(4 * 512 * 700, dtype=np.float32).reshape(512, -1)
"""


def job(tmp: pathlib.Path, body: str, hosts: str, **options: Any) -> list[Result]:
    """Runs a body in a job with one process for each letter of `hosts`, which names the process's host."""
    return run_job(tmp, JOB + body, processes=len(hosts), devices=1, HOSTS=list(hosts), **options)


def files_on(tmp: pathlib.Path, hosts: str, name: str) -> dict[str, dict[str, bytes]]:
    """Returns the array files that each disk has."""
    return {host: {f.name: f.read_bytes() for f in (tmp / host / name).glob("arrays-*")} for host in set(hosts)}


def assert_copied(tmp: pathlib.Path, hosts: str, name: str) -> None:
    """Asserts that two disks have each file, bit for bit, and that any one disk can be lost."""
    disks = files_on(tmp, hosts, name)
    manifest_bytes = (tmp / hosts[0] / name / "treering.json").read_bytes()
    listed = {file["name"] for file in json.loads(manifest_bytes)["files"]}
    for file in listed:
        there = [own[file] for own in disks.values() if file in own]
        assert len(there) == 2 and there[0] == there[1], (name, file, len(there))
    assert listed == set().union(*disks.values())
    for lost in disks:
        left = tmp / "left"
        left.mkdir()
        (left / "treering.json").write_bytes(manifest_bytes)
        for disk, own in disks.items():
            for file, data in own.items() if disk != lost else ():
                (left / file).write_bytes(data)
        assert not damaged_files(stores.get(str(left)), str(left))
        shutil.rmtree(left)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_any_disk_can_be_lost(tmp_path: pathlib.Path, hosts: str) -> None:
    """Replicas write second copies from memory; what one host alone holds is sent after the commit."""
    found = job(
        tmp_path,
        TREES
        + """
for name, tree in TREES.items():
    save(name, tree)
    holders = kept(name)
    fetched, missing, here = complete(name)
    again = host_copies.missing_copies(committed(name)[1], sizes(name), hosts)
    TREES[name] = [holders, fetched, missing, here, again]
report(TREES)
""",
        hosts,
    )
    for name in found[0].report:
        assert_copied(tmp_path, hosts, name)
        holders, *_ = found[0].report[name]
        assert all(one.report[name][2:4] == [one.report[name][2]] * 2 for one in found)  # All that was missing came.
        assert not any(one.report[name][4] for one in found)
        listed = files_on(tmp_path, hosts, name)
        for file, own in holders.items():
            assert own and all(file in listed[host] for host in own)
        fetched = sum(one.report[name][1] for one in found)
        if name in ("replicated", "numpy", "values"):
            assert all(len(own) == 2 for own in holders.values()), name
            assert fetched == 0
        elif name == "hybrid" and hosts == "abcd":
            assert all(len(own) == 2 for own in holders.values()), name
        elif name == "iterators":
            assert 8_000_000 < fetched < 8_100_000  # the states of the four processes
        elif name == "mixed":
            sent = [len(own) == 1 for own in holders.values()]
            assert any(sent) and not all(sent)
            assert fetched < 1.1 * 4 * 512 * 2100
        elif name == "sharded":
            assert all(len(own) == 1 for own in holders.values())
    found_again = tr.restore(_left(tmp_path, hosts, "mixed"))
    assert np.array_equal(found_again["b"], 4 * np.arange(3 * 512 * 700, dtype=np.float32).reshape(512, -1))


def _left(tmp: pathlib.Path, hosts: str, name: str) -> pathlib.Path:
    """Returns a folder with the files of a step that are left when the disk of process 0 is lost."""
    left = tmp / f"left-{name}"
    for host in set(hosts) - {hosts[0]}:
        shutil.copytree(tmp / host / name, left, dirs_exist_ok=True)
    return left


@pytest.mark.slow
def test_a_second_copy_that_fails_does_not_fail_the_save(tmp_path: pathlib.Path) -> None:
    """A full disk, or replicas that differ, cost a second copy and not the save. The transfer mends both."""
    found = job(
        tmp_path,
        FAULTS
        + """
def outcome(name):
    own, lines[:] = lines[:], []
    return own, sorted(f.name for f in folder(name).glob("arrays-*"))
break_disk(lambda name: INDEX == 1 and writer_of(name) not in (1, None))
class Maker:
    def wait_for_room(self, problem, step, check):
        raise AssertionError("a second copy waits for room")
save("full", {"w": put(wide)}, room_maker=Maker())
found = {"full": [kept("full"), *outcome("full")]}
stores.register(stores.Filesystem(stores.posix.Disk()))
differs = put(wide + (INDEX == 2))
save("differs", {"w": differs})
found["differs"] = [kept("differs"), *outcome("differs")]
save("rules", {"w": put(wide)}, rules=[tr.rules.rename("w", "v")])
found["rules"] = [kept("rules"), *outcome("rules")]
save("one", {"w": put(wide)}, copies=1)
found["one"] = [kept("one"), *outcome("one")]
for name in found:
    complete(name)
break_disk(lambda name: INDEX == 1 and writer_of(name) == 1)
found["fails"] = [{}, caught(save, "fails", {"w": put(wide)}), outcome("fails")[1]]
report(found)
""",
        "abcd",
    )
    single = {name: [len(own) for own in found[0].report[name][0].values()].count(1) for name in found[0].report}
    assert single == {"full": 1, "differs": 2, "rules": 4, "one": 4, "fails": 0}
    for name, process, line in (("full", 1, "no space left"), ("differs", 2, "different values"), ("differs", 3, "")):
        _, lines, files = found[process].report[name]
        assert any("this second copy" in one and line in one for one in lines), lines
        assert len(files) == 1  # The failed copy is gone.
        assert not any("second copy" in one for one in found[0].report[name][1])
    for name in ("full", "differs", "rules", "one"):
        assert_copied(tmp_path, "abcd", name)
    for one in found:
        assert one.report["fails"][1][0] == "SaveError" and one.report["fails"][2] == []


@pytest.mark.slow
def test_copies_keep_the_memory_limit(tmp_path: pathlib.Path) -> None:
    """The pieces of second copies are staged within the memory limit too."""
    found = job(
        tmp_path,
        FAULTS
        + """
from treering._pytree.staged_supply import StagedSupply
held = [0]
reserve = StagedSupply._reserve
def watched(self, nbytes):
    found = reserve(self, nbytes)
    held.append(self._held_bytes)
    return found
StagedSupply._reserve = watched
tree = {f"{kind}{n}": make(wide[:64]) for n in range(12) for kind, make in {"j": put, "n": np.copy}.items()}
save("limited", tree, memory_limit=400_000, dtype="bfloat16")
holders = kept("limited")
complete("limited")
report([holders, max(held), len(held)])
""",
        "aabb",
    )
    for one in found:
        assert one.report[1] <= 400_000 and one.report[2] > 12
    assert all(len(own) == 2 for own in found[0].report[0].values())
    assert_copied(tmp_path, "aabb", "limited")


@pytest.mark.slow
def test_copies_after_kills(tmp_path: pathlib.Path) -> None:
    """Kill -9 while a copy is written, and while one is fetched: nothing wrong stays, and the next job continues."""
    anyhow = dict.fromkeys(range(4))
    body = FAULTS + 'tree = {"w": put(wide), "v": put(wide, P("x"))}\n'
    killed = job(
        tmp_path,
        body
        + """
if INDEX == 1:
    die_at("write", "-00004-of-")  # the second copy of the second file of process 0
save("step", tree, timeout=3)
""",
        "abcd",
        recoverable=True,
        expect=anyhow,
    )
    assert killed[1].code == -9 and not list(tmp_path.glob("*/step/treering.json"))
    killed = job(
        tmp_path,
        body
        + """
save("step", tree)
def deadly(process, file, offset, into):
    if offset:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(folder("step", process) / file, "rb") as source:
        source.readinto(into)
if INDEX == 2:
    data, files = committed("step")
    missing = host_copies.missing_copies(files, sizes("step"), hosts)
    host_copies.complete_copies(store, str(folder("step")), manifest.xxh3(data), missing[2], deadly)
""",
        "abcd",
        recoverable=True,
        expect=anyhow,
    )
    assert killed[2].code == -9
    assert list((tmp_path / "c/step").glob(".arrays-*.tmp"))
    report = job(tmp_path, 'fetched, missing, here = complete("step")\nreport([missing, here])', "abcd")
    assert all(one.report[0] == one.report[1] for one in report) and any(one.report[0] for one in report)
    assert not list(tmp_path.glob("*/step/.*"))
    committed = {file["name"] for file in json.loads((tmp_path / "a/step/treering.json").read_bytes())["files"]}
    for file in tmp_path.glob("*/step/arrays-*"):  # Those of the killed save are left to the rounds of the run.
        if file.name not in committed:
            file.unlink()
    assert_copied(tmp_path, "abcd", "step")


@pytest.mark.long
@pytest.mark.whole
def test_fetched_bytes_are_verified(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A block that arrives damaged is fetched once more. Of a file that stays damaged nothing remains."""
    tr.save(tmp_path / "a", {"w": np.arange(3_000_000, dtype=np.float32)})
    store, data = stores.get(str(tmp_path)), (tmp_path / "a/treering.json").read_bytes()
    identity, (file,) = manifest.xxh3(data), manifest.decode(data, "a").files
    original = (tmp_path / "a" / file.name).read_bytes()
    damage: list[int] = []
    peak = 0

    def fetch(process: int, name: str, offset: int, into: memoryview) -> None:
        nonlocal peak
        assert (process, name) == (3, file.name)
        into[:] = original[offset : offset + len(into)]
        peak = max(peak, len(into))
        if damage and offset <= damage[0] < offset + len(into):
            into[damage.pop(0) - offset] ^= 1

    def completed(to: str, check: Callable[[], None] = lambda: None) -> list[str]:
        (tmp_path / to).mkdir(exist_ok=True)
        (tmp_path / to / "treering.json").write_bytes(data)
        missing = host_copies.missing_copies([file], {1: {file.name: file.size}}, [0, 0, 0, 1])
        assert missing == {0: [(file, 3)]}
        return host_copies.complete_copies(store, str(tmp_path / to), identity, missing[0], fetch, check)

    for n, at in enumerate((5, file.header + 5, file.size - 1)):
        damage[:] = [at]
        assert completed(f"once-{n}") == [file.name] and not damage
        assert (tmp_path / f"once-{n}" / file.name).read_bytes() == original
        damage[:] = [at, at]
        assert completed(f"twice-{n}") == [] and not damage
        assert [one.name for one in (tmp_path / f"twice-{n}").iterdir()] == ["treering.json"]
        assert "found others at offset" in caplog.text
        caplog.clear()
        assert completed(f"twice-{n}") == [file.name]
    assert peak == 4 << 20

    def check() -> None:
        raise SaveError("stop")

    with pytest.raises(SaveError, match="stop"):
        completed("stopped", check)
    assert caplog.text == "" and completed("stopped") == [file.name]
    assert completed("once-0", lambda: pytest.fail("nothing is missing")) == [file.name]
