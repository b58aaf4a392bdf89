"""Describes the files of a checkpoint that Treering does not read, such as the states of TensorFlow's iterators."""

import posixpath
import re
from collections.abc import Sequence

from ..._core.leaf_paths import join_names
from ...errors import TreeringError
from ...stores.file_io import is_file, read_file
from ...stores.read_errors import raise_if_momentary
from ...stores.store import Store

_INDEX = ".index"
_ITERATOR_KEY_SUFFIX = b"ITERATOR_STATE"  # the end of the name of an iterator's state in an index
_PROCESS_FILE = re.compile(r"(.+?-\d+-of-\d+)(?:\.index|\.data-\d{5}-of-\d{5})?")
_POSITION_TEXT = "the position of an iterator of TensorFlow"


def describe(store: Store, folder: str, files: Sequence[str]) -> str:
    """Describes the files in a folder: as the position of an iterator of TensorFlow if they are one, else by name."""
    indices = tuple(name for name in files if name.endswith(_INDEX))
    if indices and has_iterator(store, posixpath.join(folder, indices[0])):
        return f"{_POSITION_TEXT}: {join_names(tuple(name.removesuffix(_INDEX) for name in indices))}"
    return f"files of an unknown kind: {join_names(tuple(files))}" if files else "an empty folder"


def describe_process_files(store: Store, folder: str) -> Sequence[str]:
    """Describes the positions of the data iterators in a folder of T5X: one ``train_ds-000-of-001`` per process."""
    found: dict[str, bool] = {}
    for name in store.list(folder):
        named = _PROCESS_FILE.fullmatch(name)
        if named and is_file(store, posixpath.join(folder, name)):
            found[named[1]] = found.get(named[1], False) or name != named[1]
    texts = {True: f"{_POSITION_TEXT}, which only that restores", False: "the position of an iterator"}
    return [
        f"{join_names(names)} ({text})"
        for kind, text in texts.items()
        if (names := tuple(name for name, of_tensorflow in found.items() if of_tensorflow is kind))
    ]


def describe_siblings(store: Store, index: str) -> Sequence[str]:
    """Describes the position of a data iterator in an index of TensorFlow that clu has written next to a checkpoint."""
    return (
        [f"{posixpath.basename(index)} ({_POSITION_TEXT}, which only that restores)"]
        if has_iterator(store, index)
        else ()
    )


def has_iterator(store: Store, index: str) -> bool:
    """Returns True for an index of TensorFlow with an iterator in it, and False for one that cannot be read."""
    try:
        return is_file(store, index) and _ITERATOR_KEY_SUFFIX in read_file(store, index)
    except (OSError, TreeringError) as error:
        raise_if_momentary(error)  # An error that may pass says nothing about the file.
        return False
