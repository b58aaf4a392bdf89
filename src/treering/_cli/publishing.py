"""The command for published weights: pull."""

import click

from .._printable import safe
from .arguments import STEP
from .output import PATH, say


@click.command()
@click.argument("stream", type=PATH)
@click.argument("directory", type=PATH)
@click.option("--version", type=STEP, metavar="N", help="The version; by default the newest that can be read.")
@click.option("--watch", is_flag=True, help="Continue with each newest version, until the stream is finished.")
def pull(stream: str, directory: str, version: int | None, watch: bool) -> None:
    """Keep DIRECTORY a complete Hugging Face checkpoint of a version of published weights.

    DIRECTORY is new, or has a checkpoint in safetensors, whose weights are replaced in one step. Other files stay.
    """
    from .._publish.pull import pull

    if watch and version is not None:
        raise click.UsageError("expected --version or --watch, found both")
    for number, is_new in pull(stream, directory, version=version, watch=watch):
        say(f"{safe(directory)}: version {number}{'' if is_new else ', which was there'}")


COMMANDS = [pull]
