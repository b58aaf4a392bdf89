"""The commands that list runs and their sizes: ls, du."""

import dataclasses
import functools
import os
import posixpath
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from .._core.entries import mode_hint
from .._core.leaf_paths import join_names, name_known
from .._core.units import count, nbytes, number
from .._printable import safe
from ..errors import MismatchError, NotFoundError, TreeringError
from .arguments import KEEP, PREFIX, Best, Keep, union
from .output import FAILED, PATH, age, as_json, check_one_format, local_time, say, say_csv, say_json, table, utc_time

if TYPE_CHECKING:
    from .._tools.listing import DiskUsage, Listing, Row
    from ..keep import Policy
    from ..stores.store import Store

_STATE_COLORS = {"damaged": "red", "unsupported": "red", "closed": "red", "unfinished": "yellow"}


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--best", type=Best(), metavar="METRIC[:min]", help="Mark the step with the highest METRIC or, with :min, lowest."
)
@click.option("--metrics", metavar="NAME,…", help="Show only these metrics.")
@click.option("--sort", metavar="BY", help="Sort by a column, such as a metric, saved or size; the lowest first.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Show only the last N lines, after sorting.")
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
    """List the steps of a RUN, or the runs of a directory. The notes name latest, pinned, damaged, unfinished steps.

    For a directory of runs it prints one line each: with its latest step, the latest value of each metric and, with
    --best, the best value and step. For a directory of checkpoints, one line each. The exit code is 3 if this user may
    not read a part.
    """
    from .. import stores
    from .._run.new_run import numbered_steps
    from .._tools.listing import Row, is_empty_run, is_run, list_run, runs_in
    from .._tools.runs_folder import RunsFolder, scan_runs_folder

    check_one_format(json_, csv_)
    place = stores.absolute(run)
    store = stores.get(place)
    listing: Listing | None = None
    lines: list[dict[str, Any]] = []
    others: list[str] = []
    describe: Callable[[str], dict[str, Any]] = _checkpoint_fields
    with store.glance(place):
        folder = RunsFolder([], [], [])
        if not (is_run(store, place, prefix) or is_empty_run(store, place)):
            folder = scan_runs_folder(store, place, None, prefix) or RunsFolder(runs_in(store, place), [], [])
        if not (folder.runs or folder.checkpoints) or (not folder.runs and numbered_steps(store, place)):
            listing = list_run(run, union(keep), prefix)  # If it is no run, the error names the prefix of steps.
        else:
            if folder.runs:
                describe = functools.partial(_run_fields, keep=union(keep), best=best, prefix=prefix)
                others = [one.removeprefix(f"{place}/") for one in [*folder.checkpoints, *folder.folders_below]]
            elif best or keep:
                found = "expected a run or a directory of runs with --best or --keep, found a directory of checkpoints"
                raise click.UsageError(f"{place}: {found}")
            lines = [describe(one) for one in folder.runs or folder.checkpoints]
    if listing is None:
        # What a job has deleted or replaced since the directory was listed is listed by itself.
        lines = [describe(one["path"]) if one["changed"] else one for one in lines]
        return _ls_folder(place, lines, others, best, metrics, sort, last, csv_=csv_, json_=json_)
    first = best_in(listing, *best) if best else None
    columns = {"step": "step", "saved": "created", "size": "nbytes"}
    chosen = _chosen(listing.path, [vars(row) for row in listing.rows], columns, metrics, sort, last)
    latest = listing.latest  # of all steps, also those that are not shown
    listing = dataclasses.replace(listing, rows=tuple(Row(**row) for row in chosen))
    rows = [_row_fields(row, latest) for row in listing.rows] if json_ or csv_ else []
    if json_:
        about = {"path": listing.path, "finished": listing.finished, "set_aside": listing.archived, "steps": rows}
        about |= {"closed": listing.closed, "tier": listing.tier, "survives": listing.survives}
        about |= {"not_listed": listing.not_listed, "free": _free_bytes(listing.path)}
        say_json({**about, "best": first} if best else about)
    elif csv_:
        _print_csv(rows, [*(field.name for field in dataclasses.fields(Row)), "latest"])
    else:
        _print_listing(listing, latest, first, all_metrics=metrics is None)
    if listing.not_listed and not json_:
        names, many = join_names(listing.not_listed), count(len(listing.not_listed), "checkpoint")
        # A name without a number is that of no step, whatever the prefix.
        numbered = any(name[-1:].isdecimal() for name in listing.not_listed)
        advice = "use --prefix" if numbered else "open them by their paths"
        say(f"not listed: {many} with other names ({names}); {advice}", err=True)
    for path in listing.closed:
        say(f"not listed, because this user may not read it: {safe(path)}", err=True)
    return FAILED if listing.closed or any(row.state == "closed" for row in listing.rows) else 0


