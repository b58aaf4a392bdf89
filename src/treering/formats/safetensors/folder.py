"""Finds the files of a folder that are a checkpoint in safetensors."""

import itertools
import posixpath
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..._core.leaf_paths import join_names
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, UnsafeError
from ...stores.file_io import read_file
from ...stores.read_errors import raise_if_momentary
from ...stores.store import Store

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
_NATIVE = re.compile(r"arrays-[0-9a-f]{6}-\d{5,}-of-\d{5,}\.safetensors")  # without a manifest: leftovers
_PART = re.compile(r"(.*)-(\d{5,9})-of-(\d{5,9})(.*)\.safetensors", re.DOTALL)
_MAX_NAMED_FILES = 3  # missing files that a message names


class Chosen(NamedTuple):
    """Names the index, the file or the files that open a folder. `missing` holds the first files that a set lacks."""

    names: tuple[str, ...]
    missing: tuple[str, ...] = ()


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


preload_decoders(_Index)


def candidates(names: Sequence[str]) -> list[str]:
    """Returns the names of indexes and of files of tensors, without leftovers of the native format."""
    return [name for name in names if name.endswith((INDEX, SUFFIX)) and not _NATIVE.fullmatch(name)]


def chosen(names: Sequence[str]) -> Chosen | str:
    """Returns the files that open a folder with these names, or the reason why none do."""
    found = candidates(names)
    indexes = [name for name in found if name.endswith(INDEX)]
    files = indexes or found
    for usual in ("model" + INDEX, "model" + SUFFIX):
        if usual in files:
            return Chosen((usual,))
    if not files:
        return "there is no safetensors file in this folder"
    if not indexes and (parts := _set(files)):
        return parts
    if len(files) > 1:
        kind = "indexes" if indexes else "safetensors files and no index"
        return f"several {kind} ({join_names(tuple(sorted(files)))}); open one of them by its own path"
    return Chosen((files[0],))


def _set(files: Sequence[str]) -> Chosen | None:
    """Returns files that are numbered parts, ``model-00001-of-00003.safetensors``, in order; None for other files."""
    parts = {int(part[2]): part for name in files if (part := _PART.fullmatch(name))}
    if len(parts) < len(files) or len({(part[1], part[3], part[4]) for part in parts.values()}) > 1:
        return None
    one = next(iter(parts.values()))
    first = min(min(parts), 1)  # some writers count from 0
    count = int(one[3])
    if max(parts) >= first + count:
        return None
    absent = (number for number in range(first, first + count) if number not in parts)
    missing = [
        f"{one[1]}-{number:0{len(one[2])}}-of-{one[3]}{one[4]}{SUFFIX}"
        for number in itertools.islice(absent, _MAX_NAMED_FILES)  # a name may claim any number of files
    ]
    return Chosen(tuple(parts[number][0] for number in sorted(parts)), tuple(missing))


def weights_of(store: Store, index: str) -> dict[str, str]:
    """Reads an index: the name of the file of each tensor, by key. Raises `CorruptError` and `UnsafeError`."""
    try:
        weights = msgspec.json.decode(read_file(store, index), type=_Index).weight_map
    except FileNotFoundError:
        raise CorruptError(f"{index}: expected an index of safetensors files, found nothing") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{index}: expected an index of safetensors files: {error}") from None
    for name in dict.fromkeys(weights.values()):
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise UnsafeError(f"{index}: expected names of files in its folder, found {name!r}")
    return weights


def written_names(store: Store, folder: str) -> set[str]:
    """Returns the names of a folder's checkpoint: the index and its files, or the files that are opened without one.

    Returns nothing if the folder has several checkpoints. If the index cannot be read, its files are those of its stem.
    """
    names = store.list(folder)
    main = chosen(names)
    if isinstance(main, str):
        return set()
    (index, *_) = main.names
    if not index.endswith(INDEX):
        return set(main.names)
    try:
        shards = set(weights_of(store, posixpath.join(folder, index)).values())
    except (CorruptError, OSError) as error:
        raise_if_momentary(error)
        stem = index.removesuffix(INDEX)
        shards = {name for name in names if (part := _PART.fullmatch(name)) and (part[1], part[4]) == (stem, "")}
    return {index, *shards.intersection(names)}
