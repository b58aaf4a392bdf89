"""The declarations of a format under test, and functions that make and compare its checkpoints."""

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

    A save must refuse every leaf that the format does not declare, because it must not change data silently.
    """

    format: ClassVar[Format | str]
    """The format: the name of a registered format, or an object that each test registers while it runs."""

    options: ClassVar[Mapping[str, Any]] = {}
    """The options of every save."""

    suffix: ClassVar[str] = ""
    """The ending of the names of checkpoints."""

    step_name: ClassVar[str | None] = None
    """The name of a step in a run, such as ``step-{}``; None if the format has no runs."""

    writes: ClassVar[bool] = True
    """True if Treering can write the format; if not, override `make`."""

    dtypes: ClassVar[Collection[str]] = DTYPES
    """The dtypes in `treering.testing.DTYPES` that the format can store."""

    values: ClassVar[Collection[str]] = tuple(VALUES)
    """The leaves other than arrays that the format can store, by their names in `treering.testing.VALUES`."""

    left_out: ClassVar[Collection[str]] = ()
    """The kinds of leaves that the format silently leaves out ("none", "function", "str", "bytes").

    A restore takes these leaves from the template.
    """

    keys: ClassVar[bool] = True
    """True if the format can store typed PRNG keys."""

    names: ClassVar[Collection[str]] = NAMES
    """The keys of dicts in `treering.testing.NAMES` that the format can store."""

    empty: ClassVar[bool] = True
    """True if the format records empty containers."""

    fields: ClassVar[Collection[str]] = ("step", "metrics", "metadata")
    """Those of ``step``, ``metrics`` and ``metadata`` that the format can store."""

    numbers_are_arrays: ClassVar[bool] = False
    """True if the format stores Python's numbers as arrays without axes, which templates turn into numbers again."""

    positional: ClassVar[bool] = False
    """True if the format stores leaves without names, so that only a template identifies them."""

    checksums: ClassVar[bool] = False
    """True if every changed byte either raises an error or has no effect."""

    streams: ClassVar[bool] = False
    """True if a file that is cut off between two leaves looks complete."""

    damages: ClassVar[int] = 350
    """The most byte positions at which the tests cut off files of a small checkpoint, and the most that they change."""

    most_memory: ClassVar[int] = 200 << 20
    """The most memory, in bytes, that copying a checkpoint of any size may take."""

    def make(self, path: Path, tree: Any, **options: Any) -> None:
        """Makes a checkpoint of a tree. Override it for a format that Treering cannot write."""
        save(path, tree, format=self.name, **{**self.options, **options})

    def files(self, path: Path) -> list[Path]:
        """Returns the files of a checkpoint."""
        return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def small(self) -> dict[str, Any]:
        """Returns a tree of arrays for the tests of damage. Override it if larger arrays are stored in another way."""
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
        with stores.using(stores.get("")):  # The doubles that a test registers are removed after it.
            self.prepare(monkeypatch)
            yield

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prepares a test: registers the format, and a disk that is fast because it makes nothing durable."""
        stores.register(stores.Filesystem(QuickDisk()))
        if not isinstance(self.format, str):
            monkeypatch.setitem(formats._registered, self.name, self.format)

    def place(self, folder: Path, name: str) -> Path:
        """Returns the path of a checkpoint with this name."""
        return folder / f"{name}{self.suffix}"

    def made(self, folder: Path, tree: Any, name: str = "made", **options: Any) -> Path:
        """Makes a checkpoint and returns its path."""
        path = self.place(folder, name)
        self.make(path, tree, **options)
        return path

    def reader(self, path: Path) -> Source:
        """Returns the source that the format opens at a path."""
        return self.subject.open(stores.get(""), str(path))

    def needs_writer(self) -> None:
        """Skips a test if Treering cannot write the format."""
        if not self.writes:
            pytest.skip(f"{self.name} is only read")

    def held(self) -> dict[str, Any]:
        """Returns the leaves other than arrays that the format declares in `values`."""
        return {f"v{n:02}": VALUES[name] for n, name in enumerate(self.values)}

    def leaves(self, tree: Any) -> dict[str, Any]:
        """Returns the leaves of a tree that a checkpoint of it has, by their names in the checkpoint."""
        flat_tree = walk.flatten_tree(tree)
        found = {
            p: leaf for p, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if not self.is_left_out(leaf)
        }
        return {str(n): leaf for n, leaf in enumerate(found.values())} if self.positional else found

    def is_left_out(self, leaf: Any) -> bool:
        """Returns True if the format silently leaves out a leaf."""
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
        """Asserts that a restore with a blank template returns the tree: its structure, kinds of leaves and bits."""
        found = restore(path, jax.tree.map(blank, tree), **options)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        for x, y in zip(*map(jax.tree.leaves, (found, tree)), strict=True):
            a, b = identity(x), identity(y)
            assert a == b, f"{options}: expected {b!r:.300}, found {a!r:.300}"
            assert same_kind(x, y), f"{options}: expected a {type(y)}, found a {type(x)}"


def blank(leaf: Any) -> Any:
    """Returns a leaf of the same kind, shape and dtype without its contents."""
    if isinstance(leaf, jax.Array):
        return leaf if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jax.numpy.zeros_like(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return np.zeros(leaf.shape, leaf.dtype)[() if isinstance(leaf, np.generic) else ...]
    return type(leaf)() if type(leaf) in (bool, int, float, complex, str, bytes) else leaf


def listing(folder: Path) -> dict[str, int]:
    """Returns every file and folder below a folder, with the sizes of files in bytes and -1 for folders."""
    found = {}
    for base, folders, names in os.walk(folder):
        found.update({os.path.relpath(os.path.join(base, name), folder): -1 for name in folders})
        found.update({os.path.relpath(p, folder): os.path.getsize(p) for p in (os.path.join(base, n) for n in names)})
    return found


def remove(path: Path) -> None:
    """Removes a file or a folder with its contents, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
