"""Runs whose local tier is a separate disk on each host: all hosts upload to one remote tier.

A host is one or two processes with their own `local=`. They never look at the `local=` of another host.
"""

import os
import pathlib
import re
import shutil
import signal
import types
from typing import Any, cast

import numpy as np
import pytest

import treering as tr
from host_jobs import ANY, SIZE, job
from sampling import sample_points
from treering import stores
from treering._run.tiers import exchange
from treering.errors import NotFoundError, PeerError
from treering.formats.treering import manifest


def _arrays(path: pathlib.Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("arrays-*"))


def _check(remote: pathlib.Path | str, step: int) -> None:
    tree = tr.restore(remote, step=step)
    assert tree["n"] == step and (tree["b"] == step).all() and (tree["h"] == step).all()
    assert np.array_equal(tree["w"], np.arange(SIZE, dtype=np.float32) + step)


@pytest.mark.long
def test_each_host_saves_on_its_own_disk(tmp_path: pathlib.Path, bucket: str) -> None:
    """A host's arrays are only on its disk, the bucket gets all of them, and a restore reads the local files."""
    body = """
opened = []
from treering.stores.filesystem import Filesystem
class ObservedSource(Filesystem):
    def open(self, path, **options):
        opened.append(path)
        return super().open(path, **options)
stores.register(ObservedSource(stores.posix.Disk()))
ckpts = run(keep=tr.keep.last(2))
with ckpts:
    begun = ckpts.restore(template) if AGAIN else None
    first = (ckpts.restored_step or 0) + 1
    read = [path for path in opened if "arrays-" in path]
    for step in range(first, first + 3):
        ckpts.save(step, state(step), metrics={"loss": 1 / step})
    steps = ckpts.steps
report([ckpts.restored_step, begun is None or is_state(begun, ckpts.restored_step), read, ckpts.steps, Lines.text])
"""
    hosts = {name: tmp_path / f"local-{name}" for name in "ab"}
    for again in (False, True):
        last = 6 if again else 3
        results = job(tmp_path, body, remote=bucket, AGAIN=again)
        for n, result in enumerate(results):
            restored, good, read, steps, lines = result.report
            assert (
                restored == (3 if again else None) and good and set(steps) == {*([3] if again else []), last - 1, last}
            )
            # A process opens files on its own disk, and never those on another host's disk.
            assert all(path.startswith(str(hosts["aabb"[n]])) for path in read)
            assert n or any("the hosts have disks of their own, 2 in all" in line for line in lines)
        assert any(result.report[2] for result in results) == again
        assert tr.verify(bucket).ok
        for step in (last - 1, last):
            _check(bucket, step)
        parts = [_arrays(path) for path in hosts.values()]
        kept = {f"step-{step:08}" for step in ([3, 6] if again else [3])}
        assert all({os.path.dirname(file) for file in part} == kept for part in parts)
        assert not set(parts[0]) & set(parts[1]) and len(parts[0]) == len(parts[1]) == 2 * len(kept)
        assert all(len(list(host.rglob("treering.json"))) == len(kept) for host in hosts.values())
    assert tr.open(bucket).metrics == {"loss": 1 / 6}


KILLED_EARLY = """
with run() as ckpts:
    save(ckpts, 1)
ckpts = run(upload_limit=1)
save(ckpts, 2, 3)
assert tr.steps(remote) == [1]
sync("saved")
os.kill(os.getpid(), signal.SIGKILL)
"""

GOES_ON = """
ckpts = run()
sharding = {"w": template["w"].sharding, "b": template["b"].sharding, "h": None, "n": None}
init = lambda: {"w": jnp.zeros(SIZE), "b": jnp.zeros(300_000), "h": HELD, "n": 0}
tree, step = ckpts.restore_or_init(init, sharding=sharding)
good = step and is_state(tree, step)
after = tr.steps(remote)
save(ckpts, step + 1)
ckpts.close()
report([step, good, after, tr.steps(remote), Lines.text])
"""


@pytest.mark.long
def test_memory_of_all_hosts_is_freed_when_the_job_ends_well(tmp_path: pathlib.Path) -> None:
    """Steps that `keep` does not want are freed too. The next job, with process 0 on another host, continues."""
    body = """
ckpts = run(keep=tr.keep.last(1), keep_local=None, local_copies=2, timeout=4)
begun = ckpts.restore(template) if FIRST > 1 else None
save(ckpts, FIRST, FIRST + 1)
if FAILS and INDEX:
    os._exit(0)  # The other process cannot end well.
if FAILS:
    ended = caught(ckpts.close)
else:
    ended = ckpts.finish()
report([ckpts.restored_step, begun is None or is_state(begun, FIRST - 1), ended and ended[0], Lines.text])
"""
    for first, hosts, fails in ((1, "aab", False), (3, "baa", True), (5, "aab", False)):
        results = job(tmp_path, body, hosts=hosts, in_memory=True, FIRST=first, FAILS=fails, recoverable=fails)
        there = [tr.steps(tmp_path / f"local-{host}") for host in "ab"]
        assert [bool(steps) for steps in there] == [fails, fails]
        for result in results[: 1 if fails else None]:
            restored, good, ended, lines = result.report
            assert good and restored == (first - 1 or None) and bool(ended) == fails
            assert not any("archived" in line or "ignored" in line for line in lines)
    assert any("steps removed from memory" in line for line in results[0].report[3])
    assert all(os.listdir(tmp_path / f"local-{host}") for host in "ab")
    _check(tmp_path / "remote", 6)


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["bbaa", "abab"])
def test_next_job_uploads_and_restores_after_kill(tmp_path: pathlib.Path, hosts: str) -> None:
    """The next job, on any order of hosts, restores the steps that a killed job did not upload, and uploads them."""
    job(tmp_path, KILLED_EARLY, expect=ANY, recoverable=True)
    for result in job(tmp_path, GOES_ON, hosts=hosts):
        step, good, after, last, _ = result.report
        assert step == 3 and good and after == [1] and last == [1, 2, 3, 4]
    assert tr.verify(tmp_path / "remote").ok
    for step in (1, 2, 3, 4):
        _check(tmp_path / "remote", step)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_host_is_lost_with_its_disk(tmp_path: pathlib.Path, lost: str) -> None:
    """The next job restores an uploaded step, archives the incomplete steps on the remaining disk, and logs them."""
    job(tmp_path, KILLED_EARLY, expect=ANY, recoverable=True)
    shutil.rmtree(tmp_path / f"local-{lost}")
    results = job(tmp_path, GOES_ON)
    for result in results:
        step, good, after, last, _ = result.report
        assert step == 1 and good and after == [1] and last == [1, 2]
    if lost == "b":  # Process 0's disk has the manifests.
        assert any("steps 2, 3 are ignored: some of their files" in line for line in results[0].report[-1])
        assert len(list(tmp_path.glob("local-a/rewound-1/step-*/treering.json"))) == 2
    _check(tmp_path / "remote", 2)
    assert tr.verify(tmp_path / "remote").ok


