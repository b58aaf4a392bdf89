"""The commands that show checkpoints and runs: view in the browser, browse in the terminal, report as a page."""

import contextlib
import logging
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from .._core.units import nbytes
from .._printable import safe
from ..errors import TreeringError
from .arguments import MAX_EXPANSION, PREFIX, STEP
from .output import PATH, as_json, say, say_json

if TYPE_CHECKING:
    from .._restore.checkpoint import Checkpoint
    from .._tools.listing import Listing
    from .._tools.view import ServedFiles


@click.command()
@click.argument("path", type=PATH)
@click.option("--port", type=click.IntRange(1, 65535), help="The port; by default a free one.")
def view(path: str, port: int | None) -> None:
    """Show a checkpoint, a safetensors file or a run in the browser: open the URL that it prints.

    For a directory of runs it prints a URL for each, with ports from --port on. It serves PATH to this machine only,
    until Ctrl-C. The URL has a random token, and nothing is written.
    """
    from .. import stores
    from .._tools.runs_folder import scan_runs_folder
    from .._tools.view import ServedFiles, ViewServer

    place = stores.absolute(path)
    folder = scan_runs_folder(stores.get(place), place, None, None)
    served = _served([*folder.checkpoints, *folder.runs]) if folder else []
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(ViewServer(files, port + n if port else 0))
            for n, files in enumerate(served or [ServedFiles(path)])
        ]
        for server in servers:
            say(f"{safe(server.files.path)}: {server.url}" if folder else server.url)
        for server in servers[1:]:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        with contextlib.suppress(KeyboardInterrupt):
            servers[0].serve_forever()


def _served(paths: Sequence[str]) -> "list[ServedFiles]":
    """Returns what the page can show, and names the rest on stderr."""
    from .._tools.view import ServedFiles

    found: list[ServedFiles] = []
    for path in paths:
        try:
            found.append(ServedFiles(path))
        except (TreeringError, PermissionError) as error:
            logging.getLogger("treering").error("not shown: %s", error)
    return found


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


@click.command()
@click.argument("run", type=PATH)
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
    run: str,
    output: str,
    steps: int,
    leaves: tuple[str, ...],
    compare: tuple[int, int] | None,
    max_expansion: float,
    prefix: str | None,
    json_: bool,
) -> None:
    """Write an HTML page about a RUN: timeline, sizes, statistics, differences. It needs no network.

    It reads the arrays of --steps steps, spread evenly over the run; --steps 0 reads none. It replaces an older report.
    """
    from .. import stores
    from .._tools import report as tools

    place = stores.absolute(output)
    store = stores.get(place)
    tools.check_replaceable(store, place)
    found = tools.gather(
        run,
        steps=steps,
        compare=compare or (),
        globs=leaves,
        progress=not json_,
        max_expansion=max_expansion,
        prefix=prefix,
    )
    data = tools.page(found).encode()
    with store.new_file(place, overwrite=True) as file:
        file.write(data)
    if json_:
        say_json({"path": place, "nbytes": len(data), "read": found["read"], "notes": found["notes"]})
        return
    say(f"{safe(place)}: {nbytes(len(data))}")


COMMANDS = (view, browse, report)
