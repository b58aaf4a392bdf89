"""Tests of writing a format, and of the leaves that it must refuse."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from .. import stores
from .._core import dtypes
from .._printable import safe
from .._restore.checkpoint import Checkpoint
from .._run.open import open_checkpoint
from .._save.save import save, save_async
from .._tools.convert import convert
from .._tools.diff import diff
from ..errors import MismatchError, UnsupportedError
from ._doubles import BottomlessDisk, memory_bounded, ones
from ._samples import DTYPES, NAMES, VALUES, sample
from ._subject import Subject, listing, remove


class Writing(Subject):
    """See `treering.testing.FormatConformance`."""

    def test_what_it_cannot_hold_is_refused_by_name(self, tmp_path: Path) -> None:
        """One error names exactly the leaves that the format cannot store, and nothing is written."""
        self.needs_writer()
        arrays = {f"d{n:02}": sample(d) for n, d in enumerate(DTYPES) if d not in self.dtypes}
        refused = {name: v for name, v in VALUES.items() if name not in self.values and not self.is_left_out(v)}
        values = {f"v{n:02}": value for n, value in enumerate(refused.values())}
        names = {name: {"x": sample("float32")} for name in NAMES if name not in self.names}
        keys = {} if self.keys else {"key": jax.random.key(0), "keys": jax.random.split(jax.random.key(0), 3)}
        good = {f"f{n:02}": sample(d) for n, d in enumerate(self.dtypes)}
        tree = {"bad": {"arrays": arrays, "values": values, "names": names, "keys": keys}, "good": good}
        path = self.place(tmp_path / "new" / "deep", "x")
        if not any(tree["bad"].values()):
            self.make(path, tree)  # The format stores everything.
            return
        with pytest.raises(UnsupportedError) as caught:
            self.make(path, tree)
        text = str(caught.value)
        for group in (arrays, values, keys):
            assert [name for name in group if f"/{name}" not in text] == []
        assert [name for name in names if _shown(name) not in text and f"bad/names/{safe(name)}" not in text] == []
        assert [name for name in good if f"good/{name}" in text] == []
        assert listing(tmp_path) == {}

    def test_trees_without_containers_or_leaves(self, tmp_path: Path) -> None:
        """An array without a container, and containers without leaves, are stored or refused."""
        self.needs_writer()
        for n, tree in enumerate((sample("float32"), {}, [], {"a": {}}, None)):
            path = self.place(tmp_path, f"x{n}")
            try:
                self.make(path, tree)
            except UnsupportedError:
                assert listing(tmp_path) == {}
                continue
            self.assert_holds(path, tree)
            if tree is not None:  # `None` would mean that no template is given.
                self.assert_restores(path, tree)
            remove(path)

    def test_colliding_names_are_kept_or_refused(self, tmp_path: Path) -> None:
        """Two leaves whose names may be equal in a file are both stored, or the save is refused."""
        self.needs_writer()
        for n, name in enumerate(("a.b", "a/b", "a~1b", "a\\b", "a b", "A")):
            tree = {"a": {"b": sample("float32")}, name: sample("float32", seed=1), "x": {name: {"w": sample("int32")}}}
            path = self.place(tmp_path, f"x{n}")
            try:
                self.make(path, tree)
            except UnsupportedError:
                assert listing(tmp_path) == {}
                continue
            self.assert_holds(path, tree)
            remove(path)

    def test_there_and_back(self, tmp_path: Path) -> None:
        """`save`, `save_async` and `convert` copy from the native format, back to it, and within the format."""
        self.needs_writer()
        tree = {"arrays": [sample(d, (3, 4), n) for n, d in enumerate(self.dtypes)], **self.small()}
        tree.update(values=self.held(), large=sample("float32", (700, 900)))
        tree.update(keys=[jax.random.key(5)] if self.keys else [])
        save(tmp_path / "native", tree)
        ways: dict[str, Callable[[Any, Any, str], Any]] = {
            "convert": lambda src, dst, to: convert(src, dst, format=to, **self._options(to)),
            "save": lambda src, dst, to: save(dst, open_checkpoint(src), format=to, **self._options(to)),
            "async": lambda src, dst, to: save_async(
                dst, open_checkpoint(src), format=to, **self._options(to)
            ).result(),
        }
        for name, way in ways.items():
            there, back, again = (
                self.place(tmp_path, name),
                tmp_path / f"{name} back",
                self.place(tmp_path, f"{name} 2"),
            )
            report = way(tmp_path / "native", there, self.name)
            assert report.path == str(there) and report.nbytes == open_checkpoint(there).nbytes
            way(there, back, "treering")
            way(there, again, self.name)
            assert open_checkpoint(back).format == "treering"
            for path in (there, back, again):
                self.assert_holds(path, tree)
            self.assert_restores(there, tree)
            assert not diff(there, again)

    def test_parts_and_casts_are_written(self, tmp_path: Path) -> None:
        """A subtree of a checkpoint is stored with its floats cast, even if the format cannot store the rest."""
        self.needs_writer()
        dtype = next(d for d in ("bfloat16", "float16", "float32") if d in self.dtypes)
        tree = {"part": {"a": sample("float16", (5,)), "b": sample("int32")}, "other": [*VALUES.values(), np.ones(2)]}
        save(tmp_path / "native", tree)
        path = self.place(tmp_path, "part")
        convert(tmp_path / "native", path, format=self.name, at="part", dtype=dtype, **self.options)
        cast = dtypes.convert(tree["part"]["a"], dtypes.to_numpy(dtype))
        self.assert_holds(path, {"a": cast, "b": tree["part"]["b"]})

    def test_unknown_options_are_refused(self, tmp_path: Path) -> None:
        """An unknown option raises before anything is written."""
        self.needs_writer()
        with pytest.raises(MismatchError, match="no_such_option"):
            self.make(self.place(tmp_path / "new", "x"), self.small(), no_such_option=1)
        assert listing(tmp_path) == {}

    def test_formats_that_are_only_read_say_so(self, tmp_path: Path) -> None:
        """A save in a format that Treering cannot write raises an error with the path and writes nothing."""
        if self.writes:
            pytest.skip(f"Treering can write {self.name}")
        with pytest.raises(UnsupportedError, match="new"):
            save(self.place(tmp_path / "new", "x"), self.small(), format=self.name)
        assert listing(tmp_path) == {}

    def test_any_size_is_copied_in_bounded_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An array of 256 MiB is copied into the format and out of it in bounded memory."""
        shape, path = (1 << 10, 1 << 16), self.place(tmp_path, "large")
        try:
            if self.writes:
                source = ones(shape)
                with memory_bounded(self.most_memory):
                    save(path, Checkpoint(source), format=self.name, **self.options)
            else:
                self.make(path, {"w": np.ones(shape, np.float32)})
            lazy = next(iter(open_checkpoint(path).values()))
            assert lazy.shape == shape and all((lazy[n, ::97] == 1).all() for n in (0, shape[0] - 1))
            stores.register(stores.Filesystem(BottomlessDisk()))
            with memory_bounded(self.most_memory) as known:
                convert(path, tmp_path / "back", memory_limit=64 << 20, max_expansion=math.inf)  # It may be compressed.
        finally:
            for file in self.files(path) if path.exists() else ():
                file.unlink()
        if not known:
            pytest.skip("memory is measured on Linux only")

    def _options(self, name: str) -> dict[str, Any]:
        return dict(self.options) if name == self.name else {}


def _shown(name: str) -> str:
    """Returns a key as it appears in a path."""
    return name.replace("~", "~0").replace("/", "~1")
