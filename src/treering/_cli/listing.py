"""The commands that list runs and their sizes: ls, du."""

import dataclasses
import os
import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .._core.leaf_paths import join_names, name_known
from .._core.units import count, nbytes, number
from .._printable import safe
from ..errors import MismatchError, NotFoundError, TreeringError
from .arguments import KEEP, PREFIX, Best, Keep, union
from .output import FAILED, PATH, as_json, check_one_format, local_time, say, say_csv, say_json, table, utc_time

if TYPE_CHECKING:
    from .._tools.listing import DiskUsage, Listing, Row
    from ..stores.store import Store

_STATE_COLORS = {"damaged": "red", "unsupported": "red", "closed": "red", "unfinished": "yellow"}


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--best", type=Best(), metavar="METRIC[:min]", help="Mark the step with the highest METRIC or, with :min, lowest."
)
@click.option("--metrics", metavar="NAME,…", help="Show only these metrics.")
@click.option("--sort", metavar="BY", help="Sort by a metric, saved or size, the lowest first.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Show only the last N steps, after sorting.")
@click.option("--keep", type=Keep(), multiple=True, help=f"Mark the steps that these policies would delete. {KEEP}")
@PREFIX
@click.option("--csv", "csv_", is_flag=True, help="Print CSV with one column for each metric.")
@as_json
def ls(
    run: str,
    best: tuple[str, str] | None,
    metrics: str | None,
    sort: str | None,
    last: int | None,
    keep: "tuple[Any, ...]",
    prefix: str | None,
    csv_: bool,
    json_: bool,
) -> int:
    """List the steps of a RUN with time, size, metrics and notes: latest, pinned, damaged, unfinished.

    For a directory of runs or checkpoints it prints one line each. The exit code is 3 if this user may not read a part.
    """
    from .. import stores
    from .._run.new_run import numbered_steps
    from .._tools.listing import list_run, runs_in
    from .._tools.runs_folder import scan_runs_folder

    check_one_format(json_, csv_)
    try:
        listing = list_run(run, union(keep), prefix)
    except NotFoundError:
        place = stores.absolute(run)
        runs = runs_in(stores.get(place), place)
        folder = None if runs else scan_runs_folder(stores.get(place), place, None, prefix)
        if not (runs or folder) or (folder and numbered_steps(stores.get(place), place)):
            raise  # The error names the prefix of steps.
        if best or keep or metrics or sort or last:
            raise click.UsageError(
                f"{place}: expected one run with --best, --keep, --metrics, --sort or --last, found a directory of runs"
            ) from None
        if folder:
            return _ls_checkpoints(place, folder.checkpoints, csv_=csv_, json_=json_)
        return _ls_runs(place, runs, prefix, csv_=csv_, json_=json_)
    first = best_in(listing, *best) if best else None
    listing = _chosen(listing, metrics, sort, last)
    rows = [{**_row_fields(row), "latest": row.step == listing.latest} for row in listing.rows]
    if json_:
        about = {"path": listing.path, "finished": listing.finished, "set_aside": listing.archived, "steps": rows}
        about |= {"closed": listing.closed, "tier": listing.tier, "survives": listing.survives}
        about |= {"not_listed": listing.not_listed, "free": _free_bytes(listing.path)}
        say_json({**about, "best": first} if best else about)
    elif csv_:
        _print_csv(rows)
    else:
        _print_listing(listing, first)
    if listing.not_listed and not json_:
        names = join_names(listing.not_listed)
        say(
            f"not listed: {count(len(listing.not_listed), 'checkpoint')} with other names ({names}); use --prefix",
            err=True,
        )
    for path in listing.closed:
        say(f"not listed, because this user may not read it: {safe(path)}", err=True)
    return FAILED if listing.closed or any(row.state == "closed" for row in listing.rows) else 0


def _chosen(listing: "Listing", metrics: str | None, sort: str | None, last: int | None) -> "Listing":
    """Returns a listing with only these metrics, the rows sorted, and only the last of them."""
    rows = list(listing.rows)
    names = metrics.split(",") if metrics else []
    for name in [*names, *([sort] if sort and sort not in ("step", "saved", "size") else [])]:
        _check_metric(listing, name)
    if sort:
        kinds = {"step": lambda row: row.step, "saved": lambda row: row.created, "size": lambda row: row.nbytes}
        value = kinds.get(sort, lambda row: row.metrics.get(sort))
        keys = {row.step: value(row) for row in rows}
        # Rows without a value come first, then those with NaN: the best by a metric is easily seen at an end.
        rows.sort(key=lambda row: (keys[row.step] is not None, keys[row.step] == keys[row.step], keys[row.step] or 0))
    if names:
        rows = [
            dataclasses.replace(row, metrics={name: row.metrics[name] for name in names if name in row.metrics})
            for row in rows
        ]
    return dataclasses.replace(listing, rows=tuple(rows[-last:] if last else rows))


