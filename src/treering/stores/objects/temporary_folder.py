"""Folders that are filled beside their place in a bucket, and put there object by object.

An object in each names its writer: the first that is put there, and the last to go.
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
_PLACE_MARK = ".folder"  # the same, where the folder is to take a place
_log = logging.getLogger("treering")


class TemporaryFolder:
    """A folder that this process fills. `place`: the key of what it is for; `path`: where its files go."""

    def __init__(self, bucket: Bucket, place: str, *, takes_place: bool):
        folder = temporary_beside(place)
        self._bucket, self._place, self._folder = bucket, place, folder
        self._for = f"{bucket.url}/{place}"
        self._heartbeat = Heartbeat(bucket, joined(folder, _PLACE_MARK if takes_place else _MARK))
        self._keep = False  # it is all that is left
        self._files = f"{folder}/files"
        self.path = f"{bucket.url}/{self._files}"

    def check(self) -> None:
        """Raises `SaveError` when another may have removed it."""
        if not self._heartbeat.holds():
            raise TakenOverError(f"{self._for}: another job took what is written here for left over, and removed it")

    def check_alone(self, names: Iterable[str]) -> None:
        """Raises `ExistsError` when another writer, whose folder is among the names beside the place, is about to put
        a folder there: of two that meet, at most one goes on."""
        for other in beside(self._place, names):
            with contextlib.suppress(FileNotFoundError):
                if other != self._folder and heartbeat.has_writer(self._bucket, joined(other, _PLACE_MARK)):
                    raise ExistsError(f"{self._for}: another job is writing there, too; what is there is untouched")

    def put_in_place(self, replaced: Collection[str]) -> None:
        """Puts its files in the place of others.

        What readers look for lies in the folder itself, not in those below: it is the first to go and the last to come,
        so that no reader ever gets parts of both. From the first step on, only the temporary folder is whole.
        """
        bucket, place = self._bucket, self._place
        made = [below(self._files, one.key) for one in bucket.list_all(self._files)]
        copied: list[str] = []
        old = "what was there may be gone" if replaced else "nothing was there before"
        try:
            bucket.delete([joined(place, name) for name in replaced if "/" not in name])
            bucket.delete([joined(place, name) for name in replaced if "/" in name])
            for name in sorted(made, key=lambda name: ("/" not in name, name)):
                copied.append(joined(place, name))
                bucket.copy(joined(self._files, name), joined(place, name))
        except BaseException as error:
            self._keep = True
            with contextlib.suppress(OSError):  # parts of a checkpoint would be in the way of the next one
                bucket.delete(copied)
            problem = (
                f"{self._for}: the new checkpoint was written, and putting it in place failed: {error}; it is not "
                f"whole there, and {old}; all files of the new one are in {self.path}: copy them, or save again, which "
                "removes them"
            )
            if isinstance(error, Exception):
                raise SaveError(problem) from error
            _log.error("%s", problem)  # an interrupt goes on as such
            raise

    @contextlib.contextmanager
    def filled(self, uploads: Uploads) -> Iterator["TemporaryFolder"]:
        """A `with` block within which it is filled, after which it is removed."""
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
    """Raises `UnsupportedError` where nothing can be beside a key."""
    if not key:
        raise UnsupportedError(
            f"{bucket.url}: expected a name within a bucket or prefix, found all of it; what is saved as a folder of "
            f"this format is first filled beside its place: save it to {bucket.url}/checkpoint, or any other name"
        )


def beside(place: str, names: Iterable[str]) -> list[str]:
    """The keys of the temporary folders for a place, among the names that are beside it."""
    folder, _, own = place.rpartition("/")
    return [joined(folder, name) for name in names if place_of(name) == own]


def remove_unless_filled(bucket: Bucket, folder: str) -> None:
    """Removes a temporary folder, unless its writer lives, who has lost it before anything else goes."""
    for mark in (_MARK, _PLACE_MARK):
        with contextlib.suppress(FileNotFoundError):
            if not heartbeat.end(bucket, joined(folder, mark)):
                return
    _clear(bucket, folder)


def _clear(bucket: Bucket, folder: str) -> None:
    """Removes all below a key, the mark of its writer last."""
    marks = {joined(folder, _MARK), joined(folder, _PLACE_MARK)}
    found = [one.key for one in bucket.list_all(folder)]
    bucket.delete([one for one in found if one not in marks])
    bucket.delete([one for one in found if one in marks])
