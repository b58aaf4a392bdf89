"""Writes a version of weights for the receivers of slime and SkyRL, as its difference to the version before."""

import json
import logging
import posixpath
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..._core.boxes import full_box
from ..._core.entries import ArrayEntry
from ..._core.leaf_paths import join_names
from ..._core.source import Source
from ...errors import CorruptError, ExistsError, MismatchError, UnsupportedError
from ...stores.file_io import read_file
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store
from .._shared.zstd import zstandard
from ..safetensors import nibbles
from ..safetensors import write as safetensors
from ..safetensors.folder import SUFFIX
from ..safetensors.header import Tensor, encode_header
from ..safetensors.schema import key_of
from .deltas import CHECKSUMS, DeltaFormat, WrittenDelta, open_version

_log = logging.getLogger("treering")
_FILE_BYTES = 1 << 30  # of tensors of which a file has the differences, in memory until it is written
_SHARD_BYTES = 5 * 10**9  # of a file of a complete version, as in Hugging Face's libraries
_MAX_COMPANION_BYTES = 1 << 26  # of a file next to the weights that is copied
_LEVEL = 1  # of zstd, as both trainers have it


def write_version(
    layout: DeltaFormat, store: Store, path: str, number: int, contents: Source, *, overwrite: bool
) -> int:
    """Writes a version. Returns its size in bytes. The version before is read, with all that it is made from.

    A version is complete if there is none before it that can be read, or if its turn has come, see
    `DeltaStream.complete_every`. A receiver then takes its folder in place of its own, so the files next to the weights
    are those of the last complete version.

    Raises `MismatchError` for other tensors than the version before has, or if there is none and the receivers take no
    complete ones, and `ExistsError` if the version after it is made from the one to replace.
    """
    entries = safetensors.holdable(path, contents)
    if packed := [entry.path for entry in entries if entry.dtype == nibbles.DTYPE]:
        raise UnsupportedError(f"{path}: {join_names(tuple(packed))}: {nibbles.DTYPE} has no differences; cast it")
    after = layout.path_of(posixpath.dirname(path), number + 1)
    if store.stat(after) is not None and layout.is_delta(store, after):
        raise ExistsError(f"{path}: expected no version {number + 1}, found {after}, which is made from this one")
    every = layout.complete_every
    before = layout.path_of(posixpath.dirname(path), number - 1)
    if number and every is None and store.stat(before) is None:
        raise MismatchError(
            f"{path}: expected {posixpath.basename(before)} next to it, found none; receivers of {layout.name} "
            "take only differences, so link the checkpoint that the engines were started from there, or save it"
        )
    if number and (every is None or (number % every and store.stat(before) is not None)):
        zstandard()
        try:
            base = open_version(layout, store, before)
            return _write_differences(layout, store, path, number, contents, entries, base, overwrite=overwrite)
        except (CorruptError, UnsupportedError) as error:
            if every is None:
                raise
            _log.warning("%s: the version before cannot be read, so this one is complete: %s", path, error)
    pattern = safetensors.checked(None, "model")
    companions = _companions(layout, store, path, number) if number else {}
    metadata = safetensors.encode_metadata(number, {}, None)
    return safetensors.write_folder(
        store, path, contents, metadata, _SHARD_BYTES, pattern, companions, overwrite=overwrite
    )


