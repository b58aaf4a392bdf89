"""Values as text, for messages between processes. Strings need not be valid Unicode, because paths need not be."""

import json
from typing import Any

import msgspec

from .. import errors
from ..errors import PeerError, TreeringError

FAILED = "failed "  # prefix of the error that a failed process puts where its sign of life, or its answer, would be


def encode(value: Any) -> str:
    """Returns the JSON of a value that msgspec can encode."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # Python's JSON has escapes for lone surrogates, which stand for bytes of a path.
        return json.dumps(msgspec.to_builtins(value, str_keys=True))


def decode(text: str, type: Any = Any) -> Any:
    """Undoes `encode`. Raises `ValueError` or `msgspec.MsgspecError` for another text."""
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.DecodeError:
        if "\\ud" not in text:
            raise
        return msgspec.convert(json.loads(text), type, str_keys=True)


def encode_error(error: BaseException) -> str:
    """Returns the text of an error, for the peers of a failed process."""
    kind = type(error).__name__ if isinstance(error, TreeringError) else ""
    text = (str(error) or type(error).__name__).encode("utf-8", "backslashreplace").decode()
    return FAILED + msgspec.json.encode([kind, text]).decode()


def decode_error(failure: str, index: int) -> TreeringError:
    """Returns the error of a failed process, as its peers raise it."""
    kind, text = msgspec.json.decode(failure.removeprefix(FAILED))
    return getattr(errors, kind, PeerError)(text if text.startswith("process ") else f"process {index}: {text}")
