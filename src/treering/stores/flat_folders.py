"""The contents of folders in stores that have none: which of them a new one may replace."""

from collections.abc import Collection

from .._core.leaf_paths import few
from ..errors import ExistsError
from .store import Beside, Owned, Store
from .whole_files import files_in, is_folder


def check_replaceable(
    store: Store, path: str, owned: Owned, names: Collection[str], beside: Beside | None
) -> Collection[str]:
    """The files that a new folder replaces. Raises `ExistsError` for others that are in its way; see `new_folder`."""
    if not is_folder(store, path):
        return ()
    parts = owned(store, path)
    others = [name for name in files_in(store, path) if name not in parts]
    if wrong := [name for name in others if "/" in name or name in names]:
        raise ExistsError(
            f"{path}: expected a checkpoint to replace, found what is no part of it, or has the name of a part of "
            f"the new one: {few(tuple(wrong))}; write to another path, or move it"
        )
    if beside:
        beside(store, path, others)
    return parts
