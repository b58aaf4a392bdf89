"""Runs: ls, du, prune, pin, unpin, rewind."""

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from .._core.readable import count, nbytes, number, safe
from ..errors import NotFoundError
from .arguments import KEEP, Keep, joined
from .output import as_json, iso, say, say_json, table, when

if TYPE_CHECKING:
    from .._run.directory import Directory
    from .._tools.listing import Listing, Row

_STATES = {"damaged": "red", "unsupported": "red", "closed": "red", "unfinished": "yellow"}


def _best(value: str) -> tuple[str, str]:
    metric, _, mode = value.rpartition(":")
    if not metric or mode not in ("min", "max"):
        raise click.BadParameter(f"{value!r}: expected METRIC:min or METRIC:max")
    return metric, mode


@click.command()
@click.argument("run")
@click.option("--best", metavar="METRIC:MODE", help="Mark the best step by a metric; MODE is min or max.")
@click.option("--keep", type=Keep(), multiple=True, help=f"Show what would be deleted. {KEEP}")
@as_json
def ls(run: str, best: str | None, keep: "tuple[Any, ...]", json_: bool) -> None:
    """List the steps of a RUN: time, size, metrics, and what is the latest, pinned, damaged or unfinished."""
    from .._tools.listing import list_run

    wanted = _best(best) if best else None
    listing = list_run(run, joined(keep))
    first = _best_step(listing, *wanted) if wanted else None
    if json_:
        steps = [{**_plain(row), "latest": row.step == listing.latest} for row in listing.rows]
        about = {"path": listing.path, "finished": listing.finished, "set_aside": listing.set_aside, "steps": steps}
        say_json({**about, "best": first} if wanted else about)
        return
    metrics = list(dict.fromkeys(name for row in listing.rows for name in row.metrics))
    head = ["step", "saved", "size", *map(safe, metrics), "notes"]
    rows = []
    for row in listing.rows:
        numbers = [number(row.metrics[name]) if name in row.metrics else "" for name in metrics]
        notes = ", ".join(_notes(row, listing, first))
        rows.append([str(row.step), when(row.created), nbytes(row.nbytes), *numbers, notes])
    table(head, rows, left=["notes"])
    total = nbytes(sum(row.nbytes or 0 for row in listing.rows))
    parts = [count(len(listing.rows), "step"), total, *(["finished"] if listing.finished else [])]
    if listing.set_aside:
        parts.append(f"set aside by a rewind: {', '.join(os.path.basename(one) for one in listing.set_aside)}")
    say(" · ".join(parts))


def _best_step(listing: "Listing", metric: str, mode: str) -> int | None:
    from ..keep import Saved, rank

    saved = [Saved(row.step, row.metrics) for row in listing.rows if row.state == "good"]
    ranked = rank(saved, metric, mode)  # type: ignore[arg-type]
    if not ranked:
        known = sorted({name for row in listing.rows for name in row.metrics})
        raise NotFoundError(
            f"{listing.path}: no step has the metric {metric!r}, found {', '.join(known) or 'no metrics'}"
        )
    return ranked[0]


def _plain(row: "Row") -> dict[str, Any]:
    return {**dataclasses.asdict(row), "created": iso(row.created)}


def _notes(row: "Row", listing: "Listing", best: int | None) -> list[str]:
    notes = []
    if row.state != "good":
        notes.append(click.style(row.state, fg=_STATES.get(row.state)))
    if row.format != "treering":
        notes.append(row.format)
    notes += ["latest"] * (row.step == listing.latest) + ["best"] * (row.step == best and row.state == "good")
    notes += ["pinned"] * row.pinned + ["link"] * row.link
    return notes + [click.style("would be deleted", fg="yellow")] * row.deleted


