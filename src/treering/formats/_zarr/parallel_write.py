"""Writes a folder of zarr arrays from all processes of a call; process 0 writes all other files."""

import contextlib
import posixpath
import unicodedata
from collections.abc import Callable, Collection, Sequence

from ..._core.calls import Call, raise_error_of_process_0
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import remove_unused
from ...stores.nfs import check_shared
from ...stores.store import CheckOthers, Owned, Store
from .leaves import folder_size
from .writer import ZarrWriter


def write_folder(
    store: Store,
    path: str,
    call: Call,
    arrays: Callable[[str], Sequence[ZarrWriter]],
    rest: Callable[[str], None],
    *,
    begin: Callable[[str], None] = lambda folder: None,
    overwrite: bool,
    owned: Owned,
    names: Collection[str],
    check_others: CheckOthers | None = None,
) -> int:
    """Writes a folder in one step and returns its size in bytes; see `Store.new_folder`.

    Process 0 makes the folder and calls `begin` on it. Then each process calls `arrays`, which writes its chunks and
    returns the closed writers; these are for the same folders in every process. After all have returned, process 0
    calls `rest`. If one process raises, all raise.
    """
    with contextlib.ExitStack() as place:

        def make() -> str:
            new = store.new_folder(path, overwrite=overwrite, owned=owned, names=names, check_others=check_others)
            begin(folder := place.enter_context(new))
            return folder

        def finish(folder: str, writers: Sequence[ZarrWriter], counts: Sequence[Sequence[int]]) -> int:
            for writer, parts in zip(writers, zip(*counts, strict=True), strict=True):
                writer.complete(sum(parts))
            rest(folder)
            nbytes = folder_size(store, folder)
            place.close()
            return nbytes

        folder = call.broadcast(make)
        if call.index:
            check_shared(store, folder, path, (), call.timeout, call.check)
        try:
            writers = _written(folder, call, arrays)
            call.set_activity("waiting for the commit")
            mine = [writer.count for writer in writers]
            return call.gather_and_decide(mine, lambda counts: finish(folder, writers, counts))
        except BaseException:
            # Files of this process may have appeared after process 0 removed the folder.
            if call.index and not call.in_doubt:
                with contextlib.suppress(OSError):
                    remove_unused(store, folder)
            raise


def _written(folder: str, call: Call, arrays: Callable[[str], Sequence[ZarrWriter]]) -> Sequence[ZarrWriter]:
    try:
        return arrays(folder)
    except (CorruptError, FileNotFoundError):  # the folder is gone: process 0 removed it because a process failed
        raise_error_of_process_0(call)
        raise


class Folders:
    """The names of arrays, each stored in a folder below `folder`, which becomes the checkpoint at `path`."""

    def __init__(self, store: Store, folder: str, path: str):
        self._store, self._folder, self._path = store, folder, path
        self._folders: dict[str, str] = {}  # the first name for each spelling without case and normalization

    def add(self, name: str) -> None:
        """Adds a name. Raises `UnsupportedError` if the file system treats its folder as that of another name.

        Only names that may collide are tried on the file system, because each trial makes a folder.
        """
        begin = ""
        for part in name.split("/"):
            begin = posixpath.join(begin, part)
            other = self._folders.setdefault(unicodedata.normalize("NFC", begin).casefold(), begin)
            if other != begin and self._is_one(other, begin):
                raise UnsupportedError(
                    f"{self._path}: expected a file system that tells upper from lower case, found one on which the "
                    f"keys {other!r} and {begin!r} are one folder; rename one of them with treering.rules.rename, or "
                    "save in the native format"
                )

    def _is_one(self, a: str, b: str) -> bool:
        self._store.make_folders(posixpath.join(self._folder, a), [])
        return self._store.stat(posixpath.join(self._folder, b)) is not None
