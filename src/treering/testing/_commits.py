"""Tests of the moment in which a checkpoint appears at its path: after errors, and with several writers."""

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .. import stores
from .._core.source import Source
from .._restore.checkpoint import Checkpoint
from .._run.open import open_checkpoint
from .._save.save import save
from ..errors import ExistsError, TreeringError
from ._doubles import FailingDisk, LedgerDisk, interrupted
from ._samples import sample, spread
from ._subject import Subject, listing, remove

_POINTS = 12  # operations, at most, at which an error is injected


class Commits(Subject):
    """See `treering.testing.FormatConformance`."""

    def test_overwriting_is_asked_for(self, tmp_path: Path) -> None:
        """Without `overwrite`, a save to an existing path raises and leaves it unchanged."""
        self.needs_writer()
        old, new = self.small(), {"other": sample("float32", (40, 50), 9)}
        path = self.made(tmp_path, old)
        before = listing(tmp_path)
        with pytest.raises(ExistsError, match="overwrite=True"):
            self.make(path, new)
        assert listing(tmp_path) == before
        self.assert_holds(path, old)
        held = {name: np.asarray(leaf) for name, leaf in open_checkpoint(path).items()}
        self.make(path, new, overwrite=True)
        self.assert_holds(path, new)
        for name, leaf in self.leaves(old).items():
            self.assert_same(held[name], leaf, name)  # Arrays that were read before keep the old values.
        self.make(path, old, overwrite=True)
        self.assert_holds(path, old)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def test_foreign_things_are_never_replaced(self, tmp_path: Path) -> None:
        """Even with `overwrite`, a save never replaces a folder that is not a checkpoint, or a file by a folder."""
        self.needs_writer()
        folder, file = self.place(tmp_path, "folder"), self.place(tmp_path, "file")
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        file.write_text("mine")
        is_file = self.made(tmp_path / "own", self.small()).is_file()
        before = listing(tmp_path)
        for place in [folder] if is_file else [folder, file]:  # A single-file format may overwrite any file.
            for overwrite in (False, True):
                with pytest.raises(ExistsError):
                    self.make(place, self.small(), overwrite=overwrite)
        assert listing(tmp_path) == before
        assert (folder / "notes.txt").read_text() == file.read_text() == "mine"

    def test_errors_of_the_disk_leave_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """After an error at any operation, a new path is free again, and an old checkpoint is complete.

        No other files remain.
        """
        self.needs_writer()
        old, new = self.small(), {"large": sample("float32", (300, 400)), **self.small()}
        path = self.made(tmp_path / "old", old)
        for overwrite in (False, True):
            target = path if overwrite else self.place(tmp_path / "new", "x")
            counted = FailingDisk()
            with stores.using(stores.Filesystem(counted)):
                self.make(target, new, overwrite=overwrite)
            for at in spread(counted.count, _POINTS):
                remove(tmp_path / "old" if overwrite else tmp_path / "new")
                if overwrite:
                    self.make(target, old)
                before = listing(tmp_path)
                failed = self._fails(FailingDisk(at + 1), target, new, overwrite, monkeypatch)
                where = f"operation {at + 1} of {counted.count} with overwrite={overwrite}"
                if not failed:  # The error was in the cleanup after the commit, which is only logged.
                    self.assert_holds(target, new)
                elif overwrite and listing(tmp_path) != before:  # The new one is in place, but perhaps not durable.
                    self.assert_holds(target, new)
                    assert [file.name for file in target.parent.iterdir()] == [target.name], where
                else:
                    assert listing(tmp_path) == before, where
                    if overwrite:
                        self.assert_holds(target, old)
                    self.make(target, new, overwrite=overwrite)
                    self.assert_holds(target, new)

    def test_nothing_is_seen_before_it_is_durable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A checkpoint appears in one step, and only after all of its files would survive a power cut."""
        self.needs_writer()
        path = self.place(tmp_path, "x")
        for overwrite in (False, True):
            disk = LedgerDisk(str(path))
            stores.register(stores.Filesystem(disk))
            self.make(path, {"large": sample("float32", (300, 400)), **self.small()}, overwrite=overwrite)
            assert disk.placed, "the checkpoint appeared bit by bit"
            assert not disk.early, "the checkpoint appeared before its files were durable"
            assert not disk.unsettled, "the name of the checkpoint is not durable"

    def test_file_systems_without_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Checkpoints are written and replaced even on file systems without hard links."""
        self.needs_writer()

        def link(*args: Any, **options: Any) -> None:
            raise PermissionError(errno.EPERM, "injected: no links here")

        monkeypatch.setattr(os, "link", link)
        path = self.made(tmp_path, self.small())
        with pytest.raises(ExistsError):
            self.make(path, self.small())
        self.make(path, {"other": sample("int32")}, overwrite=True)
        self.assert_holds(path, {"other": sample("int32")})
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def _fails(
        self, disk: FailingDisk, path: Path, tree: Any, overwrite: bool, monkeypatch: pytest.MonkeyPatch
    ) -> bool:
        with stores.using(stores.Filesystem(disk)):
            try:
                self.make(path, tree, overwrite=overwrite)
            except (TreeringError, OSError):
                return True
        return False

    def test_errors_of_the_source_leave_nothing(self, tmp_path: Path) -> None:
        """A read error of the copied checkpoint, at any of its arrays, leaves no files."""
        self.needs_writer()
        native, old = tmp_path / "native", self.small()
        tree = {f"w{n}": sample("float32", (80, 300), n) for n in range(6)}
        save(native, tree)
        path = self.made(tmp_path / "old", old)
        before = listing(tmp_path)
        for at in range(1, 7):
            for target, overwrite in ((path, True), (self.place(tmp_path / "new", "x"), False)):
                with pytest.raises(OSError, match="injected"):
                    source = interrupted(open_checkpoint(native)._source, at, _raise)
                    ckpt = Checkpoint(source)
                    save(target, ckpt, format=self.name, overwrite=overwrite, **self.options)
                assert listing(tmp_path) == before, f"read {at}, overwrite={overwrite}"
            self.assert_holds(path, old)

    def test_of_two_writers_one_wins(self, tmp_path: Path) -> None:
        """The first writer to commit wins, and the other raises `ExistsError`. With `overwrite` the last one wins."""
        self.needs_writer()
        if self.name == "treering":
            pytest.skip("only `save` writes this format, not the method `write`")
        trees = {"first": {"a": sample("float32", (90, 300))}, "second": {"b": sample("float32", (40, 500), 1)}}
        for name, tree in trees.items():
            save(tmp_path / "native" / name, tree)
        sources = {name: open_checkpoint(tmp_path / "native" / name)._source for name in trees}
        folder = tmp_path / "here"
        folder.mkdir()
        for overwrite in (False, True):
            path = self.place(folder, f"nested {overwrite}")
            inner = interrupted(sources["first"], 1, lambda path=path: self._write(path, sources["second"], False))
            if overwrite:
                self._write(path, inner, True)
            else:
                with pytest.raises(ExistsError):
                    self._write(path, inner, False)
            self.assert_holds(path, trees["first" if overwrite else "second"])
        expected = set(listing(folder))
        for turn in range(4):
            path, won = self.place(folder, f"race {turn}"), list[str]()
            with contextlib.ExitStack() as stack:
                both = threading.Barrier(2)
                for name, reader in sources.items():
                    stack.enter_context(
                        self._racing(path, name, interrupted(reader, 1, functools.partial(both.wait, 30)), won)
                    )
            assert len(won) == 1, f"expected one winner, found {won}"
            self.assert_holds(path, trees[won[0]])
            remove(path)
            assert set(listing(folder)) == expected

    @contextlib.contextmanager
    def _racing(self, path: Path, name: str, source: Any, won: list[str]) -> Iterator[None]:
        others: list[BaseException] = []

        def run() -> None:
            try:
                self._write(path, source, False)
                won.append(name)
            except BaseException as error:
                others.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        yield
        thread.join()
        assert all(isinstance(error, ExistsError) for error in others), others

    def _write(self, path: Path, contents: Source, overwrite: bool) -> None:
        self.subject.write(stores.get(""), str(path), contents, overwrite=overwrite, **self.options)


def _raise() -> None:
    raise OSError("injected: an error of the source")
