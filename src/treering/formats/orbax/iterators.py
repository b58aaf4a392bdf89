"""Items that are states of data iterators: one file for each process, as Grain's handlers write them.

``data/process_0-of-2.json`` is the state of process 0 of two. Grain writes the state of a `DatasetIterator` as JSON.
The state of any other iterator, such as a `DataLoader`, is bytes, which may be JSON as well. The file does not say
which it is, so an iterator whose state is bytes accepts JSON as bytes; see `treering._pytree.iterator_restore`.
"""

import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from ..._core.describe import rename_code
from ..._core.entries import Entry, IteratorEntry, IteratorInfo, StatesEntry
from ..._core.iterator_states import Types, encode_state, per_process
from ..._core.leaf_paths import join_names
from ..._pytree.iterators import join_states
from ...errors import CorruptError, MismatchError, UnsupportedError
from ...stores.file_io import is_file, read_file
from ...stores.store import Store
from .._shared.reader import attempts

STATE = re.compile(r"process_(\d{1,9})-of-(\d{1,9})(?:\.\w+)?")
_GRAIN = "grain"  # the library whose handlers write such files
_SPLIT = {"parent_state", "remainder_slices", "elements_from_buffer_after_checkpoint"}  # ConcatThenSplitIterDataset
HANDLER = "grain._src.python.checkpoint.handler.CheckpointHandler"
HANDLERS = ("CheckpointHandler", "PyGrainCheckpointHandler", "GrainCheckpointHandler")  # classes of Grain and MaxText


def no_item(path: str) -> str:
    """Returns the reason why the state of an iterator cannot be a leaf of a tree, and how it becomes an item."""
    top = path.rpartition("/")[2]
    move = f", and move it to the top of the tree: {rename_code(path, top)}" if top != path else ""
    return (
        f"the state of an iterator, which Orbax holds as an item of its own: use composite=True{move}; or leave it "
        f"out: tr.rules.drop({path!r})"
    )


def state_files(store: Store, folder: str) -> list[str]:
    """Returns the names of the state files in a folder."""
    return [
        name for name in store.list(folder) if STATE.fullmatch(name) and is_file(store, posixpath.join(folder, name))
    ]


def read_states(store: Store, folder: str, at: str | None) -> IteratorEntry | None:
    """Reads the states of all processes in a folder as one leaf; None if the folder has no state file.

    Raises `CorruptError` unless there is one state for each process of one job.
    """
    files: dict[tuple[int, int], str] = {}
    for name in state_files(store, folder):
        found = STATE.fullmatch(name)
        assert found
        index, count = int(found[1]), int(found[2])
        if files.setdefault((count, index), name) != name:
            raise CorruptError(f"{folder}: expected one state for each process, found two for process {index}")
    if not files:
        return None
    counts = sorted({count for count, _ in files})
    if len(counts) > 1:
        listed = join_names(tuple(map(str, counts)))
        raise CorruptError(f"{folder}: expected the files of one job, found those of jobs with {listed} processes")
    there = sorted(index for _, index in files)
    if len(there) != counts[0] or there[-1] >= counts[0]:
        listed = join_names(tuple(map(str, there)))
        raise CorruptError(
            f"{folder}: expected the states of {counts[0]} processes, found those of {listed}; was the checkpoint "
            "copied completely?"
        )
    paths = [posixpath.join(folder, files[counts[0], index]) for index in there]
    states: list[tuple[Any, Types]] = []
    for state in attempts(store, paths, lambda path: _read(store, path)):
        if isinstance(state, CorruptError):
            raise state
        states.append(state)
    try:
        return join_states(at or "", states, IteratorInfo(_GRAIN))
    except MismatchError as error:
        raise CorruptError(f"{folder}: {error}") from None


def _read(store: Store, path: str) -> tuple[Any, Types]:
    """Reads the state in a file: parsed if it is JSON, otherwise as bytes. Raises `CorruptError` if it is damaged."""
    data = read_file(store, path)
    if not data.strip(b"\0"):
        what = "only 0s" if data else "an empty file"
        raise CorruptError(f"{path}: expected the state of an iterator, found {what}")
    try:
        return encode_state(json.loads(data, object_hook=_with_tuples))
    except ValueError as error:
        if data.lstrip()[:1] in (b"{", b"["):
            raise CorruptError(f"{path}: expected JSON, because it begins so: {error}") from None
    except (RecursionError, UnsupportedError):
        pass  # JSON that is not the state of an iterator
    return encode_state(data)


def _with_tuples(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a part of a state with the tuples that Grain's JSON has as lists.

    The iterator compares them with a tuple that means "nothing". With a list, it leaves out the next document.
    """
    if state.keys() == _SPLIT and isinstance(slices := state["remainder_slices"], dict):
        pairs = {key: tuple(pair) if isinstance(pair, list) else pair for key, pair in slices.items()}
        return {**state, "remainder_slices": pairs}
    return state


def refused(entry: Entry) -> str | None:
    """Returns the reason why a leaf cannot be an item as Grain's handler writes it; None for states that can."""
    if not isinstance(entry, IteratorEntry):
        return "no iterator"
    module, name = entry.info.module, entry.info.name
    if module.partition(".")[0] != _GRAIN:
        what = f"the state of a {module}.{name}" if module else "the state of an iterator whose library is not recorded"
        return f"{what}; Orbax holds those of Grain's iterators alone; leave it out with treering.rules.drop"
    try:
        for state in entry.decode():
            _text(state)
    except (TypeError, ValueError) as error:
        return f"a state that Grain cannot write as JSON ({error}); leave it out with treering.rules.drop"
    return None


def files_of(entry: IteratorEntry, count: int) -> Mapping[str, bytes]:
    """Returns the files with the states of all processes, by name.

    count: the number of processes of a job that has one state for all of them.
    """
    states = entry.decode()
    if not isinstance(entry, StatesEntry) and per_process(entry.value)[0] == "all":
        states *= count
    return {f"process_{n}-of-{len(states)}.json": _text(state) for n, state in enumerate(states)}


def _text(state: Any) -> bytes:
    return state if isinstance(state, bytes) else json.dumps(state, indent=4).encode()