def _check_metric(listing: "Listing", metric: str) -> None:
    """Raises `NotFoundError` for a metric that no step has."""
    known = {name for row in listing.rows for name in row.metrics}
    if metric not in known:
        found = name_known(metric, known) or "no metrics"
        raise NotFoundError(f"{listing.path}: expected a step with the metric {metric!r}, found {found}")


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    from .._tools.listing import Row

    names = [field.name for field in dataclasses.fields(Row) if field.name not in ("metrics", "emptied", "saved")]
    metrics = list(dict.fromkeys(f"metrics.{name}" for row in rows for name in row["metrics"]))
    flat = [{**row, **{f"metrics.{name}": value for name, value in row["metrics"].items()}} for row in rows]
    say_csv(flat, [*names, "latest", *metrics])


def _print_listing(listing: "Listing", best: int | None) -> None:
    metrics = list(dict.fromkeys(name for row in listing.rows for name in row.metrics))
    is_stream = any(row.seconds is not None for row in listing.rows)
    head = ["step", "saved", "size", *["kind", "changed", "seconds"] * is_stream, *map(safe, metrics), "notes"]
    rows = []
    for row in listing.rows:
        numbers = [number(row.metrics[name], 6) if name in row.metrics else "" for name in metrics]
        notes = ", ".join(_row_notes(row, listing, best))
        sent = _sent(row) if is_stream else []
        rows.append([str(row.step), local_time(row.created), nbytes(row.nbytes), *sent, *numbers, notes])
    table(head, rows, left=["notes"])
    parts = [count(len(listing.rows), "step"), _total(listing), *(["finished"] if listing.finished else [])]
    if listing.archived:
        parts.append(f"archived by a rewind: {', '.join(os.path.basename(one) for one in listing.archived)}")
    parts += _free_text(listing.path)
    say(" · ".join(parts))
    if listing.tier:
        say(f"the {listing.tier} tier of a run; these copies survive {listing.survives}")


def _free_bytes(place: str) -> int | None:
    """Returns the free bytes of the disk with a path; None in a bucket."""
    from .. import stores

    ask = getattr(stores.get(place), "free_bytes", None)
    return ask(place) if ask else None


def _free_text(place: str) -> list[str]:
    free = _free_bytes(place)
    return [] if free is None else [f"{nbytes(free)} free"]


def _total(listing: "Listing") -> str:
    """Returns the size of all steps, and what they take on the disk if steps share files."""
    from ..keep import total_sizes

    total = sum(row.nbytes or 0 for row in listing.rows)
    saved = [row.saved for row in listing.rows if row.saved]
    shared = sum(one.nbytes for one in saved) - max(total_sizes(saved), default=0)
    return f"{nbytes(total)}, {nbytes(total - shared)} on the disk" if shared else nbytes(total)


def _ls_runs(place: str, runs: Sequence[str], prefix: str | None, *, csv_: bool, json_: bool) -> int:
    """Lists the runs of a directory, one line each, and returns the exit code."""
    found = [_run_fields(run, prefix) for run in runs]
    plain = [{**one, "created": utc_time(one["created"])} for one in found]
    if json_:
        say_json({"path": place, "runs": plain})
    elif csv_:
        say_csv(plain, list(plain[0]))
    else:
        rows = []
        for one in found:
            notes = [
                f"{one[state]} {click.style(state, fg=colour)}" for state, colour in _STATE_COLORS.items() if one[state]
            ]
            notes += [f"{one['not_listed']} with other names"] * bool(one["not_listed"])
            notes += ["finished"] * one["finished"] + [click.style(safe(one["error"]), fg="red")] * bool(one["error"])
            latest = "" if one["latest"] is None else str(one["latest"])
            name = safe(os.path.basename(one["path"]))
            rows.append(
                [name, f"{one['good']:,}", latest, local_time(one["created"]), nbytes(one["nbytes"]), ", ".join(notes)]
            )
        table(["run", "steps", "latest", "saved", "size", "notes"], rows, left=["run", "notes"])
        total = nbytes(sum(one["nbytes"] or 0 for one in found))
        say(" · ".join([count(len(found), "run"), total, *_free_text(place)]))
    return FAILED if any(one["error"] or one["closed"] for one in found) else 0


