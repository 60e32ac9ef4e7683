"""`forge tune workers`: measure the loader by its number of workers, against what the step needs."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.cli import target
from forge.config import Recipe
from forge.config.schema import options_of
from forge.errors import DataError, ForgeError
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
    option, make, takes = _maker(recipe, name)
    counts = default_counts(most) if takes else [0]
    show.message(f"The loader alone, with {', '.join(map(str, counts))} workers; then the step alone ...", "dim")
    report = workers_range(
        recipe.make_task,
        make,
        counts=counts,
        tell=lambda probe: show.message(f"{probe.workers} workers: {probe.speed:,.0f} samples/s", "dim"),
        seed=seed,
        recipe=recipe,
    )
    print_report(report)
    console = show.console()
    for line in verdict(report, takes):
        console.print(line, soft_wrap=True)
    for label, text in _uses(args, option, report, takes).items():
        console.print(Text.assemble((f"{label:<12}", "dim"), text), soft_wrap=True)
    return 0


def _maker(recipe: Recipe, name: str) -> tuple[str | None, Callable[[int], Any], bool]:
    """Return the data's option for workers, what makes the train loader with some, and whether it takes any."""
    from forge.data import Loader
    from forge.tuning.workers import OPTIONS, with_workers

    known = options_of("data", recipe.config, recipe.local, recipe.origin) or ()
    option = next((option.name for option in known if option.name in OPTIONS), None)
    if option is not None:
        return option, lambda count: _train(recipe.with_data({option: count}), name), True
    own = _train(recipe, name)
    if with_workers(own, 0) is not None:
        return None, lambda count: with_workers(_train(recipe, name), count), True
    if isinstance(own, Loader):
        raise ForgeError(
            f"The data of {name!r} have no option num_workers. Add one to the function, and pass it to the loader: "
            "def data(num_workers: int = 0)."
        )
    return None, lambda count: own, False


def _train(recipe: Recipe, name: str) -> Any:
    train = recipe.make_data().train
    if train is None:
        raise DataError(f"The data of {name!r} have no train split: return forge.data.Splits(train=...).")
    return train


def print_report(report: WorkersReport) -> None:
    """Print a row for each number of workers, and one for the step."""
    grid = show.table("workers", "samples/s", "of the need", "")
    for column in grid.columns[:3]:
        column.justify = "right"
    for probe in report.probes:
        style = "bold" if probe is report.recommended else ""
        cells = [f"{probe.workers}", f"{probe.speed:,.0f}", f"{100 * probe.speed / report.need:.0f} %"]
        cells.append("recommended" if probe is report.recommended else "")
        grid.add_row(*(Text(cell, style) for cell in cells))
    grid.add_row(Text("the step", "dim"), f"{report.need:,.0f}", "", Text("its need", "dim"))
    console = show.console()
    console.print()
    console.print(grid)
    console.print()


def verdict(report: WorkersReport, takes: bool = True) -> list[str]:
    """Summarise in sentences: what limits training, and what to do."""
    chosen = report.recommended
    each = f"{report.samples:.3g} samples in {report.step_ms:.3g} ms"
    plural = "" if chosen.workers == 1 else "s"
    with_them = f"with {chosen.workers} worker{plural}" if takes else "as they are"
    if report.limit == "compute":
        lines = [
            f"Compute is the limit: the step takes {each}, {report.need:,.0f} samples/s, and the data {with_them} give "
            f"{chosen.speed:,.0f}."
        ]
    else:
        lines = [
            f"Data are the limit: the step could take {report.need:,.0f} samples/s ({each}), and the data {with_them} "
            f"give {chosen.speed:,.0f}, {100 * chosen.speed / report.need:.0f} % of it."
        ]
        lines.append(
            "Use more cores, do part of the work once and store its result, or move it to the device; or keep the "
            "files on a faster disk, or fewer and larger ones."
        )
    if not takes:
        lines.append("The loader takes no workers: it reads from memory, or is a list.")
    return lines


def _uses(args: Namespace, option: str | None, report: WorkersReport, takes: bool) -> dict[str, str]:
    """Return the lines that put the result to use; the last is what to write down."""
    count = report.recommended.workers
    if not takes:
        return {"recipe": "nothing to change"}
    if option is None:
        return {"code": f"DataLoader(..., num_workers={count})"}
    command = [show.command("forge"), "fit", *target.same_target(args, {f"data.{option}": str(count)})]
    return {"use it": shlex.join(command), "recipe": f"data: {{{option}: {count}}}"}
