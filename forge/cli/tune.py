"""`forge tune`: measure a learning rate, the largest batch that fits, or the data workers.

A package adds a search of its own as the command "tune NAME".
"""

from __future__ import annotations

import math
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forge.cli import target, tune_workers
from forge.config import Recipe
from forge.config.schema import options_of
from forge.errors import ForgeError
from forge.util import show

if TYPE_CHECKING:
    from forge.tuning import BatchReport, LRCurve, Probe

EXAMPLES = """\
Each search trains fresh copies of the task for a few updates, and writes no run.

examples:
  forge tune lr quickstart                                   a range test, plotted in runs/tune/
  forge tune lr my_task.py:MyTask --min 1e-5 --max 1 --updates 300
  forge tune batch quickstart                                powers of two, with memory and speed of each
  forge tune batch my_task.py:MyTask --exact --limit 40      the largest size within 40 GB
  forge tune workers my_task.py:MyTask                       samples/s by workers, against the step's need
"""
LR_NAMES = ("lr", "learning_rate")
DEFAULTS = {
    "lr": {"min": 1e-7, "max": 10.0, "updates": 100},
    "batch": {"max": 8192, "updates": 6},
    "workers": {},
}
GO_WITH = {
    **dict.fromkeys(("min", "optimizer"), ("lr",)),
    "max": ("lr", "batch", "workers"),
    "updates": ("lr", "batch"),
    "exact": ("batch",),
    "limit": ("batch",),
    "out": ("lr",),
}
"""The kinds of search that an option belongs to."""


def parser() -> ArgumentParser:
    parser = show.new_parser(
        "tune", "Measure a learning rate, the largest batch that fits, or the data workers.", EXAMPLES
    )
    parser.add_argument("what", metavar="WHAT", choices=DEFAULTS, help=f"what to search for: {', '.join(DEFAULTS)}")
    target.add_arguments(parser)
    parser.add_argument("--min", type=float, metavar="X", help="lr: the lowest rate (default: 1e-7)")
    parser.add_argument(
        "--max",
        type=float,
        metavar="X",
        help="lr: the highest rate (default: 10); batch: the largest size (8192); workers: the most (the cores)",
    )
    parser.add_argument(
        "--updates", type=int, metavar="N", help="lr: updates of the test (default: 100); batch: of each size (6)"
    )
    parser.add_argument("--optimizer", metavar="NAME", help="lr: test only this one of several optimizers")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="lr: file of the plot (default: runs/tune/RECIPE-lr.svg)",
    )
    parser.add_argument(
        "--exact", action="store_true", default=None, help="batch: search between powers of two as well"
    )
    parser.add_argument("--limit", type=float, metavar="GB", help="batch: memory budget; the only limit on a CPU")
    return parser


def run(args: Namespace) -> int:
    for name, kinds in GO_WITH.items():
        if args.what not in kinds and getattr(args, name) is not None:
            verbs = " and ".join(f"`forge tune {kind}`" for kind in kinds)
            raise ForgeError(f"--{name.replace('_', '-')} goes with {verbs}.")
    for name, value in DEFAULTS[args.what].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    recipe = target.load_seeded(args)
    if args.what == "workers":
        return tune_workers.run(args, recipe, target.name_of(recipe))
    return _lr(args, recipe) if args.what == "lr" else _batch(args, recipe)


# -- lr ---------------------------------------------------------------------------------------------------------------


def _lr(args: Namespace, recipe: Recipe) -> int:
    from forge.rng import seed_all
    from forge.tuning import draw_lr, lr_range

    seed_all(recipe.trainer["seed"])
    show.message(f"{args.updates} updates with a rate that grows from {args.min:g} to {args.max:g} ...", "dim")
    curve = lr_range(
        recipe.make_task,
        recipe.make_data().train,
        lowest=args.min,
        highest=args.max,
        updates=args.updates,
        optimizer=args.optimizer,
        recipe=recipe,
    )
    name = target.name_of(recipe)
    path = draw_lr(curve, f"Learning-rate range test of {name}", args.out or Path("runs/tune") / f"{name}-lr.svg")
    _print_lr(curve)
    console = show.console()
    if not curve.fell:
        show.warning(
            "the loss hardly fell, so the suggestion means little. Use more updates (--updates 500), or another range."
        )
    for label, text in {"picture": str(show.near(path.absolute())), "use it": _use_lr(args, recipe, curve)}.items():
        console.print(Text.assemble((f"{label:<12}", "dim"), text), soft_wrap=True)
    return 0


