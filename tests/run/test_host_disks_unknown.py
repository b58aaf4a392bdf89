"""Host disks with steps that process 0 does not know (any more): they are kept, archived, or named as missing.

A step that is missing on process 0's disk may have been deleted, or a job that continued without that disk saved it.
"""

import pathlib
import shutil
from typing import Any

import pytest

import treering as tr
from host_jobs import ANY, job

KILL = "\nsync('over')\nos.kill(os.getpid(), signal.SIGKILL)"
RESTORE = "ckpts = run()\nckpts.restore(template)\n"
LINES = "[line for line in Lines.text if 'are ignored' in line or 'is ignored' in line]"

pytestmark = pytest.mark.long


def _killed(tmp: pathlib.Path, body: str, hosts: str) -> None:
    job(tmp, body + KILL, hosts, expect=ANY, recoverable=True)


def _report(tmp: pathlib.Path, body: str, hosts: str) -> Any:
    """Returns the report of process 0 of a job, whatever its exit codes."""
    first, *_ = job(tmp, body, hosts, expect=ANY, recoverable=True)
    assert first.report is not None, first.output
    return first.report


def _two_uncopied(tmp: pathlib.Path) -> None:
    """Makes a run with steps 1 and 2 only on the host disks, and step 3 uploaded."""
    body = """
class Refusing(stores.posix.Disk):
    def create(self, path):
        if "remote/step-00000001" in path or "remote/step-00000002" in path:
            raise OSError(28, "no room")
        return super().create(path)
stores.register(stores.Filesystem(Refusing()))
ckpts = run()
save(ckpts, 1, 2, 3)
until(lambda: tr.steps(remote) == [3] and not ckpts._directory.busy)
"""
    _killed(tmp, body, "ab")
    assert tr.steps(tmp / "remote") == [3]


def _files(tmp: pathlib.Path, host: str, *steps: int) -> list[str]:
    """Returns the array files of steps on a disk, in any folder."""
    folders = [f"step-{step:08}" for step in steps]
    return sorted(file.name for file in (tmp / f"local-{host}").rglob("arrays-*") if file.parent.name in folders)


def test_a_job_that_only_restores_and_fails_to_copy(tmp_path: pathlib.Path) -> None:
    """The job ends after process 0 has acquired the run, and before its peers know of it."""
    _two_uncopied(tmp_path)
    body = """
class Full(stores.posix.Disk):
    def write(self, fd, data, offset):
        if "/remote/" in os.readlink(f"/proc/self/fd/{fd}"): raise OSError(28, "No space left on device")
        super().write(fd, data, offset)
if INDEX == 1: stores.register(stores.Filesystem(Full()))
report(caught(ckpts.close))
"""
    assert "steps 1, 2 are in" in _report(tmp_path, RESTORE + body, "ab")[1]
    body = "save(ckpts, 4)\nreport([caught(ckpts.close)])"
    assert _report(tmp_path, RESTORE + body, "ab") == [None]
    assert tr.steps(tmp_path / "remote") == [1, 2, 3, 4] and tr.verify(tmp_path / "remote").ok
    assert not list(tmp_path.glob("local-*/rewound-*"))


def test_a_job_that_only_goes_back(tmp_path: pathlib.Path) -> None:
    _two_uncopied(tmp_path)
    _killed(tmp_path, "ckpts = run(upload_limit=1)\nckpts.rewind(2)", "ab")
    body = "report([ckpts.restored_step, caught(ckpts.close)])"
    assert _report(tmp_path, RESTORE + body, "ab") == [2, None]
    assert tr.steps(tmp_path / "remote") == [1, 2] and tr.verify(tmp_path / "remote").ok


def test_overwritten_step_with_missing_new_manifest(tmp_path: pathlib.Path) -> None:
    """The disk with the new manifest is missing: the old remote step is restored and logged, and no part deleted."""
    job(tmp_path, "with run() as ckpts: save(ckpts, 1, 2)", "cb")
    body = "ckpts = run(upload_limit=1)\nckpts.restore(template)\nsave(ckpts, 2, on_exists='overwrite')"
    _killed(tmp_path, body, "acb")
    before = {host: _files(tmp_path, host, 2) for host in "abc"}
    body = f"save(ckpts, 3, 4, 5)\nreport([ckpts.restored_step, caught(ckpts.close), {LINES}])"
    restored, error, lines = _report(tmp_path, RESTORE + body, "cb")
    assert restored == 2 and error is None and "steps 2 are ignored" in lines[0]
    assert {host: _files(tmp_path, host, 2) for host in "abc"} == before


