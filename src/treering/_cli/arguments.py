"""Parses the arguments of the command line: sizes, times, subsets, steps, policies and renames."""

import datetime
import difflib
import os
import re
from typing import TYPE_CHECKING, Any

import click

from .._core import expansion
from .._core.entries import metric_and_mode
from .._core.values import MAX_EXACT_INT
from ..errors import MismatchError

if TYPE_CHECKING:
    from ..keep import Policy

KEEP = (
    "KEEP is last:N, last:TIME, every:N, every:TIME, best:N:METRIC:min (or max), size:BYTES, or steps:N,N,…; "
    "TIME is as in 12h, BYTES as in 50G."
)
MAX_EXPANSION = click.option(
    "--max-expansion",
    type=click.FloatRange(1),
    default=expansion.MAX_RATIO,
    show_default=True,
    help="Refuse arrays (above 64 MiB) of more than this many times the stored bytes; inf lifts the limit.",
)
PREFIX = click.option(
    "--prefix", metavar="TEXT", help="The beginning of the names of a run's steps; by default found from its steps."
)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_STEPS = re.compile(r"([0-9]{1,16})(?:\.\.([0-9]{1,16}))?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MIN_PLAIN_BYTES = 1 << 20  # of a subset that is given without a unit
_UNIT_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Bytes(click.ParamType):
    """A number of bytes: ``500M``, ``2G``."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = value.upper().removesuffix("B")
        unit = text[-1:] if text[-1:].isalpha() else ""
        try:
            nbytes = int(float(text.removesuffix(unit)) * _UNIT_BYTES[unit])
        except (KeyError, ValueError, OverflowError):
            nbytes = 0
        if not 1 <= nbytes < 1 << 63:
            raise click.BadParameter(f"{value!r}: expected a number of bytes, such as 500M or 2G", ctx, param)
        return nbytes


class Seconds(click.ParamType):
    """A duration such as ``7d`` or ``12h``, converted to seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if match := _TIME.fullmatch(value):
            return float(match[1]) * _SECONDS[match[2]]
        raise click.BadParameter(f"{value!r}: expected a time, such as 12h or 7d (s, m, h, d or w)", ctx, param)


class FormatName(click.ParamType):
    """The name of a format to read or, with `written`, to write."""

    name = "name"

    def __init__(self, *, written: bool = False):
        self._written = written

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from .. import formats

        try:
            return (formats.for_path(f"--format {value}", value) if self._written else formats.get(value)).name
        except MismatchError as error:
            # The message begins with the Python argument; click names the option itself.
            raise click.BadParameter(str(error).removeprefix("format="), ctx, param) from None


class RenameOption(click.ParamType):
    """A renaming rule: ``PATTERN=NEW``."""

    name = "pattern=new"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        pattern, equals, new = value.partition("=")
        if not equals or not pattern:
            raise click.BadParameter(f"{value!r}: expected PATTERN=NEW", ctx, param)
        try:
            re.compile(pattern)
        except re.error as error:
            raise click.BadParameter(f"{pattern!r} is not a regular expression: {error}", ctx, param) from None
        return pattern, new


class StepNumber(click.ParamType):
    """The number of a step: ``1000``."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if re.fullmatch("[0-9]{1,100}", value) and (number := int(value)) <= MAX_EXACT_INT:
            return number
        hint = "; RUN comes first" if os.path.exists(value) else ""
        if hint == "" and (digits := re.search("(?:^|/)[^0-9/]+([0-9]{1,15})/?$", value)):
            hint = f", perhaps {int(digits[1])}"
        raise click.BadParameter(f"{value!r}: expected the number of a step, such as 1000{hint}", ctx, param)


STEP = StepNumber()


class Subset(click.ParamType):
    """A part of the bytes to read: ``2/5``, or a number of bytes."""

    name = "subset"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int] | int:
        if isinstance(value, tuple):
            return value
        number, slash, of = str(value).partition("/")
        # A number of bytes below that of a block was hardly meant as one: `--subset 5`.
        if not slash and (number[-1:].isalpha() or (number.isdecimal() and int(number) >= _MIN_PLAIN_BYTES)):
            return Bytes().convert(value, param, ctx)
        if number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of):
            return int(number), int(of)
        raise click.BadParameter(
            f"{value!r}: expected a part such as 2/5, or bytes with a unit, such as 10G", ctx, param
        )


class StepNumbers(click.ParamType):
    """Steps of a run: ``100,200..300`` is step 100 and all steps from 200 to 300."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[range, ...]:
        if isinstance(value, tuple):
            return value
        found: list[range] = []
        for part in str(value).split(","):
            match = _STEPS.fullmatch(part.strip())
            wanted = range(int(match[1]), int(match[2] or match[1]) + 1) if match else None
            if not wanted:
                raise click.BadParameter(f"{value!r}: expected steps such as 100,200..300", ctx, param)
            found.append(wanted)
        return tuple(found)


class Best(click.ParamType):
    """The metric of the best step: ``accuracy`` or ``accuracy:max`` for the highest, ``loss:min`` for the lowest."""

    name = "metric"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        try:
            return metric_and_mode(value)
        except MismatchError as error:
            raise click.BadParameter(str(error).removeprefix("best="), ctx, param) from None


BEST = click.option(
    "--best", type=Best(), metavar="METRIC[:min]", help="The step with the highest METRIC or, with :min, the lowest."
)


class Keep(click.ParamType):
    """A policy of `treering.keep`."""

    name = "keep"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "Policy":
        from .. import keep

        if isinstance(value, keep.Policy):
            return value
        kind, _, rest = value.partition(":")
        try:
            if kind in ("last", "every") and rest:
                return getattr(keep, kind)(_interval(rest))
            if kind == "steps" and rest:
                return keep.steps(*map(_integer, rest.split(",")))
            if kind == "size" and rest:
                return keep.size(Bytes().convert(rest, param, ctx))
            if kind == "best" and len(parts := rest.split(":")) >= 3:  # a metric may have colons
                return keep.best(_integer(parts[0]), ":".join(parts[1:-1]), parts[-1])  # type: ignore[arg-type]
        except (ValueError, OverflowError, click.BadParameter) as error:
            raise click.BadParameter(f"{value!r}: {error}. {KEEP}", ctx, param) from None
        raise click.BadParameter(f"{value!r}{_policy_hint(value)}. {KEEP}", ctx, param)


def _policy_hint(text: str) -> str:
    """Returns the end of a message that says what a policy lacks, or how it is written."""
    kind, separator, rest = re.fullmatch("([a-z]*)([:= ]*)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if similar := difflib.get_close_matches(kind, ("last", "every", "best", "size", "steps"), n=1):
        if kind == "best" and separator == ":" and rest.count(":") == 1:
            return f": expected {text}:min or {text}:max"
        return f": expected {similar[0]}:{rest or 'N'}"
    return f": expected last:{text}" if text.isdecimal() else ""


def _interval(text: str) -> int | datetime.timedelta:
    if match := _TIME.fullmatch(text):
        return datetime.timedelta(seconds=float(match[1]) * _SECONDS[match[2]])
    return _integer(text)


def _integer(text: str) -> int:
    """Returns the number that a text is. Raises `ValueError` that a user of the shell understands."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected an integer, found {text!r}") from None


def union(policies: "tuple[Policy, ...]") -> "Policy | None":
    """Returns the union of the policies, or None if there are none."""
    found = None
    for one in policies:
        found = one if found is None else found | one
    return found
