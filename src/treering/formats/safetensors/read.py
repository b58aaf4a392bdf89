"""Reads safetensors files, single or in shards with an index."""

import functools
import logging
import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import full_box
from ..._core.entries import ArrayEntry, Entry, lost_entry
from ..._core.leaf_paths import join_names
from ..._core.source import Source, wanted_leaves
from ..._core.values import decode_float
from ..._printable import safe
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ...stores.file_io import open_fetched
from ...stores.read_errors import raise_if_momentary
from ...stores.store import Blob, Store
from .._shared.extents import ExtentLayout, Runs, check_shape, layout
from .._shared.pieces import Pieces
from .._shared.reader import ForeignReader, Stored, attempt, attempts, check_file
from . import nibbles
from .folder import adapter_config, candidates, index_of, log_others, quantization_of, rank_of
from .header import Header, check_side_by_side, decode_header, header_size
from .pieces import BOOKKEEPING, INFO, TensorPiece, log_ranks, pieces_of, refuse_pieces, shape_of
from .schema import OWN, path_of, read_sidecar

_log = logging.getLogger("treering")
_TOTALS = ("total_size", "total_parameters")  # of the files of an index

_NAMES = {code: name for name, (code, _) in dtypes.SAFETENSORS.items()}
_NAMES[nibbles.CODE] = nibbles.DTYPE


class _Opened(NamedTuple):
    file: Blob
    header: Header
    pieces: Mapping[str, TensorPiece]  # by key; empty if the tensors are complete


_Tensor = tuple[str, _Opened | str]  # a key, and its file or the reason why it is lost