BREAKS_OFF = """
with run() as ckpts:
    save(ckpts, 1)
if INDEX == VICTIM and AT[0] == "copying":
    from treering._run.tiers import host_copies
    host_copies.complete_copies = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
elif INDEX == VICTIM:
    die_at(*AT)
ckpts = run(local_copies=COPIES)
for step in (2, 3):
    ckpts.save(step, state(step)).result()
    (tmp / f"committed-{INDEX}").write_text(str(step))
ckpts.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_parts_of_a_lost_disk_are_read_remotely(tmp_path: pathlib.Path, lost: str) -> None:
    """The remaining disk is read, and the remote tier only for what it lacks. A disk may lack the manifest too."""
    job(tmp_path, "with run() as ckpts: save(ckpts, 1)", hosts="ab")
    shutil.rmtree(tmp_path / f"local-{lost}")
    body = """
ckpts = run()
found = [is_state(ckpts.restore(template), 1), is_state(ckpts.restore(template, step=1), 1)]
report([found, Lines.text])
ckpts.close()
"""
    results = job(tmp_path, body, hosts="ab")
    for result in results:
        found, lines = result.report
        assert found == [True, True] and not any("damaged" in line for line in lines)
    reads = [line for result in results for line in result.report[1] if "from peers" in line]
    assert len(reads) >= 2 and all(", 0 B from the remote tier" not in line for line in reads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "copies", "victim", "at", "hosts"),
    sample_points(
        [
            ("ab", 1, 1, ("sync", "local-b/step-00000003"), "ba"),
            ("ab", 1, 0, ("link", "local-a/step-00000003/treering.json"), "ab"),
            ("ab", 1, 1, ("write", "remote/step-00000002"), "ba"),
            ("ab", 1, 0, ("link", "remote/step-00000003/treering.json"), "ba"),
            ("ab", 1, 0, ("rename", "local-a/journal.json"), "ba"),
            ("ab", 1, 1, ("unlink", "local-b/step-00000002"), "ba"),
            ("aabc", 1, 3, ("sync", "local-c/step-00000003"), "cba"),
            ("abc", 2, 1, ("copying", ""), "bcaa"),
            ("abc", 2, 2, ("write", "remote/step-00000002"), "cba"),
            ("aabc", 2, 0, ("link", "local-a/step-00000003/treering.json"), "bca"),
        ]
    ),
)
def test_a_process_is_killed_anywhere(
    tmp_path: pathlib.Path, first: str, copies: int, victim: int, at: tuple[str, str], hosts: str
) -> None:
    """A step that any process saw committed is restored, and all remote steps are complete.

    The process is killed in a save, in the copying to second disks, or in an upload. The next job has other ranks, and
    perhaps more or fewer processes.

    The process is killed by SIGKILL, and the remote tier is a disk. `buckets.scenarios_hosts` tries all other moments
    with a double of a bucket.
    """
    names = {"VICTIM": victim, "AT": at, "COPIES": copies}
    results = job(tmp_path, BREAKS_OFF, hosts=first, expect=ANY, recoverable=True, **names)
    assert results[victim].code == -signal.SIGKILL, results[victim].output
    committed = [int(file.read_text()) for file in tmp_path.glob("committed-*")]
    results = job(tmp_path, GOES_ON.replace("run()", f"run(local_copies={copies})"), hosts=hosts)
    for result in results:
        step, good, after, last, _ = result.report
        assert good and step >= max(committed, default=1) and after[-1] <= step and last[-1] == step + 1
    assert tr.verify(tmp_path / "remote").ok
    for step in tr.steps(tmp_path / "remote"):
        _check(tmp_path / "remote", step)
    # Nothing is left of the killed save.
    assert {os.path.dirname(file) for name in "abc" for file in _arrays(tmp_path / f"local-{name}")} <= {
        f"step-{step:08}" for step in (results[0].report[0], results[0].report[0] + 1)
    }


MANAGED = """
with run(keep_local=None) as ckpts:
    save(ckpts, 1, 2, 3)
    ckpts.pin(1)
    undeletable = caught(ckpts.delete, 1)
    ckpts.delete(2)
    sync("deleted")
    deleted = ckpts.steps
    save(ckpts, 3, on_exists="overwrite")
    exists = caught(ckpts.save, 3, state(3))
    save(ckpts, 4, 5)
    ckpts.rewind(4)
    sync("rewound")
    back = ckpts.restore(template)
    good = is_state(back, 4)
    save(ckpts, 6, 7)
    older = ckpts.restore(template, step=6)
    good = good and is_state(older, 6)
    save(ckpts, 8)
    ckpts.finish()
