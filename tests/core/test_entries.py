"""Tests values in the manifest."""

import json
import math
import struct
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from treering._core import values as _values
from treering.errors import CorruptError, UnsupportedError

values = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.binary(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.none(),
)


def bits(value: Any) -> Any:
    if type(value) is float:
        return struct.pack(">d", value)
    return (bits(value.real), bits(value.imag)) if type(value) is complex else value


@given(values)
@example(-0.0)
@example(math.inf)
@example(struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0])
@example(10**6000)
@example(-(2**53) - 1)
def test_values_survive_json_bit_for_bit(value: Any) -> None:
    kind, encoded = _values.encode(value)
    text = json.dumps(encoded, allow_nan=False)
    found = _values.decode(kind, json.loads(text))
    assert type(found) is type(value)
    assert bits(found) == bits(value)


class Colour(int):
    """A subclass, which could not be restored as itself."""


@pytest.mark.parametrize("value", [Colour(1), "\ud800", object(), [1]])
def test_what_would_not_come_back_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedError):
        _values.encode(value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("int", 1.0), ("int", True), ("float", "1"), ("bool", 1), ("bytes", "?"), ("complex", [1]), ("str", 1), ("x", 1)],
)
def test_a_value_of_another_type_is_corrupt(kind: str, value: Any) -> None:
    with pytest.raises(CorruptError):
        _values.decode(kind, value)
