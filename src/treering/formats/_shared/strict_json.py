"""Parses JSON that every reader understands in the same way. It refuses what RFC 8259 leaves open."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

# The errors of parsing and converting. `msgspec` 0.19 raises a `SystemError` for integers of thousands of digits.
MALFORMED = (ValueError, RecursionError, msgspec.MsgspecError, SystemError)
# Text with one of these may contain a number that is written -0. Only then every integer is checked, which is slow.
_MINUS_ZERO = (b"-0,", b"-0]", b"-0}", b"-0 ", b"-0\n", b"-0\r", b"-0\t")


def parse(data: bytes) -> Any:
    """Parses JSON. Raises `ValueError` for text that readers may understand differently.

    That is an object with one key twice, a number that is not a finite double, the integer -0, text that is not UTF-8
    or has half of a surrogate pair, and anything that is not JSON. Raises `RecursionError` for too many levels.
    """
    top = json.loads(
        data.decode(),
        object_pairs_hook=unique,
        parse_constant=_refuse,
        parse_float=_finite,
        parse_int=_integer if b"-" in data and _may_have_minus_zero(data) else None,
    )
    if b"\\u" in data:
        json.dumps(top, ensure_ascii=False).encode()
    return top


def parse_typed(data: bytes, types: Mapping[str, Any]) -> dict[str, Any]:
    """Parses an object as `parse` does, and converts the fields in `types` to these types.

    A field without any of the ambiguities that `parse` refuses is decoded directly, which is several times faster.
    Raises the errors in `MALFORMED`.
    """
    fields = {key: bytes(raw) for key, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items()}
    # Only the end is copied, because stripping all of it would copy megabytes. If more than 64 blanks end the data, the
    # test below fails and the slow path handles them.
    end = data[-64:].rstrip()
    nbytes = len(data) - len(data[-64:]) + len(end)
    if nbytes != 1 + sum(len(key.encode()) + len('"":,') + len(raw) for key, raw in fields.items()):
        # The object has blanks or escapes between its fields, or one key twice, which `msgspec` does not report.
        top = parse(data)
        return {key: msgspec.convert(value, types.get(key, Any)) for key, value in top.items()}
    return {key: _value(raw, types[key]) if key in types else parse(raw) for key, raw in fields.items()}


def _value(raw: bytes, type: Any) -> Any:
    if b"{" in raw or b"\\u" in raw or (b"-" in raw and _may_have_minus_zero(raw)):
        return msgspec.convert(parse(raw), type)
    return msgspec.json.decode(raw, type=type)  # `msgspec` itself enforces all the other rules of `parse`.


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs of a JSON object as a dict, for `json.loads`. Raises `ValueError` if a key occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return result


def is_plain(data: bytes | bytearray, keys: int) -> bool:
    """Returns True if JSON certainly follows the rules of `parse`. False means that `parse` must decide.

    keys: the number of different keys that a lenient parser has found.

    In ASCII without blanks, a quotation mark and a colon follow every key. So the keys can be counted in the text, if
    only quotation marks are escaped. A larger count reveals a key that occurs twice.
    """
    blanks = (b" ", b"\n", b"\r", b"\t")
    if not data.isascii() or any(one in data for one in blanks) or (b"-" in data and _may_have_minus_zero(data)):
        return False
    return data.count(b"\\") == data.count(b'\\"') and data.count(b'":') - data.count(b'\\":') == keys


def _may_have_minus_zero(data: bytes | bytearray) -> bool:
    return b"-0" in data and (data.endswith(b"-0") or any(one in data for one in _MINUS_ZERO))


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("a number is written -0, which some readers read as an integer and others as a float")
    return int(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of a double")
    return value