report([undeletable, deleted, exists, good, ckpts.steps])
"""


@pytest.mark.long
def test_steps_are_managed(tmp_path: pathlib.Path) -> None:
    """Every disk deletes the deleted steps, and archives the archived ones."""
    for result in job(tmp_path, MANAGED, hosts="ab"):
        undeletable, deleted, exists, good, steps = result.report
        assert undeletable[0] == "MismatchError" and deleted == [1, 3] and exists[0] == "ExistsError"
        assert good and steps == [1, 3, 4, 6, 8]
    remote = tmp_path / "remote"
    assert tr.verify(remote).ok and tr.steps(remote) == [1, 3, 4, 6, 8] and (remote / "finished").exists()
    parts = [_arrays(tmp_path / f"local-{name}") for name in "ab"]
    folders = [sorted({os.path.dirname(file) for file in part}) for part in parts]
    assert folders[0] == folders[1]
    assert folders[0] == [
        "rewound-1/step-00000005",
        "rewound-2/step-00000007",
        *(f"step-{step:08}" for step in (1, 3, 4, 6, 8)),
    ]
    assert not set(parts[0]) & set(parts[1])


@pytest.mark.long
def test_a_change_that_fails_on_one_disk_is_made_later(tmp_path: pathlib.Path) -> None:
    """A disk that cannot delete or archive a step now does it in the next round. No process waits for another."""
    body = """
from treering._run.tiers.journal import Journal
def full(*_): raise OSError(28, "No space left on device")
def failing(call, *args, **options):
    kept = Journal.retire
    if INDEX == failing.index: Journal.retire = full
    try: return caught(call, *args, **options)
    finally: Journal.retire = kept
failing.index = 1
ckpts = run(keep_local=None)
save(ckpts, 1, 2, 3, 4)
changed = [failing(ckpts.delete, 1), failing(ckpts.rewind, 3)]
save(ckpts, 5)
ckpts.restore(template, step=3)
refused = failing(save, ckpts, 6)
ckpts.restore(template)
save(ckpts, 6)
failing.index = 0
changed.append(failing(ckpts.delete, 2))
ckpts.close()
report([changed, refused, Lines.text])
"""
    for n, result in enumerate(job(tmp_path, body, hosts="ab")):
        changed, refused, lines = result.report
        assert changed == [None, None, None] and refused[0] == "SaveError"
        assert sum("step-00000002: deleted without a record: " in line for line in lines) == 1 - n
        assert sum("failed on this disk; the next upload tries again" in line for line in lines) == 2 * n
        assert not any("uploading steps failed" in line or "nothing heard" in line for line in lines)
    folders = [sorted({os.path.dirname(file) for file in _arrays(tmp_path / f"local-{host}")}) for host in "ab"]
    assert folders[0] == folders[1] and "step-00000001" not in folders[0] and "step-00000004" not in folders[0]


@pytest.mark.long
def test_a_damaged_part(tmp_path: pathlib.Path) -> None:
    """A damaged step is not uploaded. Its remote copy is restored, or an earlier step if it has none."""
    job(tmp_path, KILLED_EARLY, hosts="ab", expect={0: None, 1: None}, recoverable=True)
    _flip(next(tmp_path.glob("local-b/step-00000003/arrays-*")))
    for result in job(tmp_path, GOES_ON, hosts="ab"):
        step, good, after, last, _ = result.report
        assert step == 2 and good and after == [1] and last == [1, 2, 3]
    body = "ckpts = run()\nreport([is_state(ckpts.restore(template), 3), Lines.text])\nckpts.close()"
    _flip(next(tmp_path.glob("local-b/step-00000003/arrays-*")))
    results = job(tmp_path, body, hosts="ab")
    assert all(result.report[0] for result in results)
    assert any("taking the copy of step 3 at" in line for result in results for line in result.report[1])


@pytest.mark.long
def test_step_with_missing_remote_part_is_uploaded_again(tmp_path: pathlib.Path) -> None:
    """A step whose remote files are missing is uploaded again."""
    job(tmp_path, "with run() as ckpts: save(ckpts, 1, 2)", hosts="ab")
    for file in tmp_path.glob("remote/step-00000002/arrays-*-00000-*"):
        file.unlink()
    for result in job(tmp_path, GOES_ON, hosts="ab"):
        step, good, after, last, _ = result.report
        assert step == 2 and good and after == [1, 2] and last == [1, 2, 3]
    assert tr.verify(tmp_path / "remote").ok


def _flip(file: pathlib.Path) -> None:
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.long
def test_changes_during_slow_upload_and_bad_calls(tmp_path: pathlib.Path) -> None:
    """`delete` does not wait for a slow upload. Wrong uses of a local tier raise errors that name the mistake."""
    body = """
ckpts = run(upload_limit=1)
save(ckpts, 1, 2)
until(lambda: ckpts._directory.busy)
begun = time.monotonic()
ckpts.delete(1)
took = time.monotonic() - begun
tree = {**state(3), "w": put(np.zeros((4, 6), np.float32), P("x"))}
across = caught(ckpts.save, 3, tree, rules=[tr.rules.transpose("w", (1, 0))])
again = caught(ckpts.wait)
save(ckpts, 4)
ckpts.close()
other = caught(tr.Checkpointer(tmp / "another", local=local, timeout=15).save, 1, state(1))
report([took, across, again, other, tr.steps(remote)])
"""
    for result in job(tmp_path, body, hosts="ab"):
        took, across, again, other, steps = result.report
        assert took < 10 and steps[-2:] == [2, 4]
        assert other[0] == "MismatchError" and "expected a directory for" in other[1]
        assert across == again and across[0] == "UnsupportedError" and "hosts' disks are not shared" in across[1]


KILLED_AT_ONCE = """
ckpts = run(upload_limit=1)
save(ckpts, 1, 2)
sync("saved")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["ba", "cab"])
def test_the_first_job_of_all_is_killed(tmp_path: pathlib.Path, hosts: str) -> None:
    """The job is killed before any upload. Process 0 of the next job is on another host, or on a new one."""
    job(tmp_path, KILLED_AT_ONCE, hosts="ab", expect=ANY, recoverable=True)
    for result in job(tmp_path, GOES_ON, hosts=hosts):
        step, good, after, last, _ = result.report
        assert step == 2 and good and not after and last == [1, 2, 3]
    assert tr.verify(tmp_path / "remote").ok


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["cb", "bc", "ca", "b"])
def test_nothing_was_copied_and_a_host_is_gone(tmp_path: pathlib.Path, hosts: str) -> None:
    """The run does not start over, and the remaining parts stay until the missing host is back."""
    job(tmp_path, KILLED_AT_ONCE, hosts="ab", expect=ANY, recoverable=True)
    body = """
if COUNT == 1:  # A single process treats the directory as its complete local tier.
    save(run(), 7)
    os._exit(0)
error = caught(run().restore_or_init, lambda: {"w": jnp.zeros(SIZE), "b": jnp.zeros(300_000), "h": HELD, "n": 0})
report([error, Lines.text])
"""
    results = job(tmp_path, body, hosts=hosts)
    if hosts != "b":
        assert all(result.report[0][0] == "CorruptError" for result in results), results[0].report
        assert all("restart with the hosts that have them" in result.report[0][1] for result in results)
        assert any("steps 1, 2 are ignored: some of their files" in line for line in results[0].report[1])
        for result in job(tmp_path, GOES_ON, hosts="ab"):
            assert result.report[:2] == [2, True]
    assert list(tmp_path.glob("local-b/**/step-00000002/arrays-*"))


