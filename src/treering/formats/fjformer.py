"""The streams of FJFormer and EasyLM: one leaf after another, each with its key.

A file is a sequence of ``[[key, …], bin]``, where bin is the leaf in Flax's MessagePack. Empty containers leave no
trace, and nothing records the number of leaves: a file cut off between two leaves looks complete.

What their loaders call ``state_params`` or ``trainstate_params`` is ``at="params/params"`` in Treering. ``params`` is
a separate file, ``streaming_params``, and ``flax_params`` a file of the format "flax".
"""

import functools
import itertools
import os
import posixpath
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from .._core.entries import Entry
from .._core.leaf_paths import key_text, split
from .._core.skeleton import assemble, infer_container
from .._core.source import Source
from .._threads.python_gc import gc_paused
from ..errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ..stores.file_io import is_file, open_fetched
from ..stores.read_errors import raise_if_momentary, refusal
from ..stores.store import Store
from . import accepts, is_damaged_step
from ._shared.format_parts import FormatDefaults
from ._shared.msgpack import (
    BIN,
    DEPTH,
    LIST,
    NEVER,
    STR,
    Raw,
    beginning,
    begins_with,
    bin_head,
    list_head,
    named,
    pack,
    tokens,
)

if TYPE_CHECKING:
    from ._shared.state_dict import StateLeaves

_NAME = re.compile(r"(streaming_train_state|streaming_state|streaming_params)(?:_([0-9]+))?")
_STREAM_NAMES = (
    "streaming_train_state",
    "streaming_state",
    "streaming_params",
)  # a full state has more than parameters
_MAX_BIN_BYTES = 1 << 32  # bytes of a bin
_PICKLED = "a pickle can run any code, so Treering opens none"
_PICKLE = f"it is a pickle, like the metadata and the dataset next to a stream; {_PICKLED}"


class FJFormer(FormatDefaults):
    """Implements `treering.formats.Format` for streams."""

    name = "fjformer"
    boxes = ("axis-metadata",)

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None:
                return "there is nothing"
            if found.is_folder:
                return None if _find_main(store, path) else f"it is a folder without {', '.join(_STREAM_NAMES)}"
            data = beginning(store, path)
        except OSError as error:
            return refusal(error, path)
        if path.endswith(".pkl") or (data[:1] == b"\x80" and data[1:2] in (b"\2", b"\3", b"\4", b"\5")):
            return _PICKLE
        kinds = tokens(data)  # read lazily: files of other formats may contain very many tokens
        first, second = itertools.islice(itertools.chain(kinds, [(NEVER, 0)] * 2), 2)
        count = second[1] if first == (LIST, 2) and second[0] == LIST else 0
        if count and all(kind == STR for kind, _ in itertools.islice(kinds, count)) and next(kinds, (BIN, 0))[0] == BIN:
            return None
        return "it does not begin like a stream, with the key and the bytes of a leaf"

    def open(self, store: Store, path: str) -> Source:
        from ._shared.reader import ForeignReader
        from ._shared.state_dict import own_step

        found = _NAME.fullmatch(os.path.basename(path))
        main = _find_main(store, path) or path
        with gc_paused():
            leaves, nbytes = _read(store, main)
        step = int(found[2]) if found and found[2] else own_step(leaves, "step")
        by_path = {entry.path: entry for entry in leaves.entries}
        state_dict = functools.partial(infer_container, lists=False, sort=False)  # Flax's state dicts have no lists
        order, skeleton = assemble(by_path, state_dict)
        entries = [by_path[path] for path in order]
        data = _data_files(store, main)
        return ForeignReader(
            self.name, path, entries, leaves.arrays, skeleton=skeleton, step=step, nbytes=nbytes, left_out=data
        )

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        steps: dict[int, str] = {}
        matches = [found for name in names if (found := _NAME.fullmatch(name))]
        # Names with a step come first, and states come before parameters.
        for found in sorted(matches, key=lambda found: (found[2] is None, _STREAM_NAMES.index(found[1]))):
            path = posixpath.join(folder, found[0])
            if accepts(self, store, path):
                step = int(found[2]) if found[2] else _step_of(store, path)
                if step is not None:
                    steps.setdefault(step, found[0])
        return steps

    def damaged_steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        steps: dict[int, str] = {}
        for name in names:
            found, path = _NAME.fullmatch(name), posixpath.join(folder, name)
            if found and found[2] and is_damaged_step(store, path, path, begins_with(LIST)):
                steps.setdefault(int(found[2]), name)
        return steps

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        found = _NAME.fullmatch(os.path.basename(path))
        return ("step",) if found and found[2] and int(found[2]) == contents.step else ()

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        from ._shared import state_dict_write as writing
        from ._shared.recognition import new_file

        def refused(leaf: str, entry: Entry) -> str | None:
            if contents.skeleton is not None and len(contents.skeleton) == 1:
                return "it is not in a container, so it has no key"
            return "more than 4 GiB" if writing.leaf_size(entry) >= _MAX_BIN_BYTES else None

        writing.check(self.name, contents, options, refused)
        if not contents.entries:
            raise UnsupportedError(f"{path}: expected leaves, found none: a stream would be empty")
        with new_file(store, path, self.name, overwrite=overwrite) as file:
            for leaf, entry in contents.entries.items():
                keys = split(leaf)
                file.write(list_head(2) + list_head(len(keys)) + b"".join(map(pack, keys)))
                file.write(bin_head(writing.leaf_size(entry)))
                for part in writing.leaf(entry, contents):
                    file.write(part)
        return file.size


