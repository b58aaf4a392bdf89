"""Tests of checkpoints with files that are cut off, changed or missing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._core.lazy import LazyArray
from .._run.open import open_checkpoint, restore
from ..errors import TreeringError
from ._doubles import in_time, memory_bounded
from ._samples import identity, spread
from ._subject import Subject, blank

_SECONDS = 60  # for one damaged checkpoint, on a slow machine
_CHANGES = (0x01, 0x80, 0xFF, 0x10, 0x02)  # masks that flip bits of a byte


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
