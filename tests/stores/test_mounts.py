"""FUSE mounts, whose behavior depends on the program that serves them.

Mounts that cannot be made are skipped by name.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest

import treering as tr

pytestmark = pytest.mark.slow
MOUNTS = {
    "bindfs": "bindfs {a} {mount}",
    "mergerfs": "mergerfs -o cache.files=off,category.create=rand,minfreespace=1M {a}:{b} {mount}",
    "rclone": "rclone mount --daemon --vfs-cache-mode writes --config /dev/null {a} {mount}",
    "unionfs": "unionfs -o cow {a}=RW:{b}=RW {mount}",
}


@pytest.fixture(params=MOUNTS)
def mount(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Returns a directory on such a mount."""
    command = MOUNTS[request.param]
    if not shutil.which(request.param) or not os.path.exists("/dev/fuse"):
        pytest.skip(f"{request.param} cannot be mounted here")
    places = {name: tmp_path / name for name in ("a", "b", "mount")}
    for place in places.values():
        place.mkdir()
    try:
        done = subprocess.run(command.format(**places).split(), capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:  # rclone waits for a mount that the system does not make.
        pytest.skip(f"{request.param} cannot be mounted here: no mount after 20 s")
    if done.returncode or not os.path.ismount(places["mount"]):
        pytest.skip(f"{request.param} cannot be mounted here: {done.stderr or done.stdout}")
    try:
        yield places["mount"]
    finally:
        for unmount in ("fusermount3 -u", "fusermount -u", "umount"):
            for _ in range(20):
                if shutil.which(unmount.split()[0]) and os.path.ismount(places["mount"]):
                    with contextlib.suppress(OSError):
                        subprocess.run([*unmount.split(), places["mount"]], capture_output=True)
                    time.sleep(0.1)


def test_saves_overwrites_runs_and_files(mount: pathlib.Path) -> None:
    def tree(n: int) -> dict[str, np.ndarray]:
        return {"w": np.full(2 << 20, n, np.float32), "n": np.array(n)}  # large enough for several writing threads

    for n in range(3):
        tr.save(mount / "c", tree(n), overwrite=True)
        for mmap in (None, True, False):
            found = tr.restore(mount / "c", mmap=mmap)
            assert (found["w"] == n).all() and found["n"] == n
    assert tr.verify(mount / "c").ok
    with pytest.raises(tr.errors.ExistsError):
        tr.save(mount / "c", tree(3))
    tr.save(mount / "new", tree(3))
    with pytest.raises(tr.errors.ExistsError):
        tr.save(mount / "new", tree(4))
    assert tr.restore(mount / "new")["n"] == 3 and len(os.listdir(mount / "new")) == 2
    with tr.Checkpointer(mount / "run", keep=tr.keep.last(2)) as ckpts:
        for step in range(1, 6):
            ckpts.save(step, tree(step))
    assert tr.steps(mount / "run") == [4, 5] and tr.restore(mount / "run")["n"] == 5
    for _ in range(2):
        tr.save(mount / "x.safetensors", tree(7), overwrite=True)
    assert tr.restore(mount / "x.safetensors")["n"] == 7