def _print_lr(curve: LRCurve) -> None:
    from forge.tuning.lr import rate_text

    console = show.console()
    grid = show.table("learning rate", "", "how it was found")
    rows = {
        "a tenth of the rate at which the smoothed loss is lowest": (curve.suggestion, "suggestion"),
        "in the middle of the longest fall of the loss: careful": (curve.valley, "valley"),
        "where the loss falls fastest: bold": (curve.steepest, "steepest"),
        "the task's own rate": (curve.reference, "now"),
    }
    for how, (rate, name) in rows.items():
        style = "bold" if name == "suggestion" else "dim" if name == "now" else ""
        grid.add_row(Text(rate_text(rate), style), Text(name, style), Text(how, style))
    console.print()
    console.print(grid)
    console.print()
    if len(set(curve.own)) > 1:
        console.print(f"{_groups_text(curve)}\n")
    end = f"diverged at {rate_text(curve.diverged)}" if curve.diverged else "did not diverge"
    lowest = min(curve.smoothed)
    console.print(
        f"{len(curve.losses)} updates. The smoothed loss fell from {curve.smoothed[0]:.4g} to {lowest:.4g}, and {end}."
    )


def _groups_text(curve: LRCurve) -> str:
    """Say what the suggestion is of, where parameter groups have rates of their own."""
    from forge.tuning.lr import rate_text

    factor, different = curve.suggestion / curve.reference, list(dict.fromkeys(curve.own))
    pairs = [f"{rate_text(rate)} becomes {rate_text(rate * factor)}" for rate in different]
    pairs = [*pairs[:3], "...", pairs[-1]] if len(pairs) > 5 else pairs
    return (
        f"These are rates of the first of {len(curve.own)} parameter groups; all were scaled by one factor. The "
        f"suggestion multiplies each by {factor:.3g}: {', '.join(pairs)}."
    )


def _use_lr(args: Namespace, recipe: Recipe, curve: LRCurve) -> str:
    """Return the command that trains with the suggested rate; if the task takes no rate, what to change in it."""
    from forge.tuning.lr import rate_text

    name, factor = _lr_option(recipe), curve.suggestion / curve.reference
    if name is None or args.optimizer is not None:
        takes = f"The task takes no argument called {LR_NAMES[0]}: set" if name is None else "Set"
        return f"{takes} it in configure_optimizers: multiply all rates by {factor:.3g}."
    now = recipe.resolved["task"].get(name)
    scaled = isinstance(now, (int, float)) and now > 0
    return _command(args, {f"task.{name}": rate_text(float(now) * factor if scaled else curve.suggestion)})


# -- batch ------------------------------------------------------------------------------------------------------------


def _batch(args: Namespace, recipe: Recipe) -> int:
    from forge.env import pick_device
    from forge.tuning import batch_range

    own = _own_size(recipe)
    if args.limit is None and pick_device(recipe.trainer.get("device", "auto")).type == "cpu":
        show.message(
            f"A CPU does not report when memory is full: sizes up to --max {int(args.max)} are tried. --limit GB sets "
            "a budget.",
            "dim",
        )
    report = batch_range(
        recipe.make_task,
        lambda size: recipe.with_data({"batch_size": size}).make_data().train,
        start=own,
        highest=int(args.max),
        exact=bool(args.exact),
        limit=args.limit,
        updates=args.updates,
        tell=lambda probe: show.message(f"{probe.size}: {probe.why_not or 'fits'}", "dim"),
        recipe=recipe,
    )
    _print_batch(report)
    console = show.console()
    for line in verdict(report, own, _own_rate(recipe)):
        console.print(line, soft_wrap=True)
    use = _command(args, {"data.batch_size": str(report.recommended)})
    console.print(Text.assemble(("use it      ", "dim"), use), soft_wrap=True)
    return 0


