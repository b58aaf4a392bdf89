"""Prints the output of commands: text that fits the terminal, CSV, or JSON."""

import csv
import datetime
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click

from .._core.values import encode_float
from .._printable import safe

FAILED = 3  # The exit code of an error that was printed.
_MAX_INT_BITS = 10_000  # A larger int is printed in hexadecimal: Python refuses to print very long decimals.
_READABLE_COLUMNS = 20  # Columns of metrics are left out before texts are cut to less.
_MIN_COLUMNS = 8  # A cell keeps this many columns, however narrow the terminal is.


class _Path(click.Path):
    """The path of a file or directory, or a URL. As a `click.Path`, it makes shells complete file names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            raise click.BadParameter("expected a path, found ''", ctx, param)
        return super().convert(value, param, ctx)


PATH = _Path(readable=False)  # The library checks the access and has better errors.


def as_json(function: Any) -> Any:
    """Adds the option ``--json``."""
    return click.option("--json", "json_", is_flag=True, help="Print JSON.")(function)


def say(text: str = "", *, err: bool = False) -> None:
    """Prints a line. Colors go to terminals only, and NO_COLOR turns them off."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    click.echo(text, err=err, color=False if plain else None)


def say_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Prints a table as CSV, with a header line. An unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(safe, columns))
    for row in rows:
        writer.writerow([_csv_cell(row.get(name)) for name in columns])
    click.echo(text.getvalue(), nl=False)


def _csv_cell(value: Any) -> str:
    if isinstance(value, tuple):
        return safe(", ".join(value))
    return "" if value is None else json.dumps(value) if isinstance(value, bool) else safe(_to_json(value))


def check_one_format(json_: bool, csv_: bool) -> None:
    """Raises `click.UsageError` if the user wants both JSON and CSV."""
    if json_ and csv_:
        raise click.UsageError("expected --json or --csv, found both")


def say_json(value: Any) -> None:
    """Prints a value as JSON. Numbers that JSON lacks become the texts "nan", "inf" and "-inf"."""
    click.echo(json.dumps(_to_json(value), indent=2))


def _to_json(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else encode_float(value)
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        return hex(value)
    if isinstance(value, dict):
        return {str(key): _to_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_to_json(one) for one in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def local_time(seconds: float | None) -> str:
    """Formats a time in seconds since the epoch, in the local time zone. None is the empty text."""
    return "" if seconds is None else f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def age(seconds: float) -> str:
    """Formats the time since a time in seconds since the epoch: ``35 s``, ``12 min``, ``5 h``, ``3 d``."""
    passed = max(int(time.time() - seconds), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= 2 * length:
            return f"{passed // length:,} {unit}"
    return f"{passed} s"


def utc_time(seconds: float | None) -> str | None:
    """Formats a time in seconds since the epoch as ISO 8601, in UTC."""
    return None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def terminal_columns() -> int | None:
    """Returns the columns of the terminal, or None if stdout is not a terminal. Then nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def truncate(text: str, columns: int | None) -> str:
    """Cuts the end of a text that has more than `columns` columns."""
    return text if columns is None or len(text) <= columns else text[: max(columns - 1, 0)] + "…"


def truncate_middle(text: str, columns: int) -> str:
    """Cuts the middle of a text that has more than `columns` columns.

    The end stays longer than the beginning, because the ends of paths distinguish them.
    """
    first = (columns - 1) // 3
    return text if len(text) <= columns else f"{text[:first]}…{text[len(text) - (columns - 1 - first) :]}"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str] = (), spare: Sequence[int] = ()
) -> list[int]:
    """Prints a table. Columns in `left` are aligned to the left, all others to the right. Empty columns are omitted.

    Cells may be styled. If the table is wider than the terminal, the last of the columns `spare` are left out until
    columns in `left` fit when they are cut. Returns those that were left out.
    """
    used = [n for n, _ in enumerate(head) if any(row[n] for row in rows)]
    widths = {n: max(len(head[n]), *(len(click.unstyle(row[n])) for row in rows)) for n in used}
    space = math.inf if (columns := terminal_columns()) is None else columns
    texts = [n for n in used if head[n] in left and n not in spare]
    hidden: list[int] = []
    for n in reversed([n for n in spare if n in widths]):
        if (
            sum(min(width, _READABLE_COLUMNS) if n in texts else width for n, width in widths.items())
            + 2 * (len(widths) - 1)
            > space
        ):
            hidden.insert(0, n)
            del widths[n]
    # Numbers are never cut: a cut number is another number.
    while texts and sum(widths.values()) + 2 * (len(widths) - 1) > space:
        widest = max(texts, key=lambda n: widths[n])
        if widths[widest] <= _MIN_COLUMNS:
            break
        widths[widest] -= 1

    def cell(n: int, text: str) -> str:
        plain = click.unstyle(text)
        shown = text if len(plain) <= widths[n] else truncate_middle(plain, widths[n])
        pad = " " * (widths[n] - min(len(plain), widths[n]))
        return shown + pad if head[n] in left else pad + shown

    def line(cells: Sequence[str]) -> str:
        return "  ".join([cell(n, cells[n]) for n in widths]).rstrip()

    say(click.style(line(head), dim=True))
    for row in rows:
        say(line(row))
    return hidden
