"""Folders that are filled next to their final place in a bucket, and then copied there object by object.

An object in each folder names its writer. It is created first and removed last.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator

from ...errors import ExistsError, SaveError, UnsupportedError
from ..temporary_names import final_name, temporary_sibling
from . import heartbeat, round_trip
from .bucket import Bucket, join_key, relative_key
from .heartbeat import Heartbeat
from .upload import Uploads

_WRITER_MARK = ".writer"
_PLACE_MARK = ".folder"  # the mark instead of it, in a folder that will replace the files at its place
_log = logging.getLogger("treering")


class TemporaryFolder:
    """A folder that this process fills. `place` is the key where its files will go, `path` the folder to fill."""

    def __init__(self, bucket: Bucket, place: str, *, replaces_target: bool):
        folder = temporary_sibling(place)
        self._bucket, self._place, self._folder = bucket, place, folder
        self._target = f"{bucket.url}/{place}"
        mark = join_key(folder, _PLACE_MARK if replaces_target else _WRITER_MARK)
        self._heartbeat = Heartbeat(bucket, mark, f"{bucket.url}/{folder}")
        self._must_keep = False  # True if this folder has the only complete copy
        self._files = f"{folder}/files"
        self.path = f"{bucket.url}/{self._files}"

    def check_exclusive(self, names: Iterable[str]) -> None:
        """Raises `ExistsError` if another writer is about to put a folder at the same place.

        names: the names next to the place. Each writer makes its folder before this check, so at most one of two
            continues.
        """
        for other in folders_for(self._place, names):
            with contextlib.suppress(FileNotFoundError):
                if other != self._folder and heartbeat.has_writer(self._bucket, join_key(other, _PLACE_MARK)):
                    raise ExistsError(
                        f"{self._target}: another job is writing it too, or was killed a moment ago; the "
                        "old files are untouched: try again in two minutes"
                    )

    def put_in_place(self, replaced: Collection[str]) -> None:
        """Replaces the files at the place by this folder's files.

        Readers look for files of the top level, and not for those below. So the top level is removed first and copied
        last, and no reader gets parts of both checkpoints. From the first delete to the last copy, only the temporary
        folder is complete.
        """
        bucket, place = self._bucket, self._place
        made = [relative_key(self._files, one.key) for one in bucket.list_all(self._files)]
        copied: list[str] = []
        old = "the old checkpoint may be gone" if replaced else "the place was empty before"
        try:
            bucket.delete([join_key(place, name) for name in replaced if "/" not in name])
            bucket.delete([join_key(place, name) for name in replaced if "/" in name])
            for name in sorted(made, key=lambda name: ("/" not in name, name)):
                copied.append(join_key(place, name))
                bucket.copy(join_key(self._files, name), join_key(place, name))
        except BaseException as error:
            self._must_keep = True
            with contextlib.suppress(OSError):  # Parts of a checkpoint would block the next save to this place.
                bucket.delete(copied)
            problem = (
                f"{self._target}: the new checkpoint was written, and putting it in place failed: {error}; it is not "
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
                uploads.wait_for_folder(f"{self._bucket.url}/{self._folder}")
            with contextlib.suppress(OSError):
                if self._must_keep:
                    self._heartbeat.release()
                else:
                    self._heartbeat.stop(delete=False)
                    _delete_contents(self._bucket, self._folder)


def check_has_parent(bucket: Bucket, key: str) -> None:
    """Raises `UnsupportedError` for the root of a bucket, which has no place next to it."""
    if not key:
        raise UnsupportedError(
            f"{bucket.url}: expected a name within a bucket or prefix, found its root; a folder of this format is "
            f"first filled next to its place: save it to {bucket.url}/checkpoint, or any other name"
        )


def folders_for(place: str, names: Iterable[str]) -> list[str]:
    """Returns the keys of the temporary folders for a place, among the names next to it."""
    folder, _, own = place.rpartition("/")
    return [join_key(folder, name) for name in names if final_name(name) == own]


def claim_abandoned(bucket: Bucket, folder: str) -> Callable[[], None] | None:
    """Invalidates the mark of a temporary folder, and returns a function that removes the folder.

    Returns None if its writer lives.
    """
    for mark in (_WRITER_MARK, _PLACE_MARK):
        with contextlib.suppress(FileNotFoundError):
            if not heartbeat.revoke(bucket, join_key(folder, mark)):
                return None
    return lambda: _delete_contents(bucket, folder)


def _delete_contents(bucket: Bucket, folder: str) -> None:
    """Removes all objects below a key, the writer's mark last."""
    marks = {join_key(folder, _WRITER_MARK), join_key(folder, _PLACE_MARK)}
    found = [one.key for one in bucket.list_all(folder)]
    bucket.delete([one for one in found if one not in marks])
    bucket.delete([one for one in found if one in marks])
