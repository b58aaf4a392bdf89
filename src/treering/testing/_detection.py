"""Tests of how a format is recognized, how many bytes that takes, and of files that are cut off, changed or missing."""

import contextlib
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from .. import formats, stores
from .._core.entries import ArrayEntry
from .._core.lazy import LazyArray
from .._run.open import open_checkpoint, restore
from .._run.run_layout import steps
from .._save.save import save
from .._tools.verify import verify
from ..errors import MismatchError, TreeringError, UnsupportedError
from ._doubles import CountingDisk, ForbiddenDisk, in_time, memory_bounded
from ._samples import identity, sample, spread
from ._subject import Subject, blank

_MAX_LOOK_BYTES = 2 << 20  # that may be read to recognize or open a checkpoint
_SECONDS = 60  # for one damaged checkpoint, on a slow machine
_CHANGES = (0x01, 0x80, 0xFF, 0x10, 0x02)  # masks that flip bits of a byte


class Detection(Subject):
    """See `treering.testing.FormatConformance`."""

    def test_every_format_claims_its_own_checkpoints_only(self, tmp_path: Path) -> None:
        """Every other format refuses checkpoints of this one with a reason, and this one refuses theirs."""
        own = self.made(tmp_path, self.small(), "own")
        assert self.subject.refuses(stores.get(""), str(own)) is None
        assert formats.detect(stores.get(""), str(own)).name == self.name == open_checkpoint(own).format
        for name in formats.names():
            if name == self.name:
                continue
            other = formats.get(name)
            assert _reason(other.refuses(stores.get(""), str(own))), f"{name} claims it"
            path = str(tmp_path / f"{name}{other.suffixes[0] if other.suffixes else ''}")
            try:
                save(path, self.small(), format=name)
            except (UnsupportedError, MismatchError):
                continue  # Treering cannot write that format, or not under this name.
            assert _reason(self.subject.refuses(stores.get(""), path)), f"it claims one of {name}"
            assert formats.detect(stores.get(""), path).name == name

    def test_suffixes_choose_the_format(self, tmp_path: Path) -> None:
        """A save to a path with a suffix of the format uses it without `format=`."""
        suffixes = self.subject.suffixes
        assert isinstance(suffixes, tuple) and all(suffix.startswith(".") for suffix in suffixes)
        if not suffixes:
            pytest.skip(f"{self.name} has no suffixes")
        for suffix in suffixes:
            assert formats.for_path(f"/x{suffix}", None).name == self.name
            save(tmp_path / f"x{suffix}", self.small())
            self.assert_holds(tmp_path / f"x{suffix}", self.small())

    def test_junk_is_refused(self, tmp_path: Path) -> None:
        """`refuses` never raises, whatever the file and its name are. Only opening raises."""
        own = self.made(tmp_path, self.small(), "own")
        junk = list(_junk(tmp_path / "junk"))
        for path in [*junk, *_broken(own, tmp_path / "broken", self.files(own))]:
            with in_time(20):
                reason = self.subject.refuses(stores.get(""), path)
            assert reason is None or _reason(reason), path
            with contextlib.suppress(TreeringError, OSError), in_time(20):
                ckpt = open_checkpoint(path)
                assert not ckpt or path not in junk, f"{path} was opened:\n{ckpt}"
        names = ("nothing", "no/thing", "junk/loop", "x" * 400, "\udcff", "a\nb")
        for path in ("/", str(tmp_path / "junk"), f"{own}/inner", *(f"{tmp_path}/{name}" for name in names)):
            assert _reason(self.subject.refuses(stores.get(""), path)), ascii(path)

    def test_what_may_not_be_read_is_refused(self, tmp_path: Path) -> None:
        """An error of the file system is a reason to refuse, so that the other formats are tried too."""
        own = self.made(tmp_path, self.small(), "own")
        reason = self.subject.refuses(stores.Filesystem(ForbiddenDisk()), str(own))
        assert reason is None or _reason(reason)
        assert _reason(self.subject.refuses(stores.Filesystem(ForbiddenDisk()), str(tmp_path)))

    def test_a_look_is_cheap(self, tmp_path: Path) -> None:
        """`refuses` reads at most a header, even of large files."""
        own = self.made(tmp_path, self.small(), "own")
        for file in self.files(own):
            _replace(file, file.read_bytes())
            os.truncate(file, 32 << 20)
        junk = [tmp_path / f"x{n}{self.suffix}" for n in range(4)]
        for path, begin in zip(junk, (b"", b"{", b"[1,", b"\x93NUMPY\x01\0\xff\xff{"), strict=True):
            path.write_bytes(begin)
            os.truncate(path, 32 << 20)
        for path in (own, *junk):
            disk = CountingDisk()
            self.subject.refuses(stores.Filesystem(disk), str(path))
            assert disk.nbytes < _MAX_LOOK_BYTES, f"{disk.nbytes} bytes of {path} were read"

    def test_opening_reads_no_arrays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Opening reads few bytes. It works even if the bytes of the arrays are zeros; reading them may then raise."""
        tree = {"a": sample("float32", (1024, 1024)), "small": self.small(), "b": sample("float64", (512, 1024), 1)}
        path = self.made(tmp_path, tree)
        before = str(open_checkpoint(path))
        disk = CountingDisk()
        with stores.using(stores.Filesystem(disk)):
            ckpt = open_checkpoint(path)
            assert disk.nbytes < _MAX_LOOK_BYTES, f"{disk.nbytes} bytes were read"
            assert len(repr(ckpt)) and disk.nbytes < _MAX_LOOK_BYTES
            ckpt.abstract()
        for array in (tree["a"], tree["b"]):
            self.wipe(path, array)
        ckpt = open_checkpoint(path)
        assert str(ckpt) == before
        checked = verify(path)
        assert not checked.ok or checked.without_checksums, "wiped arrays are all good"
        if self.checksums:
            assert not checked.ok and not checked.without_checksums, "the source needs `has_checksums = True`"
        for name, leaf in self.leaves(tree).items():
            entry = ckpt._source.entries[name]
            assert isinstance(entry, ArrayEntry)
            try:
                found = np.asarray(ckpt[name])
            except TreeringError:
                continue
            assert found.shape == leaf.shape
            wiped = leaf.nbytes > 1 << 20
            assert not (wiped and self.checksums), "a wiped array was read without an error"
            assert wiped or found.tobytes() == leaf.tobytes()

    def wipe(self, path: Path, array: np.ndarray) -> None:
        """Damages an array: replaces its bytes by zeros. If they are compressed, it replaces all large files."""
        data = array.tobytes()
        hits = 0
        for file in self.files(path):
            found = file.read_bytes()
            if data in found:
                _replace(file, found.replace(data, bytes(len(data))))
                hits += 1
        for file in self.files(path) if not hits else ():
            if file.stat().st_size >= len(data) // 2:
                _replace(file, bytes(file.stat().st_size))
                hits += 1
        assert hits, "no file has the bytes of the array; override `wipe`"

    def test_steps_of_a_run_are_found(self, tmp_path: Path) -> None:
        """`steps` lists complete checkpoints and no other files. `open` chooses the one with the greatest number."""
        if self.step_name is None:
            path = self.made(tmp_path / "run", self.small())
            names = stores.get("").list(str(path.parent))
            assert self.subject.steps(stores.get(""), str(path.parent), names) == {}
            assert self.subject.steps(stores.get(""), str(path), stores.get("").list(str(path))) == {}
            return
        run = tmp_path / "run"
        run.mkdir()
        trees = {step: {"w": sample("float32", (step + 1,)), **self.small()} for step in (3, 0, 20)}
        for step, tree in trees.items():
            self.make(run / self.step_name.format(step), tree, **({"step": step} if self.writes else {}))
        for junk in ("junk", self.step_name.format("x"), self.step_name.format("")):
            (run / f"{junk}~").write_bytes(b"junk")
        (run / self.step_name.format(30)).mkdir()
        (run / self.step_name.format(31)).write_bytes(b"junk")
        assert steps(run) == [0, 3, 20] and steps(tmp_path) == steps(tmp_path / "nothing") == []
        self.assert_holds(open_checkpoint(run), trees[20])
        for step, tree in trees.items():
            ckpt = open_checkpoint(run, step=step)
            self.assert_holds(ckpt, tree)
            if "step" in self.fields:
                assert ckpt.step == step


def _reason(text: Any) -> bool:
    return isinstance(text, str) and bool(text.strip())


def _replace(file: Path, data: bytes) -> None:
    """Replaces a file that may be read-only, or that a reader may have mapped."""
    file.unlink()
    file.write_bytes(data)


def _junk(folder: Path) -> Iterator[str]:
    """Yields the paths of files, folders and links that are not checkpoints."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    contents = [b"", b"\0", bytes(5000), b"x", b"\n", b"{}", b"[]", b"null\n", b"{" * 5000, b"[" * 5000, b"\xff" * 64]
    contents += [b"text\n" * 9, b"PK\3\4" + bytes(30), b"\x89HDF\r\n\x1a\n" + bytes(64), pickle.dumps({"a": [1.0]})]
    contents += [rng.bytes(int(size)) for size in rng.integers(1, 300, 20)]
    for n, data in enumerate(contents):
        (folder / f"file{n}").write_bytes(data)
        (folder / f"folder{n}").mkdir()
        (folder / f"folder{n}" / f"file{n}").write_bytes(data)
        yield from (str(folder / f"file{n}"), str(folder / f"folder{n}"))
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    yield from (str(folder / name) for name in ("empty", "dangling"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
        yield str(folder / "pipe")


def _broken(own: Path, folder: Path, files: list[Path]) -> Iterator[str]:
    """Yields copies of a checkpoint in which one file is cut off, missing, or a folder."""
    folder.mkdir()
    if own not in files and not own.is_dir():
        return  # The path is only a prefix of the names of its files, so it cannot be copied as one.
    for number, file in enumerate(files):
        size = file.stat().st_size
        for kept in sorted({-2, -1, 0, 1, 7, 8, 9, size // 2, size - 1}):
            copy = folder / f"{number},{kept},{own.name}"
            shutil.copytree(own, copy) if own.is_dir() else shutil.copy(own, copy)
            target = copy / file.relative_to(own) if own.is_dir() else copy
            if kept >= 0:
                _replace(target, file.read_bytes()[:kept])
            else:
                target.unlink()
            if kept == -2:
                target.mkdir()
            yield str(copy)


class _Damage(NamedTuple):
    """A damage to a file: its new contents, or None if it is removed."""

    file: Path
    contents: bytes | None
    what: str


class Damage(Subject):
    """See `treering.testing.FormatConformance`."""

    def test_files_cut_off_anywhere(self, tmp_path: Path) -> None:
        """Reading a checkpoint with a shortened or missing file raises, or returns exactly the saved leaves."""
        path = self.made(tmp_path, self.small())
        places = [(file, size) for file in self.files(path) for size in range(file.stat().st_size)]

        def damages() -> Iterator[_Damage]:
            for file in self.files(path):
                yield _Damage(file, None, "removed")
            for n in spread(len(places), self.damages):
                file, size = places[n]
                yield _Damage(file, file.read_bytes()[:size], f"cut off at {size}")

        self._try(path, list(damages()), cut=True)

    def test_bytes_changed_anywhere(self, tmp_path: Path) -> None:
        """Reading a changed checkpoint raises a `TreeringError`.

        Formats without checksums may return other values or names, but never another shape.
        """
        path = self.made(tmp_path, self.small())
        places = [(file, at) for file in self.files(path) for at in range(file.stat().st_size)]

        def damages() -> Iterator[_Damage]:
            for turn, n in enumerate(spread(len(places), self.damages)):
                file, at = places[n]
                data = bytearray(file.read_bytes())
                data[at] ^= _CHANGES[turn % len(_CHANGES)]
                yield _Damage(file, bytes(data), f"changed at {at} by {_CHANGES[turn % len(_CHANGES)]:#x}")

        self._try(path, list(damages()), cut=False)

    def _try(self, path: Path, damages: list[_Damage], *, cut: bool) -> None:
        expected = {name: identity(leaf) for name, leaf in self.leaves(self.small()).items()}
        problems: list[str] = []
        with memory_bounded(self.most_memory):
            for file, contents, what in damages:
                before = file.read_bytes()
                file.unlink()
                if contents is not None:
                    file.write_bytes(contents)
                try:
                    with in_time(_SECONDS):
                        found = self._outcome(path)
                    wrong = None if found is None else self._wrong(found, expected, cut)
                except Exception as error:
                    wrong = f"{type(error).__name__}: {error}"
                if wrong:
                    problems.append(f"{file.name}, {what}: {wrong:.300}")
                file.unlink(missing_ok=True)
                file.write_bytes(before)
        assert not problems, "\n".join([f"{len(problems)} of {len(damages)}:", *problems[:20]])

    def _outcome(self, path: Path) -> dict[str, tuple[Any, ...]] | None:
        """Returns the leaves of a checkpoint, or None if reading it raises a `TreeringError`."""
        try:
            ckpt = open_checkpoint(path)
            repr(ckpt)
            if self.positional:
                found = restore(path, jax.tree.map(blank, self.small()))
                return {name: identity(leaf) for name, leaf in self.leaves(found).items()}
            found = {name: identity(leaf) for name, leaf in ckpt.items() if isinstance(leaf, LazyArray)}
            restore(path)
            assert ckpt.format == self.name, f"it was opened as {ckpt.format}"
            return found
        except TreeringError:
            return None

    def _wrong(self, found: dict[str, Any], expected: dict[str, Any], cut: bool) -> str | None:
        """Returns the reason why the leaves of a damaged checkpoint are wrong, or None if they are acceptable."""
        if cut or self.checksums:
            if changed := [name for name, leaf in found.items() if leaf != expected.get(name)]:
                return f"other values were read of {changed}"
            if not (cut and self.streams) and found.keys() != expected.keys():
                return f"expected {list(expected)}, found {list(found)}"
            return None
        shapes = {name: (leaf[2], expected[name][2]) for name, leaf in found.items() if name in expected}
        return next((f"{name} has the shape {a} and not {b}" for name, (a, b) in shapes.items() if a != b), None)
