"""Safetensors files of other programs: a single file, or a folder of shards with an index.

A key is the path as it is, slashes being levels; only ``~`` that escapes nothing is written ``~0`` in the path.
"""

import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from .._catalogue import decode_float
from .._paths import few
from ..errors import CorruptError, UnsupportedError
from ..stores.disk import Disk, opened
from . import Reader
from .safetensors import header_size

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
OWN = "treering"  # the key of `__metadata__` for what text by name cannot say
_FLAX = ("flax_model.msgpack", "flax_model.msgpack.index.json")
_log = logging.getLogger("treering")
_NATIVE = re.compile(r"arrays-[0-9a-f]{6}-\d{5,}-of-\d{5,}\.safetensors")  # left over, without a manifest


class Safetensors:
    """See `treering.formats.Format`.

    `__metadata__` is the checkpoint's metadata. Metadata that is not text by name lies there as JSON under the key
    ``treering``, ``{"step": …, "metrics": {…}, "metadata": …}``, and so do step and metrics.

    Option for writing: `max_shard_size` in bytes, for a folder of files of at most that size (a larger array has one of
    its own) with an index, as Hugging Face lays them out.
    """

    name = "safetensors"
    suffixes = (SUFFIX,)

    def refuses(self, disk: Disk, path: str) -> str | None:
        try:
            found = disk.stat(path)
            if found is None:
                return "there is nothing"
            if stat.S_ISDIR(found.st_mode):
                main = _main_file(disk.list(path))
                return None if main.endswith((INDEX, SUFFIX)) else main
            if not stat.S_ISREG(found.st_mode):
                return "not a file"
            if path.endswith(INDEX):
                return None
            begin = bytearray(9)
            with opened(disk, path) as fd:
                disk.read(fd, memoryview(begin), 0)
            header_size(bytes(begin[:8]), found.st_size, path)
            return None if begin[8:] == b"{" else "no JSON object begins at the ninth byte"
        except CorruptError:
            return "the first eight bytes are not the size of a header"
        except OSError as error:
            return str(error)

    def open(self, disk: Disk, path: str) -> Reader:
        from .safetensors_read import open_file, open_shards

        found, main = disk.stat(path), path
        if found is not None and stat.S_ISDIR(found.st_mode):
            names = disk.list(path)
            name = _main_file(names)
            if not name.endswith((INDEX, SUFFIX)):
                raise UnsupportedError(f"{path}: {name}; open one by its own path")
            main = os.path.join(path, name)
            if others := [other for other in names if other in _FLAX]:
                _log.info("%s: opens %s; %s beside it opens by its own path", path, name, max(others))
        return (open_shards if main.endswith(INDEX) else open_file)(disk, path, main)

    def steps(self, disk: Disk, folder: str, names: Sequence[str]) -> dict[int, str]:
        return {}

    def write(self, disk: Disk, path: str, contents: Reader, *, overwrite: bool, **options: Any) -> int:
        from .safetensors_write import write

        return write(disk, path, contents, overwrite=overwrite, **options)


FORMAT = Safetensors()


def path_of(key: str) -> str:
    """The path of a tensor."""
    return key.replace("~", "~0") if "~" in key and re.search("~(?![01])", key) else key


def key_of(path: str) -> str:
    """The key of a leaf, of which `path_of` makes its path again."""
    short = path.replace("~0", "~")
    return short if path_of(short) == path else path


class Beside(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What a checkpoint records beside its tree."""

    step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    metrics: dict[str, float | str] = {}
    metadata: Any = None


def _main_file(names: Sequence[str]) -> str:
    """The file by which a folder is opened, or why it has none."""
    indexes = [name for name in names if name.endswith(INDEX)]
    files = indexes or [name for name in names if name.endswith(SUFFIX) and not _NATIVE.fullmatch(name)]
    for usual in ("model" + INDEX, "model" + SUFFIX):
        if usual in files:
            return usual
    if len(files) > 1:
        return f"several {'indexes' if indexes else 'safetensors files and no index'} ({few(tuple(files))})"
    return files[0] if files else "there is no safetensors file in this folder"


def read_beside(text: Mapping[str, str]) -> Beside:
    """Step, metrics and metadata, of a file by whatever writer."""
    rest = {key: value for key, value in text.items() if key != OWN}
    try:
        beside = msgspec.json.decode(text.get(OWN, "{}"), type=Beside)
        for value in beside.metrics.values():
            decode_float(value)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return Beside(metadata=dict(text))
    if rest and beside.metadata is None:
        beside.metadata = rest
    return beside