@pytest.mark.long
def test_a_disk_of_an_earlier_branch(tmp_path: pathlib.Path) -> None:
    """A host that was away while other hosts continued brings back no step of the abandoned branch."""
    body = """
with run() as ckpts:
    save(ckpts, *STEPS)
if LOSE:
    ckpts = run(upload_limit=1)
    save(ckpts, *LOSE)
    sync("saved")  # Process 0 does not wait until its peers have written the manifest.
    os.kill(os.getpid(), signal.SIGKILL)
report(0)
"""
    job(tmp_path, body, hosts="ab", expect=ANY, recoverable=True, STEPS=[1, 2, 3], LOSE=[4, 5, 6])
    again = "ckpts = run()\nckpts.restore(template)\nsave(ckpts, 4)\nckpts.close()\nreport([ckpts.steps, Lines.text])"
    for result in job(tmp_path, again, hosts="cd"):
        assert result.report[0] == [1, 2, 3, 4]
    results = job(tmp_path, GOES_ON, hosts="dcab")
    for result in results:
        step, good, after, last, _ = result.report
        assert step == 4 and good and after == [1, 2, 3, 4] and last == [1, 2, 3, 4, 5]
    assert list(tmp_path.glob("local-a/rewound-1/step-00000006/arrays-*"))
    assert list(tmp_path.glob("local-b/rewound-1/step-00000006/arrays-*"))
    assert tr.verify(tmp_path / "remote").ok


@pytest.mark.long
def test_local_only_step_is_restored_by_number(tmp_path: pathlib.Path) -> None:
    """A local step that the remote policy does not keep is restored from the disks if `step=` names it."""
    body = """
with run(keep=tr.keep.last(1), keep_local=None, upload_limit=1) as ckpts:
    save(ckpts, 1, 2)
    ckpts.restore(template)
    save(ckpts, 3)
    found = [ckpts.steps, ckpts.latest_step, ckpts.uncopied]
    opened = caught(ckpts.open, 2)
    older = ckpts.restore(template, step=1)
    good = is_state(older, 1)
    newest = is_state(ckpts.restore(template), 3)
report([found, opened, good, newest, Lines.text])
"""
    for result in job(tmp_path, body, hosts="ab"):
        found, opened, good, newest, lines = result.report
        assert found == [[1, 2, 3], 3, [1, 2, 3]] and good and newest
        assert opened[0] == "NotFoundError" and "restore it in all processes together" in opened[1]
        assert not any("damaged" in line for line in lines)


RESHAPED = """
class Closed(stores.posix.Disk):
    def open(self, path, *args, **options):
        assert "/remote/" not in str(path) or "arrays-" not in str(path), path
        return super().open(path, *args, **options)
stores.register(stores.Filesystem(Closed()))
layout = jax.sharding.NamedSharding(mesh(*SHAPE), P(*SPEC))
made = jax.make_array_from_callback((SIZE,), layout, lambda at: np.zeros(SIZE, np.float32)[at])
template = {"w": made, "b": np.zeros(300_000, np.float32), "h": HELD, "n": 0}
ckpts = run()
tree = ckpts.restore(template)
full = np.arange(SIZE, dtype=np.float32) + 3
good = all(np.array_equal(one.data, full[one.index]) for one in tree["w"].addressable_shards)
good = good and np.array_equal(tree["h"], HELD + 3)
report([ckpts.restored_step, good and tree["n"] == 3 and bool((tree["b"] == 3).all()), tr.steps(remote), Lines.text])
sync("over")
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "shape", "spec"),
    [("bbaa", [4], ["x"]), ("baba", [2, 2], ["y"]), ("abc", [3], ["x"]), ("cba", [3], [None]), ("ba", [2], ["x"])],
)
def test_steps_are_restored_from_the_disks_alone(
    tmp_path: pathlib.Path, hosts: str, shape: list[int], spec: list[str | None]
) -> None:
    """Any number of processes, any mesh and any order of hosts restores a step that was not uploaded."""
    job(tmp_path, KILLED_EARLY, expect=ANY, recoverable=True)
    for result in job(tmp_path, RESHAPED, hosts=hosts, expect=ANY, recoverable=True, SHAPE=shape, SPEC=spec):
        step, good, remote, lines = result.report
        assert step == 3 and good and remote == [1]
        assert all("0 B from the remote tier" in line for line in lines if "from peers" in line)


COPIED = """
ckpts = run(upload_limit=1, local_copies=2)
save(ckpts, 1, 2)
ckpts._directory.host_changes._copies.wait()
report([one.survives for one in ckpts.copies(2)])
sync("copied")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "lost", "hosts"), [("ab", "a", "bc"), ("ab", "b", "a"), ("abcd", "c", "dba"), ("aabb", "b", "aca")]
)
def test_a_lost_host_costs_no_step(tmp_path: pathlib.Path, first: str, lost: str, hosts: str) -> None:
    """With two copies, any other hosts restore the newest step although a disk is gone and nothing was uploaded."""
    results = job(tmp_path, COPIED, hosts=first, expect=ANY, recoverable=True)
    assert results[0].report == ["the loss of any one host"]
    shutil.rmtree(tmp_path / f"local-{lost}")
    body = GOES_ON.replace("run()", "run(local_copies=2)")
    for result in job(tmp_path, body, hosts=hosts):
        step, good, after, last, _ = result.report
        assert step == 2 and good and not after and last == [1, 2, 3]
    assert tr.verify(tmp_path / "remote").ok
    for step in (1, 2, 3):
        _check(tmp_path / "remote", step)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [("ab", "ac"), ("aabb", "acc"), ("abc", "adc")])
