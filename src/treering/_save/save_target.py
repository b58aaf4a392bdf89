"""The place of a save, and the checks that a save makes before anything is written there."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from .. import formats
from .._core import dtypes
from .._core.source import INFO_FIELDS
from .._core.views import View
from .._processes.calls import Call
from ..errors import ExistsError, UnsupportedError
from ..formats import Format
from ..formats.treering import write as native
from ..formats.treering.commit import check_free
from ..stores.file_io import is_folder
from ..stores.store import Store
from .options import SaveOptions

_log = logging.getLogger("treering")


class SaveTarget(NamedTuple):
    """The place, format and options of a save.

    memory_ok: see `StagedSupply`. None if the copies of this process cannot make another process of the job short of
        memory.
    """

    call: Call
    store: Store
    path: str
    format: Format
    info: native.Info
    options: SaveOptions
    memory_ok: Callable[[int], bool] | None = None


def requested_options(target: SaveTarget) -> str:
    """Returns as text the options that must be the same in every process."""
    options = target.options
    dtype = "" if options.dtype is None else f", dtype={dtypes.to_text(dtypes.requested_dtype(options.dtype))}"
    format_options = "".join(f", {name}={value!r}" for name, value in sorted(options.format_options.items()))
    return f"format={target.format.name!r}{format_options}{dtype}, {len(options.rules)} rules"


def check_info_kept(target: SaveTarget, view: View) -> None:
    """Checks whether the format can store the step, metrics and metadata.

    Raises `UnsupportedError` if one that the caller gave would be lost. Logs one that a copied checkpoint loses.
    """
    format, place = target.format, target.path
    there = [name for name in INFO_FIELDS if getattr(view, name) is not None and (name != "metrics" or view.metrics)]
    lost = [name for name in there if name not in format.keeps(place, view)]
    if given := [name for name in lost if name in target.options.explicit_info]:
        raise UnsupportedError(
            f"{place}: the format {format.name!r} cannot store {' and '.join(given)}; "
            "remove it, put it into the tree, or save in the native format"
            + (" (a step can be part of the name, as in the format's library)" if "step" in given else "")
        )
    if lost:
        _log.warning("%s: %s left out: the format %r cannot store it", place, " and ".join(lost), format.name)


def check_path_free(target: SaveTarget) -> None:
    """Raises `ExistsError` for a path in use, before several processes write anything.

    The format checks the path again when it writes. That would be late here, after all have saved a temporary tree.
    """
    if target.format.name == "treering":
        check_free(target.store, target.path, overwrite=target.options.overwrite)
        return
    joins = target.options.format_options.keys() - {
        "composite"
    }  # Shards of safetensors may be added to a used directory.
    if not (target.options.overwrite or joins) and target.store.stat(target.path) is not None:
        what = "directory" if is_folder(target.store, target.path, links=True) else "file"
        raise ExistsError(f"{target.path}: expected a free path, found a {what}; pass overwrite=True to replace it")
    check_replaceable(target)


def check_replaceable(target: SaveTarget) -> None:
    """Raises `ExistsError` if `overwrite` would replace a directory that is not a checkpoint of the format."""
    store, place = target.store, target.path
    if target.options.overwrite and is_folder(store, place, links=True):
        found = formats.detect(store, place).name if formats.is_known(store, place) else None
        if found is None and not store.list(place):
            return  # An empty directory, as programs make before they save.
        if found != target.format.name:
            what = "a directory that is not a checkpoint" if found is None else f"one of the format {found!r}"
            raise ExistsError(
                f"{place}: expected a checkpoint of the format {target.format.name!r} to replace, found {what}; choose "
                "another path or remove it yourself"
            )


def check_iterators(target: SaveTarget, view: View) -> None:
    """Raises `UnsupportedError` if the tree has iterators and the format cannot hold their states."""
    found = [path for path, entry in view.entries.items() if entry.type == "iterator"]
    check = getattr(target.format, "check_iterators", None)  # Orbax has it.
    if found and check is not None:
        check(view, **target.options.format_options)
    elif found:
        raise UnsupportedError(
            f"{target.path}: {', '.join(found)}: only the native format holds the state of data iterators, and the "
            "format 'orbax' that of Grain's; leave it out with treering.rules.drop"
        )
