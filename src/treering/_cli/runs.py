"""The commands that change a run: pin, unpin, rewind."""

import logging
from typing import TYPE_CHECKING

import click

from .._core.units import count
from .._printable import safe
from .arguments import BEST, PREFIX, STEP
from .listing import chosen_step
from .output import PATH, as_json, say, say_json

if TYPE_CHECKING:
    from .._run.plain_run import PlainRun


@click.command()
@click.argument("run", type=PATH)
@click.argument("steps", nargs=-1, type=STEP)
@BEST
@PREFIX
@as_json
def pin(run: str, steps: tuple[int, ...], best: tuple[str, str] | None, prefix: str | None, json_: bool) -> None:
    """Mark STEPS of a RUN, or the best, so that no job deletes them."""
    if bool(steps) == (best is not None):
        raise click.UsageError("expected STEPS or --best")
    found = chosen_step(run, None, best, prefix)
    _pin(run, steps if found is None else (found,), prefix, wanted=True, json_=json_)


@click.command()
@click.argument("run", type=PATH)
@click.argument("steps", nargs=-1, required=True, type=STEP)
@PREFIX
@as_json
def unpin(run: str, steps: tuple[int, ...], prefix: str | None, json_: bool) -> None:
    """Remove the mark that pin sets."""
    _pin(run, steps, prefix, wanted=False, json_=json_)


def _pin(run: str, steps: tuple[int, ...], prefix: str | None, *, wanted: bool, json_: bool) -> None:
    directory = open_run(run, prefix)
    for step in steps:  # All are checked before the first is changed, so that an error changes nothing.
        directory.check_own_step(step)
    for step in steps:
        directory.pin(step, wanted)
    if json_:
        say_json({"path": directory.root, "steps": steps, "pinned": directory.pinned()})
    else:
        say(f"{'pinned' if wanted else 'unpinned'}: {', '.join(map(str, steps))}")


@click.command()
@click.argument("run", type=PATH)
@click.argument("step", type=STEP, required=False)
@click.option("--all", "all_", is_flag=True, help="Archive every step: the next job starts over.")
@BEST
@click.option("--dry-run", is_flag=True, help="Only print which steps would be archived.")
@PREFIX
@as_json
def rewind(
    run: str,
    step: int | None,
    all_: bool,
    best: tuple[str, str] | None,
    dry_run: bool,
    prefix: str | None,
    json_: bool,
) -> None:
    """Go back to a STEP of a RUN. It archives the later steps, so that the next job continues from STEP.

    It deletes nothing: it moves the steps to rewound-1 (-2, …) within the run, which is a run of its own. It refuses a
    run that a job writes.
    """
    if (step is not None) + all_ + (best is not None) != 1:
        raise click.UsageError("expected a STEP, --best or --all")
    from .._run import external_writes
    from .._run.run_layout import BEFORE_FIRST_STEP, archived_runs

    step = chosen_step(run, step, best, prefix)
    directory, back_to = open_run(run, prefix), BEFORE_FIRST_STEP if step is None else step
    store, root = directory.steps.store, directory.root
    later, before = directory.steps_to_archive(back_to), archived_runs(store, root)
    if dry_run:
        external_writes.check_no_writer(store, root)
    else:
        try:
            directory.rewind(back_to, log_level=logging.INFO)
        finally:
            directory.release()
    place = next((one for one in archived_runs(store, root) if one not in before), None)
    if json_:
        say_json({"path": root, "step": step, "set_aside": later, "to": place, "dry_run": dry_run})
    else:
        what = "would be archived" if dry_run else f"archived in {safe(place)}"
        say(f"{count(len(later), 'step')} {what}: {', '.join(map(str, later))}" if later else "nothing to archive")


def open_run(run: str, prefix: str | None) -> "PlainRun":
    """Opens the directory of a run in order to change it.

    Raises `NotFoundError` if it is not a run, and `MismatchError` for a ``local=`` directory or several prefixes.
    """
    from .. import stores
    from .._run.plain_run import PlainRun
    from .._run.run_layout import RunLayout, find_prefix
    from .._run.step_catalog import StepCatalog
    from .._run.tiers.journal import check_not_local
    from .._tools.listing import check_run

    place = stores.absolute(run)
    store = stores.get(place)
    check_run(store, place, prefix)
    check_not_local(store, place)
    layout = RunLayout(find_prefix(store, place) if prefix is None else prefix)
    return PlainRun(StepCatalog(store, place, layout), lambda: True)


COMMANDS = (pin, unpin, rewind)
