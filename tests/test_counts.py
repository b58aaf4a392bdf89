"""Work in proportion to the leaves, counted and not timed: what makes a hot path slower shows here on any machine."""

import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr

_HERE = str(pathlib.Path(tr.__file__).parent)
_FEW, _MANY = 100, 300  # leaves


def tree(count: int) -> dict[str, Any]:
    return {f"l{n:04}": {"w": jnp.full(4, n)} for n in range(count)}


def own_calls(call: Callable[[], Any], *, threads: bool = True) -> int:
    """The calls of Treering's own functions, and the steps of its generators, in this thread and in those it starts."""
    calls = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(_HERE)

    if threads:
        threading.setprofile(count)
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls[0]


def for_each_leaf(make: Callable[[int], Callable[[], Any]], *, threads: bool = True) -> float:
    """The calls that each further leaf takes; `make` prepares what is counted for so many."""
    few, many = (own_calls(make(count), threads=threads) for count in (_FEW, _MANY))
    return (many - few) / (_MANY - _FEW)


def test_the_caller_of_a_loop_calls_nothing_for_each_leaf(tmp_path: pathlib.Path) -> None:
    """Once the structure is known, whatever a leaf needs is done for all of them at once."""
    waiting: list[tr.PendingSave] = []

    def make(count: int) -> Callable[[], Any]:
        state = tree(count)
        tr.save_async(tmp_path / f"{count}-0", state).result()
        return lambda: waiting.append(tr.save_async(tmp_path / f"{count}-1", state))

    assert for_each_leaf(make, threads=False) < 0.1
    assert [pending.result().step for pending in waiting] == [None, None]


def test_a_save_calls_little_for_each_leaf(tmp_path: pathlib.Path) -> None:
    def known(count: int) -> Callable[[], Any]:
        state = tree(count)
        tr.save(tmp_path / f"known-{count}", state)
        return lambda: tr.save(tmp_path / f"again-{count}", state)

    def new(count: int) -> Callable[[], Any]:
        state = tree(count)
        return lambda: tr.save(tmp_path / f"new-{count}", {"within": state})

    assert for_each_leaf(known) <= 2.1 and for_each_leaf(new) <= 36.1


@pytest.mark.parametrize(
    ("format", "like", "most"),
    [
        ("treering", True, 16),
        ("treering", False, 9.1),
        ("safetensors", False, 14.1),
        ("flax", False, 6.1),
    ],
)
def test_a_restore_calls_little_for_each_leaf(tmp_path: pathlib.Path, format: str, like: bool, most: float) -> None:
    def make(count: int) -> Callable[[], Any]:
        state = tree(count) if like else {f"l{n:04}": np.full(4, n) for n in range(count)}
        tr.save(tmp_path / f"{count}", state, format=format)
        return lambda: tr.restore(tmp_path / f"{count}", state if like else None)

    assert for_each_leaf(make) <= most


def test_opening_calls_little_for_each_leaf(tmp_path: pathlib.Path) -> None:
    def make(count: int) -> Callable[[], Any]:
        tr.save(tmp_path / f"{count}", tree(count))
        return lambda: tr.open(tmp_path / f"{count}")

    assert for_each_leaf(make) <= 0.1  # where a part of the tree is like the one before it
