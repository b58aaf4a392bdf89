"""Logs of what a careless library would have done: the crash tests must find a state in which it loses something."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from treering.stores import lease

from .recording import Op

_SYNCS = ("sync", "sync_dir")
_PUT = ("link", "rename", "rename_new", "exchange")

_UNDONE = "only after an error does a removal follow it, and then what is removed is not in place"

HARMLESS = {
    "without write.write: disk.sync_dir(job.path)": (
        "process 0 syncs the same directory after it; this one is for file systems that several machines share"
    ),
    "rename before atomic._sync_tree: disk.sync(fd)": (
        "the old directory is whole when it is put aside, whatever becomes of the new one"
    ),
    "rename before atomic._sync_tree: disk.sync_dir(path)": "as the line before",
    "unlink before atomic._sync_tree: disk.sync_dir(path)": _UNDONE,
    "unlink before local.Transaction.commit: self.disk.sync_dir(self.path)": _UNDONE,
    "unlink before write.write: disk.sync_dir(job.path)": (
        "only after a kill does a removal follow it, and then what is removed is left over"
    ),
    "without lease.WriterLock._acquire: self._disk.sync(fd)": (
        "what is written in a lock is for people on other hosts; after a crash nobody holds it"
    ),
    "unlink before lease.WriterLock._acquire: self._disk.sync(fd)": "as the line before",
    "unlink before on_disk.make_dirs: disk.sync_dir(parent)": (
        "what goes is the mark of a finished run, whose directory is durable by then"
    ),
}
"""Mutations after which nothing can be lost, and why."""


class Mutation(NamedTuple):
    """A change of a log, and the line of the library that it concerns."""

    name: str
    log: Sequence[Op]


def mutations(log: Sequence[Op], *, broken: bool) -> Iterator[Mutation]:
    """A log without the fsyncs of one line of the library, of every one; and with steps too early.

    Steps are what puts something in a place or takes it away, but for temporary names and the file of a run's lock, of
    which only the lock counts. The next one comes before an
    fsync, or one removal before another line's. In a `broken` log, where much is removed that nobody needs, removals
    only come before an fsync of their own directory.
    """
    for site in dict.fromkeys(op.site for op in log if op.kind in _SYNCS):
        yield Mutation(f"without {site}", [op for op in log if op.kind not in _SYNCS or op.site != site])
    steps = [n for n, op in enumerate(log) if op.kind in _PUT or _removes(op)]
    for n, op in enumerate(log):
        if op.kind not in _SYNCS and (broken or not _removes(op)):
            continue
        after = next((m for m in steps if m > n and (op.kind in _SYNCS or _removes(log[m]))), None)
        if after is None or log[after].site == op.site:
            continue
        if not broken or log[after].kind in _PUT or log[after].names[0].folder == op.inode:
            rest = [*log[n:after], *log[after + 1 :]]
            yield Mutation(f"{log[after].kind} before {op.site}", [*log[:n], log[after], *rest])


def _removes(op: Op) -> bool:
    return op.kind == "unlink" and not op.path.endswith((".tmp", lease.NAME))
