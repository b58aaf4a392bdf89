"""Text from files as terminals can show it: what does not print, such as an escape sequence, is shown by its code."""

from typing import Any


def safe(text: object) -> str:
    """Returns text as one line without anything that a terminal obeys."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def safe_lines(text: object) -> str:
    """Returns several lines of text, each as by `safe`."""
    return "\n".join(safe(line) for line in str(text).split("\n"))


def escape_record(record: Any) -> bool:
    """Escapes the message of a log record, as a filter of a logger. Lets every record through."""
    message = record.getMessage()
    if (shown := safe_lines(message)) != message:
        record.msg, record.args = shown, None
    return True