def _ls_checkpoints(place: str, paths: Sequence[str], *, csv_: bool, json_: bool) -> int:
    """Lists the checkpoints of a directory that is no run, one line each, and returns the exit code."""
    found = [_checkpoint_fields(path) for path in paths]
    plain = [{**one, "created": utc_time(one["created"])} for one in found]
    if json_:
        say_json({"path": place, "checkpoints": plain})
    elif csv_:
        say_csv(plain, list(plain[0]))
    else:
        rows = [
            [
                safe(os.path.basename(one["path"])),
                one["format"] or "",
                "" if one["step"] is None else str(one["step"]),
                local_time(one["created"]),
                nbytes(one["nbytes"]),
                click.style(safe(one["error"] or ""), fg="red"),
            ]
            for one in found
        ]
        table(["checkpoint", "format", "step", "saved", "size", "notes"], rows, left=["checkpoint", "format", "notes"])
        say(f"{count(len(found), 'checkpoint')} · {nbytes(sum(one['nbytes'] or 0 for one in found))}")
    return FAILED if any(one["error"] for one in found) else 0


def _checkpoint_fields(path: str) -> dict[str, Any]:
    from .._run.open import open_checkpoint

    about = {"path": path, "format": None, "step": None, "created": None, "nbytes": None, "error": None}
    try:
        ckpt = open_checkpoint(path)
    except (TreeringError, PermissionError) as error:
        return {**about, "error": str(error)}
    created = ckpt.created and ckpt.created.timestamp()
    return {**about, "format": ckpt.format, "step": ckpt.step, "created": created, "nbytes": ckpt.nbytes}


def _run_fields(run: str, prefix: str | None) -> dict[str, Any]:
    """Returns the line of a run among others: the number of steps in each state, and the latest valid step."""
    from .._tools.listing import list_run

    states = {"good": 0, **dict.fromkeys(_STATE_COLORS, 0)}
    about = {"path": run, "latest": None, "created": None, "nbytes": None, "finished": False, "error": None}
    about["not_listed"] = 0
    try:
        listing = list_run(run, prefix=prefix)
    except (TreeringError, PermissionError) as error:
        return {**about, **states, "error": str(error)}
    for row in listing.rows:
        states[row.state] = states.get(row.state, 0) + 1
    states["closed"] += len(listing.closed)
    created = max((row.created for row in listing.rows if row.created is not None), default=None)
    about |= {"latest": listing.latest, "created": created, "finished": listing.finished}
    about["not_listed"] = len(listing.not_listed)
    return {**about, **states, "nbytes": sum(row.nbytes or 0 for row in listing.rows)}


def best_in(listing: "Listing", metric: str, mode: str) -> int:
    """Returns the best valid step of a run. Raises `NotFoundError` if no step has the metric."""
    from ..keep import Saved, rank

    saved = [Saved(row.step, row.metrics) for row in listing.rows if row.state == "good"]
    ranked = rank(saved, metric, mode)  # type: ignore[arg-type]
    if not ranked:
        _check_metric(listing, metric)
        raise NotFoundError(f"{listing.path}: expected a valid step with the metric {metric!r}, found damaged ones")
    return ranked[0]


def chosen_step(run: str, step: int | None, best: tuple[str, str] | None, prefix: str | None) -> int | None:
    """Returns the step that the options name: `step`, or the best one; None for the latest valid one."""
    if best is None:
        return step
    if step is not None:
        raise click.UsageError("expected --step or --best, found both")
    return _best_step(run, best, prefix)


def _best_step(run: str, best: tuple[str, str], prefix: str | None) -> int:
    """Returns the best step of a run, and says on stderr which it is."""
    from .._tools.listing import list_run

    listing, (metric, mode) = list_run(run, prefix=prefix), best
    step = best_in(listing, metric, mode)
    value = next(row.metrics[metric] for row in listing.rows if row.step == step)
    which = "lowest" if mode == "min" else "highest"
    say(f"step {step}: {safe(metric)} {number(value, 6)}, the {which}", err=True)
    return step


def _row_fields(row: "Row") -> dict[str, Any]:
    fields = dataclasses.asdict(dataclasses.replace(row, emptied=None, saved=None))
    del fields["emptied"], fields["saved"]
    return {**fields, "created": utc_time(row.created)}


