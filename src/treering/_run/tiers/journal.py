"""The journal of a local disk: the jobs that claimed the run with this disk, and the steps that have left the run.

A step is committed on a disk if its manifest is there. The journal says only what files cannot say: which jobs used the
disk, and which of the steps that other disks may still have have left the run. Its facts only grow, so the
journals of several disks are merged by their union, in any order (`step_states`). It is replaced in one atomic step,
so it has no torn lines.

The remote tier has a file with the generation of the job that last changed it. Every job has a larger generation than
those before it. So no clock decides which of two disks is newer.
"""

import contextlib
import os
import posixpath
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, MismatchError, UnsupportedError
from ...formats.treering import manifest
from ...stores.file_io import read_file
from ...stores.lease_registry import LeaseLostError
from ...stores.read_errors import UnreadableError
from ...stores.store import Store
from .. import run_layout

_VERSION = 1


class Claim(msgspec.Struct, frozen=True):
    """A job's claim of the run.

    generation: larger than that of every earlier job. series: that of `Generations`.
    base: the generation of the job that had last changed the remote tier.
    disks: the disks of the job; the first one is that of process 0.
    heirs: those of them whose steps belonged to the run when the job began.
    """

    generation: int
    base: int
    disks: tuple[str, ...]
    heirs: tuple[str, ...]
    series: str

    @property
    def job(self) -> tuple[int, str]:
        """Identifies the job. A later job compares greater."""
        return self.generation, self.series


class JournalContents(msgspec.Struct, frozen=True):
    """The contents of a journal.

    run: the path of the remote tier. disk: a random name of this disk.
    claims: of the jobs that used this disk; only the newest are kept.
    retired: the identities of steps that are no longer of the run, and why: "archived" or "deleted". Steps that no
        disk has any more are left out.
    borrowed: the identities of the steps whose manifests came from other disks, since the last claim. They do not
        belong to this disk until the job that fetched them claims the run.
    """

    run: str
    disk: str
    claims: tuple[Claim, ...] = ()
    retired: dict[str, str] = {}
    borrowed: tuple[str, ...] = ()
    version: Any = _VERSION
    requires: Any = ()


class Generations(msgspec.Struct, frozen=True):
    """The generations of the jobs that have written a run: the next one, and that of the last change of the run.

    series: a random name. If the file is lost, the next job begins another series, because it cannot know all earlier
        generations: a claim of an earlier series never looks like one of the new series.
    """

    series: str
    next: int = 1
    written_by: int = 0
    version: Any = _VERSION
    requires: Any = ()


preload_decoders(JournalContents, Generations)
_MAX_CLAIMS = 8
_REMEDY = (
    "restore it from a backup, or remove it: steps that are not in the other tier are then archived with the next save"
)
T = TypeVar("T", JournalContents, Generations)


class Journal:
    """The journal of one disk. Changes are durable when a method returns."""

    def __init__(self, store: Store, root: str, run: str):
        self._store, self._run, self._path = store, run, posixpath.join(root, run_layout.JOURNAL)
        self._contents: JournalContents | None = None

    def read(self) -> JournalContents | None:
        """Reads and returns what is recorded, or returns None if the disk has no journal.

        Raises `CorruptError` for a damaged journal, `UnsupportedError` for one of a later release, and `MismatchError`
        if the disk belongs to another run.
        """
        found = _read(self._store, self._path, JournalContents)
        if found is not None and found.run != self._run:
            raise MismatchError(
                f"{posixpath.dirname(self._path)}: expected a directory for {self._run}, found that of {found.run}; "
                f"give each run its own local=, or, if this run has moved, remove {self._path}"
            )
        self._contents = found or self._contents
        return found

    @property
    def contents(self) -> JournalContents:
        """The contents that were read or written last. A disk without a journal gets a new name."""
        if self._contents is None:
            self._contents = self.read() or JournalContents(self._run, os.urandom(8).hex())
        return self._contents

    @property
    def disk(self) -> str:
        """The name of this disk."""
        return self.contents.disk

    @property
    def had_other_disks(self) -> bool:
        """True if other disks may have parts of the steps here."""
        return bool(self.contents.borrowed) or any(len(one.disks) > 1 for one in self.contents.claims)

    def write(self, **changes: Any) -> None:
        """Changes fields durably. Also writes the journal again if it was removed, such as with its directory."""
        new = msgspec.structs.replace(self.contents, **changes)
        if new != self._contents or self._store.stat(self._path) is None:
            self._contents = new
            _write(self._store, self._path, new)

    def claim(self, claim: Claim, retired: dict[str, str]) -> None:
        """Records a claim of the run, and the steps that have left it. The caller holds the lease of the disk."""
        claims = [one for one in self.contents.claims if one.job != claim.job]
        self.write(claims=(*claims, claim)[-_MAX_CLAIMS:], retired=retired, borrowed=())

    def borrow(self, identity: str) -> None:
        """Records, before its manifest is written, that a step came from another disk and no claim covers it yet."""
        self.write(borrowed=tuple(dict.fromkeys((*self.contents.borrowed, identity))))

    def retire(self, identities: dict[str, str]) -> None:
        """Records steps that leave the run, before their files are removed."""
        self.write(retired={**self.contents.retired, **identities})

    def forget(self, identities: Collection[str]) -> None:
        """Removes retired steps that no disk has any more."""
        self.write(retired={one: why for one, why in self.contents.retired.items() if one not in identities})