def test_a_new_host_gets_copies_of_earlier_steps(tmp_path: pathlib.Path, first: str, second: str) -> None:
    """After a lost host, the next job copies earlier steps to a host that joins, so another host may be lost."""
    job(tmp_path, COPIED, hosts=first, expect=ANY, recoverable=True)
    shutil.rmtree(tmp_path / "local-b")
    body = """
ckpts = run(upload_limit=1, local_copies=2, keep_local=None)
ckpts.restore(template)
save(ckpts, 3)
ckpts._directory.host_changes.wait_for_copies()
report(Lines.text)
sync("copied")
os.kill(os.getpid(), signal.SIGKILL)
"""
    for result in job(tmp_path, body, hosts=second, expect=ANY, recoverable=True):
        assert not any("lacks the manifest" in line for line in result.report)
    shutil.rmtree(tmp_path / "local-a")
    for result in job(tmp_path, GOES_ON.replace("run()", "run(keep_local=None)"), hosts=second[::-1]):
        step, good, after, last, _ = result.report
        assert step == 3 and good and not after and last == [1, 2, 3, 4]
    for step in (1, 2, 3):
        _check(tmp_path / "remote", step)


@pytest.mark.long
def test_only_a_step_with_two_manifests_is_on_two_disks(tmp_path: pathlib.Path) -> None:
    """A step counts as copied if two disks have its manifest too. `close` waits for the copies."""
    body = """
from treering._run.tiers import host_copies
from treering.formats.treering import host_files
real, copy = host_files.adopt_manifest, host_copies.complete_copies
ended = []
def fail(*_): raise OSError(5, "Input/output error")
def slow(*args):
    time.sleep(1)
    copy(*args)
    ended.append(len(ckpts._directory.tier.folders()))
host_copies.complete_copies = slow
host_files.adopt_manifest = fail if INDEX else real
ckpts = run(local_copies=2)
ckpts.save(1, {"n": 1})
ckpts.wait()
ckpts._directory.host_changes.wait_for_copies()
host_files.adopt_manifest = real
save(ckpts, 2)
ckpts.close()
report([Lines.text, len(ended)])
"""
    results = job(tmp_path, body, hosts="ab")
    assert [result.report[1] > 0 for result in results] == [True, True]
    on_two = [line for line in results[0].report[0] if "is on two disks" in line]
    assert len(on_two) == 1 and "step-00000002" in on_two[0]
    assert [len(_arrays(tmp_path / f"local-{host}")) for host in "ab"] == [4, 4]


@pytest.mark.long
@pytest.mark.parametrize("damage", ["header", "block", "longer"])
def test_a_step_with_a_good_copy_is_uploaded(tmp_path: pathlib.Path, damage: str) -> None:
    """A damaged copy of a file on one disk does not keep a step from the remote tier: another disk has a good one."""
    job(tmp_path, COPIED, hosts="ab", expect=ANY, recoverable=True)
    for host, step in (("a", 1), ("b", 2)):
        for file in tmp_path.glob(f"local-{host}/step-{step:08}/arrays-*"):
            data = bytearray(file.read_bytes())
            data[20 if damage == "header" else -5] ^= 1
            file.chmod(0o644)
            file.write_bytes(data + b"more" * (damage == "longer"))
    body = """
with run(local_copies=2, keep_local=None) as ckpts:
    ckpts.restore(template)
    save(ckpts, 3)
report([tr.steps(remote), Lines.text])
"""
    for result in job(tmp_path, body, hosts="ab"):
        there, lines = result.report
        assert there == [1, 2, 3], lines
    for step in (1, 2, 3):
        _check(tmp_path / "remote", step)


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_save_waits_for_room_on_each_disk(tmp_path: pathlib.Path, hosts: str) -> None:
    """A full disk of one process stops all, until an upload has freed room there. Without one all get its error."""
    body = """
class Small(stores.posix.Disk):
    def create(self, path):
        others = {file.parent for file in pathlib.Path(local).glob("step-*/arrays-*")} - {pathlib.Path(path).parent}
        if path.startswith(str(local)) and "arrays-" in path and len(others) > 1:
            raise OSError(28, "No space left on device")
        return super().create(path)
if INDEX == 1:
    stores.register(stores.Filesystem(Small()))
with run() as ckpts:
    for step in range(1, 6):
        ckpts.save(step, state(step))
    ckpts.wait()
    found = ckpts.steps
with run(keep_local=None) as ckpts:
    ckpts.restore(template)
    save(ckpts, 6)
    error = caught(save, ckpts, 7)[1]
report([found, error, ckpts.steps])
"""
    for result in job(tmp_path, body, hosts=hosts):
        found, error, last = result.report
        assert found == [1, 2, 3, 4, 5] and last == [1, 2, 3, 4, 5, 6]
        assert f"local-{hosts[1]}/step-00000007" in error and "No space left" in error and "expected room for" in error
    assert tr.verify(tmp_path / "remote").ok


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_peer_may_remove_the_empty_folder_of_a_run(tmp_path: pathlib.Path, hosts: str) -> None:
    """At the end of the first call a process removes the folder that it made. Process 0 may be about to use it."""
    body = """
class Emptied(stores.posix.Disk):
    tried = []
    def _remove(self, name):
        if name not in self.tried:
            until(lambda: COUNT_HERE == 1 or not list(local.glob(".process-*")))
            self.tried.append(name)
            if local.exists():
                local.rmdir()
    def create(self, path):
        if path.startswith(f"{local}/.process-0") and COUNT_HERE == 1:
            self._remove("mark")
        return super().create(path)
    def open_shared(self, path):
        if path == f"{local}/writer.lock":
            self._remove("lease")
        return super().open_shared(path)
COUNT_HERE = HOSTS.count(HOST)
if INDEX == 0:
    stores.register(stores.Filesystem(Emptied()))
with run() as ckpts:
    save(ckpts, 1)
report([ckpts.steps, Emptied.tried])
"""
    first, _ = job(tmp_path, body, hosts=hosts)
    assert first.report == [[1], ["lease"] if hosts == "aa" else ["mark", "lease"]]


