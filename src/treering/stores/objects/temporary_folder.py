"""Folders that are filled next to their final place in a bucket, and then copied there object by object.

An object in each folder names its writer. It is created first and removed last.
"""

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator

from ...errors import ExistsError, SaveError, UnsupportedError
from ..claims import TakenOverError
from ..temporary_names import place_of, temporary_beside
from . import heartbeat, round_trip
from .bucket import Bucket
from .heartbeat import Heartbeat
from .keys import below, joined
from .upload import Uploads

_MARK = ".writer"
_PLACE_MARK = ".folder"  # the mark instead of it, in a folder that will replace the files at its place
_log = logging.getLogger("treering")


class TemporaryFolder:
    """A folder that this process fills. `place` is the key where its files will go, `path` the folder to fill."""

    def __init__(self, bucket: Bucket, place: str, *, takes_place: bool):
        folder = temporary_beside(place)
        self._bucket, self._place, self._folder = bucket, place, folder
        self._for = f"{bucket.url}/{place}"
        self._heartbeat = Heartbeat(bucket, joined(folder, _PLACE_MARK if takes_place else _MARK))
        self._keep = False  # True if this folder has the only complete copy
        self._files = f"{folder}/files"
        self.path = f"{bucket.url}/{self._files}"

    def check(self) -> None:
        """Raises `TakenOverError` if another process may have removed the folder."""
        if not self._heartbeat.holds():
            raise TakenOverError(f"{self._for}: another job considered the writer of this folder dead, and removed it")

    def check_alone(self, names: Iterable[str]) -> None:
        """Raises `ExistsError` if another writer is about to put a folder at the same place.

        names: the names next to the place. Each writer makes its folder before this check, so at most one of two
            continues.
        """
        for other in beside(self._place, names):
            with contextlib.suppress(FileNotFoundError):
                if other != self._folder and heartbeat.has_writer(self._bucket, joined(other, _PLACE_MARK)):
                    raise ExistsError(f"{self._for}: another job is writing it too; the old files are untouched")

    def put_in_place(self, replaced: Collection[str]) -> None:
        """Replaces the files at the place by this folder's files.

        Readers look for files of the top level, and not for those below. So the top level is removed first and copied
        last, and no reader gets parts of both checkpoints. From the first delete to the last copy, only the temporary
        folder is complete.
        """
        bucket, place = self._bucket, self._place
        made = [below(self._files, one.key) for one in bucket.list_all(self._files)]
        copied: list[str] = []
        old = "the old checkpoint may be gone" if replaced else "the place was empty before"
        try:
            bucket.delete([joined(place, name) for name in replaced if "/" not in name])
            bucket.delete([joined(place, name) for name in replaced if "/" in name])
            for name in sorted(made, key=lambda name: ("/" not in name, name)):
                copied.append(joined(place, name))
                bucket.copy(joined(self._files, name), joined(place, name))
        except BaseException as error:
            self._keep = True
            with contextlib.suppress(OSError):  # Parts of a checkpoint would block the next save to this place.
                bucket.delete(copied)
            problem = (
                f"{self._for}: the new checkpoint was written, and putting it in place failed: {error}; it is not "
                f"complete there, and {old}; all files of the new one are in {self.path}: copy them, or save again, "
                "which removes them"
            )
            if isinstance(error, Exception):
                raise SaveError(problem) from error
            _log.error("%s", problem)  # An interrupt stays an interrupt, so the problem is only logged.
            raise

    @contextlib.contextmanager
    def filled(self, uploads: Uploads) -> Iterator["TemporaryFolder"]:
        """Yields this folder within a `with` block, and removes it afterwards."""
        try:
            round_trip.check(self._bucket, self._heartbeat)
            yield self
        finally:
            with contextlib.suppress(OSError):
                uploads.settle(f"{self._bucket.url}/{self._folder}")
            self._heartbeat.stop(delete=False)
            if not self._keep:
                with contextlib.suppress(OSError):
                    _clear(self._bucket, self._folder)


def check_has_beside(bucket: Bucket, key: str) -> None:
    """Raises `UnsupportedError` for the root of a bucket, which has no place next to it."""
    if not key:
        raise UnsupportedError(
            f"{bucket.url}: expected a name within a bucket or prefix, found its root; a folder of this format is "
            f"first filled next to its place: save it to {bucket.url}/checkpoint, or any other name"
        )


def beside(place: str, names: Iterable[str]) -> list[str]:
    """Returns the keys of the temporary folders for a place, among the names next to it."""
    folder, _, own = place.rpartition("/")
    return [joined(folder, name) for name in names if place_of(name) == own]


def remove_unless_filled(bucket: Bucket, folder: str) -> None:
    """Removes a temporary folder, unless its writer lives.

    The writer's mark is invalidated before anything else is removed.
    """
    for mark in (_MARK, _PLACE_MARK):
        with contextlib.suppress(FileNotFoundError):
            if not heartbeat.end(bucket, joined(folder, mark)):
                return
    _clear(bucket, folder)


def _clear(bucket: Bucket, folder: str) -> None:
    """Removes all objects below a key, the writer's mark last."""
    marks = {joined(folder, _MARK), joined(folder, _PLACE_MARK)}
    found = [one.key for one in bucket.list_all(folder)]
    bucket.delete([one for one in found if one not in marks])
    bucket.delete([one for one in found if one in marks])