def _own_size(recipe: Recipe) -> int:
    """Return the recipe's own batch size; raise if its data have no such option."""
    known = options_of("data", recipe.config, recipe.local, recipe.origin)
    if known is None or "batch_size" not in [option.name for option in known]:
        names = ", ".join(option.name for option in known or ()) or "none"
        raise ForgeError(
            f"The data of {target.name_of(recipe)!r} have no option batch_size (they have: {names}). "
            "Add one to the function: def data(batch_size: int = 32)."
        )
    size = recipe.resolved.get("data", {}).get("batch_size")
    if size is None:
        size = next(option.default for option in known if option.name == "batch_size")
    return size if isinstance(size, int) and size > 0 else 32


def _print_batch(report: BatchReport) -> None:
    console = show.console()
    grid = show.table("batch", "memory", "samples/s", "", wrap=[""])
    for column in grid.columns[:3]:
        column.justify = "right"
    for probe in report.probes:
        style = "bold" if probe.size == report.recommended else "" if probe.fits else "dim"
        note = probe.why_not or _note(probe, report)
        speed = f"{probe.speed:,.0f}" if probe.fits else ""
        memory = "" if probe.memory is None else f"{probe.memory / 1e9:.2f} GB"
        grid.add_row(*(Text(text, style) for text in (f"{probe.size:,}", memory, speed, note)))
    console.print()
    console.print(grid)
    console.print()


def _note(probe: Probe, report: BatchReport) -> str:
    notes = {"recommended": report.recommended, "fastest": report.fastest.size, "largest": report.largest}
    return ", ".join(note for note, size in notes.items() if size == probe.size)


def verdict(report: BatchReport, own: int, rate: float | None) -> list[str]:
    """Summarise the table in sentences."""
    bound = report.too_large
    end = f"{bound.size} does not: {bound.why_not.rstrip('.')}" if bound else "a larger one was not tried (--max)"
    lines = [f"{report.largest} is the largest batch that works; {end}."]
    best = report.fastest
    if report.recommended < best.size:
        lines.append(
            f"{report.recommended} is within 3 % of the best speed ({best.speed:,.0f} samples/s at {best.size}), and "
            "makes more updates of the same data."
        )
    elif best.size < report.largest:
        lines.append(f"{best.size} is the fastest; a larger one only makes fewer updates of the same data.")
    elif bound is not None and bound.why_not.startswith(("out of memory", "over")):
        lines.append("Leave some room where samples differ in length, or validation uses larger batches.")
    if report.recommended != own:
        lines.append(_scaling(report.recommended / own, own, rate))
    return lines


def _scaling(factor: float, own: int, rate: float | None) -> str:
    """Explain how to scale the learning rate for another batch size."""
    from forge.tuning.lr import rate_text

    linear, root = f"{factor:g}", f"{math.sqrt(factor):.2g}"
    if rate is not None:
        linear, root = f"{linear} (lr {rate_text(rate * factor)})", f"{root} (lr {rate_text(rate * math.sqrt(factor))})"
    return (
        f"The recipe's own batch is {own}. The linear scaling rule: multiply the learning rate by {linear}, and warm "
        f"up; for Adam and similar optimizers the square root is safer: {root}. `forge tune lr` measures it."
    )


# -- both -------------------------------------------------------------------------------------------------------------


def _lr_option(recipe: Recipe) -> str | None:
    known = options_of("task", recipe.config, recipe.local, recipe.origin) or ()
    return next((name for name in LR_NAMES if name in [option.name for option in known]), None)


def _own_rate(recipe: Recipe) -> float | None:
    name = _lr_option(recipe)
    rate = recipe.resolved.get("task", {}).get(name) if name else None
    return float(rate) if isinstance(rate, (int, float)) else None


def _command(args: Namespace, changes: Mapping[str, Any]) -> str:
    """Return the `forge fit` command for the same target with changed values."""
    return shlex.join([show.command("forge"), "fit", *target.same_target(args, changes)])