class _ModelReader(ForeignReader):
    """Reads files of a model, whose configuration may be in their folder."""

    def __init__(self, store: Store, folder: str, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._read_config = functools.cache(functools.partial(quantization_of, store, folder))

    def model_config(self) -> Mapping[str, Any]:
        """Returns what is known of quantized weights; see `source.model_config`. Reads the file once."""
        return self._read_config()


def open_file(store: Store, path: str) -> Source:
    """Opens a single file by its own path."""
    folder, name = posixpath.split(path)
    with gc_paused():
        one = _open(store, path)
        if one.pieces:
            rank = rank_of(name)
            others = None if rank is None else _keys_of_other_ranks(store, folder, rank)
            refuse_pieces(one.pieces, others or (), f"open the folder with the files of all ranks: {folder or '.'}")
            if rank and others is None:
                log_ranks(path, [rank])
        return _reader(store, path, [one], ((key, one) for key in one.header.tensors))


def _keys_of_other_ranks(store: Store, folder: str, rank: int) -> set[str] | None:
    """Returns the keys of the tensors in the files of other ranks in a folder; None if there are no such files."""
    try:
        names = [name for name in store.list(folder or ".") if rank_of(name) not in (None, rank)]
    except (OSError, TreeringError) as error:  # A server on the web lists no files.
        raise_if_momentary(error)
        names = []
    found = attempts(store, [posixpath.join(folder, name) for name in names], lambda place: _open(store, place))
    return {key for one in found if isinstance(one, _Opened) for key in one.pieces} if names else None


def open_files(store: Store, path: str, names: Sequence[str]) -> Source:
    """Opens the files with these names in the folder `path`, which form one checkpoint."""
    files = [posixpath.join(path, name) for name in names]
    with gc_paused():
        found: list[_Opened] = []
        for one in attempts(store, files, lambda file: _open(store, file)):
            if isinstance(one, CorruptError):
                raise one
            found.append(one)
        ranks = [rank for name in names if (rank := rank_of(name))]
        if ranks and any(one.pieces for one in found):
            log_ranks(path, ranks)
        return _reader(store, path, found, ((key, one) for one in found for key in one.header.tensors))


def open_index(store: Store, path: str, index: str, rival: Sequence[str] = (), listed: Sequence[str] = ()) -> Source:
    """Opens the files that an index names, in its folder.

    rival: the files of the same model next to the index, which may be left over, as may the index. What is complete is
        opened; raises `UnsupportedError` if both are.
    listed: the names in the folder, if the folder is opened.
    """
    folder = posixpath.dirname(index)
    try:
        weights, about = index_of(store, index)
    except CorruptError as error:
        if len(rival) == 1 and not isinstance(error, UnsafeError):
            raise CorruptError(f"{error}; to open {safe(rival[0])}, move the index out of the folder") from None
        raise
    there = store.stat(index)
    size = 0 if there is None else there.nbytes
    files: dict[str, _Opened] = {}
    damage: dict[str, str] = {}
    named, every = weights, dict.fromkeys(weights.values())
    if set(every).issuperset(rival):
        weights = _wanted(named, path)
    names = list(dict.fromkeys(weights.values()))
    paths = [posixpath.join(folder, name) for name in names]
    there_are = [attempt(lambda place=place: check_file(store, place, index)) for place in paths]
    for name, found in zip(names, attempts(store, there_are, lambda place: _open(store, place)), strict=True):
        if isinstance(found, CorruptError):
            damage[name] = str(found)
        else:
            files[name] = found
    tensors: list[_Tensor] = []
    for key, name in weights.items():
        if name in files and key not in files[name].header.tensors:
            place = files[name].file.path
            tensors.append((key, f"{place}: expected the tensor {key!r}, which the index places in this file"))
        else:
            tensors.append((key, files[name] if name in files else damage[name]))
    lost = next((why for _, why in tensors if isinstance(why, str)), None)
    if not set(every).issuperset(rival) and (others := _complete_rival(store, path, index, rival, lost)):
        log_others(path, (*rival, posixpath.basename(index)), listed)
        return _reader(store, path, others, ((key, one) for one in others for key in one.header.tensors))
    elsewhere = set(candidates(listed)).difference(every, [posixpath.basename(index)])
    if names and elsewhere and all(isinstance(one, CorruptError) for one in there_are):
        raise CorruptError(
            f"{index}: expected the files that it names, found none of them ({join_names((*names,))}); fetch them, or "
            f"open another by its own path: {join_names(tuple(sorted(elsewhere)))}"
        )
    log_others(path, (posixpath.basename(index), *every, *rival), listed)
    for one in files.values():
        refuse_pieces(one.pieces, (), "an index names one file for each tensor; remove it, and open the folder")
    # Tensors that no index names are read as well. If several files have a key, the index decides which file is used.
    tensors += [(key, found) for found in files.values() for key in found.header.tensors if key not in named]
    if lost is None and weights is named:
        _check_total(index, about.get("total_size"), [*files.values()], weights)
    with gc_paused():
        return _reader(store, path, list(files.values()), tensors, size, about)


def _wanted(named: Mapping[str, str], path: str) -> Mapping[str, str]:
    """Returns the files of the tensors that the caller will read, and of others in their modules, such as scales.

    Some libraries keep scales in modules of their own, up to two levels below or above. Returns all of them if the
    caller has not said which, or if the index lacks one of those.
    """
    if not (wanted := wanted_leaves.get()):
        return named
    keys, paths = {path_of(key): key for key in named}, wanted.find()
    if not keys.keys() >= set(paths):
        return named
    modules = {_module(keys[one]) for one in paths}
    around = modules.union(*map(_above, modules))
    found = {
        key: name
        for key, name in named.items()
        if (module := _module(key)) in around or not modules.isdisjoint(_above(module))
    }
    files, every = len(set(found.values())), len(set(named.values()))
    if not found or files == every:
        return named
    wanted.is_used = True
    _log.info("%s: opens %d of %d files; %d leaves are in the others", path, files, every, len(named) - len(found))
    return found


def _module(key: str) -> str:
    """Returns the name of the module that has a tensor."""
    return key.replace("/", ".").rpartition(".")[0]


def _above(module: str) -> tuple[str, str]:
    """Returns the modules one and two levels above a module. The top has the name ""."""
    parent = module.rpartition(".")[0]
    return parent, parent.rpartition(".")[0]


def _complete_rival(
    store: Store, path: str, index: str, rival: Sequence[str], lost: str | None
) -> list[_Opened] | None:
    """Returns the files of the same model next to an index; None if they are damaged. Logs what is not opened.

    lost: why a tensor of the index cannot be read; None if the index is complete too, which is an `UnsupportedError`.
    """
    folder, name = posixpath.split(index)
    found = attempt(lambda: [_open(store, posixpath.join(folder, one)) for one in rival])
    if isinstance(found, CorruptError):
        _log.warning("%s: opens %s, not the file next to it: %s", path, name, found)
        return None
    if lost is None:
        raise UnsupportedError(
            f"{path}: expected one model, found two complete ones: {join_names((*rival,))}, and the files of {name}; "
            "libraries differ in which they load. Open one by its own path, or move the other out of the folder"
        )
    _log.warning("%s: opens %s, not the index next to it, which lacks tensors: %s", path, rival[0], lost)
    return found


def _check_total(index: str, total: Any, files: Sequence[_Opened], weights: Mapping[str, str]) -> None:
    """Logs a total size that the files do not have. Some writers write 0, and some count tied weights twice."""
    if type(total) not in (int, float) or total <= 0:
        return
    sizes = [
        (key, tensor.data_offsets[1] - tensor.data_offsets[0])
        for one in files
        for key, tensor in one.header.tensors.items()
    ]
    if total not in (sum(size for _, size in sizes), sum(size for key, size in sizes if key in weights)):
        _log.warning(
            "%s: its total_size is %d bytes, but the tensors in its files have %d; it may be of another save, or the "
            "files may lack parts of tensors",
            index,
            total,
            sum(size for _, size in sizes),
        )


def _open(store: Store, path: str) -> _Opened:
    file = open_fetched(store, path)
    size = header_size(file.read(0, min(8, file.size)), file.size, path)
    header = decode_header(file.read(0, size), path)
    check_side_by_side(header, file.size, path)
    return _Opened(file, header, pieces_of(header, path))


def _reader(
    store: Store,
    path: str,
    files: Sequence[_Opened],
    tensors: Iterable[_Tensor],
    index_nbytes: int = 0,
    index_metadata: Mapping[str, Any] | None = None,
) -> Source:
    """Builds the reader of tensors, each with its file or the reason why it cannot be read."""
    entries: dict[str, Entry] = {}
    arrays: dict[str, Stored] = {}
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, ExtentLayout]] = {}

    parts: dict[str, list[tuple[TensorPiece, Stored]]] = {}
    for key, found in tensors:
        place = path_of(key) if "~" in key else key
        if place in entries:
            raise CorruptError(f"{path}: expected one leaf at {place}, found {_holders(place, files)}")
        if isinstance(found, str):
            entries[place] = lost_entry(place, found)
            continue
        tensor = found.header.tensors[key]
        begin, end = tensor.data_offsets
        kind = kinds.get((tensor.dtype, tensor.shape))
        if kind is None:
            kind = kinds[tensor.dtype, tensor.shape] = _kind(tensor.dtype, tensor.shape, f"{found.file.path}: {key!r}")
        dtype, about = kind
        if about.nbytes != end - begin:
            raise UnsafeError(
                f"{found.file.path}: {key!r}: expected {about.nbytes} bytes for {tensor.dtype}{list(tensor.shape)}, "
                f"found {end - begin}"
            )
        runs = Runs(((found.file, found.header.size + begin, about.nbytes),), about)
        array = nibbles.Nibbles(runs) if dtype == nibbles.DTYPE else runs
        if found.pieces:
            parts.setdefault(key, []).append((found.pieces[key], array))
            continue
        entries[place] = ArrayEntry(place, "numpy", dtype, tensor.shape)
        arrays[place] = array
    for key, pieces in parts.items():
        place = path_of(key)
        if place in entries:
            raise CorruptError(f"{path}: expected one leaf at {place}, found {_holders(place, files)}")
        entries[place], arrays[place] = _join(f"{path}: {key!r}", place, pieces)
    config = adapter_config(store, files[0].file.path) if files else {}
    sidecar = read_sidecar({**_metadata(path, files, index_metadata or {}), **config})
    return _ModelReader(
        store,
        posixpath.dirname(files[0].file.path) if files else path,
        "safetensors",
        path,
        list(entries.values()),
        arrays,
        step=sidecar.step,
        metrics={name: decode_float(value) for name, value in sidecar.metrics.items()},
        metadata=sidecar.metadata,
        nbytes=index_nbytes + sum(found.file.size for found in files),
    )


