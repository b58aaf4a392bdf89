"""Arrays that are still in their checkpoint, and reading them ahead."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering._core import lazy
from treering._core.boxes import full_box


@pytest.mark.parametrize("room", [1 << 20, 40 * 16, 1])
def test_reading_ahead_reads_each_array_once_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Takes few reads in any order, and never more memory than allowed, unless the caller asks for an array twice."""
    monkeypatch.setattr(lazy, "_AHEAD_BYTES", room)
    tree = {f"l{n:03}": np.full(4, n, np.float32) for n in range(100)}
    tr.save(tmp_path / "c", tree)
    source = tr.open(tmp_path / "c")._source
    entries: list[Any] = list(source.entries.values())
    orders = [entries, entries[::-1], random.Random(1).sample(entries, 100), entries[::3]]
    for order in orders:
        reads: list[Sequence[Any]] = []
        ahead: Any = lazy.ReadAhead(_Counting(source, reads), entries)
        for one in order:
            (array,) = ahead.read([(one, full_box(one.shape))])
            assert (array == tree[one.path]).all()
            assert sum(held.nbytes for held in ahead._held.values()) <= room
        taken = Counter(entry.path for wanted in reads for entry, _ in wanted)
        assert set(taken.values()) == {1}
        if room == 1 << 20:
            assert len(reads) == 1
        (again,) = ahead.read([(order[0], ((1, 3),))])
        assert again.shape == (2,)


class _Counting:
    """A source that notes what is read."""

    def __init__(self, source: Any, reads: list[Sequence[Any]]):
        self._source, self._reads = source, reads

    def read(self, wanted: Sequence[Any], **options: Any) -> Any:
        self._reads.append(wanted)
        return self._source.read(wanted, **options)
