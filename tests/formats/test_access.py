"""Tests of the access rights of checkpoints, before and after they are overwritten."""

import errno
import os
import pathlib

import numpy as np
import pytest

import treering as tr

KINDS = [("m.safetensors", None), ("m.msgpack", None), ("m.eqx", None), ("m", "fjformer")]


@pytest.mark.parametrize(("name", "format"), KINDS)
def test_an_overwrite_keeps_mode_and_link_as_open_does(tmp_path: pathlib.Path, name: str, format: str | None) -> None:
    """An overwrite keeps the mode of a file and follows a link, as `open(path, "w")` does."""
    before = os.umask(0o002)
    try:
        for place in (tmp_path / "a" / name, tmp_path / "b" / name):
            tr.save(place, {"w": np.ones(3, np.float32)}, format=format)
            assert place.stat().st_mode & 0o777 == 0o664  # the mode that the umask leaves
        (tmp_path / "c").symlink_to(tmp_path / "b" / name)
        for path, mode in ((tmp_path / "a" / name, 0o600), (tmp_path / "c", 0o640)):
            path.chmod(mode)
            tr.save(path, {"w": np.zeros(3, np.float32)}, format=format or tr.open(path).format, overwrite=True)
            assert path.stat().st_mode & 0o777 == mode
        assert (tmp_path / "c").is_symlink() and not (tmp_path / "b" / name).is_symlink()
        assert tr.open(tmp_path / "b" / name).nbytes == tr.open(tmp_path / "c").nbytes
    finally:
        os.umask(before)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file to a group")
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_an_overwrite_keeps_the_group(tmp_path: pathlib.Path, format: str) -> None:
    path = tmp_path / "c"
    tr.save(path, {"w": np.ones(3, np.float32)}, format=format)
    os.chown(path, -1, 54321)
    mode = path.stat().st_mode
    tr.save(path, {"w": np.ones(3, np.float32)}, format=format, overwrite=True)
    assert path.stat().st_gid == 54321 and path.stat().st_mode == mode


def test_a_group_that_cannot_be_kept_gives_no_other_access(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the group of a file cannot be kept, the new file gives access to no group.

    This test mocks `chown`, because the groups that a user may choose depend on the machine.
    """

    def refuse(path: str, user: int, group: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    path = tmp_path / "c.safetensors"
    tr.save(path, {"w": np.ones(3, np.float32)})
    path.chmod(0o660)
    real = os.lstat
    monkeypatch.setattr(os, "chown", refuse)
    other = lambda at: os.stat_result((*(found := real(at))[:5], found.st_gid + (at == str(path)), *found[6:]))  # noqa: E731
    monkeypatch.setattr("treering.stores.atomic.lstat", lambda at: other(at))
    tr.save(path, {"w": np.ones(3, np.float32)}, overwrite=True)
    assert path.stat().st_mode & 0o777 == 0o600 and "its group gets no access" in caplog.text
