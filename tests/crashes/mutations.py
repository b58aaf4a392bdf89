"""Logs of what a careless library would have done: the crash tests must find a state in which it loses something."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .recording import Op

_SYNCS = ("sync", "sync_dir")
_PUT = ("link", "rename", "rename_new", "exchange")
_DONE = {
    **{"create": "made", "make_dir": "made", "unlink": "removed"},
    **{"link": "linked", "rename": "renamed", "rename_new": "moved", "exchange": "exchanged"},
}
_TEMPORARY = r"\..+\.[0-9a-f]{6}\.tmp"
_KINDS = {  # what files and folders of the scenarios are, by their names
    r"arrays-.*": "an array file",
    r"treering\.json.*": "the manifest",
    r"metrics[.-].*": "a file of metrics",
    r"pinned": "a pin",
    r"finished": "the mark of a finished run",
    r"writer\.lock": "the lock",
    r"rewound-\d+": "a folder of archived steps",
    r"c|step-\d+|weight_v\d+|delta-\d+|engine": "the checkpoint",
    r"gpt|policy": "the run",
    r"\.?c\.(safetensors|msgpack).*": "a foreign file",
    _TEMPORARY: "a temporary folder",
    r"a|b|runs|streams|\.": "a folder above",
}

_UNDONE = "only after an error does a removal follow it, and then what is removed is not in place"
_LOCK = "the text in a lock is for people on other hosts; after a crash no process holds it"
_LEFT = "what is removed then is left over, and is removed again should it come back"
_EMPTY = "an empty file has nothing to lose but its name, and its folder is synced after it"
_OLD_IS_COMPLETE = "the old folder is complete when it is moved away, whatever becomes of the new one"

HARMLESS = {
    "without process 1..n: the sync of the checkpoint after an array file is made": (
        "process 0 syncs the same folder after it; this one is for file systems that several machines share"
    ),
    "without the sync of the checkpoint after an array file is made by a killed one": (
        "no manifest names that file: it is left over, and removed"
    ),
    "without the sync of the checkpoint after the manifest is linked by a killed one": (
        "what is removed then is the second name of that manifest, and its save never said that it was done"
    ),
    "without the sync of the run after the checkpoint is made by a killed one": (
        "a manifest comes after a sync of its own; without one that folder is left over"
    ),
    "without the sync of the run after a folder of archived steps is made by a killed one": (
        "the folder is empty and goes; once there are steps in it, they are what is synced"
    ),
    "without the sync of the lock": _LOCK,
    "without the sync of a pin": _EMPTY,
    "without the sync of the mark of a finished run": _EMPTY,
    "the mark of a finished run is removed before the sync of the lock": _LOCK,
    "a temporary folder is renamed before the sync of what is in a temporary folder": _OLD_IS_COMPLETE,
    "a temporary folder is renamed before the sync of a temporary folder after what is in a temporary folder is made": (
        _OLD_IS_COMPLETE
    ),
    "what is in a temporary folder is removed before the sync of a temporary folder after what is in a temporary folder"
    " is made": _UNDONE,
    "an array file is removed before the sync of the checkpoint after an array file is made": _UNDONE,
    "an array file is removed before process 1..n: the sync of the checkpoint after an array file is made": (
        "only after a kill does a removal follow it, and then what is removed is left over"
    ),
    "an array file is removed before the sync of the checkpoint after an array file is made by a killed one": _LEFT,
    "without the sync of the checkpoint after an array file is removed": _LEFT,
    "without the sync of the checkpoint after an array file is removed by a killed one": _LEFT,
    "an array file is removed before the sync of the checkpoint after an array file is removed": _LEFT,
    "an array file is removed before the sync of the checkpoint after an array file is removed by a killed one": _LEFT,
    "an array file is linked before the sync of the checkpoint after the manifest is linked": (
        "its bytes are those of an earlier step, and were durable before that step's manifest was in place"
    ),
    "a file of metrics is removed before an array file is removed": "the manifest that both belong to is durably gone",
}
"""Mutations after which nothing can be lost, and why."""


class Mutation(NamedTuple):
    """A change of a log, and what it leaves out or puts too early."""

    name: str
    log: Sequence[Op]


def mutations(log: Sequence[Op], *, broken: bool) -> Iterator[Mutation]:
    """A log without the syncs of one name, of every one; and with steps too early.

    Steps are what puts something in a place or takes it away, except temporary names and the file of a run's lock, of
    which only the lock matters. The next one comes before a sync, or one removal before another of something else. In a
    `broken` log, where many unneeded things are removed, removals only come before a sync of their own folder. Syncs
    that find nothing to be synced are left alone: nothing depends on them.
    """
    named = _syncs(log)
    for name in dict.fromkeys(named.values()):
        yield Mutation(f"without {name}", _without(name, log))
    steps = [n for n, op in enumerate(log) if op.kind in _PUT or _removes(op)]
    for n, op in enumerate(log):
        waited_for = named.get(n) or (_step(op) if _removes(op) and not broken else "")
        after = next((m for m in steps if m > n and (n in named or _removes(log[m]))), None)
        if not waited_for or after is None or _step(log[after]) == waited_for:
            continue
        if not broken or log[after].kind in _PUT or log[after].names[0].folder == op.inode:
            rest = [*log[n:after], *log[after + 1 :]]
            yield Mutation(f"{_step(log[after])} before {waited_for}", [*log[:n], log[after], *rest])


def _without(name: str, log: Sequence[Op]) -> Sequence[Op]:
    """A log without the syncs of a name, and without those that come to have it because the others are gone."""
    while name in (named := _syncs(log)).values():
        log = [op for n, op in enumerate(log) if named.get(n) != name]
    return log


def _syncs(log: Sequence[Op]) -> dict[int, str]:
    """Returns the name of each sync of a log that finds something to be synced, by its number.

    A name says the kind of the file or folder, for a folder its last change, and the processes that made the change and
    the sync: so names do not depend on how the library is written.
    """
    found: dict[int, str] = {}
    changed: dict[int, Op] = {}  # the last change of each file and folder that has not been synced
    for n, op in enumerate(log):
        if op.kind not in _SYNCS:
            changed |= dict.fromkeys(op.folders or {op.inode}, op) if _counts(op) else {}
        elif last := changed.pop(op.inode, None):
            who = "process 1..n: " if op.process else ""
            what = f" after {_step(last)}" if last.names else ""
            before = " by a killed one" if last.names and last.life < op.life else ""
            found[n] = f"{who}the sync of {_kind(op)}{what}{before}"
    return found


def _step(op: Op) -> str:
    return f"{_kind(op)} is {_DONE[op.kind]}"


def _kind(op: Op) -> str:
    *above, name = op.path.split("/")
    if any(re.fullmatch(_TEMPORARY, folder) for folder in above):
        return "what is in a temporary folder"
    kind = next((kind for pattern, kind in _KINDS.items() if re.fullmatch(pattern, name)), None)
    assert kind is not None, f"{op.path}: expected a name that says what it is"
    return kind


def _counts(op: Op) -> bool:
    """Returns True if a change must be synced: temporary names, locks and removals of empty folders need not be."""
    return op.kind in _PUT or not op.names or not (_is_passing(op) or op.kind == "remove_dir")


def _removes(op: Op) -> bool:
    return op.kind == "unlink" and not _is_passing(op)


def _is_passing(op: Op) -> bool:
    return op.path.endswith((".tmp", "writer.lock"))
