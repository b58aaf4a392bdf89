"""The step that a run goes on from: the latest good one, or the one asked for; the same in all processes."""

from collections.abc import Mapping
from typing import Any

from .._core import expansion
from .._processes import consistency
from .._processes.calls import Call
from .._restore.match import Policy
from ..formats.treering import summary
from ..stores.nfs import look_anew
from .directory import Directory
from .latest_good import latest_good, listed_again
from .two_places import TwoPlaces


def has_begun(directory: Directory | TwoPlaces) -> bool:
    """Whether there is a step.

    Raises `MismatchError` when the directory is one checkpoint, and so no run, and `UnsupportedError` when directories
    of steps cannot be read.
    """
    if directory.all_steps():
        return True
    directory.check_new()
    return False


def check(options: Mapping[str, Any]) -> None:
    """Raises `MismatchError` for options of `treering.restore` that a restore would refuse, whatever it finds."""
    allowed = {name: options[name] for name in ("missing", "extra", "dtype") if name in options}
    Policy(**allowed)
    expansion.check_bound(options.get("max_expansion", expansion.MOST))


def restore(
    call: Call,
    directory: Directory | TwoPlaces,
    like: Any,
    step: int | None,
    fallback: bool,
    options: Mapping[str, Any],
) -> tuple[int, Any]:
    """Restores a step; returns its number and its tree. See `Checkpointer.restore`."""

    def choose() -> list[tuple[int, str, str | None]]:
        return [(place.step, place.path, place.format) for place in directory.to_read(step)]

    def attempt() -> tuple[int, tuple[str, Any]]:
        places = [directory.place(*one) for one in call.broadcast(choose)]
        if places and call.index and summary.look(places[0].store, places[0].path) is None:
            look_anew(places[0].store, places[0].path)
        return latest_good(
            directory.root,
            places,
            lambda ckpt: (ckpt._source.identity, ckpt._restore(like, call, **options)),
            fallback=fallback and step is None,
            damaged=directory.mark_damaged,
            on_all_processes=lambda attempt: consistency.on_all_processes(call, attempt),
        )

    number, (_, tree) = attempt() if step is not None else listed_again(attempt)
    return number, tree
