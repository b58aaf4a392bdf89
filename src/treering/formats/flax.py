"""Flax's MessagePack files: those of `flax.serialization`, and Flax's checkpoints from before Orbax.

One file is one state dict. Hugging Face calls it ``flax_model.msgpack`` in its own folder, and splits large ones
into several files with an index. Jobs of several processes stored shared arrays as zarr arrays in the folder
``{file}_gda``. clu writes ``ckpt-3.flax`` and then TensorFlow's ``ckpt-3.index``, and calls both ``ckpt-3``.
TensorFlow's part, such as an iterator over data, is opened by the name of the index.

When Treering writes a tree, lists and tuples become maps from ``"0"``, as in Flax. Functions have no value and
become nil.
"""

import itertools
import math
import os
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .._core.entries import lost_entry
from .._core.leaf_paths import join_names, key_text, split
from .._core.source import Source
from .._threads.preload_decoders import preload_decoders
from .._threads.python_gc import gc_paused
from ..errors import CorruptError, UnsafeError
from ..stores.file_io import is_file, open_fetched, read_file
from ..stores.read_errors import refusal
from ..stores.store import Store
from . import accepts, is_damaged_step, may_be_file
from ._shared.msgpack import DEPTH, EXT, MAP, NEVER, STR, beginning, begins_with, tokens

if TYPE_CHECKING:
    from ._shared.state_dict import StateLeaves

_WEIGHTS = "flax_model.msgpack"  # in a folder of Hugging Face
_INDEX = _WEIGHTS + ".index.json"
_ARRAYS_SUFFIX = "_gda"  # the suffix of the folder with the arrays of a file
_PREFIX = "checkpoint_"  # Flax's default prefix
_OF_CLU, _COMMIT = ".flax", ".index"
_CLU = re.compile(r"(.+-)(\d{1,18})\.flax")
_OF_TENSORFLOW = re.compile(r".+\.data-\d{5}-of-\d{5}|events\.out\.tfevents\..+")  # variables, TensorBoard's events
# The shortest beginning that leaves a number. A sign belongs to the number unless it separates words.
_STEP = re.compile(r"(.*?)((?:(?<![A-Za-z0-9])[-+])?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", re.ASCII | re.DOTALL)


def step_of(name: str) -> tuple[str, int | float] | None:
    """Returns prefix and step of a file name; None if it does not end in a number from 0. ``1e1`` is the int 10."""
    if clu := _CLU.fullmatch(name):
        return clu[1], int(clu[2])
    found = None if _OF_TENSORFLOW.fullmatch(name) else _STEP.fullmatch(name)
    if found is None:
        return None
    if found[2].isdecimal():
        return found[1], int(found[2])
    number = float(found[2])
    if number < 0 or math.isinf(number):
        return None
    return found[1], int(number) if number.is_integer() else number


_Runs = Mapping[str, dict[int | float, str]]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


preload_decoders(_Index)