@click.command()
@click.argument("run")
@click.argument("keep", nargs=-1, required=True, type=Keep())
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@as_json
def prune(run: str, keep: "tuple[Any, ...]", dry_run: bool, yes: bool, json_: bool) -> None:
    """Delete the steps of a RUN that no KEEP wants; the newest good step, pinned ones and links stay in any case.

    KEEP is last:N, last:TIME, every:N, every:TIME, best:N:METRIC:min (or max), or steps:N,N,…; TIME is as in 12h.
    Damaged and unfinished steps, and those of other libraries, are left alone.
    """
    from .._tools.listing import list_run

    directory = _directory(run)
    doomed = [row for row in list_run(run, joined(keep)).rows if row.deleted]
    if doomed and not dry_run and not yes:
        if json_ or not sys.stdin.isatty():
            raise click.UsageError("nobody is there to be asked: pass --yes, or --dry-run to see what would be deleted")
        _say_deleted(doomed, dry_run=True)
        click.confirm("Delete them?", abort=True)
    if not dry_run:
        for row in doomed:
            directory.delete(row.step)
    if json_:
        steps = [row.step for row in doomed]
        say_json(
            {
                "path": directory.root,
                "deleted": steps,
                "nbytes": sum(row.nbytes or 0 for row in doomed),
                "dry_run": dry_run,
            }
        )
    else:
        _say_deleted(doomed, dry_run=dry_run)


def _say_deleted(doomed: "list[Row]", *, dry_run: bool) -> None:
    steps = ", ".join(str(row.step) for row in doomed)
    total = nbytes(sum(row.nbytes or 0 for row in doomed))
    what = "would be deleted" if dry_run else "deleted"
    say(f"{count(len(doomed), 'step')} {what}, {total}: {steps}" if doomed else "nothing to delete")


@click.command()
@click.argument("run")
@click.argument("steps", nargs=-1, required=True, type=int)
def pin(run: str, steps: tuple[int, ...]) -> None:
    """Mark STEPS of a RUN never to be deleted, for every job."""
    directory = _directory(run)
    for step in steps:
        directory.pin(step, True)


@click.command()
@click.argument("run")
@click.argument("steps", nargs=-1, required=True, type=int)
def unpin(run: str, steps: tuple[int, ...]) -> None:
    """Remove the mark that pin has set."""
    directory = _directory(run)
    for step in steps:
        directory.pin(step, False)


@click.command()
@click.argument("run")
@click.argument("step", type=int)
def rewind(run: str, step: int) -> None:
    """Go back to a STEP of a RUN: the later ones no longer count, and the next job goes on from it.

    Nothing is deleted: they lie in rewound-1 (-2, …) within the run, which is a run of its own.
    """
    directory = _directory(run)
    try:
        directory.rewind(step)
    finally:
        directory.release()


def _directory(run: str) -> "Directory":
    """The directory of a run that is to be changed. Raises `NotFoundError` and `MismatchError`."""
    from .. import stores
    from .._run.directory import Directory
    from .._run.origin import check_not_near
    from .._run.run import prefix_of
    from .._run.steps import Steps
    from .._tools.listing import check_run

    place = stores.absolute(run)
    store = stores.of(place)
    check_run(store, place)
    check_not_near(store, place)
    return Directory(Steps(store, place, prefix_of(store, place)), lambda: True)


@click.command()
@click.argument("path")
@click.option(
    "--depth", type=click.IntRange(1), default=1, metavar="N", help="Of a checkpoint: so many levels of its tree."
)
@as_json
def du(path: str, depth: int, json_: bool) -> None:
    """Say what takes the room: of a run its steps, of a checkpoint the parts of its tree."""
    from .. import stores
    from .._core.outline import outline
    from .._run.open import open_checkpoint
    from .._tools.listing import list_run

    try:
        listing = list_run(path)
    except NotFoundError:
        ckpt = open_checkpoint(path)
        tree = outline(ckpt._entries, collapse=False)
        parts = [(node.path, node.nbytes) for level, node in tree.walk() if level < depth and node.nbytes]
        total, root = ckpt.nbytes, ckpt.path
    else:
        parts = [(os.path.basename(row.path), row.nbytes or 0) for row in listing.rows]
        store = stores.of(listing.path)
        parts += [(os.path.basename(one), sum(_sizes(store, one))) for one in listing.set_aside]
        total, root = sum(size for _, size in parts), listing.path
    if json_:
        say_json({"path": root, "nbytes": total, "parts": [{"path": name, "nbytes": size} for name, size in parts]})
        return
    rows = [[nbytes(size), f"{100 * size / total:.1f}%" if total else "", safe(name)] for name, size in parts]
    table(["size", "share", "part"], [*rows, [nbytes(total), "", safe(root)]], left=["part"])


def _sizes(store: Any, run: str) -> list[int]:
    from .._tools.listing import list_run

    return [row.nbytes or 0 for row in list_run(run).rows]


COMMANDS = (ls, prune, pin, unpin, rewind, du)
