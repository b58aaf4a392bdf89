"""Safetensors files of other programs: a single file, or a folder of shards, with an index or numbered.

A key is the path as it is, slashes being levels; only ``~`` that escapes nothing is written ``~0`` in the path.
"""

import logging
import posixpath
from collections.abc import Collection, Sequence
from typing import Any

from ..._core.leaf_paths import few
from ..._core.source import ABOUT, Source
from ...errors import CorruptError, UnsupportedError
from ...stores.read_errors import UnreadableError, reading, refusal
from ...stores.store import Store
from ...stores.whole_files import opened
from .folder import INDEX, SUFFIX, candidates, chosen
from .header import header_size

_FLAX = ("flax_model.msgpack", "flax_model.msgpack.index.json")
_log = logging.getLogger("treering")


class Safetensors:
    """See `treering.formats.Format`.

    `__metadata__` is the checkpoint's metadata. Metadata that is not text by name lies there as JSON under the key
    ``treering``, ``{"step": …, "metrics": {…}, "metadata": …}``, and so do step and metrics. Every file that is written
    says ``"format": "pt"`` unless the metadata has a ``"format"`` of its own: loaders of Hugging Face's need it. It is
    no metadata when it is read again.

    Options for writing a folder, as Hugging Face lays it out: `max_shard_size`, in bytes or as ``"5GB"`` (of 10^9) or
    ``"2GiB"`` (of 2^30), for files of at most that size (a larger array has one of its own) with an index, where one
    file does not do; `filename_pattern`, for other names than ``"model{suffix}.safetensors"``. A folder that is there
    already takes them in beside what it has, unless that is a checkpoint.
    """

    name = "safetensors"
    suffixes = (SUFFIX,)
    boxes: tuple[str, ...] = ()

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None:
                return "there is nothing"
            if found.is_folder:
                main = chosen(store.list(path))
                return main if isinstance(main, str) else None
            if not found.is_file:
                return "not a file"
            with reading(path), opened(store, path) as blob:
                begin = blob.read_up_to(9)
            if path.endswith(INDEX):
                return (
                    None
                    if begin.strip(b"\0 \t\r\n")[:1] in (b"{", b"[", b"")
                    else "it is called an index, and is not JSON"
                )
            header_size(begin[:8], found.nbytes, path)
            return None if begin[8:] == b"{" else "no JSON object begins at the ninth byte"
        except UnreadableError:
            raise
        except CorruptError:
            return "the first eight bytes are not the size of a header"
        except OSError as error:
            return refusal(error, path)

    def open(self, store: Store, path: str) -> Source:
        from .read import open_files, open_shards

        found, files = store.stat(path), [path]
        if found is not None and found.is_folder:
            names = store.list(path)
            main = chosen(names)
            if isinstance(main, str):
                raise UnsupportedError(f"{path}: {main}")
            if main.missing:
                raise CorruptError(
                    f"{path}: expected as many files as {main.names[0]} says, found {len(main.names)}; fetch "
                    f"{', '.join(main.missing)}, or open a single file by its own path"
                )
            files = [posixpath.join(path, name) for name in main.names]
            _log_others(path, main.names, names)
        return open_shards(store, path, files[0]) if files[0].endswith(INDEX) else open_files(store, path, files)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        return {}

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ABOUT

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        from .write import write

        return write(store, path, contents, overwrite=overwrite, **options)


FORMAT = Safetensors()


def _log_others(folder: str, opened: Sequence[str], names: Sequence[str]) -> None:
    """Logs the checkpoints of a folder beside the one that is opened, to which the files of its index belong."""
    others = {name for name in candidates(names) if not opened[0].endswith(INDEX) or name.endswith(INDEX)}
    if beside := sorted(others.union(name for name in names if name in _FLAX).difference(opened)):
        _log.info("%s: opens %s; beside it, to be opened by their own paths: %s", folder, opened[0], few(tuple(beside)))
