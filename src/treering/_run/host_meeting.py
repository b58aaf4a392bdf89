"""The first call of a job with a local place: whether all processes see the same one, and else what each disk has."""

import contextlib
import logging
import os
import posixpath
from collections.abc import Callable, Sequence
from typing import Any

from .._processes.calls import Call
from ..errors import SaveError
from ..formats.treering import host_parts as parts
from ..formats.treering import summary
from ..stores.nfs import look_anew
from ..stores.store import Store
from ..stores.whole_files import make_empty
from . import run
from .host_disks import HostDisks, folders, write_small
from .steps import Steps

_log = logging.getLogger("treering")


def meet(call: Call, near: Steps, check: Callable[[], object]) -> HostDisks | None:
    """What the processes of a job know of their local places; None where all see the same one.

    In process 0 the manifests are there afterwards of all steps that are whole. Raises `SaveError` where a process
    cannot write to its place, and what `check` raises, which is called once for each disk.
    """
    leaders = _leaders(call, near.store, near.root)
    if leaders == [0]:
        return None
    if call.index == 0:
        _log.info("%s: the hosts have disks of their own, %d in all", near.root, len(leaders))
    if call.index in leaders:
        check()
    near.hold_parts()
    steps, lacking = _take_stock(call, near, leaders)
    return HostDisks(near, call.index, leads=call.index in leaders, steps=steps, lacking=lacking)


def _leaders(call: Call, store: Store, root: str) -> list[int]:
    """The processes that are the first of those that see the same place, by files that each puts there for a moment."""
    if call.count == 1:
        return [0]
    token = call.broadcast(lambda: os.urandom(3).hex())
    made: list[str] = []
    marks = [f".process-{n}.{token}.tmp" for n in range(call.index + 1)]
    own = posixpath.join(root, marks[-1])
    try:
        store.make_folders(root, made)
        make_empty(store, own)
    except OSError as error:
        raise SaveError(f"local={root!r}: expected a directory that this process can write to ({error})") from error
    try:
        call.gather_and_decide(None, lambda _: None)  # all are there
        look_anew(store, root)
        there = {marks[-1], *store.list(root)}
        first = next(n for n, mark in enumerate(marks) if mark in there)
        return call.gather_and_decide(first, lambda firsts: sorted(set(firsts)))
    finally:
        with contextlib.suppress(OSError):
            store.delete(own)
            for folder in reversed(made):
                store.remove_folder(folder)


def _take_stock(call: Call, near: Steps, leaders: Sequence[int]) -> tuple[set[int], set[int]]:
    """Brings process 0 the manifests of whole steps that other hosts have, where its own is missing or of other files.

    Returns the whole steps, and those of which parts are missing.
    """
    others: dict[str, dict[str, int]] = {}  # the sizes of the array files on other disks, by the names of steps
    lacking: set[int] = set()

    def is_whole(name: str, data: bytes) -> bool:
        return parts.is_whole(near.store, posixpath.join(near.root, name), data, others.get(name, {}))

    def choose(inventories: Sequence[dict[str, Any] | None]) -> dict[str, list[int]]:
        asked: dict[str, list[int]] = {}
        for index, inventory in enumerate(inventories):
            for name, (has_manifest, files) in (inventory or {}).items():
                others.setdefault(name, {}).update(files)
                if has_manifest:
                    asked.setdefault(name, []).append(index)
        for step, path in near.committed().items():
            name = posixpath.basename(path)
            if (data := parts.manifest_of(near.store, path)) and is_whole(name, data):
                asked.pop(name, None)
            else:
                lacking.add(step)
        return asked

    def take(answers: Sequence[dict[str, str] | None]) -> list[list[int]]:
        for answer in answers:
            for name, text in (answer or {}).items():
                step, data = run.parse(name, near.prefix), text.encode()
                if step is not None and is_whole(name, data):
                    write_small(near.store, summary.file(posixpath.join(near.root, name)), data)
                    lacking.discard(step)
        return [[step for step in near.committed() if step not in lacking], sorted(lacking)]

    own = {name: posixpath.join(near.root, name) for name in (folders(near) if call.index in leaders else ())}
    mine = {name: parts.inventory(near.store, path) for name, path in own.items()} if call.index else None
    asked: dict[str, list[int]] = call.gather_and_decide(mine, choose)
    names = [name for name, indices in asked.items() if call.index in indices]
    answer = {name: data.decode() for name in names if (data := parts.manifest_of(near.store, own[name]))}
    whole, lacks = call.gather_and_decide(answer or None, take)
    return set(whole), set(lacks)
