"""Decides which files of a folder a new folder may replace, in stores without real folders."""

from collections.abc import Collection

from .._core.leaf_paths import join_names
from ..errors import ExistsError
from .file_io import files_in, is_folder
from .store import CheckOthers, Owned, Store


def check_replaceable(
    store: Store, path: str, owned: Owned, names: Collection[str], check_others: CheckOthers | None
) -> Collection[str]:
    """Returns the files that a new folder replaces; see `new_folder`.

    Raises `ExistsError` for other files in its way.
    """
    if not is_folder(store, path):
        return ()
    parts = owned(store, path)
    others = [name for name in files_in(store, path) if name not in parts]
    if wrong := [name for name in others if "/" in name or name in names]:
        raise ExistsError(
            f"{path}: expected a checkpoint to replace, found files that are not part of it, or whose names the "
            f"new one needs: {join_names(tuple(wrong))}; write to another path, or move them"
        )
    if check_others:
        check_others(store, path, others)
    return parts
