"""The command view, which shows a checkpoint, a run or several in the browser."""

import contextlib
import logging
from collections.abc import Iterator

import click

from .output import PATH, say


@click.command()
@click.argument("path", type=PATH)
@click.option("--port", type=click.IntRange(1, 65535), help="The port; by default a free one.")
def view(path: str, port: int | None) -> None:
    """Show a checkpoint of any format, a run or a directory of runs in the browser: open the URL that it prints.

    It serves PATH to this machine only, until Ctrl-C. The URL has a random token, and nothing is written.
    """
    from .._tools.view import Served, ViewServer

    with _each_once(), ViewServer(Served(path), port or 0) as server:
        say(server.url)
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


COMMANDS = (view,)