class Flax:
    """Implements `treering.formats.Format` for Flax's files."""

    name = "flax"
    suffixes = (".msgpack",)
    boxes = ("axis-metadata",)

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            path = _main(store, path) if store.stat(path) is None else path
            found = store.stat(path)
            if found is None:
                return "there is nothing"
            if found.is_folder:
                if path.endswith(_ARRAYS_SUFFIX):
                    return f"these are arrays of the checkpoint in {path.removesuffix(_ARRAYS_SUFFIX)}; open that file"
                if _main(store, path) != path:
                    return None
                runs = self._runs(store, path, store.list(path))
                if (run := _choose_run(runs)) and isinstance(max(run), float):
                    return f"the latest step, {run[max(run)]}, is not an integer; open a file by its own path"
                return _several_runs_error(path, runs) if len(runs) > 1 else f"it is a folder without {_WEIGHTS}"
            if os.path.basename(path) == _INDEX:
                begin = beginning(store, path, 64).strip(b"\0 \t\r\n")[:1]
                return None if begin in (b"{", b"[", b"") else "it has the name of an index, but is not JSON"
            data = beginning(store, path)
        except OSError as error:
            return refusal(error, path)
        return None if _plausible(data, found.nbytes, path) else "it does not begin like a state dict in MessagePack"

    def open(self, store: Store, path: str) -> Source:
        from ._shared import data_iterators
        from ._shared.reader import ForeignReader
        from ._zarr import array as zarr
        from ._zarr.leaves import ZarrReader

        main = _main(store, path)
        with gc_paused():
            leaves, nbytes = (_open_shards if os.path.basename(main) == _INDEX else _open_file)(store, main)
        named = step_of(os.path.basename(main)) if main in (path, path + _OF_CLU) else None
        has_zarr = any(isinstance(array, zarr.Array) for array in leaves.arrays.values())
        return (ZarrReader if has_zarr else ForeignReader)(
            self.name,
            path,
            leaves.entries,
            leaves.arrays,
            skeleton=leaves.skeleton or None,
            step=named[1] if named and isinstance(named[1], int) else None,
            nbytes=nbytes,
            left_out=data_iterators.describe_siblings(store, main.removesuffix(_OF_CLU) + _COMMIT)
            if main.endswith(_OF_CLU)
            else (),
        )

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        run = _choose_run(self._runs(store, folder, names))
        if run and isinstance(max(run), float):  # a caller that takes the latest step must not get an earlier one
            return {}
        return {step: name for step, name in run.items() if isinstance(step, int)}

    def _runs(self, store: Store, folder: str, names: Sequence[str]) -> "_Runs":
        """Returns the names of checkpoints in a folder by their prefixes and steps."""
        runs: dict[str, dict[int | float, str]] = {}
        there = set(names)
        for name in () if _INDEX in there else names:  # a folder with an index is one checkpoint
            if _CLU.fullmatch(name) and not _is_finished(name, there):
                continue
            named = step_of(name)
            if named is not None and named[1] not in runs.get(named[0], ()):
                path = posixpath.join(folder, name)
                if may_be_file(store, path) and accepts(self, store, path):
                    runs.setdefault(named[0], {})[named[1]] = name
        # Files of another prefix whose numbers are all fractions may be versions. They make no other run ambiguous.
        steps = {name: run for name, run in runs.items() if name == _PREFIX or any(type(step) is int for step in run)}
        return steps or runs

    def damaged_steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        steps: dict[int, str] = {}
        for name in names:
            named, path = step_of(name), posixpath.join(folder, name)
            known = named and (named[0] == _PREFIX or (_CLU.fullmatch(name) and _is_finished(name, names)))
            if named and known and type(named[1]) is int and is_damaged_step(store, path, path, begins_with(MAP)):
                steps.setdefault(named[1], name)
        return steps

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        named = step_of(os.path.basename(path))
        return ("step",) if named and named[1] == contents.step else ()

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        from ._shared import state_dict_write as writing
        from ._shared.recognition import new_file

        writing.check(self.name, contents, options)
        with new_file(store, path, self.name, overwrite=overwrite) as file:
            writing.write(file, writing.tree_of(contents), contents)
        return file.size


def _is_finished(name: str, names: Collection[str]) -> bool:
    """Returns True if clu has written TensorFlow's index, which it writes last."""
    return name.removesuffix(_OF_CLU) + _COMMIT in names


def _main(store: Store, path: str) -> str:
    """Returns the file that opens a path: Hugging Face's model in a folder, or Flax's file of a clu checkpoint."""
    found = store.stat(path)
    if found is None and all(is_file(store, path + ending) for ending in (_OF_CLU, _COMMIT)):
        return path + _OF_CLU
    if found is not None and found.is_folder:
        for file in (posixpath.join(path, _INDEX), posixpath.join(path, _WEIGHTS)):
            if is_file(store, file):
                return file
    return path


def _choose_run(runs: "_Runs") -> dict[int | float, str]:
    """Returns the only run of a folder. Several prefixes are several runs, and nothing says which the user means."""
    return runs.get(_PREFIX) or (next(iter(runs.values())) if len(runs) == 1 else {})


def _several_runs_error(folder: str, runs: "_Runs") -> str:
    """Returns the reason why a folder with steps of several runs is neither a run nor a checkpoint."""
    latest = [posixpath.join(folder, steps[max(steps)]) for _, steps in sorted(runs.items())]
    return (
        f"it has files of {len(runs)} prefixes, perhaps of different runs: "
        f"{join_names(tuple(map(repr, sorted(runs))))}; open "
        f"one file by its path ({join_names(tuple(latest))}), or give each run its own folder"
    )


