"""Writes a folder of zarr arrays from all processes of a call; process 0 writes all other files."""

import contextlib
from collections.abc import Callable, Collection, Sequence

from ..._core.calls import Call, raise_error_of_process_0
from ...errors import CorruptError
from ...stores.file_io import remove_unused
from ...stores.nfs import check_shared
from ...stores.store import CheckOthers, Owned, Store
from .leaves import folder_size
from .writer import Writer


def write_folder(
    store: Store,
    path: str,
    call: Call,
    arrays: Callable[[str], Sequence[Writer]],
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

        def finish(folder: str, writers: Sequence[Writer], counts: Sequence[Sequence[int]]) -> int:
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


def _written(folder: str, call: Call, arrays: Callable[[str], Sequence[Writer]]) -> Sequence[Writer]:
    try:
        return arrays(folder)
    except (CorruptError, FileNotFoundError):  # the folder is gone: process 0 removed it because a process failed
        raise_error_of_process_0(call)
        raise
