"""The local tier on this host's disk: its journal, its folders of steps, and the steps that leave the run."""

import contextlib
import logging
import posixpath
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from ..._threads.forks import free_in_children
from ..._threads.preload_decoders import preload_decoders
from ...errors import TreeringError
from ...formats.treering import host_files, removal, summary
from ...formats.treering.ledger import Ledger
from ...stores.lease_registry import LeaseLostError
from .. import run_layout
from ..plain_run import PlainRun
from ..step_catalog import StepCatalog
from .journal import Claim, Journal, JournalContents

_log = logging.getLogger("treering")


def clear_steps(local: PlainRun, remote: PlainRun, missing: Callable[[], list[int]]) -> None:
    """Removes the steps of the local tier on this disk, unless steps are missing remotely. Logs errors.

    The journal stays: it says which job has written the run last.

    missing: uploads added metrics, and returns the steps that are to be uploaded.
    """
    removed = 0
    try:
        steps, valid = local.steps.committed(), {one.step for one in local.valid_steps()}
        if missing():  # Another thread has saved a step since the last upload.
            return
        uploaded = {one.step for one in remote.valid_steps()}
        for step, path in steps.items():
            if step not in valid and step not in uploaded:
                _log.warning("%s: step %d is damaged and not uploaded, so it stays in memory", local.root, step)
                continue
            try:
                local.check_unpinned_and_unlinked(path, pinned=True)
                local.remove(path, pinned=True)()
                removed += 1
            except LeaseLostError:
                raise
            except (TreeringError, OSError) as error:
                _log.warning("%s: step %d stays in memory: %s", local.root, step, error)
    except (TreeringError, OSError) as error:  # Nothing is lost, so the job still ends well.
        _log.warning("%s: steps stay in memory: %s", local.root, error)
    if removed:
        _log.info("%s: %d steps removed from memory; %s has what `keep` keeps", local.root, removed, remote.root)


