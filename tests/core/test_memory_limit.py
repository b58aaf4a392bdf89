"""Tests how much memory control groups leave to a process, with files like those of the kernel in a folder."""

import pathlib
import subprocess
import sys

import pytest

from treering._core import host_memory

pytestmark = pytest.mark.compat

_MIB = 1 << 20


def _v2(folder: pathlib.Path, limit: str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\nactive_file 0\n")


def _v1(folder: pathlib.Path, limit: int, used: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("total_inactive_file 0\ntotal_active_file 0\n")


@pytest.fixture
def groups(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Makes the folder of the control groups, and a file that names the process's own groups."""
    monkeypatch.setattr(host_memory, "_CGROUP", str(tmp_path / "cgroup"))
    monkeypatch.setattr(host_memory, "_PROCESS_CGROUPS", str(tmp_path / "own"))
    return tmp_path / "cgroup"


def _left() -> int | None:
    """Returns the smallest number of free bytes of all groups."""
    return min((left for left, _ in host_memory._cgroup_pools()), default=None)


def test_the_tightest_group_counts(groups: pathlib.Path) -> None:
    """The limit of a job also holds for its tasks, which have no limit of their own."""
    (groups.parent / "own").write_text("0::/job/step/task\n")
    _v2(groups / "job" / "step" / "task", "max", 0)
    assert _left() is None
    _v2(groups / "job", str(100 * _MIB), 30 * _MIB)
    _v2(groups / "job" / "step", str(90 * _MIB), 10 * _MIB)
    assert _left() == 70 * _MIB
    assert host_memory.available() == 70 * _MIB
    _v2(groups / "job" / "step" / "task", str(20 * _MIB), 15 * _MIB, cache=4 * _MIB)  # the system can drop cached files
    assert _left() == 9 * _MIB


def test_an_eighth_is_left_to_others(groups: pathlib.Path) -> None:
    """An eighth stays free in every group. The group with the fewest free bytes need not be the fullest."""
    (groups.parent / "own").write_text("0::/job/task\n")
    _v2(groups / "job", str(800 * _MIB), 600 * _MIB)
    _v2(groups / "job" / "task", str(180 * _MIB), 20 * _MIB)
    assert host_memory.host_memory_ok(100 * _MIB) and not host_memory.host_memory_ok(101 * _MIB)
    _v2(groups / "job" / "task", str(80 * _MIB), 20 * _MIB, cache=5 * _MIB)
    assert host_memory.host_memory_ok(55 * _MIB) and not host_memory.host_memory_ok(56 * _MIB)


def test_within_a_container(groups: pathlib.Path) -> None:
    """The path of the group is that of the host, and does not exist within the container."""
    (groups.parent / "own").write_text("0::/docker/1234\n")
    _v2(groups, str(50 * _MIB), 60 * _MIB)
    assert _left() == 0


def test_groups_of_version_1(groups: pathlib.Path) -> None:
    (groups.parent / "own").write_text("5:cpu:/other\n4:memory:/job/task\n")
    _v1(groups / "memory" / "job" / "task", 1 << 62, 5)
    _v1(groups / "memory" / "job", 40 * _MIB, 10 * _MIB)
    assert _left() == 30 * _MIB


def test_no_groups(groups: pathlib.Path) -> None:
    assert _left() is None
    assert (host_memory.available() or 0) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much of a limit is used")
@pytest.mark.parametrize(("limit", "use"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_limits_of_the_process_count(limit: str, use: str) -> None:
    """A process may take less than its host has, and an allocation beyond its limit fails."""
    code = f"""
import resource
from treering._core import host_memory
used = dict(line.split(":", 1) for line in open("/proc/self/status"))["{use}"].split()[0]
resource.setrlimit(resource.{limit}, ((int(used) << 10) + (200 << 20), -1))
print(host_memory.copy_limit(1 << 20), (host_memory.copy_limit(150 << 20) or 0) >> 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small, most = done.stdout.split()
    assert small == "None" and 80 < int(most) <= 100
