"""Compares the index arithmetic of boxes with NumPy."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from treering._core import boxes


@st.composite
def arrays_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], boxes.Box, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    box = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape)
    return shape, box, draw(st.integers(0, 300))  # type: ignore[return-value]


@pytest.mark.long
@given(arrays_and_boxes())
def test_byte_ranges_cover_a_box_with_small_gaps_only(case: tuple[tuple[int, ...], boxes.Box, int]) -> None:
    shape, box, gap = case
    itemsize = 4
    index = np.arange(math.prod(shape) * itemsize).reshape((*shape, itemsize))
    needed = set(index[boxes.slices(box, boxes.full_box(shape))].ravel().tolist())
    ranges = list(boxes.byte_ranges(shape, box, itemsize, gap))
    covered = [byte for begin, end in ranges for byte in range(begin, end)]
    assert len(covered) == len(set(covered))
    assert needed <= set(covered)
    assert covered == sorted(covered)
    for begin, end in ranges:  # each range begins and ends with a needed byte and has no gap beyond the limit
        inside = [byte for byte in range(begin, end) if byte in needed]
        assert inside[0] == begin and inside[-1] == end - 1
        assert max((b - a - 1 for a, b in itertools.pairwise(inside)), default=0) <= gap


@given(arrays_and_boxes(), arrays_and_boxes())
def test_intersections(first: tuple, second: tuple) -> None:
    n = min(len(first[1]), len(second[1]))
    a, b = first[1][:n], second[1][:n]
    space = np.zeros((8,) * n, int)
    space[tuple(slice(*r) for r in a)] += 1
    space[tuple(slice(*r) for r in b)] += 1
    both = boxes.intersect(a, b)
    assert (space == 2).sum() == (0 if both is None else math.prod(boxes.box_shape(both)))


def test_an_array_without_elements_is_one_box() -> None:
    """A file of a few bytes can claim 2^55 rows of nothing."""
    assert list(itertools.islice(boxes.slice_boxes((1 << 55, 0), 8, 1 << 20), 2)) == [((0, 1 << 55), (0, 0))]
    assert list(boxes.slice_boxes((), 8, 1)) == [()] and list(boxes.slice_boxes((0, 3), 8, 1)) == [((0, 0), (0, 3))]
