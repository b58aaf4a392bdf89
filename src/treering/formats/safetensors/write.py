"""Writes safetensors files, single or in shards with an index."""

import contextlib
import decimal
import functools
import json
import logging
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..._core import dtypes
from ..._core.boxes import Box, full_box
from ..._core.describe import drop_code
from ..._core.entries import ArrayEntry, is_absent
from ..._core.leaf_paths import join_names
from ..._core.source import Source
from ..._core.values import encode_float, floats_to_text
from ..._pytree.leaves import write_order_key
from ...errors import ExistsError, MismatchError, UnsupportedError
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store, Writer
from .. import get
from .. import names as format_names
from .._shared.recognition import new_file
from . import nibbles
from .folder import ADAPTER, ADAPTER_CONFIG, INDEX, SUFFIX, candidates, chosen, stem_of, written_names
from .header import Tensor, encode_header
from .nibbles import stored_nbytes
from .pieces import INFO
from .schema import FORMAT, OWN, Sidecar, key_of

_log = logging.getLogger("treering")
_ALIGNMENT_BYTES = 64  # bytes; JAX uses memory aligned to this without a copy
_SLICE_BYTES = 64 << 20  # bytes of an array in memory at a time
_SMALL_BYTES, _BATCH_BYTES = 1 << 20, 16 << 20  # bytes of an array that is read with others, and of all of them
_CODES = {dtype: code for dtype, (code, _) in dtypes.SAFETENSORS.items()} | {nibbles.DTYPE: nibbles.CODE}
_HINTS = {
    "key": "store jax.random.key_data(key), or",
    "str": "save it as metadata, and",
    "bytes": "store numpy.frombuffer(data, 'uint8'), or",
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) *([KMGT]i?B|B)")
_UNITS = {"B": 1} | {f"{unit}B": 1000**n for n, unit in enumerate("KMGT", 1)}
_UNITS |= {f"{unit}iB": 1024**n for n, unit in enumerate("KMGT", 1)}
_FIELD = "{suffix}"  # in a pattern of file names
_Order = Sequence[tuple[int, ArrayEntry]]  # the tensors of a file with their bytes, as they follow each other
Create = Callable[[str], contextlib.AbstractContextManager[Writer]]


def write(
    store: Store,
    path: str,
    contents: Source,
    *,
    overwrite: bool,
    max_shard_size: int | str | None = None,
    filename_pattern: str | None = None,
    **unknown: Any,
) -> int:
    """Writes a file or a folder; see `Safetensors`. Returns its size in bytes."""
    if unknown:
        raise MismatchError(
            f"safetensors: expected no options but max_shard_size and filename_pattern, found {', '.join(unknown)}"
        )
    about = contents.metadata
    config = about.get(ADAPTER_CONFIG) if isinstance(about, dict) else None
    stem = ADAPTER if isinstance(config, dict) else "model"
    limit, pattern = limit_of(max_shard_size), checked(filename_pattern, stem)
    if max_shard_size is None and filename_pattern is None:
        entries = holdable(path, contents)
        with new_file(store, path, "safetensors", overwrite=overwrite) as file:
            metadata = encode_metadata(contents.step, contents.metrics, about)
            _write_tensors(file, *_lay_out(entries, metadata), contents)
        return file.size
    companions: dict[str, bytes] = {}  # PEFT reads the config of an adapter from a file of its own
    if isinstance(config, dict) and stem_of(names_of(pattern, 1)[0]) == ADAPTER:
        companions[ADAPTER_CONFIG] = _encode_config(path, config)
        about = {key: value for key, value in about.items() if key != ADAPTER_CONFIG} or None
    metadata = encode_metadata(contents.step, contents.metrics, about)
    return write_folder(store, path, contents, metadata, limit, pattern, companions, overwrite=overwrite)


def write_folder(
    store: Store,
    path: str,
    contents: Source,
    metadata: Mapping[str, str],
    limit: int | None,
    pattern: str,
    companions: Mapping[str, bytes],
    *,
    overwrite: bool,
) -> int:
    """Writes a folder of files of at most `limit` bytes, and the `companions`. Returns the bytes of all."""
    entries = holdable(path, contents)
    shards = cut(entries, limit)
    names = names_of(pattern, len(shards))
    plans = [_lay_out(shard, metadata) for shard in shards]
    with created(store, path, [*companions, *names], overwrite=overwrite) as create:
        total = 0
        for name, text in companions.items():
            with create(name) as file:
                file.write(text)
            total += file.size
        for name, plan in zip(names, plans, strict=False):
            with create(name) as file:
                _write_tensors(file, *plan, contents)
            total += file.size
        if len(shards) > 1:  # the index has the last name; it comes last because readers open the folder by it
            weights = {key_of(entry.path): name for name, shard in zip(names, shards, strict=False) for entry in shard}
            index = {
                "metadata": {"total_size": sum(nibbles.stored_nbytes(entry) for entry in entries)},
                "weight_map": weights,
            }
            with create(names[-1]) as file:
                file.write(json.dumps(index, indent=2).encode())
            total += file.size
    return total


