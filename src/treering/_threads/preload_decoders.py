"""Prepares types that several threads decode."""

from typing import Any

import msgspec


def preload_decoders(*types: Any) -> None:
    """Makes msgspec prepare types now. The module that defines them calls this when it is imported.

    Otherwise msgspec prepares a type when it is first decoded, and two threads that do so at once crash (msgspec 0.22).
    """
    for one in types:
        msgspec.json.Decoder(one)
