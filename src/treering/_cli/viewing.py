"""The commands that show checkpoints and runs: view in the browser, browse in the terminal, report as a page."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from .._printable import safe
from .arguments import MAX_EXPANSION, PREFIX, STEP
from .output import PATH, as_json, say, say_json

if TYPE_CHECKING:
    from .._restore.checkpoint import Checkpoint
    from .._tools.listing import Listing


@click.command()
@click.argument("path", type=PATH)
@click.option("--port", type=click.IntRange(1, 65535), help="The port; by default a free one.")
def view(path: str, port: int | None) -> None:
    """Show a checkpoint or runs in the browser. Open the URL that it prints. PATH is of any format.

    It serves PATH to this machine only, until Ctrl-C. The URL has a random token, and nothing is written. Over SSH it
    also prints the command that makes the URL open on your own machine.
    """
    from .._tools.view import Served, ViewServer

    with _each_once(), ViewServer(Served(path), port or 0) as server:
        say(server.url)
        if "SSH_CONNECTION" in os.environ:
            port, here = server.server_port, socket.gethostname()
            say(f"to open it on your own machine, run there: ssh -N -L {port}:127.0.0.1:{port} {safe(here)}", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


@contextlib.contextmanager
def _each_once() -> Iterator[None]:
    """Prints each warning once: the page looks at the run again and again."""
    log, printed = logging.getLogger("treering"), set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_known = text in printed
        printed.add(text)
        return not is_known

    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


@click.command()
@click.argument("path", type=PATH)
@click.argument("other", type=PATH, required=False)
@PREFIX
def browse(path: str, other: str | None, prefix: str | None) -> None:
    """Browse a checkpoint or a run in the terminal, or two. This needs the extra browse.

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


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN...")
@click.option("--output", "-o", type=PATH, default="report.html", show_default=True, help="The file to write.")
@click.option(
    "--steps", type=click.IntRange(0), default=20, show_default=True, help="Read the arrays of this many steps."
)
@click.option("--leaves", multiple=True, metavar="GLOB", help="Compute statistics only of these leaves.")
@click.option("--compare", type=STEP, nargs=2, metavar="A B", help="Compare two steps; by default the latest two.")
@MAX_EXPANSION
@PREFIX
@as_json
def report(
    runs: tuple[str, ...],
    output: str,
    steps: int,
    leaves: tuple[str, ...],
    compare: tuple[int, int] | None,
    max_expansion: float,
    prefix: str | None,
    json_: bool,
) -> int:
    """Write an HTML page about a RUN, which needs no network. It has timeline, sizes, statistics, differences.

    It reads the arrays of --steps steps, spread evenly over the run; --steps 0 reads none. It replaces an older report.
    Of several runs, or a directory of runs, the page has the metrics in the same charts, and nothing of arrays. If it
    left out a run or a checkpoint that is no run, the exit code is 3.
    """
    from .._tools.report import find_several
    from .._tools.report import report as write

    if page := next((one for one in runs if one.endswith(".html") and not ("://" in one or os.path.isdir(one))), None):
        raise click.UsageError(f"{page}: expected a run, found the name of a page; --output {page} names it")
    if (leaves or compare) and find_several(runs, prefix):
        raise click.UsageError("expected --leaves and --compare for one run, found several runs")
    done = write(
        runs,
        output=output,
        steps=steps,
        leaves=leaves,
        compare=compare,
        prefix=prefix,
        progress=not json_,
        max_expansion=max_expansion,
    )
    if json_:
        say_json({"path": done.path, "nbytes": done.nbytes, "read": done.read, "notes": done.notes})
    else:
        say(str(done))
    return 3 if done.left_out else 0


COMMANDS = (view, browse, report)
