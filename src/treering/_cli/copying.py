"""Checkpoints into other formats and other places: convert, cp."""

from typing import Any

import click

from .._core.readable import count, nbytes
from .._printable import safe
from .arguments import MAX_EXPANSION, Bytes, Rename
from .output import PATH, as_json, say, say_json


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--format", metavar="NAME", help="The format of TARGET; by default what its suffix says, else treering.")
@click.option("--source-format", metavar="NAME", help="The format of SOURCE; by default what its files show.")
@click.option("--step", type=int, metavar="N", help="The step of a run; its latest good one by default.")
@click.option("--at", default="", metavar="PATH", help="Only what lies below this path.")
@click.option("--drop", multiple=True, metavar="GLOB", help="Leave leaves out.")
@click.option("--rename", type=Rename(), multiple=True, help="Change names, as treering.rules.rename does it.")
@click.option("--dtype", metavar="DTYPE", help="Cast all floats to this dtype.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there, in one step.")
@click.option(
    "--memory-limit", type=Bytes(), default="1G", show_default=True, help="Bytes of arrays in memory at a time."
)
@MAX_EXPANSION
@click.option("--max-shard-size", type=Bytes(), help="safetensors: a folder of files no larger than this.")
@as_json
def convert(
    source: str,
    target: str,
    format: str | None,
    source_format: str | None,
    step: int | None,
    at: str,
    drop: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    dtype: str | None,
    overwrite: bool,
    memory_limit: int,
    max_expansion: float,
    max_shard_size: int | None,
    json_: bool,
) -> None:
    """Write the checkpoint SOURCE as TARGET, in another format or the same, in bounded memory.

    Rules are applied in the order: drop, rename.
    """
    from .. import rules as r
    from .._tools.convert import convert as write

    rules = [*(r.drop(glob) for glob in drop), *(r.rename(pattern, new) for pattern, new in rename)]
    options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    report = write(
        source,
        target,
        step=step,
        source_format=source_format,
        format=format,
        at=at,
        rules=rules,
        dtype=dtype,
        overwrite=overwrite,
        memory_limit=memory_limit,
        max_expansion=max_expansion,
        progress=not json_,
        **options,
    )
    if json_:
        say_json({"path": report.path, "nbytes": report.nbytes, "seconds": report.seconds})
    else:
        say(f"{safe(report.path)}: {nbytes(report.nbytes)} in {report.seconds:.1f} s")


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there, in one step.")
@as_json
def cp(source: str, target: str, overwrite: bool, json_: bool) -> int:
    """Copy a checkpoint or all good steps of a run to another place, between disks and buckets.

    The files are the same byte for byte, each checked as it is read, with pins and recorded metrics. Steps of a run
    that are there already only get those; --overwrite replaces what differs or is damaged there. The exit code is 1
    when damaged steps were left behind. Checkpoints of other libraries are copied by convert.
    """
    from .._tools.copy import copy_all

    done = copy_all(source, target, overwrite=overwrite)
    if json_:
        say_json({"copied": done.copied, "there": done.there, "left_behind": done.left_behind, "nbytes": done.nbytes})
        return int(bool(done.left_behind))
    there = f"; {count(len(done.there), 'is', 'are')} there already" if done.there else ""
    say(f"{count(len(done.copied), 'checkpoint')} copied, {nbytes(done.nbytes)}{there}")
    return int(bool(done.left_behind))


COMMANDS = (convert, cp)
