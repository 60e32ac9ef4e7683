"""`forge tune speed`: measure what makes a step faster, and write the recipe that is best."""

from __future__ import annotations

import dataclasses
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.cli import target
from forge.config import Recipe
from forge.config.recipe import DEFAULT, PYTHON
from forge.config.schema import options_of
from forge.errors import ForgeError
from forge.util import show
from forge.util.files import atomic_write, make_folder

if TYPE_CHECKING:
    from forge.tuning import Change, LeverRow, SpeedReport, StepReading

EXAMPLES = """\
Trains fresh copies of the task for a few updates at a time, and writes no run.

examples:
  forge tune speed quickstart --budget 5                     what makes a step faster, within 5 minutes
  forge tune speed my_task.py:MyTask --same-precision        without bf16 and TF32
"""
BUDGET = 10.0
WORDS = {"bitwise": "same bits", "rounding": "rounding", "precision": "precision"}
NOISY = 0.15
"""From this share on, differences between equal steps are mentioned."""
FILLED = (DEFAULT, PYTHON)
"""Origins of settings that the command line has filled in for the trials."""


def parser() -> ArgumentParser:
    parser = show.new_parser(
        "tune speed", "Measure what makes a step faster, and write the recipe that is best.", EXAMPLES
    )
    target.add_arguments(parser)
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument("--bitwise", action="store_true", default=None, help="only what keeps every bit, verified")
    numbers.add_argument(
        "--same-precision", action="store_true", default=None, help="no bf16 or TF32; the default on a CPU"
    )
    numbers.add_argument("--any-precision", action="store_true", default=None, help="bf16 on a CPU too")
    parser.add_argument("--budget", type=float, metavar="MIN", help="minutes for the search (default: 10)")
    parser.add_argument(
        "--without", metavar="NAME", action="append", help="do not try this plugin or lever; may be repeated"
    )
    parser.add_argument("--limit", type=float, metavar="GB", help="memory budget")
    parser.add_argument("--out", metavar="FILE", help="file of the recipe (default: runs/tune/RECIPE-speed.yaml)")
    return parser


def run(args: Namespace) -> int:
    """Search, print the table and write the recipe."""
    from forge.env import pick_device
    from forge.tuning import speed_range

    recipe = target.load_seeded(args)
    name = target.name_of(recipe)
    device = pick_device(recipe.trainer.get("device", "auto"))
    numbers = _numbers(args, device.type)
    budget = BUDGET if args.budget is None else args.budget
    out = Path(args.out or Path("runs/tune") / f"{name}-speed.yaml")
    if out.suffix not in (".yaml", ".yml"):
        raise ForgeError(f"--out {out}: the recipe is a .yaml file.")
    make_folder(out.parent)
    show.message(f"Up to {budget:g} minutes of trials on {device}; {_permitted(numbers, args.limit)} ...", "dim")
    report = speed_range(
        recipe.make_task,
        lambda **changed: recipe.with_data(changed).make_data().train,
        numbers=numbers,
        limit=args.limit,
        budget=budget,
        data=_data_options(recipe),
        leave_out=args.without or (),
        tell=lambda text: show.message(text, "dim"),
        recipe=recipe,
        plugins={},
    )
    with atomic_write(out) as beside:
        beside.write_text(_header(report, str(device)) + changed_recipe(recipe, report.change).to_yaml())
    print_report(report)
    lines = {
        "recipe": str(show.near(out.absolute())),
        "use it": shlex.join([show.command("forge"), "fit", *_target(args, recipe, out)]),
    }
    for label, text in lines.items():
        show.console().print(Text.assemble((f"{label:<12}", "dim"), text), soft_wrap=True)
    return 0


def _numbers(args: Namespace, device: str) -> Any:
    if args.bitwise:
        return "bitwise"
    return "rounding" if args.same_precision or (device == "cpu" and not args.any_precision) else "precision"


def _permitted(numbers: str, limit: float | None) -> str:
    words = {
        "bitwise": "only changes that keep every bit",
        "rounding": "the precision stays",
        "precision": "the precision may change (--same-precision forbids it)",
    }
    return words[numbers] + ("" if limit is None else f"; at most {limit:g} GB")


# -- the recipe -------------------------------------------------------------------------------------------------------


def changed_recipe(recipe: Recipe, change: Change) -> Recipe:
    """Return the recipe with a change in it. Settings that the command line filled in stay out."""
    plugins: dict[str, Any] = dict(recipe.plugins)
    for name, options in change.plugins.items():
        if options is None:
            plugins.pop(name, None)
        else:
            plugins[name] = {**plugins.get(name, {}), **options}
    trainer = {key: value for key, value in recipe.trainer.items() if recipe.origin.get(f"trainer.{key}") not in FILLED}
    config = {**recipe.with_data(change.data).config, "plugins": plugins, "trainer": trainer}
    return dataclasses.replace(recipe, config={key: value for key, value in config.items() if value != {}}, built={})


