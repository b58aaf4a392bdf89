"""`treering pull`: keeps a directory a complete Hugging Face checkpoint of the newest version of a stream.

Each version is a new file. Files that share their unchanged blocks (reflinks) would save nothing: a trainer changes one
element in a hundred, at any places, and a block of 4 KiB has 2,048 of them.
"""

import os
from collections.abc import Iterator

from .. import stores
from .._restore.checkpoint import Checkpoint
from .._run import new_run
from .._run.open import open_checkpoint
from .._run.run_layout import located_steps
from .._save.save import save
from ..errors import CorruptError, MismatchError, NotFoundError, UnsupportedError
from .follower import read_versions

_SHARD_BYTES = "5GB"  # as in Hugging Face's libraries


def pull(
    stream: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    version: int | None = None,
    watch: bool = False,
    timeout: float | None = None,
) -> Iterator[tuple[int, bool]]:
    """Writes a version of a stream as safetensors, in place of the version that a directory has.

    The new files are complete and durable before they take the place of the old ones in one step, so a kill at any
    moment leaves the old version or the new one. Other files, such as ``config.json``, stay. Yields each version, and
    True if it was written, False if the directory had it already; a version of another trainer is always written.

    version: the version; by default the newest that can be read.
    watch: continues with each newest version, until the stream is finished or `timeout` seconds have passed without
        one.

    Raises `NotFoundError` if the stream has no version to read, `CorruptError` if `version` is damaged, `ExistsError`
    for a directory that is not a checkpoint in this format, and `UnsupportedError` for leaves that it cannot hold.
    """
    root, target = stores.absolute_run(stream), stores.absolute(directory)
    if watch and version is not None:
        raise MismatchError(f"version {version}: expected a version, or to watch for each newest one, found both")
    if version is not None:
        yield _written(root, target, open_checkpoint(root, step=version))
        return
    store = stores.get(root)
    if not (watch or store.list(root)):
        raise NotFoundError(f"{root}: expected a version, found nothing{new_run.suggest_path(store, root)}")
    found = None
    if watch or located_steps(store, root):
        for found in read_versions(root, None, timeout if watch else 0):
            yield _written(root, target, found.ckpt)
            if not watch:
                return
    if found is None:
        meant = new_run.suggest_run(store, root)
        raise NotFoundError(f"{root}: expected a version that can be read, found none{meant}")


def _written(root: str, target: str, ckpt: Checkpoint) -> tuple[int, bool]:
    """Writes a version unless the directory has it. Returns its number, and True if it was written."""
    mark = {"stream": root, "version": ckpt.step, "identity": ckpt._source.identity}
    # Only the identity of a native version depends on the values of its arrays.
    is_new = ckpt.format != "treering" or _mark_in(target) != mark
    if not is_new:  # The call that wrote it was perhaps killed before its name was durable.
        stores.get(target).settle(os.path.dirname(target))
    else:
        save(
            target, ckpt, format="safetensors", overwrite=True, metadata=mark, max_shard_size=_SHARD_BYTES,
            processes="this",
        )  # fmt: skip
    return ckpt.step or 0, is_new


def _mark_in(target: str) -> object:
    """Returns the metadata of the checkpoint in a directory; None if there is none."""
    try:
        return open_checkpoint(target).metadata
    except (CorruptError, NotFoundError, UnsupportedError):
        return None
