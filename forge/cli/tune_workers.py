"""`forge tune workers`: measure the loader by its number of workers, against what the step needs."""

from __future__ import annotations

import shlex
from argparse import Namespace
from typing import TYPE_CHECKING

from rich.text import Text

from forge.cli import target
from forge.config import Recipe
from forge.config.schema import options_of
from forge.errors import ForgeError
from forge.runs.wording import counted
from forge.util import show

if TYPE_CHECKING:
    from forge.tuning.workers import WorkersReport


def run(args: Namespace, recipe: Recipe, name: str) -> int:
    """Measure, print the table and the verdict, and end with the line for the recipe."""
    from forge.rng import seed_all
    from forge.tuning.workers import available_cores, default_counts, workers_range

    most = available_cores() if args.max is None else int(args.max)
    if most < 0:
        raise ForgeError(f"--max {most}: the largest number of workers is 0 or more.")
    seed = recipe.trainer["seed"]
    seed_all(seed)
    option, counts = _option(recipe, name), default_counts(most)
    show.message(f"The loader alone, with {', '.join(map(str, counts))} workers; then the step alone ...", "dim")
    report = workers_range(
        recipe.make_task,
        lambda count: recipe.with_data({option: count}).make_data().train,
        counts=counts,
        seed=seed,
        recipe=recipe,
    )
    print_report(report)
    command = [show.command("forge"), "fit", *target.same_target(args, {f"data.{option}": str(report.recommended)})]
    lines = {"use it": shlex.join(command), "recipe": f"data: {{{option}: {report.recommended}}}"}
    show.console().print(verdict(report), soft_wrap=True)
    for label, text in lines.items():
        show.console().print(Text.assemble((f"{label:<12}", "dim"), text), soft_wrap=True)
    return 0


def _option(recipe: Recipe, name: str) -> str:
    """Return the option of the data that sets the number of workers."""
    from forge.tuning.workers import OPTIONS

    known = options_of("data", recipe.config, recipe.local, recipe.origin) or ()
    for option in known:
        if option.name in OPTIONS:
            return option.name
    raise ForgeError(
        f"The data of {name!r} have no option num_workers. Add one to the function, and pass it to the loader: "
        "def data(num_workers: int = 0). Data that are in memory need no workers."
    )


def print_report(report: WorkersReport) -> None:
    """Print a row for each number of workers, and one for the step."""
    grid = show.table("workers", "samples/s", "of the need", "")
    for column in grid.columns[:3]:
        column.justify = "right"
    for count, speed in report.speeds.items():
        chosen = count == report.recommended
        cells = [f"{count}", f"{speed:,.0f}", f"{100 * speed / report.need:.0f} %", "recommended" if chosen else ""]
        grid.add_row(*(Text(cell, "bold" if chosen else "") for cell in cells))
    grid.add_row(Text("the step", "dim"), f"{report.need:,.0f}", "", Text("its need", "dim"))
    console = show.console()
    console.print()
    console.print(grid)
    console.print()


def verdict(report: WorkersReport) -> str:
    """Say what limits training, and what to do."""
    speed = report.speeds[report.recommended]
    step = f"{report.samples:.3g} samples in {report.step_ms:.3g} ms, {report.need:,.0f} samples/s"
    data = f"the data with {counted(report.recommended, 'worker')} give {speed:,.0f}"
    if report.limit == "compute":
        return f"Compute is the limit: the step takes {step}, and {data}."
    return (
        f"Data are the limit: the step could take {step}, and {data}, {100 * speed / report.need:.0f} % of it. Use "
        "more cores, do part of the work once and store its result, or move it to the device; or keep the files on a "
        "faster disk, or fewer and larger ones."
    )
