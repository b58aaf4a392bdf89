"""The commands doctor, which tests a place for checkpoints, and browse, which shows them in the terminal."""

import dataclasses
import sys
from typing import TYPE_CHECKING

import click

from .._core.units import nbytes, number
from .._printable import safe
from .arguments import PREFIX, Bytes
from .output import PATH, as_json, say, say_json

if TYPE_CHECKING:
    from .._restore.checkpoint import Checkpoint
    from .._tools.listing import Listing
    from ..stores.probe import Finding


@click.command()
@click.argument("place", type=PATH)
@click.option("--size", type=Bytes(), default="256M", show_default=True, help="Size of the test checkpoint in bytes.")
@as_json
def doctor(place: str, size: int, json_: bool) -> None:
    """Test the features and the speed of PLACE, a directory or the prefix of a bucket.

    Writes files there and removes them. Times a save and a restore of --size bytes: with checksums, and until the disk
    has the data. The exit code is 3 if the place cannot be tested; advice leaves it at 0.
    """
    from .._tools.doctor import examine

    findings = examine(place, size=size)
    if json_:
        say_json([dataclasses.asdict(one) for one in findings])
        return
    column = max(len(one.name) for one in findings)
    for one in findings:
        say(f"{one.name:{column}}  {_finding_text(one)}")
    for one in findings:
        if one.advice:
            say(f"{click.style(one.name, fg='yellow')}: {one.advice}")


def _finding_text(one: "Finding") -> str:
    from ..stores.probe import BYTES_PER_SECOND

    if isinstance(one.value, bool):
        return click.style("yes", fg="green") if one.value else click.style("no", fg="yellow")
    if isinstance(one.value, str):
        return safe(one.value)
    if one.unit == "seconds":
        return f"{number(one.value * 1e3)} ms"
    return nbytes(one.value) + ("/s" if one.unit == BYTES_PER_SECOND else "")


@click.command()
@click.argument("path", type=PATH)
@click.argument("other", type=PATH, required=False)
@PREFIX
def browse(path: str, other: str | None, prefix: str | None) -> None:
    """Browse a checkpoint or a run in the terminal, or two side by side (needs the extra browse).

    Arrow keys or h j k l move, Enter or s reads a leaf, / searches, n finds the next, d compares both sides, q quits.
    """
    from .._run.open import open_prefixed
    from .._tools.listing import list_run
    from ..errors import NotFoundError, UnsupportedError

    # The browser uses all three. Without this check it never ends if one of them is a pipe.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise click.UsageError("browse needs a terminal; use ls and show instead")
    try:
        from .browser import Browser
    except ImportError as error:
        raise UnsupportedError(f"browsing needs Textual: pip install 'treering[browse]' ({error})") from None

    sources: list[Checkpoint | Listing] = []
    for one in (path, other):
        if one is not None:
            try:  # A path may be a run or one checkpoint.
                sources.append(list_run(one, prefix=prefix))
            except NotFoundError:
                sources.append(open_prefixed(one, prefix, step=None))
    Browser(sources).run()


COMMANDS = (doctor, browse)