@pytest.mark.long
def test_other_jobs_come_between(tmp_path: pathlib.Path) -> None:
    """Jobs on some of the hosts, in any order: deleted and replaced steps and abandoned branches do not come back."""
    small = """
template = {"w": put(np.zeros(8, np.float32)), "n": 0}
def state(step): return {"w": put(np.full(8, step, np.float32)), "n": step}
"""
    body = small + "with run() as ckpts: save(ckpts, 1, 2, 3)"
    job(tmp_path, body, hosts="ab")
    body = small + "with run() as ckpts:\n  ckpts.restore(template)\n  ckpts.delete(3)\nreport(ckpts.steps)"
    assert [result.report for result in job(tmp_path, body, hosts="ba")] == [[1, 2]] * 2
    body = small + "with run() as ckpts:\n  report([ckpts.restore(template)['n'], ckpts.steps, ckpts.uncopied])"
    assert [result.report for result in job(tmp_path, body, hosts="ab")] == [[2, [1, 2], []]] * 2
    body = small + (
        "ckpts = run(upload_limit=1)\nckpts.restore(template, step=1)\n"
        "ckpts.save(2, {**state(2), 'n': 1002}).result()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    job(tmp_path, body, hosts="ba", expect=ANY, recoverable=True)
    body = small + "with run() as ckpts:\n  n = ckpts.restore(template)['n']\n  report([n, ckpts.steps])"
    assert [result.report for result in job(tmp_path, body, hosts="ab")] == [[1002, [1, 2]]] * 2


@pytest.mark.long
@pytest.mark.parametrize("between", ["a", "b"])
def test_a_job_of_one_host_comes_between(tmp_path: pathlib.Path, between: str) -> None:
    """A job on one of the hosts replaces a step. The next job on both hosts restores that one."""
    job(tmp_path, KILLED_EARLY, hosts="ab", expect=ANY, recoverable=True)
    body = """
ckpts = run()
ckpts.restore(template)
ckpts.save(2, {**state(2), "n": 1002})
ckpts.close()
report(Lines.text)
"""
    job(tmp_path, body, hosts=between)
    for step in (2, 3):  # archived or in its place, but not deleted
        assert list(tmp_path.glob(f"local-{between}/**/step-{step:08}/arrays-*"))
    body = "with run() as ckpts:\n  report([ckpts.restore(template)['n'], ckpts.steps])"
    assert [result.report for result in job(tmp_path, body, hosts="ab")] == [[1002, [1, 2]]] * 2


@pytest.mark.long
def test_another_run_takes_a_disk_between_restore_and_save(tmp_path: pathlib.Path) -> None:
    """A job whose disk has got steps of another live run changes nothing there and uploads nothing."""
    body = """
import subprocess
ckpts = run()
begun = ckpts.steps
code = "import sys, treering as tr; ckpts = tr.Checkpointer(sys.argv[1], local=sys.argv[2]); ckpts.save(7, {'n': 7}); "
code += "ckpts.wait(); print(flush=True); sys.stdin.readline(); ckpts.close()"
if INDEX == 1:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp / "other"), str(local)], **pipes)
    other.stdout.readline()
sync("the other job has saved")
name, text = caught(lambda: save(ckpts, 1))
sync("refused")
if INDEX == 1:
    other.communicate("")
report([begun, name, text, tr.steps(remote), tr.steps(tmp / "other"), tr.steps(tmp / "local-b")])
"""
    for result in job(tmp_path, body, hosts="ab"):
        begun, name, text, *steps = result.report
        assert begun == [] and name == "MismatchError" and steps == [[], [7], [7]]
        assert re.search(r"local-b: expected a directory for .*remote, found that of .*other; give each run its", text)


@pytest.mark.rare
@pytest.mark.long
def test_trees_without_arrays_and_slow_hosts(tmp_path: pathlib.Path) -> None:
    body = """
class Slow(stores.posix.Disk):
    def unlink(self, path):
        if "local-b/step-00000001/arrays" in path: time.sleep(6)
        super().unlink(path)
stores.register(stores.Filesystem(Slow()))
with run(timeout=4, keep=tr.keep.last(2)) as ckpts:
    save(ckpts, 1, 2, 3, 4)
    ckpts.save(5, {"n": 5}).result()
report([tr.steps(remote), tr.restore(remote), [line for line in Lines.text if "failed" in line]])
"""
    for result in job(tmp_path, body, hosts="ab"):
        assert result.report == [[4, 5], {"n": 5}, []]


@pytest.mark.long
@pytest.mark.parametrize("unpinned", [False, True])
def test_what_was_added_to_a_step_goes_where_its_manifest_goes(tmp_path: pathlib.Path, unpinned: bool) -> None:
    """The pin and metrics of a step that is not uploaded follow its manifest to another disk of process 0, and back."""
    body = """
ckpts = run(upload_limit=1)
save(ckpts, 1, 2, 3)
ckpts.pin(1)
if INDEX == 0:
    tr.record(local, 3, {"loss": 0.5})
sync("saved")
os.kill(os.getpid(), signal.SIGKILL)
"""
    job(tmp_path, body, hosts="ab", expect=ANY, recoverable=True)
    if unpinned:
        body = "ckpts = run(upload_limit=1)\nckpts.unpin(1)\nsync('unpinned')\nos.kill(os.getpid(), signal.SIGKILL)"
        job(tmp_path, body, hosts="ba", expect=ANY, recoverable=True)
    body = """
with run(keep=tr.keep.last(1)) as ckpts:
    back = ckpts.restore(template)
report([ckpts.restored_step, is_state(back, 3), tr.steps(remote), tr.open(remote, step=3).metrics])
"""
    for result in job(tmp_path, body, hosts="ab" if unpinned else "ba"):
        assert result.report == [3, True, [3] if unpinned else [1, 3], {"loss": 0.5}]


@pytest.mark.long
def test_nothing_is_left_on_a_disk_that_was_of_process_0(tmp_path: pathlib.Path) -> None:
    """Process 0 leaves a disk: no temporary manifest of a killed save stays there, nor files of deleted steps."""
    body = """
ckpts = run()
save(ckpts, 1)
ckpts.pin(1)
if INDEX == 0:
    tr.record(local, 1, {"loss": 0.5})
save(ckpts, 2)
if INDEX == 0:
    die_at("sync", "local-a/step-00000003")
ckpts.save(3, state(3))
ckpts.wait()
"""
    job(tmp_path, body, hosts="ab", expect=ANY, recoverable=True)
    assert list(tmp_path.glob("local-a/step-00000003/*.tmp"))
    body = """
with run() as ckpts:
    ckpts.restore(template)
    ckpts.unpin(1)
    save(ckpts, 4)
    ckpts.delete(1)
    save(ckpts, 5)
report(ckpts.steps)
"""
    for result in job(tmp_path, body, hosts="ba"):
        assert result.report == [2, 4, 5]
    assert {file.name for name in "ab" for file in tmp_path.glob(f"local-{name}/step-*")} == {
        "step-00000002",  # the restored step
        "step-00000005",
    }


KILL = "\nsync('over')\nos.kill(os.getpid(), signal.SIGKILL)"
UNCOPIED = "ckpts = run(upload_limit=1)\nsave(ckpts, 1, 2, 3)" + KILL
SAVES_ON = "with run() as ckpts:\n  ckpts.restore(template)\n  save(ckpts, ckpts.restored_step + 10)\n"


def _broken_off(tmp: pathlib.Path, body: str, hosts: str) -> None:
    job(tmp, body, hosts=hosts, expect=ANY, recoverable=True)


@pytest.mark.long
def test_the_disk_is_lost_to_which_a_pin_went(tmp_path: pathlib.Path) -> None:
    """The authoritative disk is lost. The pin is found on the disk that last had the manifests before it."""
    _broken_off(tmp_path, UNCOPIED, "ac")
    _broken_off(tmp_path, "ckpts = run(upload_limit=1)\nckpts.pin(1)" + KILL, "ca")
    _broken_off(tmp_path, "ckpts = run(upload_limit=1)\nckpts.unpin(2)" + KILL, "bca")
    shutil.rmtree(tmp_path / "local-b")
    body = "with run(keep=tr.keep.last(1)) as ckpts:\n  ckpts.restore(template)\nreport(tr.steps(remote))"
    for result in job(tmp_path, body, hosts="ca"):
        assert result.report == [1, 3]


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["b", "bc"])
def test_remaining_part_of_overwritten_step_is_archived(tmp_path: pathlib.Path, hosts: str) -> None:
    """A step is overwritten, and the host with the other part is lost: the remaining part is archived."""
    body = "with run() as ckpts: save(ckpts, 1, 2)\nckpts = run(upload_limit=1)\nsave(ckpts, 2, on_exists='overwrite')"
    _broken_off(tmp_path, body + KILL, "ab")
    results = job(tmp_path, SAVES_ON + "report(Lines.text)", hosts=hosts)
    assert any("archived in" in line for line in results[0].report)
    assert len(list(tmp_path.glob("local-b/rewound-1/step-00000002/arrays-*"))) == 1