def _join(name: str, place: str, pieces: Sequence[tuple[TensorPiece, Stored]]) -> tuple[ArrayEntry, Stored]:
    """Returns the array that pieces form. A piece that has everything needs no copy."""
    shape = shape_of(name, [piece for piece, _ in pieces])
    check_shape(shape, name)
    entry = ArrayEntry(place, "numpy", _NAMES[pieces[0][0].dtype], shape)
    if complete := [array for piece, array in pieces if piece.box == full_box(shape)]:
        return entry, complete[0]
    return entry, Pieces([(piece.box, array) for piece, array in pieces], dtypes.to_numpy(entry.dtype))


def _metadata(path: str, files: Sequence[_Opened], index: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of files and their index, without what describes the files themselves.

    The first file with a key decides, and the index last.
    """
    text = {k: text for found in reversed(files) for k, text in found.header.metadata.items()}
    if INFO in text:
        text = {key: value for key, value in text.items() if key not in BOOKKEEPING}
    rest = {key: value for key, value in index.items() if key not in _TOTALS and key != OWN}
    if differ := [key for key in rest if key in text and rest[key] != text[key]]:
        _log.warning(
            "%s: the index has other metadata than its files, which are used: %s", path, join_names((*differ,))
        )
    return {**rest, **text}


def _holders(place: str, files: Sequence[_Opened]) -> str:
    return " and ".join(
        f"{key!r} in {os.path.basename(one.file.path)}"
        for one in files
        for key in one.header.tensors
        if path_of(key) == place
    )


def _kind(code: str, shape: tuple[int, ...], name: str) -> tuple[str, ExtentLayout]:
    """Returns the dtype of a tensor, and the layout of its data: bytes if two elements share one."""
    dtype = _NAMES.get(code)
    if dtype is None or (dtype == nibbles.DTYPE and not nibbles.is_paired(shape)):
        raise UnsupportedError(f"{name} is {code}{list(shape)}, which Treering cannot read")
    if dtype == nibbles.DTYPE:
        return dtype, layout((*shape[:-1], shape[-1] // 2), np.uint8, None, name)
    stored = dtypes.to_numpy(dtype)
    return dtype, layout(shape, stored.newbyteorder("<"), stored, name)
