"""Where a save goes, and what is refused before anything is written there."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from .. import formats
from .._core import dtypes
from .._core.source import ABOUT
from .._core.views import View
from .._processes.calls import Call
from ..errors import ExistsError, UnsupportedError
from ..formats import Format
from ..formats.treering import write as native
from ..formats.treering.commit import check_free
from ..stores.store import Store
from ..stores.whole_files import is_folder
from .options import SaveOptions

_log = logging.getLogger("treering")


class Target(NamedTuple):
    """The place, format and options of a save.

    has_room: see `Staging`; None where no other process of the job can be short of memory by what this one takes.
    """

    call: Call
    store: Store
    path: str
    format: Format
    info: native.Info
    options: SaveOptions
    has_room: Callable[[int], bool] | None = None


def requested(target: Target) -> str:
    """What must be the same in every process, as text."""
    options = target.options
    dtype = "" if options.dtype is None else f", dtype={dtypes.to_text(dtypes.asked(options.dtype))}"
    of_format = "".join(f", {name}={value!r}" for name, value in sorted(options.of_format.items()))
    return f"format={target.format.name!r}{of_format}{dtype}, {len(options.rules)} rules"


def check_kept(target: Target, view: View) -> None:
    """Raises `UnsupportedError` for what was given and would be lost; logs what is left out of a copied checkpoint."""
    format, place = target.format, target.path
    there = [name for name in ABOUT if getattr(view, name) is not None and (name != "metrics" or view.metrics)]
    lost = [name for name in there if name not in format.keeps(place, view)]
    if given := [name for name in lost if name in target.options.given]:
        raise UnsupportedError(
            f"{place}: expected nothing that the format {format.name!r} has no place for, found {' and '.join(given)}; "
            "leave it out, put it into the tree, or save in the native format"
            + (" (a step may be part of the name, as its library has it)" if "step" in given else "")
        )
    if lost:
        _log.warning("%s: %s left out: the format %r has no place for it", place, " and ".join(lost), format.name)


def check_free_for_all(target: Target) -> None:
    """Raises `ExistsError` for a path in use, before several processes write anything; later the format itself does."""
    if target.format.name == "treering":
        check_free(target.store, target.path, overwrite=target.options.overwrite)
        return
    joins = target.options.of_format.keys() - {"composite"}  # shards of safetensors may join others
    if not (target.options.overwrite or joins) and target.store.stat(target.path) is not None:
        what = "directory" if is_folder(target.store, target.path, links=True) else "file"
        raise ExistsError(f"{target.path}: expected a free path, found a {what}; pass overwrite=True to replace it")
    check_replaceable(target)


def check_replaceable(target: Target) -> None:
    """Raises `ExistsError` when `overwrite` would replace a directory that is no checkpoint of the format."""
    store, place = target.store, target.path
    if target.options.overwrite and is_folder(store, place, links=True):
        found = formats.detect(store, place).name if formats.is_known(store, place) else None
        if found != target.format.name:
            what = "a directory that is no checkpoint" if found is None else f"one of the format {found!r}"
            raise ExistsError(
                f"{place}: expected a checkpoint of the format {target.format.name!r} to replace, found {what}; choose "
                "another path or remove it yourself"
            )


def check_no_iterators(place: str, view: View) -> None:
    if iterators := [path for path, entry in view.entries.items() if entry.type == "iterator"]:
        raise UnsupportedError(
            f"{place}: {', '.join(iterators)}: only the native format holds the state of data iterators; leave it out "
            "with treering.rules.drop"
        )
