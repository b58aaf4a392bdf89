"""What several test modules need."""

import contextlib
import errno
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import treering as tr
from treering.stores.posix import Disk


def git_directory(repository: str) -> Path | None:
    """Returns the git directory of a snapshot; None if there is none."""
    folder = Path(os.environ.get("TREERING_PROGRAMS", ""), repository.replace("/", "+"))
    return next((path for path in (folder, folder / "repo", folder / ".git") if (path / "objects").is_dir()), None)


def open_at(path: Path) -> list[str]:
    """Returns the paths at, above and below a path that this process has open, once for each descriptor.

    All descriptors of the process would count those that other tests have left to the garbage collector.
    """
    found: list[Path] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # That of the listing itself is closed by now.
            found.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
    return sorted(str(one) for one in found if path == one or path in one.parents or one in path.parents)


def assert_same(a: Any, b: Any) -> None:
    """Asserts that two pytrees are equal bit for bit, in structure, kinds of leaves and contents."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    ours, theirs = _leaves(a), _leaves(b)
    assert len(ours) == len(theirs)
    for (place, x), (other_place, y) in zip(ours, theirs, strict=True):
        assert place == other_place  # a treedef does not tell the keys 1, 1.0 and True apart
        for name, (p, q) in _compared(x, y).items():
            assert p == q, f"{place or '(root)'}: {name}: {p!r:.200} is not {q!r:.200}"


def every_way(tmp_path: Path, tree: Any, *likes: Any) -> Iterator[Any]:
    """Yields what a save of either kind restores, with mapped and with copied files.

    With several templates, yields a tuple with the tree restored for each.
    """
    for background in (False, True):
        path = f"{tempfile.mkdtemp(dir=tmp_path)}/ckpt"
        if background:
            tr.save_async(path, tree).result()
        else:
            tr.save(path, tree)
        for mmap in (None, False):
            found = tuple(tr.restore(path, like=like, mmap=mmap) for like in likes)
            yield found if len(likes) > 1 else found[0]


def assert_survives(tmp_path: Path, tree: Any) -> None:
    """Asserts that a tree comes back the same in every way when it is its own template."""
    for restored in every_way(tmp_path, tree, tree):
        assert_same(restored, tree)


def assert_survives_plainly(tmp_path: Path, tree: Any) -> None:
    """Asserts that a tree without JAX arrays comes back the same with itself as the template and with none."""
    for restored, plain in every_way(tmp_path, tree, tree, None):
        assert_same(restored, tree)
        assert_same(plain, tree)


class Closed(Disk):
    """A disk on which some directories and files belong to others; tests may run as root, whom nothing is closed to."""

    def __init__(self, *names: str):
        self._names = names

    def _check(self, path: str) -> None:
        if any(f"/{name}/" in path for name in self._names):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def stat(self, path: str) -> os.stat_result | None:
        self._check(path)
        return super().stat(path)

    def list(self, path: str) -> list[str]:
        self._check(f"{path}/")
        return super().list(path)

    def open(self, path: str) -> int:
        self._check(f"{path}/")
        return super().open(path)


REAL = Path(__file__).parent / "real"
READ_ONLY = ("npz", "tensorflow", "torch", "keras", "dcp", "slime", "skyrl")  # not written, or only as versions


def described(library: str) -> dict[str, dict[str, Any]]:
    """Returns what the library's own reader found in the checkpoints of `real/`: their leaves by path."""
    return json.loads((REAL / library / "expected.json").read_text())


def assert_described(path: Path, leaves: dict[str, Any]) -> None:
    """Asserts that a checkpoint has these leaves and no others, listed and restored."""
    ckpt = tr.open(path)
    assert set(ckpt) == set(leaves)
    restored = jax.tree_util.tree_leaves_with_path(tr.restore(path), is_leaf=lambda leaf: leaf is None)
    found = {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in restored}
    assert set(found) == set(leaves)
    for place, about in leaves.items():
        if not isinstance(about, dict):  # None and Python's numbers
            assert (type(found[place]), found[place]) == (type(about), about) and ckpt[place] == about
            continue
        assert (ckpt[place].dtype.name, list(ckpt[place].shape)) == (about["dtype"], about["shape"]), place
        for array in (np.asarray(found[place]), ckpt[place][...]):
            assert (array.dtype.name, list(array.shape)) == (about["dtype"], about["shape"]), place
            assert hashlib.sha256(array.tobytes()).hexdigest() == about["sha256"], place


def assert_read_as_by(library: str, name: str, tmp_path: Path, *, format: str) -> None:
    """Asserts that a checkpoint of `real/` is read as its library reads it, converted to our format and back too."""
    path, leaves = REAL / library / name, described(library)[name]
    assert tr.open(path).format == format and tr.verify(path).ok
    assert_described(path, leaves)
    tr.convert(path, tmp_path / "ours")
    assert_described(tmp_path / "ours", leaves)
    tr.convert(tmp_path / "ours", tmp_path / "back", format=format)
    assert tr.open(tmp_path / "back").format == format
    assert_described(tmp_path / "back", leaves)


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    with_paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in with_paths]


def _compared(x: Any, y: Any) -> dict[str, tuple[Any, Any]]:
    ours, theirs = _identity(x), _identity(y)
    return {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}


def _identity(leaf: Any) -> dict[str, Any]:
    """Everything in which equal leaves must not differ."""
    if isinstance(leaf, jax.Array):
        about = {"kind": "jax.Array", "dtype": leaf.dtype, "shape": leaf.shape, "committed": leaf.committed}
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(leaf))
            return {**about, "impl": str(jax.random.key_impl(leaf)), "bytes": data.tobytes()}
        return {**about, "weak": leaf.aval.weak_type, "bytes": _bytes(np.asarray(leaf))}
    if isinstance(leaf, np.ndarray | np.generic):
        return {"kind": type(leaf), "dtype": leaf.dtype, "shape": leaf.shape, "bytes": _bytes(np.asarray(leaf))}
    if isinstance(leaf, float):
        return {"kind": type(leaf), "bytes": struct.pack("<d", leaf)}
    if isinstance(leaf, complex):
        return {"kind": type(leaf), "bytes": struct.pack("<dd", leaf.real, leaf.imag)}
    return {"kind": type(leaf), "value": leaf}


def _bytes(array: np.ndarray) -> bytes:
    if array.dtype.name.startswith(("int1", "int2", "int4", "uint1", "uint2", "uint4")) and array.itemsize == 1:
        array = array.astype(np.int8)  # the upper bits of these belong to no value
    return array.tobytes()
