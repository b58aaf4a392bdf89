"""The command migrate, which moves programs from Orbax to Treering."""

import dataclasses
import sys
from typing import TYPE_CHECKING

import click

from .._core.units import count
from .._printable import safe
from .output import FAILED, PATH, as_json, say, say_json

if TYPE_CHECKING:
    from .._tools.migrate import Migration


@click.command()
@click.argument("path", type=PATH)
@click.option("--native", is_flag=True, help="Use Treering's own calls instead of the adapter, for the common forms.")
@click.option("--write", is_flag=True, help="Write the files; by default only print the diff.")
@as_json
def migrate(path: str, native: bool, write: bool, json_: bool) -> int:
    """Change Python programs from Orbax to Treering (needs the extra migrate).

    PATH is a file or a folder. It prints a diff, in which imports of orbax.checkpoint are imports of treering.orbax.
    Comments and formatting stay. What is left to do by hand is printed on stderr with file and line, and then the exit
    code is 1.
    """
    from ..errors import UnsupportedError

    try:
        from .._tools.migrate import migrate as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "libcst":
            raise
        raise UnsupportedError(f"migrating needs LibCST: pip install 'treering[migrate]' ({error})") from None

    done = run(path, to_native=native, write=write)
    if json_:
        say_json({**dataclasses.asdict(done), "findings": [one._asdict() for one in done.findings], "written": write})
    else:
        _say(done, write)
    return FAILED if done.failed else int(bool(done.findings))


def _say(done: "Migration", write: bool) -> None:
    if not write:
        click.echo(_shown(done.diff), nl=False)
    for one in done.findings:
        say(f"{safe(one.file)}:{one.line}: {safe(one.what)}", err=True)
    for name, why in done.failed.items():
        say(f"{safe(name)}: {safe(why)}", err=True)
    skipped = [count(len(names), kind) for names, kind in ((done.notebooks, "notebook"), (done.links, "link")) if names]
    say(
        f"{count(done.looked_at, 'file')} read"
        + (f", {' and '.join(skipped)} not read" if skipped else "")
        + f"; {len(done.changed)} {'changed' if write else 'would change'}"
        + f"; {count(len(done.findings), 'place')} left to do by hand"
    )


def _shown(text: str) -> str:
    """Returns a diff as it is, but without characters that a terminal would obey."""
    if not sys.stdout.isatty():
        return text
    return "".join(one if one in "\n\t" or one.isprintable() else safe(one) for one in text)


COMMANDS = (migrate,)
