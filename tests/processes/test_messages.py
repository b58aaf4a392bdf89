"""Messages between the processes of a job."""

import os

import msgspec
import pytest

from treering._processes import messages


@pytest.mark.parametrize(
    "value",
    [
        ["/runs/\u00e9", 1, None, [True, 2.5]],
        [os.fsdecode(b"/runs/\xff\xfe"), 2**53, {"3": ["\\ud800", "\N{SNOWMAN}"]}],
        {"\udc80": "\U0001f332 \udcff"},
    ],
)
def test_paths_need_not_be_unicode(value: object) -> None:
    """Every text arrives as it was, also one that ends or begins in the middle of a character."""
    assert messages.decode(messages.encode(value)) == value
    assert messages.decode(messages.encode({3: value}), dict[int, object]) == {3: value}


def test_what_is_no_message_is_refused() -> None:
    for text in ("", "[1", '["\\udcff"', '{"a": 1}'):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            messages.decode(text, list[int])
