"""Gives names to the leaves of a checkpoint that has none: they are those of the template, in the same order."""

import logging
from typing import Any

import jax
import numpy as np

from .._core import dtypes, views
from .._core.describe import describe_entry
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.leaf_paths import join_names
from .._core.source import Source
from .._core.subtree import full_source
from .._core.values import encode
from .._pytree.walk import FlatTree
from ..errors import MismatchError

_log = logging.getLogger("treering")
_SCALARS = (bool, int, float, complex)


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
        leaves[path] = _like(reader, record, leaf, ambiguous=entry.path in reader.ambiguous_dtypes).at(path)
    rest = {path: leaf for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if path not in leaves}
    for path, leaf in rest.items():
        value = leaf if type(leaf) in (str, bytes) else None
        leaves[path] = views.Leaf(ValueEntry(path, *encode(value)))
    if text := [path or "(root)" for path in rest if leaves[path].entry.type != "none"]:
        _log.info("%s: text and bytes are the template's, because the file has none: %s", name, ", ".join(text))
    return views.View(reader, {path: leaves[path] for path in flat_tree.paths})


def _has_record(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct, *_SCALARS))


def _like(reader: Source, record: views.Leaf, leaf: Any, *, ambiguous: bool) -> views.Leaf:
    entry = record.array
    if type(leaf) in _SCALARS and entry.shape == ():
        plan = record.plan_of(())
        value = plan.make(reader.read(plan.needs)).item()
        return views.Leaf(ValueEntry(entry.path, *encode(value)))
    dtype = getattr(leaf, "dtype", None)
    if ambiguous and isinstance(dtype, np.dtype) and dtype.itemsize == dtypes.itemsize(entry.dtype):
        return views.reinterpreted(record, dtypes.to_text(dtype))
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
