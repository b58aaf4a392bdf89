"""Whether the steps on a local disk are those of a run elsewhere, or of a branch that another job has left behind."""

import os
import posixpath
from typing import Any, NamedTuple

import msgspec

from .._threads.decoding import learn
from ..errors import MismatchError, UnsupportedError
from ..stores.store import Store
from ..stores.whole_files import read_file
from . import run
from .steps import Steps

_VERSION = 1


class _Near(msgspec.Struct, frozen=True):
    """The file on the local disk: of which run it is, this job's token, and the token far when the job began.

    `apart`: each host of that job had a disk of its own; `part`: this is not that of its process 0.
    """

    run: str
    token: str
    after: str
    version: Any = _VERSION
    requires: Any = ()
    apart: bool = False
    part: bool = False


learn(_Near)


class Standing(NamedTuple):
    """What a mark near says of a disk that counts.

    `rank`: 2 where its job began after the last that wrote far, 1 where it is that, 0 where there is no mark.
    """

    rank: int
    modified: float
    part: bool
    token: str
    text: str


class Origin:
    """The marks in both places. The one far is the token of the job that has changed the run last, by copying to it.

    Every job has a token of its own. What is near counts when the last job that has written far is the one that has
    written near, or was the last before that. A job without a local disk replaces a token by another.
    """

    def __init__(self, near: Steps, far: Steps):
        self._near, self._far = near, far
        self._token = os.urandom(16).hex()
        self._is_far = False  # this job's is there
        self._contents = b""

    def is_newest(self) -> bool:
        """Whether no other job has written far since what is near was saved.

        Raises `MismatchError` when it is another run's, and `UnsupportedError` for the file of a later release.
        """
        near, far = self._read_near(), self._read_far()
        if near and far and far in (near.token, near.after):
            return True
        if near and near.run != self._far.root:
            raise MismatchError(
                f"{self._near.root}: expected a directory for {self._far.root}, found that of {near.run}; give each "
                f"run its own local=, or, if this run has moved, remove {self._near_path}"
            )
        return not far and not self._far.committed()

    def standing(self) -> Standing | None:
        """What the mark near says, None where what is near does not count. Raises what `is_newest` does."""
        if not self.is_newest():
            return None
        near = self._read_near()
        if near is None:
            return Standing(0, 0.0, False, "", "")
        there = self._near.store.stat(self._near_path)
        text = _read(self._near.store, self._near_path).decode()
        rank = 2 if near.token != self._read_far() else 1
        return Standing(rank, there.modified if there else 0.0, near.part, near.token, text)

    def take_over(self, mark: bytes, *, part: bool) -> None:
        """Puts the mark of another disk here, for one that takes its place or is a `part`."""
        _write(self._near.store, self._near_path, _as_part(mark, part))

    def part_mark(self, mark: bytes) -> bytes | None:
        """What the mark of process 0's disk is on another one; None when it is there already."""
        mark = _as_part(mark, True)
        return None if _read(self._near.store, self._near_path) == mark else mark

    def was_apart(self) -> bool:
        """Whether the disk near may have parts of steps, whose other parts other hosts have."""
        near = self._read_near()
        return near is not None and (near.apart or near.part)

    def set_near(self, *, apart: bool) -> None:
        """Says that what is near belongs to the run, and goes on from what is far by now."""
        far = self._read_far()
        self._contents = msgspec.json.encode(_Near(self._far.root, self._token, far, apart=apart))
        self.keep_near()
        if not far:  # from now on whoever writes far replaces a token
            self.set_far()

    def mark(self) -> bytes:
        """What the file near says."""
        return self._contents

    def keep_near(self) -> None:
        """Makes the file near again when it was removed, with all else that was there."""
        if self._near.store.stat(self._near_path) is None or _read(self._near.store, self._near_path) != self._contents:
            _write(self._near.store, self._near_path, self._contents)

    def set_far(self) -> None:
        """Says that far is written from here, before it is."""
        if not self._is_far:
            _write(self._far.store, self._far_path, self._token.encode())
            self._is_far = True

    @property
    def _near_path(self) -> str:
        return posixpath.join(self._near.root, run.COPIED)

    @property
    def _far_path(self) -> str:
        return posixpath.join(self._far.root, run.ORIGIN)

    def _read_far(self) -> str:
        return _read(self._far.store, self._far_path).decode("utf-8", "replace")

    def _read_near(self) -> _Near | None:
        data = _read(self._near.store, self._near_path)
        if not data:
            return None
        try:
            found = msgspec.json.decode(data, type=_Near)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            found = None
        if found is None or found.version != _VERSION or found.requires:
            raise UnsupportedError(
                f"{self._near_path}: expected version {_VERSION} of this file, found another; a later release of "
                "treering saves there, or it is damaged: upgrade treering, or use another local="
            )
        return found


def _as_part(mark: bytes, part: bool) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(msgspec.json.decode(mark, type=_Near), part=part))


def check_not_near(store: Store, root: str) -> None:
    """Raises `MismatchError` for a directory on a local disk: what changes the run is done where it stays."""
    if data := _read(store, posixpath.join(root, run.COPIED)):
        try:
            stays = f", that is {msgspec.json.decode(data, type=_Near).run}"
        except (msgspec.MsgspecError, UnicodeDecodeError):
            stays = ""
        raise MismatchError(f"{root}: expected the directory where a run stays{stays}, found steps on their way there")


def replace(store: Store, root: str) -> None:
    """Says that a run that was copied from somewhere is written by another job now, before it is."""
    path = posixpath.join(root, run.ORIGIN)
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