T = TypeVar("T", bound=msgspec.Struct)
_log = logging.getLogger("treering")


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a disk has when a job begins: the journal, and by the names of the folders their files."""

    journal: JournalContents
    steps: dict[str, host_files.Inventory]


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """What every disk does so that all agree with process 0.

    claim: to be recorded in the journal, once the other orders are obeyed.
    retired: the identities of steps that do not belong to the run, and if they are "archived" or "deleted".
    manifests: by name, those of steps of which a disk may have array files alone or, at a claim, nothing.
    unnamed: the names of the folders to archive if they have no manifest, because a disk that is not here, or cannot
        be read now, may have it.
    """

    claim: Claim | None = None
    retired: dict[str, str] = {}
    manifests: dict[str, str] = {}
    unnamed: tuple[str, ...] = ()


preload_decoders(Report, Orders)


class LocalTier:
    """The steps on one disk. One process of each host changes it; its threads take turns.

    uploads: the files of the last uploads of this process to a bucket.
    """

    def __init__(self, steps: StepCatalog, run: str):
        self.steps, self.store, self.root = steps, steps.store, steps.root
        self.journal = Journal(self.store, self.root, run)
        self.uploads = Ledger(max_checkpoints=2)
        self._turn = free_in_children(threading.RLock())

    def report(self) -> Report:
        """Returns what this disk has. Raises the errors of `Journal.read`."""
        self.journal.read()
        found = {name: host_files.inventory(self.store, self.path(name)) for name in self.folders()}
        return Report(self.journal.contents, found)

    def identities(self) -> dict[str, str]:
        """Returns the identities of the manifests by the names of their folders; "" without a manifest."""
        return {name: host_files.identity(self.store, self.path(name)) for name in self.folders()}

    def folders(self) -> list[str]:
        """Returns the names of the folders of steps, committed or not. A link is not part of the run."""
        prefix = self.steps.prefix
        names = [name for name in self.store.list(self.root) if run_layout.parse_step_name(name, prefix) is not None]
        return [name for name in names if not self.store.is_link(self.path(name))]

    def path(self, name: str) -> str:
        """Returns the path of a folder of this disk."""
        return posixpath.join(self.root, name)

    def obey(self, orders: Orders) -> None:
        """Archives, deletes and completes steps as ordered, and then records the claim."""
        with self._turn:
            to_archive: list[str] = []
            for name in self.folders():
                path = self.path(name)
                if host_files.is_in_use(self.store, path):
                    continue
                own, text = host_files.identity(self.store, path), orders.manifests.get(name)
                if text and host_files.has_files_of(self.store, path, text):
                    host_files.adopt_manifest(self.store, path, text.encode("latin-1"))
                elif orders.retired.get(own) == "deleted":
                    with removal.logging_errors(path):
                        removal.delete(self.store, path)
                elif own in orders.retired or (name in orders.unnamed and not self.has_manifest(name)):
                    to_archive.append(path)
            self.archive(to_archive)
            if orders.claim:
                # Where there is nothing at all: a link is no part of the run, and nothing is written through it.
                for name in orders.manifests.keys() - self.store.list(self.root):
                    self.store.make_folders(self.path(name), [])
                    host_files.adopt_manifest(self.store, self.path(name), orders.manifests[name].encode("latin-1"))
                # Last: the claim says that all steps here belong to the run, even those that were to leave it.
                there = set(self.identities().values())
                records = {one: why for one, why in self.journal.contents.retired.items() if one not in there}
                self.journal.claim(orders.claim, {**records, **orders.retired})

    def archive(self, paths: Iterable[str]) -> None:
        """Archives the steps at these paths."""
        with self._turn:
            # Another thread may have archived or deleted some of them before its turn ended.
            newest_first = [path for path in sorted(paths, reverse=True) if self.store.stat(path)]
            if newest_first:
                place = run_layout.archive_steps(self.store, self.root, newest_first)
                _log.warning(
                    "%s: %d steps that do not belong to the run were archived in %s",
                    self.root, len(newest_first), place,
                )  # fmt: skip

    def retire(self, paths: Iterable[str], why: str) -> None:
        """Records, before anything is removed, that the steps at these paths leave the run."""
        found = {identity: why for path in paths if (identity := host_files.identity(self.store, path))}
        if found:
            self.journal.retire(found)

    def clear(self) -> None:
        """Deletes what killed saves have left: temporary files, and arrays that no manifest names."""
        with self._turn:
            for name in self.folders():
                removal.collect_garbage(self.store, self.path(name), remove_empty=True)

    def has_manifest(self, name: str) -> bool:
        """Returns True if the step with a name has a manifest, even one that cannot be read."""
        return summary.stat_manifest(self.store, self.path(name)) is not None

    def manifest_of(self, name: str) -> dict[str, str]:
        """Returns the manifest of a step by its name, as `Orders` have it; empty without one."""
        text = host_files.manifest_text(self.store, self.path(name))
        return {name: text} if text else {}

    def complete(self, name: str, fetch: Callable[[], bytes]) -> None:
        """Writes the manifest of a step, which `fetch` gets from the disk of process 0, unless this disk has one.

        Both happen in one turn: an order to delete the step may come before or after, and is obeyed in both cases.
        """
        with self._turn:
            path = self.path(name)
            if not host_files.identity(self.store, path):
                data = fetch()
                self.store.make_folders(path, [])
                host_files.adopt_manifest(self.store, path, data)

    def adopt(self, name: str, notes: Mapping[str, str], *, unpin: bool) -> None:
        """Writes the manifest, the pin and the metrics of a step, which another disk has sent."""
        path = self.path(name)
        with self._turn, contextlib.suppress(FileNotFoundError):
            own, text = host_files.identity(self.store, path), host_files.manifest_in(notes)
            identity = host_files.identity_in(notes)
            if own != identity:
                self.journal.borrow(identity)
            if own and own != identity:
                if host_files.has_files_of(self.store, path, text):  # A killed save was to replace the step here.
                    host_files.adopt_manifest(self.store, path, text.encode("latin-1"))
                else:
                    self.archive([path])
            host_files.adopt(self.store, path, notes, unpin=unpin)


def decode(data: Any, kind: type[T]) -> T:
    """Returns the struct that another process has encoded."""
    return msgspec.convert(data, kind, strict=False)


def encode(struct: msgspec.Struct) -> Any:
    """Returns a struct as the JSON values that processes exchange."""
    return msgspec.to_builtins(struct)