def _chosen(
    place: str,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    metrics: str | None,
    sort: str | None,
    last: int | None,
) -> list[dict[str, Any]]:
    """Returns lines with only these metrics, sorted, and only the last of them.

    columns: the columns that are no metrics, and the fields that they show.
    """
    names = metrics.split(",") if metrics else []
    for name in names:
        _check_metric(place, rows, name)
    if sort:
        if sort not in columns:
            _check_metric(place, rows, sort, f"one of the columns {', '.join(columns)}, or ")
        keys = {n: row[columns[sort]] if sort in columns else row["metrics"].get(sort) for n, row in enumerate(rows)}
        # Lines without a value come first, then those with NaN: the best by a metric is easily seen at an end.
        order = sorted(keys, key=lambda n: (keys[n] is not None, keys[n] == keys[n], keys[n] or 0))
        rows = [rows[n] for n in (reversed(order) if sort == "age" else order)]
    if names:
        rows = [
            {**row, "metrics": {one: row["metrics"][one] for one in names if one in row["metrics"]}} for row in rows
        ]
    return rows[-last:] if last else rows


def _check_metric(place: str, rows: Iterable[dict[str, Any]], metric: str, column: str = "") -> None:
    """Raises `NotFoundError` for a metric that no line has."""
    known = {name for row in rows for name in row["metrics"]}
    if metric not in known:
        found = name_known(metric, known) or "no metrics"
        raise NotFoundError(
            f"{place}: expected {column}a step with the metric {metric!r}, found {found}{mode_hint(metric)}"
        )


def _print_csv(rows: Sequence[dict[str, Any]], fields: Iterable[str]) -> None:
    metrics = [f"metrics.{name}" for name in _metric_names(rows)]
    flat = [{**row, **{f"metrics.{name}": value for name, value in row["metrics"].items()}} for row in rows]
    say_csv(flat, [*(name for name in fields if name not in ("metrics", "emptied", "saved")), *metrics])


def _metric_names(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["metrics"]))


def _metric_cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [number(row["metrics"][name], 6) if name in row["metrics"] else "" for name in names]


def _print_listing(listing: "Listing", latest: int | None, best: int | None, *, all_metrics: bool) -> None:
    metrics = _metric_names(map(vars, listing.rows))
    is_stream = any(row.seconds is not None for row in listing.rows)
    head = ["step", "saved", "size", *["kind", "changed", "seconds"] * is_stream, *map(safe, metrics), "notes"]
    rows = []
    for row in listing.rows:
        numbers = _metric_cells(vars(row), metrics)
        notes = ", ".join(_row_notes(row, latest, best))
        sent = _sent(row) if is_stream else []
        rows.append([str(row.step), local_time(row.created), nbytes(row.nbytes), *sent, *numbers, notes])
    _print_table(head, rows, ["notes"], metrics, len(head) - 1, all_metrics=all_metrics)
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


def _print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[str],
    metrics: Sequence[str],
    end: int,
    *,
    all_metrics: bool,
) -> None:
    """Prints a table whose columns before `end` are metrics. Leaves out metrics that the terminal has no room for.

    all_metrics: False if the user has named the metrics to show, which are never left out.
    """
    spare = range(end - len(metrics), end) if all_metrics else ()
    if hidden := tuple(metrics[n - end] for n in table(head, rows, left=left, spare=spare)):
        say(f"no room for {count(len(hidden), 'metric')} ({join_names(hidden)}); choose with --metrics")


_FOLDER_COLUMNS = {
    "format": "format", "step": "step", "steps": "good", "latest": "latest",
    "age": "created", "saved": "created", "size": "nbytes", "best": "best_value",
}  # fmt: skip