@pytest.mark.long
def test_a_part_stays_while_the_copy_is_damaged(tmp_path: pathlib.Path) -> None:
    """A part of an uploaded step is not deleted while the remote step is damaged."""
    job(tmp_path, "with run() as ckpts: save(ckpts, 1, 2)", hosts="ab")
    file = next(tmp_path.glob("remote/step-00000002/arrays-*-00001-*"))
    file.chmod(0o600)
    file.write_bytes(b"cut short")
    job(tmp_path, SAVES_ON, hosts="b")
    assert list(tmp_path.glob("local-b/step-00000002/arrays-*"))


@pytest.mark.long
def test_a_pin_without_its_step_is_in_nobodys_way(tmp_path: pathlib.Path) -> None:
    """The pin that a disk still has of a deleted step does not apply to a new step of the same number."""
    job(tmp_path, "with run() as ckpts:\n  save(ckpts, 1, 2)\n  ckpts.pin(2)", hosts="ab")
    body = "with run() as ckpts:\n  ckpts.restore(template)\n  ckpts.unpin(2)\n  ckpts.delete(2)"
    job(tmp_path, body, hosts="ba")
    body = "with run() as ckpts:\n  ckpts.restore(template)\n  save(ckpts, 2)\nreport([ckpts.steps, ckpts.pinned])"
    for result in job(tmp_path, body, hosts="ab"):
        assert result.report == [[1, 2], []]


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["ab", "ba", "cab"])
@pytest.mark.parametrize("restores", [False, True])
def test_steps_archived_on_one_disk_are_archived_on_all(tmp_path: pathlib.Path, hosts: str, restores: bool) -> None:
    """A job is killed while some disks have archived steps. The next job archives them on all disks, deletes none."""
    body = """
if INDEX == 0:
    die_at("sync_dir", "local-a/rewound-1")
ckpts = run(upload_limit=1)
save(ckpts, 1, 2, 3, 4, 5)
ckpts.rewind(3)
"""
    _broken_off(tmp_path, body, "ab")
    saved = {name: [file for file in _arrays(tmp_path / f"local-{name}") if file[-3:] != "tmp"] for name in "ab"}
    gone_back = {
        name: {one.removeprefix("rewound-1/") for one in own if re.search("0[45]/", one)} for name, own in saved.items()
    }
    assert all(gone_back.values()) and any("rewound" in one for one in saved["a"])
    body = """
with run() as ckpts:
    if RESTORES:
        ckpts.restore(template)
        assert ckpts.restored_step == 3
    save(ckpts, 10, 11, 12)
"""
    job(tmp_path, body, hosts=hosts, RESTORES=restores)
    for name in "ab":
        assert not list(tmp_path.glob(f"local-{name}/step-0000000[45]"))
        assert set(_arrays(tmp_path / f"local-{name}/rewound-1")) == gone_back[name]


