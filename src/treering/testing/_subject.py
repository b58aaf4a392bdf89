"""The declarations of a format under test; making and comparing its checkpoints."""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from .. import formats, stores
from .._core.source import Source
from .._pytree import walk
from .._pytree.leaves import is_function
from .._restore.checkpoint import Checkpoint
from .._run.open import open_checkpoint, restore
from .._save.save import save
from ..formats import Format
from ._doubles import QuickDisk
from ._samples import DTYPES, NAMES, VALUES, identity, same_kind, sample


class Subject:
    """The declarations of `treering.testing.FormatConformance`, which its subclasses override.

    A save of anything that is not declared to be held must be refused: nothing is changed silently.
    """

    format: ClassVar[Format | str]
    """The format: an object, which is registered for the time of each test, or the name of one that is registered."""

    options: ClassVar[Mapping[str, Any]] = {}
    """What is passed to every save."""

    suffix: ClassVar[str] = ""
    """What the names of checkpoints end in."""

    step_name: ClassVar[str | None] = None
    """What the checkpoint of a step is called in a run: ``step-{}``. None: such runs are not known to the format."""

    writes: ClassVar[bool] = True
    """Whether the format can be written; if not, override `make`."""

    dtypes: ClassVar[Collection[str]] = DTYPES
    """The dtypes of arrays that it holds, of those in `treering.testing.DTYPES`."""

    values: ClassVar[Collection[str]] = tuple(VALUES)
    """The leaves other than arrays that it holds, by their names in `treering.testing.VALUES`."""

    left_out: ClassVar[Collection[str]] = ()
    """Of None, functions, text and bytes ("none", "function", "str", "bytes"), those that leave no trace: they are the
    template's."""

    keys: ClassVar[bool] = True
    """Whether it holds typed PRNG keys."""

    names: ClassVar[Collection[str]] = NAMES
    """The keys of dicts that it holds, of those in `treering.testing.NAMES`."""

    empty: ClassVar[bool] = True
    """Whether it records empty containers."""

    beside: ClassVar[Collection[str]] = ("step", "metrics", "metadata")
    """What of these it has a place for."""

    numbers_are_arrays: ClassVar[bool] = False
    """Whether Python's numbers become arrays without axes, which templates make numbers again."""

    positional: ClassVar[bool] = False
    """Whether leaves have no names, so that only a template tells which is which."""

    checksums: ClassVar[bool] = False
    """Whether every change of a byte is either noticed or without effect."""

    streams: ClassVar[bool] = False
    """Whether a file that was cut off between two leaves looks complete."""

    damages: ClassVar[int] = 350
    """How many places of a small checkpoint are cut off at, and how many changed; all of them if there are fewer."""

    most_memory: ClassVar[int] = 200 << 20
    """Bytes of memory that copying a checkpoint of any size may take."""

    def make(self, path: Path, tree: Any, **options: Any) -> None:
        """Makes a checkpoint of a tree. Formats that are only read make it in whatever way they can."""
        save(path, tree, format=self.name, **{**self.options, **options})

    def files(self, path: Path) -> list[Path]:
        """The files that a checkpoint consists of."""
        return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def small(self) -> dict[str, Any]:
        """A tree of arrays to be damaged. Override it where arrays are stored in other ways when they are larger."""
        return {"weight": sample("float32", (3, 4)), "deep": {"bias": sample("int32", (5,), 1)}}

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.format if isinstance(self.format, str) else self.format.name

    @property
    def subject(self) -> Format:
        """The format itself."""
        return formats.get(self.name)

    @pytest.fixture(autouse=True)
    def _prepared(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with stores.using(stores.of("")):  # the doubles that a test registers are gone after it
            self.prepare(monkeypatch)
            yield

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prepares each test."""
        stores.register(stores.Filesystem(QuickDisk()))
        if not isinstance(self.format, str):
            monkeypatch.setitem(formats._registered, self.name, self.format)

    def place(self, folder: Path, name: str) -> Path:
        """The path of a checkpoint of this name."""
        return folder / f"{name}{self.suffix}"

    def made(self, folder: Path, tree: Any, name: str = "made", **options: Any) -> Path:
        """The path of a checkpoint that was just made."""
        path = self.place(folder, name)
        self.make(path, tree, **options)
        return path

    def reader(self, path: Path) -> Source:
        """The open checkpoint at a path, without anything around it."""
        return self.subject.open(stores.of(""), str(path))

    def needs_writer(self) -> None:
        """Skips a test of formats that are not only read."""
        if not self.writes:
            pytest.skip(f"{self.name} is only read")

    def held(self) -> dict[str, Any]:
        """The leaves other than arrays that the format says it holds."""
        return {f"v{n:02}": VALUES[name] for n, name in enumerate(self.values)}

    def leaves(self, tree: Any) -> dict[str, Any]:
        """The leaves of a tree that a checkpoint of it has, under their names there."""
        walked = walk.walk(tree)
        found = {p: leaf for p, leaf in zip(walked.paths, walked.leaves, strict=True) if not self.is_left_out(leaf)}
        return {str(n): leaf for n, leaf in enumerate(found.values())} if self.positional else found

    def is_left_out(self, leaf: Any) -> bool:
        """Whether a leaf leaves no trace."""
        kind = "none" if leaf is None else "function" if is_function(leaf) else type(leaf).__name__
        return kind in self.left_out

    def assert_holds(self, checkpoint: Path | Checkpoint, tree: Any) -> None:
        """Asserts that a checkpoint has all leaves of a tree and no others, equal bit for bit."""
        ckpt = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        expected = self.leaves(tree)
        assert set(ckpt) == set(expected)
        for path, leaf in expected.items():
            self.assert_same(ckpt[path], leaf, path)

    def assert_same(self, found: Any, leaf: Any, path: str) -> None:
        """Asserts that a leaf of a checkpoint is equal to another one bit for bit."""
        a, b = identity(found), identity(leaf, numbers_as_arrays=self.numbers_are_arrays or self.positional)
        assert a == b, f"{path or '(root)'}: expected {b!r:.300}, found {a!r:.300}"

    def assert_restores(self, path: Path, tree: Any, **options: Any) -> None:
        """Asserts that a tree comes back bit for bit, of the same kinds and in its structure, into a blank template."""
        found = restore(path, jax.tree.map(blank, tree), **options)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        for x, y in zip(*map(jax.tree.leaves, (found, tree)), strict=True):
            a, b = identity(x), identity(y)
            assert a == b, f"{options}: expected {b!r:.300}, found {a!r:.300}"
            assert same_kind(x, y), f"{options}: expected a {type(y)}, found a {type(x)}"


def blank(leaf: Any) -> Any:
    """A leaf of the same kind without what it holds."""
    if isinstance(leaf, jax.Array):
        return leaf if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jax.numpy.zeros_like(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return np.zeros(leaf.shape, leaf.dtype)[() if isinstance(leaf, np.generic) else ...]
    return type(leaf)() if type(leaf) in (bool, int, float, complex, str, bytes) else leaf


def listing(folder: Path) -> dict[str, int]:
    """Every file and folder below a folder, with the sizes of files."""
    found = {}
    for base, folders, names in os.walk(folder):
        found.update({os.path.relpath(os.path.join(base, name), folder): -1 for name in folders})
        found.update({os.path.relpath(p, folder): os.path.getsize(p) for p in (os.path.join(base, n) for n in names)})
    return found


def remove(path: Path) -> None:
    """Removes a file, or a folder with all that is in it, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