def _write_differences(
    layout: DeltaFormat,
    store: Store,
    path: str,
    number: int,
    contents: Source,
    entries: list[ArrayEntry],
    base: Source,
    *,
    overwrite: bool,
) -> int:
    """Writes the differences to `base`, the version before."""
    known = _same_tensors(path, entries, base)
    groups = safetensors.cut(entries, _FILE_BYTES)
    names = [layout.file_name(n, len(groups)) for n in range(len(groups))]
    changes: list[WrittenDelta] = []

    def owned(store: Store, folder: str) -> set[str]:
        return {name for name in store.list(folder) if name.endswith(SUFFIX) or name == layout.mark}

    with store.new_folder(path, overwrite=overwrite, owned=owned, names=[*names, layout.mark]) as folder:
        total = 0
        for name, group in zip(names, groups, strict=True):
            tensors = {entry: one for entry in group if (one := _difference(contents, entry, base, known[entry.path]))}
            if not tensors:
                continue
            with file_of_new_folder(store, posixpath.join(folder, name)) as file:
                _write_file(file, tensors)
            total += file.size
            changes += [
                WrittenDelta(key_of(entry.path), entry, name, checksum, packed.size)
                for entry, (checksum, packed) in tensors.items()
            ]
        with file_of_new_folder(store, posixpath.join(folder, layout.mark)) as file:
            file.write(json.dumps(layout.describe(number, changes)).encode())
    return total + file.size


def _companions(layout: DeltaFormat, store: Store, path: str, number: int) -> dict[str, bytes]:
    """Returns the files next to the weights of the last complete version, such as the config, that this one lacks."""
    stream = posixpath.dirname(path)
    earlier = sorted(one for name in store.list(stream) if (one := layout.number_of(name)) is not None and one < number)
    places = (layout.path_of(stream, one) for one in reversed(earlier))
    last = next((place for place in places if layout.is_complete(store, place)), None)
    found: dict[str, bytes] = {}
    for name in store.list(last) if last else ():
        place = posixpath.join(last or "", name)
        there = store.stat(place)
        if name.endswith((SUFFIX, f"{SUFFIX}.index.json")) or there is None or not there.is_file:
            continue
        if there.nbytes > _MAX_COMPANION_BYTES:
            _log.warning("%s: is not copied to the next complete version, because it is large", place)
        elif store.stat(posixpath.join(path, name)) is None:
            found[name] = read_file(store, place)
    if last is None:
        _log.info(
            "%s: without a complete version before it, this one is complete; a receiver takes its folder in place of "
            "its own, so put config.json and the tokenizer there",
            path,
        )
    return found


def _same_tensors(path: str, entries: list[ArrayEntry], base: Source) -> dict[str, ArrayEntry]:
    """Returns the tensors of the version before by path. Raises `MismatchError` if they are not those to write."""
    known = {entry.path: entry for entry in base.entries.values() if isinstance(entry, ArrayEntry)}
    new = {entry.path: entry for entry in entries}
    other = [
        name
        for name in sorted(known.keys() | new.keys())
        if name not in known
        or name not in new
        or (known[name].dtype, known[name].shape) != (new[name].dtype, new[name].shape)
    ]
    if other:
        raise MismatchError(
            f"{path}: expected the tensors of {base.path}, with their dtypes and shapes, found others: "
            f"{join_names(tuple(other))}; begin another stream"
        )
    return known


def _difference(contents: Source, entry: ArrayEntry, base: Source, before: ArrayEntry) -> tuple[str, np.ndarray] | None:
    """Returns the checksum of a tensor's bytes and the packed difference to those before; None if they are equal."""
    box = full_box(entry.shape)
    (new,), (old,) = contents.read([(entry, box)]), base.read([(before, box)])
    data, change = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (new, old))
    change = change ^ data
    if not change.any():
        return None
    packed = zstandard().ZstdCompressor(level=_LEVEL).compress(change.data)
    return CHECKSUMS["xxh3-128"](data), np.frombuffer(packed, np.uint8)


def _write_file(file: Any, tensors: Mapping[ArrayEntry, tuple[str, np.ndarray]]) -> None:
    """Writes differences as tensors of bytes. The metadata has the checksums of what they lead to."""
    header: dict[str, Tensor] = {}
    position = 0
    for entry, (_, packed) in tensors.items():
        header[key_of(entry.path)] = Tensor("U8", (packed.size,), (position, position + packed.size))
        position += packed.size
    checksums = {key_of(entry.path): checksum for entry, (checksum, _) in tensors.items()}
    file.write(encode_header(header, checksums, 8))
    for _, packed in tensors.values():
        file.write(packed.data)