def holdable(file: str, contents: Source) -> list[ArrayEntry]:
    """Returns the arrays. None and functions carry no data, so they are left out, which is logged.

    Raises `UnsupportedError` that lists every leaf a safetensors file cannot hold.
    """
    arrays: list[ArrayEntry] = []
    problems: list[str] = []
    absent = {path: entry for path, entry in contents.entries.items() if is_absent(entry)}
    if len(absent) == len(contents.entries):  # the file would be empty
        problems += [f"  {path or '(root)'}: {entry.type}, and there is no array" for path, entry in absent.items()]
    for path, entry in contents.entries.items():
        if path in absent:
            continue
        if not isinstance(entry, ArrayEntry):
            problem = f"{entry.type}; {_HINTS.get(entry.type, 'make it a 0-d array, or')} {drop_code(path)}"
        elif entry.type == "key":
            problem = f"typed PRNG keys; {_HINTS['key']} {drop_code(path)}"
        elif entry.dtype == nibbles.DTYPE and not nibbles.is_paired(entry.shape):
            problem = f"{entry.dtype} with an odd last axis, but two share a byte; pad that axis, or cast the array"
        elif entry.dtype not in _CODES:
            if dtypes.to_numpy(entry.dtype).kind in "SU":
                advice = f"text, which a cast does not change; {drop_code(path)}"
            else:
                advice = "pack it by a rule, or cast it" if entry.dtype in ("int4", "uint4") else "cast it by a rule"
            problem = f"{entry.dtype}; {advice}"
        elif path == "__metadata__":
            problem = "the format uses this name itself; rename it by a rule"
        else:
            arrays.append(entry)
            continue
        problems.append(f"  {path or '(root)'}: {problem}")
    if problems:
        head = "a safetensors file cannot hold these leaves; nothing was written:"
        raise UnsupportedError("\n".join([head, *problems]))
    if absent:
        named = join_names(tuple(path or "(root)" for path in absent))
        _log.info("%s: %d leaves that are None or functions are left out: %s", file, len(absent), named)
    return arrays


def _encode_config(path: str, config: dict[str, Any]) -> bytes:
    try:
        return json.dumps(config, indent=2, allow_nan=False).encode()
    except ValueError as error:
        raise UnsupportedError(f"{path}: metadata[{ADAPTER_CONFIG!r}] cannot be a file of JSON: {error}") from None


def encode_metadata(step: int | None, metrics: Mapping[str, float], metadata: Any) -> dict[str, str]:
    """Returns `__metadata__`, text by name. Loaders of Hugging Face need its "format" in every file."""
    text: dict[str, str] = {}
    pairs = metadata.items() if isinstance(metadata, dict) and metadata.keys().isdisjoint((OWN, INFO)) else ()
    if pairs and all(type(part) is str for pair in pairs for part in pair):
        metadata, text = None, dict(pairs)
    encoded = {name: encode_float(value) for name, value in metrics.items()}
    floats: list[str] = []
    own = Sidecar(step, encoded, floats_to_text(metadata, "", floats), floats)
    if "format" not in text:
        text |= FORMAT
        own.format = FORMAT["format"]
    return text if own == Sidecar() else {**text, OWN: msgspec.json.encode(own).decode()}


def _lay_out(entries: Sequence[ArrayEntry], metadata: Mapping[str, str]) -> tuple[bytes, _Order]:
    """Returns the header of a file, and its tensors in an order that aligns each for its elements."""
    order = [(nibbles.stored_nbytes(entry), entry) for entry in entries]
    order.sort(key=lambda one: write_order_key(one[0]))
    tensors: dict[str, Tensor] = {}
    position = 0
    for nbytes, entry in order:
        end = position + nbytes
        tensors[key_of(entry.path)] = Tensor(_CODES[entry.dtype], entry.shape, (position, end))
        position = end
    try:
        return encode_header(tensors, metadata, _ALIGNMENT_BYTES), order
    except ValueError as error:
        raise UnsupportedError(
            f"{len(order)} arrays in one safetensors file take {error}, more than the format allows; pass a smaller "
            "max_shard_size"
        ) from None


def _write_tensors(file: Writer, header: bytes, order: _Order, contents: Source) -> None:
    file.write(header)
    for batch in _batches(order):
        arrays = [array for array in contents.read(batch, verify=True) if array.size]
        # `join` takes the bytes of contiguous arrays as they are.
        parts: Any = map(nibbles.contiguous, arrays)
        file.write(nibbles.as_stored(arrays[0]).data if len(arrays) == 1 else b"".join(parts))


def _batches(order: _Order) -> Iterator[list[tuple[ArrayEntry, Box]]]:
    """Yields what is read together: small arrays, because each read takes as long as many of them, or a slice."""
    batch: list[tuple[ArrayEntry, Box]] = []
    nbytes = 0
    for own, entry in order:
        if batch and (own > _SMALL_BYTES or nbytes + own > _BATCH_BYTES):
            yield batch
            batch, nbytes = [], 0
        if own > _SMALL_BYTES:
            for box in nibbles.stored_slices(entry, _SLICE_BYTES):
                yield [(entry, box)]
        else:
            batch.append((entry, full_box(entry.shape)))
            nbytes += own
    if batch:
        yield batch


