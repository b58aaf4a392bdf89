"""Comparisons of checkpoints and live trees."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import treering as tr


def test_differences_by_path(tmp_path: pathlib.Path) -> None:
    a = {"same": np.ones(3), "w": np.zeros(4, np.float32), "s": 1, "gone": 2, "k": jax.random.key(0), "i": np.arange(3)}
    b = {"same": np.ones(3), "w": np.array([0, 0, -2, 0], np.float32), "s": 1.0, "new": 3, "k": jax.random.key(1)}
    b["i"] = np.arange(4)
    tr.save(tmp_path / "a", a)
    tr.save(tmp_path / "b", b)
    expected = {
        "w": "1 of 4 values differ, at most by 2",
        "s": "int 1 → float 1.0",
        "k": "1 of 2 values differ, at most by 1",
        "i": "int64[3] → int64[4]",
    }
    for left in (tmp_path / "a", tr.open(tmp_path / "a"), a):
        for right in (str(tmp_path / "b"), tr.open(tmp_path / "b"), b):
            found = tr.diff(left, right)
            assert found
            assert (found.only_a, found.only_b, found.changed, found.equal) == (("gone",), ("new",), expected, 1)
    assert str(tr.diff(a, b)).startswith("1 leaf is equal\n  - gone\n  + new\n  ~ i: int64[3] → int64[4]")


def test_equality_is_bit_by_bit(tmp_path: pathlib.Path) -> None:
    nan = np.array([np.nan, 1], np.float32)
    other = nan.copy()
    other.view(np.uint32)[0] += 1
    assert not tr.diff({"x": nan, "n": float("nan")}, {"x": nan.copy(), "n": float("nan")})
    assert tr.diff({"x": nan}, {"x": other}).changed == {"x": "1 of 2 values differ"}
    assert tr.diff({"x": np.array(0.0)}, {"x": np.array(-0.0)})
    assert not tr.diff({"x": jnp.ones(2, jnp.bfloat16)}, {"x": np.ones(2, jnp.bfloat16)})
    assert not tr.diff({"x": np.zeros((0, 3))}, {"x": np.zeros((0, 3))})


def test_large_arrays_are_compared_in_slices(monkeypatch) -> None:
    from treering._tools import diff

    a = np.linspace(-1, 1, 200).reshape(40, 5)
    for places in ([(39, 4), (0, 0)], [(39, 4)], [(20, 1), (39, 4)]):  # The first slices may be equal.
        b = a.copy()
        b[tuple(zip(*places, strict=True))] += 3
        for shape in ((40, 5), (1, 200), (2, 1, 100), (200,)):  # A row may be larger than a slice.
            sides = {"x": a.reshape(shape)}, {"x": b.reshape(shape)}
            monkeypatch.setattr(diff, "_SLICE_BYTES", 1 << 20)
            at_once = tr.diff(*sides).values["x"]
            monkeypatch.setattr(diff, "_SLICE_BYTES", 100)
            found = tr.diff(*sides).values["x"]
            assert (found.differing, found.size, found.largest, found.relative) == (len(places), 200, 3, 3 / 4)
            assert found.cosine is not None and at_once.cosine is not None
            assert abs(found.cosine - at_once.cosine) < 1e-12


def test_parts_of_checkpoints(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "a", {"params": {"w": np.ones(2)}, "opt": 3})
    assert not tr.diff(tr.open(tmp_path / "a").at("params"), {"w": np.ones(2)})


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "complex32", "bcomplex32"])
def test_imaginary_parts_count(dtype: str) -> None:
    dtype_ = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = np.array([1, 3j]).astype(dtype_), np.array([1, -3j]).astype(dtype_)
    (change,) = tr.diff({"x": a}, {"x": b}).values.values()
    assert (change.differing, change.largest, change.relative, change.cosine) == (1, 6, 2, pytest.approx(-0.8))


class _Loader:
    """A user's own data loader, whose state is a position and an order."""

    def __init__(self, position: int) -> None:
        self.position, self.order = position, np.arange(1000)

    def state_dict(self) -> dict[str, object]:
        return {"order": self.order, "nested": [{"position": self.position}]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


def test_the_first_difference_of_two_iterators_is_said(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "a", {"data": _Loader(928)})
    found = tr.diff(tmp_path / "a", {"data": _Loader(929)})
    assert found.changed == {"data": "iterator[0]['nested'][0]['position']: 928 → 929"}
    other = _Loader(928)
    other.order = other.order[::-1]
    assert "['order']: 1000 of 1000 values differ" in tr.diff(tmp_path / "a", {"data": other}).changed["data"]
    assert not tr.diff(tmp_path / "a", {"data": _Loader(928)})