def _find_main(store: Store, folder: str) -> str | None:
    """Returns the stream without a step in its name that opens a folder; None if there is none."""
    paths = [posixpath.join(folder, name) for name in _STREAM_NAMES]
    return next((path for path in paths if (found := store.stat(path)) and found.is_file), None)


def _data_files(store: Store, path: str) -> Sequence[str]:
    """Describes the file with the state of the data that EasyLM writes next to a stream of a full state."""
    found = _NAME.fullmatch(os.path.basename(path))
    if found is None or found[1] == "streaming_params":
        return ()
    name = f"dataset_{found[2]}.pkl" if found[2] else "dataset.pkl"
    there = is_file(store, posixpath.join(os.path.dirname(path), name))
    return [f"{name} (the state of the data; {_PICKLED})"] if there else ()


def _read(store: Store, path: str) -> "tuple[StateLeaves, int]":
    """Reads the leaves of a stream; also returns its size in bytes."""
    from ._shared.safety import check_distinct
    from ._shared.state_dict import StateDict, StateLeaves

    file = open_fetched(store, path)
    scanned = StateDict(file)
    found = StateLeaves([], {}, ())
    at = 0
    while at < file.size:
        pair, at = scanned.scan(at, file.size)
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not list or type(pair[1]) is not Raw:
            raise CorruptError(f"{path}: expected a key and bytes up to byte {at}, found {named(pair)}")
        keys, raw = pair
        if not keys or not all(type(key) is str for key in keys):
            raise CorruptError(f"{path}: expected a key of texts up to byte {at}, found {keys!r:.100}")
        if len(keys) > DEPTH:
            raise UnsafeError(f"{path}: expected at most {DEPTH} levels, found a leaf with {len(keys)}")
        place = "/".join(map(key_text, keys))
        leaves = scanned.leaves(scanned.value_of_range(raw.offset, raw.offset + raw.size), place)
        found.entries.extend(leaves.entries)
        found.arrays.update(leaves.arrays)
    if not found.entries:
        raise CorruptError(f"{path}: expected the leaves of a stream, found none; it is cut short")
    check_distinct([entry.path for entry in found.entries], path)
    return found, file.size


def _step_of(store: Store, path: str) -> int | None:
    from ._shared.state_dict import own_step

    try:
        return own_step(_read(store, path)[0], "step")
    except (TreeringError, OSError) as error:
        raise_if_momentary(error)
        return None  # opening the stream raises the reason


FORMAT = FJFormer()
