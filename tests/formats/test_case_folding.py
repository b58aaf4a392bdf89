"""Tests of keys that differ only in case, on file systems that ignore case.

A test double replaces such a file system, because a real one would have to be mounted.
"""

import os
import pathlib
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering.stores.posix import Disk


class Folding(Disk):
    """A disk that finds names in any case."""

    def stat(self, path: str) -> os.stat_result | None:
        folder, name = os.path.split(path)
        names = {one.lower(): one for one in super().list(folder)}
        return super().stat(os.path.join(folder, names.get(name.lower(), name)))


@pytest.mark.parametrize(
    ("keys", "named"), [("W w", "'W' and 'w'"), ("a/W a/w", "'a/W' and 'a/w'"), ("A/x a/y", "'A' and 'a'")]
)
def test_keys_that_are_one_folder_are_refused_by_name(
    tmp_path: pathlib.Path, use_disk: Any, keys: str, named: str
) -> None:
    tree: dict[str, Any] = {}
    for n, key in enumerate(keys.split()):
        *above, last = key.split("/")
        place = tree.setdefault(above[0], {}) if above else tree
        place[last] = np.full((300, 300), n, np.float32)
    tr.save(tmp_path / "c", tree, format="levanter")
    assert tr.verify(tmp_path / "c").ok
    use_disk(Folding())
    with pytest.raises(tr.errors.UnsupportedError, match=f"/d: expected .* the keys {named} are one folder"):
        tr.save(tmp_path / "d", tree, format="levanter")
    # In these formats, keys are not the names of folders.
    for name, format in (("t5x", "t5x"), ("native", None), ("orbax", "orbax")):
        tr.save(tmp_path / name, tree, format=format)
    assert sorted(os.listdir(tmp_path)) == ["c", "native", "orbax", "t5x"]


def test_items_that_are_one_folder_are_refused_by_name(tmp_path: pathlib.Path, use_disk: Any) -> None:
    tree = {"W": {"x": np.ones(3)}, "w": {"x": np.zeros(3)}}
    use_disk(Folding())
    with pytest.raises(tr.errors.UnsupportedError, match="the keys 'W' and 'w' are one folder"):
        tr.save(tmp_path / "c", tree, format="orbax", composite=True)
    assert not os.listdir(tmp_path)
