"""Writes a folder of safetensors files: checks options, chooses names, and creates the files."""

import contextlib
import decimal
import functools
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._core.entries import ArrayEntry
from ..._core.leaf_paths import join_names
from ...errors import ExistsError, MismatchError
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store, Writer
from .. import get
from .. import names as format_names
from .folder import INDEX, SUFFIX, candidates, chosen, written_names
from .nibbles import stored_nbytes

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) *([KMGT]i?B|B)")
_UNITS = {"B": 1} | {f"{unit}B": 1000**n for n, unit in enumerate("KMGT", 1)}
_UNITS |= {f"{unit}iB": 1024**n for n, unit in enumerate("KMGT", 1)}
_FIELD = "{suffix}"  # in a pattern of file names
Create = Callable[[str], contextlib.AbstractContextManager[Writer]]


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
