"""The commands that print the contents of checkpoints: show, stats, diff."""

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import click

from .._core.units import count, nbytes, number
from .._core.units import sharding as sharding_text
from .._printable import safe
from ..errors import NotFoundError
from .arguments import BEST, PREFIX, STEP, FormatName
from .leaf_text import describe_node
from .listing import chosen_step
from .output import PATH, as_json, local_time, say, say_json, table, terminal_columns, truncate, utc_time

if TYPE_CHECKING:
    from .._core.entries import Entry
    from .._core.outline import OutlineNode
    from .._restore.checkpoint import Checkpoint
    from .._tools.diff import ValueChange

_MAX_METADATA_CHARACTERS = 400  # characters of metadata that are shown


def _open(
    path: str,
    prefix: str | None,
    step: int | None,
    format: str | None = None,
    best: tuple[str, str] | None = None,
) -> "Checkpoint":
    from .._run.open import open_prefixed

    step = chosen_step(path, step, best, prefix)
    return open_prefixed(path, prefix, step=step, format=format)


_STEP_OPTION = click.option(
    "--step", type=STEP, metavar="N", help="The step of a run; by default the latest valid one."
)
FORMAT = click.option("--format", type=FormatName(), help="The format to read; by default recognized from the files.")


@click.command()
@click.argument("checkpoint", type=PATH)
@click.argument("path", default="")
@_STEP_OPTION
@BEST
@FORMAT
@PREFIX
@click.option("--all", "everything", is_flag=True, help="Show every leaf, also of layers that are alike.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Show at most N levels of the tree.")
@as_json
def show(
    checkpoint: str,
    path: str,
    step: int | None,
    best: tuple[str, str] | None,
    format: str | None,
    prefix: str | None,
    everything: bool,
    depth: int | None,
    json_: bool,
) -> None:
    """Show the tree of a CHECKPOINT. It has names, shapes, dtypes, sizes and shardings.

    PATH selects a leaf, with its values, statistics and a histogram, or a subtree. Layers that are alike share a line,
    such as layers/0…23.
    """
    opened = None
    try:
        opened = _open(checkpoint, prefix, step, format, best)
        if path and path in opened:
            _show_leaf(opened, path, json_)
            return
        ckpt = opened.at(path)
    except NotFoundError as error:
        error.args = (f"{error}{_meant(checkpoint, path, opened)}",)
        raise
    if json_:
        say_json(
            {
                **_checkpoint_fields(ckpt),
                "leaves": {name: _entry_fields(ckpt, entry) for name, entry in ckpt._source.entries.items()},
            }
        )
        return
    _show_head(ckpt, path)
    from .._core.outline import outline
    from .._core.quantized import member_roles

    roles = member_roles(ckpt._source)
    tree = outline(
        ckpt._source.entries,
        collapse=not everything,
        about=lambda entry: (sharding_text(ckpt._source.sharding(entry)), roles.get(entry.path)),
    )
    lines = [(level, node) for level, node in tree.walk() if depth is None or level < depth]
    most = max((2 * level + len(_name(node)) for level, node in lines), default=0)
    columns = terminal_columns()
    column = min(most, columns // 2) if columns else most
    for level, node in lines:
        name = f"{'  ' * level}{_name(node)}"
        what = describe_node(ckpt, node, roles)
        say(truncate(f"{name:{column}}  {what}".rstrip(), columns))


def _meant(checkpoint: str, path: str, opened: "Checkpoint | None") -> str:
    """Returns the end of a message that says what was probably meant by a path that does not exist.

    opened: the checkpoint, or one of the steps of the run, that lacks the path.
    """
    from .. import stores

    if path and os.path.exists(path) and not os.path.exists(checkpoint):
        return "; CHECKPOINT comes first, PATH second"
    if path.isdecimal() and opened is not None and opened.path != stores.absolute(checkpoint):
        return f"; --step {path} chooses a step"
    return "; `treering stats` takes globs" if "*" in path else ""


def _checkpoint_fields(ckpt: "Checkpoint") -> dict[str, Any]:
    created = ckpt.created and ckpt.created.timestamp()
    about = {"path": ckpt.path, "format": ckpt.format, "step": ckpt.step, "created": utc_time(created)}
    return {**about, "nbytes": ckpt.nbytes, "metrics": ckpt.metrics, "metadata": ckpt.metadata}


def _entry_fields(ckpt: "Checkpoint", entry: "Entry") -> dict[str, Any]:
    from .._core.entries import ArrayEntry, StatesEntry

    if isinstance(entry, ArrayEntry):
        sharding = ckpt._source.sharding(entry)
        about = {"type": entry.type, "dtype": entry.dtype, "shape": list(entry.shape), "nbytes": entry.nbytes}
        if sharding is None or "mesh" not in sharding:
            return about
        return {**about, "sharding": {"mesh": sharding["mesh"], "spec": sharding["spec"]}}
    if isinstance(entry, StatesEntry):
        return {"type": entry.type, "nbytes": entry.nbytes, "processes": len(entry.value)}
    return {"type": entry.type, "value": entry.value}


def _show_head(ckpt: "Checkpoint", path: str) -> None:
    from .._core.entries import ArrayEntry

    created = ckpt.created and ckpt.created.timestamp()
    parts = [ckpt.format, *([] if ckpt.step is None else [f"step {ckpt.step}"]), count(len(ckpt), "leaf", "leaves")]
    size = sum(entry.nbytes for entry in ckpt._source.entries.values() if isinstance(entry, ArrayEntry))
    parts += [nbytes(size if path else ckpt.nbytes), *([f"saved {local_time(created)}"] if created else [])]
    say(click.style(safe(ckpt.path + (f", at {path}" if path else "")), bold=True))
    say(" · ".join(parts))
    columns = terminal_columns()
    if ckpt.metrics:
        metrics = ", ".join(f"{safe(name)} {number(value, 6)}" for name, value in ckpt.metrics.items())
        say(truncate(f"metrics: {metrics}", columns))
    if ckpt.metadata is not None:
        text = safe(json.dumps(ckpt.metadata, ensure_ascii=False))
        say(truncate(truncate(f"metadata: {text}", _MAX_METADATA_CHARACTERS), columns))
    say()


def _name(node: "OutlineNode") -> str:
    return safe(node.name) + (f" ×{node.alike}" if node.alike > 1 else "")


def _show_leaf(ckpt: "Checkpoint", path: str, json_: bool) -> None:
    from .._core.entries import StatesEntry
    from .leaf_text import leaf_lines, statistics

    if not json_:
        for line in leaf_lines(ckpt, path):
            say(line)
        return
    entry = ckpt._source.entries.get(path)
    about = _entry_fields(ckpt, entry) if entry else {}
    found = None if isinstance(entry, StatesEntry) else statistics(ckpt[path])
    say_json({"path": path, **about, **({"stats": dataclasses.asdict(found)} if found else {})})


@click.command()
@click.argument("checkpoint", type=PATH)
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
@_STEP_OPTION
@BEST
@FORMAT
@PREFIX
@as_json
def stats(
    checkpoint: str,
    globs: tuple[str, ...],
    step: int | None,
    best: tuple[str, str] | None,
    format: str | None,
    prefix: str | None,
    json_: bool,
) -> int:
    """Print statistics of the arrays of a CHECKPOINT. They are range, mean, norm, zeros, NaN and infinities.

    GLOBs select leaves: * matches within one component of a path, ** any number of components. NaN and infinities are
    counted; the other numbers are those of the finite values.
    """
    from .._tools.stats import stats as describe

    ckpt = _open(checkpoint, prefix, step, format, best)
    found = describe(ckpt.select(globs) if globs else ckpt)
    if json_:
        leaves = {path: dataclasses.asdict(one) for path, one in found.leaves.items()}
        say_json({"path": found.path, "step": ckpt.step, "leaves": leaves})
        return 0
    table(*found._table(), left=["leaf"])
    say(found._summary())
    return 0


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH, required=False)
@click.option("--steps", type=STEP, nargs=2, metavar="N M", help="The steps of A and B, or two steps of A.")
@BEST
@PREFIX
@as_json
def diff(
    a: str,
    b: str | None,
    steps: tuple[int, int] | None,
    best: tuple[str, str] | None,
    prefix: str | None,
    json_: bool,
) -> int:
    """Compare the checkpoints A and B leaf by leaf and bit by bit. The exit code is 1 if they differ.

    For arrays that differ it prints how many values differ, the largest difference, that relative to the largest
    magnitude, and for floats the cosine of the angle between the two. --best takes the best step of A and of B, or
    compares the best step of A with the latest one.
    """
    from .._tools.diff import diff as compare

    if b is None and steps is None and best is None:
        raise click.UsageError("expected two checkpoints, or --steps N M or --best METRIC of one run")
    if steps and best:
        raise click.UsageError("expected --steps or --best, found both")
    if b is not None and b.isdecimal() and not os.path.exists(b):
        raise click.UsageError(f"{b}: expected a checkpoint, found nothing; two steps of A are --steps N M")
    first, second = steps or (chosen_step(a, None, best, prefix), chosen_step(b, None, best, prefix) if b else None)
    found = compare(_open(a, prefix, first), _open(b or a, prefix, second))
    if json_:
        say_json(dataclasses.asdict(found))
        return int(bool(found))
    say(count(found.equal, "leaf is", "leaves are") + " equal")
    columns = terminal_columns()
    for sign, colour, paths in (("-", "red", found.only_a), ("+", "green", found.only_b)):
        for path in paths:
            say(click.style(truncate(f"{sign} {safe(path)}", columns), fg=colour))
    for path, what in found.changed.items():
        say(click.style("~", fg="yellow") + f" {safe(path)}: {safe(what)}{_measures(found.values.get(path))}")
    return int(bool(found))


def _measures(change: "ValueChange | None") -> str:
    """Returns the numbers that the description of a change lacks: relative difference and cosine."""
    relative = f", relative {change.relative:.3g}" if change and change.relative is not None else ""
    return relative + (f", cosine {change.cosine:.7g}" if change and change.cosine is not None else "")


COMMANDS = (show, stats, diff)
