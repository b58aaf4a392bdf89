"""The command view, which shows a checkpoint or a run in the browser."""

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from .._printable import safe
from ..errors import TreeringError
from .output import PATH, say

if TYPE_CHECKING:
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


COMMANDS = (view,)
