"""The command report, which writes a run as an HTML page."""

import click

from .._core.units import nbytes
from .._printable import safe
from .arguments import MAX_EXPANSION, PREFIX, STEP
from .output import PATH, as_json, say, say_json


@click.command()
@click.argument("run", type=PATH)
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
    run: str,
    output: str,
    steps: int,
    leaves: tuple[str, ...],
    compare: tuple[int, int] | None,
    max_expansion: float,
    prefix: str | None,
    json_: bool,
) -> None:
    """Write an HTML page about a RUN: timeline, sizes, statistics, differences. It needs no network.

    It reads the arrays of --steps steps, spread evenly over the run; --steps 0 reads none. It replaces an older report.
    """
    from .. import stores
    from .._tools import report as tools

    place = stores.absolute(output)
    store = stores.get(place)
    tools.check_replaceable(store, place)
    found = tools.gather(
        run,
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
        return
    say(f"{safe(place)}: {nbytes(len(data))}")


COMMANDS = (report,)