def _plausible(data: bytes, size: int, path: str) -> bool:
    """Returns True if a file beginning with `data` may be a state dict.

    Without Flax's suffix, it must begin with an array or a map that is not empty.
    """
    if not data or data[0] == 0xC1:
        return False
    if path.endswith(Flax.suffixes) or (size == 1 and data[0] == 0x80):
        return True
    if data[8:9] == b"{" and 8 + int.from_bytes(data[:8], "little") <= size:
        return False  # a safetensors file whose header's length looks like a map
    first, second = itertools.islice(itertools.chain(tokens(data), [(NEVER, None)] * 2), 2)
    return (first[0] == EXT and first[1] in (1, 2, 3)) or (first[0] == MAP and first[1] and second[0] == STR)


def _open_file(store: Store, path: str) -> "tuple[StateLeaves, int]":
    """Reads the leaves of a file; also returns the bytes of the file and of its zarr arrays."""
    from ._shared.reader import attempt
    from ._shared.safety import check_inside
    from ._shared.state_dict import PLACEHOLDER, Elsewhere, StateDict

    file = open_fetched(store, path)
    zarr_nbytes = 0

    def find(leaf: str, value: Any) -> Elsewhere | CorruptError | None:
        nonlocal zarr_nbytes
        if type(value) is not str or not value.startswith(PLACEHOLDER):
            return None
        from ._zarr.array import ZarrArray
        from ._zarr.leaves import folder_size

        place, name = path + _ARRAYS_SUFFIX, value.removeprefix(PLACEHOLDER)
        if name:  # otherwise the entire tree is one array
            check_inside(place, name)
            place = posixpath.join(place, name)
        array = attempt(lambda: ZarrArray(store, place))
        if isinstance(array, CorruptError):
            return array
        zarr_nbytes += folder_size(store, place)
        return Elsewhere(array.dtype, array.shape, array)

    scanned = StateDict(file, find=find)
    return scanned.leaves(scanned.value_of_range(0, file.size)), file.size + zarr_nbytes


def _open_shards(store: Store, index: str) -> "tuple[StateLeaves, int]":
    """Reads a state dict from the files that an index names; also returns the bytes of these files."""
    from ._shared.reader import attempt, check_file
    from ._shared.safety import check_distinct, check_inside
    from ._shared.state_dict import StateLeaves

    folder = os.path.dirname(index)
    try:
        places = msgspec.json.decode(read_file(store, index), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{index}: expected the index of a checkpoint in several files: {error}") from None
    found = StateLeaves([], {}, ())
    total = 0
    damage: dict[str, str] = {}
    for name in sorted(set(places.values())):
        check_inside(folder, name)
        path = posixpath.join(folder, name)
        opened = attempt(lambda path=path: _open_file(store, check_file(store, path, index)))
        if isinstance(opened, CorruptError):
            damage[name] = str(opened)
            continue
        leaves, nbytes = opened
        total += nbytes
        for entry in leaves.entries:
            key = "/".join(split(entry.path))  # some writers nest the files, others use flat keys
            if places.get(key) != name:
                raise CorruptError(f"{path}: expected no leaf {key}, because {index} places it in another file")
            place = _path(key, index)
            found.entries.append(entry.at(place))
            if entry.path in leaves.arrays:
                found.arrays[place] = leaves.arrays[entry.path]
    there = {entry.path for entry in found.entries}
    for key, name in places.items():
        if (place := _path(key, index)) not in there:
            why = f"{posixpath.join(folder, name)}: expected the leaf {key!r}, which the index places in this file"
            found.entries.append(lost_entry(place, damage.get(name, why)))
    check_distinct([entry.path for entry in found.entries], index)
    return found, total


def _path(key: str, index: str) -> str:
    if key.count("/") > DEPTH:
        raise UnsafeError(f"{index}: expected at most {DEPTH} levels, found the leaf {key:.100}")
    return "/".join(key_text(part) for part in key.split("/"))


FORMAT = Flax()
