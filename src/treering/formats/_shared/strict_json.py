"""JSON that all readers take alike: what RFC 8259 leaves open is refused."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

MALFORMED = (
    ValueError,
    RecursionError,
    msgspec.MsgspecError,
    SystemError,
)  # what parsing and converting raise; `msgspec` 0.19 its own, and the last for integers of thousands of digits
_MINUS_ZERO = (b"-0,", b"-0]", b"-0}", b"-0 ", b"-0\n", b"-0\r", b"-0\t")  # where one may be; parsing is slower then


def parse(data: bytes) -> Any:
    """Parses JSON. Raises `ValueError` for what readers would take differently, `RecursionError` for too many levels.

    That is a key that stands twice in an object, a number that is no finite double, the integer -0, text that is not
    UTF-8 or has half of a surrogate pair, and anything else that is no JSON.
    """
    top = json.loads(
        data.decode(),
        object_pairs_hook=unique,
        parse_constant=_refuse,
        parse_float=_finite,
        parse_int=_integer if _may_have_minus_zero(data) else None,
    )
    if b"\\u" in data:
        json.dumps(top, ensure_ascii=False).encode()
    return top


def parse_typed(data: bytes, types: Mapping[str, Any]) -> dict[str, Any]:
    """Parses an object as `parse` does, and makes values of these types of some of its fields.

    A field in which nothing is left open is decoded at once, in a fraction of the time. Raises what is `MALFORMED`.
    """
    fields = {key: bytes(raw) for key, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items()}
    end = data[-64:].rstrip()  # a copy of it all would take longer; more blanks are blanks elsewhere
    nbytes = len(data) - len(data[-64:]) + len(end)
    if nbytes != 1 + sum(len(key.encode()) + len('"":,') + len(raw) for key, raw in fields.items()):
        top = parse(data)  # with blanks or escapes; or a key stands there twice
        return {key: msgspec.convert(value, types.get(key, Any)) for key, value in top.items()}
    return {key: _value(raw, types.get(key)) for key, raw in fields.items()}


def _value(raw: bytes, type: Any) -> Any:
    if type is None:
        return parse(raw)
    if b"{" in raw or b"\\u" in raw or _may_have_minus_zero(raw):
        return msgspec.convert(parse(raw), type)
    return msgspec.json.decode(raw, type=type)  # keeps all the other rules


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object, for `json.loads`. Raises `ValueError` when a key stands there twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def is_plain(data: bytes | bytearray, keys: int) -> bool:
    """Whether JSON surely keeps these rules, when a lenient parser has found so many different keys in it.

    In ASCII without blanks every key is followed by a quotation mark and a colon at once, so they can be counted if
    nothing but quotation marks is escaped. False says nothing.
    """
    blanks = (b" ", b"\n", b"\r", b"\t")
    if not data.isascii() or any(one in data for one in blanks) or _may_have_minus_zero(data):
        return False
    return data.count(b"\\") == data.count(b'\\"') and data.count(b'":') - data.count(b'\\":') == keys


def _may_have_minus_zero(data: bytes | bytearray) -> bool:
    return b"-" in data and b"-0" in data and (data.endswith(b"-0") or any(one in data for one in _MINUS_ZERO))


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("a number is written -0, which some readers take for an integer and others for a float")
    return int(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond a double")
    return value