def read_generations(store: Store, root: str) -> Generations | None:
    """Returns the generations of a run; None if no job with a local tier has written it. Raises as `Journal.read`."""
    return _read(store, posixpath.join(root, run_layout.GENERATIONS), Generations)


def write_generations(store: Store, root: str, found: Generations) -> None:
    """Writes the generations of a run durably. The caller holds the lease of the run."""
    _write(store, posixpath.join(root, run_layout.GENERATIONS), found)


def begin_series(claims: Iterable[Claim]) -> Generations:
    """Returns the generations of a run without them. The next one is larger than those of the known claims."""
    return Generations(os.urandom(8).hex(), 1 + max((one.generation for one in claims), default=0))


def invalidate_local_tiers(store: Store, root: str) -> None:
    """Notes that a job without a local tier changes the run: steps that only older local tiers have leave the run."""
    if found := read_generations(store, root):
        write_generations(store, root, Generations(found.series, found.next + 1, found.next))


def check_not_local(store: Store, root: str) -> None:
    """Raises `MismatchError` for a local tier: commands that change a run must be given its remote tier."""
    path = posixpath.join(root, run_layout.JOURNAL)
    if store.stat(path) is not None:
        try:
            found = _read(store, path, JournalContents)
            stays = f", here {found.run}" if found else ""
        except (CorruptError, UnsupportedError):
            stays = ""
        raise MismatchError(f"{root}: expected the directory of a run{stays}, found its local=")


def _read(store: Store, path: str, kind: type[T]) -> T | None:
    try:
        data = read_file(store, path)
    except FileNotFoundError:
        return None
    except UnreadableError as error:
        cause: Any = error.__cause__
        raise CorruptError(f"{path}: cannot be read: {cause.strerror}; check the disk, or {_REMEDY}") from error
    what = f"{path}: expected version {_VERSION} of this file, found"
    try:
        manifest.check(data, path)
    except CorruptError:
        raise CorruptError(f"{what} one that is cut short or changed; {_REMEDY}") from None
    try:
        found = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = None
    if found is None or found.version != _VERSION or found.requires:
        raise UnsupportedError(f"{what} that of a later release of treering; upgrade treering, or use another local=")
    return found


def _write(store: Store, path: str, content: msgspec.Struct) -> None:
    store.make_folders(os.path.dirname(path), [])
    with store.new_file(path, overwrite=True) as file:
        file.write(manifest.seal(content))


class Generation:
    """The generation of one job in the run at `root`, whose lease the job holds during every call."""

    def __init__(self, store: Store, root: str):
        self._store, self._root = store, root
        self._base = Generations("")  # the generations of the run when this job took its own
        self._is_entered = False

    @contextlib.contextmanager
    def taking(self, claims: Iterable[Claim]) -> Iterator[tuple[Generations, Generations | None]]:
        """Takes the next generation. The disks record their claims within the block.

        claims: those that the disks have recorded. If the file of generations is lost, a new series begins above them.

        Yields the generations of which this job takes the next, and what the file said: None if a series begins.
        """
        found = read_generations(self._store, self._root)
        base = found or begin_series(claims)
        taken = Generations(base.series, base.next + 1, base.written_by)
        if found:  # First: no other job may get this generation.
            write_generations(self._store, self._root, taken)
        yield base, found
        if not found:  # Last: a new series ends the claims of all earlier ones.
            write_generations(self._store, self._root, taken)
        self._base = base

    def enter(self) -> None:
        """Records that this job changes the remote tier. Call it before the first change.

        Raises `LeaseLostError` if another job has taken a generation since this one did.
        """
        if self._is_entered:
            return
        base, found = self._base, read_generations(self._store, self._root)
        if found and (found.series != base.series or found.next > base.next + 1):
            raise LeaseLostError(f"{self._root}: another job has written this run since this one claimed it")
        write_generations(self._store, self._root, Generations(base.series, base.next + 1, base.next))
        self._is_entered = True
