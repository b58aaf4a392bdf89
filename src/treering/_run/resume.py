"""Resumes a run: all processes restore the same step, the latest valid one or the requested one."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from .._core import expansion
from .._processes import consistency
from .._processes.calls import Call
from .._restore.checkpoint import Checkpoint
from .._restore.policy import Policy
from .._save.pending import wait_for_all_in
from ..formats.treering import summary
from ..stores.nfs import look_anew
from .collective import Collective
from .directory import Directory
from .latest_good import latest_good, listed_again
from .run import BEFORE_ALL
from .two_places import TwoPlaces

_log = logging.getLogger("treering")


def has_begun(directory: Directory | TwoPlaces) -> bool:
    """Returns True if the run has a step.

    Raises `MismatchError` if the directory is a checkpoint and therefore not a run, and `UnsupportedError` if
    directories of steps cannot be read.
    """
    if directory.all_steps():
        return True
    directory.check_new()
    return False


def has_begun_for_all(collective: Collective, directory: Directory | TwoPlaces) -> bool:
    """Returns the same as `has_begun` in all processes, once every save is over."""
    wait_for_all_in(directory.steps.root)
    with collective.call("restore_or_init()") as call:
        collective.settle(call)
        found = call.broadcast(lambda: has_begun(directory))
        call.close()
    return found


def begin(root: str, init: Callable[[], Any], sharding: Any, options: Mapping[str, Any]) -> Any:
    """Returns the state that `init` makes for a run without steps. See `Checkpointer.restore_or_init`."""
    from .._restore import initial

    _log.info("%s: there is no step, so the run begins with init()", root)
    _check(options)  # Also in the first job, so that a wrong option does not fail only the second.
    if isinstance(sharding, str) and sharding == "saved":  # Nothing is saved yet.
        sharding = None
    return initial.first(init, sharding)


def _check(options: Mapping[str, Any]) -> None:
    """Raises `MismatchError` for options of `treering.restore` that every restore would refuse."""
    allowed = {name: options[name] for name in ("missing", "extra", "dtype") if name in options}
    Policy(**allowed)
    expansion.check_bound(options.get("max_expansion", expansion.MOST))


def open_step(directory: Directory | TwoPlaces, step: int | None) -> Checkpoint:
    """Opens a step, by default the latest valid one. See `Checkpointer.open`."""
    wait_for_all_in(directory.steps.root)

    def attempt() -> Checkpoint:
        return latest_good(directory.root, directory.to_read(step), lambda ckpt: ckpt, fallback=step is None)[1]

    return attempt() if step is not None else listed_again(attempt)


def restore(
    what: str,
    collective: Collective,
    directory: Directory | TwoPlaces,
    like: Any,
    step: int | None,
    fallback: bool,
    options: Mapping[str, Any],
) -> Any:
    """Waits for every save, restores a step, and notes it in the directory. `what` names the call.

    Returns the tree. See `Checkpointer.restore`.
    """
    wait_for_all_in(directory.steps.root)
    with collective.call(what) as call:
        collective.settle(call)
        call.doing("restoring")
        if together := directory.together:
            together.copy_before(call, step)
        number, tree = _restore(call, directory, like, step, fallback, options)
        call.close()
    directory.restored = number
    directory.back_to = None if step is None else number
    return tree


def _restore(
    call: Call,
    directory: Directory | TwoPlaces,
    like: Any,
    step: int | None,
    fallback: bool,
    options: Mapping[str, Any],
) -> tuple[int, Any]:

    def choose() -> list[tuple[int, str, str | None]]:
        return [(place.step, place.path, place.format) for place in directory.to_read(step)]

    def attempt() -> tuple[int, tuple[str, Any]]:
        places = [directory.place(*one) for one in call.broadcast(choose)]
        # A network file system may show another host's new step late: refresh its cache.
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


def rewind(what: str, collective: Collective, directory: Directory | TwoPlaces, step: int | None) -> None:
    """Waits for every save, then archives the steps after a step, or all. See `Checkpointer.rewind`."""
    number = BEFORE_ALL if step is None else step
    collective.check_open()
    collective.once_settled(what, lambda: directory.rewind(number))
    if together := directory.together:
        together.rewound(number)
    directory.back_to = None