def _ls_folder(
    place: str,
    lines: list[dict[str, Any]],
    others: Sequence[str],
    best: tuple[str, str] | None,
    metrics: str | None,
    sort: str | None,
    last: int | None,
    *,
    csv_: bool,
    json_: bool,
) -> int:
    """Lists the runs of a directory, or its checkpoints, one line each, and returns the exit code."""
    lines = [{name: value for name, value in line.items() if name != "changed"} for line in lines]
    kind = "run" if "latest" in lines[0] else "checkpoint"
    columns = {name: field for name, field in {kind: "path", **_FOLDER_COLUMNS}.items() if field in lines[0]}
    if not best:
        columns.pop("best", None)
    elif all(line["best"] is None for line in lines):
        _check_metric(place, lines, best[0])
    is_closed = any(line["error"] or line.get("closed") for line in lines)
    lines = _chosen(place, lines, columns, metrics, sort, last)
    plain = [{**line, "created": utc_time(line["created"])} for line in lines]
    if json_:
        about = {"path": place, f"{kind}s": plain}
        say_json({**about, "not_listed": others} if kind == "run" else about)
    elif csv_:
        _print_csv(plain, lines[0])
    else:
        names = _metric_names(lines)
        shown = [name for name in columns if name not in ("saved", "best")]
        head = [*shown, *map(safe, names), f"best {safe(best[0])}" if best else "", "at", "notes"]
        rows = []
        for line in lines:
            first = "" if line.get("best") is None else number(line["best_value"], 6)
            cells = [_folder_cell(line, name, columns[name]) for name in shown] + _metric_cells(line, names)
            rows.append([*cells, first, _folder_cell(line, "at", "best"), ", ".join(_folder_notes(line))])
        end = len(shown) + len(names)
        _print_table(head, rows, [kind, "format", "notes"], names, end, all_metrics=metrics is None)
        total = nbytes(sum(line["nbytes"] or 0 for line in lines))
        say(" · ".join([count(len(lines), kind), total, *_free_text(place)]))
    if others and not json_:
        say(f"not listed: {count(len(others), 'other path')} with checkpoints ({join_names(tuple(others))})", err=True)
    return FAILED if is_closed else 0


def _folder_cell(line: dict[str, Any], name: str, field: str) -> str:
    value = line.get(field)
    if value is None:
        return ""
    if field == "path":
        return safe(os.path.basename(value))
    if field == "nbytes":
        return nbytes(value)
    return age(value) if name == "age" else f"{value:,}" if name == "steps" else str(value)


def _folder_notes(line: dict[str, Any]) -> list[str]:
    notes = [
        f"{line[state]} {click.style(state, fg=color)}" for state, color in _STATE_COLORS.items() if line.get(state)
    ]
    more = {"deleted": "would be deleted", "not_listed": "with other names"}
    notes += [f"{line[field]} {text}" for field, text in more.items() if line.get(field)]
    notes += ["finished"] * line.get("finished", False)
    return notes + [click.style(safe(line["error"]), fg="red")] * bool(line["error"])


def _checkpoint_fields(path: str) -> dict[str, Any]:
    from .._run.open import open_checkpoint

    about: dict[str, Any] = {"path": path, "format": None, "step": None, "created": None, "nbytes": None, "error": None}
    about |= {"metrics": {}, "changed": False}
    try:
        ckpt = open_checkpoint(path)
    except (TreeringError, PermissionError) as error:
        return {**about, "error": str(error), "changed": isinstance(error, NotFoundError)}
    created = ckpt.created and ckpt.created.timestamp()
    about |= {"format": ckpt.format, "step": ckpt.step, "created": created, "nbytes": ckpt.nbytes}
    return {**about, "metrics": ckpt.metrics}