@pytest.mark.rare
def test_job_on_other_hosts_lacks_steps_not_uploaded(tmp_path: pathlib.Path) -> None:
    """A job on other hosts continues without the steps that were not uploaded. They are archived, not deleted."""
    _two_uncopied(tmp_path)
    before = {host: _files(tmp_path, host, 1, 2) for host in "ab"}
    unreachable = """
from treering._run.tiers.journal import Generation
def down(self): raise TimeoutError(110, "no answer", "generations")
Generation.enter = down
save(ckpts, 4)
"""
    _killed(tmp_path, RESTORE + unreachable, "cd")
    body = f"save(ckpts, 5, 6, 7)\nreport([ckpts.restored_step, caught(ckpts.close), {LINES}])"
    restored, error, lines = _report(tmp_path, RESTORE + body, "cdab")
    assert restored == 4 and error is None and "steps 1, 2 are ignored" in lines[0]
    assert {host: _files(tmp_path, host, 1, 2) for host in "ab"} == before
    assert len(list(tmp_path.glob("local-[ab]/rewound-1/*"))) == 4


def test_what_appears_on_a_disk_while_a_job_runs(tmp_path: pathlib.Path) -> None:
    """A step of another job, which was still running when this one began, is archived and logged."""
    (tmp_path / "other").mkdir()
    _killed(tmp_path / "other", "save(run(upload_limit=1), 9)", "ab")
    step = "local-b/step-00000009"
    shutil.copytree(tmp_path / "other" / step, tmp_path / "strange")
    body = f"""
ckpts = run()
save(ckpts, 1, 2)
sync("saved")
if INDEX == 1: os.rename(tmp / "strange", tmp / "{step}")
sync("there")
save(ckpts, 3, 4, 5)
until(lambda: not ckpts._directory.busy)
sync("known")
save(ckpts, 6)
report([caught(ckpts.close), {LINES}])
"""
    error, lines = _report(tmp_path, body, "ab")
    assert error is None and "parts of step-00000009" in lines[0]
    assert len(_files(tmp_path, "b", 9)) == 1 and (tmp_path / "local-b/rewound-1/step-00000009").is_dir()


@pytest.mark.parametrize("hosts", ["xab", "abx"])
def test_restore_without_deciding_disk_changes_nothing(tmp_path: pathlib.Path, hosts: str) -> None:
    """A job without the authoritative disk restores and changes nothing: the full job then restores the newest step."""
    job(tmp_path, "with run() as ckpts: save(ckpts, 1)", "ba")
    _killed(tmp_path, "ckpts = run(upload_limit=1)\nckpts.restore(template)\nsave(ckpts, 2)", "xab")
    body = f"report([ckpts.restored_step, caught(ckpts.close), {LINES}])"
    restored, error, lines = _report(tmp_path, RESTORE + body, "ab")
    assert restored == 1 and error is None and "steps 2 are ignored" in lines[0]
    assert _report(tmp_path, RESTORE + "report(ckpts.restored_step)", hosts) == 2


def test_momentarily_unreadable_manifest_is_not_deleted(tmp_path: pathlib.Path) -> None:
    """A manifest that one disk cannot read once is read on another disk, and the parts of its step stay."""
    job(tmp_path, "with run() as ckpts: save(ckpts, 1)", "ba")
    _killed(tmp_path, "ckpts = run(upload_limit=1)\nckpts.restore(template)\nsave(ckpts, 2)", "ba")
    before = {host: _files(tmp_path, host, 2) for host in "ab"}
    body = f"""
once = []
class Bad(stores.posix.Disk):
    def open(self, path, *args, **options):
        if "local-b/step-00000002/treering.json" in str(path) and not once:
            once.append(path)
            raise OSError(5, "Input/output error", path)
        return super().open(path, *args, **options)
if INDEX == 1: stores.register(stores.Filesystem(Bad()))
{RESTORE}
save(ckpts, 11, 12, 13)
report([ckpts.restored_step, caught(ckpts.close), {LINES}])
"""
    restored, error, lines = _report(tmp_path, body, "ab")
    assert restored == 2 and error is None and not lines
    assert {host: _files(tmp_path, host, 2) for host in "ab"} == before


def test_what_the_policy_does_not_want_stays_while_it_is_read(tmp_path: pathlib.Path) -> None:
    options = "keep=tr.keep.last(1), keep_local=None"
    job(tmp_path, f"with run({options}) as ckpts: save(ckpts, 1, 2, 3)", "ab")
    body = f"""
class Slow(stores.posix.Disk):
    def open(self, path, *args, **options):
        if "remote/step-00000001/arrays" in str(path): time.sleep(2)
        return super().open(path, *args, **options)
if INDEX == 1: stores.register(stores.Filesystem(Slow()))
ckpts = run({options})
report([caught(ckpts.restore, template, step=1), ckpts.restored_step])
"""
    assert _report(tmp_path, body, "ab") == [None, 1]
