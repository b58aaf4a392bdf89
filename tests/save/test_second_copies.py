"""Tests saves whose array files lie on the disks of two hosts: real processes, each host with a folder of its own."""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

import treering as tr
from jobs import Result, run_job
from treering import stores
from treering.formats.treering.copy import damaged_files

JOB = """
import logging
from treering._processes import coordinator
from treering._save import save as saving
from treering._save.options import SaveOptions
from treering.formats.treering import complete_copies, host_parts, manifest
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

def save(name, tree, copies=2, rules=(), memory_limit=None):
    call = coordinator.begin_call(f"save {name}", timeout=15)
    options = SaveOptions(None, False, rules, None, memory_limit, True, False, {}, hosts=hosts, copies=copies)
    with coordinator.ending_call(call):
        pending = saving.start_save(call, folder(name), tree, saving.encode_info(None, None, None), options)
    return pending.result()

def committed(name):
    '''Returns the manifest, which only process 0 has, and the array files that it lists.'''
    data = (tmp / HOSTS[0] / name / "treering.json").read_bytes()
    return data, manifest.decode(data, name).files

def sizes(name):
    there = {disk: tmp / HOSTS[hosts.index(disk)] / name for disk in set(hosts)}
    return {disk: {f.name: f.stat().st_size for f in at.iterdir()} for disk, at in there.items() if at.exists()}

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
    files = [*files, File("treering.json", len(data), 0, identity)]
    missing = complete_copies.missing_copies(files, sizes(name), hosts).get(INDEX, [])
    sync(f"{name} is listed")
    found = complete_copies.complete_copies(store, str(folder(name)), identity, missing, fetch or read)
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


@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
def test_any_disk_can_be_lost(tmp_path: pathlib.Path, hosts: str) -> None:
    """Replicas write second copies from memory; what one host alone holds is sent after the commit."""
    found = job(
        tmp_path,
        TREES
        + """
for name, tree in TREES.items():
    holders = save(name, tree)._holders
    fetched, missing, here = complete(name)
    again = complete_copies.missing_copies(committed(name)[1], sizes(name), hosts)
    TREES[name] = [holders, fetched, missing, here, again]
report(TREES)
""",
        hosts,
    )
    disks = {process: host for process, host in enumerate(hosts)}
    for name in found[0].report:
        assert_copied(tmp_path, hosts, name)
        holders, *_ = found[0].report[name]
        assert all(one.report[name][2:4] == [one.report[name][2]] * 2 for one in found)  # All that was missing came.
        assert not any(one.report[name][4] for one in found)
        listed = files_on(tmp_path, hosts, name)
        for file, own in holders.items():
            assert len({disks[process] for process in own}) == len(own)
            assert all(file in listed[disks[process]] for process in own)
        fetched = sum(one.report[name][1] for one in found)
        if name in ("replicated", "numpy", "values"):
            assert all(len(own) == 2 for own in holders.values()), name
            assert fetched < 20_000  # the manifest alone
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
    shutil.copytree(tmp / hosts[-1] / name, left)
    for host in set(hosts) - {hosts[0], hosts[-1]}:
        shutil.copytree(tmp / host / name, left, dirs_exist_ok=True)
    (mark,) = [file for file in left.glob("part-of-*") if file.stat().st_size]
    mark.rename(left / "treering.json")
    return left