def _sent(row: "Row") -> list[str]:
    """Returns what a version of a stream is made from, the share of its elements that changed, and the seconds."""
    kind = "" if row.state != "good" else "complete" if row.base is None else f"from {row.base}"
    changed = "" if row.changed is None else f"{row.changed:.2%}"
    return [kind, changed, "" if row.seconds is None else number(row.seconds, 3)]


def _row_notes(row: "Row", listing: "Listing", best: int | None) -> list[str]:
    notes = []
    if row.state != "good":
        notes.append(click.style(row.state, fg=_STATE_COLORS.get(row.state)))
    if row.format != "treering":
        notes.append(row.format)
    notes += ["latest"] * (row.step == listing.latest) + ["best"] * (row.step == best and row.state == "good")
    notes += ["pinned"] * row.pinned + ["link"] * row.link + [f"link {safe(name)} leads here" for name in row.linked_by]
    return notes + [click.style("would be deleted", fg="yellow")] * row.deleted


@click.command()
@click.argument("path", type=PATH)
@click.option("--depth", type=click.IntRange(1), default=1, metavar="N", help="Levels of the tree of a checkpoint.")
@as_json
def du(path: str, depth: int, json_: bool) -> int:
    """Print sizes: of the steps of a run, of each run in a directory, or of the parts of a checkpoint's tree.

    A file that several steps share by hard links counts once, in the first of them, as in du(1). It names folders that
    this user may not read, and ends with exit code 3 then.
    """
    from .. import stores
    from .._tools.listing import DiskUsage

    place = stores.absolute(path)
    usage = DiskUsage(stores.get(place))
    if _has_runs(stores.get(place), place):
        root, parts = place, _parts_of_folder(place, usage)
        total = sum(size for _, size in parts)
    else:
        root, parts, total = _parts_of_checkpoint(path, depth)
    if json_:
        shown = [{"path": name, "nbytes": size} for name, size in parts]
        about = {"path": root, "nbytes": total, "parts": shown, "closed": usage.closed}
        say_json({**about, "free": _free_bytes(place)})
    else:
        rows = [[nbytes(size), f"{100 * size / total:.1f}%" if total else "", safe(name)] for name, size in parts]
        table(["size", "share", "part"], [*rows, [nbytes(total), "", safe(root)]], left=["part"])
        for text in _free_text(place):
            say(text)
    for one in usage.closed:
        say(f"not counted, because this user may not read it: {safe(one)}", err=True)
    return FAILED if usage.closed else 0


def _has_runs(store: "Store", place: str) -> bool:
    """Returns True if a directory is a run or has runs in it, and False if it is a checkpoint."""
    from .. import formats
    from .._tools.listing import is_empty_run, is_run, runs_in
    from .._tools.runs_folder import scan_runs_folder

    try:
        if is_run(store, place) or is_empty_run(store, place):
            return True
        if formats.has_folder(store, place):
            return False
        return bool(runs_in(store, place)) or scan_runs_folder(store, place, None, None) is not None
    except MismatchError:  # The steps have several prefixes, so it is a directory of steps.
        return True


def _parts_of_folder(place: str, usage: "DiskUsage") -> list[tuple[str, int]]:
    """Returns the bytes of each folder in a directory of steps or runs, and of all its files together.

    Folders that this process may not read are left out; `usage.closed` has them.
    """
    from .. import stores

    store = stores.get(place)
    parts: list[tuple[str, int]] = []
    files = 0
    with store.glance(place):
        for name in sorted(store.list(place)):
            path = posixpath.join(place, name)
            before = len(usage.closed)
            size = usage.count(path)
            if path in usage.closed[before:]:
                continue
            if (found := store.stat(path)) and found.is_file:
                files += size
            else:
                parts.append((name, size))
    return [*parts, *([("(files)", files)] if files else [])]


def _parts_of_checkpoint(path: str, depth: int) -> tuple[str, list[tuple[str, int]], int]:
    """Returns the path of a checkpoint, the bytes of its subtrees to `depth` levels, and its bytes on the disk."""
    from .._core.outline import outline
    from .._run.open import open_checkpoint

    ckpt = open_checkpoint(path)
    tree = outline(ckpt._source.entries, collapse=False)
    parts = [(node.path, node.nbytes) for level, node in tree.walk() if level < depth and node.nbytes]
    rest = ckpt.nbytes - sum(node.nbytes for node in tree.children)
    return ckpt.path, [*parts, *([("(what describes them)", rest)] if rest > 0 else [])], ckpt.nbytes


COMMANDS = (ls, du)