def _data_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options of the data with their values."""
    known = options_of("data", recipe.config, recipe.local, recipe.origin) or ()
    given = recipe.resolved.get("data", {})
    return {option.name: given.get(option.name, option.default) for option in known if not option.required}


def _header(report: SpeedReport, device: str) -> str:
    from forge.tuning.step_reading import in_ms

    best = report.best or report.start
    names = " + ".join(lever.name for lever in report.chosen) or "nothing was faster than the start"
    return f"# forge tune speed on {device}: {in_ms(report.start.ms)} -> {in_ms(best.ms)} ms per update ({names}).\n"


def _target(args: Namespace, recipe: Recipe, out: Path) -> list[str]:
    """Return the arguments of a fit with the new recipe: it holds all overrides, but no code."""
    data = ["--data", args.data] if args.data else []
    return [args.target, "--recipe", str(out), *data] if "task" in recipe.local else [str(out), *data]


# -- the table --------------------------------------------------------------------------------------------------------


def print_report(report: SpeedReport) -> None:
    """Print the table of what was tried, what was not and why, and the verdict."""
    console = show.console()
    grid = show.table("", "alone", "memory", "together", "memory", "numbers", "ready in", "", wrap=[""])
    for column in grid.columns[1:5]:
        column.justify = "right"
    grid.columns[6].justify = "right"
    grid.columns[0].no_wrap = True
    grid.add_row("start", *_cells(report.start), "", "", "", "", "")
    tried = [row for row in report.rows if row.alone is not None]
    for row in sorted(tried, key=lambda row: row.alone.ms):  # pyright: ignore[reportOptionalMemberAccess]
        style = "bold" if row.chosen else "" if not row.why_not else "dim"
        grid.add_row(*(Text(text, style) for text in _line(row, report)))
    console.print()
    console.print(grid)
    console.print()
    rest = [row for row in report.rows if row.alone is None]
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rest, key=lambda row: not row.failed):
        by_reason.setdefault(("failed" if row.failed else "not tried", row.why_not), []).append(row.lever.name)
    if by_reason:
        grid = show.table("", "", "", wrap=[""])
        grid.show_header = False
        grid.columns[0].no_wrap = True
        for (label, reason), names in by_reason.items():
            style = "" if label == "failed" else "dim"
            grid.add_row(Text(label, "dim"), Text(", ".join(names), style), Text(reason, style))
        console.print(grid)
        console.print()
    for line in verdict(report):
        console.print(line, soft_wrap=True)


def _line(row: LeverRow, report: SpeedReport) -> list[str]:
    assert row.alone is not None
    extra = row.alone.seconds - report.start.seconds
    compiled = f"{extra:.0f} s" if extra >= 1 else ""
    note = "used" if row.chosen else row.why_not
    return [row.lever.name, *_cells(row.alone), *_cells(row.together), WORDS[row.numbers], compiled, note]


def _cells(reading: StepReading | None) -> list[str]:
    from forge.tuning.step_reading import in_ms

    if reading is None:
        return ["", ""]
    return [f"{in_ms(reading.ms)} ms", "" if reading.memory is None else f"{reading.memory / 1e9:.2f} GB"]


def verdict(report: SpeedReport) -> list[str]:
    """Summarise the search in sentences."""
    from forge.tuning.step_reading import in_ms

    lines, best, start = [], report.best, report.start
    if best is not None:
        names = " + ".join(lever.name for lever in report.chosen)
        memory = ""
        if best.memory is not None and start.memory is not None:
            memory = f", {start.memory / 1e9:.2f} -> {best.memory / 1e9:.2f} GB"
        lines.append(
            f"{report.speedup:.2f}× as fast: {in_ms(start.ms)} -> {in_ms(best.ms)} ms per update{memory}: {names}."
        )
    elif report.dropped:
        lines.append(f"Beside the start, {report.dropped} was no faster in the end: your recipe stays as it is.")
    else:
        lines.append("Nothing that was tried is at least 2 % faster: your recipe stays as it is.")
    if not report.fits:
        lines.append("Nothing fits into the limit, the start included: use a smaller batch (`forge tune batch`).")
    if best is not None and best.same:
        lines.append("The weights had the bits of the start's after the first updates.")
    if not report.reproducible:
        lines.append("The start itself gives other bits each time, so that bits cannot be compared.")
    low, high = report.extremes
    if high > (1 + NOISY) * low:
        lines.append(
            f"The start alone took {in_ms(low)} to {in_ms(high)} ms: something else uses this machine, so small gains "
            "may be missed."
        )
    if report.spent:
        lines.append("The budget ended the search early; --budget gives it more minutes.")
    return [*lines, f"The search took {report.seconds:.0f} s."]
