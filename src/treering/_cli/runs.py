"""Runs: ls, du, pin, unpin, rewind."""

import dataclasses
import os
import posixpath
from typing import TYPE_CHECKING, Any

import click

from .._core.readable import count, nbytes, number
from .._printable import safe
from ..errors import NotFoundError
from .arguments import KEEP, Keep, joined
from .output import PATH, as_json, iso, say, say_json, table, when

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
@click.argument("run", type=PATH)
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
        numbers = [number(row.metrics[name], 6) if name in row.metrics else "" for name in metrics]
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
    notes += ["pinned"] * row.pinned + ["link"] * row.link + [f"link {safe(name)} leads here" for name in row.linked_by]
    return notes + [click.style("would be deleted", fg="yellow")] * row.deleted


@click.command()
@click.argument("run", type=PATH)
@click.argument("steps", nargs=-1, required=True, type=int)
def pin(run: str, steps: tuple[int, ...]) -> None:
    """Mark STEPS of a RUN never to be deleted, for every job."""
    directory = opened_directory(run)
    for step in steps:
        directory.pin(step, True)


@click.command()
@click.argument("run", type=PATH)
@click.argument("steps", nargs=-1, required=True, type=int)
def unpin(run: str, steps: tuple[int, ...]) -> None:
    """Remove the mark that pin has set."""
    directory = opened_directory(run)
    for step in steps:
        directory.pin(step, False)


@click.command()
@click.argument("run", type=PATH)
@click.argument("step", type=click.IntRange(0), required=False)
@click.option("--all", "all_", is_flag=True, help="Go back to before the first step: the next job starts over.")
@click.option("--dry-run", is_flag=True, help="Only say what would be set aside.")
@as_json
def rewind(run: str, step: int | None, all_: bool, dry_run: bool, json_: bool) -> None:
    """Go back to a STEP of a RUN: the later ones no longer count, and the next job goes on from it.

    Nothing is deleted: they lie in rewound-1 (-2, …) within the run, which is a run of its own. Refused while a job
    writes the run.
    """
    if all_ == (step is not None):
        raise click.UsageError("expected a STEP, or --all")
    from .._run import incoming
    from .._run.run import BEFORE_ALL, aside

    directory, back_to = opened_directory(run), BEFORE_ALL if step is None else step
    store, root = directory.steps.store, directory.root
    later, before = directory.to_set_aside(back_to), aside(store, root)
    if dry_run:
        incoming.check(store, root)
    else:
        try:
            directory.rewind(back_to)
        finally:
            directory.release()
    if json_:
        place = next((one for one in aside(store, root) if one not in before), None)
        say_json({"path": root, "step": step, "set_aside": later, "to": place, "dry_run": dry_run})
    elif dry_run:
        steps = ", ".join(map(str, later))
        say(f"{count(len(later), 'step')} would be set aside: {steps}" if later else "nothing to set aside")


def opened_directory(run: str) -> "Directory":
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
@click.argument("path", type=PATH)
@click.option(
    "--depth", type=click.IntRange(1), default=1, metavar="N", help="Of a checkpoint: so many levels of its tree."
)
@as_json
def du(path: str, depth: int, json_: bool) -> None:
    """Say what takes the room: of a run its steps, of a checkpoint the parts of its tree."""
    from .. import stores
    from .._tools.listing import check_run

    place = stores.absolute(path)
    try:
        check_run(stores.of(place), place)
    except NotFoundError:
        root, parts, total = _parts_of_checkpoint(path, depth)
    else:
        root, parts = place, _parts_of_run(place)
        total = sum(size for _, size in parts)
    if json_:
        say_json({"path": root, "nbytes": total, "parts": [{"path": name, "nbytes": size} for name, size in parts]})
        return
    rows = [[nbytes(size), f"{100 * size / total:.1f}%" if total else "", safe(name)] for name, size in parts]
    table(["size", "share", "part"], [*rows, [nbytes(total), "", safe(root)]], left=["part"])


def _parts_of_run(place: str) -> list[tuple[str, int]]:
    """What lies in the directory of a run, and its bytes: folders one by one, files together."""
    from .. import stores
    from .._tools.listing import tree_bytes

    store = stores.of(place)
    parts: list[tuple[str, int]] = []
    files = 0
    with store.glance(place):
        for name in sorted(store.list(place)):
            path = posixpath.join(place, name)
            found = store.stat(path)
            if found and found.is_file:
                files += found.nbytes
            else:
                parts.append((name, tree_bytes(store, path)))
    return [*parts, *([("(files)", files)] if files else [])]


def _parts_of_checkpoint(path: str, depth: int) -> tuple[str, list[tuple[str, int]], int]:
    """A checkpoint, its parts with their bytes, those within others too, and the bytes of all on the disk."""
    from .._core.outline import outline
    from .._run.open import open_checkpoint

    ckpt = open_checkpoint(path)
    tree = outline(ckpt._source.entries, collapse=False)
    parts = [(node.path, node.nbytes) for level, node in tree.walk() if level < depth and node.nbytes]
    rest = ckpt.nbytes - sum(node.nbytes for node in tree.children)
    return ckpt.path, [*parts, *([("(what describes them)", rest)] if rest > 0 else [])], ckpt.nbytes


COMMANDS = (ls, pin, unpin, rewind, du)
