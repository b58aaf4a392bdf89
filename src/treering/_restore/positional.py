"""Takes from the template what a checkpoint does not record: names, in the same order, and dtypes."""

import logging
from typing import Any

import jax
import numpy as np

from .._core import dtypes, views
from .._core.describe import describe_entry
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.leaf_paths import join_names
from .._core.source import Source, full_source, subtree_of, subtree_path
from .._core.values import encode
from .._pytree import variable_levels
from .._pytree.walk import FlatTree
from ..errors import MismatchError

_log = logging.getLogger("treering")
_SCALARS = (bool, int, float, complex)
_OF_ANOTHER_PACKAGE = 2  # the value of `numpy.dtype.isbuiltin` for dtypes of ml_dtypes


def name_leaves(source: Source, flat_tree: FlatTree, name: str) -> views.View:
    """Returns the leaves of a positional source, or of a part of it, under the paths of the template.

    Only arrays and numbers have a record. Text and bytes are taken from the template, and Treering logs that. Where
    the format does not record a dtype, the bytes have the dtype of the template.

    Raises `MismatchError` if the counts differ, and for ``...``, which may stand for any number of records.
    """
    entries, reader = source.entries, full_source(source)
    if skipped := tuple(path for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if leaf is ...):
        raise MismatchError(
            f"{name}: expected the entire model as the template, found ... at {join_names(skipped)}; the "
            f"{len(entries)} "
            "records have no names, so it is unknown how many of them to skip; put the shapes of the saved leaves "
            "there instead, as equinox.filter_eval_shape makes them"
        )
    wanted = [(path, leaf) for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if _has_record(leaf)]
    if len(wanted) != len(entries):
        shown = _first_difference(wanted, list(entries.values()))
        raise MismatchError(
            f"{name}: expected the {len(wanted)} arrays and numbers of the template, found {len(entries)} "
            f"records, which have no names{shown}; restore into the same model that was saved"
        )
    leaves: dict[str, views.Leaf] = {}
    for (path, leaf), entry, record in zip(wanted, entries.values(), views.plain_leaves(entries).values(), strict=True):
        ambiguous = entry.path in reader.ambiguous_dtypes
        leaves[path] = _like(reader, record, leaf, f"{name}: {path}", ambiguous=ambiguous).at(path)
    rest = {path: leaf for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if path not in leaves}
    for path, leaf in rest.items():
        value = leaf if type(leaf) in (str, bytes) else None
        leaves[path] = views.Leaf(ValueEntry(path, *encode(value)))
    if text := [path or "(root)" for path in rest if leaves[path].entry.type != "none"]:
        _log.info("%s: text and bytes are the template's, because the file has none: %s", name, ", ".join(text))
    return views.View(reader, {path: leaves[path] for path in flat_tree.paths})


def name_dtypes(source: Source, flat_tree: FlatTree, name: str) -> Source:
    """Returns a source whose arrays without a recorded dtype have that of the template.

    Raises `MismatchError` for a dtype of the template that they cannot have been saved with.
    """
    full = full_source(source)
    leaves = views.plain_leaves(full.entries)
    named = variable_levels.rename_to_tree(flat_tree, source.entries)
    for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True):
        if path in named and named[path].path in full.ambiguous_dtypes and _has_record(leaf):
            leaves[named[path].path] = _typed(leaves[named[path].path], leaf, f"{name}: {path}")
    view = views.View(full, leaves, full.skeleton)
    entries = {key: view.entries[entry.path] for key, entry in source.entries.items()}
    return subtree_of(view, entries, source.skeleton, subtree_path(source))


def _typed(record: views.Leaf, leaf: Any, where: str) -> views.Leaf:
    """Returns an array without a recorded dtype as the template's. Bytes stay bytes.

    NumPy records its own dtypes, so it has none of these.
    """
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.itemsize == dtypes.itemsize(record.array.dtype):
        if dtype == np.uint8:
            return record
        if dtype.isbuiltin == _OF_ANOTHER_PACKAGE:
            return views.reinterpreted(record, dtypes.to_text(dtype))
    raise MismatchError(
        f"{where}: expected {type(leaf).__name__ if dtype is None else dtype}, found bytes of a dtype that the file "
        "does not record (float8, int4 or others); put the dtype that was saved into the template, and convert the "
        "restored array"
    )


def _has_record(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct, *_SCALARS))


def _like(reader: Source, record: views.Leaf, leaf: Any, where: str, *, ambiguous: bool) -> views.Leaf:
    entry = record.array
    if ambiguous:
        return _typed(record, leaf, where)
    if type(leaf) in _SCALARS and entry.shape == ():
        plan = record.plan_of(())
        value = plan.make(reader.read(plan.needs)).item()
        return views.Leaf(ValueEntry(entry.path, *encode(value)))
    return record


def _first_difference(wanted: list[tuple[str, Any]], entries: list[Entry]) -> str:
    for n, ((path, leaf), entry) in enumerate(zip(wanted, entries, strict=False)):
        shape = tuple(getattr(leaf, "shape", ()))
        if isinstance(entry, ArrayEntry) and shape != entry.shape:
            first = path or "(root)"
            return (
                f"; the first difference is {first}: expected {list(shape)}, found {describe_entry(entry)} (record {n})"
            )
    return ""