def _run_fields(run: str, keep: "Policy | None", best: tuple[str, str] | None, prefix: str | None) -> dict[str, Any]:
    """Returns the line of a run among others: steps in each state, the latest valid step, the latest of each metric."""
    from .._tools.listing import list_run

    about = {"path": run, "latest": None, "created": None, "nbytes": None, "finished": False, "error": None}
    about |= {"not_listed": 0, "good": 0, **dict.fromkeys(_STATE_COLORS, 0)}
    about |= {"format": None, "metrics": {}, "deleted": 0, "best": None, "best_value": None, "changed": False}
    try:
        listing = list_run(run, keep, prefix)
    except (TreeringError, PermissionError) as error:
        return {**about, "error": str(error), "changed": isinstance(error, NotFoundError)}
    for row in listing.rows:
        about[row.state] = about.get(row.state, 0) + 1
        # A step of another library that was deleted while it was opened looks damaged.
        about["changed"] |= row.state == "gone" or (row.state == "damaged" and row.format != "treering")
    good = [row for row in listing.rows if row.state == "good"]
    about["closed"] += len(listing.closed)
    about["created"] = max((row.created for row in listing.rows if row.created is not None), default=None)
    about["format"] = ", ".join(sorted({row.format for row in good})) or None
    about["metrics"] = {name: value for row in good for name, value in row.metrics.items()}  # The steps ascend.
    if best and best[0] in about["metrics"]:
        about["best"] = best_in(listing, *best)
        about["best_value"] = next(row.metrics[best[0]] for row in good if row.step == about["best"])
    about |= {"latest": listing.latest, "finished": listing.finished, "not_listed": len(listing.not_listed)}
    about["nbytes"] = sum(row.nbytes or 0 for row in listing.rows)
    about["deleted"] = sum(row.deleted for row in listing.rows)
    return about


def best_in(listing: "Listing", metric: str, mode: str) -> int:
    """Returns the best valid step of a run. Raises `NotFoundError` if no step has the metric."""
    from ..keep import Saved, rank

    saved = [Saved(row.step, row.metrics) for row in listing.rows if row.state == "good"]
    ranked = rank(saved, metric, mode)  # type: ignore[arg-type]
    if not ranked:
        _check_metric(listing.path, map(vars, listing.rows), metric)
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


def _row_fields(row: "Row", latest: int | None) -> dict[str, Any]:
    fields = {name: value for name, value in vars(row).items() if name not in ("emptied", "saved")}
    return {**fields, "created": utc_time(row.created), "latest": row.step == latest}


def _sent(row: "Row") -> list[str]:
    """Returns what a version of a stream is made from, the share of its elements that changed, and the seconds."""
    kind = "" if row.state != "good" else "complete" if row.base is None else f"from {row.base}"
    changed = "" if row.changed is None else f"{row.changed:.2%}"
    return [kind, changed, "" if row.seconds is None else number(row.seconds, 3)]


def _row_notes(row: "Row", latest: int | None, best: int | None) -> list[str]:
    notes = []
    if row.state != "good":
        notes.append(click.style(row.state, fg=_STATE_COLORS.get(row.state)))
    if row.format != "treering":
        notes.append(row.format)
    notes += ["latest"] * (row.step == latest) + ["best"] * (row.step == best and row.state == "good")
    notes += ["pinned"] * row.pinned + ["link"] * row.link + [f"link {safe(name)} leads here" for name in row.linked_by]
    return notes + [click.style("would be deleted", fg="yellow")] * row.deleted


@click.command()
@click.argument("path", type=PATH)
@click.option("--depth", type=click.IntRange(1), default=1, metavar="N", help="Levels of the tree of a checkpoint.")
@as_json
def du(path: str, depth: int, json_: bool) -> int:
    """Print the sizes of steps, of runs, or of parts of a tree. PATH is a run, a directory of runs or a checkpoint.

    A file that several steps share by hard links counts once, in the first of them, as in du(1). It names folders that
    this user may not read, and ends with exit code 3 then.
    """
    from .. import stores
    from .._tools.listing import DiskUsage

    place = stores.absolute(path)
    store = stores.get(place)
    usage = DiskUsage(store)
    with store.glance(place):
        has_runs = _has_runs(store, place)
        parts = _parts_of_folder(store, place, usage) if has_runs else []
    if has_runs:
        root, total = place, sum(size for _, size in parts)
    else:  # Outside of the block: opening starts again with a new listing if the checkpoint was replaced.
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


def _parts_of_folder(store: "Store", place: str, usage: "DiskUsage") -> list[tuple[str, int]]:
    """Returns the bytes of each folder in a directory of steps or runs, and of all its files together.

    Folders that this process may not read are left out; `usage.closed` has them.
    """
    parts: list[tuple[str, int]] = []
    files = 0
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
