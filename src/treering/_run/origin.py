"""Decides whether the steps of a local tier belong to its run, or to a branch that a later job has abandoned."""

import os
import posixpath
from typing import Any, NamedTuple

import msgspec

from .._threads.preload_decoders import preload_decoders
from ..errors import MismatchError, UnsupportedError
from ..stores.file_io import read_file
from ..stores.store import Store
from . import run_layout
from .step_catalog import StepCatalog

_VERSION = 1


class _Local(msgspec.Struct, frozen=True):
    """The local mark, a file: the run, the token of the job that wrote it, and the remote token when that job began.

    `apart`: each host of that job had its own disk. `part`: this disk was not that of its process 0.
    """

    run: str
    token: str
    after: str
    version: Any = _VERSION
    requires: Any = ()
    apart: bool = False
    part: bool = False


preload_decoders(_Local)


class Standing(NamedTuple):
    """The claim of a valid disk to be authoritative, from its local mark.

    `rank` is 2 if the disk's job began after the last job that wrote the remote tier, 1 if it is that job, and 0 if
    the disk has no mark. `modified` is the time of the mark in seconds, `text` its contents.
    """

    rank: int
    modified: float
    part: bool
    token: str
    text: str


class Origin:
    """The marks in both tiers. The remote mark is the token of the job that last changed the run.

    Every job has its own token. Local steps belong to the run if the job that last wrote the remote tier is the one
    that wrote the local tier, or the last before it. A job without a local tier replaces the remote token by another.
    """

    def __init__(self, local: StepCatalog, remote: StepCatalog):
        self._local, self._remote = local, remote
        self._token = os.urandom(16).hex()
        self._is_remote = False  # True once the remote mark is this job's token
        self._contents = b""

    def is_newest(self) -> bool:
        """Returns True if no other job has written the remote tier since the local steps were saved.

        Raises `MismatchError` if the local tier is another run's, and `UnsupportedError` for a mark of a later release.
        """
        local, remote = self._read_local_mark(), self._read_remote_mark()
        if local and remote and remote in (local.token, local.after):
            return True
        if local and local.run != self._remote.root:
            raise MismatchError(
                f"{self._local.root}: expected a directory for {self._remote.root}, found that of {local.run}; give "
                f"each run its own local=, or, if this run has moved, remove {self._local_mark_path}"
            )
        return not remote and not self._remote.committed()

    def standing(self) -> Standing | None:
        """Returns the claim of this disk; None if its steps are not the run's. Raises what `is_newest` raises."""
        if not self.is_newest():
            return None
        local = self._read_local_mark()
        if local is None:
            return Standing(0, 0.0, False, "", "")
        there = self._local.store.stat(self._local_mark_path)
        text = _read(self._local.store, self._local_mark_path).decode()
        rank = 2 if local.token != self._read_remote_mark() else 1
        return Standing(rank, there.modified if there else 0.0, local.part, local.token, text)

    def take_over(self, mark: bytes, *, part: bool) -> None:
        """Writes the mark of another disk here. This disk replaces that one, or is a `part` of the same job."""
        _write(self._local.store, self._local_mark_path, _as_part(mark, part))

    def part_mark(self, mark: bytes) -> bytes | None:
        """Returns the mark that this disk needs, given that of process 0's disk; None if it already has it."""
        mark = _as_part(mark, True)
        return None if _read(self._local.store, self._local_mark_path) == mark else mark

    def may_have_parts(self) -> bool:
        """Returns True if the local tier may hold only parts of steps, because other hosts have the other parts."""
        local = self._read_local_mark()
        return local is not None and (local.apart or local.part)

    def set_local_mark(self, *, own_disks: bool) -> None:
        """Writes the local mark: the local steps belong to the run, and continue from its present remote steps."""
        remote = self._read_remote_mark()
        self._contents = msgspec.json.encode(_Local(self._remote.root, self._token, remote, apart=own_disks))
        self.keep_local_mark()
        if not remote:  # From now on, every job that writes the remote tier replaces a token.
            self.set_remote_mark()

    def mark(self) -> bytes:
        """Returns the contents of this job's local mark."""
        return self._contents

    def keep_local_mark(self) -> None:
        """Writes the local mark again if it was removed, such as with the complete local directory."""
        if (
            self._local.store.stat(self._local_mark_path) is None
            or _read(self._local.store, self._local_mark_path) != self._contents
        ):
            _write(self._local.store, self._local_mark_path, self._contents)

    def set_remote_mark(self) -> None:
        """Writes the remote mark. Call it before this job changes the remote tier."""
        if not self._is_remote:
            _write(self._remote.store, self._remote_mark_path, self._token.encode())
            self._is_remote = True

    @property
    def _local_mark_path(self) -> str:
        return posixpath.join(self._local.root, run_layout.LOCAL_MARK)

    @property
    def _remote_mark_path(self) -> str:
        return posixpath.join(self._remote.root, run_layout.REMOTE_MARK)

    def _read_remote_mark(self) -> str:
        return _read(self._remote.store, self._remote_mark_path).decode("utf-8", "replace")

    def _read_local_mark(self) -> _Local | None:
        data = _read(self._local.store, self._local_mark_path)
        if not data:
            return None
        try:
            found = msgspec.json.decode(data, type=_Local)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            found = None
        if found is None or found.version != _VERSION or found.requires:
            raise UnsupportedError(
                f"{self._local_mark_path}: expected version {_VERSION} of this file, found another; a later release of "
                "treering saves there, or it is damaged: upgrade treering, or use another local="
            )
        return found


def _as_part(mark: bytes, part: bool) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(msgspec.json.decode(mark, type=_Local), part=part))


def check_not_local(store: Store, root: str) -> None:
    """Raises `MismatchError` for a local tier: commands that change a run must be given its remote tier."""
    if data := _read(store, posixpath.join(root, run_layout.LOCAL_MARK)):
        try:
            stays = f", here {msgspec.json.decode(data, type=_Local).run}"
        except (msgspec.MsgspecError, UnicodeDecodeError):
            stays = ""
        raise MismatchError(f"{root}: expected the directory of a run{stays}, found its local=")


def replace(store: Store, root: str) -> None:
    """Writes a new token if the run has one, so that older local tiers no longer belong to the run."""
    path = posixpath.join(root, run_layout.REMOTE_MARK)
    if store.stat(path) is not None:
        _write(store, path, os.urandom(16).hex().encode())


def _read(store: Store, path: str) -> bytes:
    try:
        return read_file(store, path)
    except FileNotFoundError:
        return b""


def _write(store: Store, path: str, data: bytes) -> None:
    store.make_folders(os.path.dirname(path), [])
    with store.new_file(path, overwrite=True) as file:
        file.write(data)