@pytest.mark.long
def test_a_rewind_that_fails_between_the_disks_deletes_nothing(tmp_path: pathlib.Path) -> None:
    """Later uploads do not delete the parts that other hosts still have to archive."""
    body = """
class Refusing(stores.posix.Disk):
    def create(self, path):
        if "remote/step-00000004" in path or "remote/step-00000005" in path:
            raise OSError(28, "no room")
        return super().create(path)
stores.register(stores.Filesystem(Refusing()))
ckpts = run(on_error="log")
save(ckpts, 1, 2, 3, 4, 5)
until(lambda: not ckpts._directory.busy)  # rounds have seen the files
if INDEX == 0:
    def refuse(step): raise OSError(5, "no answer")
    ckpts._directory.remote.archive_after = refuse
failed = caught(ckpts.rewind, 3)
sync("failed")
ckpts.delete(1)
until(lambda: not ckpts._directory.busy)
closed = caught(ckpts.close)
report([failed, closed])
"""
    for result in job(tmp_path, body, hosts="ab", expect=ANY, recoverable=True):
        assert result.report and result.report[0], result.output
    parts = {name: _arrays(tmp_path / f"local-{name}") for name in "ab"}
    gone_back = {
        name: {os.path.basename(one) for one in own if re.search("0[45]/", one)} for name, own in parts.items()
    }
    assert [len(own) for own in gone_back.values()] == [2, 2], parts
    job(tmp_path, "with run() as ckpts:\n  save(ckpts, 10, 11, 12)", hosts="ab")
    for name, own in gone_back.items():
        assert {os.path.basename(one) for one in _arrays(tmp_path / f"local-{name}/rewound-1")} == own


@pytest.mark.long
def test_run_lock_held_at_start_and_released_before_save(tmp_path: pathlib.Path) -> None:
    """Another job holds the run while this one begins: it restores a step that is only on the disks."""
    body = "with run() as ckpts: save(ckpts, 1)\nckpts = run(upload_limit=1)\nsave(ckpts, 2, 3)"
    _broken_off(tmp_path, body + KILL, "ab")
    body = """
import subprocess
hold = f"from treering import stores; import sys; at = {str(remote)!r}; lock = stores.get(at).lease(at, lambda: True);"
hold += "lock.acquire(); print('held', flush=True); sys.stdin.readline()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
if INDEX == 0:
    other = subprocess.Popen([sys.executable, "-c", hold], **pipes)
    other.stdout.readline()
sync("held")
ckpts = run()
ckpts.restore(template)
if INDEX == 0:
    other.communicate("")
sync("free")
save(ckpts, 11, 12)
ckpts.close()
report([ckpts.restored_step, tr.steps(remote)])
"""
    for result in job(tmp_path, body, hosts="ba"):
        assert result.report == [3, [1, 2, 3, 11, 12]]
    assert not list(tmp_path.glob("local-*/rewound-1"))


@pytest.mark.long
def test_upload_with_lost_reply_is_not_repeated_onto_itself(tmp_path: pathlib.Path, bucket: str) -> None:
    """A request about the remote copy fails once. Another upload would delete its files, which have the same names."""
    job(tmp_path, "with run() as ckpts: save(ckpts, 1, 2)", hosts="ab", remote=bucket)
    body = """
from treering._run.tiers import tier_reads
looks, identity = [], tier_reads.summary.identity
def flaky(store, path):
    if str(remote) in path and not looks:
        looks.append(path)
        raise TimeoutError(110, "no answer", path)
    return identity(store, path)
with run() as ckpts:
    back = ckpts.restore(template)
    tier_reads.summary.identity = flaky
report([ckpts.restored_step, is_state(back, 2), bool(looks)])
"""
    results = job(tmp_path, body, hosts="ba", remote=bucket)
    assert [result.report[:2] for result in results] == [[2, True]] * 2 and results[0].report[2]
    assert tr.verify(bucket).ok
    _check(bucket, 2)


@pytest.mark.parametrize("wrong", [1, 99])
def test_a_manifest_comes_damaged_from_another_host(tmp_path: pathlib.Path, wrong: int) -> None:
    """It is read again. The error is no `NotFoundError`, after which a job would begin a new run.

    The peers are a double, because a real connection damages nothing.
    """
    tr.save(tmp_path / "a/step-00000001", {"x": 1})
    data = (tmp_path / "a/step-00000001/treering.json").read_bytes()

    class Peers:
        reads = 0

        def read_into(self, process: int, folder: str, name: str, target: memoryview, offset: int) -> None:
            Peers.reads += 1
            target[:] = bytes(len(data)) if Peers.reads <= wrong else data

    one = object.__new__(exchange.Exchange)
    one.peers = cast(Any, Peers())
    disk, there = stores.Filesystem(stores.posix.Disk()), tmp_path / "b"
    one._local = cast(Any, types.SimpleNamespace(store=disk, path=lambda name: str(there / name)))
    if wrong == 1:
        assert one.manifest("step-00000001", manifest.xxh3(data), len(data)) == data
        return
    with pytest.raises(PeerError, match=r"expected the manifest from process 0, .* Restore again") as caught:
        one.manifest("step-00000001", manifest.xxh3(data), len(data))
    assert not isinstance(caught.value, NotFoundError)
