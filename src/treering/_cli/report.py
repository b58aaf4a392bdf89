"""The command report, which writes a run as an HTML page."""

from collections.abc import Sequence

import click

from .._core.units import nbytes
from .._printable import safe
from .arguments import MAX_EXPANSION, PREFIX, STEP
from .output import PATH, as_json, say, say_json


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN...")
@click.option("--output", "-o", type=PATH, default="report.html", show_default=True, help="The file to write.")
@click.option(
    "--steps", type=click.IntRange(0), default=20, show_default=True, help="Read the arrays of this many steps."
)
@click.option("--leaves", multiple=True, metavar="GLOB", help="Compute statistics only of these leaves.")
@click.option("--compare", type=STEP, nargs=2, metavar="A B", help="Compare two steps; by default the latest two.")
@MAX_EXPANSION
@PREFIX
@as_json
def report(
    runs: tuple[str, ...],
    output: str,
    steps: int,
    leaves: tuple[str, ...],
    compare: tuple[int, int] | None,
    max_expansion: float,
    prefix: str | None,
    json_: bool,
) -> int:
    """Write an HTML page about a RUN: timeline, sizes, statistics, differences. It needs no network.

    It reads the arrays of --steps steps, spread evenly over the run; --steps 0 reads none. It replaces an older report.
    Of several runs, or a directory of runs, the page has the metrics in the same charts, and nothing of arrays. If it
    left out a run, the exit code is 3.
    """
    from .. import stores
    from .._tools import report as tools

    place = stores.absolute(output)
    store = stores.get(place)
    tools.check_replaceable(store, place)
    several = _several(runs, prefix)
    if several and (leaves or compare):
        raise click.UsageError("expected --leaves and --compare for one run, found several runs")
    if several:
        found = tools.gather_runs(several, prefix=prefix)
    else:
        found = tools.gather(
            runs[0],
            steps=steps,
            compare=compare or (),
            globs=leaves,
            progress=not json_,
            max_expansion=max_expansion,
            prefix=prefix,
        )
    data = tools.page(found).encode()
    with store.new_file(place, overwrite=True) as file:
        file.write(data)
    if json_:
        say_json({"path": place, "nbytes": len(data), "read": found["read"], "notes": found["notes"]})
    else:
        say(f"{safe(place)}: {nbytes(len(data))}")
    return 3 if found.get("leftOut") else 0


def _several(runs: Sequence[str], prefix: str | None) -> list[str]:
    """Returns the runs if there are several: those named, and those in directories of runs."""
    from .. import stores
    from .._tools.runs_folder import scan_runs_folder

    found: list[str] = []
    is_folder = False
    for run in runs:
        place = stores.absolute(run)
        folder = scan_runs_folder(stores.get(place), place, None, prefix)
        is_folder |= bool(folder)
        found += folder.runs if folder else [place]
    return found if is_folder or len(found) > 1 else []


COMMANDS = (report,)
