"""Paths as JSON, for messages between processes. Paths need not be valid Unicode."""

import os


def to_json(path: str) -> str:
    """Returns a text that JSON can hold, for any path."""
    return os.fsencode(path).decode("latin-1")


def from_json(text: str) -> str:
    """Undoes `to_json`."""
    return os.fsdecode(text.encode("latin-1"))