def limit_of(size: Any) -> int | None:
    """Returns the number of bytes of ``max_shard_size``. Raises `MismatchError`."""
    text = _SIZE.fullmatch(size) if isinstance(size, str) else None
    limit = int(decimal.Decimal(text[1]) * _UNITS[text[2]]) if text else size
    if limit is not None and (type(limit) is not int or limit < 1):
        raise MismatchError(
            f"max_shard_size={size!r}: expected a number of bytes, or text like '5GB' (of 10^9) or '2GiB' (of 2^30)"
        )
    return limit


def checked(pattern: Any, stem: str) -> str:
    """Returns a pattern of file names after checking it; for None, that of a stem. Raises `MismatchError`."""
    if pattern is None:
        return f"{stem}{_FIELD}{SUFFIX}"
    rest = pattern.replace(_FIELD, "", 1) if isinstance(pattern, str) else ""
    if rest == pattern or not rest.endswith(SUFFIX) or rest[0] == "." or set(rest) & set("/\\\0{}"):
        raise MismatchError(
            f"filename_pattern={pattern!r}: expected the name of a file with {_FIELD} where its number goes, like "
            f"'model{_FIELD}{SUFFIX}'"
        )
    return pattern


def names_of(pattern: str, count: int) -> list[str]:
    """Returns the names of `count` files and, last, of their index; a single file has no index."""
    alone = pattern.replace(_FIELD, "")
    if count == 1:
        return [alone]
    names = [pattern.replace(_FIELD, f"-{n:05}-of-{count:05}") for n in range(1, count + 1)]
    return [*names, alone.removesuffix(SUFFIX) + INDEX]


def cut(entries: Sequence[ArrayEntry], limit: int | None) -> list[list[ArrayEntry]]:
    """Cuts the leaves, in order, into groups of at most `limit` bytes. A larger leaf is a group of its own."""
    shards: list[list[ArrayEntry]] = [[]]
    held = 0
    for entry in entries:
        if limit is not None and shards[-1] and held + stored_nbytes(entry) > limit:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += stored_nbytes(entry)
    return shards


@contextlib.contextmanager
def created(store: Store, folder: str, names: Sequence[str], *, overwrite: bool) -> Iterator[Create]:
    """Yields the function that makes the files of a folder, within a `with` block. After an error, none remains.

    A new folder appears with all its files at once. In an existing folder, each file appears when it is complete.
    """
    found = store.stat(folder)
    if found is not None and found.is_folder and not overwrite:
        _check_neighbors(store, folder, names)
        with _added(store, folder) as create:
            yield create
    else:
        refuse_others = functools.partial(_check_others, names=names)
        with store.new_folder(
            folder, overwrite=overwrite, owned=written_names, names=names, check_others=refuse_others
        ) as temporary:
            yield lambda name: file_of_new_folder(store, posixpath.join(temporary, name))


def _check_others(store: Store, folder: str, others: Sequence[str], *, names: Sequence[str]) -> None:
    """Raises `ExistsError` for files that a reader would open instead of the new ones, or together with them."""
    if chosen([*others, *names]) != chosen(names):
        raise ExistsError(
            f"{folder}: expected no other safetensors files next to {join_names(tuple(names))}, because a reader "
            "could not "
            f"tell which to open; found {join_names(tuple(candidates(others)))}; write to another path, or move them "
            "out of it"
        )


def _check_neighbors(store: Store, folder: str, names: Sequence[str]) -> None:
    """Raises `ExistsError` unless an existing folder has no checkpoint that the new files would replace or join."""
    there = store.list(folder)
    if taken := [name for name in names if name in there] or candidates(there):
        # The config of an adapter alone makes no checkpoint, which `overwrite` could replace.
        hint = "pass overwrite=True to replace them" if candidates(there) else "move it out of the folder"
        raise ExistsError(
            f"{folder}: expected a folder without safetensors files, found {join_names(tuple(taken))}; choose "
            f"another, or {hint}"
        )
    known = next((name for name in format_names() if get(name).refuses(store, folder) is None), "flax")
    if known != "flax":  # Hugging Face's folders may contain both formats
        raise ExistsError(f"{folder}: expected a folder to write into, found a checkpoint of the format {known!r}")


@contextlib.contextmanager
def _added(store: Store, folder: str) -> Iterator[Create]:
    """Yields the function that makes files in an existing folder. Each appears when complete; an error removes all."""
    added: list[str] = []

    @contextlib.contextmanager
    def create(name: str) -> Iterator[Writer]:
        place = posixpath.join(folder, name)
        with store.new_file(place, overwrite=False) as file:
            yield file
        added.append(place)

    try:
        yield create
    except BaseException:
        with contextlib.suppress(OSError):
            for place in reversed(added):
                store.delete(place)
            store.settle(folder)
        raise
