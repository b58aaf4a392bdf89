"""Makes text from files safe to show in a terminal: characters that do not print are shown by their codes."""

from typing import Any


def safe(text: object) -> str:
    """Returns text as one line without control characters, which a terminal would obey."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(value: object) -> str:
    """Returns the beginning of the `repr` of any object, as one line."""
    return " ".join(f"{value!r:.200}".split())[:100]


def safe_lines(text: object) -> str:
    """Returns several lines of text, each of them made safe by `safe`."""
    return "\n".join(safe(line) for line in str(text).split("\n"))


def escape_record(record: Any) -> bool:
    """Escapes the message of a log record. It is the filter of a logger, and lets every record pass."""
    message = record.getMessage()
    if (shown := safe_lines(message)) != message:
        record.msg, record.args = shown, None
    return True
