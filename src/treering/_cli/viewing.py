"""The command view, which shows a checkpoint or a run in the browser."""

import contextlib

import click

from .output import PATH, say


@click.command()
@click.argument("path", type=PATH)
@click.option("--port", type=click.IntRange(1, 65535), help="The port; by default a free one.")
def view(path: str, port: int | None) -> None:
    """Show a checkpoint, a safetensors file or a run in the browser: open the URL that it prints.

    It serves PATH to this machine only, until Ctrl-C. The URL has a random token, and nothing is written.
    """
    from .._tools.view import ServedFiles, ViewServer

    with ViewServer(ServedFiles(path), port or 0) as server:
        say(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


COMMANDS = (view,)
