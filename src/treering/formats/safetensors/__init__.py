"""Safetensors files of other programs: one file, or a folder of shards that an index or numbers connect.

The files of ranks that PyTorch's torch.distributed.checkpoint writes have pieces of tensors, which are joined.

A key is a path, and its slashes separate levels. Only a ``~`` that escapes nothing becomes ``~0`` in the path.
"""

import posixpath
from collections.abc import Collection, Sequence
from typing import Any

from ..._core.source import INFO_FIELDS, Source
from ..._printable import safe
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import opened, read_file
from ...stores.read_errors import UnreadableError, reading, refusal
from ...stores.store import Store
from .._shared import strict_json
from .._shared.format_parts import FormatDefaults
from .folder import SUFFIX, chosen, index_of, is_index, log_others
from .header import header_size


class Safetensors(FormatDefaults):
    """Implements `treering.formats.Format` for safetensors.

    `__metadata__` is the checkpoint's metadata, if that is a dict of texts. Otherwise it is JSON under the key
    ``treering``, ``{"step": …, "metrics": {…}, "metadata": …}``, which also holds step and metrics. Treering writes
    ``"format": "pt"`` into every file, because the loaders of Hugging Face need it. Metadata with its own ``"format"``
    keeps that. Reading leaves out the one that Treering added.

    The ``adapter_config.json`` next to ``adapter_model.safetensors``, an adapter of PEFT, is part of the metadata under
    its own name. A folder with such metadata gets both files.

    Two options write a folder as Hugging Face lays it out. `max_shard_size`, in bytes or as ``"5GB"`` (of 10^9) or
    ``"2GiB"`` (of 2^30), limits the size of a file. A larger array gets its own file, and several files get an index.
    `filename_pattern` names the files differently from ``"model{suffix}.safetensors"``. An existing folder that is not
    a checkpoint keeps its other files.
    """

    name = "safetensors"
    suffixes = (SUFFIX,)

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
            if _is_index_path(path):
                return _refuses_index(store, path, begin)
            header_size(begin[:8], found.nbytes, path)
            return None if begin[8:] == b"{" else "no JSON object begins at the ninth byte"
        except UnreadableError:
            raise
        except CorruptError:
            return "the first eight bytes are not the size of a header"
        except OSError as error:
            return refusal(error, path)

    def open(self, store: Store, path: str) -> Source:
        from .read import open_file, open_files, open_index

        found = store.stat(path)
        if found is None or not found.is_folder:
            return open_index(store, path, path) if _is_index_path(path) else open_file(store, path)
        names = store.list(path)
        main = chosen(names)
        if _is_delta_of_skyrl(store, path, names):
            raise UnsupportedError(
                f"{path}: expected the tensors of a model, found their differences to another version, as SkyRL "
                "publishes them; open delta-N within its stream"
            )
        if isinstance(main, str):
            raise UnsupportedError(f"{path}: {main}")
        if main.missing:
            raise CorruptError(
                f"{path}: expected as many files as {main.names[0]} says, found {len(main.names)}; fetch "
                f"{', '.join(main.missing)}, or open a single file by its own path"
            )
        if is_index(main.names[0]):
            return open_index(store, path, posixpath.join(path, main.names[0]), main.rival, names)
        log_others(path, main.names, names)
        return open_files(store, path, main.names)

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return INFO_FIELDS

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        from .write import write

        return write(store, path, contents, overwrite=overwrite, **options)


FORMAT = Safetensors()


def _is_delta_of_skyrl(store: Store, path: str, names: Sequence[str]) -> bool:
    """Returns True for a folder of differences of tensors, which are no model."""
    if "manifest.json" not in names:
        return False
    try:
        found = strict_json.parse(read_file(store, posixpath.join(path, "manifest.json")))
    except strict_json.MALFORMED:
        return False
    return isinstance(found, dict) and {"base_version", "payload_files"} <= found.keys()


def _is_index_path(path: str) -> bool:
    """Returns True for the name of an index; also for one that a library of its own has chosen."""
    name = posixpath.basename(path)
    return is_index(name) or ("index" in name and name.endswith(".json"))


def _refuses_index(store: Store, path: str, begin: bytes) -> str | None:
    """Returns the reason why a path with the name of an index is none; `begin` has its first bytes."""
    if is_index(posixpath.basename(path)):
        named = begin.strip(b"\0 \t\r\n")[:1] in (b"{", b"[", b"")
        return None if named else "it has the name of an index, but is not JSON"
    try:
        other = next((name for name in index_of(store, path).weights.values() if not name.endswith(SUFFIX)), None)
    except CorruptError:
        return "it is no index of safetensors files"
    return None if other is None else f"it is an index of other files, such as {safe(other)}"
